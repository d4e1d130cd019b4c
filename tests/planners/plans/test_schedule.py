"""Rounds of transfers, at sizes that can be checked by eye; the laws are in property_tests."""

from __future__ import annotations

import time

import pytest

from planners import PlanError, StateLayout, TensorLayout, TensorSpec, plan_transfers, schedule, verify
from planners.plans.schedule import color_edges


def change(before: str, mesh_before: str, after: str, mesh_after: str, shape=(64, 64)):
    spec = TensorSpec("w", shape, "float32")
    return plan_transfers(
        StateLayout({"w": TensorLayout(spec, mesh_before, before)}),
        StateLayout({"w": TensorLayout(spec, mesh_after, after)}),
    )


def test_an_exchange_of_all_with_all_takes_one_round_less_than_ranks():
    rounds = schedule(change("S(0)", "dp=8", "S(1)", "dp=8"))

    assert rounds.rounds == 7
    assert len(rounds) == 56
    assert rounds.inflight_bytes().tolist() == [2 * 256] * 8
    assert rounds.round_bytes().tolist() == [256] * 7


def test_a_copy_to_all_from_one_takes_a_round_per_receiver():
    rounds = schedule(change("R", "dp=1", "R", "dp=5"))

    assert rounds.rounds == 4
    assert sorted(rounds.receiver.tolist()) == [1, 2, 3, 4]


def test_large_transfers_are_cut_at_elements_and_go_out_in_order():
    plan = change("R", "dp=1", "R", "dp=2", shape=(5, 7))

    rounds = schedule(plan, max_inflight_bytes=128)

    messages = rounds.messages(0)
    assert [message.round for message in messages] == [0, 1, 2]
    assert messages == rounds.messages(1)
    assert sum(message.nbytes for message in messages) == 140
    assert all(piece.nbytes == 4 * piece.box.numel for message in messages for piece in message.pieces)
    assert verify(rounds).ok


def test_messages_are_cut_between_rows_where_rows_are_small_beside_the_budget():
    """A message is one box then, which may lie in one run of memory, and not that and the ends of two rows."""
    plan = change("S(0)", "dp=2", "S(1)", "dp=2", shape=(1000, 2000))
    budget = 256 << 10

    rounds = schedule(plan, max_inflight_bytes=budget)

    sent = [message for message in rounds.messages(0) if message.sender == 0]
    assert len(sent) == len(rounds.sizes) // 2 > 10
    assert [len(message.pieces) for message in sent] == [1] * len(sent)
    assert sum(message.nbytes for message in sent) == 1000 * 2000
    assert all(message.nbytes <= budget // 2 for message in sent)
    assert min(message.nbytes for message in sent) > budget // 3
    assert verify(rounds).ok


def test_nothing_to_move_is_no_round():
    rounds = schedule(change("S(0)", "dp=4", "S(0)", "dp=4"))

    assert (rounds.rounds, len(rounds), rounds.nbytes) == (0, 0, 0)
    assert rounds.messages(0) == ()
    assert verify(rounds).ok


def test_a_budget_too_small_for_an_element_is_refused():
    with pytest.raises(PlanError, match="at least 128, got 127"):
        schedule(change("S(0)", "dp=2", "S(1)", "dp=2"), max_inflight_bytes=127)


def test_rounds_for_thousands_of_ranks_take_seconds():
    plan = change("S(0)", "dp=4096", "S(0)", "dp=3072", shape=(1 << 20, 64))

    start = time.perf_counter()
    rounds = schedule(plan, max_inflight_bytes=8 << 10)
    report = verify(rounds)

    assert time.perf_counter() - start < 30
    assert report.ok
    assert len(rounds) > 50_000


def test_colors_where_greed_needs_more_than_the_busiest_node_has():
    """A path of edges colored 0, 1 must be swapped before the last edge fits into two colors."""
    senders, receivers = [0, 1, 1, 2, 2, 0], [0, 1, 2, 0, 1, 2]

    colors = color_edges(senders, receivers)

    assert max(colors) == 1
    for end in (senders, receivers):
        assert len(set(zip(end, colors))) == len(colors)


def test_an_edge_needs_two_ends():
    with pytest.raises(PlanError, match="2 senders and 1 receivers"):
        color_edges([0, 1], [0])
