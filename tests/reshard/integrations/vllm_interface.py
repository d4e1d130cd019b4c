"""Stand-ins for vLLM's weight transfer interface, of the shape that its documentation of 0.33 gives it.

They are put in the place of `vllm.distributed.weight_transfer.base` where vLLM is not installed, which it cannot be
beside torch for CPUs. What they refuse, vLLM refuses.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any

import torch

__all__ = ["install"]


@dataclass(frozen=True)
class Replicate:
    """Whole along an axis of the mesh."""


@dataclass(frozen=True)
class Shard:
    """Cut along an axis of the mesh, as `torch.chunk` cuts."""

    dim: int


@dataclass(frozen=True)
class ParamMeta:
    """A weight that is offered, and by whom."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = field(default=None, kw_only=True)
    mesh_shape: tuple[int, ...] | None = field(default=None, kw_only=True)
    placements: tuple[Any, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.owners is None:
            assert self.mesh_shape is None
            assert self.placements is None
            return
        mesh = self.mesh_shape or (len(self.owners),)
        assert len(set(self.owners)) == len(self.owners) == math.prod(mesh)
        assert self.placements is None or len(self.placements) == len(mesh)
        object.__setattr__(self, "mesh_shape", mesh)


class WeightSource(ABC):
    """What an engine of vLLM asks a trainer for."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "metadata" in cls.__dict__ and not isinstance(cls.__dict__["metadata"], cached_property):
            raise TypeError("metadata must be a cached_property")

    @property
    @abstractmethod
    def metadata(self) -> list[ParamMeta]: ...

    def owned_names(self, rank: int) -> list[str]:
        return [meta.name for meta in self.metadata if meta.owners is None or rank in meta.owners]

    def implements_iter_full(self) -> bool:
        return type(self).iter_full is not WeightSource.iter_full

    def implements_iter_local(self) -> bool:
        return type(self).iter_local is not WeightSource.iter_local

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise NotImplementedError

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise NotImplementedError


class TrainerWeightTransferEngine(ABC):
    """What moves the weights of a source to vLLM: made and called on every rank of the trainer, the first one sends."""

    def __init__(
        self, *, client: Any, source: WeightSource | None = None, is_sender: bool = True, rank: int = 0
    ) -> None:
        self.client, self.source, self.is_sender, self.rank = client, source, is_sender, rank

    @classmethod
    @abstractmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: WeightSource | None = None) -> Any: ...

    @abstractmethod
    def send_weights(self) -> None: ...


def install() -> bool:
    """Whether it is vLLM itself that `import vllm` gives; else these are put in its place, in this process."""
    name = "vllm.distributed.weight_transfer.base"
    if importlib.util.find_spec("vllm") is not None:
        return True
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
    for one in (Replicate, Shard, ParamMeta, WeightSource, TrainerWeightTransferEngine):
        setattr(sys.modules[name], one.__name__, one)
    return False
