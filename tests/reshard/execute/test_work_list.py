"""Lists of reads, comparisons, copies and waits: the compiled loop does what numpy does, also with wrong lists."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from planners.geometry.byte_ranges import Window
from reshard.errors import ReshardError
from reshard.execute.work_list import (
    COPY,
    ENTRY,
    MAX_DIMS,
    Ending,
    Kind,
    Memory,
    NumpyRun,
    WorkList,
    copy_row,
)
from reshard.live.compiled_kernel import kernel
from reshard.stored import checksums

ROOT = Path(__file__).parents[3]
FILE_BYTES, BLOCK = 5000, 64
NUMPY, COMPILED = "numpy", "compiled"


@pytest.fixture(params=[NUMPY, COMPILED])
def loop(request: pytest.FixtureRequest) -> Any:
    if request.param == NUMPY:
        return None
    found = kernel()
    if found is None:
        pytest.skip("reshard-kernels is not installed: make installs it where there is a C compiler")
    return found


@pytest.fixture
def file(tmp_path: Path) -> Iterator[tuple[int, bytes]]:
    """A file descriptor, and what is in the file."""
    data = np.random.default_rng(7).integers(0, 256, FILE_BYTES, np.uint8).tobytes()
    (tmp_path / "data").write_bytes(data)
    number = os.open(tmp_path / "data", os.O_RDONLY)
    yield number, data
    os.close(number)


def entries(*rows: tuple[int, ...]) -> Any:
    return np.array([(kind, [*of, *(0,) * (7 - len(of))]) for kind, *of in rows], ENTRY)


def copies(*rows: list[int] | None) -> Any:
    return np.array([n for row in rows if row is not None for n in row], np.int64).view(COPY)


def made(memory: Memory, rows: Any, table: Any = None, digests: Any = (), calls: Any = None) -> WorkList:
    table = copies() if table is None else table
    return WorkList(memory, rows, table, np.array(digests, np.uint64), np.zeros(2, np.int64), (calls or {}).get)


def no_look(awaited: tuple[int, int] | None) -> None:
    """Nothing else goes on."""


def test_what_is_read_compared_and_taken_by_stretches_is_all_of_it(loop: Any, file: tuple[int, bytes]) -> None:
    number, data = file
    window = Window(101, (7, 5, 9), (600, 72, 8), 2)
    slot, out = np.zeros(1024 + 64, np.uint8), np.zeros((9, 7, 5), np.uint16).transpose(1, 2, 0)
    whole = np.ndarray(window.sizes, np.uint16, data, window.offset, window.strides)
    memory = Memory()
    assert (memory.add(slot), memory.add(out)) == (0, 1)
    size, rows, digests = 1024, [], []
    for start in range(0, FILE_BYTES, size):
        stop = min(start + size, FILE_BYTES)
        rows += [(Kind.READ, number, start, min(stop + 1, FILE_BYTES) - start, 0, 0)]
        rows += [(Kind.COMPARE, 0, 0, stop - start, BLOCK, len(digests))]
        rows += [(Kind.TAKE, 0, 0, stop - start, start, 0, 1, 1)]
        digests += [xxhash.xxh3_64_intdigest(data[i : min(i + BLOCK, stop)]) for i in range(start, stop, BLOCK)]
    work = made(memory, entries(*rows), copies(copy_row(window, 1, out)), digests)

    work.run(no_look, loop)

    assert np.array_equal(out, whole)
    assert work.tallies.tolist() == [0, out.nbytes]


def test_what_python_does_comes_in_its_turn_and_may_end_the_list(loop: Any) -> None:
    memory, seen = Memory(), []
    counter = np.zeros(16, np.uint32)
    memory.add(counter)
    rows = entries((Kind.POST, 0, 8, 5), (Kind.CALL,), (Kind.POST, 0, 8, 6), (Kind.CALL,), (Kind.POST, 0, 8, 7))

    def fail() -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        made(memory, rows, calls={1: lambda: seen.append(int(counter[2])), 3: fail}).run(no_look, loop)
    assert (seen, counter[2]) == ([5], 6)


def test_who_waits_goes_on_when_all_have_posted_and_looks_around_meanwhile(loop: Any) -> None:
    memory, counters, looked = Memory(), np.zeros(64, np.uint32), []
    memory.add(counters)
    posts = made(memory, entries(*[(Kind.POST, 0, 64 * i, 3) for i in range(4)]))
    waits = made(memory, entries((Kind.WAIT, 0, 0, 3, 4, 64)))
    counters[16] = 3

    def look(awaited: tuple[int, int] | None) -> None:
        looked.append(awaited)
        if len(looked) == 2:
            threading.Thread(target=posts.run, args=(no_look, loop)).start()

    waits.run(look, loop)

    assert looked[:2] == [(0, 0)] * 2
    assert counters[::16].tolist() == [3] * 4


def test_a_look_may_end_a_wait(loop: Any) -> None:
    memory = Memory()
    memory.add(np.zeros(64, np.uint32))

    def look(awaited: tuple[int, int] | None) -> None:
        raise KeyboardInterrupt(awaited)

    with pytest.raises(KeyboardInterrupt, match="0, 128"):
        made(memory, entries((Kind.WAIT, 0, 128, 1, 1, 0))).run(look, loop)


def test_a_block_that_was_changed_is_what_the_call_says_or_an_error(loop: Any, file: tuple[int, bytes]) -> None:
    number, data = file
    memory = Memory()
    memory.add(np.zeros(256, np.uint8))
    rows = entries((Kind.READ, number, 0, 256, 0, 0), (Kind.COMPARE, 0, 0, 256, 64, 0))
    digests = [xxhash.xxh3_64_intdigest(data[i : i + 64]) ^ (i == 128) for i in range(0, 256, 64)]

    with pytest.raises(ReshardError, match=r"COMPARE .* ended with CHANGED 2"):
        made(memory, rows, digests=digests).run(no_look, loop)
    with pytest.raises(ReshardError, match="CHANGED"):  # also if the call finds nothing
        made(memory, rows, digests=digests, calls={1: lambda: None}).run(no_look, loop)


def test_a_file_that_ends_early_is_read_another_way_or_is_an_error(loop: Any, file: tuple[int, bytes]) -> None:
    memory, tried = Memory(), []
    memory.add(np.zeros(256, np.uint8))
    rows = entries((Kind.READ, file[0], FILE_BYTES - 10, 256, 0, 0), (Kind.CALL,))

    with pytest.raises(ReshardError, match=rf"READ .* ended with ENDED {FILE_BYTES}"):
        made(memory, rows).run(no_look, loop)
    made(memory, rows, calls={0: lambda: tried.append(0), 1: lambda: tried.append(1)}).run(no_look, loop)
    assert tried == [0, 1]
    with pytest.raises(ReshardError, match="Bad file descriptor"):
        made(memory, entries((Kind.READ, -1, 0, 10, 0, 0))).run(no_look, loop)


HOSTILE = [
    (Kind.READ, 3, 0, 257, 1, 0),
    (Kind.READ, 3, 0, -1, 1, 0),
    (Kind.READ, 3, 0, 8, 1, 250),
    (Kind.READ, 3, 0, 8, 1, -1),
    (Kind.READ, 3, 0, 8, 9, 0),
    (Kind.READ, 3, 0, 8, -1, 0),
    (Kind.READ, 3, 0, 8, 0, 0),  # may not be written to
    (Kind.READ, 3, 0, 1 << 62, 1, 1 << 62),
    (Kind.READ, 3, -1, 8, 1, 0),
    (Kind.READ, 3, (1 << 63) - 4, 8, 1, 0),
    (Kind.COMPARE, 1, 0, 128, 0, 0),
    (Kind.COMPARE, 1, 0, 128, 64, 3),
    (Kind.COMPARE, 1, 0, 128, 64, -1),
    (Kind.COMPARE, 1, 200, 128, 64, 0),
    (Kind.TAKE, 1, 0, 256, 0, 0, 1, 0),  # an element may begin at its last byte, and end behind it
    (Kind.TAKE, 2, 0, 8, 0, 0, 1, 0),  # from the memory that it goes to
    (Kind.TAKE, 1, 0, 128, 0, 1, 0, 0),
    (Kind.TAKE, 1, 0, 128, 0, 0, 2, 0),
    (Kind.TAKE, 1, 0, 128, -1, 0, 1, 0),
    (Kind.TAKE, 1, 0, 128, 0, 0, 1, 2),
    (Kind.WAIT, 1, 2, 0, 1, 0),
    (Kind.WAIT, 1, 0, 0, 0, 4),
    (Kind.WAIT, 1, 0, 0, 65, 4),
    (Kind.WAIT, 1, 0, 0, 1 << 61, 1 << 61),
    (Kind.POST, 1, 253, 1),
    (Kind.POST, 0, 0, 1),
    (9,),
    (-1,),
]


@pytest.mark.parametrize("row", HOSTILE, ids=str)
def test_what_leaves_its_memory_is_not_begun(loop: Any, row: tuple[int, ...]) -> None:
    fixed = np.zeros(64, np.uint8)
    fixed.flags.writeable = False
    memory = Memory()
    for array in (fixed, np.zeros(256, np.uint8), np.zeros(4, np.uint16)):
        memory.add(array)
    work = made(memory, entries(row), copies(copy_row(Window(0, (4,), (2,), 2), 2, np.zeros(4, np.uint16))), [1, 2, 3])

    at, ending, _ = NumpyRun(*work.tables).run(0, 10**9) if loop is None else loop.run(*work.tables, 0, 10**9)

    assert (at, ending) == (0, Ending.OUTSIDE)
    if row[0] in set(Kind):
        with pytest.raises(ReshardError, match="OUTSIDE"):
            work.run(no_look, loop)


def random_row(rng: random.Random) -> list[int]:
    """A copy, mostly one that fits."""
    ndim = rng.randint(0, 4)
    sizes, steps = [rng.randint(1, 6) for _ in range(ndim)], [0] * ndim
    itemsize, step = rng.choice((1, 2, 3, 4, 8, 16)), 0
    for d in rng.sample(range(ndim), ndim):  # in any order of dims, with gaps or without
        steps[d] = step = max(step, itemsize) + rng.choice((0, 0, rng.randint(0, 9)))
        step *= sizes[d]
    from_ = [rng.choice((step, itemsize, rng.randint(0, 400))) for step in steps]
    row = [rng.randint(0, FILE_BYTES), rng.randint(3, 4), rng.randint(0, 99), itemsize, ndim]
    for column in (sizes, from_, steps):
        row += [*column, *[rng.randint(-5, 5)] * (MAX_DIMS - ndim)]
    if rng.random() < 0.05:
        other = list(row)
        other[rng.randrange(len(row))] = rng.choice((-1, 0, 9, 1 << 40, (1 << 63) - 1, -(1 << 63)))
        return row if writes_twice(other) else other
    return row


def writes_twice(row: list[int]) -> bool:
    """Whether elements of a copy overlap where it puts them: which of them stays, nothing says. No plan has such."""
    itemsize, ndim = row[3:5]
    sizes, steps = row[5 : 5 + ndim], row[5 + 2 * MAX_DIMS : 5 + 2 * MAX_DIMS + ndim]
    if not 0 <= ndim <= MAX_DIMS or min([itemsize, *sizes]) < 1 or min(steps, default=0) < 0:
        return False  # it is refused
    span = itemsize
    for step, size in sorted(zip(steps, sizes)):
        if size > 1 and step < span:
            return True
        span += (size - 1) * step
    return False


def random_entry(rng: random.Random, file: int, count: int) -> tuple[int, ...]:
    region, byte, nbytes = rng.randint(0, 2), rng.randint(0, 500), rng.randint(0, 600)
    first = rng.randint(0, count)
    row: tuple[int, ...] = rng.choice(
        (
            (Kind.READ, file, rng.randint(0, FILE_BYTES - 300), nbytes, region, byte),
            (Kind.COMPARE, region, byte, nbytes, rng.choice((64, 100)), rng.randint(0, 4)),
            (Kind.TAKE, region, byte, nbytes, rng.randint(0, FILE_BYTES), first, rng.randint(first, count), 1),
            (Kind.TAKE, region, byte, nbytes, rng.randint(0, FILE_BYTES), 0, count, 0),
            (Kind.POST, 2, 4 * rng.randint(0, 5), rng.randint(0, 5)),
        )
    )
    if rng.random() < 0.02:
        at = rng.randrange(2, len(row))
        row = (*row[:at], rng.choice((-1, 1 << 40, (1 << 63) - 1, -(1 << 63))), *row[at + 1 :])
    return row


def tried(begun: Any, rows: Any, table: Any, digests: Any) -> tuple[Any, ...]:
    """How often lists ended in which way, and what was in memory then."""
    regions = [np.arange(n, dtype=np.uint32).view(np.uint8)[: 4 * n] for n in (300, 200, 150, 400, 300)]
    memory = Memory()
    for array in regions:
        memory.add(array)
    work, found, at = WorkList(memory, rows, table, digests, np.zeros(2, np.int64)), [], 0
    run = begun(*work.tables)
    while at < len(rows):
        at, ending, detail = run(at, 10**12)
        found.append((at, int(ending), detail))
        at += 1
    return found, [array.tobytes() for array in regions], work.tallies.tolist()


def fuzz(lists: int, seed: int, path: Path) -> set[int]:
    """Random lists by both; the ways in which they ended. Raises AssertionError."""
    path.write_bytes(np.random.default_rng(seed).integers(0, 256, FILE_BYTES, np.uint8).tobytes())
    loop, seen, file = kernel(), set(), os.open(path, os.O_RDONLY)
    assert loop is not None

    def by_numpy(*tables: Any) -> Any:
        return NumpyRun(*tables).run

    def by_loop(*tables: Any) -> Any:
        return partial(loop.run, *tables)

    for number in range(lists):
        rng = random.Random(f"{seed} {number}")
        table = copies(*[random_row(rng) for _ in range(rng.randint(0, 6))])
        rows = entries(*[random_entry(rng, file, len(table)) for _ in range(rng.randint(1, 8))])
        digests = np.array([rng.getrandbits(64) for _ in range(12)], np.uint64)
        one, other = tried(by_numpy, rows, table, digests), tried(by_loop, rows, table, digests)
        assert one == other, (seed, number)
        seen |= {ending for _, ending, _ in one[0]}
    os.close(file)
    return seen


def test_a_copy_that_writes_elements_over_each_other_is_no_random_one() -> None:
    """One with items of 9 bytes, a byte apart, failed (seed 1126): numpy may go through dims in another order."""
    seen = [random_row(random.Random(n)) for n in range(20_000)]
    assert not any(map(writes_twice, seen))
    assert any(row[3] == 9 for row in seen)


def test_random_lists_do_the_same_by_both(tmp_path: Path) -> None:
    if kernel() is None:
        pytest.skip("reshard-kernels is not installed: make installs it where there is a C compiler")
    assert fuzz(3000, 1, tmp_path / "data") == {Ending.DONE, Ending.OUTSIDE, Ending.ENDED, Ending.CHANGED}


def hashes(lengths: Iterable[int]) -> None:
    """Digests by each set of instructions, of memory that begins anywhere. Raises AssertionError."""
    loops: Any = kernel()
    data = np.random.default_rng(3).integers(0, 256, 70_000, np.uint8)
    for nbytes in lengths:
        for start in (0, 1, 63):
            piece = data[: start + nbytes].copy()[start:]  # ends where its memory does
            found = {loops.digest(piece, widest=widest) for widest in range(3)}
            assert found == {xxhash.xxh3_64_intdigest(piece.tobytes())}, (nbytes, start)


def test_each_set_of_instructions_gives_the_digest_that_xxhash_gives() -> None:
    if kernel() is None:
        pytest.skip("reshard-kernels is not installed: make installs it where there is a C compiler")
    # 240 is the longest short input; 1,024 bytes are a block of its loop
    hashes([*range(1100), *(1024 * n + more for n in (2, 16, 64) for more in (-1, 0, 1, 63, 64, 65))])


@pytest.mark.parametrize("flags", [[], ["-DXXH_VECTOR=0"]], ids=["as installed", "hashes without vectors"])
@pytest.mark.parametrize("sanitizer", ["address,undefined"])
def test_random_lists_under_sanitizers(sanitizer: str, flags: list[str], tmp_path: Path) -> None:
    """In a process of its own, with the library compiled so that it ends at the first byte outside."""
    cc = shutil.which("gcc")
    if cc is None:
        pytest.skip("needs gcc and its sanitizers")
    source, package = ROOT / "kernels" / "reshard_kernels", tmp_path / "reshard_kernels"
    package.mkdir()
    shutil.copy(source / "__init__.py", package)
    flags = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-g", "-O1", "-shared", "-fPIC", *flags]
    files = [str(source / name) for name in ("fold.c", "hash.c", "run.c")]
    built = subprocess.run([cc, *flags, "-o", str(package / "_loops.abi3.so"), *files], capture_output=True, text=True)
    if built.returncode:
        pytest.skip(f"gcc has no such sanitizers here: {built.stderr[-200:]}")
    preload = subprocess.check_output([cc, "-print-file-name=libasan.so"], text=True).strip()
    path = os.pathsep.join(map(str, (tmp_path, ROOT)))
    env = {**os.environ, "LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": path}
    code = "from tests.reshard.execute import test_work_list as t; t.hashes(range(0, 3000, 7)); "
    code += f"t.fuzz(1500, 2, t.Path({str(tmp_path / 'data')!r})); "
    code += (
        "from tests.reshard.live import test_compiled_fingerprints as f; f.test_sums_are_those_of_pythons_integers()"
    )
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        lists, seed = map(int, sys.argv[1:])
        fuzz(lists, seed, Path(folder, "data"))
        print(f"{lists} random lists, seed {seed}: numpy and the compiled loop did the same")


@pytest.mark.parametrize("by", [NUMPY, COMPILED])
@pytest.mark.parametrize(("nbytes", "block"), [(0, 64), (1, 1), (7, 1), (64, 64), (1000, 64), (1024, 64)])
def test_blocks_of_a_file_are_compared_alike_with_the_compiled_loop_and_without(
    by: str, nbytes: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == NUMPY:
        monkeypatch.setattr(checksums, "kernel", lambda: None)
    elif kernel() is None:
        pytest.skip("reshard-kernels is not installed: make installs it where there is a C compiler")
    data = bytearray(random.Random(nbytes).randbytes(nbytes))
    sums = b"".join(
        xxhash.xxh3_64_intdigest(data[i : i + block]).to_bytes(8, "little") for i in range(0, nbytes, block)
    )
    for chosen in (slice(None), slice(None, None, 2), slice(1, None), slice(-1, None)):
        for wrong in (None, 0, nbytes // 2, nbytes - 1):
            found = checksums.BlockChecksums(nbytes, block, lambda: sums)
            blocks = found.bounds(np.ones(-(-nbytes // block), np.bool_))[chosen]
            bad = bytearray(data)
            if wrong is not None and nbytes:
                bad[wrong] ^= 1
            expected = [] if wrong is None else [(a, b) for a, b in blocks.tolist() if a <= wrong < b]
            assert found.compare(memoryview(bytes(bad)), blocks) == expected
            pending = [row for row in found.pending(0, nbytes) if list(row) in blocks.tolist()]
            assert pending == expected
    if nbytes:  # of a file that was cut short since it was listed, the last block is wrong
        found = checksums.BlockChecksums(nbytes, block, lambda: sums)
        blocks = found.bounds(np.ones(-(-nbytes // block), np.bool_))
        assert found.compare(memoryview(bytes(data))[:-1], blocks) == [tuple(blocks[-1].tolist())]
