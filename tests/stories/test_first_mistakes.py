"""Mistakes that people make on their first day: each error has the class that one expects, and says what to do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as state_dict
from torch import nn
from typer.testing import CliRunner

import reshard
from planners.errors import PlanError, ProofError
from planners.findings import Coverage
from reshard.cli.app import app
from reshard.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatError,
    KeyMismatchError,
    LayoutError,
    NormalizationError,
    OptionError,
    StorageError,
)

STATE: dict[str, Any] = {"w": torch.arange(1000.0), "step": 7}


def flip(folder: Path) -> None:
    """Change a bit of a tensor."""
    (file,) = folder.glob("data-*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damage", ["bit", "file", "manifest"])
def test_damage_that_verify_found_is_raised_as_damage(damage: str, tmp_path: Path) -> None:
    reshard.save(STATE, tmp_path / "c")
    reshard.save(STATE, tmp_path / "good")
    if damage == "bit":
        flip(tmp_path / "c")
    elif damage == "file":
        next((tmp_path / "c").glob("data-*/*.safetensors")).unlink()
    else:
        (tmp_path / "c" / "manifest.json").write_text('{"reshard": "checkpoint", "version"')

    for report in (
        reshard.verify(tmp_path / "c"),
        reshard.verify(tmp_path / "c", tmp_path / "good"),
        reshard.verify(tmp_path / "good", tmp_path / "c"),
        *([reshard.compare(tmp_path / "c", tmp_path / "good")] if damage == "bit" else []),
    ):
        with pytest.raises(CorruptCheckpointError) as caught:
            report.raise_if_failed()
        assert isinstance(caught.value, ProofError)  # as in earlier releases


def test_a_tensor_is_named_once_where_a_report_is_raised(tmp_path: Path) -> None:
    reshard.save({"w": torch.ones(3)}, tmp_path / "a")
    reshard.save({"w": torch.zeros(3)}, tmp_path / "b")
    for report in (reshard.compare(tmp_path / "a", tmp_path / "b"), reshard.verify(tmp_path / "a", tmp_path / "b")):
        with pytest.raises(ProofError) as caught:
            report.raise_if_failed()
        assert str(caught.value).count("'w'") == 1
        assert caught.value.fqn == "w"


def test_a_plain_loop_over_a_sampler_is_a_wrong_call(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"iterate over sampler.over\(loader\)") as caught:
        list(reshard.ElasticSampler(10))
    assert isinstance(caught.value, LayoutError)  # as in earlier releases


def test_a_difference_is_no_damage(tmp_path: Path) -> None:
    reshard.save(STATE, tmp_path / "c")
    reshard.save({**STATE, "w": torch.ones(1000)}, tmp_path / "other")
    for report in (
        reshard.verify(tmp_path / "c", tmp_path / "other"),
        reshard.compare(tmp_path / "c", tmp_path / "other"),
    ):
        with pytest.raises(ProofError, match="'w'") as caught:
            report.raise_if_failed()
        assert not isinstance(caught.value, CorruptCheckpointError)


def test_messages_print_no_tensors(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = model.state_dict()
    reshard.save({"w": torch.ones(3)}, tmp_path / "c")
    calls: dict[str, Any] = {
        r"got an? \w+: .* such as model_state_dict=, optim_state_dict=$": lambda: reshard.set_state_dict(
            model, optimizer, state, {}
        ),
        r"deep must be True or False, got an? OrderedDict$": lambda: reshard.verify(tmp_path / "c", None, state),
        "got a Tensor$": lambda: reshard.verify(tmp_path / "c", deep=state["weight"]),
        "must be .*, got a list$": lambda: reshard.save(STATE, tmp_path / "d", overwrite=[state["weight"]]),
        "got 'yes'$": lambda: reshard.save(STATE, tmp_path / "d", overwrite="yes"),
        r"got \['a', 'b'\]$": lambda: reshard.save(STATE, tmp_path / "d", overwrite=["a", "b"]),
    }
    for text, call in calls.items():
        with pytest.raises((TypeError, OptionError), match=text) as caught:
            call()
        assert "tensor(" not in str(caught.value)


def test_a_wrong_argument_of_the_sampler_is_a_wrong_option() -> None:
    for arguments, text in (
        ({"size": [1, 2, 3]}, r"takes the number of samples, ElasticSampler\(len\(dataset\)\), not a list$"),
        ({"size": 3, "part": 4, "parts": 2}, r"part at least 0 and less than parts, .*, got size=3, part=4, parts=2"),
        ({"size": 3, "tail": "pad"}, r"tail 'keep', 'drop', or 'repeat', got .* tail='pad'$"),
    ):
        with pytest.raises(OptionError, match=text) as caught:
            reshard.ElasticSampler(**arguments)  # type: ignore[arg-type]
        assert isinstance(caught.value, LayoutError)  # as in earlier releases


def test_a_report_calls_its_lists_by_their_names(tmp_path: Path) -> None:
    reshard.save(STATE, tmp_path / "c")
    report = reshard.convert(tmp_path / "c", tmp_path / "hf", format="safetensors")
    assert report.omitted == ("step",)
    with pytest.warns(DeprecationWarning, match="omitted"):
        assert report.left_out == report.omitted  # type: ignore[attr-defined]
    assert "omitted 1 ('step')" in repr(report)
    state = reshard.open(tmp_path / "c").normalized()
    with pytest.warns(DeprecationWarning, match="omitted"):
        assert state.left_out == state.omitted == ("step",)  # type: ignore[attr-defined]


def test_a_value_of_another_class_is_reported(tmp_path: Path) -> None:
    best = {"loss": 0.5, "names": ["a", "b"], "epochs": [1, 2.5]}
    reshard.save({**STATE, "best": best}, tmp_path / "c")
    for target, changed_classes in (
        ({"step": "a", "best": {"loss": 1, "names": [], "epochs": None}}, {"step": ("int", "str")}),
        ({"step": [1], "best": {"loss": "?", "names": [1, "b"], "epochs": (1, 2)}},
         {"step": ("int", "list"), "best.loss": ("float", "str"), "best.names.0": ("str", "int")}),
        ({"step": 0.0, "best": {"loss": None, "names": ["", ""], "epochs": [0, 0]}}, {}),
        ({"step": {}, "best": ""}, {"step": ("int", "dict"), "best": ("dict", "str")}),
    ):  # fmt: skip
        state = {"w": torch.zeros(1000), **target}
        report = reshard.load(state, tmp_path / "c")
        assert report.changed_classes == changed_classes
        assert report.ok == (not changed_classes)
        assert state["step"] == 7
    assert "changed_classes 2 ('step: saved int, not dict', 'best: saved dict, not str')" in repr(report)


def test_a_number_for_a_tensor_is_listed_as_cast(tmp_path: Path) -> None:
    reshard.save({"step": 7, "scale": torch.tensor(0.5)}, tmp_path / "c")
    state = {"step": torch.tensor(0.0), "scale": 1.0}
    report = reshard.load(state, tmp_path / "c")
    assert state == {"step": torch.tensor(7.0), "scale": 0.5}
    assert report.cast == {"step": ("int", "float32"), "scale": ("float32", "float")}
    reshard.save({"step": 2**60 + 1}, tmp_path / "c")
    with pytest.raises(KeyMismatchError, match="which float32 cannot hold"):
        reshard.load({"step": torch.tensor(0.0)}, tmp_path / "c")


def test_a_whole_number_takes_no_fraction_unless_asked_to(tmp_path: Path) -> None:
    reshard.save({"v": torch.tensor(3.0)}, tmp_path / "whole")
    for live in (0, False):
        state: dict[str, Any] = {"v": live}
        with pytest.raises(KeyMismatchError, match=f"v: saved as float32, but the target is {type(live).__name__}"):
            reshard.load(state, tmp_path / "whole")
        assert state["v"] is live
    with pytest.raises(KeyMismatchError, match="fix: dtype_policy='cast' converts, dtype_policy='saved' keeps"):
        reshard.load({"v": 0}, tmp_path / "whole")
    state = {"v": 0}
    report = reshard.load(state, tmp_path / "whole", dtype_policy="cast")
    assert (report.ok, report.cast, type(state["v"]), state["v"]) == (True, {"v": ("float32", "int")}, int, 3)
    for name, value in (("half", 3.5), ("huge", float("inf")), ("none", float("nan")), ("complex", 3 + 1j)):
        reshard.save({"v": torch.tensor(value)}, tmp_path / name)
        for policy in ("error", "cast"):
            with pytest.raises(KeyMismatchError, match="would drop fractions or") as caught:
                reshard.load({"v": 0}, tmp_path / name, dtype_policy=policy)  # type: ignore[arg-type]
            assert "'cast' converts" not in str(caught.value)
    assert reshard.load(state, tmp_path / "half", dtype_policy="saved").cast == {"v": ("float32", "float")}
    assert state["v"] == 3.5


@pytest.mark.parametrize("form", ["native", "c.pt"])
def test_numpy_arrays_count_with_their_bytes(form: str, tmp_path: Path) -> None:
    nested = {"a": np.ones(1_000_000), "b": [0, np.ones((2, 3), np.int16), {"c": 1}], "d": np.float64(3)}
    path, nbytes = tmp_path / form, 8_000_012
    if form == "native":
        assert reshard.save(nested, path).total_bytes == nbytes
        assert reshard.convert(path, tmp_path / "again").total_bytes == nbytes
    else:
        torch.save(nested, path)
    report = reshard.verify(path)
    assert report.covered == Coverage(nbytes, nbytes, nbytes, metadata_checked=True)
    shown = CliRunner().invoke(app, ["inspect", str(path)]).stdout
    assert ", 7.6 MiB, " in shown
    assert "shape=(1000000,))  7.6 MiB" in shown or "array([1., 1., 1., ..., 1., 1., 1.])  7.6 MiB" in shown
    assert json.loads(CliRunner().invoke(app, ["inspect", "--json", str(path)]).stdout)["total_bytes"] == nbytes


def test_checkpoints_without_step_numbers_have_one_order(tmp_path: Path) -> None:
    for name in ("y", "x"):
        reshard.save(STATE, tmp_path / name)
    assert [(step.step, step.path, step.nbytes) for step in reshard.steps(tmp_path)] == [
        (None, str(tmp_path / "y"), 4000),
        (None, str(tmp_path / "x"), 4000),
    ]
    assert reshard.latest_complete(tmp_path) == str(tmp_path / "x")
    with pytest.raises(FormatError, match=r"subfolders x, y: open one of these. Their names have no step number; resh"):
        reshard.open(tmp_path)
    assert reshard.steps(tmp_path / "x") == reshard.steps(tmp_path / "none") == []
    reshard.save(STATE, tmp_path / "above" / "run" / "step-2")
    with pytest.raises(FormatError, match=r"subfolder 'run/step-2' seems to be a checkpoint: open that$"):
        reshard.open(tmp_path / "above")


def test_a_glob_that_saves_nothing_is_shown_the_keys(tmp_path: Path) -> None:
    words = "select='modl.*' selects no key on any rank: nothing was saved. The state's top-level keys: 2 ('w', 'step')"
    with pytest.raises(KeyMismatchError, match=f"^{re.escape(words)}$"):
        reshard.save(STATE, tmp_path / "c", select="modl.*")


@pytest.mark.parametrize("globs", [["!*"], ["w", "!w"]])
def test_globs_that_leave_nothing_are_refused(tmp_path: Path, globs: list[str]) -> None:
    reshard.save(STATE, tmp_path / "c")
    with pytest.raises(KeyMismatchError, match="selects no key on any rank: nothing was saved"):
        reshard.save(STATE, tmp_path / "d", select=globs)
    with pytest.raises(
        KeyMismatchError, match=f"^the globs {re.escape(', '.join(globs))} leave no name of {tmp_path}/c"
    ):
        reshard.convert(tmp_path / "c", tmp_path / "d", select=globs)
    assert not (tmp_path / "d").exists()


def test_an_empty_file_is_a_damaged_one(tmp_path: Path) -> None:
    (tmp_path / "c.pt").touch()
    with pytest.raises(CorruptCheckpointError, match=r"c.pt is empty: restore it, or load another checkpoint$"):
        reshard.open(tmp_path / "c.pt")


def test_a_pickled_module_is_not_an_empty_state(tmp_path: Path) -> None:
    torch.save({"m": nn.Linear(2, 2)}, tmp_path / "c.pt")
    opened = reshard.open(tmp_path / "c.pt")
    assert opened.warnings[0].endswith("Linear, whose class is not known here, can only be read as plain data: 'm'")
    for call in (opened.normalized, opened.canonical, lambda: reshard.convert(opened, tmp_path / "d", model_only=True)):
        with pytest.raises(
            NormalizationError, match=r"has no tensors, and an object of .*Linear, .* save its state_dict"
        ):
            call()


def test_inspect_says_that_it_does_not_read_values(tmp_path: Path) -> None:
    reshard.save(STATE, tmp_path / "c")
    flip(tmp_path / "c")
    run = CliRunner().invoke
    assert run(app, ["inspect", str(tmp_path / "c")]).exit_code == 0
    assert run(app, ["verify", str(tmp_path / "c")]).exit_code == 1
    text = " ".join(run(app, ["inspect", "--help"]).stdout.split())
    assert "Reads metadata only" in text
    assert "To check values, use verify" in text


def test_a_star_import_keeps_the_builtin_open() -> None:
    names: dict[str, Any] = {}
    exec("from reshard import *", names)
    assert "open" not in names
    assert names["load"] is reshard.load


def test_a_relative_path_without_files_is_said_with_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = f"no such file or folder: 'nowhere' (working directory {tmp_path})"
    with pytest.raises(CheckpointNotFoundError, match=f"^{re.escape(words)}$"):
        reshard.open("nowhere")
    with pytest.raises(
        CheckpointNotFoundError, match=f"^no such file or folder: '{re.escape(str(tmp_path))}/nowhere'$"
    ):
        reshard.open(tmp_path / "nowhere")


def test_a_step_that_is_not_there_is_said_with_the_steps_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for step in (1, 2):
        reshard.save(STATE, f"run/step-{step}")
    with pytest.raises(
        CheckpointNotFoundError, match=r"'run/step-3' \(working .*\)\. Steps beside it: step-2, step-1$"
    ):
        reshard.open("run/step-3")


def test_a_glob_that_is_nearly_right_is_shown_a_glob(tmp_path: Path) -> None:
    reshard.save({"model": {"w": torch.ones(2), "b": torch.ones(2)}}, tmp_path / "c")
    with pytest.raises(KeyMismatchError, match=r"matches 'mdel\.\*': did you mean 'model\.\*'\?"):
        reshard.open(tmp_path / "c").select("mdel.*")


@pytest.mark.parametrize("name", ["junk.bin", "junk.pt"])
def test_a_file_of_anything_is_no_checkpoint(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"hello world")
    with pytest.raises(FormatError, match=rf"{name} is not a checkpoint in a known format: .* begins with b'hello wo'"):
        reshard.open(tmp_path / name)


def test_globs_that_match_nothing_are_shown_the_names(tmp_path: Path) -> None:
    reshard.save(STATE, tmp_path / "c")
    with pytest.raises(KeyMismatchError, match=r"matches 'zzz'; it has 2 \('w', 'step'\)$"):
        reshard.convert(tmp_path / "c", tmp_path / "d", select="zzz")


def test_signs_of_plans_and_layouts_are_explained(tmp_path: Path) -> None:
    reshard.save(STATE, tmp_path / "c")
    run = CliRunner().invoke
    shown = run(app, ["plan", str(tmp_path / "c"), "fsdp=2", "--items"]).stdout
    assert (
        "read items of rank 0: NAME box in this rank's shard <- box in the saved chunk, and the chunk's box in the full"
        in " ".join(shown.split())
    )
    shown = run(app, ["explain", "R on world=2", "--legend"]).stdout
    assert "all ranks that hold the tensor, where no mesh was recorded" in shown


def test_a_url_that_lost_a_slash_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = "s3:/bucket/run has one slash after its scheme: pass the URL as a string, with two"
    for call in (reshard.open, lambda path: reshard.save(STATE, path)):
        with pytest.raises(StorageError, match=f"^{words}$"):
            call(Path("s3://bucket/run"))
    assert not list(tmp_path.iterdir())


def test_given_names_that_the_model_lacks_are_noted(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    opened = reshard.open(tmp_path / "c.pt")
    assert not opened.canonical(hints={"param_names": ["weight", "bias"]}).warnings
    (noted,) = opened.canonical(hints={"param_names": ["weight", "bais"]}).warnings
    assert noted.startswith("the optimizer has state under 1 ('bais'), names that the model does not have: check ")
    with pytest.raises(NormalizationError, match=r"^hints must be a dict, such as {'vocab_size': 50257}, got \['w'"):
        opened.canonical(hints=["w"])  # type: ignore[arg-type]
    with pytest.raises(NormalizationError, match="'param_names' gives 1 name, but"):
        opened.canonical(hints={"param_names": ["weight"]})


def test_state_of_another_optimizer_is_told_once_for_all_parameters() -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(60)])
    adam, sgd = torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(2)).sum().backward()
    adam.step()
    state = reshard.get_optimizer_state_dict(model, adam)
    with pytest.raises(KeyMismatchError) as caught:
        reshard.set_optimizer_state_dict(model, sgd, state)
    words = "Unexpected key: state 'exp_avg' of 120 ('0.weight', '0.bias', '1.weight', ...), which SGD does not use"
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 5


def test_other_libraries_words_have_an_answer() -> None:
    with pytest.raises(AttributeError, match=r"'resume': CheckpointManager\(root, every=...\).restore\(state\) "):
        _ = reshard.resume  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'minutes': it takes steps, seconds$"):
        reshard.Every(minutes=5)  # type: ignore[call-arg]
    layout = reshard.layout_of({"w": torch.zeros(4)})
    with pytest.raises(PlanError, match=r"pp=2,fsdp=4'. Other axes"):  # and no axis `world`, which nobody named
        reshard.plan(layout, "dp=4")


def test_a_map_of_no_tensor_lists_the_names(tmp_path: Path) -> None:
    reshard.save({"emb": torch.zeros(3)}, tmp_path / "c")
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "c"), "--map", "q"])
    assert str(shown.exception) == f"'q' is not in {tmp_path / 'c'}. Names there: emb"


def test_a_home_folder_is_not_a_folder_called_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = r"~/run begins with ~, which only shells expand: pass os.path.expanduser\('~/run'\)$"
    for call in (reshard.open, lambda path: reshard.save(STATE, path), lambda path: reshard.load(STATE, path)):
        with pytest.raises(StorageError, match=words):
            call("~/run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("target", [{"q": np.zeros(2)}, {"q": None, "r": None}, {"q": 0}], ids=["array", "none", "int"])
def test_tensors_that_were_saved_are_missed_also_where_a_dict_of_the_target_has_none(target, tmp_path: Path) -> None:
    reshard.save({"n": {"q": torch.ones(2), "r": torch.ones(2)}, "p": torch.ones(2)}, tmp_path / "c")

    with pytest.raises(KeyMismatchError, match=r"n\.q   \(saved as a tensor, but the target has"):
        reshard.load({"n": target, "p": torch.zeros(2)}, tmp_path / "c", strict="subset")


def test_values_beside_tensors_are_loaded_into_a_dict_that_has_no_tensors(tmp_path: Path) -> None:
    reshard.save({"n": {"q": torch.ones(2), "lr": 5, "more": {"a": 1}}}, tmp_path / "c")
    state = {"n": {"lr": 0, "more": {"a": 0, "b": 2}}}

    report = reshard.load(state, tmp_path / "c", strict="subset")

    assert state == {"n": {"lr": 5, "more": {"a": 1}}}
    assert report.not_requested == ("n.q",)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_tensor_learning_rate_and_a_flat_checkpoint_are_told_of_the_form_first(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    flat = state_dict.StateDictOptions(flatten_optimizer_state_dict=True)
    saved = dict(zip(("model", "optim"), state_dict.get_state_dict(model, optimizer, options=flat)))
    dcp.save(saved, checkpoint_id=tmp_path / "c")
    with pytest.raises(KeyMismatchError) as refused:
        reshard.load({"model": model, "optim": optimizer}, tmp_path / "c")
    text = str(refused.value)
    assert 0 < text.index("flattened: load into reshard.optimizer_destinations") < text.index("nest the state")
