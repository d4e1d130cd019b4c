"""Names of llama.cpp, as GGUF files have them, for dense models: `blk.0.attn_q.weight`.

Llama's and Mistral's rotate neighbours there, so rows of their queries and keys change places; others rotate halves of
a head as Hugging Face's do. `rope_freqs.weight` is computed from the settings, and no parameter of the model.
"""

from __future__ import annotations

from reshard.mapping.families.config import Decoder
from reshard.mapping.families.dense import HF
from reshard.mapping.rules import Rename, Rope, Rule

__all__ = ["LLAMA_CPP", "to_llama_cpp"]

LLAMA_CPP = ("llama", "mistral", "qwen2", "qwen3")
"""The families whose names these are."""
_BLOCK = "blk.{i}."


def to_llama_cpp(model: Decoder) -> list[Rule]:
    """From the names that most have on disk."""

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
        rotary(f"{HF}self_attn.q_proj.{{kind}}", f"{_BLOCK}attn_q.{{kind}}"),
        rotary(f"{HF}self_attn.k_proj.{{kind}}", f"{_BLOCK}attn_k.{{kind}}"),
        *(Rename(HF + source, _BLOCK + target) for source, target in parts.items()),
    ]
