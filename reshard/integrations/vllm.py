"""Weights of a training job for vLLM's weight transfer.

    from reshard.integrations.vllm import ShardSource, StateSource

    source = StateSource(reshard.get_model_state_dict(model), mapping=ready(config, "torchtitan", "huggingface"))
    engine = WeightTransferTrainerFactory.trainer_init(NCCLTrainerInitInfo(...), client=client, source=source)
    engine.send_weights()                                        # at every step, on every rank

vLLM's own `ModuleSource` gathers every tensor on every rank, under the names in the module. Here,
each byte goes once to each rank that needs it, from any layout, including pipeline stages and
strided shards, and under other names. The transfer holds one batch of weights in memory at a time.
vLLM itself copies the weights into its tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from planners.geometry import mesh as cut
from planners.geometry.layout import TensorLayout, TensorSpec
from planners.geometry.mesh import Mesh
from reshard.api.weights import WeightSource
from reshard.errors import framework
from reshard.live.dtypes import dtype_from_name
from reshard.ranks.group import Group

with framework("vllm"):
    from vllm.distributed.weight_transfer.base import ParamMeta, Replicate, Shard, WeightSource as EngineSource

__all__ = ["ShardSource", "StateSource"]


_MOST_SHARDS = 16
"""The largest number of shards per tensor that NCCL's M2N supports."""


class StateSource(EngineSource):  # type: ignore[misc]  # Any where vLLM is not installed
    """A source of full tensors, for vLLM's NCCL broadcast from the first rank. With
    `all_ranks=True`, every rank has the tensors, as CUDA IPC and sharded RDT require."""

    def __init__(self, state: Mapping[str, Any], **options: Any) -> None:
        """Create a source. Collective. `options` are those of `reshard.WeightSource`, except
        `layouts` and `delta`.
        """
        self._source = WeightSource(state, **options)
        self._source.require_full()

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        """Names, dtypes, shapes, and owners of all tensors. The same on every rank."""
        owners = None if self._source.all_ranks else (0,)
        specs = self._source.specs.values()
        return [ParamMeta(s.fqn, dtype_from_name(s.dtype), s.shape, owners=owners) for s in specs]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the (name, tensor) pairs. Collective: every rank must run it to its end, even if it
        gets nothing.
        """
        return self._source.iter_full()


class ShardSource(EngineSource):  # type: ignore[misc]  # Any where vLLM is not installed
    """A source of this rank's rows of each tensor, for NCCL's M2N, from any layout. As M2N
    requires, a tensor has at most 16 shards of equal size along dim 0, and each shard has the same
    number of replicas."""

    def __init__(
        self, state: Mapping[str, Any], *, process_group: dist.ProcessGroup | None = None, **options: Any
    ) -> None:
        """Create a source. Collective. `options` are those of `reshard.WeightSource`, except
        `all_ranks` and `delta`.
        """
        self._ranks = Group(process_group).ranks
        self._source = WeightSource(state, layouts=self._layout, process_group=process_group, **options)

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        """Names, dtypes, shapes, and placements of all tensors. The same on every rank."""
        world = len(self._ranks)
        owners, out = tuple(range(world)), []
        for spec in self._source.specs.values():
            shards = self._shards(spec)
            how = {"mesh_shape": (world // shards, shards), "placements": (Replicate(), Shard(0))} if shards > 1 else {}
            out.append(ParamMeta(spec.fqn, dtype_from_name(spec.dtype), spec.shape, owners=owners, **how))
        return out

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the (name, local rows) pairs. Collective."""
        return self._source.iter_full()

    def _layout(self, spec: TensorSpec) -> TensorLayout | None:
        if (shards := self._shards(spec)) == 1:
            return None
        mesh = Mesh({"replica": len(self._ranks) // shards, "shard": shards}, self._ranks)
        return TensorLayout(spec, mesh, [cut.Replicate(), cut.Shard(0)])

    def _shards(self, spec: TensorSpec) -> int:
        """Return the number of equal row ranges that a tensor is split into. Each rank has one of them."""
        common = math.gcd(spec.shape[0], len(self._ranks)) if spec.shape and spec.shape[0] else 1
        return max(shards for shards in range(1, _MOST_SHARDS + 1) if common % shards == 0)
