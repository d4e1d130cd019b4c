"""Model state dicts: what is in them, what is refused, and what the report of a set says."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import state_dict as theirs

import reshard
from reshard.errors import KeyMismatchError, NormalizationError
from reshard.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from tests.reshard.state_dict import zoo
from tests.same import assert_same, same
from tests.torch_releases import HAS_E8M0, requires

LENIENT = StateDictOptions(strict=False)


class Growing(nn.Module):
    """Extra state whose size differs between a fresh module and a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.amax: list[float] = []

    def get_extra_state(self) -> Any:
        return torch.tensor(self.amax)

    def set_extra_state(self, state: Any) -> None:
        self.amax = state.tolist()


def test_extra_state_may_have_grown() -> None:
    trained, fresh = checkpoint_wrapper(Growing()), Growing()
    trained.amax.extend([1.0, 2.0, 3.0])
    trained._checkpoint_wrapped_module.amax = [1.0, 2.0, 3.0]
    state = get_model_state_dict(trained)
    assert list(state) == ["_extra_state", "linear.weight", "linear.bias"]
    set_model_state_dict(fresh, state)
    assert fresh.amax == [1.0, 2.0, 3.0]
    del state["_extra_state"]
    with pytest.raises(KeyMismatchError, match="Missing key: _extra_state"):
        set_model_state_dict(fresh, state)


def test_one_name_of_a_tied_tensor_is_enough_and_tying_lasts() -> None:
    source, target = zoo.make(0, tied=True), zoo.make(1, tied=True)
    state = get_model_state_dict(source)
    assert_same(state, dict(source.state_dict()))
    for gone in ("head.weight", "embed.weight"):
        report = set_model_state_dict(target, {name: t for name, t in state.items() if name != gone})
        assert report.missing == ()
        assert target.head.weight is target.embed.weight
        assert_same(dict(target.state_dict()), state)
    without = {name: t for name, t in state.items() if name not in ("head.weight", "embed.weight")}
    with pytest.raises(KeyMismatchError, match=r"Missing key: embed\.weight"):
        set_model_state_dict(target, without)
    for other in (state["head.weight"] + 1, None, [1, 2]):
        with pytest.raises(KeyMismatchError, match="tied with"):
            set_model_state_dict(target, {**state, "head.weight": other})


class Tied(nn.Module):
    """Two names of one parameter, which has an attribute; and on request, modules that load their own state."""

    def __init__(self, by_itself: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.b.weight = self.a.weight
        self.a.weight.mark = "kept"
        if by_itself:
            self.register_load_state_dict_pre_hook(lambda *_: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


@pytest.mark.parametrize("by_itself", [False, True])
@pytest.mark.parametrize("with_optimizer", [False, True])
def test_an_optimizer_keeps_parameters_that_were_on_the_meta_device(by_itself: bool, with_optimizer: bool) -> None:
    model = Tied(by_itself)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved, saved_state = get_state_dict(model, optimizer)
    with torch.device("meta"):
        again = Tied(by_itself)
    other = torch.optim.AdamW(again.parameters(), lr=1.0)
    if with_optimizer:
        set_state_dict(again, other, model_state_dict=saved, optim_state_dict=saved_state)
    else:
        set_model_state_dict(again, saved)

    assert [id(p) for p in other.param_groups[0]["params"]] == [id(p) for p in again.parameters()]
    assert again.a.weight is again.b.weight
    assert again.a.weight.mark == "kept"
    assert_same(dict(again.named_parameters()), dict(model.named_parameters()))
    before = again.a.weight.detach().clone()
    again(torch.ones(1, 2)).sum().backward()
    other.step()
    assert not torch.equal(again.a.weight, before)


def test_a_parameter_that_cannot_be_exchanged_is_not_said_to_be_set() -> None:
    """A weak reference to it keeps torch from that, so the model gets a new one, which the optimizer does not have."""
    model = nn.Linear(2, 2)
    saved, saved_state = get_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.1))
    again = nn.Linear(2, 2, device="meta")
    other = torch.optim.SGD(again.parameters(), lr=0.1)
    kept = weakref.ref(again.weight)
    with pytest.raises(NormalizationError, match=r"new parameter 'weight'.*The model is set, but the optimizer is not"):
        set_state_dict(again, other, model_state_dict=saved, optim_state_dict=saved_state)
    assert same(again.weight, model.weight)
    assert kept() is other.param_groups[0]["params"][0]


