"""Matches the tensors of a transfer, and lets its ranks agree on what they hold and want."""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from planners.geometry.box import Dims
from planners.geometry.layout import StateLayout, TensorLayout, TensorSpec
from planners.geometry.views import TargetSlot, View, pull_back
from reshard.api.key_suggestions import section
from reshard.api.options import TransferOptions, shared
from reshard.api.stateful_objects import refuse_objects
from reshard.errors import (
    FormatError,
    KeyMismatchError,
    LayoutError,
    did_you_mean,
    fix_lines,
    format_names,
    format_ranks,
)
from reshard.live.dtypes import dtype_from_name, holds, refused_cast, refused_codes
from reshard.live.plain_data import decode_plain, encode_plain
from reshard.live.state import Targets
from reshard.live.tensors import OVERWRITTEN_BY, LiveTensor
from reshard.live.tree import leaves_of, needs_class, restore_types, unresolved_class
from reshard.mapping import Mapping as StateMapping
from reshard.ranks.global_layout import Described, describe, join_aliases, join_layouts
from reshard.ranks.global_state import agree_on_values, any_on_device
from reshard.ranks.group import Group, sending_kinds


@dataclass(frozen=True)
class TensorTransfer:
    """One tensor of the transfer plan: elements of one source that go to one target."""

    name: str
    """The name in the plan."""
    target: str
    source: str
    before: TensorLayout
    """The layout of the source. Its dtype is the one in which elements are sent."""
    after: TensorLayout
    """The layout of the wanted elements."""
    turn: Dims | None
    """See `planners.geometry.views.Pulled`, as for `slots`."""
    slots: Mapping[int, tuple[TargetSlot, ...]] | None


