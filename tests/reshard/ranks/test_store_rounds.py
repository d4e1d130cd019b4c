"""The rounds beneath the control plane: what they cost for many ranks, and how ranks are named."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch.distributed as dist

from reshard.errors import DeadlineError, RankFailedError, format_ranks
from reshard.ranks import rounds as rounds_module, store as store_module
from reshard.ranks.liveness import Gone
from reshard.ranks.rounds import Rounds
from reshard.ranks.store import PART_BYTES, StaleKeys, StoreClient, Worker


class _Counting:
    """A store that counts what is asked of it."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.calls: Counter[str] = Counter()
        self.most_keys = 0
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)

        def counted(*args: Any) -> Any:
            answer = method(*args)
            with self._lock:
                self.calls[name] += 1
                self.most_keys = max(self.most_keys, self.store.num_keys())
            return answer

        return counted


def _all_ranks(world_size: int, body: Any) -> list[Any]:
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(body, range(world_size)))


@pytest.mark.parametrize("world_size", [2, 16, 130])
def test_the_cost_for_a_rank_does_not_grow_with_the_ranks(world_size: int) -> None:
    store = _Counting()
    count = 10

    def body(rank: int) -> list[bytes]:
        rounds = Rounds(StoreClient(store), rank, range(world_size))
        until = time.monotonic() + 60
        return [rounds.take("x", b"%d," % rank, b"".join, until, 60.0) for _ in range(count)]

    answers = _all_ranks(world_size, body)
    expected = b"".join(b"%d," % rank for rank in range(world_size))
    assert answers == [[expected] * count] * world_size
    logs = 1 if world_size <= 128 else 3
    assert sum(store.calls.values()) <= world_size * (2 + 4 * count) + 12 * logs * count
    assert store.most_keys <= world_size + 3 * (2 * logs + 1), "the counters of sessions, and the keys of three rounds"


def test_a_deadline_names_the_missing_and_the_waiting() -> None:
    store = dist.HashStore()

    def body(rank: int) -> str:
        rounds = Rounds(StoreClient(store), rank, range(10, 18))
        if rank in (2, 3, 6):
            return ""
        with pytest.raises(DeadlineError) as caught:
            rounds.take("the end of 'read'", b"", b"".join, time.monotonic() + 0.1, 0.1)
        return str(caught.value)

    answers = _all_ranks(8, body)
    expected = (
        "ranks 12-13, 16 did not reach the end of 'read' within 0.1 s; waiting there: ranks 10-11, 14-15, 17. "
        "All ranks must make this call: check where the missing ones hang or died"
    )
    assert [answers[rank] for rank in (0, 1, 4, 5, 7)] == [expected] * 5


