"""Exchanges: both ends of a message see the same bytes, buffers stay within the budget, loads read each byte once."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

import reshard
from planners import (
    Mesh,
    Replicate as R,
    Shard as S,
    StateLayout,
    TensorLayout,
    TensorSpec,
    plan_transfers,
    schedule,
    verify,
)
from planners.plans.read_once import plan_read_once
from reshard.errors import ReshardError
from reshard.execute.exchange import LARGE_BYTES, Exchange, RankWork, round_bytes
from tests import gloo
from tests.reshard.api import live_layouts
from tests.reshard.api.live_layouts import local
from tests.same import bits


def plan_of(count: int, shape: tuple[int, ...], dtypes: list[str]) -> Any:
    specs = [TensorSpec(f"w{i}", shape, dtypes[i % len(dtypes)]) for i in range(count)]
    before = StateLayout({spec.fqn: TensorLayout(spec, Mesh({"a": 4}), [S(0)]) for spec in specs})
    after = StateLayout({spec.fqn: TensorLayout(spec, Mesh({"a": 2, "b": 3}), [R(), S(1)]) for spec in specs})
    return plan_transfers(before, after)


@pytest.mark.parametrize(
    ("count", "shape", "budget"),
    [(7, (13, 11), 1 << 20), (7, (13, 11), 1024), (2, (2048, 1536), 64 << 20), (2, (2048, 1536), 1 << 20)],
)
def test_both_ends_of_every_message_agree_on_its_runs(count, shape, budget):
    plan = plan_of(count, shape, ["float32", "bfloat16", "complex128", "uint8"])
    rounds = schedule(plan, max_inflight_bytes=round_bytes(budget))

    work = [RankWork.of(rounds, rank) for rank in range(plan.world_size)]

    sent = {(w.rank, leg.peer): [] for w in work for legs in w.rounds for leg in legs if leg.sends}
    got = {(leg.peer, w.rank): [] for w in work for legs in w.rounds for leg in legs if not leg.sends}
    for w in work:
        for leg in (leg for legs in w.rounds for leg in legs):
            (sent[w.rank, leg.peer] if leg.sends else got[leg.peer, w.rank]).extend(leg.runs)
    assert sent == got
    for run in (run for runs in sent.values() for run in runs):
        assert len(run) == 1 or all(piece.nbytes < LARGE_BYTES for piece in run)
        sizes = [piece.nbytes // piece.box.numel for piece in run]
        assert sizes == sorted(sizes, reverse=True)
    assert sum(w.nbytes(sends=True) for w in work) == sum(w.nbytes(sends=False) for w in work) == plan.bytes_moved
    assert RankWork.of(rounds, 99) == RankWork(99, (), ())


@pytest.mark.parametrize("budget", [1024, 4096, 1 << 20, 256 << 20])
def test_the_rounds_under_way_fit_the_budget_with_every_large_piece_aligned(budget):
    each = round_bytes(budget)

    assert 2 * (each + each // LARGE_BYTES * 16) <= budget
    assert each >= budget // 2 * 0.99


def test_every_element_that_several_ranks_want_has_one_reader_which_wants_it():
    spec = TensorSpec("w", (10, 7), "float32")
    every = {"hsdp": (Mesh({"r": 3, "s": 2}), [R(), S(0)]), "copies": (Mesh({"r": 4}), [R()])}
    wanted = StateLayout({n: TensorLayout(TensorSpec(n, (10, 7), "float32"), *how) for n, how in every.items()}, 6)
    alone = TensorLayout(spec, Mesh({"s": 6}), [S(1)])

    plan = plan_read_once(StateLayout({**wanted, "w": alone}, 6))

    assert set(plan.readers) == {"hsdp", "copies"}  # the third is wanted once anyway
    assert verify(plan.readers).ok
    assert verify(plan.transfers).ok
    assert plan.transfers.bytes_moved == (2 * 70 + 3 * 70) * 4
    for rank in range(6):
        for fqn, boxes in plan.own_boxes(rank).items():
            parts = plan.wanted.parts(fqn, rank)
            assert [parts[own.part].sizes for own in boxes]
            assert sum(own.box.numel for own in boxes) == plan.readers[fqn].numel(rank)
    read = plan.readers.rank_bytes()
    assert read.max() - read.min() <= 10 * 7 * 4


def load_once_job(path: str) -> list[dict[str, Any]]:
    rank, every = dist.get_rank(), (0, 1, 2, 3)
    whole = live_layouts.truth()
    reshard.save(live_layouts.placed(whole, every, (4,), [Shard(0)]), path)
    out = []
    for shape, placements in [
        ((4,), [Shard(1)]),
        ((4,), [Replicate()]),
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 2), [Shard(1), Replicate()]),
        ((2, 2), [Shard(0), Shard(1)]),
    ]:
        known = live_layouts.placed(whole, every, shape, placements)
        row: dict[str, Any] = {"case": str(placements)}
        for once in (False, True):
            target = live_layouts.placed({k: torch.zeros_like(t) for k, t in whole.items()}, every, shape, placements)
            report = reshard.load(target, path, read_once=once, check=False)
            row[once] = report.bytes_read, report.bytes_received
            row["wrong"] = [k for k in whole if bits(local(target[k])) != bits(local(known[k]))]
        out.append(row)
    # other dtypes, and keys that only some ranks have
    mine = {"w": torch.zeros(13, 10, dtype=torch.float64)} | (
        {"b": torch.zeros(9, dtype=torch.bfloat16)} if rank < 2 else {}
    )
    report = reshard.load(mine, path, read_once=True, check=False, strict=False, dtype_policy="cast")
    right = bits(mine["w"]) == bits(whole["w"].double()) and (rank >= 2 or bits(mine["b"]) == bits(whole["b"]))
    out.append({"case": "cast", "wrong": [] if right else ["w"], False: None, True: (report.bytes_read, 0)})
    try:
        reshard.load({"w": mine["w"]}, path, read_once=True, strict=False, dtype_policy="saved")
        refused = ""
    except Exception as error:
        refused = str(error)
    out.append({"case": "saved", "refused": refused})
    return out


@pytest.mark.gloo
def test_a_load_reads_every_needed_byte_once_in_the_whole_job(tmp_path):
    """No read amplification: replicas share the reading, and the job reads what the checkpoint holds, in any layout."""
    ranks = gloo.run(load_once_job, 4, str(tmp_path / "ckpt"))

    total = sum(t.nbytes for t in live_layouts.truth().values())
    for rows in zip(*ranks, strict=True):
        case = rows[0]["case"]
        if case == "saved":
            assert all("read_once does not support" in row["refused"] for row in rows)
            continue
        assert not any(row["wrong"] for row in rows), case
        read = sum(row[True][0] for row in rows)
        if case == "cast":
            assert read == 13 * 10 * 4 + 9 * 2
            continue
        assert read == total, case
        assert all(sum(row[True]) == row[False][0] for row in rows), case  # read or received: each wanted byte once
        assert sum(row[False][0] for row in rows) >= total


def hung_job(path: str) -> tuple[str, float]:
    """Rank 1 hangs where it is to pass on what it has read: how the other one's load ended, and after how long."""
    every, known = (0, 1), Path(f"{path}-known")
    reshard.save(live_layouts.placed({"w": torch.ones(64, 8)}, every, (2,), [Shard(0)]), path)
    target = live_layouts.placed({"w": torch.zeros(64, 8)}, every, (2,), [Replicate()])

    def hang(*_: Any) -> None:
        while not known.exists():
            time.sleep(0.05)

    if dist.get_rank() == 1:
        mock.patch.object(Exchange, "run", hang).start()
    said, begin = "", time.monotonic()
    try:
        reshard.load(target, path, read_once=True, timeout=2.0)
    except ReshardError as error:
        said = str(error)
    took_s = time.monotonic() - begin
    known.touch()
    return said, took_s


