"""Predefined mappings between Hugging Face, torchtitan, Megatron, vLLM, and SGLang, for Llama, Mistral, Qwen, Phi-3,
Gemma, mixture-of-experts models (Qwen, Mixtral, DeepSeek-V2 and V3, gpt-oss, Llama 4), and vision-language models
(see `vision`).

    mapping = ready("config.json", "torchtitan", "huggingface")
    reshard.convert(checkpoint, "out", format="safetensors", model_only=True, mapping=mapping)

They apply to canonical names and full tensors, as `Checkpoint.normalized` returns them, and to optimizer states.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping as Dict, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from planners.geometry.views import View
from reshard.errors import NormalizationError
from reshard.mapping import vision
from reshard.mapping.mapping import Mapping, between
from reshard.mapping.rules import Concat, Drop, Offset, Rename, Resize, Rope, Rule, Split, Stack, Transpose, Unstack

__all__ = ["FAMILIES", "NAMINGS", "Decoder", "in_memory_to_disk", "ready"]


@dataclass(frozen=True)
class Decoder:
    """The architecture of a decoder-only transformer."""

    family: str
    """The `model_type`, such as "llama"."""
    heads: int
    kv_heads: int
    head_size: int
    vocab_size: int
    layers: int = 0
    """Number of layers, without multi-token prediction layers. 0 if unknown."""
    next_layers: int = 0
    """Number of multi-token prediction layers, which come after the others."""
    dense_layers: tuple[int, ...] = ()
    """Numbers of the layers of a mixture-of-experts model that have no experts."""
    expert_size: int = 0
    """Number of rows of an expert's gate."""
    latent_rows: tuple[int, int] = (0, 0)
    """Rows of the first projections of latent attention: for queries (0 if they have none), and for keys and values."""
    vision_heads: int = 0
    """Attention heads of the vision tower, in vision-language models."""

    def __post_init__(self) -> None:
        """Raises NormalizationError for impossible numbers."""
        if min(self.heads, self.kv_heads, self.head_size, self.vocab_size) < 1 or self.heads % self.kv_heads:
            raise NormalizationError(f"{self.kv_heads} key/value heads do not divide {self.heads} query heads: {self}")

    @property
    def has_experts(self) -> bool:
        """True if feed-forward layers are mixtures of experts."""
        return self.family in _MIXTURES

    @property
    def is_latent(self) -> bool:
        """True if the model uses multi-head latent attention."""
        return self.family in ("deepseek_v2", "deepseek_v3")

    @property
    def is_sandwiched(self) -> bool:
        """True if norms also follow attention and feed-forward."""
        return self.family in ("gemma2", "gemma3_text", "gemma3")

    @property
    def is_zero_centered(self) -> bool:
        """True if norm weights are stored as differences from 1."""
        return self.family in ("gemma", "gemma2", "gemma3_text", "gemma3")

    @classmethod
    def of(cls, config: Decoder | Dict[str, Any] | str | os.PathLike[str]) -> Decoder:
        """Read a `config.json`: its path, its folder, or its content.

        Raises NormalizationError if an entry is missing.
        """
        if isinstance(config, Decoder):
            return config
        if not isinstance(config, Dict):
            path = Path(config)
            path = path / "config.json" if path.is_dir() else path
            try:
                config = json.loads(path.read_text())
            except (OSError, ValueError) as error:
                raise NormalizationError(f"{path} is not a config.json of a model: {error}") from None
            assert isinstance(config, Dict)
        seen = config.get("vision_config") or {}
        # models that also see keep the decoder's settings apart, but names are those of the full model
        config = {**config, **config.get("text_config", {}), "model_type": config.get("model_type")}
        missing = [k for k in ("model_type", "num_attention_heads", "vocab_size") if config.get(k) is None]
        if missing:
            raise NormalizationError(f"the model's config lacks {', '.join(missing)}")
        heads = int(config["num_attention_heads"])
        size = config.get("head_dim") or int(config.get("hidden_size", heads)) // heads
        kv_heads = int(config.get("num_key_value_heads") or heads)
        layers = int(config.get("num_hidden_layers") or 0)
        return cls(
            str(config["model_type"]),
            heads,
            kv_heads,
            int(size),
            int(config["vocab_size"]),
            layers,
            int(config.get("num_nextn_predict_layers") or 0),
            tuple(layer for layer in range(layers) if not _has_experts(config, layer)),
            int(config.get("moe_intermediate_size") or config.get("intermediate_size") or 0),
            (
                int(config.get("q_lora_rank") or 0),
                int(config.get("kv_lora_rank") or 0) + int(config.get("qk_rope_head_dim") or 0),
            ),
            int(seen.get("num_heads") or seen.get("num_attention_heads") or 0),
        )


