"""Stages of a pipeline, each saved in its own file or under its own key: reads them, and numbers
their layers consecutively.

Files are those of `torch.save`: stage_0.pt, stage_1.pt, ... Each stage usually numbers its layers
and its optimizer's parameters from 0. A key is the name of the file followed by the key in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

from reshard.errors import CorruptCheckpointError, NormalizationError
from reshard.formats.canonical import (
    Canonical,
    Hints,
    NameMap,
    StoredOptimizer,
    Tensors,
    check_names,
    find_scope,
    name_ids,
    params_beside,
    read_optimizer,
    settings_of,
    take_optimizer,
)
from reshard.formats.format import Format
from reshard.formats.fsdp1 import numbered, refuse_missing
from reshard.formats.sections import find_sections, is_beside, outside_sections
from reshard.formats.torch_save.reader import open_file
from reshard.state import KeyPath
from reshard.storage.base import Listing, Storage
from reshard.stored.checksums import CRC_OF_RECORDS
from reshard.stored.contents import Contents, Facts, merge
from reshard.stored.source import Files
from reshard.stored.tensor import StoredTensor
from reshard.stored.views import copies

_FILE = re.compile(r"(.*[\W\d_])?(stage|pp|pp_?rank|pipe(line)?_?(rank)?)", re.IGNORECASE)


@dataclass(frozen=True)
class StageFacts(Facts):
    """The stages of a pipeline, by number."""

    stages: Mapping[int, Contents]


def detect(storage: Storage, names: Listing) -> bool:
    """Return True if all files of the top folder are those of stages."""
    sections = numbered(names)
    if len(sections) != 1:
        return False
    ((section, ranks),) = sections.items()
    return bool(_FILE.fullmatch(section)) and min(ranks) < 2 <= len(ranks)


def is_later_stage(names: Listing) -> bool:
    """Return True for a single file that is named like a stage after the first."""
    return any(_FILE.fullmatch(section) and 0 not in at for section, at in numbered(names).items())


def open(files: Files) -> Contents:
    """Return the files of all stages. Raises CorruptCheckpointError if one is missing."""
    (found,) = numbered(files.listed).values()
    files.checking.leave_number_open()
    refuse_missing(files, "stage", found, max(found) + 1)
    stages = {stage: open_file("pipeline_stages", files[found[stage]], numbered=True) for stage in sorted(found)}
    parts = [(found[stage].rpartition(".")[0], contents) for stage, contents in stages.items()]
    return merge("pipeline_stages", parts, StageFacts(stages))


# Canonical names.
#
# stage 0: layers.0, layers.1          stage 1: layers.0, layers.1   ->   layers.2, layers.3
#
# If several stages have a value under one name, such as a shared buffer, it must be equal in all.
# Stages are separate files, or have separate keys in one checkpoint: {"stage_0": {"model": ...},
# ...} or {"model": {"stage_0": ...}, ...}.


_LAYER = re.compile(r"(?P<head>.*?)\b(?P<number>\d+)(?P<tail>\..+)", re.DOTALL)


_KEY = re.compile(r"(?:stage|pp|pipe|pipeline)(?:_?(?:rank|stage))?[_.-]?(\d+)")


def _stages_by_key(contents: Contents) -> dict[int, Contents] | None:
    """Return the stages of a checkpoint in which each has its own key, by number. None if there are
    fewer than two, or if tensors of a model or optimizer are outside.

    Raises CorruptCheckpointError if one between them is missing.
    """
    for at in (0, 1):
        found: dict[int, dict[str, KeyPath]] = {}
        outside = False
        for key in (*contents.tensors, *contents.aliases, *contents.objects):
            path = contents.path_of(key) or (key,)
            match = _KEY.fullmatch(str(path[at])) if len(path) > at + 1 else None
            if match is not None:
                found.setdefault(int(match[1]), {})[key] = (*path[:at], *path[at + 1 :])
            outside |= match is None and key in contents.tensors and not is_beside(str(path[0]))
        if len(found) > 1 and not outside:
            missing = sorted(set(range(min(found), max(found))) - set(found))
            if missing:
                raise CorruptCheckpointError(
                    f"stage {missing[0]} is missing: there are the stages {', '.join(map(str, sorted(found)))}"
                )
            return {n: replace(contents.only(found[n]), paths=found[n], containers={}) for n in sorted(found)}
    return None


@dataclass
class _SavedStage:
    number: int
    model: Tensors
    optimizers: list[StoredOptimizer]

    def layers(self) -> dict[str, set[int]]:
        """Return the layer numbers by container."""
        found: dict[str, set[int]] = {}
        for match in filter(None, map(_LAYER.fullmatch, self.model)):
            found.setdefault(match["head"], set()).add(int(match["number"]))
        return found


def normalize(contents: Contents, hints: Hints, what: str) -> Canonical:
    """Return the state of the full model.

    Raises NormalizationError if IDs have no names, and CorruptCheckpointError if stages contradict
    each other.
    """
    facts = contents.known(StageFacts)
    stages = [_read(number, one, hints) for number, one in facts.stages.items()]
    offsets = _offsets(stages, hints)
    result, held = Canonical(), dict[str, list[StoredTensor]]()
    for stage in stages:
        for name, tensor in stage.model.items():
            fqn = _globally(name, stage.number, offsets)
            held.setdefault(fqn, []).append(tensor)
            known = held[fqn][0]
            if known is not tensor and (fqn != name or ("layer_offsets" in hints and _LAYER.fullmatch(name))):
                raise NormalizationError(
                    f"two stages of {what} have {fqn!r}, "
                    f"in stage {stage.number} called {name!r}: "
                    "the hint 'layer_offsets' must give each stage layers of its own"
                )
            if known is not tensor and (known.spec.shape, known.spec.dtype) != (tensor.spec.shape, tensor.spec.dtype):
                raise CorruptCheckpointError(f"{fqn!r} is in several stages of {what}, with different shapes or dtypes")
    for fqn, tensors in held.items():
        shared = len(tensors) > 1
        result.model[fqn] = copies(fqn, tensors, partial(_refuse, fqn, what)) if shared else tensors[0]
    for stage in stages:
        for saved in stage.optimizers:
            named = name_ids(saved, hints, stage.number, what)
            _take(result, stage, named, saved.by_id, offsets)
    check_names(result)
    return result


def _refuse(fqn: str, what: str, where: str) -> NoReturn:
    raise NormalizationError(
        f"several stages of {what} have a tensor {fqn!r} with "
        f"different values, in {where}, and its name does not say "
        "which layer it is of: give it a name of its own in each "
        "stage, or open each file by its path"
    )


def _read(number: int, contents: Contents, hints: Hints) -> _SavedStage:
    sections = find_sections(contents)
    rename = NameMap([name for name, _ in sections.model], hints)
    model = {rename(name): leaf.value() for name, leaf in sections.model}
    optimizers = [read_optimizer(tree) for _, tree in sections.optimizers]
    for saved in optimizers:
        if not saved.by_id:
            saved.state = {rename(name): states for name, states in saved.state.items()}
    return _SavedStage(number, model, optimizers)


def _offsets(stages: list[_SavedStage], hints: Hints) -> dict[tuple[int, str], int]:
    """Return what to add to the layer numbers of a stage, by container; 0 if stages number layers
    as the full model does.

    Raises NormalizationError if the numbers are ambiguous.
    """
    given = hints.mapping("layer_offsets")
    out: dict[tuple[int, str], int] = {}
    seen: dict[str, set[int]] = {}
    for stage in stages:
        hinted = find_scope(given, stage.number)
        for head, numbers in stage.layers().items():
            known = seen.setdefault(head, set())
            before = max(known, default=-1) + 1
            begins_anew = min(numbers) < before
            offset = int(hinted) if hinted is not None else before * begins_anew
            both = known | {number + offset for number in numbers}
            has_gap = len(both) <= max(both) - min(both)
            # such as stages with several parts of the model, or with common layers
            if hinted is None and begins_anew and (has_gap or not numbers & known):
                hints.missing(
                    "layer_offsets",
                    f"{head!r} has layers {sorted(known)} in earlier stages and {sorted(numbers)} in stage "
                    f"{stage.number}, which may count as the whole model does, or by itself",
                    f"{{{stage.number}: {before - min(numbers) if numbers & known else 0}}}",
                )
            out[stage.number, head] = offset
            known |= both
    return out


def _globally(name: str, stage: int, offsets: Mapping[tuple[int, str], int]) -> str:
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    return f"{match['head']}{int(match['number']) + offsets.get((stage, match['head']), 0)}{match['tail']}"


def _take(
    result: Canonical, stage: _SavedStage, saved: StoredOptimizer, by_id: bool, offsets: Mapping[tuple[int, str], int]
) -> None:
    """Add a stage's optimizer. Names from a hint are those of the full model, or the stage's own."""
    mapped = {name: _globally(name, stage.number, offsets) for name in stage.model}
    names = list(saved.state)
    is_global = by_id and all(name in set(mapped.values()) for name in names)
    if not is_global and any(name not in mapped for name in names):
        lost = next(name for name in names if name not in mapped)
        raise NormalizationError(f"stage {stage.number} has no parameter {lost!r}, which its optimizer has a state of")
    one = Canonical()
    take_optimizer(one, saved, (lambda name: name) if is_global else (lambda name: mapped.get(name, name)))
    for fqn, states in one.state.items():
        for key, value in states.items():
            result.add_state(fqn, key, value)
    for group in one.groups:  # all stages have the same groups, each with its own parameters
        params_beside(result.groups, settings_of(group)).extend(group.get("params", ()))


def _claim(contents: Contents) -> Contents | None:
    stages = _stages_by_key(contents)
    return None if stages is None else replace(contents, facts=StageFacts(stages))


def _beside(contents: Contents) -> Iterator[str]:
    """Yield the keys of everything that is part of neither a stage's model nor its optimizers."""
    stages: dict[str, dict[str, KeyPath]] = {}
    for key in (*contents.tensors, *contents.objects):
        stage, *inside = contents.path_of(key)
        stages.setdefault(str(stage), {})[key] = tuple(inside)
    for paths in stages.values():
        yield from outside_sections(replace(contents.only(paths), paths=paths, containers={}))


FORMAT = Format(
    "pipeline_stages",
    checksums=CRC_OF_RECORDS,
    detect=detect,
    open=open,
    is_composite=True,
    claim=_claim,
    beside=_beside,
    names_ranks=True,
)
