"""`plan`: what a change of topology would read, before anything runs."""

from __future__ import annotations

import os
from typing import Any

from planners.geometry.layout import StateLayout
from planners.load.plan import LoadPlan, plan_reads
from planners.topologies.topology import Topology
from reshard.checkpoint.checkpoint import Checkpoint
from reshard.checkpoint.checkpoint import open as open_checkpoint
from reshard.errors import LayoutError
from reshard.storage.base import Storage

__all__ = ["plan"]


def plan(source: Any, onto: StateLayout | Topology) -> LoadPlan:
    """What every rank of `onto` would read from `source`: no process group, GPU or data is touched.

    Args:
        source: the path of a checkpoint, an open `Checkpoint`, or a `StateLayout`.
        onto: a `StateLayout`, or a `Topology`, which then lays out all tensors of the source.

    Raises:
        LayoutMismatchError: `onto` wants tensors that the source does not have, or of other shapes or dtypes.
        LayoutError: `source` or `onto` is none of these.
    """
    if isinstance(source, (str, os.PathLike, Storage)):
        source = open_checkpoint(source)
    saved = source.layout if isinstance(source, Checkpoint) else source
    if not isinstance(saved, StateLayout):
        raise LayoutError(f"a plan starts from a path, Checkpoint or StateLayout, not from a {type(source).__name__}")
    if isinstance(onto, Topology):
        onto = onto.layout(saved.specs)
    if not isinstance(onto, StateLayout):
        raise LayoutError(f"a plan leads to a StateLayout or Topology, not to a {type(onto).__name__}")
    return plan_reads(saved, onto)
