"""Taking the state dict of live modules, and putting one back, value by value."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from reshard.errors import KeyMismatchError
from reshard.live.tensors import (
    dtensor_like,
    dtype_of,
    form_of,
    global_shape,
    identity_of,
    is_dtensor,
    is_sharded,
    local_tensors,
)
from reshard.live.wrappers import WRAPPER_SEGMENTS, as_parameter, assign_tensor, copy_all
from reshard.state_dict.gather import exchange_rows, gather, scatter
from reshard.state_dict.names import HOW_TO_SAVE, LiveModel, PartitionedParameter, SelfLoadingModule, StateEntry, where
from reshard.state_dict.options import Cast, SetReport, StateDictOptions

__all__ = [
    "Spans", "all_apart", "apart", "apply_model", "copy_containers", "like", "overlapping",
    "plan_model", "read_model", "same_value", "spans_of", "write_all",
]  # fmt: skip


def read_model(live: LiveModel, *, whole: bool = False) -> dict[str, Any]:
    """The canonical state dict: {name: tensor or extra state}; tensors share memory with the live ones. `whole`: the
    caller gathers what it is given, also `PartitionedParameter`s, which are refused else."""
    if not whole:
        live.refuse_partitioned(
            f"take the whole state dict (full_state_dict=True, or iter_full), which all ranks gather together; or "
            f"take it inside deepspeed.zero.GatheredParameters; or {HOW_TO_SAVE}"
        )
    partitioned = {slot.name: PartitionedParameter(slot.value) for slot in live.partitioned if slot.value is not None}
    out: dict[str, Any] = {}
    for item in live.items:
        if isinstance(item, SelfLoadingModule):
            for key, value in item.module.state_dict().items():
                out[item.canonical(key)] = value
        elif item.value is not None:
            if item.persistent:
                out[item.name] = item.tensor()
        else:
            out[item.name] = item.owner.get_extra_state()
    for name in partitioned.keys() & out.keys():
        out[name] = partitioned[name]
    return out


class RegionWrite(NamedTuple):
    """A call of a module's own `load_state_dict`."""

    region: SelfLoadingModule
    state: dict[str, Any]
    """By the module's own keys."""
    assign: bool
    """Whether tensors on the meta device are replaced."""
    forgiven: frozenset[str]
    """Names that may be missing."""


class DirectWrite(NamedTuple):
    """A value that is written into its place by us."""

    slot: StateEntry
    value: Any
    plain: bool
    """Whether it can simply be copied."""


class ModelWrites(NamedTuple):
    """All that setting a model's state will do, checked against the model before anything is touched."""

    direct: list[DirectWrite]
    regions: list[RegionWrite]
    report: SetReport


def plan_model(
    live: LiveModel, given: Mapping[str, Any], options: StateDictOptions, *, outlines: bool = False
) -> ModelWrites:
    """Match `given` with the live names; touches nothing. `outlines`: its tensors are on the meta device for now.

    Raises KeyMismatchError listing every missing, unexpected and misfitting name (the first two only if strict).
    """
    live.refuse_partitioned(
        "set the state dict before deepspeed.initialize, which also makes its own copies of the parameters; or load "
        "by the engine's own load_checkpoint; or, of a model without an optimizer, set it inside "
        "deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)"
    )
    match = _ModelMatch(live, given, options.ignore_frozen_params, outlines)
    direct: list[DirectWrite] = []
    regions: list[RegionWrite] = []
    for item in live.items:
        if isinstance(item, SelfLoadingModule):
            regions.append(match.region(item))
        elif item.persistent:
            write = match.direct(item)
            if write is not None:
                direct.append(write)
    match.refuse_overwritten(direct)
    prefixes = tuple(write.region.prefix for write in regions)
    unexpected = [name for name in given if name not in match.used and not name.startswith(prefixes)]
    aliases = match.aliases(unexpected)
    if match.faults or (options.strict and (match.missing or unexpected)):
        ties = {name: f"{name}, tied to {other} in the dict and not here" for name, other in aliases.items()}
        told = [ties.get(name, name) for name in unexpected]
        raise KeyMismatchError(_message(live, match.missing, told, match.faults, options.strict))
    return ModelWrites(direct, regions, match.report(unexpected, aliases))