def _has_experts(config: Dict[str, Any], layer: int) -> bool:
    """Return True if a layer has experts. DeepSeek counts from 0 after the dense layers, others from 1."""
    if config.get("moe_layers") is not None:
        return layer in config["moe_layers"]
    if layer < int(config.get("first_k_dense_replace") or 0) or layer in (config.get("mlp_only_layers") or ()):
        return False
    step = int(config.get("decoder_sparse_step") or config.get("interleave_moe_layer_step") or 1)
    return layer % int(config.get("moe_layer_freq") or 1) == 0 and (layer + 1) % step == 0


# Attention and feed-forward layers that Llama, Mistral, Qwen2, Qwen3 and their kin have in common.


HF = "model.layers.{i}."
TITAN = "layers.{i}."
MEGATRON = "decoder.layers.{i}."


def outer_to_titan(generation: str) -> list[Rule]:
    """Map everything outside the layers. `lm_head` was called `output` up to torchtitan 0.2."""
    return [
        Rename("model.embed_tokens.weight", "tok_embeddings.weight"),
        Rename("model.norm.weight", "norm.weight"),
        Rename("lm_head.weight", "lm_head.weight" if generation == "0.3" else "output.weight"),
        Rename(f"{HF}input_layernorm.weight", f"{TITAN}attention_norm.weight"),
        Rename(f"{HF}post_attention_layernorm.weight", f"{TITAN}ffn_norm.weight"),
    ]


def attention_to_titan(model: Decoder, generation: str, *, rotate_pairs: bool) -> list[Rule]:
    """Map attention and the dense feed-forward layer. `rotate_pairs`: the model rotates adjacent pairs, as
    torchtitan's Llama does, and not halves of a head, so the rows of queries and keys are reordered."""
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
    """Map gate, down, and up to w1, w2, and w3."""
    parts = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    return [Rename(f"{HF}{source}.{a}.{{kind}}", f"{TITAN}{target}.{b}.{{kind}}") for a, b in parts.items()]


def outer_to_megatron(model: Decoder, *, transformer_engine: bool, padded_vocab: int | None) -> list[Rule]:
    """Map everything outside attention and feed-forward. `padded_vocab`: rows of the vocabulary with padding.

    TransformerEngine keeps a norm inside the projection that follows it, unless that is a router or latent attention.
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
    """Fuse queries, keys, and values by query group, and fuse gate and up."""
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
    """Map gate and up to fc1, and down to fc2."""
    pair = [f"{HF}{source}.gate_proj.{{kind}}", f"{HF}{source}.up_proj.{{kind}}"]
    return [
        Concat(pair, f"{MEGATRON}{target}.linear_fc1.{{kind}}", parts=(1, 1)),
        Rename(f"{HF}{source}.down_proj.{{kind}}", f"{MEGATRON}{target}.linear_fc2.{{kind}}"),
    ]


def phi3_to_plain(model: Decoder) -> Mapping:
    """Map Phi-3's fused projections (queries, keys, values) to the separate ones of other families."""
    qkv = [f"{HF}self_attn.{x}_proj.{{kind}}" for x in "qkv"]
    pair = [f"{HF}mlp.{x}_proj.{{kind}}" for x in ("gate", "up")]
    return Mapping(
        [
            Split(f"{HF}self_attn.qkv_proj.{{kind}}", qkv, (model.heads, model.kv_heads, model.kv_heads)),
            Split(f"{HF}mlp.gate_up_proj.{{kind}}", pair, (1, 1)),
        ]
    )


