"""The 1-D algebra: which intervals of a dim each owner has, and where two ways of owning meet."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from planners import BlockShard, PlanError, Shard, StridedShard
from planners.geometry.arrays import distinct
from planners.geometry.ownership import Ownership, overlap, ownership


def all_intervals(own):
    return [own.intervals(owner) for owner in range(own.owners)]


@pytest.mark.parametrize(
    ("size", "cuts", "intervals"),
    [
        (8, (), [((0, 8),)]),  # uncut: one owner
        (8, ((Shard(0), 2),), [((0, 4),), ((4, 8),)]),
        (7, ((Shard(0), 3),), [((0, 3),), ((3, 6),), ((6, 7),)]),  # the last is shorter
        (5, ((Shard(0), 4),), [((0, 2),), ((2, 4),), ((4, 5),), ()]),  # or empty
        (0, ((Shard(0), 2),), [(), ()]),
        (8, ((StridedShard(0, 2), 2),), [((0, 2), (4, 6)), ((2, 4), (6, 8))]),
        # cut twice, from left to right
        (8, ((Shard(0), 2), (Shard(0), 2)), [((0, 2),), ((2, 4),), ((4, 6),), ((6, 8),)]),
        # FSDP2 over TP as DTensor writes it: owner (dp, tp) has the dp-th part of the tp-th half
        (8, ((StridedShard(0, 2), 2), (Shard(0), 2)), [((0, 2),), ((4, 6),), ((2, 4),), ((6, 8),)]),
        # q of 4, k of 2, v of 2: each cut by itself
        (8, ((BlockShard(0, (4, 2, 2)), 2),), [((0, 2), (4, 5), (6, 7)), ((2, 4), (5, 6), (7, 8))]),
        (8, ((BlockShard(0, (4, 0, 4)), 1),), [((0, 8),)]),  # neighbours that touch are one interval
    ],
)
def test_what_each_owner_has(size, cuts, intervals):
    own = ownership(size, cuts)

    assert all_intervals(own) == intervals
    assert own.local_sizes.tolist() == [sum(b - a for a, b in its) for its in intervals]
    assert own.uncovered() is None


def test_local_starts_follow_local_order():
    own = ownership(12, ((StridedShard(0, 3), 2),))

    assert own.intervals(1) == ((2, 4), (6, 8), (10, 12))
    assert own.local_starts.tolist() == [0, 2, 4, 0, 2, 4]
    assert own.owner_of.tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        (((BlockShard(0, (4, 3)), 2),), "add up to 7, but the dim has 8 elements"),
        (((Shard(0), 2), (BlockShard(0, (4, 4)), 2)), "must be the first placement that shards its dim"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(cuts, message):
    with pytest.raises(PlanError, match=message):
        ownership(8, cuts)


def table(size, rows, owners):
    """An ownership from rows (owner, start, stop)."""
    indptr = np.cumsum([0] + [sum(o == k for o, _, _ in rows) for k in range(owners)])
    return Ownership(size, np.array([r[1] for r in rows]), np.array([r[2] for r in rows]), indptr)


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ([(0, 0, 4), (1, 4, 8)], None),
        ([(0, 0, 3), (1, 4, 8)], (3, "has no owner")),
        ([(0, 0, 5), (1, 4, 8)], (4, "has two owners")),
        ([(0, 0, 4), (1, 4, 7)], (7, "has no owner")),
        ([(0, 0, 4), (1, 4, 9)], (8, "is outside the tensor")),
        ([(0, 1, 5), (1, 4, 8)], (0, "has no owner")),  # a gap and an overlap of equal size
        ([], (0, "has no owner")),
    ],
)
def test_what_is_not_owned_once_is_named(rows, fault):
    assert table(8, rows, 2).uncovered() == fault


CUTS = [
    (),
    ((Shard(0), 3),),
    ((StridedShard(0, 2), 2),),
    ((StridedShard(0, 2), 3), (Shard(0), 2)),
    ((Shard(0), 2), (Shard(0), 2)),
    ((BlockShard(0, (5, 6)), 2),),
]


@pytest.mark.parametrize(("saved", "wanted"), list(itertools.product(CUTS, CUTS)))
def test_segments_are_all_that_saved_and_wanted_owners_have_in_common(saved, wanted):
    left, right = ownership(11, saved), ownership(11, wanted)
    segments = overlap(left, right)

    for owner in range(right.owners):
        rows = range(segments.indptr[owner], segments.indptr[owner + 1])
        elements = [x for i in rows for x in range(segments.starts[i], segments.stops[i])]
        assert elements == [x for a, b in right.intervals(owner) for x in range(a, b)]
        assert [int(segments.local_starts[i]) for i in rows] == np.cumsum(
            [0, *(int(segments.stops[i] - segments.starts[i]) for i in rows)]
        ).tolist()[:-1]
        for i in rows:
            row = segments.saved_row[i]
            assert left.starts[row] <= segments.starts[i] < segments.stops[i] <= left.stops[row]
            assert segments.saved_owner[i] == left.owner_of[row]


def test_elements_that_one_side_lacks_are_in_no_row():
    holey = table(8, [(0, 0, 2), (1, 5, 8)], 2)
    segments = overlap(holey, ownership(8, ((Shard(0), 2),)))

    assert list(zip(segments.starts.tolist(), segments.stops.tolist())) == [(0, 2), (5, 8)]
    assert len(overlap(table(8, [], 1), holey).starts) == 0


def test_dims_of_different_sizes_do_not_overlap():
    with pytest.raises(PlanError, match="a dim of 3 elements does not overlap one of 4"):
        overlap(ownership(3, ()), ownership(4, ()))


@pytest.mark.parametrize("values", [[], [5], [2, 2, 2], [3, -1, 3, 0, -1], [-(2**63), 2**63 - 1, -(2**63)]])
def test_distinct_values_are_those_of_numpy(values):
    given = np.array(values, dtype=np.int64)
    found = distinct(given)

    assert found.tolist() == np.unique(given).tolist()
    assert found.dtype == np.int64
    assert given.tolist() == values


def test_the_distinct_values_of_a_table():
    assert distinct(np.array([[3, 1], [1, 2]])).tolist() == [1, 2, 3]
