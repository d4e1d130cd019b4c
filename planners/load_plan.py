"""Load plans: for every rank, which bytes of which saved chunks go where. Pure, lazy, shared by geometry."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from planners.box import Box
from planners.errors import CoverageError, LayoutMismatchError, PlanError
from planners.layout import StateLayout
from planners.overlap import Piece, ProductOverlap, SweepOverlap, overlap_of
from planners.ownership import Ints

__all__ = ["LoadPlan", "ReadItem", "ReadItems", "plan_reads"]


class ReadItem(NamedTuple):
    """One box of elements, from a saved chunk to the wanted rank's local tensor."""

    fqn: str
    owner: int
    """Owner of the saved chunk: the lowest rank that holds it, or the chunk id of explicit boxes."""
    chunk: Box
    """The saved chunk, in global coordinates."""
    source: Box
    """The overlap in the saved chunk's coordinates."""
    target: Box
    """The overlap in the target local tensor's coordinates; of equal sizes."""
    nbytes: int
    """Bytes of the overlap, as saved."""
    part: int = 0
    """Which of the rank's local tensors of this name; 0 unless the target is explicit boxes or a flat range."""

    @property
    def box(self) -> Box:
        """The overlap in global coordinates."""
        return self.source.shift(self.chunk.offsets)

    def __str__(self) -> str:
        return f"{self.fqn}: {self.source} of {self.chunk} by {self.owner} -> {self.target}, {self.nbytes} bytes"


class ReadItems(tuple[ReadItem, ...]):
    """The items of one rank, in the order of the wanted names and of local elements."""

    __slots__ = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all items."""
        return sum(item.nbytes for item in self)


class LoadPlan:
    """What every wanted rank reads. Frozen.

    A plan is its two layouts: items are enumerated for the rank that asks. A plan whose items were listed
    explicitly (`with_items`) keeps them, and `verify` judges them.
    """

    __slots__ = ("_rank_bytes", "explicit", "saved", "wanted")

    saved: StateLayout
    wanted: StateLayout
    explicit: dict[int, ReadItems]
    """Items listed by hand, by rank; they stand in for those that would be derived."""

    def __init__(
        self, saved: StateLayout, wanted: StateLayout, explicit: Mapping[int, Sequence[ReadItem]] | None = None
    ) -> None:
        self.saved, self.wanted = saved, wanted
        self.explicit = {rank: ReadItems(items) for rank, items in (explicit or {}).items()}
        self._rank_bytes: Ints | None = None
        for rank in self.explicit:
            if not 0 <= rank < wanted.world_size:
                raise PlanError(f"there are ranks 0 to {wanted.world_size - 1} only", rank=rank)

    @property
    def world_size(self) -> int:
        """How many wanted ranks."""
        return self.wanted.world_size

    def with_items(self, items: Mapping[int, Sequence[ReadItem]]) -> LoadPlan:
        """The same plan, but with the items of the given ranks replaced."""
        return LoadPlan(self.saved, self.wanted, {**self.explicit, **items})

    def overlap(self, fqn: str) -> ProductOverlap | SweepOverlap:
        """The overlap of the saved and the wanted layout of a tensor, shared by all of the same geometry."""
        wanted = self.wanted[fqn]
        return overlap_of(wanted.spec.shape, self.saved[fqn].form, wanted.form)

    def items(self, rank: int) -> ReadItems:
        """What `rank` reads.

        Raises PlanError for a rank outside the job, CoverageError if no saved chunk holds a wanted element.
        """
        if rank in self.explicit:
            return self.explicit[rank]
        if not 0 <= rank < self.world_size:
            raise PlanError(f"there are ranks 0 to {self.world_size - 1} only", rank=rank)
        found: dict[tuple[object, ...], list[tuple[Piece, int]]] = {}
        out: list[ReadItem] = []
        for fqn, wanted in self.wanted.items():
            saved = self.saved[fqn]
            key = (wanted.geometry_key, saved.geometry_key)
            pieces = found.get(key)
            if pieces is None:
                try:
                    pieces = [(p, p.source.numel * saved.spec.itemsize) for p in self.overlap(fqn).pieces(rank)]
                except CoverageError as error:
                    raise CoverageError(str(error), fqn=fqn, rank=rank, box=error.box) from None
                found[key] = pieces
            for (owner, chunk, source, target, part), nbytes in pieces:
                out.append(ReadItem(fqn, owner, chunk, source, target, nbytes, part))
        return ReadItems(out)

    def rank_bytes(self) -> Ints:
        """Bytes that each rank reads, as saved: every wanted element once. Items are not enumerated."""
        if self._rank_bytes is None:
            self._rank_bytes = self._count_bytes()
            self._rank_bytes.flags.writeable = False
        return self._rank_bytes

    def _count_bytes(self) -> Ints:
        total = np.zeros(self.world_size, dtype=np.int64)
        groups: dict[tuple[object, ...], list[str]] = {}
        for fqn, wanted in self.wanted.items():
            groups.setdefault((wanted.geometry_key, self.saved[fqn].spec.itemsize), []).append(fqn)
        for names in groups.values():
            held = self.wanted[names[0]].numels()
            total[: len(held)] += held * (self.saved[names[0]].spec.itemsize * len(names))
        for rank, items in self.explicit.items():
            total[rank] = items.nbytes
        return total

    def bytes(self, rank: int) -> int:
        """Bytes that `rank` reads."""
        if not 0 <= rank < self.world_size:
            raise PlanError(f"there are ranks 0 to {self.world_size - 1} only", rank=rank)
        return int(self.rank_bytes()[rank])

    @property
    def total_bytes(self) -> int:
        """Bytes that all ranks read together."""
        return int(self.rank_bytes().sum())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LoadPlan):
            return NotImplemented
        return (self.saved, self.wanted, self.explicit) == (other.saved, other.wanted, other.explicit)

    __hash__ = None  # type: ignore[assignment]  # holds mappings of many tensors

    def __repr__(self) -> str:
        return (
            f"LoadPlan({len(self.wanted)} tensors, {self.saved.world_size} -> {self.world_size} ranks, "
            f"{self.total_bytes} bytes)"
        )


def plan_reads(saved: StateLayout, wanted: StateLayout, *, allow_cast: bool = False) -> LoadPlan:
    """What every rank of `wanted` reads from chunks placed as `saved`. Tensors that only `saved` has are not read.

    Deterministic: a function of the two layouts alone, the same on every rank.

    Raises:
        LayoutMismatchError: names all wanted tensors that are not saved, or saved with another shape or (unless
            `allow_cast`, which leaves the cast to whoever obeys the plan) another dtype.
    """
    problems: list[str] = []
    for fqn, layout in wanted.items():
        other = saved.get(fqn)
        if other is None:
            close = difflib.get_close_matches(fqn, list(saved), n=1) if len(problems) < 20 else []
            problems.append(f"{fqn!r} is not saved" + (f" (did you mean {close[0]!r}?)" if close else ""))
        elif other.spec.shape != layout.spec.shape:
            problems.append(f"{fqn!r} is saved with shape {other.spec.shape}, but wanted with {layout.spec.shape}")
        elif other.spec.dtype != layout.spec.dtype and not allow_cast:
            problems.append(f"{fqn!r} is saved as {other.spec.dtype}, but wanted as {layout.spec.dtype}")
    if problems:
        raise LayoutMismatchError("the wanted state does not fit the saved one: " + "; ".join(problems))
    return LoadPlan(saved, wanted)
