"""verl's engines on ours: full weights and differences from two trainers to two rollouts, as verl's manager calls them.

Where verl is not installed, stand-ins of its interface take its place: see `verl_interface`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import reshard
from tests import gloo
from tests.reshard.integrations.verl_interface import install, patched
from tests.same import same

FULL = {"w": torch.arange(40.0).reshape(5, 8), "b": torch.arange(3.0), "ids": torch.arange(4), "none": torch.empty(0)}


def rounds(step: int) -> dict[str, torch.Tensor]:
    """What the trainers hold at each step: nothing changes at 1, 3 and 5."""
    state = {name: tensor.clone() for name, tensor in FULL.items()}
    if step >= 2:
        state["w"].view(-1)[[3, 17]] = 102.0
        state["ids"][2] = -2
    if step >= 4:
        state["b"] *= 3
    return state


def meet(engine: Any) -> None:
    """As verl's manager has all workers meet before each update."""
    metadata: list[Any] = [None] * 4
    dist.all_gather_object(metadata, engine.prepare())
    trainers, rollouts = type(engine).build_topology(2, 2, metadata)
    rank = dist.get_rank()
    mine, place = (trainers, rank) if rank < 2 else (rollouts, rank - 2)
    engine.init_process_group(**{key: values[place] for key, values in mine.items()})


async def received(engine: Any, weights: dict[str, torch.Tensor]) -> int:
    """What a rollout's adapter does; how many messages came."""
    count = 0
    if engine.wire_format == "delta_flush":
        ended = []
        for flush, is_last in engine.receive_weights(global_steps=1):
            patched(weights, flush)
            ended.append(is_last)
            count += 1
        assert ended == [False] * (count - 1) + [True] * bool(count)
    else:
        async for name, tensor in engine.receive_weights(global_steps=1):
            weights[name] = tensor.clone()
            count += 1
    return count


def made(backend: str) -> Any:
    from verl.checkpoint_engine.base import CheckpointEngineRegistry

    more = {"is_master": dist.get_rank() == 0} if dist.get_rank() < 2 else {}
    return CheckpointEngineRegistry.new(backend, bucket_size=64, transport="gloo", host="127.0.0.1", **more)


def updated(backend: str, kind: str) -> list[Any]:
    """What this rank has after each of six updates, and how many messages came; in the fourth a rollout is replaced."""
    install()
    import reshard.integrations.verl  # registers, as verl imports it

    rank = dist.get_rank()
    trainers = dist.new_group([0, 1])
    mesh = DeviceMesh("cpu", [0, 1]) if rank < 2 else None
    held = {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in FULL.items()} if mesh is not None else {}
    source = None
    if mesh is not None and kind != "pairs":
        delta = kind == "its own differences"
        options: dict[str, Any] = {"dtype": torch.bfloat16, "bucket_bytes": 64, "delta": delta}
        options["all_ranks"] = kind == "a source for everyone"
        source = reshard.WeightSource(held, process_group=trainers, **options)
    engine, weights, found = made(backend), {}, []
    for step in range(6):
        if step == 3 and rank == 3:
            engine, weights = made(backend), {}
        meet(engine)
        for name, tensor in rounds(step).items():
            if mesh is not None:
                held[name].copy_(distribute_tensor(tensor, mesh, [Shard(0)]))
        count = 0
        if mesh is None:
            count = asyncio.run(received(engine, weights))
        else:
            pairs: Iterator[Any] = ((name, tensor.full_tensor()) for name, tensor in held.items())
            given = source or pairs
            asyncio.run(
                engine.send_weights(
                    SimpleNamespace(get_per_tensor_param=lambda g=given: (g, None)) if step % 2 else given
                )
            )
        dist.barrier()  # verl's manager waits for all
        engine.finalize()
        found.append(({name: tensor.clone() for name, tensor in weights.items()}, count))
    return found


KINDS = [
    ("reshard", "pairs"),
    ("reshard", "a source"),
    ("reshard", "a source for everyone"),
    ("reshard_delta", "pairs"),
    ("reshard_delta", "a source"),
    ("reshard_delta", "a source for everyone"),
    ("reshard_delta", "its own differences"),
]


