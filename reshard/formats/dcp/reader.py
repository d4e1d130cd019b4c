"""Checkpoints of torch.distributed.checkpoint: a pickle `.metadata` and `__<rank>_<n>.distcp` files
of items.

`.metadata` lists the boxes of each tensor and the byte range of each item. An item is an archive of
`torch.save` (`torch_save.zip_archive`), perhaps compressed, or the complete file is a safetensors
file. Only archives that are read are opened, and their contents are compared with `.metadata`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from planners.errors import PlanError
from planners.geometry.box import Box, Shape
from planners.geometry.layout import ITEM_SIZES, TensorSpec
from planners.units import format_count
from reshard.errors import RESTORE, CorruptCheckpointError, FormatError, ReshardError, framework
from reshard.formats.format import Format, as_shape, check_apart, missing_files
from reshard.formats.torch_save.archive import ZIP_MAGIC, TorchArchive, locate_item, read_head
from reshard.formats.torch_save.pickles import load_pickle, plain
from reshard.formats.torch_save.reader import TorchFile
from reshard.live.dtypes import dtype_from_name, dtype_name
from reshard.state import KeyPath, key_of
from reshard.storage.base import Listing, Storage
from reshard.stored.checksums import CRC_OF_RECORDS
from reshard.stored.contents import (
    DATA_FILE,
    RANK_METADATA,
    Contents,
    Facts,
    LazyMapping,
    Record,
    has_dcp,
    is_record_type,
)
from reshard.stored.safetensors_header import Header, find_header
from reshard.stored.source import DecodedSource, Files, FileSource, Source
from reshard.stored.tensor import Extent, StoredChunk, StoredTensor


def detect(storage: Storage, names: Listing) -> bool:
    """Return True if the top folder is a DCP checkpoint."""
    return has_dcp(names)


def open(files: Files) -> Contents:
    """Return the checkpoint in the top folder. Raises CorruptCheckpointError, naming the file."""
    return open_folder(files, "")


@dataclass
class DcpIndex:
    """The contents of all `.metadata` files of a checkpoint."""

    tensors: dict[str, list[Record]] = field(default_factory=dict)
    objects: dict[str, None] = field(default_factory=dict)
    items: dict[str, dict[Shape | None, Item]] = field(default_factory=dict)
    """Key -> offsets of a chunk, or None for an object -> where it is stored."""
    paths: dict[str, KeyPath] = field(default_factory=dict)
    save_id: str | None = None
    version: str | None = None
    """Version of torch's planner."""
    mcore_data: Any = None
    """What Megatron-core puts into `.metadata`: how tensors were reshaped before they were saved."""


@dataclass(frozen=True)
class DcpFacts(Facts):
    """What a DCP checkpoint records besides its contents."""

    object_file: Callable[[str], TorchFile]
    """Returns the item of an object, by its key, as a file of `torch.save`. Does not read its tensors."""
    index: DcpIndex


def open_folder(files: Files, folder: str, undo: Undo | None = None) -> Contents:
    """Return the checkpoint in `folder`, which is "" or ends with "/". `undo`: see `_Items`.

    Raises:
        CorruptCheckpointError: there is no `.metadata` (the save did not finish), it is unreadable,
            or a file that it names is missing or too short.
        UnsafeDataError: `.metadata` names something that could run code.
    """
    storage, names = files.storage, files.listed
    found = [folder + ".metadata"] if folder + ".metadata" in names else []
    by_rank = sorted(n for n in names if n.startswith(folder) and RANK_METADATA.fullmatch(n[len(folder) :]))
    if not found and not by_rank:
        raise CorruptCheckpointError(
            f"{storage.url}/{folder}: there are .distcp files, but no .metadata, which is written last: the save did "
            "not finish, or the file was not copied"
        )
    if not found:
        _check_ranks(files, folder)
    index = DcpIndex()
    for file in found or by_rank:
        source = files[file]
        _add(index, _metadata(source.read(0, source.nbytes), source.label), source.label)
    needed = _check_files(index, files, folder)
    items = _Items(index, files, folder, undo)
    tensors: dict[str, Callable[[], StoredTensor]] = {
        key: partial(_tensor, key, metas, index.items.get(key, {}), items) for key, metas in index.tensors.items()
    }
    objects: dict[str, Callable[[], Any]] = {key: partial(items.object, key) for key in index.objects}
    facts = DcpFacts(items.file, index)
    named = tuple(files[name] for name in (*(found or by_rank), *needed))  # other files are from an unfinished save
    older = "beside .metadata was not read: one of them is of an older save"
    warnings = tuple(f"{file} {older}" for file in by_rank[:1] if found)
    return Contents(
        LazyMapping(tensors), LazyMapping(objects), index.paths, _empty_dicts(index.paths.values()),
        format="dcp", facts=facts, keys_are_text=True, files=named, warnings=warnings,
    )  # fmt: skip


