"""The demo from outside: start the ranks, plan and prove between the jobs, and judge what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from planners.geometry.layout import StateLayout
from planners.load.plan import LoadPlan, plan_reads
from planners.proof import verify
from planners.reports.html import to_html
from reshard.checkpoint.checkpoint import open as open_checkpoint
from reshard.cli.demo_job import jobs, ranks
from reshard.cli.demo_job.parallel import Ways
from reshard.errors import ReshardError

__all__ = ["BEFORE", "Change", "Hear", "Plans", "Result", "Show", "tell_story"]

BEFORE = Ways(fsdp=2, tp=2)
AFTER = (Ways(fsdp=3, tp=1), Ways(fsdp=1, tp=2))
MAX_OVER_READ = 1.05

Hear = Callable[[str, Any], None]
"""Gets the name of the job that is running and what its rank 0 tells."""
Show = Callable[["Plans"], None]
"""Gets the plans as soon as they are made."""


@dataclass(frozen=True)
class Plans:
    """The changes of topology, planned from the saved checkpoint and proved."""

    of: dict[str, LoadPlan]
    tensors: int
    facts_proved: dict[str, bool]


@dataclass(frozen=True)
class Change:
    """What came of one change of topology."""

    onto: str
    world_size: int
    planned_bytes: list[int]
    """Per rank."""
    proved: bool
    bytes_needed: list[int]
    bytes_read: list[int]
    tensors_equal: int
    """Tensors whose every bit is as before."""
    tensors: int
    loss_loaded: float
    """On text that is held back, as loaded."""
    loss_after: float
    """The same, after training on."""
    load_s: float

    @property
    def read_per_needed(self) -> float:
        """Bytes read per byte needed, over all ranks."""
        return sum(self.bytes_read) / max(sum(self.bytes_needed), 1)

    def problems(self, loss_before: float) -> list[str]:
        """What is not as it must be."""
        found = []
        if not self.proved:
            found.append("the plan could not be proved")
        if self.tensors_equal != self.tensors:
            found.append(f"{self.tensors - self.tensors_equal} of {self.tensors} tensors are not what they were")
        if self.planned_bytes != self.bytes_needed:
            found.append(f"the plan said {self.planned_bytes} bytes, the load needed {self.bytes_needed}")
        if self.read_per_needed > MAX_OVER_READ:
            found.append(f"{self.read_per_needed:.2f} bytes were read per byte needed")
        if not abs(self.loss_loaded - loss_before) < 1e-3:  # sums in another order differ in the last digits
            found.append(f"the loss was {loss_before} before and is {self.loss_loaded} as loaded")
        if not self.loss_after < self.loss_loaded:
            found.append(f"training on raised the loss from {self.loss_loaded} to {self.loss_after}")
        return [f"{self.onto}: {problem}" for problem in found]


@dataclass(frozen=True)
class Result:
    """What the demo showed."""

    checkpoint: str
    pictures: dict[str, str]
    before: str
    parameters: int
    total_bytes: int
    loss_before: float
    save_s: float
    changes: list[Change]
    problems: list[str]
    """Nothing, if all is as it must be."""

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def tell_story(out: Path, steps: int, hear: Hear, show: Show) -> Result:
    """Train on 2 × 2 ranks, save, plan and prove two changes of topology, and train on in each. Everything is in `out`.

    Raises ReshardError if `out` cannot be written, or a rank fails, or this torch trains nothing under FSDP2 on CPUs.
    """
    if not hasattr(torch.cpu.Stream, "record_event"):
        raise ReshardError(
            f"the demo trains under FSDP2 on CPUs, which torch {torch.__version__} cannot: install a newer one, 2.7 at "
            "least. Saves and loads need none of it"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReshardError(f"cannot write to {out}: {error.strerror}; choose another folder with --out") from None
    path = str(out / "checkpoint")
    began = _run(jobs.begin, BEFORE, steps, path, hear)
    plans = _plan(path)
    show(plans)
    pictures = {name: _picture(out, name, plan) for name, plan in plans.of.items()}
    changes = []
    for ways in AFTER:
        resumed = _run(jobs.resume, ways, max(steps // 2, 1), path, hear)
        changes.append(_change(ways, plans, began[0], resumed))
    problems = [problem for change in changes for problem in change.problems(began[0].judged)]
    first = began[0]
    return Result(
        checkpoint=path,
        pictures=pictures,
        before=str(BEFORE),
        parameters=first.parameters,
        total_bytes=first.total_bytes,
        loss_before=first.judged,
        save_s=max(one.save_s for one in began),
        changes=changes,
        problems=problems,
    )


def _run(job: Callable[..., Any], ways: Ways, steps: int, path: str, hear: Hear) -> list[Any]:
    def first_only(rank: int, value: Any) -> None:
        if rank == 0:
            hear(str(ways), value)

    return ranks.run(job, ways.world_size, ways, steps, path, hear=first_only)


def _plan(path: str) -> Plans:
    """From the checkpoint's metadata alone: no tensor is read, no process group is up, no model exists."""
    saved: StateLayout = open_checkpoint(path).layout
    plans = {str(ways): plan_reads(saved, ways.topology.layout(saved.specs)) for ways in AFTER}
    return Plans(plans, len(saved), {name: verify(plan).ok for name, plan in plans.items()})


def _picture(out: Path, name: str, plan: LoadPlan) -> str:
    file = out / f"plan to {name}.html".lower().replace(" ", "-").replace("×", "x")
    title = f"{BEFORE} onto {name}"
    file.write_text(to_html(plan, title=title, source=f"{out}/checkpoint", target=name), encoding="utf-8")
    return str(file)


def _change(ways: Ways, plans: Plans, began: jobs.Trained, resumed: list[jobs.Resumed]) -> Change:
    name, first = str(ways), resumed[0]
    plan = plans.of[name]
    return Change(
        onto=name,
        world_size=ways.world_size,
        planned_bytes=[plan.bytes(rank) for rank in range(ways.world_size)],
        proved=plans.facts_proved[name],
        bytes_needed=[one.bytes_needed for one in resumed],
        bytes_read=[one.bytes_read for one in resumed],
        tensors_equal=sum(first.digests.get(key) == digest for key, digest in began.digests.items()),
        tensors=len(began.digests),
        loss_loaded=first.judged,
        loss_after=first.judged_after,
        load_s=max(one.load_s for one in resumed),
    )
