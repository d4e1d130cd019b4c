"""What real ranks do in the tests of `reshard.CheckpointManager`: by itself, since each process imports it."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import reshard
from reshard.api.manager import manager as deciding
from reshard.api.manager.ledger import Ledger
from reshard.errors import CheckpointError, KeyMismatchError, RankFailedError, StorageError
from reshard.native.commit import Generation

__all__ = [
    "Loader", "disagreed", "failing", "failing_in_memory", "failing_to_tidy", "loaders",
    "new_in_memory", "one_is_asked", "restored_while_pruned", "staged", "stateless_stages", "trained",
]  # fmt: skip


class Loader:
    """What a data loader with a position of its own looks like: of numbers, a share of them for each rank."""

    def __init__(self, rank: int, world: int) -> None:
        self.mine = range(rank, 1000, world)
        self.at = 0

    def __next__(self) -> int:
        self.at += 1
        return self.mine[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "of": len(self.mine)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def build(seed: int) -> dict[str, Any]:
    """A sharded model and all that goes with it, begun at random."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return {"model": model, "optim": optimizer, "schedule": schedule, "step": 0}


def train_step(state: dict[str, Any]) -> float:
    """The same data for all ranks."""
    data = torch.Generator().manual_seed(state["step"])
    loss = state["model"](torch.randn(12, 6, generator=data)).square().mean()
    loss.backward()
    state["optim"].step()
    state["optim"].zero_grad()
    state["schedule"].step()
    state["step"] += 1
    return float(loss.item())


def stateless_stages(root: str) -> list[list[float]]:
    """Optimizers of two stages, which keep no state: the rates that each saved, and those that it restored."""
    stage, rank = nn.ModuleDict({str(dist.get_rank()): nn.Linear(2, 2)}), dist.get_rank()
    optimizer = torch.optim.SGD([{"params": [p]} for p in stage.parameters()][rank:], lr=0.25 + rank)
    state = {"model": [stage], "optim": optimizer}
    rates = [[group["lr"] for group in optimizer.param_groups]]
    with reshard.CheckpointManager(root, every=reshard.Every(steps=1)) as manager:
        manager.save(1, state)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        manager.restore(state)
    return [*rates, [group["lr"] for group in optimizer.param_groups]]


def staged(root: str, steps: int, in_list: bool = True) -> dict[str, torch.Tensor]:
    """A pipeline: each rank has some of six layers, and an optimizer of its own. Go on up to so many steps: the
    momentum of this rank's parameters."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = range(6 * rank // world, 6 * (rank + 1) // world)
    stage = nn.ModuleDict({str(i): nn.Linear(2, 2) for i in mine})
    optimizer = torch.optim.SGD(
        [{"params": [*stage[str(i)].parameters()], "lr": 0.1 * (i + 1)} for i in mine], momentum=0.5
    )
    state = {"model": [stage] if in_list else stage, "optim": optimizer, "step": 0}
    with reshard.CheckpointManager(root, every=reshard.Every(steps=1)) as manager:
        manager.restore(state)
        while state["step"] < steps:
            for name, parameter in stage.named_parameters():
                parameter.grad = torch.full_like(parameter, int(name[0]) + 1)
            optimizer.step()
            state["step"] += 1
            manager.save(state["step"], state)
    return {n: optimizer.state[p]["momentum_buffer"] for n, p in stage.named_parameters()}


def trained(root: str, steps: int) -> tuple[int, list[float], list[int]]:
    """Go on up to so many steps: which it began with, the losses, and what there is in the end."""
    state = build(seed=dist.get_world_size())
    with reshard.CheckpointManager(root, every=reshard.Every(steps=3), keep=reshard.Keep(last=2)) as manager:
        report = manager.restore(state)
        first = report.step if report is not None else 0
        losses = []
        while state["step"] < steps:
            losses.append(train_step(state))
            manager.save(state["step"], state)
        manager.wait()
        return first, losses, manager.all_steps()


def one_is_asked(root: str) -> list[tuple[int, str, str]]:
    """A rank gets a signal, another one's clock is fast, a third finds a file: what each step did."""
    rank = dist.get_rank()
    clock = itertools.count(step=0.1 if rank == 0 else 1000)
    deciding.time = SimpleNamespace(monotonic=lambda: float(next(clock)))  # type: ignore[assignment]
    asks = Path(root).parent / f"asks-{rank}"
    stop = reshard.Preemption(file=asks)
    state = {"w": torch.zeros(4), "step": 0}
    done = []
    with reshard.CheckpointManager(root, every=reshard.Every(seconds=1.05), preemption=stop) as manager:
        for step in range(1, 20):
            if (rank, step) == (1, 4):
                os.kill(os.getpid(), signal.SIGTERM)
            if (rank, step) == (2, 7):
                asks.touch()
            dist.barrier()
            report = manager.save(step, state)
            done.append((step, report.storage, report.preempted_by))
        manager.wait()
        assert manager.latest_step() == max(step for step, storage, _ in done if storage)
    return [row for row in done if row[1]]


