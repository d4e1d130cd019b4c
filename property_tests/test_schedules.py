"""Laws of schedules: no conflict, in budget, all bytes once, as few rounds as the busiest rank needs."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
from hypothesis import given, settings, strategies as st

from planners import Box, Schedule, plan_transfers, schedule, verify
from planners.plans.schedule import color_edges
from planners.testing.strategies import state_pairs
from property_tests.budget import examples

edges = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=60)


@given(edges)
@settings(max_examples=examples(500, most=20_000))
def test_colors_never_meet_and_are_as_few_as_the_busiest_end_needs(pairs):
    colors = color_edges([u for u, _ in pairs], [v for _, v in pairs])

    busiest = [max(Counter(end).values(), default=0) for end in zip(*pairs)] or [0]
    assert max(colors, default=-1) + 1 == max(busiest)
    assert len({(u, c) for (u, _), c in zip(pairs, colors)}) == len(pairs)
    assert len({(v, c) for (_, v), c in zip(pairs, colors)}) == len(pairs)


@given(state_pairs(max_tensors=3), st.integers(128, 600))
@settings(max_examples=examples(250, most=20_000))
def test_all_bytes_travel_once_in_rounds_without_conflict(pair, budget):
    plan = plan_transfers(*pair)

    rounds = schedule(plan, max_inflight_bytes=budget)

    assert verify(rounds).ok
    sent, received = {}, {}
    for rank in range(plan.world_size):
        spots, inflight = [], Counter()
        for message in rounds.messages(rank):
            book = sent if message.sender == rank else received
            book.setdefault((message.sender, message.receiver), []).append(message)
            spots.append((message.round, message.sender == rank))
            inflight[message.round] += message.nbytes
            assert rank in (message.sender, message.receiver)
        assert len(set(spots)) == len(spots)
        assert spots == sorted(spots, key=lambda spot: (spot[0], not spot[1]))
        assert max(inflight.values(), default=0) <= budget
    assert sent == received
    assert set(sent) == set(zip(*(column.tolist() for column in plan.traffic()[:2])))
    for (sender, receiver), messages in sent.items():
        pieces = [piece for message in messages for piece in message.pieces]
        assert flat_elements(pieces) == flat_elements([i for i in plan.items_from(sender) if i.receiver == receiver])


def flat_elements(items):
    """(name, its global index, index at the sender, index at the receiver) of each element, in order."""
    out = []
    for item in items:
        columns = [indexes(box) for box in (item.box, item.source, item.target)]
        out += [(item.fqn, item.source_part, item.target_part, *row) for row in zip(*columns, strict=True)]
    return out


def indexes(box: Box):
    return itertools.product(*(range(o, o + s) for o, s in zip(box.offsets, box.sizes)))


@given(state_pairs(max_tensors=3), st.integers(128, 600))
@settings(max_examples=examples(120, most=20_000))
def test_there_are_as_few_rounds_as_the_busiest_rank_has_messages(pair, budget):
    plan = plan_transfers(*pair)
    rounds = schedule(plan, max_inflight_bytes=budget)

    busiest = max((*Counter(rounds.sender.tolist()).values(), *Counter(rounds.receiver.tolist()).values()), default=0)

    assert rounds.rounds == busiest
    assert rounds.nbytes == plan.bytes_moved
    assert all(rounds.inflight_bytes() <= budget)


def mutations(rounds: Schedule, at: int):
    """Every way to spoil one message: lose it, do it twice, cut it wrong, move it to another round or rank."""
    columns = [column.copy() for column in rounds.columns()]
    yield "drop", [np.delete(column, at) for column in columns]
    yield "twice", [np.append(column, column[at]) for column in columns]
    for name, which, by in (
        ("start later", 3, 1),
        ("start earlier", 3, -1),
        ("stop later", 4, 1),
        ("stop earlier", 4, -1),
        ("sender", 1, 1),
        ("receiver", 2, 1),
        ("sender outside", 1, 10_000),
        ("receiver outside", 2, -10_000),
        ("no round", 0, -10_000),
    ):
        changed = [column.copy() for column in columns]
        changed[which][at] += by
        yield name, changed
    for verb, which in (("sends twice", 1), ("receives twice", 2)):
        busy = np.flatnonzero((columns[which] == columns[which][at]) & (columns[0] != columns[0][at]))
        for other in busy[:1]:
            changed = [column.copy() for column in columns]
            changed[0][at] = columns[0][other]
            yield verb, changed


@given(st.data())
@settings(max_examples=examples(120, most=20_000))
def test_verify_finds_any_one_spoiled_message(data):
    rounds = schedule(plan_transfers(*data.draw(state_pairs(max_tensors=2))), max_inflight_bytes=128)
    if not len(rounds):
        return
    at = data.draw(st.integers(0, len(rounds) - 1))

    for what, columns in mutations(rounds, at):
        assert not verify(Schedule(rounds.plan, rounds.max_inflight_bytes, tuple(columns))).ok, what


@given(state_pairs(max_tensors=2))
@settings(max_examples=examples(100, most=20_000))
def test_verify_finds_a_budget_that_is_not_kept(pair):
    rounds = schedule(plan_transfers(*pair), max_inflight_bytes=4096)
    if not len(rounds):
        return

    most = int(rounds.inflight_bytes().max())
    assert not verify(Schedule(rounds.plan, most, rounds.columns())).ok
    assert verify(Schedule(rounds.plan, most + most // 16 + 64, rounds.columns())).ok
