"""Checkpoints of torch.distributed.checkpoint: a pickle `.metadata` and `__<rank>_<n>.distcp` files of items.

`.metadata` says the boxes of each tensor and the byte range of each item. An item is an archive of `torch.save`
(`torch_save.zip_archive`), perhaps compressed, or its file as a whole is a safetensors file. Only archives that are
read are looked into, and what they really hold is compared with what `.metadata` promised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from planners.errors import PlanError
from planners.geometry.box import Box
from planners.geometry.dtypes import ITEM_SIZES
from planners.geometry.layout import TensorSpec
from reshard.errors import DamagedCheckpointError, FormatError
from reshard.formats.dcp.items import Item, Items, Undo
from reshard.formats.dcp.names import DATA_FILE, RANK_METADATA, has_dcp
from reshard.formats.pickles.reader import load_pickle
from reshard.formats.pickles.record import Record
from reshard.formats.stored.checksums import CRC_OF_RECORDS
from reshard.formats.stored.contents import Contents, Facts, LazyMapping
from reshard.formats.stored.source import Files
from reshard.formats.stored.tensor import StoredChunk, StoredTensor
from reshard.formats.torch_save.file import TorchFile
from reshard.state.dtypes import dtype_name
from reshard.state.tree import KeyPath
from reshard.storage.base import Storage

__all__ = ["DcpFacts", "checksums", "detect", "looks_for", "name", "open", "open_folder"]

name = "dcp"
looks_for = ".metadata and *.distcp, or __<rank>.metadata"
checksums = CRC_OF_RECORDS


def detect(storage: Storage, names: Mapping[str, int]) -> bool:
    """Whether the top folder is a DCP checkpoint."""
    return has_dcp(names)


def open(files: Files) -> Contents:
    """The checkpoint in the top folder. Raises DamagedCheckpointError, naming the file."""
    return open_folder(files, "")


@dataclass(frozen=True)
class DcpFacts(Facts):
    """What a DCP checkpoint knows beyond its contents."""

    object_file: Callable[[str], TorchFile]
    """Of the key of an object: its item as a file of `torch.save`, whose tensors are not read."""
    save_id: str | None = None
    version: str | None = None
    """Of torch's planner."""
    mcore_data: Any = None
    """What Megatron-core puts into `.metadata`: how tensors were reshaped before they were saved."""


@dataclass
class _Index:
    """What all `.metadata` files of a checkpoint say together."""

    tensors: dict[str, list[Record]] = field(default_factory=dict)
    objects: list[str] = field(default_factory=list)
    items: dict[str, dict[tuple[int, ...] | None, Item]] = field(default_factory=dict)
    paths: dict[str, KeyPath] = field(default_factory=dict)
    save_id: str | None = None
    version: str | None = None
    mcore_data: Any = None


def open_folder(files: Files, folder: str, undo: Undo | None = None) -> Contents:
    """The checkpoint in `folder`, "" or ending in "/"; `undo`: see `Items`.

    Raises:
        DamagedCheckpointError: there is no `.metadata` (the save did not end), it is unreadable, or a file that it
            names is missing or too short.
        UnsafeDataError: `.metadata` asks for something that could run code.
    """
    storage, names = files.storage, files.listed
    found = [folder + ".metadata"] if folder + ".metadata" in names else []
    by_rank = sorted(n for n in names if n.startswith(folder) and RANK_METADATA.fullmatch(n[len(folder) :]))
    if not found and not by_rank:
        raise DamagedCheckpointError(
            f"{storage.url}/{folder}: there are .distcp files, but no .metadata, which comes last: the save did not end"
        )
    index = _Index()
    for file in found or by_rank:
        source = files[file]
        _add(index, _metadata(source.read(0, source.nbytes), source.label), source.label)
    _check_files(index, storage, names, folder)
    items = Items(files, folder, undo)
    tensors: dict[str, Callable[[], StoredTensor]] = {
        key: lambda key=key, metas=metas: _tensor(key, metas, index.items.get(key, {}), items)  # type: ignore[misc]
        for key, metas in index.tensors.items()
    }
    objects: dict[str, Callable[[], Any]] = {
        key: lambda key=key: items.object(key, index.items.get(key, {}).get(None))  # type: ignore[misc]
        for key in index.objects
    }
    facts = DcpFacts(
        lambda key: items.file(key, index.items.get(key, {}).get(None)), index.save_id, index.version, index.mcore_data
    )
    return Contents(name, LazyMapping(tensors), LazyMapping(objects), paths=index.paths, facts=facts)


def _metadata(data: bytes | memoryview, where: str) -> dict[str, Any]:
    """The fields of a pickled `Metadata`, or of a class derived from it."""
    value = load_pickle(data, where=where)
    if not isinstance(value, Record) or not isinstance(value.fields.get("state_dict_metadata"), dict):
        raise DamagedCheckpointError(f"{where}: wanted torch.distributed.checkpoint's Metadata, found {value!r:.120}")
    if not isinstance(value.fields.get("storage_data"), dict):
        raise DamagedCheckpointError(f"{where}: it does not say where anything is stored")
    return value.fields


