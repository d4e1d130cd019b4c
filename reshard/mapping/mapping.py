"""`Mapping`: rules that turn one naming and shaping of a state into another, lazily, and back.

    mapping = Mapping([Rename("tok_embeddings.weight", "model.embed_tokens.weight"), ...])
    mapping.apply(reshard.open(path))        another lazy checkpoint; nothing is read
    (first | second).inverse()               stages one after another, and back

Within a stage every name is taken by the first rule that fits, and what no rule takes stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Mapping as Dict
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from planners.errors import PlanError
from planners.layout import TensorSpec
from planners.view import View
from reshard.checkpoint import Checkpoint, LazyTensor
from reshard.errors import KeyMismatchError, NormalizationError
from reshard.formats.base import Contents, LazyMapping, StoredTensor
from reshard.mapping.computed import cast, dequantized, is_floating
from reshard.mapping.matching import Group, Matcher, mapped_path
from reshard.mapping.patterns import Pattern
from reshard.mapping.rules import Rename, Rule, views_of
from reshard.mapping.stored import assembled

__all__ = ["Cast", "Dequantize", "Mapping", "apply_dict"]


@dataclass(frozen=True, init=False)
class Cast(Rule):
    """Floating-point tensors with at least one dim as another dtype, converted while they are read; others stay.

    `old` is the dtype to go back to; without it there is no inverse.
    """

    sources: tuple[Pattern, ...]
    targets: tuple[Pattern, ...]
    dtype: str
    old: str | None

    def __init__(self, source: str, dtype: str, old: str | None = None) -> None:
        for name, value in (("dtype", dtype), ("old", old)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "sources", (Pattern(source),))
        object.__setattr__(self, "targets", (Pattern(source),))

    def build(self, views: Sequence[View]) -> list[View]:
        raise NormalizationError(f"a cast to {self.dtype} is computed: no view of stored elements describes it")

    def inverse(self) -> Rule:
        if self.old is None:
            raise NormalizationError(f"{self}: give old, the dtype before, so that it can be undone")
        return Cast(self.sources[0].text, self.old, self.dtype)


@dataclass(frozen=True, init=False)
class Dequantize(Rule):
    """Block-quantized weights, times their scales, as `dtype`, computed while they are read. Not reversible.

    A weight without scales is left as it is.
    """

    optional: ClassVar[bool] = True
    sources: tuple[Pattern, ...]
    targets: tuple[Pattern, ...]
    block: tuple[int, ...]
    dtype: str

    def __init__(
        self,
        weight: str = "{name+}.weight",
        scale: str = "{name+}.weight_scale_inv",
        target: str = "{name+}.weight",
        block: Sequence[int] = (128, 128),
        dtype: str = "bfloat16",
    ) -> None:
        for name, value in (("block", tuple(block)), ("dtype", dtype)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "sources", (Pattern(weight), Pattern(scale)))
        object.__setattr__(self, "targets", (Pattern(target),))
        Rule.__post_init__(self)

    def build(self, views: Sequence[View]) -> list[View]:
        raise NormalizationError("a dequantized weight is computed: no view of stored elements describes it")

    def inverse(self) -> Rule:
        raise NormalizationError("dequantization cannot be undone")


class Mapping:
    """Stages of rules. Equal rules make equal mappings."""

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        given = tuple(rules)
        self.stages: tuple[tuple[Rule, ...], ...] = (given,) if given else ()

    @classmethod
    def _of(cls, stages: Iterable[tuple[Rule, ...]]) -> Mapping:
        made = cls()
        made.stages = tuple(stages)
        return made

    def __or__(self, then: Mapping) -> Mapping:
        """This mapping, and `then` after it."""
        return Mapping._of((*self.stages, *then.stages))

    def inverse(self) -> Mapping:
        """The mapping back. Raises NormalizationError, naming the rule, where there is none."""
        return Mapping._of(tuple(rule.inverse() for rule in stage) for stage in reversed(self.stages))

    def apply(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint under the new names and in the new shapes. Lazy: nothing is read but what shapes need.

        States of an optimizer, settings of parameters and lists of parameters follow the parameters that they
        belong to; a state that has not the parameter's shape, such as a step, goes along as it is.

        Raises:
            KeyMismatchError: a tensor that a rule puts together with others is missing; two become one name.
            PlanError, NormalizationError: shapes do not fit a rule; some only when the tensor is asked for.
        """
        contents = checkpoint.contents
        for stage in self.stages:
            contents = _Stage(stage, contents, checkpoint.url).contents()
        return Checkpoint(contents, checkpoint.url)

    def views(self, specs: Dict[str, TensorSpec]) -> dict[str, View]:
        """What a state of these tensors becomes, as views of it: for `planners.plan_reads(..., views=...)`.

        Raises as `apply` does, and NormalizationError for rules that compute.
        """
        made = {name: View.of(spec) for name, spec in specs.items()}
        for stage in self.stages:
            known = {name: view.spec for name, view in made.items()}
            made = {name: view.through(made) for name, view in _stage_views(stage, known).items()}
        return made

    def names(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """What becomes of each name that some rule takes, the names of numbered targets (unstacked ones) left out."""
        out: dict[str, tuple[str, ...]] = {name: (name,) for name in names}
        taken: set[str] = set()
        for stage in self.stages:
            matcher = Matcher(stage)
            for name, now in out.items():
                follow: list[str] = []
                for current in now:
                    hit = matcher.match(current)
                    if hit is None:
                        follow.append(current)
                        continue
                    taken.add(name)
                    follow += hit.targets_without_numbers()
                out[name] = tuple(follow)
        return {name: now for name, now in out.items() if name in taken}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and self.stages == other.stages

    def __hash__(self) -> int:
        return hash(self.stages)

    def __repr__(self) -> str:
        return f"Mapping({' | '.join(str(list(stage)) for stage in self.stages)})"


def apply_dict(names: Dict[str, str], checkpoint: Checkpoint) -> Checkpoint:
    """A mapping new name -> name in the checkpoint, as `load` takes it: names that it does not mention stay.

    Raises KeyMismatchError for a name that the checkpoint does not have, or one that would be there twice.
    """
    known = {*checkpoint, *checkpoint.aliases, *checkpoint.objects}
    unknown = [name for name in names.values() if name not in known]
    if unknown:
        raise KeyMismatchError(f"the mapping names {unknown[0]!r}, which {checkpoint.url} does not have")
    rules = [Rename(old, new) for new, old in names.items()]
    return Mapping(rules).apply(checkpoint)


def _stage_views(rules: Sequence[Rule], specs: Dict[str, TensorSpec]) -> dict[str, View]:
    matcher = Matcher(rules)
    groups, rest = matcher.groups(specs)
    out = {name: View.of(specs[name]) for name in rest}
    shapes = {site.name: specs[name].shape for name, site in matcher.parameters(specs)}
    for group in groups:
        sources = [specs[name] for name in group.members]
        for name, view in _group_views(group, sources, shapes).items():
            if name in out:
                raise KeyMismatchError(f"two tensors would be called {name!r}")
            out[name] = view
    return out


def _group_views(group: Group, sources: Sequence[TensorSpec], shapes: Dict[str, tuple[int, ...]]) -> dict[str, View]:
    if group.is_carried([s.shape for s in sources], shapes):
        return {name: View.of(sources[0]).rename(name) for name in group.target_names(None)}
    made = views_of(group.rule, tuple(s.shape for s in sources), sources[0].dtype)
    by_number = {str(i): View.of(source) for i, source in enumerate(sources)}
    return {
        name: view.through(by_number).rename(name)
        for name, view in zip(group.target_names(len(made)), made, strict=True)
    }


class _Stage:
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
            if alias in self.renamed and kept in self.renamed
        }
        listed = {n: m for n, m in self.made.items() if n not in aliases or self._was_listed(n)}
        return replace(
            self.given,
            tensors=LazyMapping(listed),
            objects=LazyMapping(self.objects),
            aliases=aliases,
            paths=self.paths,
            fingerprints=None,
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
        if isinstance(rule, (Cast, Dequantize)):
            (new,) = group.target_names(None)
            self._put(self.made, new, first, lambda: self._computed(group, new))
            return
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
        return assembled(self._views(group, sources)[number], sources, new)

    def _views(self, group: Group, sources: Sequence[StoredTensor]) -> tuple[View, ...]:
        """The targets of the rule. Raises NormalizationError, naming the tensors, for shapes that do not fit it."""
        try:
            return views_of(group.rule, tuple(s.spec.shape for s in sources), sources[0].spec.dtype)
        except (PlanError, NormalizationError) as error:
            given = ", ".join(f"{s.fqn!r} {list(s.spec.shape)}" for s in sources[:3])
            raise NormalizationError(f"{type(group.rule).__name__} does not fit {given}: {error}") from None

    def _computed(self, group: Group, new: str) -> StoredTensor:
        source = self.tensors[group.members[0]]()
        if isinstance(group.rule, Dequantize):
            scale = self.tensors[group.members[1]]()
            return dequantized(source, scale, new, block=group.rule.block, dtype=group.rule.dtype)
        assert isinstance(group.rule, Cast)
        if not source.spec.shape or not is_floating(source.spec.dtype):
            return source
        return cast(source, group.rule.dtype, new)

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
        groups, _ = self.matcher.groups(mine)
        for key in objects:
            if key not in mine:
                self._put(self.objects, key, key, partial(self._object, key))
        for group in groups:
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
        out: list[str] = []
        for name in value:
            hit = self.matcher.match(name)
            found = (name,) if hit is None else hit.targets_of(self._counted(hit.site.name, hit.rule))
            out += [new for new in found if new not in out]
        return out

    def _counted(self, name: str, rule: Rule) -> int | None:
        if not rule.targets or rule.targets[0].number is None or name not in self._parameters:
            return None
        spec = self.tensors[self._parameters[name]]().spec
        return len(views_of(rule, (spec.shape,), spec.dtype))
