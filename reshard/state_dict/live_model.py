"""Canonical names: the names of parameters and buffers without wrappers around their modules.

One walk over the live modules finds every name and its tensor. All other modules of this package
only look names up. A wrapper's segment is removed because of the wrapper's class, never because of
its spelling, so your own child module called `module` keeps its name.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from planners.geometry.box import Shape
from planners.units import format_some
from reshard.errors import NormalizationError, format_value, option_error
from reshard.live.deepspeed import is_partitioned, whole_shape
from reshard.live.fsdp1 import FlatPiece, is_flat
from reshard.live.tensors import is_dtensor
from reshard.live.wrappers import EXTRA_STATE, ModuleReader


@dataclass(frozen=True)
class Stage:
    """A pipeline stage whose layer numbers begin at 0, and the numbers of its layers in the full
    model.

    Stage(module, {"layers": 8})       # layers.0 of this module is layers.8 of the model
    Stage(nn.Sequential(...), {"": 8})  # its own children 0, 1, ... are 8, 9, ... of the model
    """

    module: nn.Module
    offsets: Mapping[str, int] = field(default_factory=dict)
    """Canonical name of each numbered container in the stage -> the number that its child 0 has in
    the full model.
    """

    def __post_init__(self) -> None:
        if not isinstance(self.module, nn.Module):
            raise NormalizationError(f"Stage takes the module of a pipeline stage, got {format_value(self.module)}")
        for name, offset in self.offsets.items():
            if type(offset) is not int or offset < 0:
                raise NormalizationError(f"offset of {name!r} in a stage must be an integer >= 0, got {offset!r:.80}")


Models = nn.Module | Stage | Sequence[nn.Module | Stage]


class StateEntry(NamedTuple):
    """One place in a live module that holds state, under one of its names."""

    name: str
    """Canonical name."""
    live: str
    """Name in the live module, including wrapper segments."""
    kind: str
    """"parameter", "buffer" or "extra_state"."""
    owner: nn.Module
    attr: str
    value: torch.Tensor | None
    """The tensor. None for extra state."""
    persistent: bool
    """False for buffers that are not part of state dicts."""
    wrappers: tuple[str, ...]
    """Classes of the wrappers around it, outermost first."""
    stage: int
    """Index of its module in the list of modules."""
    piece: FlatPiece | None = None
    """Set for a parameter inside a flat parameter. `value` is then the tensor that the optimizer
    has.
    """

    @property
    def identity(self) -> Any:
        """Equal for all names of one tied tensor."""
        return id(self.value) if self.piece is None else self.piece.identity

    @property
    def shape(self) -> Shape:
        """Global shape. () for extra state, and for lazy parameters without a shape."""
        if self.piece is not None:
            return self.piece.shape
        if self.value is None or is_lazy(self.value):
            return ()
        return whole_shape(self.value) if is_partitioned(self.value) else tuple(self.value.shape)

    def after_write(self, reader: ModuleReader) -> Callable[[], object] | None:
        """Return the function to call after the tensor was written, under FSDP."""
        if self.piece is not None:
            return self.piece.free_gathered
        if not is_dtensor(self.value) or not reader.touched(self.owner):
            return None
        owner = weakref.ref(self.owner)
        return lambda: (module := owner()) and reader.settle(module)

    def tensor(self) -> torch.Tensor:
        """The live tensor, sharded as in the model. Writing into it changes the model."""
        if self.piece is not None:
            return self.piece.value()
        if self.value is None:
            raise NormalizationError(f"{self.name!r} is extra state, which is not a tensor")
        return self.value.detach()


@dataclass(frozen=True)
class SelfLoadingModule:
    """A module that reads and writes its own state dict and that of its children."""

    module: nn.Module
    prefix: str
    """Canonical name of the module, followed by a dot unless it is empty."""
    slots: tuple[StateEntry, ...]
    """Entries that the walk finds inside. Their names are known, but they are not read or written
    directly.
    """
    reader: ModuleReader
    offsets: Mapping[str, int]
    """The offsets of its stage."""

    def canonical(self, key: str) -> str:
        """Return the canonical name of a key of `module.state_dict()`. Keeps unknown segments."""
        current: nn.Module | None = self.module
        out = self.prefix.split(".")[:-1]
        for part in key.split("."):
            hidden: frozenset[str] = frozenset()
            while current is not None:
                hidden = self.reader.hidden(current)
                if part in hidden or self.reader.owns(current, part):
                    break
                # a hook has already dropped the wrapper's segment from this key
                current = self.reader.child(current, next(iter(hidden))) if len(hidden) == 1 else None
            if current is None or part not in hidden:
                out.append(self._numbered(out, part, 1))
            current = self.reader.child(current, part) if current is not None else None
        return ".".join(out)

    def key_of(self, name: str) -> str:
        """Return the key that an unknown canonical name has in the module, with the module's own
        layer numbers."""
        parts = name.split(".")
        own = [self._numbered(parts[:i], part, -1) for i, part in enumerate(parts)]
        return ".".join(own[self.prefix.count(".") :])

    def _numbered(self, container: Sequence[str], part: str, sign: int) -> str:
        offset = self.offsets.get(".".join(container)) if self.offsets else None
        return part if offset is None or not part.lstrip("-").isdecimal() else str(int(part) + sign * offset)


class LiveModel:
    """Every name of one module or of a list of modules, found in one walk.

    Raises NormalizationError if two different tensors have the same canonical name.
    """

    def __init__(self, models: Models, modifiers: str = "_fqn_modifiers") -> None:
        self.stages = _as_stages(models)
        self.items: list[StateEntry | SelfLoadingModule] = []
        """Entries that are read directly, and modules that read themselves, in the order of
        `state_dict()`.
        """
        self.slots: list[StateEntry] = []
        """All entries, including those inside self-loading modules."""
        self.reader = ModuleReader(modifiers)
        self.overwritten: dict[int, int] = {}
        """Maps the id of a buffer that a wrapper will overwrite with that of another rank to that
        rank."""
        for index, stage in enumerate(self.stages):
            walk = _ModuleWalk(self.reader, index, stage.offsets, self.slots)
            walk.visit(stage.module, "", "", (), self.items)
            self.overwritten |= walk.overwritten
            _check_offsets(stage, walk.numbered)
        self.by_name: dict[str, StateEntry] = {}
        self.names_of: dict[Any, list[str]] = {}
        """Maps the `identity` of an entry to all canonical names of its tensor, in the order of the
        walk.
        """
        self.tied: set[str] = set()
        """Names whose tensor has other names, too."""
        self.pieces_of: dict[int, list[FlatPiece]] = {}
        """Maps the id of a flat parameter that optimizers have to the parameters in it."""
        self._index()
        self.partitioned: list[StateEntry] = []
        """Parameters of ZeRO-3, of which this rank holds parts outside of the tensors."""
        self._look_at_empty()

    def _index(self) -> None:
        by_name, names_of = self.by_name, self.names_of
        if not any(map(_PIECE, self.slots)):
            every = list(map(_NAME, self.slots))
            by_name.update(zip(every, self.slots))
            names_of.update(zip(map(id, map(_VALUE, self.slots)), map(list, zip(every))))
            if len(by_name) == len(names_of) == len(every) and id(None) not in names_of:
                return  # the usual case: all names and tensors are distinct
            by_name.clear()
            names_of.clear()
        for slot in self.slots:
            name = slot.name
            known = by_name.setdefault(name, slot)
            if known is not slot and (known.value is None or known.identity != slot.identity):
                _check_same(known, slot)
            if slot.value is None:
                continue
            identity = id(slot.value) if slot.piece is None else slot.piece.identity
            names = names_of.get(identity)
            if names is None:
                names_of[identity] = [name]
                if slot.piece is not None:
                    self.pieces_of.setdefault(id(slot.value), []).append(slot.piece)
            elif name not in names:
                names.append(name)
                self.tied.update(names)

    def _look_at_empty(self) -> None:
        """Find parameters whose elements are stored elsewhere. Raises NormalizationError if their
        location is unknown.
        """
        every = [slot for slot in self.slots if slot.kind == "parameter" and slot.piece is None]
        empty = [slot for slot in every if type(slot.value) is nn.Parameter and not slot.value.numel()]
        self.partitioned = [slot for slot in empty if slot.value is not None and is_partitioned(slot.value)]
        if self.partitioned or len(empty) < len(every):
            return
        for slot in empty:
            sizes = [size for name in _SIZES if (size := getattr(slot.owner, name, None)) is not None]
            if sizes and all(isinstance(size, int) and size > 0 for size in sizes):
                raise NormalizationError(
                    f"every parameter of the model is empty{where()}, but {slot.name!r} belongs to {slot.owner}: "
                    "its elements were removed. Get the state dict where the parameters are full tensors"
                )

    def refuse_partitioned(self, fix: str) -> None:
        """Raise NormalizationError if this rank holds only parts of parameters. The error says what
        to do.
        """
        if self.partitioned:
            names = format_some([slot.name for slot in self.partitioned])
            raise NormalizationError(
                f"DeepSpeed's ZeRO-3 has sharded {names}{where()}, so that the parameters themselves are empty: {fix}"
            )

    def aliases(self, slot: StateEntry) -> list[str]:
        """Return all names of the entry's tensor, including its own."""
        return self.names_of[slot.identity] if slot.value is not None else [slot.name]

    @functools.cached_property
    def by_live(self) -> dict[str, str]:
        """Return the canonical name of each live name."""
        return {slot.live: slot.name for slot in self.slots}

    def tensors(self) -> Collection[torch.Tensor]:
        """Return parameters and buffers, each once, without those inside FSDP1 flat parameters."""
        found = {id(slot.value): slot.value for slot in self.slots if slot.value is not None and slot.piece is None}
        return found.values()

    def of_kind(self, kind: str) -> Iterator[StateEntry]:
        """Return the entries of one kind, each name once."""
        return (slot for slot in self.by_name.values() if slot.kind == kind)

    def prefixes(self, modules: Iterable[nn.Module]) -> list[str]:
        """Return the canonical prefixes, with a dot, of modules inside. Raises NormalizationError
        for a module that is not inside.
        """
        found: list[str] = []
        wanted = set(modules)
        for stage in self.stages:
            region = SelfLoadingModule(stage.module, "", (), self.reader, stage.offsets)
            for path, module in stage.module.named_modules():
                if module in wanted:
                    wanted.discard(module)
                    name = region.canonical(path) if path else ""
                    found.append(f"{name}." if name else "")
        if wanted:
            raise NormalizationError(f"submodules {[type(m).__name__ for m in wanted]} are not part of the model")
        return found


