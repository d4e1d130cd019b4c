"""Reads pickles without running any code: plain data, tensors as references to bytes, and records
for everything else."""

from __future__ import annotations

import datetime
import io
import itertools
import math
import pickle
import re
import struct
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import numpy as np
import torch

from planners.errors import PlanError
from planners.geometry.box import Shape
from planners.geometry.byte_ranges import Window
from planners.geometry.layout import TensorLayout, TensorSpec, itemsize
from planners.geometry.mesh import Mesh, Placement, Replicate, Shard, StridedShard
from reshard.errors import CorruptCheckpointError, FormatError, UnsafeDataError
from reshard.live.dtypes import dtype_name
from reshard.live.tensors import wrappers
from reshard.stored.contents import Record, is_record_type, make_record_type


def _sealed(self: Any, state: Any) -> NoReturn:
    """Refuse `__setstate__`, because a pickle must not change a value after it was validated."""
    raise TypeError(f"a {type(self).__name__} cannot be changed")


@dataclass(frozen=True, slots=True)
class StorageType:
    """A class of torch storages, with the dtype of its numbers. None for bytes."""

    dtype: str | None
    __setstate__ = _sealed


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage that a pickle refers to by key. Its bytes are elsewhere in the file."""

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
    """A tensor of a pickle: a strided view of a storage. Raises CorruptCheckpointError if it is
    partly outside the storage."""

    storage: StorageRef
    offset: int
    """Offset in the storage, in elements."""
    size: Shape
    stride: Shape
    """Strides in elements."""
    dtype: str
    conjugate: bool = False
    __setstate__ = _sealed

    def __post_init__(self) -> None:
        numbers: tuple[object, ...] = (self.offset, *self.size, *self.stride)
        if any(type(n) is not int or n < 0 or n >= 1 << 62 for n in numbers) or len(self.size) != len(self.stride):
            raise CorruptCheckpointError(
                f"a tensor of offset {self.offset!r}, size {self.size!r} and stride {self.stride!r} cannot be"
            )
        if 0 not in self.size and self.window(0).stop > self.storage.nbytes:
            raise CorruptCheckpointError(
                f"a tensor of offset {self.offset}, size {self.size} and stride {self.stride} does not fit in its "
                f"storage of {self.storage.nbytes} bytes"
            )

    def window(self, start: int) -> Window:
        """Return where its elements are, if the storage begins at byte `start`."""
        size = itemsize(self.dtype)
        return Window(start + self.offset * size, self.size, tuple(s * size for s in self.stride), size)


def plain(value: Any, tensor: Callable[[TensorRef], Any] | None = None) -> Any:
    """Return the value, with records of well-known data classes (numpy arrays and numbers, paths,
    namespaces) converted to plain data.

    Other records stay. Containers are new. `tensor` returns a replacement for each tensor. Without
    it, references stay. Raises CorruptCheckpointError for a container that contains itself.
    """
    try:
        return _plain(value, tensor, {}, set())
    except RecursionError:
        raise CorruptCheckpointError("an object of the checkpoint is nested too deeply") from None


def _plain(value: Any, tensor: Callable[[TensorRef], Any] | None, done: dict[int, Any], above: set[int]) -> Any:
    if isinstance(value, TensorRef) and tensor is not None:
        return tensor(value)
    if not isinstance(value, (dict, list, tuple, set, frozenset, Record)) or hasattr(value, "numel"):  # a torch.Size
        return value
    if id(value) in done:
        return done[id(value)]
    if id(value) in above:
        raise CorruptCheckpointError("an object of the checkpoint contains itself")
    above.add(id(value))

    def go(part: Any) -> Any:
        return _plain(part, tensor, done, above)

    result: Any
    if isinstance(value, dict):
        result = {_hashable(go(k)): go(v) for k, v in value.items()}
    elif isinstance(value, Record):
        result = _plain_record(value, go)
    elif type(value) in (set, frozenset):
        result = type(value)(_hashable(go(v)) for v in value)
    elif type(value) in (list, tuple):
        result = type(value)(go(v) for v in value)
    else:
        result = value  # torch.Size and the like
    above.discard(id(value))
    done[id(value)] = result
    return result


def _hashable(key: Any) -> Any:
    """Return a key of a dict, or a member of a set. Raises CorruptCheckpointError if it cannot be one."""
    try:
        hash(key)
    except TypeError as error:
        raise CorruptCheckpointError(
            f"a key of a dict, or a member of a set, in the checkpoint is none: {error}"
        ) from None
    return key


def _plain_record(record: Record, go: Any) -> Any:
    if record.path in ("argparse.Namespace", "types.SimpleNamespace"):
        return {k: go(v) for k, v in record.fields.items()}
    if record.path.startswith("pathlib."):
        return "/".join(str(part) for part in record.args).replace("//", "/", 1) if record.args else "."
    if record.path == "_io.BytesIO" and isinstance(record.state, tuple):
        return record.state[0] if record.state and isinstance(record.state[0], bytes) else record
    if record.path == "torch.device":
        text = ":".join(str(part) for part in record.args)
        try:
            return torch.device(text)
        except RuntimeError:  # the backend is not installed
            return text
    if record.path.endswith(("multiarray.scalar", "multiarray._reconstruct")) and record.path.startswith("numpy."):
        return _numpy(record)
    return record


def _numpy(record: Record) -> Any:
    """Return a numpy number or array of plain numbers. For other dtypes, return the record itself."""
    if record.path.endswith("scalar") and record.args:
        dtype, shape, fortran, data = record.args[0], (), False, record.args[-1]
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
        raise CorruptCheckpointError(f"a numpy array of the checkpoint is damaged: {error}") from None
    return array[()] if record.path.endswith("scalar") else array


# A pickle reader that runs no code: it returns plain data, references to tensors' bytes, and inert
# records for everything else.
#
# A pickle is a program. First, every opcode is checked (`check_opcodes`). Then CPython's unpickler
# runs it, and can call only the few functions below, which only create values. An unknown class
# becomes a `Record` of its name, arguments, and state. A name from the standard library that is not
# on the list (such as `os.system` or `builtins.eval`) is rejected at once: no checkpoint needs it.


def load_pickle(data: bytes | memoryview, *, where: str) -> Any:
    """Return the value of a pickle. Bytes after its end are ignored. `where` names it in messages.

    Raises:
        UnsafeDataError: it names something that is not allowed, or uses an opcode that no
        checkpoint needs.
        CorruptCheckpointError: it is truncated or not a pickle.
    """
    return load_pickle_at(data, 0, where=where)[0]


def load_pickle_at(
    data: bytes | memoryview, start: int, *, where: str, seen: list[StorageRef] | None = None
) -> tuple[Any, int]:
    """Like `load_pickle`, for the pickle that begins at `start`. Also return where it ends. `seen`
    gets all storages."""
    stop = check_opcodes(data, start, where)
    program = bytes(data[start:stop])
    reader = _Unpickler(io.BytesIO(program), where, [] if seen is None else seen)
    try:
        return _run(reader, program), stop
    except (UnsafeDataError, CorruptCheckpointError, FormatError) as error:
        if str(error).startswith(where):
            raise
        raise type(error)(f"{where}: {error}") from None
    except RecursionError:
        raise CorruptCheckpointError(f"{where}: the pickle is nested too deeply") from None
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        MemoryError,
    ) as error:
        raise CorruptCheckpointError(
            f"{where}: the pickle is damaged: {type(error).__name__}: {error}; expected what torch or pickle wrote"
        ) from None


_SAFE_DEPTH = 4000
_STACK_BYTES_PER_LEVEL = 128
_MAX_STACK_BYTES = 1 << 30
_stack_size_lock = threading.Lock()


def _run(reader: _Unpickler, program: bytes) -> Any:
    """Run the unpickler with a large enough stack. CPython hashes nested tuples by recursion in C
    (65 bytes a level, measured), so a pickle of a megabyte, with a dict key nested a million levels
    deep, would crash the process."""
    depth = sum(map(program.count, (b"\x85", b"\x86", b"\x87", b"t", b"\x91")))  # a bound: tuples and frozensets
    if depth <= _SAFE_DEPTH:
        return reader.load()
    with _stack_size_lock:
        wanted = min(depth * _STACK_BYTES_PER_LEVEL, _MAX_STACK_BYTES) + (1 << 20)
        before = threading.stack_size(wanted // 4096 * 4096)
        try:
            pool = ThreadPoolExecutor(1, thread_name_prefix="reshard-unpickle")
            future = pool.submit(reader.load)  # starts the thread, which keeps its stack
        finally:
            threading.stack_size(before)
    with pool:
        return future.result()


class _Unpickler(pickle.Unpickler):
    """CPython's unpickler, which can find nothing but values, our functions, and types of records."""

    def __init__(self, file: io.BytesIO, where: str, seen: list[StorageRef]) -> None:
        super().__init__(file)
        self._seen = seen
        self._where = where
        self._types: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        found = _KNOWN.get(full)
        if found is not None:
            return found
        if module == "torch" and name.endswith("Storage"):
            if name not in _STORAGES:
                raise FormatError(f"{self._where}: torch.{name} is a kind of storage that is not supported")
            return StorageType(_STORAGES[name])
        if module == "torch" and "." not in name and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if full == "torch.storage._load_from_bytes":
            raise UnsafeDataError(
                f"{self._where}: its tensors were written by pickle.dump, and only running code can read these; none "
                "of it was run. If you trust the file, load it with pickle, and save it with torch.save or reshard.save"
            )
        if full not in _INERT and _is_standard(module):
            raise UnsafeDataError(
                f"{self._where}: the pickle imports {full}, which is not in the list of allowed types; none of "
                "it was run. If you trust the file, load it with its own framework and save plain tensors instead"
            )
        if full not in self._types:
            self._types[full] = make_record_type(module, name)
        return self._types[full]

    def persistent_load(self, pid: Any) -> StorageRef:
        if not (isinstance(pid, tuple) and len(pid) in (5, 6) and pid[0] == "storage"):
            raise CorruptCheckpointError(f"{self._where}: {pid!r:.80} is not a reference to a storage")
        kind, key, numel = pid[1], pid[2], pid[4]
        if not isinstance(kind, StorageType) or not isinstance(key, str) or type(numel) is not int or numel < 0:
            raise CorruptCheckpointError(f"{self._where}: the reference {pid!r:.120} to a storage is malformed")
        if len(pid) == 6 and pid[5] is not None:
            raise FormatError("its storages are views of other storages, a form that torch dropped before version 0.4")
        ref = StorageRef(key, kind.dtype, numel)
        self._seen.append(ref)
        return ref


