"""Planners that keep their plans, and readers and writers of Hugging Face's files, from torch, mixed with ours."""

from __future__ import annotations

import inspect
import json
import pickle
import uuid
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as theirs
from safetensors.torch import save_file
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner

import reshard
import reshard.dcp as ours
from planners import Box, TensorSpec
from reshard.errors import CorruptCheckpointError, StorageError, UnsafeDataError
from reshard.formats.dcp.writer import tensor_metadata
from tests.torch_releases import load_alone, save_alone

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
BOTH = pytest.mark.parametrize("saver", [ours, theirs], ids=["ours", "theirs"])


@pytest.fixture
def keeping_planner():
    """A planner of torch's that keeps its plans, in a table of the class."""
    tables = [value for name, value in vars(SavePlanner).items() if name.startswith("_cached_")]
    if not tables:
        pytest.skip("this torch keeps no plans")
    for table in tables:
        table.clear()
    yield lambda: theirs.DefaultSavePlanner(enable_plan_caching=True)
    for table in tables:
        table.clear()


def loaded(path, like):
    target = {"w": torch.zeros_like(like["w"]), "step": 0}
    ours.load(target, checkpoint_id=path, no_dist=True)
    again = {"w": torch.zeros_like(like["w"]), "step": 0}
    load_alone(again, checkpoint_id=path)
    assert torch.equal(target["w"], again["w"])
    assert target["step"] == again["step"]
    return target


@BOTH
@pytest.mark.parametrize("one_folder", [False, True])
def test_a_planner_that_keeps_its_plans(tmp_path, saver, keeping_planner, one_folder):
    for step in range(4):
        path = tmp_path / ("here" if one_folder else str(step))
        state = {"w": torch.full((4, 3), float(step)), "step": step}
        saver.save(state, storage_writer=ours.FileSystemWriter(path), planner=keeping_planner(), no_dist=True)
        found = loaded(path, state)
        assert found["step"] == step
        assert torch.equal(found["w"], state["w"])
        assert len(list(path.glob("*.distcp"))) == 1


def test_a_kept_plan_never_writes_into_files_of_the_checkpoint_before(tmp_path, keeping_planner):
    def save(value, planner, at):
        ours.save({"w": value, "step": 1}, storage_writer=ours.FileSystemWriter(at), planner=planner, no_dist=True)

    class Stops(theirs.DefaultSavePlanner):
        def resolve_data(self, write_item):
            if write_item.index.fqn == "w":
                return super().resolve_data(write_item)
            raise RuntimeError("killed here")

    broken = Stops(enable_plan_caching=True)
    broken._cached_plans_key = keeping_planner()._cached_plans_key
    save(torch.ones(3), keeping_planner(), tmp_path)
    with pytest.raises(RuntimeError, match="killed here"):
        save(torch.zeros(3), broken, tmp_path)
    assert loaded(tmp_path, {"w": torch.zeros(3)})["w"].tolist() == [1, 1, 1]
    assert reshard.verify(tmp_path).ok


class Ranked(ours.FileSystemWriter):
    """Is told another rank than the one process of the test has."""

    def __init__(self, path, rank):
        super().__init__(path)
        self.told = rank

    def set_up_storage_writer(self, is_coordinator, *args, **kwargs):
        super().set_up_storage_writer(is_coordinator, *args, **{**kwargs, "rank": self.told})


@pytest.mark.skipif("use_collectives" not in inspect.signature(theirs.save).parameters, reason="a newer torch can")
def test_our_writer_where_each_rank_saves_for_itself(tmp_path):
    def save(rank, value):
        state = {"w": torch.full((3,), value), "step": 1}
        save_alone(state, storage_writer=Ranked(tmp_path, rank), use_collectives=False)
        return pickle.loads((tmp_path / f"__{rank}.metadata").read_bytes())

    for value in (1.0, 2.0):
        ranks = [save(rank, value + rank) for rank in range(2)]
    assert not (tmp_path / ".metadata").exists()
    files = [{place.relative_path for place in metadata.storage_data.values()} for metadata in ranks]
    assert all(name.startswith(f"__{rank}_") for rank in range(2) for name in files[rank])
    assert {path.name for path in tmp_path.glob("*.distcp")} == files[0] | files[1]
    target = {"w": torch.zeros(3), "step": 0}
    load_alone(target, checkpoint_id=tmp_path)
    assert target["w"].tolist() == [2, 2, 2]


