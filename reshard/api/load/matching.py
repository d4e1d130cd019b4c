"""Which keys of a target and of a checkpoint belong together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from reshard.api.load.options import DtypePolicy
from reshard.checkpoint.checkpoint import Checkpoint
from reshard.errors import KeyMismatchError
from reshard.formats.pickles.record import unknown_class
from reshard.state.container_types import class_name, mapping_kind, needs_class, retyped, unmade
from reshard.state.dtypes import dtype_from_name
from reshard.state.frameworks.tensor_subclasses import tensor_class
from reshard.state.live_state import LiveTensor
from reshard.state.targets import Targets
from reshard.state.tree import IntKey, KeyPath, key_of, other_key_of, unflatten

__all__ = ["Match", "match_keys", "needs_code"]


@dataclass(frozen=True)
class Match:
    """What is filled from what, and what is not."""

    tensors: dict[str, str]
    """Key of the target -> name in the checkpoint."""
    objects: dict[str, Any]
    """Key of the target -> its new value."""
    per_rank: tuple[str, ...]
    missing: tuple[str, ...]
    mismatched: tuple[str, ...]
    dropped: tuple[str, ...]
    """Values of the target in the place of which nothing was saved, though something was saved around it."""
    cast: dict[str, tuple[str, str]]
    replaced: dict[str, tuple[str, str]]
    """Key of the target -> dtypes of the checkpoint and of the target, which takes the former."""
    retyped: dict[str, tuple[str, str]]
    """Key of a tensor or plain value -> the class that was saved there, and that of what is or will be in its place."""
    names: tuple[str, ...]
    """Everything that the checkpoint has."""
    used: frozenset[str]
    """Of these, what this rank's target has, under whatever name."""
    mapped: Mapping[str, str]
    """Key of the target -> name under which it was looked for, where a mapping says so."""


def match_keys(
    targets: Targets,
    checkpoint: Checkpoint,
    *,
    dtype_policy: DtypePolicy,
    mapping: Mapping[str, str],
) -> Match:
    """Match keys; under dtype_policy "saved", mark in `targets` what is to be replaced.

    Raises KeyMismatchError for a mapping of keys that the target does not have.
    """
    unknown = [key for key in mapping if key not in targets.paths]
    if unknown:
        raise KeyMismatchError(f"the mapping names {unknown[0]!r}, which the target does not have")
    work = _Work(targets, checkpoint, dtype_policy, mapping)
    work.match_tensors()
    if work.tensor_classes:
        work.compare_classes()
    work.match_objects()
    work.match_units()
    per_rank = [key for key in targets.per_rank if work.take_per_rank(key)]
    return Match(
        work.tensors,
        work.objects,
        tuple(per_rank),
        tuple(work.missing),
        tuple(work.mismatched),
        tuple(work.dropped),
        work.cast,
        work.replaced,
        work.retyped,
        tuple(work.names),
        frozenset(work.used),
        mapping,
    )


