"""Which ready mappings there are: from every naming of every family to every other, put together of its parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from reshard.errors import NormalizationError
from reshard.mapping.families.config import Decoder
from reshard.mapping.families.dense import (
    TITAN,
    attention_to_megatron,
    attention_to_titan,
    centred_otherwise,
    feed_forward_to_megatron,
    feed_forward_to_titan,
    outer_to_megatron,
    outer_to_titan,
    phi3_to_plain,
)
from reshard.mapping.families.engines import ENGINES, to_engine
from reshard.mapping.families.experts import (
    experts_to_megatron,
    experts_to_titan,
    in_memory_to_disk,
    mixtral_to_plain,
)
from reshard.mapping.families.gpt_oss import gpt_oss_to_megatron, gpt_oss_to_plain, gpt_oss_to_titan
from reshard.mapping.families.latent import latent_to_megatron, latent_to_titan, next_layers_to_megatron
from reshard.mapping.families.llama_cpp import LLAMA_CPP, to_llama_cpp
from reshard.mapping.families.transformer_engine import TRANSFORMER_ENGINE, as_not_fused, to_transformer_engine
from reshard.mapping.mapping import Mapping, between
from reshard.mapping.rules import Drop, Rule, Split

__all__ = ["FAMILIES", "NAMINGS", "ready"]

NAMINGS = ("huggingface", "transformers", "plain", "torchtitan", "megatron", *ENGINES, "gguf", "transformer_engine")
_ONLY_IN = {"gguf": LLAMA_CPP, "transformer_engine": TRANSFORMER_ENGINE}
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text"),
    *("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss"),
)
_NOT_IN_TITAN = ("phi3", "gemma", "gemma2", "gemma3_text", "qwen2_moe")
_NOT_IN_ENGINES = ("phi3", "gemma", "gemma2", "gemma3_text", "gpt_oss")


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
    """The mapping from one naming to another.

    Args:
        config: the model's Hugging Face `config.json`: path, folder or content; or a `Decoder`.
        source, target: "huggingface" (as on disk), "transformers" (as a model of transformers 5 has it in memory),
            "plain" (one matrix for each of gate, up, queries, keys, values and expert, as Llama and Qwen have them on
            disk), "torchtitan", "megatron", "vllm" or "sglang" (as these have it in memory, whole), or "gguf"
            (llama.cpp's names), or "transformer_engine" (Hugging Face's outside, its `TransformerLayer` inside).
            `normalized` brings Hugging Face's files to the names in memory, unless its hint `stored_names` is True.
        titan: whose names: "0.3", or "0.2" for all older ones.
        transformer_engine: Megatron's names where its layers are those of TransformerEngine.
        padded_vocab: rows of Megatron's padded vocabulary, where it is not cut off.
        zero_centered: whether Megatron's norms are (`--apply-layernorm-1p`); by default as the family's own are.
        exact: refuse norms that would lose digits when 1 is added or subtracted; see `Offset`.
        mtp: what Megatron calls the layer within one of multi-token prediction; before 0.16 "transformer_layer".
        routed_experts: whether vLLM has its experts in a module of that name, as since the middle of 2026.
        qkv_interleaved: how queries, keys and values that are one tensor lie in layers of "transformer_engine", which
            was their `qkv_weight_interleaved`. By default a file that has such tensors is refused when it is read.
        fill: stands for states of experts that have none, where experts are stacked; see `Stack`.

    Raises NormalizationError for a family or naming that is not known, or a family that torchtitan does not have, or
    that there is no mapping of to an engine.
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
    """Raises NormalizationError for a family or naming that is not known, or that does not have the other."""
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
    """From a family's names on disk to those that most have."""
    if model.family == "gpt_oss":
        return gpt_oss_to_plain(model, fill)
    if model.family == "phi3":
        return phi3_to_plain(model)
    return mixtral_to_plain() if model.family == "mixtral" else Mapping()


def _in_memory(model: Decoder, plain: Mapping, fill: float | None) -> Mapping:
    is_stacked = model.has_experts and model.family != "gpt_oss"
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
    """A table that follows from the settings is no parameter."""
    return Mapping([Drop("rope_freqs.weight")])


_FIRST: dict[str, Callable[[Decoder], Mapping]] = {
    "torchtitan": _titan_as_plain,
    "gguf": _gguf_as_plain,
}
"""What is done first with the files of a naming, and cannot be undone."""


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
    return Mapping(rules)
