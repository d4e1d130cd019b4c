"""The inside of FSDP1's flat parameters, and ShardedTensors joined from the pickles of all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from planners.box import Box
from planners.layout import TensorSpec
from reshard.canonical.hints import Hints, find_scope
from reshard.canonical.views import narrow, unflatten
from reshard.dtypes import dtype_name
from reshard.errors import DamagedCheckpointError, NormalizationError
from reshard.formats.base import StoredChunk, StoredTensor
from reshard.formats.fsdp1 import is_sharded_tensor
from reshard.formats.torch_file import TorchFile, stored_tensor
from reshard.records import TensorRef

__all__ = ["FlatLayout", "hinted_params", "join_sharded", "layout_of"]

_ALIGNMENT_BYTES = 16
"""With use_orig_params, every parameter inside begins at a multiple of this."""
_FLAT = "_flat_param"


@dataclass(frozen=True)
class FlatLayout:
    """Where each parameter lies in a flat one: its first element, and its shape."""

    params: dict[str, tuple[int, tuple[int, ...]]]

    def cut(self, flat: StoredTensor) -> dict[str, StoredTensor]:
        """The parameters as tensors of their own."""
        return {
            name: unflatten(narrow(flat, 0, start, start + math.prod(shape)), shape, name)
            for name, (start, shape) in self.params.items()
        }


def layout_of(
    name: str | None, key: int | None, numel: int, itemsize: int, slack: int, flat_names: Sequence[str], hints: Hints
) -> FlatLayout:
    """What is in the flat parameter of this name or id, of `numel` elements of which fewer than `slack` are padding.

    Raises NormalizationError if no hint says it, or what it says has other sizes.
    """
    what = f"the flat parameter {name!r}" if key is None or name is not None else f"the flat parameter of id {key}"
    hinted = [found for scope in (name, key) if scope is not None and (found := hinted_params(scope, hints))]
    params = hinted[0] if hinted else None
    if params is None and name is not None:
        params = _by_prefix(name, flat_names, hints)
    if params is None:
        hints.missing(
            "param_shapes" if name is not None else "flat_params",
            f"{what} of FSDP1 does not say which parameters are in it",
            "{name: tuple(p.shape) for name, p in model.named_parameters()}"
            if name is not None
            else '{0: [("embed.weight", (100, 16)), ...], ...}',
        )
    for alignment in (1, max(_ALIGNMENT_BYTES // itemsize, 1)):
        at = 0
        inside: dict[str, tuple[int, tuple[int, ...]]] = {}
        for param, shape in params:
            start = -(-at // alignment) * alignment
            inside[param] = (start, shape)
            at = start + math.prod(shape)
        # padded until the parts of all ranks are equal
        if 0 <= numel - -(-at // alignment) * alignment < max(slack, 1) or at == numel:
            return FlatLayout(inside)
    held = sum(math.prod(shape) for _, shape in params)
    raise NormalizationError(f"{what} has {numel} elements, but the parameters that the hint puts into it have {held}")


def hinted_params(scope: str | int, hints: Hints) -> list[tuple[str, tuple[int, ...]]] | None:
    """Names and shapes that the hint `flat_params` gives for a flat parameter's name or id; None if it has neither."""
    value = find_scope(hints.mapping("flat_params"), scope)
    value = value.get("params") if isinstance(value, Mapping) and "params" in value else value
    if value is None:
        return None
    pairs = value.items() if isinstance(value, Mapping) else value
    try:
        return [(str(param), tuple(int(n) for n in shape)) for param, shape in pairs]
    except (TypeError, ValueError):
        raise NormalizationError(f"the hint 'flat_params' must list (name, shape), got {value!r:.80}") from None


def _by_prefix(name: str, flat_names: Sequence[str], hints: Hints) -> list[tuple[str, tuple[int, ...]]] | None:
    """The parameters of the module whose flat parameter this is, but not those of modules inside with their own."""
    shapes = hints.mapping("param_shapes")
    if not shapes:
        return None
    fronts = sorted((flat.removesuffix(_FLAT) for flat in flat_names), key=len, reverse=True)
    mine = name.removesuffix(_FLAT)
    out = []
    for param, shape in shapes.items():
        front = next((f for f in fronts if str(param).startswith(f)), None)
        if front == mine:
            out.append((str(param), tuple(int(n) for n in shape)))
    return out


def join_sharded(name: str, values: Mapping[int, Any], files: Mapping[int, TorchFile]) -> StoredTensor:
    """A ShardedTensor from the records in the files of all ranks.

    Raises DamagedCheckpointError if the records make no sense or disagree.
    """
    specs: set[tuple[tuple[int, ...], str]] = set()
    chunks: dict[Box, StoredChunk] = {}
    for rank, value in sorted(values.items()):
        label = files[rank].source.label
        if not is_sharded_tensor(value):
            raise DamagedCheckpointError(f"{label}: {name!r} is no ShardedTensor there, as it is on other ranks")
        try:
            locals_, metadata = value.state[0], value.state[1].fields
            shape = tuple(int(n) for n in metadata["size"])
            dtype = _dtype(metadata["tensor_properties"])
            specs.add((shape, dtype))
            for shard in locals_:
                ref, at = shard.fields["tensor"], shard.fields["metadata"].fields
                box = Box(at["shard_offsets"], at["shard_sizes"])
                _add_shard(chunks, name, box, shape, ref, files[rank], rank)
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            if isinstance(error, DamagedCheckpointError):
                raise
            raise DamagedCheckpointError(f"{label}: the ShardedTensor {name!r} makes no sense: {error}") from None
    if len(specs) != 1:
        raise DamagedCheckpointError(f"{name!r}: the ranks disagree about its shape or dtype: {sorted(specs)}")
    shape, dtype = specs.pop()
    return StoredTensor(TensorSpec(name, shape, dtype), tuple(chunks.values()))


def _dtype(properties: Any) -> str:
    value = properties.state[0] if isinstance(properties.state, tuple) else properties.fields["dtype"]
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{value!r:.40} is no dtype")
    return dtype_name(value)


def _add_shard(
    chunks: dict[Box, StoredChunk],
    name: str,
    box: Box,
    shape: tuple[int, ...],
    ref: Any,
    file: TorchFile,
    rank: int,
) -> None:
    if not isinstance(ref, TensorRef):
        raise TypeError("a shard without a tensor")
    if ref.size != box.sizes:
        raise DamagedCheckpointError(
            f"{file.source.label}: a shard of {name!r} has shape {list(ref.size)}, but its metadata says {box}"
        )
    inside = Box.full(shape) & box  # a flat parameter's last shard may be padded
    if inside is not None:
        whole = stored_tensor(name, file, ref, rank).chunks[0].shift(box.offsets)
        chunks[inside] = whole.crop(inside)
