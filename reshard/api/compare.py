"""`compare` finds the differences between two checkpoints, or a checkpoint and a state dict.

It processes one tensor at a time, in pieces of bounded size, and needs no model, GPU, or process group.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from planners.findings import Coverage, Finding, Report
from planners.geometry.box import Box
from planners.geometry.mesh import grouped
from reshard.api.task_shares import Opening, Share, shares
from reshard.api.tasks import check_executor, engine, run_tasks
from reshard.arguments import renamed
from reshard.checkpoint import Checkpoint, CheckpointSource, open as open_checkpoint
from reshard.errors import (
    CheckpointError,
    FormatError,
    KeyMismatchError,
    LayoutError,
    StorageError,
    option_error,
)
from reshard.live.copy_streams import to_host
from reshard.live.dtypes import dtype_name
from reshard.live.fingerprints import comparable, float64_is_exact
from reshard.live.garbage_collection import gc_paused
from reshard.live.plain_data import encode_plain
from reshard.live.state import PerRank
from reshard.live.tensor_classes import expanded
from reshard.live.tensors import is_sharded, is_tensor, raw_bytes, spec_of, state_instead_of
from reshard.live.tree import flatten
from reshard.ranks.progress import Phase, Progress
from reshard.state import key_of
from reshard.stored.streaming import windows
from reshard.stored.tensor import LazyTensor, StoredTensor

if TYPE_CHECKING:
    from planners.reports.checkpoint_pages import Measure

__all__ = ["WINDOW_BYTES", "CompareReport", "compare", "compare_sides", "elements_of"]

_How = tuple[float, float, bool]
"""The relative and the absolute tolerance, and whether differences are measured."""


WINDOW_BYTES = 32 << 20
"""Tensors are read in pieces of at most about this size."""


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
) -> CompareReport:
    """Compare two checkpoints, or a checkpoint and a state dict.

    Names, shapes, dtypes, objects, and values are compared, including per-rank values. Layouts and formats may differ.
    Values are compared bit for bit: NaN equals the same NaN, and -0.0 differs from 0.0. If you pass `atol` or `rtol`,
    values are equal within `atol + rtol * |b|`.

    Args:
        a, b: a path, an open `Checkpoint`, or a (nested) state dict of full tensors.
        by_fingerprint: compare saved fingerprints instead of values where both sides have them. This is fast, but does
            not find damage since the save. Not with a tolerance.
        labels: names for the two sides in findings; default: their paths.
        workers: number of processes on this host that compare at the same time.
        executor: runs the comparison as tasks, as in `reshard.convert`. Pass both checkpoints by path then.
        progress: show a progress bar if stderr is a terminal.
        measure: also measure by how much each tensor differs, for `.measures` and `.to_html()`. This takes longer.

    Returns a report. It lists every difference, with the first differing element of each tensor in row-major order, and
    everything that cannot be read. `covered` says how many bytes of `a` were read and compared with those of `b`, not
    counting comparisons by fingerprint.
    """
    check_executor(executor, workers, a, b)
    with engine(executor, workers) as hands:
        return compare_sides(a, b, (rtol, atol, measure), by_fingerprint, labels, hands, progress)


@gc_paused()
def compare_sides(
    a: Any,
    b: Any,
    how: _How,
    by_fingerprint: bool,
    labels: tuple[str, str] | None,
    executor: Executor | None,
    progress: bool,
) -> CompareReport:
    """See `compare`; `how` has the relative and the absolute tolerance, and whether differences are measured."""
    rtol, atol, is_measured = how
    with gc_paused():
        left, right = _Side(a), _Side(b)
    if labels is not None:
        left.label, right.label = labels
    subject = f"{left.label} and {right.label}"
    findings = [*_prefix_findings(left, right), *_only_findings(left, right, left.tensors, right.tensors)]
    common = [name for name in left.tensors if name in right.tensors]
    exact = not rtol and not atol
    known = {name: _known(name, left, right, exact, by_fingerprint) for name in common}
    total = sum(_nbytes(x) for x in left.tensors.values())
    with Progress(show=progress) as bar, bar.phase("compare", total, subject) as step:
        step.advance(sum(_nbytes(left.tensors[name]) for name in common if known[name] is not None))
        unknown = [name for name in common if known[name] is None]
        found = _differences(left, right, unknown, how, executor, step)
    for name in common:
        text = known[name] or ""
        element = None
        if name in found:
            text, element = found[name].text(math.prod(left.tensors[name].shape))
        findings += [Finding(text, name, None, element)] if text else []
    read = sum(_nbytes(left.tensors[name]) for name in unknown if not found[name].error)
    findings += _object_findings(left, right)
    findings += _own_findings(left, right)
    within = " bit by bit" if exact else f" within rtol={rtol}, atol={atol}"
    covers = (
        f"names, shapes, dtypes, and objects compared; {read:,} of {total:,} bytes of values on each side read and "
        f"compared{within}"
    )
    if read < total:
        covers += ", the rest only by their saved fingerprints"
    sizes = {name: math.prod(left.tensors[name].shape) for name in common if is_measured}
    alike = {name for name, text in known.items() if text == ""}
    sums = {name: found[name] if name in found else _Difference() for name in sizes if name in found or name in alike}
    measures = {name: one.measure(sizes[name]) for name, one in sums.items() if not one.error}
    return CompareReport(
        subject, tuple(findings), len(common), Coverage(total, read, read), covers,
        measures if is_measured else None, (left.label, right.label),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, repr=False)
class CompareReport(Report):
    """What `compare` found."""

    measures: Mapping[str, Measure] | None = None
    """By how much each tensor differs, if you passed `measure`. Tensors whose shapes differ have no entry."""
    labels: tuple[str, str] = ("", "")

    def to_html(self) -> str:
        """Return an HTML page of the differences: a map over layers and a table of tensors.

        Raises CheckpointError if `compare` was called without `measure`.
        """
        measures = self.measures
        if measures is None:
            raise CheckpointError("nothing was measured: call compare(..., measure=True)")
        from planners.reports.checkpoint_pages import difference_page

        other = {name for name, measure in measures.items() if measure.differing}
        told = [(f.fqn or "", f.message) for f in self.findings if f.fqn not in other]
        return difference_page("Differences", self.labels, measures, told, self.covers)

    def _repr_html_(self) -> str:
        if self.measures is None:
            return Report._repr_html_(self)
        from planners.notebooks import framed

        return framed(self.to_html(), self.subject)


def _nbytes(tensor: Any) -> int:
    return int(tensor.nbytes)


def _known(name: str, left: _Side, right: _Side, exact: bool, by_fingerprint: bool) -> str | None:
    """Return how a tensor of both sides differs, or "" if it does not, if this is known without reading it; else
    None."""
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
    first: tuple[tuple[int, ...], Any, Any] | None = None
    """The first element that differs, and what it is on both sides."""
    error: str = ""
    largest: float = 0.0
    squares: float = 0.0
    """Of the distances of finite elements."""
    norm: float = 0.0
    """Of finite elements of the second one, squared."""
    odd: int = 0

    def __add__(self, other: _Difference) -> _Difference:
        """`other` is of boxes behind these."""
        return _Difference(
            self.count + other.count, self.first or other.first, self.error or other.error,
            max(self.largest, other.largest), self.squares + other.squares, self.norm + other.norm,
            self.odd + other.odd,
        )  # fmt: skip

    def measured(self, x: torch.Tensor, y: torch.Tensor) -> _Difference:
        """Return this difference with the distances of one more piece of both sides added."""
        wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
        x, y = (tensor.to("cpu").to(wide) for tensor in (x, y))
        finite = x.isfinite() & y.isfinite()
        odd = int((~finite & (x != y) & ~(x.isnan() & y.isnan())).sum())
        distance, size = (x[finite] - y[finite]).abs(), y[finite].abs()
        largest = float(distance.max()) if len(distance) else 0.0
        return self + _Difference(0, None, "", largest, float(distance.square().sum()), float(size.square().sum()), odd)

    def measure(self, elements: int) -> Measure:
        """Return how much the sides differ, for this number of elements."""
        from planners.reports.checkpoint_pages import Measure

        ratio = math.sqrt(self.squares / self.norm) if self.norm else math.inf if self.squares else 0.0
        largest, ratio = (min(value, sys.float_info.max) for value in (self.largest, ratio))
        return Measure(elements, self.count, largest, ratio, self.odd)

    def text(self, numel: int) -> tuple[str, tuple[int, ...] | None]:
        """Return the difference in words, "" if there is none, and the first element that differs."""
        if self.error or self.first is None:
            return self.error, None
        element, *values = self.first
        x, y = (f"{value:.6g}" if isinstance(value, float) else str(value) for value in values)
        x, y = map(str, values) if x == y else (x, y)
        return f"{self.count} of {numel} elements differ; at the first, {x} on the left and {y} on the right", element


@dataclass(frozen=True)
class CompareWork:
    """Compares parts of the tensors of two checkpoints."""

    a: Opening
    b: Opening
    how: _How

    def begin(self) -> Callable[[Share], list[_Difference]]:
        """Opens both."""
        return partial(_compare_share, _Side(self.a.open()), _Side(self.b.open()), self.how)


def _differences(
    left: _Side,
    right: _Side,
    names: Sequence[str],
    how: _How,
    executor: Executor | None,
    step: Phase,
) -> dict[str, _Difference]:
    """Return the differences by name, of tensors that must be read."""
    sizes = {name: max(side.tensors[name].dtype.itemsize for side in (left, right)) for name in names}
    asked = list(shares((name, left.tensors[name].shape, sizes[name]) for name in names))
    answers: dict[Share, list[_Difference]] = {}

    def on_done(share: Share, found: list[_Difference]) -> None:
        answers[share] = found
        step.advance(sum(box.numel * left.tensors[name].dtype.itemsize for name, box in share))

    work = None
    if executor is not None and left.checkpoint is not None and right.checkpoint is not None:
        work = CompareWork(Opening.of(left.checkpoint), Opening.of(right.checkpoint), how)
    run_tasks(work, asked, executor, on_done, here=partial(_compare_share, left, right, how))
    totals = dict.fromkeys(names, _Difference())
    for share in asked:
        for (name, _), found in zip(share, answers[share]):
            totals[name] += found
    return totals


@gc_paused()
def _compare_share(left: _Side, right: _Side, how: _How, share: Share) -> list[_Difference]:
    found = []
    for name, box in share:
        try:
            found.append(_difference(left.tensors[name], right.tensors[name], box, how))
        except CheckpointError as error:
            found.append(_Difference(error=str(error)))
    return found


class _Side:
    """Tensors by name, objects, values of each rank by key and rank, and fingerprints of one of the two."""

    def __init__(self, source: Any) -> None:
        self.fingerprints: Mapping[str, str] = {}
        self.checkpoint: Checkpoint | None = None
        self.tensors: Mapping[str, Any]
        self.objects: Mapping[str, Any]
        self.own: Mapping[str, Mapping[int, Any]]
        self.is_one_rank_s = False
        if isinstance(source, torch.nn.Module | torch.optim.Optimizer):
            raise option_error(
                f"compare takes a path, Checkpoint, or state dict, got {state_instead_of(source)}", StorageError
            )
        if isinstance(source, Mapping) and not isinstance(source, Checkpoint):
            leaves = flatten(source, is_leaf=lambda v: is_tensor(v) or isinstance(v, LazyTensor | PerRank)).leaves
            values = {key_of(path): value for path, value in expanded(leaves).items()}  # as they are saved
            sharded = [key for key, value in values.items() if is_sharded(value)]
            if sharded:
                raise LayoutError(
                    f"{sharded[0]!r} is sharded, and no rank has all of it. Compare reshard.fingerprint(state), on all "
                    "ranks, with reshard.fingerprint(path); or save the state, and compare the checkpoints"
                )
            self.label = "the state dict"
            self.tensors = {k: v for k, v in values.items() if is_tensor(v) or isinstance(v, LazyTensor)}
            rank = dist.get_rank() if dist.is_initialized() else 0
            self.own = {k: {rank: v.value} for k, v in values.items() if isinstance(v, PerRank)}
            for key, value in [*self.tensors.items(), *((k, v[rank]) for k, v in self.own.items())]:
                if is_tensor(value):
                    spec_of(key, value)  # which refuses what has no plain elements
            self.is_one_rank_s = True
            self.objects = {k: _as_bytes(v) for k, v in values.items() if k not in self.tensors and k not in self.own}
            return
        self.checkpoint = checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
        self.label = checkpoint.url
        names = [*checkpoint, *(alias for alias in checkpoint.aliases if alias not in checkpoint.contents.tensors)]
        self.tensors = {name: checkpoint[name] for name in names}
        self.objects = _values(checkpoint.objects)
        self.own = checkpoint.contents.per_rank
        self.fingerprints = checkpoint.fingerprints or {}


def _values(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return single values. Some formats keep a list of them as one object, others each under a key of its own."""
    out: dict[str, Any] = {}
    for key, value in objects.items():
        try:
            leaves = flatten({key: value}).leaves.items()
            out.update((key_of((key, *path[1:])), _as_bytes(leaf)) for path, leaf in leaves)
        except KeyMismatchError:  # a dict with keys such as 1 and "1"
            out[key] = value
    return out


