"""The communication between ranks in a save and a load, for many processes on one real TCPStore.

    python -m benchmarks.control [--ranks 64 128 256 512] [--per-machine 8] [--ranks-per-file 8] [--quick]

The processes are forked, use torch's fake backend (whose collectives do nothing), and have tiny states, so this
measures the control plane: seconds until the last rank is done, CPU time per rank, bytes that a rank sends to the
store and receives, and its number of calls. Each `--per-machine` ranks believe that they share a machine. The first
save and load of a process, with nothing cached, are reported beside the second ones. The floor of seconds is the CPU
time of all ranks, divided by the number of cores.

The peer is torch's save and load of the same state with the same number of processes, over gloo, up to `--dcp` ranks.
Its messages are not in the store, so they are not counted.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import socket
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed import fake_pg  # noqa: F401  it registers the backend

import reshard
from benchmarks.page import Row, arguments, report
from reshard.api import save_job
from reshard.execute import host_reading
from reshard.ranks import liveness, store

warnings.filterwarnings("ignore")

VERBS = ("save", "load", "save again", "load again")


class Counting:
    """A store that counts calls by name, and bytes in and out."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        def counted(*args: Any) -> Any:
            calls[name] += 1
            calls["bytes out"] += sum(map(_size, args))
            answer = method(*args)
            calls["bytes in"] += _size(answer)
            return answer

        return counted


calls: Counter[str] = Counter()


def _size(value: Any) -> int:
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 0


def ours(folder: str, clock: Clock, tensors: int, ranks_per_file: int = 1) -> None:
    """Save and load twice by reshard."""
    opened = store.SharedStore._open
    store.SharedStore._open = lambda shared: Counting(opened(shared))  # type: ignore[method-assign]
    state = make(clock.rank, clock.world_size, tensors)
    for i, path in enumerate((f"{folder}/first", f"{folder}/second")):
        save = partial(reshard.save, state, path, ranks_per_file=ranks_per_file)
        clock.measure(VERBS[2 * i], save)
        clock.measure(VERBS[2 * i + 1], lambda path=path: reshard.load(state, path))  # type: ignore[misc]


def theirs(folder: str, clock: Clock, tensors: int) -> None:
    """Save and load twice by DCP."""
    state = make(clock.rank, clock.world_size, tensors)
    for i, path in enumerate((f"{folder}/first", f"{folder}/second")):
        clock.measure(VERBS[2 * i], lambda path=path: dcp.save(state, checkpoint_id=path))  # type: ignore[misc]
        clock.measure(VERBS[2 * i + 1], lambda path=path: dcp.load(state, checkpoint_id=path))  # type: ignore[misc]


def make(rank: int, world_size: int, tensors: int) -> dict[str, Any]:
    """Return a state of a few rows per rank, a replicated tensor, and a number."""
    mesh = DeviceMesh("cpu", list(range(world_size)))
    state: dict[str, Any] = {
        f"layers.{i}.weight": DTensor.from_local(torch.full((2, 4), float(rank)), mesh, [Shard(0)], run_check=False)
        for i in range(tensors)
    }
    return {"model": {**state, "norm": torch.ones(4)}, "step": 7}


def warm() -> None:
    """Import what saves and loads import, so that forked processes share it."""
    if not dist.is_initialized():
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
        folder = tempfile.mkdtemp(dir="/dev/shm")
        state = make(0, 1, 1)
        reshard.save(state, folder)
        reshard.load(state, folder)
        shutil.rmtree(folder)
        dist.destroy_process_group()
    gc.collect()
    gc.freeze()


class Clock:
    """Starts all ranks together, and records the cost of each operation on this one."""

    def __init__(self, rank: int, world_size: int, starts: Any) -> None:
        self.rank, self.world_size, self.rows = rank, world_size, {}
        self._starts = starts

    rows: dict[str, dict[str, float]]

    def measure(self, name: str, work: Callable[[], Any]) -> None:
        """Measure `work` once all ranks are here."""
        self._starts.wait()
        calls.clear()
        begun, cpu = time.time(), time.process_time()
        work()
        self.rows[name] = {"begun": begun, "ended": time.time(), "cpu": time.process_time() - cpu, **calls}


def _child(
    body: Any, rank: int, world_size: int, per_machine: int, port: int, folder: str, starts: Any, pipe: Connection,
    tensors: int,
) -> None:  # fmt: skip
    here = f"{liveness.machine()} {rank // per_machine}"
    liveness.machine = host_reading.machine = save_job.machine = lambda: here
    socket.gethostname = lambda: f"machine-{rank // per_machine}"
    torch.set_num_threads(1)
    shared = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=600))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo" if body is theirs else "fake", store=shared, rank=rank, world_size=world_size)
    clock = Clock(rank, world_size, starts)
    try:
        body(folder, clock, tensors)
        pipe.send(clock.rows)
    except BaseException as error:
        pipe.send(error)
    starts.wait()
    os._exit(0)


