"""The local folder: durability, links, and a clear word for whatever the file system refuses."""

from __future__ import annotations

import errno
import gc
import os
import resource
import shutil
import stat
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import reshard
from reshard.api.retention import complete
from reshard.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError
from reshard.native.commit import remove_dead
from reshard.storage import LocalStorage, Storage, is_temporary, local, open_storage
from reshard.storage.tar import TarStorage


def _write(storage: Storage, name: str, data: bytes) -> None:
    with storage.create(name) as out:
        out.write(data)


def test_paths_and_urls(tmp_path: Path) -> None:
    assert open_storage(str(tmp_path)).url == str(tmp_path)
    assert open_storage(tmp_path).url == str(tmp_path)
    assert open_storage(f"file://{tmp_path}/a%20b").url == f"{tmp_path}/a b"
    storage = LocalStorage(tmp_path)
    assert open_storage(storage) is storage
    open_storage("memory://shared").publish("a/b", b"1")
    assert open_storage("memory://shared/").read("a/b") == open_storage("memory://shared/a").read("b") == b"1"
    assert open_storage("memory://shared/a/").list() == {"b": 1}
    for other in ("memory://other", "memory://share", "memory://shared/a/b"):
        assert open_storage(other).list() == {}
    open_storage("memory://shared/a").delete("b")
    assert open_storage("memory://shared").list() == {}
    for bad in ("ftp://host/x", "file://host/x", "file://", "", b"bytes"):
        with pytest.raises(StorageError):
            open_storage(bad)  # type: ignore[arg-type]
    assert not (tmp_path / "a b").exists(), "opening makes nothing"


def test_a_url_names_the_folder_of_any_bytes(tmp_path: Path) -> None:
    """pathlib writes what is no UTF-8 like this. It was another folder."""
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff%00"))
    _write(open_storage(folder.as_uri()), "x", b"1")
    assert (folder / "x").read_bytes() == b"1"
    with pytest.raises(StorageError, match="has a NUL"):
        open_storage(f"file://{tmp_path}/a%00")


