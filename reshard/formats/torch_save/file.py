"""A file of `torch.save`: what was saved, and where the bytes of its tensors are. Zip archives, and the older stream.

The older form (before torch 1.6) is five things in a row:

    pickle: magic number | pickle: protocol | pickle: sys info | pickle: what was saved | pickle: keys of storages
    and then for each key: 8 bytes: number of elements, and the elements
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from planners.geometry.box import Box
from planners.geometry.layout import TensorSpec
from reshard.errors import DamagedCheckpointError, FormatError, KeyMismatchError
from reshard.formats.pickles.reader import load_pickle_at
from reshard.formats.pickles.record import Record
from reshard.formats.pickles.torch_objects import StorageRef, TensorRef, plain
from reshard.formats.stored.contents import Contents, Facts, LazyMapping
from reshard.formats.stored.copying import read_place
from reshard.formats.stored.source import Source
from reshard.formats.stored.tensor import Place, StoredChunk, StoredTensor
from reshard.formats.torch_save.zip_archive import ZIP_MAGIC, TorchArchive, make_place
from reshard.state.tree import Flat, KeyPath, flatten, key_of

__all__ = ["TorchFile", "contents_of", "flat_leaves", "looks_like_torch_file", "read_torch_file", "stored_tensor"]

_MAGIC = 0x1950A86A20F9469CFC6C
_MAGIC_PICKLE = b"\x80\x02\x8a\x0a" + _MAGIC.to_bytes(10, "little") + b"."
_PROTOCOL = 1001
_FIRST_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class TorchFile:
    """What a file holds, with a `TensorRef` for each tensor, and a function that finds the bytes of one."""

    source: Source
    value: Any
    place: Callable[[TensorRef], Place]

    def read(self, ref: TensorRef) -> Any:
        """A tensor of the file, read."""
        return read_place(self.place(ref), ref.dtype)

    def plain(self, value: Any) -> Any:
        """A part of the file's value as plain data; tensors in it are read."""
        return plain(value, self.read)


def looks_like_torch_file(head: bytes) -> bool:
    """Whether a file that begins so (20 bytes) may be one of `torch.save`, or a plain pickle."""
    return head.startswith((ZIP_MAGIC, _MAGIC_PICKLE)) or head[:2] in (
        b"\x80\x02",
        b"\x80\x03",
        b"\x80\x04",
        b"\x80\x05",
    )


def read_torch_file(source: Source, allow: Callable[[str], bool] | None = None) -> TorchFile:
    """Read what a file holds, without its tensors.

    Raises:
        DamagedCheckpointError: it is cut short or not what it seems.
        FormatError: it is no file of `torch.save`.
        UnsafeDataError: its pickle asks for something that could run code.
    """
    head = bytes(source.read(0, min(len(_MAGIC_PICKLE), source.nbytes)))
    if head.startswith(ZIP_MAGIC):
        archive = TorchArchive(source)
        return TorchFile(source, archive.value(allow), archive.place)
    if head == _MAGIC_PICKLE:
        return _read_stream(source, allow)
    if looks_like_torch_file(head):
        value, _ = _pickles(source, 0, 1, allow)
        return TorchFile(source, value[0], partial(_nowhere, source))
    raise FormatError(f"{source.label}: it begins with {head[:8]!r}, which no file of torch.save does")


def _nowhere(source: Source, ref: TensorRef) -> Place:
    raise DamagedCheckpointError(
        f"{source.label}: a plain pickle that refers to the storage {ref.storage.key!r} of a tensor"
    )


def _pickles(
    source: Source, start: int, count: int, allow: Callable[[str], bool] | None, seen: list[StorageRef] | None = None
) -> tuple[list[Any], int]:
    """Several pickles in a row, and where they end. Without a view of the file, more and more of it is read."""
    view = source.view()
    length = source.nbytes if view is not None else min(_FIRST_READ_BYTES, source.nbytes)
    while True:
        data = source.read(0, length)
        try:
            values, at = [], start
            for _ in range(count):
                value, at = load_pickle_at(data, at, where=source.label, allow=allow, seen=seen)
                values.append(value)
            return values, at
        except DamagedCheckpointError:
            if length == source.nbytes:
                raise
            length = min(length * 4, source.nbytes)


def _read_stream(source: Source, allow: Callable[[str], bool] | None) -> TorchFile:
    seen: list[StorageRef] = []
    (_, protocol, info, value, keys), at = _pickles(source, 0, 5, allow, seen)
    if protocol != _PROTOCOL or not isinstance(info, dict) or not isinstance(keys, list):
        raise DamagedCheckpointError(f"{source.label}: a stream of torch.save of the unknown version {protocol!r:.40}")
    if info.get("little_endian") is not True:
        raise FormatError(f"{source.label}: written on a big-endian machine, which is not supported")
    storages = {ref.key: ref for ref in seen}
    starts: dict[str, int] = {}
    for key in keys:
        if key not in storages:
            raise DamagedCheckpointError(f"{source.label}: it lists a storage {key!r:.40} that nothing refers to")
        storage = storages[key]
        numel = int.from_bytes(bytes(source.read(at, 8)), "little")
        if numel != storage.numel:
            raise DamagedCheckpointError(
                f"{source.label}: storage {key!r} has {numel} elements at byte {at}, its reference says {storage.numel}"
            )
        starts[key] = at + 8
        at += 8 + storage.nbytes
        source.check(starts[key], at)
    return TorchFile(source, value, partial(_place_in_stream, source, starts))


