"""Hosts of two ranks, of which one is lost, or meets with something, at a random moment of a call."""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import random
import re
import signal
import struct
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import reshard
from reshard.elastic import Tier
from reshard.errors import CheckpointNotFoundError, FormatError, ReshardError
from reshard.ranks import rounds as rounds_module, store as store_module
from tests.hosts import job
from tests.hosts.job import RANKS_PER_HOST as PER_HOST, VERBS, state_of, step_in
from tests.hosts.network import Hosts, why_not
from tests.power.scenarios import started_anew

__all__ = ["FAULTS", "Seen", "tried"]

LOST = ["cut", "mute", "freeze", "kill"]
"""After these the host is no part of the job any more; here one without the store."""
STORE_LOST = ["kill first", "cut first", "freeze first"]
"""The first one, which has the store."""
PASSING = ["delay", "full", "read-only", "clock"]
"""After these all goes on."""
FAULTS = [*LOST, *STORE_LOST, *PASSING]

PORT = 29400
DEADLINE_S, SLOW_DEADLINE_S = 3.0, 30.0
QUICK_DEADLINE_S, QUICK_GRACE_S = 2.0, 2.0
"""The same promises in less time."""
_START_S, _PASSING_S = 180.0, 1.0
_END_S = 6.0
"""So long after the deadline, and the grace of a store that says nothing, every rank must have ended: it takes a while
to ask who is missing."""
_STACKS_S = 1.0
"""So long a process may take to write down what its threads do."""
_ONE_WAY_S = (0.002, 0.03)
"""Of a delay."""
_AHEAD_S = 2 * 86_400.0
_LATER = 1000
"""The step of the job that follows."""
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Seen:
    """How a trial went."""

    wrong: str = ""
    end: str = ""
    """What the ranks that were left said: a kind of error, or "done"."""
    took_s: float = 0.0
    """From the fault to the moment when the last of them had said it."""
    others_s: float | None = None
    """The same of ranks on the host that was lost: if it was frozen, from when it went on. None if they were killed."""


class _Wrong(AssertionError):
    pass


