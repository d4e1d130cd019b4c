"""`reshard verify` and `reshard diff`."""

from __future__ import annotations

import html
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import reshard
from reshard import dcp
from reshard.errors import RESTORE, CorruptCheckpointError
from reshard.ranks.progress import Event, listening
from tests.reshard.formats.writers import DcpWriter, grid


def _flip(checkpoint: Path) -> Path:
    """Change one byte in the middle of a data file."""
    [file] = checkpoint.glob("data-*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)
    return file


def test_whole(say, checkpoint) -> None:
    said = say("verify", checkpoint)

    assert said.code == 0
    assert "complete and undamaged" in said.out
    assert json.loads(say("verify", checkpoint, "--json").out)["ok"]


def test_each_note_is_a_line_of_its_own(say, tmp_path) -> None:
    torch.save({"w": torch.ones(2), "s": torch.eye(2).to_sparse(), "g": torch.Generator()}, tmp_path / "x.pt")

    said = say("verify", tmp_path / "x.pt")

    verdict, *notes = said.out.splitlines()[1:]
    assert said.code == 0
    assert verdict == "complete and undamaged: 8 B of values verified. 's' cannot be read"
    assert [note[:30] for note in notes] == ["note  's' cannot be read: a sp", "note  1 object of torch._C.Gen"]


def test_values_that_cannot_be_read_are_not_compared(say, tmp_path) -> None:
    """They are no difference, and the answer is not yes."""
    for name, w in {"a": torch.ones(2), "b": torch.ones(2), "c": torch.zeros(2)}.items():
        torch.save({"w": w, "s": torch.eye(2).to_sparse()}, tmp_path / f"{name}.pt")
    torch.save({"w": torch.ones(2), "s": 3}, tmp_path / "d.pt")
    why = "was not compared: a sparse tensor, which is not supported: save x.to_dense() instead"

    for first, other, verdict in [
        ("a", "a", "incomplete: 1 name not compared"),
        ("a", "b", "incomplete: 1 name not compared"),
        ("a", "c", "different: 1 tensor with different values, 1 name not compared"),
    ]:
        said = say("diff", tmp_path / f"{first}.pt", tmp_path / f"{other}.pt")
        assert said.code == 1
        assert said.out.splitlines()[0] == verdict
        assert f"·  's': {why}" in said.out.splitlines()
    assert say("diff", tmp_path / "a.pt", tmp_path / "d.pt").out.startswith("different: 1 difference\n")


def test_a_verdict_names_what_cannot_be_read(say, tmp_path) -> None:
    """Values that were not read are not verified; the report's `covered` names them, too."""
    odd = {f"s{i}": torch.eye(2).to_sparse() for i in range(5)}
    odd["n"] = torch.ones(3, dtype=torch.complex64).conj().imag
    torch.save({"w": torch.ones(2), **odd}, tmp_path / "x.pt")
    rest = "'s0', 's1', 's2' and 2 more, 'n' cannot be read"

    assert say("verify", tmp_path / "x.pt").out.splitlines()[1].endswith(f"8 B of values verified. {rest}")
    shallow = say("verify", tmp_path / "x.pt", "--shallow").out.splitlines()
    assert shallow[1] == f"complete; 8 B of values were not read. {rest}"
    assert "'s2' and 2 more cannot be read: a sparse" in reshard.verify(tmp_path / "x.pt").verdict
    assert "<a sparse tensor, which is not supported: " in say("inspect", tmp_path / "x.pt").out


def test_damage_is_named(say, checkpoint) -> None:
    file = _flip(checkpoint)

    said = say("verify", checkpoint)

    assert said.code == 1
    assert file.name in said.out
    assert "bytes [" in said.out
    assert say("verify", checkpoint, "--shallow").code == 0


def test_another_step_differs_but_was_not_changed(say, checkpoint, other) -> None:
    said = say("verify", other, "--against", checkpoint)
    assert said.code == 1
    first, second, *lines = said.out.splitlines()
    assert first == f"undamaged, but different from {checkpoint}: 4 differences"
    assert second == f"{other} (native), compared with {checkpoint}: 6 tensors"
    assert lines[0].startswith("complete and undamaged: ")
    assert "the same" not in said.out
    assert "'model.layers.1.w', element (2, 3): 1 of 24 elements differ" in said.out
    assert f"'model.norm': only in {checkpoint}" in said.out
    assert "changed" not in said.out


@pytest.mark.parametrize("how", [(), ("--shallow",)])
def test_what_equals_a_native_checkpoint_has_names_with_a_checksum(say, checkpoint, tmp_path, how) -> None:
    """Its manifest is compared with its digest when it is opened."""
    reshard.convert(checkpoint, tmp_path / "x.pt", format="torch_save")
    _, verdict, *_ = say("verify", checkpoint, "--against", tmp_path / "x.pt", *how).out.splitlines()
    assert verdict.startswith("complete and undamaged: ")
    assert verdict.endswith(f"verified, and the same as {tmp_path / 'x.pt'}")


def test_a_failure_says_which_side_is_damaged(say, checkpoint, other) -> None:
    """And never more than was checked: not that a damaged side differs, or that one that was not read is undamaged."""
    shallow = say("verify", other, "--against", checkpoint, "--shallow").out.splitlines()
    assert shallow[0] == f"complete, but different from {checkpoint}: 4 differences"
    assert any("of values were not read" in line for line in shallow)

    _flip(checkpoint)
    first, *_ = say("verify", checkpoint).out.splitlines()
    assert first == "damaged: 1 problem"
    first, *_ = say("verify", checkpoint, "--against", other).out.splitlines()
    assert first == f"damaged: 1 problem; not compared with {other}"

    same = shutil.copytree(other, other.with_name("same"))
    _flip(same)
    first, second, *_ = say("verify", other, "--against", same).out.splitlines()
    assert first == f"undamaged, but {same} is damaged: 6 problems"
    assert second == f"{other} (native), compared with {same}: 6 tensors"
    assert reshard.verify(other, same).covered is not None

    (same / "manifest.json").write_text("{")
    said = say("verify", other, "--against", same)
    assert said.code == 1
    assert said.out.startswith(f"undamaged, but {same} is damaged: 1 problem\n")


def test_a_failure_says_which_side_is_damaged_if_the_error_begins_with_a_tensor(say, tmp_path) -> None:
    tensors = {"w": grid(torch.arange(6.0), 2)}
    good = DcpWriter(tensors).write(tmp_path / "good")
    writer = DcpWriter(tensors)
    writer.metadata.state_dict_metadata["w"].chunks.pop()
    hole = writer.write(tmp_path / "hole")
    header = DcpWriter(tensors).write(tmp_path / "header")
    (header / "__0_0.distcp").write_bytes(b"x" * len((good / "__0_0.distcp").read_bytes()))

    for bad in (hole, header):
        assert say("verify", good, "--against", bad).out.startswith(f"complete, but {bad} is damaged: 1 problem\n")
        for sides in ((good, bad), (bad, good)):
            assert say("diff", *sides).out.startswith(f"damaged  {bad}")


def test_a_missing_file(say, checkpoint) -> None:
    file = _flip(checkpoint)
    file.unlink()

    said = say("verify", checkpoint)
    assert said.code == 1
    assert said.out.count(file.name) == 1, "the file and what was in it are one line"
    assert said.out.endswith(f"{file.name} is missing: restore it, or load another checkpoint\n")
    assert "·  6 names ('model.layers.0.w', 'model.layers.1.w', 'model.layers.2.w' and 3 more): " in said.out

    told = json.loads(say("verify", checkpoint, "--json").out)

    assert not told["ok"]
    assert "safetensors" in told["findings"][0]["message"]


def test_paths_are_as_they_were_given(say, checkpoint, monkeypatch) -> None:
    file = _flip(checkpoint)
    monkeypatch.chdir(checkpoint.parent)

    damaged = say("verify", "checkpoint/").out
    file.unlink()
    for said in (damaged, say("verify", "checkpoint/").out, say("inspect", "checkpoint/").out):
        assert file.name in said
        assert "checkpoint" in said
        assert str(checkpoint.parent) not in said


def test_nothing_there_is_no_verdict(say, tmp_path) -> None:
    assert say("verify", tmp_path / "nowhere").code == 3


@pytest.mark.parametrize("options", [(), ("--step", "3")])
@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_a_run_without_an_undamaged_step_is_damaged(say, tmp_path, command, options) -> None:
    """The exit code is that of the step by its own path."""
    reshard.save({"a": torch.ones(3)}, tmp_path / "run" / "step-3")
    (tmp_path / "run" / "step-3" / "manifest.json").write_text("x")
    said = say(command, tmp_path / "run", *options)
    assert said.code == 1
    assert "manifest.json is truncated or damaged, with" in said.out


def test_who_takes_an_older_step_of_a_run_says_so(say, tmp_path, caplog) -> None:
    """In the log, which goes to stderr; what `verify` left out is also in its verdict, and in its JSON."""
    run = tmp_path / "run"
    for step in (1, 2):
        reshard.save({"a": torch.ones(3)}, run / f"step-{step}")
    (data,) = (run / "step-2").glob("data-*/*.safetensors")
    data.unlink()
    said, skipped = say("verify", run), "step-2 is newer but was skipped because it is damaged: "
    assert said.code == 1
    assert said.out.startswith("damaged: 1 problem\n")
    assert f"no problem was found in {run}/step-1 itself" in said.out
    assert skipped in said.out
    assert skipped not in caplog.text, "once is enough"
    codes = [say("inspect", run, *more).code for more in ([], ["--json"], ["--map", "a"], ["--step", "1"])]
    assert codes == [1, 1, 1, 0]
    assert "/step-2  not complete: " in say("inspect", run, "--map", "a").out
    (finding,) = json.loads(say("verify", run, "--json").out)["findings"]
    assert finding["message"].startswith(skipped)
    older = say("verify", run, "--step", "1")
    assert older.code == 0
    assert "step-2" not in older.out
    one = tmp_path / "one"
    reshard.save({"a": torch.ones(3)}, one)
    for command in (
        ["plan", run, "fsdp=1"],
        ["convert", run, tmp_path / "out"],
        ["normalize", run],
        ["diff", run, one],
    ):
        caplog.clear()
        said = say(*command)
        assert said.code == 0, command
        assert f"using {run}/step-1, the newest complete checkpoint of {run}" in said.err
        assert caplog.text.count(f"{run}/step-1 was opened: {skipped}") == 1, command
    done = subprocess.run(
        [sys.executable, "-m", "reshard", "diff", run, one], capture_output=True, text=True, check=True
    )
    assert done.stderr.startswith(f"{run}/step-1 was opened: {skipped}")


def _without(run, pattern) -> None:
    """The second step of a run without a file."""
    next((run / "step-2").glob(pattern)).unlink()


@pytest.mark.parametrize(
    ("kind", "pattern", "is_damaged"),
    [
        ("native", "data-*/*.safetensors", True),
        ("native", "manifest.json", True),  # no claim is beside the data: the save had ended
        ("dcp", "*.distcp", True),
        ("dcp", ".metadata", False),  # as of a save that was killed
    ],
)
def test_a_newer_step_that_had_been_complete_is_damage(say, tmp_path, kind, pattern, is_damaged) -> None:
    """And one that a killed save leaves is not: a job that was preempted has many."""
    for step in (1, 2):
        path = tmp_path / "run" / f"step-{step}"
        if kind == "native":
            reshard.save({"a": torch.ones(3)}, path)
        else:
            dcp.save({"a": torch.ones(3)}, checkpoint_id=path)
    _without(tmp_path / "run", pattern)
    for report in (reshard.verify(tmp_path / "run"), reshard.verify(reshard.open(tmp_path / "run"))):
        assert report.ok == (not is_damaged)
        said = report.findings[0].message if is_damaged else report.covered.unchecked
        assert f"step-2 is newer but was skipped because it is {'damaged' if is_damaged else 'not complete'}: " in said
    said = say("verify", tmp_path / "run")
    assert said.code == is_damaged
    if is_damaged:
        with pytest.raises(CorruptCheckpointError, match="step-2 is newer"):
            report.raise_if_failed()


def test_a_killed_save_is_no_damage(say, tmp_path, caplog) -> None:
    for step in (1, 2):
        reshard.save({"a": torch.ones(3)}, tmp_path / "run" / f"step-{step}")
    _without(tmp_path / "run", "manifest.json")
    next((tmp_path / "run" / "step-2").glob("data-*")).joinpath("claim.json").write_text("{}")
    said = say("verify", tmp_path / "run")
    assert said.code == 0
    assert "step-2 is newer but was skipped because it is not complete: " in said.out
    assert "step-2" not in caplog.text, "once is enough"

    _without(tmp_path / "run", "data-*/*.safetensors")
    shutil.rmtree(tmp_path / "run" / "step-1")
    for words in ([], ["--json"]):
        said = say("verify", tmp_path / "run", *words)
        assert said.code == 1
        assert "damaged" not in said.out
        assert "no checkpoint of this run is complete" in said.out
    assert json.loads(said.out)["ok"] is False


def test_tensors_and_other_problems_are_counted_apart(say, tmp_path) -> None:
    reshard.save({f"w{number}": torch.ones(3) for number in range(16)}, tmp_path / "one")
    next((tmp_path / "one").glob("data-*/*.safetensors")).unlink()
    assert "damaged: 16 names, and 1 problem with files or metadata" in say("verify", tmp_path / "one").out


def test_names_beside_what_is_missing_are_not_called_damaged(say, tmp_path) -> None:
    reshard.save({f"w{number}": torch.ones(30) for number in range(16)}, tmp_path / "one")
    (file,) = (tmp_path / "one").glob("data-*/*.safetensors")
    os.truncate(file, file.stat().st_size - 130)
    said = say("verify", tmp_path / "one")
    assert said.out.startswith(
        "damaged: 2 names, and 1 problem with files or metadata; 14 more names in damaged files not read\n"
    )
    assert said.out.count(f"{file.name} has ") == 1, "the file and what is in it are one line"
    assert "2 names ('w8', 'w9'): " in said.out
    assert "Tensors there: 'w8' (bytes [" in said.out
    assert re.search(r"·  \*: 14 names, such as 'w0': were not read: .*/00000.safetensors is damaged\n", said.out)
    told = json.loads(say("verify", tmp_path / "one", "--json").out)["findings"]
    unread = {it["fqn"] for it in told if it["message"].startswith("was not read: ")}
    assert said.code == 1
    assert len(unread) == 14
    assert len({it["fqn"] for it in told} - unread) == 3, "two names, and the file"


def test_a_damaged_value_is_named_once(say, tmp_path) -> None:
    reshard.save({"a": torch.ones(3), "n": 5}, tmp_path / "native")
    reshard.convert(tmp_path / "native", tmp_path / "dcp", format="dcp")
    for file in (tmp_path / "dcp").glob("*.distcp"):
        file.unlink()
    said = say("verify", tmp_path / "dcp").out
    assert "damaged: 2 names, and 1 problem with files or metadata" in said
    assert "·  2 names ('a', 'n'): there is no __0_" in said


def test_a_lost_file_is_one_cause_for_all_its_tensors(say, tmp_path) -> None:
    state = {f"layers.{i}.w{rows}": torch.ones(rows, 2) for i in range(3) for rows in (3, 4)} | {"lr": torch.ones(1)}
    reshard.save(state, tmp_path / "native")
    reshard.convert(tmp_path / "native", tmp_path / "dcp", format="dcp")
    [file] = (tmp_path / "dcp").glob("*.distcp")
    file.unlink()
    said = say("verify", tmp_path / "dcp").out

    names = "7 names ('layers.0.w3', 'layers.0.w4', 'layers.1.w3' and 4 more)"
    assert f"·  {names}: there is no {file.name} in {tmp_path / 'dcp'}. The checkpoint needs it: {RESTORE}\n" in said
    assert said.count("there is no ") == 1
    told = json.loads(say("verify", tmp_path / "dcp", "--json").out)["findings"]
    assert {it["fqn"] for it in told} == {None, *state}, "each by itself for programs"


def test_a_changed_block_is_one_cause_for_all_its_tensors(say, tmp_path) -> None:
    state = {f"layers.{i}.w": torch.ones(3) for i in range(9)}
    reshard.save(state, tmp_path / "c", fingerprints=False)
    file = _flip(tmp_path / "c")
    said = say("verify", tmp_path / "c").out

    names = "9 names ('layers.0.w', 'layers.1.w', 'layers.2.w' and 6 more)"
    assert f"·  {names}: {file}: the block of bytes [0, " in said
    assert said.endswith(f" was changed since it was written (one or more of the 9 tensors there): {RESTORE}\n")
    told = json.loads(say("verify", tmp_path / "c", "--json").out)["findings"]
    assert [it["fqn"] for it in told] == list(state)
    assert all("This tensor has bytes [" in it["message"] for it in told), "each by itself for programs"


def test_an_error_of_usage_is_all_that_is_printed(say, tmp_path) -> None:
    reshard.save({"a": torch.ones(3)}, tmp_path / "run" / "step-3")
    for words in (("convert", tmp_path / "run", "out", "--hint", "x"), ("verify", tmp_path / "run", "--on", "x")):
        said = say(*words)
        assert said.code == 2
        assert "using" not in said.out + said.err


@pytest.fixture
def other(checkpoint: Path, tmp_path: Path) -> Path:
    """The same as `checkpoint`, but for one element, one name and one plain value."""
    state = {name: tensor[...] for name, tensor in reshard.open(checkpoint).items()}
    state["model.layers.1.w"][2, 3] += 0.5
    state["model.renamed"] = state.pop("model.norm")
    objects = {**reshard.open(checkpoint).objects, "step": 8}
    reshard.save({**state, **objects}, tmp_path / "other")
    return tmp_path / "other"


def test_diff_of_the_same(say, checkpoint) -> None:
    assert say("diff", checkpoint, checkpoint).code == 0


@pytest.mark.parametrize(("here", "there"), [("model.", ""), ("module.", "model."), ("", "a.b.")])
def test_diff_says_that_names_differ_by_a_prefix_alone(here, there, say, tmp_path) -> None:
    names = ("layers.0.w", "layers.1.w", "layers.1.bias")
    for folder, prefix in (("a", here), ("b", there)):
        reshard.save({prefix + name: torch.ones(2) for name in names}, tmp_path / folder)

    said = say("diff", tmp_path / "a", tmp_path / "b")

    assert said.code == 1
    text = " ".join(said.out.split())
    assert f"same except for a prefix: {here!r} in {tmp_path / 'a'}, {there!r} in {tmp_path / 'b'}." in text
    assert said.out.startswith("different: 6 names only on one side\n")  # the note is no difference
    assert "same except for" not in say("diff", tmp_path / "a", tmp_path / "a").out


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_the_advised_tolerance_allows_rounding_to_the_coarser_dtype(dtype, say, tmp_path) -> None:
    values = torch.rand(5000, generator=torch.Generator().manual_seed(0)) + 0.5
    reshard.save({"w": values}, tmp_path / "a")
    reshard.save({"w": values.to(getattr(torch, dtype))}, tmp_path / "b")

    for one, other in ("ab", "ba"):
        advised = say("diff", tmp_path / one, tmp_path / other).out.rpartition("add --rtol ")[2].split()[0]
        assert float(advised) < 0.3
        assert say("diff", tmp_path / one, tmp_path / other, "--rtol", advised).code == 0


def test_diff_says_that_all_differences_are_dtypes(say, tmp_path) -> None:
    state = {f"layers.{i}.w": torch.ones(2) for i in range(5)}
    reshard.save(state, tmp_path / "a")
    reshard.save({name: value.bfloat16() for name, value in state.items()}, tmp_path / "b")
    a, b = tmp_path / "a", tmp_path / "b"

    all_of = f"all differences are dtypes: float32 in {a}, bfloat16 in {b} (5 tensors)"
    fix = "To compare the values, too, add --rtol 8e-03"
    assert say("diff", a, b).out.splitlines()[2:] == [
        f"note  {all_of}. {fix}",
        f"·  layers.*: 5 names, such as 'layers.0.w': is float32 in {a}, bfloat16 in {b}",
    ]
    assert reshard.compare(a, b).hint.endswith("pass rtol=8e-03")
    for command in (("diff", a, b), ("verify", a, "--against", b)):
        assert f"note  {all_of}. {fix}" in say(*command).out.splitlines()
        assert json.loads(say(*command, "--json").out)["hint"].endswith(fix)
    reshard.save({**state, "layers.0.w": torch.ones(3)}, tmp_path / "c")
    assert reshard.compare(tmp_path / "c", b).hint == ""


def test_diff_says_so_where_one_side_has_an_optimizer_as_well(say, tmp_path) -> None:
    model = {"layers.0.w": torch.ones(2), "layers.0.b": torch.ones(2)}
    moments = {name: {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)} for name in model}
    reshard.save({"model": model, "optim": {"state": moments}}, tmp_path / "a")
    reshard.save(model, tmp_path / "b")

    for one, other in (("a", "b"), ("b", "a")):
        said = " ".join(say("diff", tmp_path / one, tmp_path / other).out.split())
        assert f"the names of all tensors in {tmp_path / 'b'} and of 'model' in {tmp_path / 'a'} are the same" in said
        assert f"'model.' in {tmp_path / 'a'}" in said
    assert say("diff", tmp_path / "a", tmp_path / "b", "--model").code == 0


