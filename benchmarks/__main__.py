"""All benchmarks, one after another, each in processes of its own: `python -m benchmarks [--quick]`.

Every one runs us and the peer side by side and prints ratios; absolute times say little on a shared machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

NAMES = (
    "plan",
    "state_dict",
    "many_tensors",
    "load",
    "save",
    "live",
    "convert",
    "fingerprint",
    "dcp_face",
    "control",
    "control_simulated",
    "manifest",
    "device",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="smaller cases, where a benchmark has them")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these, of {', '.join(NAMES)}")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in NAMES]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}: there are {', '.join(NAMES)}")
    failed = []
    for name in options.names or NAMES:
        print(f"=== benchmarks.{name}", flush=True)
        quick = ["--quick"] if options.quick else []
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *quick], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
