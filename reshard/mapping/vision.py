"""Vision-language models: prefixes of their decoders on disk, in memory, and in Megatron, and names of vision towers.

    family                      on disk                 in memory               Megatron
    qwen2_vl, qwen2_5_vl        model.                  model.language_model.   language_model.
    thinkers of Qwen Omni       model.                  model.language_model.
    qwen3_vl, qwen3_vl_moe      model.language_model.   model.language_model.   language_model.
    qwen3_5, qwen3_5_moe        model.language_model.   model.language_model.   language_model.
    glm4v_moe                   model.language_model.   model.language_model.   language_model.
    glm4v, glm46v, glm_ocr,     model.language_model.   model.language_model.
    gemma3n, gemma4
    llama4                      language_model.model.   language_model.model.   language_model.
    gemma3, mistral3            language_model.model.   model.language_model.   language_model.
    minimax_m3_vl, kimi_k25     language_model.model.   model.language_model.

For families with a decoder of any other family, such as LLaVA and InternVL, see `_ON_DISK`.

Megatron's names are those of Megatron-Bridge, which does not rename the vision towers of Qwen2.5-VL, Gemma 3,
Mistral 3, and GLM-4.5V. For Llama 4, they are those of NeMo.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planners.geometry.views import View
from reshard.errors import NormalizationError
from reshard.mapping.mapping import Mapping
from reshard.mapping.rules import Concat, Rename, Reshape, Rope, Rule, Rules, Split, Transpose, renames

_LLAVA = "language_model.model.", "language_model."
_ON_DISK = {
    family: before
    for families, before in {
        "qwen2_vl qwen2_5_vl qwen2_5_omni_thinker qwen3_omni_moe_thinker": ("model.", ""),
        "gemma3": ("language_model.model.", ""),
        "llama4 mistral3 minimax_m3_vl kimi_k25 llava llava_next llava_onevision internvl aya_vision got_ocr2 "
        "paligemma vipllava": _LLAVA,
        "idefics3 smolvlm": ("model.text_model.", ""),
        "qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe glm4v glm46v glm_ocr glm4v_moe gemma4 gemma3n cohere2_vision "
        "lfm2_vl exaone4_5 video_llama_3 ovis2 deepseek_vl": ("model.language_model.", ""),
    }.items()
    for family in families.split()
}
"""By family: prefixes of the decoder's names and of its `lm_head`."""
FAMILIES = tuple(_ON_DISK)
_PER_LAYER = tuple(
    f"{x}.weight"
    for x in (
        *("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"),
        *("altup_projections.{i}", "altup_unembed_projections.{i}"),
    )
)
"""Tensors outside the layers in the decoders of Gemma 3n and 4."""
_MEMORY = {
    name: f"model.{name}"
    for name in (
        *("visual.{rest+}", "vision_tower.{rest+}", "audio_tower.{rest+}"),
        *("multi_modal_projector.{rest+}", "mm_projector.{rest+}", "image_newline"),
    )
}
_MINIMAX = {
    "vision_tower.vision_model.embeddings.patch_embedding.{rest+}": "model.vision_tower.embeddings.proj.{rest+}",
    "vision_tower.vision_model.encoder.layers.{rest+}": "model.vision_tower.layers.{rest+}",
    "vision_tower.vision_model.pre_layrnorm.{kind}": "model.vision_tower.pre_layrnorm.{kind}",
    "patch_merge_mlp.{part}.{kind}": "model.multi_modal_projector.merge_{part}.{kind}",
}
"""Names outside the decoder on disk, and in memory if they differ."""
_KINDS = ("weight", "bias")
_KIMI_BLOCK, _KIMI_LAYER = "vision_tower.encoder.blocks.{i}.", "model.vision_tower.layers.{i}."
_KIMI = {
    f"{_KIMI_BLOCK}norm0.{{kind}}": f"{_KIMI_LAYER}norm1.{{kind}}",
    f"{_KIMI_BLOCK}norm1.{{kind}}": f"{_KIMI_LAYER}norm2.{{kind}}",
    f"{_KIMI_BLOCK}mlp.fc0.{{kind}}": f"{_KIMI_LAYER}mlp.fc1.{{kind}}",
    f"{_KIMI_BLOCK}mlp.fc1.{{kind}}": f"{_KIMI_LAYER}mlp.fc2.{{kind}}",
    f"{_KIMI_BLOCK}wo.{{kind}}": f"{_KIMI_LAYER}attn.proj.{{kind}}",
    "vision_tower.encoder.final_layernorm.{kind}": "model.vision_tower.final_layernorm.{kind}",
    "vision_tower.patch_embed.pos_emb.weight": "model.vision_tower.patch_embed.pos_emb.position_embeddings",
    "mm_projector.proj.0.{kind}": "model.mm_projector.in_proj.{kind}",
    "mm_projector.proj.2.{kind}": "model.mm_projector.out_proj.{kind}",
}
_MOVED = {"minimax_m3_vl": _MINIMAX, "kimi_k25": _KIMI}


