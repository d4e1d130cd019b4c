"""Hugging Face safetensors: one file, or several with an index, read and written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from planners.geometry.box import Box, Shape, upper_corner
from planners.geometry.layout import TensorSpec
from planners.units import format_some
from reshard.errors import CorruptCheckpointError, FormatError
from reshard.formats.format import Format, Writing, at_top, check_index, indexes_in, not_opened, read_index
from reshard.formats.tied_names import tied_names
from reshard.native.manifest import HF_INDEX, is_generation
from reshard.state import empty_sequences
from reshard.storage.base import Listing, Storage
from reshard.stored.checksums import NO_CHECKSUMS, Checking
from reshard.stored.contents import Contents, Facts
from reshard.stored.safetensors_header import SAFETENSORS_CODES, Header, encode_header, read_header
from reshard.stored.source import Files
from reshard.stored.streaming import (
    FilePart,
    FilePlan,
    HashedFilesWriter,
    HashingWriter,
    Publication,
    Target,
    grouped,
)
from reshard.stored.tensor import StoredChunk, StoredTensor

# The index says which file contains which tensor. It is not trusted: the files' headers must agree.
# DCP's files record the offset of each chunk, but no global shapes, which are inferred. So a
# missing region is noticed when a tensor is read or verified.


_NUMBERED = re.compile(r"(.*?)-?(\d+)-of-(\d+)\.safetensors")
_SHARD = re.compile(r"shard-(\d+)-(.*)-(\d+)-of-(\d+)\.safetensors")
_INDEX = ".safetensors.index.json"


@dataclass(frozen=True)
class HuggingFaceFacts(Facts):
    """The contents of the files' headers, and of the files beside them."""

    metadata: Mapping[str, str]
    config: Mapping[str, Any]
    """The model's config.json, or {} if there is none."""


def detect(storage: Storage, names: Listing) -> bool:
    """Return True if the top folder contains safetensors files or an index of them."""
    return bool(at_top(names, ".safetensors") or indexes_in(names, _INDEX))


def open(files: Files) -> Contents:
    """Return the checkpoint in the top folder.

    Raises:
        CorruptCheckpointError: a file is missing or damaged, or the index contradicts the files.
        FormatError: there are several files that do not show that they belong together.
    """
    storage, names = files.storage, files.listed
    if (indexed := read_index(files, _INDEX)) is not None:
        return _open_indexed(*indexed)
    found = at_top(names, ".safetensors")
    warnings: tuple[str, ...] = ()
    if len(names) == 1 and _NUMBERED.fullmatch(found[0]) and len(storage.list()) > 1:
        warnings = (f"{found[0]} is one of several files, and the others were not opened",)  # opened by its path
    elif len(names) == 1 and is_generation(storage.url.rstrip("/")):
        above = storage.url.rpartition("/data-")[0]
        warnings = (f"{found[0]} is one rank's part of {above}: open that for the rest",)
    else:
        variants = [name for name in names if fnmatchcase(name, "*.safetensors.index.*.json")]
        _check_numbers(storage.url, found, files.checking.refuse, variants)
    opened = open_files(files, found)
    more = (*opened.warnings, *_shards_not_there(found), *not_opened(files, found))
    return replace(opened, warnings=warnings or more)


def _shards_not_there(files: list[str]) -> tuple[str, ...]:
    """Return a warning about missing shards. A writer may have had nothing for them, so the user
    can check which file is missing."""
    shards = [match for file in files if (match := _SHARD.fullmatch(file))]
    have = {(int(m[1]), int(m[3])) for m in shards}
    writers, parts = {rank for rank, _ in have}, {part for _, part in have}
    gone = sorted({(rank, part) for rank in writers for part in parts} - have)
    if not gone:
        return ()
    rank, part = gone[0]
    first = f"shard-{rank:05d}-{shards[0][2]}-{part:05d}-of-{shards[0][4]}.safetensors"
    more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
    return (f"there is no {first}{more}: its writer had nothing for it, or it was lost",)


def _open_indexed(files: Files, label: str, weight_map: Mapping[str, str]) -> Contents:
    found = sorted({*weight_map.values()})
    kinds = {(match[1], match[3]) for match in map(_NUMBERED.fullmatch, found) if match}
    for file in at_top(files.listed, ".safetensors"):
        if file not in found and (match := _NUMBERED.fullmatch(file)) and (match[1], match[3]) in kinds:
            words = f"it does not name {file}, but names others of these {int(match[3])} files: the index is wrong"
            files.checking.refuse(CorruptCheckpointError(f"{label}: {words}"))
    contents = open_files(files, found)
    check_index(files, label, weight_map, {key: tensor.chunks[0].owner for key, tensor in contents.tensors.items()})
    return replace(contents, warnings=(*contents.warnings, *not_opened(files, found)))


