"""What a mapping must know of a model: the few numbers of its Hugging Face `config.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.errors import NormalizationError

__all__ = ["Decoder"]


@dataclass(frozen=True)
class Decoder:
    """A decoder-only transformer."""

    family: str
    """The `model_type`, such as "llama"."""
    heads: int
    kv_heads: int
    head_size: int
    vocab_size: int
    layers: int = 0
    """How many, those that predict further tokens left out; 0 where it is not known."""
    next_layers: int = 0
    """Layers behind the others that predict further tokens: multi-token prediction."""
    dense_layers: tuple[int, ...] = ()
    """Numbers of the layers of a mixture of experts that have none."""
    expert_size: int = 0
    """Rows of an expert's gate."""
    latent_rows: tuple[int, int] = (0, 0)
    """Rows of the first projections of latent attention: of queries, 0 if these have none; of keys and values."""

    def __post_init__(self) -> None:
        """Raises NormalizationError for numbers that cannot be."""
        if min(self.heads, self.kv_heads, self.head_size, self.vocab_size) < 1 or self.heads % self.kv_heads:
            raise NormalizationError(f"{self.kv_heads} key/value heads cannot serve {self.heads} query heads: {self}")

    @property
    def has_experts(self) -> bool:
        """Whether feed-forward layers are mixtures of experts."""
        return self.family in ("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss")

    @property
    def is_latent(self) -> bool:
        """Whether attention goes through latent vectors."""
        return self.family in ("deepseek_v2", "deepseek_v3")

    @property
    def is_sandwiched(self) -> bool:
        """Whether there are norms behind attention and feed-forward, too."""
        return self.family in ("gemma2", "gemma3_text")

    @property
    def is_zero_centered(self) -> bool:
        """Whether weights of norms are differences from 1."""
        return self.family in ("gemma", "gemma2", "gemma3_text")

    @classmethod
    def of(cls, config: Decoder | Mapping[str, Any] | str | os.PathLike[str]) -> Decoder:
        """From a `config.json`: its path, the folder it is in, or what it holds.

        Raises NormalizationError for an entry that is missing.
        """
        if isinstance(config, Decoder):
            return config
        if not isinstance(config, Mapping):
            path = Path(config)
            path = path / "config.json" if path.is_dir() else path
            try:
                config = json.loads(path.read_text())
            except (OSError, ValueError) as error:
                raise NormalizationError(f"{path} is no config.json of a model: {error}") from None
            assert isinstance(config, Mapping)
        config = {**config, **config.get("text_config", {})}  # models that also see keep the decoder's apart
        missing = [k for k in ("model_type", "num_attention_heads", "vocab_size") if config.get(k) is None]
        if missing:
            raise NormalizationError(f"the model's config says nothing of {', '.join(missing)}")
        heads = int(config["num_attention_heads"])
        size = config.get("head_dim") or int(config.get("hidden_size", heads)) // heads
        kv_heads = int(config.get("num_key_value_heads") or heads)
        layers = int(config.get("num_hidden_layers") or 0)
        return cls(
            str(config["model_type"]),
            heads,
            kv_heads,
            int(size),
            int(config["vocab_size"]),
            layers,
            int(config.get("num_nextn_predict_layers") or 0),
            tuple(layer for layer in range(layers) if not _has_experts(config, layer)),
            int(config.get("moe_intermediate_size") or config.get("intermediate_size") or 0),
            (
                int(config.get("q_lora_rank") or 0),
                int(config.get("kv_lora_rank") or 0) + int(config.get("qk_rope_head_dim") or 0),
            ),
        )


def _has_experts(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer of a mixture of experts is one: DeepSeek counts from 0 behind the dense ones, Qwen from 1."""
    if layer < int(config.get("first_k_dense_replace") or 0) or layer in (config.get("mlp_only_layers") or ()):
        return False
    steps = int(config.get("moe_layer_freq") or 1), int(config.get("decoder_sparse_step") or 1)
    return layer % steps[0] == 0 and (layer + 1) % steps[1] == 0
