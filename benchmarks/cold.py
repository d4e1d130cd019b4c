"""Loading from cold storage (a disk or an object store), compared with DCP.

    python -m benchmarks.cold [--quick] [--folder /tmp] [--case TEXT] [--size 2048] [--latency 20] [--rate 40]

Disk: before each load, the page cache of all files is dropped, which `mincore` confirms. Bytes are those that the
kernel read from the disk for the processes, including read-ahead.

Store: a server on loopback, which delays each request and limits the bandwidth of each connection (see
`benchmarks.far_store`). Bytes and requests are counted by the server, for all ranks and the full load, including
metadata. The peer reads the store by fsspec: over s3fs if it is installed, and otherwise over fsspec's HTTP file
system, from the same server.

The floor reads every byte of the data files once, divided evenly among the ranks (from the store: in ranges of 8 MiB,
eight at a time per rank), and discards them. Bytes are reported per distinct byte that any rank needs.
"""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import mmap
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.tensor import Placement, Replicate, Shard

import reshard
from benchmarks.far_store import BUCKET, FarStore, serving
from benchmarks.load import make, save
from benchmarks.page import Row, arguments, report
from benchmarks.processes import measured, over_ranks, run

warnings.filterwarnings("ignore")

ROUNDS = 2
COUNT = 24
RANGE_BYTES = 8 << 20

CASES: dict[int, dict[str, tuple[int, list[Placement]]]] = {
    # processes that load: name of the case: (rows of the save are cut by, placements of the load)
    4: {
        "rows by 4 to columns by 4": (4, [Shard(1)]),
        "rows by 4 to copies on all": (4, [Replicate()]),
    },
    8: {
        "rows by 4 to columns by 8": (4, [Shard(1)]),
        "rows by 8, the same layout": (8, [Shard(0)]),
    },
}

Load = Callable[[dict[str, Any]], object]


def load(folder: str, store: FarStore, world: int, names: list[str], rows: int) -> dict[str, dict[str, Any]]:
    """Return, by case, this rank's rounds, the bytes read in the last one, and whether the data was equal."""
    os.environ.update(store.environ)
    cases = {name: case for name, case in CASES[world].items() if name in names}
    for by in {by for by, _ in cases.values()} & {world} - {4}:
        save(f"{folder}/rows{by}", (by,), [Shard(0)], COUNT, rows)
    save(f"{folder}/small", (world,), [Shard(0)], 1, 8 * world)
    small = make((world,), [Shard(0)], 1, 8 * world, seed=None)
    for one in _loads(folder, "small", store).values():  # warms up imports, connections, and threads
        one(small)
    out = {}
    for name, (by, placements) in cases.items():
        loads = _loads(folder, f"rows{by}", store)
        truth, state = (make((world,), placements, COUNT, rows, seed=None) for _ in range(2))
        dcp.load(truth, checkpoint_id=f"{folder}/rows{by}/dcp")
        rounds, brought, equal = [], {}, True
        for _ in range(ROUNDS):
            found = {}
            for who, one in loads.items():
                *found[who], brought[who] = _load(folder, store, state, one)
                if "floor" not in who:
                    equal &= all(torch.equal(_bits(state[key]), _bits(truth[key])) for key in state)
            rounds.append(found)
        out[name] = {"rounds": rounds, "brought": brought, "equal": equal}
    return out


def _load(folder: str, store: FarStore, state: dict[str, Any], one: Load) -> tuple[float, float, dict[str, float]]:
    """Return seconds and CPU seconds of one load, and this rank's part of the bytes read, by place and unit."""
    for t in state.values():
        t.to_local().fill_(1)  # allocates the memory before the clock starts
    if dist.get_rank() == 0:
        drop_cache(folder)
    dist.barrier()
    disk, asked = disk_bytes(), store.asked()
    seconds, cpu, _ = measured(lambda: one(state))
    disk, seen = disk_bytes() - disk, store.asked().since(asked)
    dist.barrier()  # before the next contestant uses the store
    world = dist.get_world_size()
    return seconds, cpu, {"disk": disk, "store": seen.nbytes / world, "requests": len(seen.requests) / world}


def _bits(tensor: Any) -> torch.Tensor:
    return tensor.to_local().view(torch.int16)  # the values are random bits: some are NaN


def _loads(folder: str, name: str, store: FarStore) -> dict[str, Load]:
    """Return the contestants and floors at each place."""
    s3 = f"s3://{BUCKET}/{name}"
    return {
        "disk, DCP": lambda state: dcp.load(state, checkpoint_id=f"{folder}/{name}/dcp"),
        "disk, ours": lambda state: reshard.load(state, f"{folder}/{name}/reshard"),
        "disk, floor": lambda _: read_share(_ranges(folder, name)),
        "store, DCP": lambda state: dcp.load(state, storage_reader=_fsspec_reader(store, name)),
        "store, ours": lambda state: reshard.load(state, f"{s3}/reshard"),
        "store, floor": lambda _: get_share(folder, _ranges(folder, name)),
    }


def _over() -> str:
    return "http" if importlib.util.find_spec("s3fs") is None else "s3fs"


def _fsspec_reader(store: FarStore, name: str) -> FsspecReader:
    if _over() == "http":
        return FsspecReader(f"{store.url}/{BUCKET}/{name}/dcp")
    return FsspecReader(f"s3://{BUCKET}/{name}/dcp", endpoint_url=store.url, key="test", secret="test")


