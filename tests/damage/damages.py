"""What can happen to the files of a checkpoint. Each damage is a function of their bytes, a place and a seed."""

from __future__ import annotations

import io
import re
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random

import xxhash

from tests.damage.edits import edited_archive, edited_json, edited_pickle, edited_safetensors

__all__ = ["DAMAGES", "Bytes", "Changes", "Damage", "Site", "sites_of"]

Bytes = Mapping[str, bytes]
"""The files of a checkpoint, by name below its folder."""

Changes = dict[str, bytes | None]
"""What other bytes some of them have then; None: the file is gone. Nothing, where the damage is none here."""


@dataclass(frozen=True)
class Site:
    """A place in a file where the bytes are of one kind."""

    file: str
    kind: str
    start: int
    stop: int


@dataclass(frozen=True)
class Damage:
    """Something that happens to bytes.

    `apply(files, older, site, sites, rng)`: `older` are the files of the generation before, `sites` all places of the
    same kind.
    """

    apply: Callable[[Bytes, Bytes, Site, list[Site], Random], Changes]
    of_files: bool = False
    """Whether it leaves every file as somebody once wrote it, so that what a file says of itself still holds."""
    forges: bool = False
    """Whether checksums of what it changes may fit afterwards: then other values are no proof of a fault."""


PAGE = 4096


def _at(files: Bytes, site: Site, rng: Random, change: Callable[[bytearray, int], None]) -> Changes:
    data = bytearray(files[site.file])
    change(data, rng.choice([site.start, site.stop - 1, *(rng.randrange(site.start, site.stop) for _ in range(6))]))
    return {site.file: bytes(data)}


def _bit(files: Bytes, older: Bytes, site: Site, sites: list[Site], rng: Random) -> Changes:
    def change(data: bytearray, at: int) -> None:
        data[at] ^= 1 << rng.randrange(8)

    return _at(files, site, rng, change)


def _byte(files: Bytes, older: Bytes, site: Site, sites: list[Site], rng: Random) -> Changes:
    def change(data: bytearray, at: int) -> None:
        data[at] = (data[at] + rng.randrange(1, 256)) % 256

    return _at(files, site, rng, change)


