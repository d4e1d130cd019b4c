"""Which bytes of a checkpoint go where in this rank's memory: planned, proved, and only then listed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from planners.geometry.layout import StateLayout, TensorLayout, TensorSpec
from planners.load.plan import ReadItem, plan_reads
from planners.load.proof import verify_load
from reshard.checkpoint.checkpoint import Checkpoint, stored_layout
from reshard.errors import DamagedCheckpointError
from reshard.execute.reading import Copy, Staged, find_copies
from reshard.formats.native.reader import NativeFacts
from reshard.formats.stored.tensor import StoredTensor
from reshard.state.dtypes import dtype_from_name
from reshard.state.memory.arrays import as_array
from reshard.state.memory.uploads import Uploads
from reshard.state.targets import Targets

if TYPE_CHECKING:  # imported by loads that share the reading
    from reshard.execute.messages.read_once import SharedReading

__all__ = ["ReadPlan", "plan_rank"]

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class ReadPlan:
    """The copies of one rank's load."""

    copies: list[Copy]
    """None in a dry run."""
    bytes_needed: int


def plan_rank(
    targets: Targets,
    checkpoint: Checkpoint,
    names: Mapping[str, str],
    rank: int,
    *,
    dry_run: bool,
    uploads: Uploads,
    shared: SharedReading | None = None,
) -> ReadPlan:
    """Plan this rank's reads of the stored tensors `names`, prove the plan, and find the bytes of every item.

    Args:
        names: key of the target -> name in the checkpoint.
        uploads: the way to devices.
        shared: who reads what, where ranks read for one another.

    Raises DamagedCheckpointError if the checkpoint does not hold every element that is wanted exactly once, or not all
    of its bytes.
    """
    stored: dict[str, StoredTensor] = {}
    saved: dict[str, TensorLayout] = {}
    wanted: dict[str, TensorLayout] = {}
    for key, name in names.items():
        tensor = checkpoint[name].stored
        stored[key] = tensor
        spec = TensorSpec(key, tensor.spec.shape, tensor.spec.dtype)
        saved[key] = TensorLayout.of(spec, stored_layout(tensor).form)
        target = targets.tensors[key]
        form = (shared.form(key) if shared is not None else None) or target.form
        shape = targets.resized.get(key, target.spec.shape)
        wanted[key] = TensorLayout.of(TensorSpec(key, shape, spec.dtype), form)
    world = max([rank + 1, *(layout.world_size for layout in wanted.values())])
    plan = plan_reads(StateLayout(saved), StateLayout(wanted, world))
    proof = verify_load(plan)
    if not proof.ok:
        raise DamagedCheckpointError(f"{checkpoint.url} does not hold each wanted element exactly once: {proof}")
    items = plan.items(rank)
    if dry_run:
        return ReadPlan([], items.nbytes)
    native = checkpoint.contents.facts_of(NativeFacts)
    if native is not None and native.storage.requests > 1:
        writers = {chunk.owner for item in items for chunk, _ in stored[item.fqn].meeting(item.box)}
        native.bring(owner for owner in writers if isinstance(owner, int))
    landings = _landings(targets, wanted, shared, uploads)
    return ReadPlan(find_copies(items, lambda key: stored[key], landings), items.nbytes)


def _landings(
    targets: Targets, wanted: Mapping[str, TensorLayout], shared: SharedReading | None, uploads: Uploads
) -> Callable[[ReadItem], Array | Staged]:
    """A function from an item to what it goes into: the target's own memory, where that can be written to at once."""
    made: dict[str, list[Array | Staged]] = {}

    def target(item: ReadItem) -> Array | Staged:
        if item.fqn not in made:
            made[item.fqn] = land(item.fqn)
        return made[item.fqn][item.part]

    def land(key: str) -> list[Array | Staged]:
        saved = dtype_from_name(wanted[key].spec.dtype)
        whole = targets.writable(key)
        read = whole if shared is None or shared.form(key) is None else shared.parts(key, whole)
        return [
            as_array(local)
            if local.dtype == saved and local.device.type == "cpu" and not local.is_conj() and not local.is_neg()
            else Staged(local, saved, uploads if uploads.take_in(local.device) else None)
            for local in read
        ]

    for key in wanted:  # tensors of which this rank holds no element may need a new dtype or memory, too
        if targets.tensors[key].is_meta or key in targets.replaced:
            made[key] = land(key)
    return target
