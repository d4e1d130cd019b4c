"""Names that Hugging Face files leave out, because the model ties them to tensors that are stored.

lm_head.weight                                  decoders: the embedding, unless the config says that it is not tied
cls.predictions.decoder.weight, .bias           BERT and its kin: the embedding of words, and cls.predictions.bias
lm_head.decoder.weight, .bias                   RoBERTa and its kin: the same, and lm_head.bias
encoder.embed_tokens.weight, decoder. ...       T5, BART and their kin: shared.weight

Files of transformers say nothing of this: it follows from the names that are there, and from config.json where there is
one. Ours, and those of `safetensors.torch.save_model`, have each name in their metadata, with the one that is stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["tied_names"]

_INPUTS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "shared.weight")
_SHARED = re.compile(r"(.*\.)?shared\.weight")
_HEADS_WITH_BIAS = re.compile(r"((?:.*\.)?(?:cls\.predictions|lm_head|predictions))\.bias")
_WORDS = ("embeddings.word_embeddings.weight",)


def tied_names(names: Iterable[str], config: Mapping[str, Any], metadata: Mapping[str, str]) -> dict[str, str]:
    """The names that are left out, each with the stored tensor that it is tied to."""
    known = set(names)
    told = {a: b for a, b in metadata.items() if a != "format" and a not in known and b in known}
    return {**_inferred({*known, *told}, config), **told}


def _inferred(known: set[str], config: Mapping[str, Any]) -> dict[str, str]:
    """By the names that there are, and the config."""
    if not _is_tied(config):
        return {}
    found = {**_shared(known), **_heads_with_bias(known)}
    kinds = [str(kind) for kind in config.get("architectures") or ()]
    has_head = any(part in kind for kind in kinds for part in ("CausalLM", "LMHead", "ForConditionalGeneration"))
    if has_head and not any("lm_head" in key for key in (*known, *found)):
        inputs = [key for key in known if key.endswith(_INPUTS)]
        found |= {"lm_head.weight": inputs[0]} if len(inputs) == 1 else {}
    return found


def _is_tied(config: Mapping[str, Any]) -> bool:
    """transformers leaves `tie_word_embeddings` out of config.json where it has its default, which is true."""
    nested = config.get("text_config")
    default = nested.get("tie_word_embeddings", True) if isinstance(nested, dict) else True
    return bool(config.get("tie_word_embeddings", default) is True)


def _shared(known: set[str]) -> dict[str, str]:
    """Embeddings of an encoder and a decoder that are one."""
    out = {}
    for key in known:
        match = _SHARED.fullmatch(key)
        for part in ("encoder.", "decoder.") if match else ():
            assert match is not None
            side = f"{match[1] or ''}{part}"
            name = f"{side}embed_tokens.weight"
            if name not in known and any(other.startswith(side) for other in known):
                out[name] = key
    return out


def _heads_with_bias(known: set[str]) -> dict[str, str]:
    """An output layer that predicts masked words, and has a bias of its own."""
    words = [key for key in known if key.endswith(_WORDS)]
    out = {}
    for key in known:
        match = _HEADS_WITH_BIAS.fullmatch(key)
        head = f"{match[1]}.decoder" if match else ""
        if match and len(words) == 1 and not known & {f"{head}.weight", f"{match[1]}.weight"}:
            out[f"{head}.weight"] = words[0]
            if f"{head}.bias" not in known:
                out[f"{head}.bias"] = key
    return out
