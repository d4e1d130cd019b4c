"""`reshard demo`: train a small transformer, change its topology twice, and prove that nothing was lost."""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import reshard
from planners.geometry.layout import StateLayout
from planners.geometry.topologies import Topology, fsdp_tp
from planners.plans.load import LoadPlan, plan_reads
from planners.plans.proof import verify
from planners.reports.pages import to_html
from reshard.checkpoint import open as open_checkpoint
from reshard.errors import ReshardError

__all__ = [
    "BEFORE", "Change", "Plans", "Result", "Resumed", "Trained", "begin_training",
    "resume_training", "run_ranks", "tell_story",
]  # fmt: skip


@dataclass(frozen=True)
class Ways:
    """How many ways data and tensors are cut."""

    fsdp: int
    tp: int

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.fsdp * self.tp

    def __str__(self) -> str:
        parts = [f"FSDP {self.fsdp}"] * (self.fsdp > 1) + [f"TP {self.tp}"] * (self.tp > 1)
        return " × ".join(parts) or "one rank"

    @property
    def topology(self) -> Topology:
        """For the planner, which knows the names of such models."""
        return fsdp_tp(self.fsdp, self.tp)

    def mesh(self) -> DeviceMesh:
        """The device mesh, with the axes dp and tp."""
        return init_device_mesh("cpu", (self.fsdp, self.tp), mesh_dim_names=("dp", "tp"))

    def apply(self, model: Transformer, mesh: DeviceMesh) -> nn.Module:
        """Put a whole model into this topology, in place."""
        if self.tp > 1:
            _tensor_parallel(model, mesh["tp"])
        if self.fsdp > 1:
            for layer in model.layers:
                fully_shard(layer, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
        return model


def _tensor_parallel(model: Transformer, mesh: DeviceMesh) -> None:
    into, out_of = ColwiseParallel, RowwiseParallel
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
            "output": ColwiseParallel(output_layouts=Replicate()),
        },
    )
    for layer in model.layers:
        parallelize_module(
            layer,
            mesh,
            {
                "attention.wq": into(),
                "attention.wk": into(),
                "attention.wv": into(),
                "attention.wo": out_of(),
                "feed_forward.w1": into(),
                "feed_forward.w3": into(),
                "feed_forward.w2": out_of(),
            },
        )


# The demo from outside: start the ranks, plan and prove between the jobs, and judge what came of
# it.


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

    return run_ranks(job, ways.world_size, ways, steps, path, hear=first_only)


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


def _change(ways: Ways, plans: Plans, began: Trained, resumed: list[Resumed]) -> Change:
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


# What every rank of the demo does: train and save in one topology, or load in another and train on.


SEQUENCES = 12
"""Sequences of one training step, over all ranks: two and three ways divide it."""


@dataclass(frozen=True)
class Trained:
    """What a rank of the first job tells at its end."""

    digests: dict[str, str]
    """Of every tensor, gathered: key -> SHA-256. On rank 0 only."""
    judged: float
    """Loss on text that is held back."""
    parameters: int
    bytes_written: int
    total_bytes: int
    save_s: float


@dataclass(frozen=True)
class Resumed:
    """What a rank of a later job tells at its end."""

    digests: dict[str, str]
    """As in `Trained`, taken after loading and before training on."""
    judged: float
    """Loss on text that is held back, after loading."""
    judged_after: float
    """The same, after training on."""
    bytes_needed: int
    bytes_read: int
    load_s: float
    step: int
    """The step that was saved."""


def begin_training(tell: Tell, ways: Ways, steps: int, path: str) -> Trained:
    """Train from scratch, then save model, optimizer and the number of steps."""
    worker = _Worker(tell, ways, seed=1)
    worker.train(0, steps)
    judged = worker.judge()
    model, optim = reshard.get_state_dict(worker.model, worker.optimizer)
    state = {"model": model, "optim": optim, "step": steps}
    tell("saving")
    report = reshard.save(state, path)
    tell("gathering")
    return Trained(
        digests=_digests(state),
        judged=judged,
        parameters=sum(p.numel() for p in worker.model.parameters()),
        bytes_written=report.bytes_written,
        total_bytes=report.total_bytes,
        save_s=sum(report.seconds.values()),
    )