def apply_model(writes: ModelWrites, strict: bool) -> SetReport:
    """Do what was planned: first what the user's own code does and may refuse, then the plain copies.

    Raises KeyMismatchError if strict and a module's own `load_state_dict` refuses names, and whatever such a method
    raises; either says which modules may have been written to by then. Nothing else has been.
    """
    missing, unexpected = list(writes.report.missing), list(writes.report.unexpected)
    begun: list[SelfLoadingModule] = []
    for region, state, assign, forgiven in writes.regions:
        begun.append(region)
        try:
            found = region.module.load_state_dict(state, strict=False, **({"assign": True} if assign else {}))
        except Exception as error:
            error.add_note(_written(begun))
            raise
        # an override may return nothing
        if found is not None:
            lacking = dict.fromkeys(region.canonical(key) for key in found[0])
            missing += [name for name in lacking if name not in missing and name not in forgiven]
            unexpected += map(region.canonical, found[1])
    if strict and writes.regions and (missing or unexpected):
        raise KeyMismatchError(f"{_message(None, missing, unexpected, [], strict)}\n{_written(begun)}")
    made: dict[Any, torch.Tensor] = {}
    targets: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    plain: list[bool] = []
    for slot, value, is_plain in writes.direct:
        if slot.value is None:
            slot.owner.set_extra_state(value)
        elif is_plain:
            targets.append(slot.value)
            values.append(value)
            plain.append(True)
        elif not slot.value.is_meta:
            targets.append(slot.tensor())
            values.append(value)
            plain.append(False)
        elif not is_meta(value):
            # all names of a tied tensor get the same new one
            new = made.get(slot.identity)
            if new is None:
                new = made[slot.identity] = as_parameter(materialised(value, slot.value), slot.value)
            assign_tensor(slot.owner, slot.attr, new)
    values = apart(targets, values)
    copy_all(list(itertools.compress(targets, plain)), list(itertools.compress(values, plain)))
    if not all(plain):
        write_all((value, target) for target, value, is_plain in zip(targets, values, plain) if not is_plain)
    return replace(writes.report, missing=tuple(missing), unexpected=tuple(unexpected))


def _written(regions: list[SelfLoadingModule]) -> str:
    """What a late refusal leaves behind. To copy it all beforehand would take the memory of these modules once more."""
    paths = [region.prefix.rstrip(".") for region in regions]
    names = ", ".join(repr(path) if path else "the model itself" for path in paths[:5])
    more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
    return (
        f"modules with a load_state_dict or hooks of their own may have been written to already: {names}{more}; "
        "nothing else has been. Set them again before using the model"
    )