def to_decoder(family: str) -> Mapping:
    """Map the names on disk to those of the decoder alone. Names of the vision tower stay, as do
    models without one."""
    return Mapping(_decoder(family, "model."))


def in_memory(family: str, head_size: int) -> Mapping:
    """Map the names on disk to those of transformers 5 in memory. `head_size` is that of the tower."""
    if family == "llama4" or _ON_DISK.get(family, [""])[0] not in ("model.", _LLAVA[0]):
        return Mapping()
    rules = [*_decoder(family, "model.language_model."), *renames(_MOVED.get(family, {}) | _MEMORY)]
    if family != "kimi_k25":
        return Mapping(rules)
    parts = {kind: [f"{_KIMI_LAYER}attn.{x}_proj.{kind}" for x in "qkv"] for kind in _KINDS}
    rules = [*(Split(f"{_KIMI_BLOCK}wqkv.{kind}", parts[kind], (1, 1, 1)) for kind in _KINDS), *rules]
    return Mapping(rules) | Mapping(Rope(x, x, head_size, "halves") for of in parts.values() for x in of[:2])


def _decoder(family: str, target: str) -> Rules:
    """Rename the decoder's tensors on disk, and the output layer."""
    source, head = _ON_DISK.get(family, ("model.", ""))
    names = ("embed_tokens.weight", "norm.weight", "layers.{rest+}", *_PER_LAYER)
    pairs = [(source + name, target + name) for name in names] + [(f"{head}lm_head.weight", "lm_head.weight")]
    return [Rename(old, new) for old, new in pairs if old != new]


def to_megatron(family: str, heads: int, *, transformer_engine: bool) -> Mapping:
    """Map Megatron's names of the decoder, and the disk's names of the vision tower, to Megatron's
    names of the full model. The tower has `heads` attention heads."""
    names = {
        "decoder.{rest+}": "decoder.{rest+}",
        "embedding.{rest+}": "embedding.{rest+}",
        "output_layer.weight": "output_layer.weight",
    }
    rules = renames(names, target="language_model.")
    if family == "llama4":
        return Mapping([*rules, *_llama4(heads, transformer_engine)])
    if family == "gemma3":
        front = "multi_modal_projector."
        rules += [
            Rename(f"{front}mm_soft_emb_norm.weight", f"{front}mm_soft_embed_norm.weight"),
            Transpose(f"{front}mm_input_projection_weight", f"{front}proj.weight"),
        ]
    if family == "glm4v_moe":
        rules.append(Rename("model.visual.{rest+}", "visual.{rest+}"))
    if not family.startswith("qwen3"):
        return Mapping(rules)
    parts = {kind: [f"{_TOWER}self_attention.linear_{x}.{kind}" for x in "qkv"] for kind in _KINDS}
    split = [Split(f"{_BLOCKS}attn.qkv.{kind}", parts[kind], (1, 1, 1)) for kind in _KINDS]
    return Mapping([*rules, *_qwen3(transformer_engine), *split]) | Mapping(_by_heads(parts, heads))


_TOWER = "vision_model.decoder.layers.{i}."
_BLOCKS = "model.visual.blocks.{i}."


def _by_heads(parts: dict[str, list[str]], heads: int) -> Rules:
    """Fuse queries, keys, and values head by head."""
    fused = f"{_TOWER}self_attention.linear_qkv."
    return [Concat(names, f"{fused}{kind}", (1, 1, 1), groups=heads) for kind, names in parts.items()]


def _norms(first: str, second: str, transformer_engine: bool) -> Rules:
    """Map the norms of a layer of the tower. TransformerEngine keeps them in the projections that follow."""
    before, between = "input_layernorm.{kind}", "pre_mlp_layernorm.{kind}"
    if transformer_engine:
        before, between = "self_attention.linear_qkv.layer_norm_{kind}", "mlp.linear_fc1.layer_norm_{kind}"
    return renames({f"{first}.{{kind}}": before, f"{second}.{{kind}}": between}, target=_TOWER)