@pytest.mark.gloo
def test_a_rank_that_hangs_while_ranks_pass_on_what_they_read_ends_the_load_in_time(tmp_path):
    said, took_s = gloo.run(hung_job, 2, str(tmp_path / "ckpt"), timeout_s=60.0)[0]
    assert "to or from rank 1 was not delivered within 2 s" in said
    assert took_s < 2.0 + gloo.SOON_S


def memory_job(budget: int) -> dict[str, int]:
    """The extra memory of a transfer of 64 MiB whose pieces all have to be packed."""
    every = (0, 1)
    source = live_layouts.placed({"w": torch.ones(4096, 4096)}, every, (2,), [Shard(1)])
    target = live_layouts.placed({"w": torch.zeros(4096, 4096)}, every, (2,), [Shard(0)])
    small = live_layouts.placed({"w": torch.ones(8, 8)}, every, (2,), [Shard(1)])
    reshard.redistribute(small, live_layouts.placed({"w": torch.ones(8, 8)}, every, (2,), [Shard(0)]))
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the highest resident size starts anew
    before = status_bytes("VmRSS")
    report = reshard.redistribute(source, target, max_inflight_bytes=budget, check_replicas=False)
    assert bool((local(target["w"]) == 1).all())
    return {"peak": status_bytes("VmHWM") - before, "buffers": report.buffer_bytes, "received": report.bytes_received}


def status_bytes(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


@pytest.mark.gloo
def test_peak_memory_is_the_budget_however_much_moves():
    budget, slack = 4 << 20, 12 << 20  # Python's own objects, and what the sockets hold

    for found in gloo.run(memory_job, 2, budget):
        assert found["received"] == 16 << 20
        assert 1 << 20 < found["buffers"] <= budget
        assert found["peak"] < budget + slack
