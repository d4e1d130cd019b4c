"""The steps of a transfer, proved and divided into rounds, and the local tensors that they move."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from planners.errors import CoverageError
from planners.geometry.arrays import grouped
from planners.geometry.box import Dims
from planners.geometry.layout import Part, StateLayout, TensorLayout
from planners.geometry.views import View
from planners.plans.plan import verify
from planners.plans.relay import bytes_between, plan_relay, rank_groups, stripe_places
from planners.plans.schedule import Schedule, schedule
from planners.plans.transfer import HeldPlace, Repeat, TransferPlan, want_once
from reshard.api.transfer_matching import TensorMatches, TensorTransfer
from reshard.errors import LayoutError
from reshard.execute.exchange import RankWork, round_bytes
from reshard.live.dtypes import dtype_name
from reshard.live.state import Targets, same_memory
from reshard.live.tensors import LiveTensor, reach_bytes

_Parts = Sequence[torch.Tensor]
"""The local tensors of a rank."""


# Where several replicas on the receiving side want the same, they get a stripe each and
# pass the stripes on to one another, if that moves fewer bytes between the two sides,
# or between hosts. What a rank wants several times over is moved once, and copied
# afterwards.


@dataclass(frozen=True)
class Steps:
    """A transfer without its memory."""

    pairing: TensorMatches
    rounds: tuple[Schedule, ...]
    """The rounds of each step. After the first of two steps, receivers hold stripes of some tensors."""
    works: tuple[RankWork, ...]
    """This rank's part in each step."""
    places: Mapping[str, tuple[HeldPlace, ...]]
    """Transfer -> where the local tensors of the plans are within those that the transfer wants. No
    entry if its plans use complete local tensors."""
    repeats: tuple[tuple[str, str, Repeat], ...]
    """(transfer, transfer, what this rank copies from the first to the second) after everything has
    been moved."""
    bytes_between_groups: int
    """See `TransferReport`."""

    @property
    def plans(self) -> tuple[TransferPlan, ...]:
        """The plan of each step, for the complete job."""
        return tuple(rounds.plan for rounds in self.rounds)

    @property
    def relayed(self) -> tuple[str, ...]:
        """Transfers that move in two steps."""
        return self.rounds[1].plan.names if len(self.rounds) > 1 else ()


