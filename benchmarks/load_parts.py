"""The CPU time of the parts of a load, of all ranks together.

    python -m benchmarks.load_parts [--folder /dev/shm] [--size 4096]

The cases are those of `benchmarks.load`. A part is the thread time of the functions named here, without the other
parts that they call. The clock itself adds some hundred nanoseconds to each call. Parts that process bytes are
compared with the floor. For columns, that is one `pread`, one XXH3, and one strided copy of each byte. For the same
layout, it is what a load that checks everything before it writes cannot omit: it hashes the mapped files, and copies
from the mapping. The table of `benchmarks.load` has a raw copy, which checks nothing.
"""

from __future__ import annotations

import functools
import glob
import mmap
import shutil
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.tensor import Placement, Shard

import reshard
from benchmarks.load import CASES, make, work_of_columns
from benchmarks.page import Row, arguments, report
from benchmarks.processes import measured, run

ROUNDS = 4
THE_CASES = ("rows by 4 to columns by 8", "rows by 8, the same layout")

READ, HASH, COPY, WAIT, LOOP, CUT, PLAN, AGREE, REST = (
    "reading",
    "hashing",
    "copying",
    "waking and waiting, segment by segment",
    "the compiled loop: all of these together",
    "dealing and cutting segments",
    "opening, planning, proof",
    "agreement through the store",
    "all else, other threads",
)


class Clock:
    """Adds up the time of threads by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._within = threading.local()

    def timed(self, part: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return `fn`, with its time counted for the part, without other timed functions that it calls."""

        @functools.wraps(fn)
        def wrapper(*args: Any, **options: Any) -> Any:
            outer, self._within.inner = getattr(self._within, "inner", 0.0), 0.0
            began = time.thread_time()
            try:
                return fn(*args, **options)
            finally:
                took = time.thread_time() - began
                self.seconds[part] += took - self._within.inner
                self._within.inner = outer + took

        return wrapper

    def watch(self, part: str, owner: Any, *names: str) -> None:
        """Count functions of a module, or methods of a class, from now on."""
        for name in names:
            found = vars(owner)[name]
            inner = found.__func__ if isinstance(found, classmethod) else found
            timed = self.timed(part, inner)
            setattr(owner, name, classmethod(timed) if isinstance(found, classmethod) else timed)

    def watch_load(self) -> None:
        """Count the functions that a load calls."""
        from reshard.api import load as loading
        from reshard.execute import fetch as load_bytes, host_reading, work_list
        from reshard.live.compiled_kernel import kernel
        from reshard.ranks.group import Group
        from reshard.storage.local import LocalStorage
        from reshard.stored.source import FileSource

        self.watch(PLAN, loading, "open_among", "match_keys", "plan_rank", "gather_mismatches")
        self.watch(PLAN, loading.Targets, "of")
        self.watch(AGREE, Group, "merge")
        self.watch(CUT, host_reading.HostReading, "agree", "compared_elsewhere")
        self.watch(CUT, host_reading.HostReading, "run")
        if (loop := kernel()) is not None:
            self.watch(LOOP, loop, "run")
        self.watch(WAIT, work_list.NumpyRun, "run")
        for part, name in ((READ, "read"), (HASH, "compare"), (COPY, "take"), (WAIT, "wait")):
            self.watch(part, work_list.NumpyRun, name)
        self.watch(READ, LocalStorage, "read_into")
        self.watch(HASH, FileSource, "compare_data")
        self.watch(CUT, load_bytes, "plan_compare")
        self.watch(HASH, load_bytes, "compare_plan")
        self.watch(COPY, host_reading, "copy_parts")
        self.watch(COPY, load_bytes, "run_copies")

    def watch_floor(self) -> None:
        """Count the functions that `work_of_columns` calls."""
        from benchmarks import load

        class Os:
            """The functions of `os` that the floor uses, with reads counted."""

            O_RDONLY, open, close, fstat = load.os.O_RDONLY, load.os.open, load.os.close, load.os.fstat
            preadv = staticmethod(self.timed(READ, load.os.preadv))

        class Numpy:
            """The functions of `numpy` that the floor uses, with copies counted."""

            uint8, empty, frombuffer = np.uint8, np.empty, np.frombuffer
            copyto = staticmethod(self.timed(COPY, np.copyto))

        class Xxhash:
            """The functions of `xxhash` that the floor uses, counted."""

            xxh3_64_intdigest = staticmethod(self.timed(HASH, xxhash.xxh3_64_intdigest))

        vars(load).update(os=Os, np=Numpy, xxhash=Xxhash)


