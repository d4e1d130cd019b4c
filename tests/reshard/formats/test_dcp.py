"""DCP: what is stored is found inside the archives, and damage is seen before a wrong number is given."""

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import reshard
from planners.geometry.box import Box
from reshard import convert, fingerprint, verify
from reshard.checkpoint import open as open_checkpoint
from reshard.errors import CorruptCheckpointError, FormatError, ReshardError, UnsafeDataError
from reshard.live import dtypes
from tests.reshard.formats.compare import check_all
from tests.reshard.formats.writers import DcpWriter, archive, grid
from tests.same import same
from tests.samples import sample, truth
from tests.storages import Remote
from tests.torch_releases import HAS_E8M0, requires, save_alone

W = torch.arange(70, dtype=torch.float32).reshape(10, 7)


def written(tmp_path: Path, **changes: Any) -> DcpWriter:
    return DcpWriter({"w": grid(W, 3, 2), "s": [((), torch.tensor(3.5))]}, {"o": {"lr": 0.1}}, **changes)


@pytest.mark.filterwarnings("ignore")  # torch's own writer warns about many things
def test_all_dtypes_and_strides_that_torch_writes(tmp_path: Path) -> None:
    """What `dcp.save` of this very torch writes, in memory order of its own, comes back in every bit."""
    raw = torch.arange(96, dtype=torch.uint8)
    state = {
        **{str(d): raw.view(d) for d in (torch.float64, torch.bfloat16, torch.int16, torch.uint64, torch.float8_e5m2)},
        "complex": raw.view(torch.complex64),
        "half": torch.randn(4).to(torch.complex32),
        "conj": torch.randn(3, 4, dtype=torch.complex64).conj(),
        "conj16": torch.randn(2, 3).to(torch.complex32).conj(),
        "conj64": torch.randn(3, 2, dtype=torch.complex128).T.conj(),
        "bool": torch.tensor([True, False]),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.arange(3.0).expand(4, 3),
        "view": torch.arange(20.0)[3:9:2],
        "zero": torch.tensor(1.0),
        "empty": torch.empty(0, 3),
    }
    save_alone(dict(state), checkpoint_id=tmp_path)

    checkpoint = open_checkpoint(tmp_path)

    check_all(checkpoint, state)
    assert checkpoint["channels_last"].stored.chunks[0].window.strides == (240, 4, 60, 12)


