"""One file of `torch.save`, nested as the state was: `torch.load(path, weights_only=True)` reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from planners.geometry.box import Box
from reshard.formats.stored.contents import Contents
from reshard.formats.stored.streaming import Feed, Region
from reshard.formats.stored.writer import Done, FilePlan, FormatWriter, HashingWriter, Part
from reshard.formats.torch_save.crc32 import written_crc
from reshard.formats.torch_save.zip_writer import (
    ArchiveWriter,
    TensorStub,
    begin_archive,
    end_archive,
    pickled_state,
    unknown_objects,
)
from reshard.state.tree import unflatten
from reshard.storage.base import Storage

__all__ = ["TorchSaveWriter", "tensor_record", "write_archive"]


class TorchSaveWriter(FormatWriter):
    """Everything in one archive. Tied tensors share their memory when they are loaded."""

    format = "torch_save"

    def __init__(self, contents: Contents, job_id: str, *, file: str) -> None:
        """`file` is the name of the file."""
        super().__init__(contents, job_id)
        self.left_out += tuple(contents.per_rank)
        self.refused = dict.fromkeys(unknown_objects(contents.objects), "its class is not known here")
        specs = [self.stored(name).spec for name in self.names]
        self.files = (FilePlan(file, tuple(Part(spec, Box.full(spec.shape)) for spec in specs)),)

    def write(self, storage: Storage, file: FilePlan, on_bytes: Callable[[int], None]) -> Done:
        """Stream the archive."""
        numbers = {part.spec.fqn: number for number, part in enumerate(file.parts)}
        name = storage.staged(file.name, self.job_id)
        regions = [self.region(part) for part in file.parts]
        return self.done(*write_archive(storage, name, self._nest(numbers), regions, self.feed(regions), on_bytes))

    def _nest(self, numbers: Mapping[str, int]) -> Any:
        """The state, in the order in which it was saved, with a stub for each tensor."""
        contents, paths = self.contents, self.contents.paths
        leaves: dict[str, Any] = {}
        for name in (*contents.tensors, *contents.aliases):
            kept = contents.aliases.get(name, name)
            leaves[name] = TensorStub((contents.tensors.get(name) or contents.tensors[kept]).spec, numbers[kept])
        leaves.update(contents.objects)
        ordered = [key for key in paths if key in leaves] + [key for key in leaves if key not in paths]
        return unflatten({paths.get(key, (key,)): leaves[key] for key in ordered}, contents.containers)

    def finish(self, storage: Storage, done: Mapping[str, Done]) -> None:
        """Put the file in its place, over an older one."""
        for name, written in done.items():
            storage.unstage(written.name, name)

    def occupied(self, names: Mapping[str, int]) -> str | None:
        """The file itself; others beside it are in nobody's way."""
        return next((file.name for file in self.files if file.name in names), None)


def write_archive(
    storage: Storage,
    name: str,
    value: Any,
    regions: Sequence[Region],
    feed: Feed,
    on_bytes: Callable[[int], None],
) -> tuple[str, int, str]:
    """Stream an archive of `value`, in which the stub of number n stands for the tensor of the nth region.

    Returns its name, length and digest.
    """
    storage.delete(name)
    with storage.create(name) as raw, feed:
        out = HashingWriter(raw)
        archive = begin_archive(out.write, pickled_state(value))
        for number, region in enumerate(regions):
            tensor_record(archive, f"data/{number}", feed, region, on_bytes)
        end_archive(archive)
        done = out.nbytes, out.digest()
    return name, *done


def tensor_record(
    archive: ArchiveWriter, name: str, feed: Feed, region: Region, on_bytes: Callable[[int], None]
) -> None:
    """The data of one tensor as a record of an archive, with the checksums that came with it, if it has any."""

    def pieces() -> Any:
        for piece in feed.take(region):
            yield piece.data
            on_bytes(len(piece.data))

    archive.record(name, region.nbytes, pieces(), written_crc(region))
