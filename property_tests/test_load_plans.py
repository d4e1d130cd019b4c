"""Laws of load plans over arbitrary pairs of layouts, against an oracle that shares no code with the planners."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings, strategies as st
from oracle import elements, local_arrays

from planners import LoadPlan, ReadItem, dumps, loads, plan_reads, replay, verify
from planners.geometry.box import Box
from planners.geometry.layout import FlatForm
from planners.testing.strategies import layouts, product_layouts, specs, state_pairs
from property_tests.budget import examples


@given(st.data())
@settings(max_examples=examples(800))
def test_boxes_tile_the_tensor_once_per_replica_group(data):
    layout = data.draw(specs().flatmap(layouts))

    counts = Counter(x for rank in range(layout.world_size) for x in elements(layout, rank))
    boxed = Counter()
    for rank in range(layout.world_size):
        ids = np.arange(layout.spec.numel).reshape(layout.spec.shape)
        mine = [x for box in layout.boxes(rank) for x in ids[box.slices].reshape(-1).tolist()]
        assert sorted(mine) == sorted(elements(layout, rank))
        assert layout.numel(rank) == layout.numels()[rank] == len(mine)
        boxed.update(mine)
    assert boxed == counts
    assert set(boxed) == set(range(layout.spec.numel))
    assert len(set(boxed.values())) <= 1
    assert verify(layout).ok
    distinct = Counter(x for _, box in layout.chunks() for x in ids[box.slices].reshape(-1).tolist())
    assert distinct == Counter(range(layout.spec.numel))


def arrived(plan: LoadPlan, fqn: str, rank: int):
    """What replay puts in the local tensors, flat local tensors put together from their parts."""
    arrays = replay(plan, rank)[fqn]
    if isinstance(plan.wanted[fqn].form, FlatForm):
        return [np.concatenate([a.reshape(-1) for a in arrays])] if arrays else []
    return list(arrays)


@given(state_pairs())
@settings(max_examples=examples(1000))
def test_a_plan_verifies_and_moves_every_element_to_its_place(pair):
    saved, wanted = pair

    plan = plan_reads(saved, wanted)

    assert verify(plan).ok
    for rank in range(wanted.world_size):
        items = plan.items(rank)
        assert (
            items.nbytes
            == plan.bytes(rank)
            == sum(wanted[f].nbytes(rank) for f in wanted if rank < wanted[f].world_size)
        )
        for fqn, layout in wanted.items():
            due = local_arrays(layout, rank) if rank < layout.world_size else []
            got = arrived(plan, fqn, rank)
            assert len(got) == len(due) or sum(a.size for a in due) == 0
            for a, b in zip(got, due):
                np.testing.assert_array_equal(a, b)
    assert plan.total_bytes == sum(plan.bytes(rank) for rank in range(wanted.world_size))


@given(state_pairs())
@settings(max_examples=examples(200))
def test_a_plan_survives_json(pair):
    plan = plan_reads(*pair)
    again = loads(dumps(plan))

    assert again == plan
    assert dumps(again) == dumps(plan)
    listed = plan.with_items({0: plan.items(0)})
    assert loads(dumps(listed)) == listed


@given(specs().flatmap(layouts))
def test_the_same_layout_reads_each_chunk_whole(layout):
    from planners import StateLayout

    state = StateLayout({layout.fqn: layout})
    plan = plan_reads(state, state)

    for rank in range(state.world_size):
        for item in plan.items(rank):
            assert item.source == Box.full(item.chunk.sizes)
            assert item.chunk in layout.boxes(rank)


def shrink(box: Box, dim: int) -> Box:
    sizes = list(box.sizes)
    sizes[dim] -= 1
    return Box(box.offsets, sizes)


def mutations(item: ReadItem, itemsize: int):
    """Every way to spoil one item: lose it, do it twice, move or shrink it by one."""
    yield "drop", []
    yield "duplicate", [item, item]
    for d in range(item.source.ndim):
        step = [int(i == d) for i in range(item.source.ndim)]
        back = [-s for s in step]
        for side in ("source", "target"):
            box = getattr(item, side)
            yield f"shift {side}", [item._replace(**{side: box.shift(step)})]
            if box.offsets[d]:
                yield f"shift {side} back", [item._replace(**{side: box.shift(back)})]
        small = item._replace(source=shrink(item.source, d), target=shrink(item.target, d))
        yield "shrink", [small._replace(nbytes=small.source.numel * itemsize)]
    yield "bytes", [item._replace(nbytes=item.nbytes + 1)]


@given(st.data())
@settings(max_examples=examples(300))
def test_verify_finds_any_one_spoiled_item(data):
    plan = plan_reads(*data.draw(state_pairs(max_tensors=1)))
    ranks = [rank for rank in range(plan.world_size) if plan.items(rank)]
    if not ranks:
        return
    rank = data.draw(st.sampled_from(ranks))
    items = list(plan.items(rank))
    at = data.draw(st.integers(0, len(items) - 1))
    itemsize = plan.saved[items[at].fqn].spec.itemsize

    for what, instead in mutations(items[at], itemsize):
        spoiled = plan.with_items({rank: [*items[:at], *instead, *items[at + 1 :]]})
        report = verify(spoiled)
        assert not report.ok, what
        assert all(finding.element is not None and finding.fqn == items[at].fqn for finding in report.findings)


@given(st.data())
@settings(max_examples=examples(100))
def test_a_hole_in_the_saved_side_is_found(data):
    from planners import StateLayout, TensorLayout

    spec = data.draw(specs().filter(lambda s: s.numel > 0))
    saved = data.draw(product_layouts(spec))
    chunks = list(saved.chunks())
    lost = data.draw(st.integers(0, len(chunks) - 1))
    kept = TensorLayout.from_boxes(spec, {i: [b] for i, (_, b) in enumerate(chunks) if i != lost}, len(chunks))
    wanted = data.draw(product_layouts(spec))

    report = verify(plan_reads(StateLayout({"w": kept}), StateLayout({"w": wanted})))

    assert not report.ok
    assert chunks[lost][1].contains(Box(report.findings[0].element, (1,) * len(spec.shape)))
    assert not verify(kept).ok
