"""What DeepSpeed writes without ZeRO in 16 bit, with experts, and with parameters dealt out to ranks in turn."""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard import checkpoint
from reshard.errors import CorruptCheckpointError, NormalizationError

SHAPES = {"embed.weight": (7, 5), "layers.0.w": (5, 3, 2), "layers.0.b": (5,), "scale": ()}
GROUPS = [["embed.weight", "layers.0.w"], ["layers.0.b", "scale"]]
NAMES = [name for group in GROUPS for name in group]
KINDS = ("fp32", "exp_avg", "exp_avg_sq")


def make(seed: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def values_of(shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, dict[str, torch.Tensor]]:
    return {kind: make(i, shapes) for i, kind in enumerate(KINDS)}


def row(values: dict[str, torch.Tensor], names: list[str]) -> torch.Tensor:
    return torch.cat([values[name].reshape(-1) for name in names])


def save_mixed(root: Path, values: dict[str, dict[str, torch.Tensor]], *, flat: bool) -> None:
    """The optimizer of a 16-bit model without ZeRO: parameters apart, or each group as one flat tensor."""
    module: dict[str, torch.Tensor] = OrderedDict((n, values["fp32"][n].bfloat16()) for n in SHAPES)
    module["head.weight"] = module["embed.weight"]
    module["count"] = torch.tensor(9.0)
    if flat:
        rows = [{k: row(values[k], names) for k in KINDS} for names in GROUPS]
        state = {g: {"step": torch.tensor(4.0), **{k: of[k] for k in KINDS[1:]}} for g, of in enumerate(rows)}
        masters: dict[str, Any] = {"fp32_groups_flat": [of["fp32"] for of in rows]}
        ids = [[0], [1]]
    else:
        state = {
            i: {"step": torch.tensor(4.0), **{k: values[k][name] for k in KINDS[1:]}} for i, name in enumerate(NAMES)
        }
        masters = {"fp32_groups": [[values["fp32"][name] for name in names] for names in GROUPS]}
        ids = [[0, 1], [2, 3]]
    inner = {"state": state, "param_groups": [{"lr": 0.1, "params": ids[0]}, {"lr": 0.2, "params": ids[1]}]}
    optimizer = {"cur_scale": 8.0, "optimizer_state_dict": inner, **masters}
    torch.save({"module": module, "optimizer": optimizer, "param_shapes": None}, root / "mp_rank_00_model_states.pt")


def check(found: Any, values: dict[str, dict[str, torch.Tensor]]) -> None:
    for name, tensor in values["fp32"].items():
        assert found["model"][name].dtype == torch.float32
        assert found["model"][name][...].equal(tensor), name
    for kind in KINDS[1:]:
        for name, tensor in values[kind].items():
            assert found["optim"]["state"][name][kind][...].equal(tensor), (name, kind)
    assert "fp32" not in found["optim"]["state"][next(iter(values["fp32"]))]


@pytest.mark.parametrize("flat", [False, True])
def test_sixteen_bits_without_zero(tmp_path: Path, flat: bool) -> None:
    """Masters stand for the weights, tied ones too; which parameters the ids or flat groups are, is asked for."""
    values = values_of()
    save_mixed(tmp_path, values, flat=flat)
    opened = checkpoint.open(tmp_path)
    hints: dict[str, Any] = {"param_groups": GROUPS} if flat else {"param_names": NAMES}
    with pytest.raises(NormalizationError, match=next(iter(hints))):
        opened.normalized()
    found = opened.normalized(hints)
    check(found, values)
    assert found["model"]["head.weight"][...].equal(values["fp32"]["embed.weight"])
    assert found["model"]["count"][...] == 9
    assert found["optim"]["param_groups"] == [{"lr": 0.1, "params": GROUPS[0]}, {"lr": 0.2, "params": GROUPS[1]}]
    assert {float(of["step"][...]) for of in found["optim"]["state"].values()} == {4.0}


def test_one_value_for_each_of_many_rows_is_not_cut_like_the_flat_group(tmp_path: Path) -> None:
    """The first parameter has fewer elements than the state."""
    shapes, table = {"a": (2,), "b": (4,)}, torch.arange(5.0)
    module = {name: torch.ones(shape).bfloat16() for name, shape in shapes.items()}
    inner = {"state": {0: {"table": table, "m": torch.arange(6.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    optimizer = {"optimizer_state_dict": inner, "fp32_groups_flat": [torch.ones(6)]}
    state = {"module": module, "optimizer": optimizer, "param_shapes": None}
    torch.save(state, tmp_path / "mp_rank_00_model_states.pt")

    found = checkpoint.open(tmp_path).normalized({"param_groups": [["a", "b"]]})["optim"]["state"]

    assert [found[name]["table"][...].tolist() for name in shapes] == [table.tolist()] * 2
    assert [found[name]["m"][...].tolist() for name in shapes] == [[0, 1], [2, 3, 4, 5]]


def test_a_transposed_view_is_not_tied(tmp_path: Path) -> None:
    """Its memory and shape are those of the weight, and its elements are not: it has no master."""
    weight, master = torch.arange(9.0).reshape(3, 3).bfloat16(), torch.arange(9.0).reshape(3, 3)
    inner = {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    optimizer = {"optimizer_state_dict": inner, "fp32_groups": [[master]]}
    state = {"module": {"w": weight, "t": weight.t()}, "optimizer": optimizer, "param_shapes": None}
    torch.save(state, tmp_path / "mp_rank_00_model_states.pt")

    model = checkpoint.open(tmp_path).normalized({"param_names": ["w"]})["model"]

    assert model["w"][...].equal(master)
    assert model["t"][...].equal(weight.t())


def test_hints_that_do_not_fit_flat_groups(tmp_path: Path) -> None:
    save_mixed(tmp_path, values_of(), flat=True)
    opened = checkpoint.open(tmp_path)
    for groups, match in (
        ([GROUPS[0]], "lists 1 groups, but there are 2"),
        ([GROUPS[0][:1], GROUPS[1]], "group 0 parameters of 35 elements, but its flat tensor has 65"),
        ([["nothing"], GROUPS[1]], "'nothing', which the module does not have"),
    ):
        with pytest.raises(NormalizationError, match=match):
            opened.normalized({"param_groups": groups})


class fragment_address:  # its name in the file
    """Where a parameter lies in a piece, as DeepSpeed saves it."""

    def __init__(self, start: int, numel: int) -> None:
        self.start, self.numel = start, numel


def as_if_in_order(world: int, size: int) -> list[dict[str, fragment_address]]:
    """By rank, where parameters would lie in pieces of this size in the order of the optimizer."""
    out: list[dict[str, fragment_address]] = []
    for rank in range(world):
        at, held = 0, {}
        for name in NAMES:
            numel = math.prod(SHAPES[name])
            low, high = max(at, rank * size), min(at + numel, (rank + 1) * size)
            if low < high:
                held[name] = fragment_address(low - rank * size, high - low)
            at += numel
        out.append(held)
    return out


def save_zero(
    root: Path, flats: list[list[dict[str, torch.Tensor]]], counts: list[int], mappings: Any = None, **more: Any
) -> None:
    """The files of stage 1 of all ranks, from the flat pieces of every rank and group."""
    for rank, groups in enumerate(flats):
        state = {g: {"step": torch.tensor(4.0), **{k: of[k] for k in KINDS[1:]}} for g, of in enumerate(groups)}
        optim = {
            "zero_stage": 1,
            "partition_count": counts,
            "single_partition_of_fp32_groups": [of["fp32"] for of in groups],
            "base_optimizer_state": {"state": state, "param_groups": [{"lr": 0.1}, {"lr": 0.2, "moe": True}]},
        }
        if mappings is not None:
            optim["param_slice_mappings"] = mappings[rank]
        torch.save(
            {"optimizer_state_dict": optim, **more}, root / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        )


def test_states_that_are_not_flat(tmp_path: Path) -> None:
    """Each rank has a factor of its own piece."""
    values = values_of()
    module = {n: t.bfloat16() for n, t in values["fp32"].items()}
    model = {"module": module, "param_shapes": [{n: torch.Size(SHAPES[n]) for n in NAMES}]}
    torch.save(model, tmp_path / "mp_rank_00_model_states.pt")
    rows = {kind: row(values[kind], NAMES) for kind in KINDS}
    halves = zip(*(t.chunk(2) for t in rows.values()))
    save_zero(tmp_path, [[{k: t.clone() for k, t in zip(KINDS, half)}] for half in halves], [2])
    for rank, path in enumerate(sorted(tmp_path.glob("bf16*"))):
        saved = torch.load(path)
        saved["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["factor"] = torch.full((5, 5), float(rank))
        torch.save(saved, path)
    found = checkpoint.open(tmp_path).normalized()
    assert not any("factor" in of for of in found["optim"]["state"].values())
    assert any("optimizer states are not read" in note and "1 ('factor')" in note for note in found.notes)


@pytest.mark.parametrize("world", [2, 3])
def test_parameters_dealt_out_in_turn(tmp_path: Path, world: int) -> None:
    """Shapes are saved in the order of the pieces, but where each parameter lies is said for another order."""
    values = values_of()
    order = [name for r in range(world) for name in NAMES[r::world]]
    module = {n: t.bfloat16() for n, t in values["fp32"].items()}
    torch.save(
        {"module": module, "param_shapes": [{n: torch.Size(SHAPES[n]) for n in order}]},
        tmp_path / "mp_rank_00_model_states.pt",
    )
    rows = {kind: row(values[kind], order) for kind in KINDS}
    size = -(-len(rows["fp32"]) // world)
    flats = [[{k: t[r * size : (r + 1) * size].clone() for k, t in rows.items()}] for r in range(world)]
    config = {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}
    save_zero(tmp_path, flats, [world], [[wrong] for wrong in as_if_in_order(world, size)], ds_config=config)
    check(checkpoint.open(tmp_path).normalized(), values)


@pytest.mark.parametrize("copies", [1, 2])
def test_experts_spread_over_ranks(tmp_path: Path, copies: int) -> None:
    """Two expert parallel ranks with two experts each; each pair's pieces are shared by as many ranks as copies."""
    ep, world = 2, 2 * copies
    dense = {"embed.weight": (7, 5), "b": (3,)}
    front = "moe.deepspeed_moe.experts.deepspeed_experts"
    values = values_of({**dense, **{f"{front}.{e}.w": (5, 2) for e in range(4)}})
    local = {f"{front}.{e}.w": (5, 2) for e in range(2)}
    module = {n: values["fp32"][n].bfloat16() for n in dense}
    shapes = [{n: torch.Size(s) for n, s in of.items()} for of in (dense, local)]
    torch.save({"module": module, "param_shapes": shapes}, tmp_path / "mp_rank_00_model_states.pt")
    for e in range(4):
        name = f"{front}.{e}.w"
        torch.save({name: values["fp32"][name].bfloat16()}, tmp_path / f"layer_0_expert_{e}_mp_rank_00_model_states.pt")
    flats: list[list[dict[str, torch.Tensor]]] = []
    for rank in range(world):
        mine = [f"{front}.{rank % ep * 2 + e}.w" for e in range(2)]
        rows = [{k: row(values[k], list(dense)) for k in KINDS}, {k: row(values[k], mine) for k in KINDS}]
        size, part = -(-38 // world), 20 // copies
        at = rank // ep
        flats.append(
            [
                {k: t[rank * size : (rank + 1) * size].clone() for k, t in rows[0].items()},
                {k: t[at * part : (at + 1) * part].clone() for k, t in rows[1].items()},
            ]
        )
    save_zero(tmp_path, flats, [world, copies])
    found = checkpoint.open(tmp_path).normalized()
    check(found, values)
    assert found["optim"]["param_groups"][1]["params"] == [f"{front}.{e}.w" for e in range(4)]
    (tmp_path / f"bf16_zero_pp_rank_{world - 1}_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"the file of a rank is missing"):
        checkpoint.open(tmp_path).normalized()


@pytest.mark.parametrize("equal", [True, False])
def test_the_steps_of_a_universal_checkpoint_of_stage_3(tmp_path: Path, equal: bool) -> None:
    """They are those of the groups; where these differ, whose they are is not stored, and none is made up."""
    values = values_of()
    module = {name: torch.empty(0) for name in SHAPES}
    shapes = [{name: torch.Size(SHAPES[name]) for name in names} for names in GROUPS]
    torch.save({"module": module, "param_shapes": shapes}, tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    for kind in KINDS:
        for name, tensor in values[kind].items():
            (tmp_path / "zero" / name).mkdir(parents=True, exist_ok=True)
            torch.save(tensor.reshape(-1), tmp_path / "zero" / name / f"{kind}.pt")
    state = {g: {"step": torch.tensor(4.0 if equal else 4.0 + g)} for g in range(2)}
    groups = [{"lr": 0.1}, {"lr": 0.2}]
    common = {"optimizer_state_dict": {"state": state, "param_groups": groups}, "param_groups": groups}
    torch.save(common, tmp_path / "zero" / "optimizer_state.pt")
    found = checkpoint.open(tmp_path).normalized()
    check(found, values)
    for states in found["optim"]["state"].values():
        assert ("step" in states) == equal
        assert not equal or states["step"][...] == 4
