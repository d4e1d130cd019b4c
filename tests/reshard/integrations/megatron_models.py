"""Mixtures of experts between Hugging Face and Megatron: Megatron-core loads what we convert, and says the same.

For every family, tiny and random: transformers saves it; we write Megatron's format; Megatron's own `GPTModel` loads
that under tensor and expert parallelism, and computes the logits that transformers computes; Megatron saves it; and
what we convert back is bit by bit what transformers saved.

    python -m tests.reshard.integrations.megatron_models      # every family under TP 1, 2 x EP 1, 2, 4
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import reshard
from reshard.mapping.families import ready
from tests import gloo
from tests.reshard.integrations.test_megatron import _NoTracker, _on_cpu
from tests.stories.tiny_models import logits, model

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "llama4_text")
LAYOUTS = ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (2, 4))
"""Degrees of tensor and expert parallelism; the product of the first and the data parallel degree holds the second."""


def _without_transformer_engine(tp: int) -> None:
    """Names that 0.16 has only with TransformerEngine, and sizes of values of latent attention."""
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401
    from megatron.core.transformer import dot_product_attention, multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None
    for name in ("TELinear", "TEColumnParallelLinear"):
        setattr(multi_latent_attention, name, type("Nothing", (), {}))
    plain = dot_product_attention.DotProductAttention

    class Attention(plain):  # type: ignore[misc,valid-type]
        def __init__(self, *args: Any, k_channels: Any = None, v_channels: int | None = None, **more: Any) -> None:
            super().__init__(*args, **more)
            if v_channels:
                self.hidden_size_per_partition = v_channels * self.config.num_attention_heads // tp

    for module in [m for name, m in sys.modules.items() if name.startswith("megatron")]:
        if hasattr(module, "get_cuda_rng_tracker"):
            module.get_cuda_rng_tracker = lambda *a, **k: _NoTracker()
        if getattr(module, "DotProductAttention", None) is plain:
            module.DotProductAttention = Attention


def _settings(family: str, hf: Any, tp: int, ep: int) -> dict[str, Any]:
    """Megatron's settings for a model of transformers."""
    sizes = {
        "num_layers": hf.num_hidden_layers, "hidden_size": hf.hidden_size, "layernorm_epsilon": hf.rms_norm_eps,
        "num_attention_heads": hf.num_attention_heads, "ffn_hidden_size": hf.intermediate_size,
        "num_moe_experts": 4, "moe_router_topk": hf.num_experts_per_tok,
        "moe_ffn_hidden_size": getattr(hf, "moe_intermediate_size", None) or hf.intermediate_size,
        "tensor_model_parallel_size": tp, "expert_model_parallel_size": ep, "expert_tensor_parallel_size": 1,
        "normalization": "RMSNorm", "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu, "add_bias_linear": False, "use_cpu_initialization": True,
        "bias_activation_fusion": False, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False, "apply_rope_fusion": False, "masked_softmax_fusion": False,
        "moe_token_dispatcher_type": "allgather", "moe_router_load_balancing_type": "none",
    }  # fmt: skip
    if family.startswith("deepseek"):
        dense, count = hf.first_k_dense_replace, hf.num_hidden_layers
        sizes |= {
            "multi_latent_attention": True, "qk_layernorm": True, "rope_type": "rope",
            "rotary_base": hf.rope_parameters["rope_theta"], "q_lora_rank": hf.q_lora_rank,
            "kv_lora_rank": hf.kv_lora_rank, "qk_head_dim": hf.qk_nope_head_dim, "v_head_dim": hf.v_head_dim,
            "qk_pos_emb_head_dim": hf.qk_rope_head_dim, "moe_layer_freq": [int(i >= dense) for i in range(count)],
            "moe_shared_expert_intermediate_size": hf.moe_intermediate_size * hf.n_shared_experts,
            "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
        }  # fmt: skip
    else:
        sizes |= {"num_query_groups": hf.num_key_value_heads}
        sizes |= {"kv_channels": getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads}
    own: dict[str, Any] = {
        "qwen2_moe": lambda: {
            "add_qkv_bias": True, "moe_shared_expert_gate": True, "moe_router_pre_softmax": not hf.norm_topk_prob,
            "moe_shared_expert_intermediate_size": hf.shared_expert_intermediate_size,
        },
        "qwen3_moe": lambda: {"qk_layernorm": True, "moe_router_pre_softmax": not hf.norm_topk_prob},
        "deepseek_v2": lambda: {"moe_router_pre_softmax": True},
        "deepseek_v3": lambda: {
            "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
            "moe_router_num_groups": hf.n_group, "moe_router_group_topk": hf.topk_group,
        },
        "llama4_text": lambda: {
            "ffn_hidden_size": hf.intermediate_size_mlp, "moe_apply_probs_on_input": True, "rotary_interleaved": True,
            "moe_shared_expert_intermediate_size": hf.intermediate_size, "moe_router_score_function": "sigmoid",
            "moe_layer_freq": [int(i in hf.moe_layers) for i in range(hf.num_hidden_layers)],
        },
    }  # fmt: skip
    return sizes | own.get(family, dict)()


