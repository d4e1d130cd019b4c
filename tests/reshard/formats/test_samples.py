"""Every sample that a framework wrote opens, and its tensors are what the framework's reader, or the truth, says."""

from __future__ import annotations

import inspect
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from reshard.checkpoint import open as open_checkpoint
from tests.reshard.formats.compare import check_all, check_tensor, flat_tensors
from tests.samples import sample, truth
from tests.torch_releases import HAS_E8M0, requires

CONVERTS_UNFLATTENED = "planner_data is not None" in inspect.getsource(default_planner)
"""What a planner wrote that flattens nothing; torch 2.6 stops at it."""
DCP = [
    "accel_fsdp2_w2/ckpt/optimizer_0",
    "accel_fsdp2_w2/ckpt/pytorch_model_fsdp_0",
    "dcp_ddp_w2/ckpt/dcp_fqn",
    "dcp_ddp_w2/ckpt/dcp_raw",
    "dcp_fsdp2_1d_w4/ckpt",
    "dcp_fsdp2_tp_2x2/ckpt",
    pytest.param("dcp_misc_single/ckpt", marks=requires(HAS_E8M0, "lacks a dtype of this sample")),
    "dcp_pp2/ckpt/dcp_flat",
    "dcp_pp2/ckpt/dcp_unflat_trap",
    "dcp_sharded_tensor_w2/ckpt",
    "dcp_tied_w2/ckpt",
    "dcp_writer_variants_w2/ckpt/async",
    "dcp_writer_variants_w2/ckpt/file_per_item",
    "dcp_writer_variants_w2/ckpt/lowest_rank",
    pytest.param(
        "dcp_writer_variants_w2/ckpt/no_flatten_planner", marks=requires(CONVERTS_UNFLATTENED, "converts no such")
    ),
    "dcp_writer_variants_w2/ckpt/threads3",
    "fsdp1_flat_w2/ckpt/sharded_dcp",
    "fsdp1_orig_w2/ckpt/get_state_dict_dcp",
    "fsdp1_orig_w2/ckpt/sharded_dcp",
    "titan_llama_fsdp4/ckpt/checkpoint/step-2",
    "titan_qwen3moe_fsdp2_ep2/ckpt/checkpoint/step-2",
]


@pytest.mark.filterwarnings("ignore")  # of torch, which reads pickles its own way
@pytest.mark.parametrize("name", DCP)
def test_dcp_as_torch_reads_it(name: str, tmp_path: Path) -> None:
    """Tensors, objects and nesting equal those of torch's own conversion."""
    dcp_to_torch_save(sample(name), tmp_path / "whole.pt")
    wanted = torch.load(tmp_path / "whole.pt", weights_only=False)

    checkpoint = open_checkpoint(sample(name))

    assert checkpoint.format == "dcp"
    check_all(checkpoint, flat_tensors(wanted))
    _same_nest(checkpoint.nested(), wanted)


def _same_nest(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, torch.Tensor):
        check_tensor(ours, theirs, random.Random(1))
    elif isinstance(theirs, dict):
        assert list(map(str, sorted(ours, key=str))) == list(map(str, sorted(theirs, key=str)))
        for key, value in theirs.items():
            _same_nest(ours[key if key in ours else str(key)], value)
    elif isinstance(theirs, list) and not all(isinstance(v, (int, float, str)) for v in theirs):
        for a, b in zip(ours, theirs, strict=True):
            _same_nest(a, b)
    elif type(theirs).__module__ == "builtins":
        assert ours == theirs


MODEL = {
    "accel_ddp_w2/ckpt": ("accelerate", "model."),
    "accel_fsdp2_w2/ckpt": ("accelerate", "model."),
    "dcp_ddp_w2/ckpt/classic.pt": ("torch_save", "model.module."),
    "dcp_ddp_w2/ckpt/classic_legacy.pt": ("torch_save", "model.module."),
    "dcp_fsdp2_tp_2x2/ckpt": ("dcp", "model."),
    "dcp_writer_variants_w2/ckpt/no_collectives": ("dcp", "model."),
    "dcp_writer_variants_w2/ckpt/safetensors_fmt": ("dcp", "model."),
    "fsdp1_flat_w2/ckpt/full.pt": ("torch_save", "model."),
    "fsdp1_orig_w2/ckpt/full.pt": ("torch_save", "model."),
    "light_fsdp_w2/ckpt/last.ckpt": ("lightning", "model.net."),
    "pt_containers/ckpt/legacy.pt": ("torch_save", "model."),
    "pt_containers/ckpt/model.safetensors": ("safetensors", ""),
    "pt_containers/ckpt/zip.pt": ("torch_save", "model."),
    "pt_containers/ckpt/zip_align4096.pt": ("torch_save", ""),
    "pt_containers/ckpt/zip_nocrc.pt": ("torch_save", ""),
    "pt_dtensor_2x2/ckpt": ("rank_files", "model."),
    "tckpt_fsdp2_w2/ckpt": ("torch_checkpointing", "model."),
    "titan_llama_fsdp4/ckpt/checkpoint/step-2": ("dcp", ""),
    "titan_qwen3moe_fsdp2_ep2/ckpt/checkpoint/step-2": ("dcp", ""),
}


