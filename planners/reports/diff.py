"""`diff`: what changes if one plan is taken and not another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planners.errors import PlanError
from planners.geometry.layout import StateLayout, TensorLayout
from planners.geometry.ownership import Ints
from planners.load.plan import LoadPlan
from planners.save.plan import SavePlan
from planners.transfer.plan import TransferPlan
from planners.units import format_bytes

__all__ = ["PlanDiff", "diff"]

_LISTED = 10


@dataclass(frozen=True, eq=False)
class PlanDiff:
    """The difference of two plans or layouts, from `a` to `b`."""

    only_a: tuple[str, ...]
    """Names that only the first has."""
    only_b: tuple[str, ...]
    """Names that only the second has."""
    changed: dict[str, str]
    """Names whose shape, dtype or placement differs, with how."""
    rank_bytes: tuple[Ints, Ints]
    """Bytes of each rank in both: read, written, received or held. Ranks that one of them lacks have 0."""

    @property
    def is_empty(self) -> bool:
        """Whether both are the same in all of this."""
        return not (self.only_a or self.only_b or self.changed) and np.array_equal(*self.rank_bytes)

    @property
    def added_bytes(self) -> int:
        """How many bytes more the second has in all; negative if fewer."""
        return int(self.rank_bytes[1].sum()) - int(self.rank_bytes[0].sum())

    def __str__(self) -> str:
        if self.is_empty:
            return "no difference"
        lines = []
        for names, verb in ((self.only_a, "only in the first"), (self.only_b, "only in the second")):
            if names:
                lines.append(f"{verb}: {_listed(names)}")
        hows: dict[str, list[str]] = {}
        for fqn, how in self.changed.items():
            hows.setdefault(how, []).append(fqn)
        lines += [f"{how}: {_listed(tuple(names))}" for how, names in hows.items()]
        a, b = self.rank_bytes
        ranks = np.flatnonzero(a != b)
        lines.append(f"bytes: {format_bytes(int(a.sum()))} -> {format_bytes(int(b.sum()))}, {len(ranks)} ranks differ")
        most = [format_bytes(int(loads.max(initial=0))) for loads in (a, b)]
        lines.append(f"busiest rank: {most[0]} -> {most[1]}")
        for rank in ranks[np.argsort(-np.abs(b - a)[ranks], kind="stable")][:_LISTED].tolist():
            lines.append(f"  rank {rank}: {format_bytes(int(a[rank]))} -> {format_bytes(int(b[rank]))}")
        if len(ranks) > _LISTED:
            lines.append(f"  ... {len(ranks) - _LISTED} more ranks")
        return "\n".join(lines)


def diff(
    a: LoadPlan | SavePlan | TransferPlan | StateLayout, b: LoadPlan | SavePlan | TransferPlan | StateLayout
) -> PlanDiff:
    """What changes from `a` to `b`: two plans of one kind, or two layouts. Items are not enumerated.

    Raises PlanError for two different kinds, or for anything else.
    """
    if type(a) is not type(b):
        raise PlanError(f"cannot compare a {type(a).__name__} with a {type(b).__name__}: give two of one kind")
    sides = list(zip(_sides(a), _sides(b)))
    names = [list(dict.fromkeys(fqn for side in _sides(plan) for fqn in side)) for plan in (a, b)]
    in_a, in_b = set(names[0]), set(names[1])
    changed: dict[str, str] = {}
    for fqn in names[1]:
        how = _change([(left.get(fqn), right.get(fqn)) for left, right in sides]) if fqn in in_a else ""
        if how:
            changed[fqn] = how
    return PlanDiff(
        only_a=tuple(fqn for fqn in names[0] if fqn not in in_b),
        only_b=tuple(fqn for fqn in names[1] if fqn not in in_a),
        changed=changed,
        rank_bytes=_padded(_loads(a), _loads(b)),
    )


def _sides(plan: object) -> tuple[StateLayout, ...]:
    if isinstance(plan, LoadPlan):
        return plan.saved, plan.wanted
    if isinstance(plan, TransferPlan):
        return plan.before, plan.after
    if isinstance(plan, SavePlan):
        return (plan.layout,)
    if isinstance(plan, StateLayout):
        return (plan,)
    raise PlanError(f"cannot compare a {type(plan).__name__}: give plans or layouts")


def _loads(plan: LoadPlan | SavePlan | TransferPlan | StateLayout) -> Ints:
    return plan.received_bytes() if isinstance(plan, TransferPlan) else plan.rank_bytes()


def _padded(a: Ints, b: Ints) -> tuple[Ints, Ints]:
    size = max(len(a), len(b))
    return np.pad(a, (0, size - len(a))), np.pad(b, (0, size - len(b)))


def _change(pairs: list[tuple[TensorLayout | None, TensorLayout | None]]) -> str:
    words = []
    for left, right in pairs:
        if left is None or right is None:
            words += [] if left is right else ["absent on one side of the first" if left is None else "now absent"]
            continue
        if left.spec.shape != right.spec.shape:
            words.append(f"shape {left.spec.shape} -> {right.spec.shape}")
        if left.spec.dtype != right.spec.dtype:
            words.append(f"dtype {left.spec.dtype} -> {right.spec.dtype}")
        if left.form is not right.form and left.form != right.form:
            words.append(f"{_short(left)} -> {_short(right)}")
    return "; ".join(words)


def _short(layout: TensorLayout) -> str:
    text = str(layout.form)
    return text if len(text) <= 80 else text[:77] + "..."


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
