"""Edits of metadata that leave it well formed: JSON and pickles with other numbers, names, and structure."""

from __future__ import annotations

import codecs
import io
import json
import pickletools
import struct
import zipfile
from collections.abc import Callable
from random import Random
from typing import Any

__all__ = ["edited_archive", "edited_json", "edited_pickle", "edited_safetensors"]


class Pairs(list[tuple[str, Any]]):
    """A JSON object that can have a key twice."""


class Raw(str):
    """JSON text as it stands."""


Slot = tuple[Any, int]
"""A list or object, and the place of a value in it."""


def edited_json(data: bytes, rng: Random) -> bytes | None:
    """The document with one edit, or in another encoding; None for what is no JSON."""
    root = _parsed(data)
    if root is None:
        return None
    if rng.random() < 0.08:
        return rng.choice(_DOCUMENTS)(data, rng)
    top = [root]
    for _ in range(rng.choice([1, 1, 1, 2])):
        _edit(top, rng)
    return _dumped(top[0]).encode("utf-8", "surrogatepass")


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data, object_pairs_hook=Pairs)
    except (ValueError, RecursionError):
        return None


_DOCUMENTS: list[Callable[[bytes, Random], bytes]] = [
    lambda data, rng: codecs.BOM_UTF8 + data,
    lambda data, rng: data.decode().encode("utf-16"),
    lambda data, rng: data.decode().encode("utf-32-be"),
    lambda data, rng: data + b"\x00" * 10,
    lambda data, rng: data + b"{}",
    lambda data, rng: rng.choice([b"", b"{}", b"[]", b"null", b"0", b'""', b"\xff\xfe", b"NaN", b" "]),
    lambda data, rng: b"[" * 100_000 + b"]" * 100_000,
    lambda data, rng: data.replace(b'"', b'"\xe9', 1),
]


def _dumped(value: Any) -> str:
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{json.dumps(key)}:{_dumped(inner)}" for key, inner in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_dumped, value)) + "]"
    return json.dumps(value)


def _slots(value: Any) -> list[Slot]:
    found: list[Slot] = []
    waiting = [value]
    while waiting:
        here = waiting.pop()
        inner = [item for _, item in here] if isinstance(here, Pairs) else here
        for at, item in enumerate(inner):
            found.append((here, at))
            if isinstance(item, list):
                waiting.append(item)
    return found


def _get(slot: Slot) -> Any:
    owner, at = slot
    return owner[at][1] if isinstance(owner, Pairs) else owner[at]


def _set(slot: Slot, value: Any) -> None:
    owner, at = slot
    owner[at] = (owner[at][0], value) if isinstance(owner, Pairs) else value


def _edit(top: list[Any], rng: Random) -> None:
    slots = _slots(top)
    # as many of small documents' containers as of their leaves
    kinds: dict[type, list[Slot]] = {}
    for slot in slots:
        kinds.setdefault(type(_get(slot)), []).append(slot)
    slot = rng.choice(kinds[rng.choice(sorted(kinds, key=str))])
    value = _get(slot)
    if isinstance(value, Pairs) and value:
        _edit_object(value, slot, rng)
    elif isinstance(value, list) and value:
        _edit_list(value, slot, rng)
    elif isinstance(value, str) and not isinstance(value, Raw):
        others = [text for at in slots if isinstance(text := _get(at), str) and not isinstance(text, Raw)]
        _set(slot, other_text(value, others, rng))
    else:
        _set(slot, _other_number(value, rng))


_ODD = [None, True, False, "", "1", [], Pairs(), 0, -1, 1]
_NUMBERS = [0, -1, 1, 2, 1 << 31, 1 << 32, (1 << 53) + 1, (1 << 62) + 1, 1 << 63, 1 << 64, 10**30, -(1 << 40)]
_RAW = [Raw(text) for text in ("NaN", "Infinity", "-Infinity", "1e400", "-0", "-0.0", "1.0", "1e3", "0.5", "1" * 5000)]