@pytest.mark.parametrize("name", MODEL)
def test_model_equals_the_truth(name: str) -> None:
    """The model's tensors, under the prefix that the format gives them, are what the live model held."""
    kind, prefix = MODEL[name]
    checkpoint = open_checkpoint(sample(name))

    assert checkpoint.format == kind
    check_all(checkpoint, {prefix + k: v for k, v in truth(name)["model"].items()}, complete=False)


def test_optimizer_of_rank_files_equals_the_truth() -> None:
    """Optimizer state by parameter name: torch_checkpointing; by number in group order: verl's files."""
    state = truth("tckpt_fsdp2_w2")["optim"]["state"]
    named = open_checkpoint(sample("tckpt_fsdp2_w2/ckpt"))
    check_all(named, {f"optimizer.{key}": value for key, value in flat_tensors(state).items()}, complete=False)

    wanted = truth("pt_dtensor_2x2")["optim"]["state"]
    numbered = open_checkpoint(sample("pt_dtensor_2x2/ckpt"))
    groups = [g for i in range(2) for g in [numbered.objects[f"optim.param_groups.{i}.params"]]]
    assert sorted(i for g in groups for i in g) == list(range(len(wanted)))
    found = {numbered[f"optim.state.{i}.exp_avg"][...].sum().item() for i in range(len(wanted))}
    assert found == {entry["exp_avg"].sum().item() for entry in wanted.values()}


@pytest.mark.parametrize("name", ["hf_deepseek_v3", "hf_gpt2", "hf_llama", "hf_llama_tied", "hf_mixtral", "hf_qwen2"])
def test_hugging_face_as_safetensors_reads_it(name: str) -> None:
    """Keys and tensors as on disk, and the truth's tied weights under their second name."""
    folder = sample(name) / "ckpt"
    wanted: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        wanted.update(load_file(file))

    checkpoint = open_checkpoint(folder)

    check_all(checkpoint, wanted)
    tied = {key: value for key, value in truth(name)["model"].items() if key == "lm_head.weight" and key not in wanted}
    assert list(checkpoint.aliases) == list(tied)
    for key, value in tied.items():
        check_tensor(checkpoint[key], value, random.Random(0))


@pytest.mark.parametrize(
    "variant", ["sharded_1file", "sharded_2files", "consolidated", "consolidated/sharded", "rank0_full"]
)
def test_dcp_hugging_face_writer(variant: str) -> None:
    """Shapes that the shards do not say are inferred, and all elements are right."""
    wanted = {k: v for k, v in truth("hf_dcp_writer_2x2")["model"].items() if k != "tokens_seen"}

    checkpoint = open_checkpoint(sample("hf_dcp_writer_2x2") / "ckpt" / variant)

    check_all(checkpoint, wanted)
    assert ("inferred" in " ".join(checkpoint.warnings)) == (variant != "consolidated")


@pytest.mark.parametrize(
    "name", ["dcp_ddp_w2/ckpt/classic.pt", "pt_containers/ckpt/zip.pt", "pt_containers/ckpt/legacy.pt",
             "pt_containers/ckpt/views_shared_storage.pt", "accel_ddp_w2/ckpt/optimizer.bin",
             "accel_ddp_w2/ckpt/scheduler.bin", "fsdp1_orig_w2/ckpt/raw_optim_1.pt", "dcp_pp2/ckpt/stage_1.pt"]
)  # fmt: skip
def test_torch_save_as_torch_reads_it(name: str) -> None:
    """Nesting, tensors and objects of a file are what `torch.load` gives."""
    wanted = torch.load(sample(name), weights_only=True)

    checkpoint = open_checkpoint(sample(name))

    check_all(checkpoint, flat_tensors(wanted))
    _same_nest(checkpoint.nested(), wanted)


def test_random_states_of_accelerate() -> None:
    """Objects of numpy come out as plain arrays, without numpy's pickles being run."""
    checkpoint = open_checkpoint(sample("accel_ddp_w2/ckpt"))

    state = checkpoint.nested()["random_states_1"]
    assert state["numpy_random_seed"][0] == "MT19937"
    assert state["numpy_random_seed"][1].shape == (624,)
    assert state["torch_manual_seed"].shape == (5056,)


def test_whole_modules_are_refused() -> None:
    with pytest.raises(ValueError, match="pickled object of common"):
        open_checkpoint(sample("pt_containers/ckpt/whole_module.pt"))


def test_zstd_items_equal_the_truth() -> None:
    """Compressed items are decoded, and then read like others."""
    wanted = truth("dcp_zstd_w2")
    checkpoint = open_checkpoint(sample("dcp_zstd_w2/ckpt"))

    check_all(checkpoint, flat_tensors(wanted.get("model", wanted)), complete=False)
