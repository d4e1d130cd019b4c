"""States of all common shapes, saved by torch.save or DCP: sections, wrappers, ids, groups."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import reshard
from reshard import checkpoint
from reshard.errors import CorruptCheckpointError, FormatError, NormalizationError
from reshard.formats.canonical import HINTS
from tests.torch_releases import save_alone

W, B = torch.arange(6.0).reshape(2, 3), torch.arange(2.0)


def weights(prefix: str = "") -> dict[str, torch.Tensor]:
    return {f"{prefix}lin.weight": W, f"{prefix}lin.bias": B}


def by_name(prefix: str = "") -> dict[str, Any]:
    return {
        "state": {f"{prefix}lin.weight": {"exp_avg": W + 1, "step": 3}, f"{prefix}lin.bias": {"exp_avg": B + 1}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [f"{prefix}lin.weight", f"{prefix}lin.bias"]}],
    }


def by_id(**more: Any) -> dict[str, Any]:
    state = {0: {"exp_avg": B + 1}, 1: {"exp_avg": W + 1, "step": 3}}
    return {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1], **more}]}


def normalized(path: Path, state: Any, hints: Mapping[str, Any] | None = None) -> Any:
    torch.save(state, path / "state.pt")
    return checkpoint.open(path / "state.pt").normalized(hints)


def check(found: Any, *, optim: bool = True) -> None:
    assert set(found["model"]) == {"lin.weight", "lin.bias"}
    assert found["model"]["lin.weight"][...].equal(W)
    assert found["model"]["lin.bias"][...].equal(B)
    if optim:
        assert found["optim"]["state"]["lin.weight"]["exp_avg"][:, 1:].equal((W + 1)[:, 1:])
        assert found["optim"]["state"]["lin.bias"]["exp_avg"][...].equal(B + 1)
        assert found["optim"]["state"]["lin.weight"]["step"] == 3
        assert [group["lr"] for group in found["optim"]["param_groups"]] == [0.1]
        assert set(found["optim"]["param_groups"][0]["params"]) == {"lin.weight", "lin.bias"}
    else:
        assert found["optim"] == {"state": {}, "param_groups": []}


STATES = [
    ({"model": weights(), "optim": by_name()}, "get_state_dict"),
    ({"model_state_dict": weights(), "optimizer_state_dict": by_name(), "epoch": 3}, "a training script"),
    ({"app": {"model": weights(), "optim": by_name()}}, "all under one name"),
    ({**weights(), "optimizer": by_name(), "train_state": {"step": torch.tensor(3)}}, "the model at the top"),
    ({"model": weights("module."), "optimizer": by_name("module.")}, "DDP"),
    ({"model": weights("module."), "optimizer": by_name()}, "DDP, states without the prefix"),
    ({"model": weights("_orig_mod."), "optimizer": by_name()}, "compile"),
    ({"model": weights("module._orig_mod.module."), "optim": by_name("module._orig_mod.module.")}, "one in the other"),
    (
        {"state_dict": weights("net."), "optimizer_states": [by_name("net.")], "pytorch-lightning_version": "2"},
        "Lightning",
    ),
    ({"net": weights(), "optimizer": by_name(), "acc": 93.5, "epoch": 3}, "a state dict under a name of its own"),
    ({"model": weights(), "optimizers": {"AdamW": by_name()}}, "optimizers by name"),
    (
        {
            "state": {"model": weights(), "optimizers": {"AdamW": by_name()}, "schedulers": {"Linear": {"last": 3}}},
            "rng": [{"torch": torch.arange(8)}],
        },
        "Composer",
    ),
    ({"checkpoint": {"model": weights(), "optimizer": by_name()}, "config": {"lr": 0.1}}, "something beside all"),
    ({"model": [{"lin.weight": W}, {"lin.bias": B}], "optimizer": by_name()}, "the parts of a pipeline"),
    ({"model": weights(), "optimizers": [by_name()]}, "a list of optimizers"),
    ({"model": weights(), "optimizer": by_id(param_names=["lin.bias", "lin.weight"])}, "ids with stored names"),
    (
        {
            **{f"model.{name}": tensor for name, tensor in weights().items()},
            **{f"optim.state.{n}.{k}": v for n, of in by_name()["state"].items() for k, v in of.items()},
            **{f"optim.param_groups.{n}.lr": 0.1 for n in weights()},
        },
        "flat keys",
    ),
]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch's remark on saving from one process
@pytest.mark.parametrize(("state", "note"), STATES, ids=[note for _, note in STATES])
def test_shapes_of_states(tmp_path: Path, state: Any, note: str) -> None:
    check(normalized(tmp_path, state))
    if not any(isinstance(value, list) for value in state.values()):
        save_alone(state, checkpoint_id=tmp_path / "dcp")
        check(checkpoint.open(tmp_path / "dcp").normalized())


def test_several_optimizers_by_name(tmp_path: Path) -> None:
    parts = {
        name: {
            "state": {f"lin.{name}": by_name()["state"][f"lin.{name}"]},
            "param_groups": [{"params": [f"lin.{name}"]}],
        }
        for name in ("weight", "bias")
    }
    found = normalized(tmp_path, {"model": weights(), "optimizers": parts})["optim"]
    assert [group["params"] for group in found["param_groups"]] == [["lin.weight"], ["lin.bias"]]
    assert found["state"]["lin.bias"]["exp_avg"][...].equal(B + 1)


def test_a_parameter_that_is_called_like_a_section_is_none_beside_others(tmp_path: Path) -> None:
    nested = {"params": {"model": {"w": W}, "head": {"w": B}}, "step": 3}
    assert set(normalized(tmp_path, nested)["model"]) == {"params.model.w", "params.head.w"}


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "base_model.model."])
def test_a_model_alone(tmp_path: Path, prefix: str) -> None:
    check(normalized(tmp_path, weights(prefix)), optim=False)
    save_file(weights(prefix), tmp_path / "model.safetensors")
    check(checkpoint.open(tmp_path / "model.safetensors").normalized(), optim=False)


def test_a_tensor_alone(tmp_path: Path) -> None:
    torch.save(torch.ones(3), tmp_path / "a.pt")
    assert list(checkpoint.open(tmp_path / "a.pt").normalized()["model"]) == ["tensor"]


def test_an_optimizer_alone(tmp_path: Path) -> None:
    found = normalized(tmp_path, by_name())
    assert found["model"] == {}
    check({"model": checkpoint.open(_saved(tmp_path, weights())), "optim": found["optim"]})


def _saved(path: Path, state: Any) -> Path:
    torch.save(state, path / "other.pt")
    return path / "other.pt"


def test_wrappers_inside_and_names_of_users(tmp_path: Path) -> None:
    """A wrapper's own segment goes wherever it stands; `module` in the middle may be the user's."""
    names = {
        "blocks.0._fsdp_wrapped_module._checkpoint_wrapped_module.w": "blocks.0.w",
        "blocks.0.module.w": "blocks.0.module.w",
        "module.w": "module.w",
    }
    found = normalized(tmp_path, dict.fromkeys(names, W))
    assert set(found["model"]) == set(names.values())


def test_averaged_models_keep_their_counter(tmp_path: Path) -> None:
    found = normalized(tmp_path, {"n_averaged": torch.tensor(2), **weights("module.")})
    assert set(found["model"]) == {"n_averaged", "lin.weight", "lin.bias"}


def test_parametrizations_are_refused(tmp_path: Path) -> None:
    name = "lin.parametrizations.weight.original0"
    with pytest.raises(NormalizationError, match=r"normalized\(hints=\{'keep_parametrizations': True\}\)$"):
        normalized(tmp_path, {name: W})
    assert set(normalized(tmp_path, {name: W}, {"keep_parametrizations": True})["model"]) == {name}


def test_ids_need_names(tmp_path: Path) -> None:
    state = {"model": weights(), "optimizer": by_id()}
    with pytest.raises(NormalizationError, match=r"2 parameters only by integer ids.*hints=\{'param_names': \["):
        normalized(tmp_path, state)
    check(normalized(tmp_path, state, {"param_names": ["lin.bias", "lin.weight"]}))
    check(normalized(tmp_path, state, {"param_names": {"1": "lin.weight", "0": "lin.bias"}}))
    check(
        normalized(tmp_path, {**state, "model": weights("module.")}, {"param_names": ["lin.bias", "module.lin.weight"]})
    )
    with pytest.raises(NormalizationError, match=r"'exp_avg' of 'lin\.\w+' has shape .*another order"):
        normalized(tmp_path, state, {"param_names": ["lin.weight", "lin.bias"]})
    with pytest.raises(NormalizationError, match=r"gives 1 name, but .* 2 parameters, with ids 0 to 1: "):
        normalized(tmp_path, state, {"param_names": ["lin.bias"]})
    with pytest.raises(NormalizationError, match=r"gives 3 names, but .* without frozen ones"):
        normalized(tmp_path, state, {"param_names": ["lin.bias", "lin.weight", "head.weight"]})
    with pytest.raises(NormalizationError, match="same name"):
        normalized(tmp_path, state, {"param_names": ["lin.bias", "lin.bias"]})
    with pytest.raises(NormalizationError, match="must be names"):
        normalized(tmp_path, state, {"param_names": 3})


def test_several_optimizers_count_for_themselves(tmp_path: Path) -> None:
    first = {"state": {0: {"exp_avg": W + 1, "step": 3}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    second = {"state": {0: {"exp_avg": B + 1}}, "param_groups": [{"lr": 0.2, "params": [0]}]}
    state = {"model": weights(), "optimizers": [first, second]}
    with pytest.raises(NormalizationError, match=r"is one list of names, but several optimizers.*\{0: \[names\]"):
        normalized(tmp_path, state, {"param_names": ["lin.weight", "lin.bias"]})
    found = normalized(tmp_path, state, {"param_names": {0: ["lin.weight"], 1: ["lin.bias"]}})
    assert found["optim"]["state"]["lin.bias"]["exp_avg"][...].equal(B + 1)
    assert [group["params"] for group in found["optim"]["param_groups"]] == [["lin.weight"], ["lin.bias"]]


def test_names_and_prefixes_from_hints(tmp_path: Path) -> None:
    found = normalized(tmp_path, {"model": weights("my.net.")}, {"prefix": "my.net."})
    check(found, optim=False)
    found = normalized(tmp_path, {"a.weight": W, "a.bias": B}, {"names": {"a": "lin"}})
    check(found, optim=False)
    found = normalized(tmp_path, {"3.weight": W, "b": B}, {"names": {"3.weight": "lin.weight", "b": "lin.bias"}})
    check(found, optim=False)
    with pytest.raises(NormalizationError, match="both 'a' and 'b' would be called 'c'"):
        normalized(tmp_path, {"a": W, "b": B}, {"names": {"a": "c", "b": "c"}})


def test_tied_names_from_a_hint(tmp_path: Path) -> None:
    """Safetensors hold a shared tensor once, and often nothing says what else it is called."""
    save_file(weights(), tmp_path / "model.safetensors")
    opened = checkpoint.open(tmp_path / "model.safetensors")
    found = opened.normalized({"tied": {"head.weight": "lin.weight"}})["model"]
    assert found["head.weight"][1:].equal(W[1:])
    assert found["lin.weight"][...].equal(W)
    with pytest.raises(NormalizationError, match=r"'tied' says that 'a' is 'b', but there is no such parameter"):
        opened.normalized({"tied": {"a": "b"}})
    with pytest.raises(NormalizationError, match=r"both 'lin\.weight' and 'lin\.weight' would be called"):
        opened.normalized({"tied": {"lin.weight": "lin.bias"}})


@pytest.mark.parametrize(
    ("attribute", "stays"), [("net", False), ("model", False), ("layers", True), ("blocks", True), ("decoder", True)]
)
def test_a_sequential_of_lightning(tmp_path: Path, attribute: str, stays: bool) -> None:
    """`self.net = Sequential(...)` holds the model; `self.layers = ModuleList(...)` is a part of it."""
    front = f"{attribute}."
    state = {"state_dict": {f"{front}0.weight": W, f"{front}1.bias": B}, "pytorch-lightning_version": "2"}
    names = {"0.weight", "1.bias"}
    found = normalized(tmp_path, state)["model"]
    assert set(found) == ({front + name for name in names} if stays else names)
    assert set(normalized(tmp_path, state, {"prefix": ""})["model"]) == {front + name for name in names}
    assert set(normalized(tmp_path, state, {"prefix": front})["model"]) == names


def test_an_optimizer_is_known_by_its_inside(tmp_path: Path) -> None:
    """Whatever a training script calls it; models that it keeps under names of its own keep these in front."""
    adversary = {"state": {"lin.weight": {"exp_avg": W}}, "param_groups": [{"lr": 0.2, "params": ["lin.weight"]}]}
    found = normalized(
        tmp_path, {"netG": weights(), "netD": weights(), "optG": by_name("netG."), "adversary": adversary}
    )
    assert set(found["model"]) == {f"net{which}.{name}" for which in "GD" for name in weights()}
    assert found["optim"]["state"]["netG.lin.weight"]["step"] == 3
    assert [group["lr"] for group in found["optim"]["param_groups"]] == [0.2, 0.1]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_lightning_without_its_meta_file_is_noted(tmp_path: Path) -> None:
    save_alone({"state_dict": weights("net."), "optimizer_0": by_name("net.")}, checkpoint_id=tmp_path)
    found = checkpoint.open(tmp_path).normalized()
    assert set(found["model"]) == {f"net.{name}" for name in weights()}
    assert any("without its meta.pt" in note for note in found.notes)
    whole = checkpoint.open(tmp_path).normalized({"prefix": "net."})
    check(whole)
    assert whole.notes == ()


def staged(local: bool, nest: str) -> dict[str, Any]:
    """Two stages of two layers each, which count from 0 or through."""
    parts: dict[str, Any] = {}
    for stage in range(2):
        names = [f"layers.{i if local else 2 * stage + i}.weight" for i in range(2)]
        model = {name: W + 2 * stage + i for i, name in enumerate(names)} | {"freqs": B}
        optim = {
            "state": {name: {"exp_avg": model[name] * 2} for name in names},
            "param_groups": [{"lr": 0.1, "params": names}],
        }
        if nest == "outside":
            parts[f"stage_{stage}"] = {"model": model, "optimizer": optim}
        elif nest == "inside":
            parts.setdefault("model", {})[f"pp_rank_{stage}"] = model
            parts.setdefault("optim", {})[f"pp_rank_{stage}"] = optim
        else:
            parts |= {f"model_{stage}": model, f"optim_{stage}": optim}
    return {**parts, "epoch": 3, "rng": {"state": torch.ones(3)}}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("nest", ["outside", "inside"])
def test_stages_with_keys_of_their_own(tmp_path: Path, nest: str, local: bool) -> None:
    """As pipeline stages save that must not overwrite each other's lists: one model, its layers numbered through."""
    state = staged(local, nest)
    save_alone(state, checkpoint_id=tmp_path / "dcp")
    reshard.convert(tmp_path / "dcp", tmp_path / "native")
    opened = [checkpoint.open(tmp_path / kind).normalized() for kind in ("dcp", "native")]
    names = [f"layers.{i}.weight" for i in range(4)]
    for found in (normalized(tmp_path, state), *opened):
        assert set(found["model"]) == {*names, "freqs"}
        assert all(found["model"][name][...].equal(W + i) for i, name in enumerate(names))
        assert all(found["optim"]["state"][name]["exp_avg"][1:].equal((W + i)[1:] * 2) for i, name in enumerate(names))
        assert [group["params"] for group in found["optim"]["param_groups"]] == [names]


