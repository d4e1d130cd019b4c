"""Transfers of which only differences cross: equal after any number of steps, whatever becomes of targets meanwhile."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import reshard
from reshard.errors import UndefinedTargetsError
from reshard.execute import delta as differences
from tests import gloo
from tests.same import assert_same

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "half": ((37, 50), torch.bfloat16),
    "wide": ((12, 7), torch.complex128),
    "flags": ((65,), torch.bool),
    "turned": ((30, 20), torch.float32),
    "scalar": ((), torch.int64),
    "empty": ((0, 4), torch.float32),
    "eighth": ((40, 9), torch.float8_e4m3fn),
    "cast": ((16, 33), torch.float32),
}


def values(seed: int) -> dict[str, torch.Tensor]:
    made = {}
    for i, (name, (shape, dtype)) in enumerate(SHAPES.items()):
        noise = torch.rand(shape, generator=torch.Generator().manual_seed(seed * 100 + i))
        made[name] = (noise > 0.5) if dtype == torch.bool else (noise * 100).to(dtype)
    return made


def cut(whole: torch.Tensor, mesh: Any, placements: Any) -> DTensor:
    """As `distribute_tensor` cuts it, for dtypes that gloo does not know, too."""
    local = whole
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            chunks, place = local.chunk(mesh.size(axis), placement.dim), mesh.get_coordinate()[axis]
            local = chunks[place] if place < len(chunks) else local.narrow(placement.dim, 0, 0)
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def placed(wholes: dict[str, torch.Tensor], placements: list[Any], dims: tuple[int, ...]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", dims)

    def fit(whole: torch.Tensor) -> list[Any]:
        return [p if not isinstance(p, Shard) or p.dim < whole.ndim else Replicate() for p in placements]

    return {name: cut(whole, mesh, fit(whole)) for name, whole in wholes.items()}


def changed(state: dict[str, Any], wholes: dict[str, torch.Tensor], share: float, step: int) -> None:
    """A share of the elements, everywhere alike."""
    for i, (name, whole) in enumerate(wholes.items()):
        rolls = torch.rand(whole.shape, generator=torch.Generator().manual_seed(step * 1000 + i))
        # torch 2.6 chooses among no elements of float8
        old, new = (t.view(torch.uint8) if t.element_size() == 1 else t for t in (whole, values(step + 1)[name]))
        old.copy_(torch.where(rolls < share, new, old))
        there = state[name]
        ours = cut(whole, there.device_mesh, there.placements).to_local()
        there.to_local().copy_(ours)


def matches(target: dict[str, Any], wholes: dict[str, torch.Tensor]) -> None:
    for name, there in target.items():
        wanted = cut(wholes[name].to(there.dtype), there.device_mesh, there.placements)
        assert_same(there.to_local().contiguous(), wanted.to_local())


def many_steps(steps: int, block: int) -> int:
    """Random changes, and now and then a rank that loses its target, gives it other memory, or begins anew."""
    differences.BLOCK = block
    rank, random_ = dist.get_rank(), random.Random(7)
    wholes = values(0)
    source = placed(wholes, [Shard(0), Shard(1)], (2, 2))
    target = placed({n: torch.zeros_like(w) for n, w in wholes.items()}, [Shard(1), Replicate()], (2, 2))
    whole = target["turned"]
    turned = torch.zeros(whole.to_local().shape[::-1]).t()  # no run of memory
    target["turned"] = DTensor.from_local(
        turned, whole.device_mesh, whole.placements, shape=whole.shape, stride=whole.stride()
    )
    half = target["cast"]
    target["cast"] = cut(torch.zeros(half.shape, dtype=torch.bfloat16), half.device_mesh, half.placements)
    options: Any = {"delta": True, "dtype_policy": "cast", "max_inflight_bytes": 4096, "check_replicas": False}
    prepared, fewest = reshard.prepare(source, target, **options), 1 << 60
    for step in range(steps):
        changed(source, wholes, random_.choice([0.0, 0.001, 0.01, 0.1, 1.0]), step)
        event, who = random_.choice(["", "", "", "", "lost", "moved", "anew"]), random_.randrange(4)
        if event == "anew":
            prepared = reshard.prepare(source, target, **options)
        elif event and who == rank:
            there = target["half"]
            if event == "lost":
                there.to_local().zero_()
            else:
                there._local_tensor = there.to_local().clone()
        fewest = min(fewest, prepared.run().bytes_moved)
        matches(target, wholes)
    return fewest


@pytest.mark.gloo
@pytest.mark.parametrize(("steps", "block"), [(60, 64), (40, 1 << 16)])
def test_equal_after_many_steps(steps, block):
    fewest = set(gloo.run(many_steps, 4, steps, block))
    assert len(fewest) == 1
    assert fewest.pop() < 20_000  # of a step in which nothing changed: heads and no bodies


def sparse(shares: list[float]) -> list[float]:
    """For each share of changed elements, of what a run of everything moves, how much one of differences does."""
    whole = torch.randn(1024, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    mesh = init_device_mesh("cpu", (4,))
    trainers, target = {"w": cut(whole, mesh, [Shard(0)])}, {"w": torch.zeros_like(whole)}
    prepared = reshard.prepare(trainers, target, delta=True, check_replicas=False)
    planned = sum(plan.bytes_moved for plan in prepared.plans)
    found = [prepared.run().bytes_moved / planned]
    for number, share in enumerate(shares):
        rolls = torch.rand(whole.shape, generator=torch.Generator().manual_seed(number))
        whole += (rolls < share).to(whole.dtype)
        trainers["w"].to_local().copy_(cut(whole, mesh, [Shard(0)]).to_local())
        found.append(prepared.run().bytes_moved / planned)
        assert_same(target["w"], whole)
    return found


@pytest.mark.gloo
def test_what_crosses_follows_from_what_changed():
    first, none, one, ten, all_ = gloo.run(sparse, 4, [0.0, 0.01, 0.1, 1.0])[0]
    assert none < 0.002
    assert one < 0.03
    assert ten < 0.21
    assert 1.0 < first < 1.002
    assert 1.0 < all_ < 1.002


def breaks() -> str:
    """What is sent is never what arrives: a receiver must not count it."""
    rank = dist.get_rank()
    source = {"w": torch.arange(100.0)} if rank == 0 else None
    target = {"w": torch.zeros(100)} if rank == 1 else None
    prepared = reshard.prepare(source, target, delta=True)
    if rank == 1:
        differences._Got.put = lambda self, words: None  # type: ignore[method-assign]
        differences._digests = lambda words, on_device: [0 for _ in words]
    with pytest.raises(UndefinedTargetsError, match=r"1 pairs of ranks differ after everything was sent"):
        prepared.run()
    return "refused"


@pytest.mark.gloo
def test_a_receiver_that_never_holds_what_was_sent_is_an_error():
    assert gloo.run(breaks, 2) == ["refused"] * 2
