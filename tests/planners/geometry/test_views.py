"""Views, one operation after another, and what they refuse. The laws are in property_tests/test_views.py."""

from __future__ import annotations

import numpy as np
import pytest

from planners import (
    Box,
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
    stack,
    verify,
    viewed,
)
from planners.geometry.box import arrange, rearranged
from planners.geometry.views import Fill, Patch, merged

Q, K = TensorSpec("q", (4, 3), "float32"), TensorSpec("k", (2, 3), "float32")
ARRAYS = {"q": np.arange(12).reshape(4, 3), "k": np.arange(12, 18).reshape(2, 3)}
FUSED = concat("qk", [View.of(Q), View.of(K)])
WHOLE = np.concatenate([ARRAYS["q"], ARRAYS["k"]])


def same(view, array):
    assert view.shape == array.shape
    np.testing.assert_array_equal(view.apply(ARRAYS), array)


def test_a_tensor_is_a_view_of_itself():
    same(View.of(Q), ARRAYS["q"])
    assert View.of(Q).sources == (Q,)
    assert View.of(Q).patches == (Patch(Box.full((4, 3)), 0, Box.full((4, 3)), (0, 1)),)


def test_parts_laid_behind_one_another():
    same(FUSED, WHOLE)
    assert FUSED.spec == TensorSpec("qk", (6, 3), "float32")
    assert [patch.tensor for patch in FUSED.patches] == [0, 1]


@pytest.mark.parametrize(
    ("view", "array"),
    [
        (FUSED[3:5], WHOLE[3:5]),
        (FUSED[3:5, 1], WHOLE[3:5, 1]),
        (FUSED[-1], WHOLE[-1]),
        (FUSED[4:2], WHOLE[4:2]),
        (FUSED[:, 2:], WHOLE[:, 2:]),
        (FUSED.crop(Box((1, 1), (4, 2))), WHOLE[1:5, 1:3]),
        (FUSED.transpose(), WHOLE.T),
        (FUSED.split_dim((3, 2)), WHOLE.reshape(3, 2, 3)),
        (FUSED.split_dim((3, 2)).transpose(1, 0, 2).merge_dims(), WHOLE.reshape(3, 2, 3).swapaxes(0, 1).reshape(6, 3)),
        (FUSED.merge_dims(), WHOLE.reshape(18)),
        (FUSED.reorder([(4, 6), (0, 4)]), np.concatenate([WHOLE[4:], WHOLE[:4]])),
        (FUSED.reorder([(0, 2), (0, 2)]), np.concatenate([WHOLE[:2], WHOLE[:2]])),  # the same rows twice
        (FUSED.pad([(1, 0), (0, 2)], 7), np.pad(WHOLE, [(1, 0), (0, 2)], constant_values=7)),
        (View.full(TensorSpec("z", (2, 2), "float32"), 5), np.full((2, 2), 5.0)),
        (FUSED.rearrange((None, 1, 0)), WHOLE.T[None]),
    ],
)
def test_views_are_built_like_arrays(view, array):
    same(view, array)


def test_split_and_unstack_name_their_parts():
    q, k = FUSED.split({"first": 4, "second": 2})
    rows = FUSED.unstack([f"row{i}" for i in range(6)])

    assert (q.spec.fqn, k.spec.fqn, rows[5].spec) == ("first", "second", TensorSpec("row5", (3,), "float32"))
    same(q, ARRAYS["q"])
    same(rows[5], WHOLE[5])
    assert stack("qk", rows) == FUSED  # neighbours become one patch again
    assert q.patches == View.of(Q).patches


