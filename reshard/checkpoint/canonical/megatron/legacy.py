"""Normalizes Megatron's older checkpoints of one file per model parallel rank: shards are joined by rules for names.

Layers are numbered from 0 in every stage, experts in every expert rank; optimizers know parameters by ids, which count
through the param groups. All of that is made global here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reshard.checkpoint.canonical.hints import Hints, find_scope
from reshard.checkpoint.canonical.megatron.megatron import finish
from reshard.checkpoint.canonical.megatron.names import canonical_key, skipped
from reshard.checkpoint.canonical.megatron.rank_optimizers import RankModel, read_rank_optimizers
from reshard.checkpoint.canonical.megatron.tensor_parallel import is_gated, join_shards, tp_dim
from reshard.checkpoint.canonical.result import Canonical, Value, elementwise
from reshard.errors import DamagedCheckpointError, FormatError
from reshard.formats.frameworks.megatron_legacy import LegacyFacts, arguments
from reshard.formats.pickles.torch_objects import TensorRef
from reshard.formats.stored.contents import Contents
from reshard.formats.stored.tensor import StoredTensor
from reshard.formats.torch_save.file import TorchFile, stored_tensor

__all__ = ["normalize_megatron_legacy"]

_LAYER = re.compile(r"(?P<head>(?:.*?\.)?layers)\.(?P<layer>\d+)\.(?P<tail>.+)")
_EXPERT = re.compile(r"(?P<head>.*\.local_experts)\.(?P<expert>\d+)\.(?P<tail>.+)")
_CHUNK = re.compile(r"model(\d*)")


def normalize_megatron_legacy(contents: Contents, hints: Hints, what: str) -> Canonical:
    """The state under the names of the unsharded model.

    Raises:
        DamagedCheckpointError: shards do not fit together.
        FormatError: experts that are one matrix, spread over ranks.
        NormalizationError: a parameter of an unknown name, or ids that cannot be named; the hint is named.
    """
    facts = contents.facts
    assert isinstance(facts, LegacyFacts)
    ranks = [RankModel(files, _chunks(files.model)) for files in facts.ranks]
    args = arguments(ranks[0].files.model)
    naming = _Naming(ranks, hints)
    parts: dict[str, dict[int, StoredTensor]] = {}
    states: dict[str, dict[int, dict[str, Value]]] = {}
    groups: list[dict[str, Any]] = []
    for rank in ranks:
        for chunk, tensors in enumerate(rank.chunks):
            for name, tensor in tensors.items():
                fqn = naming(rank, chunk, name)
                parts.setdefault(fqn, {}).setdefault(rank.files.tp, tensor)
        for name_of, found in read_rank_optimizers(rank, args, hints):
            _take(naming, rank, name_of, found, states, groups)
    tied = args.get("untie_embeddings_and_output_weights") is False
    if tied and len({rank.files.pp for rank in ranks}) > 1:
        # the last stage has a copy of the embedding, which is the output layer of the whole model, too
        parts.pop("output_layer.weight", None)
        states.pop("output_layer.weight", None)
        for group in groups:
            group["params"] = [p for p in group["params"] if p != "output_layer.weight"]
    model, shapes = {}, {name: by_tp[min(by_tp)].spec.shape for name, by_tp in parts.items()}
    for name, by_tp in parts.items():
        model[name] = _join(name, by_tp, shapes, hints)
    state = {name: _join_states(name, by_tp, shapes, hints) for name, by_tp in states.items()}
    return finish(model, state, groups, args, hints)


def _chunks(file: TorchFile) -> list[dict[str, StoredTensor]]:
    """The model of a file: `model`, or `model0`, `model1` ... where a rank has several chunks."""
    found = sorted((int(m[1] or 0), key) for key in file.value if (m := _CHUNK.fullmatch(str(key))))
    if not found:
        raise DamagedCheckpointError(f"{file.source.label}: it holds no model")
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
    """Names in the whole model for names in a rank's file."""

    def __init__(self, ranks: Sequence[RankModel], hints: Hints) -> None:
        self._offsets: dict[tuple[str, int, int], int] = {}
        """By container of layers, stage and chunk: the number of its layer 0."""
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
        found = [int(m["expert"]) for c in rank.chunks for n in c if (m := _EXPERT.fullmatch(canonical_key(n)))]
        return max(found, default=-1) + 1

    def __call__(self, rank: RankModel, chunk: int, name: str) -> str:
        name = canonical_key(name)
        match = _LAYER.fullmatch(name)
        if match is not None:
            layer = int(match["layer"]) + self._offset(rank, chunk, match["head"])
            name = f"{match['head']}.{layer}.{match['tail']}"
        match = _EXPERT.fullmatch(name)
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


def _count_layers(tensors: Mapping[str, StoredTensor]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in tensors:
        match = _LAYER.fullmatch(canonical_key(name))
        if match is not None and not match["head"].startswith("mtp"):
            counts[match["head"]] = max(counts.get(match["head"], 0), int(match["layer"]) + 1)
    return counts


def _take(
    naming: _Naming,
    rank: RankModel,
    groups_of: Sequence[tuple[dict[str, Any], list[tuple[int, str]]]],
    found: Mapping[tuple[int, str], Mapping[str, Value]],
    states: dict[str, dict[int, dict[str, Value]]],
    groups: list[dict[str, Any]],
) -> None:
    """Add what one optimizer of a rank holds; its parameters are given by chunk and name in the file."""
    for (chunk, name), values in found.items():
        fqn = naming(rank, chunk, name)
        states.setdefault(fqn, {}).setdefault(rank.files.tp, dict(values))
    for settings, members in groups_of:
        same = next((g for g in groups if {k: v for k, v in g.items() if k != "params"} == settings), None)
        if same is None:
            same = {**settings, "params": []}
            groups.append(same)
        known = set(same["params"])
        same["params"] += [fqn for chunk, name in members if (fqn := naming(rank, chunk, name)) not in known]


def _join(
    name: str, by_tp: Mapping[int, StoredTensor], shapes: Mapping[str, tuple[int, ...]], hints: Hints
) -> StoredTensor:
    shards = [by_tp[tp] for tp in sorted(by_tp)]
    return join_shards(name, shards, tp_dim(name, hints, len(shards)), is_gated(name, shapes))


def _join_states(
    name: str, by_tp: Mapping[int, Mapping[str, Value]], shapes: Mapping[str, tuple[int, ...]], hints: Hints
) -> dict[str, Value]:
    first = by_tp[min(by_tp)]
    out: dict[str, Value] = {}
    for key, value in first.items():
        shaped = isinstance(value, StoredTensor) and (elementwise(key) or value.spec.shape == shapes.get(name))
        if not shaped or (isinstance(value, StoredTensor) and not value.spec.shape):
            out[key] = value
            continue
        shards = {tp: values[key] for tp, values in by_tp.items() if key in values}
        if len(shards) < len(by_tp):
            raise DamagedCheckpointError(f"the state {key!r} of {name!r} is missing on some tensor parallel ranks")
        out[key] = _join(name, shards, shapes, hints)
    return out
