"""What a manager records about the steps in its folder, and its claim on the folder."""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from reshard.api.retention import Seen, files_of, published, remove_checkpoints
from reshard.checkpoint import open as open_checkpoint
from reshard.errors import CheckpointError, CheckpointNotFoundError, FormatError
from reshard.formats.detect import refuse_first_step, steps_at
from reshard.formats.run_folder import LEDGER, StepRecord, StepRecords, path_below, records_in
from reshard.native.commit import remove_empty
from reshard.native.manifest import encode_sealed
from reshard.ranks import liveness
from reshard.storage.opening import open_storage, place_of

# run/                          the root
#     manager.json              metrics of steps, published before the save of each begins
#     manager-owner.json        which process saves here
#     step-500/                 a checkpoint like any other
#     step-1000/

_OWNER = "manager-owner.json"
_NAME = re.compile(r"step-(0|[1-9]\d*)")


def step_path(root: str, step: int) -> str:
    """Return the path of a step."""
    return path_below(root, f"step-{step}")


def published_steps(root: str, seen: Seen) -> dict[int, str]:
    """Return the steps in storage whose save has ended, in order, and why a damaged one cannot be opened."""
    found = [one for one in published(root, seen) if one.is_below]
    rows = [(_NAME.fullmatch(one.path.rpartition("/")[2]), one.problem) for one in found]
    return dict(sorted((int(match[1]), problem) for match, problem in rows if match))


@dataclass
class Ledger:
    """The records of a root.

    Raises CheckpointError if they cannot be read.
    """

    root: str
    steps: dict[int, StepRecord] = field(default_factory=dict)
    """Includes steps that are being saved, or never were complete."""
    _seen: Seen = field(default_factory=dict)
    """Steps that were opened before, so that a save does not open them again."""

    @classmethod
    def read(cls, root: str) -> Ledger:
        """Read the records from storage. Empty if there are none."""
        return cls(root, records_in(open_storage(root)))

    def publish(self) -> None:
        """Write the records to storage."""
        open_storage(self.root).publish(LEDGER, encode_sealed(StepRecords(self.steps)))

    def put(self, step: int, metrics: Mapping[str, float], *, is_based: bool) -> None:
        """Record a step before its save begins. Removes an abandoned or damaged checkpoint of that
        step.

        Raises CheckpointError if a job may still be writing it.
        """
        path = step_path(self.root, step)
        if step in self.aside() and not remove_checkpoints(self.root, [path]):
            raise CheckpointError(
                f"step {step} was discarded, but a job that may still be running is writing it, or a link leads to "
                f"{path}: nothing was saved. End that job. If it has ended, delete the folder, or the link"
            )
        told = {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}
        self.steps[step] = StepRecord(told, is_based=is_based)
        self.publish()

    def set_aside(self, steps: Collection[int], *, is_skipped: bool = False) -> None:
        """Mark steps that the run does not continue from, because the user said so or because they
        could not be read."""
        for step in steps:
            self.steps[step] = msgspec.structs.replace(self._of(step), is_aside=True, is_skipped=is_skipped)
        if steps:
            self.publish()

    def refuse_discarded(self) -> None:
        """Raise CheckpointNotFoundError if there are complete steps, but the run has discarded all
        of them."""
        if steps := [str(step) for step, problem in published_steps(self.root, self._seen).items() if not problem]:
            raise CheckpointNotFoundError(
                f"no step in {self.root} can be restored: the run went back to an earlier step, which is gone, and "
                f"discarded {', '.join(steps)}. To continue from the newest of these, delete "
                f"{path_below(self.root, LEDGER)}, which also forgets the metrics of all steps"
            )

    def current(self) -> list[int]:
        """Return the complete steps that count, in order."""
        return [step for step, problem in self.published().items() if not problem]

    def published(self) -> dict[int, str]:
        """Return the steps that count, in order, and why a damaged one cannot be opened."""
        return {step: why for step, why in published_steps(self.root, self._seen).items() if step not in self.aside()}

    def foreign(self) -> dict[str, int]:
        """Return complete checkpoints in the root that no manager saved: path -> step, which is -1
        for `last`.

        Steps that `published` has just found are not opened again.
        """
        own = {path for path in self._seen if _is_step(path)}
        seen = []
        with suppress(FormatError):  # a root may hold anything besides
            seen = [one for one in steps_at(self.root, is_sure=True) if "/" not in one.name]
        steps = {path_below(self.root, one.name): -1 if one.step is None else one.step for one in seen}
        return {path: step for path, step in steps.items() if path not in own and _is_foreign(path)}

    def has_changed(self, step: int) -> bool:
        """Return True if a step that `published` found was replaced or removed since."""
        path = step_path(self.root, step)
        return self._seen.get(path, ())[:1] != (files_of(path),)

    def metrics(self) -> dict[int, dict[str, float]]:
        """Return the metrics of the complete steps that count."""
        rows = {step: self._of(step).metrics for step in self.current()}
        return {step: {name: float(value) for name, value in its.items()} for step, its in rows.items()}

    def saves_since_whole(self) -> int:
        """Return how many of the newest steps reuse data of earlier ones."""
        found = 0
        for step in reversed(self.current()):
            if not self._of(step).is_based:
                return found
            found += 1
        return found

    def aside(self) -> set[int]:
        """Return the steps that do not count."""
        return {step for step, record in self.steps.items() if record.is_aside}

    def skipped(self) -> list[int]:
        """Return the skipped steps among them, in order: those that could not be read when the run
        continued from an earlier step."""
        return sorted(step for step, record in self.steps.items() if record.is_skipped)

    def tidy(self, kept: Collection[int]) -> None:
        """Remove all complete steps except these, and leftovers of killed saves. Damaged steps that
        do not count stay. A step that a restore skipped stays while it is newer than all of `kept`,
        or while no other is removed."""
        published = published_steps(self.root, self._seen)
        # a later save of a step stays
        saves = {path: one.save_id for path, (_, one) in self._seen.items()}
        newest, complete = max(kept, default=-1), {step for step, why in published.items() if not why}
        keeps_all = complete <= self.aside().union(kept)
        skipped = {step for step in self.skipped() if step in published and (keeps_all or step > newest)}
        old = complete.difference(kept, skipped)
        paths = {step_path(self.root, step): step for step in old}
        gone = remove_checkpoints(self.root, paths, saves=saves)
        damaged = {step for step in self.aside() if published.get(step)}
        stay = {*kept, *damaged, *skipped, *(step for path, step in paths.items() if path not in gone)}
        if gone_before := self.steps.keys() - stay:
            remove_empty(open_storage(self.root), [f"step-{step}" for step in gone_before])
            self.steps = {step: record for step, record in self.steps.items() if step in stay}
            self.publish()

    def _of(self, step: int) -> StepRecord:
        return self.steps.get(step, StepRecord())


