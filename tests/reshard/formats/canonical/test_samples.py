"""Checkpoints that real frameworks wrote: `normalized()` equals their ground truth, whole and by random slices."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from reshard import checkpoint
from reshard.errors import CorruptCheckpointError, NormalizationError
from tests.reshard.formats.canonical.truth import differences
from tests.samples import sample, truth
from tests.torch_releases import HAS_E8M0, requires

Hint = Callable[[str], Mapping[str, Any]]


@dataclass(frozen=True)
class Case:
    """A checkpoint of a sample."""

    sample: str
    path: str = "ckpt"
    hints: Hint | None = None
    model: bool = True
    optim: bool = True
    groups: bool = True

    def __str__(self) -> str:
        return f"{self.sample}/{self.path}"


def keymap(name: str) -> dict[str, Any]:
    """The names or shapes that the checkpoint itself does not hold."""
    result: dict[str, Any] = json.loads((sample(name) / "keymap.json").read_text())
    return result


def ids(name: str) -> dict[str, Any]:
    """The names of integer ids, from the sample's key map."""
    return {"param_names": keymap(name)["optimizer_ids"]}


def group_order(name: str) -> dict[str, Any]:
    """The same, from the truth's param groups, through which ids count."""
    groups = truth(name)["optim"]["param_groups"]
    return {"param_names": [fqn for group in groups for fqn in group["params"]]}


def shapes(name: str) -> dict[str, Any]:
    """Shapes of all parameters in the order of the model."""
    return {"param_shapes": {fqn: tuple(tensor.shape) for fqn, tensor in truth(name)["model"].items() if tensor.ndim}}


def flat_shapes(name: str) -> dict[str, Any]:
    """Shapes of the parameters inside flat ones, in the order in which they are registered."""
    flat = keymap(name)["raw_optimizer_flat_params"]
    return {"param_shapes": {fqn: shape for one in flat.values() for fqn, shape in one["params"]}}


EVERY_DTYPE = requires(HAS_E8M0, "lacks a dtype of this sample")
MODEL_ONLY = {"optim": False, "groups": False}
OPTIM_ONLY = {"model": False, "groups": False}
CASES = [
    Case("accel_ddp_w2", hints=ids),
    Case("accel_fsdp2_w2"),
    Case("dcp_ddp_w2", "ckpt/dcp_raw", ids),
    Case("dcp_ddp_w2", "ckpt/dcp_fqn"),
    Case("dcp_ddp_w2", "ckpt/classic.pt", ids),
    Case("dcp_ddp_w2", "ckpt/classic_legacy.pt", ids),
    Case("dcp_fsdp2_1d_w4"),
    Case("dcp_fsdp2_tp_2x2"),
    Case("dcp_misc_single", **MODEL_ONLY),
    Case("dcp_pp2", "ckpt/dcp_flat"),
    Case("dcp_pp2", "ckpt/dcp_unflat_trap", **OPTIM_ONLY),
    Case("dcp_pp2", "ckpt", lambda name: {"param_names": keymap(name)["stage_optimizer_ids"]}),
    Case("dcp_sharded_tensor_w2", **MODEL_ONLY),
    Case("dcp_tied_w2"),
    *(
        Case("dcp_writer_variants_w2", f"ckpt/{variant}", **MODEL_ONLY)
        for variant in ("file_per_item", "threads3", "lowest_rank", "no_flatten_planner", "safetensors_fmt")
    ),
    *(Case("dcp_writer_variants_w2", f"ckpt/{variant}") for variant in ("no_collectives", "async")),
    Case("dcp_zstd_w2", **MODEL_ONLY),
    Case("ds_pipe2_w2", hints=lambda name: {"names": keymap(name)}, groups=False),
    Case("ds_z0_w2", hints=group_order),
    Case("ds_z1_w2"),
    Case("ds_z1_w2", "ckpt_universal"),
    Case("ds_z3_w2"),
    Case("ds_z3_w2", "ckpt_universal"),
    Case("fsdp1_flat_w2", "ckpt/sharded_dcp"),
    Case("fsdp1_flat_w2", "ckpt/full.pt"),
    Case("fsdp1_flat_w2", "ckpt/local_model_*.pt", flat_shapes, **MODEL_ONLY),
    Case("fsdp1_flat_w2", "ckpt/local_optim_*.pt", **OPTIM_ONLY),
    Case(
        "fsdp1_flat_w2",
        "ckpt/raw_optim_*.pt",
        lambda name: {"flat_params": keymap(name)["raw_optimizer_flat_params"]},
        **OPTIM_ONLY,
    ),
    Case("fsdp1_orig_w2", "ckpt/sharded_dcp"),
    Case("fsdp1_orig_w2", "ckpt/get_state_dict_dcp"),
    Case("fsdp1_orig_w2", "ckpt/full.pt"),
    Case("fsdp1_orig_w2", "ckpt/local_model_*.pt", shapes, **MODEL_ONLY),
    Case("fsdp1_orig_w2", "ckpt/local_optim_*.pt", model=False),
    Case("fsdp1_orig_w2", "ckpt/raw_optim_*.pt", lambda name: {**ids(name), **shapes(name)}, model=False),
    *(
        Case("hf_dcp_writer_2x2", f"ckpt/{variant}", **MODEL_ONLY)
        for variant in ("sharded_1file", "sharded_2files", "consolidated", "rank0_full")
    ),
    *(
        Case(f"hf_{family}", **MODEL_ONLY)
        for family in ("deepseek_v3", "gpt2", "llama", "llama_tied", "mixtral", "qwen2")
    ),
    Case("light_fsdp_w2", "ckpt/last.ckpt", groups=False),
    *(
        Case(f"mcore_{kind}", groups=False)
        for kind in ("tp1", "moe_ep2", "tp2_pp2", "tp2_dp2_dpreshardable", "legacy_tp2_pp2")
    ),
    *(Case("pt_containers", f"ckpt/{file}", ids) for file in ("zip.pt", "legacy.pt")),
    *(
        Case("pt_containers", f"ckpt/{file}", **MODEL_ONLY)
        for file in ("zip_align4096.pt", "zip_nocrc.pt", "model.safetensors")
    ),
    Case("pt_dtensor_2x2", hints=group_order),
    Case("tckpt_fsdp2_w2", groups=False),
    Case("titan_llama_fsdp4", "ckpt/checkpoint/step-2", groups=False),
    Case("titan_qwen3moe_fsdp2_ep2", "ckpt/checkpoint/step-2", groups=False),
]


