"""How two tensors differ: how many elements, the first of them, and by how much."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from planners.geometry.box import Box, Shape
from planners.geometry.layout import TensorLayout
from reshard.api.task_shares import Share
from reshard.api.transfer_memory import held_parts
from reshard.errors import CheckpointError, FormatError
from reshard.live.copy_streams import to_host
from reshard.live.dtypes import dtype_name, raw_elements
from reshard.live.fingerprints import float64_is_exact
from reshard.live.tensors import LiveTensor, raw_bytes
from reshard.ranks.group import Group
from reshard.stored.streaming import windows
from reshard.stored.tensor import LazyTensor, Run, read_box, run_of

if TYPE_CHECKING:
    from planners.reports.checkpoint_pages import Measure


__all__ = [
    "SAME",
    "WINDOW_BYTES",
    "Difference",
    "HeldBoxes",
    "How",
    "difference_within",
    "elements_of",
    "equal_as_bytes",
]

How = tuple[float, float, bool]
"""The relative and the absolute tolerance, and whether differences are measured."""


WINDOW_BYTES = 32 << 20
"""Tensors are read in pieces of at most about this size."""
_SMALL_BYTES = 64 << 10
"""Stored tensors up to this size are compared as bytes first, together with their neighbors in the files."""
_SPAN_BYTES = 1 << 20
"""Neighbors are read together up to this size."""


@dataclass(frozen=True)
class Difference:
    """How two tensors differ in some boxes."""

    count: int = 0
    first: tuple[Shape, str, str] | None = None
    """The first element that differs, in row-major order, and what it is on both sides."""
    error: str = ""
    is_damage: bool = False
    """Whether the error is damage."""
    largest: float = 0.0
    squares: float = 0.0
    """Of the distances of finite elements."""
    norm: float = 0.0
    """Of finite elements of the second one, squared."""
    odd: int = 0

    def __add__(self, other: Difference) -> Difference:
        """`other` is of other boxes."""
        firsts = [one.first for one in (self, other) if one.first]
        return Difference(
            self.count + other.count, min(firsts, default=None), self.error or other.error,
            self.is_damage or other.is_damage, max(self.largest, other.largest),
            self.squares + other.squares, self.norm + other.norm, self.odd + other.odd,
        )  # fmt: skip

    @property
    def weight(self) -> tuple[bool, int]:
        """How bad it is; (False, 0) if there is no difference."""
        return bool(self.error), self.count

    def measured(self, x: torch.Tensor, y: torch.Tensor) -> Difference:
        """Return this difference with the distances of one more piece of both sides added."""
        try:
            x, y, apart = _wide(x.to("cpu"), y.to("cpu"))
        except FormatError:
            return self + Difference(odd=int(_differing(x, y, 0.0, 0.0).sum()))
        finite = x.isfinite() & y.isfinite()
        odd = int((~finite & (x != y) & ~(x.isnan() & y.isnan())).sum())
        distance, size = apart[finite], y[finite].abs()
        largest = float(distance.max()) if len(distance) else 0.0
        squares, norm = float(distance.square().sum()), float(size.square().sum())
        return self + Difference(largest=largest, squares=squares, norm=norm, odd=odd)

    def measure(self, elements: int) -> Measure:
        """Return how much the sides differ, for this number of elements."""
        from planners.reports.checkpoint_pages import Measure

        ratio = math.sqrt(self.squares / self.norm) if self.norm else math.inf if self.squares else 0.0
        largest, ratio = (min(value, sys.float_info.max) for value in (self.largest, ratio))
        return Measure(elements, min(self.count, elements), largest, ratio, self.odd)

    def text(self, numel: int) -> tuple[str, Shape | None]:
        """Return the difference in words, "" if there is none, and the first element that differs."""
        if self.error or self.first is None:
            return self.error, None
        element, x, y = self.first
        return f"{self.count} of {numel} elements differ; the first: {x} -> {y}", element


def _shown(x: Any, y: Any) -> tuple[str, str]:
    """Two values, with six digits if that shows how they differ."""
    short = [f"{value:.6g}" if isinstance(value, float) else str(value) for value in (x, y)]
    return (str(x), str(y)) if short[0] == short[1] else (short[0], short[1])


SAME = Difference()


def difference_within(x: Any, y: Any, within: Box, how: How) -> Difference:
    """How two tensors differ within a box, a window at a time. Raises what reading them raises."""
    rtol, atol, is_measured = how
    total = SAME
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
            values = _shown(*(_number(elements_of(side, at).reshape(-1)[0]) for side in (x, y)))
            total += Difference(first=(element, *values))
        total += Difference(count)
        if is_measured:
            total = total.measured(*pieces)
    return total


def _number(element: torch.Tensor) -> Any:
    """The number that an element is; the bits of a packed one, such as float4."""
    try:
        return element.item()
    except NotImplementedError:
        return f"{raw_elements(element).item():#x}"


def _wide(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both in a dtype that holds them, and their distances, of integers
    without rounding these before.

    Raises FormatError for packed numbers, such as float4.
    """
    wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
    try:
        a, b = x.to(wide), y.to(wide)
    except NotImplementedError as error:
        raise FormatError(f"torch converts no {dtype_name(x.dtype)}: compare without rtol= and atol=") from error
    if max(x.dtype.itemsize, y.dtype.itemsize) < 8 or any(t.is_floating_point() or t.is_complex() for t in (x, y)):
        return a, b, (a - b).abs()
    (high, low), (other_high, other_low) = _halves(x), _halves(y)
    return a, b, ((high - other_high).to(wide) * 2**32 + (low - other_low)).abs()


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers as 2**32 times one, which has the sign, plus another one."""
    is_unsigned = x.dtype == torch.uint64
    whole = x.view(torch.int64) if is_unsigned else x.to(torch.int64)
    high = whole >> 32
    return high & 0xFFFF_FFFF if is_unsigned else high, whole & 0xFFFF_FFFF


def _same_bytes(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.device == y.device and torch.equal(raw_bytes(x.contiguous()), raw_bytes(y.contiguous()))


def _differing(x: torch.Tensor, y: torch.Tensor, rtol: float, atol: float) -> torch.Tensor:
    """Return where two tensors of one shape differ, computed on their common device, or on the host."""
    if x.device != y.device or not (x.device.type == "cpu" or float64_is_exact(x.device)):
        x, y = to_host([x, y])
    if rtol or atol:
        x, y, apart = _wide(x, y)
        return ~torch.isclose(x, y, rtol=rtol, atol=atol, equal_nan=True) | (apart > atol + rtol * y.abs())
    size = x.dtype.itemsize
    raw = raw_bytes(x.contiguous()) != raw_bytes(y.contiguous())
    return raw.reshape(*x.shape, size).any(dim=-1)


@dataclass(frozen=True)
class HeldBoxes:
    """The boxes of a sharded tensor that this rank holds, each with its elements."""

    shape: Shape
    dtype: torch.dtype
    boxes: Mapping[Box, torch.Tensor]

    @classmethod
    def of(cls, key: str, value: Any, group: Group) -> HeldBoxes:
        """Collective over the ranks that hold it, where they must find out together how it is sharded."""
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
        """The elements of a box within one of these."""
        around = next(outer for outer in self.boxes if outer.contains(box))
        return self.boxes[around][box.relative_to(around).slices]


def elements_of(tensor: Any, box: Box) -> torch.Tensor:
    if isinstance(tensor, HeldBoxes):
        return tensor.elements(box).detach().resolve_conj().resolve_neg()
    if isinstance(tensor, LazyTensor):
        return read_box(tensor.stored, box)
    piece: torch.Tensor = tensor[box.slices] if box.ndim else tensor
    return piece.detach().resolve_conj().resolve_neg()


def equal_as_bytes(left: Mapping[str, Any], right: Mapping[str, Any], share: Share) -> set[str]:
    """The small stored tensors that have the same bytes on both sides. All others are compared one by one, and so are
    those near damage, to find out which of them are damaged."""
    runs = []
    for name, box in share:
        x, y = left[name], right[name]
        if isinstance(x, LazyTensor) and isinstance(y, LazyTensor) and box.numel * x.stored.itemsize <= _SMALL_BYTES:
            with suppress(CheckpointError):
                one, other = run_of(x.stored, box), run_of(y.stored, box)
                if one and other:
                    runs.append((name, one, other))
    equal: set[str] = set()
    for span in _spans(runs):
        with suppress(CheckpointError):
            equal.update(_equal_in(span))
    return equal


def _spans(runs: list[tuple[str, Run, Run]]) -> list[list[tuple[str, Run, Run]]]:
    """Runs that follow each other in the files of both sides, together."""
    spans: list[list[tuple[str, Run, Run]]] = []
    for name, one, other in sorted(runs, key=lambda run: (run[1].source.label, run[1].start)):
        if spans:
            _, first, _ = spans[-1][0]
            _, last, before = spans[-1][-1]
            follows = (last.source, last.stop, before.source, before.stop) == (*one[:2], *other[:2])
            if follows and one.stop - first.start <= _SPAN_BYTES:
                spans[-1].append((name, one, other))
                continue
        spans.append([(name, one, other)])
    return spans


def _equal_in(span: list[tuple[str, Run, Run]]) -> Iterator[str]:
    """Raises CorruptCheckpointError for bytes that are missing or were changed on one side."""
    (_, x, y), (_, last, _) = span[0], span[-1]
    nbytes = last.stop - x.start
    a, b = (bytes(run.source.read(run.start, nbytes, elements=True)) for run in (x, y))
    for name, run, _ in span:
        part = slice(run.start - x.start, run.stop - x.start)
        if a[part] == b[part]:
            yield name
