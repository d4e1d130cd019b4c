"""Runs a function on several gloo processes, in which both contestants are timed."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist


def run(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Call `fn(*args)` on every rank, and return the results in rank order."""
    context = get_context("spawn")
    queue = context.SimpleQueue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = [
        context.Process(target=_child, args=(fn, rank, world_size, port, queue, args)) for rank in range(world_size)
    ]
    for child in children:
        child.start()
    results: dict[int, Any] = {}
    while len(results) < world_size:
        while queue.empty():
            if any(child.exitcode not in (None, 0) for child in children):
                raise RuntimeError("a process of the benchmark died")
            time.sleep(0.01)
        rank, value = queue.get()
        results[rank] = value
    for child in children:
        child.join()
    return [results[rank] for rank in range(world_size)]


def _child(fn: Callable[..., Any], rank: int, world_size: int, port: int, queue: Any, args: tuple[Any, ...]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    try:
        value = fn(*args)
    finally:
        dist.barrier()
        dist.destroy_process_group()
    queue.put((rank, value))


def timed(fn: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds from when all ranks start to when all are done, and the result of `fn`."""
    dist.barrier()
    start = time.perf_counter()
    value = fn()
    dist.barrier()
    return time.perf_counter() - start, value


def measured(fn: Callable[[], Any]) -> tuple[float, float, Any]:
    """Like `timed`, with the CPU seconds of all threads of this process, which hardly depend on other load of the
    machine."""
    dist.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    value = fn()
    cpu = time.process_time() - cpu
    dist.barrier()
    return time.perf_counter() - start, cpu, value


def over_ranks(ranks: Sequence[Sequence[Mapping[str, Sequence[float]]]]) -> dict[str, dict[str, tuple[float, ...]]]:
    """Return the figures of the rounds by unit and contestant: the slowest rank's seconds, and all ranks' CPU time.

    `ranks` has, for each rank and round, (seconds, CPU seconds) by contestant.
    """
    rounds = list(zip(*ranks, strict=True))
    return {
        unit: {who: tuple(total(rank[who][i] for rank in ranks) for ranks in rounds) for who in rounds[0][0]}
        for i, (unit, total) in enumerate({"s": max, "CPU s": sum}.items())
    }


def read_chars() -> int:
    """Return the bytes that this process has read by calls so far, without mappings."""
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])
