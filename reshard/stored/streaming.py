"""Streams regions of stored tensors as bytes. Also contains what the writers of all formats share."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Self, TypeVar, cast

import msgspec
import numpy as np
import torch
import xxhash

from planners.geometry.box import Box
from planners.geometry.byte_ranges import Window
from planners.geometry.layout import StateLayout, TensorLayout, TensorSpec
from planners.geometry.mesh import Mesh, Replicate
from planners.plans.save import SavePlan, plan_writes
from reshard.errors import CorruptCheckpointError
from reshard.live.copy_streams import batches
from reshard.live.dtypes import dtype_from_name, item_dtype
from reshard.live.fingerprints import Partial, comparable, partials
from reshard.storage.base import Listing, Storage, Writer
from reshard.stored.contents import Contents
from reshard.stored.source import FileSource, OnBytes
from reshard.stored.tensor import StoredTensor, check_cover, copy_place

#     with Feed(is_near=True) as feed:
#         for region in regions:
#             feed.add(region, use)
#
#     thread 1   read piece 0 | use 0      read piece 2 | use 2
#     thread 2   read piece 1         | use 1      read piece 3 | use 3
#
# The thread that reads a piece also hashes and writes it, so that the piece stays in one core's
# cache. Memory is one piece per thread, however large the tensors are. Pieces of local files are
# smaller, because a read of them costs no request.


Array = np.ndarray[Any, np.dtype[Any]]
S = TypeVar("S", "TensorSpec", "FilePart")
T = TypeVar("T")


MAX_SHARD_BYTES = 5_000_000_000
"""Formats whose files may begin at any tensor begin a new file at this size."""
PIECE_BYTES = 16 << 20
"""The most bytes of one read."""
NEAR_PIECE_BYTES = 4 << 20
"""Size of a piece of a mapped file, for which a read is a short call, not a request."""
_SMALL_BYTES = 64 << 10
"""Pieces up to this size are read without a thread, and written together."""
_SUMMED_TOGETHER = 512
"""Number of small pieces whose fingerprints are computed together."""
_NEAR_THREADS, _FAR_THREADS = 2, 3
"""Number of threads. Each has a piece in memory: one writes while the others read. More do not
write a file faster."""
_QUEUED = 16
"""Most pieces that wait for a thread. The caller then waits until half are done: a wake-up for each costs more."""
_RELEASE_BYTES = 64 << 20
"""After this many bytes, the mapped pages of the files are released."""


@dataclass(frozen=True)
class Region:
    """A box of a stored tensor, in the tensor's coordinates."""

    stored: StoredTensor
    box: Box
    digest: Callable[[memoryview], int] | None = None
    """Computed by the thread that reads a piece, while the piece is still in its cache."""

    @classmethod
    def whole(cls, stored: StoredTensor) -> Region:
        """Return the region of the full tensor."""
        return cls(stored, Box.full(stored.spec.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.box.numel * self.stored.itemsize

    @cached_property
    def is_near(self) -> bool:
        """True if its first chunk is in a file on this host. Locates that chunk, which a read must
        do anyway."""
        chunk = next((chunk for chunk, _ in self.stored.meeting(self.box)), None)
        return chunk is not None and isinstance(chunk.source, FileSource) and chunk.source.view() is not None

    @property
    def pieces(self) -> Iterator[Box]:
        """The boxes that are read one at a time."""
        max_bytes = NEAR_PIECE_BYTES if self.is_near else PIECE_BYTES
        for box in windows(self.box.sizes, self.stored.itemsize, max_bytes):
            yield box.shift(self.box.offsets)

    @cached_property
    def _covered(self) -> StoredTensor:
        """The tensor. Raises CorruptCheckpointError unless its chunks contain every element of the
        box exactly once."""
        check_cover(self.stored, self.box)  # two threads may both do this, which does no harm
        return self.stored

    def read(self, box: Box, out: Array) -> set[FileSource]:
        """Fill `out`, an array of the box's sizes. Return the files that were read."""
        sources: set[FileSource] = set()
        for chunk, common in self._covered.meeting(box):
            place = chunk.place
            window = place.window.crop(common.relative_to(chunk.box))
            for part in _narrow(window):
                inner: Any = (*part.shift(common.relative_to(box).offsets).slices, ...)  # 0-d: still an array
                near = window.crop(part)
                copy_place(place.with_window(near), out[inner], passing=True)
                if isinstance(place.source, FileSource):
                    sources.add(place.source)
                    if part.sizes != window.sizes:
                        place.source.unmap(near.offset, near.stop - near.offset)
        return sources


@dataclass(frozen=True)
class StreamedRows:
    """Some rows of a region."""

    box: Box
    """The box, in the coordinates of the full tensor."""
    data: memoryview
    """The elements, row-major."""
    dtype: str
    digest: int | None
    """Digest of `data`, if the region has a `digest` function."""

    def tensor(self) -> torch.Tensor:
        """Return the elements as a tensor that shares the memory of `data`."""
        raw = torch.frombuffer(self.data, dtype=torch.uint8)
        return raw.view(dtype_from_name(self.dtype)).view(self.box.sizes)


def windows(shape: Sequence[int], itemsize: int, max_bytes: int = PIECE_BYTES) -> Iterator[Box]:
    """Yield boxes of at most about `max_bytes` that make up `shape`, row-major. Yields none if it
    has no element."""
    if 0 in shape:
        return
    lead, inner = 0, math.prod(shape) * itemsize
    while lead < len(shape) and inner > max_bytes:
        inner //= shape[lead]
        lead += 1
    if not lead:
        yield Box.full(shape)
        return
    step = max(1, max_bytes // max(inner, 1))
    outer, cut, rest = tuple(shape[: lead - 1]), shape[lead - 1], tuple(shape[lead:])
    for prefix in np.ndindex(*outer):
        for start in range(0, cut, step):
            size = min(step, cut - start)
            yield Box.of((*prefix, start, *(0,) * len(rest)), (*(1,) * len(prefix), size, *rest))


class Feed:
    """Reads the pieces of regions on several threads, and passes them on in order. The end of its
    `with` block waits for all."""

    def __init__(self, *, is_near: bool, on_bytes: OnBytes = lambda nbytes: None) -> None:
        """`is_near`: the data is in files on this host.

        `on_bytes` is called on this thread with the size of each piece that was passed on. It may
        raise an error to end the work.
        """
        self._threads = _NEAR_THREADS if is_near else _FAR_THREADS
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="reshard-stream")
        self._pending: deque[tuple[Future[None], int]] = deque()
        self._own = threading.local()
        self._lock = threading.Lock()
        self._sources: set[FileSource] = set()
        self._read_bytes = 0
        self.on_bytes = on_bytes

    def add(self, region: Region, use: Callable[[StreamedRows], None]) -> None:
        """Read a region and call `use` with its pieces, in order. Raises the errors of earlier work."""
        for box in region.pieces:
            nbytes = box.numel * region.stored.itemsize
            self.run(partial(self.load, region, box), use, nbytes, is_short=region.is_near and nbytes <= _SMALL_BYTES)

    def run(
        self, first: Callable[[], T], then: Callable[[T], object], nbytes: int = 0, *, is_short: bool = False
    ) -> None:
        """Call `first` on a thread. Once all earlier work is done, call `then` with its result
        there, and later `on_bytes` with `nbytes`.

        Short work is done at once if no other work is pending. Raises the errors of earlier work.
        """
        self._collect(len(self._pending) if len(self._pending) < _QUEUED else _QUEUED // 2)
        if is_short and not self._pending:
            then(first())
            self.on_bytes(nbytes)
            return
        before = self._pending[-1][0] if self._pending else None
        self._pending.append((self._pool.submit(_in_turn, first, then, before), nbytes))

    def finish(self) -> None:
        """Wait for all work. Raises its errors."""
        self._collect(0)

    def _collect(self, most: int) -> None:
        """Wait until at most this many pieces of work are pending."""
        while self._pending and (len(self._pending) > most or self._pending[0][0].done()):
            done, nbytes = self._pending.popleft()
            try:
                done.result()
            finally:
                del done  # it refers to the error
            self.on_bytes(nbytes)

    def load(self, region: Region, box: Box) -> StreamedRows:
        """Read a box of a region, one of its `pieces`. The data is valid until this thread's next call."""
        nbytes, stored = box.numel * region.stored.itemsize, region.stored
        buffer: Array = getattr(self._own, "buffer", np.empty(0, np.uint8))
        if len(buffer) < nbytes:
            buffer = self._own.buffer = np.empty(max(nbytes, min(2 * len(buffer), PIECE_BYTES)), np.uint8)
        buffer = buffer[:nbytes]
        sources = region.read(box, buffer.view(item_dtype(stored.itemsize)).reshape(box.sizes))
        with self._lock:
            self._read_bytes += nbytes
            self._sources |= sources
            done, is_much = self._sources, self._read_bytes >= _RELEASE_BYTES
            if is_much:
                self._read_bytes, self._sources = 0, set()
        for source in done if is_much else ():
            source.release()
        data = memoryview(cast("Any", buffer))  # numpy's types support the buffer protocol from 3.12 on
        digest = None if region.digest is None else region.digest(data)
        return StreamedRows(box, data, stored.spec.dtype, digest)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self._pool.shutdown(cancel_futures=True)
            self._pending.clear()  # they refer to the error
            for source in self._sources:
                source.release()


def _in_turn(first: Callable[[], T], then: Callable[[T], object], before: Future[None] | None) -> None:
    """Run one piece of work of a feed, in order. Earlier work was started before, so this thread
    does not wait forever."""
    found = first()
    try:
        if before is not None:
            before.result()
    finally:
        del before  # it may refer to an error
    then(found)


def _narrow(window: Window) -> Iterator[Box]:
    """Yield compact parts of the window, because mapped pages between distant elements would count
    as memory."""
    span = window.stop - window.offset
    dims = [d for d, n in enumerate(window.sizes) if n > 1]
    whole = Box.full(window.sizes)
    if span <= PIECE_BYTES or window.is_contiguous or not dims:
        yield whole
        return
    far = max(dims, key=lambda d: window.strides[d])
    step = max(1, PIECE_BYTES // max(window.strides[far], 1))
    for start in range(0, window.sizes[far], step):
        yield whole.cut(far, start, min(start + step, window.sizes[far]))


# What the writers of all formats share: they plan files, stream each from stored tensors, and
# publish all at the end.


@dataclass(frozen=True)
class FilePart:
    """A box of a tensor in a file."""

    spec: TensorSpec
    box: Box

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.box.numel * self.spec.itemsize


@dataclass(frozen=True)
class FilePlan:
    """A file of the target and its parts, in order."""

    name: str
    parts: tuple[FilePart, ...]
    rank: int = 0
    """The rank that owns the file."""

    @property
    def nbytes(self) -> int:
        """Total bytes of its parts."""
        return sum(part.nbytes for part in self.parts)


class WrittenFile(msgspec.Struct, frozen=True):
    """A completely and durably written file."""

    name: str
    """The name under which it was written. It may be renamed when all files are complete."""
    nbytes: int
    digest: str
    """XXH3-128 of the file, in hex."""
    facts: dict[str, Any] = {}
    """What `finish` needs to know about it."""


@dataclass(frozen=True)
class Target:
    """Where and how a writer writes."""

    name: str
    """The last component of the path of the file or folder."""
    job_id: str
    """ID in hex. Names of unfinished files contain it, so that other jobs do not take the files for
    their own."""
    max_shard_bytes: int
    onto: StateLayout | None
    """Write the files of the ranks of this layout. None: write files with at most `max_shard_bytes`
    of tensors."""


@dataclass(frozen=True)
class Publication:
    """Makes a finished conversion visible to readers."""

    storage: Storage
    done: Mapping[str, WrittenFile]
    """Written files by their name in the plan."""
    check: Callable[[], None]
    """Raises if another process has taken over the work. Called before each step, because this
    process may be paused between any two."""
    left: Collection[str]
    """Temporary objects of dead processes, from before this conversion."""

    def publish(self, name: str, data: bytes) -> None:
        """Store a small object, replacing an older one, and remove leftovers of earlier tries."""
        self.storage.publish_while(name, data, self.check)
        for other in self.left:
            if other.rpartition(".~")[0] == name:
                self.storage.delete(other)

    def retract(self, name: str) -> None:
        """Delete an object so that no crash restores it."""
        self.check()
        self.storage.retract(name)

    def name_files(self) -> None:
        """Rename the files to their names in the plan."""
        for name, written in self.done.items():
            if written.name != name:
                self.check()
                self.storage.commit(written.name, name)


class FormatWriter(ABC):
    """Writes one state in one format: a plan of files that can be written independently of each
    other.

        writer = SafetensorsWriter(contents, Target(name, job_id))
        done = {file.name: writer.write(storage, file, on_bytes) for file in writer.files}
        writer.finish(Publication(storage, done, check))    # before that, there is no checkpoint
    """

    files: tuple[FilePlan, ...]
    left_out: tuple[str, ...]
    """Keys that the format cannot store, or that have no canonical name."""
    refused: dict[str, str]
    """Objects that cannot be written, by key, and the reasons. Users must omit them on purpose."""
    changed_classes: dict[str, tuple[str, str]]
    """By key: containers whose class the format does not record, with that class and the one that
    readers get."""

    def __init__(self, contents: Contents, target: Target) -> None:
        self.contents = contents
        self.job_id = target.job_id
        self.left_out = contents.left_out
        self.refused, self.changed_classes = {}, {}
        self._prints: dict[str, Partial] = {}
        self._small: list[tuple[TensorSpec, torch.Tensor, Box]] = []

    def claimed(self, storage: Storage) -> AbstractContextManager[None]:
        """Return a context manager that shows other processes that the files are in use."""
        return nullcontext()

    @abstractmethod
    def write(self, storage: Storage, file: FilePlan, on_bytes: OnBytes) -> WrittenFile:
        """Write one file durably, with bounded memory."""

    @abstractmethod
    def finish(self, out: Publication) -> None:
        """Publish the checkpoint."""

    @abstractmethod
    def occupied(self, names: Listing) -> str | None:
        """Return the name of a file that shows that a checkpoint already exists, or None."""

    def ambiguous(self, storage: Storage, names: Listing) -> str | None:
        """Return a file of `names` that would remain and make the new checkpoint ambiguous, or None."""
        return None

    def whole(self, name: str) -> FilePart:
        """Return the full tensor as a part of a file."""
        spec = self.stored(name).spec
        return FilePart(spec, Box.full(spec.shape))

    def region(self, part: FilePart) -> Region:
        """Return the source region of a part."""
        return Region(self.stored(part.spec.fqn), part.box)

    @property
    def takes_fingerprints(self) -> bool:
        """True if fingerprints of the written data are computed, to compare them with those of the source."""
        return bool(self.contents.fingerprints)

    def feed(self, file: FilePlan, on_bytes: OnBytes) -> Feed:
        """Return a feed for the parts of a file."""
        self._prints, self._small = {}, []
        return Feed(is_near=any(self.region(part).is_near for part in file.parts[:1]), on_bytes=on_bytes)

    def seen(self, region: Region, piece: StreamedRows) -> None:
        """Add a piece to the fingerprints, if they are computed. Called in order."""
        if self.takes_fingerprints:
            self._take_sum(region, piece)

    def _take_sum(self, region: Region, piece: StreamedRows) -> None:
        """Add a large piece to the fingerprints at once. Collect small ones, and add many together."""
        tensor, is_small = piece.tensor(), len(piece.data) <= _SMALL_BYTES
        self._small.append((region.stored.spec, tensor.clone() if is_small else tensor, piece.box))
        if not is_small or len(self._small) >= _SUMMED_TOGETHER:
            self._sum_up()

    def _sum_up(self) -> None:
        small, self._small = self._small, []
        found = partials((tensor, box, spec.shape) for spec, tensor, box in small)
        for (spec, _, _), one in zip(small, found, strict=True):
            self._prints[spec.fqn] = self._prints[spec.fqn] + one if spec.fqn in self._prints else one

    def done(self, name: str, digest: str, nbytes: int, facts: Mapping[str, Any]) -> WrittenFile:
        """Return the record of a file that was written from `feed`, with its contribution to fingerprints."""
        self._sum_up()
        prints = {fqn: part.to_bytes().hex() for fqn, part in self._prints.items()}
        return WrittenFile(name, nbytes, digest, {**facts, "prints": prints} if prints else dict(facts))

    def compare_fingerprints(self, done: Mapping[str, WrittenFile]) -> None:
        """Raise CorruptCheckpointError if the written data does not have the source's fingerprints."""
        totals = fingerprint_parts(done.values())
        saved = self.contents.fingerprints or {}
        for fqn in self.names:
            spec, expected = self.stored(fqn).spec, saved.get(fqn)
            if expected is None:
                continue
            found = totals.get(fqn, Partial()).digest(spec.dtype, spec.shape)
            if comparable(expected, found) and expected != found:
                raise CorruptCheckpointError(
                    f"tensor {fqn!r}: what was written has the fingerprint {found}, but the source was saved with "
                    f"{expected}: its bytes or its manifest were changed. Nothing was published"
                )

    def stored(self, name: str) -> StoredTensor:
        """Return the stored tensor of a name or alias."""
        found = self.contents.find(name)
        assert found is not None
        return found

    @property
    def names(self) -> list[str]:
        """Names of the stored tensors, without aliases."""
        return [name for name in self.contents.tensors if name not in self.contents.aliases]

    @property
    def total_bytes(self) -> int:
        """Total bytes of the tensors in all files."""
        return sum(file.nbytes for file in self.files)


def fingerprint_parts(done: Iterable[WrittenFile]) -> dict[str, Partial]:
    """Return the sum of the files' contributions to each tensor's fingerprint, by FQN."""
    totals: dict[str, Partial] = {}
    for file in done:
        for fqn, data in file.facts.get("prints", {}).items():
            part = Partial.from_bytes(bytes.fromhex(data))
            totals[fqn] = totals[fqn] + part if fqn in totals else part
    return totals


class HashingWriter:
    """Writes a new file in order, from literal bytes and elements of regions, and computes its
    digest. Small parts are written together. If the storage supports it, the threads that read
    large parts write them in parallel."""

    def __init__(self, out: Writer, feed: Feed, seen: Callable[[Region, StreamedRows], None]) -> None:
        """`seen` is called with each piece, in order."""
        self.nbytes = 0
        """Total size of the parts that were passed so far."""
        self._out, self._feed, self._seen = out, feed, seen
        self._state = xxhash.xxh3_128()
        self._small: list[Callable[[], Any]] = []
        """Parts to be written together, because a call to the storage costs more than copying them."""
        self._small_bytes = 0

    def write(self, data: Any) -> None:
        """Append a contiguous bytes-like object, which must not change until `digest` returns."""
        nbytes = memoryview(data).nbytes
        self.write_later(nbytes, lambda: data)
        if nbytes > _SMALL_BYTES:  # do not keep many large objects in memory
            self._feed.finish()

    def write_later(self, nbytes: int, make: Callable[[], Any]) -> None:
        """Append the bytes that `make` returns. It is called once everything before was read."""
        self.nbytes += nbytes
        self._small_bytes += nbytes
        self._small.append(make)
        if self._small_bytes > _SMALL_BYTES:
            self._flush()

    def copy(self, region: Region, use: Callable[[StreamedRows], object] = lambda piece: None) -> None:
        """Append the elements of a region, row-major. `use` is called with its pieces, in order."""
        for box in region.pieces:
            nbytes = box.numel * region.stored.itemsize
            if region.is_near and nbytes <= _SMALL_BYTES:  # a switch between threads costs more than a small read
                piece = self._feed.load(region, box)
                piece = replace(piece, data=memoryview(bytearray(piece.data)))
                self.write_later(nbytes, partial(self._used, region, piece, use))
                self._feed.on_bytes(nbytes)
            else:
                self._flush()
                self.nbytes += nbytes
                place = self._out.reserve(nbytes)
                then = partial(self._pass_on, region, use, place is not None)
                self._feed.run(partial(self._load, region, box, place), then, nbytes)

    def digest(self) -> str:
        """Wait until all parts are written, and return the digest of all bytes, in hex."""
        self._flush()
        self._feed.finish()
        return str(self._state.hexdigest())

    def _used(self, region: Region, piece: StreamedRows, use: Callable[[StreamedRows], object]) -> memoryview:
        self._seen(region, piece)
        use(piece)
        return piece.data

    def _load(self, region: Region, box: Box, place: Callable[[memoryview], None] | None) -> StreamedRows:
        piece = self._feed.load(region, box)
        if place is not None:
            place(piece.data)
        return piece

    def _pass_on(
        self, region: Region, use: Callable[[StreamedRows], object], is_written: bool, piece: StreamedRows
    ) -> None:
        data = self._used(region, piece, use)
        if not is_written:
            self._out.write(data)
        self._state.update(data)

    def _flush(self) -> None:
        if self._small:
            place = self._out.reserve(self._small_bytes) or self._out.write
            self._feed.run(list, partial(self._write_together, self._small, place), is_short=True)
            self._small, self._small_bytes = [], 0

    def _write_together(self, parts: list[Callable[[], Any]], place: Callable[[memoryview], None], _: object) -> None:
        for data in [parts[0]()] if len(parts) == 1 else [b"".join(make() for make in parts)]:
            place(memoryview(data).cast("B"))
            self._state.update(data)


class HashedFilesWriter(FormatWriter):
    """Writes each file from front to end, and computes its digest at the same time."""

    @abstractmethod
    def put(self, file: FilePlan, out: HashingWriter) -> Mapping[str, Any]:
        """Write the contents of one file. Return what `finish` needs to know about it."""

    def first_name(self, storage: Storage, file: FilePlan) -> str:
        """Return the name under which a file is written. It is renamed when all files are done."""
        return storage.temporary(file.name, self.job_id)

    def write(self, storage: Storage, file: FilePlan, on_bytes: OnBytes) -> WrittenFile:
        """Stream one file."""
        name = self.first_name(storage, file)
        storage.delete(name)
        with storage.create(name) as raw, self.feed(file, on_bytes) as feed:
            out = HashingWriter(raw, feed, self.seen)
            facts = self.put(file, out)
            done = out.digest(), out.nbytes
        return self.done(name, *done, facts)


def grouped(things: Iterable[S], max_bytes: int) -> list[list[S]]:
    """Return tensors, or parts of them, in order, in groups of at most `max_bytes`. A larger item
    is a group by itself."""
    return list(batches(things, lambda thing: thing.nbytes, max_bytes)) or [[]]


def spread(specs: Sequence[TensorSpec], target: Target) -> SavePlan:
    """Return the plan of which rank writes what: the ranks of `onto`, or else one "rank" per group
    of full tensors of limited size."""
    if target.onto is not None:
        return plan_writes(target.onto)
    layouts = {}
    for rank, group in enumerate(grouped(specs, target.max_shard_bytes)):
        mesh = Mesh({"file": 1}, ranks=[rank])
        layouts.update({spec.fqn: TensorLayout(spec, mesh, [Replicate()]) for spec in group})
    return plan_writes(StateLayout({spec.fqn: layouts[spec.fqn] for spec in specs}))
