"""Suggests rules if an axis of a topology shards no tensor, because no rule matches the model's names."""

from __future__ import annotations

import fnmatch
import glob
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

from planners.errors import PlanError
from planners.geometry.layout import StateLayout
from planners.geometry.mesh import Placement, Replicate, Shard, StridedShard
from planners.geometry.topologies import Globs, Rule, Topology

_MOST_KINDS = 2_000
"""Limit for kinds of names that are compared. No model has more, and the comparison is slow."""


def recorded_rules(topology: Topology, saved: StateLayout, axis: str) -> list[Rule]:
    """Return rules by which the axis shards each tensor as the saved axis of this name did, and the
    rules of the topology. Returns [] if that is not recorded, or shards nothing."""
    dims: dict[str, Placement] = {}
    for fqn, layout in saved.items():
        placement = dict(zip(layout.mesh.names if layout.mesh else (), layout.placements or ())).get(axis)
        if placement is not None and layout.spec.shape:
            dims[fqn] = Shard(placement.dim) if isinstance(placement, StridedShard) else placement
    return _tried(topology, saved, axis, _globs(dims))


def example_rules(topology: Topology, saved: StateLayout, axis: str, fqns: tuple[str, ...]) -> list[Rule]:
    """Return rules by which the axis shards the first of the tensors with the most dims, with its
    optimizer states, and the rules of the topology. Returns [] if they shard nothing."""
    first = _kind(max(fqns, key=lambda fqn: len(saved[fqn].spec.shape)))
    bare = first.partition(".")[2] if first.count(".") > 1 else first  # without `model.`, which states do not have
    return _tried(topology, saved, axis, [(f"*{bare.strip('*')}*", Shard(0))])


def as_options(rules: list[Rule]) -> list[str]:
    """Return the rules as options of the command line."""
    return [f"--rule '{rule.pattern}={rule.text}'" for rule in rules]


def _tried(topology: Topology, saved: StateLayout, axis: str, rows: Iterable[tuple[str, Placement]]) -> list[Rule]:
    """Return the rules of these rows, followed by those of the topology, if the axis then shards
    something."""
    if (axis,) not in {group for rule in topology.rules for group in rule.axes or ((axis,),)}:
        return []  # the axis is flattened with others
    kept = [_plain(rule, topology) for rule in topology.rules if rule.pattern == "*" or not rule.optional]
    made = [*(_rule(topology, pattern, placement, axis) for pattern, placement in rows), *kept]
    for its in (made, made[: -len(kept)]):  # without the last ones, if they match no tensor
        with suppress(PlanError):
            layout = Topology(topology.mesh, tuple(its), topology.homes, topology.even).layout(saved.specs)
            return [] if axis in layout.unsharded_axes() else its
    return []


def _rule(topology: Topology, pattern: str, placement: Placement, axis: str) -> Rule:
    """Return the topology's own rule, with this axis added. If two axes shard a dim, this one is
    first, because FSDP shards what tensor parallelism left."""
    number = Globs([rule.pattern for rule in topology.rules]).first(pattern)
    rule = topology.rules[number or 0]
    groups = rule.axes or tuple((name,) for name in topology.mesh.names)
    by_group = dict(zip(groups, rule.placements)) | {(axis,): placement}
    shared = {group for group, other in by_group.items() if getattr(other, "dim", -1) == getattr(placement, "dim", -2)}
    order = sorted(groups, key=lambda group: (group in shared, group != (axis,))) if len(shared) > 1 else groups
    return _plain(Rule(pattern, tuple(by_group[group] for group in order), tuple(order)), topology)


def _plain(rule: Rule, topology: Topology) -> Rule:
    """Return the rule without axis names if it names all axes of the mesh in order."""
    in_order = tuple((name,) for name in topology.mesh.names)
    return replace(rule, axes=None, optional=False) if rule.axes == in_order else replace(rule, optional=False)


def _globs(dims: Mapping[str, Placement]) -> Iterator[tuple[str, Placement]]:
    """Yield the shortest globs that match no tensor with another placement. Omits tensors that no
    glob can separate."""
    kinds: dict[str, set[Placement]] = {}
    for fqn, placement in dims.items():
        kinds.setdefault(_kind(fqn), set()).add(placement)
    left = sorted(kinds, key=len) if len(kinds) <= _MOST_KINDS else []
    while left:
        kind = left.pop(0)
        if kinds[kind] == {Replicate()} or len(kinds[kind]) > 1:
            continue
        for pattern in _candidates(kind):
            matched = fnmatch.filter(kinds, pattern)
            if all(kinds[other] == kinds[kind] for other in matched):
                left = [other for other in left if other not in set(matched)]
                yield pattern, next(iter(kinds[kind]))
                break


def _candidates(kind: str) -> Iterator[str]:
    segments = [part if part == "*" else glob.escape(part) for part in kind.split(".")]
    for count in range(1, len(segments) + 1):
        tail = ("*" if count < len(segments) else "") + ".".join(segments[-count:])
        if segments[-count] != "*":
            yield from (f"{tail}*", tail)


def _kind(fqn: str) -> str:
    """Return the name with `*` for each number."""
    return re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", fqn)
