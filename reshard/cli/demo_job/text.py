"""Text to learn from that is on every machine: the sources of Python's own standard library, byte by byte."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from reshard.errors import ReshardError

__all__ = ["Text"]

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
