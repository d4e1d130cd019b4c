"""Optimizers that keep state where torch's own keep none: beside their groups, in groups, under names, in other shapes.

Such are heavyball's, optimi's, pytorch-optimizer's, and Prodigy: `tests/reshard/integrations/test_other_optimizers.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import reshard
from examples import optimizer_hooks
from reshard.errors import FormatError, KeyMismatchError, NormalizationError
from tests.same import same

FLAT = reshard.StateDictOptions(flatten_optimizer_state_dict=True)


class Base(torch.optim.Optimizer):
    """Steps by a number that a subclass keeps somewhere."""

    def __init__(self, params: Any, lr: Any = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def factor(self, group: dict[str, Any], p: torch.Tensor) -> Any:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * self.factor(group, p) * (p + 1))


class Counting(Base):
    """Has a count and a table in its own state dict, beside the state and the groups."""

    def __init__(self, params: Any, lr: Any = 0.1) -> None:
        super().__init__(params, lr)
        self.count, self.table = 0, {"last": torch.zeros(2)}

    def factor(self, group: dict[str, Any], p: torch.Tensor) -> Any:
        self.count += 1
        self.table["last"][0] = self.count
        return 1 / self.count

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count, "table": self.table}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.count, self.table = state_dict["count"], copy.deepcopy(state_dict["table"])


class InGroups(Base):
    """Adds tensors to its groups as it steps, and makes its learning rate one."""

    def factor(self, group: dict[str, Any], p: torch.Tensor) -> Any:
        group["seen"] = group.get("seen", torch.zeros(())) + p.abs().sum()
        group["lr"] = torch.as_tensor(group["lr"])
        return 1 / group["seen"]


class OfTheWhole(Base):
    """Keeps state under keys that are no parameter: a tensor, and a dict."""

    def factor(self, group: dict[str, Any], p: torch.Tensor) -> Any:
        self.state["k"] = self.state.get("k", torch.zeros(1)) + 1
        ema = self.state.setdefault("ema", {"short": 0.0})
        ema["short"] = 0.5 * ema["short"] + float(p.abs().sum())
        return 1 / (self.state["k"] + ema["short"])


class ByRows(Base):
    """One number for each row, which for vectors has the shape of the parameter."""

    def factor(self, group: dict[str, Any], p: torch.Tensor) -> Any:
        own = self.state[p].setdefault("rows", torch.zeros_like(p.sum(1, keepdim=True) if p.dim() > 1 else p))
        own += 1
        return 1 / own


def of_torch(params: Any, lr: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, foreach=False)


class InPart(Base):
    """Its constructor makes masks, and its first step the rest, which has as many elements as the mask has."""

    def __init__(self, params: Any, lr: Any = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["mask"] = p.detach() > 0

    def factor(self, group: dict[str, Any], p: torch.Tensor) -> Any:
        own = self.state[p]
        own["sum"] = own.get("sum", 0) + p[own["mask"]].square() + 1
        return torch.zeros_like(p).masked_scatter(own["mask"], 1 / own["sum"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for own in self.state.values():
            own["mask"] = own["mask"].bool()


class WithEmptyDicts(Base):
    """Makes dicts that are empty at first, and uses them later."""

    def factor(self, group: dict[str, Any], p: torch.Tensor) -> Any:
        own = self.state[p]
        if not own:
            own |= {"by_kind": {"sum": torch.zeros(()), "past": {}}, "memo": {}}
        own["by_kind"]["sum"] += 1 + len(own["memo"]) + len(own["by_kind"]["past"])
        return 1 / own["by_kind"]["sum"]


class Projector:
    """Has a tensor and a number, as GaLore's has."""

    def __init__(self) -> None:
        self.basis, self.rank = torch.zeros(2), 3


class OfObjects(Base):
    """Keeps an object as state, and one as a setting that its constructor makes."""

    def __init__(self, params: Any, lr: Any = 0.1) -> None:
        super().__init__(params, lr)
        self.param_groups[0]["settings"] = Projector()

    def factor(self, group: dict[str, Any], p: torch.Tensor) -> Any:
        own = self.state[p].setdefault("projector", Projector())
        own.basis[0] += 1
        return 1 / (own.basis[0] + group["settings"].rank)


