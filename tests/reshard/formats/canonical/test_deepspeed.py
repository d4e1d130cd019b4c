"""ZeRO's flat pieces, cut by its rules for several worlds, come back as parameters."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard import checkpoint
from reshard.api.verify import verify
from reshard.errors import CorruptCheckpointError, FormatError, NormalizationError
from tests.reshard.formats.writers import copy_saved_as
from tests.samples import sample, truth

SHAPES: list[dict[str, tuple[int, ...]]] = [
    {"embed.weight": (7, 5), "layers.0.w": (5, 3, 2), "head.weight": (7, 5)},
    {"layers.0.scale": (), "layers.0.bias": (5,), "norm.weight": (1,)},
]
FROZEN = {"frozen.weight": (3, 3)}
KINDS = ("fp32", "exp_avg", "exp_avg_sq")


def make(seed: int, extra: dict[str, tuple[int, ...]] | None = None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = {**SHAPES[0], **SHAPES[1], **(extra or {})}
    return {name: torch.randn(shape, generator=generator) for name, shape in names.items()}


def model_file(values: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, Any]:
    return {
        "module": {name: tensor.to(dtype) for name, tensor in values.items()},
        "param_shapes": [{name: torch.Size(shape) for name, shape in group.items()} for group in SHAPES],
        "buffer_names": ["count"],
        "shared_params": {},
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
    }


def settings() -> list[dict[str, Any]]:
    return [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1]}]


def save_stage12(
    root: Path, world: int, *, prefix: str = "", stripped: bool = True, dtype: torch.dtype, seed: int = 0
) -> Any:
    """Stages 1 and 2: groups in one row, padded to twice the world, one piece a rank."""
    values = {kind: make(seed + i, FROZEN if kind == "fp32" else None) for i, kind in enumerate(KINDS)}
    module = {**values["fp32"], "count": torch.tensor(9.0)}
    torch.save(model_file(module, dtype), root / "mp_rank_00_model_states.pt")
    for rank in range(world):
        flats: list[dict[str, torch.Tensor]] = []
        for group in SHAPES:
            rows = {}
            for kind in KINDS:
                row = torch.cat([values[kind][name].reshape(-1) for name in group])
                total = -(-len(row) // (2 * world)) * 2 * world
                piece = total // world
                padded = torch.cat([row, torch.zeros(total - len(row))])[rank * piece : (rank + 1) * piece]
                cut = max(min(piece, len(row) - rank * piece), 0) if kind == "fp32" and stripped else piece
                rows[kind] = padded[:cut].clone()
            flats.append(rows)
        state = {g: {"step": torch.tensor(4.0), **{k: f[k] for k in KINDS[1:]}} for g, f in enumerate(flats)}
        optim = {
            "zero_stage": 1,
            "partition_count": [world, world],
            "single_partition_of_fp32_groups": [f["fp32"] for f in flats],
            "base_optimizer_state": {"state": state, "param_groups": settings()},
        }
        torch.save({"optimizer_state_dict": optim}, root / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return values


def save_stage3(root: Path, world: int, sub_groups: list[list[str]]) -> Any:
    """Stage 3: every parameter cut by itself; slices of a sub-group of parameters in one row."""
    values = {kind: make(i, FROZEN if kind == "fp32" else None) for i, kind in enumerate(KINDS)}

    def part(tensor: torch.Tensor, rank: int) -> torch.Tensor:
        flat = tensor.reshape(-1)
        size = -(-len(flat) // world)
        return torch.cat([flat, torch.zeros(size * world - len(flat))])[rank * size : (rank + 1) * size].clone()

    for rank in range(world):
        model = model_file({**make(0), "count": torch.tensor(9.0)}, torch.float32)
        model["module"] = {n: torch.empty(0) if n != "count" else t for n, t in model["module"].items()}
        model["module"]["frozen.weight"] = torch.empty(0)
        model["frozen_param_shapes"] = {n: torch.Size(s) for n, s in FROZEN.items()}
        model["frozen_param_fragments"] = {n: part(values["fp32"][n], rank) for n in FROZEN}
        torch.save(model, root / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        rows = {k: [torch.cat([part(values[k][n], rank) for n in names]) for names in sub_groups] for k in KINDS}
        state = {g: {"step": torch.tensor(4.0), **{k: rows[k][g] for k in KINDS[1:]}} for g in range(len(sub_groups))}
        optim = {
            "zero_stage": 3,
            "partition_count": world,
            "fp32_flat_groups": rows["fp32"],
            "optimizer_state_dict": {"state": state, "param_groups": settings()},
        }
        torch.save({"optimizer_state_dict": optim}, root / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return values


def check(found: Any, values: Any) -> None:
    assert set(found["model"]) == {*values["fp32"], "count"}
    for name, tensor in values["fp32"].items():
        assert found["model"][name][...].equal(tensor), name
    for kind in KINDS[1:]:
        for name, tensor in values[kind].items():
            lazy = found["optim"]["state"][name][kind]
            assert lazy[...].equal(tensor), (name, kind)
            if tensor.ndim > 1:
                assert lazy[1:, ::2].equal(tensor[1:, ::2])
    assert all(states["step"][...] == 4 for states in found["optim"]["state"].values())
    assert found["optim"]["param_groups"] == [
        {"lr": 0.1, "params": list(SHAPES[0])},
        {"lr": 0.2, "params": list(SHAPES[1])},
    ]


@pytest.mark.parametrize("stripped", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_even_pieces_of_groups(tmp_path: Path, world: int, stripped: bool) -> None:
    """Older versions say no more than the shapes; the last pieces may be short, or be padding altogether."""
    values = save_stage12(tmp_path, world, stripped=stripped, dtype=torch.float32)
    check(checkpoint.open(tmp_path).normalized(), values)


def test_masters_stand_for_weights_of_lower_precision(tmp_path: Path) -> None:
    values = save_stage12(tmp_path, 2, prefix="bf16_", dtype=torch.bfloat16)
    opened = checkpoint.open(tmp_path)
    found = opened.normalized()
    assert found["model"]["frozen.weight"].dtype == torch.bfloat16  # it has no master
    values["fp32"]["frozen.weight"] = values["fp32"]["frozen.weight"].bfloat16()
    check(found, values)
    assert opened["mp_rank_00_model_states.module.embed.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("sub_groups", [[3, 3], [1, 2, 1, 2], [1, 1, 1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_slices_of_every_parameter(tmp_path: Path, world: int, sub_groups: list[int]) -> None:
    names = [name for group in SHAPES for name in group]
    values = save_stage3(tmp_path, world, [[names.pop(0) for _ in range(n)] for n in sub_groups])
    check(checkpoint.open(tmp_path).normalized(), values)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_missing_rank(tmp_path: Path, stage: int) -> None:
    if stage == 1:
        save_stage12(tmp_path, 3, dtype=torch.float32)
    else:
        save_stage3(tmp_path, 3, [list(group) for group in SHAPES])
    (tmp_path / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CorruptCheckpointError, match="3 data parallel ranks"):
        checkpoint.open(tmp_path).normalized()
    assert "zero_pp_rank_2_mp_rank_00_optim_states.pt is missing" in str(verify(tmp_path))
    assert not verify(tmp_path).ok  # the other files say of how many ranks they are
    (tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    assert "zero_pp_rank_0_mp_rank_00_optim_states.pt is missing" in str(verify(tmp_path))
    assert not verify(tmp_path).ok
    with pytest.raises(CorruptCheckpointError, match=r"zero_pp_rank_0_mp_rank_00_optim_states\.pt is missing"):
        checkpoint.open(tmp_path).normalized()


@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("frozen", [True, False])
def test_the_model_file_of_a_rank_of_stage_3_is_missing(tmp_path: Path, frozen: bool, rank: int) -> None:
    """It holds a part of frozen parameters; else nothing that others do not, which is told all the same."""
    world = 4
    values = save_stage3(tmp_path, world, [list(group) for group in SHAPES])
    if not frozen:
        for file in tmp_path.glob("*model_states.pt"):
            model = torch.load(file, weights_only=False)
            del model["module"]["frozen.weight"], model["frozen_param_shapes"], model["frozen_param_fragments"]
            torch.save(model, file)
        del values["fp32"]["frozen.weight"]
    name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
    assert checkpoint.open(tmp_path).warnings == ()
    (tmp_path / name).unlink()

    opened = checkpoint.open(tmp_path)

    assert opened.warnings == (f"{name} is missing: other files of this checkpoint show that it was saved",)
    if frozen:
        with pytest.raises(CorruptCheckpointError, match=f"{name} is missing, which holds a part of .*frozen.weight"):
            opened.normalized()
    else:
        check(opened.normalized(), values)


def test_stage_3_without_its_optimizer(tmp_path: Path) -> None:
    save_stage3(tmp_path, 2, [list(group) for group in SHAPES])
    for file in tmp_path.glob("*optim_states.pt"):
        file.unlink()
    with pytest.raises(CorruptCheckpointError, match=r"keeps 'embed\.weight' in the files of optimizer states"):
        checkpoint.open(tmp_path).normalized()


def test_weights_alone(tmp_path: Path) -> None:
    """Without the optimizer's files, stages 0 to 2 have their weights still."""
    values = make(0)
    (tmp_path / "latest").write_text("step_1\n")
    (tmp_path / "step_1").mkdir()
    torch.save(model_file(values, torch.float16), tmp_path / "step_1" / "mp_rank_00_model_states.pt")
    found = checkpoint.open(tmp_path).normalized()
    assert all(found["model"][name][...].equal(tensor.half()) for name, tensor in values.items())
    assert found["optim"] == {"state": {}, "param_groups": []}
    (tmp_path / "latest").write_text("step_2")
    with pytest.raises(CorruptCheckpointError, match="names 'step_2'"):
        checkpoint.open(tmp_path)


