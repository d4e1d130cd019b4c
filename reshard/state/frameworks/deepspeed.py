"""Parameters that DeepSpeed's ZeRO-3 has cut up: told by what it leaves on them, and made whole by its own context.

Such a parameter is an empty tensor; DeepSpeed puts its number, shape and this rank's part on it as `ds_id`, `ds_shape`
and `ds_tensor`. What is inside `GatheredParameters` is whole, and a parameter like any other.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from reshard.errors import NormalizationError

__all__ = ["HOW_TO_SAVE", "PartitionedParameter", "is_partitioned", "whole_shape"]

HOW_TO_SAVE = (
    "save by the engine's own save_checkpoint, which reshard opens, normalizes and converts as it does its own"
)
"""What to do about state that only DeepSpeed can put together."""


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Whether this rank has only a part of the parameter, outside of the tensor."""
    return hasattr(parameter, "ds_id") and tuple(parameter.shape) != whole_shape(parameter)


def whole_shape(parameter: Any) -> tuple[int, ...]:
    """The shape that a parameter of ZeRO-3 has when it is whole."""
    return tuple(parameter.ds_shape)


@dataclass(frozen=True)
class PartitionedParameter:
    """A parameter that can be made whole, by all ranks of its process group together."""

    parameter: torch.Tensor

    def whole(self, keep: bool) -> torch.Tensor | None:
        """The whole parameter in memory of its own, None unless `keep`. Collective: all ranks that have a part call.

        Raises NormalizationError where DeepSpeed cannot be imported.
        """
        try:
            zero = importlib.import_module("deepspeed").zero
        except ImportError as error:
            raise NormalizationError(
                f"a parameter of shape {whole_shape(self.parameter)} is cut up by DeepSpeed's ZeRO-3, and made whole "
                f"by deepspeed.zero.GatheredParameters, which cannot be imported here: {error}"
            ) from error
        with zero.GatheredParameters([self.parameter], modifier_rank=None):
            return self.parameter.detach().clone() if keep else None
