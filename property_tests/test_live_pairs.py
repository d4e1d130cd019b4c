"""Laws of live transfers over pairs of layouts that Hypothesis picks, on real processes that were started once."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from oracle import elements, local_arrays

import reshard
from planners import StateLayout
from planners.testing.strategies import box_layouts, flat_layouts, product_layouts, specs
from reshard.live.dtypes import dtype_from_name
from tests import gloo

WORLD = 4


@st.composite
def pairs(draw: st.DrawFn) -> tuple[StateLayout, StateLayout, int]:
    """Two layouts, on up to four ranks, of a state of one or two tensors; and a budget."""
    before, after = {}, {}
    for i in range(draw(st.integers(1, 2))):
        spec = draw(specs(f"w{i}"))
        kinds = (
            product_layouts(spec, max_ranks=WORLD),
            product_layouts(spec, blocks=True, max_ranks=WORLD),
            flat_layouts(spec).filter(lambda layout: layout.world_size <= WORLD),
            box_layouts(spec).filter(lambda layout: layout.world_size <= WORLD),
        )
        before[spec.fqn], after[spec.fqn] = draw(st.one_of(*kinds)), draw(st.one_of(*kinds))
    return StateLayout(before), StateLayout(after), draw(st.sampled_from([1024, 4096, 1 << 20]))


def held(layout: StateLayout, rank: int, whole: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """The local tensors of a rank: elements of `whole`, or -1 bits."""
    out = {}
    for fqn, tensor in layout.items():
        dtype = dtype_from_name(tensor.spec.dtype)
        found = []
        for numbers in local_arrays(tensor, rank) if rank < tensor.world_size else []:
            index = torch.from_numpy(np.array(numbers))
            there = torch.zeros(index.shape, dtype=dtype)
            found.append(there if whole is None else whole[fqn].reshape(-1)[index])
        if len(found) == 1:
            out[fqn] = found[0]
        elif found:  # several boxes in one plain tensor
            out[fqn] = torch.cat([boxes.reshape(-1) for boxes in found])
    return out


def ranks_of(*layouts: StateLayout) -> tuple[int, ...]:
    return tuple(sorted({r for layout in layouts for t in layout.values() for r in t.form.ranks() if t.parts(r)}))


def job(cases: list[tuple[StateLayout, StateLayout, int]]) -> list[list[tuple[int, str]]]:
    """For each case: (bytes that this rank got, what was wrong)."""
    rank = dist.get_rank()
    subsets = [ranks for n in range(1, WORLD + 1) for ranks in itertools.combinations(range(WORLD), n)]
    groups = {ranks: dist.new_group(list(ranks)) for ranks in subsets}
    out = []
    for before, after, budget in cases:
        ranks = ranks_of(before, after)
        if rank not in ranks:
            out.append((0, ""))
            continue
        generator = torch.Generator().manual_seed(1)
        whole = {
            fqn: torch.randint(0, 2, t.spec.shape, generator=generator, dtype=torch.uint8).to(
                dtype_from_name(t.spec.dtype)
            )
            for fqn, t in after.items()
        }
        source, target, known = (held(x, rank, w) for x, w in ((before, whole), (after, None), (after, whole)))
        options: Any = {"source_layouts": dict(before), "target_layouts": dict(after), "max_inflight_bytes": budget}
        report = reshard.redistribute(source, target, groups[ranks], check=True, **options)
        wrong = [fqn for fqn in known if not torch.equal(target[fqn], known[fqn])]
        over = [f"{report.buffer_bytes} bytes of buffers"] if report.buffer_bytes > budget else []
        out.append((report.bytes_received, ", ".join(wrong + over)))
    return out


def least(before: StateLayout, after: StateLayout, rank: int) -> int:
    """Bytes that a rank wants and does not hold."""
    total = 0
    for fqn, layout in after.items():
        want = set(elements(layout, rank)) if rank < layout.world_size else set()
        have = set(elements(before[fqn], rank)) if rank < before[fqn].world_size else set()
        total += len(want - have) * layout.spec.itemsize
    return total


@pytest.mark.gloo
def test_any_layout_becomes_any_other_bit_by_bit_and_every_byte_that_must_crosses_once():
    cases: list[Any] = []

    @given(pairs())
    @settings(max_examples=60)
    def pick(case: Any) -> None:
        cases.append(case)

    pick()
    ranks = gloo.run(job, WORLD, cases, timeout_s=250)

    assert len(cases) >= 40
    for number, (before, after, budget) in enumerate(cases):
        for rank in range(WORLD):
            received, wrong = ranks[rank][number]
            assert not wrong, (before, after, budget, rank)
            assert received == least(before, after, rank), (dict(before), dict(after), rank)
