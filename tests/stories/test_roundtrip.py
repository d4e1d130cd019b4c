"""Model and AdamW saved by some real processes and loaded by others, bit-exact against the unparallelized truth."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from tests import gloo
from tests.same import assert_same
from tests.stories import roundtrip_jobs as jobs

pytestmark = pytest.mark.gloo

PAIRS = [
    ("fsdp", 4, "plain", 1),  # 4 -> 1
    ("plain", 1, "fsdp", 4),  # 1 -> 4
    ("fsdp", 4, "fsdp", 3),  # uneven, 4 -> 3
    ("fsdp_tp", 4, "fsdp", 3),  # 2D -> 1D
    ("fsdp", 2, "fsdp_tp", 4),  # 1D -> 2D
    ("fsdp_tp", 4, "tp", 2),
    ("tp", 2, "fsdp_tp", 4),
    ("hsdp", 4, "fsdp", 2),  # replicas -> none
    ("ddp", 2, "hsdp", 4),  # copies -> replicas of shards
    ("fsdp_tp", 4, "ddp", 2),
    ("tp", 3, "plain", 1),
    ("fsdp_tp", 4, "fsdp_tp", 4),  # the same
]


@pytest.fixture(scope="module")
def truth():
    return jobs.train_truth()


@pytest.fixture(scope="module")
def saved(truth, tmp_path_factory):
    """A checkpoint of the truth by each source topology, written once."""
    made = {}

    def get(topology, world):
        if (topology, world) not in made:
            path = str(tmp_path_factory.mktemp("saved") / topology)
            reports = gloo.run(jobs.save_job, world, topology, path, truth)
            assert sum(r["written"] for r in reports) == reports[0]["total"]
            made[topology, world] = path
        return made[topology, world]

    return get


@pytest.mark.parametrize(("source", "before", "target", "after"), PAIRS)
def test_state_arrives_bit_exact(source, before, target, after, saved, truth):
    path = saved(source, before)

    results = gloo.run(jobs.load_job, after, target, path)

    for result in results:
        assert_same(result["state"], truth)
        assert result["read"] == result["needed"]


TENSORS = {
    "rows": torch.arange(13 * 6, dtype=torch.float32).reshape(13, 6),
    "flat": torch.arange(7, dtype=torch.int64),
    "one": torch.tensor(3.5),
    "none": torch.empty(0, 4),
    "half": torch.arange(40, dtype=torch.float32).reshape(5, 8).to(torch.bfloat16),
    "bits": torch.tensor([True, False, True]),
}
LAYOUTS = [((4,), [Shard(0)]), ((4,), [Shard(1)]), ((2, 2), [Shard(0), Shard(0)]), ((2, 2), [Shard(1), Shard(0)]),
           ((2, 2), [Replicate(), Shard(0)]), ((4,), [Replicate()])]  # fmt: skip


def save_all(folder, tensors):
    for i, (shape, placements) in enumerate(LAYOUTS):
        jobs.save_tensors(f"{folder}/{i}", tensors, shape, placements)


def load_all(folder, tensors):
    out = []
    for i in range(len(LAYOUTS)):
        for shape, placements in LAYOUTS:
            got, needed, read = jobs.load_tensors(f"{folder}/{i}", tensors, shape, placements)
            out.append((all(torch.equal(got[k], t) for k, t in tensors.items()), needed == read))
    return out


def test_all_pairs_of_six_layouts(tmp_path):
    gloo.run(save_all, 4, str(tmp_path), TENSORS)

    for outcome in gloo.run(load_all, 4, str(tmp_path), TENSORS):
        assert outcome == [(True, True)] * len(LAYOUTS) ** 2
