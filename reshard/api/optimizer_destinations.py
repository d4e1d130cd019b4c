"""Where a fresh optimizer's state is loaded to: memory for every state tensor of a checkpoint, with
nothing stepped.

A new optimizer holds no state, so its state dict has no places to load into. What is to come is
known all the same: the checkpoint says which parameters have which state, and a state tensor of the
parameter's shape lies where the parameter lies.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from reshard.api.load import saved_in
from reshard.checkpoint import Checkpoint, open as open_checkpoint
from reshard.errors import KeyMismatchError
from reshard.live.optimizer_state import LazyOptimizerState, fill, is_flat_key
from reshard.state import KeyPath
from reshard.state_dict.api import get_model_state_dict, get_optimizer_state_dict
from reshard.state_dict.names import Models

__all__ = ["optimizer_destinations"]


def optimizer_destinations(
    model: Models, optimizers: Optimizer | Iterable[Optimizer], source: Any, *, prefix: str = "optim"
) -> dict[str, Any]:
    """An optimizer state dict with memory for the state that `source` holds; give it to `load`,
    then to `set_optimizer_state_dict`. The optimizer is neither stepped nor changed.

    Args:
        source: the checkpoint, open or as a path.
        prefix: the key that the optimizer's state dict was saved under: "optim" for {"optim": ...},
            "" for none.

    Returns:
        `{"state": {fqn: {name: value}}, "param_groups": [...]}`: state of the model's parameters
        that were saved with some; tensors of the parameter's shape are sharded like it, in the
        saved dtype; all others are whole. Groups
        are the live ones. Where the flat form was saved, the flat form: `state.<fqn>.<name>` and
        `param_groups.<fqn>.<field>` of the model's parameters. What was saved as one tensor under
        several keys has one place; a load of the whole state makes it one with a parameter that it
        was saved as one with.

    Raises:
        KeyMismatchError: the checkpoint has nothing under `prefix`.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    above: KeyPath = tuple(prefix.split(".")) if prefix else ()
    rows = [row for row in saved_in(checkpoint) if row.path[: len(above)] == above]
    if not rows:
        names = sorted({str(checkpoint.contents.paths.get(key, (key,))[0]) for key in checkpoint})[:8]
        raise KeyMismatchError(
            f"{checkpoint.url} has nothing under {prefix!r}; its keys begin with {', '.join(names)}. "
            "Give the key that the optimizer's state dict was saved under as prefix="
        )
    rows = [row if row.shape is not None else row._replace(value=checkpoint.objects[row.key]) for row in rows]
    parameters = get_model_state_dict(model)
    live = get_optimizer_state_dict(model, optimizers)
    state = LazyOptimizerState({}, parameters)
    is_flat = any(is_flat_key(row.path[len(above)]) for row in rows if len(row.path) > len(above))
    fill(state, above if is_flat else (*above, "state"), rows, checkpoint.contents.containers, groups=is_flat)
    state.is_complete = True
    if is_flat:
        return state
    of_the_whole = {key: own for key, own in live.get("state", {}).items() if key not in parameters}
    state.update(copy.deepcopy(of_the_whole))
    return {"state": state, "param_groups": live.get("param_groups", [])}
