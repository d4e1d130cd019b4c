"""Writes Megatron-core's `torch_dist` folders: DCP's files with the keys of Megatron, and what stands beside them.

latest_checkpointed_iteration.txt        names the folder, published last
iter_0000002/metadata.json, common.pt    which backend this is; everything that no tensor is
iter_0000002/.metadata, __0_*.distcp     a chunk for each layer and expert, as Megatron itself cuts them

Where the target's own name is that of such a folder, all files are in it, and nothing names it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from planners.geometry.box import Box
from planners.geometry.layout import TensorSpec
from reshard.formats.dcp.metadata import object_to_bytes
from reshard.formats.dcp.writer import DcpWriter
from reshard.formats.frameworks.megatron import LATEST
from reshard.formats.stored.contents import Contents, Facts
from reshard.formats.stored.writer import Done, FilePlan, FormatWriter, Part
from reshard.storage.base import Storage

__all__ = ["MegatronWriter", "ToSave"]

_ITERATION = re.compile(r"iter_\d{7,}|release")
_LAYERS = re.compile(r"(?:.*\.)?layers\.(?!\d)")
_EXPERTS = re.compile(r".*\bexperts\.experts\.(?!\d)")
_BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_COMMON = {"common_backend": "torch", "common_backend_version": 1}


@dataclass(frozen=True)
class ToSave(Facts):
    """What there is beside tensors."""

    common: Mapping[str, Any] = field(default_factory=dict)
    """All of `common.pt`."""
    empty: tuple[str, ...] = ()
    """Keys of objects that modules ask for and that hold nothing."""


class MegatronWriter(DcpWriter):
    """Files of a limited size, in the folder of one iteration."""

    format = "megatron"

    def __init__(self, contents: Contents, job_id: str, *, target: str, max_shard_bytes: int) -> None:
        """`target` is the path that the files go to, of which only the last part matters."""
        facts = contents.facts_of(ToSave)
        assert facts is not None
        self.common = facts.common
        is_inside = _ITERATION.fullmatch(target.rstrip("/").rpartition("/")[2]) is not None
        self.folder = "" if is_inside else f"iter_{int(self.common['iteration']):07d}/"
        first, *others = facts.empty or ("",)
        aliases = {**contents.aliases, **dict.fromkeys(others, first)}
        objects = {first: [None]} if first else {}
        FormatWriter.__init__(self, Contents(
            contents.format, contents.tensors, objects, aliases, warnings=contents.warnings,
            left_out=contents.left_out,
        ), job_id)  # fmt: skip
        parts = [part for name in self.names for part in _chunks(self.stored(name).spec)]
        groups = list(_grouped(parts, max_shard_bytes))
        self.files = tuple(
            FilePlan(f"{self.folder}__0_{job_id}_{number}.distcp", tuple(group), number)
            for number, group in enumerate(groups)
        )

    def finish(self, storage: Storage, done: Mapping[str, Done]) -> None:
        """Publish what describes the files, then the file that names their folder."""
        storage.publish(f"{self.folder}common.pt", object_to_bytes(dict(self.common)))
        storage.publish(f"{self.folder}metadata.json", json.dumps({**_BACKEND, **_COMMON}).encode())
        self.publish(storage, done, None, self.folder)
        if self.folder:
            storage.publish(LATEST, str(int(self.common["iteration"])).encode())

    def occupied(self, names: Mapping[str, int]) -> str | None:
        """The file that is published last."""
        wanted = LATEST if self.folder else ".metadata"
        return wanted if wanted in names else None


def _chunks(spec: TensorSpec) -> Iterator[Part]:
    """A chunk for each layer and expert of a stack, so that nobody must read more than those it has."""
    stacked = bool(_LAYERS.match(spec.fqn)) + bool(_EXPERTS.match(spec.fqn))
    leading, rest = spec.shape[:stacked], spec.shape[stacked:]
    for at in product(*map(range, leading)):
        yield Part(spec, Box((*at, *(0,) * len(rest)), (*(1,) * len(at), *rest)))


def _grouped(parts: list[Part], max_bytes: int) -> Iterator[list[Part]]:
    """The parts in order, in groups of at most `max_bytes`; at least one group."""
    group: list[Part] = []
    room = max_bytes
    for part in parts:
        if group and part.nbytes > room:
            yield group
            group, room = [], max_bytes
        group.append(part)
        room -= part.nbytes
    yield group
