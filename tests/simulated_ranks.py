"""Many ranks in one process, with a store in memory and a simulated clock: the real control plane, not a model of it.

Each rank is a greenlet that runs the code of `reshard.ranks` unchanged. Only what blocks is replaced: store clients,
whose waits let the other ranks run, and the clock, which jumps to the next moment at which a rank has something to
do. So an hour of waiting costs nothing, and with `choose`, ranks can access the store in any order.

    world = World(1024)
    with world.clock():
        ends = world.run(lambda rank: body(world.group(rank)))
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import greenlet

from reshard.ranks import group as group_module, rounds as store_rounds, store as line_module
from reshard.ranks.group import DEADLINE_S, Group
from reshard.ranks.liveness import Gone
from reshard.ranks.rounds import Rounds
from reshard.ranks.store import StaleKeys, StoreClient

__all__ = ["Died", "World"]


class Died(BaseException):
    """The process of this rank is dead."""


@dataclass
class World:
    """Simulated ranks, and the store between them.

    Args:
        world_size: number of ranks.
        per_machine: number of consecutive ranks that share a host and watch each other.
        choose: returns which of a number of runnable ranks runs next. Default: the one that has waited longest. If
            given, another rank may run before every call to the store.
    """

    world_size: int
    per_machine: int = 8
    choose: Callable[[int], int] | None = None
    now: float = 0.0
    values: dict[str, bytes] = field(default_factory=dict)
    asked: Counter[int] = field(default_factory=Counter)
    """Calls to the store, by rank."""
    got: Counter[int] = field(default_factory=Counter)
    """Bytes received from the store, by rank."""
    gave: Counter[int] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    nbytes: int = 0
    peak_bytes: int = 0
    """Peak size of the store's keys and values."""
    dead: set[int] = field(default_factory=set)
    crash: dict[int, int] = field(default_factory=dict)
    """Rank -> number of its call to the store at which its process dies."""
    freeze: dict[int, int] = field(default_factory=dict)
    """Rank -> number of its call to the store at which it hangs forever."""

    def __post_init__(self) -> None:
        self._ready: deque[Any] = deque()
        self._timers: list[tuple[float, int, Any]] = []
        self._waiting: dict[str, list[Any]] = defaultdict(list)
        self._numbers = itertools.count()
        self._stale_keys: dict[int, StaleKeys] = defaultdict(StaleKeys)
        self._hub: Any = None

    def group(self, rank: int, *, deadline_s: float = DEADLINE_S) -> Group:
        """Return what `Group()` would be on that rank."""
        made = Group(alone=True, deadline_s=deadline_s)
        made.rank, made.job_rank, made.world_size, made.ranks = rank, rank, self.world_size, self._ranks
        line = _Line(self, rank)
        ring: Any = _Ring(self, rank)
        made._rounds = Rounds(line, rank, made.ranks, ring, self._stale_keys[rank])
        return made

    def watched_by(self, rank: int) -> int:
        """Return the rank before it on its host, or the last one for the first."""
        first = rank - rank % self.per_machine
        last = min(first + self.per_machine, self.world_size) - 1
        return last if rank == first else rank - 1

    @property
    def _ranks(self) -> Any:
        return range(self.world_size)

    @contextmanager
    def clock(self) -> Iterator[None]:
        """Let the control plane use this clock."""
        modules: tuple[Any, ...] = (group_module, line_module, store_rounds)
        ours = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        real = [module.time for module in modules]
        for module in modules:
            module.time = ours
        try:
            yield
        finally:
            for module, time in zip(modules, real):
                module.time = time

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """Call `body(rank)` on every rank. Return what each returned, or its error."""
        ends: list[Any] = [None] * self.world_size
        self._hub = greenlet.getcurrent()

        def life(rank: int) -> None:
            try:
                ends[rank] = body(rank)
            except (Exception, Died) as error:
                ends[rank] = error.with_traceback(None)

        for rank in range(self.world_size):
            one = greenlet.greenlet(life)
            self._ready.append((one, rank))
        while self._ready or self._timers:
            if not self._ready:
                self._advance()
                continue
            place = self.choose(len(self._ready)) if self.choose is not None else 0
            self._ready.rotate(-place)
            one, argument = self._ready.popleft()
            self._ready.rotate(place)
            if not one.dead:
                one.switch(argument)
        return ends

    def _advance(self) -> None:
        """Advance the clock to the next moment at which a rank wakes up."""
        when, _, wake = heapq.heappop(self._timers)
        if not wake.done:
            self.now = max(self.now, when)
            self._wake(wake)

    def sleep(self, seconds: float) -> None:
        """Let other ranks run until that time."""
        self._block(None, self.now + max(seconds, 1e-6))

    def _block(self, key: str | None, until: float) -> None:
        wake = _Wake(greenlet.getcurrent())
        heapq.heappush(self._timers, (until, next(self._numbers), wake))
        if key is not None:
            self._waiting[key].append(wake)
        self._hub.switch()

    def _wake(self, wake: _Wake) -> None:
        if not wake.done:
            wake.done = True
            self._ready.append((wake.who, None))

    def hang(self) -> None:
        """Never return."""
        self._hub.switch()

    def touched(self, key: str) -> None:
        """Wake the ranks that wait for the key."""
        for wake in self._waiting.pop(key, ()):
            self._wake(wake)

    def pause(self) -> None:
        """Let another rank run first."""
        if self.choose is not None:
            self._ready.append((greenlet.getcurrent(), None))
            self._hub.switch()