@pytest.mark.parametrize("kind", ["files", "keys"])
def test_what_stages_have_under_one_name_is_compared(tmp_path: Path, kind: str) -> None:
    """That of every stage but the first was dropped in silence."""
    stages = {
        f"stage_{n}": {"model": {f"blocks.{n}.w": W, "norm.weight": W + n, "freqs": B.clone(), "scale": W[0, 0]}}
        for n in range(2)
    }
    for name, state in stages.items() if kind == "files" else ():
        torch.save(state, tmp_path / f"{name}.pt")
    found = checkpoint.open(tmp_path).normalized() if kind == "files" else normalized(tmp_path, stages)
    assert found["model"]["freqs"][...].equal(B)
    assert found["model"]["scale"][...].equal(W[0, 0])
    words = r"'norm.weight' with different values, in .*stage_0.pt and .*stage_1.pt" if kind == "files" else "'norm.we"
    with pytest.raises(NormalizationError, match=words):
        found["model"]["norm.weight"][1:]


def test_names_that_end_like_stages(tmp_path: Path) -> None:
    """The files of two apps are no stages; nothing says that they belong together."""
    for n in range(2):
        torch.save({"w": W}, tmp_path / f"app_{n}.pt")
    with pytest.raises(FormatError, match="no index that lists them"):
        checkpoint.open(tmp_path)