def test_many_names_of_one_side_are_one_line(say, tmp_path) -> None:
    """In diff, in verify, and on the page; a few names are listed."""
    one = torch.ones(2)
    model = {f"layers.{i}.w": one for i in range(2)}
    moments = {f"layers.{i}.w": {"exp_avg": one, "exp_avg_sq": one} for i in range(2)}
    reshard.save({"model": model, "optim": {"state": moments}}, tmp_path / "a")
    reshard.save({"model": model, "head": {"w": one, "b": one}}, tmp_path / "b")
    reshard.save({str(i): {"w": one} for i in range(5)}, tmp_path / "c")
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"

    lines = say("diff", a, b, "--html", tmp_path / "page.html").out.splitlines()
    grouped = f"optim.state.*: 4 names, such as 'optim.state.layers.0.w.exp_avg': only in {a}"
    assert lines[:-1] == [
        "different: 6 names only on one side",
        f"{a} and {b}: 2 tensors in common",
        f"·  {grouped}",
        f"·  'head.w': only in {b}",
        f"·  'head.b': only in {b}",
    ]
    assert f"·  {grouped}" in say("verify", a, "--against", b).out.splitlines()
    page = (tmp_path / "page.html").read_text()
    assert f"<li>{html.escape(grouped)}</li>" in page
    assert page.count("<li>") == 3
    lines = say("diff", c, b).out.splitlines()
    assert lines[:3] == [
        "different: 9 names only on one side",
        f"{c} and {b}: 0 tensors in common",
        f"·  *: 5 names, such as '0.w': only in {c}",
    ]


