"""Translates messages of the Python API to options of the command line."""

from __future__ import annotations

import ast
import re
import shlex
from typing import Any

_SAID_OF_VALUES: list[tuple[str, Any]] = [
    (r"normalized\(hints=\{'(\w+)': (.+?)\}\)(?= \(|$)", lambda m: f"--hint {shlex.quote(f'{m[1]}={_as_json(m[2])}')}"),
    (r"the hint '(\w+)'", r"--hint \1"),
    (
        r"select=(\[['\"].*['\"]\])",
        lambda m: " ".join(f"--select {shlex.quote(g)}" for g in ast.literal_eval(m[1])),
    ),
    (r"such as \{'([^']+)': '([^']+)'\}", r"such as --rule '\1=\2'"),
]
_SAID: list[tuple[str, Any]] = [
    (r"overwrite=True", "--overwrite"),
    (r"model_only=True", "--model"),
    (r" \(reshard\.load\(\.\.\., check=False\) reads it as it is\)", ""),
    (r"leave out onto\b", "leave out --onto"),
    (r"(after|as) (dtype|onto)=", r"\1 --\2"),
    (r"leave out step=\d+", "leave out --step"),
    (r"max_shard_bytes", "--max-shard"),
    (r"pass rtol=", "add --rtol "),
    (r"without rtol= and atol=", "without --rtol and --atol"),
    (r"pass a Topology with rules that match", "add a --rule that matches"),
    (r"give it another .* by select=", "--select '!GLOB' leaves names out"),
    (r"ass step=(\d*)", lambda m: f"ass --step {m[1] or 'N'}"),
    (r"use the same names on both sides", "--normalized uses canonical names"),
    (r"leave these out", "--select '!GLOB' leaves names out"),
    (r"Input should be a valid (integer|number)\b[^.]*", "write a number"),
    (r"Input should be greater than or equal to", "write a number of at least"),
    (r"got unexpected extra argument\(s\) \((\w+=\d.*)\)", r"unexpected argument: \1. Join axes, as in fsdp=4,tp=2"),
    (r"got unexpected extra argument\(s\) \(on (.*)\)", r"unexpected argument: on \1. Write quotes around the layout"),
    (r"got unexpected extra argument\(s\) \((.*)\)", r"unexpected argument: \1"),
]
"""Words of the Python API and of typer in output, and those of the command line. Names and values are quoted, and stay
as they are."""
_QUOTED = re.compile(r"""((?<!\w)'[^']*'|(?<!\w)"[^"]*")""")


def in_words_of_the_command_line(message: str) -> str:
    """Return the text with the program's options in place of arguments of functions."""
    for pattern, said in _SAID_OF_VALUES:
        message = re.sub(pattern, said, message)
    parts = _QUOTED.split(message)
    for pattern, said in _SAID:
        parts[::2] = [re.sub(pattern, said, part) for part in parts[::2]]
    return "".join(parts)


def _as_json(example: str) -> str:
    """Convert quotes and True from Python to JSON. Placeholders such as `...` stay."""
    return "true" if example == "True" else example.replace("'", '"')
