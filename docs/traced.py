"""What a call of the library runs through, seen from inside of four processes. `docs.figures` starts them."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import reshard
from docs.import_graph import ROOT, TOP_LEVEL
from reshard.live.tensors import LiveTensor

__all__ = ["RANKS", "Function", "Seen", "calls"]

RANKS = 4
Function = tuple[str, str, int]
"""Its path in the repository, its name and its line."""


@dataclass(frozen=True)
class Seen:
    """What one rank saw."""

    functions: dict[str, set[Function]]
    """By the name of the call."""
    asked: int
    """How often a set of optimizer state asked for a local part of a sharded tensor."""
    tensors: int
    """How many sharded tensors that state has."""


def calls(folder: str) -> Seen:
    """Save, load and set a state on every rank of the group, watched when all that it needs is imported."""
    path = Path(folder)
    _save_and_load(_state(3), path / "other")  # so that nothing is imported while it is watched
    saved = _functions(lambda: reshard.save(_state(4), path / "state"))
    reshard.load(_state(4), path / "state")
    loaded = _functions(lambda: reshard.load(_state(4), path / "state"))
    return Seen({"save": saved, "load": loaded}, *_asked())


def _save_and_load(state: dict[str, object], path: Path) -> None:
    reshard.save(state, path)
    reshard.load(state, path)


def _state(layers: int) -> dict[str, object]:
    """Parameters under data and tensor parallelism, and a counter."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    cuts = ([Shard(0), Shard(1)], [Replicate(), Shard(0)])
    names = [(f"layers.{i}.{kind}", cut) for i in range(layers) for kind, cut in zip(("weight", "bias"), cuts)]
    return {"model": {name: distribute_tensor(torch.ones(8, 8), mesh, cut) for name, cut in names}, "step": 3}


def _functions(call: Callable[[], object]) -> set[Function]:
    """Every named function of the source that runs meanwhile, in whatever thread."""
    seen: set[CodeType] = set()

    def on(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen.add(frame.f_code)

    _watched(on, call)
    source = [(code, Path(code.co_filename)) for code in seen if Path(code.co_filename).is_relative_to(ROOT)]
    named = [(path.relative_to(ROOT), code) for code, path in source if not code.co_name.startswith("<")]
    return {
        (path.as_posix(), code.co_qualname, code.co_firstlineno) for path, code in named if path.parts[0] in TOP_LEVEL
    }


def _watched(on: Callable[[FrameType, str, object], None], call: Callable[[], object]) -> None:
    threading.setprofile(on)
    sys.setprofile(on)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _asked() -> tuple[int, int]:
    """How often a set of optimizer state under FSDP2 asks for local parts of sharded tensors, and how many it is of."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(*(fully_shard(nn.Linear(8, 8), mesh=mesh) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = copy.deepcopy(reshard.get_optimizer_state_dict(model, optimizer))
    count, code = 0, vars(LiveTensor)["local"].func.__code__

    def on(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        if event == "call" and frame.f_code is code:
            count += isinstance(frame.f_locals["self"].value, DTensor)

    _watched(on, lambda: reshard.set_optimizer_state_dict(model, optimizer, state))
    moments = [value for of_one in state["state"].values() for value in of_one.values()]
    return count, sum(isinstance(value, DTensor) for value in moments)
