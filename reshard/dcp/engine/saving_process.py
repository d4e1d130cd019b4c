"""A separate process that writes checkpoints, so that writing does not hold the interpreter lock of
the training process.

The training process plans and communicates as usual. Only the data of the items goes to the saving
process, in shared memory that has no name in any file system:

    training process    resolve items into shared memory, order ──►          ◄── results, or the error
    saving process                                                write_data

The first save that asks for it starts the process, and all later saves use it. It ends with its
parent, even if the parent is killed.
"""

from __future__ import annotations

import atexit
import io
import mmap
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter

from reshard.dcp.engine.calls import pickled, write_here
from reshard.errors import StorageError
from reshard.storage import Storage

__all__ = ["write_in_process"]


_ALIGN_BYTES = 64
_LOOK_S = 0.5
"""How often the process checks whether its parent is alive, in seconds."""


class _ItemRow(NamedTuple):
    """Where the data of an item is in shared memory. An object has bytes and no dtype."""

    start: int
    nbytes: int
    dtype: torch.dtype | None
    shape: tuple[int, ...]


def write_in_process(writer: StorageWriter, plan: SavePlan, planner: SavePlanner) -> list[Any]:
    """Call `writer.write_data` in the saving process and return its result. This takes memory for
    all data of the plan.

    Raises the error of `write_data`, or StorageError if the process could not start, died, or could
    not reach the storage.
    """
    storage = getattr(writer, "storage", None)
    if isinstance(storage, Storage) and not storage.is_common:
        raise StorageError(f"another process cannot see {storage.url}: use AsyncCheckpointerType.THREAD")
    with _lock:
        global _process
        if _process is not None and not _process.is_alive:
            _process.end()
            _process = None
        _process = _process or _SavingProcess()
        return _process.write(writer, plan, planner)


class _SavingProcess:
    """The training process's handle to its saving process."""

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise StorageError("this system has no anonymous shared memory: use AsyncCheckpointerType.THREAD")
        self._memory = os.memfd_create("reshard-save", os.MFD_CLOEXEC)
        path = os.pathsep.join(path for path in sys.path if path)
        self.child = subprocess.Popen(
            [sys.executable, "-m", "reshard.dcp.engine.saving_process", str(self._memory), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(self._memory,),
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        )

    @property
    def is_alive(self) -> bool:
        """Return True if it can accept an order."""
        return self.child.poll() is None

    def write(self, writer: StorageWriter, plan: SavePlan, planner: SavePlanner) -> list[Any]:
        """Send an order and return its answer."""
        rows = self._share([planner.resolve_data(item) for item in plan.items])
        try:
            order = pickle.dumps((writer, plan, rows))
        except Exception as error:
            raise StorageError(
                f"this {type(writer).__name__} cannot be sent to a process ({error}): use AsyncCheckpointerType.THREAD"
            ) from error
        try:
            _send(self.child.stdin, order)
            answer = _receive(self.child.stdout)
        except OSError:
            answer = None
        finally:
            os.ftruncate(self._memory, 0)
        if answer is None:
            raise StorageError(f"the saving process ended with code {self.child.wait()} before all was written")
        failure, written = pickle.loads(answer)
        if failure is not None:
            try:
                raise failure
            finally:
                del failure
        results: list[Any] = written
        return results

    def _share(self, values: Sequence[torch.Tensor | io.BytesIO]) -> list[_ItemRow]:
        rows, size = [], 0
        for value in values:
            kind, shape = (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else (None, ())
            nbytes = value.nbytes if isinstance(value, torch.Tensor) else value.getbuffer().nbytes
            rows.append(_ItemRow(size, nbytes, kind, shape))
            size += -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        os.ftruncate(self._memory, max(size, 1))
        whole = torch.frombuffer(mmap.mmap(self._memory, max(size, 1)), dtype=torch.uint8)
        with torch.no_grad():
            for row, value in zip(rows, values, strict=True):
                if isinstance(value, torch.Tensor):
                    _view(whole, row).copy_(value)
                elif row.nbytes:
                    data = torch.frombuffer(value.getbuffer(), dtype=torch.uint8)
                    whole[row.start : row.start + row.nbytes] = data
        return rows

    def end(self) -> None:
        """Ask the process to end, and wait until it has."""
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        with suppress(BrokenPipeError):
            self.child.stdin.close()
        self.child.wait()
        self.child.stdout.close()
        os.close(self._memory)


_lock = threading.Lock()
_process: _SavingProcess | None = None
_of_parent: list[_SavingProcess] = []
"""In a forked child, references that keep the parent's pipes open."""


def _end() -> None:
    if _process is not None:
        _process.end()


def _forget() -> None:
    """Forget the saving process in a forked child: it belongs to the parent."""
    global _process, _lock
    if _process is not None:
        _process.child.returncode = 0  # keeps this process from waiting for it
        _of_parent.append(_process)
    _process, _lock = None, threading.Lock()


atexit.register(_end)
os.register_at_fork(after_in_child=_forget)


def _view(whole: torch.Tensor, row: _ItemRow) -> torch.Tensor:
    assert row.dtype is not None
    return whole[row.start : row.start + row.nbytes].view(row.dtype).view(row.shape)


def _send(stream: Any, data: bytes) -> None:
    stream.write(len(data).to_bytes(8, "little") + data)
    stream.flush()


def _receive(stream: Any) -> bytes | None:
    """Return the next message, or None at the end of the stream."""
    head = stream.read(8)
    size = int.from_bytes(head, "little")
    data: bytes = stream.read(size)
    return data if len(head) == 8 and len(data) == size else None


class _Shared(SavePlanner):
    """Returns the data of items that are in shared memory."""

    def __init__(self, plan: SavePlan, rows: Sequence[_ItemRow], whole: torch.Tensor) -> None:
        self._rows, self._whole = {item.index: row for item, row in zip(plan.items, rows, strict=True)}, whole

    def resolve_data(self, write_item: Any) -> torch.Tensor | io.BytesIO:
        row = self._rows[write_item.index]
        if row.dtype is not None:
            return _view(self._whole, row)
        return io.BytesIO(self._whole[row.start : row.start + row.nbytes].numpy().tobytes())

    set_up_planner = create_local_plan = create_global_plan = finish_plan = None  # type: ignore[assignment]  # the parent's


def _serve(memory: int, parent: int) -> None:
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    orders, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    while (order := _receive(orders)) is not None:
        try:
            _send(answers, pickle.dumps((None, _write(memory, order))))
        except Exception as error:
            _send(answers, pickled(error))


def _write(memory: int, order: bytes) -> list[Any]:
    writer, plan, rows = pickle.loads(order)  # sent by the parent, so it is trusted
    whole = torch.frombuffer(mmap.mmap(memory, os.fstat(memory).st_size), dtype=torch.uint8)
    return write_here(writer, plan, _Shared(plan, rows, whole))


def _end_with(parent: int) -> None:
    """Exit at once, without cleanup, when the parent has ended. Its unfinished save no longer
    counts.
    """
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))
