"""Checksums of zip archives: damage in what torch wrote is found, wherever it is, and nothing else is called damage."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch

import reshard
from reshard.formats.torch_save.archive import archives, changed_records
from reshard.storage import LocalStorage, MemoryStorage
from reshard.stored.source import FileSource
from tests.states import few_of_many_sizes
from tests.torch_releases import save_alone


@pytest.fixture
def folder(tmp_path):
    with warnings.catch_warnings(action="ignore"):  # that torch is not distributed
        save_alone(few_of_many_sizes(), checkpoint_id=tmp_path / "ckpt")
    return tmp_path / "ckpt"


def test_the_archives_of_a_file_are_found_from_its_end(folder):
    (file,) = folder.glob("*.distcp")
    found = archives(FileSource(LocalStorage(folder), file.name))

    assert len(found) == len(few_of_many_sizes())
    assert found[0][0] == 0
    assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(found))
    assert sum(found[-1]) == file.stat().st_size


def test_a_sound_checkpoint_has_no_findings(folder):
    assert reshard.verify(folder).ok


def test_every_flipped_byte_of_a_tensor_is_found_and_named(folder):
    (file,) = folder.glob("*.distcp")
    whole = file.read_bytes()
    payload = few_of_many_sizes()["a"].numpy().tobytes()
    at = whole.index(payload)
    for offset in range(0, len(payload), 997):
        data = bytearray(whole)
        data[at + offset] ^= 1
        file.write_bytes(data)

        report = reshard.verify(folder)

        assert not report.ok
        assert f"[{at}, {at + len(payload)})" in str(report)
        assert file.name in str(report)
        assert reshard.verify(folder, deep=False).ok  # which reads no data, and says so


def test_a_damaged_end_of_an_archive_is_found(folder):
    (file,) = folder.glob("*.distcp")
    data = bytearray(file.read_bytes())
    start, length = archives(FileSource(LocalStorage(folder), file.name))[1]
    data[start + length - 22] ^= 1
    file.write_bytes(data)

    assert not reshard.verify(folder).ok


def test_files_of_torch_save_are_checked_too(tmp_path):
    torch.save(few_of_many_sizes(), tmp_path / "model.pt")
    assert reshard.verify(tmp_path / "model.pt").ok
    data = bytearray((tmp_path / "model.pt").read_bytes())
    data[data.index(few_of_many_sizes()["a"].numpy().tobytes()) + 5] ^= 64
    (tmp_path / "model.pt").write_bytes(data)

    report = reshard.verify(tmp_path / "model.pt")

    assert not report.ok
    assert "CRC-32" in str(report)


def test_what_torch_wrote_without_sums_says_so(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(few_of_many_sizes(), tmp_path / "model.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert "set_crc32_options" in str(reshard.verify(tmp_path / "model.pt"))


def test_other_files_are_passed_over():
    storage = MemoryStorage()
    storage.publish("short", b"PK")
    storage.publish("text", b"nothing here")
    storage.publish("empty", b"")
    assert list(changed_records(FileSource(storage, name) for name in storage.list())) == []
    storage.publish("cut", b"PK\x03\x04" + bytes(50))
    assert len(list(changed_records([FileSource(storage, "cut")]))) == 1
