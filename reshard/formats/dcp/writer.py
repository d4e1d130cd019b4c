"""Writes DCP's files from a lazy checkpoint, streamed. torch's own `load` reads them."""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo  # what torch's reader looks for in .metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from planners.geometry.arrays import grouped
from planners.geometry.box import Box
from planners.geometry.layout import TensorSpec
from reshard.formats.format import Writing
from reshard.formats.torch_save.writer import (
    begin_archive,
    end_archive,
    pickled_tensor,
    refused_objects,
    tensor_record,
    with_sums,
)
from reshard.live.dtypes import dtype_from_name
from reshard.live.tree import builtin_kinds, unflatten
from reshard.state import IntKey, KeyPath, containers_around, key_of
from reshard.storage.base import Listing, Storage
from reshard.stored.contents import Contents
from reshard.stored.streaming import (
    FilePart,
    FilePlan,
    HashedFilesWriter,
    HashingWriter,
    Publication,
    Target,
    spread,
)
from reshard.stored.tensor import read_box

_METADATA = ".metadata"


class DcpWriter(HashedFilesWriter):
    """One file for each rank of `onto`, or files of a limited size; objects are in the first."""

    def __init__(self, contents: Contents, target: Target) -> None:
        nested, changed_classes = as_torch_nests(contents)
        super().__init__(nested, target)
        self.left_out += tuple(contents.per_rank)
        self.refused, self.changed_classes = refused_objects(nested.objects), changed_classes
        plan = spread([self.stored(name).spec for name in self.names], target)
        specs, files = plan.layout.specs, []
        for rank in range(plan.world_size):
            parts = [FilePart(specs[item.fqn], item.box) for item in plan.items(rank)]
            parts = [part for part in parts if 0 not in part.spec.shape]
            if rank == 0:  # list tensors without elements, too
                parts += [FilePart(spec, Box.full(spec.shape)) for spec in specs.values() if 0 in spec.shape]
            if parts or rank == 0:  # the name differs from those of older checkpoints in the folder
                first, second = (rank, 0) if target.onto is not None else (0, rank)
                files.append(FilePlan(f"__{first}_{self.job_id}_{second}.distcp", tuple(parts), rank))
        self.files = tuple(files)

    def first_name(self, storage: Storage, file: FilePlan) -> str:
        """Return the final name. It contains the job's id, so no other job writes it."""
        return file.name

    def put(self, file: FilePlan, out: HashingWriter) -> Mapping[str, Any]:
        """Write the items of one file."""
        regions = with_sums(self.region(part) for part in file.parts)
        items: list[list[Any]] = []
        for part, summed in zip(file.parts, regions, strict=True):
            start = out.nbytes
            pickled = pickled_tensor(part.spec.dtype, part.box.sizes)
            archive = begin_archive(out.write, pickled, out.write_later)
            tensor_record(archive, "data/0", out, summed)
            end_archive(archive)
            items.append([part.spec.fqn, list(part.box.offsets), list(part.box.sizes), start, out.nbytes - start])
        if file is self.files[0]:
            for key, value in self.contents.objects.items():
                start = out.nbytes
                out.write(object_to_bytes(value))
                items.append([key, None, None, start, out.nbytes - start])
        return {"items": items}

    def finish(self, out: Publication) -> None:
        """Publish `.metadata`, then remove the files of an older checkpoint."""
        self.publish(out, self.contents.paths)

    def publish(self, out: Publication, paths: Mapping[str, KeyPath] | None, folder: str = "") -> None:
        """Publish `.metadata` for all files in `folder`, then remove the files there that it replaces."""
        table: dict[str, Any] = {}
        places: dict[MetadataIndex, _StorageInfo] = {}
        names = grouped((kept, alias) for alias, kept in self.contents.aliases.items())
        for name, written in out.done.items():
            for key, offsets, sizes, start, length in written.facts["items"]:
                info = _StorageInfo(name.removeprefix(folder), start, length)
                for fqn in (key, *names.get(key, ())):  # tied tensors are several names of the same items
                    if offsets is None:
                        table[fqn] = BytesStorageMetadata()
                    else:
                        known = tensor_metadata(self.stored(key).spec)
                        table.setdefault(fqn, known).chunks.append(chunk_of(Box(offsets, sizes)))
                    places[MetadataIndex(fqn, None if offsets is None else torch.Size(offsets))] = info
        planner_data = None if paths is None else paths_of(table, paths)
        metadata = Metadata(table, planner_data, places, StorageMeta(save_id=self.job_id), **versioned())
        beside = (name for name in out.storage.list(folder) if name.endswith(".distcp"))
        old = [name for name in beside if name not in out.done and "/" not in name.removeprefix(folder)]
        out.publish(folder + _METADATA, pickle.dumps(metadata, protocol=4))
        for name in old:
            out.storage.delete(name)

    def occupied(self, names: Listing) -> str | None:
        """Return the file that is published last."""
        return _METADATA if _METADATA in names else None


WRITING = Writing(DcpWriter, own=(".metadata",), marks=(".metadata",), is_sharded=True, is_split=True)


# torch's records of a DCP checkpoint: those of tensors, chunks, and keys in `.metadata`, and items
# of objects.


