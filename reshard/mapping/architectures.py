"""What is known about each architecture: one line each, which says how its decoder differs from
Llama's.

All ready mappings are built from this table and the model's config. *Plain* names are those of
Llama's, Qwen3-MoE's, and DeepSeek's files: one matrix each for gate, up, queries, keys, values, and
every expert.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping as Dict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from planners.units import format_some
from reshard.errors import CheckpointNotFoundError, NormalizationError, did_you_mean, option_error

ENGINES = {"vllm": "fused_qkv_a_proj", "sglang": "fused_qkv_a_proj_with_mqa"}
"""By inference engine: its name for the fused first projections of latent attention."""


@dataclass(frozen=True)
class Architecture:
    """How a family's decoder differs from Llama's. Names are relative to a layer."""

    namings: tuple[str, ...] = ()
    """Supported naming schemes besides those of Hugging Face."""
    names: Dict[str, str] = field(default_factory=dict)
    """Names on disk that differ from the plain ones, with the plain names."""
    fused: tuple[str, ...] = ()
    """Projections that are fused on disk: "qkv", "gate_up"."""
    norms: tuple[str, str, str, str] = ("input_layernorm", "", "post_attention_layernorm", "")
    """Plain names of the norms before and after attention, and before and after feed-forward. "" if
    there is none."""
    experts: str = ""
    """How experts are stored on disk: "apart", "packed" (as in memory), "stacked" (gate and up
    fused, with Granite's names), or "transposed" (stacks of transposed matrices)."""
    shared: str = "shared_experts"
    """Plain name of the shared experts, which process every token."""
    memory: Dict[str, str] = field(default_factory=dict)
    """Names in memory that differ from those on disk (for experts "apart": from the plain ones)."""
    latent: bool = False
    """Has multi-head latent attention."""
    gated: bool = True
    """Feed-forward layers have a gate."""
    output_gates: bool = False
    """In the query projection, the queries of each head are followed by the gate of the head's output."""
    zero_centered: bool = False
    """Norm weights are stored as differences from 1."""
    joined: tuple[str, ...] = ()
    """Modules with one convolution or one `gate_up_proj` in memory, and several tensors on disk."""
    outer: Dict[str, str] = field(default_factory=dict)
    """Full names on disk that are replaced before `names` applies, if layers have another prefix."""
    pairs: bool = False
    """torchtitan and llama.cpp rotate adjacent pairs; on disk, the halves of a head are rotated."""


_MEGATRON = ("megatron",)
_SERVED = ("megatron", *ENGINES)
_LLAMA = Architecture((*_SERVED, "torchtitan", "gguf", "transformer_engine"))
_MOE = Architecture(_SERVED, experts="apart")
_TITAN_MOE = replace(_MOE, namings=(*_SERVED, "torchtitan"))
_DEEPSEEK = replace(_TITAN_MOE, latent=True)
_GEMMA = Architecture(_SERVED, zero_centered=True)
_NO_GATE = Architecture(_MEGATRON, gated=False)

_BOTH_SIDES = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_AFTER = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
_ONE = ("input_layernorm", "", "", "")

_BIAS = "mlp.gate.e_score_correction_bias"
_BLOCK = "block_sparse_moe."
_MIXTRAL = {
    f"{_BLOCK}gate.weight": "mlp.gate.weight",
    f"{_BLOCK}experts.{{e}}.w1.weight": "mlp.experts.{e}.gate_proj.weight",
    f"{_BLOCK}experts.{{e}}.w2.weight": "mlp.experts.{e}.down_proj.weight",
    f"{_BLOCK}experts.{{e}}.w3.weight": "mlp.experts.{e}.up_proj.weight",
}
_GRANITE_MOE = Architecture(
    _MEGATRON,
    {f"{_BLOCK}router.layer.weight": "mlp.gate.weight"},
    experts="stacked",
    memory={
        f"{_BLOCK}router.layer.weight": f"{_BLOCK}router.weight",
        f"{_BLOCK}input_linear.weight": f"{_BLOCK}experts.gate_up_proj",
        f"{_BLOCK}output_linear.weight": f"{_BLOCK}experts.down_proj",
    },
)
_GLM4_NORMS = {
    "post_self_attn_layernorm.weight": "post_attention_layernorm.weight",
    "post_attention_layernorm.weight": "pre_feedforward_layernorm.weight",
    "post_mlp_layernorm.weight": "post_feedforward_layernorm.weight",
}
_HUNYUAN = {
    "self_attn.query_layernorm.weight": "self_attn.q_norm.weight",
    "self_attn.key_layernorm.weight": "self_attn.k_norm.weight",
}
_AFMOE = {"mlp.router.gate.weight": "mlp.gate.weight", "mlp.expert_bias": _BIAS}
_HY_V3 = _AFMOE | {"mlp.shared_mlp.{part}.weight": "mlp.shared_experts.{part}.weight"}
_JAMBA = {
    "feed_forward.{part}_proj.weight": "mlp.{part}_proj.weight",
    "feed_forward.experts.{e}.{part}.weight": "mlp.experts.{e}.{part}.weight",
    "feed_forward.router.weight": "mlp.gate.weight",
}
_LFM2 = {
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "self_attn.out_proj.weight": "self_attn.o_proj.weight",
    "self_attn.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attn.k_layernorm.weight": "self_attn.k_norm.weight",
}
_LFM2_MOE = _LFM2 | {
    "feed_forward.experts.{e}.w1.weight": "mlp.experts.{e}.gate_proj.weight",
    "feed_forward.experts.{e}.w2.weight": "mlp.experts.{e}.down_proj.weight",
    "feed_forward.experts.{e}.w3.weight": "mlp.experts.{e}.up_proj.weight",
    "feed_forward.gate.weight": "mlp.gate.weight",
    "feed_forward.expert_bias": _BIAS,
}
_STACKS = {"mlp.experts.{part}_proj": "feed_forward.experts.{part}_proj"}
_EXAONE = {
    "ln_1.weight": "input_layernorm.weight",
    "ln_2.weight": "post_attention_layernorm.weight",
    "attn.attention.q_proj.weight": "self_attn.q_proj.weight",
    "attn.attention.k_proj.weight": "self_attn.k_proj.weight",
    "attn.attention.v_proj.weight": "self_attn.v_proj.weight",
    "attn.attention.out_proj.weight": "self_attn.o_proj.weight",
    "mlp.c_fc_0.weight": "mlp.gate_proj.weight",
    "mlp.c_fc_1.weight": "mlp.up_proj.weight",
    "mlp.c_proj.weight": "mlp.down_proj.weight",
}
_NEMOTRON_H = {
    "mixer.q_proj.{kind}": "self_attn.q_proj.{kind}",
    "mixer.k_proj.{kind}": "self_attn.k_proj.{kind}",
    "mixer.v_proj.{kind}": "self_attn.v_proj.{kind}",
    "mixer.o_proj.{kind}": "self_attn.o_proj.{kind}",
    "mixer.up_proj.{kind}": "mlp.up_proj.{kind}",
    "mixer.down_proj.{kind}": "mlp.down_proj.{kind}",
    "mixer.experts.{e}.{part}.weight": "mlp.experts.{e}.{part}.weight",
    "mixer.shared_experts.{part}.{kind}": "mlp.shared_experts.{part}.{kind}",
    "mixer.gate.{rest}": "mlp.gate.{rest}",
}
_LAGUNA = {
    "mlp.experts.e_score_correction_bias": _BIAS,
    "mlp.shared_expert.{part}.weight": "mlp.shared_experts.{part}.weight",
}
_HUNYUAN_MOE = {
    "mlp.gate.wg.weight": "mlp.gate.weight",
    "mlp.shared_mlp.{part}.weight": "mlp.shared_experts.{part}.weight",
    **_HUNYUAN,
}
_AROUND = Architecture()
"""Models with a decoder of another family, which `text_config` names."""
_FORGET = {
    "self_attn.dt_bias": "self_attn.forget_gate.dt_bias",
    "self_attn.A_log": "self_attn.forget_gate.A_log",
    "self_attn.f_proj.weight": "self_attn.forget_gate.f_proj.weight",
    "self_attn.f_a_proj.weight": "self_attn.forget_gate.f_a_proj.weight",
    "self_attn.f_b_proj.weight": "self_attn.forget_gate.f_b_proj.weight",
}
_KIMI = _MIXTRAL | {
    f"{_BLOCK}gate.e_score_correction_bias": _BIAS,
    f"{_BLOCK}shared_experts.{{part}}.weight": "mlp.shared_experts.{part}.weight",
}
_WORDS = {
    "model.word_embeddings.weight": "model.embed_tokens.weight",
    "model.layers.{i}.attention.{rest+}": "model.layers.{i}.self_attn.{rest+}",
}
_BAILING = {"self_attn.dense.{kind}": "self_attn.o_proj.{kind}", "mlp.gate.expert_bias": _BIAS}
_SARVAM = _BAILING | _HUNYUAN | {"self_attn.query_key_value.{kind}": "self_attn.qkv_proj.{kind}"}
_OLMO = {
    "attention_layer_norm.weight": "input_layernorm.weight",
    "feedforward_layer_norm.weight": "post_attention_layernorm.weight",
}
_MINIMAX = {
    "self_attn.index_{x}_proj.weight": "self_attn.indexer.{x}_proj.weight",
    "self_attn.index_{x}_norm.weight": "self_attn.indexer.{x}_norm.weight",
}
_FC = {"mlp.fc1.{kind}": "mlp.up_proj.{kind}", "mlp.fc2.{kind}": "mlp.down_proj.{kind}"}
_STARCODER = {"mlp.c_fc.{kind}": "mlp.up_proj.{kind}", "mlp.c_proj.{kind}": "mlp.down_proj.{kind}"}


_AXK2 = {
    "self_attn.q_b_proj.{kind}": "self_attn.q_gate_proj.{kind}",
    "{norm}.W_down.weight": "{norm}.mlp.fc1.weight",
    "{norm}.W_up.weight": "{norm}.mlp.fc2.weight",
}


def undone(names: Dict[str, str]) -> dict[str, str]:
    """Return plain name -> name on disk for everything but experts, whose names in memory are those on disk."""
    return {plain: disk for disk, plain in names.items() if "{e}" not in disk}


_TABLE = {
    "llama mistral": replace(_LLAMA, pairs=True),
    "qwen2": _LLAMA,
    "qwen3": replace(_LLAMA, namings=(*_SERVED, "torchtitan", "gguf")),
    "phi3": Architecture(_SERVED, fused=("qkv", "gate_up")),
    "gemma": _GEMMA,
    "gemma2 gemma3_text": replace(_GEMMA, norms=_BOTH_SIDES),
    "vaultgemma": replace(_GEMMA, namings=(), norms=("input_layernorm", "", "pre_feedforward_layernorm", "")),
    "granite ministral3 ernie4_5 internlm3 iquestcoder": Architecture(_SERVED),
    "ministral cwm seed_oss smollm3 helium stablelm granite_swa": Architecture(
        _MEGATRON
    ),
    "hyperclovax": Architecture(
        _MEGATRON, norms=("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")
    ),
    "lfm2": Architecture(names=_LFM2),
    "bamba falcon_h1": Architecture(names=_JAMBA | {"pre_ff_layernorm.weight": "post_attention_layernorm.weight"}),
    "olmo bitnet apertus diffllama qwen2_5_omni_thinker": Architecture(),
    "nanochat": Architecture(names=_FC, gated=False),
    "phi": Architecture(names=_FC | {"self_attn.dense.{kind}": "self_attn.o_proj.{kind}"}, gated=False),
    "exaone": Architecture(
        _MEGATRON, _EXAONE, memory=_EXAONE, outer={
            "transformer.wte.weight": "model.embed_tokens.weight", "transformer.ln_f.weight": "model.norm.weight",
            "transformer.h.{rest+}": "model.layers.{rest+}",
        },
    ),
    "nemotron_h": Architecture(
        (), _NEMOTRON_H, experts="apart", gated=False, outer={"backbone.{rest+}": "model.{rest+}"},
        memory=undone(_NEMOTRON_H) | {"mlp.experts.{part}_proj": "mixer.experts.{part}_proj"},
    ),
    "minicpm3": Architecture(latent=True),
    "laguna": Architecture((), _LAGUNA, experts="apart"),
    "axk1": Architecture(
        experts="apart", latent=True, memory={"post_mlp_layernorm.weight": "mlp.post_mlp_layernorm.weight"}
    ),
    "axk2": Architecture(experts="apart", latent=True, memory=_AXK2),
    "mistral4": Architecture(experts="packed", latent=True),
    "glm": Architecture(_MEGATRON, fused=("gate_up",)),
    "glm4": Architecture(_SERVED, _GLM4_NORMS, ("gate_up",), _BOTH_SIDES),
    "exaone4": Architecture(_SERVED, norms=_AFTER),
    "olmo2 olmo3": Architecture(norms=_AFTER),
    "cohere cohere2": Architecture(tuple(ENGINES), norms=_ONE),
    "hunyuan_v1_dense": Architecture(names=_HUNYUAN),
    "arcee jais2": _NO_GATE,
    "nemotron": replace(_NO_GATE, zero_centered=True),
    "starcoder2": replace(_NO_GATE, names=_STARCODER),
    "youtu": Architecture(_MEGATRON, latent=True),
    "qwen2_moe": replace(_MOE, shared="shared_expert"),
    "qwen3_moe": _TITAN_MOE,
    "mixtral": replace(_TITAN_MOE, names=_MIXTRAL, pairs=True),
    "phimoe": Architecture((), _MIXTRAL, experts="apart", memory={"mlp.gate.weight": "mlp.router.weight"}),
    "minimax_m2": Architecture(
        tuple(ENGINES), _MIXTRAL | {f"{_BLOCK}e_score_correction_bias": _BIAS}, experts="apart",
        memory={_BIAS: "mlp.e_score_correction_bias"},
    ),
    "minimax": Architecture((), _MIXTRAL, experts="apart"),
    "lfm2_moe": Architecture((), _LFM2_MOE, experts="apart", memory=undone(_LFM2_MOE) | _STACKS),
    "jamba": Architecture((), _JAMBA, experts="apart", memory=undone(_JAMBA) | _STACKS),
    "qwen3_omni_moe_thinker": replace(_MOE, namings=()),
    "mimo_v2_flash": replace(_MOE, namings=(), memory={"self_attn.attention_sink_bias": "self_attn.sinks"}),
    "cohere2_moe": replace(_MOE, namings=(), norms=_ONE),
    "hy_v3": replace(_MOE, namings=_MEGATRON, names=_HY_V3, memory={_BIAS: "mlp.e_score_correction_bias"}),
    "afmoe": Architecture((), _AFMOE, experts="apart", memory=undone(_AFMOE)),
    "olmoe": replace(_MOE, namings=tuple(ENGINES)),
    "longcat_flash": replace(_MOE, namings=()),
    "kimi_linear": Architecture((), _KIMI, experts="apart", memory=_FORGET, joined=("self_attn",)),
    "bailing_hybrid": Architecture(
        (), _BAILING, experts="apart", memory=_FORGET, joined=("self_attn",), outer=_WORDS
    ),
    "sarvam_moe": Architecture(_MEGATRON, _SARVAM, ("qkv",), experts="apart", outer=_WORDS),
    "olmo_hybrid": Architecture(names=_OLMO, memory=_OLMO, joined=("linear_attn",)),
    "flex_olmo": replace(_MOE, namings=(), norms=_AFTER),
    "glm4_moe": _MOE,
    "dots1 mellum solar_open": replace(_MOE, namings=_MEGATRON),
    "exaone_moe": replace(_MOE, names={"mlp.e_score_correction_bias": _BIAS}),
    "ernie4_5_moe": replace(
        _MOE, namings=(), names={"mlp.moe_statics.e_score_correction_bias": _BIAS},
        memory={_BIAS: "mlp.gate.moe_statics.e_score_correction_bias"},
    ),
    "hunyuan_v1_moe": Architecture(
        (), _HUNYUAN_MOE, experts="apart", memory=undone(_HUNYUAN_MOE)
    ),
    "granitemoe granitemoeshared": _GRANITE_MOE,
    "granitemoehybrid": replace(_GRANITE_MOE, namings=()),
    "deepseek_v2 deepseek_v3": _DEEPSEEK,
    "kimi_k2": replace(_DEEPSEEK, namings=_SERVED),
    "glm4_moe_lite sarvam_mla deepseek_v32 glm_moe_dsa": replace(_DEEPSEEK, namings=_MEGATRON),
    "gpt_oss": Architecture(("megatron", "torchtitan"), experts="transposed"),
    "llama4_text llama4": Architecture(_MEGATRON, experts="transposed"),
    "qwen3_next qwen3_5_moe_text qwen3_5_moe": replace(
        _MOE, namings=_MEGATRON, shared="shared_expert", output_gates=True, zero_centered=True
    ),
    "qwen3_5_text qwen3_5": Architecture(_MEGATRON, output_gates=True, zero_centered=True),
    "qwen2_vl qwen2_5_vl qwen3_vl mistral3": Architecture(_MEGATRON),
    "minimax_m3_vl": Architecture(
        (), {f"{_BLOCK}e_score_correction_bias": _BIAS} | _KIMI, experts="apart", memory=_MINIMAX,
        joined=("mlp", "mlp.shared_experts"),
    ),
    "llava llava_next llava_onevision internvl aya_vision cohere2_vision got_ocr2 paligemma vipllava idefics3 "
    "smolvlm lfm2_vl exaone4_5 video_llama_3 ovis2 deepseek_vl kimi_k25": _AROUND,
    "glm4v glm46v glm_ocr": Architecture(names=_GLM4_NORMS, fused=("gate_up",), norms=_BOTH_SIDES),
    "glm4v_moe": replace(_MOE, namings=_MEGATRON),
    "gemma4_text gemma4 gemma3n_text gemma3n": Architecture(norms=_BOTH_SIDES),
    "qwen3_vl_moe": Architecture(_MEGATRON, experts="transposed"),
    "gemma3": replace(_GEMMA, namings=_MEGATRON, norms=_BOTH_SIDES),
}  # fmt: skip
ARCHITECTURES = {family: known for families, known in _TABLE.items() for family in families.split()}
"""Architectures by the `model_type` of the config."""


@dataclass(frozen=True)
class Decoder:
    """The architecture of a decoder-only transformer."""

    family: str
    """The decoder's `model_type`, such as "llama"."""
    heads: int
    kv_heads: int
    head_size: int
    vocab_size: int
    layers: int = 0
    """Number of layers, without multi-token prediction layers. 0 if unknown."""
    next_layers: int = 0
    """Number of multi-token prediction layers, which follow the others."""
    dense_layers: tuple[int, ...] = ()
    """Numbers of the layers without experts, in a mixture-of-experts model."""
    expert_size: int = 0
    """Rows of an expert's gate."""
    latent_rows: tuple[int, int] = (0, 0)
    """Rows of the first projections of latent attention: for queries (0 if there is none), and for
    keys and values."""
    vision_heads: int = 0
    """Attention heads of the vision tower of a vision-language model."""
    linear_layers: tuple[int, ...] = ()
    """Numbers of the layers with linear attention."""
    linear_heads: tuple[int, int] = (1, 1)
    """Number of key heads and of value heads of linear attention."""
    linear_sizes: tuple[int, int] = (1, 1)
    """Rows of one key head and of one value head of linear attention."""
    text: str = ""
    """The `model_type` of the decoder within a vision-language model."""
    vision_size: int = 0
    """Hidden size of the vision tower of a vision-language model."""
    missing: tuple[str, ...] = ()
    """Entries that the config of a vision-language model's decoder omits because they have default values."""

    def __post_init__(self) -> None:
        """Raise NormalizationError for impossible numbers."""
        if min(self.heads, self.kv_heads, self.head_size, self.vocab_size) < 1 or self.heads % self.kv_heads:
            raise NormalizationError(f"{self.kv_heads} key/value heads do not divide {self.heads} query heads: {self}")

    @property
    def architecture(self) -> Architecture:
        """The facts about the family. Raises OptionError for an unknown family, and names the closest one."""
        found, inner, name = ARCHITECTURES.get(self.family), ARCHITECTURES.get(self.text), self.family
        if self.text and (found is _AROUND or (found and inner and inner.experts and not found.experts)):
            name = f"{self.family} around {self.text}"
            found = replace(inner, namings=()) if inner and inner.experts in ("", "apart", "packed") else None
        if found is not None:
            return found
        raise option_error(
            f"there is no ready mapping for {name!r}{did_you_mean(self.family, ARCHITECTURES, 0.85) or '.'} "
            f"Known: {format_some([*ARCHITECTURES], 8)}. If the names and shapes of one "
            "of these are the same, set the config's model_type to it; otherwise, write a Mapping of rules",
            NormalizationError,
        )

    @property
    def linear_rows(self) -> tuple[int, int, int]:
        """Rows of all queries, all keys, and all values of linear attention."""
        keys = self.linear_heads[0] * self.linear_sizes[0]
        return keys, keys, self.linear_heads[1] * self.linear_sizes[1]

    @classmethod
    def of(cls, config: Decoder | Dict[str, Any] | str | os.PathLike[str]) -> Decoder:
        """Read a `config.json`, given as its path, its folder, or its content.

        Raises CheckpointNotFoundError if there is no such file, and NormalizationError if an entry
        is missing.
        """
        if isinstance(config, Decoder):
            return config
        if not isinstance(config, Dict):
            if not isinstance(config, str | os.PathLike):
                raise NormalizationError(f"config must be a path or a dict, got {config!r:.80}")
            path = Path(config)
            path = path / "config.json" if path.is_dir() else path
            try:
                config = json.loads(path.read_text())
            except FileNotFoundError:
                raise CheckpointNotFoundError(f"there is no {path}: pass the path of a model's config.json") from None
            except (OSError, ValueError) as error:
                raise NormalizationError(f"{path} is not a config.json of a model: {error}") from None
            if not isinstance(config, Dict):
                raise NormalizationError(f"{path} is not a config.json of a model: it has a {type(config).__name__}")
            try:
                return cls.of(config)
            except NormalizationError as error:
                raise type(error)(f"{path}: {error}") from error
        try:
            return cls._of_settings(config)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            if isinstance(error, NormalizationError):
                raise
            raise NormalizationError(f"an entry of the model's config has an unexpected form: {error}") from error

    @classmethod
    def _of_settings(cls, config: Dict[str, Any]) -> Decoder:
        inner, seen = config.get("text_config") or {}, config.get("vision_config") or {}
        text = str(inner.get("model_type", ""))
        # vision-language models nest the decoder's config, but names are those of the full model
        config = {**config, **inner, "model_type": config.get("model_type")}
        needed = ("num_attention_heads", "vocab_size", *(_WITHIN if inner else ()))
        missing = tuple(key for key in ("model_type", *needed) if config.get(key) is None)
        if missing and ("model_type" in missing or not inner):
            if "model_type" not in missing:
                _ = cls(config["model_type"], 1, 1, 1, 1).architecture  # reports an unknown family first
            raise NormalizationError(f"the model's config lacks {', '.join(missing)}")
        heads, vocab = (int(1 if key in missing else config[key]) for key in needed[:2])
        size = config.get("head_dim") or max(int(config.get("hidden_size", heads)) // heads, 1)
        kv_heads = heads if missing else _number(config, "num_key_value_heads", heads)
        layers = _number(config, "num_hidden_layers")
        rows = config.get("moe_intermediate_size") or config.get("intermediate_size")
        return cls(
            str(config["model_type"]),
            heads,
            kv_heads,
            int(size),
            vocab,
            layers,
            _number(config, "num_nextn_predict_layers"),
            tuple(layer for layer in range(layers) if not _has_experts(config, layer)),
            rows if isinstance(rows, int) else 0,  # Gemma 3n has one value per layer
            (
                _number(config, "q_lora_rank"),
                _number(config, "kv_lora_rank") + _number(config, "qk_rope_head_dim"),
            ),
            _number(seen, "num_heads") or _number(seen, "num_attention_heads"),
            tuple(layer for layer in range(layers) if _is_linear(config, layer)),
            (_number(config, "linear_num_key_heads", 1), _number(config, "linear_num_value_heads", 1)),
            (_number(config, "linear_key_head_dim", 1), _number(config, "linear_value_head_dim", 1)),
            text,
            _number(seen, "hidden_size"),
            missing,
        )


_WITHIN = ("num_key_value_heads", "num_hidden_layers")
"""Entries that nested configs on the Hub omit because they have the family's default."""


def _number(config: Dict[str, Any], key: str, otherwise: int = 0) -> int:
    return int(config.get(key) or otherwise)


def _has_experts(config: Dict[str, Any], layer: int) -> bool:
    """Return True if a layer has experts. DeepSeek counts from 0 after the dense layers, others from 1."""
    if config.get("moe_layers") is not None:
        return layer in config["moe_layers"]
    if isinstance(config.get("moe_layer_freq"), list):
        return bool(config["moe_layer_freq"][layer])
    if config.get("mlp_layer_types") is not None:
        return bool(config["mlp_layer_types"][layer] == "sparse")
    if config.get("moe_layer_start_index") is not None:  # Ernie
        first, last = int(config["moe_layer_start_index"]), int(config.get("moe_layer_end_index") or -1)
        is_within = first <= layer and (last < 0 or layer <= last)
        return is_within and (layer + 1) % _number(config, "moe_layer_interval", 1) == 0
    dense = _number(config, "first_k_dense_replace") or _number(config, "num_dense_layers")
    if layer < dense or layer in (config.get("mlp_only_layers") or ()):
        return False
    step = _number(config, "decoder_sparse_step") or _number(config, "interleave_moe_layer_step", 1)
    return layer % _number(config, "moe_layer_freq", 1) == 0 and (layer + 1) % step == 0


def _is_linear(config: Dict[str, Any], layer: int) -> bool:
    """Return True if a layer has linear attention: by its type or, in older configs of Qwen3-Next,
    by the interval."""
    if config.get("linear_num_value_heads") is None:
        return False
    if config.get("layer_types") is not None:
        return bool(config["layer_types"][layer] == "linear_attention")
    return (layer + 1) % _number(config, "full_attention_interval", 4) != 0