def disagreed(root: str) -> list[str]:
    """Ranks that call otherwise than one another: what each is told."""
    rank, said = dist.get_rank(), []
    for other in ({"every": reshard.Every(steps=1 + rank)}, {"every": reshard.Every(steps=1), "base": "auto"}):
        try:
            reshard.CheckpointManager(root, **other)
        except reshard.ReshardError as error:
            said.append(f"{type(error).__name__}: {error}")
    with reshard.CheckpointManager(root, every=reshard.Every(steps=1)) as manager:
        manager.save(1, {"w": torch.zeros(2)})
        manager.wait()
        for step, metrics in ((2 + rank, None), (2, {"loss": "low"} if rank == 1 else None)):
            try:
                manager.save(step, {"w": torch.zeros(2)}, metrics)
            except reshard.ReshardError as error:
                said.append(f"{type(error).__name__}: {error}".splitlines()[0])
        said.append(str(manager.all_steps()))
    return said


def loaders(root: str, on_change: Any, steps: int) -> tuple[Any, int]:
    """Each rank reads its share of data: what it reads next, after it has read so many."""
    rank, world = dist.get_rank(), dist.get_world_size()
    loader = Loader(rank, world)
    if on_change == "shared":
        on_change = lambda saved, rank, world: {"at": sum(one["at"] for one in saved.values()) // world}  # noqa: E731
    state = {"data": reshard.PerRank(loader, on_change=on_change), "epoch": 3}
    with reshard.CheckpointManager(root, every=reshard.Every(steps=1)) as manager:
        try:
            report = manager.restore(state)
        except (KeyMismatchError, RankFailedError) as error:
            return str(error), -1
        for _ in range(steps):
            next(loader)
        if report is None:
            manager.save(5, state)
        return next(loader), state["epoch"]


def elastic(root: str, batches: int, batch: int) -> tuple[list[int], int]:
    """A job that is ended after so many batches of each rank, in the middle of a step that it does not save: what it
    was given up to its last save, and the epoch that it is in."""
    sampler = reshard.ElasticSampler(101, seed=3)
    loader = torch.utils.data.DataLoader(range(101), batch_size=batch, sampler=sampler)
    state, taken, saved = {"data": sampler, "step": 0}, [], 0
    with reshard.CheckpointManager(root, every=reshard.Every(steps=2)) as manager:
        manager.restore(state)
        for number, its in enumerate(sampler.over(loader), 1):
            taken += its.tolist()
            state["step"] += 1
            if manager.save(state["step"], state).storage:
                saved = len(taken)
            if number == batches:
                break
        else:
            return taken, sampler.epoch
    return taken[:saved], sampler.epoch


def failing(root: str) -> tuple[list[str], list[int], list[str]]:
    """A save fails in the background on one rank: who is told, and when."""
    rank, said = dist.get_rank(), []
    state = {"w": torch.arange(8.0), "step": 0}
    manager = reshard.CheckpointManager(root, every=reshard.Every(steps=2))
    manager.save(2, state)
    manager.wait()
    full = mock.patch.object(Generation, "publish", side_effect=StorageError("the disk is full"))
    with full if rank == 0 else nullcontext():
        manager.save(4, state)
        while not manager._pending["storage"].done():
            time.sleep(0.01)
        dist.barrier()
    for step in (5, 6, 7):
        try:
            manager.save(step, state)
        except reshard.ReshardError as error:
            said.append(f"{step} {type(error).__name__}: {error}".splitlines()[0])
    manager.close()
    dist.barrier()  # the first rank gives the root back
    try:
        manager.save(9, state)
    except CheckpointError as error:
        said.append(str(error))
    return said, manager.all_steps(), sorted(os.listdir(root))


def restored_while_pruned(root: str) -> tuple[int, tuple[str, ...], float]:
    """The newest step is removed by another job after the first rank listed it: what each rank restores."""
    with reshard.CheckpointManager(root, every=reshard.Every(steps=1), timeout=60.0) as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.full((3,), float(step))})
        manager.wait()
    real, state = deciding.load, {"w": torch.zeros(3)}

    def late(*args: Any, **options: Any) -> Any:
        if dist.get_rank() == 0:
            shutil.rmtree(f"{root}/step-2", ignore_errors=True)
        return real(*args, **options)

    with (
        mock.patch.object(deciding, "load", late),
        reshard.CheckpointManager(root, read_only=True, timeout=60.0) as reader,
    ):
        report = reader.restore(state)
    assert report is not None
    return report.step, report.skipped, state["w"][0].item()


