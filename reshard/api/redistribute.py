"""Moves state between running ranks, in place, from any layout to any other. See docs/live.md."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

import torch
import torch.distributed as dist

from planners.errors import PlanError
from planners.findings import Finding, Report
from planners.geometry.box import Box
from planners.geometry.layout import BoxesForm, Part, ProductForm, TensorSpec
from planners.geometry.views import Patch, filled_slots
from planners.plans.schedule import Schedule
from planners.plans.transfer import TransferPlan
from planners.units import format_bytes, format_count, format_some
from reshard.api.options import DEFAULTS, TransferOptions, complete, digest_of
from reshard.api.overlapping_targets import refuse_overlaps
from reshard.api.reports import FilledReport
from reshard.api.transfer_matching import Agreed, TensorMatches, TransferSide, Values, agree, check_replicas
from reshard.api.transfer_memory import Steps, TransferMemory, held_parts, plan_steps, refuse_shared_memory, turned
from reshard.arguments import renamed
from reshard.errors import KeyMismatchError, LayoutError, RankFailedError, ReshardError, UndefinedTargetsError
from reshard.execute.delta import DeltaExchange
from reshard.execute.exchange import Exchange, Waiter
from reshard.live.copy_streams import device_module, has_copy_streams
from reshard.live.dtypes import dtype_from_name, overflowing, raw_elements
from reshard.live.fingerprints import HeldSums, Holding, add_holdings, conclude, partial as partial_sum, sum_up
from reshard.live.state import tell_owners
from reshard.ranks.group import Group, device_of_kind
from reshard.ranks.progress import phase
from reshard.ranks.timespans import Span

_log = logging.getLogger("reshard")


@dataclass(frozen=True, repr=False)
class TransferReport(FilledReport):
    """What a transfer did. Counts are of this rank unless stated otherwise."""

    moved: tuple[str, ...]
    """Keys of all targets that were filled on any rank, and of this rank's per-rank values."""
    bytes_moved: int
    """Bytes sent between ranks, in the job."""
    bytes_between_groups: int
    """The part of `bytes_moved` that was sent from source ranks to target ranks, if no rank is
    on both sides. With `ranks_per_host`, the part that was sent between hosts. 0 if there is
    only one group."""
    bytes_among_receivers: int
    """The part of `bytes_moved` that replicas of the target sent to each other. Each of them first
    received a part of the tensor from a source."""
    bytes_sent: int
    bytes_received: int
    bytes_copied: int
    """Bytes copied within this rank."""
    rounds: int
    """Number of communication rounds, in the job."""
    buffer_bytes: int
    """Memory used in addition to sources and targets."""
    planned: bool
    """True if this call made the plan. False if it reused the plan of an earlier transfer with the
    same layouts."""

    def __repr__(self) -> str:
        """One line: what was moved, and the first names of what was not."""
        odd = [*self._first_of_each("missing", "unexpected", "cast"), *self._overflows]
        rounds = format_count(self.rounds, "round")
        moved = f"moved {len(self.moved)}, {format_bytes(self.bytes_moved)} between ranks in {rounds}"
        return f"TransferReport({', '.join([moved, *odd])})"


_MAX_CACHED = 16
_cache: OrderedDict[tuple[object, ...], Steps] = OrderedDict()


