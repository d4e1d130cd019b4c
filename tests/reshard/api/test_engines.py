"""Engines that people have, on loopback: workers that are killed, nodes that leave, targets in an object store.

python -m tests.reshard.api.test_engines COUNT SEED kills a Dask worker at COUNT random moments.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.api.tasks import Processes, run_tasks
from reshard.errors import CheckpointError, ReshardError, StorageError
from tests.noting import Noting
from tests.reshard.storage.conftest import _serving, s3  # noqa: F401  # fixtures
from tests.reshard.storage.s3_server import S3Server

MIB = 1 << 20
OPTIONS: dict[str, Any] = {"format": "safetensors", "max_shard_bytes": MIB}

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the engines


def made(folder: Path) -> tuple[Path, dict[str, bytes]]:
    """A checkpoint, and the files that one process makes of it."""
    reshard.save({f"w{i}": torch.randn(1 << 18) for i in range(60)}, folder / "source")
    reshard.convert(folder / "source", folder / "one", **OPTIONS)
    return folder / "source", files_in(folder / "one")


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def recorded(target: Path) -> int:
    return len(list(target.glob("convert-*/*.json")))


def staged(target: Path) -> int:
    return len(list(target.glob("*.safetensors*")))


def disturbed(
    source: Path, target: Path, executor: Executor, disturb: Callable[[], object], after: int
) -> tuple[dict[str, bytes], bool]:
    """A conversion during which something happens to a worker once so many files are there; what is there at its end,
    and whether it happened while the conversion ran. Only what that worker was at is read twice."""
    noting = Noting(target.with_suffix(".log"))
    errors: list[BaseException] = []

    def convert() -> None:
        try:
            reshard.convert(source, target, executor=executor, mapping=noting, **OPTIONS)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=convert)
    thread.start()
    while thread.is_alive() and recorded(target) < after:
        time.sleep(0.001)
    was_midway = thread.is_alive()
    disturb()
    thread.join()
    if errors:
        raise errors[0]
    assert len(noting.reads()) == 60
    assert noting.reads().total() <= 60 + 1
    return files_in(target), was_midway


DRIVER = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
import pathlib, sys, distributed, reshard
from tests.noting import Noting
source, target, log, address = sys.argv[1:]
with distributed.Client(address) as client:
    options = {"format": "safetensors", "max_shard_bytes": 1 << 20, "executor": client.get_executor()}
    reshard.convert(source, target, mapping=Noting(pathlib.Path(log), 0.1), **options)
"""