def _add(index: _Index, fields: Mapping[str, Any], where: str) -> None:
    """Merge one metadata file into the index."""
    try:
        for key, meta in fields["state_dict_metadata"].items():
            if meta.name == "BytesStorageMetadata":
                if str(key) not in index.objects:
                    index.objects.append(str(key))
            else:
                index.tensors.setdefault(str(key), []).append(meta)
        for at, info in fields["storage_data"].items():
            at, info = _said(at), _said(info)
            offset = None if at.get("offset") is None else _ints(at["offset"])
            start, length = _ints((info["offset"], info["length"]))
            descriptors = info.get("transform_descriptors")
            transforms = tuple(map(str, descriptors)) if descriptors else ()
            item = Item(str(info["relative_path"]), start, length, transforms)
            index.items.setdefault(str(at["fqn"]), {}).setdefault(offset, item)
        for key, path in (fields.get("planner_data") or {}).items():
            index.paths[str(key)] = tuple([part if type(part) is int else str(part) for part in path])
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"{where}: the metadata makes no sense: {type(error).__name__}: {error}; wanted what torch writes"
        ) from None
    index.mcore_data = fields.get("mcore_data", index.mcore_data)
    if isinstance(meta := fields.get("storage_meta"), Record) and isinstance(meta.fields.get("save_id"), str):
        index.save_id = meta.fields["save_id"]
    if isinstance(version := fields.get("version"), str):
        index.version = version


def _said(record: Record) -> Mapping[str, Any]:
    """Its fields, for a look at some of them: usually its state itself, since there are several records a tensor."""
    return record.state if type(record.state) is dict else record.fields


def _ints(values: Iterable[Any]) -> tuple[int, ...]:
    result = tuple(values)
    for v in result:
        if type(v) is not int or v < 0:
            raise ValueError(f"{result} should be integers >= 0")
    return result


def _check_files(index: _Index, storage: Storage, names: Mapping[str, int], folder: str) -> None:
    """Raises DamagedCheckpointError if a file is missing or ends before an item does."""
    needed: dict[str, tuple[int, str]] = {}
    for key, items in index.items.items():
        for item in items.values():
            if item.file not in needed or item.stop > needed[item.file][0]:
                needed[item.file] = (item.stop, key)
    missing = sorted(file for file in needed if folder + file not in names)
    if missing:
        some = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise DamagedCheckpointError(
            f"{storage.url}/{folder}: {len(missing)} of {len(needed)} files that .metadata names are missing: {some}; "
            f"{missing[0]} should hold {needed[missing[0]][1]!r}"
        )
    for file, (stop, key) in needed.items():
        if names[folder + file] < stop:
            raise DamagedCheckpointError(
                f"{storage.url}/{folder}{file}: cut short: {key!r} should end at byte {stop}, but the file has "
                f"{names[folder + file]} bytes"
            )


def _tensor(key: str, metas: list[Record], stored: Mapping[tuple[int, ...] | None, Item], items: Items) -> StoredTensor:
    """A tensor from its metadata: one record, or one of each rank where ranks wrote their own."""
    try:
        spec = _spec(key, metas[0])
        boxes = [
            Box(_ints(chunk.fields["offsets"]), _ints(chunk.fields["sizes"]))
            for meta in metas
            for chunk in meta.fields["chunks"]
        ]
        if any(_spec(key, meta) != spec for meta in metas[1:]):
            raise DamagedCheckpointError(f"tensor {key!r}: the ranks' metadata disagree about its shape or dtype")
    except (AttributeError, KeyError, TypeError, ValueError, PlanError) as error:
        if isinstance(error, (DamagedCheckpointError, FormatError)):
            raise
        raise DamagedCheckpointError(f"tensor {key!r}: its metadata makes no sense: {error}") from None
    chunks = []
    for box in dict.fromkeys(boxes):  # replicas of several ranks are one chunk
        item = stored.get(box.offsets)
        if item is None:
            raise DamagedCheckpointError(f"tensor {key!r}: .metadata does not say where its chunk {box} is stored")
        match = DATA_FILE.fullmatch(item.file.rpartition("/")[2])
        owner = int(match[1]) if match else item.file
        chunks.append(StoredChunk(box, items.locator(spec, box, item), owner))
    return StoredTensor(spec, tuple(chunks))


def _spec(key: str, meta: Record) -> TensorSpec:
    properties = meta.fields["properties"]
    # torch pickles the properties as a tuple that begins with the dtype, others may as a dict
    dtype = properties.state[0] if isinstance(properties.state, tuple) else properties.fields["dtype"]
    return TensorSpec(key, _ints(meta.fields["size"]), _dtype_named(dtype))


def _dtype_named(dtype: Any) -> str:
    """Its name, also where this torch has no such dtype: only who reads the tensor needs one."""
    if isinstance(dtype, torch.dtype):
        return dtype_name(dtype)
    path = dtype.path if isinstance(dtype, type) and issubclass(dtype, Record) else ""
    name = path.removeprefix("torch.")
    if name == path or name not in ITEM_SIZES:
        raise ValueError(f"{dtype!r:.80} is no dtype")
    return name
