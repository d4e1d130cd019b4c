"""Hosts with networks of their own, which are cut and healed. `make nightly` runs jobs on them: tests/hosts."""

from __future__ import annotations

import sys
import time

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