def _gpt(family: str, hf: Any, tp: int, ep: int) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if family.startswith("deepseek") else TransformerConfig
    config = kind(**_settings(family, hf, tp, ep))
    l2 = family == "llama4_text"
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", qk_l2_norm=l2)
    more = {"share_embeddings_and_output_weights": False, "position_embedding_type": "rope", "parallel_output": False}
    return GPTModel(config, spec, 54, 64, rotary_base=int(hf.rope_parameters["rope_theta"]), **more).eval()


def _through_megatron(folder: Path, tp: int, ep: int) -> dict[str, float]:
    """Load each family, compare what it says, save it; the largest difference of logits."""
    from megatron.core import dist_checkpointing, parallel_state

    _on_cpu()
    import megatron.core.models.gpt  # noqa: F401

    parallel_state.initialize_model_parallel(tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=1)
    _without_transformer_engine(tp)
    found = {}
    for family in FAMILIES:
        theirs = model(family)
        made = _gpt(family, theirs.config, tp, ep)
        metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        wanted = made.sharded_state_dict(metadata=metadata)
        loaded = dist_checkpointing.load(dict(wanted), str(folder / family / "megatron" / "iter_0000001"))
        made.load_state_dict({name: loaded[name] for name in wanted})
        tokens = torch.arange(1, 13).reshape(2, 6)
        mask = torch.triu(torch.ones(6, 6, dtype=torch.bool), 1)[None, None]
        with torch.no_grad():
            said = made(tokens, torch.arange(6).expand(2, 6), mask)[..., :53]
        found[family] = float((said - logits(theirs)).abs().max())
        target = folder / family / "again"
        if dist.get_rank() == 0:
            target.mkdir()
        dist.barrier()
        dist_checkpointing.save(made.sharded_state_dict(metadata=metadata), str(target))
    for child in multiprocessing.active_children():  # of its writer, which leaves them
        child.terminate()
    return found


def there_and_back(folder: Path, tp: int, ep: int) -> float:
    """The largest difference of logits on any rank; raises AssertionError where a tensor does not come back."""
    for family in FAMILIES:
        files = folder / family / "hf"
        model(family).save_pretrained(files)
        names = ready(files, "huggingface", "megatron", padded_vocab=54)
        target, hints = folder / family / "megatron" / "iter_0000001", {"stored_names": True}
        reshard.convert(files, target, format="megatron", mapping=names, hints=hints)
    found = gloo.run(_through_megatron, max(tp, ep), folder, tp, ep)
    for family in FAMILIES:
        files = folder / family / "hf"
        back = ready(files, "megatron", "huggingface")
        stored = reshard.open(folder / family / "again").canonical({"vocab_size": 53}, model_only=True)
        assert reshard.compare(back.apply(stored), reshard.open(files)).ok, family
    return max(worst for of in found for worst in of.values())


if __name__ == "__main__":
    for degrees in LAYOUTS:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as temporary:
            worst = there_and_back(Path(temporary), *degrees)
        assert worst < 1e-6, (degrees, worst)
        print(
            f"tp {degrees[0]}, ep {degrees[1]}: logits differ by {worst:.1e} at most; {time.monotonic() - start:.0f} s"
        )
