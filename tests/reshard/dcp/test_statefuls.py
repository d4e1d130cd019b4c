"""Programs as `torch.distributed.checkpoint` has them: Statefuls, objects in them, optimizers that never stepped."""

from __future__ import annotations

import argparse
import copy
import io
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as theirs
import torch.distributed.checkpoint.state_dict as their_state

import reshard
import reshard.dcp as ours
from reshard.dcp.state_dict import get_optimizer_state_dict
from reshard.errors import KeyMismatchError
from tests import gloo
from tests.reshard.dcp import jobs
from tests.reshard.state_dict.torch_optimizers import CLASSES, make, takes
from tests.same import assert_same
from tests.torch_releases import FSDP2_TRAINS_ON_CPUS, requires

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Log:
    """A Stateful as training programs write them, with bytes in a file object."""

    def __init__(self, losses):
        self.losses = losses

    def state_dict(self):
        file = io.BytesIO()
        torch.save(self.losses, file)
        return {"losses": file, "device": torch.device("cpu"), "where": [Path("a/b")], "flags": argparse.Namespace(x=1)}

    def load_state_dict(self, state):
        state["losses"].seek(0)
        self.losses = torch.load(state["losses"])
        self.rest = (state["device"], state["where"], state["flags"])


@pytest.mark.parametrize("planner", [None, ours.DefaultLoadPlanner, theirs.DefaultLoadPlanner])
def test_objects_come_back_in_the_type_that_is_live(tmp_path, planner):
    ours.save({"log": Log([1.0, 2.0])}, checkpoint_id=tmp_path)
    reader = ours.FileSystemReader(tmp_path) if planner is None else theirs.FileSystemReader(tmp_path)
    log = Log([])

    ours.load({"log": log}, storage_reader=reader, planner=planner and planner())

    assert log.losses == [1.0, 2.0]
    assert log.rest == (torch.device("cpu"), [Path("a/b")], argparse.Namespace(x=1))


def test_objects_come_back_in_the_live_type_from_our_load_too(tmp_path):
    ours.save({"log": Log([1.0]).state_dict()}, checkpoint_id=tmp_path)
    target = {"log": Log([]).state_dict()}

    reshard.load(target, tmp_path)

    target["log"]["losses"].seek(0)
    assert torch.load(target["log"]["losses"]) == [1.0]
    assert target["log"]["device"] == torch.device("cpu")


@pytest.mark.gloo
def test_statefuls_are_asked_in_the_same_order(tmp_path):
    assert all(gloo.run(jobs.statefuls_in_another_order, 2, str(tmp_path), timeout_s=60))


class App:
    """Model and optimizer as one Stateful, as tutorials have it."""

    def __init__(self, flat=False, full=False):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.options = reshard.StateDictOptions(flatten_optimizer_state_dict=flat, full_state_dict=full)

    def train(self):
        self.model(torch.arange(4.0)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state_dict(self):
        model, optim = reshard.get_state_dict(self.model, self.optimizer, options=self.options)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state):
        reshard.set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=self.options,
        )


@pytest.mark.parametrize("kind", [{}, {"flat": True}, {"full": True}], ids=str)
@pytest.mark.parametrize("reader", [ours.FileSystemReader, theirs.FileSystemReader])
def test_a_fresh_optimizer_in_a_stateful_gets_its_state(tmp_path, kind, reader):
    """Nothing steps it to make places for what is loaded, and nothing is lost for that."""
    app = App(**kind)
    app.train()
    ours.save({"app": app}, checkpoint_id=tmp_path)
    again = App(**kind)
    again.optimizer.step = None

    ours.load({"app": again}, storage_reader=reader(tmp_path))

    assert_same(again.optimizer.state_dict(), app.optimizer.state_dict())
    assert_same(again.model.state_dict(), app.model.state_dict())


def test_state_of_an_optimizer_that_cannot_say_where_it_goes_is_not_lost(tmp_path):
    app = App()
    app.train()
    ours.save({"optimizer": app.optimizer}, checkpoint_id=tmp_path)

    for reader in (ours.FileSystemReader(tmp_path), theirs.FileSystemReader(tmp_path)):
        with pytest.raises(KeyMismatchError, match=r"'optimizer.state' is empty"):
            ours.load({"optimizer": App().optimizer}, storage_reader=reader)
        ours.load(
            {"optimizer": App().optimizer},
            storage_reader=reader,
            planner=ours.DefaultLoadPlanner(allow_partial_load=True),
        )


