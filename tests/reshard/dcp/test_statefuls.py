"""Programs as `torch.distributed.checkpoint` has them: Statefuls, objects in them, optimizers that never stepped."""

from __future__ import annotations

import argparse
import copy
import io
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as theirs

import reshard
import reshard.dcp as ours
from reshard.errors import KeyMismatchError
from tests import gloo
from tests.reshard.dcp import jobs
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
