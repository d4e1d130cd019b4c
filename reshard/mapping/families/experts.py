"""Mixtures of experts: one matrix an expert on Hugging Face's disks, stacks in torchtitan, pairs in Megatron."""

from __future__ import annotations

from reshard.mapping.families.dense import HF, MEGATRON, TITAN, feed_forward_to_megatron, feed_forward_to_titan
from reshard.mapping.mapping import Mapping
from reshard.mapping.rules import Concat, Rename, Rule, Split, Stack, Unstack

__all__ = ["experts_to_megatron", "experts_to_titan", "in_memory_to_disk", "mixtral_to_plain"]

_PARTS = {"gate_proj": "w1_EFD", "down_proj": "w2_EDF", "up_proj": "w3_EFD"}


def experts_to_titan(generation: str) -> list[Rule]:
    """Experts side by side; router, its bias, and the experts that all tokens share."""
    new = generation == "0.3"
    block = f"{TITAN}moe.routed_experts.inner_experts." if new else f"{TITAN}moe.experts."
    stacks: list[Rule] = [
        Stack(f"{HF}mlp.experts.{{e}}.{a}.weight", block + (b if new else b.partition("_")[0]), over="e")
        for a, b in _PARTS.items()
    ]
    bias = f"{TITAN}moe.expert_bias" + ("_E" if new else "")
    return [
        *stacks,
        Rename(f"{HF}mlp.gate.weight", f"{TITAN}moe.router.gate.weight"),
        Rename(f"{HF}mlp.gate.e_score_correction_bias", bias),
        *feed_forward_to_titan("mlp.shared_experts", "moe.shared_experts"),
    ]


def experts_to_megatron(*, transformer_engine: bool) -> list[Rule]:
    """gate and up of each expert as one; grouped by TransformerEngine, the expert's number ends the name."""
    pair = [f"{HF}mlp.experts.{{e}}.gate_proj.weight", f"{HF}mlp.experts.{{e}}.up_proj.weight"]
    names = (
        [f"{MEGATRON}mlp.experts.linear_fc{n}.weight{{e}}" for n in (1, 2)]
        if transformer_engine
        else [f"{MEGATRON}mlp.experts.local_experts.{{e}}.linear_fc{n}.weight" for n in (1, 2)]
    )
    return [
        Concat(pair, names[0], parts=(1, 1)),
        Rename(f"{HF}mlp.experts.{{e}}.down_proj.weight", names[1]),
        Rename(f"{HF}mlp.gate.weight", f"{MEGATRON}mlp.router.weight"),
        Rename(f"{HF}mlp.gate.e_score_correction_bias", f"{MEGATRON}mlp.router.expert_bias"),
        *feed_forward_to_megatron("mlp.shared_experts", "mlp.shared_experts"),
    ]


def in_memory_to_disk() -> Mapping:
    """From what a model of transformers 5 has in memory, stacks of experts, to its files."""
    block = f"{HF}mlp.experts."
    pair = [f"{block}{{e}}.gate_proj.weight", f"{block}{{e}}.up_proj.weight"]
    return Mapping(
        [
            Unstack(f"{block}gate_up_proj", f"{block}{{e}}.gate_up_proj.weight", over="e"),
            Unstack(f"{block}down_proj", f"{block}{{e}}.down_proj.weight", over="e"),
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
