"""Snapshots of torchsnapshot: one manifest of all ranks, and files of raw elements or of `torch.save`.

    .snapshot_metadata           {"world_size": 2, "manifest": {"0/model/weight": {...}, "1/model/weight": ...}}
    replicated/model/weight_0    values that are equal on all ranks, stored once
    sharded/model/weight_0_0     boxes of sharded tensors
    0/progress/steps             values of rank 0 only
    batched/<id>                 several small tensors in one file

The manifest is JSON, or YAML if an early version wrote it. Values that several ranks have under one name and that
were not declared as replicated are per-rank values (`Contents.per_rank`).
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import unquote

from planners.errors import PlanError
from planners.geometry.box import Box, upper_corner
from planners.geometry.byte_ranges import Window
from planners.geometry.layout import ITEM_SIZES, TensorSpec, itemsize
from planners.units import format_some
from reshard.errors import CheckpointError, CorruptCheckpointError, FormatError, framework
from reshard.formats.format import Format, as_shape, check_apart
from reshard.formats.torch_save.archive import locate_item, read_head
from reshard.formats.torch_save.reader import read_torch_file
from reshard.state import IntKey, KeyPath
from reshard.storage.base import Listing, Storage
from reshard.stored.checksums import NO_CHECKSUMS
from reshard.stored.contents import Contents, ContentsBuilder
from reshard.stored.source import Files, FileSource
from reshard.stored.tensor import Extent, StoredChunk, StoredTensor

_MANIFEST = ".snapshot_metadata"
_CONTAINERS = {"dict", "OrderedDict", "list"}
_TENSORS = {"Tensor", "ChunkedTensor"}
_SHARDED = {"ShardedTensor", "DTensor"}
_Entry = Mapping[str, Any]


def detect(storage: Storage, names: Listing) -> bool:
    """Return True if there is a manifest of torchsnapshot's, which comes last."""
    return _MANIFEST in names


def open(files: Files) -> Contents:
    """Return the snapshot in this folder.

    Raises:
        CorruptCheckpointError: the manifest is unreadable, or a file that it names is missing or
        too short.
        MissingPackageError: the manifest is YAML, and PyYAML is not installed.
    """
    source = files[_MANIFEST]
    label = source.label
    manifest = _manifest(bytes(source.read(0, source.nbytes)), label)
    found = _Snapshot(files, label, ContentsBuilder(label))
    by_path: dict[str, dict[int, _Entry]] = {}
    try:
        for path, entry in manifest["manifest"].items():
            rank, _, logical = path.partition("/")
            by_path.setdefault(logical, {})[int(rank)] = entry
        _check_names(by_path, label)
        for logical, entries in by_path.items():
            found.add(_key_path(logical, by_path), entries)
        check_apart(label, found.places)
    except CheckpointError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError, struct.error, PlanError) as error:
        raise CorruptCheckpointError(
            f"{label}: the manifest is malformed: {type(error).__name__}: {error}; expected what torchsnapshot writes"
        ) from None
    return found.out.build("torchsnapshot", left_out=tuple(found.quantized), warnings=found.warnings())


