"""Several processes on this machine that talk over gloo, and what they tell while they work."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reshard.errors import ReshardError

__all__ = ["Tell", "run"]

Tell = Callable[[Any], None]
"""Sends a value to whoever listens in the process that started the ranks."""


@dataclass(frozen=True)
class _Word:
    kind: str  # "said", "done" or "failed"
    value: Any


def run(job: Callable[..., Any], world_size: int, *args: Any, hear: Callable[[int, Any], None]) -> list[Any]:
    """Call `job(tell, *args)` on `world_size` ranks; `hear(rank, value)` gets what they tell. Results by rank.

    `job` is a function of a module; it and its arguments and results are pickled.

    Raises ReshardError if a rank fails or dies, with its traceback as a note; the others are ended.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, but not in torch's own list

    context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    context.set_forkserver_preload([job.__module__])  # torch is imported once, not once a rank
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes: dict[Any, int] = {}
    children = []
    results: dict[int, Any] = {}
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            child = context.Process(target=_child, args=(rank, world_size, store.port, theirs, job, args), daemon=True)
            child.start()
            theirs.close()
            pipes[ours] = rank
            children.append(child)
        while pipes:
            for pipe in multiprocessing.connection.wait(list(pipes)):
                word = _receive(pipe, pipes[pipe])
                if word.kind == "said":
                    hear(pipes[pipe], word.value)
                    continue
                results[pipes.pop(pipe)] = word.value
        for child in children:
            child.join()
    finally:
        for child in children:
            if child.is_alive():
                child.kill()
            child.join()
    return [results[rank] for rank in range(world_size)]


def _receive(pipe: Any, rank: int) -> _Word:
    try:
        word: _Word = pipe.recv()
    except EOFError:
        raise ReshardError(f"rank {rank} of the demo died without a word; was it killed for memory?") from None
    if word.kind == "failed":
        told, trace = word.value
        error = ReshardError(f"rank {rank} of the demo failed: {told}")
        error.add_note(trace)
        raise error
    return word


def _child(rank: int, world_size: int, port: int, pipe: Any, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # as above

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the process that started us, and it ends us
    torch.set_num_threads(1)
    # two remarks on speed and on in-place edits that this model does not do; they would tear the progress bars
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the machine's own name may lead nowhere
    try:
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        result = job(lambda value: pipe.send(_Word("said", value)), *args)
        dist.destroy_process_group()
        pipe.send(_Word("done", result))
    except BaseException as error:
        trace = traceback.format_exc()
        known = isinstance(error, ReshardError)  # its first line says enough; of a bug, everything is needed
        pipe.send(_Word("failed", (str(error).partition("\n")[0] if known else trace, trace)))
        os._exit(1)  # without waiting for ranks that wait for this one
