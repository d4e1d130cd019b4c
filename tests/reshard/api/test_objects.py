"""Models, optimizers, and other objects as values of what `save` and `load` take."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import reshard
from reshard.errors import FormatError, KeyMismatchError, NormalizationError, OptionError, RankFailedError
from tests import gloo


def training(seed: int, ranks: int = 1) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    if ranks > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {"model": model, "optim": optimizer, "sched": torch.optim.lr_scheduler.StepLR(optimizer, 1), "step": 0}


def train(state: dict[str, Any]) -> None:
    state["model"](torch.ones(2, 4)).sum().backward()
    state["optim"].step()
    state["sched"].step()
    state["optim"].zero_grad()
    state["step"] += 1


def full(state: dict[str, Any]) -> list[torch.Tensor]:
    return [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in state["model"].parameters()]


@pytest.mark.parametrize("in_background", [False, True])
def test_training_goes_on_as_if_it_had_not_stopped(in_background: bool, tmp_path: Path) -> None:
    first = training(0)
    train(first)
    if in_background:
        reshard.async_save(first, tmp_path / "c").result()
    else:
        reshard.save(first, tmp_path / "c")

    second = training(1)
    objects = dict(second)
    report = reshard.load(second, tmp_path / "c")

    assert report.ok
    assert all(second[name] is objects[name] for name in ("model", "optim", "sched"))
    assert second["step"] == 1
    train(first)
    train(second)
    assert all(map(torch.equal, full(first), full(second)))
    assert first["sched"].state_dict() == second["sched"].state_dict()


def test_the_keys_are_those_of_state_dicts(tmp_path: Path) -> None:
    state = training(0)
    train(state)
    reshard.save(state, tmp_path / "objects")
    model, optim = reshard.get_state_dict(state["model"], state["optim"])
    dicts = {"model": model, "optim": optim, "sched": state["sched"].state_dict(), "step": 1}
    reshard.save(dicts, tmp_path / "dicts")

    assert reshard.compare(tmp_path / "objects", tmp_path / "dicts").ok


def test_memory_takes_them_too(tmp_path: Path) -> None:
    first, second = training(0), training(1)
    train(first)
    tier = reshard.elastic.Tier(tmp_path / "memory", copies=0)
    tier.save(first, 1)
    tier.restore(second)

    train(first)
    train(second)
    assert all(map(torch.equal, full(first), full(second)))


def nested(state: dict[str, Any]) -> dict[str, Any]:
    train = {name: state[name] for name in ("model", "optim")}
    return {"train": train, "run": [{"sched": state["sched"], "step": state["step"]}]}


@pytest.mark.parametrize("way", ["save", "async_save", "memory", "manager"])
def test_objects_may_be_nested_in_dicts_and_lists(way: str, tmp_path: Path) -> None:
    first, second = training(0), training(1)
    train(first)
    ours, theirs = nested(first), nested(second)
    if way == "save":
        reshard.save(ours, tmp_path / "c")
        assert reshard.load(theirs, tmp_path / "c").ok
    elif way == "async_save":
        reshard.async_save(ours, tmp_path / "c").result()
        assert reshard.load(theirs, tmp_path / "c").ok
    elif way == "memory":
        tier = reshard.elastic.Tier(tmp_path / "memory", copies=0)
        tier.save(ours, 1)
        assert tier.restore(theirs).load.ok
    else:
        with reshard.CheckpointManager(tmp_path / "run", every=reshard.Every(steps=1)) as manager:
            manager.save(1, ours)
            manager.wait()
            restored = manager.restore(theirs)
            assert restored is not None
            assert restored.load.ok
    assert theirs["train"] == nested(second)["train"]
    assert theirs["run"][0]["step"] == 1
    assert reshard.compare(ours, theirs).ok

    train(first)
    train(second)
    assert all(map(torch.equal, full(first), full(second)))
    assert first["sched"].state_dict() == second["sched"].state_dict()


def test_a_state_with_objects_that_contains_itself_is_refused(tmp_path: Path) -> None:
    state: dict[str, Any] = {"model": nn.Linear(2, 2)}
    state["in"] = {"again": state}
    for call in (reshard.save, reshard.compare):
        with pytest.raises(KeyMismatchError, match="contains itself"):
            call(state, state if call is reshard.compare else tmp_path / "c")  # type: ignore[operator]
    del state["model"]
    with pytest.raises(KeyMismatchError, match="contains itself"):
        reshard.fingerprint(state)


def test_a_dry_run_sets_nothing(tmp_path: Path) -> None:
    first, second = training(0), training(1)
    train(first)
    reshard.save(first, tmp_path / "c")
    before = full(second)

    assert reshard.load(second, tmp_path / "c", dry_run=True).ok
    assert all(map(torch.equal, full(second), before))
    assert not second["optim"].state


def test_a_refused_load_sets_nothing(tmp_path: Path) -> None:
    reshard.save(training(0), tmp_path / "c")
    other = {**training(1), "model": nn.Linear(4, 6)}
    other["optim"] = torch.optim.AdamW(other["model"].parameters())
    before = full(other)

    with pytest.raises(KeyMismatchError, match=r"model\.weight"):
        reshard.load(other, tmp_path / "c")
    assert all(map(torch.equal, full(other), before))


@pytest.mark.parametrize(("kind", "strict"), [(torch.optim.Adamax, "subset"), (torch.optim.RMSprop, "partial")])
def test_an_optimizer_of_another_kind_is_refused_before_the_model_is_set(
    kind: type[torch.optim.Optimizer], strict: Any, tmp_path: Path
) -> None:
    first, second = training(0), training(1)
    train(first)
    reshard.save({name: first[name] for name in ("model", "optim")}, tmp_path / "c")
    other = {"model": second["model"], "optim": kind(second["model"].parameters())}
    before = full(second)

    with pytest.raises(KeyMismatchError, match=rf"lacks '\w+', which {kind.__name__} needs"):
        reshard.load(other, tmp_path / "c", strict=strict)
    assert all(map(torch.equal, full(second), before))
    assert not other["optim"].state


def test_an_object_may_keep_what_the_saved_state_lacks(tmp_path: Path) -> None:
    saved, live = training(0), training(1)
    model, optim = reshard.get_state_dict(saved["model"], saved["optim"])
    del optim["param_groups"][0]["maximize"]
    reshard.save({"model": model, "optim": optim}, tmp_path / "c")

    report = reshard.load({name: live[name] for name in ("model", "optim")}, tmp_path / "c")
    assert report.dropped == ("optim.param_groups.0.maximize",)
    assert live["optim"].param_groups[0]["maximize"] is False


def test_the_report_names_what_has_no_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def made() -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_buffer("scale", torch.ones(2), persistent=False)
        return model

    with torch.device("meta"):
        targets = [made(), made()]
    with reshard.CheckpointManager(tmp_path / "run", every=reshard.Every(steps=1)) as manager:
        manager.save(1, {"model": made()})
        restored = manager.restore({"model": targets[0]})
    assert restored is not None
    loaded = reshard.load({"model": targets[1]}, tmp_path / "run" / "step-1")

    for report in (restored.load, loaded):
        assert report.ok
        assert report.uninitialized == ("model.scale",)
        assert "uninitialized 1 ('model.scale')" in repr(report)
    assert caplog.text.count("still on the meta device, without values: 1 ('model.scale')") == 2
    assert reshard.load({"model": made()}, tmp_path / "run" / "step-1").uninitialized == ()


def test_a_model_keeps_its_dtypes_and_the_report_counts_what_overflowed(tmp_path: Path) -> None:
    """The report said that the saved dtype was set, and nothing of infinite values."""
    model, target = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False).half()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1e30, 2.0]]))
    reshard.save({"model": model, "mean": torch.ones(1)}, tmp_path / "c")
    state = {"model": target, "mean": torch.zeros(1, dtype=torch.float16)}

    report = reshard.load(state, tmp_path / "c", dtype_policy="saved")

    assert (target.weight.dtype, state["mean"].dtype) == (torch.float16, torch.float32)
    assert target.weight.tolist() == [[float("inf"), 2.0]]
    assert report.cast == {"model.weight": ("float32", "float16")}
    assert report.replaced == {"mean": ("float32", "float16")}
    assert report.overflowed == {"model.weight": 1}

    whole = nn.Module()
    whole.register_buffer("weight", torch.zeros(1, 2, dtype=torch.int32))
    with pytest.raises(KeyMismatchError, match=r"model\.weight: saved as float32, but the target is int32"):
        reshard.load({**state, "model": whole}, tmp_path / "c", dtype_policy="saved")


class Counter:
    """An object with a plain state."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


