"""Streams that run late on purpose, and the events that order them.

What is asked of a stream waits in its queue. It runs when somebody waits for it: no more than that needs ("late"), or
after everything that can run on other streams ("others first"), or at once ("eager"). A program whose result depends on
the order lacks an event.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch

import reshard
from tests.simulated.memory import fault, on_free, saw

__all__ = ["Event", "Order", "Stream", "current", "leave_out", "ordered", "run_all", "use", "wait_sites"]

Order = Literal["late", "others first", "eager"]
Site = tuple[str, ...]
"""Where in the source of the library somebody waits: the line that does, and those that led to it."""
_LINES = 4

_LIBRARY = str(Path(reshard.__file__).parent)
_lock = threading.RLock()
_local = threading.local()
_streams: list[Stream] = []
_sites: set[Site] = set()
_left_out: set[Site] = set()
_order: list[Order] = ["late"]


@contextlib.contextmanager
def ordered(order: Order) -> Iterator[None]:
    """How streams run within."""
    before, _order[0] = _order[0], order
    try:
        yield
    finally:
        _order[0] = before


def wait_sites() -> set[Site]:
    """Where the library has waited for a stream or an event since the process began."""
    return set(_sites)


@contextlib.contextmanager
def leave_out(site: Site) -> Iterator[None]:
    """Whoever waits there, within, does not."""
    _left_out.add(site)
    try:
        yield
    finally:
        _left_out.discard(site)


def _waits() -> bool:
    """Notes the lines of the library that wait; whether they do."""
    lines: list[str] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(lines) < _LINES:
        file = frame.f_code.co_filename
        if file.startswith(_LIBRARY):
            lines.append(f"{file.removeprefix(_LIBRARY)}:{frame.f_lineno}")
        frame = frame.f_back
    site = tuple(lines)
    if site:
        _sites.add(site)
    return site not in _left_out


class Stream:
    """As `torch.cuda.Stream`."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = device
        self.done = 0
        """How many of all that was ever asked have run."""
        self._queue: list[tuple[Callable[[], None], list[tuple[int, int]]]] = []
        self._running = False
        with _lock:
            _streams.append(self)

    def ask(self, work: Callable[[], None], touches: list[tuple[int, int]] | None = None) -> None:
        """Put `work` in the queue. `touches`: ranges of device memory that it reads or writes."""
        with _lock:
            self._queue.append((work, touches or []))
            if _order[0] == "eager":
                self.run(self.asked)

    @property
    def asked(self) -> int:
        """How much was ever asked."""
        return self.done + len(self._queue)

    def run(self, until: int) -> None:
        """Run what was asked, up to this many."""
        with _lock:
            while self.done < until:
                work, _ = self._queue[0]
                try:
                    with torch.inference_mode(), torch._C.DisableTorchFunction():  # whatever the waiting thread is in
                        work()
                finally:  # what failed is not tried again
                    del self._queue[0]
                    self.done += 1

    def touches(self, start: int, stop: int) -> bool:
        """Whether work that has not run uses memory of the device."""
        return any(a < stop and start < b for _, ranges in self._queue for a, b in ranges)

    def synchronize(self) -> None:
        if _waits():
            saw("Stream.synchronize")
            _run(self, self.asked)

    def wait_stream(self, other: Stream) -> None:
        if _waits():
            self.after(other, other.asked)

    def wait_event(self, event: Event) -> None:
        if _waits() and event.stream is not None:
            self.after(event.stream, event.at)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def after(self, other: Stream, at: int) -> None:
        """What is asked from here on comes after so much of what the other one was asked."""
        if other is not self:
            self.ask(lambda: other.run(at))


class Event:
    """As `torch.cuda.Event`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stream: Stream | None = None
        self.at = 0
        self._was_asked = False

    def record(self, stream: Stream | None = None) -> None:
        self.stream = current() if stream is None else stream
        self.at = self.stream.asked

    def wait(self, stream: Stream | None = None) -> None:
        if _waits() and self.stream is not None:
            (current() if stream is None else stream).after(self.stream, self.at)

    def synchronize(self) -> None:
        if _waits() and self.stream is not None:
            if self.stream.done < self.at:
                saw("Event.synchronize")
            _run(self.stream, self.at)

    def query(self) -> bool:
        """No at first: who asks again finds it done."""
        if not _waits() or self.stream is None or self.stream.done >= self.at:
            return True
        if self._was_asked:
            _run(self.stream, self.at)
        self._was_asked = not self._was_asked
        return not self._was_asked


_default = Stream()


def current(device: Any = None) -> Stream:
    """The calling thread's stream; at first the one that all threads share."""
    return getattr(_local, "stream", _default)


@contextlib.contextmanager
def use(stream: Stream | None) -> Iterator[None]:
    """Make it the calling thread's, within."""
    before, _local.stream = current(), current() if stream is None else stream
    try:
        yield
    finally:
        _local.stream = before


def run_all() -> None:
    """Until nothing is left to do."""
    with _lock:
        for stream in _streams:
            stream.run(stream.asked)


def _run(stream: Stream, until: int) -> None:
    with _lock:
        if _order[0] == "others first":
            for other in _streams:
                if other is not stream:
                    other.run(other.asked)
        stream.run(until)


@on_free
def _freed(start: int, stop: int, owner: Stream) -> None:
    """Memory that was freed may be given to whoever asks next on the stream where it was made; work of another stream
    that is still to come would find something else there."""
    for stream in _streams:
        if stream is not owner and stream.touches(start, stop):
            fault("device memory was freed while another stream still had to use it")
