"""What is written in Megatron's format: its keys, stacks, chunks and common state, and all values read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

import reshard
from reshard.errors import CheckpointExistsError, FormatError, ReshardError
from tests.same import assert_same
from tests.samples import sample

H, VOCAB = 8, 12


def model(layers: int = 2, experts: int = 0, dtype: torch.dtype = torch.float32, dense: int = 0) -> dict[str, Any]:
    """Parameters of a small model under canonical names; of its layers the first `dense` have no experts."""
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (VOCAB, H)}
    for layer in range(layers):
        front = f"decoder.layers.{layer}."
        shapes[f"{front}input_layernorm.weight"] = (H,)
        shapes[f"{front}self_attention.linear_qkv.weight"] = (2 * H, H)
        shapes[f"{front}self_attention.linear_proj.weight"] = (H, H)
        shapes[f"{front}pre_mlp_layernorm.weight"] = (H,)
        numbers = range(experts) if layer >= dense else ()
        for expert in (f"experts.local_experts.{e}." for e in numbers) if experts and layer >= dense else ("",):
            shapes[f"{front}mlp.{expert}linear_fc1.weight"] = (6, H)
            shapes[f"{front}mlp.{expert}linear_fc2.weight"] = (H, 3)
    shapes["decoder.final_layernorm.weight"] = (H,)
    shapes["output_layer.weight"] = (VOCAB, H)
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def trained(params: dict[str, torch.Tensor], **changes: Any) -> dict[str, Any]:
    """The state of a program that has one group for what decays and one for the rest."""
    state = {
        name: {"step": torch.tensor(7.0), "exp_avg": torch.randn(p.shape), "exp_avg_sq": torch.rand(p.shape)}
        for name, p in params.items()
    }
    split: dict[bool, list[str]] = {True: [], False: []}
    for name, p in params.items():
        split[p.ndim > 1].append(name)
    groups = [
        {"lr": 0.1, "weight_decay": 0.01 * decay, "betas": (0.9, 0.95), "params": names}
        for decay, names in split.items()
    ]
    return {"model": params, "optim": {"state": state, "param_groups": groups}, "epoch": 3, **changes}


def metadata(folder: Path) -> Any:
    return FileSystemReader(str(folder)).read_metadata()


def values(path: Path) -> dict[str, Any]:
    """All values of a checkpoint in order of their names, and settings; no masters that are the parameter itself."""
    found = reshard.open(path).normalized()
    out = {fqn: tensor[...] for fqn, tensor in sorted(found["model"].items())}
    for fqn, of in sorted(found["optim"]["state"].items()):
        for name, value in sorted(of.items()):
            tensor = torch.as_tensor(value[...] if hasattr(value, "dtype") else value)
            if name != "fp32_param" or out[fqn].dtype != tensor.dtype or not tensor.equal(out[fqn]):
                out[f"{fqn} {name}"] = tensor
    groups = found["optim"]["param_groups"]
    settings = [{k: v for k, v in group.items() if k not in ("params", "step")} for group in groups]
    return {**out, "groups": settings}


@pytest.mark.parametrize(
    "name", ["mcore_tp1", "mcore_tp2_pp2", "mcore_moe_ep2", "mcore_tp2_dp2_dpreshardable", "mcore_legacy_tp2_pp2"]
)
def test_what_megatron_wrote_comes_back(name: str, tmp_path: Path) -> None:
    """By way of our own format: all values, all settings, and what stood beside; keys and shapes are Megatron's own."""
    source = sample(name) / "ckpt"
    reshard.convert(source, tmp_path / "ours", normalized=True)
    report = reshard.convert(tmp_path / "ours", tmp_path / "theirs", format="megatron")

    before, after = values(source), values(tmp_path / "theirs")
    assert_same(after, before)
    assert not report.omitted
    if name in ("mcore_tp1", "mcore_tp2_pp2", "mcore_moe_ep2"):
        wanted, found = metadata(next(source.glob("iter_*"))), metadata(next((tmp_path / "theirs").glob("iter_*")))
        for key, meta in wanted.state_dict_metadata.items():
            if key.startswith("rng_state"):
                continue
            mine = found.state_dict_metadata[key]
            assert type(mine) is type(meta)
            padded = "word_embeddings" in key or "output_layer" in key  # cut here
            assert padded or getattr(mine, "size", None) == getattr(meta, "size", None), key
        theirs = torch.load(next(source.glob("iter_*/common.pt")), weights_only=False)
        ours = torch.load(next((tmp_path / "theirs").glob("iter_*/common.pt")), weights_only=False)
        assert set(theirs) <= set(ours)
        assert (ours["args"], ours["iteration"]) == (theirs["args"], theirs["iteration"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_program_of_torch_s_own(dtype: torch.dtype, tmp_path: Path) -> None:
    """Keys, chunks and common state of a model that never saw Megatron; masters are made where there are none."""
    state = trained(model(dtype=dtype), history=[])
    reshard.save(state, tmp_path / "saved")
    report = reshard.convert(tmp_path / "saved", tmp_path / "theirs", format="megatron", max_shard_bytes=2000)

    folder = tmp_path / "theirs" / "iter_0000007"
    assert (tmp_path / "theirs" / "latest_checkpointed_iteration.txt").read_text() == "7"
    assert json.loads((folder / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    assert len(report.files) > 1
    assert report.omitted == ("epoch", "history")
    found = metadata(folder)
    fc1 = found.state_dict_metadata["decoder.layers.mlp.linear_fc1.weight"]
    assert [tuple(chunk.sizes) for chunk in fc1.chunks] == [(1, 6, H)] * 2
    assert tuple(found.state_dict_metadata["decoder.layers.self_attention.linear_qkv.layer_norm_weight"].size) == (2, H)
    assert "decoder.layers.self_attention.linear_proj._extra_state/shard_1_2" in found.state_dict_metadata
    assert ("optimizer.state.fp32_param.output_layer.weight" in found.state_dict_metadata) == (dtype != torch.float32)
    assert found.state_dict_metadata["optimizer.state.param.output_layer.weight"].properties.dtype == torch.float32
    common = torch.load(folder / "common.pt", weights_only=True)
    groups = common["optimizer"]["param_groups"]
    assert [(g["wd_mult"], g["weight_decay"], g["step"], "params" in g) for g in groups] == [
        (1.0, 0.01, 7, False),
        (0.0, 0.0, 7, False),
    ]
    assert common["optimizer"]["optimizer"]["param_groups"] == groups
    again, before = values(tmp_path / "theirs"), values(tmp_path / "saved")
    masters = {name: again.pop(name) for name in list(again) if name.endswith("fp32_param")}
    assert set(masters) == ({f"{name} fp32_param" for name in state["model"]} if dtype != torch.float32 else set())
    assert all(masters[f"{name} fp32_param"].equal(p.float()) for name, p in state["model"].items() if masters)
    assert_same({**again, "groups": []}, {**before, "groups": []})


def test_experts_are_a_second_dim_and_layers_that_differ_keep_their_numbers(tmp_path: Path) -> None:
    for dense, key, shape in (
        (0, "decoder.layers.mlp.experts.experts.linear_fc1.weight", (2, 3, 6, H)),
        (1, "decoder.layers.1.mlp.experts.experts.linear_fc1.weight", (3, 6, H)),
    ):
        params, folder = model(experts=3, dense=dense), tmp_path / str(dense) / "release"
        reshard.save(trained(params), tmp_path / "saved", overwrite=True)
        reshard.convert(tmp_path / "saved", folder, format="megatron")
        found = metadata(folder).state_dict_metadata
        assert tuple(found[key].size) == tuple(found[f"optimizer.state.exp_avg.{key}"].size) == shape
        common = torch.load(folder / "common.pt", weights_only=True)
        assert common["content_metadata"]["non_homogeneous_layers"] == bool(dense)
        assert [g["is_expert_parallel"] for g in common["optimizer"][1]["param_groups"]] == [True]
        opened = reshard.open(folder).normalized()["model"]
        assert_same({k: opened[k][...] for k in params}, params)
    reshard.convert(tmp_path / "saved", folder, format="megatron", hints={"expert_optimizer": False}, overwrite=True)
    assert "param_groups" in torch.load(folder / "common.pt", weights_only=True)["optimizer"]


def test_a_conversion_is_replaced_and_resumed_in_its_own_folder(tmp_path: Path) -> None:
    """The folder of one iteration is the folder of a run, which other formats may not be written to."""
    reshard.save(trained(model()), tmp_path / "saved")
    arguments: Any = (tmp_path / "saved", tmp_path / "theirs")
    report = reshard.convert(*arguments, format="megatron")
    with pytest.raises(CheckpointExistsError, match=r"already contains a checkpoint \(latest_checkpointed_iteration"):
        reshard.convert(*arguments, format="megatron")
    again = reshard.convert(*arguments, format="megatron", overwrite=True)
    there = {f"iter_0000007/{file.name}" for file in (tmp_path / "theirs" / "iter_0000007").glob("*.distcp")}
    assert there == {*again.files}
    assert not there & {*report.files}
    (tmp_path / "theirs" / "latest_checkpointed_iteration.txt").unlink()
    reshard.convert(*arguments, format="megatron")
    assert reshard.verify(tmp_path / "theirs").ok
    for format, what in (("native", "run with the steps iter_0000007"), ("dcp", "run with the steps iter_0000007")):
        with pytest.raises(FormatError, match=what):
            reshard.convert(*arguments, format=format, overwrite=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("inside", ["", "iter_0000007"])
def test_what_is_there_while_a_conversion_publishes_is_refused(inside: str, tmp_path: Path) -> None:
    """Not taken for a checkpoint of the common state alone."""
    reshard.save(trained(model()), tmp_path / "saved")
    folder = tmp_path / "theirs" / inside
    reshard.convert(tmp_path / "saved", folder, format="megatron")
    for unpublished in (".metadata", "common.pt", "metadata.json"):
        (tmp_path / "theirs" / "iter_0000007" / unpublished).unlink()
        with pytest.raises(ReshardError):
            reshard.open(folder)


def test_files_of_a_conversion_that_has_not_ended_are_not_damage(tmp_path: Path) -> None:
    reshard.save(trained(model()), tmp_path / "saved")
    reshard.convert(tmp_path / "saved", tmp_path / "theirs", format="megatron")
    (file,) = (tmp_path / "theirs" / "iter_0000007").glob("*_0.distcp")
    file.with_name("__0_0192f3c1a8aa5d2e00112233_1.distcp").write_bytes(file.read_bytes()[:512])
    assert reshard.verify(tmp_path / "theirs").ok
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert not reshard.verify(tmp_path / "theirs").ok


def test_tied_names_and_the_model_alone(tmp_path: Path) -> None:
    params = model()
    params["output_layer.weight"] = params["embedding.word_embeddings.weight"]
    reshard.save({"model": params, "epoch": 3}, tmp_path / "saved")
    reshard.convert(tmp_path / "saved", tmp_path / "theirs", format="megatron", model_only=True)
    found = metadata(tmp_path / "theirs" / "iter_0000000")
    places = {index.fqn: info.offset for index, info in found.storage_data.items()}
    assert places["output_layer.weight"] == places["embedding.word_embeddings.weight"]
    assert "optimizer" not in torch.load(tmp_path / "theirs/iter_0000000/common.pt", weights_only=True)


def lost_layer(state: dict[str, Any]) -> None:
    for name in [name for name in state["model"] if ".0." in name]:
        del state["model"][name], state["optim"]["state"][name]


def lost_state(state: dict[str, Any]) -> None:
    del state["optim"]["state"]["decoder.layers.1.mlp.linear_fc2.weight"]


def other_step(state: dict[str, Any]) -> None:
    state["optim"]["state"]["output_layer.weight"]["step"] = torch.tensor(8.0)


def other_settings(state: dict[str, Any]) -> None:
    state["optim"]["param_groups"][0]["params"].remove("output_layer.weight")
    state["optim"]["param_groups"].append({"lr": 9.0, "weight_decay": 0.01, "params": ["output_layer.weight"]})


def no_groups(state: dict[str, Any]) -> None:
    state["optim"]["param_groups"] = []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lost_layer, "number 0 is missing among"),
        (lost_state, "that of layer 1 is missing"),
        (other_step, "one step count"),
        (other_settings, "have lr 0.1 and 9.0"),
        (no_groups, "no param groups"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_the_format_cannot_hold(change: Any, words: str, tmp_path: Path) -> None:
    state = trained(model())
    change(state)
    reshard.save(state, tmp_path / "saved")
    with pytest.raises(FormatError, match=words):
        reshard.convert(tmp_path / "saved", tmp_path / "theirs", format="megatron")
    with pytest.raises(ReshardError):
        reshard.open(tmp_path / "theirs")


@pytest.mark.parametrize(
    ("name", "is_of_megatron"),
    [
        ("model.layers.{}.self_attn.q_proj.weight", False),
        ("model.decoder.layers.{}.self_attn.q_proj.weight", False),
        ("gpt_neox.layers.{}.attention.query_key_value.weight", False),
        ("decoder.layers.{}.self_attention.linear_qkv.weight", True),
        ("decoder.layers.{}.self_attention.linear_q_down_proj.weight", True),
        ("decoder.layers.{}.mixer.in_proj.weight", True),
        ("vision_model.decoder.layers.{}.mlp.linear_fc1.bias", True),
    ],
)
def test_names_of_which_none_is_of_megatron_are_told(
    name: str, is_of_megatron: bool, tmp_path: Path, caplog: Any
) -> None:
    """Without them the result has the names of the source, stacked, which neither Megatron nor any other tool knows."""
    reshard.save({"model": {name.format(layer): torch.ones(2, 2) for layer in range(2)}}, tmp_path / "saved")
    with caplog.at_level("WARNING", "reshard"):
        report = reshard.convert(tmp_path / "saved", tmp_path / "run", format="megatron")

    told = [text for text in report.warnings if "--names huggingface:megatron" in text]
    assert [is_of_megatron, told] in ([True, []], [False, told[:1]])
    assert caplog.messages == [f"{tmp_path / 'run'}: {text}" for text in told]
