"""Every Python block of the README and of the recipes runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "recipes").glob("*.md"))]
BLOCKS = [
    pytest.param(match[1], page, text[: match.start()].count("\n") + 1, id=f"{page.stem}:{i}")
    for page in PAGES
    for text in [page.read_text(encoding="utf-8")]
    for i, match in enumerate(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch.compile uses what torch deprecates
@pytest.mark.parametrize(("source", "page", "line"), BLOCKS)
def test_blocks_run(source: str, page: Path, line: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracebacks show the line of the page."""
    monkeypatch.chdir(tmp_path)

    exec(compile("\n" * line + source, str(page), "exec"), {"__name__": "__main__"})


def test_there_is_a_block_for_each_job() -> None:
    assert len([block for block in BLOCKS if block.id.startswith("README")]) == 3


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
