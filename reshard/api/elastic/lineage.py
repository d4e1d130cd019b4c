"""Decides which generation a job used last, for saves, restores, and `gather`.

A host that was away may come back with generations that the job did not continue. They may have
larger numbers, and are not newer. So incarnations are compared before numbers are: one that knew of
another came after it. Where neither knew of the other, since no host that had the one was there
when the other began, the clocks of the hosts decide: one began after the other kept its last. If
they cannot decide either, reshard does not guess.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from planners.geometry.arrays import grouped
from reshard.api.elastic.generation import GenerationFolder, Incarnation, ManifestStamp, Recorded
from reshard.native.commit import new_save_id

_REMEMBERED = 64
"""Each incarnation records this number of the latest earlier ones. Older ones are ordered by clocks."""


class GenerationOrder(NamedTuple):
    """Which generation comes before which, as far as is known."""

    newest_first: list[GenerationFolder]
    tied: list[GenerationFolder]
    """Generations whose order is unknown: the last one of each incarnation. All that are in neither
    list are older than one of these. Empty if the order is known."""

    @property
    def newest(self) -> list[GenerationFolder]:
        """The newest generation, or all that may be the newest."""
        return self.newest_first[:1] or self.tied


@dataclass(frozen=True)
class FoundGenerations:
    """The generations that some hosts have."""

    incarnations: Mapping[GenerationFolder, Incarnation]
    """The incarnation of each generation, complete or not."""
    hosts: Mapping[GenerationFolder, Sequence[str]]
    """The hosts on which each generation is complete."""
    made: Mapping[GenerationFolder, ManifestStamp]
    """The stamp of each generation that is complete on some host."""

    @classmethod
    def of(cls, rows: Iterable[tuple[str, Mapping[GenerationFolder, Recorded]]]) -> FoundGenerations:
        """Combine the contents of the folders of all hosts."""
        incarnations: dict[GenerationFolder, Incarnation] = {}
        hosts: dict[GenerationFolder, list[str]] = {}
        made: dict[GenerationFolder, ManifestStamp] = {}
        for host, records in rows:
            for kept, record in records.items():
                if record.incarnation is not None:
                    incarnations[kept] = record.incarnation
                if record.made is not None:
                    hosts.setdefault(kept, []).append(host)
                    made.setdefault(kept, record.made)
                # a generation without a recorded incarnation counts as one of its own
                incarnations.setdefault(kept, Incarnation(kept.save_id, kept.number, {}))
        return cls(incarnations, hosts, made)

    def order(self, among: Collection[GenerationFolder] | None = None, step: int | None = None) -> GenerationOrder:
        """Order the generations that are complete on some host, or only those in `among` or of a step."""
        newest = sorted(self.made if among is None else among, reverse=True)
        lines = grouped((self.incarnations[kept].id, kept) for kept in newest if step in (None, kept.step))
        newest_first: list[GenerationFolder] = []
        while lines:
            lasts = [line[0] for line in lines.values()]
            heads = [one for one in lasts if not any(self._knew(other, one) for other in lasts)] or lasts
            last = [one for one in heads if not any(self._began_later(other, one) for other in heads)]
            if len(last) > 1:
                return GenerationOrder(newest_first, last)
            newest_first += lines.pop(self.incarnations[last[0]].id)
        return GenerationOrder(newest_first, [])

    def begin(self, recovered: GenerationFolder | None) -> Incarnation:
        """Create the incarnation of the job that begins now. It knows all of these generations, and
        continues the recovered one, if any."""
        earlier: dict[str, int] = {}
        for one in self.incarnations.values():
            earlier |= dict.fromkeys((one.id, *one.earlier), 0)
        if recovered is not None:
            its = self.incarnations[recovered]
            earlier |= {**its.earlier, its.id: recovered.number}
        first = 1 + max((kept.number for kept in self.incarnations), default=0)
        return Incarnation(new_save_id(), first, {one: earlier[one] for one in sorted(earlier)[-_REMEMBERED:]})

    def left_behind(self, taken: GenerationFolder, tried: Collection[GenerationFolder], step: int | None) -> list[str]:
        """Return, for reports, the generations that are not earlier states of `taken`, and why each is
        not used.

        Args:
            tried: generations that could not be loaded, which are reported elsewhere.
            step: the step that was requested.
        """
        return [
            f"{self._where(kept)} was not used: {self._why_left(kept, taken, step)}"
            for kept in sorted(self.made, reverse=True)
            if kept != taken and kept not in tried and not self._went_on(kept, taken)
        ]

    def behind_fallback(self, older: Iterable[GenerationFolder]) -> list[str]:
        """Return, for reports, the generations that are not used because the fallback is."""
        return [f"{self._where(kept)} was not used: the fallback was saved later" for kept in older]

    def tied_text(self, tied: Sequence[GenerationFolder]) -> str:
        """Return the error for generations of which it is unknown which one the job used last. It says
        how to choose."""
        spans = [
            f"{self._where(kept)}, by a run from {_when(self.incarnations[kept].id)} to {_when(self._last(kept))} at "
            "least"
            for kept in tied
        ]
        steps = list(dict.fromkeys(f"step={kept.step}" for kept in tied))
        choice = f"Choose one: pass {' or '.join(steps)}, or delete" if len(steps) == len(tied) else "Delete"
        return (
            "cannot determine which generation the job used last. According to the clocks of the hosts, runs of the "
            f"job overlapped in time, and saved these independently: {'; '.join(spans)}. {choice} the "
            f"folders of the generations that you do not want: {', '.join(kept.folder for kept in tied)}"
        )

    def _knew(self, one: GenerationFolder, other: GenerationFolder) -> bool:
        """Return True if the incarnation of `one` knew of that of `other` when it began."""
        return self.incarnations[other].id in self.incarnations[one].earlier

    def _began_later(self, one: GenerationFolder, other: GenerationFolder) -> bool:
        """Return True if, by the clocks, the incarnation of `one` began after the last save of that of `other`."""
        began, last = _ms(self.incarnations[one].id), _ms(self._last(other))
        if self._is_recorded(one) or self._is_recorded(other):
            return began > last
        # the order of earlier releases, unless the clocks contradict it
        return began >= last and (one.number, began) > (other.number, last) and one.number >= other.number

    def _last(self, kept: GenerationFolder) -> str:
        """Return the last known save id of the incarnation that a generation belongs to."""
        its = self.incarnations[kept].id
        return max(other.save_id for other, one in self.incarnations.items() if one.id == its)

    def _is_recorded(self, kept: GenerationFolder) -> bool:
        return self.incarnations[kept].id != kept.save_id

    def _went_on(self, kept: GenerationFolder, taken: GenerationFolder) -> bool:
        """Return True if `taken` is recorded as a later state of `kept`."""
        older, its = self.incarnations[kept].id, self.incarnations[taken]
        if older == its.id or not (self._is_recorded(kept) or self._is_recorded(taken)):
            return kept.number < taken.number
        return kept.number <= its.earlier.get(older, 0)

    def _where(self, kept: GenerationFolder) -> str:
        hosts = self.hosts[kept]
        shown = ", ".join(map(repr, hosts[:3])) + (", ..." if len(hosts) > 3 else "")
        return f"{kept} on host{'s' * (len(hosts) != 1)} {shown}"

    def _why_left(self, kept: GenerationFolder, taken: GenerationFolder, step: int | None) -> str:
        if step is not None:
            return f"step {step} was requested"
        knew = self._knew(taken, kept)
        if knew or self._began_later(taken, kept):
            told = "which knew of it" if knew else "by the clocks of the hosts"
            return f"a later run of the job, {told}, saved {taken} and had not restored this one"
        return f"{taken} is used instead, and its run of the job had not restored this one"


def _ms(save_id: str) -> int:
    """The time in a save id, in milliseconds since 1970."""
    return int(save_id[:12], 16)


def _when(save_id: str) -> str:
    return f"{datetime.fromtimestamp(_ms(save_id) / 1000, UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3] + " UTC"
