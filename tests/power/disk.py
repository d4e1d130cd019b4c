"""What a file system may hold after the power was lost, of operations that were recorded.

    disk = Disk(folder)                       # what lies there is durable
    with disk.recording(): save(...)
    for crash in disk.crashes(): ...          # each: a moment, and what was not synced by then
        crash.write(choices, elsewhere)       # the folder, as it may be found again

The model is weaker than any file system that is in use:

- `fsync` of a file makes its bytes and its length durable, and nothing else: not its name.
- `fsync` of a folder makes the names in it durable, and nothing else: not those of the folder itself, nor what is in
  files.
- Whatever was not synced is kept or lost, each operation by itself and in no order. One rename is kept or lost as a
  whole. So is what one system call does to one name.
- A write that was not synced may be kept, be lost, or be kept for any of its sectors of 512 bytes; what is lost within
  the file's length is zeros, or what the disk held before.

Writes through mapped memory are noticed when the file is synced.
"""

from __future__ import annotations

import itertools
import linecache
import math
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import xxhash

__all__ = ["Crash", "Disk"]

SECTOR = 512
_GARBAGE = b"\xa5"

Node = int
Tree = dict[str, Node]


@dataclass(frozen=True)
class Names:
    """A folder's entries change: names to nodes, None for none."""

    node: Node
    changes: dict[str, Node | None]

    variants = ("kept", "lost")


@dataclass(frozen=True)
class Write:
    """Bytes of a file change."""

    node: Node
    at: int
    data: bytes

    @property
    def variants(self) -> tuple[str, ...]:
        """How it may be found again."""
        many = ("head", "tail") if self.at // SECTOR != (self.at + len(self.data) - 1) // SECTOR else ()
        return ("kept", "lost", "zeros", "garbage", *many)


@dataclass(frozen=True)
class Length:
    """A file is cut, or made longer by a hole."""

    node: Node
    nbytes: int

    variants = ("kept", "lost")


@dataclass(frozen=True)
class Sync:
    """`fsync`, called from a function of that name."""

    node: Node
    site: str
    call: str
    """The first line outside of storages that led there: `commit.unpublish: storage.retract(MANIFEST)`."""


Change = Names | Write | Length