def centred_otherwise(rules: Iterable[Rule], by: float, exact: bool) -> list[Rule]:
    """Return the same rules, with `by` added to the weight of every norm."""
    return [
        Offset(rule.sources[0].text, rule.targets[0].text, by, exact)
        if isinstance(rule, Rename) and rule.sources[0].text.endswith("norm.weight")
        else rule
        for rule in rules
    ]


# Mixtures of experts: one matrix an expert on Hugging Face's disks, stacks in torchtitan, pairs in
# Megatron.


_PARTS = {"gate_proj": "w1_EFD", "down_proj": "w2_EDF", "up_proj": "w3_EFD"}


def experts_to_titan(generation: str, fill: float | None = None) -> list[Rule]:
    """Stack the experts. Map the router, its bias, and the shared experts."""
    block = titan_block(generation)
    stacks: list[Rule] = [
        Stack(f"{HF}mlp.experts.{{e}}.{a}.weight", block + titan_name(b, generation), over="e", fill=fill)
        for a, b in _PARTS.items()
    ]
    return [
        *stacks,
        Rename(f"{HF}mlp.gate.weight", f"{TITAN}moe.router.gate.weight"),
        Rename(f"{HF}mlp.gate.e_score_correction_bias", f"{TITAN}moe.{titan_name('expert_bias_E', generation)}"),
        *feed_forward_to_titan("mlp.shared_experts", "moe.shared_experts"),
    ]


def titan_block(generation: str) -> str:
    """Return the name of the block in which torchtitan keeps its experts."""
    return f"{TITAN}moe.routed_experts.inner_experts." if generation == "0.3" else f"{TITAN}moe.experts."


def titan_name(name: str, generation: str) -> str:
    """Return a torchtitan name. torchtitan 0.3 appends letters for the dims."""
    return name if generation == "0.3" else name.rpartition("_")[0]


def experts_to_megatron(model: Decoder, *, transformer_engine: bool) -> list[Rule]:
    """Fuse gate and up of each expert. In TransformerEngine's grouped experts, the expert number ends the name."""
    rules: list[Rule] = []
    for kind in ("weight", "bias") if model.family == "gpt_oss" else ("weight",):
        block = f"{MEGATRON}mlp.experts."
        names = [f"{block}local_experts.{{e}}.linear_fc{n}.{kind}" for n in (1, 2)]
        if transformer_engine:
            names = [f"{block}linear_fc{n}.{kind}{{e}}" for n in (1, 2)]
        pair = [f"{HF}mlp.experts.{{e}}.{part}_proj.{kind}" for part in ("gate", "up")]
        rules += [Concat(pair, names[0], parts=(1, 1)), Rename(f"{HF}mlp.experts.{{e}}.down_proj.{kind}", names[1])]
    shared = "mlp.shared_expert" if model.family == "qwen2_moe" else "mlp.shared_experts"
    return [
        *rules,
        Rename(f"{HF}mlp.gate.weight", f"{MEGATRON}mlp.router.weight"),
        Rename(f"{HF}mlp.gate.bias", f"{MEGATRON}mlp.router.bias"),
        Rename(f"{HF}mlp.gate.e_score_correction_bias", f"{MEGATRON}mlp.router.expert_bias"),
        *feed_forward_to_megatron(shared, "mlp.shared_experts"),
        Rename(f"{HF}{shared}_gate.weight", f"{MEGATRON}mlp.shared_experts.gate_weight"),
    ]


def in_memory_to_disk(fill: float | None = None) -> Mapping:
    """Map the stacked experts that transformers 5 has in memory to the names in its files."""
    block = f"{HF}mlp.experts."
    pair = [f"{block}{{e}}.gate_proj.weight", f"{block}{{e}}.up_proj.weight"]
    return Mapping(
        [
            Unstack(f"{block}gate_up_proj", f"{block}{{e}}.gate_up_proj.weight", over="e", fill=fill),
            Unstack(f"{block}down_proj", f"{block}{{e}}.down_proj.weight", over="e", fill=fill),
        ]
    ) | Mapping([Split(f"{block}{{e}}.gate_up_proj.weight", pair, parts=(1, 1))])


