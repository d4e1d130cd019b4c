"""DeepSeek-V2 and V3: multi-head latent attention, names only; and the layers that predict further tokens."""

from __future__ import annotations

from collections.abc import Sequence

from reshard.mapping.families.config import Decoder
from reshard.mapping.families.dense import HF, MEGATRON, TITAN
from reshard.mapping.rules import Rename, Rule

__all__ = ["latent_to_megatron", "latent_to_titan", "next_layers_to_megatron"]

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


def next_layers_to_megatron(model: Decoder, rules: Sequence[Rule], inner: str) -> list[Rule]:
    """Layers that predict further tokens: on disk they are numbered on, in Megatron they are apart.

    `rules` are those of the other layers, `inner` is what Megatron calls the transformer layer within. On disk such a
    layer repeats the embedding and the output layer: these copies keep their names, since Megatron has none.
    """
    out: list[Rule] = []
    for number in range(model.next_layers):
        source, target = HF.format(i=model.layers + number), f"mtp.layers.{number}."
        norms = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "final_layernorm"}
        out += [Rename(f"{source}{a}.weight", f"{target}{b}.weight") for a, b in norms.items()]

        def change(text: str, source: str = source, target: str = target) -> str:
            return text.replace(HF, source).replace(MEGATRON, f"{target}{inner}.")

        out += [rule.renamed(change) for rule in rules if all(HF in p.text for p in rule.sources)]
    return out