class Prepared:
    """A transfer with its plan and buffers. `prepare` makes it. `run` moves the current values of the tensors."""

    def __init__(
        self,
        source: TransferSide,
        target: TransferSide,
        agreed: Agreed,
        options: TransferOptions,
        group: Group,
    ) -> None:
        self._source, self._target, self._options = source, target, options
        self._group = group
        self._device = device_of_kind(agreed.device, self._tensors())
        self._on_device = agreed.on_device or agreed.onto_device
        if self._device.type != "cpu":
            # the backend of a device connects all ranks: the rounds of a transfer may involve only some of them
            dist.all_reduce(torch.zeros(1, dtype=torch.uint8, device=self._device), group=group.process_group)
        self._rank = group.job_rank
        key = (agreed.key, self._rank, digest_of(options))
        found = _cache.get(key)
        self._planned = found is None
        self._first = True
        self._before: list[Span] = []
        """The phases of `prepare`, until the first run has reported them."""
        self._crossed = 0
        """Bytes that all ranks sent in the last run, with `delta`."""
        with phase("plan"):
            if found is None:
                found = _cache[key] = plan_steps(
                    agreed.pair(options),
                    self._rank,
                    max(group.ranks) + 1,
                    budget_bytes=options["max_inflight_bytes"],
                    ranks_per_host=options["ranks_per_host"],
                )
                while len(_cache) > _MAX_CACHED:
                    _cache.popitem(last=False)
            _cache.move_to_end(key)
            self._steps = found
            self._values = Values(source.state, target.state, found.pairing.objects, options["mapping"])
        with phase("bind"):
            self._bind()

    @property
    def plans(self) -> tuple[TransferPlan, ...]:
        """Which rank sends what to which rank, for the complete job. There is a second plan if
        receivers send parts to each other."""
        return self._steps.plans

    @property
    def rounds(self) -> tuple[Schedule, ...]:
        """The plans as rounds of messages."""
        return self._steps.rounds

    @property
    def pairing(self) -> TensorMatches:
        """The source tensors of each target."""
        return self._steps.pairing

    def __repr__(self) -> str:
        """One line."""
        return f"Prepared({format_count(len(self.pairing.transfers), 'tensor')})"

    def run(self) -> TransferReport:
        """Move everything once. Collective.

        Raises:
            UndefinedTargetsError: a rank failed while bytes moved. All ranks raise it. It names the
                rank and the targets.
            RankFailedError, DeadlineError: a rank failed before that. Nothing was moved.
            LayoutError: a tensor got new memory that does not fit its layout. This rank moved
                nothing. In the first run, no other rank moves a byte either. In later runs, ranks
                do not wait for each other, so other ranks may raise UndefinedTargetsError.
        """
        if self._group.failed:
            self._group = Group(self._group.process_group, deadline_s=self._options["timeout"])
        self._moving = False
        with phase("redistribute") as span:
            try:
                with phase("move"), self._group.together("redistribute", meet=False):
                    self._run()
            except Exception as error:
                for exchange in self._exchanges:
                    if isinstance(exchange, DeltaExchange):
                        exchange.keep(ended_well=False)
                if self._moving:
                    raise self._undefined(error) from error
                raise
            span.nbytes = sum(exchange.received_bytes for exchange in self._exchanges)
        if self._before:
            span.began_ns = self._before[0].began_ns
            span.inner[:0], self._before = self._before, []
        return self._report(span)

    def _run(self) -> None:
        group = self._group
        if self._memory != self._places():
            self._bind()
        values = self._values.gather(group) if self._values else {}
        self._overflowed = Counter[str]()
        for key, piece, dtype in self._casts:
            self._overflowed[key] += overflowing(piece, dtype)
        if self._first:
            group.barrier()  # no rank writes before all are ready
        self._first = False
        with torch.no_grad(), Waiter(group, self._device) as waiter:
            self._moving = True
            self._ask(group, waiter)
            self._values.assign(values)
            waiter.settle(self._others)
            waiter.meet()
        tell_owners(its.value for key, its in self._target.state.tensors.items() if key in self.pairing.views)

    def _ask(self, group: Group, waiter: Waiter) -> None:
        """Submit all work of a run to the devices. Between tensors, with a backend of one device
        and without `delta`, this allocates no memory, waits for nothing on the host, and is the
        same in each run."""
        for exchange in self._exchanges:
            exchange.move(group, waiter)
        if self._options["delta"]:
            self._settle_differences(group, waiter)
        for to, of in self._repeats:
            to.copy_(of)
        for slot, value in self._fills:
            slot.fill_(value)

    def _settle_differences(self, group: Group, waiter: Waiter) -> None:
        """Collective: a rank that does not have its senders' values gets everything, and must then
        have them."""
        exchanges = [exchange for exchange in self._exchanges if isinstance(exchange, DeltaExchange)]
        for may_repeat in (True, False):
            sent = sum(exchange.sent_bytes for exchange in exchanges)
            wrong = sum(len(exchange.wrong) for exchange in exchanges)
            totals = waiter.total([sent, wrong])
            self._crossed = totals[0]
            for exchange in exchanges:
                exchange.keep(ended_well=True)
            if not totals[1]:
                return
            if not may_repeat:
                break
            _log.warning(
                "targets differ from what the last transfer left: %d pairs of ranks send everything", totals[1]
            )
            for exchange in exchanges:
                exchange.move(group, waiter, again=True)
        raise ReshardError(
            f"{totals[1]} pairs of ranks differ after everything was sent: make sure that nothing else writes to "
            "sources or targets during the transfer"
        )

    def _undefined(self, error: Exception) -> UndefinedTargetsError:
        keys = tuple(dict.fromkeys(transfer.target for transfer in self.pairing.transfers.values()))
        rank = error.rank if isinstance(error, RankFailedError) else self._rank
        return UndefinedTargetsError(
            "the transfer failed midway, and its targets are undefined: "
            f"{format_some(keys, 20)}. Create a new process group and fill them again: the old group "
            f"may have pending messages or closed connections. The cause: {error}",
            rank=rank,
            targets=keys,
        )

    def _bind(self) -> None:
        """Find the memory of all transfers, and make the buffers. Raises LayoutError if it differs
        from what was agreed."""
        pairing, rank = self.pairing, self._rank
        self._places_checked()
        self._values.check_places(self._options["strict"])
        refuse_shared_memory(pairing, self._source.state.tensors, self._target.state.tensors)
        self._ties_checked()
        memory = TransferMemory(self._steps, self._source.state, self._target.state, rank)
        for name in pairing.transfers:  # tensors that are neither sent nor received must match their layouts, too
            memory.given(name)
            memory.wanted(name)
        wires = {
            name: dtype_from_name(transfer.before.spec.dtype)
            for name, transfer in pairing.transfers.items()
            if transfer.target in pairing.cast
        }
        sides = [(memory.given, memory.arriving, wires), (memory.arriving, memory.moved, {})]
        kind = partial(DeltaExchange, on_device=self._on_device) if self._options["delta"] else Exchange
        self._exchanges = [
            kind(work, *ends, wires=cast, device=self._device, process_group=self._group.process_group)
            for work, (*ends, cast) in zip(self._steps.works, sides)
        ]
        if has_copy_streams(self._device):
            # the buffers may be memory that the stream of this moment still works on, and runs may
            # be on other streams
            device_module(self._device).current_stream(self._device).synchronize()
        self._repeats = [
            (
                memory.wanted(to)[again.target.part][again.target.box.slices],
                memory.wanted(of)[again.source.part][again.source.box.slices],
            )
            for of, to, again in self._steps.repeats
        ]
        self._fills = [
            (memory.target(key)[slot.part][slot.box.slices], slot.value)
            for key, view in pairing.views.items()
            if view.fills and key not in pairing.ties
            for slot in filled_slots(view.geometry, pairing.after[key].form, rank)
        ]
        self._casts = [
            (key, piece, dtype_from_name(dtype))
            for key, (_, dtype) in pairing.cast.items()
            for piece, _ in _taken(pairing, key, self._source, rank)
            if piece.is_cpu  # the host does not wait for a device
        ]
        self._memory = self._places()
        self._others = {tensor.device for tensor in self._tensors()} - {self._device}

    def _ties_checked(self) -> None:
        """Raise KeyMismatchError if only this rank has the same memory for different targets."""
        pairing, its, filled = self.pairing, self._target.state, dict[str, str]()
        for key in (key for key in its.tensors if key in pairing.views):
            first = filled.setdefault(its.aliases.get(key, key), key)
            a, b = (pairing.ties.get(one, one) for one in (key, first))
            if a != b and (why := pairing.refused_tie(a, b, self._rank)):
                raise KeyMismatchError(f"the target on rank {self._rank} does not match the source: {why}")
        refuse_overlaps(replace(its.tensors[key]) for key in filled.values())

    def _places_checked(self) -> None:
        for transfer in self.pairing.transfers.values():
            live = self._source.state.tensors.get(transfer.source)
            if live is not None and live.is_meta:
                raise LayoutError(f"the source {transfer.source!r} is a meta tensor, without values: fill it first")

    def _places(self) -> list[tuple[Any, ...]]:
        """Return address, dtype, and shape of all local tensors. They stay equal as long as no
        tensor gets new memory."""
        return [(t.data_ptr(), t.dtype, t.shape, t.stride(), t.is_conj(), t.is_neg()) for t in self._tensors()]

    def _tensors(self) -> Iterator[torch.Tensor]:
        for side in (self._source, self._target):
            for live in side.state.tensors.values():
                yield from replace(live).local if not live.is_meta else ()  # asked again

    def _report(self, span: Span) -> TransferReport:
        pairing, exchanges = self.pairing, self._exchanges
        own, own_missing, own_unexpected = self._values.own
        planned, self._planned = self._planned, False
        return TransferReport(
            moved=(*pairing.views, *pairing.objects, *own),
            missing=(*pairing.missing, *own_missing),
            unexpected=(*pairing.unexpected, *own_unexpected),
            cast=pairing.cast,
            overflowed=dict(+self._overflowed),
            bytes_moved=self._crossed if self._options["delta"] else sum(plan.bytes_moved for plan in self.plans),
            bytes_between_groups=self._steps.bytes_between_groups,
            bytes_among_receivers=sum(plan.bytes_moved for plan in self.plans[1:]),
            bytes_sent=sum(exchange.sent_bytes for exchange in exchanges),
            bytes_received=sum(exchange.received_bytes for exchange in exchanges),
            bytes_copied=sum(exchange.copied_bytes for exchange in exchanges)
            + sum(to.nbytes for to, _ in self._repeats),
            rounds=sum(rounds.rounds for rounds in self.rounds),
            buffer_bytes=sum(exchange.buffer_bytes for exchange in exchanges),
            planned=planned,
            phases=span,
        )


