"""Copies between the host and devices, through pinned memory, on separate streams."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from planners.geometry.arrays import Array
from reshard.live.dtypes import PLAIN, as_array, is_resolved, item_dtype, resolved, row_major_bytes
from reshard.live.garbage_collection import gc_paused

# Of any accelerator that torch knows: all is asked of the device module of a tensor's own device
# (`torch.cuda`, `torch.xpu`, ...). Devices whose module has no streams are waited for once, and
# then copied to and from as memory is.


_log = logging.getLogger("reshard")


class StreamEvent(Protocol):
    """The work of a stream up to some point."""

    def synchronize(self) -> None:
        """Let the host wait until the work is done."""


def pinned(nbytes: int) -> torch.Tensor:
    """Allocate memory of the host, as bytes, with which devices can copy while the host continues.

    If the system provides no pinned memory, this is ordinary memory: copies are correct, but
    slower, and a warning is logged.
    """
    try:
        return _pin(nbytes)
    except RuntimeError as error:
        _log.warning("no pinned memory of %d bytes, so copies to and from devices are slow: %s", nbytes, error)
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _pin(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def device_module(device: torch.device) -> Any:
    """Return torch's module for such devices. None for the CPU, and for devices that other
    libraries know how to wait for."""
    try:
        return None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    except RuntimeError:  # such as "xla" has none
        return None


def has_copy_streams(device: torch.device) -> bool:
    """Return True if the device executes its work on streams."""
    return hasattr(device_module(device), "Stream")


def wait_for(device: torch.device) -> None:
    """Wait until a device, current or not, has done all queued work."""
    module = device_module(device)
    if hasattr(module, "Stream"):
        module.synchronize(device)
    elif module is not None:
        module.synchronize()


_unused: defaultdict[torch.device, list[Any]] = defaultdict(list)
"""Streams of lanes that have ended. Allocators keep freed memory for the stream on which it was
allocated. If each lane made a new stream, the memory of each would stay allocated."""


class CopyStream:
    """A separate stream of a device. Its work starts after all earlier work of the caller's stream."""

    def __init__(self, device: torch.device) -> None:
        """Create it on the thread, and under the current stream, that it must follow."""
        self._module: Any = device_module(device)
        try:
            self._stream = _unused[device].pop()
        except IndexError:
            self._stream = self._module.Stream(device)
        weakref.finalize(self, _unused[device].append, self._stream).atexit = False
        self._device = device
        self.follow()

    def follow(self) -> None:
        """Let later work of this lane wait for all earlier work of the calling thread's stream."""
        self._stream.wait_event(self._module.current_stream(self._device).record_event())

    def lead(self) -> None:
        """Let later work of the calling thread's stream wait for all earlier work of this lane."""
        self._module.current_stream(self._device).wait_event(self._stream.record_event())

    def use(self) -> AbstractContextManager[Any]:
        """Within this context, work of this thread for the device runs on this stream."""
        context: AbstractContextManager[Any] = self._module.stream(self._stream)
        return context

    def mark(self) -> StreamEvent:
        """Return an event for the work that was submitted so far."""
        event: StreamEvent = self._stream.record_event()
        return event

    def wait(self) -> None:
        """Wait until all submitted work is done."""
        self._stream.synchronize()


class CopyStreams:
    """A copy stream for each device that has streams. All start at the moment when this is made.

    Make it before other threads touch tensors. A thread starts on the default stream, so if the
    caller uses another one, neither waits for the other: a save would read values that are still
    being computed, and a load would overwrite what a running kernel reads. The constructor waits
    for devices without streams.
    """

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self._lanes: dict[torch.device, CopyStream] = {}
        for device in dict.fromkeys(devices):
            if device.type == "cpu":  # devices on which every call has finished when it returns
                continue
            if has_copy_streams(device):
                self._lanes[device] = CopyStream(device)
            else:
                wait_for(device)

    def __getitem__(self, device: torch.device) -> CopyStream | None:
        """Return None for a device without streams."""
        return self._lanes.get(device)

    def follow(self, device: torch.device) -> CopyStream:
        """Return the copy stream of a device, after the work that the calling thread's stream has so far."""
        lane = self._lanes.get(device)
        if lane is None:
            lane = self._lanes[device] = CopyStream(device)
        else:
            lane.follow()
        return lane

    @contextmanager
    def use_all(self) -> Iterator[None]:
        """Use the lanes of all devices, as `CopyStream.use` does."""
        with ExitStack() as stack:
            for lane in self._lanes.values():
                stack.enter_context(lane.use())
            yield

    def wait(self) -> None:
        """Wait until all work that was submitted to any of them is done."""
        for lane in self._lanes.values():
            lane.wait()


