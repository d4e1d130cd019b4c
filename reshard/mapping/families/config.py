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

    def __post_init__(self) -> None:
        """Raises NormalizationError for numbers that cannot be."""
        if min(self.heads, self.kv_heads, self.head_size, self.vocab_size) < 1 or self.heads % self.kv_heads:
            raise NormalizationError(f"{self.kv_heads} key/value heads cannot serve {self.heads} query heads: {self}")

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
        return cls(str(config["model_type"]), heads, kv_heads, int(size), int(config["vocab_size"]))
