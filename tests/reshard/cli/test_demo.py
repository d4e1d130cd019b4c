"""`reshard demo`, as a user starts it, only shorter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import reshard
from reshard.cli.demo_job import Change, run_demo
from reshard.errors import ReshardError
from tests.torch_releases import FSDP2_TRAINS_ON_CPUS, requires

SCRIPT = Path(sys.executable).parent / "reshard"


TRAINS = requires(FSDP2_TRAINS_ON_CPUS, "trains nothing under FSDP2 on CPUs")


def test_a_torch_that_cannot_train_on_cpus_is_told(tmp_path, monkeypatch) -> None:
    monkeypatch.delattr(torch.cpu.Stream, "record_event", raising=False)
    with pytest.raises(ReshardError, match=r"FSDP2 on CPUs.*newer"):
        run_demo(tmp_path / "out", 6, lambda *_: None, lambda _: None)
    assert not (tmp_path / "out").exists()


@TRAINS
@pytest.mark.gloo
def test_the_whole_story(tmp_path) -> None:
    out = tmp_path / "out"

    ran = subprocess.run([SCRIPT, "demo", "--out", out, "--steps", "6", "--json"], capture_output=True, text=True)

    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["problems"] == []
    assert [change["world_size"] for change in told["changes"]] == [3, 2]
    for change in told["changes"]:
        assert change["tensors_equal"] == change["tensors"] == 156  # 39 parameters with three states each
        assert change["bytes_read"] == change["bytes_needed"] == change["planned_bytes"]
    checkpoint = reshard.open(told["checkpoint"])
    assert len(checkpoint) == 156
    assert checkpoint.objects["step"] == 6


@TRAINS
@pytest.mark.gloo
def test_ctrl_c_ends_it_quietly(tmp_path) -> None:
    with subprocess.Popen(
        [SCRIPT, "demo", "--out", tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # a shell that starts tests in the background has them ignore it
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as running:
        assert running.stdout is not None
        while "step 0" not in (line := running.stdout.readline()):
            assert line, "it ended before the first step"
        os.killpg(running.pid, signal.SIGINT)  # to every process, as a terminal does
        _, err = running.communicate(timeout=60)

    assert running.returncode == 130
    assert "Traceback" not in err


@TRAINS
def test_a_folder_that_cannot_be_made(tmp_path) -> None:
    (tmp_path / "file").write_text("")

    ran = subprocess.run([SCRIPT, "demo", "--out", tmp_path / "file"], capture_output=True, text=True)

    assert (ran.returncode, ran.stdout) == (2, "")
    assert "is a file. See reshard demo --help" in ran.stderr
    assert "Traceback" not in ran.stderr
    ran = subprocess.run([SCRIPT, "demo", "--out", "/proc/demo"], capture_output=True, text=True)
    assert ran.returncode == 3
    assert "choose another folder with --out" in ran.stderr


GOOD = Change(
    onto="FSDP 3",
    world_size=1,
    planned_bytes=[8],
    proved=True,
    bytes_needed=[8],
    bytes_read=[8],
    tensors_equal=2,
    tensors=2,
    loss_loaded=3.0,
    loss_after=2.5,
    load_s=0.1,
)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"proved": False}, "could not be proved"),
        ({"tensors_equal": 1}, "1 of 2 tensors"),
        ({"planned_bytes": [9]}, "the plan said [9] bytes"),
        ({"bytes_read": [9]}, "1.12 × the bytes needed were read"),
        ({"loss_loaded": 3.5}, "the loss was 3.0 before"),
        ({"loss_loaded": float("nan")}, "the loss was 3.0 before"),
        ({"loss_after": 3.1}, "more training raised the loss"),
    ],
)
def test_the_demo_can_fail(change, told) -> None:
    assert GOOD.problems(3.0) == []

    problems = replace(GOOD, **change).problems(3.0)

    assert any(told in problem for problem in problems)
