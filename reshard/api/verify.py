"""`verify` and `compare`: is a checkpoint whole and undamaged, and do two hold the same, whatever their layouts.

Both work tensor by tensor, in pieces of bounded size, with no model, GPU or process group.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from planners.findings import Coverage, Finding, Report
from planners.geometry.box import Box
from planners.plans.plan import verify as prove
from planners.plans.save import SavePlan
from reshard.checkpoint import Checkpoint, open as open_checkpoint
from reshard.errors import CheckpointError, DamagedCheckpointError, FormatError, KeyMismatchError, LayoutError
from reshard.formats.torch_save.archive import changed_records, is_archive
from reshard.live.copy_streams import to_host
from reshard.live.dtypes import dtype_name
from reshard.live.fingerprints import Fingerprinter, comparable, float64_is_exact
from reshard.live.garbage import gc_paused
from reshard.live.plain_data import encode_plain
from reshard.live.state import PerRank
from reshard.live.tensors import expanded, is_sharded, is_tensor, raw_bytes, spec_of
from reshard.live.tree import flatten
from reshard.native.commit import index_problem
from reshard.native.manifest import has_digest
from reshard.native.reader import NativeFacts
from reshard.ranks.progress import Phase, Progress
from reshard.state import key_of
from reshard.stored.checksums import NO_CHECKSUMS, BlockChecksums
from reshard.stored.source import FileSource
from reshard.stored.streaming import windows
from reshard.stored.tensor import LazyTensor, StoredTensor

__all__ = ["compare", "verify"]


WINDOW_BYTES = 32 << 20
"""Tensors are read in pieces of at most about this size."""


def verify(path: Any, against: Any = None, deep: bool = True, *, progress: bool = False) -> Report:
    """Is the checkpoint at `path` whole, consistent and undamaged?

        reshard.verify("run/step-1000").raise_if_failed()

    Always: all files are there with their lengths, the chunks of every tensor tile it exactly once, and the plan by
    which the native format finds its bytes is proved; an index for Hugging Face tools beside it must say the same. With
    `deep`: every byte is read; blocks are compared with their checksums and tensors with their fingerprints where the
    format has them; what torch.save wrote, in DCP's files too, with the checksums of its zip archives.

    Args:
        path: a folder, file, URL, `Storage` or open `Checkpoint`.
        against: another checkpoint or a state dict of whole tensors that must hold the same, and of a checkpoint what
            its saved fingerprints say: both are read and compared as by `compare`; without `deep`, by saved
            fingerprints where both have them.
        progress: show a progress bar where somebody looks on.

    Returns a report whose findings name the file or tensor; `covered` says for how many bytes a changed bit would have
    been found, which is none in formats without checksums, such as safetensors. Raises only if there is no checkpoint
    at all, or none of a known format: damage is a finding.
    """
    try:
        checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    except (FileNotFoundError, CheckpointError) as error:
        if type(error).__name__ != "DamagedCheckpointError":
            raise
        return Report(str(path), (Finding(str(error)),), 0)
    try:
        if against is not None and not isinstance(against, Checkpoint | Mapping):
            against = open_checkpoint(against)
    except DamagedCheckpointError as error:
        return Report(f"{checkpoint.url} ({checkpoint.format})", (Finding(str(error)),), len(checkpoint))
    findings = [Finding(problem) for problem in checkpoint.problems()]
    native = checkpoint.contents.details(NativeFacts)
    if native is not None:
        findings += _plan_findings(native.plan)
        findings += map(Finding, filter(None, [index_problem(native)]))
    covered = None if findings else Coverage(sum(t.nbytes for t in checkpoint.values()), 0, 0)
    if deep and covered is not None:
        with Progress(show=progress) as bar, bar.phase("verify", total_bytes=covered.total_bytes) as step:
            if native is not None:
                with bar.phase("checksums", total_bytes=sum(f.nbytes for f in native.files.values())) as blocks:
                    findings += _block_findings(native, blocks)
            else:
                findings += map(Finding, changed_records(checkpoint.contents.files))
            if not findings:
                findings += _read_findings(checkpoint, against, step)
            if not findings:
                covered = _covered(checkpoint, covered.total_bytes)
    if against is not None and covered is not None and not findings:
        other = _compared(checkpoint, against, by_fingerprint=not deep, progress=progress)
        findings += other.findings
        if other.covered is not None:
            read, checked = other.covered.read_bytes, other.covered.checked_bytes
            covered = replace(
                covered, read_bytes=max(covered.read_bytes, read), checked_bytes=max(covered.checked_bytes, checked)
            )
            if covered.is_full and covered.leaves_open == NO_CHECKSUMS:
                covered = replace(covered, leaves_open="")
    return Report(f"{checkpoint.url} ({checkpoint.format})", tuple(findings), len(checkpoint), covered)


def _compared(checkpoint: Checkpoint, against: Any, *, by_fingerprint: bool, progress: bool) -> Report:
    """`compare`, where damage is a finding."""
    try:
        return compare(checkpoint, against, by_fingerprint=by_fingerprint, progress=progress)
    except DamagedCheckpointError as error:
        return Report("", (Finding(str(error)),), 0)


def _covered(checkpoint: Checkpoint, total_bytes: int) -> Coverage:
    """How far a deep look reaches: files with checksums are all of ours, and the zip archives of torch.save."""
    native = checkpoint.contents.details(NativeFacts)
    if native is not None:
        files = set(native.files)
        metadata_checked = has_digest(native.storage)
    else:
        sources = checkpoint.contents.files
        files = {source.name for source in sources if is_archive(source)}
        metadata_checked = checkpoint.format == "torch_save" and len(files) == len(sources)
    checked = sum(
        chunk.box.numel * tensor.dtype.itemsize
        for tensor in checkpoint.values()
        for chunk in tensor.stored.chunks
        if not chunk.box.is_empty and isinstance(chunk.source, FileSource) and chunk.source.name in files
    )
    return Coverage(total_bytes, total_bytes, checked, metadata_checked, checkpoint.contents.checking.leaves_open)


def _plan_findings(plan: SavePlan) -> list[Finding]:
    return [*prove(plan.layout).findings, *prove(plan).findings]


def _block_findings(native: NativeFacts, step: Phase) -> Iterator[Finding]:
    """Every block of every data file against its checksum, whether a tensor uses it, or read it before, or not."""
    for name, record in native.files.items():
        try:
            source = native.source(name)
            source.check(0, record.nbytes)
            sums = BlockChecksums(
                record.nbytes, record.block_bytes_or(native.manifest.block_bytes), partial(native.sums, name)
            )
            bad = []
            for start, stop in sums.pending(0, record.nbytes):
                if not sums.is_right((start, stop), [source.raw(start, stop - start)]):
                    bad.append((start, stop))
                step.advance(stop - start)
            source.checksums = sums
        except CheckpointError as error:
            yield Finding(str(error))
            continue
        for start, stop in bad:
            yield Finding(f"{source.label}: bytes [{start}, {stop}) were changed since they were written")


def _read_findings(checkpoint: Checkpoint, other: Any, step: Phase) -> Iterator[Finding]:
    """Every tensor read, and its fingerprint compared with the one that was saved, and the one of the checkpoint that
    must hold the same, where there are any."""
    prints = checkpoint.fingerprints or {}
    theirs = (other.fingerprints or {}) if isinstance(other, Checkpoint) else {}
    for name, tensor in checkpoint.items():
        said = {"was saved": prints.get(name), f"is that of {getattr(other, 'url', '')}": theirs.get(name)}
        expected = {who: digest for who, digest in said.items() if digest is not None}
        try:
            digest = Fingerprinter(tensor.dtype, tensor.shape)
            for box in windows(tuple(tensor.shape), tensor.dtype.itemsize, WINDOW_BYTES):
                piece = _slice(tensor, box)
                step.advance(piece.nbytes)
                if expected:
                    digest.add(piece, box)
            for who, wanted in expected.items():
                if comparable(wanted, digest.digest()) and digest.digest() != wanted:
                    yield Finding(f"its fingerprint is {digest.digest()}, but {wanted} {who}", name)
        except (CheckpointError, LayoutError) as error:
            yield Finding(str(error), name)


def compare(
    a: Any,
    b: Any,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    by_fingerprint: bool = False,
    labels: tuple[str, str] | None = None,
    progress: bool = False,
) -> Report:
    """Do two checkpoints, or a checkpoint and a state dict, hold the same?

    Names, shapes, dtypes, objects and values are compared, also those that are each rank's own; layouts and formats do
    not matter. Values are compared bit
    by bit (so NaN equals the same NaN, and -0.0 differs from 0.0), or within `atol + rtol * |b|` if either is given.

    Args:
        a, b: a path, an open `Checkpoint`, or a (nested) state dict of whole tensors.
        by_fingerprint: the quick answer: where both sides were saved with fingerprints and these are equal, values are
            taken for equal and not read, so that damage since the save is not found. Not with a tolerance.
        labels: what findings call the two; default: their paths.
        progress: show a progress bar where somebody looks on.

    Returns a report with every difference; of each differing tensor the first differing element, in row-major order;
    and what cannot be read. Its `covered` says how many bytes of `a` were read and compared with those of `b`, and not
    by fingerprints alone.
    """
    with gc_paused():
        left, right = _Side(a), _Side(b)
    if labels is not None:
        left.label, right.label = labels
    findings = [*_only_findings(left, right, left.tensors, right.tensors)]
    common = [name for name in left.tensors if name in right.tensors]
    total = sum(_nbytes(x) for x in left.tensors.values())
    read = 0
    with Progress(show=progress) as bar, bar.phase("compare", total_bytes=total) as step:
        for name in common:
            found, nbytes = _tensor_findings(name, left, right, rtol, atol, by_fingerprint)
            findings += found
            read += nbytes
            step.advance(_nbytes(left.tensors[name]))
    findings += _object_findings(left, right)
    findings += _own_findings(left, right)
    within = f" within rtol={rtol}, atol={atol}" if rtol or atol else " bit by bit"
    covers = (
        f"names, shapes, dtypes and objects; of {total} bytes of values on each side {read} read and compared{within}"
    )
    if read < total:
        covers += ", of the others only the fingerprints saved with them"
    return Report(f"{left.label} and {right.label}", tuple(findings), len(common), Coverage(total, read, read), covers)


def _nbytes(tensor: Any) -> int:
    return int(math.prod(tensor.shape) * tensor.dtype.itemsize)


def _tensor_findings(
    name: str, left: _Side, right: _Side, rtol: float, atol: float, by_fingerprint: bool
) -> tuple[list[Finding], int]:
    """How a tensor of both sides differs, and how many bytes of the left one were read for it."""
    x, y = left.tensors[name], right.tensors[name]
    exact = not rtol and not atol
    if tuple(x.shape) != tuple(y.shape):
        return [Finding(f"has shape {list(x.shape)} in {left.label}, {list(y.shape)} in {right.label}", name)], 0
    if x.dtype != y.dtype and exact:
        dtypes = f"is {dtype_name(x.dtype)} in {left.label}, {dtype_name(y.dtype)} in {right.label}"
        return [Finding(dtypes, name)], 0
    p, q = left.fingerprints.get(name), right.fingerprints.get(name)
    if exact and by_fingerprint and p is not None and q is not None and comparable(p, q) and p == q:
        return [], 0
    try:
        return _difference(name, x, y, rtol, atol), _nbytes(x)
    except CheckpointError as error:
        return [Finding(str(error), name)], 0


class _Side:
    """Tensors by name, objects, values of each rank by key and rank, and fingerprints of one of the two."""

    def __init__(self, source: Any) -> None:
        self.fingerprints: Mapping[str, str] = {}
        self.tensors: Mapping[str, Any]
        self.objects: Mapping[str, Any]
        self.own: Mapping[str, Mapping[int, Any]]
        self.is_one_rank_s = False
        if isinstance(source, Mapping) and not isinstance(source, Checkpoint):
            leaves = flatten(source, is_leaf=lambda v: is_tensor(v) or isinstance(v, LazyTensor | PerRank)).leaves
            values = {key_of(path): value for path, value in expanded(leaves).items()}  # as they are saved
            sharded = [key for key, value in values.items() if is_sharded(value)]
            if sharded:
                raise LayoutError(f"{sharded[0]!r} is sharded: compare whole tensors, or checkpoints, or fingerprints")
            self.label = "the state dict"
            self.tensors = {k: v for k, v in values.items() if is_tensor(v) or isinstance(v, LazyTensor)}
            rank = dist.get_rank() if dist.is_initialized() else 0
            self.own = {k: {rank: v.value} for k, v in values.items() if isinstance(v, PerRank)}
            for key, value in [*self.tensors.items(), *((k, v[rank]) for k, v in self.own.items())]:
                if is_tensor(value):
                    spec_of(key, value)  # which refuses what has no plain elements
            self.is_one_rank_s = True
            self.objects = {k: v for k, v in values.items() if k not in self.tensors and k not in self.own}
            return
        checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
        self.label = checkpoint.url
        names = [*checkpoint, *(alias for alias in checkpoint.aliases if alias not in checkpoint.contents.tensors)]
        self.tensors = {name: checkpoint[name] for name in names}
        self.objects = _values(checkpoint.objects)
        self.own = checkpoint.contents.per_rank
        self.fingerprints = checkpoint.fingerprints or {}


def _values(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Single values: some formats keep a list of them as one object, others each under a key of its own."""
    out: dict[str, Any] = {}
    for key, value in objects.items():
        try:
            out.update((key_of((key, *path[1:])), leaf) for path, leaf in flatten({key: value}).leaves.items())
        except KeyMismatchError:  # a dict with keys such as 1 and "1"
            out[key] = value
    return out


