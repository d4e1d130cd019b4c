"""Hosts with networks of their own, which are cut and healed, and jobs on them: some of what `make nightly` runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hosts import network
from tests.hosts.network import Hosts, why_not

PLACE = Path(__file__).parents[2]

SERVE = """
import socket, sys
server = socket.create_server((sys.argv[1], 2000))
while True:
    server.accept()[0].close()
"""

ASK = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 2000), timeout=0.5).close()
    print("reached", socket.gethostname())
except OSError:
    print("not reached")
"""


def test_a_host_is_cut_off_and_comes_back():
    if why := why_not():
        pytest.skip(why)
    python = [sys.executable, "-S", "-c"]
    with Hosts(2) as hosts:
        hosts.start(0, [*python, SERVE, hosts.address(0)], {})

        def ask() -> str:
            said, _ = hosts.start(1, [*python, ASK, hosts.address(0)], {}).communicate(timeout=10)
            return said.strip()

        until = time.monotonic() + 30
        while ask() == "not reached":  # the server is about to start, and the bridge to learn of the hosts
            assert time.monotonic() < until
        assert ask() == f"reached {hosts.name(1)}"
        hosts.cut(1)
        assert ask() == "not reached"
        hosts.heal(1)
        while ask() == "not reached":
            assert time.monotonic() < until
        hosts.mute(0)
        assert ask() == "not reached"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Names and numbers that no other test uses meanwhile."""
    monkeypatch.setattr(network, "_NAME", f"t{os.getpid()}x")
    monkeypatch.setattr(network, "_TAKEN", tmp_path / "taken")


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.hosts import network
from tests.hosts.network import Hosts
network._NAME, network._TAKEN = sys.argv[2], Path(sys.argv[3])
with Hosts(1) as hosts:
    hosts.disk(Path(sys.argv[1]), 64)
    hosts.fork(0, [lambda: signal.pause()], Path(os.devnull))
    print(hosts.name(0), hosts._forked[0], flush=True)
    signal.pause()
"""


@pytest.mark.usefixtures("alone")
def test_what_a_killed_run_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    if why := why_not():
        pytest.skip(why)
    disk = tmp_path / "disk"
    command = [sys.executable, "-c", KILLED, str(disk), network._NAME, str(network._TAKEN)]
    with subprocess.Popen(command, cwd=PLACE, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        name, pid = killed.stdout.readline().split()
        with Hosts(1) as hosts:
            assert hosts.name(0) != name
            assert disk.is_mount()
        killed.kill()
    assert Path(f"/run/netns/{name}").exists()
    assert why_not() == ""
    assert not Path(f"/run/netns/{name}").exists()
    assert not Path(f"/etc/netns/{name}").exists()
    assert not disk.is_mount()
    until = time.monotonic() + 30
    while (stat := Path(f"/proc/{pid}/stat")).exists() and " Z " not in stat.read_text():
        assert time.monotonic() < until


@pytest.mark.usefixtures("alone")
def test_hosts_that_cannot_be_made_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    if why := why_not():
        pytest.skip(why)
    real, steps, made = network._ip, list[tuple[str, ...]](), set[str]()
    names = {f"{network._NAME}0-0", f"{network._NAME}0-switch"}

    def failing(*words: str) -> None:
        steps.append(words)
        if len(steps) == last:
            raise subprocess.CalledProcessError(1, words, stderr="told so")
        real(*words)
        made.update(names & {path.name for path in Path("/run/netns").iterdir()})

    monkeypatch.setattr(network, "_ip", failing)
    last = 0
    while len(steps) == last:
        last, steps[:] = last + 1, []
        said = why_not()
        assert said == ("network namespaces cannot be made: told so" if len(steps) == last else "")
        for folder in ("/run/netns", "/etc/netns"):
            assert not names & {path.name for path in Path(folder).iterdir()}
    assert last > 5
    assert made == names


TELL = """
import os, signal
signal.signal(signal.SIGUSR1, lambda *_: print("told"))
print(os.getpid(), flush=True)
signal.pause()
"""


def test_one_process_of_a_host_gets_a_signal():
    if why := why_not():
        pytest.skip(why)
    with Hosts(1) as hosts:
        job = hosts.start(0, [sys.executable, "-S", "-c", TELL], {})
        assert job.stdout is not None
        hosts.signal(0, signal.SIGUSR1, only=int(job.stdout.readline()))  # `unshare`, around it, would end by it
        assert job.communicate(timeout=10)[0] == "told\n"


HURRIED = "import sys; from tests.hosts import trials; trials._END_S = -3.9; sys.exit(trials.main())"


def test_a_trial_whose_ranks_do_not_end_says_what_they_do():
    if why := why_not():
        pytest.skip(why)
    command = [sys.executable, "-c", HURRIED, "1", "hurried", "load", "freeze first", "--quick"]
    done = subprocess.run(command, cwd=PLACE, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    for rank in (2, 3):
        assert re.search(rf"rank {rank} has not ended: step \d+, begun \d+\.\d s ago\n", done.stdout), done.stdout
    assert done.stdout.count("in loaded\n") == 2, done.stdout


TRIALS, PARTS = 88, 2
"""So many are each call with each fault; one in three is tried here, which are 30, three at a time: they mostly
wait."""


@pytest.mark.parametrize("part", range(PARTS))
def test_a_call_in_which_something_happens_to_a_host(part: int) -> None:
    if why := why_not():
        pytest.skip(why)
    every = f"{3 * part}/{3 * PARTS}"
    command = [
        sys.executable,
        "-m",
        "tests.hosts.trials",
        str(TRIALS),
        "ci",
        "--quick",
        "--every",
        every,
        "--jobs",
        "3",
        "-v",
    ]
    with subprocess.Popen(command, cwd=PLACE, stdout=subprocess.PIPE, text=True) as job:
        try:
            said, _ = job.communicate(timeout=280)
        except subprocess.TimeoutExpired:
            job.terminate()
            said, _ = job.communicate()
            pytest.fail(f"not ended after 280 s, having said:\n{said}")
        finally:
            job.terminate()
    assert job.returncode == 0, said
    assert re.search(r"seed ci: 15 runs, 0 wrong", said), said