_NAME, _VALUE, _PIECE = map(attrgetter, ("name", "value", "piece"))
_SIZES = (
    "in_features",
    "out_features",
    "num_embeddings",
    "embedding_dim",
    "in_channels",
    "out_channels",
    "num_features",
)
"""Attributes in which torch's modules store the sizes of their parameters."""


@dataclass
class _ModuleWalk:
    """One pass over a module tree."""

    reader: ModuleReader
    stage: int
    offsets: Mapping[str, int]
    slots: list[StateEntry]
    pieces: dict[int, list[tuple[str, FlatPiece]]] = field(default_factory=dict)
    numbered: set[str] = field(default_factory=set)
    overwritten: dict[int, int] = field(default_factory=dict)

    def visit(
        self,
        module: nn.Module,
        live: str,
        name: str,
        wrappers: tuple[str, ...],
        items: list[StateEntry | SelfLoadingModule] | None,
    ) -> None:
        """Append the state of the module and its children to `slots`. Also append it to `items`,
        unless `items` is None, which means that the module is inside a self-loading one.

        `live` and `name` are the module's live and canonical prefixes. Both end in a dot or are
        empty.
        """
        reader, facts, start = self.reader, self.reader.facts(module), len(self.slots)
        if facts.wrapped is not None:
            self.overwritten |= reader.overwritten(module)
        if facts.overrides or facts.flattens or reader.touched(module):
            if items is not None and reader.is_opaque(module, facts):
                self.visit(module, live, name, wrappers, None)
                items.append(SelfLoadingModule(module, name, tuple(self.slots[start:]), reader, self.offsets))
                return
            for owner, found in reader.settle(module).items():
                self.pieces.setdefault(owner, []).extend(found)
        self._own(module, live, name, wrappers, facts.has_extra_state)
        if items is not None:
            items += self.slots[start:]
        children = reader.children(module)
        if not children:
            return
        hidden = reader.hidden(module) if facts.wrapped is not None or facts.modifiers else ()
        container = name[:-1]
        offset = self.offsets.get(container) if self.offsets else None
        for child_name, child in children.items():
            if child is None:
                continue
            below, inside = wrappers, f"{live}{child_name}."
            path = inside if name is live else f"{name}{child_name}."  # no wrapper so far: both prefixes are equal
            if child_name in hidden:
                below, path = (*wrappers, type(module).__name__), name
            elif offset is not None and child_name.isdecimal():
                self.numbered.add(container)
                path = f"{name}{int(child_name) + offset}."
            self.visit(child, inside, path, below, items)

    def _own(self, module: nn.Module, live: str, name: str, wrappers: tuple[str, ...], has_extra: bool) -> None:
        """Append the module's own parameters, buffers, and extra state, in the order of
        `state_dict()`.
        """
        add, stage, make = self.slots.append, self.stage, tuple.__new__  # three times as fast as StateEntry(...)
        pieces = self.pieces.get(id(module), ()) if self.pieces else ()
        for attr, piece in pieces:
            value = piece.parameter
            add(StateEntry(name + attr, live + attr, "parameter", module, attr, value, True, wrappers, stage, piece))
        flattened = {attr for attr, _ in pieces} if pieces else ()
        for attr, parameter in self.reader.parameters(module).items():
            if parameter is not None and attr not in flattened and not (self.pieces and is_flat(parameter)):
                full = name + attr
                inside = full if live is name else live + attr
                add(make(StateEntry, (full, inside, "parameter", module, attr, parameter, True, wrappers, stage, None)))
        buffers = self.reader.buffers(module)
        if buffers:
            transient = self.reader.transient(module)
            for attr, buffer in buffers.items():
                if buffer is not None:
                    kept = attr not in transient
                    add(StateEntry(name + attr, live + attr, "buffer", module, attr, buffer, kept, wrappers, stage))
        if has_extra:
            names = name + EXTRA_STATE, live + EXTRA_STATE
            add(StateEntry(*names, "extra_state", module, EXTRA_STATE, None, True, wrappers, stage))


