"""Models between Hugging Face and Megatron: Megatron-core loads what we convert, and says the same.

For every family, tiny and random: transformers saves it; we write Megatron's format; Megatron's own `GPTModel` loads
that under tensor, expert, and pipeline parallelism, and computes the logits that transformers computes; Megatron saves
it; and what we convert back is bit by bit what transformers saved. Stages without tensor parallelism are also filled by
`reshard.load` from transformers' files.

    python -m tests.reshard.integrations.megatron_models      # every family under TP 1, 2 x EP 1, 2, 4, and PP 2
"""

from __future__ import annotations

import copy
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import reshard
from reshard import Stage
from reshard.mapping.architectures import ARCHITECTURES
from reshard.mapping.families import ready
from tests import gloo
from tests.reshard.integrations.test_megatron import _NoTracker, _on_cpu
from tests.same import assert_same
from tests.stories.tiny_models import DENSE, MIXTURES, fresh, logits, model

FAMILIES = (*MIXTURES, *DENSE)
INTERLEAVED = ("llama4_text", "helium", "ernie4_5", "glm", "glm4")
"""Families that rotate adjacent pairs also on disk."""
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon")
SCALES = ("routed_scaling_factor", "router_scaling_factor")
ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "relu2": lambda x: torch.nn.functional.relu(x).square(),
    "gelu_pytorch_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}
TOLERANCE = 2e-6
"""Of logits of up to 4, which norms around 1 give; most are below 1."""
LAYOUTS = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 4, 1), (2, 4, 1), (1, 1, 2), (2, 1, 2))
"""Degrees of tensor, expert, and pipeline parallelism; the product of the first and the data parallel degree holds the
second."""


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

    _without_its_kernels()
    for module in [m for name, m in sys.modules.items() if name.startswith("megatron")]:
        if hasattr(module, "get_cuda_rng_tracker"):
            module.get_cuda_rng_tracker = lambda *a, **k: _NoTracker()
        if getattr(module, "DotProductAttention", None) is plain:
            module.DotProductAttention = Attention


def _without_its_kernels() -> None:
    """Linear attention in torch, as `deterministic_mode` asks, and zero-centered norms."""
    from megatron.core.ssm import gated_delta_net
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def l2norm(given: torch.Tensor, dim: int = -1, eps: float = 1e-6) -> torch.Tensor:
        return given * torch.rsqrt((given * given).sum(dim=dim, keepdim=True) + eps)

    gated_delta_net.HAVE_FLA, gated_delta_net.l2norm = True, l2norm
    _as_deepseek_indexes()
    make = WrappedTorchNorm.__new__

    def new(cls: Any, *args: Any, **more: Any) -> Any:
        plain = make(cls, *args, **more)
        return _zero_centered(plain) if _zero_centered.now else plain

    WrappedTorchNorm.__new__ = new


def _as_deepseek_indexes() -> None:
    """The indexer of sparse attention as later versions have it: 0.16 rotates its last dims, pairs of them, and takes
    bfloat16 alone. Later ones rotate the first, `dsa_indexer_rope_interleaved` says which with which, and the transform
    without which products are the same can be switched off."""
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
    from megatron.core.transformer.experimental_attention_variant import dsa

    def rotated(self: Any, given: torch.Tensor, frequencies: torch.Tensor, scale: float) -> torch.Tensor:
        return _apply_rotary_pos_emb_bshd(given, frequencies, multi_latent_attention=_in_pairs.now, mscale=scale)

    dsa.rotate_activation, dsa.DSAIndexer._apply_rope = lambda given: given, rotated


class _in_pairs:
    """Whether the indexer rotates neighbors, as GLM-5's does, and not halves as DeepSeek's."""

    now = False


