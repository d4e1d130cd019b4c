"""The page of the command line, from the commands themselves, as `--help` shows them."""

from __future__ import annotations

import re
from typing import Any

import typer

__all__ = ["as_page"]

EXIT_CODES = """| exit code | meaning |
|---|---|
| 0 | success |
| 1 | a check failed: damage, differences, or a failed proof |
| 2 | the command line is wrong |
| 3 | an error: stderr gives the reason and the fix |
| 130 | interrupted |"""


def as_page() -> str:
    """All commands with their arguments, options, and examples, as Markdown."""
    from reshard.cli.app import app

    program: Any = typer.main.get_command(app)
    about = [part for part in program.help.split("\n\n") if not part.startswith("Exit codes")]
    context = typer.Context(program, info_name="reshard")
    commands = [_command(name, command, context) for name, command in program.commands.items()]
    return "\n\n".join(["# Command line", *about, EXIT_CODES, *commands]) + "\n"


def _command(name: str, command: Any, above: Any) -> str:
    context = typer.Context(command, info_name=name, parent=above)
    params: list[Any] = [param for param in command.get_params(context) if not getattr(param, "hidden", False)]
    given = [param for param in params if param.param_type_name == "argument"]
    usage = " ".join([f"reshard {name} [OPTIONS]", *(param.metavar for param in given)])
    rows = [(f"`{param.metavar}`", param.help) for param in given]
    rows += [(_names(param), f"{param.help}{_default(param)}") for param in params if param not in given]
    table = [
        "| argument or option | meaning |",
        "|---|---|",
        *(f"| {_cell(what)} | {_cell(words)} |" for what, words in rows),
    ]
    examples = f"```console\n{re.sub('^', '$ ', command.epilog, flags=re.M)}\n```"
    parts = [f"## reshard {name}", command.help, f"```text\n{usage}\n```", "\n".join(table), "Examples:", examples]
    return "\n\n".join(parts).replace("COMMAND", name)


def _names(param: Any) -> str:
    names = ", ".join(f"`{name}`" for name in sorted(param.opts, key=len))
    return f"{names} `{param.metavar}`" if param.metavar else names


def _default(param: Any) -> str:
    shown = isinstance(param.default, int | str) and param.default and param.default is not True
    return f" Default: {param.default}." if shown else ""


def _cell(text: str) -> str:
    """Text of a table. Outside of code, globs and angle brackets are no Markdown."""
    parts = re.split("(`[^`]*`)", " ".join(text.split()))
    return "".join(part if part.startswith("`") else re.sub(r"([*<>|])", r"\\\1", part) for part in parts)
