"""Hosts on one machine: network namespaces with addresses, host names and process numbers of their own, on a bridge.

    with Hosts(2) as hosts:
        job = hosts.start(0, ["python", ...])
        hosts.cut(1)

Needs root and iproute2; `why_not()` says what is missing.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import os
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

__all__ = ["Hosts", "why_not"]


_ETC = Path("/etc/netns")
_numbers = itertools.count()
_libc = ctypes.CDLL(None, use_errno=True)
_NEW_NET, _NEW_PID, _NEW_UTS, _NEW_MOUNTS = 0x40000000, 0x20000000, 0x04000000, 0x00020000
_SET_IFF, _TAP_WITHOUT_INFO = 0x400454CA, 0x1002
_BUSY_S = 5.0
"""So long a file system may have files that are open for writing, before it is made read-only."""


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
        self.count, self._tag, self._net = count, f"r{os.getpid() % 100_000}n{next(_numbers)}", os.getpid() % 250
        self._bridge, self._jobs = f"{self._tag}br", list[subprocess.Popen[str]]()
        self._forked: dict[int, int] = {}
        self._forwarders: list[int] = []
        self._fillers: list[Path] = []
        self._disks: list[Path] = []

    def name(self, host: int) -> str:
        """The namespace, and the name of the host."""
        return f"{self._tag}h{host}"

    def address(self, host: int) -> str:
        """Of its interface."""
        return f"10.77.{self._net}.{host + 1}"

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
        for forwarder in self._forwarders:
            os.kill(forwarder, signal.SIGKILL)
        for pid in (*self._forked.values(), *self._forwarders):
            os.waitpid(pid, 0)
        for disk in self._disks:
            subprocess.run(["umount", "--lazy", str(disk)], capture_output=True, check=False)
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

    def fork(self, host: int, bodies: Sequence[Callable[[], None]], log: Path, *, binds: Sequence[Path] = ()) -> None:
        """Each body in a process on a host, a copy of this one: so what is imported here need not be there again.

        Args:
            log: a file for what they print.
            binds: folders that the host mounts for itself: see `make_read_only`.
        """
        name = self.name(host)
        pid = os.fork()
        if pid:
            self._forked[host] = pid
            return
        with _ends():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(out, 1)
            os.dup2(out, 2)
            _enter(name)
            _checked(_libc.unshare(_NEW_UTS | _NEW_MOUNTS))
            socket.sethostname(name)
            _run("mount", "--make-rprivate", "/")
            for folder in binds:
                _run("mount", "--bind", str(folder), str(folder))
            for file in ("hosts", "resolv.conf"):
                _run("mount", "--bind", str(_ETC / name / file), f"/etc/{file}")
            _checked(_libc.unshare(_NEW_PID))
            first = os.fork()  # it is number 1
            if first:
                os.waitpid(first, 0)
            else:
                _run("mount", "-t", "proc", "proc", "/proc")
                _live(bodies)

    def disk(self, path: Path, kib: int) -> None:
        """A file system in memory, of that size."""
        path.mkdir(parents=True)
        _run("mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(path))
        self._disks.append(path)

    def fill(self, disk: Path) -> None:
        """It has no room left."""
        filler = disk / f"filler-{len(self._fillers)}"
        self._fillers.append(filler)
        with suppress(OSError), filler.open("wb", buffering=0) as out:
            while True:
                out.write(bytes(4096))

    def empty(self) -> None:
        """There is room again."""
        while self._fillers:
            self._fillers.pop().unlink()

    def make_read_only(self, host: int, bind: Path, *, again: bool = False) -> None:
        """What a host has mounted is read-only for it; `again`: and is no more."""
        inside = ["nsenter", f"--mount=/proc/{self._forked[host]}/ns/mnt"]
        _remount([*inside, "mount", "-o", f"remount,bind,{'rw' if again else 'ro'}", str(bind)])

    def make_disk_read_only(self, disk: Path, *, again: bool = False) -> None:
        """So is a disk, for all."""
        _remount(["mount", "-o", f"remount,{'rw' if again else 'ro'}", str(disk)])

    def delay(self, host: int, seconds: float) -> None:
        """What goes from it to others, and from them to it, arrives so much later: a process passes it on."""
        name, other = self.name(host), f"{self._tag}d{len(self._forwarders)}"
        pid = os.fork()
        if pid == 0:
            with _ends():
                outer = _tap(other)
                _enter(name)
                _forward(_tap("slow0"), outer, seconds)
        self._forwarders.append(pid)
        until = time.monotonic() + _BUSY_S
        while not os.path.exists(f"/sys/class/net/{other}"):
            if time.monotonic() > until:
                raise TimeoutError("the forwarder does not begin")
        _ip("link", "set", other, "master", self._bridge, "up")
        while subprocess.run(
            ["ip", "-n", name, "link", "set", "slow0", "up"], capture_output=True, check=False
        ).returncode:
            time.sleep(0.001)
        for at in range(self.count):
            if at != host:
                route = ["replace", f"{self.address(at)}/32", "dev", "slow0", "src", self.address(host)]
                _ip("-n", name, "route", *route)
                _ip("-n", self.name(at), "neigh", "flush", "all")

    def hurry(self, host: int) -> None:
        """It is delayed no more."""
        for at in range(self.count):
            if at != host:
                _ip("-n", self.name(host), "route", "del", f"{self.address(at)}/32", "dev", "slow0")
                _ip("-n", self.name(at), "neigh", "flush", "all")

    def signal(self, host: int, what: int, only: int | None = None) -> None:
        """All its processes get a signal, or `only` the one that has this number there."""
        found = subprocess.run(["ip", "netns", "pids", self.name(host)], capture_output=True, text=True, check=False)
        for pid in map(int, found.stdout.split()):
            try:
                if only is None or only == _number_inside(pid):
                    os.kill(pid, what)
            except (ProcessLookupError, FileNotFoundError):  # it has ended meanwhile
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
        self.signal(host, signal.SIGSTOP)

    def thaw(self, host: int) -> None:
        """They go on."""
        self.signal(host, signal.SIGCONT)

    def kill(self, host: int) -> None:
        """All its processes end."""
        self.signal(host, signal.SIGKILL)


def _number_inside(pid: int) -> int:
    """Of a process, in the innermost namespace that it is in."""
    (line,) = re.findall(r"^NSpid:(.*)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(line.split()[-1])


class _ends:
    """A forked process ends here, whatever happens."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            traceback.print_exception(error)
        os._exit(0 if error is None else 1)


