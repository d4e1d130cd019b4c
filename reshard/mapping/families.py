"""Predefined mappings between Hugging Face, torchtitan, Megatron, vLLM, SGLang, and others, for the
architectures of `reshard.mapping.architectures` and vision-language models (see `vision`).

    mapping = ready("config.json", "torchtitan", "huggingface")
    reshard.convert(checkpoint, "out", format="safetensors", model_only=True, mapping=mapping)

They apply to canonical names and full tensors, as `Checkpoint.normalized` returns them, and to
optimizer states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping as Dict, Sequence
from functools import partial
from typing import Any

from planners.geometry.views import View
from reshard.errors import NormalizationError, did_you_mean, option_error
from reshard.mapping import vision
from reshard.mapping.architectures import ARCHITECTURES, ENGINES, Decoder, undone
from reshard.mapping.mapping import Mapping, between
from reshard.mapping.rules import (
    Concat,
    Drop,
    Offset,
    Rename,
    Resize,
    Rope,
    Rule,
    Rules,
    Split,
    Stack,
    Transpose,
    Unstack,
    renames,
)

__all__ = ["FAMILIES", "NAMINGS", "Decoder", "in_memory_to_disk", "ready"]


# Attention and feed-forward layers of Llama, Mistral, Qwen2, Qwen3, and similar models.


HF = "model.layers.{i}."
TITAN = "layers.{i}."
MEGATRON = "decoder.layers.{i}."
_KINDS = ("weight", "bias")


def outer_to_titan(generation: str) -> Rules:
    """Map everything outside attention and feed-forward. In torchtitan 0.2, `lm_head` was called `output`."""
    names = {
        "model.embed_tokens.weight": "tok_embeddings.weight",
        "model.norm.weight": "norm.weight",
        "lm_head.weight": "lm_head.weight" if generation == "0.3" else "output.weight",
        f"{HF}input_layernorm.weight": f"{TITAN}attention_norm.weight",
        f"{HF}post_attention_layernorm.weight": f"{TITAN}ffn_norm.weight",
    }
    return renames(names)


def rotary(model: Decoder, source: str, target: str) -> Rule:
    """Map queries or keys. Reorder their rows if the target rotates adjacent pairs instead of
    halves of a head, as torchtitan's Llama does."""
    return Rope(source, target, model.head_size, "pairs") if model.architecture.pairs else Rename(source, target)


def attention_to_titan(model: Decoder, generation: str) -> Rules:
    """Map attention and the dense feed-forward layer."""
    inner = f"{TITAN}attention." + ("qkv_linear." if generation == "0.3" else "")
    names = {
        "self_attn.v_proj.{kind}": f"{inner}wv.{{kind}}",
        "self_attn.o_proj.{kind}": f"{TITAN}attention.wo.{{kind}}",
        "self_attn.q_norm.weight": f"{TITAN}attention.q_norm.weight",
        "self_attn.k_norm.weight": f"{TITAN}attention.k_norm.weight",
    }
    return [
        *(rotary(model, f"{HF}self_attn.{x}_proj.{{kind}}", f"{inner}w{x}.{{kind}}") for x in "qk"),
        *renames(names, HF),
        *feed_forward_to_titan("mlp", "feed_forward"),
    ]


def feed_forward_to_titan(source: str, target: str) -> Rules:
    """Map gate, down, and up to w1, w2, and w3."""
    parts = {"gate_proj.{kind}": "w1.{kind}", "down_proj.{kind}": "w2.{kind}", "up_proj.{kind}": "w3.{kind}"}
    return renames(parts, f"{HF}{source}.", f"{TITAN}{target}.")


def outer_to_megatron(model: Decoder, *, transformer_engine: bool, padded_vocab: int | None) -> Rules:
    """Map everything outside attention and feed-forward. `padded_vocab`: rows of the padded
    vocabulary.

    TransformerEngine keeps a norm in the projection that follows it, except before a router or
    latent attention.
    """
    names = {"model.embed_tokens.weight": "embedding.word_embeddings.weight", "lm_head.weight": "output_layer.weight"}
    vocab: Rules = [
        Rename(a, b) if padded_vocab is None else Resize(a, b, model.vocab_size, padded_vocab) for a, b in names.items()
    ]
    return [*vocab, *norms_to_megatron(model, transformer_engine=transformer_engine)]


