"""What each rank does: calls, one after another, of which it writes down how each ended."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import reshard
from reshard.elastic import Tier
from reshard.errors import ReshardError

__all__ = ["RANKS_PER_HOST", "VERBS", "body", "state_of", "step_in"]

VERBS = ["save", "async_save", "load", "prune", "convert", "keep", "recover", "redistribute"]
PRUNER = 2
"""The rank that prunes: the first of the second host, by itself, while all save."""
_LAST_S = 60.0
ROWS, RANKS_PER_HOST = 3, 2


def state_of(step: int, world: int, mesh: Any) -> dict[str, Any]:
    """Rows by rank, or all of them without a mesh, and a number; all are of the step. Made without a message: gloo's
    own collectives know nothing of the deadline of a call."""
    if mesh is None:
        return {"w": torch.full((world * ROWS, 6), float(step)), "n": step}
    rows = torch.full((ROWS, 6), float(step))
    return {"w": DTensor.from_local(rows, mesh, [Shard(0)], run_check=False), "n": step}


def step_in(state: dict[str, Any]) -> int:
    """The one that all of it is of."""
    w = state["w"].to_local() if hasattr(state["w"], "to_local") else state["w"]
    assert (w == float(state["n"])).all(), f"a mixture: {w}, {state['n']}"
    return int(state["n"])


def _call(folder: Path, verb: str, deadline_s: float, mesh: Any) -> Callable[[int], None]:
    """The call of a step, in the folder that the hosts share or, of `keep` and `recover`, on their disks."""
    world, shared = dist.get_world_size(), folder / "shared"

    def state(step: int) -> dict[str, Any]:
        return state_of(step, world, mesh)

    copies = world // RANKS_PER_HOST - 1  # each host has all
    tier = Tier(folder / "disks", copies=copies, timeout=deadline_s) if verb in ("keep", "recover") else None
    if tier is not None:
        tier.save(state(1), 1)

    def loaded(step: int) -> None:
        target = state(0)
        reshard.load(target, shared / "c", timeout=deadline_s)
        assert step_in(target) == 1

    def pruned(step: int) -> None:
        try:
            if dist.get_rank() == PRUNER and step > 2:
                reshard.prune(shared / "run", keep_last=1)
        finally:  # or this rank would be steps ahead of those that wait for it
            reshard.save(state(step), shared / "run" / f"step-{step}", base="auto", timeout=deadline_s)

    def converted(step: int) -> None:
        reshard.convert(shared / "c", shared / "out", format="safetensors", overwrite=True, timeout=deadline_s)

    def recovered(step: int) -> None:
        target = state(0)
        assert tier is not None
        assert tier.restore(target).step == 1
        assert step_in(target) == 1

    def moved(step: int) -> None:
        source, target = state(step), state(0)
        target["w"] = DTensor.from_local(torch.zeros(world * ROWS, 6), mesh, [Replicate()], run_check=False)
        reshard.redistribute(source, target, timeout=deadline_s)
        assert step_in(target) == step

    calls: dict[str, Callable[[int], object]] = {
        "save": lambda step: reshard.save(state(step), shared / "c", timeout=deadline_s),
        "async_save": lambda step: reshard.async_save(state(step), shared / "c", timeout=deadline_s).result(),
        "load": loaded,
        "prune": pruned,
        "convert": converted,
        "keep": lambda step: tier.save(state(step), step) if tier is not None else None,
        "recover": recovered,
        "redistribute": moved,
    }
    return calls[verb]  # type: ignore[return-value]


def _publish(file: Path, text: str) -> None:
    """Write a file that the trial reads at any moment: it sees the old text or the new one."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(text)
    part.rename(file)


def body(
    folder: Path, verb: str, deadline_s: float, *, lives_on: bool, ahead: Callable[[], float] | None = None
) -> None:
    """Calls until one fails; if the rank `lives_on`, until it is told which is the last.

    `at-RANK` has the step of the call in progress; SIGUSR1 has all threads written to `stacks-RANK`.

    Args:
        ahead: by how many seconds the host's clock is. Namespaces of time leave the wall clock alone, so `time.time`
            says so here.
    """
    if ahead is not None:
        real = time.time
        time.time = lambda: real() + ahead()
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    reshard.save(state_of(1, world, mesh), folder / "shared" / "c")
    call = _call(folder, verb, deadline_s, mesh)
    dist.barrier()
    stacks = (folder / f"stacks-{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, stacks)
    _publish(folder / f"ready-{rank}", str(os.getpid()))
    rows: list[dict[str, Any]] = []
    step, until = 1, time.monotonic() + _LAST_S
    while time.monotonic() < until:
        step += 1
        _publish(folder / f"at-{rank}", str(step))
        said, began = "", time.monotonic()
        try:
            call(step)
        except ReshardError as error:
            said = f"{type(error).__name__}: {error}"
        except Exception as error:  # which no call may end with
            said = f"not ours: {error!r}"
        rows.append({"step": step, "said": said, "began": began, "ended": time.monotonic()})
        if lives_on:
            if (folder / "last").exists() and step >= int((folder / "last").read_text()):
                break
        elif said:
            break
    _publish(folder / f"end-{rank}", json.dumps(rows))
    os._exit(0)


if __name__ == "__main__":  # job.py FOLDER VERB DEADLINE, under torchrun
    dist.init_process_group("gloo")
    body(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), lives_on=False)
