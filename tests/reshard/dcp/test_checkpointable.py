"""Values that say themselves, by torch's protocol, which parts of a tensor they hold; and planners with own plans."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.distributed.checkpoint as theirs
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

import reshard.dcp as ours
from reshard.errors import LayoutError
from tests import gloo
from tests.reshard.dcp import jobs

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),  # by the writer of torch 2.6
]


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
    theirs.save({"w": WHOLE}, checkpoint_id=tmp_path)
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
        side.save(state, checkpoint_id=tmp_path / str(value), planner=save)
        target = {"w": torch.zeros(2, 3), "s": torch.tensor(0.0), "n": {"list": [0.0]}}
        side.load(target, checkpoint_id=tmp_path / str(value), planner=load)

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


def placed(local, parts, shape=(5, 3)):
    """A local tensor with parts of a global one: (where there, where here, sizes)."""
    local.global_shape = shape
    local.global_offsets, local.local_offsets, local.local_sizes = (tuple(side) for side in zip(*parts))
    return local


def in_parts():
    """Rows 3 to 4 lie before rows 0 to 2, between paddings."""
    local = torch.full((7, 4), -1.0)
    local[1:3, :3], local[3:6, :3] = WHOLE[3:], WHOLE[:3]
    return placed(local, [((3, 0), (1, 0), (2, 3)), ((0, 0), (3, 0), (3, 3))])


KNOWS = importlib.util.find_spec("torch.distributed.checkpoint.protocol") is not None
NEWER = pytest.param(theirs, id="torch", marks=[] if KNOWS else pytest.mark.skip(reason="torch before 2.15 cannot"))


@pytest.mark.parametrize("saver", [pytest.param(ours, id="ours"), NEWER])
@pytest.mark.parametrize("loader", [pytest.param(ours, id="ours"), NEWER])
def test_plain_tensors_that_say_where_their_parts_are(tmp_path, saver, loader):
    assert isinstance(in_parts(), ours.CheckpointableTensor)
    saver.save({"n": {"w": in_parts()}, "k": 3}, checkpoint_id=tmp_path, no_dist=True)
    whole, parts = torch.zeros(5, 3), placed(torch.zeros(6, 3), [((1, 0), (0, 0), (4, 3)), ((0, 0), (5, 0), (1, 3))])

    loader.load({"n": {"w": whole}}, checkpoint_id=tmp_path, no_dist=True)
    loader.load({"n": {"w": parts}}, checkpoint_id=tmp_path, no_dist=True)

    assert torch.equal(whole, WHOLE)
    assert torch.equal(parts, torch.cat([WHOLE[1:], torch.zeros(1, 3), WHOLE[:1]]))


def test_they_say_so_in_the_background_too(tmp_path):
    ours.async_save({"w": in_parts()}, checkpoint_id=tmp_path).result()
    ours.load({"w": (whole := torch.zeros(5, 3))}, checkpoint_id=tmp_path)
    assert torch.equal(whole, WHOLE)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([((3, 0), (1, 0), (4, 3))], r"is not within"),
        ([((0, 0), (5, 0), (3, 3))], r"is not within"),
        ([((0,), (0, 0), (3, 3))], r"and \(5, 3\) differ in the number of dims"),
        ([((0, 0), (0, 0), (3, 3))], r"would not be saved completely"),
        ([((0, 0), (0, 0), (5, 3)), ((1, 0), (0, 0), (1, 3))], r"would not be saved completely"),
    ],
)
def test_what_they_say_is_checked(tmp_path, parts, words):
    with pytest.raises(LayoutError, match=words):
        ours.save({"w": placed(torch.zeros(7, 4), parts)}, checkpoint_id=tmp_path)


def test_a_part_too_many_and_another_size_are_refused(tmp_path):
    wrong = in_parts()
    wrong.local_sizes = wrong.local_sizes[:1]
    with pytest.raises(LayoutError, match="2 global_offsets, 2 local_offsets, 1 local_sizes"):
        ours.save({"w": wrong}, checkpoint_id=tmp_path)
    ours.save({"w": in_parts()}, checkpoint_id=tmp_path)
    with pytest.raises(ValueError, match=r"Size mismatch between saved torch.Size\(\[5, 3\]\) and current: .*9, 3"):
        ours.load({"w": placed(torch.zeros(9, 3), [((0, 0), (0, 0), (9, 3))], (9, 3))}, checkpoint_id=tmp_path)


def test_storages_over_fsspec_have_a_public_name(tmp_path):
    pytest.importorskip("fsspec")
    from reshard.dcp.fsspec_filesystem import FsspecReader, FsspecWriter

    assert (ours.FsspecReader, ours.FsspecWriter) == (FsspecReader, FsspecWriter)
    ours.save({"w": WHOLE}, storage_writer=FsspecWriter(f"file://{tmp_path}/c"))
    ours.load({"w": (whole := torch.zeros(5, 3))}, storage_reader=FsspecReader(f"file://{tmp_path}/c"))
    assert torch.equal(whole, WHOLE)
    with pytest.raises(RuntimeError, match="Cannot detect which storage to use: unknown scheme 'abc'"):
        ours.save({"w": WHOLE}, checkpoint_id="abc://abc.abc")
