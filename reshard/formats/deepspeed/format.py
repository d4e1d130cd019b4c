"""DeepSpeed: what it writes is read and normalized; universal checkpoints are written."""

from __future__ import annotations

from reshard.formats.deepspeed.files import beside, detect, open
from reshard.formats.format import Format, Normalizer, Writing
from reshard.stored.checksums import CRC_OF_RECORDS

__all__ = ["FORMAT"]


def _normalizer() -> Normalizer:
    from reshard.formats.deepspeed.canonical import normalize_deepspeed

    return normalize_deepspeed


def _writing() -> Writing:
    from reshard.formats.deepspeed.writer import WRITING

    return WRITING


FORMAT = Format(
    "deepspeed",
    checksums=CRC_OF_RECORDS,
    detect=detect,
    open=open,
    is_composite=True,
    normalizer=_normalizer,
    beside=beside,
    names_ranks=True,
    writing=_writing,
)