def test_places_beyond_64_bits(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1")
    with pytest.raises(StorageError, match="too short"):
        LocalStorage(tmp_path).read_into("x", 2**64, memoryview(bytearray(1)))


def test_a_member_of_negative_size(tmp_path: Path) -> None:
    """As tar can write it since numbers may have 95 bits."""
    header = bytearray(tarfile.TarInfo("x").tobuf(tarfile.GNU_FORMAT)[:512])
    header[124:136] = b"\xff" * 11 + b"\0"
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    (tmp_path / "a.tar").write_bytes(header + bytes(1024))
    with pytest.raises(CorruptCheckpointError, match="not a complete tar"):
        TarStorage(LocalStorage(tmp_path), "a.tar")


def test_a_relative_path_is_fixed_when_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    storage = open_storage("here")
    monkeypatch.chdir("/")
    _write(storage, "x", b"1")
    assert (tmp_path / "here" / "x").read_bytes() == b"1"


class _Seen:
    """A folder as `os.scandir` gives it, which notes of which files the size was asked."""

    def __init__(self, path: Any, asked: list[str]) -> None:
        self._real, self._asked = _scandir(path), asked

    def __enter__(self) -> _Seen:
        return self

    def __iter__(self) -> _Seen:
        return self

    def __next__(self) -> Any:
        return self._entry(next(self._real))

    def __exit__(self, *_: object) -> None:
        self._real.close()

    def _entry(self, entry: os.DirEntry[str]) -> Any:
        def stat() -> os.stat_result:
            self._asked.append(entry.name)
            return entry.stat()

        return SimpleNamespace(
            name=entry.name, path=entry.path, is_dir=entry.is_dir, is_symlink=entry.is_symlink, stat=stat
        )


_scandir = os.scandir


@pytest.mark.parametrize(
    ("prefix", "names"),
    [
        ("", ["a", "data-1/a", "data-1/b", "data-10/c", "m.json", "m.json.part"]),
        ("m.json.", ["m.json.part"]),
        ("data-1", ["data-1/a", "data-1/b", "data-10/c"]),
        ("data-1/", ["data-1/a", "data-1/b"]),
        ("data-1/b", ["data-1/b"]),
        ("b", []),
    ],
)
def test_a_list_asks_for_no_size_that_is_not_wanted(
    prefix: str, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With thousands of ranks, a checkpoint has as many files, and each size is a request to the file system."""
    storage = LocalStorage(tmp_path)
    for name in ("a", "data-1/a", "data-1/b", "data-10/c", "m.json", "m.json.part"):
        _write(storage, name, b"12")
    asked: list[str] = []
    monkeypatch.setattr(os, "scandir", lambda path: _Seen(path, asked))
    assert storage.list(prefix) == dict.fromkeys(names, 2)
    assert sorted(asked) == sorted(name.rpartition("/")[2] for name in names)
    asked.clear()
    assert sorted(storage.names(prefix)) == names
    assert asked == []


def test_what_cleans_up_asks_for_no_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank does it while all others wait."""
    for step in (1, 2, 3):
        reshard.save({"w": torch.ones(3)}, tmp_path / f"step-{step}")
    asked: list[str] = []
    monkeypatch.setattr(os, "scandir", lambda path: _Seen(path, asked))
    assert remove_dead(LocalStorage(tmp_path / "step-3")) == []
    assert asked == []
    assert [one.path for one in complete(tmp_path)] == [str(tmp_path / f"step-{step}") for step in (1, 2, 3)]
    opened = len(asked)  # whose files have their length
    assert len(reshard.prune(tmp_path, keep_last=1)) == 2
    assert len(asked) == 2 * opened


def test_everything_written_is_synced_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order on the disk: each new folder into its parent, the bytes, the name; a rename only after the bytes."""
    events: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(file: int) -> None:
        events.append("sync " + os.path.relpath(os.readlink(f"/proc/self/fd/{file}"), tmp_path).split(".~")[0])
        real_fsync(file)

    def replace(source: str, target: str) -> None:
        events.append("rename to " + os.path.relpath(target, tmp_path))
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    storage = LocalStorage(tmp_path / "ckpt")
    _write(storage, "step/data", b"x")
    assert events == ["sync .", "sync ckpt", "sync ckpt/step/data", "sync ckpt/step"]
    events.clear()
    storage.publish("manifest.json", b"{}")
    assert events == ["sync ckpt/manifest.json", "sync ckpt", "rename to ckpt/manifest.json", "sync ckpt"]


@pytest.mark.parametrize("is_placed", [False, True])
def test_the_disk_writes_while_bytes_are_made(is_placed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[range] = []

    def start(file: int, written: range) -> None:
        asked.append(written)
        real(file, written)

    real = local.start_writing_back
    monkeypatch.setattr(local, "start_writing_back", start)
    monkeypatch.setattr(local, "_WRITE_BYTES", 1000)
    data = os.urandom(12_345)
    storage = LocalStorage(tmp_path)
    if is_placed:
        data = data[:8000]
        with storage.open_shared("a", len(data)) as out:
            for start_byte, stop in ((4000, 8000), (0, 700), (700, 1300), (3700, 4000), (1300, 3700)):
                out.at = start_byte
                out.write(data[start_byte:stop])
        starts = [4000, 5000, 6000, 7000, 0, 3000, 1000, 2000]  # each when its last bytes come
    else:
        with storage.create("a") as out:
            for at in range(0, 10_000, 400):
                out.write(data[at : at + 400])
            out.write(data[10_000:])
        # pieces of 400 bytes are asked for together, and a long one by parts; the rest is left to the fsync
        starts = [*range(0, 12_000, 1000)]
    assert asked == [range(start, start + 1000) for start in starts]
    assert storage.read("a") == data


def test_reserved_bytes_are_written_in_any_order_and_on_any_thread(tmp_path: Path) -> None:
    data, storage = os.urandom(500), LocalStorage(tmp_path)
    with storage.create("a") as out, ThreadPoolExecutor(2) as pool:
        places = []
        for at in range(0, 500, 100):
            if at == 200:
                out.write(data[200:300])
            elif (place := out.reserve(100)) is not None:
                places.append((place, memoryview(data)[at : at + 100]))
        assert out.nbytes == 500
        for written in [pool.submit(place, piece) for place, piece in reversed(places)]:
            written.result()
    assert storage.read("a") == data
    with open_storage("memory://reserved").create("a") as front_to_end:
        assert front_to_end.reserve(100) is None


def test_this_system_can_be_asked_to_write(tmp_path: Path) -> None:
    with open(tmp_path / "a", "w+b") as file:
        file.write(bytes(100))
        file.flush()
        call = local._sync_file_range()
        assert call is not None
        assert call(file.fileno(), 0, 100, local._SYNC_FILE_RANGE_WRITE) == 0
        local.start_writing_back(file.fileno(), range(100))
    reader, writer = os.pipe()
    local.start_writing_back(writer, range(1))  # a pipe refuses it, which counts for nothing
    os.close(reader)
    os.close(writer)


def test_a_view_outlives_its_file(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.publish("x", b"old" * 5000)
    view = storage.mapped("x")
    assert view is not None
    storage.publish("x", b"new")
    storage.delete("x")
    gc.collect()
    assert view == b"old" * 5000
    with pytest.raises(TypeError):
        view[0] = 0


def test_deleting_the_last_object_removes_its_folder(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "ckpt")
    _write(storage, "step-1/a/data", b"x")
    _write(storage, "step-1/data", b"x")
    storage.delete("step-1/a/data")
    assert sorted(path.name for path in (tmp_path / "ckpt").rglob("*")) == ["data", "step-1"]
    storage.delete("step-1/data")
    assert list((tmp_path / "ckpt").iterdir()) == []


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "1234").write_bytes(b"weights")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/1234")
    (tmp_path / "snapshot" / "dangling").symlink_to("../blobs/none")
    (tmp_path / "snapshot" / "loop").symlink_to("loop")
    storage = LocalStorage(tmp_path / "snapshot")
    assert storage.list() == {"model.safetensors": 7}
    assert storage.read("model.safetensors") == b"weights"
    with pytest.raises(CheckpointNotFoundError, match="there is no dangling"):
        storage.read("dangling")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    storage = LocalStorage(tmp_path)
    for name in ("folder", "pipe"):
        for call in (storage.read, storage.size, storage.mapped):
            with pytest.raises(StorageError, match=f"cannot read {name} .*not a regular file"):
                call(name)
    with pytest.raises(StorageError, match="a folder is at that path"):
        storage.publish("folder", b"x")
    assert not any(is_temporary(name) for name in storage.list())


def test_a_file_too_large_for_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as metadata that grew by terabytes of holes."""
    (tmp_path / "file").write_bytes(b"x")
    monkeypatch.setattr(os, "pread", mock.Mock(side_effect=MemoryError))
    with pytest.raises(StorageError, match=r"file in .* does not fit into memory"):
        LocalStorage(tmp_path).read("file")


@pytest.mark.parametrize("of", [(), (3,), (3, 20)])
def test_one_call_may_read_less_than_is_there(of: tuple[int, ...], tmp_path: Path) -> None:
    """Linux reads at most 2 GiB at once."""
    data = bytes(range(40))
    (tmp_path / "file").write_bytes(data)
    pread = os.pread
    with mock.patch.object(os, "pread", lambda file, nbytes, at: pread(file, min(nbytes, 7), at)):
        assert LocalStorage(tmp_path).read("file", *of) == (data if not of else data[3:23] if of[1:] else data[3:])


def test_a_path_that_is_no_regular_file_and_no_folder() -> None:
    with pytest.raises(StorageError, match=r"^/dev/null is not a regular file or folder: use another path$"):
        LocalStorage("/dev/null").list()


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"x")
    storage = LocalStorage(tmp_path / "model.pt")
    with pytest.raises(StorageError, match=r"model\.pt is a file, not a folder"):
        storage.list()
    with pytest.raises(StorageError, match=r"model\.pt is a file: pass a folder$"):
        storage.read("manifest.json")
    for call in (storage.create, lambda name: storage.publish(name, b"")):
        with pytest.raises(StorageError, match="a part of the path is a file"):
            call("manifest.json")
    below = LocalStorage(tmp_path / "model.pt" / "step-1")
    with pytest.raises(StorageError, match=r"read manifest.json in .*: a part of the path is .*: check the path$"):
        below.read("manifest.json")
    assert (tmp_path / "model.pt").read_bytes() == b"x"


def _full_disk(file: int, data: memoryview, at: int) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    storage.publish("manifest.json", b"old")
    monkeypatch.setattr(os, "pwrite", _full_disk)
    with pytest.raises(StorageError, match=r"cannot write step/data .*: no space left on the device") as caught:
        _write(storage, "step/data", b"x" * 100)
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(StorageError, match="no space left"):
        storage.publish("manifest.json", b"new")
    monkeypatch.undo()
    assert storage.list() == {"manifest.json": 3}
    assert storage.read("manifest.json") == b"old"


def test_a_file_too_large_for_the_process(tmp_path: Path) -> None:
    """A real refusal by the kernel in the middle of a write, after some of the bytes went through."""
    code = (
        "import resource, signal, sys\n"
        "from reshard.storage import LocalStorage\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
        "with LocalStorage(sys.argv[1]).create('data') as out: out.write(bytes(30_000))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert "StorageError: cannot write data in" in done.stderr
    assert "exceeds the maximum size of this file system or process" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_too_many_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    storage.publish("x", b"x")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(StorageError, match="too many open files"):
            storage.read("x")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EIO])
