"""An incarnation of a job, and the file that says which one kept a generation.

00000007-step-100-0192f3c1a8ab-5d2e.../lineage.json        published before anything else of the generation
    {"lineage":{"id":"0192f3c0ffee-77ab...","first":4,"earlier":{"0192f3b00a1e-90cd...":3}},"digest":"..."}
"""

from __future__ import annotations

import msgspec
import xxhash

from reshard.errors import CheckpointError
from reshard.storage import Storage

__all__ = ["LINEAGE", "Incarnation"]

LINEAGE = "lineage.json"


class Incarnation(msgspec.Struct, frozen=True):
    """A job from a recovery, or from its first generation if it recovered nothing, until its processes end or it
    recovers again. Its ranks and hosts stay the same, so its generations are one after another, by their numbers."""

    id: str
    """Nobody else has it, and it begins with the time at which the incarnation began, as a save id does."""
    first: int
    """Number of its first generation: larger than all that it could see when it began."""
    earlier: dict[str, int]
    """By the id of each incarnation that it knew to have been before: the number of the generation up to which it goes
    on from that one; 0 if it recovered nothing of it. Incarnations that it knew were over when it began: their hosts
    were its own."""

    def encode(self) -> bytes:
        """The text of its file, with a digest."""
        text = msgspec.json.encode(self)
        return msgspec.json.encode(_SealedLineage(msgspec.Raw(text), xxhash.xxh3_128_hexdigest(text)))

    @classmethod
    def read(cls, storage: Storage) -> Incarnation | None:
        """That of the generation in `storage`; None if nothing legible says so, as before releases recorded it."""
        try:
            sealed = msgspec.json.decode(storage.read(LINEAGE), type=_SealedLineage)
            if xxhash.xxh3_128_hexdigest(sealed.lineage) != sealed.digest:
                return None
            return msgspec.json.decode(sealed.lineage, type=cls)
        except (CheckpointError, msgspec.MsgspecError, UnicodeDecodeError):
            return None


class _SealedLineage(msgspec.Struct, frozen=True):
    lineage: msgspec.Raw
    digest: str
