"""torchft heals replica groups by our transport: its manager trains, and a group that shards within reads its parts."""

from __future__ import annotations

import os
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from reshard.errors import DeadlineError
from tests import gloo
from tests.same import same

pytest.importorskip("torchft", reason="torchft is not installed")

pytestmark = [pytest.mark.gloo, pytest.mark.filterwarnings("ignore")]  # of the framework: not ours to mend
SECONDS = timedelta(seconds=30)


def replica(text: str, lighthouse: str, number: int) -> Any:
    """A replica group of one process: three steps by torchft's manager, its own weights at first."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    from reshard.integrations.torchft import ReshardTransport

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(number)
    net = nn.Linear(3, 2)
    adam = torch.optim.Adam(net.parameters())

    def give() -> dict[str, Any]:
        return {"net": net.state_dict(), "adam": adam.state_dict()}

    def take(state: dict[str, Any]) -> None:
        net.load_state_dict(state["net"])
        adam.load_state_dict(state["adam"])

    with ExitStack() as stack:
        manager = Manager(
            pg=ProcessGroupGloo(), min_replica_size=2, load_state_dict=take, state_dict=give, rank=0, world_size=1,
            replica_id=str(number), store_addr="localhost", store_port=store.port, lighthouse_addr=lighthouse,
            checkpoint_transport=ReshardTransport(Path(text) / str(number)), timeout=SECONDS,
        )  # fmt: skip
        stack.callback(lambda: manager.shutdown(wait=False))
        first = [tensor.clone() for tensor in net.state_dict().values()]
        model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, adam)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).square().mean().backward()
            optimizer.step()
        return manager.current_step(), first, give()


def on_a_rank(text: str, lighthouse: str) -> Any:
    number = int(os.environ["RANK"])
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}  # each replica group is a job of its own
    return replica(text, lighthouse, number)


def test_a_replica_group_that_is_behind_gets_what_another_has(tmp_path: Path) -> None:
    from torchft import _torchft

    lighthouse = _torchft.LighthouseServer(bind="[::]:0", min_replicas=2)
    try:
        ends = gloo.outcomes(on_a_rank, 2, str(tmp_path), lighthouse.address(), init=False)
    finally:
        lighthouse.shutdown()

    (steps, first, state), (other_steps, other_first, other) = [end.value for end in ends]
    assert not same(first, other_first)
    assert steps == other_steps == 3
    assert same(state, other)
    assert len(list(tmp_path.glob("*/*-step-0/manifest.json"))) == 1, "one was behind, at the beginning"


def within_a_group(text: str) -> list[bool]:
    """Two ranks that share a state: sent as rows, received as columns."""
    from reshard.integrations.torchft import ReshardTransport

    mesh, whole = init_device_mesh("cpu", (2,)), torch.arange(24.0).reshape(4, 6)
    given = {"user": {"w": distribute_tensor(whole, mesh, [Shard(0)])}, "torchft": {"step": 7}}
    state = {"user": {"w": distribute_tensor(whole * 0, mesh, [Shard(1)])}, "torchft": {"step": 0}}
    transport = ReshardTransport(Path(text) / "a", into=lambda checkpoint: state)
    for step in (6, 7):
        transport.send_checkpoint([1], step, given, SECONDS)

    got = transport.recv_checkpoint(0, transport.metadata(), 7, SECONDS)

    with pytest.raises(DeadlineError, match="step-6 did not appear within"):
        transport.recv_checkpoint(0, transport.metadata(), 6, timedelta(seconds=0.1))
    return [got is state, torch.equal(got["user"]["w"].full_tensor(), whole), got["torchft"] == {"step": 7}]


def test_ranks_of_a_group_read_their_parts(tmp_path: Path) -> None:
    assert gloo.run(within_a_group, 2, str(tmp_path)) == [[True] * 3] * 2


def test_a_relative_folder_is_the_same_for_all_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have other working directories, and a group its own by the time of the checkpoint."""
    from reshard.integrations.torchft import ReshardTransport

    monkeypatch.chdir(tmp_path)
    transport = ReshardTransport("heal")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    transport.send_checkpoint([1], 3, {"w": torch.ones(2)}, SECONDS)
    metadata = transport.metadata()
    assert metadata.startswith(f"{tmp_path}/heal/")
    assert same(ReshardTransport("other").recv_checkpoint(0, metadata, 3, SECONDS), {"w": torch.ones(2)})
