"""Folders as frameworks leave them that are not among our dependencies: what is opened, and what is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import reshard
from reshard.errors import CorruptCheckpointError, FormatError, NormalizationError
from reshard.formats.canonical import Hints, StoredOptimizer, name_ids
from tests.same import assert_same
from tests.torch_releases import save_alone

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

W = {"layers.0.w": torch.arange(12.0).reshape(3, 4), "head.w": torch.arange(5.0)}
STATES = {name: {"step": torch.tensor(3.0), "exp_avg": tensor + 1} for name, tensor in W.items()}
OPTIMIZER = {"state": STATES, "param_groups": [{"lr": 0.5, "params": list(W)}]}


def dcp(path: Path, state: dict[str, Any]) -> None:
    save_alone(state, checkpoint_id=path)


def check(path: Path) -> None:
    """That the weights and the optimizer are there under canonical names."""
    found = reshard.open(path).normalized()
    assert_same({name: found["model"][name][...] for name in sorted(found["model"])}, dict(sorted(W.items())))
    states = found["optim"]["state"]
    assert sorted(states) == sorted(W)
    for name in W:
        assert_same({key: value[...] for key, value in states[name].items()}, STATES[name])
    assert [group["lr"] for group in found["optim"]["param_groups"]] == [0.5]


@pytest.mark.parametrize("inside", ["", "optim"], ids=["as it is", "beside its schedule"])
@pytest.mark.parametrize("folder", ["optimizer", "optim"])
def test_model_and_optimizer_that_are_two_checkpoints_of_dcp(folder: str, inside: str, tmp_path: Path) -> None:
    """LLaMA-Factory's, NeMo Automodel's and others."""
    step = tmp_path / "checkpoint-10"
    dcp(step / "model", W)
    dcp(step / folder, {"optim": OPTIMIZER, "sched": {"last_epoch": 2}} if inside else OPTIMIZER)
    torch.save({"last_epoch": 2}, step / "scheduler.pt")

    check(step)
    check(tmp_path)  # the run
    assert reshard.open(step).objects["scheduler.last_epoch"] == 2
    reshard.convert(step, tmp_path / "ours")
    check(tmp_path / "ours")


def test_an_optimizer_beside_its_schedule(tmp_path: Path) -> None:
    """NeMo-RL's policy/optimizer."""
    dcp(tmp_path, {"optim": {"optim": OPTIMIZER, "sched": {"last_epoch": 2, "base_lrs": [0.5]}}})
    states = reshard.open(tmp_path).normalized()["optim"]["state"]
    assert sorted(states) == sorted(W)


