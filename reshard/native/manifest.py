"""The manifest of the native format: safetensors data files and one JSON manifest, published last."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from msgspec import UNSET, Meta, UnsetType

from planners.geometry.box import Box
from planners.geometry.layout import TensorSpec
from reshard.errors import CheckpointNotFoundError, CorruptCheckpointError, NewerVersionError
from reshard.storage.base import Storage
from reshard.version import __version__

#     manifest.json                              what is here: specs, layouts, files, objects
#     data-<save id>/00000.safetensors           what rank 0 wrote
#     data-<save id>/00000.safetensors.sums      a checksum for each 64 KiB of it
#
# In version 2, there can also be files of earlier saves that still contain some of the elements,
# and a table of many files.
#
# The manifest does not list which rank wrote which region: that follows from the layouts, by the
# deterministic save plan that the ranks used. `docs/format.md` is the specification.


MANIFEST = "manifest.json"
HF_INDEX = "model.safetensors.index.json"
"""Written beside the manifest for Hugging Face tools, if one rank holds every full tensor of a bare model."""
VERSION = 3
"""The newest version that can be read. A save writes the oldest version that can express it."""
STAGE_BYTES = 32 << 20
"""Default memory for elements that are not in row-major order or not on the CPU."""
BLOCK_BYTES = 64 << 10
"""Bytes of a data file per checksum."""
_MAX_HEADER_BYTES = 1 << 30
_MAX_RANKS = 1 << 20
_MAX_ELEMENTS = 1 << 56
"""Even with thousands of replicas, the number of their bytes fits in 63 bits."""
_AXIS_SIZE = re.compile(r"=\s*(\d{1,30})")
GENERATION = re.compile(r"data-[0-9a-f]{12}-[0-9a-f]{12}/")
"""Prefix of the files of a save: see `reshard.native.commit`."""
_FILE = re.compile(GENERATION.pattern + r"(?:from-[0-9a-f]{12}-[0-9a-f]{12}/)?\w[\w.-]*", re.ASCII)
"""The first checkpoints of version 2 have a subfolder for each earlier save."""

SaveId = Annotated[str, Meta(pattern=r"\A[0-9a-f]{12}-[0-9a-f]{12}\Z")]
FileName = Annotated[str, Meta(pattern=rf"\A(?a:{_FILE.pattern})\Z")]
Rank = Annotated[str, Meta(pattern=r"\A[0-9]{1,9}\Z")]
BlockBytes = Annotated[int, Meta(ge=1)]


class PartsRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The manifest's record of a table of parts: see `reshard.native.reader`."""

    name: FileName
    nbytes: int
    digest: str
    """XXH3-128 of the file, in hex."""


