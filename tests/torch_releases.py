"""The differences between releases of torch, for tests that call torch itself: each is here, with its reason."""

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
"""Of any size. torch 2.6, and its FSDP2 over tensor parallelism, only shards sizes that the ranks divide."""


def requires(able: bool, reason: str) -> pytest.MarkDecorator:
    """Skip a test that this torch cannot pass. The reason says what it lacks."""
    import pytest  # not at the top: ranks import this module, too, and do not need it

    return pytest.mark.skipif(not able, reason=f"torch {torch.__version__} {reason}")


RANDOM_WARNING = "ignore:DTensor random operators may not have complete support:UserWarning"
"""torch 2.6 warns about the first CPU mesh of a process."""
FSDP2_TRAINS_ON_CPUS = hasattr(torch.cpu.Stream, "record_event")
"""torch 2.6 lacks streams for this, and counts what is gathered again as changed."""
HAS_E8M0 = hasattr(torch, "float8_e8m0fnu")
"""torch 2.6 lacks this dtype, which one of our samples has."""


def distribute_own(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Call `distribute_tensor` on each rank's own data, so that no rank sends anything: `src_data_rank=None`.

    torch 2.6 always sends. With it, the same placements shard the same tensor here, also in the order of the mesh.
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
    """Call torch's `save` in this process, without a group."""
    return _alone(dcp.save, state, arguments)


def load_alone(state: Any, **arguments: Any) -> None:
    """Call torch's `load` in this process, without a group."""
    _alone(dcp.load, state, arguments)


def _alone(call: Callable[..., Any], state: Any, arguments: dict[str, Any]) -> Any:
    # torch 2.6 has no option, and detects it; all releases warn
    told = {"no_dist": True} if "no_dist" in inspect.signature(call).parameters else {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)")
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # torch 2.6 uses it itself
        return call(state, **told, **arguments)
