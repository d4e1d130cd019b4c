"""Memory to load a fresh optimizer's state into, without a step of the optimizer.

A new optimizer holds no state, so its state dict has nothing to fill. The checkpoint says which
parameters have which state. A state tensor with the shape of its parameter is sharded like the
parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from reshard.api.key_suggestions import named_from_numbers
from reshard.api.load import saved_in
from reshard.arguments import renamed
from reshard.checkpoint import Checkpoint, CheckpointSource, open as open_checkpoint
from reshard.errors import KeyMismatchError
from reshard.live.optimizer_state import LazyOptimizerState, fill, is_flat_key
from reshard.state import NUMBERED, key_of
from reshard.state_dict.api import get_model_state_dict, get_optimizer_state_dict
from reshard.state_dict.live_model import Models


@renamed()
def optimizer_destinations(
    model: Models, optimizers: Optimizer | Iterable[Optimizer], source: CheckpointSource, *, prefix: str = "optim"
) -> dict[str, Any]:
    """Allocate an optimizer state dict for the state that `source` contains. Does not step or change
    the optimizer.

    Pass the result to `load`, then to `set_optimizer_state_dict`. You do not need this function for
    the dict from `get_state_dict`, because `load` does the same for it. Use it for a dict that you
    copy, or if you do not know whether the flat form was saved.

    Args:
        model, optimizers: as for `get_state_dict`.
        source: the checkpoint, open or as a path.
        prefix: the key that the optimizer's state dict was saved under: "optim" for {"optim": ...},
            "" for none.

    Returns:
        `{"state": {fqn: {name: value}}, "param_groups": [...]}` for the model's parameters that
        were saved with state. Tensors with the shape of the parameter are sharded like it, in the
        saved dtype. All others are full tensors. Groups are those of the optimizer. If the flat form
        was saved, the result is flat: `state.<fqn>.<name>` and `param_groups.<fqn>.<field>`. A tensor
        that was saved once under several keys has one target. If it was tied to a parameter when
        saved, a load of the complete state ties the two again.

    Raises:
        KeyMismatchError: the checkpoint has nothing under `prefix`, or has state by the index of
            each parameter, not by its name.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    rows = [*saved_in(checkpoint)]
    places = (row.path[:i] for row in rows for i in range(len(row.path)))
    above = next((place for place in places if key_of(place) == prefix), None)
    rows = [row for row in rows if row.path[: len(above or ())] == above]
    if above is None:
        names = sorted({str(checkpoint.contents.path_of(key)[0]) for key in checkpoint})[:8]
        raise KeyMismatchError(
            f"{checkpoint.url} has nothing under {prefix!r}; its keys begin with {', '.join(names)}. "
            "Pass prefix=, the key under which the optimizer's state dict was saved"
        )
    rows = [
        row if row.shape is not None else row._replace(value=copy.deepcopy(checkpoint.objects[row.key])) for row in rows
    ]
    parameters = get_model_state_dict(model)
    numbered = [row.key for row in rows if NUMBERED.fullmatch(row.key)]
    if numbered and not any(name.isdecimal() for name in parameters):
        raise KeyMismatchError(
            f"{checkpoint.url} has the optimizer's state by the index of each parameter, such as {numbered[0]!r}, not "
            f"by its name. Pass named = {named_from_numbers(repr(checkpoint.url))} here and to load: the names are in "
            "the order in which the optimizer got its parameters"
        )
    live = get_optimizer_state_dict(model, optimizers)
    state = LazyOptimizerState({}, parameters, has_own=getattr(live.get("state"), "has_own", False))
    is_flat = any(is_flat_key(row.path[len(above)]) for row in rows if len(row.path) > len(above))
    fill(state, above if is_flat else (*above, "state"), rows, checkpoint.contents.containers, says_none=False)
    state.is_complete = True
    if is_flat:
        return state
    of_the_whole = {key: own for key, own in live.get("state", {}).items() if key not in parameters}
    state.update(copy.deepcopy(of_the_whole))
    return {"state": state, "param_groups": live.get("param_groups", [])}
