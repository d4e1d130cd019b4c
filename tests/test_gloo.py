"""`tests/gloo.py`: results in order, tensors by value, the first error, and dead and slow ranks."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests import gloo

pytestmark = pytest.mark.gloo


def _sum(factor: float) -> tuple[int, torch.Tensor]:
    total = torch.full((2,), factor * (dist.get_rank() + 1))
    dist.all_reduce(total)
    return dist.get_rank(), total


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("layers.0.weight")
    dist.barrier()


def _exit_on(rank: int) -> int:
    if dist.get_rank() == rank:
        os._exit(7)
    return dist.get_rank()


def _sleep() -> None:
    time.sleep(60.0)


@pytest.mark.parametrize("store", ["rank0", "parent", "file"])
def test_results_come_back_in_rank_order(store: str) -> None:
    ends = gloo.run(_sum, 2, 2.0, store=store)
    assert [rank for rank, _ in ends] == [0, 1]
    assert all(torch.equal(total, torch.full((2,), 6.0)) for _, total in ends)


def test_the_first_error_is_raised_again_with_its_traceback() -> None:
    with pytest.raises(KeyError, match=r"layers\.0\.weight") as caught:
        gloo.run(_fail_on, 2, 1, linger_s=1.0)
    assert any("_fail_on" in note for note in caught.value.__notes__)


def test_a_rank_that_exits_is_named() -> None:
    with pytest.raises(RuntimeError, match="rank 1 ended with exit code 7"):
        gloo.run(_exit_on, 2, 1, linger_s=2.0)


def test_time_is_limited_and_the_stacks_are_shown() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] did not end") as caught:
        gloo.run(_sleep, 2, timeout_s=5.0)
    assert "_sleep" in str(caught.value)
