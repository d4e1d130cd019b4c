"""What all ranks of a job hold together, and whether replicas have the same values."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import torch
import xxhash

from planners.geometry.arrays import grouped
from planners.geometry.layout import ProductForm, StateLayout, TensorLayout, TensorSpec
from planners.geometry.mesh import Mesh, Replicate
from planners.units import format_some
from reshard.errors import (
    FormatError,
    KeyMismatchError,
    LayoutError,
    ReplicaDriftError,
    format_names,
    format_ranks,
)
from reshard.live.dtypes import as_array, row_major_bytes
from reshard.live.fingerprints import partials
from reshard.live.plain_data import check_text, encode_plain
from reshard.live.state import LiveState
from reshard.live.tensors import LiveTensor, is_sharded, is_tensor
from reshard.ranks.global_layout import (
    STAGES_DIFFER,
    Described,
    check_nests,
    describe,
    join_aliases,
    join_layouts,
    resolve_layouts,
)
from reshard.ranks.group import Group
from reshard.state import KeyPath, State, key_of, path_from_json, path_to_json

# Each rank describes its part of the state. If all descriptions are equal, as under FSDP, each rank
# sends only a digest. If they differ, as between pipeline stages, each distinct one is sent once.
# Every rank then joins the same descriptions in the same way.


OWN_TENSOR_BYTES = 1 << 20
"""Most bytes of tensors within one per-rank value, such as random states. They are stored in the manifest."""


def check_globs(select: Iterable[str], census: GlobalState, state: Any) -> None:
    """Raise KeyMismatchError for a glob that matches no key of any rank, and if none is left. What
    globs with `!` omitted is not there."""
    there = f"The state's top-level keys: {format_names(state, 5)}" if isinstance(state, Mapping) else ""
    keys = [*census.tensors, *census.objects, *census.per_rank, *census.aliases]
    for glob in select:
        if not any(glob.startswith("!") or fnmatch.fnmatchcase(key, glob) for key in keys):
            raise KeyMismatchError(f"select={glob!r} selects no key on any rank: nothing was saved. {there}")


class _Description(msgspec.Struct, frozen=True):
    """A rank's state without its values, as it is sent. Equal on ranks that hold the same."""

    tensors: Described
    objects: list[str]
    per_rank: list[str]
    paths: dict[str, list[Any]]
    containers: list[tuple[list[Any], str]]
    aliases: dict[str, str]
    empty: list[str]
    """Sharded tensors of which this rank holds no element, so that it does not know whether they
    are tied."""
    on_device: bool
    """Whether any tensor is elsewhere than in the memory of the CPU."""


@dataclass(frozen=True)
class GlobalState(State[TensorLayout]):
    """What all ranks hold together. Equal on every rank, but for what only the first one needs.
    Objects are JSON data.

    `per_rank`: key -> rank -> `{"tensor": name in the layout}` or, on the first rank only,
    `{"object": JSON data}`.
    """

    tensors: StateLayout
    on_device: bool = False
    """Whether a tensor of any rank is on a device."""


@dataclass(frozen=True)
class LocalState:
    """The description of one rank's state."""

    state: LiveState
    objects: dict[str, Any]
    """Objects that are the same on all ranks, as JSON data."""
    said: _Description
    description: bytes
    """`said` as JSON, since keys may be long ints. Equal on ranks that hold the same kind of thing."""

    @classmethod
    def of(cls, state: LiveState) -> LocalState:
        """Raises FormatError for an object that is no plain data, naming its key."""
        for key in (*state.paths, *map(key_of, state.containers)):
            check_text(key)
        objects = {key: _encoded(key, value) for key, value in state.objects.items()}
        said = _Description(
            tensors=describe(state.tensors),
            objects=list(objects),
            per_rank=list(state.per_rank),
            paths={key: path_to_json(path) for key, path in state.paths.items()},
            containers=[(path_to_json(path), kind) for path, kind in state.containers.items()],
            aliases=dict(state.aliases),
            empty=[key for key, tensor in state.tensors.items() if tensor.is_elsewhere],
            on_device=any_on_device(state.tensors.values()),
        )
        return cls(state, objects, said, msgspec.json.encode(said))


