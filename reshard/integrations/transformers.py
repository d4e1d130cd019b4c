"""The transformers `Trainer` with sharded checkpoints: each process writes and reads its own part.

    from reshard.integrations.transformers import ReshardTrainer

    trainer = ReshardTrainer(model, args, train_dataset=data)         # instead of Trainer
    trainer.train(resume_from_checkpoint=True)

    class MyTrainer(ReshardTrainer, SFTTrainer): ...                  # any other trainer

It is a class and not a callback, because the Trainer loads before it calls the first callback. The
folder `checkpoint-<step>` contains a native checkpoint with model, optimizer, and scheduler, and
the Trainer's own files with its state, random states, and gradient scaler. Of a model with PEFT
adapters, only the trainable parameters are saved.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeGuard

from torch.optim import Optimizer

from reshard.api.load import load
from reshard.api.optimizer_destinations import optimizer_destinations
from reshard.api.retention import steps
from reshard.api.save import save
from reshard.checkpoint import open as open_checkpoint
from reshard.errors import CheckpointNotFoundError, ReshardError, format_names, framework
from reshard.live.state import OwnState, in_order
from reshard.native.manifest import MANIFEST
from reshard.state_dict import (
    fqn_map,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from reshard.state_dict.api import group_orders
from reshard.state_dict.options import StateDictOptions

with framework("transformers>=5 accelerate>=1"):
    from accelerate.optimizer import AcceleratedOptimizer
    from transformers import Trainer, TrainingArguments
    from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME

__all__ = ["ReshardTrainer"]


class ReshardTrainer(Trainer):
    """A Trainer that decides as usual when and what to save. It also resumes checkpoints that the
    plain Trainer wrote, with the Trainer's own code.
    """

    def __init__(self, *given: Any, **options: Any) -> None:
        """Take the Trainer's arguments. Models that transformers itself shards are allowed and
        saved completely, although the plain Trainer refuses to save them."""
        values = (*given, *options.values())  # subclasses of Trainer have different argument orders
        is_refused = any(getattr(one, "is_distributed_loading_by_transformers", False) for one in values)
        args = [one for one in values if is_refused and isinstance(one, TrainingArguments)]
        before = [one.save_only_model for one in args]
        try:
            for one in args:
                one.save_only_model = True
            super().__init__(*given, **options)
        finally:
            for one, only in zip(args, before):
                one.save_only_model = only

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """Train as the Trainer does. With `resume_from_checkpoint=True`, resume from the newest
        complete checkpoint, and with a path from that one. To resume only if there is a checkpoint, pass
        `reshard.latest_complete(args.output_dir) is not None`.

        Raises CheckpointNotFoundError if there is none, and ReshardError under an engine that
        saves by itself.
        """
        if self.is_deepspeed_enabled:
            raise ReshardError(
                "DeepSpeed's engine saves its own checkpoints: use the plain Trainer, and convert its checkpoints "
                "with reshard.convert"
            )
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self._newest()
        return super().train(resume_from_checkpoint, *args, **options)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save one unsharded model that `from_pretrained` reads. Inside a checkpoint, save only the
        config.
        """
        if not _internal_call or output_dir is None:
            super().save_model(output_dir, _internal_call)
            return
        config = getattr(self.accelerator.unwrap_model(self.model), "config", None)
        if self.args.should_save and config is not None:  # conversions need the config
            os.makedirs(output_dir, exist_ok=True)
            config.save_pretrained(output_dir)
        if self.args.save_only_model:
            save({"model": get_model_state_dict(self.model_wrapped, options=self._options())}, output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state: dict[str, Any] = {"scheduler": self.lr_scheduler.state_dict()}
        wrapped, optimizer = self.model_wrapped, self._inner_optimizer()  # the wrapper says whose buffers to save
        state["model"], state["optim"] = get_state_dict(wrapped, optimizer, options=self._options())
        save(state, output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self._is_read_here(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        model, options = self.model if model is None else model, self._options()
        state = {"model": get_model_state_dict(model, options=options)}
        if _is_ours(resume_from_checkpoint):
            load(state, resume_from_checkpoint, strict={"model*": "strict", "*": "subset"})
        else:
            weights = open_checkpoint(os.path.join(resume_from_checkpoint, "model*.safetensors"))
            tied = {
                alias: entry.canonical
                for entry in fqn_map(model).entries
                for alias in entry.aliases
                if alias not in weights
            }
            load(state["model"], weights.canonical({"tied": tied}, model_only=True))
        set_model_state_dict(model, state["model"], options=options)

    def _load_best_model(self) -> None:
        if self._is_read_here(self.state.best_model_checkpoint):
            self._load_from_checkpoint(self.state.best_model_checkpoint)
        else:
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self._is_read_here(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        source, optimizer = open_checkpoint(checkpoint), self._inner_optimizer()
        state: dict[str, Any] = {"scheduler": OwnState.of(self.lr_scheduler)}
        if not _is_ours(checkpoint):
            if not Path(checkpoint, OPTIMIZER_NAME).is_file():
                return  # like the Trainer
            state["scheduler"] = dict(source.nested()["scheduler"])
            OwnState.check("scheduler", self.lr_scheduler, state["scheduler"])
            source = source.canonical({"param_names": fqn_map(self.model, optimizer).parameter_order()})
        state["optim"] = optimizer_destinations(self.model, optimizer, source)
        load(state, source, strict={"model*": "subset", "scheduler*": "strict" if _is_ours(checkpoint) else "partial"})
        set_optimizer_state_dict(self.model, optimizer, state["optim"], options=self._options())
        groups = state["optim"].get("param_groups", ())
        for _, order in group_orders(self.model, optimizer, groups):  # schedulers list rates by group position
            state["scheduler"] = in_order(state["scheduler"], order)
        self.lr_scheduler.load_state_dict(state["scheduler"])

    def _is_read_here(self, folder: str | None) -> TypeGuard[str]:
        """Return True for checkpoints of this class, and for the Trainer's checkpoint of an
        unsharded model if transformers shards this model.
        """
        is_sharded = self.is_distributed_loading_by_transformers and not self._options().ignore_frozen_params
        return folder is not None and (_is_ours(folder) or is_sharded)

    def _options(self) -> StateDictOptions:
        """Return options that omit frozen parameters if the model has adapters: they come from the
        base model."""
        has_adapters = hasattr(self.accelerator.unwrap_model(self.model), "peft_config")
        return StateDictOptions(ignore_frozen_params=has_adapters)

    def _inner_optimizer(self) -> Optimizer:
        found: Any = self.optimizer
        inner: Optimizer = found.optimizer if isinstance(found, AcceleratedOptimizer) else found
        return inner

    def _newest(self) -> str:
        """Return the newest complete checkpoint: one in which the Trainer's own state, which is
        written last, exists."""
        found = steps(self.args.output_dir)
        whole = [step.path for step in found if step.problem is None and Path(step.path, TRAINER_STATE_NAME).is_file()]
        if not whole:
            names = format_names([Path(step.path).name for step in found])
            raise CheckpointNotFoundError(
                f"{self.args.output_dir} has no complete checkpoint to resume from"
                + (f"; not complete: {names}" if found else ": on the first run, pass resume_from_checkpoint=False")
            )
        return whole[-1]


def _is_ours(folder: str | None) -> bool:
    return folder is not None and Path(folder, MANIFEST).is_file()
