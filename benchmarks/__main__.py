"""Runs all benchmarks, or some by name: `python -m benchmarks [--full] [--write]`.

    python -m benchmarks --write              # measure all, and fill the tables into benchmarks/RESULTS.md
    python -m benchmarks --write load save    # only these two: the other tables stay as they are
    python -m benchmarks load save            # print these two, with all their cases

Every benchmark runs reshard and its peers in turns, in separate processes, so that ratios are meaningful: absolute
times mean little on a shared machine. Benchmarks without a peer are not on the page, but can be run by name.
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

from benchmarks import goals
from benchmarks.page import README, RESULTS, SPEED, TABLES, Results, Row, filled, merged, with_figures

ON_THE_PAGE = (
    "load",
    "save",
    "state_dict",
    "many_tensors",
    "first_calls",
    "convert",
    "peers",
    "fingerprint",
    "drop_in",
    "plan",
    "incremental",
    "live",
    "differences",
    "weights",
    "elastic",
    "control",
    "manifest",
    "limits",
)
WHOLE = (
    "first_calls",
    "convert",
    "limits",
    "plan",
    "incremental",
    "control",
    "manifest",
    "engines",
    "disk",
    "orbax_shards",
)
"""Their results depend on size or on many rounds, so the page shows all of their cases."""
ON_REQUEST: tuple[str, ...] = (
    "cold",
    "disk",
    "load_parts",
    "many_tensors_large",
    "convert_large",
    "engines",
    "orbax_shards",
)
"""Also on the page, but they take so long that they only run by name. Their last results are kept."""
ORDER = ON_THE_PAGE + ON_REQUEST
NAMES = (*ORDER, "control_simulated", "device")


def run(name: str, *options: str) -> int:
    """Run one benchmark in a new process, and return its exit code."""
    print(f"=== benchmarks.{name}", flush=True)
    started = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    code = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *options], check=False, env=environment
    ).returncode
    print(f"    {time.perf_counter() - started:.0f} s", flush=True)
    return code


def measure(name: str, quick: list[str]) -> tuple[Row, ...]:
    """Return the results of one benchmark. Raises RuntimeError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"{name}.json")
        if run(name, "--rows", str(file), *([] if name in WHOLE else quick)):
            raise RuntimeError(f"benchmarks.{name} failed: its table stays as it was")
        return Results.from_json(file.read_text()).rows


def here(quick: list[str]) -> str:
    """Return a description of the machine."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{count} processors ({platform.machine()}), Python {platform.python_version()}, torch {torch.__version__}, "
        f"OMP_NUM_THREADS=1, {'smaller cases' if quick else 'all cases'}"
    )


def on_the_page(results: Results) -> dict[str, str]:
    """Return the parts of the page by the names of their places."""
    absent = {name: f"Not measured there: `python -m benchmarks --write {name}`." for name in ORDER}
    return {"goals": goals.table(results.rows), **absent, **results.parts()}


def summary(text: str, results: Results) -> str:
    """Return the page for users, with these figures."""
    return filled(with_figures(text, results.rows), {"where": results.where})


def keep(results: Results) -> None:
    """Store the results, and write them into every page that shows some of them."""
    RESULTS.write_text(results.to_json())
    TABLES.write_text(filled(TABLES.read_text(), on_the_page(results)))
    SPEED.write_text(summary(SPEED.read_text(), results))
    README.write_text(with_figures(README.read_text(), results.rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--full", action="store_true", help="all cases; without it some are smaller or omitted")
    parser.add_argument("--quick", action="store_true", help="the default of the page, and for names: smaller cases")
    parser.add_argument("--write", action="store_true", help="store the results, and fill them into the pages")
    parser.add_argument("--again", action="store_true", help="measure nothing: the page of the figures that were kept")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these, of {', '.join(NAMES)}")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in NAMES]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}: there are {', '.join(NAMES)}")
    if options.names and not options.write:
        failed = [name for name in options.names if run(name, *(["--quick"] if options.quick else []))]
        if failed:
            print(f"failed: {', '.join(failed)}", file=sys.stderr)
        return bool(failed)
    pageless = [name for name in options.names if name not in ORDER]
    if pageless:
        parser.error(f"{pageless[0]} has no table on the page: run it without --write")
    results, quick = Results.from_json(RESULTS.read_text()), [] if options.full else ["--quick"]
    names = () if options.again else tuple(options.names) or ON_THE_PAGE
    if names and results.where != here(quick):
        if options.names:
            parser.error(f"the page was measured on {results.where}, this is {here(quick)}: measure all of it anew")
        results = Results(here(quick), ())
    for name in names:
        results = merged(results, measure(name, quick), ORDER)
        if options.write:  # at once: later benchmarks may fail, and this one took long
            keep(results)
    for name, part in on_the_page(results).items():
        print(f"## {name}\n\n{part}\n")
    if options.write:
        keep(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
