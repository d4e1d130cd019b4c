"""Events in order and in full, one log line a phase, a bar only on a terminal."""

from __future__ import annotations

import io
import logging
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from reshard.ranks.progress import Event, Progress, format_bytes, listening


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def all_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reshard.ranks.progress.EVENT_GAP_S", 0.0)


@pytest.mark.usefixtures("all_events")
def test_a_phase_tells_its_start_its_course_and_its_end() -> None:
    events: list[Event] = []
    mine: list[Event] = []
    progress = Progress(show=False, listener=mine.append)
    with listening(events.append):
        with progress.phase("read", total_bytes=30) as step:
            step.advance(10)
            step.advance(20)
        with progress.phase("check"):
            pass
    with Progress(show=False).phase("unheard"):
        pass
    told = [(event.kind, event.phase, event.done_bytes, event.total_bytes) for event in events]
    assert told == [
        ("started", "read", 0, 30),
        ("advanced", "read", 10, 30),
        ("advanced", "read", 30, 30),
        ("finished", "read", 30, 30),
        ("started", "check", 0, None),
        ("finished", "check", 0, None),
    ]
    assert mine == events
    seconds = [event.seconds for event in events[:4]]
    assert seconds == sorted(seconds)


def _write_some(progress: Progress) -> None:
    with progress.phase("write", 100) as step:
        step.advance(40)
        raise KeyError


def test_a_failure_is_an_end_too() -> None:
    events: list[Event] = []
    progress = Progress(show=False, listener=events.append)
    with pytest.raises(KeyError):
        _write_some(progress)
    assert [event.kind for event in events] == ["started", "failed"]
    assert events[-1].done_bytes == 40


def test_events_are_few_and_bytes_exact_with_many_threads() -> None:
    events: list[Event] = []
    progress = Progress(show=False, listener=events.append)
    with progress.phase("read", 80_000) as step, ThreadPoolExecutor(8) as pool:
        list(pool.map(step.advance, [1] * 80_000))
    assert events[-1].kind == "finished"
    assert events[-1].done_bytes == 80_000
    assert len(events) < 2 + 10 * (events[-1].seconds + 1)


def test_a_listener_that_fails_costs_nothing_but_a_log_entry(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Event] = []

    def broken(event: Event) -> None:
        raise ValueError("gauge")

    with listening(broken), listening(heard.append), Progress(show=False).phase("read"):
        pass
    assert [event.kind for event in heard] == ["started", "finished"]
    assert "a progress listener failed on read: started" in caplog.text
    assert "ValueError: gauge" in caplog.text


def test_without_a_terminal_a_phase_is_one_line(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress()
    with caplog.at_level(logging.INFO, "reshard"):
        with progress.phase("read", 3 << 20) as step:
            for _ in range(3):
                step.advance(1 << 20)
        with progress.phase("publish"):
            pass
    assert len(caplog.messages) == 2
    assert caplog.messages[0].startswith("read: 3.0 MiB in 0.")
    assert caplog.messages[1].startswith("publish: 0.")
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("all_events")
def test_on_a_terminal_long_phases_have_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    progress = Progress()
    with progress.phase("quick", 10) as step:
        step.advance(10)
    assert terminal.getvalue() == ""
    monkeypatch.setattr("reshard.ranks.progress.BAR_AFTER_S", 0.0)
    with progress.phase("read", 4 << 20) as step, progress.phase("check", 10) as other:
        step.advance(1 << 20)
        other.advance(5)
        assert progress.bars is not None
        progress.bars.opened().refresh()
    assert progress.bars is not None
    assert progress.bars._bars is None  # rich has left the terminal
    shown = terminal.getvalue()
    assert "read" in shown
    assert "check" in shown
    assert "1.0/4.0 MiB" in shown
    assert "quick" not in shown


def test_a_phase_of_which_nothing_was_left_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "reshard"), Progress(bars=False).phase("check", 64):
        pass

    assert not caplog.messages


def test_progress_of_another_rank_is_silent(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with caplog.at_level(logging.INFO, "reshard"), Progress(show=False).phase("read", 1) as step:
        step.advance(1)
    assert terminal.getvalue() == ""
    assert not caplog.messages


def test_lines_for_people() -> None:
    assert str(Event("started", "read", 0, None, 0.0)) == "read: started"
    assert str(Event("finished", "read", 2048, 2048, 2.0)) == "read: 2.0 KiB in 2.00 s, 1.0 KiB/s"
    assert str(Event("failed", "read", 512, 2048, 1.0)) == "read: 512 B of 2.0 KiB in 1.00 s, 512 B/s (failed)"
    assert str(Event("finished", "check", 512, 2048, 1.0)) == "check: 512 B in 1.00 s, 512 B/s"
    assert str(Event("finished", "publish", 0, None, 0.25)) == "publish: 0.25 s"
    assert format_bytes(0) == "0 B"
    assert format_bytes(1023) == "1023 B"
    assert format_bytes(5 * 1024**5) == "5.0 PiB"
