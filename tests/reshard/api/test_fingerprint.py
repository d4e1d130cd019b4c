"""Fingerprints: the definition, their independence of layouts, and that nothing escapes them."""

from __future__ import annotations

import hashlib
import itertools
import math
import random

import numpy as np
import pytest
import torch

import reshard
from planners.geometry.box import Box
from reshard.api.fingerprint import fingerprint
from reshard.errors import CheckpointNotFoundError, CorruptCheckpointError, OptionError
from reshard.live import fingerprint_arithmetic as fold_module, fingerprints as words_module
from reshard.live.dtypes import dtype_name
from reshard.live.fingerprint_arithmetic import (
    BLOCK,
    LANES,
    LIMB_BITS,
    LIMBS,
    PRIME,
    PUBLIC,
    Axis,
    Key,
    fold,
    multiply,
    tiles,
    to_limbs,
)
from reshard.live.fingerprints import Partial, comparable, partial, partials
from reshard.storage import open_storage
from tests.bits import DTYPES, INTS, random_bits, select
from tests.kernels import COMPILED, NUMPY, summed_up_by


@pytest.fixture(autouse=True)
def one_thread():
    """Several threads per small product only get in the way of the other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[NUMPY, COMPILED], autouse=True)
def loop(request):
    """Everything here holds by numpy and by the compiled kernel."""
    with summed_up_by(request.param):
        yield request.param


def definition(tensor: torch.Tensor, secret: bytes = b"") -> str:
    """tests/fingerprint.md in plain Python, sharing nothing with the library."""
    prime, block = 2**48 - 59, 2048

    def stream(use: bytes, dim: int, page: int) -> bytes:
        head = b"reshard fingerprint 1 " + use + len(secret).to_bytes(8, "little") + secret
        return hashlib.shake_256(head + dim.to_bytes(4, "little") + page.to_bytes(8, "little")).digest(16 * block)

    def number(lane: int, dim: int, index: int) -> int:
        q, r = divmod(index, block)
        a = int.from_bytes(stream(b"inner", dim, 0)[16 * r + 8 * lane :][:8], "little")
        b = int.from_bytes(stream(b"outer", dim, q // block)[16 * (q % block) + 8 * lane :][:8], "little")
        return a * b % prime

    shape = tuple(tensor.shape)
    rows = tensor.reshape(-1, shape[-1] if shape else 1) if tensor.numel() else []
    data = [bytes(row.contiguous().view(torch.uint8).flatten().tolist()) for row in rows]
    sums = [0, 0]
    for lane in range(2):
        for index, row in zip(itertools.product(*map(range, shape[:-1])), data):
            for m in range(0, len(row), 4):
                term = int.from_bytes(row[m : m + 4].ljust(4, b"\0"), "little", signed=True)
                for dim, i in enumerate((*index, m // 4)):
                    term = term * number(lane, dim, i) % prime
                sums[lane] += term
    head = "rf1." + hashlib.shake_256(
        b"reshard fingerprint 1 name" + len(secret).to_bytes(8, "little") + secret
    ).hexdigest(4)
    text = ",".join(map(str, shape))
    return (
        f"{head if secret else 'rf1'}:{dtype_name(tensor.dtype)}[{text}]:{sums[0] % prime:012x}{sums[1] % prime:012x}"
    )


# --- the definition ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (7,), (0,), (3, 0), (2, 5), (1, 2, 3), (2, 2, 1, 3)])
@pytest.mark.parametrize("secret", [b"", b"ours"])
def test_it_is_what_the_page_in_the_docs_says(shape, secret):
    """Against an implementation that shares no code with the library."""
    g = torch.Generator().manual_seed(1)
    for dtype in DTYPES:
        tensor = random_bits(shape, dtype, g)
        found = partial(tensor, key=Key(secret)).digest(dtype, shape, key=Key(secret))

        assert definition(tensor, secret) == found


def test_long_dims_take_numbers_of_other_blocks_and_pages():
    """Places beyond the first block of 2048 indices, and beyond the first 2048 blocks."""
    far = BLOCK * BLOCK + BLOCK + 5
    for place in (0, BLOCK - 1, BLOCK, 3 * BLOCK + 7, BLOCK * BLOCK - 1, BLOCK * BLOCK, far):
        value = torch.tensor([[3.5]])
        got = partial(value, Box((place, 0), (1, 1)), (far + 1, 1)).sums
        bits = int(value.view(torch.int32))
        want = []
        for lane in range(LANES):
            q, r = divmod(place, BLOCK)
            a = int(PUBLIC.inner(0)[lane, r]) * int(PUBLIC.outer(0, np.array([q]))[lane, 0])
            want.append(bits * a * int(PUBLIC.at(1, np.array([0]))[lane, 0]) % PRIME)

        assert tuple(want) == got


def test_golden_strings_never_change():
    """Strings that are stored in checkpoints: they must mean the same for ever."""
    ramp = torch.arange(6000, dtype=torch.int32).view(3, 2000)
    golden = {
        "scalar": (torch.tensor(1.5), "rf1:float32[]:b68169ffe2b4ac17722044c3"),
        "ramp": (ramp, "rf1:int32[3,2000]:1aea5fb48497bbb88cd2d426"),
        "bf16": (ramp.to(torch.bfloat16), "rf1:bfloat16[3,2000]:dbe7a379b405908337ee1cba"),
        "bool": (ramp % 3 == 0, "rf1:bool[3,2000]:820e2e61a862843bc6195a95"),
        "empty": (torch.empty(0, 4), "rf1:float32[0,4]:" + "0" * 24),
    }

    assert {name: text for name, (_, text) in golden.items()} == fingerprint({n: t for n, (t, _) in golden.items()})


# --- arithmetic -------------------------------------------------------------------------------------------------------


def test_products_in_the_field_are_exact():
    edges = [0, 1, 2, 58, 59, 60, 2**24, 2**47, PRIME // 2, PRIME // 2 + 1, PRIME - 2, PRIME - 1]
    rng = random.Random(0)
    numbers = edges + [rng.randrange(PRIME) for _ in range(500)]
    a = np.array([numbers] * LANES)
    product = multiply(a[:, :, None], a[:, None, :])

    assert [[x * y % PRIME for y in numbers] for x in numbers] == product[0].tolist()


def test_digits_are_small_and_make_the_number_again():
    rng = random.Random(1)
    edges = [0, 1, PRIME // 2 - 1, PRIME // 2, PRIME // 2 + 1, PRIME - 1, 2**47 - 1, 2**47, 2047, 2048, 2049]
    numbers = edges + [rng.randrange(PRIME) for _ in range(2000)]
    digits = to_limbs(np.array([numbers] * LANES)).reshape(LANES, LIMBS, -1)

    assert np.abs(digits).max() <= 2048
    weights = [1 << (LIMB_BITS * place) for place in range(LIMBS)]
    again = [sum(w * int(d) for w, d in zip(weights, digits[0, :, i])) % PRIME for i in range(len(numbers))]
    assert numbers == again


@pytest.mark.parametrize("shape", [(3, 2048), (4, 6000), (20, 300), (9000,), (2500, 3), (3000, 2, 2), (17, 3, 700)])
def test_the_largest_words_stay_exact(shape):
    """All words -2^31, or 2^31 - 1, so that sums reach their bounds; against exact Python ints."""
    axes = [Axis(d, ((0, size),)) for d, size in enumerate(shape)]
    ones = fold(torch.ones(shape, dtype=torch.int32), axes, PUBLIC)
    vectors = [axis.numbers(PUBLIC, 0, axis.size).tolist() for axis in axes]
    for lane in range(LANES):
        assert math.prod(sum(vector[lane]) for vector in vectors) % PRIME == ones[lane]
    for value in (-(2**31), 2**31 - 1):
        found = fold(torch.full(shape, value, dtype=torch.int32), axes, PUBLIC)
        assert tuple(value * one % PRIME for one in ones) == found


def test_tiles_cover_in_row_major_order():
    for shape, limit in [((3, 4, 5), 7), ((3, 4, 5), 1), ((3, 4, 5), 60), ((10,), 3), ((), 1), ((2, 1, 3), 4)]:
        order = np.arange(math.prod(shape)).reshape(shape)
        runs = [order[tuple(slice(*span) for span in tile)].reshape(-1) for tile in tiles(shape, limit)]

        assert max(run.size for run in runs) <= limit
        assert list(range(math.prod(shape))) == np.concatenate(runs).tolist()


# --- layouts ----------------------------------------------------------------------------------------------------------


def cut(rng: random.Random, size: int) -> list[list[tuple[int, int]]]:
    """A dim cut into intervals that are dealt out, in any order, to one, two or three owners."""
    points = sorted({0, size, *(rng.randint(0, size) for _ in range(rng.randint(0, 5)))})
    intervals = list(itertools.pairwise(points))
    rng.shuffle(intervals)
    owners = rng.randint(1, 3)
    return [intervals[i::owners] for i in range(owners)]


def test_thousands_of_layouts_give_one_fingerprint():
    """Random products of shuffled intervals, cut within words, strided and with empty parts, for every dtype."""
    rng, g = random.Random(2), torch.Generator().manual_seed(2)
    layouts = parts = 0
    while layouts < 2000:
        shape = tuple(rng.choice([0, 1, 2, 3, 4, 5, 8, 13]) for _ in range(rng.randint(1, 3)))
        dtype = rng.choice(DTYPES)
        tensor = random_bits(shape, dtype, g)
        whole = partial(tensor)
        for _ in range(8):
            dims = [cut(rng, size) for size in shape]
            places = list(itertools.product(*dims))
            rng.shuffle(places)
            found = Partial.total(partial(select(tensor, list(place)), place, shape) for place in places)

            assert whole == found, (shape, dtype, places)
            layouts, parts = layouts + 1, parts + len(places)
    assert parts > 4000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.complex128])
@pytest.mark.parametrize("shape", [(5, 9001), (9001, 5), (20011,), (33, 7, 501), (300, 3, 3, 5)])
def test_large_tensors_in_pieces(shape, dtype):
    """Pieces that reach over several blocks and chunks, at odd places."""
    rng = random.Random(3)
    tensor = random_bits(shape, dtype, torch.Generator().manual_seed(3))
    whole = partial(tensor)
    for _ in range(6):
        places = itertools.product(*(cut(rng, size) for size in shape))

        assert whole == Partial.total(partial(select(tensor, list(p)), p, shape) for p in places)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # said of the tensors that the test makes
def test_memory_layout_does_not_matter():
    """Transposed, sliced, expanded, stepped, at an odd address, conjugated and negated views of the same values."""
    g = torch.Generator().manual_seed(5)
    for dtype in DTYPES:
        base = random_bits((6, 8), dtype, g)
        whole = partial(base.clone())
        room = torch.zeros(6 * 8 * dtype.itemsize + dtype.itemsize, dtype=torch.uint8)
        odd = room[dtype.itemsize :].view(dtype).view(6, 8) if room.numel() % dtype.itemsize == 0 else base
        odd.view(torch.uint8).copy_(base.view(torch.uint8))
        transposed = select(base, [[(0, 6)], [(0, 8)]]).t().clone(memory_format=torch.contiguous_format).t()

        assert whole == partial(odd) == partial(transposed), dtype
        assert partial(base[::2, 1::3].clone()) == partial(base[::2, 1::3]), dtype
        assert partial(base[1:2].expand(4, 8).clone()) == partial(base[1:2].expand(4, 8)), dtype
    z = torch.randn(4, 5, dtype=torch.complex64)
    assert partial(z.conj().resolve_conj().clone()) == partial(z.conj())
    assert partial(z.conj().imag.resolve_neg().clone()) == partial(z.conj().imag)
    assert partial(torch.nn.Parameter(z.real.clone())) == partial(z.real)


def test_many_small_tensors_have_the_fingerprints_that_each_has_alone():
    """What is seen as whole words is summed up together; the others, between them, are not."""
    g = torch.Generator().manual_seed(6)
    shapes: list[tuple[int, ...]] = [(), (4,), (7,), (3, 5), (0, 4), (1, 1), (3, 4, 4), (8, 512), (4099,), (2048, 3)]
    parts = []
    for dtype, shape, offset in itertools.product(DTYPES, shapes, (None, 0, 2, 2044)):
        box = None if offset is None else Box((offset,) * len(shape), shape)
        whole = None if offset is None else tuple(offset + size + 3 for size in shape)
        parts += [(random_bits(shape, dtype, g), box, whole) for _ in range(2)]
    # a dim of one element may have any stride, and is contiguous all the same
    for dtype in DTYPES:
        rows = random_bits((4, 6), dtype, g)
        parts += [(rows[0, ::6], None, None), (rows[1, ::6], None, None), (rows[:1, :4], None, None)]
    parts.append((parts[4][0].clone().requires_grad_(parts[4][0].is_floating_point()), *parts[4][1:]))

    assert partials(parts) == [partial(*part) for part in parts]


def test_modes_of_torch_do_not_matter():
    """Autocast, inference mode, another default device or dtype, gradients; each with caches that it fills itself."""
    tensor = torch.randn(40, 50)
    whole = partial(tensor)
    modes = [torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), torch.device("meta"), torch.enable_grad()]
    for n, mode in enumerate(modes):
        fold_module._kept.clear()
        words_module._tried.cache_clear()
        with mode:
            inside = partial(tensor.requires_grad_(n == 3))

        assert whole == inside == partial(tensor)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert whole == partial(tensor)
    finally:
        torch.set_default_dtype(before)


# --- nothing escapes --------------------------------------------------------------------------------------------------


def many_sums(batch: torch.Tensor) -> list[tuple[int, ...]]:
    """The sums of each tensor of a batch whose rows are whole words, in one product with the library's digits."""
    words = batch.view(torch.int32)
    axes = tuple(Axis(d, ((0, size),)) for d, size in enumerate(words.shape[1:]))
    digits = fold_module._limbs(PUBLIC, axes, tuple((0, axis.size) for axis in axes), torch.device("cpu"))
    sums = (digits @ words.reshape(len(words), -1).to(torch.float64).t()).to(torch.int64).numpy().astype(object)
    lanes = (
        sums.reshape(LANES, LIMBS, -1) * np.array([1 << (LIMB_BITS * place) for place in range(LIMBS)])[None, :, None]
    )
    return list(zip(*(lanes.sum(1) % PRIME)))


