"""Fingerprints of tensors that are the same in every topology: each rank adds up its own part. See
docs/fingerprint.md."""

from reshard.api.fingerprint import fingerprint as fingerprint
from reshard.live.fingerprint_arithmetic import PUBLIC as PUBLIC, Key as Key
from reshard.live.fingerprints import (
    Fingerprinter as Fingerprinter,
    Partial as Partial,
    comparable as comparable,
    partial as partial,
)
