"""Reads a checkpoint in shares of bounded size, one per task, by workers that open it themselves."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from planners.geometry.box import Box
from reshard.checkpoint import Checkpoint, open_damaged
from reshard.errors import CorruptCheckpointError, StorageError
from reshard.formats.detect import local_path
from reshard.native.reader import NativeFacts
from reshard.stored.streaming import windows

SHARE_BYTES = 256 << 20
"""Bytes of tensors that a task reads of each side, one window at a time."""
_SHARE_TENSORS = 2000

Share = tuple[tuple[str, Box], ...]
"""Boxes of tensors, by name."""


def shares(boxes: Iterable[tuple[str, Box, int]], *sides: Checkpoint | None) -> Iterator[Share]:
    """Yield all elements of boxes, given by name, box, and bytes per element, in order. Large boxes
    are divided in row-major order, and small ones are joined.

    In other formats than the native one, a checksum may cover a tensor, and only a task that reads
    all of the tensor can compare it. There, boxes are not divided.
    """
    is_native = all(side is None or side.contents.details(NativeFacts) for side in sides)
    share: list[tuple[str, Box]] = []
    room = SHARE_BYTES
    for name, outer, itemsize in boxes:
        parts = windows(outer.sizes, itemsize, SHARE_BYTES)
        is_one = 0 < outer.numel * itemsize <= (SHARE_BYTES if is_native else sys.maxsize)
        for box in (outer,) if is_one else (part.shift(outer.offsets) for part in parts):
            nbytes = box.numel * itemsize
            if share and (nbytes > room or len(share) == _SHARE_TENSORS):
                yield tuple(share)
                share, room = [], SHARE_BYTES
            share.append((name, box))
            room -= nbytes
    if share:
        yield tuple(share)


@dataclass(frozen=True)
class Opening:
    """Identifies a checkpoint that a driver has opened, so that workers open the same one."""

    path: str
    seen: str
    check: bool = True

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Opening:
        """Return how workers open what this process has opened by its path."""
        path = absolute(checkpoint.url)
        return cls(path, _digest(checkpoint, path))

    def open(self) -> Checkpoint:
        """Open it. Raises StorageError if it is another checkpoint, and what `reshard.open` raises."""
        checkpoint = open_damaged(self.path, check=self.check)
        if _digest(checkpoint, self.path) != self.seen:
            raise StorageError(
                f"this worker sees other files at {self.path} than the driver: all workers must see the same "
                "files, unchanged"
            )
        return checkpoint


def _digest(checkpoint: Checkpoint, path: str) -> str:
    seen = xxhash.xxh3_128(repr((checkpoint.format, list(checkpoint.objects), files_of(checkpoint, path))).encode())
    for tensor in checkpoint.values():
        seen.update(repr(tensor.stored.spec).encode())
    return str(seen.hexdigest())


def absolute(path: Any) -> Any:
    """Return a path that means the same in any working directory."""
    is_local = isinstance(path, str | os.PathLike) and "://" not in os.fspath(path)
    return os.path.abspath(path) if is_local else path


def is_about(text: str, url: str) -> bool:
    """Return whether an error begins with the URL of a checkpoint, or of one of its files."""
    roots = [root.rstrip("/") for root in (url, absolute(url), local_path(url) or url)]
    return text.startswith(tuple(root + end for root in roots for end in "/:"))


@contextmanager
def naming(checkpoint: Checkpoint | None) -> Iterator[None]:
    """Make errors of damage begin with the checkpoint, so that it is clear which of two is damaged."""
    try:
        yield
    except CorruptCheckpointError as error:
        if checkpoint is not None and not is_about(str(error), checkpoint.url):
            error.args = (f"{checkpoint.url}: {error}",)
        raise


def files_of(checkpoint: Checkpoint, url: str) -> list[tuple[Any, ...]]:
    """Return a checkpoint's files, with sizes and times on a local disk, and with versions elsewhere.

    A file that was changed is another file."""
    local, files = local_path(url), checkpoint.contents.files
    if local is None:
        if not files:
            return []
        prefix = files[0].name if len(files) == 1 else ""
        versions = files[0].storage.versions(prefix)
        return [(file.name, versions.get(file.name)) for file in files]
    root = Path(local)
    try:
        inside = root.rglob("*") if root.is_dir() else [root] if root.is_file() else [Path(f.label) for f in files]
        return [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(inside) if p.is_file()]
    except OSError as error:
        raise StorageError(f"cannot look at the files of {url}: {error.strerror or error}") from error