@pytest.mark.parametrize("head_size", [2, 6])
def test_rotary_rows_go_from_pairs_to_halves_and_back(head_size):
    heads = 6 // head_size
    halves = FUSED.halves_from_pairs(head_size)

    same(halves, WHOLE.reshape(heads, head_size // 2, 2, 3).swapaxes(1, 2).reshape(6, 3))
    assert halves.pairs_from_halves(head_size) == FUSED


def test_grouped_query_heads_are_interleaved():
    """[q q k] for each of 2 groups, out of q of 4 rows and k of 2."""
    same(FUSED.reorder([(0, 2), (4, 5), (2, 4), (5, 6)]), WHOLE[[0, 1, 4, 2, 3, 5]])


def test_an_inverse_gives_the_sources_back():
    q, k = inverse([FUSED.transpose()])

    assert (q.spec, k.spec) == (Q, K)
    assert q.sources == (TensorSpec("qk", (3, 6), "float32"),)
    np.testing.assert_array_equal(k.apply({"qk": WHOLE.T}), ARRAYS["k"])
    assert q.through({"qk": FUSED.transpose()}) == View.of(Q)


def test_padding_is_forgotten_by_an_inverse_and_cropping_needs_a_fill():
    padded = View.of(Q).rename("p").pad([(0, 2), (0, 0)])
    assert inverse([padded]) == (View.of(TensorSpec("p", (6, 3), "float32"))[:4].rename("q"),)
    cropped = View.of(Q)[:3].rename("c")
    with pytest.raises(PlanError, match=r"element \(3, 0\) is in no box"):
        inverse([cropped])
    assert inverse([cropped], fill=-1)[0].fills == (Fill(Box((3, 0), (1, 3)), -1),)


def test_what_is_used_twice_has_no_inverse():
    with pytest.raises(PlanError, match="in 2 boxes"):
        inverse([FUSED.reorder([(0, 6), (0, 1)])])
    with pytest.raises(PlanError, match="the same name"):
        inverse([FUSED, FUSED])


def test_composition_goes_through_names():
    outer = View.of(FUSED.spec)[3:6].rename("out")

    assert outer.through({"qk": FUSED}) == FUSED[3:6].rename("out")
    assert outer.through({}) == outer
    with pytest.raises(PlanError, match=r"is built with shape \(5, 3\)"):
        outer.through({"qk": FUSED[:5]})


def test_a_state_seen_through_views():
    other = TensorSpec("o", (1,), "int64")

    assert viewed([FUSED], {"q": Q, "k": K, "o": other}) == {"o": other, "qk": FUSED.spec}
    assert viewed(inverse([FUSED]), {"qk": FUSED.spec}) == {"q": Q, "k": K}
    with pytest.raises(PlanError, match="the state has None"):
        viewed([FUSED], {"q": Q})
    with pytest.raises(PlanError, match="two views create this tensor"):
        viewed([FUSED, FUSED], {"q": Q, "k": K})
    with pytest.raises(PlanError, match="already exists"):
        viewed([FUSED.rename("o")], {"q": Q, "k": K, "o": other})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FUSED.split({"a": 4, "b": 1}), r"\{'a': 4, 'b': 1\} add up to 5, but dim 0 has 6 elements"),
        (lambda: FUSED.unstack(["a"]), "1 names for the 6 elements"),
        (lambda: FUSED.split_dim((4, 2)), "dim 0 of size 6 cannot become 4 x 2"),
        (lambda: FUSED.transpose(0), "is not an order of the dims"),
        (lambda: FUSED.rearrange((0,)), "leaves out dim 1"),
        (lambda: FUSED.rearrange((0, 0, 1)), "distinct dims"),
        (lambda: FUSED[::2], "must have step 1"),
        (lambda: FUSED[6], "index 6 is outside dim 0"),
        (lambda: FUSED[0, 0, 0], "3 indices for a view"),
        (lambda: FUSED.crop(Box((5, 0), (2, 3))), "cannot crop"),
        (lambda: FUSED.pad([(0, 1)]), "a pair per dim"),
        (lambda: FUSED.pad([(0, -1), (0, 0)]), "must be >= 0"),
        (lambda: FUSED.reorder([(5, 7)]), "5:7 is outside dim 0"),
        (lambda: FUSED.merge_dims(1), "no dim 2"),
        (lambda: FUSED.halves_from_pairs(3), "heads of an even size 3"),
        (lambda: FUSED.halves_from_pairs(4), "heads of an even size 4"),
        (lambda: concat("x", []), "no views to concatenate or stack"),
        (lambda: concat("x", [View.of(Q), View.of(K)], 1), "do not concatenate along dim 1"),
        (lambda: concat("x", [View.of(Q), View.of(TensorSpec("b", (4, 3), "bfloat16"))]), "differ in dtype"),
        (lambda: stack("x", [View.of(Q), View.of(K)]), "do not stack"),
        (lambda: stack("x", [View.of(Q)], 3), "a new dim 3"),
        (
            lambda: concat("x", [View.of(Q), View.of(TensorSpec("q", (2, 3), "float32"))]),
            "two sources with the same name",
        ),
        # built by hand: parts that do not add up, or lie outside
        (lambda: View(Q, (K,), (Patch(Box((0, 0), (2, 3)), 0, Box.full((2, 3)), (0, 1)),)), "do not add up"),
        (lambda: View(K, (K,), (Patch(Box.full((2, 3)), 0, Box((1, 0), (2, 3)), (0, 1)),)), "is outside 'k'"),
        (lambda: View(K, (K,), (Patch(Box.full((2, 3)), 1, Box.full((2, 3)), (0, 1)),)), "has no source 1"),
        (lambda: Patch(Box.full((3, 2)), 0, Box.full((2, 3)), (0, 1)), "does not fill"),
        (lambda: View(Q, (TensorSpec("b", (4, 3), "int8"),), ()), "cannot take from 'b' of int8"),
        (lambda: View(K, (), (), (Fill(Box.full((2,))),)), "must have the 2 dims"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(PlanError, match=message):
        make()


def test_a_patch_maps_boxes_both_ways():
    patch = Patch(Box((4, 0, 2), (1, 3, 2)), 0, Box((5, 6), (2, 3)), (None, 1, 0))
    box = Box((4, 1, 3), (1, 2, 1))

    assert patch.to_source(box) == Box((6, 7), (1, 2))
    assert patch.to_target(patch.to_source(box)) == box
    assert patch.inverse(0).inverse(0) == patch
    assert rearranged(patch.source, patch.dims).sizes == patch.target.sizes
    assert arrange(np.zeros((2, 3)), patch.dims).shape == (1, 3, 2)


def test_neighbours_merge_only_where_target_and_source_go_on():
    def row(at, source):
        return Patch(Box((at, 0), (1, 3)), 0, Box((source, 0), (1, 3)), (0, 1))

    assert merged([row(1, 5), row(0, 4)]) == (Patch(Box((0, 0), (2, 3)), 0, Box((4, 0), (2, 3)), (0, 1)),)
    assert len(merged([row(0, 4), row(1, 6)])) == 2
    assert len(merged([row(0, 4), row(2, 5)])) == 2


def test_json_keeps_a_view():
    view = FUSED.pad([(0, 0), (1, 0)], 0.5)

    assert loads(dumps(view)) == view


def test_hundreds_of_ranks_are_read_and_proved_through_views():
    sizes = {"q": 4096, "k": 1024, "v": 1024}
    specs = [TensorSpec(name, (rows, 4096), "bfloat16") for name, rows in sizes.items()]
    saved = StateLayout({s.fqn: TensorLayout(s, "dp=512", "S(0)") for s in specs})
    fused = concat("qkv", [View.of(s) for s in specs])
    wanted = TensorLayout(fused.spec, "tp=8,dp=64", "B(0, 4096+1024+1024),S(0)")

    plan = plan_reads(saved, StateLayout({"qkv": wanted}), views=[fused])

    assert verify(plan).ok
    items = plan.items(77)
    assert items.nbytes == plan.bytes(77) == wanted.nbytes(77)
    spoiled = plan.with_items({77: [items[0]._replace(owner=items[0].owner + 1), *items[1:]]})
    first = verify(spoiled).findings[0]
    assert (first.fqn, first.rank) == ("qkv", 77)


def test_indices_are_integers_of_any_kind_and_slices():
    same(View.of(Q)[np.int64(1)], ARRAYS["q"][1])
    for wrong in (..., None, 1.0, [0]):
        with pytest.raises(PlanError, match="integers and slices"):
            View.of(Q)[wrong]
