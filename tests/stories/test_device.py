"""States on a device, saved and loaded: bits, budgets and orders, on a simulated device that runs as late as it may."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

import reshard
import reshard.dcp
from reshard.dcp.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from reshard.dcp.engine.states import on_the_cpu
from reshard.dcp.filesystem import FileSystemReader, FileSystemWriter
from reshard.errors import KeyMismatchError
from reshard.live.copy_streams import to_host
from reshard.live.tensors import with_local
from reshard.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from tests import gloo, simulated
from tests.same import assert_same
from tests.simulated import DEVICE, IS_REAL
from tests.storages import Remote

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(not simulated.AVAILABLE, reason=simulated.WHY_NOT),
    pytest.mark.host_only("says itself what lies where"),
]

ORDERS: tuple[simulated.Order, ...] = ("late", "others first", "eager")
BUDGET_BYTES = 256 << 10


def _host_state() -> dict[str, torch.Tensor]:
    """Every kind of dtype and stride, in tensors larger and smaller than a piece of the budget."""
    seed = torch.Generator().manual_seed(0)
    return {
        "large": torch.randn(300, 701, generator=seed),
        "half": torch.randn(999, generator=seed).bfloat16(),
        "turned": torch.randn(64, 480, generator=seed).t(),
        "every other": torch.randn(40, 90, generator=seed)[:, ::2],
        "none": torch.zeros(0, 3),
        "one": torch.tensor(3.5, dtype=torch.float64),
        "complex": torch.randn(50, dtype=torch.complex64, generator=seed).conj(),
        "bytes": torch.arange(255, dtype=torch.uint8),
        "truth": torch.arange(77) % 3 == 0,
        "eighths": torch.randn(33, generator=seed).to(torch.float8_e4m3fn),
    }


def _on_device(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with the same strides; each is still to come where the device runs late."""
    out = {}
    for key, value in state.items():
        room = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=DEVICE)
        out[key] = room.copy_(value.resolve_conj())
    return out


