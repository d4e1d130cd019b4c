"""Plain objects as JSON data, and back.

JSON has text keys, one kind of sequence and finite floats only, so everything else is written as an
object with the single key "$type": a dict that has such a key itself is written as pairs.
"""

from __future__ import annotations

import base64
import datetime
import io
import math
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from reshard.errors import FormatError
from reshard.live.dtypes import dtype_from_name, dtype_name, resolved
from reshard.live.tree import MAX_DEPTH, CustomValue, map_leaves, typed

_LONG_INT_BITS = 4096


class _LongInt(int):
    def __repr__(self) -> str:
        return hex(self)


def represent(value: Any, words: Callable[[Any], str] = repr) -> str:
    """Return the `repr` of a value for people. Ints that Python does not write in decimal are in
    hexadecimal."""
    with suppress(ValueError):
        return words(value)

    def short(_: Any, leaf: Any) -> Any:
        return _LongInt(leaf) if type(leaf) is int and leaf.bit_length() > _LONG_INT_BITS else leaf

    with suppress(ValueError):
        return words(map_leaves(short, value))
    return f"<{type(value).__name__} with a long int>"


def encode_plain(value: Any, *, tensor_bytes: int = 0) -> Any:
    """Plain Python data as JSON data, losslessly: None, bool, int, float (also nan, inf, -0.0),
    complex, text, bytes, io.BytesIO, list, tuple, set, frozenset, deque, range, dict (any plain
    keys), torch.Size, torch.dtype, torch.device, timedelta, date, datetime, numpy numbers and arrays.
    Members of enums, and values of classes that extend a number, text, list or tuple, as `CustomValue`.

    Inverse of `decode_plain`.

    Args:
        tensor_bytes: plain tensors of together at most this many bytes count as plain data, too.

    Raises FormatError, naming the type, for anything else: only plain data is ever stored; or for a
    nest of more than 100 levels, so that whatever is stored can be read by any program.
    """
    return _encode(value, set(), _Tensors(tensor_bytes, tensor_bytes))


@dataclass
class _Tensors:
    """How many bytes of tensors plain data may contain, and how many are left."""

    limit_bytes: int
    left_bytes: int

    def encode(self, tensor: torch.Tensor) -> dict[str, Any]:
        if not self.limit_bytes:
            raise FormatError(
                "a Tensor is in a place that only plain data can be in: a set, or a dict whose keys are neither "
                "strings nor ints. Put it into a dict with string keys"
            )
        if hasattr(tensor, "__tensor_flatten__") or tensor.layout != torch.strided or tensor.device.type == "meta":
            raise FormatError(f"a {type(tensor).__name__} on {tensor.device} is not a plain tensor")
        self.left_bytes -= tensor.numel() * tensor.element_size()
        if self.left_bytes < 0:
            raise FormatError(
                f"a tensor of shape {list(tensor.shape)} is too large for plain data ({self.limit_bytes} bytes "
                "in all); give it a key and a PerRank of its own"
            )
        flat = resolved(tensor.cpu()).contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        return {"$tensor": [dtype_name(tensor.dtype), list(tensor.shape), base64.b64encode(data).decode()]}


_raw = partial(base64.b64decode, validate=True)


def _decode_tensor(dtype: str, shape: list[int], data: str) -> torch.Tensor:
    kind, raw = dtype_from_name(dtype), _raw(data)
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"{shape} is not a shape")
    if len(raw) != math.prod(shape) * kind.itemsize:
        raise ValueError(f"{len(raw)} bytes do not fit a tensor of shape {shape} and dtype {dtype}")
    if not raw:
        return torch.empty(shape, dtype=kind, device="cpu")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(kind).reshape(shape)


