"""`reshard.CheckpointManager`: what is saved when, what stays, what comes back, and what bad use is told."""

from __future__ import annotations

import ast
import math
import os
import re
import shutil
import signal
import threading
import time
from concurrent.futures import Future
from copy import deepcopy
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

import reshard
from reshard import Every, Keep, Preemption
from reshard.api import retention
from reshard.api.manager import ledger, manager as deciding
from reshard.api.manager.save_policies import checked_metrics
from reshard.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatError,
    KeyMismatchError,
    NormalizationError,
    OptionError,
    StorageError,
)
from reshard.formats import run_folder
from reshard.native import commit
from reshard.native.commit import Generation
from reshard.native.manifest import encode_sealed
from reshard.ranks import liveness
from reshard.storage.opening import open_storage
from tests import gloo
from tests.reshard.api import manager_jobs as jobs
from tests.same import assert_same
from tests.torch_releases import FSDP2_TRAINS_ON_CPUS, requires


def run(root: Any, steps: Any, metrics: Any = None, **options: Any) -> list[int]:
    """A manager's saves at these steps; what there is then."""
    options = {"every": Every(steps=1), **options}
    with reshard.CheckpointManager(root, **options) as manager:
        manager.restore({"w": torch.zeros(3)})
        for step in steps:
            manager.save(step, {"w": torch.full((3,), float(step))}, metrics and metrics(step))
        manager.wait()
        return manager.all_steps()


def value_at(root: Any, step: int | None = None) -> tuple[Any, float]:
    state = {"w": torch.full((3,), -1.0)}
    with reshard.CheckpointManager(root, every=Every(steps=1), read_only=True) as manager:
        report = manager.restore(state, step)
    return report, state["w"][0].item()


KEPT = [
    (Keep(), {1, 2, 3, 4, 5, 6, 7, 8, 9}, "all"),
    (Keep(last=2), {8, 9}, "the newest"),
    (Keep(best=1, metric="loss", mode="min"), {4, 9}, "the best, and the newest to continue from"),
    (Keep(every=4), {4, 8, 9}, "multiples, and the newest"),
    (Keep(metric="loss", mode="max"), {1, 2, 3, 4, 5, 6, 7, 8, 9}, "no number of best ones is all"),
    (Keep(last=20), {1, 2, 3, 4, 5, 6, 7, 8, 9}, "fewer than may stay"),
    (Keep(last=1, every=4), {4, 8, 9}, "multiples for ever"),
    (Keep(last=1, best=2, metric="loss", mode="min"), {2, 4, 9}, "the lowest; of equal ones the newest"),
    (Keep(last=1, best=2, metric="loss", mode="max"), {1, 7, 9}, "the highest"),
    (Keep(last=1, best=3, metric="acc", mode="min"), {3, 9}, "only those that have the metric"),
]


@pytest.mark.parametrize(("keep", "wanted", "note"), KEPT, ids=[row[2] for row in KEPT])
def test_steps_stay_as_long_as_a_rule_wants_them(keep: Keep, wanted: set[int], note: str, tmp_path: Path) -> None:
    losses = dict(enumerate([9.0, 1.0, 5.0, 1.0, 3.0, 1.5, 9.5, 4.0, 2.0], 1))
    metrics = {step: {"loss": loss} for step, loss in losses.items()}
    if keep.metric == "acc":
        metrics = {step: {"loss": losses[step], "acc": 1.0} if step == 3 else {} for step in losses}

    assert keep.kept(metrics) == wanted
    assert run(tmp_path / "run", range(1, 10), metrics.get, keep=keep) == sorted(wanted)


DUE = [
    (Every(steps=3), [1, 2, 3, 4, 6, 9], [3, 6, 9], "multiples"),
    (Every(steps=3), [0, 1], [0], "as 0 is"),
    (Every(steps=3), [2, 5, 8, 11], [5, 8, 11], "a multiple between two calls is made up for"),
    (Every(seconds=25), [1, 2, 3, 4, 5, 6], [3, 6], "by the clock"),
    (Every(steps=4, seconds=25), [1, 2, 3, 4, 5, 6], [3, 4], "whichever comes first, and the clock begins anew"),
]


@pytest.mark.parametrize(("every", "steps", "wanted", "note"), DUE, ids=[row[3] for row in DUE])
def test_steps_are_due(every: Every, steps: list[int], wanted: list[int], note: str, tmp_path: Path) -> None:
    now = 100.0
    state = {"w": torch.zeros(2)}
    clock = SimpleNamespace(monotonic=lambda: now)
    with (
        mock.patch.object(deciding, "time", clock),
        reshard.CheckpointManager(tmp_path / "run", every=every) as manager,
    ):
        done = []
        for step in steps:
            now += 10
            done += [step] if manager.save(step, state) else []
    assert done == wanted == manager.all_steps()


