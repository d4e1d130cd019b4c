"""`Box`: a region of a tensor, half-open in every dim."""

from __future__ import annotations

import copy
import itertools
import pickle

import numpy as np
import pytest

from planners import Box, PlanError
from planners.geometry.box import flat_boxes

A = Box((0, 4), (2, 4))


def cells(*boxes):
    return sorted(itertools.chain.from_iterable(itertools.product(*map(range, b.offsets, b.stops)) for b in boxes))


def test_what_it_says_of_itself():
    assert (A.ndim, A.numel, A.is_empty, A.stops) == (2, 8, False, (2, 8))
    assert A.slices == (slice(0, 2), slice(4, 8))
    assert repr(A) == "Box[0:2, 4:8]"
    assert tuple(A) == ((0, 4), (2, 4))
    assert Box.full((3, 0)).is_empty
    assert (Box.full(()).numel, Box.full(()).is_empty) == (1, False)


@pytest.mark.parametrize(
    ("left", "right", "common"),
    [
        (Box((0,), (4,)), Box((2,), (4,)), Box((2,), (2,))),
        (Box((0,), (4,)), Box((4,), (4,)), None),  # they touch
        (Box((0,), (4,)), Box((1,), (0,)), None),  # an empty box has no element in common with anything
        (A, A, A),
        (Box.full(()), Box.full(()), Box.full(())),
        (Box((0, 0), (2, 2)), Box((1, 5), (2, 2)), None),  # only one dim overlaps
    ],
)
def test_intersection(left, right, common):
    assert left & right == common
    assert right.intersection(left) == common


def test_difference_is_what_is_left_in_disjoint_boxes():
    boxes = [Box((a, b), (c, d)) for a, b, c, d in itertools.product((0, 1, 2), (0, 1), (0, 1, 3), (1, 2))]
    for left, right in itertools.product(boxes, boxes):
        pieces = left - right
        assert len(pieces) <= 4
        assert cells(*pieces) == sorted(set(cells(left)) - set(cells(right)))


def test_contains_counts_an_empty_box_as_inside():
    assert A.contains(Box((1, 5), (1, 2)))
    assert not A.contains(Box((1, 5), (2, 2)))
    assert A.contains(Box((9, 9), (0, 1)))


def test_shift_and_relative_to_undo_one_another():
    inner = Box((1, 6), (1, 2))

    assert inner.relative_to(A) == Box((1, 2), (1, 2))
    assert inner.relative_to(A).shift(A.offsets) == inner
    assert A.relative_to(A) == Box.full(A.sizes)


def test_boxes_are_ordered_hashable_values():
    assert {A, Box((0, 4), [2, 4])} == {A}
    assert sorted([Box((1,), (1,)), Box((0,), (2,)), Box((0,), (1,))]) == [
        Box((0,), (1,)),
        Box((0,), (2,)),
        Box((1,), (1,)),
    ]
    assert Box((0,), (1,)) <= Box((0,), (1,)) < Box((1,), (0,))
    assert pickle.loads(pickle.dumps(A)) == copy.deepcopy(A) == A
    assert Box(np.array([1]), np.array([2])) == Box((1,), (2,))
    assert (A.offsets, A.sizes) != A


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Box((0,), (1, 2)), "one offset and one size per dim"),
        (lambda: Box((-1,), (1,)), "must be >= 0"),
        (lambda: Box((0,), (-1,)), "must be >= 0"),
        (lambda: A & Box((0,), (1,)), "2 and 1 dims have no common coordinates"),
        (lambda: A.shift((1,)), "cannot shift a box of 2 dims"),
        (lambda: A.shift((-1, 0)), "must be >= 0"),
        (lambda: A.relative_to(Box((0, 0), (9, 5))), "is not within"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(PlanError, match=message):
        make()


def test_it_is_frozen():
    with pytest.raises(AttributeError, match="frozen"):
        A.offsets = (1, 1)
    with pytest.raises(AttributeError, match="frozen"):
        del A.sizes


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (2, 1, 3, 2)])
def test_flat_ranges_are_few_boxes_in_flat_order(shape):
    ids = np.arange(int(np.prod(shape))).reshape(shape)
    for start, stop in itertools.combinations_with_replacement(range(ids.size + 1), 2):
        boxes = flat_boxes(shape, start, stop)
        held = [x for box in boxes for x in ids[box.slices].reshape(-1).tolist()]
        assert held == list(range(start, stop))
        assert len(boxes) <= max(2 * len(shape) - 1, 1)
