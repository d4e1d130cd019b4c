"""Megatron-core's `torch_dist` checkpoints, and those of Megatron-FSDP; and its older ones, of a file per rank."""

from __future__ import annotations

from reshard.formats.format import Format, Normalizer, Writing
from reshard.formats.megatron.files import beside, claim, detect, detect_legacy, open, open_legacy
from reshard.stored.checksums import CRC_OF_RECORDS

__all__ = ["FORMAT", "LEGACY"]


def _normalizer() -> Normalizer:
    from reshard.formats.megatron.canonical import normalize_megatron

    return normalize_megatron


def _writing() -> Writing:
    from reshard.formats.megatron.writer import WRITING

    return WRITING


FORMAT = Format(
    "megatron",
    checksums=CRC_OF_RECORDS,
    detect=detect,
    open=open,
    is_composite=True,
    holds_dcp=True,
    normalizer=_normalizer,
    claim=claim,
    beside=beside,
    writing=_writing,
)


def _legacy_normalizer() -> Normalizer:
    from reshard.formats.megatron.legacy import normalize_megatron_legacy

    return normalize_megatron_legacy


LEGACY = Format(
    "megatron_legacy",
    checksums=CRC_OF_RECORDS,
    detect=detect_legacy,
    open=open_legacy,
    is_composite=True,
    normalizer=_legacy_normalizer,
    beside=lambda contents: (),
)