def mixtral_to_plain() -> Mapping:
    """Map Mixtral's own names on disk to the ones that later families use."""
    block = f"{HF}block_sparse_moe."
    parts = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    experts = [
        Rename(f"{block}experts.{{e}}.{a}.weight", f"{HF}mlp.experts.{{e}}.{b}.weight") for a, b in parts.items()
    ]
    return Mapping([*experts, Rename(f"{block}gate.weight", f"{HF}mlp.gate.weight")])


# DeepSeek-V2 and V3: multi-head latent attention, names only; and the layers that predict further
# tokens.


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
    """Map DeepSeek's attention to torchtitan."""
    return [Rename(f"{HF}self_attn.{a}.weight", f"{TITAN}attention.{b}.weight") for a, b in _TITAN.items()]


def latent_to_megatron(*, transformer_engine: bool) -> list[Rule]:
    """Map DeepSeek's attention to Megatron. TransformerEngine keeps norms inside the projections after them."""
    norms = {"kv_a_layernorm": "kv_layernorm.weight", "q_a_layernorm": "q_layernorm.weight"}
    if transformer_engine:
        norms = {
            "kv_a_layernorm": "linear_kv_up_proj.layer_norm_weight",
            "q_a_layernorm": "linear_q_up_proj.layer_norm_weight",
        }
    names = {**_MEGATRON, **norms}
    return [Rename(f"{HF}self_attn.{a}.weight", f"{MEGATRON}self_attention.{b}") for a, b in names.items()]


def next_layers_to_megatron(model: Decoder, rules: Sequence[Rule], inner: str) -> list[Rule]:
    """Map multi-token prediction layers. On disk, their numbers continue; Megatron keeps them apart.

    `rules` are those of the other layers, and `inner` is Megatron's name for the transformer layer inside. The copies
    of the embedding and the output layer on disk keep their names, because Megatron has none for them.
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


# gpt-oss: experts stacked on disk, with biases; gate and up alternate, and matrices stand the other
# way round.
#
# Hugging Face    gate_up_proj [E, hidden, 2 * size]: columns gate, up, gate, up ... torchtitan
# mlp1_weight [E, 2 * size, hidden]: the same, transposed Megatron        linear_fc1 of each expert
# [2 * size, hidden]: all of the gate, then all of the up half


_BLOCK = f"{HF}mlp.experts."


def gpt_oss_to_plain(model: Decoder, fill: float | None = None) -> Mapping:
    """Map gpt-oss's own names to those of other mixture-of-experts models: one matrix per expert.

    Raises NormalizationError if the number of rows of an expert is unknown.
    """
    if model.expert_size < 1:
        raise NormalizationError(f"gate and up of gpt-oss alternate: expert_size is needed to separate them: {model}")
    router = Rename(f"{HF}mlp.router.{{kind}}", f"{HF}mlp.gate.{{kind}}")
    return turned_to_plain(_BLOCK, [router], fill, {"weight": "", "bias": "_bias"}, model.expert_size)


def turned_to_plain(
    block: str, beside: Sequence[Rule], fill: float | None, kinds: Dict[str, str] = {"weight": ""}, groups: int = 1
) -> Mapping:
    """Map stacks of transposed expert matrices to the plain names. `beside` are rules for other tensors, and `kinds`
    are the endings of names. Gate and up are interleaved in this number of `groups`."""
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


def gpt_oss_to_titan(generation: str) -> list[Rule]:
    """Map the gpt-oss tensors other than attention."""
    block = titan_block(generation)
    names = {"gate_up_proj": ("mlp1", "EGD", "EG"), "down_proj": ("mlp2", "EDF", "ED")}
    rules: list[Rule] = [
        Rename(f"{HF}self_attn.sinks", f"{TITAN}attention.sinks"),
        Rename(f"{HF}mlp.router.{{kind}}", f"{TITAN}moe.router.gate.{{kind}}"),
    ]
    for name, (target, weight, bias) in names.items():
        rules.append(Transpose(f"{_BLOCK}{name}", block + titan_name(f"{target}_weight_{weight}", generation)))
        rules.append(Rename(f"{_BLOCK}{name}_bias", block + titan_name(f"{target}_bias_{bias}", generation)))
    return rules


def gpt_oss_to_megatron() -> list[Rule]:
    """Map the gpt-oss tensors that other mixture-of-experts models do not have."""
    return [Rename(f"{HF}self_attn.sinks", f"{MEGATRON}self_attention.core_attention.softmax_offset")]


# Llama 4: experts stacked on disk, as those of gpt-oss, but all of the gate comes before all of the up half.


def llama4_to_plain(fill: float | None) -> Mapping:
    """Map Llama 4's own names to those of other mixture-of-experts models."""
    parts = [f"{part}_proj.weight" for part in ("gate", "up", "down")]
    names = {f"shared_expert.{part}": f"shared_experts.{part}" for part in parts} | {part: part for part in parts}
    names["router.weight"] = "gate.weight"
    beside = [Rename(f"{HF}feed_forward.{a}", f"{HF}mlp.{b}") for a, b in names.items()]
    return turned_to_plain(f"{HF}feed_forward.experts.", beside, fill)


