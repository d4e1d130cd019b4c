"""Which tensors share memory on this rank: by where they lie, never by what they are called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from reshard.state.tensors import identity_of, local_tensors

__all__ = ["all_apart", "apart", "overlapping", "overwritten"]


def all_apart(tensors: Sequence[Any], storages: Sequence[int] = ()) -> bool:
    """Whether no two of them lie in the same storage, and none in `storages`, the addresses of those of other tensors,
    in which no two lie either: then there is nothing to ask further."""
    found = [*storages, *_storages(tensors)]
    apart = set(found)
    return len(apart) == len(found) or (0 in apart and len(apart) == len(found) - found.count(0) + 1)


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
    if set(map(type, tensors)) <= {torch.Tensor, nn.Parameter}:
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


def _span(tensor: Any) -> tuple[int, int]:
    """The bytes from the first to behind the last of its elements."""
    spans = []
    for local in local_tensors(tensor):
        reach = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
        start = local.data_ptr()
        spans.append((start, start + (reach + 1) * local.element_size() if local.numel() else start))
    return min(start for start, _ in spans), max(end for _, end in spans)