class _ModelMatch:
    """Finds the given value of each live place, and keeps account."""

    def __init__(self, live: LiveModel, given: Mapping[str, Any], ignore_frozen: bool, outlines: bool) -> None:
        self.live = live
        self.given = given
        self.ignore_frozen = ignore_frozen
        self.outlines = outlines
        self.used: set[str] = set()
        self.missing: list[str] = []
        self.faults: list[str] = []
        self.casts: list[Cast] = []
        self.reshaped: list[str] = []
        self.written: set[Any] = set()
        self.made: dict[Any, torch.Tensor] = {}
        """New tensors for those on the meta device inside regions, by identity, so that ties last."""

    def direct(self, slot: StateEntry) -> DirectWrite | None:
        """What is to be written there; None where nothing is given for it."""
        name = slot.name
        value = self.given.get(name)
        if _is_plain_pair(slot, value) and name not in self.live.tied:
            self.used.add(name)
            self.written.add(id(slot.value))
            return DirectWrite(slot, value, True)
        found = self.take(slot)
        if found is None:
            return None
        return DirectWrite(slot, self.given[found], _is_plain_pair(slot, self.given[found]))

    def take(self, slot: StateEntry) -> str | None:
        """The name under which `given` has this slot's value, checked; None where it has none."""
        name: str | None = slot.name
        if slot.name in self.live.tied:
            names = [alias for alias in (slot.name, *self.live.aliases(slot)) if alias in self.given]
            name = names[0] if names else None
            self._agree(names)
        if name is None or name not in self.given:
            if not (self.ignore_frozen and _is_frozen(slot)):
                self.missing.append(slot.name)
            return None
        self.used.add(name)
        if slot.value is not None:
            if not is_lazy(slot.value):
                self._fit(name, self.given[name], slot)
            self.written.add(slot.identity)
        return name

    def refuse_overwritten(self, direct: list[DirectWrite]) -> None:
        """Places of the model may share memory without being one tensor, as a buffer that is a row of a parameter:
        then values that differ cannot both be there."""
        if self.outlines or self.faults:
            return
        pairs = [(slot, value) for slot, value, _ in direct if slot.value is not None and slot.piece is None]
        for i in overwritten([slot.value for slot, _ in pairs], [value for _, value in pairs]):
            self.faults.append(f"{pairs[i][0].name}: shares memory with another place that is given another value")

    def region(self, region: SelfLoadingModule) -> RegionWrite:
        """What to give to the module's own `load_state_dict`: its keys by their names, and with them every name below
        it that nobody knows, since its hooks may."""
        state: dict[str, Any] = {}
        missing: list[str] = []
        slots = {slot.name: slot for slot in region.slots if slot.value is not None}
        by_memory = {address: slot for slot in slots.values() if (address := _address(slot.value)) is not None}
        for key, emitted in region.module.state_dict().items():
            name, before = region.canonical(key), len(self.missing)
            slot = slots.get(name)
            source = self.take(slot) if slot is not None else name if name in self.given else None
            missing += self.missing[before:]
            del self.missing[before:]
            if source is not None:
                self.used.add(source)
                # a hook may emit a live tensor under a name of its own
                slot = slot or by_memory.get(_address(emitted) or 0)
                state[key] = self._placed(self.given[source], slot)
                if slot is not None:
                    self.written.add(slot.identity)
            elif slot is None:
                missing.append(name)
        strangers = [name for name in self.given if name.startswith(region.prefix) and name not in self.used]
        strangers = [name for name in strangers if name not in self.live.by_name]
        state.update((name[len(region.prefix) :], self.given[name]) for name in strangers)
        if not strangers:
            # nothing is left that a hook could turn into what is missing
            self.missing += missing
        assign = any(slot.value is not None and slot.value.is_meta for slot in slots.values())
        forgiven = frozenset(name for name, slot in slots.items() if self.ignore_frozen and _is_frozen(slot))
        return RegionWrite(region, state, assign, forgiven)

    def aliases(self, unexpected: list[str]) -> dict[str, str]:
        """Of unexpected names, under which of those that were used the dict has the very same memory."""
        if not unexpected:
            return {}
        used = [name for name in self.used if isinstance(self.given[name], torch.Tensor)]
        known = {identity_of(self.given[name]): name for name in used}
        tensors = {name: self.given[name] for name in unexpected if isinstance(self.given[name], torch.Tensor)}
        found = {name: known.get(place) for name, value in tensors.items() if (place := identity_of(value)) is not None}
        return {name: other for name, other in found.items() if other is not None}

    def report(self, unexpected: list[str], aliases: Collection[str]) -> SetReport:
        """What was found, to be returned if all goes well."""
        untouched = [s for s in self.live.slots if s.value is not None and s.identity not in self.written]
        return SetReport(
            missing=tuple(self.missing),
            unexpected=tuple(unexpected),
            aliases=tuple(aliases),
            reshaped=tuple(self.reshaped),
            cast=tuple(self.casts),
            untouched=tuple(dict.fromkeys(slot.name for slot in untouched)),
            uninitialised=tuple(dict.fromkeys(s.name for s in untouched if s.value is not None and s.value.is_meta)),
        )

    def _placed(self, value: Any, slot: StateEntry | None) -> Any:
        if self.outlines or slot is None or slot.value is None or not isinstance(value, torch.Tensor):
            return value
        if global_shape(value) != slot.shape:
            return value  # what the module makes of it is its own business
        if slot.value.is_meta and not is_meta(value):
            new = self.made.get(slot.identity)
            if new is None:
                new = self.made[slot.identity] = as_parameter(materialised(value, slot.value), slot.value)
            return new
        return like(value, slot.value) if is_sharded(value) or is_sharded(slot.value) else value

    def _fit(self, name: str, value: Any, slot: StateEntry) -> None:
        if _is_plain_pair(slot, value):
            return
        target, shape = slot.value, slot.shape
        assert target is not None
        fault = problem(value, shape, target.dtype, target.is_meta or self.outlines)
        if fault is not None:
            self.faults.append(f"{name}: {fault}")
            return
        if dtype_of(value) != target.dtype:
            names = (str(dtype).removeprefix("torch.") for dtype in (dtype_of(value), target.dtype))
            self.casts.append(Cast(name, *names))
        if global_shape(value) != slot.shape:
            self.reshaped.append(name)

    def _agree(self, names: list[str]) -> None:
        """Names of one tied tensor must bring one value."""
        first = self.given[names[0]] if names else None
        for name in names[1:]:
            other = self.given[name]
            if other is not first and not same_value(first, other):
                self.faults.append(f"{name}: tied with {names[0]!r} in this model, but the two have different values")