def test_a_fresh_state_dict_is_a_plain_one(tmp_path):
    state = App().state_dict()["optim"]
    assert state["state"] == {}
    assert type(copy.deepcopy(state)["state"]) is dict
    torch.save(state, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt") == state
    app = App()
    app.train()
    reshard.save({"app": app.state_dict()}, tmp_path / "c")
    target = {"app": App().state_dict()}

    with pytest.raises(KeyMismatchError):
        reshard.load({**target, "more": 1}, tmp_path / "c")
    assert target["app"]["optim"]["state"] == {}
    assert not reshard.load(target, tmp_path / "c", dry_run=True).unexpected
    assert target["app"]["optim"]["state"] == {}
    reshard.load(target, tmp_path / "c")
    assert_same(target["app"]["optim"]["state"], app.state_dict()["optim"]["state"])


@pytest.mark.gloo
@pytest.mark.parametrize(
    "kind",
    [
        *("fsdp1 flat", "fsdp1 original"),
        pytest.param("fsdp2", marks=requires(FSDP2_TRAINS_ON_CPUS, "trains nothing under FSDP2 on CPUs")),
    ],
)
def test_a_fresh_sharded_optimizer_gets_its_state(tmp_path, kind):
    assert all(gloo.run(jobs.fresh_sharded_optimizer, 2, str(tmp_path), kind))


FLAT = reshard.StateDictOptions(flatten_optimizer_state_dict=True)
BEGIN_WITH_STATE = [name for name in CLASSES if name not in ("Adafactor", "LBFGS", "SGD")]


@pytest.mark.parametrize("name", BEGIN_WITH_STATE)
def test_what_the_face_offers_of_a_fresh_optimizer_is_what_it_begins_with(name):
    """As torch offers it, but nothing is stepped: going on from it is the same as beginning."""

    def build():
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2, bias=takes(name, torch.zeros(1)))
        return model, make(name, model.parameters(), {"amsgrad": True} if name in ("Adam", "AdamW") else {})

    def stepped(model, optimizer):
        for _ in range(2):
            gradient = torch.arange(6.0).reshape(2, 3)
            model.weight.grad = gradient.to_sparse() if name == "SparseAdam" else gradient
            optimizer.step()
        return get_optimizer_state_dict(model, optimizer)["state"]["weight"] | {"weight": model.weight.detach()}

    (plain, begins), (model, optimizer), (theirs_, their_optimizer) = build(), build(), build()
    offered = get_optimizer_state_dict(model, optimizer)
    if name != "SparseAdam":  # of which torch's own way takes a dense gradient
        made = their_state.get_optimizer_state_dict(theirs_, their_optimizer)
        assert {k: sorted(v) for k, v in offered["state"].items()} == {k: sorted(v) for k, v in made["state"].items()}

    assert offered["state"]
    assert name == "Adagrad" or not optimizer.state
    reshard.set_optimizer_state_dict(model, optimizer, offered)
    assert_same(stepped(model, optimizer), stepped(plain, begins))


@pytest.mark.parametrize("options", [None, FLAT])
def test_a_load_keeps_of_what_is_offered_what_was_saved(tmp_path, options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    optimizer, fresh = (torch.optim.AdamW(model.parameters()) for _ in range(2))
    model[0](torch.ones(1, 3)).sum().backward()  # the second layer never has a gradient
    optimizer.step()
    ours.save({"o": get_optimizer_state_dict(model, optimizer, options=options)}, checkpoint_id=tmp_path)
    target = {"o": get_optimizer_state_dict(model, fresh, options=options)}
    with pytest.raises(KeyMismatchError):
        ours.load({**target, "more": torch.ones(1)}, checkpoint_id=tmp_path)
    assert len(
        [key for key in (target["o"] if options else target["o"]["state"]) if "1.bias" in key and "group" not in key]
    )

    ours.load(target, checkpoint_id=tmp_path)

    report = reshard.set_optimizer_state_dict(model, fresh, target["o"])
    assert report.without_state == ("1.weight", "1.bias")
    assert_same(fresh.state_dict(), optimizer.state_dict())


def test_groups_of_another_pipeline_stage_are_refused_with_the_way_round():
    stages = [torch.nn.ModuleDict({str(i): torch.nn.Linear(2, 2)}) for i in range(2)]
    optimizers = [torch.optim.AdamW(stage.parameters()) for stage in stages]
    first, second = (get_optimizer_state_dict(*pair) for pair in zip(stages, optimizers))
    with pytest.raises(KeyMismatchError, match="flatten_optimizer_state_dict=True"):
        reshard.set_optimizer_state_dict(
            stages[1], optimizers[1], {"state": second["state"], "param_groups": first["param_groups"]}
        )