def global_state_of(holdings: LocalState, group: Group, answers: Iterable[tuple[bytes, Sequence[int]]]) -> GlobalState:
    """The census, without objects, out of the descriptions of all ranks; collective where any has
    values of its own. Whether values are equal is not known yet: see `agree_on_values`. Raises
    LayoutError, on every rank, if ranks disagree about a tensor's shape, dtype, or placement."""
    parties = [
        (holdings.said, holdings.state, ranks) if data == holdings.description else (*_decoded(data), ranks)
        for data, ranks in answers
    ]
    states = [state for _, state, _ in parties]
    has_own = any(said.per_rank for said, _, _ in parties)
    per_rank, own = _own_values(holdings.state, group) if has_own else ({}, {})
    paths: dict[str, KeyPath] = {}
    containers: dict[KeyPath, str] = {}
    for state in states:
        for key, path in state.paths.items():
            if paths.setdefault(key, path) != path:
                raise KeyMismatchError(f"the key {key!r} belongs to different places of the state on different ranks")
        for path, kind in state.containers.items():
            containers.setdefault(path, kind)
    if len(states) > 1:
        check_nests(states)
    aliases = join_aliases((d.tensors.tensors, d.aliases, d.empty) for d, _, _ in parties)
    tensors = dict(join_layouts(((d.tensors, ranks) for d, _, ranks in parties), skip=aliases))
    if clash := [name for name in own if name in tensors]:
        raise KeyMismatchError(f"the key {clash[0]!r} is reserved for the value of one rank: rename it")
    tensors.update(own)
    objects = {key for state in states for key in state.objects}
    clash = [key for key in tensors if key in objects or key in per_rank] + [key for key in objects if key in per_rank]
    if clash:
        raise KeyMismatchError(f"the key {clash[0]!r} is a tensor on some ranks and something else on others")
    world_size = max(rank for _, _, ranks in parties for rank in ranks) + 1
    layout = StateLayout(tensors, world_size)
    on_device = any(said.on_device for said, _, _ in parties)
    resolve_layouts(holdings.state.tensors, layout, group.job_rank)
    return GlobalState(layout, {}, paths, containers, aliases, per_rank, on_device)


def _decoded(description: bytes) -> tuple[_Description, State[Any]]:
    """Return what another rank holds."""
    said = msgspec.json.decode(description, type=_Description)
    paths = {key: path_from_json(path) for key, path in said.paths.items()}
    containers = {path_from_json(path): kind for path, kind in said.containers}
    return said, State({}, dict.fromkeys(said.objects), paths, containers)


def _encoded(key: str, value: Any, tensor_bytes: int = 0) -> Any:
    try:
        return encode_plain(value, tensor_bytes=tensor_bytes)
    except FormatError as error:
        hooks = f"; {_IN_OPTIMIZERS}" if not _OF_OPTIMIZERS.isdisjoint(key.split(".")) else ""
        what = f"the value under {key!r}" if key else "the state"
        raise FormatError(f"{what} cannot be saved: {error}{hooks}") from None


_OF_OPTIMIZERS = frozenset(["state", "param_groups"])
_IN_OPTIMIZERS = (
    "if an optimizer has it, let its hooks leave it out or convert it, see 'Limits' in docs/integrations/optimizers.md"
)


def any_on_device(tensors: Iterable[LiveTensor]) -> bool:
    """Return True if any tensor is not in CPU memory."""
    return any(not (local.is_cpu or local.is_meta) for tensor in tensors for local in tensor.local)