def _message(live: LiveModel | None, missing: list[str], unexpected: list[str], faults: list[str], strict: bool) -> str:
    lines = [f"the state dict does not fit the model{where()}:"]
    if strict:
        lines += _listed("Missing key", missing)  # torch's words, as far as they go
        lines += _listed("Unexpected key", unexpected, live)
    lines += _listed("misfit", faults)
    if strict and (missing or unexpected):
        lines.append("pass StateDictOptions(strict=False) to set what fits and have the rest reported")
        if live is not None and any(segment in WRAPPER_SEGMENTS for name in unexpected for segment in name.split(".")):
            lines.append("names with wrapper segments become canonical by reshard.normalize(state_dict)")
        if live is not None and missing and all(_is_frozen(live.by_name[n]) for n in missing if n in live.by_name):
            lines.append("everything missing is frozen: ignore_frozen_params=True allows that")
    return "\n".join(lines)


def _listed(title: str, names: list[str], live: LiveModel | None = None, limit: int = 100) -> list[str]:
    lines = []
    for i, name in enumerate(names[:limit]):
        close = difflib.get_close_matches(name, live.by_name, 1, 0.8) if live is not None and i < 5 else []
        lines.append(f"  {title}: {name}" + (f" (did you mean {close[0]}?)" if close else ""))
    return lines + ([f"  {title}: and {len(names) - limit} more"] if len(names) > limit else [])


def _address(value: Any) -> int | None:
    """Where the elements of a tensor lie on this rank; None for anything without memory."""
    if not isinstance(value, torch.Tensor) or is_lazy(value):
        return None
    local = local_tensors(value)
    return (local[0].data_ptr() or None) if local and not hasattr(local[0], "__tensor_flatten__") else None


def _is_plain_pair(slot: StateEntry, value: Any) -> bool:
    """Whether the value can simply be copied: the usual case, and there are many of them."""
    target = slot.value
    return (
        type(value) is torch.Tensor
        and (type(target) is torch.nn.Parameter or type(target) is torch.Tensor)
        and slot.piece is None
        and value.dtype is target.dtype
        and value.is_same_size(target)
        and not (target.is_meta or value.is_meta)
    )


