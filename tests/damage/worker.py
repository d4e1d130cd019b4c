"""Cells in a process of their own: one that crashes or hangs is a result, and the others go on."""

from __future__ import annotations

import logging
import multiprocessing
import resource
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from tests.damage.matrix import DEADLINE_S, Cell, Checkpoints, Outcome, Result

__all__ = ["results_of"]


MEMORY_BYTES = 8 << 30
"""A damaged length must not make a reader take all the memory there is."""


def results_of(cells: Sequence[Cell], folder: Path) -> Iterator[Result]:
    """What comes of each, in this order, as it comes. Below `folder`, checkpoints are made."""
    waiting = list(cells)
    context = multiprocessing.get_context("spawn")
    while waiting:
        ours, theirs = context.Pipe()
        worker = context.Process(target=_work, args=(theirs, waiting, folder))
        worker.start()
        theirs.close()
        done = 0
        try:
            while done < len(waiting) and ours.poll(3 * DEADLINE_S):
                yield ours.recv()
                done += 1
            said = "" if done == len(waiting) else "it hangs where no alarm reaches it"
        except EOFError:
            worker.join()
            said = f"the process ended with {worker.exitcode}"
        worker.kill()
        worker.join()
        if said:
            yield Result(waiting[done], Outcome.HANGS, said)
            done += 1
        waiting = waiting[done:]


def _work(results: Connection, waiting: list[Cell], folder: Path) -> None:
    logging.getLogger("reshard").addHandler(logging.NullHandler())  # what is passed over is no news here
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    checkpoints = Checkpoints(folder)
    for cell in waiting:
        results.send(checkpoints.run(cell))
