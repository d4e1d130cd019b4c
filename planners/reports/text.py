"""Plans as text and in numbers: an overview, one tensor, and the difference of two plans."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from planners.errors import PlanError
from planners.geometry.arrays import Ints, grouped
from planners.geometry.layout import Part, StateLayout, TensorLayout
from planners.plans.load import LoadPlan, ReadItem
from planners.plans.plan import Plan
from planners.plans.save import SavePlan, WriteItem
from planners.plans.schedule import Schedule
from planners.plans.transfer import TransferItem, TransferPlan
from planners.units import format_bytes, format_count, format_each, format_some

__all__ = ["PlanDiff", "PlanStats", "diff", "explain", "format_bytes", "format_plan", "summarize"]


def format_plan(
    plan: LoadPlan | SavePlan | TransferPlan | Schedule,
    limit: int | None = 20,
    *,
    width: int = 100,
    items: bool = True,
    bar: str = "#",
) -> str:
    """Return the plan as text: totals, bytes per rank with a bar of `bar` signs, and at most `limit`
    items of the first ranks. Neighboring ranks with equal bytes share a line. `limit=None` lists all
    items. `items=False` lists none.

    For a schedule, lists at most `limit` rounds. `width` is the width of the terminal in characters.
    It limits the bars. Raises PlanError if the value is neither a plan nor a schedule.
    """
    if isinstance(plan, Schedule):
        return "\n".join(_schedule_lines(plan, limit))
    if not isinstance(plan, Plan):
        raise PlanError(f"format_plan takes a plan or a schedule, got {plan!r:.80}")
    moved = f", {format_bytes(plan.bytes_moved)} cross" if isinstance(plan, TransferPlan) else ""
    lines = [repr(plan) + moved, *_load_lines(plan.rank_bytes(), plan.verb, limit, width, bar)]
    left = (sys.maxsize if limit is None else limit) * items
    meaning = f": NAME  box {_SIDES[plan.kind]}"
    for rank in range(plan.world_size):
        if left <= 0:
            break
        its = plan.rank_items(rank)
        if its:
            lines.append(f"  {plan.verb[:-1]} items of rank {rank}{meaning}")
            meaning = ""
        lines += [f"    {_line(item)}" for item in its[:left]]
        if len(its) > left:
            lines.append(f"    ... {len(its) - left} more")
        left -= len(its)
    return "\n".join(lines)


def explain(plan: LoadPlan | SavePlan | TransferPlan, fqn: str, rank: int) -> str:
    """Explain what a rank does with one tensor: what it holds or needs, and every item of it.

    Raises PlanError if the plan has no tensor of this FQN, or if the rank is outside the job.
    """
    if fqn not in plan.names:
        raise PlanError("the plan has no tensor of this name", fqn=fqn)
    if isinstance(plan, SavePlan):
        return "\n".join(_explain_save(plan, plan.layout[fqn], rank))
    if isinstance(plan, TransferPlan):
        return "\n".join(_explain_transfer(plan, fqn, rank))
    return "\n".join(_explain_load(plan, plan.wanted[fqn], rank))


def _load_lines(loads: Ints, verb: str, limit: int | None, width: int, bar: str) -> Iterator[str]:
    most = max(int(loads.max(initial=0)), 1)
    firsts = np.flatnonzero(np.diff(loads, prepend=-1)).tolist()
    ends = [*firsts[1:], len(loads)][:limit]
    names = [
        f"rank {first} {verb}" if end == first + 1 else f"ranks {first}-{end - 1} {verb[:-1]}"
        for first, end in zip(firsts, ends)
    ]
    wide = max(map(len, names), default=0)
    longest = max(min(30, width - wide - 21), 0)
    for name, end, size in zip(names, ends, format_each([int(loads[end - 1]) for end in ends])):
        each = " each" * name.startswith("ranks")
        yield f"  {name:<{wide}}  {size:>10}{each:<5}  {bar * round(longest * int(loads[end - 1]) / most)}".rstrip()
    if left := len(loads) - max(ends, default=0):
        mean = format_bytes(float(loads.mean()))
        yield f"  ... {left} more rank{'s' * (left != 1)}; mean {mean}, most {format_bytes(most)}"


def _schedule_lines(rounds: Schedule, limit: int | None) -> Iterator[str]:
    yield repr(rounds)
    columns = zip(rounds.round.tolist(), rounds.sender.tolist(), rounds.receiver.tolist(), rounds.sizes.tolist())
    for number, messages in itertools.groupby(columns, key=lambda row: row[0]):
        if limit is not None and number >= limit:
            yield f"  ... {rounds.rounds - limit} more rounds"
            return
        listed = [f"{sender}->{receiver} {format_bytes(size)}" for _, sender, receiver, size in messages]
        more = f", and {len(listed) - 8} more" if limit is not None and len(listed) > 8 else ""
        yield f"  round {number}: {', '.join(listed[: None if limit is None else 8])}{more}"


_SIDES = {
    "load": "in this rank's shard <- box in the saved chunk, and the chunk's box in the full tensor",
    "save": "in the full tensor <- box in this rank's shard",
    "transfer": "in this rank's shard <- box in the sender's shard",
}


def _line(item: ReadItem | WriteItem | TransferItem) -> str:
    size = format_bytes(item.nbytes)
    name = f"{item.fqn} (local tensor {item.part})" if item.part else item.fqn
    if isinstance(item, WriteItem):
        return f"{name} {item.box} <- local {item.source}, {size}"
    if isinstance(item, TransferItem):
        giver = "itself" if item.is_local else f"rank {item.sender}"
        return f"{name} {item.target} <- {item.source} of {giver}, {size}"
    source = f" of {item.saved_fqn}" if item.saved_fqn != item.fqn else ""
    return f"{name} {item.target} <- {item.source}{source} of chunk {item.chunk} of rank {item.owner}, {size}"


# --- one tensor on one rank ---


def _explain_load(plan: LoadPlan, layout: TensorLayout, rank: int) -> Iterator[str]:
    fqn = layout.fqn
    view = plan.views.get(fqn)
    yield _head(layout, f"rank {rank} wants", plan.wanted.parts(fqn, rank))
    for source in (fqn,) if view is None else dict.fromkeys(s.fqn for s in view.sources):
        saved = plan.saved[source]
        yield f"  saved{'' if source == fqn else f' as {source}'}: {saved.spec.shape} {saved.spec.dtype}, {saved.form}"
    yield from _explain_items(plan, fqn, rank)


def _explain_save(plan: SavePlan, layout: TensorLayout, rank: int) -> Iterator[str]:
    fqn = layout.fqn
    yield _head(layout, f"rank {rank} holds", plan.layout.parts(fqn, rank))
    yield from _explain_items(plan, fqn, rank)
    for box in dict.fromkeys(layout.boxes(rank) if rank < layout.world_size else ()):
        shares = [f"rank {other} {region}" for other, region in plan.writers(fqn, box)]
        yield f"  {box} is written by {', '.join(shares)}"


def _explain_items(plan: LoadPlan | SavePlan, fqn: str, rank: int) -> Iterator[str]:
    items = [item for item in plan.items(rank) if item.fqn == fqn]
    yield f"  {plan.verb} {format_bytes(sum(item.nbytes for item in items))} in {format_count(len(items), 'item')}:"
    yield from (f"    {_line(item)}" for item in items)


def _explain_transfer(plan: TransferPlan, fqn: str, rank: int) -> Iterator[str]:
    for layout, verb in ((plan.before[fqn], "holds before"), (plan.after[fqn], "holds after")):
        parts = layout.parts(rank) if rank < layout.world_size else ()
        yield _head(layout, f"rank {rank} {verb}", parts)
    arriving = [item for item in plan.items_to(rank) if item.fqn == fqn]
    leaving = [item for item in plan.items_from(rank) if item.fqn == fqn]
    local = sum(item.nbytes for item in arriving if item.is_local)
    received = sum(item.nbytes for item in arriving) - local
    yield f"  receives {format_bytes(received)} and copies {format_bytes(local)} of its own:"
    yield from (f"    {_line(item)}" for item in arriving)
    yield f"  sends {format_bytes(sum(item.nbytes for item in leaving))}:"
    yield from (f"    {item.box} to rank {item.receiver}, {format_bytes(item.nbytes)}" for item in leaving)


def _head(layout: TensorLayout, who: str, parts: Iterable[Part]) -> str:
    boxes = [str(box) for part in parts for box, _ in part.boxes()]
    spec = layout.spec
    return f"{spec.fqn} {spec.shape} {spec.dtype}, {layout.form}: {who} {', '.join(boxes) or 'nothing of it'}"


# `diff`: what changes if one plan is taken and not another.


_LISTED = 10


@dataclass(frozen=True, eq=False)
class PlanDiff:
    """The difference between two plans or layouts, from `a` to `b`."""

    only_a: tuple[str, ...]
    """Names that only `a` has."""
    only_b: tuple[str, ...]
    """Names that only `b` has."""
    changed: dict[str, str]
    """Names whose shape, dtype, or placement differs, with the difference."""
    rank_bytes: tuple[Ints, Ints]
    """Bytes of each rank in `a` and in `b`: read, written, received, or held. If one of them lacks a
    rank, its bytes are 0."""

    @property
    def is_empty(self) -> bool:
        """True if nothing differs."""
        return not (self.only_a or self.only_b or self.changed) and np.array_equal(*self.rank_bytes)

    @property
    def added_bytes(self) -> int:
        """Total bytes of `b` minus those of `a`."""
        return int(self.rank_bytes[1].sum()) - int(self.rank_bytes[0].sum())

    def __str__(self) -> str:
        if self.is_empty:
            return "no difference"
        only = ((self.only_a, "only in the first"), (self.only_b, "only in the second"))
        lines = [f"{verb}: {format_some(names, _LISTED)}" for names, verb in only if names]
        hows = grouped((how, fqn) for fqn, how in self.changed.items())
        lines += [f"{how}: {format_some(names, _LISTED)}" for how, names in hows.items()]
        a, b = self.rank_bytes
        ranks = np.flatnonzero(a != b)
        lines.append(f"bytes: {format_bytes(int(a.sum()))} -> {format_bytes(int(b.sum()))}, {len(ranks)} ranks differ")
        most = [format_bytes(int(loads.max(initial=0))) for loads in (a, b)]
        lines.append(f"busiest rank: {most[0]} -> {most[1]}")
        for rank in ranks[np.argsort(-np.abs(b - a)[ranks], kind="stable")][:_LISTED].tolist():
            lines.append(f"  rank {rank}: {format_bytes(int(a[rank]))} -> {format_bytes(int(b[rank]))}")
        if len(ranks) > _LISTED:
            lines.append(f"  ... {len(ranks) - _LISTED:,} more ranks")
        return "\n".join(lines)


def diff(
    a: LoadPlan | SavePlan | TransferPlan | StateLayout, b: LoadPlan | SavePlan | TransferPlan | StateLayout
) -> PlanDiff:
    """Compare two plans of one kind, or two layouts. Does not list items.

    Raises PlanError for plans of different kinds, and for any other value.
    """
    if type(a) is not type(b):
        raise PlanError(f"cannot compare {type(a).__name__} with {type(b).__name__}: give two of one kind")
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
        rank_bytes=_padded(a.rank_bytes(), b.rank_bytes()),
    )


def _sides(plan: object) -> tuple[StateLayout, ...]:
    if isinstance(plan, Plan):
        return tuple(plan.sides.values())
    if isinstance(plan, StateLayout):
        return (plan,)
    raise PlanError(f"cannot compare {type(plan).__name__}: give plans or layouts")


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


# `summarize`: a plan in figures, for all ranks, without listing its items.


@dataclass(frozen=True, slots=True)
class Bin:
    """Ranks with `low <= bytes <= high`."""

    low: int
    high: int
    ranks: int


@dataclass(frozen=True, eq=False)
class PlanStats:
    """Totals of a plan. `rank_bytes` is what each rank reads, writes, or receives from others."""

    kind: Literal["load", "save", "transfer"]
    tensors: int
    geometries: int
    """Number of groups of tensors that share all planning."""
    world_size: int
    rank_bytes: Ints
    items: Ints | None
    """Number of items of each rank. None for save plans, whose number depends on how chunks are divided."""
    unsharded_axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The `StateLayout.unsharded_axes` of the layout that the plan leads to. For a save, those of the saved layout."""

    uncut_axes = property(lambda self: self.unsharded_axes)  # its old name

    @property
    def total_bytes(self) -> int:
        """Bytes of all ranks."""
        return int(self.rank_bytes.sum())

    @property
    def max_bytes(self) -> int:
        """Bytes of the busiest rank."""
        return int(self.rank_bytes.max(initial=0))

    @property
    def mean_bytes(self) -> float:
        """Mean bytes per rank, including idle ranks."""
        return float(self.rank_bytes.mean()) if len(self.rank_bytes) else 0.0

    @property
    def busiest_rank(self) -> int:
        """The first rank with `max_bytes`."""
        return int(self.rank_bytes.argmax())

    @property
    def imbalance(self) -> float:
        """Bytes of the busiest rank divided by the mean; 1 is even. A plan without bytes is
        even."""
        return self.max_bytes / self.mean_bytes if self.mean_bytes else 1.0

    def histogram(self, bins: int = 10) -> tuple[Bin, ...]:
        """Group ranks by their bytes, in at most `bins` bins of equal width. Raises PlanError
        for less than one bin."""
        if bins < 1:
            raise PlanError(f"a histogram needs one bin or more, got {bins}")
        low, high = int(self.rank_bytes.min(initial=self.max_bytes)), self.max_bytes
        edges = sorted({low + (high + 1 - low) * i // bins for i in range(bins + 1)})
        counts, _ = np.histogram(self.rank_bytes, bins=np.array(edges, dtype=np.float64))
        return tuple(Bin(a, b - 1, int(n)) for a, b, n in zip(edges, edges[1:], counts))

    def __str__(self) -> str:
        verb = {"load": "read", "save": "written", "transfer": "moved between ranks"}[self.kind]
        lines = [
            *(
                f"axis {axis!r} shards no tensor: {len(fqns)} are replicated over it"
                for axis, fqns in self.unsharded_axes.items()
            ),
            (
                f"{format_count(self.tensors, 'tensor')} of {format_count(self.geometries, 'geometry')}, "
                f"{format_count(self.world_size, 'rank')}"
            ),
            (
                f"{format_bytes(self.total_bytes)} {verb}; a rank has {format_bytes(self.mean_bytes)} on average, "
                f"{format_bytes(self.max_bytes)} at most (rank {self.busiest_rank}, {self.imbalance:.2f} times that)"
            ),
        ]
        if self.items is not None:
            items = format_count(int(self.items.sum()), "item")
            lines.append(f"{items}, {int(self.items.max(initial=0)):,} at most for one rank")
        ends = ((format_bytes(bin.low), format_bytes(bin.high), bin.ranks) for bin in self.histogram())
        bins = grouped((f"{low:>10} to {high:>10}" if low != high else low.rjust(24), n) for low, high, n in ends)
        most = max(1, *map(sum, bins.values()))
        for text, counts in bins.items():
            ranks = sum(counts)
            lines.append(f"  {text} {ranks:>7,} ranks  {'#' * round(40 * ranks / most)}")
        return "\n".join(lines)


def summarize(plan: LoadPlan | SavePlan | TransferPlan) -> PlanStats:
    """Count the bytes and items of all ranks. Raises PlanError for a value that is not a plan."""
    if not isinstance(plan, Plan):
        raise PlanError(f"cannot summarize a {type(plan).__name__}: expected a load, save, or transfer plan")
    uncut = list(plan.sides.values())[-1].unsharded_axes()
    sizes, items = plan.rank_bytes(), plan.item_counts()
    return PlanStats(plan.kind, len(plan.names), plan.geometries(), plan.world_size, sizes, items, uncut)
