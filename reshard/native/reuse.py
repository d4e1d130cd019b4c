"""Finds what a save need not write: elements whose block has the same digest in a file of an
earlier checkpoint.

Such a file is linked into the new checkpoint's folder, and a table lists the parts that are used.
So each checkpoint is complete by itself, and you can remove one without damage to others.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import torch
import xxhash
from msgspec import UNSET

from planners.errors import PlanError
from planners.geometry.box import Box
from reshard.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, StorageError
from reshard.live.copy_streams import CopyStreams, row_major_pieces
from reshard.native.commit import LINKED, folder_of
from reshard.native.data_file import (
    PROBE_BYTES,
    BlockDigests,
    BlockTable,
    Digests,
    Entry,
    blocks_of,
    probe_of,
    read_blocks,
)
from reshard.native.manifest import BLOCK_BYTES, LinkedRecord, entry_key
from reshard.native.reader import ArrayPart, NativeFacts
from reshard.storage.base import Storage
from reshard.stored.checksums import changed_block
from reshard.stored.contents import LazyMapping

LEAST_LIVE = 0.25
"""A file is reused only if at least this fraction of it stays in use. Otherwise, its elements are
written again. So the files of a checkpoint take at most about four times the bytes of its elements."""

_log = logging.getLogger("reshard")


@dataclass(frozen=True)
class Base:
    """An earlier checkpoint, in the same storage as the new one. Data with a problem is recorded
    and not reused: a save can do without a base."""

    storage: Storage
    there: str
    """Folder of the earlier checkpoint in `storage`: empty, or ends with "/"."""
    here: str
    """Folder of the new checkpoint, in the same form."""
    facts: NativeFacts
    skipped: dict[str, None] = field(default_factory=dict)
    """Why some data cannot be reused: each reason once, in order."""

    @cached_property
    def has_digests(self) -> bool:
        """True if all of its files have digests. Lists all names, so call it on one rank only."""
        names = self.facts.storage.list(f"{folder_of(self.facts.manifest.save_id)}/")
        return all(f"{name}.blocks" in names for name in self.facts.files)

    @cached_property
    def tables(self) -> LazyMapping[str, BlockTable | None]:
        """The digests of each file."""
        return LazyMapping({name: partial(self._read_table, name) for name in self.facts.files})

    @cached_property
    def intact(self) -> LazyMapping[str, bool]:
        """By file: True if its length, checksums, and header (which places the arrays) match the
        manifest. The data itself is not read."""
        return LazyMapping({name: partial(self._look_at, name) for name in self.facts.files})

    def _read_table(self, file: str) -> BlockTable | None:
        try:
            return read_blocks(self.facts.storage, file, self.facts.files[file].sums)
        except CheckpointNotFoundError:  # the save stored no digests
            return None
        except (CheckpointError, StorageError) as error:
            self.pass_over(error)
            return None

    def _look_at(self, file: str) -> bool:
        try:
            record, size = self.facts.files[file], self.facts.block_bytes(file)
            if (found := self.facts.storage.size(file)) != record.nbytes:
                raise CorruptCheckpointError(f"{file} must have {record.nbytes} bytes, but it has {found}")
            covered = min(-(-record.header_bytes // size) * size, record.nbytes)
            head = memoryview(self.facts.storage.read(file, 0, covered))
            sums = np.frombuffer(self.facts.sums(file), dtype="<u8")
            if len(sums) != -(-record.nbytes // size) or any(
                xxhash.xxh3_64_intdigest(head[at : at + size]) != sums[at // size] for at in range(0, covered, size)
            ):
                raise CorruptCheckpointError(changed_block(file, (0, covered)))
        except (CheckpointError, StorageError) as error:
            self.pass_over(error)
            return False
        return True

    def pass_over(self, error: object) -> None:
        """Record and log why some data of the base is not reused. It is then written again."""
        if str(error) not in self.skipped:
            _log.warning("some data is not reused and is written again: %s", error)
            self.skipped[str(error)] = None

    def live_share(self, file: str) -> float:
        """Return the fraction of a file's bytes that are elements of the earlier checkpoint."""
        record = self.facts.files[file]
        return record.live_bytes / max(record.nbytes, 1) if isinstance(record, LinkedRecord) else 1.0

    def parts_near(self, entry: Entry) -> list[tuple[ArrayPart, Box]]:
        """Return the parts of the earlier checkpoint that overlap the entry, each with the overlap,
        or [] if they do not contain all of its elements."""
        layout = self.facts.plan.layout
        fqn = entry.spec.fqn
        if fqn not in layout or layout[fqn].spec != entry.spec:
            return []
        try:
            found = [(part, part.box & entry.box) for part in self.facts.parts_near(fqn, entry.box)]
        except (CheckpointError, StorageError, PlanError) as error:  # removed since it was opened, or damaged
            self.pass_over(error)
            return []
        near = [(part, inside) for part, inside in found if inside is not None]
        whole = sum(inside.numel for _, inside in near) == entry.box.numel
        return near if whole and all(self._fits(part, entry.spec.itemsize) for part, _ in near) else []

    def _fits(self, part: ArrayPart, itemsize: int) -> bool:
        """Return True if the part's array is within its file and contains the part."""
        record = self.facts.files.get(part.file)
        if record is None or part.start < record.header_bytes or not part.array.contains(part.box):
            return False
        return part.start + part.array.numel * itemsize <= record.nbytes

    def link(self, file: str, folder: str) -> str | None:
        """Link a file, and the files beside it, into a generation's folder. Return its new name, or
        None if that fails.

        After a failure, links that were made stay until the save is published, because other ranks
        may use them.
        """
        generation, _, last = file.rpartition("/")
        name = f"{folder}/{'' if last.startswith(LINKED) else generation.replace('data-', LINKED) + '-'}{last}"
        suffixes = ("", ".sums", *((".blocks",) if self.tables.get(file) is not None else ()))
        try:
            if all(
                self.storage.link(f"{self.there}{file}{suffix}", f"{self.here}{name}{suffix}") for suffix in suffixes
            ):
                return name
            self.pass_over(f"{self.storage.url} does not support links")
        except (CheckpointError, StorageError) as error:  # removed since it was opened
            self.pass_over(error)
        return None


