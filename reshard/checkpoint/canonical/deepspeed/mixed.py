"""DeepSpeed's optimizers of 16-bit models without ZeRO: a torch optimizer of fp32 masters, and the masters beside it.

{optimizer_state_dict: {state: {0: ...}, param_groups}, fp32_groups: [[master, ...] of each group]}
{optimizer_state_dict: the same, one id a group,        fp32_groups_flat: [all masters in a row, of each group]}
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from reshard.checkpoint.canonical.deepspeed.zero import MASTER
from reshard.checkpoint.canonical.hints import Hints
from reshard.checkpoint.canonical.optim import SavedOptimizer
from reshard.checkpoint.canonical.result import Value
from reshard.checkpoint.canonical.views import narrow, unflatten
from reshard.errors import DamagedCheckpointError, NormalizationError
from reshard.formats.pickles.torch_objects import TensorRef
from reshard.formats.stored.tensor import StoredTensor
from reshard.formats.torch_save.file import TorchFile, stored_tensor

__all__ = ["is_mixed", "read_mixed"]

Shapes = Mapping[str, tuple[int, ...]]


def is_mixed(optimizer: Any) -> bool:
    """Whether a saved optimizer is one of a 16-bit model."""
    return isinstance(optimizer, dict) and isinstance(optimizer.get("optimizer_state_dict"), dict)


def read_mixed(optimizer: Mapping[str, Any], file: TorchFile, shapes: Shapes, hints: Hints) -> SavedOptimizer:
    """The states by id, or by name where whole groups are flat; masters are the state `MASTER`.

    Args:
        shapes: those of the module's tensors.

    Raises:
        NormalizationError: flat groups, and no hint says what is in them.
        DamagedCheckpointError: masters and groups do not fit together.
    """
    inner = optimizer["optimizer_state_dict"]
    groups = [dict(file.plain(group)) for group in inner.get("param_groups", ())]
    state: dict[int, dict[str, Value]] = {
        int(i): {str(k): _stored(f"{i}.{k}", v, file) for k, v in of.items()}
        for i, of in (inner.get("state") or {}).items()
    }
    flats = optimizer.get("fp32_groups_flat")
    if flats is not None:
        return _cut(groups, state, [_stored(f"group {g}", flat, file) for g, flat in enumerate(flats)], shapes, hints)
    masters = optimizer.get("fp32_groups") or ()
    for group, of in zip(groups, masters):
        if len(group.get("params", ())) != len(of):
            raise DamagedCheckpointError(
                f"{file.source.label}: a group of {len(group.get('params', ()))} parameters has {len(of)} fp32 masters"
            )
        for i, ref in zip(group["params"], of):
            state.setdefault(i, {})[MASTER] = _stored(f"{i}.{MASTER}", ref, file)
    return SavedOptimizer({str(i): of for i, of in state.items()}, groups)


def _stored(key: str, value: Any, file: TorchFile) -> Value:
    return stored_tensor(key, file, value) if isinstance(value, TensorRef) else file.plain(value)


def _cut(
    groups: Sequence[dict[str, Any]],
    state: Mapping[int, Mapping[str, Value]],
    flats: Sequence[Value],
    shapes: Shapes,
    hints: Hints,
) -> SavedOptimizer:
    """Flat groups, cut into the parameters that the hint says are in them."""
    given = hints.get("param_groups")
    if given is None:
        hints.missing(
            "param_groups",
            f"the optimizer's {len(flats)} groups are saved as one flat tensor each, and which parameters are in them, "
            "in which order, is not stored",
            '[["embed.weight", ...], ...]',
        )
    if len(given) != len(flats):
        raise NormalizationError(f"the hint 'param_groups' lists {len(given)} groups, but there are {len(flats)}")
    out = SavedOptimizer()
    for g, (names, flat) in enumerate(zip(given, flats)):
        settings = groups[g] if g < len(groups) else {}
        ids = list(settings.get("params", (g,)))
        values: dict[str, Value] = {MASTER: flat, **(state.get(ids[0], {}) if ids else {})}
        for name, states in _pieces(g, names, values, shapes).items():
            out.state[name] = states
        out.groups.append({**{k: v for k, v in settings.items() if k != "params"}, "params": list(names)})
    return out


def _pieces(g: int, names: Sequence[str], values: Mapping[str, Value], shapes: Shapes) -> dict[str, dict[str, Value]]:
    out: dict[str, dict[str, Value]] = {}
    at = 0
    for name in names:
        if name not in shapes:
            raise NormalizationError(f"the hint 'param_groups' names {name!r}, which the module does not have")
        stop = at + math.prod(shapes[name])
        out[name] = {}
        for key, value in values.items():
            whole = isinstance(value, StoredTensor) and len(value.spec.shape) == 1
            if whole and stop <= value.spec.numel:
                value = unflatten(narrow(value, 0, at, stop), shapes[name], f"{name}.{key}")
            out[name][key] = value
        at = stop
    master = values[MASTER]
    length = master.spec.numel if isinstance(master, StoredTensor) else 0
    if at != length:
        raise NormalizationError(
            f"the hint 'param_groups' gives group {g} parameters of {at} elements, but its flat tensor has {length}"
        )
    return out
