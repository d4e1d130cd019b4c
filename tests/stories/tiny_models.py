"""Small models of transformers, made of configs with random weights: nothing is downloaded.

Weights are drawn so that no two tensors are alike: norms differ from ones, biases from zeros.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

__all__ = ["DECODERS", "DENSE", "MIXTURES", "MODELS", "SEEING", "fresh", "logits", "model"]

_BASE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 53,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
_LLAMA4 = {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "intermediate_size": 16,
    "intermediate_size_mlp": 48,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "no_rope_layers": [1, 1, 1, 1],
}

_ROUTED = {**_MOE, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
_ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_intermediate_size": 16}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
}
_INDEXED = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 3}
_PER_LAYER = {"head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 53}
_GEMMA3N = {"head_dim": 8, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 53, "laurel_rank": 4}
_GEMMA3N |= {"num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 2}
_NO_PADDING = {"pad_token_id": None}  # transformers 5.24 clears the padding's row of tied weights when it loads
_SLIDING = {"layer_types": ["sliding_attention"] * 2}  # EXAONE's other layers do not rotate
_DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse"]}
_FULL = {"layer_types": ["full_attention"] * 2}

_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}

_HYBRID = {
    **_LATENT,
    "q_lora_rank": None,
    "num_local_experts": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 2,
    "layer_types": _LINEAR["layer_types"],
    "mlp_layer_types": ["sparse"] * 2,
}
_M3 = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "dense_intermediate_size": 48, "rotary_dim": 4}
_M3 |= {"intermediate_size": 16, "shared_intermediate_size": 24, "mlp_layer_types": ["dense", "sparse"]}
_M3 |= {"layer_types": ["full_attention", "minimax_m3_sparse"], "index_n_heads": 2, "index_head_dim": 8}

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"head_dim": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_tied": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen2_moe": ("Qwen2Moe", {**_MOE, "shared_expert_intermediate_size": 24}),
    "qwen3_moe": ("Qwen3Moe", {**_MOE, "head_dim": 8}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "deepseek_v2": ("DeepseekV2", {**_LATENT, "topk_method": "greedy", "q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3", _LATENT),
    "phi3": ("Phi3", {}),
    "gemma": ("Gemma", {"head_dim": 8}),
    "gemma2": ("Gemma2", {"head_dim": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3_text": ("Gemma3", {"head_dim": 8, **_FULL}),
    "gpt_oss": ("GptOss", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama4_text": ("Llama4", _LLAMA4),
    "granite": ("Granite", {}),
    "ministral": ("Ministral", {"head_dim": 8}),
    "ministral3": ("Ministral3", {"head_dim": 8}),
    "cwm": ("Cwm", {"head_dim": 8, **_FULL}),
    "seed_oss": ("SeedOss", {"head_dim": 8, "attention_bias": True}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 1], **_FULL}),
    "helium": ("Helium", {"head_dim": 8}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 8}),
    "stablelm": ("StableLm", {}),
    "glm": ("Glm", {"head_dim": 8}),
    "glm4": ("Glm4", {"head_dim": 8}),
    "exaone4": ("Exaone4", {"sliding_window": None, **_FULL}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", _FULL),
    "cohere": ("Cohere", {}),
    "cohere2": ("Cohere2", _FULL),
    "hunyuan_v1_dense": ("HunYuanDenseV1", {"head_dim": 8}),
    "arcee": ("Arcee", {}),
    "jais2": ("Jais2", {}),
    "nemotron": ("Nemotron", {}),
    "starcoder2": ("Starcoder2", {}),
    "vaultgemma": ("VaultGemma", {"head_dim": 8, **_FULL}),
    "youtu": ("Youtu", {**{k: _LATENT[k] for k in _LATENT if k.endswith(("_rank", "_dim", "_heads"))}, **_NO_PADDING}),
    "mellum": ("Mellum", {**_MOE, "head_dim": 8, **_FULL, "mlp_layer_types": ["sparse"] * 2}),
    "phimoe": ("Phimoe", {"num_local_experts": 4}),
    "minimax_m2": ("MiniMaxM2", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "flex_olmo": ("FlexOlmo", {"num_experts": 4, "num_experts_per_tok": 2}),
    "dots1": ("Dots1", {**_ROUTED, "norm_topk_prob": True, "head_dim": 8, "first_k_dense_replace": 1, **_FULL}),
    "glm4_moe": ("Glm4Moe", {**_ROUTED, "head_dim": 8, "use_qk_norm": True, "attention_bias": True}),
    "solar_open": ("SolarOpen", {**_ROUTED, "head_dim": 8}),
    "exaone_moe": (
        "ExaoneMoe",
        {**_ROUTED, "num_shared_experts": 1, **_SLIDING, "mlp_layer_types": ["dense", "sparse"]},
    ),
    "ernie4_5_moe": ("Ernie4_5_Moe", _ERNIE),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {"num_experts": 4, "moe_topk": 2, "head_dim": 8}),
    "granitemoe": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granitemoeshared": (
        "GraniteMoeShared",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24},
    ),
    "glm4_moe_lite": ("Glm4MoeLite", {**_LATENT, "rms_norm_eps": 1e-6, **_DENSE_FIRST}),
    "qwen3_next": ("Qwen3Next", {**_MOE, **_LINEAR, "shared_expert_intermediate_size": 24}),
    "qwen3_5_text": ("Qwen3_5", _LINEAR),
    "internlm3": ("InternLM3", {"head_dim": 8}),
    "iquestcoder": ("IQuestCoder", {"head_dim": 8}),
    "granite_swa": ("GraniteSWA", _FULL),
    "hyperclovax": ("HyperCLOVAX", {"head_dim": 8, "use_post_norm": True}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"]}),
    "lfm2_moe": (
        "Lfm2Moe",
        {**_MOE, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1, "use_expert_bias": True},
    ),
    "minimax": (
        "MiniMax",
        {"num_local_experts": 4, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "jamba": (
        "Jamba",
        {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    ),
    "mimo_v2_flash": ("MiMoV2Flash", {**_ROUTED, "head_dim": 8, "v_head_dim": 8}),
    "cohere2_moe": ("Cohere2Moe", {**_MOE, "head_dim": 8, **_FULL}),
    "hy_v3": ("HYV3", {**_MOE, "head_dim": 8}),
    "afmoe": ("Afmoe", {**_MOE, "head_dim": 8, **_SLIDING, "num_shared_experts": 1}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "layers_block_type": ["mamba", "attention"],
        },
    ),
    "bamba": ("Bamba", {**_MAMBA, "attn_layer_indices": [1], "mamba_n_groups": 1}),
    "falcon_h1": ("FalconH1", {**_MAMBA, "head_dim": 8, "mamba_d_ssm": 64}),
    "olmo": ("Olmo", {}),
    "bitnet": ("BitNet", {}),
    "apertus": ("Apertus", {"head_dim": 8}),
    "diffllama": ("DiffLlama", {}),
    "phi": ("Phi", {}),
    "nanochat": ("NanoChat", {"head_dim": 8}),
    "exaone": ("Exaone", {"head_dim": 8}),
    "nemotron_h": (
        "NemotronH",
        {
            **_ROUTED,
            "head_dim": 8,
            "layers_block_type": ["mamba", "moe", "attention", "mlp"],
            "moe_shared_expert_intermediate_size": 24,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 1,
            "use_mamba_kernels": False,
        },
    ),
    "minicpm3": ("MiniCPM3", {k: _LATENT[k] for k in _LATENT if k.endswith(("_rank", "_dim", "_heads"))}),
    "laguna": ("Laguna", {**_MOE, "head_dim": 8, "shared_expert_intermediate_size": 24, **_FULL}),
    "axk1": ("AXK1", _LATENT),
    "sarvam_mla": ("SarvamMLA", _LATENT),
    "deepseek_v32": ("DeepseekV32", {**_LATENT, **_INDEXED}),
    "glm_moe_dsa": ("GlmMoeDsa", {**_LATENT, **_INDEXED, "rms_norm_eps": 1e-6, **_DENSE_FIRST}),
    "longcat_flash": (
        "LongcatFlash",
        {**_LATENT, "num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "moe_topk": 2}
        | {"zero_expert_num": 2, "head_dim": 4},
    ),
    "kimi_linear": ("KimiLinear", _HYBRID),
    "bailing_hybrid": ("BailingHybrid", {**_HYBRID, "head_dim": 8, **_DENSE_FIRST}),
    "sarvam_moe": ("SarvamMoE", {**_ROUTED, "head_dim": 8, "attention_bias": True}),
    # transformers 5.24 saves three equal convolutions, whatever the heads
    "olmo_hybrid": ("OlmoHybrid", {**_LINEAR, "linear_num_value_heads": 2, "linear_key_head_dim": 8}),
    "gemma4_text": ("Gemma4", _PER_LAYER),
    "gemma3n_text": ("Gemma3n", _GEMMA3N),
    "axk2": ("AXK2", {**_LATENT, **_INDEXED, "gated_norm_rank": 4}),
    "mistral4": ("Mistral4", _LATENT),
    "qwen3_5_moe_text": ("Qwen3_5Moe", {**_MOE, **_LINEAR, "shared_expert_intermediate_size": 24}),
}
"""The class's first part, and what its config says beside the sizes that all have."""
_CODE = {"Exaone": "Llama", "InternLM3": "Llama", "IQuestCoder": "Llama", "SarvamMLA": "DeepseekV3"}
_CODE |= {"SarvamMoE": "Glm4Moe", "MiniMaxM3VL": "MiniMaxM3Sparse"}
"""Classes of configs whose models are of another class."""
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "llama4_text", "glm4_moe", "dots1")
MIXTURES += ("solar_open", "exaone_moe", "mellum", "granitemoe", "granitemoeshared", "glm4_moe_lite", "qwen3_next")
MIXTURES += ("qwen3_5_moe_text", "hy_v3", "sarvam_mla", "sarvam_moe", "deepseek_v32", "glm_moe_dsa")
DENSE = ("llama", "mistral", "qwen2", "qwen3", "phi3", "granite", "ministral", "ministral3", "cwm", "seed_oss")
DENSE += ("smollm3", "helium", "ernie4_5", "stablelm", "glm", "arcee", "jais2", "nemotron", "starcoder2", "youtu")
DENSE += ("gemma", "gemma2", "gemma3_text", "glm4", "exaone4", "qwen3_5_text", "internlm3", "iquestcoder")
DENSE += ("granite_swa", "hyperclovax")
"""Families that Megatron-core computes as transformers does: `tests/reshard/integrations/megatron_models.py`."""
_OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "bert": ("BertConfig", "BertForMaskedLM", _BASE),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", _BASE),
    "t5": ("T5Config", "T5ForConditionalGeneration", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2}),
    "bart": ("BartConfig", "BartForConditionalGeneration", {"d_model": 32, "encoder_ffn_dim": 48}),
}
_LAYERS = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
MODELS = (*DECODERS, *_OTHERS)
_EYES = {"depth": 2, "num_heads": 2, "patch_size": 4, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24}
_ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}}
_HALF_ROPE = {"rope_parameters": {**_ROPE["rope_parameters"], "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}}
_DEEP = {**_EYES, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
_PICTURES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
_PIXELS = {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16, "intermediate_size": 64}
_CLIP = {**_PICTURES, "model_type": "clip_vision_model", "intermediate_size": 24, "projection_dim": 16}


def _of(family: str, **more: Any) -> dict[str, Any]:
    return {"model_type": family, "tie_word_embeddings": False, **more}


_HEARS = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "output_dim": 32}
_HEARS |= {"num_mel_bins": 8, "downsample_hidden_size": 8, "n_window": 4}

SEEING: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VL", _ROPE, {**_EYES, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}),
    "qwen2_5_vl": ("Qwen2_5_VL", _ROPE, _EYES),
    "qwen3_vl": ("Qwen3VL", {**_ROPE, "head_dim": 8}, _DEEP),
    "qwen3_vl_moe": ("Qwen3VLMoe", {**_ROPE, **_MOE, "head_dim": 8, "moe_intermediate_size": 24}, _DEEP),
    "qwen3_5": ("Qwen3_5", _LINEAR, {**_EYES, "num_position_embeddings": 16}),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {**_MOE, **_LINEAR, "shared_expert_intermediate_size": 24},
        {**_EYES, "num_position_embeddings": 16},
    ),
    "glm4v": ("Glm4v", _ROPE, _EYES),
    "glm4v_moe": ("Glm4vMoe", {**_HALF_ROPE, **_ROUTED, "head_dim": 8}, _EYES),
    "gemma4": ("Gemma4", _PER_LAYER, {**_PICTURES, "intermediate_size": 24, "head_dim": 8}),
    "mistral3": (
        "Mistral3",
        {"model_type": "mistral", "head_dim": 8, "tie_word_embeddings": False},
        {**_PICTURES, "model_type": "pixtral", "intermediate_size": 24, "head_dim": 8},
    ),
    "llama4": ("Llama4", _LLAMA4, {**_PICTURES, **_PIXELS}),
    "gemma3": ("Gemma3", {"head_dim": 8}, {**_PICTURES, "intermediate_size": 24}),
    "minimax_m3_vl": ("MiniMaxM3VL", _M3, {**_PICTURES, "intermediate_size": 24}),
    "glm46v": ("Glm46V", {**_ROPE, "model_type": "glm4v_text"}, {**_EYES, "model_type": "glm4v_vision"}),
    "glm_ocr": ("GlmOcr", _ROPE, _EYES),
    "llava": ("Llava", _of("llama"), _CLIP),
    "llava_next": ("LlavaNext", _of("mistral", head_dim=8), _CLIP),
    "llava_onevision": ("LlavaOnevision", _of("qwen2"), {**_CLIP, "model_type": "siglip_vision_model"}),
    "internvl": ("InternVL", _of("qwen3_moe", **_MOE, head_dim=8), {**_PICTURES, "intermediate_size": 24}),
    "aya_vision": ("AyaVision", _of("cohere2", **_FULL), {**_CLIP, "model_type": "siglip_vision_model"}),
    "cohere2_vision": ("Cohere2Vision", _of("cohere2", **_FULL), {**_CLIP, "model_type": "siglip_vision_model"}),
    "got_ocr2": (
        "GotOcr2",
        _of("qwen2"),
        {**_PICTURES, "image_size": 64, "patch_size": 16, "mlp_dim": 24, "output_channels": 8, "window_size": 2}
        | {"global_attn_indexes": [1]},
    ),
    "paligemma": ("PaliGemma", _of("gemma2", head_dim=8), {**_CLIP, "model_type": "siglip_vision_model"}),
    "vipllava": ("VipLlava", _of("llama"), _CLIP),
    "idefics3": ("Idefics3", _of("llama"), {**_PICTURES, "intermediate_size": 24}),
    "smolvlm": ("SmolVLM", _of("llama"), {**_PICTURES, "intermediate_size": 24}),
    "lfm2_vl": (
        "Lfm2Vl",
        _of("lfm2", layer_types=["conv", "full_attention"]),
        {**_PICTURES, "model_type": "siglip2_vision_model", "intermediate_size": 24, "num_patches": 16},
    ),
    "exaone4_5": ("Exaone4_5_", _of("exaone4", sliding_window=None, **_FULL), {**_EYES, "num_key_value_heads": 1}),
    "video_llama_3": ("VideoLlama3", _of("qwen2"), {**_PICTURES, "intermediate_size": 24}),
    "ovis2": ("Ovis2", _of("qwen2"), {**_PICTURES, "intermediate_size": 24, "vocab_size": 16}),
    "qwen2_5_omni_thinker": ("Qwen2_5OmniThinker", _ROPE, {**_EYES, "fullatt_block_indexes": [1]}),
    "qwen3_omni_moe_thinker": ("Qwen3OmniMoeThinker", {**_ROPE, **_MOE, "head_dim": 8}, _DEEP),
    "kimi_k25": (
        "Kimi_K25",
        _of("deepseek_v3", **_LATENT),
        {**_PICTURES, "intermediate_size": 24, "pos_emb_height": 4, "pos_emb_width": 4},
    ),
    "deepseek_vl": ("DeepseekVL", _of("llama"), {**_CLIP, "model_type": "siglip_vision_model"}),
}
"""The class's first part, and what its configs say of the decoder and of the vision tower."""


