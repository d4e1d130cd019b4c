"""How the local tensors of a rank are found for its layout: one each, one flat tensor, several boxes in one."""

from __future__ import annotations

import pytest
import torch

import reshard
from planners import Box, TensorLayout, TensorSpec, View, concat
from reshard.api.transfer_memory import part_tensors
from reshard.errors import KeyMismatchError, LayoutError
from reshard.live.tensors import LiveTensor
from reshard.ranks.global_layout import describe, join_layouts

SPEC = TensorSpec("w", (6, 4), "float32")
WHOLE = torch.arange(24.0).view(6, 4)
ROWS = [Box((0, 0), (2, 4)), Box((4, 0), (1, 4))]
CORNERS = [Box((0, 0), (2, 3)), Box((5, 1), (1, 2))]


def parts(layout: TensorLayout, *local: torch.Tensor) -> list[list[list[float]]]:
    return [part.tolist() for part in part_tensors("w", local, layout, 0)]


def test_several_boxes_of_a_rank_may_lie_in_one_tensor_side_by_side_or_flattened():
    rows, corners = (TensorLayout.from_boxes(SPEC, {0: boxes}) for boxes in (ROWS, CORNERS))
    wanted = [WHOLE[box.slices].tolist() for box in ROWS]

    assert parts(rows, torch.cat([WHOLE[box.slices] for box in ROWS])) == wanted
    assert parts(rows, torch.cat([WHOLE[box.slices].reshape(-1) for box in ROWS])) == wanted
    assert parts(rows, *(WHOLE[box.slices] for box in ROWS)) == wanted
    flat = torch.cat([WHOLE[box.slices].reshape(-1) for box in CORNERS])
    assert parts(corners, flat) == [WHOLE[box.slices].tolist() for box in CORNERS]


def test_boxes_side_by_side_along_columns_are_views():
    columns = TensorLayout.from_boxes(SPEC, {0: [Box((0, 3), (6, 1)), Box((0, 0), (6, 2))]})
    local = torch.zeros(6, 3)

    for part, box in zip(part_tensors("w", [local], columns, 0), columns.boxes(0), strict=True):
        part.copy_(WHOLE[box.slices])

    assert torch.equal(local, WHOLE[:, [3, 0, 1]])


@pytest.mark.parametrize(
    "local", [torch.zeros(4, 4), torch.zeros(13), torch.zeros(24)[::3]], ids=["shape", "number", "strides"]
)
def test_boxes_that_do_not_fit_the_tensor_are_refused_with_what_would(local):
    layout = TensorLayout.from_boxes(SPEC, {0: CORNERS})

    words = r"(rank 0 passed its|by the layout, rank 0 should hold boxes of \[2, 3\] and \[1, 2\].*\[8\])"
    with pytest.raises(LayoutError, match=rf"tensor 'w': {words}"):
        part_tensors("w", [local], layout, 0)


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_layout_for_a_key_that_no_rank_has_is_refused(side):
    """It was ignored: the tensor that was meant counted as full."""
    layout = TensorLayout.from_boxes(SPEC, {0: [Box((0, 0), (6, 4))]})
    target = {"w": torch.zeros(6, 4)}
    with pytest.raises(LayoutError, match=rf"{side}_layouts has 'ww', but the {side} has no tensor of this key.*'w'"):
        reshard.redistribute({"w": WHOLE}, target, **{f"{side}_layouts": {"ww": layout}})
    assert not target["w"].any()


def test_boxes_are_moved_and_compared_in_a_single_process():
    layout = TensorLayout.from_boxes(SPEC, {0: [*ROWS, Box((2, 0), (2, 4)), Box((5, 0), (1, 4))]})
    target = {"w": torch.zeros(6, 4)}

    reshard.redistribute({"w": WHOLE}, target, target_layouts={"w": layout}, check=True)

    assert torch.equal(target["w"], WHOLE[[0, 1, 4, 2, 3, 5]])
    back = {"w": torch.zeros(6, 4)}
    reshard.redistribute(target, back, source_layouts={"w": layout}, check=True)
    assert torch.equal(back["w"], WHOLE)


def test_a_source_is_only_read_so_it_may_be_a_mapping_that_cannot_be_changed():
    from types import MappingProxyType

    target = {"w": torch.zeros(6, 4), "step": 0}

    reshard.redistribute(MappingProxyType({"w": WHOLE, "step": 3}), target)

    assert torch.equal(target["w"], WHOLE)
    assert target["step"] == 3


def test_a_target_whose_value_cannot_be_replaced_is_refused_before_anything_moves():
    from types import MappingProxyType

    target = {"w": torch.zeros(6, 4), "fixed": MappingProxyType({"step": 0, "lr": torch.zeros(())})}

    with pytest.raises(reshard.ReshardError, match="step"):
        reshard.redistribute({"w": WHOLE, "fixed": {"step": 3, "lr": torch.ones(())}}, target)

    assert not target["w"].any()


