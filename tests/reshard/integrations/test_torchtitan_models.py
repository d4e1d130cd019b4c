"""torchtitan's own Llama, filled from transformers' files, computes what transformers does, however it is sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import reshard
from reshard.mapping.families import ready
from tests import gloo
from tests.stories.tiny_models import logits, model

pytest.importorskip("triton", reason="triton is not installed, which torchtitan's models import")
pytest.importorskip(
    "torchtitan.models.llama3",
    reason="torchtitan is not installed, or not for this torch",
    exc_type=ImportError,
)

pytestmark = [pytest.mark.gloo, pytest.mark.filterwarnings("ignore")]  # of the framework: not ours to mend

LAYOUTS = {"fsdp4": (4, 1, 1), "fsdp2 tp2": (2, 2, 1), "pp2 fsdp2": (2, 1, 2)}
"""Degrees of FSDP, tensor, and pipeline parallelism."""
TOLERANCE = 1e-6


def _config(hf: Any, is_fused: bool) -> Any:
    """torchtitan's settings for a Llama of transformers."""
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention

    rope = ComplexRoPE.Config(
        dim=hf.hidden_size // hf.num_attention_heads, max_seq_len=64, theta=hf.rope_parameters["rope_theta"]
    )
    layers = llama3._build_llama3_layers(
        n_layers=hf.num_hidden_layers, dim=hf.hidden_size, n_heads=hf.num_attention_heads,
        n_kv_heads=hf.num_key_value_heads, hidden_dim=hf.intermediate_size, rope=rope, fuse_qkv=is_fused,
        attn_backend="flex",
    )  # fmt: skip
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        for norm in (layer.attention_norm, layer.ffn_norm):
            norm.eps = hf.rms_norm_eps
    dim, rows = hf.hidden_size, hf.vocab_size
    return llama3.Llama3Model.Config(
        dim=dim, vocab_size=rows, layers=layers, lm_head=Linear.Config(in_features=dim, out_features=rows),
        tok_embeddings=Embedding.Config(num_embeddings=rows, embedding_dim=dim),
        norm=RMSNorm.Config(normalized_shape=dim, eps=hf.rms_norm_eps),
    )  # fmt: skip


def _sharded(hf: Any, layout: str, is_fused: bool) -> Any:
    """The model, or this rank's stage of it, sharded by torchtitan's own functions."""
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
    from torchtitan.distributed.pipeline_parallel import _split_module
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    shard, tp, pp = LAYOUTS[layout]
    parallel_dims.device_type = "cpu"
    dims = ParallelDims(
        dp_replicate=1, dp_shard=shard, cp=1, tp=tp, pp=pp, ep=1, world_size=4, spmd_backend="partial_dtensor"
    )
    dims.build_mesh()
    config = _config(hf, is_fused)
    set_llama3_sharding_config(config, enable_sp=False)
    made = config.build()
    if pp > 1:
        parts = (["tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head"])
        made = _split_module(made, parts[dims.get_mesh("pp").get_local_rank()])
    if tp > 1:
        made.parallelize(dims)
    whole = torch.float32
    apply_fsdp_to_decoder(made, dims.get_mesh(["fsdp"]), whole, whole, pp_enabled=pp > 1)
    return made


def _computed(folder: Path, layout: str, is_fused: bool) -> float:
    """The largest difference of logits; what was loaded is saved again."""
    theirs = model("llama")
    made = _sharded(theirs.config, layout, is_fused)
    made.init_states(buffer_device=torch.device("cpu"))
    state = reshard.get_model_state_dict(made)
    assert reshard.load(state, folder / "hf", mapping=ready(folder / "hf", "huggingface", "torchtitan")).ok
    reshard.set_model_state_dict(made, state)
    said = _said(made, layout, theirs.config)
    reshard.save(reshard.get_model_state_dict(made), folder / "ours")
    return float((said - logits(theirs)).abs().max())


def _said(made: Any, layout: str, hf: Any) -> torch.Tensor:
    tokens = torch.arange(1, 13).reshape(2, 6)
    with torch.no_grad():
        if "pp" not in layout:
            said = made(tokens)
            return said.full_tensor() if isinstance(said, DTensor) else said
        rank, hidden = dist.get_rank(), torch.empty(2, 6, hf.hidden_size)
        if rank < 2:
            hidden = made(tokens).contiguous()
            dist.send(hidden, rank + 2)
            said = torch.empty(2, 6, hf.vocab_size)
        else:
            dist.recv(hidden, rank - 2)
            said = made(hidden).contiguous()
        dist.broadcast(said, 2)
        return said


@pytest.mark.parametrize("is_fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torchtitan_s_llama_computes_what_transformers_does(layout: str, is_fused: bool, tmp_path: Path) -> None:
    """And what it saves is, under the names on disk, what transformers saved. `is_fused`: queries, keys, and values are
    one parameter, as in torchtitan's own configs."""
    model("llama").save_pretrained(tmp_path / "hf")

    assert max(gloo.run(_computed, 4, tmp_path, layout, is_fused)) < TOLERANCE

    back = ready(tmp_path / "hf", "torchtitan", "huggingface").apply(reshard.open(tmp_path / "ours"))
    assert reshard.compare(back, tmp_path / "hf").ok
