"""Nested containers as flat leaves with typed key paths, and back; and plain objects as JSON data, and back.

A path says how a leaf is reached: text for a string key of a dict, `IntKey` for an int key, a plain int for a position
in a list or tuple. That, and which containers are tuples or empty, is all it takes to build the same nest again:

    {"a.b": [x, {5: y}]}   ->   ("a.b", 0): x,  ("a.b", 1, IntKey(5)): y
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from reshard.errors import FormatError, KeyMismatchError
from reshard.state.dtypes import dtype_from_name, dtype_name

__all__ = [
    "Flat",
    "IntKey",
    "KeyPath",
    "check_text",
    "decode_plain",
    "encode_plain",
    "flatten",
    "key_of",
    "path_from_json",
    "path_to_json",
    "unflatten",
]


@dataclass(frozen=True, slots=True)
class IntKey:
    """An int that is a key of a dict, as opposed to a position in a sequence."""

    value: int

    def __str__(self) -> str:
        return str(self.value)


KeyPath = tuple[str | int | IntKey, ...]


@dataclass(frozen=True)
class Flat:
    """A nest taken apart. `unflatten(flat.leaves, flat.containers)` builds it again."""

    leaves: dict[KeyPath, Any]
    """Every value that is no container, by path, in order."""
    containers: dict[KeyPath, str] = field(default_factory=dict)
    """"tuple" for each tuple; "dict" and "list" for the empty ones, which no leaf would tell of."""


def key_of(path: KeyPath) -> str:
    """The dotted key of a path, as torch.distributed.checkpoint writes it: `"a.b.0"`. Two paths can share one."""
    return ".".join(map(str, path))


def flatten(
    tree: Any,
    *,
    is_leaf: Callable[[Any], bool] | None = None,
    whole_at: Callable[[KeyPath, Any], bool] | None = None,
) -> Flat:
    """Take dicts (with str or int keys), lists and tuples apart; all else is a leaf, also a dict with other keys.

    Args:
        is_leaf: what else is not taken apart.
        whole_at: the same for a container, by its path as well.

    Raises:
        KeyMismatchError: a container that contains itself or is nested too deeply, or two leaves whose dotted keys are
            the same.
    """
    flat = Flat({})
    stops = _Stops(is_leaf or (lambda value: False), whole_at or (lambda path, value: False))
    try:
        _flatten(tree, (), flat, stops, set())
    except RecursionError:
        raise KeyMismatchError("the state is nested too deeply to be taken apart") from None
    seen: dict[str, KeyPath] = {}
    for path in flat.leaves:
        other = seen.setdefault(key_of(path), path)
        if other != path:
            raise KeyMismatchError(
                f"two values of the state have the same key {key_of(path)!r}: {_show(other)} and {_show(path)}; "
                "rename one of them"
            )
    return flat


def _show(path: KeyPath) -> str:
    return "".join(f"[{p.value if isinstance(p, IntKey) else p!r}]" for p in path)


class _Stops(NamedTuple):
    """Where the taking apart ends, besides at what is no container."""

    is_leaf: Callable[[Any], bool]
    whole_at: Callable[[KeyPath, Any], bool]


def _flatten(value: Any, path: KeyPath, flat: Flat, stops: _Stops, above: set[int]) -> None:
    items = None if stops.is_leaf(value) else _items(value)
    if items is None or stops.whole_at(path, value):
        flat.leaves[path] = value
        return
    kind, pairs = items
    if id(value) in above:
        raise KeyMismatchError(f"the container at {_show(path) or 'the top'} contains itself")
    if kind == "tuple" or (not pairs and (path or kind == "list")):
        flat.containers[path] = kind
    above.add(id(value))
    for key, item in pairs:
        _flatten(item, (*path, key), flat, stops, above)
    above.discard(id(value))


def _items(value: Any) -> tuple[str, list[tuple[str | int | IntKey, Any]]] | None:
    """Kind and items of a container; None for a leaf."""
    if isinstance(value, Mapping):
        if not all(isinstance(k, str) or type(k) is int for k in value):
            return None
        return "dict", [(k if isinstance(k, str) else IntKey(k), v) for k, v in value.items()]
    if type(value) is tuple or type(value) is list:
        return ("tuple" if type(value) is tuple else "list"), list(enumerate(value))
    return None  # torch.Size and named tuples are values, not containers


def unflatten(leaves: Mapping[KeyPath, Any], containers: Mapping[KeyPath, str] | None = None) -> Any:
    """The nest that `flatten` took apart. A sequence of which only some positions are given becomes shorter, in order.

    Raises KeyMismatchError if one path leads through another's leaf.
    """
    kinds = containers or {}
    if () in leaves:
        if len(leaves) > 1:
            raise KeyMismatchError("the top of a nest cannot be a value and a container at once")
        return leaves[()]
    root: dict[Any, Any] = {}
    for path, value in leaves.items():
        parent = _descend(root, path[:-1])
        if path[-1] in parent:
            raise KeyMismatchError(f"{_show(path)} is a value and a container at once, or is given twice")
        parent[path[-1]] = _Leaf(value)
    for path in kinds:
        _descend(root, path)
    return _build(root, (), kinds)


class _Leaf:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _descend(root: dict[Any, Any], path: KeyPath) -> dict[Any, Any]:
    """The container at `path`, made on the way down."""
    node = root
    for i, part in enumerate(path):
        node = node.setdefault(part, {})
        if isinstance(node, _Leaf):
            raise KeyMismatchError(f"{_show(path[: i + 1])} is a value and a container at once")
    return node


def _build(node: Any, path: KeyPath, kinds: Mapping[KeyPath, str]) -> Any:
    if isinstance(node, _Leaf):
        return node.value
    kind = kinds.get(path, "list" if node and all(type(k) is int for k in node) else "dict")
    if kind == "dict":
        return {k.value if isinstance(k, IntKey) else k: _build(v, (*path, k), kinds) for k, v in node.items()}
    values = [_build(node[k], (*path, k), kinds) for k in sorted(node)]
    return tuple(values) if kind == "tuple" else values


def path_to_json(path: KeyPath) -> list[Any]:
    """A path as JSON data: text, ints, and `{"int": 5}` for int keys. Inverse of `path_from_json`."""
    return [{"int": part.value} if isinstance(part, IntKey) else part for part in path]


def path_from_json(data: Sequence[Any]) -> KeyPath:
    """Inverse of `path_to_json`. Raises FormatError for anything else."""
    parts: list[str | int | IntKey] = []
    for part in data:
        if isinstance(part, str) or type(part) is int:
            parts.append(part)
        elif isinstance(part, dict) and set(part) == {"int"} and type(part["int"]) is int:
            parts.append(IntKey(part["int"]))
        else:
            raise FormatError(f"{part!r} is no part of a key path: text, an int, or {{'int': n}}")
    return tuple(parts)


# Plain objects. JSON has text keys, one kind of sequence and finite floats only, so everything else is written as an
# object with the single key "$type": a dict that has such a key itself is written as pairs.


def encode_plain(value: Any, *, tensor_bytes: int = 0) -> Any:
    """Plain Python data as JSON data, losslessly: None, bool, int, float (also nan, inf, -0.0), complex, text, bytes,
    io.BytesIO, list, tuple, set, frozenset, dict (any plain keys), torch.Size, torch.dtype, numpy numbers and arrays.

    Inverse of `decode_plain`.

    Args:
        tensor_bytes: plain tensors of together at most so many bytes are taken for plain data, too.

    Raises FormatError, naming the type, for anything else: only plain data is ever stored.
    """
    return _encode(value, set(), _Tensors(tensor_bytes, tensor_bytes))


@dataclass
class _Tensors:
    """How many bytes of tensors may be among plain data, and may yet come."""

    limit_bytes: int
    left_bytes: int

    def encode(self, tensor: torch.Tensor) -> dict[str, Any]:
        if not self.limit_bytes:
            raise FormatError(
                "a Tensor is where only plain data can be: in a set, or in a dict whose keys are neither text nor "
                "ints; put it into a dict with text keys"
            )
        if hasattr(tensor, "__tensor_flatten__") or tensor.layout != torch.strided or tensor.device.type == "meta":
            raise FormatError(f"a {type(tensor).__name__} on {tensor.device} is no plain tensor")
        self.left_bytes -= tensor.numel() * tensor.element_size()
        if self.left_bytes < 0:
            raise FormatError(
                f"a tensor of shape {list(tensor.shape)} is too large to go among plain data ({self.limit_bytes} bytes "
                "in all); give it a key and a PerRank of its own"
            )
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        return {"$tensor": [dtype_name(tensor.dtype), list(tensor.shape), base64.b64encode(data).decode()]}


def _decode_tensor(dtype: str, shape: list[int], data: str) -> torch.Tensor:
    kind, raw = dtype_from_name(dtype), base64.b64decode(data, validate=True)
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"{shape} is no shape")
    if len(raw) != math.prod(shape) * kind.itemsize:
        raise ValueError(f"{len(raw)} bytes are no tensor of shape {shape} and dtype {dtype}")
    if not raw:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(kind).reshape(shape)


def _encode(value: Any, above: set[int], tensors: _Tensors) -> Any:
    if value is None or type(value) in (bool, int):
        return value
    if type(value) is str:
        return check_text(value)
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    simple = _encode_simple(value)
    if simple is not None:
        return simple
    if id(value) in above:
        raise FormatError("an object that contains itself cannot be stored as plain data")
    above = above | {id(value)}
    if type(value) is list:
        return [_encode(v, above, tensors) for v in value]
    if type(value) is tuple:
        return {"$tuple": [_encode(v, above, tensors) for v in value]}
    if type(value) in (set, frozenset):
        return {f"${type(value).__name__}": sorted((_encode(v, above, tensors) for v in value), key=repr)}
    if isinstance(value, Mapping):
        if all(type(k) is str for k in value) and not any(k.startswith("$") for k in value):
            return {check_text(k): _encode(v, above, tensors) for k, v in value.items()}
        return {"$dict": [[_encode(k, above, tensors), _encode(v, above, tensors)] for k, v in value.items()]}
    if isinstance(value, torch.Tensor):
        return tensors.encode(value)
    fix = (
        "give its state_dict() instead, and what is loaded to its load_state_dict()"
        if callable(getattr(value, "state_dict", None)) and not isinstance(value, type)
        else "turn it into numbers, text, lists and dicts first"
    )
    raise FormatError(
        f"an object of type {type(value).__module__}.{type(value).__qualname__} is no plain data and cannot be stored; "
        f"{fix}"
    )


def check_text(text: str) -> str:
    """The text itself. Raises FormatError if it cannot be stored, such as a file's name that is no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise FormatError(f"the text {text[:80]!r} is not valid Unicode and cannot be stored") from None
    return text


