"""Errors that a caller has dealt with are freed at once, and so are the files that their frames have open.

A frame that keeps the error which it raises is a circle: error, traceback, frame, error. It would stay until garbage is
collected, which can be long after a service has run out of file descriptors.
"""

from __future__ import annotations

import ast
import gc
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import planners
import reshard

SOURCES = sorted(file for package in (planners, reshard) for file in Path(package.__path__[0]).rglob("*.py"))
STATE = {"x": torch.arange(3000.0), "y": torch.ones(300_000), "step": 3}


def target() -> dict[str, Any]:
    return {"x": torch.zeros(3000), "y": torch.zeros(300_000), "step": 0}


WAYS = {
    "load": lambda path: reshard.load(target(), path),
    "load, checked during": lambda path: reshard.load(target(), path, check="during"),
    "load other keys": lambda path: reshard.load({"other": torch.zeros(3)}, path),
    "load other shapes": lambda path: reshard.load({**target(), "x": torch.zeros(3)}, path),
    "slice": lambda path: reshard.open(path)["y"][:],
    "no such key": lambda path: reshard.open(path)["z"],
    "verify": lambda path: reshard.verify(path).raise_if_failed(),
    "compare": lambda path: reshard.compare(path, target()).raise_if_failed(),
    "convert": lambda path: reshard.convert(path, f"{path}-converted", format="dcp", overwrite=True),
    "fingerprint": lambda path: reshard.fingerprint(path),
}


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("harm", ["changed", "gone", "short", "none"])
@pytest.mark.parametrize("format", ["native", "torch_save", "safetensors"])
def test_no_frame_keeps_the_error_that_it_raised(format: Any, harm: str, tmp_path, uncollected) -> None:
    path = tmp_path / f"c{'.pt' * (format == 'torch_save')}"
    reshard.save(STATE, tmp_path / "saved")
    reshard.convert(tmp_path / "saved", path, format=format)
    file = max([path, *path.rglob("*")], key=lambda one: one.is_file() and one.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-60] ^= 1
    file.unlink()
    if harm != "gone":
        file.write_bytes(data if harm == "changed" else data[:5000])
    kept = []
    for name, way in WAYS.items():
        found = None
        try:
            way(path)
        except Exception as error:
            found = weakref.ref(error)
        if found is not None and found() is not None:
            kept.append(name)
    assert not kept


@pytest.mark.host_only("it is about files")
def test_refused_loads_leave_no_file_open(tmp_path) -> None:
    """A loop over a damaged checkpoint, as of a service that waits for a better one."""
    reshard.save(STATE, path := tmp_path / "c")
    (file,) = path.rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-60] ^= 1
    file.unlink()
    file.write_bytes(data)
    last, most = None, []
    for _ in range(20):
        try:
            reshard.load(target(), path)
        except reshard.errors.CorruptCheckpointError as error:
            last = error
        assert not reshard.verify(path).ok
        most.append(len(os.listdir("/proc/self/fd")))
    assert last is not None
    assert max(most) <= most[0] + 2


def _kept_in(function: ast.FunctionDef) -> Iterator[int]:
    """Lines that raise what a variable of the function has, which no `del` removes."""
    inner = list(ast.walk(function))
    caught = {node.name for node in inner if isinstance(node, ast.ExceptHandler)}  # removed at the end of the clause
    deleted = {t.id for node in inner if isinstance(node, ast.Delete) for t in node.targets if isinstance(t, ast.Name)}
    own = {node.id for node in inner if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {argument.arg for argument in function.args.args}
    for node in inner:
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Name) and node.exc.id in own - caught - deleted:
            yield node.lineno


def test_whoever_raises_an_error_from_a_variable_deletes_that() -> None:
    kept = [
        f"{file}:{line}"
        for file in SOURCES
        if "cli" not in file.parts  # which ends soon
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
        for line in _kept_in(node)
    ]
    assert not kept