def test_chunks_objects_and_layout(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(written(tmp_path).write(tmp_path))

    check_all(checkpoint, {"w": W, "s": torch.tensor(3.5)})
    assert dict(checkpoint.objects) == {"o": {"lr": 0.1}}
    assert checkpoint.layout.world_size == 2
    assert checkpoint.layout["w"].boxes(0) == (Box((0, 0), (4, 4)), Box((4, 0), (4, 4)), Box((8, 0), (2, 4)))


def test_opening_reads_metadata_only(tmp_path: Path) -> None:
    written(tmp_path).write(tmp_path)
    storage = Remote(tmp_path, max_gap_bytes=64)

    checkpoint = open_checkpoint(storage)
    shapes = {key: checkpoint[key].shape for key in checkpoint}

    assert shapes["w"] == (10, 7)
    assert {name for name, _, _ in storage.ranges} == {".metadata"}


def test_a_slice_reads_its_bytes_and_the_heads_of_its_items(tmp_path: Path) -> None:
    """One row of a large tensor: the head of one item and the bytes of the row; no other item is touched."""
    big = torch.randn(512, 300)
    DcpWriter({"big": grid(big, 4), "other": grid(big, 2)}).write(tmp_path)
    storage = Remote(tmp_path, max_gap_bytes=64)
    checkpoint = open_checkpoint(storage, check=False)
    storage.ranges.clear()

    row = checkpoint["big"][200]

    assert same(row, big[200])
    assert storage.nbytes_read == 4096 + 300 * 4
    assert len(storage.ranges) == 2

    checked = Remote(tmp_path, max_gap_bytes=64)
    assert same(open_checkpoint(checked)["big"][200], big[200])
    record = 128 * 300 * 4  # whose CRC-32 says whether any of it was changed
    assert record < sum(nbytes for name, _, nbytes in checked.ranges if name != ".metadata") < record + 3 * 4096


def test_columns_are_read_row_by_row_or_together_as_gaps_allow(tmp_path: Path) -> None:
    big = torch.randn(64, 256)
    DcpWriter({"big": grid(big, 2)}).write(tmp_path)
    for gap, reads, nbytes in ((64, 64, 64 * 16), (4096, 2, 2 * (31 * 1024 + 16))):
        storage = Remote(tmp_path, max_gap_bytes=gap)
        checkpoint = open_checkpoint(storage, check=False)
        assert all(chunk.window for chunk in checkpoint["big"].stored.chunks)  # found now, so not counted below
        stored = checkpoint["big"]
        storage.ranges.clear()

        assert same(stored[:, 8:12], big[:, 8:12])
        assert len(storage.ranges) == reads
        assert storage.nbytes_read == nbytes


def test_a_stepped_slice_skips_chunks_that_hold_nothing_of_it(tmp_path: Path) -> None:
    DcpWriter({"w": grid(W, 10)}).write(tmp_path)
    checkpoint = open_checkpoint(tmp_path)

    lazy = checkpoint["w"]
    assert same(lazy[::4, 1::3], W[::4, 1::3])
    assert [chunk.is_located for chunk in lazy.stored.chunks] == [i % 4 == 0 for i in range(10)]


def test_items_of_other_torch_versions(tmp_path: Path) -> None:
    """Parameters, other alignments, and zips whose first kilobytes do not show where the data is."""
    config = pytest.importorskip("torch.utils.serialization", reason="torch 2.6 aligns in one way").config
    old, config.save.storage_alignment = config.save.storage_alignment, 4096
    try:
        writer = DcpWriter(
            {"w": [((0, 0), torch.nn.Parameter(W))], "f8": [((0,), torch.ones(5).to(torch.float8_e4m3fn))]}
        )
    finally:
        config.save.storage_alignment = old

    checkpoint = open_checkpoint(writer.write(tmp_path))

    check_all(checkpoint, {"w": W, "f8": torch.ones(5).to(torch.float8_e4m3fn)})


def test_a_storage_larger_than_its_tensor(tmp_path: Path) -> None:
    """A view saved with all of its storage: offset and strides of the pickle count."""
    base = torch.arange(100.0).reshape(10, 10)
    writer = DcpWriter({"w": [((0, 0), base[2:5, 3:9:2])]})

    check_all(open_checkpoint(writer.write(tmp_path)), {"w": base[2:5, 3:9:2]})


def damage(tmp_path: Path, key: str = "w", **kinds: Any) -> str:
    """The message of reading a tensor of a damaged checkpoint."""
    with pytest.raises(CorruptCheckpointError) as caught:
        open_checkpoint(tmp_path)[key][...]
    return str(caught.value)


def test_a_payload_of_another_shape_is_not_believed(tmp_path: Path) -> None:
    """torch's strided-shard defect: the metadata says (8, 1) rows, the payloads are the other way round."""
    writer = written(tmp_path)
    data, infos = writer.metadata.state_dict_metadata["w"], writer.metadata.storage_data
    first, last = (MetadataIndex("w", chunk.offsets) for chunk in (data.chunks[0], data.chunks[-1]))
    infos[first], infos[last] = infos[last], infos[first]

    message = damage(writer.write(tmp_path))

    assert "says shape [4, 4]" in message
    assert "holds [2, 3]" in message
    assert "chunk Box[0:4, 0:4]" in message
    assert open_checkpoint(tmp_path).problems() == []  # what the metadata says is right in itself
    assert "says shape [4, 4]" in open_checkpoint(tmp_path).problems(deep=True)[0]


def test_a_payload_of_another_dtype_is_not_believed(tmp_path: Path) -> None:
    writer = written(tmp_path)
    data = writer.metadata.state_dict_metadata["w"]
    data.properties.dtype = torch.int32

    assert "says int32" in damage(writer.write(tmp_path))
    assert "holds float32" in damage(tmp_path)


def test_holes_are_seen_and_the_rest_is_read(tmp_path: Path) -> None:
    writer = written(tmp_path)
    gone = writer.metadata.state_dict_metadata["w"].chunks.pop(2)
    checkpoint = open_checkpoint(writer.write(tmp_path))

    assert gone.offsets == (4, 0)
    assert "no file of the checkpoint has elements [4:8, 0:4]" in checkpoint.problems()[0]
    assert "has elements [4:8, 0:4]" in damage(tmp_path)
    assert str(tmp_path) in damage(tmp_path)
    assert same(checkpoint["w"][:4], W[:4])
    assert same(checkpoint["w"][:, 4:], W[:, 4:])
    with pytest.raises(CorruptCheckpointError, match=r"has elements \[7:8, 3:4\]"):
        checkpoint["w"][7, 3]


def test_overlaps_are_seen(tmp_path: Path) -> None:
    writer = written(tmp_path)
    index = MetadataIndex("w", torch.Size((3, 0)))
    writer.metadata.state_dict_metadata["w"].chunks.append(ChunkStorageMetadata(torch.Size((3, 0)), torch.Size((2, 7))))
    writer._item(index, archive(W[3:5].clone()), 0)

    said = damage(writer.write(tmp_path))
    assert "are stored twice" in said
    assert said.count(str(tmp_path)) == 2
    assert "stored twice" in open_checkpoint(tmp_path).problems()[0]


def test_a_load_says_that_a_rank_stored_elements_twice(tmp_path: Path) -> None:
    """And not that a plan is wrong."""
    writer = DcpWriter({"w": grid(W, 1, 1)})
    writer.metadata.state_dict_metadata["w"].chunks.append(ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((2, 7))))
    writer.write(tmp_path)

    with pytest.raises(CorruptCheckpointError, match=r"tensor 'w': elements Box\[0:2, 0:7\] are stored twice"):
        reshard.load({"w": torch.zeros(10, 7)}, tmp_path)
    with pytest.raises(CorruptCheckpointError, match="are stored twice"):
        _ = open_checkpoint(tmp_path).layout


