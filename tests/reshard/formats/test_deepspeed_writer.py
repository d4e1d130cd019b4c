"""Universal checkpoints as we write them: files and their contents as DeepSpeed's own, and all values read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.errors import FormatError, ReshardError
from tests.same import assert_same
from tests.samples import sample
from tests.states import trained


def values(path: Path) -> dict[str, Any]:
    """Everything under canonical names, in order of names."""
    found = reshard.open(path).normalized()
    states = {f"{fqn} {name}": v for fqn, of in found["optim"]["state"].items() for name, v in of.items()}
    read = {k: torch.as_tensor(v[...] if hasattr(v, "dtype") else v) for k, v in {**found["model"], **states}.items()}
    return {**{k: read[k] for k in sorted(read)}, "groups": found["optim"]["param_groups"]}


@pytest.mark.parametrize("name", ["ds_z1_w2/ckpt", "ds_z1_w2/ckpt_universal", "ds_z3_w2/ckpt", "ds_pipe2_w2/ckpt"])
def test_what_deepspeed_wrote_comes_back(name: str, tmp_path: Path) -> None:
    reshard.convert(sample(name), tmp_path / "ours", normalized=True)
    report = reshard.convert(tmp_path / "ours", tmp_path / "theirs", format="deepspeed")

    assert_same(values(tmp_path / "theirs"), values(sample(name)))
    assert not report.omitted
    if name == "ds_z1_w2/ckpt_universal":
        wanted, found = (next(path.glob("global_step2*")) for path in (sample(name), tmp_path / "theirs"))
        files = {str(file.relative_to(wanted)) for file in wanted.rglob("*.pt")}
        files -= {f"zero/{name}/fp32.pt" for name in ("tokens_seen", "norm.weight")}  # no optimizer has these
        assert files < {str(file.relative_to(found)) for file in found.rglob("*.pt")}
        for file in sorted(files):
            if file.endswith(("fp32.pt", "exp_avg.pt", "step.pt")):
                theirs, ours = (torch.load(folder / file, weights_only=True) for folder in (wanted, found))
                assert_same([ours], [theirs])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_program_of_torch_s_own(dtype: torch.dtype, tmp_path: Path) -> None:
    made = trained(dtype)
    reshard.save(made, tmp_path / "saved")
    hints = {"tp_dims": {"mlp.w*": 1}}
    reshard.convert(tmp_path / "saved", tmp_path / "theirs", format="deepspeed", hints=hints)

    assert (tmp_path / "theirs" / "latest_universal").read_text() == "global_step7_universal"
    folder = tmp_path / "theirs" / "global_step7_universal"
    heads = [
        torch.load(folder / f"{front}mp_rank_00_model_states.pt", weights_only=True)
        for front in ("", "zero_pp_rank_0_")
    ]
    assert set(heads[0]["module"]) == {"frozen.weight", "count"}
    assert not heads[1].pop("module")
    assert {key: value for key, value in heads[0].items() if key != "module"} == heads[1]
    assert heads[0]["param_shapes"] == [{"emb.weight": (5, 4), "mlp.weight": (4, 4)}, {"mlp.bias": (4,)}]
    assert heads[0]["shared_params"] == {"head.weight": "emb.weight"}
    assert (heads[0]["epoch"], heads[0]["schedule"], heads[0]["global_steps"]) == (3, {"last": 1}, 7)
    fp32 = torch.load(folder / "zero" / "mlp.weight" / "fp32.pt", weights_only=True)
    assert fp32["cat_dim"] == 1
    assert_same(fp32["param"], made["model"]["mlp.weight"].float())
    found, wanted = values(tmp_path / "theirs"), values(tmp_path / "saved")
    for name in ("emb.weight", "mlp.weight", "mlp.bias", "head.weight"):  # the masters are the model
        wanted[name] = wanted[name].float()
    assert_same(found, wanted)
    with pytest.raises(FormatError, match="already"):
        reshard.convert(tmp_path / "saved", tmp_path / "theirs", format="deepspeed")
    (folder / "zero" / "mlp.weight" / "old.pt").write_bytes(b"")
    reshard.convert(tmp_path / "saved", tmp_path / "theirs", format="deepspeed", overwrite=True)
    assert not (folder / "zero" / "mlp.weight" / "old.pt").exists()


def test_what_deepspeed_does_not_write_stays_in_the_folder_of_a_tag(tmp_path: Path) -> None:
    """Only files with names of DeepSpeed's are replaced."""
    reshard.save(trained(torch.float32), tmp_path / "saved")
    reshard.convert(tmp_path / "saved", tmp_path / "theirs", format="deepspeed")
    folder = tmp_path / "theirs" / "global_step7_universal"
    old = folder / "mp_rank_01_model_states.pt"
    kept = [folder / "notes.txt", folder / "eval" / "r.json", folder / "zero" / "scores.pt"]
    (folder / "eval").mkdir()
    for file in (*kept, old):
        file.write_bytes(b"mine")
    reshard.convert(tmp_path / "saved", tmp_path / "theirs", format="deepspeed", overwrite=True)

    assert [file.exists() for file in (*kept, old)] == [True] * 3 + [False]
    assert_same(values(tmp_path / "theirs")["mlp.weight"], values(tmp_path / "saved")["mlp.weight"])


