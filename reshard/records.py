"""What a pickle's objects become when nothing is run: records of unknown classes, references to tensors' bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import numpy as np

from planners.byteruns import Window
from planners.dtypes import itemsize
from reshard.errors import DamagedCheckpointError

__all__ = ["Record", "StorageRef", "StorageType", "TensorRef", "make_record_type", "plain", "unknown_class"]


class _FrozenType(type):
    """The class of records' classes: a pickle cannot set anything on them."""

    def __setattr__(cls, name: str, value: Any) -> NoReturn:
        raise TypeError("the class of a record cannot be changed")

    def __delattr__(cls, name: str) -> NoReturn:
        raise TypeError("the class of a record cannot be changed")


class Record(metaclass=_FrozenType):
    """An object of a class that is not known here, as the pickle describes it. It has no behaviour.

    Attributes:
        args: what its class or function was called with.
        kwargs: the same by keyword.
        state: what its `__setstate__` would have got; usually a dict of its attributes.
        entries: items set on it, if it is a kind of dict.
        elements: items appended to it, if it is a kind of list or set.
    """

    __slots__ = ("args", "elements", "entries", "kwargs", "state")

    path = "object"
    """Dotted name of the class or function."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: Any
    entries: list[tuple[Any, Any]]
    elements: list[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Record:
        self = object.__new__(cls)
        self.args = args
        self.kwargs = kwargs
        self.state = None
        self.entries = []
        self.elements = []
        return self

    @property
    def name(self) -> str:
        """The last part of `path`: the class without its module."""
        return self.path.rpartition(".")[2]

    @property
    def fields(self) -> dict[str, Any]:
        """The attributes that the object had, as far as its state tells."""
        parts = self.state if isinstance(self.state, tuple) and len(self.state) == 2 else (self.state,)
        return {k: v for part in parts if isinstance(part, dict) for k, v in part.items() if isinstance(k, str)}

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.entries.append((key, value))

    def append(self, item: Any) -> None:
        """An element of a kind of list."""
        self.elements.append(item)

    def extend(self, items: Any) -> None:
        """Elements of a kind of list."""
        self.elements.extend(items)

    def add(self, item: Any) -> None:
        """An element of a kind of set."""
        self.elements.append(item)

    def __repr__(self) -> str:
        return f"<{self.path}, not known here: args {self.args!r:.60}, state {self.state!r:.60}>"


def make_record_type(module: str, name: str) -> type[Record]:
    """A class of records that stands for `module.name`."""
    members = {"__slots__": (), "path": f"{module}.{name}"}
    return cast("type[Record]", _FrozenType(name.rpartition(".")[2] or "object", (Record,), members))


def _sealed(self: Any, state: Any) -> NoReturn:
    """For `__setstate__`: a pickle cannot change a value after it was validated."""
    raise TypeError(f"a {type(self).__name__} cannot be changed")


@dataclass(frozen=True, slots=True)
class StorageType:
    """A class of torch storages: what dtype its numbers have, None for bytes."""

    dtype: str | None
    __setstate__ = _sealed


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage that a pickle refers to by key; its bytes are elsewhere in the file."""

    key: str
    dtype: str | None
    numel: int
    """Elements of `dtype`, or bytes if it has none."""
    __setstate__ = _sealed

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.numel * (1 if self.dtype is None else itemsize(self.dtype))


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor of a pickle: a strided view of a storage. Raises DamagedCheckpointError if it leaves the storage."""

    storage: StorageRef
    offset: int
    """In elements."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements."""
    dtype: str
    conjugate: bool = False
    negative: bool = False
    __setstate__ = _sealed

    def __post_init__(self) -> None:
        numbers: tuple[object, ...] = (self.offset, *self.size, *self.stride)
        if any(type(n) is not int or n < 0 or n >= 1 << 62 for n in numbers) or len(self.size) != len(self.stride):
            raise DamagedCheckpointError(
                f"a tensor of offset {self.offset!r}, size {self.size!r} and stride {self.stride!r} cannot be"
            )
        if 0 not in self.size and self.window(0).stop > self.storage.nbytes:
            raise DamagedCheckpointError(
                f"a tensor of offset {self.offset}, size {self.size} and stride {self.stride} does not fit in its "
                f"storage of {self.storage.nbytes} bytes"
            )

    def window(self, start: int) -> Window:
        """Where its elements lie, if the storage begins at byte `start`."""
        size = itemsize(self.dtype)
        return Window(start + self.offset * size, self.size, tuple(s * size for s in self.stride), size)


