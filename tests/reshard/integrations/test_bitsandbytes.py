"""bitsandbytes' optimizers, which run on CPUs: their codes, scales, and tables, on one process and under DDP.

Its step takes no DTensors, so there is nothing to resume under FSDP2. Under FSDP1, whose shards end anywhere, the state
is refused.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import reshard
from reshard.errors import LayoutError, NormalizationError
from tests import gloo
from tests.same import same

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
warnings.filterwarnings("ignore", category=UserWarning)
pytestmark = [pytest.mark.gloo, pytest.mark.filterwarnings("ignore::UserWarning")]

NAMES = ["AdamW8bit", "Lion8bit", "AdEMAMix8bit", "PagedAdamW8bit", "SGD8bit", "AdamW"]


def job(name: str, how: str) -> tuple[nn.Module, Any]:
    """One matrix in whole blocks, one whose last block is not full, one too small to be quantized."""
    import bitsandbytes
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 77), nn.Linear(77, 5))
    if how == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif how.startswith("fsdp1"):
        original = how == "fsdp1 original"
        model = FullyShardedDataParallel(model, use_orig_params=original, device_id=torch.device("cpu"))
    momentum = {"momentum": 0.9} if name.startswith("SGD") else {}
    return model, getattr(bitsandbytes.optim, name)(model.parameters(), lr=0.01, **momentum)


def step(model: nn.Module, optimizer: Any, seed: int) -> None:
    torch.manual_seed(seed)
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def run(name: str, how: str, source: Path | None, target: Path) -> Any:
    """Two steps, or what was saved; saves, and gives the codes and what the next step makes of them."""
    with contextlib.redirect_stderr(io.StringIO()):  # it tells which compiled parts it lacks
        model, optimizer = job(name, how)
    if source is None:
        step(model, optimizer, 1)
        step(model, optimizer, 2)
    else:
        state = dict(zip(("model", "optim"), reshard.get_state_dict(model, optimizer)))
        assert reshard.load(state, source).ok
        reshard.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    state = dict(zip(("model", "optim"), reshard.get_state_dict(model, optimizer)))
    reshard.save(state, target)
    first = next(iter(optimizer.state.values()))
    step(model, optimizer, 3)
    return first["state1"].dtype, {key: value.clone() for key, value in reshard.get_model_state_dict(model).items()}


@pytest.mark.parametrize("name", NAMES)
def test_codes_and_scales_stay_as_they_are_and_the_next_step_is_the_same(name: str, tmp_path: Path) -> None:
    steps = gloo.run(run, 1, name, "alone", None, tmp_path / "0")
    steps += gloo.run(run, 2, name, "ddp", tmp_path / "0", tmp_path / "1")[:1]
    steps += gloo.run(run, 1, name, "alone", tmp_path / "1", tmp_path / "2")
    assert steps[0][0] == (torch.float32 if name == "AdamW" else torch.uint8)
    assert same(steps[1], steps[0])
    assert same(steps[2], steps[0])
    assert reshard.compare(tmp_path / "0", tmp_path / "2").ok


def under_fsdp1(source: Path, target: Path) -> None:
    for how in ("fsdp1 original", "fsdp1 flat"):
        model, optimizer = job("AdamW8bit", how)
        state = dict(zip(("model", "optim"), reshard.get_state_dict(model, optimizer)))
        assert reshard.load(state, source).ok
        with pytest.raises(NormalizationError, match="sharding is unknown"):
            reshard.set_optimizer_state_dict(model, optimizer, state["optim"])
        assert not optimizer.state
        step(model, optimizer, 1)
        with pytest.raises((LayoutError, reshard.errors.KeyMismatchError), match=f"optim.state.*{dist.get_rank()}"):
            reshard.save({"optim": reshard.get_optimizer_state_dict(model, optimizer)}, target)


def test_fsdp1_is_refused(tmp_path: Path) -> None:
    gloo.run(run, 1, "AdamW8bit", "alone", None, tmp_path / "0")
    gloo.run(under_fsdp1, 2, tmp_path / "0", tmp_path / "1")


class Adapted(nn.Module):
    """A frozen layer of 4 bits with nested statistics, and an adapter."""

    def __init__(self, seed: int) -> None:
        from bitsandbytes.nn import Linear4bit

        super().__init__()
        torch.manual_seed(0)
        self.base = Linear4bit(256, 100, quant_type="nf4", compress_statistics=True, compute_dtype=torch.float32)
        self.base.requires_grad_(False)
        torch.manual_seed(seed)
        self.down, self.up = nn.Linear(256, 4, bias=False), nn.Linear(4, 100, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted(seed: int) -> tuple[Adapted, torch.optim.Optimizer]:
    model = Adapted(seed).to("cpu")  # quantizes
    return model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)


def test_adapters_of_a_layer_of_4_bits_resume_alone(tmp_path: Path) -> None:
    options = reshard.StateDictOptions(ignore_frozen_params=True)
    model, optimizer = adapted(1)
    x = torch.randn(3, 256)
    model(x).square().mean().backward()
    optimizer.step()
    weights, states = reshard.get_state_dict(model, optimizer, options=options)
    assert list(weights) == ["down.weight", "up.weight"]
    reshard.save({"model": weights, "optim": states}, tmp_path)

    other, fresh = adapted(2)
    state = dict(zip(("model", "optim"), reshard.get_state_dict(other, fresh, options=options)))
    assert reshard.load(state, tmp_path).ok
    reshard.set_state_dict(
        other, fresh, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options
    )
    assert torch.equal(other(x), model(x))


def test_a_layer_that_does_not_load_what_it_saves_is_named() -> None:
    model, _ = adapted(1)
    with pytest.raises(
        reshard.errors.KeyMismatchError, match=r"Linear4bit saves 'base\.weight\.absmax', and its load_state"
    ):
        reshard.set_model_state_dict(model, reshard.get_model_state_dict(model))
