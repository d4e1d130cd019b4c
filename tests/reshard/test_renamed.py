"""Old names of the public API: each gives what the new name gives, and warns with it."""

from __future__ import annotations

import inspect
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import planners
import reshard
from reshard import errors
from reshard.elastic import GatherReport, Tier

W = torch.ones(2)
CALLS: dict[str, Any] = {
    "save": lambda path, **more: reshard.save({"w": W}, path / "d", **more),
    "async_save": lambda path, **more: reshard.async_save({"w": W}, path / "d", **more).result(),
    "load": lambda path, **more: reshard.load({"w": W.clone()}, path / "c", **more),
    "convert": lambda path, **more: reshard.convert(path / "c", path / "d", **more),
    "prepare": lambda path, **more: reshard.prepare({"w": W}, {"w": W.clone()}, **more),
    "redistribute": lambda path, **more: reshard.redistribute({"w": W}, {"w": W.clone()}, **more),
    "verify_live": lambda path, **more: reshard.verify_live({"w": W}, {"w": W.clone()}, **more),
    "Tier": lambda path, **more: Tier(path / "tier", **more).clear(),
    "CheckpointManager": lambda path, **more: reshard.CheckpointManager(
        path / "run", every=reshard.Every(steps=1), **more
    ).close(),
    "TimedReport.timeline": lambda path, **more: reshard.load({"w": W.clone()}, path / "c").timeline(
        path / "t", **more
    ),
}


@pytest.mark.parametrize("verb", CALLS)
def test_timeout_was_called_deadline_s(verb: str, tmp_path: Path) -> None:
    reshard.save({"w": W}, tmp_path / "c")
    CALLS[verb](tmp_path, timeout=timedelta(minutes=1))
    more = {"overwrite": True} if verb == "convert" else {}
    with pytest.warns(DeprecationWarning, match=rf"^deadline_s= of {verb}\(\) is now called timeout=;") as caught:
        CALLS[verb](tmp_path, deadline_s=60.0, **more)
    assert {warning.filename for warning in caught} == {__file__}
    with pytest.raises(TypeError, match=r"got both timeout= and its old name deadline_s="):
        CALLS[verb](tmp_path, deadline_s=60.0, timeout=60.0)


def test_help_shows_the_new_name() -> None:
    assert "timeout" in inspect.signature(reshard.save).parameters
    assert "deadline_s" not in inspect.signature(reshard.save).parameters


def test_a_result_is_waited_for_by_timeout(tmp_path: Path) -> None:
    pending = reshard.async_save({"w": W}, tmp_path / "c")
    with pytest.warns(DeprecationWarning, match=r"timeout_s= of PendingSave.result\(\) is now called timeout="):
        assert pending.result(timeout_s=60.0).tensors == 1


def test_a_callback_was_a_call(tmp_path: Path) -> None:
    seen: list[object] = []
    pending = reshard.async_save({"w": W}, tmp_path / "c")
    with pytest.warns(DeprecationWarning, match=r"call= of PendingSave.add_done_callback\(\) is now called fn="):
        pending.add_done_callback(call=seen.append)
    pending.add_done_callback(fn=seen.append)
    assert pending.result().tensors == 1
    assert seen == [pending, pending]


def test_all_ranks_were_everyone() -> None:
    with pytest.warns(DeprecationWarning, match=r"everyone= of WeightSource\(\) is now called all_ranks="):
        source = reshard.WeightSource({"w": W}, everyone=True)
    with pytest.warns(DeprecationWarning, match=r"WeightSource\.everyone is now called all_ranks"):
        assert source.everyone is source.all_ranks is True


