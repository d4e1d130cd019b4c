"""Files of Hugging Face, one tensor for each expert, into layouts of expert parallelism, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.mapping.families import ready
from tests import gloo

for package in ("transformers", "safetensors"):
    pytest.importorskip(package, reason=f"{package} is not installed")

pytestmark = [pytest.mark.gloo, pytest.mark.filterwarnings("ignore")]  # of the framework: not ours to mend


def loaded(text: str, family: str) -> tuple[int, list[str]]:
    """How many expert tensors this rank loaded by experts, and the names of tensors with other values."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from tests.stories.tiny_models import model

    folder, mesh = Path(text), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    wanted = dict(model(family).state_dict())
    by_expert = [name for name, tensor in wanted.items() if ".experts." in name and tensor.dim() == 3]
    placements = {name: [Shard(1), Shard(0)] if name in by_expert else [Shard(0), Replicate()] for name in wanted}
    state: dict[str, Any] = {
        name: distribute_tensor(torch.zeros_like(wanted[name]), mesh, placements[name]) for name in wanted
    }
    assert reshard.load(state, folder / "hf", mapping=ready(folder / "hf", "huggingface", "transformers")).ok
    assert all(state[name].to_local().numel() * 4 == wanted[name].numel() for name in by_expert)
    wrong = [name for name, tensor in state.items() if not torch.equal(tensor.full_tensor(), wanted[name])]
    reshard.save(state, folder / "ours")
    return len(by_expert), wrong


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_come_in_and_go_out_by_expert(family: str, tmp_path: Path) -> None:
    from tests.stories.tiny_models import model

    model(family).save_pretrained(tmp_path / "hf")

    found = gloo.run(loaded, 4, str(tmp_path), family)

    assert found == [(found[0][0], [])] * 4
    assert found[0][0] >= 2
    back = ready(tmp_path / "hf", "transformers", "huggingface").apply(reshard.open(tmp_path / "ours"))
    assert reshard.compare(back, reshard.open(tmp_path / "hf")).ok