def with_hooks(params: Any, lr: Any = 0.1) -> OfObjects:
    """The hooks of the example."""
    optimizer = OfObjects(params, lr)
    optimizer_hooks.save_as_dicts(optimizer, Projector)
    optimizer_hooks.omit(optimizer, "settings")
    return optimizer


KINDS: list[Callable[..., Base]] = [Counting, InGroups, OfTheWhole, ByRows, InPart, with_hooks]


def job(kind: Callable[..., Base], seed: int, steps: int, lr: Any = 0.1) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.LayerNorm(4))
    optimizer = kind(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.step()
    return model, optimizer


def through_memory(source: Any, target: Any, path: Path) -> None:
    weights, states = copy.deepcopy(reshard.get_state_dict(*source))
    reshard.set_state_dict(*target, model_state_dict=weights, optim_state_dict=states)


def through_files(source: Any, target: Any, path: Path, options: Any = None) -> None:
    reshard.save(dict(zip("mo", reshard.get_state_dict(*source, options=options))), path)
    state = dict(zip("mo", reshard.get_state_dict(*target, options=options)))
    assert reshard.load(state, path).ok
    reshard.set_state_dict(*target, model_state_dict=state["m"], optim_state_dict=state["o"], options=options)


def flat_through_files(source: Any, target: Any, path: Path) -> None:
    through_files(source, target, path, FLAT)


def through_destinations(source: Any, target: Any, path: Path) -> None:
    reshard.save(dict(zip(("m", "optim"), reshard.get_state_dict(*source))), path)
    state = {"m": reshard.get_model_state_dict(target[0]), "optim": reshard.optimizer_destinations(*target, path)}
    assert reshard.load(state, path).ok
    reshard.set_state_dict(*target, model_state_dict=state["m"], optim_state_dict=state["optim"])


def through_a_manager(source: Any, target: Any, path: Path) -> None:
    for (model, optimizer), call in ((source, "save"), (target, "restore")):
        with reshard.CheckpointManager(path, every=reshard.Every(steps=1)) as manager:
            state = {"model": model, "optim": optimizer}
            assert manager.save(1, state) if call == "save" else manager.restore(state)


def through_the_drop_in(source: Any, target: Any, path: Path, options: Any = None) -> None:
    import reshard.dcp as dcp
    from reshard.dcp import state_dict as theirs

    dcp.save(dict(zip("mo", theirs.get_state_dict(*source, options=options))), checkpoint_id=path)
    state = dict(zip("mo", theirs.get_state_dict(*target, options=options)))
    dcp.load(state, checkpoint_id=path)
    theirs.set_state_dict(*target, model_state_dict=state["m"], optim_state_dict=state["o"], options=options)


def flat_through_the_drop_in(source: Any, target: Any, path: Path) -> None:
    through_the_drop_in(source, target, path, FLAT)


WAYS = [
    through_memory,
    through_files,
    flat_through_files,
    through_destinations,
    through_a_manager,
    through_the_drop_in,
    flat_through_the_drop_in,
]


ON_A_HOST = pytest.mark.host_only(
    "state of no parameter is loaded to the host, and a checkpoint does not say where it was"
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=ON_A_HOST) if kind is OfTheWhole else kind for kind in KINDS]
)
def test_a_fresh_optimizer_goes_on_as_if_nothing_had_happened(
    kind: Callable[..., Base], way: Callable[..., None], tmp_path: Path
) -> None:
    source, target = job(kind, 0, 3), job(kind, 1, 0)
    way(source, target, tmp_path / "x")
    for _ in range(2):
        source[1].step()
        target[1].step()
    assert same(target[0].state_dict(), source[0].state_dict())
    assert same(target[1].state_dict(), source[1].state_dict())


