"""Matches the keys of a target and of a checkpoint, on all ranks, and decides about those that do
not match."""

from __future__ import annotations

import copy
import logging
import socket
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from glob import escape
from numbers import Number
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import xxhash

from planners.geometry.arrays import grouped
from planners.geometry.layout import Form, ProductForm, TensorSpec
from reshard.api.key_suggestions import (
    OF_NUMBERED,
    OR_MAPPING,
    allowing,
    by_number,
    differ_in_form,
    has_no_state_yet,
    is_of_optimizer,
    load_by_name,
    section,
    shifted,
    without_optimizers,
)
from reshard.api.options import DtypePolicy, LoadOptions, Wording
from reshard.checkpoint import Checkpoint, save_of
from reshard.errors import CheckpointError, KeyMismatchError, did_you_mean, fix_lines, format_ranks, visible
from reshard.live.dtypes import DROPS, dtype_from_name, refused_cast, refused_codes
from reshard.live.optimizer_state import LazyOptimizerState, form_of, with_names
from reshard.live.plain_data import UNSUPPORTED_TENSORS
from reshard.live.state import CheckedState, OwnState, Targets, like_fresh
from reshard.live.tensors import LiveTensor, tensor_class
from reshard.live.tree import (
    class_name,
    copy_containers,
    mapping_kind,
    needs_class,
    other_key_of,
    restore_types,
    unflatten,
    unresolved_class,
)
from reshard.native.reader import NativeFacts
from reshard.ranks.global_layout import describe, join_layouts, resolve_layouts
from reshard.ranks.group import Group, either, pack_flags, unpack_flags
from reshard.state import NUMBERED, KeyPath, is_selected, key_of, plain_key
from reshard.stored.contents import unknown_class
from reshard.stored.tensor import LazyTensor, StoredTensor

_log = logging.getLogger("reshard")


# Which keys of a target and of a checkpoint belong together.