def test_flat_tensors_stay_flat_in_a_group_of_some_of_the_ranks():
    """Of ranks 0 to 3, 1 and 3 take part, and hold all that there is."""
    layout = TensorLayout.from_flat_ranges(SPEC, {0: (0, 0), 1: (0, 7), 2: (7, 7), 3: (7, 24)})
    described = [
        (describe({"w": LiveTensor("w", torch.zeros(size))}, {"w": layout}), [rank]) for rank, size in ((1, 7), (3, 17))
    ]

    joined = join_layouts(described)

    assert joined["w"] == TensorLayout.from_flat_ranges(SPEC, {1: (0, 7), 3: (7, 24)}, 4)


def test_empty_boxes_are_local_tensors_in_a_group_of_some_of_the_ranks_too():
    boxes = [Box((0, 0), (4, 4)), Box((4, 2), (0, 2)), Box((4, 0), (2, 4))]
    layout = TensorLayout.from_boxes(SPEC, {0: [], 1: boxes})
    described = describe({"w": LiveTensor("w", WHOLE.reshape(-1))}, {"w": layout})

    joined = join_layouts([(described, [1])])

    assert joined["w"].parts(1) == layout.parts(1)
    assert [tuple(t.shape) for t in part_tensors("w", [WHOLE.reshape(-1)], joined["w"], 1)] == [(4, 4), (0, 2), (2, 4)]


def test_targets_that_overlap_are_refused_before_anything_moves():
    memory, source = torch.zeros(6), {"a": torch.ones(4), "b": torch.full((4,), 2.0)}

    with pytest.raises(LayoutError, match="'a' and 'b' overlap"):
        reshard.redistribute(source, {"a": memory[:4], "b": memory[2:]})
    with pytest.raises(LayoutError, match="'a' has several elements at one memory address"):
        reshard.redistribute(source, {"a": memory[:1].expand(4)}, strict=False)
    assert not memory.any()


def test_columns_of_one_memory_and_tied_targets_are_filled():
    memory, values = torch.zeros(2, 4), torch.arange(8.0).view(2, 4)
    source = {"a": values[:, :2].clone(), "b": values[:, 2:].clone(), "c": values[:, 2:].clone()}

    reshard.redistribute(source, {"a": memory[:, :2], "b": memory[:, 2:]}, strict=False)
    assert torch.equal(memory, values)
    memory.zero_()
    reshard.redistribute(source, {"b": memory[:, 2:], "c": memory[:, 2:]}, strict=False, mapping={"c": "b"})
    assert torch.equal(memory[:, 2:], values[:, 2:])


def test_a_model_with_tied_weights_is_moved_into_another_one():
    w, target = torch.arange(8.0), torch.zeros(8)
    reshard.redistribute({"embed": w, "head": w}, {"embed": target, "head": target}, check=True)
    assert torch.equal(target, w)
    with pytest.raises(KeyMismatchError, match="map both to the same source"):
        reshard.redistribute({"embed": w, "head": w.clone()}, {"embed": target, "head": target})


@pytest.mark.parametrize("delta", [False, True])
def test_a_tensor_that_is_its_own_source_in_the_same_layout_stays(delta):
    boxes = TensorLayout.from_boxes(SPEC, {0: [*ROWS, Box((2, 0), (2, 4)), Box((5, 0), (1, 4))]})
    layouts = {"source_layouts": {"boxes": boxes}, "target_layouts": {"boxes": boxes}}
    own = {"boxes": WHOLE.clone(), "columns": WHOLE.clone().T, "one": torch.tensor(3.0)}
    source, target = ({**own, "other": torch.full((2,), value)} for value in (1.0, 0.0))

    reshard.prepare(source, target, **layouts, delta=delta).run()

    assert torch.equal(own["boxes"], WHOLE)
    assert torch.equal(own["columns"], WHOLE.T)
    assert own["one"] == 3
    assert target["other"].tolist() == [1, 1]


def test_memory_in_which_elements_change_places_or_dtypes_is_not_its_own_source():
    square, rows = torch.arange(9.0).view(3, 3), View.of(TensorSpec("w", (3, 3), "float32"))
    turned = rows.transpose().rename("w")
    shifted = concat("w", [rows.crop(Box((1, 0), (2, 3))), rows.crop(Box((0, 0), (1, 3)))])
    whole = TensorLayout.from_boxes(turned.spec, {0: [Box((0, 0), (1, 3)), Box((1, 0), (2, 3))]})
    layouts = {"source_layouts": {"w": whole}, "target_layouts": {"w": whole}}

    for view in (turned, shifted):
        for options in ({}, layouts):
            with pytest.raises(LayoutError, match="shares memory"):
                reshard.redistribute({"w": square}, {"w": square}, views=[view], **options)
    with pytest.raises(LayoutError, match="shares memory"):
        reshard.redistribute({"w": square.view(torch.int32)}, {"w": square}, dtype_policy="cast")
    assert torch.equal(square, torch.arange(9.0).view(3, 3))
