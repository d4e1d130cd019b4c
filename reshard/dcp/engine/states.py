"""State dicts as DCP sees them: flat keys, the regions that this rank holds, and torch's metadata."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict  # its rule for lists decides the keys on disk
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from planners.geometry.box import Box, Shape
from planners.geometry.layout import Form
from reshard.api.options import Wording
from reshard.errors import KeyMismatchError, LayoutError, also, near_key, option_error
from reshard.live.copy_streams import has_copy_streams, to_host
from reshard.live.dtypes import NO_MEMORY, PLAIN, lacks_memory
from reshard.live.optimizer_state import Saved, lost_state
from reshard.live.tensors import (
    OVERWRITTEN_BY,
    LiveTensor,
    global_shape,
    held_tensors,
    holder,
    is_sharded,
    is_tensor,
    this_rank,
)
from reshard.live.tree import leaves_of, map_leaves

__all__ = [
    "ENGINE_WORDING", "HeldRegion", "StateDict", "copied_like", "flat_state", "holds_checkpointable",
    "is_checkpointable", "is_placed", "on_the_cpu", "put_at", "put_state_back", "refuse_lost_state", "refuse_misfits",
    "regions_of", "shape_of", "unwrapped",
]  # fmt: skip


StateDict = dict[str, Any]


@dataclass(frozen=True)
class HeldRegion:
    """A box of a tensor that this rank holds, and its memory."""

    box: Box
    tensor: torch.Tensor

    def index(self, fqn: str) -> MetadataIndex:
        """DCP's index of this region."""
        return MetadataIndex(fqn, self.box.offsets)


def is_checkpointable(value: Any) -> bool:
    """Return True if a value declares, by torch's protocol, which regions of a tensor it holds.

    A DTensor counts if its local tensor does, such as a `LocalShardsWrapper`. reshard handles plain
    DTensors and ShardedTensors itself.
    """
    inner = value._local_tensor if isinstance(value, DTensor) else value
    return not is_sharded(inner) and hasattr(inner, "__create_chunk_list__") and hasattr(inner, "__get_tensor_shard__")


def is_placed(value: Any) -> bool:
    """Return True if attributes of a plain local tensor say which parts of a global tensor it
    holds. This is `CheckpointableTensor` of torch 2.15; reshard supports it with every torch
    version.
    """
    return isinstance(value, torch.Tensor) and all(hasattr(value, name) for name in _PLACED)


_PLACED = ("global_offsets", "global_shape", "local_offsets", "local_sizes")


def shape_of(value: Any) -> Shape:
    """Return the shape of the full tensor. This rank may hold only a part of it."""
    if is_placed(value):
        return tuple(value.global_shape)
    return tuple(value.size()) if is_checkpointable(value) else global_shape(value)


def copied_like(copied: torch.Tensor, value: Any) -> torch.Tensor:
    """Return the copy with the placement attributes of `value`, and with the rank that overwrites it, if any."""
    for name in (*_PLACED, OVERWRITTEN_BY):
        if hasattr(value, name) and (name == OVERWRITTEN_BY or is_placed(value)):
            setattr(copied, name, getattr(value, name))
    return copied


def holds_checkpointable(state: Any) -> bool:
    """Return True if a value in a nested state declares which regions it holds."""
    return any(is_placed(value) or is_checkpointable(value) for value in leaves_of(state).values())


def regions_of(fqn: str, tensor: Any) -> Iterator[HeldRegion]:
    """Yield the non-empty regions of a Tensor, DTensor, ShardedTensor, or checkpointable value on
    this rank.

    A strided shard has several. DCP's own answer, a single offset, would be wrong for it.
    """
    if is_checkpointable(tensor):
        for chunk in tensor.__create_chunk_list__():
            box = Box(chunk.offsets, chunk.sizes)
            if not box.is_empty:
                yield HeldRegion(box, tensor.__get_tensor_shard__(MetadataIndex(fqn, chunk.offsets)))
        return
    if is_placed(tensor):
        yield from _placed_regions(fqn, tensor)
        return
    live = LiveTensor(fqn, tensor)
    spec, form = live.spec, live.form
    rank = this_rank()
    for pieces, local in zip(_pieces(form, spec.shape, rank), live.local):
        for box, place in pieces:
            yield HeldRegion(box, local if place.sizes == local.shape else local[place.slices])


