"""What every storage promises, on every storage."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from reshard.errors import CheckpointNotFoundError, StorageError
from reshard.storage import LocalStorage, Storage, Writer, open_storage


@pytest.fixture(params=["local", "memory", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "s3":
        request.getfixturevalue("s3")
        return open_storage(f"s3://bucket/{uuid.uuid4().hex}")
    return open_storage(tmp_path / "new" if request.param == "local" else f"memory://{uuid.uuid4().hex}")


def _write(storage: Storage, name: str, data: bytes) -> None:
    with storage.create(name) as out:
        out.write(data)


def test_what_was_written_is_read(storage: Storage) -> None:
    data = bytes(range(256)) * 100
    with storage.create("step-1/data.bin") as out:
        out.write(data[:10])
        out.write(bytearray(data[10:20]))
        out.write(memoryview(data)[20:1000])
        out.write(np.frombuffer(data[1000:], dtype="<i4").reshape(-1, 2))
        out.write(b"")
        out.write(np.empty((0, 3), dtype="float64"))
        assert out.nbytes == len(data)
    assert storage.size("step-1/data.bin") == len(data)
    assert storage.read("step-1/data.bin") == data
    assert storage.read("step-1/data.bin", 1) == data[1:]
    assert storage.read("step-1/data.bin", 5, 7) == data[5:12]
    assert storage.read("step-1/data.bin", len(data)) == b""
    assert storage.read("step-1/data.bin", 3, 0) == b""
    view = storage.mapped("step-1/data.bin")
    assert view is None or (view.readonly and view == data)


def test_reads_fill_any_contiguous_buffer(storage: Storage) -> None:
    values = np.arange(1000, dtype="<i8")
    _write(storage, "values", values.tobytes())
    target = np.zeros((20, 50), dtype="<i8")
    storage.read_into("values", 8 * 100, memoryview(target[2:4]))  # type: ignore[arg-type]
    expected = np.zeros((20, 50), dtype="<i8")
    expected[2:4] = values[100:200].reshape(2, 50)
    np.testing.assert_array_equal(target, expected)
    storage.read_into("values", 8000, memoryview(bytearray()))


def test_empty_objects(storage: Storage) -> None:
    with storage.create("nothing"):
        pass
    storage.publish("small", b"")
    assert storage.list() == {"nothing": 0, "small": 0}
    assert storage.read("nothing") == storage.read("small", 0, 0) == b""
    assert not storage.mapped("nothing")


def test_listing(storage: Storage) -> None:
    assert storage.list() == storage.list("step-1/") == {}
    for name in ("step-1/a", "step-10/b", "step-2/deep/er/c", "top"):
        _write(storage, name, name.encode())
    assert storage.list() == {"step-1/a": 8, "step-10/b": 9, "step-2/deep/er/c": 16, "top": 3}
    assert list(storage.list("step-1")) == ["step-1/a", "step-10/b"]
    assert list(storage.list("step-1/")) == ["step-1/a"]
    assert list(storage.list("step-2/deep/e")) == ["step-2/deep/er/c"]
    assert storage.list("step-3/") == storage.list("top/") == {}


def test_a_short_object_is_never_read_short(storage: Storage) -> None:
    _write(storage, "part.bin", b"0123456789")
    for start, length in ((5, 6), (10, 1), (100, 1)):
        expected = rf"part\.bin in {storage.url} is too short: expected bytes \[{start}, {start + length}\).* 10 bytes"
        with pytest.raises(StorageError, match=expected):
            storage.read("part.bin", start, length)
        with pytest.raises(StorageError, match=expected):
            storage.read_into("part.bin", start, memoryview(bytearray(length)))
    for start, length in ((-1, 2), (0, -1), (11, None)):
        with pytest.raises(StorageError, match="bad byte range"):
            storage.read("part.bin", start, length)


def test_what_is_absent_is_named(storage: Storage) -> None:
    for call in (storage.size, storage.read, storage.mapped, lambda name: storage.read(name, 0, 4)):
        if call == storage.mapped and storage.url.startswith("s3"):
            continue
        with pytest.raises(CheckpointNotFoundError, match=rf"there is no step-9/x\.bin in {storage.url}"):
            call("step-9/x.bin")
    storage.delete("step-9/x.bin")


def test_create_does_not_overwrite(storage: Storage) -> None:
    _write(storage, "once", b"first")
    with pytest.raises(StorageError, match="it already exists and is not overwritten"):
        _write(storage, "once", b"second")
    assert storage.read("once") == b"first"
    storage.delete("once")
    _write(storage, "once", b"third")
    assert storage.read("once") == b"third"


def test_publish_replaces_whole_objects(storage: Storage) -> None:
    for data in (b"{}", b'{"step": 12}', bytearray(b"x")):
        storage.publish("manifest.json", data)
        assert storage.read("manifest.json") == data
    assert storage.list() == {"manifest.json": 1}


def _fail(out: Writer, error: Exception) -> None:
    with out:
        out.write(b"x" * 100)
        raise error


def test_versions_tell_replaced_objects(storage: Storage) -> None:
    storage.publish("a/x", b"1")
    storage.publish("a/y", b"1")
    before = dict(storage.versions("a/"))
    storage.publish("a/x", b"2")
    after = dict(storage.versions("a/"))
    assert [*before] == [*after] == ["a/x", "a/y"]
    assert before["a/y"] == after["a/y"]
    assert before["a/x"] != after["a/x"] or isinstance(storage, LocalStorage)


def test_an_interrupted_writer_leaves_nothing(storage: Storage) -> None:
    out = storage.create("step-1/data.bin")
    with pytest.raises(KeyError):
        _fail(out, KeyError())
    assert storage.list() == {}
    with pytest.raises(StorageError, match="closed"):
        out.write(b"late")


def test_a_failed_write_that_was_ignored_is_not_committed(storage: Storage) -> None:
    out = storage.create("data.bin")
    out.write(b"x" * 100)
    with pytest.raises(TypeError):
        out.write(memoryview(b"abcdef")[::2])
    with pytest.raises(StorageError, match="nothing was kept"):
        out.__exit__(None, None, None)
    assert storage.list() == {}


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../up", "a/../b", "a//b", "a/", "./a", "a\0b", "a\\b", "\ud800"])
def test_names_stay_inside(storage: Storage, name: str) -> None:
    for call in (storage.size, storage.create, storage.delete, lambda name: storage.publish(name, b"")):
        with pytest.raises(StorageError, match="bad name"):
            call(name)


def test_many_threads_read_at_once(storage: Storage) -> None:
    data = np.random.default_rng(0).bytes(100_000)
    _write(storage, "data", data)
    with ThreadPoolExecutor(8) as pool:
        pieces = list(pool.map(lambda start: storage.read("data", start, 1000), range(0, 100_000, 1000)))
    assert b"".join(pieces) == data