def _empty_dicts(paths: Iterable[KeyPath]) -> dict[KeyPath, str]:
    """Return empty dicts, which torch omits: without those in lists, the items after them would move up."""
    seen = {(path[:i], part) for path in paths for i, part in enumerate(path) if type(part) is int}
    stops = dict(sorted(seen, key=lambda at: at[1]))
    every = ((path, i) for path, stop in stops.items() for i in range(min(stop, _MAX_GAP)))
    return {(*path, i): "dict" for path, i in every if (path, i) not in seen}


_MAX_GAP = 1000
"""The maximum number of missing items before an item of a list, because a file may claim any number."""


def _metadata(data: bytes | memoryview, where: str) -> dict[str, Any]:
    """Return the fields of a pickled `Metadata`, or of a derived class."""
    try:
        value = load_pickle(data, where=where)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{error}: {RESTORE}") from None
    if not isinstance(value, Record) or not isinstance(value.fields.get("state_dict_metadata"), dict):
        raise CorruptCheckpointError(f"{where}: expected torch.distributed.checkpoint's Metadata, found {value!r:.120}")
    if not isinstance(value.fields.get("storage_data"), dict):
        raise CorruptCheckpointError(f"{where}: it does not say where anything is stored")
    return value.fields


def _add(index: DcpIndex, fields: Mapping[str, Any], where: str) -> None:
    """Merge one metadata file into the index."""
    try:
        for key, meta in fields["state_dict_metadata"].items():
            if meta.name == "BytesStorageMetadata":
                index.objects[str(key)] = None
            else:
                index.tensors.setdefault(str(key), []).append(meta)
        written: set[object] = set()
        for at, info in fields["storage_data"].items():
            at, info = _said(at), _said(info)
            offset = None if at.get("offset") is None else as_shape(at["offset"])
            start, length = as_shape((info["offset"], info["length"]))
            descriptors = info.get("transform_descriptors")
            transforms = tuple(map(str, descriptors)) if descriptors else ()
            item = Item(str(info["relative_path"]), start, length, transforms)
            if (at["fqn"], offset) in written:
                raise ValueError(f"it stores {at['fqn']!r} twice")
            written.add((at["fqn"], offset))
            index.items.setdefault(str(at["fqn"]), {}).setdefault(offset, item)
        for key, path in (fields.get("planner_data") or {}).items():
            index.paths[str(key)] = tuple([part if type(part) is int else str(part) for part in path])
            if key_of(index.paths[str(key)]) != str(key):
                raise ValueError(f"it places {key!r} at {path!r}")
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{where}: the metadata is malformed: {type(error).__name__}: {error}; expected what torch writes"
        ) from None
    index.mcore_data = fields.get("mcore_data", index.mcore_data)
    if isinstance(meta := fields.get("storage_meta"), Record) and isinstance(meta.fields.get("save_id"), str):
        index.save_id = meta.fields["save_id"]
    if isinstance(version := fields.get("version"), str):
        index.version = version


