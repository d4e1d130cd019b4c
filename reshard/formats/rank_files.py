"""Folders in which each rank saved its own part by `torch.save`. DTensors and ShardedTensors record their places.

Usual names:

    model_world_size_4_rank_0.pt ...      verl and others: each section's name becomes a prefix of its keys
    pytorch_model_fsdp_0_rank0.bin ...    accelerate without DCP
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from planners.geometry.arrays import grouped
from planners.geometry.box import Box
from planners.geometry.layout import TensorLayout
from planners.units import format_some
from reshard.errors import CorruptCheckpointError, FormatError, LayoutError
from reshard.formats.format import Format
from reshard.formats.torch_save.pickles import Shardlet, TensorRef, is_dtensor, read_dtensor
from reshard.formats.torch_save.reader import (
    FilesOfRanks,
    TorchFile,
    flat_leaves,
    is_sharded_tensor,
    join_sharded,
    read_torch_file,
    sharded_ranks,
    stored_tensor,
)
from reshard.live.tensors import candidate_layouts, explain_ambiguity, matching_shards
from reshard.state import KeyPath, key_of
from reshard.storage.base import Listing, Storage
from reshard.stored.checksums import CRC_OF_RECORDS
from reshard.stored.contents import Contents, ContentsBuilder
from reshard.stored.source import Files, Source
from reshard.stored.tensor import Extent, StoredChunk, StoredTensor

_VERL = re.compile(r"(?P<section>.+?)_world_size_(?P<world>\d+)_rank_(?P<rank>\d+)\.(?:pt|pth|bin)")
_ACCELERATE = re.compile(r"(?P<section>.+?)_rank_?(?P<rank>\d+)\.(?:pt|pth|bin)")
_OTHERS = (".pt", ".pth", ".bin", ".pkl", ".safetensors")
_SECTIONS = {"pytorch_model_fsdp": "model", "pytorch_model": "model"}


@dataclass
class Section:
    """The files of all ranks for one state, such as the model's."""

    name: str
    world_size: int | None = None
    files: dict[int, str] = field(default_factory=dict)
    twice: tuple[str, str] | None = None
    """Two files of one rank, if there are any."""


def detect(storage: Storage, names: Listing) -> bool:
    """Return True if files in the top folder are numbered by rank."""
    return bool(sections_of(names))


def sections_of(names: Listing, patterns: Sequence[re.Pattern[str]] = (_VERL, _ACCELERATE)) -> dict[str, Section]:
    """Return the files of the top folder that are numbered by rank, grouped by the text before the number."""
    sections: dict[str, Section] = {}
    for file in names:
        match = next((m for p in patterns if (m := p.fullmatch(file))), None)
        if match is None or "/" in file:
            continue
        groups = match.groupdict()
        section = sections.setdefault(groups["section"], Section(_section_name(groups["section"], match.re)))
        if (other := section.files.setdefault(int(groups["rank"]), file)) != file:
            section.twice = other, file
        if groups.get("world") is not None:
            section.world_size = int(groups["world"])
    return sections


def _section_name(text: str, pattern: re.Pattern[str]) -> str:
    """Return the prefix of the keys of such files: accelerate numbers its models from 0, but the
    first is just "model"."""
    if pattern is not _ACCELERATE:
        return text
    base, number = re.fullmatch(r"(.*?)(_\d+)?", text, re.DOTALL).groups()  # type: ignore[union-attr]  # fits any
    return _SECTIONS.get(base, base) + ("" if number in (None, "_0") else number)


def open(files: Files) -> Contents:
    """Return the checkpoint in the top folder.

    Raises:
        CorruptCheckpointError: a rank's file is missing, or the ranks' files contradict each other.
        FormatError: several sections with one name, several files of one rank, or DTensors that
        cannot be understood.
    """
    sections = list(sections_of(files.listed).values())
    return with_others(open_sections("rank_files", files, sections), files, sections)


def with_others(
    contents: Contents, files: Files, sections: Collection[Section], beside: Sequence[str] = ()
) -> Contents:
    """Return the contents with warnings about files that belong to no section, and about sections
    with fewer ranks than others, which may have lost files."""
    ranks = max((one.world_size or max(one.files) + 1 for one in sections), default=0)
    fewer = [f"{one.name}: files of {len(one.files)} of {ranks} ranks" for one in sections if len(one.files) < ranks]
    opened = {*beside, *(file for section in sections for file in section.files.values())}
    others = sorted(n for n in files.listed if n not in opened and n.endswith(_OTHERS))
    warnings = [f"not opened: {format_some(others)}"] if others else []
    return replace(contents, warnings=(*contents.warnings, *fewer, *warnings))