def _rank(hosts: Hosts, rank: int, body: Callable[[], None]) -> None:
    os.environ |= {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0", "LOCAL_WORLD_SIZE": str(PER_HOST)}
    tcp: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = tcp(hosts.address(0), PORT, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=hosts.count * PER_HOST)
    body()


def _serve(hosts: Hosts) -> None:
    """As torchrun's agent does: the store is in a process that is none of the ranks."""
    tcp: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = tcp(hosts.address(0), PORT, is_master=True, wait_for_workers=False)
    while store:
        time.sleep(60.0)


def _start(hosts: Hosts, folder: Path, verb: str, deadline_s: float, *, lives_on: bool, clock: mmap.mmap) -> None:
    for host in range(hosts.count):
        ahead = partial(_ahead, clock, host)
        run = partial(job.body, folder, verb, deadline_s, lives_on=lives_on, ahead=ahead)
        ranks = range(host * PER_HOST, (host + 1) * PER_HOST)
        bodies = [partial(_rank, hosts, rank, run) for rank in ranks]
        bodies = [partial(_serve, hosts), *bodies] if host == 0 else bodies
        hosts.fork(host, bodies, folder / "log", binds=[folder / "shared"])


def _start_torchrun(hosts: Hosts, folder: Path, verb: str, deadline_s: float) -> None:
    environ = {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    environ |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={hosts.count}"]
    command += [f"--nproc-per-node={PER_HOST}", "--rdzv-backend=c10d", f"--rdzv-endpoint={hosts.address(0)}:{PORT}"]
    for host in range(hosts.count):
        more = [f"--local-addr={hosts.address(host)}", f"--node-rank={host}"]
        hosts.start(host, [*command, *more, job.__file__, str(folder), verb, str(deadline_s)], environ)


def _ahead(clock: mmap.mmap, host: int) -> float:
    return float(struct.unpack_from("d", clock, 8 * host)[0])


def tried(
    verb: str,
    fault: str,
    delay_s: float,
    folder: Path,
    rng: random.Random,
    *,
    count: int = 2,
    deadline_s: float = DEADLINE_S,
    torchrun: bool = False,
) -> Seen:
    """The fault, so many seconds after the calls begin; `count`: of hosts."""
    lives_on = fault in PASSING
    host = rng.randrange(count) if lives_on else 0 if "first" in fault else rng.randrange(1, count)
    with Hosts(count) as hosts, mmap.mmap(-1, 4096) as clock:
        hosts.disk(folder / "shared", 4096)
        for at in range(count):
            hosts.disk(folder / "disks" / hosts.name(at), 2048)
        deadline_s = SLOW_DEADLINE_S if lives_on else deadline_s
        if torchrun:
            _start_torchrun(hosts, folder, verb, deadline_s)
        else:
            _start(hosts, folder, verb, deadline_s, lives_on=lives_on, clock=clock)
        trial = _Trial(hosts, folder, verb, fault, host, rng, clock, deadline_s + store_module.GRACE_S + _END_S)
        try:
            if not _await(_files(folder, "ready", range(count * PER_HOST)), _START_S):
                raise _Wrong("the job did not begin")
            time.sleep(delay_s)
            return trial.passing() if lives_on else trial.lost()
        except _Wrong as error:
            log = folder / "log"
            return Seen(f"{error}\n{log.read_text()[-3000:]}" if log.exists() else str(error))


@dataclass(frozen=True)
class _Trial:
    hosts: Hosts
    folder: Path
    verb: str
    fault: str
    host: int
    rng: random.Random
    clock: mmap.mmap
    ends_within_s: float
    """Of any call."""

    @property
    def _is_kept(self) -> bool:
        return self.verb in ("keep", "recover")

    @property
    def _world(self) -> range:
        return range(self.hosts.count * PER_HOST)

    def _ranks(self, host: int) -> list[int]:
        return [rank for rank in self._world if rank // PER_HOST == host]

    # --- a host that is lost ---

    def lost(self) -> Seen:
        """The others know it, and what they go on with stays when it comes back."""
        begun = time.monotonic()
        getattr(self.hosts, self.fault.removesuffix(" first"))(self.host)
        last = self._ends([rank for rank in self._world if rank // PER_HOST != self.host])
        for row in last:
            if not self._names(row["said"], self.host):
                raise _Wrong(f"not named: {row['said']}")
        kinds = "; ".join(sorted({row["said"].partition(":")[0] for row in last}))
        return self._after(Seen("", kinds, max(row["ended"] for row in last) - begun), begun)

    def _ends(self, ranks: list[int]) -> list[dict[str, Any]]:
        """The last call of each of these, which must end soon and with an error of ours."""
        last = [rows[-1] for rows in self._rows(ranks)]
        for row in last:
            if not row["said"] or row["said"].startswith("not ours"):
                raise _Wrong(f"step {row['step']}: {row['said'] or 'no error'}")
        return last

    def _rows(self, ranks: Iterable[int]) -> list[list[dict[str, Any]]]:
        """All calls of each of these, which must have ended in time."""
        ends = dict(zip(ranks, _files(self.folder, "end", ranks)))
        if not _await([*ends.values()], self.ends_within_s):
            raise _Wrong("\n".join(self._hanging(rank) for rank, end in ends.items() if not end.exists()))
        return [json.loads(end.read_text()) for end in ends.values()]

    def _hanging(self, rank: int) -> str:
        """What a rank that has not ended is doing, on all its threads."""
        ready, at, stacks = (self.folder / f"{name}-{rank}" for name in ("ready", "at", "stacks"))
        self.hosts.signal(rank // PER_HOST, signal.SIGUSR1, only=int(ready.read_text()))
        time.sleep(_STACKS_S)
        begun_s = time.time() - at.stat().st_mtime
        head = f"rank {rank} has not ended: step {at.read_text()}, begun {begun_s:.1f} s ago"
        return f"{head}\n{stacks.read_text()}"

    def _names(self, said: str, host: int) -> bool:
        ranks = "|".join(map(str, self._ranks(host)))
        words = [rf"\branks? [0-9, -]*\b({ranks})\b", re.escape(self.hosts.address(host)), self.hosts.name(host)]
        words += ["store of the process group"] if host == 0 else []
        return any(re.search(word, said) for word in words)

    def _after(self, seen: Seen, begun: float) -> Seen:
        """Another job goes on where they were; whoever comes back after that publishes nothing. `begun`: the fault."""
        with started_anew():
            self._look("after the fault", newest=None)
            self._next()
            self._look("after the next job", newest=_LATER)
        if self.fault.startswith("freeze"):
            begun = time.monotonic()
            self.hosts.thaw(self.host)
        elif self.fault.startswith("cut"):
            self.hosts.heal(self.host)
        others_s = None
        if "kill" not in self.fault:
            others_s = max(row["ended"] for row in self._ends(self._ranks(self.host))) - begun
        for host in range(self.hosts.count):
            self.hosts.kill(host)
        with started_anew():
            self._look("after it came back", newest=_LATER)
        self._last()
        return Seen(seen.wrong, seen.end, seen.took_s, others_s)

    @property
    def _path(self) -> Path:
        return self.folder / "shared" / (f"run/step-{_LATER}" if self.verb == "prune" else "c")

    @property
    def _other(self) -> str:
        """A host that is left. Each has all that is kept."""
        return self.hosts.name(int(self.host == 0))

    def _tier(self) -> Tier:
        return Tier(self.folder / "disks", host=self._other, copies=0)

    def _look(self, when: str, newest: int | None) -> None:
        """What is there is one checkpoint, and, if it is known which, that one."""
        try:
            if self._is_kept:
                target = state_of(0, len(self._world), None)
                self._tier().restore(target)
                step = step_in(target)
            elif self.verb == "prune":
                step = self._look_at_run()
            else:
                step = self._look_at(self.folder / "shared" / "c")
            if self.verb == "convert":
                self._look_at_converted()
        except (ReshardError, AssertionError) as error:
            raise _Wrong(f"{when}: {type(error).__name__}: {error}") from error
        if newest is not None and step != newest:
            raise _Wrong(f"{when}: step {step}, and not {newest}")

    def _look_at(self, path: Path) -> int:
        target = state_of(0, len(self._world), None)
        reshard.load(target, path)
        assert reshard.verify(path).ok, path
        return step_in(target)

    def _look_at_run(self) -> int:
        run = self.folder / "shared" / "run"
        steps = [self._look_at(Path(step.path)) for step in reshard.steps(run) if step.problem is None]
        latest = reshard.latest_complete(run)
        if latest is None:
            assert not steps
            return 0
        assert self._look_at(Path(latest)) == max(steps), f"{latest} is not the newest of {steps}"
        return max(steps)

    def _look_at_converted(self) -> None:
        try:
            opened = reshard.open(self.folder / "shared" / "out")
        except (CheckpointNotFoundError, FormatError):  # at most what the first conversion had begun
            return
        assert len(set(opened["w"][...].flatten().tolist())) == 1

    def _next(self) -> None:
        """A job of one process, of which nothing happens."""
        state = state_of(_LATER, len(self._world), None)
        if self._is_kept:
            self._tier().save(state, _LATER)
        elif self.verb == "prune":
            reshard.save(state, self._path, base="auto")
            reshard.prune(self.folder / "shared" / "run", keep_last=1)
        else:
            reshard.save(state, self._path)
            if self.verb == "convert":
                reshard.convert(self._path, self.folder / "shared" / "out", format="safetensors", overwrite=True)

    def _last(self) -> None:
        """Days later, another save leaves nothing but itself."""
        with started_anew(forgets=True):
            if self._is_kept:
                self._tier().save(state_of(_LATER + 1, len(self._world), None), _LATER + 1)
                folder = self.folder / "disks" / self._other
                left = [place.name for place in folder.iterdir() if place.is_dir()]
            else:
                reshard.save(state_of(_LATER + 1, len(self._world), None), self._path)
                if self.verb == "prune":
                    reshard.prune(self.folder / "shared" / "run", keep_last=1)
                left = [place.name for place in self._path.iterdir() if place.name != "manifest.json"]
                left = [name for name in left if name != "model.safetensors.index.json"]
        if len(left) != 1:
            raise _Wrong(f"left days later: {left}")

    # --- what passes ---

    def passing(self) -> Seen:
        """Who fails says why, and afterwards all goes on."""
        begun = time.monotonic()
        is_over = self._begin()
        time.sleep(_PASSING_S)
        is_over()
        over = time.monotonic()
        at = [int(path.read_text()) for path in _files(self.folder, "at", self._world) if path.exists()]
        (self.folder / "last.part").write_text(str(max(at, default=1) + 4))
        (self.folder / "last.part").rename(self.folder / "last")
        rows = self._rows(self._world)
        for rank, its in enumerate(rows):
            for row in its:
                self._check_row(rank, row, over)
        failed = [row for its in rows for row in its if row["said"]]
        kinds = sorted({row["said"].partition(":")[0] for row in failed}) or ["done"]
        knew = max((row["ended"] - max(begun, row["began"]) for row in failed), default=0.0)
        with started_anew():
            self._look("after all", newest=None)
            self._next()
            self._look("after the next job", newest=None if self.fault == "clock" else _LATER)
        self._last()
        return Seen("", "; ".join(kinds), knew)

    def _check_row(self, rank: int, row: dict[str, Any], over: float) -> None:
        said, where = row["said"], f"rank {rank}, step {row['step']}"
        if not said:
            return
        if said.startswith("not ours") or self.fault in ("clock", "delay"):
            raise _Wrong(f"{where}: {said}")
        if row["began"] > over:
            raise _Wrong(f"{where} failed after all was well again: {said}")
        if not re.search(r"(?i)no space left|left[.:] make the file|read-only|operation not permitted", said):
            raise _Wrong(f"{where} does not say why: {said}")

    def _begin(self) -> Callable[[], None]:
        """The fault; what ends it is returned."""
        hosts, host, bind = self.hosts, self.host, self.folder / "shared"
        disk = self.folder / "disks" / hosts.name(host)
        if self.fault == "clock":
            struct.pack_into("d", self.clock, 8 * host, _AHEAD_S)
            return lambda: struct.pack_into("d", self.clock, 8 * host, 0.0)
        if self.fault == "full":
            hosts.fill(disk if self._is_kept else bind)
            return hosts.empty
        if self.fault == "read-only":
            if self._is_kept:
                hosts.make_disk_read_only(disk)
                return partial(hosts.make_disk_read_only, disk, again=True)
            hosts.make_read_only(host, bind)
            return partial(hosts.make_read_only, host, bind, again=True)
        hosts.delay(host, self.rng.uniform(*_ONE_WAY_S))
        return partial(hosts.hurry, host)


def _files(folder: Path, name: str, ranks: Iterable[int]) -> list[Path]:
    return [folder / f"{name}-{rank}" for rank in ranks]


def _await(paths: list[Path], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not all(path.exists() for path in paths):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.hosts.trials")
    parser.add_argument("count", type=int, help="how many trials, of each call with each fault in turn")
    parser.add_argument("seed")
    parser.add_argument("chosen", nargs="*", help=f"of {', '.join((*VERBS, *FAULTS))}")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--torchrun", action="store_true", help="start the job by torchrun")
    parser.add_argument("--quick", action="store_true", help="with a shorter deadline")
    parser.add_argument("--every", default=(0, 1), type=lambda text: tuple(map(int, text.split("/"))), metavar="K/N")
    parser.add_argument("--only", nargs="+", type=int, help="these numbers")
    parser.add_argument("--jobs", type=int, default=1, help="so many trials at a time: they mostly wait")
    parser.add_argument("-v", action="store_true", help="say how each went")
    return parser.parse_args()


def _tried_at(options: argparse.Namespace, n: int) -> tuple[int, str, str, Seen]:
    """The trial of that number, in a folder of its own: its call, its fault, and how it went."""
    rng = random.Random(f"{options.seed}.{n}")
    verbs = [verb for verb in VERBS if verb in options.chosen] or VERBS
    faults = [fault for fault in FAULTS if fault in options.chosen] or (LOST if options.torchrun else FAULTS)
    verb, fault, delay_s = verbs[n % len(verbs)], faults[n // len(verbs) % len(faults)], rng.random() * 0.4
    deadline_s = QUICK_DEADLINE_S if options.quick else DEADLINE_S
    with tempfile.TemporaryDirectory(dir="/dev/shm", ignore_cleanup_errors=True) as folder:
        one = tried(
            verb, fault, delay_s, Path(folder), rng, count=options.hosts, deadline_s=deadline_s,
            torchrun=options.torchrun,
        )  # fmt: skip
    return n, verb, fault, replace(one, wrong=one.wrong and f"after {delay_s:.2f} s: {one.wrong}")


def main() -> int:
    """Prints the seed, a table, and what is wrong."""
    if why := why_not():
        print(f"skipped: {why}")
        return 0
    options = _options()
    seed, (first, step) = options.seed, options.every
    if options.quick:
        store_module.GRACE_S = rounds_module.GRACE_S = QUICK_GRACE_S
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the hosts go, too
    seen: dict[tuple[str, str], list[Seen]] = defaultdict(list)
    numbers = options.only or range(first, options.count, step)
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        for n, verb, fault, one in pool.imap_unordered(partial(_tried_at, options), numbers):
            seen[fault, verb].append(one)
            if options.v:
                print(
                    f"{time.strftime('%T')} {seed}.{n}: {verb}, {fault}: {one.end}, {one.took_s:.1f}, {one.others_s}",
                    flush=True,
                )
            if one.wrong:
                print(f"{seed}.{n}: {verb}, {fault} {one.wrong}", flush=True)
        pool.close()  # else workers end by SIGTERM, for which they have a handler, and one may be waited for in vain
        pool.join()
    for (fault, verb), ones in sorted(seen.items()):
        ends = sorted({one.end for one in ones if not one.wrong})
        worst = max(one.took_s for one in ones)
        others = [one.others_s for one in ones if one.others_s is not None]
        more = f"; its own ranks ended in {len(others)}, {max(others):.1f} s at the latest" if others else ""
        print(f"| {fault} | `{verb}` | {len(ones)} | {', '.join(ends)}{more} | {worst:.1f} s |")
    wrong = sum(bool(one.wrong) for ones in seen.values() for one in ones)
    print(f"seed {seed}: {sum(map(len, seen.values()))} runs, {wrong} wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