@pytest.mark.parametrize(
    ("saved", "words"),
    [({"n": 2}, "missing.*sub.it"), ({}, "missing.*sub.it"), (7, "missing.*sub.it"), ([2], "missing.*sub.it")]
    + [({"n": 2, "it": Counter(3), "more": 4}, "unexpected.*sub.more")],
)
def test_what_is_around_an_object_does_not_replace_it(saved: Any, words: str, tmp_path: Path) -> None:
    """A KeyError was raised after values were overwritten, and what only the checkpoint had was lost without a word."""
    reshard.save({"one": Counter(1), "sub": saved}, tmp_path / "c")
    one, it = Counter(0), Counter(0)
    state = {"one": one, "sub": {"n": 0, "it": it}}
    with pytest.raises(KeyMismatchError, match=f"(?s){words}"):
        reshard.load(state, tmp_path / "c")
    assert (one.count, it.count, state["sub"]) == (0, 0, {"n": 0, "it": it})
    report = reshard.load(state, tmp_path / "c", strict=False)
    assert not report.ok
    assert (one.count, it.count) == (1, 3 if "more" in words else 0)
    assert state["sub"]["it"] is it


def test_what_cannot_be_saved_says_what_to_write(tmp_path: Path) -> None:
    state = training(0)
    for wrong, error, words in (
        ({"optim": state["optim"]}, NormalizationError, "Add the model"),
        (state["model"], OptionError, r"Write: reshard.save\({'model': model}, path\)"),
        ({"in": {"optim": state["optim"]}}, NormalizationError, "'in.optim' is an optimizer .* Add the model"),
        ({"in": (1, state["model"])}, FormatError, "'in' is a tuple that contains a model .* use a dict or a list"),
        ({"in": {state["model"]}}, FormatError, "make the model a value of a dict"),
    ):
        with pytest.raises(error, match=words):
            reshard.save(wrong, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def saved_and_loaded(folder: str) -> tuple[list[torch.Tensor], bool, str]:
    first, second = training(0, 2), training(1, 2)
    train(first)
    reshard.save(first, f"{folder}/c")
    is_ok = reshard.load(second, f"{folder}/c").ok
    same = all(map(torch.equal, full(first), full(second)))
    words = ""
    if torch.distributed.get_rank() == 0:
        try:
            reshard.load(second, f"{folder}/c", alone=True)
        except OptionError as error:
            words = str(error)
    return full(first), is_ok and same, words


def test_sharded_models_are_set_by_all_ranks_and_never_by_one(tmp_path: Path) -> None:
    (values, is_same, words), (_, other, _) = gloo.run(saved_and_loaded, 2, str(tmp_path))
    assert is_same
    assert other
    assert "omit alone=True" in words

    single = training(2)
    assert reshard.load(single, tmp_path / "c").ok
    assert all(map(torch.equal, full(single), values))


def test_comparisons_take_them(tmp_path: Path) -> None:
    """As they are saved: none is passed over."""
    state = training(0)
    train(state)
    reshard.save(state, tmp_path / "c")

    report = reshard.compare(tmp_path / "c", state)
    assert report.ok
    assert report.covered.read_bytes == report.covered.total_bytes > 0
    assert reshard.verify(tmp_path / "c", against=state).ok
    prints = reshard.fingerprint(state)
    assert prints == reshard.fingerprint(tmp_path / "c")
    assert "model.0.weight" in prints
    train(state)
    assert not reshard.compare(tmp_path / "c", state).ok
    assert not reshard.verify(tmp_path / "c", against=state).ok
    assert reshard.fingerprint({"in": {"model": state["model"]}}).keys() == {
        f"in.model.{name}" for name, _ in state["model"].named_parameters()
    }


def compared_without_its_model(folder: str) -> str:
    state = training(0, 2)
    train(state)
    reshard.save(state, f"{folder}/c")
    if torch.distributed.get_rank() == 1:
        del state["model"]
    try:
        reshard.compare(f"{folder}/c", state, timeout=20)
    except (NormalizationError, RankFailedError) as error:
        return str(error)
    return "no error"


@pytest.mark.gloo
def test_a_comparison_that_one_rank_cannot_make_fails_on_all(tmp_path: Path) -> None:
    other, own = gloo.run(compared_without_its_model, 2, str(tmp_path))
    assert "rank 1 failed in 'compare" in other
    for words in (other, own):
        assert "'optim' is an optimizer whose model is not in the state" in words


def test_transfers_refuse_them_and_say_what_to_pass() -> None:
    one, other = {"model": nn.Linear(2, 2)}, {"model": nn.Linear(2, 2)}
    for call in (reshard.redistribute, reshard.prepare, reshard.verify_live):
        with pytest.raises(OptionError, match=r"takes state dicts.*get_model_state_dict\(model\)"):
            call(one, other)  # type: ignore[operator]
    with pytest.raises(OptionError, match=r"takes state dicts.*get_model_state_dict\(model\)"):
        reshard.WeightSource({"in": one})


def layers(count: int, seed: int = 0) -> dict[str, Any]:
    """A model of so many layers, and its optimizer after a step."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(count)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": model, "optim": optimizer}


@pytest.mark.parametrize(
    "strict",
    ["subset", {"*.1.*": "subset"}, {"model.1.*": "subset", "optim.state.1.weight.*": "subset", "*.1.bias*": "subset"}],
)
def test_a_model_that_lost_a_layer_loads_a_subset(strict: Any, tmp_path: Path) -> None:
    saved, live = layers(2), layers(1, seed=1)
    reshard.save(saved, tmp_path / "c")
    with pytest.raises(KeyMismatchError, match='strict="subset"'):
        reshard.load(live, tmp_path / "c")
    report = reshard.load(live, tmp_path / "c", strict=strict)
    assert report.ok
    assert {"model.1.weight", "optim.state.1.bias.exp_avg"} <= {*report.not_requested}
    for one, other in zip(live["model"].parameters(), saved["model"].parameters()):
        assert torch.equal(one, other)
        assert torch.equal(live["optim"].state[one]["exp_avg"], saved["optim"].state[other]["exp_avg"])


@pytest.mark.parametrize(
    "strict", ["advised", {"*.1.*": "partial"}, {"model.1.*": "partial", "optim.state.1.*": "partial"}]
)
def test_a_new_layer_keeps_its_values_and_its_state(
    strict: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reshard.save(layers(1), tmp_path / "c")
    live = layers(2, seed=1)
    new = [*live["model"][1].parameters()]
    before = [(one.detach().clone(), live["optim"].state[one]["exp_avg"].clone()) for one in new]
    with pytest.raises(KeyMismatchError, match="missing from the checkpoint") as caught:
        reshard.load(live, tmp_path / "c")
    if strict == "advised":
        (advised,) = re.findall(r"strict=({.*?})", str(caught.value))
        strict = ast.literal_eval(advised)
    report = reshard.load(live, tmp_path / "c", strict=strict)
    assert not report.ok
    assert {"model.1.weight", "optim.state.1.weight.exp_avg"} <= {*report.missing}
    assert not [record for record in caplog.records if "no key matches" in record.getMessage()]
    for one, (value, moment) in zip(new, before):
        assert torch.equal(one, value)
        assert torch.equal(live["optim"].state[one]["exp_avg"], moment)


@pytest.mark.parametrize("strict", [True, "subset", {"*.1.*": "partial"}])
def test_advice_leads_to_a_load_if_each_side_has_more_than_the_other(strict: Any, tmp_path: Path) -> None:
    """The first advice, or the second, and what it allows is only what is missing."""
    reshard.save({**layers(1), "epoch": 3}, tmp_path / "c")
    live = layers(2, seed=1)
    while True:
        try:
            report = reshard.load(live, tmp_path / "c", strict=strict)
            break
        except KeyMismatchError as error:
            (advised,) = re.findall(r"strict=({.*?})", str(error))
            assert advised != repr(strict)
            strict = ast.literal_eval(advised)
    assert {key.split(".")[-2 if key.startswith("model") else 2] for key in report.missing} == {"1"}
    assert report.not_requested == ("epoch",)
    assert "model.*" not in strict


@pytest.mark.parametrize(
    "strict",
    [
        True,
        "subset",
        {"a.*": "subset"},
        {"a.*": "strict"},
        {"a.*": "strict", "*": "partial"},
        {"a.*": "strict", "*": "subset"},
        {"a.[x]*": "partial"},
        {"*": "strict"},
    ],
    ids=repr,
)
@pytest.mark.parametrize("keys", [("x[0].a", "x[0].b", "z"), ("z",), ("x[0].a", "z"), ("q", "x", "y", "z")], ids=repr)
def test_advice_with_what_was_given_leads_to_a_load(keys: tuple[str, ...], strict: Any, tmp_path: Path) -> None:
    reshard.save({"a": {"q": torch.ones(2), "z": torch.ones(2)}, "b": {"y": torch.ones(2)}}, tmp_path / "c")
    for _ in range(3):
        live = {"a": dict.fromkeys(keys, torch.zeros(2))}
        try:
            assert "a.z" in reshard.load(live, tmp_path / "c", strict=strict).loaded
            return
        except KeyMismatchError as error:
            (advised,) = re.findall(r"strict=(\{.*?\}|\"subset\") (?:allows|ignores)", str(error))
            assert advised != repr(strict)
            strict = ast.literal_eval(advised)
    raise AssertionError(f"advice goes in a circle: {strict}")


@pytest.mark.parametrize("has_state", [True, False])
def test_advice_for_one_new_parameter_covers_its_optimizer_state(has_state: bool, tmp_path: Path) -> None:
    reshard.save(layers(1), tmp_path / "c")
    live = layers(1, seed=1)
    live["model"].register_parameter("extra", nn.Parameter(torch.ones(3)))
    live["optim"] = torch.optim.AdamW(live["model"].parameters())
    if has_state:
        sum(one.sum() for one in live["model"].parameters()).backward()
        live["optim"].step()
    with pytest.raises(KeyMismatchError) as caught:
        reshard.load(live, tmp_path / "c")
    (advised,) = re.findall(r"strict=({.*?}) allows", str(caught.value))
    assert reshard.load(live, tmp_path / "c", strict=ast.literal_eval(advised)).missing


def test_a_tensor_is_not_found_where_the_checkpoint_has_a_folder_of_its_name(tmp_path: Path) -> None:
    reshard.save({"m": {"w": {"data": torch.ones(2), "scale": torch.ones(2)}}}, tmp_path / "c")
    with pytest.raises(KeyMismatchError, match=r"1 missing from the checkpoint:\n    w\n  2 unexpected"):
        reshard.load({"w": torch.zeros(2)}, tmp_path / "c")


def test_a_state_nested_in_the_checkpoint_is_found_if_the_optimizer_has_no_state_yet(tmp_path: Path) -> None:
    """As DCP's users save it, below one Stateful."""
    saved = layers(1)
    reshard.save({"app": saved}, tmp_path / "c")
    model = layers(1, seed=1)["model"]
    live = {"model": model, "optim": torch.optim.AdamW(model.parameters())}
    with pytest.raises(KeyMismatchError, match=r"only by the prefix 'app.'") as caught:
        reshard.load(live, tmp_path / "c")
    assert "fix: call load({'app': state}, path), or rename" in str(caught.value)
    assert reshard.load({"app": live}, tmp_path / "c").ok
    assert torch.equal(model[0].weight, saved["model"][0].weight)


def test_only_what_is_allowed_may_be_missing_from_an_optimizer(tmp_path: Path) -> None:
    reshard.save(layers(1), tmp_path / "c")
    live = {**layers(2), "optim": None}
    live["optim"] = torch.optim.AdamW(live["model"].parameters())
    before = live["model"][0].weight.detach().clone()
    with pytest.raises(KeyMismatchError, match=r"Missing key: 1\.bias") as caught:
        reshard.load(live, tmp_path / "c", strict={"model.*": "partial", "*.1.weight": "partial"})
    assert "Missing key: 1.weight" not in str(caught.value)
    assert torch.equal(live["model"][0].weight, before)
    (advised,) = re.findall(r"strict=({.*?}) to set", str(caught.value))
    assert reshard.load(live, tmp_path / "c", strict=ast.literal_eval(advised)).missing
    assert live["model"][0].weight in live["optim"].state


def test_a_parameter_can_be_stricter_than_the_rest(tmp_path: Path) -> None:
    reshard.save(layers(1), tmp_path / "c")
    model = layers(2, seed=1)["model"]
    live = {"model": model, "optim": torch.optim.AdamW(model.parameters())}
    before = model[0].weight.detach().clone()
    with pytest.raises(KeyMismatchError, match=r"Missing key: 1\.weight"):
        reshard.load(live, tmp_path / "c", strict={"model.*": "partial", "*.1.*": "strict", "*": "partial"})
    assert torch.equal(model[0].weight, before)


def test_keys_that_lack_the_models_prefix_name_a_call_that_works(tmp_path: Path) -> None:
    saved = layers(1)["model"]
    reshard.save(saved.state_dict(), tmp_path / "c")
    live = layers(1, seed=1)["model"]
    with pytest.raises(KeyMismatchError, match=r"call load\(reshard.get_model_state_dict\(model\), path\)"):
        reshard.load({"model": live}, tmp_path / "c")
    assert reshard.load(reshard.get_model_state_dict(live), tmp_path / "c").ok
    assert torch.equal(live[0].weight, saved[0].weight)


@pytest.mark.parametrize("is_with_optimizer", [False, True])
def test_a_head_of_another_shape_can_be_left_out(is_with_optimizer: bool, tmp_path: Path) -> None:
    saved, live = layers(3), layers(3, seed=1)
    live["model"][2] = nn.Linear(3, 5)
    live["optim"] = torch.optim.AdamW(live["model"].parameters())
    if not is_with_optimizer:
        saved, live = {"model": saved["model"]}, {"model": live["model"]}
    reshard.save(saved, tmp_path / "[c]")
    with pytest.raises(KeyMismatchError, match="To keep your tensors, leave these out: load") as caught:
        reshard.load(live, tmp_path / "[c]", strict=False)
    code = str(caught.value).partition("leave these out: ")[2].splitlines()[0]
    assert ".select('!model.2.weight', " in code

    report = eval(code, {"reshard": reshard, "load": reshard.load, "state": live})

    assert {"model.2.weight", "model.2.bias"} <= {*report.missing}
    assert torch.equal(live["model"][0].weight, saved["model"][0].weight)
    assert live["model"][2].weight.shape == (5, 3)
    if is_with_optimizer:
        assert live["optim"].state[live["model"][0].weight]
        live["model"](torch.ones(1, 3)).sum().backward()
        live["optim"].step()


def test_the_advice_for_numbered_states_restores_the_optimizer(tmp_path: Path) -> None:
    saved, live = layers(2), layers(2, seed=1)
    torch.save({name: one.state_dict() for name, one in saved.items()}, tmp_path / "c.pt")
    with pytest.raises(KeyMismatchError, match="under integer ids") as caught:
        reshard.load(live, tmp_path / "c.pt")
    lines = [line.strip() for line in str(caught.value).splitlines() if line.startswith("    ")]
    code = lines[next(i for i, line in enumerate(lines) if line.startswith("named = ")) :]
    live["optim"] = torch.optim.AdamW(live["model"].parameters())
    exec("\n".join(code), {"reshard": reshard, "model": live["model"], "optimizer": live["optim"]})
    for one, other in zip(live["model"].parameters(), saved["model"].parameters()):
        assert torch.equal(live["optim"].state[one]["exp_avg"], saved["optim"].state[other]["exp_avg"])


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("file", ["c.pt", "c"])
def test_an_optimizer_without_state_is_loaded_by_the_order_of_its_parameters(
    kind: Any, file: str, tmp_path: Path
) -> None:
    """Adam before its first step, and SGD: `torch.save` stores numbers of parameters, and no state that needs names."""

    def groups(model: nn.Module, lr: float) -> Any:
        return kind([{"params": [parameter], "lr": lr + i} for i, parameter in enumerate(model.parameters())])

    saved, live = layers(2)["model"], layers(2, seed=1)["model"]
    stored = {"model": saved.state_dict(), "optim": groups(saved, 0.5).state_dict()}
    torch.save(stored, tmp_path / file) if file == "c.pt" else reshard.save(stored, tmp_path / file)
    optimizer = groups(live, 0.25)
    assert reshard.load({"model": live, "optim": optimizer}, tmp_path / file).ok
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 1.5, 2.5, 3.5]

    model, optim = reshard.get_state_dict(live, groups(live, 0.25))
    assert reshard.load({"model": model, "optim": optim}, tmp_path / file).ok
    assert [(group["lr"], group["params"]) for group in optim["param_groups"]] == [
        (0.5 + i, [name]) for i, (name, _) in enumerate(live.named_parameters())
    ]


