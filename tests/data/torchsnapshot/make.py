"""How the snapshots beside this were made, by torchsnapshot 0.1.0 on two ranks: `torchrun --nproc-per-node=2 make.py`.

`plain` has a file for each tensor, `batched` has small tensors in files of many. `values` is what both hold.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HERE = Path(__file__).parent
WORLD = 2


def matrix(start: float = 0.0) -> torch.Tensor:
    return torch.arange(48.0).reshape(8, 6) + start


def values(rank: int) -> dict[str, dict[str, Any]]:
    """What a rank saves, with whole tensors in the place of sharded ones."""
    model = {
        "layers": [{"weight": matrix(), "half": matrix(1).to(torch.bfloat16)}, {"mask": matrix() > 7}],
        "scale": torch.tensor(2.5),
        "wave": torch.tensor([1 + 2j, 3 - 1j]),
        "turned": matrix(2).t(),
        "long": torch.arange(40, dtype=torch.int64),
        "a/b%": torch.ones(2),
        "sharded": matrix(200),
    }
    optim = {
        "state": {0: {"exp_avg": matrix(3), "step": torch.tensor(7.0)}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0], "name": "all", "fused": False}],
        "raw": b"\x00\xff",
        "none": {},
    }
    return {"model": model, "optim": optim, "progress": {"rank": rank, "steps": 12, "seen": torch.tensor([rank, 5])}}


def main() -> None:
    from torch.distributed._shard import sharded_tensor
    from torchsnapshot import Snapshot, StateDict, knobs

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    state = values(rank)
    whole = state["model"]["sharded"]
    state["model"]["sharded"] = sharded_tensor.init_from_local_shards(
        [
            sharded_tensor.Shard.from_tensor_and_offsets(
                whole[4 * rank : 4 * rank + 4].contiguous(), [4 * rank, 0], rank
            )
        ],
        *whole.shape,
    )
    app = {name: StateDict(**of) for name, of in state.items()}
    for name, is_batched in (("plain", False), ("batched", True)):
        with knobs.override_max_chunk_size_bytes(100), knobs.override_is_batching_disabled(not is_batched):
            Snapshot.take(str(HERE / name), app, replicated=["model/**", "optim/**"])
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
