"""Raw optimizer states of FSDP1's ranks, cut by its rules, and what they cannot say."""

from __future__ import annotations

import math
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard import checkpoint
from reshard.errors import CorruptCheckpointError, FormatError, NormalizationError, UnsafeDataError
from tests.reshard.formats.writers import copy_saved_as

SHAPES = {"embed.weight": (7, 5), "layers.0.w": (5, 3, 2), "layers.0.b": (5,), "layers.0.scale": ()}
UNITS = [["embed.weight"], ["layers.0.w", "layers.0.b", "layers.0.scale"]]


def make(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}


def save_flat(root: Path, world: int) -> dict[str, dict[str, torch.Tensor]]:
    """use_orig_params=False: parameters in one row, padded until the world divides it."""
    states = {"exp_avg": make(0), "exp_avg_sq": make(1)}
    for rank in range(world):
        state = {}
        for i, names in enumerate(UNITS):
            state[i] = {"step": torch.tensor(2.0)}
            for kind, of in states.items():
                row = torch.cat([of[name].reshape(-1) for name in names])
                row = torch.cat([row, torch.zeros(-len(row) % world, dtype=row.dtype)])
                state[i][kind] = row.chunk(world)[rank].clone()
        saved = {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
        torch.save({"optimizer": saved}, root / f"raw-{rank}.pt")
    return states


def save_pieces(root: Path, world: int) -> dict[str, dict[str, torch.Tensor]]:
    """use_orig_params=True: of each parameter, the piece that lies in the rank's part of the row; nothing if none."""
    states = {"exp_avg": make(0), "exp_avg_sq": make(1)}
    for rank in range(world):
        state = {}
        for names in UNITS:
            size = -(-sum(math.prod(SHAPES[name]) for name in names) // world)
            at = 0
            for name in names:
                start, stop = max(rank * size - at, 0), min((rank + 1) * size - at, math.prod(SHAPES[name]))
                at += math.prod(SHAPES[name])
                if start < stop:
                    pieces = {kind: of[name].reshape(-1)[start:stop].clone() for kind, of in states.items()}
                    state[list(SHAPES).index(name)] = {"step": torch.tensor(2.0), **pieces}
        torch.save({"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1, 2, 3]}]}, root / f"raw_{rank}.pt")
    return states


def check(found: Any, states: dict[str, dict[str, torch.Tensor]]) -> None:
    assert found["model"] == {}
    for kind, of in states.items():
        for name, tensor in of.items():
            assert found["optim"]["state"][name][kind][...].equal(tensor), (name, kind)
    assert all(of["step"][...] == 2 for of in found["optim"]["state"].values())
    assert found["optim"]["param_groups"] == [{"lr": 0.1, "params": list(SHAPES)}]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_flat_parameters(tmp_path: Path, world: int) -> None:
    states = save_flat(tmp_path, world)
    hint = {i: [(name, SHAPES[name]) for name in names] for i, names in enumerate(UNITS)}
    opened = checkpoint.open(tmp_path)
    assert opened.format == "fsdp1"
    check(opened.normalized({"flat_params": hint}), states)
    with pytest.raises(NormalizationError, match=r"flat_params.*\(name, shape\)"):
        opened.normalized()
    wrong = {0: hint[0], 1: hint[1][:-2]}
    with pytest.raises(NormalizationError, match=r"id 1 has 3[69] elements, but .* have 30"):
        opened.normalized({"flat_params": wrong})


@pytest.mark.parametrize("world", [2, 3])
def test_pieces_of_parameters(tmp_path: Path, world: int) -> None:
    states = save_pieces(tmp_path, world)
    opened = checkpoint.open(tmp_path)
    check(opened.normalized({"param_names": list(SHAPES), "param_shapes": SHAPES}), states)
    with pytest.raises(NormalizationError, match=r"hints=\{'param_names'"):
        opened.normalized()
    with pytest.raises(NormalizationError, match=r"hints=\{'param_shapes'"):
        opened.normalized({"param_names": list(SHAPES)})
    with pytest.raises(CorruptCheckpointError, match=r"'embed\.weight\.exp_avg'.* 35 elements.*\[9, 5\]"):
        opened.normalized({"param_names": list(SHAPES), "param_shapes": {**SHAPES, "embed.weight": (9, 5)}})


@pytest.mark.parametrize("pieces", [False, True])
def test_copies_of_hybrid_sharding(tmp_path: Path, pieces: bool) -> None:
    """Ranks that hold copies are not told from ranks that hold parts: how many share a copy is asked for."""
    world, copies = 2, 3
    states = save_pieces(tmp_path, world) if pieces else save_flat(tmp_path, world)
    mark = "_" if pieces else "-"
    for rank in range(world, world * copies):
        copy_saved_as(tmp_path / f"raw{mark}{rank % world}.pt", tmp_path / f"raw{mark}{rank}.pt")
    flat = {i: [(name, SHAPES[name]) for name in names] for i, names in enumerate(UNITS)}
    hints: dict[str, Any] = {"param_names": list(SHAPES), "param_shapes": SHAPES} if pieces else {"flat_params": flat}
    opened = checkpoint.open(tmp_path)
    with pytest.raises(NormalizationError, match=r"hints=\{'shard_ranks'"):
        opened.normalized(hints)
    check(opened.normalized({**hints, "shard_ranks": world}), states)
    with pytest.raises(NormalizationError, match="a divisor of the 6 ranks"):
        opened.normalized({**hints, "shard_ranks": 4})


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_rank(tmp_path: Path, rank: int) -> None:
    save_pieces(tmp_path, 3)
    (tmp_path / f"raw_{rank}.pt").unlink()
    words = rf"rank {rank} is missing; there is raw_{1 - rank}\.pt, which opens by its path"
    with pytest.raises(CorruptCheckpointError, match=words):
        checkpoint.open(tmp_path)
    assert len(checkpoint.open(tmp_path / f"raw_{1 - rank}.pt"))


def test_numbers_of_steps_are_no_ranks(tmp_path: Path) -> None:
    save_pieces(tmp_path, 2)
    for rank, step in enumerate((10, 20)):
        (tmp_path / f"raw_{rank}.pt").rename(tmp_path / f"raw_{step}.pt")
    with pytest.raises(FormatError, match=r"2 files of torch.save and no index that lists them: raw_10.pt, raw_20.pt"):
        checkpoint.open(tmp_path)


def test_one_file_is_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    save_pieces(tmp_path, 2)
    opened = checkpoint.open(tmp_path / "raw_0.pt")
    assert opened.format == "torch_save"
    assert "state.0.exp_avg" in opened


def test_whole_states_in_numbered_files_are_no_pieces(tmp_path: Path) -> None:
    """With NO_SHARD and use_orig_params, every rank saves the whole: one of the files is enough."""
    for rank in range(2):
        saved = {"state": {0: {"exp_avg": torch.ones(2, 3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        torch.save(saved, tmp_path / f"optim_{rank}.pt")
    with pytest.raises(FormatError, match=r"no index that lists them: .*optim_1\.pt; open one by its path"):
        checkpoint.open(tmp_path)
    found = checkpoint.open(tmp_path / "optim_1.pt").normalized({"param_names": ["w"]})
    assert found["optim"]["state"]["w"]["exp_avg"][...].equal(torch.ones(2, 3))


class Attack:
    """What a hostile pickle would run: it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.path,))


HOSTILE = [
    "raw_0.pt",
    "stage_0.pt",
    "mp_rank_00_model_states.pt",
    "mp_rank_00/model_optim_rng.pt",
    "zero/w/fp32.pt",
]


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("plain", [True, False])
def test_hostile_pickles_run_nothing(tmp_path: Path, name: str, plain: bool) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name in ("raw_0.pt", "stage_0.pt"):
        torch.save({"model": {"w": torch.ones(1)}}, tmp_path / name.replace("_0", "_1"))
    mark, states = tmp_path / "ran", {0: {"exp_avg": torch.ones(3)}}
    state = {"state": states, "module": Attack(mark), "model": Attack(mark), "param_groups": [Attack(mark)]}
    if plain:
        path.write_bytes(pickle.dumps({**state, "state": None}))
    else:
        torch.save(state, path)
    with pytest.raises(UnsafeDataError, match="none of it was run"):
        checkpoint.open(tmp_path).normalized()
    assert not mark.exists()


def test_plain_values_beside_the_pieces_of_a_model_are_no_part_of_it(tmp_path: Path) -> None:
    for rank in range(2):
        model = {"w": torch.arange(6.0) + 6 * rank, "w._extra_state": None, "version": 3}
        state = {"state": {0: {"exp_avg": torch.ones(6)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        torch.save({"model": model, "optim": state}, tmp_path / f"c_{rank}.pt")

    model = checkpoint.open(tmp_path).normalized({"param_shapes": {"w": (3, 4)}, "param_names": ["w"]})["model"]

    assert list(model) == ["w"]
    assert torch.equal(model["w"][...], torch.arange(12.0).reshape(3, 4))


@pytest.mark.parametrize("value", [{"state": torch.ones(3)}, {"state": 5, "w": torch.ones(3)}])
def test_numbered_files_that_hold_a_single_state(value: dict[str, Any], tmp_path: Path) -> None:
    for rank in range(2):
        torch.save(value, tmp_path / f"c_{rank}.pt")
    with pytest.raises(FormatError, match=r"2 files of torch\.save and no index"):
        checkpoint.open(tmp_path)


def test_two_files_of_one_number(tmp_path: Path) -> None:
    save_pieces(tmp_path, 2)
    shutil.copy(tmp_path / "raw_1.pt", tmp_path / "raw_1.bin")
    with pytest.raises(FormatError, match=r"3 files of torch\.save and no index"):
        checkpoint.open(tmp_path)
