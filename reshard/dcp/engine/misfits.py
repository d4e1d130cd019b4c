"""What does not fit: with torch's key phrases, and with advice that callers of the face can follow."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from reshard.api.load.options import Wording
from reshard.dcp.engine.states import is_checkpointable, shape_of
from reshard.errors import KeyMismatchError
from reshard.state.deferred_optimizer import Saved, lost_state
from reshard.state.tensors import is_tensor

__all__ = ["ENGINE_WORDING", "MisfitError", "refuse_lost_state", "refuse_misfits"]

_ALLOW = "DefaultLoadPlanner(allow_partial_load=True) leaves what is not saved as it is"
_MISSING = "Missing key in checkpoint state_dict"


class MisfitError(KeyMismatchError, ValueError):
    """A key has another shape, or is another kind of thing, than what is to be loaded: torch raises a ValueError."""


ENGINE_WORDING = Wording(_MISSING, "Size mismatch, or another kind of value", _ALLOW, MisfitError)


def refuse_misfits(wanted: Mapping[str, Any], saved: Mapping[str, Any], *, partial: bool) -> None:
    """Raises KeyMismatchError with all keys of `wanted` that torch's metadata of what is `saved` does not fit.

    `partial`: keys may be missing.
    """
    missing = [] if partial else [key for key in wanted if key not in saved]
    wrong = [text for key, value in wanted.items() if (text := _misfit(key, value, saved.get(key)))]
    if not missing and not wrong:
        return
    lines = ["the checkpoint does not fit what is to be loaded:"]
    for key in missing:
        close = difflib.get_close_matches(key, list(saved), n=1, cutoff=0.75) if len(missing) < 20 else []
        lines.append(f"  {_MISSING}: {key}" + (f"   (did you mean {close[0]!r}?)" if close else ""))
    lines += [f"  {text}" for text in wrong]
    lines += [f"  ({_ALLOW})"] if missing else []
    raise (MisfitError if wrong else KeyMismatchError)("\n".join(lines))


def _misfit(key: str, value: Any, entry: Any) -> str:
    if entry is None or not (is_tensor(value) or is_checkpointable(value)):
        return ""
    if not isinstance(entry, TensorStorageMetadata):
        return f"{key}: saved as an object, wanted as a tensor"
    shape = torch.Size(shape_of(value))
    return "" if entry.size == shape else f"Size mismatch between saved {entry.size} and current: {shape} for {key}"


def refuse_lost_state(state_dict: dict[str, Any], saved: Iterable[Saved]) -> None:
    """Raises KeyMismatchError where a whole optimizer's state would stay behind, since there is no place for it."""
    for key in lost_state(state_dict, saved):
        raise KeyMismatchError(
            f"{key!r} is empty, and the checkpoint has state there, which would be lost: a load fills what is there. "
            "Get the dict by get_optimizer_state_dict of reshard.dcp.state_dict, which knows where state is to go; or "
            "load without it by DefaultLoadPlanner(allow_partial_load=True)"
        )
