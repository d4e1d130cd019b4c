"""What is counted for all ranks at once equals what is counted item by item."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from planners import Cluster, Window, estimate, plan_reads, plan_transfers, plan_writes, summarize
from planners.plans.load import count_reads
from planners.testing.strategies import state_pairs
from property_tests.budget import examples

gaps = st.sampled_from([0, 1, 7, 64, 10_000])


@given(state_pairs(max_tensors=3), gaps)
@settings(max_examples=examples(400, most=20_000))
def test_reads_are_counted_as_if_every_item_were_listed(pair, max_gap_bytes):
    plan = plan_reads(*pair)

    counts = count_reads(plan, max_gap_bytes)

    for rank in range(plan.world_size):
        items, requests, read_bytes = plan.items(rank), 0, 0
        for item in items:
            window = Window.row_major(0, item.chunk.sizes, plan.saved[item.fqn].spec.itemsize)
            for _, length in window.crop(item.source).runs().joined(max_gap_bytes):
                requests, read_bytes = requests + 1, read_bytes + length
        assert (counts.items[rank], counts.requests[rank], counts.read_bytes[rank]) == (
            len(items),
            requests,
            read_bytes,
        )
    assert (counts.read_bytes >= plan.rank_bytes()).all()


@given(state_pairs(max_tensors=3))
@settings(max_examples=examples(300, most=20_000))
def test_a_summary_agrees_with_the_items(pair):
    reads, transfers = plan_reads(*pair), plan_transfers(*pair)

    stats, moved = summarize(reads), summarize(transfers)

    assert stats.items.tolist() == [len(reads.items(rank)) for rank in range(reads.world_size)]
    assert moved.items.tolist() == [len(transfers.items_to(rank)) for rank in range(transfers.world_size)]
    assert (stats.total_bytes, moved.total_bytes) == (reads.total_bytes, transfers.bytes_moved)
    for each in (stats, moved, summarize(plan_writes(pair[0]))):
        bins = each.histogram()
        assert sum(bin.ranks for bin in bins) == each.world_size
        for bin in bins:
            inside = (each.rank_bytes >= bin.low) & (each.rank_bytes <= bin.high)
            assert int(inside.sum()) == bin.ranks
        assert each.imbalance >= 1 - 1e-9
        assert str(each)


@given(state_pairs(max_tensors=2), st.integers(1, 5))
@settings(max_examples=examples(300, most=20_000))
def test_what_crosses_between_hosts_leaves_one_and_enters_another(pair, ranks_per_host):
    plan = plan_transfers(*pair, ranks_per_host=ranks_per_host)

    cost = estimate(plan, Cluster(ranks_per_host=ranks_per_host, network_bytes_per_s=1000.0))

    far = [i for i in plan.items() if i.sender // ranks_per_host != i.receiver // ranks_per_host]
    assert cost.host_in_bytes.sum() == cost.host_out_bytes.sum() == sum(item.nbytes for item in far)
    assert cost.seconds == max(cost.host_in_bytes.max(), cost.host_out_bytes.max()) / 1000
    assert cost.peak_host_bytes.sum() == pair[0].rank_bytes().sum() + pair[1].rank_bytes().sum()