def test_tensor_parallel_ranks_are_joined(tmp_path: Path) -> None:
    """Two tensor parallel ranks of three data parallel ones each; where names say nothing, the hint does."""
    values = []
    for tp in range(2):
        (tmp_path / f"{tp}").mkdir()
        values.append(save_stage12(tmp_path / f"{tp}", 3, dtype=torch.float16, seed=10 * tp))
        for file in (tmp_path / f"{tp}").iterdir():
            copy_saved_as(file, tmp_path / file.name.replace("mp_rank_00", f"mp_rank_{tp:02d}"))
            file.unlink()
    opened = checkpoint.open(tmp_path)
    with pytest.raises(NormalizationError, match=r"over 2 ranks shards '.*', and its name is not known.*tp_dims"):
        opened.normalized()

    dims = {"embed.weight": 0, "head.weight": 1, "layers.0.w": 2}
    found = opened.normalized(hints={"tp_dims": {**dims, "*": None}})

    for kind, of in (("fp32", found["model"]), *((k, found["optim"]["state"]) for k in KINDS[1:])):
        for name in (*SHAPES[0], *SHAPES[1]):
            tensor = of[name] if kind == "fp32" else of[name][kind]
            pieces = [value[kind][name] for value in values]
            assert torch.equal(tensor[...], torch.cat(pieces, dims[name]) if name in dims else pieces[0])
    assert found["optim"]["state"]["embed.weight"]["step"][...].item() == 4
    assert [group["params"] for group in found["optim"]["param_groups"]] == [list(group) for group in SHAPES]
    (tmp_path / "mp_rank_01_model_states.pt").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"mp_rank_01_model_states.pt is missing"):
        checkpoint.open(tmp_path).normalized(hints={"tp_dims": {"*": None}})