@dataclass
class Disk:
    """Records what changes below a folder."""

    root: Path
    ops: list[Change | Sync] = field(default_factory=list)
    files: dict[Node, bytes] = field(default_factory=dict)
    """Of the beginning."""
    folders: dict[Node, Tree] = field(default_factory=dict)
    """Of the beginning."""
    times: dict[Node, int] = field(default_factory=dict)
    """When files of the beginning were written, in nanoseconds."""

    def __post_init__(self) -> None:
        self.root = Path(os.path.realpath(self.root))
        self._numbers = itertools.count(1)
        by_inode: dict[int, Node] = {}
        self._scan(self.root, 0, by_inode)
        self._live = {node: dict(tree) for node, tree in self.folders.items()}
        self._now = {node: bytearray(data) for node, data in self.files.items()}
        self._file: dict[int, Node] = {}
        self._at: dict[int, int] = {}

    def _scan(self, folder: Path, node: Node, by_inode: dict[int, Node]) -> None:
        tree = self.folders.setdefault(node, {})
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            inode = entry.inode()
            if inode in by_inode:
                tree[entry.name] = by_inode[inode]
                continue
            tree[entry.name] = child = by_inode[inode] = next(self._numbers)
            if entry.is_dir():
                self._scan(folder / entry.name, child, by_inode)
            else:
                self.files[child] = Path(entry.path).read_bytes()
                self.times[child] = entry.stat().st_mtime_ns

    # --- recording ---

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note what this process does to files below the folder."""
        real = {name: getattr(os, name) for name in _CALLS}
        ours = {name: self._noting(getattr(self, f"_{name}"), real[name]) for name in _CALLS}
        self._real = real
        with mock.patch.multiple(os, **ours):
            yield
        self._check_complete()

    def _noting(self, note: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return note(real, *args, **kwargs)

        return call

    def _place(self, path: Any) -> tuple[Node, str] | None:
        """The folder's node, and the name in it; None for what is not ours."""
        if isinstance(path, int):
            return None
        parts = Path(os.path.abspath(path)).parts
        base = self.root.parts
        if parts[: len(base)] != base or len(parts) == len(base):
            return None
        node = 0
        for part in parts[len(base) : -1]:
            if part not in self._live.get(node, {}):  # a path that leads nowhere, which the real call will say
                return None
            node = self._live[node][part]
        return node, parts[-1]

    def _node(self, path: Any) -> Node | None:
        if os.path.abspath(path) == str(self.root):
            return 0
        place = self._place(path)
        return None if place is None else self._live[place[0]].get(place[1])

    def _log_names(self, folder: Node, changes: dict[str, Node | None]) -> None:
        self.ops.append(Names(folder, changes))
        for name, node in changes.items():
            if node is None:
                self._live[folder].pop(name)
            else:
                self._live[folder][name] = node

    def _open(self, real: Any, path: Any, flags: int, *rest: Any, **kwargs: Any) -> int:
        place = self._place(path)
        is_new = place is not None and place[1] not in self._live[place[0]]
        file: int = real(path, flags, *rest, **kwargs)
        if place is not None and is_new and flags & os.O_CREAT:
            node = next(self._numbers)
            self.files[node], self._now[node] = b"", bytearray()
            self._log_names(place[0], {place[1]: node})
        node_ = self._node(path) if not isinstance(path, int) else None
        if node_ is not None:
            self._file[file], self._at[file] = node_, 0
            if flags & os.O_TRUNC:
                self._cut(node_, 0)
        return file

    def _close(self, real: Any, file: int) -> None:
        self._file.pop(file, None)
        real(file)

    def _write(self, real: Any, file: int, data: Any) -> int:
        done: int = real(file, data)
        if file in self._file:
            self._put(self._file[file], self._at[file], bytes(memoryview(data)[:done]))
            self._at[file] += done
        return done

    def _pwrite(self, real: Any, file: int, data: Any, at: int) -> int:
        done: int = real(file, data, at)
        if file in self._file:
            self._put(self._file[file], at, bytes(memoryview(data)[:done]))
        return done

    def _put(self, node: Node, at: int, data: bytes) -> None:
        if data:
            self.ops.append(Write(node, at, data))
            _put(self._now[node], at, data)

    def _cut(self, node: Node, nbytes: int) -> None:
        if nbytes != len(self._now[node]):
            self.ops.append(Length(node, nbytes))
            _cut(self._now[node], nbytes)

    def _ftruncate(self, real: Any, file: int, nbytes: int) -> None:
        real(file, nbytes)
        if file in self._file:
            self._cut(self._file[file], nbytes)

    def _posix_fallocate(self, real: Any, file: int, at: int, nbytes: int) -> None:
        real(file, at, nbytes)
        if file in self._file:
            self._cut(self._file[file], max(len(self._now[self._file[file]]), at + nbytes))

    def _fsync(self, real: Any, file: int) -> None:
        real(file)
        if file in self._file:
            node = self._file[file]
            if node in self._now:
                self._notice_mapped(node, file)
            self.ops.append(Sync(node, *_site()))

    def _notice_mapped(self, node: Node, file: int) -> None:
        """What was written by way of memory since."""
        with open(f"/proc/self/fd/{file}", "rb") as again:
            data, known = again.read(), self._now[node]
        assert len(data) == len(known)
        for at in range(0, len(data), SECTOR):
            if data[at : at + SECTOR] != known[at : at + SECTOR]:
                self._put(node, at, data[at : at + SECTOR])

    def _mkdir(self, real: Any, path: Any, *rest: Any, **kwargs: Any) -> None:
        real(path, *rest, **kwargs)
        place = self._place(path)
        if place is not None:
            node = next(self._numbers)
            self.folders[node], self._live[node] = {}, {}
            self._log_names(place[0], {place[1]: node})

    def _replace(self, real: Any, source: Any, target: Any, **kwargs: Any) -> None:
        before, after = self._place(source), self._place(target)
        real(source, target, **kwargs)
        if before is not None or after is not None:
            assert before is not None
            assert after is not None
            assert before[0] == after[0], "renames stay in their folder"
            self._log_names(before[0], {before[1]: None, after[1]: self._live[before[0]][before[1]]})

    _rename = _replace

    def _link(self, real: Any, source: Any, target: Any, **kwargs: Any) -> None:
        node = self._node(source)
        real(source, target, **kwargs)
        place = self._place(target)
        if place is not None:
            self._log_names(place[0], {place[1]: node})

    def _unlink(self, real: Any, path: Any, **kwargs: Any) -> None:
        real(path, **kwargs)
        place = self._place(path)
        if place is not None:
            self._log_names(place[0], {place[1]: None})

    _remove = _rmdir = _unlink

    def _check_complete(self) -> None:
        """Whatever changed below the folder has passed by here, but for bytes in mapped memory that nobody syncs."""
        found = Disk(self.root)
        ours = Crash(self, len(self.ops), frozenset()).paths([])
        theirs = Crash(found, 0, frozenset()).paths([])
        assert ours.keys() == theirs.keys(), f"changed behind our back: {sorted(ours.keys() ^ theirs.keys())}"
        for name, node in ours.items():
            other = found.files.get(theirs[name])
            assert other is None or bytes(self._now[node]) == other, f"{name} was changed behind our back"

    # --- what may be found again ---

    def sites(self) -> set[str]:
        """The functions that sync something, and the lines that call them."""
        return {name for op in self.ops if isinstance(op, Sync) for name in (op.site, op.call)}

    def crashes(self, without: frozenset[str] = frozenset()) -> Iterator[Crash]:
        """Moments at which most may be lost: at the end, and before each sync. What may be found after any other is
        found after one of these, too, with more of it lost."""
        yield Crash(self, len(self.ops), without)
        for at, op in enumerate(self.ops):
            if isinstance(op, Sync) and without.isdisjoint((op.site, op.call)):
                yield Crash(self, at, without)


