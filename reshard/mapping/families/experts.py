"""Mixtures of experts: one matrix an expert on Hugging Face's disks, stacks in torchtitan, pairs in Megatron."""

from __future__ import annotations

from reshard.mapping.families.config import Decoder
from reshard.mapping.families.dense import HF, MEGATRON, TITAN, feed_forward_to_megatron, feed_forward_to_titan
from reshard.mapping.mapping import Mapping
from reshard.mapping.rules import Concat, Rename, Rule, Split, Stack, Unstack

__all__ = [
    "experts_to_megatron",
    "experts_to_titan",
    "in_memory_to_disk",
    "mixtral_to_plain",
    "titan_block",
    "titan_name",
]

_PARTS = {"gate_proj": "w1_EFD", "down_proj": "w2_EDF", "up_proj": "w3_EFD"}


def experts_to_titan(generation: str, fill: float | None = None) -> list[Rule]:
    """Experts side by side; router, its bias, and the experts that all tokens share."""
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
    """Where torchtitan has its experts."""
    return f"{TITAN}moe.routed_experts.inner_experts." if generation == "0.3" else f"{TITAN}moe.experts."


def titan_name(name: str, generation: str) -> str:
    """torchtitan 0.3 ends names by letters for their dims."""
    return name if generation == "0.3" else name.rpartition("_")[0]


def experts_to_megatron(model: Decoder, *, transformer_engine: bool) -> list[Rule]:
    """gate and up of each expert as one; grouped by TransformerEngine, the expert's number ends the name."""
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
    """From what a model of transformers 5 has in memory, stacks of experts, to its files."""
    block = f"{HF}mlp.experts."
    pair = [f"{block}{{e}}.gate_proj.weight", f"{block}{{e}}.up_proj.weight"]
    return Mapping(
        [
            Unstack(f"{block}gate_up_proj", f"{block}{{e}}.gate_up_proj.weight", over="e", fill=fill),
            Unstack(f"{block}down_proj", f"{block}{{e}}.down_proj.weight", over="e", fill=fill),
        ]
    ) | Mapping([Split(f"{block}{{e}}.gate_up_proj.weight", pair, parts=(1, 1))])


def mixtral_to_plain() -> Mapping:
    """From Mixtral's own names on disk to those that all later families use."""
    block = f"{HF}block_sparse_moe."
    parts = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    experts = [
        Rename(f"{block}experts.{{e}}.{a}.weight", f"{HF}mlp.experts.{{e}}.{b}.weight") for a, b in parts.items()
    ]
    return Mapping([*experts, Rename(f"{block}gate.weight", f"{HF}mlp.gate.weight")])