def test_copies_on_tensor_parallel_ranks_are_compared(tmp_path: Path) -> None:
    """A norm is the same on all ranks by its name; where it is not, the rest of it must not be lost."""
    for rank in range(2):
        module = {"norm.weight": torch.full((4,), float(rank)), "final_norm.weight": torch.ones(4)}
        torch.save({"module": module}, tmp_path / f"mp_rank_{rank:02d}_model_states.pt")
    model = checkpoint.open(tmp_path).normalized()["model"]
    assert torch.equal(model["final_norm.weight"][...], torch.ones(4))
    with pytest.raises(NormalizationError, match=r"copies of 'norm.weight'.*mp_rank_00.*mp_rank_01.*differ.*tp_dims"):
        model["norm.weight"][...]


def test_tensor_parallel_pipelines_are_refused(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save(model_file(make(0), torch.float32), tmp_path / f"mp_rank_{rank:02d}_model_states.pt")
        torch.save({"w": torch.ones(2)}, tmp_path / f"layer_00-model_{rank:02d}-model_states.pt")
    with pytest.raises(FormatError, match="ds_to_universal"):
        checkpoint.open(tmp_path).normalized()


def test_tied_parameters(tmp_path: Path) -> None:
    values = save_stage12(tmp_path, 2, dtype=torch.float32)
    path = tmp_path / "mp_rank_00_model_states.pt"
    file = torch.load(path, weights_only=False)
    file["shared_params"] = {"tied.weight": "embed.weight"}
    torch.save(file, path)
    found = checkpoint.open(tmp_path).normalized()
    assert found["model"]["tied.weight"][...].equal(values["fp32"]["embed.weight"])


def test_every_prefix_of_a_file_is_refused_clearly(tmp_path: Path) -> None:
    save_stage12(tmp_path, 1, dtype=torch.float32)
    path = tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    data = path.read_bytes()
    for length in (*range(0, 200, 13), *range(200, len(data), math.ceil(len(data) / 40))):
        path.write_bytes(data[:length])
        with pytest.raises((CorruptCheckpointError, FormatError), match="zero_pp_rank_0"):
            checkpoint.open(tmp_path).normalized()


def test_universal_checkpoints_of_tensor_parallel_models(tmp_path: Path) -> None:
    """They hold whole parameters, whatever the shapes in the ranks' files say; a hint cuts a padded vocabulary."""
    whole = torch.randn(8, 4)
    folder = tmp_path / "tag_universal"
    (folder / "zero" / "embed.weight").mkdir(parents=True)
    for state in KINDS:
        entry = {"param": whole, "cat_dim": 0, "vocab_tensor": True}
        torch.save(entry, folder / "zero" / "embed.weight" / f"{state}.pt")
    for rank in range(2):
        model = {"module": {"embed.weight": whole[:4]}, "param_shapes": [{"embed.weight": torch.Size([4, 4])}]}
        torch.save(model, folder / f"mp_rank_{rank:02d}_model_states.pt")
    torch.save({"param_groups": [{"lr": 0.1, "params": [0]}]}, folder / "zero" / "optimizer_state.pt")
    (tmp_path / "latest_universal").write_text("tag_universal")
    found = checkpoint.open(tmp_path).normalized()
    assert found["model"]["embed.weight"][...].equal(whole)
    assert found["optim"]["param_groups"] == [{"lr": 0.1, "params": ["embed.weight"]}]
    found = checkpoint.open(tmp_path).normalized({"vocab_size": 6})
    assert found["optim"]["state"]["embed.weight"]["exp_avg"][...].equal(whole[:6])


@pytest.mark.parametrize("state", ["fp32", "exp_avg"])
def test_a_universal_checkpoint_without_one_state_of_one_parameter(tmp_path: Path, state: str) -> None:
    """The module's 16-bit copy does not take the place of a master that was lost; a frozen parameter has no states."""
    folder = tmp_path / "tag_universal"
    weights = {"a": torch.randn(3), "b": torch.randn(2), "frozen": torch.randn(1)}
    for name in ("a", "b"):
        (folder / "zero" / name).mkdir(parents=True)
        for kind in KINDS:
            torch.save({"param": weights[name], "cat_dim": 0}, folder / "zero" / name / f"{kind}.pt")
    shapes = {name: weights[name].shape for name in ("a", "b")}
    torch.save({"module": weights, "param_shapes": [shapes]}, folder / "mp_rank_00_model_states.pt")
    (tmp_path / "latest_universal").write_text("tag_universal")
    found = checkpoint.open(tmp_path).normalized()
    assert set(found["model"]) == {"a", "b", "frozen"}
    assert set(found["optim"]["state"]) == {"a", "b"}
    (folder / "zero" / "b" / f"{state}.pt").unlink()
    assert f"zero/b/{state}.pt is missing" in str(verify(tmp_path))
    assert f"zero/b/{state}.pt is missing" in checkpoint.open(tmp_path).warnings[0]
    with pytest.raises(CorruptCheckpointError, match=f"zero/b/{state}.pt is missing"):
        checkpoint.open(tmp_path).normalized()


def test_what_deepspeed_saved_of_a_tensor_parallel_model() -> None:
    """Version 0.19.8, two tensor parallel times two data parallel ranks, ZeRO-1; names say how parameters were cut."""
    wanted = truth("ds_tp2_dp2")
    found = checkpoint.open(sample("ds_tp2_dp2/ckpt")).normalized()
    assert set(found["model"]) == set(found["optim"]["state"]) == set(wanted)
    for name, value in wanted.items():
        assert torch.equal(found["model"][name][...], value.bfloat16().float())
        assert found["optim"]["state"][name]["exp_avg"].shape == value.shape


@pytest.mark.parametrize("file", ["layer_00-model_states", "layer_05-model_states", "mp_rank_01_model_states"])
def test_a_file_of_a_pipeline_is_missing(tmp_path: Path, file: str) -> None:
    """Stages name the parameters of their layers, and say how many stages there are."""
    copy = shutil.copytree(sample("ds_pipe2_w2/ckpt"), tmp_path / "copy")
    assert verify(copy).ok
    (copy / "global_step2" / f"{file}.pt").unlink()

    assert f"global_step2/{file}.pt is missing" in str(verify(copy))
