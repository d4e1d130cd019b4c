"""`dcp_to_torch_save`'s work against torch's own: one file out of a checkpoint folder, each in a fresh process.

    python -m benchmarks.convert [--quick] [--folder /dev/shm] [--repeats 3]

torch writes the checkpoint with four processes; then both convert it in turn. Prints wall-clock times of the call,
their ratio (above 1: we are faster), and by how much the peak of the process's memory lies above its start.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

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
before, start = now(), time.perf_counter()
dcp_to_torch_save(sys.argv[1], sys.argv[2])
seconds = time.perf_counter() - start
with open("/proc/self/status") as status:
    peak = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))
print(json.dumps({{"seconds": seconds, "above": peak - before}}))
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


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="200 MB instead of 1.5 GB")
    parser.add_argument("--folder", help="where the files go; default: where temporary files go")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    tensors, rows = (12, 2048) if given.quick else (23, 4096)
    folder = Path(tempfile.mkdtemp(dir=given.folder))
    rows_of: dict[str, list[dict[str, float]]] = {name: [] for name in _MODULES}
    try:
        run(save, 4, str(folder / "saved"), tensors, rows)
        nbytes = tensors * rows * rows * 4
        for _ in range(given.repeats):
            for name in _MODULES:
                rows_of[name].append(convert(name, folder / "saved", folder / "out.pt"))
                (folder / "out.pt").unlink()
        print(f"{nbytes / 1e9:.2f} GB, median of {given.repeats}, alternating")
        median = {name: statistics.median(row["seconds"] for row in found) for name, found in rows_of.items()}
        for name, found in rows_of.items():
            above = max(row["above"] for row in found)
            spread = " ".join(f"{row['seconds']:.2f}" for row in found)
            print(f"  {name:8} {median[name]:7.2f} s  ({spread})   peak {above / 1e6:7.0f} MB above the start")
        print(f"  ratio {median['torch'] / median['reshard']:.2f}")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
