"""torchtitan's checkpoint manager and ours, each resuming from what the other saved, in another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import reshard
from tests import gloo
from tests.same import same

pytest.importorskip(
    "torchtitan.components.checkpoint",
    reason="torchtitan is not installed, or not for this torch",
    exc_type=ImportError,
)

pytestmark = [pytest.mark.gloo, pytest.mark.filterwarnings("ignore")]  # of the framework: not ours to mend


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class TrainState:
    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


class Job:
    """What torchtitan's trainer is made of, as far as it is saved: its own manager, optimizers and schedules."""

    def __init__(self, kind: str, seed: int, manager: Any, folder: str, mode: str = "disabled") -> None:
        from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

        torch.manual_seed(seed)
        model = Net()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(kind,))
        if kind == "fsdp":
            fully_shard(model, mesh=mesh)
        else:
            parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        config = default_adamw()
        config.implementation = "for-loop"
        self.model, self.optimizers = model, config.build(model_parts=[model])
        self.schedules = LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=10
        )
        self.state = TrainState()
        self.manager = manager.Config(
            enable=True, interval=1, last_save_model_only=False, keep_latest_k=0, async_mode=mode
        ).build(
            dataloader=None,
            model_parts=[model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedules,
            states={"train_state": self.state},
            sd_adapter=None,
            base_folder=folder,
        )

    def train(self) -> None:
        self.model(torch.ones(4, 6)).square().sum().backward()
        self.optimizers.step()
        self.optimizers.zero_grad()
        self.schedules.step()
        self.state.step += 1

    def whole(self) -> dict[str, Any]:
        state = {
            "model": self.model.state_dict(),
            "optim": self.optimizers.state_dict(),
            "schedules": self.schedules.state_dict(),
        }
        return {**gathered(state), "step": self.state.step}


def gathered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: gathered(item) for key, item in value.items()}
    return value.full_tensor() if isinstance(value, DTensor) else value


def swap(folder: str) -> list[tuple[str, bool, bool]]:
    """For each pair of managers: whether all came back, and that there was something to bring back."""
    from torchtitan.components.checkpoint import CheckpointManager as Theirs

    from reshard.integrations.torchtitan import CheckpointManager as Ours

    found = []
    for name, saver, loader, mode in (
        ("ours, then torchtitan's", Ours, Theirs, "disabled"),
        ("torchtitan's, then ours", Theirs, Ours, "disabled"),
        ("ours in the background", Ours, Ours, "async"),
    ):
        first = Job("fsdp", 0, saver, f"{folder}/{name}", mode)
        first.train()
        first.manager.save(1)
        first.manager.maybe_wait_for_saving()
        second = Job("tp", 1, loader, f"{folder}/{name}")
        before = second.whole()
        second.manager.load()
        dist.barrier()
        found.append((name, same(first.whole(), second.whole()), same(before, second.whole())))
    if dist.get_rank() == 0:
        reshard.convert(
            f"{folder}/{name}/checkpoint/step-1", f"{folder}/x/checkpoint/step-9", format="native", alone=True
        )
    dist.barrier()
    third = Job("tp", 2, Ours, f"{folder}/x")
    before = third.whole()
    third.manager.load()
    found.append(("converted", same(first.whole(), third.whole()), same(before, third.whole())))
    return found


def test_either_manager_resumes_from_the_other_s_save(tmp_path: Path) -> None:
    names = ["ours, then torchtitan's", "torchtitan's, then ours", "ours in the background", "converted"]
    assert gloo.run(swap, 2, str(tmp_path)) == [[(name, True, False) for name in names]] * 2

    run = reshard.open(tmp_path / names[0])
    assert run.url.endswith("checkpoint/step-1")
    assert run.format == "dcp"
