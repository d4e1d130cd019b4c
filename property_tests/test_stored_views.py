"""Views of stored tensors are the same views of torch tensors, however the tensors are stored in chunks."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given, strategies as st

from planners.geometry.box import Box
from planners.geometry.byte_ranges import Window
from planners.geometry.layout import TensorSpec
from reshard.stored import views
from reshard.stored.source import BytesSource
from reshard.stored.tensor import Extent, LazyTensor, StoredChunk, StoredTensor


@st.composite
def boxes(draw: st.DrawFn, whole: Box, depth: int = 3) -> list[Box]:
    """A tiling of `whole`, by random cuts."""
    dims = [d for d, n in enumerate(whole.sizes) if n > 1]
    if not dims or not depth or draw(st.booleans()):
        return [whole]
    d = draw(st.sampled_from(dims))
    at = draw(st.integers(1, whole.sizes[d] - 1))
    low = Box(whole.offsets, (*whole.sizes[:d], at, *whole.sizes[d + 1 :]))
    start = (*whole.offsets[:d], whole.offsets[d] + at, *whole.offsets[d + 1 :])
    high = Box(start, (*whole.sizes[:d], whole.sizes[d] - at, *whole.sizes[d + 1 :]))
    return draw(boxes(low, depth - 1)) + draw(boxes(high, depth - 1))


@st.composite
def stored(draw: st.DrawFn, shape: tuple[int, ...], first: int = 0) -> tuple[StoredTensor, torch.Tensor]:
    """A tensor of consecutive numbers, and the same stored in chunks, some of them transposed."""
    tensor = (torch.arange(math.prod(shape), dtype=torch.int32) + first).reshape(shape)
    chunks = []
    for box in draw(boxes(Box.full(shape))):
        order = draw(st.permutations(range(len(shape))))
        part = tensor[box.slices].permute(*order) if shape else tensor
        data = part.contiguous().numpy().tobytes()
        window = Window.row_major(8, [box.sizes[d] for d in order], 4)
        back = sorted(range(len(shape)), key=order.__getitem__)
        source = BytesSource(b"gapgapga" + data)
        place = Extent(source, window.permute(back) if shape else window)
        lazy = draw(st.booleans())
        chunks.append(StoredChunk(box, (lambda place=place: place) if lazy else place))
    return StoredTensor(TensorSpec("t", shape, "int32"), tuple(chunks)), tensor


def shapes(low: int = 1, high: int = 3) -> Any:
    return st.lists(st.integers(1, 5), min_size=low, max_size=high).map(tuple)


def check(found: StoredTensor, wanted: torch.Tensor, draw: Any) -> None:
    lazy = LazyTensor(found)
    assert tuple(lazy.shape) == tuple(wanted.shape)
    assert lazy[...].equal(wanted)
    index = tuple(slice(draw(st.integers(0, n)), None, draw(st.integers(1, 3))) for n in wanted.shape)
    assert lazy[index].equal(wanted[index])


@given(st.data())
def test_unstack_and_stack(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    one, tensor = data.draw(stored(shape))
    rows = views.unstack(one, [str(i) for i in range(shape[0])])
    index = data.draw(st.integers(0, shape[0] - 1))
    check(rows[index], tensor[index], data.draw)
    check(views.stack(rows, "again"), tensor, data.draw)


@given(st.data())
def test_narrow_and_concat(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    one, tensor = data.draw(stored(shape))
    dim = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.integers(0, shape[dim]))
    low, high = views.narrow(one, dim, 0, cut), views.narrow(one, dim, cut, shape[dim])
    check(low, tensor.narrow(dim, 0, cut), data.draw)
    check(high, tensor.narrow(dim, cut, shape[dim] - cut), data.draw)
    check(views.concat([high, low, high], dim, "c"), torch.cat([high_of(tensor, dim, cut), tensor.narrow(dim, 0, cut),
          high_of(tensor, dim, cut)], dim), data.draw)  # fmt: skip


def high_of(tensor: torch.Tensor, dim: int, cut: int) -> torch.Tensor:
    return tensor.narrow(dim, cut, tensor.shape[dim] - cut)


@given(st.data())
def test_flat_pieces(data: st.DataObject) -> None:
    shape = data.draw(shapes(0))
    numel = math.prod(shape)
    before, after = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5))
    flat, tensor = data.draw(stored((before + numel + after,)))
    piece = views.unflatten(views.narrow(flat, 0, before, before + numel), shape, "p")
    check(piece, tensor[before : before + numel].reshape(shape), data.draw)


@given(st.data())
def test_cells_of_a_grid(data: st.DataObject) -> None:
    cell, grid = data.draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=3).map(
        lambda pairs: tuple(zip(*pairs))))  # fmt: skip
    saved, tensor = data.draw(stored((*grid, math.prod(cell))))
    shape = tuple(g * c for g, c in zip(grid, cell))
    n = len(grid)
    # [g0, g1, ..., c0, c1, ...] -> [g0, c0, g1, c1, ...] -> the whole
    order = [d for pair in zip(range(n), range(n, 2 * n)) for d in pair]
    check(views.ungrid(saved, shape, "g"), tensor.reshape(*grid, *cell).permute(*order).reshape(shape), data.draw)