def test_tying_lasts_through_the_meta_device() -> None:
    state = get_model_state_dict(zoo.make(0, tied=True))
    with torch.device("meta"):
        model = zoo.Net(tied=True)
    report = set_model_state_dict(model, state)
    assert model.head.weight is model.embed.weight
    assert_same(dict(model.state_dict()), state)
    # the rotary-table kind of buffer: outside every checkpoint, and nothing has made it
    assert report.uninitialized == report.untouched == ("layers.0.scratch", "layers.1.scratch")


def test_a_module_used_twice_has_both_names() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    state = get_model_state_dict(model)
    assert list(state) == list(model.state_dict()) == ["a.weight", "a.bias", "b.0.weight", "b.0.bias"]
    target = nn.ModuleDict({"a": (again := nn.Linear(2, 2)), "b": nn.Sequential(again)})
    set_model_state_dict(target, {"b.0.weight": state["a.weight"], "a.bias": state["a.bias"]})
    assert_same(dict(target.state_dict()), state)


def test_frozen_parameters_and_adapters() -> None:
    """A subset taken on purpose goes back under the same option, and is strict about all else."""
    options = StateDictOptions(ignore_frozen_params=True)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    for part in (0, 1):
        model[part].requires_grad_(False)
    state = get_model_state_dict(model, options=options)
    assert list(state) == ["1.running_mean", "1.running_var", "1.num_batches_tracked", "2.weight", "2.bias"]
    target = copy.deepcopy(model)
    nn.init.zeros_(target[2].weight)
    report = set_model_state_dict(target, state, options=options)
    assert report.missing == ()
    assert report.untouched == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert_same(dict(target.state_dict()), dict(model.state_dict()))
    with pytest.raises(KeyMismatchError, match="ignore_frozen_params=True allows that"):
        set_model_state_dict(target, state)
    del state["2.bias"]
    with pytest.raises(KeyMismatchError, match=r"Missing key: 2\.bias"):
        set_model_state_dict(target, state, options=options)


class Packed(nn.Linear):
    """Saves the scale of its weight, and takes none back, as bitsandbytes' layers of 4 bits."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.scale"] = torch.ones(2)


def test_what_a_module_saves_of_a_frozen_parameter_is_frozen_too() -> None:
    options = StateDictOptions(ignore_frozen_params=True)
    model = nn.Sequential(Packed(2, 2, bias=False), nn.Linear(2, 2))
    assert "0.weight.scale" in get_model_state_dict(model, options=options)
    model[0].requires_grad_(False)
    state = get_model_state_dict(model, options=options)
    assert list(state) == ["1.weight", "1.bias"]
    target = copy.deepcopy(model)
    nn.init.zeros_(target[1].weight)
    assert set_model_state_dict(target, state, options=options).missing == ()
    assert_same(dict(target.state_dict()), dict(model.state_dict()))


class InParts(nn.Linear):
    """Saves its weight in two parts, as quanto's layers."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        weight = destination.pop(f"{prefix}weight")
        destination |= {f"{prefix}weight._data": weight[:1].clone(), f"{prefix}weight._scale": weight[1:].clone()}

    def _load_from_state_dict(self, state: dict, prefix: str, *args: Any) -> None:
        parts = [state.pop(f"{prefix}weight.{name}", torch.zeros(1, 2)) for name in ("_data", "_scale")]
        state[f"{prefix}weight"] = torch.cat(parts)
        super()._load_from_state_dict(state, prefix, *args)


