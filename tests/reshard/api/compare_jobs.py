"""What the processes of `test_compare_sharded` do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard

import reshard
from reshard.api import compare
from reshard.errors import DeadlineError, LayoutError, ReshardError
from tests.reshard.api.live_layouts import EVERY, LAYOUTS, SHAPES, local, numbers, placed, truth

NBYTES = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in SHAPES.values())


def told(report: Any) -> Any:
    """All of a report, for comparison with that of other ranks."""
    return [str(finding) for finding in report.findings], str(report.covered), report.covers, report.tensors


def compared(path: str) -> list[Any]:
    """Compare each layout with the checkpoint: as it is, and after one rank changed its last element of `w`."""
    out, world = [], dist.group.WORLD
    for name, (ranks, build) in LAYOUTS.items():
        state = build(truth())
        report = reshard.compare(path, state, process_group=world)
        assert report.ok, (name, report)
        assert report.covered is not None
        assert report.covered.read_bytes == report.covered.total_bytes == NBYTES, (name, report.covered)
        for changing in (ranks[0], ranks[-1]):
            state = build(truth())
            ids = local(build(numbers())["w"]) if "w" in state else torch.zeros(0)
            changes = dist.get_rank() == changing and ids.numel() > 0
            if changes:
                local(state["w"]).reshape(-1).view(torch.int32)[-1] ^= 1
            report = reshard.compare(state, path, process_group=world)
            told_by_all: list[Any] = [None] * 8
            element = tuple(map(int, np.unravel_index(int(ids.reshape(-1)[-1]), (13, 10)))) if changes else None
            dist.all_gather_object(told_by_all, (told(report), element))
            assert all(one == told_by_all[0][0] for one, _ in told_by_all), (name, told_by_all)
            out.append((name, changing, told_by_all[changing][1], report.findings))
    return out


def others(path: str) -> None:
    """Keys, objects, values of each rank, measures, and what cannot be compared."""
    rank, world = dist.get_rank(), dist.group.WORLD
    mesh = [Shard(0)]
    full = truth()
    full["w"] = torch.arange(130.0).view(13, 10)
    state = {
        "model": placed(full, EVERY, (8,), mesh),
        "lr": 0.1,
        "rng": reshard.PerRank(torch.arange(3) + rank),
    }
    reshard.save(state, path)
    assert reshard.compare(path, state).ok  # sharded, so all ranks take part by themselves
    assert reshard.compare(dict(reshard.open(path).objects), {"lr": 0.1}).ok  # and these do not

    state["lr"] = 0.1 + (rank == 5)
    state["rng"] = reshard.PerRank(torch.arange(3) + rank + (rank == 3))
    if rank == 2:
        state["more"] = torch.ones(2)
    del state["model"]["b"]
    found = {finding.fqn: finding for finding in reshard.compare(path, state).findings}
    assert found.keys() == {"lr", "rng", "more", "model.b"}, found
    assert "1.1 in the state dict" in found["lr"].message
    assert "on rank 3" in found["rng"].message
    assert found["more"].message == "only in the state dict"
    assert found["model.b"].message == f"only in {path}"

    del state["rng"]
    report = reshard.compare(path, state if rank == 3 else {**state, "rng": reshard.PerRank(torch.arange(3) + rank)})
    (found["rng"],) = [finding for finding in report.findings if finding.fqn == "rng"]
    assert found["rng"].message == f"has values of ranks 0-7 in {path}, of ranks 0-2, 4-7 in the state dict"

    halves = [{"w": torch.ones(2), **({"x": 1, "own": reshard.PerRank(1)} if rank == at else {})} for at in (0, 1)]
    found = {finding.fqn: finding for finding in reshard.compare(*halves, process_group=world).findings}
    assert found.keys() == {"x", "own"}, found
    assert found["x"].message == "was not compared: no rank has it on both sides"
    assert found["own"].message == "has values of rank 0 in the first state dict, of rank 1 in the second state dict"

    other = {**full, "w": full["w"] + (torch.arange(130).view(13, 10) % 7 == 3)}
    alone = reshard.compare({"w": full["w"]}, {"w": other["w"]}, measure=True)
    shared = reshard.compare({"w": full["w"]}, {"w": placed(other, EVERY, (8,), mesh)["w"]}, measure=True)
    assert alone.measures is not None
    assert shared.measures is not None
    assert shared.measures["w"].differing == alone.measures["w"].differing
    assert shared.measures["w"].largest == alone.measures["w"].largest
    assert shared.findings[0].message == alone.findings[0].message
    assert shared.findings[0].element == alone.findings[0].element
    assert reshard.compare(placed(full, EVERY, (8,), mesh), placed(full, EVERY, (8,), mesh)).ok
    with pytest.raises(LayoutError, match=r"'[wb]' is sharded in two ways"):
        reshard.compare(placed(full, EVERY, (8,), mesh), placed(full, EVERY, (8,), [Shard(1)]))
    with pytest.raises(LayoutError, match=r"call reshard\.compare\(path, state\), on all ranks"):
        reshard.verify(path, against=state)
    with pytest.raises(ReshardError, match="different options"):
        reshard.compare(path, placed(full, EVERY, (8,), mesh), atol=float(rank == 1), process_group=world)


def in_several_ways(path: str) -> Any:
    """Two stages have one tensor, and shard it along different dims; then a rank of each changes an element, and then
    one half of each is missing."""
    rank, world = dist.get_rank(), dist.group.WORLD
    halves = dist.new_group([0, 2])
    stage, mesh = rank // 2, [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])][rank // 2]
    part = torch.arange(16.0).view(4, 4).chunk(2, stage)[rank % 2].clone()
    state = {"w": DTensor.from_local(part, mesh, [Shard(stage)])}
    reports = [reshard.compare(path, state, process_group=world, measure=True)]
    if not rank % 2:
        reports.append(reshard.compare(path, state, process_group=halves))
        part[0, 0] += 1
    reports.insert(1, reshard.compare(path, state, process_group=world, measure=True))
    return reports


def a_drifted_copy(path: str) -> Any:
    """Of eight copies of a tensor, one differs."""
    state = placed({"w": torch.ones(4, 4)}, EVERY, (8,), [Replicate()])
    reshard.save(state, path)
    if dist.get_rank() == 6:
        local(state["w"])[1, 2] = 5
    return reshard.compare(path, state).findings


def without_process_group(path: str) -> str:
    """Only half of the ranks hold DTensors."""
    mesh = DeviceMesh("cpu", [0, 1])
    state = {"w": DTensor.from_local(torch.ones(2), mesh, [Shard(0)])} if dist.get_rank() < 2 else {"v": torch.ones(2)}
    reshard.save(state, path)
    assert reshard.compare(path, state, process_group=dist.group.WORLD).ok
    if dist.get_rank() > 1:
        return str(reshard.compare(path, state))
    compare.MEETING_S = 1.0
    with pytest.raises(DeadlineError) as caught:
        reshard.compare(path, state)
    return str(caught.value)
