"""Weights of sharded jobs through vLLM's weight sources: whole, everywhere, and in the shards that M2N takes.

Where vLLM is not installed, stand-ins of its documented interface take its place: see `vllm_interface`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from reshard.errors import KeyMismatchError
from reshard.mapping.families import Decoder, ready
from tests import gloo
from tests.reshard.integrations.vllm_interface import install
from tests.same import same

pytestmark = pytest.mark.gloo
Q, K, V, GATE, LATE = (torch.arange(8.0 * n).reshape(-1, 8) + 1000 * n for n in (4, 2, 2, 6, 3))
FUSED = torch.cat([Q, K, V])
WHOLE = {"model.layers.0.self_attn.qkv_proj.weight": FUSED, "gate": GATE, "late": LATE, "scale": torch.tensor(7.0)}


def state(rank: int, factor: float) -> dict[str, Any]:
    """What one of two ranks holds: rows, columns, whole tensors, and a tensor that only the last rank has."""
    mesh = init_device_mesh("cpu", (2,))
    held: dict[str, Any] = {
        f"model.layers.0.self_attn.{name}_proj.weight": distribute_tensor(value * factor, mesh, [how])
        for name, value, how in (("q", Q, Shard(0)), ("k", K, Shard(1)), ("v", V, Replicate()))
    }
    held["gate"] = distribute_tensor(GATE * factor, mesh, [Shard(0)])
    held["scale"] = torch.tensor(7.0 * factor)
    return held if rank == 0 else {**held, "late": LATE * factor}


def offered() -> dict[str, Any]:
    """What the sources of this rank tell and yield, twice, with other values the second time."""
    install()
    import torch.distributed as dist

    from reshard.integrations.vllm import ShardSource, StateSource

    rank = dist.get_rank()
    model = Decoder("llama", 4, 2, 1, 53)
    mine = state(rank, 1.0)
    options: dict[str, Any] = {"mapping": ready(model, "huggingface", "vllm"), "bucket_bytes": 300}
    sources = {
        "first": StateSource(mine, **options),
        "everyone": StateSource(mine, all_ranks=True, dtype=torch.bfloat16, **options),
        "shards": ShardSource(mine, **options),
    }
    found: dict[str, Any] = {}
    with pytest.raises(KeyMismatchError, match="no rank has a tensor"):
        StateSource({"step": 3})
    for factor in (1.0, 2.0):
        for tensor in mine.values():
            tensor.copy_(tensor * factor)
        for name, source in sources.items():
            iterate = source.iter_local if source.implements_iter_local() else source.iter_full
            pairs = [(key, tensor.clone()) for key, tensor in iterate()]
            assert [key for key, _ in pairs] == source.owned_names(rank)
            meta = [(m.name, m.dtype, m.shape, m.owners, m.mesh_shape) for m in source.metadata]
            found[name] = (meta, dict(pairs))
    return found


def test_every_source_gives_what_vllm_is_told() -> None:
    zero, one = gloo.run(offered, 2)

    twice = {name: 2 * tensor for name, tensor in WHOLE.items()}
    for name in zero:
        meta, _ = zero[name]
        assert meta == one[name][0], "metadata is the same on every rank"
        dtype = torch.bfloat16 if name == "everyone" else torch.float32
        assert {key: (kind, shape) for key, kind, shape, *_ in meta} == {
            key: (dtype, tuple(tensor.shape)) for key, tensor in WHOLE.items()
        }
    assert {owners for *_, owners, _ in zero["first"][0]} == {(0,)}
    assert one["first"][1] == {}
    assert all(torch.equal(zero["first"][1][key], twice[key]) for key in WHOLE)
    for rank in (zero, one):
        assert all(torch.equal(rank["everyone"][1][key], twice[key].bfloat16()) for key in WHOLE)
    cuts = {key: mesh for key, *_, mesh in zero["shards"][0]}
    assert cuts == {
        "model.layers.0.self_attn.qkv_proj.weight": (1, 2),
        "gate": (1, 2),
        "late": (2,),
        "scale": (2,),
    }  # 3 rows are not cut
    for key, mesh in cuts.items():
        halves = [rank["shards"][1][key] for rank in (zero, one)]
        whole = torch.cat(halves) if mesh == (1, 2) else halves[0]
        assert torch.equal(whole, twice[key])
        assert mesh == (1, 2) or torch.equal(*halves)


def sent() -> list[Any]:
    """What the client and the channel of an engine get, in two rounds; the engine is of vLLM's abstract class."""
    install()
    import torch.distributed as dist
    from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine

    from reshard.integrations.vllm import StateSource

    calls: list[Any] = []

    class Client:
        def start_weight_update(self) -> None:
            calls.append("start")

        def update_weights(self, update_info: dict[str, Any]) -> None:
            calls.append(update_info["names"])

        def finish_weight_update(self, weight_version: str | None = None) -> None:
            calls.append("finish")

    class Engine(TrainerWeightTransferEngine):  # type: ignore[misc]  # Any where vLLM is not installed
        """Sends as those for NCCL do: the sender, in a thread while vLLM waits for it, and the others go along."""

        @classmethod
        def trainer_init(cls, init_info: int, *, client: Any, source: Any = None) -> Engine:
            assert source.implements_iter_full()
            return cls(client=client, source=source, is_sender=init_info == 0, rank=init_info)

        def send_weights(self) -> None:
            if not self.is_sender:
                for _ in self.source.iter_full():
                    raise AssertionError("what the first rank owns comes on no other")
                return
            self.client.start_weight_update()
            names = [meta.name for meta in self.source.metadata]
            with ThreadPoolExecutor(1) as beside:
                update = beside.submit(self.client.update_weights, {"names": names})
                calls.append({name: tensor.clone() for name, tensor in self.source.iter_full()})
                update.result()
            self.client.finish_weight_update()

    rank = dist.get_rank()
    mine = state(rank, 1.0)
    source = StateSource(mine, mapping=ready(Decoder("llama", 4, 2, 1, 53), "huggingface", "vllm"), bucket_bytes=300)
    engine = Engine.trainer_init(rank, client=Client(), source=source)
    for _ in range(2):
        for tensor in mine.values():
            tensor.mul_(2)
        engine.send_weights()
    return calls


def test_an_engine_of_vllm_s_class_sends_what_the_source_gives() -> None:
    zero, one = gloo.run(sent, 2)

    assert one == []
    assert [call for call in zero if isinstance(call, str)] == ["start", "finish"] * 2
    told = [call for call in zero if isinstance(call, list)]
    given = [call for call in zero if isinstance(call, dict)]
    assert len(told) == len(given) == 2
    for factor, names, weights in zip((2, 4), told, given, strict=True):
        assert list(weights) == names
        assert {name: same(tensor, factor * WHOLE[name]) for name, tensor in weights.items()} == dict.fromkeys(
            WHOLE, True
        )