def _as_bytes(value: Any) -> Any:
    """The content of a file in memory, which some formats keep as bytes."""
    return value.getvalue() if isinstance(value, BytesIO) else value


def _prefix_findings(left: _Side, right: _Side) -> Iterator[Finding]:
    """Report names that differ only by a prefix, such as `model.`, before they are listed one by one."""
    if left.tensors.keys() & right.tensors.keys():
        return
    for one, other, of in (left.tensors, right.tensors, ""), *_parts_of_more(left, right):
        (x, of_left), (y, of_right) = _without_prefix(one), _without_prefix(other)
        if not of_left or of_left != of_right:
            continue
        while x and y and x[-1] == y[-1]:
            x, y = x[:-1], y[:-1]
        here, there = (f"{'.'.join(parts)}." if parts else "" for parts in (x, y))
        yield Finding(
            f"the names of all tensors{of} are the same except for a prefix: {here!r} in {left.label}, {there!r} in "
            f"{right.label}. `reshard diff --model` removes prefixes of frameworks, such as 'model.' and 'module.'"
        )
        return


def _parts_of_more(left: _Side, right: _Side) -> Iterator[tuple[Collection[str], Collection[str], str]]:
    """The names below each top-level key of one side, such as a model beside an optimizer, and all names of the other
    side, in words."""
    for name, below in grouped((name.partition(".")[0], name) for name in left.tensors).items():
        if len(below) == len(right.tensors):
            yield below, right.tensors, f" in {right.label} and of {name!r} in {left.label}"
    for name, below in grouped((name.partition(".")[0], name) for name in right.tensors).items():
        if len(below) == len(left.tensors):
            yield left.tensors, below, f" in {left.label} and of {name!r} in {right.label}"