def failing_to_tidy(root: str, background: bool) -> list[str]:
    """A defect in the removal of older steps, which only the first rank does: what each rank is told, and when."""
    said, state = [], {"w": torch.arange(8.0), "step": 0}
    with reshard.CheckpointManager(root, every=reshard.Every(steps=1), background=background, timeout=60.0) as manager:
        manager.save(1, state)
        manager.wait()
        with mock.patch.object(Ledger, "tidy", side_effect=RuntimeError("a defect")):
            for step in (2, 3):
                try:
                    manager.save(step, state)
                    for pending in manager._pending.values() if step == 2 else ():
                        while not pending.done():
                            time.sleep(0.01)
                    dist.barrier()
                except (RuntimeError, reshard.ReshardError) as error:
                    said.append(f"{step} {type(error).__name__}: {error}".splitlines()[0])
                    break
        manager._pending.clear()
        return said


def new_in_memory(root: str) -> list[Any]:
    """A run with memory begins, keeps a step there, and begins again when a host has lost it: how often this rank's
    object was asked for its state before it had one, and what was restored."""
    rank, said = dist.get_rank(), []
    options: dict[str, Any] = {"every": reshard.Every(steps=100), "memory_every": reshard.Every(steps=1)}
    for _ in range(2):
        tier = reshard.elastic.Tier(f"{root}/memory", host=f"h{rank}", timeout=20.0)
        with reshard.CheckpointManager(f"{root}/run", memory=tier, timeout=20.0, **options) as manager:
            loader = Loader(0, 1)
            with mock.patch.object(loader, "state_dict", side_effect=loader.state_dict) as asked:
                report = manager.restore({"data": loader})
            said += [asked.call_count, report and (report.step, report.from_memory), loader.at]
            next(loader)
            manager.save(1, {"data": loader})
        if rank == 1:
            shutil.rmtree(f"{root}/memory/h1")
        dist.barrier()
    return said


def failing_in_memory(root: str) -> str:
    """A save to memory of an object that has no state on one rank: what each rank is told."""
    rank = dist.get_rank()
    tier = reshard.elastic.Tier(f"{root}/memory", host=f"h{rank}", timeout=20.0)
    every = reshard.Every(steps=100)
    with reshard.CheckpointManager(
        f"{root}/run", every=every, memory=tier, memory_every=reshard.Every(steps=1), timeout=20.0
    ) as manager:
        broken = mock.patch.object(Loader, "state_dict", side_effect=ValueError("no state"))
        with broken if rank == 1 else nullcontext():
            try:
                manager.save(1, {"w": torch.zeros(2), "data": reshard.PerRank(Loader(rank, 2))})
            except (ValueError, reshard.ReshardError) as error:
                return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""
