"""What goes where, for a whole job: each wanted tensor paired with the tensors it is made of. Touches no memory."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from planners.geometry.box import Dims
from planners.geometry.layout import StateLayout, TensorLayout, TensorSpec
from planners.views.pullback import Slot, pull_back
from planners.views.view import View
from reshard.errors import KeyMismatchError

__all__ = ["Lane", "Pairing"]


@dataclass(frozen=True)
class Lane:
    """One tensor of the transfer plan: elements of one source that go into one target."""

    name: str
    """In the plan."""
    target: str
    source: str
    before: TensorLayout
    """How the source lies; the dtype is that in which elements cross."""
    after: TensorLayout
    """Which of its elements are wanted, and where."""
    turn: Dims | None = None
    """See `planners.views.pullback.Pulled`, as for `slots`."""
    slots: Mapping[int, tuple[Slot, ...]] | None = None


@dataclass(frozen=True)
class Pairing:
    """The lanes of a job, and the truth about what has none. The same on every rank."""

    before: StateLayout
    """Of all sources."""
    after: StateLayout
    """Of all targets."""
    lanes: dict[str, Lane] = field(default_factory=dict)
    views: dict[str, View] = field(default_factory=dict)
    """The view that each target is of its sources: a rename, or what was given."""
    ties: dict[str, str] = field(default_factory=dict)
    """Target -> the target of the very same memory that is filled in its stead."""
    objects: dict[str, str] = field(default_factory=dict)
    """Target -> source, of what is no tensor."""
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    cast: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Target -> dtypes of source and target, where they differ."""

    @classmethod
    def of(
        cls,
        before: StateLayout,
        after: StateLayout,
        *,
        source_objects: Iterable[str] = (),
        target_objects: Iterable[str] = (),
        tied: Mapping[str, str] | None = None,
        views: Mapping[str, View] | None = None,
        mapping: Mapping[str, str] | None = None,
        strict: bool = True,
        allow_cast: bool = False,
    ) -> Pairing:
        """Pair everything.

        Args:
            tied: targets that are the very memory of another target, on every rank.
            views: target -> the view that it is of sources.
            mapping: target -> source, for names that differ.

        Raises KeyMismatchError: lists all that is missing, unexpected or mismatched.
        """
        source_objects, target_objects = list(source_objects), list(target_objects)
        work = _Pairer(before, after, dict(views or {}), dict(mapping or {}), allow_cast)
        for key in after:
            work.take(key)
        ties = work.take_ties(tied or {})
        objects = work.take_objects(dict.fromkeys(source_objects), dict.fromkeys(target_objects))
        unexpected = [key for key in (*before, *dict.fromkeys(source_objects)) if key not in work.used]
        known = {*after, *target_objects}
        stray = [key for key in dict.fromkeys((*work.given, *work.mapping)) if key not in known]
        _refuse(work, unexpected, stray, strict)
        return cls(
            before, after, work.lanes, work.made, ties, objects, tuple(work.missing), tuple(unexpected), work.cast
        )


