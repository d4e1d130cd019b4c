"""Whole state dicts: into any layout by cutting or by broadcast, out of it on one rank or as a stream."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import reshard
from reshard.errors import KeyMismatchError, LayoutError, NormalizationError, RankFailedError, ReshardError
from reshard.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    iter_full,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from tests import gloo
from tests.reshard.state_dict import zoo
from tests.reshard.state_dict.test_layouts import ordered
from tests.reshard.state_dict.test_model import Growing
from tests.same import assert_same

FULL = StateDictOptions(full_state_dict=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
ON_ONE = StateDictOptions(full_state_dict=True, cpu_offload=True)

# 9 hidden rows over tensor parallelism of 2 and FSDP of 2: pieces of 3, 2, 2 and 2 rows, and no formula of
# DTensor's placements says which; nothing here runs forward, so no shape needs to be even
UNEVEN = {"hidden": zoo.HIDDEN, "dim": 7}
LAYOUTS = [
    zoo.plain,
    zoo.ddp,
    zoo.fsdp2,
    zoo.hsdp,
    zoo.tp,
    zoo.tp_all,
    zoo.fsdp2_tp,
    zoo.nested(zoo.checkpointed, zoo.fsdp2_tp, zoo.compiled),
    zoo.fsdp1("FULL_SHARD", False),
    zoo.fsdp1("FULL_SHARD", True),
    zoo.fsdp1("HYBRID_SHARD", True),
]


def fresh(layout: Any, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = layout(zoo.make(seed, **UNEVEN))
    return model, zoo.OPTIMIZERS["adamw"](model.parameters())


def check_whole(layout: Any) -> None:
    model_state, optim_state = zoo.truth("adamw", **UNEVEN)
    first = dist.get_rank() == 0

    cut, cut_optim = fresh(layout, 1)
    set_state_dict(cut, cut_optim, model_state_dict=model_state, optim_state_dict=optim_state, options=FULL)
    found = get_state_dict(cut, cut_optim, options=FULL)
    assert_same((found[0], ordered(found[1])), (model_state, ordered(optim_state)))

    sent, sent_optim = fresh(layout, 2)
    given = {"model_state_dict": model_state if first else {}, "optim_state_dict": optim_state if first else {}}
    report = set_state_dict(sent, sent_optim, **given, options=BROADCAST)
    assert report.missing == report.unexpected == ()
    found = get_state_dict(sent, sent_optim, options=FULL)
    assert_same((found[0], ordered(found[1])), (model_state, ordered(optim_state)))

    on_one = get_state_dict(sent, sent_optim, options=ON_ONE)
    if first:
        assert_same((on_one[0], ordered(on_one[1])), (model_state, ordered(optim_state)))
    else:
        assert on_one == ({}, {})
    assert_same(dict(iter_full(sent)), dict(sorted(model_state.items())))
    last = dist.get_world_size() - 1
    streamed = dict(iter_full(sent, to_rank=last))
    assert_same(streamed, dict(sorted(model_state.items())) if dist.get_rank() == last else {})


def run_whole() -> None:
    for layout in LAYOUTS:
        try:
            check_whole(layout)
        except Exception as error:
            error.add_note(f"layout {layout.__name__}, rank {dist.get_rank()}")
            raise


@pytest.mark.gloo
def test_full_dict_into_uneven_layouts_and_back() -> None:
    gloo.run(run_whole, 4)


def run_relayout() -> None:
    """A sharded dict of one layout goes into a model of another."""
    model_state, optim_state = zoo.truth("adamw", **UNEVEN)
    for before, after in [
        (zoo.fsdp2, zoo.fsdp2_tp),
        (zoo.fsdp2_tp, zoo.plain),
        (zoo.tp, zoo.fsdp1("FULL_SHARD", True)),
        (zoo.fsdp1("FULL_SHARD", False), zoo.hsdp),
    ]:
        source, source_optim = fresh(before, 1)
        set_state_dict(source, source_optim, model_state_dict=model_state, optim_state_dict=optim_state, options=FULL)
        target, target_optim = fresh(after, 2)
        given, given_optim = get_state_dict(source, source_optim)
        set_state_dict(target, target_optim, model_state_dict=given, optim_state_dict=given_optim)
        found = get_state_dict(target, target_optim, options=FULL)
        assert_same((found[0], ordered(found[1])), (model_state, ordered(optim_state)))


@pytest.mark.gloo
def test_sharded_dict_of_one_layout_into_another() -> None:
    gloo.run(run_relayout, 4)


def failing(change: str) -> str:
    """What each rank hears, after checking that nothing was changed."""
    model, optim = fresh(zoo.fsdp2, 1)
    model_state, _ = zoo.truth("adamw", **UNEVEN)
    before = zoo.snapshot(model, optim)
    rank, options = dist.get_rank(), FULL
    if change == "only some ranks":
        model_state = {} if rank == 1 else model_state
    elif change == "rank 0 lacks a name":
        options = BROADCAST
        model_state.pop("layers.1.up.bias")
    elif change == "rank 0 has a name too many":
        options = BROADCAST
        model_state["ghost"] = torch.ones(2)
    elif change == "rank 0 has a wrong shape":
        options = BROADCAST
        model_state["layers.1.up.bias"] = torch.ones(7)
    try:
        set_model_state_dict(model, model_state if rank == 0 or options is FULL else {}, options=options)
    except (KeyMismatchError, RankFailedError) as error:
        assert_same(zoo.snapshot(model, optim), before)
        return str(error)
    return "no error"


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("only some ranks", "embed.weight"),
        ("rank 0 lacks a name", "Missing key: layers.1.up.bias"),
        ("rank 0 has a name too many", "Unexpected key: ghost"),
        ("rank 0 has a wrong shape", f"expected shape ({zoo.HIDDEN},), found (7,)"),
    ],
)
def test_a_bad_full_dict_is_an_error_on_all_ranks_with_nothing_changed(change: str, name: str) -> None:
    for heard in gloo.run(failing, 2, change):
        assert name in heard, heard


def gathering_what_one_rank_lacks() -> str:
    model, _ = fresh(zoo.fsdp2, 1)
    state = get_model_state_dict(model)
    if dist.get_rank() == 1:
        del state["layers.0.up.bias"]
    from reshard.state_dict.collect import collect_model

    try:
        collect_model(state, FULL)
    except NormalizationError as error:
        return str(error)
    return "no error"


@pytest.mark.gloo
def test_gathering_a_name_that_one_rank_lacks_is_an_error_on_all_ranks() -> None:
    heard = gloo.run(gathering_what_one_rank_lacks, 2)
    assert heard[0] == heard[1]
    assert "'layers.0.up.bias' is sharded over ranks [0, 1], but ranks [1] do not have it" in heard[0]


def streamed_by_halves() -> tuple[dict[str, Any], list[str]]:
    """What the upper half of four ranks yields of a model of its own, and what each is refused; the lower takes no
    part in the former."""
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = zoo.make(0, **UNEVEN)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    streamed = dict(iter_full(model, to_rank=3, process_group=halves[1])) if rank > 1 else {}
    heard = []
    whole = zoo.fsdp2(zoo.make(0, **UNEVEN))
    for given, to_rank in ((model, 0 if rank > 1 else 3), (whole, None)):
        try:
            dict(iter_full(given, to_rank=to_rank, process_group=halves[rank // 2]))
        except NormalizationError as error:
            heard.append(str(error))
    return streamed, heard


@pytest.mark.gloo
def test_a_stream_by_some_ranks_of_the_job() -> None:
    found = gloo.run(streamed_by_halves, 4)

    assert_same(found[3][0], dict(sorted(zoo.make(0, **UNEVEN).state_dict().items())))
    assert [streamed for streamed, _ in found[:3]] == [{}, {}, {}]
    for rank, (_, heard) in enumerate(found):
        mine, others = ("0-1", "2-3") if rank < 2 else ("2-3", "0-1")
        assert heard[0] == f"to_rank={3 if rank < 2 else 0} is not among the ranks of this call, ranks {mine}"
        assert f"is sharded over ranks [0, 1, 2, 3], but ranks {others} are not in process_group" in heard[1]


class Custom(zoo.Net):
    """A root with hooks that rename, and a child with extra state."""

    def __init__(self) -> None:
        super().__init__(**UNEVEN)
        self.growing = Growing()
        self.register_state_dict_post_hook(self._save)
        self.register_load_state_dict_pre_hook(self._load)

    @staticmethod
    def _save(module: torch.nn.Module, state: dict, prefix: str, _: Any) -> None:
        state[f"{prefix}output.weight"] = state.pop(f"{prefix}head.weight")

    @staticmethod
    def _load(module: torch.nn.Module, state: dict, prefix: str, *_: Any) -> None:
        state[f"{prefix}head.weight"] = state.pop(f"{prefix}output.weight")


def run_custom() -> None:
    torch.manual_seed(0)
    truth = Custom()
    truth.growing.amax = [1.0, 2.0]
    wanted = {name: value.clone() for name, value in get_model_state_dict(truth).items()}
    assert {"output.weight", "growing._extra_state"} <= set(wanted)
    for layout in (zoo.fsdp2, zoo.nested(zoo.checkpointed, zoo.fsdp2_tp), zoo.ddp):
        for options in (FULL, BROADCAST):
            torch.manual_seed(1)
            model = layout(Custom())
            given = wanted if options is FULL or dist.get_rank() == 0 else {}
            report = set_model_state_dict(model, given, options=options)
            assert report.missing == report.unexpected == ()
            assert report.untouched == ("layers.0.scratch", "layers.1.scratch")
            assert_same(get_model_state_dict(model, options=FULL), wanted)


DIFFERENT: dict[str, tuple[dict[str, Any], ...]] = {
    "cpu_offload": ({"cpu_offload": True}, {}),
    "ignore_frozen_params": ({"ignore_frozen_params": True}, {}),
    "broadcast_from_rank0": ({"broadcast_from_rank0": True}, {}),
    "strict": ({}, {"strict": False}),
}


def with_different_options() -> dict[str, str]:
    """What each verb says where rank 0 is given other options than the others."""
    model, optimizer = fresh(zoo.fsdp2, 1)
    whole = get_state_dict(model, optimizer, options=FULL)
    heard: dict[str, str] = {}
    for name, (first, others) in DIFFERENT.items():
        options = replace(FULL, **(first if dist.get_rank() == 0 else others))
        for verb, call in {
            "get": partial(get_state_dict, model, optimizer),
            "set": partial(set_state_dict, model, optimizer, model_state_dict=whole[0], optim_state_dict=whole[1]),
        }.items():
            try:
                call(options=options)
            except LayoutError as error:
                heard[f"{verb} {name}"] = str(error)
    return heard


@pytest.mark.gloo
def test_options_that_differ_between_ranks_are_an_error_on_all_of_them() -> None:
    heard = gloo.run(with_different_options, 2)

    assert heard[0] == heard[1]
    assert set(heard[0]) == {f"{verb} {name}" for verb in ("get", "set") for name in DIFFERENT}
    for call, said in heard[0].items():
        assert re.search(
            rf"different options.*: {call.split()[1]}: (True|False) on rank 0, (True|False) on rank 1$", said
        )


@pytest.mark.gloo
def test_hooks_and_overrides_inside_parallel_models() -> None:
    gloo.run(run_custom, 4)


def test_options_that_contradict_each_other() -> None:
    with pytest.raises(ReshardError, match="needs full_state_dict=True"):
        StateDictOptions(broadcast_from_rank0=True)


class Nested(torch.nn.Module):
    """Extra state with a tensor in a dict, and parameters whose names have slashes."""

    def __init__(self, names: list[str], value: float) -> None:
        super().__init__()
        self.held = torch.nn.ParameterDict({name: torch.full((2,), value) for name in names})
        self.extra = {"scale": torch.full((2,), value)}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def check_slashes() -> None:
    rank = dist.get_rank()
    model = Nested(["same/a"], float(rank))
    given = get_model_state_dict(Nested(["same/a"], 7.0)) if rank == 0 else {}
    assert set_model_state_dict(model, given, options=BROADCAST).unexpected == ()
    assert_same(get_model_state_dict(model), get_model_state_dict(Nested(["same/a"], 7.0)))

    model = Nested(["same/a", f"own/{rank}"], 1.0)
    optimizer = torch.optim.Adam(model.parameters())
    model.held["same/a"].sum().backward()
    model.held[f"own/{rank}"].sum().backward()
    optimizer.step()
    _, state = get_state_dict(model, optimizer, options=ON_ONE)
    assert set(state["state"]) == ({"held.same/a", "held.own/0"} if rank == 0 else {"held.own/1"})


def test_extra_state_of_tensors_is_broadcast_and_names_may_have_slashes() -> None:
    gloo.run(check_slashes, 2)


def check_conjugated() -> None:
    mesh = init_device_mesh("cpu", (2,))
    values = torch.complex(torch.arange(6.0), torch.ones(6))
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(distribute_tensor(torch.zeros(6, dtype=torch.complex64), mesh, [Shard(0)]))
    set_model_state_dict(model, {"w": values.conj()} if dist.get_rank() == 0 else {}, options=BROADCAST)
    assert_same(get_model_state_dict(model, options=FULL)["w"], values.conj().resolve_conj())

    local = values.chunk(2)[dist.get_rank()].conj()
    model.w = torch.nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)]))
    assert_same(get_model_state_dict(model, options=FULL)["w"], values.conj().resolve_conj())


def test_conjugated_tensors_are_sent() -> None:
    gloo.run(check_conjugated, 2)


def trained(value: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def refused_beside_a_model(change: str) -> str:
    """What each rank hears of an optimizer's dict that does not fit, after checking that nothing was changed."""
    model_state, state = copy.deepcopy(get_state_dict(*trained(5.0)))
    if change == "a stranger":
        state["state"]["stranger"] = {"step": torch.tensor(1.0)}
    else:
        (group,) = state["param_groups"]
        state["param_groups"] = [{**group, "params": [name], "lr": float(name == "bias")} for name in group["params"]]
    model, optimizer = trained(0.0)
    before = zoo.snapshot(model, optimizer)
    given = (model_state, state) if dist.get_rank() == 0 else ({}, {})
    try:
        set_state_dict(model, optimizer, model_state_dict=given[0], optim_state_dict=given[1], options=BROADCAST)
    except ReshardError as error:
        assert_same(zoo.snapshot(model, optimizer), before)
        return str(error)
    return "no error"


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("change", "said"), [("a stranger", "stranger"), ("groups that differ", "different values of 'lr'")]
)
def test_an_optimizer_that_rank_0s_dict_does_not_fit_leaves_the_model_as_it_was(change: str, said: str) -> None:
    for heard in gloo.run(refused_beside_a_model, 2, change):
        assert said in heard


