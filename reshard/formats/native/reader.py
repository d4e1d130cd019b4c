"""Reads the library's own format: which file holds which region follows from the layouts, as it did for the writers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import xxhash

from planners.errors import PlanError
from planners.geometry.box import Box
from planners.geometry.byteruns import Window
from planners.geometry.dtypes import itemsize
from planners.geometry.layout import StateLayout
from planners.reports.codec import from_json
from planners.save.plan import SavePlan, plan_writes
from reshard.errors import CheckpointError, CheckpointNotFoundError, DamagedCheckpointError, FormatError
from reshard.formats.native.manifest import GENERATION, MANIFEST, FileRecord, Manifest, entry_key, read_manifest
from reshard.formats.safetensors.header import Offsets, read_offsets
from reshard.formats.stored.contents import Contents, Facts, LazyMapping
from reshard.formats.stored.source import Files, FileSource
from reshard.formats.stored.tensor import LazyChunks, Place, StoredChunk, StoredTensor
from reshard.state.plain_data import decode_plain
from reshard.state.tree import key_of, path_from_json
from reshard.storage.base import Storage

__all__ = ["NativeFacts", "detect", "is_replaced", "looks_for", "name", "open"]

name = "native"
looks_for = "manifest.json"


@dataclass(frozen=True)
class NativeFacts(Facts):
    """What a load needs of a checkpoint of ours beyond its contents."""

    storage: Storage
    manifest: Manifest
    plan: SavePlan
    sums: Mapping[str, bytes]
    """By file name: the block checksums, read and checked when first asked for."""


def detect(storage: Storage, names: Mapping[str, int]) -> bool:
    """Whether there is a manifest of ours, or data that we wrote beside a damaged one or none."""
    if any(GENERATION.match(name) for name in names):
        return True
    if MANIFEST not in names:
        return False
    head = storage.read(MANIFEST, 0, min(names[MANIFEST], 64))
    return head.lstrip().startswith(b'{"reshard"') and b'"checkpoint"' in head


def is_replaced(native: NativeFacts) -> bool:
    """Whether a later save has taken the checkpoint's place since it was opened, or it was removed."""
    try:
        return read_manifest(native.storage).save_id != native.manifest.save_id
    except CheckpointNotFoundError:
        return True
    except CheckpointError:
        return False