def _encode(value: Any, above: set[int], tensors: _Tensors) -> Any:
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:  # JSON's are decimal, and Python reads no more than 4,300 digits
        return value if value.bit_length() <= _LONG_INT_BITS else {"$int": hex(value)}
    if kind is str:
        return check_text(value)
    if kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    simple = _encode_simple(value)
    if simple is not None:
        return simple
    if id(value) in above:
        raise FormatError("an object that contains itself cannot be stored as plain data")
    if len(above) >= MAX_DEPTH:
        raise FormatError(f"it is nested more than {MAX_DEPTH} levels deep")
    above = above | {id(value)}
    own = None if kind in (dict, list, tuple) else typed(value)
    if own is not None:
        return {"$typed": [check_text(own.name), _encode(own.value, above, tensors)]}
    if kind in (list, tuple, set, frozenset, deque):
        items = [_encode(v, above, tensors) for v in value]
        if kind is list:
            return items
        if kind is deque:
            return {"$deque": [items, value.maxlen]}
        return {f"${kind.__name__}": items if kind is tuple else sorted(items, key=repr)}
    if isinstance(value, CustomValue):  # of a checkpoint
        return {"$typed": [value.name, _encode(value.value, above, tensors)]}
    if isinstance(value, Mapping):
        if all(type(k) is str for k in value) and not any(k.startswith("$") for k in value):
            return {check_text(k): _encode(v, above, tensors) for k, v in value.items()}
        return {"$dict": [[_encode(k, above, tensors), _encode(v, above, tensors)] for k, v in value.items()]}
    if isinstance(value, torch.Tensor):
        return tensors.encode(value)
    path = getattr(kind, "path", "")
    if path in UNSUPPORTED_TENSORS:  # a record of one
        raise FormatError(UNSUPPORTED_TENSORS[path])
    raise FormatError(f"an object of type {kind.__module__}.{kind.__qualname__} is not plain data; {_fix(value)}")


def _fix(value: object) -> str:
    """Return advice on what to save instead."""
    if isinstance(value, torch.nn.Module):
        return "make the model a value of a dict, as {'model': model}, or save get_model_state_dict(model)"
    if isinstance(value, torch.optim.Optimizer):
        return (
            "make it a value of a dict, as {'model': model, 'optim': optimizer}, or save "
            "get_optimizer_state_dict(model, optimizer)"
        )
    if type(value).__name__ == "LazyTensor":
        return "read it first, as in checkpoint[name][...], or copy the checkpoint with reshard.convert"
    has_state = callable(getattr(value, "state_dict", None)) and not isinstance(value, type)
    if isinstance(value, torch.utils.data.DataLoader):
        if has_state:
            return "make reshard.PerRank(loader) a value of a dict, or save PerRank(loader.state_dict())"
        return "give it a reshard.ElasticSampler, and save that"
    if has_state:
        return "save its state_dict() instead, and pass what you load to its load_state_dict()"
    if is_dataclass(value) and not isinstance(value, type):
        return "save dataclasses.asdict(value) instead"
    return "turn it into tensors, numbers, text, lists, and dicts first"


UNSUPPORTED_TENSORS = {
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor, which is not supported: save x.to_dense() instead",
    "torch._utils._rebuild_qtensor": (
        "a quantized tensor, which is not supported: save q.int_repr(), its scale, and its zero point instead"
    ),
    "torch._utils._rebuild_tensor_v2": (
        "a tensor with torch's negative bit, which is not supported: save x.resolve_neg() instead"
    ),
}
"""Kinds of tensors that pickles store as calls of these functions, and what to save instead."""


def check_text(text: str) -> str:
    """Return the text. Raises FormatError if it cannot be stored, such as a file name that is not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise FormatError(f"the text {text[:80]!r} is not valid Unicode and cannot be stored") from None
    return text


def _encode_simple(value: Any) -> dict[str, Any] | None:
    kind = type(value)
    if kind is complex:
        return {"$complex": [encode_plain(value.real), encode_plain(value.imag)]}
    if kind in (bytes, bytearray):
        return {f"${kind.__name__}": base64.b64encode(value).decode()}
    if kind is io.BytesIO:  # older modules return such extra state
        return {"$bytesio": base64.b64encode(value.getvalue()).decode()}
    if isinstance(value, torch.Size):
        return {"$size": list(value)}
    if kind is range:
        return {"$range": [encode_plain(n) for n in (value.start, value.stop, value.step)]}
    if isinstance(value, torch.dtype):
        return {"$dtype": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if kind is datetime.timedelta:
        return {"$timedelta": [value.days, value.seconds, value.microseconds]}
    if kind is datetime.date:
        return {"$date": value.isoformat()}
    if kind is datetime.datetime:
        text = value.isoformat()
        if repr(_datetime(text, value.fold)) == repr(value):  # the text says nothing of a time zone but its offset
            return {"$datetime": [text, value.fold]}
    if (isinstance(value, np.generic) or kind is np.ndarray) and value.dtype.kind in "biufc":
        tag, shape = ("$array", [list(value.shape)]) if isinstance(value, np.ndarray) else ("$number", [])
        return {tag: [value.dtype.str, base64.b64encode(value.tobytes()).decode(), *shape]}
    return None


def array_bytes(value: Any) -> int:
    """Return the bytes of the numpy arrays in plain data, encoded or not."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    match value:
        case {"$array": [_, str(text), _]}:
            return len(text) * 3 // 4 - text[-2:].count("=")
        case {}:
            return sum(map(array_bytes, value.values()))
        case list() | tuple() | deque():
            return sum(array_bytes(item) for item in value if not isinstance(item, int | float))
    return 0


