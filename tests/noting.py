"""A mapping that changes nothing, and records what is read. Imports little, because all workers import it."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

from planners.geometry.box import Box
from reshard.checkpoint import Checkpoint
from reshard.mapping import Mapping
from reshard.mapping.mapped_tensors import computed
from reshard.stored.tensor import LazyTensor, StoredTensor


class Noting(Mapping):
    """Records in a file each tensor that is read, by any process. Reads can be delayed."""

    def __init__(self, log: Path, pause_s: float = 0.0) -> None:
        super().__init__()
        self._log, self._pause_s = log, pause_s

    def apply(self, checkpoint: Checkpoint) -> Checkpoint:
        """Wrap the checkpoint's tensors, so that reads by workers are recorded."""
        contents = checkpoint.contents
        tensors = {name: self._noted(stored) for name, stored in contents.tensors.items()}
        return Checkpoint(replace(contents, tensors=tensors), checkpoint.url)

    def _noted(self, stored: StoredTensor) -> StoredTensor:
        lazy = LazyTensor(stored)

        def compute(box: Box) -> torch.Tensor:
            with self._log.open("a") as log:
                log.write(f"{stored.fqn}\n")
            time.sleep(self._pause_s)
            return lazy[box.slices]

        return computed(stored.spec, compute, stored.fqn)

    def reads(self) -> Counter[str]:
        """Return how often each tensor was read, by its name in the source."""
        return Counter(self._log.read_text().split())
