"""vLLM and SGLang: queries, keys and values as one, gate and up as one, experts side by side.

vLLM        self_attn.qkv_proj, mlp.gate_up_proj, mlp.experts.routed_experts.w13_weight [E, 2 * size, hidden], w2_weight
SGLang      the same, but mlp.experts.w13_weight, as in vLLM up to the middle of 2026

These are the tensors that an engine has loaded into, of the whole model, before it repacks any for a kernel. What
an engine is given to load has Hugging Face's names.
"""

from __future__ import annotations

from reshard.mapping.families.config import Decoder
from reshard.mapping.families.dense import HF
from reshard.mapping.families.experts import in_memory_to_disk
from reshard.mapping.mapping import Mapping
from reshard.mapping.rules import Concat, Rename, Rule

__all__ = ["ENGINES", "to_engine"]

ENGINES = {"vllm": "fused_qkv_a_proj", "sglang": "fused_qkv_a_proj_with_mqa"}
"""What each calls the first projections of latent attention."""


def to_engine(model: Decoder, engine: str, *, routed_experts: bool, fill: float | None) -> Mapping:
    """From the names that most have on disk. `routed_experts`: vLLM's experts are in a module of that name."""
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
    """Head by head: all queries, then all keys, then all values."""
    qkv = [f"{HF}self_attn.{x}_proj.{{kind}}" for x in "qkv"]
    return [Concat(qkv, f"{HF}self_attn.qkv_proj.{{kind}}", (model.heads, model.kv_heads, model.kv_heads))]


def _latent(model: Decoder, engine: str) -> list[Rule]:
    """The two that are computed first, unless queries have no latent vector."""
    if not model.latent_rows[0]:
        return []
    first = [f"{HF}self_attn.{x}.weight" for x in ("q_a_proj", "kv_a_proj_with_mqa")]
    return [Concat(first, f"{HF}self_attn.{ENGINES[engine]}.weight", model.latent_rows)]


def _gate_up(block: str) -> list[Rule]:
    pair = [f"{HF}{block}.{x}_proj.{{kind}}" for x in ("gate", "up")]
    return [Concat(pair, f"{HF}{block}.gate_up_proj.{{kind}}", (1, 1))]
