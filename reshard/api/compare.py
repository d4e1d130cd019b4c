"""`compare` finds the differences between two checkpoints, or a checkpoint and a state dict.

It reads tensors in small pieces, without a model or GPU. Ranks that share a sharded state compare what each holds.
"""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, lru_cache, partial, reduce
from io import BytesIO
from operator import add
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist

from planners.errors import ProofError
from planners.findings import Coverage, Finding, Report
from planners.geometry.arrays import grouped
from planners.geometry.box import Box, Shape
from planners.geometry.layout import TensorLayout
from planners.geometry.overlap import Sweep
from planners.units import format_bytes, format_count
from reshard.api.equal_bytes import equal_as_bytes
from reshard.api.key_suggestions import prefix_hint
from reshard.api.stateful_objects import parameters_of, saved_state
from reshard.api.task_shares import Opening, Share, naming, shares
from reshard.api.tasks import check_executor, engine, run_tasks
from reshard.api.transfer_memory import held_parts
from reshard.arguments import check_options, renamed
from reshard.checkpoint import (
    Checkpoint,
    CheckpointSource,
    NormalizedState,
    open as open_checkpoint,
    save_of,
    unless_replaced,
)
from reshard.errors import (
    CheckpointError,
    CorruptCheckpointError,
    FormatError,
    KeyMismatchError,
    LayoutError,
    StorageError,
    VerificationError,
    format_names,
    format_ranks,
    option_error,
)
from reshard.live.differences import close, differing, largest, number, same_bytes, shown, wide
from reshard.live.dtypes import dtype_name, resolved
from reshard.live.fingerprints import comparable
from reshard.live.garbage_collection import gc_paused
from reshard.live.plain_data import UNSUPPORTED_TENSORS, represent
from reshard.live.state import PerRank
from reshard.live.tensor_classes import expanded
from reshard.live.tensors import OVERWRITTEN_BY, LiveTensor, is_sharded, is_tensor, state_instead_of, this_rank
from reshard.live.tree import flatten
from reshard.ranks.group import DEADLINE_S, MEETING_S, Group
from reshard.ranks.progress import Phase, Progress
from reshard.state import empty_sequences, key_of
from reshard.storage import Storage
from reshard.stored.contents import are_equal, unknown_class
from reshard.stored.streaming import windows
from reshard.stored.tensor import LazyTensor, read_box, read_value

if TYPE_CHECKING:
    from planners.reports.checkpoint_pages import Measure

_How = tuple[float, float, bool]
"""The relative and the absolute tolerance, and whether differences are measured."""

WINDOW_BYTES = 32 << 20
"""Tensors are read in pieces of at most about this size."""
_IN_MEMORY = "the state dict"
_BOTH = ("the first state dict", "the second state dict")
_NOWHERE = "was not compared: no rank has it on both sides"
_NOTHING = "nothing to compare: neither side has a tensor or another value"
_WITHOUT_GROUP = "compare without process_group=, in which only ranks with sharded tensors take part"