# vLLM and SGLang: queries, keys and values as one, gate and up as one, experts side by side.
#
# vLLM        self_attn.qkv_proj, mlp.gate_up_proj, mlp.experts.routed_experts.w13_weight [E, 2 *
# size, hidden], w2_weight SGLang      the same, but mlp.experts.w13_weight, as in vLLM up to the
# middle of 2026
#
# These are the tensors that an engine has loaded into, of the whole model, before it repacks any
# for a kernel. What an engine is given to load has Hugging Face's names.


ENGINES = {"vllm": "fused_qkv_a_proj", "sglang": "fused_qkv_a_proj_with_mqa"}
"""The name that each engine gives to the fused first projections of latent attention."""


def to_engine(model: Decoder, engine: str, *, routed_experts: bool, fill: float | None) -> Mapping:
    """Map the plain names on disk to an engine. `routed_experts`: vLLM keeps its experts in a module of that name."""
    fused = _latent(model, engine) if model.is_latent else _attention(model)
    shared = "mlp.shared_expert" if model.family == "qwen2_moe" else "mlp.shared_experts"
    made = Mapping([*fused, *_gate_up("mlp"), *_gate_up(shared)])
    if not model.has_experts:
        return made
    inner = "mlp" if model.family != "mixtral" else "block_sparse_moe"
    block = f"{HF}{inner}.experts." + ("routed_experts." if engine == "vllm" and routed_experts else "")
    names = [
        Rename(f"{HF}mlp.experts.gate_up_proj", f"{block}w13_weight"),
        Rename(f"{HF}mlp.experts.down_proj", f"{block}w2_weight"),
    ]
    if model.family == "mixtral":
        names.append(Rename(f"{HF}mlp.gate.weight", f"{HF}{inner}.gate.weight"))
    return made | in_memory_to_disk(fill).inverse() | Mapping(names)


def _attention(model: Decoder) -> list[Rule]:
    """Fuse attention: all queries, then all keys, then all values, head by head."""
    qkv = [f"{HF}self_attn.{x}_proj.{{kind}}" for x in "qkv"]
    return [Concat(qkv, f"{HF}self_attn.qkv_proj.{{kind}}", (model.heads, model.kv_heads, model.kv_heads))]


def _latent(model: Decoder, engine: str) -> list[Rule]:
    """Fuse the first two projections, unless queries have no latent vector."""
    if not model.latent_rows[0]:
        return []
    first = [f"{HF}self_attn.{x}.weight" for x in ("q_a_proj", "kv_a_proj_with_mqa")]
    return [Concat(first, f"{HF}self_attn.{ENGINES[engine]}.weight", model.latent_rows)]


def _gate_up(block: str) -> list[Rule]:
    pair = [f"{HF}{block}.{x}_proj.{{kind}}" for x in ("gate", "up")]
    return [Concat(pair, f"{HF}{block}.gate_up_proj.{{kind}}", (1, 1))]


