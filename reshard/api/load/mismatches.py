"""The whole truth about keys that do not belong together, on all ranks; and whether the caller allows it."""

from __future__ import annotations

import fnmatch
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import xxhash

from reshard.api.load.key_words import are_by_number, section, shifted
from reshard.api.load.matching import Match
from reshard.api.load.options import LoadOptions, Wording
from reshard.checkpoint.checkpoint import Checkpoint
from reshard.control.flags import either, pack_flags, unpack_flags
from reshard.control.global_layout import Described, describe, join_layouts, settle_forms
from reshard.control.group import Group
from reshard.errors import CheckpointError, KeyMismatchError, format_ranks
from reshard.formats.native.reader import NativeFacts
from reshard.state.targets import Targets

__all__ = ["Mismatches", "Truth", "hear_all"]


class Truth(NamedTuple):
    """What was found out about keys that do not belong together, and is no error."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    outside: tuple[str, ...]
    """Missing, but outside of what a checkpoint that is declared a subset claims to have."""


class _Said(msgspec.Struct, frozen=True, array_like=True):
    """What ranks tell the others about their matches."""

    used: dict[bytes, bytes]
    """A bit for each name of the checkpoint, compressed, by a digest of what they load from: who loads from something
    else has no say about its names."""
    saves: list[tuple[str, str]]
    """URL and id of the saves that they have opened, where all ranks open one."""
    fits: bool
    """Whether no rank misses anything, or has anything that is mismatched."""
    ambiguous: bool
    """Whether the placements of some tensor do not tell how it is cut."""


@dataclass(frozen=True)
class Mismatches:
    """What does not fit on any rank."""

    used: frozenset[str]
    """The names that the target of any rank has."""
    sharers: int
    """How many ranks are on this rank's machine."""
    missing: Mapping[str, list[int]]
    """Key -> the ranks that miss it."""
    mismatched: Mapping[str, list[int]]
    alike: bool
    """Whether all ranks load from the same."""

    def judge(
        self, match: Match, options: LoadOptions, checkpoint: Checkpoint, targets: Targets, group: Group
    ) -> Truth:
        """The keys that do not belong together, if strictness allows them all.

        Raises KeyMismatchError, on every rank where all load from the same, with every key of any rank that strictness
        does not allow to be missing, unexpected or mismatched.
        """
        claims = _claims(checkpoint)
        truth = Truth(
            tuple(key for key in match.missing if claims(key)),
            tuple(name for name in match.names if name not in self.used),
            tuple(key for key in match.missing if not claims(key)),
        )
        missing = {k: its for k, its in self.missing.items() if claims(k) and options.mode_of(k) != "partial"}
        unexpected = [key for key in truth.unexpected if options.mode_of(key) == "strict"]
        if not (missing or unexpected or self.mismatched):
            return truth
        kind = options.wording.mismatch_error if self.mismatched else KeyMismatchError
        error = kind(self._message(match, missing, unexpected, checkpoint, targets, group, options.wording))
        if self.alike:
            group.refuse(error)
        raise error

    def _message(
        self,
        match: Match,
        missing: Mapping[str, list[int]],
        unexpected: list[str],
        checkpoint: Checkpoint,
        targets: Targets,
        group: Group,
        wording: Wording,
    ) -> str:
        lines = [f"{checkpoint.url} does not fit what is to be loaded:"]
        # what has found its counterpart is no guess for another
        known = [name for name in (*match.names, *checkpoint.aliases) if name not in self.used]
        kinds = _kinds(match, checkpoint, targets)
        where, fixes = _on_ranks(missing, group), []
        moved = None if match.mapped else shifted(missing, known)
        if moved is not None:
            lines.append(f"  {moved.what}")
            where = {key: text for key, text in where.items() if key not in moved.names}
            unexpected = [name for name in unexpected if name not in moved.names.values()]
            fixes += [moved.fix] if wording == Wording() else []
        by_number = wording == Wording() and are_by_number(where, known)
        if by_number:
            fixes.append(
                "states are saved by names: reshard.optimizer_destinations(model, optimizer, path) has them so"
            )
        lines += section(wording.missing, where, [] if by_number else known, kinds, match.mapped)
        lines += section(
            "unexpected, since the target does not have them",
            dict.fromkeys(unexpected, ""),
            [] if by_number else [*missing],
        )
        lines += section(wording.mismatched, _on_ranks(self.mismatched, group), ())
        if missing or unexpected:
            fixes.append(wording.allow)
        if any("saved as" in line for line in self.mismatched):
            fixes.append("dtype_policy='cast' converts, dtype_policy='saved' keeps the saved dtype")
        return "\n".join(lines + [f"  ({'; '.join(fixes)})"] * bool(fixes))