@dataclass(frozen=True)
class TensorMatches:
    """The tensor transfers of a job, and the tensors that have none. The same on every rank."""

    before: StateLayout
    """The layout of all sources."""
    after: StateLayout
    """The layout of all targets."""
    transfers: dict[str, TensorTransfer] = field(default_factory=dict)
    views: dict[str, View] = field(default_factory=dict)
    """The view of its sources that each target is: a rename, or the given view."""
    ties: dict[str, str] = field(default_factory=dict)
    """Target -> the target with the same memory that is filled instead."""
    objects: dict[str, str] = field(default_factory=dict)
    """Target -> source, for values that are not tensors."""
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    cast: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Target -> dtypes of source and target, if they differ."""
    tied_sources: dict[str, str] = field(default_factory=dict)
    """Source -> the source with the same memory, on every rank."""

    @classmethod
    def of(
        cls,
        before: StateLayout,
        after: StateLayout,
        *,
        source_objects: Iterable[str] = (),
        target_objects: Iterable[str] = (),
        tied: Mapping[str, str] | None = None,
        tied_sources: Mapping[str, str] | None = None,
        views: Mapping[str, View] | None = None,
        mapping: Mapping[str, str] | None = None,
        left: Iterable[str] | None = None,
        joined: Iterable[str] = (),
        strict: bool = True,
        allow_cast: bool = False,
    ) -> TensorMatches:
        """Match all targets with their sources.

        Args:
            tied: targets that are the same memory as another target, on every rank.
            tied_sources: the same of sources.
            views: target -> the view that it is of sources.
            mapping: target -> source, for names that differ.
            left: what no target takes of all that a `reshard.mapping.Mapping` makes. None: sources
                that none takes.
            joined: what is wrong with targets that would take one of several sources.

        Raises KeyMismatchError: lists all that is missing, unexpected or mismatched.
        """
        given, wanted = dict.fromkeys(source_objects), dict.fromkeys(target_objects)
        out = cls(before, after, tied_sources=dict(tied_sources or {}))
        work = _Pairer(out, dict(views or {}), dict(mapping or {}), allow_cast)
        for key in after:
            work.take(key)
        work.take_ties(tied or {})
        work.take_objects(given, wanted)
        work.mismatched.extend(joined)
        out.unexpected.extend((key for key in before if key not in work.used) if left is None else left)
        out.unexpected.extend(key for key in given if key not in work.used)
        stray = [key for key in dict.fromkeys((*work.given, *work.mapping)) if key not in {*after, *wanted}]
        _refuse(out, work.mismatched, stray, strict)
        return out

    def refused_tie(self, key: str, first: str, rank: int | None = None) -> str:
        """Return why one memory cannot be both targets. Empty if it can.

        Args:
            rank: the rank on which it is both, if not on all.
        """
        mine, its = self.views[key], self.views[first]
        a, b = ([self.tied_sources.get(spec.fqn, spec.fqn) for spec in view.sources] for view in (mine, its))
        why = f"{key!r} takes {_names(mine)}, and {first!r} takes {_names(its)}: map both to the same source"
        if (a, mine.geometry) == (b, its.geometry):
            if rank is None or self.after.parts(key, rank) == self.after.parts(first, rank):
                return ""
            why = "their layouts differ: give both the same layout, or each its own memory"
        return f"{key}: shares memory with {first!r}, but {why}"


class _Pairer:
    """The pairing in progress."""

    def __init__(self, out: TensorMatches, views: dict[str, View], mapping: dict[str, str], allow_cast: bool) -> None:
        self.out, self.before, self.after = out, out.before, out.after
        self.given, self.mapping, self.allow_cast = views, mapping, allow_cast
        self.used: set[str] = set()
        self.mismatched: list[str] = []

    def take(self, key: str) -> None:
        """Add the transfers for one target tensor."""
        spec = self.after[key].spec
        view = self.given.get(key)
        if view is None:
            source = self.mapping.get(key, key)
            if source not in self.before:
                self.out.missing.append(key)
                return
            view = View.of(self.before[source].spec).rename(key)
        else:
            lost = [s.fqn for s in view.sources if s.fqn not in self.before]
            if lost:
                self.mismatched.append(f"{key}: is a view of {lost[0]!r}, which is not in the source")
                return
        self.used.update(s.fqn for s in view.sources)
        if self._fits(key, spec, view):
            self.out.views[key] = view
            self._add_transfers(key, view)

    def _fits(self, key: str, spec: TensorSpec, view: View) -> bool:
        for source in view.sources:
            held = self.before[source.fqn].spec
            if held != source:
                self.mismatched.append(
                    f"{key}: a view takes {source.fqn!r} as {source.dtype}{list(source.shape)}, but it is "
                    f"{held.dtype}{list(held.shape)} in the source"
                )
                return False
        if view.fills and (why := refused_cast("", spec.dtype)):
            self.mismatched.append(f"{key}: cannot be filled with constants: {why}")
            return False
        if lost := [fill.value for fill in view.fills if not holds(dtype_from_name(spec.dtype), fill.value)]:
            self.mismatched.append(f"{key}: is filled with {lost[0]}, which {spec.dtype} cannot hold")
            return False
        if view.shape != spec.shape:
            self.mismatched.append(
                f"{key}: has shape {list(view.shape)} in the source, but {list(spec.shape)} in the target"
            )
            return False
        if view.spec.dtype != spec.dtype:
            why = refused_cast(view.spec.dtype, spec.dtype) or next(
                filter(None, (refused_codes(s.fqn, s.dtype, spec.dtype, self.before) for s in view.sources)), ""
            )
            if not self.allow_cast or why:
                self.mismatched.append(
                    f"{key}: has dtype {view.spec.dtype} in the source, but {spec.dtype} in the target"
                    f"{f' ({why})' * bool(why)}"
                )
                return False
            self.out.cast[key] = (view.spec.dtype, spec.dtype)
        return True

    def _add_transfers(self, key: str, view: View) -> None:
        after = self.after[key]
        wire = _wire(view.spec.dtype, after.spec)
        for pulled in pull_back(view.geometry, after.form):
            source = view.sources[pulled.tensor]
            name = key if len(view.sources) == 1 and key not in self.out.transfers else f"{key} <- {source.fqn}"
            while name in self.out.transfers:
                name += "'"
            spec = TensorSpec(name, source.shape, wire)
            before = TensorLayout.of(spec, self.before[source.fqn].form)
            wanted = TensorLayout.of(spec, pulled.form)
            self.out.transfers[name] = TensorTransfer(name, key, source.fqn, before, wanted, pulled.turn, pulled.slots)

    def take_ties(self, tied: Mapping[str, str]) -> None:
        """Drop the transfers of targets that are filled by another target's transfers."""
        for key, first in tied.items():
            if key not in self.out.views or first not in self.out.views:
                continue
            if why := self.out.refused_tie(key, first):
                self.mismatched.append(why)
                continue
            self.out.ties[key] = first
            for name in [name for name, transfer in self.out.transfers.items() if transfer.target == key]:
                del self.out.transfers[name]

    def take_objects(self, given: Mapping[str, None], wanted: Mapping[str, None]) -> None:
        """Pair values that are not tensors."""
        objects = self.out.objects
        for key in wanted:
            source = self.mapping.get(key, key)
            if source in given:
                objects[key] = source
                self.used.add(source)
            elif source in self.before:
                self.used.add(source)
                self.mismatched.append(f"{key}: is a tensor in the source, but not in the target")
            else:
                self.out.missing.append(key)
        for key in list(self.out.missing):
            source = self.mapping.get(key, key)
            if source in given and key not in objects:
                self.out.missing.remove(key)
                self.used.add(source)
                self.mismatched.append(f"{key}: is a tensor in the target, but not in the source")


