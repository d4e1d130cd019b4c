"""Which tensors share memory on this rank: by where they lie, never by what they are called."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from reshard.state.tensors import identity_of, local_tensors

__all__ = ["Spans", "all_apart", "apart", "overlapping", "overwritten", "spans_of"]

_PLAIN = frozenset([torch.Tensor, nn.Parameter])
_NBYTES = attrgetter("nbytes")


class Spans(NamedTuple):
    """The bytes from the first to behind the last element of each of many tensors."""

    starts: Sequence[int] = ()
    """Addresses; 0 where there is no memory, or nobody can say where."""
    sizes: Sequence[int] = ()


def spans_of(tensors: Sequence[Any], alike: int = 1) -> Spans | None:
    """Where plain tensors lie; None if some are sparse, which have several storages.

    Args:
        alike: so many runs of tensors with the same shapes and dtypes these are, one behind another.
    """
    try:
        starts = list(map(torch.Tensor.data_ptr, tensors))
        if all(map(torch.Tensor.is_contiguous, tensors)):
            return Spans(starts, list(map(_NBYTES, tensors[: len(tensors) // alike])) * alike)
        return Spans(starts, list(map(_reach, tensors)))
    except (RuntimeError, NotImplementedError):
        return None


def all_apart(tensors: Sequence[Any], spans: Spans) -> bool:
    """Whether no two of the tensors, and of others that lie in `spans`, share memory, as far as one look at each can
    tell: then there is nothing to ask further."""
    found = spans_of(tensors) if set(map(type, tensors)) <= _PLAIN else None
    if found is None:
        found = _spans_of_any(tensors)
    starts = np.array([*spans.starts, *found.starts], np.uint64)
    ends = starts + np.array([*spans.sizes, *found.sizes], np.uint64)
    held = (starts != 0) & (starts != ends)
    # before the start of each, in order, all those before it have ended
    return bool(np.all(np.sort(ends[held])[:-1] <= np.sort(starts[held])[1:]))


def overlapping(tensors: Sequence[Any]) -> list[list[int]]:
    """Positions of tensors whose memory overlaps, one list for each that hang together; nothing for the others."""
    storages = _storages(tensors)
    if len(set(storages)) == len(storages):
        return []
    by_storage: dict[int, list[int]] = {}
    for position, storage in enumerate(storages):
        if storage:
            by_storage.setdefault(storage, []).append(position)
    found: list[list[int]] = []
    for positions in by_storage.values():
        if len(positions) > 1:
            found += _hanging_together([(*_span(tensors[position]), position) for position in positions])
    return found


def apart(targets: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """The values, to be written into the targets one after another; those that lie in another's target as copies."""
    written, lying = set(_storages(targets)) - {0}, _storages(values)
    if written.isdisjoint(lying):
        return list(values)
    return [
        value.detach().clone()
        if value is not target and storage in written and identity_of(value) != identity_of(target)
        else value
        for target, value, storage in zip(targets, values, lying, strict=True)
    ]


def overwritten(targets: Sequence[Any], values: Sequence[Any]) -> list[int]:
    """Positions of values that would not be there any more, were each written into its target, one after another: the
    targets share memory, and the values differ. Plain tensors only; touches nothing."""
    found: list[int] = []
    for cluster in overlapping(targets):
        if not all(
            type(targets[i]) in (torch.Tensor, nn.Parameter) and type(values[i]) is torch.Tensor for i in cluster
        ):
            continue
        scratch = targets[cluster[0]].detach().untyped_storage().clone()
        views = []
        for i in cluster:
            target = targets[i].detach()
            view = torch.empty(0, dtype=target.dtype, device=target.device)
            views.append(view.set_(scratch, target.storage_offset(), target.shape, target.stride()))
            views[-1].copy_(values[i].reshape(target.shape))
        after = [torch.equal(view, values[i].to(view).reshape(view.shape)) for i, view in zip(cluster, views)]
        found += [i for i, same in zip(cluster, after) if not same]
    return found


def _hanging_together(spans: list[tuple[int, int, int]]) -> list[list[int]]:
    """Of (first byte, last byte + 1, position): the positions of spans that overlap."""
    found: list[list[int]] = []
    open_until = 0
    together: list[int] = []
    for start, end, position in sorted(span for span in spans if span[0] < span[1]):
        if start >= open_until:
            if len(together) > 1:
                found.append(together)
            together = []
        together.append(position)
        open_until = max(open_until, end)
    return [*found, together] if len(together) > 1 else found


def _storages(tensors: Sequence[Any]) -> list[int]:
    """`_storage` of each. Of plain dense tensors without a call of our own for each: there are many."""
    if set(map(type, tensors)) <= _PLAIN:
        try:
            return list(map(torch.UntypedStorage.data_ptr, map(torch.Tensor.untyped_storage, tensors)))
        except (RuntimeError, NotImplementedError):
            return list(map(_storage, tensors))  # some of them are sparse
    return list(map(_storage, tensors))


def _storage(tensor: Any) -> int:
    """Address of the storage that holds the tensor's elements; 0 where there are none, or none can be named."""
    if type(tensor) is not torch.Tensor and type(tensor) is not nn.Parameter:
        if is_lazy(tensor):
            return 0
        held = local_tensors(tensor)
        if not held or type(held[0]) not in (torch.Tensor, nn.Parameter):
            return 0
        tensor = held[0]
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # sparse tensors have several
        return 0


def _spans_of_any(tensors: Sequence[Any]) -> Spans:
    """Where they lie, whatever their kinds."""
    starts, sizes = [], []
    for tensor, storage in zip(tensors, _storages(tensors), strict=True):
        start, end = _span(tensor) if storage else (0, 0)
        starts.append(start)
        sizes.append(end - start)
    return Spans(starts, sizes)


def _span(tensor: Any) -> tuple[int, int]:
    """The bytes from the first to behind the last of its elements."""
    spans = [(local.data_ptr(), local.data_ptr() + _reach(local)) for local in local_tensors(tensor)]
    return min(start for start, _ in spans), max(end for _, end in spans)


def _reach(tensor: torch.Tensor) -> int:
    """Bytes from the first to behind the last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0
