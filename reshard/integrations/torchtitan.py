"""torchtitan's checkpoint manager on reshard. Change one line of its config:

    from reshard.integrations.torchtitan import CheckpointManager

    checkpoint=CheckpointManager.Config(enable=True)           # instead of torchtitan's CheckpointManager

Folders, names, and files are the ones that torchtitan uses, so either manager resumes from the
checkpoints of the other. Predefined mappings read and write Hugging Face files, so shards can end
anywhere, even inside an attention head.

    checkpoint=ReshardManager.Config(enable=True, keep_latest_k=3)   # with a reshard.CheckpointManager
"""

from __future__ import annotations

import logging
import shutil
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.stateful import Stateful

from reshard import dcp
from reshard.api import convert, load, retention, save
from reshard.api.manager import CheckpointManager as Manager, Every, Keep
from reshard.errors import CheckpointError, NormalizationError, framework
from reshard.mapping import Mapping
from reshard.mapping.families import ready

with framework("torchtitan>=0.3"):
    import tyro
    from torchtitan.components.checkpointer import dcp as _theirs
    from torchtitan.components.checkpointer.base import MODEL

__all__ = ["CheckpointManager", "ReshardManager"]

_log = logging.getLogger("reshard")


class TitanManager(_theirs.CheckpointManager):
    """torchtitan's manager, which decides when, what, and where to save. `reshard.dcp` saves and loads."""

    @dataclass(kw_only=True, slots=True)
    class Config(_theirs.CheckpointManager.Config):
        """torchtitan's own options. A separate class, because torchtitan instantiates the class
        that contains it."""

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: Any,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Like torchtitan's method, but without a garbage collection, because a save here creates
        few objects.
        """
        if to_hf:
            if (names := self._names(checkpoint_id, "torchtitan", "huggingface")) is None:
                return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
            return _export(state_dict, checkpoint_id, names)
        if async_mode == _theirs.AsyncMode.DISABLED:
            dcp.save(state_dict, checkpoint_id=checkpoint_id)
            return None
        pinned = async_mode == _theirs.AsyncMode.ASYNC_WITH_PINNED_MEM
        return dcp.async_save(
            state_dict,
            checkpoint_id=checkpoint_id,
            process_group=self.pg,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS if pinned else AsyncCheckpointerType.THREAD,
            async_stager=self.stager if pinned else None,
        )

    def _find_load_step(self, folder: str = "") -> int:
        """Return the newest step that is complete in any format that `reshard.open` reads, or -1.
        torchtitan's own method knows only DCP and Hugging Face, and would start from scratch if
        there are other formats.
        """
        place = folder or self.folder
        if "://" in place:
            found: int = super()._find_load_step(folder)
            return found
        return _newest(place)

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Like torchtitan's method, but from any format and folder that `reshard.open` reads."""
        names = None
        if from_hf and not from_quantized:
            names = self._names(checkpoint_id, "huggingface", "torchtitan")
        if from_hf and names is None:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        if names is not None:
            # Hugging Face files lack the biases for load balancing of experts
            weights = {key: value for key, value in state_dict.items() if "expert_bias" not in key}
            load.load(weights, checkpoint_id, mapping=names, strict="subset", dtype_policy="cast")
        else:
            dcp.load(state_dict, checkpoint_id=checkpoint_id)
        if MODEL in self.states:  # the model's tensors are at the top level, beside the other states
            self.states[MODEL].load_state_dict(state_dict)

    def _names(self, folder: str, source: str, target: str) -> Mapping | None:
        """Return the mapping for the model family in the `config.json` beside the files. If there
        is none, log a warning and return None.
        """
        assets = getattr(self.sd_adapter, "hf_assets_path", None)
        places = [place for place in (folder, assets) if place]
        place = next((place for place in places if Path(place, "config.json").is_file()), None)
        why = f"there is no config.json in {' or '.join(places)}"
        try:
            if place is not None:
                return ready(place, source, target)
        except NormalizationError as error:
            why = str(error)
        _log.warning("torchtitan's own code moves the weights from %s to %s names: %s", source, target, why)
        return None


@dataclass(kw_only=True, slots=True)
class ManagerOptions(TitanManager.Config):
    """torchtitan's options, and options for `reshard.CheckpointManager`."""

    options: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
    """Options for `reshard.CheckpointManager`, such as `{"full_every": 10}`. They override
    torchtitan's.
    """


