"""A large checkpoint into one file of `torch.save`, and into Hugging Face shards: seconds, and the peak of memory.

    python -m benchmarks.convert_large [--quick] [--folder FOLDER] [--gigabytes 10]

Four processes write the checkpoint as torch does; all its tensors have the same values, which nobody looks at. Each
conversion runs once, in a new process, from a disk onto the same disk. The floor is a plain write of as many bytes into
one file there. torch has no conversion into shards, and the other one holds the whole checkpoint in memory, so that it
is left out.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.convert import plain_copy
from benchmarks.page import Row, arguments, report
from benchmarks.processes import run

SIZE = 8192
"""Rows and columns of each tensor: 256 MiB."""

_CHILD = """
import json, sys, time, warnings
warnings.filterwarnings("ignore")
import reshard
import reshard.api.convert.converting
def memory(which):  # in bytes: what the kernel counts, mapped files included
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(which))
with open("/proc/self/clear_refs", "w") as reset:  # the peak is that of the call, not of the imports
    reset.write("5")
before, start, cpu = memory("VmRSS"), time.perf_counter(), time.process_time()
reshard.convert(sys.argv[1], sys.argv[2], format=sys.argv[3])
seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
print(json.dumps({"s": seconds, "processor s": cpu, "MB of memory": (memory("VmHWM") - before) / 1e6}))
"""
TARGETS = {"torch.save": ("torch_save", "out.pt"), "Hugging Face shards": ("safetensors", "out")}


def save(folder: str, tensors: int) -> None:
    """Rows by four; the processes hold one tensor between them."""
    mesh = init_device_mesh("cpu", (4,))
    local = torch.rand(SIZE // 4, SIZE)
    state = {f"layer{i}.weight": DTensor.from_local(local, mesh, [Shard(0)], run_check=False) for i in range(tensors)}
    dcp.save(state, checkpoint_id=folder)


def convert(source: Path, target: Path, format: str) -> dict[str, float]:
    """What a new process measured."""
    command = [sys.executable, "-c", _CHILD, str(source), str(target), format]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows(gigabytes: float, parent: str | None) -> Iterator[Row]:
    """Seconds, processor time and memory of each conversion."""
    tensors = max(1, round(gigabytes * 1e9 / (SIZE * SIZE * 4)))
    nbytes = tensors * SIZE * SIZE * 4
    folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        run(save, 4, str(folder / "saved"), tensors)
        os.sync()
        floor = plain_copy(nbytes, folder / "plain")
        (folder / "plain").unlink()
        for what, (format, name) in TARGETS.items():
            found = convert(folder / "saved", folder / name, format)
            for unit, figure in found.items():
                under = () if unit == "MB of memory" else (floor[unit],)
                yield Row("convert_large", f"DCP to {what}, {nbytes / 1e9:.1f} GB", unit, (figure,), {}, under)
            shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()
    finally:
        shutil.rmtree(folder)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--folder", help="where the files go: three times as much; default: a temporary one")
    parser.add_argument("--gigabytes", type=float, default=10.0)
    options = parser.parse_args()
    return report(rows(options.gigabytes, options.folder), options.rows)


if __name__ == "__main__":
    sys.exit(main())