@renamed()
def compare(
    a: CheckpointSource | Mapping[str, Any],
    b: CheckpointSource | Mapping[str, Any],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    by_fingerprint: bool = False,
    labels: tuple[str, str] | None = None,
    workers: int = 1,
    executor: Executor | None = None,
    progress: bool = False,
    measure: bool = False,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | timedelta = DEADLINE_S,
) -> CompareReport:
    """Compare two checkpoints, or a checkpoint and a state dict.

        reshard.load(state, "run/step-1000")
        assert reshard.compare("run/step-1000", state).ok    # on all ranks, if the state is sharded

    Names, shapes, dtypes, objects, and values are compared, including per-rank values. Layouts and formats may differ.
    Some formats do not record types of containers, so these are not compared: a list equals a tuple, the key 1 equals
    "1", and an empty dict equals a missing one. 1 equals 1.0, but not True. Values of tensors are compared bit by bit:
    NaN equals the same NaN, and -0.0 differs from 0.0. With `atol` or `rtol`, values are equal if they differ by at
    most `atol + rtol * |b|`.

    Args:
        a, b: a path, an open `Checkpoint`, or a state, as for `save`. If it is sharded, the call is
            collective: each rank compares what it holds, and all ranks return the same report. Nothing is gathered.
        rtol, atol: relative and absolute tolerance, as in `torch.allclose`. Default: bit by bit.
        by_fingerprint: compare saved fingerprints instead of values if both sides have them. This is fast, but does not
            detect damage since the save. Not with a tolerance.
        labels: names for the two sides in the report. Default: their paths.
        workers: number of processes on this host that compare at the same time.
        executor: runs the comparison as tasks, as in `reshard.convert`. Then pass both checkpoints by path.
        progress: show a progress bar if stderr is a terminal.
        measure: also measure by how much each tensor differs, for `.measures` and `.to_html()`. This takes longer.
        process_group: the ranks that share the state. Default: the default group. If you pass it, the call is
            collective even if no tensor is sharded, as for pipeline stages. A key is missing only if no rank has it.
        timeout: limit for a collective call, in seconds or as a `timedelta`.

    Returns a report. It lists everything that differs or cannot be read. For a tensor, it has the first element that
    differs, in row-major order. `covered` says how many bytes of `a` were read and compared with those of `b`.
    Comparisons by fingerprint do not count."""
    a, b = _taken_apart(a, b)
    is_joint = process_group is not None or any(map(_is_sharded, (a, b)))
    group = Group(process_group, deadline_s=timeout) if is_joint else None
    with nullcontext() if group is None else group.together("compare"):
        a, b = map(saved_state, (a, b))
        check_executor(executor, workers, a, b)
        check_options(by_fingerprint=by_fingerprint, progress=progress, measure=measure, labels=labels)
        check_options(rtol=rtol, atol=atol)
        if by_fingerprint and (rtol or atol):
            raise option_error("compare: by_fingerprint compares bit by bit: pass it, or rtol and atol", ValueError)
        if group is not None:
            name, soon_s = (_WITHOUT_GROUP, MEETING_S) if process_group is None else ("compare", None)
            with group.together(name, deadline_s=soon_s, meet=False):
                group.same_options("compare", {"tolerance and measure": (rtol, atol, measure), "labels": labels})
        with engine(executor, workers) as hands:
            return compare_sides(a, b, (rtol, atol, measure), by_fingerprint, labels, hands, progress, group)


def _taken_apart(*sides: Any) -> Iterable[Any]:
    """Yield the sides as they are saved, or unchanged if this fails: `compare` then fails again, on all ranks."""
    with suppress(Exception):
        return [*map(saved_state, sides)]
    return sides


def _is_sharded(side: Any) -> bool:
    if isinstance(side, Checkpoint) or not isinstance(side, Mapping):
        return False
    leaves = flatten(side, is_leaf=lambda v: is_tensor(v) or isinstance(v, PerRank)).leaves.values()
    return any(is_sharded(tensor) for leaf in leaves for tensor in (leaf, *parameters_of(leaf)))


@gc_paused()
def compare_sides(
    a: Any,
    b: Any,
    how: _How,
    by_fingerprint: bool,
    labels: tuple[str, str] | None,
    executor: Executor | None,
    progress: bool,
    group: Group | None = None,
) -> CompareReport:
    """See `compare`; `how` has the relative and the absolute tolerance, and whether differences are measured."""
    rtol, atol, is_measured = how
    left, right = _Side(a, group), _Side(b, group, "b")
    own = (left.label, right.label)
    left.label, right.label = labels or (_BOTH if own == (_IN_MEMORY, _IN_MEMORY) else own)
    subject = f"{left.label} and {right.label}"
    exact = not rtol and not atol
    excluded = left.foreign | right.foreign
    common = [name for name in left.tensors if name in right.tensors and name not in excluded]
    with unless_replaced("compare", left.checkpoint, right.checkpoint) as wrong:
        is_first = group is None or not group.rank
        mine = _rank_findings(left, right, common, how, by_fingerprint, executor, progress and is_first)
        wrong += mine.errors()
    told = {0: mine} if group is None else dict(zip(group.ranks, group.exchange(mine)))
    found = _JointFindings.of(told)
    total = sum(left.names.nbytes.values())
    both = [name for name in left.names.nbytes if name in right.names.nbytes]
    foreign = {*left.names.foreign, *right.names.foreign} - found.sizes.keys()
    findings = [*_name_findings(left, right, found, group)]
    each = (found.of_tensor(name, is_shared=group is not None) for name in both if name not in foreign)
    findings += [finding for finding in each if finding is not None]
    findings += found.on_others
    left_open = "; ".join(f"not compared: {text}" for text in _left_open(left, right, sorted(foreign), group))
    within = _EXACTLY if exact else f"within rtol={rtol}, atol={atol}"
    is_empty = not any(its.nbytes or its.objects or its.own for its in (left.names, right.names))
    return CompareReport(
        subject, tuple(findings), len(both), Coverage(total, found.read_bytes, found.read_bytes, unchecked=left_open),
        "; ".join(filter(None, (_NOTHING, left_open))) if is_empty else _in_words(found, total, left_open, within),
        prefix_hint(*((side.label, side.names.nbytes) for side in (left, right)))
        or _dtype_hint(findings, left, right, common if group is None else ()),
        found.measures() if is_measured else None,
        (left.label, right.label),
        {name: one.error for name, one in found.totals.items() if one.is_damage} | {**found.errors},
        is_empty,
        {name: one.apart for name, one in found.totals.items() if one.apart[0]},
    )  # fmt: skip


