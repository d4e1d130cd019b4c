"""Param groups of Megatron's optimizers: their settings are stored, their parameters are not, but follow from rules.

Biases and one-dimensional parameters have no weight decay (wd_mult 0); experts' own parameters are in groups of their
own under expert parallelism; embeddings and the output layer may have their own learning rate (is_decoupled_lr).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reshard.checkpoint.canonical.megatron.names import is_expert, is_vocabulary
from reshard.checkpoint.canonical.result import Canonical
from reshard.formats.stored.contents import Contents
from reshard.formats.stored.tensor import StoredTensor

__all__ = ["assign_groups", "decays", "find_groups"]


def decays(name: str, ndim: int) -> bool:
    """Whether Megatron's default rule gives weight decay to a parameter."""
    return not (name.endswith(".bias") or ndim == 1)


def find_groups(contents: Contents, common: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The settings of all groups, each once; the ranks store the same ones."""
    groups: list[dict[str, Any]] = []
    found = list(_search(common.get("optimizer")))
    for key in contents.objects:
        if ".optimizer/shard_" in key and "optimizer.distributed." in key:
            found += _search(contents.objects[key])
    for group in found:
        bare = {k: v for k, v in group.items() if k != "params"}
        if bare not in groups:
            groups.append(bare)
    return groups


def _search(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "param_groups" and isinstance(inner, (list, tuple)):
                yield from (group for group in inner if isinstance(group, dict))
            else:
                yield from _search(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _search(inner)


def assign_groups(result: Canonical, settings: list[dict[str, Any]], own_rate: Any = None) -> None:
    """Put the groups into the result, each with the parameters that belong to it, and its `step` into their states.

    Args:
        own_rate: the learning rate that the program was told for embeddings and the output layer.
    """
    known = all("params" in group for group in settings)
    result.groups = [{**group, "params": list(group.get("params", ()))} for group in settings]
    if not known:
        _by_rule(result, own_rate)
    steps = [group.get("step") for group in result.groups]
    for group in result.groups:
        step = group.pop("step", None)
        for fqn in group["params"] if step is not None else ():
            if "step" not in result.state.get(fqn, {"step": 0}):
                result.add_state(fqn, "step", step)
    if steps and steps[0] is not None and all(step == steps[0] for step in steps):
        for fqn, states in result.state.items():  # those of no known group, too
            if "step" not in states:
                result.add_state(fqn, "step", steps[0])


def _has_own_rate(group: Mapping[str, Any], own_rate: Any) -> bool:
    """Whether a group is that of embeddings and the output layer; newer versions only say that it is no default."""
    told = own_rate is not None and group.get("default_config") is False and group.get("max_lr") == own_rate
    return bool(group.get("is_decoupled_lr")) or told


def _by_rule(result: Canonical, own_rate: Any) -> None:
    separate = any(group.get("is_expert_parallel") for group in result.groups)
    lost = []
    for fqn, states in result.state.items():
        shapes = [v.spec.shape for k, v in states.items() if k != "step" and isinstance(v, StoredTensor)]
        if fqn in result.model:
            shapes = [result.model[fqn].spec.shape]
        wanted = decays(fqn, len(shapes[0]) if shapes else 0)
        fitting = [
            group
            for group in result.groups
            if bool(group.get("wd_mult", 1.0)) == wanted
            and bool(group.get("is_expert_parallel")) == (separate and is_expert(fqn))
        ]
        if len(fitting) > 1 and any(_has_own_rate(group, own_rate) for group in fitting):
            fitting = [group for group in fitting if _has_own_rate(group, own_rate) == is_vocabulary(fqn)]
        if len(fitting) == 1:
            fitting[0]["params"].append(fqn)
        else:
            lost.append(fqn)
    if lost and result.groups:
        result.notes.append(
            f"{len(lost)} parameters are in no param group, such as {lost[0]!r}: in which they were is not stored, and "
            "Megatron's default rules do not tell"
        )
