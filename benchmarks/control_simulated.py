"""The communication between ranks in a save and a load, for more ranks than a machine can run.

    python -m benchmarks.control_simulated [--ranks 1024 131072] [--verbs save load]

131,072 ranks take 100 s of CPU time for each operation, and less than 12 GB.

The ranks are simulated, the control plane is not: it makes the same groups, rounds, global state, and agreements as
`reshard.save` and `reshard.load`, in the same order, on a store in memory that counts. Tensors are only described,
and no files are written or read. `benchmarks.control` shows with fewer ranks that the counts are those of real saves.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec

from planners.geometry.layout import Form, ProductForm, TensorSpec
from planners.geometry.mesh import Mesh, Shard
from reshard.api import load_matching, save as repeated, save_job
from reshard.api.options import LoadOptions, SaveOptions
from reshard.execute.host_reading import HostReading, OwnMemory
from reshard.live.fingerprints import Partial, add_tallies, pack_tally
from reshard.native.manifest import FileRecord
from reshard.ranks.global_state import GlobalState, LocalState, global_state_of
from reshard.ranks.group import Group
from tests.simulated_ranks import World

PER_MACHINE = 8
_TOLD_BYTES = 150
"""Bytes that a rank reports about blocks that it shares with others."""
_NO_PLAN: Any = None
"""Not used, because everything fits."""
_PART = Partial((1, 2), 8)
_RECORD = FileRecord("data-0192f3c1a800-5d2e6f7a8b9c/00000.safetensors", 1 << 30, 1 << 10, "0" * 32)

_censuses: dict[bytes, GlobalState] = {}
"""Global states by encoded content. They are frozen and equal on all ranks, so simulated ranks share them."""


@dataclass(frozen=True)
class Described:
    """A tensor's description, in place of a live tensor."""

    key: str
    spec: TensorSpec
    form: Form
    is_sharded = True
    is_elsewhere = False
    is_meta = False
    is_ambiguous = False
    local = ()

    @property
    def forms(self) -> tuple[Form, ...]:
        return (self.form,)


def save(group: Group, state: Any, ranks_per_file: int = 1) -> None:
    """Make the collective steps of `reshard.save`, in order."""
    with group.together("save"):
        holdings = LocalState.of(state)
        met = repeated.agree_before_save(holdings, group, SaveOptions(), None, None)  # no rank has kept a plan
        answers = group.distinct_answers(holdings.description, known=met.pool)
        key = msgspec.msgpack.encode([(said, len(ranks), ranks[0], ranks[-1]) for said, ranks in answers])
        if key not in _censuses:
            _censuses[key] = global_state_of(holdings, group, answers)
        census = _censuses[key]
        word = ("0192f3c1a800-5d2e6f7a8b9c", save_job.Choice(), None) if group.rank == 0 else None
        kept = repeated.CachedPlan(b"as it was said", census, _NO_PLAN, [])
        repeated.agree_before_save(holdings, group, SaveOptions(), kept, word, before=met)
        group.barrier()
        with group.together("write"):
            if ranks_per_file > 1:
                here = f"machine {group.rank // PER_MACHINE}"
                save_job.machine = lambda: here
                together = save_job.file_group_of(group, ranks_per_file)
                for said in (b"bytes by item size", b"rows", bytes(_TOLD_BYTES)):
                    together.tell(said)
            tally = pack_tally(dict.fromkeys(state.tensors, _PART), state.tensors)
            group.gather_and_sum((group.rank, _RECORD), tally, add_tallies)


def load(group: Group, match: Any) -> None:
    """Make the collective steps of `reshard.load`, in order."""
    with group.together("load"):
        group.same_options("load", LoadOptions().shared())
        machine = f"machine {group.rank // PER_MACHINE}"
        load_matching.socket = SimpleNamespace(gethostname=lambda: machine)  # type: ignore[attr-defined]
        load_matching.gather_mismatches(match, group)
        own = OwnMemory(0, 4096)
        own.machine = machine
        HostReading.agree([], own, group).confirm(group)


def simulate(name: str, world_size: int, tensors: int) -> None:
    """Simulate one operation, and print a line about it."""
    form = ProductForm.make(Mesh({"dp": world_size}), (Shard(0),))
    names = [f"layers.{i}.weight" for i in range(tensors)]
    held = {key: Described(key, TensorSpec(key, (2 * world_size, 4), "float32"), form) for key in names}
    paths: dict[str, Any] = {key: (key,) for key in (*names, "step")}
    state = SimpleNamespace(tensors=held, objects={"step": 7}, per_rank={}, paths=paths, containers={}, aliases={})
    contents = SimpleNamespace(subset=None, details=lambda kind: None)
    checkpoint = SimpleNamespace(contents=contents, url="file:///run/step-1000", run=None)
    match = SimpleNamespace(
        missing=(), mismatched=(), tensors=(), names=tuple(names), used=frozenset(names), checkpoint=checkpoint,
        targets=SimpleNamespace(tensors={}),
    )  # fmt: skip
    world = World(world_size, PER_MACHINE)
    verb: Callable[[Group], None] = (
        (lambda group: load(group, match))
        if name == "load"
        else (lambda group: save(group, state, PER_MACHINE if name == "files" else 1))
    )

    def body(rank: int) -> int:
        group = world.group(rank)
        verb(group)
        assert group._rounds is not None
        return group._rounds._round

    begun = time.process_time()
    _censuses.clear()
    with world.clock():
        rounds = world.run(body)
    for end in rounds:
        if isinstance(end, BaseException):
            raise end
    assert len(set(rounds)) == 1, "the ranks did not go through the same rounds"
    got = sorted(world.got.values())
    print(
        f"{name:5} {world_size:7,} {rounds[0]:6} {sum(world.asked.values()) / world_size:12.1f} "
        f"{sum(got) / world_size / 1e3:8.2f} {got[-1] / 1e3:10.1f} {sum(world.gave.values()) / world_size / 1e3:8.2f} "
        f"{world.peak_bytes / 1e6:10.1f} {len(world.values) - world_size:6} {time.process_time() - begun:8.0f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="up to 1,024 ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[128, 256, 1024, 4096])
    parser.add_argument("--verbs", nargs="+", default=["save", "load"], help="'files' is a save of 8 ranks a file")
    parser.add_argument("--tensors", type=int, default=2)
    options = parser.parse_args()
    print(
        f"{'verb':5} {'ranks':>7} {'rounds':>6} {'asked a rank':>12} {'kB got':>8} {'most, kB':>10} {'kB gave':>8} "
        f"{'peak, MB':>10} {'left':>6} {'cpu s':>8}"
    )
    for world_size in [128, 1024] if options.quick else options.ranks:
        for name in options.verbs:
            simulate(name, world_size, options.tensors)


if __name__ == "__main__":
    main()
