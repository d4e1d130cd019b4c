"""A rank that hangs, at any of its questions to the store: who is named for it."""

from __future__ import annotations

import re

import pytest

from reshard.errors import DeadlineError
from reshard.ranks.rounds import FAN
from tests.simulated_ranks import World

HUNG_OF = FAN + 3


def hung(rank: int, at: int | None) -> tuple[World, list[object]]:
    """A phase of three rounds, in which a rank hangs when it asks the store for the `at`th time."""
    world = World(HUNG_OF, freeze={} if at is None else {rank: at})

    def body(place: int) -> str:
        group = world.group(place, deadline_s=60.0)
        try:
            with group.together("write"):
                group.barrier()
                group.merge(b"x" * 10, b"".join, "a sum")
        except DeadlineError as error:
            return str(error)
        return "done"

    with world.clock():
        return world, world.run(body)


@pytest.mark.parametrize("rank", [0, 5, FAN - 1, FAN, HUNG_OF - 1])
def test_a_rank_that_hangs_is_named_wherever_it_hangs(rank: int) -> None:
    """Also between posting and counting itself, and as the one that closes a log or the round."""
    world, ends = hung(rank, None)
    assert set(ends) == {"done"}
    named = 0
    for at in range(world.asked[rank]):
        world, ends = hung(rank, at)
        others = {end for place, end in enumerate(ends) if place != rank}
        assert len(others) == 1, (at, others)
        (said,) = others
        assert ends[rank] is None
        if said != "done":  # what it still had to do concerned nobody
            assert re.search(rf"\brank {rank} did not (reach|go on|start to wait)", said), (at, said)
            assert world.now < 75
            named += 1
    assert named >= 8
