"""A stored tensor: its chunks, and where the bytes of each are."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import numpy as np
import numpy.typing as npt
import torch

from planners.geometry.box import Box
from planners.geometry.byte_ranges import Window
from planners.geometry.layout import TensorLayout, TensorSpec, itemsize
from planners.geometry.overlap import Sweep, tiling_fault
from reshard.errors import CheckpointError, CorruptCheckpointError, ReshardError
from reshard.live.dtypes import dtype_from_name, item_dtype
from reshard.stored.record_checksums import RecordChecksums
from reshard.stored.source import FileSource, Source

#         tensor (6 x 4)            chunk 0: Box[0:3, 0:4]  ->  window of a.distcp, row-major
#         +---------+               chunk 1: Box[3:6, 0:4]  ->  window of b.distcp, transposed
#         | chunk 0 |
#         +---------+               Slices, transpositions, slices of stacks and pieces of flat buffers are
#         | chunk 1 |               windows again, so every rearrangement of a checkpoint stays lazy and exact.
#         +---------+
#
# Finding a chunk's bytes may take a small read (DCP stores each chunk as an archive). So a chunk is
# *located* when its bytes are first needed, not when the checkpoint is opened.


_MANY_CHUNKS = 8
"""Above this number, chunks are sorted to find those that overlap a box."""


class Extent(NamedTuple):
    """Where the bytes of a chunk are: a window of a source."""

    source: Source
    window: Window
    conjugate: bool = False
    """Whether the value is the complex conjugate of the stored bytes. torch stores `x.conj()` as x
    and a flag."""
    descriptor_at: int | None = None
    """Position of the descriptor of a zip archive's record, if the window begins with the record
    and has its size. If its strides are row-major, the window is the record."""

    def with_window(self, window: Window) -> Extent:
        """Return another window of the same source."""
        return Extent(self.source, window, self.conjugate)


class StoredChunk:
    """A box of a tensor, in global coordinates, and where its elements are stored.

    `source` and `window` are determined on first use. `window.sizes` always equals `box.sizes`.
    """

    __slots__ = ("_place", "box", "owner")

    def __init__(self, box: Box, place: Extent | Callable[[], Extent], owner: int | str = 0) -> None:
        """`place` is the location, or a function that finds it. `owner` is the rank that wrote the
        chunk, or a chunk ID.

        Raises CorruptCheckpointError, here or on first use, if the location does not have the box's
        sizes.
        """
        self.box = box
        self.owner = owner
        self._place = self._checked(place) if isinstance(place, Extent) else place

    def _checked(self, place: Extent) -> Extent:
        if place.window.sizes != self.box.sizes:
            raise CorruptCheckpointError(
                f"{place.source.label}: the stored payload has shape {list(place.window.sizes)}, but the checkpoint's "
                f"metadata says {list(self.box.sizes)} for {self.box}; the metadata and the data contradict each other"
            )
        return place

    @property
    def place(self) -> Extent:
        """Where the bytes are. Raises CorruptCheckpointError if the file contradicts the metadata."""
        if not isinstance(self._place, Extent):
            self._place = self._checked(self._place())
        return self._place

    @property
    def is_located(self) -> bool:
        """True if `place` is known already, so that access to it reads nothing."""
        return isinstance(self._place, Extent)

    @property
    def source(self) -> Source:
        """The source that the window refers to."""
        return self.place.source

    @property
    def window(self) -> Window:
        """The window of the source with the elements, with the box's dims."""
        return self.place.window

    def derived(self, box: Box, change: Callable[[Window], Window]) -> StoredChunk:
        """Return a chunk at `box` whose window is `change` of this chunk's window. Does not locate
        this chunk."""
        return StoredChunk(box, lambda: (p := self.place).with_window(change(p.window)), self.owner)

    def crop(self, region: Box) -> StoredChunk:
        """Return the part inside `region`, which must be within the box, in global coordinates."""
        if region == self.box:
            return self
        inner = region.relative_to(self.box)
        return self.derived(region, lambda w: w.crop(inner))

    def shift(self, by: Sequence[int]) -> StoredChunk:
        """Return the same elements, shifted by `by` in each dim."""
        return self.derived(self.box.shift(by), lambda w: w)

    def __repr__(self) -> str:
        return f"StoredChunk({self.box}, {self._place if self.is_located else 'not yet located'}, owner={self.owner!r})"


