"""Normalizes Megatron's older checkpoints of one file per model parallel rank: rules for names say
how shards are joined.

Layers are numbered from 0 in every stage, and experts in every expert rank. Optimizers identify
parameters by ids, which count through the param groups. Here, all of these become global.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from planners.geometry.arrays import grouped
from reshard.errors import CorruptCheckpointError, FormatError, NormalizationError
from reshard.formats.canonical import (
    Canonical,
    Groups,
    Hints,
    Shapes,
    Tensors,
    Values,
    elementwise,
    find_scope,
    is_single,
    note_unjoined,
    params_beside,
    settings_of,
)
from reshard.formats.megatron.canonical import finish
from reshard.formats.megatron.files import LegacyFacts, RankFiles, arguments
from reshard.formats.megatron.names import (
    EXPERT,
    LAYER,
    canonical_key,
    first_copy,
    is_buffer,
    is_expert,
    is_vocabulary,
    join_by_name,
    skipped,
    tp_dim,
)
from reshard.formats.megatron.optimizer import bucket_limit, decays, place_joined, place_params
from reshard.formats.torch_save.pickles import TensorRef
from reshard.formats.torch_save.reader import TorchFile, saved_groups, stored_or_plain, stored_tensor, stored_values
from reshard.live.dtypes import dtype_name
from reshard.stored.contents import Contents
from reshard.stored.tensor import StoredTensor
from reshard.stored.views import cut

_CHUNK = re.compile(r"model(\d*)")
_FUSED = re.compile(r"(.*\.)?(query_key_value|key_value)\.(weight|bias)")


def normalize(contents: Contents, hints: Hints, what: str) -> Canonical:
    """Return the state under the names of the unsharded model.

    Raises:
        CorruptCheckpointError: shards do not fit together.
        FormatError: experts are one matrix that is sharded over ranks, or rows are in the order of
            old versions.
        NormalizationError: a parameter has an unknown name, or IDs have no names. The message names
            the hint.
    """
    facts = contents.known(LegacyFacts)
    ranks = [RankModel(files, _chunks(files.model)) for files in facts.ranks]
    args = arguments(ranks[0].files.model)
    naming = _Naming(ranks, hints)
    parts: dict[str, dict[int, StoredTensor]] = {}
    places: dict[str, tuple[int, int]] = {}
    states: dict[str, dict[int, Values]] = {}
    groups: Groups = []
    for rank in ranks:
        _check_rows(rank)
        for chunk, tensors in enumerate(rank.chunks):
            for name, tensor in tensors.items():
                fqn = naming(rank, chunk, name)
                at = rank.files.pp, chunk
                if "layer_offsets" in hints and LAYER.fullmatch(fqn) and places.setdefault(fqn, at) != at:
                    raise NormalizationError(
                        f"{fqn!r} is in two stages or chunks of {what}: "
                        "the hint 'layer_offsets' must give each stage layers of its own, "
                        "and is the same for all chunks"
                    )
                parts.setdefault(fqn, {}).setdefault(rank.files.tp, tensor)
        for name_of, found in read_rank_optimizers(rank, args, hints):
            _take(naming, rank, name_of, found, states, groups)
    tied = args.get("untie_embeddings_and_output_weights") is False
    if tied and len({rank.files.pp for rank in ranks}) > 1:
        # the last stage has a copy of the embedding, which is also the model's output layer
        parts.pop("output_layer.weight", None)
        states.pop("output_layer.weight", None)
        for group in groups:
            group["params"] = [p for p in group["params"] if p != "output_layer.weight"]
    shapes = {name: by_tp[min(by_tp)].spec.shape for name, by_tp in parts.items()}
    join = _Joining(facts.experts_tp, shapes, hints)
    model = {name: join(name, by_tp) for name, by_tp in parts.items()}
    kinds = {key for by_tp in states.values() for key in by_tp[min(by_tp)] if _is_elementwise(key, states, shapes)}
    lost: list[str] = []
    state = {name: _join_states(name, by_tp, join, kinds, lost) for name, by_tp in states.items()}
    result = finish(model, state, groups, args, hints)
    result.notes += note_unjoined(lost)
    return result


def _chunks(file: TorchFile) -> list[Tensors]:
    """Return the model of a file: `model`, or `model0`, `model1`, ... if a rank has several chunks."""
    found = sorted((int(m[1] or 0), key) for key in file.value if (m := _CHUNK.fullmatch(str(key))))
    if not found:
        raise CorruptCheckpointError(f"{file.source.label}: it holds no model")
    return [dict(_tensors(file, file.value[key], "")) for _, key in found]


def _tensors(file: TorchFile, value: Any, prefix: str) -> Iterator[tuple[str, StoredTensor]]:
    for key, inner in value.items() if isinstance(value, dict) else ():
        name = f"{prefix}{key}"
        if isinstance(inner, TensorRef):
            if not skipped(name):
                yield name, stored_tensor(name, file, inner)
        else:
            yield from _tensors(file, inner, name + ".")


class _Naming:
    """Maps names in a rank's file to names in the full model."""

    def __init__(self, ranks: Sequence[RankModel], hints: Hints) -> None:
        self._offsets: dict[tuple[str, int, int], int] = {}
        """(container of layers, stage, chunk) -> the number of its layer 0 in the full model."""
        self._hints = hints
        self._spread = any(rank.files.ep for rank in ranks)
        self._experts = max((self._count_experts(rank) for rank in ranks), default=0)
        first = {rank.files.pp: rank for rank in reversed(ranks)}
        done: dict[str, int] = {}
        for chunk in range(max(len(rank.chunks) for rank in ranks)):
            for stage in sorted(first):
                held = _count_layers(first[stage].chunks[chunk]) if chunk < len(first[stage].chunks) else {}
                for head, count in held.items():
                    self._offsets[head, stage, chunk] = done.get(head, 0)
                    done[head] = done.get(head, 0) + count

    @staticmethod
    def _count_experts(rank: RankModel) -> int:
        found = [int(m["expert"]) for c in rank.chunks for n in c if (m := EXPERT.fullmatch(canonical_key(n)))]
        return max(found, default=-1) + 1

    def __call__(self, rank: RankModel, chunk: int, name: str) -> str:
        name = canonical_key(name)
        match = LAYER.fullmatch(name)
        if match is not None:
            layer = int(match["layer"]) + self._offset(rank, chunk, match["head"])
            name = f"{match['head']}.{layer}.{match['tail']}"
        match = EXPERT.fullmatch(name)
        if match is None and ".experts." in name and self._spread:
            raise FormatError(
                f"{rank.files.model.source.label}: {name!r} holds all experts of an expert parallel rank in one, which "
                "is not supported; let Megatron-core save the checkpoint as torch_dist"
            )
        if match is not None:
            expert = int(match["expert"]) + rank.files.ep * self._experts
            name = f"{match['head']}.{expert}.{match['tail']}"
        return name

    def _offset(self, rank: RankModel, chunk: int, head: str) -> int:
        given = self._hints.mapping("layer_offsets")
        for scope in (rank.files.folder, rank.files.pp):
            value = find_scope(given, scope)
            if value is not None:
                return int(value)
        return self._offsets.get((head, rank.files.pp, chunk), 0)


