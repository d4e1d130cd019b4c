"""State that an optimizer does not have yet: places for it are made by what a checkpoint says that
there is.

A fresh optimizer has no state, and nothing is stepped to make some, so its state dict has no place
to load into. What it has is the parameters: state of a parameter in the checkpoint gets the
parameter's layout. State that was saved as one tensor under several keys gets one place for all of
them.

    LazyOptimizerState({}, {"w": parameter})  ->  within `materialize`, {"w": {"exp_avg": tensor like w, "step": None}}
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from planners.geometry.box import Shape
from reshard.errors import NormalizationError
from reshard.live.dtypes import any_lacks_memory, dtype_from_name
from reshard.live.fsdp1 import remade_like
from reshard.live.tensors import (
    LiveTensor,
    dtensor_of,
    dtype_of,
    global_shape,
    held_tensors,
    is_dtensor,
    is_sharded,
    is_tensor,
)
from reshard.live.tree import flatten, leaves_of, unflatten
from reshard.state import KeyPath, key_of

SCALARS = frozenset(["step", "eta", "mu", "mu_product"])
"""State that torch's optimizers store in 0-d tensors, which are never DTensors."""


class PartialState(dict[Any, Any]):
    """The state of an optimizer by parameter, or a whole optimizer state dict of the flat form,
    some of which only other ranks have.

    A dict like any other; pickles of it are plain ordered dicts, which torch.load trusts.

    Attributes:
        elsewhere: parameter -> its `FlatPiece`, if some ranks hold no element of it and so no
            state; or the one rank that has its state; or None, if unsharded tensors are here beside
            a DTensor. On all ranks of its process group, a `FlatPiece` is under the same names.
    """

    def __init__(self, state: Mapping[Any, Any], elsewhere: Mapping[str, Any]) -> None:
        super().__init__(state)
        self.elsewhere = elsewhere

    @property
    def is_placed(self) -> bool:
        """Whether some unsharded tensor here should stay unsharded beside a DTensor."""
        return None in self.elsewhere.values()

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (list(self.items()),)

    def __copy__(self) -> dict[Any, Any]:
        return PartialState(self, self.elsewhere) if self.elsewhere else dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        return copy.copy(PartialState(copy.deepcopy(dict(self), memo), self.elsewhere))


class LazyOptimizerState(PartialState):
    """The state of an optimizer by parameter, still empty; or a whole optimizer state dict of the
    flat form.

    A dict like any other; copies of it wait for nothing.

    Attributes:
        parameters: name -> the parameter, or something on the meta device of its shape.
        offered: the parameters whose state is only what the optimizer would begin with: a load
            keeps of it what the checkpoint has.
        has_own: whether the optimizer may keep state of the whole, under keys that no group lists.
        is_complete: whether it has its places already: then a load adds none, and only ties those
            that are there.
    """

    def __init__(
        self,
        state: Mapping[Any, Any],
        parameters: Mapping[str, Any],
        offered: Container[str] = frozenset(),
        *,
        has_own: bool = False,
    ) -> None:
        super().__init__(state, getattr(state, "elsewhere", {}))
        self.parameters = parameters
        self.offered = offered
        self.has_own = has_own
        self.is_complete = False

    @property
    def is_placed(self) -> bool:
        """Whether a load places tensors beside DTensors."""
        return super().is_placed or any(map(is_dtensor, self.parameters.values()))

    def receive(self, filled: Mapping[Any, Any]) -> None:
        """Set these places. After that, nothing is offered, and no other rank alone has state."""
        self.offered = frozenset()
        self.elsewhere = {name: at for name, at in self.elsewhere.items() if not isinstance(at, int)}
        self.clear()
        self.update(filled)

    def is_of_others(self, path: KeyPath) -> bool:
        """Return whether a path is a field, in the flat form, of a parameter that another rank has."""
        return bool(path) and is_field(path) and _owner(path, self.parameters) is None


class Saved(NamedTuple):
    """What a checkpoint has under one key."""

    key: str
    path: KeyPath
    shape: Shape | None
    """None if it is not a tensor."""
    dtype: str = ""
    first: str = ""
    """The key of the first tensor, if this is another name of it."""
    value: Any = None
    """The value of an object, if it must exist before the load."""
    read: Callable[[], Any] | None = None
    """Returns the elements of a tensor, or the object, if it is available before the load."""
    on_mesh: bool | None = None
    """True if it was a DTensor. None if the checkpoint does not record it."""
    in_parts: bool = False
    """Whether each rank held a part of it."""