class LazyChunks:
    """Chunks that follow from a rule. It finds the chunks near a box without listing all of them.

    Chunks are within the tensor and do not overlap.
    """

    # no ABC: an isinstance check would take a microsecond per tensor

    @property
    def geometry(self) -> Hashable:
        """Tensors with equal geometry have the same boxes. None: unknown."""
        return None

    def near(self, box: Box) -> Iterable[StoredChunk]:
        """Return at least the chunks that overlap a box."""
        return self.every()

    def every(self) -> Iterable[StoredChunk]:
        """Return all chunks."""
        raise NotImplementedError


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: its spec and its chunks."""

    spec: TensorSpec
    found: Sequence[StoredChunk] | LazyChunks
    """`chunks`, or a rule that finds them."""
    layout: TensorLayout | None = None
    """The saved mesh and placements, if the format records them."""

    def __post_init__(self) -> None:
        """Raise CorruptCheckpointError if a chunk is outside the tensor."""
        if isinstance(self.found, LazyChunks):
            return
        shape = self.spec.shape
        for chunk in self.found:
            # an empty box must also start and end inside
            if chunk.box.ndim != len(shape) or any(stop > size for stop, size in zip(chunk.box.stops, shape)):
                raise CorruptCheckpointError(
                    f"tensor {self.spec.fqn!r}: a stored chunk at {chunk.box} is outside the shape "
                    f"{list(self.spec.shape)} that the metadata gives"
                )

    @cached_property
    def chunks(self) -> Sequence[StoredChunk]:
        """All chunks of the tensor."""
        return tuple(self.found.every()) if isinstance(self.found, LazyChunks) else self.found

    @property
    def fqn(self) -> str:
        """The name under which it is stored."""
        return self.spec.fqn

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return itemsize(self.spec.dtype)

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The boxes of `chunks`, in the same order."""
        return tuple(chunk.box for chunk in self.chunks)

    def meeting(self, box: Box) -> Iterator[tuple[StoredChunk, Box]]:
        """Yield each chunk that overlaps `box`, which is in global coordinates, and the overlap."""
        if isinstance(self.found, LazyChunks):
            near = self.found.near(box)
        elif len(self.found) <= _MANY_CHUNKS:
            near = self.found
        else:
            near = (self.chunks[int(i)] for i, _, _ in self._sweep.meeting(box))
        for chunk in near:
            common = chunk.box & box
            if common is not None:
                yield chunk, common

    @cached_property
    def _sweep(self) -> Sweep:
        return Sweep(enumerate(self.boxes))

    def renamed(self, fqn: str) -> StoredTensor:
        """Return the same tensor under another name."""
        spec = TensorSpec(fqn, self.spec.shape, self.spec.dtype)
        layout = None if self.layout is None else TensorLayout.of(spec, self.layout.form)
        return StoredTensor(spec, self.found, layout)


def check_cover(tensor: StoredTensor, region: Box | None = None) -> None:
    """Raise CorruptCheckpointError unless the chunks contain every element of `region` (default:
    all) exactly once."""
    wanted = Box.full(tensor.spec.shape) if region is None else region
    if region is None:  # chunks are never outside of their tensor
        inside = [(chunk, chunk.box) for chunk in tensor.chunks if not chunk.box.is_empty]
    else:
        inside = list(tensor.meeting(wanted))
    boxes = [box for _, box in inside]
    fault = tiling_fault([wanted], boxes)
    if fault is None:
        return
    element = Box.of(fault.element, (1,) * wanted.ndim)
    if fault.count > 1:
        (first, a), (second, b) = [row for row in inside if row[1].contains(element)][:2]
        raise CorruptCheckpointError(
            f"tensor {tensor.fqn!r}: elements {a & b} are stored twice, in {_name(first)} and in {_name(second)}; the "
            "checkpoint does not say which is right: load another checkpoint"
        )
    others = f"; it has {_name(tensor.chunks[0])}" if tensor.chunks else ""
    raise CorruptCheckpointError(
        f"tensor {tensor.fqn!r} of shape {list(tensor.spec.shape)}: "
        "no file of the checkpoint has elements "
        f"{str(_hole(wanted, boxes, element)).removeprefix('Box')}{others}. "
        "Restore the file, or the part of a rank, that is missing, or load another checkpoint"
    )


def _hole(region: Box, boxes: Sequence[Box], element: Box) -> Box:
    """Return a part of `region` around `element` that no box covers."""
    left = region
    for box in boxes:
        left = next((piece for piece in left - box if piece.contains(element)), left)
    return left


