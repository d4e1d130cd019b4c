"""`Mapping`: rules that convert the names and shapes of a state, lazily, and back.

    mapping = Mapping([Rename("tok_embeddings.weight", "model.embed_tokens.weight"), ...])
    mapping.apply(reshard.open(path))  # another lazy checkpoint; nothing is read
    (first | second).inverse()         # the inverse of two consecutive stages

In each stage, the first rule that matches a name applies. Names that match no rule stay the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping as Dict, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from planners.errors import PlanError
from planners.geometry.arrays import grouped
from planners.geometry.box import Shape
from planners.geometry.layout import TensorSpec
from planners.geometry.views import View
from planners.units import format_some
from reshard.checkpoint import Checkpoint
from reshard.errors import KeyMismatchError, NormalizationError
from reshard.live.dtypes import refused_codes
from reshard.live.plain_data import represent
from reshard.live.state import same_value
from reshard.mapping.mapped_tensors import assembled, constant
from reshard.mapping.quantized_checks import check_plain
from reshard.mapping.rules import Cast, Computing, Drop, Rename, Rule, Site, States, sites, views_of
from reshard.state import KeyPath
from reshard.stored.contents import Contents, LazyMapping, Makers
from reshard.stored.tensor import LazyTensor, StoredTensor


class Mapping:
    """Rules that rename, split, or join the tensors of a checkpoint. `inverse()` returns the opposite mapping."""

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        given = tuple(rules) if isinstance(rules, Iterable) else (rules,)
        if odd := [rule for rule in given if not isinstance(rule, Rule)]:
            raise NormalizationError(
                f"a Mapping consists of rules, as in Mapping([Rename('a', 'b')]), but contains {odd[0]!r:.60}. A dict "
                "of names needs no Mapping: load(state, path, mapping={'key of the state': 'name in the checkpoint'})"
            )
        self.stages: tuple[tuple[Rule, ...], ...] = (given,) if given else ()

    @classmethod
    def _of(cls, stages: Iterable[tuple[Rule, ...]]) -> Mapping:
        made = cls()
        made.stages = tuple(stages)
        return made

    def __or__(self, then: Mapping) -> Mapping:
        """Return a mapping that applies this one, then `then`."""
        return Mapping._of((*self.stages, *then.stages))

    def inverse(self) -> Mapping:
        """Return the inverse mapping. If several rules make the same names, it inverts only the first.

        Raises NormalizationError if a rule has no inverse. The error names the rule.
        """
        return Mapping._of(tuple(rule.inverse() for rule in stage) for stage in reversed(self.stages))

    def apply(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with the new names and shapes. Reads no tensor unless its values
        determine a shape.

        Optimizer states, per-parameter settings, and lists of parameters follow their parameters.
        A state of one element, such as a step, stays as it is. A larger state must have the
        parameter's shape.

        Raises:
            KeyMismatchError: a tensor that a rule combines with others is missing, or two tensors
                get the same name.
            PlanError, NormalizationError: shapes do not fit a rule, or it would rearrange
                quantized weights. Some of these errors are raised when the tensor is read.
        """
        contents = checkpoint.contents
        for stage in self.stages:
            contents = MappingStage(Matcher(stage, *_names_of(contents)), contents, checkpoint.url).contents()
        known = checkpoint.contents
        mapped = Checkpoint(replace(contents, checking=known.checking, files=known.files), checkpoint.url)
        mapped.derivation = f"{checkpoint.derivation}{self}"
        return mapped

    def views(self, specs: Dict[str, TensorSpec]) -> dict[str, View]:
        """Return the mapped tensors as views of the given ones, for `planners.plan_reads(...,
        views=...)`.

        Raises the errors of `apply`, and NormalizationError for rules that compute values.
        """
        made: Any = {name: View.of(spec) for name, spec in specs.items()}
        for stage in self.stages:
            given = Contents(made, format="views")
            made = _ViewsStage(Matcher(stage, made), given, "the state").contents().tensors
        return dict(made)

    def names(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Return the new names of each name that a rule matches, except those that `Unstack` makes."""
        out: dict[str, tuple[str, ...]] = {name: (name,) for name in names}
        taken: set[str] = set()
        for stage in self.stages:
            matcher = Matcher(stage, chain.from_iterable(out.values()))
            for name, now in out.items():
                follow: list[str] = []
                for current in now:
                    hit = matcher.match(current)
                    if hit is None:
                        follow.append(current)
                        continue
                    taken.add(name)
                    follow += hit.target_names(None)
                out[name] = tuple(follow)
        return {name: now for name, now in out.items() if name in taken}

    def check_taken(self, state: Checkpoint) -> None:
        """Raise KeyMismatchError if no rule matches anything in the checkpoint, unless a rule is optional."""
        is_needed = self.stages and not any(rule.optional for stage in self.stages for rule in stage)
        names, objects = [*state, *state.aliases], [*state.objects, *state.contents.per_rank]
        if not is_needed or not (names or objects) or self.names(names):
            return
        matchers = [Matcher(stage) for stage in self.stages]
        if not any(matcher.match_object(key) for matcher in matchers for key in objects):
            hint = ": rules map the checkpoint's names to the new ones"
            if self.names(objects):
                hint = ". A rule renames or drops a plain value only by its full name"
            raise KeyMismatchError(
                f"no rule of the mapping matches a name in {state.url}, such as {[*names, *objects][0]!r}{hint}"
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and self.stages == other.stages

    def __hash__(self) -> int:
        return hash(self.stages)

    def __repr__(self) -> str:
        return f"Mapping({' | '.join(str(list(stage)) for stage in self.stages)})"


def between(source: Mapping, target: Mapping) -> Mapping:
    """Return the mapping from the names that `source` makes to those that `target` makes. Common
    first stages are omitted.

    Raises NormalizationError, which names the rule, if a stage of `source` has no inverse.
    """
    same = 0
    for mine, other in zip(source.stages, target.stages):
        if mine != other:
            break
        same += 1
    return Mapping._of(source.stages[same:]).inverse() | Mapping._of(target.stages[same:])


def apply_dict(names: Dict[str, str], checkpoint: Checkpoint) -> Checkpoint:
    """Apply a dict of new name -> stored name, as `load` accepts it.

    Other names stay, except that optimizer states are renamed with their parameter. If a tensor
    gets several names, they are tied to the first.

    Raises KeyMismatchError if the checkpoint lacks a name, or a name would occur twice.
    """
    known = {*checkpoint, *checkpoint.aliases, *checkpoint.objects, *checkpoint.contents.per_rank}
    unknown = [name for name in names.values() if name not in known]
    if unknown:
        raise KeyMismatchError(
            f"the mapping names {unknown[0]!r}, which {checkpoint.url} does not have: write {{new name: stored name}}"
        )
    first: dict[str, str] = {}
    for new, old in names.items():
        first.setdefault(old, new)
    made = MappingStage(
        _ExactMatcher(first, *_names_of(checkpoint.contents)), checkpoint.contents, checkpoint.url
    ).contents()
    aliases, paths = dict(made.aliases), dict(made.paths)
    plain = {*made.objects, *made.per_rank}
    for new, old in names.items():
        kept = first[old]
        if new == kept:
            continue
        if kept in plain or new in plain or new in made.tensors or new in aliases:
            raise KeyMismatchError(
                f"{checkpoint.url}: two tensors or objects would be called {new!r}, or {old!r} is not a tensor and "
                "would have two names: rename one of them"
            )
        aliases[new], paths[new] = aliases.get(kept, kept), (new,)
    renamed = Checkpoint(replace(made, aliases=aliases, paths=paths), checkpoint.url)
    renamed.derivation = f"{checkpoint.derivation}{names}"
    return renamed


# One stage of a mapping, applied to a checkpoint's contents: new names, and lazily created tensors.


class MappingStage:
    """One stage, applied to the contents of a checkpoint."""

    def __init__(self, matcher: Matcher, contents: Contents, url: str) -> None:
        self.given, self.url, self.matcher = contents, url, matcher
        aliases = {a: b for a, b in contents.aliases.items() if a not in contents.tensors}
        self.tensors: dict[str, Callable[[], StoredTensor]] = {
            name: partial(contents.tensors.__getitem__, name) for name in contents.tensors
        }
        for alias, kept in aliases.items():
            self.tensors[alias] = partial(lambda a, k: contents.tensors[k].renamed(a), alias, kept)
        self._parameters = {hit.site.name: name for name, hit in self.matcher.parameters(self.tensors)}
        self.made: Makers = {}
        self.objects: Makers = {}
        self.per_rank: Makers = {}
        self.paths: dict[str, KeyPath] = {}
        self.renamed: dict[str, str] = {}
        """New names of tensors that are neither combined nor split."""
        self.warnings: list[str] = []
        self.change: dict[str, Rule] = {}
        """For such a tensor: the rule that changes more than its name, with empty names."""

    def contents(self) -> Contents:
        """Return the contents under the new names."""
        for key in self.given.per_rank:
            hit = self.matcher.match_object(key)
            for new in [key] if hit is None else hit.target_names(None):
                self._put(self.per_rank, new, key, partial(self.given.per_rank.__getitem__, key))
        groups, rest = self.matcher.groups(self.tensors)
        for name in rest:
            self._put(self.made, name, name, self.tensors[name])
            self.renamed[name] = name
        counts = [self._count_in(group) for group in groups]
        self._counts = {group.identity: count for group, count in zip(groups, counts) if count is not None}
        for group, count in zip(groups, counts):
            self._add_group(group, count)
        self._add_objects()
        aliases = {
            self.renamed[alias]: self.renamed[kept]
            for alias, kept in self.given.aliases.items()
            if alias in self.renamed and kept in self.renamed and self.change.get(alias) == self.change.get(kept)
        }
        were_listed = {new for old, new in self.renamed.items() if old in self.given.tensors}
        listed = {n: m for n, m in self.made.items() if n not in aliases or n in were_listed}
        return replace(
            self.given,
            tensors=LazyMapping(listed),
            objects=LazyMapping(self.objects),
            per_rank=LazyMapping(self.per_rank),
            aliases=aliases,
            paths=self.paths,
            fingerprints=None,
            warnings=(*self.given.warnings, *self.warnings),
        )

    def _put(self, into: Makers, new: str, old: str, make: Callable[[], Any]) -> None:
        if new in self.made or new in self.objects or new in self.per_rank:
            raise KeyMismatchError(
                f"{self.url}: two tensors or objects would be called {new!r}, one of them is {old!r}: "
                "rename one of them"
            )
        into[new] = make
        path = self.given.path_of(old)
        self.paths[new] = path if new == old else mapped_path(path, old, new)

    def _count_in(self, group: RuleGroup) -> int | None:
        """Return the number of targets, which the shape of the source determines.

        Returns None if the rule does not number targets, or the shape does not determine it, as for
        a step.
        """
        source = self.tensors[group.members[0]]() if group.rule.numbers_targets else None
        if source is None or self._is_carried(group, [source.spec.shape]):
            return None
        return len(self._views(group, [source]))

    def _count_of(self, group: RuleGroup) -> int | None:
        """Return the number of targets of the parameter or of another state, or None if the rule
        does not number targets."""
        if group.rule.numbers_targets and group.identity not in self._counts:
            raise KeyMismatchError(
                f"{group.members[0]!r} belongs to a parameter that is not in {self.url}, so the number of its parts is "
                "unknown"
            )
        return self._counts.get(group.identity)

    def _add_group(self, group: RuleGroup, count: int | None) -> None:
        rule, first = group.rule, group.members[0]
        if isinstance(rule, Rename):
            (new,) = group.target_names(None)
            self.renamed[first] = new
            self._put(self.made, new, first, lambda: self._renamed(self.tensors[first](), new))
            return
        if len(group.members) == 1 and len(rule.targets) == 1 and not rule.numbers_targets:
            [self.renamed[first]] = group.target_names(None)
            self.change[first] = rule.renamed(lambda _: "")
        if isinstance(rule, Computing):
            (new,) = group.target_names(None)
            self._put(self.made, new, first, lambda: self._computed(group, new))
            return
        if group.missing:
            self.warnings.append(_filled_note(group))
        for number, new in enumerate(group.target_names(self._count_of(group) if count is None else count)):
            self._put(self.made, new, first, partial(self._part, group, number, new))

    def _is_carried(self, group: RuleGroup, shapes: Sequence[Shape]) -> bool:
        names = [site.name for site in group.all_sites]
        known = {n: self.tensors[self._parameters[n]]().spec.shape for n in names if n in self._parameters}
        return group.is_carried(shapes, known)

    def _part(self, group: RuleGroup, number: int, new: str) -> StoredTensor:
        sources = [self.tensors[name]() for name in group.members]
        if self._is_carried(group, [s.spec.shape for s in sources]):
            self._check_equal(sources)
            return self._renamed(sources[0], new)
        dtypes = {source.spec.dtype for source in sources}
        if len(dtypes) > 1:
            raise KeyMismatchError(
                f"{new!r} would be made of tensors of {' and '.join(sorted(dtypes))}; cast them first"
            )
        if group.missing:
            assert group.rule.fill is not None
            sources = group.filled(sources, self._constant(sources[0].spec, group.rule.fill))
        return self._assembled(self._views(group, sources)[number], sources, new)

    def _views(self, group: RuleGroup, sources: Sequence[StoredTensor]) -> tuple[View, ...]:
        """Return the targets as views. Raises NormalizationError, which names the tensors, if their
        shapes do not fit or the weights are quantized."""
        known, takes = self.tensors, self.matcher.as_in(group)
        for source in [] if group.site.is_state else sources:
            check_plain(group.rule, source.spec.fqn, lambda name: known[name]().spec, known, takes)
        try:
            return views_of(group.rule, tuple(s.spec.shape for s in sources), sources[0].spec.dtype)
        except (PlanError, NormalizationError) as error:
            given = format_some([f"{s.spec.fqn!r} {list(s.spec.shape)}" for s in sources], 3)
            raise NormalizationError(f"{type(group.rule).__name__} does not fit {given}: {error}") from None

    def _renamed(self, tensor: StoredTensor, new: str) -> StoredTensor:
        return tensor.renamed(new)

    def _constant(self, spec: TensorSpec, value: float) -> StoredTensor:
        return constant(spec, value)

    def _assembled(self, view: View, sources: Sequence[StoredTensor], new: str) -> StoredTensor:
        return assembled(view, sources, new)

    def _computed(self, group: RuleGroup, new: str) -> StoredTensor:
        assert isinstance(group.rule, Computing)
        sources = [self.tensors[name]() for name in group.members]
        if isinstance(group.rule, Cast):
            name, dtype = group.members[0], sources[0].spec.dtype
            if why := refused_codes(name, dtype, group.rule.dtype, self.tensors):
                raise NormalizationError(f"{name!r} of {dtype} cannot become {group.rule.dtype}: {why}")
        return group.rule.compute(sources, new, group.site.state)

    def _check_equal(self, sources: Sequence[StoredTensor]) -> None:
        """Raise KeyMismatchError unless states that become one, such as steps, are equal."""
        first, *others = map(LazyTensor, sources)
        for source, other in zip(sources[1:], others):
            if (other[...] != first[...]).any():
                raise _unequal(sources[0].fqn, first[...].tolist(), source.fqn, other[...].tolist())

    def _add_objects(self) -> None:
        """Rename settings and plain states with their parameter, and translate lists of parameters."""
        objects = self.given.objects
        # only keys of states and settings belong to a parameter, so only they match patterns
        mine = [key for key in objects if self.matcher.match_object(key) is not None]
        groups, _ = self.matcher.groups(mine, self.matcher.counts(self.tensors) if mine else {})
        taken, lists = set(mine), _flat_lists(objects)
        for key in objects:
            if key not in taken and _LIST_ITEM.fullmatch(key) is None:
                self._put(self.objects, key, key, partial(self._object, key))
        for keys in lists:
            if not all(isinstance(objects[key], str) for key in keys):
                for key in keys:
                    self._put(self.objects, key, key, partial(objects.__getitem__, key))
                continue
            stem, path = keys[0].rpartition(".")[0], self.given.path_of(keys[0])
            for at, name in enumerate(self._translated([objects[key] for key in keys])):
                self._put(self.objects, f"{stem}.{at}", f"{stem}.{at}", partial(str, name))
                self.paths[f"{stem}.{at}"] = (*path[:-1], at)
        for group in groups:
            if group.missing:
                self.warnings.append(_filled_note(group))
            for new in group.target_names(self._count_of(group)):
                self._put(self.objects, new, group.members[0], partial(self._carried_object, group))

    def _carried_object(self, group: RuleGroup) -> Any:
        first, *others = group.members
        value = self.given.objects[first]
        for name in others:
            if not same_value(other := self.given.objects[name], value):
                raise _unequal(first, value, name, other)
        return value

    def _object(self, key: str) -> Any:
        value = self.given.objects[key]
        is_list = key.endswith(".params") and isinstance(value, list | tuple)
        if not is_list or not all(isinstance(name, str) for name in value):
            return value
        return self._translated(value)

    def _translated(self, names: Iterable[str]) -> list[str]:
        """Return the new names of a list of parameters, without duplicates."""
        out: dict[str, None] = {}
        for name in names:
            hit = self.matcher.match_listed(name)
            found = (name,) if hit is None else hit.target_names(self._counts.get(hit.identity))
            out.update(dict.fromkeys(found))
        return list(out)


class _ViewsStage(MappingStage):
    """One stage, applied to views instead of tensors."""

    def _renamed(self, tensor: Any, new: str) -> Any:
        return tensor.rename(new)

    def _constant(self, spec: TensorSpec, value: float) -> Any:
        return View.full(spec, value)

    def _assembled(self, view: View, sources: Sequence[Any], new: str) -> Any:
        return view.through({str(number): source for number, source in enumerate(sources)}).rename(new)

    def _computed(self, group: RuleGroup, new: str) -> Any:
        """Raise the rule's error: computed values are not elements of the sources."""
        return group.rule.build(())

    def _check_equal(self, sources: Sequence[Any]) -> None:
        """Do nothing: views have no values."""


def _names_of(contents: Contents) -> tuple[list[str], list[str]]:
    """Return all keys, and the names in lists of parameters."""
    objects = contents.objects
    listed: list[Any] = []
    for key in objects:
        if key.endswith(".params") or _LIST_ITEM.fullmatch(key):
            value = objects[key]
            listed += value if isinstance(value, list | tuple) else [value]
    keys = [*contents.tensors, *contents.aliases, *objects, *contents.per_rank]
    return keys, [name for name in listed if isinstance(name, str)]


def _unequal(one: str, value: Any, other: str, its_value: Any) -> KeyMismatchError:
    return KeyMismatchError(
        f"{one!r} ({represent(value):.40}) and {other!r} ({represent(its_value):.40}) cannot become one value: they "
        'are not equal numbers. Make them equal before the save, or load without the optimizer, with strict="subset"'
    )


def _filled_note(group: RuleGroup) -> str:
    total = len(group.members) + len(group.missing)
    return (
        f"{group.target_names(None)[0]!r}: {len(group.missing)} of {total} have no such state, the first is number "
        f"{group.missing[0]}: their elements are filled with {group.rule.fill}; a single number, such as a step, is "
        "that of the others"
    )


_LIST_ITEM = re.compile(r"(.*\.param_groups\.\d+\.params)\.(\d+)")


def _flat_lists(objects: Iterable[str]) -> list[list[str]]:
    """Return the keys of each list of parameters that was saved item by item, in order."""
    matches = filter(None, map(_LIST_ITEM.fullmatch, objects))
    found = grouped((match[1], (int(match[2]), match[0])) for match in matches)
    return [[key for _, key in sorted(items)] for items in found.values()]


# Which rule matches which names, and which names belong together.


T = TypeVar("T")
Identity = tuple[Any, ...]
Counts = dict[Identity, int]
NO_COUNTS: Counts = {}


@dataclass(frozen=True)
class Application:
    """A rule that matched: where, and the values of its placeholders."""

    number: int
    """Index of the rule."""
    rule: Rule
    site: Site
    """Where the name matched, or the first name if the rule combines several."""
    words: dict[str, str]

    @property
    def identity(self) -> Identity:
        """The rule and the common placeholders. Equal for parameters that belong together, and for
        their states."""
        return self.number, tuple(sorted(self.common.items()))

    @property
    def common(self) -> dict[str, str]:
        """The values of all placeholders except the one that numbers the sources."""
        return {word: value for word, value in self.words.items() if word != self.rule.sources[0].number}

    def target_names(self, count: int | None) -> list[str]:
        """Return the new keys. `count` is the number of targets if the rule numbers them."""
        words, out = self.common, list[str]()
        for pattern in self.rule.targets:
            numbers = [{}] if pattern.number is None else [{pattern.number: str(i)} for i in range(count or 0)]
            out += [self.site.key(pattern.fill({**words, **number})) for number in numbers]
        return out


@dataclass(frozen=True)
class Hit(Application):
    """A name that matches a rule."""

    source: int
    """Index of the source pattern that matched."""


@dataclass(frozen=True)
class RuleGroup(Application):
    """Names that one application of a rule combines."""

    members: tuple[str, ...]
    """Names in the order of the rule's sources or of their numbers."""
    all_sites: tuple[Site, ...]
    missing: tuple[int, ...] = ()
    """Positions, in the same order, of missing states, which `fill` replaces."""

    def filled(self, members: Sequence[T], filling: T) -> list[T]:
        """Return `members` with `filling` inserted at each missing position."""
        out = list(members)
        for place in self.missing:
            out.insert(place, filling)
        return out

    def is_carried(self, shapes: Sequence[Shape], parameters: Dict[str, Shape]) -> bool:
        """Return True if members are states without a value for each element of their parameter:
        they stay unchanged.

        Raises NormalizationError if such a state has several elements, such as one per row, and the
        rule rearranges the parameter.
        """
        if not self.site.is_state:
            return False
        for key, site, shape in zip(self.members, self.all_sites, shapes):
            if shape != parameters.get(site.name, shape if shape else None):
                if math.prod(shape) > 1 and not isinstance(self.rule, Rename | Drop):
                    raise NormalizationError(
                        f"{key!r} has the shape {list(shape)}, not that of its parameter, so {self.rule} does not "
                        f"convert it: leave it out by a rule before that one, Drop({key!r})"
                    )
                return True
        return False


class Matcher:
    """Matches keys with the rules of a stage. `keys` and `listed`: see `States`."""

    def __init__(
        self,
        rules: Sequence[Rule],
        keys: Iterable[str] = (),
        listed: Iterable[str] = (),
    ) -> None:
        self.rules, self._states = tuple(rules), States(keys, listed)
        self._sources = [(n, s, p) for n, rule in enumerate(rules) for s, p in enumerate(rule.sources)]
        bare = [re.sub(r"\?P<\w+>", "?:", pattern.regex.pattern) for _, _, pattern in self._sources]
        # one search for all patterns, in groups named by their index
        self._any = re.compile("|".join(f"(?P<p{i}>{text})" for i, text in enumerate(bare)) or r"(?!)")

    def match(self, key: str) -> Hit | None:
        """Return the first rule that matches the key, as it is or at another site."""
        own = self._best(site for site in self._states.sites(key) if not site.is_state)
        hits = [hit for hit in (self._as_state(key), own) if hit is not None]
        return min(hits, key=lambda hit: hit.number, default=None)

    def match_object(self, key: str) -> Hit | None:
        """Return the rule that matches a plain value: a key of an optimizer, or the full name in a
        Rename or Drop."""
        hit, of_state = self.match(key), self._as_state(key)
        return hit if of_state or (hit and not hit.words and isinstance(hit.rule, Rename | Drop)) else None

    def as_in(self, group: RuleGroup) -> Callable[[str], bool]:
        """Return a function that returns True if the group's rule matches a key."""
        return lambda key: (hit := self.match(key)) is not None and hit.number == group.number

    def match_listed(self, name: str) -> Hit | None:
        """Return the rule that matches a parameter under the optimizer's name for it."""
        return self._with_parameter(Site("", name))

    def _as_state(self, key: str) -> Hit | None:
        site = self._states.of(key)
        if site is not None:
            return self._with_parameter(site)
        return self._best(site for site in sites(key) if site.is_state)

    def _with_parameter(self, site: Site) -> Hit | None:
        """Return the rule for a state's parameter, at the state's site: states follow their parameters."""
        key = self._states.parameters.get(site.name) or site.name
        hit = self._best(self._states.sites(key))
        if hit is None:
            return None
        name = hit.site.name
        inner = site.name.removesuffix(name) if site.name.endswith(name) else ""
        section = name.removesuffix(site.name) if name.endswith(site.name) else ""
        site = replace(site, prefix=site.prefix + inner, name=name, section=section)
        return replace(hit, site=site)

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
                    best = Hit(number, self.rules[number], site, words, source)
        return best

    def parameters(self, keys: Iterable[str]) -> Iterator[tuple[str, Hit]]:
        """Yield the keys of parameters that match a rule."""
        for key in keys:
            hit = self.match(key)
            if hit is not None and not hit.site.is_state:
                yield key, hit

    def groups(self, keys: Iterable[str], counts: Counts = NO_COUNTS) -> tuple[list[RuleGroup], list[str]]:
        """Return the matching keys in groups, and the other keys.

        A group of states has as many members as the group of its parameters, which are in the keys
        or in `counts`.

        Raises KeyMismatchError if only some of a rule's sources exist.
        """
        found: dict[Identity, dict[tuple[int, int], tuple[str, Hit]]] = {}
        rest: list[str] = []
        known = dict(counts)
        for key in keys:
            hit = self.match(key)
            if hit is None:
                rest.append(key)
                continue
            self._check_parameter(key, hit)
            over = hit.rule.sources[hit.source].number
            place = (hit.source, int(hit.words[over]) if over else 0)
            own = found.setdefault((hit.site.prefix, hit.site.suffix, hit.identity), {})
            if own.setdefault(place, (key, hit))[0] != key:
                raise KeyMismatchError(f"{own[place][0]!r} and {key!r} have the same place in {hit.rule}: rename one")
            _count(known, hit)
        groups = []
        for of in found.values():
            group = self._group(of, known)
            if group is None:
                rest += [key for key, _ in of.values()]
            else:
                groups.append(group)
        return groups, rest

    def _check_parameter(self, key: str, hit: Hit) -> None:
        """Raise KeyMismatchError if a rule would rearrange a state whose parameter is neither in
        the checkpoint nor in a list, while other parameters are: its shape may differ. torchtitan
        lists fused parameters, whose states are fused, and stores them split."""
        site, states = hit.site, self._states
        if not site.is_state or isinstance(hit.rule, Rename | Drop | Computing):
            return
        if states.sections and site.name not in states.parameters:
            raise KeyMismatchError(
                f"{hit.rule} takes {key!r}, but there is no parameter {site.name!r} whose state "
                f"it could be: leave it out by a rule before that one, Drop({key!r}), or have the "
                "parameter in the checkpoint"
            )

    def counts(self, keys: Iterable[str]) -> Counts:
        """Return, by identity, the number of numbered parameters that belong together."""
        out: Counts = {}
        for _, hit in self.parameters(keys):
            _count(out, hit)
        return out

    def _group(self, of: Dict[tuple[int, int], tuple[str, Hit]], counts: Counts) -> RuleGroup | None:
        first = next(iter(of.values()))[1]
        rule = first.rule
        count = max(index for _, index in of) + 1
        if first.site.is_state:
            count = max(count, counts.get(first.identity, 0))
        places = ((source, index) for source in range(len(rule.sources)) for index in range(count))
        is_short = len(of) < len(rule.sources) * count
        if is_short and rule.optional:
            return None
        if is_short and (rule.fill is None or not first.site.is_state):
            missing = next(place for place in places if place not in of)  # there may be billions of places
            raise KeyMismatchError(_missing(first, missing, next(iter(of.values()))[0]))
        wanted = list(places)
        hits = [of[place] for place in wanted if place in of]
        return RuleGroup(
            first.number,
            rule,
            hits[0][1].site,
            first.common,
            tuple(key for key, _ in hits),
            tuple(hit.site for _, hit in hits),
            tuple(at for at, place in enumerate(wanted) if place not in of),
        )


class _ExactMatcher(Matcher):
    """Renames tensors, objects, and optimizer states by exact name.

    Rules are created when they match.
    """

    def __init__(
        self,
        names: Dict[str, str],
        keys: Iterable[str],
        listed: Iterable[str],
    ) -> None:
        super().__init__((), keys, listed)
        self._names = names

    def match(self, key: str) -> Hit | None:
        return self._best([Site("", key)]) or self._as_state(key)  # a state may be renamed itself

    def match_object(self, key: str) -> Hit | None:
        return self.match(key)

    def _best(self, found: Iterable[Site]) -> Hit | None:
        for site in found:
            if site.name in self._names and (site.is_state or not site.prefix):
                return Hit(0, Rename(site.name, self._names[site.name]), site, {"": site.name}, 0)
        return None


def _count(counts: Counts, hit: Hit) -> None:
    over = hit.rule.sources[hit.source].number
    if over is not None and not hit.site.is_state:
        counts[hit.identity] = max(counts.get(hit.identity, 0), int(hit.words[over]) + 1)


def _missing(first: Hit, place: tuple[int, int], there: str) -> str:
    """Return the message about a missing source."""
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


def mapped_path(path: KeyPath, old: str, new: str) -> KeyPath:
    """Return the path in the nested state for a key that is renamed from `old` to `new`.

    Replaces the segments of the path in which the keys differ: a single segment by one segment,
    several by one for each segment of the new name.
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