def test_a_parameter_that_is_saved_in_parts_is_not_called_untouched() -> None:
    model, target = nn.Sequential(InParts(2, 2)), nn.Sequential(InParts(2, 2))
    state = get_model_state_dict(model)
    assert list(state) == ["0.bias", "0.weight._data", "0.weight._scale"]
    assert set_model_state_dict(target, state).untouched == ()
    assert_same(target[0].weight.data, model[0].weight.data)
    report = set_model_state_dict(target, {"0.bias": state["0.bias"]}, options=LENIENT)
    assert report.untouched == ("0.weight",)
    assert report.missing == ("0.weight._data", "0.weight._scale")
    model = nn.Sequential(Packed(2, 2, bias=False))
    report = set_model_state_dict(model, {"0.weight.scale": torch.ones(2)}, options=LENIENT)
    assert report.untouched == report.missing == ("0.weight",)


def test_a_module_that_refuses_what_it_saves_is_named() -> None:
    model = nn.Sequential(Packed(2, 2), nn.Linear(2, 2))
    state = get_model_state_dict(model)
    told = (
        r"Unexpected key: 0\.weight\.scale\n(.*\n)*Packed saves '0\.weight\.scale', and its load_state_dict refuses it"
    )
    with pytest.raises(KeyMismatchError, match=told):
        set_model_state_dict(model, state)


def test_everything_wrong_is_said_at_once_and_nothing_is_changed() -> None:
    model = zoo.make(0)
    state = {name: t.clone() for name, t in get_model_state_dict(zoo.make(1)).items()}
    state["head.weight"] = torch.ones(3, 3)
    state["layers.0.seen"] = torch.tensor(0.5)
    state["layers.0.up.wieght"] = state.pop("layers.0.up.weight")
    state["module.x"] = torch.ones(1)
    del state["layers.1.up.bias"]
    before, kept = copy.deepcopy(model.state_dict()), copy.deepcopy(state)
    with pytest.raises(KeyMismatchError) as caught:
        set_model_state_dict(model, state)
    text = str(caught.value)
    for line in (
        "Missing key: layers.0.up.weight",
        "Missing key: layers.1.up.bias",
        "Unexpected key: layers.0.up.wieght (did you mean layers.0.up.weight?)",
        "Mismatched: head.weight: expected shape (11, 6), found (3, 3)",
        "Mismatched: layers.0.seen: expected torch.int64, found torch.float32",
        "reshard.normalize",
    ):
        assert line in text
    assert_same(dict(model.state_dict()), dict(before))
    assert_same(state, kept)


def test_a_name_that_was_tied_to_one_that_the_model_has_is_told_as_such() -> None:
    tied, apart = nn.Module(), nn.Module()
    tied.a, apart.a = nn.Linear(2, 2), nn.Linear(2, 2)
    tied.b, tied.c = tied.a, nn.Linear(2, 2, bias=False)
    state = get_model_state_dict(tied)
    with pytest.raises(KeyMismatchError, match=r"Unexpected key: b\.bias, tied to a\.bias in the dict and not here\n"):
        set_model_state_dict(apart, state)
    report = set_model_state_dict(apart, state, options=LENIENT)
    assert report.unexpected == ("b.weight", "b.bias", "c.weight")
    assert report.aliases == ("b.weight", "b.bias")


def test_report_of_a_lenient_set() -> None:
    model = zoo.make(0).to(torch.bfloat16)
    state = {name: t.clone() for name, t in get_model_state_dict(zoo.make(1)).items()}
    del state["layers.1.up.bias"]
    state["extra"] = torch.ones(1)
    state["layers.0.seen"] = state["layers.0.seen"].reshape(1)
    report = set_model_state_dict(model, state, options=LENIENT)
    missing, unexpected = report
    assert (missing, unexpected) == (["layers.1.up.bias"], ["extra"])
    assert report.missing_keys == missing
    assert report.reshaped == ("layers.0.seen",)
    assert str(report.cast[0]) == "embed.weight: float32 -> bfloat16"
    assert report.untouched == ("layers.0.scratch", "layers.1.scratch", "layers.1.up.bias")
    assert report.uninitialized == ()
    assert torch.equal(model.head.weight, state["head.weight"].bfloat16())


