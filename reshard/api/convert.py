"""`convert`: any checkpoint to any format that can be written, in pieces, with any number of
processes."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any

import torch.distributed as dist

from planners.geometry.layout import StateLayout
from planners.geometry.topologies import Topology, topology_of
from planners.units import format_bytes, format_count
from reshard.api.convert_job import ConvertJob, ConvertWork, FileTasks, Journal, dealt
from reshard.api.reports import CheckedReport, WrittenReport, overflows
from reshard.api.tasks import check_executor, engine, needed, run_tasks
from reshard.arguments import check_options, globs_of, renamed
from reshard.checkpoint import Checkpoint, CheckpointSource, unless_replaced
from reshard.errors import (
    CheckpointError,
    CheckpointExistsError,
    FormatError,
    ReshardError,
    format_names,
    option_error,
)
from reshard.formats.detect import BECOMES_FOLDER, FILE_SUFFIXES, kind_beside, refuse_first_step, refuse_run, run_in
from reshard.formats.sections import find_sections, walk
from reshard.formats.table import ALSO_CALLED, FormatName
from reshard.live.dtypes import full_name
from reshard.live.garbage_collection import gc_paused
from reshard.live.plain_data import array_bytes
from reshard.mapping import Mapping as StateMapping
from reshard.native.commit import folder_of, generations_in
from reshard.native.manifest import HF_INDEX, MANIFEST
from reshard.native.reader import detect
from reshard.ranks.group import MEETING_S, Group, either, pack_flags, unpack_flags
from reshard.ranks.liveness import WriterLease
from reshard.ranks.progress import Progress, phase
from reshard.ranks.timespans import Span
from reshard.state import count_objects
from reshard.storage.base import Storage
from reshard.storage.opening import StoragePath
from reshard.stored.checksums import Checking
from reshard.stored.contents import Contents
from reshard.stored.streaming import FormatWriter, Publication

_log = logging.getLogger("reshard")

IN_REPORT = {"is_in_report": True}
"""Marks log records whose text is also in the report."""


@renamed(left_out="omitted", retyped="changed_classes")
@dataclass(frozen=True, repr=False)
class ConvertReport(WrittenReport, CheckedReport):
    """What a conversion did. Only `phases` differs between ranks."""

    source: str
    target: str
    files: tuple[str, ...]
    """Files with tensors."""
    resumed: tuple[str, ...]
    """Files that an interrupted conversion had finished. Their checksums were compared."""
    omitted: tuple[str, ...]
    """Keys of the source that the format cannot store, and those of `unnamed`."""
    unnamed: tuple[str, ...]
    """With `normalized`, keys of values that have no canonical name and are not plain data, such as
    per-rank values and averages of the model. With `model_only`, keys of tensors of neither model
    nor optimizer. Otherwise, keys of values that cannot be read here."""
    changed_classes: Mapping[str, tuple[str, str]]
    """key -> (saved class, written class) of containers whose class the format cannot record, such as
    a named tuple. The written class is a builtin one."""
    warnings: tuple[str, ...]
    """Warnings about the source and the output."""
    overflowed: Mapping[str, int]
    """key -> number of finite elements beyond the range of the dtype that they were converted to, in
    the job. Elements that are read twice, as for two files of `onto`, count twice."""

    def __repr__(self) -> str:
        """One line."""
        odd = f", omitted {format_names(self.omitted)}" if self.omitted else ""
        changed_classes = [f"{key}: {old} -> {new}" for key, (old, new) in self.changed_classes.items()]
        odd += f", changed_classes {format_names(changed_classes)}" if changed_classes else ""
        odd += f", {self.unchecked}" if self.unchecked else ""
        odd += f", warnings: {len(self.warnings)}, the first: {self.warnings[0]}" if self.warnings else ""
        head = f"{format_count(self.tensors, 'tensor')}, {format_bytes(self.total_bytes)}"
        return f"ConvertReport({head} from {self.source!r} to {self.target!r}, {self.format}{odd})"


@renamed(deadline_s="timeout")
def convert(
    source: CheckpointSource,
    target: StoragePath,
    *,
    format: FormatName = "native",
    mapping: Mapping[str, str] | StateMapping | None = None,
    onto: StateLayout | Topology | str | None = None,
    select: str | Iterable[str] | None = None,
    dtype: Any = None,
    normalized: bool = False,
    model_only: bool = False,
    hints: Mapping[str, Any] | None = None,
    max_shard_bytes: int | None = None,
    check: bool = True,
    workers: int = 1,
    executor: Executor | None = None,
    process_group: dist.ProcessGroup | None = None,
    alone: bool = False,
    overwrite: bool = False,
    resume: bool = True,
    progress: bool = False,
    timeout: float | timedelta = 86_400.0,
) -> ConvertReport:
    """Convert a checkpoint to another format, other names, or another layout.

        reshard.convert("run/step-1000", "hf", format="safetensors", model_only=True, dtype="bfloat16")

    Each process holds at most 48 MiB of tensors at a time, even if a tensor is larger. The output is
    published last, so an interrupted conversion leaves nothing that opens as a checkpoint. To continue
    it, call `convert` again with the same arguments. If a conversion was killed, another conversion to
    the same output, or `prune`, deletes its files.

    If the source has checksums and fingerprints, `convert` compares the data that it reads with the
    checksums, and the output with the fingerprints.

    Args:
        source: a path or URL of any format that `open` reads, or an open `Checkpoint`.
        target: where to write the output: a folder, URL, or `Storage` other than the source's. For
            "torch_save", the path of a file.
        format: the format to write, such as "dcp". "huggingface" is another name of "safetensors",
            and "torch" of "torch_save". Formats with their own names and shapes are written from
            canonical names, which may need `hints`.
        mapping: a `reshard.mapping.Mapping`, or a dict from new names to names in the source.
        onto: write the files that the ranks of this layout or topology would have written (native
            and dcp). A topology can be in words, such as "fsdp=8", or the axes that the source
            records: see `plan`.
        select: globs of the new names to write. Globs that begin with `!` exclude names.
        dtype: convert floating-point tensors of at least one dim to this dtype, such as "bfloat16"
            or "bf16". Values out of its range become inf or, if it has no inf, NaN or its largest
            number. `overflowed` counts them.
        normalized: convert to canonical names first: see `Checkpoint.normalized`. Plain objects
            other than those of the model and the optimizer keep their keys, unless only the name of
            a rank's file identifies them. `omitted` lists the others.
        model_only: write only the model's tensors. Their names are FQNs, without a prefix.
        hints: facts that canonical names need and the checkpoint lacks. Errors say which ones.
        max_shard_bytes: begin a new file at this size. Default: 5 GB. A larger tensor gets its own
            file. Not with `onto`, and not for formats whose files have fixed contents.
        check: False accepts a damaged source, and computes new fingerprints for the output.
        workers: number of processes on this host that write files at the same time.
        executor: writes each file as a task, for example on Dask, Ray, or MPI. Workers open the
            source and the output themselves. Lost tasks are retried.
        process_group: with torch.distributed initialized, the ranks that share the work. All need
            access to the output.
        alone: this process converts by itself, even in a running job.
        overwrite: replace an existing checkpoint of the same format at `target` once all new files
            are written. "native", "dcp", and "torch_save" switch at once. Other formats have fixed
            file names and replace one file after another: if this is interrupted, neither
            checkpoint opens until you convert again.
            False: an existing one is an error. Files that torch.save did not write are never replaced.
        resume: continue an interrupted conversion with the same arguments.
        progress: show a progress bar if stderr is a terminal.
        timeout: limit for the call, in seconds or as a `timedelta`.

    Raises:
        CorruptCheckpointError: the source changed after it was saved. Nothing was published.
        FormatError: the format cannot store the source.
        CheckpointExistsError: there is a checkpoint at `target`, and `overwrite` is False.
        KeyMismatchError: the mapping or selection does not match the source.
        Other errors are those of `reshard.open`.
    """
    group = Group(process_group, alone=alone, deadline_s=timeout)
    checking = source.contents.checking if isinstance(source, Checkpoint) else Checking()
    with phase("convert", path=target) as phases, group.together("convert"), checking.off(not check):
        check_options(overwrite=overwrite, resume=resume, check=check, progress=progress)
        check_options(normalized=normalized, model_only=model_only, mapping=mapping, hints=hints)
        globs = globs_of(select) or ()
        wanted = None if dtype is None else full_name(dtype)
        name = ALSO_CALLED.get(format, format)
        its = onto if not isinstance(onto, str) else None
        job = ConvertJob(
            source, target, name, mapping, its, globs, wanted, normalized, model_only, hints, max_shard_bytes, check
        )
        _check(group, source, target, workers, executor)
        with group.together("convert by all ranks (alone=True: by one)", deadline_s=MEETING_S, meet=False):
            group.same_options("convert", {"overwrite": overwrite, "resume": resume})
        with phase("open"):
            state = job.state()
        if isinstance(onto, str):
            job = replace(job, onto=topology_of(onto, None, state.layout))
        with unless_replaced("convert", state):
            written = _run(job, state, group, workers, executor, overwrite=overwrite, resume=resume, progress=progress)
        report = _report(job, state, *written, phases)
        if report.overflowed and group.rank == 0:
            _log.warning("%s: %s", report.target, report.warnings[-1], extra=IN_REPORT)
    if report.unchecked and group.rank == 0:
        _log.info("%s was converted, %s", report.source, report.unchecked)
    return report


def _report(
    job: ConvertJob,
    state: Checkpoint,
    writer: FormatWriter,
    resumed: tuple[str, ...],
    unchecked: int,
    lost: dict[str, int],
    phases: Span,
) -> ConvertReport:
    written = {key: value for key, value in state.objects.items() if key not in writer.left_out}
    return ConvertReport(
        source=state.url,
        target=job.target.url if isinstance(job.target, Storage) else os.fspath(job.target),
        format=job.format,
        tensors=len({*state} - {*state.aliases, *writer.left_out}),
        objects=count_objects(replace(state.contents, objects=written)),
        files=tuple(file.name for file in writer.files),
        total_bytes=writer.total_bytes + array_bytes(written),
        resumed=resumed,
        aliases=dict(state.aliases),
        omitted=writer.left_out,
        unnamed=state.contents.left_out,
        changed_classes=writer.changed_classes,
        warnings=(
            *writer.contents.warnings,
            *getattr(job.onto, "notes", ()),
            *_unexpected(job, writer.contents),
            *overflows(lost, {key: writer.stored(key).spec.dtype for key in lost}),
        ),
        overflowed=lost,
        bytes_unchecked=unchecked,
        unchecked=state.contents.checking.words(unchecked, writer.total_bytes),
        phases=phases,
    )


def _unexpected(job: ConvertJob, written: Contents) -> Iterator[str]:
    """Yield warnings about what readers of the format may not expect."""
    if job.writing.is_one_file:
        from reshard.formats.torch_save.writer import needs_code

        if keys := needs_code(written.objects):
            yield f"torch.load needs weights_only=False for: {format_names(keys, 20)}. {job.without(keys)}"
    if job.format != ALSO_CALLED["huggingface"]:
        return
    sections = find_sections(written)
    keys = [leaf.key for _, tree in sections.optimizers for _, leaf in walk(tree) if leaf.is_tensor]
    if keys and sections.model:
        yield (
            f"{format_count(len(keys), 'tensor')} of an optimizer, such as {keys[0]!r}, were written too, which "
            "Hugging Face tools do not expect: pass model_only=True to write only the weights"
        )


@gc_paused()
def _run(
    job: ConvertJob,
    state: Checkpoint,
    group: Group,
    workers: int,
    executor: Executor | None,
    *,
    overwrite: bool,
    resume: bool,
    progress: bool,
) -> tuple[FormatWriter, tuple[str, ...], int, dict[str, int]]:
    """Write all files and publish them. Return what was written, the files that an earlier try had
    finished, the number of bytes that were not verified, and of elements out of range by key."""
    with phase("agree"):
        digest = job.digest(state)
        group.agree(digest, "what is to be converted", error=CheckpointError)
    _refuse_source(state, job)
    journal = job.journal(digest)
    storage = journal.storage
    job_id, is_new = "", not os.path.exists(storage.url)
    try:
        if group.rank == 0:
            writer = job.writer(state, "0" * 24)
            _check_vacant(job, state, writer, journal, journal.names(), overwrite)
            for text in writer.contents.warnings:
                if text not in state.warnings:
                    _log.warning("%s: %s", storage.url, text, extra=IN_REPORT)
            job_id = journal.begin(resume=resume)
        job_id = group.share(job_id if group.rank == 0 else None, kind=str)
        journal.holder = group.share(journal.holder, kind=WriterLease)
        writer = job.writer(state, job_id)
        with writer.claimed(storage) if group.rank == 0 else nullcontext():
            group.barrier()  # no rank writes before there is a claim
            with engine(executor, workers) as hands:
                resumed = _write(job, writer, journal, group, state.contents.checking, hands, progress)
            unchecked, lost = 0, Counter[str]()
            if group.rank == 0:
                done = journal.records(file.name for file in writer.files)
                if state.contents.checking.enabled:
                    writer.compare_fingerprints(done)
                unchecked = max(0, sum(row.facts["unchecked_bytes"] for row in done.values()))
                for row in done.values():
                    lost.update(row.facts.get("overflowed", {}))
                with phase("publish"):
                    writer.finish(Publication(storage, done, journal.check, journal.left))
                    journal.end()
        shared = group.share(
            (unchecked, dict(sorted(lost.items()))) if group.rank == 0 else None, kind=tuple[int, dict[str, int]]
        )
    except BaseException as error:
        if group.world_size == 1:
            _tidy(journal, error)
            if is_new:
                with suppress(OSError):  # it has finished files
                    os.rmdir(storage.url)
        raise
    finally:
        journal.leave()
    return writer, resumed, *shared


def _tidy(journal: Journal, cause: BaseException) -> None:
    try:
        journal.tidy()
    except ReshardError as second:  # the first error is what the caller must see; the next conversion removes the rest
        cause.add_note(f"deleting unfinished files failed too: {second}")


def _write(
    job: ConvertJob,
    writer: FormatWriter,
    journal: Journal,
    group: Group,
    checking: Checking,
    executor: Executor | None,
    progress: bool,
) -> tuple[str, ...]:
    """Write this rank's share of the unfinished files. Return all that were written."""
    recorded = journal.recorded(file.name for file in writer.files)
    mine = dealt(writer.files, group.world_size)[group.rank]
    mine.sort(key=lambda file: file.name not in recorded)
    nbytes, kept = {file.name: file.nbytes for file in mine}, set[str]()
    executor = needed(executor, len(mine))
    with (
        group.together("write"),
        Progress(show=progress and group.rank == 0, check=group.check).phase("convert", sum(nbytes.values())) as step,
    ):

        def on_done(name: str, is_kept: bool) -> None:
            if is_kept and name in recorded:
                kept.add(name)
            if is_kept or executor is not None:
                step.advance(nbytes[name])

        assert journal.holder is not None
        work = ConvertWork(job.absolute(), writer.job_id, journal.digest, journal.holder)
        here = FileTasks(writer, journal, checking, on_bytes=step.advance, last=next(reversed(nbytes), ""))
        run_tasks(work, nbytes, executor, on_done, here=here, on_stop=journal.give_up)
    flags = [file.name in kept for file in writer.files]
    heard = unpack_flags(group.merge(pack_flags(flags), either, "the exchange of finished files"), len(flags))
    return tuple(sorted(file.name for file, is_finished in zip(writer.files, heard) if is_finished))