class _Work:
    """The matching under way."""

    def __init__(
        self, targets: Targets, checkpoint: Checkpoint, dtype_policy: DtypePolicy, mapping: Mapping[str, str]
    ) -> None:
        self.targets, self.checkpoint, self.mapping = targets, checkpoint, mapping
        self.dtype_policy = dtype_policy
        self.saved_per_rank: Mapping[str, Any] = checkpoint.contents.per_rank
        self.names = [*checkpoint, *checkpoint.objects, *self.saved_per_rank]
        self.used: set[str] = set()
        self.tensors: dict[str, str] = {}
        self.objects: dict[str, Any] = {}
        self.missing: list[str] = []
        self.mismatched: list[str] = []
        self.dropped: list[str] = []
        self.cast: dict[str, tuple[str, str]] = {}
        self.replaced: dict[str, tuple[str, str]] = {}
        self.retyped: dict[str, tuple[str, str]] = {}
        kinds = checkpoint.contents.containers
        self.classes = {path: kind for path, kind in kinds.items() if kind.startswith("dict:")}
        """Mappings that were no plain dicts."""
        self.tensor_classes = {path: kind for path, kind in kinds.items() if kind.startswith("tensor:")}

    def match_tensors(self) -> None:
        later: list[str] = []
        for key, tensor in self.targets.tensors.items():
            name = self._name_of(key)
            if name in self.checkpoint:
                self._use(name)
                if self._fits(key, name, tensor):
                    self.tensors[key] = name
            elif (
                name in self.checkpoint.objects and _is_number(self.checkpoint.objects[name]) and not tensor.spec.shape
            ):
                self._use(name)
                self._number_into_tensor(key, self.checkpoint.objects[name], tensor)
            else:
                later.append(key)
        for key in later:  # tied in memory to a key that is filled: then it is filled, too
            same = [k for k in self.targets.tensors if self.targets.tied.get(k, k) == self.targets.tied.get(key, key)]
            if not any(k in self.tensors for k in same if k != key):
                self.missing.append(key)

    def compare_classes(self) -> None:
        """Those of tensors that were saved with those of what is filled."""
        for key, name in self.tensors.items():
            path, own = self.checkpoint.contents.paths.get(name, (name,)), self.targets.paths[key]
            for above in filter(self.tensor_classes.__contains__, _prefixes(path)):
                levels = len(path) - len(above)
                levels = (
                    levels if own[len(own) - levels :] == path[len(above) :] else 0
                )  # else mapped to something else
                live, saved = self.targets.live(key, levels), self.tensor_classes[above].removeprefix("tensor:")
                found = tensor_class(live) or class_name(live)
                if found != saved:
                    self.retyped[key_of(own[: len(own) - levels])] = saved, found

    def _name_of(self, key: str) -> str:
        """The name of the place that a key of the target stands for. In a dict with 1 and "1" the number has a name of
        its own; a dict with only one of them may have been saved, or be the target."""
        if key in self.mapping:
            return self.mapping[key]
        path, places = self.targets.paths[key], self.checkpoint.contents.paths
        if key in self.targets.units:
            places = self.below.places
        saved = places.get(key)
        if saved == path:
            return key
        if places.get(other := other_key_of(path)) == path:
            return other
        return key if saved is None or other_key_of(saved) not in self.targets.paths else other_key_of(saved)

    def _use(self, name: str) -> None:
        self.used.add(name)
        self.used.add(self.checkpoint.aliases.get(name, name))

    def _fits(self, key: str, name: str, tensor: LiveTensor) -> bool:
        spec = self.checkpoint[name].stored.spec
        shape, dtype = tensor.spec.shape, tensor.spec.dtype
        if (shape, dtype) != (spec.shape, spec.dtype) and self.targets.is_opaque(key):
            self.targets.replaced[key] = dtype_from_name(spec.dtype)
            self.targets.resized[key] = spec.shape
            return True
        if shape != spec.shape:
            self.mismatched.append(f"{key}: saved with shape {list(spec.shape)}, wanted with {list(shape)}")
            return False
        if dtype != spec.dtype:
            if self.dtype_policy == "error":
                self.mismatched.append(f"{key}: saved as {spec.dtype}, wanted as {dtype}")
                return False
            if self.dtype_policy == "saved":
                self.targets.replaced[key] = dtype_from_name(spec.dtype)
            (self.cast if self.dtype_policy == "cast" else self.replaced)[key] = (spec.dtype, dtype)
        return True

    def _number_into_tensor(self, key: str, value: Any, tensor: LiveTensor) -> None:
        """A number that was saved as such, for a 0-d tensor; only where the dtype can hold it exactly."""
        try:
            made = tensor.value.new_full((), value)
            is_exact = made.item() == value or value != value
        except (OverflowError, RuntimeError, TypeError):  # by far too large, or of another kind
            is_exact = False
        if not is_exact:
            self.mismatched.append(f"{key}: saved as the number {_shown(value)}, which {tensor.spec.dtype} cannot hold")
        else:
            self.objects[key] = made
            self.cast[key] = class_name(value), tensor.spec.dtype

    def match_objects(self) -> None:
        for key in self.targets.objects:
            name = self._name_of(key)
            if name in self.checkpoint.objects:
                self._use(name)
                self._give(key, self.checkpoint.objects[name], self.checkpoint.contents.paths.get(name, (name,)))
            elif name in self.checkpoint and not self.checkpoint[name].shape and _is_number(self.targets.objects[key]):
                self._use(name)
                made = self.objects[key] = self.checkpoint[name][...].item()
                self.cast[key] = self.checkpoint[name].stored.spec.dtype, class_name(made)
            elif not self._replace_whole(key):  # None where there was no state yet, and a dict was saved
                self.missing.append(key)

    def match_units(self) -> None:
        """Containers of plain values, replaced whole by what was saved at their place."""
        for key in self.targets.units:
            name = self._name_of(key)
            below = self.below.names.get(self._place_of(key), ())
            if any(n != name and n not in self.checkpoint.objects for n in below):
                continue  # there are tensors where the target has none: these stay unexpected
            if not self._replace_whole(key):
                self.missing.append(key)

    def _replace_whole(self, key: str) -> bool:
        """Fill a key with the nest of plain values that was saved at its place, if there is one."""
        place, paths = self._place_of(key), self.checkpoint.contents.paths
        names, kinds = self.below.names.get(place, []), self.below.kinds.get(place, {})
        if any(n not in self.checkpoint.objects for n in names) or not (names or kinds):
            return False
        self.used.update(names)
        depth = len(place)
        leaves = {paths.get(n, (n,))[depth:]: self.checkpoint.objects[n] for n in names}
        self._give(key, unflatten(leaves, {path[depth:]: kind for path, kind in kinds.items()}), place)
        return True

    def _place_of(self, key: str) -> KeyPath:
        """The path in the checkpoint that a key of the target stands for."""
        path, name = self.targets.paths[key], self._name_of(key)
        return path if self.below.has(path) and key not in self.mapping else self.below.places.get(name, (name,))

    def _give(self, key: str, value: Any, place: KeyPath) -> None:
        """An object that was saved at `place`; but no record of one of an unknown class, in place of a live one."""
        kind = unknown_class(value)
        if kind is not None:
            self.mismatched.append(f"{key}: {needs_code(kind)}")
            return
        live = self.targets.live(key)
        made = retyped(value, live)
        if (name := unmade(made)) is not None:
            self.mismatched.append(f"{key}: {needs_class(name)}")
            return
        self.objects[key] = made
        self.dropped += _lost(key, live, made)
        for path, kind in self.classes.items():
            if path[: len(place)] == place:
                rest = path[len(place) :]
                found = _kind_at(made, rest)
                if found != kind:
                    names = kind.removeprefix("dict:"), found.removeprefix("dict:")
                    self.retyped[key_of((key, *rest))] = names

    @cached_property
    def below(self) -> _Below:
        """What the checkpoint has at and below each place."""
        return _Below.of(self.names, self.checkpoint)

    def take_per_rank(self, key: str) -> bool:
        name = self._name_of(key)
        if name not in self.saved_per_rank:
            self.missing.append(key)
            return False
        self._use(name)
        return True