@pytest.mark.not_simulated("what is compiled would trace its kernels, which are Python")
def test_inputs_come_back_untouched_and_share_no_memory() -> None:
    """Also where torch's own setter renames the caller's keys: a compiled child."""
    model = nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager"), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    given = copy.deepcopy(get_state_dict(model, optimizer))
    kept = copy.deepcopy(given)
    other = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    other_optimizer = torch.optim.AdamW(other.parameters())
    set_state_dict(other, other_optimizer, model_state_dict=given[0], optim_state_dict=given[1])
    assert_same(given, kept)
    other(torch.randn(4, 2)).sum().backward()
    other_optimizer.step()
    assert_same(given, kept)


class Keeping(nn.Module):
    """Its extra state is the object that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.history = [0]

    def get_extra_state(self) -> Any:
        return self.history

    def set_extra_state(self, state: Any) -> None:
        self.history = state


@pytest.mark.parametrize("hooked", [False, True])
def test_a_module_does_not_get_the_extra_state_of_the_dict_itself(hooked: bool) -> None:
    model, given = Keeping(), {"_extra_state": [1, 2]}
    if hooked:
        model.register_load_state_dict_pre_hook(lambda *_: None)
    set_model_state_dict(model, given)
    assert model.history == [1, 2]
    model.history.append(3)
    assert given == {"_extra_state": [1, 2]}
    set_model_state_dict(model, {"_extra_state": [torch.ones(1, requires_grad=True) * 2]})  # of a forward pass
    assert model.history == [2.0]


class HalfOnMeta(nn.Module):
    """Only its own method loads it, and only some of it is on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2, device="meta"))
        self.bias = nn.Parameter(torch.zeros(2))
        self.register_buffer("mean", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("lost", torch.zeros(1, device="meta"), persistent=False)
        self.register_load_state_dict_pre_hook(lambda *_: None)


def test_a_module_that_loads_itself_and_is_partly_on_the_meta_device_gets_copies() -> None:
    model = HalfOnMeta()
    given = {name: torch.full(t.shape, 3.0) for name, t in model.state_dict().items()}
    kept, bias = copy.deepcopy(given), model.bias
    set_model_state_dict(model, given)
    assert_same(given, kept)
    assert_same(dict(model.state_dict()), {**kept, "mean": kept["mean"].double()})
    assert model.bias is bias
    with torch.no_grad():
        model.weight.add_(1.0), model.bias.add_(1.0)
        model.mean.add_(1.0)
    assert_same(given, kept)


def test_a_refused_set_leaves_modules_that_load_themselves_on_the_meta_device() -> None:
    model = nn.Sequential(HalfOnMeta(), nn.Linear(2, 2))
    with pytest.raises(KeyMismatchError, match=r"Missing key: 1\.weight"):
        set_model_state_dict(model, {f"0.{name}": torch.ones(t.shape) for name, t in model[0].state_dict().items()})
    assert model[0].weight.is_meta


class Renaming(nn.Module):
    """Hooks and a saved name that is not the live one."""

    def __init__(self) -> None:
        super().__init__()
        self.live = nn.Linear(2, 2)
        self.register_state_dict_post_hook(self._save)
        self.register_load_state_dict_pre_hook(self._load)

    @staticmethod
    def _save(module: nn.Module, state: dict, prefix: str, _: Any) -> None:
        state[f"{prefix}old.weight"] = state.pop(f"{prefix}live.weight")

    @staticmethod
    def _load(module: nn.Module, state: dict, prefix: str, *_: Any) -> None:
        state[f"{prefix}live.weight"] = state.pop(f"{prefix}old.weight")


class Override(nn.Module):
    """A module that writes its own state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {
            f"{kwargs.get('prefix', '')}packed": torch.cat([self.inner.weight.data.flatten(), self.inner.bias.data])
        }

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> None:
        self.inner.weight.data.copy_(state["packed"][:4].view(2, 2))
        self.inner.bias.data.copy_(state["packed"][4:])


@pytest.mark.parametrize("wrap", [lambda m: m, checkpoint_wrapper, lambda m: torch.compile(m, backend="eager")])
def test_hooks_and_overrides_of_the_user_are_called(wrap: Any) -> None:
    model = wrap(nn.ModuleDict({"a": wrap(Renaming()), "b": wrap(Override()), "c": nn.Linear(2, 2)}))
    state = copy.deepcopy(get_model_state_dict(model))
    assert sorted(state) == ["a.live.bias", "a.old.weight", "b.packed", "c.bias", "c.weight"]
    kept = copy.deepcopy(state)
    target = nn.ModuleDict({"a": Renaming(), "b": Override(), "c": nn.Linear(2, 2)})
    report = set_model_state_dict(target, state)
    assert report.missing == report.unexpected == ()
    assert_same(get_model_state_dict(target), kept)
    assert_same(state, kept)
    del state["c.bias"]
    with pytest.raises(KeyMismatchError, match=r"Missing key: c\.bias"):
        set_model_state_dict(target, state)


class Versioned(nn.Module):
    """Its names have changed once, and it refuses what it takes for older than any version, as MNASNet of torchvision
    does."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.new = nn.Linear(2, 2)

    def _load_from_state_dict(self, state: dict, prefix: str, metadata: dict, *args: Any) -> None:
        if metadata.get("version") is None:
            if f"{prefix}old.weight" not in state:
                raise ValueError("version should be set")
            state[f"{prefix}new.weight"] = state.pop(f"{prefix}old.weight")
        super()._load_from_state_dict(state, prefix, metadata, *args)


def test_values_under_the_names_of_a_module_have_its_version_and_others_none() -> None:
    model, target = nn.Sequential(Versioned(), nn.Linear(2, 2)), nn.Sequential(Versioned(), nn.Linear(2, 2))
    state = get_model_state_dict(model)
    set_model_state_dict(target, state)
    assert_same(get_model_state_dict(target), state)
    old = {name.replace("0.new.weight", "0.old.weight"): value + 1 for name, value in state.items()}
    set_model_state_dict(target, old)
    assert_same(list(get_model_state_dict(target).values()), list(old.values()))


def test_places_that_show_their_memory_conjugated_or_negated_are_filled() -> None:
    model, target = nn.Module(), nn.Module()
    for module in (model, target):
        for name in ("plain", "conjugated"):
            module.register_buffer(name, torch.randn(3, dtype=torch.complex64))
        module.register_buffer("negated", torch.randn(3))
    target.conjugated = target.conjugated.conj()
    target.negated = torch.randn(3, dtype=torch.complex64).conj().imag
    assert target.negated.is_neg()
    state = get_model_state_dict(model)
    set_model_state_dict(target, state)
    assert_same(get_model_state_dict(target), state)
    set_model_state_dict(model, get_model_state_dict(target))
    assert_same(get_model_state_dict(target), get_model_state_dict(model))


class Fussy(Override):
    """Refuses, in one way or another, when it has written already."""

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        super().load_state_dict(state)
        if state["packed"][0] == 1:
            raise RuntimeError("not on a Monday")
        return ["lost"], []


@pytest.mark.parametrize(("first", "error"), [(1.0, RuntimeError), (2.0, KeyMismatchError)])
def test_a_module_that_refuses_late_is_named_with_all_that_is_written_by_then(first: float, error: type) -> None:
    model = nn.ModuleDict({"a": Override(), "b": Fussy(), "c": nn.Linear(2, 2)})
    state = {"a.packed": torch.ones(6), "b.packed": torch.full((6,), first)}
    state |= {"c.weight": torch.ones(2, 2), "c.bias": torch.ones(2)}
    before = copy.deepcopy(model["c"].state_dict())
    with pytest.raises(error) as caught:
        set_model_state_dict(model, state)
    said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "may have been written to already: 'a', 'b'; nothing else has been" in said
    assert_same(model["c"].state_dict(), before)


class Doubled(torch.Tensor):
    """A subclass of two plain tensors that knows no copy_."""

    def __new__(cls, a: torch.Tensor, b: torch.Tensor) -> Doubled:
        made = torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)
        made.a, made.b = a, b
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["a", "b"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict, _: Any, *__: Any) -> Doubled:
        return cls(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].a, args[0].b)
        raise NotImplementedError(f"{func}")

    def __repr__(self) -> str:
        return "Doubled"