def _check_ranks(files: Files, folder: str) -> None:
    """Refuse a checkpoint without a rank's metadata, by the numbers of all files. If all files of
    the last ranks are missing, this is not noticed."""
    files.checking.leave_number_open()
    inner = [name[len(folder) :] for name in files.listed if name.startswith(folder)]
    have = {int(match[1]) for match in map(RANK_METADATA.fullmatch, inner) if match}
    count = max(have | {int(match[1]) for match in map(DATA_FILE.fullmatch, inner) if match}) + 1
    if lost := count - len(have):
        first = next(rank for rank in range(count) if rank not in have)
        what = f"{lost} of {count} files __<rank>.metadata are missing, the first is __{first}.metadata"
        files.checking.refuse(CorruptCheckpointError(f"{files.storage.url}/{folder}: {what}: {RESTORE}"))


def _said(record: Record) -> Mapping[str, Any]:
    """Return the record's fields: usually its state itself, without a copy, because each tensor has
    several records."""
    return record.state if type(record.state) is dict else record.fields


def _check_files(index: DcpIndex, files: Files, folder: str) -> list[str]:
    """Return the existing files. Refuses the checkpoint if a file is missing, or ends before an item does."""
    names, where = files.listed, f"{files.storage.url}/{folder}"
    known = {*index.tensors, *index.objects}
    if stray := sorted(index.items.keys() - known):
        raise CorruptCheckpointError(
            f"{where}.metadata says where {stray[0]!r} is stored, but not what it is: {RESTORE}"
        )
    needed: dict[str, dict[str, int]] = {}
    places: dict[str, list[tuple[str, int, int, str]]] = {}
    for key, items in index.items.items():
        for item in items.values():
            held = needed.setdefault(item.file, {})
            held[key] = max(held.get(key, 0), item.stop)
            place = (item.file, item.offset, item.stop, key)
            places.setdefault(item.file, []).append(place)
    # tied tensors share an item; if a name has another's item by mistake, its own has no name
    once = {file: {place[1:3]: place for place in held} for file, held in places.items()}
    sizes = {file: sum(stop - start for start, stop in found) for file, found in once.items()}
    are_full = all(size >= names.get(folder + file, 0) for file, size in sizes.items())
    for file, held_there in places.items():
        try:
            check_apart(where, once[file].values() if are_full else held_there)
        except CorruptCheckpointError:
            # if a file has a header, DCP's offsets are meaningless
            source = files[folder + file] if folder + file in names else None
            if source is None or find_header(source) is None:
                raise
    missing = sorted(file for file in needed if folder + file not in names)
    if missing:
        files.checking.refuse(missing_files(where, ".metadata", len(needed), missing, [*needed[missing[0]]]))
    found = {file: names[folder + file] for file in needed if folder + file in names}
    for file, nbytes in found.items():
        if lost := {key: stop for key, stop in needed[file].items() if stop > nbytes}:
            key, stop = next(iter(lost.items()))
            files[folder + file].refuse(CorruptCheckpointError(
                f"{where}{file}: truncated: it has {nbytes} bytes, too few for {format_count(len(lost), 'name')}, "
                f"such as {key!r}, which ends at byte {stop}: restore it, or load another checkpoint"
            ))  # fmt: skip
    return sorted(folder + file for file in found)


def _tensor(key: str, metas: list[Record], stored: Mapping[Shape | None, Item], items: _Items) -> StoredTensor:
    """Return a tensor from its metadata: one record, or one record per rank if ranks wrote their own."""
    try:
        spec = _spec(key, metas[0])
        boxes = [
            Box(as_shape(chunk.fields["offsets"]), as_shape(chunk.fields["sizes"]))
            for meta in metas
            for chunk in meta.fields["chunks"]
        ]
        if any(_spec(key, meta) != spec for meta in metas[1:]):
            raise CorruptCheckpointError(f"tensor {key!r}: the ranks' metadata disagree about its shape or dtype")
    except (AttributeError, KeyError, TypeError, ValueError, PlanError) as error:
        if isinstance(error, CorruptCheckpointError | FormatError):
            raise
        raise CorruptCheckpointError(f"tensor {key!r}: its entry in .metadata is malformed: {error}") from None
    chunks = []
    for box in dict.fromkeys(boxes):  # replicas on several ranks are one chunk
        item = stored.get(box.offsets)
        if item is None:
            raise CorruptCheckpointError(f"tensor {key!r}: .metadata does not say where its chunk {box} is stored")
        match = DATA_FILE.fullmatch(item.file.rpartition("/")[2])
        owner = int(match[1]) if match else item.file
        chunks.append(StoredChunk(box, partial(items.locate, spec, box, item), owner))
    return StoredTensor(spec, tuple(chunks))


