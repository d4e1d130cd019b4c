"""The field of 2^48 - 59 elements, and the secret number that belongs to each index of each dim.

Sums over this field do not depend on their order, which is what lets every rank add up its own part.
The numbers come from SHAKE-256, so they can be had for any index at once, and whoever does not know
the key cannot tell them from dice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from planners.geometry.ownership import distinct

__all__ = [
    "BLOCK",
    "LANES",
    "LIMBS",
    "LIMB_BITS",
    "PRIME",
    "PUBLIC",
    "Key",
    "Residues",
    "multiply",
    "products",
    "to_limbs",
]

PRIME = 2**48 - 59
"""The largest prime below 2^48."""
LANES = 2
"""How many sums are kept, each with numbers of its own."""
BLOCK = 2048
"""How many indices share one outer number."""
LIMB_BITS = 12
LIMBS = 4
"""A residue in (-PRIME/2, PRIME/2) is written in four digits of 12 bits, each in [-2048, 2048]."""

Residues = npt.NDArray[np.int64]
"""Elements of the field, 0 <= x < PRIME; the first dim is the lane."""


@dataclass(frozen=True)
class Key:
    """The key of a family of fingerprints; only fingerprints of the same key can be compared.

    >>> Key().name, Key(b"our secret").name
    ('', 'b9218aa1')
    """

    secret: bytes = b""
    """Any bytes; none for the public key that everybody shares."""

    def __post_init__(self) -> None:
        if not isinstance(self.secret, bytes):
            raise TypeError(f"a fingerprint key is made of bytes, got {type(self.secret).__name__}")

    @property
    def name(self) -> str:
        """What a fingerprint says of its key: nothing for the public one, else 8 hex digits that betray nothing."""
        return hashlib.shake_256(_prefix(self.secret, b"name")).hexdigest(4) if self.secret else ""

    def inner(self, dim: int) -> Residues:
        """The numbers of the BLOCK places within a block of `dim`, (LANES, BLOCK). Read only."""
        return _table(self.secret, b"inner", dim, 0)

    def outer(self, dim: int, blocks: npt.NDArray[np.int64]) -> Residues:
        """The numbers of these blocks of `dim`, (LANES, len(blocks))."""
        pages = blocks // BLOCK
        numbers = np.empty((LANES, blocks.size), np.int64)
        for page in distinct(pages):
            chosen = pages == page
            numbers[:, chosen] = _table(self.secret, b"outer", dim, int(page))[:, blocks[chosen] % BLOCK]
        return numbers

    def at(self, dim: int, index: npt.NDArray[np.int64]) -> Residues:
        """The numbers of these indices of `dim`, inner times outer, (LANES, len(index))."""
        return multiply(self.inner(dim)[:, index % BLOCK], self.outer(dim, index // BLOCK))


PUBLIC = Key()
"""The key that everybody shares: finds accidents. Whoever may tamper with data must not know the key."""


def multiply(a: Residues, b: Residues) -> Residues:
    """Products in the field, element by element, with broadcasting.

    The quotient by PRIME is guessed in float64, which errs by less than 1 because both factors are below 2^48;
    what the guess leaves over is exact, since it is small and int64 arithmetic is exact modulo 2^64.
    """
    quotient = np.floor(a.astype(np.float64) * b.astype(np.float64) / PRIME).astype(np.int64)
    rest: Residues = a * b - quotient * PRIME
    rest += np.where(rest < 0, PRIME, 0)
    rest -= np.where(rest >= PRIME, PRIME, 0)
    return rest


def products(vectors: Sequence[Residues]) -> Residues:
    """The product of every choice of one number per vector, row-major: (LANES, product of the lengths)."""
    result = np.ones((LANES, 1), np.int64)
    for vector in vectors:
        result = multiply(result[:, :, None], vector[:, None, :]).reshape(LANES, -1)
    return result


def to_limbs(numbers: Residues) -> npt.NDArray[np.float64]:
    """The digits of each number, least first: (LANES * LIMBS, n), digit l of lane k in row k * LIMBS + l.

    Sum over l of digit l times 2^(12 l) is the number, or the number minus PRIME.
    """
    rest = np.where(numbers > PRIME // 2, numbers - PRIME, numbers)
    digits = np.empty((LANES, LIMBS, numbers.shape[1]), np.float64)
    half = 1 << (LIMB_BITS - 1)
    for place in range(LIMBS - 1):
        digit = ((rest + half) & ((1 << LIMB_BITS) - 1)) - half
        digits[:, place] = digit
        rest = (rest - digit) >> LIMB_BITS
    digits[:, LIMBS - 1] = rest
    return digits.reshape(LANES * LIMBS, -1)


def _prefix(secret: bytes, use: bytes) -> bytes:
    return b"reshard fingerprint 1 " + use + len(secret).to_bytes(8, "little") + secret


@lru_cache(maxsize=256)
def _table(secret: bytes, use: bytes, dim: int, page: int) -> Residues:
    """(LANES, BLOCK) numbers, read only: 16 bytes of the stream for each place, 8 for each lane, modulo PRIME."""
    seed = _prefix(secret, use) + dim.to_bytes(4, "little") + page.to_bytes(8, "little")
    stream = hashlib.shake_256(seed).digest(BLOCK * LANES * 8)
    table = (np.frombuffer(stream, "<u8") % np.uint64(PRIME)).astype(np.int64).reshape(BLOCK, LANES).T.copy()
    table.flags.writeable = False
    return table