def test_subclasses_that_flatten_are_copied_by_their_inner_tensors() -> None:
    def make(value: float) -> nn.Module:
        module = nn.Module()
        inner = Doubled(torch.full((3,), value), torch.full((3,), value + 1))
        module.register_parameter("w", nn.Parameter(inner, requires_grad=False))
        return module

    source, target = make(1.0), make(5.0)
    set_model_state_dict(target, get_model_state_dict(source))
    assert torch.equal(target.w.a, torch.full((3,), 1.0))
    assert torch.equal(target.w.b, torch.full((3,), 2.0))
    assert target.w.a is not source.w.a


def test_submodules_and_the_form_by_module() -> None:
    model = checkpoint_wrapper(zoo.make(0))
    inner = model._checkpoint_wrapped_module
    optimizer = zoo.OPTIMIZERS["adamw"](model.parameters())
    zoo.train(model, optimizer)
    part = get_model_state_dict(model, submodules={inner.layers[1].up})
    assert list(part) == ["layers.1.up.weight", "layers.1.up.bias"]
    short = get_model_state_dict(
        model, submodules={inner.layers[1].up}, options=StateDictOptions(keep_submodule_prefixes=False)
    )
    assert list(short) == ["weight", "bias"]
    state = get_optimizer_state_dict(model, optimizer, submodules={inner.layers[1].up})
    assert list(state["state"]) == state["param_groups"][0]["params"] == list(part)
    target = zoo.make(1)
    set_model_state_dict(target, {target.layers[1].up: short}, options=LENIENT)
    assert torch.equal(target.layers[1].up.weight, part["layers.1.up.weight"])