def _rank_findings(
    left: _Side,
    right: _Side,
    common: Sequence[str],
    how: _How,
    by_fingerprint: bool,
    executor: Executor | None,
    progress: bool,
) -> _RankFindings:
    """Compare what this rank has of both sides."""
    known = {name: _known(name, left, right, not (how[0] or how[1]), by_fingerprint) for name in common}
    unread = [name for name in common if known[name] is None]
    mine = _RankFindings({name: text for name, text in known.items() if text is not None})
    total = sum(left.names.nbytes.values())
    with Progress(show=progress).phase("compare", total, f"{left.label} and {right.label}") as step:
        step.advance(sum(left.names.nbytes[name] for name in mine.known))
        mine.boxes = _differences(left, right, unread, how, executor, step)
    sides = [(name, left.tensors[name]) for name in common]
    mine.sizes = {name: (math.prod(its.shape), its.dtype.itemsize) for name, its in sides}
    mine.compared = [key for key in left.objects if key in right.objects]
    mine.compared += [key for key in left.own if key in right.own and left.own[key].keys() & right.own[key].keys()]
    mine.others = [*_object_findings(left, right, mine.damaged), *_own_findings(left, right, mine.damaged)]
    return mine


def _left_open(left: _Side, right: _Side, foreign: Sequence[str], group: Group | None) -> Iterator[str]:
    """Describe what was not compared."""
    for side in (left, right):
        if side.left_out:
            yield f"{format_names(side.left_out)} of {side.label}, {side.why_left_out}"
    if foreign:
        words = "whose elements another rank will overwrite, as DistributedDataParallel does with buffers"
        yield f"{format_names(foreign)}, {words}"
    if others := _ranks_left_open(left, right, group):
        yield f"values of other ranks: {format_names(others)}"


NOT_COMPARED = "types of containers; 1 equals 1.0"
_EXACTLY = "bit by bit"


def _in_words(found: _JointFindings, total: int, left_open: str, within: str) -> str:
    """Return what was compared, and what was not."""
    read = f"{format_bytes(found.read_bytes)} of {format_bytes(total)} of values on each side"
    not_dtypes = "" if within == _EXACTLY else "dtypes or "
    kinds = "and objects" if not_dtypes else "dtypes, and objects"
    words = f"names, shapes, {kinds} compared (not {not_dtypes}{NOT_COMPARED}); {read} read and compared {within}"
    if "" in found.known.values():
        words += ", the rest only by their saved fingerprints"
    return "; ".join(filter(None, (words, left_open)))


@dataclass(frozen=True, slots=True, repr=False)
class CompareReport(Report):
    """What `compare` found."""

    measures: Mapping[str, Measure] | None = None
    """By how much each tensor differs, if you passed `measure`. Tensors whose shapes differ have no entry."""
    labels: tuple[str, str] = ("", "")
    damaged: Mapping[str, str] = field(default_factory=dict)
    """key -> error of values that were not compared because one side is damaged. `findings` has them too."""
    is_empty: bool = False
    """True if neither side has a tensor or another value, so that there was nothing to compare."""
    largest: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """key -> the largest difference of two elements, absolute and relative to that of `b`. NaN and infinite elements
    have none, and a tensor without any has no entry."""

    @property
    def _problem(self) -> str:
        return "problem" if self.damaged else "difference"

    @property
    def _error(self) -> type[ProofError]:
        return VerificationError if self.damaged else ProofError

    def to_html(self) -> str:
        """Return an HTML page of the differences: a map over layers and a table of tensors.

        Raises CheckpointError if `compare` was called without `measure`.
        """
        measures = self.measures
        if measures is None:
            raise CheckpointError("nothing was measured: call compare(..., measure=True)")
        from planners.reports.checkpoint_pages import difference_page

        other = {name for name, measure in measures.items() if measure.differing}
        told = [finding for finding in self.findings if finding.fqn not in other]
        words = ". ".join(filter(None, (self.covers, self.hint)))
        return difference_page("Differences", self.labels, measures, told, words)

    def _repr_html_(self) -> str:
        if self.measures is None:
            return Report._repr_html_(self)
        from planners.notebooks import framed

        return framed(self.to_html(), self.subject)


