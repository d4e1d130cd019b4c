"""Makes torch know the device: each operation on its tensors is asked of the current stream, and runs with it."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import xxhash
from torch.utils._pytree import tree_map_only

from reshard.live import copy_streams
from tests.simulated import memory, streams
from tests.simulated.memory import allocate, fault, hidden, is_pinned, saw

__all__ = ["NAME", "install"]

NAME = "sim"
_aten = torch.ops.aten
_POISON = 0xDB
_library: list[torch.library.Library] = []


class _Module:
    """What torch calls the device module, as `torch.cuda` is one."""

    Stream, Event = streams.Stream, streams.Event
    stream, current_stream = staticmethod(streams.use), staticmethod(streams.current)

    @staticmethod
    def synchronize(device: Any = None) -> None:
        saw("synchronize")
        streams.run_all()

    @staticmethod
    def is_available() -> bool:
        return True

    is_initialized = is_available

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def set_device(device: Any) -> None:
        pass

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    @staticmethod
    def device(device: Any) -> Any:
        return contextlib.nullcontext()

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        pass

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False


def install() -> None:
    """Register the device with torch, for as long as the process lives. Its pinned memory becomes the library's."""
    if _library:
        return
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME, _Module())
    copy_streams._pin = memory.pinned
    library = torch.library.Library("_", "IMPL")
    library.fallback(_kernel, "PrivateUse1")
    copying = torch.library.Library("aten", "IMPL")
    for lazily in ("Conjugate", "Negative"):  # copies resolve these themselves; to resolve them first takes a copy
        copying.impl("_copy_from", torch.library.fallthrough_kernel, lazily)
    _library.extend((library, copying))
    _mend_storages()
    record = torch.Tensor.record_stream
    # it is for allocators that give memory again, and parses streams of torch's own only
    torch.Tensor.record_stream = lambda self, stream: None if self.device.type == NAME else record(self, stream)  # type: ignore[method-assign, assignment]


def _mend_storages() -> None:
    """torch copies bare storages by allocators, which no Python-only backend has."""
    kind, to = torch.UntypedStorage, torch.storage._to
    clone, resize, nbytes = kind.clone, kind.resize_, kind.nbytes
    said: dict[int, int] = {}

    def as_tensor(storage: Any) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def cloned(self: Any) -> Any:
        return as_tensor(self).clone().untyped_storage() if self.device.type == NAME else clone(self)

    def sent(self: Any, device: torch.device, non_blocking: bool = False) -> Any:
        if NAME not in (self.device.type, device.type):
            return to(self, device, non_blocking)
        return as_tensor(self).to(device, non_blocking=non_blocking).untyped_storage()

    def resized(self: Any, size: int) -> Any:
        if self.device.type != NAME:
            return resize(self, size)
        said[self.data_ptr()] = size  # the memory stays: FSDP1 frees so, and looks at the size to see whether it has
        return self

    def told(self: Any) -> int:
        return said.get(self.data_ptr(), nbytes(self)) if self.device.type == NAME else nbytes(self)

    kind.nbytes = kind.size = told  # type: ignore[method-assign]
    kind.resize_ = resized  # type: ignore[method-assign]
    kind.clone, torch.storage._to = cloned, sent  # type: ignore[assignment]
    kind.cpu = lambda self: sent(self, torch.device("cpu"))  # type: ignore[assignment, method-assign]
    setattr(kind, NAME, lambda self, device=None, non_blocking=False: sent(self, torch.device(NAME), non_blocking))


def _kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunction():  # modes of the caller are no business of kernels
        return _dispatched(op, args, kwargs)


def _dispatched(op: Any, args: Any, kwargs: Any) -> Any:
    if op in (_aten.empty.memory_format, _aten.empty_strided.default):
        return _empty(op, *args, **kwargs)
    if op is _aten._copy_from.default:
        return _copy(*args, **kwargs)
    returns = op._schema.returns
    only_views = returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    if only_views or op.overloadpacket is _aten.set_:
        return op._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)  # moves no byte, so it does for any device
    _refuse_other_memory(op, args, kwargs)
    if not any(isinstance(r.type, torch.TensorType) for r in returns) and returns:
        saw(op.name())
        streams.current().run(streams.current().asked)
        return op(*_hidden(args), **_hidden(kwargs))
    return _compute(op, args, kwargs)


def _empty(op: Any, size: list[int], *rest: Any, dtype: Any = None, **kwargs: Any) -> torch.Tensor:
    dtype = dtype or torch.get_default_dtype()
    kwargs = {k: v for k, v in kwargs.items() if k == "memory_format"}
    shape = op(size, *rest, dtype=dtype, device="meta", **kwargs)
    return _allocated(shape)


def _allocated(like: torch.Tensor) -> torch.Tensor:
    """New memory for a tensor of these sizes and strides."""
    numel = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride())) if like.numel() else 0
    whole = allocate(numel * like.itemsize, streams.current()).view(like.dtype)
    return whole.as_strided(like.shape, like.stride())


