"""State that an optimizer does not have yet: places for it are made by the load that finds it in a checkpoint.

A fresh optimizer has no state, and nothing is stepped to make some, so its state dict has no place to load into. What
it has is the parameters: where the checkpoint has state of theirs, that lies where they lie.

    Awaiting({}, {"w": parameter})  ->  within `places`, {"w": {"exp_avg": tensor like w, "step": None}}
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from reshard.state.dtypes import dtype_from_name
from reshard.state.optimizer_forms import owner_of
from reshard.state.tensors import global_shape
from reshard.state.tree import KeyPath, key_of, unflatten

__all__ = ["Awaiting", "Saved", "lost_state", "place_like", "places"]


class Awaiting(dict[Any, Any]):
    """The state of an optimizer by parameter, still empty; or a whole optimizer state dict of the flat form.

    A dict like any other; copies of it are plain dicts, and so are pickles, ordered ones, which torch.load trusts.

    Attributes:
        parameters: name -> the parameter, or something on the meta device of its shape.
    """

    def __init__(self, state: Mapping[Any, Any], parameters: Mapping[str, Any]) -> None:
        super().__init__(state)
        self.parameters = parameters

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (list(self.items()),)

    def __copy__(self) -> dict[Any, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        return copy.deepcopy(dict(self), memo)


class Saved(NamedTuple):
    """What a checkpoint has under one key."""

    path: tuple[Any, ...]
    shape: tuple[int, ...] | None
    """None for what is no tensor."""
    dtype: str = ""


@contextmanager
def places(state_dict: Any, saved: Iterable[Saved], *, keep: bool = True) -> Iterator[None]:
    """Within, whatever is `Awaiting` in a nest has a place for everything that was saved for it, None for what is no
    tensor. With `keep`, the places stay, unless an error ends it."""
    waiting = list(_waiting(state_dict, ()))
    before = [(one, dict(one)) for _, one in waiting]
    try:
        rows = list(saved) if waiting else []
        for path, one in waiting:
            _make_places(one, [(row.path[len(path) :], row) for row in rows if _same_path(row.path[: len(path)], path)])
        yield
    except BaseException:
        _put_back(before)
        raise
    if not keep:
        _put_back(before)


def _put_back(before: Iterable[tuple[Awaiting, dict[Any, Any]]]) -> None:
    for one, was in before:
        one.clear()
        one.update(was)


def lost_state(state_dict: Any, saved: Iterable[Saved]) -> list[str]:
    """Keys of optimizers' states that are empty, and not in the checkpoint: a load would silently leave them so."""
    empty = list(_empty_states(state_dict, ()))
    rows = list(saved) if empty else []
    return [
        key_of(path)
        for path, names in empty
        if any(_same_path(row.path[: len(path)], path) and {*map(str, row.path[len(path) :])} & names for row in rows)
    ]


def place_like(parameter: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Unfilled memory for a tensor of a parameter's state: placed like it where the shapes are the same."""
    if shape != global_shape(parameter) or (type(parameter) is torch.Tensor and parameter.device.type == "meta"):
        return torch.empty(shape, dtype=dtype)
    like: torch.Tensor = torch.empty_like(parameter, dtype=dtype)
    return like


def _make_places(one: Awaiting, rows: Iterable[tuple[tuple[Any, ...], Saved]]) -> None:
    nested: dict[str, dict[KeyPath, Any]] = {}  # the state of an optimizer such as LBFGS holds lists
    for rest, row in rows:
        if len(rest) >= 2 and rest[0] in one.parameters:
            nested.setdefault(rest[0], {})[rest[1:]] = _place(one.parameters[rest[0]], row)
        elif len(rest) == 1 and str(rest[0]).startswith("state."):
            name = owner_of(str(rest[0]).removeprefix("state."), one.parameters)
            if name is not None:
                one[rest[0]] = _place(one.parameters[name], row)
    one.update((name, unflatten(leaves)) for name, leaves in nested.items())


def _place(parameter: Any, row: Saved) -> Any:
    return None if row.shape is None else place_like(parameter, row.shape, dtype_from_name(row.dtype))


def _waiting(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Awaiting]]:
    if isinstance(value, Awaiting):
        yield path, value
        return
    for key, item in _items(value):
        yield from _waiting(item, (*path, key))


def _empty_states(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], set[str]]]:
    """Where optimizers have parameters and no state, and which parameters."""
    if isinstance(value, Mapping) and isinstance(value.get("param_groups"), list) and value.get("state") == {}:
        groups = [group for group in value["param_groups"] if isinstance(group, Mapping)]
        yield (*path, "state"), {str(name) for group in groups for name in group.get("params", ())}
    for key, item in _items(value):
        yield from _empty_states(item, (*path, key))


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if type(value) in (list, tuple) else ()


def _same_path(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return tuple(map(str, a)) == tuple(map(str, b))