_CALLS = (
    "open", "close", "write", "pwrite", "ftruncate", "posix_fallocate", "fsync", "mkdir", "replace", "rename", "link",
    "unlink", "remove", "rmdir",
)  # fmt: skip


def _site() -> tuple[str, str]:
    """The function of the library that syncs; of a helper that any may call, who called that. And the line that calls
    a storage to do so."""
    frame, what = sys._getframe(3), ""
    while frame.f_code.co_name in ("sync_folder", "call"):
        what = " of a folder" if frame.f_code.co_name == "sync_folder" else what
        assert frame.f_back is not None
        frame = frame.f_back
    site = f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_qualname}{what}"
    within = ("/reshard/storage/", "/reshard/stored/streaming.py") if "retract" in site else ("/reshard/storage/",)
    while any(part in frame.f_code.co_filename for part in within) and frame.f_back is not None:
        frame = frame.f_back
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).partition("  # ")[0].strip()
    return site, f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_qualname}: {line}"


def _put(data: bytearray, at: int, piece: bytes) -> None:
    if len(data) < at + len(piece):
        data.extend(bytes(at + len(piece) - len(data)))
    data[at : at + len(piece)] = piece


def _cut(data: bytearray, nbytes: int) -> None:
    del data[nbytes:]
    data.extend(bytes(nbytes - len(data)))