def refused_by_one(change: str) -> str:
    """What each rank hears where rank 0 cannot send its dict, or where it does not fit the optimizer of rank 1."""
    model, optimizer = trained(1.0)
    given: Any = {}
    if change == "a function in a group":
        optimizer.param_groups[0]["schedule"] = lambda step: step
        given = get_optimizer_state_dict(model, optimizer)
    elif dist.get_rank() == 0:
        given = optimizer.state_dict()
    else:
        model = torch.nn.Linear(2, 2, bias=False)
        optimizer = torch.optim.Adam(model.parameters())
    try:
        set_optimizer_state_dict(model, optimizer, given, options=BROADCAST)
    except ReshardError as error:
        return str(error)
    return "no error"


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("a function in a group", "a value of the dict of rank 0 cannot be sent to other ranks"),
        ("ids of another stage", "lists 2 parameter ids, but the optimizer has 1"),
    ],
)
def test_what_one_rank_refuses_of_a_broadcast_all_refuse(change: str, said: str) -> None:
    for heard in gloo.run(refused_by_one, 2, change, timeout_s=60.0):
        assert said in heard


def refused_in_another_layout(what: str) -> str:
    """What each rank hears where a sharded dict is to be laid out anew, and that of rank 1 has something of its own."""
    mesh = init_device_mesh("cpu", (2,))

    def build(axis: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(2, 2, bias=False)
        model.weight = torch.nn.Parameter(distribute_tensor(torch.zeros(2, 2), mesh, [Shard(axis)]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        return model, optimizer

    model, optimizer = build(0)
    flat = StateDictOptions(flatten_optimizer_state_dict=what == "flat")
    state, of_optimizer = get_state_dict(*build(1), options=flat)
    if dist.get_rank() == 1:
        extra = {"x": torch.ones(1)}
        state = {**state, **extra}
        if what == "flat":
            of_optimizer["state.x.momentum_buffer"] = extra["x"]
        else:
            of_optimizer["state"]["x"] = extra
    before = zoo.snapshot(model, optimizer)
    try:
        if what == "model":
            set_model_state_dict(model, state)
        else:
            set_optimizer_state_dict(model, optimizer, of_optimizer)
    except ReshardError as error:
        assert_same(zoo.snapshot(model, optimizer), before)
        return str(error)
    return "no error"


@pytest.mark.gloo
@pytest.mark.parametrize("what", ["model", "nested", "flat"])
def test_what_one_rank_refuses_of_another_layout_all_refuse(what: str) -> None:
    for heard in gloo.run(refused_in_another_layout, 2, what, timeout_s=60.0):
        assert "Unexpected key: x" in heard


class OfEachRank(torch.optim.Optimizer):
    """Keeps beside a shard what each rank has its own value of."""

    def __init__(self, parameters: Any, key: str) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.key = key

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        own = 1 + dist.get_rank()
        for parameter in (p for p in self.param_groups[0]["params"] if p.grad is not None and p.numel()):
            values = {"tensor": torch.tensor(own), "row": torch.full((2,), own), "number": own}
            self.state[parameter] = {"sum": torch.ones_like(parameter), "step": torch.tensor(1.0)}
            if self.key:
                self.state[parameter][self.key] = values[self.key]


def states_of_each_rank(name: str) -> dict[str, list[str]]:
    layout = next(layout for layout in LAYOUTS if layout.__name__ == name)
    found: dict[str, list[str]] = {}
    for key in ("tensor", "row", "number", ""):
        model = layout(zoo.make(0, dim=8, hidden=8))
        optimizer = OfEachRank(model.parameters(), key)
        zoo.train(model, optimizer, 1)
        for options in (FULL, ON_ONE):
            try:
                state = get_optimizer_state_dict(model, optimizer, options=options)
                found.setdefault(key, []).append(str(len(state and state["state"])))
            except NormalizationError as error:
                found.setdefault(key, []).append(str(error))
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("layout", [zoo.fsdp2, *(zoo.fsdp1("FULL_SHARD", original) for original in (False, True))])
def test_unsharded_state_of_sharded_parameters_that_differs_between_ranks_is_no_full_state(layout: Any) -> None:
    for found in gloo.run(states_of_each_rank, 2, layout.__name__):
        same = found.pop("")
        assert same[0] != "0"
        assert all(said.isdecimal() for said in same)
        for key, said in found.items():
            assert all(f'{key!r}" is not sharded, and rank 1 has another value than rank 0' in one for one in said)


def steps_of_what_few_ranks_hold(path: str) -> tuple[dict[str, float], dict[str, float]]:
    """Adagrad begins with state, also where a rank holds no element of a parameter, and its step count stays behind."""
    model = zoo.fsdp1("FULL_SHARD", True)(zoo.make(0))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    zoo.train(model, optimizer, 2)
    state = get_optimizer_state_dict(model, optimizer, options=FULL)["state"]
    reshard.save({"optim": get_optimizer_state_dict(model, optimizer)}, path)
    saved = reshard.open(path)
    steps = {name: float(saved[f"optim.state.{name}.step"][...]) for name in state}
    return {name: float(values["step"]) for name, values in state.items()}, steps


@pytest.mark.gloo
def test_step_counts_are_of_ranks_that_hold_elements(tmp_path: Any) -> None:
    for counts in gloo.run(steps_of_what_few_ranks_hold, 2, str(tmp_path / "c")):
        for steps in counts:
            assert len(steps) == 12
            assert set(steps.values()) == {2.0}
