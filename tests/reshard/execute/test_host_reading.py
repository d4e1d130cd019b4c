"""Ranks of one machine read for one another: what they share, who reads it, and that every element arrives."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import reshard
from planners.geometry.byte_ranges import Window, merge_ranges
from reshard.errors import CorruptCheckpointError, RankFailedError, ReshardError
from reshard.execute import host_assignment, host_reading, work_list
from reshard.execute.host_assignment import (
    LOCAL_SEGMENT_BYTES as SIZE,
    FileFootprint,
    ReadFootprint,
    SharedSegments,
    _windows_by_segment,
    add_touched,
    assign_segments,
    footprint_of,
)
from reshard.execute.host_reading import common_bytes
from reshard.live.compiled_kernel import kernel
from reshard.live.tensors import LiveTensor
from reshard.native.manifest import BLOCK_BYTES
from reshard.storage import LocalStorage, MemoryStorage
from reshard.stored.checksums import BlockChecksums
from reshard.stored.source import FileSource
from tests import gloo
from tests.kernels import COMPILED, NUMPY, summed_up_by
from tests.same import same
from tests.torch_releases import distribute_own


def touched(window: Window, nbytes: int, grain: int = 4096) -> list[int]:
    counts = np.zeros(-(-nbytes // SIZE), np.int64)
    add_touched(counts, SIZE, [window], nbytes, grain)
    return counts.tolist()


def test_a_gapless_read_touches_just_its_bytes():
    assert touched(Window.row_major(SIZE // 2, (2 * SIZE,), 1), 4 * SIZE, grain=1) == [SIZE // 2, SIZE, SIZE // 2, 0]
    assert touched(Window.row_major(5, (10,), 4), SIZE) == [4096]  # a grain at least
    assert touched(Window.row_major(SIZE - 4, (8,), 1), 2 * SIZE - 5) == [4096, 4096]
    assert touched(Window.row_major(3, (0, 4), 4), SIZE) == [0]


def test_columns_touch_every_grain_that_they_have_a_part_of():
    rows = 3 * SIZE // 8192
    column = Window(1024, (rows, 512), (8192, 2), 2)
    assert touched(column, 3 * SIZE) == pytest.approx([SIZE // 2] * 3, rel=0.01)  # 1 of 8 KiB is one page of two
    narrow = Window(64, (rows * 4, 16), (2048, 2), 2)
    assert touched(narrow, 3 * SIZE) == pytest.approx([SIZE] * 3, rel=0.01)  # gaps smaller than a page are touched, too


def test_far_apart_runs_touch_only_the_segments_they_are_in():
    window = Window(0, (3, 1000), (4 * SIZE, 4), 4)
    assert touched(window, 9 * SIZE) == [4096, 0, 0, 0, 4096, 0, 0, 0, 4096]


def test_parts_of_long_rows_touch_together_just_what_there_is():
    row, rows, odd = 256 << 10, 14, 5 << 12
    parts = [Window(odd + i * row // 4, (rows, row // 4), (row, 1), 1) for i in range(4)]
    together = np.sum([touched(part, odd + rows * row) for part in parts], axis=0)
    assert together.tolist() == [SIZE - odd, SIZE, SIZE, rows * row + odd - 3 * SIZE]

    blocks = [Window(i << 18 | j << 13, (4, 16, 8192), (1 << 19, 1 << 14, 1), 1) for i in range(2) for j in range(2)]
    assert np.sum([touched(block, 2 * SIZE) for block in blocks], axis=0).tolist() == [
        SIZE,
        SIZE,
    ]


def said(**files: list[int]) -> ReadFootprint:
    return {
        name: FileFootprint(len(c) * SIZE, SIZE, SIZE, 0, np.array(c, "<u4").tobytes()) for name, c in files.items()
    }


def by_rank(segments: list[SharedSegments], ranks: int) -> list[list[int]]:
    """The numbers of the segments that each rank has."""
    return [[at // SIZE for its in segments for at in its.ranges[its.rank == i, 0].tolist()] for i in range(ranks)]


def reads(*ranks: ReadFootprint) -> list[list[int]]:
    return by_rank(assign_segments(ranks).reads, len(ranks))


def test_what_all_touch_is_read_in_turns_and_what_one_touches_by_itself():
    n = 24
    rank = said(a=[SIZE] * n)

    (of_file,) = assign_segments([rank] * 3).reads

    assert of_file.label == "a"
    assert of_file.ranges.tolist() == [[i * SIZE, (i + 1) * SIZE] for i in range(n)]
    assert of_file.rank.tolist() == [i % 3 for i in range(n)]
    assert reads(said(a=[SIZE] * n), said(b=[SIZE] * n)) == [[], []]
    assert reads(*[said(a=[SIZE] * n)] * 2, said())[2] == []


def test_files_of_other_lengths_under_one_name_are_not_shared():
    longer = {"a": FileFootprint(25 * SIZE, SIZE, SIZE, 0, np.array([SIZE] * 25, "<u4").tobytes())}
    assert assign_segments([said(a=[SIZE] * 24), longer]) == ([], [])


def test_little_is_not_worth_sharing():
    assert reads(*[said(a=[SIZE] * 2)] * 2) == [[], []]
    assert reads(*[said(a=[SIZE // 4] * 40)] * 4) == [[]] * 4  # all together touch no more than there is
    assert assign_segments([]) == ([], [])


def test_where_touching_costs_next_to_nothing_each_reads_for_itself():
    ranks = [said(a=[SIZE] * 24)] * 4
    assert assign_segments(ranks, 0.6).reads  # small pages
    assert not assign_segments(ranks, 0.2).reads  # large folios


def test_what_each_reads_a_part_of_is_checked_by_one():
    work = assign_segments([said(a=[SIZE // 2] * 6 + [0, SIZE]), said(a=[SIZE // 2] * 5 + [SIZE // 4, SIZE, 0])], 0.0)

    assert by_rank(work.checks, 2) == [[0, 2, 4], [1, 3]]
    assert not work.reads
    assert list(map(len, by_rank(assign_segments([said(a=[SIZE] * 24)] * 3, 0.0).checks, 3))) == [8, 8, 8]
    assert not assign_segments([said(a=[SIZE] * 24)] * 3).checks  # who reads it for all checks it


def test_those_who_touch_the_same_take_turns_beginning_with_who_has_the_fewest():
    work = assign_segments([said(a=[SIZE] * 24 + [0] * 6), said(a=[SIZE] * 30), said(a=[0] * 24 + [SIZE] * 6)])

    assert list(map(len, by_rank(work.reads, 3))) == [12, 15, 3]
    assert by_rank(work.reads, 3)[2] == [24, 26, 28]


ranges = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (min(pair), max(pair)))).map(
    merge_ranges
)


some_ranges = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)).map(sorted), max_size=5)


@given(ranges, some_ranges)
def test_what_segments_share_with_ranges_is_counted(ranges_, segments_):
    found = common_bytes(np.array(segments_, np.int64).reshape(-1, 2), ranges_)

    covered = {byte for start, stop in ranges_ for byte in range(start, stop)}
    assert found.tolist() == [len(covered & set(range(start, stop))) for start, stop in segments_]


@given(st.integers(1, 90), st.integers(1, 20), some_ranges, some_ranges)
def test_blocks_of_ranges_are_chosen_and_looked_up(nbytes, block_bytes, chosen_, asked_):
    sums = BlockChecksums(nbytes, block_bytes, lambda: b"")
    blocks = [(at, min(at + block_bytes, nbytes)) for at in range(0, nbytes, block_bytes)]
    chosen = np.array(chosen_, np.int64).reshape(-1, 2).clip(0, nbytes)
    asked = np.array(asked_, np.int64).reshape(-1, 2).clip(0, nbytes)

    within = sums.within(chosen)

    inside = [any(a <= start and stop <= b for a, b in chosen.tolist()) for start, stop in blocks]
    assert within.tolist() == inside
    assert sums.bounds(within).tolist() == [list(block) for block, is_in in zip(blocks, inside) if is_in]
    touched = [[i for i, (a, b) in enumerate(blocks) if a < stop and start < b] for start, stop in asked.tolist()]
    full = [(start < stop, all(inside[i] for i in its)) for (start, stop), its in zip(asked.tolist(), touched)]
    found = sums.are_among(within, *asked.T).tolist()
    assert [one for one, (is_some, _) in zip(found, full) if is_some] == [every for is_some, every in full if is_some]
    assert sums.mark_right(chosen) == sum(stop - start for (start, stop), is_in in zip(blocks, inside) if is_in)
    assert sums.mark_right(chosen) == 0
    assert [not sums.pending(start, stop) for start, stop in blocks] == inside


def test_touching_is_measured_where_it_can_be(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(bytes(3 * SIZE))
    source, window = FileSource(LocalStorage(tmp_path), "a"), Window.row_major(SIZE + 1, (SIZE,), 1)
    assert 0 < source.touch_s(SIZE, SIZE) < 60
    assert host_assignment.touch_cost([]) is None
    for touch_s, is_saved in ((1e-9, False), (1e-2, True), (None, None)):  # large folios are nearly free
        monkeypatch.setattr(FileSource, "touch_s", lambda self, start, length, touch_s=touch_s: touch_s)
        cost = host_assignment.touch_cost([(source, window)])
        assert cost is None if is_saved is None else (cost > 0) is is_saved


def test_a_file_that_ends_within_a_segment_is_read_to_its_end():
    rank = {"a": FileFootprint(9 * SIZE + 5, SIZE, SIZE, 1, np.array([SIZE] * 8 + [5], "<u4").tobytes())}
    (of_file,) = assign_segments([rank] * 4).reads
    assert of_file.ranges[-1].tolist() == [9 * SIZE, 9 * SIZE + 5]


def test_what_a_rank_touches_is_counted_from_the_first_segment():
    storage = MemoryStorage("test-host-reading")
    storage.publish("a", bytes(3 * SIZE))
    said_of = footprint_of([(FileSource(storage, "a"), Window.row_major(SIZE + 1, (SIZE,), 1))])
    assert {name.rpartition("/")[2]: file.first for name, file in said_of.items()} == {"a": 1}


def test_the_cuts_of_a_window_are_its_elements_by_segment():
    window = Window(SIZE - 3, (5, 40), (SIZE // 2 + 7, 8), 8)  # an element lies across the end of the first segment
    seen = np.zeros((5, 40), int)
    for number, pieces in enumerate(_windows_by_segment(window, SIZE)):
        for index, part in pieces:
            seen[index] += 1
            assert 0 <= part.offset < SIZE
            first = [span.start * stride for span, stride in zip(index, window.strides)]  # the dots at the end are left
            assert part.offset + number * SIZE == window.offset + sum(first)
    assert (seen == 1).all()


ROWS, COLUMNS = 5000, 1000  # a row is less than a page, so who wants a part of it touches what the others touch


def tensors() -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(3)
    return {
        "wide": torch.randn(ROWS, COLUMNS, generator=gen),
        "odd": torch.randint(0, 255, (1001, 1003), dtype=torch.uint8, generator=gen),
        "b": torch.randn(ROWS // 4, 1024, generator=gen).bfloat16(),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 7),
    }


def place(state: dict[str, torch.Tensor], placement: Placement) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    flat = isinstance(placement, Shard)
    return {
        name: distribute_tensor(t, mesh, [Replicate() if flat and placement.dim >= t.ndim else placement])
        for name, t in state.items()
    }


def wrong(found: dict[str, Any], known: dict[str, Any]) -> list[str]:
    return [name for name in known if not same(found[name], known[name])]


def always_share() -> None:
    """Whatever it costs to touch a page where the tests run."""
    host_reading.touch_cost = lambda windows: float("inf")


def large_segments() -> None:
    """Whatever the size of the files."""
    host_assignment.LARGE_FILE_BYTES = 0


def shared_files() -> int:
    """How many files of this process are memory that it shares."""
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum("memfd:reshard" in os.readlink(link) for link in links if link.is_symlink())


def by(which: str) -> None:
    """Have this process read by the compiled loop, or by numpy."""
    os.environ["RESHARD_KERNELS"] = "1" if which == COMPILED else "0"
    kernel.cache_clear()


def load_job(path: str, which: str) -> list[dict[str, Any]]:
    by(which)
    always_share()
    whole = tensors()
    reshard.save(place(whole, Shard(0)), path)
    out = []
    for placement in (Shard(1), Replicate(), Shard(0)):
        for budget in (None, 1 << 20):
            known = place(whole, placement)
            target = place({name: torch.zeros_like(t) for name, t in whole.items()}, placement)
            report = reshard.load(target, path, memory_budget_bytes=budget)
            out.append({"report": report, "wrong": wrong(target, known), "left": shared_files()})
    # other dtypes on the way, and a rank that wants nothing of what the others share
    target = place({"wide": torch.zeros(ROWS, COLUMNS, dtype=torch.float64)}, Shard(1))
    if dist.get_rank() == 3:
        target = {}
    report = reshard.load(target, path, strict=False, dtype_policy="cast")
    known = place({"wide": whole["wide"].double()}, Shard(1))
    out.append({"report": report, "wrong": wrong(target, known) if target else [], "left": 0})
    large_segments()
    known = place(whole, Shard(1))
    target = place({name: torch.zeros_like(t) for name, t in whole.items()}, Shard(1))
    report = reshard.load(target, path)
    out.append({"report": report, "wrong": wrong(target, known), "left": shared_files()})
    return out


@pytest.mark.gloo
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="ranks share memory through Linux's memfd")
@pytest.mark.parametrize("which", [NUMPY, COMPILED])
def test_each_byte_comes_from_storage_once_for_all_ranks_of_a_machine(tmp_path, which):
    with summed_up_by(which):  # or it is skipped
        ranks = gloo.run(load_job, 4, str(tmp_path / "ckpt"), which)

    total = sum(t.nbytes for t in tensors().values())
    for i, rows in enumerate(zip(*ranks, strict=True)):
        reports = [row["report"] for row in rows]
        assert not any(row["wrong"] or row["left"] for row in rows), i
        read = sum(r.bytes_read + r.bytes_read_to_check for r in reports)
        received = sum(r.bytes_received for r in reports)
        needed = sum(r.bytes_needed for r in reports)
        if i in (0, 7):  # columns: each rank takes a quarter of every row
            assert received > 0.7 * total
            assert read <= 1.02 * total
            assert min(r.bytes_checked for r in reports) > 0  # what is read for all can be checked as a whole
        elif i == 1:  # a budget in which there is no room to share
            assert received == 0
            assert read <= 1.02 * needed
        elif i == 2:
            assert received > 2 * total
            assert read <= 1.3 * total
            assert sum(r.bytes_checked for r in reports) < 1.3 * total  # each block once for the machine
        elif i in (4, 5):  # the same layout: nothing to share
            assert received <= 0.02 * total
            assert read <= 1.02 * needed


def damaged_job(path: str, which: str) -> list[str]:
    by(which)
    always_share()
    whole = {"wide": tensors()["wide"]}
    out = []
    for placement, large in ((Replicate(), False), (Shard(1), False), (Shard(1), True)):
        if large:
            large_segments()
        target = place({name: torch.zeros_like(t) for name, t in whole.items()}, placement)
        try:
            reshard.load(target, path)
            out.append("loaded")
        except RankFailedError as error:
            untouched = not target["wide"].to_local().any()
            out.append(f"{error.rank}: {error} untouched={untouched}")
        except CorruptCheckpointError as error:
            untouched = not target["wide"].to_local().any()
            out.append(f"here: {error} untouched={untouched}")
    return out


@pytest.mark.gloo
@pytest.mark.parametrize(("at", "which"), [(5 * SIZE + 77, COMPILED), (SIZE // 2, COMPILED), (SIZE // 2, NUMPY)])
def test_a_flipped_bit_is_found_by_the_rank_that_reads_it_for_all(tmp_path, at, which):
    path = tmp_path / "ckpt"
    reshard.save({"wide": tensors()["wide"]}, path)
    file = max(path.rglob("*.safetensors"), key=lambda f: f.stat().st_size)
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)

    with summed_up_by(which):
        ranks = gloo.run(damaged_job, 4, str(path), which)

    for case in range(3):
        words = [rank[case] for rank in ranks]
        assert sum(word.startswith("here: ") for word in words) == 1
        assert all(Path(file).name in word and f"[{at // BLOCK_BYTES * BLOCK_BYTES}, " in word for word in words)
    assert all("untouched=True" in whole for whole, *_ in ranks)  # what is wanted whole is checked before


def cut_short_job(path: str, file: str, which: str) -> str:
    """The file is cut short when all has been planned and agreed."""
    by(which)
    always_share()
    run = host_reading.HostReading.run

    def cut_and_run(self: host_reading.HostReading, **options: Any) -> Any:
        if dist.get_rank() == 0:
            os.truncate(file, 6 * SIZE)
        dist.barrier()
        return run(self, **options)

    host_reading.HostReading.run = cut_and_run
    target = place({"wide": torch.zeros(ROWS, COLUMNS)}, Shard(1))
    try:
        reshard.load(target, path)
    except ReshardError as error:
        return str(error)
    return "loaded"


@pytest.mark.gloo
@pytest.mark.parametrize("which", [NUMPY, COMPILED])
def test_a_file_cut_short_under_a_running_load_ends_it_by_name(tmp_path, which):
    reshard.save({"wide": tensors()["wide"]}, tmp_path / "ckpt")
    file = max((tmp_path / "ckpt").rglob("*.safetensors"), key=lambda f: f.stat().st_size)
    assert file.stat().st_size > 7 * SIZE
    with summed_up_by(which):
        words = gloo.run(cut_short_job, 2, str(tmp_path / "ckpt"), str(file), which)
    assert all(file.name in word for word in words), words


def private_job() -> tuple[int, bool]:
    """Each process has a memory of its own under one name, and different tensors in it."""
    always_share()
    mine = torch.full((ROWS, COLUMNS), float(dist.get_rank() + 1))
    storage = MemoryStorage("own")
    storage.publish("model.safetensors", safetensors.torch.save({"wide": mine}))
    target = torch.zeros(ROWS, COLUMNS)
    report = reshard.load({"wide": target}, storage)
    return report.bytes_received, torch.equal(target, mine)


@pytest.mark.gloo
def test_what_each_process_has_for_itself_is_not_read_for_others():
    assert gloo.run(private_job, 2) == [(0, True)] * 2


def unlucky_job(path: str) -> tuple[bool, int]:
    """One rank may not open what belongs to the others."""
    always_share()
    if dist.get_rank() == 1:
        host_reading.OwnMemory.open = refuse
    known = place({"wide": tensors()["wide"]}, Shard(1))
    target = place({"wide": torch.zeros(ROWS, COLUMNS)}, Shard(1))
    report = reshard.load(target, path, strict=False)
    return not wrong(target, known), report.bytes_received


def refuse(self: host_reading.OwnMemory, address: host_reading.Address) -> int:
    raise PermissionError("not yours")


@pytest.mark.gloo
def test_where_one_rank_cannot_take_part_each_reads_for_itself(tmp_path):
    reshard.save({"wide": tensors()["wide"]}, tmp_path / "ckpt")
    assert gloo.run(unlucky_job, 3, str(tmp_path / "ckpt")) == [(True, 0)] * 3


def dying_job(path: str) -> str:
    always_share()
    if dist.get_rank() == 2:
        work_list.WorkList.run = lambda self, look, loop: os._exit(9)
    target = place({"wide": torch.zeros(ROWS, COLUMNS)}, Shard(1))
    try:
        reshard.load(target, path, timeout=30)
    except reshard.ReshardError as error:
        return str(error)
    return "loaded"


@pytest.mark.gloo
def test_a_rank_that_dies_while_others_wait_for_its_share_ends_the_load(tmp_path):
    reshard.save({"wide": tensors()["wide"]}, tmp_path / "ckpt")
    ends = gloo.outcomes(dying_job, 3, str(tmp_path / "ckpt"))
    assert ends[2].exitcode == 9
    assert all("rank 2" in str(end.value) and end.seconds < ends[2].seconds + 10 for end in ends[:2]), ends


def outcome(target: dict[str, Any], path: str, **options: Any) -> str:
    """How a load of damaged files into zeros ends on this rank."""
    try:
        reshard.load(target, path, **options)
        end = "loaded"
    except RankFailedError:
        end = "failed"
    except CorruptCheckpointError:
        end = "found"
    touched = any(LiveTensor("", tensor).local[0].any() for tensor in target.values())
    return f"{end}, {'touched' if touched else 'untouched'}"


def damaged_parts_job(path: str, file: str, places: list[int], budget_bytes: int | None) -> list[str]:
    """Every rank wants a part of every segment, and reads it for itself, since touching pages is cheap here, or
    there is no memory to share."""
    host_reading.touch_cost = lambda windows: 0.0 if budget_bytes is None else float("inf")
    mesh = DeviceMesh("cpu", range(4))
    shapes = {"wide": (ROWS, COLUMNS), "b": (ROWS // 4, 1024)}
    out = []
    for at in places:
        if dist.get_rank() == 0:
            flip(file, at)
        dist.barrier()
        target = {
            name: distribute_own(torch.zeros(shape, dtype=dtype), mesh, [Shard(1)])
            for (name, shape), dtype in zip(shapes.items(), (torch.float32, torch.bfloat16))
        }
        out.append(outcome(target, path, memory_budget_bytes=budget_bytes))
        dist.barrier()
        if dist.get_rank() == 0:
            flip(file, at)
    return out


def flip(file: str, at: int) -> None:
    with open(file, "r+b") as data:
        data.seek(at)
        byte = data.read(1)[0]
        data.seek(at)
        data.write(bytes([byte ^ 4]))


@pytest.mark.gloo
@pytest.mark.parametrize("budget_bytes", [None, 1 << 20])
def test_a_flipped_bit_in_what_each_rank_reads_a_part_of_is_found_before_anything_is_written(tmp_path, budget_bytes):
    reshard.save({name: tensors()[name] for name in ("wide", "b")}, tmp_path / "ckpt")
    (file,) = (tmp_path / "ckpt").rglob("*.safetensors")
    size = file.stat().st_size
    places = [20, 5000, SIZE + 1, 3 * SIZE - 1, *range(4 * SIZE, size, 3 * SIZE + 4096), size - 1]

    ranks = gloo.run(damaged_parts_job, 4, str(tmp_path / "ckpt"), str(file), places, budget_bytes)

    for ends in zip(*ranks):
        # a block at the end of a rank's part is compared by those that read a part of it
        assert {"found, untouched"} <= set(ends) <= {"found, untouched", "failed, untouched"}, dict(
            zip(places, zip(*ranks))
        )


def careless_job(path: str, file: str, places: list[int], cost: float) -> list[str]:
    """One rank does not want anything checked."""
    host_reading.touch_cost = lambda windows: cost
    mesh, out = DeviceMesh("cpu", range(3)), []
    for at in places:
        if dist.get_rank() == 0:
            flip(file, at)
        dist.barrier()
        target = {"wide": distribute_own(torch.zeros(ROWS, COLUMNS), mesh, [Shard(1)])}
        try:
            reshard.load(target, path, check=dist.get_rank() != 0)
            out.append("loaded")
        except ReshardError as error:
            out.append(type(error).__name__)
        dist.barrier()
        if dist.get_rank() == 0:
            flip(file, at)
    return out


@pytest.mark.gloo
@pytest.mark.parametrize("cost", [0.0, float("inf")])
def test_who_does_not_check_neither_reads_nor_checks_for_others(tmp_path, cost):
    reshard.save({"wide": tensors()["wide"]}, tmp_path / "ckpt")
    (file,) = (tmp_path / "ckpt").rglob("*.safetensors")
    places = [segment * SIZE + 77 for segment in (5, 6, 7)]  # three ranks would take turns

    ranks = gloo.run(careless_job, 3, str(tmp_path / "ckpt"), str(file), places, cost)

    assert ranks[0] == ["RankFailedError"] * 3


def unlucky_damaged_job(paths: list[str]) -> list[str]:
    """One rank wants all, the others columns; one of these may not open what belongs to the others."""
    always_share()
    mesh = DeviceMesh("cpu", [1, 2])
    if dist.get_rank() == 1:
        host_reading.OwnMemory.open = refuse
    out = []
    for path in paths:
        target: Any = torch.zeros(ROWS, COLUMNS)
        if dist.get_rank():
            target = distribute_own(target, mesh, [Shard(1)])
        out.append(outcome({"wide": target}, path))
    return out


@pytest.mark.gloo
def test_who_reads_for_itself_after_all_checks_first(tmp_path):
    paths = [tmp_path / str(segment) for segment in (5, 6, 7)]  # other ranks were to read these in turns
    for segment, path in zip((5, 6, 7), paths, strict=True):
        reshard.save({"wide": tensors()["wide"]}, path)
        file = max(path.rglob("*.safetensors"), key=lambda f: f.stat().st_size)
        data = bytearray(file.read_bytes())
        data[segment * SIZE + 77] ^= 4
        file.write_bytes(data)

    ranks = gloo.run(unlucky_damaged_job, 3, [str(path) for path in paths])

    for ends in zip(*ranks):
        assert sorted(ends) == ["failed, untouched", "failed, untouched", "found, untouched"]