def _encode_simple(value: Any) -> dict[str, Any] | None:
    if type(value) is complex:
        return {"$complex": [encode_plain(value.real), encode_plain(value.imag)]}
    if type(value) in (bytes, bytearray):
        return {f"${type(value).__name__}": base64.b64encode(value).decode()}
    if type(value) is io.BytesIO:  # what older modules give as their extra state
        return {"$bytesio": base64.b64encode(value.getvalue()).decode()}
    if isinstance(value, torch.Size):
        return {"$size": list(value)}
    if isinstance(value, torch.dtype):
        return {"$dtype": dtype_name(value)}
    if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biufc":
        tag, shape = ("$array", [list(value.shape)]) if isinstance(value, np.ndarray) else ("$number", [])
        return {tag: [value.dtype.str, base64.b64encode(value.tobytes()).decode(), *shape]}
    return None


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$complex": lambda v: complex(decode_plain(v[0]), decode_plain(v[1])),
    "$bytes": lambda v: base64.b64decode(v, validate=True),
    "$bytearray": lambda v: bytearray(base64.b64decode(v, validate=True)),
    "$bytesio": lambda v: io.BytesIO(base64.b64decode(v, validate=True)),
    "$size": torch.Size,
    "$dtype": dtype_from_name,
    "$number": lambda v: np.frombuffer(base64.b64decode(v[1], validate=True), _plain_dtype(v[0]))[0],
    "$array": lambda v: np.frombuffer(bytearray(base64.b64decode(v[1], validate=True)), _plain_dtype(v[0])).reshape(
        v[2]
    ),
    "$tensor": lambda v: _decode_tensor(*v),
    "$tuple": lambda v: tuple(map(decode_plain, v)),
    "$set": lambda v: set(map(decode_plain, v)),
    "$frozenset": lambda v: frozenset(map(decode_plain, v)),
    "$dict": lambda v: {decode_plain(k): decode_plain(x) for k, x in v},
}


def _plain_dtype(text: str) -> np.dtype[Any]:
    dtype = np.dtype(str(text))
    if dtype.kind not in "biufc":
        raise FormatError(f"{text!r} is no dtype of a plain number")
    return dtype


def decode_plain(data: Any) -> Any:
    """Inverse of `encode_plain`. Raises FormatError for data that it did not write."""
    if isinstance(data, list):
        return [decode_plain(v) for v in data]
    if not isinstance(data, dict):
        return data
    tag = next(iter(data), "")
    if not isinstance(tag, str) or not tag.startswith("$"):
        return {k: decode_plain(v) for k, v in data.items()}
    if tag not in _DECODERS or len(data) != 1:
        raise FormatError(f"{tag!r} marks no kind of plain data that is known here")
    try:
        return _DECODERS[tag](data[tag])
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise FormatError(f"the data under {tag!r} cannot be read: {error}") from error
