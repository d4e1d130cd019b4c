"""The cells of the matrix: one reader, one format, one kind of place, one damage, and what came of it."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import numpy as np

from reshard.errors import ReshardError
from tests.damage.damages import DAMAGES, Bytes, Changes, Site, sites_of
from tests.damage.formats import FORMATS, Format
from tests.damage.readers import METADATA, READERS, Read, Reader, Scene
from tests.same import assert_same, differences, same

__all__ = [
    "DEADLINE_S",
    "Cell",
    "Checkpoints",
    "Outcome",
    "Result",
    "any_folder",
    "cells",
    "judged",
    "random_cell",
    "readers_of",
]

VALUES_IN = ("data", "sums", "blocks")
"""Kinds of places that nobody would look for under metadata."""

DEADLINE_S = 60
"""A reader that takes longer hangs."""


class Outcome(Enum):
    """What can come of reading a damaged checkpoint."""

    REFUSED = "refused"
    """An error of ours, or a report that is not ok."""
    RIGHT = "right"
    """What was handed out is right to the last bit: the damage is in bytes that nobody needs."""
    UNCHECKED = "told unchecked"
    """What was handed out is wrong, and the result says that it was not checked, or which file is missing."""
    NOTHING = "no damage"
    """This damage does nothing here: there is no second file, no older one, or the bytes are the same."""
    FORGED = "told by it"
    """What was handed out is other than before, as metadata with checksums that fit say: nobody can tell."""
    SILENT = "SILENT"
    """What was handed out is wrong, and nothing says so."""
    MISSED = "MISSED"
    """It is wrong and told to be unchecked, but of these bytes there is a checksum, which was not passed over as too
    dear: then a share in percent would be told."""
    BARE = "BARE ERROR"
    """An error that is none of ours."""
    HANGS = "HANGS"
    UNREADABLE = "UNDAMAGED REFUSED"
    """The reader does not give the undamaged checkpoint: what it gives of damaged ones shows nothing."""

    @property
    def is_allowed(self) -> bool:
        """Whether it is one of those that may be."""
        return self in (Outcome.REFUSED, Outcome.RIGHT, Outcome.UNCHECKED, Outcome.NOTHING, Outcome.FORGED)


@dataclass(frozen=True)
class Cell:
    """Of the matrix: by names, so that it can be written down and asked for again."""

    format: str
    reader: str
    kind: str
    damage: str
    number: int = 0
    """Which of the many places, bits and lengths."""

    def __str__(self) -> str:
        return " / ".join((self.format, self.reader, self.kind, self.damage, str(self.number)))

    @classmethod
    def parse(cls, text: str) -> Cell:
        """Of what `str` makes."""
        *names, number = text.split(" / ")
        return cls(*names, int(number))

    def is_in_share(self, of: int) -> bool:
        """Whether it is one of every so many cells: always the same ones."""
        return zlib.crc32(str(self).encode()) % of == 0


@dataclass(frozen=True)
class Result:
    """What came of a cell."""

    cell: Cell
    outcome: Outcome
    said: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.outcome.value}: {self.cell} ({self.where}): {self.said[:600]}"


@dataclass
class Checkpoint:
    """A checkpoint of a format: on the disk twice, once to be damaged, and in memory."""

    format: Format
    folder: Path
    name: str
    """Of the folder or file that is opened."""
    older: Bytes
    wanted: dict[str, Read] = field(default_factory=dict)
    """By reader: what it gives of the undamaged one."""

    @classmethod
    def made(cls, format: Format, folder: Path) -> Checkpoint:
        older: Bytes = {}
        for generation in (0, 1) if format.generations else (1,):
            shutil.rmtree(folder, ignore_errors=True)
            (folder / "made").mkdir(parents=True)
            path = format.make(folder / "made", generation)
            if generation == 0:
                older = _read_files(path.parent / (format.base or path.name))
        for name in ("good", "damaged"):
            (folder / name).mkdir()
            for kept in {path.name, format.base or path.name}:
                _copy(path.parent / kept, folder / name / kept)
            _link_again(folder / "made", folder / name)
        checkpoint = cls(format, folder, path.name, older)
        shutil.rmtree(folder / "made")
        return checkpoint

    @cached_property
    def files(self) -> Bytes:
        """Those that can be damaged: its own, or those of its base."""
        return _read_files(self.folder / "good" / (self.format.base or self.name))

    @cached_property
    def sites(self) -> Mapping[str, list[Site]]:
        """By kind."""
        found: dict[str, list[Site]] = {}
        for site in sites_of(self.files):
            found.setdefault(site.kind, []).append(site)
        return found

    def scene(self, which: str) -> Scene:
        out = self.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        return Scene(self.folder / which / self.name, self.folder / "good" / self.name, out)

    def undamaged(self, reader: Reader) -> Read:
        """What the reader gives of the undamaged checkpoint: of both copies the same."""
        if reader.name not in self.wanted:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                first, second = (reader.read(self.scene(which)) for which in ("good", "damaged"))
            assert first.ok, first.said
            assert second.ok, second.said
            assert_same(second.values, first.values)
            self.wanted[reader.name] = first
        return self.wanted[reader.name]

    @contextmanager
    def damaged(self, changes: Changes) -> Iterator[None]:
        """The copy on the disk has these files meanwhile."""
        top = self.folder / "damaged"
        base = top if list(self.files) == [self.name] else top / (self.format.base or self.name)
        try:
            for name, data in changes.items():
                _put(base / name, data)
            yield
        finally:
            _restore(base, self.files)
            if self.format.base:
                _restore(top / self.name, _read_files(self.folder / "good" / self.name))
                _link_again(self.folder / "good", top)


def _copy(source: Path, target: Path) -> None:
    (shutil.copyfile if source.is_file() else shutil.copytree)(source, target)


def _link_again(source: Path, copy: Path) -> None:
    """Two names of one file are two names of one file in the copy, too."""
    first: dict[int, Path] = {}
    for file in sorted(path for path in source.rglob("*") if path.is_file() and path.stat().st_nlink > 1):
        mine = copy / file.relative_to(source)
        if not mine.exists():
            continue
        one = first.setdefault(file.stat().st_ino, mine)
        if one is not mine and not one.samefile(mine):
            mine.unlink()
            mine.hardlink_to(one)


def _read_files(path: Path) -> Bytes:
    if path.is_file():
        return {path.name: path.read_bytes()}
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def _put(path: Path, data: bytes | None) -> None:
    """In a new file: the old one may still be mapped. Only what has other names, too, is changed for all of them."""
    if data is not None and path.is_file() and path.stat().st_nlink > 1:
        with path.open("r+b") as file:
            file.write(data)
            file.truncate()
        return
    path.unlink(missing_ok=True)
    if data is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _restore(base: Path, files: Bytes) -> None:
    """All as it was before: a reader may have left files, or removed what it took for lost."""
    for path in sorted(base.rglob("*"), reverse=True):
        if path.is_file() and str(path.relative_to(base)) not in files:
            path.unlink()
    for name, data in files.items():
        if not (base / name).is_file() or (base / name).read_bytes() != data:
            _put(base / name, data)


class Checkpoints:
    """One of each format, made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Checkpoint] = {}

    def __getitem__(self, format: str) -> Checkpoint:
        if format not in self._made:
            folder = self._folder / format.replace(" ", "-")
            self._made[format] = Checkpoint.made(FORMATS[format], folder)
        return self._made[format]

    def planned(self, cell: Cell) -> tuple[Changes, str]:
        """What the damage of a cell changes, and where that is."""
        checkpoint = self[cell.format]
        rng = Random(str(cell))
        sites = checkpoint.sites[cell.kind]
        site = rng.choice(sites)
        changes = DAMAGES[cell.damage].apply(checkpoint.files, checkpoint.older, site, sites, rng)
        changes = {name: data for name, data in changes.items() if data != checkpoint.files[name]}
        return changes, "; ".join(_where(checkpoint.files[name], data, name) for name, data in changes.items())

    def run(self, cell: Cell) -> Result:
        """Damage, read, judge."""
        checkpoint, reader = self[cell.format], READERS[cell.reader]
        changes, where = self.planned(cell)
        if not changes:
            return Result(cell, Outcome.NOTHING, "", where)
        try:
            wanted = checkpoint.undamaged(reader)
        except Exception as error:
            return Result(cell, Outcome.UNREADABLE, f"{type(error).__name__}: {error} at {_origin(error)}")
        scene = checkpoint.scene("damaged")
        with checkpoint.damaged(changes):
            return judged(cell, where, lambda: reader.read(scene), wanted)


