"""Fingerprints: the definition, their independence of layouts, and that nothing escapes them."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import resource
import warnings

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist

from planners.box import Box
from planners.forms import Part
from planners.layout import TensorLayout, TensorSpec
from planners.mesh import Mesh
from planners.placement import Replicate, Shard, StridedShard
from reshard.dtypes import dtype_from_name, dtype_name
from reshard.errors import FormatError, LayoutError, ReplicaDriftError
from reshard.fingerprints import (
    PUBLIC,
    Fingerprinter,
    Key,
    Partial,
    alone,
    comparable,
    fingerprint,
    holdings,
    join,
    partial,
)
from reshard.fingerprints import fold as fold_module
from reshard.fingerprints import words as words_module
from reshard.fingerprints.fold import Axis, fold, tiles
from reshard.fingerprints.keys import BLOCK, LANES, LIMB_BITS, LIMBS, PRIME, multiply, to_limbs
from tests import gloo

DTYPES = [
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex32 complex64",
    "complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2",
]
DTYPES = [dtype_from_name(name) for name in " ".join(DTYPES).split() if hasattr(torch, name)]
INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.fixture(autouse=True)
def one_thread():
    """Several threads per small product only get in the way of the other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """A tensor of any bits at all, NaNs of all kinds among them; bools are 0 and 1."""
    numel = math.prod(shape)
    if not numel:
        return torch.empty(math.prod((*shape, 0)), dtype=torch.uint8).view(dtype).view(shape)
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return (raw & 1 if dtype is torch.bool else raw).view(dtype).view(shape)


def select(tensor: torch.Tensor, dims: list[list[tuple[int, int]]]) -> torch.Tensor:
    """The local tensor of a product of intervals. Bits are moved as ints, which no kernel would normalise."""
    dtype, wide = tensor.dtype, tensor.itemsize == 16
    bits = torch.view_as_real(tensor).view(torch.int64) if wide else tensor.view(INTS[tensor.itemsize])
    for d, intervals in enumerate(dims):
        bits = bits.index_select(d, torch.tensor([i for a, b in intervals for i in range(a, b)], dtype=torch.long))
    return torch.view_as_complex(bits.view(torch.float64)) if wide else bits.view(dtype)


def definition(tensor: torch.Tensor, secret: bytes = b"") -> str:
    """docs/fingerprint.md in plain Python, sharing nothing with the library."""
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
    while layouts < 4000:
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
    assert parts > 8000


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


def test_layouts_of_the_planners():
    """Every rank's own tensors under product, explicit and flat layouts, joined as a process group would."""
    shape = (6, 10)
    tensor = random_bits(shape, torch.bfloat16, torch.Generator().manual_seed(4))
    spec = TensorSpec("w", shape, "bfloat16")
    mesh = Mesh({"dp": 3, "tp": 2})
    layouts = [
        TensorLayout(spec, mesh, [Shard(0), Shard(1)]),
        TensorLayout(spec, mesh, [StridedShard(0, 2), Shard(0)]),
        TensorLayout(spec, mesh, [Replicate(), Shard(1)]),
        TensorLayout(spec, mesh, [Shard(1), Shard(1)]),
        TensorLayout(spec, Mesh({"dp": 16}), [Shard(0)]),
        TensorLayout.from_flat_ranges(spec, {0: (0, 7), 1: (7, 33), 2: (33, 33), 3: (33, 60)}),
    ]
    whole = fingerprint({"w": tensor}, exchange=alone)
    for layout in layouts:
        payloads = []
        for rank in range(layout.world_size):
            parts = layout.parts(rank)
            if parts and parts[0].flat_start is not None:
                local = torch.cat([tensor[box.slices].reshape(-1) for box in layout.boxes(rank)])
            else:
                local = select(tensor, [list(dim) for dim in parts[0].dims]) if parts else tensor[:0]
            payloads.append(holdings({"w": local}, {"w": layout}, rank))
            boxes = layout.boxes(rank)
            assert Partial.total(Partial.from_bytes(h.sums) for h in payloads[-1]) == partial(local, boxes, shape)

        assert whole == join([msgpack(held) for held in payloads])


def msgpack(held: object) -> bytes:
    return msgspec.msgpack.encode(held)


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


def test_modes_of_torch_do_not_matter():
    """Autocast, inference mode, another default device or dtype, gradients; each with caches that it fills itself."""
    tensor = torch.randn(40, 50)
    whole = partial(tensor)
    modes = [torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), torch.device("meta"), torch.enable_grad()]
    for n, mode in enumerate(modes):
        fold_module._limbs.cache_clear()
        words_module.float64_is_exact.cache_clear()
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


# --- parts and errors -------------------------------------------------------------------------------------------------


