"""What each rank does: calls until one fails, whose error and time it writes down."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import reshard
from reshard.errors import ReshardError


def main() -> None:
    """`job.py FOLDER VERB DEADLINE`."""
    folder, verb, deadline_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    def state(step: int) -> dict[str, object]:
        return {"w": distribute_tensor(torch.full((world * 3, 6), float(step)), mesh, [Shard(0)]), "n": step}

    reshard.save(state(1), folder / "c")
    dist.barrier()
    (folder / f"ready-{rank}").write_text(str(os.getpid()))
    said, begun, step, until = "", time.time(), 1, time.monotonic() + 60.0
    while not said and time.monotonic() < until:
        step += 1
        begun = time.time()
        try:
            if verb == "load":
                reshard.load(state(0), folder / "c", deadline_s=deadline_s)
            elif verb == "async_save":
                reshard.async_save(state(step), folder / "c", deadline_s=deadline_s).result()
            else:
                reshard.save(state(step), folder / "c", deadline_s=deadline_s)
        except ReshardError as error:
            said = f"{type(error).__name__}: {error}"
    told = json.dumps({"said": said, "begun": begun, "ended": time.time(), "step": step})
    (folder / f"part-{rank}").write_text(told)
    (folder / f"part-{rank}").rename(folder / f"end-{rank}")
    os._exit(0)


if __name__ == "__main__":
    main()
