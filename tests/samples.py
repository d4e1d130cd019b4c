"""Checkpoints that other frameworks wrote, each with the expected tensors. `tests/data/README.md` lists them.

A sample is a folder of `tests/data`, or in the archive of its framework there (`dcp_pp2` in `dcp.tar.xz`), or partly
in each. The first process that needs a framework's samples unpacks them into a temporary folder of this test run,
which all of its processes share and which is removed at its end. Tests read samples, and change only copies of them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["DATA", "begin", "end", "framework_of", "sample", "truth"]

DATA = Path(__file__).parent / "data"
_FOLDER = "RESHARD_TESTS_SAMPLES"
"""The environment variable with the folder of unpacked samples."""


def begin() -> bool:
    """Create this run's folder. Returns False, and does nothing, inside of another run, whose folder is used."""
    if _FOLDER in os.environ:
        return False
    os.environ[_FOLDER] = tempfile.mkdtemp(prefix="reshard-samples-")
    return True


def end() -> None:
    """Remove this run's folder."""
    shutil.rmtree(os.environ.pop(_FOLDER))


def framework_of(name: str) -> str:
    """Return the first word of a sample's name, which is also the name of its archive."""
    return name.split("/")[0].split("_")[0]


def sample(path: str) -> Path:
    """Return a sample, or a file or folder in one: `sample("dcp_pp2/ckpt/stage_1.pt")`."""
    found = _unpacked(framework_of(path)) / path
    if not found.exists():
        raise FileNotFoundError(f"{DATA} has no sample {path}")
    return found


def truth(path: str) -> dict[str, Any]:
    """Return the expected tensors of the sample of this path, for most samples `{"model": ..., "optim": ...}`."""
    import torch  # not at the top: pytest-xdist's first process, which runs no test, imports this module, too

    result: dict[str, Any] = torch.load(sample(path.split("/")[0]) / "truth.pt", weights_only=True)
    return result


def _unpacked(framework: str) -> Path:
    """Return the folder with all samples of a framework. One process unpacks them, and the others wait for it."""
    run = Path(os.environ[_FOLDER])
    folder = run / framework
    if folder.exists():
        return folder
    with (run / f"{framework}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = Path(tempfile.mkdtemp(dir=run))
            for beside in (path for path in DATA.iterdir() if path.is_dir() and framework_of(path.name) == framework):
                shutil.copytree(beside, unfinished / beside.name)
            if (archive := DATA / f"{framework}.tar.xz").exists():
                with tarfile.open(archive) as tar:
                    tar.extractall(unfinished, filter="data")
            unfinished.rename(folder)
    return folder