class KeyMatch:
    """Which targets are filled from which tensors and objects, and which are not. Made by `match_keys`."""

    def __init__(
        self,
        targets: Targets,
        checkpoint: Checkpoint,
        dtype_policy: DtypePolicy,
        mapping: Mapping[str, str],
        allowed: str,
    ) -> None:
        self.targets, self.checkpoint, self.dtype_policy = targets, checkpoint, dtype_policy
        self.mapping, self.allowed = mapping, allowed
        """Key of the target -> name in the checkpoint, if a mapping gives one."""
        self.tensors: dict[str, str] = {}
        """Key of the target -> name in the checkpoint."""
        self.stored: dict[str, StoredTensor] = {}
        """Key of the target -> what it is filled from."""
        self.objects: dict[str, Any] = {}
        """Key of the target -> its new value."""
        self.per_rank: dict[str, str] = {}
        self.missing: list[str] = []
        self.mismatched: list[str] = []
        self.dropped: list[str] = []
        """Values of the target for which nothing was saved, although something was saved around them."""
        self.cast: dict[str, tuple[str, str]] = {}
        self.replaced: dict[str, tuple[str, str]] = {}
        """Key of the target -> dtypes of the checkpoint and of the target, which gets the first one."""
        self.changed_classes: dict[str, tuple[str, str]] = {}
        """Key of a tensor or plain value -> its saved class, and the class of what is or will be in
        its place."""
        contents = checkpoint.contents
        self.names = [*contents.tensors, *contents.objects, *contents.per_rank]
        """Everything that the checkpoint has."""
        self.used: set[str] = set()
        """The names that this rank's target has, under any key."""
        kinds = contents.containers
        self.classes = {path: kind for path, kind in kinds.items() if kind.startswith("dict:")}
        """Mappings that were not plain dicts."""
        self.tensor_classes = {path: kind for path, kind in kinds.items() if kind.startswith("tensor:")}
        self.advice: list[str] = []
        """What to do about objects that cannot take what was saved."""

    def match_tensors(self) -> None:
        later: list[str] = []
        for key, tensor in self.targets.tensors.items():
            name = self._name_of(key)
            if (stored := self.checkpoint.contents.find(name)) is not None:
                self._use(name)
                if self._fits(key, stored.spec, tensor):
                    self.tensors[key], self.stored[key] = name, stored
            elif (
                name in self.checkpoint.objects and _is_number(self.checkpoint.objects[name]) and not tensor.spec.shape
            ):
                self._use(name)
                self._number_into_tensor(key, self.checkpoint.objects[name], tensor)
            else:
                later.append(key)
        aliases, filled = self.targets.aliases, dict[str, str]()
        for key in (*self.tensors, *self.objects) if later else ():
            filled.setdefault(aliases.get(key, key), key)
        for key in later:  # tied in memory to a key that is filled: then it is filled, too
            first = filled.get(aliases.get(key, key))
            if first is None:
                self.missing.append(key)
            elif first in self.targets.replaced:  # which leaves the memory as it is
                self.tensors[key], self.stored[key] = self.tensors[first], self.stored[first]
                self._fits(key, self.stored[key].spec, self.targets.tensors[key])

    def compare_classes(self) -> None:
        """Compare the classes of saved tensors with those of the tensors that are filled."""
        for key, name in self.tensors.items():
            path, own = self.checkpoint.contents.path_of(name), self.targets.paths[key]
            for above in filter(self.tensor_classes.__contains__, _prefixes(path)):
                levels = len(path) - len(above)
                levels = (
                    levels if own[len(own) - levels :] == path[len(above) :] else 0
                )  # else mapped to something else
                live, saved = self.targets.live(key, levels), self.tensor_classes[above].removeprefix("tensor:")
                found = tensor_class(live) or class_name(live)
                if found != saved:
                    self.changed_classes[key_of(own[: len(own) - levels])] = saved, found

    def _name_of(self, key: str) -> str:
        """Return the name of the place that a key of the target refers to. In a dict with 1 and
        "1", the number has a separate name. A dict with only one of them may be the saved one, or
        the target."""
        if key in self.mapping:
            return self.mapping[key]
        path, places = self.targets.paths[key], self.checkpoint.contents.paths
        if key in self.targets.units:
            places = self.below.places
        saved = places.get(key)
        if saved == path or (saved is None and path == (key,)):
            return key
        if places.get(other := other_key_of(path)) == path:
            return other
        return key if saved is None or other_key_of(saved) not in self.targets.paths else other_key_of(saved)

    def name_in_checkpoint(self, key: str) -> str:
        """Return the name that the mapping gives a key of the target, or the key itself."""
        return self.mapping.get(key, key)

    def _use(self, name: str) -> None:
        self.used |= {name, self.checkpoint.aliases.get(name, name)}

    def _fits(self, key: str, spec: TensorSpec, tensor: LiveTensor) -> bool:
        shape, dtype = tensor.spec.shape, tensor.spec.dtype
        if (shape, dtype) != (spec.shape, spec.dtype) and self.targets.is_opaque(key):
            self.targets.replaced[key] = dtype_from_name(spec.dtype)
            self.targets.resized[key] = spec.shape
            return True
        if shape != spec.shape:
            self.mismatched.append(f"{key}: saved with shape {list(spec.shape)}, but the target has {list(shape)}")
            return False
        if dtype != spec.dtype:
            why = refused_cast(spec.dtype, dtype) or refused_codes(
                spec.fqn, spec.dtype, dtype, self.checkpoint.contents.tensors
            )
            root, path, policy = self.targets.root, self.targets.paths[key], str(self.dtype_policy)
            if isinstance(root, CheckedState) and any(path[: len(model)] == model for model in root.models):
                policy = policy.replace("saved", "cast")  # a model keeps its dtypes
            if policy == "error" or (policy == "cast" and why not in ("", self.allowed)):
                note = f" ({why})" * bool(why)
                self.mismatched.append(f"{key}: saved as {spec.dtype}, but the target is {dtype}{note}")
                return False
            if policy == "saved":
                self.targets.replaced[key] = dtype_from_name(spec.dtype)
            (self.cast if policy == "cast" else self.replaced)[key] = (spec.dtype, dtype)
        return True

    def _number_into_tensor(self, key: str, value: Any, tensor: LiveTensor) -> None:
        """Put a saved number into a 0-d tensor, if the dtype can hold it exactly."""
        try:
            made = torch.full((), value, dtype=tensor.dtype, device="cpu")
            is_exact = made.item() == value or value != value
        except (OverflowError, RuntimeError, TypeError):  # by far too large, or of another kind
            is_exact = False
        if not is_exact:
            self.mismatched.append(
                f"{key}: saved as the number {_shown(value)}, which {tensor.spec.dtype} cannot hold: load into a number"
            )
        else:
            device = "cpu" if tensor.is_meta else tensor.device
            self.objects[key] = like_fresh(tensor.value, (made.to(device),), key)
            self.cast[key] = class_name(value), tensor.spec.dtype

    def _tensor_into_number(self, key: str, tensor: LazyTensor, live: Any) -> None:
        """Put a 0-d tensor into a number. Only dtype_policy "saved" puts a fraction where an integer is."""
        made, dtype, kind = tensor[...].item(), tensor.stored.spec.dtype, class_name(live)
        if self.dtype_policy != "saved" and refused_cast(dtype, kind):
            drops = "" if isinstance(made, float) and made.is_integer() else f" ({DROPS})"
            if drops or self.dtype_policy == "error":
                self.mismatched.append(f"{key}: saved as {dtype}, but the target is {kind}{drops}")
                return
            made = int(made)
        self.objects[key] = made
        self.cast[key] = dtype, class_name(made)

    def match_others(self) -> None:
        """Match plain values, containers of these, which are replaced as one value, and per-rank values."""
        checkpoint, targets = self.checkpoint, self.targets
        for key, live in targets.objects.items():
            name = self._name_of(key)
            if name in checkpoint.objects:
                self._use(name)
                self._give(key, checkpoint.objects[name], checkpoint.contents.path_of(name))
            elif name in checkpoint and not checkpoint[name].shape and _is_number(live):
                self._use(name)
                self._tensor_into_number(key, checkpoint[name], live)
            elif not self._replace_whole(key):  # None if there was no state yet, and a dict was saved
                self.missing.append(key)
        for key in targets.units:
            name = self._name_of(key)
            below = self.below.names.get(self._place_of(key), ())
            if tensors := {n for n in below if n != name and n not in checkpoint.objects}:
                # there are tensors where the target has none: these stay unexpected,
                # unless they are tied
                self.missing += [key] * (tensors <= checkpoint.aliases.keys())
                continue
            if not self._replace_whole(key) and not _is_empty(targets.live(key)):
                self.missing.append(key)
        for key in targets.per_rank:
            if (name := self._name_of(key)) in checkpoint.contents.per_rank:
                self._use(name)
                self.per_rank[key] = name
            else:
                self.missing.append(key)

    def _replace_whole(self, key: str) -> bool:
        """Fill a key with the nest of plain values that was saved at its place, if there is one."""
        place, contents = self._place_of(key), self.checkpoint.contents
        names, kinds = self.below.names.get(place, []), self.below.kinds.get(place, {})
        if any(n not in contents.objects for n in names) or not (names or kinds):
            return False
        depth, live = len(place), self.targets.live(key)
        if isinstance(live, LazyOptimizerState):
            names = [n for n in names if not live.is_of_others(contents.path_of(n)[depth:])]
            kinds = {path: kind for path, kind in kinds.items() if not live.is_of_others(path[depth:])}
        self.used.update(names, map(key_of, kinds))
        leaves = {contents.path_of(n)[depth:]: contents.objects[n] for n in names}
        if contents.subset is not None:  # some items of a list, perhaps
            found = grouped((path[:i], n) for path in leaves for i, n in enumerate(path) if type(n) is int)
            gaps = ((*at, n) for at, numbers in found.items() for n in range(max(numbers)) if n not in numbers)
            self.dropped += [key_of((key, *path)) for path in gaps]
        self._give(key, unflatten(leaves, {path[depth:]: kind for path, kind in kinds.items()}), place)
        return True

    def _place_of(self, key: str) -> KeyPath:
        """Return the path in the checkpoint that a key of the target refers to."""
        path, name = self.targets.paths[key], self._name_of(key)
        return path if self.below.has(path) and key not in self.mapping else self.below.places.get(name, (name,))

    def _give(self, key: str, value: Any, place: KeyPath) -> None:
        """Set an object that was saved at `place`, but not a record of an unknown class in place of
        a live one."""
        kind = unknown_class(value)
        if kind is not None:
            self.mismatched.append(f"{key}: {needs_code(kind)}")
            return
        live = self.targets.live(key)
        value = copy.deepcopy(value)  # the checkpoint's own may fill other states, too
        made = restore_types(_as_nested(value, live, self.checkpoint.contents.keys_are_text), live)
        if (name := unresolved_class(made)) is not None:
            self.mismatched.append(f"{key}: {needs_class(name)}")
            return
        if isinstance(live, OwnState) and not self._takes(key, live, made, place):
            return
        self.objects[key] = made
        self._note(key, live, made)
        for path, kind in self.classes.items():
            if path[: len(place)] == place:
                rest = path[len(place) :]
                found = _kind_at(made, rest)
                if found != kind:
                    names = kind.removeprefix("dict:"), found.removeprefix("dict:")
                    self.changed_classes[key_of((key, *rest))] = names

    def _note(self, key: str, live: Any, value: Any) -> None:
        """Note what is lost, or has another class, at and below `key` if `value` replaces `live`.
        Numbers other than bools count as one class, and None matches any value."""
        if isinstance(live, Mapping):
            if {saved := form_of(value), own := form_of(live)} == {"nested", "flattened"}:
                self.mismatched.append(f"{key}: saved {saved}, but the target is {own}")
                self.advice.append(_ONE_FORM)
                return
            for name, item in live.items():
                below = f"{key}.{name}"
                if isinstance(value, Mapping) and name in value:
                    self._note(below, item, value[name])
                else:
                    self.dropped.append(below)
        elif isinstance(live, list | tuple) and isinstance(value, list | tuple):
            for number, (item, other) in enumerate(zip(live, value)):
                if type(item) is not int or type(other) is not int:  # there can be millions of these
                    self._note(f"{key}.{number}", item, other)
            return
        kinds: Any = (type(live), type(value), Number, Mapping)
        same = any(isinstance(live, it) and isinstance(value, it) for it in kinds)
        same = same and isinstance(live, bool) == isinstance(value, bool)
        if not (same or live is None or value is None):
            self.changed_classes[key] = class_name(value), class_name(live)
        elif isinstance(live, np.ndarray) and isinstance(value, np.ndarray) and live.dtype != value.dtype:
            self.changed_classes[key] = str(value.dtype), str(live.dtype)

    def _takes(self, key: str, live: OwnState, made: Any, place: KeyPath) -> bool:
        """Return False if settings are missing: then the object keeps its state. Those that only
        the checkpoint has are unexpected."""
        path, (lost, found) = self.targets.paths[key], live.compare(made)
        self.missing += sorted(key_of((*path, *rest)) for rest in lost)
        self.used.difference_update(*(self.below.names.get((*place, *rest), ()) for rest in found))
        self.advice += [f"{key}: {live.advice}"] * bool(lost or found)
        self.mismatched += [f"{key}.{text}" for text in live.misfits(made)]
        return not lost

    @cached_property
    def below(self) -> _Below:
        """What the checkpoint has at and below each place. Without a mapping, this omits tensors
        that the target has at the same place, because no unit contains them."""
        own = {} if self.mapping else self.targets.tensors
        paths, path_of = self.targets.paths, self.checkpoint.contents.path_of
        every = (*self.names, *self.checkpoint.aliases)
        others = (name for name in every if name not in own or paths[name] != path_of(name))
        return _Below.of(others, self.checkpoint)


