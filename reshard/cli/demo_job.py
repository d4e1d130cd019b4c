"""`reshard demo`: train a small transformer, change its topology twice, and prove that nothing was lost."""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from planners.geometry.layout import StateLayout
from planners.geometry.topologies import fsdp_tp
from planners.plans.load import LoadPlan, plan_reads
from planners.plans.plan import verify
from reshard.checkpoint import open as open_checkpoint
from reshard.cli.examples.llama_fsdp_tp_pp import Training
from reshard.errors import ReshardError
from reshard.live.tree import leaves_of
from reshard.state import key_of


@dataclass(frozen=True)
class Degrees:
    """How many ways data and tensors are sharded."""

    fsdp: int
    tp: int

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.fsdp * self.tp

    def __str__(self) -> str:
        parts = [f"FSDP {self.fsdp}"] * (self.fsdp > 1) + [f"TP {self.tp}"] * (self.tp > 1)
        return " × ".join(parts) or "one rank"


# The demo from outside: start the ranks, plan and prove between the jobs, and check the
# results.


BEFORE = Degrees(fsdp=2, tp=2)
AFTER = (Degrees(fsdp=3, tp=1), Degrees(fsdp=1, tp=2))
MAX_OVER_READ = 1.05

Hear = Callable[[str, Any], None]
"""Called with the name of the running job, and with each report of its rank 0."""
Show = Callable[["Plans"], None]
"""Called with the plans as soon as they exist."""


@dataclass(frozen=True)
class Plans:
    """The changes of topology, planned from the saved checkpoint and proved."""

    of: dict[str, LoadPlan]
    tensors: int
    facts_proved: dict[str, bool]