def _names(view: View) -> str:
    return ", ".join(repr(source.fqn) for source in view.sources)


def _wire(dtype: str, target: TensorSpec) -> str:
    """Return the dtype that is sent: the target's, so that senders convert and all copies have the
    same bits; or the source's if that has fewer bytes."""
    return target.dtype if target.itemsize <= TensorSpec("", (), dtype).itemsize else dtype


def _refuse(found: TensorMatches, mismatched: list[str], stray: list[str], strict: bool) -> None:
    listed = partial(section, listed_by="redistribute(..., strict=False)")
    lines = listed("mismatched", dict.fromkeys(mismatched, ""))
    if strict:
        lines += listed("missing from the source on all ranks", dict.fromkeys(found.missing, ""), found.before)
        lines += listed("unexpected: not in the target of any rank", dict.fromkeys(found.unexpected, ""), found.after)
    lines += listed("named by a view or the mapping, but not in the target", dict.fromkeys(stray, ""), found.after)
    if not lines:
        return
    fixes = ["mapping= and views= set which source fills which target"]
    if strict and (found.missing or found.unexpected):
        fixes.append("strict=False ignores missing and unexpected keys")
    if any(": has dtype " in line for line in mismatched) and not any(line.endswith(")") for line in mismatched):
        fixes.append("dtype_policy='cast' converts dtypes")
    raise KeyMismatchError("\n".join(["the target does not match the source:", *lines, *fix_lines(fixes)]))


# How the ranks of a transfer learn, and agree on, what all of them hold and want.


@dataclass(frozen=True)
class TransferSide:
    """The state that this rank sends, or wants."""

    state: Targets
    layouts: Mapping[str, TensorLayout]
    """Layouts of plain local tensors, which do not have their own."""

    @classmethod
    def of(cls, state: Mapping[str, Any] | None, layouts: Mapping[str, TensorLayout]) -> TransferSide:
        """Take a state dict apart; None is empty. Raises FormatError for other values."""
        return cls(Targets.of({} if state is None else state), layouts)  # type: ignore[arg-type]  # refused if it is none

    @classmethod
    def read(cls, state: Mapping[str, Any] | None, layouts: Mapping[str, TensorLayout], group: Group) -> TransferSide:
        """Like `of`, for a source, which may be an immutable mapping, without tensors that another
        rank will overwrite."""
        fixed = isinstance(state, Mapping) and not isinstance(state, MutableMapping)
        side = cls.of(dict(state) if fixed and state is not None else state, layouts)
        tensors = side.state.tensors
        sent = {k: t for k, t in tensors.items() if getattr(t.value, OVERWRITTEN_BY, None) not in group.ranks}
        return cls(replace(side.state, tensors=sent), layouts)

    @property
    def objects(self) -> list[str]:
        """Keys of the values that are not tensors."""
        return [*self.state.objects, *self.state.units]

    def describe(self) -> _SideDescription:
        """Return a description without values."""
        tensors = self.state.tensors
        empty = [key for key, tensor in tensors.items() if tensor.is_elsewhere]
        return _SideDescription(
            describe(tensors, self.layouts),
            self.objects,
            dict(self.state.aliases),
            empty,
            bool(self.state.per_rank),
        )


