"""Placements and their text, which is DTensor's own."""

from __future__ import annotations

import pytest

from planners import BlockShard, PlanError, Replicate, Shard, StridedShard
from planners.geometry.mesh import parse_placement, parse_placements

ALL = [Replicate(), Shard(3), StridedShard(0, 2), BlockShard(1, [4, 0, 2])]


@pytest.mark.parametrize("placement", ALL)
def test_text_is_read_back(placement):
    assert parse_placement(str(placement)) == placement


@pytest.mark.parametrize(
    ("text", "placement"),
    [
        ("Shard(dim=1)", Shard(1)),
        (" S ( 1 ) ", Shard(1)),
        ("Replicate()", Replicate()),
        ("_StridedShard(dim=0, split_factor=4)", StridedShard(0, 4)),
        ("_StridedShard(dim=0, sf=4)", StridedShard(0, 4)),
        ("B(0, 4+2+2)", BlockShard(0, (4, 2, 2))),
    ],
)
def test_longer_forms_are_read_too(text, placement):
    assert parse_placement(text) == placement


@pytest.mark.parametrize(
    ("text", "placements"),
    [
        ("S(0),R", (Shard(0), Replicate())),
        ("(Shard(dim=0), Replicate())", (Shard(0), Replicate())),
        ("_S(0, 2),S(0)", (StridedShard(0, 2), Shard(0))),
        ("", ()),
        (" R ", (Replicate(),)),
    ],
)
def test_lists_are_separated_by_commas(text, placements):
    assert parse_placements(text) == placements


@pytest.mark.parametrize("text", ["Z(0)", "S", "S(-1)", "S(a)", "Partial()", "_S(0)", "B(0)", "S(0) R"])
def test_unknown_text_is_refused(text):
    with pytest.raises(PlanError, match="unknown placement"):
        parse_placements(text)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shard(-1), "integer >= 0, got -1"),
        (lambda: Shard(True), "integer >= 0, got True"),
        (lambda: StridedShard(0, 0), "integer >= 1, got 0"),
        (lambda: BlockShard(0, []), "one or more sizes"),
        (lambda: BlockShard(0, [2, -1]), "one or more sizes"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(PlanError, match=message):
        make()