def open(storage: Storage, names: Mapping[str, int]) -> Contents:
    """The checkpoint.

    Raises DamagedCheckpointError, naming the file, if a file is missing or of another length; CheckpointNotFoundError
    if no save was ever finished here.
    """
    if MANIFEST not in names:
        raise CheckpointNotFoundError(
            f"there is no {MANIFEST} in {storage.url}: a save was killed before it was whole, or is still running"
        )
    manifest = read_manifest(storage)
    for record in manifest.files.values():
        blocks = -(-record.nbytes // manifest.block_bytes)
        for file, nbytes in ((record.name, record.nbytes), (f"{record.name}.sums", 8 * blocks)):
            if names.get(file) != nbytes:
                found = f"it has {names[file]} bytes" if file in names else "it is missing"
                raise DamagedCheckpointError(f"{storage.url}: {file} must have {nbytes} bytes, but {found}")
    try:
        layout = from_json({"reshard": "state_layout", "version": 1, **manifest.layout})
        plan = plan_writes(layout, divide_above_bytes=manifest.divide_above_bytes)
        paths = {key: path_from_json(path) for key, path in manifest.paths.items()}
        objects = {key: decode_plain(data) for key, data in manifest.objects.items()}
    except (PlanError, FormatError) as error:
        raise DamagedCheckpointError(f"{storage.url}/{MANIFEST} contradicts itself: {error}") from error
    if other := [key for key, path in paths.items() if key_of(path) != key]:
        raise DamagedCheckpointError(
            f"{storage.url}/{MANIFEST} contradicts itself: {other[0]!r} is said to be at {key_of(paths[other[0]])!r}"
        )
    files = _DataFiles(storage, manifest)
    hidden = {row["tensor"] for rows in manifest.per_rank.values() for row in rows.values() if "tensor" in row}
    if absent := [*(hidden - set(layout)), *(name for name in manifest.aliases.values() if name not in layout)]:
        raise DamagedCheckpointError(
            f"{storage.url}/{MANIFEST} contradicts itself: it speaks of {absent[0]!r}, which it does not describe"
        )
    return Contents(
        format=name,
        tensors=LazyMapping({fqn: partial(_tensor, fqn, layout, plan, files) for fqn in layout if fqn not in hidden}),
        objects=objects,
        aliases=manifest.aliases,
        paths=paths,
        containers={path_from_json(path): kind for path, kind in manifest.containers},
        facts=NativeFacts(storage, manifest, plan, files.sums),
        per_rank=LazyMapping(
            {key: partial(_per_rank, rows, layout, plan, files) for key, rows in manifest.per_rank.items()}
        ),
        fingerprints=manifest.fingerprints or None,
        subset=None if manifest.subset is None else tuple(manifest.subset),
    )


def _per_rank(rows: Mapping[str, Any], layout: StateLayout, plan: SavePlan, files: _DataFiles) -> dict[int, Any]:
    """rank -> StoredTensor or plain object."""
    out: dict[int, Any] = {}
    for rank, row in rows.items():
        if "tensor" in row:
            out[int(rank)] = _tensor(row["tensor"], layout, plan, files)
        else:
            out[int(rank)] = decode_plain(row.get("object"))
    return out


class _DataFiles:
    """The data files of a checkpoint, their headers and checksums, each read when first needed."""

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self.sources = Files(storage)
        self.records = {int(rank): record for rank, record in manifest.files.items()}
        self.sums = LazyMapping({r.name: partial(_sums, storage, r) for r in manifest.files.values()})
        self._headers: dict[int, dict[str, Offsets]] = {}
        self._lock = threading.Lock()

    def find(self, rank: int, key: str) -> tuple[FileSource, int, int]:
        """(file, first byte, one past the last byte) of an array."""
        record = self.records.get(rank)
        if record is None:
            raise DamagedCheckpointError(f"the manifest names no file of rank {rank}, which must hold {key!r}")
        source = self.sources[record.name]
        if rank not in self._headers:
            with self._lock:
                self._headers[rank] = read_offsets(source, record.header_bytes)
        entry = self._headers[rank].get(key)
        if entry is None or entry.data_offsets is None:
            raise DamagedCheckpointError(f"{source.label} must hold {key!r}, but its header does not name it")
        start, stop = (record.header_bytes + offset for offset in entry.data_offsets)
        if not record.header_bytes <= start <= stop <= record.nbytes:
            raise DamagedCheckpointError(f"{source.label}: {key!r} lies outside the file, at bytes [{start}, {stop})")
        return source, start, stop


def _sums(storage: Storage, record: FileRecord) -> bytes:
    data = storage.read(f"{record.name}.sums")
    if xxhash.xxh3_128_hexdigest(data) != record.sums:
        raise DamagedCheckpointError(f"{storage.url}: {record.name}.sums was changed since it was written")
    return data


def _tensor(fqn: str, layout: StateLayout, plan: SavePlan, files: _DataFiles) -> StoredTensor:
    tensor = layout[fqn]
    size = itemsize(tensor.spec.dtype)
    shape = tensor.spec.shape
    made: dict[Box, StoredChunk] = {}

    def chunk_at(rank: int, box: Box) -> StoredChunk:
        if box not in made:
            place: Callable[[], Place] = partial(_locate, files, rank, fqn, box, shape, size)
            made[box] = StoredChunk(box, place, rank)
        return made[box]

    def every() -> Iterator[StoredChunk]:
        for _, chunk in tensor.chunks():
            yield from (chunk_at(rank, box) for rank, box in plan.writers(fqn, chunk) if chunk.contains(box))

    def near(box: Box) -> Iterator[StoredChunk]:
        return (chunk_at(rank, found) for rank, found in plan.writers_near(fqn, box))

    return StoredTensor(tensor.spec, LazyChunks(every, near), tensor)


def _locate(files: _DataFiles, rank: int, fqn: str, box: Box, shape: tuple[int, ...], size: int) -> Place:
    key = entry_key(fqn, box, shape)
    source, start, stop = files.find(rank, key)
    if stop - start != box.numel * size:
        raise DamagedCheckpointError(
            f"{source.label}: {key!r} has {stop - start} bytes, but {box} of {size}-byte elements is {box.numel * size}"
        )
    return Place(source, Window.row_major(start, box.sizes, size))
