"""Plans through views in product form: their tables, and what is found when one is spoiled."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from planners import Shard, StateLayout, StridedShard, TensorLayout, TensorSpec, View, concat, plan_reads, verify
from planners.geometry.ownership import ownership
from planners.views.view_tables import PatchDim

SAVED, WANTED = ownership(9, ((Shard(0), 2),)), ownership(8, ((StridedShard(0, 2), 2),))


def table():
    """Source rows 3 to 9 become target rows 1 to 7; the source is cut at 5, the target at 2, 4 and 6."""
    return PatchDim(WANTED, 1, 6, SAVED, 3)


def test_rows_are_cut_by_both_sides_and_grouped_by_wanted_owner():
    assert table().rows(0) == [(1, 1, 1, 0), (4, 2, 2, 1)]
    assert table().rows(1) == [(2, 1, 0, 0), (3, 1, 1, 1), (6, 1, 2, 1)]
    assert table().fault() is None


def test_a_new_dim_has_no_saved_side():
    new = PatchDim(ownership(3, ((Shard(0), 3),)), 1, 1, None, 1)

    assert (new.rows(0), new.rows(1)) == ([], [(1, 1, 0, 1)])
    assert new.fault() is None


@pytest.mark.parametrize("column", ["starts", "stops", "local_starts", "row", "saved_row"])
@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("by", [1, -1])
def test_any_one_spoiled_number_is_found(column, at, by):
    spoiled = copy.copy(table())
    numbers = getattr(spoiled, column).copy()
    numbers[at] = (
        (numbers[at] + by) % len(WANTED.starts if column == "row" else SAVED.starts)
        if "row" in column
        else numbers[at] + by
    )
    setattr(spoiled, column, numbers)

    fault = spoiled.fault()

    assert fault is not None
    assert 0 <= fault[0] <= 8


def test_a_lost_row_is_found():
    spoiled = table()
    for name in ("starts", "stops", "local_starts", "row", "saved_row"):
        setattr(spoiled, name, np.delete(getattr(spoiled, name), 2))

    assert spoiled.fault() == (2, "is not taken exactly once")


def test_thousands_of_ranks_are_proved_through_views_at_once():
    sizes = {"q": 4096, "k": 1024, "v": 1024}
    specs = [TensorSpec(name, (rows, 4096), "bfloat16") for name, rows in sizes.items()]
    saved = StateLayout({s.fqn: TensorLayout(s, "dp=8192", "S(0)") for s in specs})
    fused = concat("qkv", [View.of(s) for s in specs])
    wanted = TensorLayout(fused.spec, "tp=8,dp=1024", "B(0, 4096+1024+1024),S(0)")

    plan = plan_reads(saved, StateLayout({"qkv": wanted}), views=[fused])

    assert verify(plan).ok
    assert plan.items(77).nbytes == plan.bytes(77) == wanted.nbytes(77)
    overlap = plan.overlap("qkv")
    overlap.tables[1].dims[0].starts[5] += 1  # in the table that all ranks share
    try:
        assert [finding.fqn for finding in verify(plan).findings] == ["qkv"]
    finally:
        overlap.tables[1].dims[0].starts[5] -= 1