@contextmanager
def dask(workers: int) -> Iterator[tuple[Any, Any]]:
    """A cluster of processes and its client."""
    distributed = pytest.importorskip("distributed", reason="Dask is not installed: pip install -e '.[dask]'")
    with (
        distributed.LocalCluster(
            n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield cluster, client


def kill_one(cluster: Any, chance: random.Random) -> None:
    pids = [worker.pid for worker in cluster.workers.values() if getattr(worker, "pid", None)]
    os.kill(chance.choice(pids), signal.SIGKILL)


def test_dask_with_workers_that_are_killed(tmp_path: Path, s3: S3Server) -> None:  # noqa: F811
    source, wanted = made(tmp_path)
    chance = random.Random(1)
    with dask(4) as (cluster, client):
        for number in range(2):
            target = tmp_path / str(number)
            with client.get_executor() as executor:
                found, _ = disturbed(source, target, executor, lambda: kill_one(cluster, chance), 1 + 20 * number)
            assert found == wanted
        with client.get_executor() as executor:
            assert reshard.verify(tmp_path / "0", source, executor=executor).ok
            reshard.convert(source, "s3://bucket/dask", executor=executor, max_shard_bytes=16 * MIB)
        executor.shutdown()
        with pytest.raises(CheckpointError, match="accepts no tasks"):
            reshard.convert(source, tmp_path / "late", executor=executor)
    assert reshard.compare("s3://bucket/dask", source).ok
    assert not reshard.storage.open_storage("s3://bucket/dask").list("convert-")


def test_a_driver_of_dask_that_is_killed_or_interrupted(tmp_path: Path) -> None:
    """A second one is refused by name while the first is there. When that has ended, nothing opens, and tasks that were
    not begun are not; the same call, made at once, goes on with what is whole."""
    source, wanted = made(tmp_path)
    with dask(2) as (cluster, client), client.get_executor() as executor:
        for how in (signal.SIGKILL, signal.SIGINT):
            target, noting = tmp_path / how.name, Noting(tmp_path / f"{how.name}.log", 0.1)
            given = [str(source), str(target), f"{target}.log", cluster.scheduler_address]
            child = subprocess.Popen(
                [sys.executable, "-c", DRIVER, *given], cwd=Path(__file__).parents[3], stderr=subprocess.DEVNULL
            )
            while child.poll() is None and recorded(target) < 3:
                time.sleep(0.001)
            with pytest.raises(StorageError, match=rf"process {child.pid} on .* is already converting to"):
                reshard.convert(source, target, executor=executor, mapping=noting, **OPTIONS)
            child.send_signal(how)
            assert child.wait(30) != 0
            assert recorded(target) < 60
            with pytest.raises(ReshardError):
                reshard.open(target)
            deadline = time.monotonic() + 10
            while how == signal.SIGINT and staged(target) != recorded(target):  # what was under way leaves nothing
                assert time.monotonic() < deadline
                time.sleep(0.01)

            report = reshard.convert(source, target, executor=executor, mapping=noting, **OPTIONS)

            assert 3 <= len(report.resumed) < 60
            assert files_in(target) == wanted
            assert len(noting.reads()) == 60
            assert noting.reads().total() <= 60 + 2


@dataclass(frozen=True)
class Present:
    """Each task fails while a file is missing."""

    file: Path

    def begin(self) -> Callable[[int], int]:
        """Nothing to open."""

        def do(task: int) -> int:
            if not self.file.exists():
                raise CheckpointError("it is missing")
            return task

        return do


def test_dask_does_again_what_failed_before(tmp_path: Path) -> None:
    """Dask knows the answer to an equal call as long as somebody keeps that of the first, as an error's frames do."""
    distributed = pytest.importorskip("distributed", reason="Dask is not installed: pip install -e '.[dask]'")
    done: list[int] = []
    with (
        distributed.LocalCluster(n_workers=1, processes=False, dashboard_address=None, silence_logs=50) as cluster,
        distributed.Client(cluster) as client,
        client.get_executor() as executor,
    ):
        with pytest.raises(CheckpointError, match="it is missing") as kept:
            run_tasks(Present(tmp_path / "file"), [1, 2], executor, lambda task, result: done.append(result))
        (tmp_path / "file").touch()
        run_tasks(Present(tmp_path / "file"), [1, 2], executor, lambda task, result: done.append(result))
    assert kept is not None
    assert sorted(done) == [1, 2]


def test_processes_write_to_an_object_store(tmp_path: Path, s3: S3Server) -> None:  # noqa: F811
    source, _ = made(tmp_path)
    reshard.convert(source, "s3://bucket/processes", max_shard_bytes=16 * MIB, workers=2)
    with Processes(1) as executor:
        assert reshard.compare("s3://bucket/processes", source, executor=executor).ok
    assert not s3.unfinished_uploads()


def test_ray_with_a_node_that_leaves(tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    ray = pytest.importorskip("ray", reason="Ray is not in the extra `test`, being large: pip install -e '.[ray]'")
    from ray.cluster_utils import Cluster

    from reshard.integrations.ray import RayExecutor

    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "*")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    source, wanted = made(tmp_path)
    size = {"num_cpus": 1, "object_store_memory": 80 * MIB}
    cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(**size) for _ in range(2)]
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False)
        with RayExecutor() as executor:
            found, was_midway = disturbed(
                source, tmp_path / "c", executor, lambda: cluster.remove_node(nodes[0], allow_graceful=False), 5
            )
            assert was_midway
            assert found == wanted
            assert reshard.verify(tmp_path / "c", source, executor=executor).ok
            reshard.convert(source, "s3://bucket/ray", executor=executor, max_shard_bytes=16 * MIB)
        with pytest.raises(CheckpointError, match="accepts no tasks"):
            reshard.convert(source, tmp_path / "late", executor=executor)
        assert reshard.compare("s3://bucket/ray", source).ok
    finally:
        ray.shutdown()
        cluster.shutdown()


def _kill(count: int, seed: int) -> None:
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, dask(4) as (cluster, client):
        source, wanted = made(Path(folder))
        midway = 0
        for number in range(count):
            with client.get_executor() as executor:
                target = Path(folder) / str(number)
                found, was = disturbed(
                    source, target, executor, lambda: kill_one(cluster, chance), chance.randrange(60)
                )
            assert found == wanted, f"seed {seed}, number {number}"
            midway += was
        print(f"{count} conversions with a killed worker, {midway} of them midway: the bytes of one process, no debris")


if __name__ == "__main__":
    _kill(int(sys.argv[1]), int(sys.argv[2]))
