"""Run a function on several real processes that talk over gloo, and bring back what each of them did.

    def body(factor):                      # a module-level function of a test module
        t = torch.ones(1) * factor
        dist.all_reduce(t)
        return t.item()

    assert gloo.run(body, 3, 2.0) == [6.0, 6.0, 6.0]

Children are forked from a server that has imported torch and the library once, so a run costs tenths of a second, and
they inherit nothing else: neither threads, nor a running pytest, nor the modules of the test, which each child imports.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["SOON_S", "Outcome", "outcomes", "run"]

_TORCH = ("torch", "torch.distributed", "torch.distributed.tensor", "torch.distributed.checkpoint")

_LIBRARY = (
    *("reshard.dcp", "reshard.api.load", "reshard.api.save", "reshard.api.redistribute", "hypothesis", "pytest"),
    *("torch._dynamo", "torch._inductor.utils", "transformers"),
)
"""Imports of most children, which take four times as long as what they then do. The last line is for optimizers and
models. Not preloaded if a device must be set up first."""


SOON_S = 8.0
"""Seconds within which ranks learn that another one failed."""

_RESOLVER = "timeout:1 attempts:1"
"""torch looks up the name of each new connection to a store, by default for 5 s and more if there is no answer."""


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: with a value, with an error and its traceback as text, or dead by `exitcode`."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    exitcode: int | None = None
    seconds: float = field(default=0.0, compare=False)
    """From the start of the run to when the parent received this outcome."""


def run(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0, **kwargs: Any) -> list[Any]:
    """Call `fn(*args)` on `world_size` processes with gloo as the default group, and return the results in rank
    order.

    `fn` is a module-level function. Arguments and results are pickled (tensors by value). If ranks fail, the error of
    the first is raised again here, with the tracebacks of all in its notes.

    Raises:
        whatever `fn` raised first; RuntimeError: a rank died; TimeoutError: after `timeout_s` seconds.
    """
    ends = outcomes(fn, world_size, *args, timeout_s=timeout_s, **kwargs)
    failed = sorted((end for end in ends if end.error is not None), key=lambda end: end.seconds)
    died = [end for end in ends if end.exitcode is not None]
    # a dead rank is the cause of the other ranks' errors, unless it was killed for lingering
    if failed and not any(end.exitcode and end.exitcode > 0 for end in died):
        error = failed[0].error
        assert error is not None
        for end in failed:
            error.add_note(f"--- rank {end.rank} ---\n{end.trace}")
        raise error
    if died:
        words = "; ".join(f"rank {end.rank} ended with exit code {end.exitcode}" for end in died)
        raise RuntimeError("\n".join([words, *(f"--- rank {end.rank} ---\n{end.trace}" for end in failed)]))
    return [end.value for end in ends]


def outcomes(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    linger_s: float = 30.0,
    store: str = "rank0",
    init: bool = True,
) -> list[Outcome]:
    """Like `run`, but return how each rank ended. Raises only when time is up.

    Args:
        timeout_s: hard limit of the run in seconds. Then, the stacks of all ranks are shown, and they are killed.
        linger_s: how many seconds the other ranks may continue after the first one failed or died.
        store: location of the rendezvous: "rank0" (a TCP store in rank 0, which dies with it), "parent" (a TCP store
            in this process, as in torchrun's agent), or "file".
        init: if False, do not initialize torch.distributed. RANK, WORLD_SIZE, MASTER_ADDR, and similar variables are
            set anyway.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_TORCH, *(() if "RESHARD_TESTS_ON_DEVICE" in os.environ else _LIBRARY)])
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before the server starts: a fork must not lose threads of its torch
    folder = Path(tempfile.mkdtemp(prefix="gloo-"))
    hosted = _host_store(folder) if store == "parent" else None
    children: list[multiprocessing.process.BaseProcess] = []
    pipes: list[multiprocessing.connection.Connection] = []
    try:
        for rank in range(world_size):
            receive, send = context.Pipe()
            # torch pickles tensors between processes as shared memory, which dies with the child
            payload = pickle.dumps((fn, args))
            environ = {"RES_OPTIONS": _RESOLVER, **os.environ}
            setup = _Setup(rank, world_size, str(folder), store, init, environ)
            child = context.Process(target=_child, args=(setup, payload, send), daemon=True)
            child.start()
            send.close()
            children.append(child)
            pipes.append(receive)
        return _collect(children, pipes, folder, timeout_s, linger_s)
    finally:
        for pipe in pipes:
            pipe.close()
        for child in children:
            if child.is_alive():
                child.kill()
            child.join()
        del hosted
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class _Setup:
    rank: int
    world_size: int
    folder: str
    store: str
    init: bool
    environ: dict[str, str]


