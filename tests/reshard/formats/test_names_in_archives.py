"""`torch.save` names the folder in its archive by the file, so a file in the place of another rank's is seen."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import reshard
from reshard.errors import CorruptCheckpointError, FormatError
from tests.same import same
from tests.samples import sample

PAIRS = [
    ("ds_z3_w2/ckpt", "global_step2/zero_pp_rank_{}_mp_rank_00_optim_states.pt"),
    ("ds_z1_w2/ckpt", "global_step2/zero_pp_rank_{}_mp_rank_00_optim_states.pt"),
    ("pt_dtensor_2x2/ckpt", "optim_world_size_4_rank_{}.pt"),
    ("accel_ddp_w2/ckpt", "random_states_{}.pkl"),
]


def swap(folder: Path, one: str, other: str) -> None:
    """Each of two files gets the name of the other."""
    (folder / one).rename(folder / "between")
    (folder / other).rename(folder / one)
    (folder / "between").rename(folder / other)


@pytest.mark.parametrize(("name", "file"), PAIRS)
def test_files_of_two_ranks_are_swapped(name: str, file: str, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    shutil.copytree(sample(name), folder)
    assert reshard.verify(folder).ok
    one, other = (file.format(rank) for rank in (0, 1))
    swap(folder, one, other)

    with pytest.raises(CorruptCheckpointError, match=rf"{one}: torch\.save wrote it as {Path(other).stem}\.") as caught:
        reshard.open(folder)
    assert "rename it back" in str(caught.value)
    report = reshard.verify(folder)
    assert not report.ok
    assert all(any(f"{name}: torch.save" in str(line) for line in report.findings) for name in (one, other))


def test_files_of_two_stages_are_swapped(tmp_path: Path) -> None:
    for stage in range(2):
        torch.save({"model": {"layers.0.weight": torch.full((2, 2), stage)}}, tmp_path / f"stage_{stage}.pt")
    assert reshard.open(tmp_path).format == "pipeline_stages"
    swap(tmp_path, "stage_0.pt", "stage_1.pt")

    with pytest.raises(CorruptCheckpointError, match=r"stage_0\.pt: torch\.save wrote it as stage_1\."):
        reshard.open(tmp_path)


def test_files_of_two_states_are_swapped(tmp_path: Path) -> None:
    """In DeepSpeed's universal checkpoints, a parameter has a file for each of its states, all of one shape."""
    parameter = tmp_path / "global_step1_universal" / "zero" / "w"
    parameter.mkdir(parents=True)
    for number, state in enumerate(("fp32", "exp_avg", "exp_avg_sq")):
        torch.save({"param": torch.full((2, 2), float(number)), "cat_dim": 0}, parameter / f"{state}.pt")
    model = {"module": {"w": torch.zeros(2, 2)}, "param_shapes": [{"w": torch.Size([2, 2])}]}
    torch.save(model, parameter.parents[1] / "mp_rank_00_model_states.pt")
    (tmp_path / "latest_universal").write_text("global_step1_universal")
    assert reshard.open(tmp_path).normalized()["optim"]["state"]["w"]["exp_avg"][...].eq(1).all()
    swap(parameter, "exp_avg.pt", "exp_avg_sq.pt")

    with pytest.raises(CorruptCheckpointError, match=r"exp_avg\.pt: torch\.save wrote it as exp_avg_sq\."):
        reshard.open(tmp_path)
    assert not reshard.verify(tmp_path).ok


def test_files_that_convert_writes_are_swapped(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    reshard.save({"model": model, "optim": optimizer}, tmp_path / "saved")
    reshard.convert(tmp_path / "saved", tmp_path / "out", format="deepspeed")
    [folder] = (tmp_path / "out").glob("*/zero/weight")
    assert torch.load(folder / "exp_avg.pt")["param"].shape == (2, 2)
    swap(folder, "exp_avg.pt", "exp_avg_sq.pt")

    with pytest.raises(CorruptCheckpointError, match=r"exp_avg\.pt: torch\.save wrote it as exp_avg_sq\."):
        reshard.open(tmp_path / "out")


def test_the_only_file_may_have_any_name(tmp_path: Path) -> None:
    state = {"w": torch.arange(3.0)}
    torch.save(state, tmp_path / "step_1.pt")
    (tmp_path / "step_1.pt").rename(tmp_path / "step_2.pt")

    for path in (tmp_path / "step_2.pt", tmp_path):
        assert same({**reshard.open(path)}["w"][...], state["w"])


def test_files_that_are_only_called_as_if_of_ranks_may_have_any_name(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "lora_rank_8.pt")
    (tmp_path / "lora_rank_8.pt").rename(tmp_path / "lora_rank_16.pt")
    assert list(reshard.open(tmp_path / "lora_rank_16.pt")) == ["w"]

    for number in (1, 2):
        torch.save({"w": torch.ones(2)}, tmp_path / "epochs_0.pt")
        (tmp_path / "epochs").mkdir(exist_ok=True)
        (tmp_path / "epochs_0.pt").rename(tmp_path / "epochs" / f"epochs_{number}.pt")
    with pytest.raises(FormatError, match="open one by its path"):
        reshard.open(tmp_path / "epochs")


@pytest.mark.parametrize("now", ["optim_world_size_4_rank_00{}.pt", "optim_world_size_4_rank_{}.pth"])
def test_numbers_with_more_digits_and_other_suffixes_are_the_same_name(now: str, tmp_path: Path) -> None:
    for file in sample("pt_dtensor_2x2/ckpt").glob("optim_*"):
        shutil.copy(file, tmp_path / now.format(file.stem[-1]))

    assert reshard.verify(tmp_path).ok
