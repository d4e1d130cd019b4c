"""`plan`: what a job with another topology would read from a checkpoint, without running it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import starmap
from pathlib import Path
from typing import Any

from planners.errors import PlanError
from planners.geometry.layout import StateLayout
from planners.geometry.topologies import Rule, Topology, looks_like_a_topology, topology_of
from planners.plans.load import LoadPlan, plan_reads
from planners.units import format_some
from reshard.arguments import check_options, renamed
from reshard.checkpoint import Checkpoint, CheckpointSource, open as open_checkpoint
from reshard.errors import FormatError, LayoutError, StorageError, option_error
from reshard.storage.base import AnyPath, Storage
from reshard.storage.opening import describe_wrong_path


@renamed()
def plan(
    source: CheckpointSource | StateLayout,
    onto: CheckpointSource | StateLayout | Topology,
    *,
    rules: Mapping[str, str] | None = None,
    allow_unsharded_axes: bool = False,
) -> LoadPlan:
    """Plan what every rank of `onto` would read from `source`. Reads no tensor data. Needs no
    process group or GPU.

        plan = reshard.plan("run/step-1000", "fsdp=48,tp=16")
        print(plan, plan.verify().ok)
        Path("plan.html").write_text(plan.to_html())

    Args:
        source: the path of a checkpoint or layout file, an open `Checkpoint`, or a `StateLayout`.
        onto: the same, or the target topology for all tensors of the source: a `Topology`, or
            its text as on the command line, such as "fsdp=3", "fsdp=4,tp=2", "hsdp=2x4", or the
            axes that the source records, such as "dp=2,tp=2".
        rules: placements by glob, for a topology with your own axes: `plan(path, "dp=4",
            rules={"*": "S(0)"})`.
        allow_unsharded_axes: do not warn about an axis that shards no tensor because its rules
            match none.

    Raises:
        LayoutMismatchError: `onto` has tensors that the source lacks or that have other shapes or
            dtypes in it.
        PlanError: the text names no topology. The message suggests the closest one.
        OptionError: `source` or `onto` has none of these types, or there are rules without a
            topology.
    """
    check_options(allow_unsharded_axes=allow_unsharded_axes)
    if rules and not (isinstance(rules, Mapping) and all(isinstance(text, str) for text in rules.values())):
        raise option_error(
            "rules must be a dict of text, such as {'*.wo.weight': 'S(0),S(1)', '*': 'S(0),R'}", LayoutError
        )
    saved = _side(source, None)
    if not isinstance(saved, StateLayout):
        raise option_error(f"source must be a path, Checkpoint, or StateLayout, got {_no_source(source)}", LayoutError)
    wanted = _side(onto, rules, saved)
    if isinstance(wanted, Topology):
        topology, wanted = wanted, wanted.layout(saved.specs)
        for axis, fqns in {} if allow_unsharded_axes else topology.unsharded_axes(wanted).items():
            words = "Pass rules= that match, or allow_unsharded_axes=True"
            warnings.warn(f"{unsharded_text(axis, fqns)}. {words}", stacklevel=3)
    elif rules:
        raise option_error(f"rules are for a topology in words, such as 'dp=4', and not for {onto!r:.80}", LayoutError)
    if not isinstance(wanted, StateLayout):
        words = "onto must be a path, Checkpoint, StateLayout, or Topology, or text such as 'fsdp=4,tp=2', got"
        raise option_error(f"{words} {describe_wrong_path(onto)}", LayoutError)
    return plan_reads(saved, wanted)


def _no_source(given: Any) -> str:
    """Return the type of a wrong source, and what to pass instead."""
    if isinstance(given, Mapping) and not hasattr(given, "_INSTEAD"):
        return f"{type(given).__name__}: pass the layout of the state, reshard.layout_of(state)"
    if isinstance(given, str | Topology):
        shown = repr(given) if isinstance(given, str) else "a Topology"
        return f"{shown}: pass the checkpoint first, then the topology: reshard.plan(path, 'fsdp=4')"
    return describe_wrong_path(given)


def unsharded_text(axis: str, fqns: Sequence[str]) -> str:
    """Return a text about tensors that an axis does not shard."""
    return f"axis {axis!r} shards no tensor: all ranks along it hold all of {format_some(fqns, 3)}"


def _side(given: Any, rules: Mapping[str, str] | None, saved: StateLayout | None = None) -> Any:
    """Return a layout or topology, also from its path or its words."""
    if isinstance(given, str) and names_topology(given):
        return topology_of(given, rules, saved)
    if isinstance(given, str | os.PathLike) and is_layout_file(given):
        return read_layout_file(given, rules)
    if isinstance(given, str | os.PathLike | Storage):
        given = open_checkpoint(given)
    return given.layout if isinstance(given, Checkpoint) else given


def names_topology(text: str) -> bool:
    """Return True for a topology in words, unless there is a file with that name."""
    return looks_like_a_topology(text) and not Path(text).exists()


def is_layout_file(path: AnyPath) -> bool:
    """Return True if the file may contain a layout, plan, or topology."""
    return Path(path).suffix in (".json", ".topology", ".txt") and Path(path).is_file()


def read_layout_file(path: AnyPath, rules: Mapping[str, str] | None = None) -> StateLayout | Topology:
    """Read the layout of a `.json` file, the target layout of a plan, or a topology in a text file.

    Raises FormatError for JSON with other contents, PlanError for text that is not a topology, and
    StorageError for a file that cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"{path} cannot be read: {error}") from error
    if Path(path).suffix != ".json":
        try:
            return replace(Topology.parse(text, rules), origin=f"{path}: ")
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None
    from planners.plans.codec import loads

    value = loads(text)
    if isinstance(value, LoadPlan):
        return value.wanted
    if isinstance(value, Topology):
        return replace(value, rules=(*starmap(Rule.parse, (rules or {}).items()), *value.rules))
    if not isinstance(value, StateLayout):
        raise FormatError(f"{path} holds a {type(value).__name__}, not a layout or topology")
    return value
