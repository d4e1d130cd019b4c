"""The native format, as one of the formats."""

from __future__ import annotations

from reshard.formats.format import Format
from reshard.native.reader import detect, open
from reshard.stored.checksums import EVERY_BLOCK

FORMAT = Format(
    "native",
    checksums=EVERY_BLOCK,
    detect=detect,
    open=open,
    is_composite=True,
    records_ranks=True,
)
