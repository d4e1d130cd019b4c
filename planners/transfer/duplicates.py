"""Elements that a rank wants several times over, moved once: what remains to be moved, and what to copy afterwards.

Each of several forms says what the ranks want of one tensor, such as for two targets made of it, or for a target
in which it is repeated. What an earlier form brings to a rank, a later one need not bring again:

    first form   a b c d . .           moved    a b c d . .
    second form  . . c d e f           moved    . . . . e f     repeated  c d, from where the first form put them
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from planners.geometry.box import Box
from planners.geometry.layout_forms import BoxesForm, Form, Shape

__all__ = ["Place", "Repeat", "WantedOnce", "want_once"]


class Place(NamedTuple):
    """Elements in what a rank holds by one of the forms."""

    form: int
    """Number of the form, as given."""
    part: int
    """Which local tensor."""
    box: Box
    """In its coordinates."""


class Repeat(NamedTuple):
    """Elements that are in place already, and where they are wanted once more."""

    source: Place
    target: Place


@dataclass(frozen=True)
class WantedOnce:
    """The forms without repetitions."""

    forms: tuple[Form, ...]
    """What is to be moved, for each form that was given."""
    places: tuple[Mapping[int, tuple[Place, ...]] | None, ...]
    """For each form: rank -> where each of its boxes goes in the local tensors of the form that was given; None where
    that form is unchanged."""
    repeats: Mapping[int, tuple[Repeat, ...]]
    """By rank, to be copied in this order when everything has been moved."""


@lru_cache(maxsize=256)
def want_once(shape: Shape, forms: tuple[Form, ...]) -> WantedOnce:
    """What is to be moved of a tensor of which ranks want all of `forms`, so that no rank gets an element twice."""
    near = _near(shape, forms)
    out: list[Form] = list(forms)
    places: list[Mapping[int, tuple[Place, ...]] | None] = [None] * len(forms)
    moved: dict[tuple[int, int], list[tuple[Place, Box]]] = {}
    repeats: dict[int, list[Repeat]] = {}
    for number, form in enumerate(forms):
        kept: dict[int, list[tuple[Place, Box]]] = {}
        repeated = False
        for rank in form.ranks():
            before = [row for other in near[number] for row in moved.get((other, rank), ())]
            rest, again = _new_of(_pieces(number, form, shape, rank), before)
            kept[rank] = moved[number, rank] = rest
            repeats.setdefault(rank, []).extend(again)
            repeated = repeated or bool(again)
        if repeated:
            out[number] = BoxesForm.make({r: [box for _, box in rows] for r, rows in kept.items()}, form.world_size)
            places[number] = {rank: tuple(place for place, _ in rows) for rank, rows in kept.items()}
    return WantedOnce(tuple(out), tuple(places), {rank: tuple(its) for rank, its in repeats.items() if its})


def _pieces(number: int, form: Form, shape: Shape, rank: int) -> list[tuple[Place, Box]]:
    """(where it goes, which elements it is) of all that a rank wants of a form."""
    return [
        (Place(number, index, local), box)
        for index, part in enumerate(form.parts(shape, rank))
        for box, local in part.boxes()
        if not box.is_empty
    ]


def _new_of(
    wanted: Sequence[tuple[Place, Box]], before: Iterable[tuple[Place, Box]]
) -> tuple[list[tuple[Place, Box]], list[Repeat]]:
    """Of what is wanted, what was not there before, and what was."""
    again: list[Repeat] = []
    rest = list(wanted)
    for there, known in before:
        left: list[tuple[Place, Box]] = []
        for place, box in rest:
            common = box & known
            if common is None:
                left.append((place, box))
                continue
            again.append(Repeat(_within(there, common, known), _within(place, common, box)))
            left.extend((_within(place, piece, box), piece) for piece in box.difference(common))
        rest = left
    return rest, again


def _within(place: Place, piece: Box, box: Box) -> Place:
    """Where a piece of `box` is, which itself is at `place`."""
    return place._replace(box=piece.relative_to(box).shift(place.box.offsets))


def _near(shape: Shape, forms: Sequence[Form]) -> list[list[int]]:
    """For each form, the earlier ones of which it may want the same elements: slices of a stack are none."""
    hulls = [_hull(form, shape) for form in forms]
    if not shape:
        return [[i for i in range(number) if hulls[i] is not None] for number in range(len(forms))]
    dim = max(range(len(shape)), key=lambda d: len({hull.offsets[d] for hull in hulls if hull is not None}))
    order = sorted((n for n, h in enumerate(hulls) if h is not None), key=lambda n: hulls[n].offsets[dim])  # type: ignore[union-attr]
    out: list[list[int]] = [[] for _ in forms]
    active: list[int] = []
    for number in order:
        hull = hulls[number]
        assert hull is not None
        active = [n for n in active if hulls[n].stops[dim] > hull.offsets[dim]]  # type: ignore[union-attr]
        for other in active:
            if hulls[other] & hull is not None:  # type: ignore[operator]
                out[max(number, other)].append(min(number, other))
        active.append(number)
    return [sorted(its) for its in out]


def _hull(form: Form, shape: Shape) -> Box | None:
    """The smallest box around all that the ranks want; None for nothing."""
    if not isinstance(form, BoxesForm):
        return Box.full(shape) if 0 not in shape else None
    boxes = [box for _, its in form.boxes for box in its if not box.is_empty]
    if not boxes:
        return None
    low = tuple(map(min, zip(*(box.offsets for box in boxes))))
    high = tuple(map(max, zip(*(box.stops for box in boxes))))
    return Box.of(low, tuple(b - a for a, b in zip(low, high)))
