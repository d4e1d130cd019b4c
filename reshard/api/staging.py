"""Stages what one rank writes: in place, or as a copy that only this save uses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch

from reshard.errors import OptionError
from reshard.live.copy_streams import ALIGNED_BYTES, CopyStreams, HostMemory, fetch, has_copy_streams
from reshard.live.fingerprints import Partial, partials
from reshard.native.data_file import Entry
from reshard.ranks.progress import phase

_log = logging.getLogger("reshard")
_host = HostMemory()
_LARGE_BYTES = 64 << 10


def _new_memory(nbytes: int) -> torch.Tensor:
    """Return new memory, aligned to cache lines. Touching new memory takes several times as long as
    copying into old memory, or a third of that if numpy requests huge pages. Copies to unaligned
    addresses take a quarter longer."""
    memory = np.empty(nbytes + ALIGNED_BYTES, np.uint8)
    begin = -memory.ctypes.data % ALIGNED_BYTES
    return torch.from_numpy(memory[begin : begin + nbytes])


_common = HostMemory(_new_memory)
"""Memory for copies of tensors on the host."""


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class ToWrite:
    """Entries to write, and the streams that copy their elements to the host."""

    entries: Sequence[Entry]
    lanes: CopyStreams
    beside: CopyStreams
    """Streams for fingerprints, which devices compute while other elements are written."""
    prints: dict[str, Partial] = field(default_factory=dict)
    """Fingerprints that were computed earlier, by name of the tensor. These elements may have moved since."""
    summed: frozenset[int] = frozenset()
    """Indices of the entries with these fingerprints."""
    release: Callable[[], None] = _nothing
    """Called when everything is written."""

    @classmethod
    def in_place(cls, entries: Sequence[Entry]) -> ToWrite:
        """Return entries that are written from the tensors' own memory. On return, work that was
        queued on the calling thread's streams is done."""
        devices = {entry.tensor.device for entry in entries}
        return cls(entries, CopyStreams(devices), CopyStreams(devices))

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return sum(entry.tensor.nbytes for entry in self.entries)

    def sum_up(self) -> dict[str, Partial]:
        """Return what the entries contribute to the fingerprints of their tensors, by name."""
        out = dict(self.prints)
        rest = [entry for i, entry in enumerate(self.entries) if i not in self.summed]
        with phase("fingerprints"):
            for device in dict.fromkeys(entry.tensor.device for entry in rest):
                here = [entry for entry in rest if entry.tensor.device == device]
                lane = self.beside[device]
                with nullcontext() if lane is None else lane.use():
                    found = partials((entry.tensor, entry.box, entry.spec.shape) for entry in here)
                for fqn, one in zip((entry.spec.fqn for entry in here), found, strict=True):
                    out[fqn] = out[fqn] + one if fqn in out else one
        return out

    def summed_up(self) -> ToWrite:
        """Return the same entries with all fingerprints computed."""
        return replace(self, prints=self.sum_up(), summed=frozenset(range(len(self.entries))))


def check_stage(stage: str) -> None:
    """Raise OptionError unless `stage` is a valid value."""
    if stage not in ("host", "device"):
        raise OptionError(f"stage must be 'host' or 'device', got {stage!r:.80}")


def staged(entries: Sequence[Entry], stage: Literal["host", "device"], *, fingerprints: bool) -> ToWrite:
    """Return copies of `entries`. The caller may then change its tensors.

    Tensors on a device are copied to the host on a separate stream, and awaited. With "device", they
    are copied on the device, on the caller's stream, without waiting. If the device lacks memory for
    that, the host is used.
    """
    if stage == "device":
        try:
            copies = [replace(entry, tensor=_copied(entry.tensor)) for entry in entries]
            return ToWrite.in_place(copies)
        except torch.OutOfMemoryError as error:
            _log.warning("no space to stage on the device: the call stages on the host and waits: %s", error)
    return _to_host(entries, fingerprints=fingerprints)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu" or has_copy_streams(tensor.device):
        return tensor.clone()
    return tensor.to("cpu", copy=True)


def _to_host(entries: Sequence[Entry], *, fingerprints: bool) -> ToWrite:
    numbers = [i for i, entry in enumerate(entries) if has_copy_streams(entry.tensor.device)]
    large = [
        i
        for i, entry in enumerate(entries)
        if entry.tensor.device.type == "cpu" and entry.tensor.nbytes >= _LARGE_BYTES
    ]
    sent = [entries[i] for i in numbers]
    devices = {entry.tensor.device for entry in entries}
    lanes, beside = CopyStreams(devices), CopyStreams(devices)
    rooms, blocks = _host.take([entry.tensor.nbytes for entry in sent])
    common_rooms, common_blocks = _common.take([entries[i].tensor.nbytes for i in large])
    try:
        copies = dict(zip(numbers, fetch([entry.tensor for entry in sent], lanes, rooms), strict=True))
        for i, room in zip(large, common_rooms, strict=True):
            tensor = entries[i].tensor
            copies[i] = room.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        rest = {i: _copied(entry.tensor) for i, entry in enumerate(entries) if i not in copies}
        prints = ToWrite(sent, lanes, beside).sum_up() if fingerprints else {}
    finally:
        lanes.wait()  # also after a failure: from here on, another save may use the memory

    def release() -> None:
        _host.give(blocks)
        _common.give(common_blocks)

    return ToWrite(
        [replace(entry, tensor=copies[i] if i in copies else rest[i]) for i, entry in enumerate(entries)],
        CopyStreams(),
        CopyStreams(),
        prints,
        frozenset(numbers) if fingerprints else frozenset(),
        release,
    )
