"""The pages with figures are what their formatter makes of the stored results."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.__main__ import ORDER, on_the_page, summary
from benchmarks.goals import Goal, table
from benchmarks.page import README, RESULTS, SPEED, TABLES, Results, Row, filled, merged, with_figures

ROW = Row("load", "columns", "s", (1.0, 2.0, 4.0), {"DCP": (3.0, 8.0, 8.0)}, (0.5, 0.5, 2.0))


def test_the_pages_show_the_stored_results() -> None:
    """Otherwise, run `python -m benchmarks --again --write`."""
    results = Results.from_json(RESULTS.read_text())

    assert filled(TABLES.read_text(), on_the_page(results)) == TABLES.read_text()
    assert summary(SPEED.read_text(), results) == SPEED.read_text()
    assert SPEED.read_text().count("\nload: ") == 2
    assert results.to_json() == RESULTS.read_text()
    assert set(results.sections) <= set(ORDER)


def test_tables_that_were_not_measured_say_so() -> None:
    parts = on_the_page(Results("here", ()))

    assert parts["where"] == "here"
    assert "Not measured there" in parts["cold"]
    assert filled(TABLES.read_text(), parts) != TABLES.read_text()


def test_the_readme_has_the_page_s_figures() -> None:
    readme = README.read_text()

    assert with_figures(readme, Results.from_json(RESULTS.read_text()).rows) == readme
    assert (readme.count("\nload: "), readme.count("\ndrop_in: ")) == (4, 3)
    assert readme.count("<!--") == 4


def test_a_figure_within_a_text_is_the_page_s() -> None:
    names = "load: DCP of columns, s\nload: floor / ours of columns, s\n"
    text = f"**a** <!-- figures in bold:\n{names}-->\n| **?** | **?** |\n<!-- end --> **b**"

    assert with_figures(text, [ROW]) == text.replace("?", "8", 1).replace("?", "0.5 (0.25 to 0.5)")
    both = "<!-- figures in bold:\nload: DCP of columns, s and s\n-->**?** **?**<!-- end -->"
    assert with_figures(both, [ROW]) == both.replace("?", "8")
    with pytest.raises(ValueError, match="no row of load has DCP of rows, s"):
        with_figures("<!-- figures in bold:\nload: DCP of rows, s\n-->**1**<!-- end -->", [ROW])
    with pytest.raises(ValueError, match=r"no row of  has load of , "):
        with_figures("<!-- figures in bold:\nload\n-->**1**<!-- end -->", [ROW])
    with pytest.raises(ValueError, match=r"2 figures are named, and 1 are in bold: \*\*1\*\*"):
        with_figures(f"<!-- figures in bold:\n{names}-->**1**<!-- end -->", [ROW])


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

    assert merged(kept, [again], ("load", "save")) == Results("here", (again, other))
    assert merged(Results("here", (other,)), [again], ("load", "save")) == Results("here", (again, other))


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
    assert table((ROW,), (goal,)).endswith(f"| {middle} | {end} | {verdict} |  |")


def test_beside_a_goal_stands_the_most_that_can_be_reached() -> None:
    bare = Row("limits", "one copy", "s", (1.0, 2.0, 2.0), {"DCP": (4.0, 8.0, 16.0)})

    assert table((ROW, bare), (Goal("load", "columns", "s", "DCP", 5, limit="one copy"),)).endswith(
        "| 3 | 2 | no | 4 |"
    )


def test_of_many_rows_the_worst_is_told_and_a_goal_without_a_row_is_refused() -> None:
    worse = replace(ROW, what="columns by 8", ours=(4.0, 4.0, 4.0))

    assert "| columns by 8, s: the worst of these | DCP | 1 | 2 | 0.75 | in the median |  |" in table(
        (ROW, worse), (Goal("load", "col*", "s", "DCP", 1),)
    )
    with pytest.raises(ValueError, match="a goal names load: rows"):
        table((ROW,), (Goal("load", "rows", "s", "DCP", 1),))
    assert "| rows" not in table((ROW,), (Goal("load", "rows", "s", "DCP", 1, may_lack=True),))
