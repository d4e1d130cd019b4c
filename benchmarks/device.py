"""Copies to and from a device, compared with raw pinned copies and DCP: `python -m benchmarks.device`.

Works with any accelerator that torch supports. Without one, prints so and does nothing. `--suites` first runs the
tests of the device path, and then the suites of engine, live transfers, and state dicts with all tensors on the
device: with several devices, also between ranks by their own backend, and with one, by gloo. `--device=sim` runs
everything on the tests' simulated device. What it prints then are not measurements.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

import reshard
from benchmarks import processes
from reshard.live import copy_streams

REPEATS = 2
COLUMNS = 4096
"""Columns of a matrix, as in a large model."""
TALL_COLUMNS = 256
SIMULATED = "sim"
ROWS = ("fingerprint", "async_save", "load", "save")
SUITES = (
    "tests/stories/test_device.py",
    "tests/stories/test_training_on_a_device.py",
    "tests/reshard/api/test_live_device.py",
)
"""Tests of the device path."""
EVERYWHERE = (
    *(f"tests/stories/test_{name}.py" for name in ("engine", "engine_limits", "engine_ranks", "roundtrip", "types")),
    *(f"tests/reshard/api/test_{name}.py" for name in ("background_saves", "tied_state", "live", "live_differences")),
    "tests/stories/test_incremental.py",
    "tests/reshard/state_dict",
)
"""Tests that run with all tensors on the device, as with `pytest --device=KIND`."""


class Row(NamedTuple):
    """One line of the table: our bytes per second and a peer's, and the wanted share of the peer's speed."""

    what: str
    ours: float
    peer: str
    peers: float
    wanted: float | None = None

    def __str__(self) -> str:
        share = self.ours / self.peers
        wanted = "" if self.wanted is None else f", wanted {self.wanted:.2f}"
        return f"| {self.what} | {self.ours / 1e9:.2f} | {self.peer} | {self.peers / 1e9:.2f} | {share:.2f}{wanted} |"


def best_s(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of some runs, after a warm-up. Each ends when the device is done."""
    module, times = torch.get_device_module(device), []
    for _ in range(REPEATS + 1):
        module.synchronize()
        start = time.perf_counter()
        run()
        module.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def state_of(nbytes: int, device: torch.device, columns: int = COLUMNS) -> dict[str, torch.Tensor]:
    """Return eight bfloat16 matrices of `nbytes` in total, and a transposed one."""
    rows = max(nbytes // (9 * 2 * columns), 1)
    words = torch.arange(rows * columns, dtype=torch.int32, device=device).to(torch.bfloat16).view(rows, columns)
    state = {f"layers.{i}.weight": words + i for i in range(8)}
    state["turned"] = words.t().contiguous().t()
    return state


def copies(device: torch.device, nbytes: int) -> dict[str, float]:
    """Return the bytes per second of plain copies: to and from the device through pinned memory, and on the device."""
    host, here = copy_streams.pinned(nbytes), torch.zeros(nbytes, dtype=torch.uint8, device=device)
    there = torch.empty_like(here)
    return {
        "to": nbytes / best_s(lambda: here.copy_(host, non_blocking=True), device),
        "from": nbytes / best_s(lambda: host.copy_(here, non_blocking=True), device),
        "on": nbytes / best_s(lambda: there.copy_(here), device),
    }


def read_speed(path: Path, device: torch.device) -> float:
    """Return the bytes per second of reading a checkpoint's data files into pinned memory, without checks."""
    files = sorted(path.rglob("*.safetensors"))
    room = copy_streams.pinned(max(file.stat().st_size for file in files))

    def read() -> None:
        for file in files:
            with open(file, "rb", buffering=0) as stream:
                stream.readinto(memoryview(room.numpy()))  # type: ignore[arg-type]

    return sum(file.stat().st_size for file in files) / best_s(read, device)


def one_process(device: torch.device, nbytes: int, folder: Path, only: Sequence[str]) -> Iterator[Row]:
    """Yield rows for one process with one device. `only`: "save", "async_save", "load", or "fingerprint"."""
    raw = copies(device, nbytes)
    yield from _rows(state_of(nbytes, device), raw, device, folder, only)
    # a quarter of the size: their rows, not their bytes, may take time
    rest = [what for what in only if what != "save"]
    for row in _rows(state_of(nbytes // 4, device, TALL_COLUMNS), raw, device, folder, rest):
        yield row._replace(what=f"{row.what}, {TALL_COLUMNS} columns, a quarter of the bytes")


def _rows(
    state: dict[str, torch.Tensor], raw: dict[str, float], device: torch.device, folder: Path, only: Sequence[str]
) -> Iterator[Row]:
    total = sum(value.nbytes for value in state.values())
    speed = lambda run: total / best_s(run, device)  # noqa: E731
    ours, theirs = folder / "ours", folder / "theirs"
    has_peer = device.type != SIMULATED  # DCP needs pinned memory of the device's library
    if "fingerprint" in only:
        yield Row("fingerprint", speed(lambda: reshard.fingerprint(state)), "copy on the device", raw["on"], 1 / 3)
    if "async_save" in only:
        for stage in ("host", "device"):
            blocked = _blocked_s(lambda stage=stage: reshard.async_save(state, ours, stage=stage), device)
            wanted = 1 / 1.15 if stage == "host" else None
            what = f'async_save, until it returns, stage="{stage}"'
            yield Row(what, total / blocked, "pinned copy", raw["from"], wanted)
    if "load" in only:
        reshard.save(state, ours)
        slower = min(raw["to"], read_speed(ours, device))
        target = {key: torch.empty_like(value) for key, value in state.items()}
        yield Row("load", speed(lambda: reshard.load(target, ours)), "reading, or a pinned copy", slower, 0.8)
        unchecked = speed(lambda: reshard.load(target, ours, check=False))
        yield Row("load, nothing checked", unchecked, "reading, or a pinned copy", slower, 0.8)
    if "save" in only:
        saved = speed(lambda: reshard.save(state, ours))
        if has_peer:
            yield Row("save", saved, "DCP", speed(lambda: _dcp_save(state, theirs)))
            if "load" in only:
                loaded = speed(lambda: reshard.load(target, ours))
                yield Row("load", loaded, "DCP", speed(lambda: _dcp_load(target, theirs)))


def _blocked_s(start_save: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds until `async_save` returns, for a second save, which finds memory on the host."""
    times = []
    for _ in range(REPEATS + 1):
        torch.get_device_module(device).synchronize()
        start = time.perf_counter()
        pending = start_save()
        times.append(time.perf_counter() - start)
        pending.result()
    return min(times[1:])


def _dcp_save(state: dict[str, torch.Tensor], folder: Path) -> None:
    with _quiet():
        dcp.save(dict(state), checkpoint_id=folder, no_dist=True)


def _dcp_load(state: dict[str, torch.Tensor], folder: Path) -> None:
    with _quiet():
        dcp.load(dict(state), checkpoint_id=folder, no_dist=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress DCP's messages about a single process."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def live(kind: str, nbytes: int, folder: str) -> list[Row]:
    """Return rows for ranks with a device each: rows to columns, and rows to copies on all."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _know(kind)
    module = torch.get_device_module(kind)
    device = torch.device(kind, rank % module.device_count())
    module.set_device(device)
    backend = dist.get_default_backend_for_device(device)
    store = dist.FileStore(f"{folder}/store", size)
    dist.destroy_process_group()
    dist.init_process_group(f"cpu:gloo,{kind}:{backend}", store=store, rank=rank, world_size=size)
    mesh = init_device_mesh(kind, (size,))
    side = max(int((nbytes // 2) ** 0.5) // size * size, size)
    local = torch.ones(side // size, side, dtype=torch.bfloat16, device=device)
    source = {"w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)}
    rows = []
    for name, placement, shape in (
        ("columns", Shard(1), (side, side // size)),
        ("copies", Replicate(), (side, side)),
    ):
        room = torch.empty(shape, dtype=torch.bfloat16, device=device)
        target = {"w": DTensor.from_local(room, mesh, [placement], run_check=False)}
        prepared = reshard.prepare(source, target)
        crossing = prepared.run().bytes_received
        ours = crossing / best_s(prepared.run, device)
        peer = crossing / best_s(lambda placement=placement: source["w"].redistribute(mesh, [placement]), device)
        rows.append(Row(f"rows into {name}", ours, "DTensor.redistribute", peer))
        rows.append(Row(f"rows into {name}", ours, "plain send", _plain_send(crossing, rank, size, device), 0.8))
    return rows


def _plain_send(nbytes: int, rank: int, size: int, device: torch.device) -> float:
    """Return the bytes per second of sending a message to the next rank while one arrives from the previous."""
    out, back = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))

    def send() -> None:
        ops = [dist.P2POp(dist.isend, out, (rank + 1) % size), dist.P2POp(dist.irecv, back, (rank - 1) % size)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return nbytes / best_s(send, device)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--suites", nargs="*", help="first run the tests on it: all, or those named here")
    parser.add_argument("--device", help='which kind, or "sim": by default that of this machine')
    parser.add_argument(
        "--only", nargs="+", choices=ROWS, default=ROWS, help="which rows of one process: by default all"
    )
    parser.add_argument("--mib", type=int, default=4096, help="how much the state holds")
    parser.add_argument("--quick", action="store_const", dest="mib", const=64, help="64 MiB")
    options = parser.parse_args()
    kind = options.device or _accelerator()
    if kind is None:
        print("there is no accelerator here, or this torch does not know it: nothing was run")
        return 0
    failed = options.suites is not None and _suites(kind, options.suites)
    _know(kind)
    module, nbytes = torch.get_device_module(kind), options.mib << 20
    name = module.get_device_name() if hasattr(module, "get_device_name") else kind
    print(f"{module.device_count()} x {name}, torch {torch.__version__}, {nbytes / 1e9:.2f} GB\n")
    print("| what | ours, GB/s | beside | GB/s | ratio |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=_fast_folder()) as folder:
        device = torch.device(kind, module.current_device())
        for row in one_process(device, nbytes, Path(folder), options.only):
            print(row, flush=True)
        ranks = 2 if kind == SIMULATED else min(module.device_count(), 8)
        if ranks > 1:
            for row in processes.run(live, ranks, kind, nbytes, folder)[0]:
                print(row, flush=True)
        else:
            print("\nLive transfers by the device's backend need several devices: not run.")
    return int(failed)


def _accelerator() -> str | None:
    kind = torch.accelerator.current_accelerator()
    return kind.type if kind is not None and torch.accelerator.is_available() else None


def _know(kind: str) -> None:
    """Register the simulated device and its backend with torch, if `kind` is that device."""
    if kind == SIMULATED:
        from tests import simulated
        from tests.simulated import messages

        simulated.install()
        messages.register()


def _suites(kind: str, named: Sequence[str]) -> bool:
    """Run tests on the device. Return True if some fail."""
    pytest = [sys.executable, "-m", "pytest", "-q"]
    ends = [subprocess.run([*pytest, f"--device={kind}", *(named or EVERYWHERE)], check=False)]
    if not named:
        environ = {**os.environ, "RESHARD_TEST_DEVICE": kind}
        ends.append(subprocess.run([*pytest, *SUITES], env=environ, check=False))
    return any(end.returncode for end in ends)


def _fast_folder() -> str | None:
    """Return a folder in fast storage, if there is one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


if __name__ == "__main__":
    sys.exit(main())