def test_chunks_outside_the_tensor_are_seen(tmp_path: Path) -> None:
    writer = written(tmp_path)
    writer.metadata.state_dict_metadata["w"].size = torch.Size((9, 7))

    assert "is outside the shape [9, 7]" in damage(writer.write(tmp_path))
    assert "is outside" in open_checkpoint(tmp_path).problems()[0]


@pytest.mark.parametrize("change", ["outside", "unplaced", "object"])
def test_an_error_about_metadata_begins_with_the_checkpoint(tmp_path: Path, change: str) -> None:
    """A job may have several, and `compare` has two."""
    writer = written(tmp_path)
    if change == "outside":
        writer.metadata.state_dict_metadata["w"].size = torch.Size((9, 7))
    else:
        del writer.metadata.storage_data[MetadataIndex("w", (0, 4)) if change == "unplaced" else MetadataIndex("o")]
    good, bad = written(tmp_path).write(tmp_path / "good"), writer.write(tmp_path / "bad")

    with pytest.raises(CorruptCheckpointError) as raised:
        reshard.load({"w": torch.zeros(10, 7), "s": torch.zeros(()), "o": None}, bad)
    assert str(raised.value).startswith(f"{bad}")
    report = verify(good, bad)
    assert [finding.message.startswith(f"{bad}") for finding in report.findings] == [True]


def test_a_chunk_without_an_item_is_seen(tmp_path: Path) -> None:
    writer = written(tmp_path)
    del writer.metadata.storage_data[MetadataIndex("w", torch.Size((0, 4)))]

    assert "does not say where its chunk Box[0:4, 4:7]" in damage(writer.write(tmp_path))


def test_missing_and_short_files_are_named_at_once(tmp_path: Path) -> None:
    writer = written(tmp_path)
    folder = writer.write(tmp_path)
    (folder / "__1_0.distcp").write_bytes(writer.data["__1_0.distcp"][:-1])
    with pytest.raises(
        CorruptCheckpointError, match=r"__1_0.distcp: truncated: it has .* such as 'w', which ends at byte"
    ):
        open_checkpoint(folder)
    (folder / "__1_0.distcp").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"1 of 2 files that .metadata names are missing: __1_0.distcp"):
        open_checkpoint(folder)