@renamed(deadline_s="timeout")
def prepare(
    source: Mapping[str, Any] | None,
    target: Mapping[str, Any] | None,
    process_group: dist.ProcessGroup | None = None,
    **options: Unpack[TransferOptions],
) -> Prepared:
    """Make the plan and the buffers of a transfer that runs often, such as after every training
    step.

    Collective. Nothing moves before you call `run`. The result keeps references to the tensors
    that you pass. Their values and their memory may change between runs. With `delta=True`, each
    run sends only changed elements: see docs/live.md.

    Arguments and errors are those of `redistribute`, except `check`. Pass these by keyword: mapping,
    views, source_layouts, target_layouts, strict, dtype_policy, check_replicas, max_inflight_bytes,
    ranks_per_host, delta, and timeout.

    Returns:
        the prepared transfer. Each call of its `run` moves the current values.
    """
    group = Group(process_group, deadline_s=options.get("timeout", DEFAULTS["timeout"]))
    with phase("prepare") as span, group.together("prepare"):
        with phase("agree"):
            given = complete(options)
            mine, wanted, agreed = agree(source, target, given, group)
        prepared = Prepared(mine, wanted, agreed, given, group)
        if given["check_replicas"]:
            with phase("check replicas"):
                check_replicas(mine, agreed.before, group, on_device=agreed.on_device)
        prepared._before = span.inner
    return prepared