def _manifest(data: bytes, label: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = _yaml(data, label)
    if not isinstance(value, dict) or not isinstance(value.get("manifest"), dict):
        raise CorruptCheckpointError(f"{label}: no manifest of torchsnapshot, which says what each rank saved")
    return value


def _yaml(data: bytes, label: str) -> Any:
    """Return the manifest of an early version. Only plain values are built."""
    with framework("pyyaml>=6", f"{label}: the manifest is not JSON, and could be YAML: "):
        import yaml
    try:
        return yaml.load(data, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{label}: neither JSON nor YAML: {str(error)[:200]}") from None


def _check_names(by_path: Mapping[str, Mapping[int, _Entry]], label: str) -> None:
    """Raise CorruptCheckpointError unless containers list their contents."""
    inside: dict[str, dict[str, Mapping[int, _Entry]]] = {}
    for logical, entries in by_path.items():
        above, _, name = logical.rpartition("/")
        inside.setdefault(above, {})[unquote(name)] = entries
        holders = by_path.get(above, {})
        is_inside = any(entry["type"] in _CONTAINERS for entry in holders.values())
        is_inside |= not holders and above.rpartition("/")[0] in by_path
        if is_inside and not entries.keys() <= holders.keys():
            what = f"{logical!r} of rank {max(entries)} is in no container"
            raise CorruptCheckpointError(f"{label}: {what}")
    for logical, entries in by_path.items():
        kinds = {entry["type"] for entry in entries.values()}
        held = inside.get(logical, {})
        if kinds <= _CONTAINERS:
            told = set()
            for rank, entry in entries.items():
                told |= {(rank, str(key)) for key in entry.get("keys") or ()}
            listed = {name for _, name in told}
            if kinds == {"list"}:
                listed = {str(at) for at in range(len(held))}
            wrong = listed ^ held.keys()
            for rank, name in told:
                of = held.get(name, {})
                if rank not in of and not any(map(_is_of_all, of.values())):
                    wrong.add(name)
            if wrong:
                first = min(wrong)
                what = f"{logical!r} should have {sorted(listed)}, but does not fit {first!r}"
                raise CorruptCheckpointError(f"{label}: {what}")


def _is_of_all(entry: _Entry) -> bool:
    """Return whether an entry of one rank also belongs to the other ranks."""
    return bool(entry.get("replicated")) or entry["type"] in _SHARDED


def _key_path(logical: str, by_path: Mapping[str, Mapping[int, _Entry]]) -> KeyPath:
    """Return the path in the nest that was saved. The containers above determine each part of it."""
    parts = logical.split("/")
    path: list[str | int | IntKey] = []
    for at, part in enumerate(parts):
        above = by_path.get("/".join(parts[:at])) or {}
        container = next((entry for entry in above.values() if entry["type"] in _CONTAINERS), None)
        if container is None:  # the outermost name, in which nothing is quoted
            path.append(part)
        elif container["type"] == "list":
            path.append(int(part))
        else:
            text = unquote(part)
            is_number = text not in container["keys"] and text.lstrip("-").isdigit()
            path.append(IntKey(int(text)) if is_number else text)
    return tuple(path)


@dataclass
class _Snapshot:
    """The state that the entries of the manifest describe."""

    files: Files
    label: str
    out: ContentsBuilder
    places: set[tuple[str, int, int, str]] = field(default_factory=set)
    """Byte ranges of files, and the piece and name that are there."""
    own: list[str] = field(default_factory=list)
    quantized: list[str] = field(default_factory=list)
    inferred: list[str] = field(default_factory=list)

    def add(self, path: KeyPath, entries: Mapping[int, _Entry]) -> None:
        """Add the entries of the ranks at one place of the nest."""
        kinds = {entry["type"] for entry in entries.values()}
        rank = min(entries)
        first = entries[rank]
        if kinds <= _CONTAINERS:
            # non-empty containers follow from their contents
            if not first.get("keys"):
                self.out.containers[path] = "list" if first["type"] == "list" else "dict"
            return
        key = self.out.claim(path)
        if any(map(_is_quantized, entries.values())):
            self.quantized.append(key)
        elif kinds & _SHARDED:
            self._add_tensor(self._sharded(key, entries))
        elif len(entries) > 1 and not first.get("replicated") and not _is_one_value(entries):
            makers = {of: self._maker(key, entry, of) for of, entry in entries.items()}
            self.out.add_per_rank(key, makers)
            self.own.append(key)
        elif first["type"] in _TENSORS:
            self._add_tensor(self._tensor(key, first, rank))
        else:
            self.out.add_object(key, self._maker(key, first, rank))

    def _add_tensor(self, tensor: StoredTensor) -> None:
        self.out.add_tensor(tensor.spec.fqn, lambda: tensor)

    def _maker(self, key: str, entry: _Entry, rank: int) -> Callable[[], Any]:
        """Return a function that returns the value of one rank's entry."""
        if entry["type"] in _TENSORS:
            tensor = self._tensor(key, entry, rank)
            return lambda: tensor
        if entry["type"] == "object":
            self._range(key, entry, f" of rank {rank}")
            return partial(self._object, key, entry["serializer"], entry["location"])
        value = _primitive(entry["type"], entry["serialized_value"])
        text = entry.get("readable")
        if type(value) is float and text not in (None, repr(value)):
            raise ValueError(f"{key!r} is {value!r}, and reads {text}")
        return lambda: value

    def _object(self, key: str, serializer: str, location: str) -> Any:
        if serializer != "torch_save":
            what = f"the object {key!r} is serialized by {serializer!r}"
            raise FormatError(f"{self.label}: {what}: unknown")
        file = read_torch_file(self.files[location])
        return file.plain(file.value)

    def _tensor(self, key: str, entry: _Entry, rank: int) -> StoredTensor:
        """Return a tensor that is stored in full, or in the pieces that its entry lists."""
        shape = as_shape(entry["shape"])
        whole = {"offsets": (0,) * len(shape), "sizes": shape, "tensor": entry}
        pieces: list[_Entry] = [whole]
        if entry["type"] == "ChunkedTensor":
            pieces = entry["chunks"]
        own = f" of rank {rank}"
        chunks = [self._chunk(key, piece, rank, own) for piece in pieces]
        if {_dtype(piece["tensor"]) for piece in pieces} - {_dtype(entry)}:
            raise ValueError(f"the pieces of {key!r} have other dtypes than it has")
        return StoredTensor(TensorSpec(key, shape, _dtype(entry)), tuple(chunks))

    def _sharded(self, key: str, entries: Mapping[int, _Entry]) -> StoredTensor:
        """Return a tensor from the shards that all ranks list. Of replicas, the first one is used."""
        chunks: dict[Box, StoredChunk] = {}
        dtypes = set()
        for rank, entry in sorted(entries.items()):
            for shard in entry["shards"]:
                chunk = self._chunk(key, shard, rank)
                chunks.setdefault(chunk.box, chunk)
                dtypes.add(_dtype(shard["tensor"]))
        if len(dtypes) != 1 or len({box.ndim for box in chunks}) != 1:
            raise CorruptCheckpointError(
                f"{self.label}: the shards of {key!r} have the dtypes {sorted(dtypes)} and the boxes {list(chunks)[:4]}"
            )
        self.inferred.append(key)
        return StoredTensor(TensorSpec(key, upper_corner(chunks), dtypes.pop()), tuple(chunks.values()))

    def _chunk(self, key: str, piece: _Entry, rank: int, own: str = "") -> StoredChunk:
        """Return a box of a tensor, and where its elements are."""
        box, entry = Box(as_shape(piece["offsets"]), as_shape(piece["sizes"])), piece["tensor"]
        dtype = _dtype(entry)
        if as_shape(entry["shape"]) != box.sizes:
            raise CorruptCheckpointError(f"{self.label}: {key!r}: a piece of shape {entry['shape']} at {box}")
        start, stop = self._range(key, entry, f"{own}, {box}")
        source = self.files[entry["location"]]
        if entry["serializer"] == "torch_save":
            return StoredChunk(box, partial(_locate, source, start, stop, key, dtype), rank)
        if entry["serializer"] != "buffer_protocol":
            raise FormatError(f"{self.label}: {key!r} is serialized by {entry['serializer']!r}, which is not known")
        window = Window.row_major(start, box.sizes, itemsize(dtype))
        if window.nbytes != stop - start:
            raise CorruptCheckpointError(
                f"{source.label}: {key!r} of shape {list(box.sizes)} and dtype {dtype} needs {window.nbytes} bytes, "
                f"and has {stop - start} at [{start}, {stop})"
            )
        return StoredChunk(box, Extent(source, window), rank)

    def _range(self, key: str, entry: _Entry, piece: str = "") -> tuple[int, int]:
        """Return the byte range of an entry in its file. Refuses bytes that do not exist."""
        file, refuse = entry["location"], self.files.checking.refuse
        if (nbytes := self.files.listed.get(file)) is None:
            refuse(CorruptCheckpointError(f"{self.label}: the file {file} is missing, which should hold {key!r}"))
        start, stop = as_shape(entry.get("byte_range") or (0, nbytes or 0))
        self.places.add((file, start, stop, key + piece))
        if nbytes is not None and not start <= stop <= nbytes:
            source = self.files[file]
            source.refuse(CorruptCheckpointError(
                f"{source.label}: {key!r} should be at bytes [{start}, {stop}), but the file has "
                f"{nbytes}: it was truncated, or the manifest is wrong"
            ))  # fmt: skip
        return start, stop

    def warnings(self) -> tuple[str, ...]:
        """Return warnings for the reader."""
        told = []
        if self.inferred:
            told.append(
                f"global shapes of sharded tensors, such as {self.inferred[0]!r}, are inferred from the shards: the "
                "manifest does not say them"
            )
        if self.own:
            told.append(
                f"{len(self.own)} values, such as {self.own[0]!r}, belong to single ranks: several ranks saved them "
                "and did not declare them replicated. Load them into a reshard.PerRank"
            )
        if self.quantized:
            told.append(f"{format_some([*map(repr, self.quantized)], 3)} cannot be read: a quantized tensor")
        return tuple(told)


def _locate(source: FileSource, start: int, stop: int, key: str, dtype: str) -> Extent:
    place, found = locate_item(source, start, stop - start, read_head(source, start, stop - start))
    if found != dtype:
        raise CorruptCheckpointError(f"{source.label}: {key!r} should be {dtype}, and the file holds {found}")
    return place


def _is_quantized(entry: _Entry) -> bool:
    inner = (piece["tensor"] for piece in (*entry.get("shards", ()), *entry.get("chunks", ())))
    return any(str(one.get("dtype", "")).startswith(("torch.q", "q")) for one in (entry, *inner))


def _is_one_value(entries: Mapping[int, _Entry]) -> bool:
    """Return True if all ranks have the same plain value. Plain values are in the manifest itself."""
    values = {(entry["type"], entry.get("serialized_value")) for entry in entries.values()}
    return len(values) == 1 and None not in values.pop()


def _dtype(entry: _Entry) -> str:
    dtype = str(entry["dtype"]).removeprefix("torch.")
    if dtype not in ITEM_SIZES:
        raise ValueError(f"{entry['dtype']!r} is not a dtype")
    return dtype


def _primitive(kind: str, text: Any) -> Any:
    """Return a value that is stored in the manifest."""
    if type(text) is not str:
        raise TypeError(f"{text!r:.40} is not a serialized value")
    if kind == "str":
        return text
    if kind == "int":
        return int(text)
    if kind == "bool":
        return {"True": True, "False": False}[text]
    if kind in ("bytes", "float"):
        data = base64.b64decode(text, validate=True)
        return data if kind == "bytes" else struct.unpack("<d", data)[0]
    raise ValueError(f"{kind!r} is not a kind of entry")


FORMAT = Format(
    "torchsnapshot",
    checksums=NO_CHECKSUMS,
    detect=detect,
    open=open,
    is_composite=True,
)
