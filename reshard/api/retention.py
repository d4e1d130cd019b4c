"""The checkpoints of a run: which steps are kept; list them, find the newest complete one, and remove old ones."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Literal

import xxhash

from reshard.api.convert_job import is_job, remove_dead_jobs
from reshard.api.task_shares import absolute
from reshard.api.tasks import check_executor, run_tasks
from reshard.arguments import named_arguments, renamed
from reshard.checkpoint import open as open_checkpoint
from reshard.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatError,
    NewerVersionError,
    OptionError,
    StorageError,
    format_names,
)
from reshard.formats.detect import local_path, run_in, step_of, steps_at
from reshard.formats.run_folder import LEDGER, RunStep, discarded_in, path_below
from reshard.native.commit import folder_of, generations_in, is_alive, remove_dead, remove_empty, unpublish
from reshard.native.manifest import GENERATION, MANIFEST, is_generation, refuse_newer, without_claim
from reshard.native.reader import NativeFacts, detect
from reshard.storage import AnyPath, Storage, open_storage
from reshard.storage.opening import place_of


def is_count(value: object, least: int = 1) -> bool:
    return type(value) is int and value >= least


@named_arguments()
@dataclass(frozen=True)
class Keep:
    """Which steps to keep: a step stays if any rule keeps it. The newest step always stays.
    `Keep()` keeps all steps.

        reshard.Keep(last=3, every=10_000, best=2, metric="loss", mode="min")

    Args:
        last: keep this number of the newest steps. None: keep only the newest if `every` or `best`
            is set; otherwise, keep all.
        every: keep all steps that are multiples of this number.
        best: keep this number of the steps with the best `metric`. If metrics are equal, the
            newer step is better. Steps that were saved without metrics do not count.
        metric: the name of the metric that ranks the steps, required with `best`. If you pass
            `metrics` to `CheckpointManager.save`, they must include it. Without `best`, only
            `CheckpointManager.best_step` uses it. Default: steps are not ranked.
        mode: "min" if low values of the metric are good, "max" if high values are. Required with
            `metric`.

    Raises OptionError for invalid rules.
    """

    last: int | None = None
    every: int | None = None
    best: int = 0
    metric: str = ""
    mode: Literal["min", "max"] | None = None

    def __post_init__(self) -> None:
        if self.last is not None and not is_count(self.last):
            raise OptionError(f"Keep: last must be an integer >= 1, or None to keep all, got {self.last!r:.80}")
        if self.every is not None and not is_count(self.every):
            raise OptionError(f"Keep: every must be an integer of steps >= 1, got {self.every!r:.80}")
        if not is_count(self.best, 0):
            raise OptionError(f"Keep: best must be an integer >= 0, got {self.best!r:.80}")
        if not isinstance(self.metric, str):
            raise OptionError(f"Keep: metric must be a name, such as 'loss', got {self.metric!r:.80}")
        if not self.metric and (self.best or self.mode is not None):
            raise OptionError("Keep: best= and mode= need metric=, as in Keep(best=2, metric='loss', mode='min')")
        if self.mode not in ("min", "max") and self.metric:
            words = f"'min' if low values of {self.metric!r} are good, 'max' if high ones are"
            raise OptionError(f"Keep: mode must be {words}, got {self.mode!r:.80}")

    def ranked(self, metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
        """Return the steps that have the metric, the best first."""
        sign = 1 if self.mode == "min" else -1
        rows = [(sign * its[self.metric], -step) for step, its in metrics.items() if self.metric in its]
        return [-step for _, step in sorted(rows)]

    def kept(self, metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
        """Return the steps that stay, given all steps and their metrics."""
        steps = sorted(metrics)
        if self.last is None and not (self.every or self.best):
            return set(steps)
        for_ever = [step for step in steps if self.every is not None and step % self.every == 0]
        return {*steps[-(self.last or 1) :], *for_ever, *self.ranked(metrics)[: self.best]}


_log = logging.getLogger("reshard")


@dataclass(frozen=True)
class Step:
    """A checkpoint of a run."""

    step: int | None
    """The number in its name. None for `last`, and if no name in the folder has a number."""
    path: str
    format: str | None
    """Its format. None if it cannot be opened."""
    nbytes: int
    """Size of its tensors in bytes. 0 if it cannot be opened."""
    problem: str | None
    """Why `reshard.open` of the run skips it, or None. Either names and sizes of its files show that it
    is not complete, or the run went back to an earlier step."""


@renamed()
def steps(folder: AnyPath) -> list[Step]:
    """List the checkpoints of the run in a folder, in any format, from the oldest to the newest.
    `latest_complete` returns the newest complete one.

    If names have step numbers, `reshard.open(folder)` chooses from the same list. If no name has one,
    the list has the native checkpoints directly below `folder`, in the order of their saves.
    `reshard.open(folder)` then raises, and you open a checkpoint by its own path. The list is empty
    for a folder that has no checkpoints below it or does not exist, as before the first save.
    `steps` searches two levels of folders.

    Raises FormatError for a local folder with many entries and no checkpoint, and for a folder with
    two runs.
    """
    found = []
    for seen in steps_at(folder, is_sure=True):
        path = path_below(folder, seen.name)
        try:
            checkpoint = open_checkpoint(path)
            checkpoint.contents.refuse_incomplete()
        except CheckpointError as error:
            if not (isinstance(error, CheckpointNotFoundError) and _is_gone(path)):
                found.append(Step(seen.step, path, None, 0, str(error)))
        else:
            aside = "the run went back to an earlier step and discarded this one" if seen.is_discarded else None
            nbytes = sum(tensor.nbytes for tensor in checkpoint.values())
            found.append(Step(seen.step, path, checkpoint.format, nbytes, aside))
    if not found:  # in the order of `latest_complete`
        for one in filter(attrgetter("is_below"), complete(folder)):
            nbytes = sum(tensor.nbytes for tensor in open_checkpoint(one.path).values())
            found.append(Step(None, one.path, "native", nbytes, None))
    return found


def _is_gone(path: str) -> bool:
    """Return whether a step was removed since it was listed."""
    local = local_path(path)
    if local is None:
        return not open_storage(path).names()
    return not os.path.lexists(local)


@renamed()
def latest_complete(folder: AnyPath) -> str | None:
    """Return the path of the newest complete checkpoint of a run, in any format, or None.

    The newest is the one with the highest step, or a native `last` whose save began later.
    Lightning's `last.ckpt` is always the newest. `reshard.open` chooses the same one. If no name has a
    step number, the newest is the native checkpoint, at or directly below `folder`, whose save began
    last. `reshard.open` does not choose among these. The result is None if the folder does not exist.

    A checkpoint is not complete if its manifest is missing or damaged, or if one of its files is
    missing or truncated. Only some formats record the names and sizes of their files. Contents are
    not read.

    Raises FormatError if a newer version of reshard wrote one of the checkpoints, because that one may
    be the newest. Also raises the errors of `reshard.steps`.
    """
    for step in reversed(steps_at(folder, is_sure=True)):
        if step.is_discarded:
            continue
        path = path_below(folder, step.name)
        try:
            open_checkpoint(path).contents.refuse_incomplete()
        except NewerVersionError:
            raise
        except CheckpointError:
            continue
        return path
    found = complete(folder)
    return found[-1].path if found else None


@renamed()
def prune(folder: AnyPath, *, keep_last: int, executor: Executor | None = None, dry_run: bool = False) -> list[str]:
    """Delete all complete native checkpoints directly below `folder` except the `keep_last` newest.
    Return the deleted paths. With `dry_run`, only return the paths that would be deleted.

    The newest checkpoints are those with the highest step numbers, as for `latest_complete`. The
    `keep_last` checkpoints whose saves began last stay, too. After a return to an earlier step, the
    run continues from these.

    Some checkpoints stay and do not count: those in other formats, those whose names have no step
    number, such as `best` and `last`, those that a save is overwriting, and damaged ones, even if
    their manifest was lost. Steps that are symbolic links count. They stay, and so does each
    checkpoint that a link in `folder` leads to, such as `best -> step-100`. `prune` does not know
    the rules of a `CheckpointManager`, so a warning names the deleted steps of its run.

    `prune` also deletes files that killed saves and conversions left. The command `reshard prune`
    lists those of saves. Only files that saves and conversions wrote are deleted. Other files stay,
    and so do their folders. Manifests are deleted first, so an interrupted call leaves nothing that
    looks complete. The next call finishes its work. With an `executor`, each checkpoint is deleted
    in a task.

    Raises:
        OptionError: `keep_last` < 1, or `folder` is a checkpoint and not the folder of a run.
        CheckpointNotFoundError: there is no `folder`.
        FormatError: a newer version of reshard wrote a checkpoint. Or there are more than `keep_last`
            checkpoints and no name has a step number, so they may be unrelated.
    """
    if not is_count(keep_last):
        raise OptionError(
            f"keep_last must be an integer >= 1, got {keep_last!r:.80}: to keep none, delete the folder yourself"
        )
    check_executor(executor, 1, folder)
    if not os.path.exists(local_path(folder) or "."):
        open_checkpoint(folder)  # raises
    with suppress(FormatError, CheckpointNotFoundError):  # as before the first save
        if not steps_at(folder, is_sure=True) and open_checkpoint(folder).format:
            raise OptionError(f"{folder} is a checkpoint, not the folder of a run: pass the folder above it")
    found = [one for one in complete(folder) if one.is_below]
    if len(found) > keep_last and found[0].step is None:
        names = format_names([one.path.rpartition("/")[2] for one in found], limit=10)
        raise FormatError(
            f"{folder}: the names of its checkpoints have no step numbers, so they may be unrelated, and "
            f"prune deleted none of {names}. Name the checkpoints of a run step-<number>, or delete these "
            "yourself"
        )
    kept = sorted(found, key=lambda one: one.created_unix_s)[-keep_last:]
    old = [one.path for one in found[:-keep_last] if one not in kept]
    gone, done = _unlinked(folder, old), "would delete"
    if not dry_run:
        saves = {one.path: one.save_id for one in found}
        gone, done = remove_checkpoints(folder, gone, executor, saves), "deleted"
    if gone and open_storage(folder).names(LEDGER):
        _log.warning(
            "prune does not apply the Keep rules of this run's CheckpointManager: it %s %s",
            done,
            ", ".join(path.rpartition("/")[2] for path in gone),
        )
    return gone


def leftovers(folder: AnyPath) -> dict[str, int]:
    """Return paths directly below `folder` in which killed saves left files that `prune` would
    delete, and the size of these files in bytes."""
    found, names = {}, list[str]()
    with suppress(StorageError):  # a file, which `prune` refuses
        names = open_storage(folder).names()
    for place in sorted(_places(names, is_generation)):
        path = path_below(folder, place)
        with suppress(CheckpointError):  # as in `_remove_in`
            inner = open_storage(path)
            if dead := remove_dead(inner, dry_run=True):
                found[path] = sum(sum(inner.list(f"{folder_of(save_id)}/").values()) for save_id in dead)
    return found


def _places(names: Iterable[str], has: Callable[[str], bool]) -> set[str]:
    """Return the folders of a run that have files with these names, in inner folders of one kind,
    such as saves."""
    parts = [name.split("/", 2) for name in names]
    return {place for place, *inner in parts if len(inner) > 1 and has(inner[0])}


@dataclass(frozen=True)
class RemoveWork:
    """Removes what does not count, with one folder of the run per task."""

    folder: str
    kept: tuple[str, ...]
    """Files that stay. They show that the folder is the driver's."""

    def begin(self) -> Callable[[str], None]:
        """Raise StorageError if this is another folder."""
        names = open_storage(self.folder).names() if self.kept else []
        for name in self.kept:
            if name not in names:
                raise StorageError(f"{self.folder} is not the driver's, which sees {name} there")
        return functools.partial(_remove_in, self.folder)


