"""A generation in the folders of hosts: what is there, how it is moved, and how it is read if each
host has a part."""

from __future__ import annotations

import mmap
import os
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import xxhash

from planners.geometry.arrays import grouped
from planners.geometry.box import Box, Range
from planners.geometry.byte_ranges import Window, merge_ranges, subtract_ranges
from planners.geometry.layout import StateLayout, TensorLayout, TensorSpec
from planners.notebooks import Tabled
from planners.plans.plan import verify
from planners.plans.save import SavePlan
from planners.plans.schedule import schedule
from planners.plans.transfer import plan_transfers
from planners.units import format_bytes, format_count
from reshard.api.load import LoadReport
from reshard.api.reports import HostsReport
from reshard.arguments import renamed
from reshard.errors import CheckpointError, CorruptCheckpointError, StorageError, format_names, format_ranks
from reshard.execute.exchange import Exchange, RankWork, round_bytes
from reshard.execute.reading import on_threads
from reshard.native.data_file import arrays_of, header_of
from reshard.native.manifest import MANIFEST, FileRecord, Manifest, decode_sealed, read_manifest
from reshard.native.reader import NativeFacts
from reshard.ranks import liveness
from reshard.ranks.group import Group, device_of_kind, sending_kinds
from reshard.storage.base import NOTHING, Storage, Writer, is_temporary
from reshard.storage.local import LocalStorage, make_folder, os_errors, sync_folder
from reshard.stored.source import OnBytes

if TYPE_CHECKING:
    from typing_extensions import Buffer

# A host has some of the files, and the manifest once the generation is complete.
#
#     /dev/shm/run1/node3/                                       the folder of the host node3
#         owner.json                                             which process of which job writes here
#         00000007-step-100-0192f3c1a8ab-5d2e.../                generation 7
#             lineage.json                                       which incarnation of the job it is of
#             manifest.json                                      published when all hosts have all of their files
#             data-0192f3c1a8ab-5d2e.../00012.safetensors        what rank 12 wrote, here
#             data-0192f3c1a8ab-5d2e.../00004.safetensors        a copy of what rank 4 wrote, on another host


Ranges = list[Range]
"""Bytes [start, stop) of a file, in order."""
Held = dict[str, Ranges]
"""Rank that saved (as text) -> the bytes of its file that match their checksums. Missing files have no entry."""

_NAME = re.compile(r"(\d{8,})-step-(\d+)-([0-9a-f]{12}-[0-9a-f]{12})")
_FETCHED = "fetched-"
_OURS = re.compile(rf"({_NAME.pattern}|{_FETCHED}[^/]*)/")
_PIECE_BLOCKS = 8


class GenerationFolder(NamedTuple):
    """A generation, as the name of its folder identifies it."""

    number: int
    """Larger than the numbers of all generations that existed when its incarnation of the job
    began, and than those of earlier generations of this incarnation. Other incarnations may have
    any number: see `lineage`."""
    step: int
    save_id: str

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"{self.number:08d}-step-{self.step}-{self.save_id}"

    def __str__(self) -> str:
        return f"generation {self.number} (step {self.step})"


class ManifestStamp(NamedTuple):
    """Identifies the manifest of a checkpoint or generation."""

    unix_s: float
    state: str
    """A digest of all fingerprints. Equal if all tensors are equal, in any layouts. Empty without fingerprints."""

    @classmethod
    def of(cls, manifest: Manifest) -> ManifestStamp:
        """Read it from a manifest."""
        rows = repr(sorted(manifest.fingerprints.items())).encode()
        return cls(manifest.created_unix_s, xxhash.xxh3_128_hexdigest(rows) if manifest.fingerprints else "")


class Recorded(NamedTuple):
    """What the folder of a host records of a generation."""

    made: ManifestStamp | None
    """None while the generation does not count there."""
    incarnation: Incarnation | None
    """None if the record is missing or illegible."""


def fetched_folder(kept: GenerationFolder) -> str:
    """The folder in which a host stores what it receives of a generation during recovery."""
    return f"{_FETCHED}{kept.save_id}"


