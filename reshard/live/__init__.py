"""Moves state between ranks that are alive: any layout to any other, in place. See docs/live.md."""

from reshard.live.flight import verify_live
from reshard.live.prepared import Prepared, TransferReport, prepare, redistribute

__all__ = ["Prepared", "TransferReport", "prepare", "redistribute", "verify_live"]
