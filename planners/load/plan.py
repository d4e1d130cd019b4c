"""Load plans: for every rank, which bytes of which saved chunks go where. Pure, lazy, shared by geometry."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from planners.errors import CoverageError, LayoutMismatchError, PlanError
from planners.geometry.box import Box, Dims
from planners.geometry.layout import StateLayout, TensorSpec
from planners.geometry.overlap import Overlap, overlap_of
from planners.geometry.ownership import Ints
from planners.notebooks import Pictured

if TYPE_CHECKING:  # imported when there is a view: most plans have none
    from planners.views.view import View

__all__ = ["FillItem", "LoadPlan", "ReadItem", "ReadItems", "plan_reads"]


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
    """The overlap in the target local tensor's coordinates; of equal sizes, up to `dims`."""
    nbytes: int
    """Bytes of the overlap, as saved."""
    part: int = 0
    """Which of the rank's local tensors of this name; 0 unless the target is explicit boxes or a flat range."""
    saved_as: str | None = None
    """Name of the saved tensor where a view gave it another."""
    dims: Dims | None = None
    """Per dim of the target, the dim of the chunk that it follows, or None for a new dim of size 1; dims of the chunk
    that are not named are of size 1. None: the same dims in the same order."""

    @property
    def saved_fqn(self) -> str:
        """Name of the saved tensor that the chunk is of."""
        return self.fqn if self.saved_as is None else self.saved_as

    @property
    def box(self) -> Box:
        """The overlap in global coordinates of the saved tensor."""
        return self.source.shift(self.chunk.offsets)

    def __str__(self) -> str:
        saved = "" if self.saved_as is None else f" of {self.saved_as}"
        turned = "" if self.dims is None else f" with dims {self.dims}"
        where = f"{self.source} of {self.chunk}{saved} by {self.owner}"
        return f"{self.fqn}: {where}{turned} -> {self.target}, {self.nbytes} bytes"


class FillItem(NamedTuple):
    """One box of a local tensor that is a constant, and is read from nowhere."""

    fqn: str
    target: Box
    """In the coordinates of the target local tensor."""
    value: float
    part: int = 0
    """As in `ReadItem`."""