def _known(name: str, left: _Side, right: _Side, exact: bool, by_fingerprint: bool) -> str | None:
    """Return how a tensor differs, or "" if it does not, if this is known without reading it; else None."""
    x, y = left.tensors[name], right.tensors[name]
    if tuple(x.shape) != tuple(y.shape):
        return f"has shape {list(x.shape)} in {left.label}, {list(y.shape)} in {right.label}"
    if x.dtype != y.dtype and exact:
        return f"is {dtype_name(x.dtype)} in {left.label}, {dtype_name(y.dtype)} in {right.label}"
    p, q = left.fingerprints.get(name), right.fingerprints.get(name)
    is_same = exact and by_fingerprint and p is not None and q is not None and comparable(p, q) and p == q
    return "" if is_same else None


@dataclass(frozen=True)
class _Difference:
    """How two tensors differ in some boxes."""

    count: int = 0
    first: tuple[Shape, str, str] | None = None
    """The first element that differs, in row-major order, and its values on both sides."""
    error: str = ""
    is_damage: bool = False
    """Whether the error is damage."""
    apart: tuple[float, float] = (0.0, 0.0)
    """See `differences.largest`."""
    largest: float = 0.0
    squares: float = 0.0
    """The sum of squared differences of finite elements."""
    norm: float = 0.0
    """The sum of squares of finite elements of the second side."""
    odd: int = 0

    def __add__(self, other: _Difference) -> _Difference:
        """Combine this with the difference in other boxes."""
        firsts = [one.first for one in (self, other) if one.first]
        return _Difference(
            self.count + other.count, min(firsts, default=None), self.error or other.error,
            self.is_damage or other.is_damage,
            (max(self.apart[0], other.apart[0]), max(self.apart[1], other.apart[1])), max(self.largest, other.largest),
            self.squares + other.squares, self.norm + other.norm, self.odd + other.odd,
        )  # fmt: skip

    @property
    def weight(self) -> tuple[bool, int]:
        """How bad the difference is. (False, 0) if there is none."""
        return bool(self.error), self.count

    def measured(self, x: torch.Tensor, y: torch.Tensor) -> _Difference:
        """Return this difference with the differences of one more piece added."""
        try:
            x, y, apart = wide(x.to("cpu"), y.to("cpu"))
        except FormatError:
            return self + _Difference(odd=int(differing(x, y, 0.0, 0.0).sum()))
        finite = x.isfinite() & y.isfinite()
        odd = int((~finite & ~close(x, y)).sum())
        distance, size = apart[finite], y[finite].abs()
        most = float(distance.max()) if len(distance) else 0.0
        squares, norm = float(distance.square().sum()), float(size.square().sum())
        return self + _Difference(largest=most, squares=squares, norm=norm, odd=odd)

    def measure(self, elements: int) -> Measure:
        """Return how much the sides differ, for this number of elements."""
        from planners.reports.checkpoint_pages import Measure

        ratio = math.sqrt(self.squares / self.norm) if self.norm else math.inf if self.squares else 0.0
        most, ratio = (min(sys.float_info.max, value) for value in (self.largest, ratio))
        return Measure(elements, min(self.count, elements), most, ratio, self.odd)

    def text(self, numel: int) -> tuple[str, Shape | None]:
        """Return the difference in words, "" if there is none, and the first element that differs."""
        if self.error or self.first is None:
            return self.error, None
        element, x, y = self.first
        return f"{self.count} of {numel} elements differ; the first: {x} -> {y}", element


class _RankFindings(msgspec.Struct):
    """What one rank found."""

    known: dict[str, str]
    """How tensors differ ("" if they are equal), if this is known without reading them."""
    sizes: dict[str, tuple[int, int]] = {}
    """For each compared tensor, the number of elements and the bytes per element."""
    boxes: list[tuple[str, Shape, Shape, _Difference]] = []
    others: list[Finding] = []
    """Keys of objects, and how these differ."""
    compared: list[str] = []
    """Keys of objects that this rank has on both sides."""
    damaged: dict[str, str] = {}
    """Keys of objects that cannot be read on one side, with the errors."""

    def errors(self) -> Iterator[str]:
        """Yield the errors of all reads that failed."""
        yield from (one.error for *_, one in self.boxes if one.error)
        yield from self.damaged.values()


