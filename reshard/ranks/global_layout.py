"""One layout, and one nested structure, from the descriptions of all ranks. There is no
coordinator: every rank computes the same.

Ranks may hold other keys of a dict, as pipeline stages do. But a list of plain values is one value:
were lists of different lengths put together key by key, a rank would get back what it never had.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from planners.geometry.arrays import grouped
from planners.geometry.layout import (
    BoxesForm,
    FlatForm,
    Form,
    ProductForm,
    StateLayout,
    TensorLayout,
    TensorSpec,
    form_from_json,
    form_to_json,
)
from planners.geometry.mesh import Mesh, Replicate
from reshard.errors import KeyMismatchError, LayoutError, format_ranks
from reshard.live.tensors import LiveTensor, agreed_form
from reshard.state import KeyPath, State, key_of


class _DescribedTensor(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: list[int]
    forms: list[int]
    """Indices of the forms that the tensor may have, by what the rank holds of it. Usually one.
    None for a plain tensor, which is full on each rank that has it."""


class Described(msgspec.Struct, frozen=True, dict=True):
    """The tensors of one rank without their values. Equal on ranks that hold the same."""

    tensors: dict[str, _DescribedTensor]
    forms: list[dict[str, Any]]

    @cached_property
    def made(self) -> list[Form]:
        """`forms` as such; known to the rank that says this."""
        return [form_from_json(form) for form in self.forms]


def describe(tensors: Mapping[str, LiveTensor], layouts: Mapping[str, TensorLayout] | None = None) -> Described:
    """Describe this rank's tensors, by key.

    Args:
        layouts: layouts of plain local tensors. Default: the tensors' own.

    Raises LayoutError for a placement that is not known, or a layout of another dtype.
    """
    forms: dict[Form, int] = {}
    found = {}
    for key, tensor in tensors.items():
        given = layouts.get(key) if layouts else None
        if given is not None and given.spec.dtype != tensor.spec.dtype:
            raise LayoutError(
                f"tensor {key!r} is {tensor.spec.dtype}, but its layout says {given.spec.dtype}: use one dtype for both"
            )
        spec = tensor.spec if given is None else given.spec
        possible = (given.form,) if given is not None else tensor.forms if tensor.is_sharded else ()
        found[key] = _DescribedTensor(
            spec.dtype, list(spec.shape), [forms.setdefault(form, len(forms)) for form in possible]
        )
    described = Described(found, [form_to_json(form) for form in forms])
    described.__dict__["made"] = list(forms)
    return described


def join_layouts(parties: Iterable[tuple[Described, Sequence[int]]], *, skip: Iterable[str] = ()) -> StateLayout:
    """Return the layout of what all ranks hold together, from each distinct description and the
    ranks that gave it.

    Raises LayoutError if ranks disagree about a tensor's shape, dtype or placement.
    """
    found: dict[str, list[_Row]] = {}
    everyone: list[int] = []
    for described, ranks in parties:
        everyone += ranks
        for key, tensor in described.tensors.items():
            possible = tuple(described.made[number] for number in tensor.forms)
            found.setdefault(key, []).append((TensorSpec(key, tensor.shape, tensor.dtype), possible, ranks))
    left_out, job = set(skip), _Participants(sorted(everyone))
    tensors = {key: _join(key, rows, job) for key, rows in found.items() if key not in left_out}
    return StateLayout(tensors, job.everyone[-1] + 1)


def resolve_layouts(tensors: Mapping[str, LiveTensor], layouts: Mapping[str, TensorLayout], rank: int) -> None:
    """Set what all ranks found for tensors whose layout one rank alone cannot determine."""
    for key, tensor in tensors.items():
        if tensor.is_ambiguous and key in layouts:
            tensor.settle(layouts[key], rank)


def join_aliases(
    parties: Iterable[tuple[Mapping[str, object], Mapping[str, str], Iterable[str]]],
) -> dict[str, str]:
    """Keys that, according to all ranks that know, are tied to the same other key, which itself is
    tied to none.

    Each party says: its keys, each with a description, which of them are the memory of which
    earlier key, and of which it holds no element. Keys are not tied if their descriptions differ,
    as by the layout. Parties may have the keys in different orders: the first party's counts.
    """
    claims: dict[str, set[str]] = {}
    firsts: dict[frozenset[str], str] = {}
    for keys, aliases, empty in parties:
        unsure, tied = set(empty), dict[str, str]()
        alike = ((first, key) for key, first in aliases.items() if keys.get(key) == keys.get(first))
        for first, others in grouped(alike).items():
            together = frozenset((first, *others))
            tied |= dict.fromkeys(together, firsts.setdefault(together, first))
        for key in keys:
            if key in tied or key not in unsure:
                claims.setdefault(key, set()).add(tied.get(key, key))
    agreed = {key: next(iter(said)) for key, said in claims.items() if len(said) == 1}
    return {key: first for key, first in agreed.items() if key != first == agreed.get(first)}


_Row = tuple[TensorSpec, tuple[Form, ...], Sequence[int]]
"""A tensor as some ranks describe it: the forms that it may have, none if it is plain."""


@dataclass
class _Participants:
    """The participants, and whether all ranks of a form are among them. That is asked once per
    form, since many tensors share one, and it may name thousands of ranks."""

    everyone: list[int]
    """All ranks, in order."""
    _meshes: dict[tuple[int, ...], int] = field(default_factory=dict)
    _known: dict[int, tuple[Form, int, bool]] = field(default_factory=dict)
    _copies: dict[tuple[int, ...], ProductForm] = field(default_factory=dict)

    def copies(self, rows: list[_Row]) -> ProductForm:
        """A copy on each rank of the rows."""
        key = tuple(id(ranks) for _, _, ranks in rows)
        if key not in self._copies:
            holders = sorted(rank for _, _, ranks in rows for rank in ranks)
            self._copies[key] = ProductForm.make(Mesh({"world": len(holders)}, holders), (Replicate(),))
        return self._copies[key]

    def of(self, form: Form) -> tuple[int, bool]:
        """A number, the same for forms over the same ranks; and whether all of these take part."""
        if id(form) not in self._known:
            ranks = tuple(form.ranks())
            mesh = self._meshes.setdefault(ranks, len(self._meshes))
            self._known[id(form)] = form, mesh, set(self.everyone).issuperset(ranks)
        return self._known[id(form)][1:]


def _join(key: str, rows: list[_Row], job: _Participants) -> TensorLayout:
    """Return the one layout that all ranks' descriptions of a tensor imply."""
    spec = rows[0][0]
    for other, _, ranks in rows[1:]:
        if other != spec:
            fix = "pass the DTensor itself, not its to_local()"
            raise LayoutError(
                f"tensor {key!r} has shape {spec.shape} and dtype {spec.dtype} on {format_ranks(rows[0][2])}, but "
                f"{other.shape} and {other.dtype} on {format_ranks(ranks)}. If it is sharded, {fix}. If each rank "
                "has its own value, pass reshard.PerRank(value)"
            )
    if not any(possible for _, possible, _ in rows):
        return TensorLayout.of(spec, job.copies(rows))
    if not all(possible for _, possible, _ in rows):
        raise LayoutError(
            f"tensor {key!r} is sharded on some ranks, but not on others: pass a DTensor on all of these ranks"
        )
    # ranks of one mesh have one form among them; other meshes may have copies
    by_mesh = grouped((job.of(possible[0])[0], possible) for _, possible, _ in rows)
    try:
        agreed = [agreed_form(spec.shape, said) for said in by_mesh.values()]
    except LayoutError as error:
        raise LayoutError(f"tensor {key!r} {error}") from None
    if None in agreed:
        agreed = list(dict.fromkeys(possible[0] for _, possible, _ in rows))
    sharded = [form for form in agreed if form is not None]
    form = sharded[0] if len(sharded) == 1 else _stack(key, sharded)
    return TensorLayout.of(spec, _only(form, spec, job))


