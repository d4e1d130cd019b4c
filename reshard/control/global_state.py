"""What a whole job holds, agreed among its ranks: one layout of everything, without a coordinator's plan.

Each rank describes what it was given. Where all descriptions are equal, as under FSDP, one digest per rank is all that
travels; where they differ, as between pipeline stages, each distinct one travels once. Every rank then puts the
same descriptions together in the same way.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import xxhash

from planners.geometry.layout import StateLayout, TensorLayout, TensorSpec
from planners.geometry.layout_forms import ProductForm
from planners.geometry.mesh import Mesh
from planners.geometry.placement import Replicate
from reshard.control.global_layout import (
    Described,
    describe,
    format_some_ranks,
    gather_distinct,
    join_aliases,
    join_layouts,
)
from reshard.control.group import Group
from reshard.control.nests import check_nests
from reshard.errors import FormatError, KeyMismatchError, LayoutError
from reshard.state.arrays import as_array, row_major_bytes
from reshard.state.per_rank import PerRank
from reshard.state.plain_data import check_text, encode_plain
from reshard.state.tensor_subclasses import expanded
from reshard.state.tensors import device_of, form_of, identity_of, is_sharded, is_tensor, local_tensors, spec_of
from reshard.state.tree import Flat, KeyPath, flatten, key_of, path_to_json

__all__ = [
    "OWN_TENSOR_BYTES",
    "Census",
    "Holdings",
    "agree_on_values",
    "check_globs",
    "holdings_of",
    "per_rank_name",
    "take_census",
]

_LONG = 1000
OWN_TENSOR_BYTES = 1 << 20
"""Of tensors within one rank's own value, such as random states: these go into the manifest."""


@dataclass(frozen=True)
class Holdings:
    """What one rank was given, taken apart."""

    tensors: dict[str, Any]
    """Tensors, DTensors and ShardedTensors by key, tied ones included."""
    objects: dict[str, Any]
    """Everything else by key, as JSON data."""
    per_rank: dict[str, Any]
    """Values that were declared `PerRank`, by key."""
    paths: dict[str, KeyPath]
    containers: dict[KeyPath, str]
    aliases: dict[str, str] = field(default_factory=dict)
    """Keys whose tensor is the very same memory as that of an earlier key."""


def holdings_of(state: Mapping[str, Any], select: Collection[str] | None = None) -> Holdings:
    """Take a state dict apart. With `select`, only what has a key that one of these globs fits.

    Raises FormatError for an object that is no plain data, naming its key; KeyMismatchError for keys that collide.
    """
    if not isinstance(state, Mapping | list | tuple):
        raise FormatError(f"what is saved must be a dict (or a list) of values, got {type(state).__name__}")
    flat = flatten(state, is_leaf=lambda value: is_tensor(value) or isinstance(value, PerRank), whole_at=_is_long)
    flat = replace(flat, leaves=expanded(flat.leaves))
    if select is not None:
        flat = _selected(flat, select)
    tensors: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    per_rank: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for path in (*flat.leaves, *flat.containers):
        check_text(key_of(path))
    for path, value in flat.leaves.items():
        key = key_of(path)
        if isinstance(value, PerRank):
            per_rank[key] = value.value
        elif is_tensor(value):
            identity = identity_of(value)
            first = seen.setdefault(identity, key) if identity is not None else key
            if first != key:
                aliases[key] = first
            tensors[key] = value
        else:
            try:
                objects[key] = encode_plain(value)
            except FormatError as error:
                raise FormatError(f"the value under {key!r} cannot be saved: {error}") from None
    return Holdings(tensors, objects, per_rank, {key_of(p): p for p in flat.leaves}, flat.containers, aliases)


def _is_long(path: KeyPath, value: Any) -> bool:
    """Whether a sequence of numbers is one value, such as the order of a sampler: a key for each costs too much."""
    kind = type(value)
    return kind in (list, tuple) and len(value) >= _LONG and all(type(item) in (int, float) for item in value)


def _selected(flat: Flat, select: Collection[str]) -> Flat:
    """What the globs fit, with the containers around it."""
    fits = {path: any(fnmatch.fnmatchcase(key_of(path), glob) for glob in select) for path in flat.leaves}
    inner = {path[:i] for path in flat.leaves for i in range(len(path))}
    kept = {path[:i] for path, fit in fits.items() if fit for i in range(len(path))}
    containers = {
        path: kind
        for path, kind in flat.containers.items()
        if path in kept or (path not in inner and any(fnmatch.fnmatchcase(key_of(path), glob) for glob in select))
    }
    return replace(flat, leaves={path: leaf for path, leaf in flat.leaves.items() if fits[path]}, containers=containers)


