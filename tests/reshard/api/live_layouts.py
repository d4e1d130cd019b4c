"""A dozen ways to lay a small state out over eight ranks, each built by torch or by hand and not by what is tested."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.bits import random_bits
from tests.torch_releases import distribute_own

State = dict[str, Any]
SHAPES = {"w": ((13, 10), torch.float32), "b": ((9,), torch.bfloat16), "experts": ((4, 6, 5), torch.float16)}
SHAPES |= {"step": ((), torch.int64), "none": ((0, 3), torch.float32), "z": ((6, 16), torch.complex128)}


def truth(seed: int = 0) -> State:
    """The whole state: random bits, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)

    return {key: random_bits(shape, dtype, generator) for key, (shape, dtype) in SHAPES.items()}


def numbers() -> State:
    """The same with the number of each element for its value."""
    return {key: torch.arange(torch.Size(shape).numel()).view(shape) for key, (shape, _) in SHAPES.items()}


@lru_cache
def mesh(ranks: tuple[int, ...], shape: tuple[int, ...]) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(ranks, device="cpu").view(shape))


def placed(state: State, ranks: tuple[int, ...], shape: tuple[int, ...], placements: list[Any]) -> State:
    """On a mesh; what a tensor has no dim for is replicated."""
    where = mesh(ranks, shape)
    if dist.get_rank() not in ranks:
        return {}

    def fitting(tensor: torch.Tensor) -> list[Any]:
        return [Replicate() if isinstance(p, Shard) and p.dim >= tensor.ndim else p for p in placements]

    return {key: distribute_own(t, where, fitting(t)) for key, t in state.items()}


def strided(state: State) -> State:
    """FSDP2 over TP: rows cut by TP first and then by FSDP, which DTensor writes as a strided shard."""
    where = mesh(tuple(range(8)), (4, 2))
    dp, tp = where.get_coordinate()
    out = {}
    for key, tensor in state.items():
        if not tensor.ndim or tensor.shape[0] == 0:
            out[key] = distribute_own(tensor, where, [Replicate(), Replicate()])
            continue
        local = chunk(chunk(tensor, 2, tp), 4, dp)
        how = [_StridedShard(0, split_factor=2), Shard(0)]
        out[key] = DTensor.from_local(
            local.clone(), where, how, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    return out


def chunk(tensor: torch.Tensor, count: int, index: int) -> torch.Tensor:
    pieces = tensor.chunk(count)
    return pieces[index] if index < len(pieces) else tensor[:0]


def pipeline(state: State) -> State:
    """The first tensors on ranks 0 to 3, the others on 4 to 7, each stage sharded."""
    keys = list(state)
    first, second = (0, 1, 2, 3), (4, 5, 6, 7)
    a = placed({k: state[k] for k in keys[:2]}, first, (4,), [Shard(0)])
    return a | placed({k: state[k] for k in keys[2:]}, second, (4,), [Shard(0)])


def expert(state: State) -> State:
    """Experts over an axis of 4, everything else copied; the other axis copies the experts, too."""
    every = tuple(range(8))
    out = placed({"experts": state["experts"]}, every, (4, 2), [Shard(0), Replicate()])
    return out | placed({k: t for k, t in state.items() if k != "experts"}, every, (8,), [Replicate()])


def whole_on(ranks: tuple[int, ...]) -> Callable[[State], State]:
    return lambda state: {k: t.clone() for k, t in state.items()} if dist.get_rank() in ranks else {}


EVERY = tuple(range(8))
LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[State], State]]] = {
    "rows": (EVERY, lambda s: placed(s, EVERY, (8,), [Shard(0)])),
    "columns": (EVERY, lambda s: placed(s, EVERY, (8,), [Shard(1)])),
    "grid": (EVERY, lambda s: placed(s, EVERY, (4, 2), [Shard(0), Shard(1)])),
    "hsdp": (EVERY, lambda s: placed(s, EVERY, (2, 4), [Replicate(), Shard(0)])),
    "strided": (EVERY, strided),
    "plain": (EVERY, whole_on(EVERY)),
    "first half": (EVERY[:4], lambda s: placed(s, EVERY[:4], (4,), [Shard(0)])),
    "last half": (EVERY[4:], lambda s: placed(s, EVERY[4:], (2, 2), [Shard(1), Shard(0)])),
    "one rank": ((2,), whole_on((2,))),
    "pipeline": (EVERY, pipeline),
    "experts": (EVERY, expert),
    "shuffled": ((0, 1, 2, 5, 6, 7), lambda s: placed(s, (0, 2, 1, 6, 5, 7), (3, 2), [Shard(1), Shard(0)])),
}
"""Name -> the ranks that hold something, and how they hold it."""


def local(value: Any) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return value.to_local() if isinstance(value, DTensor) else value