def test_optimizers_of_pipeline_stages_in_one_dict(tmp_path: Path) -> None:
    """NeMo Automodel's, of adapters with experts or a quantized base: each stage's has ids from 0."""
    names = [f"layers.{stage}.w" for stage in range(12)]
    dcp(tmp_path / "model", {name: torch.ones(2) for name in names})
    parts = {
        f"stage_{number}": {
            "state": {0: {"exp_avg": torch.full((2,), float(number)), "step": torch.tensor(1.0)}},
            "param_groups": [{"lr": 0.5, "params": [0]}],
        }
        for number in range(12)
    }
    dcp(tmp_path / "optim", {"optim": {"optimizer_parts": parts}, "sched": {"last_epoch": 2}})

    found = reshard.open(tmp_path)

    with pytest.raises(NormalizationError, match=r"optimizer 0 of .* only by integer ids.*'param_names': \{0: \["):
        found.normalized()
    with pytest.raises(NormalizationError, match=r"several optimizers, stages.* give \{0: \[names\], 1: "):
        found.normalized({"param_names": names})
    optimizer = found.normalized({"param_names": {number: [name] for number, name in enumerate(names)}})["optim"]
    assert {name: state["exp_avg"][0].item() for name, state in optimizer["state"].items()} == {
        name: number for number, name in enumerate(names)
    }
    assert [group["params"] for group in optimizer["param_groups"]] == [[name] for name in names]


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_an_optimizer_for_each_parameter_by_its_name(kind: str, tmp_path: Path) -> None:
    """torchtune's, which step during the backward pass: in a file of torch's, and by DCP."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    cls = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[kind]
    optimizers = {
        name: cls([parameter], lr=0.5 if name.endswith("bias") else 0.25)
        for name, parameter in model.named_parameters()
    }
    model(torch.ones(3)).sum().backward()
    for optimizer in optimizers.values():
        optimizer.step()
    saved = {name: optimizer.state_dict() for name, optimizer in optimizers.items()}
    torch.save(saved, tmp_path / "recipe_optim.pt")
    torch.save({"model": model.state_dict(), "optimizer": saved, "epochs_run": 1}, tmp_path / "recipe_state.pt")
    dcp(tmp_path / "dcp", {"model": model.state_dict(), "optimizer": saved})

    for path in ("recipe_optim.pt", "recipe_state.pt", "dcp"):
        found = reshard.open(tmp_path / path).normalized()["optim"]

        groups = {group["lr"]: sorted(group["params"]) for group in found["param_groups"]}
        assert groups == {0.25: ["0.weight", "1.weight"], 0.5: ["0.bias", "1.bias"]}
        states = {name: one["state"][0] for name, one in saved.items() if kind == "adamw"}
        assert sorted(found.get("state", {})) == sorted(states)
        for name, state in states.items():
            assert_same({key: value[...] for key, value in found["state"][name].items()}, state)


def test_a_model_alone_in_a_folder_below_is_named(tmp_path: Path) -> None:
    dcp(tmp_path / "model", W)
    with pytest.raises(FormatError, match="Its subfolder 'model' seems to be a checkpoint: open that"):
        reshard.open(tmp_path)


@pytest.mark.parametrize("name", ["global_step_{}", "global_step{}", "step{}", "step_{}", "epoch_1_step_{}"])
def test_steps_by_the_names_of_verl_veomni_olmo_and_automodel(name: str, tmp_path: Path) -> None:
    for step in (9, 100):
        dcp(tmp_path / name.format(step), {"w": torch.full((2,), float(step))})
    assert [step.step for step in reshard.steps(tmp_path)] == [9, 100]
    assert reshard.open(tmp_path)["w"][...].tolist() == [100, 100]


def test_the_file_of_the_latest_step_that_verl_calls_like_megatron(tmp_path: Path) -> None:
    for step in (9, 100):
        actor = tmp_path / f"global_step_{step}" / "actor"
        actor.mkdir(parents=True)
        torch.save({"w": torch.full((2,), float(step))}, actor / "model_world_size_1_rank_0.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    with pytest.raises(
        FormatError, match=r"can be opened:\n  global_step_100.* subfolder 'actor' seems to be a checkpoint: open that"
    ):
        reshard.open(tmp_path)
    assert reshard.open(tmp_path / "global_step_100" / "actor")["model.w"][...].tolist() == [100, 100]


def test_pieces_of_fsdp1_are_not_taken_for_states_that_only_lack_names(tmp_path: Path) -> None:
    """Verl saves what FSDP1's optimizer holds on each rank: with `use_orig_params`, 1-D pieces of each parameter."""
    for rank in range(2):
        torch.save(W, tmp_path / f"model_world_size_2_rank_{rank}.pt")
        pieces = {"step": torch.tensor(1.0), "exp_avg": torch.full((3 - rank,), float(rank))}
        optimizer = {"state": {0: pieces}, "param_groups": [{"lr": 0.5, "params": [0]}]}
        torch.save(optimizer, tmp_path / f"optim_world_size_2_rank_{rank}.pt")
    saved = reshard.open(tmp_path)

    for hints in ({}, {"param_names": ["w"]}):
        with pytest.raises(NormalizationError, match=r"1-D pieces of FSDP1.*FSDP\.optim_state_dict.*the model alone"):
            saved.canonical(hints=hints)
    reshard.convert(tmp_path, tmp_path / "model", model_only=True)
    assert [*reshard.open(tmp_path / "model")] == [*W]


def test_an_index_of_the_ids_of_an_optimizer(tmp_path: Path) -> None:
    """ColossalAI lists the parameters' ids, and each file holds a dict of their states; some states are numbers."""
    states = {number: {"step": number, "exp_avg": STATES[name]["exp_avg"]} for number, name in enumerate(W)}
    for number, state in states.items():
        torch.save({number: state}, tmp_path / f"pytorch_optim-0000{number}.bin")
    index = {"metadata": {}, "weight_map": {str(n): f"pytorch_optim-0000{n}.bin" for n in states}}
    (tmp_path / "pytorch_optim.bin.index.json").write_text(json.dumps(index))

    found = reshard.open(tmp_path)

    assert [found[f"{n}.exp_avg"][...].tolist() for n in states] == [states[n]["exp_avg"].tolist() for n in states]
    assert [found.objects[f"{n}.step"] for n in states] == [0, 1]


def test_the_states_of_an_optimizer_are_no_model(tmp_path: Path) -> None:
    torch.save({number: dict(state) for number, state in enumerate(STATES.values())}, tmp_path / "states.bin")
    found = reshard.open(tmp_path)
    with pytest.raises(NormalizationError, match="only by integer ids"):
        found.normalized()
    assert sorted(found.normalized({"param_names": list(W)})["optim"]["state"]) == sorted(W)


