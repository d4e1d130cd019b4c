"""A reader of pickles that runs nothing: plain data, tensors as references to bytes, and inert records for the rest.

A pickle is a program, so it is treated as one: first every opcode is checked (`opcodes`), then CPython's
unpickler runs it with nothing to call but the few functions below, none of which does more than build a value. A class
that is not known becomes a `Record`: its name, its arguments and its state. A name from the standard library that is
not on the list (`os.system`, `builtins.eval`, ...) is refused at once: no checkpoint needs it.
"""

from __future__ import annotations

import io
import pickle
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import torch

from reshard.errors import DamagedCheckpointError, FormatError, UnsafeDataError
from reshard.formats.pickles.opcodes import check_opcodes
from reshard.formats.pickles.record import Record, make_record_type
from reshard.formats.pickles.torch_objects import StorageRef, StorageType, TensorRef
from reshard.state.dtypes import dtype_name

__all__ = ["load_pickle", "load_pickle_at"]


def load_pickle(data: bytes | memoryview, *, where: str, allow: Callable[[str], bool] | None = None) -> Any:
    """The value of a pickle. Bytes behind its end are ignored.

    Args:
        where: names the pickle in messages.
        allow: says whether a class, by its dotted name, may become a `Record`; default: anything that is not of the
            standard library.

    Raises:
        UnsafeDataError: it names something that is not allowed, or uses an opcode that no checkpoint needs.
        DamagedCheckpointError: it is cut short or is no pickle.
    """
    return load_pickle_at(data, 0, where=where, allow=allow)[0]


def load_pickle_at(
    data: bytes | memoryview,
    start: int,
    *,
    where: str,
    allow: Callable[[str], bool] | None = None,
    seen: list[StorageRef] | None = None,
) -> tuple[Any, int]:
    """Like `load_pickle`, for the pickle that begins at `start`; also says where it ends. `seen` gets all storages."""
    stop = check_opcodes(data, start, where)
    program = bytes(data[start:stop])
    reader = _Reader(io.BytesIO(program), where, allow or (lambda name: True), [] if seen is None else seen)
    try:
        return _run(reader, program), stop
    except (UnsafeDataError, DamagedCheckpointError, FormatError) as error:
        if str(error).startswith(where):
            raise
        raise type(error)(f"{where}: {error}") from None
    except RecursionError:
        raise DamagedCheckpointError(f"{where}: the pickle is nested too deeply to be data") from None
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, AttributeError, MemoryError) as error:
        raise DamagedCheckpointError(
            f"{where}: the pickle is damaged: {type(error).__name__}: {error}; wanted what torch or pickle wrote"
        ) from None


_SAFE_DEPTH = 4000
_STACK_BYTES_PER_LEVEL = 128
_MAX_STACK_BYTES = 1 << 30
_stack_size_lock = threading.Lock()


def _run(reader: _Reader, program: bytes) -> Any:
    """Run the unpickler with enough stack: CPython hashes nested tuples by recursion in C (65 bytes a level measured),
    and a pickle of a megabyte can nest a million to a key of a dict, which would end the process."""
    depth = sum(map(program.count, (b"\x85", b"\x86", b"\x87", b"t", b"\x91")))  # at most so many tuples and frozensets
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


class _Reader(pickle.Unpickler):
    """CPython's unpickler, which may find nothing but values, our functions and types of records."""

    def __init__(self, file: io.BytesIO, where: str, allow: Callable[[str], bool], seen: list[StorageRef]) -> None:
        super().__init__(file)
        self._seen = seen
        self._where = where
        self._allow = allow
        self._types: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        found = _KNOWN.get(full)
        if found is not None:
            return found
        if module == "torch" and name.endswith("Storage"):
            return _storage_type(name, self._where)
        if module == "torch" and "." not in name and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if full not in _INERT and (_is_standard(module) or not self._allow(full)):
            raise UnsafeDataError(
                f"{self._where}: the pickle asks for {full}, which is not on the short list of plain types; nothing of "
                "it was run. If you trust the file, load it with its own framework and save plain tensors instead"
            )
        if full not in self._types:
            self._types[full] = make_record_type(module, name)
        return self._types[full]

    def persistent_load(self, pid: Any) -> StorageRef:
        if not (isinstance(pid, tuple) and len(pid) in (5, 6) and pid[0] == "storage"):
            raise DamagedCheckpointError(f"{self._where}: {pid!r:.80} is no reference to a storage")
        kind, key, numel = pid[1], pid[2], pid[4]
        if not isinstance(kind, StorageType) or not isinstance(key, str) or type(numel) is not int or numel < 0:
            raise DamagedCheckpointError(f"{self._where}: the reference {pid!r:.120} to a storage makes no sense")
        view = pid[5] if len(pid) == 6 else None
        if view is not None:
            raise FormatError("its storages are views of other storages, a form that torch left before version 0.4")
        ref = StorageRef(key, kind.dtype, numel)
        self._seen.append(ref)
        return ref


def _is_standard(module: str) -> bool:
    top = module.partition(".")[0]
    return top in sys.stdlib_module_names or top in ("builtins", "__builtin__", "__builtins__", "commands", "copy_reg")


def _storage_type(name: str, where: str) -> StorageType:
    if name not in _STORAGES:
        raise FormatError(f"{where}: torch.{name} is a kind of storage that is not supported")
    return StorageType(_STORAGES[name])


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
}


class _Function:
    """Something that a pickle may call. Frozen, so that a pickle cannot change what the next one would call."""

    __slots__ = ("_call",)
    _call: Callable[..., Any]

    def __init__(self, call: Callable[..., Any]) -> None:
        object.__setattr__(self, "_call", call)

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise TypeError("a function cannot be changed by a pickle")


