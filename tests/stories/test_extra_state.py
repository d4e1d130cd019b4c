"""Extra state of modules: of any plain kind, and of another size than the fresh module has when it is loaded."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import reshard
from reshard.errors import KeyMismatchError
from tests import gloo

KINDS = {
    "tensor": lambda size: torch.arange(size, dtype=torch.uint8),
    "dict": lambda size: {"history": torch.ones(size), "sizes": [size] * size},
    "bytes": lambda size: b"x" * size,
    "BytesIO": lambda size: io.BytesIO(b"x" * size),
}


class Scaled(nn.Module):
    """Its extra state grows as it trains."""

    def __init__(self, kind: str, size: int) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.extra = KINDS[kind](size)

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def resumed(kind: str, size: int, path: Any, **options: Any) -> tuple[Any, reshard.LoadReport]:
    """The extra state of a fresh module after the usual way of loading."""
    fresh = Scaled(kind, size)
    state = {"model": reshard.get_model_state_dict(fresh)}
    report = reshard.load(state, path, **options)
    reshard.set_model_state_dict(fresh, state["model"])
    return fresh.extra, report


@pytest.mark.parametrize("size", [0, 3, 5, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_it_comes_back_whatever_size_the_fresh_module_has(kind: str, size: int, tmp_path: Any) -> None:
    reshard.save({"model": reshard.get_model_state_dict(Scaled(kind, 5))}, tmp_path)
    found, report = resumed(kind, size, tmp_path)
    assert report.ok
    if kind == "tensor":
        assert found.tolist() == [0, 1, 2, 3, 4]
        assert report.resized == (() if size == 5 else ("model._extra_state",))
    elif kind == "dict":
        assert found["history"].tolist() == [1.0] * 5
        assert found["sizes"] == [5] * 5
    else:
        assert (found if kind == "bytes" else found.getvalue()) == b"xxxxx"


def test_another_dtype_is_taken_too_and_nothing_of_the_kind_elsewhere(tmp_path: Any) -> None:
    reshard.save({"m._extra_state": torch.ones(3, dtype=torch.uint8), "w": torch.ones(3)}, tmp_path)
    target = {"m._extra_state": torch.zeros(7), "w": torch.zeros(3)}
    assert reshard.load(target, tmp_path, dry_run=True).resized == ("m._extra_state",)
    assert target["m._extra_state"].shape == (7,)
    reshard.load(target, tmp_path)
    assert target["m._extra_state"].tolist() == [1, 1, 1]
    assert target["m._extra_state"].dtype == torch.uint8
    with pytest.raises(KeyMismatchError, match="1 mismatched"):
        reshard.load({"m._extra_state": torch.zeros(7), "w": torch.zeros(4)}, tmp_path)


def on_ranks(path: str) -> list[int]:
    reshard.save({"model": reshard.get_model_state_dict(Scaled("tensor", 5))}, path)
    return [len(resumed("tensor", dist.get_rank(), path, read_once=once)[0]) for once in (False, True)]


@pytest.mark.gloo
def test_ranks_may_have_different_sizes_before(tmp_path: Any) -> None:
    assert gloo.run(on_ranks, 2, str(tmp_path / "c")) == [[5, 5]] * 2
