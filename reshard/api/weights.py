"""Full weights of a sharded training job for any inference engine, in buckets, under the engine's names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from planners.geometry.box import Shape
from planners.geometry.layout import TensorLayout, TensorSpec
from reshard.api.redistribute import redistribute
from reshard.api.stateful_objects import refuse_objects
from reshard.arguments import named_arguments
from reshard.errors import KeyMismatchError, OptionError
from reshard.live.copy_streams import batches
from reshard.live.dtypes import dtype_from_name, dtype_name, raw_elements, refused_cast
from reshard.live.state import take_apart
from reshard.live.tensors import resolved_bytes, state_instead_of
from reshard.mapping.mapping import Mapping as StateMapping
from reshard.ranks.global_state import LocalState, global_state_of
from reshard.ranks.group import DEADLINE_S, Group

T = TypeVar("T")

_BATCH = "number of the batch"
"""A value beside the weights, so that each rank has a part of each batch, as a transfer asks."""
_TRANSFER_BYTES = 64 << 20
"""Small buckets are transferred together up to this size: each transfer has a fixed cost."""


class WeightPlace(NamedTuple):
    """The position of a tensor in a bucket."""

    name: str
    shape: Shape
    dtype: torch.dtype
    start: int
    """Offset of its first byte."""
    stop: int


class ChangedElements(NamedTuple):
    """The elements of a tensor that changed since the last pass."""

    name: str
    shape: Shape
    positions: torch.Tensor | None
    """Positions in the flattened tensor, ascending, as int64. None if `values` has all elements."""
    values: torch.Tensor
    """The new values, as a 1-D tensor of the same dtype."""

    @property
    def numel(self) -> int:
        """Number of elements of the full tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class WeightBucket:
    """Tensors in one buffer, without gaps, each aligned to its dtype."""

    places: tuple[WeightPlace, ...]
    flat: torch.Tensor
    """The buffer, as a 1-D tensor of uint8."""
    before: torch.Tensor | None = None
    """The values of these tensors in the last pass, on the CPU. None if there was no such pass."""

    @classmethod
    def empty(cls, places: tuple[WeightPlace, ...], device: torch.device | str) -> WeightBucket:
        """Create a bucket that is filled later."""
        return cls(places, torch.empty(places[-1].stop, dtype=torch.uint8, device=device))

    @classmethod
    def pack(cls, weights: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[WeightBucket]:
        """Copy full tensors into buckets of at most `bucket_bytes`. A larger tensor gets its own
        bucket.

        Raises KeyMismatchError for a name that is given twice.
        """
        waiting: dict[str, torch.Tensor] = {}
        names: set[str] = set()

        def described() -> Iterator[tuple[str, Shape, torch.dtype]]:
            for name, tensor in weights:
                if name in names:
                    raise KeyMismatchError(f"the weight {name!r} is given twice: pass each name once")
                names.add(name)
                waiting[name] = tensor
                yield name, tuple(tensor.shape), tensor.dtype

        for places in _places(described(), bucket_bytes):
            taken = [waiting.pop(place.name) for place in places]
            yield cls(places, torch.cat([resolved_bytes(tensor) for tensor in taken]))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) pairs. The tensors share the memory of the bucket."""
        for place in self.places:
            yield place.name, self.flat[place.start : place.stop].view(place.dtype).view(place.shape)

    def changes(self) -> Iterator[ChangedElements]:
        """Yield the elements whose bits differ from `before`, for each tensor that has any.
        Without `before`, return all elements."""
        old = dict.fromkeys(place.name for place in self.places)
        if self.before is not None:
            old = dict(WeightBucket(self.places, self.before.to(self.flat.device)).tensors())
        for (name, tensor), place in zip(self.tensors(), self.places):
            elements, previous, positions = tensor.view(-1), old[name], None
            if previous is not None:
                differs = _words(elements) != _words(previous.view(-1))
                positions = (differs.any(1) if differs.dim() > 1 else differs).nonzero().view(-1)
                elements = elements[positions]
            if elements.numel() or previous is None:
                yield ChangedElements(name, place.shape, positions, elements)

    def _of(self, names: set[str]) -> Iterator[WeightBucket]:
        """Pack some of the tensors again."""
        if len(names) == len(self.places):
            yield self
            return
        held = {place.name: place for place in self.places if place.name in names}
        for places in _places(((p.name, p.shape, p.dtype) for p in held.values()), self.flat.numel()):
            spans = [slice(held[place.name].start, held[place.name].stop) for place in places]
            sides = [s if s is None else torch.cat([s[span] for span in spans]) for s in (self.flat, self.before)]
            assert sides[0] is not None
            yield WeightBucket(places, sides[0], sides[1])


class SinceLastPass:
    """A CPU copy of the buckets of the last pass, to find what changed since."""

    def __init__(self) -> None:
        self._kept: dict[tuple[WeightPlace, ...], torch.Tensor] | None = None

    def forget(self) -> None:
        """Make the next pass yield all weights."""
        self._kept = None

    def of(self, buckets: Iterable[WeightBucket]) -> Iterator[WeightBucket]:
        """Yield the tensors that changed since the last complete pass, with their earlier values."""
        kept, self._kept = self._kept, None
        now: dict[tuple[WeightPlace, ...], torch.Tensor] = {}
        for bucket in buckets:
            before = None if kept is None else kept.pop(bucket.places, None)
            found = WeightBucket(bucket.places, bucket.flat, before)
            changed = {change.name for change in found.changes()}
            now[bucket.places] = before if before is not None and not changed else bucket.flat.to("cpu", copy=True)
            if changed:
                yield from found._of(changed)
        self._kept = now


@named_arguments(everyone="all_ranks")
class WeightSource:
    """Iterates over the weights of a sharded training job in the form that an inference engine loads:
    full tensors with the engine's names and dtype.

    The job may have any layout and any pipeline stages. Each byte is sent once to each rank that
    gets it. A pass over the weights needs memory for one bucket at a time (at least 64 MiB). It
    yields a tied tensor once, under its first name.

    Every pass reads the tensors again. Between passes, you may change their values, but not replace
    the tensor objects.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        *,
        mapping: StateMapping | None = None,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = 1 << 30,
        all_ranks: bool = False,
        layouts: Callable[[TensorSpec], TensorLayout | None] | None = None,
        delta: bool = False,
        process_group: dist.ProcessGroup | None = None,
        timeout: float | timedelta = DEADLINE_S,
    ) -> None:
        """Create a source. Collective over the ranks of the trainer.

        Args:
            state: this rank's part of the model's state dict.
            mapping: from the model's names and shapes to those that the engine loads, such as
                `ready(config, "torchtitan", "vllm")`.
            dtype: convert floating-point tensors to this dtype. Elements beyond its range become
                infinite or NaN. No report counts them.
            bucket_bytes: maximum size of a bucket. A larger tensor gets its own bucket.
            all_ranks: give all buckets to every rank, not only to the first rank of the group.
            layouts: a function from a tensor's spec to its layout over the ranks. All ranks then
                get buckets, each with its own shards. A shard that is a flat range or several boxes
                comes as one flat tensor. A rank that is not in the layout gets an empty tensor. If
                the function returns None, each rank gets the full tensor.
            delta: keep a copy of each pass in host memory on the ranks that get buckets. Later passes
                yield only tensors that changed. `WeightBucket.changes` lists the elements.
            process_group: the ranks of the trainer. Default: the default group.
            timeout: limit for this call and for each transfer, in seconds or as a `timedelta`.

        The first pass raises ReplicaDriftError if replicas differ. The call raises KeyMismatchError
        for a state without tensors and for tensors that cannot be converted to `dtype`, and the
        errors of `Mapping.views`.
        """
        group = Group(process_group, deadline_s=timeout)
        self._job_rank = group.job_rank
        self.rank = group.rank
        """This rank's number in `process_group`. By default, only rank 0 gets buckets."""
        with group.together("weights"):
            _check_options(state, bucket_bytes, dtype)
            self._live = take_apart(state)
            mine = LocalState.of(self._live)
            layout = global_state_of(mine, group, group.distinct_answers(mine.description)).tensors
            if not layout:
                raise KeyMismatchError("no rank has a tensor to send: pass the model's state dict on each rank")
            self._views = (mapping or StateMapping()).views(layout.specs)
            specs = {name: _converted(view.spec, dtype) for name, view in self._views.items()}
            given = {name: layouts(spec) for name, spec in specs.items()} if layouts else {}
            self._layouts = {name: layout for name, layout in given.items() if layout is not None}
        self.specs = specs
        """Name, shape, and dtype of each tensor that a pass yields. The same on every rank."""
        self._process_group, self._bucket_bytes, self._timeout = process_group, bucket_bytes, timeout
        self.all_ranks, self.delta = all_ranks, delta
        self._is_mine = all_ranks or layouts is not None or group.rank == 0
        self._device = next((tensor.device for tensor in self._live.tensors.values()), torch.device("cpu"))
        self._passes, self._since = 0, SinceLastPass() if delta else None

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) pairs. Collective, like `buckets`."""
        for bucket in self.buckets():
            yield from bucket.tensors()

    def buckets(self) -> Iterator[WeightBucket]:
        """Yield the buckets that this rank gets. You may keep a bucket's memory.

        Collective: every rank must iterate to the end, even if it gets no bucket."""
        return self._pass() if self._since is None else self._since.of(self._pass())

    def require_full(self) -> None:
        """Raise OptionError if ranks get shards."""
        if self._layouts:
            raise OptionError("this WeightSource has layouts=, but the engine needs full tensors: leave layouts= out")

    def forget(self) -> None:
        """Make the next pass yield all weights, for example after an engine was restarted. Needed
        only with `delta`."""
        if self._since is not None:
            self._since.forget()

    def send(self, to: Callable[[WeightBucket, bool], None]) -> None:
        """Call `to` with each bucket that this rank gets, and with True for the last one. Collective.

        After an error in `to`, this rank does not call it again. The error is raised on all ranks at
        the end of the pass. The next pass yields all weights.
        """
        error: Exception | None = None
        try:
            for bucket, is_last in marked_last(self.buckets()):
                if error is None:
                    try:
                        to(bucket, is_last)
                    except Exception as refused:
                        error = refused
            with Group(self._process_group, deadline_s=self._timeout).together("sending weights"):
                if error is not None:
                    raise error
        except BaseException:
            self.forget()
            raise
        finally:
            del error

    def _pass(self) -> Iterator[WeightBucket]:
        """Go through all batches on every rank. Ranks that get nothing send what they hold."""
        # sizes are those of full tensors, so all ranks make the same transfers
        limit = self._bucket_bytes * max(1, _TRANSFER_BYTES // self._bucket_bytes)
        group = Group(self._process_group, deadline_s=self._timeout)
        for number, batch in enumerate(batches(self.specs.values(), lambda spec: spec.nbytes, limit)):
            views = [self._views[spec.fqn] for spec in batch]
            wanted = {source.fqn for view in views for source in view.sources}
            given = {key: self._live.tensors[key].value for key in wanted if key in self._live.tensors}
            local = ((spec.fqn, self._local_shape(spec), dtype_from_name(spec.dtype)) for spec in batch)
            placed = _places(local, self._bucket_bytes) if self._is_mine else ()
            with group.together("weights"):  # a rank without memory for its buckets ends the pass on all
                buckets = [WeightBucket.empty(places, self._device) for places in placed]
            redistribute(
                {**given, _BATCH: number},
                {**{name: tensor for bucket in buckets for name, tensor in bucket.tensors()}, _BATCH: -1},
                self._process_group,
                views=views,
                target_layouts={s.fqn: self._layouts[s.fqn] for s in batch if s.fqn in self._layouts},
                dtype_policy="cast",
                check_replicas=self._passes == 0,
                timeout=self._timeout,
            )
            yield from buckets
        self._passes += 1

    def _local_shape(self, spec: TensorSpec) -> Shape:
        layout = self._layouts.get(spec.fqn)
        if layout is None:
            return spec.shape
        parts = layout.parts(self._job_rank) if self._job_rank < layout.world_size else ()
        is_box = len(parts) == 1 and parts[0].flat_start is None
        return parts[0].sizes if is_box else (sum(part.numel for part in parts),)


def _check_options(state: Any, bucket_bytes: int, dtype: Any) -> None:
    if bucket_bytes < 1:
        raise OptionError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    if not isinstance(state, Mapping):
        raise OptionError(f"WeightSource takes the state dict of a model, got {state_instead_of(state)}")
    refuse_objects("WeightSource", state)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise OptionError(f"dtype must be a floating-point torch.dtype, such as torch.bfloat16, got {dtype!r:.80}")


def _converted(spec: TensorSpec, dtype: torch.dtype | None) -> TensorSpec:
    if dtype is None or not dtype_from_name(spec.dtype).is_floating_point:
        return spec
    new = dtype_name(dtype)
    if why := refused_cast(spec.dtype, new):
        raise KeyMismatchError(f"{spec.fqn}: is {spec.dtype}, not {new} ({why}): leave it or dtype= out")
    return TensorSpec(spec.fqn, spec.shape, new)


def _places(
    described: Iterable[tuple[str, Shape, torch.dtype]], bucket_bytes: int
) -> Iterator[tuple[WeightPlace, ...]]:
    """Place tensors one after another. Start a new bucket if a tensor does not fit or would not be aligned."""
    held: list[WeightPlace] = []
    for name, shape, dtype in described:
        start = held[-1].stop if held else 0
        nbytes = math.prod(shape) * dtype.itemsize
        if held and (start + nbytes > bucket_bytes or start % dtype.itemsize):
            yield tuple(held)
            held, start = [], 0
        held.append(WeightPlace(name, shape, dtype, start, start + nbytes))
    if held:
        yield tuple(held)


def _words(elements: torch.Tensor) -> torch.Tensor:
    """View elements as integers. An element of 16 bytes becomes a row of two."""
    return elements.view(torch.int64).view(-1, 2) if elements.itemsize == 16 else raw_elements(elements)


def marked_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yield each item, and whether it is the last. One item is held back."""
    waiting: list[T] = []
    for item in items:
        if waiting:
            yield waiting.pop(), False
        waiting.append(item)
    for item in waiting:
        yield item, True