def test_stages_that_cannot_be_put_together(tmp_path: Path) -> None:
    state = staged(True, "outside")
    state["stage_3"] = state.pop("stage_1")
    with pytest.raises(CorruptCheckpointError, match="stage 1 is missing: there are the stages 0, 3"):
        normalized(tmp_path, state)
    # a number alone does not say that these are parts of one model
    found = normalized(tmp_path, staged(True, "numbers"))
    assert found["model"]["model_1.layers.0.weight"][...].equal(W + 2)
    assert found["optim"]["state"]["model_1.layers.0.weight"]["exp_avg"][...].equal((W + 2) * 2)
    assert len(found["model"]) == 6


def test_offsets_that_give_a_layer_to_two_stages(tmp_path: Path) -> None:
    """One of them would be lost in silence."""
    for stage in range(2):
        torch.save({"model": {f"layers.{n}.w": W + 2 * stage + n for n in range(2)}}, tmp_path / f"stage_{stage}.pt")
    opened = checkpoint.open(tmp_path)
    with pytest.raises(NormalizationError, match=r"two stages of .* have 'layers.1.w', in stage 1 called 'layers.0.w'"):
        opened.normalized({"layer_offsets": {1: 1}})
    with pytest.raises(NormalizationError, match=r"two stages of .* have 'layers.0.w'"):
        opened.normalized({"layer_offsets": {1: 0}})
    assert opened.normalized({"layer_offsets": {1: 2}})["model"]["layers.3.w"][...].equal(W + 3)


