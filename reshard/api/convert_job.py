"""The arguments of a conversion, as a value that workers receive; its files, one task each; and its
records of finished work."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from glob import escape
from typing import Any, TypeVar

import msgspec
import xxhash

from planners.geometry.layout import StateLayout, TensorSpec
from planners.geometry.topologies import Topology
from planners.units import format_count
from reshard.api.plan import unsharded_text
from reshard.api.task_shares import absolute, files_of
from reshard.checkpoint import Checkpoint, open as open_checkpoint
from reshard.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatError,
    LayoutError,
    OptionError,
    StorageError,
    format_value,
    option_error,
)
from reshard.formats.detect import JOB_FOLDER
from reshard.formats.format import Writing
from reshard.formats.normalize import beside, canonical_contents, keep_beside, normalize
from reshard.formats.sections import with_empty
from reshard.formats.table import NOT_SHARDED, writing_of
from reshard.live.plain_data import check_text
from reshard.mapping import Cast, Mapping as StateMapping, apply_dict
from reshard.mapping.mapped_tensors import LOSES, cast, is_floating
from reshard.native import commit, manifest
from reshard.ranks import liveness
from reshard.ranks.liveness import KeptLease, WriterLease
from reshard.storage.base import NOTHING, Storage, is_temporary, temporary_name
from reshard.storage.opening import open_storage, path_text
from reshard.stored.checksums import Checking
from reshard.stored.source import OnBytes
from reshard.stored.streaming import MAX_SHARD_BYTES, FilePlan, FormatWriter, Target, WrittenFile


@dataclass(frozen=True)
class ConvertJob:
    """The arguments of `convert` that decide what is written."""

    source: Any
    target: Any
    format: str
    mapping: Any
    onto: StateLayout | Topology | None
    select: tuple[str, ...]
    dtype: str | None
    normalized: bool
    model_only: bool
    hints: Mapping[str, Any] | None
    max_shard_bytes: int | None
    check: bool

    def __post_init__(self) -> None:
        """Raises OptionError for wrong arguments, FormatError or LayoutError for those that do not
        fit together."""
        if not isinstance(self.onto, StateLayout | Topology | None):
            raise OptionError(
                f"onto must be a StateLayout or Topology, or text such as 'fsdp=4', got {format_value(self.onto)}"
            )
        if self.dtype is not None:
            try:
                floating = is_floating(self.dtype)
            except FormatError as error:
                raise option_error(str(error), FormatError) from None
            if not floating:
                raise option_error(
                    f"dtype must be a floating-point type, got {format_value(self.dtype)}: {LOSES}", FormatError
                )
        if self.onto is not None and not self.writing.is_sharded:
            raise LayoutError(f"{self.format} {NOT_SHARDED}")
        if self.max_shard_bytes is not None:
            if type(self.max_shard_bytes) is not int or self.max_shard_bytes < 1:
                got = format_value(self.max_shard_bytes)
                words = f"max_shard_bytes must be a number >= 1, such as 5_000_000_000, got {got}"
                raise option_error(words, FormatError)
            if self.onto is not None or not self.writing.is_split:
                what = f"{self.format} files" if self.onto is None else "the files of each rank"
                raise OptionError(f"{what} are not split by size: leave out max_shard_bytes")
        if isinstance(self.source, dict) and not hasattr(self.source, "_INSTEAD"):
            fix = "save it first, reshard.save(state, path), and pass the path"
            raise option_error(f"convert reads a checkpoint, got a state: {fix}", StorageError)
        path = "" if isinstance(self.target, Storage) else path_text(self.target)
        if self.writing.is_one_file and (not path or os.path.isdir(path)):
            is_folder = path and f"{path} is a folder, but "
            raise FormatError(f"{is_folder}{self.format} writes one file: pass its path")

    @property
    def writing(self) -> Writing:
        """How the format is written. Raises FormatError for an unknown format, or one that is only read."""
        return writing_of(self.format)

    def journal(self, digest: str) -> Journal:
        """Return the records of the conversion."""
        file = os.fspath(self.target).rstrip("/").rpartition("/")[2] if self.writing.is_one_file else ""
        return Journal(self.storage(), digest, file)

    def storage(self) -> Storage:
        """Return where the files go."""
        if self.writing.is_one_file:
            folder, _, _ = os.fspath(self.target).rstrip("/").rpartition("/")
            return open_storage(folder or ("/" if os.fspath(self.target).startswith("/") else "."))
        return open_storage(self.target)

    def state(self) -> Checkpoint:
        """Return the state to write, lazily, under its new names."""
        state = self.source
        if not isinstance(state, Checkpoint):
            state = open_checkpoint(state, check=self.check)
        in_form = self.writing.form is not None
        if self.normalized or self.model_only or in_form:
            source = state
            contents = canonical_contents(source.contents, self.hints, source.url, model_only=self.model_only)
            contents = replace(contents, checking=source.contents.checking, files=source.contents.files)
            if self.model_only:  # it may be a second model
                lost = filter(source.contents.tensors.__contains__, beside(source.contents))
                contents = replace(contents, left_out=(*contents.left_out, *lost))
            else:
                contents = keep_beside(contents, source.contents, for_framework=in_form)
            state = Checkpoint(contents, source.url)
        if isinstance(self.mapping, StateMapping):
            self.mapping.check_taken(state)
            state = self.mapping.apply(state)
        elif self.mapping is not None:
            state = apply_dict(self.mapping, state)
        if self.select:
            state = state.select(self.select)
        if self.dtype is not None:
            state = StateMapping([Cast("{name+}", self.dtype)]).apply(state)
        return state

    def writer(self, state: Checkpoint, job_id: str) -> FormatWriter:
        """Return the writer of the state. Raises FormatError if the format cannot hold it."""
        writer = self._writer(state, job_id)
        for key, why in writer.refused.items():
            raise FormatError(
                f"{format_count(len(writer.refused), 'object')} of {state.url} cannot be written, such as {key!r}: "
                f"{why}. {self.without(writer.refused)}"
            )
        return writer

    def without(self, keys: Iterable[str]) -> str:
        """Return advice on how to omit these keys."""
        return f"To leave them out: select={[*(self.select or '*'), *('!' + escape(key) for key in keys)]}"

    def _writer(self, state: Checkpoint, job_id: str) -> FormatWriter:
        contents, onto = state.contents, self.onto
        if onto is not None:
            specs = {n: state[n].stored.spec for n in state if n not in state.aliases}
            onto = _made(onto, specs) if isinstance(onto, Topology) else onto
            _check_onto(onto, specs, self.dtype)
        if self.writing.form is not None:
            found = normalize(contents, None, state.url)
            contents = self.writing.form(
                found, with_empty(contents), self.hints, lambda tensor, name: cast(tensor, "float32", name), state.url
            )
        path = self.target.url if isinstance(self.target, Storage) else os.fspath(self.target)
        name = path.rstrip("/").rpartition("/")[2]
        if not self.writing.is_one_file:  # pickles hold any text
            for key in (*contents.tensors, *contents.objects, *contents.per_rank):
                check_text(key)
        return self.writing.writer(contents, Target(name, job_id, self.max_shard_bytes or MAX_SHARD_BYTES, onto))

    def absolute(self) -> ConvertJob:
        """Return the same job with absolute paths, for processes with another working directory."""
        return replace(self, source=absolute(self.source), target=absolute(self.target))

    def digest(self, state: Checkpoint) -> str:
        """Return a digest that is equal for equal work on an unchanged source, so that interrupted
        work is recognized."""
        onto = self.onto.digest() if isinstance(self.onto, StateLayout) else str(self.onto)
        facts = [self.format, self.mapping, self.select, self.dtype, self.normalized, self.model_only, self.hints]
        facts += [self.max_shard_bytes, self.check, str(absolute(self.target)), onto]
        facts += [list(state.objects), files_of(state, absolute(state.url)), getattr(self.source, "derivation", "")]
        seen = xxhash.xxh3_128(repr(facts).encode())
        for name in state:
            seen.update(repr(state[name].stored.spec).encode())
        return str(seen.hexdigest())


def _made(onto: Topology, specs: Mapping[str, TensorSpec]) -> StateLayout:
    layout = onto.layout(specs)
    for axis, fqns in onto.unsharded_axes(layout).items():
        raise LayoutError(
            f"{unsharded_text(axis, fqns)}: pass a Topology with rules that match them, or leave out the axis"
        )
    return layout


def _check_onto(onto: StateLayout, specs: Mapping[str, TensorSpec], dtype: str | None) -> None:
    wrong = [name for name, spec in specs.items() if name not in onto or onto[name].spec != spec]
    wrong += [name for name in onto if name not in specs]
    if wrong:
        name, layout = wrong[0], "the layout given as onto="
        have, want = (of and f"{of.dtype} {list(of.shape)}" for of in (specs.get(name), onto.specs.get(name)))
        if have and want:
            if specs[name].shape == onto[name].spec.shape:
                have, want = specs[name].dtype, onto[name].spec.dtype
            text = f"is {have} {'after dtype=' if dtype else 'in the checkpoint'}, but {want} in {layout}"
        else:
            text = (
                f"is in the checkpoint, but not in {layout}" if have else f"is in {layout}, but not in the checkpoint"
            )
        more = f". {format_count(len(wrong), 'tensor')} differ" if len(wrong) > 1 else ""
        raise LayoutError(f"{name!r} {text}{more}")


# The files, each a task: written from the source, and recorded in the journal.


_ASK_S = 2.0
"""How often a running task checks whether it is still wanted."""


def dealt(files: Sequence[FilePlan], count: int) -> list[list[FilePlan]]:
    """Distribute the files into `count` groups of about equal bytes, from the plan alone."""
    hands: list[list[FilePlan]] = [[] for _ in range(count)]
    loads = [0] * count
    for file in sorted(files, key=lambda file: (-file.nbytes, file.name)):
        least = min(range(count), key=lambda i: (loads[i], i))
        hands[least].append(file)
        loads[least] += file.nbytes + 1
    return hands


@dataclass(frozen=True)
class ConvertWork:
    """A conversion in progress. Its tasks are the names of its files."""

    job: ConvertJob
    job_id: str
    digest: str
    holder: WriterLease

    def begin(self) -> FileTasks:
        """Open the source, and find the target. Raises StorageError if they differ from the driver's."""
        journal = self.job.journal(self.digest)
        journal.holder = self.holder
        journal.check()
        state = self.job.state()
        if self.job.digest(state) != self.digest:
            raise StorageError(
                f"this worker sees other files at {state.url} than the driver: all workers must see the same "
                "files, unchanged"
            )
        return FileTasks(self.job.writer(state, self.job_id), journal, state.contents.checking)


