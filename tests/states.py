"""States that tests save and load. Those named `_of` a step contain values that differ between saves."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import reshard
from reshard.formats.table import writing_of

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
          torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
          torch.bool, torch.complex64]  # fmt: skip
MATRIX = torch.arange(800_000.0, device="cpu").reshape(1000, 800)


def containers() -> dict[str, Any]:
    """Return what programs pass to `torch.save`: containers of all kinds, parameters, views, and arrays."""
    base = torch.arange(24.0)
    return {
        "model": collections.OrderedDict(w=base.reshape(4, 6), v=torch.nn.Parameter(base[6:12].reshape(2, 3).T)),
        "optim": {"state": {0: {"step": torch.tensor(1.0), "m": torch.ones(4, 6, dtype=torch.bfloat16)}}},
        "groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1]}, {}],
        "pair": (torch.zeros(2), [torch.ones(1), "x"]),
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
        "conj": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "empty": {},
        "epoch": 7,
        "name": None,
        "array": np.arange(3),
    }


def every_dtype() -> dict[str, Any]:
    """Return all dtypes, tied and strided tensors, 0-d and empty tensors, lists, tuples, and plain values."""
    torch.manual_seed(0)
    embed = torch.randn(40, 8)
    model: dict[str, Any] = {f"of.{dtype}".replace("torch.", ""): torch.rand(3, 5).to(dtype) for dtype in DTYPES}
    model |= {"embed": embed, "head": embed, "turned": torch.randn(6, 4).T, "none": torch.empty(0, 7)}
    model |= {"count": torch.tensor(3), "layers": {"0": {"w": torch.randn(9, 3)}}}
    optim = {"state": {"embed": {"step": torch.tensor(5.0), "exp_avg": torch.randn(40, 8)}}}
    groups = [{"lr": 0.1, "betas": (0.9, 0.95), "params": ["embed"]}]
    return {"model": model, "optim": {**optim, "param_groups": groups}, "epoch": 3, "note": "ü", "gone": None}


def few_of_many_sizes() -> dict[str, Any]:
    """Return a matrix, a bfloat16 vector, a scalar, an empty tensor, and a text."""
    gen = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(50, 40, generator=gen),
        "b": torch.randn(30, generator=gen).bfloat16(),
        "scalar": torch.tensor(4),
        "empty": torch.zeros(0, 3),
        "note": "text",
    }


def frozen_and_trained_of(step: int, frozen: int) -> dict[str, Any]:
    """Return a tensor of `frozen` elements that all saves share, and one that identifies the save."""
    return {"frozen": torch.arange(float(frozen)), "trained": torch.full((5,), float(step)), "step": step}


def large() -> dict[str, Any]:
    """Return tensors of some megabytes, a scalar, and an empty tensor."""
    gen = torch.Generator().manual_seed(5)
    return {
        "big": torch.randn(3000, 1001, generator=gen),
        "halves": torch.randn(700, 900, generator=gen).bfloat16(),
        "bytes": torch.randint(0, 255, (1_000_003,), dtype=torch.uint8, generator=gen),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(3, 0),
    }


def model_and_optimizer_of(step: int) -> dict[str, Any]:
    """Return several tensors and an object that all identify the save."""
    return {
        "model": {"w": torch.full((40, 3), float(step)), "b": torch.full((5,), step, dtype=torch.int64)},
        "optim": {"m": torch.full((7,), float(step)), "step": step},
    }


def more_than_a_part_of(step: int) -> dict[str, Any]:
    """Return a tensor of several upload parts that identifies the save."""
    weights = torch.arange(1_400_000, dtype=torch.float32).reshape(1400, 1000) + step  # larger than a part
    return {"model": {"w": weights, "b": torch.full((3,), float(step)), "none": torch.empty(0, 4)}, "step": step}


def one_of_everything() -> dict[Any, Any]:
    """Return tensors of every kind that a state may contain, tied ones, and plain values."""
    tied = torch.arange(6.0)
    return {
        "model": {
            "w": torch.arange(35.0).reshape(5, 7),
            "half": torch.arange(12).to(torch.bfloat16).reshape(3, 4),
            "transposed": torch.arange(12.0).reshape(3, 4).t(),
            "strided": torch.arange(12)[::3],
            "scalar": torch.tensor(3, dtype=torch.int64),
            "empty": torch.empty(0, 3),
            "flags": torch.tensor([True, False]),
            "wide": torch.tensor([1 + 2j], dtype=torch.complex128),
            "conj": torch.tensor([1 + 2j, 3 - 1j]).conj(),
            "tiny": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
            "embed": tied,
            "head": tied,
        },
        "optim": {"lr": 1e-3, "betas": (0.9, 0.999), "groups": [{"params": ["w"]}, {}], "none": None},
        "empty": {},
        "step": 5,
        7: "an int key",
        "nan": float("nan"),
    }


def own_tensor_of(step: int) -> dict[str, Any]:
    """Return a tensor of this rank alone that identifies the save."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {f"w{rank}": torch.full((1000,), float(step)), "step": step}