class ReadItems(tuple[ReadItem, ...]):
    """The items of one rank, in the order of the wanted names and of local elements."""

    __slots__ = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all items."""
        return sum(item.nbytes for item in self)


class LoadPlan(Pictured):
    """What every wanted rank reads. Frozen.

    A plan is its two layouts, and the views that wanted tensors are of saved ones: items are enumerated for the rank
    that asks. A plan whose items were listed explicitly (`with_items`) keeps them, and `verify` judges them.
    """

    __slots__ = ("_groups", "_rank_bytes", "explicit", "saved", "views", "wanted")

    saved: StateLayout
    wanted: StateLayout
    explicit: dict[int, ReadItems]
    """Items listed by hand, by rank; they stand in for those that would be derived."""
    views: dict[str, View]
    """Wanted tensors that are made of saved ones; all others are saved under their own name."""

    def __init__(
        self,
        saved: StateLayout,
        wanted: StateLayout,
        explicit: Mapping[int, Sequence[ReadItem]] | None = None,
        views: Mapping[str, View] | None = None,
    ) -> None:
        self.saved, self.wanted = saved, wanted
        self.explicit = {rank: ReadItems(items) for rank, items in (explicit or {}).items()}
        self.views = dict(views or {})
        self._rank_bytes: Ints | None = None
        self._groups: tuple[dict[str, int], ...] | None = None
        for rank in self.explicit:
            if not 0 <= rank < wanted.world_size:
                raise PlanError(f"there are ranks 0 to {wanted.world_size - 1} only", rank=rank)

    @property
    def world_size(self) -> int:
        """How many wanted ranks."""
        return self.wanted.world_size

    def with_items(self, items: Mapping[int, Sequence[ReadItem]]) -> LoadPlan:
        """The same plan, but with the items of the given ranks replaced."""
        return LoadPlan(self.saved, self.wanted, {**self.explicit, **items}, self.views)

    def overlap(self, fqn: str) -> Overlap:
        """The overlap of the saved and the wanted layout of a tensor, shared by all of the same geometry."""
        wanted, view = self.wanted[fqn], self.views.get(fqn)
        if view is None:
            return overlap_of(wanted.spec.shape, self.saved[fqn].form, wanted.form)
        return view.overlap([self.saved[source.fqn].form for source in view.sources], wanted.form)

    def sources(self, fqn: str) -> tuple[str, ...]:
        """Names of the saved tensors that a wanted one is made of."""
        view = self.views.get(fqn)
        return (fqn,) if view is None else tuple(source.fqn for source in view.sources)

    def geometry_key(self, fqn: str) -> tuple[object, ...]:
        """All that the plan of a tensor depends on but for names: those with equal keys share one plan."""
        view = self.views.get(fqn)
        saved = tuple(self.saved[source].geometry_key for source in self.sources(fqn))
        return self.wanted[fqn].geometry_key, None if view is None else view.geometry, saved

    def saved_itemsize(self, fqn: str) -> int:
        """Bytes per element of a wanted tensor, as saved."""
        view = self.views.get(fqn)
        return self.saved[fqn].spec.itemsize if view is None else view.spec.itemsize

    def items(self, rank: int) -> ReadItems:
        """What `rank` reads.

        Raises PlanError for a rank outside the job, CoverageError if no saved chunk holds a wanted element.
        """
        if rank in self.explicit:
            return self.explicit[rank]
        self._check(rank)
        found: list[tuple[int, list[ReadItem]]] = []
        for group in self.groups():
            first = next(iter(group))
            pattern = self.tensor_items(first, rank)
            if not pattern:
                continue
            for fqn, position in group.items():
                if fqn in self.views:
                    names = dict(zip(self.sources(first), self.sources(fqn)))
                    items = [ReadItem(fqn, *item[1:7], names[item.saved_fqn], item.dims) for item in pattern]
                else:
                    items = [ReadItem(fqn, *item[1:]) for item in pattern]
                found.append((position, items))
        found.sort(key=lambda row: row[0])
        return ReadItems(itertools.chain.from_iterable(items for _, items in found))

    def groups(self) -> tuple[dict[str, int], ...]:
        """Wanted names that share one plan, with their places among all wanted ones; found once.

        Raises LayoutMismatchError if a wanted tensor, or one that its view takes from, is not saved.
        """
        if self._groups is None:
            groups: dict[tuple[object, ...], dict[str, int]] = {}
            for position, fqn in enumerate(self.wanted):
                try:
                    groups.setdefault(self.geometry_key(fqn), {})[fqn] = position
                except KeyError as error:
                    raise LayoutMismatchError(f"{error} is not saved", fqn=fqn) from None
            self._groups = tuple(groups.values())
        return self._groups

    def tensor_items(self, fqn: str, rank: int) -> list[ReadItem]:
        """What the layouts make `rank` read of one tensor, whatever was listed explicitly."""
        names, itemsize = self.sources(fqn) if fqn in self.views else (None,), self.saved_itemsize(fqn)
        try:
            return [
                ReadItem(fqn, owner, chunk, source, target, source.numel * itemsize, part, names[tensor], dims)
                for owner, chunk, source, target, part, tensor, dims in self.overlap(fqn).pieces(rank)
            ]
        except CoverageError as error:
            raise CoverageError(str(error), fqn=fqn, rank=rank, box=error.box) from None

    def fills(self, rank: int) -> tuple[FillItem, ...]:
        """The constants that views put in the local tensors of `rank`: padding, above all."""
        self._check(rank)
        return tuple(
            FillItem(fqn, slot.box, slot.value, slot.part)
            for fqn in self.wanted
            if fqn in self.views
            for slot in self.overlap(fqn).fills(rank)
        )

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
            view = self.views.get(fqn)
            if view is None and fqn not in self.saved:
                continue  # nothing to read: verify says so
            filled = view.geometry if view is not None and view.fills else None
            groups.setdefault((wanted.geometry_key, self.saved_itemsize(fqn), filled), []).append(fqn)
        for names in groups.values():
            held, view = self.wanted[names[0]].numels(), self.views.get(names[0])
            if view is not None and view.fills:
                overlap, held = self.overlap(names[0]), held.copy()
                for ranks in overlap.replicas():
                    held[ranks] -= sum(slot.box.numel for slot in overlap.fills(int(ranks[0])))
            total[: len(held)] += held * (self.saved_itemsize(names[0]) * len(names))
        for rank, items in self.explicit.items():
            total[rank] = items.nbytes
        return total

    def bytes(self, rank: int) -> int:
        """Bytes that `rank` reads."""
        self._check(rank)
        return int(self.rank_bytes()[rank])

    @property
    def total_bytes(self) -> int:
        """Bytes that all ranks read together."""
        return int(self.rank_bytes().sum())

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise PlanError(f"there are ranks 0 to {self.world_size - 1} only", rank=rank)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LoadPlan):
            return NotImplemented
        mine = (self.saved, self.wanted, self.explicit, self.views)
        return mine == (other.saved, other.wanted, other.explicit, other.views)

    __hash__ = None  # type: ignore[assignment]  # holds mappings of many tensors

    def __repr__(self) -> str:
        return (
            f"LoadPlan({len(self.wanted)} tensors, {self.saved.world_size} -> {self.world_size} ranks, "
            f"{self.total_bytes} bytes)"
        )


def plan_reads(
    saved: StateLayout,
    wanted: StateLayout,
    *,
    allow_cast: bool = False,
    views: Mapping[str, View] | Iterable[View] = (),
) -> LoadPlan:
    """What every rank of `wanted` reads from chunks placed as `saved`. Tensors that only `saved` has are not read.

    `views` says which wanted tensors are made of saved ones of other names or shapes; views of tensors that are not
    wanted are not used. Deterministic: a function of the arguments alone, the same on every rank.

    Raises:
        LayoutMismatchError: names all wanted tensors, and all tensors that views take from, that are not saved, or
            saved with another shape or (unless `allow_cast`, which leaves the cast to whoever obeys the plan) another
            dtype.
    """
    given = views.values() if isinstance(views, Mapping) else views
    used = {view.spec.fqn: view for view in given if view.spec.fqn in wanted}
    problems: list[str] = []
    for fqn, layout in wanted.items():
        view = used.get(fqn)
        if view is None:
            _judge(problems, saved, layout.spec, "wanted", allow_cast)
            continue
        if view.shape != layout.spec.shape:
            problems.append(f"{fqn!r} is made by a view with shape {view.shape}, but wanted with {layout.spec.shape}")
        if view.spec.dtype != layout.spec.dtype and not allow_cast:
            problems.append(f"{fqn!r} is made by a view as {view.spec.dtype}, but wanted as {layout.spec.dtype}")
        for source in view.sources:
            _judge(problems, saved, source, f"a view takes it for {fqn!r}", allow_cast=False)
    if problems:
        raise LayoutMismatchError("the wanted state does not fit the saved one: " + "; ".join(problems))
    return LoadPlan(saved, wanted, views=used)


def _judge(problems: list[str], saved: StateLayout, spec: TensorSpec, by: str, allow_cast: bool) -> None:
    """Add what keeps a tensor from being read as `spec`."""
    other = saved.get(spec.fqn)
    if other is None:
        close = difflib.get_close_matches(spec.fqn, list(saved), n=1) if len(problems) < 20 else []
        problems.append(f"{spec.fqn!r} is not saved" + (f" (did you mean {close[0]!r}?)" if close else ""))
    elif other.spec.shape != spec.shape:
        problems.append(f"{spec.fqn!r} is saved with shape {other.spec.shape}, but {by} with {spec.shape}")
    elif other.spec.dtype != spec.dtype and not allow_cast:
        problems.append(f"{spec.fqn!r} is saved as {other.spec.dtype}, but {by} as {spec.dtype}")
