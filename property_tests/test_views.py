"""Laws of views, against numpy's own operations on whole arrays, and of plans through them, against replay."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from oracle import owned_indexes

from planners import (
    PlanError,
    StateLayout,
    TensorLayout,
    TensorSpec,
    View,
    concat,
    dumps,
    inverse,
    loads,
    plan_reads,
    replay,
    stack,
    verify,
)
from planners.geometry.layout import FlatForm
from planners.testing.strategies import layouts, shapes
from property_tests.budget import examples

SMALL = shapes(max_dims=3, max_size=6)


class World:
    """Sources with distinct numbers in them, and views beside the arrays that numpy makes of them."""

    def __init__(self, prefix="s"):
        self.arrays, self.count, self.prefix = {}, 0, prefix

    def source(self, shape):
        spec = TensorSpec(f"{self.prefix}{len(self.arrays)}", shape, "int64")
        self.arrays[spec.fqn] = np.arange(self.count, self.count + spec.numel, dtype=np.int64).reshape(shape)
        self.count += spec.numel
        return View.of(spec), self.arrays[spec.fqn]


@st.composite
def one_step(draw, world, view, array):
    """One operation, on the view and on the array."""
    ndim = array.ndim
    moves = ["rename", "stack", "pad", "transpose", "unsqueeze"]
    if ndim:
        moves += ["slice", "split", "concat", "reorder", "split_dim", "pick"]
    if ndim > 1:
        moves.append("merge")
    move = draw(st.sampled_from(moves))
    dim = draw(st.integers(0, ndim - 1)) if ndim else 0
    if move == "rename":
        return view.rename("other"), array
    if move == "stack":
        other, its = world.source(array.shape)
        return stack("x", [view, other], dim), np.stack([array, its], dim)
    if move == "pad":
        widths = [(draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in range(ndim)]
        value = draw(st.integers(-9, -2))
        return view.pad(widths, value), np.pad(array, widths, constant_values=value) if ndim else array
    if move == "transpose":
        order = draw(st.permutations(range(ndim)))
        return view.transpose(*order), array.transpose(order) if ndim else array
    if move == "unsqueeze":
        dims = list(range(ndim))
        dims.insert(dim, None)
        return view.rearrange(dims), np.expand_dims(array, dim)
    if move == "slice":
        at = sorted(draw(st.lists(st.integers(0, array.shape[dim]), min_size=2, max_size=2)))
        index = (slice(None),) * dim + (slice(*at),)
        return view[index], array[index]
    if move == "pick":
        if not array.shape[dim]:
            return view, array
        index = (slice(None),) * dim + (draw(st.integers(-array.shape[dim], array.shape[dim] - 1)),)
        return view[index], array[index]
    if move == "split":
        at = draw(st.integers(0, array.shape[dim]))
        which = draw(st.integers(0, 1))
        parts = view.split({"a": at, "b": array.shape[dim] - at}, dim)
        return parts[which], np.split(array, [at], dim)[which]
    if move == "concat":
        other, its = world.source(array.shape)
        return concat("x", [view, other, view], dim), np.concatenate([array, its, array], dim)
    if move == "reorder":
        at = draw(st.integers(0, array.shape[dim]))
        left, right = np.split(array, [at], dim)
        return view.reorder([(at, array.shape[dim]), (0, at)], dim), np.concatenate([right, left], dim)
    if move == "split_dim":
        factors = [k for k in range(1, 7) if array.shape[dim] % k == 0]
        outer = draw(st.sampled_from(factors))
        sizes = (outer, array.shape[dim] // outer)
        return view.split_dim(sizes, dim), array.reshape(*array.shape[:dim], *sizes, *array.shape[dim + 1 :])
    dim = draw(st.integers(0, ndim - 2))
    merged = array.shape[dim] * array.shape[dim + 1]
    return view.merge_dims(dim), array.reshape(*array.shape[:dim], merged, *array.shape[dim + 2 :])


@st.composite
def views(draw, steps=4):
    """A world, a view composed at random and the array that numpy makes."""
    world = World()
    view, array = world.source(draw(SMALL))
    for _ in range(draw(st.integers(0, steps))):
        view, array = draw(one_step(world, view, array))
        if array.size > 3000 or array.ndim > 4:
            break
    return world, view, array


@given(views())
@settings(max_examples=examples(500))
def test_a_view_makes_what_numpy_makes(made):
    world, view, array = made

    assert view.shape == array.shape
    np.testing.assert_array_equal(view.apply(world.arrays), array)
    assert loads(dumps(view)) == view


@st.composite
def invertible(draw):
    """Some tensors and several views that use each of their elements once."""
    world = World()
    parts = [world.source(draw(SMALL.filter(lambda s: len(s) == 2)))[0] for _ in range(draw(st.integers(1, 3)))]
    out = []
    for i, view in enumerate(parts):
        dim = draw(st.integers(0, 1))
        at = draw(st.integers(0, view.shape[dim]))
        out += view.transpose().split({f"a{i}": at, f"b{i}": view.shape[dim] - at}, 1 - dim)
    by_rows = {}
    for view in out:
        by_rows.setdefault(view.shape[0], []).append(view)
    return world, parts, [concat(f"t{n}", group, 1) for n, group in by_rows.items()]


@given(invertible())
def test_a_view_and_then_its_inverse_is_identity(made):
    world, parts, made_of = made

    back = {view.spec.fqn: view for view in inverse(made_of)}

    forward = {view.spec.fqn: view for view in made_of}
    for part in parts:
        fqn = part.spec.fqn
        if part.spec.numel:
            again = back[fqn].through(forward)
            np.testing.assert_array_equal(again.apply(world.arrays), world.arrays[fqn])
            assert again == part
    for view in made_of:
        np.testing.assert_array_equal(view.through(back).apply(_targets(made_of, world)), view.apply(world.arrays))


def _targets(views_, world):
    return {view.spec.fqn: view.apply(world.arrays) for view in views_}


@given(views(steps=3), st.data())
def test_composition_is_application_one_after_another(made, data):
    world, view, array = made
    outer_world = World("outer")
    outer_world.arrays = {"mid": array}
    outer, wanted = View.of(TensorSpec("mid", array.shape, "int64")), array
    for _ in range(data.draw(st.integers(1, 2))):
        outer, wanted = data.draw(one_step(outer_world, outer, wanted))

    whole = outer.through({"mid": view.rename("mid")})

    arrays = {**outer_world.arrays, **world.arrays}
    np.testing.assert_array_equal(whole.apply(arrays), wanted)


def local_truth(layout, array, rank):
    """What the layout says `rank` holds of an array."""
    if rank >= layout.world_size:
        return []
    if layout.mesh is not None:
        if rank not in layout.mesh:
            return []
        index = owned_indexes(layout.spec.shape, layout.mesh, layout.placements, rank)
        return [array[np.ix_(*index)] if array.ndim else array]
    if isinstance(layout.form, FlatForm):
        return [array.reshape(-1)[start:stop] for r, start, stop in layout.form.ranges if r == rank]
    return [array[box.slices] for r, its in layout.form.boxes if r == rank for box in its]


@given(views(steps=3), st.data())
@settings(max_examples=examples(500))
def test_a_plan_through_a_view_moves_what_numpy_makes(made, data):
    world, view, array = made
    saved = StateLayout({fqn: data.draw(layouts(TensorSpec(fqn, a.shape, "int64"))) for fqn, a in world.arrays.items()})
    wanted = data.draw(layouts(view.spec))
    state = StateLayout({wanted.fqn: wanted})

    plan = plan_reads(saved, state, views=[view])

    assert verify(plan).ok
    assert loads(dumps(plan)) == plan
    for rank in range(plan.world_size):
        got = list(replay(plan, rank, world.arrays)[wanted.fqn])
        due = local_truth(wanted, array, rank)
        if isinstance(wanted.form, FlatForm):
            got, due = [[np.concatenate([a.reshape(-1) for a in side])] if side else [] for side in (got, due)]
        for a, b in zip(got, due):
            np.testing.assert_array_equal(a, b)
        filled = sum(fill.target.numel for fill in plan.fills(rank))
        held = wanted.numel(rank) if rank < wanted.world_size else 0
        assert plan.items(rank).nbytes == plan.bytes(rank) == (held - filled) * 8


@given(views(steps=3), st.data())
@settings(max_examples=examples(200))
def test_verify_finds_a_spoiled_item_of_a_viewed_plan(made, data):
    world, view, _ = made
    saved = StateLayout({fqn: data.draw(layouts(TensorSpec(fqn, a.shape, "int64"))) for fqn, a in world.arrays.items()})
    wanted = data.draw(layouts(view.spec))
    plan = plan_reads(saved, StateLayout({wanted.fqn: wanted}), views=[view])
    ranks = [rank for rank in range(plan.world_size) if plan.items(rank)]
    if not ranks:
        return
    rank = data.draw(st.sampled_from(ranks))
    items = list(plan.items(rank))
    at = data.draw(st.integers(0, len(items) - 1))
    item = items[at]
    spoiled = [[], [item, item], [item._replace(nbytes=item.nbytes + 1)], [item._replace(saved_as="nobody")]]
    for d in range(item.source.ndim):
        step = [int(i == d) for i in range(item.source.ndim)]
        spoiled.append([item._replace(source=item.source.shift(step))])
    for d in range(item.target.ndim):
        step = [int(i == d) for i in range(item.target.ndim)]
        spoiled.append([item._replace(target=item.target.shift(step))])
    if item.target.ndim > 1:
        spoiled.append([item._replace(dims=tuple(reversed(item.dims)))])

    for instead in spoiled:
        if [item] == instead:
            continue
        report = verify(plan.with_items({rank: [*items[:at], *instead, *items[at + 1 :]]}))
        assert not report.ok, instead


def fsdp(spec, ranks):
    return TensorLayout(spec, f"dp={ranks}", "S(0)")


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_rank_of_a_fused_grouped_query_qkv_is_read_out_of_q_k_and_v(tp):
    """8 query heads and 4 key heads of 2 rows, saved apart under FSDP over 3 ranks, wanted fused under TP."""
    sizes = {"q": 16, "k": 8, "v": 8}
    world = World()
    parts = {}
    for name, rows in sizes.items():
        view, array = world.source((rows, 6))
        parts[name] = (view, array)
    saved = StateLayout({view.spec.fqn: fsdp(view.spec, 3) for view, _ in parts.values()})
    fused = concat("wqkv", [view for view, _ in parts.values()])
    wanted = TensorLayout(fused.spec, f"tp={tp}", "B(0, 16+8+8)")

    plan = plan_reads(saved, StateLayout({"wqkv": wanted}), views=[fused])

    assert verify(plan).ok
    for rank in range(tp):
        due = np.concatenate([np.split(array, tp)[rank] for _, array in parts.values()])
        np.testing.assert_array_equal(replay(plan, rank, world.arrays)["wqkv"][0], due)
        assert plan.bytes(rank) == due.nbytes


def test_experts_stack_and_unstack_with_their_matrices_transposed():
    world = World()
    experts = [world.source((4, 6)) for _ in range(8)]
    saved = StateLayout({view.spec.fqn: fsdp(view.spec, 3) for view, _ in experts})
    grouped = stack("experts", [view.transpose() for view, _ in experts])
    wanted = TensorLayout(grouped.spec, "ep=4,dp=2", "S(0),S(1)")
    truth = np.stack([array.T for _, array in experts])

    plan = plan_reads(saved, StateLayout({"experts": wanted}), views=[grouped])

    assert verify(plan).ok
    for rank in range(8):
        np.testing.assert_array_equal(replay(plan, rank, world.arrays)["experts"][0], *local_truth(wanted, truth, rank))
    back = StateLayout({view.spec.fqn: fsdp(view.spec, 2) for view, _ in experts})
    again = plan_reads(StateLayout({"experts": wanted}), back, views=inverse([grouped]))
    assert verify(again).ok
    for i, (view, array) in enumerate(experts):
        np.testing.assert_array_equal(replay(again, 1, {"experts": truth})[view.spec.fqn][0], array[2:], str(i))


def test_gate_and_up_are_parted_and_a_vocabulary_is_padded_and_cropped():
    world = World()
    fused, array = world.source((10, 4))
    gate, up = fused.split({"gate": 5, "up": 5})
    table, words = world.source((7, 4))
    padded = table.rename("embed").pad([(0, 1), (0, 0)], -7)
    specs = (gate.spec, up.spec, padded.spec)
    wanted = StateLayout({spec.fqn: TensorLayout(spec, "tp=2", "S(0)") for spec in specs})
    saved = StateLayout({view.spec.fqn: fsdp(view.spec, 4) for view in (fused, table)})

    plan = plan_reads(saved, wanted, views=[gate, up, padded])

    assert verify(plan).ok
    out = replay(plan, 1, world.arrays)
    np.testing.assert_array_equal(out["gate"][0], array[3:5])
    np.testing.assert_array_equal(out["up"][0], array[8:])
    np.testing.assert_array_equal(out["embed"][0], np.pad(words, [(0, 1), (0, 0)], constant_values=-7)[4:])
    assert [(fill.fqn, fill.value) for fill in plan.fills(1)] == [("embed", -7)]
    assert not plan.fills(0)
    (cropped,) = inverse([padded])
    assert cropped.shape == (7, 4)
    with pytest.raises(PlanError, match="is in no box"):
        inverse([table[:5]])
    assert inverse([table[:5].rename("t")], fill=0)[0].fills
