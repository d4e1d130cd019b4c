"""Load plans: what every rank reads, listed for the rank that asks."""

from __future__ import annotations

import re

import pytest

from planners import (
    Box,
    CoverageError,
    FillItem,
    LayoutMismatchError,
    PlanError,
    ReadItem,
    TensorLayout,
    TensorSpec,
    View,
    concat,
    format_plan,
    fsdp,
    plan_reads,
)
from planners.plans import load
from tests.planners.states import state_of

W = TensorSpec("w", (4, 6), "float32")


ROWS, COLUMNS = TensorLayout(W, "dp=2", "S(0)"), TensorLayout(W, "tp=3", "S(1)")


def test_rows_to_columns():
    plan = plan_reads(state_of(ROWS), state_of(COLUMNS))

    assert plan.items(1) == (
        ReadItem("w", 0, Box((0, 0), (2, 6)), Box((0, 2), (2, 2)), Box((0, 0), (2, 2)), 16),
        ReadItem("w", 1, Box((2, 0), (2, 6)), Box((0, 2), (2, 2)), Box((2, 0), (2, 2)), 16),
    )
    assert [plan.bytes(rank) for rank in range(3)] == [32, 32, 32]
    assert plan.total_bytes == 96
    assert plan.items(1).nbytes == 32
    assert plan.items(1)[1].box == Box((2, 2), (2, 2))
    assert (plan.items(1)[0].saved_fqn, plan.items(1)[0].dims, plan.items(1)[0].part) == ("w", None, 0)
    assert str(plan.items(1)[0]) == "w: Box[0:2, 2:4] of Box[0:2, 0:6] by 0 -> Box[0:2, 0:2], 16 bytes"


def test_tensors_of_one_geometry_have_items_of_their_own_names():
    specs = [TensorSpec(name, (4, 6), "float32") for name in ("a", "b")]
    plan = plan_reads(
        state_of(*(TensorLayout(s, "dp=2", "S(0)") for s in specs)),
        state_of(*(TensorLayout(s, "dp=1", "R") for s in specs)),
    )

    assert [item.fqn for item in plan.items(0)] == ["a", "a", "b", "b"]
    assert plan.geometry_key("a") == plan.geometry_key("b")


def test_ranks_beyond_a_tensor_read_nothing_of_it():
    plan = plan_reads(state_of(ROWS), state_of(COLUMNS, world_size=5))

    assert plan.items(4) == ()
    assert plan.bytes(4) == 0


@pytest.mark.parametrize(
    ("shape", "nbytes"),
    [((), 4), ((0, 3), 0), ((1,), 4)],
)
def test_small_tensors_are_read_whole(shape, nbytes):
    spec = TensorSpec("s", shape, "float32")
    plan = plan_reads(state_of(TensorLayout(spec, "dp=2", "R")), state_of(TensorLayout(spec, "dp=3", "R")))

    assert [plan.items(rank).nbytes for rank in range(3)] == [nbytes] * 3


def test_a_cast_is_read_in_bytes_as_saved():
    wanted = TensorLayout(TensorSpec("w", (4, 6), "bfloat16"), "dp=1", "R")

    with pytest.raises(LayoutMismatchError, match="'w': is saved as float32, but the target layout has bfloat16"):
        plan_reads(state_of(ROWS), state_of(wanted))
    assert plan_reads(state_of(ROWS), state_of(wanted), allow_cast=True).bytes(0) == 96


def test_all_that_does_not_fit_is_named_at_once():
    others = [TensorSpec("w", (6, 4), "float32"), TensorSpec("layers.0.wqq", (2,), "float32")]
    saved = state_of(ROWS, TensorLayout(TensorSpec("layers.0.wq", (2,), "float32"), "dp=1", "R"))

    with pytest.raises(LayoutMismatchError) as raised:
        plan_reads(saved, state_of(*(TensorLayout(s, "dp=1", "R") for s in others)))
    assert "'w': is saved with shape [4, 6], but the target layout has [6, 4]" in str(raised.value)
    assert "'layers.0.wqq': is not saved: did you mean 'layers.0.wq'?" in str(raised.value)
    many = [TensorLayout(TensorSpec(f"x{i}", (2,), "float32"), "dp=1", "R") for i in range(25)]
    with pytest.raises(LayoutMismatchError) as raised:
        plan_reads(saved, state_of(*many))
    assert str(raised.value).startswith("25 of 25 target tensors do not match the saved state:\n    *: 25 names, ")
    assert re.search(r"\n  fix: .+$", str(raised.value))
    many = [TensorLayout(TensorSpec(f"{i}.x", (i,), "float32"), "dp=1", "R") for i in range(25)]
    with pytest.raises(LayoutMismatchError, match=r"'19\.x': is saved with .*\n    and 5 more\n"):
        plan_reads(
            state_of(*(TensorLayout(TensorSpec(f"{i}.x", (99,), "float32"), "dp=1", "R") for i in range(25))),
            state_of(*many),
        )