def check_globs(select: Iterable[str], census: Census) -> None:
    """Raises KeyMismatchError for a glob that fits no key of any rank."""
    keys = [*census.layout, *census.objects, *census.per_rank, *census.aliases]
    for glob in select:
        if not any(fnmatch.fnmatchcase(key, glob) for key in keys):
            raise KeyMismatchError(f"select names {glob!r}, which fits no key of any rank: nothing was saved")


class _Description(msgspec.Struct, frozen=True):
    """A rank's holdings without their values. Equal on ranks that hold the same kind of thing."""

    tensors: Described
    objects: list[str]
    per_rank: list[str]
    paths: dict[str, list[Any]]
    containers: list[tuple[list[Any], str]]
    aliases: dict[str, str]
    empty: list[str]
    """Sharded tensors of which this rank holds no element, so that it cannot tell whether they are tied."""


@dataclass(frozen=True)
class Census:
    """What all ranks hold together. Equal on every rank."""

    layout: StateLayout
    objects: dict[str, Any]
    per_rank: dict[str, dict[int, Any]]
    """key -> rank -> `{"tensor": name in the layout}` or `{"object": JSON data}`."""
    paths: dict[str, list[Any]]
    containers: list[tuple[list[Any], str]]
    aliases: dict[str, str]


def take_census(holdings: Holdings, group: Group, *, check_replicas: bool = True) -> Census:
    """Collective: the census of what the ranks of `group` hold.

    Raises, alike on every rank:
        LayoutError: ranks disagree about a tensor's shape, dtype or placement.
        KeyMismatchError: a plain tensor or object differs between ranks under one key (unless `check_replicas` is
            off, which trusts the lowest rank).
    """
    shared = gather_distinct(msgspec.json.encode(_describe(holdings)), group)
    descriptions = {data: msgspec.json.decode(data, type=_Description) for data in dict.fromkeys(shared)}
    of_rank = {rank: descriptions[data] for rank, data in zip(group.ranks, shared)}
    own = _own_values(holdings, group) if any(d.per_rank for d in descriptions.values()) else ({}, {})
    census = _merge(of_rank, *own)
    return replace(census, objects=agree_on_values(holdings, group, check_replicas=check_replicas))


def _describe(holdings: Holdings) -> _Description:
    return _Description(
        tensors=describe(holdings.tensors),
        objects=list(holdings.objects),
        per_rank=list(holdings.per_rank),
        paths={key: path_to_json(path) for key, path in holdings.paths.items()},
        containers=[(path_to_json(path), kind) for path, kind in holdings.containers.items()],
        aliases=dict(holdings.aliases),
        empty=[
            k for k, t in holdings.tensors.items() if is_sharded(t) and not any(x.numel() for x in local_tensors(t))
        ],
    )


def agree_on_values(holdings: Holdings, group: Group, *, check_replicas: bool) -> dict[str, Any]:
    """Collective: all objects of all ranks, once it is sure that no key has two values.

    Raises KeyMismatchError, alike on every rank, for a tensor or object that differs between ranks under one key
    (unless `check_replicas` is off, which trusts the lowest rank).
    """
    mine = {key: xxhash.xxh3_128_digest(msgspec.json.encode(data)) for key, data in holdings.objects.items()}
    if check_replicas and group.world_size > 1:
        for key, tensor in holdings.tensors.items():
            mine.update(_replica_digests(key, tensor, group))
    packed = msgspec.msgpack.encode(mine)
    digests = group.exchange(xxhash.xxh3_128_digest(packed))
    if len(set(digests)) == 1:
        return holdings.objects
    tables = [msgspec.msgpack.decode(data, type=dict[str, bytes]) for data in group.exchange(packed)]
    values: dict[str, dict[bytes, list[int]]] = {}
    for rank, table in zip(group.ranks, tables):
        for key, digest in table.items():
            values.setdefault(key, {}).setdefault(digest, []).append(rank)
    differing = {key.partition("\0")[0]: list(by.values()) for key, by in values.items() if len(by) > 1}
    if differing and check_replicas:
        shown = "; ".join(
            f"{key!r} ({' / '.join(format_some_ranks(r) for r in by)})" for key, by in list(differing.items())[:20]
        )
        raise KeyMismatchError(
            f"{len(differing)} values differ between ranks under one key: {shown}. Wrap what is each rank's own in "
            "reshard.PerRank(value), or give it a key per rank"
        )
    merged: dict[str, Any] = {}
    for data in group.exchange(msgspec.json.encode(holdings.objects)):
        for key, value in msgspec.json.decode(data).items():
            merged.setdefault(key, value)
    return merged