def _spec(key: str, meta: Record) -> TensorSpec:
    properties = meta.fields["properties"]
    # torch pickles the properties as a tuple that begins with the dtype, other writers as a dict
    dtype = properties.state[0] if isinstance(properties.state, tuple) else properties.fields["dtype"]
    return TensorSpec(key, as_shape(meta.fields["size"]), _dtype_named(dtype))


def _dtype_named(dtype: Any) -> str:
    """Return the name of a dtype, even if this torch lacks it: only reads of the tensor need it."""
    if isinstance(dtype, torch.dtype):
        return dtype_name(dtype)
    path = dtype.path if is_record_type(dtype) else ""
    name = path.removeprefix("torch.")
    if name == path or name not in ITEM_SIZES:
        raise ValueError(f"{dtype!r:.80} is not a dtype")
    return name


# The items of DCP files: the contents of a byte range of a `.distcp` file, and where its elements
# are.


Undo = Callable[[tuple[str, ...], int, bytes], bytes]
"""(descriptors of transforms, in the order in which they are undone; the most bytes of the result;
the bytes of an item) -> the original bytes."""

_MOST_BYTES = 1 << 28
"""The maximum size of an object, or of the data around a tensor, after decompression."""
_PIECE_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class Item:
    """A byte range of a file, and the transforms that were applied to its bytes, the last one first."""

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...]

    @property
    def stop(self) -> int:
        """One past the last byte."""
        return self.offset + self.length


