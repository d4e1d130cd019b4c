"""What the ranks of a session write down: what each posts, how a round ended, and which keys are to be removed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NoReturn

import msgspec

from reshard.errors import DeadlineError, RankFailedError, ReshardError

__all__ = ["Done", "Entry", "Failure", "Litter", "Outcome", "decode_outcome"]


class Failure(msgspec.Struct, frozen=True, tag=True):
    """Why a session ended, in ranks of the default group: who failed first (-1: nobody special), who was missed."""

    kind: Literal["error", "deadline", "diverged"]
    rank: int
    message: str
    missing: list[int] = []

    def raise_(self) -> NoReturn:
        """Raise it as the error that every rank gets."""
        if self.kind == "deadline":
            raise DeadlineError(self.message)
        if self.kind == "error":
            raise RankFailedError(self.message, rank=self.rank)
        raise ReshardError(self.message)


class Done(msgspec.Struct, frozen=True, tag=True):
    head: bytes
    """Stands for what the ranks' answers were combined to."""
    oldest: int
    """No rank is in a session before this one."""


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """What one rank, or those of one log, have posted to a log."""

    label: str
    head: bytes
    oldest: int


Outcome = Failure | Done
_decoder: msgspec.msgpack.Decoder[Outcome] = msgspec.msgpack.Decoder(Failure | Done)


def decode_outcome(packed: bytes) -> Outcome:
    """What stands under the key of an outcome."""
    return _decoder.decode(packed)


class Litter:
    """Keys that this rank deletes as soon as no rank is in their session any more."""

    def __init__(self) -> None:
        self._keys: dict[int, list[str]] = {}
        self._live: set[int] = set()

    def enter(self, session: int) -> None:
        """This rank is in the session."""
        self._live.add(session)

    def leave(self, session: int, keys: Iterable[str]) -> None:
        """This rank is in it no more, and has left these keys."""
        self._live.discard(session)
        self._keys.setdefault(session, []).extend(keys)

    def oldest(self) -> int:
        """The first session that this rank is in."""
        return min(self._live, default=0)

    def take(self, oldest: int) -> list[str]:
        """What may be deleted where no rank is in a session before `oldest`."""
        return [key for session in sorted(self._keys) if session < oldest for key in self._keys.pop(session)]
