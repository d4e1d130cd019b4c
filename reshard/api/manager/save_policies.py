"""Policies of a checkpoint manager: when to save, what may request a save, and the vote of the ranks about it."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from reshard.api.retention import is_count
from reshard.arguments import named_arguments
from reshard.errors import OptionError, format_value

_log = logging.getLogger("reshard")


@named_arguments(why="reason")
@dataclass(frozen=True)
class Every:
    """When a step is due: at multiples of `steps`, or when `seconds` have passed since the last
    save. With both, a step is due when either is true.

        reshard.Every(steps=500)
        reshard.Every(steps=5000, seconds=1800)

    Raises OptionError for missing or invalid values.
    """

    steps: int | None = None
    """If the steps of two calls skip a multiple, the later call saves."""
    seconds: float | None = None
    """The clock of rank 0 decides."""

    def __post_init__(self) -> None:
        if self.steps is None and self.seconds is None:
            raise OptionError("Every needs steps=, seconds=, or both, such as Every(steps=500)")
        if self.steps is not None and not is_count(self.steps):
            raise OptionError(f"Every: steps must be an integer >= 1, got {self.steps!r:.80}")
        if self.seconds is not None and not (isinstance(self.seconds, int | float) and 0 < self.seconds < math.inf):
            raise OptionError(f"Every: seconds must be a positive number, got {self.seconds!r:.80}")

    def is_multiple(self, step: int, before: int) -> bool:
        """Return True if there is a multiple of `steps` after step `before`, up to and including `step`."""
        return self.steps is not None and step // self.steps > before // self.steps

    def reason(self, step: int, before: int, waited_s: float) -> str:
        """Return why the step is due; empty if it is not.

        Args:
            step: number of the step.
            before: the step of the previous call.
            waited_s: seconds since the last step that was due.
        """
        if self.is_multiple(step, before):
            return "every step" if self.steps == 1 else f"every {self.steps} steps"
        return f"every {self.seconds:g} s" if self.seconds is not None and waited_s >= self.seconds else ""


@named_arguments(asks="poll", asked="requests")
@dataclass(frozen=True)
class Preemption:
    """What may request a save at the next step: a signal, a file that appears, or a function. If
    any rank receives a request, all ranks save.

        reshard.Preemption(file="/run/maintenance", poll=lambda: cloud.is_preempted())
    """

    signals: Collection[int] = (signal.SIGTERM,)
    """The manager handles these signals from its creation, in the main thread, until it is
    closed. It also calls the earlier handlers."""
    file: str | os.PathLike[str] | None = None
    """A relative path refers to the current folder when `Preemption` is created."""
    poll: Callable[[], Any] | None = None
    """Called at each step at which the ranks synchronize. A true result is a request."""

    def __post_init__(self) -> None:
        if self.file is not None:
            if not isinstance(self.file, str | os.PathLike):
                raise OptionError(f"Preemption: file must be a path, got {self.file!r:.80}")
            object.__setattr__(self, "file", os.path.abspath(self.file))
        if self.poll is not None and not callable(self.poll):
            raise OptionError(f"Preemption: poll must be a function, got {self.poll!r:.80}")
        if not isinstance(self.signals, Collection):
            raise OptionError(f"Preemption: signals must be a list, such as [signal.SIGTERM], got {self.signals!r:.80}")
        for number in self.signals:
            if number not in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                raise OptionError(
                    f"Preemption: {number!r} is not a signal that can be handled: pass signals such as signal.SIGTERM"
                )

    def requests(self) -> list[str]:
        """Return the sources that request a save now: the file and `poll`, but not signals."""
        found = [f"the file {os.fspath(self.file)}"] if self.file is not None and os.path.exists(self.file) else []
        return [*found, *(["Preemption.poll"] if self.poll is not None and self.poll() else [])]


class Signals:
    """Collects the signals that arrive between calls of `take`."""

    def __init__(self, numbers: Collection[int]) -> None:
        self._came: list[str] = []
        self._pid = os.getpid()
        self._earlier: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._earlier = {number: signal.signal(number, self._note) for number in numbers}
        elif numbers:
            _log.warning("signals cannot request a save: create the manager in the main thread to handle them")

    def _note(self, number: int, frame: Any) -> None:
        if os.getpid() != self._pid:  # a fork that knows nothing of the run
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._came.append(signal.Signals(number).name)
        if callable(earlier := self._earlier.get(number)):
            earlier(number, frame)

    def take(self) -> list[str]:
        """Return the names of the signals that arrived since the last call."""
        came, self._came = self._came, []
        return came

    def release(self) -> None:
        """Restore the earlier handlers, unless others were installed since."""
        if threading.current_thread() is threading.main_thread():
            for number, earlier in self._earlier.items():
                if signal.getsignal(number) == self._note:
                    signal.signal(number, signal.SIG_DFL if earlier is None else earlier)


# What the ranks exchange at a step, and what follows from it.


class Due(NamedTuple):
    """What all ranks do at a step."""

    storage: str = ""
    memory: str = ""
    preempted: str = ""
    has_ended: bool = False
    """Whether all background work has ended, on all ranks."""


class Vote(msgspec.Struct, frozen=True, array_like=True):
    """What one rank, or several, report at a step."""

    steps: tuple[tuple[int, int], tuple[int, int]]
    """The lowest and the highest step that a rank saves, each with such a rank."""
    asked: list[str]
    force: bool
    has_ended: bool
    waited_s: tuple[float, float]
    """Seconds since the first rank last saved to storage, and to memory."""

    @staticmethod
    def join(votes: list[Vote]) -> Vote:
        """Combine several votes, in the order of the ranks."""
        return Vote(
            (min(vote.steps[0] for vote in votes), max(vote.steps[1] for vote in votes)),
            list(dict.fromkeys(one for vote in votes for one in vote.asked)),
            any(vote.force for vote in votes),
            all(vote.has_ended for vote in votes),
            votes[0].waited_s,
        )


def checked_metrics(metrics: Mapping[str, Any] | None, wanted: str = "") -> dict[str, float]:
    """Return numbers by name, without those that are NaN: no step is better or worse by them.

    Raises OptionError for other values, and for metrics without the `wanted` one.
    """
    if not isinstance(metrics, Mapping | None):
        raise OptionError(f"metrics must be a dict, such as {{'loss': 0.5}}, got {format_value(metrics)}")
    found = {}
    for name, value in (metrics or {}).items():
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise OptionError(f"metric {name!r} must be a number, got {value!r:.80}") from error
        found[str(name)] = number
    if wanted and found and wanted not in found:
        raise OptionError(
            f"keep ranks steps by the metric {wanted!r}, but metrics= has only "
            f"{', '.join(map(repr, found))}: pass {wanted!r}. Nothing was saved at this step. At steps without it, "
            "omit metrics="
        )
    return {name: number for name, number in found.items() if not math.isnan(number)}
