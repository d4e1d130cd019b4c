"""Parameters that DeepSpeed's ZeRO-3 has sharded: recognized by their attributes, and gathered by
DeepSpeed."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from reshard.errors import NormalizationError

# Such a parameter is an empty tensor; DeepSpeed puts its number, shape and this rank's part on it
# as `ds_id`, `ds_shape` and `ds_tensor`. What is inside `GatheredParameters` is whole, and a
# parameter like any other.


HOW_TO_SAVE = "save with DeepSpeed's engine.save_checkpoint; reshard opens and converts the result"
"""What to do about state that only DeepSpeed can reassemble."""

HOW_TO_GET = (
    "get the full state dict (full_state_dict=True, or iter_full), which all ranks gather together; or get it "
    f"inside deepspeed.zero.GatheredParameters; or {HOW_TO_SAVE}"
)
HOW_TO_SET = (
    "set the state dict before deepspeed.initialize, which also makes its own copies of the parameters; or load by the "
    "engine's own load_checkpoint; or, of a model without an optimizer, set it inside "
    "deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)"
)
WHOSE_OPTIMIZERS = f"only DeepSpeed knows which state of its optimizers belongs to which parameter; {HOW_TO_SAVE}"


def is_partitioned(parameter: object) -> bool:
    """Return True if this rank has only a part of the parameter, which is outside the tensor."""
    return hasattr(parameter, "ds_id") and tuple(parameter.shape) != whole_shape(parameter)  # type: ignore[attr-defined]


def whole_shape(parameter: Any) -> tuple[int, ...]:
    """Return the shape of the gathered parameter of ZeRO-3."""
    return tuple(parameter.ds_shape)


def gather_partitioned(parameter: torch.Tensor, keep: bool) -> torch.Tensor | None:
    """Return the gathered parameter in new memory, or None unless `keep`. Collective: all ranks
    that have a part must call it.

    Raises NormalizationError if DeepSpeed cannot be imported.
    """
    try:
        zero = importlib.import_module("deepspeed").zero
    except ImportError as error:
        raise NormalizationError(
            f"a parameter of shape {whole_shape(parameter)} is sharded by DeepSpeed's ZeRO-3. "
            f"deepspeed.zero.GatheredParameters, which gathers it, cannot be imported: {error}"
        ) from error
    with zero.GatheredParameters([parameter], modifier_rank=None):
        return parameter.detach().clone() if keep else None
