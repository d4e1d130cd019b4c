"""The types of ggml: plain numbers, and blocks of quantized ones, with what those blocks stand for.

A block is some elements of one row with a scale of their own, sometimes an offset, and sub-blocks with small integer
scales of theirs. What is computed is what ggml computes, operation by operation in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.formats.stored.source import Source

__all__ = ["BLOCKS", "PLAIN", "Block", "DequantizedSource"]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

PLAIN: dict[int, tuple[str, str, int]] = {
    0: ("F32", "float32", 4),
    1: ("F16", "float16", 2),
    24: ("I8", "int8", 1),
    25: ("I16", "int16", 2),
    26: ("I32", "int32", 4),
    27: ("I64", "int64", 8),
    28: ("F64", "float64", 8),
    30: ("BF16", "bfloat16", 2),
}
"""By ggml's number of the type: its name there, torch's name, and bytes an element."""


@dataclass(frozen=True)
class Block:
    """A type of quantized blocks."""

    name: str
    numel: int
    nbytes: int
    values: Callable[[Bytes], Floats] | None = None
    """Of blocks, a row each, the elements that they stand for; None where that is not known here."""


def _half(data: Bytes) -> Floats:
    """The float16 numbers in bytes of each row, as float32."""
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)


def _nibbles(data: Bytes) -> Bytes:
    """Of rows of n bytes their low halves, and then their high ones."""
    return np.concatenate([data & 15, data >> 4], axis=1)


def _bits(data: Bytes) -> Bytes:
    return np.unpackbits(data, axis=1, bitorder="little")


def _q4_0(blocks: Bytes) -> Floats:
    return _half(blocks[:, :2]) * (_nibbles(blocks[:, 2:]).astype(np.float32) - np.float32(8))


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks[:, :2]) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks[:, 2:4])


def _q5_0(blocks: Bytes) -> Floats:
    five = _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return _half(blocks[:, :2]) * (five.astype(np.float32) - np.float32(16))


def _q5_1(blocks: Bytes) -> Floats:
    five = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return _half(blocks[:, :2]) * five.astype(np.float32) + _half(blocks[:, 2:4])


def _q8_0(blocks: Bytes) -> Floats:
    return _half(blocks[:, :2]) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32)


def _scaled(blocks: Bytes, quants: Bytes) -> Floats:
    """Eight sub-blocks, each with a scale and an offset of 6 bits, 12 bytes in all: the last four keep their upper two
    bits above the first four's."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=1).astype(np.float32)
    offsets = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=1).astype(np.float32)
    steps, starts = _half(blocks[:, :2]) * scales, _half(blocks[:, 2:4]) * offsets
    values = steps[:, :, None] * quants.astype(np.float32) - starts[:, :, None]
    return values.reshape(len(blocks), -1)


def _pairs(data: Bytes) -> Bytes:
    """Of 128 bytes eight rows of 32 elements: low halves of 32 bytes, their high halves, and so on."""
    quarters = data.reshape(len(data), 4, 1, 32)
    return np.concatenate([quarters & 15, quarters >> 4], axis=2).reshape(len(data), 8, 32)


def _q4_k(blocks: Bytes) -> Floats:
    return _scaled(blocks, _pairs(blocks[:, 16:]))


def _q5_k(blocks: Bytes) -> Floats:
    fifth: Bytes = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None] & np.uint8(1)
    five: Bytes = _pairs(blocks[:, 48:]) | fifth << np.uint8(4)
    return _scaled(blocks, five)


def _q6_k(blocks: Bytes) -> Floats:
    """Halves of 128 elements: 64 bytes with the lower four bits, 32 with the upper two; a scale for 16 elements."""
    low = blocks[:, :128].reshape(len(blocks), 2, 64)
    high = blocks[:, 128:192].reshape(len(blocks), 2, 1, 32)
    upper = high >> np.array([0, 2, 4, 6], dtype=np.uint8)[None, None, :, None] & 3
    lower = np.concatenate([low & 15, low >> 4], axis=2).reshape(len(blocks), 2, 4, 32)
    six = (lower | upper << 4).astype(np.float32) - np.float32(32)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return _sixteens(blocks, _half(blocks[:, 208:]) * scales, six).reshape(len(blocks), -1)


def _twos(data: Bytes) -> Bytes:
    """Of 64 bytes 256 numbers of two bits: 32 bytes give four rows of 32, the lowest bits first."""
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[None, None, :, None]
    return data.reshape(len(data), 2, 1, 32) >> shifts & np.uint8(3)


def _sixteens(blocks: Bytes, steps: Floats, quants: Any) -> Floats:
    """Sixteen sub-blocks of 16 elements, each with a step of its own."""
    values: Floats = steps[:, :, None] * quants.reshape(len(blocks), 16, 16).astype(np.float32)
    return values


def _q2_k(blocks: Bytes) -> Floats:
    steps = _half(blocks[:, 80:82]) * (blocks[:, :16] & 15).astype(np.float32)
    starts = _half(blocks[:, 82:84]) * (blocks[:, :16] >> 4).astype(np.float32)
    values: Floats = _sixteens(blocks, steps, _twos(blocks[:, 16:80])) - starts[:, :, None]
    return values.reshape(len(blocks), -1)


