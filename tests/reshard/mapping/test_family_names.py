"""Names and values that frameworks have where families differ, by what their own converters say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.errors import NormalizationError
from reshard.mapping import Cast, Mapping
from reshard.mapping.families import Decoder, ready

LLAMA = Decoder("llama", 4, 2, 8, 53)
GEMMA = Decoder("gemma", 4, 2, 8, 53)
DENSE_FIRST = {"layers": 4, "next_layers": 1, "dense_layers": (0,)}
LINEAR: dict[str, Any] = {"layers": 4, "linear_layers": (0, 1, 2), "linear_heads": (2, 4), "linear_sizes": (4, 8)}
ENGINE = {"transformer_engine": True}
NAMES: list[tuple[str, dict[str, Any], dict[str, Any], int, str, dict[str, str]]] = [
    (  # TransformerEngine keeps norms within projections, but not before latent attention
        "deepseek_v3", DENSE_FIRST, ENGINE, 0, "decoder.layers.0.",
        {
            "input_layernorm.weight": "input_layernorm.weight",
            "post_attention_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
            "mlp.down_proj.weight": "mlp.linear_fc2.weight",
        },
    ),
    (  # and not before routers
        "deepseek_v3", DENSE_FIRST, ENGINE, 2, "decoder.layers.2.",
        {
            "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
            "self_attn.q_a_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
            "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias",
            "mlp.experts.3.down_proj.weight": "mlp.experts.linear_fc2.weight3",
            "mlp.shared_experts.down_proj.weight": "mlp.shared_experts.linear_fc2.weight",
        },
    ),
    (  # layers that predict further tokens are numbered on, and apart in Megatron
        "deepseek_v3", DENSE_FIRST, {}, 4, "mtp.layers.0.",
        {
            "enorm.weight": "enorm.weight",
            "hnorm.weight": "hnorm.weight",
            "eh_proj.weight": "eh_proj.weight",
            "shared_head.norm.weight": "final_layernorm.weight",
            "self_attn.o_proj.weight": "mtp_model_layer.self_attention.linear_proj.weight",
            "mlp.experts.1.down_proj.weight": "mtp_model_layer.mlp.experts.local_experts.1.linear_fc2.weight",
        },
    ),
    (
        "deepseek_v3", DENSE_FIRST, {"mtp": "transformer_layer"}, 4, "mtp.layers.0.transformer_layer.",
        {
            "self_attn.q_b_proj.weight": "self_attention.linear_q_up_proj.weight",
            "self_attn.kv_a_proj_with_mqa.weight": "self_attention.linear_kv_down_proj.weight",
        },
    ),
    (
        "qwen2_moe", {}, ENGINE, 1, "decoder.layers.1.",
        {
            "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
            "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
            "mlp.shared_expert.down_proj.weight": "mlp.shared_experts.linear_fc2.weight",
            "mlp.shared_expert_gate.weight": "mlp.shared_experts.gate_weight",
        },
    ),
    (
        "qwen3", {}, ENGINE, 1, "decoder.layers.1.",
        {
            "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
            "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
            "post_attention_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
        },
    ),
    (
        "gemma2", {}, ENGINE, 1, "decoder.layers.1.",
        {
            "post_attention_layernorm.weight": "self_attention.linear_proj.post_layernorm.weight",
            "pre_feedforward_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
            "post_feedforward_layernorm.weight": "mlp.linear_fc2.post_layernorm.weight",
        },
    ),
    (  # linear attention has its norm within its own projection
        "qwen3_next", LINEAR, ENGINE, 0, "decoder.layers.0.",
        {
            "input_layernorm.weight": "self_attention.in_proj.layer_norm_weight",
            "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
            "linear_attn.out_proj.weight": "self_attention.out_proj.weight",
            "linear_attn.A_log": "self_attention.A_log",
            "mlp.shared_expert_gate.weight": "mlp.shared_experts.gate_weight",
        },
    ),
    (
        "qwen3_next", LINEAR, ENGINE, 3, "decoder.layers.3.",
        {"input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight"},
    ),
    (
        "nemotron", {}, ENGINE, 1, "decoder.layers.1.",
        {
            "input_layernorm.bias": "self_attention.linear_qkv.layer_norm_bias",
            "post_attention_layernorm.bias": "mlp.linear_fc1.layer_norm_bias",
            "mlp.up_proj.weight": "mlp.linear_fc1.weight",
            "mlp.down_proj.weight": "mlp.linear_fc2.weight",
        },
    ),
    (
        "exaone_moe", {"layers": 2, "dense_layers": (0,)}, ENGINE, 1, "decoder.layers.1.",
        {"mlp.e_score_correction_bias": "mlp.router.expert_bias"},
    ),
    (
        "exaone4", {}, ENGINE, 0, "decoder.layers.0.",
        {
            "post_attention_layernorm.weight": "self_attention.linear_proj.post_layernorm.weight",
            "post_feedforward_layernorm.weight": "mlp.linear_fc2.post_layernorm.weight",
        },
    ),
    (
        "hy_v3", {"layers": 2, "dense_layers": (0,), "next_layers": 1}, {}, 2, "mtp.layers.0.",
        {
            "eh_proj.weight": "eh_proj.weight",
            "final_layernorm.weight": "final_layernorm.weight",
            "mlp.expert_bias": "mtp_model_layer.mlp.router.expert_bias",
            "mlp.router.gate.weight": "mtp_model_layer.mlp.router.weight",
            "mlp.shared_mlp.down_proj.weight": "mtp_model_layer.mlp.shared_experts.linear_fc2.weight",
        },
    ),
    (  # as Megatron-Bridge names the indexer of GLM-5
        "glm_moe_dsa", DENSE_FIRST, ENGINE, 1, "decoder.layers.1.",
        {
            "self_attn.indexer.wq_b.weight": "self_attention.core_attention.indexer.linear_wq_b.weight",
            "self_attn.indexer.wk.weight": "self_attention.core_attention.indexer.linear_wk.weight",
            "self_attn.indexer.k_norm.bias": "self_attention.core_attention.indexer.k_norm.bias",
            "self_attn.indexer.weights_proj.weight": "self_attention.core_attention.indexer.linear_weights_proj.weight",
        },
    ),
    (
        "gpt_oss", {"expert_size": 16}, {}, 0, "decoder.layers.0.",
        {
            "self_attn.sinks": "self_attention.core_attention.softmax_offset",
            "self_attn.o_proj.bias": "self_attention.linear_proj.bias",
            "mlp.router.bias": "mlp.router.bias",
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize(("family", "more", "options", "layer", "prefix", "names"), NAMES)
def test_names_in_megatron(
    family: str,
    more: dict[str, Any],
    options: dict[str, Any],
    layer: int,
    prefix: str,
    names: dict[str, str],
    tmp_path: Path,
) -> None:
    """As Megatron's own bridge to Hugging Face has them."""
    model = Decoder(family, 4, 2, 8, 53, **more)
    state = {f"model.layers.{layer}.{name}": torch.full((2, 4), float(at)) for at, name in enumerate(names)}
    reshard.save(state, tmp_path / "c")

    made = ready(model, "huggingface", "megatron", **options).apply(reshard.open(tmp_path / "c"))

    assert set(made) == {prefix + name for name in names.values()}
    assert all(torch.equal(made[prefix + new][...], t) for new, t in zip(names.values(), state.values()))
    back = ready(model, "megatron", "huggingface", **options).apply(made)
    assert set(back) == set(state)