def tampered(tensor: torch.Tensor, trials: int, seed: int) -> torch.Tensor:
    """Copies of the tensor, (trials, *shape). In turn: one element takes another value; two elements swap; a run of
    elements moves on by one place or more, and its end comes back in front."""
    rng = np.random.default_rng(seed)
    numel, bits = tensor.numel(), 8 * tensor.itemsize
    flat = tensor.view(-1).view(INTS[tensor.itemsize]).numpy()
    place, kind = np.arange(numel)[None], np.arange(trials)[:, None] % 3
    i = rng.integers(0, numel - 1, (trials, 1))
    j = rng.integers(i + 1, numel)
    by = rng.integers(1, j - i + 1)
    swapped = np.where(place == i, j, np.where(place == j, i, place))
    shifted = np.where((place >= i) & (place <= j), i + (place - i - by) % (j - i + 1), place)
    batch = flat[np.where(kind == 1, swapped, np.where(kind == 2, shifted, place))]
    flips = np.where(
        rng.random((trials, 1)) < 0.5, rng.integers(1, 1 << bits, (trials, 1)), 1 << rng.integers(0, bits, (trials, 1))
    )
    batch ^= np.where((kind == 0) & (place == i), flips, 0).astype(np.int64).astype(flat.dtype)
    return torch.from_numpy(batch).view(tensor.dtype).view(trials, *tensor.shape)


