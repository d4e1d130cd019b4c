"""Hosts with networks of their own, which are cut and healed, and jobs on them: some of what `make nightly` runs."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hosts.network import Hosts, why_not

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
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    for rank in (2, 3):
        assert re.search(rf"rank {rank} has not ended: step \d+, begun \d+\.\d s ago\n", done.stdout), done.stdout
    assert done.stdout.count("in loaded\n") == 2, done.stdout


TRIALS, PAIRS = 88, 3
"""So many are each call with each fault; one in three is tried here, which are 30, two at a time: they mostly wait."""


@pytest.mark.parametrize("pair", range(PAIRS))
def test_a_call_in_which_something_happens_to_a_host(pair: int) -> None:
    if why := why_not():
        pytest.skip(why)
    every = [f"{3 * part}/{6 * PAIRS}" for part in (2 * pair, 2 * pair + 1)]
    command = [sys.executable, "-m", "tests.hosts.trials", str(TRIALS), "ci", "--quick", "--every"]
    place = Path(__file__).parents[2]
    jobs = [subprocess.Popen([*command, which], cwd=place, stdout=subprocess.PIPE, text=True) for which in every]
    try:
        for job in jobs:
            said, _ = job.communicate(timeout=280)
            assert job.returncode == 0, said
            assert re.search(r"seed ci: 5 runs, 0 wrong", said), said
    finally:
        for job in jobs:
            job.terminate()
