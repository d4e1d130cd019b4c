"""`trace_layout`: runs a job's own parallelization code on meta tensors, for each rank, in one
process.

A fake process group of any size lets the code run as rank r of the job. The resulting model shows
how every tensor is placed, so a plan describes the real model and not a set of rules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend "fake"

from planners.geometry.layout import ProductForm, StateLayout, form_from_json
from planners.geometry.mesh import Mesh
from reshard.arguments import renamed
from reshard.errors import LayoutError, OptionError, option_error
from reshard.live.state import take_apart
from reshard.live.wrappers import forget_meshes
from reshard.ranks.global_layout import Described, describe, join_layouts
from reshard.state_dict import get_model_state_dict


@renamed()
def trace_layout(build: Callable[[], Any], *, world_size: int, ranks: Iterable[int] | None = None) -> StateLayout:
    """Return the layout of a job with `world_size` ranks by running the job's own code in this
    process.

    Args:
        build: a function that builds and parallelizes what one rank has, as in the job. It returns a
            module, a list of modules (the pipeline stages of the rank), or a state dict. It runs with
            `torch.device("meta")` as default device, and with a default process group whose
            collectives do nothing. It must be deterministic.
        world_size: number of ranks of the job.
        ranks: run `build` only as these ranks. Ranks that share a mesh with one of them are assumed to
            have the same layout. None: run it as rank 0 and, along each axis of each mesh, as one more
            rank. If that rank has other tensors (a pipeline stage, its own experts), or if a rank is in
            no mesh, run it as all ranks.

    Returns:
        The layout of the job. Plain tensors are taken as full tensors on every rank that has them. A
        tensor with the same layout on several meshes, such as weights tied across pipeline stages, is
        replicated over these meshes.

    Raises:
        OptionError: `build` is not a function, or `world_size` or a rank is out of range.
        LayoutError: a process group is already initialized, ranks disagree about a tensor, or a
            placement is not known.
        The errors of `build`, with a note that names the rank.
    """
    if type(world_size) is not int or world_size < 1:
        raise option_error(f"world_size must be an integer >= 1, got {world_size!r:.80}", LayoutError)
    if isinstance(build, torch.nn.Module) or not callable(build):
        raise OptionError(
            f"build must be a function that makes the model and shards it, as on one rank, got {type(build).__name__}: "
            f"write trace_layout(lambda: parallelize(Model()), world_size={world_size})"
        )
    trace = _Trace(build, world_size)
    if ranks is None:
        covered: set[int] = set()
        for rank in range(world_size):
            if rank not in covered:
                covered |= trace.visit(rank)
    else:
        for rank in ranks:
            if not 0 <= rank < world_size:
                raise option_error(f"ranks must be between 0 and {world_size - 1}, got {rank}", LayoutError)
            meshes = _meshes(trace.run(rank), rank)  # all ranks that share one with this rank
            trace.alike[rank] = {rank, *(int(other) for mesh in meshes for other in mesh.ranks)}
        if not trace.alike:
            raise option_error("ranks is empty: leave it out", LayoutError)
    return trace.layout()


class _Trace:
    """The tensors of each rank that was run."""

    def __init__(self, build: Callable[[], Any], world_size: int) -> None:
        self._build, self._world_size = build, world_size
        self._runs: dict[int, Described] = {}
        self.alike: dict[int, set[int]] = {}
        """rank -> the ranks that have the same, including itself"""

    def run(self, rank: int) -> Described:
        """Return what `rank` has. Runs it once."""
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
        """Run `rank`, and find similar ranks: along each axis of its meshes, one rank is tried for all."""
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

    def layout(self) -> StateLayout:
        """Combine all that was found into one layout."""
        for rank in self.alike:
            self._settle(rank)
        told, parties = set(self._runs), []
        for rank, described in self._runs.items():
            ranks = {rank} | (self.alike.get(rank, set()) - told)
            told |= ranks
            parties.append((described, sorted(ranks)))
        first, *others = self._runs.values()
        plain = {fqn: one for fqn, one in first.tensors.items() if not one.forms}
        everywhere = {fqn: one for fqn, one in plain.items() if all(run.tensors.get(fqn) == one for run in others)}
        if rest := set(range(self._world_size)) - told:  # all ranks have what is plain on all that were run
            parties.append((Described(everywhere, []), sorted(rest)))
        return StateLayout(dict(join_layouts(parties)), self._world_size)

    def _settle(self, rank: int) -> None:
        """Run more ranks if this one allows several layouts, until only one is left."""
        mine = self.run(rank)
        forms = list(map(form_from_json, mine.forms))
        for fqn, tensor in mine.tensors.items():
            possible = [mine.forms[number] for number in tensor.forms]
            for other in forms[tensor.forms[0]].ranks() if tensor.forms else ():
                if len(possible) <= 1:
                    break
                its = self.run(other)
                possible = [form for form in possible if form in (its.forms[n] for n in its.tensors[fqn].forms)]


@contextlib.contextmanager
def _as_rank(rank: int, world_size: int) -> Iterator[None]:
    """Create a fake default process group in which this process is `rank`."""
    if dist.is_initialized():
        raise LayoutError(
            "a process group is initialized in this process, and tracing needs a fake one: trace before "
            "init_process_group, after destroy_process_group, or in a separate process"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


def _found(built: Any) -> Described:
    """Return the tensors in the result of `build`."""
    if isinstance(built, nn.Module):
        built = get_model_state_dict(built)
    elif isinstance(built, Sequence) and built and all(isinstance(part, nn.Module) for part in built):
        built = get_model_state_dict(list(built))
    if not isinstance(built, Mapping):
        raise LayoutError(f"build must return a module, a list of modules or a state dict, got {type(built).__name__}")
    return describe(take_apart(built).tensors)


def _meshes(run: Described, rank: int) -> list[Mesh]:
    """Return the distinct meshes of a run that contain its rank."""
    forms = map(form_from_json, run.forms)
    meshes = dict.fromkeys(form.mesh for form in forms if isinstance(form, ProductForm))
    return [mesh for mesh in meshes if rank in mesh]