def norms_to_megatron(model: Decoder, *, transformer_engine: bool) -> Rules:
    """Map all norms except those of queries and keys, with their biases if there are any."""
    known = model.architecture
    before, after, between, last = known.norms
    first = "self_attention.linear_qkv.layer_norm_{kind}"
    linear, dense = "self_attention.in_proj.layer_norm_{kind}", "mlp.linear_fc1.layer_norm_{kind}"
    sparse = "pre_mlp_layernorm.{kind}" if known.experts else dense
    if not transformer_engine:
        linear, dense, sparse = "input_layernorm.{kind}", "pre_mlp_layernorm.{kind}", "pre_mlp_layernorm.{kind}"
    if known.latent or not transformer_engine:
        first = "input_layernorm.{kind}"
    targets = {
        before: first,
        after: "self_attention.linear_proj.post_layernorm.{kind}",
        between: sparse,
        last: "mlp.linear_fc2.post_layernorm.{kind}",
    }
    pairs = [("model.norm.{kind}", "decoder.final_layernorm.{kind}")]
    special = [(layer, before, linear) for layer in model.linear_layers if linear != first]
    special += [(layer, between, dense) for layer in model.dense_layers if dense != sparse]
    pairs += [(f"{HF.format(i=i)}{name}.{{kind}}", MEGATRON.format(i=i) + target) for i, name, target in special]
    pairs += [(f"{HF}{name}.{{kind}}", MEGATRON + target) for name, target in targets.items() if name]
    return [Rename(*(text.replace("{kind}", kind) for text in pair)) for pair in pairs for kind in _KINDS]


def attention_to_megatron(model: Decoder) -> Rules:
    """Fuse queries, keys, and values by query group, with output gates if there are any. Fuse
    feed-forward layers."""
    each = model.heads // model.kv_heads
    parts = {"q_proj": each, "k_proj": 1, "v_proj": 1}
    if model.architecture.output_gates:
        parts = {"q_proj": each, _OUTPUT_GATE: each, "k_proj": 1, "v_proj": 1}
    qkv = [f"{HF}self_attn.{x}.{{kind}}" for x in parts]
    fused = f"{MEGATRON}self_attention.linear_qkv.{{kind}}"
    names = {
        "o_proj.{kind}": "linear_proj.{kind}",
        "q_norm.weight": "q_layernorm.weight",
        "k_norm.weight": "k_layernorm.weight",
        "sinks": "core_attention.softmax_offset",
    }
    return [
        Concat(qkv, fused, parts=tuple(parts.values()), groups=model.kv_heads),
        *renames(names, f"{HF}self_attn.", f"{MEGATRON}self_attention."),
        *feed_forward_to_megatron("mlp", "mlp", gated=model.architecture.gated),
    ]


def feed_forward_to_megatron(source: str, target: str, *, gated: bool = True) -> Rules:
    """Map gate and up to fc1, and down to fc2."""
    pair = [f"{HF}{source}.gate_proj.{{kind}}", f"{HF}{source}.up_proj.{{kind}}"]
    fc1 = f"{MEGATRON}{target}.linear_fc1.{{kind}}"
    return [
        Concat(pair, fc1, (1, 1)) if gated else Rename(pair[1], fc1),
        Rename(f"{HF}{source}.down_proj.{{kind}}", f"{MEGATRON}{target}.linear_fc2.{{kind}}"),
    ]


# Qwen3-Next and Qwen3.5: layers with linear attention, and output gates in those with full
# attention.
#
#     Qwen3-Next    in_proj_qkvz, by key head: query, key, values, and their gates; in_proj_ba likewise
#     Qwen3.5       in_proj_qkv: all queries, all keys, all values; in_proj_z, in_proj_b, in_proj_a
#     Megatron      in_proj and conv1d are one parameter each, saved in parts: in_proj.weight.query, ...


_OUTPUT_GATE = "q_gate_proj"
_LINEAR = f"{HF}linear_attn."


def gates_apart(model: Decoder) -> Mapping:
    """Split queries from output gates."""
    names = [f"{HF}self_attn.{x}.{{kind}}" for x in ("q_proj", _OUTPUT_GATE)]
    return Mapping([Split(names[0], names, (1, 1), model.heads)] if model.architecture.output_gates else [])


def linear_to_megatron(model: Decoder, zero_centered: bool, exact: bool) -> Rules:
    """Map linear attention. On disk, its norm is not zero-centered. In Megatron, it is if all others are."""
    (keys, values), (key_size, value_size) = model.linear_heads, model.linear_sizes
    each, attention = values // keys, f"{MEGATRON}self_attention."
    qkv = ("query", "key", "value")

    def split(source: str, target: str, names: Sequence[str], parts: Sequence[int], groups: int) -> Rule:
        return Split(_LINEAR + source, [f"{attention}{target}.weight.{name}" for name in names], parts, groups)

    if model.family == "qwen3_next":
        by_head = (key_size, key_size, each * value_size, each * value_size)
        projections = [
            split("in_proj_qkvz.weight", "in_proj", (*qkv, "z"), by_head, keys),
            split("in_proj_ba.weight", "in_proj", ("beta", "alpha"), (1, 1), keys),
        ]
    else:
        rest = {"z.weight": "weight.z", "b.weight": "weight.beta", "a.weight": "weight.alpha"}
        projections = [
            split("in_proj_qkv.weight", "in_proj", qkv, model.linear_rows, 1),
            *renames(rest, f"{_LINEAR}in_proj_", f"{attention}in_proj."),
        ]
    norm = (f"{_LINEAR}norm.weight", f"{attention}out_norm.weight")
    return [
        *projections,
        split("conv1d.weight", "conv1d", qkv, model.linear_rows, 1),
        *(Rename(_LINEAR + name, attention + name) for name in ("out_proj.weight", "A_log", "dt_bias")),
        Offset(*norm, -1.0, exact) if zero_centered else Rename(*norm),
    ]