def sharded_and_own_of(step: int) -> dict[str, Any]:
    """Return a sharded tensor, a replicated one, one of this rank alone, and objects."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = torch.arange(8.0).reshape(2, 4) + 100.0 * rank + step
    return {
        "rows": DTensor.from_local(rows, mesh, [Shard(0)], run_check=False),
        "all": torch.full((5,), float(step)),
        f"own{rank}": torch.full((3,), float(10 * step + rank)),
        "step": step,
        f"note{rank}": f"{rank} at {step}",
    }


def sharded_in_every_way_of(step: int) -> dict[str, Any]:
    """Return tensors sharded by rows and columns, replicas, bools, and per-rank values."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    held = {
        "w": distribute_tensor(MATRIX + step, mesh, [Shard(0)]),
        "half": distribute_tensor(MATRIX[:7, :9].bfloat16() + step, mesh, [Shard(1)]),
        "whole": distribute_tensor(MATRIX[:3] + step, mesh, [Replicate()]),
        "flags": distribute_tensor(torch.ones(5, dtype=torch.bool, device="cpu"), mesh, [Shard(0)]),
    }
    return {
        "model": held,
        "rng": reshard.PerRank(torch.full((3,), rank, dtype=torch.uint8, device="cpu")),
        "step": step,
    }


def tensor_of(step: int) -> dict[str, Any]:
    """Return one tensor that identifies the save."""
    return {"w": torch.full((1000,), float(step)), "step": step}


def trained(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return a model with a buffer, a frozen parameter, and a tied one, and torch's optimizer."""
    torch.manual_seed(0)
    shapes = {"emb.weight": (5, 4), "mlp.weight": (4, 4), "mlp.bias": (4,), "frozen.weight": (2, 3)}
    model: dict[str, Any] = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    states = {
        name: {"step": torch.tensor(7.0), "exp_avg": torch.randn(shape), "exp_avg_sq": torch.rand(shape)}
        for name, shape in shapes.items()
        if name != "frozen.weight"
    }
    groups = [{"lr": 0.1, "params": ["emb.weight", "mlp.weight"]}, {"lr": 0.2, "params": ["mlp.bias"]}]
    model |= {"head.weight": model["emb.weight"], "count": torch.tensor(3)}
    return {"model": model, "optim": {"state": states, "param_groups": groups}, "epoch": 3, "schedule": {"last": 1}}


def views_and_gradients() -> dict[str, Any]:
    """Return views of one tensor, a conjugated one, one with a gradient, and plain values."""
    whole = torch.arange(24.0).view(4, 6)
    return {
        "model": {"w": whole, "columns": whole[:, 1:3], "half": whole.to(torch.bfloat16), "none": torch.empty(0, 3)},
        "scalar": torch.tensor(7),
        "flag": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]).conj(),
        "grad": torch.ones(3, requires_grad=True),
        "step": 5,
        "names": ["a", {"b": 1.5}],
    }


def in_files_of(nbytes: int, format: str) -> dict[str, Any]:
    """Return options for a conversion to many files, if the format supports them."""
    return {"max_shard_bytes": nbytes} if writing_of(format).is_split else {}