@contextmanager
def materialize(
    state_dict: Any,
    saved: Iterable[Saved],
    *,
    containers: Mapping[KeyPath, str] | None = None,
    names: Mapping[str, str] | None = None,
    tensors: Collection[str] = (),
    keep: bool = True,
) -> Iterator[None]:
    """Within, whatever is `LazyOptimizerState` in a nest has a place for everything that was saved
    for it.

    Args:
        containers: kinds of those that are tuples or empty, see `reshard.live.tree.Flat`.
        names: key of the nest -> key in the checkpoint, where they differ.
        tensors: keys of the checkpoint's tensors. Groups that have such get their form, also where
            the optimizer has state.
        keep: the places stay, unless an error ends it.
    """
    waiting = _within(state_dict, lambda one: isinstance(one, LazyOptimizerState))
    groups = [_Groups(path, one, one["param_groups"]) for path, one in _within(state_dict)]
    groups = [
        of
        for of in groups
        if isinstance(of.optimizer["state"], LazyOptimizerState) or of.has_tensors or of.have_any(tensors)
    ]
    before = [(one, dict(one), one.offered) for _, one in waiting]
    try:
        if waiting or groups:
            rows = list(saved)
            live = _live_tensors(state_dict, names or {}) if any(row.first for row in rows) else {}
            for path, one in waiting:
                fill(one, path, rows, containers or {}, live=live)
            for of in groups:
                of.as_saved(rows, containers or {})
        yield
    except BaseException:
        _put_back(before, groups)
        raise
    if not keep:
        _put_back(before, groups)


def fill(
    one: LazyOptimizerState,
    above: KeyPath,
    rows: Iterable[Saved],
    containers: Mapping[KeyPath, str],
    *,
    live: Mapping[str, Any] | None = None,
    says_none: bool = True,
) -> None:
    """Make the places of what was saved below the path `above`; those that are there stay, but for
    what is offered.

    Args:
        rows, containers: of the checkpoint.
        live: tensors by their key in the checkpoint, of which state may be a further name, such as
            parameters.
        says_none: give the flat form an entry for each parameter of which nothing was saved.
    """
    there, depth = flatten(dict(one), is_leaf=is_tensor), len(above)
    made = _StateMemory(live or {})
    all_rows = list(rows)
    rows = [row for row in all_rows if _is_below(row.path, above)]
    unsharded = _UnshardedState(all_rows, depth, rows, one.parameters)
    held = set[KeyPath]() if one.is_complete else _held(one, there.leaves)
    leaves = {} if one.is_complete else _of_classes(one, above, rows, containers, held)
    listed = _listed(above, all_rows) if one.has_own else None
    for row in rows:
        rest = row.path[depth:]
        if (one.is_complete and rest not in there.leaves) or any(rest[:i] in leaves for i in range(len(rest))):
            continue
        if row.shape is None and is_tensor(there.leaves.get(rest)) and is_flat_key(rest[0]):
            leaves[rest] = None  # a field of a group, such as a learning rate
            continue
        if any(rest[:i] in held for i in range(len(rest) + 1)):
            continue
        owner = _owner(rest, one.parameters)
        if owner is not None:
            leaves[rest] = made.place(row, one.parameters[owner], there.leaves.get(rest), unsharded.has(row, owner))
            none = f"state.{owner}"
            if rest != (none,) and (none,) in there.containers:  # it said that there was no state
                del there.containers[none,], one[none]
        elif listed is not None and rest and _is_own(str(rest[0]), listed) and rest not in there.leaves:
            leaves[rest] = made.place(row, torch.empty((), device="meta"), None)
    kinds = {
        path[depth:]: kind
        for path, kind in (() if one.is_complete else containers.items())
        if path[:depth] == above
        and _owner(path[depth:], one.parameters) is not None
        and path[depth : depth + 1] not in held
    }
    kept = {
        path: leaf
        for path, leaf in there.leaves.items()
        if path in leaves or is_field(path) or _owner(path, one.parameters) not in one.offered
    }
    filled = unflatten(kept | leaves, there.containers | kinds)
    owners = {_owner(path[:1], one.parameters) for path in (*kept, *leaves, *kinds) if not is_field(path)}
    if leaves and owners - {None} and is_flat(filled) and says_none:  # files of DCP have no empty dict to say it
        filled |= {f"state.{name}": {} for name in one.parameters if name not in owners}
    one.receive(filled)