def where() -> str:
    """Return " on rank 3" in a distributed job, otherwise "". For error messages."""
    return f" on rank {dist.get_rank()}" if dist.is_available() and dist.is_initialized() else ""


def _as_stages(models: Any) -> tuple[Stage, ...]:
    if isinstance(models, Mapping | str | torch.Tensor) or not isinstance(models, nn.Module | Stage | Iterable):
        kinds = "a module, a Stage, or a list of them"
        words = f"the first argument must be the model ({kinds}), got {type(models).__name__}"
        raise option_error(words, NormalizationError)
    given = [models] if isinstance(models, nn.Module | Stage) else list(models)
    if not given:
        raise NormalizationError("model is an empty list: give a module, or one module per stage")
    for one in given:
        if not isinstance(one, nn.Module | Stage):
            raise NormalizationError(f"model must be a module, a Stage, or a list of them, got {type(one).__name__}")
    return tuple(one if isinstance(one, Stage) else Stage(one) for one in given)


def _check_offsets(stage: Stage, numbered: set[str]) -> None:
    unused = sorted(set(stage.offsets) - numbered)
    if unused:
        raise NormalizationError(
            f"the stage has no numbered children under {unused[0]!r}{where()}: "
            "offsets name containers by their canonical name, such as 'layers'"
        )


def _check_same(first: StateEntry, second: StateEntry) -> None:
    """Raise NormalizationError unless both entries are copies of one buffer in several stages. Only
    these may share a name."""
    a, b = first.value, second.value
    if first.stage != second.stage and first.kind == second.kind == "buffer" and a is not None and b is not None:
        same = a.shape == b.shape and a.dtype == b.dtype and (a.is_meta or b.is_meta or torch.equal(a, b))
        if same:
            return
        raise NormalizationError(
            f"buffer {first.name!r} has different values in stages {first.stage} and {second.stage}{where()}: "
            "stages that share a buffer must agree on it"
        )
    hint = ""
    if first.stage != second.stage:
        hint = ": if the stages number their layers from 0, give Stage(module, offsets) for each"
    raise NormalizationError(
        f"two places have the canonical name {first.name!r}{where()}: "
        f"{first.live!r} of stage {first.stage} and {second.live!r} of stage {second.stage}{hint}"
    )