def _replica_digests(key: str, tensor: Any, group: Group) -> dict[str, bytes]:
    """A digest of each local tensor that other ranks may hold, too, under a name that says which elements it is."""
    if device_of(tensor).type == "meta":
        return {}
    if not is_sharded(tensor):
        return {key: xxhash.xxh3_128_digest(row_major_bytes(as_array(tensor.cpu())))}
    form = form_of(tensor, key)
    if not isinstance(form, ProductForm):
        return {}
    copied = any(isinstance(placement, Replicate) for placement in form.placements)
    if not copied and form.mesh.size == group.world_size:
        return {}  # nobody else holds any of it
    rank = group.ranks[group.rank]
    local = local_tensors(tensor)
    parts = form.parts(spec_of(key, tensor).shape, rank)
    return {
        f"{key}\0{part.dims}": xxhash.xxh3_128_digest(row_major_bytes(as_array(t.cpu())))
        for t, part in zip(local, parts)
        if t.numel()
    }


def per_rank_name(key: str, rank: int) -> str:
    """The name in the layout of a tensor that is one rank's own."""
    return f"{key}@rank{rank}"


def _own_values(holdings: Holdings, group: Group) -> tuple[dict[str, dict[int, Any]], dict[str, TensorLayout]]:
    """All values that are each rank's own: a table of them, and the layouts of those that are tensors."""
    mine: dict[str, Any] = {}
    for key, value in holdings.per_rank.items():
        if is_sharded(value):
            raise LayoutError(f"{key!r} is declared PerRank, but is sharded: a DTensor is nobody's own")
        if is_tensor(value):
            spec = spec_of(key, value)
            mine[key] = {"tensor": [list(spec.shape), spec.dtype]}
        else:
            try:
                mine[key] = {"object": encode_plain(value, tensor_bytes=OWN_TENSOR_BYTES)}
            except FormatError as error:
                raise FormatError(f"the value under {key!r} cannot be saved: {error}") from None
    table: dict[str, dict[int, Any]] = {}
    layouts: dict[str, TensorLayout] = {}
    for rank, data in zip(group.ranks, group.exchange(msgspec.json.encode(mine))):
        for key, row in msgspec.json.decode(data).items():
            if "tensor" in row:
                name = per_rank_name(key, rank)
                form = ProductForm.make(Mesh({"rank": 1}, [rank]), (Replicate(),))
                layouts[name] = TensorLayout.of(TensorSpec(name, *row["tensor"]), form)
                row = {"tensor": name}
            table.setdefault(key, {})[rank] = row
    return table, layouts


def _merge(
    of_rank: Mapping[int, _Description],
    per_rank: dict[str, dict[int, Any]],
    own: dict[str, TensorLayout],
) -> Census:
    distinct: dict[int, tuple[_Description, list[int]]] = {}
    for rank, description in of_rank.items():
        distinct.setdefault(id(description), (description, []))[1].append(rank)
    paths: dict[str, list[Any]] = {}
    containers: dict[str, tuple[list[Any], str]] = {}
    for description, _ in distinct.values():
        for key, path in description.paths.items():
            if paths.setdefault(key, path) != path:
                raise KeyMismatchError(f"the key {key!r} stands for different places of the state on different ranks")
        for path, kind in description.containers:
            containers.setdefault(str(path), (path, kind))
    if len(distinct) > 1:
        check_nests((d.paths, d.containers, {*d.tensors.tensors, *d.per_rank}) for d, _ in distinct.values())
    world = max(of_rank) + 1
    aliases = join_aliases((d.tensors.tensors, d.aliases, d.empty) for d, _ in distinct.values())
    tensors = dict(join_layouts(((d.tensors, ranks) for d, ranks in distinct.values()), skip=aliases))
    if clash := [name for name in own if name in tensors]:
        raise KeyMismatchError(f"the key {clash[0]!r} is what a value of one rank would be called: rename it")
    tensors.update(own)
    objects = {key for description, _ in distinct.values() for key in description.objects}
    clash = [key for key in tensors if key in objects or key in per_rank] + [key for key in objects if key in per_rank]
    if clash:
        raise KeyMismatchError(f"the key {clash[0]!r} is a tensor on some ranks and something else on others")
    return Census(StateLayout(tensors, world), {}, per_rank, paths, list(containers.values()), aliases)
