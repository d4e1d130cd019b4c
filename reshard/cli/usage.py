"""What was typed wrong, and what was meant: errors of usage, names that are nearly right, fixes in the words of the
command line."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable
from typing import Any

from reshard.errors import ReshardError, did_you_mean

__all__ = ["UsageError", "choice", "dtype_name", "in_words_of_the_command_line", "size_in_bytes"]

_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "fp64": "float64",
    "f64": "float64",
    "double": "float64",
    "fp8": "float8_e4m3fn",
    "f8": "float8_e4m3fn",
    "float8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""Short names of dtypes that are in everybody's mouth; fp8 alone is the one that weights are kept in."""


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


class UsageError(ReshardError):
    """The command line cannot be meant as it stands."""


def choice(word: str, known: Iterable[str], what: str) -> str:
    """The word, which must be one of those known. Raises UsageError."""
    names = list(known)
    if word not in names:
        raise UsageError(f"there is no {what} {word!r}{did_you_mean(word, names) or ':'} Known are {', '.join(names)}")
    return word


def dtype_name(word: str) -> str:
    """torch's name of a dtype, also for `bf16`, `fp8` and the like. Raises UsageError for one that is not known."""
    from planners.geometry.dtypes import ITEM_SIZES

    name = word.lower().removeprefix("torch.")
    if (name := _DTYPES.get(name, name)) not in ITEM_SIZES:
        near = did_you_mean(name, [*ITEM_SIZES, *_DTYPES])
        raise UsageError(f"there is no dtype {word!r}{near or ':'} Known are {', '.join(ITEM_SIZES)}")
    return name


_SAID: list[tuple[str, Any]] = [
    (r"overwrite=True", "--overwrite"),
    (r"normalized\(hints=\{'(\w+)': (.+?)\}\)(?= \(|$)", lambda m: f"--hint {shlex.quote(f'{m[1]}={_as_json(m[2])}')}"),
    (r"the hint '(\w+)'", r"--hint \1"),
    (r"unknown hint '(\w+)'", r"unknown --hint '\1'"),
    (r"leave out onto\b", "leave out --onto"),
    (r"select=(\[.*\])", lambda m: " ".join(f"--select {shlex.quote(glob)}" for glob in ast.literal_eval(m[1]))),
    (r"such as \{'([^']+)': '([^']+)'\}", r"such as --rule '\1=\2'"),
    (r"max_shard_bytes", "--max-shard"),
]
"""What errors say to those who call from Python, and what it is here."""


def in_words_of_the_command_line(message: str) -> str:
    """An error's text with the options of this program for the arguments of functions."""
    for pattern, said in _SAID:
        message = re.sub(pattern, said, message)
    return message


def _as_json(example: str) -> str:
    """Python's quotes are not those of JSON; what stands for more, such as `...`, is left."""
    return example.replace("'", '"')


def size_in_bytes(text: str) -> int:
    """Of `5GB`, `500MB` or `2GiB`. Raises UsageError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?I?B?)\s*", text.upper())
    unit = "" if match is None else match[2] if match[2] in _UNITS else f"{match[2]}B"
    if match is None or unit not in _UNITS:
        raise UsageError(f"{text!r} is no size: write it like 5GB, 500MB or 2GiB")
    return int(float(match[1]) * _UNITS[unit])