def _check(group: Group, source: Any, target: Any, workers: int, executor: Executor | None) -> None:
    check_executor(executor, workers, source, target)
    if executor is not None and group.world_size > 1:
        raise CheckpointError("one process drives an executor: call convert on one rank, with alone=True")


def _refuse_source(state: Checkpoint, job: ConvertJob, *replaced: str) -> None:
    """Raise OptionError if the output goes where the source is, or one of the replaced files is the source's."""
    read = {state.url, *(f"{file.storage.url}/{file.name}" for file in state.contents.files)}
    written = () if isinstance(job.target, Storage) else (job.target, *replaced)  # those in memory may have one name
    if job.source == job.target or not {*map(os.path.realpath, written)}.isdisjoint(map(os.path.realpath, read)):
        raise option_error(f"source and output are the same, {job.target}: choose another output", FormatError)


def _check_vacant(
    job: ConvertJob,
    state: Checkpoint,
    writer: FormatWriter,
    journal: Journal,
    names: Mapping[str, int],
    overwrite: bool,
) -> None:
    storage = journal.storage
    refuse_first_step(job.target)
    if not job.writing.is_one_file and storage.url.endswith(FILE_SUFFIXES):
        _log.warning(BECOMES_FOLDER, storage.url)
    if job.format == ALSO_CALLED["huggingface"] and (steps := run_in(names)):  # Hugging Face tools look only at the top
        _log.warning(
            "%s is the folder of a run with the steps %s, and becomes a checkpoint, too, so its path is ambiguous. To "
            "reshard.open, pass step=, or the path of the new file", storage.url, steps,
        )  # fmt: skip
    elif not job.writing.is_one_file:
        own = {file.name.partition("/")[0] for file in writer.files}  # Megatron's are steps of a run
        refuse_run(storage.url, [name for name in names if name.partition("/")[0] not in own])
    found = writer.occupied(names)
    if found is not None and job.writing.is_one_file and (nbytes := names[found]):
        from reshard.formats.torch_save.reader import looks_like_torch_file

        if not looks_like_torch_file(bytes(storage.read(found, 0, min(nbytes, 20)))):
            raise FormatError(f"{storage.url}/{found} exists and is not a file of torch.save: choose another path")
    if found is not None:
        _refuse_source(state, job, f"{storage.url}/{found}")
    if found is not None and not overwrite and not journal.has_named(found):
        what = f"{storage.url} already contains a checkpoint ({found})"
        raise CheckpointExistsError(
            f"{f'{job.target} already exists' if job.writing.is_one_file else what}: "
            "choose another path, or pass overwrite=True"
        )
    ours: tuple[str, ...] = (MANIFEST, HF_INDEX) if job.format == "native" and detect(storage, names) else ()
    ours += (found,) if found is not None else ()
    kept = [name for name in names if "/" not in name and name not in ours]
    foreign = next((name for name in kept if any(fnmatchcase(name, glob) for glob in job.writing.foreign)), None)
    if foreign is None:
        foreign = writer.ambiguous(storage, names)
    if foreign is None and job.format != "native" and not job.writing.is_one_file:
        native = (f"files of a native checkpoint ({folder_of(save_id)})" for save_id in generations_in(names))
        foreign = next(native, None)
    if foreign is None and not job.writing.is_one_file:
        others = {name: size for name, size in names.items() if not name.startswith("convert-")}
        kind = kind_beside(storage, others, job.format, job.writing.marks)
        foreign = f"a checkpoint of the format {kind}" if kind else None
    if foreign is not None:
        raise FormatError(
            f"{storage.url} contains {foreign}, which would mix with the converted checkpoint. Choose an empty "
            "folder: overwrite=True replaces only the files of a checkpoint of the same format"
        )