def centred_otherwise(rules: Iterable[Rule], by: float, exact: bool) -> Rules:
    """Return the same rules, but add `by` to the weight of every norm."""
    return [
        Offset(rule.sources[0].text, rule.targets[0].text, by, exact)
        if isinstance(rule, Rename) and rule.sources[0].text.endswith("norm.weight")
        else rule
        for rule in rules
    ]


# Mixture-of-experts models: one matrix per expert in Hugging Face files, stacks in torchtitan, and
# fused gate and up in Megatron.


_PARTS = {"gate_proj": "w1_EFD", "down_proj": "w2_EDF", "up_proj": "w3_EFD"}


def experts_to_titan(generation: str, fill: float | None) -> Rules:
    """Stack the experts. Map the router, its bias, and the shared experts."""
    block = titan_block(generation)
    stacks: Rules = [
        Stack(f"{HF}mlp.experts.{{e}}.{a}.weight", block + titan_name(b, generation), over="e", fill=fill)
        for a, b in _PARTS.items()
    ]
    bias = titan_name("expert_bias_E", generation)
    names = {"weight": "router.gate.weight", "e_score_correction_bias": bias}
    return [
        *stacks,
        *renames(names, f"{HF}mlp.gate.", f"{TITAN}moe."),
        *feed_forward_to_titan("mlp.shared_experts", "moe.shared_experts"),
    ]


def titan_block(generation: str) -> str:
    """Return the prefix of torchtitan's expert tensors."""
    return f"{TITAN}moe.routed_experts.inner_experts." if generation == "0.3" else f"{TITAN}moe.experts."


def titan_name(name: str, generation: str) -> str:
    """Return the torchtitan name of a tensor. torchtitan 0.3 appends letters for its dims."""
    return name if generation == "0.3" else name.rpartition("_")[0]


def experts_to_megatron(model: Decoder, *, transformer_engine: bool) -> Rules:
    """Fuse gate and up of each expert. With TransformerEngine's grouped experts, names end with the
    expert's number."""
    rules: Rules = []
    for kind in ("weight", "bias") if model.family == "gpt_oss" else ("weight",):
        block, own = f"{MEGATRON}mlp.experts.", f"{HF}mlp.experts.{{e}}."
        fused = [f"{block}local_experts.{{e}}.linear_fc1.{kind}", f"{block}local_experts.{{e}}.linear_fc2.{kind}"]
        if transformer_engine:
            fused = [f"{block}linear_fc1.{kind}{{e}}", f"{block}linear_fc2.{kind}{{e}}"]
        pair = [f"{own}gate_proj.{kind}", f"{own}up_proj.{kind}"]
        rules += [Concat(pair, fused[0], (1, 1)), Rename(f"{own}down_proj.{kind}", fused[1])]
    shared = f"mlp.{model.architecture.shared}"
    names = {
        "mlp.gate.weight": "mlp.router.weight",
        "mlp.gate.bias": "mlp.router.bias",
        "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias",
        f"{shared}_gate.weight": "mlp.shared_experts.gate_weight",
    }
    return [*rules, *feed_forward_to_megatron(shared, "mlp.shared_experts"), *renames(names, HF, MEGATRON)]


def in_memory_to_disk(fill: float | None = None, gated: bool = True) -> Mapping:
    """Map the stacked experts of transformers 5 in memory to the names in its files."""
    block = f"{HF}mlp.experts."
    names = ("gate_up_proj" if gated else "up_proj", "down_proj")
    stacks = Mapping([Unstack(f"{block}{x}", f"{block}{{e}}.{x}.weight", over="e", fill=fill) for x in names])
    pair = [f"{block}{{e}}.gate_proj.weight", f"{block}{{e}}.up_proj.weight"]
    return stacks | Mapping([Split(f"{block}{{e}}.gate_up_proj.weight", pair, (1, 1))]) if gated else stacks