# Transformer Engine's `TransformerLayer`, with norms inside the projections that follow them, in
# place of Llama's own.
#
#     self_attention.layernorm_qkv.{layer_norm_weight, query_weight, key_weight, value_weight}    self_attention.proj
#     layernorm_mlp.{layer_norm_weight, fc1_weight (gate, then up), fc2_weight}
#
# What is outside the layers keeps Hugging Face's names. With `fuse_qkv_params` queries, keys and
# values are one `weight`, by query groups or one after another, as `qkv_weight_interleaved` says:
# such a file is read, and written with three.


TRANSFORMER_ENGINE = ("llama", "mistral", "qwen2")
"""The families that TransformerEngine has layers for."""
_QKV = f"{HF}self_attention.layernorm_qkv."
_MLP = f"{HF}layernorm_mlp."
_KINDS = ("weight", "bias")


def to_transformer_engine() -> list[Rule]:
    """Map the plain names on disk to TransformerEngine."""
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
    """Split fused projections in three, and drop the states of fp8 recipes, which are not parameters."""
    if interleaved is None and model.kv_heads == 1:
        interleaved = False  # one query group is the same in both
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
    """A fused projection with an unknown order of rows. Both orders have the same name and shape."""

    def build(self, views: Sequence[View]) -> list[View]:
        raise NormalizationError(
            "no file says whether fused queries, keys, and values are interleaved by query group or "
            "concatenated: pass ready(..., qkv_interleaved=True) for layers with qkv_weight_interleaved=True, "
            "the default, or ready(..., qkv_interleaved=False). On the command line, pass --naming "
            "qkv_interleaved=true or =false"
        )


# Names of llama.cpp, as GGUF files have them, for dense models: `blk.0.attn_q.weight`.
#
# Llama's and Mistral's rotate neighbors there, so rows of their queries and keys change places;
# others rotate halves of a head as Hugging Face's do. `rope_freqs.weight` is computed from the
# settings, and no parameter of the model.


LLAMA_CPP = ("llama", "mistral", "qwen2", "qwen3")
"""The families that llama.cpp names are known for."""
_LLAMA_CPP_BLOCK = "blk.{i}."


def to_llama_cpp(model: Decoder) -> list[Rule]:
    """Map the plain names on disk to llama.cpp."""

    def rotary(source: str, target: str) -> Rule:
        pairs = model.family in ("llama", "mistral")
        return Rope(source, target, model.head_size, "pairs") if pairs else Rename(source, target)

    parts = {
        "self_attn.v_proj.{kind}": "attn_v.{kind}",
        "self_attn.o_proj.{kind}": "attn_output.{kind}",
        "self_attn.q_norm.weight": "attn_q_norm.weight",
        "self_attn.k_norm.weight": "attn_k_norm.weight",
        "input_layernorm.weight": "attn_norm.weight",
        "post_attention_layernorm.weight": "ffn_norm.weight",
        **{f"mlp.{part}_proj.{{kind}}": f"ffn_{part}.{{kind}}" for part in ("gate", "up", "down")},
    }
    return [
        Rename("model.embed_tokens.weight", "token_embd.weight"),
        Rename("model.norm.weight", "output_norm.weight"),
        Rename("lm_head.weight", "output.weight"),
        rotary(f"{HF}self_attn.q_proj.{{kind}}", f"{_LLAMA_CPP_BLOCK}attn_q.{{kind}}"),
        rotary(f"{HF}self_attn.k_proj.{{kind}}", f"{_LLAMA_CPP_BLOCK}attn_k.{{kind}}"),
        *(Rename(HF + source, _LLAMA_CPP_BLOCK + target) for source, target in parts.items()),
    ]


# Which ready mappings there are: from every naming of every family to every other, put together of
# its parts.


