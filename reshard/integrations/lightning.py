"""Lightning's checkpoints on this engine.

    Trainer(plugins=[ReshardIO()])                              # one device, DDP: Lightning has one whole state
    Trainer(strategy=ReshardModelParallel())                    # FSDP2, tensor parallelism: each rank has its part

Either reads what Lightning itself wrote in its place. A checkpoint is a folder that is checked when
it is read, can be inspected and compared, and a save that was interrupted leaves the one before.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy

from reshard.api.save import save
from reshard.checkpoint import Checkpoint, open as open_checkpoint
from reshard.dcp import DefaultLoadPlanner, load as fill
from reshard.state_dict import get_model_state_dict, get_optimizer_state_dict, set_state_dict
from reshard.stored.tensor import whole

__all__ = ["ReshardIO", "ReshardModelParallel"]


class ReshardIO(CheckpointIO):
    """Lightning decides when and what, this decides how. Lightning calls `save_checkpoint` on the first rank only."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save a checkpoint as a folder."""
        save(checkpoint, path, alone=True)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Every rank reads for itself. Nothing in the file is run, so `weights_only` makes no difference."""
        found: dict[str, Any] = whole(open_checkpoint(path).nested())
        return found

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a folder of ours, or a file of Lightning's."""
        if Path(path).is_dir():
            shutil.rmtree(path)
        else:
            Path(path).unlink(missing_ok=True)


class ReshardModelParallel(ModelParallelStrategy):
    """Lightning's strategy for models that `configure_model` shards, with checkpoints of ours: each
    rank writes and reads its own part, and any number of ranks resumes."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """All ranks call it. What is no model and no optimizer is saved as the first rank has it."""
        sharded: dict[str, Any] = {
            key: checkpoint[key] for key in ("state_dict", "optimizer_states") if key in checkpoint
        }
        rest = self.broadcast({key: value for key, value in checkpoint.items() if key not in sharded})
        save({**rest, **sharded}, self.broadcast(filepath))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """All ranks call it. Fills model and optimizers and gives the rest."""
        assert self.model is not None
        assert self.lightning_module is not None
        checkpoint = open_checkpoint(self.broadcast(checkpoint_path))
        if checkpoint.format != "native":  # one of its own
            return dict(super().load_checkpoint(checkpoint_path, weights_only))
        return self._fill(checkpoint, strict=self.lightning_module.strict_loading)

    def _fill(self, checkpoint: Checkpoint, *, strict: bool) -> dict[str, Any]:
        model: Any = self.model
        state: dict[str, Any] = {
            "state_dict": get_model_state_dict(model),
            "optimizer_states": [get_optimizer_state_dict(model, optimizer) for optimizer in self.optimizers],
        }
        fill(state, checkpoint_id=checkpoint.url, planner=DefaultLoadPlanner(allow_partial_load=not strict))
        for number, optimizer in enumerate(self.optimizers):
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["state_dict"],
                optim_state_dict=state["optimizer_states"][number],
            )
        nested = checkpoint.nested()
        return {key: whole(value) for key, value in nested.items() if key not in state}
