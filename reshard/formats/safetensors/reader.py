"""Hugging Face safetensors: one file, several with an index, or the shards that DCP's Hugging Face writer leaves.

The index says which file holds which tensor, and is not believed: the files' headers must agree. DCP's shards say the
offset of each chunk but no global shapes, which are inferred; a hole shows when a tensor is read or checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from planners.geometry.box import Box
from planners.geometry.layout import TensorSpec
from reshard.errors import DamagedCheckpointError, FormatError
from reshard.formats.safetensors.header import Header, read_header
from reshard.formats.safetensors.tied_names import tied_names
from reshard.formats.stored.checksums import NO_CHECKSUMS
from reshard.formats.stored.contents import Contents, Facts
from reshard.formats.stored.source import Files
from reshard.formats.stored.tensor import StoredChunk, StoredTensor
from reshard.storage.base import Storage

__all__ = ["HuggingFaceFacts", "checksums", "detect", "looks_for", "name", "open", "open_files"]

name = "safetensors"
looks_for = "*.safetensors, *.safetensors.index.json"
checksums = NO_CHECKSUMS

_NUMBERED = re.compile(r"(.*?)-?(\d+)-of-(\d+)\.safetensors")
_SHARD = re.compile(r"shard-(\d+)-(.*)-(\d+)-of-(\d+)\.safetensors")
_INDEX = ".safetensors.index.json"


@dataclass(frozen=True)
class HuggingFaceFacts(Facts):
    """What stands in the files' headers and beside them."""

    metadata: Mapping[str, str]
    config: Mapping[str, Any]
    """The model's config.json, {} if there is none."""


def detect(storage: Storage, names: Mapping[str, int]) -> bool:
    """Whether the top folder holds safetensors files or an index of some."""
    return any("/" not in n and n.endswith((".safetensors", _INDEX)) for n in names)


def open(files: Files) -> Contents:
    """The checkpoint in the top folder.

    Raises:
        DamagedCheckpointError: a file is missing or damaged, or the index contradicts the files.
        FormatError: several files that nothing says belong together.
    """
    storage, names = files.storage, files.listed
    indexes = sorted(n for n in names if "/" not in n and n.endswith(_INDEX))
    if len(indexes) > 1:
        raise FormatError(f"{storage.url} has {len(indexes)} indexes: {', '.join(indexes)}; open one by its path")
    if indexes and len(names) == 1:
        files = files.some(storage.list())  # opened by the path of the index: the files lie beside it
    if indexes:
        return _open_indexed(files, indexes[0])
    found = sorted(n for n in names if "/" not in n and n.endswith(".safetensors"))
    part = len(names) == 1 and bool(_NUMBERED.fullmatch(found[0]))
    if part and len(storage.list()) > 1:  # opened by the path of one of several files: that one is meant
        warning = f"{found[0]} is one of several files, and the others were not opened"
        return replace(open_files(files, found), warnings=(warning,))
    _check_numbers(storage.url, found)
    opened = open_files(files, found)
    return replace(opened, warnings=(*opened.warnings, *_shards_not_there(found)))


def _shards_not_there(files: list[str]) -> tuple[str, ...]:
    """A warning about shards that a writer may have had nothing for, so that it can be known which file is missing."""
    shards = [match for file in files if (match := _SHARD.fullmatch(file))]
    have = {(int(m[1]), int(m[3])) for m in shards}
    writers, parts = sorted({r for r, _ in have}), sorted({p for _, p in have})
    gone = [(r, p) for r in writers for p in parts if (r, p) not in have]
    if not gone:
        return ()
    rank, part = gone[0]
    first = f"shard-{rank:05d}-{shards[0][2]}-{part:05d}-of-{shards[0][4]}.safetensors"
    more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
    return (f"there is no {first}{more}: its writer had nothing for it, or it was lost",)


