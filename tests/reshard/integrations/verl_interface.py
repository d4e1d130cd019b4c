"""Stand-ins for what verl's checkpoint engines stand on, as verl 0.9.1 has it: the abstract class and the registry of
`verl.checkpoint_engine.base`, the record and the checksum of `verl.checkpoint_engine.delta_sync.encode`, and what its
loader for SGLang makes of a flush.

They are put in the place of these modules where verl is not installed.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch

__all__ = ["Registry", "install", "patched"]


class CheckpointEngine(ABC):
    """What moves weights from trainers to rollouts: made and called on every rank of both."""

    wire_format = "named_tensors"

    @abstractmethod
    def prepare(self) -> dict[str, Any]: ...

    @classmethod
    @abstractmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]) -> Any: ...

    @abstractmethod
    def init_process_group(self, **kwargs: Any) -> None: ...

    @abstractmethod
    def finalize(self) -> None: ...

    @abstractmethod
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> Any: ...

    @abstractmethod
    async def receive_weights(self, global_steps: int | None = None) -> Any: ...


class Registry:
    """Engines by the name of the backend."""

    engines: ClassVar[dict[str, type[CheckpointEngine]]] = {}

    @classmethod
    def register(cls, backend: str) -> Callable[[type], type]:
        def kept(engine: type) -> type:
            cls.engines[backend] = engine
            return engine

        return kept

    @classmethod
    def new(cls, backend: str, *args: Any, **kwargs: Any) -> CheckpointEngine:
        return cls.engines[backend](*args, **kwargs)


@dataclass
class DeltaParam:
    """Where a tensor is in a flush."""

    name: str
    dtype: str
    shape: list[int]
    pos_start: int
    pos_end: int
    pos_width: int
    val_start: int
    val_end: int


def checksum(positions: torch.Tensor, values: torch.Tensor) -> int:
    sums = [int(torch.hash_tensor(part).item()) if part.numel() else 0 for part in (positions, values)]
    return sums[0] ^ (sums[1] << 1)


def patched(weights: dict[str, torch.Tensor], flush: list[tuple[str, torch.Tensor]]) -> None:
    """Do to the weights of an engine what the loader does: fill them, or the elements at the positions."""
    from verl.checkpoint_engine.delta_sync.encode import checksum as theirs

    parts = dict(flush)
    spec = json.loads(parts["__delta_spec__"].numpy().tobytes())
    values, positions = parts["__values__"], parts.get("__positions__", torch.empty(0, dtype=torch.uint8))
    assert theirs(positions, values) == spec["checksum"]
    for one in spec["params"]:
        found = values[one["val_start"] : one["val_end"]]
        if spec["encoding"] == "dense":
            weights[one["name"]] = found.to(getattr(torch, one["dtype"])).view(one["shape"]).clone()
            continue
        assert (spec["encoding"], one["pos_width"]) == ("indices", 4)
        at = positions[one["pos_start"] : one["pos_end"]].view(torch.int32).long()
        assert math.prod(one["shape"]) > int(at.max())
        weights[one["name"]].view(-1)[at] = found


def install() -> bool:
    """Whether it is verl itself that `import verl` gives; else these are put in its place, in this process."""
    if "verl" in sys.modules:
        return hasattr(sys.modules["verl"], "__file__")
    if importlib.util.find_spec("verl") is not None:
        return True
    names = {
        "verl.checkpoint_engine.base": {"CheckpointEngine": CheckpointEngine, "CheckpointEngineRegistry": Registry},
        "verl.checkpoint_engine.delta_sync.encode": {"DeltaParam": DeltaParam, "checksum": checksum},
    }
    for name, held in names.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
        for one, value in held.items():
            setattr(sys.modules[name], one, value)
    return False