def test_what_is_left_of_a_checkpoint_is_not_of_another_format(tmp_path: Path) -> None:
    """Alone, each file of DCP looks like one of torch.save."""
    writer = DcpWriter({"w": grid(W, 3, 2)}, files=1)
    folder = writer.write(tmp_path)
    metadata = (folder / ".metadata").read_bytes()
    (folder / ".metadata").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"there are .distcp files, but no .metadata"):
        open_checkpoint(folder)
    (folder / "__0_0.distcp").unlink()
    (folder / ".metadata").write_bytes(metadata)
    with pytest.raises(CorruptCheckpointError, match=r"1 of 1 files that .metadata names are missing: __0_0.distcp"):
        open_checkpoint(folder)


def test_a_save_that_did_not_end_is_no_checkpoint(tmp_path: Path) -> None:
    written(tmp_path).write(tmp_path)
    (tmp_path / ".metadata").unlink()
    with pytest.raises(
        CorruptCheckpointError, match=r"no .metadata, which is written last: the save did not finish, or the file was"
    ):
        open_checkpoint(tmp_path)


def test_metadata_of_ranks_beside_that_of_another_save_is_told(tmp_path: Path) -> None:
    """As after a save without collectives over one with."""
    written(tmp_path).write(tmp_path)
    assert open_checkpoint(tmp_path).warnings == ()
    (tmp_path / "__0.metadata").write_bytes((tmp_path / ".metadata").read_bytes())
    told = "__0.metadata beside .metadata was not read: one of them is of an older save"
    assert open_checkpoint(tmp_path).warnings == (told,)
    assert told in str(verify(tmp_path))


def test_metadata_of_every_rank_is_put_together(tmp_path: Path) -> None:
    """Without collectives each rank lists its own chunks; replicas are one chunk."""
    whole = written(tmp_path)
    for rank in range(2):
        part = written(tmp_path)
        chunks = whole.metadata.state_dict_metadata["w"].chunks
        part.metadata.state_dict_metadata["w"].chunks = [c for i, c in enumerate(chunks) if i % 2 == rank]
        part.write(tmp_path)
        (tmp_path / ".metadata").rename(tmp_path / f"__{rank}.metadata")

    check_all(open_checkpoint(tmp_path), {"w": W, "s": torch.tensor(3.5)})


def of_each_rank(folder: Path) -> Path:
    """What three ranks leave that save a tensor each without collectives."""
    for rank in range(3):
        writer = DcpWriter({f"w{rank}": grid(W, 3, 2)}, files=1)
        writer.data = {f"__{rank}_0.distcp": writer.data.pop("__0_0.distcp")}
        for info in writer.metadata.storage_data.values():
            info.relative_path = f"__{rank}_0.distcp"
        writer.write(folder)
        (folder / ".metadata").rename(folder / f"__{rank}.metadata")
    return folder


@pytest.mark.parametrize(
    ("gone", "missing"),
    [
        (["__1.metadata"], "1 of 3 files __<rank>.metadata are missing, the first is __1.metadata"),
        (["__1.metadata", "__1_0.distcp"], "1 of 3 files __<rank>.metadata are missing, the first is __1.metadata"),
        (["__2.metadata"], "1 of 3 files __<rank>.metadata are missing, the first is __2.metadata"),
        (["__0.metadata", "__2.metadata"], "2 of 3 files __<rank>.metadata are missing, the first is __0.metadata"),
    ],
)
def test_a_missing_metadata_file_of_a_rank_is_named(gone: list[str], missing: str, tmp_path: Path) -> None:
    """By the numbers of the others, and by data files that none describes."""
    of_each_rank(tmp_path)
    for name in gone:
        (tmp_path / name).unlink()
    with pytest.raises(CorruptCheckpointError, match=missing):
        open_checkpoint(tmp_path)
    assert missing in str(verify(tmp_path))


