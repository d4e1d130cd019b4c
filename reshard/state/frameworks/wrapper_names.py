"""Names of saved states without the segments that wrappers and adapters add, by spelling: there is no module to ask.

    module._orig_mod.layers.0.weight                         layers.0.weight
    base_model.model.layers.0.q_proj.base_layer.weight       layers.0.q_proj.weight
    base_model.model.layers.0.q_proj.lora_A.default.weight   layers.0.q_proj.lora_A.weight
    base_model.model.head.modules_to_save.default.weight     head.weight

Segments that only wrappers use are dropped wherever they stand; `module.` and PEFT's `base_model.model.`, which a
user's own child may be called too, only at the front, and only if all names begin so. The names that are left of
PEFT's are also those in adapter_model.safetensors. An adapter's own name goes only where there is one adapter: of
several, it tells them apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable

from reshard.state.frameworks.torch_internals import WRAPPER_SEGMENTS

__all__ = ["CERTAIN_SEGMENTS", "WrapperNames"]

CERTAIN_SEGMENTS = (WRAPPER_SEGMENTS - {"module"}) | {"_fpw_module", "_forward_module"}
"""Segments that nothing but a wrapper is called."""

PEFT_PREFIX = "base_model.model."
"""What PEFT puts before every name of a model with adapters in it."""

_KINDS = r"lora_\w+|ia3_l|hada_\w+|lokr_\w+|b?oft_\w+|vera_lambda_[bd]|ln_tuning_layers|fourierft_spectrum|hra_u"
_ADAPTER = re.compile(rf"\.(?:{_KINDS})\.(?!(?:weight|bias)(?:\.|$))(\w+)(?:\.(?:weight|bias)(?=\.|$)|$)")
_SAVED_WHOLE = re.compile(r"\.modules_to_save\.(\w+)\.")


class WrapperNames:
    """What the names of one state have in common, and a name without it.

    Args:
        names: all names of the state.
        prefixes: leading parts that are known already, to be taken off first.
        beside: names that may lack a front that all others have, such as the counter of an averaging wrapper.
        certain: the segments to drop wherever they stand.
        others: further names, which may have the name of an adapter where `names` do not.

    Attributes:
        prefixes: the fronts that are taken off, in order.
    """

    def __init__(
        self,
        names: Iterable[str],
        *,
        prefixes: Iterable[str] = (),
        beside: Collection[str] = (),
        certain: Collection[str] = CERTAIN_SEGMENTS,
        others: Iterable[str] = (),
    ) -> None:
        self._certain = certain
        self.prefixes = [prefix for prefix in prefixes if prefix]
        bare = [self.without_wrappers(name) for name in names]
        while (front := _common_front(bare, beside)) is not None:
            self.prefixes.append(front)
            bare = [name.removeprefix(front) for name in bare]
        adapted = PEFT_PREFIX in self.prefixes
        if adapted:
            self._certain = {*certain, "base_layer"}
        self.without_adapter = _adapter_dropper(map(self.without_wrappers, [*bare, *others]) if adapted else ())

    def without_wrappers(self, name: str) -> str:
        """The name without wrappers' segments and the common fronts; an adapter's name stays."""
        if any(segment in name for segment in self._certain):
            name = ".".join(part for part in name.split(".") if part not in self._certain)
        for prefix in self.prefixes:
            name = name.removeprefix(prefix)
        return name

    def __call__(self, name: str) -> str:
        """The name without all that wrappers and adapters add."""
        return self.without_adapter(self.without_wrappers(name))


def _common_front(names: list[str], beside: Collection[str]) -> str | None:
    for front in ("module.", PEFT_PREFIX):
        rest = [name for name in names if not name.startswith(front)]
        if len(rest) < len(names) and all(name in beside for name in rest):
            return front
    return None


def _adapter_dropper(names: Iterable[str]) -> Callable[[str], str]:
    """A function that takes the adapter's name out of a name; `names` are all names of a model, without
    `PEFT_PREFIX`.

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