def test_a_missing_or_doubled_part_is_an_error():
    tensor = torch.arange(12.0).view(3, 4)
    top, rest = partial(tensor[:1], Box((0, 0), (1, 4)), (3, 4)), partial(tensor[1:], Box((1, 0), (2, 4)), (3, 4))
    with pytest.raises(LayoutError, match=r"hold 8 elements.*\(3, 4\) has 12: a part is missing"):
        rest.digest("float32", (3, 4))
    with pytest.raises(LayoutError, match=r"hold 16 elements.*counted twice"):
        (top + rest + top).digest("float32", (3, 4))

    assert partial(tensor) == top + rest == rest + top == Partial.total([top, Partial(), rest])
    assert top == Partial.from_bytes(top.to_bytes())
    with pytest.raises(FormatError, match="20 bytes, got 3"):
        Partial.from_bytes(b"abc")
    with pytest.raises(FormatError, match="no partial fingerprint"):
        Partial((PRIME, 0), 1)


@pytest.mark.parametrize(
    ("positions", "match"),
    [
        (Box((0, 0), (2, 3)), "does not fit|neither"),  # another size
        ([[(0, 2)], [(0, 2), (1, 3)]], "disjoint"),  # column 1 twice
        ([[(0, 2)], [(3, 7)]], "lie within 0 to 6"),  # beyond the end
        ([[(0, 2)]], "does not fit"),  # a dim too few
        ([Box((0, 0), (1, 4)), Box((2, 1), (1, 4))], "add up one partial per box"),  # no product
        ([Box((0, 0), (1, 4)), Box((2,), (4,))], "same dims"),
        ([1, 2], "positions are a Box"),
        (7, "positions are a Box"),
    ],
)
def test_positions_that_do_not_fit(positions, match):
    with pytest.raises(LayoutError, match=match):
        partial(torch.zeros(2, 4), positions, (4, 6))


def test_tensors_without_plain_elements_are_refused():
    with pytest.raises(FormatError, match="meta"):
        partial(torch.empty(3, device="meta"))
    with pytest.raises(FormatError, match="sparse_coo"):
        partial(torch.eye(3).to_sparse())
    with pytest.raises(FormatError, match="not supported"):
        partial(torch.zeros(3, dtype=torch.bits8))


def test_a_stream_of_boxes():
    """Reading a tensor box by box, from bytes and from tensors."""
    tensor = random_bits((9, 7), torch.float16, torch.Generator().manual_seed(8))
    reader = Fingerprinter("float16", (9, 7))
    for start in range(0, 9, 2):
        rows = tensor[start : start + 2]
        data = bytes(rows.contiguous().view(torch.uint8).flatten().tolist())
        box = Box((start, 0), tuple(rows.shape))
        if start % 4:
            reader.add(rows, box)
        else:
            reader.add_bytes(data if start else bytearray(data), box)
    reader.add_bytes(b"", Box((9, 0), (0, 7)))

    assert fingerprint({"t": tensor})["t"] == reader.digest()
    with pytest.raises(LayoutError, match="7 elements of 2 bytes, got 3 bytes"):
        reader.add_bytes(b"abc", Box((0, 0), (1, 7)))
    with pytest.raises(LayoutError, match=r"torch.float32 does not belong to a tensor of dtype torch.float16"):
        reader.add(torch.zeros(1, 7), Box((0, 0), (1, 7)))
    with pytest.raises(LayoutError, match="a part is missing"):
        Fingerprinter(torch.float32, (2,)).digest()


def test_devices_without_exact_float64_are_served_by_the_cpu(monkeypatch):
    """What a device that cannot multiply exactly does: the pieces are copied over, and the sums are the same."""
    tensor = random_bits((50, 70), torch.float32, torch.Generator().manual_seed(9))
    whole = partial(tensor)
    assert words_module.float64_is_exact(torch.device("cpu"))
    assert not words_module.float64_is_exact(torch.device("meta"))  # computes nothing
    monkeypatch.setattr(words_module, "float64_is_exact", lambda device: False)
    monkeypatch.setattr(words_module, "_COPY_WORDS", 100)

    assert whole == partial(tensor)


# --- whole states -----------------------------------------------------------------------------------------------------


def test_states_are_nested_and_hold_other_things():
    weight = torch.randn(3, 2)
    state = {"model": {"w": weight, "tied": weight}, "optim": [{"step": 3, "m": torch.zeros(())}], "name": "x"}
    found = fingerprint(state)

    assert list(found) == ["model.w", "model.tied", "optim.0.m"]
    assert found["model.w"] == found["model.tied"] == fingerprint({"w": weight})["w"]
    assert fingerprint({}) == {}