def kept_in(folder: Path) -> dict[GenerationFolder, Recorded]:
    """Return the generations in the folder of a host, and what is recorded about each.

    Raises StorageError if the folder cannot be read.
    """
    found: dict[GenerationFolder, Recorded] = {}
    with os_errors(f"list {folder}"):
        try:
            names = [entry.name for entry in os.scandir(folder)]
        except FileNotFoundError:
            return {}
    for name in names:
        if match := _NAME.fullmatch(name):
            storage = LocalStorage(folder / name)
            found[GenerationFolder(int(match[1]), int(match[2]), match[3])] = Recorded(
                _made(storage), Incarnation.read(storage)
            )
    return found


def _made(storage: Storage) -> ManifestStamp | None:
    try:
        return ManifestStamp.of(read_manifest(storage))
    except CheckpointError:
        return None


def remove(folder: Path, keep: Sequence[GenerationFolder] = ()) -> None:
    """Remove all generations except these from the folder of a host, and fetched files. Manifests
    are removed first and lineages last, so a generation that counts never lacks its lineage."""
    storage, kept = LocalStorage(folder), {one.folder for one in keep}
    names = [name for name in storage.list() if name.partition("/")[0] not in kept]
    ours = [name for name in names if is_temporary(name) or _OURS.match(name)]
    for name in sorted(ours, key=lambda name: (not name.endswith(f"/{MANIFEST}"), name.endswith(f"/{LINEAGE}"))):
        (storage.retract if name.endswith(f"/{MANIFEST}") else storage.delete)(name)
    for name in storage.empty_folders():
        if name.partition("/")[0] not in kept and _OURS.match(f"{name}/"):
            storage.delete(f"{name}/{NOTHING}")


def held_in(storage: Storage, manifest: Manifest, part: int, of: int, threads: int) -> Held:
    """Check every `of`-th file of a generation, from `part` on, block by block."""
    names = storage.list()
    found: Held = {}
    for rank, record in sorted(manifest.files.items(), key=lambda row: int(row[0]))[part::of]:
        if record.name in names:
            found[rank] = []
            if names[record.name] == record.nbytes:
                found[rank] = good_ranges(storage, record, manifest.block_bytes, threads)
    return found


