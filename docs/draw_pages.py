"""Takes the pictures of pages in docs/ again: `python -m docs.draw_pages`. This needs Chromium.

docs/pages.txt records the headings of the pages in the pictures. A test compares them with those of today's pages.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

import planners
import reshard
from docs.import_graph import ROOT
from examples import plan_405b

__all__ = ["RECORD", "headings", "pages"]

RECORD = ROOT / "docs" / "pages.txt"
_HEADING = re.compile(r"<(h1|h2|dt|th)\b[^>]*>(.*?)</\1>", re.DOTALL)


@dataclass(frozen=True)
class _Picture:
    """A picture of the first sections of a page."""

    make: Callable[[Path], str]
    """The page, made with files in a folder."""
    width: int
    sections: int
    act: str = "0"
    """What a reader does before, in JavaScript."""


def _checkpoints(folder: Path) -> tuple[Path, Path]:
    """A small Llama, sharded by FSDP 2 and TP 2, and the same with changes in two layers."""
    torch.manual_seed(0)
    shapes = {"attention.wq": (128, 128), "attention.wo": (128, 128), "feed_forward.w1": (344, 128)}
    shapes |= {"feed_forward.w2": (128, 344), "attention_norm": (128,)}
    model = {f"layers.{i}.{name}.weight": torch.randn(shape) for i in range(32) for name, shape in shapes.items()}
    model |= {"tok_embeddings.weight": torch.randn(1000, 128), "norm.weight": torch.ones(128)}
    for step, changed in ((1000, ()), (2000, (7, 8, 20))):
        for i in changed:
            model[f"layers.{i}.feed_forward.w1.weight"] *= 1 + 1e-4 * i
            model[f"layers.{i}.attention.wo.weight"][i] += 0.01
        state = {"model": model, "optim": {"lr": 3e-4}, "step": step}
        reshard.save(state, folder / f"full-{step}", overwrite=True)
        onto = planners.fsdp_tp(2, 2)
        reshard.convert(folder / f"full-{step}", folder / f"step-{step}", onto=onto, overwrite=True)
    return folder / "step-1000", folder / "step-2000"


def _inspect(folder: Path) -> str:
    path, _ = _checkpoints(folder)
    return reshard.open(path).to_html(histograms="*layers.0.*").replace(str(folder), "run")


def _diff(folder: Path) -> str:
    report = reshard.compare(*_checkpoints(folder), measure=True)
    return report.to_html().replace(str(folder), "run")


def _plan(folder: Path) -> str:
    plan_405b.main(str(folder / "plan.html"))
    return (folder / "plan.html").read_text(encoding="utf-8")


_CHOOSE = "(tree.style.height = '400px', choose(rows.findIndex(row => row.name === 'wo.weight')), 0)"
_PICTURES = {
    "page-inspect.webp": _Picture(_inspect, 1100, 2, _CHOOSE),
    "page-diff.webp": _Picture(_diff, 1100, 2),
    "plan-405b.png": _Picture(_plan, 1100, 1),
}


def pages(folder: Path) -> dict[str, str]:
    """The page of each picture, as it is today."""
    return {name: picture.make(folder) for name, picture in _PICTURES.items()}


def headings(made: Mapping[str, str]) -> str:
    """The headings of the pages, a line each."""
    lines = []
    for name, page in made.items():
        lines += [name, *(f"  {re.sub(r'<.*?>', '', text)}" for _, text in _HEADING.findall(page))]
    return "\n".join(lines) + "\n"


def main() -> int:
    from tests.browser import PATH, Browser

    if PATH is None:
        sys.exit("no Chromium is installed (Debian: apt-get install chromium)")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:  # the browser may still write there
        folder = Path(name)
        made = pages(folder)
        with Browser(folder / "profile") as browser:
            for name, text in made.items():
                picture = _PICTURES[name]
                file = folder / "page.html"
                file.write_text(text, encoding="utf-8")
                page = browser.open(file, width=picture.width)
                page.ask(f"document.querySelectorAll('section:nth-of-type(n + {picture.sections + 1})')"
                         ".forEach(section => section.remove())")  # fmt: skip
                page.ask("document.querySelector('main').style.paddingBottom = '24px'")
                page.ask(picture.act)
                page.picture(ROOT / "docs" / name, whole=True)
                print(f"wrote docs/{name}")
    RECORD.write_text(headings(made), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
