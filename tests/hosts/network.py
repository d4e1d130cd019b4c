"""Hosts on one machine: network namespaces with addresses, host names and process numbers of their own, on a bridge,
which has a namespace, too: so names of interfaces are nobody else's.

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


_ETC, _NAMESPACES, _TAKEN = Path("/etc/netns"), Path("/run/netns"), Path("/run/reshard-hosts")
_NAME = "reshard"
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
    try:
        with Hosts(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made: {error.stderr.strip()}"
    except OSError as error:
        return f"network namespaces cannot be made: {error}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class _Number:
    """A number that no other process of this machine has while this one lives. A lock on a file says so, which also
    lists the disks to unmount: the next one to look removes what a killed process has left."""

    def __init__(self) -> None:
        _TAKEN.mkdir(exist_ok=True)
        self.number, self.file = 0, -1
        for number in itertools.count():
            path = _TAKEN / str(number)
            if self.file >= 0 and not path.exists():
                return
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _clear(number, file)
            except BlockingIOError:  # it is taken
                os.close(file)
                continue
            if self.file < 0:
                self.number, self.file = number, file
            else:
                os.close(file)

    def release(self) -> None:
        """Nothing that is named by it stays."""
        _clear(self.number, self.file)
        os.close(self.file)


def _clear(number: int, file: int) -> None:
    """End what runs on hosts of that number, and remove them with their disks."""
    named = {path.name for folder in (_ETC, _NAMESPACES) if folder.exists() for path in folder.iterdir()}
    for name in sorted(name for name in named if re.fullmatch(rf"{_NAME}{number}-[0-9a-z]+", name)):
        _signal(name, signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        shutil.rmtree(_ETC / name, ignore_errors=True)
    for disk in os.pread(file, 1 << 20, 0).decode().splitlines():
        subprocess.run(["umount", "--lazy", disk], capture_output=True, check=False)
    os.ftruncate(file, 0)


def _signal(name: str, what: int, only: int | None = None) -> None:
    """All processes in a namespace get a signal, or `only` the one that has this number there."""
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    for pid in map(int, found.stdout.split()):
        try:
            if only is None or only == _number_inside(pid):
                os.kill(pid, what)
        except (ProcessLookupError, FileNotFoundError):  # it has ended meanwhile
            continue


class Hosts:
    """So many hosts, each with one interface, `eth0`."""

    def __init__(self, count: int) -> None:
        self.count, self._jobs = count, list[subprocess.Popen[str]]()
        self._forked: dict[int, int] = {}
        self._forwarders: list[int] = []
        self._fillers: list[Path] = []

    def name(self, host: int) -> str:
        """The namespace, and the name of the host."""
        return f"{_NAME}{self._taken.number}-{host}"

    @property
    def _switch(self) -> str:
        """The namespace of the bridge, `bridge0`, and of a port for each host, `h0`."""
        return f"{_NAME}{self._taken.number}-switch"

    def address(self, host: int) -> str:
        """Of its interface."""
        return f"10.77.{self._taken.number % 250}.{host + 1}"

    def __enter__(self) -> Hosts:
        self._taken = _Number()
        try:
            self._make()
        except BaseException:
            self._taken.release()
            raise
        return self

    def _make(self) -> None:
        switch = self._switch
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "name", "bridge0", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge0", "up")
        names = "".join(f"{self.address(host)} {self.name(host)}\n" for host in range(self.count))
        for host in range(self.count):
            name = self.name(host)
            _ip("netns", "add", name)
            etc = _ETC / name  # `ip netns exec` puts these in the place of those in /etc
            etc.mkdir(parents=True)
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
            (etc / "resolv.conf").write_text("")
            _ip("-n", switch, "link", "add", f"h{host}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", switch, "link", "set", f"h{host}", "master", "bridge0", "up")
            _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")

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
        self._taken.release()

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
            os.close(self._taken.file)  # it is this process's alone
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
        os.write(self._taken.file, f"{path}\n".encode())
        _run("mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(path))

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
        name, other = self.name(host), f"slow{len(self._forwarders)}"
        pid = os.fork()
        if pid == 0:
            with _ends():
                os.close(self._taken.file)
                _enter(self._switch)
                outer = _tap(other)
                _enter(name)
                _forward(_tap("slow0"), outer, seconds)
        self._forwarders.append(pid)
        until = time.monotonic() + _BUSY_S
        for where in (
            ["-n", self._switch, "link", "set", other, "master", "bridge0"],
            ["-n", name, "link", "set", "slow0"],
        ):
            while subprocess.run(["ip", *where, "up"], capture_output=True, check=False).returncode:
                if time.monotonic() > until:
                    raise TimeoutError("the forwarder does not begin")
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
        _signal(self.name(host), what, only)

    def cut(self, host: int) -> None:
        """Nothing comes or goes any more."""
        _ip("-n", self._switch, "link", "set", f"h{host}", "down")

    def heal(self, host: int) -> None:
        """It is back."""
        _ip("-n", self._switch, "link", "set", f"h{host}", "up")

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
    file = os.open(_NAMESPACES / name, os.O_RDONLY)
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
