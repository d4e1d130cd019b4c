"""Weights of sharded trainers in SGLang's flattened buckets: through shared memory, and by broadcast.

The buckets are of SGLang's own module where it is unpacked, and stand-ins elsewhere: see `sglang_interface`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import reshard
from reshard.errors import OptionError, RankFailedError, ReshardError
from tests import gloo
from tests.reshard.integrations.sglang_interface import Engine, install
from tests.same import same

FULL = {
    "w": torch.arange(35.0).reshape(7, 5),
    "odd": torch.arange(3),
    "scale": torch.tensor(2.0),
    "none": torch.empty(0),
}
WANTED = {name: t.bfloat16() if t.is_floating_point() else t for name, t in FULL.items()}


def test_a_bucket_is_sglang_s_in_the_same_memory() -> None:
    install()
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    from reshard.integrations.sglang import flattened

    state = {"a": torch.arange(5).bfloat16(), "b": torch.ones(2, 3), "c": torch.tensor(1.0), "d": torch.empty(0, 2)}
    buckets = list(reshard.WeightSource(state).buckets())
    assert len(buckets) == 2, "5 elements of 2 bytes would leave the next ones unaligned"
    for bucket in buckets:
        theirs = flattened(bucket)
        assert theirs.get_flattened_tensor() is bucket.flat
        assert {n: same(t, state[n]) for n, t in theirs.reconstruct_tensors()} == {p.name: True for p in bucket.places}
        places = [(p.name, str(p.dtype).removeprefix("torch."), p.shape) for p in bucket.places]
        empty = FlattenedTensorBucket.empty(*zip(*places), "cpu")
        assert [(m.start_idx, m.end_idx) for m in empty.get_metadata()] == [(p.start, p.stop) for p in bucket.places]


def test_what_an_engine_refuses_is_an_error_and_comes_again() -> None:
    install()
    from reshard.integrations.sglang import update_from_tensor

    source = reshard.WeightSource({name: tensor.clone() for name, tensor in FULL.items()}, bucket_bytes=40, delta=True)
    engine = Engine(refuse=lambda call: call == 1)
    with pytest.raises(ReshardError, match="SGLang refused the weights: the pool is full"):
        update_from_tensor(engine, source)
    engine = Engine()
    update_from_tensor(engine, source, tp_size=2)
    assert engine.weights.keys() == FULL.keys()
    update_from_tensor(engine, source)
    assert engine.flushes == [False, True], "nothing changed"


def held(ranks: list[int]) -> dict[str, Any]:
    mesh = DeviceMesh("cpu", ranks)
    return {
        name: distribute_tensor(tensor, mesh, [Shard(0)] if tensor.dim() else None) for name, tensor in FULL.items()
    }


def updated() -> Any:
    """Ranks 0 and 1 train; 1 and 2 are an engine, whose first rank drives it. Each way of sending, twice."""
    install()
    from reshard.integrations.sglang import update_from_distributed, update_from_tensor

    rank = dist.get_rank()
    trainers, wire = dist.new_group([0, 1]), dist.new_group([0, 2])
    found: list[Any] = []
    options: dict[str, Any] = {"dtype": torch.bfloat16, "bucket_bytes": 64, "process_group": trainers}
    if rank < 2:
        state = held([0, 1])
        everywhere = reshard.WeightSource(state, all_ranks=True, **options)
        engine = Engine() if rank == 0 else None
        for _ in range(2):
            update_from_tensor(engine, everywhere, process_group=trainers)
        found.append((engine.weights, engine.flushes) if engine else ({}, []))
        try:
            update_from_tensor(
                Engine(refuse=lambda call: call > 0) if rank == 0 else None, everywhere, process_group=trainers
            )
        except (RankFailedError, ReshardError) as error:
            found.append(str(error))
        first = reshard.WeightSource(state, **options)
        with pytest.raises(OptionError, match="all_ranks=True"):
            update_from_tensor(None, first, process_group=trainers)
        remote = Remote(wire) if rank == 0 else None
        with pytest.raises(RankFailedError if rank else OptionError, match="pass the engine on the first rank"):
            update_from_distributed(None, first, None)
        for source in (first, everywhere):
            update_from_distributed(remote, source, wire if rank == 0 else None)
        if remote:
            dist.send_object_list([None], dst=2)
        return found
    engine = Engine(group=wire)
    while True:
        asked: list[Any] = [None]
        dist.recv_object_list(asked, src=0)
        if asked[0] is None:
            return engine.weights, engine.flushes
        engine.update_weights_from_distributed(*asked[0][0], **asked[0][1])


class Remote:
    """What calls an engine in another process."""

    def __init__(self, wire: Any) -> None:
        self._wire = wire

    def update_weights_from_distributed(self, *args: Any, **options: Any) -> dict[str, Any]:
        dist.send_object_list([(args, options)], dst=2)
        return {"success": True, "message": ""}


@pytest.mark.gloo
def test_engines_have_what_the_trainers_have() -> None:
    zero, one, engine = gloo.run(updated, 3)

    for weights, flushes in (zero[0], engine):
        assert weights.keys() == WANTED.keys()
        assert all(same(weights[name], WANTED[name]) for name in WANTED)
        assert [number for number, is_flush in enumerate(flushes) if is_flush][-1] == len(flushes) - 1
    assert zero[0][1] == engine[1], "the cache is flushed once an update"
    assert sum(engine[1]) == 2, "from either source"
    assert one[0] == ({}, [])
    assert "SGLang refused the weights: the pool is full" in zero[1]
    assert "SGLang refused the weights: the pool is full" in one[1]
