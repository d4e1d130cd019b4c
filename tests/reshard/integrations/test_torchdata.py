"""torchdata's `StatefulDataLoader` in a managed run: each rank's own on as many ranks, a function's on other numbers.

The function is given the states of all saved ranks. What a loader's state means is up to its data set: here, a stream
of which each rank takes every n-th sample.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import reshard
from reshard.errors import KeyMismatchError
from tests import gloo

pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
pytestmark = pytest.mark.gloo

SIZE, BATCH = 96, 2


def stream(start: int) -> Any:
    """This rank's part of the samples from `start` on, with its position as its state."""
    import torch.utils.data

    class Stream(torch.utils.data.IterableDataset[int]):
        def __init__(self) -> None:
            self.start, self.taken = start, 0
            self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

        def __iter__(self) -> Any:
            while (index := self.start + self.taken * self.ranks + self.rank) < SIZE:
                self.taken += 1
                yield index

        def state_dict(self) -> dict[str, int]:
            return {"start": self.start, "taken": self.taken}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.start, self.taken = state["start"], state["taken"]

    return Stream()


def loader() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(stream(0), batch_size=BATCH)


def for_new_ranks(saved: dict[int, Any], rank: int, ranks: int) -> Any:
    """All saved ranks have taken equally many: the new ones go on behind what they have taken together."""
    own = [state["fetcher_state"]["dataset_iter_state"] or state["dataset_state"] for state in saved.values()]
    (taken,) = {one["taken"] for one in own}
    together = {"start": own[0]["start"] + taken * len(own), "taken": 0}
    made = dict(saved[0])
    made["dataset_state"] = together
    made["fetcher_state"] = {**made["fetcher_state"], "dataset_iter_state": None}
    return made


def part(root: Path, step: int, batches: int, on_change: Any) -> list[int]:
    """Samples that this rank takes after what was saved, if anything was; saves."""
    data, seen = loader(), list[int]()
    with reshard.CheckpointManager(root, every=reshard.Every(steps=1)) as manager:
        state = {"data": reshard.PerRank(data, on_change=on_change)}
        manager.restore(state)
        iterator = iter(data)
        for _ in range(batches):
            seen += next(iterator).tolist()
        manager.save(step, state)
    return seen


def test_as_many_ranks_go_on_with_their_own(tmp_path: Path) -> None:
    first = gloo.run(part, 2, tmp_path, 1, 3, "error")
    second = gloo.run(part, 2, tmp_path, 2, 3, "error")
    for rank in range(2):
        assert first[rank] + second[rank] == list(range(rank, 24, 2))


def test_other_numbers_of_ranks_lose_and_repeat_no_sample(tmp_path: Path) -> None:
    seen: list[int] = []
    for number, ranks in enumerate((4, 2, 3, 1)):
        taken = gloo.run(part, ranks, tmp_path, number, 3, for_new_ranks)
        seen += [sample for own in taken for sample in own]
    assert sorted(seen) == list(range(len(seen)))
    assert len(seen) == 3 * BATCH * (4 + 2 + 3 + 1)


def refused(root: Path) -> None:
    with pytest.raises(
        KeyMismatchError, match=r"'data' was saved per rank by 4 ranks, but this is rank . of 2 that load.*a function"
    ):
        part(root, 2, 1, "error")


def test_without_a_function_other_numbers_are_refused_by_name(tmp_path: Path) -> None:
    gloo.run(part, 4, tmp_path, 1, 3, "error")
    gloo.run(refused, 2, tmp_path)