@dataclass(frozen=True)
class _JointFindings:
    """What all ranks found together."""

    known: Mapping[str, str]
    sizes: Mapping[str, tuple[int, int]]
    by_box: Mapping[str, Mapping[Box, tuple[int, _Difference]]]
    """By tensor and box, the rank with the most elements that differ, and what it found."""
    totals: Mapping[str, _Difference]
    on_others: Sequence[Finding]
    """How objects differ."""
    compared: Collection[str]
    """Keys of the objects that were compared."""
    errors: Mapping[str, str]
    """Errors of damaged objects, by key."""

    @classmethod
    def of(cls, found: Mapping[int, _RankFindings]) -> _JointFindings:
        """Combine the findings of all ranks."""
        known = {name: text for one in found.values() for name, text in one.known.items()}
        sizes = {name: size for one in found.values() for name, size in one.sizes.items()}
        others = dict.fromkeys(it for one in found.values() for it in one.others)
        boxes: dict[str, dict[Box, tuple[int, _Difference]]] = {name: {} for name in sizes}
        for rank, one in found.items():
            for name, offsets, extents, difference in one.boxes:
                at, box = boxes[name], Box.of(offsets, extents)
                if box not in at or difference.weight > at[box][1].weight:
                    at[box] = rank, difference
        totals = {name: reduce(add, [one for _, one in its.values()] or [_SAME]) for name, its in boxes.items()}
        compared = {key for one in found.values() for key in one.compared}
        damaged = {key: error for one in found.values() for key, error in one.damaged.items()}
        return cls(known, sizes, boxes, totals, [*others], compared, damaged)

    def of_tensor(self, name: str, *, is_shared: bool) -> Finding | None:
        """Report how a tensor that both sides have differs. With `is_shared`, the finding names the rank."""
        if name not in self.sizes:
            return Finding(_NOWHERE, name, kind="unchecked")
        if name in self.known:
            return Finding(self.known[name], name) if self.known[name] else None
        its, total, (elements, _) = self.by_box[name], self.totals[name], self.sizes[name]
        text, element = total.text(elements)
        distinct = _elements_in(tuple(its))
        if text:
            text = "at most " * (element is not None and distinct < sum(box.numel for box in its)) + text
            seen = (rank for rank, one in its.values() if one.error or one.first == total.first)
            return Finding(text, name, next(seen) if is_shared else None, element)
        text = f"{elements - distinct} of {elements} elements were not compared: no rank has them"
        return Finding(text, name, kind="unchecked") if distinct < elements else None

    @cached_property
    def read_bytes(self) -> int:
        """Bytes of the first side that were read and compared, those of copies once."""
        read = (name for name, total in self.totals.items() if not total.error)
        return sum(_elements_in(tuple(self.by_box[name])) * self.sizes[name][1] for name in read)

    def measures(self) -> dict[str, Measure]:
        """By how much tensors of equal shape differ."""
        alike = {name: one for name, one in self.totals.items() if not (one.error or self.known.get(name))}
        return {name: one.measure(self.sizes[name][0]) for name, one in alike.items()}


@lru_cache(maxsize=1024)
def _elements_in(boxes: tuple[Box, ...]) -> int:
    """Return how many elements are in any of some boxes. Boxes of pipeline stages may overlap, such as tied ones."""
    sweep, count = Sweep(enumerate(boxes)), 0
    for place, box in enumerate(boxes):
        rest = [box]
        for before, _, common in sweep.meeting(box):
            if before < place:
                rest = [piece for one in rest for piece in one - common]
        count += sum(piece.numel for piece in rest)
    return count


_SAME = _Difference()


@dataclass(frozen=True)
class CompareWork:
    """Compares parts of the tensors of two checkpoints."""

    a: Opening
    b: Opening
    how: _How

    def begin(self) -> Callable[[Share], list[_Difference]]:
        """Open both checkpoints."""
        return partial(_compare_share, _Side(self.a.open()), _Side(self.b.open()), self.how)


def _differences(
    left: _Side, right: _Side, names: Sequence[str], how: _How, executor: Executor | None, step: Phase
) -> list[tuple[str, Shape, Shape, _Difference]]:
    """Return the differences of all elements that this process has on both sides, box by box."""
    boxes = (
        (name, box, max(side.tensors[name].dtype.itemsize for side in (left, right)))
        for name in names
        for box in _boxes_of(name, left.tensors[name], right.tensors[name])
    )
    asked = shares(boxes, left.checkpoint, right.checkpoint)
    found: list[tuple[str, Shape, Shape, _Difference]] = []

    def on_done(share: Share, differences: list[_Difference]) -> None:
        found.extend((name, *box, one) for (name, box), one in zip(share, differences))
        step.advance(sum(box.numel * left.tensors[name].dtype.itemsize for name, box in share))

    work = None
    if executor is not None and left.checkpoint is not None and right.checkpoint is not None:
        work = CompareWork(Opening.of(left.checkpoint), Opening.of(right.checkpoint), how)
    run_tasks(work, asked, executor, on_done, here=partial(_compare_share, left, right, how))
    return found