def test_without_collectives_nothing_says_how_many_ranks_saved(tmp_path: Path) -> None:
    folder = of_each_rank(tmp_path)
    check_all(open_checkpoint(folder), dict.fromkeys(("w0", "w1", "w2"), W))
    assert "whether files with higher numbers are missing" in str(open_checkpoint(folder).unchecked)
    (folder / "__4000000000.metadata").write_bytes((folder / "__0.metadata").read_bytes())
    with pytest.raises(CorruptCheckpointError, match=r"3999999997 of 4000000001 .* the first is __3\.metadata"):
        open_checkpoint(folder)


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def read_everything(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    for key in checkpoint:
        checkpoint[key][...]
    dict(checkpoint.objects)
    checkpoint.problems()


@pytest.mark.parametrize("place", ["metadata", "object", "tensor"])
def test_hostile_pickles_run_nothing(tmp_path: Path, place: str) -> None:
    """In the metadata, in an object's item and in a tensor's item."""
    target = tmp_path / "pwned"
    tensors: Any = {"w": grid(W, 2)}
    writer = DcpWriter(tensors, {"o": Evil(target) if place == "object" else 1})
    if place == "metadata":
        writer.metadata.planner_data = Evil(target)
    if place == "tensor":
        index = MetadataIndex("w", torch.Size((0, 0)))
        writer._item(index, archive(Evil(target)), 0)
    writer.write(tmp_path / "ckpt")

    with pytest.raises(UnsafeDataError, match="none of it was run"):
        read_everything(tmp_path / "ckpt")
    assert not target.exists()


def test_paths_that_leave_the_folder_are_refused(tmp_path: Path) -> None:
    writer = written(tmp_path)
    for info in writer.metadata.storage_data.values():
        info.relative_path = "../secret"
    (tmp_path / "secret").write_bytes(b"x" * 100_000)
    with pytest.raises(ReshardError, match="secret"):
        open_checkpoint(writer.write(tmp_path / "ckpt"))["w"][...]


def test_objects_that_are_not_plain_stay_records(tmp_path: Path) -> None:
    import collections

    writer = DcpWriter({"w": grid(W, 1)}, {"o": {"d": collections.OrderedDict(a=torch.ones(2)), "dt": torch.float16}})
    value = open_checkpoint(writer.write(tmp_path)).objects["o"]

    assert value["dt"] is torch.float16
    assert same(value["d"]["a"], torch.ones(2))


def test_compressed_items(tmp_path: Path) -> None:
    """They are decoded whole, checked for damage, and never into more memory than the tensor may need."""
    zstandard = pytest.importorskip("zstandard")
    for change, message in (
        (lambda data: data, ""),
        (lambda data: data[:-5], r"__0_0.distcp, bytes \[0, \d+\): a zstd item is truncated"),
        (lambda data: b"rubbish" + data, r"__0_0.distcp, bytes \[0, \d+\): a zstd item is damaged"),
        (lambda data: zstandard.compress(b"\0" * (1 << 29)), "more than the"),
    ):
        writer = DcpWriter({"w": [((0, 0), W)]}, files=1)
        (info,) = writer.metadata.storage_data.values()
        item = change(zstandard.compress(archive(W)))
        writer.data["__0_0.distcp"][:] = item
        info.offset, info.length, info.transform_descriptors = 0, len(item), ["stream.zstd/1"]
        checkpoint = open_checkpoint(writer.write(tmp_path))
        if message:
            with pytest.raises(CorruptCheckpointError, match=message):
                checkpoint["w"][...]
        else:
            check_all(checkpoint, {"w": W})


def test_unknown_transforms_are_named(tmp_path: Path) -> None:
    writer = written(tmp_path)
    for info in writer.metadata.storage_data.values():
        info.transform_descriptors = ["stream.rot13/1"]
    with pytest.raises(FormatError, match=r"tensor 'w'.*stream.rot13/1"):
        open_checkpoint(writer.write(tmp_path))["w"][...]


def test_a_key_that_is_placed_elsewhere_is_damage(tmp_path: Path) -> None:
    """A conversion of it could not be opened."""
    writer = written(tmp_path)
    writer.metadata.planner_data = {"w": ("v",)}
    with pytest.raises(CorruptCheckpointError, match=r".metadata: .* places 'w' at \('v',\)"):
        open_checkpoint(writer.write(tmp_path))


@pytest.mark.parametrize("change", ["offset", "file", "twice", "stray"])
def test_items_are_apart_and_belong_to_one_name_each(change: str, tmp_path: Path) -> None:
    """An item of another tensor has its own checksum, which is right, and may have the same shape and dtype."""
    tensors = {name: [((), torch.tensor(value))] for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0))}
    writer = DcpWriter(tensors, {})
    a, b, c = (writer.metadata.storage_data[MetadataIndex(name, ())] for name in "abc")
    if change == "offset":
        a.offset = b.offset
    elif change == "file":
        c.relative_path = a.relative_path
        c.offset = a.offset
    elif change == "twice":
        del writer.metadata.state_dict_metadata["b"]
        next(at for at in writer.metadata.storage_data if at.fqn == "b").__dict__["fqn"] = "a"
    else:
        del writer.metadata.state_dict_metadata["b"]
    expected = {"twice": "it stores 'a' twice", "stray": "where 'b' is stored, but not what"}
    with pytest.raises(CorruptCheckpointError, match=expected.get(change, "are both at byte")):
        open_checkpoint(writer.write(tmp_path))


