"""Ready mappings between Hugging Face, torchtitan and Megatron, for Llama, Mistral, Qwen, Mixtral and DeepSeek-V3.

    mapping = ready("config.json", "torchtitan", "huggingface")
    reshard.convert(checkpoint, "out", format="safetensors", model_only=True, mapping=mapping)

They are for canonical names and whole tensors, as `Checkpoint.normalized` and `convert(..., normalized=True)` have
them: of Megatron's files, layers are unstacked and padding is cut off before. Optimizer states go along.
"""

from __future__ import annotations

from typing import Any

from reshard.errors import NormalizationError
from reshard.mapping.families.config import Decoder
from reshard.mapping.families.dense import (
    TITAN,
    attention_to_megatron,
    attention_to_titan,
    feed_forward_to_megatron,
    feed_forward_to_titan,
    outer_to_megatron,
    outer_to_titan,
)
from reshard.mapping.families.experts import (
    experts_to_megatron,
    experts_to_titan,
    in_memory_to_disk,
    mixtral_to_plain,
)
from reshard.mapping.families.latent import latent_to_megatron, latent_to_titan
from reshard.mapping.mapping import Mapping
from reshard.mapping.rules import Drop, Rule, Split

__all__ = ["FAMILIES", "NAMINGS", "Decoder", "in_memory_to_disk", "ready"]

NAMINGS = ("huggingface", "torchtitan", "megatron")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3")
_MOE = ("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3")


def ready(
    config: Any,
    source: str,
    target: str,
    *,
    titan: str = "0.3",
    transformer_engine: bool = False,
    padded_vocab: int | None = None,
) -> Mapping:
    """The mapping from one naming to another.

    Args:
        config: the model's Hugging Face `config.json`: path, folder or content; or a `Decoder`.
        source, target: "huggingface" (as on disk), "torchtitan" or "megatron".
        titan: whose names: "0.3", or "0.2" for all older ones.
        transformer_engine: Megatron's names where its layers are those of TransformerEngine.
        padded_vocab: rows of Megatron's padded vocabulary, where it is not cut off.

    Raises NormalizationError for a family or naming that is not known.
    """
    model = Decoder.of(config)
    if model.family not in FAMILIES:
        raise NormalizationError(f"there is no ready mapping for {model.family!r}: known are {', '.join(FAMILIES)}")
    for naming in (source, target):
        if naming not in NAMINGS:
            raise NormalizationError(f"unknown naming {naming!r}: known are {', '.join(NAMINGS)}")
    if titan not in ("0.2", "0.3"):
        raise NormalizationError(f"torchtitan's names are known as of '0.2' and '0.3', not {titan!r}")

    def from_plain(naming: str) -> Mapping:
        if naming == "torchtitan":
            return Mapping(_titan(model, titan))
        if naming == "megatron":
            return Mapping(_megatron(model, transformer_engine, padded_vocab))
        return mixtral_to_plain().inverse() if model.family == "mixtral" else Mapping()

    if source == target:
        return Mapping()
    back = from_plain(source).inverse()
    if source == "torchtitan":
        back = _titan_as_plain(model) | back
    return back | from_plain(target)


def _titan(model: Decoder, generation: str) -> list[Rule]:
    if model.family.startswith("deepseek"):
        attention = [*latent_to_titan(), *feed_forward_to_titan("mlp", "feed_forward")]
    else:
        pairs = model.family in ("llama", "mistral", "mixtral")
        attention = attention_to_titan(model, generation, rotate_pairs=pairs)
    experts = experts_to_titan(generation) if model.family in _MOE else []
    return [*outer_to_titan(generation), *attention, *experts]


def _titan_as_plain(model: Decoder) -> Mapping:
    """torchtitan splits a fused projection when it saves the model, but not when it saves the optimizer."""
    parts = [f"{TITAN}attention.qkv_linear.w{x}.{{kind}}" for x in "qkv"]
    fused = f"{TITAN}attention.qkv_linear.wqkv.{{kind}}"
    rules: list[Rule] = [Split(fused, parts, (model.heads // model.kv_heads, 1, 1), groups=model.kv_heads)]
    if model.family in _MOE and not model.family.startswith("deepseek"):
        # a buffer for balancing that these families' files do not have
        rules += [Drop(f"{TITAN}moe.expert_bias_E"), Drop(f"{TITAN}moe.expert_bias")]
    return Mapping(rules)


def _megatron(model: Decoder, transformer_engine: bool, padded_vocab: int | None) -> list[Rule]:
    if model.family.startswith("deepseek"):
        attention = latent_to_megatron(transformer_engine=transformer_engine)
        attention += feed_forward_to_megatron("mlp", "mlp")
    else:
        attention = attention_to_megatron(model)
    experts = experts_to_megatron(transformer_engine=transformer_engine) if model.family in _MOE else []
    outer = outer_to_megatron(model, transformer_engine=transformer_engine, padded_vocab=padded_vocab)
    return [*outer, *attention, *experts]
