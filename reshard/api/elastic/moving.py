"""Moves byte ranges of files between the folders of hosts: files are planned and sent as tensors of bytes are."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from planners.geometry.box import Box
from planners.geometry.layout import StateLayout, TensorLayout, TensorSpec
from planners.transfer.plan import plan_transfers
from planners.transfer.proof import verify_schedule
from planners.transfer.rounds import schedule
from reshard.api.elastic.kept import Ranges
from reshard.control.group import Group
from reshard.errors import StorageError
from reshard.execute.messages.exchange import Exchange, RankWork, round_bytes
from reshard.execute.messages.wires import device_of_kind, sending_kinds

__all__ = ["Places", "move"]

Places = Mapping[str, Mapping[int, Ranges]]
"""By file and rank: the bytes that it holds, or wants."""


def move(
    held: Places,
    wanted: Places,
    sizes: Mapping[str, int],
    source: Callable[[str], Path],
    target: Callable[[str], Path],
    group: Group,
    process_group: dist.ProcessGroup | None,
    *,
    max_inflight_bytes: int,
) -> int:
    """Collective: bring what ranks want from ranks that hold it, by a proved plan; ranks between which nothing moves
    may give other files. Returns the bytes that this rank got from others.

    Args:
        sizes: of the files, in bytes.
        source, target: where a file lies that this rank sends, or gets, which is made.

    Raises StorageError where there is no room; PlanError for bytes that nobody holds.
    """
    rank, world = group.ranks[group.rank], max(group.ranks) + 1
    before, after = (_layout(side, sizes, world) for side in (held, wanted))
    rounds = schedule(plan_transfers(before, after), max_inflight_bytes=round_bytes(max_inflight_bytes))
    verify_schedule(rounds).raise_if_failed()

    def parts(side: Places, whole: Callable[[str], torch.Tensor]) -> Callable[[str], Sequence[torch.Tensor]]:
        return lambda name: [whole(name)[start:stop] for start, stop in side[name].get(rank, ())]

    files = {name: target(name) for name, by in wanted.items() if rank in by}
    for name, path in files.items():
        _make_room(path, sizes[name], wanted[name][rank])
    kinds = sending_kinds(process_group)
    exchange = Exchange(
        RankWork.of(rounds, rank),
        parts(held, lambda name: _mapped(source(name), shared=False)),
        parts(wanted, lambda name: _mapped(files[name], shared=True)),
        device=device_of_kind("cpu" if "cpu" in kinds else kinds[0]),
        process_group=process_group,
    )
    exchange.run(group, deadline_s=max(group.deadline - time.monotonic(), 1.0))
    for path in files.values():
        _sync(path)
    return exchange.received_bytes


def _layout(side: Places, sizes: Mapping[str, int], world: int) -> StateLayout:
    return StateLayout(
        {
            name: TensorLayout.from_boxes(
                TensorSpec(name, (sizes[name],), "uint8"),
                {rank: [Box.of((start,), (stop - start,)) for start, stop in ranges] for rank, ranges in by.items()},
                world,
            )
            for name, by in side.items()
        },
        world,
    )


def _make_room(path: Path, nbytes: int, ranges: Ranges) -> None:
    """The file, and memory for what will be written to it: where there is none, writing to it would end the process."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if os.fstat(file).st_size < nbytes:
                os.ftruncate(file, nbytes)
            for start, stop in ranges:
                os.posix_fallocate(file, start, stop - start)
        finally:
            os.close(file)
    except OSError as error:
        raise StorageError(
            f"no room for {sum(stop - start for start, stop in ranges)} bytes of {path}: {error.strerror or error}"
        ) from error


def _mapped(path: Path, *, shared: bool) -> torch.Tensor:
    """The bytes of a file, in its own memory."""
    try:
        with open(path, "r+b" if shared else "rb") as file:
            flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE  # torch wants memory that could be written to
            memory = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise StorageError(f"cannot map {path}: {error.strerror or error}") from error
    return torch.frombuffer(memory, dtype=torch.uint8)


def _sync(path: Path) -> None:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        raise StorageError(f"cannot make {path} durable: {error.strerror or error}") from error
