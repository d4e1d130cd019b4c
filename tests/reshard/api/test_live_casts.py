"""Transfers between dtypes: what is compared is compared in the dtype that it must be right in."""

from __future__ import annotations

import logging
from logging.handlers import BufferingHandler
from typing import Any

import pytest
import torch
import torch.distributed as dist

import reshard
from planners import Mesh, Shard, TensorLayout, TensorSpec
from reshard.errors import KeyMismatchError, LayoutError, ReshardError
from reshard.mapping import Mapping, Resize
from tests import gloo
from tests.same import bits

N = 4096


def rows(dtype: torch.dtype, dim: int = 0, shape: tuple[int, ...] = (2 * N,)) -> dict[str, TensorLayout]:
    """Of which ranks 0 and 1 have a half each."""
    spec = TensorSpec("w", shape, str(dtype).removeprefix("torch."))
    return {"w": TensorLayout(spec, Mesh({"x": 2}), [Shard(dim)])}


def lossy() -> list[tuple[int, bool, int]]:
    """After each run from bfloat16 to float16, which cannot hold it: (bytes that crossed, whether the target is right,
    warnings that all came once more)."""
    rank = dist.get_rank()
    seen = BufferingHandler(1000)
    logging.getLogger("reshard").addHandler(seen)
    parts = [(torch.randn(N, generator=torch.Generator().manual_seed(r)) * 1e-6).bfloat16() for r in range(2)]
    target = {"w": torch.zeros(2 * N, dtype=torch.float16)} if rank == 2 else None
    source, layouts = ({"w": parts[rank]}, rows(torch.bfloat16)) if rank < 2 else (None, {})
    prepared = reshard.prepare(source, target, delta=True, dtype_policy="cast", source_layouts=layouts)
    out = []
    for step in range(4):
        if step == 2:
            parts[0][5] = 1
        if step == 3:
            parts[0].mul_(-1)
            parts[1][7] = 2
        moved = prepared.run().bytes_moved
        right = target is None or bits(target["w"]) == bits(torch.cat(parts).half())
        out.append((moved, right, len(seen.buffer)))
    return out


@pytest.mark.gloo
def test_differences_of_what_the_target_cannot_hold_are_no_damage():
    for found in gloo.run(lossy, 3):
        moved, right, warned = zip(*found, strict=True)
        assert all(right)
        assert warned == (0,) * 4
        assert moved[0] > 4 * N
        assert moved[1] < moved[2] < 200
        assert 2 * N < moved[3] < 2 * N + 200


def written_into(before: torch.dtype, after: torch.dtype, factor: float, stepping: bool) -> list[tuple[int, bool]]:
    """After each run: (bytes that crossed, whether the target is right), though somebody writes into it."""
    rank = dist.get_rank()
    mine = (torch.randn(N, generator=torch.Generator().manual_seed(0)) * 50).to(before)
    theirs = torch.zeros(N, 2).to(after)[:, 1] if stepping else torch.zeros(N).to(after)
    source, target = (None, {"w": theirs}) if rank else ({"w": mine}, None)
    prepared = reshard.prepare(source, target, delta=True, dtype_policy="cast")
    out = []
    for _ in range(3):
        moved = prepared.run().bytes_moved
        out.append((moved, rank == 0 or bits(theirs) == bits(mine.to(after))))
        theirs.mul_(factor)
        theirs[3] = 1
    return out


def all_written_into(pairs: list[Any]) -> list[list[tuple[int, bool]]]:
    logging.getLogger("reshard").setLevel(logging.ERROR)
    return [written_into(*pair, stepping) for pair in pairs for stepping in (False, True)]


@pytest.mark.gloo
def test_what_is_written_into_a_target_does_not_stay_however_little_it_is():
    wide = [
        (torch.bfloat16, torch.float32, 1.0005),
        (torch.bfloat16, torch.float32, 1 + 2**-23),
        (torch.float16, torch.float64, 1 + 2**-52),
        (torch.float32, torch.float64, 1 + 2**-40),
        (torch.int8, torch.float32, 1.001),
        (torch.int32, torch.complex128, 1.001),
    ]
    others = [
        (torch.float32, torch.bfloat16, 1.01),
        (torch.float16, torch.bfloat16, 1.01),
        (torch.float32,) * 2 + (2.0,),
    ]
    for ranks in zip(*gloo.run(all_written_into, 2, [*wide, *others]), strict=True):
        for found in ranks:
            assert all(right for _, right in found)
    for found in gloo.run(all_written_into, 2, wide)[0]:
        assert [moved < 200 for moved, _ in found] == [False, True, True], "it is still there, so it need not cross"


def flags() -> bool:
    """Whether bytes that are no flags arrive as they are, in a target that is no run of memory."""
    rank = dist.get_rank()
    mine = torch.tensor([0, 1, 2, 255, 128], dtype=torch.uint8).view(torch.bool)
    theirs = torch.zeros(5, 2, dtype=torch.uint8)[:, 1].view(torch.bool)
    prepared = reshard.prepare(None if rank else {"w": mine}, {"w": theirs} if rank else None, delta=True)
    prepared.run()
    prepared.run()
    return rank == 0 or torch.equal(theirs.view(torch.uint8), mine.view(torch.uint8))


@pytest.mark.gloo
def test_flags_that_are_neither_0_nor_1_cross_as_they_are():
    assert gloo.run(flags, 2) == [True, True]


