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
from vllm.distributed.weight_transfer.base import ParamMeta, Replicate, Shard, WeightSource

from planners.geometry import mesh as cut
from planners.geometry.layout import TensorLayout, TensorSpec
from planners.geometry.mesh import Mesh
from reshard.api.redistribute import redistribute
from reshard.errors import KeyMismatchError
from reshard.live.dtypes import dtype_from_name, dtype_name
from reshard.live.state import take_apart
from reshard.mapping.mapping import Mapping as StateMapping
from reshard.ranks.global_state import take_global_state
from reshard.ranks.group import Group

__all__ = ["ShardSource", "StateSource"]


_BATCH = "number of the batch"
"""A value next to the weights, so that each rank has a part of each batch, as a transfer requires."""
_MOST_SHARDS = 16
"""The largest number of shards per tensor that NCCL's M2N supports."""


class _Planned(WeightSource):  # type: ignore[misc]  # Any where vLLM is not installed
    """Announces the state of all ranks to vLLM, and moves it batch by batch."""

    def __init__(
        self,
        state: Mapping[str, Any],
        *,
        mapping: StateMapping | None = None,
        dtype: torch.dtype | None = None,
        batch_bytes: int = 1 << 30,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Create a source. Collective over the trainer's ranks.

        Args:
            state: this rank's part of the model's state dict. The source keeps references to its
                tensors.
            mapping: from the names and shapes of `state` to the ones that vLLM loads, which are
                those of Hugging Face files.
            dtype: cast floating-point tensors to this dtype before sending.
            batch_bytes: bytes of weights in memory at a time, in addition to the largest tensor.
            process_group: the trainer's ranks, in the order in which vLLM numbers them.

        The first pass compares replicas. Raises KeyMismatchError for a state without tensors, and
        the errors of `Mapping.views`.
        """
        group = Group(process_group)
        self._live = take_apart(state)
        with group.together("weights"):
            layout = take_global_state(self._live, group, check_replicas=False).tensors
            if not layout:
                raise KeyMismatchError("no rank has a tensor to send")
            views = (mapping or StateMapping()).views(layout.specs)
        self._views = views
        self._specs = {name: _sent(view.spec, dtype) for name, view in views.items()}
        self._ranks, self._rank, self._group = group.ranks, group.rank, process_group
        self._device = next((tensor.device for tensor in self._live.tensors.values()), torch.device("cpu"))
        self._batch_bytes, self._passes = batch_bytes, 0

    def _batches(self) -> Iterator[list[TensorSpec]]:
        batch: list[TensorSpec] = []
        held_bytes = 0
        for spec in self._specs.values():
            if batch and held_bytes + spec.nbytes > self._batch_bytes:
                yield batch
                batch, held_bytes = [], 0
            batch.append(spec)
            held_bytes += spec.nbytes
        yield batch

    def _shards(self, spec: TensorSpec) -> int:
        """Return the number of equal row ranges that a tensor is split into. Each rank has one of
        them.
        """
        return 1

    def _pass(self, *, is_mine: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Run all batches. Ranks that receive nothing also take part, because they send what they
        hold.
        """
        for number, batch in enumerate(self._batches()):
            views = [self._views[spec.fqn] for spec in batch]
            wanted = {source.fqn for view in views for source in view.sources}
            given = {key: self._live.tensors[key].value for key in wanted if key in self._live.tensors}
            made = {spec.fqn: self._place(spec) for spec in batch if is_mine}
            redistribute(
                {**given, _BATCH: number},
                {**made, _BATCH: -1},
                self._group,
                views=views,
                target_layouts={s.fqn: self._layout(s) for s in batch if is_mine and self._shards(s) > 1},
                dtype_policy="cast",
                check_replicas=self._passes == 0,
            )
            yield from made.items()
        self._passes += 1

    def _place(self, spec: TensorSpec) -> torch.Tensor:
        shape = (spec.shape[0] // self._shards(spec), *spec.shape[1:]) if spec.shape else ()
        return torch.empty(shape, dtype=dtype_from_name(spec.dtype), device=self._device)

    def _layout(self, spec: TensorSpec) -> TensorLayout:
        shards = self._shards(spec)
        mesh = Mesh({"replica": len(self._ranks) // shards, "shard": shards}, self._ranks)
        return TensorLayout(spec, mesh, [cut.Replicate(), cut.Shard(0)])


class StateSource(_Planned):
    """A source of full tensors, for vLLM's NCCL broadcast, which the first rank sends. With
    `everyone=True`, every rank has them, as CUDA IPC and sharded RDT require.
    """

    def __init__(self, state: Mapping[str, Any], *, everyone: bool = False, **options: Any) -> None:
        """Create a source. Collective. `options` are those of the base class."""
        super().__init__(state, **options)
        self._everyone = everyone

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        """Names, dtypes, shapes, and owners of all tensors. The same on every rank."""
        owners = None if self._everyone else (0,)
        return [ParamMeta(s.fqn, dtype_from_name(s.dtype), s.shape, owners=owners) for s in self._specs.values()]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the (name, tensor) pairs. Collective: every rank must run it to its end, even if it
        gets nothing.
        """
        return self._pass(is_mine=self._everyone or self._rank == 0)


class ShardSource(_Planned):
    """A source of this rank's rows of each tensor, for NCCL's M2N, from any layout. A tensor has at
    most 16 shards, which divide its rows evenly, and equally many ranks hold each shard, as M2N
    requires.
    """

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        """Names, dtypes, shapes, and placements of all tensors. The same on every rank."""
        world = len(self._ranks)
        owners, out = tuple(range(world)), []
        for spec in self._specs.values():
            shards = self._shards(spec)
            how = {"mesh_shape": (world // shards, shards), "placements": (Replicate(), Shard(0))} if shards > 1 else {}
            out.append(ParamMeta(spec.fqn, dtype_from_name(spec.dtype), spec.shape, owners=owners, **how))
        return out

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the (name, local rows) pairs. Collective."""
        return self._pass(is_mine=True)

    def _shards(self, spec: TensorSpec) -> int:
        common = math.gcd(spec.shape[0], len(self._ranks)) if spec.shape and spec.shape[0] else 1
        return max(shards for shards in range(1, _MOST_SHARDS + 1) if common % shards == 0)


def _sent(spec: TensorSpec, dtype: torch.dtype | None) -> TensorSpec:
    is_number = dtype is not None and dtype_from_name(spec.dtype).is_floating_point
    return TensorSpec(spec.fqn, spec.shape, dtype_name(dtype) if dtype is not None and is_number else spec.dtype)
