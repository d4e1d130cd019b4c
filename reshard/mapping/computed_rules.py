"""Rules whose targets are computed from their sources, and not made of the very same elements."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from planners.views.view import View
from reshard.errors import NormalizationError
from reshard.formats.stored.tensor import StoredTensor
from reshard.mapping.computed_tensors import cast, dequantized, is_floating, mxfp4, offset
from reshard.mapping.rules import Rule

__all__ = ["Cast", "Computing", "Dequantize", "Mxfp4", "Offset"]

_MASTERS = ("fp32_param", "master_param", "fp32", "param")
"""States that are the parameter in a wider dtype, as Megatron, TransformerEngine and DeepSpeed call them."""


class Computing(Rule):
    """A rule that computes its one target while it is read. Not for plans of metadata alone: it gives no views."""

    @abstractmethod
    def compute(self, sources: Sequence[StoredTensor], name: str, state: str) -> StoredTensor:
        """The target under its name; `state` is what the sources are called as states, "" for parameters."""

    def build(self, views: Sequence[View]) -> list[View]:
        raise NormalizationError(f"{self} is computed: no view of stored elements describes it")


@dataclass(frozen=True, init=False)
class Cast(Computing):
    """Floating-point tensors with at least one dim as another dtype, converted while they are read; others stay.

    `old` is the dtype to go back to; without it there is no inverse.
    """

    dtype: str
    old: str | None

    def __init__(self, source: str, dtype: str, old: str | None = None) -> None:
        self._set(source, source, dtype=dtype, old=old)

    def compute(self, sources: Sequence[StoredTensor], name: str, state: str) -> StoredTensor:
        (source,) = sources
        if not source.spec.shape or not is_floating(source.spec.dtype):
            return source
        return cast(source, self.dtype, name)

    def inverse(self) -> Rule:
        if self.old is None:
            raise NormalizationError(f"{self}: give old, the dtype before, so that it can be undone")
        return Cast(self.sources[0].text, self.old, self.dtype)


@dataclass(frozen=True, init=False)
class Offset(Computing):
    """Every element plus `by`: weights of norms that are centred at 0 in one framework and at 1 in another.

    Moments of an optimizer stay as they are, masters change with the parameter. Sums are rounded to the tensor's dtype:
    a bfloat16 of 0.001 plus 1 is 1. With `exact`, a tensor of which an element would not come back by the inverse is
    refused when it is first asked for, and is read once for that; a `Cast` to a wider dtype before avoids it. Only the
    sign of a zero is not kept.
    """

    by: float
    exact: bool

    def __init__(self, source: str, target: str, by: float, exact: bool = True) -> None:
        self._set(source, target, by=float(by), exact=exact)

    def compute(self, sources: Sequence[StoredTensor], name: str, state: str) -> StoredTensor:
        (source,) = sources
        if state and state not in _MASTERS:
            return source.renamed(name)
        return offset(source, name, by=self.by, exact=self.exact)

    def inverse(self) -> Rule:
        return Offset(self.targets[0].text, self.sources[0].text, -self.by, self.exact)


@dataclass(frozen=True, init=False)
class Dequantize(Computing):
    """Block-quantized weights, times their scales, as `dtype`, computed while they are read. Not reversible.

    A weight without scales is left as it is.
    """

    optional: ClassVar[bool] = True
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
        self._set((weight, scale), target, block=tuple(block), dtype=dtype)

    def compute(self, sources: Sequence[StoredTensor], name: str, state: str) -> StoredTensor:
        weight, scale = sources
        return dequantized(weight, scale, name, block=self.block, dtype=self.dtype)

    def inverse(self) -> Rule:
        raise NormalizationError("dequantization cannot be undone")


@dataclass(frozen=True, init=False)
class Mxfp4(Computing):
    """Weights of four bits in blocks with scales, as gpt-oss stores them, as `dtype`, computed while they are read.

    They come out transposed, as the same weights are stored where they are not quantized. Not reversible.
    """

    optional: ClassVar[bool] = True
    dtype: str

    def __init__(
        self,
        blocks: str = "{name+}_blocks",
        scales: str = "{name+}_scales",
        target: str = "{name+}",
        dtype: str = "bfloat16",
    ) -> None:
        self._set((blocks, scales), target, dtype=dtype)

    def compute(self, sources: Sequence[StoredTensor], name: str, state: str) -> StoredTensor:
        blocks, scales = sources
        return mxfp4(blocks, scales, name, dtype=self.dtype)

    def inverse(self) -> Rule:
        raise NormalizationError("dequantization cannot be undone")
