"""One stage of a mapping, applied to the contents of a checkpoint: new names, and how each tensor is made, lazily."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Mapping as Dict
from dataclasses import replace
from functools import partial
from typing import Any

from planners.errors import PlanError
from planners.views.view import View
from reshard.errors import KeyMismatchError, NormalizationError
from reshard.formats.stored.contents import Contents, LazyMapping
from reshard.formats.stored.lazy_tensor import LazyTensor
from reshard.formats.stored.tensor import StoredTensor
from reshard.mapping.apply_view import assembled, constant
from reshard.mapping.computed_rules import Computing
from reshard.mapping.rule_matching import Group, Matcher, mapped_path
from reshard.mapping.rules import Rename, Rule, views_of

__all__ = ["Stage"]


class Stage:
    """One stage, applied to the contents of a checkpoint."""

    def __init__(self, rules: Sequence[Rule], contents: Contents, url: str) -> None:
        self.given, self.url = contents, url
        self.matcher = Matcher(rules)
        aliases = {a: b for a, b in contents.aliases.items() if a not in contents.tensors}
        self.tensors: dict[str, Callable[[], StoredTensor]] = {
            name: partial(contents.tensors.__getitem__, name) for name in contents.tensors
        }
        for alias, kept in aliases.items():
            self.tensors[alias] = partial(lambda a, k: contents.tensors[k].renamed(a), alias, kept)
        self._parameters = {site.name: name for name, site in self.matcher.parameters(self.tensors)}
        self.made: dict[str, Callable[[], Any]] = {}
        self.objects: dict[str, Callable[[], Any]] = {}
        self.paths: dict[str, tuple[Any, ...]] = {}
        self.renamed: dict[str, str] = {}
        """What becomes of names that are not put together with others, or taken apart."""
        self.warnings: list[str] = []
        self.change: dict[str, Rule] = {}
        """The rule that changes such a tensor, where it does more than rename it."""

    def contents(self) -> Contents:
        """The contents under the new names."""
        groups, rest = self.matcher.groups(self.tensors)
        for name in rest:
            self._put(self.made, name, name, self.tensors[name])
            self.renamed[name] = name
        for group in groups:
            self._add_group(group)
        counts = {group.identity: len(group.numbers) for group in groups if group.numbers}
        self._add_objects(counts)
        aliases = {
            self.renamed[alias]: self.renamed[kept]
            for alias, kept in self.given.aliases.items()
            if alias in self.renamed and kept in self.renamed and self.change.get(alias) == self.change.get(kept)
        }
        listed = {n: m for n, m in self.made.items() if n not in aliases or self._was_listed(n)}
        return replace(
            self.given,
            tensors=LazyMapping(listed),
            objects=LazyMapping(self.objects),
            aliases=aliases,
            paths=self.paths,
            fingerprints=None,
            warnings=(*self.given.warnings, *self.warnings),
        )

    def _was_listed(self, name: str) -> bool:
        return any(new == name and old in self.given.tensors for old, new in self.renamed.items())

    def _put(self, into: dict[str, Callable[[], Any]], new: str, old: str, make: Callable[[], Any]) -> None:
        if new in self.made or new in self.objects:
            raise KeyMismatchError(
                f"{self.url}: two tensors or objects would be called {new!r}, one of them is {old!r}; "
                "rename one of them"
            )
        into[new] = make
        path = self.given.paths.get(old, (old,))
        self.paths[new] = path if new == old else mapped_path(path, old, new)

    def _add_group(self, group: Group) -> None:
        rule, first = group.rule, group.members[0]
        if isinstance(rule, Rename):
            (new,) = group.target_names(None)
            self.renamed[first] = new
            self._put(self.made, new, first, lambda: self.tensors[first]().renamed(new))
            return
        if len(group.members) == 1 and len(rule.targets) == 1 and rule.targets[0].number is None:
            [self.renamed[first]] = group.target_names(None)
            self.change[first] = rule
        if isinstance(rule, Computing):
            (new,) = group.target_names(None)
            self._put(self.made, new, first, lambda: self._computed(group, new))
            return
        if group.missing:
            self.warnings.append(_filled_note(group))
        count = None
        if rule.targets and rule.targets[0].number is not None:  # how many there are is in the shape
            source = self.tensors[first]()
            if not self._is_carried(group, [source.spec.shape]):
                count = len(self._views(group, [source]))
            else:
                count = self._count_at_parameter(group)
            group = group.numbered(count)
        for number, new in enumerate(group.target_names(count)):
            self._put(self.made, new, first, partial(self._part, group, number, new))

    def _count_at_parameter(self, group: Group) -> int:
        """How many targets the parameter has that a state belongs to."""
        name = self._parameters.get(group.site.name)
        if name is None:
            raise KeyMismatchError(
                f"{group.members[0]!r} goes along with a parameter that is not in {self.url}: it does not say into how "
                "many it is taken apart"
            )
        return len(self._views(group, [self.tensors[name]()]))

    def _is_carried(self, group: Group, shapes: Sequence[tuple[int, ...]]) -> bool:
        names = [site.name for site in group.all_sites]
        known = {n: self.tensors[self._parameters[n]]().spec.shape for n in names if n in self._parameters}
        return group.is_carried(shapes, known)

    def _part(self, group: Group, number: int, new: str) -> StoredTensor:
        sources = [self.tensors[name]() for name in group.members]
        if self._is_carried(group, [s.spec.shape for s in sources]):
            self._check_equal(group, sources)
            return sources[0].renamed(new)
        dtypes = {source.spec.dtype for source in sources}
        if len(dtypes) > 1:
            raise KeyMismatchError(
                f"{new!r} would be made of tensors of {' and '.join(sorted(dtypes))}; cast them first"
            )
        if group.missing:
            assert group.rule.fill is not None
            sources = group.filled(sources, constant(sources[0].spec, group.rule.fill))
        return assembled(self._views(group, sources)[number], sources, new)

    def _views(self, group: Group, sources: Sequence[StoredTensor]) -> tuple[View, ...]:
        """The targets of the rule. Raises NormalizationError, naming the tensors, for shapes that do not fit it."""
        try:
            return views_of(group.rule, tuple(s.spec.shape for s in sources), sources[0].spec.dtype)
        except (PlanError, NormalizationError) as error:
            given = ", ".join(f"{s.fqn!r} {list(s.spec.shape)}" for s in sources[:3])
            raise NormalizationError(f"{type(group.rule).__name__} does not fit {given}: {error}") from None

    def _computed(self, group: Group, new: str) -> StoredTensor:
        assert isinstance(group.rule, Computing)
        return group.rule.compute([self.tensors[name]() for name in group.members], new, group.site.state)

    def _check_equal(self, group: Group, sources: Sequence[StoredTensor]) -> None:
        """States that go along, such as steps, become one: then they must be one."""
        if len(sources) > 1 and (sources[0].spec.numel > 1 or not self._all_equal(sources)):
            raise KeyMismatchError(
                f"{group.members[0]!r} and {len(sources) - 1} others would become one, but they are not one number "
                "that is equal in all of them"
            )

    @staticmethod
    def _all_equal(sources: Sequence[StoredTensor]) -> bool:
        first = LazyTensor(sources[0])[...]
        return all(bool((LazyTensor(source)[...] == first).all()) for source in sources[1:])

    def _add_objects(self, counts: Dict[Any, int]) -> None:
        """Settings and states that are no tensors follow their parameter; lists of parameters are translated."""
        objects = self.given.objects
        # only keys of states and settings belong to a parameter; others are not for the rules
        mine = [key for key in objects if self.matcher.match_state(key) is not None]
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
            stem, path = keys[0].rpartition(".")[0], self.given.paths.get(keys[0], (keys[0],))
            for at, name in enumerate(self._translated([objects[key] for key in keys])):
                self._put(self.objects, f"{stem}.{at}", f"{stem}.{at}", partial(str, name))
                self.paths[f"{stem}.{at}"] = (*path[:-1], at)
        for group in groups:
            if group.missing:
                self.warnings.append(_filled_note(group))
            number = counts.get(group.identity)
            if group.rule.targets and group.rule.targets[0].number is not None and number is None:
                number = self._count_at_parameter(group)
            for new in group.target_names(number):
                self._put(self.objects, new, group.members[0], partial(self._carried_object, group))

    def _carried_object(self, group: Group) -> Any:
        values = [self.given.objects[name] for name in group.members]
        if any(value != values[0] for value in values[1:]):
            raise KeyMismatchError(
                f"{group.members[0]!r} is {values[0]!r:.60}, but others that would become one with it differ"
            )
        return values[0]

    def _object(self, key: str) -> Any:
        value = self.given.objects[key]
        is_list = key.endswith(".params") and isinstance(value, (list, tuple))
        if not is_list or not all(isinstance(name, str) for name in value):
            return value
        return self._translated(value)

    def _translated(self, names: Iterable[str]) -> list[str]:
        """A list of parameters under their new names, each once."""
        out: dict[str, None] = {}
        for name in names:
            hit = self.matcher.match(name)
            found = (name,) if hit is None else hit.targets_of(self._counted(hit.site.name, hit.rule))
            out.update(dict.fromkeys(found))
        return list(out)

    def _counted(self, name: str, rule: Rule) -> int | None:
        if not rule.targets or rule.targets[0].number is None or name not in self._parameters:
            return None
        spec = self.tensors[self._parameters[name]]().spec
        return len(views_of(rule, (spec.shape,), spec.dtype))


def _filled_note(group: Group) -> str:
    total = len(group.members) + len(group.missing)
    return (
        f"{group.target_names(None)[0]!r}: {len(group.missing)} of {total} have no such state, the first is number "
        f"{group.missing[0]}: {group.rule.fill} stands for each of their elements; one number for all is that of the "
        "others"
    )


_LIST_ITEM = re.compile(r"(.*\.param_groups\.\d+\.params)\.(\d+)")


def _flat_lists(objects: Iterable[str]) -> list[list[str]]:
    """The keys of lists of parameters that were saved item by item, list by list, in order."""
    found: dict[str, list[tuple[int, str]]] = {}
    for key in objects:
        match = _LIST_ITEM.fullmatch(key)
        if match is not None:
            found.setdefault(match[1], []).append((int(match[2]), key))
    return [[key for _, key in sorted(items)] for items in found.values()]
