"""Folders of Lightning's FSDP and model-parallel strategies: a DCP checkpoint, and the rest in `meta.pt`."""

from __future__ import annotations

from collections.abc import Mapping

from reshard.formats.dcp import reader as dcp
from reshard.formats.torch_save.reader import contents_of, read_torch_file
from reshard.storage.base import Storage
from reshard.stored.checksums import CRC_OF_RECORDS
from reshard.stored.contents import Contents, has_dcp, merge
from reshard.stored.source import Files

__all__ = ["checksums", "detect", "looks_for", "name", "open"]


name = "lightning"
looks_for = ".metadata and meta.pt"
checksums = CRC_OF_RECORDS


def detect(storage: Storage, names: Mapping[str, int]) -> bool:
    """Whether the top folder is a DCP checkpoint with a `meta.pt`."""
    return "meta.pt" in names and has_dcp(names)


def open(files: Files) -> Contents:
    """Both parts as one checkpoint. Raises DamagedCheckpointError, also if the save did not end."""
    sharded = dcp.open(files)
    rest = contents_of(name, {(): read_torch_file(files["meta.pt"])})
    return merge(name, [("", sharded), ("", rest)])
