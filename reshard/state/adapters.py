"""Names of PEFT, by spelling: what is left of one without the segments that tell adapters from their base model.

    base_model.model.layers.0.q_proj.base_layer.weight       layers.0.q_proj.weight
    base_model.model.layers.0.q_proj.lora_A.default.weight   layers.0.q_proj.lora_A.weight
    base_model.model.head.modules_to_save.default.weight     head.weight

These are also the names in adapter_model.safetensors, but for the first segments. The adapter's own name goes only
where there is one adapter: of several, it tells them apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

__all__ = ["PEFT_PREFIX", "drop_adapter"]

PEFT_PREFIX = "base_model.model."
"""What PEFT puts before every name of a model with adapters in it."""

_KINDS = r"lora_\w+|ia3_l|hada_\w+|lokr_\w+|b?oft_\w+|vera_lambda_[bd]|ln_tuning_layers|fourierft_spectrum|hra_u"
_ADAPTER = re.compile(rf"\.(?:{_KINDS})\.(?!(?:weight|bias)(?:\.|$))(\w+)(?:\.(?:weight|bias)(?=\.|$)|$)")
_SAVED_WHOLE = re.compile(r"\.modules_to_save\.(\w+)\.")


def drop_adapter(names: Iterable[str]) -> Callable[[str], str]:
    """A function that takes the adapter's name out of a name; `names` are all names of a model, without `PEFT_PREFIX`.

    It changes nothing where there are several adapters, or none.
    """
    found = {match[1] for name in names for pattern in (_ADAPTER, _SAVED_WHOLE) if (match := pattern.search(name))}
    if len(found) != 1:
        return lambda name: name
    adapter = re.escape(found.pop())
    magnitude = re.compile(rf"(\.lora_magnitude_vector)\.{adapter}\.weight(?=\.|$)")
    inside = re.compile(rf"(\.(?:{_KINDS}))\.{adapter}(?=\.|$)")
    whole = re.compile(rf"\.modules_to_save\.{adapter}(?=\.)")
    return lambda name: whole.sub("", inside.sub(r"\1", magnitude.sub(r"\1", name)))
