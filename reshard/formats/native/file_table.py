"""The data files of a checkpoint: few are listed in the manifest, many in a table beside it, of which one reads a page.

    manifest.json             which ranks' files there are, and a digest of each page
    data-<save id>/files      256 rows | 256 rows | ...    a row is lengths of a file and of its header, and a digest

So who opens the checkpoint of 16,384 ranks reads of the table what it needs: one page for one file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from msgspec import UNSET, UnsetType

from reshard.errors import DamagedCheckpointError
from reshard.storage.base import Storage

__all__ = ["FEW_FILES", "FileRecord", "FileRecords", "LinkedRecord", "TableRecord", "encode_table"]

FEW_FILES = 256
"""So many are listed in the manifest itself."""
_PAGE_ROWS = 256
_ROW = np.dtype([("nbytes", "<u8"), ("header_bytes", "<u8"), ("sums", "V16")])
_PAGE_BYTES = _PAGE_ROWS * _ROW.itemsize
_HEX = 16
"""Digits of a page's digest."""


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a manifest says of a data file."""

    name: str
    """Relative to the checkpoint's folder."""
    nbytes: int
    header_bytes: int
    """Length of the safetensors header, its 8 length bytes included."""
    sums: str
    """XXH3-128 of the sums file, in hex; that file has the name of the data file with `.sums` behind."""

    def block_bytes_or(self, others: int) -> int:
        """Bytes that one of its checksums covers, where the manifest says `others` of all files."""
        return others


class LinkedRecord(FileRecord, frozen=True, forbid_unknown_fields=True):
    """What a manifest says of an earlier save's data file."""

    live_bytes: int
    """How many of its bytes are elements of this checkpoint."""
    block_bytes: int | UnsetType = UNSET
    """Where its checksums cover other blocks than those of the files beside it: of version 3."""

    def __post_init__(self) -> None:
        """Raises ValueError for blocks without bytes."""
        if self.block_bytes is not UNSET and self.block_bytes < 1:
            raise ValueError(f"block_bytes must be >= 1, got {self.block_bytes}")

    def block_bytes_or(self, others: int) -> int:
        return others if self.block_bytes is UNSET else self.block_bytes


class TableRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a manifest says of a table of data files."""

    name: str
    ranks: list[tuple[int, int, int]]
    """By whose number the files are called: runs (first, step, how many), ascending."""
    pages: str
    """XXH3-64 of each page, in hex, one behind another."""

    def __post_init__(self) -> None:
        """Raises ValueError for ranks that do not ascend, or without a digest for each of their pages."""
        last = -1
        for first, step, count in self.ranks:
            if first <= last or step < 1 or not 1 <= count <= 1 << 20:
                raise ValueError(f"the ranks of its table do not ascend: {first}, and {count} by {step} from there")
            last = first + step * (count - 1)
        if len(self.pages) != _HEX * -(-self.rows // _PAGE_ROWS):
            raise ValueError("its table of files lacks digests of pages")

    @property
    def rows(self) -> int:
        """How many files there are."""
        return sum(count for _, _, count in self.ranks)

    @property
    def nbytes(self) -> int:
        """Of the table."""
        return self.rows * _ROW.itemsize


def encode_table(name: str, records: Mapping[int, FileRecord]) -> tuple[TableRecord, bytes]:
    """The table of the files that are called by these ranks, ascending, and what the manifest says of it."""
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


class FileRecords(Mapping[str, FileRecord]):
    """All data files of a checkpoint by name: those that its ranks wrote, in their order, and those of earlier saves.

    Reads of the table what is asked for, once. Raises DamagedCheckpointError for a page that was changed.
    """

    def __init__(
        self,
        storage: Storage,
        listed: Mapping[int, FileRecord],
        linked: Iterable[LinkedRecord] = (),
        table: TableRecord | None = None,
    ) -> None:
        """`listed` are by the rank that has arrays in them."""
        self._storage, self._listed, self._table = storage, listed, table
        self._known = {record.name: record for record in (*listed.values(), *linked)}
        self._pages: dict[int, npt.NDArray[np.void]] = {}
        runs = () if table is None else table.ranks
        self._ranks = [rank for first, step, count in runs for rank in range(first, first + step * count, step)]
        self._folder = "" if table is None else table.name.rpartition("/")[0]

    def _name(self, row: int) -> str:
        return f"{self._folder}/{self._ranks[row]:05d}.safetensors"

    def _row_of(self, name: object) -> int | None:
        stem = str(name).rpartition("/")[2].partition(".")[0]
        row = bisect_right(self._ranks, int(stem)) - 1 if stem.isdecimal() else -1
        return row if row >= 0 and self._name(row) == name else None

    def of_rank(self, rank: int) -> FileRecord | None:
        """The file that has the arrays of a rank, if any has: one that several ranks wrote is called by the first."""
        if self._table is None:
            return self._listed.get(rank)
        row = bisect_right(self._ranks, rank) - 1
        return self._at(row) if row >= 0 else None

    def __getitem__(self, name: str) -> FileRecord:
        row = self._row_of(name)
        return self._known[name] if row is None else self._at(row)

    def __contains__(self, name: object) -> bool:
        return name in self._known or self._row_of(name) is not None

    def __iter__(self) -> Iterator[str]:
        yield from map(self._name, range(len(self._ranks)))
        yield from self._known

    def __len__(self) -> int:
        return len(self._ranks) + len(self._known)

    def _at(self, row: int) -> FileRecord:
        page, at = divmod(row, _PAGE_ROWS)
        if page not in self._pages:
            self._pages[page] = self._read(page)
        found = self._pages[page][at]
        sums = found["sums"].tobytes().hex()
        return FileRecord(self._name(row), int(found["nbytes"]), int(found["header_bytes"]), sums)

    def _read(self, page: int) -> npt.NDArray[np.void]:
        assert self._table is not None
        start = page * _PAGE_BYTES
        data = self._storage.read(self._table.name, start, min(_PAGE_BYTES, self._table.nbytes - start))
        if xxhash.xxh3_64_hexdigest(data) != self._table.pages[page * _HEX : (page + 1) * _HEX]:
            where = f"bytes [{start}, {start + len(data)}) of {self._table.name}"
            raise DamagedCheckpointError(f"{self._storage.url}: {where} were changed since they were written")
        return np.frombuffer(data, dtype=_ROW)
