"""Names of tied tensors that Hugging Face files omit, each with the stored tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

# Names that Hugging Face files omit, because the model ties them to stored tensors:
#
# - `lm_head.weight` of decoders: the embedding, unless the config says that it is not tied
# - `cls.predictions.decoder.weight` and `.bias` of BERT and its kin: the embedding of words, and `cls.predictions.bias`
# - `lm_head.decoder.weight` and `.bias` of RoBERTa and its kin: the same, and `lm_head.bias`
# - `encoder.embed_tokens.weight` and `decoder. ...` of T5, BART, and their kin: `shared.weight`
#
# Files of transformers do not record this: it follows from the names in the files, and from
# config.json if there is one. Files of reshard and of `safetensors.torch.save_model` record, in
# their metadata, each omitted name and the stored name.


_INPUTS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "shared.weight", "backbone.embeddings.weight")
_HEADS = {
    "whisper": "proj_out",
    "moonshine": "proj_out",
    "canary": "proj_out",
    "biogpt": "output_projection",
    "trocr": "output_projection",
    "t5gemma": "lm_head.out_proj",
    "t5gemma2": "lm_head.out_proj",
    "funnel": "lm_head",
    "kosmos-2": "text_model.lm_head",
    "blip-2": "language_model.lm_head",
    "git": "",
    "fsmt": "",
    "rembert": "",
    "lxmert": "cls.predictions.decoder",
    "pocket_tts": "",
    "gradium_phonon_tts": "",
}
"""Output layers by `model_type`, if other names suggest another one. "" if it has none."""

_SHARED = re.compile(r"(.*\.)?shared\.weight")
_HEADS_WITH_BIAS = re.compile(r"((?:.*\.)?(?:cls\.predictions|lm_head|predictions))\.bias")
_WORDS = ("embeddings.word_embeddings.weight",)


def tied_names(names: Iterable[str], config: Mapping[str, Any], metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the omitted names, each with the stored tensor that it is tied to."""
    known = set(names)
    told = {a: b for a, b in metadata.items() if a != "format" and a not in known and b in known}
    return {**_inferred({*known, *told}, config), **told}


def _inferred(known: set[str], config: Mapping[str, Any]) -> dict[str, str]:
    """Infer tied names from the names in the files and the config."""
    if not _is_tied(config):
        return {}
    model_type = str(config.get("model_type"))
    biased = {} if model_type in _HEADS else _heads_with_bias(known)
    found = {**_shared(known), **biased}
    has_head = re.search("CausalLM|LMHead|LxmertForPre|ForConditionalGeneration", str(config.get("architectures")))
    head = _HEADS.get(model_type, "lm_head")
    if has_head and not biased and not any(head in key for key in known):
        inputs = [key for key in known if key.endswith(_INPUTS)]
        if len(inputs) == 1:
            found[f"{head}.weight"] = inputs[0]
    return found


def _is_tied(config: Mapping[str, Any]) -> bool:
    """Return True if embeddings are tied. transformers omits `tie_word_embeddings` from config.json
    if it has its default, which is True."""
    nested = config.get("text_config")
    default = nested.get("tie_word_embeddings", True) if isinstance(nested, dict) else True
    return bool(config.get("tie_word_embeddings", default) is True)


def _shared(known: set[str]) -> dict[str, str]:
    """Return the shared embeddings of an encoder and a decoder."""
    out = {}
    for match in filter(None, map(_SHARED.fullmatch, known)):
        for part in ("encoder.", "decoder."):
            side = f"{match[1] or ''}{part}"
            name = f"{side}embed_tokens.weight"
            if name not in known and any(other.startswith(side) for other in known):
                out[name] = match[0]
    return out


def _heads_with_bias(known: set[str]) -> dict[str, str]:
    """Return output layers that predict masked tokens and have a separate bias."""
    words = [key for key in known if key.endswith(_WORDS)]
    out = {}
    for match in filter(None, map(_HEADS_WITH_BIAS.fullmatch, known)):
        head = f"{match[1]}.decoder"
        if len(words) == 1 and not known & {f"{head}.weight", f"{match[1]}.weight"}:
            out[f"{head}.weight"] = words[0]
            if f"{head}.bias" not in known:
                out[f"{head}.bias"] = match[0]
    return out