def of_caller() -> CopyStreams:
    """Return copy streams that start after the caller's stream of the current device, if this
    process has used one. For threads that get tensors later. For other devices, they must
    `wait_for` all submitted work."""
    kind = torch.accelerator.current_accelerator()
    module = torch.cpu if kind is None else torch.get_device_module(kind)
    if kind is None or not has_copy_streams(kind) or not module.is_initialized():
        return CopyStreams()
    return CopyStreams([torch.device(kind.type, module.current_device())])


# To devices: what the host reads goes into a ring of pinned memory, and on while the next piece is
# read.
#
#     read 0 -> slot 0 ... copy to the device ... strided kernel
#     read 1 -> slot 1      ... copy to the device ... strided kernel
#     read 2 ....................... waits until slot 0 has arrived, -> slot 0


@dataclass
class _UploadSlot:
    memory: torch.Tensor | None = None
    arrived: StreamEvent | None = None


class Uploads(AbstractContextManager["Uploads"]):
    """A ring of `slots` pieces of pinned memory, made when they are first needed. Any thread may
    put; a context: when it is left, everything has arrived, and the memory is free.

    Args:
        slots: at least one for each thread that puts, so that none waits for another.
        slot_bytes: the largest piece.
    """

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._free: queue.Queue[_UploadSlot] = queue.Queue()
        for _ in range(slots):
            self._free.put(_UploadSlot())
        self._devices: set[torch.device] = set()
        self._lanes = CopyStreams()

    def __exit__(self, *_: object) -> None:
        self._lanes.wait()
        self._free = queue.Queue()

    def take_in(self, device: torch.device) -> bool:
        """Return True if pieces for this device are uploaded this way. Call it before `begin`."""
        self._devices.add(device)
        return has_copy_streams(device)

    def begin(self) -> None:
        """Let later uploads wait for the earlier work on the caller's streams. Call it on the caller's thread."""
        self._lanes = CopyStreams(self._devices)

    @contextmanager
    def in_order(self, device: torch.device) -> Iterator[None]:
        """Within this context, uploads wait for earlier work of the caller's stream, and its later
        work waits for them. For a device that was not known at `begin`."""
        lane = self._lanes.follow(device)
        yield
        lane.lead()

    def put(
        self, target: torch.Tensor, saved: torch.dtype, sizes: Sequence[int], read: Callable[[Array], None]
    ) -> None:
        """Let `read` fill an array of `sizes`. Its elements, of dtype `saved`, then go into
        `target`.

        They are transferred unchanged, as one run. If the target is strided, has another dtype, or
        is lazily conjugated, the device converts them.
        """
        lane = self._lanes[target.device]
        assert lane is not None, f"{target.device} was not taken in"
        slot = self._free.get()
        try:
            if slot.arrived is not None:
                slot.arrived.synchronize()
            slot.arrived = None
            if slot.memory is None:
                slot.memory = pinned(self.slot_bytes)
            whole = slot.memory[: target.numel() * saved.itemsize]
            read(np.ndarray(sizes, item_dtype(saved.itemsize), whole.numpy()))
            slot.arrived = _send(whole.view(saved).view(list(sizes)), target, lane)
        finally:
            self._free.put(slot)


def _send(elements: torch.Tensor, target: torch.Tensor, lane: CopyStream) -> StreamEvent:
    as_is = target.dtype == elements.dtype and target.is_contiguous() and is_resolved(target)
    # torch writes to an inference tensor only within this mode; outside it, a write counts as a
    # change for autograd
    with torch.inference_mode() if target.is_inference() else torch.no_grad(), lane.use():
        if as_is:
            target.copy_(elements, non_blocking=True)
        else:
            target.copy_(torch.empty_like(elements, device=target.device).copy_(elements, non_blocking=True))
        return lane.mark()


# From devices: elements one after another in pinned memory, one piece of it being filled while
# another is written.
#
#     lane   slot 0 filled ......... slot 1 filled ......... slot 0 filled
#     host                  slot 0 written ......... slot 1 written


T = TypeVar("T")

BLOCK_BYTES = 1 << 30
"""Size of pinned memory that is kept from one save to the next."""
ALIGNED_BYTES = 64
"""One cache line."""
_SMALL_BYTES, _TOGETHER_BYTES = 16 << 10, 256 << 10
_JOINED = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8)
STAGE_BYTES = 64 << 20
"""Size of pinned memory through which tensors for the caller are copied to the host."""