@pytest.mark.parametrize(("first", "second"), [((0, 1), (1, 2)), ((0, 2), (0, 2)), ((0, 1, 2), (1,))])
def test_stages_whose_numbers_would_leave_a_gap(
    first: tuple[int, ...], second: tuple[int, ...], tmp_path: Path
) -> None:
    """Layers 1 and 2 of a second stage became 3 and 4, after 0 and 1."""
    for stage, numbers in enumerate((first, second)):
        torch.save({"model": {f"layers.{n}.w": W + n for n in numbers}}, tmp_path / f"stage_{stage}.pt")
    opened = checkpoint.open(tmp_path)
    offset = max(first) + 1 - min(second)
    words = rf"has layers .* in stage 1, .*\(hints=\{{'layer_offsets': \{{1: {offset}\}}\}}\)"
    with pytest.raises(NormalizationError, match=words):
        opened.normalized()
    found = opened.normalized({"layer_offsets": {1: offset}})["model"]
    assert list(found) == [f"layers.{n}.w" for n in (*first, *(n + offset for n in second))]


def test_stages_with_several_parts_of_the_model(tmp_path: Path) -> None:
    """Their layers alternate; the second stage's were taken for layers 4 and 6."""
    for stage in range(2):
        layers = {f"layers.{n}.w": W + n for n in (stage, stage + 2)}
        torch.save({"model": layers}, tmp_path / f"stage_{stage}.pt")
    opened = checkpoint.open(tmp_path)
    with pytest.raises(NormalizationError, match=r"\[0, 2\] in earlier stages and \[1, 3\] in stage 1.*layer_offsets"):
        opened.normalized()
    for offset, names in (0, "0213"), (3, "0246"):
        found = opened.normalized({"layer_offsets": {1: offset}})["model"]
        assert [*found] == [f"layers.{n}.w" for n in names]
        assert all(found[f"layers.{n}.w"][...].equal(W + w) for n, w in zip(names, (0, 2, 1, 3)))