def _where(before: bytes, after: bytes | None, name: str) -> str:
    if after is None or len(after) != len(before):
        return f"{name}, {'gone' if after is None else f'{len(before)} bytes are {len(after)}'}"
    changed = np.flatnonzero(np.frombuffer(before, np.uint8) != np.frombuffer(after, np.uint8))
    return f"{name}, {len(changed)} of {len(before)} bytes from {changed[0]} on"


def judged(cell: Cell, where: str, read: Callable[[], Read], wanted: Read) -> Result:
    """What comes of reading what is damaged, if `wanted` came of it undamaged."""
    return Result(cell, *_judged(cell, read, wanted), where)


def _judged(cell: Cell, read: Callable[[], Read], wanted: Read) -> tuple[Outcome, str]:
    try:
        with warnings.catch_warnings(), _deadline(DEADLINE_S):
            warnings.simplefilter("ignore")
            found = read()
    except ReshardError as error:
        return Outcome.REFUSED, f"{type(error).__name__}: {error}"
    except TimeoutError as error:
        return Outcome.HANGS, str(error)
    except Exception as error:
        return Outcome.BARE, f"{type(error).__name__}: {error} at {_origin(error)}"
    if not found.ok:
        return Outcome.REFUSED, found.said
    if same(found.values, wanted.values):
        return Outcome.RIGHT, found.said
    said = f"{_first_difference(found.values, wanted.values)}: {found.said}"
    if cell.damage == "removed" and " is missing" in found.said:
        return Outcome.UNCHECKED, said
    if "unchecked" not in (found.said.replace(METADATA, "") if cell.kind in VALUES_IN else found.said):
        forged = DAMAGES[cell.damage].forges and FORMATS[cell.format].checked
        return Outcome.FORGED if forged else Outcome.SILENT, said
    of_files = DAMAGES[cell.damage].of_files
    if cell.kind in FORMATS[cell.format].checked and not of_files and "% unchecked" not in found.said:
        return Outcome.MISSED, said
    return Outcome.UNCHECKED, said


