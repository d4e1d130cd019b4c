"""What shells offer: values of options, and names in the checkpoint that was given."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def offered(words: str, **env: str) -> list[str]:
    """What bash is told for a command line that ends here."""
    line = f"reshard {words}"
    ran = subprocess.run(
        [sys.executable, "-c", "from reshard.cli.app import app; app(prog_name='reshard')"],
        env=os.environ
        | {"_RESHARD_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
        | env,
        capture_output=True,
        text=True,
    )
    return ran.stdout.split()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("convert x y -f hug", ["huggingface"]),
        ("convert x y --names torcht", ["torchtitan:"]),
        ("plan x fs", ["fsdp="]),
        ("verify x --on d", ["dask://"]),
    ],
)
def test_values(words, told) -> None:
    assert offered(words) == told


def test_names_in_the_checkpoint(checkpoint) -> None:
    assert offered(f"inspect {checkpoint} --map model.layers.") == [f"model.layers.{i}.w" for i in range(3)]
    assert offered(f"inspect {checkpoint}/nowhere --map m") == []
