"""A large checkpoint to one file of `torch.save`, and to Hugging Face shards: seconds, and peak memory.

    python -m benchmarks.convert_large [--folder FOLDER] [--gigabytes 10]

Four processes write the checkpoint with torch. All of its tensors have the same values, which do not matter here.
Each conversion runs once, in a new process, from a disk to the same disk, durably, after the checkpoint was dropped
from the page cache. The floor of seconds is a plain copy: the checkpoint's files are read, also from a cold cache,
and written into one file by a buffer, durably. The floor of memory is that for a checkpoint of a quarter of the size,
because memory should not grow.

torch has no conversion to shards, and its other one keeps the full checkpoint in memory, so it is omitted.
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

from benchmarks.cold import drop_cache
from benchmarks.page import Row, arguments, report
from benchmarks.processes import run

SIZE = 8192
"""Rows and columns of each tensor: 256 MiB."""

_CHILD = """
import json, sys, time, warnings
warnings.filterwarnings("ignore")
import reshard
import reshard.api.convert
def memory(which):  # in bytes: what the kernel counts, mapped files included
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(which))
with open("/proc/self/clear_refs", "w") as reset:  # the peak is that of the call, not of the imports
    reset.write("5")
before, start, cpu = memory("VmRSS"), time.perf_counter(), time.process_time()
reshard.convert(sys.argv[1], sys.argv[2], format=sys.argv[3])
seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
print(json.dumps({"s": seconds, "CPU s": cpu, "MB of memory": (memory("VmHWM") - before) / 1e6}))
"""
TARGETS = {"torch.save": ("torch_save", "out.pt"), "Hugging Face shards": ("safetensors", "out")}


def save(folder: str, tensors: int) -> None:
    """Save rows by four ranks. The processes hold one tensor between them."""
    mesh = init_device_mesh("cpu", (4,))
    local = torch.rand(SIZE // 4, SIZE)
    state = {f"layer{i}.weight": DTensor.from_local(local, mesh, [Shard(0)], run_check=False) for i in range(tensors)}
    dcp.save(state, checkpoint_id=folder)


def convert(source: Path, target: Path, format: str) -> dict[str, float]:
    """Return what a new process measured."""
    command = [sys.executable, "-c", _CHILD, str(source), str(target), format]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def plain_copy(source: Path, target: Path) -> dict[str, float]:
    """Copy the bytes of the checkpoint's files into one file, durably."""
    block = memoryview(bytearray(1 << 20))
    start, cpu = time.perf_counter(), time.process_time()
    with open(target, "wb", buffering=0) as out:
        for file in sorted(source.iterdir()):
            with open(file, "rb", buffering=0) as data:
                while count := data.readinto(block):
                    out.write(block[:count])
        os.fsync(out.fileno())
    return {"s": time.perf_counter() - start, "CPU s": time.process_time() - cpu}


def measure(tensors: int, folder: Path) -> dict[str, dict[str, float]]:
    """Return the cost of the floor and of each conversion of a checkpoint with `tensors` tensors, in a new folder."""
    folder.mkdir()
    saved = folder / "saved"
    run(save, 4, str(saved), tensors)
    os.sync()
    found = {}
    for what, (format, name) in {"floor": ("", "plain"), **TARGETS}.items():
        drop_cache(str(saved))
        target = folder / name
        found[what] = convert(saved, target, format) if format else plain_copy(saved, target)
        print(f"    {what}: {found[what]}", file=sys.stderr, flush=True)
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        os.sync()  # so that pending writes of one run do not slow down the next
    shutil.rmtree(folder)
    return found


def rows(gigabytes: float, parent: str | None) -> Iterator[Row]:
    """Yield seconds, CPU time, and memory of each conversion."""
    tensors = max(4, round(gigabytes * 1e9 / (SIZE * SIZE * 4)))
    folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        quarter, whole = (measure(count, folder / str(count)) for count in (tensors // 4, tensors))
        for what in TARGETS:
            for unit, figure in whole[what].items():
                under = quarter[what][unit] if unit == "MB of memory" else whole["floor"][unit]
                name = f"DCP to {what}, {tensors * SIZE * SIZE * 4 / 1e9:.1f} GB"
                yield Row("convert_large", name, unit, (figure,), {}, (under,))
    finally:
        shutil.rmtree(folder)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--folder", help="where the files go, on a disk: twice as much; default: a temporary one")
    parser.add_argument("--gigabytes", type=float, default=10.0)
    options = parser.parse_args()
    return report(rows(options.gigabytes, options.folder), options.rows)


if __name__ == "__main__":
    sys.exit(main())
