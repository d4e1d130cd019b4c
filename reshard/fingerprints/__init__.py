"""Fingerprints of tensors that no topology changes: every rank adds up its own part. See docs/fingerprint.md."""

from reshard.fingerprints.keys import PUBLIC, Key
from reshard.fingerprints.parts import Fingerprinter, Partial, comparable, partial
from reshard.fingerprints.state import Exchange, alone, fingerprint, holdings, join

__all__ = [
    "PUBLIC",
    "Exchange",
    "Fingerprinter",
    "Key",
    "Partial",
    "alone",
    "comparable",
    "fingerprint",
    "holdings",
    "join",
    "partial",
]
