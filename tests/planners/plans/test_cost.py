"""Estimates and summaries against figures worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from planners import (
    Cluster,
    PlanError,
    StateLayout,
    Topology,
    compare_topologies,
    estimate,
    plan_reads,
    plan_transfers,
    plan_writes,
    summarize,
)
from planners.reports.text import PlanStats
from tests.planners.states import alike

state = alike((8, 16))


ROWS, COLUMNS = state("S(0)", "dp=4"), state("S(1)", "dp=2")


def test_a_load_by_columns_of_what_was_saved_by_rows():
    """Each of 2 ranks reads, of each of 4 chunks of 2 x 16 floats, 2 runs of 32 bytes that lie 32 bytes apart."""
    cluster = Cluster(ranks_per_host=1, storage_read_bytes_per_s=64.0, request_latency_s=0.5, requests_in_flight=3)

    cost = estimate(plan_reads(ROWS, COLUMNS), cluster)

    assert cost.rank_needed_bytes.tolist() == [256, 256]
    assert cost.rank_requests.tolist() == [8, 8]
    assert cost.over_read == 1.0
    assert cost.seconds == 256 / 64 + 3 * 0.5
    assert cost.peak_host_bytes.tolist() == [256, 256]
    assert cost.straggling == 1.0
    assert cost.fits is None


def test_gaps_are_read_along_up_to_the_limit():
    cluster = Cluster(storage_read_bytes_per_s=1.0, max_gap_bytes=32)

    cost = estimate(plan_reads(ROWS, COLUMNS), cluster)

    assert cost.rank_requests.tolist() == [4, 4]
    assert cost.rank_bytes.tolist() == [4 * 96, 4 * 96]
    assert cost.over_read == 1.5
    assert cost.host_in_bytes.tolist() == [768]


def test_storage_as_a_whole_may_be_the_limit():
    plan = plan_reads(ROWS, COLUMNS)
    fast = Cluster(ranks_per_host=1, storage_read_bytes_per_s=256.0)
    shared = Cluster(ranks_per_host=1, storage_read_bytes_per_s=256.0, storage_total_bytes_per_s=128.0)

    assert estimate(plan, fast).seconds == 1.0
    assert estimate(plan, shared).seconds == 4.0


def test_a_save_writes_each_byte_once_in_a_file_per_rank():
    cluster = Cluster(ranks_per_host=2, storage_write_bytes_per_s=128.0, host_memory_bytes=1000)

    cost = estimate(plan_writes(state("S(0),R", "dp=2,copy=2", names=["a", "b"])), cluster)

    assert cost.host_out_bytes.sum() == 2 * 512
    assert cost.rank_requests.tolist() == [1, 1, 1, 1]
    assert cost.seconds == 512 / 128
    assert cost.fits is False
    assert "does NOT fit" in str(cost)


def test_what_the_ranks_ask_the_store_takes_its_time():
    plan = plan_writes(state("S(0),R", "dp=2,copy=2", names=["a", "b"]))
    mute = Cluster(ranks_per_host=2, storage_write_bytes_per_s=128.0)
    slow = Cluster(ranks_per_host=2, storage_write_bytes_per_s=128.0, store_requests_per_s=70.0)

    assert estimate(plan, slow).seconds == estimate(plan, mute).seconds + 4 * 35 / 70
    assert estimate(plan, slow).control_seconds == 2.0
    assert "the ranks agree for" in str(estimate(plan, slow))
    assert "the ranks agree for" not in str(estimate(plan, mute))
    assert estimate(plan_reads(ROWS, COLUMNS), Cluster(storage_read_bytes_per_s=1.0)).control_seconds == 0.0


def test_transfers_count_what_leaves_the_host():
    plan = plan_transfers(state("S(0)", "dp=4", (8,)), state("R", "dp=4", (8,)))
    cluster = Cluster(ranks_per_host=2, network_bytes_per_s=8.0, local_bytes_per_s=16.0)

    cost = estimate(plan, cluster)

    assert cost.host_in_bytes.tolist() == cost.host_out_bytes.tolist() == [32, 32]
    assert cost.seconds == 32 / 8 + 16 / 16
    assert cost.rank_requests.tolist() == [3, 3, 3, 3]
    assert cost.peak_host_bytes.tolist() == [2 * 8 + 2 * 32] * 2


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        (plan_reads(ROWS, COLUMNS), "storage_read_bytes_per_s"),
        (plan_writes(ROWS), "storage_write_bytes_per_s"),
        (plan_transfers(ROWS, COLUMNS), "network_bytes_per_s"),
    ],
)
def test_a_cluster_without_the_bandwidth_is_an_error(plan, name):
    with pytest.raises(PlanError, match=f"pass {name}"):
        estimate(plan, Cluster())


@pytest.mark.parametrize(
    "figures",
    [
        {"ranks_per_host": 0},
        {"ranks_per_host": 2.5},
        {"network_bytes_per_s": 0},
        {"storage_read_bytes_per_s": -1.0},
        {"request_latency_s": -0.1},
        {"requests_in_flight": 0},
        {"host_memory_bytes": float("nan")},
    ],
)
def test_figures_that_are_not_positive_are_refused(figures):
    with pytest.raises(PlanError, match=next(iter(figures))):
        Cluster(**figures)


def test_targets_are_compared_fastest_first():
    cluster = Cluster(
        ranks_per_host=1,
        storage_read_bytes_per_s=1.0,
        request_latency_s=1.0,
        requests_in_flight=1,
        host_memory_bytes=300,
    )
    targets = {
        "columns": COLUMNS,
        "one rank": Topology.parse("dp=1", {"*": "R"}),
        "rows": Topology.parse("dp=4", {"*": "S(0)"}),
    }

    table = compare_topologies(ROWS, targets, cluster)

    assert list(table.estimates) == ["rows", "columns", "one rank"]
    assert table.best == "rows"
    assert [each.fits for each in table.estimates.values()] == [True, True, False]
    lines = str(table).splitlines()
    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1
    live = compare_topologies(ROWS, targets, Cluster(network_bytes_per_s=1.0), live=True)
    assert live.estimates["rows"].seconds == 0


def test_nothing_to_compare_is_an_error():
    with pytest.raises(PlanError, match="no target"):
        compare_topologies(ROWS, {}, Cluster())


def test_a_summary_of_uneven_rows():
    stats = summarize(plan_reads(state("R", "dp=1", (10, 16)), state("S(0)", "dp=4", (10, 16))))

    assert stats.rank_bytes.tolist() == [192, 192, 192, 64]
    assert (stats.max_bytes, stats.mean_bytes, stats.busiest_rank) == (192, 160.0, 0)
    assert stats.imbalance == 1.2
    assert [(bin.low, bin.high, bin.ranks) for bin in stats.histogram(2)] == [(64, 127, 1), (128, 192, 3)]
    assert (stats.tensors, stats.geometries, stats.items.tolist()) == (1, 1, [1, 1, 1, 1])


def test_a_summary_of_nothing():
    stats = summarize(plan_reads(StateLayout({}), StateLayout({})))

    assert (stats.total_bytes, stats.imbalance, stats.histogram()[0].ranks) == (0, 1.0, 1)
    assert "0 tensors" in str(stats)


def test_what_is_no_plan_is_refused():
    with pytest.raises(PlanError, match="cannot summarize a StateLayout"):
        summarize(ROWS)
    with pytest.raises(PlanError, match="needs a Cluster, got None"):
        estimate(plan_reads(StateLayout({}), StateLayout({})), None)
    with pytest.raises(PlanError, match="cannot estimate a StateLayout"):
        estimate(ROWS, Cluster())
    with pytest.raises(PlanError, match="one bin or more"):
        summarize(plan_writes(ROWS)).histogram(0)


def test_a_large_plan_is_estimated_without_listing_it():
    before, after = state("S(0)", "dp=16384", (1 << 20, 64)), state("S(0)", "dp=12288", (1 << 20, 64))

    cost = estimate(plan_reads(before, after), Cluster(storage_read_bytes_per_s=1e9))

    assert cost.rank_bytes.sum() == (1 << 20) * 64 * 4
    assert np.array_equal(cost.rank_bytes, cost.rank_needed_bytes)


def test_more_bytes_than_64_bits_hold_are_counted_and_not_estimated():
    before, after = (state("R", f"dp={n}", (1 << 60,)) for n in (1, 8))

    for plan, total in (plan_reads(before, after), 8 << 62), (plan_transfers(before, after), 7 << 62):
        assert plan.total_bytes == total
        with pytest.raises(PlanError, match=r"2\*\*63 bytes or more has no estimate"):
            estimate(plan, Cluster(storage_read_bytes_per_s=1e9, network_bytes_per_s=1e9))


def test_bins_that_read_the_same_are_one() -> None:
    """Ranks whose bytes differ by less than what is printed; a bin with one size has one."""

    def bins(*nbytes: int) -> list[str]:
        text = str(PlanStats("load", 1, 1, len(nbytes), np.array(nbytes), np.array([1000] * len(nbytes))))
        assert f"{len(nbytes) * 1000:,} items, 1,000 at most for one rank" in text
        return [" ".join(line.split("ranks")[0].split()) for line in text.splitlines() if "ranks  " in line]

    even = 1_900_000_000
    assert bins(*[even + 100 * rank for rank in range(2000)]) == ["1.8 GiB 2,000"]
    assert bins(7, 7) == ["7 B 2"]
    assert bins(0, 1 << 20)[0] == "0 B to 102.4 KiB 1"
    assert len(bins(0, 1 << 20)) == 10