@gc_paused()
def _compare_share(left: _Side, right: _Side, how: _How, share: Share) -> list[_Difference]:
    found = []
    equal = set() if any(how) else equal_as_bytes(left.tensors, right.tensors, share)
    for name, box in share:
        if name in equal:
            found.append(_SAME)
            continue
        try:
            found.append(_difference(left, right, name, box, how))
        except CheckpointError as error:
            found.append(_Difference(error=str(error), is_damage=isinstance(error, CorruptCheckpointError)))
    return found


@dataclass(frozen=True)
class _HeldBoxes:
    """The boxes of a sharded tensor that this rank holds, with their elements."""

    shape: Shape
    dtype: torch.dtype
    boxes: Mapping[Box, torch.Tensor]

    @classmethod
    def of(cls, key: str, value: Any, group: Group) -> _HeldBoxes:
        """Collective over the ranks of the tensor, if only all of them can determine its sharding."""
        live = LiveTensor(key, value)
        layout = TensorLayout.of(live.spec, live.form_by_all())
        parts = held_parts(live, layout, group.job_rank)
        boxes = {box: local[inner.slices] for local, part in parts for box, inner in part.boxes()}
        return cls(tuple(live.spec.shape), live.dtype, boxes)

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def elements(self, box: Box) -> torch.Tensor:
        """Return the elements of a box inside one of these boxes."""
        around = next(outer for outer in self.boxes if outer.contains(box))
        return self.boxes[around][box.relative_to(around).slices]


def _boxes_of(name: str, x: Any, y: Any) -> Collection[Box]:
    """Return the boxes of a tensor that this process has on both sides."""
    held = [side.boxes.keys() for side in (x, y) if isinstance(side, _HeldBoxes)]
    if held and held[0] != held[-1]:
        fix = "compare each state with a checkpoint, or their fingerprints"
        raise LayoutError(f"{name!r} is sharded in two ways: {fix}")
    return held[0] if held else [Box.full(tuple(x.shape))]


class _SideNames(msgspec.Struct):
    """The names that any rank has on one side."""

    nbytes: dict[str, int]
    """Bytes of each tensor."""
    objects: list[str]
    own: dict[str, list[int]]
    """Keys of per-rank values, with the ranks that have them."""
    foreign: list[str]
    """Tensors whose elements on this rank do not count: another rank's will overwrite them."""

    def joined(self, group: Group | None) -> _SideNames:
        """Collective: return the names of all ranks, in rank order."""
        each = [self] if group is None else group.exchange(self)
        tensors = {name: nbytes for one in each for name, nbytes in one.nbytes.items()}
        objects, foreign = (
            list(dict.fromkeys(name for one in each for name in getattr(one, kind))) for kind in ("objects", "foreign")
        )
        own = grouped((name, rank) for one in each for name, ranks in one.own.items() for rank in ranks)
        return _SideNames(tensors, objects, own, foreign)


