"""The engine on several real processes: what ranks may differ in, and how one rank's trouble reaches all."""

from __future__ import annotations

import glob
import os

import pytest
import torch

import reshard
from reshard.api.load import own_values
from reshard.ranks.group import Group
from reshard.stored.tensor import LazyTensor
from tests import gloo
from tests.stories import engine_jobs as jobs

pytestmark = pytest.mark.gloo


def test_values_that_differ_between_ranks_are_an_error_on_all(tmp_path):
    for plain, objects, shapes, drifted, trusted in gloo.run(jobs.differing_values, 4, str(tmp_path)):
        assert plain[0] == "ReplicaDriftError"
        assert "'a.plain' (rank 0 / rank 1 / rank 2 / rank 3)" in plain[1]
        assert "PerRank" in plain[1]
        assert objects[0] == "ReplicaDriftError"
        assert shapes[0] == "LayoutError"
        assert "'shape'" in shapes[1]
        assert drifted[0] == "ReplicaDriftError"
        assert "'drifted'" in drifted[1]
        assert trusted[0] == ""
    assert not glob.glob(f"{tmp_path}/[1234]/manifest.json")


def test_per_rank_values_are_kept_and_follow_their_rule(tmp_path):
    path = str(tmp_path / "c")
    gloo.run(jobs.per_rank_values, 3, path)

    for result in gloo.run(jobs.load_per_rank, 3, path):
        assert result["default"] == ""
        assert result["rng"] == [result["rank"]] * 3
    for result in gloo.run(jobs.load_per_rank, 2, path):
        assert result["default"] == "KeyMismatchError"
        assert result["rng"] == [result["rank"]] * 3
        assert result["position"] == [[0, 2], [1]][result["rank"]]
    assert "rng@rank0" not in reshard.open(path)


def test_a_value_of_one_rank_alone_comes_back_to_it(tmp_path):
    first, second, third = gloo.run(jobs.rank_0_s_own, 3, str(tmp_path / "c"))
    assert first == "run 7"
    for refused in (second, third):
        assert "'name' was saved per rank by 1 of 3 ranks, but this is rank " in refused[1]


def test_own_values_are_read_by_their_owners_alone(tmp_path, monkeypatch):
    path = str(tmp_path / "c")
    gloo.run(jobs.per_rank_values, 3, path)
    asked = []
    read = LazyTensor.__getitem__
    monkeypatch.setattr(LazyTensor, "__getitem__", lambda self, at: asked.append(1) or read(self, at))
    own = own_values({"rng": reshard.PerRank(on_change="keep")}, {"rng": "rng"}, reshard.open(path), Group())
    assert own["rng"].value.tolist() == [0] * 3
    assert len(asked) == 1


def test_ranks_that_would_cut_their_slabs_differently_save_nothing(tmp_path):
    for kind, words, _ in gloo.run(jobs.slabs_of_different_sizes, 2, str(tmp_path / "c")):
        assert kind == "LayoutError"
        assert "divide_above_bytes: 100 on rank 0, 1000 on rank 1" in words
    assert not list(tmp_path.rglob("*.json"))


def test_ranks_may_hold_other_keys_and_groups_the_same_twice(tmp_path):
    results = gloo.run(jobs.stages, 4, str(tmp_path / "c"))

    for result in results:
        assert result["equal"]
        assert result["shared"] == 5
    assert sum(r["written"] for r in results) == results[0]["total"] == 5 * 240 + 8
    assert reshard.open(tmp_path / "c").objects["optim.stage2.lr"] == pytest.approx(0.3)


def test_fewer_ranks_leave_no_files_of_the_others_behind(tmp_path):
    path = str(tmp_path / "c")
    gloo.run(jobs.shrunk, 4, path)
    gloo.run(jobs.shrunk, 2, path)

    assert len(glob.glob(f"{path}/data-*/*.safetensors")) == 2
    assert jobs.load_whole(path) == (jobs.W + 2).reshape(-1).tolist()


@pytest.mark.parametrize(
    ("how", "mine", "others", "text"),
    [
        ("unsavable", "FormatError", "RankFailedError", "'bad'"),
        ("missing key", "KeyMismatchError", "KeyMismatchError", "mystery   (rank 1)"),
        ("other folder", "StorageError", "RankFailedError", "to a folder that they share"),
    ],
)
def test_one_rank_s_trouble_reaches_all(how, mine, others, text, tmp_path):
    results = gloo.run(jobs.one_rank_fails, 3, str(tmp_path / "c"), how)

    assert results[1][0] == mine
    assert results[0][0] == others
    for kind, message, seconds in results:
        assert kind
        assert text in message
        assert seconds < gloo.SOON_S
    assert how == "missing key" or not glob.glob(f"{tmp_path}/c*/manifest.json")


@pytest.mark.parametrize("how", ["exits", "sleeps"])
def test_a_rank_that_is_gone_is_named_within_the_deadline(how, tmp_path):
    ends = gloo.outcomes(jobs.one_rank_fails, 3, str(tmp_path / "c"), how)

    for end in (ends[0], ends[2]):
        kind, message, seconds = end.value
        assert kind in ("DeadlineError", "RankFailedError")
        assert "1" in message
        assert seconds < 9
    assert not glob.glob(f"{tmp_path}/c/manifest.json")


def test_a_checkpoint_of_many_ranks_reads_on_one(tmp_path):
    path = str(tmp_path / "c")
    gloo.run(jobs.shrunk, 4, path)

    checkpoint = reshard.open(path)

    assert torch.equal(checkpoint["w"][3:8, ::2], (jobs.W + 4)[3:8, ::2])
    assert checkpoint.layout.world_size == 4
    assert reshard.verify(path).ok
    assert os.path.exists(f"{path}/manifest.json")


def test_a_key_is_unexpected_only_if_no_rank_wants_it(tmp_path):
    results = gloo.run(jobs.strict_stages, 3, str(tmp_path / "c"))

    for strict, loose in results:
        assert strict[0] in ("KeyMismatchError", "RankFailedError")
        assert "layer2.w" in strict[1]
        assert loose[0] == ""
    assert results[0][0][0] == "KeyMismatchError"
    assert "1 unexpected" in results[0][0][1]


def test_sharded_tensors_arrive_in_every_layout(tmp_path):
    for result in gloo.run(jobs.flat_sharded, 3, str(tmp_path / "c")):
        assert all(result.values()), result