def _is_standard(module: str) -> bool:
    top = module.partition(".")[0]
    return top in sys.stdlib_module_names or top in ("builtins", "__builtin__", "__builtins__", "commands", "copy_reg")


_STORAGES = {
    "UntypedStorage": None,
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "QInt8Storage": "int8",
    "QUInt8Storage": "uint8",
    "QInt32Storage": "int32",
    "QUInt4x2Storage": "uint8",
    "QUInt2x4Storage": "uint8",
}


class _Function:
    """A function that a pickle may call. Frozen, so that a pickle cannot change what the next one
    would call."""

    __slots__ = ("_call",)
    _call: Callable[..., Any]

    def __init__(self, call: Callable[..., Any]) -> None:
        object.__setattr__(self, "_call", call)

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise TypeError("a function cannot be changed by a pickle")


class PlainDict(dict[Any, Any]):
    """A dict that ignores attributes set on it, such as the `_metadata` of a module's state dict."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        pass


def _ordered_dict(items: Iterable[Any] = ()) -> PlainDict:
    return PlainDict(_checked(items, list, tuple, dict))


def _checked(value: Any, *types: type) -> Any:
    if not isinstance(value, types):
        raise TypeError(f"wanted {' or '.join(t.__name__ for t in types)}, got {type(value).__name__}")
    return value


def _bytes_of(text: str = "", encoding: str = "latin1") -> bytes:
    """Return how protocol 2 writes bytes."""
    if _checked(encoding, str) not in ("latin1", "latin-1"):
        raise TypeError(f"unexpected encoding {encoding!r}")
    return _checked(text, str).encode("latin1")  # type: ignore[no-any-return]


def _bytearray(data: Any = b"", *encoding: str) -> bytearray:
    return bytearray(_bytes_of(data, *encoding) if isinstance(data, str) else _checked(data, bytes))


def _tensor_v2(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any = False, hooks: Any = None, metadata: Any = None
) -> TensorRef | Record:
    return _tensor(storage, offset, size, stride, _checked(storage, StorageRef).dtype, metadata)


def _tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> TensorRef | Record:
    return _tensor(storage, offset, size, stride, dtype_name(_checked(dtype, torch.dtype)), metadata)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, dtype: str | None, metadata: Any) -> TensorRef | Record:
    flags = _checked(metadata, dict) if metadata else {}
    if flags.get("neg") is True:
        return _NEGATIVE(storage, offset, size, stride, metadata)
    if dtype is None:
        raise TypeError("a tensor over an untyped storage needs a dtype")
    return TensorRef(
        _checked(storage, StorageRef), offset, tuple(_checked(size, tuple)), tuple(_checked(stride, tuple)), dtype,
        conjugate=flags.get("conj") is True,
    )  # fmt: skip


def _parameter(data: Any, *rest: Any) -> Any:
    return _checked(data, TensorRef, Record)


def _from_type(function: Any, cls: Any, args: Any, state: Any) -> Any:
    """Return a tensor subclass: the plain tensor if it is one or only wraps one, and otherwise a
    record of class, arguments, and state."""
    if function in (_KNOWN["torch._utils._rebuild_tensor_v2"], _KNOWN["torch._utils._rebuild_tensor_v3"]):
        return function(*_checked(args, tuple))
    if not is_record_type(cls):
        raise TypeError("wanted a class of tensors")
    inner = state.get(wrappers.get(cls.path, "")) if isinstance(state, dict) else None
    if isinstance(inner, TensorRef):
        return inner
    record = cls(*_checked(args, tuple))
    record.__setstate__(state)
    return record


def _layout(text: Any) -> str:
    return str(_checked(text, str))


def _member(cls: Any, name: Any) -> type[Record]:
    """Return how protocol 2 names a member of an enum or a nested class. Nothing is looked up: only
    the two names count."""
    if not is_record_type(cls):
        raise UnsafeDataError("the pickle uses getattr on something that is not a class; none of it was run")
    if _is_standard(cls.path):
        raise UnsafeDataError(f"the pickle asks for {cls.path}.{name}; none of it was run")
    return make_record_type(cls.path, _checked(name, str))


def _reconstruct(cls: Any, base: Any = None, state: Any = None) -> Any:
    """Return how protocols 0 and 1 make an object."""
    if not is_record_type(cls):
        raise TypeError("wanted a class that became a record")
    return cls()


_OBJECT = make_record_type("builtins", "object")
_NEGATIVE = make_record_type("torch._utils", "_rebuild_tensor_v2")

_KNOWN: dict[str, Any] = {
    # types implemented in C are immutable, so a pickle can only call them
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.complex": complex,
    "builtins.slice": slice,
    "builtins.range": range,
    "builtins.bytearray": _Function(_bytearray),
    "builtins.bytes": _Function(_bytes_of),
    "builtins.object": _OBJECT,
    "collections.OrderedDict": _Function(_ordered_dict),
    "collections.Counter": _Function(_ordered_dict),
    "collections.defaultdict": _Function(lambda factory=None, items=(): _ordered_dict(items)),
    "_codecs.encode": _Function(_bytes_of),
    "copyreg._reconstructor": _Function(_reconstruct),
    "builtins.getattr": _Function(_member),
    "datetime.date": datetime.date,
    "datetime.datetime": datetime.datetime,
    "datetime.timedelta": datetime.timedelta,
    "datetime.timezone": datetime.timezone,
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": _Function(_layout),
    "torch.torch_version.TorchVersion": str,
    "torch.storage.UntypedStorage": StorageType(None),
    "torch._utils._rebuild_tensor": _Function(_tensor_v2),
    "torch._utils._rebuild_tensor_v2": _Function(_tensor_v2),
    "torch._utils._rebuild_tensor_v3": _Function(_tensor_v3),
    "torch._utils._rebuild_parameter": _Function(_parameter),
    "torch._utils._rebuild_parameter_with_state": _Function(_parameter),
    "torch._tensor._rebuild_from_type_v2": _Function(_from_type),
}
for _name in ("set", "frozenset", "complex", "slice", "bytes", "bytearray", "object", "getattr"):
    _KNOWN[f"__builtin__.{_name}"] = _KNOWN[f"builtins.{_name}"]  # protocol 2 uses the old names
_KNOWN["__builtin__.xrange"] = range
_KNOWN["copy_reg._reconstructor"] = _KNOWN["copyreg._reconstructor"]

_FACTORIES = ("list", "dict", "tuple", "int", "float", "str", "bool")
"""Types that a defaultdict may name."""

_INERT = frozenset(
    {
        *(f"{module}.{name}" for module in ("builtins", "__builtin__") for name in _FACTORIES),
        "_io.BytesIO",
        "argparse.Namespace",
        "types.SimpleNamespace",
        "collections.deque",
        "datetime.time",
        "functools.partial",
        "re._compile",
        "decimal.Decimal",
        "fractions.Fraction",
        "uuid.UUID",
        "random.Random",
        "pathlib.Path",
        "pathlib.PurePath",
        "pathlib.PosixPath",
        "pathlib.PurePosixPath",
        "pathlib.WindowsPath",
        "pathlib.PureWindowsPath",
        "pathlib._local.PosixPath",
        "pathlib._local.WindowsPath",
        "signal.Signals",
    }
)
"""Classes of the standard library that are mere data, and occur in checkpoints: they become records."""


# Scans the opcodes of a pickle without running any: where it ends, and whether a checkpoint may
# contain them.
#
# CPython's unpickler trusts a pickle's numbers: it allocates the number of memo slots that an index
# requires. So indexes and lengths are first compared with the size of the pickle, by regular
# expressions, which are fast.


# Opcodes of fixed length that need no check, with an argument of zero, one, two, four, or eight
# bytes. PUT with a four-byte index is included only for small indexes, because the unpickler
# allocates that number of slots.
RUN = re.compile(
    rb"(?:[(012NQRabdel}\])stu\x81\x85-\x89\x8f-\x94]|[Khq\x80].|M..|[Jj]....|r..\x00\x00|[G\x95]........)*+", re.DOTALL
)
COUNTED = {
    **dict.fromkeys(b"UC\x8c\x8a", struct.Struct("<B")),
    **dict.fromkeys(b"TXB\x8b", struct.Struct("<I")),
    **dict.fromkeys(b"\x8d\x8e\x96", struct.Struct("<Q")),
}
LINES = {**dict.fromkeys(b"ILFSVgp", 1), b"c"[0]: 2}
_LINE = re.compile(rb"[^\n]*\n")
_FORBIDDEN = {
    b"i"[0]: "INST",
    b"o"[0]: "OBJ",
    b"P"[0]: "PERSID",
    0x82: "EXT1",  # codes of the extension registry refer to objects without naming them
    0x83: "EXT2",
    0x84: "EXT4",
    0x97: "NEXT_BUFFER",
    0x98: "READONLY_BUFFER",
}


def check_opcodes(data: bytes | memoryview, start: int, where: str) -> int:
    """Return one past the STOP of the pickle at `start`. Walks over all opcodes without running them."""
    at, end = start, len(data)
    while True:
        match = RUN.match(data, at) if at < end else None  # it also matches an empty text
        at = end if match is None else match.end()
        if at >= end:
            raise CorruptCheckpointError(f"{where}: the pickle is truncated after {end - start} bytes")
        op = data[at]
        if op == b"."[0]:
            return at + 1
        if op in COUNTED:
            head = COUNTED[op]
            length = head.unpack_from(data, at + 1)[0] if at + 1 + head.size <= end else end
            at += 1 + head.size + length
        elif op in LINES:
            at = _skip_lines(data, at, where)
        elif op == b"r"[0] and at + 5 <= end and int.from_bytes(data[at + 1 : at + 5], "little") <= end - start:
            at += 5
        elif op in _FORBIDDEN:
            raise UnsafeDataError(
                f"{where}: the pickle uses {_FORBIDDEN[op]} at byte {at - start}, which no checkpoint needs; none "
                "of it was run"
            )
        else:
            raise CorruptCheckpointError(f"{where}: there is no pickle opcode {op:#04x} (byte {at - start})")


def _skip_lines(data: bytes | memoryview, at: int, where: str) -> int:
    """Return the position after an opcode whose arguments are lines of text."""
    op, stop = data[at], at + 1
    for _ in range(LINES[op]):
        match = _LINE.match(data, stop)
        if match is None:
            raise CorruptCheckpointError(f"{where}: the pickle is truncated in a line of text")
        stop = match.end()
    if op == b"p"[0]:
        index = bytes(data[at + 1 : stop - 1])
        if not index.isdigit() or len(index) > 9 or int(index) > len(data):
            raise CorruptCheckpointError(f"{where}: the pickle has a memo index that is malformed: {index[:20]!r}")
    return stop


# DTensors in pickles: the mesh and placements of a `DTensor` record as a layout, without torch's
# classes.
#
# How torch pickles these classes changes between versions. All three forms of a mesh are supported.


@dataclass(frozen=True)
class Shardlet:
    """One rank's part of a DTensor: the layout of the full tensor, and the local tensor."""

    layout: TensorLayout
    local: TensorRef


