"""The best that goals can reach: bare passes over bytes, compared with the same peers and floors.

    python -m benchmarks.limits [--quick] [--folder /dev/shm]

Each row makes the passes that a call cannot omit, and nothing else: no plan, no messages, no metadata. The peer or
floor runs in the same rounds, so no code around these passes can exceed the ratio peer / ours or floor / ours. Rows
are CPU time, and for conversions also seconds.

- A load of the same layout that checks first hashes a mapped file, and copies from it. One that checks during the
  load reads each block and hashes it. The floor only reads. The peer is torch's load.
- A load of copies hashes a rank's share of the files, and then each rank copies all of them.
- For a load of columns, only the compiled loop counts, which reads, hashes, copies, and waits for other ranks. The
  floor is that of the table of loads: one read, one hash, and one strided copy, by ranks that do not share reads.
- A save hashes and writes each block. By default, it also computes fingerprints, by numpy or by the compiled kernel.
  The floor only writes. The peer is torch's save.
- A conversion reads pieces in one thread, with their CRC-32, and writes them in another. For columns, it computes a
  second CRC-32, that of the new file. The peer is torch's conversion.
"""

from __future__ import annotations

import math
import mmap
import os
import shutil
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.tensor import Placement, Replicate, Shard

import reshard
from benchmarks.convert import CASES, WITH_ISAL, convert, save as save_for_convert
from benchmarks.kernels import NAMED, compiled_kernel, is_installed
from benchmarks.load import CASES as LOADS, make, save as save_for_load, work_of_columns
from benchmarks.load_parts import LOOP, Clock
from benchmarks.page import Row, arguments, report
from benchmarks.processes import measured, over_ranks, run
from benchmarks.save import CASES as SAVES
from reshard.live.compiled_kernel import kernel
from reshard.live.fingerprints import partials

warnings.filterwarnings("ignore")

ROUNDS = 3
BLOCK, WRITE, PIECE = 64 << 10, 512 << 10, 2 << 20
"""Sizes in bytes: a block of checksums, a write of a save, and a piece of a conversion."""
LOADS_LIMITED = {
    "rows by 4 to columns by 8": "the compiled loop",
    "rows by 4 to columns by 4": "the compiled loop",
    "rows by 4 to copies on all": "hash a share, copy all",
}
_MADV_POPULATE_READ = 22
_CRC32: dict[str, Callable[[Any], int]] = {"": zlib.crc32}
with suppress(ImportError):
    from isal import isal_zlib

    _CRC32[WITH_ISAL] = isal_zlib.crc32
Array = np.ndarray[Any, np.dtype[np.uint8]]


def hashed(data: Any) -> None:
    """Hash the blocks of `data`, as for checksums."""
    view = memoryview(data)
    for start in range(0, len(view), BLOCK):
        xxhash.xxh3_64_intdigest(view[start : start + BLOCK])


def read(path: Path, target: Array, *, hashes: bool = False) -> None:
    """Read the file into memory. With `hashes`, hash each piece while it is in a cache."""
    with open(path, "rb", buffering=0) as file:
        for start in range(0, len(target), 1 << 20):
            file.readinto(memoryview(target[start : start + (1 << 20)]))
            if hashes:
                hashed(target[start : start + (1 << 20)])


