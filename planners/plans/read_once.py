"""Read-once plans: which of the ranks that want an element reads it, and how it gets to the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from planners.errors import PlanError
from planners.geometry.arrays import grouped
from planners.geometry.box import Box
from planners.geometry.layout import StateLayout, TensorLayout
from planners.plans.save import SavePlan, plan_writes
from planners.plans.transfer import TransferPlan, plan_transfers

# wanted by 4 ranks, in two replicas:    0 0 1 1      read by     0 2 1 3       then 0 <-> 2 and 1 <-> 3
#                                        2 2 3 3


class OwnBox(NamedTuple):
    """A box that a rank reads for others, too, in its own local tensors."""

    part: int
    """Index of the local tensor."""
    box: Box
    """The box, in the coordinates of the local tensor."""


@dataclass(frozen=True)
class ReadOncePlan:
    """Which rank reads which elements, and to which ranks it sends them."""

    wanted: StateLayout
    """The wanted layout of the tensors of which several ranks want the same elements. All other
    tensors are read as each rank wants them."""
    readers: StateLayout
    """Where each of their elements is read: at exactly one of the ranks that want it, which holds it then."""
    transfers: TransferPlan
    """How the elements get from the rank that reads them to the other ranks."""
    shares: SavePlan

    def own_boxes(self, rank: int) -> Mapping[str, tuple[OwnBox, ...]]:
        """Return where in the local tensors of `rank` its parts of `readers` are."""
        items = self.shares.items(rank) if rank < self.shares.world_size else ()
        found = grouped((item.fqn, OwnBox(item.part, item.source)) for item in items)
        return {fqn: tuple(boxes) for fqn, boxes in found.items()}


def plan_read_once(wanted: StateLayout) -> ReadOncePlan:
    """Share the reading of what several ranks want evenly among them, each element once.

    A tensor of which ranks want regions that overlap without being equal is omitted: each rank
    reads its own. Lists the regions of all ranks: meant for some thousands of ranks times tensors
    with replicas.
    """
    common: dict[str, TensorLayout] = {}
    judged: dict[tuple[object, ...], bool] = {}
    for fqn, layout in wanted.items():
        if layout.geometry_key not in judged:
            judged[layout.geometry_key] = _is_shared(layout)
        if judged[layout.geometry_key]:
            common[fqn] = layout
    state = StateLayout(common, wanted.world_size)
    shares = plan_writes(state)
    boxes: dict[str, dict[int, list[Box]]] = {fqn: {} for fqn in common}
    for rank in range(shares.world_size):
        for item in shares.items(rank):
            boxes[item.fqn].setdefault(rank, []).append(item.box)
    readers = StateLayout(
        {fqn: TensorLayout.from_boxes(common[fqn].spec, its) for fqn, its in boxes.items()}, wanted.world_size
    )
    transfers = plan_transfers(readers, state)
    return ReadOncePlan(state, readers, transfers, shares)


def _is_shared(layout: TensorLayout) -> bool:
    """Return True if elements are wanted by several ranks, in regions that are equal wherever they
    overlap."""
    chunks = sum(box.numel for _, box in layout.chunks())
    if int(layout.numels().sum()) <= chunks:
        return False
    try:
        plan_writes(StateLayout({layout.fqn: layout}))
    except PlanError:
        return False
    return True