def agree_on_values(
    tensors: Mapping[str, LiveTensor],
    objects: dict[str, Any],
    group: Group,
    layout: Mapping[str, TensorLayout],
    *,
    on_device: bool = False,
) -> dict[str, Any]:
    """Collective: all objects of all ranks, as JSON data, once it is sure that no key has two
    values.

    `layout`: of what all ranks hold; `on_device`: whether a tensor of any rank is on a device.

    Raises ReplicaDriftError, on every rank, for a tensor or object that differs between ranks under
    one key.
    """
    if group.world_size == 1:
        return objects
    table = DigestTable.of(tensors, objects, group, layout, on_device=on_device)
    told = group.merge(table.told, ValueDigests.join, "the comparison of values")
    return objects if table.raise_on_mismatch(told, group) else joined_objects(objects, group)


def joined_objects(objects: Mapping[str, Any], group: Group) -> dict[str, Any]:
    """Collective: the objects of all ranks. If several have a key, the lowest rank's value counts."""
    merged: dict[str, Any] = {}
    for data, _ in group.distinct_answers(msgspec.json.encode(objects)):
        for key, value in msgspec.json.decode(data).items():
            merged.setdefault(key, value)
    return merged


def per_rank_name(key: str, rank: int) -> str:
    """The name of a per-rank tensor in the layout."""
    return f"{key}@rank{rank}"


def _own_values(state: LiveState, group: Group) -> tuple[dict[str, dict[int, Any]], dict[str, TensorLayout]]:
    """Return all per-rank values: a table of them, and the layouts of those that are tensors."""
    specs: dict[str, Any] = {}
    mine: dict[str, Any] = {}
    for key, value in ((key, wrapper.value) for key, wrapper in state.per_rank.items()):
        if is_sharded(value):
            raise LayoutError(f"{key!r} is declared PerRank, but is sharded: a DTensor belongs to several ranks")
        if is_tensor(value):
            spec = LiveTensor(key, value).spec
            specs[key] = [list(spec.shape), spec.dtype]
        else:
            mine[key] = _encoded(key, value, OWN_TENSOR_BYTES)
    table: dict[str, dict[int, Any]] = {}
    layouts: dict[str, TensorLayout] = {}
    # every rank puts the layout together, but only the first one writes down objects,
    # which may be large
    for (theirs, keys), ranks in group.distinct_answers((specs, list(mine)), kind=tuple[dict[str, Any], list[str]]):
        for key in (*theirs, *keys):
            table.setdefault(key, {})
        for key, spec in theirs.items():
            for rank in ranks:
                name = per_rank_name(key, rank)
                form = ProductForm.make(Mesh({"rank": 1}, [rank]), (Replicate(),))
                layouts[name] = TensorLayout.of(TensorSpec(name, *spec), form)
                table[key][rank] = {"tensor": name}
    for rank, data in zip(group.ranks, group.gather(msgspec.json.encode(mine)) or ()):
        for key, value in msgspec.json.decode(data).items():
            table[key][rank] = {"object": value}
    return {key: dict(sorted(rows.items())) for key, rows in table.items()}, layouts


# Checks whether ranks that hold the same elements have the same values, at a cost that does not
# grow with the number of ranks.
#
# Values that the same ranks hold, according to their layouts, share one digest. So a rank sends a
# few digests, usually one for what all ranks hold and one for its shards. A digest is passed up
# until all of its holders have sent it, and is then dropped. Only if digests differ do ranks send
# the keys that belong to them.


_ANYBODY = 0
"""Stands for an unknown number of holders: their digest is passed up to the last rank."""


class ValueDigests(msgspec.Struct, frozen=True, array_like=True):
    """The digests of values that some ranks have sent."""

    digests: dict[bytes, tuple[bytes, int, int]]
    """Digest of the holders -> a digest of what they hold (empty if they differ), how many have
    sent it, and how many there are."""
    objects: bytes
    """A digest of all objects. Empty if ranks have different ones."""

    @staticmethod
    def join(parts: list[ValueDigests]) -> ValueDigests:
        """Return what several ranks sent, joined."""
        digests: dict[bytes, tuple[bytes, int, int]] = {}
        for part in parts:
            for holders, (digest, heard, count) in part.digests.items():
                first, before, _ = digests.get(holders, (digest, 0, count))
                digests[holders] = digest if digest == first else b"", before + heard, count
        whole = {holders: row for holders, row in digests.items() if not row[0] or row[1] != row[2]}
        objects = {part.objects for part in parts}
        return ValueDigests(whole, objects.pop() if len(objects) == 1 else b"")


