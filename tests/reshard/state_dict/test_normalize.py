"""Raw state dicts of years ago, and the name mapping as a value."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import reshard
from reshard.errors import NormalizationError
from reshard.state_dict import (
    Stage,
    StateDictOptions,
    fqn_map,
    get_model_state_dict,
    normalize,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from tests.reshard.state_dict import zoo
from tests.same import assert_same

SEGMENTS = ["module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"]


@pytest.mark.parametrize("order", list(itertools.permutations(SEGMENTS)))
def test_wrapper_segments_in_any_order(order: tuple[str, ...]) -> None:
    front = ".".join(order)
    inner = ".".join(part for part in order if part != "module")
    raw = {f"{front}.layers.0.{inner}.w": torch.ones(1), f"{front}.layers.0.b": torch.ones(1), f"{front}._x": 3}
    kept = copy.deepcopy(raw)
    found = normalize(raw)
    assert list(found) == ["layers.0.w", "layers.0.b", "_x"]
    assert list(normalize(found)) == list(found)
    assert found.report.dropped["module"] == 3
    assert found.report.dropped["_orig_mod"] == 4
    assert_same(raw, kept)


def test_a_segment_module_inside_is_settled_by_names_only() -> None:
    raw = {"encoder.module.w": torch.ones(1), "module.b": torch.ones(1)}
    found = normalize(raw)
    assert list(found) == list(raw)
    assert found.report.doubtful == ("encoder.module.w", "module.b")
    assert list(normalize(raw, names={"encoder.w", "module.b"})) == ["encoder.w", "module.b"]
    assert list(normalize(raw, names={"encoder.module.w", "b"})) == ["encoder.module.w", "b"]


def test_names_that_become_one_are_refused() -> None:
    raw = {"a._orig_mod.w": torch.ones(1), "a.w": torch.ones(1)}
    with pytest.raises(NormalizationError, match=r"'a\._orig_mod\.w' and 'a\.w' .* 'a\.w'"):
        normalize({"model": raw})


@pytest.mark.not_simulated("what is compiled would trace its kernels, which are Python")
def test_a_training_script_s_own_dict_of_ids() -> None:
    """DDP-like prefix, integer ids, a step counter: what torch.save(dict(model=..., optim=...)) left behind."""
    model = nn.ModuleDict({"module": torch.compile(zoo.make(0), backend="eager")})
    optimizer = zoo.OPTIMIZERS["adamw"](model.parameters())
    tokens = torch.arange(4)
    model["module"](tokens).square().mean().backward()
    optimizer.step()
    raw = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 7, "args": {"lr": 0.1}}
    kept = copy.deepcopy(raw)
    plain = zoo.make(1)
    fresh = zoo.OPTIMIZERS["adamw"](plain.parameters())
    with pytest.raises(NormalizationError, match="order="):
        normalize(raw)
    found = normalize(raw, order=fqn_map(plain, fresh).parameter_order())
    assert_same(raw, kept)
    assert (found["step"], found["args"]) == (7, {"lr": 0.1})
    set_model_state_dict(plain, found["model"])
    set_optimizer_state_dict(plain, fresh, found["optim"])
    assert_same(dict(plain.state_dict()), dict(zip(plain.state_dict(), model.state_dict().values())))
    assert_same(fresh.state_dict(), optimizer.state_dict())
    with pytest.raises(NormalizationError, match="order has 1 names"):
        normalize(raw, order=["a"])


def test_a_tensor_beside_a_model_does_not_hide_it() -> None:
    own = {"counts": {"module.a": torch.ones(1)}}
    model = {"module.w": torch.ones(2), "module._extra_state": own}
    optimizer = {"state": {"module.w": {}}, "param_groups": [{"lr": 0.1, "params": ["module.w"]}]}
    made = normalize({"model": model, "optimizer": optimizer, "step": torch.tensor(3)})
    assert list(made["model"]) == ["w", "_extra_state"]
    assert made["model"]["_extra_state"] is own
    assert made["optimizer"]["param_groups"][0]["params"] == ["w"]
    assert made["step"] == 3


def test_flat_optimizer_dict() -> None:
    raw = {"state.module.a.w.step": 1, "param_groups.module.a.w.lr": 0.1}
    assert normalize(raw) == {"state.a.w.step": 1, "param_groups.a.w.lr": 0.1}


def test_a_child_called_module_keeps_its_name_in_live_models() -> None:
    """Wrappers are known by class, not by the spelling of their segment."""
    model = nn.ModuleDict({"module": nn.Linear(2, 2), "_orig_mod": nn.Linear(2, 2)})
    names = list(get_model_state_dict(checkpoint_wrapper(model)))
    assert names == ["module.weight", "module.bias", "_orig_mod.weight", "_orig_mod.bias"]


def test_fqn_map_says_what_there_is_to_know() -> None:
    model = torch.compile(checkpoint_wrapper(zoo.make(0, tied=True)), backend="eager")
    model.get_parameter("_orig_mod._checkpoint_wrapped_module.layers.0.up.bias").requires_grad_(False)
    optimizer = zoo.OPTIMIZERS["sgd"](model.parameters())
    found = fqn_map(model, optimizer)
    head = found["head.weight"]
    assert head.live == "_orig_mod._checkpoint_wrapped_module.head.weight"
    assert head.wrappers == ("OptimizedModule", "CheckpointWrapper")
    assert head.aliases == ("embed.weight",)
    assert head.ids == ((0, 0),)
    assert found["layers.0.scratch"].persistent is False
    assert found.live_to_canonical[head.live] == "head.weight"
    text = str(found)
    for words in ("layers.0.up.bias", "parameter, frozen", "buffer, not saved", "OptimizedModule>CheckpointWrapper"):
        assert words in text
    assert len(text.splitlines()) == len(found) + 1


def halves(offset: int) -> list[Any]:
    whole = zoo.make(0, depth=4)
    first = nn.ModuleDict({"embed": whole.embed, "layers": whole.layers[:2]})
    second = nn.ModuleDict({"layers": whole.layers[2:], "head": whole.head})
    return [first, Stage(second, {"layers": offset}) if offset else second]


def test_stages_with_local_layer_numbers() -> None:
    assert_same(dict(get_model_state_dict(halves(2))), dict(zoo.make(0, depth=4).state_dict()))
    entry = fqn_map(halves(2))["layers.3.up.weight"]
    assert (entry.live, entry.stage, entry.offset) == ("layers.1.up.weight", 1, 2)
    sequence = Stage(nn.Sequential(nn.Linear(2, 2)), {"": 5})
    assert list(get_model_state_dict(sequence)) == ["5.weight", "5.bias"]
    with pytest.raises(NormalizationError, match=r"'layers.0.norm.weight'.*give Stage\(module, offsets\)"):
        get_model_state_dict(halves(0))
    with pytest.raises(NormalizationError, match="no numbered children under 'blocks'"):
        get_model_state_dict(Stage(zoo.make(0), {"blocks": 1}))
    with pytest.raises(NormalizationError, match="Stage takes the module of a pipeline stage, got 3"):
        Stage(3)
    with pytest.raises(NormalizationError, match="must be an integer >= 0, got True"):
        Stage(zoo.make(0), {"layers": True})


def test_a_buffer_that_stages_share_must_agree() -> None:
    def stages(value: float) -> list[nn.Module]:
        made = []
        for i, v in enumerate((1.0, value)):
            stage = nn.ModuleDict({f"part{i}": nn.Linear(1, 1)})
            stage.register_buffer("table", torch.full((2,), v))
            made.append(stage)
        return made

    state = get_model_state_dict(stages(1.0))
    assert list(state) == ["table", "part0.weight", "part0.bias", "part1.weight", "part1.bias"]
    target = stages(1.0)
    set_model_state_dict(target, {**state, "table": torch.full((2,), 7.0)})
    assert target[0].table.tolist() == target[1].table.tolist() == [7.0, 7.0]
    with pytest.raises(NormalizationError, match="'table' has different values in stages 0 and 1"):
        get_model_state_dict(stages(2.0))


ADAPTED = {
    "layers.0.q.base_layer.weight": "layers.0.q.weight",
    "layers.0.q.lora_A.default.weight": "layers.0.q.lora_A.weight",
    "layers.0.q.lora_magnitude_vector.default.weight": "layers.0.q.lora_magnitude_vector",
    "embed.lora_embedding_B.default": "embed.lora_embedding_B",
    "layers.0.up.ia3_l.default": "layers.0.up.ia3_l",
    "embed.token_adapter.trainable_tokens_delta.default": "embed.token_adapter.trainable_tokens_delta",
    "layers.0.k.delora_A.default": "layers.0.k.delora_A",
    "layers.0.k.gralora_B.default": "layers.0.k.gralora_B",
    "layers.0.k.poly_lora_A.default": "layers.0.k.poly_lora_A",
    "layers.0.v.hira_A.default": "layers.0.v.hira_A",
    "layers.0.v.lily_A.default.weight": "layers.0.v.lily_A.weight",
    "layers.0.o.miss_block.default": "layers.0.o.miss_block",
    "layers.0.o.beft_bias.default": "layers.0.o.beft_bias",
    "layers.0.o.glora_A.default.Xd": "layers.0.o.glora_A.default.Xd",
    "head.modules_to_save.default.weight": "head.weight",
    "head.original_module.weight": "head.original_module.weight",
}


@pytest.mark.parametrize("front", ["", "module.", "_orig_mod."])
def test_adapters_have_one_name_by_whichever_way(front: str, tmp_path: Path) -> None:
    """`normalize` and a checkpoint's `normalized` say the same of a model of PEFT, and of its file of adapters."""
    raw = {f"{front}base_model.model.{name}": torch.tensor(float(i)) for i, name in enumerate(ADAPTED)}
    groups = [{"lr": 0.1, "params": list(raw)}]
    state = {"model": raw, "optim": {"state": {name: {"m": t} for name, t in raw.items()}, "param_groups": groups}}
    torch.save(state, tmp_path / "state.pt")
    found = normalize(state)
    opened = reshard.open(tmp_path / "state.pt").normalized()
    assert list(found["model"]) == list(opened["model"]) == list(ADAPTED.values())
    assert list(found["optim"]["state"]) == list(opened["optim"]["state"]) == list(ADAPTED.values())
    assert found["optim"]["param_groups"][0]["params"] == list(ADAPTED.values())
    on_disk = {f"base_model.model.{name}": torch.ones(1) for name in ADAPTED.values() if "lora" in name}
    assert [f"base_model.model.{name}" for name in normalize(on_disk)] == list(on_disk)
    flat = {f"state.{name}.m": torch.ones(1) for name in raw}
    assert list(normalize(flat)) == [f"state.{name}.m" for name in ADAPTED.values()]
    assert list(normalize(raw, names=raw)) == list(raw)