class FileTasks:
    """Writes files one by one. After the file `last`, compares everything that was not compared yet."""

    def __init__(
        self,
        writer: FormatWriter,
        journal: Journal,
        checking: Checking,
        *,
        on_bytes: OnBytes = lambda nbytes: None,
        last: str | None = None,
    ) -> None:
        self._writer, self._journal, self._checking = writer, journal, checking
        self._on_bytes, self._last = on_bytes, last
        self._files = {file.name: file for file in writer.files}
        self._unchecked, self._next_ask = checking.bytes_unchecked, 0.0

    def __call__(self, name: str) -> bool:
        """Write a file and record it. Return whether an earlier attempt had written it."""
        self._ask()
        if self._journal.is_finished(name):
            return True
        before = self._overflowed(name)
        done = self._writer.write(self._journal.storage, self._files[name], self._on_piece)
        facts = {"unchecked_bytes": self._newly_unchecked(name), "overflowed": dict(self._overflowed(name) - before)}
        done = msgspec.structs.replace(done, facts={**done.facts, **facts})
        try:
            self._journal.check()
        except StorageError:
            if not self._journal.is_continued():  # no process would look for it
                self._journal.storage.delete(done.name)
            raise
        self._journal.add(name, done)
        return False

    def _overflowed(self, name: str) -> Counter[str]:
        out = Counter[str]()
        for part in self._files[name].parts:
            region = self._writer.region(part)
            for source in {chunk.place.source for chunk, _ in region.stored.meeting(region.box)}:
                out[part.spec.fqn] += source.overflowed
        return out

    def _newly_unchecked(self, name: str) -> int:
        if self._last in (None, name):
            self._checking.finish(self._files[name].nbytes if self._last is None else None)
            self._checking.confirm()
        before, self._unchecked = self._unchecked, self._checking.bytes_unchecked
        return self._unchecked - before

    def _on_piece(self, nbytes: int) -> None:
        self._on_bytes(nbytes)
        if time.monotonic() > self._next_ask:
            self._ask()

    def _ask(self) -> None:
        self._journal.check()
        self._next_ask = time.monotonic() + _ASK_S


