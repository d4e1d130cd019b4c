"""A sampler whose position in the data set does not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, Sampler

from reshard.arguments import named_arguments
from reshard.errors import KeyMismatchError, LayoutError, option_error
from reshard.live.tensors import this_rank, world_size

_CHUNK = 1 << 16
"""Number of indices that are converted to Python ints at a time."""


@named_arguments()
class ElasticSampler(Sampler[int]):
    """A sampler for one rank's share of each epoch. It resumes exactly, even on a different number
    of ranks.

    All parts use the same order of the data set. The first sample goes to the first part, the next
    to the second, and so on in a cycle. When all parts have taken the same number of batches, the
    samples taken so far are a prefix of that order. The state is the length of this prefix. It is
    the same on all ranks, and does not depend on their number. So no sample is lost or repeated.

    Args:
        size: number of samples in the data set.
        part, parts: index of this rank's share, such as its data-parallel rank, and the number of
            shares. Default: the rank and world size of the job.
        shuffle: shuffle each epoch, seeded by `seed` and the number of the epoch.
        tail: what to do with the last samples of an epoch if they do not fill one more sample for
            every part. `"keep"`: distribute them, so that some parts have one sample less. `"drop"`:
            omit them. `"repeat"`: fill up by repeating the first of the remaining samples.

    Attributes:
        epoch, position: the common position of all parts.
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
        if type(size) is not int:
            words = f"takes the number of samples, ElasticSampler(len(dataset)), not a {type(size).__name__}"
            raise option_error(f"ElasticSampler {words}", LayoutError)
        self.part = this_rank() if part is None else part
        self.parts = world_size() if parts is None else parts
        if size < 0 or not 0 <= self.part < self.parts or tail not in ("keep", "drop", "repeat"):
            words = "size must be at least 0, part at least 0 and less than parts, and tail 'keep', 'drop', or 'repeat'"
            got = f"size={size}, part={self.part}, parts={self.parts}, tail={tail!r:.80}"
            raise option_error(f"ElasticSampler: {words}, got {got}", LayoutError)
        self.size, self.shuffle, self.seed, self.tail = size, shuffle, seed, tail
        self.epoch = self.position = 0
        self._is_counted = False

    def __len__(self) -> int:
        return len(self._own())

    def __iter__(self) -> Iterator[int]:
        if not self._is_counted:
            fix = "iterate over sampler.over(loader)"
            raise option_error(f"a plain loop over the loader would repeat batches after a restart: {fix}", LayoutError)
        return (index for chunk in torch.split(self._own(), _CHUNK) for index in chunk.tolist())

    def over(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yield the batches of the rest of the epoch from a loader that uses this sampler.

        A batch counts when you receive it, not when a worker fetches it. After the last one, the
        next epoch begins.
        """
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
        """Return the position. It is the same on all ranks."""
        return {"epoch": self.epoch, "position": self.position, **self._order()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position. Raises KeyMismatchError if it was saved for another order of samples."""
        other = [
            f"{key} is {own!r}, was {state.get(key)!r}" for key, own in self._order().items() if state.get(key) != own
        ]
        if other:
            raise KeyMismatchError(f"the position was saved for another order of samples: {'; '.join(other)}")
        self.epoch, self.position = state["epoch"], state["position"]

    def _order(self) -> dict[str, Any]:
        return {"size": self.size, "shuffle": self.shuffle, "seed": self.seed}

    def _own(self) -> torch.Tensor:
        """Return this part's share of the rest of the epoch."""
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
