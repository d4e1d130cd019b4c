"""Walks over the opcodes of a pickle without running any: where it ends, and whether a checkpoint may have them.

CPython's unpickler believes a pickle's own numbers: it makes room for as many memo slots as an index says. So indexes
and lengths are compared with the size of the pickle first, at the speed of the regular expressions that do the walking.
"""

from __future__ import annotations

import re
import struct

from reshard.errors import DamagedCheckpointError, UnsafeDataError

__all__ = ["check_opcodes"]

# Opcodes of fixed length that may run as they are: no argument, one byte, two, four, eight. PUT with a four-byte index
# only while small, because the unpickler allocates as many slots as the index says.
_RUN = re.compile(
    rb"(?:[(012NQRabdel}\])stu\x81\x85-\x89\x8f-\x94]|[Khq\x80].|M..|[Jj]....|r..\x00\x00|[G\x95]........)*+", re.DOTALL
)
_COUNTED = {
    **dict.fromkeys(b"UC\x8c\x8a", struct.Struct("<B")),
    **dict.fromkeys(b"TXB\x8b", struct.Struct("<I")),
    **dict.fromkeys(b"\x8d\x8e\x96", struct.Struct("<Q")),
}
_LINES = {**dict.fromkeys(b"ILFSVgp", 1), b"c"[0]: 2}
_LINE = re.compile(rb"[^\n]*\n")
_FORBIDDEN = {
    b"i"[0]: "INST",
    b"o"[0]: "OBJ",
    b"P"[0]: "PERSID",
    0x82: "EXT1",  # codes of the extension registry stand for objects without naming them
    0x83: "EXT2",
    0x84: "EXT4",
    0x97: "NEXT_BUFFER",
    0x98: "READONLY_BUFFER",
}


def check_opcodes(data: bytes | memoryview, start: int, where: str) -> int:
    """One past the STOP of the pickle at `start`. Walks over all opcodes and runs none."""
    at, end = start, len(data)
    while True:
        match = _RUN.match(data, at) if at < end else None  # it matches the empty text, too
        at = end if match is None else match.end()
        if at >= end:
            raise DamagedCheckpointError(f"{where}: the pickle is cut short: it has no end within {end - start} bytes")
        op = data[at]
        if op == b"."[0]:
            return at + 1
        if op in _COUNTED:
            head = _COUNTED[op]
            length = head.unpack_from(data, at + 1)[0] if at + 1 + head.size <= end else end
            at += 1 + head.size + length
        elif op in _LINES:
            at = _skip_lines(data, at, where)
        elif op == b"r"[0] and at + 5 <= end and int.from_bytes(data[at + 1 : at + 5], "little") <= end - start:
            at += 5
        elif op in _FORBIDDEN:
            raise UnsafeDataError(
                f"{where}: the pickle uses {_FORBIDDEN[op]} at byte {at - start}, which no checkpoint needs; nothing "
                "of it was run"
            )
        else:
            raise DamagedCheckpointError(f"{where}: there is no pickle opcode {op:#04x} (byte {at - start})")


def _skip_lines(data: bytes | memoryview, at: int, where: str) -> int:
    """Past an opcode whose arguments are lines of text."""
    op, stop = data[at], at + 1
    for _ in range(_LINES[op]):
        match = _LINE.match(data, stop)
        if match is None:
            raise DamagedCheckpointError(f"{where}: the pickle is cut short in a line of text")
        stop = match.end()
    if op == b"p"[0]:
        index = bytes(data[at + 1 : stop - 1])
        if not index.isdigit() or len(index) > 9 or int(index) > len(data):
            raise DamagedCheckpointError(f"{where}: the pickle has a memo index that makes no sense: {index[:20]!r}")
    return stop
