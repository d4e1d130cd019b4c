"""The optimizers in one rank's file of Megatron's older checkpoints, with names for their ids or flat buffers.

{state: {0: ...}, param_groups: [...]}                                  plain
{optimizer: that, fp32_from_fp16_params: [[...] of each group]}         with fp32 masters
[that, that]                                                            one of dense parameters, one of experts
distrib_optim.pt: {0: {(dtype, dtype): {param, exp_avg, exp_avg_sq}}}   flat buffers of the distributed optimizer
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reshard.checkpoint.canonical.hints import Hints
from reshard.checkpoint.canonical.megatron.groups import decays
from reshard.checkpoint.canonical.megatron.names import canonical_key, is_expert, is_vocabulary
from reshard.checkpoint.canonical.megatron.order import is_buffer
from reshard.checkpoint.canonical.megatron.slots import bucket_limit, place_joined, place_params
from reshard.checkpoint.canonical.result import Value, elementwise
from reshard.checkpoint.canonical.views import narrow, unflatten
from reshard.errors import DamagedCheckpointError
from reshard.formats.frameworks.megatron_legacy import RankFiles
from reshard.formats.pickles.torch_objects import TensorRef
from reshard.formats.stored.tensor import StoredTensor
from reshard.formats.torch_save.file import TorchFile, stored_tensor
from reshard.state.dtypes import dtype_name

__all__ = ["RankModel", "read_rank_optimizers"]

Param = tuple[int, str]
"""Chunk of the model, and name in its file."""
Found = tuple[list[tuple[dict[str, Any], list[Param]]], dict[Param, dict[str, Value]]]
"""Groups with their members, and the states of each parameter."""


@dataclass
class RankModel:
    """The parameters and buffers of one rank, by chunk of the model, under the names in its file."""

    files: RankFiles
    chunks: list[dict[str, StoredTensor]] = field(default_factory=list)


def read_rank_optimizers(rank: RankModel, args: Mapping[str, Any], hints: Hints) -> Iterator[Found]:
    """Every optimizer of a rank. Raises NormalizationError, asking for a hint, if ids cannot be named."""
    file = rank.files.model
    saved = file.value.get("optimizer")
    several = _as_list(saved)
    params = [(c, name) for c, chunk in enumerate(rank.chunks) for name in chunk if not is_buffer(name)]
    flats = _as_list(rank.files.optimizer.value) if rank.files.optimizer is not None else []
    for i in range(max(len(several), len(flats))):
        mine = params
        if max(len(several), len(flats)) > 1:
            mine = [p for p in params if is_expert(canonical_key(p[1])) == (i > 0)]
        groups, states = _by_id(rank, several[i], mine, hints) if i < len(several) else ([], {})
        if i < len(flats) and rank.files.optimizer is not None:
            for param, values in _from_flat(rank, rank.files.optimizer, flats[i], mine, args, hints):
                states.setdefault(param, {}).update(values)
        yield groups, states


def _as_list(saved: Any) -> list[dict[str, Any]]:
    if isinstance(saved, (list, tuple)):  # None stands for an optimizer whose states are in another rank's file
        return [one if isinstance(one, dict) else {} for one in saved]
    if not isinstance(saved, dict):
        return []
    if saved and all(type(k) is int for k in saved) and all(_is_optimizer(v) for v in saved.values()):
        return [saved[k] for k in sorted(saved)]
    return [saved]


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, dict) and any(key in value for key in ("param_groups", "optimizer", "state"))


def _by_id(rank: RankModel, saved: Mapping[str, Any], params: Sequence[Param], hints: Hints) -> Found:
    file = rank.files.model
    inner = saved["optimizer"] if isinstance(saved.get("optimizer"), dict) else saved
    groups = [dict(file.plain(group)) for group in inner.get("param_groups", ())]
    named: list[tuple[dict[str, Any], list[Param]]] = []
    names: dict[int, Param] = {}
    given = hints.ids(rank.files.folder)
    by_name = {name: (chunk, name) for chunk, name in params}
    for group in groups:
        ids = list(group.get("params", ()))
        members = _members(rank, group, groups, params)
        if given is not None:
            members = [by_name[given[i]] for i in ids if given.get(i) in by_name]
        if len(members) == len(ids):
            names.update(zip(ids, members))
        elif ids:
            members = []
        named.append(({k: v for k, v in group.items() if k not in ("params", "step")}, members))
    states: dict[Param, dict[str, Value]] = {}
    for i, values in (inner.get("state") or {}).items():
        found = {str(k): _value(file, f"{i}.{k}", v, rank.files.tp) for k, v in values.items()}
        if i not in names or not _fits(rank, names[i], found):
            _ask(rank, i, hints)
        states[names[i]] = found
    _add_masters(rank, saved, groups, names, states)
    for group, (_, members) in zip(groups, named):
        for member in members if "step" in group else ():
            states.setdefault(member, {}).setdefault("step", group["step"])
    return named, states


def _members(
    rank: RankModel, group: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], params: Sequence[Param]
) -> list[Param]:
    """The parameters of a group by Megatron's default rules, in the order of registration."""
    own_rate = any(g.get("is_decoupled_lr") for g in groups)
    own_experts = any(g.get("is_expert_parallel") for g in groups)
    out = []
    for chunk, name in params:
        ndim = len(rank.chunks[chunk][name].spec.shape)
        if decays(name, ndim) != bool(group.get("wd_mult", 1.0)):
            continue
        if own_rate and bool(group.get("is_decoupled_lr")) != is_vocabulary(name):
            continue
        if own_experts and bool(group.get("is_expert_parallel")) != is_expert(canonical_key(name)):
            continue
        out.append((chunk, name))
    return out