def test_ranks_are_named_in_ranges() -> None:
    assert format_ranks([]) == "no rank"
    assert format_ranks([3]) == "rank 3"
    assert format_ranks([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"
    assert format_ranks(range(0, 100, 2), limit=3) == "ranks 0, 2, 4 and more, 50 in all"


class _SeesTheFirstDead:
    """The ring of a rank that watches the first one, which is no more."""

    knows_whom = True

    def look(self, store: Any, *, all_came: bool) -> Gone:
        return Gone(0, "process 1 on here")


def test_a_rank_that_dies_while_it_closes_a_round_fails_it() -> None:
    """It had posted, and was killed before it counted itself: nobody else would ever find that all are there."""
    store: Any = dist.HashStore()
    line = StoreClient(store)
    living = Rounds(StoreClient(store), 1, range(2), _SeesTheFirstDead())  # type: ignore[arg-type]
    Rounds(line, 0, range(2))
    line.append("1/0/log/0/0", 0, b"a")

    began = time.monotonic()
    with pytest.raises(RankFailedError, match=r"rank 0 \(process 1 on here\) is gone"):
        living.take("x", b"b", b"".join, began + 30, 30.0)
    assert time.monotonic() - began < 15.0


class _Silent:
    """A store whose host is gone without a word from some question on: whoever asks is answered when it is back."""

    def __init__(self) -> None:
        self.store: Any = dist.HashStore()
        self.is_silent, self.is_back = threading.Event(), threading.Event()
        self.asked = 0

    def has_extended_api(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.asked += 1
            if self.is_silent.is_set():
                self.is_back.wait()
            return getattr(self.store, name)(*args)

        return call


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is promised, in less time."""
    for module in (store_module, rounds_module):
        monkeypatch.setattr(module, "GRACE_S", 1.0)


def test_a_store_that_does_not_answer_ends_the_wait(short: None) -> None:
    store = _Silent()
    rounds = Rounds(StoreClient(store, address=" at 10.1.2.3:29400"), 0, range(2))
    threading.Timer(0.2, store.is_silent.set).start()
    began = time.monotonic()
    with pytest.raises(RankFailedError, match=r"group at 10\.1\.2\.3:29400 has not answered for [12] s: its host"):
        rounds.take("x", b"", b"".join, began + 1.0, 1.0)
    assert 1.9 < time.monotonic() - began < 8.0


def test_who_knows_that_the_store_is_silent_asks_it_no_more(short: None) -> None:
    store = _Silent()
    client = StoreClient(store)
    assert client.worker.is_idle
    store.is_silent.set()
    with pytest.raises(RankFailedError, match="has not answered"):
        client.add("x", 1)
    asked, began = store.asked, time.monotonic()
    with pytest.raises(RankFailedError, match="has not answered"):
        client.set("x", b"")
    assert store.asked == asked
    assert time.monotonic() - began < 0.9  # less than the second that the first one waited
    assert client.silent_for


def test_a_client_that_the_store_has_failed_is_no_one_elses(short: None) -> None:
    """Also when the store answers again: it would raise the old error for every later call."""
    store = _Silent()
    client = StoreClient(store)
    assert not client.silent_for
    store.is_silent.set()
    with pytest.raises(RankFailedError, match="has not answered"):
        client.add("x", 1)
    store.is_back.set()
    until = time.monotonic() + 10.0
    while not client.worker.is_idle:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert client.silent_for


@pytest.mark.parametrize("rank", [0, 1])
def test_who_knows_how_it_ended_waits_only_briefly_for_the_store_to_hear_it(rank: int) -> None:
    """Neither until the deadline of a call that has succeeded, nor as long as after one: the next call waits again."""
    store = _Silent()
    every = [Rounds(StoreClient(store), place, range(2)) for place in range(2)]
    until = time.monotonic() + 60.0
    assert _all_ranks(2, lambda place: every[place].take("x", b"%d" % place, b"".join, until, 60.0)) == [b"01"] * 2
    store.is_silent.set()
    began = time.monotonic()
    every[rank].seen()
    assert time.monotonic() - began < store_module.GRACE_S + 1.0
    assert every[rank].failure is None


def test_a_question_may_take_as_long_as_the_call() -> None:
    """A store that is slow is not gone before the deadline."""
    begun = time.monotonic()
    assert Worker().call(begun + 1.5, 1.0, lambda: time.sleep(2.0) or "answer") == "answer"
    with pytest.raises(TimeoutError):
        Worker().call(begun, 1.0, time.sleep, 3.0)


def _serve(pipe: Connection) -> None:
    hosted = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    pipe.send(hosted.port)
    pipe.recv()


@pytest.mark.parametrize("is_waiting", [True, False])
def test_a_frozen_host_of_the_store(is_waiting: bool, short: None) -> None:
    """Its kernel still takes what is sent, so no connection breaks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    here, there = context.Pipe()
    server = context.Process(target=_serve, args=(there,), daemon=True)
    server.start()
    try:
        tcp: Any = dist.TCPStore  # type: ignore[attr-defined]
        store = tcp("127.0.0.1", here.recv(), is_master=False, wait_for_workers=False)
        rounds = Rounds(StoreClient(store, store.clone, " at here"), 0, range(2))
        freeze = threading.Timer(0.3 if is_waiting else 0.0, os.kill, (server.pid, signal.SIGSTOP))
        freeze.start()
        if not is_waiting:
            freeze.join()
        began = time.monotonic()
        with pytest.raises(RankFailedError, match="the store of the process group at here has not answered"):
            rounds.take("x", b"", b"".join, began + 1.0, 1.0)
        assert time.monotonic() - began < 10.0
    finally:
        server.kill()
        server.join()


def test_a_value_whose_last_part_is_the_sign_of_an_absent_one() -> None:
    client, keys = StoreClient(dist.HashStore()), list[str]()
    client.limit = time.monotonic() + 10, 1.0
    for data in (b"?", bytes(PART_BYTES) + b"?"):
        assert client.fetch(client.put("x", data, 0, keys)) == data


def test_stale_keys_that_another_thread_takes_meanwhile_are_taken_once() -> None:
    keys = StaleKeys()
    keys.leave(1, ["a"])
    taken: list[str] = []

    class Oldest(int):
        """The other thread takes them while this one looks for what is older."""

        def __gt__(self, session: int) -> bool:
            taken.extend(keys.take(2))
            return int(self) > session

    assert keys.take(Oldest(2)) == []
    assert taken == ["a"]
