"""`trace_layout`: a job's own parallelization code run on meta tensors, rank by rank, in one
process with no data.

A fake process group of any size lets the code believe that it is rank r of the job. What it makes
of its model then says how every tensor is placed, so that a plan speaks of the real model, and not
of rules about it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend "fake"

from planners.errors import PlanError
from planners.geometry.layout import Form, ProductForm, StateLayout, TensorLayout, TensorSpec
from planners.geometry.mesh import Mesh, Replicate
from reshard.errors import LayoutError
from reshard.live.tensors import agreed_form, forms_of, is_sharded, is_tensor, spec_of
from reshard.live.tree import flatten
from reshard.live.wrappers import forget_meshes
from reshard.state import key_of
from reshard.state_dict import get_model_state_dict

__all__ = ["trace_layout"]


def trace_layout(build: Callable[[], Any], *, world_size: int, ranks: Iterable[int] | None = None) -> StateLayout:
    """Where every tensor of a job of `world_size` ranks lives, by running the job's own code here.

    Args:
        build: makes and parallelizes what one rank has, as the job would: a module, a list of
            modules (the pipeline stages of the rank), or a state dict of such tensors. It runs with
            `torch.device("meta")` as default device and a default process group whose collectives
            do nothing. It must build the same for the same rank.
        world_size: ranks of the job.
        ranks: run as these ranks only; those that share a mesh with one of them are taken to be
            like it. None runs as rank 0 and, along each axis of each mesh that it finds, as one
            more rank. Where that one has something else (a pipeline stage, experts of its own), or
            where no mesh reaches, all ranks are run.

    Returns:
        The layout of the whole job. Plain tensors are whole on every rank that has them. A name
        that several meshes have in the same way (weights tied across pipeline stages) is replicated
        over them.

    Raises:
        LayoutError: a process group is initialized already; ranks disagree about a tensor; a
            placement is not known.
        What `build` raises, with a note that says as which rank.
    """
    if world_size < 1:
        raise LayoutError(f"a job has at least 1 rank, got world_size={world_size}")
    trace = _Trace(build, world_size)
    if ranks is None:
        covered: set[int] = set()
        for rank in range(world_size):
            if rank not in covered:
                covered |= trace.visit(rank)
    else:
        for rank in ranks:
            if not 0 <= rank < world_size:
                raise LayoutError(f"there are ranks 0 to {world_size - 1} only, but ranks names {rank}")
            trace.alike[rank] = _reached(trace.run(rank), rank)
    return trace.layout(everywhere=ranks is not None)


@dataclass(frozen=True)
class _TracedTensor:
    """A tensor as one rank has it."""

    spec: TensorSpec
    forms: tuple[Form, ...]
    """Those that it may have, by what the rank holds of it; none for a plain tensor."""


Run = dict[str, _TracedTensor]


class _Trace:
    """What each rank that was run has."""

    def __init__(self, build: Callable[[], Any], world_size: int) -> None:
        self._build, self._world_size = build, world_size
        self._runs: dict[int, Run] = {}
        self.alike: dict[int, set[int]] = {}
        """rank -> the ranks that have what it has, itself included"""

    def run(self, rank: int) -> Run:
        """What `rank` has; run once."""
        if rank not in self._runs:
            with _as_rank(rank, self._world_size), torch.random.fork_rng(devices=[]):
                try:
                    with torch.device("meta"):
                        built = self._build()
                except Exception as error:
                    error.add_note(f"while tracing as rank {rank} of {self._world_size}")
                    raise
                self._runs[rank] = _found(built)
        return self._runs[rank]

    def visit(self, rank: int) -> set[int]:
        """Run `rank` and find those that are like it: along each axis of its meshes, one rank is tried for all."""
        mine = self.run(rank)
        alike = {rank}
        for mesh in _meshes(mine, rank):
            here = dict(zip(mesh.names, mesh.coordinate(rank)))
            same = []
            for name, size in mesh.axes:
                other = dict(here)
                other[name] = size - 1 if here[name] != size - 1 else 0
                if size == 1 or self.run(mesh.rank_at([other[n] for n in mesh.names])) == mine:
                    same.append(name)
            fixed = {name: at for name, at in here.items() if name not in same}
            alike |= set(mesh.submesh(*same, at=fixed).ranks.tolist())
        self.alike[rank] = alike
        return alike

    def layout(self, *, everywhere: bool) -> StateLayout:
        """All that was found, put together. `everywhere`: what all runs have plain, all ranks have."""
        holders: dict[str, list[int]] = {}
        for rank in self.alike:
            for fqn in self._runs[rank]:
                holders.setdefault(fqn, []).append(rank)
        tensors: dict[str, TensorLayout] = {}
        for fqn, ranks in holders.items():
            found = {rank: self._runs[rank][fqn] for rank in ranks}
            first = found[ranks[0]]
            for rank, other in found.items():
                if other.spec != first.spec or bool(other.forms) != bool(first.forms):
                    raise LayoutError(f"tensor {fqn!r} is {first} on rank {ranks[0]}, but {other} on rank {rank}")
            if not first.forms:
                reached = {rank for holder in ranks for rank in self.alike[holder]}
                if everywhere and len(ranks) == len(self.alike):
                    reached = set(range(self._world_size))
                form: Form = ProductForm.make(Mesh({"world": len(reached)}, sorted(reached)), [Replicate()])
            else:
                form = self._one_form(fqn, found)
            try:
                tensors[fqn] = TensorLayout.of(first.spec, form)
            except PlanError as error:
                raise LayoutError(str(error)) from error
        return StateLayout(tensors, self._world_size)

    def _one_form(self, fqn: str, found: Mapping[int, _TracedTensor]) -> Form:
        """The form that a tensor has by what these ranks found; more are run where they cannot tell."""
        by_mesh: dict[tuple[int, ...], list[_TracedTensor]] = {}
        for one in found.values():
            by_mesh.setdefault(tuple(one.forms[0].ranks()), []).append(one)
        agreed = [self._agreed(fqn, ranks, some) for ranks, some in by_mesh.items()]
        products = [form for form in agreed if isinstance(form, ProductForm)]
        ranks = [rank for form in products for rank in form.mesh.ranks.tolist()]
        if len(agreed) == 1 and agreed[0] is not None:
            return agreed[0]
        alike = {(form.mesh.axes, form.placements) for form in products}
        if len(products) != len(agreed) or len(alike) != 1 or len(set(ranks)) != len(ranks):
            said = dict.fromkeys(form for one in found.values() for form in one.forms)
            raise LayoutError(f"ranks disagree about tensor {fqn!r}: {'; '.join(map(str, said))}")
        first = products[0]
        copies = next(name for name in ("copies", "copies_") if name not in first.mesh.names)
        mesh = Mesh([(copies, len(products)), *first.mesh.axes], ranks)
        return ProductForm.make(mesh, [Replicate(), *first.placements])

    def _agreed(self, fqn: str, ranks: Sequence[int], found: Sequence[_TracedTensor]) -> Form | None:
        """The form of a tensor on one mesh; None where its ranks disagree."""
        said = [one.forms for one in found]
        for rank in ranks:
            if len([form for form in said[0] if all(form in other for other in said)]) <= 1:
                break
            said.append(self.run(rank)[fqn].forms)
        try:
            return agreed_form(found[0].spec.shape, said)
        except LayoutError as error:
            raise LayoutError(f"tensor {fqn!r} {error}") from None


@contextlib.contextmanager
def _as_rank(rank: int, world_size: int) -> Iterator[None]:
    """A fake default process group in which this process is `rank`."""
    if dist.is_initialized():
        raise LayoutError(
            "a process group is initialized in this process, and tracing needs to pretend another: trace before "
            "init_process_group, after destroy_process_group, or in a process of its own"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


def _found(built: Any) -> Run:
    """The tensors of what `build` returned."""
    if isinstance(built, nn.Module):
        built = get_model_state_dict(built)
    elif isinstance(built, Sequence) and built and all(isinstance(part, nn.Module) for part in built):
        built = get_model_state_dict(list(built))
    if not isinstance(built, Mapping):
        raise LayoutError(f"build must return a module, a list of modules or a state dict, got {type(built).__name__}")
    out: Run = {}
    for path, value in flatten(built, is_leaf=is_tensor).leaves.items():
        if is_tensor(value):
            fqn = key_of(path)
            out[fqn] = _TracedTensor(spec_of(fqn, value), forms_of(value, fqn) if is_sharded(value) else ())
    return out


def _meshes(run: Run, rank: int) -> list[Mesh]:
    """The distinct meshes of a run that hold its rank."""
    forms = [found.forms[0] for found in run.values() if found.forms]
    meshes = dict.fromkeys(form.mesh for form in forms if isinstance(form, ProductForm))
    return [mesh for mesh in meshes if rank in mesh]


def _reached(run: Run, rank: int) -> set[int]:
    """All ranks that share a mesh with `rank`."""
    return {rank, *(int(other) for mesh in _meshes(run, rank) for other in mesh.ranks)}