def match_keys(
    targets: Targets,
    checkpoint: Checkpoint,
    *,
    dtype_policy: DtypePolicy,
    mapping: Mapping[str, str],
    allowed: str = "",
) -> KeyMatch:
    """Match keys. With dtype_policy "saved", mark in `targets` what will be replaced.

    `allowed`: results of `refused_cast` for casts that are not refused here.

    Raises KeyMismatchError for a mapping of keys that the target does not have.
    """
    match = KeyMatch(targets, checkpoint, dtype_policy, mapping, allowed)
    unknown = [key for key in mapping if key not in targets.paths]
    if unknown:
        key, name = unknown[0], mapping[unknown[0]]
        meant = did_you_mean(key, targets.paths) or "."
        turned = f". Swap them: {{{name!r}: {key!r}}}" if name in targets.paths and key in match.names else ""
        raise KeyMismatchError(
            f"the mapping names {key!r}, which the state to load into does not have{meant} "
            f"mapping= goes from keys of the state to names in the checkpoint{turned}"
        )
    match.match_tensors()
    if match.tensor_classes:
        match.compare_classes()
    match.match_others()
    return match


def needs_code(kind: str) -> str:
    """Return the note about an object whose class is not known here."""
    if kind in UNSUPPORTED_TENSORS:
        return f"saved as {UNSUPPORTED_TENSORS[kind]}"
    return (
        f"saved as an object of {kind}, which only code can rebuild, and reshard runs no code from a checkpoint: "
        "leave the key out of the state to load, and save such objects as plain data"
    )


