"""Run torch's own tests of its checkpoint package with our names, on the CPU.

    python -m tests.torchs_tests FOLDER            # FOLDER: test/distributed/checkpoint of torch's sources
    python -m tests.torchs_tests FOLDER --write    # and put the sums and what differs into tests/torchs_tests.md

None of torch's tests is kept here. Each file is translated into a folder of its own, twice: with torch's names, and
with ours instead of `torch.distributed.checkpoint`; both with the CPU instead of accelerators, and gloo instead of
NCCL. Only tests that torch then passes count. Prints a table of all differences.
"""

from __future__ import annotations

import argparse
import functools
import io
import os
import re
import subprocess
import sys
import tempfile
import tokenize
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_suffix(".md")
_BLOCK = re.compile(r"(?<=<!-- run -->\n).*?(?=<!-- end of run -->)", re.DOTALL)
_ROW = re.compile(r"^\| (`[^|]*) \| \w+ \| \w+ \| ([^|]*) \|$", re.MULTILINE)
RANKS = 4
"""The number of accelerators that tests see, which is also how many processes most of them start."""

_PUBLIC = re.compile(r"\btorch\.distributed\.checkpoint\b(?!\._)")
_IMPORT_FROM = re.compile(r"^(\s*from )torch\.distributed\.checkpoint\b(?!\._)", re.MULTILINE)
_ACCELERATOR = re.compile(r"\bcuda(:(\{[^}]*\}+|\d+))?")
_PRELUDE = "import tests.torchs_tests as _prelude; _prelude.pretend()\n"


def translated(source: str, ours: bool) -> str:
    """Return the text of a test file for the CPU, with our names if `ours`. Strings with torch's module names stay."""
    lines = source.splitlines(keepends=True)
    found = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.STRING]
    for token in reversed(found):
        (row, start), (last, end) = token.start, token.end
        if row == last:
            line = lines[row - 1]
            text = line[start:end].replace("cpu:gloo,cuda:nccl", "gloo").replace("nccl", "gloo")
            lines[row - 1] = line[:start] + _ACCELERATOR.sub("cpu", text) + line[end:]
    text = "".join(lines).replace("torch.cuda.device_count()", str(RANKS)).replace(".cuda(", ".cpu(")
    text = re.sub(r"\bdevice=(dist\.get_rank\(\)|self\.rank)", 'device="cpu"', text)
    text = re.sub(r"\.cpu\((self\.rank|rank|dist\.get_rank\(\))\)", ".cpu()", text)
    text = re.sub(r"torch\.cuda\.current_device\(\)", '"cpu"', text)
    if ours:
        strings = re.compile(r"""("[^"\n]*"|'[^'\n]*')""")
        parts = strings.split(text)
        text = "".join(part if i % 2 else _PUBLIC.sub("reshard.dcp", part) for i, part in enumerate(parts))
    at = text.find("import ") if "from __future__" not in text else text.find("\n", text.find("from __future__")) + 1
    at = text.rfind("\n", 0, at) + 1
    return text[:at] + _PRELUDE + text[at:]


def pretend() -> None:
    """Make torch's test helpers treat the CPU as the number of accelerators that tests request. Each file calls it."""
    import torch
    from torch.testing._internal import common_distributed, common_fsdp
    from torch.testing._internal.distributed._shard import sharded_tensor

    def as_it_is(*args: Any, **kwargs: Any) -> Any:
        return lambda function: function

    for name in ("skip_if_lt_x_gpu", "requires_nccl", "requires_accelerator_dist_backend", "requires_gloo"):
        if hasattr(common_distributed, name):
            setattr(common_distributed, name, as_it_is)
    common_fsdp.DEVICE_COUNT = RANKS
    common_distributed.MultiProcessTestCase._spawn_processes = _fork
    if not isinstance(sharded_tensor.with_comms, functools.partial):
        original = sharded_tensor.with_comms
        sharded_tensor.with_comms = functools.partial(_with_gloo, original)
    torch.cuda.set_device = torch.accelerator.set_device_index = lambda device: None
    torch.accelerator.device_count = lambda: RANKS
    _barriers_without_devices()
    _fsdp1_on_the_cpu()


def _fsdp1_on_the_cpu() -> None:
    """Make FSDP1 use the CPU, which it does not do by default."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    original = FullyShardedDataParallel.__init__

    @functools.wraps(original)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "device_id": torch.device("cpu")})

    FullyShardedDataParallel.__init__ = made


def _barriers_without_devices() -> None:
    """Call barriers without devices, which gloo's do not accept."""
    import torch.distributed as dist

    original = dist.barrier
    dist.barrier = lambda *args, device_ids=None, **kwargs: original(*args, **kwargs)


def _fork(case: Any) -> None:
    """Fork a case's processes, which takes a tenth of the time, because torch is already imported."""
    import torch

    case._start_processes(torch.multiprocessing.get_context("fork").Process)


def _with_gloo(original: Any, func: Any = None, init_rpc: bool = True, backend: str = "gloo") -> Any:
    made = functools.partial(original, init_rpc=False, backend="gloo")
    return made if func is None else made(func)


