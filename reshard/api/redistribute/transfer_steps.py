"""The plans of a transfer: what the lanes of a job move, as one step or two, proved and cut into rounds.

Where several replicas on the receiving side want the same, they get a stripe each and pass the stripes on to one
another, if that moves fewer bytes between the two sides, or between hosts. What a rank wants several times over is
moved once, and copied afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from planners.errors import CoverageError
from planners.geometry.layout import StateLayout, TensorLayout
from planners.transfer.duplicates import Place, Repeat, want_once
from planners.transfer.hierarchical import bytes_between, plan_relay, rank_groups
from planners.transfer.plan import TransferPlan
from planners.transfer.proof import verify_schedule
from planners.transfer.rounds import Schedule, schedule
from reshard.api.redistribute.pairing import Pairing
from reshard.errors import LayoutError
from reshard.execute.messages.exchange import RankWork, round_bytes

__all__ = ["Steps", "plan_steps"]


@dataclass(frozen=True)
class Steps:
    """All of a transfer but its memory."""

    pairing: Pairing
    rounds: tuple[Schedule, ...]
    """Of each step. After the first of two, receivers hold stripes of some lanes."""
    works: tuple[RankWork, ...]
    """This rank's part in each step."""
    places: Mapping[str, tuple[Place, ...]]
    """Lane -> where the local tensors that the plans speak of lie in those that the lane wants; not for lanes of which
    the plans speak as a whole."""
    repeats: tuple[tuple[str, str, Repeat], ...]
    """(lane, lane, what this rank copies from the one to the other), when all has been moved."""
    bytes_between_groups: int
    """See `TransferReport`."""

    @property
    def plans(self) -> tuple[TransferPlan, ...]:
        """Who sends what to whom, for the whole job, step by step."""
        return tuple(rounds.plan for rounds in self.rounds)

    @property
    def relayed(self) -> tuple[str, ...]:
        """Lanes that move in two steps."""
        return self.rounds[1].plan.names if len(self.rounds) > 1 else ()


def plan_steps(pairing: Pairing, rank: int, world_size: int, *, budget_bytes: int, ranks_per_host: int | None) -> Steps:
    """The steps for all lanes, proved. `world_size`: ranks are below that. The same on every rank, but for its part.

    Raises LayoutError for an element that a rank wants and no rank holds.
    """
    moved, places, repeats = _wanted_once(pairing, rank)
    before = StateLayout({name: pairing.lanes[name].before for name in moved}, world_size)
    after = StateLayout(moved, world_size)
    try:
        plans = plan_relay(before, after, ranks_per_host=ranks_per_host)
        if len(plans) == 2:
            plans = plans[0], _as_it_lies(plans[1], pairing)
        each = round_bytes(budget_bytes // len(plans))
        rounds = tuple(schedule(plan, max_inflight_bytes=each) for plan in plans)
    except CoverageError as error:
        raise LayoutError(f"the source does not hold all that the target wants: {error}") from None
    for step in rounds:
        verify_schedule(step).raise_if_failed()
    groups = rank_groups(TransferPlan(before, after, tuple(moved), ranks_per_host))
    between = sum(bytes_between(plan, groups[0]) for plan in plans) if groups else 0
    works = tuple(RankWork.of(step, rank) for step in rounds)
    return Steps(pairing, rounds, works, places, repeats, between)


def _as_it_lies(plan: TransferPlan, pairing: Pairing) -> TransferPlan:
    """A step between receivers, which pass on what they hold as it lies, in the dtype of the target."""

    def lying(state: StateLayout) -> StateLayout:
        tensors = {}
        for name in plan.names:
            dtype = pairing.after[pairing.lanes[name].target].spec.dtype
            tensors[name] = TensorLayout.of(replace(state[name].spec, dtype=dtype), state[name].form)
        return StateLayout(tensors, state.world_size)

    return TransferPlan(lying(plan.before), lying(plan.after), plan.names, plan.ranks_per_host)


def _wanted_once(
    pairing: Pairing, rank: int
) -> tuple[dict[str, TensorLayout], dict[str, tuple[Place, ...]], tuple[tuple[str, str, Repeat], ...]]:
    """(what each lane moves, where this rank puts it if that is not all, what it copies afterwards)."""
    moved = {name: lane.after for name, lane in pairing.lanes.items()}
    alike: dict[tuple[str, str], list[str]] = {}
    for name, lane in pairing.lanes.items():
        alike.setdefault((lane.source, pairing.after[lane.target].spec.dtype), []).append(name)
    places: dict[str, tuple[Place, ...]] = {}
    repeats: list[tuple[str, str, Repeat]] = []
    for names in alike.values():
        if len(names) == 1:
            continue
        once = want_once(moved[names[0]].spec.shape, tuple(moved[name].form for name in names))
        for name, form, its in zip(names, once.forms, once.places, strict=True):
            if its is not None:
                moved[name] = TensorLayout.of(moved[name].spec, form)
                places[name] = its.get(rank, ())
        for again in once.repeats.get(rank, ()):
            repeats.append((names[again.source.form], names[again.target.form], again))
    return moved, places, tuple(repeats)