def everything() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 2))
    other = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {
        "net": {"model": model, "optim": optimizer, "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 2)},
        "heads": {"one": other, "two": nn.Linear(2, 1)},
        "stages": [nn.Linear(2, 2), reshard.Stage(nn.Sequential(nn.Linear(1, 1)), {"": 4})],
        "heads_optim": torch.optim.SGD(other.parameters(), momentum=0.9, lr=0.1),
        "scaler": torch.amp.GradScaler("cpu"),
        "rng": torch.default_generator,
        "own": torch.Generator().manual_seed(3),
        "data": jobs.Loader(0, 1),
        "step": 0,
        "log": {"losses": [], "best": None},
        "ema": torch.zeros(3),
        "seed": reshard.PerRank(5),
        "empty": {},
    }


def trained_on(state: dict[str, Any]) -> float:
    net = state["net"]
    batch = torch.randn(5, 4) + next(state["data"]) + torch.rand(1, generator=state["own"])
    loss = state["heads"]["one"](net["model"](batch)).square().mean()
    loss.backward()
    for optimizer in (net["optim"], state["heads_optim"]):
        optimizer.step()
        optimizer.zero_grad()
    net["schedule"].step()
    state["step"] += 1
    state["ema"].lerp_(torch.full((3,), loss.item()), 0.5)
    state["log"]["losses"].append(loss.item())
    state["log"]["best"] = min(state["log"]["losses"])
    return float(loss.item())


def test_all_that_a_run_has_goes_on_as_if_never_interrupted(tmp_path: Path) -> None:
    state = everything()
    with reshard.CheckpointManager(tmp_path / "run", every=Every(steps=3)) as manager:
        for _ in range(4):
            trained_on(state)
            manager.save(state["step"], state)
        expected = [trained_on(state), trained_on(state)]

        again = everything()
        for _ in range(2):  # with state of its own, which goes
            trained_on(again)
        report = manager.restore(again)
    assert report is not None
    assert (report.step, report.from_memory, report.skipped) == (3, False, ())
    assert report.load.ok
    assert again["step"] == 3
    assert len(again["log"]["losses"]) == 3
    trained_on(again)
    assert [trained_on(again), trained_on(again)] == expected
    assert torch.equal(again["ema"], state["ema"])
    assert reshard.open(tmp_path / "run" / "step-3").nested()["log"]["best"] == min(again["log"]["losses"][:3])


def test_state_that_an_optimizer_does_not_use_is_in_the_report(tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    adam = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    adam.step()
    state: dict[str, Any] = {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1)}
    with reshard.CheckpointManager(tmp_path, every=Every(steps=1)) as manager:
        manager.save(1, {"model": model, "optim": adam})
        with pytest.raises(NormalizationError, match="was saved by another class of optimizer"):
            manager.restore(state)
        report = manager.restore(state, strict=False)
    assert report is not None
    assert {f"optim.state.weight.{key}" for key in ("step", "exp_avg", "exp_avg_sq")} <= {*report.load.unexpected}
    assert not report.load.ok
    assert ", LoadReport(not ok, loaded " in repr(report)
    assert re.search(r", unexpected \d+ \('optim\.", repr(report)), repr(report)


def test_other_param_groups_are_refused_before_anything_is_overwritten(tmp_path: Path) -> None:
    def state_of(*split: list[str]) -> dict[str, Any]:
        model = nn.Linear(3, 4)
        params = dict(model.named_parameters())
        groups = [{"params": [params[name] for name in names], "lr": 0.1 / (1 + i)} for i, names in enumerate(split)]
        optimizer = torch.optim.AdamW(groups)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        return {"model": model, "optim": optimizer, "ema": torch.rand(3), "step": int(model.weight.sum() * 1000)}

    def values(state: dict[str, Any]) -> Any:
        return deepcopy([one.state_dict() if hasattr(one, "state_dict") else one for one in state.values()])

    before, after = state_of(["weight"], ["bias"]), state_of(["weight", "bias"], [])
    unchanged = values(after)
    with reshard.CheckpointManager(tmp_path, every=Every(steps=1)) as manager:
        manager.save(1, before)
        with pytest.raises(NormalizationError, match="in one group of optimizer 0, but were saved with different"):
            manager.restore(after)
        assert_same(values(after), unchanged)
        assert manager.restore(before) is not None


@pytest.mark.parametrize("groups", [(1, 2), (2, 1)])
def test_param_groups_may_be_split_or_joined(groups: tuple[int, int], tmp_path: Path) -> None:
    def state_of(count: int, lr: float) -> dict[str, Any]:
        model = nn.Linear(3, 4)
        parts = [[model.weight], [model.bias]] if count == 2 else [[model.weight, model.bias]]
        return {"model": model, "optim": torch.optim.AdamW([{"params": part} for part in parts], lr=lr)}

    before, after = state_of(groups[0], 0.1), state_of(groups[1], 0.2)
    before["model"](torch.ones(2, 3)).sum().backward()
    before["optim"].step()
    with reshard.CheckpointManager(tmp_path, every=Every(steps=1)) as manager:
        manager.save(1, before)
        restored = manager.restore(after)
    assert restored is not None
    assert restored.load.ok
    assert [group["lr"] for group in after["optim"].param_groups] == [0.1] * groups[1]
    for name, parameter in after["model"].named_parameters():
        assert_same(after["optim"].state[parameter], before["optim"].state[before["model"].get_parameter(name)])


def test_an_empty_root_is_refused() -> None:
    with pytest.raises(StorageError, match="the path is empty: pass a folder"):
        reshard.CheckpointManager("", every=Every(steps=1))


@pytest.mark.parametrize("strict", [True, "subset", {"model.*": "partial"}, False, {"optim.*": "partial"}])
def test_parameters_that_were_frozen_train_on_only_when_told_so(strict: Any, tmp_path: Path) -> None:
    """A fresh optimizer has them, and the checkpoint does not: they begin without state, and the report names them."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    head = torch.optim.AdamW(model[1].parameters())
    model(torch.ones(2, 3)).sum().backward()
    head.step()
    optimizer = torch.optim.AdamW(model.parameters())

    with reshard.CheckpointManager(tmp_path, every=Every(steps=1)) as manager:
        manager.save(1, {"model": model, "optim": head})
        if strict not in (False, {"optim.*": "partial"}):
            with pytest.raises(KeyMismatchError, match=r"Missing key: 0\.weight") as caught:
                manager.restore({"model": model, "optim": optimizer}, strict=strict)
            (advised,) = re.findall(r"\n  fix: pass strict=({.*}) to set", str(caught.value))
            strict = ast.literal_eval(advised)
        report = manager.restore({"model": model, "optim": optimizer}, strict=strict)

    assert report is not None
    assert not report.load.ok
    assert report.load.missing == ("optim.state.0.weight", "optim.state.0.bias")
    assert [p in optimizer.state for p in model.parameters()] == [False, False, True, True]
    own, saved = (it.state[model[1].weight]["exp_avg"] for it in (optimizer, head))
    assert torch.equal(own, saved)


def test_what_is_no_state_of_a_run_is_told(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with reshard.CheckpointManager(tmp_path / "run", every=Every(steps=1)) as manager:
        with pytest.raises(FormatError, match="a dict, such as"):
            manager.save(1, model)
        with pytest.raises(NormalizationError, match=r"'a.optim' is an optimizer whose model is not in the state"):
            manager.save(1, {"a": {"optim": optimizer}})
        with pytest.raises(FormatError, match="'pair' is a tuple that contains a model"):
            manager.save(1, {"pair": (model, 1)})
        assert manager.all_steps() == []
        assert manager.save(1, {"model": model, "optim": optimizer})
        manager.wait()
        assert manager.all_steps() == [1]


def test_nothing_is_restored_where_nothing_is(tmp_path: Path) -> None:
    report, value = value_at(tmp_path / "run")

    assert (report, value) == (None, -1.0)
    with reshard.CheckpointManager(tmp_path / "run", every=Every(steps=1)) as manager:
        assert (manager.latest_step(), manager.all_steps()) == (None, [])
        with pytest.raises(CheckpointNotFoundError, match=r"run has no step 7: its complete steps are none"):
            manager.restore({"w": torch.zeros(3)}, 7)


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_new_run_does_not_ask_objects_for_their_state(in_memory: bool, tmp_path: Path) -> None:
    """torch's `get_optimizer_state_dict` makes Adam count a step."""
    options: Any = {"every": Every(steps=1), "background": False}
    if in_memory:
        options |= {"memory": reshard.elastic.Tier(tmp_path / "memory", copies=0), "memory_every": Every(steps=1)}
    app = mock.Mock(spec=["state_dict", "load_state_dict"])
    app.state_dict.return_value = {"w": torch.zeros(3)}
    with reshard.CheckpointManager(tmp_path / "run", **options) as manager:
        assert manager.restore({"app": app}) is None
        assert app.mock_calls == []
        manager.save(1, {"app": app})
        shutil.rmtree(tmp_path / "run" / "step-1")
        assert (manager.restore({"app": app}) is not None) == in_memory
    assert len(app.load_state_dict.mock_calls) == in_memory


def test_a_new_run_refuses_what_no_run_can_save(tmp_path: Path) -> None:
    with (
        reshard.CheckpointManager(tmp_path / "run", every=Every(steps=1)) as manager,
        pytest.raises(FormatError, match="the state of a run is a dict"),
    ):
        manager.restore(torch.nn.Linear(2, 2))


def test_what_is_damaged_is_passed_over_and_never_newest_again(tmp_path: Path) -> None:
    root = tmp_path / "run"
    run(root, [1, 2, 3])
    for step in (2, 3):
        [file] = Path(root, f"step-{step}").glob("data-*/*.safetensors")
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)

    report, value = value_at(root)
    assert (report.step, value) == (1, 1.0)
    assert [text.split(":")[0] for text in report.skipped] == ["step 3", "step 2"]
    assert run(root, [2], keep=Keep(last=2)) == [1, 2]
    assert value_at(root)[1] == 2.0
    # step 3 may be readable later
    assert sorted(path.name for path in root.glob("step-*")) == ["step-1", "step-2", "step-3"]
    [file] = Path(root, "step-1").glob("data-*/*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    assert value_at(root, 2)[1] == 2.0
    with pytest.raises(CorruptCheckpointError, match=r"step 1 in .* cannot be restored"):
        value_at(root, 1)


OTHERS = {
    "dcp, by a name of ours": ("step-5", lambda path: reshard.dcp.save({"w": torch.ones(3)}, checkpoint_id=path)),
    "native, by another name": ("checkpoint-5", lambda path: reshard.save({"w": torch.ones(3)}, path)),
    "native, with zeros": ("step-005", lambda path: reshard.save({"w": torch.ones(3)}, path)),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_run_of_another_tool_does_not_begin_again_in_silence(kind: str, tmp_path: Path) -> None:
    name, save = OTHERS[kind]
    save(tmp_path / name)
    (tmp_path / "step-7").mkdir()  # of a save that was killed

    with pytest.raises(
        CheckpointNotFoundError, match=rf"no step in .*{name} was not saved by a manager\. .* choose another root"
    ):
        value_at(tmp_path)


def test_newer_checkpoints_of_other_tools_are_told(tmp_path: Path) -> None:
    with reshard.CheckpointManager(tmp_path, every=Every(steps=1)) as manager:
        manager.save(3, {"w": torch.full((3,), 3.0)})
    for step in (2, 5):
        reshard.dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / f"step-{step}")

    report, value = value_at(tmp_path)

    assert (report.step, value) == (3, 3.0)
    assert report.skipped == (f"{tmp_path}/step-5 was not saved by a manager",)


def test_a_root_that_holds_much_besides_is_no_run_yet(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"notes-{number}.txt").touch()
    (tmp_path / "old_checkpoints" / "step-3").mkdir(parents=True)

    assert value_at(tmp_path) == (None, -1.0)


def test_a_root_that_is_a_checkpoint_is_refused_at_once(tmp_path: Path) -> None:
    reshard.save({"w": torch.ones(3)}, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(FormatError, match=r"is a checkpoint \(manifest.json\), so it cannot also be the folder"):
        reshard.CheckpointManager(tmp_path, every=Every(steps=1))
    assert sorted(tmp_path.rglob("*")) == before


def cut_manifest(step: Path) -> None:
    file = step / "manifest.json"
    file.write_bytes(file.read_bytes()[:-1])


def garble_manifest(step: Path) -> None:
    (step / "manifest.json").write_text('{"version": 1}')


def cut_data(step: Path) -> None:
    [file] = step.glob("data-*/*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])


def lose_data(step: Path) -> None:
    [file] = step.glob("data-*/*.safetensors")
    file.unlink()


def lose_manifest(step: Path) -> None:
    (step / "manifest.json").unlink()


@pytest.mark.parametrize("damage", [cut_manifest, garble_manifest, cut_data, lose_data, lose_manifest])
def test_a_published_step_that_does_not_open_is_damage_and_not_a_save_that_never_ended(
    damage: Any, tmp_path: Path
) -> None:
    """Else a run whose only step lost a byte would begin again, in silence."""
    root = tmp_path / "run"
    run(root, [1, 2])
    damage(root / "step-2")
    report, value = value_at(root)
    assert (report.step, value) == (1, 1.0)
    assert [text.split(":")[0] for text in report.skipped] == ["step 2"]
    with pytest.raises(CorruptCheckpointError, match=r"step 2 in .* cannot be restored: step 2: .*step-2"):
        value_at(root, 2)
    damage(root / "step-1")
    before = {path: path.read_bytes() for path in root.rglob("*.safetensors*")}
    with pytest.raises(CorruptCheckpointError, match=r"no step in .* can be restored: step 2: .*; step 1: ") as info:
        value_at(root)
    assert not isinstance(info.value, FileNotFoundError)
    with reshard.CheckpointManager(root, every=Every(steps=1), keep=Keep(last=1)) as manager:  # without a restore
        manager.save(7, {"w": torch.zeros(3)})
        manager.save(8, {"w": torch.zeros(3)})
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("damage", [cut_manifest, garble_manifest, cut_data, lose_data, lose_manifest])
def test_a_run_that_passed_over_damaged_steps_saves_them_again(damage: Any, background: bool, tmp_path: Path) -> None:
    """Once every job ended there: the damaged checkpoint was in the way, and the next job began at the same step."""
    root = tmp_path / "run"
    run(root, [1, 2, 3, 5])
    for step in (3, 5):
        damage(root / f"step-{step}")
    assert run(root, [3, 4], keep=Keep(last=2), background=background) == [3, 4]
    assert value_at(root)[1] == 4.0
    assert run(root, [5], keep=Keep(last=2), background=background) == [4, 5]
    assert value_at(root)[1] == 5.0
    assert value_at(root, 4)[1] == 4.0


def test_a_run_goes_on_from_an_earlier_step_only_when_told_so(tmp_path: Path) -> None:
    root, state = tmp_path / "run", {"w": torch.zeros(3)}
    run(root, [1, 2, 3])
    with reshard.CheckpointManager(root, every=Every(steps=1)) as manager:
        manager.restore(state, 1)
        with pytest.raises(CheckpointError, match="already has step 3"):
            manager.save(2, state)
        assert manager.all_steps() == [1, 2, 3]
        manager.restore(state, 1, discard_newer=True)
        assert manager.latest_step() == 1
    assert value_at(root)[0].step == 1  # also after a kill before the next save
    assert sorted(path.name for path in root.glob("step-*")) == ["step-1", "step-2", "step-3"]
    with reshard.CheckpointManager(root, every=Every(steps=1)) as manager:
        manager.restore(state)
        manager.save(2, {"w": torch.full((3,), 20.0)})
    assert value_at(root)[1] == 20.0
    assert sorted(path.name for path in root.glob("step-*")) == ["step-1", "step-2"]


def test_pruning_a_managed_run_says_that_it_does_not_know_the_policy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The record has metrics, and not what `Keep` keeps: the best step was removed without a word."""
    run(tmp_path / "run", [1, 2, 3], lambda step: {"loss": step}, keep=Keep(last=2, best=1, metric="loss", mode="min"))
    reshard.save({"w": torch.zeros(3)}, tmp_path / "other" / "step-1")
    reshard.save({"w": torch.zeros(3)}, tmp_path / "other" / "step-2")
    reshard.prune(tmp_path / "other", keep_last=1)
    assert reshard.prune(tmp_path / "run", keep_last=3) == []
    assert "prune" not in caplog.text
    would = reshard.prune(tmp_path / "run", keep_last=1, dry_run=True)
    ignores = "prune does not apply the Keep rules of this run's CheckpointManager: it"
    assert f"{ignores} would delete step-1, step-2" in caplog.text
    assert reshard.prune(tmp_path / "run", keep_last=1) == would
    assert f"{ignores} deleted step-1, step-2" in caplog.text


def test_a_step_of_a_branch_that_was_not_restored_is_refused(tmp_path: Path) -> None:
    root, state = tmp_path / "run", {"w": torch.zeros(3)}
    run(root, [2, 4])
    with reshard.CheckpointManager(root, every=Every(steps=4)) as manager:
        manager.restore(state, 2)
        with pytest.raises(CheckpointError, match=r"step 4 cannot be saved, because .* already has step 4"):
            manager.save(4, state)
        assert manager.save(8, state)
        assert manager.save(8, state).is_saved
    assert value_at(root, 4)[1] == 4.0


def test_discarded_steps_are_not_opened_or_pruned_for(tmp_path: Path) -> None:
    """Until the next save is complete, their files are there, with higher numbers."""
    root, state = tmp_path / "run", {"w": torch.zeros(3)}
    run(root, [1, 2, 3])
    with reshard.CheckpointManager(root, every=Every(steps=1)) as manager:
        manager.restore(state, 2, discard_newer=True)
    for path in (root, tmp_path / "checkpoints"):  # a folder of steps may also be one level down
        if path != root:
            path.mkdir()
            root.rename(path / "run-checkpoints")
        assert reshard.open(path).url.endswith("step-2")
        assert str(reshard.latest_complete(path)).endswith("step-2")
        assert reshard.open(path, step=3).url.endswith("step-3")
        assert [step.problem is None for step in reshard.steps(path)] == [True, True, False]
        assert "went back to an earlier step" in str(reshard.steps(path)[-1].problem)
    root = tmp_path / "checkpoints" / "run-checkpoints"
    assert [Path(path).name for path in reshard.prune(root, keep_last=1)] == ["step-1"]
    assert sorted(path.name for path in root.glob("step-*")) == ["step-2", "step-3"]


def test_a_discarded_step_that_another_machine_may_be_writing_is_not_replaced(tmp_path: Path) -> None:
    root, state = tmp_path / "run", {"w": torch.zeros(3)}
    run(root, [1, 2, 3])
    [data] = (root / "step-3").glob("data-*")
    elsewhere = liveness.WriterLease("node1", 1, "9", time.time(), "m2")
    (data / commit.CLAIM).write_bytes(msgspec.json.encode(elsewhere))
    with reshard.CheckpointManager(root, every=Every(steps=1)) as manager:
        manager.restore(state, 2, discard_newer=True)
        with pytest.raises(CheckpointError, match=r"step 3 was discarded, but a job .* is writing .*step-3: nothing"):
            manager.save(3, state)
        assert manager.latest_step() == 2
    assert value_at(root)[1] == 2.0
    shutil.rmtree(root / "step-3")
    assert run(root, [3]) == [1, 2, 3]


def test_a_run_whose_only_steps_are_discarded_is_not_begun_anew(tmp_path: Path) -> None:
    root, state = tmp_path / "run", {"w": torch.zeros(3)}
    run(root, [1, 2, 3])
    with reshard.CheckpointManager(root, every=Every(steps=1)) as manager:
        manager.restore(state, 1, discard_newer=True)
        shutil.rmtree(root / "step-1")
        with pytest.raises(CheckpointNotFoundError, match=r"discarded 2, 3\. To continue .* delete .*manager.json"):
            manager.restore(state)
    with pytest.raises(CheckpointNotFoundError, match=r"has no step to open: .* step-3, step-2\. Pass step= to open"):
        reshard.open(root)
    assert reshard.latest_complete(root) is None
    (root / "manager.json").unlink()
    assert value_at(root)[0].step == 3


def test_what_a_killed_job_did_not_remove_goes_before_the_next_save(tmp_path: Path) -> None:
    """Else a job that is killed there again and again would fill the storage."""
    for step in range(1, 6):
        reshard.save({"w": torch.full((3,), float(step))}, tmp_path / f"step-{step}")
    with reshard.CheckpointManager(tmp_path, every=Every(steps=1), keep=Keep(last=2), background=False) as manager:
        manager.restore({"w": torch.zeros(3)}, 4, discard_newer=True)
        with (
            mock.patch.object(deciding, "save", side_effect=StorageError("full")),
            pytest.raises(StorageError, match="full"),
        ):
            manager.save(5, {"w": torch.zeros(3)})
        assert ledger.published_steps(str(tmp_path), {}) == {3: "", 4: ""}
        assert manager.save(6, {"w": torch.zeros(3)})
        assert manager.all_steps() == [4, 6]


def test_one_save_of_so_many_is_whole_by_itself(tmp_path: Path) -> None:
    root, based = tmp_path / "run", []
    state = {"frozen": torch.randn(100_000), "w": torch.zeros(3)}
    for life in range(2):  # it is counted across restarts
        with reshard.CheckpointManager(root, every=Every(steps=1), keep=Keep(last=4), full_every=3) as manager:
            manager.restore(state)
            for step in range(4 * life + 1, 4 * life + 5):
                manager.save(step, state)
                manager.wait()
                based.append(bool(list(Path(root, f"step-{step}").glob("data-*/*.parts"))))
    assert based == [False, True, True, False, True, True, False, True]


@pytest.mark.parametrize("asked", [False, True])
def test_a_save_reuses_no_data_of_steps_that_the_run_has_left(asked: bool, tmp_path: Path) -> None:
    """A step that restore had skipped as damaged was the base of the next save, which was then damaged, too."""
    state = {"frozen": torch.randn(100_000), "w": torch.zeros(3)}
    with reshard.CheckpointManager(tmp_path, every=1) as manager:
        manager.save(1, state)
        manager.save(2, state)
    [file] = Path(tmp_path, "step-2").glob("data-*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with reshard.CheckpointManager(tmp_path, every=1, keep=Keep(last=1), full_every=9) as manager:
        report = manager.restore(state, 1, discard_newer=True) if asked else manager.restore(state)
        assert (report.step, len(report.skipped)) == (1, not asked)
        manager.save(3, state)
    assert reshard.verify(tmp_path / "step-3").ok


@pytest.mark.parametrize("full_every", [2, 3])
def test_a_save_after_a_full_one_writes_only_the_blocks_that_changed(full_every: int, tmp_path: Path) -> None:
    """Full saves left no digests of blocks, so the next save wrote changed tensors whole."""
    state = {"w": torch.zeros(8 << 18)}  # 8 MiB
    with reshard.CheckpointManager(tmp_path, every=Every(steps=1), full_every=full_every, background=False) as manager:
        manager.save(1, state)
        state["w"][5] = 1
        manager.save(2, state)
    new = [file for file in (tmp_path / "step-2").rglob("*.safetensors") if file.stat().st_nlink == 1]
    assert 1 << 20 <= sum(file.stat().st_size for file in new) < 2 << 20
    assert reshard.verify(tmp_path / "step-2").ok
    assert torch.equal(reshard.open(tmp_path / "step-2")["w"][:], state["w"])


def test_the_root_stays_where_it_was_when_the_working_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later steps were saved in another folder of that name."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with reshard.CheckpointManager("run", every=Every(steps=1), keep=Keep(last=2)) as manager:
        manager.save(1, {"w": torch.ones(3)})
        monkeypatch.chdir(tmp_path / "elsewhere")
        manager.save(2, {"w": torch.ones(3)})
        manager.wait()
        assert manager.all_steps() == [1, 2]
        report = manager.restore({"w": torch.zeros(3)})
    assert report is not None
    assert report.path == str(tmp_path / "run" / "step-2")
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("background", [True, False])
def test_the_newest_is_taken_of_memory_and_storage(background: bool, tmp_path: Path) -> None:
    def manager() -> reshard.CheckpointManager:
        tier = reshard.elastic.Tier(tmp_path / "memory", copies=0)
        return reshard.CheckpointManager(
            tmp_path / "run", every=Every(steps=4), memory=tier, memory_every=Every(steps=2), background=background
        )

    def restored(step: int | None = None, **options: Any) -> tuple[int, bool, float]:
        with manager() as one:
            report = one.restore(state := {"w": torch.zeros(3)}, step, **options)
        assert report is not None
        return report.step, report.from_memory, state["w"][0].item()

    with manager() as one:
        assert one.restore({"w": torch.zeros(3)}) is None
        done = [one.save(step, {"w": torch.full((3,), float(step))}) for step in range(1, 8)]
    assert [(report.step, report.storage, report.memory) for report in done if report] == [
        (2, "", "every 2 steps"), (4, "every 4 steps", "every 2 steps"), (6, "", "every 2 steps"),
    ]  # fmt: skip
    assert restored() == (6, True, 6.0)
    assert restored(4) == (4, False, 4.0)
    assert restored(6) == (6, True, 6.0)
    with pytest.raises(CheckpointNotFoundError, match=r"step 2 in .* cannot be restored"):
        restored(2)
    with manager() as one:
        one.restore({"w": torch.zeros(3)})
        one.save(7, {"w": torch.full((3,), 7.0)}, force=True)
    assert restored() == (7, False, 7.0)
    with manager() as one:
        one.restore({"w": torch.zeros(3)})
        one.save(8, {"w": torch.full((3,), 8.0)})
    looking = reshard.CheckpointManager(
        tmp_path / "run", every=Every(steps=4), memory=manager()._memory, memory_every=Every(steps=2), read_only=True
    )
    with looking:
        looking.restore({"w": torch.zeros(3)}, 4, discard_newer=True)
    assert restored() == (8, True, 8.0)  # which one that only reads discards nothing of
    assert restored(4, discard_newer=True) == (4, False, 4.0)
    assert restored() == (4, False, 4.0)  # neither storage nor memory brings back what is behind it


def test_a_clock_that_is_set_back_does_not_make_a_smaller_step_newer(tmp_path: Path) -> None:
    """A later step in storage was left for what memory had, without a word, and the next save deleted it."""

    def manager() -> reshard.CheckpointManager:
        tier = reshard.elastic.Tier(tmp_path / "memory", copies=0)
        return reshard.CheckpointManager(
            tmp_path / "run", every=2, keep=Keep(last=1), memory=tier, memory_every=5, full_every=2
        )

    with manager() as one:
        for step in range(1, 6):
            one.save(step, {"w": torch.full((3,), float(step))})
    earlier = time.time() - 3600
    with mock.patch.object(time, "time", return_value=earlier), mock.patch.object(commit, "_begun", [0.0]):
        with manager() as one:
            one.restore({"w": torch.zeros(3)})
            one.save(6, {"w": torch.full((3,), 6.0)})
        with manager() as one:
            report = one.restore(state := {"w": torch.zeros(3)})
    assert report is not None
    assert (report.step, report.from_memory, state["w"][0].item()) == (6, False, 6.0)


def test_a_relative_file_of_a_request_stays_where_it_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    preemption = Preemption(file="stop")
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    (tmp_path / "stop").touch()
    assert preemption.requests() == [f"the file {tmp_path / 'stop'}"]


@pytest.mark.parametrize("how", ["signal", "file", "asks"])
def test_a_job_that_is_to_end_saves_at_the_next_step(how: str, tmp_path: Path) -> None:
    file, asked, heard = tmp_path / "stop", [False], []
    preemption = Preemption(file=file, poll=lambda: asked[0])
    earlier = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with reshard.CheckpointManager(tmp_path / "run", every=Every(steps=100), preemption=preemption) as manager:
            assert not manager.save(1, {"w": torch.ones(2)})
            if how == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
            elif how == "file":
                file.touch()
            asked[0] = how == "asks"
            report = manager.save(2, {"w": torch.ones(2)})
            assert manager.all_steps() == [2]  # by the time that it says so
            assert report.storage == report.preempted_by != ""
            assert report.preempted is True
            assert not manager.save(3, {"w": torch.ones(2)})  # once is enough
        assert heard == ([signal.SIGTERM] if how == "signal" else [])
        os.kill(os.getpid(), signal.SIGTERM)
        assert len(heard) == (2 if how == "signal" else 1)
    finally:
        signal.signal(signal.SIGTERM, earlier)


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("how", ["signal", "file"])
def test_a_request_stays_until_a_save_has_answered_it(how: str, background: bool, tmp_path: Path) -> None:
    state, file = {"w": torch.ones(2)}, tmp_path / "stop"
    full = mock.patch.object(Generation, "publish", side_effect=StorageError("the disk is full"))
    every, preemption = Every(steps=100), Preemption(file=file)
    root = tmp_path / "run"
    with reshard.CheckpointManager(root, every=every, preemption=preemption, background=background) as manager:
        if how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            file.touch()
        for step in (1, 2):
            with full, pytest.raises(StorageError, match="is full"):
                manager.save(step, state)
        report = manager.save(2, state)  # the same step again: nothing of it is there
        assert report.storage == report.preempted_by == ("SIGTERM" if how == "signal" else f"the file {file}")
        why = report.preempted_by
        assert repr(report) == f"StepReport(step 2, saved to storage ({why}), preempted ({why}))"
        assert not report.is_saved
        assert manager.all_steps() == [2]
        assert manager.save(3, state).preempted is False


def test_a_step_whose_save_failed_in_the_background_may_be_saved_again(tmp_path: Path) -> None:
    state = {"w": torch.ones(2)}
    full = mock.patch.object(Generation, "publish", side_effect=StorageError("the disk is full"))
    with reshard.CheckpointManager(tmp_path / "run", every=Every(steps=1)) as manager:
        manager.save(1, state)
        manager.wait()
        with full:
            manager.save(2, state)
            with pytest.raises(StorageError, match="is full"):
                manager.wait()
        report = manager.save(2, state, force=True)
        assert (report.storage, report.is_saved) == ("forced", False)
        manager.wait()
        assert manager.all_steps() == [1, 2]
        assert manager.save(2, state, force=True).is_saved


def test_a_save_outlives_the_interrupt_of_the_call_that_waits_for_it(tmp_path: Path) -> None:
    """The next call began another save beside it, and lost the metrics of one of them."""
    publish, on_time = Generation.publish, threading.Event()

    def late(*args: Any, **kwargs: Any) -> None:
        on_time.wait()
        publish(*args, **kwargs)

    def interrupt(*_: Any) -> None:
        threading.Timer(0.3, on_time.set).start()
        raise KeyboardInterrupt

    earlier = signal.signal(signal.SIGALRM, interrupt)
    try:
        with (
            mock.patch.object(Generation, "publish", late),
            reshard.CheckpointManager(tmp_path / "run", every=1) as manager,
        ):
            manager.save(1, {"w": torch.ones(2)})
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                manager.wait()
            manager.wait()
            assert manager.all_steps() == [1]
    finally:
        signal.signal(signal.SIGALRM, earlier)


BAD = [
    ({"every": "5"}, "every must be a number of steps, or reshard.Every"),
    ({"every": ""}, "every must be a number of steps, or reshard.Every"),
    ({"every": 0}, "Every: steps must be an integer >= 1, got 0"),
    ({"every": True}, "Every: steps must be an integer >= 1, got True"),
    ({"every": 1, "memory_every": "2"}, "memory_every must be a number of steps, or reshard.Every"),
    ({"every": 1, "memory_every": -1}, "Every: steps must be an integer >= 1, got -1"),
    ({"every": Every(steps=1), "full_every": 0}, "full_every must be an integer >= 1"),
    ({"every": Every(steps=1), "sync_every": 1.5}, "sync_every must be an integer >= 1"),
    ({"every": Every(steps=1), "memory_every": Every(steps=1)}, "pass memory= and memory_every= together"),
    ({"every": Every(steps=1), "base": "auto"}, "does not take base=: full_every"),
    ({"every": Every(steps=1), "keep": 3}, "keep must be reshard.Keep"),
    ({"every": Every(steps=1), "memory": "m", "memory_every": Every(steps=1)}, "memory must be a reshard.elastic.Tier"),
    ({"every": Every(steps=1), "preemption": "SIGTERM"}, "preemption must be reshard.Preemption"),
    ({"every": Every(steps=1), "bytes_per_s": 0}, "bytes_per_s must be a positive number"),
]


def test_a_number_of_steps_is_a_schedule(tmp_path: Path) -> None:
    tier = reshard.elastic.Tier(tmp_path / "memory", copies=0)
    with reshard.CheckpointManager(tmp_path / "run", every=4, memory=tier, memory_every=2) as manager:
        did = [(report.storage, report.memory) for report in (manager.save(n, {"n": n}) for n in (1, 2, 4))]

    assert did == [("", ""), ("", "every 2 steps"), ("every 4 steps", "every 2 steps")]


@pytest.mark.parametrize(("options", "words"), BAD, ids=[row[1] for row in BAD])
def test_options_that_cannot_be_are_told(options: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=words):
        reshard.CheckpointManager(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


POLICIES = [
    (lambda: Every(), "steps=, seconds=, or both"),
    (lambda: Every(steps=0), "steps must be an integer >= 1"),
    (lambda: Every(steps=True), "steps must be an integer >= 1"),
    (lambda: Every(seconds=float("nan")), "seconds must be a positive number"),
    (lambda: Keep(last=0), "last must be an integer >= 1"),
    (lambda: Keep(every=-1), "every must be an integer"),
    (lambda: Keep(best=2), r"best= and mode= need metric=, as in Keep\(best=2, "),
    (lambda: Keep(mode="min"), r"best= and mode= need metric=, as in Keep\(best=2, "),
    (lambda: Keep(best=-1), "best must be an integer >= 0, got -1"),
    (lambda: Keep(metric=["loss"], mode="min"), "metric must be a name, such as 'loss', got"),  # type: ignore[arg-type]
    (lambda: Keep(best=1, metric="x", mode="least"), "mode must be .*got 'least'"),  # type: ignore[arg-type]
    (lambda: Keep(best=1, metric="acc"), "mode must be 'min' if low values of 'acc' are good, 'max' if high .* None"),
    (lambda: Keep(metric="loss"), "mode must be 'min' if low values of 'loss' are good"),  # best_step() ranks by it
    (lambda: Preemption(poll=True), "poll must be a function"),  # type: ignore[arg-type]
    (lambda: Preemption(file=3), "^Preemption: file must be a path, got 3$"),  # type: ignore[arg-type]
    (lambda: Preemption(signals=(999,)), "999 is not a signal"),
    (lambda: Preemption(signals=(signal.SIGKILL,)), "is not a signal that can be handled"),
]


@pytest.mark.parametrize(("make", "words"), POLICIES, ids=[row[1] for row in POLICIES])
def test_policies_that_cannot_be_are_told(make: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        make()


def test_bad_use_is_told_and_loses_nothing(tmp_path: Path) -> None:
    root, state = tmp_path / "run", {"w": torch.zeros(3)}
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file"):
        reshard.CheckpointManager(tmp_path / "file" / "run", every=Every(steps=1))
    manager = reshard.CheckpointManager(
        root, every=Every(steps=1), keep=Keep(last=1, best=1, metric="loss", mode="min")
    )
    manager.save(4, state, {"loss": 1.0})
    with pytest.raises(CheckpointError, match=r"another CheckpointManager, of process .* read_only=True"):
        reshard.CheckpointManager(root, every=Every(steps=1))
    for step, words in (
        (3, r"step 3 is not after the last step, 4: .* call restore\(state, step=\.\.\., discard_newer=True\)$"),
        (-1, r">= 0, as in save\(step, state\), got -1"),
        (True, "got True"),
        ("5", "got '5'"),
        (state, r"as in save\(step, state\), got a dict: the arguments are swapped$"),  # and no repr of it
    ):
        with pytest.raises((CheckpointError, OptionError), match=words):
            manager.save(step, state)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="metric 'loss' must be a number, got 'low'"):
        manager.save(5, state, {"loss": "low"})
    with pytest.raises(OptionError, match="metrics must be a dict"):
        manager.save(5, state, 0.5)  # type: ignore[arg-type]
    assert not manager.save(4, state)  # it is saved already
    assert manager.save(5, state, {"loss": torch.tensor(2.0)})  # what was refused may be mended
    manager.close()
    manager.close()
    with pytest.raises(CheckpointError, match="is closed"):
        manager.save(6, state)
    with pytest.raises(CheckpointError, match="is closed"):
        manager.restore(state)
    with reshard.CheckpointManager(root, every=Every(steps=1), read_only=True) as looking:
        with pytest.raises(CheckpointError, match="read_only=True"):
            looking.save(9, state)
        with pytest.raises(CheckpointError, match="pass a metric"):
            looking.best_step()
    assert value_at(root)[0].step == 5
    with reshard.CheckpointManager(root, every=Every(steps=1), keep=manager.keep) as manager:
        assert (manager.all_steps(), manager.best_step()) == ([4, 5], 4)
        with pytest.raises(CheckpointError, match="already has step 5"):
            manager.save(5, state)
    (root / run_folder.LEDGER).write_text("{torn")
    with pytest.raises(CheckpointError, match=r"manager.json cannot be read: .* delete it"):
        reshard.CheckpointManager(root, every=Every(steps=1))


def test_where_it_is_not_known_which_steps_are_discarded_none_is_opened_or_pruned(tmp_path: Path) -> None:
    """Else a run would continue from one that it had discarded, and lose the one that it had gone back to."""
    root, state = tmp_path / "run", {"w": torch.zeros(3)}
    run(root, [1, 2, 3])
    with reshard.CheckpointManager(root, every=Every(steps=1)) as manager:
        manager.restore(state, 2, discard_newer=True)
    (root / run_folder.LEDGER).write_text("{torn")

    for call in (reshard.open, reshard.steps, reshard.latest_complete, lambda path: reshard.prune(path, keep_last=1)):
        with pytest.raises(CheckpointError, match=r"run/manager.json cannot be read: .* which of them are discarded"):
            call(root)
    assert reshard.verify(root / "step-2").ok, "it can be opened by its folder"
    (root / run_folder.LEDGER).write_text('{"of": "another program"}')
    assert reshard.latest_complete(root) == str(root / "step-3")


def test_records_of_steps_that_were_changed_are_refused_wherever_that_is(tmp_path: Path) -> None:
    """A digit of a metric decides which steps stay, and one of a number which are discarded."""
    root, state = tmp_path / "run", {"w": torch.zeros(3)}
    run(root, [1, 2, 3], lambda step: {"loss": step / 2})
    with reshard.CheckpointManager(root, every=Every(steps=1)) as manager:
        manager.restore(state, 2, discard_newer=True)
    storage, file = open_storage(root), root / run_folder.LEDGER
    text = file.read_bytes()
    assert run_folder.discarded_in(storage) == {"step-3"}

    without = text[: text.index(b',"digest"')] + b"}"
    changed = [text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :] for at in range(len(text))]
    for damaged in (b"", text[:-1], without, text + text, *changed):
        file.write_bytes(damaged)
        for read in (run_folder.records_in, run_folder.discarded_in):
            with pytest.raises(CheckpointError, match=r"manager.json .* delete it"):
                read(storage)
    file.write_bytes(text.replace(b"0.5", b"0.6", 1))
    words = r"manager.json cannot be read: it was changed since .*delete it.*discard_newer=True"
    for call in (lambda: reshard.CheckpointManager(root, every=Every(steps=1)), lambda: reshard.open(root)):
        with pytest.raises(CheckpointError, match=words):
            call()
    file.unlink()  # as it says
    with reshard.CheckpointManager(root, every=Every(steps=1)) as manager:
        assert manager.restore(state, 2, discard_newer=True).step == 2
        assert manager.all_steps() == [1, 2]


def test_records_of_steps_of_a_newer_version_are_refused(tmp_path: Path) -> None:
    """Whatever else is in them. Those of another program are none."""
    root, file = tmp_path / "run", tmp_path / "run" / run_folder.LEDGER
    run(root, [1])
    for steps in ("{}", "[]"):
        file.write_bytes(encode_sealed(msgspec.Raw(b'{"steps":%s,"version":3}' % steps.encode())))
        words = rf"{file} has format version 3, but this reshard reads up to version 2: upgrade reshard"
        for call in (lambda: reshard.CheckpointManager(root, every=Every(steps=1)), lambda: reshard.open(root)):
            with pytest.raises(FormatError, match=words):
                call()
    file.write_bytes(b'{"version":7}')
    assert reshard.open(root)["w"].shape


def test_records_of_steps_of_the_first_version_have_no_digest(tmp_path: Path) -> None:
    root, state = tmp_path / "run", {"w": torch.zeros(3)}
    run(root, [1, 2])
    earlier = b'{"steps":{"1":{"metrics":{"loss":0.5}},"2":{"is_aside":true}},"version":1}'
    (root / run_folder.LEDGER).write_bytes(earlier)
    with reshard.CheckpointManager(root, every=Every(steps=1)) as manager:
        assert manager.restore(state).step == 1


def test_the_signature_has_the_options_that_the_manager_takes() -> None:
    known = signature(reshard.CheckpointManager).parameters
    assert {"select", "ranks_per_file", "fingerprints"} < known.keys()
    assert not {"base", "overwrite"} & known.keys()


def test_metrics_without_that_of_the_policy_are_refused_and_a_step_without_metrics_is_told(
    tmp_path: Path, caplog: Any
) -> None:
    """Or the best checkpoints are removed, or nothing ever is, and nobody knows why."""
    state, keep = {"w": torch.zeros(3)}, Keep(last=1, best=1, metric="val_loss", mode="min")
    with reshard.CheckpointManager(tmp_path, every=Every(steps=2), keep=keep) as manager:
        words = (
            r"keep ranks steps by the metric 'val_loss', but metrics= has only 'loss': pass 'val_loss'. "
            r"Nothing was saved.*At steps without it, omit metrics="
        )
        with pytest.raises(OptionError, match=words):
            manager.save(1, state, {"loss": 1.0})  # though the step is not due: the first call says it
        good = manager.save(2, state, {"loss": 1.0, "val_loss": 1.0})
        assert (good.unranked, caplog.records) == ("", [])
        nan = torch.tensor(float("nan"))
        reports = [manager.save(4, state, {"loss": 1.0, "val_loss": nan}), manager.save(6, state)]
        assert [report.unranked for report in reports] == ["val_loss"] * 2
        assert repr(reports[0]).endswith(", without a metric (val_loss))")
        manager.wait()
        assert (manager.all_steps(), manager.best_step()) == ([2, 6], 2)
    told = [record.getMessage() for record in caplog.records if "metric" in record.getMessage()]
    words = "step 4 is saved without the metric 'val_loss', or with NaN, so it is not one of the best steps"
    assert told == [f"{tmp_path}: {words}"]


def test_metrics_without_end_are_the_worst_and_steps_of_any_kind_are_numbers(tmp_path: Path) -> None:
    """A loss that overflows is where a run must go on from an earlier step."""
    keep = Keep(last=1, best=2, metric="loss", mode="min")
    losses = [math.inf, 3.0, -math.inf, math.inf]
    steps = run(tmp_path / "run", np.arange(4), lambda step: {"loss": losses[step]}, keep=keep)
    assert steps == [1, 2, 3]
    assert run(tmp_path / "run", torch.arange(4, 5), lambda step: {"loss": torch.tensor(math.inf)}, keep=keep) == [
        1,
        2,
        4,
    ]
    with reshard.CheckpointManager(tmp_path / "run", every=Every(steps=1), keep=keep, read_only=True) as manager:
        assert manager.best_step() == 2


def test_a_root_that_another_has_taken_is_not_written(tmp_path: Path) -> None:
    root, state = tmp_path / "run", {"w": torch.zeros(3)}
    manager = reshard.CheckpointManager(root, every=Every(steps=1))
    manager.save(1, state)
    manager.wait()
    theirs = (root / "manager-owner.json").read_text().replace('"host":"', '"host":"not-')
    (root / "manager-owner.json").write_text(theirs)
    with pytest.raises(CheckpointError, match=r"another CheckpointManager, of process .* on not-"):
        manager.save(2, state)
    manager.close()
    assert manager.all_steps() == [1]
    assert (root / "manager-owner.json").read_text() == theirs


def test_a_manager_that_was_dropped_is_none(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for step in (1, 2):
        manager = reshard.CheckpointManager(root, every=Every(steps=1), preemption=Preemption(signals=()))
        manager.restore(state := {"w": torch.zeros(3)})
        manager.save(step, state)
        manager.wait()
        del manager
    assert value_at(root)[0].step == 2


def test_an_error_of_the_loop_is_what_one_sees(tmp_path: Path) -> None:
    def loop() -> None:
        with reshard.CheckpointManager(tmp_path / "run", every=Every(steps=1)) as manager:
            manager.save(1, {"w": torch.zeros(3)})
            raise ZeroDivisionError("of the loop")

    failing = mock.patch.object(deciding.Ledger, "tidy", side_effect=[None, MemoryError("no more")])  # before, after
    with failing, pytest.raises(ZeroDivisionError, match="of the loop") as caught:
        loop()
    assert caught.value.__notes__ == [f"closing the manager of {tmp_path / 'run'} failed, too: no more"]


@requires(FSDP2_TRAINS_ON_CPUS, "trains nothing under FSDP2 on CPUs")
@pytest.mark.gloo
def test_a_run_goes_on_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    straight = gloo.run(jobs.trained, 3, str(tmp_path / "straight"), 10)
    parts = [gloo.run(jobs.trained, world, root, steps)[0] for world, steps in ((3, 5), (2, 7), (4, 10))]

    assert [(first, steps) for first, _, steps in parts] == [(0, [3]), (3, [3, 6]), (6, [6, 9])]
    losses = [*parts[0][1][:3], *parts[1][1][:3], *parts[2][1]]
    assert losses[:3] == straight[0][1][:3]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(straight[0][1]), rtol=1e-5, atol=0)


@pytest.mark.gloo
def test_a_pipeline_goes_on_on_other_numbers_of_stages(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    straight = gloo.run(jobs.staged, 1, str(tmp_path / "straight"), 4)[0]

    for world, steps in ((4, 1), (3, 2), (1, 3), (2, 4)):
        found = gloo.run(jobs.staged, world, root, steps)
    assert len(straight) == 12
    assert_same(straight, found[0] | found[1])


@pytest.mark.gloo
def test_stages_whose_optimizers_have_no_state_get_only_their_own_settings(tmp_path: Path) -> None:
    assert gloo.run(jobs.stateless_stages, 2, str(tmp_path / "run")) == [[[0.25] * 2] * 2, [[1.25]] * 2]


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, 4])  # equal stages, and others
def test_stages_that_are_not_in_a_list_are_told_where_to_put_them(tmp_path: Path, world: int) -> None:
    with pytest.raises(KeyMismatchError, match=r"param_groups.*make the model a list of this rank's stages"):
        gloo.run(jobs.staged, world, str(tmp_path / "run"), 1, False)


@pytest.mark.gloo
def test_what_one_rank_knows_counts_for_all(tmp_path: Path) -> None:
    done = gloo.run(jobs.one_is_asked, 3, str(tmp_path / "run"))

    assert done[0] == done[1] == done[2]
    asked = [(step, why) for step, _, why in done[0] if why]
    assert [step for step, _ in asked] == [4, 7]
    assert asked[0][1] == "SIGTERM"
    assert asked[1][1].startswith("the file ")
    assert [why for _, why, preempted in done[0] if not preempted] == ["every 1.05 s"] * (len(done[0]) - 2)
    assert 3 <= len(done[0]) <= 8


@pytest.mark.gloo
def test_ranks_that_disagree_are_told_and_go_on(tmp_path: Path) -> None:
    said = gloo.run(jobs.disagreed, 2, str(tmp_path / "run"))

    for mine in said:
        assert "call CheckpointManager with different options" in mine[0]
        assert "does not take base=: full_every=k lets all but one of k saves reuse data" in mine[1]
        assert mine[2] == (
            "CheckpointError: ranks call save with different steps, 2 on rank 0 and 3 on rank 1: nothing was saved"
        )
        assert mine[4] == "[1]"
    assert said[0][3].startswith("RankFailedError: rank 1 failed")
    assert said[1][3].startswith("OptionError: metric 'loss' must be a number, got 'low'")


@pytest.mark.gloo
def test_a_new_run_asks_objects_for_their_state_if_any_host_has_a_step_in_memory(tmp_path: Path) -> None:
    assert gloo.run(jobs.new_in_memory, 2, str(tmp_path)) == [[0, None, 0, 1, (1, True), 1]] * 2


@pytest.mark.gloo
def test_an_object_that_fails_on_one_rank_fails_the_save_to_memory_of_all(tmp_path: Path) -> None:
    first, second = gloo.run(jobs.failing_in_memory, 2, str(tmp_path))

    assert "RankFailedError: rank 1 failed" in first
    assert second == "ValueError: no state"


@pytest.mark.gloo
def test_a_save_that_fails_in_the_background_is_told_by_the_next_call_of_all(tmp_path: Path) -> None:
    found = gloo.run(jobs.failing, 2, str(tmp_path / "run"))

    assert found[0][0][0] == "5 StorageError: the disk is full"
    assert found[1][0][0].startswith("5 RankFailedError: rank 0 failed in 'write': StorageError: the disk is full")
    for said, steps, files in found:
        assert len(said) == 2
        assert said[1].endswith("is closed: create a new one")
        assert steps == [2, 6]
        assert files == ["manager.json", "step-2", "step-6"]


@pytest.mark.gloo
@pytest.mark.parametrize("background", [True, False])
def test_a_defect_in_the_removal_of_older_steps_is_told_to_all_ranks(background: bool, tmp_path: Path) -> None:
    """The others once waited for the first rank, which alone removes steps."""
    first, second = gloo.run(jobs.failing_to_tidy, 2, str(tmp_path / "run"), background)

    step = 3 if background else 2
    assert first == [f"{step} RuntimeError: a defect"]
    assert len(second) == 1
    assert second[0].startswith(f"{step} RankFailedError: rank 0 failed in 'CheckpointManager.save': RuntimeError")


@pytest.mark.gloo
def test_all_ranks_look_again_if_a_step_is_removed_during_a_restore(tmp_path: Path) -> None:
    assert gloo.run(jobs.restored_while_pruned, 2, str(tmp_path / "run")) == [(1, (), 1.0)] * 2


LOADERS = [
    (2, "error", [6, 7], 3, "the same number: each goes on where it was"),
    (3, "error", "was saved per rank by 2 ranks, but this is rank", -1, "refused"),
    (3, "drop", [0, 1, 2], 3, "begins the epoch anew"),
    (3, "shared", [6, 7, 8], 3, "by the user's function"),
]


@pytest.mark.gloo
def test_data_loaders_of_each_rank_on_a_changed_number_of_ranks(tmp_path: Path) -> None:
    root = tmp_path / "run"
    gloo.run(jobs.loaders, 2, str(root), "error", 3)
    for world, on_change, wanted, epoch, note in LOADERS:
        found = gloo.run(jobs.loaders, world, str(root), on_change, 0)

        assert {its for _, its in found} == {epoch}, note
        if isinstance(wanted, str):
            assert all(wanted in text for text, _ in found), note
        else:
            assert [value for value, _ in found] == wanted, note


@pytest.mark.gloo
def test_samples_are_counted_over_changed_numbers_of_ranks(tmp_path: Path) -> None:
    seen: list[int] = []
    # steps are saved by twos, so a job that ends after 3 repeats nothing that it saved, and its third batch comes again
    for world, batches, batch in ((4, 3, 3), (2, 4, 4), (3, 3, 5), (1, 99, 7)):
        found = gloo.run(jobs.elastic, world, str(tmp_path / "run"), batches, batch)
        seen += [index for taken, _ in found for index in taken]
        assert {epoch for _, epoch in found} == {int(world == 1)}

    assert sorted(seen) == list(range(101))


def test_without_a_schedule_a_manager_only_reads_or_says_what_to_pass(tmp_path):
    with pytest.raises(
        TypeError, match=r"CheckpointManager\(\) needs every=, such as every=500 or every=reshard.Every\("
    ):
        reshard.CheckpointManager(tmp_path / "run")
    with reshard.CheckpointManager(tmp_path / "run", every=Every(steps=1)) as manager:
        manager.save(1, {"w": torch.ones(3)})
    state = {"w": torch.zeros(3)}
    with reshard.CheckpointManager(tmp_path / "run", read_only=True) as manager:
        assert (manager.restore(state).step, state["w"].tolist()) == (1, [1.0] * 3)


def test_a_save_opens_earlier_steps_only_if_they_changed(tmp_path: Path) -> None:
    """Else the hundredth save of a run would take a hundred times as long as the first."""
    state, opened = {"w": torch.arange(300.0)}, []
    with reshard.CheckpointManager(tmp_path, every=Every(steps=1), background=False) as manager:
        for step in range(6):
            manager.save(step, state)
        look = retention.open_checkpoint
        with mock.patch.object(retention, "open_checkpoint", lambda path: opened.append(path) or look(path)):
            manager.save(6, state)
            assert {Path(path).parent.name for path in opened} == {"step-6"}
            flipped = tmp_path / "step-2" / "manifest.json"
            flipped.write_bytes(flipped.read_bytes().replace(b'"w"', b'"v"', 1))
            cut = next((tmp_path / "step-3").glob("data-*/*.safetensors"))
            os.truncate(cut, cut.stat().st_size - 1)
            next((tmp_path / "step-4").glob("data-*/*.sums")).unlink()
            (tmp_path / "step-5" / "manifest.json").unlink()
            assert manager.all_steps() == [0, 1, 6]


@pytest.mark.parametrize("damage", ["manifest", "data"])
def test_a_step_that_is_replaced_while_a_manager_runs_is_looked_at_again(tmp_path: Path, damage: str) -> None:
    with reshard.CheckpointManager(tmp_path, every=Every(steps=1), background=False) as manager:
        for step in range(3):
            manager.save(step, {"w": torch.zeros(3)})
        assert manager.all_steps() == [0, 1, 2]
        shutil.rmtree(tmp_path / "step-1")
        assert manager.all_steps() == [0, 2]
        reshard.save({"w": torch.ones(5)}, tmp_path / "step-1")
        assert manager.all_steps() == [0, 1, 2]
        os.truncate(next((tmp_path / "step-1").glob(f"{damage}*.json" if damage == "manifest" else "data-*/*.s*")), 5)
        assert manager.all_steps() == [0, 2]


def test_a_metric_beyond_all_floats_is_refused() -> None:
    with pytest.raises(OptionError, match="metric 'loss' must be a number"):
        checked_metrics({"loss": 10**400})


def test_prune_takes_no_flag_for_a_number(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="keep_last must be an integer >= 1, got True"):
        reshard.prune(tmp_path, keep_last=True)


def test_a_file_or_nothing_in_place_of_the_folder_of_a_run_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(2)}, tmp_path / "a.pt")
    for call in (
        reshard.steps,
        reshard.latest_complete,
        partial(reshard.CheckpointManager, every=Every(steps=1)),
        partial(reshard.CheckpointManager, read_only=True),
    ):
        with pytest.raises(StorageError, match=r"a\.pt is a file: pass a folder$"):
            call(tmp_path / "a.pt")
    with pytest.raises(OptionError, match=r"a\.pt is a checkpoint, not the folder of a run: pass the folder above it$"):
        reshard.prune(tmp_path / "a.pt", keep_last=2)
    with pytest.raises(CheckpointNotFoundError, match=r"no such file or folder: '.*/nowhere'"):
        reshard.prune(tmp_path / "nowhere", keep_last=2)
    (tmp_path / "empty").mkdir()
    assert reshard.prune(tmp_path / "empty", keep_last=2) == []


def test_the_log_says_what_was_restored_or_that_nothing_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    every = reshard.Every(steps=1)
    with caplog.at_level("INFO", "reshard"), reshard.CheckpointManager(tmp_path / "run", every=every) as manager:
        assert manager.restore({"w": torch.zeros(3)}) is None
        manager.save(4, {"w": torch.ones(3)})
        manager.wait()
        assert manager.restore({"w": torch.zeros(3)}) is not None

    assert f"{tmp_path / 'run'} has no step to restore: the state is unchanged" in caplog.messages
    assert f"{tmp_path / 'run'}: restored step 4" in caplog.messages


def test_a_step_that_could_not_be_read_for_a_while_is_not_lost(tmp_path: Path) -> None:
    """As on a mount that is late: the run goes on from an earlier step, and removes nothing unasked."""
    root, keep = tmp_path / "run", Keep()
    state = {"w": torch.zeros(2), "step": 0}

    def manager() -> reshard.CheckpointManager:
        return reshard.CheckpointManager(root, every=Every(steps=5), keep=keep, background=False)

    with manager() as one:
        for step in (10, 20, 30):
            state["step"] = step
            one.save(step, state)
    file = next((root / "step-30").rglob("*.safetensors"))
    file.rename(away := tmp_path / "away")
    with manager() as one:
        assert one.restore(state).step == 20
    assert not [step.path for step in reshard.steps(root) if "went back" in (step.problem or "")]
    away.rename(file)
    with manager() as one:  # no save since: the newest step counts again
        assert one.restore(state).step == 30
    file.rename(away)
    with manager() as one:
        assert one.restore(state).step == 20
        one.save(25, {**state, "step": 25})
    away.rename(file)
    with manager() as one:
        report = one.restore(state)
        assert (report.step, report.skipped) == (
            25,
            ("step 30: it could not be read, so the run continued from an earlier step",),
        )
        assert reshard.verify(root / "step-30").ok
        keep = Keep(last=1)
        assert one.all_steps() == [10, 20, 25]
    with manager() as one:
        one.restore(state)
        one.save(28, {**state, "step": 28}, force=True)
        assert one.all_steps() == [28]
        assert (root / "step-30").exists()  # until the run has passed it
        one.save(35, {**state, "step": 35})
    assert [step.step for step in reshard.steps(root)] == [35]


def test_a_restore_tells_what_the_save_did_not_select(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"model": {"w": torch.ones(2)}, "optim": {"m": torch.ones(2)}, "step": 7}
    with reshard.CheckpointManager(tmp_path, every=Every(steps=1), select="model.*") as manager:
        manager.save(7, state)

    other = {"model": {"w": torch.zeros(2)}, "optim": {"m": torch.zeros(2)}, "step": 0}
    with reshard.CheckpointManager(tmp_path, every=Every(steps=1)) as manager:
        report = manager.restore(other)

    assert report is not None
    assert report.load.ok  # as after each load of a part
    assert set(report.load.excluded) == {"optim.m", "step"}
    told = "excluded 2 ('optim.m', 'step')"
    assert repr(report) == f"RestoreReport(step 7 from storage, {str(tmp_path / 'step-7')!r}, {told})"
    assert [row.message for row in caplog.records if "select" in row.message] == [
        f"{tmp_path}: step 7 was saved with select=, so the state keeps its values of 2 ('optim.m', 'step')"
    ]


def test_a_step_that_was_moved_elsewhere_and_linked_back_is_a_step(tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert run(root, range(3), keep=Keep(last=3)) == [0, 1, 2]
    shutil.move(root / "step-2", tmp_path / "archive")
    (root / "step-2").symlink_to("../archive")

    report, value = value_at(root)

    assert (report.step, report.skipped, value) == (2, (), 2.0)
    assert run(root, range(3, 7), keep=Keep(last=1)) == [2, 6]  # the policy deletes nothing elsewhere
    assert reshard.verify(tmp_path / "archive").ok


def test_a_step_that_a_link_leads_to_outlives_the_policy(tmp_path: Path) -> None:
    run(tmp_path, range(2))
    (tmp_path / "best").symlink_to("step-0")

    assert run(tmp_path, range(2, 5), keep=Keep(last=1)) == [0, 4]
    assert reshard.verify(tmp_path / "best").ok


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    with reshard.CheckpointManager(tmp_path, every=Every(steps=1), keep=Keep(last=1)) as manager:
        save_and_wait(manager, 1)
        yield manager


def save_and_wait(manager: reshard.CheckpointManager, step: int) -> None:
    manager.save(step, {"w": torch.full((3,), float(step))})
    manager.wait()


def once_before(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, do: Any) -> None:
    """Do something once, just before a function is called the next time."""
    real = getattr(owner, name)

    def hook(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(owner, name, real)
        do()
        return real(*args, **options)

    monkeypatch.setattr(owner, name, hook)


def test_a_step_that_is_saved_during_a_restore_is_not_foreign(trainer, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(trainer, "keep", Keep())
    once_before(monkeypatch, ledger, "steps_at", lambda: save_and_wait(trainer, 2))

    report, value = value_at(tmp_path)

    assert (report.step, report.skipped, value) == (1, (), 1.0)


@pytest.mark.parametrize("native", ["last", "step-007"])
def test_a_native_checkpoint_that_is_not_called_as_a_step_of_a_manager_is_foreign(native, tmp_path) -> None:
    reshard.save({"w": torch.ones(3)}, tmp_path / native)

    with pytest.raises(CheckpointNotFoundError, match=rf"{native} was not saved by a manager"):
        value_at(tmp_path)


# where a restore is when the run saves another step, and removes the one that it was about to read
MOMENTS = [
    pytest.param(retention, "_opened", id="after the list of steps"),
    pytest.param(deciding, "load", id="before the load"),
    pytest.param(reshard.api.load, "plan_rank", id="during the load"),
]


@pytest.mark.parametrize(("owner", "name"), MOMENTS)
@pytest.mark.parametrize("times", [1, 2])
def test_a_restore_takes_the_step_that_took_the_place_of_one(
    owner, name, times, trainer, tmp_path, monkeypatch
) -> None:
    """It once raised CorruptCheckpointError or CheckpointError, or found no step at all."""

    def save() -> None:
        newest = trainer.latest_step()
        save_and_wait(trainer, newest + 1)
        if newest < times:
            once_before(monkeypatch, owner, name, save)

    once_before(monkeypatch, owner, name, save)
    report, value = value_at(tmp_path)

    assert (report.step, report.skipped, value) == (times + 1, (), times + 1.0)


def test_a_step_that_is_asked_for_and_removed_meanwhile_is_none(trainer, tmp_path, monkeypatch) -> None:
    once_before(monkeypatch, deciding, "load", lambda: save_and_wait(trainer, 2))

    with pytest.raises(CheckpointNotFoundError, match="has no step 1: its complete steps are 2"):
        value_at(tmp_path, 1)


def test_a_step_that_was_saved_anew_since_it_was_listed_stays(tmp_path: Path) -> None:
    """By another process, which took the root over."""
    run(tmp_path, range(2))
    mine = ledger.Ledger.read(str(tmp_path))
    real = ledger.remove_checkpoints

    def late(*args: Any, **options: Any) -> Any:
        reshard.save({"w": torch.full((3,), 9.0)}, tmp_path / "step-0")
        return real(*args, **options)

    with mock.patch.object(ledger, "remove_checkpoints", late):
        mine.tidy({1})

    assert reshard.open(tmp_path / "step-0")["w"][...].tolist() == [9.0] * 3
    assert mine.current() == [0, 1]


def test_a_manager_that_only_reads_tells_of_damaged_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path / "run", [1, 2])
    (file,) = (tmp_path / "run" / "step-2").rglob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    caplog.clear()

    with reshard.CheckpointManager(tmp_path / "run", read_only=True) as manager:
        assert manager.restore({"w": torch.zeros(3)}).step == 1

    told = [record for record in caplog.records if "skipped step 2" in record.getMessage()]
    assert [record.levelname for record in told] == ["WARNING"]


class _Fails(Future[Any]):
    """Runs until somebody waits for it, and fails then."""

    def result(self, timeout: float | None = None) -> Any:
        raise OSError("the memory is lost")


class _LosesMemory(reshard.elastic.Tier):
    def async_save(self, *_: Any, **__: Any) -> Any:
        return _Fails()


def test_closing_waits_for_a_save_to_storage_although_one_to_memory_has_failed(tmp_path: Path) -> None:
    """The claim on the root was released while the save was still running."""
    tier = _LosesMemory(tmp_path / "memory", copies=0)
    manager = reshard.CheckpointManager(tmp_path / "run", every=4, memory=tier, memory_every=3)
    state = {"w": torch.ones(1 << 25)}
    manager.save(3, state)
    manager.save(4, state)
    with pytest.raises(OSError, match="the memory is lost"):
        manager.close()
    assert reshard.latest_complete(tmp_path / "run") == str(tmp_path / "run" / "step-4")
