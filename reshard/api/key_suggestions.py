"""How errors list many keys: by their common prefix if they differ only by a prefix, and by pattern
if there are too many."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from glob import escape
from itertools import islice, takewhile
from typing import Any, NamedTuple

from planners.geometry.arrays import grouped
from reshard.api.options import RENAMES, LoadOptions
from reshard.errors import near_key
from reshard.live.state import CheckedState
from reshard.live.wrappers import WRAPPER_SEGMENTS
from reshard.state import NUMBERED

_MOST_LINES = 20
"""Maximum number of lines of one section. If there are more keys, they are listed by pattern."""
_MOST_OF_A_FRONT = 5
"""Most keys that are listed if the other side lacks their first segment. If there are more, they
take one line."""
_MOST_GUESSES, _MOST_GLOBS, _MOST_RULES, _MOST_SIMILAR = 20, 3, 4, 8
_MOST_KNOWN = 5000
OR_MAPPING = ", or rename keys with mapping="
"""The end of some fixes, for calls with this argument."""


class PrefixDifference(NamedTuple):
    """All or nearly all missing keys are in the checkpoint, with one prefix more or less, or another one."""

    names: Mapping[str, str]
    """Missing key -> its name in the checkpoint."""
    what: str
    fix: str


def shifted(missing: Iterable[str], known: Iterable[str], nests: Collection[str] = ()) -> PrefixDifference | None:
    """Return how missing keys match names that no target uses, if nine in ten differ by one prefix
    or level.

    `nests`: keys of containers, such as "optim". These match what the checkpoint has below "app.optim".
    """
    keys, names = list(missing), set(known)
    if not keys or not names or "".join(keys).isdigit():  # positions in a list, which any list has
        return None
    if tops := {key for key in keys if key in nests and "." not in key}:
        levels_of = (name[: dot.start()] for name in [*names] for dot in re.finditer(r"\.", name))
        names.update(level for level in levels_of if level.rpartition(".")[2] in tops)
    ends = (keys[0], keys[-1])
    within = ((key, dot.end()) for key in ends for dot in re.finditer(r"\.", key))
    fronts = (_level_at(keys, names, key, 0) for key in ends)
    levels = (_level_at(keys, names, key, at) for key, at in within)
    nearest = next(filter(None, fronts), None) or _wrapped(keys, names) or next(filter(None, levels), None)
    return nearest or _other_front(keys, names)


def _level_at(keys: list[str], names: Collection[str], key: str, at: int) -> PrefixDifference | None:
    """Return the change of a level at one place of a key, and of all keys that begin as it does."""
    front, rest = key[:at], key[at:]
    more = {name[at : -len(rest)] for name in names if name.startswith(front) and name.endswith(f".{rest}")}
    numbers = {level for level in more if level[:-1].isdigit()}
    if len(numbers) > 1:  # the key may be a stack of these
        more -= numbers
    for level in sorted(more - {""}, key=lambda level: (len(level), level)):
        found = {k: name for k in keys if k.startswith(front) and (name := front + level + k[at:]) in names}
        if _are_most(found, keys):
            return PrefixDifference(found, *_told(found, front, level, "the checkpoint", _nested(level)))
    for level in (rest[: dot.end()] for dot in re.finditer(r"\.", rest)):
        whole = front + level
        found = {k: name for k in keys if k.startswith(whole) and (name := front + k[len(whole) :]) in names}
        if _are_most(found, keys):
            inside = "".join(f"[{segment!r}]" for segment in level.strip(".").split("."))
            call = f"load(state{inside}, path)"
            return PrefixDifference(found, *_told(found, front, level, "the state to load into", call))
    return None


def _other_front(keys: list[str], names: Collection[str]) -> PrefixDifference | None:
    """Return another top-level key, such as "optimizer" for "optim", if there is only one choice."""
    front = keys[0].partition(".")[0]
    there = set(names)
    for name in names:  # a level may be missing as one key, such as param_groups
        there.update(name[: dot.start()] for dot in re.finditer(r"\.", name))
    fitting = []
    for other in {name.partition(".")[0] for name in names} - {front}:
        found = {}
        for key in keys:
            first, dot, rest = key.partition(".")
            name = other + dot + rest
            if dot and first == front and name in there:
                found[key] = name
        if _are_most(found, keys) and (len(found) > 1 or "." in rest):  # all models have a "weight"
            what = f"{_differing(found)} only by the top-level key, {front!r} in place of {other!r}"
            fix = f"call it {other!r}{OR_MAPPING}"
            fitting.append(PrefixDifference(found, f"{what}: {_first(found)}", fix))
    return fitting[0] if len(fitting) == 1 else None


def _wrapped(keys: list[str], names: Collection[str]) -> PrefixDifference | None:
    """Return names that are equal without the segments of wrappers, wherever these are."""
    plain = {_unwrapped(name): name for name in sorted(names)}
    # a key that exists under its own name is missing as a tensor, or as a value:
    # another error says so
    found = {key: name for key in keys if (name := plain.get(_unwrapped(key), key)) != key}
    if not _are_most(found, keys):
        return None
    parts = {part for pair in found.items() for name in pair for part in name.split(".")} & WRAPPER_SEGMENTS
    what = f"{_differing(found)} only by wrapper segments {', '.join(map(repr, sorted(parts)))}: {_first(found)}"
    return PrefixDifference(found, what, f"{_CANONICAL}, which has no wrapper segments")


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPER_SEGMENTS)


def _are_most(found: Mapping[str, str], keys: list[str]) -> bool:
    return len(found) * 10 >= len(keys) * 9


def allowing(
    keys: Sequence[str], unexpected: Sequence[str], names: Iterable[str], root: Any, options: LoadOptions
) -> list[str]:
    """Return the advice for missing keys, with a glob for those of each top-level key unless there
    are too many.

    `names`: all names of the checkpoint. An optimizer in `root` lacks the state of the same
    parameters.
    """
    states = root.of_optimizers(keys, known=True) if isinstance(root, CheckedState) else []
    tops = grouped((key.partition(".")[0], key.split(".")) for key in (*keys, *states))
    globs = []
    for its in tops.values():
        same = [parts[0] for parts in takewhile(lambda parts: len({*parts}) == 1, zip(*its))]
        end = ".*" if same not in its else "*" if len(its) > 1 or ".".join(same) in states else ""
        globs.append(escape(".".join(same)) + end)
    allowed = repr(options.strict_also(dict.fromkeys(globs, "partial"), unexpected))
    mapping = options.mapping if isinstance(options.mapping, Mapping) else {}
    wrong = [f"{key!r} as {mapping[key]!r}" for key in keys if key in mapping]
    renaming = _renaming(keys, unexpected, names) or RENAMES
    if wrong:
        renaming = f"correct the mapping: it looks for {wrong[0]}, which is not in the checkpoint"
    allow = options.wording.allow.replace(RENAMES, renaming)
    advice = allow.replace("{'some.*': 'partial'}", allowed).split("\n")
    return [text for text in advice if allowed not in text or len(globs) <= _MOST_GLOBS]


def _renaming(missing: Iterable[str], unexpected: Sequence[str], names: Iterable[str]) -> str:
    """Return the mapping that finds all missing keys, if the checkpoint has other names for a few
    levels, such as "layers" for "blocks", and none of its other names begins so. Otherwise, ""."""
    there: dict[tuple[str, str], list[str]] = {}
    for name in without_optimizers(unexpected):
        for front, level, rest in _levels(name):
            there.setdefault((front, rest), []).append(level)
    found: dict[str, str] = {}
    for key in without_optimizers(missing):
        pairs = [
            (front + level, front + other)
            for front, level, rest in _levels(key)
            for other in _counterpart(level, there.get((front, rest), []))
        ]
        if len(pairs) != 1 or found.setdefault(*pairs[0]) != pairs[0][1] or len(found) > _MOST_RULES:
            return ""
    used = {*names}.difference(unexpected)
    taken = any(name.startswith(f"{old}.") for name in used for old in found.values())
    if (
        not found
        or taken
        or len({*found.values()}) < len(found)
        or re.search(r"[{}*?\[\]]", "".join(map("".join, found.items())))
    ):
        return ""
    rules = [
        f"m.Rename({old.removeprefix('model.') + '.{x+}'!r}, {new.removeprefix('model.') + '.{x+}'!r})"
        for new, old in found.items()
    ]
    mapping = f"mapping=m.Mapping([{', '.join(rules)}])"
    return f"{mapping} renames these keys, if they are the same tensors (import reshard.mapping as m)"


def _counterpart(level: str, others: list[str]) -> list[str]:
    return (
        others if len(others) < 2 else get_close_matches(level, others, 1, 0.4) if len(others) <= _MOST_SIMILAR else []
    )


def _levels(key: str) -> Iterator[tuple[str, str, str]]:
    """Yield what is before a level that is not a number, the level, and what is below it."""
    parts = key.split(".")
    for at, level in enumerate(parts[:-1]):
        if not level.isdigit():
            yield "".join(f"{part}." for part in parts[:at]), level, ".".join(parts[at + 1 :])


_CANONICAL = "save and load reshard.get_model_state_dict(model)"


def _told(found: Mapping[str, str], front: str, level: str, who: str, call: str) -> tuple[str, str]:
    """Return what differs, and the fix. `call`: the fix if the level is at the front."""
    if front:
        what = f"{_differing(found)} only by {level!r} after {front!r}, which {who} has: {_first(found)}"
        return what, f"nest the state in the same way{OR_MAPPING}"
    what = f"{_differing(found)} only by the prefix {level!r}, which {who} has: {_first(found)}"
    if set(level.strip(".").split(".")) <= WRAPPER_SEGMENTS:
        return what, f"{level!r} comes from a wrapper: {_CANONICAL}, which has no wrapper prefixes"
    return what, f"call {call}{OR_MAPPING}"


def _differing(found: Mapping[str, str]) -> str:
    return "1 missing key differs" if len(found) == 1 else f"{len(found)} missing keys differ"


def _first(found: Mapping[str, str]) -> str:
    key, name = next(iter(found.items()))
    return f"{key!r} may correspond to {name!r}"


_BY_NAME = re.compile(r"(?:^|.*\.)state\.(?!\d+\.[^.]+$).+\.[^.]+")


OF_NUMBERED = re.compile(r"(?:.*\.)?(?:state|param_groups)\.\d+\..*")
"""Keys of an optimizer's state dict whose state is by number."""


