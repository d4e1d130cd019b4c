"""The compiled loop of fingerprints: its sums are numpy's and Python's, it refuses what it cannot sum up, and it is
left out where it does not fit."""

from __future__ import annotations

import sys
import types
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from planners.geometry.box import Box
from reshard.live import fingerprint_arithmetic as compiled
from reshard.live.compiled_kernel import PRIME, is_right, kernel
from reshard.live.fingerprint_arithmetic import Key
from reshard.live.fingerprints import partial, partials
from tests.bits import DTYPES, random_bits
from tests.kernels import COMPILED, NUMPY, summed_up_by

LARGEST = 2**47 + 2**23
"""The number whose digits are both as large as they can be."""


@pytest.fixture
def kernels():
    """The package itself."""
    return pytest.importorskip("reshard_kernels", reason="reshard-kernels is not installed: it takes a C compiler")


def exact(words, columns, rows):
    """By Python's integers: the sum of each row, and that over all."""
    each = [[sum(w * c for w, c in zip(row, lane)) % PRIME for row in words.tolist()] for lane in columns.tolist()]
    return each, tuple(sum(r * s for r, s in zip(*pair)) % PRIME for pair in zip(rows.tolist(), each))


# --- the loop ---------------------------------------------------------------------------------------------------------

EDGES = [-(2**31), 2**31 - 1, -1, 0, 1, -(2**31) + 1, 2**16, -(2**16)]
NUMBERS = [0, 1, PRIME - 1, PRIME // 2, PRIME // 2 + 1, LARGEST, LARGEST + 1, LARGEST - 1, 2**24, 2**23, 2**47]


@pytest.mark.parametrize("widest", [0, 1, 2])
@pytest.mark.parametrize("word", EDGES[:2] + [-1])
@pytest.mark.parametrize("number", [LARGEST, LARGEST + 1, PRIME - 1, PRIME // 2])
def test_the_largest_words_and_numbers_stay_exact(kernels, word, number, widest):
    """All of them at once, in strips that are full: sums reach the ends of 64 bits."""
    words = np.full((5, 2048), word, np.int32)
    columns, rows = np.full((2, 2048), number), np.full((2, 5), PRIME - 1)
    each = word * number * 2048 % PRIME
    assert kernels.fold(words, kernels.table(columns), rows, widest=widest) == (each * 5 * (PRIME - 1) % PRIME,) * 2
    assert kernels.fold_rows(words, kernels.table(columns), widest=widest).tolist() == [[each] * 5] * 2


@settings(max_examples=150, deadline=None)
@given(
    height=st.integers(0, 9),
    width=st.sampled_from([0, 1, 2, 7, 8, 9, 15, 16, 17, 511, 512, 513, 1029]),
    gap=st.integers(0, 3),
    odd=st.integers(0, 3),
    widest=st.integers(0, 2),
    data=st.data(),
)
def test_sums_are_those_of_pythons_integers(height, width, gap, odd, widest, data):
    """Any heights, widths, steps from row to row and addresses; nothing outside of the rows is looked at."""
    kernels = pytest.importorskip("reshard_kernels", reason="reshard-kernels is not installed: it takes a C compiler")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))

    def some(edges, low, high, shape):
        return np.where(rng.random(shape) < 0.3, rng.choice(edges, shape), rng.integers(low, high, shape))

    memory = np.zeros(4 * (height + 1) * (width + gap) + 4, np.uint8)
    room = memory[odd : odd + 4 * height * (width + gap)].view(np.int32).reshape(height, width + gap)
    room[...] = rng.integers(-(2**31), 2**31, room.shape)
    words = room[:, :width]
    words[...] = some(EDGES, -(2**31), 2**31, words.shape)
    columns, rows = some(NUMBERS, 0, PRIME, (2, width)), some(NUMBERS, 0, PRIME, (2, height))
    each, total = exact(words, columns, rows)

    assert kernels.fold_rows(words, kernels.table(columns), widest=widest).tolist() == each
    assert kernels.fold(words, kernels.table(columns), rows, widest=widest) == total


def test_numbers_of_rows_may_lie_anyhow(kernels):
    """A copy of them must live until the call ends."""
    rng = np.random.default_rng(5)
    words, columns = rng.integers(-(2**31), 2**31, (3000, 5)).astype(np.int32), rng.integers(0, PRIME, (2, 5))
    table = kernels.table(columns)
    for rows in (rng.integers(0, PRIME, (3000, 2)).T, rng.integers(0, PRIME, (2, 6000))[:, ::2]):
        assert not rows.flags.c_contiguous
        assert kernels.fold(words, table, rows) == exact(words, columns, rows)[1]


def test_columns_numbers_stand_in_the_table_and_have_small_digits(kernels):
    """On which the bounds of the loop rest."""
    numbers = np.array([NUMBERS + list(range(LARGEST - 30, LARGEST + 30)), list(range(len(NUMBERS) + 60))])
    table = kernels.table(numbers)
    digits = table[:, :4].transpose(1, 0, 2).reshape(2, 2, -1).astype(object)
    assert digits.min() > -(2**23)
    assert digits.max() == 2**23
    again = (digits[:, 0] + 2**24 * digits[:, 1]) % PRIME
    assert (again[:, : numbers.shape[1]] == numbers).all()
    assert not again[:, numbers.shape[1] :].any()
    exact = np.ascontiguousarray(table[:, 4:]).view(np.int64).reshape(-1, 2, 8).transpose(1, 0, 2).reshape(2, -1)
    assert (exact == again).all()


@pytest.mark.parametrize(
    ("words", "numbers", "match"),
    [
        (np.zeros((2, 8), np.int64), np.zeros((2, 2), np.int64), "words are int32"),
        (np.zeros((8, 2), np.int32).T, np.zeros((2, 2), np.int64), "run of memory"),
        (np.zeros(8, np.int32), np.zeros((2, 8), np.int64), "words are int32 in rows"),
        (np.zeros((2, 9), np.int32), np.zeros((2, 2), np.int64), "a table is int32"),
        (np.zeros((2, 8), np.int32), np.zeros((2, 3), np.int64), "numbers of 2 rows"),
        (np.zeros((2, 8), np.int32), np.zeros((2, 2)), "numbers of 2 rows"),
        (np.broadcast_to(np.zeros(8, np.int32), (2**17 + 1, 8)), np.zeros((2, 2**17 + 1), np.int64), "at most"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(kernels, words, numbers, match):
    """Addresses go into C unseen, so nothing else may get there."""
    with pytest.raises(ValueError, match=match):
        kernels.fold(words, kernels.table(np.zeros((2, 8), np.int64)), numbers)


# --- in place of numpy ------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.sampled_from([0, 1, 2, 3, 5, 16, 40, 300, 2100]), min_size=0, max_size=3),
    dtype=st.sampled_from(DTYPES),
    turned=st.booleans(),
    step=st.integers(1, 2),
    at=st.sampled_from([0, 1, 3, 2047, 2048 * 2048 - 1]),
    secret=st.sampled_from([b"", b"ours"]),
    seed=st.integers(0, 2**16),
)
def test_the_kernel_gives_what_numpy_gives(shape, dtype, turned, step, at, secret, seed):
    """Every dtype, at any place of a larger tensor, whole words or cut, turned and with gaps; alone and with others."""
    while len(shape) > 1 and np.prod(shape) > 200_000:
        shape[int(np.argmax(shape))] //= 7
    tensor = random_bits(tuple(shape), dtype, torch.Generator().manual_seed(seed))
    tensor = tensor.mT if turned and tensor.ndim > 1 else tensor
    tensor = tensor[..., ::step] if tensor.ndim else tensor
    box = Box((at,) * tensor.ndim, tuple(tensor.shape))
    whole = tuple(at + size for size in tensor.shape)
    key = Key(secret)
    found = {}
    for which in (NUMPY, COMPILED):
        with summed_up_by(which):
            small = partials([(tensor, box, whole)] * 2, key=key)
            found[which] = [partial(tensor, box, whole, key=key), *small]
    assert found[NUMPY] == found[COMPILED]


def test_large_tensors_are_shared_among_threads(monkeypatch):
    tensor = random_bits((37, 3000), torch.float32, torch.Generator().manual_seed(3))
    with summed_up_by(NUMPY):
        wanted = partial(tensor)
    monkeypatch.setattr(compiled, "THREAD_WORDS", 1000)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    spans = []
    try:
        with summed_up_by(COMPILED) as kernel:
            fold = kernel.fold
            monkeypatch.setattr(kernel, "fold", lambda w, c, r: spans.append(len(w)) or fold(w, c, r))
            assert partial(tensor) == wanted
    finally:
        torch.set_num_threads(before)
    assert len(spans) > 3
    assert sum(spans) == 37 * 2  # columns in two tiles


def test_rows_that_are_no_run_of_memory_are_copied_some_at_a_time(monkeypatch):
    base = random_bits((90, 8, 70), torch.float32, torch.Generator().manual_seed(4))
    views = [base[:, ::2, ::2], base[:, :, ::2], base[:, ::3, :30], base[::2, 1:2, :].expand(-1, 3, -1)]
    with summed_up_by(NUMPY):
        wanted = [partial(view) for view in views]
    copies = []
    copy = compiled._fold_copies
    monkeypatch.setattr(compiled, "_COPY_WORDS", 500)
    monkeypatch.setattr(compiled, "_fold_copies", lambda *given: copies.append(given) or copy(*given))
    with summed_up_by(COMPILED):
        assert [partial(view) for view in views] == wanted
    assert len(copies) > 2


# --- whether there is one ---------------------------------------------------------------------------------------------


def fake(**names):
    """A package of that name."""
    module = types.ModuleType("reshard_kernels")
    for name, value in names.items():
        setattr(module, name, value)
    return module


def looked_up(monkeypatch, package):
    monkeypatch.delenv("RESHARD_KERNELS", raising=False)
    monkeypatch.setitem(sys.modules, "reshard_kernels", package)
    kernel.cache_clear()
    try:
        return kernel()
    finally:
        kernel.cache_clear()


def test_without_one_or_with_another_version_numpy_does_it_in_silence(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert looked_up(monkeypatch, None) is None  # as where it is not installed
        assert looked_up(monkeypatch, fake()) is None
        assert looked_up(monkeypatch, fake(INTERFACE=1)) is None


def test_one_that_is_wrong_is_left_out_with_a_warning(monkeypatch):
    class Wrong:
        INTERFACE = 2

        def table(self, numbers):
            return numbers

        def fold(self, words, columns, rows):
            return 0, 0

        def fold_rows(self, words, columns):
            return np.zeros((2, len(words)), np.int64)

    with pytest.warns(RuntimeWarning, match="wrong sums"):
        assert looked_up(monkeypatch, Wrong()) is None


def test_the_environment_leaves_it_out():
    with summed_up_by(NUMPY) as found:
        assert found is None
    with summed_up_by(COMPILED) as found:
        assert is_right(found)
