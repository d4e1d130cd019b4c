"""Files of `torch.save`, one or several with an index: what was saved, and where the bytes of tensors are."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import PurePath
from typing import Any

import torch

from planners.geometry.box import Box, Shape
from planners.geometry.layout import TensorSpec
from planners.units import format_count, format_some
from reshard.errors import CorruptCheckpointError, FormatError, KeyMismatchError
from reshard.formats.format import Format, at_top, check_index, indexes_in, not_opened, read_index
from reshard.formats.torch_save.archive import ZIP_MAGIC, TorchArchive, make_place
from reshard.formats.torch_save.pickles import StorageRef, TensorRef, load_pickle_at, plain
from reshard.live.dtypes import dtype_name
from reshard.live.plain_data import UNSUPPORTED_TENSORS
from reshard.live.tree import Flat, flatten
from reshard.state import KeyPath
from reshard.storage.base import Listing, Storage
from reshard.stored.checksums import CRC_OF_RECORDS
from reshard.stored.contents import NO_FACTS, Contents, ContentsBuilder, Facts, Record, has_dcp, merge
from reshard.stored.source import Files, Source
from reshard.stored.tensor import Extent, StoredChunk, StoredTensor, read_place

# The older form (before torch 1.6) is a sequence of five things:
#
#     pickle: magic number | pickle: protocol | pickle: sys info | pickle: what was saved | pickle: keys of storages
#     and then for each key: 8 bytes: number of elements, and the elements


_MAGIC = 0x1950A86A20F9469CFC6C
_MAGIC_PICKLE = b"\x80\x02\x8a\x0a" + _MAGIC.to_bytes(10, "little") + b"."
_PROTOCOL = 1001
_FIRST_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class TorchFile:
    """The contents of a file, with a `TensorRef` for each tensor, and a function that finds the
    bytes of one."""

    source: Source
    value: Any
    place: Callable[[TensorRef], Extent]
    sums: Mapping[str, int] = field(default_factory=dict)
    """CRC-32 of each record of an archive, by name."""

    @property
    def entries(self) -> dict[Any, Any]:
        """The value if it is a dict, else an empty dict."""
        return self.value if isinstance(self.value, dict) else {}

    def crc(self, ref: TensorRef) -> int | None:
        """Return the CRC-32 that was written with a tensor's storage, or None if there is none."""
        return self.sums.get(f"data/{ref.storage.key}") or None

    def read(self, ref: TensorRef) -> Any:
        """Read a tensor of the file."""
        return read_place(self.place(ref), ref.dtype)

    def plain(self, value: Any) -> Any:
        """Return a part of the file's value as plain data. Its tensors are read."""
        return plain(value, self.read)


FilesOfRanks = Mapping[int, TorchFile]
"""The file of each rank."""