class _Side:
    """One side: tensors by name, objects, per-rank values by key and rank, and fingerprints."""

    def __init__(self, source: Any, group: Group | None = None, name: str = "a") -> None:
        self.fingerprints: Mapping[str, str] = {}
        self.checkpoint: Checkpoint | None = None
        self.tensors: dict[str, Any]
        self.objects: dict[str, Any]
        self.own: Mapping[str, Mapping[int, Any]]
        self.foreign: set[str] = set()
        self.why_left_out = "which belong to neither model nor optimizer"
        if not isinstance(source, str | os.PathLike | Storage | Mapping):
            got = state_instead_of(source)
            raise option_error(f"compare: {name} must be a path, Checkpoint, or state dict, got {got}", StorageError)
        if isinstance(source, Mapping) and not isinstance(source, Checkpoint):
            self._take_state(source, group)
        else:
            self._take_checkpoint(source if isinstance(source, Checkpoint) else open_checkpoint(source), group)
        nbytes = {name: int(tensor.nbytes) for name, tensor in self.tensors.items()}
        own = {key: sorted(values) for key, values in self.own.items()}
        names = _SideNames(nbytes, [*self.objects], own, [*self.foreign])
        self.names = names if self.checkpoint is not None else names.joined(group)

    def _take_state(self, source: Mapping[Any, Any], group: Group | None) -> None:
        flat = flatten(source, is_leaf=lambda v: is_tensor(v) or isinstance(v, LazyTensor | PerRank))
        values = {key_of(path): value for path, value in expanded(flat.leaves).items()}  # as they are saved
        sharded = [key for key, value in values.items() if is_sharded(value)]
        if sharded and group is None:
            raise LayoutError(f"{sharded[0]!r} is sharded: call reshard.compare(path, state), on all ranks")
        self.label, self.left_out = _IN_MEMORY, source.omitted if isinstance(source, NormalizedState) else ()
        self.tensors = {
            k: _HeldBoxes.of(k, v, group) if group is not None and is_sharded(v) else v
            for k, v in values.items()
            if is_tensor(v) or isinstance(v, LazyTensor)
        }
        rank = this_rank()
        self.own = {k: {rank: v.value} for k, v in values.items() if isinstance(v, PerRank)}
        self.foreign = {k for k, v in self.tensors.items() if getattr(v, OVERWRITTEN_BY, None) is not None}
        for key, value in [*self.tensors.items(), *((k, v[rank]) for k, v in self.own.items())]:
            if is_tensor(value):
                live = LiveTensor(key, value)
                _ = live.spec, live.local  # which refuse what has no plain elements
                if live.is_meta:
                    raise LayoutError(f"tensor {key!r} is on the meta device and has no values: initialize it first")
        self.objects = {k: _as_bytes(v) for k, v in values.items() if k not in self.tensors and k not in self.own}
        self.objects.update({key: [] for key in empty_sequences(flat.containers, flat.leaves)})

    def _take_checkpoint(self, checkpoint: Checkpoint, group: Group | None) -> None:
        if group is not None:
            group.agree(save_of(checkpoint), "the checkpoint to compare", error=CheckpointError)
        self.checkpoint, self.label = checkpoint, checkpoint.url
        names = [*checkpoint, *(alias for alias in checkpoint.aliases if alias not in checkpoint.contents.tensors)]
        self.tensors = {name: checkpoint[name] for name in names}
        contents = checkpoint.contents
        paths = map(contents.path_of, (*names, *contents.objects, *contents.per_rank))
        empty: dict[str, Any] = {key: [] for key in empty_sequences(contents.containers, paths)}
        self.objects = self._values(checkpoint.objects) | empty
        self.tensors |= {key: self.objects.pop(key) for key, value in [*self.objects.items()] if is_tensor(value)}
        self.own = contents.per_rank
        self.fingerprints = checkpoint.fingerprints or {}
        self.left_out = contents.left_out
        if checkpoint.format != "normalized":
            self.why_left_out = "which cannot be read here"

    def elements(self, name: str, box: Box) -> torch.Tensor:
        """Return the elements of a box of a tensor. Errors name this side."""
        with naming(self.checkpoint):
            return elements_of(self.tensors[name], box)

    def _values(self, objects: Mapping[str, Any]) -> dict[str, Any]:
        """Return single values, or the error of one that is damaged. Some formats keep a list as one object."""
        out: dict[str, Any] = {}
        for key in objects:
            value = _readable(self, objects.__getitem__, key)
            try:
                flat = flatten({key: value})
                out.update((key_of(path), _as_bytes(leaf)) for path, leaf in flat.leaves.items())
                out.update({empty: [] for empty in empty_sequences(flat.containers, flat.leaves)})
            except KeyMismatchError:  # a dict with keys such as 1 and "1"
                out[key] = value
        return out


def _readable(side: _Side, read: Callable[[Any], Any], what: Any) -> Any:
    """Return the result of `read`, or its error if it is damage."""
    try:
        with naming(side.checkpoint):
            return read(what)
    except CorruptCheckpointError as error:
        return error


def _as_bytes(value: Any) -> Any:
    """Return the contents of a file in memory, which some formats store as bytes."""
    return value.getvalue() if isinstance(value, BytesIO) else value


def _dtype_hint(findings: Sequence[Finding], left: _Side, right: _Side, names: Iterable[str]) -> str:
    """Say that all differences are dtypes, if so. Without differences, say which of `names` have other dtypes."""
    texts = [it.message for it in findings] or filter(None, (_known(it, left, right, True, False) for it in names))
    kinds = Counter(text.removeprefix("is ") if text.startswith("is ") else "" for text in texts)
    if not kinds or "" in kinds:
        return ""
    words = "; ".join(f"{kind} ({format_count(count, 'tensor')})" for kind, count in kinds.items())
    sizes = " and ".join(format_bytes(sum(side.names.nbytes.values())) for side in (left, right))
    of = {it.fqn for it in findings}
    dtypes = {its.dtype for side in (left, right) for name, its in side.tensors.items() if name in of}
    plain = (dtype for dtype in dtypes if dtype.is_floating_point and "float4" not in str(dtype))  # packed: no epsilon
    rtol = max([1e-3, *(torch.finfo(dtype).eps for dtype in plain)])
    within = f"dtypes differ: {words}; the values take {sizes}"
    return (
        f"all differences are dtypes: {words}. To compare the values, too, pass rtol={rtol:.0e}" if findings else within
    )