class PlainDict(dict[Any, Any]):
    """A dict that ignores attributes set on it, such as the `_metadata` that a module's state dict carries."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        pass


def _ordered_dict(items: Iterable[Any] = ()) -> PlainDict:
    return PlainDict(_checked(items, list, tuple, dict))


def _default_dict(factory: Any = None, items: Iterable[Any] = ()) -> PlainDict:
    return PlainDict(_checked(items, list, tuple, dict))


def _checked(value: Any, *types: type) -> Any:
    if not isinstance(value, types):
        raise TypeError(f"wanted {' or '.join(t.__name__ for t in types)}, got {type(value).__name__}")
    return value


def _bytes_of(text: str = "", encoding: str = "latin1") -> bytes:
    """How protocol 2 writes bytes."""
    if _checked(encoding, str) not in ("latin1", "latin-1"):
        raise TypeError(f"unexpected encoding {encoding!r}")
    return _checked(text, str).encode("latin1")  # type: ignore[no-any-return]


def _bytearray(data: Any = b"", *encoding: str) -> bytearray:
    return bytearray(_bytes_of(data, *encoding) if isinstance(data, str) else _checked(data, bytes))


def _tensor_v2(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any = False, hooks: Any = None, metadata: Any = None
) -> TensorRef:
    return _tensor(storage, offset, size, stride, _checked(storage, StorageRef).dtype, metadata)


def _tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> TensorRef:
    return _tensor(storage, offset, size, stride, dtype_name(_checked(dtype, torch.dtype)), metadata)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, dtype: str | None, metadata: Any) -> TensorRef:
    flags = _checked(metadata, dict) if metadata else {}
    if dtype is None:
        raise TypeError("a tensor over an untyped storage needs a dtype")
    return TensorRef(
        _checked(storage, StorageRef), offset, tuple(_checked(size, tuple)), tuple(_checked(stride, tuple)), dtype,
        conjugate=flags.get("conj") is True, negative=flags.get("neg") is True,
    )  # fmt: skip


def _parameter(data: Any, *rest: Any) -> Any:
    return _checked(data, TensorRef, Record)


def _from_type(function: Any, cls: Any, args: Any, state: Any) -> Any:
    """A tensor subclass: the plain tensor if it is no more than that, else a record of class, arguments and state."""
    if function in (_KNOWN["torch._utils._rebuild_tensor_v2"], _KNOWN["torch._utils._rebuild_tensor_v3"]):
        return function(*_checked(args, tuple))
    if not (isinstance(cls, type) and issubclass(cls, Record)):
        raise TypeError("wanted a class of tensors")
    record = cls(*_checked(args, tuple))
    record.__setstate__(state)
    return record


def _layout(text: Any) -> str:
    return str(_checked(text, str))


def _member(cls: Any, name: Any) -> type[Record]:
    """How protocol 2 names a member of an enum or a nested class. Nothing is looked up: only the two names count."""
    if not (isinstance(cls, type) and issubclass(cls, Record)):
        raise UnsafeDataError("the pickle uses getattr on something that is no class; nothing of it was run")
    if _is_standard(cls.path):
        raise UnsafeDataError(f"the pickle asks for {cls.path}.{name}; nothing of it was run")
    return make_record_type(cls.path, _checked(name, str))


def _reconstruct(cls: Any, base: Any = None, state: Any = None) -> Any:
    """How protocols 0 and 1 make an object."""
    if not (isinstance(cls, type) and issubclass(cls, Record)):
        raise TypeError("wanted a class that became a record")
    return cls()


_OBJECT = make_record_type("builtins", "object")

_KNOWN: dict[str, Any] = {
    # the types of C are immutable, so a pickle can do no more than call them
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
    "collections.defaultdict": _Function(_default_dict),
    "_codecs.encode": _Function(_bytes_of),
    "copyreg._reconstructor": _Function(_reconstruct),
    "builtins.getattr": _Function(_member),
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": _Function(_layout),
    "torch.storage.UntypedStorage": StorageType(None),
    "torch._utils._rebuild_tensor": _Function(_tensor_v2),
    "torch._utils._rebuild_tensor_v2": _Function(_tensor_v2),
    "torch._utils._rebuild_tensor_v3": _Function(_tensor_v3),
    "torch._utils._rebuild_parameter": _Function(_parameter),
    "torch._utils._rebuild_parameter_with_state": _Function(_parameter),
    "torch._tensor._rebuild_from_type_v2": _Function(_from_type),
}
for _name, _new in (("set", "set"), ("frozenset", "frozenset"), ("complex", "complex"), ("slice", "slice")):
    _KNOWN[f"__builtin__.{_name}"] = _KNOWN[f"builtins.{_new}"]  # protocol 2 uses the old names
for _name in ("bytes", "bytearray", "object", "getattr"):
    _KNOWN[f"__builtin__.{_name}"] = _KNOWN[f"builtins.{_name}"]
_KNOWN["__builtin__.xrange"] = range
_KNOWN["copy_reg._reconstructor"] = _KNOWN["copyreg._reconstructor"]

_FACTORIES = ("list", "dict", "tuple", "int", "float", "str", "bool")
"""Types that a defaultdict may name."""

_INERT = frozenset(
    {
        *(f"builtins.{name}" for name in _FACTORIES),
        *(f"__builtin__.{name}" for name in _FACTORIES),
        "_io.BytesIO",
        "argparse.Namespace",
        "types.SimpleNamespace",
        "collections.deque",
        "datetime.date",
        "datetime.datetime",
        "datetime.time",
        "datetime.timedelta",
        "datetime.timezone",
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
"""Classes of the standard library that are mere data, and found in checkpoints: they become records."""
