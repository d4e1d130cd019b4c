"""Calls of which a group can be sure that they are wrong, before it hears of any other rank."""

from __future__ import annotations

import os

from reshard.errors import ReshardError

__all__ = ["no_deadline", "refuse_unjoined"]


def no_deadline(deadline_s: object) -> ReshardError | None:
    """What to raise for a deadline that is none."""
    if isinstance(deadline_s, int | float) and deadline_s > 0:
        return None
    return ReshardError(f"a deadline must be a positive number of seconds, not {deadline_s!r}")


def refuse_unjoined() -> None:
    """Raises ReshardError where the environment, as of torchrun, says that there are more processes than this one."""
    size = os.environ.get("WORLD_SIZE", "")
    if size.isdecimal() and int(size) > 1:
        raise ReshardError(
            f"this is one of {size} processes (WORLD_SIZE={size} in the environment), but torch.distributed is not "
            "initialised, so each would act for itself, over what the others do: call "
            "torch.distributed.init_process_group() first. If this process is to act by itself, say so with alone=True "
            "(no_dist=True in reshard.dcp), or unset WORLD_SIZE"
        )
