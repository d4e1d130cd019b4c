"""Canonical names by spelling: what is left of a saved name without the segments that wrappers add.

Here there is no live module to ask, so only segments that nothing else is called are dropped wherever they stand;
`module.` and the like, which a user's own child may be called too, only if every name of the model begins with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from reshard.checkpoint.canonical.hints import Hints
from reshard.errors import NormalizationError
from reshard.state.adapters import PEFT_PREFIX, drop_adapter
from reshard.state.torch_internals import WRAPPER_SEGMENTS

__all__ = ["NameMap", "common_attribute"]

_WRAPPERS = (WRAPPER_SEGMENTS - {"module"}) | {"_fpw_module", "_forward_module"}
_LEADING = ("module.", PEFT_PREFIX)
_COUNTERS = frozenset(("n_averaged",))
"""Names that an averaging wrapper adds beside `module.`."""


class NameMap:
    """Maps the names of one model and of its optimizer's states to canonical ones."""

    def __init__(self, names: Iterable[str], hints: Hints, extra_prefix: str = "", others: Iterable[str] = ()) -> None:
        """`names` are those of the model, or of the optimizer's states where no model was saved.

        `extra_prefix` is a leading part that the format is known to add, `others` are names of the optimizers, which
        may have an adapter's name where the file of the adapter does not. Raises NormalizationError for a
        parametrization, whose parameter is computed and not stored.
        """
        self._hinted = {str(k): str(v) for k, v in hints.mapping("names").items()}
        self._keep = bool(hints.get("keep_parametrizations"))
        bare = [_without_wrappers(name) for name in names]
        prefix = hints.get("prefix")
        self._prefixes: list[str] = []
        for fixed in (extra_prefix if prefix != "" else "", "" if prefix is None else str(prefix)):
            if fixed:
                bare = self._take(bare, fixed)
        bare = self._take_leading(bare)
        self._drop_adapter = drop_adapter([*bare, *map(self._bare, others)] if PEFT_PREFIX in self._prefixes else ())

    def _take(self, names: list[str], prefix: str) -> list[str]:
        self._prefixes.append(prefix)
        return [name.removeprefix(prefix) for name in names]

    def _take_leading(self, names: list[str]) -> list[str]:
        found = True
        while found and names:
            found = False
            for prefix in _LEADING:
                rest = [name for name in names if not name.startswith(prefix)]
                if len(rest) < len(names) and set(rest) <= _COUNTERS:
                    names, found = self._take(names, prefix), True
        return names

    def __call__(self, name: str) -> str:
        """The canonical name."""
        hinted = self._from_hint(name)
        if hinted is not None:
            return hinted
        bare = self._bare(name)
        if "parametrizations" in bare.split(".") and not self._keep:
            raise NormalizationError(
                f"{name!r} is part of a parametrization, whose parameter is computed from it and is not stored; remove "
                "the parametrization before saving, or keep such names by the hint {'keep_parametrizations': True}"
            )
        bare = self._drop_adapter(bare)
        hinted = self._from_hint(bare)
        return bare if hinted is None else hinted

    def _bare(self, name: str) -> str:
        bare = _without_wrappers(name)
        for prefix in self._prefixes:
            bare = bare.removeprefix(prefix)
        return bare

    def _from_hint(self, name: str) -> str | None:
        """By the whole name, or by the longest leading part that the hint has."""
        if name in self._hinted:
            return self._hinted[name]
        head = name
        while "." in head:
            head = head.rpartition(".")[0]
            for key in (head, head + "."):
                if key in self._hinted:
                    start = self._hinted[key]
                    tail = name[len(head) + 1 :]
                    return f"{start}.{tail}" if start and not start.endswith(".") else start + tail
        return None


def _without_wrappers(name: str) -> str:
    if not any(wrapper in name for wrapper in _WRAPPERS) and ".base_layer." not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS and part != "base_layer")


_HOLDERS = frozenset(
    ["model", "net", "network", "module", "nn", "backbone", "seq", "sequential", "mlp", "_model", "_net"]
)
"""What training modules call the one child that is the model."""


def common_attribute(names: Iterable[str]) -> str:
    """The first segment, with its dot, that all names share, such as the attribute of a training module that holds the
    model; "" if there is none. A container of numbered layers counts only if it is called as models are: `layers.0.w`
    is a name of the module itself, `net.0.w` one of the `Sequential` in it."""
    given = list(names)
    heads = {name.partition(".")[0] for name in given}
    if len(heads) != 1 or any("." not in name for name in given):
        return ""
    head = heads.pop()
    numbered = all(re.match(r"\d+(\.|$)", name[len(head) + 1 :]) for name in given)
    return "" if numbered and head not in _HOLDERS else head + "."
