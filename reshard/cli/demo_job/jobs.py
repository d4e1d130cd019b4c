"""What every rank of the demo does: train and save in one topology, or load in another and train on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import reshard
from reshard.cli.demo_job.model import Config, build
from reshard.cli.demo_job.parallel import Ways
from reshard.cli.demo_job.ranks import Tell
from reshard.cli.demo_job.text import Text

__all__ = ["Resumed", "Trained", "begin", "resume"]

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


def begin(tell: Tell, ways: Ways, steps: int, path: str) -> Trained:
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


def resume(tell: Tell, ways: Ways, steps: int, path: str) -> Resumed:
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
        self.config, self.text, self.tell = Config(), Text.read(), tell
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