def _remove_in(folder: str, place: str) -> None:
    with suppress(CheckpointError):  # a broken one: its manifest does not say which generation counts
        remove_dead(open_storage(path_below(folder, place)))


def remove_checkpoints(
    folder: AnyPath,
    paths: Iterable[str],
    executor: Executor | None = None,
    saves: Mapping[str, str] | None = None,
) -> list[str]:
    """Remove these of the checkpoints directly below `folder`, and what killed saves have left
    there, as `prune` does. Returns the removed paths. A checkpoint stays if a save is replacing it,
    if a link leads to it, or if it is no longer the save that `saves` has for its path."""
    storage = open_storage(folder)
    names = storage.names()
    remove_dead_jobs(storage, names)
    for place in _places(names, is_job):
        below = open_storage(path_below(folder, place))
        remove_dead_jobs(below, below.names())
    places, gone = _places(names, is_generation), []
    for path in _unlinked(folder, paths):
        inner = open_storage(path)
        by_id = generations_in(inner.names())
        if any(is_alive(inner, save_id, names) for save_id, names in by_id.items()):
            continue
        if unpublish(inner, by_id, (saves or {}).get(path)):
            gone.append(path)
    kept = tuple(sorted(name for name in storage.names() if name.rpartition("/")[2] == MANIFEST)[-1:])
    work = RemoveWork(absolute(folder), kept)  # of those that are gone now, and of killed saves
    run_tasks(work, sorted(places), executor, lambda place, done: None, here=functools.partial(_remove_in, str(folder)))
    remove_empty(storage, places | {path.rpartition("/")[2] for path in gone})  # some had no data files
    return gone


