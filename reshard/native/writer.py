"""Writes the native format as if the ranks of a layout had saved the state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import xxhash

from planners.geometry.layout import StateLayout, TensorLayout
from planners.geometry.mesh import Mesh, Replicate
from reshard.errors import FormatError
from reshard.live.fingerprints import pack_tally
from reshard.live.plain_data import encode_plain
from reshard.native import commit
from reshard.native.commit import Generation, Written
from reshard.native.data_file import BlockSums, recorded
from reshard.native.manifest import MANIFEST, FileRecord, entry_key, without_claim
from reshard.native.reader import NativeFacts
from reshard.ranks.global_state import OWN_TENSOR_BYTES, GlobalState, per_rank_name
from reshard.ranks.liveness import release_lease
from reshard.storage.base import Storage
from reshard.stored.contents import Contents
from reshard.stored.safetensors_header import encode_header
from reshard.stored.source import OnBytes
from reshard.stored.streaming import (
    FilePart,
    FilePlan,
    FormatWriter,
    Publication,
    Region,
    StreamedRows,
    Target,
    WrittenFile,
    fingerprint_parts,
    spread,
)
from reshard.stored.tensor import StoredTensor


class NativeWriter(FormatWriter):
    """Writes full tensors in files of limited size, or the files that the ranks of `onto` would
    have written."""

    takes_fingerprints = True
    _replaces: str | None = None

    def __init__(self, contents: Contents, target: Target) -> None:
        super().__init__(contents, target)
        self._table, self._own = self._values_of_ranks()
        onto = _with(target.onto, self._own)
        self.plan = spread([self.stored(name).spec for name in (*self.names, *self._own)], replace(target, onto=onto))
        self.save_id = commit.save_id_of(target.job_id)
        folder = commit.folder_of(self.save_id)
        files = []
        for rank in range(self.plan.world_size):
            specs = self.plan.layout.specs
            parts = [FilePart(specs[item.fqn], item.box) for item in self.plan.items(rank)]
            if parts:
                parts.sort(key=lambda part: -part.spec.itemsize)
                files.append(FilePlan(f"{folder}/{rank:05d}.safetensors", tuple(parts), rank))
        self.files = tuple(files)
        self.objects = {key: self._encoded(key, value, OWN_TENSOR_BYTES) for key, value in contents.objects.items()}

    def _values_of_ranks(self) -> tuple[dict[str, dict[int, Any]], dict[str, StoredTensor]]:
        """Return the manifest's table of per-rank values, and the tensors among them by hidden names."""
        table: dict[str, dict[int, Any]] = {}
        tensors: dict[str, StoredTensor] = {}
        for key, values in self.contents.per_rank.items():
            for rank, value in values.items():
                if isinstance(value, StoredTensor):
                    name = per_rank_name(key, rank)
                    tensors[name] = value.renamed(name)
                    row = {"tensor": name}
                else:
                    row = {"object": self._encoded(key, value, tensor_bytes=OWN_TENSOR_BYTES)}
                table.setdefault(key, {})[rank] = row
        return table, tensors

    def _encoded(self, key: str, value: Any, tensor_bytes: int = 0) -> Any:
        """Return plain data for the manifest. Records values that cannot be encoded in `refused`."""
        try:
            return encode_plain(value, tensor_bytes=tensor_bytes)
        except FormatError as error:
            self.refused[key] = str(error)
            return None

    def stored(self, name: str) -> StoredTensor:
        """Return the stored tensor of a name, an alias, or a per-rank value's hidden name."""
        return self._own[name] if name in self._own else super().stored(name)

    @contextmanager
    def claimed(self, storage: Storage) -> Iterator[None]:
        """Claim the generation within the block."""
        self._replaces = commit.counting(storage)
        commit.claim(storage, self.save_id)
        try:
            yield
        finally:
            release_lease(self.save_id)

    def write(self, storage: Storage, file: FilePlan, on_bytes: OnBytes) -> WrittenFile:
        """Stream one rank's file and its checksums."""
        storage.delete(file.name)
        storage.delete(f"{file.name}.sums")
        header = encode_header((entry_key(part.spec, part.box), part.spec.dtype, part.box.sizes) for part in file.parts)
        whole = xxhash.xxh3_128()
        with storage.create(file.name) as out, self.feed(file, on_bytes) as feed:
            sums = BlockSums(out, len(header) + file.nbytes, whole.update)
            sums.put(0, memoryview(header))
            for part in file.parts:
                region = self.region(part)
                feed.add(region, partial(self._put, sums, region))
            feed.finish()
            sums.close()
        record = recorded(storage, file.name, len(header), sums)
        facts = {"header_bytes": record.header_bytes, "sums": record.sums}
        return self.done(file.name, whole.hexdigest(), record.nbytes, facts)

    def _put(self, sums: BlockSums, region: Region, piece: StreamedRows) -> None:
        self.seen(region, piece)
        sums.put(sums.stop, piece.data)

    def finish(self, out: Publication) -> None:
        """Publish the manifest."""
        contents = self.contents
        census = GlobalState(
            self.plan.layout,
            self.objects,
            contents.paths,
            contents.containers,
            contents.aliases,
            self._table,
        )
        rank_of = {file.name: file.rank for file in self.files}
        written = {
            rank_of[name]: Written(FileRecord(name, row.nbytes, row.facts["header_bytes"], row.facts["sums"]))
            for name, row in out.done.items()
        }
        tally = pack_tally(fingerprint_parts(out.done.values()), census.tensors)
        native = contents.details(NativeFacts)  # keeps the time of the original save: `elastic` compares ages
        made = commit.begin() if native is None else native.manifest.created_unix_s
        generation = Generation(out.storage, self.save_id, made, census, self.plan, None, self._replaces)
        generation.publish(written, tally, out.check)
        for name in out.left:
            if name.startswith(f"{generation.folder}/"):
                out.storage.delete(name)
        generation.tidy()

    def occupied(self, names: Mapping[str, int]) -> str | None:
        """Return the manifest's name, or a folder whose manifest was lost, if there is one."""
        return MANIFEST if MANIFEST in names else next(iter(without_claim(names)), None)


def _with(onto: StateLayout | None, own: Mapping[str, StoredTensor]) -> StateLayout | None:
    """Return the layout with the per-rank tensors added. Each is written by its own rank, or by
    rank 0 if that rank is not in the layout."""
    if onto is None or not own:
        return onto
    more = {}
    for name, tensor in own.items():
        rank = int(name.rpartition("@rank")[2])
        mesh = Mesh({"rank": 1}, ranks=[rank if rank < onto.world_size else 0])
        more[name] = TensorLayout(tensor.spec, mesh, [Replicate()])
    return StateLayout({**onto, **more}, onto.world_size)