def _fits(rank: RankModel, param: Param, found: Mapping[str, Value]) -> bool:
    shape = rank.chunks[param[0]][param[1]].spec.shape
    return all(v.spec.shape == shape for k, v in found.items() if elementwise(k) and isinstance(v, StoredTensor))


def _ask(rank: RankModel, i: Any, hints: Hints) -> None:
    hints.missing(
        "param_names",
        f"{rank.files.model.source.label}: which parameter has id {i} in the optimizer cannot be told by Megatron's "
        "default rules for param groups",
        f'{{{rank.files.folder!r}: ["embedding.word_embeddings.weight", ...]}}',
    )


def _value(file: TorchFile, key: str, value: Any, tp: int) -> Value:
    return stored_tensor(key, file, value, tp) if isinstance(value, TensorRef) else file.plain(value)


def _add_masters(
    rank: RankModel,
    saved: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    names: Mapping[int, Param],
    states: dict[Param, dict[str, Value]],
) -> None:
    """fp32 masters of the parameters of lower precision, in the order of each group."""
    file = rank.files.model
    for group, masters in zip(groups, saved.get("fp32_from_fp16_params") or ()):
        members = [names[i] for i in group.get("params", ()) if i in names]
        low = [m for m in members if rank.chunks[m[0]][m[1]].spec.dtype in ("bfloat16", "float16")]
        if len(low) != len(masters):
            raise DamagedCheckpointError(
                f"{file.source.label}: a group has {len(low)} parameters of lower precision, but {len(masters)} masters"
            )
        for param, ref in zip(low, masters):
            value = _value(file, f"{param[1]}.fp32_param", ref, rank.files.tp)
            if not _fits(rank, param, {"fp32_param": value}):
                raise DamagedCheckpointError(f"{file.source.label}: the master of {param[1]!r} has another shape")
            states.setdefault(param, {})["fp32_param"] = value


def _from_flat(
    rank: RankModel,
    file: TorchFile,
    saved: Mapping[Any, Any],
    params: Sequence[Param],
    args: Mapping[str, Any],
    hints: Hints,
) -> Iterator[tuple[Param, dict[str, Value]]]:
    """Parameters of the distributed optimizer, cut out of one flat tensor per chunk and dtype."""
    chunks = sorted(k for k in saved if type(k) is int)
    for chunk in chunks:
        for dtypes, flats in saved[chunk].items():
            if not isinstance(flats, dict):
                raise DamagedCheckpointError(f"{file.source.label}: buffer {chunk} {dtypes} holds no flat tensors")
            dtype = dtype_name(dtypes[0]) if isinstance(dtypes, tuple) else ""
            tensors = rank.chunks[chunk] if chunk < len(rank.chunks) else {}
            held = [n for c, n in params if c == chunk and (not dtype or tensors[n].spec.dtype == dtype)]
            refs = {str(k): v for k, v in flats.items() if isinstance(v, TensorRef) and len(v.size) == 1}
            total = int(flats.get("numel_unpadded") or min((math.prod(r.size) for r in refs.values()), default=0))
            sizes = [(name, tensors[name].spec.numel) for name in reversed(held)]
            slots = place_params(sizes, [total]) or next(place_joined(sizes, total, bucket_limit(args)), None)
            if slots is None:
                hints.missing(
                    "param_order",
                    f"{file.source.label}: the {len(held)} parameters of the model do not fill a buffer of {total} "
                    "elements in the order of the file",
                    '["embedding.word_embeddings.weight", ...]',
                )
            for slot in slots:
                shape = tensors[slot.name].spec.shape
                values: dict[str, Value] = {}
                for key, ref in refs.items():
                    flat = narrow(stored_tensor(f"{chunk}.{key}", file, ref, rank.files.tp), 0, slot.start, slot.stop)
                    values["fp32_param" if key == "param" else key] = unflatten(flat, shape, f"{slot.name}.{key}")
                yield (chunk, slot.name), values