def test_names_of_an_optimizer_without_state_are_not_taken_for_numbers(tmp_path: Path) -> None:
    def groups(model: nn.Module, *rates: float) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [p], "lr": rate} for p, rate in zip(model[0].parameters(), rates)])

    saved, live = layers(1)["model"], layers(1, seed=1)["model"]
    stored = reshard.get_state_dict(saved, groups(saved, 1.0, 2.0))[1]
    stored["param_groups"].reverse()
    reshard.save({"optim": stored}, tmp_path / "c")
    state = {"optim": reshard.get_state_dict(live, groups(live, 3.0, 4.0))[1]}
    assert reshard.load(state, tmp_path / "c").ok
    assert state["optim"] == stored


def test_numbers_of_other_parameters_are_refused(tmp_path: Path) -> None:
    saved, live = layers(1)["model"], layers(1, seed=1)["model"]
    optim = torch.optim.SGD([saved[0].weight]).state_dict()
    torch.save({"model": saved.state_dict(), "optim": optim}, tmp_path / "c.pt")
    with pytest.raises(NormalizationError, match="lists 1 parameter ids, but the optimizer has 2 parameters"):
        reshard.load({"model": live, "optim": torch.optim.SGD(live.parameters())}, tmp_path / "c.pt")


def test_the_advice_for_missing_buffers_is_about_the_model_alone(tmp_path: Path) -> None:
    reshard.save(layers(2), tmp_path / "c")
    for name, globs in (("mean", {"model.*": "partial"}), ("more", {"model.*": "partial", "optim.state.*": "partial"})):
        live = layers(2, seed=1)
        for tensor in ("a", "b"):
            if name == "mean":
                live["model"].register_buffer(f"{name}_{tensor}", torch.ones(3))
            else:
                live["model"].register_parameter(f"{name}_{tensor}", nn.Parameter(torch.ones(3)))
        live["optim"] = torch.optim.AdamW(live["model"].parameters())
        with pytest.raises(KeyMismatchError) as caught:
            reshard.load(live, tmp_path / "c")
        assert f"strict={globs} allows" in str(caught.value)
        assert reshard.load(live, tmp_path / "c", strict=globs).missing