def _unlinked(folder: AnyPath, paths: Iterable[str]) -> list[str]:
    """Return the checkpoints directly below `folder` that are not links, and to which, or into
    which, no link in it leads. The target of a link may belong to another run.
    """
    if (local := local_path(folder)) is None or not os.path.isdir(local):
        return [*paths]
    with os.scandir(local) as entries:
        targets = [f"{os.path.realpath(entry.path)}/" for entry in entries if entry.is_symlink()]
    found = []
    for path in paths:
        place = f"{place_of(open_storage(path))}/"
        if not any(target.startswith(place) for target in targets):
            found.append(path)
    return found


@dataclass(frozen=True)
class _Published:
    """A checkpoint with a manifest, and what determines its age."""

    path: str
    is_below: bool
    """False if it is the folder itself."""
    step: RunStep | None
    created_unix_s: float = 0.0
    problem: str = ""
    """Why it cannot be opened."""
    save_id: str = ""


def complete(folder: AnyPath) -> list[_Published]:
    """Return the complete native steps of a run, the oldest first. If no name is that of a step,
    return all native checkpoints."""
    gone = {path_below(folder, name) for name in discarded_in(open_storage(folder))}
    known = [one for one in published(folder) if not one.problem and one.path not in gone]
    by_time = sorted(known, key=lambda one: (one.created_unix_s, one.path))
    steps = [(one.step.age, one) for one in by_time if one.step]
    if not steps and run_in(open_storage(folder).names()):
        return []
    return [one for _, one in sorted(steps, key=itemgetter(0))] or by_time


