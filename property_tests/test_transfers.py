"""Laws of transfer plans over arbitrary pairs of layouts, against lists of elements that share no code with them."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings, strategies as st
from oracle import elements, local_arrays

from planners import StateLayout, TensorLayout, plan_transfers, replay, verify
from planners.geometry.box import Box
from planners.geometry.layout import FlatForm
from planners.testing.strategies import product_layouts, specs, state_pairs
from property_tests.budget import examples


def local_parts(layout: TensorLayout, rank: int):
    """The element numbers in each local tensor of `rank`; a flat one is given part by part."""
    if rank >= layout.world_size:
        return []
    arrays = local_arrays(layout, rank)
    if not isinstance(layout.form, FlatForm):
        return arrays
    parts = layout.parts(rank)
    sizes = [part.numel for part in parts]
    flat = np.split(arrays[0], np.cumsum(sizes)[:-1]) if sizes else []
    return [piece.reshape(part.sizes) for piece, part in zip(flat, parts)]


def owned(layout: TensorLayout, rank: int):
    return set(elements(layout, rank)) if rank < layout.world_size else set()


def moved(plan, fqn: str, rank: int):
    """What the local tensors of `rank` hold after every sender's elements were copied as the items say."""
    out = [np.full(array.shape, -1) for array in local_parts(plan.after[fqn], rank)]
    for item in plan.items_to(rank):
        if item.fqn == fqn:
            given = local_parts(plan.before[fqn], item.sender)[item.source_part][item.source.slices]
            assert item.nbytes == given.size * plan.before[fqn].spec.itemsize
            assert (out[item.target_part][item.target.slices] == -1).all()
            out[item.target_part][item.target.slices] = given
    return out


hosts = st.sampled_from([None, 1, 2, 3, 8])


@given(state_pairs(), hosts)
@settings(max_examples=examples(600))
def test_every_needed_element_arrives_once_and_crosses_only_if_it_must(pair, ranks_per_host):
    before, after = pair

    plan = plan_transfers(before, after, ranks_per_host=ranks_per_host)

    assert verify(plan).ok
    for rank in range(plan.world_size):
        replayed = replay(plan, rank)
        received = local = 0
        for fqn, layout in after.items():
            for got, due in zip(moved(plan, fqn, rank), local_parts(layout, rank), strict=True):
                np.testing.assert_array_equal(got, due)
            for got, due in zip(replayed[fqn], local_parts(layout, rank), strict=True):
                np.testing.assert_array_equal(got, due)
            needed, own = owned(layout, rank), owned(before[fqn], rank)
            received += len(needed - own) * layout.spec.itemsize
            local += len(needed & own) * layout.spec.itemsize
        items = plan.items_to(rank)
        assert plan.received_bytes()[rank] == received == sum(i.nbytes for i in items if not i.is_local)
        assert plan.local_bytes()[rank] == local == sum(i.nbytes for i in items if i.is_local)
        assert items.nbytes == received + local


@given(state_pairs(max_tensors=4), hosts)
@settings(max_examples=examples(300))
def test_senders_and_receivers_tell_the_same_story(pair, ranks_per_host):
    plan = plan_transfers(*pair, ranks_per_host=ranks_per_host)

    to, of = {}, {}
    for rank in range(plan.world_size):
        for item in plan.items_to(rank):
            assert item.receiver == rank
            if not item.is_local:
                to.setdefault((item.sender, rank), []).append(item)
        for item in plan.items_from(rank):
            assert item.sender == rank != item.receiver
            of.setdefault((rank, item.receiver), []).append(item)
    assert to == of
    sizes = {pair: sum(item.nbytes for item in items) for pair, items in to.items()}
    sender, receiver, nbytes = (column.tolist() for column in plan.traffic())
    assert dict(zip(zip(sender, receiver), nbytes)) == sizes
    assert list(zip(sender, receiver)) == sorted(sizes)
    sent = Counter()
    for (rank, _), size in sizes.items():
        sent[rank] += size
    assert plan.sent_bytes().tolist() == [sent[rank] for rank in range(plan.world_size)]
    assert plan.bytes_moved == sum(sizes.values()) == plan.received_bytes().sum()
    graph = plan.graph()
    assert sum(nbytes for _, _, nbytes in graph.edges(data="nbytes")) == plan.bytes_moved