def by_number(missing: Iterable[str], known: Iterable[str]) -> str:
    """Return the first state that is wanted by number, if the saved ones are under names."""
    return next(filter(NUMBERED.fullmatch, missing), "") if any(map(_BY_NAME.fullmatch, known)) else ""


def without_optimizers(keys: Iterable[str]) -> list[str]:
    """Return all other keys."""
    return [key for key in keys if not _is_state(key) and "param_groups" not in key.split(".")]


def _nested(front: str) -> str:
    """Return the call that puts the state where the checkpoint has it."""
    state = "state"
    for segment in reversed(front.strip(".").split(".")):
        state = f"{{{segment!r}: {state}}}"
    return f"load({state}, path)"


def has_no_state_yet(targets: Iterable[str], unexpected: Iterable[str]) -> bool:
    """Return True if an optimizer's state was saved, and the target has none of it in its state dict."""
    fronts = tuple({key.partition("state.")[0] for key in unexpected if _is_state(key)})
    below = [key for key in targets if f"{key}.".startswith(fronts)]
    return bool(below) and not any(map(_is_state, below))


def differ_in_form(missing: Collection[str], unexpected: Collection[str]) -> bool:
    """Return True if one side has an optimizer's param groups in a list, and the other has them flattened."""
    one_each = all(any("param_groups" in key for key in keys) for keys in (missing, unexpected))
    return one_each and any(map(_LISTED_GROUPS.search, (*missing, *unexpected)))


