"""Which keys of a target and of a checkpoint belong together, and the whole truth about those that do not."""

from __future__ import annotations

import difflib
import fnmatch
import socket
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from reshard.checkpoint.checkpoint import Checkpoint
from reshard.control.group import Group
from reshard.errors import CheckpointError, KeyMismatchError
from reshard.formats.native.reader import NativeFacts
from reshard.formats.pickles.record import unknown_class
from reshard.state.container_types import retyped
from reshard.state.dtypes import dtype_from_name, dtype_name
from reshard.state.targets import Targets
from reshard.state.tensors import global_shape
from reshard.state.tree import KeyPath, key_of, unflatten

__all__ = ["Match", "Truth", "match_keys", "needs_code", "refuse", "used_by_all"]

DTYPE_POLICIES = ("error", "cast", "saved")
MODES = ("strict", "subset", "partial")


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
    cast: dict[str, tuple[str, str]]
    names: tuple[str, ...]
    """Everything that the checkpoint has."""
    used: frozenset[str]
    """Of these, what this rank's target has, under whatever name."""
    mapped: Mapping[str, str]
    """Key of the target -> name under which it was looked for, where a mapping says so."""


class Truth(NamedTuple):
    """What was found out about keys that do not belong together, and is no error."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    outside: tuple[str, ...]
    """Missing, but outside of what a checkpoint that is declared a subset claims to have."""


def match_keys(
    targets: Targets,
    checkpoint: Checkpoint,
    *,
    dtype_policy: str,
    mapping: Mapping[str, str],
) -> Match:
    """Match keys; under dtype_policy "saved", mark in `targets` what is to be replaced.

    Raises KeyMismatchError for an unknown policy or a mapping of keys that the target does not have.
    """
    if dtype_policy not in DTYPE_POLICIES:
        raise KeyMismatchError(f"dtype_policy must be one of {', '.join(DTYPE_POLICIES)}, got {dtype_policy!r}")
    unknown = [key for key in mapping if key not in targets.paths]
    if unknown:
        raise KeyMismatchError(f"the mapping names {unknown[0]!r}, which the target does not have")
    work = _Work(targets, checkpoint, dtype_policy, mapping)
    work.match_tensors()
    work.match_objects()
    work.match_units()
    per_rank = [key for key in targets.per_rank if work.take_per_rank(key)]
    return Match(
        work.tensors,
        work.objects,
        tuple(per_rank),
        tuple(work.missing),
        tuple(work.mismatched),
        work.cast,
        tuple(work.names),
        frozenset(work.used),
        mapping,
    )


def used_by_all(match: Match, group: Group, checkpoint: Checkpoint) -> tuple[frozenset[str], int]:
    """Collective: the names that the target of any rank has, and how many ranks are on this rank's machine.

    A bit for each name of the checkpoint travels, compressed; ranks that want the same send it once.

    Raises CheckpointError, alike on every rank, if ranks have opened different saves at one path.
    """
    if group.world_size == 1:
        return match.used, 1
    bits = np.packbits([name in match.used for name in match.names]) if match.names else np.zeros(0, np.uint8)
    names = xxhash.xxh3_64_digest(msgspec.msgpack.encode(match.names))
    native = checkpoint.contents.facts_of(NativeFacts)
    is_one = not checkpoint.url.startswith("memory:")  # each process has memory of its own
    save = (checkpoint.url, native.manifest.save_id) if native is not None and is_one else ("", "")
    mine = (socket.gethostname(), names, zlib.compress(bits.tobytes()), save)
    union, sharers = bits, 0
    rows = group.exchange(msgspec.msgpack.encode(mine))
    counts = Counter(rows)
    saves: dict[str, str] = {}
    for row, count in counts.items():
        host, theirs, packed, (url, save_id) = msgspec.msgpack.decode(
            row, type=tuple[str, bytes, bytes, tuple[str, str]]
        )
        if saves.setdefault(url, save_id) != save_id:
            raise CheckpointError(
                f"{url} is not the same checkpoint for all ranks: some have opened the save {saves[url]}, others "
                f"{save_id}. It was replaced just then, or is a folder of each machine: load again, from one place"
            )
        sharers += count if host == mine[0] else 0
        if theirs == names:  # ranks that load from something else have no say in what is here
            union = union | np.frombuffer(zlib.decompress(packed), np.uint8)
    flags = np.unpackbits(union, count=len(match.names)).tolist()
    return frozenset(name for name, flag in zip(match.names, flags) if flag), sharers


class _Work:
    """The matching under way."""

    def __init__(self, targets: Targets, checkpoint: Checkpoint, dtype_policy: str, mapping: Mapping[str, str]) -> None:
        self.targets, self.checkpoint, self.mapping = targets, checkpoint, mapping
        self.dtype_policy = dtype_policy
        self.saved_per_rank: Mapping[str, Any] = checkpoint.contents.per_rank
        self.names = [*checkpoint, *checkpoint.objects, *self.saved_per_rank]
        self.used: set[str] = set()
        self.tensors: dict[str, str] = {}
        self.objects: dict[str, Any] = {}
        self.missing: list[str] = []
        self.mismatched: list[str] = []
        self.cast: dict[str, tuple[str, str]] = {}

    def match_tensors(self) -> None:
        later: list[str] = []
        for key, tensor in self.targets.tensors.items():
            name = self.mapping.get(key, key)
            if name in self.checkpoint:
                self._use(name)
                if self._fits(key, name, tensor):
                    self.tensors[key] = name
            elif name in self.checkpoint.objects and _is_number(self.checkpoint.objects[name]) and not tensor.shape:
                self._use(name)
                self._number_into_tensor(key, self.checkpoint.objects[name], tensor)
            else:
                later.append(key)
        for key in later:  # tied in memory to a key that is filled: then it is filled, too
            same = [k for k in self.targets.tensors if self.targets.tied.get(k, k) == self.targets.tied.get(key, key)]
            if not any(k in self.tensors for k in same if k != key):
                self.missing.append(key)

    def _use(self, name: str) -> None:
        self.used.add(name)
        self.used.add(self.checkpoint.aliases.get(name, name))

    def _fits(self, key: str, name: str, tensor: Any) -> bool:
        spec = self.checkpoint[name].stored.spec
        shape, dtype = global_shape(tensor), dtype_name(tensor.dtype)
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
            self.cast[key] = (spec.dtype, spec.dtype if self.dtype_policy == "saved" else dtype)
        return True

    def _number_into_tensor(self, key: str, value: Any, tensor: Any) -> None:
        """A number that was saved as such, for a 0-d tensor; only where the dtype can hold it exactly."""
        made = tensor.new_full((), value)
        if made.item() != value and value == value:
            self.mismatched.append(f"{key}: saved as the number {value}, which {dtype_name(tensor.dtype)} cannot hold")
        else:
            self.objects[key] = made

    def match_objects(self) -> None:
        for key in self.targets.objects:
            name = self.mapping.get(key, key)
            if name in self.checkpoint.objects:
                self._use(name)
                self._give(key, self.checkpoint.objects[name])
            elif name in self.checkpoint and not self.checkpoint[name].shape and _is_number(self.targets.objects[key]):
                self._use(name)
                self.objects[key] = self.checkpoint[name][...].item()
            elif not self._replace_whole(key):  # None where there was no state yet, and a dict was saved
                self.missing.append(key)

    def match_units(self) -> None:
        """Containers of plain values, replaced whole by what was saved at their place."""
        for key in self.targets.units:
            name = self.mapping.get(key, key)
            if any(n != name and n not in self.checkpoint.objects for n in self.below.names.get(name, ())):
                continue  # there are tensors where the target has none: these stay unexpected
            if not self._replace_whole(key):
                self.missing.append(key)

    def _replace_whole(self, key: str) -> bool:
        """Fill a key with the nest of plain values that was saved at its place, if there is one."""
        name, paths = self.mapping.get(key, key), self.checkpoint.contents.paths
        names, kinds = self.below.names.get(name, []), self.below.kinds.get(name, {})
        if any(n not in self.checkpoint.objects for n in names) or not (names or kinds):
            return False
        self.used.update(names)
        nest: Any = unflatten({paths.get(n, (n,)): self.checkpoint.objects[n] for n in names}, kinds)
        for part in self.below.places.get(name, (name,)):
            nest = nest[getattr(part, "value", part)] if not isinstance(nest, (list, tuple)) else nest[0]
        self._give(key, nest)
        return True

    def _give(self, key: str, value: Any) -> None:
        """An object that was saved; but not the record of one that is of an unknown class, in place of a live one."""
        kind = unknown_class(value)
        if kind is None:
            self.objects[key] = retyped(value, self.targets.live(key))
        else:
            self.mismatched.append(f"{key}: {needs_code(kind)}")

    @cached_property
    def below(self) -> _Below:
        """What the checkpoint has at and below each place."""
        return _Below.of(self.names, self.checkpoint)

    def take_per_rank(self, key: str) -> bool:
        name = self.mapping.get(key, key)
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
    """By dotted key, of leaves and of all containers around them."""

    names: dict[str, list[str]]
    """The names at or below it."""
    kinds: dict[str, dict[KeyPath, str]]
    """The containers at or below it that are tuples or empty, by path."""
    places: dict[str, KeyPath]
    """Its path."""

    @classmethod
    def of(cls, names: Iterable[str], checkpoint: Checkpoint) -> _Below:
        out = cls({}, {}, {})
        paths, containers = checkpoint.contents.paths, checkpoint.contents.containers
        for name in names:
            for above in _prefixes(name):
                out.names.setdefault(above, []).append(name)
        for path, kind in containers.items():
            for above in _prefixes(key_of(path)):
                out.kinds.setdefault(above, {})[path] = kind
        for path in (*paths.values(), *containers):
            for i in range(1, len(path) + 1):
                out.places.setdefault(key_of(path[:i]), path[:i])
        return out


def _prefixes(key: str) -> Iterator[str]:
    """The dotted key, and those above it."""
    at = key.find(".")
    while at >= 0:
        yield key[:at]
        at = key.find(".", at + 1)
    yield key


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, complex))


def refuse(
    match: Match,
    used: Collection[str],
    strict: bool | Mapping[str, str],
    checkpoint: Checkpoint,
    targets: Targets,
) -> Truth:
    """The keys that do not belong together, if strictness allows them all; `used` are the names that any rank wants.

    Raises KeyMismatchError with every key that strictness does not allow to be missing, unexpected or mismatched.
    """
    mode_of = _strictness(strict)
    claims = _claims(checkpoint)
    truth = Truth(
        tuple(key for key in match.missing if claims(key)),
        tuple(name for name in match.names if name not in used),
        tuple(key for key in match.missing if not claims(key)),
    )
    missing = [key for key in truth.missing if mode_of(key) != "partial"]
    unexpected = [key for key in truth.unexpected if mode_of(key) == "strict"]
    if not (missing or unexpected or match.mismatched):
        return truth
    # what has found its counterpart is no guess for another
    known = [name for name in (*match.names, *checkpoint.aliases) if name not in match.used]
    wanted = list(match.missing)
    lines = [f"{checkpoint.url} does not fit what is to be loaded:"]
    kinds = {k: v for k, v in _kinds(match.names, checkpoint).items() if (v == "a tensor") != (k in targets.tensors)}
    lines += _section("missing in the checkpoint", missing, known, kinds, match.mapped)
    lines += _section("unexpected, since the target does not have them", unexpected, wanted)
    lines += _section("mismatched", match.mismatched, ())
    fixes = []
    if missing or unexpected:
        fixes.append(
            "strict=False or strict={'some.*': 'partial'} allows missing and unexpected keys, mapping= renames"
        )
    if any("saved as" in line for line in match.mismatched):
        fixes.append("dtype_policy='cast' converts, dtype_policy='saved' keeps the saved dtype")
    raise KeyMismatchError("\n".join(lines + [f"  ({'; '.join(fixes)})"] * bool(fixes)))


def _claims(checkpoint: Checkpoint) -> Callable[[str], bool]:
    """Whether a checkpoint ought to have a key: it ought to have all, unless it was declared a subset."""
    globs = checkpoint.contents.subset
    return lambda key: globs is None or any(fnmatch.fnmatchcase(key, glob) for glob in globs)


def _kinds(names: Iterable[str], checkpoint: Checkpoint) -> dict[str, str]:
    """What is under each name, in words."""
    what = {True: "a tensor", False: "each rank's own value"}
    return {name: what[name in checkpoint] for name in names if name not in checkpoint.objects} | dict.fromkeys(
        checkpoint.objects, "a plain value"
    )


def _section(
    title: str,
    keys: Iterable[str],
    others: Iterable[str],
    kinds: Mapping[str, str] | None = None,
    mapped: Mapping[str, str] | None = None,
) -> list[str]:
    rows = list(keys)
    if not rows:
        return []
    others = list(others)
    known = set(others)
    out = [f"  {len(rows)} {title}:"]
    for i, key in enumerate(rows):
        if kinds and key in kinds:
            out.append(f"    {key}   (there it is {kinds[key]}, which does not fit what the target has)")
            continue
        name = mapped.get(key, key) if mapped else key
        close = (
            difflib.get_close_matches(name, others, n=1, cutoff=0.75)
            if i < 20 and name not in known and len(others) < 5000
            else []
        )
        sought = f"   (looked for as {name!r})" if name != key else ""
        out.append(f"    {key}{sought}" + (f"   (did you mean {close[0]!r}?)" if close else ""))
    return out


def _strictness(strict: bool | Mapping[str, str]) -> Callable[[str], str]:
    """The mode of a key: "strict", "subset" or "partial"."""
    if isinstance(strict, bool):
        return lambda key: "strict" if strict else "partial"
    if not isinstance(strict, Mapping):
        raise KeyMismatchError(f"strict must be True, False or a dict of globs to modes, got {strict!r}")
    for glob, mode in strict.items():
        if mode not in MODES:
            raise KeyMismatchError(f"strictness of {glob!r} must be one of {', '.join(MODES)}, got {mode!r}")
    return lambda key: next((mode for glob, mode in strict.items() if fnmatch.fnmatchcase(key, glob)), "strict")