def test_a_submodule_with_a_tied_parameter_has_its_state() -> None:
    model = zoo.make(0, tied=True)
    optimizer = torch.optim.AdamW(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    whole = get_optimizer_state_dict(model, optimizer)["state"]["embed.weight"]
    part = get_optimizer_state_dict(model, optimizer, submodules={model.head})
    (name,) = get_model_state_dict(model, submodules={model.head})
    assert_same(part["state"], {name: whole})
    assert part["param_groups"][0]["params"] == [name] == ["head.weight"]


def test_submodules_that_have_a_name_in_common_are_refused_without_prefixes() -> None:
    model = zoo.make(0)
    optimizer = zoo.OPTIMIZERS["adamw"](model.parameters())
    zoo.train(model, optimizer)
    both, options = {model.layers[0], model.layers[1]}, StateDictOptions(keep_submodule_prefixes=False)
    for get in (
        lambda: get_model_state_dict(model, submodules=both, options=options),
        lambda: get_optimizer_state_dict(model, optimizer, submodules=both, options=options),
    ):
        with pytest.raises(NormalizationError, match=r"'layers\.0\.(.*)' and 'layers\.1\.\1' .* called '\1'"):
            get()
    nested = get_model_state_dict(model, submodules={model.layers[0], model.layers[0].up}, options=options)
    assert nested["up.weight"] is nested["weight"]


def test_options_of_torch_are_understood_and_results_are_alike() -> None:
    model = zoo.make(0, tied=True)
    optimizer = zoo.OPTIMIZERS["adamw"](model.parameters())
    zoo.train(model, optimizer)
    for flat in (False, True):
        options = theirs.StateDictOptions(flatten_optimizer_state_dict=flat)
        wanted = theirs.get_state_dict(model, optimizer, options=options)
        assert_same(get_state_dict(model, optimizer, options=options), wanted)
        target = zoo.make(1, tied=True)
        target_optimizer = zoo.OPTIMIZERS["adamw"](target.parameters())
        set_state_dict(
            target, target_optimizer, model_state_dict=wanted[0], optim_state_dict=wanted[1], options=options
        )
        assert_same(theirs.get_state_dict(target, target_optimizer, options=options), wanted)
    with pytest.raises(NormalizationError, match="StateDictOptions"):
        get_model_state_dict(model, options=3)


class Hidden(nn.Module):
    """Declares that its child `inner` leaves no trace in names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"mlp": nn.Linear(2, 2)})

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"mlp": "inner"}

    def mine(self) -> dict[str, str]:
        return {"mlp": "inner"}


def test_declared_hidden_children_under_either_method_name() -> None:
    model = nn.Sequential(Hidden())
    assert list(get_model_state_dict(model)) == ["0.mlp.weight", "0.mlp.bias"]
    options = StateDictOptions(dsd_fqn_modifiers="mine")
    assert list(get_model_state_dict(model, options=options)) == ["0.mlp.weight", "0.mlp.bias"]
    options = StateDictOptions(dsd_fqn_modifiers="absent")
    assert list(get_model_state_dict(model, options=options)) == ["0.inner.mlp.weight", "0.inner.mlp.bias"]
    set_model_state_dict(model, get_model_state_dict(nn.Sequential(Hidden())))


def test_lazy_modules_take_the_shape_they_are_given() -> None:
    source, target = nn.Sequential(nn.Linear(3, 2)), nn.Sequential(nn.LazyLinear(2))
    set_model_state_dict(target, get_model_state_dict(source))
    assert_same(dict(target.state_dict()), dict(source.state_dict()))
    assert list(get_model_state_dict(nn.Sequential(nn.LazyLinear(2)))) == ["0.weight", "0.bias"]


def test_a_report_says_what_state_dicts_leave_out_apart_from_what_is_missing() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    state = get_model_state_dict(model)
    assert repr(set_model_state_dict(model, state)) == "SetReport(all set)"
    model.register_buffer("tmp", torch.ones(1), persistent=False)
    report = set_model_state_dict(model, state)
    assert repr(report) == "SetReport(all set; outside state dicts, unchanged: 1 ('tmp'))"
    assert report.untouched == ("tmp",)
    report = set_model_state_dict(model, {"0.weight": state["0.weight"]}, options=LENIENT)
    assert repr(report) == "SetReport(missing 1 ('0.bias'), untouched 2 ('tmp', '0.bias'))"


def _with_prefix(state: dict[str, Any]) -> dict[str, Any]:
    return {f"model.{name}": value for name, value in state.items()}


def test_what_cannot_be_copied_is_refused_before_anything_is_written() -> None:
    model = torch.nn.Linear(2, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given = {"bias": torch.ones(2), "weight": torch.ones(2, 2).to_sparse()}
    with pytest.raises(KeyMismatchError, match=r"weight: is torch\.sparse_coo in the dict, .* use \.to_dense\(\)"):
        set_model_state_dict(model, given)
    assert_same(dict(model.state_dict()), before)
    with pytest.raises(NormalizationError, match=r"must be a mapping, got list. .* reshard.load\(state, path\)$"):
        set_model_state_dict(model, [1])
    with pytest.raises(NormalizationError, match=r"must be a mapping, got str. .* reshard.load\(state, path\)$"):
        reshard.set_optimizer_state_dict(model, torch.optim.SGD(model.parameters()), "path")


@requires(HAS_E8M0, "lacks this dtype")
def test_a_cast_that_loses_signs_is_refused() -> None:
    """torch makes 2.0 of -2.0, and a tiny number of 0.0."""
    model = nn.Module()
    model.register_buffer("scale", torch.ones(2).to(torch.float8_e8m0fnu))
    with pytest.raises(
        KeyMismatchError, match=r"scale: expected torch\.float8_e8m0fnu, .* cannot hold 0 or negative numbers"
    ):
        set_model_state_dict(model, {"scale": torch.tensor([-2.0, 0.0])})


def test_codes_of_a_quantized_weight_are_no_values_of_it() -> None:
    model = nn.Linear(2, 2, bias=False)
    given = {"weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "weight_scale_inv": torch.full((1, 1), 0.5)}
    with pytest.raises(
        KeyMismatchError, match="weight: its values must be multiplied by 'weight_scale_inv': dequantize it"
    ):
        set_model_state_dict(model, given, options=LENIENT)


def test_a_report_says_that_an_empty_dict_left_the_model_as_it_is() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    of_model, of_optimizer = reshard.get_state_dict(model, optimizer)
    optim = "OptimizerReport(without_state 2 ('weight', 'bias'))"
    for given, words in (({}, f"SetReport(model unchanged: empty dict, {optim})"), (of_model, "")):
        report = reshard.set_state_dict(model, optimizer, model_state_dict=given, optim_state_dict=of_optimizer)
        assert report.model_unchanged == bool(words)
        assert repr(report) == (words or f"SetReport(all set, {optim})")


@pytest.mark.parametrize(("nest", "head"), [(lambda state: {"model": state}, "model"), (_with_prefix, "model.")])
def test_a_checkpoint_in_place_of_its_model(nest: Any, head: str) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(
        KeyMismatchError, match=f"\n  fix: pass what is below '{head}', under names without this prefix\n"
    ):
        set_model_state_dict(model, nest(model.state_dict()))


def test_a_nested_dict_in_place_of_a_flat_one() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(KeyMismatchError, match=r"\n  fix: flatten nested dicts, to names such as '0\.weight'\n"):
        set_model_state_dict(model, {"0": model[0].state_dict()})


def test_the_state_dict_of_an_optimizer_is_named_so() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    of_model, of_optimizer = reshard.get_state_dict(model, optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    with pytest.raises(
        NormalizationError, match=r"an optimizer has: model_state_dict and optim_state_dict are swapped$"
    ):
        reshard.set_state_dict(model, optimizer, model_state_dict=of_optimizer, optim_state_dict=of_model)
    with pytest.raises(NormalizationError, match=r"an optimizer has: use set_optimizer_state_dict$"):
        set_model_state_dict(model, of_optimizer)
    assert_same(dict(model.state_dict()), before)


def test_many_names_are_not_all_listed() -> None:
    with pytest.raises(
        KeyMismatchError, match=r"Unexpected key: x19\n  Unexpected key: and 980 more\n  fix: pass Stat"
    ):
        set_model_state_dict(torch.nn.ReLU(), {f"x{i}": 1 for i in range(1000)})


def test_a_model_is_not_set_from_lazy_tensors(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    reshard.save({"model": model.state_dict()}, tmp_path)
    state = reshard.open(tmp_path).normalized()["model"]
    with pytest.raises(
        KeyMismatchError, match=r"(?s)found LazyTensor\('weight', .*read lazy tensors first: {name: ten"
    ):
        set_model_state_dict(model, state)
    set_model_state_dict(model, {name: tensor[...] for name, tensor in state.items()})


def test_a_buffer_with_several_elements_at_one_address_is_refused_before_anything_is_written() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.register_buffer("mask", torch.ones(1, 3).expand(2, 3))
    model.register_buffer("one", torch.ones(1, 1).expand(1, 1))
    model.register_buffer("empty", torch.ones(1, 0).expand(2, 0))  # as a DTensor's local tensor can be
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given = {name: value + 5 for name, value in reshard.get_model_state_dict(model).items()}

    with pytest.raises(KeyMismatchError, match=r"mask: has several elements at one memory address") as caught:
        reshard.set_model_state_dict(model, given)

    assert "empty: " not in str(caught.value)
    assert same(before, model.state_dict())
    model.mask = model.mask.clone()
    reshard.set_model_state_dict(model, given)
    assert same(given, model.state_dict())
