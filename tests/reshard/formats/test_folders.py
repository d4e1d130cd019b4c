"""What a folder is: dozens of mixtures, and for each what is opened, or why nothing is."""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import reshard
from reshard.cli.app import run
from reshard.errors import CheckpointError
from reshard.storage import open_storage
from tests.torch_releases import save_alone

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

NAMES = ("native", "dcp", "hf", "pt", "index", "deepspeed", "megatron", "trainer")


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each kind, to be copied."""
    root = tmp_path_factory.mktemp("templates")
    state = {"w": torch.ones(2)}
    made = {name: root / name for name in NAMES}
    for name in ("hf", "pt", "index", "deepspeed", "megatron", "trainer"):
        made[name].mkdir()
    reshard.save(state, made["native"])
    save_alone(state, checkpoint_id=made["dcp"])
    save_file(state, made["hf"] / "model.safetensors")
    torch.save(state, made["pt"] / "model.pt")
    for part in (1, 2):
        save_file({f"w{part}": torch.ones(2)}, made["index"] / f"model-0000{part}-of-00002.safetensors")
    weights = {f"w{part}": f"model-0000{part}-of-00002.safetensors" for part in (1, 2)}
    (made["index"] / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    shapes = {"w": torch.Size([2])}
    for tag in (1, 2):
        step = made["deepspeed"] / f"global_step{tag}"
        step.mkdir()
        torch.save({"module": state, "param_shapes": [shapes], "dp_world_size": 1}, step / "mp_rank_00_model_states.pt")
        step = made["megatron"] / f"iter_000000{tag}" / "mp_rank_00"
        step.mkdir(parents=True)
        torch.save({"model": state, "checkpoint_version": 3.0, "iteration": tag}, step / "model_optim_rng.pt")
    (made["deepspeed"] / "latest").write_text("global_step1")
    (made["megatron"] / "latest_checkpointed_iteration.txt").write_text("1")
    save_file(state, made["trainer"] / "model.safetensors")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    torch.save(optimizer.state_dict(), made["trainer"] / "optimizer.pt")
    torch.save({"last_epoch": 1}, made["trainer"] / "scheduler.pt")
    torch.save({"python": 1}, made["trainer"] / "rng_state.pth")
    torch.save({"a": 1}, made["trainer"] / "training_args.bin")
    (made["trainer"] / "trainer_state.json").write_text("{}")
    return made


def say(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """How a command ends, and what it prints."""
    with pytest.raises(SystemExit) as end:
        run(list(words))
    return int(end.value.code or 0), capsys.readouterr().out


def build(folder: Path, contents: dict[str, str], templates: dict[str, Path]) -> None:
    """`contents`: by path, what lies there: a kind of checkpoint, a kind of file, or "-> link"."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, kind in contents.items():
        at = folder / name
        at.parent.mkdir(parents=True, exist_ok=True)
        if kind in templates:
            shutil.copytree(templates[kind], at, dirs_exist_ok=True)
        elif kind.startswith("-> "):
            at.symlink_to(kind[3:])
        else:
            FILES[kind](at)


FILES: dict[str, Callable[[Path], object]] = {
    "empty": lambda at: at.mkdir(),
    "file": lambda at: torch.save({"w": torch.zeros(2)}, at),
    "safetensors": lambda at: save_file({"w": torch.zeros(2)}, at),
    "text": lambda at: at.write_text("step-20"),
    "json": lambda at: at.write_text('{"name": "something else"}'),
    "torn native": lambda at: (at.mkdir(), (at / "manifest.json").write_text('{"reshard":"checkpoint","version":1,')),
    "torn dcp": lambda at: (at.mkdir(), (at / "__0_0.distcp").write_bytes(b"x")),
}

STEPS = {"step-10": "native", "step-20": "native"}