def _datetime(text: str, fold: int) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text).replace(fold=fold)


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$int": lambda v: int(v, 16),
    "$range": lambda v: range(*map(_decode, v)),
    "$deque": lambda v: deque(map(_decode, v[0]), v[1]),
    "$typed": lambda v: CustomValue(check_text(str(v[0])), _decode(v[1])),
    "$complex": lambda v: complex(_decode(v[0]), _decode(v[1])),
    "$bytes": _raw,
    "$bytearray": lambda v: bytearray(_raw(v)),
    "$bytesio": lambda v: io.BytesIO(_raw(v)),
    "$size": torch.Size,
    "$dtype": dtype_from_name,
    "$device": torch.device,
    "$timedelta": lambda v: datetime.timedelta(*v),
    "$date": datetime.date.fromisoformat,
    "$datetime": lambda v: _datetime(*v),
    "$number": lambda v: np.frombuffer(_raw(v[1]), _plain_dtype(v[0]))[0],
    "$array": lambda v: np.frombuffer(bytearray(_raw(v[1])), _plain_dtype(v[0])).reshape(v[2]),
    "$tensor": lambda v: _decode_tensor(*v),
    "$tuple": lambda v: tuple(map(_decode, v)),
    "$set": lambda v: set(map(_decode, v)),
    "$frozenset": lambda v: frozenset(map(_decode, v)),
    "$dict": lambda v: {_decode(k): _decode(x) for k, x in v},
}


def _plain_dtype(text: str) -> np.dtype[Any]:
    dtype = np.dtype(str(text))
    if dtype.kind not in "biufc":
        raise FormatError(f"{text!r} is not a dtype of a plain number")
    return dtype


def decode_plain(data: Any) -> Any:
    """Inverse of `encode_plain`. Raises FormatError for data that it did not write."""
    try:
        return _decode(data)
    except RecursionError:
        raise FormatError("plain data is nested too deeply to be read") from None


def _decode(data: Any) -> Any:
    if isinstance(data, list):
        return [_decode(v) for v in data]
    if not isinstance(data, dict):
        return data
    tag = next(iter(data), "")
    if not isinstance(tag, str) or not tag.startswith("$"):
        return {k: _decode(v) for k, v in data.items()}
    if tag not in _DECODERS or len(data) != 1:
        raise FormatError(f"{tag!r} is not a known kind of plain data")
    try:
        return _DECODERS[tag](data[tag])
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError, OverflowError) as error:
        raise FormatError(f"the data under {tag!r} cannot be read: {error}") from error


def are_equal(a: Any, b: Any) -> bool:
    """Return whether two plain values are the same; NaN equals NaN. 1 equals 1.0, but not True, or
    a member of an IntEnum. Arrays of floats are equal if their bits are."""
    if type(a) is type(b) and type(a) in (int, float, str) and a == b:  # there can be millions of these
        return True
    a, b = _as_saved(a), _as_saved(b)
    if isinstance(a, CustomValue) and isinstance(b, CustomValue):
        return a.name == b.name and are_equal(a.value, b.value)
    if isinstance(a, list | tuple | deque) and type(a) is type(b):
        return len(a) == len(b) and all(map(are_equal, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping) and a.keys() == b.keys():
        return all(are_equal(value, b[key]) for key, value in a.items())
    if _kind(a) != _kind(b):
        return False
    if not isinstance(a, torch.Tensor) and not (isinstance(a, np.ndarray) and a.dtype.kind in "fc"):
        try:
            same = a == b
            if bool(same.all() if hasattr(same, "all") else same):
                return True
        except (ValueError, RuntimeError, TypeError):  # arrays or tensors within
            pass
    try:  # as it is written: NaN is then equal to itself
        return bool(encode_plain(a, tensor_bytes=1 << 62) == encode_plain(b, tensor_bytes=1 << 62))
    except FormatError:  # objects of other frameworks
        return False


def _as_saved(value: Any) -> Any:
    """Return values of custom classes, and those in sets, as they are after reading them again."""
    if isinstance(value, set | frozenset):
        return set(map(_as_saved, value))
    with suppress(FormatError):  # which cannot be saved
        return value if isinstance(value, np.generic) else typed(value) or value
    return value


def _kind(value: Any) -> Any:
    """Return what two values must have in common to be equal: whether they are bools, or an array's
    shape and dtype."""
    if isinstance(value, np.ndarray | torch.Tensor):
        return isinstance(value, np.ndarray), tuple(value.shape), value.dtype
    return isinstance(value, bool | np.bool_)
