"""Rules whose targets are computed from their sources, and not made of the very same elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from planners.view import View
from reshard.errors import NormalizationError
from reshard.mapping.patterns import Pattern
from reshard.mapping.rules import Rule

__all__ = ["Cast", "Dequantize"]


@dataclass(frozen=True, init=False)
class Cast(Rule):
    """Floating-point tensors with at least one dim as another dtype, converted while they are read; others stay.

    `old` is the dtype to go back to; without it there is no inverse.
    """

    sources: tuple[Pattern, ...]
    targets: tuple[Pattern, ...]
    dtype: str
    old: str | None

    def __init__(self, source: str, dtype: str, old: str | None = None) -> None:
        for name, value in (("dtype", dtype), ("old", old)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "sources", (Pattern(source),))
        object.__setattr__(self, "targets", (Pattern(source),))

    def build(self, views: Sequence[View]) -> list[View]:
        raise NormalizationError(f"a cast to {self.dtype} is computed: no view of stored elements describes it")

    def inverse(self) -> Rule:
        if self.old is None:
            raise NormalizationError(f"{self}: give old, the dtype before, so that it can be undone")
        return Cast(self.sources[0].text, self.old, self.dtype)


@dataclass(frozen=True, init=False)
class Dequantize(Rule):
    """Block-quantized weights, times their scales, as `dtype`, computed while they are read. Not reversible.

    A weight without scales is left as it is.
    """

    optional: ClassVar[bool] = True
    sources: tuple[Pattern, ...]
    targets: tuple[Pattern, ...]
    block: tuple[int, ...]
    dtype: str

    def __init__(
        self,
        weight: str = "{name+}.weight",
        scale: str = "{name+}.weight_scale_inv",
        target: str = "{name+}.weight",
        block: Sequence[int] = (128, 128),
        dtype: str = "bfloat16",
    ) -> None:
        for name, value in (("block", tuple(block)), ("dtype", dtype)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "sources", (Pattern(weight), Pattern(scale)))
        object.__setattr__(self, "targets", (Pattern(target),))
        Rule.__post_init__(self)

    def build(self, views: Sequence[View]) -> list[View]:
        raise NormalizationError("a dequantized weight is computed: no view of stored elements describes it")

    def inverse(self) -> Rule:
        raise NormalizationError("dequantization cannot be undone")
