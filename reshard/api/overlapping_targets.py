"""Targets that share memory: tied ones are filled once, and all other overlaps are refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from planners.geometry.layout import TensorLayout
from reshard.api.load_matching import KeyMatch
from reshard.errors import KeyMismatchError, LayoutError
from reshard.live.dtypes import as_array, is_resolved
from reshard.live.state import same_value
from reshard.live.tensors import LiveTensor

# Two keys of one memory can only be filled from two stored tensors if these are equal; two views
# that overlap otherwise would each overwrite a part of the other. Either would depend on which is
# written last.


_WORK = 10_000
"""The most steps of numpy's search for an element that two strided arrays share. Usually, a few are
enough."""


class _MemorySpan(NamedTuple):
    """The address range of a local tensor."""

    device: str
    start: int
    stop: int
    key: str
    local: torch.Tensor


def refuse_overlaps(tensors: Iterable[LiveTensor]) -> None:
    """Raises LayoutError for a target with two elements at one place, and for two that overlap.

    `tensors`: the targets, without those that are tied to another one.
    """
    extents: list[_MemorySpan] = []
    for tensor in tensors:
        for local in () if tensor.is_meta else tensor.local:
            if local.numel():
                reach = local.numel() if local.is_contiguous() else _reach(tensor.key, local)
                start = local.data_ptr()
                stop = start + reach * local.element_size()
                extents.append(_MemorySpan(str(local.device), start, stop, tensor.key, local))
    before: list[_MemorySpan] = []  # hardly ever more than one
    for extent in sorted(extents, key=lambda extent: extent[:3]):
        before = [near for near in before if near.device == extent.device and extent.start < near.stop]
        for near in before:
            if _share(near.local, extent.local):
                raise LayoutError(
                    f"the targets {near.key!r} and {extent.key!r} overlap in memory: what is written into one would "
                    "overwrite a part of the other. Leave one of them out, or give them memory of their own"
                )
        before.append(extent)


def _reach(key: str, local: torch.Tensor) -> int:
    """Return the range in memory from the first element to one past the last, in elements."""
    reach = 0  # of the elements along the dims of smaller strides
    for stride, size in sorted(zip(local.stride(), local.shape, strict=True)):
        if size > 1 and stride <= reach:
            raise LayoutError(
                f"the target {key!r} has several elements at one memory address (shape {list(local.shape)}, strides "
                f"{list(local.stride())}), as after expand(): fill a copy of it, made by .clone()"
            )
        reach += stride * (size - 1)
    return reach + 1


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors whose extents overlap share an element, as far as a cheap check shows."""
    if a.is_contiguous() and b.is_contiguous():
        return True
    if a.device.type != "cpu" or not (is_resolved(a) and is_resolved(b)):
        return False
    try:
        return bool(cast(Any, np.shares_memory)(as_array(a), as_array(b), max_work=_WORK))
    except np.exceptions.TooHardError:
        return False


def filled_once(match: KeyMatch, rank: int) -> dict[str, str]:
    """Return the matching tensors, without the keys whose memory another key already fills.

    Raises KeyMismatchError if two keys of one memory would be filled from stored tensors that
    differ.
    """
    names, targets, first = match.tensors, match.targets, dict[str, str]()
    tied = targets.tied_in_place
    for key in (*names, *(key for key in match.objects if key in targets.tensors)):
        other = first.setdefault(tied.get(key, key), key)
        if other != key and not _equal(match, other, key, rank):
            raise KeyMismatchError(
                f"{other!r} and {key!r} share memory, but {match.checkpoint.url} has different values for them: untie "
                "them before loading, or leave one of them out"
            )
    return {key: names[key] for key in first.values() if key in names}


def _equal(match: KeyMatch, first: str, second: str, rank: int) -> bool:
    """Return whether the saved values of two keys are equal, as far as this rank wants them."""
    checkpoint, target = match.checkpoint, match.targets.tensors[second]
    if second in match.objects:  # a number for a tensor
        return first in match.objects and same_value(match.objects[first], match.objects[second])
    both = (match.targets.tensors[first], target)
    places = [TensorLayout.of(tensor.spec, tensor.form).boxes(rank) for tensor in both]
    if places[0] != places[1]:
        return False
    one, other, names = match.tensors[first], match.tensors[second], checkpoint.aliases
    if names.get(one, one) == names.get(other, other):
        return True
    a, b = checkpoint[one], checkpoint[other]
    prints = checkpoint.fingerprints or {}
    if a.dtype == b.dtype and one in prints and prints.get(one) == prints.get(other):
        return True
    from reshard.stored.streaming import windows

    for region in places[1]:
        for window in windows(region.sizes, max(a.dtype.itemsize, target.dtype.itemsize)):
            place = (*window.shift(region.offsets).slices, ...)
            x, y = (as_array(tensor[place].to(target.dtype)) for tensor in (a, b))
            if x.tobytes() != y.tobytes():
                return False
    return True
