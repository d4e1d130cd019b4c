"""What ranks want several times over: moved once, and copied to where it is wanted again."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings, strategies as st

from planners import Box, Mesh, TensorLayout, TensorSpec
from planners.geometry.layout import BoxesForm
from planners.plans.transfer import want_once
from planners.testing.strategies import layouts, shapes

SPEC = TensorSpec("w", (8, 4), "float32")


def rows(*spans: tuple[int, int]) -> BoxesForm:
    return BoxesForm.make({0: [Box((low, 0), (high - low, 4)) for low, high in spans]})


def test_what_an_earlier_form_brings_is_not_brought_again():
    once = want_once((8, 4), (rows((0, 4)), rows((2, 6)), rows((0, 6))))

    assert once.forms[0] == rows((0, 4))
    assert once.forms[1] == rows((4, 6))
    assert once.forms[2] == BoxesForm.make({0: []})
    assert once.places[0] is None
    assert [place.box for place in once.places[1][0]] == [Box((2, 0), (2, 4))]
    assert [(r.source.form, r.target.form, r.target.box) for r in once.repeats[0]] == [
        (0, 1, Box((0, 0), (2, 4))),
        (0, 2, Box((0, 0), (4, 4))),
        (1, 2, Box((4, 0), (2, 4))),
    ]


def test_slices_of_a_stack_stay_as_they_are():
    """A source of which each of many targets is a slice is no reason to compare all of them with one another."""
    slices = tuple(BoxesForm.make({r: [Box((r, i), (1, 1))] for r in range(8)}) for i in range(4))

    once = want_once((8, 4), slices)

    assert once.forms == slices
    assert (once.places, once.repeats) == ((None,) * 4, {})


def test_one_form_keeps_its_mesh_where_nothing_is_repeated():
    layout = TensorLayout(SPEC, Mesh({"a": 2}), "S(0)")
    other = BoxesForm.make({0: [Box((4, 0), (4, 4))], 1: [Box((0, 0), (4, 4))]})

    once = want_once((8, 4), (layout.form, other))

    assert once.forms == (layout.form, other)


@given(st.builds(TensorSpec, st.just("w"), shapes(max_dims=3, max_size=6), st.just("float32")), st.data())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_every_wanted_element_is_moved_or_repeated_and_none_is_moved_twice(spec, data):
    forms = tuple(data.draw(layouts(spec)).form for _ in range(data.draw(st.integers(1, 3))))
    truth = np.arange(spec.numel).reshape(spec.shape)

    once = want_once(spec.shape, forms)

    for rank in range(max(form.world_size for form in forms)):
        local = [
            [np.full(part.sizes, -1) for part in form.parts(spec.shape, rank)] if rank < form.world_size else []
            for form in forms
        ]
        moved = []
        for number, form in enumerate(once.forms):
            parts = form.parts(spec.shape, rank) if rank < form.world_size else ()
            places = once.places[number]
            for index, part in enumerate(parts):
                if places is None:
                    at = local[number][index]
                else:
                    place = places[rank][index]
                    at = local[number][place.part][..., *place.box.slices]
                for box, inner in part.boxes():
                    at[..., *inner.slices] = truth[box.slices]
                    moved.extend(truth[box.slices].reshape(-1).tolist())
        for of, to in once.repeats.get(rank, ()):
            local[to.form][to.part][to.box.slices] = local[of.form][of.part][of.box.slices]
        wanted = set()
        for number, form in enumerate(forms):
            parts = form.parts(spec.shape, rank) if rank < form.world_size else ()
            for part, array in zip(parts, local[number], strict=True):
                index = np.ix_(*([i for a, b in dim for i in range(a, b)] for dim in part.dims)) if part.dims else ()
                assert np.array_equal(array, truth[index])
                wanted |= set(array.reshape(-1).tolist())
        assert len(moved) == len(set(moved))
        assert set(moved) == wanted
    assert all(isinstance(form, BoxesForm) for form, its in itertools.zip_longest(once.forms, once.places) if its)
