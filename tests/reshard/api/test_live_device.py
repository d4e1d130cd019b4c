"""Transfers between ranks whose tensors lie on a simulated device, by a backend of the device's own and by gloo."""

from __future__ import annotations

import inspect
import logging.handlers
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

import reshard
from reshard.errors import DeadlineError, ReshardError
from reshard.execute.exchange import Waiter
from reshard.ranks.group import Group
from tests import gloo, simulated
from tests.simulated import DEVICE, IS_REAL, messages

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(not simulated.AVAILABLE, reason=simulated.WHY_NOT),
    pytest.mark.host_only("says itself what lies where"),
]


def _real_backends() -> tuple[str, ...]:
    """Ranks share one device by gloo; with a device each they use its own backend."""
    alone = torch.get_device_module(DEVICE).device_count() < 2
    return ("gloo",) if alone else ("gloo", f"cpu:gloo,{DEVICE}:{dist.get_default_backend_for_device(DEVICE)}")


ORDERS: tuple[simulated.Order, ...] = ("late", "others first", "eager")
BACKENDS = _real_backends() if IS_REAL else ("gloo", "simccl")
BUDGET_BYTES = 1024
SHAPE = (30, 16)


def _start(backend: str, folder: str) -> Any:
    simulated.install()
    if not IS_REAL:
        messages.register()
    if backend != "gloo":
        rank, size = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
        store = dist.FileStore(f"{folder}/{backend}", size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    return init_device_mesh(DEVICE, (dist.get_world_size(),))


def _states(mesh: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, torch.Tensor]]:
    """Source, target, and what the target must be: rows into columns, into copies, into another dtype, and plain ones
    of the host. The source is still to be computed, and so is what was in the target before."""
    rank, size = mesh.get_rank(), mesh.size()
    whole = torch.arange(480.0).view(*SHAPE)
    rows = whole.chunk(size)[rank].to(DEVICE).mul_(2)
    columns = whole.chunk(size, 1)[rank].contiguous().to(DEVICE).fill_(-1)
    copy, half = (torch.full(SHAPE, -1.0, dtype=dtype, device=DEVICE) for dtype in (torch.float32, torch.bfloat16))
    host = torch.full(SHAPE, -1.0)

    def sharded(local: torch.Tensor, placement: Any) -> DTensor:
        return DTensor.from_local(local, mesh, [placement], run_check=False, shape=SHAPE, stride=(16, 1))

    source = {key: sharded(rows, Shard(0)) for key in ("columns", "copy", "half", "at host")}
    target = {
        "columns": sharded(columns, Shard(1)),
        "copy": sharded(copy, Replicate()),
        "half": sharded(half, Replicate()),
        "at host": host,
    }
    twice = whole * 2
    wanted = {"columns": twice.chunk(size, 1)[rank], "copy": twice, "half": twice.bfloat16(), "at host": twice}
    return source, target, wanted


def _run(mesh: Any, order: simulated.Order, *, delta: bool = False) -> bool:
    """Whether what was moved, twice, is right, by the stream of the caller; and nothing was done too early."""
    sim = torch.get_device_module(DEVICE)
    options: Any = {"dtype_policy": "cast", "max_inflight_bytes": BUDGET_BYTES, "delta": delta}
    good, warned = True, logging.handlers.BufferingHandler(1000)
    logging.getLogger("reshard").addHandler(warned)
    with simulated.ordered(order), simulated.watch() as seen, sim.stream(sim.Stream()):
        source, target, wanted = _states(mesh)
        for step in range(2):
            if step:  # without the host, nothing waits on the way
                del source["at host"], target["at host"]
            prepared = reshard.prepare(source, target, **options)
            for again in (1, 2):
                prepared.run()
                with sim.stream(sim.Stream()):  # what is done is done for all streams
                    for key, value in target.items():
                        local = value.to_local() if isinstance(value, DTensor) else value
                        good &= torch.equal(local.cpu(), wanted[key] * again * 4**step)
                source["columns"].to_local().mul_(2)  # the memory of all sources
    logging.getLogger("reshard").removeHandler(warned)
    again = [record for record in warned.buffer if "targets differ from what the last transfer left" in record.msg]
    return good and not seen.faults and not again  # differences that arrive wrong would come once more


def _all_right(mesh: Any, backend: str) -> None:
    with simulated.watch() as seen:
        source, target, _ = _states(mesh)
        del source["at host"], target["at host"]
        prepared = reshard.prepare(source, target, dtype_policy="cast", max_inflight_bytes=BUDGET_BYTES)
    for step in (1, 2):
        with simulated.watch() as seen:
            prepared.run()
        assert IS_REAL or not seen.blocking, (step, seen)
        assert seen.peak["device"] <= 1024, "buffers were made once"
        if backend != "gloo":
            assert not seen.copied["to host"], "nothing goes by way of the host"
    report = prepared.run()
    assert report.buffer_bytes <= BUDGET_BYTES
    if backend != "gloo" and not IS_REAL:
        assert _replayed(prepared) == ({}, {}, {}), "what a graph could capture"


