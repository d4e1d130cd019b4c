"""gpt-oss: experts stacked on disk, with biases; gate and up alternate, and matrices stand the other way round.

Hugging Face    gate_up_proj [E, hidden, 2 * size]: columns gate, up, gate, up ...
torchtitan      mlp1_weight [E, 2 * size, hidden]: the same, transposed
Megatron        linear_fc1 of each expert [2 * size, hidden]: all of the gate, then all of the up half
"""

from __future__ import annotations

from reshard.errors import NormalizationError
from reshard.mapping.families.config import Decoder
from reshard.mapping.families.dense import HF, MEGATRON, TITAN
from reshard.mapping.families.experts import titan_block, titan_name
from reshard.mapping.mapping import Mapping
from reshard.mapping.rules import Rename, Rule, Split, Transpose, Unstack

__all__ = ["gpt_oss_to_megatron", "gpt_oss_to_plain", "gpt_oss_to_titan"]

_BLOCK = f"{HF}mlp.experts."


def gpt_oss_to_plain(model: Decoder, fill: float | None = None) -> Mapping:
    """From its own names to those of other mixtures of experts: one matrix an expert, gate and up apart.

    Raises NormalizationError where the rows of an expert are not known.
    """
    if model.expert_size < 1:
        raise NormalizationError(f"gate and up of gpt-oss alternate: expert_size is needed to tell them apart: {model}")
    stacks: list[Rule] = []
    halves: list[Rule] = []
    for name in ("gate_up_proj", "down_proj"):
        stacks.append(Unstack(f"{_BLOCK}{name}", f"{_BLOCK}{{e}}.{name}.weight", over="e", fill=fill))
        stacks.append(Unstack(f"{_BLOCK}{name}_bias", f"{_BLOCK}{{e}}.{name}.bias", over="e", fill=fill))
    for kind in ("weight", "bias"):
        pair = [f"{_BLOCK}{{e}}.{part}_proj.{kind}" for part in ("gate", "up")]
        halves.append(Split(f"{_BLOCK}{{e}}.gate_up_proj.{kind}", pair, (1, 1), groups=model.expert_size))
    turned = [
        Transpose(f"{_BLOCK}{{e}}.{name}.weight", f"{_BLOCK}{{e}}.{name}.weight")
        for name in ("gate_up_proj", "down_proj")
    ]
    router = Rename(f"{HF}mlp.router.{{kind}}", f"{HF}mlp.gate.{{kind}}")
    return Mapping([*stacks, router]) | Mapping(turned) | Mapping(halves)


def gpt_oss_to_titan(generation: str) -> list[Rule]:
    """What it has beside attention, out of its own names."""
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
    """What other mixtures of experts do not have."""
    return [Rename(f"{HF}self_attn.sinks", f"{MEGATRON}self_attention.core_attention.softmax_offset")]