def test_what_ranks_disagree_about():
    def payload(tensor: torch.Tensor) -> bytes:
        return msgpack(holdings({"w": tensor}, None, 0))

    one, two = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])
    with pytest.raises(ReplicaDriftError, match="w: ranks 4, 6 differ from rank 5"):
        join([payload(one), payload(two), payload(one)], ranks=[4, 5, 6])
    with pytest.raises(LayoutError, match=r"float32\[2\] on rank 0, but float64\[2\] on rank 1"):
        join([payload(one), payload(one.double())])
    spec = TensorSpec("w", (4,), "float32")
    layout = {"w": TensorLayout(spec, Mesh({"dp": 2}), [Shard(0)])}
    with pytest.raises(LayoutError, match=r"tensor 'w': the parts .* hold 2 elements.*missing"):
        fingerprint({"w": one}, layouts=layout, rank=0, exchange=alone)
    with pytest.raises(LayoutError, match="no layout is given for 1 tensors: v"):
        fingerprint({"v": one}, layouts=layout, exchange=alone)
    with pytest.raises(LayoutError, match=r"tensor 'w' on rank 1: .*\(3,\) does not fit"):
        fingerprint({"w": torch.zeros(3)}, layouts=layout, rank=1, exchange=alone)
    overlapping = TensorLayout.from_boxes(spec, {0: [Box((0,), (2,))], 1: [Box((1,), (3,))]})
    held = [msgpack(holdings({"w": torch.zeros(n)}, {"w": overlapping}, rank)) for rank, n in enumerate((2, 3))]
    with pytest.raises(LayoutError, match=r"hold 5 elements.*counted twice"):
        join(held)
    assert Part(((),)).numel == 0


def _sharded_tensor(whole):
    """The rows of each rank, given as two shards."""
    from torch.distributed._shard.sharded_tensor import Shard as LocalShard
    from torch.distributed._shard.sharded_tensor import init_from_local_shards

    rank, shards = dist.get_rank(), []
    for rows in torch.arange(whole.shape[0]).tensor_split(4)[rank].tensor_split(2):
        if rows.numel():
            shards.append(LocalShard.from_tensor_and_offsets(whole[rows], [int(rows[0]), 0], rank))
    return init_from_local_shards(shards, *whole.shape)


def _on_a_group(shape):
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import Replicate as R
    from torch.distributed.tensor import Shard as S
    from torch.distributed.tensor import distribute_tensor

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        whole = torch.randn(shape)
        state = {}
        for i, placements in enumerate([(S(0), S(1)), (S(0), S(0)), (R(), S(1)), (R(), R()), (S(1), R())]):
            state[f"w{i}"] = distribute_tensor(whole, mesh, placements)
        pair = DeviceMesh("cpu", [1, 3])
        state["outsiders"] = distribute_tensor(whole, pair, [S(0)])  # ranks 0 and 2 hold a DTensor of no element
        state["two ranks"] = distribute_tensor(whole, mesh["tp"], [S(1)]) if dist.get_rank() < 2 else None
        state["sharded"] = _sharded_tensor(whole)
        state["plain"] = whole.clone()
        if dist.get_rank() == 2:
            state["mine"] = torch.arange(3.0)  # a stage's own tensor
        good = fingerprint({"layer": state})
        state["w2"].to_local().view(-1)[0] += 1.0 if dist.get_rank() == 3 else 0.0
        try:
            fingerprint({"layer": state})
        except ReplicaDriftError as error:
            drift = str(error)
        return good, drift, fingerprint({"w": whole}, exchange=alone)["w"]


@pytest.mark.gloo
def test_dtensors_on_a_process_group():
    """Every placement on every rank gives the plain tensor's fingerprint; a replica that drifted is named."""
    for good, drift, plain in gloo.run(_on_a_group, 4, (7, 10)):
        names = [f"w{i}" for i in range(5)] + ["plain", "outsiders", "two ranks", "sharded"]
        assert {f"layer.{name}": plain for name in names} == {k: v for k, v in good.items() if k != "layer.mine"}
        assert good["layer.mine"] == fingerprint({"x": torch.arange(3.0)})["x"]
        assert "layer.w2: rank 1 differ from rank 3" in drift


def _peak_bytes(nbytes):
    torch.set_num_threads(1)
    tensor = torch.ones(nbytes // 2, dtype=torch.bfloat16)
    partial(tensor[:5000])  # fill the caches, and let torch allocate what it keeps
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    n = tensor.numel()
    partial(tensor)
    partial(tensor.view(-1, 2048)[:, 1:])
    partial(tensor[1:], [[(1, n)]], (n,))
    partial(tensor.view(2048, -1).t())
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


@pytest.mark.gloo
def test_memory_does_not_grow_with_the_tensor():
    """Of 128 MiB: in place, with odd columns, at an odd address, and transposed, all within 48 MiB beside it."""
    (peak,) = gloo.run(_peak_bytes, 1, 128 << 20)

    assert peak < 48 << 20