def _q3_k(blocks: Bytes) -> Floats:
    """The third bit, where it is not set, takes away 4; scales of 6 bits keep their upper two behind the lower four."""
    third = blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[None, :, None] & np.uint8(1)
    low = _twos(blocks[:, 32:96]).reshape(len(blocks), 8, 32).astype(np.int8)
    upper = (blocks[:, None, 104:108] >> np.array([0, 2, 4, 6], dtype=np.uint8)[None, :, None] & 3).reshape(-1, 16)
    scales = (_nibbles(blocks[:, 96:104]) | upper << 4).astype(np.float32) - np.float32(32)
    quants = low - ((third ^ 1) << 2).astype(np.int8)
    return _sixteens(blocks, _half(blocks[:, 108:]) * scales, quants).reshape(len(blocks), -1)


_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)
_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)


def _iq4_nl(blocks: Bytes) -> Floats:
    return _half(blocks[:, :2]) * _IQ4[_nibbles(blocks[:, 2:])]


def _iq4_xs(blocks: Bytes) -> Floats:
    """Eight sub-blocks, whose scales of 6 bits have their upper two apart, all in two bytes."""
    upper = (blocks[:, 2:4, None] >> np.array([0, 2, 4, 6], dtype=np.uint8)[None, None, :] & 3).reshape(-1, 8)
    low = (blocks[:, 4:8, None] >> np.array([0, 4], dtype=np.uint8)[None, None, :] & 15).reshape(-1, 8)
    steps = _half(blocks[:, :2]) * ((low | upper << 4).astype(np.float32) - np.float32(32))
    parts = blocks[:, 8:].reshape(-1, 16)
    values: Floats = steps[:, :, None] * _IQ4[_nibbles(parts)].reshape(len(blocks), 8, 32)
    return values.reshape(len(blocks), -1)


def _mxfp4(blocks: Bytes) -> Floats:
    """The scale is an exponent: 2 ** (e - 128), where the elements count in halves."""
    steps = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128).astype(np.float32)
    values: Floats = steps * _FP4[_nibbles(blocks[:, 1:])]
    return values


BLOCKS: dict[int, Block] = {
    2: Block("Q4_0", 32, 18, _q4_0),
    3: Block("Q4_1", 32, 20, _q4_1),
    6: Block("Q5_0", 32, 22, _q5_0),
    7: Block("Q5_1", 32, 24, _q5_1),
    8: Block("Q8_0", 32, 34, _q8_0),
    10: Block("Q2_K", 256, 84, _q2_k),
    11: Block("Q3_K", 256, 110, _q3_k),
    12: Block("Q4_K", 256, 144, _q4_k),
    13: Block("Q5_K", 256, 176, _q5_k),
    14: Block("Q6_K", 256, 210, _q6_k),
    16: Block("IQ2_XXS", 256, 66),
    17: Block("IQ2_XS", 256, 74),
    18: Block("IQ3_XXS", 256, 98),
    19: Block("IQ1_S", 256, 50),
    20: Block("IQ4_NL", 32, 18, _iq4_nl),
    21: Block("IQ3_S", 256, 110),
    22: Block("IQ2_S", 256, 82),
    23: Block("IQ4_XS", 256, 136, _iq4_xs),
    29: Block("IQ1_M", 256, 56),
    34: Block("TQ1_0", 256, 54),
    35: Block("TQ2_0", 256, 66),
    39: Block("MXFP4", 32, 17, _mxfp4),
}
"""By ggml's number of the type."""


class DequantizedSource(Source):
    """The float32 elements of a quantized tensor, computed for the bytes that are asked for."""

    max_gap_bytes = 1 << 16
    _PIECE_NUMEL = 1 << 18

    def __init__(self, source: Source, start: int, numel: int, block: Block, label: str) -> None:
        """`start` is where its blocks begin in `source`; the block must have `values`."""
        self.source, self.start, self.block, self.label = source, start, block, label
        self._numel = numel

    @property
    def nbytes(self) -> int:
        return self._numel * 4

    def view(self) -> memoryview | None:
        return None

    def _fill(self, start: int, buffer: memoryview) -> None:
        step = self._PIECE_NUMEL * 4
        for at in range(start, start + buffer.nbytes, step):
            stop = min(at + step, start + buffer.nbytes)
            buffer[at - start : stop - start] = self._values(at, stop)

    def _values(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of the elements."""
        assert self.block.values is not None
        bytes_of_block = self.block.numel * 4
        first, last = start // bytes_of_block, -(-stop // bytes_of_block)
        length = (last - first) * self.block.nbytes
        data = self.source.read(self.start + first * self.block.nbytes, length, elements=True)
        blocks = np.frombuffer(data, np.uint8).reshape(last - first, self.block.nbytes)
        with np.errstate(all="ignore"):  # scales of damaged or odd files may be infinite
            values: Any = np.ascontiguousarray(self.block.values(blocks), np.dtype("<f4"))
        found = memoryview(values.reshape(-1).view(np.uint8))
        return found[start - first * bytes_of_block : stop - first * bytes_of_block]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DequantizedSource) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Source, int, int, str]:
        return self.source, self.start, self._numel, self.block.name