class _Below(NamedTuple):
    """The leaves and containers at or below each path. A path is not a dotted key: "a.b" beside "a"
    is not below it."""

    names: dict[KeyPath, list[str]]
    """The names at or below it."""
    kinds: dict[KeyPath, dict[KeyPath, str]]
    """The containers at or below it that are tuples or empty, by path."""
    places: dict[str, KeyPath]
    """The path of a dotted key."""

    @classmethod
    def of(cls, names: Iterable[str], checkpoint: Checkpoint) -> _Below:
        out = cls({}, {}, {})
        for name in names:
            for above in _prefixes(checkpoint.contents.path_of(name)):
                out.names.setdefault(above, []).append(name)
        for path, kind in checkpoint.contents.containers.items():
            for above in _prefixes(path):
                out.kinds.setdefault(above, {})[path] = kind
        for path in (*out.names, *out.kinds):
            out.places.setdefault(key_of(path), path)
        return out

    def has(self, path: KeyPath) -> bool:
        """Return True if the checkpoint has anything at or below `path`."""
        return path in self.names or path in self.kinds


def _is_empty(nest: Any) -> bool:
    """Return whether a nest consists of empty dicts, so that there is nothing to fill."""
    if isinstance(nest, Mapping):
        return all(map(_is_empty, nest.values()))
    return isinstance(nest, list | tuple | deque) and bool(nest) and all(map(_is_empty, nest))