@dataclass(frozen=True)
class Reused:
    """What is left to write of some entries, and where the rest is stored."""

    entries: tuple[Entry, ...]
    arrays: dict[str, list[ArrayPart]]
    """By key of the entry: the parts of an array of which some are not written again."""
    linked: tuple[LinkedRecord, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of elements that are not written again."""
        return sum(record.live_bytes for record in self.linked)


@dataclass
class _Found:
    """The parts of one entry that are unchanged in earlier files, and the rest of its boxes."""

    entry: Entry
    kept: list[ArrayPart]
    rest: list[Box]


def reuse(
    entries: Sequence[Entry], base: Base, folder: str, *, same: Collection[str], lanes: CopyStreams, stage_bytes: int
) -> Reused:
    """Compare `entries` with an earlier checkpoint by digests, and link the files that are reused.

    Files with a problem are not reused: see `Base`. The data of files is not read, and is assumed
    to match their checksums.

    Args:
        folder: folder of the new generation within the new checkpoint.
        same: FQNs of tensors that are known to be unchanged, by their fingerprints.
        lanes: streams that copy entries from devices to the host.
        stage_bytes: memory for elements that are not in row-major order or not on the CPU.
    """
    possible: dict[str, int] = {}
    found = [_looked_up(entry, base, possible, same, lanes, stage_bytes) for entry in entries]
    live: dict[str, int] = {}
    for one in found:
        for part in one.kept:
            live[part.file] = live.get(part.file, 0) + part.box.numel * one.entry.spec.itemsize
    names = {
        file: base.link(file, folder)
        for file, nbytes in live.items()
        if nbytes * base.live_share(file) >= LEAST_LIVE * possible[file]
    }
    return _divided(found, base, {file: name for file, name in names.items() if name is not None}, live)


def _looked_up(
    entry: Entry, base: Base, possible: dict[str, int], same: Collection[str], lanes: CopyStreams, stage_bytes: int
) -> _Found:
    """Find the unchanged parts of an entry. Add to `possible` how many bytes of the entry each file
    could provide."""
    one = _Found(entry, [], [])
    for part, inside in base.parts_near(entry):
        possible[part.file] = possible.get(part.file, 0) + inside.numel * entry.spec.itemsize
        if not base.intact.get(part.file, False):
            one.rest.append(inside)
        elif entry.spec.fqn in same:
            one.kept.append(part._replace(box=inside))
        else:
            _compare(one, part, inside, base.tables.get(part.file), lanes, stage_bytes)
    return one


def _divided(found: Sequence[_Found], base: Base, names: dict[str, str], live: dict[str, int]) -> Reused:
    """Return what to write and what to reuse. `names` has the new name of each file that is linked."""
    entries: list[Entry] = []
    arrays: dict[str, list[ArrayPart]] = {}
    for one in found:
        kept = [part for part in one.kept if part.file in names]
        if not kept:
            entries.append(one.entry)
            continue
        rest = _merged([*one.rest, *(part.box for part in one.kept if part.file not in names)])
        arrays[entry_key(one.entry.spec, one.entry.box)] = [
            *(part._replace(file=names[part.file]) for part in kept),
            *(ArrayPart(box, box) for box in rest),
        ]
        entries += [_part_of(one.entry, box) for box in rest]
    records = base.facts.files
    linked = []
    for file, name in names.items():
        old = records[file]
        block_bytes = base.facts.block_bytes(file)
        other = UNSET if block_bytes == BLOCK_BYTES else block_bytes
        linked.append(LinkedRecord(name, old.nbytes, old.header_bytes, old.sums, live[file], other))
    return Reused(tuple(entries), arrays, tuple(linked))


def _compare(
    one: _Found, part: ArrayPart, inside: Box, table: BlockTable | None, lanes: CopyStreams, stage_bytes: int
) -> None:
    """Compare the blocks of a part within the box `inside` by digest, and add each to `one.kept` or
    `one.rest`."""
    entry = one.entry
    blocks = blocks_of(part.array, entry.spec.itemsize)
    digests = table.of_array(part.start, blocks) if table is not None else None
    if digests is None:
        one.rest.append(inside)
        return
    whole, wanted = [], []
    for block, record in zip(blocks, digests, strict=True):
        cell = block & inside
        if cell == block:
            whole.append(cell)
            wanted.append(record)
        elif cell is not None:
            one.rest.append(cell)
    good = _are_equal([_part_of(entry, block) for block in whole], wanted, lanes, stage_bytes)
    one.kept += [part._replace(box=box) for box in _merged([b for b, yes in zip(whole, good, strict=True) if yes])]
    one.rest += [block for block, yes in zip(whole, good, strict=True) if not yes]


def _are_equal(blocks: Sequence[Entry], wanted: Sequence[np.void], lanes: CopyStreams, stage_bytes: int) -> list[bool]:
    if not blocks or lanes[blocks[0].tensor.device] is None:
        return [_is_equal(block, record, lanes, stage_bytes) for block, record in zip(blocks, wanted, strict=True)]
    # copy the heads of all blocks from the device, and then only those blocks whose heads match:
    # the others are copied once, when they are written
    heads = _digests([_head(b.tensor, PROBE_BYTES // b.spec.itemsize) for b in blocks], lanes, stage_bytes)
    good = [bool(head["probe"] == record["probe"]) for head, record in zip(heads, wanted, strict=True)]
    hopeful = [i for i, may_be in enumerate(good) if may_be]
    found = _digests([[blocks[i].tensor] for i in hopeful], lanes, stage_bytes)
    for i, digest in zip(hopeful, found, strict=True):
        good[i] = digest.tobytes() == wanted[i].tobytes()
    return good


def _digests(blocks: Sequence[Sequence[torch.Tensor]], lanes: CopyStreams, stage_bytes: int) -> Digests:
    """Return one digest for each group of tensors, whose elements follow one another."""
    passing = BlockDigests([sum(tensor.nbytes for tensor in block) for block in blocks])
    for piece in row_major_pieces([tensor for block in blocks for tensor in block], lanes, stage_bytes):
        passing.write(piece)
    return passing.finish()


def _head(block: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Return views of the first `count` elements in row-major order, or of all if there are fewer."""
    if block.numel() <= count:
        return [block]
    rows, rest = divmod(count, block[0].numel())
    return [*([block[:rows]] if rows else []), *(_head(block[rows], rest) if rest else [])]


def _is_equal(block: Entry, record: np.void, lanes: CopyStreams, stage_bytes: int) -> bool:
    pieces = row_major_pieces([block.tensor], lanes, stage_bytes)
    head = next(pieces)
    if len(head) >= min(PROBE_BYTES, block.tensor.nbytes) and probe_of(head) != record["probe"]:
        return False
    passing = BlockDigests([block.tensor.nbytes])
    passing.write(head)
    for piece in pieces:
        passing.write(piece)
    return bool(passing.finish()[0] == record)


def _part_of(entry: Entry, box: Box) -> Entry:
    if box == entry.box:
        return entry
    return Entry(entry.spec, box, entry.tensor[box.relative_to(entry.box).slices])


def _merged(boxes: Sequence[Box]) -> list[Box]:
    """Merge consecutive boxes that together form a box: first within rows, then rows."""
    out = list(boxes)
    while True:
        before, out = out, []
        for box in before:
            joined = _joined(out[-1], box) if out else None
            if joined is None:
                out.append(box)
            else:
                out[-1] = joined
        if len(out) == len(before):
            return out


def _joined(a: Box, b: Box) -> Box | None:
    """Return `a` and `b` as one box if `b` follows `a` in one dim and equals it in all others, else None."""
    differ = [d for d in range(a.ndim) if a.offsets[d] != b.offsets[d] or a.sizes[d] != b.sizes[d]]
    if len(differ) != 1:
        return None
    (d,) = differ
    if a.offsets[d] + a.sizes[d] != b.offsets[d]:
        return None
    return Box.of(a.offsets, (*a.sizes[:d], a.sizes[d] + b.sizes[d], *a.sizes[d + 1 :]))