# The finished files of an interrupted conversion: one small record per file, in a folder of the
# target that is deleted at the end.
#
# convert-<digest>/claim         who writes here: what a dead process left is removed, by others or by `prune`
# convert-<digest>/job           the id of the job: equal jobs find each other by the digest
# convert-<digest>/<file>.json   a file that is whole: its length and checksum
#
# A record ends with its digest. One that was changed counts as absent.


T = TypeVar("T")
_HEAD = "job"
_CLAIM = "claim"
_PIECE_BYTES = 16 << 20


class _Head(msgspec.Struct):
    job_id: str


class Journal:
    """The records of a job in its target."""

    def __init__(self, storage: Storage, digest: str, file: str = "") -> None:
        """`file`: the name of the target if it is a single file, because other jobs may write other
        files beside it."""
        self.storage = storage
        self.digest = digest
        self.file = file
        self.folder = f"convert-{digest}"
        self.holder: WriterLease | None = None
        """The owner of the claim, if known."""
        self.left: list[str] = []
        """Temporary objects that existed when this process began."""
        self._job_id = ""
        self._lease: KeptLease | None = None

    def begin(self, *, resume: bool) -> str:
        """Claim the target until `leave`, and remove what dead jobs left there.

        Return the id of the job: that of the interrupted one, if there is one and `resume` is True,
        and otherwise a new one. Raises StorageError if another job is running here. If a job's
        process cannot be seen from here, wait to see whether it renews its claim.
        """
        names = self.names()
        self.left = [*filter(is_temporary, names)]
        for folder, claim, job_id in _jobs(self.storage, names):
            is_mine = folder == self.folder
            if claim is not None and (is_mine or not self.file) and self._is_running(folder, claim, job_id):
                raise StorageError(
                    f"{claim} is already converting to {self.storage.url}: wait until it ends, or choose another folder"
                )
            if is_mine and resume and not _has_ended(self.storage, job_id):
                self._job_id = job_id
        remove_dead_jobs(self.storage, names, spare=self.folder if self._job_id else "")
        is_new = not self._job_id
        if is_new:
            _remove_records(self.storage, self.storage.list(f"{self.folder}/"), self.folder)
            self._job_id = commit.new_save_id().replace("-", "")
        self._lease = KeptLease(self.storage, f"{self.folder}/{_CLAIM}", self._job_id)
        self.holder = self._lease.holder
        if is_new:
            self.storage.publish(f"{self.folder}/{_HEAD}", manifest.encode_sealed(_Head(self._job_id)))
        return self._job_id

    def names(self) -> dict[str, int]:
        """Return the files in the target, with their sizes. If it is a single file: those beside
        it, and records of conversions, but nothing else in folders beside it, because that can be a
        home directory."""
        if not self.file:
            return self.storage.list()
        top = self.storage.top()
        beside = self.storage.list(self.file) if top is None else top
        return {name: size for name, size in beside.items() if "/" not in name} | self.storage.list("convert-")

    def _is_running(self, folder: str, claim: WriterLease, job_id: str) -> bool:
        if claim.is_seen() or claim.has_left:
            return claim.is_running(job_id)
        return liveness.is_kept(self.storage, f"{folder}/{_CLAIM}", claim)

    def check(self) -> None:
        """Raise StorageError if the claim is no longer that of the job's driver."""
        if self.holder is None:
            return
        found = self._claim()
        if found is None or not found.is_of(self.holder):
            now = "no process does" if found is None or found.has_left else f"{found} does"
            raise StorageError(
                f"{self.holder} no longer converts to {self.storage.url}, {now}: all workers must see the same folder"
            )

    def is_continued(self) -> bool:
        """Return whether another process now works on this job."""
        found = self._claim()
        return found is not None and not found.has_left

    def _claim(self) -> WriterLease | None:
        return liveness.read_lease(self.storage, f"{self.folder}/{_CLAIM}")

    def give_up(self) -> bool:
        """Request that the processes which write for this job stop. Any process may then continue it.
        Returns False if another process already does, because it considered this one dead."""
        return self._lease is not None and self._lease.give_up()

    def leave(self) -> None:
        """Release the claim: the job is done, or any process may continue or remove it."""
        if self._lease is not None:
            self._lease.stop()

    def tidy(self) -> None:
        """Clean up after a failure, when no process still writes. Only complete files stay, for the
        next try. If the job finished no file, nothing stays. If another process continues the job,
        its files are left alone."""
        if not self.give_up():
            return
        names = self.names()
        records = [name for name in names if name.startswith(f"{self.folder}/") and name.endswith(".json")]
        whole = tuple(
            done.name for done in (_decoded(self.storage, name, WrittenFile) for name in records) if done is not None
        )
        for name in _unpublished(self.storage, names, self._job_id):
            is_claim = name.endswith(f"/{commit.CLAIM}")
            if not (whole and is_claim) and not (whole and name.startswith(whole)):
                self.storage.delete(name)
        if not whole:
            _remove_records(self.storage, names, self.folder)

    def add(self, file: str, done: WrittenFile) -> None:
        """Record that this file is complete and durable."""
        self.storage.publish(f"{self.folder}/{_flat(file)}.json", manifest.encode_sealed(done))

    def recorded(self, files: Iterable[str]) -> set[str]:
        """Return the files that have a record. Nothing is checked."""
        there = self.storage.list(f"{self.folder}/")
        return {file for file in files if f"{self.folder}/{_flat(file)}.json" in there}

    def is_finished(self, file: str) -> bool:
        """Return True if a file has a record, and the recorded length and checksum."""
        done = _decoded(self.storage, f"{self.folder}/{_flat(file)}.json", WrittenFile)
        return done is not None and self._holds(done.name, done)

    def has_named(self, file: str) -> bool:
        """Return True if an interrupted publication of this job gave a file its own name."""
        done = _decoded(self.storage, f"{self.folder}/{_flat(file)}.json", WrittenFile)
        return done is not None and self._holds(file, done)

    def records(self, files: Iterable[str]) -> dict[str, WrittenFile]:
        """Return the records of all files. Raises StorageError if one is missing, or its file has
        another length."""
        out, seen = {}, self.names()
        for file in files:
            name = f"{self.folder}/{_flat(file)}.json"
            done = _decoded(self.storage, name, WrittenFile) if name in seen else None
            if done is None or seen.get(done.name) != done.nbytes:
                raise StorageError(
                    f"{file} was written by another process, but is not visible in {self.storage.url}: all "
                    "processes must share the same folder"
                )
            out[file] = done
        return out

    def end(self) -> None:
        """Remove the records after everything is published. If another process considered this one
        dead and continues the job, its records stay."""
        self.leave()
        if self._lease is not None and self._lease.is_taken:
            return
        _remove_records(self.storage, self.storage.list(f"{self.folder}/"), self.folder)

    def _holds(self, name: str, done: WrittenFile) -> bool:
        """Return True if an object has the length and checksum of a record."""
        there = self.storage.list(name).get(name) == done.nbytes
        return there and self._digest(name, done.nbytes) == done.digest

    def _digest(self, name: str, nbytes: int) -> str:
        state = xxhash.xxh3_128()
        buffer = bytearray(min(nbytes, _PIECE_BYTES))
        for start in range(0, nbytes, _PIECE_BYTES):
            piece = memoryview(buffer)[: min(_PIECE_BYTES, nbytes - start)]
            self.storage.read_into(name, start, piece)
            state.update(piece)
        return str(state.hexdigest())


