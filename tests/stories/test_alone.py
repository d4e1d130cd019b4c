"""One rank of a running job saves and loads by itself; what it does not hold whole is refused, never left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import reshard
from tests import gloo
from tests.stories.engine_jobs import caught

pytestmark = pytest.mark.gloo


def by_itself(folder: str) -> dict[str, Any]:
    """All ranks save together; then rank 1 saves and loads while rank 0 takes no part."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    cut = distribute_tensor(torch.arange(12.0).reshape(6, 2), mesh, [Shard(0)])
    whole = distribute_tensor(torch.arange(6.0), mesh, [Replicate()])
    reshard.save({"cut": cut, "own": reshard.PerRank(rank)}, f"{folder}/all")
    out: dict[str, Any] = {}
    if rank == 1:
        state = {"plain": torch.full((2,), 3.0), "whole": whole, "own": reshard.PerRank("mine"), "lr": 0.1}
        out["report"] = reshard.save(state, f"{folder}/one", alone=True).total_bytes
        reshard.async_save({"plain": torch.ones(1)}, f"{folder}/later", alone=True).result()
        out["cut True"] = caught(lambda: reshard.save({"cut": cut}, f"{folder}/bad", alone=True))
        out["cut False"] = caught(lambda: reshard.save({"cut": cut}, f"{folder}/bad", alone=True, fingerprints=False))
        target = {"plain": torch.zeros(2), "whole": torch.zeros(6), "own": reshard.PerRank(), "lr": 0.0}
        reshard.load(target, f"{folder}/one", alone=True)
        out["loaded"] = target["plain"].tolist(), target["whole"].tolist(), target["own"].value, target["lr"]
        blank = DTensor.from_local(torch.zeros_like(cut.to_local()), mesh, [Shard(0)], run_check=False)
        mine = {"cut": blank, "own": reshard.PerRank()}
        reshard.load(mine, f"{folder}/all", alone=True, read_once=True)
        out["shard"] = torch.equal(blank.to_local(), cut.to_local()), mine["own"].value
        out["both"] = caught(lambda: reshard.load(mine, f"{folder}/all", alone=True, process_group=dist.group.WORLD))
    dist.barrier()
    return out


def test_one_rank_saves_and_loads_while_the_others_do_something_else(tmp_path):
    _, found = gloo.run(by_itself, 2, str(tmp_path))
    assert found["report"] == 2 * 4 + 6 * 4
    assert found["loaded"] == ([3.0, 3.0], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], "mine", 0.1)
    assert found["shard"] == (True, 1)
    for prints in (True, False):
        kind, text, _ = found[f"cut {prints}"]
        assert kind == "LayoutError"
        assert "'cut'" in text
        assert "must save together" in text
    assert not Path(tmp_path / "bad").exists()
    assert found["both"][0] == "OptionError"
    assert reshard.open(tmp_path / "one")["plain"][...].tolist() == [3.0, 3.0]
    assert reshard.verify(tmp_path / "later").ok


def a_part(folder: str) -> tuple[str, str, float]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cut = distribute_tensor(torch.arange(12.0).reshape(6, 2), mesh, [Shard(0)])
    group = dist.new_group([0, 1])
    done = ("", "", 0.0)
    if dist.get_rank() < 2:
        done = caught(lambda: reshard.save({"cut": cut}, folder, process_group=group, fingerprints=False))
    dist.barrier()
    return done


def test_some_of_the_ranks_that_hold_a_tensor_cannot_save_it(tmp_path):
    first, second, third = gloo.run(a_part, 3, str(tmp_path / "c"))
    for kind, text, _ in (first, second):
        assert kind == "LayoutError"
        assert "element (4, 0)" in text
    assert third[0] == ""
    assert not (tmp_path / "c").exists()