class _Items:
    """Opens the items of one checkpoint."""

    def __init__(self, index: DcpIndex, files: Files, folder: str, undo: Undo | None) -> None:
        """`undo` undoes transforms that the caller knows. Without it, only zstandard is known."""
        self._index, self._files, self._folder, self._undo = index, files, folder, undo
        self._kept = DecodedSource.Kept()
        self._headers: dict[str, Header | None] = {}

    def locate(self, spec: TensorSpec, box: Box, item: Item) -> Extent:
        """Return where the elements of the chunk `box` of a tensor are."""
        try:
            dtype_from_name(spec.dtype)  # raises if this torch lacks the dtype
            place, dtype = self._locate(spec, box, item)
        except ReshardError as error:
            raise type(error)(f"tensor {spec.fqn!r}, chunk {box}: {error}") from None
        if dtype != spec.dtype:
            raise CorruptCheckpointError(
                f"tensor {spec.fqn!r}, chunk {box}: .metadata says {spec.dtype}, but {item.file} holds {dtype} at "
                f"byte {item.offset}; the checkpoint contradicts itself"
            )
        if place.window.sizes != box.sizes:
            raise CorruptCheckpointError(
                f"tensor {spec.fqn!r}, chunk {box}: .metadata says shape {list(box.sizes)}, but {item.file} holds "
                f"{list(place.window.sizes)} at byte {item.offset}; the checkpoint contradicts itself"
            )
        return place

    def object(self, key: str) -> Any:
        """Return a non-tensor item as plain data. Raises CorruptCheckpointError or UnsafeDataError."""
        source, start, length = self._object(key)
        try:
            if bytes(source.read(start, min(4, length))) == ZIP_MAGIC:
                return TorchArchive(source, start, length).object()
            return plain(load_pickle(source.read(start, length), where=source.label))
        except ReshardError as error:
            raise type(error)(f"object {key!r}: {error}") from None

    def file(self, key: str) -> TorchFile:
        """Return a non-tensor item as a file of `torch.save`, whose tensors are not read. Raises
        CorruptCheckpointError."""
        source, start, length = self._object(key)
        archive = TorchArchive(source, start, length)
        return TorchFile(source, archive.value(), archive.place)

    def _object(self, key: str) -> tuple[Source, int, int]:
        item = self._index.items.get(key, {}).get(None)
        if item is None:
            raise CorruptCheckpointError(f"the object {key!r} is in no file of the checkpoint")
        return self._payload(item, _MOST_BYTES)

    def _payload(self, item: Item, most_bytes: int) -> tuple[Source, int, int]:
        """Return the bytes of an item, with transforms undone. If there are more than `most_bytes`,
        the item is damaged."""
        file = self._files[self._folder + item.file]
        if not item.transforms:
            return file, item.offset, item.length
        if len(item.transforms) == 1 and item.transforms[0].startswith("stream.zstd"):
            decode = partial(_unzstd, f"{file.label}, bytes [{item.offset}, {item.stop})", most_bytes)
        elif self._undo is not None:
            decode = partial(self._undo, item.transforms, most_bytes)
        else:
            raise FormatError(
                f"{file.label}: the transforms {list(item.transforms)} are unknown. Known are stream.zstd and the "
                "ones registered in reshard.dcp.FileSystemReader(_extension_registry=...)"
            )
        codec = ", ".join(item.transforms)
        source = DecodedSource(
            f"{file.label} (bytes [{item.offset}, {item.stop}), {codec})",
            lambda: decode(bytes(file.read(item.offset, item.length, elements=True))),
            self._kept,
            (file, item.offset, item.length, codec),
        )
        return source, 0, source.nbytes

    def _locate(self, spec: TensorSpec, box: Box, item: Item) -> tuple[Extent, str]:
        key = spec.fqn
        source, start, length = self._payload(item, _MOST_BYTES + 2 * box.numel * spec.itemsize)
        header = self._headers.get(source.name) if isinstance(source, FileSource) else None
        if header is None:
            head = read_head(source, start, length)
            if not head.startswith(ZIP_MAGIC) and isinstance(source, FileSource):
                header = self._header(source)
            if header is None:
                return locate_item(source, start, length, head)
        place = header.place(key)
        said = header.saved_offsets().get(key)
        if said is not None and tuple(said) != box.offsets:
            # torch keeps one chunk of a key per file, and loses the others
            raise CorruptCheckpointError(
                f"{source.label}: it holds the chunk of {key!r} at {said}, not at {box.offsets}"
            )
        return place, header.entries[key].dtype

    def _header(self, source: FileSource) -> Header | None:
        """Return the header if the complete file begins with one. DCP's offsets are
        meaningless then."""
        if source.name not in self._headers:
            self._headers[source.name] = find_header(source)
        return self._headers[source.name]


def _unzstd(where: str, most_bytes: int, data: bytes) -> bytes:
    with framework("zstandard>=0.22", "these items are compressed with zstd: "):
        import zstandard
    try:
        reader = zstandard.ZstdDecompressor().decompressobj()
        pieces, size = [], 0
        for start in range(0, len(data), _PIECE_BYTES):
            pieces.append(reader.decompress(data[start : start + _PIECE_BYTES]))
            size += len(pieces[-1])
            if size > most_bytes:  # a few bytes can expand to very many
                raise CorruptCheckpointError(f"{where}: more than the {most_bytes} bytes that it may need")
        if not reader.eof:
            raise CorruptCheckpointError(f"{where}: a zstd item is truncated")
        return b"".join(pieces)
    except zstandard.ZstdError as error:
        raise CorruptCheckpointError(f"{where}: a zstd item is damaged: {error}") from None


FORMAT = Format(
    "dcp",
    checksums=CRC_OF_RECORDS,
    detect=detect,
    open=open,
    records_ranks=True,
)
