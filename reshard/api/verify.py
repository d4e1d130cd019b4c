"""`verify` checks that a checkpoint is complete and undamaged.

It processes one tensor at a time, in pieces of bounded size, and needs no model, GPU, or process group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from planners.errors import ProofError
from planners.findings import Coverage, Finding, Report
from planners.geometry.box import Box, Range
from planners.plans.plan import verify as prove
from reshard.api.compare import WINDOW_BYTES, CompareReport, compare_sides, elements_of
from reshard.api.stateful_objects import saved_state
from reshard.api.task_shares import SHARE_BYTES, Opening, Share, absolute, is_about, shares
from reshard.api.tasks import check_executor, engine, run_tasks
from reshard.arguments import check_options, renamed
from reshard.checkpoint import Checkpoint, CheckpointSource, open as open_checkpoint, open_damaged, unless_replaced
from reshard.errors import RESTORE, CheckpointError, CorruptCheckpointError, LayoutError, VerificationError
from reshard.formats.torch_save.archive import changed_records, is_archive
from reshard.live.fingerprints import Partial, comparable, partials
from reshard.live.garbage_collection import gc_paused
from reshard.live.plain_data import array_bytes
from reshard.native.commit import index_problem
from reshard.native.manifest import has_digest
from reshard.native.reader import NativeFacts, look_for_files
from reshard.ranks.progress import Phase, Progress
from reshard.stored.checksums import NO_CHECKSUMS, BlockChecksums, changed_block, touched_ranges
from reshard.stored.source import FileSource
from reshard.stored.streaming import windows
from reshard.stored.tensor import LazyTensor, StoredTensor

_SMALL_BYTES = 16 << 10
"""Pieces up to this size are summed up together: a call costs more than their bytes."""


@renamed()
@gc_paused()
def verify(
    path: CheckpointSource,
    against: CheckpointSource | Mapping[str, Any] | None = None,
    deep: bool = True,
    *,
    workers: int = 1,
    executor: Executor | None = None,
    progress: bool = False,
) -> Report:
    """Check that the checkpoint at `path` is complete, consistent, and undamaged.

        reshard.verify("run/step-1000").raise_if_failed()

    Every call checks that all files exist with the right sizes, and that the chunks of each tensor cover it exactly
    once. In the native format, it also proves the read plan, and checks that the index for Hugging Face tools, if there
    is one, matches the manifest. With `deep`, it also reads every byte. If the format has them, it compares blocks with
    checksums, tensors with fingerprints, and records of `torch.save` and DCP files with their CRC-32.

    Args:
        path: a folder, file, URL, `Storage`, or open `Checkpoint`. The folder of a run: its newest complete step.
        against: another checkpoint, or a state dict of full tensors, that must have equal values. Both are read and
            compared as by `compare`. Without `deep`, saved fingerprints are compared if both sides have them.
        deep: read every byte. False: check sizes and metadata only.
        workers: number of processes on this host that read at the same time.
        executor: runs the reads as tasks, as in `reshard.convert`. Then pass both checkpoints by path.
        progress: show a progress bar if stderr is a terminal.

    Returns a report, even of damage. Raises only if there is no checkpoint of a known format, or if a save replaced the
    checkpoint meanwhile.

    `findings` names damaged files and tensors, and the bytes if they are known. For a run, it also names newer steps
    that lost files after their save. `covered.checked_bytes` counts the bytes in which a change would be detected: 0 in
    formats without checksums. `covered` also names what was not opened, such as steps whose saves were killed. It is
    None if the checkpoint is damaged. A damaged checkpoint is not compared with `against`.
    """
    check_executor(executor, workers, path, *([against] if against is not None else []))
    check_options(deep=deep, progress=progress)
    try:
        checkpoint = path if isinstance(path, Checkpoint) else open_damaged(path)
    except CorruptCheckpointError as error:
        return DamageReport(str(path), (Finding(str(error)),), 0)
    contents = checkpoint.contents
    newer = [Finding(contents.skipped[name]) for name in contents.damaged_steps]
    kind, hint, beside = Report, "", ""
    with engine(executor, workers) as hands:
        findings, covered = _verified(checkpoint, checkpoint is path, deep, hands, progress)
        if newer:
            covered, hint = None, "" if findings else f"no problem was found in {checkpoint.url} itself"
        elif against is not None and covered is not None:
            other = _compared(checkpoint, against, not deep, hands, progress)
            findings += other.findings
            hint, beside = other.hint, "".join(f", compared with {it}" for it in getattr(other, "labels", ())[1:])
            kind = DamageReport if other._error is VerificationError else Report
            if isinstance(other, CompareReport) and _is_first_damaged(other):
                covered = None  # without `deep`, the comparison is the first that reads
            else:
                covered = _also_compared(covered, other)
    kind = kind if covered else DamageReport
    title = f"{checkpoint.url}{' as selected or mapped' * bool(checkpoint.derivation)} ({checkpoint.format}){beside}"
    return kind(title, (*newer, *findings), len(checkpoint), covered, hint=hint)


def _lost_since(checkpoint: Checkpoint) -> list[CorruptCheckpointError]:
    """Return errors for files that were deleted or changed their size since the checkpoint was opened."""
    contents, found = checkpoint.contents, dict[str, CorruptCheckpointError]()

    def refuse(error: CheckpointError, *places: tuple[str, int, int]) -> None:
        if str(error) not in found:
            one = found[str(error)] = CorruptCheckpointError(str(error))
            one.places = getattr(error, "places", ()) or places

    for lost in contents.checking.lost or ():
        refuse(lost)
    if (native := contents.details(NativeFacts)) is not None:
        try:
            look_for_files(native, native.storage.list(), refuse)
        except CorruptCheckpointError as error:
            refuse(error)
        return [*found.values()]
    ends = dict.fromkeys(contents.files, 0)  # one past the last byte that a tensor has in each
    late: list[CheckpointError] = []
    for name in checkpoint:
        try:
            for chunk in checkpoint[name].stored.chunks:
                if not chunk.box.is_empty and isinstance(chunk.source, FileSource):
                    ends[chunk.source] = max(ends.get(chunk.source, 0), chunk.window.stop)
        except CheckpointError as error:
            late.append(error)
    for source, stop in ends.items():
        try:
            source.storage.size(source.name)
            source.check(0, stop)
        except CheckpointError as error:
            refuse(error, (source.name, 0, stop))
    for unfound in late:
        refuse(unfound)
    return [*found.values()]


def _verified(
    checkpoint: Checkpoint, was_open: bool, deep: bool, executor: Executor | None, progress: bool
) -> tuple[list[Finding], Coverage | None]:
    """Return the problems of the checkpoint itself and, if there are none, what was covered."""
    with unless_replaced("verify", checkpoint) as findings:
        lost = _lost_since(checkpoint) if was_open else checkpoint.contents.checking.lost or ()
        findings += _metadata_findings(checkpoint)
        told = {it.message for it in findings}
        findings[:0] = [Finding(str(error)) for error in lost if str(error) not in told]
        try:
            total = sum(tensor.nbytes for tensor in checkpoint.values())
        except CheckpointError as error:  # of a tensor, which the findings name
            findings += [] if findings else [Finding(str(error))]
            return findings, None
        if not deep:
            seen = _metadata_checked(checkpoint) and checkpoint.contents.checking.enabled
            return findings, None if findings else Coverage(total, 0, 0, seen, "; ".join(checkpoint.warnings))
        findings += _deep_findings(checkpoint, lost, total, findings, executor, progress)
        return findings, None if findings else _covered(checkpoint, total)


def _is_first_damaged(report: CompareReport) -> bool:
    """Return whether an error is about the first side. One side may be within the other."""
    first, second = report.labels
    is_inner = is_about(f"{absolute(second)}/", first)
    return any(is_about(text, first) and not (is_inner and is_about(text, second)) for text in report.damaged.values())


class DamageReport(Report):
    """The report of `verify` if the checkpoint, or what it was compared with, is damaged."""

    __slots__ = ()

    @property
    def _error(self) -> type[ProofError]:
        return VerificationError


def _also_compared(covered: Coverage, comparison: Report) -> Coverage:
    """Extend the coverage by what a comparison read and, where all is equal, verified."""
    other = comparison.covered
    if other is None:
        return covered
    both = replace(covered, read_bytes=max(covered.read_bytes, other.read_bytes))
    if comparison.ok:
        both = replace(both, checked_bytes=max(covered.checked_bytes, other.checked_bytes))
    mine = "" if both.is_full and both.unchecked == NO_CHECKSUMS else both.unchecked
    return replace(both, unchecked="; ".join(filter(None, (mine, other.unchecked))))


def _deep_findings(
    checkpoint: Checkpoint,
    lost: Sequence[CorruptCheckpointError],
    total_bytes: int,
    known: Sequence[Finding],
    executor: Executor | None,
    progress: bool,
) -> list[Finding]:
    """Return the problems that reading every byte finds, besides the `known` ones."""
    places = [place for error in lost for place in error.places]
    skipped = {name for name, _, _ in places}
    opening = Opening.of(checkpoint) if executor is not None else None
    native = checkpoint.contents.details(NativeFacts)
    files = checkpoint.contents.files if native is None else native.files.values()
    sizes = {file.name: file.nbytes for file in files if not {file.name, f"{file.name}.sums"} & skipped}
    bar = Progress(show=progress)
    with bar.phase("verify", total_bytes, checkpoint) as step:
        with bar.phase("checksums", total_bytes=sum(sizes.values())) as blocks:
            told = {it.message for it in known}
            findings = [
                it for it in _block_findings(checkpoint, opening, sizes, executor, blocks) if it.message not in told
            ]
        if lost or not findings:  # which makes it needless to compare blocks of ours again
            opening = None if opening is None else replace(opening, check=bool(lost) or native is None)
            named = {it.fqn for it in findings}
            unread = set[str]()
            if native is not None:  # of a file that is shorter or longer than it was, no tensor is read
                harmed = {key for place in places for key in native.arrays_at(*place)}
                unread = {key for file, _, last in places for key in native.arrays_at(file, 0, last)} - harmed
            read = _read_findings(checkpoint, opening, executor, step, unread)
            said = {file: str(error) for error in lost for file, _, _ in error.places}
            for i, it in enumerate(read):  # of a file that is gone, the same for all that was in it
                file = it.message.partition("there is no ")[2].partition(" in ")[0]
                read[i] = replace(it, message=said.get(file, it.message))
            findings += [it for it in read if it.fqn not in named]
    # a finding per file of checksums is enough: no values are lost with it
    of_sums = {str(error) for error in lost for file, _, _ in error.places if file.endswith(".sums")}
    return [it for it in (*findings, *_object_findings(checkpoint)) if it.message not in of_sums]


def _object_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Read the values that are no tensors, and those of single ranks."""
    objects, per_rank = checkpoint.objects, checkpoint.contents.per_rank
    for key in (*objects, *per_rank):
        try:
            for value in dict(per_rank[key]).values() if key in per_rank else [objects[key]]:
                if isinstance(value, StoredTensor):
                    LazyTensor(value)[...]
        except CheckpointError as error:
            yield Finding(str(error).removeprefix(f"object {key!r}: "), key)


