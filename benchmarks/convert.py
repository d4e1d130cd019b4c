"""`dcp_to_torch_save` compared with torch's own: one file from a checkpoint folder, each in a new process.

    python -m benchmarks.convert [--quick] [--folder /dev/shm] [--repeats 3]
    python -m benchmarks.convert --parts

torch writes the checkpoint with four processes. Then, both convert it in turns. Measures the seconds and CPU time of
the call, and by how much the peak of the process's memory exceeds its start. The floor is a plain buffered write of
the same number of bytes into one file, without reading them. If isal is installed, there are rows with it.

The cases are rows, whose checksums torch has already written, and columns, whose checksums must be computed. With
`--parts`: the CPU time of each step of a conversion.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.page import Row, arguments, report
from benchmarks.processes import run
from reshard.stored.record_checksums import crc32

_CHILD = """
import json, resource, sys, threading, time, warnings
warnings.filterwarnings("ignore")
from {module} import dcp_to_torch_save
{also}  # what the call imports when it is first made is not timed, on either side
def now():  # resident memory, in bytes: what the kernel counts, mapped files included
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS"))
with open("/proc/self/clear_refs", "w") as reset:  # the peak is that of the call, not of the imports
    reset.write("5")
before, start, cpu = now(), time.perf_counter(), time.process_time()
dcp_to_torch_save(sys.argv[1], sys.argv[2])
seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
with open("/proc/self/status") as status:
    peak = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))
print(json.dumps({{"s": seconds, "CPU s": cpu, "MB of memory": (peak - before) / 1e6}}))
"""
_READERS = "reshard.formats.table as known, reshard.storage.tar; list(known.formats())"
_MODULES = {
    "torch": ("torch.distributed.checkpoint.format_utils", "import torch.serialization"),
    "reshard": ("reshard.dcp", f"import reshard.api.convert, {_READERS}"),
}
"""Module of the function, and the modules that it imports on first use."""
WITH_ISAL = " with the extra crc32"
"""Suffix of rows measured with isal. Other rows use zlib."""
if find_spec("isal") is not None:
    _MODULES[f"reshard{WITH_ISAL}"] = _MODULES["reshard"]
_WITHOUT_ISAL = "import sys; sys.modules['isal'] = None\n"
CASES = {"rows by 4": 0, "columns by 4": 1}
"""The sharded dim."""


def save(folder: str, tensors: int, size: int, dim: int) -> None:
    """Save square float32 tensors with torch, sharded along a dim over all ranks."""
    mesh = init_device_mesh("cpu", (4,))
    state = {}
    for i in range(tensors):
        torch.manual_seed(i)
        local = torch.rand((size // 4, size) if dim == 0 else (size, size // 4))
        state[f"layer{i}.weight"] = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)
    dcp.save({"model": state}, checkpoint_id=folder)


def convert(name: str, source: Path, target: Path) -> dict[str, float]:
    """Run one conversion by `name` in a new process."""
    module, also = _MODULES[name]
    code = ("" if name.endswith(WITH_ISAL) else _WITHOUT_ISAL) + _CHILD.format(module=module, also=also)
    done = subprocess.run(
        [sys.executable, "-c", code, str(source), str(target)], check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def plain_copy(nbytes: int, target: Path) -> dict[str, float]:
    """Write the same number of bytes into one file, durably, as a conversion does."""
    block = bytearray(os.urandom(1 << 20))
    start, cpu = time.perf_counter(), time.process_time()
    with open(target, "wb", buffering=0) as file:
        for _ in range(-(-nbytes // len(block))):
            file.write(block)
        os.fsync(file.fileno())
    return {"s": time.perf_counter() - start, "CPU s": time.process_time() - cpu, "MB of memory": 0.0}


def rows(what: str, tensors: int, size: int, parent: str | None, repeats: int) -> Iterator[Row]:
    """Yield seconds, CPU time, and memory for one of `CASES`."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    rounds: list[dict[str, dict[str, float]]] = []
    try:
        run(save, 4, str(folder / "saved"), tensors, size, CASES[what])
        nbytes = tensors * size * size * 4
        for _ in range(repeats):
            rounds.append({})
            for name in _MODULES:
                rounds[-1][name] = convert(name, folder / "saved", folder / "out.pt")
                (folder / "out.pt").unlink()
            rounds[-1]["floor"] = plain_copy(nbytes, folder / "out.pt")
            (folder / "out.pt").unlink()
    finally:
        shutil.rmtree(folder)
    for way in ("", WITH_ISAL):
        for unit in ("s", "CPU s", "MB of memory"):
            of = {who: tuple(found[who][unit] for found in rounds) for who in rounds[0]}
            floor = () if unit == "MB of memory" else of["floor"]
            name = f"DCP to torch.save{way}, {what}, {nbytes / 1e9:.1f} GB"
            if f"reshard{way}" in of:
                yield Row("convert", name, unit, of[f"reshard{way}"], {"torch": of["torch"]}, floor)


def parts(parent: str | None, nbytes: int = 256 << 20, piece: int = 2 << 20) -> None:
    """Return the CPU time of each step per gigabyte on one thread, the best of a few runs."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    buffer, many = bytearray(os.urandom(piece)), range(nbytes // piece)
    (folder / "there").write_bytes(bytes(buffer) * len(many))
    there = os.open(folder / "there", os.O_RDONLY)
    mapping = mmap.mmap(there, nbytes, access=mmap.ACCESS_READ)
    mapped = memoryview(mapping)

    def read(_: int, at: int) -> None:
        os.preadv(there, [buffer], at)

    def write(file: int, at: int) -> None:
        os.pwrite(file, buffer, at)

    def both(file: int, at: int) -> None:
        read(file, at)
        write(file, at)

    def from_mapping(file: int, at: int) -> None:
        os.pwrite(file, mapped[at : at + piece], at)
        mapping.madvise(mmap.MADV_DONTNEED, at, piece)  # keeps memory flat, so that each page is mapped again

    def into_mapping(file: int, at: int) -> None:
        os.ftruncate(file, at + piece)
        with mmap.mmap(file, piece, offset=at) as target:
            target[:] = buffer

    steps: dict[str, Callable[[int, int], Any]] = {
        "read": read,
        "write": write,
        "read and write": both,
        "write from a mapping": from_mapping,
        "write into a mapping": into_mapping,
        "CRC-32": lambda *_: crc32(buffer),
        "XXH3": lambda *_: xxhash.xxh3_128_intdigest(buffer),
    }
    try:
        for name, step in steps.items():
            took = []
            for _ in range(4):
                file = os.open(folder / "new", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
                start = time.process_time()
                for i in many:
                    step(file, i * piece)
                took.append(time.process_time() - start)
                os.close(file)
                (folder / "new").unlink()
            print(f"{name:24} {min(took) / nbytes * 1e9:.2f} s")
    finally:
        os.close(there)
        shutil.rmtree(folder)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--folder", help="where the files go; default: memory, where there is a folder of it")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", action="store_true", help="only what each step costs, in CPU time for a GB")
    options = parser.parse_args()
    folder = options.folder or ("/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    if options.parts:
        parts(folder)
        return 0
    size = (12, 2048) if options.quick else (23, 4096)
    found = (row for what in CASES for row in rows(what, *size, folder, options.repeats))
    return report(found, options.rows)


if __name__ == "__main__":
    sys.exit(main())