def _is_frozen(slot: StateEntry) -> bool:
    return slot.kind == "parameter" and slot.value is not None and not slot.value.requires_grad


# Copying one tensor's value into another, whatever their kinds; the inputs stay as they are.
#
# A value fits a target if both have the same global shape. Where both are sharded alike, only local
# memory is touched; everything else goes through `full`.


def problem(value: Any, shape: tuple[int, ...], dtype: torch.dtype, on_meta: bool = False) -> str | None:
    """Why `value` cannot be written into a tensor of this shape and dtype, or None. () and (1,) go together."""
    if not isinstance(value, torch.Tensor):
        return f"wanted a tensor of shape {shape}, found {type(value).__name__}"
    found = global_shape(value)
    if found != shape and {found, shape} != {(), (1,)}:
        return f"wanted shape {shape}, found {found}"
    if is_meta(value) and not on_meta:
        return "the given tensor is on the meta device and has no value"
    if _kind(dtype_of(value)) > _kind(dtype):
        return f"wanted {dtype}, found {dtype_of(value)}, which would lose data: cast it yourself if you mean it"
    return None


def is_meta(value: torch.Tensor) -> bool:
    """Whether the tensor has no values."""
    return value.is_meta if is_dtensor(value) or not is_sharded(value) else False


def write(value: torch.Tensor, target: torch.Tensor) -> None:
    """Copy `value` into the memory of `target`, which it fits; collective only if they are sharded differently."""
    if not (is_sharded(value) or is_sharded(target)):
        _write_plain(value, target)
    elif _same_layout(value, target):
        for mine, its in zip(local_tensors(target), local_tensors(value), strict=True):
            _write_plain(its, mine)
    else:
        scatter(gather(value) if is_sharded(value) else value, target)


def write_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """`write` the first of each pair into the second; what FSDP1 cuts across rows is sent together where it can be."""
    for value, target in exchange_rows(pairs):
        write(value, target)