def _open_indexed(files: Files, index: str) -> Contents:
    storage, names = files.storage, files.listed
    label = f"{storage.url}/{index}"
    try:
        data = json.loads(storage.read(index))
        weight_map = {str(key): str(file) for key, file in data["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"{label}: no index of safetensors files: {type(error).__name__}: {error}"
        ) from None
    folder = index.rpartition("/")[0]
    named = sorted(set(weight_map.values()))
    missing = [file for file in named if file not in names]
    if missing:
        key = next(k for k, file in weight_map.items() if file == missing[0])
        raise DamagedCheckpointError(
            f"{storage.url}: {len(missing)} of {len(named)} files that {index} names are missing: "
            f"{', '.join(missing[:5])}; {missing[0]} should hold {key!r}"
        )
    contents = open_files(files, named)
    for key, file in weight_map.items():
        if key not in contents.tensors or contents.tensors[key].chunks[0].owner != file:
            where = f"{contents.tensors[key].chunks[0].owner} does" if key in contents.tensors else "no file does"
            raise DamagedCheckpointError(
                f"{label}: it says that {file} holds {key!r}, but {where}; the index lies{folder}"
            )
    extra = [key for key in contents.tensors if key not in weight_map]
    if extra:
        raise DamagedCheckpointError(
            f"{label}: {len(extra)} tensors are in the files but not in the index, such as {extra[0]!r}; the index lies"
        )
    return contents


def _check_numbers(url: str, files: list[str]) -> None:
    """Raises unless the names say that the files are one checkpoint, and all of it."""
    if len(files) < 2:
        match = _NUMBERED.fullmatch(files[0]) if files else None
        if match and int(match[3]) > 1 and not _SHARD.fullmatch(files[0]):
            raise DamagedCheckpointError(
                f"{url}: {files[0]} is one of {int(match[3])} files, and the others are missing"
            )
    shards = [_SHARD.fullmatch(file) for file in files]
    numbered = [_NUMBERED.fullmatch(file) for file in files]
    if all(shards) and files:
        have = {(int(m[1]), int(m[3])) for m in shards if m}
        ranks, parts = max(r for r, _ in have), max(int(m[4]) for m in shards if m)
        # a rank that had nothing for a part wrote no file for it, but no rank wrote nothing at all
        gone = [r for r in range(1, ranks + 1) if not any(have_r == r for have_r, _ in have)]
        lost = [p for p in range(1, parts + 1) if not any(have_p == p for _, have_p in have)]
        if gone or lost:
            what = f"of writer {gone[0]}" if gone else f"of part {lost[0]} of {parts}"
            raise DamagedCheckpointError(f"{url}: all shards {what} are missing")
    elif len(files) > 1:
        kinds = {(m[1], int(m[3])) for m in numbered if m}
        if len(kinds) != 1 or not all(numbered):
            raise FormatError(
                f"{url} has {len(files)} safetensors files and no index that says they belong together: "
                f"{', '.join(files[:5])}; open one by its path"
            )
        total = kinds.pop()[1]
        have_numbers = {int(m[2]) for m in numbered if m}
        lost = [i for i in range(1, total + 1) if i not in have_numbers]
        if lost:
            raise DamagedCheckpointError(
                f"{url}: {len(lost)} of {total} files are missing, the first is number {lost[0]}"
            )


def open_files(files: Files, found: list[str]) -> Contents:
    """All tensors of the safetensors files `found`, whole or in DCP's chunks."""
    storage, names = files.storage, files.listed
    headers = {file: read_header(files[file]) for file in found}
    chunks: dict[str, list[tuple[str, Header, tuple[int, ...]]]] = {}
    inferred = False
    for file, header in headers.items():
        offsets = header.saved_offsets()
        for key, entry in header.entries.items():
            rank = len(entry.window.sizes)
            offset = tuple(offsets.get(key, (0,) * rank))
            if len(offset) != rank:
                raise DamagedCheckpointError(
                    f"{header.source.label}: tensor {key!r} has {rank} dims, its offset {offset}"
                )
            chunks.setdefault(key, []).append((file, header, offset))
            inferred |= key in offsets
    tensors = {key: _tensor(key, parts) for key, parts in chunks.items()}
    metadata: dict[str, str] = {}
    for header in headers.values():
        metadata.update({k: v for k, v in header.metadata.items() if k != "DCP_SHARDING_INFO"})
    warnings = ["global shapes are inferred from the chunks: the files do not say them"] if inferred else []
    small = [key for key, tensor in tensors.items() if not tensor.spec.shape]
    if small and any(n.startswith("sharded/") and _SHARD.fullmatch(n.rpartition("/")[2]) for n in names):
        warnings.append(
            f"torch writes zeros for tensors without dims, such as {small[0]!r}, where it consolidates shards: their "
            "values are in sharded/"
        )
    config = _config(storage, names)
    aliases = tied_names(tensors, config, metadata)
    return Contents(name, tensors, aliases=aliases, facts=HuggingFaceFacts(metadata, config), warnings=tuple(warnings))


def _tensor(key: str, parts: list[tuple[str, Header, tuple[int, ...]]]) -> StoredTensor:
    dtypes = sorted({header.entries[key].dtype for _, header, _ in parts})
    ranks = {len(offset) for _, _, offset in parts}
    if len(dtypes) > 1 or len(ranks) > 1:
        raise DamagedCheckpointError(
            f"tensor {key!r}: its chunks have the dtypes {dtypes} and {sorted(ranks)} dims, in "
            f"{', '.join(file for file, _, _ in parts)}"
        )
    boxes = [Box(offset, header.entries[key].window.sizes) for _, header, offset in parts]
    if len({box for box in boxes if not box.is_empty}) < sum(not box.is_empty for box in boxes):
        raise DamagedCheckpointError(
            f"tensor {key!r} is stored twice, in {' and '.join(file for file, _, _ in parts)}; nothing says which is "
            "right"
        )
    shape = tuple(max(ends) for ends in zip(*(box.stops for box in boxes)))
    stored = [StoredChunk(box, header.place(key), _owner(file)) for box, (file, header, _) in zip(boxes, parts)]
    return StoredTensor(TensorSpec(key, shape, dtypes[0]), tuple(stored))


def _owner(file: str) -> int | str:
    match = _SHARD.fullmatch(file.rpartition("/")[2])
    return int(match[1]) - 1 if match else file


def _config(storage: Storage, names: Mapping[str, int]) -> dict[str, Any]:
    """The model's config.json, {} if there is none that can be read: it is not needed to read tensors."""
    if "config.json" not in names:
        return {}
    try:
        config = json.loads(storage.read("config.json"))
    except (ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}