def is_dtensor(value: object) -> bool:
    """Return True if a value of a pickle is a DTensor."""
    return isinstance(value, Record) and value.path.startswith("torch.distributed") and value.name == "DTensor"


def read_dtensor(key: str, record: Record, rank: int, read: Callable[[TensorRef], Any], where: str) -> Shardlet:
    """Return the layout and local part of the DTensor `record` from the file of `rank`. `read`
    reads a small tensor.

    Raises:
        FormatError: pending reductions, or unknown placements.
        CorruptCheckpointError: a record that no version of torch writes.
    """
    try:
        fields = record.fields
        spec, local = fields["_spec"].fields, fields["_local_tensor"]
        meta = spec["tensor_meta"]
        values = meta.args or [meta.fields[name] for name in ("shape", "stride", "dtype")]
        shape, dtype = [int(n) for n in values[0]], dtype_name(values[2])
        mesh = _mesh(spec["mesh"], rank, read)
        placements = [_placement(p, len(shape)) for p in spec["placements"]]
        layout = TensorLayout(TensorSpec(key, shape, dtype), mesh, placements)
    except (KeyError, AttributeError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, FormatError | CorruptCheckpointError):
            raise type(error)(f"{where}: tensor {key!r}: {error}") from None
        what = str(error) if isinstance(error, PlanError) else f"{type(error).__name__}: {error}"
        raise CorruptCheckpointError(f"{where}: the DTensor {key!r} is malformed: {what}") from None
    if not isinstance(local, TensorRef):
        raise FormatError(f"{where}: the local tensor of {key!r} is a {getattr(local, 'path', type(local).__name__)}")
    return Shardlet(layout, local)


