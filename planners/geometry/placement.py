"""How one mesh axis places a tensor: cut along a dim, or copied.

The three basic placements mean what DTensor means by them, and have its short text form:
`S(0)`, `_S(0, 2)`, `R`. `BlockShard` is ours: a dim made of blocks, each cut on its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from planners.errors import PlanError

__all__ = ["BlockShard", "Placement", "Replicate", "Shard", "StridedShard", "parse_placement", "parse_placements"]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank along the axis holds the same."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """The axis cuts `dim` as `torch.chunk` does: pieces of ceil(size / n), the last ones shorter or empty."""

    dim: int

    def __post_init__(self) -> None:
        _check_dim(self.dim)

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class StridedShard:
    """DTensor's `_StridedShard`: `dim` is first cut into `split_factor` pieces and each of these along the axis;
    coordinate k holds the k-th part of every piece, in order.

    12 elements, split_factor 2, axis of size 2:   0 0 0 1 1 1 | 0 0 0 1 1 1
    """

    dim: int
    split_factor: int

    def __post_init__(self) -> None:
        _check_dim(self.dim)
        if not isinstance(self.split_factor, int) or self.split_factor < 1:
            raise PlanError(f"split_factor must be an integer >= 1, got {self.split_factor!r}")

    def __str__(self) -> str:
        return f"_S({self.dim}, {self.split_factor})"


@dataclass(frozen=True, slots=True)
class BlockShard:
    """`dim` is a concatenation of blocks (a fused q, k and v; a gate and an up projection), and the axis cuts each
    block as `Shard` would; coordinate k holds the k-th part of every block, in order.

    q=4, k=2, v=2 elements, axis of size 2:   0 0 1 1 | 0 1 | 0 1

    Only the first axis that cuts a dim may be a `BlockShard`, since later ones no longer see whole blocks.
    """

    dim: int
    blocks: tuple[int, ...]
    """Sizes of the blocks, in elements of the dim; they add up to its size."""

    def __init__(self, dim: int, blocks: Sequence[int]) -> None:
        object.__setattr__(self, "dim", dim)
        object.__setattr__(self, "blocks", tuple(blocks))
        _check_dim(dim)
        if not self.blocks or any(not isinstance(b, int) or b < 0 for b in self.blocks):
            raise PlanError(f"blocks must be one or more sizes >= 0, got {self.blocks}")

    def __str__(self) -> str:
        return f"B({self.dim}, {'+'.join(map(str, self.blocks))})"


Placement = Replicate | Shard | StridedShard | BlockShard


def _check_dim(dim: object) -> None:
    if not isinstance(dim, int) or isinstance(dim, bool) or dim < 0:
        raise PlanError(f"the dim of a placement must be an integer >= 0, got {dim!r}")


_FORMS = (
    (re.compile(r"R|Replicate(?:\(\))?"), lambda m: Replicate()),
    (re.compile(r"S(?:hard)?\((?:dim=)?(\d+)\)"), lambda m: Shard(int(m[1]))),
    (
        re.compile(r"_?S(?:tridedShard)?\((?:dim=)?(\d+),(?:split_factor=|sf=)?(\d+)\)"),
        lambda m: StridedShard(int(m[1]), int(m[2])),
    ),
    (
        re.compile(r"B(?:lockShard)?\((?:dim=)?(\d+),(\d+(?:\+\d+)*)\)"),
        lambda m: BlockShard(int(m[1]), [int(b) for b in m[2].split("+")]),
    ),
)


def parse_placement(text: str) -> Placement:
    """A placement from `"S(0)"`, `"_S(0, 2)"`, `"R"`, `"B(0, 4+2+2)"`, or DTensor's long forms.

    Raises PlanError for anything else. Inverse of `str`.
    """
    compact = re.sub(r"\s+", "", text)
    for pattern, make in _FORMS:
        match = pattern.fullmatch(compact)
        if match is not None:
            return make(match)
    raise PlanError(f"unknown placement {text!r}: write S(dim), _S(dim, split_factor), B(dim, size+size) or R")


def parse_placements(text: str) -> tuple[Placement, ...]:
    """Placements separated by commas, one per mesh axis: `"S(0),R"`. The empty text is no placement.

    Raises PlanError for text that holds anything else.
    """
    parts = re.split(r",(?![^(]*\))", text.strip().removeprefix("(").removesuffix(")") if _wrapped(text) else text)
    return tuple(parse_placement(part) for part in parts if part.strip()) if text.strip() else ()


def _wrapped(text: str) -> bool:
    """Whether one pair of brackets encloses the whole text, as in DTensor's repr of a tuple."""
    text = text.strip()
    depth = 0
    for i, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return char == ")" and i == len(text) - 1 and text.startswith("(")
    return False
