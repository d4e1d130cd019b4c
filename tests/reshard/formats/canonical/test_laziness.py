"""Normalizing reads no tensor, and a slice of a normalized tensor reads little more than its own bytes."""

from __future__ import annotations

import pytest
import torch

import reshard
from reshard import checkpoint
from tests.samples import sample, truth
from tests.storages import Remote


@pytest.mark.parametrize("name", ["mcore_legacy_tp2_pp2", "ds_z3_w2"])
def test_slices_read_their_bytes_only(name: str) -> None:
    wanted = truth(name)["model"]
    storage = Remote(sample(name) / "ckpt", max_gap_bytes=0)
    found = checkpoint.open(storage).normalized()
    for fqn, lazy in found["model"].items():
        lazy[...]  # archives are looked into when a tensor is first asked for
        storage.ranges.clear()
        part = lazy[1:2, ..., :5] if lazy.ndim > 1 else lazy[...]
        assert storage.nbytes_read == part.numel() * part.element_size(), fqn
        assert part.equal(wanted[fqn][1:2, ..., :5] if lazy.ndim > 1 else wanted[fqn])


def test_normalizing_reads_no_tensor() -> None:
    storage = Remote(sample("mcore_tp2_dp2_dpreshardable/ckpt"), max_gap_bytes=0)
    found = checkpoint.open(storage).normalized()
    tensors = sum(lazy.nbytes for lazy in found["model"].values())
    assert storage.nbytes_of(".distcp") < 0.4 * tensors  # param groups are objects in these files
    lazy = found["optim"]["state"]["decoder.layers.1.mlp.linear_fc1.weight"]["exp_avg"]
    lazy[...]
    storage.ranges.clear()
    assert lazy[30:34].shape == (4, 24)
    assert storage.nbytes_read == 4 * 24 * 4


def test_another_framework_s_checkpoint_loads_straight_into_a_target():
    """`canonical()` is a checkpoint again: a ZeRO-3 checkpoint fills a plain state dict."""
    wanted = truth("ds_z3_w2")["model"]
    target = {"model": {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}}

    report = reshard.load(
        target, reshard.open(sample("ds_z3_w2/ckpt")).canonical(), strict={"*": "subset"}, dtype_policy="cast"
    )

    assert report.format == "normalized"
    for name, tensor in wanted.items():
        assert torch.equal(target["model"][name], tensor), name
