"""The library's own format: safetensors data files and one JSON manifest, published last.

    manifest.json                              what is here: specs, layouts, files, objects
    data-<save id>/00000.safetensors           what rank 0 wrote
    data-<save id>/00000.safetensors.sums      a checksum for each MiB of it

Version 2 has, beside these, files of earlier saves that still hold some of the elements, or a table of many files.

Which rank wrote which region is not listed: it follows from the layouts by the same deterministic save plan that the
ranks wrote by. `docs/format.md` is the specification.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import xxhash
from msgspec import UNSET, UnsetType

from planners.geometry.box import Box
from reshard.errors import DamagedCheckpointError, NewerVersionError
from reshard.formats.native.file_table import FileRecord, LinkedRecord, TableRecord
from reshard.formats.native.release import __version__
from reshard.storage.base import Storage

__all__ = [
    "BLOCK_BYTES",
    "HF_INDEX",
    "MANIFEST",
    "VERSION",
    "Manifest",
    "PartsRecord",
    "encode_manifest",
    "entry_key",
    "has_digest",
    "is_generation",
    "read_manifest",
    "refuse_newer",
]

MANIFEST = "manifest.json"
HF_INDEX = "model.safetensors.index.json"
"""Beside the manifest, where one rank holds every tensor whole: for Hugging Face tools."""
VERSION = 3
"""The newest that is known. Written is the oldest that says everything."""
BLOCK_BYTES = 64 << 10
"""Bytes of a data file that one checksum covers."""
_MAX_HEADER_BYTES = 1 << 30
_MAX_RANKS = 1 << 20
_MAX_ELEMENTS = 1 << 56
"""Their bytes, and those of some thousand replicas of them, can still be counted in 63 bits."""
_AXIS_SIZE = re.compile(r"=\s*(\d{1,30})")


class PartsRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a manifest says of a table of parts: see `reshard.formats.native.parts`."""

    name: str
    nbytes: int
    digest: str
    """XXH3-128 of the file, in hex."""


def entry_key(fqn: str, box: Box, shape: Sequence[int]) -> str:
    """The name of a region of a tensor within a data file: the tensor's own where it is whole."""
    if box.sizes == tuple(shape):
        return fqn
    return f"{fqn}#{','.join(f'{o}:{o + s}' for o, s in zip(box.offsets, box.sizes))}"


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All of a checkpoint but its tensors' bytes. See `docs/format.md` for what each field means."""

    reshard: str = "checkpoint"
    version: int = 1
    save_id: str
    created_unix_s: float
    writer: str = f"reshard {__version__}"
    block_bytes: int = BLOCK_BYTES
    divide_above_bytes: int
    files: dict[str, FileRecord]
    """By the rank that has arrays in it, as text."""
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
    parts: dict[str, PartsRecord] | UnsetType = UNSET
    """By rank: what it did not write, since an earlier save has it. Of version 2, as is the next."""
    linked: list[LinkedRecord] | UnsetType = UNSET
    """Data files of earlier saves, which are in this folder, too."""
    table: TableRecord | UnsetType = UNSET
    """Of version 2, too: where there are many files, a table has them, and `files` is empty."""

    @property
    def tables(self) -> dict[str, PartsRecord]:
        """`parts`, {} where every rank has written all that is its."""
        return {} if self.parts is UNSET else self.parts

    def __post_init__(self) -> None:
        """Raises ValueError, which becomes an error of the parser, for what no save writes."""
        if self.reshard != "checkpoint":
            raise ValueError(f"it is a {self.reshard!r}, not a checkpoint")
        if self.block_bytes < 1:
            raise ValueError(f"block_bytes must be >= 1, got {self.block_bytes}")
        rows = [(rank, row) for by_rank in self.per_rank.values() for rank, row in by_rank.items()]
        for rank in (*self.files, *self.tables, *(rank for rank, _ in rows)):
            if not (rank.isascii() and rank.isdigit() and len(rank) < 10):
                raise ValueError(f"{rank!r} is no rank")
        for rank, row in rows:
            if set(row) not in ({"tensor"}, {"object"}) or not isinstance(row.get("tensor", ""), str):
                raise ValueError(f"the value of rank {rank} is neither a tensor nor an object: {str(row)[:80]}")
        _check_save_id(self.save_id)
        linked = () if self.linked is UNSET else self.linked
        table = () if self.table is UNSET else (self.table,)
        for record in (*self.files.values(), *linked, *self.tables.values(), *table):
            if not _FILE.fullmatch(record.name):
                raise ValueError(f"{record.name!r} is no name of a file of a save: data-<save id>/<file>")
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