def _as_nested(value: Any, live: Any, keys_are_text: bool) -> Any:
    """Return the saved value with what its format does not record, as the live one has it: empty
    dicts and, if all keys are recorded as text, which keys are ints."""
    if type(value) is list and isinstance(live, list):
        if keys_are_text and _is_empty(live[len(value) :]):
            value = [*value, *copy_containers(live[len(value) :])]
        return [*(_as_nested(item, other, keys_are_text) for item, other in zip(value, live)), *value[len(live) :]]
    if type(value) is not dict or not isinstance(live, Mapping):
        return value
    value = with_names(value, live)
    ints = {str(key): key for key in live if keys_are_text and type(key) is int and key.bit_length() <= 256}
    keys = {key: key if key in live else ints.get(key, key) for key in value}
    made = {keys[key]: _as_nested(item, live.get(keys[key]), keys_are_text) for key, item in value.items()}
    empty = {key: copy_containers(item) for key, item in live.items() if key not in made and _is_empty(item)}
    every = made | empty
    return {key: every[key] for key in live if key in every} | made if empty else made


def _kind_at(value: Any, path: KeyPath) -> str:
    """Return the `mapping_kind` at a path of a nest, or the class of a value that is not a mapping."""
    for part in path:
        value = value[plain_key(part)]
    return mapping_kind(value) if isinstance(value, Mapping) else class_name(value)


def _prefixes(path: KeyPath) -> Iterator[KeyPath]:
    """Return the paths of the containers around a leaf, and its own."""
    return (path[:i] for i in range(1, len(path) + 1))


def _shown(number: complex) -> str:
    """Return a number as text. For an int of thousands of digits, its beginning in hexadecimal."""
    is_long = isinstance(number, int) and number.bit_length() > 4096
    return f"{hex(number)[:40]}..." if is_long else str(number)  # type: ignore[arg-type]  # it is an int


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, complex))


# What happens to keys that do not match, on all ranks, and whether the caller allows it.


_MOST_LEFT_OUT = 6
"""The most names of tensors that the advice omits by globs."""
_ITS_KIND = (
    "pass what was saved: a reshard.PerRank(value), a plain value, or a torch.Tensor (torch.from_numpy shares an "
    "array's memory)"
)


_ONE_FORM = (
    "only one side has the optimizer's state flattened: load into reshard.optimizer_destinations(model, optimizer, "
    "path). In the state of a CheckpointManager, pass the model in a list if it was saved in one, and only then"
)
_NAMED = "  it has the optimizer's state under names of parameters, and the state to load into has it under integer ids"
_BY_NAME = (
    "load into state = reshard.optimizer_destinations(model, optimizer, path), then call "
    "reshard.set_optimizer_state_dict(model, optimizer, state)"
)