_LISTED_GROUPS = re.compile(r"\bparam_groups(\.\d+\.params(\.\d+)?)?$")


def named_from_numbers(path: str) -> str:
    """Return the call that opens a checkpoint under parameter names if its optimizer state is by number."""
    return f"reshard.open({path}).canonical(hints={{'param_names': list(dict(model.named_parameters()))}})"


def load_by_name(path: str, others: Iterable[str]) -> str:
    """Return the calls that load such a checkpoint. `others`: what it has besides model and optimizer."""
    rest = ", ".join(f"{name!r}: ..." for name in islice(others, 3))
    calls = (
        "give the names, in the order in which the optimizer got its parameters. canonical() has model and optimizer "
        "only, as 'model' and 'optim':"
        f"\n    named = {named_from_numbers(path)}"
        "\n    reshard.load({'model': model, 'optim': optimizer}, named)"
    )
    return f"{calls}\n    reshard.load({{{rest}}}, {path}, strict='subset')" if rest else calls


def is_of_optimizer(key: str, live: Any) -> bool:
    """Return True for a key of a target that has an optimizer's state by name, or an optimizer's state dict."""
    is_dict = isinstance(live, Mapping) and "param_groups" in live
    return is_dict or key.rpartition(".")[2] == "param_groups" or _BY_NAME.fullmatch(key) is not None


def _is_state(key: str) -> bool:
    return bool(NUMBERED.fullmatch(key) or _BY_NAME.fullmatch(key))


