"""Where parameters lie in the flat buffers of Megatron's optimizers, given their order and numbers of elements.

bucket_idx_0:  | output_layer.weight      | final_layernorm.weight | - | ...linear_fc2.weight  | - |   (-: padding)
               0                        768                      792 832                     1504
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["ALIGNMENT", "Slot", "bucket_limit", "place_joined", "place_params"]

ALIGNMENT = 64
"""Every parameter begins at a multiple of this many elements."""


@dataclass(frozen=True)
class Slot:
    """Where a parameter's local part lies: its bucket, and the elements in it."""

    name: str
    bucket: int
    start: int
    stop: int


def place_params(params: Sequence[tuple[str, int]], lengths: Sequence[int]) -> list[Slot] | None:
    """Where parameters of these numbers of elements lie in buckets of these lengths; None if they do not fill them.

    Every parameter begins at a multiple of `ALIGNMENT`, and a bucket ends where its last parameter does.

        >>> place_params([("b", 24), ("a", 100)], [164])
        [Slot(name='b', bucket=0, start=0, stop=24), Slot(name='a', bucket=0, start=64, stop=164)]
    """
    slots: list[Slot] = []
    bucket, end = 0, 0
    for name, numel in params:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        if bucket < len(lengths) and start + numel > lengths[bucket]:
            if not _is_full(end, lengths[bucket]):
                return None
            bucket, start = bucket + 1, 0
        if bucket >= len(lengths) or start + numel > lengths[bucket]:
            return None
        end = start + numel
        slots.append(Slot(name, bucket, start, end))
    return slots if bucket == len(lengths) - 1 and _is_full(end, lengths[bucket]) else None


def _is_full(end: int, length: int) -> bool:
    """Whether a bucket of `length` may end with a parameter that ends at `end`: there, or after padding."""
    return end == length or (length % 128 == 0 and 0 < length - end < 128)


def place_joined(params: Sequence[tuple[str, int]], total: int, limit: int) -> Iterator[list[Slot]]:
    """The same for buckets that were joined without the padding at their ends; every way in which they fill `total`.

    A bucket is full when it has `limit` elements (see `bucket_limit`), or there is only one; an embedding that the last
    stage shares with the first has one to itself there, and comes first.

        >>> list(place_joined([("b", 24), ("a", 100)], 124, 10))
        [[Slot(name='b', bucket=0, start=0, stop=24), Slot(name='a', bucket=0, start=24, stop=124)]]
    """
    found: list[list[Slot]] = []
    for most, alone in ((total + 1, False), (limit, False), (total + 1, True), (limit, True)):
        slots: list[Slot] = []
        begin = end = 0  # of the bucket in the joined buffer, and of what it holds
        for name, numel in params:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + numel
            slots.append(Slot(name, 0, begin + start, begin + end))
            if end >= most or (alone and len(slots) == 1):
                begin, end = begin + end, 0
        if begin + end == total and slots not in found:
            found.append(slots)
            yield slots


def bucket_limit(args: Mapping[str, Any]) -> int:
    """How many elements fill a bucket, by the program's arguments."""
    data_parallel = int(args.get("data_parallel_size") or 1)
    return int(args.get("ddp_bucket_size") or max(40_000_000, 1_000_000 * data_parallel))
