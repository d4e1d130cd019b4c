"""Normalizes Megatron-core's `torch_dist` checkpoints: stacks, halves, padding, and every
sharding of the optimizer.

optimizer.state.exp_avg.<key>                       the shape of the parameter (non-distributed, fully_reshardable)
                                                    or a grid of flattened cells
                                                    (fully_sharded_model_space)
optimizer.distributed.dp_group_idx_0...bucket_idx_0.exp_avg   buckets (dp_reshardable), see `megatron_buckets`
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from reshard.errors import FormatError
from reshard.formats.canonical import Canonical, Groups, Hints, States, Tensors, Value, Values, read_optimizer, regroup
from reshard.formats.megatron.files import MegatronFacts
from reshard.formats.megatron.names import (
    canonical_key,
    expand,
    is_vocabulary,
    join_halves,
    skipped,
    whole_key,
)
from reshard.formats.megatron.optimizer import assign_groups, cut_buckets, find_groups
from reshard.formats.sections import find_sections, resolve
from reshard.stored.contents import Contents
from reshard.stored.tensor import StoredTensor
from reshard.stored.views import narrow, ungrid

_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.(?P<rest>.+)", re.DOTALL)
_STATE = re.compile(r"state\.(?P<state>[^.]+)\.(?P<key>.+)", re.DOTALL)
STATE_NAMES = {"param": "fp32_param", "master_param": "fp32_param"}
"""Names of the fp32 masters in the optimizers, and here."""


def normalize(contents: Contents, hints: Hints, what: str) -> Canonical:
    """Return the state under the names of the unsharded model.

    Raises:
        CorruptCheckpointError: parts of a tensor are missing or do not fit.
        NormalizationError: the order of parameters in buckets is unknown, and no hint gives it.
    """
    facts = contents.known(MegatronFacts)
    args = facts.common.get("args")
    args = args if isinstance(args, dict) else {}
    if facts.backend == "fsdp_dtensor":
        model, state, settings = _from_dtensors(contents)
    else:
        model = join_halves(dict(_model(contents)))
        state = _states(contents, facts.index.mcore_data or {})
        for fqn, states in cut_buckets(contents, model, args, hints).items():
            state.setdefault(fqn, {}).update(states)
        settings = find_groups(contents, facts.common)
    if not model and not state:
        raise FormatError(f"{what}: none of its tensors is a parameter of Megatron's")
    return finish(model, state, settings, args, hints, step=_common_step(contents))


def finish(
    model: Tensors,
    state: Mapping[str, Values],
    settings: Groups,
    args: Mapping[str, Any],
    hints: Hints,
    *,
    step: Value | None = None,
) -> Canonical:
    """Return the result, with halves joined, padding removed, and parameters in their groups.

    Args:
        settings: param groups; those without "params" get them by Megatron's rules.
        step: number of steps, if all parameters share it.
    """
    result = Canonical()
    size, padded = _vocab_size(args, hints.get("vocab_size")), args.get("padded_vocab_size")
    for fqn, tensor in join_halves(model).items():
        result.add_model(fqn, _cut_vocabulary(fqn, tensor, size, padded), tensor.fqn)
    if size is None and any(map(is_vocabulary, result.model)):
        result.notes.append(
            "the vocabulary may be padded: its true size is not stored. The hint 'vocab_size' removes the padding"
        )
    names = dict.fromkeys(name for states in state.values() for name in states)
    for name in names:
        tensors = {fqn: states[name] for fqn, states in state.items() if isinstance(states.get(name), StoredTensor)}
        for fqn, value in join_halves(tensors).items():
            result.add_state(fqn, STATE_NAMES.get(name, name), _cut_vocabulary(fqn, value, size, padded))
        for fqn, states in state.items():
            if name in states and fqn not in tensors:
                result.add_state(fqn, STATE_NAMES.get(name, name), states[name])
    if step is not None:
        result.add_step(step)
    assign_groups(result, settings, args.get("decoupled_lr"))
    return result


def _vocab_size(args: Mapping[str, Any], hint: Any) -> int | None:
    """Return the rows of the vocabulary without padding, from the hint or the program's arguments.
    None if neither has them."""
    for value in (hint, args.get("vocab_size")):
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _cut_vocabulary(name: str, tensor: StoredTensor, size: int | None, padded: Any) -> StoredTensor:
    """Return the tensor without the rows that pad a vocabulary. Unchanged if it has none."""
    if size is None or not is_vocabulary(name) or not tensor.spec.shape:
        return tensor
    rows = tensor.spec.shape[0]
    if rows <= size or (isinstance(padded, int) and rows != padded):
        return tensor
    return narrow(tensor, 0, 0, size)


def _model(contents: Contents) -> Iterator[tuple[str, StoredTensor]]:
    for key in contents.tensors:
        if not skipped(key) and not _OPTIMIZER.fullmatch(key):
            yield from expand(key, contents.tensors[key])


def _states(contents: Contents, original: Mapping[str, Any]) -> States:
    """Return states, each with its parameter's shape or as a grid of flattened cells, depending on
    `original`."""
    out: States = {}
    for key in contents.tensors:
        match = _OPTIMIZER.fullmatch(key)
        inner = _STATE.fullmatch(match["rest"]) if match and not skipped(key) else None
        if inner is None or inner["state"] == "step":
            continue
        tensor = contents.tensors[key]
        shape = _original_shape(original.get(key))
        if shape is not None and shape != tensor.spec.shape:
            tensor = ungrid(tensor, shape, key)
        name = STATE_NAMES.get(inner["state"], inner["state"])  # masters may be saved under several names
        for fqn, one in expand(inner["key"], tensor):
            out.setdefault(fqn, {})[name] = one
    return out


def _original_shape(data: Any) -> tuple[int, ...] | None:
    fields = data if isinstance(data, dict) else getattr(data, "fields", {})
    shape = fields.get("nd_reformulated_orig_global_shape")
    return None if shape is None else tuple(map(int, shape))


def _from_dtensors(
    contents: Contents,
) -> tuple[Tensors, States, Groups]:
    """Return Megatron-FSDP's states, which are nested as in torch: a model, and an optimizer with
    states by name."""
    sections = find_sections(contents)
    model = {
        fqn: one
        for name, leaf in sections.model
        if not skipped(leaf.key)
        for fqn, one in expand(name.removeprefix("model."), leaf.value())
    }
    state: States = {}
    groups: Groups = []
    for _, tree in sections.optimizers:
        saved = read_optimizer(tree)
        groups += saved.groups + _groups_by_name(tree.get("param_to_group_meta"))
        for name, states in saved.state.items():
            for key, value in states.items():
                if isinstance(value, StoredTensor) and value.spec.shape:
                    for fqn, one in expand(name, value):
                        state.setdefault(fqn, {})[key] = one
                else:  # both halves of a parameter have the same settings
                    state.setdefault(whole_key(canonical_key(name)), {})[key] = value
    return model, state, groups


def _groups_by_name(tree: Any) -> Groups:
    """Return groups from the settings that Megatron-FSDP saves for each parameter. Both halves of a
    parameter are one entry of its group."""
    found: States = {}
    for name, settings in resolve(tree).items() if isinstance(tree, dict) else ():
        if isinstance(settings, dict):
            found.setdefault(whole_key(canonical_key(name)), settings)
    return regroup(found)


def _common_step(contents: Contents) -> Value | None:
    """Return the number of steps that all parameters share."""
    for key in contents.tensors:
        match = _OPTIMIZER.fullmatch(key)
        if match and match["rest"].startswith("state.step") and not contents.tensors[key].spec.shape:
            return contents.tensors[key]
    for held in (contents.tensors, contents.objects):
        for key in held:
            if key.startswith("common.optimizer.") and key.endswith("state.common_step"):
                return held[key]
    return None