def _only_findings(left: _Side, right: _Side, x: Collection[str], y: Collection[str]) -> Iterator[Finding]:
    """What one side alone has."""
    for side, its, others in ((left, x, y), (right, y, x)):
        yield from (Finding(f"is only in {side.label}", key) for key in its if key not in others)


def _object_findings(left: _Side, right: _Side) -> Iterator[Finding]:
    yield from _only_findings(left, right, left.objects, right.objects)
    for key, value in left.objects.items():
        if key in right.objects and not _equal(value, right.objects[key]):
            shown = f"{value!r:.80} in {left.label}, {right.objects[key]!r:.80} in {right.label}"
            yield Finding(f"is {shown}", key)


def _own_findings(left: _Side, right: _Side) -> Iterator[Finding]:
    """What is each rank's own; of a state dict, which is one rank's, only that rank's."""
    yield from _only_findings(left, right, left.own, right.own)
    for key in left.own:
        if key not in right.own:
            continue
        x, y = left.own[key], right.own[key]
        ranks = [r for r in x if r in y]
        if (not (left.is_one_rank_s or right.is_one_rank_s) and set(x) != set(y)) or not ranks:
            yield Finding(f"is of ranks {sorted(x)} in {left.label}, of {sorted(y)} in {right.label}", key)
        for rank in ranks:
            if not _equal(_read(x[rank]), _read(y[rank])):
                yield Finding(f"differs between {left.label} and {right.label} on rank {rank}", key)


