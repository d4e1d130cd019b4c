"""Reads the native format. The layouts determine which file contains which region."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import xxhash
from msgspec import UNSET

from planners.errors import PlanError
from planners.geometry.box import Box, Range, Shape
from planners.geometry.byte_ranges import Window
from planners.geometry.layout import TensorLayout, TensorSpec, state_from_json
from planners.plans.save import SavePlan
from reshard.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, FormatError
from reshard.live.plain_data import decode_plain
from reshard.native.manifest import (
    GENERATION,
    MANIFEST,
    FileRecord,
    FileTable,
    Manifest,
    PartsRecord,
    entry_key,
    published,
    read_manifest,
    without_claim,
)
from reshard.state import key_of, path_from_json
from reshard.storage.base import Storage
from reshard.stored.checksums import EVERY_BLOCK, BlockChecksums
from reshard.stored.contents import Contents, Facts, LazyMapping, PlainValues
from reshard.stored.source import Files, FileSource
from reshard.stored.tensor import Extent, LazyChunks, StoredChunk, StoredTensor

name = "native"
checksums = EVERY_BLOCK


T = TypeVar("T")


class Share(NamedTuple):
    """One of `of` parts of equal size."""

    number: int
    of: int

    def among(self, things: Collection[T]) -> Iterator[T]:
        """Return the consecutive items of this part."""
        start, stop = (len(things) * number // self.of for number in (self.number, self.number + 1))
        return islice(things, start, stop)


ALL = Share(0, 1)
_MAX_HEADER_BYTES = 1 << 30
"""A larger value in a manifest is damage."""
_MOST_NAMES, _MOST_PLACES = 3, 16
"""How many tensors an error names, and the most byte ranges in which it looks for them."""


def detect(storage: Storage, names: Mapping[str, int]) -> bool:
    """Return True if there is a native manifest, or native data whose manifest is damaged or missing."""
    if any(GENERATION.match(name) for name in names):
        return True
    if MANIFEST not in names:
        return False
    head = storage.read(MANIFEST, 0, min(names[MANIFEST], 64))
    return head.lstrip().startswith(b'{"reshard"') and b'"checkpoint"' in head


def is_replaced(native: NativeFacts) -> bool:
    """Return True if the checkpoint was replaced or removed since it was opened."""
    try:
        return published(native.storage) != native.manifest.save_id
    except CheckpointError:
        return False


def open(files: Files) -> Contents:
    """Open the checkpoint from its manifest alone: see `look_for_files`.

    Raises CheckpointNotFoundError if no save was finished here. Raises CorruptCheckpointError if
    the manifest is lost or contradicts itself.
    """
    storage, names = files.storage, files.listed
    if MANIFEST not in names:
        if left := without_claim(names):
            raise CorruptCheckpointError(
                f"there is no {MANIFEST} in {storage.url}: it was lost or not copied: "
                f"{left[-1]} is from a finished save. Restore it, or load another checkpoint"
            )
        raise CheckpointNotFoundError(
            f"there is no {MANIFEST} in {storage.url}: a save was killed before it was complete, or is still running"
        )
    manifest: Manifest = read_manifest(storage)
    try:
        layout = state_from_json(manifest.layout)
        plan = SavePlan(layout, manifest.divide_above_bytes)
        paths = {key: path_from_json(path) for key, path in manifest.paths.items()}
        objects = PlainValues({key: decode_plain(data) for key, data in manifest.objects.items()})
        objects.per_rank = manifest.per_rank
    except (PlanError, FormatError) as error:
        raise CorruptCheckpointError(f"{storage.url}/{MANIFEST} contradicts itself: {error}") from error
    if other := [key for key, path in paths.items() if key_of(path) != key]:
        raise CorruptCheckpointError(
            f"{storage.url}/{MANIFEST} contradicts itself: it places {other[0]!r} at {key_of(paths[other[0]])!r}"
        )
    hidden = {row["tensor"] for rows in manifest.per_rank.values() for row in rows.values() if "tensor" in row}
    if absent := [*(hidden - set(layout)), *(name for name in manifest.aliases.values() if name not in layout)]:
        raise CorruptCheckpointError(
            f"{storage.url}/{MANIFEST} contradicts itself: it names {absent[0]!r} without describing it"
        )
    facts = NativeFacts(files, manifest, plan)
    return Contents(
        LazyMapping({fqn: partial(facts.tensor, fqn) for fqn in layout if fqn not in hidden}),
        objects,
        paths,
        {path_from_json(path): kind for path, kind in manifest.containers},
        manifest.aliases,
        LazyMapping({key: partial(facts.values_of_ranks, rows) for key, rows in manifest.per_rank.items()}),
        format=name,
        facts=facts,
        fingerprints=manifest.fingerprints or None,
        subset=None if manifest.subset is None else tuple(manifest.subset),
    )


def look_for_files(
    native: NativeFacts,
    names: Mapping[str, int],
    refuse: Callable[[CorruptCheckpointError], None],
    share: Share = ALL,
    check: bool = True,
) -> None:
    """Check that data files and their checksums exist with the lengths in the manifest.

    Without `check`, files may have other lengths.

    Args:
        names: listed names with their sizes. If only the top level was listed, folders end with
            "/".
        refuse: called with an error that names the file.
    """
    storage, is_listed = native.storage, not any(name.endswith("/") for name in names)
    if not is_listed and share == ALL:
        names, is_listed = storage.list(), True
    for file, nbytes in _lengths(native, share):
        try:
            found = names.get(file) if is_listed else storage.size(file)
        except CheckpointNotFoundError:
            found = None
        if found != nbytes and (found is None or check):
            refuse(native.naming_tensors(_of_wrong_length(storage, file, nbytes, found)))
        check_inside(storage, file)


def _lengths(native: NativeFacts, share: Share) -> Iterator[tuple[str, int]]:
    """Yield names and expected sizes of a share of the files beside the manifest. The share is
    contiguous, so its rows in a table are, too."""
    manifest = native.manifest
    if manifest.table is not UNSET and share.number == 0:
        yield manifest.table.name, manifest.table.nbytes
    for name in share.among(native.files):
        record = native.files[name]
        yield record.name, record.nbytes
        yield f"{record.name}.sums", 8 * -(-record.nbytes // record.block_bytes_or(manifest.block_bytes))
    for table in share.among(manifest.tables.values()):
        yield table.name, table.nbytes


def check_inside(storage: Storage, file: str) -> None:
    """Raise CorruptCheckpointError if the file is a link to outside the checkpoint's folder."""
    if storage.is_link_outside(file):
        raise CorruptCheckpointError(
            f"{storage.url}: {file} is a link to outside the checkpoint's folder, and such links are not "
            "followed. Copy the checkpoint together with the targets of its links (cp -rL), and open the copy"
        )


