"""Layouts of one tensor and of a whole state."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.distributed import tensor as dtensor

from planners import (
    Box,
    Mesh,
    PlanError,
    Replicate,
    Shard,
    StateLayout,
    TensorLayout,
    TensorSpec,
    Topology,
    ddp,
    fsdp,
    pipelined,
    plan_reads,
    plan_transfers,
    schedule,
)

SPEC = TensorSpec("w", (7, 4), "bfloat16")
ROWS = TensorLayout(SPEC, "dp=2", "S(0)")


def test_a_spec_knows_its_bytes():
    assert (SPEC.itemsize, SPEC.numel, SPEC.nbytes) == (2, 28, 56)
    assert TensorSpec("s", (), "float32").numel == 1


def test_text_and_values_make_the_same_layout():
    assert TensorLayout(SPEC, Mesh({"dp": 2}), [Shard(0)]) == ROWS
    assert ROWS.mesh == Mesh({"dp": 2})
    assert ROWS.placements == (Shard(0),)
    assert TensorLayout(SPEC, "dp=2,tp=2", "S(0),R").placements == (Shard(0), Replicate())


def test_boxes_are_in_global_coordinates_and_local_order():
    assert ROWS.boxes(0) == (Box((0, 0), (4, 4)),)
    assert ROWS.boxes(1) == (Box((4, 0), (3, 4)),)
    fused = TensorLayout(TensorSpec("qkv", (8, 2), "float32"), "tp=2", "B(0, 4+2+2)")
    assert fused.boxes(1) == (Box((2, 0), (2, 2)), Box((5, 0), (1, 2)), Box((7, 0), (1, 2)))
    assert (ROWS.numel(1), ROWS.nbytes(1), ROWS.numels().tolist()) == (12, 24, [16, 12])


def test_other_forms_say_that_they_are_no_product():
    boxes = TensorLayout.from_boxes(SPEC, {1: [Box.full((7, 4))]})
    flat = TensorLayout.from_flat_ranges(SPEC, {0: (0, 10), 1: (10, 28)})

    assert boxes.mesh is boxes.placements is boxes.product is flat.product is None
    assert flat.boxes(0) == (Box((0, 0), (2, 4)), Box((2, 0), (1, 2)))
    assert boxes.boxes(0) == ()
    assert boxes.world_size == 2


def test_layouts_are_values():
    assert pickle.loads(pickle.dumps(ROWS)) == ROWS
    assert {ROWS: 1}[TensorLayout(SPEC, "dp=2", "S(0)")] == 1
    assert TensorLayout(SPEC, "dp=2", "S(1)") != ROWS
    with pytest.raises(AttributeError, match="frozen"):
        ROWS.spec = SPEC


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TensorSpec("w", (-1,), "float32"), r"sizes must be >= 0, got shape \(-1,\) \(tensor 'w'\)"),
        (lambda: TensorSpec("w", (1,) * 64, "float32"), r"at most 63 dims, got 64 \(tensor 'w'\)"),
        (lambda: TensorSpec("w", (1 << 31, 1 << 30), "float32"), r"fewer than 2\*\*63 bytes, got shape"),
        (lambda: TensorSpec("w", (1,), "float23"), "unknown dtype 'float23': did you mean 'float32'"),
        (lambda: TensorSpec("w", (1,), torch.float32), r"torch\.float32: did you mean 'float32'\? \(tensor 'w'\)"),
        (lambda: TensorSpec("w", (1,), "q"), "unknown dtype 'q'; known: bool, "),
        (lambda: plan_reads(StateLayout({"w": ROWS}), "fsdp=4"), "wanted must be a StateLayout, .* 'fsdp=4'"),
        (lambda: plan_reads({"w": ROWS}, StateLayout({"w": ROWS})), "saved must be a StateLayout, .* got {'w'"),
        (lambda: plan_transfers(StateLayout({"w": ROWS}), "fsdp=4"), "after must be a StateLayout, .* 'fsdp=4'"),
        (lambda: schedule(StateLayout({"w": ROWS})), "schedule takes a transfer plan, got StateLayout"),
        (lambda: fsdp(2).layout(StateLayout({"w": ROWS})), "takes TensorSpecs, such as state.specs, got TensorLayout"),
        (lambda: pipelined(fsdp(2), 0, 0), "0 layers do not fill the 0 stages"),
        (lambda: TensorSpec("w", (2.5,), "float32"), r"'float' object .* an integer \(tensor 'w'\)"),
        (lambda: TensorSpec("w", "34", "float32"), "'str' object .* an integer"),
        (lambda: TensorLayout(SPEC, "dp=2", ["S(0)"]), "placements are those of reshard.planners, or .* 'S"),
        (lambda: TensorLayout(SPEC, "dp=2", [dtensor.Shard(0)]), r"those of reshard.planners, .* got Shard\(dim=0\)"),
        (
            lambda: ddp(1).layout([TensorSpec(name, (1 << 62,), "uint8") for name in "ab"]),
            r"a state must have fewer than 2\*\*63 bytes, got 9,223,372,036,854,775,808",
        ),
        (lambda: Topology.parse("dp=2").layout([SPEC]), "There are no rules. Add a last rule"),
        (lambda: TensorSpec(3, (1,), "float32"), "name of a tensor must be a string"),
        (
            lambda: TensorLayout(SPEC, "dp=2", "S(2)"),
            r"shards a dim that the shape \(7, 4\) does not have \(tensor 'w'\)",
        ),
        (lambda: TensorLayout(SPEC, "dp=2,tp=2", "S(0)"), "needs one placement for each axis, 2 in all, but got 1"),
        (lambda: TensorLayout(SPEC, "dp=2", "Z(0)"), "unknown placement 'Z"),
        (lambda: TensorLayout(SPEC, "tp=2", "B(0, 4+4)"), "add up to 8, but the dim has 7 elements"),
        (lambda: ROWS.boxes(2), r"only ranks 0 to 1 \(tensor 'w', rank 2\)"),
        (lambda: ROWS.boxes(-1), "only ranks 0 to 1"),
        (lambda: TensorLayout.from_boxes(SPEC, {0: [Box((6, 0), (2, 4))]}), "outside the shape"),
        (lambda: TensorLayout.from_boxes(SPEC, {0: [Box((0,), (2,))]}), "outside the shape"),
        (lambda: TensorLayout.from_flat_ranges(SPEC, {0: (0, 29)}), "outside the 28 elements"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(PlanError, match=message):
        make()


@pytest.fixture
def state():
    tensors = [
        TensorLayout(TensorSpec("a", (7, 4), "bfloat16"), "dp=2", "S(0)"),
        TensorLayout(TensorSpec("b", (7, 4), "float16"), "dp=2", "S(0)"),
        TensorLayout(TensorSpec("c", (7, 4), "float32"), "dp=2", "S(0)"),
        TensorLayout(TensorSpec("d", (7,), "float32"), "dp=4", "R"),
    ]
    return StateLayout({t.fqn: t for t in tensors})


def test_a_state_adds_up(state):
    assert state.world_size == 4
    assert state.nbytes == 56 + 56 + 112 + 28
    assert state.rank_bytes().tolist() == [32 + 32 + 64 + 28, 24 + 24 + 48 + 28, 28, 28]
    assert state.parts("a", 3) == ()  # beyond the tensor's own ranks, but of the job
    assert list(state.geometries().values()) == [["a", "b"], ["c"], ["d"]]  # a and b have items of one size
    assert state.specs["c"].dtype == "float32"


def test_a_digest_is_of_what_a_state_is_and_not_of_its_order(state):
    turned = StateLayout(dict(reversed(list(state.items()))))

    assert turned.digest() == state.digest()
    assert turned == state
    others = [
        StateLayout(dict(state), world_size=5),
        StateLayout({**state, "d": TensorLayout(state["d"].spec, "dp=4", "S(0)")}),
        StateLayout({**state, "b": TensorLayout(TensorSpec("b", (7, 4), "bfloat16"), "dp=2", "S(0)")}),
        StateLayout({fqn: layout for fqn, layout in state.items() if fqn != "a"}),
    ]
    assert len({other.digest() for other in others} | {state.digest()}) == 5


def test_states_that_cannot_be_are_refused(state):
    with pytest.raises(PlanError, match="under the key 'x' is of the tensor 'a'"):
        StateLayout({"x": state["a"]})
    with pytest.raises(PlanError, match="need 4 ranks, but world_size is 3"):
        StateLayout(dict(state), world_size=3)
    with pytest.raises(PlanError, match=r"only ranks 0 to 3 \(tensor 'a', rank 4\)"):
        state.parts("a", 4)


def test_axes_that_cut_nothing():
    def state(**texts):
        spec = {name: TensorSpec(name, (6, 4), "float32") for name in texts}
        return StateLayout({name: TensorLayout(spec[name], *text.split(" ")) for name, text in texts.items()})

    assert state(a="dp=2,tp=2 S(0),R", b="dp=2,tp=2 R,R").unsharded_axes() == {"tp": ("a", "b")}
    assert state(a="dp=2,tp=2 S(0),R", b="dp=2,tp=2 R,S(1)").unsharded_axes() == {}
    assert state(a="dp=2,tp=1 S(0),R").unsharded_axes() == {}  # one rank has nobody to copy for
    # axes that act as one cut for both
    assert state(a="dp.cp=4 S(0)", b="dp=2,cp=2 R,R", c="dp=2,tp=2 R,R").unsharded_axes() == {"tp": ("c",)}
    boxes = TensorLayout.from_boxes(TensorSpec("w", (2,), "float32"), {0: [Box((0,), (2,))]})
    assert StateLayout({"w": boxes}).unsharded_axes() == {}