@pytest.mark.skipif("use_collectives" not in inspect.signature(theirs.save).parameters, reason="a newer torch can")
def test_ranks_for_themselves_never_save_beside_a_checkpoint_of_all(tmp_path):
    ours.save({"w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(StorageError, match="loads would read instead"):
        theirs.save(
            {"w": torch.zeros(3)},
            storage_writer=ours.FileSystemWriter(tmp_path),
            no_dist=True,
            use_collectives=False,
        )
    assert reshard.open(tmp_path)["w"][...].tolist() == [1, 1, 1]


@BOTH
def test_hugging_face_files_by_torchs_writer_and_reader(tmp_path, saver):
    hf = pytest.importorskip("torch.distributed.checkpoint.hf_storage")
    state = {"a.weight": torch.randn(5, 8), "b": torch.randn(16).bfloat16()}
    writer = hf.HuggingFaceStorageWriter(str(tmp_path), fqn_to_index_mapping={"a.weight": 1, "b": 2})
    saver.save(state, storage_writer=writer, no_dist=True)
    for load in (theirs.load, ours.load):
        for planner in (None, theirs.DefaultLoadPlanner(), ours.DefaultLoadPlanner()):
            target = {key: torch.zeros_like(value) for key, value in state.items()}
            reader = hf.HuggingFaceStorageReader(str(tmp_path), thread_count=2)
            load(target, storage_reader=reader, planner=planner, no_dist=True)
            assert all(torch.equal(target[key], state[key]) for key in state)
    assert torch.equal(reshard.open(tmp_path)["a.weight"][1:3], state["a.weight"][1:3])


def test_a_reader_that_opens_the_metadata_itself(tmp_path):
    """As those of slime and mbridge, which replace Megatron's classes in it."""

    class Reader(ours.FileSystemReader):
        def read_metadata(self):
            with self.fs.create_stream(self.fs.concat_path(self.path, ".metadata"), "rb") as file:
                metadata = pickle.load(file)
            metadata.storage_meta.load_id = self.load_id
            return metadata

    ours.save({"w": torch.ones(3), "n": 2}, checkpoint_id=tmp_path, no_dist=True)
    for load in (theirs.load, ours.load):
        load(target := {"w": torch.zeros(3), "n": 0}, storage_reader=Reader(tmp_path), no_dist=True)
        assert target["w"].tolist() == [1, 1, 1]
        assert target["n"] == 2


def quantized(folder, tensors):
    save_file(tensors, folder / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    module = pytest.importorskip("torch.distributed.checkpoint.quantized_hf_storage")
    return module.QuantizedHuggingFaceStorageReader(str(folder))


def test_weights_dequantized_by_torchs_reader(tmp_path):
    weight, scale = torch.randn(256, 200).to(torch.float8_e4m3fn), torch.rand(2, 2)
    reader = quantized(tmp_path, {"l.weight": weight, "l.weight_scale_inv": scale})
    target = {"l.weight": torch.zeros(256, 200)}
    ours.load(target, storage_reader=reader, no_dist=True)
    scales = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :200]
    assert torch.equal(target["l.weight"], weight.float() * scales)


def test_blocks_that_torchs_reader_joins_are_read_whole(tmp_path):
    blocks = torch.randint(0, 256, (4, 6, 2, 16), dtype=torch.uint8)
    scales = torch.randint(120, 130, (4, 6, 2), dtype=torch.uint8)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    pairs = torch.stack([values[(blocks & 15).long()], values[(blocks >> 4).long()]], dim=-1).reshape(4, 6, 2, 32)
    wanted = (pairs * torch.exp2(scales.float() - 127)[..., None]).reshape(4, 6, 64)
    reader = quantized(tmp_path, {"x_blocks": blocks, "x_scales": scales})
    if not hasattr(reader, "_tensor_full_shapes"):
        pytest.skip("this torch joins no blocks")
    target = {"x_blocks": torch.zeros(4, 6, 64)}
    ours.load(target, storage_reader=reader, no_dist=True)
    assert torch.equal(target["x_blocks"], wanted)


def test_chunks_of_another_number_of_dims_are_refused():
    chunks = [torch_metadata.ChunkStorageMetadata(torch.Size([k, 0]), torch.Size([1, 4])) for k in range(2)]
    properties = torch_metadata.TensorProperties(dtype=torch.float32)
    entry = torch_metadata.TensorStorageMetadata(properties, torch.Size([8]), chunks)
    planner = ours.DefaultLoadPlanner()
    planner.set_up_planner({"w": torch.zeros(8)}, torch_metadata.Metadata({"w": entry}), True)
    with pytest.raises(CorruptCheckpointError, match=r"'w' has 1 dims.*its saved chunks have \[2\] dims"):
        planner.create_local_plan()


def test_torch_reads_no_bytes_of_a_native_checkpoint_even_where_they_are_described_to_it(tmp_path):
    """Why no `.metadata` stands beside our manifest: an item must be an archive of `torch.save`."""
    reshard.save({"w": torch.ones(2, 3)}, tmp_path)
    (place,) = [chunk.place for chunk in reshard.open(tmp_path)["w"].stored.chunks]
    file = Path(place.source.label).relative_to(tmp_path)
    metadata = Metadata({"w": tensor_metadata(TensorSpec("w", (2, 3), "float32"), [Box((0, 0), (2, 3))])})
    metadata.storage_data = {MetadataIndex("w", (0, 0)): _StorageInfo(str(file), place.window.offset, 24)}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))

    with pytest.raises(theirs.CheckpointException, match="UnpicklingError"):
        load_alone({"w": torch.zeros(2, 3)}, checkpoint_id=tmp_path)