def row_major_pieces(tensors: Sequence[torch.Tensor], lanes: CopyStreams, stage_bytes: int) -> Iterator[memoryview]:
    """Yield the elements of all tensors, each in row-major order, one tensor after another. A piece
    is valid until you request the next one.

    Elements that are not in this order in CPU memory are copied, at most `stage_bytes` at a time.
    Larger elements come before smaller ones, so that all are aligned.
    """
    on_lanes = sum(tensor.nbytes for tensor in tensors if lanes[tensor.device] is not None)
    ring = _Ring(max(min(stage_bytes // 2, on_lanes), 16))
    for some in batches(tensors, lambda tensor: tensor.nbytes, _TOGETHER_BYTES, _small_kind):
        if len(some) > 1 and _small_kind(some[0]) is not None:
            yield from ring.flush()
            with gc_paused(), torch.no_grad():
                joined = torch.cat([tensor if tensor.ndim == 1 else tensor.view(-1) for tensor in some])
            yield row_major_bytes(as_array(joined))
            continue
        for tensor in some:
            lane = lanes[tensor.device]
            if lane is None:
                yield from ring.flush()
                yield from _of_host(tensor, stage_bytes // 2)  # one is written while the next one is made
                continue
            for piece in _in_pieces(tensor, ring.slot_bytes):
                yield from ring.add(piece, lane)
    yield from ring.flush()


def _small_kind(tensor: torch.Tensor) -> torch.dtype | None:
    """Return the dtype of a tensor on the host that is in row-major order and so small that the
    call would cost more than the copy. None for other tensors. torch can join tensors of these
    dtypes."""
    small = tensor.is_cpu and 0 < tensor.nbytes <= _SMALL_BYTES and tensor.dtype in _JOINED
    plain = small and tensor.is_contiguous() and is_resolved(tensor)
    return tensor.dtype if plain and type(tensor) in PLAIN else None


def _of_host(tensor: torch.Tensor, stage_bytes: int) -> Iterator[memoryview]:
    if tensor.is_cpu and tensor.is_contiguous() and is_resolved(tensor) and tensor.numel():
        yield row_major_bytes(as_array(tensor))
        return
    for piece in _in_pieces(tensor, stage_bytes):
        there = piece if piece.is_cpu else piece.contiguous()  # put in row-major order on its device
        yield row_major_bytes(as_array(there.cpu()))


def _in_pieces(tensor: torch.Tensor, limit_bytes: int) -> Iterator[torch.Tensor]:
    """Split the tensor into rows, and rows of rows, of at most this many bytes, or of one element."""
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        return
    if tensor.ndim == 0 or nbytes <= limit_bytes or max(tensor.shape) == 1:
        yield tensor
        return
    rows = limit_bytes * tensor.shape[0] // nbytes
    for start in range(0, tensor.shape[0], max(rows, 1)):
        if rows:
            yield tensor[start : start + rows]
        else:  # one row alone is too large
            yield from _in_pieces(tensor[start], limit_bytes)


@dataclass
class _DownloadSlot:
    memory: torch.Tensor
    used: int = 0
    lane: CopyStream | None = None
    filled: StreamEvent | None = None


@dataclass
class _Ring:
    """Two pieces of pinned memory, made when they are first needed."""

    slot_bytes: int
    _free: list[_DownloadSlot] = field(default_factory=list)
    _filling: _DownloadSlot | None = None
    _under_way: deque[_DownloadSlot] = field(default_factory=deque)

    def add(self, piece: torch.Tensor, lane: CopyStream) -> Iterator[memoryview]:
        """Request a piece. Yields earlier pieces, which you must consume to free their slots."""
        slot = self._filling
        if slot is not None and (slot.lane is not lane or slot.used + piece.nbytes > self.slot_bytes):
            self._close(slot)
        if self._filling is None:
            if len(self._under_way) == 2:
                yield from self._take()
            self._filling = self._free.pop() if self._free else _DownloadSlot(pinned(self.slot_bytes))
            self._filling.lane = lane
        slot = self._filling
        _ask(piece, slot.memory[slot.used : slot.used + piece.nbytes], lane)
        slot.used += piece.nbytes

    def flush(self) -> Iterator[memoryview]:
        """Yield everything that was requested."""
        if self._filling is not None:
            self._close(self._filling)
        while self._under_way:
            yield from self._take()

    def _close(self, slot: _DownloadSlot) -> None:
        assert slot.lane is not None
        slot.filled = slot.lane.mark()
        self._under_way.append(slot)
        self._filling = None

    def _take(self) -> Iterator[memoryview]:
        slot = self._under_way.popleft()
        assert slot.filled is not None
        slot.filled.synchronize()
        yield slot.memory[: slot.used].numpy().data
        slot.used = 0
        self._free.append(slot)


def _ask(elements: torch.Tensor, room: torch.Tensor, lane: CopyStream) -> None:
    """Copy elements in row-major order into bytes of the host. The device puts strided ones in
    order first."""
    with torch.no_grad(), lane.use():
        plain = resolved(elements).contiguous()
        room.view(plain.dtype).view(plain.shape).copy_(plain, non_blocking=True)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED_BYTES) * ALIGNED_BYTES


class HostMemory:
    """Memory for complete saves, kept for the next ones. It holds the most that was ever in use at
    a time. It is allocated in blocks, because torch rounds pinned memory up to a power of two. This
    wastes little, except for tensors larger than a block."""

    def __init__(self, make: Callable[[int], torch.Tensor] = pinned) -> None:
        """`make` allocates memory of a given number of bytes."""
        self._make = make
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, sizes: Sequence[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return memory for each of these sizes, consecutive within blocks and aligned to cache
        lines, and the blocks, which you must give back."""
        rooms: list[torch.Tensor] = []
        blocks: list[torch.Tensor] = []
        for together in batches(sizes, _aligned, BLOCK_BYTES):
            block, at = self._block(sum(map(_aligned, together))), 0
            for size in together:
                rooms.append(block[at : at + size])
                at += _aligned(size)
            blocks.append(block)
        return rooms, blocks

    def _block(self, nbytes: int) -> torch.Tensor:
        """Return the smallest kept block that fits, or replace one that does not."""
        with self._lock:
            fits = [i for i, memory in enumerate(self._free) if memory.numel() >= nbytes]
            if fits:
                return self._free.pop(min(fits, key=lambda i: self._free[i].numel()))
            if self._free:
                self._free.pop()
        return self._make(nbytes)

    def give(self, blocks: Iterable[torch.Tensor]) -> None:
        """Take back blocks that are no longer used."""
        with self._lock:
            self._free.extend(blocks)


def batches(
    items: Iterable[T], nbytes: Callable[[T], int], limit_bytes: int, kind: Callable[[T], object] = lambda _: None
) -> Iterator[list[T]]:
    """Group items, in order: as many of one `kind` as fit into `limit_bytes`. A larger item is alone."""
    batch: list[T] = []
    total, kind_of_batch = 0, None
    for item in items:
        size, own = nbytes(item), kind(item)
        if batch and (total + size > limit_bytes or own != kind_of_batch):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
        kind_of_batch = own
    if batch:
        yield batch


def fetch(tensors: Iterable[torch.Tensor], lanes: CopyStreams, rooms: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors on devices into their memory on the host. The copies are complete only after you
    wait for the streams."""
    found = []
    for tensor, room in zip(tensors, rooms, strict=True):
        lane, at = lanes[tensor.device], 0
        assert lane is not None
        # for strided tensors, the device needs memory for what is put in order at once
        for piece in [tensor] if tensor.is_contiguous() else _in_pieces(tensor, STAGE_BYTES):
            _ask(piece, room[at : at + piece.nbytes], lane)
            at += piece.nbytes
        found.append(room.view(tensor.dtype).view(tensor.shape))
    return found


def to_host(tensors: Sequence[torch.Tensor], stage_bytes: int = STAGE_BYTES) -> list[torch.Tensor]:
    """Return each tensor on the host, in ordinary memory: a copy of a tensor on a device, or the
    tensor itself if it is on the host.

    The device fills one piece of pinned memory while another one is emptied, for all tensors
    together. Strided and lazily conjugated tensors, and subclasses, are copied by torch.
    """
    lanes = CopyStreams(tensor.device for tensor in tensors)
    numbers = [i for i, tensor in enumerate(tensors) if lanes[tensor.device] is not None and _is_plain(tensor)]
    numbers.sort(key=lambda i: -tensors[i].itemsize)
    sent = set(numbers)
    out = [
        torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") if i in sent else tensor.cpu()
        for i, tensor in enumerate(tensors)
    ]
    rooms = deque(row_major_bytes(as_array(out[i])) for i in numbers)
    for piece in row_major_pieces([tensors[i] for i in numbers], lanes, stage_bytes):
        while piece:
            taken = min(len(piece), len(rooms[0]))
            rooms[0][:taken] = piece[:taken]
            piece, rooms[0] = piece[taken:], rooms[0][taken:]
            if not rooms[0]:
                rooms.popleft()
    return out


def _is_plain(tensor: torch.Tensor) -> bool:
    if type(tensor) is not torch.Tensor:  # first: ShardedTensors of some releases answer nothing else
        return False
    return tensor.is_contiguous() and tensor.numel() > 0 and is_resolved(tensor)