def hash_and_copy(path: Path, target: Array, *, hashes: bool = True) -> None:
    """Copy the mapped file into memory. With `hashes`, hash all of it first."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        with suppress(OSError):  # Linux before 5.14
            mapped.madvise(_MADV_POPULATE_READ)
        view = memoryview(mapped)
        if hashes:
            hashed(view)
        source = np.frombuffer(view, np.uint8)
        np.copyto(target, source)
        del source
        view.release()


def write(path: Path, source: Array, *, hashes: bool = False) -> None:
    """Write memory into a new file."""
    with open(path, "wb", buffering=0) as file:
        for start in range(0, len(source), WRITE):
            piece = source[start : start + WRITE]
            file.write(memoryview(piece))
            if hashes:
                hashed(piece)  # while it is in a cache
        os.fsync(file.fileno())


def write_with_fingerprints(path: Path, source: Array, state: Mapping[str, torch.Tensor]) -> None:
    """Write and compute fingerprints, as saves do by default."""
    partials((tensor, None, None) for tensor in state.values())
    write(path, source, hashes=True)


def passes_of_rank(folder: str, shape: tuple[int, ...], count: int, rows: int) -> Any:
    """Return this rank's seconds and CPU time, by round and pass, for its shards of square tensors."""
    state, here = make(shape, [Shard(0)], count, rows, seed=1), Path(folder, str(dist.get_rank()))
    other = make(shape, [Shard(0)], count, rows, seed=None)
    mine = {name: tensor.to_local() for name, tensor in state.items()}
    source = np.concatenate([tensor.view(torch.int16).numpy().reshape(-1) for tensor in mine.values()]).view(np.uint8)
    target, there, new = np.zeros(len(source), np.uint8), here / "there", here / "new"
    here.mkdir()
    there.write_bytes(memoryview(source))
    passes: dict[str, Callable[[], object]] = {
        "copy": lambda: read(there, target),
        "check first": lambda: hash_and_copy(there, target),
        "check during": lambda: read(there, target, hashes=True),
        "write": lambda: write(new, source),
        "hash and write": lambda: write(new, source, hashes=True),
        "default": lambda: write_with_fingerprints(new, source, mine),
        "DCP": lambda: dcp.save(state, checkpoint_id=f"{folder}/dcp"),
        "DCP load": lambda: dcp.load(other, checkpoint_id=f"{folder}/dcp"),
    }

    def took(name: str) -> tuple[float, float]:
        seconds, cpu, _ = measured(passes[name])
        new.unlink(missing_ok=True)
        if dist.get_rank() == 0 and name != "DCP":  # its checkpoint is loaded next
            shutil.rmtree(f"{folder}/dcp", ignore_errors=True)
        return seconds, cpu

    found = []
    for _ in range(ROUNDS + 1):
        found.append({name: took(name) for name in passes})
        if is_installed():
            with compiled_kernel():
                found[-1][f"default{NAMED}"] = took("default")
    return found[1:]  # the first round warmed up the imports


def loads_and_saves(folder: Path, size: tuple[int, int]) -> Iterator[Row]:
    """Yield passes for the ranks of the tables of loads and saves."""
    for case, (world, shape, _) in list(SAVES.items())[:3]:
        here = folder / str(world)
        here.mkdir()
        found = over_ranks(run(passes_of_rank, world, str(here), shape, *size))["CPU s"]
        shutil.rmtree(here)
        for name in ("check first", "check during"):
            yield Row("limits", f"{case}, {name}", "CPU s", found[name], {"DCP": found["DCP load"]}, found["copy"])
        yield Row("limits", f"{case}, hash and write", "CPU s", found["hash and write"], floor=found["write"])
        for name in ("default", f"default{NAMED}"):
            if name in found:
                yield Row("limits", f"{case}, {name}", "CPU s", found[name], {"DCP": found["DCP"]}, found["write"])


def passes_of_load(folder: str, shape: tuple[int, ...], placements: list[Placement], count: int, rows: int) -> Any:
    """Return this rank's seconds and CPU time, by round and pass, for a load of other shards than were saved."""
    ours, theirs = (make(shape, placements, count, rows, seed=None) for _ in range(2))
    files = sorted(Path(folder, "reshard").glob("data-*/*.safetensors"))
    nbytes = sum(tensor.to_local().nbytes for tensor in ours.values())
    is_copy = placements == [Replicate()]
    target = np.zeros(max(path.stat().st_size for path in files), np.uint8)

    def copies() -> None:
        for path in files:
            hash_and_copy(path, target[: path.stat().st_size], hashes=path == files[dist.get_rank()])

    def floor() -> None:
        work_of_columns([str(path) for path in files], nbytes)

    clock = Clock()
    if is_installed():
        with compiled_kernel():
            clock.watch(LOOP, kernel(), "run")
    found: list[dict[str, tuple[float, float]]] = []
    for _ in range(ROUNDS + 1):
        found.append({})
        *found[-1]["DCP"], _ = measured(lambda: dcp.load(theirs, checkpoint_id=f"{folder}/dcp"))
        *found[-1]["floor"], _ = measured(copies if is_copy else floor)
        if is_installed() and not is_copy:
            clock.seconds.clear()
            with compiled_kernel():
                seconds, _, _ = measured(lambda: reshard.load(ours, f"{folder}/reshard"))
            found[-1]["loop"] = seconds, clock.seconds[LOOP]
    return found[1:]