def test_a_tier_was_kept_and_recovered(tmp_path: Path) -> None:
    tier, target = Tier(tmp_path / "tier", host="a", copies=0), {"w": torch.zeros(2)}
    with pytest.warns(DeprecationWarning, match=r"Tier.keep is now called save;"):
        tier.keep({"w": W}, 1)
    with pytest.warns(DeprecationWarning, match=r"Tier.async_keep is now called async_save;"):
        tier.async_keep({"w": W * 2}, 2).result()
    with pytest.warns(DeprecationWarning, match=r"Tier.recover is now called restore;"):
        assert tier.recover(target).step == 2
    assert torch.equal(target["w"], W * 2)


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (errors, "DamagedCheckpointError", "CorruptCheckpointError"),
        (reshard.elastic, "KeepReport", "TierSaveReport"),
        (reshard.elastic, "RecoverReport", "TierRestoreReport"),
    ],
)
def test_classes_are_the_same_under_both_names(module: Any, old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"{old} is now called {new};"):
        assert getattr(module, old) is getattr(module, new)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        module.Nothing  # noqa: B018


@pytest.mark.parametrize(
    ("name", "own", "path"), [("huggingface", "safetensors", "d"), ("torch", "torch_save", "d.pt")]
)
def test_formats_have_the_names_of_the_field_too(name: Any, own: str, path: str, tmp_path: Path) -> None:
    reshard.save({"w": W}, tmp_path / "c")
    assert reshard.convert(tmp_path / "c", tmp_path / path, format=name).format == own
    assert reshard.open(tmp_path / path).format == own


def test_managers_had_other_words_for_their_synchronization(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match=r"ask_every= of CheckpointManager\(\) is now called sync_every="):
        reshard.CheckpointManager(tmp_path / "run", every=reshard.Every(steps=1), ask_every=2).close()
    with pytest.warns(DeprecationWarning, match=r"asks= of Preemption\(\) is now called poll="):
        preemption = reshard.Preemption(asks=bool)
    with pytest.warns(DeprecationWarning, match=r"Preemption\.asks is now called poll"):
        assert preemption.asks is bool


def test_full_saves_were_whole(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match=r"whole_every= of CheckpointManager\(\) is now called full_every="):
        reshard.CheckpointManager(tmp_path / "run", every=reshard.Every(steps=1), whole_every=2).close()


@pytest.mark.parametrize(
    ("report", "old", "new"),
    [
        (reshard.SetReport(uninitialized=("w",)), "uninitialised", "uninitialized"),
        (reshard.OptimizerReport(without_state=("w",)), "cold", "without_state"),
        (reshard.OptimizerReport(unused=("w",)), "foreign", "unused"),
        (GatherReport("p", 1, 1, 1, 1, ("w",)), "passed_over", "skipped"),
    ],
)
def test_fields_of_reports(report: Any, old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"{type(report).__name__}.{old} is now called {new};"):
        assert getattr(report, old) == getattr(report, new) == ("w",)


def test_a_plan_was_drawn_by_a_function() -> None:
    plan = reshard.plan(reshard.layout_of({"w": W}), "fsdp=2")
    with pytest.warns(DeprecationWarning, match=r"planners.to_html\(plan\) is now called plan.to_html\(\);") as caught:
        draw: Any = planners.to_html  # type: ignore[attr-defined]
    assert [warning.filename for warning in caught] == [__file__]
    assert draw(plan, title="t") == plan.to_html(title="t")


def test_unsharded_axes_were_uncut() -> None:
    topology = planners.Topology.parse("dp=2,tp=2", {"*.w": "S(0),S(1)", "*": "S(0),R"})
    layout = topology.layout([planners.TensorSpec("b", (4,), "float32"), planners.TensorSpec("a.w", (4, 4), "float32")])
    plan = planners.plan_reads(layout, planners.ddp(4).layout(layout.specs))

    assert layout.uncut_axes() == layout.unsharded_axes() == {}
    assert topology.uncut_axes(layout) == topology.unsharded_axes(layout) == {}
    stats = planners.summarize(plan)
    assert stats.uncut_axes == stats.unsharded_axes != {}
