"""`load`: a saved state into a live one, in place, by a proved plan, with the truth about every key."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from planners.errors import CoverageError
from planners.layout import StateLayout, TensorLayout, TensorSpec
from planners.load_plan import ReadItem, plan_reads
from planners.proof import verify
from reshard.checkpoint import Checkpoint, LazyTensor, stored_layout
from reshard.checkpoint import open as open_checkpoint
from reshard.dtypes import dtype_from_name
from reshard.errors import DamagedCheckpointError
from reshard.execute.arrays import as_array
from reshard.execute.integrity import check_blocks
from reshard.execute.reading import Copy, find_copies, run_copies, spans_by_file
from reshard.formats.base import StoredTensor
from reshard.group import Group
from reshard.matching import Match, match_keys
from reshard.targets import Targets
from reshard.tensors import form_of, spec_of

__all__ = ["LoadReport", "load"]

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class LoadReport:
    """What a load did, or in a dry run would do, on this rank."""

    path: str
    format: str
    loaded: tuple[str, ...]
    """Keys that were filled, tensors and objects."""
    missing: tuple[str, ...]
    """Keys of the target that the checkpoint does not have; they keep the values they had."""
    unexpected: tuple[str, ...]
    """Keys of the checkpoint that the target does not have; they were not read."""
    mismatched: tuple[str, ...]
    """Keys whose shape (or, under dtype_policy "error", dtype) differs, with both."""
    cast: Mapping[str, tuple[str, str]]
    """key -> (dtype saved, dtype of the target) of what was converted."""
    aliases: Mapping[str, str]
    """Keys that were filled from another key's tensor, to which they were tied when saved."""
    bytes_needed: int
    """Bytes of this rank's own elements, as saved."""
    bytes_read: int
    """Bytes that were read of the data files."""
    bytes_checked: int
    """Of these, bytes that were checked against saved checksums before anything was written."""
    dry_run: bool
    seconds: Mapping[str, float] = field(compare=False)
    """Time by phase."""

    @property
    def ok(self) -> bool:
        """Whether both sides had the same keys and shapes."""
        return not (self.missing or self.unexpected or self.mismatched)


def load(
    state_dict: dict[str, Any],
    path: Any,
    *,
    strict: bool | Mapping[str, str] = True,
    dtype_policy: str = "error",
    mapping: Mapping[str, str] | None = None,
    dry_run: bool = False,
    check: bool = True,
    process_group: dist.ProcessGroup | None = None,
    threads: int | None = None,
    deadline_s: float = 1800.0,
) -> LoadReport:
    """Fill `state_dict`, in place, from the checkpoint at `path`, whatever layout and format it was saved in.

    Tensors, DTensors and ShardedTensors are written into; meta tensors are replaced by real ones; everything else is
    replaced in its container. Each rank reads its own elements only, and nothing is written before the plan is
    proved, every byte range is known to exist, and all blocks that are read whole have the right checksum.

    Args:
        path: a folder, file, URL, `Storage`, or an open `Checkpoint`.
        strict: True: missing and unexpected keys are errors. False: they are reported only. A mapping of globs to
            "strict", "subset" (missing keys are errors, unexpected ones are not) or "partial" (neither are) decides by
            key, the first glob that fits; keys that none fits are strict.
        dtype_policy: "error": a target of another dtype is an error; "cast": elements are converted and reported;
            "saved": the target is replaced by a tensor of the saved dtype.
        mapping: key in `state_dict` -> key in the checkpoint, for those that differ.
        dry_run: only report; the target is not touched.
        check: compare checksums of all blocks that are read whole, where the format has them.
        process_group: with torch.distributed initialized, the ranks that load together: all end alike.
        threads: at most so many copy at once.
        deadline_s: how long the whole may take.

    Raises (nothing was written then; `RankFailedError` on the other ranks):
        KeyMismatchError: lists all missing, unexpected and mismatched keys at once.
        DamagedCheckpointError: bytes are missing or were changed.
        CheckpointNotFoundError, FormatError: see `reshard.open`.
    """
    group = Group(process_group, deadline_s=deadline_s)
    with group.together("load"):
        return load_with(
            group,
            state_dict,
            path,
            strict=strict,
            dtype_policy=dtype_policy,
            mapping=mapping,
            dry_run=dry_run,
            check=check,
            threads=threads,
        )


