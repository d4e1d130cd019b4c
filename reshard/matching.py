"""Which keys of a target and of a checkpoint belong together, and the whole truth about those that do not."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from reshard.checkpoint import Checkpoint
from reshard.dtypes import dtype_from_name, dtype_name
from reshard.errors import KeyMismatchError
from reshard.targets import Targets
from reshard.tensors import global_shape
from reshard.tree import KeyPath, key_of, unflatten

__all__ = ["Match", "match_keys"]

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
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]
    cast: dict[str, tuple[str, str]]


def match_keys(
    targets: Targets,
    checkpoint: Checkpoint,
    *,
    strict: bool | Mapping[str, str],
    dtype_policy: str,
    mapping: Mapping[str, str],
) -> Match:
    """Match keys; under dtype_policy "saved", mark in `targets` what is to be replaced.

    Raises KeyMismatchError with every key that strictness does not allow to be missing, unexpected or mismatched.
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
    unexpected = [name for name in work.names if name not in work.used]
    match = Match(
        work.tensors,
        work.objects,
        tuple(per_rank),
        tuple(work.missing),
        tuple(unexpected),
        tuple(work.mismatched),
        work.cast,
    )
    _refuse(match, strict, checkpoint, targets)
    return match


class _Work:
    """The matching under way."""

    def __init__(self, targets: Targets, checkpoint: Checkpoint, dtype_policy: str, mapping: Mapping[str, str]) -> None:
        self.targets, self.checkpoint, self.mapping = targets, checkpoint, mapping
        self.dtype_policy = dtype_policy
        facts = checkpoint.contents.facts
        self.saved_per_rank: Mapping[str, Any] = facts.get("per_rank", {})
        self.saved_containers: Mapping[KeyPath, str] = checkpoint.contents.containers
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
                self.objects[key] = self.checkpoint.objects[name]
            elif name in self.checkpoint and not self.checkpoint[name].shape and _is_number(self.targets.objects[key]):
                self._use(name)
                self.objects[key] = self.checkpoint[name][...].item()
            else:
                self.missing.append(key)

    def match_units(self) -> None:
        """Containers of plain values, replaced whole by what was saved at their place."""
        paths = self.checkpoint.contents.paths
        for key in self.targets.units:
            name = self.mapping.get(key, key)
            below = [n for n in self.names if n == name or n.startswith(f"{name}.")]
            tensors = [n for n in below if n in self.checkpoint]
            if tensors:
                continue  # there are tensors where the target has none: these stay unexpected
            leaves = {paths.get(n, (n,)): self.checkpoint.objects[n] for n in below if n in self.checkpoint.objects}
            kinds = {
                p: k for p, k in self.saved_containers.items() if key_of(p) == name or key_of(p).startswith(f"{name}.")
            }
            if not leaves and not kinds:
                self.missing.append(key)
                continue
            self.used.update(below)
            nest: Any = unflatten(leaves, kinds)
            for part in self.targets.units[key] if name == key else _path_of(name, paths, kinds):
                nest = nest[getattr(part, "value", part)] if not isinstance(nest, (list, tuple)) else nest[0]
            self.objects[key] = nest

    def take_per_rank(self, key: str) -> bool:
        name = self.mapping.get(key, key)
        if name not in self.saved_per_rank:
            self.missing.append(key)
            return False
        self._use(name)
        return True


def _path_of(name: str, paths: Mapping[str, KeyPath], kinds: Mapping[KeyPath, str]) -> KeyPath:
    """The path whose dotted key is `name`, out of the paths that lead there or beyond."""
    for path in (*paths.values(), *kinds):
        for i in range(1, len(path) + 1):
            if key_of(path[:i]) == name:
                return path[:i]
    return (name,)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, complex))


def _refuse(match: Match, strict: bool | Mapping[str, str], checkpoint: Checkpoint, targets: Targets) -> None:
    mode_of = _strictness(strict)
    missing = [key for key in match.missing if mode_of(key) != "partial"]
    unexpected = [key for key in match.unexpected if mode_of(key) == "strict"]
    if not (missing or unexpected or match.mismatched):
        return
    known, wanted = [*checkpoint, *checkpoint.aliases, *checkpoint.objects], [*targets.paths]
    lines = [f"{checkpoint.url} does not fit what is to be loaded:"]
    lines += _section("missing in the checkpoint", missing, known)
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


def _section(title: str, keys: Iterable[str], others: Iterable[str]) -> list[str]:
    rows = list(keys)
    if not rows:
        return []
    others = list(others)
    out = [f"  {len(rows)} {title}:"]
    for i, key in enumerate(rows):
        close = difflib.get_close_matches(key, others, n=1, cutoff=0.75) if i < 20 and len(others) < 5000 else []
        out.append(f"    {key}" + (f"   (did you mean {close[0]!r}?)" if close else ""))
    return out


def _strictness(strict: bool | Mapping[str, str]) -> Callable[[str], str]:
    """The mode of a key: "strict", "subset" or "partial"."""
    if isinstance(strict, bool):
        return lambda key: "strict" if strict else "partial"
    for glob, mode in strict.items():
        if mode not in MODES:
            raise KeyMismatchError(f"strictness of {glob!r} must be one of {', '.join(MODES)}, got {mode!r}")
    return lambda key: next((mode for glob, mode in strict.items() if fnmatch.fnmatchcase(key, glob)), "strict")
