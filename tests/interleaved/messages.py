"""Messages between simulated ranks: the code of `reshard.execute.exchange` sends and receives, and gloo is ours.

As with gloo, a message is there when both ends have posted it, and those between two ranks with one tag arrive in the
order in which they were posted. When a process ends, its connections break; so do all of a rank's connections in a
group where it gives up waiting.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tests.interleaved.simulation import Job, Simulation

__all__ = ["IntoTarget", "Network", "P2POp"]


@dataclass
class P2POp:
    """As torch's, without a look at the process group."""

    op: Any
    tensor: torch.Tensor
    peer: int
    group: Any = None
    tag: int = 0


class IntoTarget(P2POp):
    """What takes the place of `reshard.execute.exchange._IntoTarget`."""


class _Work:
    def __init__(self, network: Network, job: Job, group: Any, rank: int, peer: int, tensor: torch.Tensor) -> None:
        self._network, self._job, self.tensor = network, job, tensor
        self._ends = [(id(job), group, each) for each in (rank, peer)]
        self._rank, self._peer = rank, peer
        self.is_done = False

    @property
    def is_lost(self) -> bool:
        """Whether it never comes."""
        is_gone = self._peer in self._job.dead or any(end in self._network.closed for end in self._ends)
        return not self.is_done and is_gone

    def is_completed(self) -> bool:
        return self.is_done or self.is_lost

    def wait(self, timeout: timedelta) -> None:
        if timeout < timedelta(seconds=1) and not self.is_completed():
            self._network.closed.add(self._ends[0])
        self._network.simulation.wait_for(self.is_completed)
        self.raise_if_lost()

    def raise_if_lost(self) -> None:
        if self.is_lost:
            raise RuntimeError(f"Connection closed by peer [{self._job.machines[self._peer]}]")


class Network:
    """What is used of `torch.distributed` where messages are sent.

    Attributes:
        closed: ranks without connections any more, by their job and group.
    """

    P2POp = P2POp

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.closed: set[tuple[int, Any, int]] = set()
        self._posted: dict[Any, tuple[deque[_Work], deque[_Work]]] = defaultdict(lambda: (deque(), deque()))
        self._groups: Counter[tuple[int, int]] = Counter()
        self._came: dict[tuple[int, int], set[int]] = defaultdict(set)

    def isend(self, tensor: torch.Tensor, peer: int, group: Any, tag: int) -> _Work:
        return self._post(tensor, peer, group, tag, sends=True)

    def irecv(self, tensor: torch.Tensor, peer: int, group: Any, tag: int) -> _Work:
        return self._post(tensor, peer, group, tag, sends=False)

    def _post(self, tensor: torch.Tensor, peer: int, group: Any, tag: int, *, sends: bool) -> _Work:
        self.simulation.op("send" if sends else "receive", f"{peer} {tag}")
        process = self.simulation.process
        assert process is not None
        job, rank = process.job, process.rank
        work = _Work(self, job, group, rank, peer, tensor)
        work.raise_if_lost()
        pair = (rank, peer) if sends else (peer, rank)
        sent, awaited = self._posted[id(job), group, tag, pair]
        (sent if sends else awaited).append(work)
        while sent and awaited and not (sent[0].is_lost or awaited[0].is_lost):
            of, to = sent.popleft(), awaited.popleft()
            assert (of.tensor.dtype, of.tensor.shape) == (to.tensor.dtype, to.tensor.shape), (
                "no two ends of one message"
            )
            to.tensor.copy_(of.tensor)
            of.is_done = to.is_done = True
        return work

    def new_group(self, ranks: list[int], **_: Any) -> str:
        """One more group, once all ranks of the job have come for it."""
        process = self.simulation.process
        assert process is not None
        job = process.job
        self._groups[id(job), process.rank] += 1
        number = self._groups[id(job), process.rank]
        came = self._came[id(job), number]
        came.add(process.rank)
        self.simulation.wait_for(lambda: len(came) == len(ranks))
        return f"group {number}"
