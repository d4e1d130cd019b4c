"""Taking the state of optimizers, by canonical names; nothing is stepped, initialised or changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from reshard.errors import NormalizationError
from reshard.state.fsdp1 import FlatPiece
from reshard.state_dict.names import LiveModel, where
from reshard.state_dict.optimizer.flat_parameters import split_state
from reshard.state_dict.values import copy_containers

__all__ = ["LiveOptimizers", "OptimizedParameter", "as_optimizers", "flatten", "read_optimizers"]

OUTSIDE = "outside_model"
"""First segment of the name of a parameter that the model does not have; then optimizer, group and position follow."""


class OptimizedParameter(NamedTuple):
    """A parameter at its place in an optimizer."""

    parameter: torch.Tensor
    names: tuple[str, ...]
    """Its canonical names; its state is stored under the first one."""
    optimizer: int
    group: int
    position: int
    """In its group."""
    id: int
    """In `optimizer.state_dict()`."""
    piece: FlatPiece | None = None
    """Set for a parameter inside an FSDP1 flat parameter, which several of these may share."""

    @property
    def name(self) -> str:
        """The name of its state."""
        return self.names[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape of the parameter."""
        return self.parameter.shape if self.piece is None else self.piece.shape


class LiveOptimizers:
    """The parameters of one or several optimizers, by canonical name.

    Raises NormalizationError for a parameter that two optimizers have.
    """

    def __init__(self, live: LiveModel, optimizers: Sequence[Optimizer]) -> None:
        self.live = live
        self.optimizers = tuple(optimizers)
        self.parameters: list[list[OptimizedParameter]] = []
        """Per optimizer, in the order of its ids."""
        self.by_id: list[dict[int, list[OptimizedParameter]]] = []
        """Per optimizer and id in its own state dict: one parameter, or all that an FSDP1 flat one consists of."""
        self.by_name: dict[str, OptimizedParameter] = {}
        """By every name, aliases too."""
        seen: dict[int, OptimizedParameter] = {}
        for k, optimizer in enumerate(self.optimizers):
            found = list(self._parameters(k, optimizer))
            self.parameters.append(found)
            self.by_id.append({})
            for one in found:
                self.by_id[k].setdefault(one.id, []).append(one)
                other = seen.setdefault(id(one.parameter), one)
                if other is not one and (other.optimizer, other.id) != (k, one.id):
                    raise NormalizationError(
                        f"parameter {one.name!r} is in optimizer {other.optimizer} (group {other.group}) and in "
                        f"optimizer {k} (group {one.group}){where()}: its state would have two owners"
                    )
                for name in one.names:
                    self.by_name.setdefault(name, one)

    def _parameters(self, k: int, optimizer: Optimizer) -> Iterator[OptimizedParameter]:
        names_of, pieces_of, number = self.live.names_of, self.live.pieces_of, 0
        for g, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                names = names_of.get(id(parameter))
                if names is not None:
                    yield OptimizedParameter(parameter, tuple(names), k, g, position, number)
                elif id(parameter) in pieces_of:
                    for piece in pieces_of[id(parameter)]:
                        own = tuple(names_of[piece.identity])
                        yield OptimizedParameter(parameter, own, k, g, position, number, piece)
                else:
                    outside = (f"{OUTSIDE}.{k}.{g}.{position}",)
                    yield OptimizedParameter(parameter, outside, k, g, position, number)
                number += 1


def as_optimizers(given: Any) -> tuple[Optimizer, ...]:
    """One optimizer or several, as a tuple; raises NormalizationError for anything else."""
    found = (given,) if hasattr(given, "param_groups") else tuple(given) if isinstance(given, Iterable) else None
    if found is None or not all(hasattr(one, "param_groups") for one in found):
        raise NormalizationError(f"optimizers must be an optimizer or several, got {type(given).__name__}")
    return found


def read_optimizers(live: LiveOptimizers) -> dict[str, Any]:
    """`{"state": {name: {state name: value}}, "param_groups": [{field: value, "params": [names]}]}`, the groups of all
    optimizers one after another. Parameters without state are in a group and not in `state`.

    The containers are new, the tensors are the live ones.
    """
    state: dict[Any, Any] = {}
    groups: list[dict[str, Any]] = []
    for k, optimizer in enumerate(live.optimizers):
        saved = optimizer.state_dict()
        named = {key: _names(key, live, k) for group in saved["param_groups"] for key in group["params"]}
        for key, values in saved["state"].items():
            if values:
                for name, one in named.get(key) or _names(key, live, k):
                    if name in state:
                        raise NormalizationError(f"two optimizers have state under the key {name!r}{where()}")
                    if one is not None and one.piece is not None:
                        state[name] = split_state(one.piece, one.parameter, values)
                    else:
                        state[name] = copy_containers(values)
        for group in saved["param_groups"]:
            fields = {
                field: copy_containers(value)
                for field, value in group.items()
                if field not in ("params", "param_names")
            }
            groups.append({**fields, "params": [name for key in group["params"] for name, _ in named[key]]})
    return {"state": state, "param_groups": groups}


def _names(key: Any, live: LiveOptimizers, k: int) -> list[tuple[Any, OptimizedParameter | None]]:
    """The canonical names of a key of an optimizer's own state dict; keys of no parameter stay as they are."""
    if isinstance(key, int) and not isinstance(key, bool):
        ones = live.by_id[k].get(key)
        if ones is None:
            raise NormalizationError(
                f"optimizer {k} has state under the id {key}{where()}, but only {len(live.by_id[k])} parameters"
            )
        return [(one.name, one) for one in ones]
    # an optimizer that writes names itself may write those of the wrapped modules
    name = live.live.by_live.get(key, key) if isinstance(key, str) and key not in live.by_name else key
    return [(name, None)]


def flatten(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The flat form: `state.<fqn>.<name>...` and `param_groups.<fqn>.<field>`, where every parameter carries the fields
    of its group, so that dicts of pipeline stages have no key in common. Empty groups leave no trace.
    """
    flat: dict[str, Any] = {}
    for name, values in state_dict["state"].items():
        prefix = f"state.{name}."
        for key, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, dict):
                _flatten_into(flat, f"{prefix}{key}", value)
            else:
                flat[f"{prefix}{key}"] = value
    for group in state_dict["param_groups"]:
        fields = {field: value for field, value in group.items() if field != "params"}
        for name in group["params"]:
            flat.update(zip(map(f"param_groups.{name}.".__add__, fields), fields.values()))
    return flat


def _flatten_into(flat: dict[str, Any], prefix: str, value: Any) -> None:
    if not isinstance(value, dict):
        flat[prefix] = value
        return
    for key, item in value.items():
        _flatten_into(flat, f"{prefix}.{key}", item)
