"""`plan`: what a change of topology would read, before anything runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planners.geometry.layout import StateLayout
from planners.geometry.topologies import Topology, looks_like_a_topology, topology_of
from planners.plans.load import LoadPlan, plan_reads
from reshard.checkpoint import Checkpoint, open as open_checkpoint
from reshard.errors import FormatError, LayoutError, StorageError
from reshard.storage.base import Storage

__all__ = ["is_layout_file", "plan", "read_layout_file"]


def plan(source: Any, onto: Any, *, rules: Mapping[str, str] | None = None) -> LoadPlan:
    """What every rank of `onto` would read from `source`: no process group, GPU or data is touched.

        plan = reshard.plan("run/step-1000", "fsdp=48,tp=16")
        print(planners.format_plan(plan, limit=3), planners.verify(plan).ok)

    Args:
        source: the path of a checkpoint or layout file, an open `Checkpoint`, or a `StateLayout`.
        onto: the same, or a `Topology`, which then lays out all tensors of the source; or one in a few words, as the
            command line takes it: "fsdp=3", "fsdp=4,tp=2", "hsdp=2x4".
        rules: placements by glob, for a topology with axes of your own: `plan(path, "dp=4", rules={"*": "S(0)"})`.

    Raises:
        LayoutMismatchError: `onto` wants tensors that the source does not have, or of other shapes or dtypes.
        PlanError: the words name no topology; it says what may have been meant.
        LayoutError: `source` or `onto` is none of these, or there is no topology that the rules are for.
    """
    saved = _side(source, None)
    if not isinstance(saved, StateLayout):
        what = f"{source!r}" if isinstance(source, str) else f"a {type(source).__name__}"
        raise LayoutError(f"a plan starts from a path, Checkpoint or StateLayout, not from {what}")
    wanted = _side(onto, rules)
    if isinstance(wanted, Topology):
        wanted = wanted.layout(saved.specs)
    elif rules:
        raise LayoutError(f"rules are for a topology in words, such as 'dp=4', and not for {onto!r:.80}")
    if not isinstance(wanted, StateLayout):
        raise LayoutError(f"a plan leads to a StateLayout or Topology, not to a {type(onto).__name__}")
    return plan_reads(saved, wanted)


def _side(given: Any, rules: Mapping[str, str] | None) -> Any:
    """A layout or topology, where a path or words stand for one."""
    if isinstance(given, str) and looks_like_a_topology(given) and not Path(given).exists():
        return topology_of(given, rules)
    if isinstance(given, str | os.PathLike) and is_layout_file(given):
        return read_layout_file(given, rules)
    if isinstance(given, str | os.PathLike | Storage):
        given = open_checkpoint(given)
    return given.layout if isinstance(given, Checkpoint) else given


def is_layout_file(path: str | os.PathLike[str]) -> bool:
    """Whether there is a file that may hold a layout, plan or topology."""
    return Path(path).suffix in (".json", ".topology", ".txt") and Path(path).is_file()


def read_layout_file(path: str | os.PathLike[str], rules: Mapping[str, str] | None = None) -> StateLayout | Topology:
    """The layout, or that which a plan leads to, of a `.json` file; of others the topology that they are the text of.

    Raises FormatError for JSON that holds something else, PlanError for text that is none of these,
    StorageError for a file that cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error}") from error
    if Path(path).suffix != ".json":
        return Topology.parse(text, rules)
    from planners.plans.codec import loads

    value = loads(text)
    if isinstance(value, LoadPlan):
        return value.wanted
    if not isinstance(value, StateLayout | Topology):
        raise FormatError(f"{path} holds a {type(value).__name__}, not a layout or topology")
    return value
