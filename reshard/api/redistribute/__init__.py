"""Moves state between ranks that are alive: any layout to any other, in place. See docs/live.md."""

from reshard.api.redistribute.redistributing import Prepared, TransferReport, prepare, redistribute
from reshard.api.redistribute.verify_live import verify_live

__all__ = ["Prepared", "TransferReport", "prepare", "redistribute", "verify_live"]