@given(st.data())
@settings(max_examples=examples(300))
def test_holders_share_the_deliveries_of_many_tensors_evenly(data):
    """After as many equal tensors as there are holders, each holder of a region has sent the same."""
    spec = data.draw(specs())
    before, after = data.draw(product_layouts(spec)), data.draw(product_layouts(spec))
    holding = len(before.product.replica_positions)
    names = [f"w{i}" for i in range(holding)]

    def state(layout):
        return StateLayout({n: TensorLayout.of(type(spec)(n, spec.shape, spec.dtype), layout.form) for n in names})

    plan = plan_transfers(state(before), state(after))

    sent = plan.sent_bytes()
    for owners in before.product.distinct():
        assert len(set(sent[before.product.replicas(owners)].tolist())) == 1


@given(st.data(), st.integers(1, 4))
@settings(max_examples=examples(300))
def test_a_receiver_is_served_on_its_own_host_where_that_is_possible(data, ranks_per_host):
    spec = data.draw(specs())
    before, after = data.draw(product_layouts(spec)), data.draw(product_layouts(spec))
    plan = plan_transfers(StateLayout({"w": before}), StateLayout({"w": after}), ranks_per_host=ranks_per_host)

    for item in plan.items():
        host = item.receiver // ranks_per_host
        first = min(elements(before, item.sender)) if item.nbytes else None
        near = [
            rank
            for rank in range(host * ranks_per_host, (host + 1) * ranks_per_host)
            if rank < before.world_size and first in owned(before, rank)
        ]
        if near:
            assert item.sender // ranks_per_host == host
        if item.receiver in near:
            assert item.is_local


def spoiled(item):
    """Every way to spoil one item: lose it, do it twice, move or shrink a side of it by one, take it from elsewhere."""
    yield "drop", []
    yield "duplicate", [item, item]
    yield "bytes", [item._replace(nbytes=item.nbytes + 1)]
    yield "part", [item._replace(target_part=item.target_part + 1000)]
    yield "name", [item._replace(fqn="another")]
    for d in range(item.box.ndim):
        step = [int(i == d) for i in range(item.box.ndim)]
        small = [size - s for size, s in zip(item.box.sizes, step)]
        for side in ("box", "source", "target"):
            box = getattr(item, side)
            yield f"shift {side}", [item._replace(**{side: box.shift(step)})]
            if box.offsets[d]:
                yield f"shift {side} back", [item._replace(**{side: box.shift([-s for s in step])})]
            yield f"shrink {side}", [item._replace(**{side: Box(box.offsets, small)})]


@given(st.data())
@settings(max_examples=examples(300))
def test_verify_finds_any_one_spoiled_item(data):
    plan = plan_transfers(*data.draw(state_pairs(max_tensors=1)))
    ranks = [rank for rank in range(plan.world_size) if plan.items_to(rank)]
    if not ranks:
        return
    rank = data.draw(st.sampled_from(ranks))
    items = list(plan.items_to(rank))
    at = data.draw(st.integers(0, len(items) - 1))
    listed = plan.with_items({rank: items})

    assert verify(listed).ok
    assert listed.sent_bytes().tolist() == plan.sent_bytes().tolist()
    assert [c.tolist() for c in listed.traffic()] == [c.tolist() for c in plan.traffic()]
    for what, instead in spoiled(items[at]):
        report = verify(plan.with_items({rank: [*items[:at], *instead, *items[at + 1 :]]}))
        assert not report.ok, what
        assert report.findings[0].rank == rank


@given(st.data())
@settings(max_examples=examples(200))
def test_verify_finds_a_sender_that_does_not_hold_what_it_sends(data):
    plan = plan_transfers(*data.draw(state_pairs(max_tensors=1)))
    ranks = [rank for rank in range(plan.world_size) if plan.items_to(rank)]
    if not ranks:
        return
    rank = data.draw(st.sampled_from(ranks))
    items = list(plan.items_to(rank))
    at = data.draw(st.integers(0, len(items) - 1))
    for other in range(plan.world_size):
        changed = plan.with_items({rank: [*items[:at], items[at]._replace(sender=other), *items[at + 1 :]]})
        assert verify(changed).ok == held_alike(plan, items[at], other)


def held_alike(plan, item, rank: int) -> bool:
    """Whether `rank` has the same elements at the same place of its local tensors as the item says."""
    arrays = local_parts(plan.before[item.fqn], rank)
    if item.source_part >= len(arrays) or any(b > n for b, n in zip(item.source.stops, arrays[item.source_part].shape)):
        return False
    ids = np.arange(plan.before[item.fqn].spec.numel).reshape(plan.before[item.fqn].spec.shape)
    return np.array_equal(arrays[item.source_part][item.source.slices], ids[item.box.slices])
