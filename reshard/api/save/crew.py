"""Which ranks write one file together: `ranks_per_file` of one machine, next to one another in the order of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from reshard.control.group import Group
from reshard.control.liveness import machine
from reshard.formats.native.common_file import Crew

__all__ = ["crew_of", "crews"]


def crews(places: Iterable[int], per_file: int) -> Iterator[list[int]]:
    """Runs of at most `per_file` places that follow one another, of the ascending ones of a machine."""
    run: list[int] = []
    for place in places:
        if run and (place != run[-1] + 1 or len(run) == per_file):
            yield run
            run = []
        run.append(place)
    if run:
        yield run


def crew_of(group: Group, ranks_per_file: int) -> Crew:
    """The ranks with which this one writes a file. Collective, as is what they tell one another."""
    here = machine() or f"rank {group.ranks[group.rank]}"
    ordered = sorted(group.ranks)
    place_of = {rank: place for place, rank in enumerate(ordered)}
    together = group.among(f"files of {here}", b"")
    neighbours = sorted(place_of[group.ranks[place]] for place in together)
    own = place_of[group.ranks[group.rank]]
    places = next(run for run in crews(neighbours, ranks_per_file) if own in run)
    ranks = tuple(ordered[place] for place in places)

    def tell(data: bytes) -> list[bytes]:
        said = {group.ranks[place]: one for place, one in group.among(f"file of rank {ranks[0]}", data).items()}
        return [said[rank] for rank in ranks]

    return Crew(ranks, places.index(own), tell)