TAKEN: dict[str, tuple[dict[str, str], str]] = {
    # what lies there, and what of it is opened
    "a run": (STEPS, "step-20"),
    "best.pt beside a run": ({**STEPS, "best.pt": "file"}, "step-20"),
    "scheduler.pt beside a run": ({**STEPS, "scheduler.pt": "file"}, "step-20"),
    "latest.pth beside a run": ({**STEPS, "latest.pth": "file"}, "step-20"),
    "best.ckpt beside a run": ({**STEPS, "best.ckpt": "file"}, "step-20"),
    "several files beside a run": ({**STEPS, "a.pt": "file", "b.bin": "file", "c.pkl": "file"}, "step-20"),
    "files of safetensors that somebody keeps": ({**STEPS, "ema.safetensors": "safetensors"}, "step-20"),
    "one file and one step": ({"step-10": "native", "model.pt": "file"}, "step-10"),
    "one file and one step of DCP": ({"step-10": "dcp", "best.pt": "file"}, "step-10"),
    "optimizer and scheduler beside steps of HF": (
        {"checkpoint-10": "hf", "optimizer.pt": "file", "scheduler.pt": "file"},
        "checkpoint-10",
    ),
    "training_args.bin beside a run": ({**STEPS, "training_args.bin": "file"}, "step-20"),
    "numbers alone": ({"10": "native", "20": "native", "best.pt": "file"}, "20"),
    "numbers alone, items below": ({"10/state": "dcp", "9/state": "dcp", "best.pt": "file"}, "error"),
    "numbers that are no steps": ({"0/stdout.log": "text", "1/stdout.log": "text", "model.pt": "file"}, ""),
    "a run in a folder of checkpoints, best.pt above": (
        {"checkpoints/step-1": "dcp", "checkpoints/step-2": "dcp", "best.pt": "file"},
        "checkpoints/step-2",
    ),
    "a run in a folder of checkpoints, best.pt in it": (
        {"checkpoints/step-1": "dcp", "checkpoints/best.pt": "file"},
        "checkpoints/step-1",
    ),
    "Lightning's files": ({"epoch=0-step=7.ckpt": "file", "epoch=1-step=9.ckpt": "file"}, "epoch=1-step=9.ckpt"),
    "Lightning's files, best.ckpt": ({"epoch=0-step=7.ckpt": "file", "best.ckpt": "file"}, "epoch=0-step=7.ckpt"),
    "Lightning's last": ({"epoch=0-step=7.ckpt": "file", "last.ckpt": "file", "b.pt": "file"}, "last.ckpt"),
    "a torn newest step": ({**STEPS, "step-30": "torn native"}, "step-20"),
    "a torn newest step, best.pt": ({**STEPS, "step-30": "torn dcp", "best.pt": "file"}, "step-20"),
    "an empty newest step": ({**STEPS, "step-30": "empty"}, "step-20"),
    "a link to a step": ({**STEPS, "latest": "-> step-10"}, "step-20"),
    "a link to a step that is gone": ({**STEPS, "latest": "-> step-99"}, "step-20"),
    "a link to a step, called as one": ({**STEPS, "last": "-> step-10"}, "last"),
    "a file that says which is the latest": ({**STEPS, "latest": "text"}, "step-20"),
    "a manifest of something else": ({**STEPS, "manifest.json": "json"}, "step-20"),
    "a metadata.json of something else": ({**STEPS, "metadata.json": "json"}, "step-20"),
    "DeepSpeed": ({"": "deepspeed"}, ""),
    "DeepSpeed, best.pt beside": ({"": "deepspeed", "best.pt": "file"}, ""),
    "Megatron": ({"": "megatron"}, ""),
    "Megatron, best.pt beside": ({"": "megatron", "best.pt": "file"}, ""),
    "a step of Trainer": ({"": "trainer"}, ""),
    "steps of Trainer": ({"checkpoint-10": "trainer", "checkpoint-9": "trainer"}, "checkpoint-10"),
    "native, best.pt beside": ({"": "native", "best.pt": "file"}, ""),
    "native, safetensors beside": ({"": "native", "model.safetensors": "safetensors"}, ""),
    "a run within a step": ({"step-10": "native", "step-10/logs/step-99": "native"}, "step-10"),
    "a nested run": ({"checkpoints": "empty", "checkpoints/step-5": "hf"}, "checkpoints/step-5"),
    "one file": ({"model.pt": "file"}, ""),
}