def _without_prefix(names: Collection[str]) -> tuple[list[str], set[str]]:
    """Split all names into the parts of their common dotted prefix and the rest."""
    parts = [name.split(".") for name in names]
    one, other = min(parts, default=[]), max(parts, default=[])  # what these two share, all between them do
    shared = [x for x, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one[:-1], other[:-1]))]
    return shared, {".".join(name[len(shared) :]) for name in parts}


def _only_findings(left: _Side, right: _Side, x: Collection[str], y: Collection[str]) -> Iterator[Finding]:
    """Report what only one side has."""
    for side, its, others in ((left, x, y), (right, y, x)):
        yield from (Finding(f"only in {side.label}", key) for key in its if key not in others)


def _object_findings(left: _Side, right: _Side) -> Iterator[Finding]:
    yield from _only_findings(left, right, left.objects, right.objects)
    for key, value in left.objects.items():
        if key in right.objects and not _equal(value, right.objects[key]):
            shown = f"{value!r:.80} in {left.label}, {right.objects[key]!r:.80} in {right.label}"
            yield Finding(shown, key)


def _own_findings(left: _Side, right: _Side) -> Iterator[Finding]:
    """Compare per-rank values. A state dict has those of one rank only."""
    yield from _only_findings(left, right, left.own, right.own)
    for key in left.own:
        if key not in right.own:
            continue
        x, y = left.own[key], right.own[key]
        ranks = [r for r in x if r in y]
        if (not (left.is_one_rank_s or right.is_one_rank_s) and set(x) != set(y)) or not ranks:
            yield Finding(f"was saved by ranks {sorted(x)} in {left.label}, and by {sorted(y)} in {right.label}", key)
        for rank in ranks:
            if not _equal(_read(x[rank]), _read(y[rank])):
                yield Finding(f"differs between {left.label} and {right.label} on rank {rank}", key)


