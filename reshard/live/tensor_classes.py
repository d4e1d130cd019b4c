"""Tensor classes that consist of plain tensors, such as quantized ones. Their inner tensors are saved and filled."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch

from reshard.errors import KeyMismatchError, LayoutError, option_error
from reshard.live.dtypes import dtype_from_name
from reshard.live.tensors import (
    dtensor_like,
    dtensor_of,
    holder,
    inner_names,
    is_dtensor,
    is_tensor,
    settled,
    with_local,
    wrappers,
)
from reshard.live.tree import class_name, map_leaves
from reshard.state import KeyPath, key_of

# {"w": Quantized(data, scale)}    ->    w.data, w.scale
#
# What the class says beside its tensors is code, and stays with the target: a load fills the inner tensors of a target
# of the same kind in place. Where an optimizer has no state yet, one is made by what was registered for the class.
#
# Inside a DTensor, a part of the local tensor's shape is sharded as the tensor is. For other parts, you register how
# they follow the tensor, see `register_tensor_class`. Then one rank's part is a part of the full one, which has the
# same elements under any sharding that leaves blocks complete.
#
#     [768, 512] in blocks of 256 elements, sharded by rows    ->    scales [768, 2], sharded by rows
#     [768, 64]  in blocks of 256 elements, sharded by rows    ->    scales [192], split where four rows end


Follows = Literal["flat", "dims", "whole", "values"]
Make = Callable[[Any, Mapping[str, torch.Tensor], torch.Tensor], torch.Tensor]


class _TensorClass(NamedTuple):
    parts: Mapping[str, Follows]
    make: Make | None = None


def _scaled(cls: Any, parts: Mapping[str, torch.Tensor], like: torch.Tensor, **more: Any) -> torch.Tensor:
    """torchao's float8 optimizer states."""
    made: torch.Tensor = cls(**parts, dtype=like.dtype, **more)
    return made


def _of_table(cls: Any, parts: Mapping[str, torch.Tensor], like: torch.Tensor, **more: Any) -> torch.Tensor:
    """torchao's 8-bit optimizer states."""
    return _scaled(cls, parts, like, signed=bool(parts["qmap"][0] < 0), **more)