def entry_key(spec: TensorSpec, box: Box) -> str:
    """Return the key of a box of a tensor in a data file: the FQN for the full tensor."""
    if box.sizes == spec.shape:
        return spec.fqn
    return f"{spec.fqn}#{','.join(f'{o}:{o + s}' for o, s in zip(box.offsets, box.sizes))}"


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything in a checkpoint except the bytes of its tensors. See `docs/format.md` for the fields."""

    reshard: Literal["checkpoint"] = "checkpoint"
    version: int = 1
    save_id: SaveId
    created_unix_s: float
    writer: str = f"reshard {__version__}"
    block_bytes: BlockBytes = BLOCK_BYTES
    divide_above_bytes: int
    files: dict[Rank, FileRecord]
    """Rank -> the file with its arrays."""
    layout: dict[str, Any]
    paths: dict[str, list[Any]] = {}
    containers: list[tuple[list[Any], str]] = []
    objects: dict[str, Any] = {}
    per_rank: dict[str, dict[Rank, dict[str, Any]]] = {}
    """Key -> rank -> `{"tensor": name}` or `{"object": data}`."""
    aliases: dict[str, str] = {}
    fingerprints: dict[str, str] = {}
    subset: list[str] | None = None
    """If only a part of the state was saved: the globs that selected it."""
    parts: dict[Rank, PartsRecord] | UnsetType = UNSET
    """Version 2. By rank: what it did not write, because an earlier save contains it."""
    linked: list[LinkedRecord] | UnsetType = UNSET
    """Version 2. Data files of earlier saves, which are linked into this folder."""
    table: TableRecord | UnsetType = UNSET
    """Version 2. If there are many files: the table that lists them. `files` is then empty."""

    @property
    def tables(self) -> dict[str, PartsRecord]:
        """`parts`, or {} if every rank wrote all of its arrays."""
        return {} if self.parts is UNSET else self.parts

    def __post_init__(self) -> None:
        """Raise ValueError for values that no save writes. The parser turns it into its own error."""
        for rank, row in ((rank, row) for by_rank in self.per_rank.values() for rank, row in by_rank.items()):
            if set(row) not in ({"tensor"}, {"object"}) or not isinstance(row.get("tensor", ""), str):
                raise ValueError(f"the value of rank {rank} is neither a tensor nor an object: {str(row)[:80]}")
        # find damage before a damaged manifest can exhaust memory
        forms = self.layout.get("forms")
        meshes = [f.get("mesh") for f in forms if isinstance(f, dict)] if isinstance(forms, list) else []
        sizes = [math.prod(map(int, _AXIS_SIZE.findall(mesh))) for mesh in meshes if isinstance(mesh, str)]
        world = self.layout.get("world_size")
        if max([*sizes, world if isinstance(world, int) else 0]) > _MAX_RANKS:
            raise ValueError(f"its layout has more than {_MAX_RANKS} ranks")
        tensors = self.layout.get("tensors")
        if isinstance(tensors, dict) and not self.fingerprints.keys() <= tensors.keys():
            name = next(iter(self.fingerprints.keys() - tensors.keys()))
            raise ValueError(f"it has a fingerprint of {name!r:.80}, but no tensor of that name")
        for row in tensors.values() if isinstance(tensors, dict) else ():
            shape = row[1] if isinstance(row, list) and len(row) > 1 and isinstance(row[1], list) else []
            if math.prod(max(size, 1) for size in shape if isinstance(size, int)) > _MAX_ELEMENTS:
                raise ValueError(f"a tensor of shape {str(shape)[:80]} has more than {_MAX_ELEMENTS} elements")


CLAIM = "claim.json"
"""A file in a save's folder that says which process is writing there. The save removes it after it
publishes its manifest."""


def without_claim(names: Collection[str]) -> list[str]:
    """Return the folders with files of ended saves, sorted. A manifest names them or was lost."""
    data = {name.partition("/")[0] for name in names if _FILE.fullmatch(name)}
    return sorted(folder for folder in data if f"{folder}/{CLAIM}" not in names)


def is_generation(folder: str) -> bool:
    """Return True if a folder's name is that of a generation."""
    return GENERATION.fullmatch(f"{folder.rpartition('/')[2]}/") is not None


class _Version(msgspec.Struct):
    version: int


class _SaveId(msgspec.Struct):
    save_id: SaveId


_DIGEST_FIELD = b',"digest":"'
_DIGEST = _DIGEST_FIELD + b'%b"}'
_DIGEST_BYTES = len(_DIGEST % bytes(32))


T = TypeVar("T")


def encode_sealed(record: msgspec.Struct) -> bytes:
    """Encode a manifest or another small file as JSON. Its last field is a digest of everything before it."""
    body = msgspec.json.encode(record)[:-1]
    return body + _DIGEST % xxhash.xxh3_128_hexdigest(body).encode()


def decode_sealed(data: bytes, kind: type[T], where: str = "", newest: int | None = None) -> T:
    """Decode the output of `encode_sealed`. For manifests, see `read_manifest`.

    Raises msgspec.DecodeError, or its subclass ValidationError for a file of another kind. With
    `newest`, raises FormatError for a newer version, with `where` as the file's name, and accepts
    older versions without a digest.
    """
    body = data[:-_DIGEST_BYTES]
    tail = data[-_DIGEST_BYTES:]
    if not tail.startswith(_DIGEST_FIELD):
        found = msgspec.json.decode(data, type=kind)
        if newest is not None and msgspec.json.decode(data, type=_Version).version < newest:
            return found
        raise msgspec.DecodeError("its digest is missing")
    digest = xxhash.xxh3_128_hexdigest(body).encode()
    if tail != _DIGEST % digest:
        raise msgspec.DecodeError("it was changed since it was written: its digest differs")
    if newest is not None and (version := msgspec.json.decode(data, type=_Version).version) > newest:
        raise _newer(where, version, newest)
    return msgspec.json.decode(body + b"}", type=kind)


def _newer(where: str, version: int, newest: int) -> NewerVersionError:
    return NewerVersionError(
        f"{where} has format version {version}, but this reshard reads up to version {newest}: upgrade reshard"
    )


