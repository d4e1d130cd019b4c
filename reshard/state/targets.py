"""A live state dict taken apart, so that values can be put into it in place."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import increment_version

from reshard.errors import FormatError, LayoutError
from reshard.state.container_types import rebuilt
from reshard.state.frameworks.tensor_classes import dtensor_like, is_dtensor
from reshard.state.frameworks.tensor_subclasses import holder
from reshard.state.live_state import LiveState, is_single, take_apart
from reshard.state.tensors import local_tensors
from reshard.state.tree import IntKey, KeyPath, flatten, key_of

__all__ = ["Targets"]

_EXTRA_STATE = "_extra_state"
"""The key under which torch puts what `Module.get_extra_state` gives."""


@dataclass(frozen=True)
class Targets(LiveState):
    """What a load may fill. `objects` has the single values beside tensors; other values are parts of `units`."""

    units: dict[str, KeyPath] = field(default_factory=dict)
    """Containers without any tensor, which are replaced whole: their contents may have changed since."""
    replaced: dict[str, torch.dtype] = field(default_factory=dict)
    """Tensors that are to be replaced by ones of another dtype."""
    resized: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Of these, the extra state of modules that was saved with another shape: it takes that."""
    _made: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    _new: dict[str, Any] = field(default_factory=dict)
    """What takes the places of tensors of which `_made` has the new memory."""

    @classmethod
    def of(
        cls, state: dict[str, Any], *, saved: Mapping[str, Any] | None = None, entry_by_entry: bool = False
    ) -> Targets:
        """Take `state` apart; nothing is changed. Raises FormatError if it is no dict or list.

        Args:
            saved: objects of the checkpoint by key. A list, tuple or dict of plain values whose very key is among them
                was saved as one, and is one; so is a list or tuple with tensors, if one of as many items was saved.
            entry_by_entry: no dict is replaced whole: each of its entries is matched for itself.
        """
        if not isinstance(state, MutableMapping | list):
            raise FormatError(f"what is loaded into must be a dict (or a list), got {_in_words(state)}")
        live = take_apart(state, whole_at=_saved_whole(saved or {}))
        full: set[KeyPath] = {()}  # containers that are not replaced whole: those that hold a tensor somewhere
        for key, path in live.paths.items():
            if key not in live.objects:
                full.update(path[:i] for i in range(len(path)))
            elif entry_by_entry:  # and dicts, and what holds a dict
                full.update(path[:i] for i in range(_depth_of_dicts(path)))
        if entry_by_entry:
            empty = [path for path, kind in live.containers.items() if kind.partition(":")[0] == "dict"]
            full.update(path[:i] for path in empty for i in range(len(path) + 1))
        above = {key: _outermost(live.paths[key][:-1], full) for key in live.objects}
        objects = {key: value for key, value in live.objects.items() if above[key] is None}
        containers = [path for path, kind in live.containers.items() if not kind.startswith("tensor:")]
        units = {key_of(p): p for p in (*above.values(), *(_outermost(p, full) for p in containers)) if p}
        paths = {key: path for key, path in live.paths.items() if above.get(key) is None} | units
        return cls(state, live.tensors, live.per_rank, objects, paths, live.containers, live.tied, units)

    def live(self, key: str, levels: int = 0) -> Any:
        """What is under `key` now, or so many levels above that."""
        here: Any = self.root
        path = self.paths[key]
        for part in path[: len(path) - levels]:
            here = _inside(here, part)
        return here

    def writable(self, key: str) -> tuple[torch.Tensor, ...]:
        """The local tensors to write into: the live ones, or new ones for meta tensors and changed dtypes, which
        `put_new` puts in their places."""
        tensor = self.tensors[key]
        dtype = self.replaced.get(key)
        if not tensor.is_meta and dtype is None:
            return local_tensors(tensor.value)  # asked again: it may have been given other memory
        if key not in self._made:
            device = torch.device("cpu") if tensor.is_meta else tensor.device
            fresh = tuple(
                torch.empty(self.resized.get(key, local.shape), dtype=dtype or local.dtype, device=device)
                for local in tensor.local
            )
            self._replace(key, fresh)
        return self._made[key]

    def _replace(self, key: str, fresh: tuple[torch.Tensor, ...]) -> None:
        """Make what takes the place of a tensor, and of those that are tied to it and not replaced for themselves."""
        tied = self.tied_in_place
        first = tied.get(key, key)
        made: dict[int, Any] = {}
        for other in (first, *(k for k, its in tied.items() if its == first)) if tied else (key,):
            tensor = self.tensors[other].value
            if id(tensor) not in made:
                made[id(tensor)] = _like(tensor, fresh, other)
            self._made[other] = fresh
            self._new[other] = made[id(tensor)]

    def put_new(self) -> None:
        """Put new tensors in their places: only when they are filled, since until then their memory holds anything."""
        self.assign(self._new)
        self._new.clear()

    def is_opaque(self, key: str) -> bool:
        """Whether a tensor is of the extra state of a module, whose shape is nobody's business but the module's."""
        parts = [str(part) for part in self.paths[key]]
        return not self.tensors[key].is_sharded and any(part.rpartition(".")[2] == _EXTRA_STATE for part in parts)

    @property
    def tied_in_place(self) -> dict[str, str]:
        """`tied` without those that are replaced by tensors of their own."""
        return {key: first for key, first in self.tied.items() if not {key, first} & set(self.replaced)}

    def check_places(self, keys: Iterable[str]) -> None:
        """Raises FormatError if a value that is to be replaced is in something that cannot be changed.

        Values of `keys`, and tensors on the meta device or of another dtype.
        """
        fresh = [key for key, tensor in self.tensors.items() if tensor.is_meta]
        for key in (*keys, *fresh, *self.replaced):
            here: Any = self.root
            for part in self.paths[key][:-1]:
                if isinstance(here, Mapping) and not isinstance(here, MutableMapping):
                    break
                here = _inside(here, part)
            if isinstance(here, Mapping) and not isinstance(here, MutableMapping):
                raise FormatError(
                    f"the value under {key!r} cannot be replaced: a {type(here).__name__} cannot be changed"
                )

    def tell_autograd(self, keys: Iterable[str]) -> None:
        """Say that live tensors were written to, past torch: a graph that needs their old values must not be run."""
        for key in keys:
            tensor = self.tensors[key]
            outer = (tensor.value,) if is_dtensor(tensor.value) else ()
            for one in (*outer, *tensor.local):
                if not one.is_inference():
                    increment_version(one)

    def assign(self, values: Mapping[str, Any]) -> None:
        """Put values in the places of their keys."""
        for key, value in values.items():
            _put(self.root, self.paths[key], value)


