"""Records where time is spent, by phase, also for OpenTelemetry if the program uses it. Long phases
also have events, progress bars, and a log line if no terminal shows them."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from planners.units import format_bytes
from reshard.ranks.timespans import Span

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress, TaskID

__all__ = [
    "EPOCH_NS", "Event", "Listener", "Phase", "Progress", "current", "format_bytes", "listening",
    "phase", "rest_of_call",
]  # fmt: skip


_log = logging.getLogger("reshard")

EVENT_GAP_S = 0.1
"""Minimum interval between two progress events of a phase."""
BAR_AFTER_S = 0.5
"""Phases that end sooner show no bar."""

EPOCH_NS = time.time_ns() - time.perf_counter_ns()
"""Offset from the monotonic clock, which never steps, to nanoseconds since 1970."""


current: ContextVar[Span] = ContextVar("current")
"""The current phase, which contains the phases that begin now."""


@contextmanager
def phase(name: str, *, waits: bool = False, path: object = None, goes_on: bool = False) -> Iterator[Span]:
    """Record when this block begins and ends, within the current phase, if there is one. It costs a
    few microseconds, and so is never off; blocks are phases of a call, and not its elements.

    Args:
        path: of the checkpoint, of whatever type; for a phase that is a whole call.
        goes_on: unless it fails, the call is not over with this block: see `rest_of_call`.
    """
    outer = current.get(None)
    span = Span(name, threading.current_thread().name, EPOCH_NS + time.perf_counter_ns(), waits=waits)
    if path is not None:
        url = getattr(path, "url", path)
        span.path = str(url) if isinstance(url, str | os.PathLike) else ""
    if outer is not None:
        outer.inner.append(span)
    token = current.set(span)
    try:
        yield span
    except BaseException as error:
        span.error = type(error).__name__
        goes_on = False
        raise
    finally:
        current.reset(token)
        span.ended_ns = EPOCH_NS + time.perf_counter_ns()
        if outer is None and not waits and not goes_on:
            _tell(span)


@contextmanager
def rest_of_call() -> Iterator[None]:
    """Record what a call does in the background, within the phase that it began."""
    call = current.get(None)
    try:
        yield
    except BaseException as error:
        if call is not None:
            call.error = type(error).__name__
        raise
    finally:
        if call is not None:
            _tell(call)


def _tell(call: Span) -> None:
    """Report to OpenTelemetry, if the program has imported it."""
    if "opentelemetry.trace" not in sys.modules:
        return
    try:
        from reshard.ranks.telemetry import tell

        tell(call)
    except Exception:  # as with listeners
        _log.exception("OpenTelemetry could not record %s", call.name)


@dataclass(frozen=True)
class Event:
    """A progress event of a save, load, or conversion.

    Attributes:
        kind: "started", "advanced" (now and then), and at the end "finished" or "failed".
        phase: its name: "read".
        done_bytes: how much is done, in bytes.
        total_bytes: how much there is to do, in bytes; None if unknown.
        seconds: since the phase started.
    """

    kind: Literal["started", "advanced", "finished", "failed"]
    phase: str
    done_bytes: int
    total_bytes: int | None
    seconds: float

    def __str__(self) -> str:
        if self.kind == "started":
            return f"{self.phase}: started"
        amount = format_bytes(self.done_bytes)
        if self.kind != "finished" and self.total_bytes not in (None, self.done_bytes):
            amount += f" of {format_bytes(self.total_bytes)}"
        rate = f", {format_bytes(self.done_bytes / self.seconds)}/s" if self.done_bytes and self.seconds else ""
        end = "" if self.kind == "finished" else f" ({self.kind})"
        if not self.done_bytes and not self.total_bytes:
            return f"{self.phase}: {self.seconds:.2f} s{end}"
        return f"{self.phase}: {amount} in {self.seconds:.2f} s{rate}{end}"


Listener = Callable[[Event], None]

_listeners: list[Listener] = []
_listeners_lock = threading.Lock()


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call `listener` with every event of this process, in the thread in which it happens, until
    the block ends: `with listening(lambda event: gauge.set(event.done_bytes)): ...`.

    It should be fast. If it raises, the error is logged with its traceback, and the work continues.
    """
    with _listeners_lock:
        _listeners.append(listener)
    try:
        yield
    finally:
        with _listeners_lock:
            _listeners.remove(listener)


