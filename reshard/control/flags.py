"""Flags that all ranks have, a bit each and compressed: what is so on any of them, whichever that is.

heard = group.merge(pack_flags(mine), either, "names in use")
unpack_flags(heard, len(mine))
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import numpy as np

__all__ = ["either", "pack_flags", "unpack_flags"]


def pack_flags(flags: Sequence[bool]) -> bytes:
    """For `either`."""
    return zlib.compress(np.packbits(np.array(flags, dtype=bool)).tobytes())


def either(parts: Iterable[bytes]) -> bytes:
    """What is set in any of them, which have equally many flags."""
    first, *others = dict.fromkeys(parts)
    if not others:
        return first
    bits = np.frombuffer(zlib.decompress(first), np.uint8)
    for other in others:
        bits = bits | np.frombuffer(zlib.decompress(other), np.uint8)
    return zlib.compress(bits.tobytes())


def unpack_flags(data: bytes, count: int) -> list[bool]:
    """Inverse of `pack_flags`."""
    bits = np.frombuffer(zlib.decompress(data), np.uint8)
    return np.unpackbits(bits, count=count).astype(bool).tolist()