@renamed(deadline_s="timeout")
def redistribute(
    source: Mapping[str, Any] | None,
    target: Mapping[str, Any] | None,
    process_group: dist.ProcessGroup | None = None,
    *,
    check: bool = False,
    **options: Unpack[TransferOptions],
) -> TransferReport:
    """Fill `target` in place with the values of `source`, from any layout to any other.

    Collective. Both arguments are (nested) state dicts of DTensors, ShardedTensors, plain tensors,
    and plain data. A plain tensor is a full tensor on every rank that has it, unless you pass its
    layout. Plain data is replaced. Source and target may be on different ranks, such as those of
    training and inference. A rank passes None or {} for a side that it is not part of. Each byte that
    a rank lacks is sent to it once. Elements that it already holds are copied locally. All ranks
    agree on the transfer before any byte moves.

    Args:
        source, target: state dicts. None for a side that this rank is not part of.
        process_group: the ranks that take part. Layouts use their ranks in the default group.
        check: compare fingerprints of both sides afterwards, as `verify_live` does.
        mapping: {target key: source key} for keys that differ, or a `reshard.mapping.Mapping` from
            the names and shapes of the source to those of the target.
        views: targets that are made of source tensors of other shapes, such as
            `reshard.planners.concat("wqkv", [q, k, v])`.
        source_layouts, target_layouts: layouts of plain local tensors, by key
            (`reshard.planners.TensorLayout`).
        strict: False ignores keys that only one side has.
        dtype_policy: "error": dtypes must be equal. "cast": elements are converted, and sent in the
            smaller dtype. `overflowed` counts the elements in CPU memory that the target's dtype
            cannot hold.
        check_replicas: compare digests of replicas before they are sent.
        max_inflight_bytes: limit for the memory of messages in flight, on each rank.
        ranks_per_host: number of ranks per host: ranks 0 to n - 1 share a host, and so on. If
            possible, each rank then gets bytes from its own host.
        delta: for `prepare`: each run sends only elements that changed since the last one.
        timeout: limit for each phase, in seconds or as a `timedelta`.

    Raises (nothing was moved; other ranks raise the same error or `RankFailedError`):
        KeyMismatchError: keys are missing, unexpected, or mismatched. The error lists them.
        ReplicaDriftError: values differ between ranks.
        LayoutError: ranks disagree about a layout or an option, a rank has neither source nor
            target, source and target share memory, or targets overlap.
    Raises UndefinedTargetsError if a rank fails while bytes move.
    """
    prepared = prepare(source, target, process_group, **options)
    if check:
        _refuse_uncounted(prepared.pairing)
    prepared._first = False  # all ranks were ready a moment ago
    report = prepared.run()
    if check:
        verify_live(source, target, process_group, **options).raise_if_failed()
    return report