def _refuse_other_memory(op: Any, args: Any, kwargs: Any) -> None:
    """A device reads single numbers of the host, and no more."""

    def look(tensor: torch.Tensor) -> None:
        if tensor.device.type != NAME and tensor.numel() != 1:
            raise RuntimeError(f"{op}: expected all tensors on {NAME}, but found one on {tensor.device}")

    tree_map_only(torch.Tensor, look, (args, kwargs))


def _hidden(nest: Any) -> Any:
    nest = tree_map_only(torch.Tensor, lambda t: hidden(t) if t.device.type == NAME else t, nest)
    return tree_map_only(torch.device, lambda _: torch.device("cpu"), nest)


def _ranges(*nests: Any) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []

    def note(tensor: torch.Tensor) -> None:
        if tensor.device.type == NAME:
            storage = tensor.untyped_storage()
            found.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))

    tree_map_only(torch.Tensor, note, nests)
    return found


def _compute(op: Any, args: Any, kwargs: Any) -> Any:
    """Make room for the results, and ask the current stream to compute them."""
    args = tuple(_as_tensor(of, arg) for of, arg in zip(op._schema.arguments, args))
    written = [a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments]
    named = {a.name: kwargs.get(a.name, args[i] if i < len(args) else None) for i, a in enumerate(op._schema.arguments)}
    targets = [value for value, is_written in zip(named.values(), written) if is_written]
    if targets:
        _resize(op, targets, args, kwargs)
        here = _hidden(args), _hidden(kwargs)
        streams.current().ask(lambda: _discard(op(*here[0], **here[1])), _ranges(args, kwargs))
        _draw_now(op)
        if not op._schema.returns:
            return None
        return targets[0] if len(op._schema.returns) == 1 else tuple(targets)
    here = _hidden(args), _hidden(kwargs)
    meta = _meta(args, kwargs)
    try:
        out = tree_map_only(torch.Tensor, _allocated, op(*meta[0], **meta[1]))
    except NotImplementedError:  # how large the result is depends on the values, so the host waits for them
        saw(op.name())
        streams.current().run(streams.current().asked)
        return tree_map_only(torch.Tensor, lambda t: t.to(NAME), op(*here[0], **here[1]))
    rooms: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, lambda t: rooms.append(hidden(t)), out)

    def work() -> None:
        results: list[torch.Tensor] = []
        tree_map_only(torch.Tensor, results.append, op(*here[0], **here[1]))
        for room, result in zip(rooms, results, strict=True):
            room.copy_(result)

    streams.current().ask(work, _ranges(args, kwargs, out))
    _draw_now(op)
    return out


def _draw_now(op: Any) -> None:
    """Random numbers come from a generator of the host, which must be asked in the order of the program."""
    if torch.Tag.nondeterministic_seeded in op.tags:
        streams.current().run(streams.current().asked)


def _as_tensor(argument: Any, value: Any) -> Any:
    """Numbers among tensors, which torch hands to Python as numbers."""
    is_number = isinstance(value, (bool, int, float, complex)) and isinstance(argument.type, torch.TensorType)
    return torch.tensor(value) if is_number else value


def _resize(op: Any, targets: list[Any], args: Any, kwargs: Any) -> None:
    """Results that are given as empty tensors take the size that they need."""
    if not any(isinstance(t, torch.Tensor) and not t.numel() for t in targets):
        return
    meta = _meta(args, kwargs)
    found: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, found.append, op(*meta[0], **meta[1]))
    for target, made in zip(targets, found):
        if target.shape != made.shape:
            target.set_(_allocated(made))


def _meta(args: Any, kwargs: Any) -> Any:
    meta = tree_map_only(torch.Tensor, _as_meta, (args, kwargs))
    return tree_map_only(torch.device, lambda _: torch.device("meta"), meta)


def _discard(result: Any) -> None:
    pass


def _as_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Within the device, or between it and the host; the host waits unless its memory is pinned and it need not."""
    stream = streams.current()
    host = source if source.device.type != NAME else target if target.device.type != NAME else None
    of, to = (t if t is host else hidden(t) for t in (source, target))
    ranges = _ranges(source, target)
    if host is None:
        stream.ask(lambda: _discard(to.copy_(of)), ranges)
        return target
    saw("to device" if host is source else "to host", target.nbytes)
    if not (non_blocking and is_pinned(host)):
        saw("blocking copy")
        stream.ask(lambda: _discard(to.copy_(of)), ranges)
        stream.run(stream.asked)
        return target
    span = host.data_ptr(), host.data_ptr() + host.nbytes
    in_line = stream.touches(*span)  # what the stream does before is to see it as it is, and may change it
    if host is target and not in_line:
        _fill(to, _POISON)
    before = None if in_line else _digest(host)

    def work() -> None:
        if before is not None and _digest(host) != before:
            fault("pinned memory was changed while a copy from or to it was under way")
        to.copy_(of)

    stream.ask(work, [*ranges, span])
    return target


def _fill(tensor: torch.Tensor, byte: int) -> None:
    if tensor.is_contiguous() and tensor.numel():
        tensor.view(-1).view(torch.uint8).fill_(byte)


def _digest(tensor: torch.Tensor) -> bytes:
    raw = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    return xxhash.xxh3_128_digest(raw.numpy())