GENERATION = re.compile(r"data-[0-9a-f]{12}-[0-9a-f]{12}/")
"""Files of a save, see `reshard.formats.native.generations`."""


_SAVE_ID = re.compile(r"[0-9a-f]{12}-[0-9a-f]{12}")
_FILE = re.compile(GENERATION.pattern + r"(?:from-[0-9a-f]{12}-[0-9a-f]{12}/)?\w[\w.-]*", re.ASCII)
"""The first checkpoints of version 2 have a folder for each earlier save."""


def _check_save_id(save_id: str) -> None:
    if not _SAVE_ID.fullmatch(save_id):
        raise ValueError(f"{save_id!r:.80} is no save id: 12 hex digits, '-', 12 hex digits")


def is_generation(folder: str) -> bool:
    """Whether a folder, by its name, belongs to a save."""
    return GENERATION.fullmatch(f"{folder.rpartition('/')[2]}/") is not None


class _Version(msgspec.Struct):
    version: int


class _SaveId(msgspec.Struct):
    save_id: str

    def __post_init__(self) -> None:
        """Raises ValueError, which becomes an error of the parser."""
        _check_save_id(self.save_id)


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
    if not _is_digested(data):
        return data
    body, tail = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if tail != _DIGEST % xxhash.xxh3_128_hexdigest(body).encode():
        raise DamagedCheckpointError(
            f"{where} was changed since it was written: its digest is another one. Restore the file, or load another "
            'checkpoint; if it was edited on purpose, remove the field "digest"'
        )
    return body + b"}"


def has_digest(storage: Storage) -> bool:
    """Whether the manifest has a digest of itself, which those of older versions lack."""
    return _is_digested(storage.read(MANIFEST))


def _is_digested(data: bytes) -> bool:
    return data[-_DIGEST_BYTES:].startswith(_DIGEST[:11])


def read_manifest(storage: Storage) -> Manifest:
    """The manifest in `storage`.

    Raises CheckpointNotFoundError if there is none; FormatError for one of a newer version; DamagedCheckpointError for
    one that was changed, or is no manifest.
    """
    found: Manifest = _taken_apart(storage.read(MANIFEST), f"{storage.url.rstrip('/')}/{MANIFEST}")
    return found


def read_save_id(storage: Storage) -> str:
    """Of the manifest in `storage`, with the errors of `read_manifest`. What its digest says to be as it was written
    is not taken apart for it: there may be a million tensors."""
    data = storage.read(MANIFEST)
    where = f"{storage.url.rstrip('/')}/{MANIFEST}"
    found: str = _taken_apart(data, where, _SaveId if _is_digested(data) else Manifest).save_id
    return found


def _taken_apart(data: bytes, where: str, kind: Any = Manifest) -> Any:
    try:
        _check_version(data, where)
        return msgspec.json.decode(_undigested(data, where), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DamagedCheckpointError(f"{where} is no whole manifest: {error}") from None
    except RecursionError:
        raise DamagedCheckpointError(f"{where} is nested too deeply to be a manifest") from None


def _check_version(data: bytes, where: str) -> None:
    version = msgspec.json.decode(data, type=_Version).version
    if version > VERSION:
        raise NewerVersionError(f"{where} is of version {version}; this library knows up to {VERSION}: upgrade it")


def refuse_newer(data: bytes, where: str) -> None:
    """Raises FormatError for a manifest of a newer version, which must not be replaced by what knows less than it."""
    try:
        _check_version(data, where)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return  # a damaged one may be replaced