def looks_like_torch_file(head: bytes) -> bool:
    """Return True if a file that begins with these 20 bytes may be one of `torch.save`, or a plain pickle."""
    return head.startswith((ZIP_MAGIC, b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"))


_UNREADABLE: dict[str, Any] = {}
"""The value of a damaged file."""


def read_torch_file(source: Source, *, numbered: bool = True, others: Collection[str] = ()) -> TorchFile:
    """Read the contents of a file, without its tensors. For a damaged file that is only listed as
    lost, returns an empty dict.

    `numbered`: numbers in the file's name identify its contents. `others`: names, without suffix,
    of files with other contents.

    Raises:
        CorruptCheckpointError: the file is truncated, or is another file under this name.
        FormatError: not a file of `torch.save`.
        UnsafeDataError: its pickle names something that could run code.
    """
    try:
        return _read_torch_file(source, numbered, others)
    except CorruptCheckpointError as error:
        source.refuse(error)
        return TorchFile(source, _UNREADABLE, partial(_nowhere, source))


def _read_torch_file(source: Source, numbered: bool, others: Collection[str]) -> TorchFile:
    head = bytes(source.read(0, min(len(_MAGIC_PICKLE), source.nbytes)))
    if head.startswith(ZIP_MAGIC):
        archive = TorchArchive(source)
        now, before = (re.split(r"0*(\d+)", name) for name in (PurePath(source.label).stem, archive.folder))
        is_other = archive.folder in others or (numbered and now[::2] == before[::2])  # another number
        if now != before and is_other:
            raise CorruptCheckpointError(
                f"{source.label}: torch.save wrote it as {archive.folder}. If it was renamed, rename it back; "
                "otherwise, restore it from a copy"
            )
        return TorchFile(source, archive.value(), archive.place, archive.sums)
    if head == _MAGIC_PICKLE:
        return _read_stream(source)
    if looks_like_torch_file(head):
        value, end = _pickles(source, 1)
        _check_end(source, "its pickle", end)
        return TorchFile(source, value[0], partial(_nowhere, source))
    if not head:
        raise CorruptCheckpointError(f"{source.label} is empty: restore it, or load another checkpoint")
    raise FormatError(
        f"{source.label} is not a checkpoint in a known format: no file of torch.save begins with {head[:8]!r}"
    )


def _check_end(source: Source, what: str, end: int) -> None:
    if end != source.nbytes:
        raise CorruptCheckpointError(
            f"{source.label}: more bytes follow {what}, which ends at byte {end}: it is damaged, or holds several"
        )


def _nowhere(source: Source, ref: TensorRef) -> Extent:
    raise CorruptCheckpointError(
        f"{source.label}: a plain pickle that refers to the storage {ref.storage.key!r} of a tensor"
    )


def _pickles(source: Source, count: int, seen: list[StorageRef] | None = None) -> tuple[list[Any], int]:
    """Return the first pickles of a file, and where they end. Without a view of the file,
    increasing parts of it are read."""
    length = min(_FIRST_READ_BYTES, source.nbytes) if source.view() is None else source.nbytes
    while True:
        data = source.read(0, length)
        try:
            values, at = [], 0
            for _ in range(count):
                value, at = load_pickle_at(data, at, where=source.label, seen=seen)
                values.append(value)
            return values, at
        except CorruptCheckpointError:
            if length == source.nbytes:
                raise
            length = min(length * 4, source.nbytes)


def _read_stream(source: Source) -> TorchFile:
    seen: list[StorageRef] = []
    (_, protocol, info, value, keys), at = _pickles(source, 5, seen)
    if protocol != _PROTOCOL or not isinstance(info, dict) or not isinstance(keys, list):
        raise CorruptCheckpointError(f"{source.label}: a stream of torch.save of the unknown version {protocol!r:.40}")
    if info.get("little_endian") is not True:
        raise FormatError(f"{source.label}: written on a big-endian machine, which is not supported")
    storages = {ref.key: ref for ref in seen}
    starts: dict[str, int] = {}
    for key in keys:
        if key not in storages:
            raise CorruptCheckpointError(f"{source.label}: it lists a storage {key!r:.40} that nothing refers to")
        storage = storages[key]
        numel = int.from_bytes(bytes(source.read(at, 8)), "little")
        if numel != storage.numel:
            raise CorruptCheckpointError(
                f"{source.label}: storage {key!r} has {numel} elements at byte {at}, its reference says {storage.numel}"
            )
        starts[key] = at + 8
        at += 8 + storage.nbytes
        source.check(starts[key], at)
    _check_end(source, "what was saved", at)
    return TorchFile(source, value, partial(_place_in_stream, source, starts))


def _place_in_stream(source: Source, starts: Mapping[str, int], ref: TensorRef) -> Extent:
    if ref.storage.key not in starts:
        raise CorruptCheckpointError(f"{source.label}: the storage {ref.storage.key!r} of a tensor is not in the file")
    return make_place(source, ref, starts[ref.storage.key])


def flat_leaves(file: TorchFile, prefix: KeyPath = ()) -> Flat:
    """Take the file's value apart: into tensors, and the largest parts that contain neither tensors
    nor dicts.

    Raises FormatError if two have the same dotted key.
    """
    memo: dict[int, bool] = {}
    try:
        flat = flatten(file.value, is_leaf=lambda value: _is_leaf(value, memo))
    except KeyMismatchError as error:
        raise FormatError(f"{file.source.label}: {error}") from None
    except RecursionError:
        raise CorruptCheckpointError(f"{file.source.label}: nested too deeply") from None
    return Flat({prefix + k: v for k, v in flat.leaves.items()}, {prefix + k: v for k, v in flat.containers.items()})


def _is_leaf(value: Any, memo: dict[int, bool]) -> bool:
    """Return True if a container is kept as one value: it is empty, or a sequence of plain values,
    such as `betas`."""
    if isinstance(value, dict):
        return not value
    if type(value) not in (list, tuple):
        return False
    if id(value) not in memo:
        memo[id(value)] = True  # in case a list contains itself
        memo[id(value)] = all(
            not isinstance(item, (dict, TensorRef, Record))
            and (type(item) not in (list, tuple) or _is_leaf(item, memo))
            for item in value
        )
    return memo[id(value)]


def stored_tensor(key: str, file: TorchFile, ref: TensorRef, owner: int | str = 0) -> StoredTensor:
    """Return a full tensor of a file as a stored tensor of one chunk."""
    chunk = StoredChunk(Box.full(ref.size), lambda: file.place(ref), owner)
    return StoredTensor(TensorSpec(key, ref.size, ref.dtype), (chunk,))


def contents_of(name: str, files: Mapping[KeyPath, TorchFile], facts: Facts = NO_FACTS) -> Contents:
    """Return the contents of files that are each complete. The keys of each file get a prefix.

    Raises FormatError for a file that is a pickled module or other object rather than a state.
    """
    found = ContentsBuilder(", ".join(file.source.label for file in files.values()))
    unknown: dict[str, list[str]] = {}  # class -> keys of objects that stay records
    for prefix, file in files.items():
        if isinstance(file.value, Record):
            raise FormatError(
                f"{file.source.label}: it is a pickled object of {file.value.path}, not a state: an object can only be "
                "loaded by running its code. Load it with its own program and save its state_dict() instead"
            )
        flat = flat_leaves(file, prefix)
        found.containers.update(flat.containers)
        seen: dict[TensorRef, str] = {}
        for path, leaf in flat.leaves.items() if file.value is not _UNREADABLE else ():
            key = found.claim(path)
            if isinstance(leaf, TensorRef):
                found.add_tensor(key, partial(stored_tensor, key, file, leaf))
                first = seen.setdefault(leaf, key)
                if first != key and 0 not in leaf.size:
                    found.aliases[key] = first
            else:
                found.add_object(key, partial(file.plain, leaf))
                if isinstance(leaf, Record) and isinstance(file.plain(leaf), Record):
                    unknown.setdefault(leaf.path, []).append(key)
    warnings = tuple(_unreadable(path, keys) for path, keys in unknown.items())
    return found.build(name, facts, warnings=warnings)


def open_file(name: str, source: Source, *, numbered: bool = False) -> Contents:
    """Return the contents of one file, in the format `name`. Raises what `read_torch_file` and
    `contents_of` raise."""
    return contents_of(name, {(): read_torch_file(source, numbered=numbered)})


def _unreadable(path: str, keys: list[str]) -> str:
    if path in UNSUPPORTED_TENSORS:
        return f"{format_some([*map(repr, keys)], 3)} cannot be read: {UNSUPPORTED_TENSORS[path]}"
    count = format_count(len(keys), "object")
    return f"{count} of {path}, whose class is not known here, can only be read as plain data: {keys[0]!r}"


# Files of `torch.save`: one file, or Hugging Face's older `pytorch_model-*.bin` with an index.


_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".th", ".tar")
_INDEX = ".bin.index.json"
_ONE_OF_SEVERAL = re.compile(r"-\d+-of-(?!0*1\.)\d+\.bin$")


def detect(storage: Storage, names: Listing) -> bool:
    """Return True if top-level files have suffixes of torch.save. A single file is also recognized
    by its first bytes."""
    if at_top(names, _SUFFIXES) or indexes_in(names, _INDEX):
        return True
    if len(names) != 1 or has_dcp(names):  # leftover DCP files are a damaged DCP checkpoint
        return False
    ((only, nbytes),) = names.items()
    return "/" not in only and looks_like_torch_file(bytes(storage.read(only, 0, min(nbytes, 20))))


def open(files: Files) -> Contents:
    """Return the checkpoint in the only file, or in the files of the index.

    Raises FormatError if there are several files and no index.
    """
    storage, names = files.storage, files.listed
    if (indexed := read_index(files, _INDEX)) is not None:
        return _open_indexed(*indexed)
    found = [n for n in names if "/" not in n and (n.endswith(_SUFFIXES) or len(names) == 1)]
    if len(found) > 1:
        raise FormatError(
            f"{storage.url} holds {len(found)} files of torch.save and no index that lists them: "
            f"{format_some(sorted(found))}; open one by its path"
        )
    opened = open_file("torch_save", files[found[0]])
    if not _ONE_OF_SEVERAL.search(found[0]):
        return opened
    said = f"{found[0]} is one of several files, and the others were not opened"
    return replace(opened, warnings=(*opened.warnings, said))


def _open_indexed(files: Files, label: str, weight_map: Mapping[str, str]) -> Contents:
    """Open files by an index, which may list the outermost keys of a nest."""
    held: dict[str, str] = {}
    parts = []
    for file in sorted({*weight_map.values()}):
        part = open_file("torch_save", files[file])
        parts.append(("", part))
        for key in (*part.tensors, *part.objects):
            held[key if key in weight_map else str((part.path_of(key) or (key,))[0])] = file
    check_index(files, label, weight_map, held)
    merged = merge("torch_save", parts)
    return replace(merged, warnings=(*merged.warnings, *not_opened(files, weight_map.values(), "*-of-*.bin")))


def stored_or_plain(key: str, value: Any, file: TorchFile, rank: int = 0) -> Any:
    """Return a part of a rank's file: the stored tensor, or plain data."""
    return stored_tensor(key, file, value, rank) if isinstance(value, TensorRef) else file.plain(value)


def stored_values(key: str, values: Mapping[Any, Any], file: TorchFile, rank: int = 0) -> dict[str, Any]:
    """Return `stored_or_plain` for each value, such as a parameter's states."""
    return {str(name): stored_or_plain(f"{key}.{name}", value, file, rank) for name, value in values.items()}


def saved_groups(saved: Mapping[str, Any], file: TorchFile) -> list[dict[str, Any]]:
    """Return the param groups of an optimizer's own state dict, as plain data."""
    return [dict(file.plain(group)) for group in saved.get("param_groups", ())]


# ShardedTensors in pickles: each rank's file has the rank's shards and their positions. Together,
# they are the full tensor.


def is_sharded_tensor(value: object) -> bool:
    """Return True if a value of a pickle is a ShardedTensor."""
    return isinstance(value, Record) and value.name == "ShardedTensor"


def join_sharded(name: str, values: Mapping[int, Any], files: FilesOfRanks) -> StoredTensor:
    """Join a ShardedTensor from the records in the files of all ranks.

    Raises CorruptCheckpointError if the records are malformed or contradict each other.
    """
    specs: set[tuple[Shape, str]] = set()
    chunks: dict[Box, StoredChunk] = {}
    for rank, value in sorted(values.items()):
        label = files[rank].source.label
        if not is_sharded_tensor(value):
            raise CorruptCheckpointError(f"{label}: {name!r} is not a ShardedTensor there, as it is on other ranks")
        try:
            locals_, metadata = value.state[0], value.state[1].fields
            shape = tuple(map(int, metadata["size"]))
            specs.add((shape, _dtype(metadata["tensor_properties"])))
            for shard in locals_:
                ref, at = shard.fields["tensor"], shard.fields["metadata"].fields
                box = Box(at["shard_offsets"], at["shard_sizes"])
                if not isinstance(ref, TensorRef):
                    raise TypeError("a shard without a tensor")
                if ref.size != box.sizes:
                    raise CorruptCheckpointError(
                        f"{label}: a shard of {name!r} has shape {list(ref.size)}, but its metadata says {box}"
                    )
                inside = Box.full(shape) & box  # a flat parameter's last shard may be padded
                if inside is not None:
                    whole = stored_tensor(name, files[rank], ref, rank).chunks[0].shift(box.offsets)
                    chunks[inside] = whole.crop(inside)
        except CorruptCheckpointError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise CorruptCheckpointError(f"{label}: the ShardedTensor {name!r} is malformed: {error}") from None
    if len(specs) != 1:
        raise CorruptCheckpointError(f"{name!r}: the ranks disagree about its shape or dtype: {sorted(specs)}")
    shape, dtype = specs.pop()
    return StoredTensor(TensorSpec(name, shape, dtype), tuple(chunks.values()))


def sharded_ranks(name: str, record: Record, file: TorchFile) -> list[int]:
    """Return the ranks with shards of a ShardedTensor, according to one rank's record.

    Raises CorruptCheckpointError if the record is malformed.
    """
    try:
        placed = [shard.fields["placement"].fields["_rank"] for shard in record.state[1].fields["shards_metadata"]]
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise CorruptCheckpointError(f"{file.source.label}: the ShardedTensor {name!r} is malformed: {error}") from None
    return sorted({rank for rank in placed if type(rank) is int})


def _dtype(properties: Any) -> str:
    value = properties.state[0] if isinstance(properties.state, tuple) else properties.fields["dtype"]
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{value!r:.40} is not a dtype")
    return dtype_name(value)


FORMAT = Format(
    "torch_save",
    checksums=CRC_OF_RECORDS,
    detect=detect,
    open=open,
)