def _open(case: Case) -> checkpoint.Checkpoint:
    return checkpoint.open(str(sample(case.sample) / case.path))


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=EVERY_DTYPE if case.sample == "dcp_misc_single" else ()) for case in CASES],
    ids=str,
)
def test_normalized_equals_the_truth(case: Case) -> None:
    hints = case.hints(case.sample) if case.hints is not None else None
    found = _open(case).normalized(hints)
    assert not differences(found, truth(case.sample), model=case.model, optim=case.optim, groups=case.groups)


@pytest.mark.parametrize("case", [case for case in CASES if case.hints and "names" not in str(case)], ids=str)
def test_a_missing_hint_is_asked_for_by_name(case: Case) -> None:
    """Without its hint, a checkpoint that needs one says which; a pipeline module alone keeps names of its own."""
    opened = _open(case)
    assert case.hints is not None
    if "names" in case.hints(case.sample):
        assert "1.attention.wq.weight" in opened.normalized()["model"]
        return
    with pytest.raises(NormalizationError, match=r"normalized\(hints=\{'(param_names|param_shapes|flat_params)'"):
        opened.normalized()


def test_lists_of_one_rank_only_are_told() -> None:
    """Stages of a pipeline overwrite each other's lists of parameters in DCP: said, and mended by a hint."""
    opened = _open(Case("dcp_pp2", "ckpt/dcp_unflat_trap"))
    found = opened.normalized()
    assert "no param group" in found.notes[0]
    wanted = truth("dcp_pp2")
    lists = [group["params"] for group in wanted["optim"]["param_groups"]]
    mended = opened.normalized({"param_groups": lists})
    assert not mended.notes
    assert not differences(mended, wanted, model=False, optim=True, groups=True)


def test_hugging_face_names_can_stay_as_on_disk() -> None:
    found = _open(Case("hf_mixtral")).normalized({"stored_names": True})["model"]
    assert set(truth("hf_mixtral")["disk"]) <= set(found)
    assert found["model.layers.0.block_sparse_moe.experts.0.w2.weight"].shape == (24, 56)


def test_fused_states_are_split_like_the_weights_if_the_heads_are_known() -> None:
    """torchtitan splits a fused wqkv in the model's part only."""
    opened = _open(Case("titan_qwen3moe_fsdp2_ep2", "ckpt/checkpoint/step-2"))
    states = truth("titan_qwen3moe_fsdp2_ep2")["optim"]["state"]
    wanted = states["layers.0.attention.qkv_linear.wqkv.weight"]["exp_avg"]
    for hints in ({"head_dim": 8}, {"kv_heads": 2}):
        found = opened.normalized(hints)
        state = found["optim"]["state"]
        fused = wanted.view(2, 4, 8, 32)  # heads of keys, then the rows of 2 queries, a key and a value
        name = "layers.0.attention.qkv_linear.{}.weight"
        assert state[name.format("wq")]["exp_avg"][...].equal(fused[:, :2].reshape(32, 32))
        assert state[name.format("wk")]["exp_avg"][...].equal(fused[:, 2].reshape(16, 32))
        assert state[name.format("wv")]["exp_avg"][3:9].equal(fused[:, 3].reshape(16, 32)[3:9])
        assert name.format("wq") in {p for group in found["optim"]["param_groups"] for p in group["params"]}


def test_a_local_model_tells_which_flat_parameter_an_id_is(tmp_path: Path) -> None:
    """Together with the model, the optimizer's flat parameters need no more than the shapes."""
    for name in ("local_model_0.pt", "local_model_1.pt", "raw_optim_0.pt", "raw_optim_1.pt"):
        shutil.copy(sample("fsdp1_flat_w2/ckpt") / name, tmp_path / name)
    found = checkpoint.open(tmp_path).normalized(flat_shapes("fsdp1_flat_w2"))
    assert not differences(found, truth("fsdp1_flat_w2"), model=True, optim=True, groups=False)
    (tmp_path / "raw_optim_1.pt").unlink()
    with pytest.raises(CorruptCheckpointError, match="file of rank 1 is missing"):
        checkpoint.open(tmp_path)


def test_megatron_without_the_settings_that_it_says_to_have(tmp_path: Path) -> None:
    shutil.copytree(sample("mcore_tp2_dp2_dpreshardable/ckpt"), tmp_path / "ckpt")
    (tmp_path / "ckpt" / "iter_0000002" / "common.pt").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"common\.pt is missing"):
        checkpoint.open(tmp_path / "ckpt")
