"""Exact covers, against counting every element."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from planners.geometry import overlap
from planners.geometry.box import Box
from planners.geometry.overlap import tiling_fault

ROWS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 3), st.integers(0, 3)), max_size=6)


@pytest.mark.parametrize("max_cells", [1 << 22, 4])
@given(rows=ROWS)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_fault_is_found_where_counting_finds_one(max_cells, rows):
    """With grids that are counted at once, and with grids that are halved again and again."""
    boxes = [Box((r, c), (h, w)) for r, c, h, w in rows]
    region = Box((0, 0), (5, 5))
    count = np.zeros((8, 8), dtype=int)
    for box in boxes:
        count[box.slices] += 1
    wanted = np.zeros((8, 8), dtype=int)
    wanted[region.slices] = 1
    before, overlap.MAX_CELLS = overlap.MAX_CELLS, max_cells
    try:
        fault = tiling_fault([region], boxes)
    finally:
        overlap.MAX_CELLS = before

    assert (fault is None) == bool((count == wanted).all())
    if fault is not None:
        assert (fault.count, fault.wanted) == (count[fault.element], wanted[fault.element])
        assert fault.count != fault.wanted


def test_a_gap_and_an_overlap_of_equal_size_are_found():
    fault = tiling_fault([Box.full((4,))], [Box((0,), (3,)), Box((2,), (1,))])

    assert fault is not None
    assert fault.count != 1
    assert "element" in str(fault)


def test_boxes_that_share_no_cuts():
    diagonal = [Box((i * 3, i * 3), (2, 2)) for i in range(3000)]

    assert tiling_fault(diagonal, diagonal) is None
    fault = tiling_fault(diagonal, [*diagonal, Box((300, 301), (2, 1))])
    assert fault is not None
    assert fault.count == 2
    assert fault.element[0] in (300, 301)


def test_scalars_and_nothing():
    scalar = Box((), ())
    assert tiling_fault([scalar], [scalar]) is None
    assert tiling_fault([scalar], []).count == 0
    assert tiling_fault([scalar], [scalar, scalar]).count == 2
    assert tiling_fault([Box.full((0, 3))], []) is None
    assert tiling_fault([], [Box((0,), (1,))]).wanted == 0


def test_many_dims_of_which_few_are_cut():
    """As in the state of a simulated quantum computer. A grid of all their corners would have 2**40."""
    whole = Box.full((2,) * 40)
    low, high = whole.cut(39, 0, 1), whole.cut(39, 1, 2)

    assert tiling_fault([whole], [low, high]) is None
    fault = tiling_fault([whole], [low, high.cut(0, 1, 2)])
    assert fault is not None
    assert (fault.element, fault.count) == ((*(0,) * 39, 1), 0)