def test_norms_that_are_centred_otherwise(tmp_path: Path) -> None:
    """Weights and masters change by 1, moments do not; names and other tensors do as they always do."""
    rows = torch.tensor([0.5, 1.25, 2.0])
    name, proj = "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.o_proj.weight"
    states = {name: {"exp_avg": rows * 3, "fp32_param": rows, "step": torch.tensor(4.0)}}
    reshard.save({"model": {name: rows, proj: rows}, "optim": {"state": states}}, tmp_path / "c")

    made = ready(LLAMA, "huggingface", "megatron", zero_centered=True).apply(reshard.open(tmp_path / "c"))

    norm = "decoder.layers.0.input_layernorm.weight"
    assert torch.equal(made[f"model.{norm}"][...], rows - 1)
    assert torch.equal(made[f"model.{norm}"][1:], rows[1:] - 1)
    assert torch.equal(made[f"optim.state.{norm}.fp32_param"][...], rows - 1)
    assert torch.equal(made[f"optim.state.{norm}.exp_avg"][...], rows * 3)
    assert made[f"optim.state.{norm}.step"][...] == 4
    assert torch.equal(made["model.decoder.layers.0.self_attention.linear_proj.weight"][...], rows)
    back = ready(LLAMA, "megatron", "huggingface", zero_centered=True).apply(made)
    assert reshard.compare(back, tmp_path / "c").ok
    # a family whose norms are centred so already keeps them
    gemma = ready(Decoder("gemma2", 4, 2, 8, 53), "huggingface", "megatron").apply(reshard.open(tmp_path / "c"))
    assert torch.equal(gemma[f"model.{norm}"][...], rows)


