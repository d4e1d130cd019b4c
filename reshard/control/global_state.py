"""What a whole job holds, agreed among its ranks: one layout of everything, without a coordinator's plan.

Each rank describes what it was given. Where all descriptions are equal, as under FSDP, one digest per rank is all that
travels; where they differ, as between pipeline stages, each distinct one travels once. Every rank then puts the
same descriptions together in the same way.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import xxhash

from planners.geometry.layout import StateLayout, TensorLayout, TensorSpec
from planners.geometry.layout_forms import ProductForm
from planners.geometry.mesh import Mesh
from planners.geometry.placement import Replicate
from reshard.control.global_layout import Described, check_nests, describe, join_aliases, join_layouts, settle_forms
from reshard.control.group import Group
from reshard.control.pool import digest_of
from reshard.control.replicas import Table, agree_on_table
from reshard.errors import FormatError, KeyMismatchError, LayoutError
from reshard.state.frameworks.tensor_classes import is_sharded
from reshard.state.live_state import LiveState, LiveTensor
from reshard.state.plain_data import check_text, encode_plain
from reshard.state.tensors import is_tensor, spec_of
from reshard.state.tree import key_of, path_to_json

__all__ = [
    "OWN_TENSOR_BYTES",
    "Census",
    "Holdings",
    "agree_on_values",
    "census_of",
    "check_globs",
    "joined_objects",
    "lies_on_device",
    "per_rank_name",
    "take_census",
    "value_table",
    "with_objects",
]

OWN_TENSOR_BYTES = 1 << 20
"""Of tensors within one rank's own value, such as random states: these go into the manifest."""


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
    on_device: bool
    """Whether any tensor is elsewhere than in the memory of the CPU."""


@dataclass(frozen=True)
class Census:
    """What all ranks hold together. Equal on every rank, but for what only the first one needs."""

    layout: StateLayout
    objects: dict[str, Any]
    per_rank: dict[str, dict[int, Any]]
    """key -> rank -> `{"tensor": name in the layout}` or, on the first rank only, `{"object": JSON data}`."""
    paths: dict[str, list[Any]]
    containers: list[tuple[list[Any], str]]
    aliases: dict[str, str]
    on_device: bool = False
    """Whether a tensor of any rank lies on a device."""
    told: bytes = b""
    """A digest of what each rank has said of its holdings: where it is the same, so is all of this but for values."""


@dataclass(frozen=True)
class Holdings:
    """What one rank has to say of its state."""

    state: LiveState
    objects: dict[str, Any]
    """Those that all ranks have alike, as JSON data."""
    said: bytes
    """A description without values. Equal on ranks that hold the same kind of thing."""

    @classmethod
    def of(cls, state: LiveState) -> Holdings:
        """Raises FormatError for an object that is no plain data, naming its key."""
        for path in (*state.paths.values(), *state.containers):
            check_text(key_of(path))
        objects = {key: _encoded(key, value) for key, value in state.objects.items()}
        return cls(state, objects, msgspec.json.encode(_describe(state)))


def take_census(state: LiveState, group: Group, *, check_replicas: bool = True) -> Census:
    """Collective: the census of what the ranks of `group` hold.

    Raises, alike on every rank:
        LayoutError: ranks disagree about a tensor's shape, dtype or placement.
        KeyMismatchError: a plain tensor or object differs between ranks under one key (unless `check_replicas` is
            off, which trusts the lowest rank).
    Raises FormatError for an object that is no plain data, naming its key.
    """
    holdings = Holdings.of(state)
    census = census_of(holdings, group, group.parties(holdings.said))
    return with_objects(census, holdings, group, check_replicas=check_replicas)


def census_of(holdings: Holdings, group: Group, answers: Mapping[bytes, Sequence[int]]) -> Census:
    """The census, without objects, out of what all ranks have said; collective where any has values of its own. Whether
    values are equal is not known yet: see `with_objects`. Raises LayoutError as `take_census` does."""
    state = holdings.state
    parties = [(msgspec.json.decode(data, type=_Description), ranks) for data, ranks in answers.items()]
    own = _own_values(state, group) if any(said.per_rank for said, _ in parties) else ({}, {})
    census = _merge(parties, *own)
    settle_forms(state.tensors, census.layout, group.ranks[group.rank])
    on_device = any(said.on_device for said, _ in parties)
    return replace(census, on_device=on_device, told=_digest_of(answers))


def with_objects(census: Census, holdings: Holdings, group: Group, *, check_replicas: bool) -> Census:
    """Collective: the census with the objects of all ranks, once it is sure that no key has two values. Raises
    KeyMismatchError as `take_census` does."""
    merged = agree_on_values(
        holdings.state.tensors,
        holdings.objects,
        group,
        census.layout,
        check_replicas=check_replicas,
        on_device=census.on_device,
    )
    return replace(census, objects=merged)


def _digest_of(answers: Mapping[bytes, Sequence[int]]) -> bytes:
    """Of what was said, and by whom, among ranks that are known."""
    who = [(hashlib.sha256(data).digest(), list(ranks) if len(answers) > 1 else []) for data, ranks in answers.items()]
    return digest_of(msgspec.msgpack.encode(who))


def _encoded(key: str, value: Any, tensor_bytes: int = 0) -> Any:
    try:
        return encode_plain(value, tensor_bytes=tensor_bytes)
    except FormatError as error:
        raise FormatError(f"the value under {key!r} cannot be saved: {error}") from None


