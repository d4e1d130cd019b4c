"""Receivers that hold replicas get a stripe each, and complete one another: fewer bytes between the two sides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

import reshard
from planners import TensorSpec, View, concat
from tests import gloo
from tests.reshard.api import live_layouts
from tests.reshard.api.live_layouts import local
from tests.same import bits

pytestmark = pytest.mark.gloo

SENDERS, RECEIVERS = (0, 1), (2, 3, 4, 5)
RECEIVING: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "replicated": ((4,), [Replicate()]),
    "two replicas of rows": ((2, 2), [Replicate(), Shard(0)]),
    "two replicas of columns": ((2, 2), [Shard(1), Replicate()]),
    "no replicas": ((4,), [Shard(0)]),
}


def held(state: dict[str, Any]) -> int:
    return sum(local(t).nbytes for t in state.values())


def relay_job(budget: int) -> dict[str, Any]:
    """Rows on two ranks to every layout of four others, twice, with other values the second time."""
    giving = dist.get_rank() in SENDERS
    out: dict[str, Any] = {}
    for name, (shape, placements) in RECEIVING.items():
        source = live_layouts.placed(live_layouts.truth(0), SENDERS, (2,), [Shard(0)])
        empty = {key: torch.zeros_like(t) for key, t in live_layouts.truth(0).items()}
        target = live_layouts.placed(empty, RECEIVERS, shape, placements)
        prepared = reshard.prepare(source, target, max_inflight_bytes=budget)
        wrong = []
        for seed in (0, 1):
            whole = live_layouts.truth(seed)
            for key, value in live_layouts.placed(whole, SENDERS, (2,), [Shard(0)]).items():
                local(source[key]).copy_(local(value))
            report = prepared.run()
            known = live_layouts.placed(whole, RECEIVERS, shape, placements)
            wrong += [key for key in known if bits(local(target[key])) != bits(local(known[key]))]
        ok = reshard.verify_live(source, target).ok
        out[name] = {"wrong": wrong, "report": report, "held": held(target), "giving": giving, "ok": ok}
    out["casts"] = _casts()
    out["views"] = _views()
    return out


def _casts() -> list[str]:
    """Not-a-number in every bit pattern: replicas must come out alike also where elements are widened or narrowed."""
    wrong = []
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16)
    for values, dtype in ((patterns, torch.float32), (patterns.float(), torch.bfloat16)):
        source = {"w": values.clone()} if dist.get_rank() in SENDERS else None
        target = {"w": torch.zeros(values.shape, dtype=dtype)} if dist.get_rank() in RECEIVERS else None
        report = reshard.redistribute(source, target, dtype_policy="cast", check=True)
        if target is not None and bits(target["w"]) != bits(values.to(dtype)):
            wrong.append(f"{values.dtype} to {dtype}")
        if report.bytes_between_groups != 2 << 16:
            wrong.append(f"{report.bytes_between_groups} bytes between sides")
    return wrong


def _views() -> list[str]:
    """Fused and turned on the way, to replicas, and one source for two targets."""
    torch.manual_seed(9)
    whole = {"q": torch.randn(6, 5), "k": torch.randn(3, 5), "w": torch.randn(7, 4)}
    of = {n: View.of(TensorSpec(n, t.shape, "float32")) for n, t in whole.items()}
    views = [concat("qk", [of["q"], of["k"]]), of["w"].transpose().rename("turned"), of["w"].rename("again")]
    source = live_layouts.placed(whole, SENDERS, (2,), [Shard(0)])
    target = None
    if dist.get_rank() in RECEIVERS:
        target = {"qk": torch.zeros(9, 5), "turned": torch.zeros(4, 7), "again": torch.zeros(7, 4)}
    report = reshard.redistribute(source, target, views=views, check=True)
    known = {"qk": torch.cat([whole["q"], whole["k"]]), "turned": whole["w"].t(), "again": whole["w"]}
    nbytes = sum(t.nbytes for t in whole.values())
    wrong = [key for key, value in (target or {}).items() if not torch.equal(value, known[key])]
    if (report.bytes_between_groups, report.bytes_among_receivers) != (nbytes, 3 * nbytes):
        wrong.append(f"{report.bytes_between_groups} and {report.bytes_among_receivers} bytes")
    return wrong


@pytest.mark.parametrize("budget", [1024, 1 << 20])
def test_each_byte_crosses_to_the_other_side_once_and_every_receiver_gets_it_once(budget):
    ranks = gloo.run(relay_job, 6, budget)

    total = sum(t.nbytes for t in live_layouts.truth().values())
    scalar = sum(t.nbytes for t in live_layouts.truth().values() if not t.ndim)
    for name in RECEIVING:
        rows = [rank[name] for rank in ranks]
        reports = [row["report"] for row in rows]
        assert not any(row["wrong"] for row in rows), name
        assert all(row["ok"] for row in rows), name
        assert {r.bytes_between_groups for r in reports} == {total}, name
        assert sum(r.bytes_sent for r, row in zip(reports, rows) if row["giving"]) == total, name
        assert (
            sum(r.bytes_sent for r, row in zip(reports, rows) if not row["giving"]) == reports[0].bytes_among_receivers
        )
        assert [r.bytes_received for r in reports] == [0 if row["giving"] else row["held"] for row in rows], name
        assert {r.bytes_moved for r in reports} == {sum(row["held"] for row in rows)}, name
        assert all(r.buffer_bytes <= budget for r in reports), name
    assert [ranks[0][name]["report"].bytes_among_receivers >= total for name in RECEIVING] == [True, True, True, False]
    assert ranks[0]["no replicas"]["report"].bytes_among_receivers == 3 * scalar
    assert [rank["casts"] for rank in ranks] == [rank["views"] for rank in ranks] == [[]] * 6


def failing_job() -> tuple[str, int, tuple[str, ...]]:
    """A receiver fails after it got its stripe, before it passes it on."""
    giving = dist.get_rank() in SENDERS
    w = torch.randn(64, 32)
    source = live_layouts.placed({"w": w}, SENDERS, (2,), [Shard(0)]) if giving else None
    target = None if giving else {"w": torch.zeros(64, 32)}
    prepared = reshard.prepare(source, target, max_inflight_bytes=2048)
    prepared.run()
    if dist.get_rank() == 3:
        prepared._exchanges[1]._rounds[0].packs.insert(0, (torch.zeros(2), torch.zeros(3)))
    try:
        prepared.run()
    except Exception as error:
        return type(error).__name__, getattr(error, "rank", -1), getattr(error, "targets", ())
    return "", -1, ()


def test_a_receiver_that_fails_before_it_passes_its_stripe_on_ends_it_on_all():
    assert gloo.run(failing_job, 6) == [("UndefinedTargetsError", 3, ("w",))] * 6
