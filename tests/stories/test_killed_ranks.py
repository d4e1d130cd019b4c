"""Two ranks save over what four ranks saved, and are killed at random moments: it is the old or the new, whole."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import reshard
from reshard.errors import ReshardError
from reshard.native import commit
from tests import gloo

pytestmark = pytest.mark.gloo

RUNS = 6
OLD, NEW = 4, 2


def state() -> dict[str, Any]:
    """All values say how many ranks wrote them."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    return {
        "cut": distribute_tensor(torch.full((10, 6), float(world)), mesh, [Shard(0)]),
        "copied": distribute_tensor(torch.full((5,), world), mesh, [Replicate()]),
        "of": {f"rank{dist.get_rank()}": torch.full((3,), float(world))},
        "world": world,
    }


def save(path: str) -> None:
    commit.CLAIMING_S = 0.0  # a save that died before it made its claim is taken for dead at once
    reshard.save(state(), path)


def killed(path: str, victims: list[int], when: float) -> tuple[str, float]:
    """Save, while the victims are killed after so much of the time that a save takes; how it ended, and how soon."""
    save(f"{path}-rehearsal")  # imports, first connections
    mine = state()  # before anyone dies: torch's own messages would fail
    begin = time.monotonic()
    reshard.save(mine, f"{path}-rehearsal")
    duration_s = time.monotonic() - begin
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{path} {dist.get_rank()}", "")  # out of torch's barrier
    if dist.get_rank() in victims:
        store.wait([f"{path} {rank}" for rank in range(dist.get_world_size())])
        threading.Timer(when * duration_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    begin = time.monotonic()
    try:
        reshard.save(mine, path)
    except ReshardError as error:
        return type(error).__name__, time.monotonic() - begin
    finally:
        if dist.get_rank() in victims:
            time.sleep(10.0)  # until the timer is up
    return "", time.monotonic() - begin


def found(path: Path) -> int:
    """How many ranks wrote the checkpoint: everything in it says the same."""
    checkpoint = reshard.open(path)
    world = int(checkpoint.objects["world"])
    assert set(checkpoint) == {"cut", "copied", *(f"of.rank{r}" for r in range(world))}
    for tensor in checkpoint.values():
        assert (tensor[...] == world).all(), tensor
    assert reshard.verify(path).ok
    return world


def test_fewer_ranks_killed_while_they_overwrite(tmp_path):
    random_ = random.Random(0)
    before, path = tmp_path / "before", tmp_path / "c"
    gloo.run(save, OLD, str(before))
    ends = []
    for run in range(RUNS):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(before, path)
        victims = [[0], [1], [0, 1]][run % 3]
        outcomes = gloo.outcomes(killed, NEW, str(path), victims, random_.uniform(0.05, 1.2), store="parent")
        for end in outcomes:
            assert (end.exitcode == -signal.SIGKILL) == (end.rank in victims), end
            if end.rank not in victims:
                kind, seconds = end.value
                assert kind in ("", "RankFailedError")
                assert seconds < gloo.SOON_S, "the survivor learns of it soon"
        ends.append(found(path))
        assert ends[-1] in (OLD, NEW)
    assert OLD in ends, "no kill came in time"

    gloo.run(save, NEW, str(path))
    assert found(path) == NEW
    assert len(list(path.iterdir())) == 2, "the manifest and one generation: nothing of the dead is left"
