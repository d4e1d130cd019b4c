"""The program as a whole: quick help, exit codes, errors of one message."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from reshard.cli.app import app, run

COMMANDS = [command.name for command in app.registered_commands]


def test_help_needs_neither_torch_nor_numpy() -> None:
    source = (
        "import sys\nfrom reshard.cli.app import run\n"
        "try:\n    run(['--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "print([name for name in ('torch', 'numpy', 'networkx') if name in sys.modules])"
    )

    ran = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)

    assert ran.stdout.strip().endswith("[]")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(say, command) -> None:
    said = say(command, "--help")

    assert said.code == 0
    assert "--json" in said.out


def test_nothing_said_is_help(say) -> None:
    said = say()

    assert "inspect" in said.out
    assert said.code == 2


def test_version(say) -> None:
    assert say("--version").out.startswith("reshard ")


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["inspect"], 2, "Missing argument"),
        (["inspect", "--no-such"], 2, "No such option"),
        (["nosuch"], 2, "No such command"),
        (["inspect", "nowhere"], 3, "error: there is nothing at"),
        (["plan", "nowhere", "dp=2"], 3, "A topology can be given, too"),
        (["plan", "fsdp=2", "tp=2"], 3, "one side must be a checkpoint"),
        (["plan", "fsdp=2", "dp=2", "--rule", "S(0)"], 3, "write GLOB=PLACEMENTS"),
        (["plan", "hsdp=2", "tp=2"], 3, "cannot read the topology 'hsdp=2'"),
        (["normalize", ".", "--hint", "heads"], 3, "write --hint NAME=JSON"),
    ],
)
def test_errors(say, words, code, told, monkeypatch, tmp_path) -> None:
    """One message on stderr, no traceback, nothing on stdout."""
    monkeypatch.chdir(tmp_path)

    said = say(*words)

    assert said.code == code
    # typer wraps usage errors in a box
    assert told in " ".join(said.err.replace("│", " ").split())
    assert "Traceback" not in said.err
    assert said.out == ""


def test_traceback_on_request_anywhere(tmp_path) -> None:
    with pytest.raises(FileNotFoundError):
        run(["inspect", str(tmp_path / "nowhere"), "--traceback"])


def test_completion_is_offered() -> None:
    script = Path(sys.executable).parent / "reshard"
    ran = subprocess.run([script, "--show-completion", "bash"], capture_output=True, text=True, check=True)

    assert "reshard" in ran.stdout
