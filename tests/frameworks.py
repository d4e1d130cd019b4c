"""Run each framework's tests in a virtual environment of its own, and print the versions and results.

    python -m tests.frameworks                       # all, one after another
    python -m tests.frameworks torchao deepspeed     # some
    python -m tests.frameworks --write               # and put the table on tests/integrations.md

`.venv-<name>` sees the packages of the environment that runs this, such as its torch, and adds the framework. Nothing
there may install another torch. Skipped tests are reported as skipped, so a framework that cannot be imported is
noticed.
"""

from __future__ import annotations

import argparse
import re
import site
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

__all__ = ["FRAMEWORKS", "PAGE", "Framework", "Result", "table"]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "tests" / "integrations.md"
_BLOCK = re.compile(r"(?<=<!-- frameworks -->\n).*?(?=<!-- end of frameworks -->)", re.DOTALL)
_HERE = "tests/reshard/integrations"


class Framework(NamedTuple):
    """What to install for a framework, and the tests that need it."""

    name: str
    tests: tuple[str, ...]
    packages: tuple[str, ...] = ()
    """Requirements for pip. If empty, the extra `test` suffices, and no environment is created."""
    alone: tuple[str, ...] = ()
    """Requirements to install without their dependencies, which would install another torch or GPU libraries."""
    shows: tuple[str, ...] = ()
    """Distributions whose versions are shown. Default: those of the requirements."""

    @property
    def distributions(self) -> tuple[str, ...]:
        """Names of the distributions whose versions are shown."""
        return self.shows or tuple(re.split(r"[<>=!\[]", one)[0] for one in (*self.packages, *self.alone))


FRAMEWORKS = (
    Framework(
        "torchtitan",
        (f"{_HERE}/test_torchtitan.py", f"{_HERE}/test_torchtitan_models.py"),
        ("triton",),  # its models import it, also on CPUs
        shows=("torchtitan", "triton"),
    ),
    Framework("accelerate", (f"{_HERE}/test_accelerate.py",), shows=("accelerate",)),
    Framework("lightning", (f"{_HERE}/test_lightning.py",), shows=("lightning",)),
    Framework(
        "transformers",
        (f"{_HERE}/test_transformers.py", "tests/stories/test_transformers.py"),
        shows=("transformers", "peft"),
    ),
    Framework("megatron", (f"{_HERE}/test_megatron.py",), shows=("megatron-core",)),
    Framework("deepspeed", (f"{_HERE}/test_deepspeed.py",), ("deepspeed",)),
    Framework("torchao", (f"{_HERE}/test_torchao.py",), ("torchao",)),
    Framework("bitsandbytes", (f"{_HERE}/test_bitsandbytes.py",), alone=("bitsandbytes",)),
    Framework("torchdata", (f"{_HERE}/test_torchdata.py",), ("torchdata",)),
    Framework("orbax", (f"{_HERE}/test_orbax.py",), ("jax", "orbax-checkpoint")),
    Framework("torchft", (f"{_HERE}/test_torchft.py",), ("torchft",)),
    Framework("torch_checkpointing", (f"{_HERE}/test_torch_checkpointing.py",), alone=("torch-checkpointing",)),
    Framework(
        "optimizers",
        (f"{_HERE}/test_other_optimizers.py",),
        ("pytorch-optimizer", "schedulefree", "prodigyopt"),
        alone=("heavyball",),
    ),
    Framework("sglang", (f"{_HERE}/test_sglang.py",), alone=("sglang",)),
    Framework(
        "verl",
        (f"{_HERE}/test_verl.py",),
        ("ray", "tensordict", "hydra-core", "codetiming", "orjson", "fastapi", "uvicorn"),
        alone=("verl",),
        shows=("verl", "ray"),
    ),
)


@dataclass(frozen=True)
class Result:
    """Results of the tests of one framework."""

    versions: tuple[str, ...]
    passed: int
    failed: int
    skipped: int
    seconds: float

    @property
    def ok(self) -> bool:
        """True if some tests ran and all of them passed."""
        return self.passed > 0 and not self.failed


def environment(framework: Framework) -> Path:
    """Return the Python that runs the framework's tests. Creates its environment on first use."""
    if not (framework.packages or framework.alone):
        return Path(sys.executable)
    folder = ROOT / f".venv-{framework.name}"
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.exists() and ready.read_text() == repr(framework):
        return python
    venv.create(folder, with_pip=True, clear=True)
    own = next(folder.glob("lib/python*/site-packages"))
    # after its own packages, with the paths of editable installs
    lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (own / "base.pth").write_text("\n".join(lines) + "\n")
    limits = folder / "constraints.txt"
    limits.write_text(f"torch=={metadata.version('torch')}\n")
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(limits)]
    if framework.packages:
        subprocess.run([*install, *framework.packages], check=True)
    if framework.alone:
        subprocess.run([*install, "--no-deps", *framework.alone], check=True)
    ready.write_text(repr(framework))
    return python


def run(framework: Framework, flags: Sequence[str]) -> Result:
    """Run its tests. pytest prints failures."""
    began = time.monotonic()
    python = environment(framework)
    names = repr(framework.distributions)
    ask = f"from importlib.metadata import version\nfor n in {names}: print(n, version(n))"
    versions = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.splitlines()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [python, "-m", "pytest", "-q", f"--junitxml={report}", *flags, *framework.tests]
        subprocess.run(command, cwd=ROOT, check=False)
        counts = dict.fromkeys(("passed", "failure", "error", "skipped"), 0)
        for case in ElementTree.parse(report).iter("testcase"):
            counts[next((child.tag for child in case if child.tag in counts), "passed")] += 1
    failed = counts["failure"] + counts["error"]
    return Result(tuple(versions), counts["passed"], failed, counts["skipped"], time.monotonic() - began)


def table(results: dict[str, Result]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"With torch {metadata.version('torch').partition('+')[0]} on CPUs and Python {sys.version.split()[0]}:"
    yield ""
    yield "| Framework | Versions | Passed/failed/skipped |"
    yield "|---|---|---|"
    for name, one in results.items():
        versions = ", ".join(version.removeprefix(f"{name} ") for version in one.versions)
        yield f"| {name} | {versions} | {one.passed}/{one.failed}/{one.skipped} |"


def put_on_page(lines: Sequence[str], page: Path = PAGE) -> None:
    """Replace the text between the two marks of the page."""
    text, replaced = _BLOCK.subn(lambda _: "\n" + "\n".join(lines) + "\n\n", page.read_text(encoding="utf-8"))
    if replaced != 1:
        raise SystemExit(f"{page} needs the lines <!-- frameworks --> and <!-- end of frameworks -->, once each")
    page.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {one.name: one for one in FRAMEWORKS}
    parser.add_argument("names", nargs="*", metavar="FRAMEWORK", help=f"of {', '.join(known)}; default: all")
    parser.add_argument("--write", action="store_true", help="put the table on tests/integrations.md; needs all")
    parser.add_argument("--flags", default="-n 2 --dist worksteal", help="options of pytest")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in known]:
        parser.error(f"unknown framework {unknown[0]!r}: choose from {', '.join(known)}")
    if given.write and given.names:
        parser.error("--write needs the results of all frameworks: name none")
    results = {name: run(known[name], given.flags.split()) for name in given.names or known}
    lines = list(table(results))
    print("\n".join(lines))
    if given.write:
        put_on_page(lines)
    return 0 if all(one.ok for one in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
