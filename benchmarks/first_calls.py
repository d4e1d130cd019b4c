"""The first calls of a process, compared with torch's: `python -m benchmarks.first_calls [--quick]`.

Each runs in a new process, which imports torch, creates a state of 50 MB (bfloat16 parameters and both moments of
each, some hundred tensors), then imports reshard or DCP, and saves or loads once. Measures the CPU time and the
seconds of import and call together, with cached bytecode of all modules, and of the import alone without any. The
floor is our second call in the same process: everything above it is paid once.
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

from benchmarks.page import Row, arguments, report

_CHILD = """
import json, sys, time, warnings
warnings.filterwarnings("ignore")
import torch
torch.set_num_threads(1)
who, what, path = sys.argv[1:]
shapes = [(512, 512), (512,), (256, 512)] * 21
state = {"model": {f"layers.{i}.weight": torch.ones(shape, dtype=torch.bfloat16) for i, shape in enumerate(shapes)}}
state["optim"] = {
    name: {"exp_avg": torch.ones(shape), "exp_avg_sq": torch.ones(shape)} for name, shape in zip(state["model"], shapes)
}
def once():
    start, cpu = time.perf_counter(), time.process_time()
    if who == "ours":
        import reshard
        call = {"save": reshard.save, "load": reshard.load, "import": lambda *_: None}[what]
        call(state, path)
    else:
        import torch.distributed.checkpoint as dcp
        call = {"save": dcp.save, "load": dcp.load, "import": lambda *_, **__: None}[what]
        call(state, checkpoint_id=path, no_dist=True)
    return time.perf_counter() - start, time.process_time() - cpu
first, second = once(), once()
print(json.dumps([first, second]))
"""


def child(who: str, what: str, path: Path, *, bytecode: bool = True) -> tuple[list[float], list[float]]:
    """Return (seconds, CPU seconds) of the first call and of the second."""
    # one place for all bytecode, whether or not the environment allows writing it: otherwise, torch's older bytecode
    # might be found, and ours not. An empty place is as after an installation that compiled nothing
    place = str(path.parent / "bytecode") if bytecode else tempfile.mkdtemp(dir=path.parent)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = place
    done = subprocess.run(
        [sys.executable, *([] if bytecode else ["-B"]), "-c", _CHILD, who, what, str(path)],
        check=True, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    first, second = json.loads(done.stdout.splitlines()[-1])
    return first, second


def rows(rounds: int) -> Iterator[Row]:
    """Yield a row for each call, by seconds and by CPU time."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    try:
        for who in ("ours", "DCP"):
            for call in ("save", "load"):
                child(who, call, folder / who)  # these write bytecode
        for what, call, bytecode in (
            ("import", "import", True),
            ("import, no bytecode", "import", False),
            ("first save", "save", True),
            ("first load", "load", True),
        ):
            times: list[tuple[list[float], list[float], list[float]]] = []
            for _ in range(rounds):
                mine, again = child("ours", call, folder / "ours", bytecode=bytecode)
                other, _ = child("DCP", call, folder / "DCP", bytecode=bytecode)
                times.append((mine, other, again))
            for i, unit in enumerate(("s", "CPU s")):
                found, peer, floor = zip(*((a[i], b[i], c[i]) for a, b, c in times), strict=True)
                yield Row("first_calls", what, unit, found, {"DCP": peer}, () if call == "import" else floor)
    finally:
        shutil.rmtree(folder)


def main() -> int:
    options = arguments(__doc__).parse_args()
    return report(rows(2 if options.quick else 7), options.rows)


if __name__ == "__main__":
    sys.exit(main())
