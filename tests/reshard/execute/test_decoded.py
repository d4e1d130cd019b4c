"""What exists only decoded is decoded once in a load, by however many threads and in however many pieces."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from planners import Box
from planners.geometry.byte_ranges import Window
from reshard.errors import CorruptCheckpointError
from reshard.execute import reading
from reshard.stored.source import BytesSource, DecodedSource
from reshard.stored.tensor import Extent


def chunks(count, nbytes, decoded):
    kept = DecodedSource.Kept()

    def decode(number):
        decoded.append(number)
        return bytes([number]) * nbytes

    return [DecodedSource(str(n), lambda n=n: decode(n), kept, n) for n in range(count)]


@pytest.mark.parametrize("threads", [1, 4])
def test_pieces_of_a_chunk_share_what_was_decoded(threads):
    decoded: list[int] = []
    sources = chunks(3, 1 << 16, decoded)
    out = np.zeros((256, 3 * 256), np.uint8)  # each chunk a column of it
    window = Window.row_major(0, (256, 256), 1)
    copies = [
        reading.Copy(Extent(source, window.crop(rows)), out[rows.slices[0], n * 256 : (n + 1) * 256])
        for n, source in enumerate(sources)
        for rows in (Box((start, 0), (64, 256)) for start in range(0, 256, 64))
    ]

    reading.run_copies(copies, space=reading.Workspace(threads, 1 << 20))

    assert sorted(decoded) == [0, 1, 2]
    assert all((out[:, n * 256 : (n + 1) * 256] == n).all() for n in range(3))
    sources[2].view()  # the last one stays
    sources[0].view()
    assert len(decoded) <= 4


def test_what_is_kept_is_bounded_and_errors_are_not_kept():
    decoded: list[int] = []
    sources = chunks(4, 100, decoded)
    sources[0].kept.allow(250)
    for source in (*sources[:2], *sources[:2], *sources, sources[0]):
        source.view()
    assert decoded == [0, 1, 2, 3, 0]  # two at a time

    def fail():
        decoded.append(9)
        raise CorruptCheckpointError("truncated")

    bad = DecodedSource("bad", fail, sources[0].kept, "bad")
    for _ in range(2):
        with pytest.raises(CorruptCheckpointError, match="truncated"):
            bad.view()
    assert decoded[-2:] == [9, 9]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: sources[3].view(), range(16)))
    assert decoded.count(3) <= 2


class Counted:
    """A key that counts how often it is looked at."""

    asked = 0

    def __hash__(self):
        Counted.asked += 1
        return id(self)


def test_what_a_chunk_costs_does_not_grow_with_what_is_kept():
    kept = DecodedSource.Kept()
    kept.allow(1500)
    sources = [DecodedSource("x", lambda: b"x", kept, Counted()) for _ in range(2000)]

    for source in sources:
        source.view()

    assert Counted.asked <= 10 * len(sources)


@pytest.mark.parametrize("shape", [(2,) * 18, (1, *(4,) * 8), (3,) * 11])
def test_pieces_of_tensors_with_many_short_dims(shape):
    """A first dim of one element divides nothing, though no other is much longer."""
    target = torch.zeros(shape, dtype=torch.float64)
    data = np.arange(target.numel(), dtype=np.float32)
    place = Extent(BytesSource(data.tobytes()), Window.row_major(0, shape, 4))
    copy = reading.Copy(place, reading.Staged(target, torch.float32))

    pieces = list(itertools.islice(reading.in_pieces(copy, 1 << 16), 100))

    assert len(pieces) < 100
    assert all(place.window.nbytes <= 1 << 16 for place, _ in pieces)
    reading.run_copies([copy], space=reading.Workspace(1, 1 << 16))
    assert torch.equal(target.reshape(-1), torch.from_numpy(data).double())
