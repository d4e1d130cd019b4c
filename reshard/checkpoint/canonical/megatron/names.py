"""Names of Megatron-core: what a saved key, perhaps a stack of layers or experts, is in the unsharded model.

decoder.layers.mlp.linear_fc2.weight [L, ...]                decoder.layers.<l>.mlp.linear_fc2.weight
...layers.mlp.experts.experts.linear_fc2.weight [L, E, ...]  ...<l>.mlp.experts.local_experts.<e>.linear_fc2.weight
...self_attention.linear_qkv.layer_norm_weight               ...input_layernorm.weight
...mlp.linear_fc1.weight_w, weight_v                         ...mlp.linear_fc1.weight (gate, then up)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from reshard.checkpoint.canonical.views import concat, narrow, unstack
from reshard.errors import DamagedCheckpointError
from reshard.formats.stored.tensor import StoredTensor

__all__ = [
    "canonical_key",
    "cut_vocabulary",
    "expand",
    "is_expert",
    "join_halves",
    "skipped",
    "vocab_size",
    "whole_key",
]

_STACKED = re.compile(r"(?P<head>(?:.*?\.)?layers)\.(?P<tail>(?!\d+\.).+)")
_EXPERTS = re.compile(r"(?P<head>.*\bexperts)\.experts\.(?:(?P<number>\d+)\.)?(?P<tail>.+)")
_GROUPED = re.compile(r"(?P<head>.*\bmlp\.experts)\.(?P<tail>linear_fc[12]\.(?:weight|bias))(?P<number>\d+)")
_NORMS = (
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_(weight|bias)$"), r"input_layernorm.\1"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_(weight|bias)$"), r"pre_mlp_layernorm.\1"),
    (re.compile(r"self_attention\.linear_q_up_proj\.layer_norm_(weight|bias)$"), r"self_attention.q_layernorm.\1"),
    (re.compile(r"self_attention\.linear_kv_up_proj\.layer_norm_(weight|bias)$"), r"self_attention.kv_layernorm.\1"),
)
_HALF = re.compile(r"(.*\.(?:weight|bias))_([wv])")
_VOCABULARY = re.compile(r".*(word_embeddings\.weight|output_layer\.(weight|bias))")


def skipped(key: str) -> bool:
    """Whether a key is no parameter or buffer: state of fp8 recipes, of random generators, of the program."""
    return "_extra_state" in key or key.startswith(
        ("rng_state", "rerun_state_machine", "common.", "opt_param_scheduler")
    )


def is_expert(name: str) -> bool:
    """Whether a parameter is one expert's own, so spread by expert parallelism."""
    return ".experts.local_experts." in name


def canonical_key(key: str) -> str:
    """The name of a parameter that is no stack: without wrappers, norms where they belong, experts numbered."""
    while key.startswith("module."):
        key = key.removeprefix("module.")
    match = _GROUPED.fullmatch(key)
    if match:
        key = f"{match['head']}.local_experts.{match['number']}.{match['tail']}"
    for pattern, name in _NORMS:
        key = pattern.sub(name, key)
    return key


def expand(key: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    """The parameters that a stored tensor holds, by canonical name. Raises DamagedCheckpointError for a 0-d stack."""
    while key.startswith("module."):
        key = key.removeprefix("module.")
    match = _STACKED.fullmatch(key)
    if match is not None:
        names = [f"{match['head']}.{layer}.{match['tail']}" for layer in range(_length(key, tensor))]
        for name, one in zip(names, unstack(tensor, names)):
            yield from expand(name, one)
        return
    match = _EXPERTS.fullmatch(key)
    if match is not None and match["number"] is None:
        front = f"{match['head']}.local_experts"
        names = [f"{front}.{expert}.{match['tail']}" for expert in range(_length(key, tensor))]
        for name, one in zip(names, unstack(tensor, names)):
            yield canonical_key(name), one
        return
    if match is not None:
        key = f"{match['head']}.local_experts.{match['number']}.{match['tail']}"
    yield canonical_key(key), tensor


def _length(key: str, tensor: StoredTensor) -> int:
    if not tensor.spec.shape:
        raise DamagedCheckpointError(f"{key!r} should be a stack of layers or experts, but it is a single number")
    return tensor.spec.shape[0]


def join_halves(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors with `weight_w` (gate) and `weight_v` (up) as one. Raises DamagedCheckpointError if one lacks."""
    out: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        match = _HALF.fullmatch(name)
        if match is None:
            out[name] = tensor
            continue
        halves = [tensors.get(f"{match[1]}_{half}") for half in "wv"]
        if halves[0] is None or halves[1] is None:
            raise DamagedCheckpointError(f"{name!r}: the other half of {match[1]!r} (_w or _v) is missing")
        out.setdefault(match[1], concat([halves[0], halves[1]], 0, match[1]))
    return out


def whole_key(key: str) -> str:
    """The name of the parameter of which `key` may be a half."""
    match = _HALF.fullmatch(key)
    return key if match is None else match[1]


def vocab_size(args: Mapping[str, Any], hint: Any) -> int | None:
    """Rows of the vocabulary without padding, as the hint or the program's arguments say; None if neither does."""
    for value in (hint, args.get("vocab_size")):
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def cut_vocabulary(name: str, tensor: StoredTensor, size: int | None, padded: Any) -> StoredTensor:
    """The tensor without the rows that pad a vocabulary; as it is if it has none."""
    if size is None or not _VOCABULARY.fullmatch(name) or not tensor.spec.shape:
        return tensor
    rows = tensor.spec.shape[0]
    if rows <= size or (isinstance(padded, int) and rows != padded):
        return tensor
    return narrow(tensor, 0, 0, size)


def is_vocabulary(name: str) -> bool:
    """Whether a parameter has a row for each word."""
    return _VOCABULARY.fullmatch(name) is not None