def outcomes(folder: Path, name: str, ours: bool, timeout_s: float) -> Iterator[tuple[str, str, str]]:
    """Yield (test, outcome, message) for each test of one file."""
    with tempfile.TemporaryDirectory(prefix="torchs_tests_") as work:
        target = Path(work) / Path(name).name
        target.write_text(translated((folder / name).read_text(), ours))
        (Path(work) / "pytest.ini").write_text("[pytest]\n")
        report, root = Path(work) / "report.xml", Path(__file__).resolve().parent.parent
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(root), work, os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "TORCHELASTIC_USE_AGENT_STORE": "0",
        }
        args = ["-q", "-p", "no:cacheprovider", "--timeout", str(timeout_s), f"--junitxml={report}", str(target)]
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", *args], cwd=work, env=env, capture_output=True, text=True, check=False
        )
        if not report.exists():
            yield name, "error", ended.stdout[-2000:] + ended.stderr[-2000:]
            return
        for case in ElementTree.parse(report).iter("testcase"):
            kinds = {child.tag: child for child in case if child.tag in ("failure", "error", "skipped")}
            kind, child = next(iter(kinds.items()), ("passed", None))
            test = f"{name}::{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
            yield test, kind, "" if child is None else f"{child.get('message', '')}\n{child.text or ''}"


def lines(every: Mapping[str, tuple[str, ...]], reasons: Mapping[str, str]) -> Iterator[str]:
    """Yield the page's lines about a run: the sums, and a table of the tests that do not pass with both."""
    import torch

    by_torch = {test for test, (theirs, _) in every.items() if theirs == "passed"}
    by_us = {test for test, (_, ours) in every.items() if ours == "passed"}
    lost = len(by_torch - by_us)
    which = f"all but {lost} of those that torch passes" if lost else "all that torch passes"
    yield (
        f"Of {len(every)} tests, run with torch {torch.__version__.partition('+')[0]}, torch passes {len(by_torch)} "
        f"and `reshard.dcp` {len(by_us)}, including {which}. These do not pass with both:"
    )
    yield ""
    yield "| Test | torch | `reshard.dcp` | Reason |"
    yield "|---|---|---|---|"
    for test in sorted(every.keys() - (by_torch & by_us)):
        name = "`{0}`: `{2}`".format(*test.split("::"))
        yield f"| {name} | {' | '.join(every[test])} | {reasons.get(name, 'unknown')} |"


def put_on_page(every: Mapping[str, tuple[str, ...]], page: Path = PAGE) -> None:
    """Replace the text between the marks of the page. The reasons of tests that are still listed stay."""
    text = page.read_text(encoding="utf-8")
    reasons = {row[1]: row[2] for row in _ROW.finditer(text)}
    block = "\n".join(lines(every, reasons))
    text, replaced = _BLOCK.subn(lambda _: f"\n{block}\n\n", text)
    if replaced != 1:
        raise SystemExit(f"{page} needs the lines <!-- run --> and <!-- end of run -->, once each")
    page.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-k", default="", help="only files whose path has this")
    parser.add_argument("--names", choices=["both", "torch", "ours"], default="both")
    parser.add_argument("--logs", type=Path, help="a folder for what each failed test says")
    parser.add_argument("--write", action="store_true", help="put the result into tests/torchs_tests.md")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a test")
    given = parser.parse_args()
    if given.write and (given.names != "both" or given.k):
        parser.error("--write needs all tests, with both names")
    files = sorted(str(p.relative_to(given.folder)) for p in given.folder.rglob("test_*.py") if given.k in str(p))
    sides = {"both": [False, True], "torch": [False], "ours": [True]}[given.names]
    every: dict[str, tuple[str, ...]] = {}
    for name in files:
        found: dict[str, dict[bool, str]] = {}
        for ours in sides:
            for test, kind, text in outcomes(given.folder, name, ours, given.timeout):
                found.setdefault(test, {})[ours] = kind
                if text and kind != "skipped" and given.logs is not None:
                    log = given.logs / f"{'ours' if ours else 'torch'}-{re.sub(r'[^a-zA-Z0-9]+', '_', test)}.txt"
                    log.parent.mkdir(parents=True, exist_ok=True)
                    log.write_text(text)
        for test, ends in found.items():
            kinds = tuple(ends.get(side, "absent") for side in sides)
            every[test] = kinds
            if set(kinds) != {"passed"}:
                print(f"{' / '.join(kinds):24} {test}", flush=True)
    if given.write:
        put_on_page(every)
    counts = Counter(every.values())
    print(" ".join(["torch", "ours"][i] for i in map(int, sides)))
    for kinds, count in sorted(counts.items()):
        print(f"{count:5}  {' / '.join(kinds)}")
    return 0 if all(set(kinds[:1]) <= {"skipped"} or kinds[-1] == kinds[0] for kinds in counts) else 1


if __name__ == "__main__":
    sys.exit(main())
