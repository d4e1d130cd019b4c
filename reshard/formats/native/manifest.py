"""The library's own format, version 1: safetensors data files and one JSON manifest, published last.

    manifest.json                              what is here: specs, layouts, files, objects
    data-<save id>/00000.safetensors           what rank 0 wrote
    data-<save id>/00000.safetensors.sums      a checksum for each MiB of it

Which rank wrote which region is not listed: it follows from the layouts by the same deterministic save plan that the
ranks wrote by. `docs/format.md` is the specification.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import xxhash

from planners.errors import PlanError
from planners.geometry.box import Box
from planners.geometry.byteruns import Window
from planners.geometry.dtypes import itemsize
from planners.geometry.layout import StateLayout
from planners.reports.codec import from_json
from planners.save.plan import SavePlan, plan_writes
from reshard.errors import CheckpointError, CheckpointNotFoundError, DamagedCheckpointError, FormatError
from reshard.formats.stored.contents import Contents, LazyMapping
from reshard.formats.stored.source import Files, FileSource
from reshard.formats.stored.tensor import LazyChunks, Place, StoredChunk, StoredTensor
from reshard.state.tree import decode_plain, key_of, path_from_json
from reshard.storage.base import Storage

__all__ = [
    "BLOCK_BYTES",
    "HF_INDEX",
    "MANIFEST",
    "VERSION",
    "FileRecord",
    "Manifest",
    "NativeFacts",
    "detect",
    "encode_manifest",
    "entry_key",
    "is_generation",
    "looks_for",
    "name",
    "open",
    "read_manifest",
]

name = "native"
looks_for = "manifest.json"

MANIFEST = "manifest.json"
HF_INDEX = "model.safetensors.index.json"
"""Beside the manifest, where one rank holds every tensor whole: for Hugging Face tools."""
VERSION = 1
BLOCK_BYTES = 1 << 20
"""Bytes of a data file that one checksum covers."""
_MAX_HEADER_BYTES = 1 << 30
_MAX_RANKS = 1 << 20
_MAX_ELEMENTS = 1 << 56
"""Their bytes, and those of some thousand replicas of them, can still be counted in 63 bits."""
_AXIS_SIZE = re.compile(r"=\s*(\d{1,30})")


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a manifest says of a data file."""

    name: str
    """Relative to the checkpoint's folder."""
    nbytes: int
    header_bytes: int
    """Length of the safetensors header, its 8 length bytes included."""
    sums: str
    """XXH3-128 of the sums file, in hex; that file has the name of the data file with `.sums` behind."""


def entry_key(fqn: str, box: Box, shape: Sequence[int]) -> str:
    """The name of a region of a tensor within a data file: the tensor's own where it is whole."""
    if box.sizes == tuple(shape):
        return fqn
    return f"{fqn}#{','.join(f'{o}:{o + s}' for o, s in zip(box.offsets, box.sizes))}"


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All of a checkpoint but its tensors' bytes. See `docs/format.md` for what each field means."""

    reshard: str = "checkpoint"
    version: int = VERSION
    save_id: str
    created_unix_s: float
    writer: str
    block_bytes: int = BLOCK_BYTES
    divide_above_bytes: int
    files: dict[str, FileRecord]
    """By the rank that wrote it, as text."""
    layout: dict[str, Any]
    paths: dict[str, list[Any]] = {}
    containers: list[tuple[list[Any], str]] = []
    objects: dict[str, Any] = {}
    per_rank: dict[str, dict[str, dict[str, Any]]] = {}
    """By key and rank: `{"tensor": name}` or `{"object": data}`."""
    aliases: dict[str, str] = {}
    fingerprints: dict[str, str] = {}
    subset: list[str] | None = None
    """The globs that chose what was saved, where that was not everything."""

    def __post_init__(self) -> None:
        """Raises ValueError, which becomes an error of the parser, for what no save writes."""
        if self.reshard != "checkpoint":
            raise ValueError(f"it is a {self.reshard!r}, not a checkpoint")
        if self.block_bytes < 1:
            raise ValueError(f"block_bytes must be >= 1, got {self.block_bytes}")
        rows = [(rank, row) for by_rank in self.per_rank.values() for rank, row in by_rank.items()]
        for rank in (*self.files, *(rank for rank, _ in rows)):
            if not (rank.isascii() and rank.isdigit() and len(rank) < 10):
                raise ValueError(f"{rank!r} is no rank")
        for rank, row in rows:
            if set(row) not in ({"tensor"}, {"object"}) or not isinstance(row.get("tensor", ""), str):
                raise ValueError(f"the value of rank {rank} is neither a tensor nor an object: {str(row)[:80]}")
        # what is damaged must not take all memory before it is found out
        forms = self.layout.get("forms")
        meshes = [f.get("mesh") for f in forms if isinstance(f, dict)] if isinstance(forms, list) else []
        sizes = [math.prod(map(int, _AXIS_SIZE.findall(mesh))) for mesh in meshes if isinstance(mesh, str)]
        world = self.layout.get("world_size")
        if max([*sizes, world if isinstance(world, int) else 0]) > _MAX_RANKS:
            raise ValueError(f"its layout has more than {_MAX_RANKS} ranks")
        tensors = self.layout.get("tensors")
        for row in tensors.values() if isinstance(tensors, dict) else ():
            shape = row[1] if isinstance(row, list) and len(row) > 1 and isinstance(row[1], list) else []
            if math.prod(max(size, 1) for size in shape if isinstance(size, int)) > _MAX_ELEMENTS:
                raise ValueError(f"a tensor of shape {str(shape)[:80]} has more than {_MAX_ELEMENTS} elements")


