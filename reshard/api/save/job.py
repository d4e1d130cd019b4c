"""One rank's part of a save: what it writes, and what it need not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import torch

from planners.geometry.box import Box
from planners.geometry.layout import StateLayout, TensorSpec
from planners.save.plan import SavePlan, plan_writes
from planners.save.proof import verify_save
from reshard.api.save.base import Choice, alike, doubtful
from reshard.api.save.crew import crew_of
from reshard.api.save.options import SaveOptions
from reshard.api.save.staging import ToWrite
from reshard.control.global_state import Census, Holdings, census_of, per_rank_name
from reshard.control.group import Group
from reshard.control.progress import Progress
from reshard.errors import CheckpointError, FormatError, LayoutError, StorageError, format_ranks
from reshard.formats.native.common_file import write_common_file
from reshard.formats.native.data_file import Entry, write_file
from reshard.formats.native.parts import write_parts
from reshard.formats.native.publish import Generation, Written
from reshard.formats.native.reuse import Base, Reused, reuse
from reshard.state.fingerprints.parts import Partial
from reshard.state.fingerprints.tally import add_tallies, pack_tally, unpack_tally
from reshard.state.garbage import uncollected
from reshard.state.live_state import LiveState, LiveTensor, is_long, take_apart
from reshard.storage import Storage

__all__ = [
    "Job",
    "OwnItem",
    "entries_of",
    "holdings_of",
    "own_items",
    "planned_writes",
    "summed_up",
    "tally",
    "total",
    "write",
]


@dataclass(frozen=True)
class Job:
    """One rank's view of a save: what there is, who writes what, where to. It keeps no tensor of the user's alive."""

    group: Group
    storage: Storage
    path: str
    generation: Generation
    options: SaveOptions
    choice: Choice
    base: Base | None
    """The checkpoint that was chosen, as far as this rank can open it."""
    seconds: dict[str, float]

    @property
    def rank(self) -> int:
        """Of the default group, by which plans are numbered."""
        return self.group.ranks[self.group.rank]


def holdings_of(state_dict: Any, options: SaveOptions) -> Holdings:
    """What this rank gives to be saved. Raises as `reshard.save` does."""
    if not isinstance(state_dict, Mapping | list | tuple):
        raise FormatError(f"what is saved must be a dict (or a list) of values, got {type(state_dict).__name__}")
    return Holdings.of(take_apart(state_dict, whole_at=is_long, select=options.globs))


def planned_writes(
    holdings: Holdings, group: Group, options: SaveOptions, answers: Mapping[bytes, Sequence[int]]
) -> tuple[Census, SavePlan]:
    """Collective: what all ranks hold, without objects, and who of them writes what, proved. Writes nothing, and
    compares no values.

    Args:
        answers: what all ranks said of their holdings, by `Group.parties`.

    Raises as `reshard.save` does.
    """
    census = census_of(holdings, group, answers)
    plan = plan_writes(census.layout, divide_above_bytes=options.divide_above_bytes)
    report = verify_save(plan)
    if not report.ok:
        raise LayoutError(
            f"what {format_ranks(group.ranks)} have does not make up each tensor exactly once: {report}. "
            "All ranks that hold a part of a tensor must save together"
        )
    return census, plan


class OwnItem(NamedTuple):
    """What a rank writes of one of its parts of a tensor."""

    spec: TensorSpec
    parts: int
    """How many parts it has."""
    part: int
    source: Box
    """Within the part."""
    box: Box
    """Within the tensor."""


@uncollected()
def own_items(layout: StateLayout, plan: SavePlan, rank: int) -> list[OwnItem]:
    """What `rank` writes."""
    counts: dict[str, int] = {}
    out = []
    for item in plan.items(rank):
        if item.fqn not in counts:
            counts[item.fqn] = len(layout.parts(item.fqn, rank))
        out.append(OwnItem(layout[item.fqn].spec, counts[item.fqn], item.part, item.source, item.box))
    return out


@uncollected()
def entries_of(items: Iterable[OwnItem], state: LiveState, rank: int) -> list[Entry]:
    """The arrays that `rank`, which holds `state`, writes."""
    views: dict[str, tuple[torch.Tensor, ...]] = {}
    own = {per_rank_name(key, rank): wrapper.value for key, wrapper in state.per_rank.items()}
    out = []
    for spec, parts, number, source, box in items:
        fqn = spec.fqn
        if fqn not in views:
            tensor = LiveTensor(fqn, own[fqn]) if fqn in own else state.tensors[fqn]
            views[fqn] = _parts(tensor, parts, rank)
        part = views[fqn][number]
        out.append(Entry(spec, box, part if source.sizes == part.shape else part[source.slices]))
    return out


def _parts(tensor: LiveTensor, count: int, rank: int) -> tuple[torch.Tensor, ...]:
    """The local tensors as the agreed layout counts them: as many as the tensor has, or one for each of its boxes."""
    local, fqn = tensor.local, tensor.key
    if any(t.device.type == "meta" for t in local):
        raise CheckpointError(f"tensor {fqn!r} is on the meta device: it has no values to save")
    if any(type(t).__name__ == "FakeTensor" for t in local):
        raise CheckpointError(f"tensor {fqn!r} is a FakeTensor: it has no values to save")
    if len(local) == count:
        return local
    boxes = [place.slices for part in tensor.form.parts(tensor.spec.shape, rank) for _, place in part.boxes()]
    if len(local) != 1 or len(boxes) != count or not tensor.is_sharded:
        raise LayoutError(f"tensor {fqn!r} has {len(local)} local tensors on rank {rank}, but its layout says {count}")
    return tuple(local[0][slices] for slices in boxes)


def summed_up(job: Job, data: ToWrite) -> tuple[ToWrite, list[str]]:
    """Where no rank can say by itself whether a tensor is what it was, its fingerprint can: those of which it does."""
    if not job.choice.by_print:
        return data, []
    group, generation = job.group, job.generation
    data = data.summed_up()
    told = group.gather_and_sum(b"", tally(job, data.prints), add_tallies)
    names: list[str] = []
    if told is not None and job.base is not None:
        now = generation.fingerprints([total(job, told[1])])
        try:
            names = alike(doubtful(job.base, generation.census.layout, now), job.base, now)
        except (CheckpointError, StorageError) as error:
            job.base.pass_over(error)
    known = group.share(msgspec.msgpack.encode(names) if group.rank == 0 else None)
    return data, msgspec.msgpack.decode(known, type=list[str])


def tally(job: Job, prints: Mapping[str, Partial]) -> bytes:
    """Parts of fingerprints by name, packed for `add_tallies`: the layout, which is the same on all ranks, has numbers
    for the names."""
    numbers = {fqn: number for number, fqn in enumerate(job.generation.census.layout)} if prints else {}
    return pack_tally({numbers[fqn]: part for fqn, part in prints.items()})


@uncollected()
def total(job: Job, packed: bytes) -> dict[str, Partial]:
    """Inverse of `tally`."""
    names = list(job.generation.census.layout)
    return {names[number]: part for number, part in unpack_tally(packed).items()}


def write(job: Job, data: ToWrite, same: list[str]) -> tuple[Written, int, dict[str, Partial]]:
    """This rank's file, or its part of one, and, made by another thread meanwhile, its part of the fingerprints. Also
    says how many bytes need not be written, of which those of the tensors `same` are known."""
    many = job.options.ranks_per_file > 1 and job.group.world_size > 1
    if not data.entries and not many:
        return Written(), 0, {}
    with (
        Progress(show=job.group.rank == 0, bars=job.options.progress) as bar,
        bar.phase("write", data.nbytes) as step,
        ThreadPoolExecutor(1, thread_name_prefix="reshard-fingerprint") as beside,
    ):

        def on_bytes(nbytes: int) -> None:
            job.group.check()
            step.advance(nbytes)

        prints = beside.submit(data.sum_up) if job.options.fingerprints else None
        written, reused = _write_together(job, data, on_bytes) if many else _write_own(job, data, same, on_bytes)
        return written, reused, {} if prints is None else prints.result()


def _write_own(job: Job, data: ToWrite, same: list[str], on_bytes: Callable[[int], None]) -> tuple[Written, int]:
    stem, budget = f"{job.generation.folder}/{job.rank:05d}", job.options.memory_budget_bytes
    reused = Reused(tuple(data.entries), {}, ())
    if job.base is not None:
        folder = job.generation.folder
        reused = reuse(data.entries, job.base, folder, same=set(same), lanes=data.lanes, stage_bytes=budget)
        on_bytes(reused.nbytes)
    record = None
    if reused.entries:
        record = write_file(
            job.storage,
            f"{stem}.safetensors",
            reused.entries,
            lanes=data.lanes,
            stage_bytes=budget,
            digests=job.options.base is not None,
            on_bytes=on_bytes,
        )
    parts = write_parts(job.storage, f"{stem}.parts", reused.arrays) if reused.arrays else None
    return Written(record, parts, reused.linked), reused.nbytes


def _write_together(job: Job, data: ToWrite, on_bytes: Callable[[int], None]) -> tuple[Written, int]:
    crew = crew_of(job.group, job.options.ranks_per_file)
    written = write_common_file(
        job.storage,
        f"{job.generation.folder}/{crew.ranks[0]:05d}.safetensors",
        data.entries,
        crew,
        lanes=data.lanes,
        stage_bytes=job.options.memory_budget_bytes,
        on_bytes=on_bytes,
    )
    return (Written() if written is None else Written(written.record, ranks=written.ranks)), 0
