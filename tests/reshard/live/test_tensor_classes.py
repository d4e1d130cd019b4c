"""Distributed tensors are told by the names of their classes, and only those of torch.distributed."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from reshard.live import tensors
from reshard.live.tensors import is_dtensor, is_pending, is_sharded, is_sharded_tensor, is_strided_shard


def named(name, module, *bases):
    return type(name, bases, {"__module__": module})


DERIVED = named("Own", "mine", DTensor)
SHARDED = named("ShardedTensor", "torch.distributed._shard.sharded_tensor.api")
ROWS = [
    # class, is_dtensor, is_sharded_tensor, is_sharded, note
    (DTensor, True, False, True, "torch's"),
    (DERIVED, True, False, True, "derived from it"),
    (named("DTensor", "torch.distributed._tensor.api"), True, False, True, "where it was before"),
    (named("DTensor", "mine", torch.Tensor), False, False, False, "of the same name"),
    (named("DTensor", "torch.distributed_not", torch.Tensor), False, False, False, "of a package named alike"),
    (SHARDED, False, True, True, "deprecated"),
    (named("CutAcrossRows", "reshard", SHARDED), False, True, True, "derived from that"),
    (named("ShardedTensor", "mine"), False, False, False, "somebody's own"),
    (torch.Tensor, False, False, False, "plain"),
    (torch.nn.Parameter, False, False, False, "a parameter"),
    (int, False, False, False, "no tensor"),
]


@pytest.mark.parametrize(("cls", "dtensor", "sharded_tensor", "sharded", "note"), ROWS, ids=[row[4] for row in ROWS])
def test_a_class_is_told_by_its_name_and_package(cls, dtensor, sharded_tensor, sharded, note):
    value = cls.__new__(cls) if not issubclass(cls, DTensor) else torch.Tensor._make_subclass(cls, torch.ones(2))

    for _ in range(2):  # also when it is known
        assert (is_dtensor(value), is_sharded_tensor(value), is_sharded(value)) == (dtensor, sharded_tensor, sharded)


def test_placements_are_told_by_name():
    derived = named("OfAMask", "mine", Partial)()

    assert [is_pending(one) for one in (Partial(), Partial("avg"), derived, Shard(0), Replicate())] == [
        *(True, True, True),
        *(False, False),
    ]
    from torch.distributed.tensor.placement_types import _StridedShard

    strided = [is_strided_shard(one) for one in (_StridedShard(0, split_factor=2), Shard(0), Replicate(), Partial())]
    assert strided == [True, False, False, False]


def test_classes_that_are_made_as_a_program_goes_are_forgotten():
    is_mine = tensors._named("DTensor")
    first, mine = named("C", "mine"), named("DTensor", "torch.distributed.tensor")
    kept = weakref.ref(first)
    assert not is_mine(first())
    del first
    gc.collect()
    assert kept() is not None

    assert [is_mine(cls()) for i in range(1500) for cls in (named(f"C{i}", "mine"), mine)] == [False, True] * 1500

    gc.collect()
    assert kept() is None
