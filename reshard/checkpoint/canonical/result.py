"""What normalization gives: one model and one optimizer under canonical names, as stored tensors and plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from reshard.errors import NormalizationError
from reshard.formats.stored.tensor import StoredTensor

__all__ = ["Canonical", "Value", "elementwise"]

Value = Any
"""A `StoredTensor`, or a plain value such as the number of steps."""

_ELEMENTWISE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "fp32_param")


def elementwise(name: str) -> bool:
    """Whether a state of this name has one value for each element of the parameter, so the parameter's shape."""
    return name in _ELEMENTWISE


@dataclass
class Canonical:
    """A state under canonical names; `state` and `groups` are empty where no optimizer was saved."""

    model: dict[str, StoredTensor] = field(default_factory=dict)
    state: dict[str, dict[str, Value]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What a reader should know: padding that could not be cut, lists that are incomplete ..."""

    def add_model(self, fqn: str, tensor: StoredTensor, source: str) -> None:
        """Raises NormalizationError if another tensor has the name already."""
        if fqn in self.model:
            raise NormalizationError(
                f"both {self.model[fqn].fqn!r} and {source!r} would be called {fqn!r}; name one of them by the hint "
                "'names'"
            )
        self.model[fqn] = tensor

    def add_state(self, fqn: str, name: str, value: Value) -> None:
        """Raises NormalizationError if the parameter has that state already."""
        known = self.state.setdefault(fqn, {})
        if name in known:
            raise NormalizationError(f"two values of the checkpoint would be the state {name!r} of {fqn!r}")
        known[name] = value.renamed(f"{fqn}.{name}") if isinstance(value, StoredTensor) else value

    def rename(self) -> Canonical:
        """The same with every tensor of the model named as its key."""
        self.model = {fqn: t if t.fqn == fqn else t.renamed(fqn) for fqn, t in self.model.items()}
        return self


def check_shapes(result: Canonical, why: str) -> None:
    """Raises NormalizationError if a state that has one value per element has another shape than its parameter."""
    for fqn, states in result.state.items():
        if fqn not in result.model:
            continue
        wanted = result.model[fqn].spec.shape
        _check(fqn, wanted, states, why)


def _check(fqn: str, wanted: tuple[int, ...], states: Mapping[str, Value], why: str) -> None:
    for name, value in states.items():
        if elementwise(name) and isinstance(value, StoredTensor) and value.spec.shape != wanted:
            raise NormalizationError(
                f"the state {name!r} of {fqn!r} has shape {list(value.spec.shape)}, but the parameter has "
                f"{list(wanted)}; {why}"
            )
