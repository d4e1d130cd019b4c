"""A state dict taken apart: its tensors, each asked once for what it is, and all that lies between and beside them."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from planners.geometry.layout import TensorLayout, TensorSpec
from planners.geometry.layout_forms import Form
from reshard.state.frameworks.tensor_classes import is_sharded
from reshard.state.frameworks.tensor_subclasses import class_kinds, expanded
from reshard.state.per_rank import PerRank
from reshard.state.tensors import (
    device_of,
    dtype_of,
    form_of,
    forms_of,
    identity_of,
    is_ambiguous,
    is_tensor,
    local_tensors,
    spec_of,
)
from reshard.state.tree import Flat, KeyPath, flatten, key_of

__all__ = ["LiveState", "LiveTensor", "is_long", "is_single", "take_apart"]

_LONG = 1000
"""Numbers in a sequence."""


@dataclass(frozen=True)
class LiveTensor:
    """A tensor of a state dict, asked once: made where the state is taken apart, and handed on from there."""

    key: str
    value: Any
    """A Tensor, DTensor or ShardedTensor."""

    @cached_property
    def spec(self) -> TensorSpec:
        """See `spec_of`, which may raise LayoutError."""
        return spec_of(self.key, self.value)

    @cached_property
    def form(self) -> Form:
        """See `form_of`, which may raise LayoutError."""
        forms = self.forms
        return forms[0] if len(forms) == 1 else form_of(self.value, self.key)

    @cached_property
    def forms(self) -> tuple[Form, ...]:
        """See `forms_of`, which may raise LayoutError."""
        return forms_of(self.value, self.key)

    @property
    def is_ambiguous(self) -> bool:
        """See `is_ambiguous`."""
        return is_ambiguous(self.value)

    def settle(self, layout: TensorLayout, rank: int) -> None:
        """Have `form` be the one that all ranks found together: of those that are possible for this rank, the one by
        which `rank` holds what it holds in `layout`."""
        held = [box for part in layout.parts(rank) for box, _ in part.boxes()]
        for form in self.forms:
            if held == [box for part in form.parts(self.spec.shape, rank) for box, _ in part.boxes()]:
                self.__dict__["form"] = form

    @cached_property
    def local(self) -> tuple[torch.Tensor, ...]:
        """See `local_tensors`."""
        return local_tensors(self.value)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Type of its elements."""
        return dtype_of(self.value)

    @cached_property
    def device(self) -> torch.device:
        """See `device_of`."""
        return device_of(self.value)

    @cached_property
    def is_sharded(self) -> bool:
        """See `is_sharded`."""
        return is_sharded(self.value)

    @property
    def is_meta(self) -> bool:
        """Whether it has no memory yet."""
        return self.device.type == "meta"

    @property
    def is_elsewhere(self) -> bool:
        """Whether it is sharded and this rank holds no element: then nothing here tells what it is tied to."""
        return self.is_sharded and not any(local.numel() for local in self.local)


@dataclass(frozen=True)
class LiveState:
    """A state dict taken apart. What it holds is the caller's, and not copied."""

    root: Any
    """The state dict itself."""
    tensors: dict[str, LiveTensor]
    """By dotted key, tied ones included."""
    per_rank: dict[str, PerRank]
    objects: dict[str, Any]
    """Everything else."""
    paths: dict[str, KeyPath]
    """Of all of these."""
    containers: dict[KeyPath, str]
    """Tuples, empty containers, and classes of mappings and tensors, see `reshard.state.tree.Flat`."""
    tied: dict[str, str]
    """Keys whose tensor is the very same memory as that of an earlier key."""


def is_single(value: Any) -> bool:
    """Whether a value is one thing under its key, however it is made inside: a tensor or a `PerRank`."""
    return is_tensor(value) or isinstance(value, PerRank)


def is_long(path: KeyPath, value: Any) -> bool:
    """Whether a sequence of numbers is one value, such as the order of a sampler: a key for each costs too much."""
    kind = type(value)
    return kind in (list, tuple) and len(value) >= _LONG and all(type(item) in (int, float) for item in value)


def take_apart(
    state: Any,
    *,
    whole_at: Callable[[KeyPath, Any], bool] | None = None,
    select: Collection[str] | None = None,
) -> LiveState:
    """Take a nest apart.

    Args:
        whole_at: containers that are one value, by path and container.
        select: globs: only what has a key that one of them fits, with the containers around it.

    Raises KeyMismatchError for keys that collide; LayoutError for a tensor that is no plain array in memory.
    """
    flat = flatten(state, is_leaf=is_single, whole_at=whole_at)
    flat = replace(flat, leaves=expanded(flat.leaves), containers=flat.containers | class_kinds(flat.leaves))
    if select is not None:
        flat = _selected(flat, select)
    out = LiveState(state, {}, {}, {}, {key_of(path): path for path in flat.leaves}, flat.containers, {})
    firsts: dict[tuple[Any, ...], str] = {}
    for key, value in zip(out.paths, flat.leaves.values(), strict=True):
        if isinstance(value, PerRank):
            out.per_rank[key] = value
        elif is_tensor(value):
            tensor = out.tensors[key] = LiveTensor(key, value)
            tensor.spec  # noqa: B018  # refuses what is no plain array
            identity = identity_of(value)
            first = firsts.setdefault(identity, key) if identity is not None else key
            if first != key:
                out.tied[key] = first
        else:
            out.objects[key] = value
    return out


def _selected(flat: Flat, select: Collection[str]) -> Flat:
    """What the globs fit, with the containers around it."""
    fits = {path: any(fnmatch.fnmatchcase(key_of(path), glob) for glob in select) for path in flat.leaves}
    inner = {path[:i] for path in flat.leaves for i in range(len(path))}
    kept = {path[:i] for path, fit in fits.items() if fit for i in range(len(path))}
    containers = {
        path: kind
        for path, kind in flat.containers.items()
        if path in kept or (path not in inner and any(fnmatch.fnmatchcase(key_of(path), glob) for glob in select))
    }
    return replace(flat, leaves={path: leaf for path, leaf in flat.leaves.items() if fits[path]}, containers=containers)
