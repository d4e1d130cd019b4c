"""torchtitan's checkpoint manager on this engine: one line of its config.

    from reshard.integrations.torchtitan import CheckpointManager

    checkpoint=CheckpointManager.Config(interval=500)          # in place of torchtitan's own of that name

Folders, names and files stay those that torchtitan writes and finds: either manager resumes from
what the other saved. Hugging Face's files are read and written by ready mappings, so shards may end
anywhere, also within a head.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torchtitan.components.checkpointer import dcp as _theirs
from torchtitan.components.checkpointer.base import MODEL

from reshard import dcp
from reshard.api import convert, load, retention, save
from reshard.errors import NormalizationError
from reshard.mapping import Mapping
from reshard.mapping.families import ready

__all__ = ["CheckpointManager"]

_log = logging.getLogger("reshard")


class TitanManager(_theirs.CheckpointManager):
    """Decides as torchtitan does when, what and where; `reshard.dcp` saves and loads."""

    @dataclass(kw_only=True, slots=True)
    class Config(_theirs.CheckpointManager.Config):
        """torchtitan's own: it builds the class in which it finds a config of that name."""

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: Any,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """As torchtitan's, without a garbage collection: few objects are made here."""
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
        """The newest step that is complete in any format that opens, -1 if there is none:
        torchtitan's own sees DCP's and Hugging Face's only, and would begin anew where there are
        others."""
        place = folder or self.folder
        if "://" in place:
            found: int = super()._find_load_step(folder)
            return found
        whole = (step for step in retention.steps(place) if step.problem is None)
        return max((step.step for step in whole if step.step is not None), default=-1)

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """As torchtitan's, from any format and folder that `reshard.open` opens."""
        names = None
        if from_hf and not from_quantized:
            names = self._names(checkpoint_id, "huggingface", "torchtitan")
        if from_hf and names is None:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        if names is not None:
            load.load(_in_files(state_dict), checkpoint_id, mapping=names, strict="subset", dtype_policy="cast")
        else:
            dcp.load(state_dict, checkpoint_id=checkpoint_id)
        if MODEL in self.states:  # its values stand beside the other states, under names of their own
            self.states[MODEL].load_state_dict(state_dict)

    def _names(self, folder: str, source: str, target: str) -> Mapping | None:
        """The mapping of the model's family, by the `config.json` beside the files; None, and a
        warning, where there is none."""
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


def _in_files(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Without what balances experts, which no family's files have."""
    return {key: value for key, value in state_dict.items() if "expert_bias" not in key}


def _export(state_dict: dict[str, Any], folder: str, names: Mapping) -> None:
    """Save what each rank has, and write Hugging Face's files of it; collective."""
    parts = Path(folder, "sharded")
    weights = {key: value for key, value in state_dict.items() if isinstance(value, torch.Tensor)}
    save.save(weights, parts)
    convert.convert(parts, folder, format="safetensors", mapping=names, overwrite=True)
    if not dist.is_initialized() or dist.get_rank() == 0:
        shutil.rmtree(parts)


CheckpointManager = TitanManager
"""As torchtitan calls it; `reshard.CheckpointManager` is another one."""