CONVERTED = [
    (torch.float32, torch.bfloat16),
    (torch.float64, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float16),
    (torch.float32, torch.float8_e4m3fn),
    (torch.complex128, torch.complex64),
]


def nans(before: torch.dtype, after: torch.dtype) -> tuple[bool, bool, list[str]]:
    """Of sources with NaNs of any bits: (whether what was moved is found right, by rows into columns and by copies;
    and what is found where a target has another number, or a NaN where there is none)."""
    rank, shape = dist.get_rank(), (9, 33)
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(shape, generator=generator).to(before)
    raw = torch.randint(0, 256, (whole.nbytes,), generator=generator, dtype=torch.uint8).view(before).view(shape)
    whole = torch.where(raw.isnan(), raw, whole)
    parts = whole.view(torch.uint8).view(*shape, -1)  # a NaN that converters treat otherwise in vectors and alone
    parts[::2, ::3] = torch.tensor([float("nan")]).to(before).view(torch.uint8)
    options: Any = {"dtype_policy": "cast", "source_layouts": rows(before, 0, shape)}
    options["target_layouts"] = rows(after, 1, shape)
    source = {"w": whole.chunk(2)[rank].clone()}
    target = {"w": torch.zeros_like(whole.chunk(2, 1)[rank], dtype=after)}
    reshard.redistribute(source, target, **options)
    cut = reshard.verify_live(source, target, **options).ok
    copies = {"w": whole.clone() if rank else whole.t().contiguous().t()}
    into = {"w": torch.zeros(shape, dtype=after)}
    reshard.redistribute(copies, into, dtype_policy="cast", check_replicas=False)
    try:
        copied = reshard.verify_live(copies, into, dtype_policy="cast").ok
    except ReshardError:
        copied = False
    found = []
    numbers = (~target["w"].isnan()).nonzero()[0].tolist()
    for value in (3.0, float("nan")):
        kept = target["w"][tuple(numbers)].clone()
        if rank == 0:
            target["w"][tuple(numbers)] = value
        found += [finding.fqn for finding in reshard.verify_live(source, target, **options).findings]
        target["w"][tuple(numbers)] = kept
    return cut, copied, found


def all_nans() -> list[tuple[bool, bool, list[str]]]:
    return [nans(*pair) for pair in CONVERTED]


@pytest.mark.gloo
def test_a_nan_that_is_converted_counts_as_any_other_and_as_no_number():
    for found in gloo.run(all_nans, 2):
        assert dict(zip(CONVERTED, found, strict=True)) == dict.fromkeys(CONVERTED, (True, True, ["w", "w"]))


def seen_otherwise() -> bool:
    """Whether values are right after a source became another view of its memory. A smaller target is refused."""
    source, target = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3)), torch.zeros(2, 3)
    prepared = reshard.prepare({"w": source}, {"w": target})
    prepared.run()
    source.data = source.data.as_strided((2, 3), (1, 2))
    prepared.run()
    right = torch.equal(target, source.data)
    target.data = target.data[:1]
    with pytest.raises(LayoutError, match="should hold"):
        prepared.run()
    return right


def test_a_tensor_that_becomes_another_view_of_its_memory_is_seen():
    assert gloo.run(seen_otherwise, 1) == [True]


def conjugated() -> list[str]:
    """What went wrong after a side became the conjugate of its memory, or its bits in another dtype."""
    wrong, values = [], torch.arange(4.0) * (1 + 1j)
    for side in (0, 1):
        state = [{"w": values.clone()}, {"w": torch.zeros(4, dtype=values.dtype)}]
        prepared = reshard.prepare(*state)
        prepared.run()
        state[side]["w"].data = state[side]["w"].data.conj()
        prepared.run()
        if not torch.equal(state[1]["w"].resolve_conj(), state[0]["w"].resolve_conj()):
            wrong.append(f"conjugate of side {side}")
        state[side]["w"].data = state[side]["w"].data.resolve_conj().view(torch.int64)
        with pytest.raises(LayoutError, match=r"should hold complex64, but it passed .* of int64"):
            prepared.run()
    return wrong


def test_a_tensor_that_becomes_a_conjugate_or_another_dtype_is_seen():
    assert gloo.run(conjugated, 1) == [[]]


def refused_before_anything_moves() -> list[str]:
    """What a transfer says of dtypes that torch does not convert elements to, or not without loss of all signs."""
    said = []
    for source, target in (torch.float32, "float8_e8m0fnu"), (torch.float32, "float4_e2m1fn_x2"):
        if hasattr(torch, target):
            into = torch.zeros(4, dtype=torch.uint8).view(getattr(torch, target))
            with pytest.raises(KeyMismatchError, match=f"has dtype float32 in the source, but {target}") as caught:
                reshard.redistribute({"w": torch.ones(4, dtype=source)}, {"w": into}, dtype_policy="cast")
            said.append(str(caught.value))
            with pytest.raises(KeyMismatchError, match="cannot be filled with constants"):
                reshard.redistribute({"w": into}, {"w": into.repeat(2)}, mapping=Mapping([Resize("w", "w", 4, 8)]))
    return said


def test_dtypes_that_torch_does_not_convert_are_refused():
    assert all("(" in text for text in gloo.run(refused_before_anything_moves, 1)[0])