def _of_wrong_length(storage: Storage, file: str, nbytes: int, found: int | None) -> CorruptCheckpointError:
    what = "is missing" if found is None else f"has {found} of its {nbytes} bytes"
    error = CorruptCheckpointError(f"{storage.url}: {file} {what}: restore it, or load another checkpoint")
    error.places = ((file, min(found or 0, nbytes), max(found or 0, nbytes)),)
    return error


@dataclass(eq=False)
class Once(Generic[T]):
    """Calls a function once per name and keeps the result, also if several threads ask at once.
    Errors are not kept."""

    _make: Callable[[str], T]
    _made: dict[str, T] = field(default_factory=dict)
    _locks: dict[str, threading.Lock] = field(default_factory=dict)

    def __call__(self, name: str) -> T:
        if name not in self._made:
            with self._locks.setdefault(name, threading.Lock()):
                if name not in self._made:
                    self._made[name] = self._make(name)
        return self._made[name]


class NativeFacts(Facts):
    """What a load needs of a native checkpoint besides its contents: data files, headers,
    checksums, and tables of parts. Each is read when first needed."""

    def __init__(self, sources: Files, manifest: Manifest, plan: SavePlan) -> None:
        self.storage, self.manifest, self.plan = sources.storage, manifest, plan
        linked = () if manifest.linked is UNSET else manifest.linked
        self.files: Mapping[str, FileRecord]
        """All data files, by name."""
        self._file_of: Callable[[int], FileRecord | None]
        """Returns the file with the arrays of a rank, or None."""
        if manifest.table is UNSET:
            by_rank = {int(rank): record for rank, record in manifest.files.items()}
            self.files = {record.name: record for record in (*by_rank.values(), *linked)}
            self._file_of = by_rank.get
        else:
            self.files = table = FileTable(self.storage, manifest.table, linked)
            self._file_of = table.of_rank
        # these refer to no method of `self`: a reference cycle would keep files mapped until the
        # garbage is collected
        storage, files, size = self.storage, self.files, manifest.block_bytes
        self.sums = Once(
            lambda file: _unchanged(
                storage,
                f"{file}.sums",
                8 * -(-files[file].nbytes // files[file].block_bytes_or(size)),
                files[file].sums,
            )
        )
        """Returns the verified block checksums of a file."""
        self.source = Once(partial(_source, sources, files, self.sums, size))
        """Returns the data file of a name."""
        self._headers = Once(partial(_header, self.source, files))
        self._tables = LazyMapping({int(r): partial(read_parts, storage, t) for r, t in manifest.tables.items()})
        self.is_checked = sources.checking.enabled

    def prefetch(self, ranks: Iterable[int]) -> None:
        """Read the headers of the files of these ranks, and their checksums if they are to be
        compared. Reads many at a time, so that later calls need not wait for each."""
        names = {record.name for record in map(self._file_of, ranks) if record is not None}
        kinds: list[Callable[[str], object]] = [self._headers, *([self.sums] if self.is_checked else [])]
        with ThreadPoolExecutor(self.storage.requests, thread_name_prefix="reshard-read") as pool:
            pending = deque(pool.submit(read, name) for name in sorted(names) for read in kinds)
            while pending:
                pending.popleft().result()  # not in a variable: this frame must not keep an error

    def block_bytes(self, file: str) -> int:
        """Return the bytes per checksum of a data file."""
        return self.files[file].block_bytes_or(self.manifest.block_bytes)

    def uncompared(self, file: str) -> BlockChecksums:
        """Return the checksums of a data file, with no block compared yet."""
        return BlockChecksums(self.files[file].nbytes, self.block_bytes(file), partial(self.sums, file))

    def tensor(self, fqn: str) -> StoredTensor:
        """Return a tensor of the layout. Its chunks are located when needed."""
        layout = self.plan.layout[fqn]
        return StoredTensor(layout.spec, _Arrays(self, layout), layout)

    def values_of_ranks(self, rows: Mapping[str, Any]) -> dict[int, Any]:
        """Return the values of a key, tensors or plain objects, by rank."""
        return {
            int(rank): self.tensor(row["tensor"]) if "tensor" in row else decode_plain(row.get("object"))
            for rank, row in rows.items()
        }

    def parts_near(self, fqn: str, box: Box) -> Iterator[ArrayPart]:
        """Yield the parts of a tensor that overlap a box, each with its file and array."""
        spec = self.plan.layout[fqn].spec
        for rank, found in self.plan.writers_near(fqn, box):
            for part in self.parts(spec, rank, found):
                if part.box & box is None:
                    continue
                if part.file:
                    yield part
                    continue
                source, start, _ = self._find(spec, rank, part)
                yield ArrayPart(part.box, part.box, source.name, start)

    def naming_tensors(self, error: CorruptCheckpointError) -> CorruptCheckpointError:
        """Add the tensors in missing or changed bytes to an error, as far as the files' headers show."""
        found = {key: place for at in error.places[:_MOST_PLACES] for key, place in self.arrays_at(*at).items()}
        words = [f"{key!r} (bytes [{start}, {stop}))" for key, (start, stop) in islice(found.items(), _MOST_NAMES)]
        if words:
            more = f", and {len(found) - len(words)} more" if len(found) > len(words) else ""
            error.args = (f"{error}. Tensors there: {', '.join(words)}{more}",)
        return error

    def arrays_at(self, file: str, first: int, last: int) -> dict[str, Range]:
        """Return the tensors with bytes in [first, last) of a file, and their byte ranges, if the
        header is readable."""
        record, found = self.files.get(file), {}
        if record is not None:
            with suppress(CheckpointError):  # a missing or damaged header yields no names
                for key, entry in _read_offsets(FileSource(self.storage, file), record.header_bytes).items():
                    start, stop = (record.header_bytes + offset for offset in entry.data_offsets or (0, 0))
                    if start < last and first < stop and entry.data_offsets:
                        found[key if key in self.plan.layout else key.rpartition("#")[0]] = start, stop
        return found

    def parts(self, spec: TensorSpec, rank: int, box: Box) -> Sequence[ArrayPart]:
        """Return the parts of an array of a rank. Usually, it is one part in the rank's own file."""
        if not self.manifest.tables or rank not in self._tables:
            return (ArrayPart(box, box),)
        return self._tables[rank].get(entry_key(spec, box)) or (ArrayPart(box, box),)

    def locate(self, spec: TensorSpec, rank: int, part: ArrayPart) -> Extent:
        size, box = spec.itemsize, part.box
        source, start, stop = self._find(spec, rank, part)
        if part.file:
            window = Window.row_major(start, part.array.sizes, size)
            return Extent(source, window.crop(box.relative_to(part.array)))
        if stop - start != box.numel * size:
            raise CorruptCheckpointError(
                f"{source.label}: {entry_key(spec, box)!r} has {stop - start} bytes, but {box} of {size}-byte "
                f"elements is {box.numel * size}"
            )
        return Extent(source, Window.row_major(start, box.sizes, size))

    def _find(self, spec: TensorSpec, rank: int, part: ArrayPart) -> tuple[FileSource, int, int]:
        """Return the file, first byte, and one past the last byte of the array that contains a part."""
        if part.file:  # a file of an earlier save
            record, what = self.files.get(part.file), str(part.box)
            if record is None:
                raise CorruptCheckpointError(f"the manifest does not name {part.file}, which must hold {what}")
            source = self.source(record.name)
            start, stop = part.start, part.start + part.array.numel * spec.itemsize
        else:
            record, what = self._file_of(rank), entry_key(spec, part.box)
            if record is None:
                raise CorruptCheckpointError(f"the manifest names no file of rank {rank}, which must hold {what!r}")
            source = self.source(record.name)
            entry = self._headers(record.name).get(what)
            if entry is None or entry.data_offsets is None:
                raise CorruptCheckpointError(f"{source.label} must hold {what!r}, but its header does not name it")
            start, stop = map(record.header_bytes.__add__, entry.data_offsets)
        end = record.nbytes if source.checking.enabled else source.nbytes
        if not record.header_bytes <= start <= stop <= end:
            raise CorruptCheckpointError(f"{source.label}: {what!r} is outside the file, at bytes [{start}, {stop})")
        return source, start, stop


@dataclass(eq=False, slots=True)
class _Arrays(LazyChunks):
    """The chunks of a tensor, according to the save plan and the ranks' tables of parts."""

    _facts: NativeFacts
    _layout: TensorLayout
    _made: dict[Box, StoredChunk] = field(default_factory=dict)

    @property
    def geometry(self) -> Hashable:
        # an earlier save may have sharded its data differently
        return None if self._facts.manifest.tables else self._layout.geometry_key

    def near(self, box: Box) -> Iterable[StoredChunk]:
        writers = self._facts.plan.writers_near(self._layout.spec.fqn, box)
        return [chunk for rank, region in writers for chunk in self._at(rank, region)]

    def every(self) -> Iterator[StoredChunk]:
        for _, chunk in self._layout.chunks():
            for rank, box in self._facts.plan.writers(self._layout.spec.fqn, chunk):
                if chunk.contains(box):
                    yield from self._at(rank, box)

    def _at(self, rank: int, box: Box) -> Iterator[StoredChunk]:
        spec, facts, made = self._layout.spec, self._facts, self._made
        for part in facts.parts(spec, rank, box):
            if (chunk := made.get(part.box)) is None:
                chunk = made[part.box] = StoredChunk(part.box, partial(facts.locate, spec, rank, part), rank)
            yield chunk


def _source(
    sources: Files, records: Mapping[str, FileRecord], sums: Callable[[str], bytes], block_bytes: int, file: str
) -> FileSource:
    """Return a data file whose reads are all compared with its checksums."""
    record, source = records[file], sources[file]
    source.checksums = BlockChecksums(record.nbytes, record.block_bytes_or(block_bytes), partial(sums, file))
    return source


def _header(source_of: Callable[[str], FileSource], records: Mapping[str, FileRecord], file: str) -> dict[str, _Place]:
    record, source = records[file], source_of(file)
    if (found := source.nbytes) != record.nbytes and source.checking.enabled:
        # another rank may have checked for this file
        raise _of_wrong_length(source.storage, file, record.nbytes, found)
    check_inside(source.storage, file)
    return _read_offsets(source, record.header_bytes)


class _Place(msgspec.Struct):
    """Where the data of a tensor begin and end, counted from the end of the header. None for the
    metadata entry."""

    data_offsets: Range | None = None


def _read_offsets(source: FileSource, header_bytes: int) -> dict[str, _Place]:
    """Return the entries of a header whose length the manifest gives. Reads nothing else.

    Raises CorruptCheckpointError if the header is invalid.
    """
    if not 8 <= header_bytes <= min(source.nbytes, _MAX_HEADER_BYTES):
        raise CorruptCheckpointError(f"{source.label}: a header of {header_bytes} bytes does not fit the file")
    data = bytes(source.read(0, header_bytes))
    if int.from_bytes(data[:8], "little") != header_bytes - 8:
        raise CorruptCheckpointError(f"{source.label}: its header does not have the length that the manifest says")
    try:
        return msgspec.json.decode(data[8:], type=dict[str, _Place])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{source.label}: its header is damaged: {error}") from None


def _unchanged(storage: Storage, file: str, nbytes: int, digest: str) -> bytes:
    """Read a small file. Raises CorruptCheckpointError unless it has this length and digest."""
    try:
        data = storage.read(file)
    except CheckpointNotFoundError as error:
        raise _of_wrong_length(storage, file, nbytes, None) from error
    if len(data) != nbytes:
        raise _of_wrong_length(storage, file, nbytes, len(data))
    if xxhash.xxh3_128_hexdigest(data) != digest:
        raise CorruptCheckpointError(
            f"{storage.url}: {file} was changed since it was written: restore it, or load another checkpoint"
        )
    return data


# Parts: if a rank did not write all of an array, because a file of an earlier save contains some of
# it, they say where each part is.
#
#     what rank 3 holds of "w"         00003.parts
#     +-----------+
#     |  rows 0:4 |  unchanged         from-<save id>-00003.safetensors, an array that begins at byte 512
#     |-----------|
#     |  rows 4:6 |  changed           its own file, under "w#4:6,0:8"
#     +-----------+
#
# The earlier save's file is linked (in object stores, copied) into this checkpoint's folder. So no
# file refers to another folder, and this checkpoint stays complete whatever happens to the earlier.


class ArrayPart(NamedTuple):
    """Where some elements of a tensor are stored."""

    box: Box
    """The box of the tensor, in global coordinates."""
    array: Box
    """The box of the array in the file, which contains `box`."""
    file: str = ""
    """Path relative to the checkpoint's folder. Empty: the rank's own file, which stores `box` as one array."""
    start: int = 0
    """First byte of the array in that file."""


class _Row(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    box: tuple[Shape, Shape]
    """Offsets and sizes."""
    file: int = -1
    start: int = 0
    array: tuple[Shape, Shape] | None = None
    """None if it equals `box`."""


class _PartTable(msgspec.Struct, forbid_unknown_fields=True):
    files: list[str]
    arrays: dict[str, list[_Row]]


def write_parts(storage: Storage, name: str, arrays: Mapping[str, Sequence[ArrayPart]]) -> PartsRecord:
    """Store a rank's table of parts. Its keys are those that the arrays would have in a data file."""
    files = dict.fromkeys(part.file for parts in arrays.values() for part in parts if part.file)
    numbers = {"": -1, **{file: i for i, file in enumerate(files)}}
    table = _PartTable(list(files), {key: [_row(part, numbers) for part in parts] for key, parts in arrays.items()})
    data = msgspec.msgpack.encode(table)
    with storage.create(name) as out:
        out.write(data)
    return PartsRecord(name, len(data), xxhash.xxh3_128_hexdigest(data))


def read_parts(storage: Storage, record: PartsRecord) -> dict[str, list[ArrayPart]]:
    """Read a table that `write_parts` stored. Raises CorruptCheckpointError if it is damaged."""
    data = _unchanged(storage, record.name, record.nbytes, record.digest)
    try:
        table = msgspec.msgpack.decode(data, type=_PartTable)
        return {key: [_part(row, table.files) for row in rows] for key, rows in table.arrays.items()}
    except (msgspec.MsgspecError, PlanError, ValueError, IndexError, RecursionError) as error:
        raise CorruptCheckpointError(f"{storage.url}: {record.name} is malformed: {error}") from None


def _row(part: ArrayPart, numbers: Mapping[str, int]) -> _Row:
    array = None if part.array == part.box else (part.array.offsets, part.array.sizes)
    return _Row((part.box.offsets, part.box.sizes), numbers[part.file], part.start, array)


def _part(row: _Row, files: Sequence[str]) -> ArrayPart:
    box = Box(*row.box)
    if row.file < 0:
        return ArrayPart(box, box)
    return ArrayPart(box, box if row.array is None else Box(*row.array), files[row.file], row.start)


# Compares byte ranges of data files with their checksums, even if they were compared before.


def compare_ranges(facts: NativeFacts, spans: Mapping[FileSource, Sequence[Range]]) -> int:
    """Compare all blocks that overlap these ranges of data files. Returns the number of bytes in
    those blocks.

    Raises CorruptCheckpointError, which names the first file and byte range whose checksum differs.
    """
    compared = 0
    for source, ranges in spans.items():
        if source.name not in facts.files:
            continue
        fresh = FileSource(source.storage, source.name)
        sums = fresh.checksums = facts.uncompared(source.name)
        blocks = sums.pending_among(ranges)
        fresh.compare_blocks(blocks)
        compared += sum(stop - start for start, stop in blocks)
    return compared