def _zeroed(files: Bytes, older: Bytes, site: Site, sites: list[Site], rng: Random) -> Changes:
    def change(data: bytearray, at: int) -> None:
        first = max(at // PAGE * PAGE, site.start)
        stop = min(at // PAGE * PAGE + PAGE, site.stop)
        data[first:stop] = bytes(stop - first)

    return _at(files, site, rng, change)


def _truncated(files: Bytes, older: Bytes, site: Site, sites: list[Site], rng: Random) -> Changes:
    return {site.file: files[site.file][: rng.choice([site.stop - 1, rng.randrange(site.start, site.stop)])]}


def _extended(files: Bytes, older: Bytes, site: Site, sites: list[Site], rng: Random) -> Changes:
    return {site.file: files[site.file] + rng.choice([rng.randbytes, bytes])(rng.choice([1, 8, 4096, 70_000]))}


def _blocks_swapped(files: Bytes, older: Bytes, site: Site, sites: list[Site], rng: Random) -> Changes:
    most = (site.stop - site.start) // 2
    size = rng.choice([n for n in (1, 16, 512, 4096, 65536) if n <= most] or [0])
    if not size:
        return {}
    data = bytearray(files[site.file])
    a = rng.randrange(site.start, site.stop - 2 * size + 1)
    b = rng.randrange(a + size, site.stop - size + 1)
    data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]
    return {site.file: bytes(data)}


def _files_swapped(files: Bytes, older: Bytes, site: Site, sites: list[Site], rng: Random) -> Changes:
    others = sorted({other.file for other in sites} - {site.file})
    if not others:
        return {}
    other = rng.choice(others)
    return {site.file: files[other], other: files[site.file]}


def _older(files: Bytes, older: Bytes, site: Site, sites: list[Site], rng: Random) -> Changes:
    if len(files) == 1:
        return {}  # a whole file of before is another checkpoint, and no damaged one
    before = {_role(name): data for name, data in older.items()}
    role = _role(site.file)
    return {site.file: before[role]} if role in before else {}


def _removed(files: Bytes, older: Bytes, site: Site, sites: list[Site], rng: Random) -> Changes:
    return {site.file: None}


def _edited(files: Bytes, older: Bytes, site: Site, sites: list[Site], rng: Random) -> Changes:
    """Metadata that can still be parsed."""
    data = files[site.file]
    if site.file.endswith(".safetensors"):
        edited = edited_safetensors(data, rng) if site.kind == "header" else None
    elif site.kind == "pickle" and data[:2] == b"PK" and data.count(b"PK\x05\x06") == 1:
        edited = edited_archive(data, rng)
    elif site.kind in ("manifest", "metadata", "index", "data", "pickle"):
        edited = _forged_manifest(data, rng) or edited_json(data, rng) or edited_pickle(data, rng)
    else:
        edited = None
    return {} if edited is None else {site.file: edited}


def _forged_manifest(data: bytes, rng: Random) -> bytes | None:
    """Of the native format, with a digest that fits again."""
    if b',"digest":"' not in data[-80:] or rng.random() < 0.1:
        return None
    edited = edited_json(data[: data.rindex(b',"digest":"')] + b"}", rng)
    if edited is None or not edited.endswith(b"}"):
        return edited
    return edited[:-1] + b',"digest":"%b"}' % xxhash.xxh3_128_hexdigest(edited[:-1]).encode()


def _two(files: Bytes, older: Bytes, site: Site, sites: list[Site], rng: Random) -> Changes:
    """Two of the others, at two places of any kind."""
    changes: Changes = {}
    for at in (site, rng.choice(sites_of(files))):
        now = {name: data for name in files if (data := changes.get(name, files[name])) is not None}
        if at.file not in now or at.stop > len(now[at.file]):
            continue
        damage = DAMAGES[rng.choice([name for name in DAMAGES if name != "two"])]
        rest = [other for other in sites_of(files) if other.kind == at.kind and other.file in now]
        changes |= damage.apply(now, older, at, rest, rng)
    return changes


def _role(name: str) -> str:
    """What a file is called in every generation."""
    return re.sub(r"-[0-9a-f]{12}-[0-9a-f]{12}", "", name)


DAMAGES: Mapping[str, Damage] = {
    "bit": Damage(_bit),
    "byte": Damage(_byte),
    "zeroed page": Damage(_zeroed),
    "truncated": Damage(_truncated),
    "extended": Damage(_extended),
    "blocks swapped": Damage(_blocks_swapped),
    "files swapped": Damage(_files_swapped, of_files=True),
    "older file": Damage(_older, of_files=True),
    "removed": Damage(_removed),
    "edited": Damage(_edited, of_files=True, forges=True),
    "two": Damage(_two, of_files=True, forges=True),
}


# --- where there is what ---


def sites_of(files: Bytes) -> list[Site]:
    """The places of all files, by what they are."""
    return [site for name, data in files.items() for site in _sites(name, data) if site.start < site.stop]


_KINDS = {
    ".sums": "sums",
    ".parts": "parts",
    ".blocks": "blocks",
    "/files": "table of files",
    "manifest.json": "manifest",
    ".index.json": "index",
    "METADATA": "metadata",
    "metadata": "metadata",
    "_sharding": "metadata",
    "/process_0": "metadata",
    ".zarray": "metadata",
    ".ocdbt": "metadata",
    "latest": "metadata",
    ".txt": "metadata",
    "owner.json": "manifest",
}
"""By the end of a name."""


def _sites(name: str, data: bytes) -> Iterator[Site]:
    kind = next((kind for end, kind in _KINDS.items() if name.endswith(end)), None)
    if kind is not None:
        yield Site(name, kind, 0, len(data))
    elif name.endswith(".safetensors"):
        stop = 8 + struct.unpack("<Q", data[:8])[0]
        yield Site(name, "header", 0, stop)
        yield Site(name, "data", stop, len(data))
    elif name.endswith(".nemo"):
        yield from _tar(name, data)
    elif b"PK\x05\x06" in data:
        yield from _archives(name, data)
    elif data[:4] == b"GGUF":
        stop = max(map(data.rfind, (b"long", b"bias", b"scale"))) + 32  # about where the last of the tensors' names is
        yield Site(name, "header", 0, stop)
        yield Site(name, "data", stop, len(data))
    elif name.endswith(".pt"):  # of before there were archives: five pickles, and what the storages hold
        stop = data.rindex(b"]q\x00") if b"]q\x00" in data else len(data) // 100
        yield Site(name, "pickle", 0, stop)
        yield Site(name, "data", stop, len(data))
    else:
        yield Site(name, "data", 0, len(data))


def _tar(name: str, data: bytes) -> Iterator[Site]:
    """Of a tar archive: headers, its end with them, and what is in the zip archives that are members."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            yield Site(name, "tar headers", member.offset, member.offset_data)
            if member.name.endswith(".ckpt"):
                inner = _archives(name, data[member.offset_data : member.offset_data + member.size])
                yield from (
                    replace(site, start=site.start + member.offset_data, stop=site.stop + member.offset_data)
                    for site in inner
                )
        yield Site(name, "tar headers", archive.offset, archive.offset + 1024)


def _archives(name: str, data: bytes) -> Iterator[Site]:
    """Of one zip archive, or of many one behind another, as DCP writes them."""
    start = 0
    for end in re.finditer(re.escape(b"PK\x05\x06"), data):
        stop = end.start() + 22
        item = data[start:stop]
        with zipfile.ZipFile(io.BytesIO(item)) as archive:
            directory = archive.start_dir
            for record in archive.infolist():
                at = record.header_offset
                body = at + 30 + sum(struct.unpack("<HH", item[at + 26 : at + 30]))
                yield Site(name, "zip headers", start + at, start + body)
                kind = "data" if "/data/" in record.filename else "pickle"
                yield Site(name, kind, start + body, start + body + record.compress_size)
        yield Site(name, "zip directory", start + directory, stop)
        start = stop
    if start < len(data):
        yield Site(name, "data", start, len(data))