def hear_all(match: Match, group: Group, checkpoint: Checkpoint, targets: Targets) -> Mismatches:
    """Collective: what fits on no rank, and what does not fit on some. Targets of which one rank alone cannot tell how
    they are cut know it from now on.

    A bit for each name of the checkpoint travels, compressed, and only where something does not fit, what that is.

    Raises CheckpointError, alike on every rank, if ranks have opened different saves at one path; LayoutError if not
    even all ranks together can tell how a tensor is cut.
    """
    if group.world_size == 1:
        here = list(group.ranks)
        return Mismatches(
            match.used, 1, dict.fromkeys(match.missing, here), dict.fromkeys(match.mismatched, here), True
        )
    used = pack_flags([name in match.used for name in match.names])
    source = xxhash.xxh3_64_digest(msgspec.msgpack.encode((match.names, checkpoint.contents.subset)))
    ambiguous = {key: targets.tensors[key] for key in match.tensors if targets.tensors[key].is_ambiguous}
    fits = not match.missing and not match.mismatched
    mine = _Said({source: used}, [_save_of(checkpoint)], fits, bool(ambiguous))
    merged, sharers = group.merge_and_count(msgspec.msgpack.encode(mine), _join, "what fits", socket.gethostname())
    said = msgspec.msgpack.decode(merged, type=_Said)
    _refuse_different_saves(said.saves, group)
    if said.ambiguous:
        cuts = group.parties(msgspec.json.encode(describe(ambiguous)))
        layouts = join_layouts((msgspec.json.decode(cut, type=Described), ranks) for cut, ranks in cuts.items())
        settle_forms(ambiguous, layouts, group.ranks[group.rank])
    flags = unpack_flags(said.used[source], len(match.names))
    missing: dict[str, list[int]] = {}
    mismatched: dict[str, list[int]] = {}
    odd = {} if said.fits else group.parties(msgspec.msgpack.encode((list(match.missing), list(match.mismatched))))
    for data, ranks in odd.items():
        for keys, ranks_of in zip(
            msgspec.msgpack.decode(data, type=tuple[list[str], list[str]]), (missing, mismatched)
        ):
            for key in keys:
                ranks_of.setdefault(key, []).extend(ranks)
    return Mismatches(
        frozenset(name for name, flag in zip(match.names, flags) if flag),
        sharers,
        {key: sorted(ranks) for key, ranks in missing.items()},
        {key: sorted(ranks) for key, ranks in mismatched.items()},
        len(said.used) == 1,
    )


def _save_of(checkpoint: Checkpoint) -> tuple[str, str]:
    """A path, and which save was found there; of a run, in which a newer one may have been completed meanwhile, too."""
    native = checkpoint.contents.facts_of(NativeFacts)
    if checkpoint.url.startswith("memory:"):  # each process has memory of its own
        return "", ""
    save_id = native.manifest.save_id if native is not None else ""
    if checkpoint.run:
        return checkpoint.run, f"{checkpoint.url.removeprefix(checkpoint.run)} {save_id}".strip()
    return (checkpoint.url, save_id) if save_id else ("", "")


def _join(parts: list[bytes]) -> bytes:
    used: dict[bytes, bytes] = {}
    said = [msgspec.msgpack.decode(part, type=_Said) for part in parts]
    for source, bits in ((source, bits) for one in said for source, bits in one.used.items()):
        used[source] = either([used.get(source, bits), bits])
    saves = dict.fromkeys(save for one in said for save in one.saves)
    return msgspec.msgpack.encode(
        _Said(used, list(saves), all(one.fits for one in said), any(one.ambiguous for one in said))
    )


def _refuse_different_saves(opened: Iterable[tuple[str, str]], group: Group) -> None:
    saves: dict[str, str] = {}
    for url, save_id in opened:
        if saves.setdefault(url, save_id) != save_id:
            group.refuse(
                CheckpointError(
                    f"{url} is not the same checkpoint for all ranks: some have opened the save {saves[url]}, others "
                    f"{save_id}. It was replaced just then, or is a folder of each machine: load again, from one place"
                )
            )


def _on_ranks(keys: Mapping[str, list[int]], group: Group) -> dict[str, str]:
    """Each key, and on which ranks it is, where it is not on all."""
    return {key: "" if len(ranks) == group.world_size else f"   ({format_ranks(ranks)})" for key, ranks in keys.items()}


def _claims(checkpoint: Checkpoint) -> Callable[[str], bool]:
    """Whether a checkpoint ought to have a key: it ought to have all, unless it was declared a subset."""
    globs = checkpoint.contents.subset
    return lambda key: globs is None or any(fnmatch.fnmatchcase(key, glob) for glob in globs)


def _kinds(match: Match, checkpoint: Checkpoint, targets: Targets) -> dict[str, str]:
    """What is under the names of keys that this rank misses, in words, where it is of another kind than its target."""
    what = {True: "a tensor", False: "each rank's own value"}
    kinds = {name: what[name in checkpoint] for name in match.names if name not in checkpoint.objects}
    kinds |= dict.fromkeys(checkpoint.objects, "a plain value")
    return {
        key: kinds[key]
        for key in match.missing
        if key in kinds and (kinds[key] == "a tensor") != (key in targets.tensors)
    }