def section(
    title: str,
    keys: Mapping[str, str],
    others: Iterable[str] = (),
    there: Iterable[str] = (),
    mapped: Mapping[str, str] | None = None,
    listed_by: str = "load(..., dry_run=True)",
) -> list[str]:
    """Return lines about keys, each with its note, and the name in `others` that may be meant.

    Args:
        there: all names of the other side. Keys whose first segment none of them has take one line.
        listed_by: the call that reports each key, if there are more than are listed here.
    """
    if not keys:
        return []
    out = [f"  {len(keys)} {title}:"]
    rows, keys = _by_front(keys, {name.partition(".")[0] for name in there})
    out += [f"    {row}" for row in rows]
    if len(keys) > _MOST_LINES:
        return [*out, *(f"    {line}" for line in _by_pattern(keys)), f"    ({listed_by} lists all of them)"]
    others = list(others)
    known = set(others)
    for i, (key, where) in enumerate(keys.items()):
        name = mapped.get(key, key) if mapped else key
        guesses = i < _MOST_GUESSES and name not in known and len(others) < _MOST_KNOWN
        near = near_key(name, others) if guesses else ""
        sought = f"   (looked for as {name!r})" if name != key else ""
        out.append(f"    {key}{where}{sought}" + (f"   (did you mean {near!r}?)" if near else ""))
    return out


def _by_front(keys: Mapping[str, str], there: Collection[str]) -> tuple[list[str], Mapping[str, str]]:
    """Return a line for all keys below a segment that the other side does not have, and the other keys."""
    fronts: dict[tuple[str, str], list[str]] = {}
    for key, where in keys.items():
        front, dot, _ = key.partition(".")
        if dot and there and front not in there:
            fronts.setdefault((front, where), []).append(key)
    many = {at: names for at, names in fronts.items() if len(names) > _MOST_OF_A_FRONT}
    told = {name for names in many.values() for name in names}
    rows = [f"{front}.*{where}   ({len(names)}, such as {names[0]!r})" for (front, where), names in many.items()]
    return rows, {key: where for key, where in keys.items() if key not in told}


def _by_pattern(keys: Mapping[str, str]) -> list[str]:
    """Join keys that differ only in numbers, and have the same text after a colon, into one line.
    If there are too many patterns, join them by their common beginnings."""
    plain = re.compile(r"(?<![A-Za-z])\d+(?![A-Za-z])")
    split = ((key, key.partition(": "), where) for key, where in keys.items())
    patterns = grouped(((plain.sub("*", name), colon + text + where), key) for key, (name, colon, text), where in split)
    depth = 4
    while len(patterns) > _MOST_LINES and depth:
        shorter: dict[tuple[str, str], list[str]] = {}
        for (pattern, where), names in patterns.items():
            parts = pattern.split(".")
            front = ".".join(parts[:depth]) + (".*" if len(parts) > depth else "")
            shorter.setdefault((front, where), []).extend(names)
        patterns, depth = shorter, depth - 1
    rows = [
        f"{names[0]}{keys[names[0]]}"
        if len(names) == 1
        else f"{pattern}{where}   ({len(names)}, such as {names[0].partition(': ')[0]!r})"
        for (pattern, where), names in patterns.items()
    ]
    rest = sum(map(len, list(patterns.values())[_MOST_LINES:]))
    more = [f"and {rest} more"] if rest else []
    return [*rows[:_MOST_LINES], *more]


def prefix_hint(left: tuple[str, Collection[str]], right: tuple[str, Collection[str]]) -> str:
    """Return a note if the names of two sides, each with its label, differ only by a prefix such as
    `model.`."""
    (label, names), (other_label, others) = left, right
    if not set(names).isdisjoint(others):
        return ""
    for one, other, of in (names, others, ""), *_parts_of_more(left, right):
        (x, of_left), (y, of_right) = _without_prefix(one), _without_prefix(other)
        if not of_left or of_left != of_right:
            continue
        while x and y and x[-1] == y[-1]:
            x, y = x[:-1], y[:-1]
        here, there = (f"{'.'.join(parts)}." if parts else "" for parts in (x, y))
        return (
            f"the names of all tensors{of} are the same except for a prefix: {here!r} in {label}, {there!r} in "
            f"{other_label}. `reshard diff --model` removes prefixes of frameworks, such as 'model.' and 'module.'"
        )
    return ""


def _parts_of_more(
    left: tuple[str, Collection[str]], right: tuple[str, Collection[str]]
) -> Iterator[tuple[Collection[str], Collection[str], str]]:
    """Yield the names below each top-level key of one side, all names of the other side, and their
    places, in words."""
    for (label, names), (whole_label, whole) in ((left, right), (right, left)):
        for key, below in grouped((name.partition(".")[0], name) for name in names).items():
            if len(below) == len(whole):
                pair = (below, whole) if names is left[1] else (whole, below)
                yield *pair, f" in {whole_label} and of {key!r} in {label}"


def _without_prefix(names: Collection[str]) -> tuple[list[str], set[str]]:
    """Split all names into the parts of their common dotted prefix and the rest."""
    parts = [name.split(".") for name in names]
    one, other = min(parts, default=[]), max(parts, default=[])  # what these two share, all between them do
    shared = [x for x, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one[:-1], other[:-1]))]
    return shared, {".".join(name[len(shared) :]) for name in parts}