def unknown_class(value: Any) -> str | None:
    """The class of the first record in a nest of values, which only its own code could make into what it was."""
    if isinstance(value, Record) or (isinstance(value, type) and issubclass(value, Record)):
        return value.path
    if isinstance(value, dict):
        value = (*value, *value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return next((found for part in value if (found := unknown_class(part)) is not None), None)
    return None


def plain(value: Any, tensor: Callable[[TensorRef], Any] | None = None) -> Any:
    """The value with records of well-known data classes (numpy arrays and numbers, paths, namespaces) made plain.

    Others stay records. Containers are new. `tensor` gives what to put in the place of each tensor; None keeps the
    references. Raises DamagedCheckpointError for a container that contains itself.
    """
    try:
        return _plain(value, tensor, {}, set())
    except RecursionError:
        raise DamagedCheckpointError("an object of the checkpoint is nested too deeply to be data") from None


def _plain(value: Any, tensor: Callable[[TensorRef], Any] | None, done: dict[int, Any], above: set[int]) -> Any:
    if isinstance(value, TensorRef) and tensor is not None:
        return tensor(value)
    if not isinstance(value, (dict, list, tuple, set, frozenset, Record)) or hasattr(value, "numel"):  # a torch.Size
        return value
    if id(value) in done:
        return done[id(value)]
    if id(value) in above:
        raise DamagedCheckpointError("an object of the checkpoint contains itself")
    above.add(id(value))

    def go(part: Any) -> Any:
        return _plain(part, tensor, done, above)

    result: Any
    if isinstance(value, dict):
        result = {go(k): go(v) for k, v in value.items()}
    elif isinstance(value, Record):
        result = _plain_record(value, go)
    elif type(value) in (list, tuple, set, frozenset):
        result = type(value)(go(v) for v in value)
    else:
        result = value  # torch.Size and the like
    above.discard(id(value))
    done[id(value)] = result
    return result


def _plain_record(record: Record, go: Any) -> Any:
    if record.path in ("argparse.Namespace", "types.SimpleNamespace"):
        return {k: go(v) for k, v in record.fields.items()}
    if record.path.startswith("pathlib."):
        return "/".join(str(part) for part in record.args).replace("//", "/", 1) if record.args else "."
    if record.path == "_io.BytesIO" and isinstance(record.state, tuple):
        return record.state[0] if record.state and isinstance(record.state[0], bytes) else record
    if record.path == "torch.device":
        return ":".join(str(part) for part in record.args)
    if record.path.endswith(("multiarray.scalar", "multiarray._reconstruct")) and record.path.startswith("numpy."):
        return _numpy(record)
    return record


def _numpy(record: Record) -> Any:
    """A numpy number or array of plain numbers; the record itself for other dtypes."""
    if record.path.endswith("scalar"):
        dtype, shape, fortran, data = (record.args or (None,))[0], (), False, record.args[-1]
    elif isinstance(record.state, tuple) and len(record.state) == 5:
        _, shape, dtype, fortran, data = record.state
    else:
        return record
    if not (isinstance(dtype, Record) and dtype.path == "numpy.dtype" and dtype.args and isinstance(data, bytes)):
        return record
    order = dtype.state[1] if isinstance(dtype.state, tuple) and len(dtype.state) > 1 else "|"
    try:
        kind = np.dtype(str(dtype.args[0])).newbyteorder(cast("Any", str(order)))
        if kind.kind not in "biufc":
            return record
        array = np.frombuffer(bytearray(data), kind).reshape(shape, order="F" if fortran else "C")
    except (TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"a numpy array of the checkpoint is damaged: {error}") from None
    return array[()] if record.path.endswith("scalar") else array
