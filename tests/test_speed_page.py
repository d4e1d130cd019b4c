"""The page of figures is what its formatter makes of the figures that were kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.__main__ import ON_REQUEST, ON_THE_PAGE, on_the_page
from benchmarks.goals import Goal, table
from benchmarks.page import RESULTS, SPEED, Results, Row, filled, merged

ROW = Row("load", "columns", "s", (1.0, 2.0, 4.0), {"DCP": (3.0, 8.0, 8.0)}, (0.5, 0.5, 2.0))


def test_the_page_shows_the_figures_that_were_kept() -> None:
    """`python -m benchmarks --again --write` makes it so."""
    results = Results.from_json(RESULTS.read_text())

    assert filled(SPEED.read_text(), on_the_page(results)) == SPEED.read_text()
    assert results.to_json() == RESULTS.read_text()
    assert set(results.sections) == set(ON_THE_PAGE + ON_REQUEST)


def test_the_readme_has_the_page_s_figures() -> None:
    """Whoever measures anew puts them there: the row is the one beside the words."""
    rows = {(row.what, row.unit): row.cells() for row in Results.from_json(RESULTS.read_text()).rows}
    columns, copies = "rows by 4 to columns by 8", "rows by 4 to copies on all"
    _, _, ours, peers, *_ = rows[columns, "bytes a byte"]
    columns_ratio, copies_ratio = (rows[what, "processor s"][5].removesuffix(" DCP") for what in (columns, copies))
    readme = (SPEED.parents[1] / "README.md").read_text()

    assert f"{columns} | {peers.removeprefix('DCP ')} | {ours} |" in readme
    assert f"processor time of all ranks | {columns_ratio} times as much |" in readme
    assert f"| {copies} ranks | each rank reads everything: {copies_ratio} times as much |" in readme


def test_a_row_tells_ratios_of_the_same_rounds_and_how_far_apart_they_are() -> None:
    cells = ("columns", "s", "2", "DCP 8", "0.5", "3 (2 to 4) DCP", "0.5 (0.25 to 0.5)", "4.00")

    assert ROW.cells() == cells
    assert Results("here", (ROW,)).table("load").endswith(f"| {' | '.join(cells)} |")


def test_a_peer_that_is_not_installed_is_named() -> None:
    row = Row("peers", "save", "s", (2.0,), {"Orbax": (), "DCP": (4.0,)})

    assert row.cells()[3:6] == ("Orbax not installed, DCP 4", "", "2 DCP")
    assert Results.from_json(Results("here", (row,)).to_json()).rows == (row,)


def test_rounds_that_are_missing_and_places_that_are_missing_are_refused() -> None:
    with pytest.raises(ValueError, match="load: columns: a figure of each round"):
        Row("load", "columns", "s", (1.0, 2.0), {"DCP": (3.0,)})
    with pytest.raises(ValueError, match="places for where; there are where, load"):
        filled("<!-- measured: where -->\n<!-- end -->", Results("here", (ROW,)).parts())


def test_sections_that_are_measured_again_take_the_place_of_the_old_ones() -> None:
    other, again = replace(ROW, section="save"), replace(ROW, what="rows")
    kept = Results("here", (ROW, other))

    assert merged(kept, Results("here", (again,)), ("load", "save")) == Results("here", (again, other))
    assert merged(kept, Results("there", (again, other)), ("load", "save")) == Results("there", (again, other))
    with pytest.raises(ValueError, match="measured on here, this on there"):
        merged(kept, Results("there", (again,)), ("load", "save"))


@pytest.mark.parametrize(
    ("against", "wanted", "cells"),
    [
        ("DCP", 2, ("3", "2", "in every round")),
        ("DCP", 3, ("3", "2", "in the median")),
        ("floor", 0.9, ("0.5", "0.25", "no")),
        ("limit", 4, ("2", "4", "in every round")),
        ("limit", 3, ("2", "4", "in the median")),
    ],
)
def test_a_goal_says_whether_it_was_reached(against: str, wanted: float, cells: tuple[str, ...]) -> None:
    goal = Goal("load", "columns", "s", against, wanted)

    middle, end, verdict = cells
    assert table((ROW,), (goal,)).endswith(f"| {middle} | {end} | {verdict} |")


def test_of_many_rows_the_worst_is_told_and_a_goal_without_a_row_is_refused() -> None:
    worse = replace(ROW, what="columns by 8", ours=(4.0, 4.0, 4.0))

    assert "| columns by 8, s: the worst of these | DCP | 1 | 2 | 0.75 | in the median |" in table(
        (ROW, worse), (Goal("load", "col*", "s", "DCP", 1),)
    )
    with pytest.raises(ValueError, match="a goal names load: rows"):
        table((ROW,), (Goal("load", "rows", "s", "DCP", 1),))
