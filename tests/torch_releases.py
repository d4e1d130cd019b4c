"""What the releases of torch differ in, for tests that call torch itself: each difference here, with its reason."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

if TYPE_CHECKING:
    import pytest

__all__ = [
    "FSDP2_TRAINS_ON_CPUS",
    "HAS_E8M0",
    "RANDOM_WARNING",
    "UNEVEN_STRIDES",
    "distribute_own",
    "load_alone",
    "requires",
    "save_alone",
]


def _cuts_strides_unevenly() -> bool:
    try:
        _StridedShard(0, split_factor=2)._split_tensor(torch.arange(3), 2, with_padding=False)
    except AssertionError:
        return False
    return True


UNEVEN_STRIDES = _cuts_strides_unevenly()
"""Of any size. torch 2.6 cuts only what the ranks divide, and so does its FSDP2 over tensor parallelism."""


def requires(able: bool, reason: str) -> pytest.MarkDecorator:
    """Skips what this torch cannot do; the reason says what that is."""
    import pytest  # not above: ranks import this module too, and need none of it

    return pytest.mark.skipif(not able, reason=f"torch {torch.__version__} {reason}")


RANDOM_WARNING = "ignore:DTensor random operators may not have complete support:UserWarning"
"""What torch 2.6 says of the first mesh of CPUs in a process."""
FSDP2_TRAINS_ON_CPUS = hasattr(torch.cpu.Stream, "record_event")
"""The streams of torch 2.6 cannot, and what is gathered again there counts as changed."""
HAS_E8M0 = hasattr(torch, "float8_e8m0fnu")
"""A dtype that torch 2.6 lacks, and one of our samples has."""


def distribute_own(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """`distribute_tensor` of what each rank has by itself, so that no rank sends anything: `src_data_rank=None`.

    torch 2.6 always sends. There the same placements cut the same tensor here, in the order of the mesh as well.
    """
    if "src_data_rank" in inspect.signature(distribute_tensor).parameters:
        return distribute_tensor(tensor, mesh, placements, src_data_rank=None)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "only on ranks of the mesh"
    local = tensor
    for placement, size, at in zip(placements, mesh.shape, coordinate, strict=True):
        if placement.is_shard():
            parts, _ = placement._split_tensor(local, size, with_padding=False, contiguous=True)  # type: ignore[attr-defined]
            local = parts[at]
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def save_alone(state: Any, **arguments: Any) -> Any:
    """torch's `save` by this process without a group."""
    return _alone(dcp.save, state, arguments)


def load_alone(state: Any, **arguments: Any) -> None:
    """torch's `load` by this process without a group."""
    _alone(dcp.load, state, arguments)


def _alone(call: Callable[..., Any], state: Any, arguments: dict[str, Any]) -> Any:
    # torch 2.6 cannot be told, and finds out by itself; all releases warn
    told = {"no_dist": True} if "no_dist" in inspect.signature(call).parameters else {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)")
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # of which torch 2.6 makes use itself
        return call(state, **told, **arguments)