def like(value: torch.Tensor, model: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A new tensor with the elements and dtype of `value`, sharded as `model` is where the shapes are equal.

    Plain 0-d tensors stay on their device; others go to `device`, by default that of `model`. A tensor of another
    shape than a sharded `model` becomes a replicated one on its mesh, so that arithmetic between the two works.
    """
    device = model.device if device is None else device
    if not is_dtensor(model) or value.dim() == 0:
        whole = gather(value) if is_sharded(value) else value
        return _clone(whole, whole.device if value.dim() == 0 else device)
    if (
        is_dtensor(value)
        and value.device_mesh == model.device_mesh
        and (value.shape != model.shape or value.placements == model.placements)
    ):
        return dtensor_like(_clone(value.to_local(), device), value)
    whole = gather(value) if is_sharded(value) else value
    if value.shape != model.shape:
        from torch.distributed.tensor import DTensor  # the model is one

        return DTensor.from_local(_clone(whole, device), model.device_mesh, run_check=False)
    new = dtensor_like(torch.empty_like(model.to_local(), dtype=value.dtype, device=device), model)
    scatter(whole, new)
    return new


def materialised(value: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """A new tensor with the elements of `value` for the place of `model`, which is on the meta device: of its dtype
    and sharding, on the device of `value`."""
    local = value.to_local() if is_dtensor(value) else value
    new = like(value, model, local.device)
    return new if new.dtype == model.dtype else new.to(model.dtype)


def same_value(a: Any, b: Any) -> bool:
    """Whether two values are equal as far as this rank can see."""
    if is_sharded(a) or is_sharded(b):
        return _same_layout(a, b) and all(map(torch.equal, local_tensors(a), local_tensors(b)))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if type(a) is type(b) and a.shape == b.shape and a.dtype == b.dtype:
            return _same_memory(a, b) or a.is_meta or torch.equal(a, b)
        return False
    return bool(a == b)


def copy_containers(value: Any) -> Any:
    """Nested dicts, lists and tuples made anew; the leaves are shared."""
    if isinstance(value, dict):
        if set(map(type, value.values())) == {torch.Tensor}:
            return dict(value)  # nearly always, and there are many
        return {key: item if isinstance(item, torch.Tensor) else copy_containers(item) for key, item in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(map(copy_containers, value))
    return value


def _write_plain(value: torch.Tensor, target: torch.Tensor) -> None:
    if value is target or (value.dtype == target.dtype and _same_memory(value, target)):
        return
    if type(value) is type(target) and hasattr(target, "__tensor_flatten__"):
        for name in target.__tensor_flatten__()[0]:
            write(getattr(value, name), getattr(target, name))
        return
    target.copy_(value.reshape(target.shape) if value.shape != target.shape else value)


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    if hasattr(a, "__tensor_flatten__"):
        return False
    return a.data_ptr() == b.data_ptr() != 0 and a.shape == b.shape and a.stride() == b.stride()


def _same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    if is_dtensor(a) and is_dtensor(b):
        return a.shape == b.shape and a.placements == b.placements and a.device_mesh == b.device_mesh
    if is_dtensor(a) or is_dtensor(b) or not (is_sharded(a) and is_sharded(b)):
        return False
    return global_shape(a) == global_shape(b) and form_of(a) == form_of(b)


def _clone(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    new = value.detach().to(device)
    return new.clone() if new.data_ptr() == value.data_ptr() else new


def _kind(dtype: torch.dtype) -> int:
    """Order of what can be held without a change of kind: integers < floats < complex."""
    return 2 if dtype.is_complex else 1 if dtype.is_floating_point else 0


# Which tensors share memory on this rank: by where they lie, never by what they are called.


_PLAIN = frozenset([torch.Tensor, nn.Parameter])
_NBYTES = attrgetter("nbytes")


class Spans(NamedTuple):
    """The bytes from the first to behind the last element of each of many tensors."""

    starts: Sequence[int] = ()
    """Addresses; 0 where there is no memory, or nobody can say where."""
    sizes: Sequence[int] = ()


def spans_of(tensors: Sequence[Any], alike: int = 1) -> Spans | None:
    """Where plain tensors lie; None if some are sparse, which have several storages.

    Args:
        alike: so many runs of tensors with the same shapes and dtypes these are, one behind another.
    """
    try:
        starts = list(map(torch.Tensor.data_ptr, tensors))
        if all(map(torch.Tensor.is_contiguous, tensors)):
            return Spans(starts, list(map(_NBYTES, tensors[: len(tensors) // alike])) * alike)
        return Spans(starts, list(map(_reach, tensors)))
    except (RuntimeError, NotImplementedError):
        return None


def all_apart(tensors: Sequence[Any], spans: Spans) -> bool:
    """Whether no two of the tensors, and of others that lie in `spans`, share memory, as far as one look at each can
    tell: then there is nothing to ask further."""
    found = spans_of(tensors) if set(map(type, tensors)) <= _PLAIN else None
    if found is None:
        found = _spans_of_any(tensors)
    starts = np.array([*spans.starts, *found.starts], np.uint64)
    ends = starts + np.array([*spans.sizes, *found.sizes], np.uint64)
    held = (starts != 0) & (starts != ends)
    # before the start of each, in order, all those before it have ended
    return bool(np.all(np.sort(ends[held])[:-1] <= np.sort(starts[held])[1:]))


def overlapping(tensors: Sequence[Any]) -> list[list[int]]:
    """Positions of tensors whose memory overlaps, one list for each that hang together; nothing for the others."""
    storages = _storages(tensors)
    if len(set(storages)) == len(storages):
        return []
    by_storage: dict[int, list[int]] = {}
    for position, storage in enumerate(storages):
        if storage:
            by_storage.setdefault(storage, []).append(position)
    found: list[list[int]] = []
    for positions in by_storage.values():
        if len(positions) > 1:
            found += _hanging_together([(*_span(tensors[position]), position) for position in positions])
    return found


def apart(targets: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """The values, to be written into the targets one after another; those that lie in another's target as copies."""
    written, lying = set(_storages(targets)) - {0}, _storages(values)
    if written.isdisjoint(lying):
        return list(values)
    return [
        value.detach().clone()
        if value is not target and storage in written and identity_of(value) != identity_of(target)
        else value
        for target, value, storage in zip(targets, values, lying, strict=True)
    ]


def overwritten(targets: Sequence[Any], values: Sequence[Any]) -> list[int]:
    """Positions of values that would not be there any more, were each written into its target, one after another: the
    targets share memory, and the values differ. Plain tensors only; touches nothing."""
    found: list[int] = []
    for cluster in overlapping(targets):
        if not all(
            type(targets[i]) in (torch.Tensor, nn.Parameter) and type(values[i]) is torch.Tensor for i in cluster
        ):
            continue
        scratch = targets[cluster[0]].detach().untyped_storage().clone()
        views = []
        for i in cluster:
            target = targets[i].detach()
            view = torch.empty(0, dtype=target.dtype, device=target.device)
            views.append(view.set_(scratch, target.storage_offset(), target.shape, target.stride()))
            views[-1].copy_(values[i].reshape(target.shape))
        after = [torch.equal(view, values[i].to(view).reshape(view.shape)) for i, view in zip(cluster, views)]
        found += [i for i, same in zip(cluster, after) if not same]
    return found


def _hanging_together(spans: list[tuple[int, int, int]]) -> list[list[int]]:
    """Of (first byte, last byte + 1, position): the positions of spans that overlap."""
    found: list[list[int]] = []
    open_until = 0
    together: list[int] = []
    for start, end, position in sorted(span for span in spans if span[0] < span[1]):
        if start >= open_until:
            if len(together) > 1:
                found.append(together)
            together = []
        together.append(position)
        open_until = max(open_until, end)
    return [*found, together] if len(together) > 1 else found


def _storages(tensors: Sequence[Any]) -> list[int]:
    """`_storage` of each. Of plain dense tensors without a call of our own for each: there are many."""
    if set(map(type, tensors)) <= _PLAIN:
        try:
            return list(map(torch.UntypedStorage.data_ptr, map(torch.Tensor.untyped_storage, tensors)))
        except (RuntimeError, NotImplementedError):
            return list(map(_storage, tensors))  # some of them are sparse
    return list(map(_storage, tensors))


def _storage(tensor: Any) -> int:
    """Address of the storage that holds the tensor's elements; 0 where there are none, or none can be named."""
    if type(tensor) is not torch.Tensor and type(tensor) is not nn.Parameter:
        if is_lazy(tensor):
            return 0
        held = local_tensors(tensor)
        if not held or type(held[0]) not in (torch.Tensor, nn.Parameter):
            return 0
        tensor = held[0]
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # sparse tensors have several
        return 0


def _spans_of_any(tensors: Sequence[Any]) -> Spans:
    """Where they lie, whatever their kinds."""
    starts, sizes = [], []
    for tensor, storage in zip(tensors, _storages(tensors), strict=True):
        start, end = _span(tensor) if storage else (0, 0)
        starts.append(start)
        sizes.append(end - start)
    return Spans(starts, sizes)


def _span(tensor: Any) -> tuple[int, int]:
    """The bytes from the first to behind the last of its elements."""
    spans = [(local.data_ptr(), local.data_ptr() + _reach(local)) for local in local_tensors(tensor)]
    return min(start for start, _ in spans), max(end for _, end in spans)


def _reach(tensor: torch.Tensor) -> int:
    """Bytes from the first to behind the last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0
