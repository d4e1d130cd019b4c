"""The folder of a run: its steps, what the manager's ledger records about them, and which step is opened."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple
from urllib.parse import quote

import msgspec

from planners.units import format_count, format_some
from reshard.errors import (
    RESTORE,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatError,
    NewerVersionError,
    StorageError,
)
from reshard.formats.format import unopened_text
from reshard.native.manifest import decode_sealed, read_manifest
from reshard.storage.base import AnyPath, Storage
from reshard.storage.opening import StoragePath, open_storage
from reshard.stored.contents import Contents


@dataclass(frozen=True)
class RunStep:
    """A checkpoint of a run, as its name describes it."""

    step: int | None
    """None for `last`. Lightning's `last.ckpt` is the newest, whatever its step."""
    name: str
    """Its path within the folder of the run."""
    is_discarded: bool = False
    """Whether the run went back to an earlier step, see `StepRecord.is_aside`."""

    @property
    def age(self) -> tuple[bool, int, str]:
        """A sort key. The oldest step comes first."""
        return self.step is None, self.step or 0, self.name


LEDGER = "manager.json"
"""What a `CheckpointManager` records about the steps beside it."""


class StepRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is recorded about a step besides its checkpoint."""

    metrics: dict[str, float | str] = {}
    """Infinite numbers are text, because JSON has none."""
    is_based: bool = False
    """Whether the save reuses data of an earlier one."""
    is_aside: bool = False
    """True for a step that the run did not continue from. It is not restored, and is removed when a
    later save is complete."""
    is_skipped: bool = False
    """Whether the run continued from an earlier step because this one could not be read. It may be
    readable later, so it stays until the run has a newer step."""


class StepRecords(msgspec.Struct, frozen=True):
    """The contents of the file."""

    steps: dict[int, StepRecord]
    version: int = 2


def records_in(storage: Storage, below: str = "") -> dict[int, StepRecord]:
    """Return the records in the folder of a run, or none without the file. Raises CheckpointError
    if it cannot be read or has a newer version, because it is then unknown which steps count.
    """
    where = path_below(storage.url, below + LEDGER)
    try:
        return decode_sealed(storage.read(below + LEDGER), StepRecords, where, newest=2).steps
    except CheckpointNotFoundError:
        return {}
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{where} cannot be read: {error}. It contains the metrics of the steps, "
            "and which of them are discarded. Restore the file, or open a step by its own folder. If you delete it, "
            "the run continues from its newest step, or from one that you pass with discard_newer=True"
        ) from error


def discarded_in(storage: Storage, below: str = "") -> set[str]:
    """Return the names of the discarded steps in the folder of a run."""
    try:
        records = records_in(storage, below)
    except CheckpointError as error:
        if isinstance(error.__cause__, msgspec.ValidationError):
            return set()  # another program's file, which the manager refuses
        raise
    return {f"{below}step-{step}" for step, record in records.items() if record.is_aside}


class Run(NamedTuple):
    """The folder of a run."""

    steps: list[RunStep]
    """The steps, the oldest first. Empty if the folder is itself a checkpoint."""
    beside: list[str]
    """Checkpoint files beside the steps."""

    def not_opened(self, path: AnyPath) -> list[str]:
        """Return the warning about `beside`."""
        if not self.beside:
            return []
        where = path_below(path, self.beside[0])
        return [unopened_text(self.beside, "next to the steps", where)]

    def having(self, number: int | None, path: AnyPath) -> list[RunStep]:
        """Return the steps with that number, or all steps, the newest first. Raises
        CheckpointNotFoundError if there is none."""
        found = [s for s in reversed(self.steps) if (not s.is_discarded if number is None else number == s.step)]
        if not found and not self.steps:
            raise CheckpointNotFoundError(
                f"{os.fspath(path)} has no step {number}, since it is not the folder of a run: leave out step={number}"
            )
        if not found and number is None:
            raise CheckpointNotFoundError(
                f"{os.fspath(path)} has no step to open: the run went back to an earlier step, which is gone, and "
                f"discarded {format_steps(self.steps)}. Pass step= to open one of these"
            )
        if not found:
            known = ", ".join(str(step.step) if step.step is not None else step.name for step in self.steps)
            raise CheckpointNotFoundError(f"{os.fspath(path)} has no step {number}: its steps are {known}")
        return found


def with_last_placed(path: AnyPath, steps: list[RunStep]) -> list[RunStep]:
    """Return the steps with a native `last` placed after the highest step whose save did not begin
    later.

    The age of another library's `last` is unknown, so it stays the newest.
    """
    places: dict[str, tuple[bool, int, float]] = {}
    for last in steps:
        if last.step is not None or (made := _begun(path, last)) is None:
            continue
        for step in reversed(steps):
            if step.step is None or (begun := _begun(path, step)) is None:
                continue
            is_older = begun <= made
            places[last.name] = False, step.step if is_older else -1, made
            if is_older:
                break

    def age(step: RunStep) -> tuple[bool, int, float]:
        return places.get(step.name, (step.step is None, step.step or 0, 0.0))

    return sorted(steps, key=age)


class _SaveTime(msgspec.Struct):
    created_unix_s: float


def _begun(path: AnyPath, step: RunStep) -> float | None:
    """Return when the save of a native step began. None for other and for damaged steps."""
    with suppress(CheckpointError, StorageError):
        found: _SaveTime = read_manifest(open_storage(path_below(path, step.name)), _SaveTime)
        return found.created_unix_s
    return None


def open_step(
    path: AnyPath,
    run: Run,
    wanted: int | None,
    open_at: Callable[[StoragePath], tuple[Contents, str]],
    has_ended: Callable[[str], bool],
) -> tuple[Contents, str]:
    """Open that step, or the newest complete one, which records what was skipped."""
    skipped: dict[str, Exception] = {}
    for step in run.having(wanted, path):
        place = path_below(path, step.name)
        try:
            contents, url = open_at(place)
            if wanted is None:
                contents.refuse_incomplete()
        except (CheckpointNotFoundError, CorruptCheckpointError, FormatError) as error:
            if wanted is not None or isinstance(error, NewerVersionError):
                raise
            skipped[step.name] = error
            continue
        damaged = [name for name, error in skipped.items() if isinstance(error, CorruptCheckpointError)]
        lost = tuple(name for name in damaged if has_ended(path_below(path, name)))
        why = {name: "damaged" if name in lost else "not complete" for name in skipped}
        newer = {name: f"{name} is newer but was skipped because it is {why[name]}: {skipped[name]}" for name in why}
        said = (*contents.warnings, *newer.values(), *run.not_opened(path))
        return replace(contents, warnings=said, skipped=newer, damaged_steps=lost), url
    texts = [f"{name}: {error}" for name, error in skipped.items()]
    all_said = [text.removesuffix(f": {RESTORE}") for text in texts]
    fix = ["fix: restore one of them, or load another checkpoint"] if all_said != texts else []
    older = len(all_said) - _MOST_REASONS
    all_said[_MOST_REASONS:] = [f"and {format_count(older, 'older step')}"] * (older > 0)
    all_said += run.not_opened(path)
    kinds = (CorruptCheckpointError, FormatError, CheckpointNotFoundError)
    kind = next(kind for kind in kinds if any(isinstance(error, kind) for error in skipped.values()))
    raise kind("\n  ".join([f"no checkpoint of the run at {os.fspath(path)} can be opened:", *all_said, *fix]))


_MOST_REASONS = 3
"""The most steps for which an error says why they cannot be opened."""


def format_steps(steps: Sequence[RunStep]) -> str:
    """Return the names of the newest few steps, for a message."""
    return format_some([step.name for step in reversed(steps)], 3)


def path_below(folder: AnyPath, name: str) -> str:
    """Return the path or URL of a name in a folder."""
    base = os.fspath(folder)
    if "://" in base and not base.startswith("memory:"):
        for sign in "%#?":  # these have another meaning in a URL
            name = name.replace(sign, quote(sign))
    return f"{base.rstrip('/')}/{name}" if name else base
