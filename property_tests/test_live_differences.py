"""After each run of differences a target is what its source converts to, whatever was written into either."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st

import reshard
from planners import Box, TensorLayout, TensorSpec
from property_tests.budget import examples
from reshard.execute import delta as differences
from tests import gloo
from tests.same import bits

WORLD = 4
FLOATS = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
COMPLEX = ("complex64", "complex128")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "bool")
ODD = (0.0, -0.0, 1.0, -1.0, float("nan"), float("inf"), -float("inf"), 65504.0, 65520.0, 1e-7, -1e30, 3e38)
ROWS, WIDTH = 11, 13


@dataclass(frozen=True)
class Step:
    """What is written before a run: so many bits of a source, and of a target, on each rank that has one."""

    in_source: int
    in_target: int


@dataclass(frozen=True)
class Case:
    """One prepared transfer, and what happens between its runs."""

    before: str
    after: str
    sources: tuple[int, ...]
    """Ranks, each with some rows."""
    targets: tuple[int, ...]
    """Ranks, each with all of it."""
    shape: tuple[int, ...]
    turned: bool
    """Whether targets are no run of memory, and conjugated lazily where they can be."""
    steps: tuple[Step, ...]
    seed: int


def is_cast(pair: tuple[str, str]) -> bool:
    """Whether a transfer makes it: none that drops fractions or imaginary parts."""
    before, after = ((0 if name in INTEGERS else 1 if name in FLOATS else 2) for name in pair)
    return before <= after


@st.composite
def cases(draw: st.DrawFn) -> Case:
    names = st.one_of(st.sampled_from(FLOATS), st.sampled_from((*FLOATS, *COMPLEX, *INTEGERS)))
    few = st.sampled_from((0, 0, 1, 3, 60))
    sources, targets = draw(st.sampled_from((((0, 1), (2, 3)), ((0, 1), (1, 2)), ((0,), (1,)), ((3, 0), (1,)))))
    before, after = draw(st.tuples(names, names).filter(is_cast))
    return Case(
        before,
        after,
        sources,
        targets,
        draw(st.sampled_from(((ROWS, WIDTH), (ROWS, WIDTH), (ROWS, WIDTH), (2,), (ROWS, 0), ()))),
        draw(st.booleans()),
        tuple(draw(st.lists(st.builds(Step, few, few), min_size=1, max_size=5))),
        draw(st.integers(0, 1 << 30)),
    )


def whole(case: Case, generator: torch.Generator) -> torch.Tensor:
    """Any bits, and odd numbers among them."""
    dtype, numel = getattr(torch, case.before), max(torch.Size(case.shape).numel(), 0)
    if case.before == "bool":
        return torch.randint(0, 2, case.shape, generator=generator).to(dtype)
    made = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)
    if case.before not in INTEGERS:
        odd = torch.tensor(ODD, dtype=torch.float64)[torch.randint(0, len(ODD), (numel,), generator=generator)]
        takes = torch.rand(numel, generator=generator) < 0.3
        raw = made.view(torch.uint8).view(numel, dtype.itemsize)
        raw[takes] = odd.to(dtype).view(torch.uint8).view(numel, dtype.itemsize)[takes]
    return made.view(case.shape)


def shares(case: Case) -> dict[int, Box]:
    """What each rank with a source has: rows, of which the first may have one more; a scalar is with the first."""
    if not case.shape:
        return {case.sources[0]: Box.of((), ())}
    rows, rest = case.shape[0], case.shape[1:]
    each = -(-rows // len(case.sources))
    bounds = [(i * each, min(rows, i * each + each)) for i in range(len(case.sources))]
    zeros = (0,) * len(rest)
    return {r: Box.of((a, *zeros), (b - a, *rest)) for r, (a, b) in zip(case.sources, bounds, strict=True)}


def ranks_of(case: Case) -> tuple[int, ...]:
    return tuple(sorted({*shares(case), *case.targets}))


def empty_target(case: Case) -> torch.Tensor:
    dtype = getattr(torch, case.after)
    made = torch.zeros((*case.shape, 2), dtype=dtype)[..., 1] if case.turned else torch.zeros(case.shape, dtype=dtype)
    return made.conj() if case.turned and dtype.is_complex else made


def flip(tensor: torch.Tensor, count: int, generator: torch.Generator, *, any_bit: bool) -> None:
    """Some bits of a dense tensor or of a strided one; of flags only the lowest where they shall stay flags."""
    if not tensor.numel() or not count:
        return
    there = tensor.conj() if tensor.is_conj() else tensor
    size = there.element_size()
    made = torch.empty(there.shape, dtype=there.dtype).copy_(there).reshape(-1)
    raw = made.view(torch.uint8)
    for _ in range(count):
        at = int(torch.randint(0, len(raw), (), generator=generator))
        raw[at] ^= 1 << int(torch.randint(0, 8, (), generator=generator)) if any_bit else 1
    ints = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(size)
    to, of = (there, made.view(there.shape)) if ints is None else (there.view(ints), made.view(ints).view(there.shape))
    to.copy_(of)


def is_right(found: torch.Tensor, source: torch.Tensor) -> bool:
    """To the last bit; what is converted may be another NaN, since torch makes any of them."""
    wanted = source.to(found.dtype)
    if bits(found) == bits(wanted):
        return True
    if found.dtype == source.dtype or not (found.is_floating_point() or found.is_complex()):
        return False
    parts = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (found, wanted)]
    a, b = (t.contiguous().view(torch.uint8).view(-1, t.element_size()) for t in parts)
    same = (a == b).all(1) | (parts[0].isnan() & parts[1].isnan()).reshape(-1)
    return bool(same.all())


def play(case: Case, group: dist.ProcessGroup) -> str:
    """What was wrong first on this rank, and after which run."""
    rank, common = dist.get_rank(), torch.Generator().manual_seed(case.seed)
    own = torch.Generator().manual_seed(case.seed + 1 + rank)
    truth, boxes = whole(case, common), shares(case)
    spec = TensorSpec("w", case.shape, case.before)
    mine = truth[boxes[rank].slices].clone() if rank in boxes else None
    source = None if mine is None else {"w": mine}
    target = {"w": empty_target(case)} if rank in case.targets else None
    layouts = {"w": TensorLayout.from_boxes(spec, {r: [box] for r, box in boxes.items()}, WORLD)} if source else {}
    prepared = reshard.prepare(
        source, target, group, delta=True, dtype_policy="cast", source_layouts=layouts, max_inflight_bytes=1024
    )
    wrong = ""
    for number, step in enumerate((Step(0, 0), *case.steps)):
        flip(truth, step.in_source, common, any_bit=case.before != "bool")
        if mine is not None:
            mine.copy_(truth[boxes[rank].slices])
        if target is not None:
            flip(target["w"], step.in_target, own, any_bit=True)
        prepared.run()
        if target is not None and not is_right(target["w"], truth):
            wrong = wrong or f"run {number}: {target['w']} is not {truth.to(target['w'].dtype)}"
        found = reshard.verify_live(source, target, group, dtype_policy="cast", source_layouts=layouts)
        if not found.ok:
            wrong = wrong or f"run {number}: {found}"
    return wrong


def job(todo: list[Case]) -> list[str]:
    differences.BLOCK = 32
    warnings.filterwarnings("ignore", "Casting complex values to real")
    logging.getLogger("reshard").setLevel(logging.ERROR)  # that all came again
    groups = {ranks: dist.new_group(list(ranks)) for ranks in dict.fromkeys(map(ranks_of, todo))}
    rank = dist.get_rank()
    return [play(case, groups[ranks_of(case)]) if rank in ranks_of(case) else "" for case in todo]


@pytest.mark.gloo
def test_targets_are_what_their_sources_convert_to_after_every_run():
    todo: list[Case] = []

    @given(cases())
    @settings(max_examples=examples(150, 1000))
    def pick(case: Case) -> None:
        todo.append(case)

    pick()
    found = gloo.run(job, WORLD, todo, timeout_s=280)
    wrong = [(case, rank, why) for rank, all_ in enumerate(found) for case, why in zip(todo, all_, strict=True) if why]
    assert len(todo) > 30
    assert not wrong, f"{len(wrong)} of {len(todo)}: {wrong[0]}"