def test_diff_does_not_take_other_names_for_a_prefix(say, tmp_path) -> None:
    reshard.save({"model.a": torch.ones(2), "model.b": torch.ones(2)}, tmp_path / "a")
    reshard.save({"x.a": torch.ones(2), "x.c": torch.ones(2)}, tmp_path / "b")
    assert "same except for" not in say("diff", tmp_path / "a", tmp_path / "b").out


def test_diff_reads_both_sides_unless_told_not_to(say, checkpoint, tmp_path) -> None:
    bad = shutil.copytree(checkpoint, tmp_path / "bad")
    (file,) = bad.glob("data-*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)

    assert say("diff", bad, checkpoint).code == 1
    assert say("diff", bad, checkpoint, "--json").code == 1
    assert "were read and compared bit by bit" in say("diff", checkpoint, checkpoint).out
    assert "equal within the tolerance: " in say("diff", checkpoint, checkpoint, "--atol", "1").out
    unread = say("diff", bad, checkpoint, "--by-fingerprint")
    assert unread.code == 0
    assert unread.out.startswith("no values were read: only saved fingerprints are compared")
    assert "the saved fingerprints are equal; no values were read" in unread.out
    assert json.loads(say("diff", bad, checkpoint, "--by-fingerprint", "--json").out)["covered"]["read_bytes"] == 0
    assert say("diff", bad, checkpoint, "--by-fingerprint", "--atol", "1").code == 2
    old = say("diff", bad, checkpoint, "--unread")
    assert (old.out, old.err) == (unread.out, "--unread is deprecated: use --by-fingerprint\n")


def test_diff_says_once_that_a_side_is_damaged(say, checkpoint, other, tmp_path, monkeypatch) -> None:
    bad = shutil.copytree(checkpoint, tmp_path / "bad")
    file = _flip(bad)

    for sides in ((bad, checkpoint), (checkpoint, bad)):
        said = say("diff", *sides)
        told = json.loads(say("diff", *sides, "--json").out)
        [line] = said.out.splitlines()
        assert said.code == 1
        assert line.startswith(f"damaged  {file}: the block of bytes [")
        assert "restore the file, or load another checkpoint; " in line
        names = [finding["fqn"] for finding in told["findings"]]
        assert f"; {len(names)} values could not be compared: {', '.join(map(repr, names[:3]))}" in line
        assert "model.layers.1.w" in names
    monkeypatch.chdir(tmp_path)
    assert say("diff", "bad/", "checkpoint").out.startswith(
        f"damaged  {file.relative_to(tmp_path)}: the block of bytes ["
    )
    _flip(checkpoint)
    assert [line.split("/")[0] for line in say("diff", "bad", "checkpoint").out.splitlines()] == ["damaged  bad"]
    assert len(say("diff", checkpoint, bad).out.splitlines()) == 1, "of each tensor, the side that is read first"
    said = say("diff", bad, other)
    assert [line.split()[0] for line in said.out.splitlines()[:2]] == ["damaged", "different:"]
    assert "2 names only on one side, 1 other difference" in said.out
    assert said.out.count("bytes [") == 1


def test_unread_reads_what_has_no_fingerprints(say, checkpoint, tmp_path) -> None:
    values = {key: tensor[...] for key, tensor in reshard.open(checkpoint).items()}
    torch.save({**values, **reshard.open(checkpoint).objects}, tmp_path / "c.pt")

    said = say("diff", checkpoint, tmp_path / "c.pt", "--by-fingerprint")

    assert said.code == 0, said.out
    assert said.out.startswith("all values were read: no tensor has equal fingerprints on both sides")
    assert "the same: " in said.out


def test_a_verdict_of_the_same_says_what_was_not_compared(say, tmp_path) -> None:
    values = {
        "a": {"n": 1, "e": {}, "l": [1, 2]},
        "tuple": {"n": 1, "l": (1, 2)},
        "float": {"n": 1.0, "l": [1, 2]},
        "item": {"n": 1, "l": [1.0, 2]},
        "c": {"n": True},
        "e": {"n": 2, "l": [1, 2]},
    }
    for name, value in values.items():
        reshard.save(value, tmp_path / name)
    note = "note  lists and tuples count as equal, and so do 1 and 1.0\n"

    for name in ("tuple", "float", "item"):
        said = say("diff", tmp_path / "a", tmp_path / name)
        assert said.code == 0
        assert said.out.endswith(note)
    said = say("diff", tmp_path / "a", tmp_path / "c")
    assert said.code == 1
    assert "'n': 1 in " in said.out
    assert "note" not in said.out, "nothing counted as equal"
    assert "note" not in say("diff", tmp_path / "a", tmp_path / "a").out
    assert "note" not in say("diff", tmp_path / "a", tmp_path / "e").out
    for name in "de":
        reshard.save({"model": {"w": torch.ones(2)}}, tmp_path / name)
    assert "note" not in say("diff", tmp_path / "d", tmp_path / "e").out
    assert "such as 1e-3. Also allows different dtypes." in " ".join(say("diff", "--help").out.split())


def test_diff_tells_the_first_element(say, checkpoint, other) -> None:
    said = say("diff", checkpoint, other, "--json")

    told = {finding["fqn"]: finding for finding in json.loads(said.out)["findings"]}
    assert said.code == 1
    assert set(told) == {"model.layers.1.w", "model.norm", "model.renamed", "step"}
    assert told["model.layers.1.w"]["element"] == [2, 3]
    assert str(other) in told["model.renamed"]["message"]


def test_diff_for_people(say, checkpoint, other) -> None:
    said = say("diff", checkpoint, other, "--limit", "2")

    assert said.code == 1
    assert said.out.startswith(
        "different: 1 tensor with different values, 2 names only on one side, 1 other difference\n"
    )
    words = "1 of 24 elements differ; the first: 12 -> 12.5; largest difference: 0.5 absolute, 0.04 relative"
    assert words in say("diff", checkpoint, other).out
    told = json.loads(say("diff", checkpoint, other, "--json").out)
    assert told["largest_differences"] == {"model.layers.1.w": {"absolute": 0.5, "relative": pytest.approx(0.04)}}
    assert "and 2 more" in said.out


def test_diff_says_no_size_of_a_difference_to_nan(say, tmp_path) -> None:
    """It was "0 absolute, 0 relative"."""
    reshard.save({"w": torch.ones(3)}, tmp_path / "a")
    reshard.save({"w": torch.full((3,), math.nan)}, tmp_path / "b")
    said = say("diff", tmp_path / "a", tmp_path / "b")
    assert "the first: 1 -> nan" in said.out
    assert "largest" not in said.out
    assert reshard.compare(tmp_path / "a", tmp_path / "b").largest == {}


def test_diff_with_tolerance(say, tmp_path) -> None:
    reshard.save({"w": torch.ones(3)}, tmp_path / "a")
    reshard.save({"w": torch.ones(3) + 1e-3}, tmp_path / "b")

    assert say("diff", tmp_path / "a", tmp_path / "b").code == 1
    assert say("diff", tmp_path / "a", tmp_path / "b", "--atol", "0.01").code == 0
    assert say("diff", tmp_path / "a", tmp_path / "b", "--rtol", "0.01").code == 0


def test_diff_under_canonical_names(say, tmp_path) -> None:
    reshard.save({"model": {"w": torch.ones(3)}}, tmp_path / "a")
    reshard.save({"model": {"_orig_mod.w": torch.ones(3)}}, tmp_path / "b")

    assert say("diff", tmp_path / "a", tmp_path / "b").code == 1
    assert say("diff", tmp_path / "a", tmp_path / "b", "--normalized").code == 0


def test_long_work_tells_how_far_it_is(say, checkpoint, other) -> None:
    """All bytes that there are, in each phase; bars are drawn from this where somebody looks on."""
    total = sum(tensor.nbytes for tensor in reshard.open(checkpoint).values())
    files = sum(file.stat().st_size for file in checkpoint.glob("data-*/*.safetensors"))
    ends = {}

    def hear(event: Event) -> None:
        if event.kind == "finished":
            ends[event.phase] = event.done_bytes, event.total_bytes

    with listening(hear):
        say("verify", checkpoint)
        say("diff", checkpoint, checkpoint)

    assert ends == {"verify": (total, total), "checksums": (files, files), "compare": (total, total)}


def test_what_is_equal_within_the_tolerance_but_of_another_dtype_is_named_with_both_sizes(say, tmp_path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    reshard.save({"w": torch.arange(4.0), "b": torch.ones(4), "n": torch.tensor(1)}, a)
    reshard.save({"w": torch.arange(4.0).half(), "b": torch.ones(4).half(), "n": torch.tensor(1)}, b)

    said = say("diff", a, b, "--atol", "1e-3")

    assert said.code == 0
    assert f"dtypes differ: float32 in {a}, float16 in {b} (2 tensors); the values take 40 B and 24 B\n" in said.out
    assert "equal within the tolerance: 40 B of values were read and compared\n" in said.out
    assert "dtypes differ" not in say("diff", a, a, "--atol", "1e-3").out


def test_the_text_of_a_comparison_says_what_was_compared(tmp_path) -> None:
    """Nothing of metadata: names were compared, and differ."""
    for name in "ab":
        reshard.save({name: torch.ones(2)}, tmp_path / name)

    text = str(reshard.compare(tmp_path / "a", tmp_path / "b"))

    assert (
        "  covered: names, shapes, dtypes, and objects compared (not types of containers; 1 equals 1.0); 0 B of 8 B of"
        in text
    )
    assert "metadata" not in text


def _cut(folder, of):
    os.truncate(folder / of, (folder / of).stat().st_size // 2)


def _scribbled(folder, of, at):
    data = bytearray((folder / of).read_bytes())
    data[at] = 0xFF
    (folder / of).write_bytes(data)


@pytest.mark.parametrize(
    ("format", "harm", "what"),
    [
        ("native", lambda folder: _cut(folder, "manifest.json"), "manifest.json is truncated"),
        ("safetensors", lambda folder: _cut(folder, "model.safetensors"), "; it was truncated: restore it, or load"),
        ("safetensors", lambda folder: _scribbled(folder, "model.safetensors", 12), "is not JSON: .*: restore it, or "),
        ("dcp", lambda folder: _scribbled(folder, ".metadata", 2), "opcode 0xff .*: restore it, or load another"),
    ],
)
def test_damaged_metadata_of_either_side_is_the_answer_no_with_a_fix(say, tmp_path, format, harm, what) -> None:
    reshard.save({"w": torch.arange(4096.0)}, tmp_path / "saved")
    reshard.convert(tmp_path / "saved", tmp_path / "bad", format=format)
    harm(tmp_path / "bad")

    for sides in (("saved", "bad"), ("bad", "saved")):
        said = say("diff", *(tmp_path / side for side in sides))
        assert (said.code, said.err) == (1, "")
        assert re.match(rf"damaged  {tmp_path}/bad/.*{what}", said.out)
    assert json.loads(say("diff", tmp_path / "saved", tmp_path / "bad", "--json").out)["ok"] is False
    assert say("verify", tmp_path / "bad").code == 1


def test_names_and_values_are_printed_as_they_are(say, tmp_path) -> None:
    """Words of the Python API in errors become options; the same words in a state are the user's."""
    for side, value in (("a", 1.0), ("b", 2.0)):
        state = {"max_shard_bytes": torch.full((2,), value), "x": {"overwrite=True": value}, "note": f"rtol= {value}"}
        reshard.save(state, tmp_path / side)
    out = say("diff", tmp_path / "a", tmp_path / "b").out
    assert "'max_shard_bytes', element (0,)" in out
    assert "'x.overwrite=True': 1.0 in" in out
    assert "--max-shard" not in out
    assert "--overwrite" not in out


def test_a_file_that_is_too_short_takes_one_line(say, tmp_path) -> None:
    state = {"model": {"w": torch.ones(9)}, "optim": {"state": {"w": {"exp_avg": torch.ones(9)}}}}
    reshard.save(state, tmp_path / "c")
    (file,) = tmp_path.rglob("*.safetensors")
    os.truncate(file, 100)

    said = say("verify", tmp_path / "c").out
    assert said.count(f"{file.name} has 100 of its ") == 1
    assert "·  2 names ('model.w', 'optim.state.w.exp_avg'): " in said


def test_nothing_is_not_the_same_as_nothing(say, tmp_path) -> None:
    """`diff` says so, too."""
    for name in ("a", "b"):
        reshard.save({}, tmp_path / name)
    assert say("verify", tmp_path / "a").code == 0
    verified = say("verify", tmp_path / "a", "--against", tmp_path / "b")
    compared = say("diff", tmp_path / "a", tmp_path / "b")
    assert verified == compared
    assert (verified.code, verified.out) == (3, "")
    assert "nothing to compare" in verified.err
    reshard.save({"step": 3}, tmp_path / "c")
    assert say("verify", tmp_path / "c", "--against", tmp_path / "c").code == 0


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no float4")
def test_packed_dtypes_have_no_rounding_to_advise_for(say, tmp_path) -> None:
    reshard.save({"w": torch.zeros(4)}, tmp_path / "a")
    reshard.save({"w": torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, tmp_path / "b")

    assert "all differences are dtypes" in say("diff", tmp_path / "a", tmp_path / "b").out


@pytest.mark.parametrize("command", [["verify"], ["diff", "whole"], ["inspect"]], ids=lambda words: words[0])
def test_json_has_the_same_keys_whatever_the_answer(command, say, tmp_path, monkeypatch) -> None:
    """Complete, with a damaged file, with a manifest that does not open, and, as a run, with no complete step."""
    monkeypatch.chdir(tmp_path)
    for name in ("whole", "harmed", "unreadable", "run/step-1", "lost/step-1"):
        reshard.save({"a": torch.ones(3)}, name)
    for name in ("harmed", "lost/step-1"):
        next(Path(name).glob("data-*/*.safetensors")).unlink()
    Path("unreadable/manifest.json").write_text("{")

    told = {name: json.loads(say(*command, name, "--json").out) for name in ("whole", "harmed", "unreadable")}

    assert len({tuple(sorted(of)) for of in told.values()}) == 1
    assert [of["ok"] for of in told.values()] == [True, False, False]
    assert not told["whole"]["problems"]
    assert all(of["problems"] for of in [*told.values()][1:])
    if command != ["diff", "whole"]:
        runs = [json.loads(say(*command, name, "--json").out) for name in ("run", "lost")]
        assert runs[0].keys() == runs[1].keys()
        assert [of["ok"] for of in runs] == [True, False]