@dataclass(frozen=True)
class Change:
    """The result of one topology change."""

    onto: str
    world_size: int
    planned_bytes: list[int]
    """Bytes that the plan reads, per rank."""
    proved: bool
    bytes_needed: list[int]
    bytes_read: list[int]
    tensors_equal: int
    """Number of tensors that are bit for bit equal to the saved ones."""
    tensors: int
    loss_loaded: float
    """The loss on held-out text, right after the load."""
    loss_after: float
    """The loss on held-out text, after more training."""
    load_s: float

    @property
    def read_per_needed(self) -> float:
        """Bytes read per byte needed, over all ranks."""
        return sum(self.bytes_read) / max(sum(self.bytes_needed), 1)

    def problems(self, loss_before: float) -> list[str]:
        """Return what is wrong."""
        found = []
        if not self.proved:
            found.append("the plan could not be proved")
        if self.tensors_equal != self.tensors:
            found.append(f"{self.tensors - self.tensors_equal} of {self.tensors} tensors are not what they were")
        if self.planned_bytes != self.bytes_needed:
            found.append(f"the plan said {self.planned_bytes} bytes, the load needed {self.bytes_needed}")
        if self.read_per_needed > MAX_OVER_READ:
            found.append(f"{self.read_per_needed:.2f} × the bytes needed were read")
        if not abs(self.loss_loaded - loss_before) < 1e-3:  # the order of sums changes the last digits
            found.append(f"the loss was {loss_before} before and is {self.loss_loaded} as loaded")
        if not self.loss_after < self.loss_loaded:
            found.append(f"more training raised the loss from {self.loss_loaded} to {self.loss_after}")
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
    """Empty if everything is right."""

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def run_demo(out: Path, steps: int, hear: Hear, show: Show) -> Result:
    """Train on 2 × 2 ranks, save, plan and prove two topology changes, and continue training in
    each topology. Writes everything to `out`.

    Raises ReshardError if `out` cannot be written, a rank fails, or this torch cannot train with
    FSDP2 on CPUs.
    """
    if not hasattr(torch.cpu.Stream, "record_event"):
        raise ReshardError(
            f"the demo trains with FSDP2 on CPUs, which needs torch 2.7 or newer; this is torch {torch.__version__}. "
            "Saves and loads do not need it"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReshardError(f"cannot write to {out}: {error.strerror}; choose another folder with --out") from None
    path = str(out / "checkpoint")
    began = _run(begin_training, BEFORE, steps, path, hear)
    plans = _plan(path)
    show(plans)
    pictures = {name: _picture(out, name, plan) for name, plan in plans.of.items()}
    changes = []
    for ways in AFTER:
        resumed = _run(resume_training, ways, max(steps // 2, 1), path, hear)
        changes.append(_change(ways, plans, began[0], resumed))
    problems = [problem for change in changes for problem in change.problems(began[0].judged)]
    first = began[0]
    return Result(
        checkpoint=path,
        pictures=pictures,
        before=str(BEFORE),
        parameters=first.parameters,
        total_bytes=first.report.total_bytes,
        loss_before=first.judged,
        save_s=max(sum(one.report.seconds.values()) for one in began),
        changes=changes,
        problems=problems,
    )


def _plan(path: str) -> Plans:
    """Plan from the checkpoint's metadata alone, without tensors, a process group, or a model."""
    saved: StateLayout = open_checkpoint(path).layout
    plans = {str(ways): plan_reads(saved, fsdp_tp(ways.fsdp, ways.tp).layout(saved.specs)) for ways in AFTER}
    return Plans(plans, len(saved), {name: verify(plan).ok for name, plan in plans.items()})


def _picture(out: Path, name: str, plan: LoadPlan) -> str:
    file = out / f"plan to {name}.html".lower().replace(" ", "-").replace("×", "x")
    title = f"{BEFORE} onto {name}"
    file.write_text(plan.to_html(title=title, source=f"{out}/checkpoint", target=name), encoding="utf-8")
    return str(file)


def _change(ways: Degrees, plans: Plans, began: RankResult, resumed: list[RankResult]) -> Change:
    name, first = str(ways), resumed[0]
    plan = plans.of[name]
    return Change(
        onto=name,
        world_size=ways.world_size,
        planned_bytes=[plan.bytes(rank) for rank in range(ways.world_size)],
        proved=plans.facts_proved[name],
        bytes_needed=[one.report.bytes_needed for one in resumed],
        bytes_read=[one.report.bytes_read for one in resumed],
        tensors_equal=sum(first.digests.get(key) == digest for key, digest in began.digests.items()),
        tensors=len(began.digests),
        loss_loaded=first.judged,
        loss_after=first.judged_after,
        load_s=max(sum(one.report.seconds.values()) for one in resumed),
    )


# What every rank of the demo does: train and save in one topology, or load in another and train on.


@dataclass(frozen=True)
class RankResult:
    """What a rank reports at the end of a job."""

    report: Any
    """The report of the rank's save or load."""
    digests: dict[str, str]
    """Key -> SHA-256 of each gathered tensor, as saved or as loaded. Only on rank 0."""
    judged: float
    """Loss on held-out text, with the saved or loaded tensors."""
    judged_after: float
    """Loss on held-out text at the end of the job."""
    parameters: int


def begin_training(tell: Tell, ways: Degrees, steps: int, path: str) -> RankResult:
    """Train from scratch, then save model, optimizer and the number of steps."""
    training = Training(ways.fsdp, ways.tp, 1, lambda *step: tell(step))
    training.train(steps)
    tell("saving")
    return _told(tell, training, training.save(path), 0)


def resume_training(tell: Tell, ways: Degrees, steps: int, path: str) -> RankResult:
    """Load the checkpoint of another topology into a model with different initial values, and
    continue training."""
    training = Training(ways.fsdp, ways.tp, 2, lambda *step: tell(step))
    tell("loading")
    return _told(tell, training, training.resume(path), steps)


def _told(tell: Tell, training: Training, report: Any, steps: int) -> RankResult:
    """Gather tensors and evaluate the loss, continue training, and evaluate it again."""
    tell("gathering")
    digests, judged = _digests(training.state()), training.evaluate()
    training.train(steps)
    return RankResult(report, digests, judged, training.evaluate(), sum(p.numel() for p in training.model.parameters()))


def _digests(state: dict[str, Any]) -> dict[str, str]:
    """SHA-256 of every full tensor on rank 0, gathered by torch's own means one at a time."""
    out = {}
    for path, tensor in leaves_of(state).items():
        if not isinstance(tensor, torch.Tensor):
            continue
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if dist.get_rank() == 0:
            out[key_of(path)] = hashlib.sha256(
                whole.detach().contiguous().view(-1).view(torch.uint8).numpy().data
            ).hexdigest()
    return out


# Several processes on this machine that talk over gloo, and what the first of them
# reports while they work.


Tell = Callable[[Any], None]
"""Sends a value to the process that started the ranks."""


def _run(job: Callable[..., Any], ways: Degrees, steps: int, path: str, hear: Hear) -> list[Any]:
    """Run a job on its ranks, and return the results by rank. `hear` is called with each report of
    rank 0.

    Raises ReshardError if a rank fails or dies, with its traceback as a note. The other ranks are
    terminated.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, but not in torch's own list

    method = "forkserver" if sys.platform == "linux" else "spawn"
    context: Any = multiprocessing.get_context(method)
    context.set_forkserver_preload([__name__])  # torch is imported once, not once a rank
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told, ended = context.SimpleQueue(), context.SimpleQueue()
    results: dict[int, Any] = {}
    args = ways.world_size, store.port, told, ended, job, (ways, steps, path)
    start: Any = start_processes
    ranks = start(_rank, args, ways.world_size, join=False, daemon=True, start_method=method)
    try:
        is_over = False
        while not is_over:
            is_over = ranks.join(_LOOK_S)
            while not told.empty():
                hear(str(ways), told.get())
            while not ended.empty():
                results.update([ended.get()])
    except (ProcessExitedException, ProcessRaisedException) as failure:
        error = ReshardError(f"rank {failure.error_index} of the demo {_first_words(failure)}")
        error.add_note(str(failure))
        raise error from None
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()
    return [results[rank] for rank in range(ways.world_size)]


_LOOK_S = 0.05
"""Interval at which reports are read, in seconds."""


def _first_words(failure: ProcessExitedException | ProcessRaisedException) -> str:
    """Return the error of a rank: the first line of one of reshard's errors, or all of any other error."""
    if isinstance(failure, ProcessExitedException):
        return "died without an error message. It may have run out of memory"
    known = re.findall(r"^reshard\.errors\.\w+: (.*)", str(failure), re.MULTILINE)
    return f"failed: {known[-1] if known else failure}"


def _rank(rank: int, world_size: int, port: int, told: Any, ended: Any, job: Callable[..., Any], args: Any) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # as above

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches every process, and one reports it
    torch.set_num_threads(1)
    # two remarks on speed and on in-place edits that this model does not do; they would tear
    # the progress bars
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host name may not resolve
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    result = job(told.put if rank == 0 else lambda value: None, *args)
    dist.destroy_process_group()
    ended.put((rank, result))
