"""Which state an optimizer keeps of a parameter: what it cannot go on without, and what it has any use for.

Of torch's own optimizers both are known. Of others nobody can say what they need; what they have a use for is told by
the state that they hold already, if they hold any.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from reshard.state.frameworks.torch_internals import loads_itself
from reshard.state_dict.optimizer.parameters import OptimizedParameter

__all__ = ["Misfit", "StateKind"]


class _Schema(NamedTuple):
    """The state that an optimizer of torch keeps of each parameter."""

    always: tuple[str, ...] = ()
    under: Mapping[str, str] = {}
    """Group field -> the key that it adds where it is set."""
    at_will: tuple[str, ...] = ()
    """Keys that may be there, and that the optimizer makes anew where they are not."""


_LBFGS = ("d", "t", "old_dirs", "old_stps", "ro", "H_diag", "prev_flat_grad", "prev_loss")
"""What LBFGS has from its first iteration on."""

_SCHEMAS = {
    "Adadelta": _Schema(("step", "square_avg", "acc_delta")),
    "Adafactor": _Schema(("step",), at_will=("row_var", "col_var", "variance")),
    "Adagrad": _Schema(("step", "sum")),
    "Adam": _Schema(("step", "exp_avg", "exp_avg_sq"), {"amsgrad": "max_exp_avg_sq"}),
    "AdamW": _Schema(("step", "exp_avg", "exp_avg_sq"), {"amsgrad": "max_exp_avg_sq"}),
    "Adamax": _Schema(("step", "exp_avg", "exp_inf")),
    "ASGD": _Schema(("step", "eta", "mu", "ax")),
    "LBFGS": _Schema(("func_evals", "n_iter"), at_will=(*_LBFGS, "al")),
    "Muon": _Schema(("momentum_buffer",)),
    "NAdam": _Schema(("step", "mu_product", "exp_avg", "exp_avg_sq")),
    "RAdam": _Schema(("step", "exp_avg", "exp_avg_sq")),
    "RMSprop": _Schema(("step", "square_avg"), {"momentum": "momentum_buffer", "centered": "grad_avg"}),
    "Rprop": _Schema(("step", "prev", "step_size")),
    "SGD": _Schema(at_will=("momentum_buffer",)),
    "SparseAdam": _Schema(("step", "exp_avg", "exp_avg_sq")),
}


class Misfit(NamedTuple):
    """What is wrong with the keys of one parameter's saved state."""

    lacking: tuple[str, ...]
    """Keys without which the optimizer's next step would fail, or begin anew."""
    foreign: tuple[Any, ...]
    """Keys that the optimizer has no use for."""


_FITS = Misfit((), ())


class StateKind:
    """The kind of state that one live optimizer keeps.

    Attributes:
        name: class of the optimizer.
        fitting: keys that fit in every parameter of the group and with the fields that were checked last; or None.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.name = type(optimizer).__name__
        self._optimizer = optimizer
        self._base = _torch_class(optimizer)
        self._schema = _SCHEMAS.get(self._base)
        self._asked = tuple(self._schema.under) if self._schema is not None else ()
        self._fields: Mapping[str, Any] | None = None
        self._group = 0
        self._are_set: tuple[bool, ...] = ()
        """Of the fields that were asked for last."""
        self.fitting: list[Any] | None = None
        self._checked: dict[Any, Misfit] = {}

    def check(self, values: Mapping[Any, Any], one: OptimizedParameter, fields: Mapping[str, Any]) -> Misfit | None:
        """What is wrong with the keys of `values`, saved for the parameter in a group that had `fields`; or None."""
        # a model has many parameters, one after another in few groups, and few kinds of state
        known = fields is self._fields and one.group == self._group
        if self._optimizer_has_a_say or (known and list(values) == self.fitting):
            return None
        if not known:
            self._fields, self._group, self.fitting = fields, one.group, None
            self._are_set = self._settings(fields, one.group)
        is_matrix = self._base == "Adafactor" and one.parameter.dim() > 1
        kind = (self._are_set, is_matrix, *values)
        found = self._checked.get(kind)
        if found is None or self._base == "LBFGS":
            needed = self._needed(values, is_matrix, self._are_set)
            lacking = tuple(name for name in needed if name not in values)
            foreign = tuple(key for key in values if self._has_no_use_for(str(key)))
            found = self._checked[kind] = Misfit(lacking, foreign) if lacking or foreign else _FITS
        if found is _FITS and self._base not in ("Adafactor", "LBFGS"):  # whose state depends on more
            self.fitting = list(values)
        return None if found is _FITS else found

    def _settings(self, fields: Mapping[str, Any], group: int) -> tuple[bool, ...]:
        """Which of the fields that add to the state will be set: as they were saved, else as they are."""
        live = self._optimizer.param_groups[group]
        return tuple(_is_set(fields[name] if name in fields else live.get(name)) for name in self._asked)

    @functools.cached_property
    def keeps_state(self) -> bool:
        """Whether it is known to have state of every parameter that it has stepped."""
        has_state_of_all = self._schema is not None and bool(self._schema.always) and self._base != "LBFGS"
        return has_state_of_all and not self._optimizer_has_a_say

    @functools.cached_property
    def _optimizer_has_a_say(self) -> bool:
        return loads_itself(self._optimizer)

    def _has_no_use_for(self, key: str) -> bool:
        """Whether the optimizer neither knows the key nor holds state under it; not where that cannot be told."""
        schema = self._schema
        if schema is not None and (key in schema.always or key in schema.under.values() or key in schema.at_will):
            return False
        return key not in self._held and (schema is not None or bool(self._held))

    @functools.cached_property
    def _held(self) -> Collection[str]:
        """Keys under which the optimizer has state of any parameter."""
        state: Mapping[Any, Any] = self._optimizer.state  # under other keys some keep state of the whole
        owned = (own for of, own in state.items() if isinstance(of, torch.Tensor) and isinstance(own, dict))
        return {str(key) for own in owned for key in own}

    def _needed(self, values: Mapping[Any, Any], is_matrix: bool, are_set: Sequence[bool]) -> list[str]:
        if self._schema is None:
            return []
        needed = list(self._schema.always)
        needed += [key for key, is_set in zip(self._schema.under.values(), are_set) if is_set]
        if self._base == "Adafactor":
            needed += ["row_var", "col_var"] if is_matrix else ["variance"]
        if self._base == "LBFGS" and values.get("n_iter", 1):
            needed += _LBFGS
        return needed


def _torch_class(optimizer: Optimizer) -> str:
    """Name of the class in torch.optim whose state the optimizer's is; "" if it steps in a way of its own."""
    cls = type(optimizer)
    if not all(_is_torchs(getattr(cls, method, None)) for method in ("step", "_init_group", "__setstate__")):
        return ""
    return next((c.__name__ for c in cls.__mro__ if _is_torchs(c)), "")


def _is_torchs(thing: Any) -> bool:
    return thing is None or f"{thing.__module__}.".startswith("torch.optim.")


def _is_set(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.is_meta and bool(value.any())
    return bool(value)
