"""Loads that read each byte once: the ranks that want the same elements share the reading, and pass them on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch
import torch.distributed as dist

from planners.geometry.layout_forms import Form
from planners.transfer.proof import verify_transfer
from planners.transfer.read_once import ReadOncePlan, plan_read_once
from planners.transfer.rounds import schedule
from reshard.control.global_layout import Described, describe, join_layouts
from reshard.control.group import Group
from reshard.execute.messages.exchange import Exchange, RankWork, round_bytes
from reshard.state.live_state import LiveTensor

__all__ = ["SharedReading"]

BUDGET_BYTES = 256 << 20
"""For messages under way."""


class SharedReading:
    """The plan of a load in which no byte is read twice."""

    def __init__(self, plan: ReadOncePlan, rank: int) -> None:
        self.plan, self._rank = plan, rank
        self._boxes = plan.own_boxes(rank)

    @classmethod
    def agree(cls, tensors: Mapping[str, LiveTensor], group: Group) -> SharedReading:
        """Collective: by what all ranks want. `tensors`: targets of this rank that are to be read, by key.

        Raises LayoutError, alike on every rank, where ranks disagree about a tensor. The plan is proved.
        """
        parties = group.parties(msgspec.json.encode(describe(tensors)))
        wanted = join_layouts((msgspec.json.decode(data, type=Described), ranks) for data, ranks in parties.items())
        plan = plan_read_once(wanted)
        verify_transfer(plan.transfers).raise_if_failed()
        return cls(plan, group.ranks[group.rank])

    def form(self, key: str) -> Form | None:
        """Who reads what of a tensor that is shared; None for one that each rank reads for itself."""
        return self.plan.readers[key].form if key in self.plan.readers else None

    def parts(self, key: str, local: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What this rank reads of a shared tensor: views of its local tensors, one for each part of `form`."""
        return [local[own.part][own.box.slices] for own in self._boxes.get(key, ())]

    def pass_on(
        self, local: Callable[[str], Sequence[torch.Tensor]], group: Group, process_group: dist.ProcessGroup | None
    ) -> int:
        """Collective: give the others what they want, once all have read. Returns the bytes that this rank got.

        If a rank has failed, nothing is sent: a message that nobody takes would be taken for one of the next load.

        `local`: the local tensors of a key, on the CPU or not; what was read lies in them.
        """
        rounds = schedule(self.plan.transfers, max_inflight_bytes=round_bytes(BUDGET_BYTES))
        exchange = Exchange(
            RankWork.of(rounds, self._rank),
            lambda key: self.parts(key, local(key)),
            local,
            process_group=process_group,
        )
        group.barrier()
        exchange.run(group)
        return exchange.received_bytes
