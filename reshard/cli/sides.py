"""What a side of a plan can be on the command line: a checkpoint, a layout or topology in a file, or a few words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from planners.errors import PlanError
from reshard.cli.usage import UsageError
from reshard.errors import CheckpointNotFoundError

if TYPE_CHECKING:
    from planners.geometry.layout import StateLayout
    from planners.topologies.topology import Topology
    from reshard.checkpoint.checkpoint import Checkpoint

__all__ = ["Rules", "Sides", "both_sides", "rules_of", "side"]

Rules = Annotated[
    list[str] | None,
    typer.Option("--rule", metavar="GLOB=PLACEMENTS", help="For a topology: '*.wo.weight=S(0),S(1)'. Repeat it."),
]


def rules_of(given: list[str] | None) -> dict[str, str]:
    """Placements by glob. Raises UsageError for a rule that cannot be read."""
    rules = {}
    for text in given or []:
        glob, equals, placements = text.partition("=")
        if not equals:
            raise UsageError(f"cannot read the rule {text!r}: write GLOB=PLACEMENTS, such as '*.weight=S(0),R'")
        rules[glob.strip()] = placements.strip()
    return rules


class Sides(NamedTuple):
    """What a plan leads from and to."""

    saved: StateLayout
    wanted: StateLayout
    laid_out: StateLayout | None = None
    """That of the two which a topology made."""
    uncut_axes: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    """Of that one, see `Topology.uncut_axes`."""


def both_sides(
    source: str,
    onto: str,
    rules: Mapping[str, str],
    *,
    normalized: bool = False,
    hints: Mapping[str, Any] | None = None,
) -> Sides:
    """Both sides; `rules` are for the sides that are topologies, `normalized` for checkpoints.

    Raises UsageError if neither side says which tensors there are, if no side has a use for the rules, or if one
    cannot be read.
    """
    from planners.geometry.layout import StateLayout

    first, second = (side(text, rules, normalized, hints) for text in (source, onto))
    if rules and isinstance(first, StateLayout) and isinstance(second, StateLayout):
        raise UsageError(f"--rule is for a topology, and both {source!r} and {onto!r} have layouts of their own")
    if isinstance(first, StateLayout) and isinstance(second, StateLayout):
        return Sides(first, second)
    if isinstance(first, StateLayout):
        assert not isinstance(second, StateLayout)
        made = _laid_out(second, first, rules)
        return Sides(first, made, made, second.uncut_axes(made))
    if isinstance(second, StateLayout):
        made = _laid_out(first, second, rules)
        return Sides(made, second, made, first.uncut_axes(made))
    raise UsageError(
        f"{source!r} and {onto!r} are both topologies, which name no tensors: one side must be a checkpoint or a "
        "layout file"
    )


def _laid_out(topology: Topology, other: StateLayout, rules: Mapping[str, str]) -> StateLayout:
    """The tensors of the other side under a topology; it is wrong usage where rules of the command line do not fit."""
    try:
        return topology.layout(other.specs)
    except PlanError as error:
        raise (UsageError(str(error)) if rules else error) from None


def side(
    text: str, rules: Mapping[str, str], normalized: bool = False, hints: Mapping[str, Any] | None = None
) -> StateLayout | Topology:
    """What one side is: the layout of a checkpoint or file, or a topology. Raises UsageError for a topology that
    cannot be read."""
    from planners.topologies.words import WORDS, looks_like_a_topology, topology_of

    if looks_like_a_topology(text) and not Path(text).exists():
        try:
            return topology_of(text, rules)
        except PlanError as error:
            raise UsageError(str(error)) from None
    import reshard
    from reshard.api.plan import is_layout_file, read_layout_file

    if is_layout_file(text):
        return read_layout_file(text, rules)
    try:
        checkpoint = reshard.open(text)
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(f"{error}. A topology can be given, too: {WORDS}, or any with --rule") from None
    return _canonical(checkpoint, hints) if normalized else checkpoint.layout


def _canonical(checkpoint: Checkpoint, hints: Mapping[str, Any] | None) -> StateLayout:
    """The layout under canonical names: `model.<fqn>`, `optim.state.<fqn>.<name>`."""
    from planners.geometry.layout import StateLayout
    from reshard.checkpoint.checkpoint import stored_layout
    from reshard.formats.stored.lazy_tensor import LazyTensor
    from reshard.state.tree import flatten, key_of

    leaves = flatten(checkpoint.normalized(hints), is_leaf=lambda value: isinstance(value, LazyTensor)).leaves
    tensors = {key_of(path): value.stored for path, value in leaves.items() if isinstance(value, LazyTensor)}
    return StateLayout({key: stored_layout(stored.renamed(key)) for key, stored in tensors.items()})