class KeyNotes(NamedTuple):
    """Notes about keys that do not match but are not an error."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    excluded: tuple[str, ...]
    """Missing keys outside of what a checkpoint that is declared a subset claims to have."""


class _MismatchVote(msgspec.Struct, frozen=True, array_like=True):
    """What each rank sends about its matches."""

    used: dict[bytes, bytes]
    """A compressed bit for each name of the checkpoint, by a digest of what ranks load from. A rank
    that loads from something else does not vote on its names."""
    saves: list[tuple[str, str]]
    """A path, or ranks that share tensors, and the save that was opened."""
    fits: bool
    """Whether no rank has missing or mismatched keys."""
    ambiguous: bool
    """Whether the placements of some tensor allow several layouts."""

    @staticmethod
    def join(votes: list[_MismatchVote]) -> _MismatchVote:
        """Combine several votes."""
        used: dict[bytes, bytes] = {}
        for vote in votes:
            for source, bits in vote.used.items():
                used[source] = either([used.get(source, bits), bits])
        saves = dict.fromkeys(save for vote in votes for save in vote.saves)
        fits, ambiguous = all(vote.fits for vote in votes), any(vote.ambiguous for vote in votes)
        return _MismatchVote(used, list(saves), fits, ambiguous)


@dataclass(frozen=True)
class Mismatches:
    """The mismatches of all ranks."""

    used: frozenset[str]
    """The names that the target of any rank has."""
    sharers: int
    """Number of ranks on this rank's machine."""
    missing: Mapping[str, list[int]]
    """Key -> the ranks on which it is missing."""
    mismatched: Mapping[str, list[int]]
    kinds: Mapping[str, str]
    """Missing keys for which the checkpoint has a value of another kind, with both kinds in words."""
    alike: bool
    """Whether all ranks load from the same."""

    def raise_on_mismatch(self, match: KeyMatch, options: LoadOptions, group: Group) -> KeyNotes:
        """Return notes about the keys that do not match, if strictness allows them all. A dry run
        only reports.

        Raises KeyMismatchError, on every rank if all load from the same, with every key of any rank
        that strictness does not allow to be missing, unexpected, or mismatched. The error then also
        has the errors of objects' checks.
        """
        globs = match.checkpoint.contents.subset  # it ought to have all keys, unless it was declared a subset
        excluded = set()
        if globs is not None:
            excluded = {key for key in self.missing if not is_selected(match.name_in_checkpoint(key), globs)}
        notes = KeyNotes(
            tuple(key for key in match.missing if key not in excluded),
            tuple(name for name in match.names if name not in self.used),
            tuple(key for key in match.missing if key in excluded),
        )
        refused = {key for key in self.missing if key in self.kinds or options.mode_of(key) != "partial"} - excluded
        missing = {key: ranks for key, ranks in self.missing.items() if key in refused}
        unexpected = [key for key in notes.unexpected if options.mode_of(key) == "strict"]
        idle, root = list[str](), match.targets.root
        if isinstance(options.strict, Mapping):
            keys = [*match.names, *self.missing, *match.targets.paths]
            states = root.of_optimizers(keys) if isinstance(root, CheckedState) else []
            idle = options.idle_globs([*keys, *states, *(f"{key}." for key in states)])
        if options.dry_run or not (missing or unexpected or self.mismatched):
            if idle and group.rank == 0:
                _log.warning("reshard.load: no key matches strict=%s", ", ".join(map(repr, idle)))
            if self.missing and match.names and not self.used and group.rank == 0:
                url = match.checkpoint.url
                _log.warning("reshard.load: nothing was loaded: the state has no key of %s", url)
            if isinstance(root, CheckedState) and not (options.dry_run and notes.missing):
                root.check(match.objects)
            return notes
        kind = options.wording.mismatch_error if self.mismatched else KeyMismatchError
        error = kind(self._message(match, missing, unexpected, idle, group, options))
        try:
            if self.alike:
                group.refuse(error)
            raise error
        finally:
            del error

    def _message(
        self,
        match: KeyMatch,
        missing: Mapping[str, list[int]],
        unexpected: list[str],
        idle: list[str],
        group: Group,
        options: LoadOptions,
    ) -> str:
        is_load, wording, root = options.wording == Wording(), options.wording, match.targets.root
        lines, what = [], [f"  no key matches strict={glob!r}" for glob in idle]
        if match.checkpoint.format == "normalized":
            what += [f"  canonical names begin with 'model' and 'optim'; {text}" for text in match.checkpoint.warnings]
        # a key that has a counterpart is not suggested for another
        known = [name for name in (*match.names, *match.checkpoint.aliases) if name not in self.used]
        where = _on_ranks(missing, group)
        of_another_kind = {key: where.pop(key) + self.kinds[key] for key in [*where] if key in self.kinds}
        met = {match.name_in_checkpoint(key) for key in of_another_kind}
        unexpected = [name for name in unexpected if name not in met]
        fixes = match.advice[:]
        moved = None if match.mapping else shifted(missing, known, match.targets.units)
        if moved is not None:
            what.append(f"  {moved.what}")
            where = {key: text for key, text in where.items() if key not in moved.names}
            below = tuple(f"{name}." for key, name in moved.names.items() if key in match.targets.units)
            unexpected = [n for n in unexpected if n not in moved.names.values() and not n.startswith(below)]
            fix = moved.fix if is_load else moved.fix.removesuffix(OR_MAPPING).replace("path)", "checkpoint_id=path)")
            fixes.append(_as_call(fix, root, is_subset=bool(unexpected)))
        if is_load and (text := _by_integer_ids(match, where, unexpected)):
            what.append(text[0])
            fixes.append(text[1])
        elif is_load and (numbered := by_number(where, known)):
            what.append(f"{_NAMED}, as torch's optimizer.state_dict() returns it ({numbered!r})")
            where = {key: where[key] for key in without_optimizers(where)}
            unexpected = without_optimizers(unexpected)
            fixes.append(_BY_NAME)
        elif is_load and differ_in_form(missing, unexpected):
            fixes.insert(0, _ONE_FORM)
        elif is_load and not missing and has_no_state_yet(match.targets.paths, unexpected):
            fixes.append(
                "the optimizer has no state yet: load into reshard.optimizer_destinations(model, optimizer, path)"
            )
        lines += section(wording.missing, where, known, match.names, match.mapping)
        lines += section(
            "unexpected: in the checkpoint, but not in the state to load into",
            dict.fromkeys(unexpected, ""),
            missing,
            match.targets.paths,
        )
        lines += section("of another type", of_another_kind)
        lines += section(wording.mismatched, _on_ranks(self.mismatched, group))
        if of_another_kind:
            fixes.append(_ITS_KIND)
        if where:
            fixes += allowing([*where], unexpected, match.names, root, options)
        elif unexpected and moved is None:
            fixes.append(options.ignoring(unexpected))
        fixes += self._fixes_of_mismatches(match, wording)
        head = f"{match.checkpoint.url} does not match the state to load into:"
        return "\n".join([head, *what, *map(visible, lines), *fix_lines(fixes)])

    def _fixes_of_mismatches(self, match: KeyMatch, wording: Wording) -> list[str]:
        fixes = []
        shapes = [key for key, words, _ in (line.partition(": saved with shape") for line in self.mismatched) if words]
        if wording == Wording() and shapes:
            globs = _leaving_out(match, shapes) if len(shapes) <= _MOST_LEFT_OUT else "..."
            fixes.append(
                "if the target is a shard from to_local(), pass its DTensor. For mapping=, reshard.mapping has "
                "Transpose, Reshape, and Resize, which pads or crops full tensors. To keep your tensors, leave these "
                f"out: load(state, reshard.open({match.checkpoint.url!r}).select({globs}), strict=False)"
            )
        elif shapes:
            fixes.append("give these keys the saved shapes, or leave them out of the state")
        if dtypes := [line for line in self.mismatched if "but the target is" in line and "dequantize" not in line]:
            cast = "" if any(line.endswith(")") for line in dtypes) else "dtype_policy='cast' converts, "
            fixes.append(f"{cast}dtype_policy='saved' keeps the saved dtype")
        return fixes


