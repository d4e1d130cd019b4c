"""The control plane on real processes: agreement, exchange, and one end for all whatever happens to one of them."""

from __future__ import annotations

import os
import re
import time
from datetime import timedelta

import msgspec
import pytest
import torch
import torch.distributed as dist

from reshard.errors import DeadlineError, LayoutError, RankFailedError, ReshardError
from reshard.ranks import liveness
from reshard.ranks.group import Group
from tests import gloo


def test_alone_without_torch_distributed() -> None:
    group = Group()
    assert (group.rank, group.world_size, group.ranks) == (0, 1, (0,))
    with group.together("save"):
        group.barrier()
        group.check()
        group.agree(b"x", "the layout")
        assert group.exchange(b"x") == [b"x"]
        assert group.distinct_answers(b"x") == [(b"x", (0,))]
        assert group.share(b"y") == b"y"
        assert group.gather(b"z") == [b"z"]
        assert group.scatter([b"z"], common=b"y") == (b"z", b"y")
        assert group.exchange_within("machine", b"z") == {0: b"z"}
        assert group.merge(True, any, "a question")
    with pytest.raises(KeyError, match="lost"), group.together("save"):
        raise KeyError("lost")


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ReshardError, match="positive"):
        Group(deadline_s=0)
    with pytest.raises(ReshardError, match="no rank 1"):
        Group().gather(b"", root=1)
    with pytest.raises(ReshardError, match="gave None"):
        Group().share(None)
    with pytest.raises(ReshardError, match="each of 1 ranks"):
        Group().scatter([])


def _without_end() -> float:
    began = time.monotonic()
    for deadline_s in (float("inf"), 100 * 86_400.0):  # torch counts milliseconds in 32 bits
        group = Group(deadline_s=deadline_s)
        if dist.get_rank():
            time.sleep(0.2)
        with group.together("wait"):
            group.barrier()
    return time.monotonic() - began


@pytest.mark.gloo
def test_deadlines_may_be_far() -> None:
    assert max(gloo.run(_without_end, 2, timeout_s=20.0)) < gloo.SOON_S


# --- verbs ---


class _Range(msgspec.Struct):
    low: int
    high: int

    @staticmethod
    def join(parts: list[_Range]) -> _Range:
        return _Range(min(part.low for part in parts), max(part.high for part in parts))


def _verbs() -> None:
    rank = dist.get_rank()
    group = Group(deadline_s=20)
    assert (group.rank, group.world_size, group.ranks) == (rank, 3, (0, 1, 2))
    with group.together("all verbs"):
        group.agree(b"\xffsame\0", "the layout")
        assert group.exchange(bytes([rank])) == [b"\0", b"\1", b"\2"]
        assert group.exchange(b"") == [b"", b"", b""]
        assert group.distinct_answers(b"same") == [(b"same", (0, 1, 2))]
        assert group.distinct_answers("odd" if rank == 1 else "") == [("", [0, 2]), ("odd", [1])]
        answers = group.distinct_answers({"a": rank % 2}, kind=dict[str, int])
        assert answers == [({"a": 0}, [0, 2]), ({"a": 1}, [1])]
        group.same_options("save", {"a": [1], "b": None})
        with pytest.raises(LayoutError, match=r"call save with different options.*: b: 0 on ranks 0, 2, 7 on rank 1$"):
            group.same_options("save", {"a": [1], "b": 7 * (rank == 1)})
        assert group.share(None if rank else b"from 0") == b"from 0"
        assert group.gather(bytes([rank]), root=1) == ([b"\0", b"\1", b"\2"] if rank == 1 else None)
        each = [b"a", b"b", b""]
        assert group.scatter(each if rank == 2 else None, root=2, common=b"%d" % rank) == (each[rank], b"2")
        name = "even" if rank % 2 == 0 else "odd"
        assert group.exchange_within(name, rank) == ({0: 0, 2: 2} if rank != 1 else {1: 1})
        assert not group.merge(False, any, "a question")
        assert group.merge(rank == 2, any, "a question")
        assert group.merge(b"%d" % rank, b"".join, "a joining") == b"012"
        least = group.merge(_Range(rank, rank), _Range.join, "a range")
        assert (least.low, least.high) == (0, 2)
        assert group.share((rank, "a"), kind=tuple[int, str]) == (0, "a")
        rows = group.gather([(rank, "a")], kind=list[tuple[int, str]])
        assert rows == (None if rank else [[(r, "a")] for r in range(3)])
        group.barrier()
        with group.together("inner"):
            group.barrier()
    _large(group, rank)
    _disagreement(group, rank)
    _subgroups(rank)
    _threads(rank)
    _no_garbage(rank)


