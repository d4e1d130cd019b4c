"""Taking the state of optimizers, by canonical names; nothing is stepped, initialised or changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.errors import NormalizationError
from reshard.state.frameworks.deepspeed import HOW_TO_SAVE
from reshard.state.optimizer_forms import is_nested
from reshard.state_dict.names import where
from reshard.state_dict.optimizer.flat_parameters import split_state
from reshard.state_dict.optimizer.parameters import LiveOptimizers, OptimizedParameter
from reshard.state_dict.values import copy_containers

__all__ = ["read_optimizers"]


def read_optimizers(live: LiveOptimizers) -> dict[str, Any]:
    """`{"state": {name: {state name: value}}, "param_groups": [{field: value, "params": [names]}]}`, the groups of all
    optimizers one after another. Parameters without state are in a group and not in `state`.

    The containers are new, the tensors are the live ones.
    """
    state: dict[Any, Any] = {}
    groups: list[dict[str, Any]] = []
    for k, optimizer in enumerate(live.optimizers):
        saved = optimizer.state_dict()
        if not is_nested(saved):
            cls, found = type(optimizer), ", ".join(map(repr, list(saved)[:8]))
            raise NormalizationError(
                f"the state dict of optimizer {k} ({cls.__module__}.{cls.__qualname__}){where()} has {found}, and not "
                "'state' and 'param_groups' as torch's have. Give the optimizer that is inside, if it holds the "
                f"model's own parameters; of DeepSpeed's, {HOW_TO_SAVE}"
            )
        # ids are positions, unless several parameters share one
        plain = {} if live.live.pieces_of else {one.id: one.names[0] for one in live.parameters[k]}
        keys = [key for group in saved["param_groups"] for key in group["params"]]
        named = {key: _names(key, live, k) for key in keys if type(key) is not int or key not in plain}
        for key, values in saved["state"].items():
            known = plain.get(key) if type(key) is int else None
            if known is not None and known not in state:
                if values:
                    state[known] = copy_containers(values)
            elif values:
                for i, (name, one) in enumerate(named.get(key) or _names(key, live, k)):
                    if name in state:
                        raise NormalizationError(f"two optimizers have state under the key {name!r}{where()}")
                    if one is not None and one.piece is not None:
                        state[name] = split_state(one.piece, one.parameter, values, copy=i > 0)
                    else:
                        state[name] = copy_containers(values)
        for group in saved["param_groups"]:
            fields = {
                field: copy_containers(value)
                for field, value in group.items()
                if field not in ("params", "param_names")
            }
            groups.append({**fields, "params": _listed(group["params"], plain, named)})
    return {"state": state, "param_groups": groups}


def _listed(
    keys: list[Any], plain: Mapping[int, str], named: Mapping[Any, list[tuple[Any, OptimizedParameter | None]]]
) -> list[Any]:
    if not named:
        return [plain[key] for key in keys]
    return [name for key in keys for name in ([plain[key]] if key not in named else [one for one, _ in named[key]])]


def _names(key: Any, live: LiveOptimizers, k: int) -> list[tuple[Any, OptimizedParameter | None]]:
    """The canonical names of a key of an optimizer's own state dict; keys of no parameter stay as they are."""
    if isinstance(key, int) and not isinstance(key, bool):
        ones = live.by_id[k].get(key)
        if ones is None:
            raise NormalizationError(
                f"optimizer {k} has state under the id {key}{where()}, but only {len(live.by_id[k])} parameters"
            )
        return [(one.name, one) for one in ones]
    # an optimizer that writes names itself may write those of the wrapped modules
    name = live.live.by_live.get(key, key) if isinstance(key, str) and key not in live.by_name else key
    return [(name, None)]
