"""`summarize`: a plan in figures, for all ranks, without listing its items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from planners.errors import PlanError
from planners.geometry.ownership import Ints
from planners.load.plan import LoadPlan
from planners.load.read_counts import count_reads, group_loads
from planners.save.plan import SavePlan
from planners.transfer.plan import TransferPlan
from planners.units import format_bytes

__all__ = ["Bin", "PlanStats", "summarize"]


@dataclass(frozen=True, slots=True)
class Bin:
    """Ranks whose bytes lie in `low <= bytes <= high`."""

    low: int
    high: int
    ranks: int


@dataclass(frozen=True, eq=False)
class PlanStats:
    """Figures of a plan. `rank_bytes` is what each rank reads, writes, or receives from others."""

    kind: Literal["load", "save", "transfer"]
    tensors: int
    geometries: int
    """Groups of tensors that share all planning."""
    world_size: int
    rank_bytes: Ints
    items: Ints | None
    """Items of each rank; None for save plans, whose items depend on how chunks are divided."""
    uncut_axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """See `StateLayout.uncut_axes`, of the layout that a plan leads to, or of the one that is saved."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all ranks."""
        return int(self.rank_bytes.sum())

    @property
    def max_bytes(self) -> int:
        """Bytes of the busiest rank."""
        return int(self.rank_bytes.max(initial=0))

    @property
    def mean_bytes(self) -> float:
        """Bytes of a rank on average, idle ones included."""
        return float(self.rank_bytes.mean()) if len(self.rank_bytes) else 0.0

    @property
    def busiest_rank(self) -> int:
        """The first rank that has `max_bytes`."""
        return int(self.rank_bytes.argmax())

    @property
    def imbalance(self) -> float:
        """How many times the mean the busiest rank has; 1 is even, and so is a plan without bytes."""
        return self.max_bytes / self.mean_bytes if self.mean_bytes else 1.0

    def histogram(self, bins: int = 10) -> tuple[Bin, ...]:
        """Ranks by their bytes, in at most `bins` bins of equal width. Raises PlanError for less than one."""
        if bins < 1:
            raise PlanError(f"a histogram needs one bin or more, got {bins}")
        low, high = int(self.rank_bytes.min(initial=self.max_bytes)), self.max_bytes
        edges = [low + (high + 1 - low) * i // bins for i in range(bins + 1)]
        edges = sorted(set(edges))
        counts, _ = np.histogram(self.rank_bytes, bins=np.array(edges, dtype=np.float64))
        return tuple(Bin(a, b - 1, int(n)) for a, b, n in zip(edges, edges[1:], counts))

    def __str__(self) -> str:
        verb = {"load": "read", "save": "written", "transfer": "moved between ranks"}[self.kind]
        lines = [
            *(
                f"axis {axis!r} cuts no tensor: {len(fqns)} are copied along it"
                for axis, fqns in self.uncut_axes.items()
            ),
            f"{self.tensors} tensors of {self.geometries} geometries, {self.world_size} ranks",
            (
                f"{format_bytes(self.total_bytes)} {verb}; a rank has {format_bytes(self.mean_bytes)} on average, "
                f"{format_bytes(self.max_bytes)} at most (rank {self.busiest_rank}, {self.imbalance:.2f} times that)"
            ),
        ]
        if self.items is not None:
            lines.append(f"{int(self.items.sum())} items, {int(self.items.max(initial=0))} at most for one rank")
        most = max(bin.ranks for bin in self.histogram())
        for bin in self.histogram():
            bar = "#" * round(40 * bin.ranks / most)
            lines.append(f"  {format_bytes(bin.low):>10} to {format_bytes(bin.high):>10} {bin.ranks:>7} ranks  {bar}")
        return "\n".join(lines)


def summarize(plan: LoadPlan | SavePlan | TransferPlan) -> PlanStats:
    """Bytes and items of all ranks. Nothing is enumerated where both sides are products.

    Raises PlanError for anything that is no plan.
    """
    if isinstance(plan, LoadPlan):
        groups = len(group_loads(plan))
        items = count_reads(plan).items
        return PlanStats(
            "load", len(plan.wanted), groups, plan.world_size, plan.rank_bytes(), items, plan.wanted.uncut_axes()
        )
    if isinstance(plan, SavePlan):
        groups = len(plan.layout.geometries())
        return PlanStats(
            "save", len(plan.layout), groups, plan.world_size, plan.rank_bytes(), None, plan.layout.uncut_axes()
        )
    if isinstance(plan, TransferPlan):
        items = _count_transfers(plan)
        tensors, groups = len(plan.names), len(plan.routes)
        return PlanStats(
            "transfer", tensors, groups, plan.world_size, plan.received_bytes(), items, plan.after.uncut_axes()
        )
    raise PlanError(f"cannot summarize a {type(plan).__name__}: give a load, save or transfer plan")


def _count_transfers(plan: TransferPlan) -> Ints:
    """Items to each rank, copies within a rank included."""
    total = np.zeros(plan.world_size, dtype=np.int64)
    for route in plan.routes:
        total += route.intersection.counts(plan.world_size) * len(route.group)
    for rank, listed in plan.explicit.items():
        total[rank] = len(listed)
    return total