def to_plain(model: Decoder, fill: float | None) -> Mapping:
    """Map names on disk that differ from the plain ones, split fused projections, and unstack experts."""
    known = model.architecture
    outer, rules = Mapping(renames(known.outer)), renames(known.names, HF, HF)
    # the inverse of the fusing for inference engines
    fused = {"qkv": _attention(model), "gate_up": _gate_up("mlp")}
    apart = Mapping(rule.inverse() for name in known.fused for rule in fused[name])
    if known.experts != "stacked":
        made = outer | Mapping(rules) | apart
        return made | in_memory_to_disk(fill) if known.experts == "packed" else made
    shared = [f"{HF}mlp.shared_experts.{x}_proj.weight" for x in ("gate", "up", "down")]
    names = {
        f"{HF}block_sparse_moe.input_linear.weight": f"{_BLOCK}gate_up_proj",
        f"{HF}block_sparse_moe.output_linear.weight": f"{_BLOCK}down_proj",
        f"{HF}shared_mlp.output_linear.weight": shared[2],
    }
    rules += [Split(f"{HF}shared_mlp.input_linear.weight", shared[:2], (1, 1)), *renames(names)]
    return Mapping(rules) | in_memory_to_disk(fill)


# DeepSeek-V2 and V3: multi-head latent attention (only names change), and multi-token prediction
# layers.


_TITAN = {
    "kv_a_proj_with_mqa.{kind}": "wkv_a.{kind}",
    "kv_a_layernorm.weight": "kv_norm.weight",
    "kv_b_proj.{kind}": "wkv_b.{kind}",
    "q_proj.{kind}": "wq.{kind}",
    "q_a_proj.{kind}": "wq_a.{kind}",
    "q_a_layernorm.weight": "q_norm.weight",
    "q_b_proj.{kind}": "wq_b.{kind}",
    "o_proj.{kind}": "wo.{kind}",
}
_MEGATRON = {
    "kv_a_proj_with_mqa.{kind}": "linear_kv_down_proj.{kind}",
    "kv_b_proj.{kind}": "linear_kv_up_proj.{kind}",
    "q_proj.{kind}": "linear_q_proj.{kind}",
    "q_a_proj.{kind}": "linear_q_down_proj.{kind}",
    "q_b_proj.{kind}": "linear_q_up_proj.{kind}",
    "o_proj.{kind}": "linear_proj.{kind}",
}


def latent_to_megatron(*, transformer_engine: bool) -> Rules:
    """Map DeepSeek's attention to Megatron. TransformerEngine keeps each norm in the projection after it."""
    norms = {"kv_a_layernorm.weight": "kv_layernorm.weight", "q_a_layernorm.weight": "q_layernorm.weight"}
    if transformer_engine:
        norms = {
            "kv_a_layernorm.weight": "linear_kv_up_proj.layer_norm_weight",
            "q_a_layernorm.weight": "linear_q_up_proj.layer_norm_weight",
        }
    names = {**norms, **_MEGATRON}
    indexer = {"wq_b": "linear_wq_b", "wk": "linear_wk", "k_norm": "k_norm", "weights_proj": "linear_weights_proj"}
    for old, new in indexer.items():  # the indexer of sparse attention
        names[f"indexer.{old}.{{kind}}"] = f"core_attention.indexer.{new}.{{kind}}"
    return renames(names, f"{HF}self_attn.", f"{MEGATRON}self_attention.")


def next_layers_to_megatron(model: Decoder, rules: Sequence[Rule], inner: str) -> Rules:
    """Map multi-token prediction layers. On disk, layer numbers continue from the other layers.
    Megatron numbers them separately.

    `rules` map the other layers. `inner` is Megatron's name for the transformer layer inside. The
    copies of the embedding and the output layer on disk keep their names, because Megatron has none
    for them.
    """
    out: Rules = []
    for number in range(model.next_layers):
        source, target = HF.format(i=model.layers + number), f"mtp.layers.{number}."
        last = "final_layernorm" if model.family == "hy_v3" else "shared_head.norm"
        norms = {x: x for x in ("enorm.weight", "hnorm.weight", "eh_proj.weight")}
        out += renames({**norms, f"{last}.weight": "final_layernorm.weight"}, source, target)

        def change(text: str, source: str = source, target: str = target) -> str:
            return text.replace(HF, source).replace(MEGATRON, f"{target}{inner}.")

        out += [rule.renamed(change) for rule in rules if all(HF in p.text for p in rule.sources)]
    return out


# gpt-oss: experts are stacked on disk, with biases. Gate and up alternate, and matrices are
# transposed.
#
#     Hugging Face    gate_up_proj [E, hidden, 2 * size]: columns gate, up, gate, up ...
#     torchtitan      mlp1_weight [E, 2 * size, hidden]: the same, transposed
#     Megatron        linear_fc1 of each expert [2 * size, hidden]: all of the gate, then all of up


_BLOCK = f"{HF}mlp.experts."


def gpt_oss_to_plain(model: Decoder, fill: float | None) -> Mapping:
    """Map gpt-oss's names to the plain ones: one matrix per expert.

    Raises NormalizationError if the number of rows of an expert is unknown.
    """
    if model.expert_size < 1:
        raise NormalizationError(f"gate and up of gpt-oss alternate: expert_size is needed to separate them: {model}")
    router = Rename(f"{HF}mlp.router.{{kind}}", f"{HF}mlp.gate.{{kind}}")
    return turned_to_plain(_BLOCK, [router], fill, {"weight": "", "bias": "_bias"}, model.expert_size)