def _check_numbers(
    url: str, files: list[str], refuse: Callable[[CorruptCheckpointError], None], variants: Sequence[str] = ()
) -> None:
    """Raise or refuse an error unless the names show that the files are one complete checkpoint."""
    shards = [_SHARD.fullmatch(file) for file in files]
    numbered = [_NUMBERED.fullmatch(file) for file in files]
    if all(shards):
        have = {(int(m[1]), int(m[3])) for m in shards if m}
        ranks, parts = max(r for r, _ in have), max(int(m[4]) for m in shards if m)
        # a rank writes no file for a part of which it has nothing, but every rank writes at least
        # one file
        gone = sorted({*range(1, ranks + 1)} - {rank for rank, _ in have})
        lost = sorted({*range(1, parts + 1)} - {part for _, part in have})
        if gone or lost:
            what = f"of writer {gone[0]}" if gone else f"of part {lost[0]} of {parts}"
            refuse(CorruptCheckpointError(f"{url}: all shards {what} are missing"))
    elif len(files) > 1 or all(numbered):
        kinds = {(m[1], int(m[3])) for m in numbered if m}
        if len(kinds) != 1 or not all(numbered):
            more = f", or those of a variant by {format_some(variants)}" if variants else ""
            raise FormatError(
                f"{url} has {len(files)} safetensors files and no index that lists them: "
                f"{format_some(files)}; open one by its path{more}"
            )
        total = kinds.pop()[1]
        have_numbers = {int(m[2]) for m in numbered if m}
        first = min(1, *have_numbers)  # some writers count from 0
        lost = [i for i in range(first, first + total) if i not in have_numbers]
        if len(files) > total:
            raise FormatError(
                f"{url} has {len(files)} files whose names say that there are {total}, and no index that lists them: "
                "move those of another save elsewhere"
            )
        if lost:
            words = f"{len(lost)} of {total} files are missing, the first is number {lost[0]}"
            refuse(CorruptCheckpointError(f"{url}: {words}"))


def open_files(files: Files, found: list[str]) -> Contents:
    """Return all tensors of the safetensors files `found`, in full or in DCP's chunks."""
    storage, names = files.storage, files.listed
    headers = {file: read_header(files[file]) for file in found}
    chunks: dict[str, list[tuple[str, Header, Shape]]] = {}
    inferred = False
    for file, header in headers.items():
        offsets = header.saved_offsets()
        for key, entry in header.entries.items():
            rank = len(entry.window.sizes)
            offset = tuple(offsets.get(key, (0,) * rank))
            if len(offset) != rank:
                raise CorruptCheckpointError(
                    f"{header.source.label}: tensor {key!r} has {rank} dims, its offset {offset}"
                )
            chunks.setdefault(key, []).append((file, header, offset))
            inferred |= key in offsets
    tensors = {key: _tensor(key, parts) for key, parts in chunks.items()}
    said = (item for header in headers.values() for item in header.metadata.items())
    metadata = {key: value for key, value in said if key != "DCP_SHARDING_INFO"}
    warnings = ["global shapes are inferred from the chunks: the files do not say them"] if inferred else []
    small = [key for key, tensor in tensors.items() if not tensor.spec.shape]
    if small and any(n.startswith("sharded/") and _SHARD.fullmatch(n.rpartition("/")[2]) for n in names):
        warnings.append(
            f"torch writes zeros for tensors without dims, such as {small[0]!r}, where it consolidates shards: their "
            "values are in sharded/"
        )
    config = _config(storage, names)
    aliases = tied_names(tensors, config, metadata)
    return Contents(
        tensors,
        aliases=aliases,
        format="safetensors",
        facts=HuggingFaceFacts(metadata, config),
        warnings=tuple(warnings),
    )


def _tensor(key: str, parts: list[tuple[str, Header, Shape]]) -> StoredTensor:
    dtypes = sorted({header.entries[key].dtype for _, header, _ in parts})
    ranks = {len(offset) for _, _, offset in parts}
    if len(dtypes) > 1 or len(ranks) > 1:
        raise CorruptCheckpointError(
            f"tensor {key!r}: its chunks have the dtypes {dtypes} and {sorted(ranks)} dims, in "
            f"{', '.join(file for file, _, _ in parts)}"
        )
    boxes = [Box(offset, header.entries[key].window.sizes) for _, header, offset in parts]
    full = [box for box in boxes if not box.is_empty]
    if len({*full}) < len(full):
        raise CorruptCheckpointError(
            f"tensor {key!r} is stored twice, in {' and '.join(file for file, _, _ in parts)}; the checkpoint "
            "does not say which one is right"
        )
    stored = [StoredChunk(box, header.place(key), _owner(file)) for box, (file, header, _) in zip(boxes, parts)]
    return StoredTensor(TensorSpec(key, upper_corner(boxes), dtypes[0]), tuple(stored))


