"""A plugin for Lightning that writes reshard's format, and reads both that and Lightning's own checkpoints.

    trainer = Trainer(plugins=[ReshardIO()], ...)
    trainer.fit(model, ckpt_path="last.ckpt")       # a folder that reshard wrote, or a file from Lightning

    python examples/lightning_plugin.py --folder ckpt --devices 2

Checkpoints are then verified when they are read, and you can inspect and compare them. An interrupted save leaves the
previous checkpoint. The plugin is for strategies that give Lightning the full state: a single device and DDP. For
sharded models, use the strategy `reshard.integrations.lightning.ReshardModelParallel`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from reshard.integrations.lightning import ReshardIO


class Net(LightningModule):
    """A module with the model as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def trainer_of(folder: Path, epochs: int, plugins: list[Any], devices: int = 1) -> Trainer:
    """A trainer that saves under `folder` after each epoch."""
    return Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        max_epochs=epochs,
        plugins=plugins,
        callbacks=[ModelCheckpoint(dirpath=folder, save_last=True, save_top_k=2, monitor="step", mode="max")],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def fit(folder: Path, epochs: int, plugins: list[Any], ckpt_path: Path | None = None, devices: int = 1) -> Net:
    """Train up to this number of epochs, from a checkpoint if one is given. Return the module."""
    module = Net()
    batches = DataLoader(torch.sin(torch.arange(256.0)).reshape(32, 8), batch_size=4)
    trainer_of(folder, epochs, plugins, devices).fit(module, batches, ckpt_path=ckpt_path)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--resume", type=Path, help="a checkpoint of this plugin or of Lightning")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--lightning", action="store_true", help="save as Lightning does without the plugin")
    given = parser.parse_args()
    fit(given.folder, given.epochs, [] if given.lightning else [ReshardIO()], given.resume, given.devices)


if __name__ == "__main__":
    main()
