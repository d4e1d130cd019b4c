"""Samples are neither lost nor repeated, however often the number of ranks changes within an epoch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, strategies as st

from reshard import ElasticSampler
from reshard.errors import KeyMismatchError, LayoutError


class Loader:
    """As much of a data loader as counts here."""

    def __init__(self, sampler: ElasticSampler, batch: int) -> None:
        self.batch_sampler = torch.utils.data.BatchSampler(sampler, batch, drop_last=False)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batch_sampler)


LIVES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(0, 4)), max_size=6)
"""Parts, samples in a batch, batches that each part takes before the job ends."""


@given(size=st.integers(0, 120), lives=LIVES, shuffle=st.booleans(), seed=st.integers(0, 9))
def test_each_sample_is_taken_once(size, lives, shuffle, seed):
    state, taken = ElasticSampler(size, shuffle=shuffle, seed=seed).state_dict(), []
    for parts, batch, batches in [*lives, (1, 7, None)]:
        samplers = [ElasticSampler(size, part=p, parts=parts, shuffle=shuffle, seed=seed) for p in range(parts)]
        for sampler in samplers:
            sampler.load_state_dict(state)
        if batches is not None:
            batches = min(batches, min(len(sampler) for sampler in samplers) // batch)
            if state["position"] + parts * batch * batches >= size:
                continue  # the epoch would end
        for sampler in samplers:
            held = sampler.over(Loader(sampler, batch))
            taken += itertools.chain.from_iterable(itertools.islice(held, batches) if batches != 0 else ())
        if batches is not None:
            assert all(sampler.state_dict() == samplers[0].state_dict() for sampler in samplers)
            state = samplers[0].state_dict()
        else:
            assert samplers[0].state_dict() == {**state, "epoch": 1, "position": 0}
    assert sorted(taken) == list(range(size))


@given(
    size=st.integers(0, 40),
    parts=st.integers(1, 6),
    position=st.integers(0, 40),
    tail=st.sampled_from(["drop", "repeat"]),
)
def test_tails_make_parts_even(size, parts, position, tail):
    samplers = [ElasticSampler(size, part=p, parts=parts, tail=tail) for p in range(parts)]
    for sampler in samplers:
        sampler.load_state_dict({**sampler.state_dict(), "position": min(position, size)})
    assert len({len(sampler) for sampler in samplers}) == 1
    left, given_out = max(size - position, 0), parts * len(samplers[0])
    assert (given_out - left if tail == "repeat" else left - given_out) in range(parts)


def test_what_nobody_counts_or_what_is_another_order_is_refused():
    sampler = ElasticSampler(10)
    with pytest.raises(LayoutError, match="over"):
        list(torch.utils.data.DataLoader(range(10), sampler=sampler))
    with pytest.raises(KeyMismatchError, match="seed is 0, was 1"):
        sampler.load_state_dict(ElasticSampler(10, seed=1).state_dict())
    with pytest.raises(LayoutError, match="part=2, parts=2"):
        ElasticSampler(10, part=2, parts=2)
    epochs = [
        [i for batch in sampler.over(torch.utils.data.DataLoader(range(10), sampler=sampler)) for i in batch]
        for _ in range(2)
    ]
    assert epochs[0] != epochs[1]
    assert sorted(map(int, epochs[0])) == sorted(map(int, epochs[1])) == list(range(10))


def test_batches_that_workers_fetched_and_nobody_took_come_again():
    sampler = ElasticSampler(40)
    loader = torch.utils.data.DataLoader(range(40), batch_size=4, sampler=sampler, num_workers=1, prefetch_factor=4)
    taken = [i for batch in itertools.islice(sampler.over(loader), 3) for i in batch.tolist()]
    again = ElasticSampler(40)
    again.load_state_dict(sampler.state_dict())
    rest = [i for batch in again.over(torch.utils.data.DataLoader(range(40), sampler=again)) for i in batch.tolist()]
    assert (len(taken), sorted(taken + rest)) == (12, list(range(40)))
