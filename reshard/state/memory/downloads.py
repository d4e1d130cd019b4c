"""From devices: elements one behind another in pinned memory, one piece of it being filled while another is written.

lane   slot 0 filled ......... slot 1 filled ......... slot 0 filled
host                  slot 0 written ......... slot 1 written
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from reshard.state.garbage import uncollected
from reshard.state.memory.arrays import as_array, row_major_bytes
from reshard.state.memory.lanes import Event, Lane, Lanes, pinned

__all__ = ["BLOCK_BYTES", "HostMemory", "batches", "fetch", "row_major_pieces", "to_host"]

T = TypeVar("T")

BLOCK_BYTES = 1 << 30
"""Of pinned memory that is kept from save to save."""
_SMALL_BYTES, _TOGETHER_BYTES = 16 << 10, 256 << 10
_JOINED = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8)
STAGE_BYTES = 64 << 20
"""Of pinned memory through which what is for the caller comes to the host."""


def row_major_pieces(tensors: Sequence[torch.Tensor], lanes: Lanes, stage_bytes: int) -> Iterator[memoryview]:
    """The elements of all tensors, each in row-major order, one tensor behind another; a piece holds until the next one
    is asked for.

    With at most `stage_bytes` of copies where they do not lie so in the memory of the CPU. Larger elements come before
    smaller ones, so that all are aligned.
    """
    on_lanes = sum(tensor.nbytes for tensor in tensors if lanes[tensor.device] is not None)
    ring = _Ring(max(min(stage_bytes // 2, on_lanes), 16))
    for some in batches(tensors, lambda tensor: tensor.nbytes, _TOGETHER_BYTES, _small_kind):
        if len(some) > 1 and _small_kind(some[0]) is not None:
            yield from ring.flush()
            yield row_major_bytes(as_array(_joined(some)))
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


@uncollected()
def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One behind another, in memory of its own."""
    return torch.cat([tensor.detach().view(-1) for tensor in tensors])


def _small_kind(tensor: torch.Tensor) -> torch.dtype | None:
    """The dtype of what lies on the host as it is to be written and is so small that the call would cost more than the
    copy; None for others. Of these dtypes torch joins all."""
    small = tensor.device.type == "cpu" and 0 < tensor.nbytes <= _SMALL_BYTES and tensor.dtype in _JOINED
    plain = small and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return tensor.dtype if plain and type(tensor) in (torch.Tensor, torch.nn.Parameter) else None


def _of_host(tensor: torch.Tensor, stage_bytes: int) -> Iterator[memoryview]:
    plain = not tensor.is_conj() and not tensor.is_neg()
    if tensor.device.type == "cpu" and tensor.is_contiguous() and plain and tensor.numel():
        yield row_major_bytes(as_array(tensor))
        return
    for piece in _in_pieces(tensor, stage_bytes):
        there = piece if piece.device.type == "cpu" else piece.contiguous()  # put in order where it is
        yield row_major_bytes(as_array(there.cpu()))


def _in_pieces(tensor: torch.Tensor, limit_bytes: int) -> Iterator[torch.Tensor]:
    """The tensor cut into rows, and rows of rows, of at most so many bytes or one element."""
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
class _Slot:
    memory: torch.Tensor
    used: int = 0
    lane: Lane | None = None
    filled: Event | None = None


class _Ring:
    """Two pieces of pinned memory, made when they are first needed."""

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._free: list[_Slot] = []
        self._filling: _Slot | None = None
        self._under_way: deque[_Slot] = deque()

    def add(self, piece: torch.Tensor, lane: Lane) -> Iterator[memoryview]:
        """Ask for a piece; gives what has come before it and must be taken to make room."""
        slot = self._filling
        if slot is not None and (slot.lane is not lane or slot.used + piece.nbytes > self.slot_bytes):
            self._close(slot)
        if self._filling is None:
            if len(self._under_way) == 2:
                yield from self._take()
            self._filling = self._empty_slot()
            self._filling.lane = lane
        slot = self._filling
        _ask(piece, slot.memory[slot.used : slot.used + piece.nbytes], lane)
        slot.used += piece.nbytes

    def flush(self) -> Iterator[memoryview]:
        """Everything that was asked for."""
        if self._filling is not None:
            self._close(self._filling)
        while self._under_way:
            yield from self._take()

    def _empty_slot(self) -> _Slot:
        if self._free:
            return self._free.pop()
        return _Slot(pinned(self.slot_bytes))

    def _close(self, slot: _Slot) -> None:
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


