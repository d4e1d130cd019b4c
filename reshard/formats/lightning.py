"""Folders of Lightning's FSDP and model-parallel strategies: a DCP checkpoint, and the rest in `meta.pt`."""

from __future__ import annotations

from reshard.formats.dcp import reader as dcp
from reshard.formats.format import Format
from reshard.formats.torch_save.reader import open_file
from reshard.storage.base import Listing, Storage
from reshard.stored.checksums import CRC_OF_RECORDS
from reshard.stored.contents import Contents, has_dcp, merge
from reshard.stored.source import Files

_NAME = "lightning"


def detect(storage: Storage, names: Listing) -> bool:
    """Return True if the top folder is a DCP checkpoint with a `meta.pt`."""
    return "meta.pt" in names and has_dcp(names)


def open(files: Files) -> Contents:
    """Return both parts as one checkpoint. Raises CorruptCheckpointError, also if the save was not
    completed."""
    sharded = dcp.open(files)
    rest = open_file(_NAME, files["meta.pt"])
    return merge(_NAME, [("", sharded), ("", rest)])


FORMAT = Format(
    _NAME,
    checksums=CRC_OF_RECORDS,
    detect=detect,
    open=open,
    is_composite=True,
    holds_dcp=True,
)