def loads(folder: Path, size: tuple[int, int]) -> Iterator[Row]:
    """Yield passes of loads to other layouts, by their names in the table of loads."""
    for case, what in LOADS_LIMITED.items():
        world, saved_shape, saved, shape, placements = LOADS[case]
        here = folder / case
        run(save_for_load, math.prod(saved_shape), str(here), saved_shape, saved, *size)
        found = over_ranks(run(passes_of_load, world, str(here), shape, placements, *size))["CPU s"]
        shutil.rmtree(here)
        if placements == [Replicate()]:
            yield Row("limits", f"{case}, {what}", "CPU s", found["floor"], {"DCP": found["DCP"]})
        elif "loop" in found:
            yield Row("limits", f"{case}, {what}", "CPU s", found["loop"], {"DCP": found["DCP"]}, found["floor"])


def bare_conversion(sources: list[Path], target: Path, sums: int, crc32: Callable[[Any], int]) -> dict[str, float]:
    """Copy the bytes of some files into one, with `sums` CRC-32s of each piece. Return seconds and CPU time."""
    start, cpu = time.perf_counter(), time.process_time()
    buffers = [bytearray(PIECE) for _ in range(3)]

    def fill(file: Any, number: int) -> memoryview:
        piece = memoryview(buffers[number % len(buffers)])
        piece = piece[: file.readinto(piece)]
        for _ in range(sums):
            crc32(piece)
        return piece

    with open(target, "wb", buffering=0) as out, ThreadPoolExecutor(1) as pool:
        for path in sources:
            with open(path, "rb", buffering=0) as file:
                count = -(-path.stat().st_size // PIECE)
                waiting = pool.submit(fill, file, 0)
                for number in range(count):
                    piece = waiting.result()
                    if number + 1 < count:
                        waiting = pool.submit(fill, file, number + 1)
                    out.write(piece)
        os.fsync(out.fileno())
    target.unlink()
    return {"s": time.perf_counter() - start, "CPU s": time.process_time() - cpu}


def conversions(folder: Path, size: tuple[int, int]) -> Iterator[Row]:
    """Yield passes of converting a checkpoint that torch saved on four ranks."""
    for sums, (what, dim) in enumerate(CASES.items(), 1):
        saved, out = folder / f"saved{dim}", folder / "out.pt"
        run(save_for_convert, 4, str(saved), *size, dim)
        found: list[dict[str, dict[str, float]]] = []
        for _ in range(ROUNDS):
            found.append({"torch": convert("torch", saved, out)})
            out.unlink()
            for way, crc32 in _CRC32.items():
                found[-1][way] = bare_conversion(sorted(saved.glob("*.distcp")), out, sums, crc32)
        shutil.rmtree(saved)
        for way in _CRC32:
            for unit in ("s", "CPU s"):
                bare, theirs = (tuple(one[who][unit] for one in found) for who in (way, "torch"))
                yield Row("limits", f"DCP to torch.save{way}, {what}", unit, bare, {"torch": theirs})


def rows(folder: str, size: tuple[int, int]) -> Iterator[Row]:
    """Yield all rows. `size`: number of square tensors, and their rows."""
    here = Path(tempfile.mkdtemp(dir=folder))
    try:
        yield from loads_and_saves(here, size)
        yield from loads(here, size)
        yield from conversions(here, size)
    finally:
        shutil.rmtree(here)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--folder", default="/dev/shm", help="where the files go (default: memory)")
    options = parser.parse_args()
    return report(rows(options.folder, (12, 2048) if options.quick else (24, 4096)), options.rows)


if __name__ == "__main__":
    sys.exit(main())
