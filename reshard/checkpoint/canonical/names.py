"""Canonical names of what a checkpoint holds: without wrappers' segments, and as hints say."""

from __future__ import annotations

import re
from collections.abc import Iterable

from reshard.checkpoint.canonical.hints import Hints
from reshard.errors import NormalizationError
from reshard.state.frameworks.wrapper_names import CERTAIN_SEGMENTS, WrapperNames

__all__ = ["NameMap", "common_attribute"]

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
        prefix = hints.get("prefix")
        self._wrappers = WrapperNames(
            names,
            prefixes=(extra_prefix if prefix != "" else "", "" if prefix is None else str(prefix)),
            beside=_COUNTERS,
            certain=CERTAIN_SEGMENTS | {"base_layer"},
            others=others,
        )

    def __call__(self, name: str) -> str:
        """The canonical name."""
        hinted = self._from_hint(name)
        if hinted is not None:
            return hinted
        bare = self._wrappers.without_wrappers(name)
        if "parametrizations" in bare.split(".") and not self._keep:
            raise NormalizationError(
                f"{name!r} is part of a parametrization, whose parameter is computed from it and is not stored; remove "
                "the parametrization before saving, or keep such names by the hint {'keep_parametrizations': True}"
            )
        bare = self._wrappers.without_adapter(bare)
        hinted = self._from_hint(bare)
        return bare if hinted is None else hinted

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
