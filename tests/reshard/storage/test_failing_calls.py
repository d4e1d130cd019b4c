"""Any call to the file system may fail at any time: it comes out as the library's own error, with the file in it."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.errors import ReshardError, StorageError
from reshard.storage import LocalStorage
from tests.faulty import FileCalls
from tests.same import same
from tests.states import in_files_of

STATE: dict[str, Any] = {"w": torch.arange(280_000.0).reshape(700, 400), "b": torch.ones(7), "steps": 3, "lr": [0.1]}
SOURCES = ("native", "dcp", "safetensors", "torch_save")
MOST = 4
"""Of the calls of one kind, so many are made to fail, spread over all."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    made = {format: folder / format for format in SOURCES} | {"torch_save": folder / "torch_save" / "c.pt"}
    reshard.save(STATE, made["native"])
    for format in SOURCES[1:]:
        reshard.convert(made["native"], made[format], format=format, **in_files_of(1_000_000, format))
    return made


def target() -> dict[str, Any]:
    return {"w": torch.zeros(700, 400), "b": torch.zeros(7), "steps": 0, "lr": [0.0]}


def load(path: Path) -> None:
    state = target()
    reshard.load(state, path, strict=False)
    assert same(state["w"], STATE["w"])


def look(path: Path) -> None:
    opened = reshard.open(path)
    assert same(opened["w"][3:5, ::2], STATE["w"][3:5, ::2])
    _ = dict(opened.objects), opened.nested(), opened.problems(deep=True)


READING: dict[str, Callable[[Path], Any]] = {
    "load": load,
    "open": look,
    "verify": lambda path: reshard.verify(path).raise_if_failed(),
    "fingerprint": reshard.fingerprint,
    "convert": lambda path: reshard.convert(reshard.open(path), "memory://failing-calls", overwrite=True),
    "plan": lambda path: reshard.plan(path, onto=reshard.open(path).layout),
}
WRITING: dict[str, Callable[[Path, dict[str, Path]], Any]] = {
    "save": lambda folder, sources: reshard.save(STATE, folder / "c"),
    "async_save": lambda folder, sources: reshard.async_save(STATE, folder / "c").result(),
    "latest": lambda folder, sources: reshard.latest_complete(folder),
    "prune": lambda folder, sources: reshard.prune(folder, keep_last=1),
    **{
        f"convert to {format}": lambda folder, sources, format=format: reshard.convert(
            sources["native"], folder / ("x/c.pt" if format == "torch_save" else "x"), format=format, overwrite=True
        )
        for format in SOURCES
    },
}


def check_all(calls: FileCalls, do: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> int:
    """Make one call after the other fail; returns how often that came out as an error."""
    before()
    with calls.failing(0):
        do()
    total, failed = calls.made, 0
    for at in sorted({1 + i * max(total - 1, 0) // (MOST - 1) for i in range(MOST)} if total else ()):
        before()
        caught = None
        with calls.failing(at):
            try:
                do()
            except ReshardError as error:  # any other is what this test is about: it goes through
                caught = error
        if caught is not None:
            failed += 1
            wanted = "bytes [" if calls.name in ("pread", "preadv") else "in " if calls.name == "mmap" else calls.folder
            assert wanted in str(caught), (calls.name, at, caught)
    return failed


@pytest.mark.parametrize("name", ["open", "stat", "scandir", "fstat", "pread", "preadv", "close", "mmap", "madvise"])
@pytest.mark.parametrize("format", SOURCES)
@pytest.mark.parametrize("verb", READING)
def test_reading(verb: str, format: str, name: str, sources: dict[str, Path]) -> None:
    path = sources[format]
    failed = check_all(FileCalls(path.parent if path.is_file() else path, name), lambda: READING[verb](path))
    assert failed or name not in ("open", "scandir", "fstat")


@pytest.mark.parametrize("name", FileCalls.NAMES)
@pytest.mark.parametrize("verb", WRITING)
def test_writing(verb: str, name: str, sources: dict[str, Path], tmp_path: Path) -> None:
    """What was there before stays whole."""
    folder = tmp_path / "folder"
    for step in range(3) if verb == "latest" else (2,):
        reshard.save(STATE, folder / f"step-{step}")

    def before() -> None:
        if verb == "prune":
            for step in range(3):
                reshard.save(STATE, folder / f"step-{step}")

    check_all(FileCalls(folder, name), lambda: WRITING[verb](folder, sources), before)

    assert reshard.verify(folder / "step-2").ok


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE, errno.ENOSPC, errno.EMFILE])
def test_the_error_of_the_system_can_be_told(code: int, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"12345678")
    with FileCalls(tmp_path, "pread", code).failing(1), pytest.raises(StorageError) as caught:
        LocalStorage(tmp_path).read("x", 2, 4)
    assert caught.value.errno == code
    assert "bytes [2, 6) of x in" in str(caught.value)