def test_a_hundred_thousand_changes_swaps_and_shifts_are_all_found():
    """What differs from the tensor has other sums, and so have any two trials that differ from one another."""
    seen: dict[tuple[int, ...], bytes] = {}
    found = 0
    for shape, dtype in [((6, 40), torch.bfloat16), ((7, 31), torch.float32), ((3, 9, 8), torch.uint8)]:
        tensor = random_bits(shape, dtype, torch.Generator().manual_seed(6))
        before = partial(tensor).sums
        seen[before] = bytes(tensor.view(torch.uint8).flatten().tolist())
        batch = tampered(tensor, 35_000, seed=len(seen))
        data = batch.view(torch.uint8).flatten(1).numpy()
        for trial, sums in enumerate(many_sums(batch)):
            now = data[trial].tobytes()
            assert seen.setdefault(sums, now) == now, (shape, dtype, trial)
            found += sums != before
            if trial % 35 == 0:  # the shortcut of this test is what the library computes
                assert partial(batch[trial]).sums == sums

    assert found > 100_000  # the few others put equal elements in each other's place
    assert len(seen) > 80_000


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_every_bit_of_every_element_counts(dtype):
    tensor = random_bits((3, 5), dtype, torch.Generator().manual_seed(7))
    data = tensor.view(torch.uint8)
    found = {partial(tensor).sums}
    bits = range(1) if dtype is torch.bool else range(8)
    for i, bit in itertools.product(range(data.numel()), bits):
        data.view(-1)[i] ^= 1 << bit
        found.add(partial(tensor).sums)
        data.view(-1)[i] ^= 1 << bit

    assert 1 + data.numel() * len(bits) == len(found)