def _stack(key: str, forms: list[Form]) -> Form:
    """Forms on disjoint meshes of one kind (TP groups of a job that replicates over the rest) as
    one, with replicas."""
    first = forms[0]
    products = [form for form in forms if isinstance(form, ProductForm)]
    alike = len(products) == len(forms) and isinstance(first, ProductForm)
    if alike and all(f.mesh.axes == products[0].mesh.axes and f.placements == products[0].placements for f in products):
        ranks = [
            int(rank) for form in sorted(products, key=lambda f: f.mesh.ranks.tolist()) for rank in form.mesh.ranks
        ]
        if len(set(ranks)) == len(ranks):
            name = "replica" if "replica" not in products[0].mesh.names else "replica_of_mesh"
            mesh = Mesh([(name, len(products)), *products[0].mesh.axes], ranks)
            return ProductForm.make(mesh, (Replicate(), *products[0].placements))
    listed = [form.boxes for form in forms if isinstance(form, BoxesForm)]
    if len(listed) == len(forms) and len({tuple(its for _, its in one) for one in listed}) == 1:
        boxes = dict(itertools.chain(*listed))  # FSDP1's hybrid sharding
        if len(boxes) == len(forms) * len(listed[0]):
            return BoxesForm.make(boxes)
    shown = "; ".join(map(str, forms[:4])) + "; ..." * (len(forms) > 4)
    raise LayoutError(
        f"tensor {key!r} is placed differently on different ranks: {shown}. Use the same mesh and placements on all "
        "ranks"
    )