def _settings(family: str, hf: Any, tp: int, ep: int, pp: int) -> dict[str, Any]:
    """Megatron's settings for a model of transformers."""
    known, names = ARCHITECTURES[family], set(fresh(family).state_dict())
    attention, biased = "model.layers.1.self_attn.", {name for name in names if name.endswith("_proj.bias")}
    kind = next(x for x in ("hidden_act", "hidden_activation") if hasattr(hf, x))
    sizes = {
        "num_layers": hf.num_hidden_layers, "hidden_size": hf.hidden_size, "layernorm_epsilon": _first(hf, *EPSILONS),
        "num_attention_heads": hf.num_attention_heads, "ffn_hidden_size": hf.intermediate_size,
        "tensor_model_parallel_size": tp, "expert_model_parallel_size": ep, "expert_tensor_parallel_size": 1,
        "normalization": _normalization(names), "gated_linear_unit": known.gated,
        "activation_func": ACTIVATIONS[getattr(hf, kind)], "add_qkv_bias": f"{attention}q_proj.bias" in names,
        "add_bias_linear": f"{attention}o_proj.bias" in biased, "use_cpu_initialization": True,
        "bias_activation_fusion": False, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False, "apply_rope_fusion": False, "masked_softmax_fusion": False,
        "bias_dropout_fusion": False, "rotary_interleaved": family in INTERLEAVED, "pipeline_model_parallel_size": pp,
    }  # fmt: skip
    if pp > 1:  # as many virtual stages as there are layers for
        virtual = hf.num_hidden_layers // pp
        sizes |= {
            "pipeline_dtype": torch.float32,
            "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
        }
    if known.latent:
        sizes |= {
            "multi_latent_attention": True, "qk_layernorm": True, "rope_type": "rope",
            "rotary_base": hf.rope_parameters["rope_theta"], "q_lora_rank": hf.q_lora_rank,
            "kv_lora_rank": hf.kv_lora_rank, "qk_head_dim": hf.qk_nope_head_dim, "v_head_dim": hf.v_head_dim,
            "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
        }  # fmt: skip
    else:
        sizes |= {"num_query_groups": hf.num_key_value_heads, "qk_layernorm": f"{attention}q_norm.weight" in names}
        sizes |= {"kv_channels": getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads}
    if hasattr(hf, "attention_multiplier"):
        sizes |= {"softmax_scale": hf.attention_multiplier}
    if hasattr(hf, "query_pre_attn_scalar"):
        sizes |= {"softmax_scale": hf.query_pre_attn_scalar**-0.5}
    sizes |= {"attention_output_gate": known.output_gates}
    if hasattr(hf, "linear_conv_kernel_dim"):
        sizes |= {
            "linear_conv_kernel_dim": hf.linear_conv_kernel_dim,
            "linear_key_head_dim": hf.linear_key_head_dim, "linear_value_head_dim": hf.linear_value_head_dim,
            "linear_num_key_heads": hf.linear_num_key_heads, "linear_num_value_heads": hf.linear_num_value_heads,
            "deterministic_mode": True, "hetereogenous_dist_checkpoint": True,
        }  # fmt: skip
    if f"{attention}sinks" in names:
        sizes |= {"softmax_type": "learnable"}
    if hasattr(hf, "index_topk"):
        sizes |= {
            "experimental_attention_variant": "dsa", "dsa_indexer_n_heads": hf.index_n_heads,
            "dsa_indexer_head_dim": hf.index_head_dim, "dsa_indexer_topk": hf.index_topk,
        }  # fmt: skip
    if known.experts:
        sizes |= _of_experts(family, hf, names)
    return sizes