@dataclass
class Crash:
    """The power is lost after so many operations."""

    disk: Disk
    at: int
    without: frozenset[str]
    """What syncs there has no effect."""

    def __post_init__(self) -> None:
        ops = self.disk.ops[: self.at]
        synced: dict[Node, int] = {}
        for i, op in enumerate(ops):
            if isinstance(op, Sync) and self.without.isdisjoint((op.site, op.call)):
                synced[op.node] = i
        self.pending: list[Change] = []
        self._durable: list[Change] = []
        for i, op in enumerate(ops):
            if not isinstance(op, Sync):
                (self._durable if synced.get(op.node, -1) > i else self.pending).append(op)

    def count(self) -> int:
        """How many ways there are to find it again."""
        return math.prod(len(op.variants) for op in self.pending)

    def choices(self, rng: random.Random, most: int) -> Iterator[Sequence[str]]:
        """All ways, if there are at most so many; else as many: all kept, all lost, each alone kept or lost, and
        others at random."""
        if self.count() <= most:
            yield from itertools.product(*(op.variants for op in self.pending))
            return
        n, all_kept, all_lost = len(self.pending), ["kept"] * len(self.pending), ["lost"] * len(self.pending)
        notable = [all_kept, all_lost]
        notable += [[*base[:i], other, *base[i + 1 :]] for i in range(n)
                    for base, other in ((all_kept, "lost"), (all_lost, "kept"))]  # fmt: skip
        yield from rng.sample(notable, min(most, len(notable)))
        for _ in range(most - len(notable)):
            bias = rng.random()
            yield ["kept" if rng.random() < bias else _any_of(op, rng) for op in self.pending]

    def state(self, choices: Sequence[str]) -> tuple[dict[Node, Tree], dict[Node, bytearray]]:
        """Folders and files."""
        folders = {node: dict(tree) for node, tree in self.disk.folders.items()}
        files = {node: bytearray(data) for node, data in self.disk.files.items()}
        chosen = [*((op, "kept") for op in self._durable), *zip(self.pending, choices)]
        for op, how in chosen:
            if how == "lost":
                continue
            if isinstance(op, Names):
                tree = folders[op.node]
                tree.update({name: node for name, node in op.changes.items() if node is not None})
                for name in [name for name, node in op.changes.items() if node is None]:
                    tree.pop(name, None)
            elif isinstance(op, Length):
                _cut(files[op.node], op.nbytes)
            else:
                _put(files[op.node], op.at, _torn(op, how, bytes(files[op.node][op.at : op.at + len(op.data)])))
        return folders, files

    def paths(self, choices: Sequence[str]) -> dict[str, Node]:
        """Whatever is to be found, by path."""
        folders, _ = self.state(choices or ["kept"] * len(self.pending))
        return dict(_walked(folders))

    def digest(self, choices: Sequence[str]) -> str:
        """The same for two that are found alike."""
        folders, files = self.state(choices)
        seen, numbers = xxhash.xxh3_128(), dict[Node, int]()
        for path, node in sorted(_walked(folders)):
            seen.update(f"{path}\0{numbers.setdefault(node, len(numbers))}\0".encode())
            seen.update(bytes(files.get(node, b"/")))
        return str(seen.hexdigest())

    def write(self, choices: Sequence[str], folder: Path) -> None:
        """Make the folder as it is found."""
        folders, files = self.state(choices)
        folder.mkdir(parents=True)
        made: dict[Node, Path] = {}
        for path, node in _walked(folders):
            if node in folders:
                (folder / path).mkdir()
            elif node in made:
                os.link(made[node], folder / path)
            else:
                made[node] = folder / path
                made[node].write_bytes(files[node])
                if node in self.disk.times:
                    os.utime(made[node], ns=(self.disk.times[node],) * 2)

    def told(self, choices: Sequence[str]) -> str:
        """In words, for messages."""
        rows = [f"{how}: {_words(op)}" for op, how in zip(self.pending, choices)]
        return f"after {self.at} of {len(self.disk.ops)} operations:\n" + "\n".join(rows)


def _words(op: Change) -> str:
    if isinstance(op, Names):
        return f"names in folder {op.node}: {op.changes}"
    return f"file {op.node}, {f'{len(op.data)} bytes at {op.at}' if isinstance(op, Write) else f'cut at {op.nbytes}'}"


def _walked(folders: dict[Node, Tree], node: Node = 0, before: str = "") -> Iterator[tuple[str, Node]]:
    for name, child in sorted(folders[node].items()):
        yield before + name, child
        if child in folders:
            yield from _walked(folders, child, f"{before}{name}/")


def _any_of(op: Change, rng: random.Random) -> str:
    is_long = isinstance(op, Write) and len(op.variants) > 4
    return f"sectors {rng.getrandbits(32)}" if is_long and rng.random() < 0.5 else rng.choice(op.variants)


def _torn(op: Write, how: str, old: bytes) -> bytes:
    """What of a write is found, whose length is."""
    old = old.ljust(len(op.data), b"\0")
    if how == "kept":
        return op.data
    if how in ("zeros", "garbage"):
        return (b"\0" if how == "zeros" else _GARBAGE) * len(op.data)
    if how.startswith("sectors"):
        rng, out = random.Random(how), bytearray(op.data)
        for start in range(-(op.at % SECTOR), len(out), SECTOR):
            piece = slice(max(start, 0), start + SECTOR)
            out[piece] = rng.choice((op.data, old, bytes(len(old)), _GARBAGE * len(old)))[piece]
        return bytes(out)
    first = SECTOR - op.at % SECTOR  # up to the next sector
    cut = first + (len(op.data) - first - 1) // SECTOR // 2 * SECTOR
    return op.data[:cut] + old[cut:] if how == "head" else old[:cut] + op.data[cut:]
