"""The library's own format among all others."""

from __future__ import annotations

from reshard.formats.format import Format, Writing
from reshard.native.reader import detect, open
from reshard.stored.checksums import EVERY_BLOCK

__all__ = ["FORMAT"]


def _writing() -> Writing:
    from reshard.native.writer import NativeWriter

    return Writing(NativeWriter, is_sharded=True, is_split=True)


FORMAT = Format(
    "native",
    checksums=EVERY_BLOCK,
    detect=detect,
    open=open,
    is_composite=True,
    records_ranks=True,
    writing=_writing,
)
