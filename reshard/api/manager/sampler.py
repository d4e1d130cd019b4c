"""Which samples of a data set are next: one position in one order, whatever number of ranks share it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler

from reshard.errors import KeyMismatchError, LayoutError

__all__ = ["ElasticSampler"]

_CHUNK = 1 << 16
"""Numbers that are made objects of Python at a time."""


class ElasticSampler(Sampler[int]):
    """A part of each epoch's samples, which goes on where all parts stopped, on any number of parts.

    All parts draw one order of the data set and take turns in it. So what they have taken together, in as many batches
    each, is the beginning of that order, and one number says which: it is the same on all ranks, and the state of the
    next job, however many parts that has. No sample is lost and none is taken twice.

    Args:
        size: samples in the data set.
        part, parts: this rank's share, such as its coordinate among those that get different data, and their number;
            of the whole job's ranks where they are not given.
        shuffle: draw an order for each epoch, from `seed` and its number.
        tail: when the rest of an epoch is no multiple of `parts`: `"keep"` what there is, so that some parts have one
            sample less, `"drop"` the last ones, or `"repeat"` the first ones of the rest.

    Attributes:
        epoch, position: where all parts are, together.
    """

    def __init__(
        self,
        size: int,
        *,
        part: int | None = None,
        parts: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        tail: Literal["keep", "drop", "repeat"] = "keep",
    ) -> None:
        in_job = dist.is_initialized()
        self.part = part if part is not None else dist.get_rank() if in_job else 0
        self.parts = parts if parts is not None else dist.get_world_size() if in_job else 1
        if size < 0 or not 0 <= self.part < self.parts or tail not in ("keep", "drop", "repeat"):
            raise LayoutError(f"no part {self.part} of {self.parts} of {size} samples, with tail={tail!r}")
        self.size, self.shuffle, self.seed, self.tail = size, shuffle, seed, tail
        self.epoch = self.position = 0
        self._is_counted = False

    def __len__(self) -> int:
        return len(self._own())

    def __iter__(self) -> Iterator[int]:
        if not self._is_counted:
            raise LayoutError("batches that nobody counts would be taken twice: iterate over sampler.over(loader)")
        return (index for chunk in torch.split(self._own(), _CHUNK) for index in chunk.tolist())

    def over(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """The batches of the rest of the epoch, by a loader that has this sampler; counted as the caller takes them,
        and not as workers fetch them. Then the next epoch begins."""
        batches = getattr(loader, "batch_sampler", None)
        per_batch = 1 if batches is None else batches.batch_size
        self._is_counted = True
        try:
            for batch in loader:
                self.position = min(self.position + self.parts * per_batch, self.size)
                yield batch
        finally:
            self._is_counted = False
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """The same on all ranks."""
        return {"epoch": self.epoch, "position": self.position, **self._order()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises KeyMismatchError for the position in another order."""
        other = [
            f"{key} is {own!r}, was {state.get(key)!r}" for key, own in self._order().items() if state.get(key) != own
        ]
        if other:
            raise KeyMismatchError(f"the position is one in another order of samples: {'; '.join(other)}")
        self.epoch, self.position = state["epoch"], state["position"]

    def _order(self) -> dict[str, Any]:
        return {"size": self.size, "shuffle": self.shuffle, "seed": self.seed}

    def _own(self) -> torch.Tensor:
        """What is left of the epoch for this part."""
        order = torch.arange(self.size, device="cpu")
        if self.shuffle:
            drawn = torch.Generator(device="cpu").manual_seed(self.seed * 1_000_003 + self.epoch)
            order = torch.randperm(self.size, generator=drawn, device="cpu")
        rest = order[self.position :]
        beyond = len(rest) % self.parts
        if beyond and self.tail == "drop":
            rest = rest[:-beyond]
        elif beyond and self.tail == "repeat":
            rest = torch.cat([rest, rest.repeat(self.parts)[: self.parts - beyond]])
        return rest[self.part :: self.parts]
