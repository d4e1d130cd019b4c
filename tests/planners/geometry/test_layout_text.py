"""Layouts in words: what the glossary promises, and that the order of axes is the one in which they shard."""

from __future__ import annotations

import doctest
import itertools
import math
import re
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from planners import Box, Mesh, PlanError, Shard, StateLayout, StridedShard, TensorLayout, TensorSpec
from planners.geometry import layout_text as words
from planners.geometry.layout_text import in_both_forms, in_words, legend, parse_layout, short_form

GLOSSARY = (Path(__file__).parents[3] / "docs/glossary.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([^`]+ on [^`]+)` \| (.*) \|$", GLOSSARY, re.MULTILINE)


def test_the_examples_of_the_module() -> None:
    assert doctest.testmod(words).failed == 0
    assert len(ROWS) == 8


@pytest.mark.parametrize(("short", "told"), ROWS)
def test_the_table_of_the_glossary(short: str, told: str) -> None:
    assert told.replace("`", "").startswith(in_words(parse_layout(short)))
    assert short_form(parse_layout(short)) == short


@pytest.mark.parametrize(
    ("short", "told"),
    [
        ("R on world=1", "unsharded"),
        ("S(0),S(1) on dp=4,tp=1", "dim 0 sharded over dp"),
        ("R,R on dp=2,tp=2", "replicated over dp and tp"),
        ("R,R,R on a=2,b=2,c=2", "replicated over a, b, and c"),
        ("S(0),R on dp.cp=4,tp=2", "replicated over tp; dim 0 sharded over dp and cp together"),
        ("_S(0, 3) on dp=2", "dim 0 sharded over dp within each of 3 parts"),
        ("B(1, 1+1+1+1+1),S(1) on tp=2,dp=2", "dim 1 sharded over tp within each of 5 blocks, then dp"),
        ("S(0) on dp=2@3,1", "dim 0 sharded over dp; on ranks 3, 1"),
        ("R on dp=1@5", "unsharded; on rank 5"),
        ("R,S(0) on tp=2,dp=2@0,2,1,3", "replicated over tp; dim 0 sharded over dp"),
        ("R,S(0) on tp=2,dp=2@4,6,5,7", "replicated over tp; dim 0 sharded over dp; on ranks 4, 5, 6, 7"),
        ("tp,dp: S(0),S(0) on dp=2,tp=2", "dim 0 sharded over tp, then dp"),
    ],
)
def test_what_else_occurs(short: str, told: str) -> None:
    assert in_words(parse_layout(short)) == told


@pytest.mark.parametrize(
    ("rows", "written", "told"),
    [
        (8, "_S(0, 2),S(0) on dp=2,tp=2", "tp,dp: S(0),S(0) on dp=2,tp=2"),
        (8, "S(0),S(0) on tp=2,dp=2@0,2,1,3", "tp,dp: S(0),S(0) on dp=2,tp=2"),
        (7, "S(0),S(0) on tp=2,dp=2@0,2,1,3", "tp,dp: S(0),S(0) on dp=2,tp=2"),
        (50, "_S(0, 2),S(0) on dp=2,tp=2", "tp,dp: S(0),S(0) on dp=2,tp=2"),  # uneven, but the same rows
        (7, "_S(0, 2),S(0) on dp=3,tp=2", "_S(0, 2),S(0) on dp=3,tp=2"),  # shards of 7 rows are not the same
        (8, "S(0),S(1) on tp=2,dp=2@0,2,1,3", "S(1),S(0) on dp=2,tp=2"),
        (8, "R,S(0) on tp=2,dp=2@4,6,5,7", "S(0),R on dp=2,tp=2@4,5,6,7"),
        (8, "S(0),R on dp=2,tp=2@0,3,1,2", "S(0),R on dp=2,tp=2@0,3,1,2"),
        (8, "R,S(0),S(1) on pp=1,dp=2,tp=1@1,0", "S(0) on dp=2@1,0"),
        (8, "R,_S(0, 2),S(0) on rep=2,dp=2,tp=2", "rep,tp,dp: R,S(0),S(0) on rep=2,dp=2,tp=2"),
    ],
)
def test_a_layout_has_one_short_form(rows: int, written: str, told: str) -> None:
    spec = TensorSpec("w", (rows, 4), "int8")
    layout = TensorLayout.of(spec, parse_layout(written))

    assert short_form(layout) == told
    again = TensorLayout.of(spec, parse_layout(told))
    ranks = range(layout.world_size)
    assert [again.boxes(rank) for rank in ranks] == [layout.boxes(rank) for rank in ranks]