def _other_number(value: Any, rng: Random) -> Any:
    near = [value + 1, value - 1, value * 2, value // 2, -value, value + 64, float(value)] if type(value) is int else []
    return rng.choice(rng.choice([near or _ODD, _NUMBERS, _RAW, _ODD]))


def other_text(text: str, others: list[str], rng: Random) -> str:
    """Another string in its place."""
    digit = str(rng.randrange(10))
    return rng.choice([
        "", text[:-1], text + "x", text * 2, rng.choice(others), rng.choice(others), "../" + text, "/etc/passwd", "\0",
        "\ud800", "é" * 300, "x" * 100_000, "float32", "F64", "int8", text.swapcase(), "-1", ".", "..", "a/b",
        "".join(digit if c.isdigit() else c for c in text),
    ])  # fmt: skip


def _edit_object(value: Pairs, slot: Slot, rng: Random) -> None:
    at = rng.randrange(len(value))
    key, inner = value[at]
    how = rng.randrange(7)
    if how == 0:
        del value[at]
    elif how == 1:
        value[at] = (other_text(key, [k for k, _ in value], rng), inner)
    elif how == 2:
        value.insert(rng.randrange(len(value) + 1), (key, rng.choice(value)[1]))
    elif how == 3:
        other = rng.randrange(len(value))
        value[at], value[other] = (key, value[other][1]), (value[other][0], inner)
    elif how == 4:
        value.append((rng.choice([key + "2", "__proto__", "__class__", "", "0"]), inner))
    elif how == 5:
        _set(slot, rng.choice([*_ODD, Raw("[" * 5000 + "]" * 5000)]))
    else:
        value[at] = (key, rng.choice([*_ODD, Raw('{"a":' * 5000 + "1" + "}" * 5000)]))


def _edit_list(value: list[Any], slot: Slot, rng: Random) -> None:
    at, other = rng.randrange(len(value)), rng.randrange(len(value))
    how = rng.randrange(7)
    if how == 0:
        del value[at]
    elif how == 1:
        value.insert(other, value[at])
    elif how == 2:
        value[at], value[other] = value[other], value[at]
    elif how == 3:
        value.reverse()
    elif how == 4:
        value[at] = rng.choice([*_ODD, *_NUMBERS])
    elif how == 5:
        value[at:] = [value[at]] * rng.choice([2, 70, 5000])
    else:
        _set(slot, rng.choice(_ODD))


def edited_safetensors(data: bytes, rng: Random) -> bytes | None:
    """A file with another header, of whatever length."""
    size = struct.unpack("<Q", data[:8])[0]
    header = edited_json(data[8 : 8 + size], rng)
    if header is None:
        return None
    return struct.pack("<Q", len(header)) + header + data[8 + size :]


# --- pickles, opcode by opcode ---


def edited_pickle(data: bytes, rng: Random, *, same_length: bool = False) -> bytes | None:
    """With another number, string, class, or order of opcodes; None for what is no pickle."""
    try:
        ops = _opcodes(data)
    except Exception:  # whatever pickletools says
        return None
    tail = data[sum(map(len, (code for _, _, code in ops))) :]
    codes = [code for op, _, code in ops if same_length or op != "FRAME"]
    kept = [(op, arg) for op, arg, _ in ops if same_length or op != "FRAME"]
    numbers = [i for i, (op, _) in enumerate(kept) if op.startswith(("BININT", "LONG", "NEWTRUE", "NEWFALSE"))]
    texts = [i for i, (op, _) in enumerate(kept) if op in ("BINUNICODE", "SHORT_BINUNICODE", "BINSTRING")]
    classes = [i for i, (op, _) in enumerate(kept) if op == "GLOBAL"]
    ways = [numbers, numbers, texts, classes] + ([] if same_length else [range(len(kept))])
    chosen = rng.choice([way for way in ways if way] or [range(len(kept))])
    at = rng.choice(chosen)
    if same_length:
        codes[at] = _same_length(codes[at], rng)
    elif chosen is numbers:
        codes[at] = _number(kept[at][1], rng)
    elif chosen is texts:
        codes[at] = _text(other_text(str(kept[at][1]), [str(kept[i][1]) for i in texts], rng))
    elif chosen is classes:
        codes[at] = rng.choice([codes[rng.choice(classes)], *_CLASSES])
    else:
        other = rng.randrange(len(codes))
        how = rng.randrange(4)
        if how == 0:
            codes[at], codes[other] = codes[other], codes[at]
        elif how == 1:
            del codes[at]
        elif how == 2:
            codes.insert(other, codes[at])
        else:
            codes[at] = rng.choice([b"N", b"]", b"}", b")", b"0", b"(", b"\x88", b"G\x7f\xf8" + bytes(6), b"."])
    return b"".join(codes) + tail


_CLASSES = [
    b"ctorch\nDoubleStorage\n", b"ctorch\nLongStorage\n", b"ctorch\nint8\n", b"ctorch\nSize\n", b"cos\nsystem\n",
    b"cbuiltins\nlist\n", b"ccollections\nOrderedDict\n", b"cno_such\nThing\n", b"ctorch._utils\n_rebuild_parameter\n",
]  # fmt: skip


def _opcodes(data: bytes) -> list[tuple[str, Any, bytes]]:
    found = list(pickletools.genops(data))
    if len(found) < 3:
        raise ValueError("no pickle")
    ends = [at for _, _, at in found[1:]] + [found[-1][2] + 1]
    return [(op.name, arg, data[at:end]) for (op, arg, at), end in zip(found, ends)]


def _number(value: Any, rng: Random) -> bytes:
    other = _other_number(value if type(value) is int else 1, rng)
    if isinstance(other, bool) or other is None:
        return {True: b"\x88", False: b"\x89", None: b"N"}[other]
    if isinstance(other, (float, Raw)):
        return b"G" + struct.pack(">d", float(other if len(str(other)) < 20 else "nan"))
    if not isinstance(other, int):
        return _text(other) if isinstance(other, str) else b"]" if not isinstance(other, Pairs) else b"}"
    raw = other.to_bytes(other.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def _same_length(code: bytes, rng: Random) -> bytes:
    head = {b"K": 1, b"M": 1, b"J": 1, b"X": 5, b"\x8c": 2, b"\x8a": 2}.get(code[:1])
    if head is None or head >= len(code):
        return code
    data = bytearray(code)
    at = rng.randrange(head, len(code))
    data[at] = rng.choice([0, 1, data[at] ^ 1, 0x7F, rng.randrange(128)])
    return bytes(data)


def edited_archive(data: bytes, rng: Random) -> bytes | None:
    """An archive of `torch.save` with an edited pickle, and checksums that fit."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = [(info.filename, archive.read(info)) for info in archive.infolist()]
    except (zipfile.BadZipFile, NotImplementedError, ValueError):
        return None  # another damage came first
    out = io.BytesIO()
    done = False
    with zipfile.ZipFile(out, "w") as written:
        for name, content in records:
            if name.endswith("data.pkl"):
                edited = edited_pickle(content, rng)
                done = edited is not None
                content = content if edited is None else edited
            written.writestr(name, content)
    return out.getvalue() if done else None
