"""Object stores on a real S3-protocol server: multipart uploads, killed writers, throttling, dropped connections."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from reshard.errors import CheckpointNotFoundError, MissingPackageError, StorageError
from reshard.storage import Storage, open_storage
from reshard.storage.object_store import ObjectStorage, choose_gap_bytes, open_objects
from tests.reshard.storage.s3_server import FlakyProxy, S3Server
from tests.reshard.storage.small_parts import open_in_small_parts

MIB = 1 << 20


def _open(**options: Any) -> Storage:
    return open_in_small_parts(f"s3://bucket/{uuid.uuid4().hex}", **options)


def _write(storage: Storage, name: str, data: bytes, error: Exception | None = None) -> None:
    with storage.create(name) as out:
        for start in range(0, len(data), 5 * MIB):
            out.write(data[start : start + 5 * MIB])
        if error is not None:
            raise error


def _pattern(nbytes: int) -> bytes:
    return (os.urandom(1021) * (nbytes // 1021 + 1))[:nbytes]


def test_large_objects_travel_in_parts(s3: S3Server, proxy: FlakyProxy) -> None:
    storage = _open(parallel=2)
    data = _pattern(23 * MIB + 17)
    with storage.create("big") as out:
        for start in range(0, len(data), 3 * MIB):
            out.write(data[start : start + 3 * MIB])
    assert proxy.requests.count(b"PUT") == 5, "parts of 5 MiB"
    assert storage.size("big") == len(data)
    proxy.requests.clear()
    assert storage.read("big") == data
    assert proxy.requests.count(b"GET") == 5
    target = bytearray(12 * MIB)
    storage.read_into("big", 7 * MIB, memoryview(target))
    assert target == data[7 * MIB : 19 * MIB]
    with pytest.raises(StorageError, match="too short"):
        storage.read("big", 20 * MIB, 8 * MIB)


@pytest.mark.parametrize(("nbytes", "gets"), [(0, 1), (7, 1), (5 * MIB, 1), (5 * MIB + 1, 2), (11 * MIB, 3)])
def test_whole_objects_are_read_without_asking_for_their_size(proxy: FlakyProxy, nbytes: int, gets: int) -> None:
    storage, data = _open(), _pattern(nbytes)
    storage.publish("x", data)
    proxy.requests.clear()
    assert storage.read("x") == data
    assert proxy.requests.count(b"GET") == gets
    assert proxy.requests.count(b"HEAD") == (nbytes == 0)
    proxy.drop, proxy.drop_after = 1, 300
    assert storage.read("x") == data
    with pytest.raises(CheckpointNotFoundError, match="there is no y"):
        storage.read("y")


def test_a_list_of_a_prefix_passes_over_what_comes_before_it(proxy: FlakyProxy) -> None:
    """A page has 1,000 objects, and pages come one after another: a save looks for its claim among the files of all
    ranks, and for leftovers behind them."""
    storage = _open()
    ranks = [f"data-1/{rank:05d}" for rank in range(1001)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: storage.publish(name, b"x"), [*ranks, "data-1/claim.json", "manifest.json.part"]))
    wanted = {
        "data-1/claim.json": (["data-1/claim.json"], 1),
        "manifest.json.": (["manifest.json.part"], 1),
        "data-1/": ([*ranks, "data-1/claim.json"], 2),
        "data-1/00998": (["data-1/00998"], 1),
        "": ([*ranks, "data-1/claim.json", "manifest.json.part"], 2),
    }
    for prefix, (names, requests) in wanted.items():
        proxy.requests.clear()
        assert storage.list(prefix) == dict.fromkeys(names, 1), prefix
        assert len(proxy.requests) == requests, prefix


def test_an_interrupted_upload_is_aborted(s3: S3Server) -> None:
    storage = _open()
    before = s3.unfinished_uploads()
    with pytest.raises(KeyError):
        _write(storage, "big", _pattern(17 * MIB), KeyError())
    assert storage.list() == {}
    assert s3.unfinished_uploads() == before


def test_a_killed_writer_shows_nothing(s3: S3Server) -> None:
    folder = f"s3://bucket/{uuid.uuid4().hex}"
    open_storage(folder).publish("manifest.json", b"old")
    code = (
        "import sys, time\n"
        "from reshard.storage import open_storage\n"
        "with open_storage(sys.argv[1]).create('big') as out:\n"
        "    out.write(bytes(40 << 20)); print('written', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, folder], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "written\n"
        writer.send_signal(signal.SIGKILL)
    assert open_storage(folder).list() == {"manifest.json": 3}
    with open_storage(folder).create("big") as out:
        out.write(b"the next one")
    assert open_storage(folder).read("big") == b"the next one"


@pytest.mark.parametrize("method", [b"GET", b"PUT", b"HEAD", b"POST"])
def test_throttling_is_waited_out(proxy: FlakyProxy, method: bytes) -> None:
    storage = _open()
    proxy.only, proxy.throttle = method, 2
    _use_everything(storage)
    assert proxy.throttle == 0


@pytest.mark.parametrize("method", [b"GET", b"PUT", b"HEAD", b"POST"])
@pytest.mark.parametrize("after", [0, 200])
def test_dropped_connections_are_made_again(proxy: FlakyProxy, method: bytes, after: int) -> None:
    storage = _open()
    proxy.only, proxy.drop, proxy.drop_after = method, 1, after
    _use_everything(storage)
    assert proxy.drop == 0


def _use_everything(storage: Storage) -> None:
    data = _pattern(11 * MIB)
    with storage.create("big") as out:
        out.write(data)
    with storage.create("small") as out:
        out.write(b"small")
    storage.publish("manifest.json", b"{}")
    storage.publish("manifest.json", b"{1}")
    assert storage.read("big", 1, 10 * MIB) == data[1 : 1 + 10 * MIB]
    assert storage.read("small") == b"small"
    assert storage.list() == {"big": 11 * MIB, "manifest.json": 3, "small": 5}
    storage.delete("small")
    assert list(storage.list()) == ["big", "manifest.json"]


def test_a_created_object_whose_answer_was_lost_is_not_refused(proxy: FlakyProxy) -> None:
    storage = _open()
    proxy.only, proxy.drop = b"PUT", 1
    with storage.create("small") as out:
        out.write(b"mine")
    assert storage.read("small") == b"mine"


def test_a_completed_upload_whose_answer_was_lost_is_whole(proxy: FlakyProxy) -> None:
    storage = _open()
    data = _pattern(11 * MIB)
    proxy.only, proxy.skip, proxy.drop = b"POST", 1, 1  # the first begins the upload, the second completes it
    _write(storage, "big", data)
    assert proxy.drop == 0
    assert storage.read("big") == data


def test_of_two_racing_writers_one_is_refused(s3: S3Server) -> None:
    storage = _open()
    with storage.create("small") as slow:
        slow.write(b"slow")
        with storage.create("small") as fast:
            fast.write(b"fast")
        with pytest.raises(StorageError, match="already exists"):
            slow.__exit__(None, None, None)
    assert storage.read("small") == b"fast"


def test_retries_have_a_limit(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")  # nobody listens there
    monkeypatch.setattr("reshard.storage.object_store.RETRY", {"max_retries": 1})
    monkeypatch.setattr("reshard.storage.object_store.FIRST_PAUSE_S", 0.01)
    storage = open_storage("s3://bucket/x")
    start = time.monotonic()
    with pytest.raises(StorageError, match=r"cannot read a in s3://bucket/x: .*127\.0\.0\.1:1"):
        storage.read("a")
    assert time.monotonic() - start < 20


def test_an_upload_that_fails_is_told_to_its_writer(s3: S3Server, proxy: FlakyProxy) -> None:
    storage = open_in_small_parts("s3://no-such-bucket/x")
    with pytest.raises(StorageError, match="no such bucket"):
        _write(storage, "big", bytes(100 * MIB))
    with pytest.raises(StorageError, match="no such bucket"):
        storage.publish("manifest.json", b"")
    with pytest.raises(StorageError, match="no such bucket"):
        storage.list()


def test_limits_are_checked(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match="part_bytes must be at least 5 MiB"):
        ObjectStorage(object(), "s3://bucket", part_bytes=1)
    monkeypatch.setattr("reshard.storage.object_store.MAX_PARTS", 2)
    storage = _open()
    with pytest.raises(StorageError, match="at most 2 parts of 5242880 bytes"):
        _write(storage, "big", bytes(10 * MIB + 1))
    assert storage.list() == {}


def test_the_gap_follows_the_latency(s3: S3Server) -> None:
    assert choose_gap_bytes(0.0) == 64 << 10
    assert choose_gap_bytes(0.03) == 2 * MIB
    assert choose_gap_bytes(10.0) == 8 * MIB
    storage = _open()
    assert storage.max_gap_bytes == 2 * MIB
    storage.publish("x", b"x")
    # The fastest answer counts, so a machine that is busy for a moment does not.
    for _ in range(200):
        storage.size("x")
    assert storage.max_gap_bytes < 2 * MIB, "loopback answers faster than a far bucket"


def test_urls_of_other_stores_are_understood(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as that goes with nobody to talk to."""
    assert repr(open_objects("gs://bucket/a/b")._store) == 'GCSStore(bucket="bucket", prefix="a/b")'
    with pytest.raises(StorageError, match=r"cannot open az://container/a: .*Account must be specified"):
        open_objects("az://container/a")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    assert open_objects("az://container/a")._store.prefix == "a"
    with pytest.raises(StorageError, match="cannot open s3://"):
        open_storage("s3://")


def test_without_obstore_what_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(MissingPackageError, match=r"s3://bucket/x: .*Install obstore>=0.6: pip install 'obstore>=0.6'"):
        open_storage("s3://bucket/x")
