"""Hugging Face's files: `model.safetensors`, or numbered ones of a limited size with an index."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from planners.geometry.box import Box
from reshard.formats.safetensors.header import encode_header
from reshard.formats.stored.contents import Contents
from reshard.formats.stored.writer import Done, FilePlan, FormatWriter, HashingWriter, Part, grouped
from reshard.state.dtypes import safetensors_code
from reshard.storage.base import Storage

__all__ = ["SafetensorsWriter"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SUFFIXES = (".safetensors", ".safetensors.index.json")


class SafetensorsWriter(FormatWriter):
    """Tensors only. Of tied tensors one is stored; the names of the others stand in the files' metadata."""

    format = "safetensors"

    def __init__(self, contents: Contents, job_id: str, *, max_shard_bytes: int) -> None:
        """Raises FormatError for a dtype that safetensors does not have."""
        super().__init__(contents, job_id)
        specs = [self.stored(name).spec for name in self.names]
        for spec in specs:
            safetensors_code(spec.dtype)
        groups = grouped(specs, max_shard_bytes)
        count = len(groups)
        self.files = tuple(
            FilePlan(
                _SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors",
                # large elements first, so that all are aligned
                tuple(Part(spec, Box.full(spec.shape)) for spec in sorted(group, key=lambda s: -s.itemsize)),
            )
            for number, group in enumerate(groups, 1)
        )
        self.left_out += (*contents.per_rank, *contents.objects)

    def write(self, storage: Storage, file: FilePlan, on_bytes: Callable[[int], None]) -> Done:
        """Stream one file."""
        name = storage.staged(file.name, self.job_id)
        storage.delete(name)
        mine = {part.spec.fqn for part in file.parts}
        tied = {alias: kept for alias, kept in self.contents.aliases.items() if kept in mine}
        regions = [self.region(part) for part in file.parts]
        with storage.create(name) as raw, self.feed(regions) as feed:
            out = HashingWriter(raw)
            out.write(encode_header(((part.spec.fqn, part.spec.dtype, part.spec.shape) for part in file.parts), tied))
            for region in regions:
                for piece in feed.take(region):
                    out.write(piece.data)
                    on_bytes(len(piece.data))
            done = out.nbytes, out.digest()
        return self.done(name, *done)

    def finish(self, storage: Storage, done: Mapping[str, Done]) -> None:
        """Give the files their names, and publish the index last."""
        old = [n for n in storage.list() if "/" not in n and n.endswith(_SUFFIXES)]
        for name in old:
            if name not in done:
                storage.delete(name)
        for name, written in done.items():
            storage.unstage(written.name, name)
        if len(done) > 1:
            index = {
                "metadata": {"total_size": self.total_bytes},
                "weight_map": {part.spec.fqn: file.name for file in self.files for part in file.parts},
            }
            storage.publish(_INDEX, msgspec.json.format(msgspec.json.encode(index), indent=2))

    def occupied(self, names: Mapping[str, int]) -> str | None:
        """An index or a file of tensors."""
        return next((n for n in names if "/" not in n and n.endswith(_SUFFIXES)), None)