def _flat(file: str) -> str:
    return file.replace("/", "~")


def _decoded(storage: Storage, name: str, kind: type[T]) -> T | None:
    """Read a record. None if it is missing or was changed."""
    try:
        return manifest.decode_sealed(storage.read(name), kind)
    except (CheckpointNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def remove_dead_jobs(storage: Storage, names: Collection[str], *, spare: str = "") -> list[str]:
    """Remove the records and unfinished files of conversions whose processes have ended. Those of
    jobs that may still be running stay, and those with records in the folder `spare`. `names` are
    the names in the storage. Returns the ids of the jobs.
    """
    removed = []
    for folder, claim, job_id in _jobs(storage, names):
        if folder == spare or liveness.may_be_alive(claim, job_id):
            continue
        if job_id:
            for name in _unpublished(storage, names, job_id):
                storage.delete(name)
        _remove_records(storage, names, folder)
        removed.append(job_id)
    for folder in filter(is_job, storage.empty_folders("convert-")):
        storage.delete(f"{folder}/{NOTHING}")
    return removed


def is_job(folder: str) -> bool:
    """Return True if a folder, by its name, holds the records of a conversion."""
    return JOB_FOLDER.fullmatch(f"{folder}/") is not None


def _jobs(storage: Storage, names: Iterable[str]) -> list[tuple[str, WriterLease | None, str]]:
    """Return the folder, claim, and id of each job that has records; "" if its id is unknown."""
    found = []
    for folder in {match[0] for name in names if (match := JOB_FOLDER.match(name))}:
        head = _decoded(storage, f"{folder}{_HEAD}", _Head)
        claim = liveness.read_lease(storage, f"{folder}{_CLAIM}")
        found.append((folder.rstrip("/"), claim, "" if head is None else head.job_id))
    return found


def _has_ended(storage: Storage, job_id: str) -> bool:
    """Return whether the job has published the target. Its records are then about to be removed, or
    a killed process left them. If a conversion resumed it, it would overwrite published files."""
    if ".metadata" in storage.list(".metadata") and job_id.encode() in storage.read(".metadata"):
        return True
    return commit.counting(storage) == commit.save_id_of(job_id)


def _unpublished(storage: Storage, names: Collection[str], job_id: str) -> list[str]:
    """Return the files whose names show that they are the job's, and that no checkpoint uses."""
    staged, items = temporary_name("", job_id), f"_{job_id}_"
    found = [name for name in names if name.endswith(staged)]
    distcp = [name for name in names if items in name and name.endswith(".distcp")]
    if distcp and (".metadata" not in names or job_id.encode() not in storage.read(".metadata")):
        found += distcp
    save_id = commit.save_id_of(job_id)
    data = storage.names(f"{commit.folder_of(save_id)}/")
    if data:
        with suppress(CorruptCheckpointError, FormatError):  # a damaged manifest: the generation that counts is unknown
            found += data if commit.published(storage) != save_id else []
    return found


def _remove_records(storage: Storage, names: Iterable[str], folder: str) -> None:
    """Remove the claim and the id last, so that an interrupted removal can be continued."""
    mine = [name for name in names if name.startswith(f"{folder}/")]
    for name in sorted(mine, key=lambda name: (name.endswith(f"/{_HEAD}"), name.endswith(f"/{_CLAIM}"))):
        storage.delete(name)