# `verify_live`: do source and target of a running job hold the same, without gathering
# any of it.


@renamed(deadline_s="timeout")
def verify_live(
    source: Mapping[str, Any] | None,
    target: Mapping[str, Any] | None,
    process_group: dist.ProcessGroup | None = None,
    **options: Unpack[TransferOptions],
) -> Report:
    """Compare every target tensor with its source, bit by bit, by fingerprints. Layouts may
    differ.

    Collective. Arguments are those of `prepare`. Every rank fingerprints its own shards, and sends
    and receives about 60 bytes per tensor. If dtypes differ, the source is first converted to the
    target's dtype. All NaNs then count as equal, because torch's conversion can give the same NaN
    different bits.

    Returns the same report on all ranks, with a problem for each target that differs.

    Raises:
        ReplicaDriftError: replicas differ, in the source (after conversion) or in the target.
        KeyMismatchError, LayoutError: as for `redistribute`.
    """
    group = Group(process_group, deadline_s=options.get("timeout", DEFAULTS["timeout"]))
    rank = group.job_rank
    with group.together("verify"):
        given = complete(options)
        mine, wanted, agreed = agree(source, target, given, group)
        pairing = agreed.pair(given)
        _refuse_uncounted(pairing)
        there = [held for key in pairing.views for held in _as_it_is(pairing, key, wanted, rank)]
        here = [held for key in pairing.views for held in _as_target(pairing, key, mine, rank)]
        sums = [sum_up(here, rank), sum_up(there, rank)]

        def add(parts: list[list[HeldSums]]) -> list[HeldSums]:
            return [add_holdings(side, group.world_size) for side in zip(*parts)]

        told = group.merge(sums, add, "fingerprints", kind=list[HeldSums])
    before, after = map(conclude, told)
    findings = [
        Finding(f"differs from its source: it has the fingerprint {after[key]}, and its source {before[key]}", key)
        for key in pairing.views
        if before[key] != after[key]
    ]
    covers = "every tensor with a source equals it, by fingerprint; plain values were not compared"
    return Report("the target", tuple(findings), len(pairing.views), covers=covers)


