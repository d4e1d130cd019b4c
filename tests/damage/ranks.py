"""The share of the matrix that two processes read together: each loads its own rows or columns of every tensor."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import reshard
from tests import gloo
from tests.damage.damages import DAMAGES
from tests.damage.matrix import Cell, Checkpoints, Outcome, Result, judged
from tests.damage.readers import Read, Scene

__all__ = ["READ_TOGETHER", "WAYS", "results_together", "some_cells"]

WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    f"load {name}, {option}={value}": (dim, {option: value})
    for dim, name in enumerate(("rows", "columns"))
    for option, values in (("read_once", (None, True, False)), ("check", ("during",)))
    for value in values
}
"""By name: the dim along which tensors are sharded, and the options of the load."""

READ_TOGETHER = ("native", "native chain", "native many files", "dcp", "torch_save", "hugging face")


def some_cells(checkpoints: Checkpoints, count: int, seed: int) -> list[Cell]:
    """So many random ones."""
    cells = []
    for number in range(seed, seed + count):
        rng = Random(number)
        format = rng.choice(READ_TOGETHER)
        kind = rng.choice(list(checkpoints[format].sites))
        cells.append(Cell(format, rng.choice([*WAYS]), kind, rng.choice([*DAMAGES]), number))
    return cells


def results_together(cells: Sequence[Cell], folder: Path, timeout_s: float = 60.0) -> list[Result]:
    """What comes of each, of both ranks the worse."""
    ends = gloo.run(_on_rank, 2, list(cells), str(folder), timeout_s=timeout_s)
    return [max(pair, key=lambda result: _SEVERITY.index(result.outcome)) for pair in zip(*ends)]


_SEVERITY = [
    Outcome.NOTHING, Outcome.RIGHT, Outcome.REFUSED, Outcome.UNCHECKED, Outcome.FORGED, Outcome.MISSED, Outcome.BARE,
    Outcome.HANGS, Outcome.SILENT,
]  # fmt: skip


def _on_rank(cells: list[Cell], folder: str) -> list[Result]:
    """Each rank judges what it has; the first damages, for both."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    checkpoints = Checkpoints(Path(folder))
    wanted: dict[tuple[str, str], Read] = {}
    results = []
    for cell in cells:
        told: list[Any] = [None]
        with contextlib.ExitStack() as stack:
            if not rank:
                changes, where = checkpoints.planned(cell)
                told = [(checkpoints[cell.format].scene("damaged"), where)]
            dist.broadcast_object_list(told)
            scene, where = told[0]
            if not where:
                results.append(Result(cell, Outcome.NOTHING, ""))
                continue
            if (cell.format, cell.reader) not in wanted:
                wanted[cell.format, cell.reader] = _read(cell, scene.good, scene, mesh)
            if not rank:
                stack.enter_context(checkpoints[cell.format].damaged(changes))
            dist.barrier()
            read = functools.partial(_read, cell, scene.path, scene, mesh)
            results.append(judged(cell, where, read, wanted[cell.format, cell.reader]))
            dist.barrier()
    return results


def _read(cell: Cell, path: Path, scene: Scene, mesh: DeviceMesh) -> Read:
    dim, options = WAYS[cell.reader]
    state = {key: _cut(value, mesh, dim) for key, value in _blank(scene.good).items()}
    report = reshard.load(state, path, **options)
    values = {k: value.to_local() if isinstance(value, DTensor) else value for k, value in state.items()}
    return Read(values, repr(report), report.ok)


def _blank(good: Path) -> dict[str, Any]:
    saved = reshard.open(good)
    return {k: torch.zeros(t.shape, dtype=t.dtype) for k, t in saved.items()} | dict.fromkeys(saved.objects)


def _cut(value: Any, mesh: DeviceMesh, dim: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return distribute_tensor(value, mesh, [Shard(dim) if value.ndim > dim else Replicate()], src_data_rank=None)