def test_a_hole_names_tensor_rank_and_region():
    holey = TensorLayout.from_boxes(W, {0: [Box((0, 0), (3, 6))]})

    with pytest.raises(CoverageError, match=r"no saved chunk holds element") as raised:
        plan_reads(state_of(holey), state_of(COLUMNS)).items(1)
    assert (raised.value.fqn, raised.value.rank, raised.value.box) == ("w", 1, Box((3, 2), (1, 2)))


def test_ranks_outside_are_refused():
    plan = plan_reads(state_of(ROWS), state_of(COLUMNS))

    for ask in (plan.items, plan.bytes, plan.fills, lambda rank: plan.with_items({rank: []})):
        with pytest.raises(PlanError, match="only ranks 0 to 2"):
            ask(3)


def test_listed_items_stand_in_for_derived_ones():
    plan = plan_reads(state_of(ROWS), state_of(COLUMNS))
    listed = plan.with_items({1: plan.items(1)[:1]})

    assert (listed.bytes(1), listed.items(0)) == (16, plan.items(0))
    assert listed != plan
    assert plan.with_items({}) == plan


def test_through_a_view_items_name_the_saved_tensor_and_how_its_dims_lie():
    q, k = (TensorSpec(name, (2, 6), "float32") for name in "qk")
    saved = state_of(TensorLayout(q, "dp=2", "S(0)"), TensorLayout(k, "dp=2", "S(0)"))
    view = concat("qk", [View.of(q), View.of(k)]).transpose().pad([(0, 1), (0, 0)], 9)
    wanted = state_of(TensorLayout(view.spec, "tp=2", "S(1)"))

    plan = plan_reads(saved, wanted, views=[view])

    row = Box((0, 0), (1, 6))
    first, second = plan.items(1)
    assert first == ReadItem("qk", 0, row, row, Box((0, 0), (6, 1)), 24, 0, "k", (1, 0))
    assert (second.chunk, second.target, second.saved_fqn) == (Box((1, 0), (1, 6)), Box((0, 1), (6, 1)), "k")
    assert plan.fills(1) == (FillItem("qk", Box((6, 0), (1, 2)), 9),)
    assert plan.bytes(1) == 48
    assert "of k by 0 with dims (1, 0)" in str(first)
    assert "k" in format_plan(plan)


def test_views_of_what_is_not_wanted_are_not_used():
    view = View.of(TensorSpec("other", (2,), "float32")).rename("more")

    assert plan_reads(state_of(ROWS), state_of(COLUMNS), views={"more": view}) == plan_reads(
        state_of(ROWS), state_of(COLUMNS)
    )


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (View.of(TensorSpec("gone", (4, 6), "float32")).rename("w"), "'w': takes from 'gone', which is not saved"),
        (View.of(W)[:2], r"'w': is made by a view with shape \[2, 6\], but the target layout has \[4, 6\]"),
        (
            View.of(TensorSpec("w", (8, 6), "float32"))[:4],
            r"'w': takes from 'w', which is saved with shape \[4, 6\], but the view has \[8, 6\]",
        ),
        (View.of(TensorSpec("w", (4, 6), "int32")), "is made by a view as int32, but the target layout has float32"),
    ],
)
def test_views_that_do_not_fit_are_named(view, message):
    with pytest.raises(LayoutMismatchError, match=message):
        plan_reads(state_of(ROWS), state_of(COLUMNS), views=[view])


def test_many_names_that_are_not_saved_are_refused_soon(monkeypatch):
    """Each suggestion compares all saved names: of 300,000, twenty took minutes."""
    asked = []
    monkeypatch.setattr(load, "did_you_mean", lambda *_: asked.append(1) or "")
    saved, wanted = (fsdp(2).layout([TensorSpec(f"{n}.{i}", (2,), "uint8") for i in range(20_000)]) for n in "ab")

    with pytest.raises(LayoutMismatchError, match=r"20000 of 20000 target tensors do not match"):
        plan_reads(saved, wanted)

    assert len(asked) == 5