@pytest.mark.parametrize("moved", ["c", "d"])
def test_tied_tensors_are_one_item_but_no_other_item_is_without_a_name(moved: str, tmp_path: Path) -> None:
    """Of `moved`, c is in the file of the tied ones, and d in another."""
    tied = torch.ones(6)
    saved = {"a": tied, "b": tied} | {name: torch.full((6,), float(ord(name))) for name in "cde"}
    reshard.save(saved, tmp_path / "n")
    convert(tmp_path / "n", tmp_path / "c", format="dcp", max_shard_bytes=48)
    checkpoint = open_checkpoint(tmp_path / "c")
    assert all(torch.equal(checkpoint[name][...], tensor) for name, tensor in saved.items())

    metadata = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    of = {at.fqn: at for at in metadata.storage_data}
    items = {name: metadata.storage_data[at] for name, at in of.items()}
    assert (items["a"].relative_path, items["a"].offset) == (items["b"].relative_path, items["b"].offset)
    assert (items["a"].relative_path == items[moved].relative_path) == (moved == "c")
    metadata.storage_data[of[moved]] = items["a"]
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpointError, match="are both at byte"):
        open_checkpoint(tmp_path / "c")


def test_a_shape_that_no_tensor_can_have_is_damage(tmp_path: Path) -> None:
    """To list its windows would take all memory."""
    writer = written(tmp_path)
    writer.metadata.state_dict_metadata["w"].size = torch.Size([1 << 40, 1 << 40])
    checkpoint = open_checkpoint(writer.write(tmp_path))
    calls: list[Any] = [lambda: checkpoint["w"], lambda: fingerprint(checkpoint)]
    calls.append(lambda: convert(checkpoint, tmp_path / "made", format="torch_save"))
    for call in calls:
        with pytest.raises(CorruptCheckpointError, match=r"'w': its entry in .metadata is malformed: .* 2\*\*63 bytes"):
            call()
    assert "2**63" in str(verify(checkpoint))


@pytest.mark.parametrize("value", [[], None, {"a": 1}, "text", b""])
def test_metadata_that_is_something_else(tmp_path: Path, value: Any) -> None:
    written(tmp_path).write(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(value))
    with pytest.raises(CorruptCheckpointError, match="Metadata, found"):
        open_checkpoint(tmp_path)


def test_a_dtype_that_this_torch_lacks_hides_no_other_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "float8_e8m0fnu", raising=False)
    monkeypatch.delitem(dtypes.BY_NAME, "float8_e8m0fnu", raising=False)
    checkpoint = open_checkpoint(sample("dcp_misc_single/ckpt"))
    assert checkpoint["fp8_e8m0"].shape == (3,)
    with pytest.raises(FormatError, match=r"fp8_e8m0.*float8_e8m0fnu.*does not have it"):
        checkpoint["fp8_e8m0"][...]
    assert all(checkpoint[key][...].shape == checkpoint[key].shape for key in checkpoint if key != "fp8_e8m0")