def test_zeros_and_nans_are_told_apart():
    for dtype, bits in [(torch.float32, torch.int32), (torch.bfloat16, torch.int16), (torch.float64, torch.int64)]:
        nan = torch.full((2,), math.nan, dtype=dtype)
        payload, sign = (nan.view(bits) | 1).view(dtype), (nan.view(bits) ^ torch.iinfo(bits).min).view(dtype)
        assert torch.isnan(payload).all()
        assert torch.isnan(sign).all()
        different = [nan, payload, sign, torch.zeros(2, dtype=dtype), -torch.zeros(2, dtype=dtype)]

        assert len({partial(t).sums for t in different}) == 5
        assert partial(nan) == partial(nan.clone())


def test_shape_and_dtype_are_part_of_the_string():
    zeros = {
        "a": torch.zeros(6),
        "b": torch.zeros(2, 3),
        "c": torch.zeros(6, dtype=torch.int32),
        "d": torch.zeros(()),
        "e": torch.zeros(1),
        "f": torch.zeros(0),
        "g": torch.zeros(0, 2),
    }

    assert len(zeros) == len(set(fingerprint(zeros).values()))


def test_another_key_gives_another_string_that_is_not_compared():
    tensor = {"w": torch.arange(5.0)}
    ours, theirs, public = (fingerprint(tensor, key=Key(k))["w"] for k in (b"a", b"b", b""))

    assert len({text.split(":")[-1] for text in (ours, theirs, public)}) == 3
    assert not comparable(ours, theirs)
    assert not comparable(ours, public)
    assert comparable(ours, fingerprint({"w": torch.zeros(3)}, key=Key(b"a"))["w"])
    with pytest.raises(TypeError, match="made of bytes"):
        Key("text")