def _outermost(path: KeyPath, full: Collection[KeyPath]) -> KeyPath | None:
    """The outermost container on `path`, itself included, that is replaced whole."""
    return next((path[:i] for i in range(1, len(path) + 1) if path[:i] not in full), None)


def _saved_whole(saved: Mapping[str, Any]) -> Callable[[KeyPath, Any], bool]:
    """Whether the container at a path was saved as one object, and can be replaced by it."""

    def whole(path: KeyPath, value: Any) -> bool:
        key = key_of(path)
        if not path or key not in saved:
            return False
        if not any(map(is_single, flatten(value, is_leaf=is_single).leaves.values())):
            return True
        found = saved[key]
        return not isinstance(value, Mapping) and type(found) in (list, tuple) and len(found) == len(value)

    return whole


def _depth_of_dicts(path: KeyPath) -> int:
    """How many containers on the way to `path`, from the top, are dicts or lead to one."""
    return max((i + 1 for i, part in enumerate(path) if type(part) is not int), default=0)


def _in_words(value: Any) -> str:
    """What was given in place of a state, and what was meant."""
    kind = type(value).__name__
    if isinstance(value, (str, os.PathLike)):
        return f"{kind}: it is reshard.load(state, path) that reads checkpoints"
    return kind


def _like(tensor: Any, fresh: tuple[torch.Tensor, ...], key: str) -> Any:
    """`fresh` as the same kind of tensor as `tensor`."""
    if is_dtensor(tensor):
        if not fresh:
            return tensor
        return dtensor_like(fresh[0], tensor)
    if isinstance(tensor, torch.nn.Parameter) and fresh[0].dtype.is_floating_point:
        return torch.nn.Parameter(fresh[0], requires_grad=tensor.requires_grad)
    if not isinstance(tensor, torch.Tensor):
        raise LayoutError(
            f"{key!r} is a {type(tensor).__name__}, which cannot be replaced: give it memory and its dtype"
        )
    return fresh[0]


def _put(root: Any, path: KeyPath, value: Any) -> None:
    """Replace what is at `path`. Tuples on the way are made anew in their own containers."""
    chain = [root]
    for part in path[:-1]:
        chain.append(_inside(chain[-1], part))
    for container, part in zip(reversed(chain), reversed(path)):
        if isinstance(container, torch.Tensor):  # a subclass, of which this is an inner tensor
            setattr(holder(container), str(part), holder(value))
            return
        if not isinstance(container, tuple):
            container[_index(part)] = value
            return
        items = list(container)
        items[_index(part)] = value
        value = rebuilt(container, items)


def _inside(here: Any, part: str | int | IntKey) -> Any:
    """What a container, or a tensor that is made of others, has at one part of a path."""
    return getattr(holder(here), str(part)) if isinstance(here, torch.Tensor) else here[_index(part)]


def _index(part: str | int | IntKey) -> Any:
    return part.value if isinstance(part, IntKey) else part
