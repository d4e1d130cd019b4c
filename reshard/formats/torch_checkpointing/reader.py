"""Checkpoints of torch_checkpointing: a file of `torch.save` for each item and rank, and a pickle that lists the items.

model_0.pt, model_1.pt, optimizer_0.pt ...    each rank's part of an item, DTensors among it
metadata.pkl                                  how many ranks there were, and how each tensor was sharded
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from reshard.errors import CorruptCheckpointError
from reshard.formats.rank_files import Section, open_sections, sections_of, with_others
from reshard.formats.torch_save.pickles import load_pickle
from reshard.storage.base import Storage
from reshard.stored.contents import Contents
from reshard.stored.source import Files

__all__ = ["ITEM", "METADATA", "detect", "open"]


METADATA = "metadata.pkl"
ITEM = re.compile(r"(?P<section>.+)_(?P<rank>\d+)\.pt")


def detect(storage: Storage, names: Mapping[str, int]) -> bool:
    """Return True if there is a list of items, and a file of one."""
    return METADATA in names and bool(sections_of(names, [ITEM]))


def open(files: Files) -> Contents:
    """The checkpoint in the top folder.

    Raises:
        CorruptCheckpointError: a rank's file is missing, or the ranks' files contradict each other.
        FormatError: DTensors that cannot be understood.
    """
    sections = _sections(files)
    return with_others(open_sections("torch_checkpointing", files, sections), files, sections, [METADATA])


def _sections(files: Files) -> list[Section]:
    """The items, of as many ranks as saved them.

    Files of other ranks are of a save before.

    Raises CorruptCheckpointError if an item of tensors has no files.
    """
    source = files[METADATA]
    found = load_pickle(source.read(0, source.nbytes), where=source.label)
    items = found.get("metadata") if isinstance(found, dict) else None
    world = found.get("world_size") if isinstance(found, dict) else None
    if not isinstance(items, dict) or type(world) is not int:
        raise CorruptCheckpointError(f"{source.label}: it says neither what was saved nor by how many ranks")
    named = {file: match for file in files.listed if (match := ITEM.fullmatch(file))}
    saved = {file: 0 for file, match in named.items() if int(match["rank"]) < world}
    known = {section.name: section for section in sections_of(saved, [ITEM]).values()}
    for item in map(str, items):
        if item not in known:
            raise CorruptCheckpointError(f"{source.label} names {item!r}, but there is no file {item}_0.pt")
        known[item].world_size = world
    return list(known.values())
