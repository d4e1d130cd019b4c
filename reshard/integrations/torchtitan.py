"""torchtitan's checkpoint manager on this engine: one line of its config.

    from reshard.integrations.torchtitan import CheckpointManager

    checkpoint=CheckpointManager.Config(interval=500)          # in place of torchtitan's own of that name

Folders, names and files stay those that torchtitan writes and finds: either manager resumes from
what the other saved. What goes to and comes from Hugging Face's format is left to torchtitan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torchtitan.components.checkpointer import dcp as _theirs
from torchtitan.components.checkpointer.base import MODEL

from reshard import dcp
from reshard.api.retention import steps

__all__ = ["CheckpointManager"]


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
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
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
        return max((step.step for step in steps(place) if step.problem is None and step.step is not None), default=-1)

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """As torchtitan's, from any format and folder that `reshard.open` opens."""
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        dcp.load(state_dict, checkpoint_id=checkpoint_id)
        if MODEL in self.states:  # its values stand beside the other states, under names of their own
            self.states[MODEL].load_state_dict(state_dict)


CheckpointManager = TitanManager
"""As torchtitan calls it; `reshard.CheckpointManager` is another one."""