def updated_each_way() -> list[list[Any]]:
    return [updated(*kind) for kind in KINDS]


@pytest.mark.gloo
def test_rollouts_have_what_the_trainers_have() -> None:
    by_rank = gloo.run(updated_each_way, 4)

    for number, (backend, kind) in enumerate(KINDS):
        found = [ways[number] for ways in by_rank]
        for rank in (2, 3):
            for step, (weights, count) in enumerate(found[rank]):
                wanted = {n: t.bfloat16() if t.is_floating_point() else t for n, t in rounds(step).items()}
                assert weights.keys() == wanted.keys()
                assert all(same(weights[name], wanted[name]) for name in wanted), (backend, kind, rank, step)
                assert (count == 0) == (backend == "reshard_delta" and step in (1, 5)), "only what changed"
        assert [weights for rank in (0, 1) for weights, _ in found[rank]] == [{}] * 12


def failing() -> str:
    """The trainer fails in the second of three updates: a rollout does not wait for what does not come, and the third
    gives everything."""
    install()
    import reshard.integrations.verl  # noqa: F401  # registers

    engine, weights = made("reshard_delta"), {}
    engine._timeout = timedelta(seconds=1.5)
    heard = ""
    for step in range(3):
        meet(engine)
        try:
            if dist.get_rank() >= 2:
                asyncio.run(received(engine, weights))
            else:
                asyncio.run(engine.send_weights(broken(FULL.items()) if step == 1 else iter(FULL.items())))
        except Exception as error:
            heard += f"{step}: {error}"
        dist.barrier()
        if step != 1:  # verl's manager raises
            engine.finalize()
    return heard if weights.keys() == FULL.keys() or dist.get_rank() < 2 else "not all"


def broken(pairs: Any) -> Iterator[Any]:
    yield from pairs
    raise ValueError("no more")


@pytest.mark.gloo
def test_an_update_after_one_that_failed() -> None:
    heard = gloo.run(failing, 4)

    assert heard[:2] == ["1: no more"] * 2
    for one in heard[2:]:
        assert one.startswith("1: ")
        assert "2: " not in one


class Served(torch.nn.Module):
    """As an engine's model: fills its parameters from named tensors."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in state.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros_like(tensor, dtype=torch.bfloat16)))

    @torch.no_grad()
    def load_weights(self, pairs: Any) -> None:
        for name, tensor in pairs:
            self.get_parameter(name).data.copy_(tensor)


@pytest.mark.filterwarnings("ignore")  # of what verl imports
def test_verl_s_own_loader_applies_the_differences() -> None:
    if not install():
        pytest.skip("verl is not installed: its loader is what is tested")
    from verl.workers.rollout.sglang_rollout.delta_loader import apply_delta

    from reshard.integrations.verl import ReshardDeltaEngine

    state = {"w": torch.randn(50, 40), "b": torch.randn(7)}
    source = reshard.WeightSource(state, dtype=torch.bfloat16, delta=True, bucket_bytes=1000)
    engine, served = ReshardDeltaEngine(1000, True, transport="gloo", host="127.0.0.1"), Served(state)
    sizes = []
    for _ in range(3):
        flushes = []
        engine._send = lambda message, is_last: flushes.append(message)  # noqa: B023  # type: ignore[method-assign]
        asyncio.run(engine.send_weights(source))
        for message in flushes:
            named = [("__values__", message.parts[-1].view(torch.bfloat16))]
            named += [("__positions__", positions) for positions in message.parts[:-1]]
            spec = bytearray(json.dumps(message.header["spec"]).encode())
            apply_delta(served, [*named, ("__delta_spec__", torch.frombuffer(spec, dtype=torch.uint8))])
        sizes.append(sum(part.numel() for message in flushes for part in message.parts))
        assert all(same(served.get_parameter(name).data, tensor.bfloat16()) for name, tensor in state.items())
        state["w"].view(-1)[torch.randperm(2000)[:20]] += 1
        engine._is_new = False
    assert sizes == [4014, 120, 120]