def test_norms_that_would_lose_digits_are_refused(tmp_path: Path) -> None:
    rows = torch.tensor([0.5, 0.001, 2.0], dtype=torch.bfloat16)
    name, norm = "model.norm.weight", "decoder.final_layernorm.weight"
    reshard.save({name: rows}, tmp_path / "c")
    stored = reshard.open(tmp_path / "c")
    plus_one = ready(GEMMA, "huggingface", "megatron", zero_centered=False)

    with pytest.raises(NormalizationError, match=r"'model.norm.weight' plus 1.0 would lose digits in .*element \[1\]"):
        plus_one.apply(stored)[norm]
    target = {norm: torch.zeros(3, dtype=torch.bfloat16)}
    with pytest.raises(NormalizationError, match="would lose digits"):
        reshard.load(target, tmp_path / "c", mapping=plus_one)
    assert torch.equal(target[norm], torch.zeros(3, dtype=torch.bfloat16))

    rounded = ready(GEMMA, "huggingface", "megatron", zero_centered=False, exact=False)
    assert torch.equal(rounded.apply(stored)[norm][...], rows + 1)
    wider = Mapping([Cast("{name+}", "float32", old="bfloat16")]) | plus_one
    made = wider.apply(stored)
    assert torch.equal(made[norm][...], rows.float() + 1)
    assert torch.equal(wider.inverse().apply(made)[name][...], rows)


def test_integers_get_no_offset(tmp_path: Path) -> None:
    reshard.save({"model.norm.weight": torch.arange(3)}, tmp_path / "c")
    made = ready(LLAMA, "huggingface", "megatron", zero_centered=True).apply(reshard.open(tmp_path / "c"))

    with pytest.raises(NormalizationError, match="of int64 cannot get an offset"):
        made["decoder.final_layernorm.weight"]


def test_gpt_oss_in_each_naming(tmp_path: Path) -> None:
    """Gate and up alternate in the columns on disk."""
    torch.manual_seed(0)
    block = "model.layers.0.mlp.experts."
    up, bias = torch.randn(4, 6, 10), torch.randn(4, 10)
    reshard.save({f"{block}gate_up_proj": up, f"{block}gate_up_proj_bias": bias}, tmp_path / "c")
    model = Decoder("gpt_oss", 4, 2, 8, 53, expert_size=5)
    stored = reshard.open(tmp_path / "c")

    plain = ready(model, "huggingface", "plain").apply(stored)
    titan = ready(model, "huggingface", "torchtitan").apply(stored)
    megatron = ready(model, "huggingface", "megatron", transformer_engine=True).apply(stored)

    assert torch.equal(plain[f"{block}2.gate_proj.weight"][...], up[2, :, 0::2].T)
    assert torch.equal(plain[f"{block}2.up_proj.bias"][...], bias[2, 1::2])
    inner = "layers.0.moe.routed_experts.inner_experts."
    assert torch.equal(titan[f"{inner}mlp1_weight_EGD"][...], up.transpose(1, 2))
    assert torch.equal(titan[f"{inner}mlp1_bias_EG"][...], bias)
    fused = megatron["decoder.layers.0.mlp.experts.linear_fc1.weight3"]
    assert torch.equal(fused[...], torch.cat([up[3, :, 0::2], up[3, :, 1::2]], dim=1).T)
    assert torch.equal(fused[3:8:2, 1:3], fused[...][3:8:2, 1:3])
    assert "decoder.layers.0.mlp.experts.linear_fc1.bias0" in megatron
    with pytest.raises(NormalizationError, match="expert_size is needed"):
        ready(Decoder("gpt_oss", 4, 2, 8, 53), "huggingface", "plain")