def _packed(cls: Any, parts: Mapping[str, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """torchao's 4-bit optimizer states."""
    return _of_table(cls, parts, like, shape=tuple(like.shape))


_DIMS: dict[str, Follows] = dict.fromkeys(("qdata", "scale", "zero_point"), "dims")
_MX = "torchao.prototype.mx_formats"
registered_classes = {
    "torchao.optim.subclass_8bit.OptimState8bit": _TensorClass({"scale": "flat", "qmap": "whole"}, _of_table),
    "torchao.optim.subclass_4bit.OptimState4bit": _TensorClass(
        {"codes": "flat", "scale": "flat", "qmap": "whole"}, _packed
    ),
    "torchao.optim.subclass_fp8.OptimStateFp8": _TensorClass({"scale": "flat"}, _scaled),
    "torchao.quantization.Float8Tensor": _TensorClass(_DIMS),
    "torchao.quantization.Int8Tensor": _TensorClass(_DIMS),
    "torchao.quantization.IntxUnpackedToInt8Tensor": _TensorClass(_DIMS),
    f"{_MX}.mx_tensor.MXTensor": _TensorClass(_DIMS),
    f"{_MX}.nvfp4_tensor.NVFP4Tensor": _TensorClass(_DIMS | {"per_tensor_scale": "whole"}),
}


def register_tensor_class(
    cls: type[torch.Tensor] | str, parts: Mapping[str, Follows], make: Make | None = None
) -> None:
    """Register how the inner tensors of a tensor class relate to the tensor. This is needed for
    tensors inside DTensors, and for inner tensors of other shapes.

    Args:
        cls: the class, or its full name if it is not imported yet.
        parts: inner tensor -> how it relates to the tensor. Inner tensors that you leave out have
            the tensor's shape.

            - "flat": each of its elements belongs to an equal number of elements of the flattened
              tensor, in order, such as scales of blocks and packed codes.
            - "dims": each of its elements belongs to a block of the tensor. It has the same dims. A
              dim of size 1 applies to the full dim on all ranks.
            - "whole": it is the same on every rank, such as a lookup table.
            - "values": it has the values of the tensor, and the class only changes how they are
              used. It is saved and loaded as a plain tensor, without the name of the part. Other
              parts of such a class are computed from it. They are not saved, and
              `set_model_state_dict` sets them to None.
        make: a function that creates state for optimizers that have none yet. It takes the class,
            its inner tensors by name, and a plain local tensor with the wanted shape, dtype, and
            device. It returns a tensor of the class that uses these inner tensors. Those that are
            "whole" already have their values. The others are filled later.

    Raises OptionError for any other word in `parts`.
    """
    words = get_args(Follows)
    if unknown := [name for name, how in parts.items() if how not in words]:
        wrong = f"{unknown[0]!r} cannot be {parts[unknown[0]]!r}: it is one of {', '.join(words)}"
        raise option_error(wrong, KeyMismatchError)
    name = cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"
    if "values" not in parts.values():
        registered_classes[name] = _TensorClass(dict(parts), make)
    elif len(parts) == 1:
        wrappers[name] = next(iter(parts))
    else:
        wrong = f"{next(iter(parts))!r} of {name}: where a part is the values, name no other part"
        raise option_error(wrong, KeyMismatchError)


# Taking apart.


def expanded(leaves: Mapping[KeyPath, Any]) -> dict[KeyPath, Any]:
    """Return `leaves` with a tensor's inner tensors in its place, at its path followed by their
    attribute.

    Raises KeyMismatchError if something else has such a key; LayoutError for a part of a DTensor's
    local tensor that has no registered layout, or whose blocks the sharding splits.
    """
    leaves = {path: settled(value) for path, value in leaves.items()}
    made_of = {path: names for path, value in leaves.items() if (names := inner_names(value))}
    if not made_of:
        return leaves
    keys: set[str] = set()
    out: dict[KeyPath, Any] = {}
    for path, value in leaves.items():
        inner = {(*path, name): _placed_part(value, name, path) for name in made_of.get(path, ())}
        for place, part in (expanded(inner) if inner else {path: value}).items():
            if key_of(place) in keys:
                raise KeyMismatchError(f"the key {key_of(place)!r} is a part of a tensor, and something else as well")
            keys.add(key_of(place))
            out[place] = part
    return out


def _placed_part(value: torch.Tensor, name: str, path: KeyPath) -> torch.Tensor:
    """Return an inner tensor. That of a DTensor is sharded as the DTensor is."""
    local = holder(value)
    part: torch.Tensor = getattr(local, name)
    known = registered_classes.get(class_name(local))
    # scales that were put into the order of a kernel do not follow the tensor
    how = known.parts.get(name) if known is not None and not getattr(local, "is_swizzled_scales", False) else None
    of = f"the part {name!r} of {key_of(path)!r}, a {type(local).__name__} of local shape {list(local.shape)},"
    if how == "flat" and (part.numel() or is_dtensor(value)):
        block = _block_of(local.numel(), part.numel(), of)
        seen, whole = (_in_blocks(value.shape, shape, block, of) for shape in (local.shape, value.shape))
        return _placed(part, seen, value, whole)
    if not is_dtensor(value):
        return part
    if how == "whole":
        return _placed(part, part.shape, value, part.shape, uncut=range(value.dim()))
    if how == "dims" and part.dim() == local.dim():
        uncut = [dim for dim in range(part.dim()) if part.shape[dim] == 1 != local.shape[dim]]
        whole = [
            size if dim in uncut else value.shape[dim] // _block_of(local.shape[dim], size, of)
            for dim, size in enumerate(part.shape)
        ]
        return _placed(part, part.shape, value, whole, uncut)
    if part.shape != local.shape:
        raise LayoutError(
            f"{of} has shape {list(part.shape)} inside a DTensor, so its sharding is unknown. Declare it with "
            "reshard.register_tensor_class, pass its parts as DTensors, or pass plain values, made by "
            "reshard.dequantized(state)"
        )
    return dtensor_like(part.detach(), value)


def _block_of(numel: int, parts: int, of: str) -> int:
    """Return how many elements of the tensor each element of a part belongs to."""
    if parts and not numel % parts:
        return numel // parts
    raise LayoutError(
        f"{of} has {parts} elements for {numel} on this rank, so the block size is unknown. Pass plain values, "
        "made by reshard.dequantized(state), where a rank has no complete block"
    )


def _in_blocks(whole: Sequence[int], shape: Sequence[int], block: int, of: str) -> list[int]:
    """Return the shape of a part with one element per `block` elements of the flattened tensor,
    viewed so that it is sharded like the tensor: of `shape`, a shard of `whole`."""
    if not whole:
        return []
    # the last dim that whole blocks can end along
    dims = (d for d in reversed(range(len(whole))) if not whole[d] % _rows_of_blocks(whole, d, block))
    dim = next(dims, None)
    rows = _rows_of_blocks(whole, dim or 0, block)
    if dim is None or shape[dim] % rows or list(shape[dim + 1 :]) != list(whole[dim + 1 :]):
        raise LayoutError(
            f"{of} has one element for each {block} of the tensor, of shape {list(whole)}, and the sharding splits "
            f"blocks. It must shard dim {dim or 0} at multiples of {rows} and no later dim. Use another "
            "number of ranks, or save plain values with reshard.dequantized(state)"
        )
    per_row = rows * math.prod(whole[dim + 1 :]) // block
    return [*shape[:dim], shape[dim] // rows, *([per_row] if per_row > 1 else [])]


def _rows_of_blocks(whole: Sequence[int], dim: int, block: int) -> int:
    """Return the number of rows of a dim that are complete blocks."""
    return block // math.gcd(block, math.prod(whole[dim + 1 :]))


def _placed(
    part: torch.Tensor, shape: Sequence[int], outer: torch.Tensor, whole: Sequence[int], uncut: Collection[int] = ()
) -> torch.Tensor:
    """Return `part`, viewed with `shape`. For a DTensor, it is sharded as `outer` is, a part of one
    of shape `whole`, equal along the dims `uncut`."""
    seen = part.detach().view(tuple(shape))
    if not is_dtensor(outer):
        return seen
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if getattr(p, "dim", None) in uncut else p for p in outer.placements]
    stride = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    return dtensor_of(seen, outer.device_mesh, placements, shape=torch.Size(whole), stride=tuple(stride))


def dequantized(state: Any) -> Any:
    """Return the same nested state with plain tensors instead of quantized ones (classes with
    `dequantize`).

    DTensors keep their placements. Use it for other tools, or to save a state whose sharding splits
    quantization blocks.
    """

    def plain(path: KeyPath, leaf: Any) -> Any:
        del path
        leaf = settled(leaf)
        known = getattr(holder(leaf), "dequantize", None) if inner_names(leaf) else None
        if known is None:
            return leaf
        values = known().to(leaf.dtype)
        return with_local(leaf, values) if is_dtensor(leaf) else values

    return map_leaves(plain, state, is_tensor)


# Making one where there is none yet.


class SavedPart(NamedTuple):
    """An inner tensor as it was saved."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], torch.Tensor]


def is_imported(name: str) -> bool:
    """Return True if the program has imported the module of the class with this full name."""
    return name.rpartition(".")[0] in sys.modules


def made_of_parts(name: str, saved: Mapping[str, SavedPart], parameter: torch.Tensor) -> torch.Tensor | None:
    """Return uninitialized state of the class with this name, placed like its parameter. None if
    the class is not registered with a way to make it, or the program has not imported it.

    Raises LayoutError if the sharding splits a block.
    """
    module, _, attribute = name.rpartition(".")
    known, cls = registered_classes.get(name), getattr(sys.modules.get(module), attribute, None)
    if known is None or known.make is None or cls is None:
        return None
    local = holder(parameter).detach()
    device = "cpu" if local.is_meta else local.device
    parts: dict[str, torch.Tensor] = {}
    for part, (shape, dtype, read) in saved.items():
        how, of = known.parts.get(part), f"the part {part!r} of {attribute} for a parameter of {list(parameter.shape)}"
        if how == "whole":
            parts[part] = read().to(device)
            continue
        size: Sequence[int] = local.shape
        if how == "flat":
            block = _block_of(parameter.numel(), math.prod(shape), of)
            size = [math.prod(_in_blocks(parameter.shape, local.shape, block, of))]
        elif how == "dims":
            blocks = [_block_of(w, s, of) for w, s in zip(parameter.shape, shape, strict=True)]
            size = [1 if s == 1 else n // block for n, s, block in zip(local.shape, shape, blocks)]
        elif tuple(parameter.shape) != shape:
            return None
        parts[part] = torch.empty(tuple(size), dtype=dtype_from_name(dtype), device=device)
    made = known.make(cls, parts, torch.empty_like(local, device=device))
    return with_local(parameter, made) if is_dtensor(parameter) else made