class NativeFacts(msgspec.Struct, frozen=True):
    """What `Contents.facts["native"]` holds."""

    storage: Storage
    manifest: Manifest
    plan: SavePlan
    sums: Mapping[str, bytes]
    """By file name: the block checksums, read and checked when first asked for."""


_GENERATION = re.compile(r"data-[0-9a-f]{12}-[0-9a-f]{12}/")
"""Files of a save, see `reshard.formats.native.generations`."""


def is_generation(folder: str) -> bool:
    """Whether a folder, by its name, belongs to a save."""
    return _GENERATION.fullmatch(f"{folder.rpartition('/')[2]}/") is not None


def detect(storage: Storage, names: Mapping[str, int]) -> bool:
    """Whether there is a manifest of ours, or data that we wrote beside a damaged one or none."""
    if any(_GENERATION.match(name) for name in names):
        return True
    if MANIFEST not in names:
        return False
    head = storage.read(MANIFEST, 0, min(names[MANIFEST], 64))
    return head.lstrip().startswith(b'{"reshard"') and b'"checkpoint"' in head


_DIGEST = b',"digest":"%b"}'
_DIGEST_BYTES = len(_DIGEST % bytes(32))


def encode_manifest(manifest: Manifest) -> bytes:
    """Its text, whose last field is a digest of all before it."""
    body = msgspec.json.encode(manifest)[:-1]
    return body + _DIGEST % xxhash.xxh3_128_hexdigest(body).encode()


def _undigested(data: bytes, where: str) -> bytes:
    """The text without its digest, which must fit; one without a digest, as older versions wrote it, as it is.

    Raises DamagedCheckpointError. What is so damaged that it does not look like a digest is an unknown field later on.
    """
    body, tail = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if not tail.startswith(_DIGEST[:11]):
        return data
    if tail != _DIGEST % xxhash.xxh3_128_hexdigest(body).encode():
        raise DamagedCheckpointError(
            f"{where} was changed since it was written: its digest is another one. Restore the file, or load another "
            'checkpoint; if it was edited on purpose, remove the field "digest"'
        )
    return body + b"}"


def read_manifest(storage: Storage) -> Manifest:
    """The manifest in `storage`.

    Raises CheckpointNotFoundError if there is none; FormatError for one of a newer version; DamagedCheckpointError for
    one that was changed, or is no manifest.
    """
    data = storage.read(MANIFEST)
    where = f"{storage.url.rstrip('/')}/{MANIFEST}"
    try:
        _check_version(data, where)
        return msgspec.json.decode(_undigested(data, where), type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DamagedCheckpointError(f"{where} is no whole manifest: {error}") from None
    except RecursionError:
        raise DamagedCheckpointError(f"{where} is nested too deeply to be a manifest") from None


def _check_version(data: bytes, where: str) -> None:
    version = msgspec.json.decode(data, type=_Version).version
    if version > VERSION:
        raise FormatError(f"{where} is of version {version}; this library knows up to {VERSION}: upgrade it")


def refuse_newer(data: bytes, where: str) -> None:
    """Raises FormatError for a manifest of a newer version, which must not be replaced by what knows less than it."""
    try:
        _check_version(data, where)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return  # a damaged one may be replaced


def is_replaced(native: NativeFacts) -> bool:
    """Whether a later save has taken the checkpoint's place since it was opened, or it was removed."""
    try:
        return read_manifest(native.storage).save_id != native.manifest.save_id
    except CheckpointNotFoundError:
        return True
    except CheckpointError:
        return False


class _Version(msgspec.Struct):
    version: int


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
        facts={
            "native": NativeFacts(storage, manifest, plan, files.sums),
            "per_rank": LazyMapping(
                {key: partial(_per_rank, rows, layout, plan, files) for key, rows in manifest.per_rank.items()}
            ),
        },
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
        self._headers: dict[int, dict[str, _HeaderEntry]] = {}
        self._lock = threading.Lock()

    def find(self, rank: int, key: str) -> tuple[FileSource, int, int]:
        """(file, first byte, one past the last byte) of an array."""
        record = self.records.get(rank)
        if record is None:
            raise DamagedCheckpointError(f"the manifest names no file of rank {rank}, which must hold {key!r}")
        source = self.sources[record.name]
        if rank not in self._headers:
            with self._lock:
                self._headers[rank] = _read_header(source, record)
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


class _HeaderEntry(msgspec.Struct):
    data_offsets: tuple[int, int] | None = None
    """None in the entry of the file's own metadata."""


def _read_header(source: FileSource, record: FileRecord) -> dict[str, _HeaderEntry]:
    if not 8 <= record.header_bytes <= min(record.nbytes, _MAX_HEADER_BYTES):
        raise DamagedCheckpointError(f"{source.label}: a header of {record.header_bytes} bytes does not fit the file")
    data = bytes(source.read(0, record.header_bytes))
    if int.from_bytes(data[:8], "little") != record.header_bytes - 8:
        raise DamagedCheckpointError(f"{source.label}: its header does not have the length that the manifest says")
    try:
        return msgspec.json.decode(data[8:], type=dict[str, _HeaderEntry])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{source.label}: its header is damaged: {error}") from None


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