def load_with(
    group: Group,
    state_dict: dict[str, Any],
    path: Any,
    *,
    strict: bool | Mapping[str, str] = True,
    dtype_policy: str = "error",
    mapping: Mapping[str, str] | None = None,
    dry_run: bool = False,
    check: bool = True,
    threads: int | None = None,
) -> LoadReport:
    """`load` among the ranks of `group`, within a phase of theirs."""
    clock = time.perf_counter()
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    targets = Targets.of(state_dict)
    match = match_keys(targets, checkpoint, strict=strict, dtype_policy=dtype_policy, mapping=mapping or {})
    job = _plan(targets, checkpoint, match, group.ranks[group.rank], materialize=not dry_run)
    planned = time.perf_counter()
    checked = 0
    native = checkpoint.contents.facts.get("native")
    if check and native is not None and not dry_run:
        checked = check_blocks(native, spans_by_file(job.copies), threads=threads)
    verified = time.perf_counter()
    per_rank = _per_rank_values(targets, checkpoint, match, group)
    with group.together("check"):  # nobody writes before everybody is sure
        pass
    read = 0
    if not dry_run:
        read = run_copies(job.copies, threads=threads, on_bytes=lambda _: group.check())
        job.finish()
        targets.assign(match.objects)
        targets.assign(per_rank)
    seconds = {"plan": planned - clock, "check": verified - planned, "read": time.perf_counter() - verified}
    return LoadReport(
        path=checkpoint.url,
        format=checkpoint.format,
        loaded=(*match.tensors, *match.objects, *per_rank),
        missing=match.missing,
        unexpected=match.unexpected,
        mismatched=match.mismatched,
        cast=match.cast,
        aliases={key: checkpoint.aliases[name] for key, name in match.tensors.items() if name in checkpoint.aliases},
        bytes_needed=job.bytes_needed,
        bytes_read=read,
        bytes_checked=checked,
        dry_run=dry_run,
        seconds=seconds,
    )


@dataclass
class _Job:
    """The copies of a load, and what is to be done with them afterwards."""

    copies: list[Copy]
    bytes_needed: int
    after: list[Any]

    def finish(self) -> None:
        """Convert what was read in another dtype, put new tensors in their places."""
        for step in self.after:
            step()


def _plan(targets: Targets, checkpoint: Checkpoint, match: Match, rank: int, *, materialize: bool) -> _Job:
    """Plan this rank's reads, prove the plan, and find the bytes of every item."""
    stored: dict[str, StoredTensor] = {}
    saved: dict[str, TensorLayout] = {}
    wanted: dict[str, TensorLayout] = {}
    for key, name in match.tensors.items():
        tensor = checkpoint[name].stored
        stored[key] = tensor
        spec = TensorSpec(key, tensor.spec.shape, tensor.spec.dtype)
        saved[key] = TensorLayout.of(spec, stored_layout(tensor).form)
        target = targets.tensors[key]
        wanted[key] = TensorLayout.of(TensorSpec(key, spec_of(key, target).shape, spec.dtype), form_of(target, key))
    world = max([rank + 1, *(layout.world_size for layout in wanted.values())])
    plan = plan_reads(StateLayout(saved), StateLayout(wanted, world))
    try:
        items = plan.items(rank)
    except CoverageError as error:
        raise DamagedCheckpointError(f"{checkpoint.url}: {error}") from None
    verify(plan).raise_if_failed()
    arrays, after = _arrays(targets, wanted, materialize)
    copies = find_copies(items, lambda fqn: stored[fqn], lambda item: arrays(item)) if materialize else []
    return _Job(copies, items.nbytes, after)


def _arrays(targets: Targets, wanted: Mapping[str, TensorLayout], materialize: bool) -> tuple[Any, list[Any]]:
    """A function from an item to the array that it goes into, and the steps that follow the reading."""
    made: dict[str, list[Array]] = {}
    after: list[Any] = []

    def arrays(item: ReadItem) -> Array:
        if item.fqn not in made:
            spec = wanted[item.fqn].spec
            made[item.fqn] = _landing(targets, item.fqn, dtype_from_name(spec.dtype), after)
        return made[item.fqn][item.part]

    if materialize:  # tensors of which this rank holds no element may need a new dtype or memory, too
        for key in wanted:
            target = targets.tensors[key]
            if target.device.type == "meta" or key in targets.replaced:
                made[key] = _landing(targets, key, dtype_from_name(wanted[key].spec.dtype), after)
    return arrays, after


def _landing(targets: Targets, key: str, dtype: torch.dtype, after: list[Any]) -> list[Array]:
    """Arrays of the saved dtype to read into: the target's own memory where it can be."""
    out = []
    for local in targets.writable(key):
        if local.dtype == dtype and local.device.type == "cpu" and not local.is_conj() and not local.is_neg():
            out.append(as_array(local))
            continue
        staged = torch.empty(local.shape, dtype=dtype)
        out.append(as_array(staged))
        after.append(lambda local=local, staged=staged: local.copy_(staged))
    return out


def _per_rank_values(targets: Targets, checkpoint: Checkpoint, match: Match, group: Group) -> dict[str, Any]:
    saved = checkpoint.contents.facts.get("per_rank", {})
    rank = group.ranks[group.rank]
    out = {}
    for key in match.per_rank:
        values = {
            r: LazyTensor(value)[...] if isinstance(value, StoredTensor) else value for r, value in saved[key].items()
        }
        wrapper = targets.per_rank[key]
        out[key] = replace(wrapper, value=wrapper.choose(key, values, rank, len(group.ranks)))
    return out