def _read(value: Any) -> Any:
    return LazyTensor(value)[...] if isinstance(value, StoredTensor) else value


def _equal(a: Any, b: Any) -> bool:
    if not is_tensor(a):
        try:
            same = a == b
            if bool(same.all() if hasattr(same, "all") else same):
                return True
        except (ValueError, RuntimeError, TypeError):  # arrays or tensors within
            pass
    try:  # as it is written: NaN is then equal to itself
        return bool(encode_plain(a, tensor_bytes=1 << 62) == encode_plain(b, tensor_bytes=1 << 62))
    except FormatError:  # objects of other frameworks
        return False


def _difference(x: Any, y: Any, within: Box, how: _How) -> _Difference:
    rtol, atol, is_measured = how
    total = _Difference()
    itemsize = max(x.dtype.itemsize, y.dtype.itemsize)
    for part in windows(within.sizes, itemsize, WINDOW_BYTES // (8 if is_measured else 1)):  # it takes more memory
        box = part.shift(within.offsets)
        pieces = elements_of(x, box), elements_of(y, box)
        if not (rtol or atol or is_measured) and _same_bytes(*pieces):
            continue
        differs = _differing(*pieces, rtol, atol)
        count = int(differs.sum())
        if count and total.first is None:
            local = torch.nonzero(differs.reshape(differs.shape or (1,)))[0].tolist() if differs.ndim else []
            element = tuple(o + i for o, i in zip(box.offsets, local))
            at = Box.of(element, (1,) * len(element))
            first = (element, elements_of(x, at).reshape(-1)[0].item(), elements_of(y, at).reshape(-1)[0].item())
            total += _Difference(first=first)
        total += _Difference(count)
        if is_measured:
            total = total.measured(*pieces)
    return total


def _same_bytes(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.device == y.device and torch.equal(raw_bytes(x.contiguous()), raw_bytes(y.contiguous()))


def _differing(x: torch.Tensor, y: torch.Tensor, rtol: float, atol: float) -> torch.Tensor:
    """Return where two tensors of one shape differ, computed on their common device, or on the host."""
    if x.device != y.device or not (x.device.type == "cpu" or float64_is_exact(x.device)):
        x, y = to_host([x, y])
    if rtol or atol:
        wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
        return ~torch.isclose(x.to(wide), y.to(wide), rtol=rtol, atol=atol, equal_nan=True)
    size = x.dtype.itemsize
    raw = raw_bytes(x.contiguous()) != raw_bytes(y.contiguous())
    return raw.reshape(*x.shape, size).any(dim=-1)


def elements_of(tensor: Any, box: Box) -> torch.Tensor:
    piece: torch.Tensor = (
        tensor[box.slices] if box.ndim else (tensor[...] if isinstance(tensor, LazyTensor) else tensor)
    )
    return piece.detach().resolve_conj().resolve_neg()
