"""Reads into targets, and checks each piece while it is still in a cache."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from planners.geometry.arrays import Ints, grouped, ints, zeros
from planners.geometry.box import Range
from planners.geometry.byte_ranges import merge_ranges, subtract_ranges
from reshard.errors import CorruptCheckpointError, StorageError, format_names
from reshard.execute.reading import ComparePlan, Copy, on_threads
from reshard.execute.work_list import COPY, ENTRY, Kind, Memory, WorkList
from reshard.live.compiled_kernel import kernel
from reshard.stored.checksums import BlockChecksums
from reshard.stored.source import FileSource, OnBytes

#     READ a piece of a file into its target | COMPARE its blocks there | READ the next piece ...
#
# So each byte comes from memory once, where checking before writing takes it from there twice.


_PIECE_BYTES = 256 << 10
"""Smaller copies are checked before they are read. Pieces are larger only if a checksum block is."""
_LOTS_A_THREAD = 8


class _TargetPiece(NamedTuple):
    """Bytes [start, stop) of a file, and the target that they belong to."""

    copy: Copy
    source: FileSource
    start: int
    stop: int
    is_compared: bool

    def target(self) -> memoryview:
        """The memory of the piece."""
        first = self.start - self.copy.place.window.offset
        assert isinstance(self.copy.out, np.ndarray)
        return memoryview(cast("Any", self.copy.out.reshape(-1).view(np.uint8)))[first : first + self.stop - self.start]

    def read(self) -> None:
        """Read without the kernel's list. Raises CorruptCheckpointError for a file that ends early."""
        self.source.read_directly(self.start, self.target())

    def compare(self) -> None:
        """Raise CorruptCheckpointError for the first changed block."""
        self.source.compare_data(self.start, self.target())


@dataclass(frozen=True)
class InPlace:
    """Copies that are contiguous on both sides, with the ranges that are compared as they are read."""

    copies: Sequence[tuple[Copy, list[Range]]]

    @classmethod
    def out_of(cls, plan: ComparePlan, copies: Sequence[Copy], for_others: Mapping[FileSource, Ints]) -> InPlace:
        """Take the copies that alone use many blocks of the plan, and remove these blocks from the
        plan. Blocks that other ranks rely on stay."""
        stays = {file: np.ones(len(blocks), np.bool_) for file, blocks in plan.blocks.items()}
        free = {file: rows.copy() for file, rows in stays.items()}
        for file, ranges in for_others.items():
            if file in free and isinstance(sums := file.checksums, BlockChecksums):
                free[file] = ~sums.are_among(sums.within(ranges), *plan.blocks[file].T)
        chosen = []
        for copy in copies:
            source, window, out = copy.place.source, copy.place.window, copy.out
            if not isinstance(source, FileSource) or source not in free or copy.place.conjugate:
                continue
            is_run = isinstance(out, np.ndarray) and out.flags.c_contiguous and window.runs().count == 1
            if not is_run or not isinstance(source.checksums, BlockChecksums):
                continue
            bounds = source.checksums.inside(window.offset, window.stop)
            some = slice(*np.searchsorted(plan.blocks[source][:, 0], bounds).tolist())
            taken = plan.blocks[source][some][free[source][some]]
            if (taken[:, 1] - taken[:, 0]).sum() >= _PIECE_BYTES:
                stays[source][some] &= ~free[source][some]
                free[source][some] = False
                chosen.append((copy, merge_ranges(map(tuple, taken.tolist()))))
        for file, rows in stays.items():
            plan.blocks[file] = plan.blocks[file][rows]
        return cls(sorted(chosen, key=lambda row: (row[0].place.source.label, row[0].place.window.offset)))

    def run(self, threads: int, overwritten: set[str], on_bytes: OnBytes) -> int:
        """Read and compare everything. Return the bytes that were read.

        Args:
            overwritten: the names of targets that were already written to.
            on_bytes: called with the bytes of each batch, several times a second. It may raise to
            end the run.

        Raises CorruptCheckpointError or StorageError, which says what was overwritten.
        """
        pieces = [piece for copy, compared in self.copies for piece in _pieces(copy, compared)]
        step = max(1, len(pieces) // (threads * _LOTS_A_THREAD))

        def work(lot: Sequence[_TargetPiece]) -> int:
            overwritten.update(piece.copy.fqn for piece in lot)
            with ExitStack() as open_files:
                _list(lot, open_files).run(lambda _: on_bytes(0), kernel())
            done = sum(piece.stop - piece.start for piece in lot)
            on_bytes(done)
            return done

        lots = [pieces[i : i + step] for i in range(0, len(pieces), step)]
        try:
            total = sum(on_threads(work, lots, threads, "reshard-read"))
        except (CorruptCheckpointError, StorageError) as error:
            undefined = f"the values of {format_names(sorted(overwritten))} are undefined"
            more = "and so may be those of targets on other ranks"
            error.args = (f"{error}. check='during' was already writing: {undefined}, {more}",)
            raise
        self._mark_right(piece for piece in pieces if piece.is_compared)
        return total

    def _mark_right(self, pieces: Iterable[_TargetPiece]) -> None:
        bounds = grouped((piece.source, (piece.start, piece.stop)) for piece in pieces)
        for source, its in bounds.items():
            assert isinstance(source.checksums, BlockChecksums)
            source.checking.add(compared=source.checksums.mark_right(ints(its)))


def _pieces(copy: Copy, compared: list[Range]) -> Iterator[_TargetPiece]:
    """Yield the pieces that are compared here, and those that are only read because they are
    compared elsewhere."""
    source, window = copy.place.source, copy.place.window
    assert isinstance(source, FileSource)
    assert isinstance(source.checksums, BlockChecksums)
    size = -(-_PIECE_BYTES // source.checksums.block_bytes) * source.checksums.block_bytes
    rest = subtract_ranges([(window.offset, window.stop)], compared)
    for start, stop, is_compared in sorted((*((*some, True) for some in compared), *((*some, False) for some in rest))):
        for at in range(start, stop, size):
            yield _TargetPiece(copy, source, at, min(at + size, stop), is_compared)


def _list(pieces: Sequence[_TargetPiece], open_files: ExitStack) -> WorkList:
    """List the steps: read a piece, compare it, continue with the next."""
    memory, digests, entries = Memory(), [np.zeros(0, np.uint64)], []
    regions: dict[int, int] = {}
    files: dict[FileSource, tuple[int | None, int]] = {}
    for piece in pieces:
        source, start, nbytes = piece.source, piece.start, piece.stop - piece.start
        assert isinstance(source.checksums, BlockChecksums)
        assert isinstance(piece.copy.out, np.ndarray)
        if source not in files:
            file = source.storage.descriptor(source.name)
            if file is not None:
                open_files.callback(os.close, file)
            files[source] = file, sum(map(len, digests))
            digests.append(source.checksums.digests)
        if id(piece.copy) not in regions:
            regions[id(piece.copy)] = memory.add(piece.copy.out)
        region, at = regions[id(piece.copy)], start - piece.copy.place.window.offset
        file, base = files[source]
        kind = Kind.CALL if file is None else Kind.READ
        entries.append((kind, (file or 0, start, nbytes, region, at, 0, 0), piece.read))
        if piece.is_compared:
            size = source.checksums.block_bytes
            entries.append((Kind.COMPARE, (region, at, nbytes, size, base + start // size, 0, 0), piece.compare))
    table = np.array([(kind, of) for kind, of, _ in entries], ENTRY)
    tallies = zeros(0)
    return WorkList(memory, table, np.zeros(0, COPY), np.concatenate(digests), tallies, lambda i: entries[i][2])