def test_several_adapters_keep_their_names() -> None:
    raw = {f"base_model.model.q.lora_A.{adapter}.weight": torch.ones(1) for adapter in ("en", "de")}
    assert list(normalize(raw)) == ["q.lora_A.en.weight", "q.lora_A.de.weight"]
    plain = {"q.lora_A.en.weight": torch.ones(1), "base_model.model.w": torch.ones(1)}
    assert list(normalize(plain)) == list(plain)


class OwnStateDict(nn.Module):
    """Reads and writes its own state dict, with layers that it once called `old`."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(4))
        for i, layer in enumerate(self.layers):
            nn.init.constant_(layer.weight, float(first + i))

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return super().state_dict(*args, **options)

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        return super().load_state_dict({k.replace("old", "weight"): v for k, v in state_dict.items()}, *args, **options)


def numbers(state: Any) -> dict[str, float]:
    return {name: value.item() for name, value in state.items()}


@pytest.mark.parametrize("kind", [OwnStateDict, lambda first: nn.ModuleDict({"layers": OwnStateDict(first).layers})])
def test_submodules_and_modules_that_load_themselves_in_numbered_stages(kind: Any) -> None:
    model = kind(2)
    stage = Stage(model, {"layers": 2})
    layers = list(model.get_submodule("layers").children())
    assert numbers(get_model_state_dict(stage)) == {f"layers.{i}.weight": i for i in range(2, 6)}
    assert numbers(get_model_state_dict(stage, submodules={layers[2]})) == {"layers.4.weight": 4}
    loose = StateDictOptions(strict=False)
    set_model_state_dict(stage, {layers[2]: {"weight": torch.full((1, 1), 9.0)}}, options=loose)
    assert [layer.weight.item() for layer in layers] == [2, 3, 9, 5]
    whole = {f"layers.{i}.weight": torch.full((1, 1), 10.0 + i) for i in range(8)}
    report = set_model_state_dict(stage, whole, options=loose)
    assert [layer.weight.item() for layer in layers] == [12, 13, 14, 15]
    assert (report.missing, sorted(report.unexpected)) == ((), [f"layers.{i}.weight" for i in (0, 1, 6, 7)])
    if isinstance(model, OwnStateDict):
        renamed = {f"layers.{i}.{'old' if i == 3 else 'weight'}": torch.full((1, 1), 20.0 + i) for i in range(2, 6)}
        assert set_model_state_dict(stage, renamed).missing == ()
        assert [layer.weight.item() for layer in layers] == [22, 23, 24, 25]


def test_groups_by_position_are_normalized() -> None:
    raw = {"state": {"module.a": {"step": 1}}, "param_groups": {"0": {"params": ["module.a"], "lr": 0.1}}}
    wanted = {"state": {"a": {"step": 1}}, "param_groups": [{"params": ["a"], "lr": 0.1}]}
    assert normalize(raw) == wanted
