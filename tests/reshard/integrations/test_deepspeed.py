"""DeepSpeed loads the universal checkpoints that we write, into other ZeRO stages and numbers of ranks, bit for bit."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import reshard
from tests import gloo
from tests.same import assert_same

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="deepspeed is not installed; it is in no extra, since other libraries change where they find it",
    ),
]


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def _engine(stage: int, seed: int, lr: float, universal: bool) -> Any:
    os.environ.update({"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "LOCAL_RANK": os.environ.get("RANK", "0")})
    import deepspeed

    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None  # compiles for minutes where it can; gloo does the same
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    model = Net(seed)
    groups = [{"params": [model.up.weight, model.down.weight]}, {"params": [model.up.bias], "weight_decay": 0.0}]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": False},
        "checkpoint": {"load_universal": universal},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=lr), config=config)
    return engine


def _trained(folder: Path, stage: int) -> None:
    engine = _engine(stage, seed=0, lr=0.01, universal=False)
    for seed in range(3):
        torch.manual_seed(seed)
        engine.backward(engine(torch.randn(2, 6)).square().sum())
        engine.step()
    engine.save_checkpoint(str(folder), client_state={"note": "hello"})


def _resumed(source: Path, target: Path, stage: int) -> tuple[Any, int]:
    engine = _engine(stage, seed=1, lr=0.5, universal=True)
    _, client = engine.load_checkpoint(str(source))
    engine.save_checkpoint(str(target))
    return client["note"], engine.global_steps


def _values(folder: Path, hints: dict[str, Any] | None = None) -> dict[str, Any]:
    found = reshard.open(folder).normalized(hints)
    states = {f"{fqn} {name}": v for fqn, of in found["optim"]["state"].items() for name, v in of.items()}
    read = {k: torch.as_tensor(v[...] if hasattr(v, "dtype") else v) for k, v in {**found["model"], **states}.items()}
    keys = ("lr", "weight_decay", "params")
    groups = [{key: group[key] for key in keys} for group in found["optim"]["param_groups"]]
    return {**{k: read[k] for k in sorted(read)}, "groups": groups}


OTHERS = {0: ((2, 3), (1, 1)), 1: ((3, 3), (1, 1)), 2: ((3, 3), (1, 2)), 3: ((2, 3), (3, 1))}
"""By the stage that saved on two ranks: the stages and the numbers of ranks that resume."""


@pytest.mark.parametrize("first", OTHERS)
def test_deepspeed_goes_on_from_what_we_wrote(first: int, tmp_path: Path) -> None:
    gloo.run(_trained, 2, tmp_path / "first", first)
    hints = {"param_names": ["up.weight", "down.weight", "up.bias"]} if first == 0 else None  # stage 0 saves none
    # at once: by way of a native checkpoint, the client state is left out
    reshard.convert(tmp_path / "first", tmp_path / "written", format="deepspeed", hints=hints)
    wanted = _values(tmp_path / "first", hints)

    for stage, ranks in OTHERS[first]:
        again = tmp_path / f"again-{stage}-{ranks}"
        assert gloo.run(_resumed, ranks, tmp_path / "written", again, stage)[0] == ("hello", 3)
        found = _values(again)
        if stage == 3:  # there DeepSpeed gives the settings of the first group to all
            found["groups"] = wanted["groups"]
        assert_same(found, wanted)
