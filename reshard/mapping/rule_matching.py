"""Which rule takes which names, and which of them belong together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from reshard.errors import KeyMismatchError
from reshard.mapping.name_patterns import Pattern, Site, sites
from reshard.mapping.rules import Rule

__all__ = ["Group", "Hit", "Matcher", "mapped_path"]

T = TypeVar("T")
Counts = Mapping[tuple[Any, ...], int]
NO_COUNTS: Counts = {}


@dataclass(frozen=True)
class Hit:
    """A name that a rule takes."""

    number: int
    """Of the rule."""
    rule: Rule
    source: int
    """Of the rule's sources, this one."""
    site: Site
    words: dict[str, str]

    @property
    def identity(self) -> tuple[Any, ...]:
        """The rule and the words in common: the same for parameters that belong together, and for their states."""
        return self.number, tuple(sorted(self.common.items()))

    @property
    def common(self) -> dict[str, str]:
        """The words but the one that counts the sources."""
        return {word: value for word, value in self.words.items() if word != self.rule.sources[0].number}

    def targets_without_numbers(self) -> list[str]:
        """The names that this one becomes part of, where no number is needed to say them."""
        return [self.site.key(p.fill(self.common)) for p in self.rule.targets if p.number is None]

    def targets_of(self, count: int | None) -> list[str]:
        """The names that this one becomes part of; `count` is how many targets there are where they are numbered."""
        return list(_filled(self.rule.targets, self.site, self.common, count))


def _filled(targets: Sequence[Pattern], site: Site, words: Mapping[str, str], count: int | None) -> Iterator[str]:
    for pattern in targets:
        if pattern.number is None:
            yield site.key(pattern.fill(words))
        else:
            yield from (site.key(pattern.fill({**words, pattern.number: str(i)})) for i in range(count or 0))


