"""Attention and feed-forward layers that Llama, Mistral, Qwen2, Qwen3 and their kin have in common."""

from __future__ import annotations

from collections.abc import Iterable

from reshard.mapping.computed_rules import Offset
from reshard.mapping.families.config import Decoder
from reshard.mapping.mapping import Mapping
from reshard.mapping.rules import Concat, Rename, Resize, Rope, Rule, Split

__all__ = [
    "HF",
    "MEGATRON",
    "TITAN",
    "attention_to_megatron",
    "attention_to_titan",
    "centred_otherwise",
    "feed_forward_to_megatron",
    "feed_forward_to_titan",
    "outer_to_megatron",
    "outer_to_titan",
    "phi3_to_plain",
]

HF = "model.layers.{i}."
TITAN = "layers.{i}."
MEGATRON = "decoder.layers.{i}."


def outer_to_titan(generation: str) -> list[Rule]:
    """Everything outside the layers; `lm_head` was called `output` up to torchtitan 0.2."""
    return [
        Rename("model.embed_tokens.weight", "tok_embeddings.weight"),
        Rename("model.norm.weight", "norm.weight"),
        Rename("lm_head.weight", "lm_head.weight" if generation == "0.3" else "output.weight"),
        Rename(f"{HF}input_layernorm.weight", f"{TITAN}attention_norm.weight"),
        Rename(f"{HF}post_attention_layernorm.weight", f"{TITAN}ffn_norm.weight"),
    ]


def attention_to_titan(model: Decoder, generation: str, *, rotate_pairs: bool) -> list[Rule]:
    """Attention and the dense feed-forward layer. `rotate_pairs`: the model rotates neighbours, as torchtitan's
    Llama does, and not halves of a head, so rows of queries and keys change places."""
    inner = f"{TITAN}attention." + ("qkv_linear." if generation == "0.3" else "")

    def rotary(source: str, target: str) -> Rule:
        return Rope(source, target, model.head_size, "pairs") if rotate_pairs else Rename(source, target)

    return [
        rotary(f"{HF}self_attn.q_proj.{{kind}}", f"{inner}wq.{{kind}}"),
        rotary(f"{HF}self_attn.k_proj.{{kind}}", f"{inner}wk.{{kind}}"),
        Rename(f"{HF}self_attn.v_proj.{{kind}}", f"{inner}wv.{{kind}}"),
        Rename(f"{HF}self_attn.o_proj.{{kind}}", f"{TITAN}attention.wo.{{kind}}"),
        Rename(f"{HF}self_attn.q_norm.weight", f"{TITAN}attention.q_norm.weight"),
        Rename(f"{HF}self_attn.k_norm.weight", f"{TITAN}attention.k_norm.weight"),
        *feed_forward_to_titan("mlp", "feed_forward"),
    ]


def feed_forward_to_titan(source: str, target: str) -> list[Rule]:
    """gate, down and up are w1, w2 and w3."""
    parts = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    return [Rename(f"{HF}{source}.{a}.{{kind}}", f"{TITAN}{target}.{b}.{{kind}}") for a, b in parts.items()]


def outer_to_megatron(model: Decoder, *, transformer_engine: bool, padded_vocab: int | None) -> list[Rule]:
    """Everything outside attention and feed-forward. `padded_vocab`: rows of the vocabulary with its padding.

    TransformerEngine keeps a norm within the projection that follows it, unless that is a router or latent attention.
    """
    names = {"model.embed_tokens.weight": "embedding.word_embeddings.weight", "lm_head.weight": "output_layer.weight"}
    vocab: list[Rule] = [
        Rename(a, b) if padded_vocab is None else Resize(a, b, model.vocab_size, padded_vocab) for a, b in names.items()
    ]
    before, between, dense = "input_layernorm.weight", "pre_mlp_layernorm.weight", "pre_mlp_layernorm.weight"
    if transformer_engine:
        before = before if model.is_latent else "self_attention.linear_qkv.layer_norm_weight"
        dense = "mlp.linear_fc1.layer_norm_weight"
        between = between if model.has_experts else dense
    after = "post_attention_layernorm.weight"
    last = []
    if model.is_sandwiched:
        last = [
            Rename(f"{HF}{after}", f"{MEGATRON}self_attention.linear_proj.post_layernorm.weight"),
            Rename(f"{HF}post_feedforward_layernorm.weight", f"{MEGATRON}mlp.linear_fc2.post_layernorm.weight"),
        ]
        after = "pre_feedforward_layernorm.weight"
    layers = [str(layer) for layer in model.dense_layers] if dense != between else []
    return [
        *vocab,
        Rename("model.norm.weight", "decoder.final_layernorm.weight"),
        Rename(f"{HF}input_layernorm.weight", f"{MEGATRON}{before}"),
        *(Rename(HF.format(i=i) + after, MEGATRON.format(i=i) + dense) for i in layers),
        Rename(f"{HF}{after}", f"{MEGATRON}{between}"),
        *last,
    ]


def attention_to_megatron(model: Decoder) -> list[Rule]:
    """Queries, keys and values become one, query group by query group; gate and up become one."""
    qkv = [f"{HF}self_attn.{x}_proj.{{kind}}" for x in "qkv"]
    fused = f"{MEGATRON}self_attention.linear_qkv.{{kind}}"
    return [
        Concat(qkv, fused, parts=(model.heads // model.kv_heads, 1, 1), groups=model.kv_heads),
        Rename(f"{HF}self_attn.o_proj.{{kind}}", f"{MEGATRON}self_attention.linear_proj.{{kind}}"),
        Rename(f"{HF}self_attn.q_norm.weight", f"{MEGATRON}self_attention.q_layernorm.weight"),
        Rename(f"{HF}self_attn.k_norm.weight", f"{MEGATRON}self_attention.k_layernorm.weight"),
        *feed_forward_to_megatron("mlp", "mlp"),
    ]


def feed_forward_to_megatron(source: str, target: str) -> list[Rule]:
    """fc1 is gate and up, fc2 is down."""
    pair = [f"{HF}{source}.gate_proj.{{kind}}", f"{HF}{source}.up_proj.{{kind}}"]
    return [
        Concat(pair, f"{MEGATRON}{target}.linear_fc1.{{kind}}", parts=(1, 1)),
        Rename(f"{HF}{source}.down_proj.{{kind}}", f"{MEGATRON}{target}.linear_fc2.{{kind}}"),
    ]


def phi3_to_plain(model: Decoder) -> Mapping:
    """From Phi-3's fused projections, queries before keys before values, to those that all other families have."""
    qkv = [f"{HF}self_attn.{x}_proj.{{kind}}" for x in "qkv"]
    pair = [f"{HF}mlp.{x}_proj.{{kind}}" for x in ("gate", "up")]
    return Mapping(
        [
            Split(f"{HF}self_attn.qkv_proj.{{kind}}", qkv, (model.heads, model.kv_heads, model.kv_heads)),
            Split(f"{HF}mlp.gate_up_proj.{{kind}}", pair, (1, 1)),
        ]
    )


def centred_otherwise(rules: Iterable[Rule], by: float, exact: bool) -> list[Rule]:
    """The same rules, with `by` added to every norm's weight."""
    return [
        Offset(rule.sources[0].text, rule.targets[0].text, by, exact)
        if isinstance(rule, Rename) and rule.sources[0].text.endswith("norm.weight")
        else rule
        for rule in rules
    ]
