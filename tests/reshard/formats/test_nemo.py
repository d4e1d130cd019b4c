"""NeMo's archives, as its documentation describes them: torch.save or a DCP checkpoint inside a tar, read in place."""

from __future__ import annotations

import io
import random
import tarfile
from pathlib import Path

import pytest
import torch

import reshard
from reshard.checkpoint import open as open_checkpoint
from reshard.errors import CorruptCheckpointError, FormatError, ReshardError, StorageError
from reshard.storage import LocalStorage
from reshard.storage.tar import TarStorage
from tests.reshard.formats.compare import check_all
from tests.reshard.formats.writers import DcpWriter, archive, grid
from tests.storages import Remote

STATE = {"encoder.weight": torch.arange(600.0).reshape(60, 10), "bias": torch.arange(5).to(torch.bfloat16)}
CONFIG = b"hidden_size: 10\ntarget: some.Model\n"


def nemo(path: Path, files: dict[str, bytes], mode: str = "w:") -> Path:
    with tarfile.open(path, mode) as out:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))
    return path


def plain(path: Path, mode: str = "w:") -> Path:
    files = {"./model_config.yaml": CONFIG, "./model_weights.ckpt": archive(STATE), "./tokenizer.model": b"x"}
    return nemo(path, files, mode)


def test_a_state_dict_in_an_archive(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(plain(tmp_path / "m.nemo"))

    assert checkpoint.format == "nemo"
    check_all(checkpoint, STATE)
    assert checkpoint.objects["model_config.yaml"] == CONFIG.decode()
    assert checkpoint.warnings == ("not opened: tokenizer.model",)
    assert set(checkpoint.normalized()["model"]) == set(STATE)
    reshard.convert(tmp_path, tmp_path / "out", format="safetensors")
    check_all(open_checkpoint(tmp_path / "out"), STATE)


def test_a_distributed_checkpoint_in_an_archive_or_a_folder(tmp_path: Path) -> None:
    chunks = {key: grid(value, 2) for key, value in STATE.items()}
    made = DcpWriter(chunks, {"step": 3}).write(tmp_path / "a" / "weights")
    files = {f"model_weights/{file.name}": file.read_bytes() for file in made.iterdir()}
    files["model_weights/metadata.json"] = b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    for checkpoint in (
        open_checkpoint(nemo(tmp_path / "m.nemo", {"model_config.yaml": CONFIG, **files})),
        open_checkpoint(tmp_path / "m.nemo"),
    ):
        check_all(checkpoint, STATE)
        assert (checkpoint.objects["step"], checkpoint.format) == (3, "nemo")
        assert set(checkpoint.normalized()["model"]) == set(STATE)
    (tmp_path / "a" / "context").mkdir()
    (tmp_path / "a" / "context" / "model.yaml").write_bytes(CONFIG)
    check_all(open_checkpoint(tmp_path / "a"), STATE)
    del files["model_weights/.metadata"]
    with pytest.raises(CorruptCheckpointError, match=r"m.nemo/model_weights/: there is no .metadata"):
        open_checkpoint(nemo(tmp_path / "m.nemo", {"model_config.yaml": CONFIG, **files}))


def test_a_member_is_not_shorter_than_its_bytes(tmp_path: Path) -> None:
    """The checksum of a header is the sum of its bytes, which two swapped ones leave as it is."""
    path = plain(tmp_path / "m.nemo")
    data = path.read_bytes()
    size = b"%011o" % len(CONFIG)
    path.write_bytes(data.replace(size + b"\0", size[:-1] + b"\0" + size[-1:], 1))
    with pytest.raises(CorruptCheckpointError, match=r"'model_config.yaml' is longer than 4 bytes"):
        open_checkpoint(path)


def test_only_the_bytes_of_a_slice_are_read(tmp_path: Path) -> None:
    plain(tmp_path / "m.nemo")
    storage = Remote(tmp_path, max_gap_bytes=64)
    checkpoint = open_checkpoint(storage)
    checkpoint["encoder.weight"][:1]
    storage.ranges.clear()
    assert torch.equal(checkpoint["encoder.weight"][10:30], STATE["encoder.weight"][10:30])
    assert 20 * 10 * 4 <= storage.nbytes_read <= 20 * 10 * 4 + 100


def test_what_is_refused(tmp_path: Path) -> None:
    weights = archive(STATE)
    with pytest.raises(FormatError, match=r"m.nemo: the archive is compressed with gzip.*Decompress it first"):
        open_checkpoint(plain(tmp_path / "m.nemo", "w:gz"))
    ranks = {f"tp_rank_0{rank}_pp_rank_000/model_weights.ckpt": weights for rank in range(2)}
    with pytest.raises(FormatError, match="the parts of 2 model parallel ranks, such as tp_rank_00_pp_rank_000/"):
        open_checkpoint(nemo(tmp_path / "m.nemo", ranks))
    check_all(open_checkpoint(nemo(tmp_path / "m.nemo", {"mp_rank_00/model_weights.ckpt": weights})), STATE)
    with pytest.raises(CorruptCheckpointError, match=r"neither model_weights.ckpt nor model_weights/ in it, but other"):
        open_checkpoint(nemo(tmp_path / "m.nemo", {"other": b""}))
    plain(tmp_path / "n.nemo")
    with pytest.raises(FormatError, match=r"has 2 archives: m.nemo, n.nemo"):
        open_checkpoint(tmp_path)


def test_an_archive_is_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    plain(tmp_path / "m.nemo")
    inside = TarStorage(LocalStorage(tmp_path), "m.nemo")
    assert inside.read("model_config.yaml", 0, 11) == CONFIG[:11]
    for write in (inside.create, inside.delete, lambda name: inside.publish(name, b"")):
        with pytest.raises(StorageError, match="an archive, which is read-only: cannot write 'x'"):
            write("x")
    with pytest.raises(FileNotFoundError, match="there is no"):
        inside.size("x")
    with pytest.raises(StorageError, match="too short"):
        inside.read("model_config.yaml", 0, 1000)


def headers(data: bytes) -> list[int]:
    """Where the headers of the members are, and behind them where the end is."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return [*(member.offset for member in archive), archive.offset]


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("damage", ["flipped", "zeroed", "cut"])
def test_members_that_a_damaged_header_hides_are_missed(damage: str, at: int, tmp_path: Path) -> None:
    """tarfile takes a damaged header behind the first member, and the end of the file, for the end of the archive."""
    path = plain(tmp_path / "m.nemo")
    data = bytearray(path.read_bytes())
    where = headers(data)[at]
    if damage == "flipped":
        data[where + 3] ^= 1
    elif damage == "zeroed" and at < 3:
        data[where : where + 512] = bytes(512)
    else:
        del data[where + 512 * (at == 3) :]
    path.write_bytes(data)
    with pytest.raises(
        CorruptCheckpointError, match=rf"m\.nemo: not a complete tar archive: at byte {where} there is neither .* end"
    ):
        open_checkpoint(path)


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("end", [b"", bytes(1024), bytes(100_000), b"more"])
def test_archives_of_other_writers_end_as_they_like(format: int, end: bytes, tmp_path: Path) -> None:
    """With two blocks of zeros, with more of them, or with what other tools pass over behind these."""
    path = tmp_path / "m.nemo"
    with tarfile.open(path, "w:", format=format) as out:
        info = tarfile.TarInfo(f"./{'long' * 20}/{'name' * 20}")
        info.type = tarfile.DIRTYPE
        out.addfile(info)
        info = tarfile.TarInfo("./model_weights.ckpt")
        info.size = len(data := archive(STATE))
        out.addfile(info, io.BytesIO(data))
    whole = path.read_bytes()
    path.write_bytes(whole[: headers(whole)[-1] + 1024] + end)

    check_all(open_checkpoint(path), STATE)


def test_fuzzed_archives_give_clear_errors_only(tmp_path: Path) -> None:
    path = plain(tmp_path / "m.nemo")
    original = path.read_bytes()
    rng = random.Random(0)
    refused = 0
    for turn in range(200):
        data = bytearray(original)
        if turn % 4 == 0:
            data = data[: rng.randrange(len(data))]
        else:
            data[rng.choice([0, 512, 1024]) + rng.randrange(512)] = rng.randrange(256)
        path.write_bytes(data)
        try:
            checkpoint = open_checkpoint(path)
            for key in checkpoint:
                checkpoint[key][...]
        except ReshardError:
            refused += 1
    assert refused > 80