def _origin(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename.rpartition('/')[2]}:{last.lineno}"


def _first_difference(found: Any, wanted: Any) -> str:
    """Where it is, without all the elements."""
    where, is_value, _ = next(differences(found, wanted)).partition(" is ")
    return f"{where} differs" if is_value else where[:200]


@contextmanager
def _deadline(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def fail(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"nothing came within {seconds} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def readers_of(format: str) -> list[Reader]:
    """The ways in which a format can be read."""
    return [
        reader for reader in READERS.values() if (format in reader.only if reader.only else format not in reader.but)
    ]


def cells(checkpoints: Checkpoints, format: str, numbers: int = 1) -> Iterator[Cell]:
    """All of a format: every reader, kind of place and damage, so many times."""
    for reader in readers_of(format):
        for kind in checkpoints[format].sites:
            for damage in DAMAGES:
                for number in range(numbers):
                    yield Cell(format, reader.name, kind, damage, number)


def random_cell(checkpoints: Checkpoints, seed: int) -> Cell:
    """One of any: a format, then a reader, a place and a damage of those that it can have."""
    rng = Random(seed)
    format = rng.choice(list(FORMATS))
    reader, kind = rng.choice(readers_of(format)), rng.choice(list(checkpoints[format].sites))
    return Cell(format, reader.name, kind, rng.choice([*DAMAGES]), seed)


def any_folder() -> Path | None:
    """Where small files are quickest, if there is such a place."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and os.access(memory, os.W_OK) else None
