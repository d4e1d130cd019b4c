"""The table of durations, and the count of private names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import durations, private_names

REPORT = """<testsuites><testsuite time="90">
<testcase classname="tests.planners.geometry.test_cuts" name="a" time="2"/>
<testcase classname="tests.planners.geometry.test_more.TestIt" name="b" time="4"><failure/></testcase>
<testcase classname="tests.planners.geometry.test_cuts" name="c" time="3"/>
<testcase classname="tests.test_docs" name="d" time="30"><error/></testcase>
<testcase classname="" name="tests.reshard.test_gone" time="0"><skipped/></testcase>
</testsuite></testsuites>"""


def test_folders_of_a_report(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)

    folders, wall_s = durations.read(tmp_path / "report.xml")

    assert list(durations.table(folders, wall_s)) == [
        "5 tests in 1.5 minutes; together they took 0.7 minutes.",
        "1 were skipped and 2 failed.",
        "",
        "| Folder | Tests | Seconds | Share | Milliseconds a test | Longest module, seconds |",
        "|---|---:|---:|---:|---:|---|",
        "| `tests` | 1 | 30 | 77% | 30,000 | `test_docs`, 30 |",
        "| `tests/planners/geometry` | 3 | 9 | 23% | 3,000 | `test_cuts`, 5 |",
        "| `tests/reshard` | 1 | 0 | 0% | 0 | `test_gone`, 0 |",
    ]


def test_the_page_takes_the_table_in_place_of_the_last(tmp_path: Path) -> None:
    page = tmp_path / "testing.md"
    page.write_text(durations.PAGE.read_text(encoding="utf-8"), encoding="utf-8")

    for text in ("one", "other"):
        durations.put_on_page([text], page)

    shown = page.read_text(encoding="utf-8")
    assert "<!-- durations -->\n\nother\n\n<!-- end of durations -->\n" in shown
    assert "one\n" not in shown.split("<!-- durations -->")[1].split("<!-- end")[0]
    page.write_text("nothing")
    with pytest.raises(SystemExit, match="needs the lines"):
        durations.put_on_page(["more"], page)


def test_private_names_are_found_however_they_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, test = tmp_path / "reshard" / "api", tmp_path / "tests"
    source.mkdir(parents=True)
    test.mkdir()
    (source / "saving.py").write_text(
        "_LIMIT = 3\ndef _plan(): pass\nclass A:\n    def __init__(self): self._kept = 1\n"
    )
    (test / "test_it.py").write_text(
        "import torch\n"
        "from reshard.api.saving import _plan\n"
        "class Own:\n"
        "    def __init__(self): self._kept = 2\n"
        "def test(monkeypatch, a):\n"
        "    a.b._plan()\n"
        "    monkeypatch.setattr(saving, '_LIMIT', 4)\n"
        "    Own()._kept, torch._plan, a._unknown, a._replace()\n"
    )
    (test / "test_other.py").write_text("from reshard import api\nassert api.A()._kept\n")
    monkeypatch.setattr(private_names, "ROOT", tmp_path)

    found = [(use.name, use.path, use.line) for use in private_names.uses()]

    assert sorted(found) == [
        ("_LIMIT", "tests/test_it.py", 7),
        ("_kept", "tests/test_other.py", 2),
        ("_plan", "tests/test_it.py", 2),
        ("_plan", "tests/test_it.py", 6),
    ]