def _held(one: LazyOptimizerState, leaves: Iterable[KeyPath]) -> set[KeyPath]:
    """Return the paths of what stays unchanged: state that is not merely offered, and fields of
    groups in the flat form."""
    fields = {(key,) for key in one if is_field((key,))}
    return fields | {path for path in leaves if _owner(path, one.parameters) not in one.offered}


def _of_classes(
    one: LazyOptimizerState,
    above: KeyPath,
    rows: Iterable[Saved],
    containers: Mapping[KeyPath, str],
    held: Container[KeyPath],
) -> dict[KeyPath, Any]:
    """Return state that was saved as the parts of tensor classes that can be made again, where no
    state exists yet."""
    parts: dict[KeyPath, list[Saved]] = {}
    for row in rows:
        if containers.get(row.path[:-1], "").startswith("tensor:") and row.shape is not None and row.read is not None:
            parts.setdefault(row.path[:-1], []).append(row)
    if not parts:
        return {}
    from reshard.live.tensor_classes import SavedPart, made_of_parts  # few optimizers have such

    out: dict[KeyPath, Any] = {}
    for path, own in parts.items():
        rest = path[len(above) :]
        owner = _owner(rest, one.parameters)
        if owner is None or rest in held:
            continue
        saved = {str(row.path[-1]): SavedPart(row.shape or (), row.dtype, row.read) for row in own if row.read}
        made = made_of_parts(containers[path].removeprefix("tensor:"), saved, one.parameters[owner])
        if made is not None:
            out[rest] = made
    return out


def _listed(above: KeyPath, rows: Iterable[Saved]) -> set[str]:
    """Return the parameters in saved groups beside the state at the path `above`, or of the flat
    form there."""
    front = (*above[:-1], "param_groups")
    named = [row for row in rows if row.read and "params" in row.path and _is_below(row.path, front)]
    below = [row.path[len(above) :] for row in rows if _is_below(row.path, above)]
    fields = {split_flat_key(str(path[0])).owner for path in below if path and is_field(path)}
    return fields | {str(row.read()) for row in named if row.read}