def turned_to_plain(
    block: str, beside: Sequence[Rule], fill: float | None, kinds: Dict[str, str] = {"weight": ""}, groups: int = 1
) -> Mapping:
    """Map stacks of transposed expert matrices to the plain names.

    `beside` are rules for other tensors, `kinds` the endings of names, and `groups` the number of
    groups in which gate and up are interleaved.
    """
    names = ("gate_up_proj", "down_proj")
    stacks = [
        Unstack(f"{block}{name}{end}", f"{_BLOCK}{{e}}.{name}.{kind}", over="e", fill=fill)
        for name in names
        for kind, end in kinds.items()
    ]
    turned = [Transpose(f"{_BLOCK}{{e}}.{name}.weight", f"{_BLOCK}{{e}}.{name}.weight") for name in names]
    halves = [
        Split(
            f"{_BLOCK}{{e}}.gate_up_proj.{kind}",
            [f"{_BLOCK}{{e}}.{x}_proj.{kind}" for x in ("gate", "up")],
            (1, 1),
            groups,
        )
        for kind in kinds
    ]
    return Mapping([*stacks, *beside]) | Mapping(turned) | Mapping(halves)


def gpt_oss_to_titan(generation: str) -> Rules:
    """Map the gpt-oss tensors other than attention."""
    block = titan_block(generation)
    names = {"gate_up_proj": ("mlp1", "EGD", "EG"), "down_proj": ("mlp2", "EDF", "ED")}
    beside = {"self_attn.sinks": "attention.sinks", "mlp.router.{kind}": "moe.router.gate.{kind}"}
    rules = renames(beside, HF, TITAN)
    for name, (target, weight, bias) in names.items():
        rules.append(Transpose(f"{_BLOCK}{name}", block + titan_name(f"{target}_weight_{weight}", generation)))
        rules.append(Rename(f"{_BLOCK}{name}_bias", block + titan_name(f"{target}_bias_{bias}", generation)))
    return rules


# Llama 4: experts are stacked on disk as in gpt-oss, but all of the gate comes before all of up.


def llama4_to_plain(fill: float | None) -> Mapping:
    """Map Llama 4's names to the plain ones."""
    parts = [f"{part}_proj.weight" for part in ("gate", "up", "down")]
    names = {f"shared_expert.{part}": f"shared_experts.{part}" for part in parts} | {part: part for part in parts}
    names["router.weight"] = "gate.weight"
    return turned_to_plain(f"{HF}feed_forward.experts.", renames(names, f"{HF}feed_forward.", f"{HF}mlp."), fill)


# vLLM and SGLang: fused queries, keys, and values, fused gate and up, and stacked experts.
#
#     vLLM      self_attn.qkv_proj, mlp.gate_up_proj,
#               mlp.experts.routed_experts.w13_weight [E, 2 * size, hidden], w2_weight
#     SGLang    the same, but mlp.experts.w13_weight, as in vLLM up to the middle of 2026
#
# These are the unsharded tensors into which an engine loads, before it repacks any for a kernel.
# The input of its loader has Hugging Face's names.


