"""Laws of fingerprints: parts add up to the whole however a tensor is cut, and no difference goes unseen."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given, strategies as st

from planners.geometry.box import Box
from reshard.live.fingerprints import Fingerprinter, Partial, partial

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64]
INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SIZES = st.one_of(st.integers(0, 6), st.sampled_from([2047, 2048, 2049, 4100]))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Up to four dims, at most one of them longer than a block; any bits."""
    shape = draw(st.lists(SIZES, max_size=4).filter(lambda s: sum(n > 6 for n in s) <= 1))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    numel = math.prod(shape)
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


@st.composite
def dim_cuts(draw: st.DrawFn, size: int) -> list[list[tuple[int, int]]]:
    """The intervals of each owner of a dim: cut anywhere, in any order, dealt out in any way."""
    points = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=4))})
    intervals = draw(st.permutations(list(itertools.pairwise(points))))
    owners = draw(st.lists(st.integers(0, 2), min_size=len(intervals), max_size=len(intervals)))
    return [[iv for iv, owner in zip(intervals, owners) if owner == o] for o in range(3)]


@given(st.data())
def test_any_product_layout_adds_up(data: st.DataObject) -> None:
    tensor = data.draw(tensors())
    shape = tuple(tensor.shape)
    places = list(itertools.product(*(data.draw(dim_cuts(size)) for size in shape)))
    parts = []
    for place in data.draw(st.permutations(places)):
        local = tensor.view(INTS[tensor.itemsize])
        for d, intervals in enumerate(place):
            local = local.index_select(
                d, torch.tensor([i for a, b in intervals for i in range(a, b)], dtype=torch.long)
            )
        parts.append(partial(local.view(tensor.dtype), place, shape))

    assert partial(tensor) == Partial.total(parts)
    assert len({p.digest(tensor.dtype, shape) for p in (partial(tensor), Partial.total(parts))}) == 1


@given(st.data())
def test_any_tree_of_boxes_adds_up_as_a_stream(data: st.DataObject) -> None:
    """A tensor is split in two, and its halves again, at any place of any dim; each box is read as it lies."""
    tensor = data.draw(tensors())
    boxes = [Box.full(tensor.shape)]
    for _ in range(data.draw(st.integers(0, 5)) if tensor.ndim else 0):
        box = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        d = data.draw(st.integers(0, tensor.ndim - 1))
        at = data.draw(st.integers(0, box.sizes[d]))
        halves = [(box.offsets[d], at), (box.offsets[d] + at, box.sizes[d] - at)]
        for offset, size in halves:
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[d], sizes[d] = offset, size
            boxes.append(Box(offsets, sizes))
    reader = Fingerprinter(tensor.dtype, tensor.shape)
    for box in data.draw(st.permutations(boxes)):
        reader.add(tensor[box.slices], box)

    assert partial(tensor).digest(tensor.dtype, tensor.shape) == reader.digest()


@given(st.data())
def test_tensors_that_differ_have_sums_that_differ(data: st.DataObject) -> None:
    tensor = data.draw(tensors().filter(lambda t: t.numel() > 0))
    before = partial(tensor)
    flat = tensor.view(-1).view(INTS[tensor.itemsize])
    original = flat.clone()
    for _ in range(data.draw(st.integers(1, 4))):
        i, j = (data.draw(st.integers(0, flat.numel() - 1)) for _ in "ij")
        kind = data.draw(st.sampled_from(["flip", "swap", "copy"]))
        if kind == "flip":
            flat[i] ^= 1
        elif kind == "swap":
            flat[i], flat[j] = flat[j].clone(), flat[i].clone()
        else:
            flat[i] = flat[j]

    assert torch.equal(flat, original) == (partial(tensor) == before)
