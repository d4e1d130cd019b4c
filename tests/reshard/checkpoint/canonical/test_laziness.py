"""Normalizing reads no tensor, and a slice of a normalized tensor reads little more than its own bytes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

import reshard
from reshard.checkpoint import checkpoint
from reshard.storage import Storage, open_storage
from tests.samples import sample, truth


class Counting(Storage):
    """A storage that counts the bytes it reads by file, and has no views of files."""

    def __init__(self, path: Path) -> None:
        self.inner = open_storage(path)
        self.url = self.inner.url
        self.max_gap_bytes = 0
        self.read_bytes: Counter[str] = Counter()

    def list(self, prefix: str = "") -> dict[str, int]:
        return self.inner.list(prefix)

    def size(self, name: str) -> int:
        return self.inner.size(name)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        self.read_bytes[name] += len(buffer)
        self.inner.read_into(name, start, buffer)

    def create(self, name: str):  # type: ignore[no-untyped-def]
        raise NotImplementedError("this storage is only read")

    def publish(self, name: str, data: object) -> None:
        raise NotImplementedError("this storage is only read")

    def delete(self, name: str) -> None:
        raise NotImplementedError("this storage is only read")


@pytest.mark.parametrize("name", ["mcore_legacy_tp2_pp2", "ds_z3_w2"])
def test_slices_read_their_bytes_only(name: str) -> None:
    wanted = truth(name)["model"]
    storage = Counting(sample(name) / "ckpt")
    found = checkpoint.open(storage).normalized()
    for fqn, lazy in found["model"].items():
        lazy[...]  # archives are looked into when a tensor is first asked for
        storage.read_bytes.clear()
        part = lazy[1:2, ..., :5] if lazy.ndim > 1 else lazy[...]
        assert sum(storage.read_bytes.values()) == part.numel() * part.element_size(), fqn
        assert part.equal(wanted[fqn][1:2, ..., :5] if lazy.ndim > 1 else wanted[fqn])


def test_normalizing_reads_no_tensor() -> None:
    storage = Counting(sample("mcore_tp2_dp2_dpreshardable/ckpt"))
    found = checkpoint.open(storage).normalized()
    tensors = sum(lazy.nbytes for lazy in found["model"].values())
    files = {n: size for n, size in storage.read_bytes.items() if n.endswith(".distcp")}
    assert sum(files.values()) < tensors / 3  # param groups are objects in these files
    lazy = found["optim"]["state"]["decoder.layers.1.mlp.linear_fc1.weight"]["exp_avg"]
    lazy[...]
    storage.read_bytes.clear()
    assert lazy[30:34].shape == (4, 24)
    assert sum(storage.read_bytes.values()) == 4 * 24 * 4


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