def versioned(version: str | None = "1.0.0") -> dict[str, Any]:
    """Return the version as an argument of torch's `Metadata`, or {} if it has no such field, as in
    torch 2.6."""
    return {"version": version} if "version" in Metadata.__dataclass_fields__ else {}


def chunk_of(box: Box) -> ChunkStorageMetadata:
    """Return torch's record of a box."""
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def tensor_metadata(spec: TensorSpec, boxes: Iterable[Box] = ()) -> TensorStorageMetadata:
    """Return torch's record of a tensor that is stored in these chunks."""
    properties = TensorProperties(dtype=dtype_from_name(spec.dtype))
    return TensorStorageMetadata(properties, torch.Size(spec.shape), [chunk_of(box) for box in boxes])


def paths_of(keys: Iterable[str], paths: Mapping[str, KeyPath]) -> dict[str, tuple[Any, ...]]:
    """Return what torch calls `planner_data`: the path of each key in the nested state."""
    return {
        key: tuple(str(part) if isinstance(part, IntKey) else part for part in paths.get(key, (key,))) for key in keys
    }


def as_torch_nests(contents: Contents) -> tuple[Contents, dict[str, tuple[str, str]]]:
    """Return the state with the keys that torch's `load` looks for. Also return, by key, the
    container classes that are lost, each with its replacement.

    torch flattens mappings, and lists that contain tensors or mappings. Any other sequence is one
    object:

        group.betas.0: 0.9, group.betas.1: 0.95    ->    group.betas: (0.9, 0.95)

    For torch, a tuple of tensors is one object, too, pickled with its tensors. Here, that is so if
    the tuple is in a param group and each tensor has one element, such as betas. Any other becomes
    a list.
    """
    paths = contents.paths_in_order()
    kinds, changed_classes = builtin_kinds(contents.containers, {*paths.values()})
    contents = _with_numbers_in_tuples(contents, paths, kinds)
    tensors = {key: path for key, path in paths.items() if key not in contents.objects}
    apart = _taken_apart(paths.values(), tensors.values(), kinds)
    for path in paths.values():
        for i, part in enumerate(path):
            if isinstance(part, IntKey):
                changed_classes[key_of(path[: i + 1])] = "int key", "text"
    for path in apart:
        if kinds.get(path) == "tuple":
            changed_classes[key_of(path)] = changed_classes.get(key_of(path), ("tuple",))[0], "list"
    keys: dict[KeyPath, str] = {}
    nests: dict[KeyPath, tuple[dict[KeyPath, Any], dict[KeyPath, str]]] = defaultdict(lambda: ({}, {}))
    for key in contents.objects:
        at = _object_at(paths[key], apart)
        keys[at] = key if at == paths[key] else key_of(at)
        nests[at][0][paths[key][len(at) :]] = contents.objects[key]
    for path, kind in kinds.items():
        at = _object_at(path if kind == "dict" else (*path, 0), apart)
        if len(at) <= len(path) and not (kind == "dict" and at == path):
            keys.setdefault(at, key_of(at))
            nests[at][1][path[len(at) :]] = kind
    objects = {keys[at]: unflatten(*nest) for at, nest in nests.items()}
    places = tensors | {key: at for at, key in keys.items()}
    return replace(contents, objects=objects, paths=places, containers={}), changed_classes


def _with_numbers_in_tuples(contents: Contents, paths: Mapping[str, KeyPath], kinds: Mapping[KeyPath, str]) -> Contents:
    """Read the tensors of tuples in param groups and put them among the objects, if each is one number."""
    in_groups = {key: path for key, path in paths.items() if "param_groups" in path and kinds.get(path[:-1]) == "tuple"}
    found = {key: contents.find(key) for key in in_groups}
    inside = {key: tensor for key, tensor in found.items() if tensor is not None}
    apart = {paths[key][:-1] for key, tensor in inside.items() if tensor.spec.shape}
    read = {key: read_box(one, Box.full(())) for key, one in inside.items() if paths[key][:-1] not in apart}
    aliases = {key: kept for key, kept in contents.aliases.items() if key not in read}
    if not read or not read.keys().isdisjoint(aliases.values()):
        return contents
    tensors = {key: tensor for key, tensor in contents.tensors.items() if key not in read}
    return replace(contents, tensors=tensors, objects={**contents.objects, **read}, aliases=aliases)


def object_to_bytes(value: Any) -> bytes:
    """Return an object as `torch.save` writes it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _taken_apart(paths: Iterable[KeyPath], tensors: Iterable[KeyPath], kinds: Mapping[KeyPath, str]) -> set[KeyPath]:
    """Return the places of sequences whose items have separate keys."""
    apart = containers_around(tensors)
    mappings = {path[:i] for path in (*paths, *kinds) for i, part in enumerate(path) if type(part) is not int}
    for place in mappings | {path for path, kind in kinds.items() if kind == "dict"}:
        while place and type(place[-1]) is int and kinds.get(place[:-1], "list") == "list":
            place = place[:-1]
            apart.add(place)
    return apart


def _object_at(path: KeyPath, apart: Collection[KeyPath]) -> KeyPath:
    """Return where the object is that contains the value at `path`: at the first sequence on the
    way that is not taken apart."""
    return next((path[:i] for i in range(1, len(path)) if type(path[i]) is int and path[:i] not in apart), path)
