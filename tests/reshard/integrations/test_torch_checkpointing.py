"""torch_checkpointing's manager and ours in its place: either reads what the other wrote."""

from __future__ import annotations

import importlib.util
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import reshard
from reshard.errors import KeyMismatchError, OptionError
from tests import gloo
from tests.same import same

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(
        importlib.util.find_spec("torch_checkpointing") is None, reason="torch_checkpointing is not installed"
    ),
]


class Where(NamedTuple):
    """What is neither a tuple nor a list."""

    x: float
    past: deque[int]


W, B = torch.arange(35.0).reshape(7, 5), torch.arange(4.0)


def items(how: Any, factor: float = 1.0) -> dict[str, Any]:
    """Of this rank."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "model": {
            "w": distribute_tensor(W * factor, mesh, [how]),
            "b": distribute_tensor(B * factor, mesh, [Replicate()]),
        },
        "step": int(10 * factor),
        "rng": {
            "seed": int(rank * factor),
            "name": "x",
            "state": torch.full((3,), rank * factor),
            "python": (3, (int(rank * factor), int(factor)), None),  # as `random.getstate` returns it
            "inside": [(torch.full((2,), rank * factor), {"n": rank * factor})],
            "few": [rank] if not factor else [rank, rank + 1],  # as many as were saved
        },
    }


def theirs(**options: Any) -> Any:
    """Their manager, whose release 0.1.1 exchanges metadata by tensors on "cuda": here they go through gloo."""
    from torch_checkpointing import CheckpointManager, ItemSpec, SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.metadata_manager import DefaultMetadataManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    def everybody_s(_: Any, data: Any, process_group: Any = None) -> dict[int, Any]:
        found = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(found, data, group=process_group)
        return dict(enumerate(found))

    DefaultMetadataManager._all_gather_pickled_data = everybody_s
    return CheckpointManager(
        CheckpointManager.Config(
            items={"model": ItemSpec(resharder=DefaultResharder())},
            save=SyncCheckpointSaverConfig(),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
    )


def ours(**options: Any) -> Any:
    from torch_checkpointing import SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder

    from reshard.integrations.torch_checkpointing import CheckpointManager, ItemSpec

    if options.pop("is_sync", True):
        options["save"] = SyncCheckpointSaverConfig()
    config = CheckpointManager.Config(items={"model": ItemSpec(resharder=DefaultResharder())}, **options)
    return config.build()


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(value[key]) for key in sorted(value)}
    return value.full_tensor() if isinstance(value, DTensor) else value


def right(found: Any, rank: int) -> bool:
    wanted = {
        "model": {"w": W, "b": B},
        "step": 10,
        "rng": {
            "seed": rank,
            "name": "x",
            "state": torch.full((3,), float(rank)),
            "python": (3, (rank, 1), None),
            "inside": [(torch.full((2,), float(rank)), {"n": float(rank)})],
            "few": [rank, rank + 1],
        },
    }
    return same(plain(dict(found)), plain({key: wanted[key] for key in found}))


def saved(root: str) -> None:
    rank = dist.get_rank()
    managers = [
        (theirs(), "theirs"),
        (ours(per_rank=["rng"]), "native"),
        (ours(per_rank=["rng"], is_sync=False), "async"),
    ]
    for manager, name in managers:
        state = items(Shard(0))
        pending = manager.save(f"{root}/{name}", state)
        assert (pending is None) == (name != "async")
        with manager.lock():
            state["model"]["w"].zero_()
        manager.close()
        dist.barrier()
    for value, live in ((Where(1.0, deque([rank])), Where(0.0, deque([-1]))), ({rank: "x"}, {})):
        ours(per_rank=["rng"]).save(f"{root}/kinds", {"model": B, "rng": value})
        found = ours().load(f"{root}/kinds", into={"model": B, "rng": live}, strict=True)
        assert found["rng"] == value
        assert type(found["rng"]) is type(value)
    writes = ours(format="torch_checkpointing", is_sync=False)
    common = {key: value for key, value in items(Shard(0)).items() if key != "rng"}
    assert writes.save(f"{root}/converted", common).result() is None
    with pytest.raises(KeyMismatchError, match=r"rng\.seed"):
        ours().save(f"{root}/refused", items(Shard(0)))
    for name in ("theirs", "native", "async"):
        manager = ours(default=None) if name == "native" else ours()
        with (
            pytest.raises(KeyError, match="rng") if name == "native" else pytest.raises(KeyMismatchError, match="lost")
        ):
            manager.load(f"{root}/{name}", into={**items(Shard(0)), "lost": 1}, strict=True)
        into = items(Shard(1), factor=0.0)
        before, inner = into["model"]["w"], into["rng"]
        found = ours().load(f"{root}/{name}", into=into)
        assert found["model"]["w"] is before
        assert found["rng"] is inner
        assert right(found, rank)
        assert right(ours().load(f"{root}/{name}", into={"model": None, "step": None, "rng": None}, strict=True), rank)
    assert right(ours().load(f"{root}/native", map_location="cpu"), rank)
    found = theirs().load(f"{root}/converted", into={"model": items(Shard(1), 0.0)["model"]})
    assert right(found, rank)


def resumed_by_three(root: str) -> None:
    rank = dist.get_rank()
    for name in ("theirs", "native", "converted"):
        into = {key: value for key, value in items(Shard(1), factor=0.0).items() if key != "rng"}
        assert right(ours().load(f"{root}/{name}", into=into, strict=True), rank)
    assert right(
        ours().load(f"{root}/native", into={"model": None, "step": None}), rank
    )  # the values of ranks left out
    with pytest.raises(reshard.ReshardError, match="there was no rank 2" if rank == 2 else "rank 2 failed"):
        ours().load(f"{root}/theirs", into=items(Shard(1)))


def test_either_manager_reads_what_the_other_wrote(tmp_path: Path) -> None:
    (tmp_path / "converted.parts").mkdir()
    (tmp_path / "converted.parts" / "mine").write_text("kept")
    gloo.run(saved, 2, str(tmp_path))
    gloo.run(resumed_by_three, 3, str(tmp_path))

    from torch_checkpointing import CheckpointManager, SyncCheckpointSaverConfig

    alone = CheckpointManager(CheckpointManager.Config(save=SyncCheckpointSaverConfig()))
    found = alone.load(str(tmp_path / "converted"), into={"model": None, "step": None})
    assert right(found, 0)
    assert not list(tmp_path.glob(".*")), "of what was converted"
    assert (tmp_path / "converted.parts" / "mine").read_text() == "kept"


def test_what_would_be_left_undone_is_refused() -> None:
    from torch_checkpointing import CheckpointManager as Theirs

    from reshard.integrations.torch_checkpointing import CheckpointManager, ItemSpec

    assert isinstance(CheckpointManager(Theirs.Config()), Theirs)
    with pytest.raises(OptionError, match="format must be one of 'native'"):
        CheckpointManager.Config(format="pt")
    with pytest.raises(OptionError, match="per_rank needs format='native'"):
        CheckpointManager.Config(format="torch_checkpointing", per_rank=["rng"])
    with pytest.raises(OptionError, match="callbacks are not called"):
        CheckpointManager(Theirs.Config(finalize_callback=print))
    with pytest.raises(OptionError, match="needs a local folder, got 's3://bucket/step-1': use format='native'"):
        CheckpointManager.Config(format="torch_checkpointing").build().save("s3://bucket/step-1", {"a": 1})
    required = CheckpointManager.Config(items={"model": ItemSpec()}).build()
    with pytest.raises(KeyError, match=r"items \['model'\] of the config are required"):
        required.save("x", {})
    manager = CheckpointManager()
    manager.close()
    with pytest.raises(RuntimeError, match="closed"):
        manager.save("x", {})