@dataclass(frozen=True)
class Group:
    """Names that one application of a rule takes together."""

    number: int
    rule: Rule
    site: Site
    """Of the first member."""
    words: dict[str, str]
    members: tuple[str, ...]
    """In the order of the rule's sources, or of their numbers."""
    all_sites: tuple[Site, ...]
    missing: tuple[int, ...] = ()
    """Places, in that order, of states that are not there, and for which the rule's `fill` stands."""
    numbers: tuple[int, ...] = ()
    """Of the targets, where they are numbered."""

    def filled(self, members: Sequence[T], filling: T) -> list[T]:
        """Something for every place: that of the members, and `filling` for what is missing."""
        out = list(members)
        for place in self.missing:
            out.insert(place, filling)
        return out

    @property
    def identity(self) -> tuple[Any, ...]:
        """The rule and its words: the same for a parameter and its states."""
        return self.number, tuple(sorted(self.words.items()))

    def numbered(self, count: int) -> Group:
        """The same with so many numbered targets."""
        return replace(self, numbers=tuple(range(count)))

    def target_names(self, count: int | None) -> list[str]:
        """The keys that are made."""
        return list(_filled(self.rule.targets, self.site, self.words, count))

    def is_carried(self, shapes: Sequence[tuple[int, ...]], parameters: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether the members do not have one value for each element of their parameters: then they go along."""
        if not self.site.is_state:
            return False
        for site, shape in zip(self.all_sites, shapes):
            if shape != parameters.get(site.name, shape if shape else None):
                return True
        return False


class Matcher:
    """The rules of a stage."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = tuple(rules)
        self._sources = [(n, s, p) for n, rule in enumerate(rules) for s, p in enumerate(rule.sources)]
        bare = [re.sub(r"\?P<\w+>", "?:", pattern.regex.pattern) for _, _, pattern in self._sources]
        # one look for all patterns: named by their place
        self._any = re.compile("|".join(f"(?P<p{i}>{text})" for i, text in enumerate(bare)) or r"(?!)")

    def match(self, key: str) -> Hit | None:
        """The first rule that takes the key, as itself or at any other site."""
        return self._best(sites(key))

    def match_state(self, key: str) -> Hit | None:
        """The same for keys of an optimizer only."""
        return self._best(site for site in sites(key) if site.is_state)

    def _best(self, found: Iterable[Site]) -> Hit | None:
        best: Hit | None = None
        for site in found:
            match = self._any.fullmatch(site.name)
            if match is None:
                continue
            for i, (number, source, pattern) in enumerate(self._sources):
                if match[f"p{i}"] is None:
                    continue
                words = pattern.match(site.name)
                if words is not None and (best is None or number < best.number):
                    best = Hit(number, self.rules[number], source, site, words)
        return best

    def parameters(self, keys: Iterable[str]) -> Iterator[tuple[str, Site]]:
        """The keys that are parameters that rules take, and where in the key they stand."""
        return ((key, hit.site) for key, hit in self._parameters(keys))

    def _parameters(self, keys: Iterable[str]) -> Iterator[tuple[str, Hit]]:
        for key in keys:
            hit = self.match(key)
            if hit is not None and not hit.site.is_state:
                yield key, hit

    def groups(self, keys: Iterable[str], counts: Counts = NO_COUNTS) -> tuple[list[Group], list[str]]:
        """The keys that rules take, put together, and the others.

        As many states belong together as parameters do: those among the keys, or else by `counts`.

        Raises KeyMismatchError where some of a rule's sources are there, and others are not.
        """
        found: dict[tuple[Any, ...], dict[tuple[int, int], tuple[str, Hit]]] = {}
        rest: list[str] = []
        known = dict(counts)
        for key in keys:
            hit = self.match(key)
            if hit is None:
                rest.append(key)
                continue
            over = hit.rule.sources[hit.source].number
            place = (hit.source, int(hit.words[over]) if over else 0)
            found.setdefault((hit.site.prefix, hit.site.suffix, hit.identity), {})[place] = (key, hit)
            _count(known, hit)
        groups = []
        for of in found.values():
            group = self._group(of, known)
            if group is None:
                rest += [key for key, _ in of.values()]
            else:
                groups.append(group)
        return groups, rest

    def counts(self, keys: Iterable[str]) -> Counts:
        """How many numbered parameters among the keys belong together, by rule and words."""
        out: dict[tuple[Any, ...], int] = {}
        for _, hit in self._parameters(keys):
            _count(out, hit)
        return out

    def _group(self, of: Mapping[tuple[int, int], tuple[str, Hit]], counts: Counts) -> Group | None:
        first = next(iter(of.values()))[1]
        rule = first.rule
        count = max(index for _, index in of) + 1
        if first.site.is_state:
            count = max(count, counts.get(first.identity, 0))
        wanted = [(source, index) for source in range(len(rule.sources)) for index in range(count)]
        missing = [place for place in wanted if place not in of]
        if missing and rule.optional:
            return None
        if missing and (rule.fill is None or not first.site.is_state):
            raise KeyMismatchError(_missing(first, missing[0], next(iter(of.values()))[0]))
        hits = [of[place] for place in wanted if place in of]
        return Group(
            first.number,
            rule,
            hits[0][1].site,
            first.common,
            tuple(key for key, _ in hits),
            tuple(hit.site for _, hit in hits),
            tuple(at for at, place in enumerate(wanted) if place not in of),
        )


def _count(counts: dict[tuple[Any, ...], int], hit: Hit) -> None:
    over = hit.rule.sources[hit.source].number
    if over is not None and not hit.site.is_state:
        counts[hit.identity] = max(counts.get(hit.identity, 0), int(hit.words[over]) + 1)


def _missing(first: Hit, place: tuple[int, int], there: str) -> str:
    """What to say of a source that is not there."""
    source, index = place
    pattern = first.rule.sources[source]
    words = {**first.common, **({pattern.number: str(index)} if pattern.number else {})}
    hint = (
        "; the rule's fill=0 stands for states that some do not have" if first.site.is_state and pattern.number else ""
    )
    return (
        f"{first.site.key(pattern.fill(words))!r} is missing: it belongs together with {there!r} in "
        f"{first.site.key(first.rule.targets[0].fill(first.common))!r}{hint}"
    )


def mapped_path(path: tuple[Any, ...], old: str, new: str) -> tuple[Any, ...]:
    """The path in the nested state that a key gets when it is renamed from `old` to `new`.

    The parts of the path in which the keys differ are replaced: by one part where the name was one part, else by one
    part for each part of the name.
    """
    texts = [str(part) for part in path]
    if ".".join(texts) != old:
        return (new,)
    head = 0
    rest = new
    while head < len(texts) - 1 and rest.startswith(texts[head] + "."):
        rest = rest[len(texts[head]) + 1 :]
        head += 1
    tail = len(texts)
    while tail > head + 1 and rest.endswith("." + texts[tail - 1]):
        rest = rest[: -len(texts[tail - 1]) - 1]
        tail -= 1
    one = tail - head == 1
    return (*path[:head], *((rest,) if one else rest.split(".")), *path[tail:])
