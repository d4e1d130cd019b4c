"""What conversions that were killed leave: the next one to that target, or pruning, takes it away, and nothing else."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import reshard
from reshard.api import convert
from reshard.api.convert_job import FileTasks, Journal
from reshard.api.tasks import run_tasks
from reshard.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DeadlineError,
    StorageError,
)
from reshard.storage.local import LocalStorage
from tests import gloo
from tests.faulty import Crash, SystemCalls
from tests.same import same
from tests.states import in_files_of

FORMATS = ["native", "dcp", "safetensors", "torch_save"]
STATE = {f"w{i}": torch.full((40, 25), float(i)) for i in range(6)}
GONE = {"pid": 2**22 + 1, "process_start": "1", "has_left": False}
ELSEWHERE = {**GONE, "machine": "another boot pid:[1]"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    reshard.save(STATE, tmp_path / "source")
    return tmp_path / "source"


def target_of(format: str, folder: Path) -> Path:
    return folder / "c" / "model.pt" if format == "torch_save" else folder / "c"


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def written_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def interrupted(format: str, source: Path, target: Path, monkeypatch: pytest.MonkeyPatch, **claim: Any) -> None:
    """A conversion that stopped after some files, with a claim like ours but for what is in `claim`."""
    real, written = FileTasks.__call__, 0

    def stopping(self: FileTasks, name: str) -> bool:
        nonlocal written
        if written == max(1, len(self._files) // 2):
            raise KeyboardInterrupt
        written += 1
        return real(self, name)

    def stopping_after(*args: Any, **kwargs: Any) -> None:
        run_tasks(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FileTasks, "__call__", stopping)
        patch.setattr("reshard.api.convert.run_tasks", stopping_after)
        with pytest.raises(KeyboardInterrupt):
            reshard.convert(source, target, format=format, **in_files_of(8000, format))
    folder = target.parent if format == "torch_save" else target
    for file in [*folder.glob("convert-*/claim"), *folder.glob("data-*/claim.json")]:
        file.write_text(json.dumps({**json.loads(file.read_text()), **claim}))


@pytest.mark.parametrize("format", FORMATS)
def test_the_next_conversion_to_the_target_removes_it(
    format: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of(format, tmp_path)
    interrupted(format, source, target, monkeypatch, **GONE)
    left = files_in(tmp_path / "c")
    (tmp_path / "c" / "notes.txt").write_text("mine")
    assert len(left) > 2

    reshard.convert(source, target, format=format, select="w1")

    reshard.convert(source, target_of(format, tmp_path / "other"), format=format, select="w1")
    found, wanted = files_in(tmp_path / "c"), files_in(tmp_path / "other" / "c")
    assert len(found) == len(wanted) + 1  # names of files of the native format and DCP's are their own
    assert not [name for name in found if name.endswith(".tmp") or "convert-" in name]
    assert "notes.txt" in found
    assert same(reshard.open(target)["w1"][...], STATE["w1"])


@pytest.mark.parametrize("format", ["dcp", "safetensors"])
@pytest.mark.parametrize("at", [8, 15, 25])
def test_an_interrupted_conversion_is_not_opened_and_the_error_says_what_it_is(
    format: str, at: int, source: Path, tmp_path: Path
) -> None:
    with SystemCalls().crashing(at), pytest.raises(Crash):
        reshard.convert(source, tmp_path / "c", format=format)
    with pytest.raises(CheckpointNotFoundError, match=r"c holds no complete checkpoint: a conversion to it"):
        reshard.open(tmp_path / "c")
    reshard.convert(source, tmp_path / "c", format=format)
    assert same(reshard.open(tmp_path / "c")["w1"][...], STATE["w1"])


def test_a_claim_that_could_not_be_written_is_not_held(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk fails a conversion, and the next try of the same process. When there is room again, it goes on."""
    target = target_of("dcp", tmp_path)
    interrupted("dcp", source, target, monkeypatch, has_left=False)

    def full(self: LocalStorage, name: str, data: bytes) -> None:
        raise StorageError(f"{self.url}/{name}: no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "publish", full)
        for _ in range(2):
            with pytest.raises(StorageError, match="no space left on device"):
                reshard.convert(source, target, format="dcp", max_shard_bytes=8000)

    assert reshard.convert(source, target, format="dcp", max_shard_bytes=8000).resumed
    assert same(reshard.open(target)["w1"][...], STATE["w1"])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("claim", "dead"),
    [
        (GONE, True),
        ({"process_start": "1", "has_left": False}, True),
        (ELSEWHERE, False),
        ({**ELSEWHERE, "unix_s": 0}, True),
        ({**GONE, "machine": ""}, False),
        ({}, True),  # of this process, which does it no more
    ],
    ids=str,
)
def test_pruning_removes_what_dead_processes_left(
    claim: dict[str, Any], dead: bool, format: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(format, source, target_of(format, tmp_path), monkeypatch, **claim)
    before = files_in(tmp_path / "c")

    reshard.prune(tmp_path, keep_last=1)

    assert files_in(tmp_path / "c") == (set() if dead else before)
    assert reshard.verify(source).ok


@pytest.mark.parametrize("format", FORMATS)
def test_what_runs_is_left_alone(format: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pruning, and another conversion to the same folder, while one is between two of its files."""
    target, real, seen = target_of(format, tmp_path), FileTasks.__call__, []

    def watched(self: FileTasks, name: str) -> bool:
        found = real(self, name)
        monkeypatch.setattr(FileTasks, "__call__", real)
        reshard.prune(tmp_path, keep_last=1)
        for select in (None, "w1"):
            if format == "torch_save" and select is not None:  # another file in the same folder is not in the way
                reshard.convert(source, target.with_name("second.pt"), format=format, select=select)
                continue
            options = in_files_of(8000, format)
            with pytest.raises(StorageError, match=r"process \d+ on .* is already converting to"):
                reshard.convert(source, target, format=format, select=select, overwrite=True, **options)
        seen.append(True)
        return found

    monkeypatch.setattr(FileTasks, "__call__", watched)
    reshard.convert(source, target, format=format, **in_files_of(8000, format))

    assert seen
    assert reshard.verify(target, source).ok
    assert not [name for name in files_in(tmp_path / "c") if name.endswith(".tmp") or "convert-" in name]


@pytest.mark.parametrize("format", FORMATS)
def test_what_was_published_stays_though_its_records_do_not(
    format: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the two."""

    def killed(self: Journal) -> None:
        raise KeyboardInterrupt

    target = target_of(format, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "end", killed)
        with pytest.raises(KeyboardInterrupt):
            reshard.convert(source, target, format=format, **in_files_of(8000, format))

    reshard.prune(tmp_path, keep_last=5)

    assert reshard.verify(target, source).ok
    assert not [name for name in files_in(tmp_path / "c") if name.endswith(".tmp") or "convert-" in name]


def test_a_claim_that_was_not_finished_does_not_stay_in_the_checkpoint(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted("native", source, tmp_path / "c", monkeypatch, **GONE)
    [claim] = (tmp_path / "c").glob("data-*/claim.json")
    claim.with_name("claim.json.~0123456789abcdef.tmp").write_text("{}")

    assert reshard.convert(source, tmp_path / "c", **in_files_of(8000, "native")).resumed

    assert not [name for name in files_in(tmp_path / "c") if "claim" in name]


@pytest.mark.parametrize("format", FORMATS)
def test_an_interrupted_start_leaves_nothing(
    format: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LocalStorage.publish

    def interrupting(self: LocalStorage, name: str, data: bytes) -> None:
        if name.endswith("/job"):
            raise KeyboardInterrupt
        real(self, name, data)

    monkeypatch.setattr(LocalStorage, "publish", interrupting)
    with pytest.raises(KeyboardInterrupt):
        reshard.convert(source, target_of(format, tmp_path), format=format)
    assert not files_in(tmp_path / "c")


@pytest.mark.parametrize("format", ["native", "dcp"])
def test_what_was_published_is_not_written_again_in_place(
    format: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records of a job that has ended are about to go, or were left: an equal one must not go on with its files."""
    real = LocalStorage.create

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    def create(storage: LocalStorage, name: str) -> Any:
        return killed() if name.endswith((".safetensors", ".distcp")) else real(storage, name)

    target = target_of(format, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "end", killed)
        with pytest.raises(KeyboardInterrupt):
            reshard.convert(source, target, format=format)
    for record in target.glob("convert-*/*.json"):
        record.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "create", create)
        with pytest.raises(KeyboardInterrupt):
            reshard.convert(source, target, format=format, overwrite=True)

    assert reshard.verify(target, source).ok


@pytest.mark.parametrize("format", FORMATS)
def test_gigabytes_of_one_that_was_killed(format: str, tmp_path: Path) -> None:
    """By a signal that nobody can answer."""
    reshard.save({f"w{i}": torch.full((1 << 18,), float(i)) for i in range(60)}, tmp_path / "source")
    target = target_of(format, tmp_path)
    options = in_files_of(1 << 20, format)
    code = f"import sys, reshard; reshard.convert(*sys.argv[1:3], format=sys.argv[3], **{options})"
    arguments = [str(tmp_path / "source"), str(target), format]
    child = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code, *arguments])
    while child.poll() is None and written_bytes(tmp_path / "c") < 3 << 20:
        time.sleep(0.001)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL  # and not done already
    assert files_in(tmp_path / "c")

    reshard.prune(tmp_path, keep_last=1)

    assert not files_in(tmp_path / "c")


def by_itself(source: str, folder: str) -> float:
    started = time.monotonic()
    if dist.get_rank() == 1:
        reshard.convert(source, f"{folder}/one", format="safetensors", alone=True)
        convert.MEETING_S = 0.5
        with pytest.raises(DeadlineError, match=r"rank 0 did not reach .*alone=True.* within 0\.5 s"):
            reshard.convert(source, f"{folder}/none", format="safetensors")
    dist.barrier()
    return time.monotonic() - started


@pytest.mark.gloo
def test_one_rank_converts_while_the_others_do_something_else(source: Path, tmp_path: Path) -> None:
    gloo.run(by_itself, 2, str(source), str(tmp_path))
    assert reshard.verify(tmp_path / "one", source).ok
    with pytest.raises(reshard.ReshardError, match="leave process_group out"):
        reshard.convert(source, tmp_path / "two", alone=True, process_group=object())  # type: ignore[arg-type]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("is_there", [False, True])
def test_a_refused_conversion_leaves_no_folder_that_it_made(
    format: str, is_there: bool, source: Path, tmp_path: Path
) -> None:
    [file] = source.glob("data-*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    target = target_of(format, tmp_path / "made")
    folder = target.parent if format == "torch_save" else target
    if is_there:
        folder.mkdir(parents=True)

    with pytest.raises(CorruptCheckpointError, match="was changed since"):
        reshard.convert(source, target, format=format)

    assert folder.exists() == is_there


def trained(value: float, names: list[str]) -> dict[str, Any]:
    model = {name: torch.full((8, 4), value) for name in names}
    state = {name: {"exp_avg": t, "exp_avg_sq": t, "step": torch.tensor(3.0)} for name, t in model.items()}
    return {"model": model, "optim": {"state": state, "param_groups": [{"lr": 0.1, "params": names}]}}


def crashes_in_publication(at: int, monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any) -> bool:
    """Convert; return whether there was a change of files number `at` since all files were written, which crashed."""
    real = convert.Publication
    with ExitStack() as stack, monkeypatch.context() as patch:

        def start(*fields: Any) -> Any:
            stack.enter_context(SystemCalls().crashing(at))
            return real(*fields)

        patch.setattr(convert, "Publication", start)
        try:
            reshard.convert(*args, **options)
        except Crash:
            return True
    return False


FOLDERS: dict[str, dict[str, Any]] = {
    "safetensors": {"max_shard_bytes": 140, "model_only": True},
    **{format: {} for format in ("megatron", "torch_checkpointing", "deepspeed", "dcp", "native")},
}
"""Formats of several files, with the options that make them so."""
NAMES = ["embedding.word_embeddings.weight", "b.weight"]


@pytest.mark.parametrize("format", FOLDERS)
def test_a_replacement_that_was_stopped_is_told_and_completed(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of fixed names are replaced one by one: until all are, neither the old nor the new checkpoint opens."""
    options = FOLDERS[format]
    reshard.save(trained(1.0, [*NAMES, "c.weight"]), tmp_path / "old")
    reshard.save(trained(2.0, NAMES), tmp_path / "new")
    reshard.convert(tmp_path / "old", tmp_path / "first", format=format, **options)
    told = []
    for at in range(1, 200, 3 if format == "deepspeed" else 1):  # it has many small files
        target = tmp_path / f"c{at}"
        shutil.copytree(tmp_path / "first", target)
        arguments = {"format": format, "overwrite": True, **options}
        if not crashes_in_publication(at, monkeypatch, tmp_path / "new", target, **arguments):
            break
        try:
            model = reshard.open(target).normalized()["model"]
            values = {float(value) for tensor in model.values() for value in tensor[...].reshape(-1)}
            assert (len(model), values) in ((3, {1.0}), (2, {2.0}))
        except CheckpointError as error:
            told.append(str(error))
        reshard.convert(tmp_path / "new", target, **arguments)
        model = reshard.open(target).normalized()["model"]
        assert set(model) == set(NAMES)
        assert all(torch.equal(tensor[...], torch.full((8, 4), 2.0)) for tensor in model.values())
        assert not list(target.glob("convert-*"))
    assert bool(told) == (format not in ("dcp", "native"))
    assert all("run it again" in text and "restore it" not in text for text in told)


@pytest.mark.parametrize("format", FOLDERS)
def test_a_publication_that_was_stopped_is_completed_by_the_same_call(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without overwrite=True, though some files have their names already; and no unfinished file stays."""
    options = FOLDERS[format]
    reshard.save(trained(2.0, NAMES), tmp_path / "new")
    reshard.convert(tmp_path / "new", tmp_path / "whole", format=format, **options)
    unfinished = 0
    for at in range(1, 200, 5 if format == "deepspeed" else 2):
        target = tmp_path / f"c{at}"
        if not crashes_in_publication(at, monkeypatch, tmp_path / "new", target, format=format, **options):
            break
        unfinished += any("convert-" not in name and name.endswith(".tmp") for name in files_in(target))
        try:
            reshard.convert(tmp_path / "new", target, format=format, **options)
            assert not [name for name in files_in(target) if name.endswith(".tmp") or "convert-" in name]
        except CheckpointExistsError:  # it was complete, and its records were not removed yet
            found = [name for name in files_in(target) if "convert-" not in name and not name.endswith("claim.json")]
            assert len(found) == len(files_in(tmp_path / "whole"))
        model = reshard.open(target).normalized()["model"]
        assert set(model) == set(NAMES)
        assert all(torch.equal(tensor[...], torch.full((8, 4), 2.0)) for tensor in model.values())
    assert unfinished