def _owner(file: str) -> int | str:
    match = _SHARD.fullmatch(file.rpartition("/")[2])
    return int(match[1]) - 1 if match else file


def _config(storage: Storage, names: Listing) -> dict[str, Any]:
    """Return the model's config.json, or {} if there is none or it is unreadable. It is not needed
    to read tensors."""
    if "config.json" not in names:
        return {}
    try:
        config = json.loads(storage.read("config.json"))
    except (ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


# Hugging Face's files: `model.safetensors`, or numbered ones of a limited size with an index.


_INDEX_NAME = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SUFFIXES = (".safetensors", _INDEX)
_OURS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")


class SafetensorsWriter(HashedFilesWriter):
    """Stores only tensors. Of tied tensors, it stores one, and records the names of the others in
    the files' metadata."""

    def __init__(self, contents: Contents, target: Target) -> None:
        """Raises FormatError for a dtype that safetensors does not support."""
        super().__init__(contents, target)
        specs = [self.stored(name).spec for name in self.names]
        for spec in specs:
            if spec.dtype not in SAFETENSORS_CODES.values():
                raise FormatError(f"safetensors cannot hold the dtype {spec.dtype!r}")
            if spec.dtype == SAFETENSORS_CODES["F4"] and not spec.shape:
                raise FormatError(f"{spec.fqn!r}: safetensors cannot hold {spec.dtype} without dims")
        groups = grouped(specs, target.max_shard_bytes)
        count = len(groups)
        self.files = tuple(
            FilePlan(
                _SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors",
                # large elements first, so that all elements are aligned
                tuple(FilePart(spec, Box.full(spec.shape)) for spec in sorted(group, key=lambda s: -s.itemsize)),
            )
            for number, group in enumerate(groups, 1)
        )
        empty = empty_sequences(contents.containers, contents.paths.values())
        self.left_out += (*contents.per_rank, *contents.objects, *empty)

    def put(self, file: FilePlan, out: HashingWriter) -> Mapping[str, Any]:
        """Write the header, then the elements."""
        mine = {part.spec.fqn for part in file.parts}
        tied = {alias: kept for alias, kept in self.contents.aliases.items() if kept in mine}
        rows = ((part.spec.fqn, part.spec.dtype, part.spec.shape) for part in file.parts)
        out.write(encode_header(rows, tied, has_f4=True))
        for part in file.parts:
            out.copy(self.region(part))
        return {}

    def finish(self, out: Publication) -> None:
        """Give the files their names, and publish the index last."""
        # a single file is replaced atomically; a mix of new and old files would look like a
        # complete checkpoint
        for name in _replaced(out.storage, out.storage.list()):
            if name not in out.done or (len(out.done) > 1 and out.done[name].name != name):
                out.retract(name)
        out.name_files()
        if len(out.done) > 1:
            index = {
                "metadata": {"total_size": self.total_bytes},
                "weight_map": {part.spec.fqn: file.name for file in self.files for part in file.parts},
            }
            out.publish(_INDEX_NAME, msgspec.json.format(msgspec.json.encode(index), indent=2))

    def occupied(self, names: Listing) -> str | None:
        """Return the name of an index or of a file with tensors, if there is one."""
        return next(iter(at_top(names, _SUFFIXES)), None)

    def ambiguous(self, storage: Storage, names: Listing) -> str | None:
        """Return another index, or another file of tensors if there will be no index."""
        old = _replaced(storage, names)
        others = at_top(names, _SUFFIXES if len(self.files) == 1 else _INDEX)
        return next((name for name in others if name not in old), None)


def _replaced(storage: Storage, names: Listing) -> list[str]:
    """Return the files of the old checkpoint, its index last: those with our names, and those that
    its index names, or all if they open without one. Others stay."""
    tensors, indexes = at_top(names, ".safetensors"), at_top(names, _INDEX)
    named = {*indexes} if len(indexes) == 1 else set[str]()
    files = Files(storage, names, Checking(lost=[]))
    with suppress(FormatError, CorruptCheckpointError):
        if indexed := read_index(files, _INDEX):
            named.update(indexed[2].values())
        elif tensors:
            _check_numbers(storage.url, tensors, files.checking.refuse)
            named.update(tensors)
    return [name for name in (*tensors, *indexes) if name in named or _OURS.fullmatch(name)]


WRITING = Writing(SafetensorsWriter, own=("*.safetensors", HF_INDEX), marks=(_SINGLE,), is_split=True)

FORMAT = Format(
    "safetensors",
    checksums=NO_CHECKSUMS,
    detect=detect,
    open=open,
)
