"""Puts what commands print into the pages that show it: `python -m docs.command_output`.

A page shows it in a block of its own: `$ reshard ...`, then what the command prints for a small checkpoint. A block
that ends with `...` keeps its number of lines. A test compares the pages with what commands print today.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import tempfile

import torch

import planners
import reshard
from docs.import_graph import ROOT

__all__ = ["PAGES", "filled"]

PAGES = [ROOT / "docs" / "recipes" / f"{name}.md" for name in ("inspect", "plan")]
_SHOWN = re.compile(r"^(```console\n\$ reshard (.*)\n)((?!\$).+\n(?:.*\n)*?)```$", re.MULTILINE)


def filled(text: str) -> str:
    """The page with today's output."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        _checkpoint()
        return _SHOWN.sub(lambda block: f"{block[1]}{_printed(block[2], block[3].splitlines())}```", text)


def _checkpoint() -> None:
    """A small Llama, saved under FSDP 2 and TP 2."""
    model = {f"layers.{i}.{name}.weight": torch.zeros(128, 128) for i in range(32) for name in ("wq", "wo")}
    model |= {"tok_embeddings.weight": torch.zeros(1000, 128), "norm.weight": torch.zeros(128)}
    reshard.save({"model": model, "step": 1000}, "full")
    reshard.convert("full", "CHECKPOINT", onto=planners.fsdp_tp(2, 2))


def _printed(command: str, before: list[str]) -> str:
    from reshard.cli.app import run

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        run(shlex.split(command))
    lines = [line.rstrip() for line in printed.getvalue().splitlines() if not line.startswith("tip ")]
    if before[-1] == "...":
        lines[len(before) - 1 :] = ["..."]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"wrote {page.relative_to(ROOT)}")