class _SideDescription(msgspec.Struct, frozen=True):
    tensors: Described
    objects: list[str]
    tied: dict[str, str]
    empty: list[str]
    has_own: bool
    """Whether it has a per-rank value."""

    def __bool__(self) -> bool:
        return bool(self.tensors.tensors or self.objects or self.has_own)


class _TransferDescription(msgspec.Struct, frozen=True):
    source: _SideDescription
    target: _SideDescription
    devices: list[str]
    """Kinds of device from which this rank can send, the preferred one first."""
    on_device: bool
    """Whether a tensor of its source is not in CPU memory."""
    onto_device: bool
    """Whether a tensor of its target is not in CPU memory."""


@dataclass(frozen=True)
class Agreed:
    """What all ranks know after the exchange. The same on every rank."""

    key: bytes
    """Equal if everything else is equal."""
    before: StateLayout
    after: StateLayout
    source_objects: tuple[str, ...]
    target_objects: tuple[str, ...]
    tied: Mapping[str, str]
    """Targets with the same memory as another one, on every rank."""
    tied_sources: Mapping[str, str]
    device: str
    on_device: bool
    """Whether a tensor of any source is not in CPU memory."""
    onto_device: bool
    """Whether a tensor of any target is not in CPU memory."""

    def pair(self, options: TransferOptions) -> TensorMatches:
        """Match targets with sources. Raises KeyMismatchError; NormalizationError for a mapping that computes."""
        views, names = {view.spec.fqn: view for view in options["views"]}, options["mapping"]
        left, joined = None, list[str]()
        if isinstance(names, StateMapping):
            made = names.views(self.before.specs)
            taken = {spec.fqn for view in views.values() for spec in view.sources}
            left = [
                key
                for key, view in made.items()
                if not (key in self.after or (view.sources and taken.issuperset(spec.fqn for spec in view.sources)))
            ]
            joined = [key for key in self._joined(names, made) if key not in views]
            views = {key: view for key, view in made.items() if key in self.after} | views
            names = {new: old for old, its in names.names(self.source_objects).items() for new in its}
            names = {new: old for new, old in names.items() if new in self.target_objects}
        return TensorMatches.of(
            self.before,
            self.after,
            source_objects=self.source_objects,
            target_objects=self.target_objects,
            tied=self.tied,
            tied_sources=self.tied_sources,
            views=views,
            mapping=names,
            left=left,
            joined=[f"{key}: several source values map to this key, and may differ: leave it out" for key in joined],
            strict=options["strict"],
            allow_cast=options["dtype_policy"] == "cast",
        )

    def _joined(self, names: StateMapping, made: Mapping[str, View]) -> Iterator[str]:
        """Yield the targets for which a mapping takes one of several sources, such as the steps of
        fused parameters."""
        for old, its in names.names(self.before).items():
            spec = self.before[old].spec
            for new in set(its) & set(self.after):
                if spec.numel and spec.shape == made[new].shape and spec not in made[new].sources:
                    yield new
        of = [new for its in names.names(self.source_objects).values() for new in its]
        yield from {new for new in self.target_objects if of.count(new) > 1}