def plan_steps(
    pairing: TensorMatches, rank: int, world_size: int, *, budget_bytes: int, ranks_per_host: int | None
) -> Steps:
    """Return the steps for all tensor transfers, proved. `world_size`: ranks are below it. The
    result is the same on every rank, except for its own part.

    Raises LayoutError for an element that a rank wants and no rank holds.
    """
    moved, places, repeats = _wanted_once(pairing, rank)
    before = StateLayout({name: pairing.transfers[name].before for name in moved}, world_size)
    after = StateLayout(moved, world_size)
    try:
        plans = plan_relay(before, after, ranks_per_host=ranks_per_host)
        if len(plans) == 2:
            plans = plans[0], _without_conversion(plans[1], pairing)
        each = round_bytes(budget_bytes // len(plans))
        rounds = tuple(schedule(plan, max_inflight_bytes=each) for plan in plans)
    except CoverageError as error:
        raise LayoutError(
            f"the source does not contain every element of the target: {error}. Pass the complete tensor, or leave it "
            "out of the target"
        ) from None
    for step in rounds:
        verify(step).raise_if_failed()
    groups = rank_groups(TransferPlan(before, after, tuple(moved), ranks_per_host))
    between = sum(bytes_between(plan, groups[0]) for plan in plans) if groups else 0
    works = tuple(RankWork.of(step, rank) for step in rounds)
    return Steps(pairing, rounds, works, places, repeats, between)


def _without_conversion(plan: TransferPlan, pairing: TensorMatches) -> TransferPlan:
    """Return a step between receivers, which pass on what they hold unchanged, in the dtype of the target."""

    def lying(state: StateLayout) -> StateLayout:
        tensors = {}
        for name in plan.names:
            dtype = pairing.after[pairing.transfers[name].target].spec.dtype
            tensors[name] = TensorLayout.of(replace(state[name].spec, dtype=dtype), state[name].form)
        return StateLayout(tensors, state.world_size)

    return TransferPlan(lying(plan.before), lying(plan.after), plan.names, plan.ranks_per_host)


def _wanted_once(
    pairing: TensorMatches, rank: int
) -> tuple[dict[str, TensorLayout], dict[str, tuple[HeldPlace, ...]], tuple[tuple[str, str, Repeat], ...]]:
    """Return (what each transfer moves, where this rank puts it if that is not everything, what it
    copies afterwards)."""
    moved = {name: transfer.after for name, transfer in pairing.transfers.items()}
    alike = grouped(
        ((transfer.source, pairing.after[transfer.target].spec.dtype), name)
        for name, transfer in pairing.transfers.items()
    )
    places: dict[str, tuple[HeldPlace, ...]] = {}
    repeats: list[tuple[str, str, Repeat]] = []
    for names in alike.values():
        if len(names) == 1:
            continue
        once = want_once(moved[names[0]].spec.shape, tuple(moved[name].form for name in names))
        for name, form, its in zip(names, once.forms, once.places, strict=True):
            if its is not None:
                moved[name] = TensorLayout.of(moved[name].spec, form)
                places[name] = its.get(rank, ())
        for again in once.repeats.get(rank, ()):
            repeats.append((names[again.source.form], names[again.target.form], again))
    return moved, places, tuple(repeats)


# Transfers bound to memory: for each tensor of the plan, the local tensors that its
# items speak of.


def held_parts(tensor: LiveTensor | None, layout: TensorLayout, rank: int) -> Iterator[tuple[torch.Tensor, Part]]:
    """Return the parts of a layout that `rank` holds, each with its local tensor. `tensor`: None if
    it has no such key."""
    parts = layout.form.parts(layout.spec.shape, rank)
    return zip(part_tensors(layout.spec.fqn, _local(tensor), layout, rank), parts)


def _local(tensor: LiveTensor | None) -> _Parts:
    """Return its local tensors, read again because it may have new memory."""
    return replace(tensor).local if tensor is not None else ()


def part_tensors(key: str, local: _Parts, layout: TensorLayout, rank: int) -> list[torch.Tensor]:
    """Return the local tensors of `rank`, one for each part of the layout, in the shape of the
    part.

    Raises LayoutError if they differ from the layout.
    """
    parts = layout.form.parts(layout.spec.shape, rank)
    if any(dtype_name(tensor.dtype) != layout.spec.dtype for tensor in local):
        raise _unfit(key, rank, local, layout.spec.dtype)
    if len(local) == 1 and parts and all(part.flat_start is not None for part in parts):
        flat = local[0]
        numel = sum(part.numel for part in parts)
        if flat.shape != (numel,):
            raise _unfit(key, rank, local, f"a 1-D tensor of {numel} elements")
        return [flat[_start(part) : _start(part) + part.numel].view(part.sizes) for part in parts]
    if not parts and all(not tensor.numel() for tensor in local):
        return []
    if len(local) == 1 and len(parts) > 1:
        return _taken_apart(key, local[0], parts, rank)
    if [tuple(tensor.shape) for tensor in local] != [part.sizes for part in parts]:
        if not local and all(not part.numel for part in parts):
            return [
                torch.empty(part.sizes, dtype=torch.uint8, device="cpu") for part in parts
            ]  # nothing is read from it
        raise _unfit(key, rank, local, " and ".join(str(list(part.sizes)) for part in parts) or "nothing")
    return list(local)


def _taken_apart(key: str, local: torch.Tensor, parts: Sequence[Part], rank: int) -> list[torch.Tensor]:
    """Return views of the boxes that one plain tensor holds: side by side along a dim, or flattened
    and consecutive."""
    sizes = [part.sizes for part in parts]
    numels = [part.numel for part in parts]
    shape = tuple(local.shape)
    for dim in range(len(sizes[0])):
        beside = [(*size[:dim], sum(other[dim] for other in sizes), *size[dim + 1 :]) for size in sizes]
        if all(whole == shape for whole in beside):
            return list(torch.split(local, [size[dim] for size in sizes], dim))
    if shape == (sum(numels),):
        if local.is_contiguous():
            return [piece.view(size) for piece, size in zip(torch.split(local, numels), sizes, strict=True)]
        raise LayoutError(
            f"tensor {key!r}: rank {rank} passed its boxes flattened, in memory that is not contiguous: pass a "
            "contiguous tensor"
        )
    boxes = " and ".join(str(list(size)) for size in sizes)
    raise LayoutError(
        f"tensor {key!r}: by the layout, rank {rank} should hold boxes of {boxes} in one tensor, side by side along a "
        f"dim or flattened ([{sum(numels)}]), but it passed {list(shape)}: correct the layout or the tensor"
    )


def _start(part: Part) -> int:
    assert part.flat_start is not None
    return part.flat_start


def _unfit(key: str, rank: int, local: _Parts, wanted: str) -> LayoutError:
    there = " and ".join(f"{list(tensor.shape)} of {dtype_name(tensor.dtype)}" for tensor in local) or "nothing"
    return LayoutError(
        f"tensor {key!r}: by the layout, rank {rank} should hold {wanted}, but it passed {there}: correct the layout "
        "or the tensor"
    )


class TransferMemory:
    """The memory of all tensor transfers on one rank. Methods return the local tensors that one
    side of a plan refers to."""

    def __init__(self, steps: Steps, sources: Targets, targets: Targets, rank: int) -> None:
        """`sources`, `targets`: this rank's own states. Their tensors may get other memory meanwhile."""
        self._steps, self._pairing, self._rank = steps, steps.pairing, rank
        self._sources, self._targets = sources, targets

    def given(self, name: str) -> _Parts:
        """Return the local tensors of its source."""
        source = self._pairing.transfers[name].source
        local = _local(self._sources.tensors.get(source))
        return part_tensors(source, local, self._pairing.before[source], self._rank)

    def target(self, key: str) -> _Parts:
        """Return the local tensors of a target, one for each part."""
        local = self._targets.writable(key) if key in self._targets.tensors else ()
        return part_tensors(key, local, self._pairing.after[key], self._rank)

    def wanted(self, name: str) -> _Parts:
        """Return where the wanted boxes of its source go, as views of the local tensors of its target."""
        transfer = self._pairing.transfers[name]
        return _slots(transfer, self.target(transfer.target), self._rank)

    def moved(self, name: str) -> _Parts:
        """Return the wanted parts that are moved, without those that repeat what another transfer brings."""
        parts, places = self.wanted(name), self._steps.places.get(name)
        return parts if places is None else [parts[place.part][place.box.slices] for place in places]

    def arriving(self, name: str) -> _Parts:
        """Return where the first step writes: everything that is moved, or the stripe of it that
        this rank passes on."""
        parts = self.moved(name)
        if name not in self._steps.relayed:
            return parts
        passed_on = self._steps.plans[1]
        places = stripe_places(passed_on.before[name], passed_on.after[name], self._rank)
        return [parts[part][box.slices] for part, box in places]


def _slots(transfer: TensorTransfer, there: _Parts, rank: int) -> _Parts:
    if transfer.slots is None:
        turn = transfer.turn
        return there if turn is None else [turned(tensor, turn) for tensor in there]
    return [turned(there[slot.part][slot.box.slices], slot.dims) for slot in transfer.slots.get(rank, ())]


def turned(tensor: torch.Tensor, dims: Dims) -> torch.Tensor:
    """Return a view whose dim i is dim `dims[i]`, or new and of size 1 for None. Dims of size 1 may
    be omitted."""
    rest = [d for d in range(tensor.ndim) if d not in dims]
    moved = tensor.permute([*(d for d in dims if d is not None), *rest])
    return moved.view([1 if d is None else tensor.shape[d] for d in dims])


def refuse_shared_memory(
    pairing: TensorMatches, sources: Mapping[str, LiveTensor], targets: Mapping[str, LiveTensor]
) -> None:
    """Raise LayoutError if a target would be written before a source in the same memory is read.

    A tensor may be its own source, in the same layout: then nothing happens to it.
    """
    spans: defaultdict[torch.device, list[tuple[int, int, bool, str]]] = defaultdict(list)
    for transfer in pairing.transfers.values():
        source, target, view = transfer.source, transfer.target, pairing.views[transfer.target]
        held = _local(sources.get(source)), _local(targets.get(target))
        stays = transfer.before.form == pairing.after[target].form
        same = (same_memory(a, b) and a.dtype == b.dtype for a, b in zip(*held) if a.numel() or b.numel())
        if stays and view.geometry == View.of(view.spec).geometry and all(same):
            continue
        for tensors, is_target, key in zip(held, (False, True), (source, target)):
            for tensor in tensors:
                if tensor.numel() and tensor.device.type != "meta":
                    at = tensor.data_ptr()
                    spans[tensor.device].append((at, at + reach_bytes(tensor), is_target, key))
    for those in spans.values():
        _refuse_overlaps(sorted(those))


def _refuse_overlaps(spans: Sequence[tuple[int, int, bool, str]]) -> None:
    """Raise LayoutError for targets that overlap. `spans`: (first byte, one past the last, of a
    target, key), in order, of one device: addresses of different devices may be equal."""
    reach = [(0, "")] * 2  # of sources, of targets: where the furthest ends
    for start, stop, is_target, key in spans:
        end, other = reach[not is_target]
        if start < end:
            source, target = (other, key) if is_target else (key, other)
            raise LayoutError(
                f"the target {target!r} shares memory with the source {source!r}, so the transfer would overwrite the "
                "source before it is read: give the target its own memory"
            )
        reach[is_target] = max(reach[is_target], (stop, key))