def test_one_folder_of_model_and_optimizer_in_a_step(tmp_path: Path) -> None:
    """OLMo-core's."""
    dcp(tmp_path / "step10" / "model_and_optim", {"model": W, "optim": OPTIMIZER})
    (tmp_path / "step10" / "train").mkdir()
    torch.save({"x": 1}, tmp_path / "step10" / "train" / "rank0.pt")
    check(tmp_path)
    assert reshard.open(tmp_path).warnings == ("not opened: train/rank0.pt",)


def test_weights_and_optimizer_of_a_policy(tmp_path: Path) -> None:
    """NeMo-RL's."""
    dcp(tmp_path / "step_10" / "policy" / "weights", {"model": W})
    dcp(tmp_path / "step_10" / "policy" / "optimizer", {"optim": {"optim": OPTIMIZER, "sched": {"last_epoch": 2}}})
    torch.save({"epoch": 1}, tmp_path / "step_10" / "train_dataloader.pt")
    check(tmp_path / "step_10" / "policy")
    for path in (tmp_path, tmp_path / "step_10"):  # also where that file has tensors, such as a random state
        with pytest.raises(FormatError, match=r"file of torch.save, train_dataloader.pt, and .* policy/optimizer"):
            reshard.open(path)
    assert reshard.open(tmp_path / "step_10" / "train_dataloader.pt").objects == {"epoch": 1}


def test_files_that_are_none_of_the_trainer_s_are_named(tmp_path: Path) -> None:
    """The value head of LLaMA-Factory's reward models."""
    save_file(W, tmp_path / "model.safetensors")
    save_file({"v_head.summary.weight": torch.zeros(1, 4)}, tmp_path / "value_head.safetensors")
    torch.save({"last_epoch": 2}, tmp_path / "scheduler.pt")
    assert reshard.open(tmp_path).warnings == ("not opened: value_head.safetensors",)


def test_numbered_files_that_count_from_zero(tmp_path: Path) -> None:
    """slime's converter."""
    for number, (name, tensor) in enumerate(W.items()):
        save_file({name: tensor}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    assert sorted(reshard.open(tmp_path)) == sorted(W)
    (tmp_path / "model-00001-of-00002.safetensors").rename(tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(CorruptCheckpointError, match="1 of 2 files are missing, the first is number 1"):
        reshard.open(tmp_path)


@pytest.mark.parametrize("kind", ["file", "dcp", "stages"])
def test_the_model_alone_needs_no_names_for_the_optimizer(kind: str, tmp_path: Path) -> None:
    """torchtune's, and any other file with `optimizer.state_dict()` beside the model."""
    optimizer = {"state": dict(enumerate(STATES.values())), "param_groups": [{"lr": 0.5, "params": [0, 1]}]}
    state = {"model": W, "optimizer": optimizer}
    if kind == "dcp":
        dcp(tmp_path / "in", state)
    else:
        (tmp_path / "in").mkdir()
        for stage in range(2 if kind == "stages" else 1):
            torch.save(state, tmp_path / "in" / f"stage_{stage}.pt")
    with pytest.raises(NormalizationError, match="only by integer ids"):
        reshard.open(tmp_path / "in").normalized()
    reshard.convert(tmp_path / "in", tmp_path / "out", format="huggingface", model_only=True)
    found = reshard.open(tmp_path / "out")
    assert {"head.w", "layers.0.w"} <= set(found)
    assert found["head.w"][...].equal(W["head.w"])


@pytest.mark.parametrize("missing", [0, 1])
def test_a_stage_whose_file_is_missing(tmp_path: Path, missing: int) -> None:
    for stage in {0, 1, 2} - {missing}:
        torch.save({"w": torch.ones(2)}, tmp_path / f"stage_{stage}.pt")
    there = f"stage_{1 - missing}"
    words = rf"the file of stage {missing} is missing; there is {there}\.pt, which opens by its path"
    with pytest.raises(CorruptCheckpointError, match=words):
        reshard.open(tmp_path)
    assert list(reshard.open(tmp_path / f"{there}.pt")) == ["w"]


def test_fp32_masters_of_deepspeed_belong_to_the_model() -> None:
    saved = StoredOptimizer({"0": {"fp32": torch.ones(2)}}, [{"params": [0]}])
    with pytest.raises(NormalizationError, match="only by integer ids"):
        name_ids(saved, Hints(None, model_only=True), None, "it")
