"""Whether ranks that hold the same have the same values, at a cost that does not grow with the ranks.

What a layout says to be held by the same ranks is summed up in one digest, so a rank tells a few of them, mostly one
for what all hold and one for its shards. A digest travels up until all of its holders have been heard, and is then
forgotten. Only where some differ do ranks tell their tables of keys, of these alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
import xxhash

from planners.geometry.layout import TensorLayout
from planners.geometry.layout_forms import Form, ProductForm
from planners.geometry.placement import Replicate
from reshard.control.group import Group
from reshard.errors import KeyMismatchError, format_ranks
from reshard.state.fingerprints import partials
from reshard.state.live_state import LiveTensor
from reshard.state.memory.arrays import as_array, row_major_bytes

__all__ = ["Table", "agree_on_table", "join", "judge", "told"]

_ANYBODY = 0
"""Holders of which it is not known how many there are: their digest travels all the way."""


class _Heard(msgspec.Struct, frozen=True, array_like=True):
    """What some ranks have told."""

    digests: dict[bytes, tuple[bytes, int, int]]
    """By a digest of who the holders are: one of what they hold (empty if they differ), how many were heard, and how
    many there are."""
    objects: bytes
    """A digest of all objects; empty if ranks have others, or other values."""


@dataclass
class Table:
    """What this rank compares with others: a digest for each key, by who holds the key."""

    on_device: bool = False
    """Whether a tensor of any rank lies on a device: then all compare fingerprints, which devices compute where the
    elements are, in the place of hashes of the bytes."""
    rows: dict[bytes, dict[str, bytes]] = field(default_factory=dict)
    counts: dict[bytes, int] = field(default_factory=dict)
    """Of holders; `_ANYBODY` if it is not known."""
    _known: dict[int, tuple[ProductForm, bytes, int]] = field(default_factory=dict)
    """By the identity of a form, of which a state has few, and which may name many ranks: who holds the same there."""

    def add_object(self, key: str, digest: bytes) -> None:
        """A value that anybody may have under that key."""
        holders = xxhash.xxh3_64_digest(key.encode())
        self.rows.setdefault(holders, {})[key] = digest
        self.counts[holders] = _ANYBODY

    def add_tensors(
        self, tensors: Mapping[str, LiveTensor], layouts: Mapping[str, TensorLayout], rank: int, world_size: int
    ) -> None:
        """The parts of tensors that other ranks may hold, too.

        `layouts`: of what all ranks hold, where it is known; `world_size`: how many ranks there are.
        """
        copies = {key: _replicas(tensor, rank, world_size) for key, tensor in tensors.items()}
        digests = _digests({name: t for of in copies.values() for name, t in of.items()}, on_device=self.on_device)
        for key, of in copies.items():
            layout = layouts.get(key)
            for name in of:
                self._add(name, digests[name], None if layout is None else layout.form, rank)

    def _add(self, name: str, digest: bytes, form: Form | None, rank: int) -> None:
        if not (isinstance(form, ProductForm) and rank in form.mesh):
            self.add_object(name, digest)
            return
        if id(form) not in self._known:
            self._known[id(form)] = form, *_holders(form, rank)
        _, holders, count = self._known[id(form)]
        self.rows.setdefault(holders, {})[name] = digest
        self.counts[holders] = count

    def heard(self, objects: bytes) -> _Heard:
        """What this rank tells."""
        sums = {
            holders: (xxhash.xxh3_128_digest(msgspec.msgpack.encode(sorted(of.items()))), 1, self.counts[holders])
            for holders, of in self.rows.items()
            if self.counts[holders] != 1
        }
        return _Heard(sums, objects)


def agree_on_table(table: Table, objects: Mapping[str, Any], group: Group) -> bool:
    """Collective: whether all ranks have the same objects.

    Raises KeyMismatchError, alike on every rank, where a key of the table has two values.
    """
    return judge(table, group.merge(told(table, objects), join, "whether ranks hold the same"), group)


def told(table: Table, objects: Mapping[str, Any]) -> bytes:
    """What this rank tells of its table, and of objects or their digests, to be combined by `join` for `judge`."""
    digest = xxhash.xxh3_128_digest(msgspec.msgpack.encode(sorted(objects.items())))
    return msgspec.msgpack.encode(table.heard(digest))


def judge(table: Table, joined: bytes, group: Group) -> bool:
    """`agree_on_table`, where it is known already what all ranks told. Collective only where some hold others."""
    heard = msgspec.msgpack.decode(joined, type=_Heard)
    differ = [holders for holders, (digest, *_) in heard.digests.items() if not digest]
    if differ:
        _refuse({key: digest for holders in differ for key, digest in table.rows.get(holders, {}).items()}, group)
    return bool(heard.objects)


def join(parts: list[bytes]) -> bytes:
    """What several told, in one; again for `join`."""
    heard_of = [msgspec.msgpack.decode(part, type=_Heard) for part in parts]
    digests: dict[bytes, tuple[bytes, int, int]] = {}
    for one in heard_of:
        for holders, (digest, heard, count) in one.digests.items():
            first, before, _ = digests.get(holders, (digest, 0, count))
            digests[holders] = digest if digest == first else b"", before + heard, count
    whole = {holders: row for holders, row in digests.items() if not row[0] or row[1] != row[2]}
    objects = {one.objects for one in heard_of}
    return msgspec.msgpack.encode(_Heard(whole, objects.pop() if len(objects) == 1 else b""))


def _refuse(mine: Mapping[str, bytes], group: Group) -> None:
    """Raises KeyMismatchError, alike on every rank, with the keys that really differ."""
    values: dict[str, dict[bytes, list[int]]] = {}
    for data, ranks in group.parties(msgspec.msgpack.encode(mine)).items():
        for key, digest in msgspec.msgpack.decode(data, type=dict[str, bytes]).items():
            values.setdefault(key, {}).setdefault(digest, []).extend(ranks)
    differing = {key.partition("\0")[0]: list(by.values()) for key, by in values.items() if len(by) > 1}
    if differing:
        shown = "; ".join(
            f"{key!r} ({' / '.join(format_ranks(r) for r in by)})" for key, by in list(differing.items())[:20]
        )
        raise KeyMismatchError(
            f"{len(differing)} values differ between ranks under one key: {shown}. Wrap what is each rank's own in "
            "reshard.PerRank(value), or give it a key per rank"
        )


def _holders(form: ProductForm, rank: int) -> tuple[bytes, int]:
    """A digest of which ranks hold what this rank holds, and how many they are."""
    copied = [isinstance(placement, Replicate) for placement in form.placements]
    place = [None if is_copied else at for is_copied, at in zip(copied, form.mesh.coordinate(rank))]
    count = math.prod(size for size, is_copied in zip(form.mesh.shape, copied) if is_copied)
    return xxhash.xxh3_64_digest(f"{form.mesh} {copied} {place}".encode()), count


def _replicas(tensor: LiveTensor, rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """The local tensors that other ranks may hold, too, each under a name that says which elements it is."""
    if tensor.is_meta:
        return {}
    if not tensor.is_sharded:
        return {tensor.key: tensor.value}
    form = tensor.form
    if not isinstance(form, ProductForm):
        return {}
    copied = any(isinstance(placement, Replicate) for placement in form.placements)
    if not copied and form.mesh.size == world_size:
        return {}  # nobody else holds any of it
    parts = form.parts(tensor.spec.shape, rank)
    return {f"{tensor.key}\0{part.dims}": t for t, part in zip(tensor.local, parts) if t.numel()}


def _digests(tensors: Mapping[str, torch.Tensor], *, on_device: bool) -> dict[str, bytes]:
    if on_device:
        found = partials((t, None, None) for t in tensors.values())
        return {name: one.to_bytes() for name, one in zip(tensors, found, strict=True)}
    return {name: xxhash.xxh3_128_digest(row_major_bytes(as_array(t))) for name, t in tensors.items()}