def no_optimizer(made: dict[str, Any]) -> None:
    del made["optim"]


def lost_state(made: dict[str, Any]) -> None:
    del made["optim"]["state"]["mlp.weight"]["exp_avg_sq"]


def in_no_group(made: dict[str, Any]) -> None:
    made["optim"]["param_groups"][0]["params"].remove("mlp.weight")


def other_step(made: dict[str, Any]) -> None:
    made["optim"]["state"]["mlp.weight"]["step"] = torch.tensor(8.0)


def slash_in_a_frozen_name(made: dict[str, Any]) -> None:
    made["model"]["mlp/frozen"] = torch.ones(3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (no_optimizer, "needs optimizer states and param groups"),
        (lost_state, "'mlp.weight' has no exp_avg_sq"),
        (in_no_group, "no param group"),
        (other_step, "one step count"),
        (slash_in_a_frozen_name, "cannot be the name of a folder"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_the_format_cannot_hold(change: Any, words: str, tmp_path: Path) -> None:
    made = trained()
    change(made)
    reshard.save(made, tmp_path / "saved")
    with pytest.raises(FormatError, match=words):
        reshard.convert(tmp_path / "saved", tmp_path / "theirs", format="deepspeed")
    with pytest.raises(ReshardError):
        reshard.open(tmp_path / "theirs")


@pytest.mark.parametrize("format", ["deepspeed", "megatron"])
def test_states_that_are_no_tensors_or_of_no_parameter_are_written_or_named(format: Any, tmp_path: Path) -> None:
    made = trained()
    states = made["optim"]["state"]
    fused = {name: value.clone() for name, value in states["mlp.weight"].items()}
    states["mlp.fused"] = fused  # as torchtitan has it, whose parameter is saved in parts
    made["optim"]["param_groups"][0]["params"].append("mlp.fused")
    for state in states.values():
        state["note"] = 0.5
    reshard.save(made, tmp_path / "saved")

    report = reshard.convert(tmp_path / "saved", tmp_path / "theirs", format=format)

    found = reshard.open(tmp_path / "theirs").normalized()["optim"]["state"]
    there = {f"optim.state.{fqn}.{name}" for fqn, of in found.items() for name in of}
    wanted = {f"optim.state.{fqn}.{name}" for fqn, of in states.items() for name in of}
    assert wanted - there == {*report.omitted} & wanted
    assert {f"optim.state.{fqn}.note" for fqn in states} <= {*report.omitted}


def test_settings_of_an_optimizer_without_states_are_named_where_megatron_has_no_place(tmp_path: Path) -> None:
    made = trained()
    made["optim"]["state"] = {}
    reshard.save(made, tmp_path / "saved")
    report = reshard.convert(tmp_path / "saved", tmp_path / "theirs", format="megatron")
    assert "optim.param_groups.0.lr" in report.omitted
