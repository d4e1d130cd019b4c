"""What the ranks of the multi-process tests of the engine do."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import reshard
from reshard.errors import ReshardError

W = torch.arange(60.0).reshape(10, 6)


def caught(fn: Any) -> tuple[str, str, float]:
    """Type and text of the error that `fn` raises, and after how many seconds."""
    begin = time.monotonic()
    try:
        fn()
    except ReshardError as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", time.monotonic() - begin


def differing_values(path: str) -> list[tuple[str, str, float]]:
    """Saves in which ranks hold different things under one name."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("rep", "shard"))
    drifted = DTensor.from_local(torch.full((2, 2), float(rank)), mesh, [Replicate(), Shard(0)], run_check=False)
    return [
        caught(lambda: reshard.save({"a": {"plain": torch.tensor([rank])}}, f"{path}/1")),
        caught(lambda: reshard.save({"object": rank}, f"{path}/2")),
        caught(lambda: reshard.save({"shape": torch.zeros(rank)}, f"{path}/3")),
        caught(lambda: reshard.save({"drifted": drifted}, f"{path}/4")),
        caught(lambda: reshard.save({"fine": drifted}, f"{path}/5", check_replicas=False)),
    ]


def per_rank_values(path: str) -> None:
    rank = dist.get_rank()
    state = {
        "rng": reshard.PerRank(torch.full((3,), rank, dtype=torch.uint8)),
        "position": reshard.PerRank({"shard": rank, "ids": [rank] * 2}),
        "shared": 7,
    }
    reshard.save(state, path)


def load_per_rank(path: str) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    out: dict[str, Any] = {}
    target = {"rng": reshard.PerRank(), "position": reshard.PerRank(), "shared": 0}
    out["default"] = caught(lambda: reshard.load(target, path))[0]
    kept = {
        "rng": reshard.PerRank(torch.full((3,), 99, dtype=torch.uint8), on_change="keep"),
        "position": reshard.PerRank(on_change=lambda saved, r, w: sorted(v["shard"] for v in saved.values())[r::w]),
        "shared": 0,
    }
    reshard.load(kept, path)
    out["rng"] = kept["rng"].value.tolist()
    out["position"] = kept["position"].value
    out["rank"], out["world"] = rank, world
    return out


def rank_0_s_own(path: str) -> Any:
    """A value that the first rank alone has, saved and loaded by the same ranks."""
    rank = dist.get_rank()
    reshard.save({"w": torch.ones(2), **({"name": reshard.PerRank("run 7")} if rank == 0 else {})}, path)
    target = {"w": torch.zeros(2), **({"name": reshard.PerRank()} if rank == 0 else {})}
    reshard.load(target, path)
    refused = caught(lambda: reshard.load({"w": torch.zeros(2), "name": reshard.PerRank()}, path))
    return target["name"].value if rank == 0 else refused


def slabs_of_different_sizes(path: str) -> tuple[str, str]:
    return caught(lambda: reshard.save({"w": torch.ones(2000)}, path, divide_above_bytes=10 ** (2 + dist.get_rank())))


def stages(path: str) -> dict[str, Any]:
    """Each rank a pipeline stage of its own: other keys, one shared buffer; TP groups that hold the same twice."""
    rank, world = dist.get_rank(), dist.get_world_size()
    grid = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    state: dict[str, Any] = {
        f"stage{rank}.w": W + rank,
        "shared": torch.tensor(5),
        "tp_only": distribute_tensor(W, grid["tp"], [Shard(1)]),
        "optim": {f"stage{rank}": {"lr": 0.1 * (rank + 1)}},
    }
    report = reshard.save(state, path)
    target = {"shared": torch.tensor(0), "tp_only": distribute_tensor(torch.zeros_like(W), grid["dp"], [Shard(0)])}
    loaded = reshard.load(target, path, strict=False)
    return {
        "total": report.total_bytes,
        "written": report.bytes_written,
        "unexpected": len(loaded.unexpected),
        "equal": torch.equal(target["tp_only"].full_tensor(), W),
        "shared": target["shared"].item(),
    }


def shrunk(path: str) -> None:
    """Overwrite with the ranks that there are."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    reshard.save({"w": distribute_tensor(W + dist.get_world_size(), mesh, [Shard(0)])}, path)


def load_whole(path: str) -> list[float]:
    target = {"w": torch.zeros(10, 6)}
    reshard.load(target, path)
    return [float(x) for x in target["w"].reshape(-1)]


def one_rank_fails(path: str, how: str) -> tuple[str, str, float]:
    """Rank 1 does something wrong while all save, or load."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {"w": distribute_tensor(W, mesh, [Shard(0)])}
    if how == "unsavable" and rank == 1:
        state["bad"] = object()
    if how == "other folder":
        path = f"{path}-{rank}"
    if how == "missing key":
        reshard.save(state, path)
        target = dict(state)
        if rank == 1:
            target["mystery"] = torch.zeros(2)
        return caught(lambda: reshard.load(target, path))
    if how == "exits" and rank == 1:
        os._exit(3)
    if how == "sleeps" and rank == 1:
        time.sleep(12)
    return caught(lambda: reshard.save(state, path, timeout=4.0))


def strict_stages(path: str) -> list[tuple[str, str, float]]:
    """Each rank a stage that knows its own keys only: a strict load, with and without a key that nobody wants."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def stage(fill: float) -> dict[str, Any]:
        return {
            "model": {f"layer{rank}.w": torch.full((3,), fill + rank), "norm": torch.full((2,), fill)},
            "optim": {f"layer{rank}": {"m": torch.full((3,), fill), "step": int(fill) + rank}},
        }

    reshard.save(stage(1.0), path)
    target = stage(0.0)
    report = reshard.load(target, path)
    assert report.ok, report
    assert target["model"][f"layer{rank}.w"].tolist() == [1.0 + rank] * 3
    assert target["optim"].keys() == {f"layer{rank}"}
    assert target["optim"][f"layer{rank}"]["step"] == 1 + rank
    fewer = stage(0.0)
    if rank == world - 1:  # its own layer is then wanted by nobody
        del fewer["model"][f"layer{rank}.w"]
    kept = {key: value.clone() for key, value in fewer["model"].items()}
    out = [caught(lambda: reshard.load(fewer, path)), caught(lambda: reshard.load(fewer, path, strict=False))]
    assert all(not torch.equal(fewer["model"][key], value) for key, value in kept.items())
    return out


def flat_sharded(path: str) -> dict[str, Any]:
    """FSDP1's sharded state dict: ShardedTensors, cut along dim 0, unevenly."""
    import warnings

    from torch.distributed._shard.sharded_tensor import Shard as LocalShard, init_from_local_shards

    rank, world = dist.get_rank(), dist.get_world_size()
    start, stop = rank * 4, min(rank * 4 + 4, 10)

    def sharded(rows: torch.Tensor) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shards = [LocalShard.from_tensor_and_offsets(rows, [start, 0], rank)] if len(rows) else []
            return init_from_local_shards(shards, 10, 6)

    del world
    reshard.save({"w": sharded(W[start:stop].clone())}, path)
    blank = sharded(torch.zeros(max(stop - start, 0), 6))
    reshard.load({"w": blank}, path)
    whole = {"w": torch.zeros(10, 6)}
    reshard.load(whole, path)
    column = {"w": distribute_tensor(torch.zeros(10, 6), init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(1)])}
    reshard.load(column, path)
    return {
        "own": all(torch.equal(shard.tensor, W[start:stop]) for shard in blank.local_shards()),
        "whole": torch.equal(whole["w"], W),
        "columns": torch.equal(column["w"].full_tensor(), W),
    }
