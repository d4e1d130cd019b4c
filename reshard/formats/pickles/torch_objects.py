"""What a pickle's tensors become when nothing is run: references to their bytes; and its other objects, plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import numpy as np

from planners.geometry.byteruns import Window
from planners.geometry.dtypes import itemsize
from reshard.errors import DamagedCheckpointError
from reshard.formats.pickles.record import Record

__all__ = ["StorageRef", "StorageType", "TensorRef", "plain"]


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