def _compared(
    checkpoint: Checkpoint, against: Any, by_fingerprint: bool, executor: Executor | None, progress: bool
) -> Report:
    """Call `compare`, with damage as a finding."""
    try:
        against = saved_state(against) if isinstance(against, Checkpoint | Mapping) else open_checkpoint(against)
        return compare_sides(checkpoint, against, (0.0, 0.0, False), by_fingerprint, None, executor, progress)
    except CorruptCheckpointError as error:
        return DamageReport("", (Finding(str(error)),), 0)


def _metadata_checked(checkpoint: Checkpoint) -> bool:
    """Return whether all names, shapes, and objects have a checksum. Opening compares it unless `check` is off."""
    native = checkpoint.contents.details(NativeFacts)
    if native is not None:
        return has_digest(native.storage)
    return checkpoint.format == "torch_save" and all(map(is_archive, checkpoint.contents.files))


def _covered(checkpoint: Checkpoint, total_bytes: int) -> Coverage:
    """Return what a deep check covers: our files, and the zip archives of torch.save."""
    native = checkpoint.contents.details(NativeFacts)
    if native is not None:
        files = {*native.files}
    else:
        files = {source.name for source in checkpoint.contents.files if is_archive(source)}
    metadata_checked = _metadata_checked(checkpoint)
    checked = sum(
        chunk.box.numel * tensor.dtype.itemsize
        for tensor in checkpoint.values()
        for chunk in tensor.stored.chunks
        if not chunk.box.is_empty and isinstance(chunk.source, FileSource) and chunk.source.name in files
    )
    arrays = array_bytes(checkpoint.objects) if metadata_checked else 0
    total_bytes += arrays
    left_open = "; ".join(filter(None, (checkpoint.contents.checking.unchecked, *checkpoint.warnings)))
    return Coverage(total_bytes, total_bytes, checked + arrays, metadata_checked, left_open)