def _large(group: Group, rank: int) -> None:
    mine = os.urandom(1) * (9 << 20)  # larger than the store takes in one value
    everybody = group.exchange(mine)
    assert [len(data) for data in everybody] == [9 << 20] * 3
    assert everybody[rank] == mine
    assert group.exchange(bytes([rank]) * 40_000) == [bytes([r]) * 40_000 for r in range(3)]
    sizes = [len(data) for data in group.gather(mine[: 5 << 20]) or ()]
    assert sizes == ([5 << 20] * 3 if rank == 0 else [])
    assert len(group.exchange_within("all", mine)[2]) == 9 << 20
    group.barrier()


def _disagreement(group: Group, rank: int) -> None:
    for _ in range(2):  # the group stays usable
        with pytest.raises(LayoutError, match=r"^the ranks differ in the layout: ranks 0, 2 vs\. rank 1$"):
            group.agree(b"odd" if rank == 1 else b"even", "the layout")
    with pytest.raises(KeyError, match="rank 0 vs"), group.together("planning"):
        group.agree(bytes([rank]), "the path", error=_PathError)
    assert group.exchange(b"%d" % rank) == [b"0", b"1", b"2"]


class _PathError(ReshardError, KeyError):
    pass


def _subgroups(rank: int) -> None:
    pair = dist.new_group([0, 2])
    if rank == 1:
        with pytest.raises(ReshardError, match="rank 1 is not a member"):
            Group(pair)
        return
    group = Group(pair, deadline_s=20)
    assert (group.rank, group.world_size, group.ranks) == (rank // 2, 2, (0, 2))
    assert group.exchange(b"%d" % rank) == [b"0", b"2"]
    with pytest.raises(LayoutError, match=r"rank 0 vs\. rank 2"):
        group.agree(b"%d" % rank, "the layout")


def _threads(rank: int) -> None:
    """Two groups at once on one process group, one of them in a background thread."""
    import threading

    back, front = Group(deadline_s=20), Group(deadline_s=20)
    seen: list[list[bytes]] = []

    def background() -> None:
        for i in range(20):
            seen.append(back.exchange(b"back %d %d" % (i, rank)))

    thread = threading.Thread(target=background)
    thread.start()
    for i in range(20):
        total = torch.ones(1)
        dist.all_reduce(total)
        assert front.exchange(b"front %d %d" % (i, rank)) == [b"front %d %d" % (i, r) for r in range(3)]
    thread.join()
    assert seen == [[b"back %d %d" % (i, r) for r in range(3)] for i in range(20)]


def _no_garbage(rank: int) -> None:
    """Sessions that end well leave nothing; those without an end, or with an error, what the next one removes."""
    from reshard.ranks.store import store_of

    store = store_of(dist.group.WORLD, 0.0).lend(0.0).store
    Group().barrier()
    dist.barrier()
    before = store.num_keys()  # type: ignore[attr-defined]
    dist.barrier()
    for _ in range(5):
        group = Group(deadline_s=20)
        with group.together("save"):
            for _ in range(10):
                group.exchange(b"%d" % rank * 50_000)
                group.gather(b"%d" % rank * 50_000)
        Group(deadline_s=20).exchange(b"%d" % rank * 50_000)
        with pytest.raises(ValueError if rank == 2 else RankFailedError), Group(deadline_s=20).together("load") as _:
            _raise_if(rank == 2)
    del group
    with Group(deadline_s=20).together("the last"):
        pass
    dist.barrier()
    grown = store.num_keys() - before  # type: ignore[attr-defined]
    assert grown <= 0, f"{grown} keys more after sixteen sessions"


@pytest.mark.gloo
@pytest.mark.parametrize("store", ["rank0", "file"])
def test_verbs(store: str) -> None:
    gloo.run(_verbs, 3, store=store)


# --- one end for all ---


def _phase(who: int | tuple[int, ...], how: str, deadline_s: float = 1.0) -> tuple[str, str, float, float]:
    """What this rank ended with: class and text of its error, seconds in the phase, when (wall clock)."""
    rank = dist.get_rank()
    if how == "exit far away":
        liveness.machine = lambda: ""
    group = Group(deadline_s=30)
    start = time.time()
    try:
        with group.together("warm up"):
            group.barrier()
        with group.together("write", deadline_s=deadline_s):
            if rank == who or (isinstance(who, tuple) and rank in who):
                if how == "raise":
                    time.sleep(0.3)
                    raise OSError(28, "no space left for layers.7.weight")
                if how.startswith("exit"):
                    os._exit(3)
                if how == "sleep":
                    time.sleep(2.5)
                if how == "verb":
                    group.barrier()
            elif how.endswith("busy"):
                while True:
                    time.sleep(0.01)
                    group.check()
            elif how == "verb":
                group.exchange(b"")
            if rank == who and how == "busy":
                raise ValueError("odd one out")
    except Exception as error:
        notes = "\n".join(getattr(error, "__notes__", []))
        trace = getattr(error, "traceback", "")
        return type(error).__name__, f"{error}\n{notes}\n{trace}", time.time() - start, time.time()
    return "", "", time.time() - start, time.time()


@pytest.mark.gloo
@pytest.mark.parametrize("who", [0, 1])
def test_one_raises(who: int) -> None:
    results = gloo.run(_phase, 3, who, "raise")
    for rank, (kind, text, seconds, _) in enumerate(results):
        assert kind == ("OSError" if rank == who else "RankFailedError")
        assert "no space left for layers.7.weight" in text
        assert seconds < gloo.SOON_S
        if rank != who:
            assert text.startswith(f"rank {who} failed in 'write': OSError")
            message, trace = text.split("Traceback (most recent call last)")
            assert message.strip().endswith("in _phase; .traceback of this error has all frames)")
            assert "in _phase\n" in trace


@pytest.mark.gloo
def test_one_raises_while_the_others_are_busy() -> None:
    results = gloo.run(_phase, 3, 1, "busy")
    assert [kind for kind, *_ in results] == ["RankFailedError", "ValueError", "RankFailedError"]
    assert all(seconds < gloo.SOON_S for _, _, seconds, _ in results)


@pytest.mark.gloo
@pytest.mark.parametrize("store", ["parent", "rank0"])
def test_one_exits(store: str) -> None:
    ends = gloo.outcomes(_phase, 3, 1, "exit", 30.0, store=store)
    assert ends[1].exitcode == 3
    for end in (ends[0], ends[2]):
        kind, text, seconds, _ = end.value
        assert kind == "RankFailedError"
        assert re.match(r"rank 1 \(process \d+ on .*\) is gone: it exited .* before the end of 'write'", text)
        assert seconds < gloo.SOON_S


def _last_to_come_exits() -> tuple[str, float]:
    rank = dist.get_rank()
    time.sleep({1: 0.0, 2: 0.3, 0: 1.5}[rank])  # the first has looked, and seen the second only, when the last comes
    group = Group()
    group.barrier()
    time.sleep(0.4 if rank == 1 else 0.0)  # it closes this round, so that it need not wait
    group.barrier()
    if rank == 0:
        os._exit(3)
    start = time.monotonic()
    with pytest.raises(RankFailedError) as caught:
        group.barrier()
    return str(caught.value), time.monotonic() - start


@pytest.mark.gloo
def test_the_last_to_come_exits() -> None:
    ends = gloo.outcomes(_last_to_come_exits, 3, store="parent")
    for end in ends[1:]:
        assert end.value is not None, end.trace
        text, seconds = end.value
        assert text.startswith("rank 0 (process")
        assert seconds < gloo.SOON_S


@pytest.mark.gloo
def test_two_of_three_exit() -> None:
    ends = gloo.outcomes(_phase, 3, (1, 2), "exit", 30.0)
    kind, text, seconds, _ = ends[0].value
    assert kind == "RankFailedError"
    assert text.startswith(("rank 1 (process", "rank 2 (process"))
    assert seconds < gloo.SOON_S


@pytest.mark.gloo
def test_one_exits_while_the_others_are_busy() -> None:
    ends = gloo.outcomes(_phase, 3, 1, "exit while busy", 30.0)
    for end in (ends[0], ends[2]):
        kind, text, seconds, _ = end.value
        assert kind == "RankFailedError"
        assert text.startswith("rank 1 (process")
        assert seconds < gloo.SOON_S


@pytest.mark.gloo
def test_one_exits_where_nobody_can_see_it() -> None:
    ends = gloo.outcomes(_phase, 3, 1, "exit far away")
    for end in (ends[0], ends[2]):
        kind, text, seconds, _ = end.value
        assert kind == "DeadlineError"
        assert text.startswith("rank 1 did not reach the end of 'write' within 1 s; waiting there: ranks 0, 2")
        assert seconds < 1.0 + gloo.SOON_S


@pytest.mark.gloo
def test_the_host_of_the_store_exits() -> None:
    ends = gloo.outcomes(_phase, 3, 0, "exit", store="rank0")
    for end in ends[1:]:
        kind, text, seconds, _ = end.value
        assert kind == "RankFailedError"
        assert "the process that hosts it, usually rank 0, has probably exited" in text
        assert seconds < gloo.SOON_S


@pytest.mark.gloo
@pytest.mark.parametrize("who", [0, 1])
def test_one_sleeps_past_the_deadline(who: int) -> None:
    results = gloo.run(_phase, 3, who, "sleep")
    texts = {text for _, text, _, _ in results}
    assert {kind for kind, *_ in results} == {"DeadlineError"}, "the sleeper too, when it wakes"
    assert len(texts) == 1
    assert texts.pop().startswith(f"rank {who} did not reach the end of 'write'")
    for rank, (_, _, seconds, _) in enumerate(results):
        assert seconds < (2.5 if rank == who else 1.0) + gloo.SOON_S


@pytest.mark.gloo
def test_ranks_that_do_different_things_are_told_so() -> None:
    results = gloo.run(_phase, 3, 1, "verb")
    assert {kind for kind, *_ in results} == {"ReshardError"}
    for _, text, _, _ in results:
        assert "a barrier in 'write': rank 1; an exchange in 'write': ranks 0, 2" in text or (
            "an exchange in 'write': ranks 0, 2; a barrier in 'write': rank 1" in text
        )


# --- afterwards ---


def _two_fail() -> tuple[str, str]:
    group = Group(deadline_s=10)
    rank = dist.get_rank()
    try:
        with group.together("read"):
            if rank:
                time.sleep(0.5 * (rank - 1))
                raise ValueError(f"bad byte on {rank}")
    except (ValueError, RankFailedError) as error:
        return str(error), "\n".join(getattr(error, "__notes__", []))
    return "", ""


def _missed_a_session() -> list[bytes]:
    """Rank 1 fails before it gets to the save; the next save works all the same."""
    rank = dist.get_rank()
    if rank != 1:
        with pytest.raises(DeadlineError, match=r"rank 1 did not reach an exchange within 0\.5 s"):
            Group(deadline_s=0.5).exchange(b"early")
    dist.barrier()
    group = Group(deadline_s=10)
    answer = group.exchange(b"%d" % rank)
    with pytest.raises(ValueError if rank == 2 else RankFailedError), group.together("read"):
        _raise_if(rank == 2)
    with pytest.raises(RankFailedError, match="rank 2 failed in 'read': ValueError: once"):
        group.barrier()
    Group(deadline_s=10).barrier()
    return answer


def _too_late() -> str:
    """Rank 1 sleeps past the deadline of the others and then does what they gave up."""
    if dist.get_rank() == 1:
        time.sleep(2.5)  # who is past its deadline still looks for an outcome for a second
    with pytest.raises(DeadlineError) as caught:
        Group(deadline_s=0.5).exchange(b"")
    return str(caught.value)


def _too_late_and_alone() -> str:
    """Both others have given rank 1 up and ended when it comes."""
    if dist.get_rank() == 1:
        time.sleep(4.0)
    try:
        for _ in range(2):
            Group(deadline_s=0.5 if dist.get_rank() != 1 else 20.0).exchange(b"")
    except ReshardError as error:
        if dist.get_rank() == 1:
            return str(error)
    os._exit(0)


def _raise_if(condition: bool) -> None:
    if condition:
        raise ValueError("once")


def _no_store() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    with pytest.raises(ReshardError, match="ranks cannot communicate"):
        Group()
    dist.destroy_process_group()
    with pytest.raises(ReshardError, match="not initialized"):
        Group(process_group=object())  # type: ignore[arg-type]


def _no_backend_for_cpu(port: int) -> None:
    """A backend none of whose collectives does anything, on a real store: what we say cannot go through it."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  it registers the backend

    store = dist.TCPStore("127.0.0.1", port)
    rank = int(os.environ["RANK"])
    dist.init_process_group("fake", store=store, rank=rank, world_size=3)
    group = Group(deadline_s=20)
    with group.together("save"):
        assert group.exchange(b"%d" % rank) == [b"0", b"1", b"2"]


def _hash_store() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=5))
    assert Group().exchange(b"x") == [b"x"]
    dist.destroy_process_group()


@pytest.mark.gloo
def test_of_two_failures_the_first_is_told_to_all() -> None:
    (first, second, third) = gloo.run(_two_fail, 3)
    assert first[0].startswith("rank 1 failed in 'read': ValueError: bad byte on 1")
    assert second == ("bad byte on 1", "")
    assert third[0] == "bad byte on 2"
    assert "before that, rank 1 failed in 'read': ValueError: bad byte on 1" in third[1]


@pytest.mark.gloo
def test_a_missed_session_does_not_spoil_the_next() -> None:
    assert gloo.run(_missed_a_session, 3) == [[b"0", b"1", b"2"]] * 3


@pytest.mark.gloo
def test_who_comes_too_late_is_told_why_nobody_is_there_any_more() -> None:
    for said in gloo.run(_too_late, 3):
        assert "rank 1 did not reach an exchange within 0.5 s; waiting there: ranks 0, 2" in said


@pytest.mark.gloo
def test_a_group_that_cannot_talk_is_refused() -> None:
    gloo.run(_no_store, 1, init=False)


@pytest.mark.gloo
def test_the_backend_takes_no_part() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    gloo.run(_no_backend_for_cpu, 3, server.port, init=False)


@pytest.mark.gloo
def test_a_group_of_one_needs_no_store() -> None:
    gloo.run(_hash_store, 1, init=False)


@pytest.mark.gloo
def test_who_comes_when_the_others_have_ended_is_told_what_they_had_missed() -> None:
    said = gloo.outcomes(_too_late_and_alone, 3, store="parent")[1].value
    assert "is gone: it exited or was killed" in said
    assert "rank 1 did not reach an exchange within 0.5 s; waiting there: ranks 0, 2" in said