@dataclass
class _Wake:
    who: Any
    done: bool = False


class _Client:
    """A rank's view of the store. It counts calls."""

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank

    def has_extended_api(self) -> bool:
        return True

    def _asks(self, kind: str, key: str, value: bytes = b"") -> dict[str, bytes]:
        world, rank = self._world, self._rank
        world.pause()
        if rank in world.dead or world.asked[rank] >= world.crash.get(rank, 1 << 62):
            world.dead.add(rank)
            raise Died(f"rank {rank}")
        if world.asked[rank] >= world.freeze.get(rank, 1 << 62):
            world.hang()
        world.asked[rank] += 1
        world.kinds[kind] += 1
        world.gave[rank] += len(key) + len(value)
        return world.values

    def _answers(self, value: bytes) -> bytes:
        self._world.got[self._rank] += len(value)
        return value

    def _put(self, key: str, value: bytes) -> None:
        world = self._world
        world.nbytes += len(value) - len(world.values[key]) if key in world.values else len(key) + len(value)
        world.peak_bytes = max(world.peak_bytes, world.nbytes)
        world.values[key] = value
        world.touched(key)

    def set(self, key: str, value: bytes) -> None:
        self._asks("set", key, value)
        self._put(key, bytes(value))

    def append(self, key: str, value: bytes) -> None:
        values = self._asks("append", key, value)
        self._put(key, values.get(key, b"") + bytes(value))

    def add(self, key: str, value: int) -> int:
        values = self._asks("add", key, b"12345678")
        number = int(values.get(key, b"0")) + value
        self._put(key, b"%d" % number)
        self._answers(b"12345678")
        return number

    def check(self, keys: list[str]) -> bool:
        values = self._asks("check", keys[0])
        self._answers(b"1")
        return keys[0] in values

    def compare_set(self, key: str, expected: str, desired: Any) -> bytes:
        wanted = desired.encode() if isinstance(desired, str) else bytes(desired)
        values = self._asks("compare_set", key, wanted)
        if key not in values:
            if expected:
                self._world.touched(key)  # as in torch's server
                return self._answers(expected.encode())
            self._put(key, wanted)
        return self._answers(values[key])

    def delete_key(self, key: str) -> bool:
        values = self._asks("delete_key", key)
        value = values.pop(key, None)
        self._world.nbytes -= 0 if value is None else len(key) + len(value)
        return value is not None

    def wait(self, keys: list[str], timeout: Any) -> None:
        raise NotImplementedError("simulated ranks wait by their line")


class _Line(StoreClient):
    """Waits by letting the other ranks run."""

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._client_of = world, _Client(world, rank)
        super().__init__(self._client_of)

    def _ask(self, ask: Callable[[Any], Any]) -> Any:
        return ask(self.store)

    def awaited(self, key: str, until: float, gap_s: float) -> Iterator[None]:
        self.arrived = None
        world = self._world
        self._client_of._asks("wait", key)
        while world.now < until:
            if key in world.values:
                self.arrived = line_module._value(self.store, key)
                if self.arrived is not None:
                    return
            before = world.now
            world._block(key, min(until, world.now + gap_s))
            if world.now > before:
                yield


class _Ring:
    """A ring per host: each rank watches the one before it, and the first watches the last."""

    knows_whom = True

    def __init__(self, world: World, rank: int) -> None:
        self._watched = world.watched_by(rank)
        self._world, self._rank = world, rank

    def look(self, store: Any, *, all_came: bool) -> Gone | None:
        if self._watched == self._rank or self._watched not in self._world.dead:
            return None
        return Gone(self._watched, f"process {self._watched} on here")
