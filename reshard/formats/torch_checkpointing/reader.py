"""Checkpoints of torch_checkpointing: a file of `torch.save` for each item and rank, and a pickle that lists the items.

model_0.pt, model_1.pt, optimizer_0.pt ...    each rank's part of an item, DTensors among it
metadata.pkl                                  how many ranks there were, and how each tensor was sharded
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from planners.units import format_count
from reshard.errors import RESTORE, CorruptCheckpointError, ReshardError
from reshard.formats.format import Format
from reshard.formats.rank_files import Section, open_sections, sections_of, with_others
from reshard.formats.torch_save.pickles import load_pickle
from reshard.state import key_of
from reshard.storage.base import Listing, Storage
from reshard.stored.checksums import CRC_OF_RECORDS
from reshard.stored.contents import Contents
from reshard.stored.source import Files, Source

METADATA = "metadata.pkl"
ITEM = re.compile(r"(?P<section>[^/]+)_(?P<rank>\d+)\.pt")


def detect(storage: Storage, names: Listing) -> bool:
    """Return True if there is a list of items, and a file of one."""
    return METADATA in names and bool(sections_of(names, [ITEM]))


def open(files: Files) -> Contents:
    """Return the checkpoint in the top folder.

    Raises:
        CorruptCheckpointError: a rank's file is missing, or the ranks' files contradict each other.
        FormatError: DTensors that cannot be understood.
    """
    source = files[METADATA]
    items, world = _list_of_items(source)
    sections = _sections(files, items, world)
    contents = open_sections("torch_checkpointing", files, sections)
    held = {*contents.tensors, *contents.objects}
    held |= {re.sub(r"\.rank_\d+$|[][]", "", name) for name in held}  # the list has 0 where the file has "0"
    lost = [name for name in _listed(items, source.label) if name not in held]
    if lost and not files.checking.lost:
        count = format_count(len(lost), "tensor")
        item = max((item for item in map(str, items) if f"{lost[0]}.".startswith(f"{item}.")), key=len, default="*")
        its = f"{item}_0.pt" + f" to {item}_{world - 1}.pt" * (world > 1)
        what = f"no file of a rank has {count} that it names, such as {lost[0]!r}, expected in {its}"
        files.checking.refuse(CorruptCheckpointError(f"{source.label}: {what}: {RESTORE}"))
    return with_others(contents, files, sections, [METADATA])


def _list_of_items(source: Source) -> tuple[dict[Any, Any], int]:
    """Return the list's entry of each item, and how many ranks saved. Raises CorruptCheckpointError."""
    found = load_pickle(source.read(0, source.nbytes), where=source.label)
    items = found.get("metadata") if isinstance(found, dict) else None
    world = found.get("world_size") if isinstance(found, dict) else None
    if not isinstance(items, dict) or type(world) is not int:
        raise CorruptCheckpointError(f"{source.label}: it says neither what was saved nor by how many ranks")
    return items, world


def files_of_items(files: Files, more: Collection[str]) -> list[str]:
    """Return the files of the items in the list and in `more`, and files that can be opened though
    they are not listed, such as items without tensors. An unreadable list counts as that of one
    rank."""
    items, world = dict[Any, Any](), 1
    with suppress(ReshardError):
        items, world = _list_of_items(files[METADATA])
    known = {*map(str, items), *more}
    return [
        file
        for file in files.listed
        if (match := ITEM.fullmatch(file))
        and (match["section"] in known or (int(match["rank"]) < world and f"{match['section']}_0.pt" in files.listed))
    ]


def _listed(items: Mapping[Any, Any], where: str) -> list[str]:
    """Return the keys of all tensors in the list.

    Raises CorruptCheckpointError if it is malformed.
    """
    found = []
    try:
        for item, said in items.items():
            for path in said.get("nested_path_to_metadata", ()):
                found.append(key_of((str(item), *json.loads(path))))
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        text = f"{where}: its list of tensors is malformed: {error}"
        raise CorruptCheckpointError(text) from None
    return found


def _sections(files: Files, items: Mapping[Any, Any], world: int) -> list[Section]:
    """Return the items, with the files of the ranks that saved them.

    Files of other ranks belong to an earlier save.

    Raises CorruptCheckpointError if an item of tensors has no files.
    """
    named = {file: match for file in files.listed if (match := ITEM.fullmatch(file))}
    saved = {file: 0 for file, match in named.items() if int(match["rank"]) < world}
    known = {section.name: section for section in sections_of(saved, [ITEM]).values()}
    for item in map(str, items):
        if item not in known:
            raise CorruptCheckpointError(f"{files[METADATA].label} names {item!r}, but there is no file {item}_0.pt")
        known[item].world_size = world
    return list(known.values())


FORMAT = Format(
    "torch_checkpointing",
    checksums=f"{CRC_OF_RECORDS}, and whether items that metadata.pkl does not list have all their files",
    detect=detect,
    open=open,
    is_composite=True,
)
