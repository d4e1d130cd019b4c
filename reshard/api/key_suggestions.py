"""What to say of many keys at once: those that differ by a level or a prefix only, and floods of them by pattern."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from reshard.live.wrappers import WRAPPER_SEGMENTS

__all__ = ["PrefixDifference", "are_by_number", "section", "shifted"]


_MOST_LINES = 60
"""Of one section; more keys are told by pattern."""
_MOST_GUESSES = 20
_MOST_KNOWN = 5000


class PrefixDifference(NamedTuple):
    """All or nearly all missing keys are there, under a prefix more or less."""

    names: Mapping[str, str]
    """Missing key -> its name in the checkpoint."""
    what: str
    fix: str


def shifted(missing: Iterable[str], known: Iterable[str]) -> PrefixDifference | None:
    """How the missing keys and the names that nobody asked for belong together, if a prefix, or a
    level somewhere within, is all that differs for nine in ten of the keys."""
    keys, names = list(missing), set(known)
    if not keys or not names:
        return None
    ends = (keys[0], keys[-1])
    within = ((key, dot.end()) for key in ends for dot in re.finditer(r"\.", key))
    fronts = (_level_at(keys, names, key, 0) for key in ends)
    levels = (_level_at(keys, names, key, at) for key, at in within)
    return next(filter(None, fronts), None) or _wrapped(keys, names) or next(filter(None, levels), None)


def _level_at(keys: list[str], names: Collection[str], key: str, at: int) -> PrefixDifference | None:
    """A level more or less at one place of a key, and of all keys that begin as it does."""
    front, rest = key[:at], key[at:]
    more = {name[at : -len(rest)] for name in names if name.startswith(front) and name.endswith(f".{rest}")}
    for level in sorted(more - {""}, key=len):
        found = {k: name for k in keys if k.startswith(front) and (name := front + level + k[at:]) in names}
        if _are_most(found, keys):
            return PrefixDifference(found, *_told(found, front, level, "the checkpoint", _nested(level)))
    for level in (rest[: dot.end()] for dot in re.finditer(r"\.", rest)):
        whole = front + level
        found = {k: name for k in keys if k.startswith(whole) and (name := front + k[len(whole) :]) in names}
        if _are_most(found, keys):
            return PrefixDifference(found, *_told(found, front, level, "what is to be loaded", _taken_out(level)))
    return None


def _wrapped(keys: list[str], names: Collection[str]) -> PrefixDifference | None:
    """Names that are alike without the segments of wrappers, wherever they are."""
    plain = {_unwrapped(name): name for name in names}
    # a key that is there under its own name is missing as a tensor, or as none: that is told of it
    found = {key: name for key in keys if (name := plain.get(_unwrapped(key), key)) != key}
    if not _are_most(found, keys):
        return None
    parts = {part for pair in found.items() for name in pair for part in name.split(".")} & WRAPPER_SEGMENTS
    what = f"{_differing(found)} only by wrappers' segments {', '.join(map(repr, sorted(parts)))}, {_first(found)}"
    return PrefixDifference(
        found, what, "names of reshard.get_model_state_dict(model) have none of them, on both sides"
    )


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPER_SEGMENTS)


def _are_most(found: Mapping[str, str], keys: list[str]) -> bool:
    return len(found) * 10 >= len(keys) * 9


def _told(found: Mapping[str, str], front: str, level: str, who: str, call: str) -> tuple[str, str]:
    """What differs, and the fix. `call`: where the level is at the front."""
    if front:
        what = f"{_differing(found)} only by {level!r} behind {front!r}, which {who} has: {_first(found)}"
        return what, "nest the state alike, or rename by mapping="
    what = f"{_differing(found)} only by {level!r}, which {who} has in front: {_first(found)}"
    if set(level.strip(".").split(".")) <= WRAPPER_SEGMENTS:
        return what, f"{level!r} is of a wrapper: names of reshard.get_model_state_dict(model) have none, on both sides"
    return what, f"write {call}, or rename by mapping="


def _differing(found: Mapping[str, str]) -> str:
    return "1 missing key differs" if len(found) == 1 else f"{len(found)} missing keys differ"


def _first(found: Mapping[str, str]) -> str:
    key, name = next(iter(found.items()))
    return f"{key!r} is saved as {name!r}"


_BY_NUMBER = re.compile(r"(?:^|.*\.)state\.\d+\.[^.]+")
_BY_NAME = re.compile(r"(?:^|.*\.)state\.(?!\d+\.[^.]+$).+\.[^.]+")


def are_by_number(missing: Iterable[str], known: Iterable[str]) -> bool:
    """Whether states of an optimizer are wanted by numbers of parameters, and saved under their names."""
    return any(map(_BY_NUMBER.fullmatch, missing)) and any(map(_BY_NAME.fullmatch, known))


def _nested(front: str) -> str:
    """The call that puts the state where the checkpoint has it."""
    state = "state"
    for segment in reversed(front.strip(".").split(".")):
        state = f"{{{segment!r}: {state}}}"
    return f"load({state}, path)"


def _taken_out(front: str) -> str:
    return f"load(state{''.join(f'[{segment!r}]' for segment in front.strip('.').split('.'))}, path)"


def section(
    title: str,
    keys: Mapping[str, str],
    others: Iterable[str],
    kinds: Mapping[str, str] | None = None,
    mapped: Mapping[str, str] | None = None,
) -> list[str]:
    """Lines about keys, each with what is to be said at its end, and the name out of `others` that may be meant."""
    if not keys:
        return []
    out = [f"  {len(keys)} {title}:"]
    if len(keys) > _MOST_LINES:
        return [*out, *(f"    {line}" for line in _by_pattern(keys))]
    others = list(others)
    known = set(others)
    for i, (key, where) in enumerate(keys.items()):
        if kinds and key in kinds:
            out.append(f"    {key}{where}   (there it is {kinds[key]}, which does not fit what the target has)")
            continue
        name = mapped.get(key, key) if mapped else key
        close = (
            difflib.get_close_matches(name, others, n=1, cutoff=0.75)
            if i < _MOST_GUESSES and name not in known and len(others) < _MOST_KNOWN
            else []
        )
        sought = f"   (looked for as {name!r})" if name != key else ""
        out.append(f"    {key}{where}{sought}" + (f"   (did you mean {close[0]!r}?)" if close else ""))
    return out


def _by_pattern(keys: Mapping[str, str]) -> list[str]:
    """Keys that differ in numbers only as one line; of too many such patterns, those that begin alike."""
    patterns: dict[tuple[str, str], list[str]] = {}
    for key, where in keys.items():
        patterns.setdefault((re.sub(r"(?<![A-Za-z])\d+(?![A-Za-z])", "*", key), where), []).append(key)
    depth = 4
    while len(patterns) > _MOST_LINES and depth:
        grouped: dict[tuple[str, str], list[str]] = {}
        for (pattern, where), names in patterns.items():
            parts = pattern.split(".")
            front = ".".join(parts[:depth]) + (".**" if len(parts) > depth else "")
            grouped.setdefault((front, where), []).extend(names)
        patterns, depth = grouped, depth - 1
    rows = [
        f"{names[0]}{where}" if len(names) == 1 else f"{pattern}{where}   ({len(names)}, such as {names[0]!r})"
        for (pattern, where), names in patterns.items()
    ]
    rest = sum(map(len, list(patterns.values())[_MOST_LINES:]))
    more = [f"and {rest} more"] if rest else []
    told = "a load with strict=False and dry_run=True reports every one"
    return [*rows[:_MOST_LINES], *more, f"({told})"]
