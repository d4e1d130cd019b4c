"""Lightning checkpoints in the native format.

    Trainer(plugins=[ReshardIO()])                              # one device or DDP: one full state
    Trainer(strategy=ReshardModelParallel())                    # FSDP2, tensor parallelism: sharded state
    Trainer(callbacks=[ReshardCheckpoint("run", every=Every(steps=500))])   # any strategy, CheckpointManager

`ReshardIO` and `ReshardModelParallel` also read the checkpoints that Lightning itself writes in their place. A
checkpoint is a folder. You can inspect and compare it, loads verify it, and an interrupted save keeps the previous one.
"""

from __future__ import annotations

import logging
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch

from reshard.api.manager import CheckpointManager, Every, RestoreReport
from reshard.api.retention import remove_checkpoints
from reshard.api.save import save
from reshard.checkpoint import Checkpoint, open as open_checkpoint
from reshard.dcp import DefaultLoadPlanner, load as fill
from reshard.errors import CheckpointError, OptionError, format_value, framework
from reshard.live.state import OwnState, PerRank, in_order
from reshard.state_dict import fqn_map, get_model_state_dict, get_optimizer_state_dict, normalize, set_state_dict
from reshard.state_dict.api import group_orders, refuse_optimizers
from reshard.state_dict.options import StateDictOptions
from reshard.stored.tensor import whole

with framework("lightning>=2.5"):
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Checkpoint as CheckpointCallback
    from lightning.pytorch.plugins.io import CheckpointIO
    from lightning.pytorch.strategies import ModelParallelStrategy
    from lightning.pytorch.trainer import call

__all__ = ["ReshardCheckpoint", "ReshardIO", "ReshardModelParallel"]

_SHARDED = ("state_dict", "optimizer_states")
"""The sharded entries of Lightning's checkpoints: model and optimizers."""


def _save(*args: Any, **options: Any) -> None:
    """Call `save`, without its warnings about names and states that Lightning chooses."""
    log = logging.getLogger("reshard")
    log.addFilter(_is_of_use)
    try:
        save(*args, **options)
    finally:
        log.removeFilter(_is_of_use)


def _is_of_use(record: logging.LogRecord) -> bool:
    words = record.getMessage()
    return "becomes a folder" not in words and "saved by parameter number" not in words


class ReshardIO(CheckpointIO):
    """A Lightning plugin that stores checkpoints in the native format. Lightning decides when and
    what to save. It calls `save_checkpoint` on the first rank only.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save a checkpoint as a folder."""
        _save(checkpoint, path, alone=True)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint. Each rank reads for itself. No code in the file runs, so
        `weights_only` makes no difference.
        """
        found: dict[str, Any] = whole(open_checkpoint(path).nested())
        return found

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a checkpoint folder or URL, a link to one, or a checkpoint
        file of Lightning's.
        """
        if "://" in os.fspath(path):
            remove_checkpoints(os.fspath(path).rstrip("/").rpartition("/")[0], [os.fspath(path)])
        elif Path(path).is_dir() and not Path(path).is_symlink():
            shutil.rmtree(path)
        else:
            Path(path).unlink(missing_ok=True)