def _placed_regions(fqn: str, tensor: Any) -> Iterator[HeldRegion]:
    """Yield the regions that the attributes declare. Raises LayoutError if they do not fit each
    other, the tensor, or the global shape.
    """
    at, here, sizes = tensor.global_offsets, tensor.local_offsets, tensor.local_sizes
    whole, local = Box.full(tuple(tensor.global_shape)), Box.full(tuple(tensor.shape))
    if not len(at) == len(here) == len(sizes):
        raise LayoutError(f"{fqn!r} has {len(at)} global_offsets, {len(here)} local_offsets, {len(sizes)} local_sizes")
    for offsets, place, size in zip(at, here, sizes):
        if not len(offsets) == len(place) == len(size) == whole.ndim == local.ndim:
            raise LayoutError(f"{fqn!r}: {offsets}, {place}, {size}, and {whole.sizes} differ in the number of dims")
        there, mine = Box(offsets, size), Box(place, size)
        if not (whole.contains(there) and local.contains(mine)):
            ends = f"{there} in shape {whole.sizes}, or {mine} in the local shape {local.sizes}"
            raise LayoutError(f"{fqn!r}: {ends}, is not within")
        if not there.is_empty:
            yield HeldRegion(there, tensor.detach()[mine.slices])


@functools.lru_cache(maxsize=4096)
def _pieces(form: Form, shape: Shape, rank: int) -> tuple[tuple[tuple[Box, Box], ...], ...]:
    """Return the boxes of each local tensor of a rank, in global coordinates and in its own."""
    return tuple(tuple(part.boxes()) for part in form.parts(shape, rank))


def unwrapped(state_dict: Any) -> StateDict:
    """Return the state dict with every `Stateful` replaced by its `state_dict()`.

    They are called in sorted key order, because `state_dict()` may run collectives, and the
    insertion order may differ between ranks.
    """
    if not isinstance(state_dict, Mapping):
        words = f"the state must be a dict, such as {{'model': model}}, got {type(state_dict).__name__}"
        raise option_error(words, AttributeError)
    given = {key: value.state_dict() for key, value in sorted(state_dict.items(), key=_by_key) if _is_stateful(value)}
    return {key: given.get(key, value) for key, value in state_dict.items()}


def _by_key(entry: tuple[Any, Any]) -> str:
    return str(entry[0])


def _is_stateful(value: Any) -> TypeGuard[Stateful]:
    return isinstance(value, Stateful) and not is_tensor(value)


def put_state_back(state_dict: StateDict, loaded: Mapping[str, Any]) -> None:
    """Pass the loaded state to each `Stateful`, and store everything else in `state_dict`.

    Keys that only `loaded` has come from a planner whose target is to match the checkpoint. The
    order is that of `unwrapped`.
    """
    for key, value in sorted(loaded.items(), key=_by_key):
        original = state_dict.get(key)
        if _is_stateful(original):
            original.load_state_dict(value)
        else:
            state_dict[key] = value


def flat_state(state_dict: Mapping[str, Any]) -> tuple[StateDict, dict[str, Any]]:
    """Return the values by flat key, and the path of each key, by torch's own rule."""
    flat, paths = flatten_state_dict(dict(state_dict))
    return flat, paths


def put_at(root: Any, path: Sequence[str | int], value: Any) -> None:
    """Replace the value at the path of a flat key. Dict keys are strings in the path, even if they
    are ints in the dict.
    """
    here = root
    for part in path[:-1]:
        here = here[_key_of(here, part)]
    here[_key_of(here, path[-1])] = value


def _key_of(container: Any, part: str | int) -> Any:
    if isinstance(container, Mapping) and part not in container:
        return next((key for key in container if str(key) == part), part)
    return part