class ReshardManager(TitanManager):
    """A `reshard.CheckpointManager` decides when torchtitan saves, which steps to keep, and where
    to resume.

    The root contains steps in the native format. Steps that torchtitan or the other manager saved
    there earlier can be resumed, too, and are kept.
    """

    Config = ManagerOptions

    def __init__(self, config: Any, **parts: Any) -> None:
        super().__init__(replace(config, keep_latest_k=0, async_mode="disabled"), **parts)  # no threads of its own
        if not self.enable:
            return
        options = {
            "every": Every(steps=config.interval),
            "keep": Keep(last=config.keep_latest_k or None),
            "background": config.async_mode != "disabled",
            "read_only": config.load_only,
        }
        self._manager = self.save_future = Manager(self.folder, **{**options, **config.options})

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save if a save is due. torchtitan calls this at each step, because the manager also saves
        by the clock and before the job ends.

        Raises SystemExit after the save if a signal, a file, or a function has requested a stop.
        """
        if self.load_only:
            return False
        if last_step:
            self._manager.wait()
            self._save_last_step(curr_step)
            return True
        is_first = curr_step == 1 and self.enable_first_step_checkpoint
        report = self._manager.save(curr_step, _Lazy(lambda: _taken(self._flattened_model_states_sd())), force=is_first)
        if report.preempted:
            self._manager.close()
            raise SystemExit(f"step {curr_step} is saved in {self.folder}; {report.preempted_by} asked the job to end")
        return bool(report)

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: Any,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save the last step, which may have only the model, another dtype, or Hugging Face files."""
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        self._manager.save(int(checkpoint_id.rpartition("-")[2]), _taken(state_dict), force=True)
        self._manager.wait()
        return None

    def _load(self, step: int = -1) -> bool:
        """Load from the manager, unless the step is in another format.

        Raises CheckpointError if a newer step of another format is in the folder, because the run
        would later reach it.
        """
        steps, other = self._manager.all_steps(), self._find_load_step()
        if -1 < step < other and not self.load_only:
            raise CheckpointError(
                f"load_step={step}: {self._create_checkpoint_id(other)} is newer and of another format. The run cannot "
                "save there: move it away, or choose another checkpoint.folder"
            )
        is_its = step in steps if step != -1 else other <= max(steps, default=-1)
        return (is_its and self._restore(step, steps)) or super()._load(step)

    def _find_load_step(self, folder: str = "") -> int:
        """Return the newest complete step in other formats, or -1."""
        return _newest(folder or self.folder, but="native")

    @torch.no_grad()
    def _restore(self, step: int, steps: list[int]) -> bool:
        states = self._states_to_load(step == 0 or (step == -1 and steps == [0]))
        # lazy, because torchtitan's state_dict() advances Adam's step count
        found = _Lazy(lambda: _taken(states))
        wanted = None if step == -1 else step
        goes_back = wanted is not None and not self.load_only
        if self._manager.restore(found, wanted, discard_newer=goes_back, strict="subset") is None:
            return False
        for key, value in states.items():
            if isinstance(value, Stateful):
                value.load_state_dict(found[key])
        self.states[MODEL].load_state_dict(found)
        return True

    def _wait_for_saving(self) -> None:
        self._manager.wait()

    def _close(self) -> None:
        if hasattr(self, "_manager"):  # unset if the constructor failed
            self._manager.close()


def _newest(folder: str, but: str = "") -> int:
    whole = (step for step in retention.steps(folder) if step.problem is None and step.format != but)
    return max((step.step for step in whole if step.step is not None), default=-1)


class _Lazy(UserDict[str, Any]):
    """Computes its contents on first use."""

    def __init__(self, make: Callable[[], dict[str, Any]]) -> None:
        self._make = make

    @cached_property
    def data(self) -> dict[str, Any]:  # type: ignore[override]
        return self._make()


def _taken(states: dict[str, Any]) -> dict[str, Any]:
    return {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in states.items()}


def _export(state_dict: dict[str, Any], folder: str, names: Mapping) -> None:
    """Save each rank's part, and convert it to Hugging Face files. Collective."""
    parts = Path(folder, "sharded")
    weights = {key: value for key, value in state_dict.items() if isinstance(value, torch.Tensor)}
    save.save(weights, parts)
    convert.convert(parts, folder, format="safetensors", mapping=names, overwrite=True)
    if not dist.is_initialized() or dist.get_rank() == 0:
        shutil.rmtree(parts)


CheckpointManager = TitanManager
"""torchtitan's name for it. Not to be confused with `reshard.CheckpointManager`."""