def _collect(
    children: list[multiprocessing.process.BaseProcess],
    pipes: list[multiprocessing.connection.Connection],
    folder: Path,
    timeout_s: float,
    linger_s: float,
) -> list[Outcome]:
    start = time.monotonic()
    deadline = start + timeout_s
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    ends: dict[int, Outcome] = {}
    lingering = False
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, multiprocessing.connection.Connection)
            rank = waiting.pop(pipe)
            ends[rank] = end = _receive(rank, pipe, children[rank], time.monotonic() - start)
            if (end.error is not None or end.exitcode is not None) and not lingering:
                lingering = True
                deadline = min(deadline, time.monotonic() + linger_s)
    if waiting and not lingering:
        stacks = _stacks({rank: children[rank] for rank in waiting.values()}, folder)
        raise TimeoutError(f"ranks {sorted(waiting.values())} did not end within {timeout_s} s\n{stacks}")
    for rank in waiting.values():
        stacks = _stacks({rank: children[rank]}, folder)
        ends[rank] = Outcome(rank, exitcode=-signal.SIGKILL, trace=stacks, seconds=time.monotonic() - start)
    return [ends[rank] for rank in range(len(children))]


def _receive(
    rank: int,
    pipe: multiprocessing.connection.Connection,
    child: multiprocessing.process.BaseProcess,
    seconds: float,
) -> Outcome:
    try:
        value, error, trace = pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        child.join(5.0)
        return Outcome(rank, exitcode=child.exitcode, seconds=seconds)
    return Outcome(rank, value, error, trace, seconds=seconds)


def _stacks(children: dict[int, multiprocessing.process.BaseProcess], folder: Path) -> str:
    for child in children.values():
        if child.is_alive() and child.pid is not None:
            os.kill(child.pid, signal.SIGUSR1)
    time.sleep(0.5)
    return "\n".join(
        f"--- rank {rank} ---\n{path.read_text() if (path := folder / f'stack-{rank}').exists() else '(no stack)'}"
        for rank in sorted(children)
    )


def _host_store(folder: Path) -> Any:
    import torch.distributed as dist

    hosted = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (folder / "port").write_text(str(hosted.port))
    return hosted


def _child(setup: _Setup, payload: bytes, send: multiprocessing.connection.Connection) -> None:
    stack = open(Path(setup.folder) / f"stack-{setup.rank}", "w")  # noqa: SIM115  faulthandler needs it to the end
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    os.environ.clear()
    os.environ.update(setup.environ)
    value, error, trace = None, None, ""
    try:
        value = _in_group(setup, payload)
        data = pickle.dumps((value, None, ""))
    except BaseException as caught:
        error, trace = caught, traceback.format_exc()
        try:
            data = pickle.dumps((None, error, trace))
            pickle.loads(data)
        except Exception:
            data = pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}"), trace))
    send.send_bytes(data)
    if error is None:  # other ranks may need this one's sockets and store, so wait until the parent closes the pipe
        with contextlib.suppress(EOFError):
            send.recv_bytes()
    # destructors of a broken process group may block forever, and the result was sent
    os._exit(0)


def _in_group(setup: _Setup, payload: bytes) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(setup.rank), LOCAL_RANK=str(setup.rank), WORLD_SIZE=str(setup.world_size), MASTER_ADDR="127.0.0.1"
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if setup.store == "file":
        store: Any = dist.FileStore(str(Path(setup.folder) / "store"), setup.world_size)
    else:
        store = _tcp_store(setup)
    backend = _on_device()
    if setup.init:
        dist.init_process_group(backend, store=store, rank=setup.rank, world_size=setup.world_size)
    fn, args = pickle.loads(payload)
    return fn(*args)


def _on_device() -> str:
    """Put this process's tensors on a device, if requested. Returns the backend for that device."""
    if "RESHARD_TESTS_ON_DEVICE" not in os.environ:
        return "gloo"
    from tests.simulated import everywhere

    return everywhere.enter()


def _tcp_store(setup: _Setup) -> Any:
    import torch.distributed as dist

    path = Path(setup.folder) / "port"
    hosts = setup.store == "rank0" and setup.rank == 0
    if hosts:
        hosted = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        part = path.with_suffix(".part")
        part.write_text(str(hosted.port))
        part.rename(path)
        os.environ["MASTER_PORT"] = str(hosted.port)
        return hosted
    until = time.monotonic() + 60.0
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError("rank 0 never told its port")
        time.sleep(0.002)
    os.environ["MASTER_PORT"] = path.read_text()
    return dist.TCPStore("127.0.0.1", int(path.read_text()), is_master=False, wait_for_workers=False)