def _serve(pipe: Connection) -> None:
    """Host the store until asked for its number of keys."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(server.port)
    pipe.recv()
    pipe.send(server.num_keys())
    os._exit(0)


def run(
    body: Any, world_size: int, per_machine: int, folder: str, tensors: int
) -> tuple[list[dict[str, dict[str, float]]], int]:
    """Return the cost of each operation on each rank, and the number of keys left in the store."""
    warm()
    context = multiprocessing.get_context("fork")
    # in a process that does not fork: the server's thread holds a libc lock while it looks up a client's name, and a
    # process that is forked at that time would wait for the lock forever
    to_server, of_server = context.Pipe()
    context.Process(target=_serve, args=(of_server,), daemon=True).start()
    port = to_server.recv()
    starts = context.Barrier(world_size)
    pipes, children = [], []
    for rank in range(world_size):
        receive, send = context.Pipe(duplex=False)
        args = (body, rank, world_size, per_machine, port, folder, starts, send, tensors)
        child = context.Process(target=_child, args=args, daemon=True)
        child.start()
        send.close()
        pipes.append(receive)
        children.append(child)
    rows = [pipe.recv() for pipe in pipes]
    for child in children:
        child.join()
    if errors := [row for row in rows if isinstance(row, BaseException)]:
        raise errors[0]
    to_server.send(None)
    return rows, to_server.recv()


ASKED = ("set", "get", "add", "append", "check", "compare_set", "delete_key", "wait", "multi_get", "multi_set")


def rows(world_size: int, per_machine: int, ranks_per_file: int, tensors: int, with_dcp: bool) -> Iterator[Row]:
    """Yield the rows for one number of ranks."""
    mine, kept = _in_folder(partial(ours, ranks_per_file=ranks_per_file), world_size, per_machine, tensors)
    its = _in_folder(theirs, world_size, per_machine, tensors)[0] if with_dcp else []
    cores = len(os.sched_getaffinity(0))
    name = f"{world_size} ranks" + (f", {ranks_per_file} a file" if ranks_per_file > 1 else "")
    for verb in VERBS:
        of, peer = [row[verb] for row in mine], [row[verb] for row in its]
        spent = sum(row["cpu"] for row in of)
        dcp = {"DCP": (_seconds(peer),)} if peer else {}
        yield Row("control", f"{name}: {verb}", "s", (_seconds(of),), dcp, floor=(spent / cores,))
        dcp = {"DCP": (sum(row["cpu"] for row in peer) / world_size * 1e3,)} if peer else {}
        yield Row("control", f"{name}: {verb}, a rank", "CPU ms", (spent / world_size * 1e3,), dcp)
        got = sum(row.get("bytes in", 0) for row in of) / world_size
        gave = sum(row.get("bytes out", 0) for row in of) / world_size
        asked = sum(row.get(kind, 0) for row in of for kind in ASKED) / world_size
        for what, unit, figure in (("gets", "kB", got / 1e3), ("gives", "kB", gave / 1e3), ("asks", "times", asked)):
            yield Row("control", f"{name}: {verb}, a rank {what}", unit, (figure,))
    yield Row("control", f"{name}: left in the store", "keys a rank", (kept / world_size,))


def _seconds(of: list[dict[str, float]]) -> float:
    return max(row["ended"] for row in of) - min(row["begun"] for row in of)


def _in_folder(
    body: Any, world_size: int, per_machine: int, tensors: int
) -> tuple[list[dict[str, dict[str, float]]], int]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", ignore_cleanup_errors=True) as folder:
        return run(body, world_size, per_machine, folder, tensors)


def main() -> int:
    # torch looks up the name of each new connection to a store, here all at once: see docs/scale.md
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 64, 128, 256, 512])
    parser.add_argument("--per-machine", type=int, default=8, help="so many ranks take themselves for one machine's")
    parser.add_argument("--tensors", type=int, default=2, help="sharded ones in the state")
    parser.add_argument("--ranks-per-file", type=int, default=1, help="so many ranks of a machine write one file")
    parser.add_argument("--dcp", type=int, default=64, help="DCP over gloo beside it up to so many ranks")
    options = parser.parse_args()
    sizes = [8, 32, 64] if options.quick else options.ranks
    found = (
        row
        for size in sizes
        for row in rows(size, options.per_machine, options.ranks_per_file, options.tensors, size <= options.dcp)
    )
    return report(found, options.rows)


if __name__ == "__main__":
    sys.exit(main())