def _of_experts(family: str, hf: Any, names: set[str]) -> dict[str, Any]:
    sparse = {int(name.split(".")[2]) for name in names if "experts" in name or "input_linear" in name}
    each = getattr(hf, "moe_intermediate_size", None) or hf.intermediate_size
    counts = (getattr(hf, name, None) for name in ("n_shared_experts", "num_shared_experts"))
    shared = each * next((count for count in counts if count), 0)
    shared = getattr(hf, "shared_expert_intermediate_size", None) or getattr(hf, "shared_intermediate_size", shared)
    sizes = {
        "num_moe_experts": 4, "moe_router_topk": hf.num_experts_per_tok, "moe_ffn_hidden_size": each,
        "moe_layer_freq": [int(i in sparse) for i in range(hf.num_hidden_layers)],
        "moe_token_dispatcher_type": "allgather", "moe_router_load_balancing_type": "none",
        "moe_shared_expert_intermediate_size": shared or None,
        "moe_shared_expert_gate": any("shared_expert_gate" in name for name in names),
        "moe_router_topk_scaling_factor": next((getattr(hf, name) for name in SCALES if hasattr(hf, name)), None),
        "moe_router_pre_softmax": not getattr(hf, "norm_topk_prob", True) or family == "deepseek_v2",
    }  # fmt: skip
    if len(sparse) == hf.num_hidden_layers:
        sizes["moe_layer_freq"] = 1  # else Megatron takes the layers for different ones, and numbers them in its files
    if any("e_score_correction_bias" in name for name in names):
        sizes |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
        sizes |= {"moe_router_num_groups": getattr(hf, "n_group", None)}
        sizes |= {"moe_router_group_topk": getattr(hf, "topk_group", None)}
        sizes |= {"moe_router_pre_softmax": False}
    if family == "llama4_text":
        sizes |= {
            "ffn_hidden_size": hf.intermediate_size_mlp, "moe_apply_probs_on_input": True,
            "moe_shared_expert_intermediate_size": hf.intermediate_size, "moe_router_score_function": "sigmoid",
        }  # fmt: skip
    return sizes


def _first(hf: Any, *names: str) -> Any:
    return next(getattr(hf, name) for name in names if getattr(hf, name, None) is not None)


def _normalization(names: set[str]) -> str:
    return "LayerNorm" if "model.norm.bias" in names else "RMSNorm"


def _gpt(family: str, theirs: Any, degrees: tuple[int, int, int]) -> list[Any]:
    """This rank's stages."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    hf, known = theirs.config, ARCHITECTURES[family]
    config = (MLATransformerConfig if known.latent else TransformerConfig)(**_settings(family, hf, *degrees))
    l2, _zero_centered.now, _in_pairs.now = family == "llama4_text", known.zero_centered, family == "glm_moe_dsa"
    rope = hf.rope_parameters.get("full_attention", hf.rope_parameters)
    more = {"position_embedding_type": "rope", "parallel_output": False, "rotary_base": int(rope["rope_theta"])}
    more |= {"share_embeddings_and_output_weights": hf.tie_word_embeddings}
    more |= {"rotary_percent": rope.get("partial_rotary_factor", 1.0)}
    stages, count = [], config.virtual_pipeline_model_parallel_size
    rank, last = parallel_state.get_pipeline_model_parallel_rank(), config.pipeline_model_parallel_size - 1
    for stage in range(count or 1):
        virtual = stage if count else None
        spec = get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=False,
            normalization=config.normalization,
            qk_l2_norm=l2,
            vp_stage=virtual,
        )
        first = get_transformer_layer_offset(config, virtual)
        spec.layer_specs = [_layer(family, hf, number, layer) for number, layer in enumerate(spec.layer_specs, first)]
        ends = {"pre_process": (rank, stage) == (0, 0), "post_process": (rank, stage) == (last, (count or 1) - 1)}
        made = GPTModel(config, spec, 54, 64, vp_stage=virtual, **ends, **more).eval()
        if family.startswith("gemma") and ends["pre_process"]:
            made.embedding.register_forward_hook(lambda module, given, found: found * hf.hidden_size**0.5)
        stages.append(made)
    return stages


def _said(stages: list[Any]) -> torch.Tensor:
    """The logits, on every rank: each stage's output is sent to all ranks of the pipeline."""
    from megatron.core import parallel_state

    group = parallel_state.get_pipeline_model_parallel_group()
    tokens, places = torch.arange(1, 13).reshape(2, 6), torch.arange(6).expand(2, 6)
    mask = torch.triu(torch.ones(6, 6, dtype=torch.bool), 1)[None, None]
    said = torch.empty(6, 2, stages[0].config.hidden_size)
    for number in range(len(stages) * dist.get_world_size(group)):
        stage, rank = divmod(number, dist.get_world_size(group))
        if rank == dist.get_rank(group):
            stages[stage].set_input_tensor(said)
            said = stages[stage](tokens, places, mask)
        elif number == len(stages) * dist.get_world_size(group) - 1:
            said = torch.empty(2, 6, 54)
        said = said.contiguous()
        dist.broadcast(said, group=group, group_src=rank)
    return said[..., :53]