def open_sections(kind: str, files: Files, sections: list[Section]) -> Contents:
    """Return the checkpoint that the files of `sections` make up."""
    storage = files.storage
    out = ContentsBuilder(storage.url)
    for section in sections:
        if section.twice is not None:
            raise FormatError(
                f"{storage.url}: {section.twice[0]} and {section.twice[1]} are of the same rank, "
                "so there are parts of two saves: "
                "move those of one save elsewhere"
            )
        _check_ranks(files, section, range(section.world_size or max(section.files) + 1))
        ranks = {rank: read_torch_file(files[section.files[rank]]) for rank in sorted(section.files)}
        _check_ranks(files, section, meant := _expected_ranks(ranks))
        if not (meant or section.world_size):
            files.checking.leave_number_open()
        _add_section(out, (section.name,), ranks)
    return out.build(kind)


def _check_ranks(files: Files, section: Section, ranks: Collection[int]) -> None:
    missing = [rank for rank in ranks if rank not in section.files]
    if missing:
        there = section.files[min(section.files)]
        file = re.sub(r"\d+(?=\.\w+$)", str(missing[0]), there)
        words = f"the file of rank {missing[0]} of {len(ranks)} is missing: {file}; there is {there}"
        files.checking.refuse(CorruptCheckpointError(f"{files.storage.url}: {words}"))


def holds_parts(source: Source) -> bool:
    """Return True if a file has parts of tensors whose other parts are on other ranks."""
    leaves = flat_leaves(read_torch_file(source, numbered=False)).leaves.values()
    return any(is_dtensor(leaf) or is_sharded_tensor(leaf) for leaf in leaves)


def _expected_ranks(files: FilesOfRanks) -> list[int]:
    """Return the ranks that must have saved, according to the first DTensor or ShardedTensor.
    Otherwise, a missing highest rank would not be noticed."""
    rank, file = min(files.items())
    for path, leaf in flat_leaves(file).leaves.items():
        if is_sharded_tensor(leaf):
            return sharded_ranks(key_of(path), leaf, file)
        if is_dtensor(leaf):
            mesh = read_dtensor(key_of(path), leaf, rank, file.read, file.source.label).layout.mesh
            return [] if mesh is None else sorted(mesh.ranks.tolist())
    return []


def _add_section(out: ContentsBuilder, prefix: KeyPath, files: FilesOfRanks) -> None:
    """Add one section, which joins the values of all ranks at each path."""
    held: dict[KeyPath, dict[int, Any]] = {}
    for rank, file in files.items():
        flat = flat_leaves(file, prefix)
        out.containers.update(flat.containers)
        for path, leaf in flat.leaves.items():
            held.setdefault(path, {})[rank] = leaf
    for path, leaves in held.items():
        if any(map(is_sharded_tensor, leaves.values())):
            key = out.claim(path)
            out.add_tensor(key, partial(join_sharded, key, leaves, files))
            continue
        sharded = [rank for rank, leaf in leaves.items() if is_dtensor(leaf)]
        if sharded and len(sharded) < len(leaves):
            raise CorruptCheckpointError(f"{key_of(path)!r} is a DTensor in the file of rank {sharded[0]}, not in all")
        if sharded:
            key = out.claim(path)
            out.add_tensor(key, partial(_dtensor, key, leaves, files))
        elif _replicas(leaves, files):
            _add_leaf(out, path, min(leaves), leaves[min(leaves)], files)
        else:  # different values are all kept, by rank
            for rank, leaf in leaves.items():
                _add_leaf(out, (*path, f"rank_{rank}"), rank, leaf, files)


def _add_leaf(out: ContentsBuilder, path: KeyPath, rank: int, leaf: Any, files: FilesOfRanks) -> None:
    key = out.claim(path)
    if isinstance(leaf, TensorRef):
        out.add_tensor(key, partial(stored_tensor, key, files[rank], leaf, rank))
    else:
        out.add_object(key, partial(files[rank].plain, leaf))


