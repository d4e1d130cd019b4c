"""The control plane among many simulated ranks: whoever crashes, hangs, fails or is late, in any order."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from property_tests.budget import examples
from reshard.errors import DeadlineError, LayoutError, RankFailedError, ReshardError
from reshard.ranks import rounds as store_rounds
from reshard.ranks.group import DistinctValues, Group
from tests.simulated_ranks import Died, World

DEADLINE_S = 60.0

VERBS = ("barrier", "exchange", "gather", "sum", "scatter", "share", "within", "distinct", "agree", "any", "busy")


def _do(verb: str, group: Group, world: World) -> None:
    """A verb, and whether its answer is right."""
    rank, size = group.rank, group.world_size
    mine = b"%d" % rank
    everybody = [b"%d" % place for place in range(size)]
    if verb == "barrier":
        group.barrier()
    elif verb == "exchange":
        assert group.exchange(mine) == everybody
    elif verb == "gather":
        long = 40_000 if rank % 5 == 0 else 1
        rows = group.gather(mine * long, size - 1)
        assert rows == ([b"%d" % r * (40_000 if r % 5 == 0 else 1) for r in range(size)] if rank == size - 1 else None)
    elif verb == "sum":
        told = group.gather_and_sum(mine, mine, lambda parts: b"%d" % sum(map(int, parts)), 0)
        assert told == ((everybody, b"%d" % sum(range(size))) if rank == 0 else None)
    elif verb == "scatter":
        assert group.scatter(everybody if rank == 0 else None, common=mine) == (mine, b"0")
    elif verb == "share":
        assert group.share(None if rank else b"all of you" * 9999) == b"all of you" * 9999
    elif verb == "within":
        mates = [place for place in range(size) if place % 3 == rank % 3]
        assert group.exchange_within(f"{rank % 3}", mine) == {place: b"%d" % place for place in mates}
    elif verb == "distinct":
        answers = group.distinct_answers("odd" if rank % 2 else "even")
        assert answers == [("even", [*range(0, size, 2)]), ("odd", [*range(1, size, 2)])]
    elif verb == "agree":
        group.agree(b"same", "the layout")
        with pytest.raises(LayoutError, match="differ"):
            group.agree(mine, "the layout")
    elif verb == "any":
        assert group.merge(rank == size - 1, any, "a question")
    else:
        for _ in range(3):
            world.sleep(1.0)
            group.check()


@st.composite
def histories(draw: st.DrawFn) -> dict[str, Any]:
    """What the ranks do in three sessions, one of which goes wrong."""
    size = draw(st.integers(2, 40))
    culprit = draw(st.integers(0, size - 1))
    return {
        "size": size,
        "fan": draw(st.sampled_from([2, 3, 128])),
        "seed": draw(st.integers(0, 1 << 30)),
        "verbs": draw(st.lists(st.sampled_from(VERBS), max_size=4)),
        "how": draw(st.sampled_from(["crash", "raise", "hang", "late", "far"])),
        "culprit": culprit,
        "at": draw(st.integers(0, 40)),
    }


@given(histories())
@settings(max_examples=examples(60), deadline=None)
def test_all_ranks_end_alike_and_in_time(history: dict[str, Any]) -> None:
    size, how, culprit, at = (history[name] for name in ("size", "how", "culprit", "at"))
    is_far = how == "far"
    world = World(size, per_machine=1 if is_far else 4, choose=random.Random(history["seed"]).randrange)
    began: dict[int, float] = {}

    def body(rank: int) -> Any:
        _session(world, rank, history["verbs"], -1, "")
        if rank == culprit and how in ("crash", "far"):
            world.crash[rank] = world.asked[rank] + at
        began[rank] = world.now
        try:
            _session(world, rank, history["verbs"], at if rank == culprit else -1, how)
            end: tuple[type, str] = (type(None), "")
        except Exception as error:
            if not isinstance(error, ReshardError | OSError):
                raise
            end = (type(error), str(error))
        took = world.now - began[rank]
        if how in ("raise", "late"):
            _session(world, rank, history["verbs"], -1, "")
        return *end, took

    with pytest.MonkeyPatch.context() as patch, world.clock():
        patch.setattr(store_rounds, "FAN", history["fan"])
        patch.setattr(store_rounds.Rounds, "fan", history["fan"])
        ends = world.run(body)
    _judge(ends, world, history)


def _session(world: World, rank: int, verbs: list[str], at: int, how: str) -> None:
    group = world.group(rank, deadline_s=DEADLINE_S)
    with group.together("work"):
        for number, verb in enumerate([*verbs, "barrier"]):
            if number == at % (len(verbs) + 1) and at >= 0:
                if how == "raise":
                    raise OSError("no space left")
                if how in ("hang", "late"):
                    world.sleep(1000.0 if how == "hang" else 40.0)
            _do(verb, group, world)


def _judge(ends: list[Any], world: World, history: dict[str, Any]) -> None:
    how, culprit = history["how"], history["culprit"]
    is_unseen = how == "far" or (culprit == len(ends) - 1 and culprit % 4 == 0)  # nobody else is on its machine
    others = [end for rank, end in enumerate(ends) if rank != culprit]
    unexpected = [end for end in others if not isinstance(end, tuple)]
    assert not unexpected, unexpected[0]
    kinds, messages = {kind for kind, _, _ in others}, {message for _, message, _ in others}
    busy = 3.0 * history["verbs"].count("busy")
    longest = max(took for *_, took in others)
    assert len(kinds) == 1, (kinds, messages)
    if how == "late":
        assert kinds == {type(None)}
        assert longest <= 40.0 + busy + 0.1
    elif how == "raise":
        assert kinds == {RankFailedError}
        assert messages == {others[0][1]}
        assert "no space left" in others[0][1]
        assert longest <= busy + 5.0
    elif how == "hang":
        assert kinds == {DeadlineError}
        assert f"rank {culprit} did not reach" in others[0][1]
        assert longest <= DEADLINE_S + 5.0
    elif isinstance(ends[culprit], Died):
        assert kinds <= {RankFailedError, DeadlineError, type(None)}
        assert longest <= (DEADLINE_S if is_unseen else busy) + 5.0
    if how in ("raise", "late"):
        assert len(world.values) <= len(ends), [key for key in world.values if not key.startswith("sessions/")][:5]


@pytest.mark.parametrize(
    ("how", "size", "deadline_s"),
    [("raise", 1024, 1800.0), ("crash", 1024, 1800.0), ("hang", 1024, 30.0), ("late", 256, 1800.0)],
)
def test_of_many_ranks_all_have_the_first_error_at_once(how: str, size: int, deadline_s: float) -> None:
    """Within 5 s, or at the deadline of who hangs; a rank that is late by ten minutes is none that failed."""
    culprit, late_s = size // 2 + 5, 600.0
    world = World(size)
    failed_s: list[float] = []

    def trouble(rank: int) -> None:
        failed_s.append(world.now)
        if how == "raise":
            raise OSError("no space left")
        if how == "crash":
            world.crash[rank] = world.asked[rank]
        else:
            world.sleep(late_s)

    def body(rank: int) -> tuple[type, str, float]:
        group = world.group(rank, deadline_s=deadline_s)
        try:
            with group.together("save"):
                group.share(b"which save" if rank == 0 else None)
                if rank == culprit:
                    trouble(rank)
                for _ in range(8 if rank % 2 else 0):  # some work, others wait already
                    world.sleep(1.0)
                    group.check()
                group.barrier()
        except (ReshardError, OSError) as error:
            return type(error), str(error), world.now
        return type(None), "", world.now

    with world.clock():
        ends = world.run(body)
    kinds = {kind for kind, *_ in ends[:culprit] + ends[culprit + 1 :]}
    messages = {message for _, message, _ in ends[:culprit] + ends[culprit + 1 :]}
    took = max(when for *_, when in ends[:culprit] + ends[culprit + 1 :]) - failed_s[0]
    wanted = {"raise": RankFailedError, "crash": RankFailedError, "hang": DeadlineError, "late": type(None)}
    assert (kinds, len(messages)) == ({wanted[how]}, 1)
    assert how == "late" or f"rank {culprit} " in messages.pop()
    assert took <= {"hang": deadline_s, "late": late_s + 8.0}.get(how, 0.0) + 5.0
    if how in ("raise", "late"):
        assert len(world.values) <= size


@given(st.integers(1, 600), st.sampled_from([2, 5, 128]), st.data())
@settings(max_examples=examples(20), deadline=None)
def test_pools_are_what_all_said(size: int, fan: int, data: st.DataObject) -> None:
    said = data.draw(st.lists(st.sampled_from([b"", b"a", b"b"]), min_size=size, max_size=size))
    pools = [DistinctValues([one]) for one in said]
    while len(pools) > 1:
        pools = [DistinctValues.join(pools[i : i + fan]) for i in range(0, len(pools), fan)]
    assert [pools[0].distinct[number] for number in pools[0].numbers()] == said
