"""Memory for a fresh optimizer's state: from what the checkpoint holds, and with nothing stepped."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import reshard
from reshard.errors import KeyMismatchError
from tests import gloo


def _model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def _trained(make=torch.optim.AdamW, frozen: str | None = None):
    model = _model()
    if frozen is not None:
        model.get_parameter(frozen).requires_grad_(False)
    optimizer = make(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def _save(path, model, optimizer, **more):
    model_state, optim_state = reshard.get_state_dict(model, optimizer)
    reshard.save({"model": model_state, "optim": optim_state, **more}, path)
    return optim_state


def _never(*args, **kwargs):
    raise AssertionError("the optimizer was stepped")


OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": torch.optim.Adagrad,  # has state from its making on
    "adafactor": torch.optim.Adafactor,  # state of other shapes than the parameter's
    "stateless": lambda p: torch.optim.SGD(p, lr=0.1),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_fresh_optimizer_gets_all_that_was_saved(kind, tmp_path) -> None:
    model, optimizer = _trained(OPTIMIZERS[kind])
    saved = _save(tmp_path, model, optimizer)
    fresh = _model(1)
    other = OPTIMIZERS[kind](fresh.parameters())
    other.step = _never
    before = copy.deepcopy(other.state_dict())

    state = {
        "model": reshard.get_model_state_dict(fresh),
        "optim": reshard.optimizer_destinations(fresh, other, tmp_path),
    }

    assert str(other.state_dict()) == str(before)
    reshard.load(state, tmp_path)
    reshard.set_state_dict(fresh, other, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert reshard.compare({"o": reshard.get_optimizer_state_dict(fresh, other)}, {"o": saved}).ok


def test_a_parameter_saved_without_state_stays_without(tmp_path) -> None:
    _save(tmp_path, *_trained(frozen="0.weight"))
    model = _model()

    state = reshard.optimizer_destinations(model, torch.optim.AdamW(model.parameters()), tmp_path)["state"]

    assert sorted(state) == ["0.bias", "1.bias", "1.weight"]


def test_a_parameter_that_the_model_lacks_has_no_place(tmp_path) -> None:
    _save(tmp_path, *_trained())
    model = _model()[:1]

    state = reshard.optimizer_destinations(model, torch.optim.AdamW(model.parameters()), tmp_path)["state"]

    assert sorted(state) == ["0.bias", "0.weight"]


def test_the_saved_dtype_is_kept(tmp_path) -> None:
    _save(tmp_path, *_trained())
    model = _model().to(torch.bfloat16)

    made = reshard.optimizer_destinations(model, torch.optim.AdamW(model.parameters()), tmp_path)

    assert made["state"]["0.weight"]["exp_avg"].dtype == torch.float32


def test_other_prefixes(tmp_path) -> None:
    model, optimizer = _trained()
    state = reshard.get_optimizer_state_dict(model, optimizer)
    reshard.save({"train": {"opt": state}}, tmp_path / "deep")
    reshard.save(state, tmp_path / "bare")

    for path, prefix in (("deep", "train.opt"), ("bare", "")):
        made = reshard.optimizer_destinations(model, optimizer, tmp_path / path, prefix=prefix)
        assert sorted(made["state"]) == sorted(state["state"])


def test_a_wrong_prefix_is_an_error_that_names_what_there_is(tmp_path) -> None:
    model, optimizer = _trained()
    _save(tmp_path, model, optimizer)

    with pytest.raises(KeyMismatchError, match="nothing under 'optimizer'; its keys begin with model, optim"):
        reshard.optimizer_destinations(model, optimizer, tmp_path, prefix="optimizer")


def _sharded_places(path: str) -> list[tuple[str, tuple[int, ...]]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(_model(), mesh=init_device_mesh("cpu", (2,)))
    made = reshard.optimizer_destinations(model, torch.optim.AdamW(model.parameters()), path)
    state = made["state"]["0.weight"]
    return [(type(value).__name__, tuple(value.shape)) for value in (state["exp_avg"], state["step"])]


@pytest.mark.gloo
def test_state_of_the_parameters_shape_is_sharded_like_it(tmp_path) -> None:
    _save(tmp_path, *_trained())

    places = gloo.run(_sharded_places, 2, str(tmp_path))

    assert places == [[("DTensor", (4, 3)), ("Tensor", ())]] * 2


FLAT = reshard.StateDictOptions(flatten_optimizer_state_dict=True)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "adafactor"])
def test_the_flat_form_gets_places_of_the_flat_form(kind, tmp_path) -> None:
    model, optimizer = _trained(OPTIMIZERS[kind])
    saved = reshard.get_optimizer_state_dict(model, optimizer, options=FLAT)
    reshard.save({"optim": saved}, tmp_path)
    fresh = _model(1)
    other = OPTIMIZERS[kind](fresh.parameters())
    other.param_groups[0]["lr"] = 9.0
    other.step = _never

    places = reshard.optimizer_destinations(fresh, other, tmp_path)
    reshard.load({"optim": places}, tmp_path)
    reshard.set_optimizer_state_dict(fresh, other, places)

    assert places.keys() == saved.keys()
    assert reshard.compare({"o": reshard.get_optimizer_state_dict(fresh, other, options=FLAT)}, {"o": saved}).ok


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("saved", [FLAT, None])
@pytest.mark.parametrize("is_trained", [True, False])
def test_the_error_of_the_other_form_leads_to_the_places(make, saved, is_trained, tmp_path) -> None:
    reshard.save({"optim": reshard.get_optimizer_state_dict(*_trained(make), options=saved)}, tmp_path)
    fresh = _model(1)
    pair = _trained(make) if is_trained else (fresh, make(fresh.parameters()))

    with pytest.raises(KeyMismatchError, match=r"fix: only one side .* load into reshard.optimizer_destinations\("):
        reshard.load({"optim": reshard.get_optimizer_state_dict(*pair, options=None if saved else FLAT)}, tmp_path)
    assert reshard.load({"optim": reshard.optimizer_destinations(*pair, tmp_path)}, tmp_path).ok


def test_flat_settings_of_an_optimizer_without_state_are_refused_before_the_model_changes(tmp_path) -> None:
    model, optimizer = _trained(torch.optim.SGD)
    saved = reshard.get_state_dict(model, optimizer, options=FLAT)
    reshard.save({"model": saved[0], "train": {"optim": saved[1], "step": 7}}, tmp_path)
    fresh = _model(1)
    state = {"model": fresh, "train": {"optim": torch.optim.SGD(fresh.parameters(), lr=9.0), "step": 0}}
    before = copy.deepcopy(fresh.state_dict())

    for strict in (True, False):
        with pytest.raises(KeyMismatchError, match=r"train.optim: saved flattened, but the target is nested"):
            reshard.load(state, tmp_path, strict=strict)
    assert reshard.compare(before, dict(fresh.state_dict())).ok
    assert state["train"]["step"] == 0


def test_fields_that_are_several_tensors_get_places_of_the_flat_form(tmp_path) -> None:
    def adam(model):
        betas = torch.tensor(0.9), torch.tensor(0.99)
        return torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-3), betas=betas, foreach=False)

    model, _ = _trained()
    optimizer = adam(model)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["betas"][1].fill_(0.5)
    reshard.save({"optim": reshard.get_optimizer_state_dict(model, optimizer, options=FLAT)}, tmp_path)
    fresh = _model(1)
    other = adam(fresh)
    state = {"optim": reshard.optimizer_destinations(fresh, other, tmp_path)}
    assert reshard.load(state, tmp_path).ok
    reshard.set_optimizer_state_dict(fresh, other, state["optim"])
    assert other.param_groups[0]["betas"] == (torch.tensor(0.9), torch.tensor(0.5))
    assert other.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()


def test_a_part_of_the_model_gets_places_for_its_part_of_the_flat_form(tmp_path) -> None:
    model, optimizer = _trained()
    reshard.save({"optim": reshard.get_optimizer_state_dict(model, optimizer, options=FLAT)}, tmp_path)
    part = nn.Sequential(nn.Linear(3, 4))

    places = reshard.optimizer_destinations(part, torch.optim.AdamW(part.parameters()), tmp_path)

    assert {".".join(key.split(".")[1:3]) for key in places} == {"0.weight", "0.bias"}
    assert places["state.0.weight.exp_avg"].shape == (4, 3)
    assert places["param_groups.0.bias.lr"] == 1e-3


class _CountsSteps(torch.optim.SGD):
    """Keeps state of the whole, from its making on, under a key that is no parameter."""

    def __init__(self, params):
        super().__init__(params, lr=0.1, momentum=0.9)
        self.state["whole"] = {"count": torch.zeros(())}

    def step(self, closure=None):
        self.state["whole"]["count"] += 1
        super().step()


def test_state_of_the_whole_has_a_place_too(tmp_path):
    model, optimizer = _trained(_CountsSteps)
    saved = _save(tmp_path, model, optimizer)
    assert saved["state"]["whole"] == {"count": 1}
    fresh = _model()
    other = _CountsSteps(fresh.parameters())
    target = {"optim": reshard.optimizer_destinations(fresh, other, tmp_path)}
    reshard.load(target, tmp_path, strict="subset")
    assert other.state["whole"]["count"] == 0
    reshard.set_optimizer_state_dict(fresh, other, target["optim"])
    assert other.state["whole"]["count"] == 1
    assert torch.equal(other.state[fresh[0].weight]["momentum_buffer"], saved["state"]["0.weight"]["momentum_buffer"])


def test_state_in_lists_gets_places_in_lists(tmp_path):
    def trained(steps):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
        for _ in range(steps):
            step(model, optimizer)
        return model, optimizer

    def step(model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = model(torch.arange(12.0).reshape(4, 3)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    model, optimizer = trained(2)
    saved = dict(zip(("model", "optim"), reshard.get_state_dict(model, optimizer), strict=True))
    reshard.save(saved, tmp_path)
    fresh, other = trained(0)
    target = {
        "model": reshard.get_model_state_dict(fresh),
        "optim": reshard.optimizer_destinations(fresh, other, tmp_path),
    }
    reshard.load(target, tmp_path)
    reshard.set_state_dict(fresh, other, model_state_dict=target["model"], optim_state_dict=target["optim"])
    for pair in ((model, optimizer), (fresh, other)):
        step(*pair)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))


@pytest.mark.parametrize(
    ("nest", "prefix"),
    [(lambda its: {"my.optim": its}, "my.optim"), (lambda its: {"all": {"optims": [its]}}, "all.optims.0")],
)
def test_a_prefix_is_the_name_of_its_place_however_it_is_nested(nest, prefix, tmp_path) -> None:
    model, optimizer = _trained()
    saved = reshard.get_optimizer_state_dict(model, optimizer)
    reshard.save(nest(saved), tmp_path)

    state = reshard.optimizer_destinations(model, torch.optim.AdamW(model.parameters()), tmp_path, prefix=prefix)
    reshard.load(nest(state), tmp_path)

    assert state["state"].keys() == saved["state"].keys()
    assert torch.equal(state["state"]["0.weight"]["exp_avg"], saved["state"]["0.weight"]["exp_avg"])