def test_refusals_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Root may do anything, so the refusals of a folder's mode are played."""

    def refuse(*args: object) -> int:
        raise OSError(number, os.strerror(number), str(args[0]))

    storage = LocalStorage(tmp_path)
    storage.publish("x", b"x")
    monkeypatch.setattr(os, "open", refuse)
    words = {errno.EACCES: "permission denied", errno.EROFS: "read-only", errno.EIO: "[Ii]nput/output"}[number]
    create = "create x in" if number == errno.EIO else "write to"
    for verb, call in (("read x in", storage.read), (create, storage.create)):
        with pytest.raises(StorageError, match=f"cannot {verb} {tmp_path}: .*{words}") as caught:
            call("x")
        assert caught.value.errno == number


def test_the_folder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: str) -> object:
        if folder.endswith("private"):
            raise PermissionError(errno.EACCES, "Permission denied", folder)
        return scandir(folder)

    storage, scandir = LocalStorage(tmp_path), os.scandir
    storage.publish("a/private/x", b"x")
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(StorageError, match=f"cannot list a/private in {tmp_path}: permission denied"):
        storage.list()


def test_a_run_at_the_root_of_a_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system keeps a `lost+found` there, which only its owner may read."""

    def refuse(folder: Any) -> object:
        if os.fspath(folder).endswith("lost+found"):
            raise PermissionError(errno.EACCES, "Permission denied", folder)
        return scandir(folder)

    (tmp_path / "lost+found").mkdir()
    scandir, model = os.scandir, torch.nn.Linear(2, 3)
    monkeypatch.setattr(os, "scandir", refuse)
    for step in (1, 2):
        with reshard.CheckpointManager(tmp_path, every=reshard.Every(steps=1), keep=reshard.Keep(last=1)) as manager:
            report = manager.restore({"model": model})
            manager.save(step, {"model": model})
    assert report is not None
    assert report.load.ok
    assert manager.all_steps() == [2]
    assert [*reshard.open(tmp_path)] == ["model.weight", "model.bias"]


def test_a_sync_that_fails_is_a_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    storage = LocalStorage(tmp_path)
    storage.publish("manifest.json", b"old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError, match="cannot write data"):
        _write(storage, "data", b"x")
    with pytest.raises(StorageError, match="Input/output"):
        storage.publish("manifest.json", b"new")
    monkeypatch.undo()
    assert storage.list() == {"manifest.json": 3}


def test_a_killed_publish_leaves_the_old_object_and_a_marked_file(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from reshard.storage import LocalStorage\n"
        "os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)\n"
        "LocalStorage(sys.argv[1]).publish('step/manifest.json', b'new')\n"
    )
    storage = LocalStorage(tmp_path)
    storage.publish("step/manifest.json", b"old")
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert storage.read("step/manifest.json") == b"old"
    (left,) = [name for name in storage.list() if is_temporary(name)]
    storage.delete(left)
    assert storage.list() == {"step/manifest.json": 3}
    assert not is_temporary("a.tmp")
    assert not is_temporary("step/manifest.json")


def test_a_publish_whose_first_file_was_cleaned_up_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_replace = os.replace
    cleaned: list[str] = []

    def replace(source: Path, target: Path) -> None:
        if len(cleaned) < times:
            cleaned.append(source.name)
            source.unlink()
        real_replace(source, target)

    monkeypatch.setattr(os, "replace", replace)
    storage = LocalStorage(tmp_path)
    times = 2
    storage.publish("manifest.json", b"{}")
    assert storage.read("manifest.json") == b"{}"
    times = 100
    with pytest.raises(CheckpointNotFoundError):
        storage.publish("manifest.json", b"new")
    assert storage.list() == {"manifest.json": 2}


def test_a_publish_whose_folder_was_cleaned_up_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `prune` does with a checkpoint that another `prune` is about to remove."""
    real_fsync, removed = os.fsync, 0

    def fsync(file: int) -> None:
        nonlocal removed
        real_fsync(file)
        if stat.S_ISREG(os.fstat(file).st_mode) and removed < times:
            removed += 1
            shutil.rmtree(tmp_path / "step")

    monkeypatch.setattr(os, "fsync", fsync)
    storage = LocalStorage(tmp_path)
    times = 2
    storage.publish("step/claim.json", b"{}")
    assert (removed, storage.list()) == (2, {"step/claim.json": 2})
    removed, times = 0, 100
    with pytest.raises(CheckpointNotFoundError):
        storage.publish("step/claim.json", b"new")
    assert (removed, storage.list()) == (3, {})


