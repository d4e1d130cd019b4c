"""From devices: elements one behind another in pinned memory, one piece of it being filled while another is written.

lane   slot 0 filled ......... slot 1 filled ......... slot 0 filled
host                  slot 0 written ......... slot 1 written
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from reshard.state.memory.arrays import as_array, row_major_bytes
from reshard.state.memory.lanes import Event, Lane, Lanes, pinned

__all__ = ["BLOCK_BYTES", "HostMemory", "fetch", "row_major_pieces"]

BLOCK_BYTES = 1 << 30
"""Of pinned memory that is kept from save to save."""


def row_major_pieces(tensors: Sequence[torch.Tensor], lanes: Lanes, stage_bytes: int) -> Iterator[memoryview]:
    """The elements of all tensors, each in row-major order, one tensor behind another; a piece holds until the next one
    is asked for.

    With at most `stage_bytes` of copies where they do not lie so in the memory of the CPU. Larger elements come before
    smaller ones, so that all are aligned.
    """
    on_lanes = sum(tensor.nbytes for tensor in tensors if lanes[tensor.device] is not None)
    ring = _Ring(max(min(stage_bytes // 2, on_lanes), 16))
    for tensor in tensors:
        lane = lanes[tensor.device]
        if lane is None:
            yield from ring.flush()
            yield from _of_host(tensor, stage_bytes // 2)  # one is written while the next one is made
            continue
        for piece in _in_pieces(tensor, ring.slot_bytes):
            yield from ring.add(piece, lane)
    yield from ring.flush()


def _of_host(tensor: torch.Tensor, stage_bytes: int) -> Iterator[memoryview]:
    plain = not tensor.is_conj() and not tensor.is_neg()
    if tensor.device.type == "cpu" and tensor.is_contiguous() and plain and tensor.numel():
        yield row_major_bytes(as_array(tensor))
        return
    for piece in _in_pieces(tensor, stage_bytes):
        yield row_major_bytes(as_array(piece.cpu()))


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
    """Pinned memory for whole saves, kept for the next ones: as much as ever was in use at a time, and no more.

    In blocks, since torch rounds each up to a power of two: beside tensors that are larger than one, little is lost.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, sizes: Sequence[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Room for each of so many bytes, one behind another within blocks; and the blocks, to be given back."""
        rooms: list[torch.Tensor] = []
        blocks: list[torch.Tensor] = []
        for together in _blocks(sizes):
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
        return pinned(nbytes)

    def give(self, blocks: Iterable[torch.Tensor]) -> None:
        """Back, when nobody uses them any more."""
        with self._lock:
            self._free.extend(blocks)


def _blocks(sizes: Iterable[int]) -> Iterator[list[int]]:
    """Sizes in order, as many together as a block holds."""
    together: list[int] = []
    total = 0
    for size in sizes:
        if together and total + size > BLOCK_BYTES:
            yield together
            together, total = [], 0
        together.append(size)
        total += size
    if together:
        yield together


def fetch(tensors: Iterable[torch.Tensor], lanes: Lanes, rooms: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors on devices with lanes, each in its room on the host. They are there when the lanes are: wait
    for those. Larger elements come before smaller ones, so that all are aligned."""
    found = []
    for tensor, room in zip(tensors, rooms, strict=True):
        lane = lanes[tensor.device]
        assert lane is not None
        _ask(tensor, room, lane)
        found.append(room.view(tensor.dtype).view(tensor.shape))
    return found