def _to_fill(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of the same kinds, and about to be overwritten by what the caller asked before."""
    return {key: torch.empty_like(value).zero_() for key, value in state.items()}


def _back(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.cpu().contiguous() for key, value in state.items()}


def _round_trip(folder: Path, asynchronously: str = "") -> dict[str, torch.Tensor]:
    """Save what the caller has only just changed, change it again, and load it. What comes back is on the host."""
    here = torch.get_device_module(DEVICE).current_stream()
    state = _on_device(_host_state())
    state["large"].add_(1)
    if asynchronously == "face":
        return _round_trip_of_face(folder, state)
    if asynchronously:
        pending = reshard.async_save(state, folder, stage=asynchronously)  # type: ignore[arg-type]
        state["large"].zero_()
        state["half"].zero_()
        if asynchronously == "host":
            here.synchronize()  # on the device the copy is for the background to wait for, and for nobody else
        pending.result()
    else:
        reshard.save(state, folder, memory_budget_bytes=BUDGET_BYTES)
    filled = _to_fill(state)
    reshard.load(filled, folder, memory_budget_bytes=BUDGET_BYTES, threads=2)
    return _back(filled)


def _round_trip_of_face(folder: Path, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By planners and storages, whose threads meet tensors one by one. The caller has a stream of its own."""
    module = torch.get_device_module(DEVICE)
    own = module.Stream()
    own.wait_stream(module.current_stream())
    with module.stream(own):
        state["large"].add_(0)
        writer, reader = FileSystemWriter(folder, thread_count=2), FileSystemReader(folder)
        reshard.dcp.save(state, storage_writer=writer, planner=_Planner())
        filled = _to_fill(state)
        reshard.dcp.load(filled, storage_reader=reader, planner=_Doubling())
    doubled = filled.pop("large")
    found = _back(filled)  # by another stream than the caller's, which has done only what was loaded
    own.synchronize()
    assert_same(_back(filled), found)
    return {"large": doubled.cpu() / 2, **found}


class _Planner(DefaultSavePlanner):
    """Computes what it gives."""

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        return data * 1 if isinstance(data, torch.Tensor) and data.dtype == torch.float32 else data


class _Doubling(DefaultLoadPlanner):
    """Overwrites what it wants to be filled, and goes on with it, by the caller's stream."""

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return super().resolve_tensor(read_item).zero_()

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        if read_item.dest_index.fqn == "large":
            tensor.mul_(2)


def _wanted() -> dict[str, torch.Tensor]:
    state = _host_state()
    state["large"].add_(1)
    return {key: value.resolve_conj().contiguous() for key, value in state.items()}


WAYS = ("", "host", "device", "face")


def _all_orders() -> None:
    for order in ORDERS:
        for way in WAYS:
            with tempfile.TemporaryDirectory() as folder, simulated.ordered(order), simulated.watch() as seen:
                assert_same(_round_trip(Path(folder) / "c", way), _wanted())
            assert seen.faults == [], (order, way)


def _every_wait_is_needed() -> list[str]:
    """Runs everything with each wait of the library left out in turn; those that nobody missed."""
    for way in WAYS:
        assert not _is_caught("late", way), way
    sites = simulated.wait_sites()
    assert len(sites) >= 4, sites
    unseen = []
    for site in sites:
        with simulated.leave_out(site):
            if not any(_is_caught(order, way) for order in ORDERS for way in WAYS):
                unseen.append(" < ".join(site))
    return unseen


def _is_caught(order: simulated.Order, way: str) -> bool:
    with tempfile.TemporaryDirectory() as folder, simulated.ordered(order), simulated.watch() as seen:
        try:
            assert_same(_round_trip(Path(folder) / "c", way), _wanted())
        except (AssertionError, reshard.ReshardError):
            return True
        finally:
            torch.get_device_module(DEVICE).synchronize()
    return bool(seen.faults)


def _budgets() -> None:
    state = _on_device(_host_state())
    torch.get_device_module(DEVICE).synchronize()
    nbytes = sum(value.nbytes for value in state.values())
    with tempfile.TemporaryDirectory() as folder:
        with simulated.watch() as seen:
            reshard.save(state, f"{folder}/a", memory_budget_bytes=BUDGET_BYTES, fingerprints=False)
        assert seen.copied == {"to host": nbytes}, "each byte crosses once"
        assert seen.peak["pinned"] <= BUDGET_BYTES
        assert seen.peak["device"] <= BUDGET_BYTES, "what is put in order on the device is put so piece by piece"
        assert not seen.blocking["blocking copy"], seen
        for threads in (1, 3):
            filled = _to_fill(state)
            with simulated.watch() as seen:
                reshard.load(filled, f"{folder}/a", memory_budget_bytes=BUDGET_BYTES, threads=threads)
            assert seen.copied == {"to device": nbytes}, "each byte crosses once"
            assert seen.peak["pinned"] <= BUDGET_BYTES
            assert seen.peak["device"] <= BUDGET_BYTES
            assert not seen.blocking["blocking copy"], seen
            assert seen.blocking["Stream.synchronize"] == 1, "only the end of a load is waited for"


def _far_storage() -> None:
    """What gives no view of its bytes: they are read, and checked, within the budget, too."""
    state = _on_device({"w": torch.arange(700_000, dtype=torch.int32).view(7, -1), **_host_state()})
    with tempfile.TemporaryDirectory() as folder:
        reshard.save(state, folder)
        for budget, threads in ((BUDGET_BYTES, 3), (2 << 20, 1)):
            filled, far = _to_fill(state), Remote(folder)
            with simulated.watch() as seen:
                report = reshard.load(filled, far, memory_budget_bytes=budget, threads=threads)
            assert seen.peak["pinned"] <= budget // 2
            assert far.largest <= budget // 2 + 64
            assert report.bytes_checked > report.bytes_needed, "headers, too"
            assert not seen.blocking["blocking copy"], seen
            assert_same(_back(filled), _back(state))


def _bases() -> None:
    """What an earlier checkpoint has, and what it has not, comes to the host once, but for the heads of blocks."""
    seed = torch.Generator().manual_seed(0)
    host = {key: torch.randn(300, 2048, generator=seed) for key in ("kept", "rows", "new")}
    host["turned"] = torch.randn(700, 500, generator=seed).t()
    for stage in ("", "host", "device"):
        with tempfile.TemporaryDirectory() as folder:
            state = _on_device(host)
            reshard.save(state, f"{folder}/0", base="auto")
            state["new"].mul_(2)
            state["rows"][:7].add_(1)
            torch.get_device_module(DEVICE).synchronize()
            with simulated.watch() as seen:
                if stage:
                    report = reshard.async_save(state, f"{folder}/1", base="auto", stage=stage).result()  # type: ignore[arg-type]
                else:
                    report = reshard.save(state, f"{folder}/1", base="auto", memory_budget_bytes=BUDGET_BYTES)
            nbytes = sum(value.nbytes for value in state.values())
            assert seen.faults == []
            assert report.bytes_reused > nbytes - host["new"].nbytes - (2 << 20), report
            assert IS_REAL or seen.copied["to host"] < nbytes + 20 * 256 + 4096, (stage, seen)
            filled = _to_fill(state)
            reshard.load(filled, f"{folder}/1")
            assert_same(_back(filled), _back(state))


def _compared() -> None:
    """On the device where both sides are there, and by pinned memory else; what differs is named alike."""
    host = {key: value.resolve_conj() for key, value in _host_state().items()}
    here, there = _on_device(host), _on_device(host)
    there["half"][7] = 5
    with simulated.watch() as seen:
        found = reshard.compare(here, there)
    (finding,) = found.findings
    assert (finding.fqn, finding.element) == ("half", (7,))
    assert IS_REAL or seen.copied["to host"] < 64 << 10, "only counts leave the device"
    with tempfile.TemporaryDirectory() as folder:
        reshard.save(host, f"{folder}/a")
        for tolerance in ({}, {"rtol": 1e-6}):
            assert reshard.compare(here, f"{folder}/a", **tolerance).ok
            assert [one.fqn for one in reshard.compare(f"{folder}/a", there, **tolerance).findings] == ["half"]


def _async_waits_for_copies_only() -> None:
    state = _on_device(_host_state())
    nbytes = sum(-(-value.nbytes // 64) * 64 for value in state.values())  # whole cache lines
    with tempfile.TemporaryDirectory() as folder:
        for number, kept in enumerate((False, True)):
            with simulated.watch() as seen:
                pending = reshard.async_save(state, f"{folder}/{number}")
                blocked = dict(seen.blocking)
                pending.result()
            assert blocked["Stream.synchronize"] == 1
            assert blocked["blocking copy"] <= 1 if kept else True, (
                "digits of known geometries are there; sums come once"
            )
            assert seen.peak["pinned"] == (0 if kept else nbytes), "memory of the host is kept for the next save"
        with simulated.watch() as seen:
            pending = reshard.async_save(state, f"{folder}/device", stage="device")
            assert dict(seen.blocking) == {}, "nothing is waited for"
            pending.result()


def _casts_and_kinds() -> None:
    """Other dtypes are converted on the device; parameters, ties, meta tensors and plain values are as on the host."""
    with tempfile.TemporaryDirectory() as folder:
        weight = torch.randn(70, 30, generator=torch.Generator().manual_seed(1))
        reshard.save({"w": weight, "tied": weight, "step": 3, "m": weight[0]}, f"{folder}/a")
        parameter = torch.nn.Parameter(torch.zeros(70, 30, dtype=torch.bfloat16, device=DEVICE), requires_grad=False)
        target = {"w": parameter, "tied": parameter, "step": 0, "m": torch.empty(30, device="meta")}
        with simulated.watch() as seen:
            reshard.load(target, f"{folder}/a", dtype_policy="cast")
        assert IS_REAL or seen.copied == {"to device": weight.nbytes}, "it crosses as it was saved, once"
        assert_same(target["w"].cpu(), weight.bfloat16())
        assert target["w"] is target["tied"] is parameter
        assert_same(target["m"], weight[0])
        assert target["step"] == 3
        reshard.load({"w": parameter}, f"{folder}/a", dtype_policy="saved", strict="subset")
        with pytest.raises(KeyMismatchError):
            reshard.load({"w": torch.zeros(3, device=DEVICE)}, f"{folder}/a", strict="subset")


def _digests_are_the_same() -> None:
    host = _host_state()
    device = _on_device(host)
    with simulated.watch() as seen:
        found = reshard.fingerprint(device)
    assert found == reshard.fingerprint(host)
    assert IS_REAL or seen.copied["to host"] < 64 << 10, "only sums leave the device"
    with simulated.watch() as seen:
        reshard.fingerprint(device)
    assert IS_REAL or seen.blocking["blocking copy"] == 1, "and all at once, when the geometry is known"


def _comes_to_the_host() -> None:
    """What getters and the face's `async_save` copy: by pinned memory, and no more of it than two pieces."""
    wanted = {key: value.resolve_conj().contiguous() for key, value in _host_state().items()}
    for order in ORDERS:
        with simulated.ordered(order), simulated.watch() as seen:
            device = _on_device(_host_state())
            device["large"].mul_(2).mul_(0.5)
            before = seen.blocking["blocking copy"]
            found = to_host([*device.values(), wanted["one"]], stage_bytes=64 << 10)
            blocking = seen.blocking["blocking copy"] - before
        assert seen.faults == []
        assert found.pop() is wanted["one"]
        assert_same({key: value.contiguous() for key, value in zip(device, found)}, wanted)
        assert IS_REAL or seen.peak["pinned"] <= 64 << 10
        assert IS_REAL or blocking == 3, "two that are strided, and one without elements"
        staged = on_the_cpu({"a": device["half"], "nest": [device["half"], 3]})
        assert_same(staged, {"a": wanted["half"], "nest": [wanted["half"], 3]})


JOBS: tuple[Callable[[], None], ...] = (
    *(_all_orders, _casts_and_kinds, _digests_are_the_same, _comes_to_the_host),
    *(_bases, _compared),
)
COUNTING_JOBS: tuple[Callable[[], None], ...] = (_budgets, _far_storage, _async_waits_for_copies_only)
watched = pytest.mark.skipif(IS_REAL, reason="nothing is watched on a real device")


@pytest.mark.parametrize("job", JOBS)
def test_bits(job: Callable[[], None]) -> None:
    gloo.run(_installed, 1, job, init=False)


@watched
@pytest.mark.parametrize("job", COUNTING_JOBS)
def test_budgets_and_waits(job: Callable[[], None]) -> None:
    gloo.run(_installed, 1, job, init=False)


@watched
def test_every_wait_is_needed() -> None:
    assert gloo.run(_installed, 1, _every_wait_is_needed, init=False) == [[]]


def _installed(job: Callable[..., Any], *args: Any) -> Any:
    simulated.install()
    return job(*args)


def _of_host(local: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A shard of rows in host memory on a mesh of devices: what FSDP2 with CPU offload makes of parameters."""
    outline = torch.empty_like(local, device="meta")
    return with_local(DTensor.from_local(outline, mesh, [Shard(0)], run_check=False), local)


def _offloaded(folder: str) -> list[str]:
    """Where the state lies of a model whose parameters are offloaded, after each way of setting it."""
    mesh, rank = init_device_mesh(DEVICE, (2,)), dist.get_rank()
    whole = torch.arange(24.0, device="cpu").view(6, 4)

    def made(weight: torch.Tensor) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(_of_host(weight.chunk(2)[rank].clone(), mesh))
        return model, torch.optim.AdamW(model.parameters(), foreach=False)

    model, optimizer = made(whole)
    model.weight.grad = _of_host(whole.chunk(2)[rank].clone(), mesh)
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    reshard.save({"model": weights, "optim": moments}, folder)
    everything = StateDictOptions(full_state_dict=True)
    full = get_state_dict(model, optimizer, options=everything)
    found = []
    for state, options in ((None, None), (full, everything)):
        fresh, its = made(torch.zeros_like(whole))
        if state is None:
            loaded, its_moments = get_state_dict(fresh, its)
            reshard.load({"model": loaded, "optim": its_moments}, folder)
            state = loaded, its_moments
        set_state_dict(fresh, its, model_state_dict=state[0], optim_state_dict=state[1], options=options)
        for value in (fresh.weight, *its.state[fresh.weight].values()):
            local = value.to_local() if isinstance(value, DTensor) else value
            found.append(f"{value.device.type}, {local.device.type}")
        assert_same(fresh.weight.to_local(), model.weight.to_local())
        for name in ("exp_avg", "exp_avg_sq"):
            assert_same(its.state[fresh.weight][name].to_local(), optimizer.state[model.weight][name].to_local())
        fresh.weight.grad = _of_host(whole.chunk(2)[rank].clone(), mesh)
        its.step()  # fails where the moments lie on another device than the gradients
    return found


def test_offloaded_parameters_and_their_moments_stay_on_the_host(tmp_path: Path) -> None:
    first, second = gloo.run(_installed, 2, _offloaded, str(tmp_path))
    assert {*first, *second} == {"cpu, cpu"}


def _from_meta() -> str:
    """Where a full state on the host goes, of a model on the meta device whose mesh is one of devices."""
    mesh, whole = init_device_mesh(DEVICE, (2,)), torch.arange(24.0, device="cpu").view(6, 4)
    model = torch.nn.Module()
    outline = DTensor.from_local(torch.empty(3, 4, device="meta"), mesh, [Shard(0)], run_check=False)
    model.weight = torch.nn.Parameter(outline)
    set_model_state_dict(model, {"weight": whole}, options=StateDictOptions(full_state_dict=True))
    assert_same(model.weight.to_local().detach().cpu(), whole.chunk(2)[dist.get_rank()])
    return model.weight.to_local().device.type


def test_a_meta_model_is_made_on_the_devices_of_its_mesh() -> None:
    assert gloo.run(_installed, 2, _from_meta) == [DEVICE, DEVICE]


def _sharded(folder: str) -> None:
    """Sharded, replicated and drifted tensors of two ranks, whose control plane needs no device."""
    mesh = init_device_mesh(DEVICE, (2,))
    rank = dist.get_rank()
    whole = torch.arange(24.0).view(6, 4)
    rows = DTensor.from_local(whole.chunk(2)[rank].to(DEVICE), mesh, [Shard(0)], run_check=False)
    copies = DTensor.from_local(whole.to(DEVICE), mesh, [Replicate()], run_check=False)
    with simulated.watch() as seen:
        reshard.save({"rows": rows, "copies": copies, "plain": whole.to(DEVICE)}, f"{folder}/a")
    assert seen.faults == []
    local = torch.zeros(6, 2, device=DEVICE)
    columns = DTensor.from_local(local, mesh, [Shard(1)], run_check=False)
    plain = torch.zeros(6, 4, device=DEVICE)
    reshard.load({"rows": columns, "copies": plain, "plain": plain.clone()}, f"{folder}/a")
    assert_same(local.cpu(), whole[:, 2 * rank : 2 * rank + 2].contiguous())
    assert_same(plain.cpu(), whole)
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(rows)
    offloaded = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))["weight"]
    assert offloaded.device.type == offloaded.to_local().device.type == "cpu", "though its mesh is one of devices"
    assert_same(offloaded.to_local(), whole.chunk(2)[rank])
    drifted = whole.to(DEVICE) + rank
    with pytest.raises(KeyMismatchError, match="differ between ranks"):
        reshard.save({"plain": drifted if rank else whole + 2}, f"{folder}/b")  # one of them on the host
    reshard.save({"plain": whole.to(DEVICE) if rank else whole}, f"{folder}/b")


def test_two_ranks(tmp_path: Path) -> None:
    gloo.run(_installed, 2, _sharded, str(tmp_path))