def _ask(elements: torch.Tensor, room: torch.Tensor, lane: Lane) -> None:
    """Elements in row-major order into bytes of the host: strided ones are put in order on the device."""
    with torch.no_grad(), lane.use():
        plain = elements.resolve_conj().resolve_neg().contiguous()
        room.view(plain.dtype).view(plain.shape).copy_(plain, non_blocking=True)


class HostMemory:
    """Memory for whole saves, kept for the next ones: as much as ever was in use at a time, and no more.

    In blocks, since torch rounds pinned ones up to a power of two: beside tensors that are larger than one, little is
    lost.
    """

    def __init__(self, make: Callable[[int], torch.Tensor] = pinned) -> None:
        """`make` gives new memory of so many bytes."""
        self._make = make
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, sizes: Sequence[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Room for each of so many bytes, one behind another within blocks; and the blocks, to be given back."""
        rooms: list[torch.Tensor] = []
        blocks: list[torch.Tensor] = []
        for together in batches(sizes, int, BLOCK_BYTES):
            block, at = self._block(sum(together)), 0
            for size in together:
                rooms.append(block[at : at + size])
                at += size
            blocks.append(block)
        return rooms, blocks

    def _block(self, nbytes: int) -> torch.Tensor:
        """The smallest that fits, or new memory in the place of some that does not."""
        with self._lock:
            fits = [i for i, memory in enumerate(self._free) if memory.numel() >= nbytes]
            if fits:
                return self._free.pop(min(fits, key=lambda i: self._free[i].numel()))
            if self._free:
                self._free.pop()
        return self._make(nbytes)

    def give(self, blocks: Iterable[torch.Tensor]) -> None:
        """Back, when nobody uses them any more."""
        with self._lock:
            self._free.extend(blocks)


def batches(
    items: Iterable[T], nbytes: Callable[[T], int], limit_bytes: int, kind: Callable[[T], object] = lambda _: None
) -> Iterator[list[T]]:
    """Items in order, as many of one `kind` together as `limit_bytes` holds; what is larger is alone."""
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


def fetch(tensors: Iterable[torch.Tensor], lanes: Lanes, rooms: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors on devices with lanes, each in its room on the host. They are there when the lanes are: wait
    for those. Larger elements come before smaller ones, so that all are aligned."""
    found = []
    for tensor, room in zip(tensors, rooms, strict=True):
        lane, at = lanes[tensor.device], 0
        assert lane is not None
        # what is strided takes as much of the device as it is put in order at once
        for piece in [tensor] if tensor.is_contiguous() else _in_pieces(tensor, STAGE_BYTES):
            _ask(piece, room[at : at + piece.nbytes], lane)
            at += piece.nbytes
        found.append(room.view(tensor.dtype).view(tensor.shape))
    return found


def to_host(tensors: Sequence[torch.Tensor], stage_bytes: int = STAGE_BYTES) -> list[torch.Tensor]:
    """Each on the host, in common memory: a copy of what lies on a device, and itself what lies here already.

    One piece of pinned memory is filled by the device while another is emptied here; then they change places, for all
    tensors together. Strided tensors, lazily conjugated ones and subclasses are copied by torch.
    """
    lanes = Lanes(tensor.device for tensor in tensors)
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
    lazily = tensor.is_conj() or tensor.is_neg()
    return type(tensor) is torch.Tensor and tensor.is_contiguous() and tensor.numel() > 0 and not lazily