def good_ranges(storage: Storage, record: FileRecord, block_bytes: int, threads: int = 1) -> Ranges:
    """Return the bytes of a data file whose blocks have the right checksums; none if the checksums are damaged."""
    try:
        digests = storage.read(f"{record.name}.sums")
    except CheckpointError:
        return []
    if xxhash.xxh3_128_hexdigest(digests) != record.sums:
        return []
    sums, step = np.frombuffer(digests, dtype="<u8").tolist(), _PIECE_BLOCKS * block_bytes

    def check(start: int) -> list[Range]:
        buffer = memoryview(bytearray(min(step, record.nbytes - start)))
        try:
            storage.read_into(record.name, start, buffer)
        except CheckpointError:
            return []
        blocks = range(start, start + len(buffer), block_bytes)
        pieces = {at: buffer[at - start : at - start + block_bytes] for at in blocks}
        good = [at for at in blocks if xxhash.xxh3_64_intdigest(pieces[at]) == sums[at // block_bytes]]
        return [(at, at + len(pieces[at])) for at in good]

    rows = on_threads(check, range(0, record.nbytes, step), threads, "reshard-check")
    return merge_ranges(piece for row in rows for piece in row)


def lost_boxes(native: NativeFacts, held: Mapping[str, Sequence[Held]]) -> dict[str, list[tuple[int, Box]]]:
    """Return the regions that no host has, by tensor, each with the rank that wrote it.

    Args:
        held: what the ranks of each host found, by host.
    """
    everything = [found for rows in held.values() for found in rows]
    block = native.manifest.block_bytes
    lost: dict[str, list[tuple[int, Box]]] = {}
    for rank, record in native.manifest.files.items():
        there = merge_ranges(piece for found in everything for piece in found.get(rank, ()))
        holes = subtract_ranges([(0, record.nbytes)], there)
        if not holes:
            continue
        # a load may check the header's blocks whatever it reads: without them, nothing of the
        # file is of use
        all_of_it = holes[0][0] < -(-record.header_bytes // block) * block
        for fqn, box, start, stop in arrays_of(native.plan, int(rank), record.header_bytes):
            if all_of_it or any(begin < stop and start < end for begin, end in holes):
                lost.setdefault(fqn, []).append((int(rank), box))
    return lost


# An incarnation of a job, and the file that says which one kept a generation.
#
# 00000007-step-100-0192f3c1a8ab-5d2e.../lineage.json        published first of the generation
#     {"id":"0192f3c0ffee-77ab...","first":4,"earlier":{"0192f3b00a1e-90cd...":3},"digest":"..."}


LINEAGE = "lineage.json"


class Incarnation(msgspec.Struct, frozen=True):
    """A job from a recovery, or from its first generation, until its processes end or it
    recovers again. Its ranks and hosts stay the same, so the numbers of its generations give
    their order."""

    id: str
    """Unique. It begins with the time at which the incarnation began, as a save id does."""
    first: int
    """Number of its first generation: larger than all that it could see when it began."""
    earlier: dict[str, int]
    """Id of each earlier incarnation that this one knew -> the number of its last generation that
    this one continues, or 0 if it recovered nothing of it. An incarnation that this one knew had
    ended when this one began, because both use the same hosts."""

    @classmethod
    def read(cls, storage: Storage) -> Incarnation | None:
        """Return the incarnation of the generation in `storage`; None if the file is missing or
        unreadable, as in earlier releases."""
        try:
            return decode_sealed(storage.read(LINEAGE), cls)
        except (CheckpointError, msgspec.MsgspecError, UnicodeDecodeError):
            return None


# A generation as one checkpoint that a load can read, though each host has only some of
# its files.


class Survivors(Storage):
    """What a host has of a generation. Complete files are read in place. Others are in a folder of
    fetched files, where each begins as a sparse file with the header that follows from the plan, so
    that a load can be planned before anything is fetched.

    Args:
        here: the folder of the generation on this host.
        fetched: the folder of what is fetched.
        manifest_text: the manifest, which this host may not have.
        whole: names of the files that are here completely.
    """

    max_gap_bytes = LocalStorage.max_gap_bytes
    requests = 1

    def __init__(self, here: LocalStorage, fetched: Path, manifest_text: bytes, whole: Collection[str]) -> None:
        self.here, self.fetched, self.whole = here, LocalStorage(fetched), frozenset(whole)
        self.url = here.url
        self._manifest_text = manifest_text
        self._records: dict[str, tuple[int, FileRecord]] = {}
        self._plan: SavePlan | None = None

    def expect(self, native: NativeFacts) -> None:
        """Note the files whose headers may be requested."""
        self._records = {record.name: (int(rank), record) for rank, record in native.manifest.files.items()}
        self._plan = native.plan

    def path_of(self, name: str) -> Path:
        """Return where a file or its checksums are, or will be written."""
        return (self.here if name.removesuffix(".sums") in self.whole else self.fetched).root / name

    def list(self, prefix: str = "") -> dict[str, int]:
        return {MANIFEST: len(self._manifest_text)} if MANIFEST.startswith(prefix) else {}

    def size(self, name: str) -> int:
        return len(self._manifest_text) if name == MANIFEST else self._with(name).size(name)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        if name == MANIFEST:
            buffer[:] = self._manifest_text[start : start + len(buffer)]
        else:
            self._with(name).read_into(name, start, buffer)

    def mapped(self, name: str) -> memoryview | None:
        return memoryview(self._manifest_text) if name == MANIFEST else self._with(name).mapped(name)

    def create(self, name: str) -> Writer:
        raise StorageError(f"{self.url} is read-only: it has the surviving files of a generation")

    def publish(self, name: str, data: Buffer) -> None:
        self.create(name)

    def delete(self, name: str) -> None:
        self.create(name)

    def _with(self, name: str) -> Storage:
        if name.removesuffix(".sums") in self.whole:
            return self.here
        if name in self._records:
            self.prepare(name)
        return self.fetched

    def prepare(self, name: str) -> None:
        """Create the file with its header, unless it exists: any rank of the host may come first."""
        path = self.fetched.root / name
        if path.exists() or self._plan is None:
            return
        rank, record = self._records[name]
        header = header_of(self._plan, rank)
        if len(header) != record.header_bytes:
            raise CorruptCheckpointError(
                f"{self.url}: {name} must begin with a header of {record.header_bytes} bytes, but by the manifest's "
                f"layout it has {len(header)}"
            )
        beside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        with os_errors(f"make {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(beside, "xb") as out:
                out.write(header)
                out.truncate(record.nbytes)
            with suppress(FileExistsError):
                os.link(beside, path)
            beside.unlink()


def blocks_of(window: Window, block_bytes: int, nbytes: int) -> Ranges:
    """Return the blocks of a file of `nbytes` that contain bytes of a window, as ranges that may touch or overlap."""
    return [
        (start // block_bytes * block_bytes, min(-(-(start + size) // block_bytes) * block_bytes, nbytes))
        for start, size in window.runs().joined(block_bytes)  # gaps that leave no block out
    ]


# Moves byte ranges of files between the folders of hosts: files are planned and sent as tensors of
# bytes are.


Places = dict[str, dict[int, Ranges]]
"""File -> rank -> the bytes that the rank holds, or wants."""


class Moves(NamedTuple):
    """The data files and checksums that ranks hold and want."""

    held: Places
    wanted: Places
    sizes: dict[str, int]
    """Sizes of the files, in bytes."""

    def add(
        self, record: FileRecord, block_bytes: int, held: Mapping[int, Ranges], wanted: Mapping[int, Ranges]
    ) -> None:
        """Add a data file, by rank. A rank that holds or wants a part of it also does so for all of
        its checksums."""
        sums, nsums = f"{record.name}.sums", 8 * -(-record.nbytes // block_bytes)
        self.sizes.update({record.name: record.nbytes, sums: nsums})
        for side, by in ((self.held, held), (self.wanted, wanted)):
            if by:
                side[record.name] = dict(by)
                side[sums] = {rank: [(0, nsums)] for rank in by}


def move(
    moves: Moves,
    source: Callable[[str], Path],
    target: Callable[[str], Path],
    group: Group,
    process_group: dist.ProcessGroup | None,
    *,
    max_inflight_bytes: int,
    pace: OnBytes | None = None,
) -> int:
    """Collective: bring what ranks want from ranks that hold it, by a proved plan; ranks between
    which nothing moves may give other files. Returns the bytes that this rank got from others.

    Args:
        source, target: a file that this rank sends, and a file that it gets, which is created.
        pace: as of `Exchange.run`.

    Raises StorageError if there is no space; PlanError for bytes that no rank holds.
    """
    held, wanted, sizes = moves
    rank, world = group.job_rank, max(group.ranks) + 1
    before, after = (_layout(side, sizes, world) for side in (held, wanted))
    rounds = schedule(plan_transfers(before, after), max_inflight_bytes=round_bytes(max_inflight_bytes))
    verify(rounds).raise_if_failed()

    def parts(side: Places, whole: Callable[[str], torch.Tensor]) -> Callable[[str], Sequence[torch.Tensor]]:
        return lambda name: [whole(name)[start:stop] for start, stop in side[name].get(rank, ())]

    files = {name: target(name) for name, by in wanted.items() if rank in by}
    for name, path in files.items():
        _make_room(path, sizes[name], wanted[name][rank])
    kinds = sending_kinds(process_group)
    exchange = Exchange(
        RankWork.of(rounds, rank),
        parts(held, lambda name: _mapped(source(name), shared=False)),
        parts(wanted, lambda name: _mapped(files[name], shared=True)),
        device=device_of_kind("cpu" if "cpu" in kinds else kinds[0]),
        process_group=process_group,
        is_discarded=True,
    )
    exchange.run(group, pace)
    for path in files.values():
        _sync(path)
    return exchange.received_bytes


def _layout(side: Places, sizes: Mapping[str, int], world: int) -> StateLayout:
    return StateLayout(
        {
            name: TensorLayout.from_boxes(
                TensorSpec(name, (sizes[name],), "uint8"),
                {rank: [Box.of((start,), (stop - start,)) for start, stop in ranges] for rank, ranges in by.items()},
                world,
            )
            for name, by in side.items()
        },
        world,
    )


def _make_room(path: Path, nbytes: int, ranges: Ranges) -> None:
    """Create the file and reserve its memory. If there were no memory later, a write would kill the
    process."""
    with os_errors(f"make {sum(stop - start for start, stop in ranges)} bytes of {path}"):
        make_folder(path.parent)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if os.fstat(file).st_size < nbytes:
                os.ftruncate(file, nbytes)
            for start, stop in ranges:
                os.posix_fallocate(file, start, stop - start)
        finally:
            os.close(file)


def _mapped(path: Path, *, shared: bool) -> torch.Tensor:
    """Map the bytes of a file."""
    with os_errors(f"map {path}"), open(path, "r+b" if shared else "rb") as file:
        flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE  # torch wants memory that could be written to
        memory = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _sync(path: Path) -> None:
    with os_errors(f"make {path} durable"):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)
        sync_folder(path.parent)


# Which rank is on which host, and whose the folder of a host is.


_OWNER = "owner.json"


@dataclass(frozen=True)
class Settings:
    """The arguments of a `Tier`."""

    folder: Path
    host: str
    copies: int
    process_group: dist.ProcessGroup | None
    max_inflight_bytes: int
    timeout: float | timedelta


@dataclass(frozen=True)
class Hosts:
    """The hosts of a job. The same on every rank, except for `place`."""

    names: tuple[str, ...]
    """The host of each rank, by the rank's number in the group."""
    place: int
    """This rank's number in the group."""
    folder: Path
    """The folder of this rank's host."""
    owner: liveness.WriterLease | None = None
    """The process that acts for this rank's host, from the claim in the folder."""

    def check_owner(self) -> None:
        """Raise StorageError if another job took the host's folder while this process was paused."""
        found = liveness.read_lease(LocalStorage(self.folder), _OWNER)
        if found is not None and self.owner is not None and not found.is_of(self.owner):
            raise StorageError(
                f"{found} has taken {self.folder} over from {self.owner}, so this job no longer keeps or deletes "
                "anything there. Give each job its own folder"
            )

    @cached_property
    def places(self) -> dict[str, list[int]]:
        """The ranks of each host, by their places in the group."""
        return grouped((name, place) for place, name in enumerate(self.names))

    @property
    def name(self) -> str:
        """The name of this rank's host."""
        return self.names[self.place]

    @property
    def mine(self) -> list[int]:
        """The ranks of this host."""
        return self.places[self.name]

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of its host, which acts for the host."""
        return self.mine[0] == self.place

    def gather_kept(self, group: Group) -> list[dict[GenerationFolder, Recorded]] | None:
        """Collective: gather what is in the folder of each rank's host, reported by the host's
        first rank. For the first rank; None for the others."""
        mine = list(kept_in(self.folder).items()) if self.leads else []
        told = group.gather(mine, kind=list[tuple[GenerationFolder, Recorded]])
        return None if told is None else [dict(rows) for rows in told]


def meet(folder: Path, host: str, group: Group) -> Hosts:
    """Collective: find out which rank is on which host. The first rank of each host claims its
    folder.

    Raises StorageError if another running job has claimed it, or if ranks that name one host do not
    share its folder.
    """
    hosts = Hosts(tuple(group.exchange(host)), group.rank, folder / host)
    storage, work = LocalStorage(hosts.folder), f"elastic {hosts.folder}"
    pids = set(group.exchange_within(host, os.getpid()).values())
    if hosts.leads:
        found = liveness.read_lease(storage, _OWNER)
        if found is not None and found.pid not in pids and found.is_running(work):
            raise StorageError(
                f"{hosts.folder} is in use by {found}, which is still running. Give each job its own folder, or "
                "end the other job"
            )
        liveness.take_lease(storage, _OWNER, work)
    group.barrier()
    owner = liveness.read_lease(storage, _OWNER)
    rows = group.exchange_within(host, owner, kind=liveness.WriterLease | None)
    if owner is None or len(set(rows.values())) > 1:
        ranks = format_ranks(group.ranks[place] for place in rows)
        raise StorageError(
            f"{ranks} have host={host!r}, but see different folders {hosts.folder}: ranks of one host must share "
            "the folder, and hosts must have different names. If another job has just taken the folder, end it"
        )
    return replace(hosts, owner=owner)


def free_bytes(folder: Path) -> int:
    """Return the free space of the file system of a folder. Raises StorageError if this fails."""
    with os_errors(f"determine the free space in {folder}"):
        found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


# What `Tier.save`, `Tier.restore` and `gather` did.


@dataclass(frozen=True, repr=False)
class TierSaveReport(HostsReport):
    """What `Tier.save` did. Only `bytes_received` and `phases` differ between ranks."""

    number: int
    """Number of the generation. It is larger than those of all earlier generations."""
    step: int
    save_id: str
    total_bytes: int
    """Bytes of all tensors. Each element counts once."""
    bytes_by_host: Mapping[str, int]
    """Bytes of tensors of this generation that each host holds, including copies. A host holds at
    most two generations."""

    def __repr__(self) -> str:
        """One line."""
        most = format_bytes(max(self.bytes_by_host.values()))
        return (
            f"TierSaveReport(generation {self.number}, step {self.step}, {format_bytes(self.total_bytes)}, at most "
            f"{most} on each of {len(self.bytes_by_host)} hosts)"
        )


@renamed(passed_over="skipped")
@dataclass(frozen=True, repr=False)
class TierRestoreReport(HostsReport):
    """What `Tier.restore` did. Only `bytes_received`, `load`, and `phases` differ between ranks."""

    number: int | None
    """Number of the generation that was loaded. None if the complete fallback was loaded. Generations
    that may be complete then stay until the next save."""
    step: int | None
    """Step of the generation. None if the complete fallback was loaded."""
    from_fallback: tuple[str, ...]
    """Tensors that survived on no host. They were read from the fallback, whose saved fingerprints
    of them are equal."""
    skipped: tuple[str, ...]
    """What was not loaded, and why: newer generations, generations from which the job did not
    continue, a fallback that cannot be used, and, if the complete fallback was loaded, all older
    generations."""
    bytes_checked: int
    """Bytes of blocks that this rank compared with their checksums. Data that it received from other
    hosts was compared on both sides, and counts on both."""
    load: LoadReport

    def __repr__(self) -> str:
        """One line."""
        what = "the fallback" if self.number is None else f"generation {self.number}, step {self.step}"
        odd = [f"{format_names(self.from_fallback)} from the fallback"] if self.from_fallback else []
        odd += [f"{len(self.skipped)} skipped"] if self.skipped else []
        odd += self.load._first_of_each("excluded")
        return f"TierRestoreReport({', '.join([what, *odd])})"


@renamed(passed_over="skipped")
@dataclass(frozen=True, repr=False)
class GatherReport(Tabled):
    """What `gather` did."""

    path: str
    number: int
    step: int
    files: int
    nbytes: int
    """Size of the data files in bytes."""
    skipped: tuple[str, ...] = ()
    """What was not used, and why: folders that are not a host's folder, and generations that are
    not earlier states of this one."""

    def __repr__(self) -> str:
        """One line."""
        odd = f", {len(self.skipped)} skipped" if self.skipped else ""
        return (
            f"GatherReport(generation {self.number}, step {self.step}: {format_count(self.files, 'file')}, "
            f"{format_bytes(self.nbytes)} in {self.path!r}{odd})"
        )
