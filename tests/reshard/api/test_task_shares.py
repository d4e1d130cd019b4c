"""Reading in shares, by whatever executor: the same reports and digests as by one process that reads all at once."""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from planners.geometry.box import Box
from reshard.api import task_shares as shares, verify
from reshard.api.tasks import Processes
from reshard.errors import CheckpointError, StorageError
from tests.same import same
from tests.states import in_files_of

STATE = {
    "matrix": torch.randn(37, 50),
    "cube": torch.randn(3, 5, 70).to(torch.bfloat16),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
    "bytes": torch.arange(1001, dtype=torch.uint8),
    **{f"small{i}": torch.randn(i) for i in range(30)},
}


@pytest.fixture(autouse=True)
def _small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut by the driver: workers are told."""
    monkeypatch.setattr(shares, "SHARE_BYTES", 400)
    monkeypatch.setattr(verify, "SHARE_BYTES", 100_000)


def written(format: str, folder: Path) -> Path:
    if format == "native":
        reshard.save(STATE, folder / "c")
        return folder / "c"
    reshard.save(STATE, folder / "source")
    reshard.convert(folder / "source", folder / "c", format=format, **in_files_of(3000, format))
    return folder / "c"


def test_shares_are_all_elements_once() -> None:
    sizes = [(name, Box.full(tensor.shape), tensor.dtype.itemsize) for name, tensor in STATE.items()]
    seen = {name: torch.zeros(tensor.shape, dtype=torch.int) for name, tensor in STATE.items()}
    for share in shares.shares(sizes):
        assert sum(box.numel * STATE[name].dtype.itemsize for name, box in share) <= 400
        for name, box in share:
            seen[name][box.slices if isinstance(box, Box) and box.ndim else ...] += 1
    assert all(bool((count == 1).all()) for count in seen.values())


@pytest.fixture(scope="module")
def engines() -> Any:
    with ThreadPoolExecutor(3) as threads, Processes(1) as processes:
        yield [None, threads, processes]


@pytest.mark.parametrize("format", ["native", "dcp", "safetensors", "torch_save"])
def test_reports_are_the_same_by_any_executor(format: str, tmp_path: Path, engines: list[Executor | None]) -> None:
    path = written(format, tmp_path)
    other = reshard.save({**STATE, "matrix": STATE["matrix"] + (torch.arange(50) == 44)}, tmp_path / "other").path
    verified = [reshard.verify(path, executor=executor) for executor in engines]
    assert verified[0].ok
    assert verified[0].covered is not None
    assert verified == [verified[0]] * 3
    compared = [reshard.compare(path, other, executor=executor) for executor in engines]
    assert [(f.fqn, f.element, f.message.split(";")[0]) for f in compared[0].findings] == [
        ("matrix", (0, 44), "37 of 1850 elements differ")
    ]
    assert compared == [compared[0]] * 3
    against = [reshard.verify(path, other, executor=executor) for executor in engines]
    assert not against[0].ok
    assert against == [against[0]] * 3
    digests = [reshard.fingerprint(path, executor=executor) for executor in engines]
    assert digests == [reshard.fingerprint(STATE)] * 3
    assert same(reshard.open(path)["matrix"][...], STATE["matrix"])


@pytest.mark.parametrize("format", ["native", "dcp", "torch_save"])
def test_damage_is_told_alike(format: str, tmp_path: Path, engines: list[Executor | None]) -> None:
    path = written(format, tmp_path)
    value = STATE["matrix"].numpy().tobytes()
    file = next(file for file in [path, *path.rglob("*")] if file.is_file() and value in file.read_bytes())
    data = bytearray(file.read_bytes())
    data[data.index(value) + 5000] ^= 1
    file.write_bytes(data)
    reports = [reshard.verify(path, executor=executor) for executor in engines]
    assert not reports[0].ok
    assert reports == [reports[0]] * 3


def test_workers_read_what_the_driver_reads(tmp_path: Path) -> None:
    """A step that is saved meanwhile over the one that is read is another one, and so is a state dict."""
    written("native", tmp_path)

    class Meanwhile(ThreadPoolExecutor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
            if fn.__name__ == "_look":
                reshard.save({"other": torch.ones(3)}, tmp_path / "c")
            return super().submit(fn, *args, **kwargs)

    with Meanwhile(1) as executor:
        with pytest.raises(StorageError, match=r"than the driver.*at worker"):
            reshard.verify(tmp_path / "c", executor=executor)
        with pytest.raises(CheckpointError, match="not a dict"):
            reshard.compare(tmp_path / "c", STATE, executor=executor)
        with pytest.raises(CheckpointError, match="not a dict"):
            reshard.fingerprint(STATE, executor=executor)