# Mismatches, with torch's phrases about keys, and with advice for callers of the drop-in API.


_ALLOW = "DefaultLoadPlanner(allow_partial_load=True) keeps values that are not in the checkpoint"
_MISSING = "Missing key in checkpoint state_dict"


MISFIT = also(KeyMismatchError, ValueError)
"""A key's value has another shape or kind than in the checkpoint."""

ENGINE_WORDING = Wording(
    f"missing from the checkpoint ({_MISSING})", "mismatched (Size mismatch, or another kind of value)", _ALLOW, MISFIT
)


def refuse_misfits(wanted: Mapping[str, Any], saved: Mapping[str, Any], *, partial: bool) -> None:
    """Raise KeyMismatchError with all keys of `wanted` that do not match torch's metadata of
    `saved`.

    `partial`: keys may be missing.
    """
    missing = [] if partial else [key for key in wanted if key not in saved]
    wrong = [text for key, value in wanted.items() if (text := _misfit(key, value, saved.get(key)))]
    if not missing and not wrong:
        return
    lines = ["the checkpoint does not match the state to load:"]
    others = saved.keys() - wanted.keys() if len(missing) < 20 else ()
    for key in missing:
        near = near_key(key, others)
        lines.append(f"  {_MISSING}: {key}" + (f"   (did you mean {near!r}?)" if near else ""))
    lines += [f"  {text}" for text in wrong]
    lines += [f"  ({_ALLOW})"] if missing else []
    lines += ["  (give these keys the saved shape and kind, or leave them out of the state)"] if wrong else []
    raise (MISFIT if wrong else KeyMismatchError)("\n".join(lines))


def _misfit(key: str, value: Any, entry: Any) -> str:
    is_object = not isinstance(entry, TensorStorageMetadata)
    if not (is_tensor(value) or is_checkpointable(value)):
        return "" if is_object else f"{key}: saved as a tensor, wanted as {type(value).__name__}"
    if is_object:
        return "" if entry is None else f"{key}: saved as an object, wanted as a tensor"
    shape = torch.Size(shape_of(value))
    return "" if entry.size == shape else f"Size mismatch between saved {entry.size} and current: {shape} for {key}"


def refuse_lost_state(state_dict: StateDict, saved: Iterable[Saved]) -> None:
    """Raise KeyMismatchError if the target has no place for the state of a whole optimizer."""
    for key in lost_state(state_dict, saved):
        raise KeyMismatchError(
            f"{key!r} is empty, but the checkpoint has state for it, which the load would drop. Get the dict from "
            "get_optimizer_state_dict of reshard.dcp.state_dict, which allocates the state, or load without it: "
            "DefaultLoadPlanner(allow_partial_load=True)"
        )


# Copies a state to the CPU, so that it can be saved while training continues.


def on_the_cpu(state: Any) -> Any:
    """Copy the state: every tensor to the CPU, and everything else that can change."""
    leaves = leaves_of(state)
    for path, value in leaves.items():
        if is_tensor(value) and any(one.is_meta or lacks_memory(one) for one in held_tensors(value)):
            raise LayoutError(f"tensor {'.'.join(map(str, path))!r} {NO_MEMORY}")
    plain = (value for value in map(holder, leaves.values()) if type(value) in PLAIN)
    found = {id(tensor): tensor for tensor in plain if has_copy_streams(tensor.device)}
    with torch.no_grad():
        on_host = dict(zip(found, to_host([tensor.detach() for tensor in found.values()])))
    return map_leaves(lambda _, value: _copy(value, on_host), state)


def _copy(value: Any, on_host: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(value, DTensor):
        copied = copy.copy(value)
        # not `to_local`: it makes a view, which not all kinds of local tensors support
        copied._local_tensor = _copy(value._local_tensor, on_host)
        return copied
    if is_sharded(value):  # copies of a ShardedTensor know their shards
        return value.detach().clone().cpu()
    if isinstance(value, torch.Tensor):
        there = on_host.get(id(value))
        return copied_like(value.detach().to("cpu", copy=True) if there is None else there, value)
    return copy.deepcopy(value)
