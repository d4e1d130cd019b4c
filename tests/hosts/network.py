"""Hosts on one machine: network namespaces with addresses, host names and process numbers of their own, on a bridge.

    with Hosts(2) as hosts:
        job = hosts.start(0, ["python", ...])
        hosts.cut(1)

Needs root and iproute2; `why_not()` says what is missing.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

__all__ = ["Hosts", "why_not"]


_ETC = Path("/etc/netns")
_numbers = itertools.count()


def why_not() -> str:
    """Why there can be no hosts here; "" if there can."""
    missing = [name for name in ("ip", "unshare") if shutil.which(name) is None]
    if missing:
        return f"needs the programs {', '.join(missing)}"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    probe = f"probe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode == 0:
        link = ["ip", "link", "add", f"{probe[:9]}a", "type", "veth", "peer", "name", f"{probe[:9]}b"]
        made = subprocess.run(link, capture_output=True, text=True, check=False)
        subprocess.run(["ip", "link", "del", f"{probe[:9]}a"], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return "" if made.returncode == 0 else f"network namespaces cannot be made: {made.stderr.strip()}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Hosts:
    """So many hosts, each with one interface, `eth0`."""

    def __init__(self, count: int) -> None:
        self.count, self._tag = count, f"r{os.getpid() % 100_000}n{next(_numbers)}"
        self._bridge, self._jobs = f"{self._tag}br", list[subprocess.Popen[str]]()

    def name(self, host: int) -> str:
        """The namespace, and the name of the host."""
        return f"{self._tag}h{host}"

    def address(self, host: int) -> str:
        """Of its interface."""
        return f"10.77.{os.getpid() % 250}.{host + 1}"

    def __enter__(self) -> Hosts:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("link", "set", self._bridge, "up")
        names = "".join(f"{self.address(host)} {self.name(host)}\n" for host in range(self.count))
        for host in range(self.count):
            name = self.name(host)
            _ip("netns", "add", name)
            etc = _ETC / name  # `ip netns exec` puts these in the place of those in /etc
            etc.mkdir(parents=True)
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
            (etc / "resolv.conf").write_text("")
            _ip("link", "add", f"{name}v", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", f"{name}v", "master", self._bridge, "up")
            _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in range(self.count):
            self.kill(host)
        for job in self._jobs:
            job.communicate()
        for host in range(self.count):
            subprocess.run(["ip", "link", "del", f"{self.name(host)}v"], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "del", self.name(host)], capture_output=True, check=False)
            shutil.rmtree(_ETC / self.name(host), ignore_errors=True)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True, check=False)

    def start(self, host: int, command: Sequence[str], environ: dict[str, str]) -> subprocess.Popen[str]:
        """A program on a host, which sees no process of another one."""
        name = self.name(host)
        inside = ["unshare", "--pid", "--uts", "--fork", "--mount-proc", "--kill-child", "sh", "-c"]
        script = f'hostname {name}; exec "$@"'
        job = subprocess.Popen(
            ["ip", "netns", "exec", name, *inside, script, "sh", *command],
            env={**os.environ, **environ}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self._jobs.append(job)
        return job

    def _signal(self, host: int, what: int) -> None:
        found = subprocess.run(["ip", "netns", "pids", self.name(host)], capture_output=True, text=True, check=False)
        for pid in map(int, found.stdout.split()):
            try:
                os.kill(pid, what)
            except ProcessLookupError:  # it has ended meanwhile
                continue

    def cut(self, host: int) -> None:
        """Nothing comes or goes any more."""
        _ip("link", "set", f"{self.name(host)}v", "down")

    def heal(self, host: int) -> None:
        """It is back."""
        _ip("link", "set", f"{self.name(host)}v", "up")

    def mute(self, host: int) -> None:
        """What others send arrives, and what it sends does not."""
        for other in range(self.count):
            if other != host:
                _ip("-n", self.name(host), "route", "add", "blackhole", f"{self.address(other)}/32")

    def freeze(self, host: int) -> None:
        """All its processes stop."""
        self._signal(host, signal.SIGSTOP)

    def thaw(self, host: int) -> None:
        """They go on."""
        self._signal(host, signal.SIGCONT)

    def kill(self, host: int) -> None:
        """All its processes end."""
        self._signal(host, signal.SIGKILL)