@dataclass(frozen=True)
class DigestTable:
    """The digests that this rank compares with those of others."""

    rows: dict[bytes, dict[str, bytes]]
    """Digest of the holders of some keys -> key -> digest of its value."""
    objects: dict[str, bytes]
    """A digest of each object."""
    sharded: set[str]
    """Keys of sharded tensors."""
    told: ValueDigests
    """What this rank sends."""

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, LiveTensor],
        objects: Mapping[str, Any],
        group: Group,
        layout: Mapping[str, TensorLayout],
        *,
        check_replicas: bool = True,
        on_device: bool = False,
    ) -> DigestTable:
        """Arguments as for `agree_on_values`. Without `check_replicas`, the lowest rank is trusted. If
        a tensor of any rank is on a device, all compare fingerprints, which devices compute where
        the elements are, instead of hashes of the bytes.
        """
        hashed = {key: xxhash.xxh3_128_digest(msgspec.json.encode(data)) for key, data in objects.items()}
        sharded = {key for key, tensor in tensors.items() if tensor.is_sharded or _is_sharded(layout.get(key))}
        rank, size = group.job_rank, group.world_size
        copies = {key: _replicas(it, rank, size, layout.get(key)) for key, it in tensors.items() if check_replicas}
        local = {name: t for of in copies.values() for name, t in of.items()}
        if on_device:
            found = partials((t, None, None) for t in local.values())
            digests = {name: one.to_bytes() for name, one in zip(local, found, strict=True)}
        else:
            digests = {name: xxhash.xxh3_128_digest(row_major_bytes(as_array(t))) for name, t in local.items()}
        forms = {name: layout[key].form if key in layout else None for key, of in copies.items() for name in of}
        rows: dict[bytes, dict[str, bytes]] = {}
        counts: dict[bytes, int] = {}
        for name, digest in (*hashed.items(), *digests.items()) if check_replicas else ():
            form = forms.get(name)
            if isinstance(form, ProductForm) and rank in form.mesh:
                holders, count = _holders(form, rank)
            else:
                holders, count = xxhash.xxh3_64_digest(name.encode()), _ANYBODY
            rows.setdefault(holders, {})[name] = digest
            counts[holders] = count
        sums = {
            holders: (xxhash.xxh3_128_digest(msgspec.msgpack.encode(sorted(of.items()))), 1, counts[holders])
            for holders, of in rows.items()
            if counts[holders] != 1
        }
        told = ValueDigests(sums, xxhash.xxh3_128_digest(msgspec.msgpack.encode(sorted(hashed.items()))))
        return cls(rows, hashed, sharded, told)

    def raise_on_mismatch(self, told: ValueDigests, group: Group) -> bool:
        """Return True if all ranks have the same objects, by what all of them sent. Collective if
        some hold others.

        Raises ReplicaDriftError, on every rank, with the keys that have two values.
        """
        differ = [holders for holders, (digest, *_) in told.digests.items() if not digest]
        if not differ:
            return bool(told.objects)
        mine = {
            key: (digest, self._kind(key.partition("\0")[0]))
            for holders in differ
            for key, digest in self.rows.get(holders, {}).items()
        }
        values: dict[str, dict[bytes, list[int]]] = {}
        kinds: dict[str, str] = {}
        for theirs, ranks in group.distinct_answers(mine, kind=dict[str, tuple[bytes, str]]):
            for name, (digest, kind) in theirs.items():
                values.setdefault(name, {}).setdefault(digest, []).extend(ranks)
                kinds[name.partition("\0")[0]] = kind
        pairs = grouped((name.partition("\0")[0], tuple(by.values())) for name, by in values.items() if len(by) > 1)
        if not pairs:
            return bool(told.objects)
        differing = {
            key: format_some([" / ".join(map(format_ranks, one)) for one in sorted(of)], 8)
            for key, of in sorted(pairs.items())
        }
        raise ReplicaDriftError(_differing(differing, kinds))

    def _kind(self, key: str) -> str:
        return "object" if key in self.objects else "sharded" if key in self.sharded else "plain"


