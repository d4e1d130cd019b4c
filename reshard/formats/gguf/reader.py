"""GGUF files of llama.cpp: one, or several of one model called `<name>-00001-of-00003.gguf`.

Plain tensors are windows of the file. Quantized ones are float32 here: the usual types are dequantized as they are
read, the others are listed and refused. What is known of the model, from its architecture to its tokens, are objects.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from planners.geometry.box import Box
from planners.geometry.byteruns import Window
from planners.geometry.dtypes import itemsize
from planners.geometry.layout import TensorSpec
from reshard.errors import DamagedCheckpointError, FormatError
from reshard.formats.gguf.header import Entry, Header, read_header
from reshard.formats.gguf.quantized import BLOCKS, PLAIN, DequantizedSource
from reshard.formats.stored.checksums import NO_CHECKSUMS
from reshard.formats.stored.contents import Contents, Facts, LazyMapping
from reshard.formats.stored.source import Files
from reshard.formats.stored.tensor import Place, StoredChunk, StoredTensor
from reshard.storage.base import Storage

__all__ = ["GgufFacts", "checksums", "detect", "looks_for", "name", "open"]

name = "gguf"
looks_for = "*.gguf"
checksums = NO_CHECKSUMS

_NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_METADATA = "metadata"
_DTYPES = {of: dtype for of, dtype, _ in PLAIN.values()}
_BLOCKS = {block.name: block for block in BLOCKS.values()}


@dataclass(frozen=True)
class GgufFacts(Facts):
    """What stands in the header beside names and shapes."""

    types: Mapping[str, str]
    """ggml's type of each tensor, such as "Q4_K"."""


def detect(storage: Storage, names: Mapping[str, int]) -> bool:
    """Whether the top folder holds GGUF files."""
    return any("/" not in n and n.endswith(".gguf") for n in names)


def open(files: Files) -> Contents:
    """The model in the only file, or in all that are numbered.

    Raises:
        DamagedCheckpointError: a file is missing, cut short or damaged.
        FormatError: several files that are not of one model, or of an unknown version, byte order or type.
    """
    storage, names = files.storage, files.listed
    found = sorted(n for n in names if "/" not in n and n.endswith(".gguf"))
    _check_names(storage.url, found)
    headers = {file: read_header(files[file]) for file in found}
    alone = _NUMBERED.fullmatch(found[0]) if len(names) == 1 and len(storage.list()) > 1 else None
    # opened by the path of one of several files: that one is meant
    rest = f"{alone[1]}-*.gguf" if alone else ""
    warnings = [f"{found[0]} is one of several files: the others were not opened, {rest!r} opens all"] if alone else []
    if not alone:
        _check_split(headers)
    entries: dict[str, tuple[str, Header, Entry]] = {}
    for file, header in headers.items():
        for key, entry in header.entries.items():
            if key in entries:
                raise DamagedCheckpointError(f"tensor {key!r} is stored twice, in {entries[key][0]} and in {file}")
            entries[key] = file, header, entry
    tensors = {key: partial(_tensor, key, *found_at) for key, found_at in entries.items()}
    types = {key: entry.type for key, (_, _, entry) in entries.items()}
    objects, paths = _objects(storage.url, headers[found[0]], types)
    return Contents(
        name, LazyMapping(tensors), LazyMapping(objects), paths=paths, facts=GgufFacts(types),
        warnings=(*warnings, *_quantized(types)),
    )  # fmt: skip


def _check_names(url: str, files: list[str]) -> None:
    """Raises unless the names say that the files are one model."""
    if len(files) > 1:
        numbered = [_NUMBERED.fullmatch(file) for file in files]
        if not all(numbered) or len({(m[1], m[3]) for m in numbered if m}) > 1:
            raise FormatError(
                f"{url} has {len(files)} GGUF files that are not of one model: {', '.join(files[:5])}; open one by its "
                "path, or those of one model as '<name>-*.gguf'"
            )


def _check_split(headers: Mapping[str, Header]) -> None:
    """Raises DamagedCheckpointError unless the files are all that the model was split into."""
    (first, header), *_ = headers.items()
    match = _NUMBERED.fullmatch(first)
    total = header.number("split.count") or (int(match[3]) if match else 1)
    numbers = {int(m[2]) for m in map(_NUMBERED.fullmatch, headers) if m} or {1}
    lost = next((i for i in range(1, total + 1) if i not in numbers), None)
    if lost is not None or len(headers) > total:
        what = f"number {lost} is missing" if lost is not None else f"there are {len(headers)}"
        raise DamagedCheckpointError(f"{header.source.label}: the model was split into {total} files, and {what}")
    for number, (file, of) in enumerate(headers.items()):
        said = of.number("split.no")
        if said not in (None, number) or of.number("split.count") not in (None, total):
            raise DamagedCheckpointError(
                f"{of.source.label}: it says that it is number {said} (from 0) of {of.number('split.count')}, and "
                f"{file} should be number {number} of {total}"
            )
    wanted, there = header.number("split.tensors.count"), sum(len(of.entries) for of in headers.values())
    if wanted not in (None, there):
        raise DamagedCheckpointError(
            f"{header.source.label}: the model was split into files of {wanted} tensors in all, and they hold {there}"
        )


def _objects(
    url: str, header: Header, types: Mapping[str, str]
) -> tuple[dict[str, Callable[[], Any]], dict[str, tuple[Any, ...]]]:
    """What the first file knows of the model, and the types of quantized tensors, under names of their own."""
    objects: dict[str, Callable[[], Any]] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    for key, value in header.values.items():
        objects[f"{_METADATA}.{key}"] = value
        paths[f"{_METADATA}.{key}"] = (_METADATA, key)
    quantized = {key: of for key, of in types.items() if of in _BLOCKS}
    if quantized:
        objects["quantized"] = lambda: quantized
    twin = next((key for key in types if key in objects), None)
    if twin is not None:
        raise FormatError(f"{url}: the tensor {twin!r} is called as what is known of the model is called here")
    return objects, paths


def _quantized(types: Mapping[str, str]) -> list[str]:
    """What to know of each type of blocks that there is."""
    told = []
    for of, count in Counter(of for of in types.values() if of in _BLOCKS).items():
        example = next(key for key, type_ in types.items() if type_ == of)
        how = "refused here" if _BLOCKS[of].values is None else "dequantized to float32 as they are read"
        told.append(f"tensors of the quantized type {of} ({count}, such as {example!r}) are {how}")
    return told


def _tensor(key: str, file: str, header: Header, entry: Entry) -> StoredTensor:
    dtype = _DTYPES.get(entry.type, "float32")
    spec = TensorSpec(key, entry.shape, dtype)
    window = Window.row_major(entry.start, entry.shape, itemsize(dtype))
    label = f"{header.source.label} (tensor {key!r}, {entry.type})"
    place: Place | Callable[[], Place] = Place(header.source, window)
    if entry.type not in _DTYPES:
        block = _BLOCKS[entry.type]
        if block.values is None:
            place = partial(_refuse, label)
        else:
            source = DequantizedSource(header.source, entry.start, spec.numel, block, label)
            place = Place(source, Window.row_major(0, entry.shape, 4))
    return StoredTensor(spec, (StoredChunk(Box.full(entry.shape), place, file),))


def _refuse(label: str) -> NoReturn:
    known = ", ".join(block.name for block in BLOCKS.values() if block.values is not None)
    raise FormatError(
        f"{label}: of the quantized types only {known} are read; take a file of another type of this model, or "
        "dequantize it by llama.cpp first (llama-quantize --allow-requantize IN OUT F32)"
    )
