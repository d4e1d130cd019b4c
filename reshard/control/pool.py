"""What many ranks say, each distinct answer once: pools of answers that can be joined to larger ones."""

from __future__ import annotations

import zlib
from array import array

import msgspec

__all__ = ["FAN", "Pool"]

FAN = 128
"""So many ranks, or pools of theirs, are joined at a time."""


class Pool(msgspec.Struct, frozen=True, array_like=True):
    """The answers of some ranks in a row."""

    distinct: list[bytes]
    places: bytes
    """For each rank, where its answer stands, as 32-bit numbers; compressed, since mostly few answers come again and
    again."""

    @staticmethod
    def of(data: bytes) -> bytes:
        """The encoded pool of one rank."""
        return Pool([bytes(data)], _packed([0])).encode()

    @staticmethod
    def join(parts: list[bytes]) -> bytes:
        """One pool of several, in their order, all of them encoded."""
        known: dict[bytes, int] = {}
        places: list[int] = []
        for pool in map(Pool.decode, parts):
            mine = [known.setdefault(answer, len(known)) for answer in pool.distinct]
            places += [mine[place] for place in _unpacked(pool.places)]
        return Pool(list(known), _packed(places)).encode()

    @staticmethod
    def decode(data: bytes) -> Pool:
        """What `of` and `join` give."""
        return msgspec.msgpack.decode(data, type=Pool)

    def encode(self) -> bytes:
        """For another rank."""
        return msgspec.msgpack.encode(self)

    def answers(self) -> list[bytes]:
        """Of each rank."""
        return [self.distinct[place] for place in _unpacked(self.places)]


def _packed(places: list[int]) -> bytes:
    numbers = array("I", places).tobytes()
    return zlib.compress(numbers, 1)


def _unpacked(places: bytes) -> array[int]:
    return array("I", zlib.decompress(places))
