"""The program as a whole: quick help, exit codes, errors of one message."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console

import reshard
from reshard.cli.app import EXAMPLES, _tell, app
from reshard.cli.messages import in_words_of_the_command_line
from reshard.cli.output import columns, print_text

RESHARD = [sys.executable, "-m", "reshard"]
COMMANDS = [command.name for command in app.registered_commands]


def test_help_needs_neither_torch_nor_numpy() -> None:
    source = (
        "import sys\nfrom reshard.cli.app import run\n"
        "try:\n    run(['--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "print([name for name in ('torch', 'numpy', 'networkx') if name in sys.modules])"
    )

    ran = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)

    assert ran.stdout.strip().endswith("[]")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(say, command) -> None:
    said = say(command, "--help")

    assert said.code == 0
    assert "--json" in said.out
    assert "<" not in said.out, "flags take no value"
    assert re.match(r"Usage: reshard \w+ \[OPTIONS\].*\n\n[A-Z]\w+ [^.]+\.\n", said.out), "one sentence first"


def test_nothing_said_is_help(say) -> None:
    said = say()

    assert "inspect" in said.out
    assert said.code == 2


def test_help_flows_where_the_terminal_is_wide() -> None:
    texts = [app.info.help, *(command.help for command in app.registered_commands)]

    assert len(texts) == len(COMMANDS) + 1
    assert all(text and "\n" not in text.replace("\n\n", "") for text in texts)


def test_version(say) -> None:
    assert say("--version").out.startswith("reshard ")


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["inspect"], 2, "error: missing argument 'CHECKPOINT'. See reshard inspect --help"),
        (["inspect", "--no-such"], 2, "error: no such option: --no-such. See reshard inspect --help"),
        (["nosuch"], 2, "error: no such command 'nosuch'. See reshard --help"),
        (["ls", "run"], 2, "error: there is no command 'ls': write reshard inspect"),
        (["compare", "a", "b"], 2, "error: there is no command 'compare': write reshard diff"),
        (["help", "inspect"], 2, "there is no command 'help': write reshard COMMAND --help"),
        (["load", "run"], 2, "there is no command 'load': in Python, reshard.save(state, path) and reshard.load(st"),
        (["verify", ".", "--againts", "."], 2, "no such option: --againts: did you mean '--against'? See reshard ver"),
        (["inspect", ".", "--setp", "3"], 2, "error: no such option: --setp: did you mean '--step'? See reshard ins"),
        (["verify", "--deep", "."], 2, "error: no such option: --deep. See reshard verify --help"),
        (
            ["plan", ".", "fsdp=2", "--step-size", "1"],
            2,
            "error: no such option: --step-size: did you mean '--step'? See",
        ),
        (["diff", ".", ".", "--labels", "1"], 2, "error: no such option: --labels. See reshard diff"),
        (["prune", "run"], 2, "error: missing option '--keep-last'. See reshard prune --help"),
        (["prune", "run", "--keep-last", "0"], 2, "invalid value '0' for '--keep-last': write a number of at least 1."),
        (["prune", "nowhere", "--keep-last", "1"], 3, "error: no such file or folder: "),
        (["inspect", "nowhere"], 3, "error: no such file or folder: "),
        (["diff", ".", ".", "--step", "1"], 2, "diff has no --step: give the folder of a step, such as run/step-100"),
        (["diff", ".", ".", "--workers", "2", "--model"], 2, "--workers compares full checkpoints"),
        (["run"], 2, "error: no such command 'run'. See reshard --help"),
        (["prine"], 2, "Did you mean 'prune'? See reshard --help"),
        (["inpect", "."], 2, "Did you mean 'inspect'? See reshard --help"),
        (["plan", "dp=two", "tp=2"], 2, "'dp=two' is neither a path nor a topology. Write a topology like"),
        (["plan", "tp=4,tp=2", "tp=2"], 2, "the topology 'tp=4,tp=2' names an axis twice"),
        (["plan", "fsdp6", "tp=2"], 2, "'fsdp6' is neither a path nor a topology: did you mean 'fsdp=6'?"),
        (["plan", ".", "8"], 2, "'8' is neither a path nor a topology. Write a topology like 'fsdp=3', "),
        (["plan", "8x4", "."], 2, "'8x4' is neither a path nor a topology."),
        (
            ["explain"],
            2,
            "explain needs a LAYOUT, such as 'S(0),R on dp=4,tp=2'. The notation: reshard explain --legend",
        ),
        (["explain", "--legend", "--json"], 2, "explain needs a LAYOUT, such as"),
        (
            ["plan", ".", "dp=2", "--rule", "x=S(0)"],
            2,
            "The rules are for 'x'. Add a last rule for all other tensors, ",
        ),
        (
            ["convert", ".", "out", "--onto", "dp=2", "--rule", "x=S(0)"],
            2,
            "The rules are for 'x'. Add a last rule for",
        ),
        (["plan", "fsdp=4/tp=2", "tp=2"], 2, "topology: did you mean 'fsdp=4,tp=2'?"),
        (
            ["plan", ".", "fsdp=3,tp"],
            2,
            "'fsdp=3,tp' is neither a path nor a topology. Write a topology like 'fsdp=3', ",
        ),
        (["plan", ".", "tp=two,fsdp=2"], 2, "'tp=two,fsdp=2' is neither a path nor a topology. Write a topology like"),
        (["plan", "tp=", "tp=2"], 2, "cannot read the topology 'tp=': expected tp=RANKS, with numbers >= 1"),
        (["plan", "nowhere", "tp=2"], 3, "Or pass a topology, such as 'fsdp=3'"),
        (["plan", ".", "tp=2", "--html", "/none/p.html"], 3, "No such file or directory. Check its folder and your"),
        (["inspect", "nowhere", "--html", "/none/p.html"], 3, "cannot open '/none/p.html'"),
        (["diff", "nowhere", ".", "--html", "/none/p.html"], 3, "cannot open '/none/p.html'"),
        (["plan", "nowhere", "tp=2", "--out", "."], 3, "cannot open '.': Is a directory"),
        (["convert", ".", "out", "--names", "torchtitan:hf"], 2, "torchtitan:hf: the model's config.json is needed"),
        (
            ["convert", ".", "out", "--names", "torchtitan:hugface"],
            2,
            "no naming scheme 'hugface': did you mean 'huggingface'?",
        ),
        (["plan", "fsdp=2", "tp=2"], 2, "pass a checkpoint or a layout file as one of the two"),
        (["plan", "fsdp=2", "dp=2", "--rule", "S(0)"], 2, "write GLOB=PLACEMENTS"),
        (["plan", "hsdp=2", "tp=2"], 2, "cannot read the topology 'hsdp=2': expected hsdp=REPLICASxSHARDS"),
        (["plan", "fsdp=0", "."], 2, "cannot read the topology 'fsdp=0': expected fsdp=RANKS, with numbers >= 1"),
        (["plan", "fsdp=two", "."], 2, "'fsdp=two' is neither a path nor a topology."),
        (["plan", "ddp=2,tp=2", "."], 2, "no predefined topology has ddp with tp: write 'fsdp=3', "),
        (["plan", "tp=2,fspd=2", "."], 2, "did you mean 'fsdp'?"),
        (
            ["plan", "dp=2", "."],
            2,
            "the unknown axis 'dp': did you mean 'fsdp', which shards over data-parallel ranks? (ddp replicates.)",
        ),
        (
            ["plan", "ep=2", "."],
            2,
            "Write 'fsdp=3', 'tp=2', 'fsdp=4,tp=2', 'hsdp=2x4', 'ddp=8', or 'pp=2,fsdp=4'. Other axes",
        ),
        (["plan", ".", "FSDP=2"], 2, "has the unknown axis 'FSDP': did you mean 'fsdp'? Write"),
        (["plan", ".", "fsdp=9876543210"], 2, "may have at most 16,777,216 ranks, got 9,876,543,210 for {'fsdp': 98"),
        (
            ["convert", ".", "out", "-f", "DCP"],
            2,
            "cannot write the format 'DCP': did you mean 'dcp'? Known formats: native, ",
        ),
        (["plan", "pp=4", "."], 2, "3 layers do not fill the 4 stages of 4 ranks"),
        (["plan", "dp=2", "."], 2, "Other axes, such as ep, need rules such as --rule '*=S(0)'"),
        (["plan", "cp=2,tp=2", ".", "--rule", "*=tpp: S(0)"], 2, "has ['cp', 'tp']: did you mean 'tp'?"),
        (["normalize", ".", "--hint", "heads"], 2, "write --hint KEY=JSON"),
        (["normalize", ".", "--hint", "prefx=0"], 2, "no hint 'prefx': did you mean 'prefix'? Known: param_names, "),
        (["inspect", ".", "--select"], 2, "error: option '--select' requires an argument. See reshard inspect --help"),
        (["convert", ".", "out", "--format"], 2, "requires an argument. See reshard convert --help"),
        (["convert", ".", "out", "--names", "torchtitan"], 2, "write --names FROM:TO --config config.json"),
        (
            ["convert", ".", "out", "--names", "torchtitan:huggingface"],
            2,
            "the model's config.json is needed: add --con",
        ),
        (["plan", ".", "tp=2", "--hint", "prefix=0"], 2, "add --normalized"),
        (["convert", ".", "out", "-f", "huggingfaec"], 2, "did you mean 'huggingface'?"),
        (["convert", ".", "out", "--max-shard", "5"], 2, "'5' has no unit: write 5GB, or 5B for bytes"),
        (["convert", ".", "out", "--max-shard", "500"], 2, "'500' has no unit: write 500MB, or 500B for bytes"),
        (["convert", ".", "out", "--step", "3"], 3, "not the folder of a run: leave out --step"),
        *(
            (["plan", ".", "fsdp=2", "--read-rate", rate], 2, f"'{rate}' must be more than 0, such as 5GB")
            for rate in ("0", "0GB", "0.1B")
        ),
        (["plan", ".", "fsdp=2", "--read-rate", "2"], 2, "'2' has no unit: write 2GB, or 2B for bytes"),
        (["inspect", ".", "--html", "page.txt"], 2, "end its name in .html, or write --html=page.txt"),
        (
            ["inspect", ".", "--map", "model.norm", "--json"],
            2,
            "--map prints a drawing of one tensor: leave out --json, --html, and --select",
        ),
        (
            ["inspect", ".", "--map", "model.norm", "--select", "*"],
            2,
            "--map prints a drawing of one tensor: leave out --json, --html, and --select",
        ),
        (
            ["inspect", ".", "--map", "model.norm", "--html", "p.html"],
            2,
            "--map prints a drawing of one tensor: leave out --json, --html, and --select",
        ),
        (["convert", ".", "out", "--rule", "*=S(0)"], 2, "--rule is for the topology of --onto: add --onto"),
        (["plan", ".", "fsdp=2", "--read-rate", "9" * 400 + "GB"], 2, "is not a size: write it like 5GB"),
        (["demo", "--out", "manifest.json"], 2, "'manifest.json' is a file. See reshard demo --help"),
        (
            ["convert", ".", "out", "--names", "torchtitan:huggingface", "--config", "manifest.json"],
            3,
            "error: manifest.json: the model's config lacks model_type, ",
        ),
        (["inspect", ".", "more"], 2, "error: unexpected argument: more. See reshard inspect --help"),
        (["explain", "R", "on", "dp=2"], 2, "argument: on dp=2. Write quotes around the layout. See reshard explain"),
        (["inspect", ".", "--html", "page"], 2, "argument: page. The name of a page ends in .html. See reshard"),
        (
            ["plan", ".", "fsdp=3", "tp=2"],
            2,
            "error: unexpected argument: tp=2. Join axes, as in fsdp=4,tp=2. See reshard plan --help",
        ),
        (["convert", ".", "out", "-f", "safetensor"], 2, "did you mean 'safetensors'?"),
        (["convert", ".", "out", "--dtype", "bfloat61"], 2, "unknown dtype 'bfloat61': did you mean 'bfloat16'?"),
        (
            ["convert", ".", "out", "--dtype", "float99"],
            2,
            "unknown dtype 'float99': write the name of a torch dtype, such",
        ),
        (["convert", ".", "."], 2, "source and output are the same, "),
    ],
)
def test_errors(say, words, code, told, monkeypatch, checkpoint) -> None:
    """One message on stderr, no traceback; on stdout nothing, or JSON."""
    monkeypatch.chdir(checkpoint)

    said = say(*words)

    assert said.code == code
    assert said.err.startswith("error: ")
    assert told in " ".join(said.err.split())
    assert "Traceback" not in said.err
    if "--json" not in words:
        assert said.out == ""
        said = say(words[0], "--json", *words[1:])
        assert said.code == code
    told_in_json = json.loads(said.out)
    assert told_in_json["ok"] is False
    assert told_in_json["error"]["message"] == said.err.removeprefix("error: ").removesuffix("\n")


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["verify", "nowhere"], "CheckpointNotFoundError"),
        (["verify", "."], "CheckpointNotFoundError"),
        (["diff", "x", "x", "--atol", "x"], "UsageError"),
        (["inspect"], "UsageError"),
        (["normalize", "x", "--hint", "heads"], "UsageError"),
        (["plan", "checkpoint", "tp=2", "--html", "/none/p.html"], "FileNotFoundError"),
    ],
)
def test_errors_in_json_have_a_kind(say, words, kind, monkeypatch, checkpoint) -> None:
    monkeypatch.chdir(checkpoint.parent)
    (checkpoint.parent / "run").mkdir()
    monkeypatch.chdir("run" if words == ["verify", "."] else ".")

    assert json.loads(say(*words, "--json").out)["error"]["kind"] == kind
    assert "error" in json.loads(say(*words, "--json", "--traceback").out)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["inspect", ""], "argument 1"),
        (["verify", "--json", ""], "argument 2"),
        (["verify", "x", "--against", ""], "argument 3"),
        (["verify", "x", "--against="], "--against="),
        (["diff", "x", ""], "argument 2"),
        (["plan", "", "fsdp=2"], "argument 1"),
        (["convert", "x", ""], "argument 2"),
        (["convert", "--", "", "x"], "argument 2"),
        (["normalize", ""], "argument 1"),
        (["gather", "", "x"], "argument 1"),
        (["gather", "x", ""], "argument 2"),
        (["prune", "", "--keep-last", "1"], "argument 1"),
    ],
)
def test_an_empty_argument_is_wrong_usage(say, words, told) -> None:
    """Mostly it is a variable of the shell that is not set."""
    said = say(*words)

    assert said.code == 2
    assert f"error: {told} is empty: " in said.err


@pytest.mark.parametrize("terminal", [False, True])
def test_a_blank_line_before_a_text_is_printed(terminal: bool) -> None:
    screen = Console(file=io.StringIO(), force_terminal=terminal, width=80)
    print_text("\nNo rule matches.", screen=screen)
    assert screen.file.getvalue() == "\nNo rule matches.\n"  # type: ignore[attr-defined]


def test_words_of_functions_are_those_of_options() -> None:
    for said, told in [
        ("choose another folder, or pass overwrite=True", "choose another folder, or pass --overwrite"),
        ("Pass it as a hint: normalized(hints={'shard_ranks': 1}) (how many)", "--hint shard_ranks=1 (how many)"),
        ("normalized(hints={'param_names': ['a', ...]}) (x)", """--hint 'param_names=["a", ...]' (x)"""),
        ("or keep them: normalized(hints={'keep_x': True})", "or keep them: --hint keep_x=true"),
        ("the hint 'prefix' takes it away", "--hint prefix takes it away"),
        ("for each, such as {'*.w': 'S(0),R'}", "such as --rule '*.w=S(0),R'"),
        ("To leave them out: select=['*', '!a.b']", "--select '*' --select '!a.b'"),
        ("no other step is complete: pass step=3", "pass --step 3"),
        ("the arguments were select=[x]", "select=[x]"),
        ("Pass step= to open one of these", "Pass --step N to open one of these"),
        ("Choose one: pass step=, the path of a step, or x", "pass --step N, the path of a step, or x"),
        ("the run's 'max_shard_bytes': 'pass rtol=' in a", "the run's 'max_shard_bytes': 'pass rtol=' in a"),
        ("compare without rtol= and atol=", "compare without --rtol and --atol"),
        (
            "name: give it another one by mapping=, or leave either out by select=",
            "name: --select '!GLOB' leaves names out",
        ),
        ("x's names: pass overwrite=True for 'y'", "x's names: pass --overwrite for 'y'"),
    ]:
        assert in_words_of_the_command_line(said).endswith(told)


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["inspect", "x", "--depth", "x"], "'--depth'"),
        (["inspect", "x", "--depth", "0"], "'--depth'"),
        (["diff", "x", "y", "--atol", "x"], "'--atol'"),
    ],
)
def test_a_wrong_number_is_named_with_what_to_write(say, words, option) -> None:
    said = say(*words)

    assert said.code == 2
    assert f"invalid value {words[-1]!r} for {option}: write a number" in said.err
    assert "such as 4" not in said.err, "which a tolerance is not"
    assert said.err.endswith(f"See reshard {words[0]} --help\n")
    assert "Input should" not in said.err


def test_every_help_has_examples_that_can_be_read() -> None:
    """Each names its command and options that it has."""
    for command, examples in EXAMPLES.items():
        shown = subprocess.run(
            [*RESHARD, command.__name__, "--help"], capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"}
        ).stdout
        for example in examples:
            assert f"reshard {example}" in shown
            assert all(word in shown.split("Examples:")[0] for word in example.split() if word.startswith("-"))


@pytest.mark.parametrize("words", [["--help"], ["inspect"], ["verify"], ["inspect", "--json"]])
def test_a_reader_that_leaves_is_no_error(checkpoint, words) -> None:
    named = words if words == ["--help"] else [words[0], str(checkpoint), *words[1:]]
    reading, writing = os.pipe()
    os.close(reading)

    ran = subprocess.run([*RESHARD, *named], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)

    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("path", "code"), [("checkpoint", 0), ("nowhere", 3)])
def test_streams_that_are_closed_change_no_exit_code(checkpoint: Path, closed: str, path: str, code: int) -> None:
    words = ["sh", "-c", f'exec "$@" {closed}', "sh", *RESHARD, "inspect", path]

    ran = subprocess.run(words, cwd=checkpoint.parent, capture_output=True, text=True)

    assert (ran.returncode, "Traceback" in ran.stderr) == (code, False)


@pytest.mark.parametrize(("words", "code"), [(["diff"], 1), (["diff", "--json"], 1), (["verify", "--against"], 1)])
def test_the_answer_is_the_same_with_nobody_reading(checkpoint, tmp_path, words, code) -> None:
    other = tmp_path / "other"
    reshard.save({f"unlike.{n}": torch.ones(2) for n in range(3)}, other)
    reading, writing = os.pipe()
    os.close(reading)

    [command, *options] = words
    ran = subprocess.run(
        [*RESHARD, command, str(checkpoint), *options, str(other)], stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)

    assert (ran.returncode, ran.stderr) == (code, "")


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_an_output_that_is_full_is_an_error_and_not_the_answer_no(checkpoint, options) -> None:
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [*RESHARD, "verify", str(checkpoint), *options], stdout=full, stderr=subprocess.PIPE, text=True
        )

    assert ran.returncode == 3
    assert ran.stderr.strip() == "error: cannot write the output: No space left on device"


def test_a_file_is_not_suggested_for_a_missing_folder(say, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mistakes").touch()
    (tmp_path / "mistaken").mkdir()
    assert (
        f"no such file or folder: 'mistake' (working directory {tmp_path}): did you mean 'mistaken'?"
        in say("inspect", "mistake").err
    )


def test_an_error_is_one_with_nobody_reading_either(tmp_path) -> None:
    reading, writing = os.pipe()
    os.close(reading)

    ran = subprocess.run([*RESHARD, "inspect", str(tmp_path / "no")], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)

    assert ran.returncode == 3
    assert ran.stderr.startswith("error: no such file or folder: ")


@pytest.mark.parametrize("words", [["--help"], ["inspect", "X"], ["plan", "X", "fsdp=2"], ["diff", "X", "é×"]])
def test_plain_text_where_there_is_no_unicode(checkpoint, words) -> None:
    ran = subprocess.run(
        [*RESHARD, *(str(checkpoint) if word == "X" else word for word in words)],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    )

    assert (ran.stdout + ran.stderr).isascii()
    assert b"Traceback" not in ran.stderr
    assert ran.returncode == (3 if "diff" in words else 0)
    if "inspect" in words:
        assert b"layers.0-2.w x 3" in ran.stdout
    if "diff" in words:
        assert rb"\xe9x" in ran.stderr


@pytest.fixture
def narrow(say, monkeypatch):
    """Runs a command line on a terminal of 45 columns; no line is longer."""
    for name, value in {"FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm", "COLUMNS": "45"}.items():
        monkeypatch.setenv(name, value)

    def narrow(*words) -> str:
        text = re.sub(r"\x1b\[[\d;]*m", "", say(*words).out)
        assert max(map(len, text.splitlines())) <= 45
        return text

    return narrow


@pytest.mark.parametrize("command", COMMANDS)
def test_help_on_45_columns(narrow, command) -> None:
    assert f"Usage: reshard {command}" in narrow(command, "--help")


def test_output_on_45_columns(narrow, checkpoint, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(checkpoint.parent)
    rules = ["--rule", "*.w=_S(0, 2),S(0)", "--rule", "*=R,R"]
    narrow("convert", "checkpoint", "run/step-1", "--onto", "dp=2,tp=2", *rules)
    for words in (
        ["inspect", "run/step-1"],
        ["inspect", "run"],
        ["inspect", "run", "--map", "model.layers.0.w"],
        ["plan", "run", "fsdp=3", "--limit", "30"],
        ["plan", "run/step-1", "ddp=2", "--read-rate", "2GB", "--html", "plan.html"],
        ["explain", "B(0, 4+2+2),R on tp=2,dp=2@0,2,1,3"],
        ["verify", "run"],
        ["verify", "run", "--shallow"],
        ["diff", "run", "checkpoint"],
        ["diff", "checkpoint", "run", "--workers", "1"],
        ["diff", "run", "checkpoint", "--by-fingerprint"],
        ["convert", "run", "one.pt", "-f", "torch"],
        ["normalize", "run"],
    ):
        narrow(*words)
    narrow("--help")
    assert not re.search(r"\d (B|KiB)(?! )[a-z]", narrow("inspect", "run/step-1") + narrow("plan", "run", "fsdp=3"))


@pytest.mark.parametrize("length", range(10, 30))
def test_two_columns_keep_a_gap(length) -> None:
    """A sign that would leave none is on a line of its own."""
    sign = "x" * length
    lines = list(columns([(sign, "some words"), ("", "and more")], 45))

    assert all(len(line) <= 45 for line in lines)
    assert f"{sign}  " in lines[0] or lines[0] == f"  {sign}"


def test_narrow_and_colorless_terminals(checkpoint) -> None:
    """Everything is said on 60 columns, on more lines; NO_COLOR means none."""
    said = on_a_terminal(["inspect", str(checkpoint)], columns=60)

    assert not re.search(r"\x1b\[[\d;]*[349]\d", said)
    said = re.sub(r"\x1b\[[\d;]*m", "", said)
    assert max(map(len, said.partition("layouts")[2].splitlines())) <= 60
    for word in ("layers.0-2.w", "float32", "[6, 4]", "unsharded", "bfloat16"):
        assert word in said
    assert "\x1b[" not in on_a_terminal(["inspect", str(checkpoint / "nowhere")], columns=60)


def test_names_of_files_are_seen_whole_on_45_columns(checkpoint) -> None:
    [file] = checkpoint.glob("data-*/*.safetensors")
    file.unlink()

    for command in ("verify", "inspect"):
        said = on_a_terminal([command, str(checkpoint)], columns=45)
        said = re.sub(r"\x1b\[[\d;]*m|\s", "", said)  # a name that is too wide takes several lines
        assert str(file.relative_to(checkpoint)) in said
        assert "…" not in said


def on_a_terminal(words, columns) -> str:
    """What a command says on a pseudo-terminal."""
    master, slave = pty.openpty()
    env = {**os.environ, "COLUMNS": str(columns), "NO_COLOR": "1", "TERM": "xterm-256color"}
    with subprocess.Popen([*RESHARD, *words], stdout=slave, stderr=slave, stdin=slave, env=env) as running:
        os.close(slave)
        out = b""
        with contextlib.suppress(OSError):  # which is how a terminal ends
            while data := os.read(master, 1 << 16):
                out += data
        running.wait(timeout=100)
    os.close(master)
    return out.decode().replace("\r\n", "\n")


@pytest.mark.parametrize(
    ("words", "code"),
    [(["verify", "nowhere"], 3), (["inspect", ".", "--step", "30"], 3), (["plan", ".", "tp=2", "--rule", "S(0)"], 2)],
)
def test_traceback_on_request_anywhere_with_the_same_exit_code(say, monkeypatch, checkpoint, words, code) -> None:
    monkeypatch.chdir(checkpoint)

    assert say(*words).code == code
    said = say(*words, "--traceback")

    assert said.code == code
    assert said.err.startswith("Traceback (most recent call last)")


def test_a_bug_shows_its_traceback_and_is_not_the_answer_no(say, monkeypatch, checkpoint) -> None:
    monkeypatch.setattr(reshard, "verify", lambda *_, **__: 1 / 0)

    said = say("verify", checkpoint)

    assert said.code == 3
    assert "ZeroDivisionError" in said.err
    told = json.loads(say("verify", checkpoint, "--json").out)
    assert told == {"ok": False, "error": {"kind": "ZeroDivisionError", "message": "division by zero"}}


def test_help_survives_without_that_of_arguments() -> None:
    """With click 8.5, arguments of a typer before 0.26 have none."""
    program: Any = typer.main.get_command(app)
    command = program.commands["plan"]
    for param in command.params:
        if param.param_type_name == "argument":
            param.help = None

    with program.make_context("reshard", ["plan"], resilient_parsing=True) as context:
        text = command.get_help(command.make_context("plan", [], parent=context, resilient_parsing=True))

    assert "\nArguments:\n  CHECKPOINT\n  ONTO\n\nOptions:\n" in text


def test_completion_is_offered() -> None:
    script = Path(sys.executable).parent / "reshard"
    named = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # else the shell that started us decides
    ran = subprocess.run([script, "--show-completion", "bash"], capture_output=True, text=True, check=True, env=named)

    assert "reshard" in ran.stdout


@pytest.mark.parametrize(
    ("missing", "words", "fix"),
    [
        ("typer", "--help", "typer: pip install typer"),
        ("rich", "explain S(0)", "rich: pip install rich"),
        ("torch", "inspect run", "torch: pip install 'torch>=2.6'"),
        ("torch", "plan run fsdp=3", "torch: pip install 'torch>=2.6'"),
        ("torch.distributed", "verify run", "torch: pip install 'torch>=2.6'"),
        ("msgspec", "diff run run", "msgspec: pip install msgspec"),
    ],
)
def test_a_missing_package_is_named_and_is_not_the_answer_no(missing, words, fix) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from reshard.cli import main; main()"
    command = [sys.executable, "-c", code, *words.split()]

    ran = subprocess.run(command, capture_output=True, text=True)
    traced = subprocess.run([*command, "--traceback"], capture_output=True, text=True)

    assert (ran.returncode, ran.stdout, ran.stderr) == (3, "", f"error: this command needs {fix}\n")
    assert traced.returncode == 3
    assert "Traceback" in traced.stderr
    assert "ModuleNotFoundError: " in traced.stderr


def test_the_version_needs_no_other_package() -> None:
    code = "import sys; sys.modules['typer'] = sys.modules['torch'] = None; from reshard.cli import main; main()"

    ran = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True)

    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"reshard {reshard.__version__}\n", "")


@pytest.mark.parametrize("missing", ["typer", "torch"])
def test_a_missing_package_is_named_in_json(missing) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from reshard.cli import main; main()"

    ran = subprocess.run([sys.executable, "-c", code, "inspect", "run", "--json"], capture_output=True, text=True)

    error = json.loads(ran.stdout)["error"]
    assert error["kind"] == "ModuleNotFoundError"
    assert ran.stderr == f"error: {error['message']}\n"


@pytest.mark.parametrize("command", [[sys.executable, "-m", "reshard"], [Path(sys.executable).parent / "reshard"]])
def test_planners_of_the_users_own_are_an_error_of_one_line(command, tmp_path) -> None:
    (tmp_path / "planners.py").write_text("")
    repository = os.path.dirname(os.path.dirname(reshard.__file__))
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{repository}"}

    ran = subprocess.run([*command, "--version"], capture_output=True, text=True, cwd=tmp_path, env=env)

    assert ran.returncode == 3
    assert re.fullmatch(
        r"error: reshard needs its own package planners, .*planners.py first: rename that.*\n", ran.stderr
    )


def test_an_empty_variable_does_not_turn_colors_off(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Rich and the convention of NO_COLOR agree: only a value counts."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for value, is_plain in (("", False), ("1", True)):
        monkeypatch.setenv("NO_COLOR", value)
        _tell("no")
        assert ("\x1b" not in capsys.readouterr().err) == is_plain
