"""What lies in the folder of a host: a folder for each generation, which is a checkpoint in the native format of which
this host has some files, and all of the manifest once the generation counts.

    /dev/shm/run1/node3/                                       the folder of the host node3
        owner.json                                             which process of which job writes here
        00000007-step-100-0192f3c1a8ab-5d2e.../                generation 7
            lineage.json                                       which incarnation of the job it is of
            manifest.json                                      published when all hosts have all of their files
            data-0192f3c1a8ab-5d2e.../00012.safetensors        what rank 12 wrote, here
            data-0192f3c1a8ab-5d2e.../00004.safetensors        a copy of what rank 4 wrote, on another host
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from planners.geometry.box import Box
from planners.save.plan import SavePlan, WriteItem
from reshard.api.elastic.incarnation import LINEAGE, Incarnation
from reshard.errors import CheckpointError, StorageError
from reshard.execute.reading import merge_ranges, subtract_ranges
from reshard.formats.native.file_table import FileRecord
from reshard.formats.native.manifest import MANIFEST, Manifest, entry_key, read_manifest
from reshard.formats.native.reader import NativeFacts
from reshard.formats.safetensors.header import encode_header
from reshard.storage import Storage
from reshard.storage.local import LocalStorage

__all__ = [
    "Held",
    "Kept",
    "Made",
    "Ranges",
    "Recorded",
    "arrays_of",
    "fetched_folder",
    "good_ranges",
    "header_of",
    "held_in",
    "kept_in",
    "lost_boxes",
    "remove",
]

Ranges = list[tuple[int, int]]
"""Bytes [start, stop) of a file, in order."""
Held = dict[str, Ranges]
"""By the number of a rank before, as text: the bytes of its file that are there, with the right checksums."""

_NAME = re.compile(r"(\d{8,})-step-(\d+)-([0-9a-f]{12}-[0-9a-f]{12})")
_FETCHED = "fetched-"
_PIECE_BLOCKS = 8


class Kept(NamedTuple):
    """A generation, as its folder is called."""

    number: int
    """Each is larger than all that was there when it began; so newer generations of one incarnation of a job have
    larger ones. Those of others may have any: see `lineage`."""
    step: int
    save_id: str

    @property
    def folder(self) -> str:
        """Its name within the folder of a host."""
        return f"{self.number:08d}-step-{self.step}-{self.save_id}"

    def __str__(self) -> str:
        return f"generation {self.number} (step {self.step})"


class Made(NamedTuple):
    """What the manifest of a generation, or of another checkpoint, says of when and what it is."""

    unix_s: float
    state: str
    """A digest of all fingerprints: equal where all tensors are, whatever the layouts; empty if there are none."""

    @classmethod
    def of(cls, manifest: Manifest) -> Made:
        """Out of a manifest."""
        rows = repr(sorted(manifest.fingerprints.items())).encode()
        return cls(manifest.created_unix_s, xxhash.xxh3_128_hexdigest(rows) if manifest.fingerprints else "")


class Recorded(NamedTuple):
    """What the folder of a host says of a generation."""

    made: Made | None
    """None while it does not count there."""
    incarnation: Incarnation | None
    """None where nothing legible says so."""


def fetched_folder(kept: Kept) -> str:
    """Where a host puts what it gets of a generation from other hosts while it recovers."""
    return f"{_FETCHED}{kept.save_id}"


def kept_in(folder: Path) -> dict[Kept, Recorded]:
    """The generations in the folder of a host, and what is recorded of each.

    Raises StorageError if it cannot be read.
    """
    found: dict[Kept, Recorded] = {}
    try:
        names = [entry.name for entry in os.scandir(folder)]
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StorageError(f"cannot list {folder}: {error.strerror or error}") from error
    for name in names:
        if match := _NAME.fullmatch(name):
            storage = LocalStorage(folder / name)
            found[Kept(int(match[1]), int(match[2]), match[3])] = Recorded(_made(storage), Incarnation.read(storage))
    return found


def _made(storage: Storage) -> Made | None:
    try:
        return Made.of(read_manifest(storage))
    except CheckpointError:
        return None


def remove(folder: Path, keep: Sequence[Kept] = ()) -> None:
    """Remove all generations but these from the folder of a host, and what was fetched. Their manifests go first, and
    what says of which incarnation they are goes last: what counts never lacks it."""
    storage, kept = LocalStorage(folder), {one.folder for one in keep}
    names = [name for name in storage.list() if "/" in name and name.partition("/")[0] not in kept]
    ours = [name for name in names if _NAME.fullmatch(name.partition("/")[0]) or name.startswith(_FETCHED)]
    for name in sorted(ours, key=lambda name: (not name.endswith(f"/{MANIFEST}"), name.endswith(f"/{LINEAGE}"))):
        storage.delete(name)
    for name in storage.empty_folders():
        if name.partition("/")[0] not in kept:
            storage.delete(f"{name}/nothing")


def held_in(storage: Storage, manifest: Manifest, part: int = 0, of: int = 1, threads: int = 1) -> Held:
    """What is there of a generation's files, block by block, by checksums; of every `of`-th file, from `part` on."""
    names = storage.list()
    found: Held = {}
    for rank, record in sorted(manifest.files.items(), key=lambda row: int(row[0]))[part::of]:
        if names.get(record.name) == record.nbytes:
            ranges = good_ranges(storage, record, manifest.block_bytes, threads)
            if ranges:
                found[rank] = ranges
    return found