def _ranges(folder: str, name: str) -> list[tuple[str, int, int]]:
    """Return this rank's part of the bytes of all data files: (file, start, stop)."""
    rank, world, out = dist.get_rank(), dist.get_world_size(), []
    for file in sorted(glob.glob(f"{folder}/{name}/reshard/data-*/*.safetensors")):
        size = os.path.getsize(file)
        first, end = size * rank // world, size * (rank + 1) // world
        out += [(file, start, min(start + RANGE_BYTES, end)) for start in range(first, end, RANGE_BYTES)]
    return out


def read_share(ranges: list[tuple[str, int, int]]) -> None:
    """Read byte ranges from the disk."""
    buffer = memoryview(bytearray(RANGE_BYTES))
    for file, start, stop in ranges:
        with open(file, "rb", buffering=0) as handle:
            while start < stop:
                start += os.preadv(handle.fileno(), [buffer[: stop - start]], start)


def get_share(folder: str, ranges: list[tuple[str, int, int]]) -> None:
    """Request byte ranges from the store."""
    import obstore.store

    store = obstore.store.from_url(f"s3://{BUCKET}")

    def get(row: tuple[str, int, int]) -> None:
        file, start, stop = row
        assert len(obstore.get_range(store, os.path.relpath(file, folder), start=start, end=stop)) == stop - start

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(get, ranges))


def drop_cache(folder: str) -> None:
    """Drop all files of a folder from the page cache. Raises RuntimeError if there is no disk to drop them to."""
    for path in (
        path for path in glob.glob(f"{folder}/**", recursive=True, include_hidden=True) if os.path.isfile(path)
    ):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            for _ in range(100):  # pages that are being read ahead cannot be dropped yet
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                if not resident(handle):
                    break
                time.sleep(0.02)
            else:
                raise RuntimeError(f"{path} stays in memory, whatever is advised: give a --folder on a disk")
        finally:
            os.close(handle)


def resident(handle: int) -> int:
    """Return the number of a file's pages in the page cache, by `mincore`."""
    nbytes = os.fstat(handle).st_size
    if not nbytes:
        return 0
    flags = np.empty(-(-nbytes // mmap.PAGESIZE), np.uint8)
    with mmap.mmap(handle, nbytes, prot=mmap.PROT_READ) as mapped:
        address = np.frombuffer(mapped, np.uint8)
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(address.ctypes.data), ctypes.c_size_t(nbytes), ctypes.c_void_p(flags.ctypes.data)
        )
        del address  # otherwise, the mapping cannot be closed
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return int((flags & 1).sum())


def disk_bytes() -> int:
    """Return the bytes that the kernel has read from disks for this process."""
    with open("/proc/self/io") as file:
        return int(next(line for line in file if line.startswith("read_bytes:")).split()[1])


def rows(names: list[str], size: int, folder: str, latency_s: float, bytes_per_s: float) -> Iterator[Row]:
    """Yield the rows of these cases."""
    here = tempfile.mkdtemp(dir=folder)
    try:
        with serving(here, latency_s=latency_s, bytes_per_s=bytes_per_s) as store:
            run(save, 4, f"{here}/rows4", (4,), [Shard(0)], COUNT, size)
            for world, cases in CASES.items():
                chosen = [name for name in cases if name in names]
                found = run(load, world, here, store, world, chosen, size) if chosen else []
                for name in chosen:
                    yield from _rows_of(name, [rank[name] for rank in found], COUNT * size * size * 2)
    finally:
        shutil.rmtree(here)


def _rows_of(name: str, ranks: list[dict[str, Any]], wanted: int) -> Iterator[Row]:
    assert all(rank["equal"] for rank in ranks), "the two loaded different values"
    figures = over_ranks([rank["rounds"] for rank in ranks])
    for place, peer in (("disk", "DCP"), ("store", f"DCP, {_over()}")):
        what = f"{place}, {name}"
        for unit, one in figures.items():
            yield Row("cold", what, unit, one[f"{place}, ours"], {peer: one[f"{place}, DCP"]}, one[f"{place}, floor"])
        for unit, kind, each in (("bytes per byte", place, wanted), ("requests", "requests", 1)):
            ours, theirs, floor = (
                sum(rank["brought"][f"{place}, {who}"][kind] for rank in ranks) / each
                for who in ("ours", "DCP", "floor")
            )
            if place == "store" or unit != "requests":
                yield Row("cold", what, unit, (ours,), {peer: (theirs,)}, (floor,))


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on a disk (default: where temporary files go)")
    parser.add_argument("--case", help="only cases whose name holds this text")
    parser.add_argument("--size", type=int, help="rows of each of the 24 square tensors (default: 2048; quick: 1024)")
    parser.add_argument("--latency", type=float, default=20, help="milliseconds that a request to the store waits")
    parser.add_argument("--rate", type=float, default=40, help="MB a second that a connection to the store gets")
    options = parser.parse_args()
    names = [name for cases in CASES.values() for name in cases if (options.case or "") in name]
    size = options.size or (1024 if options.quick else 2048)
    found = rows(names, size, options.folder, options.latency / 1e3, options.rate * 1e6)
    return report(found, options.rows)


if __name__ == "__main__":
    sys.exit(main())
