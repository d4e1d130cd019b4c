"""Fingerprints of tensors that no topology changes: every rank adds up its own part. See docs/fingerprint.md."""

from reshard.state.fingerprints.keys import PUBLIC, Key
from reshard.state.fingerprints.parts import Fingerprinter, Partial, comparable, partial, partials

__all__ = [
    "PUBLIC",
    "Fingerprinter",
    "Key",
    "Partial",
    "comparable",
    "partial",
    "partials",
]
