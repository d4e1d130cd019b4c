"""Strided bytes, against numpy's own strides; ranges of bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from planners import Box, ByteRuns, PlanError, Window
from planners.geometry.byte_ranges import merge_ranges, subtract_ranges


def test_a_row_major_window_is_one_run():
    window = Window.row_major(100, (3, 4), 2)

    assert (window.strides, window.numel, window.nbytes, window.stop) == ((8, 2), 12, 24, 124)
    assert window.is_contiguous
    assert list(window.runs()) == [(100, 24)]


@pytest.mark.parametrize(
    ("box", "runs"),
    [
        (Box((1, 0), (2, 4)), [(8, 16)]),  # whole rows: one run
        (Box((0, 1), (3, 2)), [(2, 4), (10, 4), (18, 4)]),
        (Box((1, 3), (1, 1)), [(14, 2)]),
        (Box((3, 4), (0, 0)), []),
        (Box((0, 0), (3, 4)), [(0, 24)]),
    ],
)
def test_a_box_is_strided_runs(box, runs):
    found = Window.row_major(0, (3, 4), 2).crop(box).runs()

    assert list(found) == runs
    assert (found.count, found.nbytes) == (len(runs), sum(size for _, size in runs))


def test_a_transposed_window_reads_single_items():
    turned = Window.row_major(0, (2, 3), 4).permute((1, 0))

    assert turned.sizes == (3, 2)
    assert [start for start, _ in turned.runs()] == [0, 12, 4, 16, 8, 20]


def test_dims_of_size_one_come_and_go():
    stacked = Window.row_major(10, (4, 1, 6), 2)

    assert stacked.rearrange((0, 2)) == Window.row_major(10, (4, 6), 2)
    assert list(stacked.rearrange((None, 2, 0)).runs()) == list(stacked.rearrange((2, 0)).runs())
    assert stacked.rearrange((None, 0, 1, 2)).sizes == (1, 4, 1, 6)


def test_a_stride_of_zero_repeats_an_element():
    assert list(Window(8, (3,), (0,), 4).runs()) == [(8, 4)] * 3


def test_gaps_up_to_the_limit_are_read_as_well():
    runs = Window.row_major(0, (4, 10), 1).crop(Box((0, 0), (4, 7))).runs()

    assert list(runs.joined(3)) == [(0, 37)]
    assert list(runs.joined(2)) == [(0, 7), (10, 7), (20, 7), (30, 7)]
    assert list(ByteRuns(0, 0, (), ()).joined(10)) == []
    backwards = Window.row_major(0, (2, 2), 1).permute((1, 0)).runs()  # 0 2 1 3: a run before the last one's end
    assert list(backwards.joined(8)) == [(0, 3), (1, 3)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Window(0, (1, 2), (1,), 1), "one stride per dim"),
        (lambda: Window(-1, (), (), 1), "must be >= 0"),
        (lambda: Window(0, (2,), (-1,), 1), "must be >= 0"),
        (lambda: Window(0, (2,), (1,), 0), "item size >= 1"),
        (lambda: Window.row_major(0, (2, 2), 1).crop(Box((1, 1), (2, 1))), "is outside a window"),
        (lambda: Window.row_major(0, (2, 2), 1).permute((0, 0)), "is not a permutation"),
        (lambda: Window.row_major(0, (2, 2), 1).rearrange((0,)), "not of size 1"),
        (lambda: Window.row_major(0, (2, 2), 1).rearrange((0, 0, 1)), "distinct dims"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(PlanError, match=message):
        make()


def test_runs_of_a_whole_file_are_what_numpy_reads():
    file = np.arange(240, dtype=np.uint8)
    array = file[16:].view(np.uint16).reshape(4, 4, 7)
    window = Window.row_major(16, (4, 4, 7), 2).crop(Box((1, 0, 2), (2, 4, 3))).permute((2, 0, 1))

    read = b"".join(file[start : start + size].tobytes() for start, size in window.runs())

    assert read == array[1:3, :, 2:5].transpose(2, 0, 1).tobytes()


ranges = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (min(pair), max(pair)))).map(
    merge_ranges
)


@given(ranges, ranges)
def test_what_is_without_holes_is_what_lies_outside_of_them(given_, holes):
    left = subtract_ranges(given_, holes)
    assert left == sorted(left)
    bytes_of = lambda spans: [i for start, stop in spans for i in range(start, stop)]  # noqa: E731
    gone = {*bytes_of(holes)}
    assert bytes_of(left) == [i for i in bytes_of(given_) if i not in gone]