def _name(chunk: StoredChunk) -> str:
    try:
        where = chunk.source.label
    except ReshardError as error:
        where = f"which cannot be read: {error}"
    return f"the chunk {chunk.box} of writer {chunk.owner} ({where})"


# A stored tensor that is indexed like a torch tensor, and reads only what is needed.


SteppedRange = tuple[int, int, int]
"""Start, step, and count of the wanted indices of a dim."""


_READ_FIRST = "read it with [...] first, such as checkpoint[name][...]"


class LazyTensor:
    """A tensor of a checkpoint. Indexing reads only from the chunks that contain the requested
    elements.

    `t[...]` reads the full tensor. Ints, slices with positive steps, and Ellipsis work as on a
    torch tensor. Functions of torch raise TypeError: index the tensor first.
    """

    __array_ufunc__ = None  # numpy then leaves operators to this class

    def __init__(self, stored: StoredTensor, refuse: Callable[[CheckpointError], None] | None = None) -> None:
        """`refuse` is called first with each error of a read, and may raise a clearer one."""
        self.stored = stored
        self._refuse = refuse

    @property
    def name(self) -> str:
        """Key of the tensor in the checkpoint."""
        return self.stored.fqn

    @property
    def shape(self) -> torch.Size:
        """Global shape."""
        return torch.Size(self.stored.spec.shape)

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.stored.spec.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Stored dtype."""
        return dtype_from_name(self.stored.spec.dtype)

    @property
    def nbytes(self) -> int:
        """Size of the full tensor in bytes."""
        return self.stored.spec.nbytes

    def numel(self) -> int:
        """Number of elements."""
        return self.stored.spec.numel

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        given = [*args, *(kwargs or {}).values()]
        every = (item for arg in given for item in (arg if isinstance(arg, list | tuple) else [arg]))
        lazy = next((item for item in every if isinstance(item, cls)), "it")
        raise TypeError(f"{getattr(func, '__name__', func)} got {lazy}, which is lazy: {_READ_FIRST}")

    if not TYPE_CHECKING:  # mypy would accept any attribute

        def __getattr__(self, name: str) -> NoReturn:
            words = ", as a tensor has" if hasattr(torch.Tensor, name) else ""
            raise AttributeError(f"'LazyTensor' object has no attribute {name!r}{words}: {_READ_FIRST}")

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError(f"len() of the 0-d tensor {self.name!r}")
        return self.shape[0]

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Iterate over dim 0. Reads one slice at a time."""
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return a new contiguous CPU tensor.

        Raises:
            IndexError: an index is out of bounds, or there are too many.
            TypeError: an index is not an int, a slice, or Ellipsis. A step < 1 is a ValueError.
            CorruptCheckpointError: elements are stored nowhere or twice, or bytes are missing.
            CheckpointReplacedError: a later save replaced the checkpoint since it was opened.
        """
        try:
            if index is Ellipsis:
                return read_box(self.stored, Box.full(self.stored.spec.shape))
            ranges, kept = _normalize(index, self.shape, self.name)
            return _read_ranges(self.stored, ranges).reshape([n for (_, _, n), keep in zip(ranges, kept) if keep])
        except CheckpointError as error:
            if self._refuse is not None:
                self._refuse(error)
            raise

    def __repr__(self) -> str:
        return f"LazyTensor({self.name!r}, {list(self.shape)}, {self.stored.spec.dtype})"


def _refuse(lazy: LazyTensor, *_: Any, **__: Any) -> NoReturn:
    raise TypeError(f"{lazy} is lazy: {_READ_FIRST}")


def _refuse_values(lazy: LazyTensor, other: Any) -> Any:
    """Raise TypeError for a comparison with numbers or tensors. Compare with other values, such as
    None, as for any object."""
    if lazy is not other and isinstance(other, torch.Tensor | np.ndarray | int | float | LazyTensor):
        _refuse(lazy, other)
    return NotImplemented


for _operator in ("add", "sub", "mul", "truediv", "matmul", "pow"):
    setattr(LazyTensor, f"__{_operator}__", _refuse)
    setattr(LazyTensor, f"__r{_operator}__", _refuse)
for _operator in (
    "array",
    "dlpack",
    "dlpack_device",
    "bool",
    "float",
    "int",
    "neg",
    "abs",
):  # also for np.asarray and torch.as_tensor
    setattr(LazyTensor, f"__{_operator}__", _refuse)
for _operator in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(LazyTensor, f"__{_operator}__", _refuse_values)


def whole(value: Any) -> Any:
    """Return nested dicts, lists, and tuples with every lazy tensor read."""
    if isinstance(value, dict):
        return {name: whole(inner) for name, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(whole, value))
    return value[...] if isinstance(value, LazyTensor) else value


def read_value(value: Any) -> Any:
    """Read a stored tensor, such as the learning rate of a param group. Return any other value unchanged."""
    return LazyTensor(value)[...] if isinstance(value, StoredTensor) else value


def _normalize(index: Any, shape: torch.Size, name: str) -> tuple[list[SteppedRange], list[bool]]:
    """Return a range for each dim, and whether the dim is kept. An int removes its dim."""
    items = list(index) if isinstance(index, tuple) else [index]
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1:
        raise IndexError(f"tensor {name!r}: an index can have only one Ellipsis, got {index!r}")
    if len(items) - len(dots) > len(shape):
        raise IndexError(f"tensor {name!r} has {len(shape)} dims, but {len(items) - len(dots)} were indexed")
    at = dots[0] if dots else len(items)
    items[at : at + 1] = [slice(None)] * (len(shape) - len(items) + len(dots))
    ranges: list[SteppedRange] = []
    kept: list[bool] = []
    for d, (item, size) in enumerate(zip(items, shape)):
        if isinstance(item, slice):
            if item.step is not None and operator.index(item.step) < 1:
                raise ValueError(f"tensor {name!r}: the step of a slice must be >= 1, got {item.step} for dim {d}")
            start, stop, step = item.indices(size)
            ranges.append((start, step, len(range(start, stop, step))))
            kept.append(True)
            continue
        if isinstance(item, bool) or not hasattr(item, "__index__") or isinstance(item, torch.Tensor | np.ndarray):
            words = f"index it by ints, slices, and Ellipsis, not by {type(item).__name__}"
            raise TypeError(f"tensor {name!r}: {words}; or read all of it, then index that: tensor[...][[0, 2]]")
        i = operator.index(item)
        if not -size <= i < size:
            raise IndexError(f"tensor {name!r}: index {i} is out of bounds for dim {d} of size {size}")
        ranges.append((i % size, 1, 1))
        kept.append(False)
    return ranges, kept


def read_box(stored: StoredTensor, box: Box) -> torch.Tensor:
    """Return the elements of a box as a new contiguous tensor. Raises the errors of indexing a `LazyTensor`."""
    chunk = _holder(stored, box)
    if chunk is not None:
        place = chunk.crop(box).place
        place.source.check(place.window.offset, place.window.stop)  # before memory is allocated
        return read_place(place, stored.spec.dtype)
    return _read_ranges(stored, [(start, 1, n) for start, n in zip(*box)])


class ByteRun(NamedTuple):
    """Bytes [start, stop) of a source."""

    source: Source
    start: int
    stop: int


def run_of(stored: StoredTensor, box: Box) -> ByteRun | None:
    """Return the byte run of a box if its row-major elements are contiguous, else None. Reads nothing."""
    chunk = _holder(stored, box)
    if chunk is None:
        return None
    source, window, conjugate, _ = chunk.crop(box).place
    return ByteRun(source, window.offset, window.stop) if not conjugate and window.runs().count == 1 else None


def _holder(stored: StoredTensor, box: Box) -> StoredChunk | None:
    """Return the chunk that contains a box, if no other chunk contains an element of it."""
    met = list(islice(stored.meeting(box), 2))
    return met[0][0] if len(met) == 1 and met[0][1] == box else None


def _read_ranges(stored: StoredTensor, ranges: list[SteppedRange]) -> torch.Tensor:
    """Return the elements at the cross product of `ranges`."""
    counts = [n for _, _, n in ranges]
    if 0 in counts:
        return empty(counts, stored.spec.dtype)[0]
    region = Box.of(tuple(start for start, _, _ in ranges), tuple((n - 1) * step + 1 for _, step, n in ranges))
    met = list(stored.meeting(region))
    if [common for _, common in met] != [region]:
        check_cover(stored, region)
    parts: list[tuple[Extent, Any]] = []
    for chunk, _ in met:
        bounds = [*map(_inside, ranges, chunk.box.offsets, chunk.box.sizes)]
        if any(first >= stop for first, stop in bounds):
            continue  # a stepped slice may skip a chunk
        window = chunk.window
        origins = [start + first * step for (start, step, _), (first, _) in zip(ranges, bounds)]
        part = Window(
            window.offset + sum((i - o) * s for i, o, s in zip(origins, chunk.box.offsets, window.strides)),
            tuple(stop - first for first, stop in bounds),
            tuple(s * step for s, (_, step, _) in zip(window.strides, ranges)),
            window.itemsize,
        )
        index: Any = (*(slice(first, stop) for first, stop in bounds), ...)
        parts.append((chunk.place.with_window(part), index))
        chunk.source.check(part.offset, part.stop)
    # allocate memory only when all elements are known to be there
    result, out = empty(counts, stored.spec.dtype)
    for place, index in parts:
        copy_place(place, out[index])
    return result


def _inside(wanted: SteppedRange, offset: int, size: int) -> tuple[int, int]:
    """Return the first and one past the last of the wanted indices, counted from 0, that are in
    [offset, offset + size)."""
    start, step, n = wanted
    return max(-(-(offset - start) // step), 0), min(-(-(offset + size - start) // step), n)


# Copies the elements of a window into an array, and reads little more than those elements.


Array = npt.NDArray[Any]

MAX_BUFFER_BYTES = 16 << 20
"""The most bytes of a file that are read at once if the storage has no zero-copy view."""


def empty(shape: Sequence[int], dtype: str) -> tuple[torch.Tensor, Array]:
    """Return a new contiguous tensor with undefined elements, and an array that shares its memory,
    for `copy_place`.

    Raises CheckpointError if there is not enough memory.
    """
    torch_dtype = dtype_from_name(dtype)
    try:
        out = np.empty(shape, item_dtype(torch_dtype.itemsize))
    except (MemoryError, ValueError) as error:
        nbytes = math.prod(shape) * torch_dtype.itemsize
        raise CheckpointError(f"no memory for {nbytes} bytes of shape {list(shape)}: read it in slices") from error
    return torch.from_numpy(out.reshape(-1).view(np.uint8)).view(torch_dtype).view(list(shape)), out


def read_place(place: Extent, dtype: str) -> torch.Tensor:
    """Return all elements at `place` as a new contiguous tensor. Raises the errors of `copy_place`."""
    tensor, out = empty(place.window.sizes, dtype)
    copy_place(place, out)
    return tensor


def same_bytes(a: Extent, b: Extent, dtype: str) -> bool:
    """Return True if two locations of the same shape have the same bytes.

    If both are complete records, only their checksums are compared.
    """
    sums = [_written(place) for place in (a, b)]
    if a.window.strides == b.window.strides and a.conjugate == b.conjugate and None not in sums:
        return sums[0] == sums[1]
    x, y = (read_place(place, dtype).reshape(-1).view(torch.uint8) for place in (a, b))
    return torch.equal(x, y)


def is_near(a: Extent, b: Extent, dtype: str, drift: float) -> bool:
    """Return True if the floats at two locations differ by at most `drift` times the largest
    absolute value of `a`."""
    x, y = (read_place(place, dtype) for place in (a, b))
    if not (drift and x.is_floating_point()):
        return False
    return bool(((x.double() - y.double()).abs().amax() <= drift * x.double().abs().amax()).item())


def _written(place: Extent) -> int | None:
    """Return the CRC-32 that was written with the bytes at a location, or None if there is none."""
    sums = place.source.checksums if isinstance(place.source, FileSource) else None
    is_record = place.descriptor_at is not None
    return sums.written(place.window.offset) if is_record and isinstance(sums, RecordChecksums) else None


def copy_place(
    place: Extent, out: Array, buffer_bytes: int = MAX_BUFFER_BYTES, *, compared: bool = False, passing: bool = False
) -> None:
    """Copy the elements at `place` into `out`, an array of `item_dtype(window.itemsize)` and the
    window's sizes.

    `out` may be strided. Conjugated values are conjugated in `out`. If the storage has no view, at
    most `buffer_bytes` of memory are used for reads beside `out`.

    Bytes are compared with their checksums, if there are any, unless the caller has `compared`
    them. If all of a tensor is `passing`, a large record is compared in pieces.

    Raises:
        CorruptCheckpointError: the source ends before the window does, or was changed. `out` is
            then undefined.
        StorageError: the storage failed.
    """
    if place.window.numel:
        place.source.check(place.window.offset, place.window.stop)
        _Transfer(place.source, place.source.view(), buffer_bytes, compared, passing).run(place.window, out)
        if place.conjugate:
            _conjugate(out)


def copy_view(view: memoryview, window: Window, conjugate: bool, out: Array) -> None:
    """Like `copy_place`, for a view that contains all bytes of the window."""
    if window.numel:
        _copy(view, window, out)
        if conjugate:
            _conjugate(out)


def _conjugate(out: Array) -> None:
    """Flip the sign of the imaginary parts: the highest bit of each element's upper half."""
    half = np.dtype(f"<u{out.dtype.itemsize // 2}")
    parts = out.view(np.dtype([("real", half), ("imag", half)]))
    parts["imag"] ^= half.type(1 << (half.itemsize * 8 - 1))


