"""What many ranks say, each distinct answer once: pools of answers that can be joined to larger ones."""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections.abc import Sequence

import msgspec

from reshard.errors import format_ranks

__all__ = ["FAN", "DistinctValues", "digest_of"]


FAN = 128
"""So many ranks, or pools of theirs, are joined at a time."""


def digest_of(data: bytes) -> bytes:
    """What stands for an answer in a pool, where it may be long: 16 bytes."""
    return hashlib.sha256(data).digest()[:16]


class DistinctValues(msgspec.Struct, frozen=True, array_like=True):
    """The answers of some ranks in a row."""

    distinct: list[bytes]
    count: int
    """How many ranks' they are."""
    places: bytes
    """For each rank, where its answer stands, as 32-bit numbers; compressed, since mostly few answers come again and
    again. Nothing where all gave the same."""

    @staticmethod
    def of(data: bytes) -> bytes:
        """The encoded pool of one rank."""
        return DistinctValues([bytes(data)], 1, b"").encode()

    @staticmethod
    def join(parts: list[bytes]) -> bytes:
        """One pool of several, in their order, all of them encoded."""
        pools = [DistinctValues.decode(part) for part in parts]
        known: dict[bytes, int] = {}
        for pool in pools:
            for answer in pool.distinct:
                known.setdefault(answer, len(known))
        places = array("I")
        for pool in pools if len(known) > 1 else ():
            mine = [known[answer] for answer in pool.distinct]
            places.extend(mine[place] for place in pool.numbers())
        count = sum(pool.count for pool in pools)
        return DistinctValues(list(known), count, zlib.compress(places.tobytes(), 1) if places else b"").encode()

    @staticmethod
    def decode(data: bytes) -> DistinctValues:
        """What `of` and `join` give."""
        return msgspec.msgpack.decode(data, type=DistinctValues)

    def encode(self) -> bytes:
        """For another rank."""
        return msgspec.msgpack.encode(self)

    def answers(self) -> list[bytes]:
        """Of each rank."""
        return [self.distinct[place] for place in self.numbers()]

    def numbers(self) -> Sequence[int]:
        """Of each rank, where its answer stands."""
        return array("I", zlib.decompress(self.places)) if self.places else [0] * self.count

    def differences(self, ranks: Sequence[int]) -> str:
        """Which ranks give the same answer, the largest party first; "" if all do. `ranks`: those of the answers."""
        if len(self.distinct) == 1:
            return ""
        parties: dict[int, list[int]] = {}
        for rank, place in zip(ranks, self.numbers(), strict=True):
            parties.setdefault(place, []).append(rank)
        largest_first = sorted(parties.values(), key=lambda party: (-len(party), party))
        words = [format_ranks(party) for party in largest_first[:10]]
        more = f", and {len(parties) - 10} more parties" if len(parties) > 10 else ""
        return " differ from ".join(words[:2]) + "".join(f", and from {word}" for word in words[2:]) + more