def test_of_fused_states_only_those_with_a_value_for_each_row_are_split(tmp_path: Path) -> None:
    """One value for each column belongs to all rows together, as Adafactor has it."""
    rows = torch.arange(16.0).reshape(16, 1)
    states = {"row_var": rows, "col_var": torch.arange(3.0).reshape(1, 3), "step": torch.tensor(3.0)}
    model = {f"a.{part}.weight": torch.ones(n, 3) for part, n in (("wq", 8), ("wk", 4), ("wv", 4))}
    found = normalized(tmp_path, {"model": model, "optim": {"state": {"a.wqkv.weight": states}}}, {"kv_heads": 1})

    state = found["optim"]["state"]
    assert [list(state[name]) for name in model] == [["row_var", "step"]] * 3
    assert state["a.wk.weight"]["row_var"][...].equal(rows[8:12])
    assert any("'col_var' of 'a.wqkv.weight' is omitted" in note for note in found.notes)


@pytest.mark.parametrize("hint", ["vocab_size", "kv_heads", "head_dim"])
@pytest.mark.parametrize("value", ["4", 0, -1, 4.0, True])
def test_hints_that_must_be_numbers(tmp_path: Path, hint: str, value: Any) -> None:
    """One that is none was ignored."""
    with pytest.raises(NormalizationError, match=f"the hint '{hint}' must be a whole number >= 1, got"):
        normalized(tmp_path, {"w": W}, {hint: value})
    assert list(normalized(tmp_path, {"w": W}, {hint: None})["model"]) == ["w"]