def good_ranges(storage: Storage, record: FileRecord, block_bytes: int, threads: int = 1) -> Ranges:
    """The bytes of a data file whose blocks have the right checksums; none if those are damaged themselves."""
    try:
        digests = storage.read(f"{record.name}.sums")
    except CheckpointError:
        return []
    if xxhash.xxh3_128_hexdigest(digests) != record.sums:
        return []
    sums, step = np.frombuffer(digests, dtype="<u8").tolist(), _PIECE_BLOCKS * block_bytes

    def check(start: int) -> list[tuple[int, int]]:
        buffer = memoryview(bytearray(min(step, record.nbytes - start)))
        try:
            storage.read_into(record.name, start, buffer)
        except CheckpointError:
            return []
        blocks = range(start, start + len(buffer), block_bytes)
        pieces = {at: buffer[at - start : at - start + block_bytes] for at in blocks}
        good = [at for at in blocks if xxhash.xxh3_64_intdigest(pieces[at]) == sums[at // block_bytes]]
        return [(at, at + len(pieces[at])) for at in good]

    starts = range(0, record.nbytes, step)
    if threads == 1 or len(starts) == 1:
        rows = list(map(check, starts))
    else:
        with ThreadPoolExecutor(threads, thread_name_prefix="reshard-check") as pool:
            rows = list(pool.map(check, starts))
    return merge_ranges(piece for row in rows for piece in row)


def _ordered(plan: SavePlan, rank: int) -> list[WriteItem]:
    """The arrays of a rank's file, in the order in which they are written."""
    return sorted(plan.items(rank), key=lambda item: -plan.layout[item.fqn].spec.itemsize)


def header_of(plan: SavePlan, rank: int) -> bytes:
    """What a rank's file begins with: it follows from the plan, as do the arrays."""
    specs = plan.layout.specs
    return encode_header(
        (entry_key(item.fqn, item.box, specs[item.fqn].shape), specs[item.fqn].dtype, item.box.sizes)
        for item in _ordered(plan, rank)
    )


def arrays_of(plan: SavePlan, rank: int, header_bytes: int) -> list[tuple[str, Box, int, int]]:
    """(tensor, region, first byte, one past the last) of every array in a rank's file."""
    items = _ordered(plan, rank)
    starts = accumulate((item.nbytes for item in items), initial=header_bytes)
    return [(item.fqn, item.box, at, at + item.nbytes) for item, at in zip(items, starts)]


def lost_boxes(native: NativeFacts, held: Mapping[str, Sequence[Held]]) -> dict[str, list[tuple[int, Box]]]:
    """Of every tensor that does not survive whole: the regions that nobody has, each with the rank that wrote it.

    Args:
        held: by host, what its ranks have found.
    """
    everything = [found for rows in held.values() for found in rows]
    block = native.manifest.block_bytes
    lost: dict[str, list[tuple[int, Box]]] = {}
    for rank, record in native.manifest.files.items():
        there = merge_ranges(piece for found in everything for piece in found.get(rank, ()))
        holes = subtract_ranges([(0, record.nbytes)], there)
        if not holes:
            continue
        # a load may check the header's blocks whatever it reads: without them, nothing of the file is of use
        all_of_it = holes[0][0] < -(-record.header_bytes // block) * block
        for fqn, box, start, stop in arrays_of(native.plan, int(rank), record.header_bytes):
            if all_of_it or any(begin < stop and start < end for begin, end in holes):
                lost.setdefault(fqn, []).append((int(rank), box))
    return lost