def has_digest(storage: Storage) -> bool:
    """Return True if the manifest has a digest of itself. Older versions have none."""
    return storage.read(MANIFEST)[-_DIGEST_BYTES:].startswith(_DIGEST_FIELD)


def published(storage: Storage) -> str | None:
    """Return the id of the current save, or None if there is no manifest. Other errors: see
    `read_manifest`.

    If the digest matches, only the id is decoded: there may be a million tensors.
    """
    try:
        found: str = read_manifest(storage, _SaveId).save_id
    except CheckpointNotFoundError:
        return None
    return found


def read_manifest(storage: Storage, kind: Any = Manifest) -> Any:
    """Return the manifest in `storage`, or only the fields of `kind`. Checks the digest.

    A manifest without a digest, from older versions, is decoded completely. If damage hides the
    digest, it appears as an unknown field.

    Raises CheckpointNotFoundError if there is no manifest. Raises FormatError if its version is
    newer. Raises CorruptCheckpointError if it was changed or is not a manifest.
    """
    data, where = storage.read(MANIFEST), f"{storage.url.rstrip('/')}/{MANIFEST}"
    try:
        version = msgspec.json.decode(data, type=_Version).version
        if version > VERSION:
            raise _newer(where, version, VERSION)
        body, tail = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
        if not tail.startswith(_DIGEST_FIELD):
            return msgspec.json.decode(data, type=Manifest)
        if tail != _DIGEST % xxhash.xxh3_128_hexdigest(body).encode():
            raise CorruptCheckpointError(
                f"{where} was changed since it was written: its digest differs. Restore the file, or load "
                'another checkpoint; if it was edited on purpose, remove the field "digest"'
            )
        return msgspec.json.decode(body + b"}", type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptCheckpointError(
            f"{where} is truncated or damaged, with {len(data):,} bytes: {error}. Restore the file, or load another "
            "checkpoint"
        ) from None
    except RecursionError:
        raise CorruptCheckpointError(
            f"{where} is nested too deeply to be a manifest. Restore the file, or load another checkpoint"
        ) from None


def refuse_newer(storage: Storage) -> None:
    """Raise FormatError if the manifest has a newer version: an older release must not replace it."""
    with suppress(CorruptCheckpointError):  # a damaged manifest may be replaced
        read_manifest(storage, _Version)


# Records of data files: the manifest lists few files itself. Many are in a table beside it, which
# is read by page.
#
#     manifest.json             which ranks' files there are, and a digest of each page
#     data-<save id>/files      256 rows | 256 rows | ...    a row is lengths of a file and of its header, and a digest
#
# So a process that opens a checkpoint of 16,384 ranks reads only the pages that it needs: one page
# for one file.


FEW_FILES = 256
"""The manifest itself lists at most this many files."""
PAGE_ROWS = 256
_ROW = np.dtype([("nbytes", "<u8"), ("header_bytes", "<u8"), ("sums", "V16")])
_PAGE_BYTES = PAGE_ROWS * _ROW.itemsize
_HEX = 16
"""Hex digits of a page's digest."""


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The manifest's record of a data file."""

    name: FileName
    """Relative to the checkpoint's folder."""
    nbytes: int
    header_bytes: int
    """Length of the safetensors header, including the 8 bytes of its length."""
    sums: str
    """XXH3-128 of the sums file, in hex. Its name is that of the data file with `.sums` appended."""

    def block_bytes_or(self, others: int) -> int:
        """Return the bytes per checksum of this file. `others` is the manifest's value for all files."""
        return others


class LinkedRecord(FileRecord, frozen=True, forbid_unknown_fields=True):
    """The manifest's record of an earlier save's data file."""

    live_bytes: int
    """Bytes that are elements of this checkpoint."""
    block_bytes: BlockBytes | UnsetType = UNSET
    """Bytes per checksum, if it differs from that of the other files (version 3)."""

    def block_bytes_or(self, others: int) -> int:
        return others if self.block_bytes is UNSET else self.block_bytes


class TableRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The manifest's record of a table of data files."""

    name: FileName
    ranks: list[tuple[int, int, int]]
    """Ranks that the files are named after, as runs (first, step, count), ascending."""
    pages: str
    """XXH3-64 of each page, in hex, concatenated."""

    def __post_init__(self) -> None:
        """Raise ValueError if the ranks do not ascend or a page has no digest."""
        last = -1
        for first, step, count in self.ranks:
            if first <= last or step < 1 or not 1 <= count <= 1 << 20:
                raise ValueError(f"the ranks of its table do not ascend: {first}, and {count} by {step} from there")
            last = first + step * (count - 1)
        if len(self.pages) != _HEX * -(-self.rows // PAGE_ROWS):
            raise ValueError("its table of files lacks digests of pages")

    @property
    def rows(self) -> int:
        """Number of files."""
        return sum(count for _, _, count in self.ranks)

    @property
    def nbytes(self) -> int:
        """Size of the table."""
        return self.rows * _ROW.itemsize


def encode_table(name: str, records: Mapping[int, FileRecord]) -> tuple[TableRecord, bytes]:
    """Return the table of these files, by ascending rank, and its record for the manifest."""
    rows = [(record.nbytes, record.header_bytes, bytes.fromhex(record.sums)) for record in records.values()]
    data = np.array(rows, dtype=_ROW).tobytes()
    pages = (data[at : at + _PAGE_BYTES] for at in range(0, len(data), _PAGE_BYTES))
    return TableRecord(name, _runs(list(records)), "".join(map(xxhash.xxh3_64_hexdigest, pages))), data


def _runs(ranks: Sequence[int]) -> list[tuple[int, int, int]]:
    runs: list[tuple[int, int, int]] = []
    for rank in ranks:
        if runs:
            first, step, count = runs[-1]
            if count == 1 or rank == first + step * count:
                runs[-1] = (first, rank - first if count == 1 else step, count + 1)
                continue
        runs.append((rank, 1, 1))
    return runs


class FileTable(Mapping[str, FileRecord]):
    """All data files of a checkpoint with a table, by name: those of its ranks, in order, and those
    of earlier saves.

    Reads each page when first needed. Raises CorruptCheckpointError for a page that was changed.
    """

    def __init__(self, storage: Storage, table: TableRecord, linked: Iterable[LinkedRecord] = ()) -> None:
        self._storage, self._table = storage, table
        self._linked = {record.name: record for record in linked}
        self._pages: dict[int, npt.NDArray[np.void]] = {}
        self._ranks = [rank for first, step, n in table.ranks for rank in range(first, first + step * n, step)]
        self._folder = table.name.rpartition("/")[0]

    def _name(self, row: int) -> str:
        return f"{self._folder}/{self._ranks[row]:05d}.safetensors"

    def _row_of(self, name: object) -> int | None:
        stem = str(name).rpartition("/")[2].partition(".")[0]
        row = bisect_right(self._ranks, int(stem)) - 1 if stem.isdecimal() else -1
        return row if row >= 0 and self._name(row) == name else None

    def of_rank(self, rank: int) -> FileRecord | None:
        """Return the file with the arrays of a rank, or None. A file that several ranks wrote is
        named after the first."""
        row = bisect_right(self._ranks, rank) - 1
        return self._at(row) if row >= 0 else None

    def __getitem__(self, name: str) -> FileRecord:
        row = self._row_of(name)
        return self._linked[name] if row is None else self._at(row)

    def __contains__(self, name: object) -> bool:
        return name in self._linked or self._row_of(name) is not None

    def __iter__(self) -> Iterator[str]:
        yield from map(self._name, range(len(self._ranks)))
        yield from self._linked

    def __len__(self) -> int:
        return len(self._ranks) + len(self._linked)

    def _at(self, row: int) -> FileRecord:
        page, at = divmod(row, PAGE_ROWS)
        if page not in self._pages:
            self._pages[page] = self._read(page)
        found = self._pages[page][at]
        sums = found["sums"].tobytes().hex()
        return FileRecord(self._name(row), int(found["nbytes"]), int(found["header_bytes"]), sums)

    def _read(self, page: int) -> npt.NDArray[np.void]:
        start = page * _PAGE_BYTES
        data = self._storage.read(self._table.name, start, min(_PAGE_BYTES, self._table.nbytes - start))
        if xxhash.xxh3_64_hexdigest(data) != self._table.pages[page * _HEX : (page + 1) * _HEX]:
            where = f"the block of bytes [{start}, {start + len(data)}) of {self._table.name}"
            raise CorruptCheckpointError(f"{self._storage.url}: {where} was changed since it was written")
        return np.frombuffer(data, dtype=_ROW)
