"""Folders in which every stage of a pipeline saved its own state by `torch.save`: stage_0.pt, stage_1.pt ...

Each stage usually numbers its layers and its optimizer's parameters from 0. The keys are those of each file, behind the
file's name; `reshard.formats.pipeline_stages.canonical` numbers them through.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from reshard.errors import DamagedCheckpointError
from reshard.formats.fsdp1.files import numbered
from reshard.formats.torch_save.reader import contents_of, read_torch_file
from reshard.storage.base import Storage
from reshard.stored.checksums import CRC_OF_RECORDS
from reshard.stored.contents import Contents, Facts, merge
from reshard.stored.source import Files

__all__ = ["StageFacts", "checksums", "detect", "looks_for", "name", "open"]


name = "pipeline_stages"
looks_for = "stage_<n>.pt, or pp_rank_<n>.pt"
checksums = CRC_OF_RECORDS

_STAGE = re.compile(r".*(stage|pp|pp_?rank|pipe(line)?_?(rank)?)", re.IGNORECASE)


@dataclass(frozen=True)
class StageFacts(Facts):
    """The stages of a pipeline, by number."""

    stages: Mapping[int, Contents]


def detect(storage: Storage, names: Mapping[str, int]) -> bool:
    """Whether all files of the top folder are those of stages, numbered from 0."""
    sections = numbered(names)
    if len(sections) != 1:
        return False
    ((section, ranks),) = sections.items()
    return bool(_STAGE.fullmatch(section)) and 0 in ranks and len(ranks) > 1


def open(files: Files) -> Contents:
    """The files of all stages. Raises DamagedCheckpointError if one in the middle is missing."""
    storage, names = files.storage, files.listed
    ((_, found),) = numbered(names).items()
    missing = sorted(set(range(max(found) + 1)) - set(found))
    if missing:
        raise DamagedCheckpointError(f"{storage.url}: the file of stage {missing[0]} is missing; there is {found[0]}")
    stages = {stage: contents_of(name, {(): read_torch_file(files[found[stage]])}) for stage in sorted(found)}
    parts = [(found[stage].rpartition(".")[0], contents) for stage, contents in stages.items()]
    return merge(name, parts, StageFacts(stages))