def _count_layers(tensors: Tensors) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in tensors:
        match = LAYER.fullmatch(canonical_key(name))
        if match is not None and not match["head"].startswith("mtp"):
            counts[match["head"]] = max(counts.get(match["head"], 0), int(match["layer"]) + 1)
    return counts


def _take(
    naming: _Naming,
    rank: RankModel,
    groups_of: Sequence[tuple[dict[str, Any], list[tuple[int, str]]]],
    found: Mapping[tuple[int, str], Values],
    states: dict[str, dict[int, Values]],
    groups: Groups,
) -> None:
    """Add the contents of one optimizer of a rank. Its parameters are identified by chunk and name
    in the file."""
    for (chunk, name), values in found.items():
        fqn = naming(rank, chunk, name)
        states.setdefault(fqn, {}).setdefault(rank.files.tp, dict(values))
    for settings, members in groups_of:
        params = params_beside(groups, settings)
        known = set(params)
        params += [fqn for chunk, name in members if (fqn := naming(rank, chunk, name)) not in known]


def _check_rows(rank: RankModel) -> None:
    """Raise FormatError for fused matrices whose rows are in the order of old versions, by
    `checkpoint_version`.

        0: all queries of a rank, all keys, all values
        1: for each element of a head: query, key, value
        2: for each head: its query, its key, its value
    """
    file = rank.files.model
    version = file.value.get("checkpoint_version", 0)
    old = not isinstance(version, int | float) or version < 2
    name = next((name for chunk in rank.chunks for name in chunk if _FUSED.fullmatch(name)), None)
    if old and name is not None:
        raise FormatError(
            f"{file.source.label}: its checkpoint_version is {version}, so the rows of "
            f"{name!r} are in another order than since 2.0: let Megatron-LM load it and "
            "save it again. If they are in the new order, set checkpoint_version to 3.0"
        )