def _layer(family: str, hf: Any, number: int, given: Any) -> Any:
    """The layer's spec, with what Megatron's own specs have only with TransformerEngine."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    made, norms = copy.deepcopy(given), ARCHITECTURES[family].norms
    parts = made.submodules
    if not norms[0]:
        parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
    if hasattr(hf, "index_topk"):
        parts.self_attention.submodules.core_attention = _sparse()
    if norms[1]:
        parts.self_attention.submodules.linear_proj = _with_norm()
        parts.mlp.submodules.linear_fc2 = _with_norm()
    if getattr(hf, "layer_types", None) and hf.layer_types[number] == "linear_attention":
        inner = GatedDeltaNetSubmodules(ColumnParallelLinear, WrappedTorchNorm, RowParallelLinear)
        parts.self_attention = ModuleSpec(GatedDeltaNet, submodules=inner)
        parts.sharded_state_dict_keys_map["input_layernorm."] = "self_attention.in_proj.layer_norm_"
    return made


def _sparse() -> Any:
    """Sparse attention, of which Megatron's own spec needs TransformerEngine."""
    from megatron.core.transformer.experimental_attention_variant import dsa
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    inner = dsa.DSAIndexerSubmodules(_Whole, _Whole, WrappedTorchNorm, _Whole)
    indexer = ModuleSpec(dsa.DSAIndexer, submodules=inner)
    return ModuleSpec(dsa.DSAttention, submodules=dsa.DSAttentionSubmodules(indexer))


class _Whole(torch.nn.Linear):
    """A projection that every rank has in full."""

    def __init__(self, columns: int, rows: int, **more: Any) -> None:
        super().__init__(columns, rows, bias=False)

    def forward(self, given: torch.Tensor) -> Any:
        return super().forward(given), None


def _with_norm() -> Any:
    """A projection with a norm of its output, as Megatron-Bridge adds to TransformerEngine's."""
    from megatron.core.tensor_parallel import RowParallelLinear
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    class WithNorm(RowParallelLinear):  # type: ignore[misc]
        def __init__(self, rows: int, columns: int, *, config: Any, **more: Any) -> None:
            super().__init__(rows, columns, config=config, **more)
            self.post_layernorm = WrappedTorchNorm(config, columns, config.layernorm_epsilon)

        def forward(self, given: torch.Tensor) -> Any:
            found, bias = super().forward(given)
            return self.post_layernorm(found), bias

    return WithNorm


class _zero_centered(torch.nn.Module):
    """A norm as Megatron has it with `layernorm_zero_centered_gamma`, which needs TransformerEngine."""

    now = False

    def __init__(self, plain: torch.nn.Module) -> None:
        super().__init__()
        self.weight, self.eps = plain.weight, plain.eps
        self.bias = getattr(plain, "bias", None)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        functional, shape = torch.nn.functional, tuple(self.weight.shape)
        if self.bias is not None:
            return functional.layer_norm(given, shape, 1 + self.weight, self.bias, self.eps)
        return functional.rms_norm(given, shape, 1 + self.weight, self.eps)


