"""JSON of meshes, layouts, plans, views and topologies: what is read back, and what is refused."""

from __future__ import annotations

import json

import pytest

from planners import (
    Box,
    CodecError,
    Mesh,
    StateLayout,
    TensorLayout,
    TensorSpec,
    View,
    concat,
    dumps,
    fsdp_tp,
    loads,
    pipelined,
    plan_reads,
    plan_writes,
)
from planners.geometry.layout import ProductForm
from planners.plans.codec import from_json, to_json

W = TensorSpec("w", (4, 6), "float32")
BOXES = TensorLayout.from_boxes(W, {0: [Box((0, 0), (4, 2))], 1: [Box((0, 2), (4, 4))]}, 3)
FLAT = TensorLayout.from_flat_ranges(W, {0: (0, 10), 2: (10, 24)})
ROWS = TensorLayout(W, "dp=2@3,1", "S(0)")
STATE = StateLayout({"w": ROWS, "x": TensorLayout(TensorSpec("x", (), "int64"), "dp=2@3,1", "R")}, world_size=9)
WANTED = StateLayout({"w": TensorLayout(W, "tp=2", "_S(1, 2)")})
PLAN = plan_reads(STATE, WANTED)
VIEW = concat("v", [View.of(W), View.of(TensorSpec("u", (4, 6), "float32"))], 1).transpose().pad([(0, 1), (0, 0)], 2.5)
VIEWED = plan_reads(
    StateLayout({name: TensorLayout(TensorSpec(name, (4, 6), "float32"), "dp=2", "S(0)") for name in "wu"}),
    StateLayout({"v": TensorLayout(VIEW.spec, "tp=2", "S(1)")}),
    views=[VIEW],
)
ALL = {
    "mesh": Mesh({"dp": 2}, [5, 1]),
    "product": ROWS,
    "boxes": BOXES,
    "flat": FLAT,
    "state": STATE,
    "load plan": PLAN,
    "listed": PLAN.with_items({1: PLAN.items(1)}),
    "viewed": VIEWED,
    "viewed and listed": VIEWED.with_items({0: VIEWED.items(0)}),
    "save plan": plan_writes(STATE, divide_above_bytes=5, ranks_per_host=2),
    "listed save plan": plan_writes(STATE).with_items({0: plan_writes(STATE).items(0)}),
    "view": VIEW,
    "topology": pipelined(fsdp_tp(2, 2), 2, 4),
}


@pytest.mark.parametrize("value", ALL.values(), ids=ALL.keys())
def test_what_is_written_is_read_back(value):
    again = loads(dumps(value))

    assert again == value
    assert type(again) is type(value)
    assert dumps(again) == dumps(value)
    assert loads(dumps(value, indent=2).encode()) == value
    assert from_json(to_json(value)) == value


def test_layouts_share_their_forms_and_views_their_geometry():
    many = StateLayout(
        {f"w{i}": TensorLayout(TensorSpec(f"w{i}", (4, 6), "float32"), "dp=2", "S(0)") for i in range(50)}
    )
    assert len(to_json(many)["forms"]) == 1
    views = [View.of(TensorSpec(f"w{i}", (4, 6), "float32")).transpose().rename(f"t{i}") for i in range(50)]
    wanted = StateLayout({view.spec.fqn: TensorLayout(view.spec, "dp=2", "S(0)") for view in views})
    assert len(to_json(plan_reads(many, wanted, views=views))["views"]["geometries"]) == 1


def test_a_form_that_tensors_share_is_written_once_for_a_digest(monkeypatch):
    """On 16,384 ranks in an order of their own, 3,411 tensors took most of a minute."""
    told = []
    monkeypatch.setattr(ProductForm, "__str__", lambda form: told.append(form) or "form")
    form = TensorLayout(W, "dp=2@3,1", "S(0)").form

    StateLayout({n: TensorLayout.of(TensorSpec(n, (4, 6), "float32"), form) for n in "abc"}).digest()

    assert len(told) == 1


def test_the_json_of_a_large_layout_is_small():
    """3,411 tensors on 16,384 ranks: names, shapes and four forms."""
    form = TensorLayout(W, "dp=2048,tp=8", "S(0),S(1)").form
    names = [f"optim.state.layers.{i}.attention.wq.weight.exp_avg" for i in range(3411)]
    big = StateLayout({name: TensorLayout.of(TensorSpec(name, (16384, 53248), "float32"), form) for name in names})

    assert len(dumps(big)) < 1 << 20
    assert loads(dumps(big)) == big


def edited(value, change):
    data = json.loads(dumps(value))
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "the key 'reshard' is missing"),
        ('{"a": 1}', "the key 'reshard' is missing"),
        (edited(STATE, lambda d: d.update(version=2)), "of version 2; this library reads version 1"),
        (edited(STATE, lambda d: d.pop("version")), "of version None"),
        (edited(STATE, lambda d: d.update(reshard="soup")), "unknown kind 'soup'"),
        (edited(STATE, lambda d: d.pop("forms")), "malformed or was edited"),
        (edited(STATE, lambda d: d["tensors"]["w"].__setitem__(2, 7)), "form 7 of 2 does not exist"),
        (edited(STATE, lambda d: d["tensors"]["w"].__setitem__(1, [4, -6])), "malformed or was edited"),
        (edited(ROWS, lambda d: d["form"].update(placements="Z(0)")), "unknown placement"),
        (edited(ALL["mesh"], lambda d: d.update(mesh="dp=3@5,1")), "has 3 ranks, but 2 were given"),
        (edited(PLAN, lambda d: d["saved"].update(world_size=10)), "the digests differ"),
        (edited(ALL["listed"], lambda d: d["items"]["1"].pop()), "proof of this .*plan failed: 'w', rank 1"),
        (edited(ALL["listed"], lambda d: d["items"]["1"][0][6].__setitem__(0, 1)), "the proof of this .* failed"),
        (edited(VIEWED, lambda d: d["views"]["geometries"][0]["patches"].pop()), "do not add up"),
        (
            edited(ALL["viewed and listed"], lambda d: d["items"]["0"][0].__setitem__(10, "u")),
            "the proof of this .* failed",
        ),
        (edited(ALL["save plan"], lambda d: d["layout"]["tensors"].pop("x")), "the digests differ"),
        (edited(ALL["topology"], lambda d: d["rules"][0].__setitem__(1, "cp: S(0)")), "names the axis 'cp'"),
    ],
)
def test_texts_that_do_not_hold_together_are_refused(text, message):
    with pytest.raises(CodecError, match=message):
        loads(text)


def test_a_view_edited_so_that_it_still_adds_up_is_another_plan():
    """Views are part of what a plan is for; a digest of the layouts alone would not notice."""
    text = edited(VIEWED, lambda d: d["views"]["geometries"][0]["fills"][0].__setitem__(2, 3.5))

    with pytest.raises(CodecError, match="the digests differ"):
        loads(text)


def test_other_values_have_no_json_form():
    with pytest.raises(CodecError, match="a set cannot be serialized"):
        dumps({1})
