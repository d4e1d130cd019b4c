"""Jobs on simulated hosts: ranks are greenlets in one process, messages are copies, hosts are folders that can be
lost.

    job = Job(folder, ["a", "a", "b", "b"])
    ends = job.run(lambda rank, tier: tier.save(state(rank), 1))

This runs the code of `reshard.elastic`, the control plane, and the planners unchanged. Only process groups and access
to DTensors are simulated: `cut` marks a plain tensor as one rank's part of a layout.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import greenlet
import torch

from planners import TensorLayout, TensorSpec
from reshard.api.elastic import Tier, generation as moving
from reshard.live.tensors import LiveTensor
from tests.faulty import SystemCalls
from tests.simulated_ranks import Died, World

__all__ = ["Job", "cut", "cut_tensors", "exchange", "global_of"]


def cut(whole: torch.Tensor, layout: TensorLayout, rank: int) -> torch.Tensor:
    """Return a rank's shard of a tensor."""
    (box,) = layout.boxes(rank) or (None,)
    local = whole[box.slices].clone() if box is not None else whole.new_empty([0] * whole.ndim)
    local.cut_by = layout
    return local


def global_of(locals_: dict[int, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return the tensor that is assembled from parts by rank. Asserts that replicas are equal."""
    whole, seen = torch.zeros_like(like), torch.zeros(like.shape, dtype=torch.bool)
    for rank, local in locals_.items():
        for box in local.cut_by.boxes(rank):
            had = seen[box.slices]
            assert torch.equal(whole[box.slices][had], local[had]), "replicas differ"
            whole[box.slices], seen[box.slices] = local, True
    assert seen.all()
    return whole


def _fact(name: str, of_layout: Callable[[str, TensorLayout], Any]) -> property:
    """Return a property of a live tensor, which follows from the layout if `cut` made the tensor."""
    real = vars(LiveTensor)[name].func

    def fact(tensor: LiveTensor) -> Any:
        layout = getattr(tensor.value, "cut_by", None)
        return real(tensor) if layout is None else of_layout(tensor.key, layout)

    return property(fact)


_OURS = {
    "spec": _fact("spec", lambda key, layout: TensorSpec(key, layout.spec.shape, layout.spec.dtype)),
    "form": _fact("form", lambda _, layout: layout.form),
    "forms": _fact("forms", lambda _, layout: (layout.form,)),
    "is_sharded": _fact("is_sharded", lambda *_: True),
}


@contextmanager
def cut_tensors() -> Iterator[None]:
    """Within the block, treat tensors that `cut` made as sharded."""
    with ExitStack() as stack:
        for name, fact in _OURS.items():
            stack.enter_context(mock.patch.object(LiveTensor, name, fact))
        yield


class Job:
    """A job of some ranks. Each is on the named host, whose folder is in `folder`.

    Args:
        crash: number of the file-changing call, counted over all ranks, at which `victims` are lost with all of their
            processes. The other ranks learn of it by the control plane.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        names: list[str],
        *,
        copies: int = 1,
        victims: frozenset[str] = frozenset(),
        crash: int | None = None,
        choose: Callable[[int], int] | None = None,
    ) -> None:
        self.folder, self.names, self.copies = Path(folder), names, copies
        self.victims, self.crash, self.made = victims, crash, 0
        self.world = World(len(names), per_machine=len(names), choose=choose)
        self._ranks: dict[Any, int] = {}
        self._sources: dict[int, Any] = {}

    def run(self, body: Callable[[int, Tier], Any]) -> list[Any]:
        """Call `body(rank, tier)` on every rank. Return what each returned, or its error."""

        def life(rank: int) -> Any:
            self._ranks[greenlet.getcurrent()] = rank
            tier = Tier(self.folder, host=self.names[rank], copies=self.copies, timeout=60.0)
            return body(rank, tier)

        with self._simulated():
            return self.world.run(life)

    @contextmanager
    def _simulated(self) -> Iterator[None]:
        def group(*_: Any, **__: Any) -> Any:
            return self.world.group(self._ranks[greenlet.getcurrent()], deadline_s=60.0)

        with ExitStack() as stack:
            stack.enter_context(self.world.clock())
            stack.enter_context(cut_tensors())
            for module in ("tier", "recover"):
                stack.enter_context(mock.patch(f"reshard.api.elastic.{module}.Group", group))
            stack.enter_context(mock.patch.object(moving, "Exchange", partial(exchange, lambda: self._sources)))
            real = {name: getattr(os, name) for name in (*SystemCalls.NAMES, "posix_fallocate")}
            stack.enter_context(mock.patch.multiple(os, **{name: self._watched(name, real[name]) for name in real}))
            yield

    def _watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            rank = self._ranks.get(greenlet.getcurrent())
            if rank is not None and (name != "open" or args[1] & os.O_CREAT):
                self.made += 1
                if self.made == self.crash:
                    self.world.dead |= {r for r, host in enumerate(self.names) if host in self.victims}
                if rank in self.world.dead:
                    raise Died(f"rank {rank}")
            return real(*args, **kwargs)

        return call


def exchange(by_rank: Callable[[], dict[int, Any]], work: Any, sources: Any, targets: Any, **_: Any) -> Any:
    """Exchange messages: when all ranks are here, each copies its messages from the sources. `by_rank`: the sources
    of a job."""
    received = work.nbytes(sends=False)

    def run(group: Any, deadline_s: float, pace: Any = None) -> None:
        by_rank()[work.rank] = sources
        group.barrier()
        legs = [leg for legs in work.rounds for leg in legs if not leg.sends]
        moved = [item for leg in legs for run in leg.runs for item in run]
        for item in [*work.copies, *moved]:
            to = targets(item.fqn)[item.target_part][item.target.slices]
            to.copy_(by_rank()[item.sender](item.fqn)[item.source_part][item.source.slices])
        group.barrier()

    return SimpleNamespace(run=run, received_bytes=received)
