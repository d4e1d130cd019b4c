"""The topologies of the demo: as live models, and as the planner sees them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from planners.topologies.presets import fsdp_tp
from planners.topologies.topology import Topology
from reshard.cli.demo_job.model import Transformer

__all__ = ["Ways"]


@dataclass(frozen=True)
class Ways:
    """How many ways data and tensors are cut."""

    fsdp: int
    tp: int

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.fsdp * self.tp

    def __str__(self) -> str:
        parts = [f"FSDP {self.fsdp}"] * (self.fsdp > 1) + [f"TP {self.tp}"] * (self.tp > 1)
        return " × ".join(parts) or "one rank"

    @property
    def topology(self) -> Topology:
        """For the planner, which knows the names of such models."""
        return fsdp_tp(self.fsdp, self.tp)

    def mesh(self) -> DeviceMesh:
        """The device mesh, with the axes dp and tp."""
        return init_device_mesh("cpu", (self.fsdp, self.tp), mesh_dim_names=("dp", "tp"))

    def apply(self, model: Transformer, mesh: DeviceMesh) -> nn.Module:
        """Put a whole model into this topology, in place."""
        if self.tp > 1:
            _tensor_parallel(model, mesh["tp"])
        if self.fsdp > 1:
            for layer in model.layers:
                fully_shard(layer, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
        return model


def _tensor_parallel(model: Transformer, mesh: DeviceMesh) -> None:
    into, out_of = ColwiseParallel, RowwiseParallel
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
            "output": ColwiseParallel(output_layouts=Replicate()),
        },
    )
    for layer in model.layers:
        parallelize_module(
            layer,
            mesh,
            {
                "attention.wq": into(),
                "attention.wk": into(),
                "attention.wv": into(),
                "attention.wo": out_of(),
                "feed_forward.w1": into(),
                "feed_forward.w3": into(),
                "feed_forward.w2": out_of(),
            },
        )