def _describe(state: LiveState) -> _Description:
    return _Description(
        tensors=describe(state.tensors),
        objects=list(state.objects),
        per_rank=list(state.per_rank),
        paths={key: path_to_json(path) for key, path in state.paths.items()},
        containers=[(path_to_json(path), kind) for path, kind in state.containers.items()],
        aliases=dict(state.tied),
        empty=[key for key, tensor in state.tensors.items() if tensor.is_elsewhere],
        on_device=lies_on_device(state.tensors.values()),
    )


def lies_on_device(tensors: Iterable[LiveTensor]) -> bool:
    """Whether any tensor is elsewhere than in the memory of the CPU."""
    return any(local.device.type not in ("cpu", "meta") for tensor in tensors for local in tensor.local)


def agree_on_values(
    tensors: Mapping[str, LiveTensor],
    objects: dict[str, Any],
    group: Group,
    layout: Mapping[str, TensorLayout],
    *,
    check_replicas: bool,
    on_device: bool = False,
) -> dict[str, Any]:
    """Collective: all objects of all ranks, as JSON data, once it is sure that no key has two values.

    `layout`: of what all ranks hold; `on_device`: whether a tensor of any rank lies on a device: see `Table`.

    Raises KeyMismatchError, alike on every rank, for a tensor or object that differs between ranks under one key
    (unless `check_replicas` is off, which trusts the lowest rank).
    """
    if group.world_size == 1:
        return objects
    table, digests = value_table(tensors, objects, group, layout, check_replicas=check_replicas, on_device=on_device)
    return objects if agree_on_table(table, digests, group) else joined_objects(objects, group)


def value_table(
    tensors: Mapping[str, LiveTensor],
    objects: Mapping[str, Any],
    group: Group,
    layout: Mapping[str, TensorLayout],
    *,
    check_replicas: bool,
    on_device: bool = False,
) -> tuple[Table, dict[str, bytes]]:
    """What this rank has to compare with others, and digests of its objects; arguments as for `agree_on_values`."""
    table = Table(on_device)
    digests = {key: xxhash.xxh3_128_digest(msgspec.json.encode(data)) for key, data in objects.items()}
    if check_replicas:
        for key, digest in digests.items():
            table.add_object(key, digest)
        table.add_tensors(tensors, layout, group.ranks[group.rank], group.world_size)
    return table, digests


def joined_objects(objects: Mapping[str, Any], group: Group) -> dict[str, Any]:
    """Collective: the objects of all ranks; of those that several have, what the lowest one has."""
    merged: dict[str, Any] = {}
    for data in group.parties(msgspec.json.encode(objects)):
        for key, value in msgspec.json.decode(data).items():
            merged.setdefault(key, value)
    return merged


def per_rank_name(key: str, rank: int) -> str:
    """The name in the layout of a tensor that is one rank's own."""
    return f"{key}@rank{rank}"


def _own_values(state: LiveState, group: Group) -> tuple[dict[str, dict[int, Any]], dict[str, TensorLayout]]:
    """All values that are each rank's own: a table of them, and the layouts of those that are tensors."""
    specs: dict[str, Any] = {}
    mine: dict[str, Any] = {}
    for key, value in ((key, wrapper.value) for key, wrapper in state.per_rank.items()):
        if is_sharded(value):
            raise LayoutError(f"{key!r} is declared PerRank, but is sharded: a DTensor is nobody's own")
        if is_tensor(value):
            spec = spec_of(key, value)
            specs[key] = [list(spec.shape), spec.dtype]
        else:
            mine[key] = _encoded(key, value, OWN_TENSOR_BYTES)
    table: dict[str, dict[int, Any]] = {}
    layouts: dict[str, TensorLayout] = {}
    # every rank puts the layout together, but only the first one writes down objects, which may be large
    for data, ranks in group.parties(msgspec.json.encode((specs, list(mine)))).items():
        theirs, keys = msgspec.json.decode(data, type=tuple[dict[str, Any], list[str]])
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


def _merge(
    parties: Sequence[tuple[_Description, Sequence[int]]],
    per_rank: dict[str, dict[int, Any]],
    own: dict[str, TensorLayout],
) -> Census:
    paths: dict[str, list[Any]] = {}
    containers: dict[str, tuple[list[Any], str]] = {}
    for said, _ in parties:
        for key, path in said.paths.items():
            if paths.setdefault(key, path) != path:
                raise KeyMismatchError(f"the key {key!r} stands for different places of the state on different ranks")
        for path, kind in said.containers:
            containers.setdefault(str(path), (path, kind))
    if len(parties) > 1:
        check_nests((d.paths, d.containers, {*d.tensors.tensors, *d.per_rank}) for d, _ in parties)
    aliases = join_aliases((d.tensors.tensors, d.aliases, d.empty) for d, _ in parties)
    tensors = dict(join_layouts(((d.tensors, ranks) for d, ranks in parties), skip=aliases))
    if clash := [name for name in own if name in tensors]:
        raise KeyMismatchError(f"the key {clash[0]!r} is what a value of one rank would be called: rename it")
    tensors.update(own)
    objects = {key for said, _ in parties for key in said.objects}
    clash = [key for key in tensors if key in objects or key in per_rank] + [key for key in objects if key in per_rank]
    if clash:
        raise KeyMismatchError(f"the key {clash[0]!r} is a tensor on some ranks and something else on others")
    world_size = max(rank for _, ranks in parties for rank in ranks) + 1
    return Census(StateLayout(tensors, world_size), {}, per_rank, paths, list(containers.values()), aliases)
