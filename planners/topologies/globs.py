"""Globs over thousands of names: which patterns match a name, without trying them all.

A pattern that names whole segments, such as `*.experts.17.*`, can only match names that have them one after another.
So patterns are filed under their longest run of whole segments, and a name is looked up under its own runs:

    layers.3.experts.17.w1    ->    ("experts", "17"), ("17",), ...    ->    *.experts.17.*
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Sequence

__all__ = ["Globs"]


class Globs:
    """Patterns in order; `*` matches any text, dots included, `?` one character and `[...]` one of several."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._match: list[Callable[[str], object]] = [re.compile(fnmatch.translate(p)).match for p in patterns]
        self._filed: dict[tuple[str, ...], list[int]] = {}
        for number, pattern in enumerate(patterns):
            self._filed.setdefault(_longest_run(pattern), []).append(number)
        self._lengths = sorted({len(run) for run in self._filed} - {0})

    def matching(self, name: str) -> Iterator[int]:
        """Numbers of the patterns that match `name`, ascending."""
        found = list(self._filed.get((), ()))
        segments = tuple(name.split("."))
        for length in self._lengths:
            for at in range(len(segments) - length + 1):
                found += self._filed.get(segments[at : at + length], ())
        return (number for number in sorted(set(found)) if self._match[number](name))

    def first(self, name: str) -> int | None:
        """Number of the first pattern that matches `name`, or None."""
        return next(self.matching(name), None)


def _longest_run(pattern: str) -> tuple[str, ...]:
    """The most segments, one after another, that every name that matches must have as they are written."""
    segments = pattern.split(".")
    plain = [not set(segment) & set("*?[]") for segment in segments]
    # a bracket that holds a dot would have been split, and nothing is sure any more
    if "[" in pattern:
        return ()
    best: tuple[str, ...] = ()
    start = 0
    for at, is_plain in enumerate([*plain, False]):
        if not is_plain:
            best = max(best, tuple(segments[start:at]), key=len)
            start = at + 1
    return best