def _name_findings(left: _Side, right: _Side, joint: _JointFindings, group: Group | None) -> Iterator[Finding]:
    """Yield names that only one side has, also per rank, without the items of damaged values."""
    damaged, compared = tuple(f"{key}." for key in joint.errors), joint.compared
    for kind in ("nbytes", "objects", "own"):
        x, y = (dict.fromkeys(getattr(side.names, kind)) for side in (left, right))
        for side, its, others in ((left, x, y), (right, y, x)):
            only = (key for key in its if key not in others and not f"{key}.".startswith(damaged))
            yield from (Finding(f"only in {side.label}", key, kind="one-sided") for key in only)
        if kind == "objects":
            yield from (Finding(_NOWHERE, key, kind="unchecked") for key in x if key in y and key not in compared)
    left_open = _ranks_left_open(left, right, group)
    for key, ranks in left.names.own.items():
        of_right = right.names.own.get(key, ranks)
        if set(ranks) != set(of_right) and (key not in compared or key not in left_open):
            saved, found = format_ranks(ranks, len(ranks)), format_ranks(of_right, len(of_right))
            yield Finding(f"has values of {saved} in {left.label}, of {found} in {right.label}", key)


def _ranks_left_open(left: _Side, right: _Side, group: Group | None) -> list[str]:
    """Return per-rank values of which one side has only this rank's, and the other side has more."""
    x, y = left.names.own, right.names.own
    is_whole = group is not None or (left.checkpoint is not None and right.checkpoint is not None)
    return [] if is_whole else [key for key in x if key in y and x[key] != y[key]]


def _object_findings(left: _Side, right: _Side, damaged: dict[str, str]) -> Iterator[Finding]:
    """Compare plain values. Adds errors to `damaged`."""
    for key in dict.fromkeys((*left.objects, *right.objects)):
        values = [side.objects[key] for side in (left, right) if key in side.objects]
        if error := _error_of(*values):
            damaged[key] = error
            yield Finding(error, key)
        elif len(values) == 2 and not are_equal(*values):
            kinds = set(map(unknown_class, values))
            if unread := UNSUPPORTED_TENSORS.get(kinds.pop() or "") if len(kinds) == 1 else None:
                yield Finding(f"was not compared: {unread}", key, kind="unchecked")
            else:
                x, y = map(represent, values)
                yield Finding(f"{x:.80} in {left.label}, {y:.80} in {right.label}", key)


def _own_findings(left: _Side, right: _Side, damaged: dict[str, str]) -> Iterator[Finding]:
    """Compare per-rank values. A state dict has those of one rank only. Adds errors to `damaged`."""
    for key in [key for key in left.own if key in right.own]:
        x, y = left.own[key], right.own[key]
        for rank in x.keys() & y.keys():
            one, other = _readable(left, read_value, x[rank]), _readable(right, read_value, y[rank])
            if error := _error_of(one, other):
                damaged[key] = error
                yield Finding(error, key)
            elif not are_equal(one, other):
                yield Finding(f"differs between {left.label} and {right.label} on rank {rank}", key)


def _error_of(*values: Any) -> str:
    return next((str(value) for value in values if isinstance(value, CorruptCheckpointError)), "")


def _difference(left: _Side, right: _Side, name: str, within: Box, how: _How) -> _Difference:
    rtol, atol, is_measured = how
    total = _SAME
    itemsize = max(side.tensors[name].dtype.itemsize for side in (left, right))
    for part in windows(within.sizes, itemsize, WINDOW_BYTES // (8 if is_measured else 1)):  # it takes more memory
        box = part.shift(within.offsets)
        pieces = left.elements(name, box), right.elements(name, box)
        if not (rtol or atol or is_measured) and same_bytes(*pieces):
            continue
        differs = differing(*pieces, rtol, atol)
        count = int(differs.sum())
        if count and total.first is None:
            local = torch.nonzero(differs.reshape(differs.shape or (1,)))[0].tolist() if differs.ndim else []
            element = tuple(o + i for o, i in zip(box.offsets, local))
            at = Box.of(element, (1,) * len(element))
            values = shown(*(number(side.elements(name, at).reshape(-1)[0]) for side in (left, right)))
            total += _Difference(first=(element, *values))
        total += _Difference(count, apart=largest(*pieces) if count else (0.0, 0.0))
        if is_measured:
            total = total.measured(*pieces)
    return total


def elements_of(tensor: Any, box: Box) -> torch.Tensor:
    if isinstance(tensor, _HeldBoxes):
        return resolved(tensor.elements(box))
    if isinstance(tensor, LazyTensor):
        return read_box(tensor.stored, box)
    return resolved(tensor[box.slices] if box.ndim else tensor)