def save(folder: str, shape: tuple[int, ...], placements: list[Placement], count: int, rows: int) -> None:
    reshard.save(make(shape, placements, count, rows, seed=1), f"{folder}/reshard")


def load(folder: str, shape: tuple[int, ...], placements: list[Placement], count: int, rows: int) -> Any:
    """Return the seconds by part of each round, of a load and of the floor."""
    ours, raw = (make(shape, placements, count, rows, seed=None) for _ in range(2))
    for tensor in (*ours.values(), *raw.values()):
        tensor.to_local().add_(1)
    needed = sum(tensor.to_local().nbytes for tensor in ours.values())
    files = sorted(glob.glob(f"{folder}/reshard/data-*/*.safetensors"))
    turn = dist.get_rank() % len(files)
    files = files[turn:] + files[:turn]
    load_clock, floor_clock = Clock(), Clock()
    load_clock.watch_load()
    floor_clock.watch_floor()

    def floor() -> None:
        if placements == [Shard(1)]:
            work_of_columns(files, needed)
        else:
            copy_checked(floor_clock, files, [tensor.to_local() for tensor in raw.values()])

    rounds = []
    for _ in range(ROUNDS + 1):
        found = []
        for clock, work in ((load_clock, lambda: reshard.load(ours, f"{folder}/reshard")), (floor_clock, floor)):
            clock.seconds.clear()
            _, cpu, _ = measured(work)
            found.append({**clock.seconds, REST: cpu - sum(clock.seconds.values())})
        rounds.append(found)
    return rounds[1:]


def copy_checked(clock: Clock, files: Sequence[str], targets: Sequence[torch.Tensor]) -> None:
    """Hash the files' first bytes in a mapping, as many as the targets have, and then copy them from it."""
    views = [target.view(torch.int16).reshape(-1).numpy().view(np.uint8) for target in targets]
    left, mapped = sum(view.nbytes for view in views), []
    hash_all, copy_all = clock.timed(HASH, hash_by_blocks), clock.timed(COPY, copy_in_turn)
    for file in files:
        if left:
            with open(file, "rb") as handle:
                data = memoryview(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ))[:left]
            hash_all(data)
            mapped.append(np.frombuffer(data, np.uint8))
            left -= len(data)
    copy_all(mapped, views)


def hash_by_blocks(data: memoryview) -> None:
    """Hash each MiB, as for checksums."""
    for start in range(0, len(data), 1 << 20):
        xxhash.xxh3_64_intdigest(data[start : start + (1 << 20)])


def copy_in_turn(sources: Sequence[np.ndarray[Any, Any]], targets: Sequence[np.ndarray[Any, Any]]) -> None:
    """Copy the bytes of the sources, one after another, into the targets, which have the same total size."""
    sources = list(sources)
    for target in targets:
        done = 0
        while done < len(target):
            some = sources[0][: len(target) - done]
            np.copyto(target[done : done + len(some)], some)
            done, sources[0] = done + len(some), sources[0][len(some) :]
            if not len(sources[0]):
                sources.pop(0)


def of_all(ranks: Sequence[Any], contestant: int, part: str) -> tuple[float, ...]:
    """Return the milliseconds of all ranks by round."""
    return tuple(1e3 * sum(rank[contestant].get(part, 0.0) for rank in rounds) for rounds in zip(*ranks, strict=True))


def rows(folder: str, size: tuple[int, int]) -> Iterator[Row]:
    """Yield a row for each part of each case."""
    for name in THE_CASES:
        world, saved_shape, saved, wanted_shape, wanted = CASES[name]
        here = tempfile.mkdtemp(dir=folder)
        try:
            run(save, torch.Size(saved_shape).numel(), here, saved_shape, saved, *size)
            found = run(load, world, here, wanted_shape, wanted, *size)
        finally:
            shutil.rmtree(here)
        for part in (READ, HASH, COPY, WAIT, CUT, PLAN, AGREE, REST):
            ours, floor = (of_all(found, contestant, part) for contestant in (0, 1))
            if not any(ours):  # no rank reads for others if each has its own part
                continue
            yield Row("load_parts", f"{name}: {part}", "CPU ms", ours, floor=floor if min(floor) else ())


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--folder", default="/dev/shm", help="where the checkpoints go (default: memory)")
    parser.add_argument("--size", type=int, default=4096, help="rows of each of the 24 square tensors (default: 4096)")
    options = parser.parse_args()
    return report(rows(options.folder, (24, options.size)), options.rows)


if __name__ == "__main__":
    sys.exit(main())