def test_copies_are_said_over_the_axis_of_the_other_tensors() -> None:
    specs = [TensorSpec(name, (8,), "int8") for name in ("w", "norm")]
    forms = [parse_layout(text) for text in ("_S(0, 2),S(0) on dp=2,tp=2", "R,S(0) on replica=2,dp=2@0,2,1,3")]
    layout = StateLayout({spec.fqn: TensorLayout.of(spec, form) for spec, form in zip(specs, forms)})

    assert layout.described(["norm"], in_both_forms) == {
        "norm": "replicated over tp; dim 0 sharded over dp (S(0),R on dp=2,tp=2)"
    }
    alone = StateLayout({"norm": layout["norm"]})
    assert alone.described(["norm"], in_words) == {"norm": "replicated on 2 ranks; dim 0 sharded over dp"}


def test_what_has_no_mesh() -> None:
    spec = TensorSpec("w", (6, 4), "float32")

    def told(*boxes: Box) -> str:
        return in_words(TensorLayout.from_boxes(spec, {rank: [box] for rank, box in enumerate(boxes)}))

    assert told(Box((0, 0), (6, 4))) == "unsharded"
    assert told(Box((0, 0), (3, 4)), Box((3, 0), (3, 4))) == "dim 0 in 2 chunks"
    assert told(Box((0, 0), (1, 4)), Box((1, 0), (5, 4))) == "dim 0 in 2 chunks of different sizes"
    assert told(Box((0, 0), (3, 4)), Box((3, 0), (3, 2))) == "2 irregular chunks"
    assert in_words(TensorLayout.from_boxes(TensorSpec("w", (0, 4), "float32"), {0: []})) == "empty"
    flat = TensorLayout.from_flat_ranges(spec, {0: (0, 7), 1: (7, 24)})
    assert (in_words(flat), short_form(flat)) == ("ranges of the flattened tensor", "")


@given(st.data())
def test_axes_shard_in_the_order_of_the_words(data: st.DataObject) -> None:
    """The same axes, arranged in that order and sharding plainly, give every rank the same rows."""
    sizes = data.draw(st.lists(st.integers(2, 3), min_size=1, max_size=3))
    names = "abc"[: len(sizes)]
    placements = []
    for at in range(len(sizes)):
        later = sizes[at + 1 :]
        factors = {math.prod(chosen) for n in range(len(later) + 1) for chosen in itertools.combinations(later, n)}
        factor = data.draw(st.sampled_from(sorted(factors)))
        placements.append(Shard(0) if factor == 1 else StridedShard(0, factor))
    mesh = Mesh(list(zip(names, sizes)))
    given = TensorLayout(TensorSpec("w", (math.prod(sizes) * 6,), "int8"), mesh, placements)
    told = in_words(given).removeprefix("dim 0 sharded over ")
    if "within" in told:
        return
    order = told.split(", then ")
    turned = mesh.submesh(*order)
    assert sorted(order) == list(names)
    plain = TensorLayout(given.spec, turned, [Shard(0)] * len(sizes))
    assert [given.boxes(rank) for rank in range(mesh.size)] == [plain.boxes(rank) for rank in range(mesh.size)]


def test_the_legend_has_what_occurs() -> None:
    assert [sign for sign, _ in legend(["_S(0, 2),S(0) on dp=2,tp=2"])] == ["S(d)", "_S(d, n)", "on dp=4,tp=2"]
    assert [sign for sign, _ in legend(["_S(0, 2),R on dp.cp=2,tp=2@0,1,2,4"])] == [
        "_S(d, n)", "R", "on dp=4,tp=2", "dp.cp=8", "@0,2,1,3",
    ]  # fmt: skip
    assert legend([""]) == []


@pytest.mark.parametrize(
    "text", ["", "S(0)", "fsdp=4", "S(0) on dp=2,tp=2", "X on dp=2", "S(0) on dp=0", "a: S(0) on dp=2"]
)
def test_what_is_no_short_form_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        parse_layout(text)


def test_axes_of_one_rank_are_not_shown() -> None:
    """They say nothing of who holds what. In JSON, `mesh` and `placements` have them."""
    shown = {}
    for text in (
        "S(0),S(0) on fsdp=3,tp=1",
        "S(0),S(1) on fsdp=3,tp=1",
        "R,S(0),R on dp=1,fsdp=3,tp=1",
        "tp,fsdp: S(0),S(0) on fsdp=3,tp=1",
    ):
        layout = TensorLayout.of(TensorSpec("w", (6, 6), "float32"), parse_layout(text))
        shown[in_both_forms(layout)] = text
        assert short_form(layout) == "S(0) on fsdp=3"
    assert list(shown) == ["dim 0 sharded over fsdp (S(0) on fsdp=3)"]

    for text, told in (
        ("S(0),R on fsdp=2,tp=1@4,5", "dim 0 sharded over fsdp; on ranks 4, 5 (S(0) on fsdp=2@4,5)"),
        ("R,R on dp=1,tp=1", "unsharded"),
        ("_S(0, 2),R,S(0) on dp=2,x=1,tp=2", "dim 0 sharded over tp, then dp (tp,dp: S(0),S(0) on dp=2,tp=2)"),
    ):
        assert in_both_forms(TensorLayout.of(TensorSpec("w", (8, 6), "float32"), parse_layout(text))) == told