def to_engine(model: Decoder, engine: str, *, routed_experts: bool, fill: float | None) -> Mapping:
    """Map the plain names to an engine's. Other names stay as they are on disk. `routed_experts`:
    vLLM's experts are in a module of that name."""
    known = model.architecture
    fused = _latent(model, engine) if known.latent else _attention(model)
    feed_forward = [*_gate_up("mlp"), *_gate_up(f"mlp.{known.shared}")] if known.gated else []
    made = Mapping([*fused, *feed_forward])
    names = renames(undone(known.names), HF, HF)
    if not known.experts:
        return made | Mapping(names)
    inner = "block_sparse_moe" if "block_sparse_moe.gate.weight" in known.names else "mlp"
    block = f"{HF}{inner}.experts." + ("routed_experts." if engine == "vllm" and routed_experts else "")
    names += renames({"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}, _BLOCK, block)
    return made | in_memory_to_disk(fill).inverse() | Mapping(names)


def _attention(model: Decoder) -> Rules:
    """Fuse queries, keys, and values: all queries, then all keys, then all values."""
    qkv = [f"{HF}self_attn.{x}_proj.{{kind}}" for x in "qkv"]
    return [Concat(qkv, f"{HF}self_attn.qkv_proj.{{kind}}", (model.heads, model.kv_heads, model.kv_heads))]


def _latent(model: Decoder, engine: str) -> Rules:
    """Fuse the first two projections of latent attention, unless queries have no latent vector."""
    if not model.latent_rows[0]:
        return []
    first = [f"{HF}self_attn.{x}.weight" for x in ("q_a_proj", "kv_a_proj_with_mqa")]
    return [Concat(first, f"{HF}self_attn.{ENGINES[engine]}.weight", model.latent_rows)]


def _gate_up(block: str) -> Rules:
    pair = [f"{HF}{block}.{x}_proj.{{kind}}" for x in ("gate", "up")]
    return [Concat(pair, f"{HF}{block}.gate_up_proj.{{kind}}", (1, 1))]


# Transformer Engine's `TransformerLayer`, which keeps norms in the projections that follow them.
#
#     self_attention.layernorm_qkv.{layer_norm_weight, query_weight, key_weight, value_weight}    self_attention.proj
#     layernorm_mlp.{layer_norm_weight, fc1_weight (gate, then up), fc2_weight}
#
# Names outside of layers are Hugging Face's. With `fuse_qkv_params`, queries, keys, and values are
# one `weight`, interleaved by query group or concatenated: see `qkv_weight_interleaved`. Such files
# can be read, but are written with three weights.


_QKV = f"{HF}self_attention.layernorm_qkv."


def to_transformer_engine() -> Rules:
    """Map the plain names on disk to TransformerEngine."""
    names = {
        "input_layernorm.weight": "self_attention.layernorm_qkv.layer_norm_weight",
        "post_attention_layernorm.weight": "layernorm_mlp.layer_norm_weight",
    }
    rules: Rules = []
    for kind in _KINDS:
        names |= {
            f"self_attn.q_proj.{kind}": f"self_attention.layernorm_qkv.query_{kind}",
            f"self_attn.k_proj.{kind}": f"self_attention.layernorm_qkv.key_{kind}",
            f"self_attn.v_proj.{kind}": f"self_attention.layernorm_qkv.value_{kind}",
            f"self_attn.o_proj.{kind}": f"self_attention.proj.{kind}",
            f"mlp.down_proj.{kind}": f"layernorm_mlp.fc2_{kind}",
        }
        pair = [f"{HF}mlp.gate_proj.{kind}", f"{HF}mlp.up_proj.{kind}"]
        rules.append(Concat(pair, f"{HF}layernorm_mlp.fc1_{kind}", (1, 1)))
    return [*rules, *renames(names, HF, HF)]


def as_not_fused(model: Decoder, interleaved: bool | None) -> Mapping:
    """Split fused projections into three, and drop the states of fp8 recipes, which are not parameters."""
    if interleaved is None and model.kv_heads == 1:
        interleaved = False  # with one query group, both orders are the same
    cut = _AmbiguousSplit if interleaved is None else Split
    parts, groups = (model.heads // model.kv_heads, 1, 1), model.kv_heads if interleaved else 1
    split: Rules = [
        cut(f"{_QKV}{kind}", [f"{_QKV}{x}_{kind}" for x in ("query", "key", "value")], parts, groups) for kind in _KINDS
    ]
    inner = (
        "self_attention.layernorm_qkv.",
        "self_attention.proj.",
        "self_attention.core_attention.",
        "layernorm_mlp.",
    )
    return Mapping([*split, *(Drop(f"{HF}{name}_extra_state") for name in inner)])


class _AmbiguousSplit(Split):
    """Splits a fused projection whose row order is unknown: both orders have the same name and shape."""

    def build(self, views: Sequence[View]) -> list[View]:
        raise NormalizationError(
            "no file says whether fused queries, keys, and values are interleaved by query group or "
            "concatenated: pass ready(..., qkv_interleaved=True) for layers with qkv_weight_interleaved=True, "
            "the default, or ready(..., qkv_interleaved=False). On the command line, pass --naming "
            "qkv_interleaved=true or =false"
        )


# Names of llama.cpp, as GGUF files have them, for dense models: `blk.0.attn_q.weight`.
#
# In llama.cpp, Llama and Mistral rotate adjacent pairs, so rows of queries and keys are permuted.
# Other models rotate halves of a head, as in Hugging Face files. `rope_freqs.weight` is computed
# from the config, and is not a parameter.


_LLAMA_CPP_BLOCK = "blk.{i}."


def to_llama_cpp(model: Decoder) -> Rules:
    """Map the plain names on disk to llama.cpp."""
    parts = {
        "self_attn.v_proj.{kind}": "attn_v.{kind}",
        "self_attn.o_proj.{kind}": "attn_output.{kind}",
        "self_attn.q_norm.weight": "attn_q_norm.weight",
        "self_attn.k_norm.weight": "attn_k_norm.weight",
        "input_layernorm.weight": "attn_norm.weight",
        "post_attention_layernorm.weight": "ffn_norm.weight",
        **{f"mlp.{part}_proj.{{kind}}": f"ffn_{part}.{{kind}}" for part in ("gate", "up", "down")},
    }
    outer = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    return [
        *renames(outer),
        *(rotary(model, f"{HF}self_attn.{x}_proj.{{kind}}", f"{_LLAMA_CPP_BLOCK}attn_{x}.{{kind}}") for x in "qk"),
        *renames(parts, HF, _LLAMA_CPP_BLOCK),
    ]


# All ready mappings: between any two naming schemes of a family, composed of the parts above.


NAMINGS = (
    "huggingface", "hf", "transformers", "plain", "torchtitan", "megatron", *ENGINES, "gguf", "transformer_engine"
)  # fmt: skip
FAMILIES = tuple(ARCHITECTURES)
_ON_HUB = ("huggingface", "hf", "transformers", "plain")
"""Naming schemes that every family supports."""


def ready(
    config: Any,
    source: str,
    target: str,
    *,
    titan: str = "0.3",
    transformer_engine: bool = False,
    padded_vocab: int | None = None,
    zero_centered: bool | None = None,
    exact: bool = True,
    mtp: str = "mtp_model_layer",
    routed_experts: bool = True,
    qkv_interleaved: bool | None = None,
    fill: float | None = None,
) -> Mapping:
    """Return the predefined mapping from one naming scheme to another.

    Args:
        config: the model's Hugging Face `config.json` (its path, its folder, or its content), or a `Decoder`.
        source, target: naming schemes: "huggingface" or "hf" (names on disk), "transformers" (names in memory, as in
            transformers 5), "plain" (separate matrices for gate, up, queries, keys, values, and each expert, as in
            Llama's and Qwen's files), "torchtitan", "megatron", "vllm" or "sglang" (unsharded, in memory), "gguf"
            (llama.cpp's names), or "transformer_engine" (Hugging Face names, with TransformerEngine's
            `TransformerLayer` for each layer). `Checkpoint.normalized` converts Hugging Face files to "transformers",
            unless its hint `stored_names` is True.
        titan: torchtitan's version: "0.3", or "0.2" for all older ones.
        transformer_engine: use Megatron's names for TransformerEngine layers.
        padded_vocab: rows of Megatron's padded vocabulary, if the padding is still there.
        zero_centered: whether Megatron's norms are zero-centered (`--apply-layernorm-1p`). Default: as in the family's
            own files.
        exact: refuse norms that would lose digits when 1 is added or subtracted: see `Offset`.
        mtp: Megatron's name for the layer inside a multi-token prediction layer. Before 0.16, "transformer_layer".
        routed_experts: whether vLLM keeps experts in a module named `routed_experts`, as it does since mid-2026.
        qkv_interleaved: the order of the rows in fused QKV tensors of "transformer_engine", which its
            `qkv_weight_interleaved` sets. By default, files with such tensors are refused when they are read.
        fill: the value of missing states of experts, if experts are stacked: see `Stack`.

    Raises OptionError for an unknown family or naming scheme, NormalizationError if there is no mapping for this
    combination.
    """
    model = _checked(config, source, target, titan)
    if qkv_interleaved not in (None, True, False):
        raise option_error(f"qkv_interleaved is True or False, not {qkv_interleaved!r}", NormalizationError)
    if source == target:
        return Mapping()
    plain = _plain(model, fill)
    moved: dict[str, Callable[[], Mapping]] = {
        **dict.fromkeys(("huggingface", "hf"), Mapping),
        "plain": lambda: plain,
        "transformers": lambda: _in_memory(model, plain, fill),
        "torchtitan": lambda: _titan(model, titan, plain, fill),
        "megatron": lambda: plain | _megatron(model, transformer_engine, padded_vocab, zero_centered, exact, mtp),
        "gguf": lambda: Mapping(to_llama_cpp(model)),
        "transformer_engine": lambda: Mapping(to_transformer_engine()),
        **{name: partial(_engine, model, name, plain, routed_experts, fill) for name in ENGINES},
    }
    mapping = between(moved[source](), moved[target]())
    if source == "transformer_engine":
        return as_not_fused(model, qkv_interleaved) | mapping
    return _FIRST[source](model) | mapping if source in _FIRST else mapping


def _checked(config: Any, source: str, target: str, titan: str) -> Decoder:
    """Return the model. Raises the errors of `ready`."""
    for naming in (source, target):
        if naming not in NAMINGS:
            meant = did_you_mean(naming, NAMINGS) or "."
            wrong = f"unknown naming scheme {naming!r}{meant} Known: {', '.join(NAMINGS)}"
            raise option_error(wrong, NormalizationError)
    model = Decoder.of(config)
    known = model.architecture.namings
    for naming in (source, target):
        if naming not in (*_ON_HUB, *known):
            raise NormalizationError(
                f"there is no ready mapping of {model.family!r} to {naming}, only to {', '.join((*_ON_HUB, *known))}"
            )
    is_renamed = {source, target} <= {*_ON_HUB} and model.architecture.experts != "transposed"
    if model.missing and not is_renamed:
        raise NormalizationError(
            f"the model's config lacks {', '.join(model.missing)}: its text_config omits what is at its "
            f"default, and the mapping from {source} to {target} needs it. Pass transformers' "
            "AutoConfig.from_pretrained(folder).to_dict() as config"
        )
    if titan not in ("0.2", "0.3"):
        raise option_error(f"torchtitan's names are known as of '0.2' and '0.3', not {titan!r}", NormalizationError)
    return model


def _plain(model: Decoder, fill: float | None) -> Mapping:
    """Map a family's names on disk to the plain ones."""
    if model.family == "gpt_oss":
        return gpt_oss_to_plain(model, fill)
    decoder = vision.to_decoder(model.family)
    if model.family == "qwen3_vl_moe":
        return vision.qwen3_experts(model.expert_size) | decoder | in_memory_to_disk(fill)
    if model.family in ("llama4", "llama4_text"):
        return decoder | llama4_to_plain(fill)
    return decoder | to_plain(model, fill)


def _in_memory(model: Decoder, plain: Mapping, fill: float | None) -> Mapping:
    if model.family == "qwen3_vl_moe":
        return vision.qwen3_experts(model.expert_size)
    known = model.architecture
    decoder, rules = vision.to_decoder(model.family), renames(known.memory, HF, HF)
    for block in known.joined:
        convs = [f"{HF}{block}.{x}conv1d.weight" for x in ("q_", "k_", "v_", "")]
        rules += _gate_up(block) if "mlp" in block else [Concat(convs[:3], convs[3], model.linear_rows)]
    made = decoder | Mapping(renames(known.outer))
    if known.experts == "apart":
        made = plain | in_memory_to_disk(fill, known.gated).inverse()
    size = model.vision_size // max(model.vision_heads, 1)
    return made | Mapping(rules) | decoder.inverse() | vision.in_memory(model.family, size)


def _engine(model: Decoder, engine: str, plain: Mapping, routed_experts: bool, fill: float | None) -> Mapping:
    return plain | to_engine(model, engine, routed_experts=routed_experts, fill=fill)


def _titan(model: Decoder, generation: str, plain: Mapping, fill: float | None) -> Mapping:
    if model.architecture.latent:
        attention = renames(_TITAN, f"{HF}self_attn.", f"{TITAN}attention.")
        attention += feed_forward_to_titan("mlp", "feed_forward")
    else:
        attention = attention_to_titan(model, generation)
    if model.family == "gpt_oss":  # experts stay as on disk
        return Mapping([*outer_to_titan(generation), *attention, *gpt_oss_to_titan(generation)])
    experts = experts_to_titan(generation, fill) if model.architecture.experts else []
    return plain | Mapping([*outer_to_titan(generation), *attention, *experts])


def _titan_as_plain(model: Decoder) -> Mapping:
    """Split fused projections, because torchtitan does so when it saves the model, but not when it
    saves the optimizer."""
    parts = [f"{TITAN}attention.qkv_linear.w{x}.{{kind}}" for x in "qkv"]
    fused = f"{TITAN}attention.qkv_linear.wqkv.{{kind}}"
    rules: Rules = [Split(fused, parts, (model.heads // model.kv_heads, 1, 1), groups=model.kv_heads)]
    if model.architecture.experts and not model.architecture.latent:
        # a load-balancing buffer, which the files of these families lack
        rules += [Drop(f"{TITAN}moe.expert_bias_E"), Drop(f"{TITAN}moe.expert_bias")]
    return Mapping(rules)


_FIRST: dict[str, Callable[[Decoder], Mapping]] = {
    "torchtitan": _titan_as_plain,
    "gguf": lambda model: Mapping([Drop("rope_freqs.weight")]),  # computed from the config
}
"""Rules for the files of a naming scheme that apply first. They have no inverse."""


def _megatron(
    model: Decoder,
    transformer_engine: bool,
    padded_vocab: int | None,
    zero_centered: bool | None,
    exact: bool,
    mtp: str,
) -> Mapping:
    known = model.architecture
    is_centered = known.zero_centered if zero_centered is None else zero_centered
    if known.latent:
        attention = latent_to_megatron(transformer_engine=transformer_engine)
        attention += feed_forward_to_megatron("mlp", "mlp")
    else:
        attention = attention_to_megatron(model)
    experts = experts_to_megatron(model, transformer_engine=transformer_engine) if known.experts else []
    outer = outer_to_megatron(model, transformer_engine=transformer_engine, padded_vocab=padded_vocab)
    rules = [*outer, *attention, *experts]
    rules = [*next_layers_to_megatron(model, rules, mtp), *rules]
    if is_centered != known.zero_centered:
        rules = centred_otherwise(rules, -1.0 if is_centered else 1.0, exact)
    if known.output_gates:
        rules += linear_to_megatron(model, is_centered, exact)
    made = gates_apart(model) | Mapping(rules)
    if model.family not in vision.FAMILIES:
        return made
    return made | vision.to_megatron(model.family, model.vision_heads, transformer_engine=transformer_engine)
