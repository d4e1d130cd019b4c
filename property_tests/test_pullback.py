"""Laws of layouts that are pulled back through views: slots, filled from the sources, make up what numpy makes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st
from test_transfers import local_parts
from test_views import views

from planners import TensorLayout, TensorSpec
from planners.geometry.box import arrange
from planners.geometry.views import filled_slots, pull_back
from planners.testing.strategies import layouts
from property_tests.budget import examples


@given(st.data())
@settings(max_examples=examples(400, most=20_000))
def test_what_is_pulled_back_fills_every_local_tensor_exactly_once(data):
    world, view, array = data.draw(views())
    wanted = data.draw(layouts(TensorSpec("w", array.shape, "int64")))

    pulled = pull_back(view.geometry, wanted.form)

    forms = []
    for one in pulled:
        source = view.sources[one.tensor]
        forms.append(TensorLayout.of(TensorSpec(source.fqn, source.shape, "int64"), one.form))  # which checks it
    for rank in range(wanted.world_size):
        due = [np.ascontiguousarray(array).reshape(-1)[ids] for ids in local_parts(wanted, rank)]
        made = [np.full(part.shape, -1) for part in due]
        for part, box, value in filled_slots(view.geometry, wanted.form, rank):
            assert (made[part][box.slices] == -1).all()
            made[part][box.slices] = value
        for one, layout in zip(pulled, forms):
            given_ = world.arrays[layout.fqn].reshape(-1)
            held = [given_[ids] for ids in local_parts(layout, rank)]
            if one.slots is None:
                there = [arrange(part, one.turn) for part in made]
            else:
                there = [arrange(made[part][(*box.slices, ...)], dims) for part, box, dims in one.slots.get(rank, ())]
            assert len(there) == len(held)
            for to, elements in zip(there, held):
                assert (to == -1).all()
                to[...] = elements
        for got, want in zip(made, due, strict=True):
            np.testing.assert_array_equal(got, want)
