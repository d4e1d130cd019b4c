"""The distinct answers of many ranks, in pools that can be joined."""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections.abc import Sequence

import msgspec

__all__ = ["FAN", "DistinctValues", "digest_of"]


FAN = 128
"""The number of ranks, or of pools of theirs, that are joined at a time."""


def digest_of(data: bytes) -> bytes:
    """The key of an answer in a pool, 16 bytes, since the answer may be long."""
    return hashlib.sha256(data).digest()[:16]


class DistinctValues(msgspec.Struct, frozen=True, array_like=True):
    """The answers of a run of ranks."""

    distinct: list[bytes]
    count: int
    """How many ranks' they are."""
    places: bytes
    """For each rank, where its answer stands, as 32-bit numbers; compressed, since mostly few answers come again and
    again. Nothing where all gave the same."""

    @staticmethod
    def of(data: bytes) -> DistinctValues:
        """The pool of one rank's answer."""
        return DistinctValues([data], 1, b"")

    @staticmethod
    def join(pools: list[DistinctValues]) -> DistinctValues:
        """Join several pools, in order."""
        known: dict[bytes, int] = {}
        for pool in pools:
            for answer in pool.distinct:
                known.setdefault(answer, len(known))
        places = array("I")
        for pool in pools if len(known) > 1 else ():
            mine = [known[answer] for answer in pool.distinct]
            places.extend(mine[place] for place in pool.numbers())
        count = sum(pool.count for pool in pools)
        return DistinctValues(list(known), count, zlib.compress(places.tobytes(), 1) if places else b"")

    def numbers(self) -> Sequence[int]:
        """The index of each rank's answer."""
        return array("I", zlib.decompress(self.places)) if self.places else [0] * self.count
