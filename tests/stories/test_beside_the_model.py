"""What belongs to neither model nor optimizer has no canonical name: whoever compares or loads such names is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import reshard
from reshard.cli.app import app
from reshard.errors import NormalizationError

_LOST = "2 ('critic.w', 'epoch') of {}, which belong to neither model nor optimizer"


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Path, Path]:
    """Two files with one model, of which only one has more."""
    one, other = tmp_path / "a.pt", tmp_path / "b.pt"
    model = {"l.weight": torch.ones(2, 2)}
    torch.save({"model": model, "critic": {"w": torch.ones(3)}, "epoch": 3}, one)
    torch.save({"model": model}, other)
    return one, other


@pytest.mark.parametrize("way", ["canonical", "normalized"])
def test_comparisons_say_what_they_did_not_compare(way: str, sides: tuple[Path, Path]) -> None:
    one, other = (getattr(reshard.open(path), way)() for path in sides)
    a, b = (str(sides[0]), str(sides[1])) if way == "canonical" else ("the first state dict", "the second state dict")
    for x, y, label in ((one, other, a), (other, one, a if way == "canonical" else b)):
        report = reshard.compare(x, y, measure=True)
        words = f"not compared: {_LOST.format(label)}"
        assert report.ok
        assert report.covered is not None
        assert report.covered.unchecked == words
        assert words in report.verdict
        assert words.replace("'", "&#x27;") in report.to_html()
    for deep in (True, False):
        checked = reshard.verify(
            reshard.open(sides[1]).canonical(), against=reshard.open(sides[0]).canonical(), deep=deep
        )
        assert checked.ok
        assert f"not compared: {_LOST.format(sides[0])}" in checked.verdict
    model_only = [reshard.open(path).canonical(model_only=True) for path in sides]
    assert "not compared" not in reshard.compare(*model_only).verdict


def test_a_selection_says_what_of_it_was_not_compared(sides: tuple[Path, Path]) -> None:
    one, other = (reshard.open(path).canonical() for path in sides)
    assert "not compared" not in reshard.compare(one.select("model.*"), other.select("model.*")).verdict
    assert "('critic.w', 'epoch')" in reshard.compare(one.select("*"), other).verdict


def test_commands_say_what_they_did_not_compare(sides: tuple[Path, Path]) -> None:
    run, (a, b) = CliRunner().invoke, map(str, sides)
    words = f"not compared: {_LOST.format(a)}"
    shown = run(app, ["diff", "--normalized", a, b])
    assert shown.exit_code == 0
    assert f"note  {words}" in shown.stdout
    assert json.loads(run(app, ["diff", "--normalized", "--json", a, b]).stdout)["covered"]["unchecked"] == words
    words = "note  not shown (not part of the model or optimizer): 2 ('critic.w', 'epoch')"
    assert words in run(app, ["normalize", a]).stdout
    assert json.loads(run(app, ["normalize", "--json", a]).stdout)["omitted"] == ["critic.w", "epoch"]


def test_a_load_says_what_it_could_not_load(sides: tuple[Path, Path]) -> None:
    report = reshard.load({"model": {"l.weight": torch.zeros(2, 2)}}, reshard.open(sides[0]).canonical())
    assert report.ok
    assert report.omitted == ("critic.w", "epoch")
    assert "omitted 2 ('critic.w', 'epoch')" in repr(report)


def test_a_model_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    path, optimizer = tmp_path / "o.pt", torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer.step()
    torch.save({"optimizer": optimizer.state_dict()}, path)
    told = r"o\.pt has no model: of its names, \d+ \('optimizer\.state"
    with pytest.raises(NormalizationError, match=told):
        reshard.open(path).canonical(model_only=True)
    with pytest.raises(NormalizationError, match=told):
        reshard.convert(path, tmp_path / "m", model_only=True)
    for words in (["diff", "--model", path, path], ["convert", "--model", path, tmp_path / "m"]):
        assert isinstance(CliRunner().invoke(app, list(map(str, words))).exception, NormalizationError)
    assert not (tmp_path / "m").exists()


def test_there_may_be_nothing_to_compare(tmp_path: Path) -> None:
    path = tmp_path / "e.pt"
    torch.save({"epoch": 3}, path)
    assert reshard.compare(path, path).is_empty is False
    named = reshard.open(path).canonical()
    report = reshard.compare(named, named)
    assert report.is_empty
    assert report.covers.startswith("nothing to compare: neither side has a tensor or another value; not compared: 1 (")
    shown = CliRunner().invoke(app, ["diff", "--normalized", str(path), str(path)])
    assert shown.exit_code
    assert "nothing to compare" in str(shown.exception)
    assert "the same" not in shown.stdout


def _raw(scale: float) -> dict[str, Any]:
    """A rank's raw state of FSDP1's optimizer."""
    return {"state": {0: {"exp_avg": torch.ones(4) * scale}}, "param_groups": [{"lr": scale, "params": [0]}]}


_OPTIMIZER_KEYS = ("state.0.exp_avg", "param_groups.0.lr", "param_groups.0.params")
_LOST_OF_RANKS = {
    "fsdp1": [*(f"optimizer.{key}" for key in _OPTIMIZER_KEYS), "epoch"],
    "fsdp1 and a list": [*(f"more.0.{key}" for key in _OPTIMIZER_KEYS), "epoch"],
    "pipeline stages": ["critic.w", "epoch"],
    "deepspeed": ["critic.w", "epoch"],
    "megatron legacy": ["critic.w"],
}


@pytest.mark.parametrize("kind", _LOST_OF_RANKS)
def test_files_of_ranks_name_what_of_them_is_not_read(kind: str, tmp_path: Path) -> None:
    """Such as a second optimizer, or a second model."""
    files = ["f_0", "f_1"]
    state: dict[str, Any] = {"critic": {"w": torch.ones(3)}, "epoch": 3}
    if "fsdp1" in kind:
        state = {"model": {"w": torch.ones(4)}, "epoch": 3, "optim": _raw(1.0)}
        state |= {"more": [_raw(2.0)]} if "list" in kind else {"optimizer": _raw(2.0)}
    elif kind == "pipeline stages":
        files, state["model"] = ["stage_0", "stage_1"], {"layers.0.w": torch.ones(2)}
    elif kind == "deepspeed":
        files, state["module"] = ["mp_rank_00_model_states"], {"w": torch.ones(2)}
    else:
        files, state["model"] = ["mp_rank_00/model_optim_rng"], {"w": torch.ones(2)}
        state |= {"args": {"tensor_model_parallel_size": 1}, "checkpoint_version": 3.0}
    for file in files:
        (tmp_path / "c" / file).parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, tmp_path / "c" / f"{file}.pt")
    opened = reshard.open(tmp_path / "c")
    assert opened.format.replace("_", " ") == kind.removesuffix(" and a list")
    hints = {"param_names": ["w"], "param_shapes": {"w": (8,)}} if "fsdp1" in kind else {}
    fronts = [file.partition("/")[0] for file in files]
    lost = {f"{front}.{key}" for front in fronts for key in _LOST_OF_RANKS[kind]}
    found = opened.normalized(hints)
    assert {*found.omitted} == lost
    assert ["one model and one optimizer are read" in note for note in found.notes] == ["fsdp1" in kind] * len(
        found.notes
    )
    assert {*opened.canonical(hints).contents.left_out} == lost
    report = reshard.convert(tmp_path / "c", tmp_path / "n", normalized=True, hints=hints)
    kept = {*reshard.open(tmp_path / "n").objects}
    assert {*report.omitted} == lost - kept
