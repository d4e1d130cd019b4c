"""Files of torch.save: zips and the older stream, containers, views of one storage; modules are refused."""

from __future__ import annotations

import io
import json
import pickle
import random
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import reshard
from reshard.checkpoint import open as open_checkpoint
from reshard.errors import CorruptCheckpointError, FormatError, KeyMismatchError, ReshardError, UnsafeDataError
from reshard.stored.contents import Record
from reshard.stored.tensor import LazyTensor
from tests.reshard.formats.compare import check_all, flat_tensors
from tests.same import same
from tests.states import containers
from tests.storages import Remote
from tests.torch_releases import save_alone


@pytest.fixture(params=["zip", "stream"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The state in a file, in the zip format and in that of torch before 1.6."""
    torch.save(containers(), tmp_path / "state.pt", _use_new_zipfile_serialization=request.param == "zip")
    return tmp_path / "state.pt"


def test_tensors_objects_and_nest(saved: Path) -> None:
    wanted = containers()  # torch cannot read float8 from a stream, though it writes it

    checkpoint = open_checkpoint(saved)

    check_all(checkpoint, flat_tensors(wanted))
    assert checkpoint.objects["groups.0.params"] == [0, 1]
    nest = checkpoint.nested()
    assert nest["groups"] == wanted["groups"]
    assert (nest["empty"], nest["epoch"], nest["name"]) == ({}, 7, None)
    assert isinstance(nest["pair"], tuple)
    assert isinstance(nest["pair"][1][0], LazyTensor)
    assert list(nest["optim"]["state"]) == [0]
    assert np.array_equal(nest["array"], np.arange(3))
    assert checkpoint.warnings == ()


def test_the_folder_of_the_only_file(saved: Path) -> None:
    assert list(open_checkpoint(saved.parent)) == list(open_checkpoint(saved))


def test_a_file_without_a_telling_suffix(saved: Path) -> None:
    renamed = saved.rename(saved.parent / "checkpoint_last")
    assert open_checkpoint(renamed).format == "torch_save"


def test_only_needed_bytes_are_read_of_a_zip(tmp_path: Path) -> None:
    big = torch.randn(1000, 100)
    torch.save({"a": big, "b": torch.randn(50_000)}, tmp_path / "x.pt")
    storage = Remote(tmp_path, max_gap_bytes=64)
    checkpoint = open_checkpoint(storage, check=False)
    assert storage.nbytes_read < 4000

    storage.ranges.clear()
    assert same(checkpoint["a"][5], big[5])
    assert storage.nbytes_read == 400 + 30 + len("x/data/0") + 128

    checkpoint = open_checkpoint(storage)
    storage.ranges.clear()
    assert same(checkpoint["a"][5], big[5])
    assert same(checkpoint["a"][7:9], big[7:9])
    assert storage.nbytes_read < 1.01 * big.nbytes + 1000, "the record is compared with its CRC-32 once"


def test_the_stream_is_read_without_its_tensors(tmp_path: Path) -> None:
    """Pickles of unknown length are found with a few reads, storages by their lengths alone."""
    big = torch.randn(2000, 500)
    torch.save({"a": big, "b": torch.ones(3)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    storage = Remote(tmp_path, max_gap_bytes=64)
    checkpoint = open_checkpoint(storage)
    assert storage.nbytes_read <= (1 << 20) + 100

    assert same(checkpoint["b"][:], torch.ones(3))
    assert same(checkpoint["a"][1999], big[1999])


def test_views_of_one_storage(tmp_path: Path) -> None:
    base = torch.arange(12.0)
    value = {
        "base": base,
        "rows": base.reshape(3, 4),
        "again": base,
        "part": base[4:8],
        "columns": base.reshape(3, 4).T,
    }
    torch.save(value, tmp_path / "x.pt")

    checkpoint = open_checkpoint(tmp_path)

    check_all(checkpoint, value)
    assert dict(checkpoint.aliases) == {"again": "base"}
    assert len({checkpoint[key].stored.chunks[0].source for key in checkpoint}) == 1


@pytest.mark.parametrize("value", [torch.arange(3.0), [torch.ones(2), 5], (torch.ones(1),)])
def test_other_roots(value: Any, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "x.pt")
    checkpoint = open_checkpoint(tmp_path / "x.pt")
    wanted = {"tensor": value} if isinstance(value, torch.Tensor) else flat_tensors(value)
    check_all(checkpoint, wanted)


class Settings:
    """A class that the reader must not import."""

    rate = 1

    def __reduce__(self) -> tuple[Any, ...]:
        return Settings, (), {"rate": 2}


def test_devices_are_read_as_devices_or_as_text_where_their_backend_is_not_installed(tmp_path: Path) -> None:
    class Foreign:
        def __reduce__(self) -> Any:
            return torch.device, ("elsewhere", 2)

    torch.save({"own": torch.device("cuda:1"), "foreign": Foreign()}, tmp_path / "x.pt")

    assert dict(open_checkpoint(tmp_path / "x.pt").objects) == {"own": torch.device("cuda:1"), "foreign": "elsewhere:2"}


def test_an_empty_key_is_no_lone_tensor(tmp_path: Path) -> None:
    state = {"": torch.ones(2), "tensor": torch.zeros(3)}
    torch.save(state, tmp_path / "both.pt")
    torch.save({"": torch.zeros(3)}, tmp_path / "empty.pt")
    torch.save({"tensor": torch.zeros(3)}, tmp_path / "other.pt")

    check_all(reshard.open(tmp_path / "both.pt"), state)
    assert not reshard.compare(tmp_path / "empty.pt", tmp_path / "other.pt").ok


def test_objects_of_unknown_classes_are_records_and_said_so(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "settings": Settings(), "more": {"deep": [Settings()]}}, tmp_path / "x.pt")

    checkpoint = open_checkpoint(tmp_path)

    record = checkpoint.objects["settings"]
    assert isinstance(record, Record)
    assert record.fields == {"rate": 2}
    assert "2 objects of" in checkpoint.warnings[0]
    assert "Settings, whose class is not known here, can only be read as plain data: " in checkpoint.warnings[0]


def lazily_negated() -> torch.Tensor:
    return torch.ones(3, dtype=torch.complex64).conj().imag


def sparse() -> torch.Tensor:
    return torch.eye(3).to_sparse()


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def quantized_by_channel() -> torch.Tensor:
    ones = torch.ones(3)
    return torch.quantize_per_channel(torch.ones(3, 2), ones, torch.zeros(3, dtype=torch.int64), 0, torch.quint8)


def quantized_to_4_bits() -> torch.Tensor:
    return torch.quantize_per_channel(torch.ones(3, 2), torch.ones(3), torch.zeros(3), 0, torch.quint4x2)


@pytest.mark.filterwarnings("ignore:.*quant")
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("make", "kind", "fix"),
    [
        (lazily_negated, "a tensor with torch's negative bit", "save x.resolve_neg() instead"),
        (sparse, "a sparse tensor", "save x.to_dense() instead"),
        (quantized, "a quantized tensor", "save q.int_repr(), its scale, and its zero point instead"),
        (quantized_by_channel, "a quantized tensor", "save q.int_repr(), its scale, and its zero point instead"),
        (quantized_to_4_bits, "a quantized tensor", "save q.int_repr(), its scale, and its zero point instead"),
    ],
)
def test_tensors_that_are_not_supported_are_no_damage(
    make: Callable[[], torch.Tensor], kind: str, fix: str, zipped: bool, tmp_path: Path
) -> None:
    """Once `verify` called a file with a negated one damaged, and a quantized one made all others unreadable."""
    file, said = tmp_path / "x.pt", re.escape(f"{kind}, which is not supported: {fix}")
    torch.save({"a": torch.ones(2), "m": {"t": make()}}, file, _use_new_zipfile_serialization=zipped)

    checkpoint, report = open_checkpoint(file), reshard.verify(file)

    assert same(checkpoint["a"][...], torch.ones(2))
    assert isinstance(checkpoint.objects["m.t"], Record)
    assert report.ok, report
    assert re.search(f"^'m.t' cannot be read: {said}$", checkpoint.warnings[0])
    with pytest.raises(KeyMismatchError, match=rf"m\.t   \(saved as {said}, but the target has a tensor"):
        reshard.load({"a": torch.zeros(2), "m": {"t": torch.zeros(3)}}, file)
    with pytest.raises(KeyMismatchError, match=f": saved as {said}"):
        reshard.load({"a": torch.zeros(2), "m": {"t": 0}}, file)
    for format in ("native", "torch_save"):
        with pytest.raises(FormatError, match=f"such as 'm.t': {said}"):
            reshard.convert(file, tmp_path / "out", format=format)


@pytest.mark.filterwarnings("ignore:.*quant")
@pytest.mark.parametrize("format", ["dcp", "torch_save", "native"])
def test_what_is_not_supported_is_refused_by_key_inside_a_value_too(format: str, tmp_path: Path) -> None:
    """DCP's writer failed at it with an error of pickle."""
    torch.save({"a": torch.ones(2), "m": [{frozenset([1]): quantized()}]}, tmp_path / "x.pt")
    with pytest.raises(FormatError, match=r"1 object of .* cannot be written, such as 'm(\.0)?': a quantized tensor"):
        reshard.convert(tmp_path / "x.pt", tmp_path / "out", format=format)
    assert not (tmp_path / "out").exists()


def test_what_follows_a_pickle_is_not_passed_over(tmp_path: Path) -> None:
    """A damaged magic number made a file of before torch 1.6 a plain pickle of one number, without tensors."""
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    data = bytearray((tmp_path / "a.pt").read_bytes())
    data[5] ^= 1
    (tmp_path / "a.pt").write_bytes(data)
    (tmp_path / "b.pkl").write_bytes(pickle.dumps({"a": 1}) + pickle.dumps({"b": 2}))

    for name in ("a.pt", "b.pkl"):
        with pytest.raises(CorruptCheckpointError, match=f"{name}: more bytes follow its pickle"):
            open_checkpoint(tmp_path / name)


def test_what_follows_the_storages_of_a_stream_is_not_passed_over(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    end = (tmp_path / "a.pt").stat().st_size
    with (tmp_path / "a.pt").open("ab") as file:
        torch.save({"v": torch.ones(2)}, file, _use_new_zipfile_serialization=False)

    with pytest.raises(CorruptCheckpointError, match=rf"a\.pt: more bytes follow what was saved, .* at byte {end}"):
        open_checkpoint(tmp_path / "a.pt")


def test_one_of_several_archives_in_a_file_is_not_taken_for_the_file(tmp_path: Path) -> None:
    """Offsets count from the start of each archive, so that the end of the last fits the first one, too."""
    for number in range(2):
        torch.save({"w": torch.full((8,), number)}, tmp_path / f"{number}.pt")
    both = (tmp_path / "0.pt").read_bytes() + (tmp_path / "1.pt").read_bytes()
    (tmp_path / "both.pt").write_bytes(both)

    with pytest.raises(
        CorruptCheckpointError, match=r"both\.pt: the zip archive is damaged: its directory ends at byte"
    ):
        open_checkpoint(tmp_path / "both.pt")


def test_modules_are_refused(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "x.pt")
    with pytest.raises(FormatError, match=r"pickled object of torch.nn.modules.linear.Linear.*save its state_dict\(\)"):
        open_checkpoint(tmp_path)


def test_hostile_files_run_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "pwned",)

    for zipped in (True, False):
        torch.save({"w": torch.ones(2), "e": Evil()}, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
        with pytest.raises(UnsafeDataError, match=r"x.pt.*none of it was run"):
            open_checkpoint(tmp_path / "x.pt")
    assert not (tmp_path / "pwned").exists()


def test_several_files_need_a_choice(tmp_path: Path) -> None:
    for name in ("a.pt", "b.pt"):
        torch.save({"w": torch.ones(2)}, tmp_path / name)
    with pytest.raises(FormatError, match=r"2 files of torch.save and no index that lists them: a.pt, b.pt"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("by_path", [True, False])
def test_one_of_several_numbered_files_says_that_the_others_are_not_opened(by_path: bool, tmp_path: Path) -> None:
    for name, warns in {"model-00002-of-00003.bin": True, "model-00001-of-00001.bin": False}.items():
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        torch.save({"w": torch.ones(2)}, folder / name)
        opened = open_checkpoint(folder / name if by_path else folder)
        said = f"{name} is one of several files, and the others were not opened"
        assert opened.warnings == ((said,) if warns else ())


def test_pytorch_model_bin_with_an_index(tmp_path: Path) -> None:
    parts = {"a": torch.arange(4.0), "b": torch.arange(6.0).reshape(2, 3)}
    weight_map = {}
    for i, (key, value) in enumerate(parts.items(), start=1):
        weight_map[key] = f"pytorch_model-0000{i}-of-00002.bin"
        torch.save({key: value}, tmp_path / weight_map[key])
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    check_all(open_checkpoint(tmp_path), parts)
    check_all(open_checkpoint(index), parts)
    check_all(open_checkpoint(index.rename(tmp_path / "pytorch_model.bin.index.fp16.json")), parts)

    index.write_text(json.dumps({"weight_map": {**weight_map, "c": weight_map["a"]}}))
    with pytest.raises(CorruptCheckpointError, match="holds 'c', but no file does"):
        open_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": weight_map}))
    for extra, what in (("a", f"holds 'a', but {weight_map['b']} does"), ("c", "no file holds 'c', but pytorch_model")):
        torch.save({"b": parts["b"], extra: torch.ones(4)}, tmp_path / weight_map["b"])
        with pytest.raises(CorruptCheckpointError, match=what):
            open_checkpoint(tmp_path)
    (tmp_path / weight_map["a"]).unlink()
    with pytest.raises(
        CorruptCheckpointError, match=r"are missing: pytorch_model-00001-of-00002.bin. .* held 1 name, such as 'a'"
    ):
        open_checkpoint(tmp_path)
    (tmp_path / "other.bin.index.json").write_text(index.read_text())
    with pytest.raises(FormatError, match=r"has 2 indexes: other.bin.index.json, pytorch_model.bin.index.json"):
        open_checkpoint(tmp_path)


def rezip(path: Path, change: Any, compression: int = zipfile.ZIP_STORED) -> None:
    """Write the archive anew with its records changed."""
    with zipfile.ZipFile(path) as old:
        records = {name: old.read(name) for name in old.namelist()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as new:
        for name, data in change(records).items():
            new.writestr(name, data)
    path.write_bytes(buffer.getvalue())


def test_archives_that_contradict_themselves(tmp_path: Path) -> None:
    """Storages of another size, missing or there twice, another byte order, compression, TorchScript, no pickle."""
    path = tmp_path / "x.pt"
    cases = {
        "has 4 bytes, the pickle says 8": lambda r: {k: b"1234" if "data/0" in k else v for k, v in r.items()},
        "two records 'data/0'": lambda r: {**r, "other/data/0": bytes(8)},
        "no record 'data/0'": lambda r: {k: v for k, v in r.items() if "data/0" not in k},
        "big-endian": lambda r: {k: b"big" if k.endswith("byteorder") else v for k, v in r.items()},
        "without data.pkl": lambda r: {k: v for k, v in r.items() if "data.pkl" not in k},
    }
    for message, change in cases.items():
        torch.save({"w": torch.ones(2)}, path)
        rezip(path, change)
        with pytest.raises(ReshardError, match=message):
            open_checkpoint(path)["w"][...]
    torch.save({"w": torch.ones(2)}, path)
    rezip(path, dict, zipfile.ZIP_DEFLATED)
    with pytest.raises(FormatError, match="compressed"):
        open_checkpoint(path)
    torch.save({"w": torch.ones(2)}, path)
    rezip(path, lambda r: {"x/code/__torch__.py": b"class", **r}, zipfile.ZIP_DEFLATED)
    with pytest.raises(FormatError, match=r"it is a TorchScript program.* torch\.jit\.load .*state_dict\(\)"):
        open_checkpoint(path)
    torch.save({"w": torch.ones(2)}, path)
    rezip(path, dict)  # written by another zip library, but right
    check_all(open_checkpoint(path), {"w": torch.ones(2)})


def test_records_beyond_4_gib() -> None:
    """Sizes and offsets that need 64 bits stand in a field of their own, each only where 32 bits do not do."""
    from reshard.formats.torch_save.archive import _zip64_sizes

    wide = struct.pack("<HHQQQ", 1, 24, 5 << 30, 5 << 30, 7 << 30)
    assert _zip64_sizes(wide, 0xFFFFFFFF, 0xFFFFFFFF) == (5 << 30, 7 << 30)
    other = struct.pack("<HH4s", 0x4246, 4, b"ZZZZ")
    assert _zip64_sizes(other + struct.pack("<HHQ", 1, 8, 7 << 30), 12, 0xFFFFFFFF) == (12, 7 << 30)
    assert _zip64_sizes(other, 12, 34) == (12, 34)


def test_fuzzed_files_give_clear_errors_only(saved: Path) -> None:
    original = saved.read_bytes()
    rng = random.Random(0)
    refused = 0
    for turn in range(300):
        data = bytearray(original)
        if turn % 3 == 0:
            data = data[: rng.randrange(len(data))]
        else:
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        saved.write_bytes(data)
        try:
            checkpoint = open_checkpoint(saved)
            for key in checkpoint:
                checkpoint[key][...]
            checkpoint.nested()
        except ReshardError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("where", ["local header", "directory"])
def test_a_record_is_not_read_where_another_one_is(where: str, tmp_path: Path) -> None:
    """One changed number leads from the elements of one tensor to those of another, whose checksum is right there."""
    path = tmp_path / "saved.pt"
    torch.save({"a": torch.arange(8.0), "b": torch.arange(8.0) + 100}, path)
    with zipfile.ZipFile(path) as archive:
        a, b = (archive.getinfo(f"saved/data/{number}").header_offset for number in range(2))
    data = bytearray(path.read_bytes())
    if where == "directory":
        at = data.rindex(b"saved/data/0") - 4
        assert int.from_bytes(data[at : at + 4], "little") == a
        data[at : at + 4] = b.to_bytes(4, "little")
    else:
        name, extra = (int.from_bytes(data[b + at : b + at + 2], "little") for at in (26, 28))
        first = int.from_bytes(data[a + 26 : a + 28], "little")
        data[a + 28 : a + 30] = (b + name + extra - a - first).to_bytes(2, "little")
    path.write_bytes(data)

    def read() -> None:
        checkpoint = reshard.open(path)
        for name in "ba":
            checkpoint[name][...]

    with pytest.raises(
        CorruptCheckpointError, match=r"two of its records are at one place|is not where its directory says"
    ):
        read()


@pytest.mark.parametrize("format", ["torch_save", "dcp"])
@pytest.mark.parametrize("at", [26, 28], ids=["length of the name", "length of what follows it"])
def test_elements_are_not_read_beside_their_place(at: int, format: str, tmp_path: Path) -> None:
    """One changed bit moves where a record begins by a few bytes, within the record and what surrounds it."""
    tensor = torch.arange(64.0)
    if format == "dcp":
        save_alone({"a": tensor}, checkpoint_id=tmp_path / "saved")
        (path,) = (tmp_path / "saved").glob("*.distcp")
        opened = path.parent
    else:
        opened = path = tmp_path / "saved.pt"
        torch.save({"a": tensor}, path)
    data = bytearray(path.read_bytes())
    header = data.rindex(b"PK\x03\x04", 0, data.index(b"/data/0FB"))
    for bit in range(16):
        changed = bytearray(data)
        changed[header + at + bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(CorruptCheckpointError, match="is damaged: the header of record 'data/0'"):
            reshard.open(opened, check=False)["a"][:3]