def _leaving_out(match: KeyMatch, keys: Iterable[str]) -> str:
    """Return globs that exclude these keys, and an optimizer's state of these parameters, as arguments."""
    out = {}
    for name in map(match.name_in_checkpoint, keys):
        state = f".state.{name.partition('.')[2]}."
        tops = [known.partition(state)[0] for known in match.names if state in known]
        out.update(dict.fromkeys([f"!{escape(name)}", *(f"!{escape(top + state)}*" for top in tops)]))
    return ", ".join(map(repr, out))


def _as_call(fix: str, root: Any, *, is_subset: bool) -> str:
    """Return the fix with the option that it needs, and with the state dict of a model instead of
    the model itself."""
    for path in root.models if isinstance(root, CheckedState) else ():
        inner = "".join(f"[{part!r}]" for part in path)
        fix = fix.replace(f"load(state{inner},", "load(reshard.get_model_state_dict(model),")
    return fix.replace("path)", 'path, strict="subset")') if is_subset else fix


def _by_integer_ids(match: KeyMatch, missing: dict[str, str], unexpected: list[str]) -> tuple[str, str] | None:
    """Return message and fix if an optimizer's state was saved by parameter numbers, and the target
    has none of these. Its keys are removed from what is missing and unexpected."""
    targets, checkpoint = match.targets, match.checkpoint
    numbered = next(filter(NUMBERED.fullmatch, unexpected), None)
    own = [key for key in targets.paths if is_of_optimizer(key, targets.live(key))]
    if numbered is None or not own or any(map(NUMBERED.fullmatch, own)):
        return None
    for key in own:
        missing.pop(key, None)
    unexpected[:] = [name for name in unexpected if not OF_NUMBERED.fullmatch(name)]
    others = dict.fromkeys(n.partition(".")[0] for n in checkpoint.objects if not OF_NUMBERED.fullmatch(n))
    what = (
        "  it has the optimizer's state under integer ids, as torch's optimizer.state_dict() returns it "
        f"({numbered!r}), and the state to load into has "
        f"{'names of parameters' if any('.state.' in f'.{key}' for key in own) else 'no optimizer state yet'}"
    )
    return what, load_by_name(repr(checkpoint.url), others)