class Progress:
    """The progress of one piece of work, with as many phases as it likes, also at the same time.

        with Progress(show=group.rank == 0).phase("read", total_bytes=n) as step:
            step.advance(len(chunk))  # from any thread

    Args:
        show: whether this process shows a bar or writes log lines; with many ranks one of them is
            enough.
        bars: whether it shows bars in a terminal; if not, it only logs.
        listener: gets this work's events, beside the listeners of the whole process.
        check: called at every progress step, to raise what ends the work: that another rank has failed.
    """

    def __init__(
        self,
        *,
        show: bool = True,
        bars: bool = True,
        listener: Listener | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.check = check
        self.listeners = [listener] if listener else []
        self.show = show
        watched = show and bars and sys.stderr is not None and sys.stderr.isatty()
        self.bars = _Bars() if watched else None

    @contextmanager
    def phase(self, name: str, total_bytes: int | None = None, path: object = None) -> Iterator[Phase]:
        """Yield a phase, from its start to its end or failure."""
        with phase(name, path=path) as span:
            step = Phase(self, span, total_bytes)
            step.tell("started")
            try:
                yield step
            except BaseException:
                step.tell("failed")
                raise
            step.tell("finished")


class Phase:
    """One phase of a piece of work; `advance` it from any thread."""

    def __init__(self, progress: Progress, span: Span, total_bytes: int | None) -> None:
        self.name = span.name
        self.total_bytes = total_bytes
        self._progress = progress
        self._span = span
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self._next_event = self._start + EVENT_GAP_S

    def advance(self, nbytes: int) -> None:
        """Add this number of bytes to those that are done. Raises the errors of the work's `check`."""
        if self._progress.check is not None:
            self._progress.check()
        now = time.monotonic()
        with self._lock:
            self._span.nbytes += nbytes
            due = now >= self._next_event
            if due:
                self._next_event = now + EVENT_GAP_S
        if due:
            self.tell("advanced")

    def tell(self, kind: Literal["started", "advanced", "finished", "failed"]) -> None:
        """Report the state of the phase: show it, and call all listeners."""
        event = Event(kind, self.name, self._span.nbytes, self.total_bytes, time.monotonic() - self._start)
        work = self._progress
        if work.bars is not None:
            work.bars.show(self, event)
        elif work.show and (kind == "failed" or (kind == "finished" and (event.done_bytes or not self.total_bytes))):
            # one line when a phase is over, unless others had done all of it: silent unless
            # logging shows it
            _log.info("%s", event)
        with _listeners_lock:
            everybody = work.listeners + _listeners
        for listener in everybody:
            try:
                listener(event)
            except Exception:  # a broken gauge must not cost a checkpoint
                _log.exception("a progress listener failed on %s", event)


class _Bars:
    """Progress bars on the terminal, for phases that take long enough to be seen. Each disappears
    at the end of its phase."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bars: RichProgress | None = None
        self._tasks: dict[Phase, TaskID] = {}

    def show(self, phase: Phase, event: Event) -> None:
        with self._lock:
            task = self._tasks.get(phase)
            if event.kind in ("finished", "failed"):
                if task is not None and self._bars is not None:
                    self._bars.remove_task(self._tasks.pop(phase))
                    if not self._tasks:
                        self._bars.stop()
                        self._bars = None
                return
            if task is None:
                if event.seconds < BAR_AFTER_S:
                    return
                task = self._tasks[phase] = self.opened().add_task(phase.name, total=phase.total_bytes)
            self.opened().update(task, completed=event.done_bytes)

    def opened(self) -> RichProgress:
        """Return the bars, shown from now on."""
        if self._bars is None:
            from rich.console import Console  # slow to import, and mostly not needed
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress as RichProgress,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )

            columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
            self._bars = RichProgress(
                TextColumn("{task.description}"), *columns, console=Console(stderr=True), transient=True
            )
            self._bars.start()
        return self._bars