Seen = dict[str, tuple[object, _Published]]
"""Complete checkpoints by path, with the result of `files_of`."""


def published(folder: AnyPath, seen: Seen | None = None, tries: int = 3) -> list[_Published]:
    """Return the checkpoints at and directly below `folder` whose save has ended, including those
    whose manifest was lost.

    Args:
        seen: what an earlier call found, which is updated. Of these, only what has changed is
        opened again.
        tries: how many times to list again if a checkpoint was removed meanwhile, because the save
        that
            replaced it may have been published after the listing.
    """
    if isinstance(folder, Storage):
        raise CheckpointError(f"expected a path or URL, got the storage {folder.url}")
    storage = open_storage(folder)
    found, inside = [], dict[str, list[str]]()
    for name in storage.names():
        place = "" if GENERATION.match(name) else name.rpartition("/")[0] and name.partition("/")[0]
        inside.setdefault(place, []).append(name.removeprefix(f"{place}/"))
    for name in storage.top() or ():
        place = name.removesuffix("/")
        if place == name or place in inside:
            continue
        # a link to a folder, which `names` does not follow, or an empty one
        linked = open_storage(path_below(folder, place))
        with suppress(StorageError):  # not ours to read
            if MANIFEST in (linked.top() or ()):  # there can be much elsewhere
                inside[place] = linked.names()
    known: Seen = {}
    is_gone = False
    for place, names in inside.items():
        if MANIFEST not in names and not without_claim(names):
            continue
        path = path_below(folder, place)
        files = None if seen is None or not place else files_of(path)
        if seen and files is not None and seen.get(path, ())[:1] == (files,):
            one: _Published | None = seen[path][1]
        else:
            one = _opened(path, place, names)
        if one is not None:
            found.append(one)
            if files is not None and not one.problem:
                known[path] = files, one
        elif MANIFEST in names and MANIFEST not in open_storage(path).names(MANIFEST):
            is_gone = True
    if is_gone and tries:
        return published(folder, seen, tries - 1)
    if seen is not None:
        seen.clear()
        seen.update(known)
    return found


def files_of(path: str) -> object:
    """Return what decides whether a checkpoint is complete: a digest of its manifest, and names and
    sizes of its files. None if no manifest can be read."""
    storage = open_storage(path)
    with suppress(CheckpointError):
        return xxhash.xxh3_128_digest(storage.read(MANIFEST)), storage.list()
    return None


def _opened(path: str, place: str, names: Collection[str]) -> _Published | None:
    """Open the checkpoint at `path`, which had files with these names. None if it was removed meanwhile."""
    step = step_of(place) if place else None
    if step is not None and step.step is None:  # `last`
        step = None
    try:
        if MANIFEST not in names:
            open_checkpoint(path)  # it looks again: a save may have published since
        opened = open_checkpoint(path_below(path, MANIFEST))  # whatever other files are there
    except CheckpointError as error:
        with suppress(CheckpointNotFoundError):  # removed meanwhile
            inner, is_lost = open_storage(path), MANIFEST not in names and isinstance(error, CorruptCheckpointError)
            if not is_lost and detect(inner, {MANIFEST: inner.size(MANIFEST)}):
                refuse_newer(inner)
            return _Published(path, bool(place), step, problem=str(error))
        return None
    native = opened.contents.details(NativeFacts)
    if native is None:
        return None
    return _Published(path, bool(place), step, native.manifest.created_unix_s, save_id=native.manifest.save_id)