def _read(value: Any) -> Any:
    return LazyTensor(value)[...] if isinstance(value, StoredTensor) else value


def _equal(a: Any, b: Any) -> bool:
    if not is_tensor(a):
        try:
            same = a == b
            if bool(same.all() if hasattr(same, "all") else same):
                return True
        except (ValueError, RuntimeError, TypeError):  # arrays or tensors within
            pass
    try:  # as it is written: NaN is then equal to itself
        return bool(encode_plain(a, tensor_bytes=1 << 62) == encode_plain(b, tensor_bytes=1 << 62))
    except FormatError:  # objects of other frameworks
        return False


def _difference(name: str, x: Any, y: Any, rtol: float, atol: float) -> list[Finding]:
    count, first = 0, None
    itemsize = max(x.dtype.itemsize, y.dtype.itemsize)
    for box in windows(tuple(x.shape), itemsize, WINDOW_BYTES):
        differs = _differing(_slice(x, box), _slice(y, box), rtol, atol)
        found = int(differs.sum())
        if found and first is None:
            local = torch.nonzero(differs.reshape(differs.shape or (1,)))[0].tolist() if differs.ndim else []
            element = tuple(o + i for o, i in zip(box.offsets, local))
            at = Box.of(element, (1,) * len(element))
            first = (element, _slice(x, at).reshape(-1)[0].item(), _slice(y, at).reshape(-1)[0].item())
        count += found
    if first is None:
        return []
    total = math.prod(x.shape)
    return [
        Finding(f"{count} of {total} elements differ; the first is {first[1]} and {first[2]}", name, None, first[0])
    ]


def _differing(x: torch.Tensor, y: torch.Tensor, rtol: float, atol: float) -> torch.Tensor:
    """Where two tensors of one shape differ: on the device on which both are, or on the host."""
    if x.device != y.device or not (x.device.type == "cpu" or float64_is_exact(x.device)):
        x, y = to_host([x, y])
    if rtol or atol:
        wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
        return ~torch.isclose(x.to(wide), y.to(wide), rtol=rtol, atol=atol, equal_nan=True)
    size = x.dtype.itemsize
    raw = raw_bytes(x.contiguous()) != raw_bytes(y.contiguous())
    return raw.reshape(*x.shape, size).any(dim=-1)


def _slice(tensor: Any, box: Box) -> torch.Tensor:
    piece: torch.Tensor = (
        tensor[box.slices] if box.ndim else (tensor[...] if isinstance(tensor, LazyTensor) else tensor)
    )
    return piece.detach().resolve_conj().resolve_neg()