@dataclass(frozen=True)
class _Joining:
    """Joins the shards of a parameter, or of its state, that tensor parallel ranks have."""

    experts_tp: int
    shapes: Shapes
    """Shapes of the shards."""
    hints: Hints

    def count(self, name: str, by_tp: Mapping[int, Any]) -> int:
        """Return the number of ranks over which tensor parallelism shards."""
        return self.experts_tp if is_expert(name) else max(by_tp) + 1

    def __call__(self, name: str, by_tp: Mapping[int, StoredTensor], state: str = "") -> StoredTensor:
        count = self.count(name, by_tp)
        same = grouped((tp % count, by_tp[tp]) for tp in sorted(by_tp))
        full = f"{name}.{state}" if state else name
        shards = [first_copy(name, full, same[at], self.hints) for at in sorted(same)]
        return join_by_name(name, shards, self.shapes, self.hints, state)


def _is_elementwise(key: str, states: Mapping[str, Mapping[int, Values]], shapes: Shapes) -> bool:
    """Return True if a state has a value for each element of its parameter.

    An unknown one must have the shapes of all its parameters: the factor of a square one has its
    shape, too.
    """
    if elementwise(key):
        return True
    found = [(values[key], shapes[name]) for name, of in states.items() for values in of.values() if key in values]
    fits = all(isinstance(value, StoredTensor) and value.spec.shape == shape for value, shape in found)
    return fits and any(len(shape) == len({*shape}) > 1 for _, shape in found)


def _join_states(
    name: str, by_tp: Mapping[int, Values], join: _Joining, kinds: Collection[str], lost: list[str]
) -> Values:
    """Return the states of a parameter. Those that cannot be joined are added to `lost`."""
    out: Values = {}
    for key, value in by_tp[min(by_tp)].items():
        shards = {tp: values[key] for tp, values in by_tp.items() if key in values}
        if key in kinds and isinstance(value, StoredTensor):
            if len(shards) < len(by_tp):
                raise CorruptCheckpointError(f"the state {key!r} of {name!r} is missing on some tensor parallel ranks")
            out[key] = join(name, shards, key)
        elif is_single(value) or tp_dim(name, join.hints, join.count(name, by_tp)) is None:
            out[key] = value
        else:
            lost.append(f"{name}.{key}")
    return out


# The optimizers in one rank's file of an older checkpoint, with names instead of ids or flat buffers.
#
#     {state: {0: ...}, param_groups: [...]}                              plain
#     {optimizer: that, fp32_from_fp16_params: [[...] of each group]}     with fp32 masters
#     [that, that]                                                        of dense parameters, and of experts
#     distrib_optim.pt: {0: {(dtype, dtype): {param, exp_avg, ...}}}      flat buffers of the distributed optimizer


Param = tuple[int, str]
"""Chunk of the model, and name in its file."""
Found = tuple[list[tuple[dict[str, Any], list[Param]]], dict[Param, Values]]
"""Groups with their members, and the states of each parameter."""


@dataclass
class RankModel:
    """The parameters and buffers of one rank, by chunk of the model, under the names in its file."""

    files: RankFiles
    chunks: list[Tensors]


