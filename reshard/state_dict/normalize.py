"""`normalize`: convert state dicts that were saved with wrapper prefixes and integer ids to
canonical form.

There is no live model to inspect, so names are read as text. Segments that only wrappers use are
removed everywhere. `module` can belong to DDP or to your model: it is removed at the front if every
name starts with it, and elsewhere only if you pass the right names. The same holds for PEFT's
segments, which a live model keeps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reshard.arguments import renamed
from reshard.errors import NormalizationError
from reshard.live.optimizer_state import is_flat, is_nested, settings_of
from reshard.live.wrappers import CERTAIN_SEGMENTS, EXTRA_STATE, WrapperNames
from reshard.state_dict.saved_optimizer import extra_of


@dataclass(frozen=True)
class NormalizeReport:
    """What `normalize` changed."""

    renamed: Mapping[str, str]
    """Raw name -> canonical name, if they differ."""
    dropped: Mapping[str, int]
    """Wrapper segment -> how many times it was removed."""
    doubtful: tuple[str, ...]
    """Canonical names that still have a segment `module`. It may belong to a wrapper or to the
    model."""
    ids: Mapping[int, str]
    """Integer parameter id -> name."""

    def __str__(self) -> str:
        lines = [f"names changed: {len(self.renamed)}"]
        lines += [f"  {segment!r} removed: {count}" for segment, count in self.dropped.items()]
        lines += [f"  {len(self.ids)} integer ids named"] if self.ids else []
        lines += [f"  'module' may be a wrapper's: {name}" for name in self.doubtful]
        return "\n".join(lines)


class Normalized(dict[str, Any]):
    """The normalized dict. `report` lists the changes."""

    report: NormalizeReport


@renamed()
def normalize(
    raw: Mapping[str, Any], *, names: Collection[str] | None = None, order: Sequence[str] | None = None
) -> Normalized:
    """Convert a raw state dict to canonical names. Return a new dict with the same values. The input
    does not change.

    The input can be the state dict of a model, the state dict of an optimizer (`state` and
    `param_groups`, by name or by integer id), a flat optimizer state dict, or a dict that contains
    several of these. Everything else is kept unchanged.

    Args:
        raw: the state dict.
        names: the canonical names, if you know them (`fqn_map(model)` works). They decide whether a
            segment `module` belongs to a wrapper. The text of a name alone does not say so.
        order: canonical parameter names by integer id, for optimizers that were saved by ids. Use the
            order of the optimizer's parameters, not of the state dict:
            `fqn_map(model, optimizer).parameter_order()`.

    Raises:
        NormalizationError: two names become the same, an id is not in `order`, or there are ids and
            no `order`.
    """
    if not isinstance(raw, Mapping):
        raise NormalizationError(
            f"normalize takes a state dict, got {type(raw).__name__}. For a checkpoint: reshard.open(path).normalized()"
        )
    work = _Normalizing(frozenset(names) if names is not None else None, order)
    out = Normalized(work.tree(raw, "the state dict"))
    doubtful = sorted({name for name in work.seen if "module" in name.split(".") and names is None})
    out.report = NormalizeReport(work.renamed, work.dropped, tuple(doubtful), work.ids)
    return out


class _Normalizing:
    def __init__(self, names: frozenset[str] | None, order: Sequence[str] | None) -> None:
        self.names = names
        self.order = order
        self.renamed: dict[str, str] = {}
        self.dropped: dict[str, int] = {}
        self.ids: dict[int, str] = {}
        self.seen: set[str] = set()

    def tree(self, raw: Mapping[Any, Any], what: str) -> dict[Any, Any]:
        """Normalize one level: an optimizer, a flat optimizer, a model, or a container of these."""
        if is_nested(raw):
            return self.optimizer(raw, what)
        if is_flat(raw):
            return self.flat_optimizer(raw, what)
        if any(isinstance(value, torch.Tensor) for value in raw.values()) and all(isinstance(key, str) for key in raw):
            raw = self.renamed_keys(raw, what)
        below = [key for key in raw if isinstance(raw[key], Mapping) and not str(key).endswith(EXTRA_STATE)]
        return {**raw, **{key: self.tree(raw[key], f"{what}[{key!r}]") for key in below}}

    def optimizer(self, raw: Mapping[str, Any], what: str) -> dict[str, Any]:
        groups = raw["param_groups"]
        groups = groups.values() if isinstance(groups, Mapping) else groups
        texts = [key for key in [*raw["state"], *(k for g in groups for k in g["params"])] if isinstance(key, str)]
        wrappers = WrapperNames(texts)
        state: dict[Any, Any] = {}
        for key, values in raw["state"].items():
            name = self.key(key, wrappers, what)
            if name in state:
                raise NormalizationError(f"two entries of {what}['state'] have the canonical name {name!r}")
            state[name] = values
        packed = [
            {**settings_of(group), "params": [self.key(key, wrappers, what) for key in group["params"]]}
            for group in groups
        ]
        return {**extra_of(raw), "state": state, "param_groups": packed}

    def flat_optimizer(self, raw: Mapping[str, Any], what: str) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for front in ("state.", "param_groups."):
            bare = {key.removeprefix(front): value for key, value in raw.items() if key.startswith(front)}
            out.update((front + name, value) for name, value in self.renamed_keys(bare, what).items())
        return out

    def renamed_keys(self, raw: Mapping[str, Any], what: str) -> dict[str, Any]:
        wrappers = WrapperNames(raw)
        out: dict[str, Any] = {}
        origin: dict[str, str] = {}
        for key, value in raw.items():
            name = self.name(key, wrappers)
            if name in origin:
                raise NormalizationError(
                    f"{origin[name]!r} and {key!r} of {what} both have the canonical name {name!r}"
                )
            origin[name], out[name] = key, value
        return out

    def key(self, key: Any, wrappers: WrapperNames, what: str) -> Any:
        """Return the canonical name of a key of optimizer state."""
        if isinstance(key, str):
            return self.name(key, wrappers)
        if type(key) is not int:
            return key
        if self.order is None:
            raise NormalizationError(
                f"{what} names parameters by integer ids: pass order=[canonical names by id], for instance "
                "fqn_map(model, optimizer).parameter_order()"
            )
        if not 0 <= key < len(self.order):
            raise NormalizationError(f"{what} has the parameter id {key}, but order has {len(self.order)} names")
        self.ids[key] = self.order[key]
        return self.order[key]

    def name(self, raw: str, wrappers: WrapperNames) -> str:
        """Return the canonical name of a raw one, and count the removed segments."""
        if self.names is not None and raw in self.names:
            name = raw
        else:
            name = self._by_names(raw) or wrappers(raw)
        if name != raw:
            self.renamed[raw] = name
            kept = name.split(".")
            for segment in (*CERTAIN_SEGMENTS, "module"):
                gone = raw.split(".").count(segment) - kept.count(segment)
                if gone:
                    self.dropped[segment] = self.dropped.get(segment, 0) + gone
        self.seen.add(name)
        return name

    def _by_names(self, raw: str) -> str | None:
        """Return the known name that the raw name becomes by removing segments, if there is exactly
        one.
        """
        if self.names is None:
            return None
        certain = [part for part in raw.split(".") if part not in CERTAIN_SEGMENTS]
        at = [i for i, part in enumerate(certain) if part == "module"]
        found = set()
        for mask in range(1 << min(len(at), 10)):
            gone = {i for bit, i in enumerate(at) if mask >> bit & 1}
            name = ".".join(part for i, part in enumerate(certain) if i not in gone)
            # of a flat optimizer key the known name is the front
            if name in self.names or any(name[: len(name) - len(t)] in self.names for t in _tails(name)):
                found.add(name)
        if len(found) > 1:
            raise NormalizationError(f"{raw!r} could be any of {sorted(found)}")
        return found.pop() if found else None


def _tails(name: str) -> list[str]:
    parts = name.split(".")
    return ["." + ".".join(parts[i:]) for i in range(1, len(parts))]
