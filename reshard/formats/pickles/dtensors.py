"""DTensors in pickles: the records of a `DTensor`, its mesh and placements as a layout, without the classes of torch.

What these classes pickle to changes between torch versions; the three forms of a mesh that exist are read here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from planners.errors import PlanError
from planners.geometry.layout import TensorLayout, TensorSpec
from planners.geometry.mesh import Mesh
from planners.geometry.placement import Placement, Replicate, Shard, StridedShard
from reshard.errors import DamagedCheckpointError, FormatError
from reshard.formats.pickles.record import Record
from reshard.formats.pickles.torch_objects import TensorRef
from reshard.state.dtypes import dtype_name

__all__ = ["Shardlet", "is_dtensor", "read_dtensor"]


@dataclass(frozen=True)
class Shardlet:
    """One rank's part of a DTensor: the layout of the whole, and the local tensor."""

    layout: TensorLayout
    local: TensorRef


def is_dtensor(value: object) -> bool:
    """Whether a value of a pickle is a DTensor."""
    return isinstance(value, Record) and value.path.startswith("torch.distributed") and value.name == "DTensor"


def read_dtensor(key: str, record: Record, rank: int, read: Callable[[TensorRef], Any], where: str) -> Shardlet:
    """The layout and local part of the DTensor `record` from the file of `rank`; `read` reads a small tensor.

    Raises:
        FormatError: pending reductions, or placements that are not known.
        DamagedCheckpointError: a record that no version of torch writes.
    """
    try:
        fields = record.fields
        spec, local = fields["_spec"].fields, fields["_local_tensor"]
        meta = spec["tensor_meta"]
        values = meta.args or [meta.fields[name] for name in ("shape", "stride", "dtype")]
        shape, dtype = [int(n) for n in values[0]], dtype_name(values[2])
        mesh = _mesh(spec["mesh"], rank, read)
        placements = [_placement(p, len(shape)) for p in spec["placements"]]
        layout = TensorLayout(TensorSpec(key, shape, dtype), mesh, placements)
    except (KeyError, AttributeError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, (FormatError, DamagedCheckpointError)):
            raise type(error)(f"{where}: tensor {key!r}: {error}") from None
        what = str(error) if isinstance(error, PlanError) else f"{type(error).__name__}: {error}"
        raise DamagedCheckpointError(f"{where}: the DTensor {key!r} makes no sense: {what}") from None
    if not isinstance(local, TensorRef):
        raise FormatError(f"{where}: the local tensor of {key!r} is a {getattr(local, 'path', type(local).__name__)}")
    return Shardlet(layout, local)


def _placement(record: Record, ndim: int) -> Placement:
    name, fields = record.name, record.fields
    if name == "Replicate":
        return Replicate()
    if name not in ("Shard", "_StridedShard"):
        raise FormatError(
            f"a placement {name}, which is not supported: redistribute to Shard or Replicate before saving"
        )
    args = list(record.args)
    dim = int(fields["dim"] if "dim" in fields else args[0]) % max(ndim, 1)
    if name == "Shard":
        return Shard(dim)
    return StridedShard(dim, int(fields["split_factor"] if "split_factor" in fields else record.kwargs["split_factor"]))


def _mesh(record: Record, rank: int, read: Callable[[TensorRef], Any]) -> Mesh:
    fields = record.fields
    if "_rank_map" in fields:
        ranks = _submesh(_axes(fields["_layout"]), _numbers(fields["_rank_map"], read), rank)
        names = fields.get("_mesh_dim_names")
    else:  # before torch 2.10 or so, the mesh is a tensor of ranks
        ranks = _numbers(fields["mesh"] if "mesh" in fields else fields["_mesh"], read)
        names = fields.get("mesh_dim_names", fields.get("_mesh_dim_names"))
    axis_names = tuple(names) if names else tuple(f"axis{i}" for i in range(ranks.ndim))
    return Mesh(list(zip(axis_names, ranks.shape, strict=True)), ranks.reshape(-1).tolist())


def _numbers(ref: Any, read: Callable[[TensorRef], Any]) -> np.ndarray[Any, Any]:
    if isinstance(ref, TensorRef):
        return np.asarray(read(ref).numpy(), dtype=np.int64)
    return np.asarray(ref, dtype=np.int64)


def _axes(layout: Record) -> list[list[tuple[int, int]]]:
    """For each axis of a mesh, the (size, stride) pairs it is made of; outermost first."""
    fields = layout.fields
    if "axes" in fields:
        parts = [(axis.fields["shape"], axis.fields["stride"]) for axis in fields["axes"]]
    else:
        shape, stride = fields["shape"], fields["stride"]
        parts = list(zip(shape, stride)) if isinstance(shape, tuple) else [(shape, stride)]
    return [list(zip(_flat(shape), _flat(stride), strict=True)) for shape, stride in parts]


def _flat(value: Any) -> list[int]:
    if isinstance(value, (tuple, list)):
        return [n for part in value for n in _flat(part)]
    return [int(value)]


def _submesh(axes: list[list[tuple[int, int]]], rank_map: np.ndarray[Any, Any], rank: int) -> np.ndarray[Any, Any]:
    """The ranks of that copy of a (sub)mesh in which `rank` is: `axes` says positions in `rank_map` from a start."""
    shape = [math.prod(size for size, _ in axis) for axis in axes]
    steps = [_positions(axis) for axis in axes]
    offsets = np.array([sum(combo) for combo in itertools.product(*steps)], dtype=np.int64)
    flat = rank_map.reshape(-1)
    if offsets.size > flat.size or rank not in flat:
        raise ValueError(f"a mesh of {offsets.size} ranks in a world of {flat.size}, without rank {rank}")
    at = int(np.flatnonzero(flat == rank)[0])
    free = np.ones(flat.size, dtype=bool)
    while free.any():  # copies start at the first position that no copy has taken yet
        members = int(np.flatnonzero(free)[0]) + offsets
        if members.max(initial=0) >= flat.size:
            raise ValueError("a mesh that does not tile its world")
        free[members] = False
        if at in members:
            return flat[members].reshape(shape)
    raise ValueError(f"rank {rank} is in no copy of its mesh")


def _positions(axis: Iterable[tuple[int, int]]) -> list[int]:
    return [sum(combo) for combo in itertools.product(*(range(0, size * stride, stride) for size, stride in axis))]