NAMINGS = ("huggingface", "transformers", "plain", "torchtitan", "megatron", *ENGINES, "gguf", "transformer_engine")
_ONLY_IN = {"gguf": LLAMA_CPP, "transformer_engine": TRANSFORMER_ENGINE}
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text"),
    *("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss", "llama4_text"),
    *vision.FAMILIES,
)
_MIXTURES = (
    *("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss"),
    *("llama4_text", "llama4", "qwen3_vl_moe"),
)
_NOT_IN_TITAN = ("phi3", "gemma", "gemma2", "gemma3_text", "qwen2_moe", "llama4_text", *vision.FAMILIES)
_NOT_IN_ENGINES = ("phi3", "gemma", "gemma2", "gemma3_text", "gpt_oss", "llama4_text", *vision.FAMILIES)


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
        config: the model's Hugging Face `config.json`, as path, folder, or content; or a `Decoder`.
        source, target: "huggingface" (names on disk), "transformers" (names in memory, as transformers 5 has them),
            "plain" (separate matrices for gate, up, queries, keys, values, and each expert, as Llama and Qwen have
            them on disk), "torchtitan", "megatron", "vllm" or "sglang" (unsharded, in memory), "gguf" (llama.cpp's
            names), or "transformer_engine" (Hugging Face names, with TransformerEngine's `TransformerLayer` for each
            layer). `normalized` converts Hugging Face files to the names in memory, unless its hint `stored_names` is
            True.
        titan: torchtitan's version: "0.3", or "0.2" for all older ones.
        transformer_engine: use Megatron's names for TransformerEngine layers.
        padded_vocab: rows of Megatron's padded vocabulary, if padding was not removed.
        zero_centered: whether Megatron's norms are zero-centered (`--apply-layernorm-1p`). Default: as in the
            family's own files.
        exact: refuse norms that would lose digits when 1 is added or subtracted; see `Offset`.
        mtp: Megatron's name for the layer inside a multi-token prediction layer. Before 0.16, "transformer_layer".
        routed_experts: vLLM keeps its experts in a module of that name, as it does since mid-2026.
        qkv_interleaved: the order of the rows in fused QKV tensors of "transformer_engine", which its
            `qkv_weight_interleaved` sets. By default, files with such tensors are refused when they are read.
        fill: stands in for missing states of experts, where experts are stacked; see `Stack`.

    Raises NormalizationError for an unknown family or naming scheme, and if there is no mapping for this combination.
    """
    model = Decoder.of(config)
    _check(model, source, target, titan)
    if qkv_interleaved not in (None, True, False):
        raise NormalizationError(f"qkv_interleaved is True or False, not {qkv_interleaved!r}")
    if source == target:
        return Mapping()
    plain = _plain(model, fill)
    moved: dict[str, Callable[[], Mapping]] = {
        "huggingface": lambda: Mapping(),
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


def _check(model: Decoder, source: str, target: str, titan: str) -> None:
    """Raise NormalizationError for an unknown family or naming scheme, and for a combination that has no mapping."""
    if model.family not in FAMILIES:
        raise NormalizationError(f"there is no ready mapping for {model.family!r}: known are {', '.join(FAMILIES)}")
    for naming in (source, target):
        if naming not in NAMINGS:
            raise NormalizationError(f"unknown naming {naming!r}: known are {', '.join(NAMINGS)}")
        if naming == "torchtitan" and model.family in _NOT_IN_TITAN:
            raise NormalizationError(f"torchtitan has no model of the family {model.family!r}")
        if naming in ENGINES and model.family in _NOT_IN_ENGINES:
            raise NormalizationError(f"there is no ready mapping of {model.family!r} to {naming}")
        if model.family not in _ONLY_IN.get(naming, FAMILIES):
            raise NormalizationError(f"there is no ready mapping of {model.family!r} to {naming}")
    if titan not in ("0.2", "0.3"):
        raise NormalizationError(f"torchtitan's names are known as of '0.2' and '0.3', not {titan!r}")


def _plain(model: Decoder, fill: float | None) -> Mapping:
    """Map a family's names on disk to the plain ones."""
    decoder = vision.to_decoder(model.family) if model.family in vision.FAMILIES else Mapping()
    if model.family == "gpt_oss":
        return gpt_oss_to_plain(model, fill)
    if model.family == "phi3":
        return phi3_to_plain(model)
    if model.family == "qwen3_vl_moe":
        return vision.qwen3_experts(model.expert_size) | decoder | in_memory_to_disk(fill)
    if model.family in ("llama4", "llama4_text"):
        return decoder | llama4_to_plain(fill)
    return mixtral_to_plain() if model.family == "mixtral" else decoder