def read_rank_optimizers(rank: RankModel, args: Mapping[str, Any], hints: Hints) -> Iterator[Found]:
    """Yield every optimizer of a rank. Raises NormalizationError, asking for a hint, if ids cannot
    be named."""
    several = _as_list(rank.files.model.value.get("optimizer"))
    params = [(c, name) for c, chunk in enumerate(rank.chunks) for name in chunk if not is_buffer(name)]
    flats = _as_list(rank.files.optimizer.value) if rank.files.optimizer is not None else []
    found = list(zip_longest(several, flats))
    for i, (saved, flat) in enumerate(found):
        mine = params
        if len(found) > 1:
            mine = [p for p in params if is_expert(canonical_key(p[1])) == (i > 0)]
        groups, states = ([], {}) if saved is None else _by_id(rank, saved, mine, hints)
        if flat is not None and rank.files.optimizer is not None:
            for param, values in _from_flat(rank, rank.files.optimizer, flat, mine, args, hints):
                states.setdefault(param, {}).update(values)
        yield groups, states


def _as_list(saved: Any) -> list[dict[str, Any]]:
    if isinstance(saved, list | tuple):  # None: another rank's file has the optimizer's states
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
    groups = saved_groups(inner, file)
    named: list[tuple[dict[str, Any], list[Param]]] = []
    names: dict[int, Param] = {}
    given = hints.ids(rank.files.folder)
    by_name = {name: (chunk, name) for chunk, name in params}
    for group in groups:
        ids = list(group.get("params", ()))
        members = _members(rank, group, groups, params)
        if given is not None:
            members = [by_name[given[i]] for i in ids if given.get(i) in by_name]
        if len(members) == len(ids) == len(set(members)):  # chunks may have parameters with the same names
            names.update(zip(ids, members))
        elif ids:
            members = []
        named.append(({k: v for k, v in settings_of(group).items() if k != "step"}, members))
    states: dict[Param, Values] = {}
    for i, values in (inner.get("state") or {}).items():
        found = stored_values(i, values, file, rank.files.tp)
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
    """Return the parameters of a group by Megatron's default rules, in the order of registration."""
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


def _fits(rank: RankModel, param: Param, found: Values) -> bool:
    shape = rank.chunks[param[0]][param[1]].spec.shape
    return all(v.spec.shape == shape for k, v in found.items() if elementwise(k) and isinstance(v, StoredTensor))


def _ask(rank: RankModel, i: Any, hints: Hints) -> None:
    hints.missing(
        "param_names",
        f"{rank.files.model.source.label}: Megatron's default rules for param groups do not determine which parameter "
        f"has id {i} in the optimizer",
        f'{{{rank.files.folder!r}: ["embedding.word_embeddings.weight", ...]}}',
    )


def _add_masters(
    rank: RankModel,
    saved: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    names: Mapping[int, Param],
    states: dict[Param, Values],
) -> None:
    """Add fp32 masters of the parameters with lower precision, in the order of each group."""
    file = rank.files.model
    for group, masters in zip(groups, saved.get("fp32_from_fp16_params") or ()):
        members = [names[i] for i in group.get("params", ()) if i in names]
        low = [m for m in members if rank.chunks[m[0]][m[1]].spec.dtype in ("bfloat16", "float16")]
        if len(low) != len(masters):
            raise CorruptCheckpointError(
                f"{file.source.label}: a group has {len(low)} parameters of lower precision, but {len(masters)} masters"
            )
        for param, ref in zip(low, masters):
            value = stored_or_plain(f"{param[1]}.fp32_param", ref, file, rank.files.tp)
            if not _fits(rank, param, {"fp32_param": value}):
                raise CorruptCheckpointError(f"{file.source.label}: the master of {param[1]!r} has another shape")
            states.setdefault(param, {})["fp32_param"] = value


def _from_flat(
    rank: RankModel,
    file: TorchFile,
    saved: Mapping[Any, Any],
    params: Sequence[Param],
    args: Mapping[str, Any],
    hints: Hints,
) -> Iterator[tuple[Param, Values]]:
    """Yield the parameters of the distributed optimizer, from one flat tensor per chunk and dtype."""
    chunks = sorted(k for k in saved if type(k) is int)
    for chunk in chunks:
        for dtypes, flats in saved[chunk].items():
            if not isinstance(flats, dict):
                raise CorruptCheckpointError(f"{file.source.label}: buffer {chunk} {dtypes} holds no flat tensors")
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
                values: Values = {}
                for key, ref in refs.items():
                    flat = stored_tensor(f"{chunk}.{key}", file, ref, rank.files.tp)
                    values["fp32_param" if key == "param" else key] = cut(flat, slot.start, shape, f"{slot.name}.{key}")
                yield (chunk, slot.name), values
