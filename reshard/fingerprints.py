"""Fingerprints of tensors that no topology changes: every rank adds up its own part. See docs/fingerprint.md."""

from reshard.api.fingerprint import fingerprint as fingerprint
from reshard.state.fingerprints import PUBLIC as PUBLIC
from reshard.state.fingerprints import Fingerprinter as Fingerprinter
from reshard.state.fingerprints import Key as Key
from reshard.state.fingerprints import Partial as Partial
from reshard.state.fingerprints import comparable as comparable
from reshard.state.fingerprints import partial as partial
