"""Values that say themselves, by torch's protocol, which parts of a tensor they hold; and planners with own plans."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as theirs
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

import reshard.dcp as ours
from tests import gloo
from tests.reshard.dcp import jobs

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Rows(torch.Tensor):
    """All rows of a tensor, as two shards of uneven sizes."""

    @staticmethod
    def __new__(cls, whole, cut):
        made = torch.Tensor._make_wrapper_subclass(cls, whole.size(), dtype=whole.dtype)
        made.shards = {0: whole[:cut].clone(), cut: whole[cut:].clone()}
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(f"{func} is not for shards")

    def __create_chunk_list__(self):
        return [ChunkStorageMetadata(torch.Size([at, 0]), shard.size()) for at, shard in self.shards.items()]

    def __create_write_items__(self, fqn, value):
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, value.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index):
        return self.shards[index.offset[0]]

    def whole(self):
        return torch.cat(list(self.shards.values()))


WHOLE = torch.arange(15.0).view(5, 3)
SIDES = pytest.mark.parametrize("side", [ours, theirs], ids=["ours", "torch"])


@SIDES
@pytest.mark.parametrize("cut", [0, 2, 5])
def test_what_says_itself_what_it_holds_is_saved_and_loaded(tmp_path, side, cut):
    ours.save({"n": {"w": Rows(WHOLE, cut)}}, checkpoint_id=tmp_path)
    target = {"n": {"w": Rows(torch.zeros(5, 3), 3)}}

    side.load(target, checkpoint_id=tmp_path)

    assert torch.equal(target["n"]["w"].whole(), WHOLE)


def test_a_plain_checkpoint_into_shards_of_its_own(tmp_path):
    theirs.save({"w": WHOLE}, checkpoint_id=tmp_path, no_dist=True)
    target = {"w": Rows(torch.zeros(5, 3), 1)}

    ours.load(target, checkpoint_id=tmp_path)

    assert torch.equal(target["w"].whole(), WHOLE)


def test_another_size_is_refused(tmp_path):
    ours.save({"w": Rows(WHOLE, 2)}, checkpoint_id=tmp_path)

    with pytest.raises(ValueError, match="Size mismatch"):
        ours.load({"w": Rows(torch.zeros(4, 3), 2)}, checkpoint_id=tmp_path)


@pytest.mark.gloo
def test_local_shards_in_dtensors(tmp_path):
    for results in gloo.run(jobs.wrapped_shards, 2, str(tmp_path)):
        assert results == {"ours": True, "torch": True, "ours of torch": True, "in the background": True}


class OwnLoad(ours.DefaultLoadPlanner):
    def create_local_plan(self):
        return create_default_local_load_plan(self.state_dict, self.metadata)


class OwnSave(ours.DefaultSavePlanner):
    def create_local_plan(self):
        return create_default_local_save_plan(self.state_dict, self.is_coordinator)


@SIDES
def test_planners_that_make_plans_of_their_own(tmp_path, side):
    load, save = OwnLoad(), OwnSave()
    for value in (1.0, 2.0):
        state = {"w": torch.full((2, 3), value), "s": torch.tensor(value), "n": {"list": [value]}}
        side.save(state, checkpoint_id=tmp_path / str(value), planner=save, no_dist=True)
        target = {"w": torch.zeros(2, 3), "s": torch.tensor(0.0), "n": {"list": [0.0]}}
        side.load(target, checkpoint_id=tmp_path / str(value), planner=load, no_dist=True)

        assert target["w"].tolist() == [[value] * 3] * 2
        assert target["s"].item() == value
        assert target["n"]["list"] == [value]


def test_a_planner_that_is_only_set_up_finds_tensors(tmp_path):
    ours.save({"w": WHOLE, "s": torch.tensor(7.0)}, checkpoint_id=tmp_path)
    metadata = ours.FileSystemReader(tmp_path).read_metadata()
    planner, state = ours.DefaultLoadPlanner(), {"w": torch.zeros(5, 3), "s": torch.tensor(0.0), "r": Rows(WHOLE, 2)}
    planner.set_up_planner(state, metadata)

    assert planner.lookup_tensor(MetadataIndex("w", torch.Size([0, 0]))).data_ptr() == state["w"].data_ptr()
    assert planner.lookup_tensor(MetadataIndex("w")).data_ptr() == state["w"].data_ptr()
    assert planner.lookup_tensor(MetadataIndex("s")) is not None
    assert planner.lookup_tensor(MetadataIndex("r", torch.Size([2, 0]))) is state["r"].shards[2]
    with pytest.raises(ValueError, match="nowhere"):
        planner.lookup_tensor(MetadataIndex("nowhere"))