def _metadata_findings(checkpoint: Checkpoint) -> list[Finding]:
    findings = [Finding(problem) for problem in checkpoint.problems()]
    native = checkpoint.contents.details(NativeFacts)
    if native is None:
        return findings
    plan, problem = native.plan, index_problem(native)
    return [*findings, *prove(plan.layout).findings, *prove(plan).findings, *([Finding(problem)] if problem else [])]


@dataclass(frozen=True)
class BlockWork:
    """Compares files with the checksums of their blocks. A task is a part of a file."""

    checkpoint: Opening

    def begin(self) -> Callable[[_FileRange], list[_Problem]]:
        """Opens the checkpoint."""
        return _Blocks(self.checkpoint.open()).problems


_FileRange = tuple[str, int, int]
"""Name, first byte, and one past the last."""
_Problem = tuple[str, int, int]
"""The problem and its range of bytes, which is 0 and 0 if unknown."""


class _Blocks:
    """Compares every block, whether or not a tensor uses it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._native = checkpoint.contents.details(NativeFacts)
        self._files = {source.name: source for source in checkpoint.contents.files} if self._native is None else {}
        self._sums: dict[str, BlockChecksums] = {}

    def problems(self, asked: _FileRange) -> list[_Problem]:
        """Return what is wrong with a part of a file; of foreign archives, with all of it."""
        try:
            if self._native is None:
                return list(changed_records([self._files[asked[0]]]))
            return self._changed(self._native, *asked)
        except CheckpointError as error:
            return [(str(error), 0, 0)]

    def _changed(self, native: NativeFacts, name: str, start: int, stop: int) -> list[_Problem]:
        source, record = native.source(name), native.files[name]
        source.check(0, record.nbytes)
        if name not in self._sums:
            self._sums[name] = native.uncompared(name)
        sums = self._sums[name]
        bad = [(a, b) for a, b in sums.pending(start, stop) if not sums.is_right((a, b), [source.raw(a, b - a)])]
        source.checksums = sums
        return [(changed_block(source.label, block), *block) for block in bad]


def _block_findings(
    checkpoint: Checkpoint, opening: Opening | None, sizes: Mapping[str, int], executor: Executor | None, step: Phase
) -> list[Finding]:
    """Check our own files in parts that end between blocks, and other files in full."""
    native = checkpoint.contents.details(NativeFacts)
    asked = [
        (name, start, min(start + size, nbytes))
        for name, nbytes in sizes.items()
        for size in [nbytes if native is None else SHARE_BYTES // native.block_bytes(name) * native.block_bytes(name)]
        for start in range(0, nbytes, max(size, 1)) or [0]
    ]
    found: dict[_FileRange, list[_Problem]] = {}

    def on_done(part: _FileRange, problems: list[_Problem]) -> None:
        found[part] = problems
        step.advance(part[2] - part[1])

    work = BlockWork(opening) if opening is not None else None
    run_tasks(work, asked, executor, on_done, here=_Blocks(checkpoint).problems)
    problems = dict.fromkeys((part[0], problem) for part in asked for problem in found[part])
    return list(_on_tensors(checkpoint, list(problems))) if problems else []


def _on_tensors(checkpoint: Checkpoint, problems: list[tuple[str, _Problem]]) -> Iterator[Finding]:
    """Yield the tensors of each changed part of a file: of several, those that no longer have
    their saved fingerprints, if any."""
    checking = checkpoint.contents.checking
    with checking.off():  # the changed bytes are read to find out what they are
        places = _places(checkpoint, {name for name, _ in problems})
        for name, (text, start, stop) in problems:
            inside: dict[str, Range] = {}
            for fqn, first, last in places.get(name, ()):
                if first < stop and start < last:
                    low, high = inside.get(fqn, (first, last))
                    inside[fqn] = min(low, first), max(high, last)
            changed = [fqn for fqn in inside if _is_changed(checkpoint, fqn)] if len(inside) > 1 else []
            among = "" if changed or len(inside) < 2 else f" (one or more of the {len(inside)} tensors there)"
            for fqn in changed or inside:
                low, high = inside[fqn]
                yield Finding(f"{text}{among}: {RESTORE}. This tensor has bytes [{low}, {high}) of the file", fqn)
            if not inside:
                yield Finding(f"{text}: {RESTORE}")


def _places(checkpoint: Checkpoint, names: Collection[str]) -> dict[str, list[_FileRange]]:
    """Return the tensors in each file: name, first byte, and one past the last."""
    places: dict[str, list[_FileRange]] = {}
    for fqn, tensor in checkpoint.items():
        for chunk in tensor.stored.chunks:
            try:
                source, window = chunk.source, chunk.window
            except CheckpointError:  # the damage is in the part of the file that locates its tensors
                continue
            if isinstance(source, FileSource) and source.name in names and not chunk.box.is_empty:
                ranges = touched_ranges(window)
                places.setdefault(source.name, []).append((fqn, ranges[0][0], ranges[-1][1]))
    return places


def _is_changed(checkpoint: Checkpoint, name: str) -> bool:
    """Return True if a tensor does not have its saved fingerprint; False also if checking would
    take much work."""
    tensor, wanted = checkpoint[name], (checkpoint.fingerprints or {}).get(name)
    if wanted is None or tensor.nbytes > SHARE_BYTES:
        return False
    (found,) = _sums_or_errors(checkpoint, {name}, ((name, Box.full(tensor.shape)),))
    if isinstance(found, str):
        return True
    digest = Partial.from_bytes(found).digest(tensor.dtype, tensor.shape)
    return comparable(wanted, digest) and digest != wanted


@dataclass(frozen=True)
class ReadWork:
    """Reads parts of the tensors of a checkpoint, and sums up those that have saved fingerprints."""

    checkpoint: Opening

    def begin(self) -> Callable[[Share], list[bytes | str]]:
        """Opens the checkpoint."""
        checkpoint = self.checkpoint.open()
        return partial(_sums_or_errors, checkpoint, checkpoint.fingerprints or {})


@gc_paused()
def _sums_or_errors(checkpoint: Checkpoint, summed: Collection[str], share: Share) -> list[bytes | str]:
    """Return for each box the sum over it, or the error."""
    wrong: dict[int, str] = {}
    sums = [Partial()] * len(share)
    small: list[tuple[int, tuple[torch.Tensor, Box, torch.Size]]] = []  # summed up together, since that costs less
    for i, (name, box) in enumerate(share):
        tensor = checkpoint[name]
        try:
            for part in windows(box.sizes, tensor.dtype.itemsize, WINDOW_BYTES):
                at = part.shift(box.offsets)
                piece = elements_of(tensor, at)
                if name not in summed:
                    continue
                if piece.nbytes <= _SMALL_BYTES:
                    small.append((i, (piece, at, tensor.shape)))
                else:
                    sums[i] += partials([(piece, at, tensor.shape)])[0]
        except (CheckpointError, LayoutError) as error:
            wrong[i] = str(error)
    for (i, _), one in zip(small, partials(part for _, part in small), strict=True):
        sums[i] += one
    return [wrong[i] if i in wrong else one.to_bytes() for i, one in enumerate(sums)]


def _read_findings(
    checkpoint: Checkpoint, opening: Opening | None, executor: Executor | None, step: Phase, unread: Collection[str]
) -> list[Finding]:
    """Read every tensor, and compare its fingerprint with the saved one, if there is one. Files of
    the `unread` are refused."""
    prints = checkpoint.fingerprints or {}
    totals, wrong = dict.fromkeys(checkpoint, Partial()), dict[str, str]()

    def on_done(share: Share, found: list[bytes | str]) -> None:
        for (name, box), one in zip(share, found):
            step.advance(box.numel * checkpoint[name].dtype.itemsize)
            if isinstance(one, str):
                wrong.setdefault(name, one)
            else:
                totals[name] += Partial.from_bytes(one)

    work = ReadWork(opening) if opening is not None else None
    here = partial(_sums_or_errors, checkpoint, prints)
    boxes = ((name, Box.full(tensor.shape), tensor.dtype.itemsize) for name, tensor in checkpoint.items())
    asked = shares(boxes, checkpoint)
    run_tasks(work, asked, executor, on_done, here=here)
    findings = []
    for name, tensor in checkpoint.items():
        if name in wrong:
            text = wrong[name].removeprefix(f"tensor {name!r}, ")
            findings.append(
                Finding(f"was not read: {text.partition(' has ')[0]} is damaged", name, kind="unchecked")
                if name in unread
                else Finding(text, name)
            )
        elif (wanted := prints.get(name)) is not None:
            digest = totals[name].digest(tensor.dtype, tensor.shape)
            if comparable(wanted, digest) and digest != wanted:
                text = "its values changed: they do not have the saved fingerprint"
                findings.append(Finding(text, name))
    return findings
