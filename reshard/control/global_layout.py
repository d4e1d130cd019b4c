"""One layout out of what each rank says about its own tensors: no coordinator, every rank puts the same together.

Where all ranks say the same, as under FSDP, a digest per rank is all that travels; where they differ, as between
pipeline stages, each distinct description travels once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import msgspec

from planners.geometry.json import form_from_json, form_to_json
from planners.geometry.layout import StateLayout, TensorLayout, TensorSpec
from planners.geometry.layout_forms import BoxesForm, FlatForm, Form, ProductForm
from planners.geometry.mesh import Mesh
from planners.geometry.placement import Replicate
from reshard.control.group import Group
from reshard.errors import LayoutError
from reshard.state.tensors import form_of, is_sharded, spec_of

__all__ = ["Described", "describe", "format_some_ranks", "gather_distinct", "join_aliases", "join_layouts"]


class _Tensor(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: list[int]
    form: int
    """Index into the forms; -1 for a plain tensor, whole on each rank that has it."""


class Described(msgspec.Struct, frozen=True):
    """The tensors of one rank without their values. Equal on ranks that hold the same kind of thing."""

    tensors: dict[str, _Tensor]
    forms: list[dict[str, Any]]


def describe(tensors: Mapping[str, Any], layouts: Mapping[str, TensorLayout] | None = None) -> Described:
    """What this rank has to say about its tensors, by key.

    Args:
        layouts: how plain local tensors lie in their global tensors; where not given, the tensors say it themselves.

    Raises LayoutError for a placement that is not known, or a layout of another dtype.
    """
    forms: dict[Form, int] = {}
    found = {}
    for key, tensor in tensors.items():
        given = layouts.get(key) if layouts else None
        if given is not None:
            spec, form = given.spec, given.form
            if spec.dtype != spec_of(key, tensor).dtype:
                raise LayoutError(f"tensor {key!r} is {spec_of(key, tensor).dtype}, but its layout says {spec.dtype}")
            number = forms.setdefault(form, len(forms))
        else:
            spec = spec_of(key, tensor)
            number = forms.setdefault(form_of(tensor, key), len(forms)) if is_sharded(tensor) else -1
        found[key] = _Tensor(spec.dtype, list(spec.shape), number)
    return Described(found, [form_to_json(form) for form in forms])


def gather_distinct(described: bytes, group: Group) -> list[bytes]:
    """Collective: everybody's bytes, in rank order; equal ones are the same object, and travel once or not at all."""
    digest = hashlib.sha256(described).digest()
    digests = group.exchange(digest)
    firsts = {found: digests.index(found) for found in digests}
    if len(firsts) == 1:
        return [described] * len(digests)
    shared = group.exchange(described if firsts[digest] == group.rank else b"")
    return [shared[firsts[found]] for found in digests]


def join_layouts(parties: Iterable[tuple[Described, list[int]]], *, skip: Iterable[str] = ()) -> StateLayout:
    """The layout of what all ranks hold together, out of each distinct description and the ranks that gave it.

    Raises LayoutError where ranks disagree about a tensor's shape, dtype or placement.
    """
    found: dict[str, list[tuple[TensorSpec, Form | None, list[int]]]] = {}
    everyone: list[int] = []
    for described, ranks in parties:
        everyone += ranks
        forms = [form_from_json(form) for form in described.forms]
        for key, tensor in described.tensors.items():
            form = forms[tensor.form] if tensor.form >= 0 else None
            found.setdefault(key, []).append((TensorSpec(key, tensor.shape, tensor.dtype), form, ranks))
    left_out, everyone = set(skip), sorted(everyone)
    tensors = {key: _join(key, rows, everyone) for key, rows in found.items() if key not in left_out}
    return StateLayout(tensors, everyone[-1] + 1)


def join_aliases(
    parties: Iterable[tuple[Iterable[str], Mapping[str, str], Iterable[str]]],
) -> dict[str, str]:
    """Keys that all ranks which can tell say are tied to the same other key, which itself is tied to none.

    Each party says: its keys, which of them are the memory of which earlier key, and of which it holds no element.
    """
    claims: dict[str, set[str | None]] = {}
    for keys, aliases, empty in parties:
        unsure = set(empty)
        for key in keys:
            first = aliases.get(key)
            if first is not None or key not in unsure:
                claims.setdefault(key, set()).add(first)
    tied = {key: next(iter(firsts)) for key, firsts in claims.items() if len(firsts) == 1}
    return {key: first for key, first in tied.items() if first is not None and tied.get(first) is None}


def format_some_ranks(ranks: list[int]) -> str:
    """`"rank 3"` or `"ranks 0, 1, 2"`, at most 8 of them."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks[:8])) + (", ..." if ranks[8:] else "")


def _join(key: str, rows: list[tuple[TensorSpec, Form | None, list[int]]], everyone: list[int]) -> TensorLayout:
    """The one layout that all ranks' descriptions of a tensor amount to."""
    spec = rows[0][0]
    for other, _, ranks in rows[1:]:
        if other != spec:
            raise LayoutError(
                f"tensor {key!r} has shape {spec.shape} and dtype {spec.dtype} on {format_some_ranks(rows[0][2])}, but "
                f"{other.shape} and {other.dtype} on {format_some_ranks(ranks)}"
            )
    forms = {form for _, form, _ in rows}
    holders = sorted(rank for _, _, ranks in rows for rank in ranks)
    if None in forms:
        if len(forms) > 1:
            raise LayoutError(f"tensor {key!r} is sharded on some ranks and plain on others")
        return TensorLayout.of(spec, _copies(tuple(holders)))
    sharded = [form for form in forms if form is not None]
    form = sharded[0] if len(sharded) == 1 else _stack(key, sharded)
    return TensorLayout.of(spec, _only(form, spec, everyone))


@lru_cache(maxsize=256)
def _copies(ranks: tuple[int, ...]) -> ProductForm:
    """A copy on each of the ranks; the same for all plain tensors of a job."""
    return ProductForm.make(Mesh({"world": len(ranks)}, ranks), (Replicate(),))


def _stack(key: str, forms: list[Form]) -> Form:
    """Forms on disjoint meshes of one kind (TP groups of a job that replicates over the rest) as one, with replicas."""
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
    shown = "; ".join(map(str, forms[:4]))
    raise LayoutError(f"tensor {key!r} is placed differently on different ranks: {shown}")


def _only(form: Form, spec: TensorSpec, everyone: list[int]) -> Form:
    """The form without ranks that do not take part. Raises LayoutError if only they hold some element."""
    if isinstance(form, ProductForm) and all(rank in everyone for rank in form.mesh.ranks.tolist()):
        return form
    if not isinstance(form, ProductForm) and form.world_size <= len(everyone) == max(everyone) + 1:
        return form
    if isinstance(form, FlatForm):  # its local tensors are flat, which boxes would not say
        return FlatForm.make({r: (start, stop) for r, start, stop in form.ranges if r in everyone}, max(everyone) + 1)
    if isinstance(form, BoxesForm):  # empty ones included: each is a local tensor
        return BoxesForm.make({rank: boxes for rank, boxes in form.boxes if rank in everyone}, max(everyone) + 1)
    layout = TensorLayout.of(spec, form)
    return BoxesForm.make(
        {rank: layout.boxes(rank) for rank in everyone if rank < layout.world_size}, max(everyone) + 1
    )