REFUSED: dict[str, tuple[dict[str, str], str]] = {
    # what lies there, and what is said
    "native and steps": (
        {"": "native", **STEPS},
        r"both a checkpoint \(manifest\.json\) and .* step-20, step-10.* step=",
    ),
    "DCP and steps": ({"": "dcp", **STEPS}, r"both a checkpoint \(\.metadata|both a checkpoint \(__0_0.distcp"),
    "HF and steps": ({"": "hf", "checkpoint-5": "hf"}, r"both a checkpoint \(model\.safetensors\) .* checkpoint-5"),
    "an index of HF and steps": ({"": "index", "checkpoint-5": "hf"}, r"both a checkpoint \(model.*\) .* checkpoint-5"),
    "an adapter and steps": (
        {"adapter_model.safetensors": "safetensors", "checkpoint-5": "hf"},
        r"both a checkpoint .*adapter_model\.safetensors",
    ),
    "what Trainer used to leave": ({"pytorch_model.bin": "file", "checkpoint-5": "hf"}, r"pytorch_model\.bin"),
    "HF above a folder of checkpoints": ({"": "hf", "checkpoints/step-5": "dcp"}, r"both a checkpoint"),
    "native and DCP": ({"": "native", ".": "dcp"}, r"several formats: .*native and dcp"),
    "DCP and safetensors": ({"": "dcp", "model.safetensors": "safetensors"}, r"several formats: .*dcp and safetensors"),
    "DCP and a file": ({"": "dcp", "best.pt": "file"}, r"several formats: .*dcp and torch_save"),
    "files of torch.save": ({"best.pt": "file", "last.pt": "file"}, r"2 files of torch.save .* open one by its path"),
    "files of two kinds": ({"best.pt": "file", "model.safetensors": "safetensors"}, r"several formats"),
    "two runs": ({"a_checkpoints/step-1": "hf", "checkpoints/step-1": "hf"}, r"runs in a_checkpoints, checkpoints"),
    "empty steps": ({"step-10": "empty", "step-20": "empty"}, r"no checkpoint of the run .* can be opened"),
    "empty steps, best.pt beside": ({"step-10": "empty", "best.pt": "file"}, r"no checkpoint of the run .*best\.pt"),
    "torn steps, best.pt beside": ({"step-10": "torn dcp", "best.pt": "file"}, r"no checkpoint of the run .*step-10"),
    "nothing": ({}, r"is empty|folder: 'memory:"),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_what_is_opened(
    kind: str, tmp_path: Path, templates: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    contents, wanted = TAKEN[kind]
    build(tmp_path / "run", contents, templates)
    path = str(tmp_path / "run")
    if wanted == "error":
        with pytest.raises(CheckpointError):
            reshard.open(path)
        return
    taken = f"{path}/{wanted}" if wanted else path
    opened = reshard.open(path)

    assert opened.url == taken
    assert taken in repr(opened)
    code, out = say(capsys, "verify", path)
    if "torn native" in contents.values():  # a manifest is written at once: it was damaged later
        assert code == 1, out
        assert out.startswith("damaged: 1 problem\n")
    else:
        assert code == 0, out
        assert out.replace("\n", "").startswith(f"{taken} (")
    strays = [name for name, what in contents.items() if what in ("file", "safetensors") and "/" not in name]
    if (
        (wanted or contents.get("") == "native")
        and strays
        and not wanted.endswith(".ckpt")
        and strays != ["training_args.bin"]
    ):
        assert any(" not opened" in warning for warning in opened.warnings)
    in_memory = as_memory(tmp_path / "run")
    if not any(what.startswith("-> ") for what in contents.values()):
        assert reshard.open(in_memory).url == (f"{in_memory}/{wanted}" if wanted else in_memory)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused(
    kind: str, tmp_path: Path, templates: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    contents, why = REFUSED[kind]
    build(tmp_path / "run", contents, templates)
    for path in (str(tmp_path / "run"), as_memory(tmp_path / "run")):
        if "empty" in contents.values() and path.startswith("memory"):
            continue
        with pytest.raises(CheckpointError, match=re.compile(why, re.DOTALL)):
            reshard.open(path)
    for command in ("inspect", "verify"):
        code, out = say(capsys, command, str(tmp_path / "run"))
        assert code != 0, out


def as_memory(folder: Path) -> str:
    """The same files where they are listed by name, as in an object store."""
    url = f"memory://folders-{uuid.uuid4().hex}"
    storage = open_storage(url)
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not file.is_symlink():
            storage.publish(str(file.relative_to(folder)), file.read_bytes())
    return url


def test_steps_without_tensors_leave_no_empty_folder(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        reshard.save({"step": step}, tmp_path / f"step-{step}")
    assert len(reshard.prune(tmp_path, keep_last=1)) == 2
    assert [folder.name for folder in tmp_path.iterdir()] == ["step-3"]


def test_a_run_in_which_something_else_lies_is_still_listed_and_pruned(
    tmp_path: Path, templates: dict[str, Path]
) -> None:
    build(tmp_path, {"": "native", **STEPS, "best.pt": "file", "step-20/model.safetensors": "safetensors"}, templates)

    assert [step.step for step in reshard.steps(tmp_path)] == [10, 20]
    assert reshard.open(tmp_path, step=10).url == f"{tmp_path}/step-10"
    assert reshard.latest_complete(tmp_path) is not None
    assert reshard.prune(tmp_path, keep_last=1) == [f"{tmp_path}/step-10"]
    assert (tmp_path / "best.pt").exists()


@pytest.mark.parametrize(("kind", "marker"), [("native", "manifest.json"), ("dcp", ".metadata")])
@pytest.mark.parametrize("beside", ["step-10", "model.safetensors", "best.pt"])
def test_the_file_that_marks_a_checkpoint_opens_it_whatever_lies_beside(
    kind: str, marker: str, beside: str, tmp_path: Path, templates: dict[str, Path]
) -> None:
    build(tmp_path / "x", {"": kind, beside: "native" if beside == "step-10" else "file"}, templates)
    for path in (str(tmp_path / "x"), as_memory(tmp_path / "x")):
        opened = reshard.open(f"{path}/{marker}")
        assert opened.format == kind
        assert opened["w"][...].tolist() == [1, 1]
        assert reshard.verify(f"{path}/{marker}").ok


def test_a_storage_that_holds_a_run_is_told_to_be_opened_by_its_path(
    tmp_path: Path, templates: dict[str, Path]
) -> None:
    build(tmp_path, {**STEPS, "best.pt": "file"}, templates)
    with pytest.raises(CheckpointError, match="by the path of the run"):
        reshard.open(open_storage(tmp_path))


def test_an_index_of_other_files_beside_ours_is_found(tmp_path: Path, templates: dict[str, Path]) -> None:
    build(tmp_path / "x", {"": "native", ".": "index"}, templates)
    opened = reshard.open(tmp_path / "x")
    assert opened.format == "native"
    (warning,) = opened.warnings
    assert re.fullmatch(
        r"\d files next to manifest.json were not opened, such as \S+\. To open one, pass its path", warning
    )
    assert not reshard.verify(opened).ok


def test_a_pattern_may_have_brackets_before_its_asterisk(tmp_path: Path) -> None:
    for name in ("a-1-of-2", "a-2-of-2", "b-1-of-1"):
        save_file({name: torch.ones(2)}, tmp_path / f"{name}.safetensors")
    assert set(reshard.open(f"{tmp_path}/[a]-?-*.safetensors").keys()) == {"a-1-of-2", "a-2-of-2"}


def test_a_folder_with_a_star_in_its_name_is_no_pattern(tmp_path: Path) -> None:
    state = {"w": torch.ones(2)}
    for name in ("a*b", "run*/step-1", "*"):
        reshard.save(state, tmp_path / name)
        assert torch.equal(reshard.open(tmp_path / name)["w"][...], torch.ones(2))
        assert reshard.load({"w": torch.zeros(2)}, tmp_path / name).ok
        assert reshard.verify(tmp_path / name).ok
    assert reshard.latest_complete(tmp_path / "run*") == str(tmp_path / "run*/step-1")
    assert [step.step for step in reshard.steps(tmp_path / "run*")] == [1]
    reshard.save(state, "memory://stars/a*b")
    assert list(reshard.open("memory://stars/a*b")) == ["w"]
    torch.save(state, tmp_path / "one*.pt")
    assert list(reshard.open(tmp_path / "one*.pt")) == ["w"]


@pytest.mark.parametrize("indexed", [False, True])
def test_files_of_tensors_below_a_model_are_named_as_not_opened(indexed: bool, tmp_path: Path) -> None:
    for name in ("model.safetensors", "2_Dense/model.safetensors"):  # as sentence-transformers saves its modules
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        save_file({"weight": torch.ones(2)}, path)
    if indexed:
        index = json.dumps({"weight_map": {"weight": "model.safetensors"}})
        (tmp_path / "model.safetensors.index.json").write_text(index)

    opened = reshard.open(tmp_path)

    assert list(opened) == ["weight"]
    assert opened.warnings == ("2_Dense/model.safetensors was not opened. To open it, pass its path",)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_list_of_files_says_how_many_more_there_are(suffix: str, tmp_path: Path) -> None:
    for name in "abcdef":
        if suffix == "pt":
            torch.save({"w": torch.ones(2)}, tmp_path / f"{name}.pt")
        else:
            save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")

    with pytest.raises(CheckpointError, match=rf"d\.{suffix}, e\.{suffix} and 1 more; open one by its path"):
        reshard.open(tmp_path)
