"""Makes the golden checkpoints: run it once for each released version of the format, and never for an old one.

    python -m tests.golden.make v3

`v1/single` is what one process wrote, `v1/sharded` what four ranks did. Those of version 2 have some of their elements
in files of an earlier save, in which a few tensors were others; those of version 3 likewise, and the checksums of that
save are of blocks of 1 MiB, as earlier releases had them. The tests of formats read them.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import reshard
from reshard.native import commit, data_file
from tests import gloo

HERE = Path(__file__).parent


def single() -> dict[str, Any]:
    """One of every kind of value, in one process."""
    tied = torch.arange(4.0)
    return {
        "model": {
            "w": torch.arange(12.0).reshape(3, 4),
            "half": torch.arange(6).to(torch.bfloat16),
            "eighth": torch.tensor([0.5, -2.0]).to(torch.float8_e4m3fn),
            "wide": torch.tensor([1 + 2j], dtype=torch.complex128),
            "flags": torch.tensor([True, False, True]),
            "scalar": torch.tensor(7),
            "empty": torch.empty(0, 3),
            "embed": tied,
            "head": tied,
        },
        "optim": {"lr": 1e-3, "betas": (0.9, 0.999), "groups": [{"params": ["w"]}, {}], "none": None},
        "nothing": {},
        "step": 5,
        7: "an int key",
        "nan": float("nan"),
        "big": 2**70,
    }


def sharded_values() -> dict[str, torch.Tensor]:
    """The whole tensors that the four ranks hold parts of."""
    return {
        "rows": torch.arange(35.0).reshape(7, 5),
        "columns": torch.arange(36, dtype=torch.int32).reshape(6, 6),
        "grid": torch.arange(40.0).reshape(8, 5).to(torch.bfloat16),
        "copies": torch.arange(3.0),
    }


def sharded(path: str, changed: bool = False) -> None:
    """Save as one of four ranks: uneven rows, columns, a grid of both, copies, and a value of each rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    placements = {"rows": [Shard(0), Shard(0)], "columns": [Replicate(), Shard(1)], "grid": [Shard(0), Shard(1)]}
    state: dict[str, Any] = {
        name: distribute_tensor(value, mesh, placements[name]) if name in placements else value
        for name, value in sharded_values().items()
    }
    assert isinstance(state["grid"], DTensor)
    if changed:
        state["rows"] = -state["rows"]
    own = reshard.PerRank(torch.tensor([dist.get_rank()]))
    with as_before() if changed else nullcontext():
        reshard.save({"model": state, "rng": own, "step": 3}, path, base="auto")


@contextmanager
def as_before() -> Iterator[None]:
    """Saves have checksums of blocks of 1 MiB."""
    with mock.patch.object(data_file, "BLOCK_BYTES", 1 << 20), mock.patch.object(commit, "BLOCK_BYTES", 1 << 20):
        yield


if __name__ == "__main__":
    target = HERE / sys.argv[1]
    if target.exists():
        raise SystemExit(f"{target} exists: golden files are never made anew")
    earlier = single()
    earlier["model"]["w"] = torch.zeros(3, 4)
    with as_before():
        reshard.save(earlier, target / "earlier", base="auto")
    reshard.save(single(), target / "single", base=target / "earlier")
    shutil.rmtree(target / "earlier")
    gloo.run(sharded, 4, str(target / "sharded"), True)
    gloo.run(sharded, 4, str(target / "sharded"))