def _placement(record: Record, ndim: int) -> Placement:
    name, fields = record.name, record.fields
    if name == "Replicate":
        return Replicate()
    if name not in ("Shard", "_StridedShard"):
        raise FormatError(
            f"a placement {name}, which is not supported: redistribute to Shard or Replicate before saving"
        )
    dim = int(fields["dim"] if "dim" in fields else record.args[0]) % max(ndim, 1)
    if name == "Shard":
        return Shard(dim)
    return StridedShard(dim, int(fields["split_factor"] if "split_factor" in fields else record.kwargs["split_factor"]))


def _mesh(record: Record, rank: int, read: Callable[[TensorRef], Any]) -> Mesh:
    fields = record.fields
    if "_rank_map" in fields:
        ranks = _submesh(_axes(fields["_layout"]), _numbers(fields["_rank_map"], read), rank)
        names = fields.get("_mesh_dim_names")
    else:  # before torch 2.10 or so, the mesh is a tensor of ranks
        ranks = _numbers(fields["mesh"] if "mesh" in fields else fields["_mesh"], read)
        names = fields.get("mesh_dim_names", fields.get("_mesh_dim_names"))
    axis_names = tuple(names) if names else tuple(f"axis{i}" for i in range(ranks.ndim))
    return Mesh(list(zip(axis_names, ranks.shape, strict=True)), ranks.reshape(-1).tolist())