def _is_foreign(path: str) -> bool:
    """Return whether there is a complete checkpoint that no manager saved.

    A native one with the name of a manager's step was just published.
    """
    try:
        format = open_checkpoint(path).format
    except CheckpointError:
        return False
    return format != "native" or not _is_step(path)


def _is_step(path: str) -> bool:
    return _NAME.fullmatch(path.rpartition("/")[2]) is not None


class RootClaim:
    """The claim of this process on a root, until `release` or the end of the process.

    Raises CheckpointError if another running process has claimed it; FormatError for a root that is
    a checkpoint; StorageError for one that cannot be written.
    """

    def __init__(self, root: str) -> None:
        self._storage, self._root = open_storage(root), root
        refuse_first_step(step_path(root, 0))
        work = f"manager {place_of(self._storage)}"
        found = liveness.read_lease(self._storage, _OWNER)
        if found is not None and found.is_running(work):
            raise CheckpointError(
                f"another CheckpointManager, of {found}, is using {root}: close it, or choose another root. To "
                "read only, pass read_only=True"
            )
        liveness.take_lease(self._storage, _OWNER, work)
        self._mine = liveness.read_lease(self._storage, _OWNER)
        self._ended = weakref.finalize(self, liveness.release_lease, work)
        liveness.set_fence(self._storage.url, self._check_held)

    def check(self) -> None:
        """Raise CheckpointError if another process has taken the root. A process of another machine
        may do so, since it cannot know that this one is running."""
        found = liveness.read_lease(self._storage, _OWNER)
        if found != self._mine:
            raise CheckpointError(
                f"another CheckpointManager, of {found or 'an unknown process'}, took over {self._root}: this one "
                "saved nothing, because each would delete the other's steps"
            )

    def _check_held(self) -> None:
        if self._ended.alive:
            self.check()

    def release(self) -> None:
        """Let another manager take the root."""
        if self._ended.alive:
            self._ended()
            if liveness.read_lease(self._storage, _OWNER) == self._mine:
                self._storage.delete(_OWNER)