def _replicas(leaves: Mapping[int, Any], files: FilesOfRanks) -> bool:
    """Return True if all ranks have the same value."""
    ranks = sorted(leaves)
    first = leaves[ranks[0]]
    for rank in ranks[1:]:
        other = leaves[rank]
        if not isinstance(first, TensorRef) or not isinstance(other, TensorRef):
            if type(first) is not type(other) or not _equal(files[ranks[0]].plain(first), files[rank].plain(other)):
                return False
            continue
        if (first.size, first.dtype) != (other.size, other.dtype):
            return False
        written = files[ranks[0]].crc(first), files[rank].crc(other)
        if replace(first, storage=other.storage) == other and None not in written:  # equal checksums, nothing to read
            if written[0] == written[1]:
                continue
            if first.window(0).nbytes == first.storage.nbytes:
                return False
        a, b = files[ranks[0]].read(first), files[rank].read(other)
        if not torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
            return False
    return True


def _equal(a: Any, b: Any) -> bool:
    """Return whether two plain values are equal. Values that cannot be compared differ."""
    try:
        return bool(a == b)
    except (ValueError, RuntimeError, RecursionError):  # arrays of several elements have no truth value
        return False


def _dtensor(key: str, leaves: Mapping[int, Any], files: FilesOfRanks) -> StoredTensor:
    """Return a tensor from its parts in the files of all ranks. Of replicas, that of the lowest rank is used."""
    parts = {
        rank: read_dtensor(key, record, rank, files[rank].read, files[rank].source.label)
        for rank, record in leaves.items()
    }
    specs = {part.layout.spec for part in parts.values()}
    if len(specs) > 1:
        raise CorruptCheckpointError(f"tensor {key!r}: the ranks' files disagree about its shape or dtype: {specs}")
    spec = specs.pop()
    layouts = _true_layouts(parts, files[min(files)].source.label)
    chunks: dict[Box, StoredChunk] = {}
    for rank, part in sorted(parts.items()):
        label = files[rank].source.label
        if part.local.dtype != spec.dtype:
            raise CorruptCheckpointError(f"{label}: {key!r} is {part.local.dtype}, not {spec.dtype}")
        for held in layouts[rank].parts(rank):
            if held.sizes != part.local.size:
                raise CorruptCheckpointError(
                    f"{label}: the local tensor of {key!r} has shape {list(part.local.size)}, but rank {rank} of "
                    f"{layouts[rank].form} should hold {list(held.sizes)} of {list(spec.shape)}"
                )
            for box, local in held.boxes():
                chunks.setdefault(box, StoredChunk(box, partial(_cropped, files[rank], part.local, local), rank))
    layout = layouts[min(layouts)]
    complete = layout.mesh is not None and set(layout.mesh.ranks.tolist()) == set(parts)
    same = all(other == layout for other in layouts.values())
    return StoredTensor(spec, tuple(chunks.values()), layout if complete and same else None)


def _cropped(file: TorchFile, ref: TensorRef, local: Box) -> Extent:
    place = file.place(ref)
    return place.with_window(place.window.crop(local))


def _true_layouts(parts: Mapping[int, Shardlet], where: str) -> dict[int, TensorLayout]:
    """Return the layout of every rank's part: the meaning of its placements, given the shapes of
    all parts.

    Raises FormatError if torch cannot have sharded so, or if the shapes are ambiguous.
    """
    found: dict[int, TensorLayout] = {}
    alike = grouped((part.layout, rank) for rank, part in parts.items())
    for layout, ranks in alike.items():
        try:
            true = _true_layout(layout, {rank: parts[rank].local.size for rank in ranks})
        except LayoutError as error:
            raise FormatError(f"{where}: tensor {layout.fqn!r} {error}") from None
        found |= dict.fromkeys(ranks, true)
    return found


def _true_layout(layout: TensorLayout, held: Mapping[int, tuple[int, ...]]) -> TensorLayout:
    """Return the layout in which ranks hold parts of these shapes. If none is found, return the
    literal one."""
    if layout.mesh is None or layout.placements is None:
        return layout
    forms = candidate_layouts(layout.mesh, layout.placements)
    fit = matching_shards(
        forms, layout.spec.shape, {rank: size for rank, size in held.items() if rank in forms[-1].mesh}
    )
    if len(fit) > 1:
        raise LayoutError(explain_ambiguity(layout.spec.shape, fit, None))
    return TensorLayout.of(layout.spec, fit[0] if fit else forms[-1])


FORMAT = Format(
    "rank_files",
    checksums=CRC_OF_RECORDS,
    detect=detect,
    open=open,
    is_composite=True,
)
