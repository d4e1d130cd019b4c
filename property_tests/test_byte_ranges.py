"""Laws of windows and byte runs, against numpy's strides over the bytes of a file."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings, strategies as st

from planners import StateLayout, TensorSpec, View, Window, plan_reads
from planners.geometry.box import arrange
from planners.testing.strategies import boxes, product_layouts, shapes
from property_tests.budget import examples


@st.composite
def windows(draw):
    """A window made by cropping and turning, and the array that numpy makes of the same bytes in the same way."""
    shape = draw(shapes(max_dims=4, max_size=6))
    itemsize, offset = draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(0, 9))
    file = np.random.default_rng(0).integers(0, 256, offset + int(np.prod(shape)) * itemsize + 3, dtype=np.uint8)
    array = np.ndarray(shape, f"V{itemsize}", file, offset)
    window = Window.row_major(offset, shape, itemsize)
    for _ in range(draw(st.integers(0, 3))):
        if draw(st.booleans()):
            box = draw(boxes(window.sizes))
            window, array = window.crop(box), array[box.slices]
        else:
            dims = draw(st.permutations(range(array.ndim)))
            dropped = [d for d in dims if array.shape[d] == 1 and draw(st.booleans())]
            kept = [d for d in dims if d not in dropped]
            kept.insert(draw(st.integers(0, len(kept))), None)
            window, array = window.rearrange(kept), arrange(array, tuple(kept))
    return file, window, array


@given(windows())
@settings(max_examples=examples(800, most=20_000))
def test_runs_read_the_elements_in_row_major_order(made):
    file, window, array = made

    runs = window.runs()

    assert window.sizes == array.shape
    assert b"".join(file[start : start + size].tobytes() for start, size in runs) == array.tobytes()
    assert runs.nbytes == window.nbytes == array.size * window.itemsize
    assert all(start + size <= window.stop <= len(file) for start, size in runs)
    assert len(list(runs)) == runs.count
    if array.size:
        assert window.is_contiguous == array.flags.c_contiguous


@given(windows(), st.lists(st.integers(0, 400), max_size=6))
def test_ranges_of_bytes_share_out_the_elements(made, cuts):
    """Each element is in exactly one range of a partition: in the one in which it begins."""
    _, window, _ = made
    edges = sorted({0, window.stop + 1, *(cut for cut in cuts if cut <= window.stop)})
    begins = np.add.reduce(
        np.meshgrid(*(np.arange(n) * s for n, s in zip(window.sizes, window.strides)), indexing="ij"), dtype=np.int64
    ) + np.full(window.sizes, window.offset)
    seen = np.zeros(window.sizes, int)

    for start, stop in itertools.pairwise(edges):
        for box in window.within(start, stop):
            seen[box.slices] += 1
            assert ((start <= begins[box.slices]) & (begins[box.slices] < stop)).all()

    assert (seen == 1).all()


@given(windows(), st.integers(0, 20))
def test_joined_reads_hold_all_runs_and_waste_only_short_gaps(made, gap):
    _, window, _ = made
    runs, joined = list(window.runs()), window.runs().joined(gap)

    reads = [(start, length, window.runs().nbytes // joined.count) for start, length in joined]

    assert sum(needed for _, _, needed in reads) == sum(size for _, size in runs)
    left = iter(runs)
    for start, length, needed in reads:
        at = start
        while needed:
            position, size = next(left)
            assert at <= position <= at + gap or at == start == position
            needed, at = needed - size, position + size
        assert at == start + length
    assert next(left, None) is None
    bytes_of_dims = [n * s for n, s in zip(window.runs().counts, window.runs().strides)]
    if all(outer >= inner for outer, inner in zip(window.runs().strides, bytes_of_dims[1:])):  # they nest
        for (a, length, _), (b, _, _) in itertools.pairwise(reads):
            assert b - (a + length) > gap  # otherwise they would have been one read


@given(st.data())
@settings(max_examples=examples(200, most=20_000))
def test_items_of_a_plan_compile_to_windows_that_read_their_bytes(data):
    """Chunks as row-major files; an item's bytes, read through its window, are the target's elements."""
    shape = data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=3).map(tuple))
    spec = TensorSpec("saved", shape, "int64")
    saved = data.draw(product_layouts(spec, max_ranks=6))
    view = View.of(spec).transpose().rename("wanted").pad([(1, 0)] * len(shape), -1)
    wanted = data.draw(product_layouts(view.spec, max_ranks=6))
    whole = np.arange(spec.numel).reshape(shape)
    truth = np.pad(whole.transpose(), [(1, 0)] * len(shape), constant_values=-1)
    files = {chunk: whole[chunk.slices].tobytes() for _, chunk in saved.chunks()}
    plan = plan_reads(StateLayout({"saved": saved}), StateLayout({"wanted": wanted}), views=[view])

    for rank in range(plan.world_size):
        parts = plan.wanted.parts("wanted", rank)
        places = {local: box for part in parts for box, local in part.boxes()}
        for item in plan.items(rank):
            window = Window.row_major(0, item.chunk.sizes, 8).crop(item.source).rearrange(item.dims)
            read = b"".join(files[item.chunk][at : at + size] for at, size in window.runs())
            assert window.sizes == item.target.sizes
            (meant,) = [
                item.target.relative_to(local).shift(box.offsets)
                for local, box in places.items()
                if local.contains(item.target)
            ]
            assert read == truth[meant.slices].tobytes()
