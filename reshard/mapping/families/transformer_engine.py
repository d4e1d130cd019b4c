"""Transformer Engine's `TransformerLayer`, with norms inside the projections that follow them, in place of Llama's own.

    self_attention.layernorm_qkv.{layer_norm_weight, query_weight, key_weight, value_weight}    self_attention.proj
    layernorm_mlp.{layer_norm_weight, fc1_weight (gate, then up), fc2_weight}

What is outside the layers keeps Hugging Face's names. With `fuse_qkv_params` queries, keys and values are one `weight`,
by query groups or one behind another, as `qkv_weight_interleaved` says: such a file is read, and written with three.
"""

from __future__ import annotations

from collections.abc import Sequence

from planners.views.view import View
from reshard.errors import NormalizationError
from reshard.mapping.families.config import Decoder
from reshard.mapping.families.dense import HF
from reshard.mapping.mapping import Mapping
from reshard.mapping.rules import Concat, Drop, Rename, Rule, Split

__all__ = ["TRANSFORMER_ENGINE", "as_not_fused", "to_transformer_engine"]

TRANSFORMER_ENGINE = ("llama", "mistral", "qwen2")
"""The families whose layers it has."""
_QKV = f"{HF}self_attention.layernorm_qkv."
_MLP = f"{HF}layernorm_mlp."
_KINDS = ("weight", "bias")


def to_transformer_engine() -> list[Rule]:
    """From the names that most have on disk."""
    parts = {"q": "query", "k": "key", "v": "value"}
    return [
        Rename(f"{HF}input_layernorm.weight", f"{_QKV}layer_norm_weight"),
        *(Rename(f"{HF}self_attn.{a}_proj.{kind}", f"{_QKV}{b}_{kind}") for a, b in parts.items() for kind in _KINDS),
        *(Rename(f"{HF}self_attn.o_proj.{kind}", f"{HF}self_attention.proj.{kind}") for kind in _KINDS),
        Rename(f"{HF}post_attention_layernorm.weight", f"{_MLP}layer_norm_weight"),
        *(Concat([f"{HF}mlp.{x}_proj.{k}" for x in ("gate", "up")], f"{_MLP}fc1_{k}", (1, 1)) for k in _KINDS),
        *(Rename(f"{HF}mlp.down_proj.{kind}", f"{_MLP}fc2_{kind}") for kind in _KINDS),
    ]


def as_not_fused(model: Decoder, interleaved: bool | None = None) -> Mapping:
    """Fused projections in three, and without the states of fp8 recipes, which are no parameters."""
    if interleaved is None and model.kv_heads == 1:
        interleaved = False  # one query group lies alike in both
    cut = _UntoldSplit if interleaved is None else Split
    parts, groups = (model.heads // model.kv_heads, 1, 1), model.kv_heads if interleaved else 1
    split: list[Rule] = [
        cut(f"{_QKV}{kind}", [f"{_QKV}{x}_{kind}" for x in ("query", "key", "value")], parts, groups) for kind in _KINDS
    ]
    inner = (
        "self_attention.layernorm_qkv.",
        "self_attention.proj.",
        "self_attention.core_attention.",
        "layernorm_mlp.",
    )
    return Mapping([*split, *(Drop(f"{HF}{name}_extra_state") for name in inner)])


class _UntoldSplit(Split):
    """A fused projection of which nobody has said how it lies: both ways have one name and one shape."""

    def build(self, views: Sequence[View]) -> list[View]:
        raise NormalizationError(
            "queries, keys and values in one lie by query groups, or one behind another, which no file says: give "
            "ready(..., qkv_interleaved=True) where the layers had qkv_weight_interleaved=True, as by default, or "
            "ready(..., qkv_interleaved=False); on the command line --naming qkv_interleaved=true or =false"
        )