def _live(bodies: Sequence[Callable[[], None]]) -> None:
    """As the first process of a host: it ends with the last of the others."""
    pids = []
    for body in bodies:
        pid = os.fork()
        if pid == 0:
            with _ends():
                body()
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)


def _remount(command: Sequence[str]) -> None:
    """It cannot be done while files are open for writing."""
    until = time.monotonic() + _BUSY_S
    while (done := subprocess.run(command, capture_output=True, check=False)).returncode:
        if time.monotonic() > until:
            raise TimeoutError(done.stderr.decode())


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def _checked(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _enter(name: str) -> None:
    file = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    _checked(_libc.setns(file, _NEW_NET))
    os.close(file)


def _tap(name: str) -> int:
    """An interface whose other end is the file."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _SET_IFF, struct.pack("16sH", name.encode(), _TAP_WITHOUT_INFO))
    return file


def _forward(one: int, other: int, seconds: float) -> None:
    """Frames from each to the other, later."""
    held: list[tuple[float, int, int, bytes]] = []
    for number in itertools.count():
        wait = max(0.0, held[0][0] - time.monotonic()) if held else None
        for file in select.select([one, other], [], [], wait)[0]:
            frame = os.read(file, 65536)
            heapq.heappush(held, (time.monotonic() + seconds, 2 * number + (file == one), file, frame))
        while held and held[0][0] <= time.monotonic():
            _, _, file, frame = heapq.heappop(held)
            with suppress(OSError):  # the interface is not up yet
                os.write(other if file == one else one, frame)