def _in_memory(model: Decoder, plain: Mapping, fill: float | None) -> Mapping:
    if model.family == "qwen3_vl_moe":
        return vision.qwen3_experts(model.expert_size)
    if model.family in vision.FAMILIES:
        return vision.in_memory(model.family)
    is_stacked = model.has_experts and model.family not in ("gpt_oss", "llama4_text")
    return plain | in_memory_to_disk(fill).inverse() if is_stacked else Mapping()


def _engine(model: Decoder, engine: str, plain: Mapping, routed_experts: bool, fill: float | None) -> Mapping:
    return plain | to_engine(model, engine, routed_experts=routed_experts, fill=fill)


def _titan(model: Decoder, generation: str, plain: Mapping, fill: float | None) -> Mapping:
    if model.is_latent:
        attention = [*latent_to_titan(), *feed_forward_to_titan("mlp", "feed_forward")]
    else:
        pairs = model.family in ("llama", "mistral", "mixtral")
        attention = attention_to_titan(model, generation, rotate_pairs=pairs)
    if model.family == "gpt_oss":  # as it is on disk
        return Mapping([*outer_to_titan(generation), *attention, *gpt_oss_to_titan(generation)])
    experts = experts_to_titan(generation, fill) if model.has_experts else []
    return plain | Mapping([*outer_to_titan(generation), *attention, *experts])


def _titan_as_plain(model: Decoder) -> Mapping:
    """torchtitan splits a fused projection when it saves the model, but not when it saves the optimizer."""
    parts = [f"{TITAN}attention.qkv_linear.w{x}.{{kind}}" for x in "qkv"]
    fused = f"{TITAN}attention.qkv_linear.wqkv.{{kind}}"
    rules: list[Rule] = [Split(fused, parts, (model.heads // model.kv_heads, 1, 1), groups=model.kv_heads)]
    if model.has_experts and not model.is_latent:
        # a buffer for balancing that these families' files do not have
        rules += [Drop(f"{TITAN}moe.expert_bias_E"), Drop(f"{TITAN}moe.expert_bias")]
    return Mapping(rules)


def _gguf_as_plain(model: Decoder) -> Mapping:
    """Drop tables that are computed from the settings and are not parameters."""
    return Mapping([Drop("rope_freqs.weight")])


_FIRST: dict[str, Callable[[Decoder], Mapping]] = {
    "torchtitan": _titan_as_plain,
    "gguf": _gguf_as_plain,
}
"""Applied first to the files of a naming scheme. These rules cannot be inverted."""


def _megatron(
    model: Decoder,
    transformer_engine: bool,
    padded_vocab: int | None,
    zero_centered: bool | None,
    exact: bool,
    mtp: str,
) -> Mapping:
    if model.is_latent:
        attention = latent_to_megatron(transformer_engine=transformer_engine)
        attention += feed_forward_to_megatron("mlp", "mlp")
    else:
        attention = attention_to_megatron(model)
    experts = experts_to_megatron(model, transformer_engine=transformer_engine) if model.has_experts else []
    if model.family == "gpt_oss":
        experts += gpt_oss_to_megatron()
    outer = outer_to_megatron(model, transformer_engine=transformer_engine, padded_vocab=padded_vocab)
    rules = [*outer, *attention, *experts]
    rules = [*next_layers_to_megatron(model, rules, mtp), *rules]
    if zero_centered is not None and zero_centered != model.is_zero_centered:
        rules = centred_otherwise(rules, -1.0 if zero_centered else 1.0, exact)
    made = Mapping(rules)
    if model.family not in vision.FAMILIES:
        return made
    return made | vision.to_megatron(model.family, model.vision_heads, transformer_engine=transformer_engine)