def fresh(name: str) -> Any:
    """The model as it begins; skips the test where transformers is not installed."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is to be looked up anywhere
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if name in DECODERS:
        kind, more = DECODERS[name]
        config, cls = (
            f"{kind}TextConfig" if name.endswith("_text") else f"{kind}Config",
            f"{_CODE.get(kind, kind)}ForCausalLM",
        )
        more = {**_BASE, **more}
    elif name in SEEING:
        kind, text, eyes = SEEING[name]
        config, cls = f"{kind}Config", f"{_CODE.get(kind, kind)}ForConditionalGeneration"
        tied = {key: value for key, value in text.items() if key == "tie_word_embeddings"}
        tied |= {"hidden_size": 32, "vocab_size": 53} if name == "ovis2" else {}  # which it reads there
        more = {"text_config": {**_BASE, **text}, "vision_config": eyes, **tied}
        more |= {"audio_config": _HEARS} if "omni" in name else {}
        more |= {"projection_hidden_size": 16} if name == "kimi_k25" else {}
    else:
        config, cls, more = _OTHERS[name]
        more = {**more, **(_LAYERS if name == "bart" else {}), "vocab_size": 53, "decoder_ffn_dim": 48, "num_heads": 4}
        more |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
    return getattr(transformers, cls)(getattr(transformers, config)(**more)).eval()


def model(name: str, seed: int = 0) -> Any:
    """The model with weights drawn from `seed`."""
    made = fresh(name)
    drawn = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in made.state_dict().values():
            if tensor.is_floating_point():
                drawn_values = torch.rand(tensor.shape, generator=drawn) * 0.4 - 0.2
                tensor.copy_((drawn_values * 4096).round() / 4096)  # 1 more or less loses no digits
    return made


def logits(made: Any) -> torch.Tensor:
    """What it says to a few tokens."""
    tokens = torch.arange(1, 13).reshape(2, 6)
    if type(made).__name__ == "Llama4ForConditionalGeneration":
        made = made.language_model  # of the whole, transformers 5.24 cannot make the result
    more = {"decoder_input_ids": tokens} if made.config.is_encoder_decoder else {}
    # of tokens alone: transformers 5.24 fails in the model around it, which asks for an output that there is not
    asked = made.language_model if made.config.model_type == "llama4" else made
    with torch.no_grad():
        found: torch.Tensor = asked(tokens, **more).logits
    return found
