"""What the writers of all formats share: a plan of files, each streamed from stored tensors, published at the end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec
import xxhash

from planners.geometry.box import Box
from planners.geometry.layout import StateLayout, TensorLayout, TensorSpec
from planners.geometry.mesh import Mesh
from planners.geometry.placement import Replicate
from planners.save.plan import SavePlan, plan_writes
from reshard.errors import DamagedCheckpointError
from reshard.formats.stored.contents import Contents
from reshard.formats.stored.streaming import Feed, Piece, Region, stream
from reshard.formats.stored.tensor import StoredTensor
from reshard.state.fingerprints import Partial, comparable, partial
from reshard.storage.base import Storage, Writer

__all__ = ["Done", "FilePlan", "FormatWriter", "HashingWriter", "Part", "fingerprint_parts", "grouped", "spread"]


@dataclass(frozen=True)
class Part:
    """A box of a tensor that a file holds."""

    spec: TensorSpec
    box: Box

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.box.numel * self.spec.itemsize


@dataclass(frozen=True)
class FilePlan:
    """A file of the target and what it holds, in order."""

    name: str
    parts: tuple[Part, ...]
    rank: int = 0
    """As if this rank had written it."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in it."""
        return sum(part.nbytes for part in self.parts)


class Done(msgspec.Struct, frozen=True):
    """A file that is written, whole and durable."""

    name: str
    """The name under which it is written; it may be renamed when all are done."""
    nbytes: int
    digest: str
    """XXH3-128 of the whole file, in hex."""
    facts: dict[str, Any] = {}
    """What `finish` needs to know of it."""


class FormatWriter(ABC):
    """Writes one state in one format: a plan of files, each of which can be written independently of the others.

    writer = SafetensorsWriter(contents, job_id, max_shard_bytes=...)
    done = {file.name: writer.write(storage, file, on_bytes) for file in writer.files}
    writer.finish(storage, done)           # publishes: before that, there is no checkpoint
    """

    format: str
    files: tuple[FilePlan, ...]
    left_out: tuple[str, ...]
    """Keys that the format cannot hold, or that have no canonical name."""
    refused: dict[str, str]
    """Objects that cannot be written, by key, and why: they must be left out on purpose."""

    def __init__(self, contents: Contents, job_id: str) -> None:
        """`job_id`, in hex, is in the names of files that are not to be taken for those of another job."""
        self.contents = contents
        self.job_id = job_id
        self.left_out = contents.left_out
        self.refused = {}
        self._prints: dict[str, Partial] = {}

    def claimed(self, storage: Storage) -> AbstractContextManager[None]:
        """While files are written: what others must see to know that these are somebody's."""
        return nullcontext()

    @abstractmethod
    def write(self, storage: Storage, file: FilePlan, on_bytes: Callable[[int], None]) -> Done:
        """Write one file, durably, from a stream of bounded memory."""

    @abstractmethod
    def finish(self, storage: Storage, done: Mapping[str, Done]) -> None:
        """Publish: from now on the target is a checkpoint. `done` is by the file's name in the plan."""

    @abstractmethod
    def occupied(self, names: Mapping[str, int]) -> str | None:
        """The file that shows that there is a checkpoint already, or None."""

    def region(self, part: Part) -> Region:
        """Where a part's elements come from."""
        return Region(self.stored(part.spec.fqn), part.box)

    @property
    def takes_fingerprints(self) -> bool:
        """Whether what is written is summed up: where the source has fingerprints, they must be the same."""
        return bool(self.contents.fingerprints)

    def feed(self, regions: Sequence[Region]) -> Feed:
        """The elements of regions, on their way into a file."""
        self._prints = {}
        return stream(regions, self._sum_up if self.takes_fingerprints else None)

    def _sum_up(self, region: Region, piece: Piece) -> None:
        spec = region.stored.spec
        found = partial(piece.tensor(), piece.box, spec.shape)
        self._prints[spec.fqn] = self._prints[spec.fqn] + found if spec.fqn in self._prints else found

    def done(self, name: str, nbytes: int, digest: str, facts: Mapping[str, Any] = MappingProxyType({})) -> Done:
        """A file that was written from `feed`, with what its elements add to fingerprints."""
        prints = {fqn: part.to_bytes().hex() for fqn, part in self._prints.items()}
        return Done(name, nbytes, digest, {**facts, "prints": prints} if prints else dict(facts))

    def compare_fingerprints(self, done: Mapping[str, Done]) -> None:
        """Raises DamagedCheckpointError unless what was written has the fingerprints that the source was saved with."""
        totals: dict[str, Partial] = {}
        for row in done.values():
            for fqn, part in fingerprint_parts(row).items():
                totals[fqn] = totals[fqn] + part if fqn in totals else part
        saved = self.contents.fingerprints or {}
        for fqn in self.names:
            spec, expected = self.stored(fqn).spec, saved.get(fqn)
            if expected is None:
                continue
            found = totals.get(fqn, Partial()).digest(spec.dtype, spec.shape)
            if comparable(expected, found) and expected != found:
                raise DamagedCheckpointError(
                    f"tensor {fqn!r}: what was written has the fingerprint {found}, but the source was saved with "
                    f"{expected}: its bytes or its manifest were changed. Nothing was published"
                )

    def stored(self, name: str) -> StoredTensor:
        """The stored tensor of one of `names`."""
        return self.contents.tensors[name]

    @property
    def names(self) -> list[str]:
        """The tensors that are stored, tied ones once."""
        return [name for name in self.contents.tensors if name not in self.contents.aliases]

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors in all files."""
        return sum(file.nbytes for file in self.files)


def fingerprint_parts(done: Done) -> dict[str, Partial]:
    """What a file adds to the fingerprints of tensors, by name."""
    return {fqn: Partial.from_bytes(bytes.fromhex(data)) for fqn, data in done.facts.get("prints", {}).items()}


class HashingWriter:
    """Passes bytes on to a writer, and takes the digest of all of them."""

    def __init__(self, out: Writer) -> None:
        self._out = out
        self._state = xxhash.xxh3_128()

    @property
    def nbytes(self) -> int:
        """How many bytes were written so far."""
        return self._out.nbytes

    def write(self, data: Any) -> None:
        """Append."""
        self._out.write(data)
        self._state.update(data)

    def digest(self) -> str:
        """Of all bytes so far, in hex."""
        return str(self._state.hexdigest())


def grouped(specs: Sequence[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    """The tensors in order, in groups of at most `max_bytes`; one that is larger has a group of its own."""
    groups: list[list[TensorSpec]] = [[]]
    room = max_bytes
    for spec in specs:
        if groups[-1] and spec.nbytes > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(spec)
        room -= spec.nbytes
    return groups


def spread(specs: Sequence[TensorSpec], onto: StateLayout | None, max_bytes: int) -> SavePlan:
    """Who writes what: the ranks of `onto`; without it, one rank for each group of whole tensors of `max_bytes`."""
    if onto is not None:
        return plan_writes(onto)
    layouts = {}
    for rank, group in enumerate(grouped(specs, max_bytes)):
        mesh = Mesh({"file": 1}, ranks=[rank])
        layouts.update({spec.fqn: TensorLayout(spec, mesh, [Replicate()]) for spec in group})
    return plan_writes(StateLayout({spec.fqn: layouts[spec.fqn] for spec in specs}))