def _numbers(ref: Any, read: Callable[[TensorRef], Any]) -> np.ndarray[Any, Any]:
    return np.asarray(read(ref).numpy() if isinstance(ref, TensorRef) else ref, dtype=np.int64)


def _axes(layout: Record) -> list[list[tuple[int, int]]]:
    """Return the (size, stride) pairs of each axis of a mesh, the outermost first."""
    fields = layout.fields
    if "axes" in fields:
        parts = [(axis.fields["shape"], axis.fields["stride"]) for axis in fields["axes"]]
    else:
        shape, stride = fields["shape"], fields["stride"]
        parts = list(zip(shape, stride)) if isinstance(shape, tuple) else [(shape, stride)]
    return [list(zip(_flat(shape), _flat(stride), strict=True)) for shape, stride in parts]


def _flat(value: Any) -> list[int]:
    if isinstance(value, tuple | list):
        return [n for part in value for n in _flat(part)]
    return [int(value)]


def _submesh(axes: list[list[tuple[int, int]]], rank_map: np.ndarray[Any, Any], rank: int) -> np.ndarray[Any, Any]:
    """Return the ranks of the (sub)mesh that contains `rank`. `axes` give positions in `rank_map`,
    relative to a start."""
    shape = [math.prod(size for size, _ in axis) for axis in axes]
    steps = (range(0, size * stride, stride) for axis in axes for size, stride in axis)
    offsets = np.array([sum(combo) for combo in itertools.product(*steps)], dtype=np.int64)
    flat = rank_map.reshape(-1)
    if offsets.size > flat.size or rank not in flat:
        raise ValueError(f"a mesh of {offsets.size} ranks in a world of {flat.size}, without rank {rank}")
    at = int(np.flatnonzero(flat == rank)[0])
    free = np.ones(flat.size, dtype=bool)
    while free.any():  # a mesh starts at the first position that no other mesh contains
        members = int(np.flatnonzero(free)[0]) + offsets
        if members.max(initial=0) >= flat.size:
            raise ValueError("a mesh that does not tile its world")
        free[members] = False
        if at in members:
            return flat[members].reshape(shape)
    raise ValueError(f"rank {rank} is in no copy of its mesh")
