"""Tensors that have the same geometry on both sides of a plan share all of its work: `pair_groups` finds them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planners.geometry.dtypes import ITEM_SIZES
from planners.geometry.layout import StateLayout, TensorLayout
from planners.geometry.layout_forms import Form

__all__ = ["PairGroup", "pair_groups"]


@dataclass(frozen=True, slots=True)
class PairGroup:
    """Tensors of equal shape and item sizes, placed alike before and alike after."""

    names: tuple[str, ...]
    positions: tuple[int, ...]
    """Where each name stands among those that were grouped."""
    before: TensorLayout
    """The layout of the first of them, on the side that gives."""
    after: TensorLayout
    """The same on the side that takes."""

    def __len__(self) -> int:
        return len(self.names)


def pair_groups(before: StateLayout, after: StateLayout, names: Iterable[str]) -> tuple[PairGroup, ...]:
    """`names`, which both sides have, grouped by all that plans depend on: shape, item sizes and both forms.

    Groups come in the order of their first names, and names keep their order.
    """
    numbers: dict[int, int] = {}  # forms are mostly shared objects, so that each is hashed once
    distinct: dict[Form, int] = {}

    def number(form: Form) -> int:
        found = numbers.get(id(form))
        if found is None:
            found = numbers[id(form)] = distinct.setdefault(form, len(distinct))
        return found

    groups: dict[tuple[object, ...], tuple[list[str], list[int]]] = {}
    for position, fqn in enumerate(names):
        left, right = before[fqn], after[fqn]
        a, b = left.spec, right.spec
        key = (a.shape, b.shape, ITEM_SIZES[a.dtype], ITEM_SIZES[b.dtype], number(left.form), number(right.form))
        group = groups.get(key)
        if group is None:
            group = groups[key] = ([], [])
        group[0].append(fqn)
        group[1].append(position)
    return tuple(
        PairGroup(tuple(fqns), tuple(positions), before[fqns[0]], after[fqns[0]]) for fqns, positions in groups.values()
    )