def agree(
    given: Mapping[str, Any] | None,
    onto: Mapping[str, Any] | None,
    options: TransferOptions,
    group: Group,
) -> tuple[TransferSide, TransferSide, Agreed]:
    """Collective: exchange what all ranks hold and want, by digests. Returns also both sides of
    this rank.

    Raises LayoutError, on every rank: ranks disagree about a layout or an option, or have no
    part at all.
    """
    refuse_objects("a transfer", given, onto)
    source = TransferSide.read(given, options["source_layouts"], group)
    target = TransferSide.of(onto, options["target_layouts"])
    group.same_options("redistribute", shared(options))
    devices = _devices([*source.state.tensors.values(), *target.state.tensors.values()], group)
    held, wanted = (any_on_device(side.state.tensors.values()) for side in (source, target))
    mine = _TransferDescription(source.describe(), target.describe(), devices, held, wanted)
    found = group.distinct_answers(mine)
    _judge(found)
    sides = {
        name: _join(name, [(getattr(description, name), ranks) for description, ranks in found])
        for name in ("source", "target")
    }
    for name, side in (("source", source), ("target", target)):
        if unknown := [key for key in side.layouts if key not in sides[name]]:
            near = did_you_mean(unknown[0], sides[name])
            raise LayoutError(f"{name}_layouts has {unknown[0]!r}, but the {name} has no tensor of this key{near}")
    tied = {
        name: join_aliases((one.tensors.tensors, one.tied, one.empty) for one in (getattr(d, name) for d, _ in found))
        for name in sides
    }
    hasher = hashlib.sha256(repr([list(ranks) for _, ranks in found]).encode())
    for description, _ in found:
        hasher.update(hashlib.sha256(msgspec.msgpack.encode(description)).digest())
    source_objects, target_objects = (
        tuple(dict.fromkeys(key for d, _ in found for key in getattr(d, name).objects)) for name in sides
    )
    agreed = Agreed(
        hasher.digest(),
        sides["source"],
        sides["target"],
        source_objects,
        target_objects,
        tied["target"],
        tied["source"],
        _common_device(found),
        any(description.on_device for description, _ in found),
        any(description.onto_device for description, _ in found),
    )
    return source, target, agreed


def _judge(found: list[tuple[_TransferDescription, Sequence[int]]]) -> None:
    idle = sorted(rank for d, ranks in found if not d.source and not d.target for rank in ranks)
    if idle:
        raise LayoutError(
            f"no source or target tensors on {format_ranks(idle)}: pass a process_group without these ranks"
        )


def _join(name: str, parties: list[tuple[_SideDescription, Sequence[int]]]) -> StateLayout:
    try:
        return join_layouts((side.tensors, ranks) for side, ranks in parties)
    except LayoutError as error:
        raise LayoutError(f"the ranks disagree about the {name}: {error}") from None


def _devices(tensors: list[LiveTensor], group: Group) -> list[str]:
    """Return the kinds of device that this rank can send from, the one with most of its bytes first."""
    held = Counter[str]()
    for local in (local for tensor in tensors for local in tensor.local):
        held[local.device.type] += local.nbytes
    return sorted(sending_kinds(group.process_group), key=lambda kind: -held[kind])


def _common_device(found: list[tuple[_TransferDescription, Sequence[int]]]) -> str:
    """Return the kind of device on which messages are packed: one from which every rank can send,
    if possible not the CPU."""
    everyone = [description.devices for description, _ in found]
    preferred = [devices[0] for devices in everyone if devices]
    for kind in sorted(set(preferred), key=lambda kind: kind == "cpu"):
        if all(kind in devices for devices in everyone):
            return kind
    if all("cpu" in devices for devices in everyone):
        return "cpu"
    raise LayoutError(
        f"the backends of the ranks have no device type in common: {everyone}. Initialize the process group with "
        "the backend 'cpu:gloo,cuda:nccl'"
    )


# What is no tensor: counters, learning rates and groups of parameters, carried over as
# plain data.