def _differences(mesh: Any) -> None:
    """Of what is on devices only what changed leaves them, and it is compared and summed up there; a rank may have its
    part on the host."""
    rank, size = mesh.get_rank(), mesh.size()
    whole = torch.arange(size * 40_000, dtype=torch.float32).view(size, -1)
    local = whole[rank : rank + 1].to(DEVICE)
    source = {"w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)}
    target = {"w": torch.zeros(whole.shape, device=DEVICE if rank else "cpu")}
    prepared = reshard.prepare(source, target, delta=True, check_replicas=False)
    for step in range(3):
        with simulated.watch() as seen:
            moved = prepared.run().bytes_moved
        assert torch.equal(target["w"].cpu(), whole), step
        if step == 1:
            assert moved < 8000, "heads, and no bodies"
        if step and not IS_REAL:
            own = local.nbytes if rank == 0 else 0
            assert seen.copied["to host"] + seen.copied["to device"] < own + 50_000, seen
        if step == 1:
            local[0, 7] = -1.0
            whole[:, 7] = -1.0


def _replayed(prepared: Any) -> tuple[dict[str, int], ...]:
    """What a replay waits for on the host, takes of memory, and copies from and to the host, before all ranks meet."""
    group = Group()
    with group.together("replay"), Waiter(group, prepared._device) as waiter:
        torch.get_device_module(DEVICE).synchronize()
        with torch.no_grad(), simulated.watch() as seen:
            prepared._ask(group, waiter)
        torch.get_device_module(DEVICE).synchronize()
    return dict(seen.blocking), dict(seen.peak), {k: n for k, n in seen.copied.items() if k != "sent"}


def _hangs(mesh: Any) -> None:
    """A message that never comes is an error when the time is up, and the host does not wait for it for ever."""
    device, group = torch.device(DEVICE, torch.get_device_module(DEVICE).current_device()), Group()
    query = simulated.Event.query
    with group.together("hang"), group.together("wait", deadline_s=0.2, meet=False):
        simulated.Event.query = lambda self: False  # type: ignore[method-assign]
        try:
            with (
                pytest.raises(DeadlineError, match=r"did not finish within 0\.2 s"),
                Waiter(group, device) as waiter,
            ):
                waiter.settle([device])
        finally:
            simulated.Event.query = query  # type: ignore[method-assign]


def _every_wait_is_needed(mesh: Any, whole: set[Any], backend: str) -> list[list[str]]:
    """Each wait of the library is left out in turn on all ranks: those that no rank missed in any order. `whole`: the
    waits of runs that move everything; the others are those of differences."""
    # where sizes come as messages of a device, garbage makes ranks wait for messages of other sizes
    found = whole if backend == "simccl" else simulated.wait_sites()
    sites = sorted(
        site for site in found if any("execute/exchange" in line or "execute/differences" in line for line in site)
    )
    assert sites
    # that ranks wait for one another at the end changes no bit: see `Waiter.meet`
    met, start = inspect.getsourcelines(Waiter.meet)
    meeting = {f"/execute/exchange.py:{start + i}" for i in range(len(met))}
    sites = [site for site in sites if not meeting.intersection(site)]
    unseen = []
    for site in sites:
        for order in ORDERS:
            with simulated.leave_out(site):
                mine = _is_wrong(mesh, order, delta=site not in whole)
            torch.get_device_module(DEVICE).synchronize()
            if any(_told_by_all(mine)):
                break
        else:
            unseen.append(list(site))
    return unseen


def _is_wrong(mesh: Any, order: simulated.Order, *, delta: bool) -> bool:
    try:
        return not _run(mesh, order, delta=delta)
    except ReshardError:
        return True


def _told_by_all(mine: bool) -> list[bool]:
    group = Group()
    with group.together("compare"):
        return [bool(data[0]) for data in group.exchange(bytes([mine]))]


def _job(backend: str, folder: str) -> list[list[str]]:
    mesh = _start(backend, folder)
    for order in ORDERS:
        assert _run(mesh, order), order
    whole = simulated.wait_sites()
    for order in ORDERS:
        assert _run(mesh, order, delta=True), order
    _differences(mesh)
    _all_right(mesh, backend)
    if IS_REAL:
        return []
    _hangs(mesh)
    return _every_wait_is_needed(mesh, whole, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bits_orders_budgets_and_waits(backend: str, tmp_path: Path) -> None:
    """With three ranks shards are uneven. What comes back are the waits that nobody would miss."""
    ranks = 2 if backend == "gloo" else 3
    assert gloo.run(_job, ranks, backend, str(tmp_path)) == [[]] * ranks
