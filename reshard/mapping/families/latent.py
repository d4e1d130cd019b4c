"""Multi-head latent attention, as DeepSeek-V2 and V3 have it: names only, nothing is rearranged."""

from __future__ import annotations

from reshard.mapping.families.dense import HF, MEGATRON, TITAN
from reshard.mapping.rules import Rename, Rule

__all__ = ["latent_to_megatron", "latent_to_titan"]

_TITAN = {
    "kv_a_proj_with_mqa": "wkv_a",
    "kv_a_layernorm": "kv_norm",
    "kv_b_proj": "wkv_b",
    "q_proj": "wq",
    "q_a_proj": "wq_a",
    "q_a_layernorm": "q_norm",
    "q_b_proj": "wq_b",
    "o_proj": "wo",
}
_MEGATRON = {
    "kv_a_proj_with_mqa": "linear_kv_down_proj.weight",
    "kv_b_proj": "linear_kv_up_proj.weight",
    "q_proj": "linear_q_proj.weight",
    "q_a_proj": "linear_q_down_proj.weight",
    "q_b_proj": "linear_q_up_proj.weight",
    "o_proj": "linear_proj.weight",
}


def latent_to_titan() -> list[Rule]:
    """Attention of DeepSeek to torchtitan."""
    return [Rename(f"{HF}self_attn.{a}.weight", f"{TITAN}attention.{b}.weight") for a, b in _TITAN.items()]


def latent_to_megatron(*, transformer_engine: bool) -> list[Rule]:
    """Attention of DeepSeek to Megatron; TransformerEngine keeps the norms within the projections that follow them."""
    norms = {"kv_a_layernorm": "kv_layernorm.weight", "q_a_layernorm": "q_layernorm.weight"}
    if transformer_engine:
        norms = {
            "kv_a_layernorm": "linear_kv_up_proj.layer_norm_weight",
            "q_a_layernorm": "linear_q_up_proj.layer_norm_weight",
        }
    names = {**_MEGATRON, **norms}
    return [Rename(f"{HF}self_attn.{a}.weight", f"{MEGATRON}self_attention.{b}") for a, b in names.items()]