def test_a_hint_that_is_no_list_is_named_beside_the_files(tmp_path: Path) -> None:
    with pytest.raises(NormalizationError, match=r"or a hint is not what it should be: TypeError"):
        normalized(tmp_path, {"w": W}, {"param_groups": 5})


@pytest.mark.parametrize(
    ("state", "names"),
    [
        ({"a.b": {"param_groups": "x"}, "w": W}, ["w"]),
        ({"a.b": {"param_groups": "x"}}, []),
        ({"a.b": {"param_groups": W}}, ["a.b.param_groups"]),
        ({"a.b": {"param_groups": [3]}}, []),
    ],
)
def test_what_is_only_called_like_an_optimizer_is_none(tmp_path: Path, state: dict[str, Any], names: list[str]) -> None:
    assert list(normalized(tmp_path, state)["model"]) == names


@pytest.mark.parametrize("groups", [W, [W], [{"params": 3}], [{"params": W}], [{"params": [[1]]}], "x"])
def test_odd_param_groups_are_no_damage(tmp_path: Path, groups: Any) -> None:
    state = {"model": {"w": W}, "optim": {"state": {"w": {"step": W}}, "param_groups": groups}}
    with pytest.raises(NormalizationError, match=r"'param_groups' of an optimizer should be dicts, each with 'params'"):
        normalized(tmp_path, state)


def test_a_state_that_no_rule_covers_is_no_damage(tmp_path: Path) -> None:
    groups = [{"params": [0], "param_names": "q"}]
    state = {"model": {"w": W}, "optim": {"state": {"w": {"step": W}}, "param_groups": groups}}
    with pytest.raises(NormalizationError, match="its model or optimizer is nested in no known way: TypeError"):
        normalized(tmp_path, state)


def test_unknown_hints_are_listed(tmp_path: Path) -> None:
    with pytest.raises(
        NormalizationError,
        match=r"'parm_names': did you mean 'param_names'\? Known hints are param_names, ",
    ):
        normalized(tmp_path, weights(), {"parm_names": []})
    with pytest.raises(NormalizationError, match="must be a dict"):
        normalized(tmp_path, weights(), {"names": ["a"]})