def gather_mismatches(match: KeyMatch, group: Group) -> Mismatches:
    """Collective: return what matches on no rank, and what does not match on some. Also settles the
    layouts that one rank alone cannot determine. Ranks send one compressed bit for each name of the
    checkpoint, and details only about mismatches.

    Raises CheckpointError, on every rank, if ranks have opened different saves at one path, or for
    tensors that they share; LayoutError if not even all ranks together can determine the layout of
    a tensor.
    """
    kinds = _kinds(match) if match.missing else {}
    if group.world_size == 1:
        here = list(group.ranks)
        missed, mismatched = dict.fromkeys(match.missing, here), dict.fromkeys(match.mismatched, here)
        return Mismatches(frozenset(match.used), 1, missed, mismatched, kinds, True)
    checkpoint, tensors = match.checkpoint, match.targets.tensors
    used = pack_flags([name in match.used for name in match.names])
    source = xxhash.xxh3_64_digest(msgspec.msgpack.encode((match.names, checkpoint.contents.subset)))
    ambiguous = {key: tensors[key] for key in match.tensors if tensors[key].is_ambiguous}
    fits = not match.missing and not match.mismatched
    opened = _saves_of(checkpoint, {tensors[key].forms[0] for key in match.tensors if tensors[key].is_sharded})
    mine = _MismatchVote({source: used}, opened, fits, bool(ambiguous))
    said, mates = group.merge_within(mine, _MismatchVote.join, "the comparison of keys", socket.gethostname())
    saves: dict[str, str] = {}
    for what, save_id in said.saves:
        if (other := saves.setdefault(what, save_id)) != save_id:
            group.refuse(
                CheckpointError(
                    f"{what} is not the same checkpoint on all ranks: some opened the save {other}, others {save_id}. "
                    "Load again if it was just replaced. If each machine has its own folder, use a shared one"
                )
            )
    if said.ambiguous:
        layouts = join_layouts(group.distinct_answers(describe(ambiguous)))
        resolve_layouts(ambiguous, layouts, group.job_rank)
    flags = unpack_flags(said.used[source], len(match.names))
    missed, mismatched = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    odd = [] if said.fits else group.distinct_answers((match.missing, match.mismatched, kinds))
    for (*answer, of_kinds), ranks in odd:
        kinds = {**of_kinds, **kinds}
        for keys, ranks_of in zip(answer, (missed, mismatched)):
            for key in keys:
                ranks_of[key].extend(ranks)
    return Mismatches(
        frozenset(name for name, flag in zip(match.names, flags) if flag),
        len(mates),
        {key: sorted(ranks) for key, ranks in missed.items()},
        {key: sorted(ranks) for key, ranks in mismatched.items()},
        kinds,
        len(said.used) == 1,
    )


def _saves_of(checkpoint: Checkpoint, forms: Iterable[Form]) -> list[tuple[str, str]]:
    """Return the path, and which save was found there. For a run, too: a newer step may have been
    completed meanwhile.

    Also return the ranks that share tensors, and the save that they load: each machine may have a
    copy, but of the same save.
    """
    native = checkpoint.contents.details(NativeFacts)
    if checkpoint.url.startswith("memory:"):  # each process has memory of its own
        return []
    save_id = native.manifest.save_id if native is not None else ""
    meshes = {form.mesh for form in forms if isinstance(form, ProductForm)}
    others = {tuple(form.ranks()) for form in forms if not isinstance(form, ProductForm)}
    together = [f"the ranks of {mesh}" for mesh in meshes] + [format_ranks(ranks, len(ranks)) for ranks in others]
    shared = [(f"what {ranks} load", save_of(checkpoint)) for ranks in together]
    if checkpoint.run:
        return [(checkpoint.run, f"{checkpoint.url.removeprefix(checkpoint.run)} {save_id}".strip()), *shared]
    return [*([(checkpoint.url, save_id)] if save_id else []), *shared]


def _on_ranks(keys: Mapping[str, list[int]], group: Group) -> dict[str, str]:
    """Return each key with its ranks, unless all ranks have it."""
    return {key: "" if len(ranks) == group.world_size else f"   ({format_ranks(ranks)})" for key, ranks in keys.items()}


def _kinds(match: KeyMatch) -> dict[str, str]:
    """Return keys that are missing although the checkpoint has something of another kind under
    their names: its kind, and the target's, in words."""
    checkpoint, targets = match.checkpoint, match.targets
    contents, out = checkpoint.contents, {}
    for key in match.missing:
        name = match.name_in_checkpoint(key)
        kinds = {"a tensor": checkpoint, "a PerRank value": contents.per_rank, "a plain value": checkpoint.objects}
        saved = next((kind for kind, its in kinds.items() if name in its), "")
        own = {"a tensor": targets.tensors, "a PerRank value": targets.per_rank}
        found = next((kind for kind, its in own.items() if key in its), "")
        if saved == "a plain value":
            path = unknown_class(checkpoint.objects[name]) or ""
            saved = UNSUPPORTED_TENSORS.get(path, saved)
        if saved and saved != (found or "a plain value"):
            found = found or class_name(targets.live(key))
            out[key] = f"   (saved as {saved}, but the target has {found})"
    return out
