"""How the ranks of a transfer come to know, and to agree on, what all of them hold and want."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict

import msgspec
import torch.distributed as dist

from planners.geometry.layout import StateLayout, TensorLayout
from planners.views.view import View
from reshard.api.redistribute.pairing import Pairing
from reshard.control.global_layout import Described, describe, join_aliases, join_layouts
from reshard.control.global_state import lies_on_device
from reshard.control.group import Group
from reshard.errors import LayoutError, format_ranks
from reshard.execute.messages.wires import sending_kinds
from reshard.mapping import Mapping as StateMapping
from reshard.state.live_state import LiveTensor
from reshard.state.targets import Targets

__all__ = ["Agreed", "Options", "Side", "TransferOptions", "agree"]


class TransferOptions(TypedDict, total=False):
    """What `prepare`, `redistribute` and `verify_live` take by name; the same on every rank, but for layouts."""

    mapping: Mapping[str, str] | StateMapping
    views: Iterable[View]
    source_layouts: Mapping[str, TensorLayout]
    target_layouts: Mapping[str, TensorLayout]
    strict: bool
    dtype_policy: str
    check_replicas: bool
    max_inflight_bytes: int
    ranks_per_host: int | None
    delta: bool
    deadline_s: float


@dataclass(frozen=True)
class Options:
    """`TransferOptions`, checked and with what holds where nothing is said."""

    mapping: Mapping[str, str] | StateMapping = field(default_factory=dict)
    views: Mapping[str, View] = field(default_factory=dict)
    source_layouts: Mapping[str, TensorLayout] = field(default_factory=dict)
    target_layouts: Mapping[str, TensorLayout] = field(default_factory=dict)
    strict: bool = True
    dtype_policy: str = "error"
    check_replicas: bool = True
    max_inflight_bytes: int = 256 << 20
    ranks_per_host: int | None = None
    delta: bool = False
    deadline_s: float = 1800.0

    @classmethod
    def of(cls, given: TransferOptions) -> Options:
        """Raises LayoutError for a policy that is not known, a budget that is too small, or two views of one name."""
        views = list(given.get("views", ()))
        named: Any = {**given, "views": {view.spec.fqn: view for view in views}}
        options = cls(**named)
        if options.dtype_policy not in ("error", "cast"):
            raise LayoutError(f"dtype_policy must be 'error' or 'cast', got {options.dtype_policy!r}")
        if options.max_inflight_bytes < 1024:
            raise LayoutError(f"max_inflight_bytes must be at least 1024, got {options.max_inflight_bytes}")
        if len(options.views) != len(views):
            raise LayoutError("two views make the same target")
        return options

    def shared(self) -> dict[str, object]:
        """What all ranks must choose alike."""
        mapping = self.mapping if isinstance(self.mapping, StateMapping) else sorted(self.mapping.items())
        views = sorted(self.views.items(), key=lambda row: row[0])
        own = ("mapping", "views", "source_layouts", "target_layouts", "deadline_s")
        rest = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in own}
        return {"mapping": mapping, "views": views, **rest}

    def digest(self) -> str:
        """Equal where all that the ranks must choose alike is equal."""
        return hashlib.sha256(repr(self.shared()).encode()).hexdigest()


@dataclass(frozen=True)
class Side:
    """What this rank gives, or wants."""

    state: Targets
    layouts: Mapping[str, TensorLayout]
    """Of plain local tensors that do not say themselves how they lie."""

    @classmethod
    def of(cls, state: Mapping[str, Any] | None, layouts: Mapping[str, TensorLayout]) -> Side:
        """Take a state dict apart; None holds nothing. Raises FormatError for what is none."""
        return cls(Targets.of({} if state is None else state), layouts)  # type: ignore[arg-type]  # refused if it is none

    @classmethod
    def read(cls, state: Mapping[str, Any] | None, layouts: Mapping[str, TensorLayout]) -> Side:
        """The same for a source, which may be a mapping that cannot be changed."""
        fixed = isinstance(state, Mapping) and not isinstance(state, MutableMapping)
        return cls.of(dict(state) if fixed and state is not None else state, layouts)

    @property
    def objects(self) -> list[str]:
        """Keys of what is no tensor."""
        return [*self.state.objects, *self.state.units]

    def describe(self) -> _SideDescription:
        """Without any values."""
        tensors = self.state.tensors
        empty = [key for key, tensor in tensors.items() if tensor.is_elsewhere]
        return _SideDescription(describe(tensors, self.layouts), self.objects, dict(self.state.tied), empty)


class _SideDescription(msgspec.Struct, frozen=True):
    tensors: Described
    objects: list[str]
    tied: dict[str, str]
    empty: list[str]

    def __bool__(self) -> bool:
        return bool(self.tensors.tensors or self.objects)


class _Description(msgspec.Struct, frozen=True):
    source: _SideDescription
    target: _SideDescription
    devices: list[str]
    """Kinds of device that this rank can send from, the preferred one first."""
    on_device: bool
    """Whether a tensor of its source lies elsewhere than in the memory of the CPU."""
    onto_device: bool
    """Whether one of its target does."""


@dataclass(frozen=True)
class Agreed:
    """What all ranks know after they have told one another. The same on every rank."""

    key: bytes
    """Equal whenever everything else is equal."""
    before: StateLayout
    after: StateLayout
    source_objects: tuple[str, ...]
    target_objects: tuple[str, ...]
    tied: Mapping[str, str]
    device: str
    on_device: bool
    """Whether a tensor of any source lies elsewhere than in the memory of the CPU."""
    onto_device: bool
    """Whether one of any target does."""

    def pair(self, options: Options) -> Pairing:
        """Raises KeyMismatchError; NormalizationError for a mapping that computes."""
        views, names = dict(options.views), options.mapping
        if isinstance(names, StateMapping):
            made = names.views(self.before.specs)
            views = {key: view for key, view in made.items() if key in self.after} | views
            names = {new: old for old, its in names.names(self.source_objects).items() for new in its}
            names = {new: old for new, old in names.items() if new in self.target_objects}
        return Pairing.of(
            self.before,
            self.after,
            source_objects=self.source_objects,
            target_objects=self.target_objects,
            tied=self.tied,
            views=views,
            mapping=names,
            strict=options.strict,
            allow_cast=options.dtype_policy == "cast",
        )


def agree(
    source: Side, target: Side, options: Options, group: Group, process_group: dist.ProcessGroup | None
) -> Agreed:
    """Collective: what all ranks hold and want, by digests.

    Raises LayoutError, alike on every rank: ranks disagree about a layout or an option, or have no part at all.
    """
    group.same_options("redistribute", options.shared())
    devices = _devices([*source.state.tensors.values(), *target.state.tensors.values()], process_group)
    held, wanted = (lies_on_device(side.state.tensors.values()) for side in (source, target))
    mine = _Description(source.describe(), target.describe(), devices, held, wanted)
    parties = group.parties(msgspec.json.encode(mine))
    said = {data: msgspec.json.decode(data, type=_Description) for data in parties}
    found = [(said[data], ranks) for data, ranks in parties.items()]
    _judge(found)
    sides = {
        name: _join(name, [(getattr(description, name), ranks) for description, ranks in found])
        for name in ("source", "target")
    }
    hasher = hashlib.sha256(repr(sorted(map(list, parties.values()))).encode())
    for data in parties:
        hasher.update(hashlib.sha256(data).digest())
    return Agreed(
        hasher.digest(),
        sides["source"],
        sides["target"],
        tuple(dict.fromkeys(key for d, _ in found for key in d.source.objects)),
        tuple(dict.fromkeys(key for d, _ in found for key in d.target.objects)),
        join_aliases((d.target.tensors.tensors, d.target.tied, d.target.empty) for d, _ in found),
        _common_device(found),
        any(description.on_device for description, _ in found),
        any(description.onto_device for description, _ in found),
    )


def _judge(found: list[tuple[_Description, Sequence[int]]]) -> None:
    idle = sorted(rank for d, ranks in found if not d.source and not d.target for rank in ranks)
    if idle:
        raise LayoutError(
            f"{format_ranks(idle)} neither give nor want anything: leave them out with a process_group of those that do"
        )


def _join(name: str, parties: list[tuple[_SideDescription, Sequence[int]]]) -> StateLayout:
    try:
        return join_layouts((side.tensors, ranks) for side, ranks in parties)
    except LayoutError as error:
        raise LayoutError(f"the ranks disagree about the {name}: {error}") from None


def _devices(tensors: list[LiveTensor], process_group: dist.ProcessGroup | None) -> list[str]:
    """Kinds of device that this rank can send from, the one that holds most of its bytes first."""
    held: dict[str, int] = {}
    for tensor in tensors:
        for local in tensor.local:
            held[local.device.type] = held.get(local.device.type, 0) + local.nbytes
    return sorted(sending_kinds(process_group), key=lambda kind: -held.get(kind, 0))


def _common_device(found: list[tuple[_Description, Sequence[int]]]) -> str:
    """The kind of device that messages are packed on: one that every rank can send from, best not by way of the CPU."""
    everyone = [description.devices for description, _ in found]
    preferred = [devices[0] for devices in everyone if devices]
    for kind in sorted(set(preferred), key=lambda kind: kind == "cpu"):
        if all(kind in devices for devices in everyone):
            return kind
    if all("cpu" in devices for devices in everyone):
        return "cpu"
    raise LayoutError(
        f"the backends of the ranks have no kind of device in common that they send from: {everyone}; "
        "initialise the process group with 'cpu:gloo,cuda:nccl'"
    )
