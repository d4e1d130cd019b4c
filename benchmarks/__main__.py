"""The page of figures: `python -m benchmarks [--full] [--write]`, or only some by their names.

Every benchmark runs us and its peers in turns, in processes of its own, so that ratios count; absolute times say little
on a shared machine. What has no peer that could run beside it is not on the page, but runs by its name.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.page import RESULTS, SPEED, Results, Row, filled

ON_THE_PAGE = ("load", "save", "state_dict", "many_tensors", "first_calls", "convert", "fingerprint", "dcp_face")
NAMES = (
    *ON_THE_PAGE,
    "plan",
    "incremental",
    "live",
    "differences",
    "elastic",
    "control",
    "control_simulated",
    "manifest",
    "device",
)


def run(name: str, *options: str) -> int:
    """One benchmark in a process of its own: its exit code."""
    print(f"=== benchmarks.{name}", flush=True)
    started = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    code = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *options], check=False, env=environment
    ).returncode
    print(f"    {time.perf_counter() - started:.0f} s", flush=True)
    return code


def measure(quick: list[str]) -> Results:
    """All that is on the page. Raises RuntimeError if a benchmark fails."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ON_THE_PAGE:
            file = Path(folder, f"{name}.json")
            if run(name, "--rows", str(file), *quick):
                raise RuntimeError(f"benchmarks.{name} failed: there is no page without it")
            rows += Results.from_json(file.read_text()).rows
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    where = (
        f"{count} processors ({platform.machine()}), Python {platform.python_version()}, torch {torch.__version__}, "
        f"OMP_NUM_THREADS=1, {'smaller cases' if quick else 'all cases'}"
    )
    return Results(where, tuple(rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--full", action="store_true", help="all cases; without it some are smaller or left out")
    parser.add_argument("--quick", action="store_true", help="the default of the page, and for names: smaller cases")
    parser.add_argument("--write", action="store_true", help="keep the figures, and put them into docs/speed.md")
    parser.add_argument("--again", action="store_true", help="measure nothing: the page of the figures that were kept")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these, of {', '.join(NAMES)}")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in NAMES]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}: there are {', '.join(NAMES)}")
    if options.names:
        failed = [name for name in options.names if run(name, *(["--quick"] if options.quick else []))]
        if failed:
            print(f"failed: {', '.join(failed)}", file=sys.stderr)
        return bool(failed)
    if options.again:
        results = Results.from_json(RESULTS.read_text())
    else:
        results = measure([] if options.full else ["--quick"])
    print(results.page())
    if options.write:
        RESULTS.write_text(results.to_json())
        SPEED.write_text(filled(SPEED.read_text(), results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