class _Pairer:
    """The pairing under way."""

    def __init__(
        self,
        before: StateLayout,
        after: StateLayout,
        views: dict[str, View],
        mapping: dict[str, str],
        allow_cast: bool,
    ) -> None:
        self.before, self.after = before, after
        self.given, self.mapping, self.allow_cast = views, mapping, allow_cast
        self.lanes: dict[str, Lane] = {}
        self.made: dict[str, View] = {}
        self.used: set[str] = set()
        self.missing: list[str] = []
        self.mismatched: list[str] = []
        self.cast: dict[str, tuple[str, str]] = {}

    def take(self, key: str) -> None:
        """Lanes for one target tensor."""
        spec = self.after[key].spec
        view = self.given.get(key)
        if view is None:
            source = self.mapping.get(key, key)
            if source not in self.before:
                self.missing.append(key)
                return
            held = self.before[source].spec
            view = View.of(held).rename(key)
        else:
            lost = [s.fqn for s in view.sources if s.fqn not in self.before]
            if lost:
                self.mismatched.append(f"{key}: is a view of {lost[0]!r}, which no rank holds before")
                return
        self.used.update(s.fqn for s in view.sources)
        if self._fits(key, spec, view):
            self.made[key] = view
            self._add_lanes(key, view)

    def _fits(self, key: str, spec: TensorSpec, view: View) -> bool:
        for source in view.sources:
            held = self.before[source.fqn].spec
            if held != source:
                self.mismatched.append(
                    f"{key}: a view takes {source.fqn!r} as {source.dtype}{list(source.shape)}, but it is "
                    f"{held.dtype}{list(held.shape)} before"
                )
                return False
        if view.shape != spec.shape:
            self.mismatched.append(f"{key}: has shape {list(view.shape)} before, but {list(spec.shape)} after")
            return False
        if view.spec.dtype != spec.dtype:
            if not self.allow_cast:
                self.mismatched.append(f"{key}: is {view.spec.dtype} before, but {spec.dtype} after")
                return False
            self.cast[key] = (view.spec.dtype, spec.dtype)
        return True

    def _add_lanes(self, key: str, view: View) -> None:
        after = self.after[key]
        wire = _wire(view.spec.dtype, after.spec)
        for pulled in pull_back(view.geometry, after.form):
            source = view.sources[pulled.tensor]
            name = key if len(view.sources) == 1 and key not in self.lanes else f"{key} <- {source.fqn}"
            while name in self.lanes:
                name += "'"
            spec = TensorSpec(name, source.shape, wire)
            before = TensorLayout.of(spec, self.before[source.fqn].form)
            wanted = TensorLayout.of(spec, pulled.form)
            self.lanes[name] = Lane(name, key, source.fqn, before, wanted, pulled.turn, pulled.slots)

    def take_ties(self, tied: Mapping[str, str]) -> dict[str, str]:
        """Drop the lanes of targets that another target's lanes fill."""
        ties = {}
        for key, first in tied.items():
            if key not in self.made or first not in self.made:
                continue
            mine, its = self.made[key], self.made[first]
            if (mine.sources, mine.geometry) != (its.sources, its.geometry):
                self.mismatched.append(
                    f"{key}: is the same memory as {first!r}, but is to come from {_names(mine)} and that from "
                    f"{_names(its)}; map both to one source"
                )
                continue
            ties[key] = first
            self.lanes = {name: lane for name, lane in self.lanes.items() if lane.target != key}
        return ties

    def take_objects(self, given: Mapping[str, None], wanted: Mapping[str, None]) -> dict[str, str]:
        """Pair what is no tensor."""
        objects = {}
        for key in wanted:
            source = self.mapping.get(key, key)
            if source in given:
                objects[key] = source
                self.used.add(source)
            elif source in self.before:
                self.used.add(source)
                self.mismatched.append(f"{key}: is a tensor before, but none after")
            else:
                self.missing.append(key)
        for key in list(self.missing):
            if self.mapping.get(key, key) in given and key not in objects:
                self.missing.remove(key)
                self.used.add(self.mapping.get(key, key))
                self.mismatched.append(f"{key}: is no tensor before, but is one after")
        return objects


def _names(view: View) -> str:
    return ", ".join(repr(source.fqn) for source in view.sources)


def _wire(dtype: str, target: TensorSpec) -> str:
    """The dtype in which elements cross: the target's, so that those who send convert them and all copies are the same
    bits; or the source's where that has fewer bytes."""
    return target.dtype if target.itemsize <= TensorSpec("", (), dtype).itemsize else dtype


def _refuse(work: _Pairer, unexpected: list[str], stray: list[str], strict: bool) -> None:
    lines = [*_section("mismatched", work.mismatched)]
    if strict:
        lines += _section("missing: no rank holds them before", work.missing, [*work.before])
        lines += _section("unexpected: no rank wants them after", unexpected, [*work.after])
    lines += _section("named by a view or the mapping, but no target", stray, [*work.after])
    if not lines:
        return
    fixes = ["mapping= and views= say what comes from where"]
    if strict and (work.missing or unexpected):
        fixes.append("strict=False leaves missing and unexpected ones alone")
    if any("before, but" in line for line in work.mismatched):
        fixes.append("dtype_policy='cast' converts dtypes")
    raise KeyMismatchError("\n".join(["the target does not fit the source:", *lines, f"  ({'; '.join(fixes)})"]))


def _section(title: str, keys: list[str], others: list[str] | None = None) -> list[str]:
    if not keys:
        return []
    out = [f"  {len(keys)} {title}:"]
    for number, key in enumerate(keys[:100]):
        close = difflib.get_close_matches(key, others, n=1) if others and number < 10 and len(others) < 5000 else []
        out.append(f"    {key}" + (f"   (did you mean {close[0]!r}?)" if close else ""))
    return out + (["    ..."] if len(keys) > 100 else [])
