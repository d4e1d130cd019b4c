"""`dcp_to_torch_save`'s work against torch's own: one file out of a checkpoint folder, each in a fresh process.

    python -m benchmarks.convert [--quick] [--folder /dev/shm] [--repeats 3]

torch writes the checkpoint with four processes; then both convert it in turn. The seconds and processor time of the
call, and by how much the peak of the process's memory lies above its start. The floor is a plain copy of as many bytes
into one file, by a buffer.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.page import Row, arguments, report
from benchmarks.processes import run

_CHILD = """
import json, resource, sys, threading, time, warnings
warnings.filterwarnings("ignore")
from {module} import dcp_to_torch_save
import {also}  # what the call imports when it is first made is not timed, on either side
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
print(json.dumps({{"s": seconds, "processor s": cpu, "MB of memory": (peak - before) / 1e6}}))
"""
_MODULES = {
    "torch": ("torch.distributed.checkpoint.format_utils", "torch.serialization"),
    "reshard": ("reshard.dcp", "reshard.api.convert.converting"),
}
"""Where the function is, and what it needs besides."""


def save(folder: str, tensors: int, rows: int) -> None:
    """Square float32 tensors, cut into rows over all ranks, as torch writes them."""
    mesh = init_device_mesh("cpu", (4,))
    state = {}
    for i in range(tensors):
        torch.manual_seed(i)
        state[f"layer{i}.weight"] = DTensor.from_local(torch.rand(rows // 4, rows), mesh, [Shard(0)], run_check=False)
    dcp.save({"model": state}, checkpoint_id=folder)


def convert(name: str, source: Path, target: Path) -> dict[str, float]:
    """One conversion by `name`, in a process of its own."""
    module, also = _MODULES[name]
    code = _CHILD.format(module=module, also=also)
    done = subprocess.run(
        [sys.executable, "-c", code, str(source), str(target)], check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def plain_copy(nbytes: int, target: Path) -> dict[str, float]:
    """As many bytes into one file, and on to stable storage, as a conversion does."""
    block = bytearray(os.urandom(1 << 20))
    start, cpu = time.perf_counter(), time.process_time()
    with open(target, "wb", buffering=0) as file:
        for _ in range(-(-nbytes // len(block))):
            file.write(block)
        os.fsync(file.fileno())
    return {"s": time.perf_counter() - start, "processor s": time.process_time() - cpu, "MB of memory": 0.0}


def rows(tensors: int, size: int, parent: str | None, repeats: int) -> Iterator[Row]:
    """Seconds, processor time and memory."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    rounds: list[dict[str, dict[str, float]]] = []
    try:
        run(save, 4, str(folder / "saved"), tensors, size)
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
    for unit in ("s", "processor s", "MB of memory"):
        of = {who: tuple(found[who][unit] for found in rounds) for who in rounds[0]}
        floor = () if unit == "MB of memory" else of["floor"]
        yield Row(
            "convert", f"DCP to torch.save, {nbytes / 1e9:.1f} GB", unit, of["reshard"], {"torch": of["torch"]}, floor
        )


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--folder", help="where the files go; default: memory, where there is a folder of it")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    folder = options.folder or ("/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    return report(rows(*((12, 2048) if options.quick else (23, 4096)), folder, options.repeats), options.rows)


if __name__ == "__main__":
    sys.exit(main())
