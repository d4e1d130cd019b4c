"""Lightning's strategy for sharded models with our checkpoints: saved on two ranks, resumed in another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import reshard
from tests import gloo
from tests.same import same
from tests.torch_releases import FSDP2_TRAINS_ON_CPUS, requires

pytest.importorskip("lightning", reason="lightning is not installed")

pytestmark = [pytest.mark.gloo, pytest.mark.filterwarnings("ignore")]  # of the framework: not ours to mend


def fit(folder: Path, steps: int, ckpt_path: Path | None, *, tensor_parallel: int, ours: bool = True) -> dict[str, Any]:
    """Train on two ranks to so many steps, saving at the end; what all of it is then."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.utils.data import DataLoader

    from reshard.integrations.lightning import ReshardModelParallel

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))

        def configure_model(self) -> None:
            if tensor_parallel > 1:
                plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
                parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
            else:
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    strategy = (ReshardModelParallel if ours else ModelParallelStrategy)(
        data_parallel_size=2 // tensor_parallel, tensor_parallel_size=tensor_parallel
    )
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Net()
    trainer.fit(module, DataLoader(torch.sin(torch.arange(256.0)).reshape(32, 8), batch_size=4), ckpt_path=ckpt_path)
    trainer.save_checkpoint(folder / f"step={trainer.global_step}.ckpt")
    model, optim = reshard.get_state_dict(module, *trainer.optimizers)
    return {"step": trainer.global_step, "model": gathered(model), "optim": gathered(optim)}


def gathered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: gathered(item) for key, item in value.items()}
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def swap(text: str) -> list[bool]:
    folder = Path(text)
    saved = fit(folder / "ours", 2, None, tensor_parallel=1)
    resumed = fit(
        folder / "again", 2, folder / "ours", tensor_parallel=2
    )  # the newest of a run, and nothing is left to do
    fit(folder / "theirs", 2, None, tensor_parallel=1, ours=False)
    taken_over = fit(folder / "later", 2, folder / "theirs" / "step=2.ckpt", tensor_parallel=2)
    return [saved["step"] == 2, same(saved, resumed), same(saved, taken_over)]


@requires(FSDP2_TRAINS_ON_CPUS, "trains nothing under FSDP2 on CPUs")
def test_sharded_training_resumes_in_another_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}.items():
        monkeypatch.setenv(name, value)  # as torchrun says it, so that Lightning starts no processes of its own

    assert gloo.run(swap, 2, str(tmp_path)) == [[True] * 3] * 2

    saved = reshard.open(tmp_path / "ours")
    assert saved.format == "native"
    assert saved.objects["global_step"] == 2
