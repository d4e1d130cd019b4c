"""Archives of torch.save that are written from a stream: read by torch, by zipfile and by our own reader."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from planners.geometry.layout import TensorSpec
from reshard.errors import FormatError
from reshard.formats.torch_save import writer as torch_zip_writer
from reshard.formats.torch_save.archive import TorchArchive
from reshard.formats.torch_save.writer import ArchiveWriter, TensorStub, begin_archive, end_archive, pickled_state
from reshard.live.dtypes import dtype_name
from reshard.stored.source import BytesSource
from tests.same import same


def written(nest: Any, tensors: list[torch.Tensor]) -> bytes:
    out = io.BytesIO()
    archive = begin_archive(out.write, pickled_state(nest))
    for number, tensor in enumerate(tensors):
        data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
        archive.record(f"data/{number}", len(data), [data[: len(data) // 2], data[len(data) // 2 :]])
    end_archive(archive)
    return out.getvalue()


def stub(tensor: torch.Tensor, number: int) -> TensorStub:
    return TensorStub(TensorSpec(f"t{number}", tuple(tensor.shape), dtype_name(tensor.dtype)), number)


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(3, 4), torch.tensor(7), torch.empty(0, 3), torch.arange(5).to(torch.uint16),
     torch.randn(2, 2).to(torch.float8_e5m2), torch.tensor([True, False]), torch.randn(3, dtype=torch.complex128)],
    ids=lambda t: str(t.dtype),
)  # fmt: skip
def test_a_tensor_of_any_dtype(tensor: torch.Tensor, tmp_path: Path) -> None:
    data = written({"a": [stub(tensor, 0)], "b": 1}, [tensor])

    (tmp_path / "t.pt").write_bytes(data)
    loaded = torch.load(tmp_path / "t.pt", weights_only=True)

    assert loaded["b"] == 1
    assert loaded["a"][0].dtype == tensor.dtype
    assert same(loaded["a"][0], tensor)
    archive = zipfile.ZipFile(io.BytesIO(data))
    assert archive.testzip() is None
    at, nbytes = TorchArchive(BytesSource(data)).locate("data/0")
    assert at % 64 == 0
    assert nbytes == tensor.nbytes


def test_records_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit of 1000 bytes in place of 4 GiB, everything is told in 64 bits; readers agree."""
    monkeypatch.setattr(torch_zip_writer, "LIMIT32", 1000)
    sizes, out = [10, 5000, 999, 1000, 3], io.BytesIO()

    archive = ArchiveWriter(out.write)
    for number, size in enumerate(sizes):
        archive.record(f"r{number}", size, [bytes([number]) * size])
    archive.close()

    read = zipfile.ZipFile(io.BytesIO(out.getvalue()))
    assert read.testzip() is None
    for number, size in enumerate(sizes):
        assert read.read(f"archive/r{number}") == bytes([number]) * size


def test_a_record_of_another_length_is_refused() -> None:
    archive = ArchiveWriter(io.BytesIO().write)

    with pytest.raises(FormatError, match="should have 5 bytes, but 4 were written"):
        archive.record("r", 5, [b"1234"])


def test_what_cannot_be_pickled_is_refused() -> None:
    with pytest.raises(FormatError, match=r"as torch\.save does"):
        pickled_state({"f": lambda: 0})


@pytest.mark.parametrize("format", ["torch_save", "torch_checkpointing"])
def test_tensors_where_only_objects_are_can_be_read_again(format: str, tmp_path: Path) -> None:
    """Under keys that are no text, a tensor is part of an object. Pickled as Python pickles it, only code reads it."""
    states = {"rank": {1.5: torch.arange(3), 2.5: torch.ones(2, 2, dtype=torch.bfloat16), 3.5: torch.tensor(True)}}
    torch.save({"w": torch.ones(4), "states": states}, tmp_path / "given.pt")
    reshard.convert(tmp_path / "given.pt", tmp_path / "made", format=format)
    found = reshard.open(tmp_path / "made").nested()
    assert same(found["states"], states)
    file = tmp_path / "made" if format == "torch_save" else tmp_path / "made" / "states_0.pt"
    loaded = torch.load(file, weights_only=True)
    assert same(loaded["states"] if format == "torch_save" else loaded, states)
