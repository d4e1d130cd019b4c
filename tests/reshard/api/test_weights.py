"""The weights of a trainer in buckets: full tensors or shards, all of them or what changed since the last pass."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import reshard
from planners.geometry.box import Box
from planners.geometry.layout import TensorLayout, TensorSpec
from reshard.api.weights import WeightBucket, WeightPlace
from reshard.errors import KeyMismatchError, OptionError
from reshard.mapping import Concat, Mapping
from tests import gloo
from tests.reshard.integrations import sglang_interface, verl_interface, vllm_interface
from tests.same import same
from tests.torch_releases import HAS_E8M0, requires

STATE = {
    "odd": torch.arange(3, dtype=torch.bfloat16),
    "scale": torch.tensor(7.0),
    "none": torch.empty(0, 4),
    "wide": torch.arange(100.0).reshape(10, 10),
    "flags": torch.tensor([True, False, True]),
    "pairs": torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128),
    "small": torch.full((2, 2), 0.5, dtype=torch.float8_e4m3fn),
}


def taken(buckets: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for bucket in buckets:
        for name, tensor in bucket.tensors():
            assert name not in found
            found[name] = tensor.clone()
    return found


@pytest.mark.parametrize("bucket_bytes", [1, 16, 100, 1 << 20])
def test_any_tensor_comes_in_buckets_without_gaps(bucket_bytes: int) -> None:
    source = reshard.WeightSource(STATE, bucket_bytes=bucket_bytes)
    buckets = list(source.buckets())

    assert taken(buckets).keys() == STATE.keys() == source.specs.keys()
    assert all(same(tensor, STATE[name]) for name, tensor in taken(buckets).items())
    assert all(same(tensor, STATE[name]) for name, tensor in source.iter_full())
    for packed in (buckets, list(WeightBucket.pack(STATE.items(), bucket_bytes))):
        assert all(same(tensor, STATE[name]) for name, tensor in taken(packed).items())
        for bucket in packed:
            starts = [place.start for place in bucket.places]
            assert starts == [0, *(place.stop for place in bucket.places[:-1])]
            assert all(place.start % place.dtype.itemsize == 0 for place in bucket.places)
            assert bucket.flat.numel() <= bucket_bytes or len([p for p in bucket.places if p.start < p.stop]) == 1


def test_tensors_that_are_lazily_conjugated_or_negative_are_packed() -> None:
    pairs = torch.tensor([1 + 2j, 3 - 4j])
    given = {"conjugated": pairs.conj(), "negative": pairs.conj().imag}

    found = taken(WeightBucket.pack(given.items(), 1 << 20))
    assert same(found["conjugated"], torch.tensor([1 - 2j, 3 + 4j]))
    assert same(found["negative"], torch.tensor([-2.0, 4.0]))


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_a_name_that_comes_twice_is_refused(bucket_bytes: int) -> None:
    with pytest.raises(KeyMismatchError, match="the weight 'w' is given twice"):
        list(WeightBucket.pack([("w", torch.ones(2)), ("v", torch.ones(2)), ("w", torch.zeros(2))], bucket_bytes))


def test_small_buckets_are_transferred_together(monkeypatch: pytest.MonkeyPatch) -> None:
    from reshard.api import weights

    calls: list[int] = []
    run = weights.redistribute
    monkeypatch.setattr(
        weights, "redistribute", lambda given, *rest, **how: [calls.append(1), run(given, *rest, **how)]
    )
    assert len(list(reshard.WeightSource(STATE, bucket_bytes=16).buckets())) > 3
    assert len(calls) == 1


def test_what_changed_since_the_last_pass() -> None:
    state = {name: tensor.clone() for name, tensor in STATE.items()}
    source = reshard.WeightSource(state, bucket_bytes=100, delta=True)
    first = list(source.buckets())
    assert taken(first).keys() == STATE.keys()
    assert all(change.positions is None for bucket in first for change in bucket.changes())

    assert list(source.buckets()) == [], "nothing changed"
    state["odd"][1] = float("nan")
    state["pairs"][1] = 3 + 4j
    state["wide"].view(-1)[[5, 77]] = -0.0
    state["scale"].fill_(8)
    found = {}
    for bucket in source.buckets():
        assert bucket.flat.numel() == sum(tensor.nbytes for _, tensor in bucket.tensors())
        for name, _, positions, values in bucket.changes():
            found[name] = (positions.tolist(), values.clone())
    assert {name: positions for name, (positions, _) in found.items()} == {
        "odd": [1], "pairs": [1], "wide": [5, 77], "scale": [0]
    }  # fmt: skip
    assert all(same(values, state[name].view(-1)[positions]) for name, (positions, values) in found.items())

    state["odd"][0] = float("nan")
    assert taken(source.buckets()).keys() == {"odd"}, "the same NaN is no change"
    for _ in source.buckets():
        raise AssertionError("nothing changed")
    state["scale"].fill_(9)
    for _ in source.buckets():
        break
    assert taken(source.buckets()).keys() == STATE.keys(), "all after a pass that was broken off"
    source.forget()
    assert taken(source.buckets()).keys() == STATE.keys()


def test_a_zero_of_the_other_sign_is_a_change() -> None:
    state = {"w": torch.zeros(3)}
    source = reshard.WeightSource(state, delta=True)
    list(source.buckets())
    state["w"][2] = -0.0
    ((change,),) = [list(bucket.changes()) for bucket in source.buckets()]
    assert change.positions is not None
    assert change.positions.tolist() == [2]


def test_what_is_refused() -> None:
    with pytest.raises(KeyMismatchError, match="no rank has a tensor"):
        reshard.WeightSource({"step": 3})
    with pytest.raises(OptionError, match="bucket_bytes must be at least 1, got 0"):
        reshard.WeightSource(STATE, bucket_bytes=0)


def test_a_rank_without_a_part_by_its_layout_gets_an_empty_tensor() -> None:
    """It had failed, while the other ranks waited for it."""

    def layouts(spec: TensorSpec) -> TensorLayout | None:
        boxes = {1: [Box.full(spec.shape)]}
        return TensorLayout.from_boxes(spec, boxes, 2) if spec.fqn == "w" else None

    source = reshard.WeightSource({"w": torch.ones(4), "scale": torch.tensor(2.0)}, layouts=layouts)
    assert {name: tensor.tolist() for name, tensor in source.iter_full()} == {"w": [], "scale": 2.0}
    refused_by_engines(source)


def refused_by_engines(source: reshard.WeightSource) -> None:
    """An engine would take the shard of the first rank for the tensor."""
    for interface in (verl_interface, vllm_interface, sglang_interface):
        interface.install()
    from reshard.integrations.sglang import update_from_distributed, update_from_tensor
    from reshard.integrations.verl import ReshardCheckpointEngine
    from reshard.integrations.vllm import StateSource

    engine = ReshardCheckpointEngine(64, True, transport="gloo", host="127.0.0.1")
    with pytest.raises(OptionError, match="has layouts="):
        asyncio.run(engine.send_weights(source))
    for update in (update_from_tensor, update_from_distributed):
        with pytest.raises(OptionError, match="has layouts="):
            update(sglang_interface.Engine(), source, *((None,) if update is update_from_distributed else ()))
    with pytest.raises(OptionError, match="has layouts="):
        StateSource({"w": torch.ones(2)}, layouts=lambda spec: TensorLayout.from_boxes(spec, {}, 1))


def fused_from_two_trainers() -> dict[str, Any]:
    """Ranks 1 and 2 of three train, with a tensor that only the last has; what the sources give on each."""
    trainers = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return {}
    mesh = DeviceMesh("cpu", [1, 2])
    q, k = torch.arange(56.0).reshape(7, 8), torch.arange(24.0).reshape(3, 8) + 100
    state: dict[str, Any] = {
        "q": distribute_tensor(q, mesh, [Shard(0)]),
        "k": distribute_tensor(k, mesh, [Shard(1)]),
        "norm": distribute_tensor(torch.ones(5), mesh, [Replicate()]),
    }
    if dist.get_rank() == 2:
        state["late"] = torch.arange(6)
    options: dict[str, Any] = {
        "mapping": Mapping([Concat(["q", "k"], "qk")]),
        "dtype": torch.bfloat16,
        "process_group": trainers,
        "bucket_bytes": 64,
    }
    found = {}
    for name, more in {"first": {}, "all": {"all_ranks": True}, "delta": {"delta": True}}.items():
        source = reshard.WeightSource(state, **options, **more)
        passes = [taken(source.buckets()), taken(source.buckets())]
        found[name] = passes
    return {**found, "specs": {s.fqn: (s.shape, s.dtype) for s in source.specs.values()}}


@pytest.mark.gloo
def test_fused_weights_from_some_ranks_of_the_job() -> None:
    _, *trainers = gloo.run(fused_from_two_trainers, 3)

    qk = torch.cat([torch.arange(56.0).reshape(7, 8), torch.arange(24.0).reshape(3, 8) + 100]).bfloat16()
    wanted = {"qk": qk, "norm": torch.ones(5).bfloat16(), "late": torch.arange(6)}
    for number, found in enumerate(trainers):
        assert found["specs"] == {"qk": ((10, 8), "bfloat16"), "norm": ((5,), "bfloat16"), "late": ((6,), "int64")}
        for name in ("first", "all", "delta"):
            full = wanted if number == 0 or name == "all" else {}
            for given, expected in zip(found[name], (full, {} if name == "delta" else full)):
                assert given.keys() == expected.keys()
                assert all(same(tensor, expected[key]) for key, tensor in given.items())


def test_a_place_tells_shape_and_dtype() -> None:
    (bucket,) = reshard.WeightSource({"w": torch.ones(2, 3)}).buckets()
    assert bucket.places == (WeightPlace("w", (2, 3), torch.float32, 0, 24),)


def refused_on_one_rank() -> dict[str, Any]:
    """What each rank raises, and whether it waits, where only the last one is refused."""
    rank, found = dist.get_rank(), {}
    state: dict[str, Any] = {"w": torch.arange(8.0)}
    odd = rank == 1
    calls: dict[str, Any] = {
        "a sparse tensor": lambda: reshard.WeightSource(state | ({"q": torch.eye(3).to_sparse()} if odd else {})),
        "no state": lambda: reshard.WeightSource(None if odd else state),  # type: ignore[arg-type]
        "an option": lambda: reshard.WeightSource(state, bucket_bytes=1 - odd),
        "a layout": lambda: reshard.WeightSource(state, layouts=lambda spec: 1 // (1 - odd) and None),
        "no memory": lambda: taken(reshard.WeightSource(state, all_ranks=True).buckets()),
    }
    for name, call in calls.items():
        with pytest.MonkeyPatch.context() as patch:
            if odd and name == "no memory":
                patch.setattr(WeightBucket, "empty", lambda places, device: torch.empty(1 << 60))
            started = time.perf_counter()
            with pytest.raises(Exception) as error:
                call()
            found[name] = type(error.value).__name__, str(error.value), time.perf_counter() - started
    return found


@pytest.mark.gloo
def test_what_one_rank_refuses_ends_the_call_on_all() -> None:
    waiting, _ = gloo.run(refused_on_one_rank, 2)
    for name, (kind, message, seconds) in waiting.items():
        assert kind == "RankFailedError", (name, message)
        assert "rank 1 failed in 'weights'" in message, name
        assert seconds < 10, name


def hangs() -> str:
    if dist.get_rank() == 1:
        time.sleep(4)
        return ""
    with pytest.raises(reshard.ReshardError) as error:
        reshard.WeightSource({"w": torch.ones(2)}, timeout=0.5)
    return type(error.value).__name__


@pytest.mark.gloo
def test_a_rank_that_does_not_come_is_waited_for_until_the_timeout() -> None:
    assert gloo.run(hangs, 2) == ["DeadlineError", ""]


def shards_of_all_kinds() -> dict[str, Any]:
    spec = TensorSpec("w", (6, 2), "float32")
    boxes = {0: [Box((0, 0), (1, 2)), Box((4, 0), (2, 2))], 1: [Box((1, 0), (2, 2))], 2: [Box((3, 0), (1, 2))]}
    kinds = {
        "fewer ranks": TensorLayout(spec, "tp=2", "S(0)"),
        "flat": TensorLayout.from_flat_ranges(spec, {0: (0, 5), 1: (5, 12)}),
        "boxes": TensorLayout.from_boxes(spec, boxes),
    }
    state = {"w": torch.arange(12.0).view(6, 2)}
    return {
        name: [
            tensor.tolist() for _, tensor in reshard.WeightSource(state, layouts=lambda _, it=layout: it).iter_full()
        ]
        for name, layout in kinds.items()
    }


@pytest.mark.gloo
def test_each_rank_gets_its_part_of_any_layout() -> None:
    first, second, third = gloo.run(shards_of_all_kinds, 3)
    assert first["fewer ranks"] == [[[0, 1], [2, 3], [4, 5]]]
    assert second["fewer ranks"] == [[[6, 7], [8, 9], [10, 11]]]
    assert third["fewer ranks"] == third["flat"] == [[]]
    assert first["flat"] == [[0, 1, 2, 3, 4]]
    assert second["flat"] == [[5, 6, 7, 8, 9, 10, 11]]
    assert first["boxes"] == [[0, 1, 8, 9, 10, 11]]
    assert second["boxes"] == [[[2, 3], [4, 5]]]


@requires(HAS_E8M0, "lacks the dtype")
def test_a_tensor_that_cannot_be_converted_is_named_at_once() -> None:
    state = {"w": torch.ones(2), "scale": torch.ones(2).to(torch.float8_e8m0fnu)}
    assert reshard.WeightSource(state, dtype=torch.bfloat16).specs["scale"].dtype == "bfloat16"
    with pytest.raises(KeyMismatchError, match=r"w: is float32, not \S+ .*cannot hold 0 or negative numbers"):
        reshard.WeightSource(state, dtype=torch.float8_e8m0fnu)