def _differing(ranks: Mapping[str, str], kinds: Mapping[str, str]) -> str:
    """The message about keys, each with the ranks that differ."""
    texts = []
    if sharded := [key for key in ranks if kinds[key] == "sharded"]:
        same = grouped((ranks[key], key) for key in sharded)
        shown = [f"replicas of {format_some([*map(repr, keys)])} differ: {of}" for of, keys in same.items()]
        texts.append(f"{'; '.join(shown[:20])}{', and more' * (len(shown) > 20)}. {_SAME_VALUES}")
    if others := [key for key in ranks if kinds[key] != "sharded"]:
        below = grouped(((key.partition(".")[0] if len(others) > 8 else key, ranks[key]), key) for key in others)
        shown = [
            f"{keys[0]!r} ({of})" if len(keys) == 1 else f"{len(keys)} keys below {top!r}, such as {keys[0]!r} ({of})"
            for (top, of), keys in below.items()
        ]
        fix = "Wrap values that differ on purpose in reshard.PerRank(value), or use another key on each rank"
        if any("param_groups." in key and ".params." in key for key in others):
            fix = STAGES_DIFFER
        buffers = _BUFFERS * any(kinds[key] == "plain" for key in others)
        texts.append(f"values differ between ranks under the same key: {format_some(shown, 20)}. {fix}{buffers}")
    return ". ".join(texts)


_SAME_VALUES = (
    "Give all replicas the same initial values: the same seed, or a broadcast along the replicated axis of the mesh"
)
_BUFFERS = (
    ". If these are shards, as DTensor.to_local() returns them, pass the DTensors themselves, as "
    "reshard.get_model_state_dict(model) does. If these are buffers that each rank updates by itself, such as running "
    "means, give all ranks one value first: "
    "save the model inside DistributedDataParallel, which uses rank 0's buffers, or call "
    "torch.distributed.broadcast(buffer, 0) for each of model.buffers()"
)


@lru_cache(maxsize=1024)  # a state has few forms, and each may name many ranks
def _holders(form: ProductForm, rank: int) -> tuple[bytes, int]:
    """Return a digest of the ranks that hold the same as this rank, and their number."""
    copied = [isinstance(placement, Replicate) for placement in form.placements]
    place = [None if is_copied else at for is_copied, at in zip(copied, form.mesh.coordinate(rank))]
    count = math.prod(size for size, is_copied in zip(form.mesh.shape, copied) if is_copied)
    return xxhash.xxh3_64_digest(f"{form.mesh} {copied} {place}".encode()), count


def _is_sharded(layout: TensorLayout | None) -> bool:
    form = layout and layout.form
    return form is not None and not (isinstance(form, ProductForm) and {*map(type, form.placements)} <= {Replicate})


def _replicas(
    tensor: LiveTensor,
    rank: int,
    world_size: int,
    layout: TensorLayout | None,
) -> dict[str, torch.Tensor]:
    """The local tensors that other ranks may hold, too, each under a name of its elements. `layout`: of all ranks."""
    if tensor.is_meta:
        return {}
    if not tensor.is_sharded and (layout is None or layout.form == tensor.form):
        return {tensor.key: tensor.value}
    its = tensor if layout is None or tensor.is_sharded else layout
    form = its.form
    if not isinstance(form, ProductForm):
        is_copied = layout is not None and layout.numels().sum() > layout.spec.numel
    else:
        is_copied = form.mesh.size != world_size or any(isinstance(one, Replicate) for one in form.placements)
    if not is_copied:
        return {}  # no other rank holds any of it
    held = [f"{part.dims}" for part in form.parts(its.spec.shape, rank)]
    if len(tensor.local) == 1:  # of flat ranges, there are several parts
        held = ["".join(held)]
    return {f"{tensor.key}\0{dims}": t for t, dims in zip(tensor.local, held) if t.numel()}
