"""The three forms of a layout, each asked the same questions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from planners import Box, Mesh, PlanError, Replicate, Shard
from planners.geometry.layout import BoxesForm, FlatForm, Part, ProductForm

PRODUCT = ProductForm.make(Mesh({"rep": 2, "dp": 3}), [Replicate(), Shard(0)])
BOXES = BoxesForm.make({0: [Box((0, 0), (2, 3)), Box((2, 1), (2, 2))], 2: [Box((2, 0), (2, 1))]}, world_size=4)
FLAT = FlatForm.make({0: (0, 5), 1: (5, 5), 3: (5, 12)})


@pytest.mark.parametrize(
    ("form", "world_size", "ranks", "numels"),
    [
        (PRODUCT, 6, [0, 1, 2, 3, 4, 5], [6, 6, 0, 6, 6, 0]),
        (BOXES, 4, [0, 2], [10, 0, 2, 0]),
        (FLAT, 4, [0, 1, 3], [5, 0, 0, 7]),
    ],
)
def test_what_a_form_says_of_four_by_three(form, world_size, ranks, numels):
    assert form.world_size == world_size
    assert list(form.ranks()) == ranks
    assert form.numels((4, 3)).tolist() == numels
    assert [sum(part.numel for part in form.parts((4, 3), rank)) for rank in range(world_size)] == numels
    held = [box for _, box in form.chunks((4, 3))]
    assert len(held) == len(set(held))
    assert sum(box.numel for box in held) == 12


def test_a_product_is_shared_by_all_who_ask_for_the_same():
    again = ProductForm.make(Mesh({"rep": 2, "dp": 3}), [Replicate(), Shard(0)])

    assert again is PRODUCT
    assert PRODUCT.geometry((4, 3)) is again.geometry((4, 3))
    assert ProductForm(PRODUCT.mesh, PRODUCT.placements) == PRODUCT


def test_chunks_name_the_lowest_rank_that_holds_them():
    turned = ProductForm.make(Mesh({"rep": 2, "dp": 2}, [7, 1, 2, 5]), [Replicate(), Shard(0)])

    assert list(turned.chunks((4,))) == [(2, Box((0,), (2,))), (1, Box((2,), (2,)))]
    assert turned.parts((4,), 3) == ()  # not in the mesh
    assert turned.world_size == 8


def test_a_flat_range_is_a_1d_local_tensor_in_a_few_shaped_parts():
    parts = FLAT.parts((4, 3), 3)

    assert [part.flat_start for part in parts] == [0, 1]
    assert [part.sizes for part in parts] == [(1, 1), (2, 3)]
    assert FLAT.parts((4, 3), 1) == FLAT.parts((4, 3), 2) == ()


def test_the_boxes_of_a_part_are_in_local_row_major_order():
    part = Part((((4, 6), (0, 1)), ((2, 3), (7, 9))))

    assert part.sizes == (3, 3)
    found = list(part.boxes())
    out = np.full(part.sizes, -1)
    ids = np.arange(100).reshape(10, 10)
    for box, local in found:
        out[local.slices] = ids[box.slices]
    np.testing.assert_array_equal(out, ids[np.ix_([4, 5, 0], [2, 7, 8])])
    assert [local for _, local in found] == sorted(local for _, local in found)
    assert list(Part(((), ((0, 3),))).boxes()) == []
    assert list(Part(()).boxes()) == [(Box.full(()), Box.full(()))]


def test_owners_and_ranks_say_the_same():
    geometry = ProductForm.make(Mesh({"a": 2, "b": 3, "c": 2}), [Shard(1), Replicate(), Shard(0)]).geometry((4, 4))

    for owners in itertools.product(range(2), range(2)):
        replicas = geometry.replicas(owners).tolist()
        assert len(replicas) == 3
        assert all(geometry.owners_of(rank) == owners for rank in replicas)
        assert geometry.lowest_rank(owners) == min(replicas)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ProductForm.make(Mesh({"dp": 2}), []), "needs one placement for each axis, 1 in all, but got 0"),
        (lambda: PRODUCT.check(()), r"S\(0\) on axis 'dp' shards a dim that the shape \(\) does not have"),
        (lambda: BoxesForm.make({-1: []}), "ranks must be >= 0"),
        (lambda: BoxesForm.make({4: []}, world_size=3), "the job has only 3 ranks"),
        (lambda: BOXES.check((3, 3)), r"outside the shape \(3, 3\) \(rank 0"),
        (lambda: BoxesForm.make({0: [Box((0,), (2,)), Box((1,), (2,))]}).check((4,)), "share elements"),
        (lambda: FLAT.check((3, 3)), "5:12 is outside the 9 elements"),
        (lambda: FlatForm.make({0: (3, 2)}).check((4,)), "3:2 is outside"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(PlanError, match=message):
        make()