def needs_code(kind: str) -> str:
    """What to say of an object whose class is not known here."""
    return (
        f"saved as an object of {kind}, which only code could make again, and nothing from a checkpoint is run: leave "
        "the key out of what is loaded, and save such objects as plain data"
    )


class _Below(NamedTuple):
    """By path, of leaves and of all containers around them. Not by dotted key: "a.b" beside "a" is not below it."""

    names: dict[KeyPath, list[str]]
    """The names at or below it."""
    kinds: dict[KeyPath, dict[KeyPath, str]]
    """The containers at or below it that are tuples or empty, by path."""
    places: dict[str, KeyPath]
    """The path of a dotted key."""

    @classmethod
    def of(cls, names: Iterable[str], checkpoint: Checkpoint) -> _Below:
        out = cls({}, {}, {})
        paths, containers = checkpoint.contents.paths, checkpoint.contents.containers
        for name in names:
            for above in _prefixes(paths.get(name, (name,))):
                out.names.setdefault(above, []).append(name)
        for path, kind in containers.items():
            for above in _prefixes(path):
                out.kinds.setdefault(above, {})[path] = kind
        for path in (*out.names, *out.kinds):
            out.places.setdefault(key_of(path), path)
        return out

    def has(self, path: KeyPath) -> bool:
        """Whether the checkpoint has anything at or below `path`."""
        return path in self.names or path in self.kinds


def _lost(key: str, live: Any, value: Any) -> Iterator[str]:
    """Keys of dicts at and below `key` that are gone when `value` takes the place of `live`."""
    if isinstance(live, Mapping):
        for name, item in live.items():
            below = f"{key}.{name}"
            if not isinstance(value, Mapping) or name not in value:
                yield below
            else:
                yield from _lost(below, item, value[name])
    elif isinstance(live, list | tuple) and isinstance(value, list | tuple):
        for number, (item, other) in enumerate(zip(live, value)):
            yield from _lost(f"{key}.{number}", item, other)


def _kind_at(value: Any, path: KeyPath) -> str:
    """See `mapping_kind`, of what is at a path of a nest; the class of what is no mapping."""
    for part in path:
        value = value[part.value if isinstance(part, IntKey) else part]
    return mapping_kind(value) if isinstance(value, Mapping) else class_name(value)


def _prefixes(path: KeyPath) -> Iterator[KeyPath]:
    """The paths of the containers around a leaf, and its own."""
    return (path[:i] for i in range(1, len(path) + 1))


def _shown(number: complex) -> str:
    """A number as text; of an int of thousands of digits, its beginning in hex."""
    is_long = isinstance(number, int) and number.bit_length() > 4096
    return f"{hex(number)[:40]}..." if is_long else str(number)  # type: ignore[arg-type]  # it is an int


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, complex))