def _filled(stages: list[Any], files: Path) -> None:
    """Fill the live stages from transformers' files."""
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    for stage in stages:
        for parameter in stage.parameters():
            parameter.fill_(7)
    live = [
        Stage(stage, {"decoder.layers": get_transformer_layer_offset(stage.config, stage.vp_stage)}) for stage in stages
    ]
    target = reshard.get_model_state_dict(live)
    names = ready(files, "huggingface", "megatron", padded_vocab=54)
    # linear layers without TransformerEngine have no extra state, and yet its name
    reshard.load(target, files, mapping=names, strict={"*._extra_state": "partial"})


def _through_megatron(folder: Path, families: tuple[str, ...], degrees: tuple[int, int, int]) -> dict[str, float]:
    """Load each family, compare what it says, save it; the largest difference of logits."""
    from megatron.core import dist_checkpointing, parallel_state

    _on_cpu()
    import megatron.core.models.gpt  # noqa: F401

    (tp, ep, pp), is_whole = degrees, degrees[:2] == (1, 1)
    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=1)
    _without_transformer_engine(tp)
    found = {}
    for family in families:
        theirs = model(family)
        stages = _gpt(family, theirs, degrees)
        metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        wanted = {f"model{i}": stage.sharded_state_dict(metadata=metadata) for i, stage in enumerate(stages)}
        loaded = dist_checkpointing.load(wanted, str(folder / family / "megatron" / "iter_0000001"))
        for i, stage in enumerate(stages):
            stage.load_state_dict(loaded[f"model{i}"])
        with torch.no_grad():
            said = _said(stages)
            if is_whole and not ARCHITECTURES[family].output_gates:  # a live projection is one parameter there
                _filled(stages, folder / family / "hf")
                assert torch.equal(_said(stages), said), family
        found[family] = float((said - logits(theirs)).abs().max())
        target = folder / family / "again"
        if dist.get_rank() == 0:
            target.mkdir()
        dist.barrier()
        saved = {f"model{i}": stage.sharded_state_dict(metadata=metadata) for i, stage in enumerate(stages)}
        dist_checkpointing.save(saved, str(target))
    for child in multiprocessing.active_children():  # of its writer, which leaves them
        child.terminate()
    return found


def there_and_back(folder: Path, families: tuple[str, ...], tp: int, ep: int, pp: int = 1) -> dict[str, float]:
    """The largest difference of logits on any rank, of each family; raises AssertionError where a tensor does not come
    back."""
    for family in families:
        files = folder / family / "hf"
        model(family).save_pretrained(files)
        names = ready(files, "huggingface", "megatron", padded_vocab=54)
        target, hints = folder / family / "megatron" / "iter_0000001", {"stored_names": True}
        reshard.convert(files, target, format="megatron", mapping=names, hints=hints)
    found = gloo.run(_through_megatron, max(tp, ep) * pp, folder, families, (tp, ep, pp), timeout_s=1800)
    for family in families:
        files = folder / family / "hf"
        back = ready(files, "megatron", "huggingface")
        stored = reshard.open(folder / family / "again").canonical({"vocab_size": 53}, model_only=True)
        found_again, saved = back.apply(stored), reshard.open(files)  # tied names are in the config alone
        assert set(found_again) == set(saved), (family, set(found_again) ^ set(saved))
        assert_same({name: found_again[name][...] for name in saved}, {name: saved[name][...] for name in saved})
    return {family: max(of[family] for of in found) for family in families}


if __name__ == "__main__":
    worst: dict[str, float] = {}
    for degrees in LAYOUTS:
        start, families = time.monotonic(), MIXTURES if degrees[1] > 1 else FAMILIES
        with tempfile.TemporaryDirectory() as temporary:
            found = there_and_back(Path(temporary), families, *degrees)
        assert max(found.values()) < TOLERANCE, (degrees, found)
        worst = {family: max(worst.get(family, 0), found.get(family, 0)) for family in FAMILIES}
        print(
            f"tp {degrees[0]}, ep {degrees[1]}, pp {degrees[2]}: {len(families)} families, "
            f"{time.monotonic() - start:.0f} s"
        )
    for family, difference in worst.items():
        print(f"{family}: logits differ by {difference:.1e} at most")
