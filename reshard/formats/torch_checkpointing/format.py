"""Checkpoints of torch_checkpointing, read and written."""

from __future__ import annotations

from reshard.formats.format import Format, Writing
from reshard.formats.torch_checkpointing.reader import detect, open
from reshard.stored.checksums import CRC_OF_RECORDS

__all__ = ["FORMAT"]


def _writing() -> Writing:
    from reshard.formats.torch_checkpointing.writer import WRITING

    return WRITING


FORMAT = Format(
    "torch_checkpointing",
    checksums=f"{CRC_OF_RECORDS}, and whether items that metadata.pkl does not list have all their files",
    detect=detect,
    open=open,
    is_composite=True,
    writing=_writing,
)