@pytest.mark.parametrize(
    "way", [way for way in WAYS if "drop_in" not in way.__name__]
)  # DCP's files have no empty dicts
def test_empty_dicts_within_state_are_kept(way: Callable[..., None], tmp_path: Path) -> None:
    test_a_fresh_optimizer_goes_on_as_if_nothing_had_happened(WithEmptyDicts, way, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_has_stepped_takes_the_saved_state_too(kind: Callable[..., Base], tmp_path: Path) -> None:
    source, target = job(kind, 0, 3), job(kind, 1, 2)
    if kind is InPart:  # its masks chose other numbers of elements
        with pytest.raises(KeyMismatchError, match=r"0\.weight\.sum: saved with shape"):
            through_files(source, target, tmp_path / "x")
        target = job(kind, 0, 1)
    through_files(source, target, tmp_path / "x")
    source[1].step()
    target[1].step()
    assert same(target[0].state_dict(), source[0].state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_the_flat_form_has_it_too(kind: Callable[..., Base]) -> None:
    source, target = job(kind, 0, 3), job(kind, 1, 0)
    flat = copy.deepcopy(reshard.get_optimizer_state_dict(*source, options=FLAT))
    reshard.set_model_state_dict(target[0], source[0].state_dict())
    reshard.set_optimizer_state_dict(*target, flat, options=FLAT)
    source[1].step()
    target[1].step()
    assert same(target[0].state_dict(), source[0].state_dict())


def test_what_is_beside_state_and_groups_is_a_field_of_each_group() -> None:
    model, optimizer = job(Counting, 0, 2)
    state = reshard.get_optimizer_state_dict(model, optimizer)
    assert [group["extra_state"]["count"] for group in state["param_groups"]] == [12]

    plain = reshard.get_optimizer_state_dict(model, Base(model.parameters()))
    report = reshard.set_optimizer_state_dict(model, optimizer, plain)
    assert report.kept_fields == ("0.0.extra_state",)
    assert optimizer.count == 12
    other = Base(model.parameters())
    assert "extra_state" in reshard.set_optimizer_state_dict(model, other, state).unexpected
    assert "extra_state" not in other.param_groups[0]


def test_an_optimizer_s_own_dict_by_ids_or_normalized_keeps_what_is_beside() -> None:
    source, target, third = job(Counting, 0, 3), job(Counting, 1, 0), job(Counting, 2, 0)
    raw = copy.deepcopy(source[1].state_dict())
    reshard.set_optimizer_state_dict(*target, raw)
    order = reshard.fqn_map(*source).parameter_order()
    reshard.set_optimizer_state_dict(*third, reshard.normalize(raw, order=order))
    assert target[1].count == third[1].count == source[1].count == 18


def test_groups_of_optimizers_with_other_counts_do_not_become_one() -> None:
    model, optimizer = job(Counting, 0, 1)
    first, last = list(model.parameters())[:2], list(model.parameters())[2:]
    two = [Counting(first), Counting(last)]
    two[0].count = 5
    state = reshard.get_optimizer_state_dict(model, two)
    merged = Counting([{"params": first}, {"params": last}])
    with pytest.raises(NormalizationError, match=r"different state beside that of their parameters .*'extra_state'"):
        reshard.set_optimizer_state_dict(model, merged, state)
    with pytest.raises(NormalizationError, match="different values of 'extra_state'"):
        reshard.set_optimizer_state_dict(model, optimizer, state)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("saved", [0.25, torch.tensor(0.25)])
@pytest.mark.parametrize("live", [0.5, torch.tensor(0.5)])
def test_a_rate_may_be_a_tensor_where_the_optimizer_has_stepped(
    way: Callable[..., None], saved: Any, live: Any, tmp_path: Path
) -> None:
    """The rate keeps its form, as in an optimizer that has not, and takes the value."""
    source, target = job(of_torch, 0, 1, lr=saved), job(of_torch, 1, 1, lr=live)
    for model, optimizer in (source, target):
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
    way(source, target, tmp_path / "x")
    (group,) = target[1].param_groups
    assert type(group["lr"]) is type(live)
    assert float(group["lr"]) == 0.25


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("saved", [0.25, torch.tensor(0.25)])
@pytest.mark.parametrize("live", [0.5, torch.tensor(0.5)])
@pytest.mark.parametrize("groups", [(1, 2), (2, 1), (1, 1)])
def test_a_rate_may_be_a_tensor_on_either_side_and_groups_may_be_others(
    flat: bool, saved: Any, live: Any, groups: tuple[int, int], tmp_path: Path
) -> None:
    options = FLAT if flat else None

    def made(rate: Any, count: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
        held = list(model.parameters())
        parts = [held] if count == 1 else [held[:2], held[2:]]
        return model, torch.optim.AdamW([{"params": part} for part in parts], lr=rate, foreach=False)

    source, target = made(saved, groups[0]), made(live, groups[1])
    source[0](torch.ones(1, 3)).sum().backward()
    source[1].step()
    reshard.save({"o": reshard.get_optimizer_state_dict(*source, options=options)}, tmp_path / "x")
    state = {"o": reshard.get_optimizer_state_dict(*target, options=options)}
    assert reshard.load(state, tmp_path / "x").ok
    reshard.set_optimizer_state_dict(*target, state["o"], options=options)
    for group in target[1].param_groups:
        assert type(group["lr"]) is type(live)
        assert float(group["lr"]) == 0.25


def test_groups_are_as_before_after_a_load_that_failed_or_only_planned(tmp_path: Path) -> None:
    source, target = job(InGroups, 0, 2), job(InGroups, 1, 0)
    state = dict(zip("mo", reshard.get_state_dict(*source)))
    reshard.save(state, tmp_path / "x")
    live = reshard.get_optimizer_state_dict(*target)
    before = live["param_groups"]
    assert reshard.load({"o": live}, tmp_path / "x", strict=False, dry_run=True).mismatched == ()
    assert live["param_groups"] is before
    with pytest.raises(KeyMismatchError):
        reshard.load({"o": live, "other": 1}, tmp_path / "x")
    assert live["param_groups"] is before


def test_state_of_a_name_that_nothing_has_is_still_refused(tmp_path: Path) -> None:
    """In one optimizer of torch, in several, and where a saved group lists it."""
    model, optimizer = job(OfTheWhole, 0, 1)
    state = reshard.get_optimizer_state_dict(model, optimizer)
    held = list(model.parameters())
    for others in (torch.optim.SGD(held), [OfTheWhole(held[:2]), OfTheWhole(held[2:])]):
        with pytest.raises(KeyMismatchError, match="Unexpected key: k, the model has no parameter"):
            reshard.set_optimizer_state_dict(model, others, state)
    listed = copy.deepcopy(state)
    listed["state"]["gone"] = {"x": torch.ones(1)}
    listed["param_groups"][0]["params"].append("gone")
    with pytest.raises(KeyMismatchError, match="Unexpected key: gone, the model has no parameter"):
        reshard.set_optimizer_state_dict(model, OfTheWhole(held), listed)
    reshard.save({"o": listed}, tmp_path / "x")
    fresh = {"o": reshard.get_optimizer_state_dict(model, OfTheWhole(held))}
    with pytest.raises(KeyMismatchError, match=r"o\.state\.gone\.x"):
        reshard.load(fresh, tmp_path / "x")


def test_one_matrix_of_another_shape_is_refused_whatever_vectors_have() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = copy.deepcopy(reshard.get_optimizer_state_dict(model, optimizer))
    state["state"]["0.weight"]["exp_avg"] = torch.zeros(4, 1)
    with pytest.raises(KeyMismatchError, match=r"0.weight: its 'exp_avg' in optimizer 0 has shape \(4, 1\)"):
        reshard.set_optimizer_state_dict(model, optimizer, state)


class Preconditioned(torch.optim.Optimizer):
    """Has a square state for the rows of each parameter, as Shampoo has, or a part of its rows, as GaLore has."""

    def __init__(self, params: Any, rank: int = 0) -> None:
        super().__init__(params, {"lr": 0.1, "rank": rank})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                square = torch.full((len(p), len(p)), float(len(self.state)))
                self.state[p] = {
                    "L": square,
                    "m": torch.ones_like(p[: group["rank"] or len(p)]),
                    "step": torch.ones(()),
                }


@pytest.mark.parametrize("rank", [0, 2])
def test_states_of_other_shapes_than_the_parameters_are_no_misfits(rank: int, tmp_path: Path) -> None:
    """Most parameters are square, and so is each state of theirs."""

    def made() -> tuple[nn.Module, Preconditioned]:
        model = nn.ModuleList([*(nn.Linear(4, 4, bias=False) for _ in range(4)), nn.Linear(4, 6, bias=False)])
        *square, last = model.parameters()
        return model, Preconditioned([{"params": square}, {"params": [last], "rank": rank}])

    (model, optimizer), (other, others) = made(), made()
    optimizer.step()
    state = reshard.get_optimizer_state_dict(model, optimizer)
    assert reshard.set_optimizer_state_dict(other, others, state).missing == ()
    assert reshard.compare(reshard.get_optimizer_state_dict(other, others), state).ok
    reshard.save({"m": model, "o": optimizer}, tmp_path / "x")
    other, others = made()
    assert reshard.load({"m": other, "o": others}, tmp_path / "x").ok

    state["state"]["4.weight"]["L"] = torch.zeros(5, 5)
    state["state"]["3.weight"]["L"] = torch.zeros(5, 5)
    with pytest.raises(KeyMismatchError, match=r"3.weight: its 'L' in optimizer 0 has shape \(5, 5\)"):
        reshard.set_optimizer_state_dict(other, others, state)


class Quantized(torch.optim.Optimizer):
    """Has a table of 4 values beside its state, as bitsandbytes has one of 256, and counts its steps in an int."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"state1": torch.ones_like(p, dtype=torch.uint8), "qmap1": torch.ones(4), "step": 1}


@pytest.mark.parametrize("steps", [0, 1])
def test_a_table_of_one_size_is_no_misfit_where_most_parameters_have_that_size(steps: int) -> None:
    made = [nn.ParameterList([torch.ones(4), torch.ones(4), torch.ones(4), torch.ones(1)]) for _ in range(2)]
    optimizer, other = map(Quantized, made)
    optimizer.step()
    if steps:
        other.step()
        del other.state[made[1][3]]  # as on a rank that has no element of it
    state = reshard.get_optimizer_state_dict(made[0], optimizer)
    reshard.set_optimizer_state_dict(made[1], other, state)
    assert reshard.compare(reshard.get_optimizer_state_dict(made[1], other), state).ok
    state = copy.deepcopy(state)
    state["state"]["3"]["state1"] = torch.ones(4, dtype=torch.uint8)
    state["state"]["3"]["qmap1"] = torch.ones(2)
    with pytest.raises(KeyMismatchError, match=r"Mismatched: 3: its 'state1' in optimizer 0 has shape \(4,\)"):
        reshard.set_optimizer_state_dict(made[1], other, state)


def test_objects_without_hooks_are_refused_with_the_way_round(tmp_path: Path) -> None:
    model, optimizer = job(OfObjects, 0, 1)
    state = reshard.get_optimizer_state_dict(model, optimizer)
    with pytest.raises(FormatError, match=r"projector' .*Projector is not plain data.*'Limits' in docs"):
        reshard.save({"optim": {"state": state["state"]}}, tmp_path / "x")
    with pytest.raises(FormatError, match=r"settings' .*Projector is not plain data.*'Limits' in docs"):
        reshard.save({"optim": {"param_groups": state["param_groups"]}}, tmp_path / "x")


@pytest.mark.parametrize("state", [{"m": {"x": 1}, "m.x": 2}, {"m.x": 2, "m": {"x": 1}}, {1: 1, "1": 2}])
def test_state_with_two_entries_of_one_flat_name_is_refused_in_that_form(state: dict[Any, Any]) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight] = state
    assert reshard.get_optimizer_state_dict(model, optimizer)["state"]["weight"] == state
    with pytest.raises(NormalizationError, match="two entries of the optimizer state of 'weight' have the same name"):
        reshard.get_optimizer_state_dict(model, optimizer, options=FLAT)


def with_rates(several: bool, *rates: float) -> tuple[nn.Module, Any]:
    """With one tensor as the rate of all groups, until the groups are given rates of their own."""
    model, one = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)), torch.tensor(0.5)
    parts = [{"params": [*part.parameters()]} for part in model]
    held = [torch.optim.AdamW(of, lr=one, foreach=False) for of in ([[part] for part in parts] if several else [parts])]
    for group, rate in zip(groups_of(held), rates):
        group["lr"] = torch.tensor(rate)
    model(torch.ones(1, 3)).sum().backward()
    for optimizer in held:
        optimizer.step()
    return model, held if several else held[0]


def groups_of(optimizers: Any) -> list[dict[str, Any]]:
    held = optimizers if isinstance(optimizers, list) else [optimizers]
    return [group for optimizer in held for group in optimizer.param_groups]


@pytest.mark.parametrize(
    ("way", "several"),
    [*((way, False) for way in WAYS), *((way, True) for way in (through_memory, through_files, flat_through_files))],
)
def test_groups_that_share_one_tensor_as_their_rate_get_each_its_own(
    way: Callable[..., None], several: bool, tmp_path: Path
) -> None:
    source, target = with_rates(several, 0.25, 0.125), with_rates(several)
    way(source, target, tmp_path / "x")
    assert [float(group["lr"]) for group in groups_of(target[1])] == [0.25, 0.125]
    assert [float(group["lr"]) for group in groups_of(source[1])] == [0.25, 0.125]


def test_a_shared_rate_stays_with_a_group_of_which_none_was_saved() -> None:
    source, target = with_rates(False, 0.25, 0.125), with_rates(False)
    state = reshard.get_optimizer_state_dict(*source)
    del state["param_groups"][1]["lr"]
    reshard.set_optimizer_state_dict(*target, state)
    assert [float(group["lr"]) for group in groups_of(target[1])] == [0.25, 0.5]


def test_groups_that_share_one_tensor_as_their_rate_keep_it_where_all_have_one() -> None:
    source, target = with_rates(False, 0.25, 0.25), with_rates(False)
    first, second = groups_of(target[1])
    reshard.set_optimizer_state_dict(*target, reshard.get_optimizer_state_dict(*source))
    assert first["lr"] is second["lr"]
    assert float(first["lr"]) == 0.25


@pytest.mark.parametrize("expanded", [(0,), (1,), (0, 1)])
def test_state_whose_elements_share_memory_is_replaced_by_what_was_saved(expanded: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(3, 3, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parameters = [*model.parameters()]
    for number, parameter in enumerate(parameters):
        rows = torch.zeros(1, len(parameter)).expand(parameter.shape)
        optimizer.state[parameter]["momentum_buffer"] = rows if number in expanded else rows.clone()
    state = copy.deepcopy(reshard.get_optimizer_state_dict(model, optimizer))
    for number, parameter in enumerate(parameters):
        state["state"][f"{number}.weight"]["momentum_buffer"] = torch.arange(parameter.numel() * 1.0).view_as(parameter)
    reshard.set_optimizer_state_dict(model, optimizer, state)
    for number, parameter in enumerate(parameters):
        found = optimizer.state[parameter]["momentum_buffer"]
        assert torch.equal(found, state["state"][f"{number}.weight"]["momentum_buffer"])
        found.add_(1)


@pytest.mark.parametrize("state", [{"ema.fast": torch.ones(3)}, {"ema": {"of.row": torch.ones(3)}}])
def test_state_with_a_dot_in_its_name_is_refused_in_the_flat_form(state: dict[str, Any]) -> None:
    """It would come back as nested state."""
    model, optimizer = job(of_torch, 0, 0)
    for parameter in model.parameters():
        optimizer.state[parameter] = copy.deepcopy(state)
    with pytest.raises(NormalizationError, match=r"the optimizer state '[a-z]+\.[a-z]+' of '.*' has a dot in its name"):
        reshard.get_optimizer_state_dict(model, optimizer, options=FLAT)


def test_a_flat_dict_may_have_its_keys_in_any_order() -> None:
    def made(decay: float, *groups: slice) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        held = list(model.parameters())
        return model, torch.optim.SGD([{"params": held[of]} for of in groups], lr=0.1, weight_decay=decay)

    flat = reshard.get_optimizer_state_dict(*made(0.5, slice(None)), options=FLAT)

    def keys(name: str, *, decay: bool) -> list[str]:
        own = [key for key in flat if key.startswith(f"param_groups.{name}.")]
        return [key for key in own if key.endswith("decay") == decay]

    order = [*keys("0.weight", decay=False), *keys("0.bias", decay=False), *keys("0.weight", decay=True)]
    order += [*keys("1.weight", decay=False), *keys("1.weight", decay=True)]
    order += [*keys("1.bias", decay=False), *keys("1.bias", decay=True), *keys("0.bias", decay=True)]
    assert {*order} == {*flat}
    target = made(0.0, slice(2), slice(2, 4))
    report = reshard.set_optimizer_state_dict(*target, {key: flat[key] for key in order})
    assert [group["weight_decay"] for group in target[1].param_groups] == [0.5, 0.5]
    assert not report.kept_fields