def resume_training(tell: Tell, ways: Ways, steps: int, path: str) -> Resumed:
    """Load what another topology saved, into a model that starts from other values, and train on."""
    worker = _Worker(tell, ways, seed=2)
    tell("loading")
    checkpoint = reshard.open(path)
    state: dict[str, Any] = {
        "model": reshard.get_model_state_dict(worker.model),
        "optim": reshard.optimizer_destinations(worker.model, worker.optimizer, checkpoint),
        "step": 0,
    }
    report = reshard.load(state, checkpoint)
    reshard.set_state_dict(
        worker.model, worker.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    tell("gathering")
    model, optim = reshard.get_state_dict(worker.model, worker.optimizer)
    digests = _digests({"model": model, "optim": optim})
    judged = worker.judge()
    step: int = state["step"]
    worker.train(step, steps)
    return Resumed(
        digests=digests,
        judged=judged,
        judged_after=worker.judge(),
        bytes_needed=report.bytes_needed,
        bytes_read=report.bytes_read,
        load_s=sum(report.seconds.values()),
        step=step,
    )


class _Worker:
    """One rank's model, optimizer and share of the data."""

    def __init__(self, tell: Tell, ways: Ways, seed: int) -> None:
        self.config, self.text, self.tell = ModelConfig(), Text.read(), tell
        self.mesh: DeviceMesh = ways.mesh()
        self.model: nn.Module = ways.apply(build(self.config, seed), self.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, betas=(0.9, 0.95), foreach=False)

    def train(self, first: int, steps: int) -> None:
        """Steps `first` to `first + steps` - 1."""
        for step in range(first, first + steps):
            tokens, wanted = self._share(self.text.batch(step, SEQUENCES, self.config.context))
            loss = self._loss(tokens, wanted)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.tell((step, self._mean(loss)))

    @torch.no_grad()
    def judge(self) -> float:
        """Loss on the text that is held back."""
        return self._mean(self._loss(*self._share(self.text.judgement(4 * SEQUENCES, self.config.context))))

    def _loss(self, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(tokens).flatten(0, 1), wanted.flatten())

    def _share(self, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The sequences of this rank's place along dp; ranks along tp have the same."""
        place, places = self.mesh["dp"].get_local_rank(), self.mesh["dp"].size()
        tokens, wanted = batch
        return tokens.chunk(places)[place], wanted.chunk(places)[place]

    def _mean(self, loss: torch.Tensor) -> float:
        value = loss.detach().clone()
        dist.all_reduce(value)
        return value.item() / dist.get_world_size()


def _digests(state: dict[str, Any]) -> dict[str, str]:
    """SHA-256 of every whole tensor on rank 0, gathered by torch's own means one at a time."""
    out = {}
    for key, tensor in _tensors(state, ()):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if dist.get_rank() == 0:
            out[key] = hashlib.sha256(whole.detach().contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()
    return out


def _tensors(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield ".".join(path), value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _tensors(inner, (*path, name))


# A small Llama-style transformer: rotary embeddings, grouped queries, gated feed-forward, root-
# mean-square norms.


@dataclass(frozen=True)
class ModelConfig:
    """Sizes; the hidden size is no multiple of three on purpose, so that three ranks get uneven parts."""

    vocab: int = 256  # bytes
    dim: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 688
    context: int = 64
    """Longest sequence, in bytes."""

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.heads


class Attention(nn.Module):
    """Causal attention in which several query heads share one key and value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width = config.kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, width, bias=False)
        self.wv = nn.Linear(config.dim, width, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """`x`: [batch, time, dim]; `turns`: [time, head_dim / 2] complex numbers of length 1."""
        batch, time, _ = x.shape
        # -1: under tensor parallelism a rank has only some of the heads
        q = _rotate(self.wq(x).view(batch, time, -1, self.head_dim), turns)
        k = _rotate(self.wk(x).view(batch, time, -1, self.head_dim), turns)
        v = self.wv(x).view(batch, time, -1, self.head_dim)
        group = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        projected: torch.Tensor = self.wo(out.transpose(1, 2).reshape(batch, time, -1))
        return projected


def _rotate(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Turn neighbouring pairs of every head by the angles of their position."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = turns.real[:, None], turns.imag[:, None]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class FeedForward(nn.Module):
    """w2(silu(w1 x) * w3 x)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, time, dim] to the same."""
        out: torch.Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each normed before and added after."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.feed_forward = FeedForward(config)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """[batch, time, dim] to the same."""
        x = x + self.attention(self.attention_norm(x), turns)
        out: torch.Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Transformer(nn.Module):
    """Bytes in, logits of the next byte out."""

    turns: torch.Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(TransformerBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.output = nn.Linear(config.dim, config.vocab, bias=False)
        speeds = 10_000.0 ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles = torch.outer(torch.arange(config.context), speeds)
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """`tokens`: [batch, time] to [batch, time, vocab]."""
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.turns[: tokens.shape[1]])
        logits: torch.Tensor = self.output(self.norm(x))
        return logits


def build(config: ModelConfig, seed: int) -> Transformer:
    """The model that this seed gives, on every rank."""
    torch.manual_seed(seed)
    model = Transformer(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
    return model


# Several processes on this machine that talk over gloo, and what they tell while they work.


Tell = Callable[[Any], None]
"""Sends a value to whoever listens in the process that started the ranks."""


@dataclass(frozen=True)
class _Word:
    kind: str  # "said", "done" or "failed"
    value: Any


def run_ranks(job: Callable[..., Any], world_size: int, *args: Any, hear: Callable[[int, Any], None]) -> list[Any]:
    """Call `job(tell, *args)` on `world_size` ranks; `hear(rank, value)` gets what they tell. Results by rank.

    `job` is a function of a module; it and its arguments and results are pickled.

    Raises ReshardError if a rank fails or dies, with its traceback as a note; the others are ended.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, but not in torch's own list

    context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    context.set_forkserver_preload([job.__module__])  # torch is imported once, not once a rank
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes: dict[Any, int] = {}
    children = []
    results: dict[int, Any] = {}
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            child = context.Process(target=_child, args=(rank, world_size, store.port, theirs, job, args), daemon=True)
            child.start()
            theirs.close()
            pipes[ours] = rank
            children.append(child)
        while pipes:
            for pipe in multiprocessing.connection.wait(list(pipes)):
                word = _receive(pipe, pipes[pipe])
                if word.kind == "said":
                    hear(pipes[pipe], word.value)
                    continue
                results[pipes.pop(pipe)] = word.value
        for child in children:
            child.join()
    finally:
        for child in children:
            if child.is_alive():
                child.kill()
            child.join()
    return [results[rank] for rank in range(world_size)]


def _receive(pipe: Any, rank: int) -> _Word:
    try:
        word: _Word = pipe.recv()
    except EOFError:
        raise ReshardError(f"rank {rank} of the demo died without a word; was it killed for memory?") from None
    if word.kind == "failed":
        told, trace = word.value
        error = ReshardError(f"rank {rank} of the demo failed: {told}")
        error.add_note(trace)
        raise error
    return word


def _child(rank: int, world_size: int, port: int, pipe: Any, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # as above

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the process that started us, and it ends us
    torch.set_num_threads(1)
    # two remarks on speed and on in-place edits that this model does not do; they would tear the progress bars
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the machine's own name may lead nowhere
    try:
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        result = job(lambda value: pipe.send(_Word("said", value)), *args)
        dist.destroy_process_group()
        pipe.send(_Word("done", result))
    except BaseException as error:
        trace = traceback.format_exc()
        known = isinstance(error, ReshardError)  # its first line says enough; of a bug, everything is needed
        pipe.send(_Word("failed", (str(error).partition("\n")[0] if known else trace, trace)))
        os._exit(1)  # without waiting for ranks that wait for this one


# Text to learn from that is on every machine: the sources of Python's own standard library, byte by
# byte.


_MAX_BYTES = 4 << 20
_HELD_BACK = 0.1


@dataclass(frozen=True)
class Text:
    """Bytes to train on, and bytes that are held back to judge with."""

    train: torch.Tensor
    judge: torch.Tensor

    @classmethod
    def read(cls) -> Text:
        """The same text for every process of this interpreter."""
        folder = Path(sysconfig.get_path("stdlib"))
        whole = bytearray()
        for file in sorted(folder.glob("*.py")):
            whole += file.read_bytes()
            if len(whole) >= _MAX_BYTES:
                break
        if len(whole) < 100_000:
            raise ReshardError(
                f"{folder} holds {len(whole)} bytes of Python sources, too few to train on: "
                "run the demo with a Python that has its standard library as files"
            )
        text = torch.frombuffer(whole, dtype=torch.uint8)
        cut = int(len(text) * (1 - _HELD_BACK))
        return cls(text[:cut], text[cut:])

    def batch(self, step: int, sequences: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The bytes of training step `step` and those that follow each of them, both [sequences, length].

        A function of its arguments alone: every rank of every topology sees the same step alike.
        """
        return _windows(self.train, step, sequences, length)

    def judgement(self, sequences: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A fixed batch of the text that is held back."""
        return _windows(self.judge, 0, sequences, length)


def _windows(text: torch.Tensor, seed: int, sequences: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(text) - length - 1, (sequences,), generator=torch.Generator().manual_seed(seed))
    rows = torch.stack([text[int(start) : int(start) + length + 1] for start in starts]).long()
    return rows[:, :-1], rows[:, 1:]