@pytest.mark.parametrize(
    "name",
    [
        *("dcp_sharded_tensor_w2", "dcp_zstd_w2"),
        pytest.param("dcp_misc_single", marks=requires(HAS_E8M0, "lacks a dtype of this sample")),
    ],
)
def test_samples_of_the_repository(name: str) -> None:
    """Checkpoints as torch 2.13 wrote them: uneven grids, compressed items, every dtype and stride."""
    wanted = truth(name)
    checkpoint = open_checkpoint(sample(name) / "ckpt")

    prefix = "model." if name == "dcp_sharded_tensor_w2" else ""
    check_all(checkpoint, {prefix + k: v for k, v in wanted["model"].items()})


def test_fuzzed_files_give_clear_errors_only(tmp_path: Path) -> None:
    """Bytes changed or cut anywhere: an error of ours, or what is stored; never another exception."""
    writer = written(tmp_path)
    folder = writer.write(tmp_path)
    original = {path: path.read_bytes() for path in folder.iterdir()}
    rng = random.Random(0)
    refused = 0
    for turn in range(400):
        path = rng.choice(sorted(original))
        data = bytearray(original[path])
        if turn % 4 == 0:
            data = data[: rng.randrange(len(data))]
        else:
            for _ in range(rng.randint(1, 3)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        try:
            read_everything(folder)
        except ReshardError:
            refused += 1
        path.write_bytes(original[path])
    assert refused > 100


@pytest.mark.filterwarnings("ignore")  # torch's own writer warns about many things
@pytest.mark.parametrize(
    "saved",
    [
        [{"a": 1}, {}, {"b": 2}],
        [{}, {"a": 1}, {}],
        [{"x": [{}, {"y": 1}, {}, {}]}, {}, 3],
        [{"a": 1}, [], {"q": {}}, {"b": 2}],
        {"k": [{}, {"z": 1}], "3": ({}, 1)},
        [torch.ones(2), {}, torch.ones(3)],
    ],
)
def test_empty_dicts_in_lists_that_torch_leaves_out_keep_their_places(tmp_path: Path, saved: Any) -> None:
    """Items after them do not move up."""
    save_alone({"it": saved}, checkpoint_id=tmp_path / "saved")
    live = {"it": copy.deepcopy(saved)}
    assert reshard.load(live, tmp_path / "saved").ok
    assert same(live["it"], saved)
    convert(tmp_path / "saved", tmp_path / "native", format="native")
    nested = reshard.open(tmp_path / "native").nested()["it"]
    assert isinstance(nested, dict) or len(nested) >= len(saved) - 1  # those at the end are not known


def test_an_item_of_a_list_at_a_claimed_place_far_away_is_no_burden(tmp_path: Path) -> None:
    writer = DcpWriter({f"l.{i}": grid(W, 1, 1) for i in (3, 1 << 60)}, {})
    writer.metadata.planner_data = {f"l.{i}": ("l", i) for i in (3, 1 << 60)}
    writer.write(tmp_path)
    assert len(open_checkpoint(tmp_path).nested()["l"]) < 2000


def test_a_file_that_reshard_wrote_is_no_checkpoint_without_metadata(tmp_path: Path) -> None:
    """By a conversion, or by `reshard.dcp` into a folder of an older save: their names have an id."""
    reshard.save({"w": W}, tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "dcp", format="dcp")
    for _ in range(2):
        reshard.dcp.save({"w": W}, checkpoint_id=tmp_path / "again", no_dist=True)
    for folder in (tmp_path / "dcp", tmp_path / "again"):
        (folder / ".metadata").unlink()
        (file,) = folder.iterdir()
        assert len(file.stem.split("_")) == 5
        with pytest.raises(CorruptCheckpointError, match=r"there are .distcp files, but no .metadata"):
            open_checkpoint(folder)
        assert not verify(folder).ok
