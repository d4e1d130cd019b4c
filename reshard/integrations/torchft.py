"""Recovery of torchft replica groups through checkpoints: a group that is behind reads what another
group wrote.

    from reshard.integrations.torchft import ReshardTransport

    Manager(..., checkpoint_transport=ReshardTransport(f"/shared/heal/{replica_id}"))

Nothing that a peer sends is unpickled, and reads are verified. Ranks that shard within their group
each write and read their own part. The transport needs a folder that all groups can reach. It suits
large states on fast storage, or `/dev/shm` on a single machine.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch.distributed as dist

from reshard.api.load import load
from reshard.api.retention import complete, remove_checkpoints
from reshard.api.save import save
from reshard.api.task_shares import absolute
from reshard.checkpoint import Checkpoint, open as open_checkpoint
from reshard.errors import CheckpointNotFoundError, DeadlineError, framework
from reshard.formats.run_folder import path_below
from reshard.ranks.group import Group
from reshard.stored.tensor import whole

with framework("torchft>=0.2"):
    from torchft.checkpointing.transport import CheckpointTransport

__all__ = ["ReshardTransport"]


_PAUSE_S = 0.05
"""Seconds between two checks for a checkpoint that another group is writing."""


class ReshardTransport(CheckpointTransport[Any]):  # type: ignore[misc]  # Any where torchft is not installed
    """A torchft checkpoint transport. Create one on each rank of a replica group, with the same
    arguments.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        into: Callable[[Checkpoint], dict[str, Any]] | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Create a transport.

        Args:
            folder: the folder of this replica group. The other groups read it at the same path or
                URL, so a relative one becomes absolute.
            into: a function that returns the state to load into, nested as torchft's manager
                nests it, such as {"user": {"default": {...}}, "torchft": {...}}. Required if the
                state is sharded. Without it, each rank gets the full state as plain tensors.
            process_group: the ranks that share the state within this replica group.
        """
        self._folder, self._into, self._process_group = absolute(os.fspath(folder)), into, process_group

    @cached_property
    def _run(self) -> str:
        """The name of this run of the group. Earlier runs may have written checkpoints of the same
        steps. Collective."""
        return Group(self._process_group).merge(uuid.uuid4().hex, min, "the name of the run")

    def metadata(self) -> str:
        """Return the prefix of the paths of this run's checkpoints. The first call is collective
        within the replica group."""
        return path_below(self._folder, self._run)

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        """Write the state. Collective within the replica group. The previous checkpoint is deleted,
        because no group reads it anymore.
        """
        path = self._path(self.metadata(), step)
        save(state_dict, path, process_group=self._process_group, timeout=timeout)
        if not dist.is_initialized() or dist.get_rank(self._process_group) == 0:
            others = [one.path for one in complete(self._folder) if one.is_below and one.path != path]
            remove_checkpoints(self._folder, others)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Wait for the checkpoint and read it. Collective within the replica group.

        Raises DeadlineError if the checkpoint does not appear within `timeout`, and the errors of
        `load`.
        """
        checkpoint = _awaited(self._path(metadata, step), timeout.total_seconds())
        if self._into is None:
            return whole(checkpoint.nested())
        state = self._into(checkpoint)
        load(state, checkpoint, process_group=self._process_group, timeout=timeout)
        return state

    @staticmethod
    def _path(metadata: str, step: int) -> str:
        return f"{metadata}-step-{step}"


def _awaited(path: str, timeout_s: float) -> Checkpoint:
    end = time.monotonic() + timeout_s
    while True:
        try:
            return open_checkpoint(path)
        except CheckpointNotFoundError as error:
            if time.monotonic() > end:
                raise DeadlineError(f"{path} did not appear within {timeout_s:g} s: {error}") from error
        time.sleep(_PAUSE_S)
