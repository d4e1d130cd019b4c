"""Generations in the memory of hosts: whichever hosts are lost at whatever moment, what is recovered in another
topology is a whole generation, and the newest that has a copy of everything."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from planners import Mesh, Replicate, Shard, TensorLayout, TensorSpec, plan_copies, verify
from planners.errors import PlanError
from property_tests.budget import examples
from reshard.errors import CheckpointNotFoundError
from tests.simulated_hosts import Job, cut, global_of

SPECS = [
    TensorSpec("a", (7, 5), "float32"),
    TensorSpec("b", (12,), "bfloat16"),
    TensorSpec("c.deep", (3, 4, 2), "int64"),
    TensorSpec("d", (), "float64"),
    TensorSpec("e", (0, 3), "float32"),
]


def values(step: int) -> dict[str, torch.Tensor]:
    """Of all elements of a step."""
    generator = torch.Generator().manual_seed(step)
    return {
        spec.fqn: torch.randint(-99, 99, spec.shape, generator=generator).to(getattr(torch, spec.dtype))
        for spec in SPECS
    }


class Topology:
    """Ranks on hosts, and how they hold the tensors."""

    def __init__(self, rng: random.Random, hosts: list[str]) -> None:
        self.names = [host for host in hosts for _ in range(rng.randint(1, 3))]
        world = len(self.names)
        tp = rng.choice([n for n in range(1, world + 1) if world % n == 0])
        mesh = Mesh({"dp": world // tp, "tp": tp})
        self.layouts = {}
        for spec in SPECS:
            cuts = [Replicate(), *(Shard(dim) for dim in range(len(spec.shape)))]
            self.layouts[spec.fqn] = TensorLayout(spec, mesh, [rng.choice(cuts), rng.choice(cuts)])

    def state(self, rank: int, whole: dict[str, torch.Tensor], step: int) -> dict[str, Any]:
        return {**{fqn: cut(whole[fqn], layout, rank) for fqn, layout in self.layouts.items()}, "step": step}


def damage(rng: random.Random, folder: Path) -> str:
    """Change a byte of every file of one host; its name."""
    host = rng.choice(sorted(path.name for path in folder.iterdir()) or ["none"])
    for path in (folder / host).rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
    return host


def run_case(seed: int, folder: Path) -> str:
    """A job that keeps some generations, loses hosts at some moment, and goes on with others; what happened."""
    rng = random.Random(seed)
    hosts = [f"h{i}" for i in range(rng.randint(1, 5))]
    copies = rng.randint(0, min(2, len(hosts) - 1))
    before = Topology(rng, hosts)
    victims = frozenset(rng.sample(hosts, rng.randint(0, min(len(hosts), copies + (rng.random() < 0.3)))))
    steps = rng.randint(1, 3)

    kept = 0

    def life(rank: int, tier: Any) -> None:
        nonlocal kept
        for step in range(1, steps + 1):
            tier.save(before.state(rank, values(step), step), step)
            kept = max(kept, step)

    rehearsal = Job(folder / "rehearsal", before.names, copies=copies)
    assert rehearsal.run(life) == [None] * len(before.names)
    placed: dict[str, set[str]] = {}
    for path in (folder / "rehearsal").rglob("*.safetensors"):
        placed.setdefault(path.name, set()).add(path.relative_to(folder / "rehearsal").parts[0])
    assert {len(of_it) for of_it in placed.values()} == {copies + 1}
    kept = 0
    crash = rng.randint(1, rehearsal.made) if rng.random() < 0.8 else None
    order = random.Random(rng.random())
    job = Job(
        folder / "run", before.names, copies=copies, victims=victims, crash=crash,
        choose=(lambda n: order.randrange(n)) if rng.random() < 0.5 else None,
    )  # fmt: skip
    ends = job.run(life)
    if crash is None or not victims:
        assert kept == steps, ends
    for host in victims:
        shutil.rmtree(folder / "run" / host, ignore_errors=True)

    fresh = [f"n{i}" for i in range(rng.randint(0, 2))]
    after_hosts = sorted(set(hosts) - victims) + fresh + [h for h in victims if rng.random() < 0.3]
    if not after_hosts:
        return "all lost"
    rng.shuffle(after_hosts)
    after = Topology(rng, after_hosts)
    got: dict[int, dict[str, Any]] = {}

    def again(rank: int, tier: Any) -> Any:
        got[rank] = after.state(rank, {fqn: torch.zeros_like(t) for fqn, t in values(0).items()}, -1)
        return tier.restore(got[rank])

    gone = victims | ({damage(rng, folder / "run")} if rng.random() < 0.2 else set())
    survives = kept and all(hosts_of_it - gone for hosts_of_it in placed.values())
    if rng.random() < 0.3:  # killed while it recovers: nothing is lost by that
        Job(folder / "run", after.names, copies=0, victims=frozenset(after_hosts), crash=rng.randint(1, 40)).run(again)
    reports = Job(folder / "run", after.names, copies=0).run(again)
    if any(isinstance(report, Exception) for report in reports):
        assert all(type(report) is CheckpointNotFoundError for report in reports), reports
        assert not survives, reports[0]
        return "nothing whole"
    (step,) = {report.step for report in reports}
    assert step <= steps
    assert not survives or step >= kept, f"step {kept} survives, but {step} was recovered"
    for fqn, whole in values(step).items():
        parts = {rank: state[fqn] for rank, state in got.items()}
        assert torch.equal(global_of(parts, whole), whole), f"{fqn} of step {step}"
    assert {state["step"] for state in got.values()} == {step}
    return "recovered" if step == steps else "an older one"


@given(st.integers(0, 1 << 30))
@settings(max_examples=examples(6, most=500), deadline=None)
def test_what_is_recovered_is_whole_and_the_newest_that_survives(seed: int) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        run_case(seed, Path(folder))


@given(
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 100)), min_size=1, max_size=24), st.integers(0, 3)
)
@settings(max_examples=examples(60), deadline=None)
def test_any_so_many_hosts_may_be_lost(ranks: list[tuple[str, int]], copies: int) -> None:
    hosts, nbytes = [host for host, _ in ranks], [size for _, size in ranks]
    if len(set(hosts)) < copies + 1:
        with pytest.raises(PlanError, match=f"needs {copies + 1} hosts or more"):
            plan_copies(hosts, nbytes, copies=copies)
        return
    plan = plan_copies(hosts, nbytes, copies=copies)
    assert verify(plan).ok
    assert sum(plan.bytes_by_host.values()) == (copies + 1) * sum(nbytes)
    rng = random.Random(str(ranks))
    for _ in range(5):
        assert plan.lost(rng.sample(sorted(set(hosts)), copies)) == []
    with_bytes = [host for host, size in ranks if size]
    if with_bytes and copies:
        first = hosts.index(with_bytes[0])
        together = {hosts[first], *(hosts[keeper] for keeper in plan.keepers[first])}
        assert first in plan.lost(together) or not nbytes[first]
