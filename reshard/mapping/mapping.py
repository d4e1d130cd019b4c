"""`Mapping`: rules that turn one naming and shaping of a state into another, lazily, and back.

    mapping = Mapping([Rename("tok_embeddings.weight", "model.embed_tokens.weight"), ...])
    mapping.apply(reshard.open(path))        another lazy checkpoint; nothing is read
    (first | second).inverse()               stages one after another, and back

Within a stage every name is taken by the first rule that fits, and what no rule takes stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Mapping as Dict
from dataclasses import replace

from planners.geometry.layout import TensorSpec
from planners.views.view import View
from reshard.checkpoint.checkpoint import Checkpoint
from reshard.errors import KeyMismatchError
from reshard.mapping.apply_rules import Stage
from reshard.mapping.rule_matching import Group, Matcher
from reshard.mapping.rules import Rename, Rule, views_of

__all__ = ["Mapping", "apply_dict", "between"]


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
            contents = Stage(stage, contents, checkpoint.url).contents()
        return Checkpoint(replace(contents, checking=checkpoint.contents.checking), checkpoint.url)

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


def between(source: Mapping, target: Mapping) -> Mapping:
    """From what `source` makes of some names to what `target` makes of them; stages that both begin with are left out.

    Raises NormalizationError, naming the rule, where a stage of `source` cannot be undone.
    """
    same = 0
    for mine, other in zip(source.stages, target.stages):
        if mine != other:
            break
        same += 1
    return Mapping._of(source.stages[same:]).inverse() | Mapping._of(target.stages[same:])


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
    given = [View.of(source) for source in sources]
    if group.missing:
        assert group.rule.fill is not None
        given = group.filled(given, View.full(sources[0], group.rule.fill))
    made = views_of(group.rule, tuple(view.shape for view in given), sources[0].dtype)
    by_number = {str(i): view for i, view in enumerate(given)}
    return {
        name: view.through(by_number).rename(name)
        for name, view in zip(group.target_names(len(made)), made, strict=True)
    }
