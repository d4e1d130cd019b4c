"""Param groups of Megatron's optimizers: their settings are stored, their parameters are not, but follow from rules.

Biases and one-dimensional parameters have no weight decay (wd_mult 0); experts' own parameters are in groups of their
own under expert parallelism; embeddings and the output layer may have their own learning rate (is_decoupled_lr).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reshard.checkpoint.canonical.megatron.names import is_expert, is_vocabulary
from reshard.checkpoint.canonical.result import Canonical
from reshard.errors import FormatError
from reshard.formats.stored.contents import Contents
from reshard.formats.stored.tensor import StoredTensor

__all__ = ["assign_groups", "decays", "find_groups", "groups_to_save"]


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


_KINDS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""The settings by which Megatron finds the group that belongs to one of its own."""


def groups_to_save(found: Canonical, own_experts: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """The settings of Megatron's groups, and what is to be known of them.

    Groups of other programs are made anew by Megatron's rules: with and without weight decay, and with `own_experts`
    those of experts by themselves.

    Raises FormatError if parameters that Megatron has in one group have different settings.
    """
    made: dict[tuple[Any, ...], tuple[int, dict[str, Any]]] = {}
    notes: list[str] = []
    for number, group in enumerate(found.groups):
        settings = {key: value for key, value in group.items() if key != "params"}
        for kind in dict.fromkeys(_kinds(found, group, own_experts)):
            if not kind[0] and settings.get("weight_decay") and "wd_mult" not in settings:
                notes.append(
                    f"param group {number} has weight decay for biases or one-dimensional parameters; Megatron has none"
                )
            first, known = made.setdefault(kind, (number, settings))
            if known != settings:
                differs = next(k for k in (*known, *settings) if known.get(k) != settings.get(k))
                raise FormatError(
                    f"Megatron has the parameters with {dict(zip(_KINDS, kind))} in one group, but the param groups "
                    f"{first} and {number} have {differs} {known.get(differs)!r} and {settings.get(differs)!r}: make "
                    "them alike, or leave the optimizer out by model_only"
                )
    return [{**settings, **dict(zip(_KINDS, kind))} for kind, (_, settings) in made.items()], notes


def _kinds(found: Canonical, group: Mapping[str, Any], own_experts: bool) -> Iterator[tuple[Any, ...]]:
    """What Megatron would call the group of each of its parameters."""
    is_theirs = "wd_mult" in group
    decided = group.get("wd_mult", 1.0), group.get("lr_mult", 1.0), bool(group.get("is_decoupled_lr"))
    if is_theirs and not group.get("params"):
        yield decided[0], decided[1], own_experts and bool(group.get("is_expert_parallel")), decided[2]
    for fqn in group.get("params", ()):
        tensor = found.model.get(fqn)
        decay = decided[0] if is_theirs or tensor is None else float(decays(fqn, len(tensor.spec.shape)))
        yield decay, decided[1], own_experts and is_expert(fqn), decided[2]