def test_a_folder_that_vanishes_while_creating_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    real_open = os.open
    removed: list[str] = []

    def open_after_removal(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT and not removed:
            removed.append(str(path))
            (tmp_path / "step").rmdir()
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", open_after_removal)
    _write(storage, "step/data", b"x")
    assert storage.list() == {"step/data": 1}
    assert removed


def test_who_comes_late_makes_no_folder_that_another_process_removed(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.publish("a", b"data")
    late = storage.without_new_folders()
    for write in (late.create, lambda name: late.open_shared(name, 8)):
        with pytest.raises(StorageError, match=r"cannot create gone/b in .*: another process deleted its folder"):
            write("gone/b")
    with pytest.raises(StorageError, match=r"cannot link a in .*: another process deleted the folder of gone/b"):
        storage.link("a", "gone/b")
    assert storage.list() == {"a": 4}
    _write(late, "b", b"x")
    _write(storage, "new/b", b"x")
    assert storage.list() == {"a": 4, "b": 1, "new/b": 1}


@pytest.mark.parametrize("write", ["publish", "create"])
def test_a_new_folder_that_another_process_removes_while_it_is_empty_is_made_again(
    write: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `prune` does with what killed saves leave: also with folders above it that are empty then."""
    storage, real, removed = LocalStorage(tmp_path), os.mkdir, []
    storage.publish("a", b"data")

    def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
        real(path, *args, **kwargs)
        if Path(path).name == "inner" and len(removed) < 3:
            removed.append(path)
            os.removedirs(path)  # stops at what holds something

    monkeypatch.setattr(os, "mkdir", mkdir)
    if write == "publish":
        storage.publish("outer/inner/b", b"data")
    else:
        with storage.create("outer/inner/b") as out:
            out.write(b"data")
    assert storage.read("outer/inner/b") == b"data"
    assert len(removed) == 3


def test_a_shared_file_that_cannot_have_its_size_is_closed(tmp_path: Path) -> None:
    storage, opened = LocalStorage(tmp_path), []

    def full(file: int, nbytes: int) -> None:
        opened.append(file)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (
        mock.patch.object(os, "ftruncate", full),
        pytest.raises(StorageError, match="create a"),
    ):
        storage.open_shared("a", 8)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


def test_a_folder_that_is_removed_while_it_is_listed_holds_nothing(tmp_path, monkeypatch) -> None:
    """It was once taken for a device file."""
    folder = tmp_path / "folder"
    folder.mkdir()
    real, asked = os.stat, []

    def late(path, **options):
        found = real(path, **options)
        if os.fspath(path) == str(folder) and not asked:
            asked.append(path)
            folder.rmdir()
        return found

    monkeypatch.setattr(os, "stat", late)
    assert LocalStorage(folder).list() == {}
    assert asked


@pytest.mark.parametrize("path", ["~", "~/run", "~root/run"])
def test_a_path_that_only_a_shell_expands_is_refused(path, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StorageError, match="begins with ~, which only shells expand"):
        reshard.save({"w": torch.ones(1)}, path)
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_no_shell_expands_may_begin_with_a_tilde(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    reshard.save({"w": torch.ones(1)}, "~no-such-user/run")
    assert reshard.verify(tmp_path / "~no-such-user" / "run").ok