def test_rates_that_are_tensors_are_read(tmp_path: Path) -> None:
    state = by_name()
    state["param_groups"][0]["lr"] = torch.tensor(0.25)
    found = normalized(tmp_path, {"model": weights(), "optim": state})
    assert found["optim"]["param_groups"][0]["lr"].equal(torch.tensor(0.25))
    flat = {f"param_groups.{n}.lr": torch.tensor(0.25) for n in weights()}
    found = normalized(tmp_path, {"model": weights(), "optim": {"state.lin.weight.exp_avg": W, **flat}})
    assert found["optim"]["param_groups"] == [{"lr": 0.25, "params": ["lin.weight", "lin.bias"]}]


def experts(count: int, parts: tuple[str, ...]) -> dict[str, torch.Tensor]:
    front = "model.layers.0.mlp.experts"
    return {f"{front}.{e}.{part}.weight": torch.full((2, 3), float(e)) for e in range(count) for part in parts}


def test_experts_on_disk(tmp_path: Path) -> None:
    """Stacked where each is three plain matrices, as they are where there is more to them, refused where one lacks."""
    path = tmp_path / "model.safetensors"
    all_three = ("gate_proj", "up_proj", "down_proj")
    save_file(experts(12, all_three), path)
    found = checkpoint.open(path).normalized()["model"]
    assert found["model.layers.0.mlp.experts.gate_up_proj"].shape == (12, 4, 3)
    assert found["model.layers.0.mlp.experts.down_proj"][10].equal(torch.full((2, 3), 10.0))
    scale = {"model.layers.0.mlp.experts.0.up_proj.weight_scale_inv": torch.ones(1)}
    save_file({**experts(2, all_three), **scale}, path)
    assert "model.layers.0.mlp.experts.1.up_proj.weight" in checkpoint.open(path).normalized()["model"]
    lacking = experts(3, all_three)
    del lacking["model.layers.0.mlp.experts.1.up_proj.weight"]
    save_file(lacking, path)
    with pytest.raises(CorruptCheckpointError, match="expert 1 has no up_proj"):
        checkpoint.open(path).normalized()


def test_the_native_format(tmp_path: Path) -> None:
    import reshard

    reshard.save({"model": weights(), "optim": by_name(), "step": 3}, tmp_path / "native")
    check(checkpoint.open(tmp_path / "native").normalized())


def test_the_documentation_lists_every_hint() -> None:
    text = (Path(__file__).parents[4] / "docs" / "canonical.md").read_text(encoding="utf-8")
    for name, what in HINTS.items():
        assert f"- `{name}`: {what}\n" in text


def test_experts_and_routers_of_other_families_on_disk(tmp_path: Path) -> None:
    """Jamba's experts are stacked under their own block's name; Granite's are stacked on disk; Ernie's bias moves."""
    jamba, granite = "model.layers.1.feed_forward", "model.layers.0.block_sparse_moe"
    parts = {f"{e}.{part}_proj": torch.randn(2, 2) for e in range(2) for part in ("gate", "up", "down")}
    save_file(
        {
            **{f"{jamba}.experts.{name}.weight": tensor for name, tensor in parts.items()},
            f"{jamba}.router.weight": W,
            f"{granite}.input_linear.weight": W.clone(),
            f"{granite}.output_linear.weight": W + 1,
            f"{granite}.router.layer.weight": W + 2,
            "model.layers.2.mlp.moe_statics.e_score_correction_bias": B,
        },
        tmp_path / "model.safetensors",
    )
    model = checkpoint.open(tmp_path / "model.safetensors").normalized()["model"]
    fused = torch.stack([torch.cat([parts[f"{e}.gate_proj"], parts[f"{e}.up_proj"]]) for e in range(2)])
    assert model.pop(f"{jamba}.experts.gate_up_proj")[...].equal(fused)
    assert model.pop(f"{jamba}.experts.down_proj")[1].equal(parts["1.down_proj"])
    assert set(model) == {
        f"{jamba}.router.weight",
        f"{granite}.experts.gate_up_proj",
        f"{granite}.experts.down_proj",
        f"{granite}.router.weight",
        "model.layers.2.mlp.gate.moe_statics.e_score_correction_bias",
    }