def _only(form: Form, spec: TensorSpec, job: _Participants) -> Form:
    """Return the form without ranks that do not take part. Raises LayoutError if only they hold
    some element."""
    everyone = job.everyone
    if isinstance(form, ProductForm):
        _, all_take_part = job.of(form)
        if all_take_part:
            return form
    elif form.world_size <= len(everyone) == max(everyone) + 1:
        return form
    if isinstance(form, FlatForm):  # its local tensors are flat, which boxes would not say
        return FlatForm.make({r: (start, stop) for r, start, stop in form.ranges if r in everyone}, max(everyone) + 1)
    if isinstance(form, BoxesForm):  # empty ones included: each is a local tensor
        return BoxesForm.make({rank: boxes for rank, boxes in form.boxes if rank in everyone}, max(everyone) + 1)
    layout = TensorLayout.of(spec, form)
    return BoxesForm.make(
        {rank: layout.boxes(rank) for rank in everyone if rank < layout.world_size}, max(everyone) + 1
    )


class _NestPlace(NamedTuple):
    kind: str
    """"dict", "list", "tuple" or "value"."""
    items: int | None
    """Number of items of a list or tuple of plain values."""

    def __str__(self) -> str:
        return f"a {self.kind}" if self.items is None else f"a {self.kind} of {self.items}"


STAGES_DIFFER = (
    "Pipeline stages differ: get their states with flatten_optimizer_state_dict=True. In the state of a "
    "CheckpointManager, make the model a list of this rank's stages"
)


def check_nests(states: Iterable[State[Any]]) -> None:
    """Raise KeyMismatchError for a place that has different kinds in different states."""
    known: dict[KeyPath, _NestPlace] = {}
    for state in states:
        for path, place in _places(state).items():
            if (first := known.setdefault(path, place)) == place:
                continue
            if first.kind == place.kind and None in (first.items, place.items):
                continue  # tensors on one side: ranks may have some of a list of them
            fix = "Wrap values that differ between ranks in reshard.PerRank(value), or use one key per rank"
            if "param_groups" in path:  # usually an optimizer of another stage
                fix = STAGES_DIFFER
            if any(one.containers.get(path, "").startswith("tensor:") for one in states):
                fix = "It is quantized on some ranks only: save plain values, with reshard.dequantized(state)"
            raise KeyMismatchError(f"{key_of(path)!r} is {first} on some ranks and {place} on others. {fix}")


def _places(state: State[Any]) -> dict[KeyPath, _NestPlace]:
    kinds: dict[KeyPath, str] = {}
    items: dict[KeyPath, int] = {}
    mixed: set[KeyPath] = set()
    for key, path in state.paths.items():
        kinds[path], is_plain = "value", key in state.objects
        for i in reversed(range(len(path))):
            above, part = path[:i], path[i]
            if type(part) is int:
                items[above] = max(items.get(above, 0), part + 1)
            if above in kinds and (above in mixed or is_plain):
                break  # this one and those above it are known
            kinds[above] = "list" if type(part) is int else "dict"
            if not is_plain:
                mixed.add(above)
    for path, kind in state.containers.items():
        if kind.startswith("tensor:"):
            continue
        kinds[path] = kind = "dict" if kind.startswith("dict:") else kind
        if kind != "dict":
            items.setdefault(path, 0)
    return {path: _NestPlace(kind, None if path in mixed else items.get(path)) for path, kind in kinds.items()}