def _qwen3(transformer_engine: bool) -> Rules:
    """Map the vision tower of Qwen3-VL."""
    merger, deep = "merger.", "deepstack_merger_list.{i}."
    names = {f"{_BLOCKS}attn.proj.": f"{_TOWER}self_attention.linear_proj."}
    for part in ("linear_fc1.", "linear_fc2."):
        names[f"{_BLOCKS}mlp.{part}"] = f"{_TOWER}mlp.{part}"
        names[f"model.visual.{merger}{part}"] = f"vision_model.{merger}{part}"
        names[f"model.visual.{deep}{part}"] = f"vision_model.decoder.{deep}{part}"
    names |= {
        f"model.visual.{merger}norm.": f"vision_model.{merger}patch_norm.",
        f"model.visual.{deep}norm.": f"vision_model.decoder.{deep}patch_norm.",
        "model.visual.patch_embed.proj.": "vision_model.patch_embed.proj.",
        "model.visual.pos_embed.": "vision_model.pos_embed.",
    }
    norms = _norms(f"{_BLOCKS}norm1", f"{_BLOCKS}norm2", transformer_engine)
    return [*norms, *renames({f"{a}{{kind}}": f"{b}{{kind}}" for a, b in names.items()})]


def _llama4(heads: int, transformer_engine: bool) -> Rules:
    """Map the vision tower of Llama 4, and its projection to the decoder."""
    layer = "vision_model.model.layers.{i}."
    names = {
        "vision_model.positional_embedding_vlm": "vision_model.position_embeddings.weight",
        "vision_model.patch_embedding.linear.weight": "vision_model.conv1._linear.weight",
        "vision_model.layernorm_pre.{kind}": "vision_model.ln_pre.{kind}",
        "vision_model.layernorm_post.{kind}": "vision_model.ln_post.{kind}",
        "vision_model.vision_adapter.mlp.fc1.weight": "vision_model.adapter.mlp.encoder.linear_fc1.weight",
        "vision_model.vision_adapter.mlp.fc2.weight": "vision_model.adapter.mlp.encoder.linear_fc2.weight",
        "multi_modal_projector.linear_1.weight": "vision_projection.encoder.weight",
        f"{layer}self_attn.o_proj.{{kind}}": f"{_TOWER}self_attention.linear_proj.{{kind}}",
        f"{layer}mlp.fc1.{{kind}}": f"{_TOWER}mlp.linear_fc1.{{kind}}",
        f"{layer}mlp.fc2.{{kind}}": f"{_TOWER}mlp.linear_fc2.{{kind}}",
    }
    return [
        Reshape("vision_model.class_embedding", "vision_model.class_token", (-1,), (1, 1, -1)),
        *_norms(f"{layer}input_layernorm", f"{layer}post_attention_layernorm", transformer_engine),
        *_by_heads({kind: [f"{layer}self_attn.{x}_proj.{kind}" for x in "qkv"] for kind in _KINDS}, heads),
        *renames(names),
    ]


# Experts of Qwen3-VL are stacked on disk. In files of transformers 5, they are as in memory,
# [experts, rows, columns]. In older files, which are on the Hub, they are transposed.


@dataclass(frozen=True, init=False)
class _Turned(Transpose):
    """Transposes stacks of experts on disk if necessary: in memory, `dim` has `size` elements."""

    dim: int
    size: int
    back: bool

    def __init__(self, name: str, dim: int, size: int, back: bool = False) -> None:
        self._set(name, name, dims=(), dim=dim, size=size, back=back)

    def build(self, views: Sequence[View]) -> list[View]:
        shape = views[0].shape
        if len(shape) != 3 or self.size not in shape[1:] or (shape[1] == shape[2] and not self.back):
            raise NormalizationError(
                f"experts of shape {shape}: the shape does not show whether they are transposed; one of the last "
                f"two dims, and only one, should have {self.size} elements"
            )
        return list(views) if not self.back and shape[self.dim] == self.size else super().build(views)

    def inverse(self) -> Rule:
        return _Turned(self.sources[0].text, self.dim, self.size, not self.back)


def qwen3_experts(expert_size: int) -> Mapping:
    """Map stacks on disk to those in memory. The inverse writes them as on the Hub."""
    block = "model.language_model.layers.{i}.mlp.experts."
    sizes = {"gate_up_proj": (1, 2 * expert_size), "down_proj": (2, expert_size)}
    return Mapping([_Turned(block + name, *at) for name, at in sizes.items()])