class ReshardModelParallel(ModelParallelStrategy):
    """Lightning's `ModelParallelStrategy`, for models that `configure_model` shards, with sharded
    checkpoints. Each rank writes and reads its own part, and you can resume with any number of
    ranks.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint. Collective. Values other than models and optimizers are saved as rank
        0 has them.
        """
        sharded = {key: checkpoint[key] for key in _SHARDED if key in checkpoint}
        rest = self.broadcast({key: value for key, value in checkpoint.items() if key not in sharded})
        _save({**rest, **sharded}, self.broadcast(filepath))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Fill model and optimizers from a checkpoint, and return the other values. Collective."""
        assert self.model is not None
        assert self.lightning_module is not None
        checkpoint = open_checkpoint(self.broadcast(checkpoint_path))
        if checkpoint.format != "native":  # written by Lightning itself
            return dict(super().load_checkpoint(checkpoint_path, weights_only))
        return self._fill(checkpoint, strict=self.lightning_module.strict_loading)

    def _fill(self, checkpoint: Checkpoint, *, strict: bool) -> dict[str, Any]:
        model: Any = self.model
        nested = checkpoint.nested()
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        rest: dict[str, Any] = {key: whole(value) for key, value in nested.items() if key not in _SHARDED}
        for number, (scheduler, saved) in enumerate(zip(schedulers, rest.get("lr_schedulers", ()))):
            OwnState.check(f"lr_schedulers.{number}", scheduler, saved)
        state: dict[str, Any] = {"state_dict": get_model_state_dict(model)}
        optimizers = nested.get("optimizer_states", [])
        numbered = any(
            isinstance(key, int)
            for one in optimizers
            for group in one.get("param_groups", ())
            for key in group["params"]
        )
        if not numbered:
            state["optimizer_states"] = [get_optimizer_state_dict(model, optimizer) for optimizer in self.optimizers]
            for optimizer, one in zip(self.optimizers, optimizers):  # before anything is overwritten
                given = {**one, "param_groups": whole(one.get("param_groups", []))}
                refuse_optimizers(model, optimizer, given, StateDictOptions())
        fill(state, checkpoint_id=checkpoint.url, planner=DefaultLoadPlanner(allow_partial_load=not strict))
        if numbered:  # saved by a ReshardIO, from full parameters
            order = fqn_map(model, *self.optimizers).parameter_order
            state["optimizer_states"] = [normalize(whole(one), order=order(n)) for n, one in enumerate(optimizers)]
        for number, optimizer in enumerate(self.optimizers):
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["state_dict"],
                optim_state_dict=state["optimizer_states"][number],
            )
            groups = state["optimizer_states"][number].get("param_groups", ())
            for _, places in group_orders(model, optimizer, groups):  # schedulers list learning rates by group position
                rest["lr_schedulers"] = [
                    in_order(saved, places) if getattr(scheduler, "optimizer", None) is optimizer else saved
                    for scheduler, saved in zip(schedulers, rest.get("lr_schedulers", ()))
                ]
        return rest


class ReshardCheckpoint(CheckpointCallback):
    """A Lightning callback that saves with a `reshard.CheckpointManager` during `fit`. `fit` starts
    by restoring the newest step.

        Trainer(callbacks=[ReshardCheckpoint("run", every=reshard.Every(steps=500), keep=reshard.Keep(last=3))])

    Args:
        root, options: passed to `CheckpointManager`. The metric of `keep` is a key of
            `trainer.callback_metrics`.
        save_last: at the end of `fit`, save the last step even if it is not due. After an
            exception, nothing is saved.

    Attributes:
        manager: the manager of the last `fit`. None before the first `fit`, and with
            `fast_dev_run`.
    """

    def __init__(self, root: str | os.PathLike[str], *, save_last: bool = True, **options: Any) -> None:
        every = options.get("every")
        if not (isinstance(every, Every) or options.get("read_only")):  # fail now, not when fit begins
            words = "reshard.Every(steps=..., seconds=...)"
            raise OptionError(f"ReshardCheckpoint: every must be {words}, got {format_value(every)}")
        self.manager: CheckpointManager | None = None
        self._save_last = save_last
        self._make = partial(CheckpointManager, root, **options)
        self._state: dict[str, Any] = {}
        self._restored: RestoreReport | None = None
        self._step = 0
        self._has_trained = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the newest step."""
        self.manager = self._restored = None
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by name
            return
        self.manager = self._make()
        self._state = {
            "model": trainer.model,  # with its wrapper, which says which rank's buffers to save
            "optim": trainer.optimizers,
            "rng": torch.default_generator,
            "schedulers": {str(n): config.scheduler for n, config in enumerate(trainer.lr_scheduler_configs)},
            "trainer": PerRank(_TrainerState(trainer), on_change=lambda saved, *_: saved[0]),
        }
        self._restored = self.manager.restore(self._state, strict=pl_module.strict_loading)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise CheckpointError if Lightning has also resumed from a `ckpt_path`. Some strategies
        do so only at this point.
        """
        if self._restored is not None and trainer.ckpt_path is not None:
            raise CheckpointError(
                f"fit got ckpt_path={trainer.ckpt_path!r}, but the root already has {self._restored.path}: leave "
                "ckpt_path out to continue from that step, or choose another root"
            )
        self._step, self._has_trained, loop = trainer.global_step, False, trainer.fit_loop
        if self._restored is not None and not loop.restarting and loop._combined_loader is not None:
            loop._combined_loader._load_state_dicts(loop._combined_loader_states_to_load)  # omitted after whole epochs
            loop._combined_loader_states_to_load = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if a save is due, or `fit` ends here. Batches that only accumulate gradients are skipped, because
        gradients are not saved.
        """
        if self.manager is None or self._step == trainer.global_step:
            return
        # now, since Lightning's state after fit says that this epoch is complete
        is_end = trainer.should_stop and trainer.fit_loop._can_stop_early
        is_end = is_end or 0 < trainer.max_steps <= trainer.global_step
        self._save(trainer, force=self._save_last and is_end)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step, unless it is saved already."""
        if self.manager is not None and self._save_last and self._has_trained:
            self._save(trainer, force=True)

    def _save(self, trainer: Trainer, *, force: bool = False) -> None:
        assert self.manager is not None
        self._step, self._has_trained = trainer.global_step, True
        metrics = {key: value for key, value in trainer.callback_metrics.items() if key == self.manager.keep.metric}
        if self.manager.save(self._step, self._state, metrics, force=force).preempted:
            trainer.should_stop = True

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the manager. If closing fails, its error becomes a note of the exception."""
        if self.manager is not None:
            trainer._signal_connector.teardown()  # Lightning's signal handlers were installed last, so they go first
            self.manager.__exit__(type(exception), exception, None)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the manager."""
        if self.manager is not None:
            self.manager.close()


class _TrainerState:
    """The trainer's state other than model, optimizers, and schedulers: loops, callbacks, precision,
    and data.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        dumped = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        return {key: value for key, value in dumped.items() if key not in (*_SHARDED, "lr_schedulers")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        connector = self._trainer._checkpoint_connector
        connector._loaded_checkpoint = state
        call._call_lightning_module_hook(self._trainer, "on_load_checkpoint", state)
        connector.restore_datamodule()
        connector.restore_callbacks()
        connector.restore_precision_plugin_state()
        connector.restore_loops()
        connector._loaded_checkpoint = {}
