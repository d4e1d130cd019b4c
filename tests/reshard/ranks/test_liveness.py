"""Who watches whom, and what counts as gone."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
import torch.distributed as dist

from reshard.errors import ReshardError
from reshard.ranks import liveness
from reshard.ranks.liveness import Gone, PeerWatch
from reshard.ranks.store import StoreClient


class _Machine:
    """Processes that live and die as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive: dict[int, str] = {}
        self.store = dist.HashStore()
        self._numbers = itertools.count(100)
        self._current = 0
        monkeypatch.setattr(liveness, "start_of", lambda pid: self.alive.get(pid, ""))
        monkeypatch.setattr(liveness, "machine", lambda: "here")
        monkeypatch.setattr(os, "getpid", lambda: self._current)

    def start(self, place: int) -> PeerWatch:
        self._current = next(self._numbers)
        self.alive[self._current] = f"start-{self._current}"
        return PeerWatch(StoreClient(self.store), place)

    def look(self, ring: PeerWatch, *, all_came: bool = False) -> Gone | None:
        return ring.look(StoreClient(self.store), all_came=all_came)


def test_alone_nobody_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = _Machine(monkeypatch)
    assert machine.look(machine.start(0)) is None


@pytest.mark.parametrize("dead", [(0,), (1,), (2,), (3,), (0, 1), (1, 2), (2, 3), (0, 3), (0, 1, 2), (1, 2, 3), (0, 2)])
def test_whoever_dies_is_seen_by_somebody_who_lives(monkeypatch: pytest.MonkeyPatch, dead: tuple[int, ...]) -> None:
    machine = _Machine(monkeypatch)
    rings = {}
    for place in (2, 0, 3, 1):
        rings[place] = machine.start(place)
        assert all(machine.look(ring) is None for ring in rings.values()), "looking early must not fix who is watched"
    pids = dict(zip((2, 0, 3, 1), machine.alive))
    for place in dead:
        machine.alive[pids[place]] = "another"
    seen = [gone for place, ring in rings.items() if place not in dead and (gone := machine.look(ring, all_came=True))]
    assert seen
    assert {gone.place for gone in seen} <= set(dead)


def test_the_first_to_come_watches_the_last_however_late_it_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # it saw the second while it waited in round 0, and was the last to arrive in the next ones, where it did not wait
    machine = _Machine(monkeypatch)
    first, _second = machine.start(1), machine.start(2)
    assert machine.look(first) is None
    machine.start(0)
    pid = max(machine.alive)
    assert machine.look(first, all_came=True) is None
    machine.alive[pid] = "another"
    gone = machine.look(first, all_came=True)
    assert gone is not None
    assert gone.place == 0


def test_where_nobody_can_be_seen_nobody_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "machine", lambda: "")
    store = dist.HashStore()
    client = StoreClient(store)
    assert [PeerWatch(client, place).look(client, all_came=True) for place in range(3)] == [None] * 3
    assert store.num_keys() == 0


def test_the_real_system_tells_the_living_from_the_dead() -> None:
    assert liveness.machine() == liveness.machine() != ""
    assert liveness.start_of(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert liveness.start_of(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet buried
    assert liveness.start_of(child.pid) == ""
    child.communicate()
    assert liveness.start_of(child.pid) == ""


def test_a_store_that_torchrun_hands_to_the_next_attempt_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    machine = _Machine(monkeypatch)
    for place in range(2):
        machine.start(place)
    machine.alive.clear()

    for place in range(2):
        with pytest.raises(ReshardError, match=r"process 100 on .* is gone: .*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
            machine.start(place)


def test_processes_that_make_their_group_again_keep_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    machine = _Machine(monkeypatch)
    machine.start(0)

    again = PeerWatch(StoreClient(machine.store), 0)

    assert machine.look(again, all_came=True) is None