def _is_own(key: str, listed: Container[str]) -> bool:
    """Return whether a key below the state, or of the flat form, belongs to no parameter of the groups."""
    if not is_flat_key(key):
        return key not in listed
    section, _, name = key.partition(".")
    return section == "state" and name not in listed and owner_of(name, listed) is None


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a param group without the list of its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def listed_in(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return the parameters of all param groups, by the name or id that the groups list."""
    return [one for group in groups for one in group.get("params", ())]


def is_field(path: KeyPath) -> bool:
    """Return whether a path in an optimizer's state dict is a field of a group in the flat form."""
    return str(path[0]).startswith("param_groups.")


def _owner(rest: KeyPath, parameters: Mapping[str, Any]) -> str | None:
    """Return the parameter whose state is at a path: below its name, or at and below a key of the
    flat form."""
    first = str(rest[0]) if rest else ""
    if len(rest) >= 2 and first in parameters:
        return first
    if is_flat_key(first):
        name = first.partition(".")[2]
        says_none = first.startswith("state.") and name in parameters
        return name if says_none else owner_of(name, parameters)
    return None


class _UnshardedState:
    """Finds state that each rank has in full, so that it is not mistaken for a shard of the same shape."""

    def __init__(
        self, all_rows: Iterable[Saved], depth: int, rows: Iterable[Saved], parameters: Mapping[str, Any]
    ) -> None:
        owners = [(row, _owner(row.path[depth:], parameters)) for row in rows if row.on_mesh]
        self._on_mesh = {owner for _, owner in owners}
        """Parameters whose state was a DTensor."""
        self._in_parts = {owner for row, owner in owners if row.in_parts}
        """Parameters that were sharded, or had sharded state."""
        self._in_parts |= {str(row.path[-1]) for row in all_rows if row.in_parts and row.path[-1] in parameters}

    def has(self, row: Saved, owner: str) -> bool:
        """Return whether each rank had all of this state of a parameter.

        A state dict without any DTensor is a full one, from which this cannot be determined.
        """
        if row.in_parts or not self._on_mesh:
            return False
        return owner in self._in_parts or (not row.on_mesh and owner in self._on_mesh)


class _StateMemory:
    """Memory for state, shared by all keys under which one tensor was saved."""

    def __init__(self, live: Mapping[str, Any]) -> None:
        self._live, self._made = live, dict[str, Any]()

    def place(self, row: Saved, parameter: Any, there: Any, is_beside: bool = False) -> Any:
        """Return uninitialized memory for a tensor. It is placed like its parameter if the shapes
        are equal, unless the tensor was kept unsharded beside sharded ones."""
        if row.shape is None:  # a tensor can hold a number, but not None
            is_none = is_tensor(there) and row.read is not None and row.read() is None
            return row.value if there is None or is_none else there
        dtype, first = dtype_from_name(row.dtype), row.first or row.key
        is_scalar = not row.shape and str(row.path[-1]).rpartition(".")[2] in SCALARS
        is_like = row.shape == global_shape(parameter) and not (is_scalar or is_beside)
        like = parameter if is_like or _is_on_mesh(row, parameter) else None
        for known in (self._live.get(first), self._made.get(first)):
            if _fits(known, row.shape, dtype) and _is_laid_out_like(known, like, is_like=is_like):
                return self._made.setdefault(first, known)
        known = there if _fits(there, row.shape, dtype) else _place_like(like, row.shape, dtype, is_like=is_like)
        self._made.setdefault(first, known)
        return known


def _fits(known: Any, shape: Shape, dtype: torch.dtype) -> bool:
    return (
        is_tensor(known)
        and global_shape(known) == shape
        and dtype_of(known) == dtype
        and not LiveTensor("", known).is_meta
        and not any_lacks_memory(held_tensors(known))
    )


def _is_laid_out_like(known: Any, like: Any, *, is_like: bool) -> bool:
    """Return whether a tensor has the layout of a parameter or, if it is not `is_like` the
    parameter, that of a tensor on the parameter's mesh. Without a layout to follow: whether it is a
    full tensor."""
    if not (is_sharded(known) or is_sharded(like)):
        return like is None or like.device.type == "meta" or bool(known.device == like.device)
    if not (is_dtensor(known) and is_dtensor(like)) or known.device_mesh != like.device_mesh:
        return False
    return not is_like or known.placements == like.placements


def _live_tensors(state_dict: Any, names: Mapping[str, str]) -> dict[str, Any]:
    leaves = flatten(state_dict, is_leaf=is_tensor).leaves
    found = {key_of(path): value for path, value in leaves.items() if isinstance(value, torch.Tensor)}
    return {names.get(key, key): value.detach() for key, value in found.items() if not is_lazy(value)}


class _Groups(NamedTuple):
    """The groups of an optimizer of the nested form.

    Groups that were saved with a tensor, such as a learning rate, are many entries, one for each
    field; others are one object. A load fills what was saved. The setter finds groups by their
    parameters and fields by their names, so their saved form may take the place of the live one.
    """

    path: KeyPath
    """Path of the optimizer."""
    optimizer: dict[str, Any]
    live: Any
    """The groups before the load."""

    @property
    def front(self) -> KeyPath:
        return (*self.path, "param_groups")

    @property
    def has_tensors(self) -> bool:
        return any(map(is_tensor, leaves_of(self.live).values()))

    def have_any(self, keys: Iterable[str]) -> bool:
        """Return True if one of the keys is that of a field."""
        front = f"{key_of(self.front)}."
        return any(key.startswith(front) for key in keys)

    def as_saved(self, rows: Iterable[Saved], containers: Mapping[KeyPath, str]) -> None:
        """Convert the groups to the form of the saved ones, unless they have it."""
        front = self.front
        saved = {row.path[len(front) :]: row for row in rows if _is_below(row.path, front)}
        if not saved or not (self.has_tensors or any(row.shape is not None for row in saved.values())):
            return
        kinds = {path[len(front) :]: kind for path, kind in containers.items() if _is_below(path, front)}
        memory, none = _StateMemory({}), torch.empty((), device="meta")
        places = {path: memory.place(row, none, _usable(_at(self.live, path), row)) for path, row in saved.items()}
        self.optimizer["param_groups"] = unflatten(places, kinds)


def _at(value: Any, path: KeyPath) -> Any:
    """Return the value at a path of a nest. None if there is none."""
    for part in path:
        known = value if isinstance(value, Mapping) else dict(enumerate(value)) if type(value) in (list, tuple) else {}
        value = known.get(part)
    return value


def _usable(there: Any, row: Saved) -> Any:
    """Return the existing value, unless it is a tensor and an object was saved."""
    return None if row.shape is None and is_tensor(there) else there


def _within(
    nest: Any, is_one: Callable[[Any], bool] = lambda value: isinstance(value, dict) and is_nested(value)
) -> list[tuple[KeyPath, Any]]:
    """Return the values in a nest for which `is_one` is True, with their paths. Default: optimizers
    of the nested form."""
    return [(path, one) for path, one in leaves_of(nest, is_one).items() if is_one(one)]


def _put_back(
    before: Iterable[tuple[LazyOptimizerState, dict[Any, Any], Container[str]]], groups: Iterable[_Groups]
) -> None:
    for one, was, offered in before:
        one.clear()
        one.update(was)
        one.offered = offered
    for of in groups:
        of.optimizer["param_groups"] = of.live


def lost_state(state_dict: Any, saved: Iterable[Saved]) -> list[str]:
    """Return keys of optimizers' states that are empty, and not in the checkpoint: a load would
    silently leave them empty."""
    fresh = [(path, one["param_groups"]) for path, one in _within(state_dict) if one["state"] == {}]
    empty = [((*path, "state"), {str(n) for of in groups for n in of["params"] or ()}) for path, groups in fresh]
    rows = list(saved) if empty else []
    return [
        key_of(path)
        for path, names in empty
        if any(_is_below(row.path, path) and {*map(str, row.path[len(path) :])} & names for row in rows)
    ]


def _is_on_mesh(row: Saved, parameter: Any) -> bool:
    """Return whether state of another shape than its parameter's becomes a DTensor, with all
    elements on each rank. It does if it was one, or may have been one, because arithmetic with the
    parameter needs it."""
    if not is_dtensor(parameter) or row.on_mesh is False:
        return False
    return bool(row.shape) or (row.on_mesh is True and row.path[-1] != "step")  # which optimizers of torch keep apart


def _place_like(like: Any, shape: Shape, dtype: torch.dtype, *, is_like: bool) -> torch.Tensor:
    """Return uninitialized memory for a tensor of a parameter's state: placed like the parameter,
    or with all elements on each rank of its mesh. Without a parameter, an unsharded tensor."""
    if like is None or (type(like) is torch.Tensor and like.device.type == "meta"):
        return torch.empty(shape, dtype=dtype, device="cpu")
    if is_like:
        return remade_like(like, dtype)
    device = "cpu" if like.device.type == "meta" else like.device
    return dtensor_of(torch.empty(shape, dtype=dtype, device=device), like.device_mesh)


def _is_below(path: KeyPath, above: KeyPath) -> bool:
    return [*map(str, path[: len(above)])] == [*map(str, above)]


# The forms in which the state of an optimizer is saved: recognized by their keys, and the flat one
# written and read.
#
#     nested  {"state": {"w": {"exp_avg": ...}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}
#     by ids  {"state": {0: {"exp_avg": ...}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
#     flat    {"state.w.exp_avg": ..., "param_groups.w.lr": 0.1}
#
# Groups may be a list, or a dict by position, as which a checkpoint has its lists.


_FRONTS = ("state.", "param_groups.")


def is_nested(tree: Mapping[Any, Any]) -> bool:
    """Return whether this is one optimizer, by names or by ids: a dict of states, and groups that
    list parameters."""
    groups = tree.get("param_groups")
    if isinstance(groups, Mapping):
        groups = list(groups.values())
    return (
        isinstance(tree.get("state"), Mapping)
        and isinstance(groups, (list, tuple))
        and all(isinstance(group, Mapping) and "params" in group for group in groups)
    )


def with_names(saved: Mapping[Any, Any], live: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return a saved optimizer with the names of a live one, if it has no state yet and its groups
    list an equal number of parameters by id. Both are in the order in which the optimizer got them."""
    if not (is_nested(saved) and is_nested(live)) or saved["state"]:
        return saved
    groups, others = saved["param_groups"], live["param_groups"]
    if not (isinstance(groups, list) and isinstance(others, list)):
        return saved
    numbers, names = ([group["params"] or [] for group in one] for one in (groups, others))
    are_as_many = [*map(len, numbers)] == [*map(len, names)]
    if not are_as_many or {*map(type, chain(*numbers))} - {int}:
        return saved
    made = [{**group, "params": [*own]} for group, own in zip(groups, names)]
    return {**saved, "param_groups": made}


def is_flat_key(key: Any) -> bool:
    """Return whether the key is one of the flat form."""
    return isinstance(key, str) and key.startswith(_FRONTS)


def is_flat(keys: Iterable[Any]) -> bool:
    """Return whether these are all keys of an optimizer's flat form."""
    given = list(keys)
    return bool(given) and all(map(is_flat_key, given))


def form_of(tree: Any) -> str:
    """Return the form of an optimizer's state dict. Empty if it is not one."""
    if not isinstance(tree, Mapping):
        return ""
    if "param_groups" in tree:
        return "nested"
    return "flattened" if any(map(is_flat_key, tree)) else ""


def owner_of(name: str, known: Container[str]) -> str | None:
    """Return the parameter whose name, followed by a dot, `name` begins with. If there are several
    in `known`, the longest."""
    while "." in name:
        name = name.rpartition(".")[0]
        if name in known:
            return name
    return None


class FlatKey(NamedTuple):
    """A key of the flat form, taken apart."""

    section: str
    """"state" or "param_groups"."""
    owner: str
    """Name of the parameter."""
    path: tuple[str, ...]
    """The path within the parameter's state, or the field of its group."""


def split_flat_key(key: str, known: Container[str] = ()) -> FlatKey:
    """Split a key. The names of the parameter and of its state may both have dots, so the `known`
    names decide. For an unknown parameter, the last segment is the name of the state.

    Raises NormalizationError for a key that is not of the flat form.
    """
    section, _, rest = key.partition(".")
    if not is_flat_key(key) or "." not in rest:
        raise NormalizationError(
            f"{key!r} is not a key of a flat optimizer state dict: they read state.<fqn>.<name> or "
            "param_groups.<fqn>.<field>"
        )
    owner = owner_of(rest, known)
    if owner is None:
        owner = rest.rpartition(".")[0]
        return FlatKey(section, owner, (rest[len(owner) + 1 :],))
    return FlatKey(section, owner, tuple(rest[len(owner) + 1 :].split(".")))


def flatten_optimizer(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flat form of a nested state dict. Every parameter has the fields of its group, so
    that dicts of pipeline stages have no key in common. Empty groups are lost, and keys of nested
    state become text.

    Raises NormalizationError for state whose name has a dot, or equals another one.
    """
    flat: dict[str, Any] = {}
    last: tuple[Any, ...] = ()
    for name, values in state_dict["state"].items():
        if not isinstance(values, dict):  # of the optimizer as a whole
            flat[f"state.{name}"] = values
            continue
        nested = any(isinstance(value, dict) for value in values.values())
        inner = leaves_of(values, lambda item: not isinstance(item, dict) or not item) if nested else values
        own = {f"state.{name}.{'.'.join(map(str, at)) if nested else at}": leaf for at, leaf in inner.items()}
        if len(own) < len(inner):
            raise NormalizationError(
                f"two entries of the optimizer state of {name!r} have the same name in the flat form. Pass no "
                f"flatten_optimizer_state_dict, or rename one: {', '.join(map(repr, inner))}"
            )
        names = tuple(inner)
        dotted = [key for at in names for key in (at if nested else (at,)) if "." in str(key)] if names != last else []
        last = names  # as of nearly all
        if dotted:
            raise NormalizationError(
                f"the optimizer state {dotted[0]!r} of {name!r} has a dot in its name, which means nested state in the "
                "flat form. Pass no flatten_optimizer_state_dict, or rename it"
            )
        flat.update(own)
    for group in state_dict["param_groups"]:
        fields = [(f".{field}", value) for field, value in settings_of(group).items()]
        for name in group["params"]:
            front = f"param_groups.{name}"
            for tail, value in fields:
                flat[front + tail] = value
    return flat