STATE = {
    "model": {"w": torch.arange(60.0).reshape(12, 5), "none": torch.empty(0, 3), "turned": torch.ones(4, 6).T},
    "steps": [torch.tensor(3), torch.tensor([1.5, -0.0]).bfloat16()],
    "note": "text",
}


@pytest.mark.parametrize("format", ["native", "dcp", "safetensors", "torch_save"])
def test_of_a_checkpoint_in_any_form_it_is_given(format, tmp_path):
    """A path, URL, storage, open checkpoint or its lazy tensors: as of what was saved."""
    path = tmp_path / ("c.pt" if format == "torch_save" else "c")
    reshard.save(STATE, tmp_path / "native")
    reshard.convert(tmp_path / "native", path, format=format)
    opened = reshard.open(path)
    forms = [str(path), path, f"file://{path}", opened, opened.nested()]
    forms += [] if format == "torch_save" else [open_storage(path)]

    wanted = fingerprint(STATE)

    assert set(wanted) == {"model.w", "model.none", "model.turned", "steps.0", "steps.1"}
    assert all(fingerprint(form) == wanted for form in forms)
    assert fingerprint({"half": opened["model.w"], "live": STATE["steps"][0]}) == {
        **fingerprint({"half": STATE["model"]["w"], "live": STATE["steps"][0]})
    }


