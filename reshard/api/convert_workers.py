"""Several processes of one machine that write files of one job: each opens the source itself and plans alike.

The parent starts `python -m reshard.api.convert_workers`, gives each the job and the names of its files on stdin, and
reads what they have to say, line by line, on stdout. It keeps their stdin open while they work: when that ends, the
parent is dead, and a child that went on would write into files of whoever continues the conversion.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from reshard.api.convert_job import ConvertJob, Journal
from reshard.errors import CheckpointError
from reshard.stored.checksums import Checking
from reshard.stored.streaming import FilePlan, FormatWriter

__all__ = ["dealt", "write_files", "write_in_processes"]


_REPORT_BYTES = 32 << 20


@dataclass(frozen=True)
class _WorkerOrder:
    job: ConvertJob
    job_id: str
    digest: str
    files: tuple[str, ...]


def dealt(files: Sequence[FilePlan], count: int) -> list[list[FilePlan]]:
    """The files in `count` hands of about equal bytes: a function of the plan alone."""
    hands: list[list[FilePlan]] = [[] for _ in range(count)]
    loads = [0] * count
    for file in sorted(files, key=lambda file: (-file.nbytes, file.name)):
        least = min(range(count), key=lambda i: (loads[i], i))
        hands[least].append(file)
        loads[least] += file.nbytes + 1
    return hands


def write_files(
    writer: FormatWriter,
    journal: Journal,
    files: Sequence[FilePlan],
    checking: Checking,
    on_bytes: Callable[[int], None],
) -> None:
    """Write these files, one after another, and record each, with how much of what was read for it is unchecked."""
    before = checking.bytes_unchecked
    for file in files:
        done = writer.write(journal.storage, file, on_bytes)
        if file is files[-1]:
            checking.finish()
        unchecked, before = checking.bytes_unchecked - before, checking.bytes_unchecked
        journal.add(file.name, msgspec.structs.replace(done, facts={**done.facts, "unchecked_bytes": unchecked}))


def write_in_processes(
    job: ConvertJob, job_id: str, digest: str, hands: Sequence[Sequence[FilePlan]], on_bytes: Callable[[int], None]
) -> None:
    """Have a process write each hand. Raises CheckpointError with the words of the first that fails."""
    children = []
    errors: list[str] = []
    for hand in hands:
        order = _WorkerOrder(job, job_id, digest, tuple(file.name for file in hand))
        child = subprocess.Popen(
            [sys.executable, "-m", "reshard.api.convert_workers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # Ctrl-C reaches the parent, and it ends them
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        thread = threading.Thread(target=_follow, args=(child, pickle.dumps(order), on_bytes, errors), daemon=True)
        thread.start()
        children.append((child, thread))
    try:
        for _, thread in children:
            while thread.is_alive():
                thread.join(0.1)
                if errors:
                    break
    finally:
        for child, thread in children:
            if (errors or sys.exc_info()[0]) and child.poll() is None:
                child.kill()
            child.wait()
            thread.join()
    if errors:
        raise CheckpointError(errors[0])


def _follow(child: subprocess.Popen[bytes], order: bytes, on_bytes: Callable[[int], None], errors: list[str]) -> None:
    """Give a child its order and listen to it until it ends."""
    assert child.stdin is not None
    assert child.stdout is not None
    ended = False
    try:
        child.stdin.write(len(order).to_bytes(8, "little") + order)
        child.stdin.flush()
        for line in child.stdout:
            said = json.loads(line)
            if "bytes" in said:
                on_bytes(said["bytes"])
            elif "error" in said:
                errors.append(said["error"])
            ended = ended or "end" in said
    except (OSError, ValueError) as error:
        errors.append(f"a worker process cannot be talked to: {error}")
    code = child.wait()
    child.stdout.close()
    with suppress(BrokenPipeError):
        child.stdin.close()
    if not ended and not errors:
        errors.append(f"a worker process ended with code {code} before its work was done")


def _end_with_parent() -> None:
    """Stop at once, without cleaning up, when the parent is gone."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def _main() -> None:
    given = sys.stdin.buffer
    order: _WorkerOrder = pickle.loads(given.read(int.from_bytes(given.read(8), "little")))  # from the parent
    threading.Thread(target=_end_with_parent, daemon=True).start()
    out, pending = sys.stdout, 0
    sys.stdout = sys.stderr

    def say(**what: object) -> None:
        try:
            out.write(json.dumps(what) + "\n")
            out.flush()
        except BrokenPipeError:
            os._exit(1)

    def on_bytes(nbytes: int) -> None:
        nonlocal pending
        pending += nbytes
        if pending >= _REPORT_BYTES:
            say(bytes=pending)
            pending = 0

    try:
        state = order.job.state()
        writer = order.job.writer(state, order.job_id)
        by_name = {file.name: file for file in writer.files}
        journal = Journal(order.job.storage(), order.digest)
        write_files(writer, journal, [by_name[name] for name in order.files], state.contents.checking, on_bytes)
        say(bytes=pending)
        say(end=True)
    except Exception as error:
        say(error=f"{type(error).__name__}: {error}")
        sys.exit(1)


if __name__ == "__main__":
    _main()
