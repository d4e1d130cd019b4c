"""Fingerprints of tensors that no topology changes: every rank adds up its own part. See docs/fingerprint.md."""

from reshard.api.fingerprint import fingerprint as fingerprint
from reshard.live.fingerprint_sums import PUBLIC as PUBLIC
from reshard.live.fingerprint_sums import Key as Key
from reshard.live.fingerprints import Fingerprinter as Fingerprinter
from reshard.live.fingerprints import Partial as Partial
from reshard.live.fingerprints import comparable as comparable
from reshard.live.fingerprints import partial as partial
