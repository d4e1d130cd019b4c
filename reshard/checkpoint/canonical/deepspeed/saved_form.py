"""A canonical state as a universal checkpoint of DeepSpeed's has it: for the format's writer.

fp32, exp_avg, ...   a file each for every parameter that has states: whole, in float32
module               what has none: buffers and frozen parameters
client state         plain objects that stood beside model and optimizer
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

from reshard.checkpoint.canonical.hints import Hints
from reshard.checkpoint.canonical.result import Canonical
from reshard.errors import FormatError
from reshard.formats.frameworks.deepspeed_writer import RESERVED, ToSave
from reshard.formats.stored.contents import Contents
from reshard.formats.stored.lazy_tensor import LazyTensor
from reshard.formats.stored.tensor import StoredTensor
from reshard.state.tree import unflatten

__all__ = ["deepspeed_form"]

_MASTERS = ("fp32_param", "fp32", "master_param")
_NOT_STATES = (*_MASTERS, "step")

Widen = Callable[[StoredTensor, str], StoredTensor]
"""(a tensor, name) -> the same in float32, under that name."""


def deepspeed_form(
    found: Canonical, contents: Contents, hints: Mapping[str, Any] | None, widen: Widen, what: str
) -> Contents:
    """`contents`, which normalizes to `found`, as tensors by file: "<fqn>/<state>"; "<fqn>" for those of the module.

    Raises FormatError where the format cannot hold the state: no optimizer, states that only some parameters have,
    steps that differ within a group.
    """
    trained = [fqn for fqn, states in found.state.items() if states and fqn in found.model]
    groups = [{**group, "params": [p for p in group.get("params", ()) if p in trained]} for group in found.groups]
    _check(found, trained, groups, what)
    ties = _ties(found.model, trained)
    tensors: dict[str, StoredTensor] = {}
    lost: list[str] = []
    for fqn in trained:
        states, parameter = found.state[fqn], found.model[fqn]
        master = next((states[name] for name in _MASTERS if name in states), parameter)
        tensors[f"{fqn}/fp32"] = widen(master, f"{fqn}/fp32")
        for name, value in states.items():
            if isinstance(value, StoredTensor) and value.spec.shape == parameter.spec.shape and name not in _NOT_STATES:
                tensors[f"{fqn}/{name}"] = value.renamed(f"{fqn}/{name}")
            elif name not in _NOT_STATES:
                lost.append(f"optim.state.{fqn}.{name}")
    still = [fqn for fqn in found.model if fqn not in trained and fqn not in ties]
    tensors.update((fqn, found.model[fqn]) for fqn in still)
    client, unplaced = _client(contents)
    listed = {p for group in found.groups for p in group.get("params", ())}
    notes = [f"{fqn!r} is in a param group and has no state: written as frozen" for fqn in still if fqn in listed]
    facts = ToSave(
        groups=tuple(groups),
        steps={fqn: _step(found, fqn) for fqn in trained},
        shapes={fqn: found.model[fqn].spec.shape for fqn in trained},
        cut_dims={fqn: _cut_dim(fqn, Hints(hints)) for fqn in trained},
        tied=ties,
        client=client,
    )
    return Contents(
        "deepspeed",
        tensors,
        facts=facts,
        warnings=(*contents.warnings, *found.notes, *notes),
        left_out=(*contents.left_out, *contents.per_rank, *lost, *unplaced),
    )


def _check(found: Canonical, trained: list[str], groups: list[dict[str, Any]], what: str) -> None:
    """Raises FormatError for what DeepSpeed would miss, or pass over without a word."""
    if not trained or not any(group["params"] for group in groups):
        raise FormatError(
            f"{what}: there are no states of an optimizer with param groups, by which DeepSpeed reads a universal "
            "checkpoint, parameters too. For a model alone write safetensors, and load that into the module"
        )
    kinds = {name for fqn in trained for name in found.state[fqn] if name not in _NOT_STATES}
    placed = {fqn for group in groups for fqn in group["params"]}
    for fqn in trained:
        lacks = min(kinds - set(found.state[fqn]), default=None)
        if lacks is not None:
            raise FormatError(f"{what}: {fqn!r} has no {lacks}, which others have: DeepSpeed wants it of all")
        if fqn not in placed:
            raise FormatError(f"{what}: {fqn!r} has states but no param group: the hint 'param_groups' gives them")
        if "/" in fqn:
            raise FormatError(f"{what}: {fqn!r} would be the name of a folder, and cannot be with a '/' in it")
    for number, group in enumerate(groups):
        _check_steps(found, number, group["params"])


def _check_steps(found: Canonical, number: int, names: list[str]) -> None:
    steps = {fqn: _step(found, fqn) for fqn in names}
    other = next((fqn for fqn, step in steps.items() if step != steps[names[0]]), None)
    if other is not None:
        raise FormatError(
            f"DeepSpeed has one number of steps for a param group, but of group {number} {names[0]!r} has taken "
            f"{steps[names[0]]} and {other!r} {steps[other]}"
        )


def _step(found: Canonical, fqn: str) -> float | None:
    value = found.state[fqn].get("step")
    if value is None:
        return None
    return float(LazyTensor(value)[...] if isinstance(value, StoredTensor) else value)


def _ties(model: Mapping[str, StoredTensor], trained: list[str]) -> dict[str, str]:
    """Names of tensors that are the very same chunks as another's: that which has states, or the first."""
    first: dict[int, str] = {}
    for fqn in (*trained, *model):
        if model[fqn].chunks != ():
            first.setdefault(id(model[fqn].chunks), fqn)
    kept = {fqn: first.get(id(tensor.chunks), fqn) for fqn, tensor in model.items()}
    return {fqn: name for fqn, name in kept.items() if fqn != name and fqn not in trained}


def _cut_dim(fqn: str, hints: Hints) -> int:
    """The dim that tensor parallelism cuts, as the hint says: DeepSpeed takes a part of it where ranks have less."""
    for pattern, dim in hints.mapping("tp_dims").items():
        if fnmatch.fnmatchcase(fqn, str(pattern)):
            return int(dim or 0)
    return 0


def _client(contents: Contents) -> tuple[dict[str, Any], list[str]]:
    """Plain objects as nested as they were, and keys of those that have no place."""
    found: dict[tuple[Any, ...], Any] = {}
    lost: list[str] = []
    for key, value in contents.objects.items():
        path = contents.paths.get(key, (key,))
        if path[0] in ("optim", "model"):
            continue
        inner = path[1:] if str(path[0]).endswith("mp_rank_00_model_states") else path
        if not inner or inner[0] in RESERVED:
            lost.append(key)
        else:
            found[inner] = value
    kinds = {
        path[1:] if path and str(path[0]).endswith("mp_rank_00_model_states") else path: kind
        for path, kind in contents.containers.items()
    }
    above = {path[:i] for path in found for i in range(1, len(path) + 1)}
    client = unflatten(found, {path: kind for path, kind in kinds.items() if path in above})
    return dict(client), lost