def _place_in_stream(source: Source, starts: Mapping[str, int], ref: TensorRef) -> Place:
    if ref.storage.key not in starts:
        raise DamagedCheckpointError(f"{source.label}: the storage {ref.storage.key!r} of a tensor is not in the file")
    return make_place(source, ref, starts[ref.storage.key])


def flat_leaves(file: TorchFile, prefix: KeyPath = ()) -> Flat:
    """The file's value taken apart: tensors, and the largest parts that hold neither tensors nor dicts.

    Raises FormatError if two have the same dotted key.
    """
    memo: dict[int, bool] = {}
    try:
        flat = flatten(file.value, is_leaf=lambda value: _is_leaf(value, memo))
    except KeyMismatchError as error:
        raise FormatError(f"{file.source.label}: {error}") from None
    except RecursionError:
        raise DamagedCheckpointError(f"{file.source.label}: nested too deeply to be data") from None
    return Flat({prefix + k: v for k, v in flat.leaves.items()}, {prefix + k: v for k, v in flat.containers.items()})


def _is_leaf(value: Any, memo: dict[int, bool]) -> bool:
    """Whether a container is a value of its own: an empty one, or a sequence of plain values, such as `betas`."""
    if isinstance(value, dict):
        return not value
    if type(value) not in (list, tuple):
        return False
    if id(value) not in memo:
        memo[id(value)] = True  # for a list that contains itself
        memo[id(value)] = all(
            not isinstance(item, (dict, TensorRef, Record))
            and (type(item) not in (list, tuple) or _is_leaf(item, memo))
            for item in value
        )
    return memo[id(value)]


def stored_tensor(key: str, file: TorchFile, ref: TensorRef, owner: int | str = 0) -> StoredTensor:
    """A whole tensor of a file as a stored tensor of one chunk."""
    chunk = StoredChunk(Box.full(ref.size), lambda: file.place(ref), owner)
    return StoredTensor(TensorSpec(key, ref.size, ref.dtype), (chunk,))


@dataclass
class _Parts:
    tensors: dict[str, Callable[[], StoredTensor]] = field(default_factory=dict)
    objects: dict[str, Callable[[], Any]] = field(default_factory=dict)
    paths: dict[str, KeyPath] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, list[str]] = field(default_factory=dict)
    """Keys of the objects that stay records, by class."""

    def warnings(self) -> tuple[str, ...]:
        """One text for each unknown class."""
        return tuple(
            f"{len(keys)} objects of {path}, which is not known here, stay records, such as {keys[0]!r}"
            for path, keys in self.unknown.items()
        )


def contents_of(name: str, files: Mapping[KeyPath, TorchFile], facts: Facts | None = None) -> Contents:
    """The contents of files that are whole each; the keys of each get a prefix.

    Raises FormatError for a file that is a pickled module or other object rather than a state.
    """
    parts = _Parts()
    containers: dict[KeyPath, str] = {}
    for prefix, file in files.items():
        if isinstance(file.value, Record):
            raise FormatError(
                f"{file.source.label}: it is a pickled object of {file.value.path}, not a state: an object can only be "
                "loaded by running its code. Load it with its own program and save its state_dict() instead"
            )
        flat = flat_leaves(file, prefix)
        containers.update(flat.containers)
        _add(parts, file, flat)
    return Contents(
        name, LazyMapping(parts.tensors), LazyMapping(parts.objects), parts.aliases, parts.paths, facts,
        warnings=parts.warnings(), containers=containers,
    )  # fmt: skip


def _add(parts: _Parts, file: TorchFile, flat: Flat) -> None:
    seen: dict[TensorRef, str] = {}
    for path, leaf in flat.leaves.items():
        key = key_of(path) or "tensor"
        if key in parts.paths:
            raise FormatError(f"{file.source.label}: the key {key!r} occurs twice")
        parts.paths[key] = path
        if isinstance(leaf, TensorRef):
            parts.tensors[key] = partial(stored_tensor, key, file, leaf)
            first = seen.setdefault(leaf, key)
            if first != key and 0 not in leaf.size:
                parts.aliases[key] = first
        else:
            parts.objects[key] = partial(file.plain, leaf)
            if isinstance(leaf, Record) and isinstance(file.plain(leaf), Record):
                parts.unknown.setdefault(leaf.path, []).append(key)