def test_a_save_that_needs_no_file_has_those_of_tensors_without_elements(tmp_path):
    state = {"none": torch.empty(0, 3)}

    reshard.save(state, tmp_path)

    assert not [*tmp_path.glob("data-*/*.safetensors")]
    assert reshard.open(tmp_path).contents.fingerprints == fingerprint(state)


def test_of_a_checkpoint_it_is_read_and_not_believed(tmp_path):
    reshard.save(STATE, tmp_path)
    (file,) = tmp_path.glob("data-*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[data.index(STATE["model"]["w"].numpy().tobytes()) + 7] ^= 1
    file.write_bytes(data)

    with pytest.raises(CorruptCheckpointError, match="was changed since it was written"):
        fingerprint(tmp_path)
    found = fingerprint(reshard.open(tmp_path, check=False))
    assert [name for name, value in found.items() if value != fingerprint(STATE)[name]] == ["model.w"]
    with pytest.raises(OptionError, match="layouts, rank, and exchange are for state dicts"):
        fingerprint(tmp_path, rank=0)


def test_tied_tensors_of_a_checkpoint_have_all_their_names(tmp_path):
    tied = {"a": STATE["model"]["w"], "b": STATE["model"]["w"]}
    reshard.save(tied, tmp_path)
    assert fingerprint(tmp_path) == fingerprint(tied)


@pytest.mark.parametrize(
    "wrong", [None, 5, torch.nn.Linear(2, 2), {1, 2}, object()], ids=lambda wrong: type(wrong).__name__
)
def test_of_what_is_neither_a_state_nor_a_checkpoint_is_refused(wrong):
    with pytest.raises(OptionError, match=f"got {type(wrong).__name__}"):
        fingerprint(wrong)
    with pytest.raises(CheckpointNotFoundError):
        fingerprint("/nowhere/at/all")


def test_digits_are_kept_by_their_bytes_and_those_used_last_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold_module, "_kept", {})
    monkeypatch.setattr(fold_module, "_KEPT_BYTES", 3 * 64 * 100)

    def digits(dim: int) -> torch.Tensor:
        return fold_module._limbs(PUBLIC, (Axis(dim, ((0, 100),)),), ((0, 100),), torch.device("cpu"))

    first, second = digits(0), digits(1)
    digits(2)
    assert digits(0) is first
    digits(3)  # one too many: the one that was not used for longest goes
    assert digits(0) is first
    again = digits(1)
    assert again is not second
    assert torch.equal(again, second)
    assert sum(one.nbytes for one in fold_module._kept.values()) <= 3 * 64 * 100