@dataclass(frozen=True)
class Values:
    """The plain data of a transfer. False if no target of the job wants any."""

    _source: Targets
    _target: Targets
    _pairs: dict[str, str]
    """Target -> source, of the whole job."""
    _mapping: Any
    """See `redistribute`."""

    def __bool__(self) -> bool:
        return bool(self._pairs)

    @property
    def own(self) -> tuple[list[str], list[str], list[str]]:
        """Return the keys of this rank's own values: those that both sides have, those of its
        target alone, and those of its source alone."""
        source, target = self._source.per_rank.keys(), self._target.per_rank.keys()
        return sorted(source & target), sorted(target - source), sorted(source - target)

    def check_places(self, strict: bool) -> None:
        """Raise FormatError for a value of this rank's target that cannot be replaced in its
        container, and, if `strict`, KeyMismatchError for own values that only one side has."""
        own, missing, unexpected = self.own
        if strict and (missing or unexpected):
            raise KeyMismatchError(
                f"a PerRank value moves from a rank's source to the same rank's target. On this rank, only the target "
                f"has {missing}, and only the source has {unexpected}. Leave them out, or pass strict=False"
            )
        self._target.check_places([*own, *(key for key in self._pairs if key in self._target.paths)])

    def gather(self, group: Group) -> dict[str, Any]:
        """Collective: return the values of this rank's targets, from what all ranks hold now.
        Changes nothing.

        Raises ReplicaDriftError, on every rank, for a value that differs between ranks.
        """
        held = self._held()
        merged = agree_on_values({}, held, group, {})
        mine = {key: name for key, name in self._pairs.items() if key in self._target.paths}
        return {key: self._made(key, decode_plain(merged[name])) for key, name in mine.items() if name in merged}

    def _made(self, key: str, value: Any) -> Any:
        """Return a value in the types that the target has in its place."""
        made = restore_types(value, self._target.live(key))
        if (name := unresolved_class(made)) is not None:
            raise FormatError(f"the value under {key!r} is {needs_class(name).removeprefix('saved as ')}")
        return made

    def assign(self, values: dict[str, Any]) -> None:
        """Put the values into the target, and per-rank values from this rank's source into its target."""
        held = self._source.per_rank
        own = {key: replace(self._target.per_rank[key], value=copy.deepcopy(held[key].value)) for key in self.own[0]}
        self._target.assign({**values, **own})

    def _held(self) -> dict[str, Any]:
        wanted = set(self._pairs.values())
        out = {}
        for key in wanted & (self._source.objects.keys() | self._source.units.keys()):
            value = self._source.live(key)
            _refuse_renamed(key, value, self._mapping)
            try:
                out[key] = encode_plain(value)
            except FormatError as error:
                raise FormatError(
                    f"the value under {key!r} cannot be sent to other ranks: {error}. Leave it out of source and target"
                ) from None
        return dict(sorted(out.items()))


def _refuse_renamed(key: str, value: Any, mapping: Any) -> None:
    """Raise KeyMismatchError for param groups that the mapping would leave with old names.

    These are values, and it renames only keys.
    """
    leaves, parts = leaves_of(value), key.split(".")
    listed = [leaf for path, leaf in leaves.items() if isinstance(leaf, str) and "params" in (*parts, *path)]
    if isinstance(mapping, StateMapping):
        renamed = [old for old, new in mapping.names(listed).items() if new != (old,)]
    else:
        olds = [f".{old}" for new, old in mapping.items() if new != old]
        renamed = [name for name in listed if any(old.endswith(f".{name}") for old in olds)]
    if renamed:
        raise KeyMismatchError(
            f"the mapping changes names of parameters that the param groups in {key!r} list: {format_names(renamed)}. "
            "Leave the groups out of source and target, and set them on the optimizer of the target"
        )


def check_replicas(source: TransferSide, before: StateLayout, group: Group, *, on_device: bool) -> None:
    """Collective: compare digests of replicas. `before`: the layout of all
    sources of the job; `on_device`: whether any of them is on a device.

    Raises ReplicaDriftError, on every rank, if they differ.
    """
    copied = {key for key, layout in before.items() if int(layout.numels().sum()) > layout.spec.numel}
    mine = {k: t for k, t in source.state.tensors.items() if k in copied}
    if copied:
        agree_on_values(mine, {}, group, before, on_device=on_device)