def test_linear_attention_of_qwen3_next_is_taken_apart(tmp_path: Path) -> None:
    """By key head on disk; by kind in Megatron. Norms there are zero-centered, on disk this one is not."""
    front, inner = "model.layers.0.linear_attn.", "decoder.layers.0.self_attention."
    rows, norm = torch.randn(2 * (4 + 4 + 16 + 16), 6), torch.tensor([1.0, 0.75, 1.5])
    files = {f"{front}in_proj_qkvz.weight": rows, f"{front}norm.weight": norm}
    files[f"{front}in_proj_ba.weight"] = torch.arange(8.0).reshape(8, 1)
    reshard.save(files, tmp_path / "c")
    model = Decoder("qwen3_next", 4, 2, 8, 53, **LINEAR)

    made = ready(model, "huggingface", "megatron").apply(reshard.open(tmp_path / "c"))

    heads = rows.reshape(2, 40, 6)
    assert torch.equal(made[f"{inner}in_proj.weight.key"][...], heads[:, 4:8].reshape(8, 6))
    assert torch.equal(made[f"{inner}in_proj.weight.value"][...], heads[:, 8:24].reshape(32, 6))
    assert made[f"{inner}in_proj.weight.alpha"][...].flatten().tolist() == [2, 3, 6, 7]
    assert torch.equal(made[f"{inner}out_norm.weight"][...], norm - 1)
    back = ready(model, "megatron", "huggingface").apply(made)
    assert reshard.compare(back, tmp_path / "c").ok
    plain = ready(model, "huggingface", "megatron", zero_centered=False).apply(reshard.open(tmp_path / "c"))
    assert torch.equal(plain[f"{inner}out_norm.weight"][...], norm)


def test_gates_of_the_output_stand_behind_the_queries_of_their_group(tmp_path: Path) -> None:
    rows = {"q": torch.randn(64, 6), "k": torch.randn(16, 6), "v": torch.randn(16, 6)}
    reshard.save({f"model.layers.0.self_attn.{x}_proj.weight": t for x, t in rows.items()}, tmp_path / "c")
    model = Decoder("qwen3_5_text", 4, 2, 8, 53)

    made = ready(model, "huggingface", "megatron").apply(reshard.open(tmp_path / "c"))

    heads = rows["q"].reshape(2, 2, 2, 8, 6)  # group, head, queries or gate
    group = [heads[1, :, 0].reshape(16, 6), heads[1, :, 1].reshape(16, 6), rows["k"][8:], rows["v"][8:]]
    fused = made["decoder.layers.0.self_attention.linear_qkv.weight"][...]
    assert torch.equal(fused[48:], torch.cat(group))


@pytest.mark.parametrize(
    ("config", "dense"),
    [
        ({"first_k_dense_replace": 3, "num_nextn_predict_layers": 1}, (0, 1, 2)),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, (0, 1, 3, 5)),
        ({"moe_layer_freq": [0, 1, 1, 0, 1, 1]}, (0, 3)),  # as the configs of MiMo and MiniMax-M3 on the hub
        ({"num_dense_layers": 2}, (0, 1)),
        ({"mlp_only_layers": [4], "decoder_sparse_step": 2}, (0, 2, 4)),
        ({}, ()),
        ({"mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse", "sparse"]}, (0, 3)),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 4, "moe_layer_interval": 2}, (0, 2, 4, 5)),
    ],
)
def test_layers_without_experts(config: dict[str, Any], dense: tuple[int, ...]) -> None:
    base = {"model_type": "deepseek_v3", "num_attention_heads": 4, "vocab_size": 8, "num_hidden_layers": 6}

    assert Decoder.of({**base, **config}).dense_layers == dense


@pytest.mark.parametrize(
    "config", [{"layer_types": ["linear_attention", "full_attention"] * 3}, {"full_attention_interval": 2}]
)
def test_layers_with_linear_attention(config: dict[str, Any]) -> None:
    base = {"model_type": "qwen3_next", "num_attention_heads": 4, "vocab_size": 8, "num_hidden_layers": 6}
    made = Decoder.of({**base, **config, "linear_num_key_heads": 2, "linear_num_value_heads": 4})

    assert (made.linear_layers, made.linear_heads) == ((0, 2, 4), (2, 4))
    assert Decoder.of({**base, **config}).linear_layers == ()