def _refuse_uncounted(pairing: TensorMatches) -> None:
    """Raise LayoutError for layouts with which a fingerprint would lack elements, or contain some twice."""
    sources = dict.fromkeys(spec.fqn for view in pairing.views.values() for spec in view.sources)
    held = [("target", pairing.after[key]) for key in pairing.views]
    held += [("source", pairing.before[key]) for key in sources]
    for side, layout in held:
        # a product has each element, and its parts are equal or disjoint
        if isinstance(layout.form, ProductForm):
            continue
        boxes, spec, why = [box for _, box in layout.chunks()], layout.spec, ""
        try:
            BoxesForm.make({0: boxes}).check(spec.shape)
        except PlanError as error:
            why = f"has some elements in several places, such as {error.box}"
        if not why and side == "target" and sum(box.numel for box in boxes) < spec.numel:
            why = "does not have all elements"
        if why:
            fix = "leave out check=True, or compare the values"
            raise LayoutError(f"the layout of the {side} {spec.fqn!r} {why}, which fingerprints cannot compare: {fix}")


def _as_it_is(pairing: TensorMatches, key: str, wanted: TransferSide, rank: int) -> Iterator[Holding]:
    """Yield this rank's part of the fingerprint of a target."""
    layout, tensor = pairing.after[key], wanted.state.tensors.get(key)
    if tensor is None:
        return
    spec = layout.spec
    yield Holding.nothing(spec)
    for elements, part in held_parts(tensor, layout, rank):
        if part.numel:
            found = _one_nan(elements) if key in pairing.cast else elements
            yield _holding(spec, found, replace(part, flat_start=None))


def _as_target(pairing: TensorMatches, key: str, mine: TransferSide, rank: int) -> Iterator[Holding]:
    """Yield what this rank's sources contribute to the fingerprint of a target."""
    view, spec = pairing.views[key], pairing.after[key].spec
    dtype = dtype_from_name(spec.dtype)
    yield Holding.nothing(spec)
    for piece, box in _taken(pairing, key, mine, rank):
        converted = piece if piece.dtype == dtype else _one_nan(piece.to(dtype))
        yield _holding(spec, converted, box)
    for fill in view.fills:
        constant = torch.full((), fill.value, dtype=dtype, device="cpu")
        constant = (_one_nan(constant) if key in pairing.cast else constant).expand(fill.target.sizes)
        yield _holding(spec, constant, fill.target)


def _taken(pairing: TensorMatches, key: str, mine: TransferSide, rank: int) -> Iterator[tuple[torch.Tensor, Box]]:
    """Yield (elements, their places in the target) of this rank's sources."""
    for number, source in enumerate(pairing.views[key].sources):
        patches = [patch for patch in pairing.views[key].patches if patch.tensor == number]
        for elements, part in held_parts(mine.state.tensors.get(source.fqn), pairing.before[source.fqn], rank):
            yield from _pieces(elements, part, patches)


def _one_nan(elements: torch.Tensor) -> torch.Tensor:
    """Return the tensor with all NaNs replaced by one, also in both parts of complex numbers.
    Returns the tensor itself if it has none. torch converts most elements in vectors and the rest
    one by one, and the two can give the same NaN different bits.
    """
    if elements.is_complex():
        parts = torch.view_as_real(elements.resolve_conj())
        made = _one_nan(parts)
        return elements if made is parts else torch.view_as_complex(made)
    if not elements.is_floating_point():
        return elements
    odd = torch.isnan(elements)
    if not bool(odd.any()):
        return elements
    nan = torch.full((), torch.nan, dtype=elements.dtype, device=elements.device)
    return torch.where(odd, raw_elements(nan), raw_elements(elements.resolve_neg())).view(elements.dtype)


def _pieces(elements: torch.Tensor, part: Part, patches: Sequence[Patch]) -> Iterator[tuple[torch.Tensor, Box]]:
    """Yield (elements, their places in the target) of a local tensor of a source."""
    for box, local in part.boxes():
        for patch in patches:
            common = box & patch.source
            if common is not None:
                at = common.moved_with(box, local)
                yield turned(elements[at.slices], patch.dims), patch.to_target(common)


def _holding(spec: TensorSpec, piece: torch.Tensor, where: Box | Part) -> Holding:
    dims = where.dims if isinstance(where, Part) else where
    place = hashlib.blake2b(repr(dims).encode(), digest_size=8).digest()
    try:
        return Holding(spec.fqn, spec.dtype, spec.shape, place, partial_sum(piece, where, spec.shape).to_bytes())
    except LayoutError as error:
        raise LayoutError(f"tensor {spec.fqn!r}, {where}: {error}") from None