def test_a_folder_that_was_written_from_other_files_keeps_none_of_them(tmp_path):
    module = pytest.importorskip("reshard.dcp.hf_storage", reason="this torch has no Hugging Face storage")
    state = {"a": torch.ones(4), "b": torch.ones(2)}

    def writer(files):
        return module.HuggingFaceStorageWriter(str(tmp_path), fqn_to_index_mapping=files)

    (tmp_path / "other.safetensors").touch()  # not of this name
    ours.save(state, storage_writer=writer({"a": 1, "b": 2}), no_dist=True)
    ours.save({"a": torch.zeros(4)}, storage_writer=writer({"a": 1}), no_dist=True)

    names = ["model-00001-of-00001.safetensors", "model.safetensors.index.json", "other.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_consolidated_folder_keeps_what_was_there_until_the_new_one_is_whole(tmp_path, monkeypatch):
    module = pytest.importorskip("reshard.dcp.hf_storage", reason="this torch has no Hugging Face storage")

    def save(state, files):
        options = {"save_distributed": True, "enable_consolidation": True, "fqn_to_index_mapping": files}
        ours.save(state, storage_writer=module.HuggingFaceStorageWriter(str(tmp_path), **options), no_dist=True)

    def files():
        return sorted(path.name for path in tmp_path.glob("*.safetensors"))

    def fail(*args, **options):
        raise OSError("no space left")

    save({"a": torch.ones(4), "b": torch.ones(2)}, {"a": 1, "b": 2})
    with monkeypatch.context() as patch:
        patch.setattr(theirs.hf_storage, "consolidate_safetensors_files", fail)
        with pytest.raises(theirs.CheckpointException, match="no space left"):
            save({"a": torch.zeros(4)}, {"a": 1})
    assert files() == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]

    save({"a": torch.zeros(4)}, {"a": 1})
    assert files() == ["model-00001-of-00001.safetensors"]


def test_items_may_have_zeros_for_more_dims_than_there_are():
    target = {"w": torch.zeros(4)}
    planner = ours.DefaultLoadPlanner()
    entry = tensor_metadata(TensorSpec("w", (4,), "float32"), [Box((0,), (4,))])
    planner.set_up_planner(target, Metadata({"w": entry}))

    def item(offsets):
        index, offsets = MetadataIndex("w", torch.Size([0])), torch.Size(offsets)
        return theirs.planner.ReadItem(
            type=theirs.planner.LoadItemType.TENSOR,
            dest_index=index,
            dest_offsets=offsets,
            storage_index=index,
            storage_offsets=offsets,
            lengths=torch.Size([2]),
        )

    planner.resolve_tensor(item([1, 0])).fill_(1)
    assert target["w"].tolist() == [0, 1, 1, 0]
    with pytest.raises(ValueError, match="offsets"):
        planner.resolve_tensor(item([1, 1]))


class Validating(ours.FileSystemReader):
    """Looks up where each item is stored before it is read, as Composer's reader does."""

    def read_data(self, plan, planner):
        self.looked_up = [self.storage_data[item.storage_index] for item in plan.items]
        return super().read_data(plan, planner)


@BOTH
def test_a_reader_of_users_finds_where_items_are_stored(tmp_path, saver):
    saver.save({"w": torch.arange(6.0), "step": 3}, checkpoint_id=tmp_path / "c")
    torchs = theirs.FileSystemReader(tmp_path / "c")
    torchs.set_up_storage_reader(torchs.read_metadata(), True)
    reader, state = Validating(tmp_path / "c"), {"w": torch.zeros(6), "step": 0}
    ours.load(state, storage_reader=reader)
    assert len(reader.looked_up) == 2
    assert {(o.relative_path, o.offset, o.length) for o in reader.looked_up} == {
        (o.relative_path, o.offset, o.length) for o in torchs.storage_data.values()
    }
    assert reader.read_metadata().storage_data.keys() == torchs.storage_data.keys()
    saver.save({"w": torch.arange(9.0)}, checkpoint_id=tmp_path / "d")
    reader.reset(tmp_path / "d")
    assert {at.fqn for at in reader.storage_data} == {"w"}
    reshard.save({"w": torch.arange(6.0)}, tmp_path / "native")
    assert ours.FileSystemReader(tmp_path / "native").storage_data == {}


def test_a_reader_of_users_says_which_object_only_code_can_rebuild(tmp_path):
    save_alone({"id": uuid.UUID(int=3), "took": timedelta(seconds=3)}, checkpoint_id=tmp_path / "c")
    state = {"took": timedelta()}
    ours.load(state, storage_reader=Validating(tmp_path / "c"))
    assert state["took"] == timedelta(seconds=3)
    with pytest.raises(UnsafeDataError, match=r"id: saved as an object of uuid\.UUID, which only code can rebuild"):
        ours.load({"id": uuid.UUID(int=0)}, storage_reader=Validating(tmp_path / "c"))
