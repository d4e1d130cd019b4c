"""Memory of the simulated device, and pinned memory of the host: how much of it there is, and what goes wrong."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import mmap
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Watch", "allocate", "fault", "hidden", "is_pinned", "on_free", "pinned", "saw", "watch"]

RESERVED_BYTES = 64 << 30
"""Of addresses. None is given twice, so that what is used after it was freed is seen."""
GARBAGE = 0xA5
"""What new memory holds."""
_ALIGN_BYTES = 512
_nbytes = torch.UntypedStorage.nbytes


@dataclass
class Watch:
    """What happened while it was watched."""

    faults: list[str] = field(default_factory=list)
    """What a real device would have punished with wrong bits."""
    blocking: Counter[str] = field(default_factory=Counter)
    """Calls for which the host waited, by kind."""
    peak: Counter[str] = field(default_factory=Counter)
    """Bytes at most, beside those that were there before: "pinned" and "device"."""
    copied: Counter[str] = field(default_factory=Counter)
    """Bytes between device and host, by direction: "to device" and "to host"."""


class _Books:
    """What is allocated now, and who watches."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.watches: list[tuple[Watch, Counter[str]]] = []
        self.alive: dict[int, tuple[Any, ...]] = {}  # of each address: its structure, what it points to, kind, bytes
        self.on_free: list[Any] = []


_books = _Books()


@contextlib.contextmanager
def watch() -> Iterator[Watch]:
    """See `Watch`."""
    entry = Watch(), Counter(_books.held)
    _books.watches.append(entry)
    try:
        yield entry[0]
    finally:
        _books.watches.remove(entry)


def fault(what: str) -> None:
    """Tell all who watch."""
    for seen, _ in _books.watches:
        seen.faults.append(what)


def saw(kind: str, nbytes: int | None = None) -> None:
    """Tell all who watch of a blocking call, or of bytes copied."""
    for seen, _ in _books.watches:
        if nbytes is None:
            seen.blocking[kind] += 1
        else:
            seen.copied[kind] += nbytes


def on_free(call: Any) -> None:
    """`call(start, stop, stream)` is told of device memory that is freed, and on which stream it was made."""
    _books.on_free.append(call)


# --- tensors from addresses, by the structures of DLPack ---


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _DType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


_KINDS = {"pinned": 1, "device": 12}
"""In DLPack's numbers: memory of the CPU, and of a device that is none of those it knows."""
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


@_Deleter
def _freed(managed: int) -> None:
    at = _Managed.from_address(managed).tensor.data or 0
    _, (*_, owner), kind, nbytes = _books.alive.pop(at)
    _books.held[kind] -= nbytes
    if kind == "device":
        for call in _books.on_free:
            call(at, at + nbytes, owner)


@atexit.register
def _let_live() -> None:
    """What is alive now dies when nobody can be called any more."""
    for managed, *_ in _books.alive.values():
        managed.deleter = _Deleter()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(managed))


def _tensor_at(address: int, nbytes: int, kind: str, owner: Any = None) -> torch.Tensor:
    shape, strides = (ctypes.c_int64 * 1)(nbytes), (ctypes.c_int64 * 1)(1)
    managed = _Managed(_Tensor(address, _Device(_KINDS[kind], 0), 1, _DType(1, 8, 1), shape, strides, 0), None, _freed)
    _books.alive[address] = managed, (shape, strides, owner), kind, nbytes
    _books.held[kind] += nbytes
    for seen, before in _books.watches:
        seen.peak[kind] = max(seen.peak[kind], _books.held[kind] - before[kind])
    return torch.utils.dlpack.from_dlpack(_capsule(ctypes.addressof(managed), b"dltensor", None))


# --- the device ---


def _reserve() -> int:
    """Addresses that nobody may touch."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    no_access, private_and_empty = 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
    return int(libc.mmap(None, RESERVED_BYTES, no_access, private_and_empty, -1, 0))


class _Arena:
    def __init__(self) -> None:
        self.base = _reserve()
        pages = mmap.mmap(-1, RESERVED_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
        self.bytes = torch.frombuffer(pages, dtype=torch.uint8)
        self.used = 0


_arena: list[_Arena] = []
_one_at_a_time = threading.Lock()


def _the_arena() -> _Arena:
    if not _arena:
        _arena.append(_Arena())
    return _arena[0]


def allocate(nbytes: int, stream: Any) -> torch.Tensor:
    """New memory of the device as a tensor of bytes, made on a stream; it holds garbage."""
    with _one_at_a_time:  # two threads must not get the same address
        arena = _the_arena()
        start = arena.used
        arena.used += -(-max(nbytes, 1) // _ALIGN_BYTES) * _ALIGN_BYTES
    if arena.used > RESERVED_BYTES:
        raise torch.OutOfMemoryError("the simulated device has given all its addresses")
    arena.bytes[start : start + nbytes].fill_(GARBAGE)
    return _tensor_at(arena.base + start, nbytes, "device", stream)


def hidden(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor of the device stands for, as one of the CPU: for kernels, when they run."""
    storage, arena = tensor.untyped_storage(), _the_arena()
    start = storage.data_ptr() - arena.base if _nbytes(storage) else 0
    whole = arena.bytes[start : start + _nbytes(storage) // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
    found = whole.as_strided(tensor.size(), tensor.stride(), whole.storage_offset() + tensor.storage_offset())
    found = found.conj() if tensor.is_conj() else found
    return torch._neg_view(found) if tensor.is_neg() else found


# --- the host ---


def pinned(nbytes: int) -> torch.Tensor:
    """Memory of the host that the device can copy from and to while the host does something else."""
    memory = bytearray(b"\xa5") * max(nbytes, 1)
    owner = (ctypes.c_char * len(memory)).from_buffer(memory)
    return _tensor_at(ctypes.addressof(owner), nbytes, "pinned", owner)


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in such memory."""
    found = _books.alive.get(tensor.untyped_storage().data_ptr())
    return found is not None and found[2] == "pinned"