class _Transfer(NamedTuple):
    source: Source
    view: memoryview | None
    """Requested only once, because decoded data may not be kept."""
    buffer_bytes: int
    compared: bool
    passing: bool

    def run(self, window: Window, out: Array) -> None:
        """Copy a window. Long runs are read directly into `out`. Short or scattered runs are copied
        from a view, or read together with some neighbors."""
        source, view, runs, least = self.source, self.view, window.runs(), self.source.direct_bytes
        long = runs.run_bytes >= least
        if runs.count == 1 and out.flags.c_contiguous and (long or view is None):
            self._read_run(window.offset, memoryview(cast("Any", out.reshape(-1).view(np.uint8))))
        elif long and 1 < window.sizes[0] <= window.nbytes // least and out.strides[-1] == window.itemsize:
            row = window.crop(Box.of((0,) * len(window.sizes), (1, *window.sizes[1:])))
            for i in range(window.sizes[0]):
                here = Window(row.offset + i * row.strides[0], row.sizes, row.strides, row.itemsize)
                self.run(here, out[i : i + 1])
        elif view is not None:
            if not self.compared:
                source.compare(window)
            _copy(view, window, out)
        else:
            self._read(window, out)

    def _read_run(self, offset: int, target: memoryview) -> None:
        """Read one run in pieces, which end at block boundaries of checksums."""
        read_into = self.source.fill if self.compared else partial(self.source.read_into, passing=self.passing)
        start = 0
        while start < len(target):
            stop = min((offset + start) // MAX_BUFFER_BYTES * MAX_BUFFER_BYTES + MAX_BUFFER_BYTES - offset, len(target))
            read_into(offset + start, target[start:stop])
            start = stop

    def _read(self, window: Window, out: Array) -> None:
        """Read the window at once if a plan counts it as one read and the memory suffices.
        Otherwise, read it part by part along the dim with the largest stride."""
        span = window.stop - window.offset
        gap = self.source.max_gap_bytes
        if span <= self.buffer_bytes and window.runs().in_order().joined(gap).count == 1:
            read = self.source.raw if self.compared else partial(self.source.read, elements=True)
            data = read(window.offset, span)
            _copy(memoryview(data), Window(0, window.sizes, window.strides, window.itemsize), out)
            return
        # dims of size 1 are skipped; a larger one exists, because one element is a single run
        dim = max((d for d, n in enumerate(window.sizes) if n > 1), key=lambda d: window.strides[d])
        stride, size = window.strides[dim], window.sizes[dim]
        rest = (*window.sizes[:dim], 1, *window.sizes[dim + 1 :])
        one = Window(window.offset, rest, window.strides, window.itemsize)
        inner = one.stop - one.offset
        step = 1
        if 0 <= stride - inner <= gap:  # neighbors are close enough to be read together
            step = min(max(self.buffer_bytes // max(stride, 1), 1), max(size - 1, 1))
        for start in range(0, size, step):
            n = min(step, size - start)
            part = Window(
                window.offset + start * stride,
                (*window.sizes[:dim], n, *window.sizes[dim + 1 :]),
                window.strides,
                window.itemsize,
            )
            index = (slice(None),) * dim + (slice(start, start + n),)
            self.run(part, out[index])


def _copy(view: memoryview, window: Window, out: Array) -> None:
    """Copy from a view, by memcpy if the last dim has no gaps on either side."""
    itemsize, sizes, strides = window.itemsize, window.sizes, window.strides
    if sizes and strides[-1] == itemsize and out.strides[-1] == itemsize:
        source = np.ndarray((*sizes[:-1], sizes[-1] * itemsize), np.uint8, view, window.offset, (*strides[:-1], 1))
        target = out.view(np.uint8) if out.dtype != np.uint8 else out
        np.copyto(target, source)
        return
    np.copyto(out, np.ndarray(sizes, out.dtype, view, window.offset, strides))
