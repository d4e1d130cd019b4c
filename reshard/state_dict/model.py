"""Reads the state dict of live modules, and writes one back, value by value."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from planners.geometry.box import Shape
from planners.units import format_some
from reshard.errors import KeyMismatchError, fix_lines, format_value, near_key, visible
from reshard.live.deepspeed import HOW_TO_GET, HOW_TO_SET
from reshard.live.dtypes import (
    NO_MEMORY,
    PLAIN,
    any_lacks_memory,
    is_resolved,
    lacks_memory,
    overflowing,
    refused_cast,
    refused_codes,
)
from reshard.live.state import AFTER_WRITES, same_memory, same_value
from reshard.live.tensors import (
    LiveTensor,
    dtensor_like,
    dtensor_of,
    dtype_of,
    forget_derived,
    global_shape,
    held_tensors,
    holder,
    identity_of,
    inner_names,
    is_dtensor,
    is_sharded,
    mark_overwritten,
    reach_bytes,
    settled,
    tensor_class,
    with_local,
    wrapped_like,
)
from reshard.live.tree import leaves_of
from reshard.live.wrappers import WRAPPER_SEGMENTS, as_parameter, assign_tensor, copy_all, of_version
from reshard.state_dict.gather import exchange_rows, gather, scatter
from reshard.state_dict.live_model import LiveModel, SelfLoadingModule, StateEntry, where
from reshard.state_dict.options import Cast, SetReport, StateDictOptions


def read_model(live: LiveModel, *, whole: bool) -> dict[str, Any]:
    """Return the canonical state dict: {name: tensor or extra state}. Tensors share memory with the
    live ones.

    `whole`: the caller gathers the values, including partitioned parameters, which otherwise raise
    an error.
    """
    if not whole:
        live.refuse_partitioned(HOW_TO_GET)
    out: dict[str, Any] = {}
    for item in live.items:
        if isinstance(item, SelfLoadingModule):
            for key, value in item.module.state_dict().items():
                out[item.canonical(key)] = value
        elif item.value is not None:
            if item.persistent:
                out[item.name] = tensor = item.tensor()
                if (after := item.after_write(live.reader)) is not None:
                    AFTER_WRITES[tensor] = after
        else:
            out[item.name] = item.owner.get_extra_state()
    out.update((slot.name, slot.value) for slot in live.partitioned if slot.name in out)
    for slot in live.of_kind("buffer") if live.overwritten else ():
        rank = live.overwritten.get(id(slot.value))
        if rank is not None and isinstance(out.get(slot.name), torch.Tensor):
            out[slot.name] = mark_overwritten(out[slot.name], rank)
    return out


class RegionWrite(NamedTuple):
    """A call of a module's own `load_state_dict`."""

    region: SelfLoadingModule
    state: dict[str, Any]
    """The state by the module's own keys."""
    slots: dict[str, StateEntry]
    """The entries for these keys, where known."""
    forgiven: frozenset[str]
    """Names that may be missing."""


class DirectWrite(NamedTuple):
    """A value that this library writes into its place."""

    slot: StateEntry
    value: Any
    plain: bool
    """True if a plain copy is enough."""


class ModelWrites(NamedTuple):
    """All writes that set a model's state, checked against the model before anything is touched."""

    direct: list[DirectWrite]
    regions: list[RegionWrite]
    report: SetReport


def plan_model(
    live: LiveModel, given: Mapping[str, Any], options: StateDictOptions, *, outlines: bool = False
) -> ModelWrites:
    """Match `given` with the live names. Changes nothing. `outlines`: tensors in `given` are still
    on the meta device.

    Raises KeyMismatchError with all names whose values do not fit and, if strict, all missing and
    unexpected names.
    """
    live.refuse_partitioned(HOW_TO_SET)
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
    """Execute the planned writes: first calls of the user's own code, which may refuse, then plain
    copies.

    Raises KeyMismatchError if strict and a module's own `load_state_dict` refuses names. Errors of
    such a method are also raised. The message says which modules may already be changed. No others
    are.
    """
    missing, unexpected = list(writes.report.missing), list(writes.report.unexpected)
    begun: list[SelfLoadingModule] = []
    made: dict[Any, torch.Tensor] = {}
    for region, state, slots, forgiven in writes.regions:
        begun.append(region)
        assign = _place(region, state, slots, made)
        try:
            found = region.module.load_state_dict(state, strict=False, **({"assign": True} if assign else {}))
        except Exception as error:
            error.add_note(_written(begun))
            raise
        if assign:
            _keep_objects(region.slots)
        # overrides may return None
        if found is not None:
            lacking = dict.fromkeys(region.canonical(key) for key in found[0])
            missing += [name for name in lacking if name not in missing and name not in forgiven]
            unexpected += map(region.canonical, found[1])
    if strict and writes.regions and (missing or unexpected):
        refused = _refused_by_their_own(begun, unexpected)
        raise KeyMismatchError(f"{_message(None, missing, unexpected, [], strict)}\n{refused}{_written(begun)}")
    targets: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    are_plain: list[bool] = []
    for slot, value, is_plain in writes.direct:
        if slot.value is None:
            slot.owner.set_extra_state(_copied(value))  # a copy, because the module may keep parts of it
        elif is_plain or not slot.value.is_meta:
            targets.append(slot.value if is_plain else slot.tensor())
            values.append(value)
            are_plain.append(is_plain)
        elif not is_meta(value):
            assign_tensor(slot.owner, slot.attr, _materialized(value, slot, made))
    write_all(targets, apart(targets, values), are_plain)
    for slot, _, is_plain in writes.direct:
        if slot.piece is not None:
            slot.piece.free_gathered()
        elif not is_plain and slot.value is not None:
            forget_derived(slot.value)
    return replace(writes.report, missing=tuple(missing), unexpected=tuple(unexpected))


def _refused_by_their_own(regions: list[SelfLoadingModule], unexpected: list[str]) -> str:
    """Return a line about the first module that saves a name that it does not load."""
    for region in regions:
        own = {region.canonical(key) for key in region.module.state_dict()}
        if name := next(filter(own.__contains__, unexpected), None):
            return (
                f"{type(region.module).__name__} saves {name!r}, and its load_state_dict refuses it: build the module "
                "from its saved entries, or freeze it and pass ignore_frozen_params=True to both calls\n"
            )
    return ""


def _written(regions: list[SelfLoadingModule]) -> str:
    """Return which modules may already be changed when a later one refuses. A backup would need the
    memory of these modules again."""
    paths = [region.prefix.rstrip(".") for region in regions]
    names = format_some([repr(path) if path else "the model itself" for path in paths])
    return (
        f"modules with a load_state_dict or hooks of their own may have been written to already: {names}; "
        "nothing else has been. Set them again before using the model"
    )


class _ModelMatch:
    """Finds the given value of each live entry, and records which values were used."""

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
        tensors = [*given.values(), *(slot.value for slot in live.slots)]
        self.some_lack_memory = any_lacks_memory([each for each in tensors if type(each) in PLAIN])

    def direct(self, slot: StateEntry) -> DirectWrite | None:
        """Return the write of this entry, or None if no value is given for it."""
        name = slot.name
        value = self.given.get(name)
        if self._is_plain_pair(slot, value) and name not in self.live.tied:
            self.used.add(name)
            self.written.add(id(slot.value))
            return DirectWrite(slot, value, True)
        found = self.take(slot)
        if found is None:
            return None
        return DirectWrite(slot, self.given[found], self._is_plain_pair(slot, self.given[found]))

    def take(self, slot: StateEntry) -> str | None:
        """Return the name under which `given` has this entry's value, after checking it. None if
        there is no such value."""
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
        """Raise an error if values would overwrite each other. Entries can share memory without
        being tied, such as a buffer that is a row of a parameter. They cannot have different
        values."""
        if self.outlines or self.faults:
            return
        pairs = [(slot, value) for slot, value, _ in direct if slot.value is not None and slot.piece is None]
        for i in overwritten([slot.value for slot, _ in pairs], [value for _, value in pairs]):
            self.faults.append(f"{pairs[i][0].name}: shares memory with another entry that gets another value")

    def region(self, region: SelfLoadingModule) -> RegionWrite:
        """Return the arguments of the module's own `load_state_dict`: its keys by name, and all
        unknown names below it, because its hooks may know them."""
        state: dict[str, Any] = {}
        places: dict[str, StateEntry] = {}
        missing: list[str] = []
        slots = {slot.name: slot for slot in region.slots if slot.value is not None}
        by_memory = {address: slot for slot in slots.values() if (address := _address(slot.value))}
        forgiven = frozenset(name for name, slot in slots.items() if self.ignore_frozen and _is_frozen(slot))
        own = region.module.state_dict()
        for key, emitted in own.items():
            name, before = region.canonical(key), len(self.missing)
            slot = slots.get(name)
            source = self.take(slot) if slot is not None else name if name in self.given else None
            missing += self.missing[before:]
            del self.missing[before:]
            if source is not None:
                self.used.add(source)
                # a hook may emit a live tensor under a name of its own
                slot = slot or by_memory.get(_address(emitted))
                state[key] = self.given[source]
                if slot is not None:
                    places[key] = slot
                slot = slot or slots.get(part_of(name, slots))
                if slot is not None and slot.name not in missing:
                    self.written.add(slot.identity)
            elif slot is None and not part_of(name, forgiven):
                missing.append(name)
        strangers = [name for name in self.given if name.startswith(region.prefix) and name not in self.used]
        strangers = [name for name in strangers if name not in self.live.by_name]
        state.update((region.key_of(name), self.given[name]) for name in strangers)
        if not strangers:
            # nothing is left that a hook could turn into what is missing: all names are
            # of this version
            self.missing += missing
            state = of_version(state, own)
        return RegionWrite(region, state, places, forgiven)

    def aliases(self, unexpected: list[str]) -> dict[str, str]:
        """Return the unexpected names that share memory with a used name, and that name."""
        if not unexpected:
            return {}
        used, others = (
            [(identity_of(self.given[name]), name) for name in names if isinstance(self.given[name], torch.Tensor)]
            for names in (self.used, unexpected)
        )
        known = dict(used)
        return {name: known[place] for place, name in others if place is not None and place in known}

    def report(self, unexpected: list[str], aliases: Collection[str]) -> SetReport:
        """Return the report for a successful call."""
        untouched = [s for s in self.live.slots if s.value is not None and s.identity not in self.written]
        return SetReport(
            missing=tuple(self.missing),
            unexpected=tuple(unexpected),
            aliases=tuple(aliases),
            reshaped=tuple(self.reshaped),
            cast=tuple(self.casts),
            untouched=tuple(dict.fromkeys(slot.name for slot in untouched)),
            uninitialized=tuple(dict.fromkeys(s.name for s in untouched if s.value is not None and s.value.is_meta)),
        )

    def _is_plain_pair(self, slot: StateEntry, value: Any) -> bool:
        """Return True if a plain copy is enough, as is usual."""
        target = slot.value
        return (
            type(value) is torch.Tensor
            and target is not None
            and type(target) in PLAIN
            and slot.piece is None
            and not (target.is_nested or value.is_nested)
            and value.dtype is target.dtype
            and value.layout is target.layout
            and value.is_same_size(target)
            and is_resolved(target)
            and not (target.is_meta or value.is_meta or is_expanded(target))
            and not (self.some_lack_memory and any_lacks_memory((target, value)))
        )

    def _fit(self, name: str, value: Any, slot: StateEntry) -> None:
        if self._is_plain_pair(slot, value):
            return
        target = slot.value
        assert target is not None
        fault: str | None = _NO_SHAPE
        if not any(map(_is_strided_nested, (value, target))):
            fault = problem(value, slot.shape, target.dtype, target.is_meta or self.outlines)
        if fault is None and not self.outlines:
            fault = f"the model's tensor {NO_MEMORY}" if lacks_memory(holder(target)) else None
        if fault is None and not self.outlines:
            fault = _EXPANDED if is_expanded(target) else _other_class(value, target)
        if not fault:
            old, new = (str(dtype).removeprefix("torch.") for dtype in (dtype_of(value), target.dtype))
            fault = refused_codes(name, old, new, self.given)
        if fault:
            self.faults.append(f"{name}: {fault}")
            return
        if old != new:
            local = holder(value)
            is_plain = type(local) in PLAIN and local.layout is torch.strided and not local.is_meta
            self.casts.append(Cast(name, old, new, overflowing(local, target.dtype) if is_plain else 0))
        if global_shape(value) != slot.shape:
            self.reshaped.append(name)

    def _agree(self, names: list[str]) -> None:
        """Check that all names of one tied tensor have the same value."""
        first = self.given[names[0]] if names else None
        for name in names[1:]:
            other = self.given[name]
            if other is not first and not same_value(first, other):
                self.faults.append(f"{name}: tied with {names[0]!r} in this model, but the two have different values")


def _other_class(value: Any, target: torch.Tensor) -> str | None:
    """Return an error text if only one of two tensors is quantized, or both are quantized in
    different ways. No copy can convert them."""
    if not (is_sharded(value) or is_sharded(target)) and value.layout != target.layout:
        return f"is {value.layout} in the dict, and {target.layout} in the model: use .to_dense()"
    one, two = tensor_class(value), tensor_class(target)
    if one == two or not (_is_quantized(value) or _is_quantized(target)):
        return None
    return (
        f"is {one or 'a plain tensor'} in the dict, and {two or 'a plain tensor'} in the model. Quantize the model the "
        "same way first, or give a plain model reshard.dequantized(state)"
    )


def _is_quantized(value: Any) -> bool:
    local = holder(value)
    return bool(inner_names(local)) and type(local).dequantize is not torch.Tensor.dequantize


def _message(live: LiveModel | None, missing: list[str], unexpected: list[str], faults: list[str], strict: bool) -> str:
    lines = [f"the state dict does not fit the model{where()}:"]
    if strict:
        lines += listed("Missing key", missing)  # torch's text, with more below
        lines += listed("Unexpected key", unexpected, missing)
    lines += listed("Mismatched", faults)
    fixes = []
    if any("found LazyTensor(" in fault for fault in faults):
        fixes.append("read lazy tensors first: {name: tensor[...] for name, tensor in state.items()}")
    heads = [name for name in unexpected if missing and (name == "model" or name.endswith(f".{missing[0]}"))]
    if heads:
        fixes.append(f"pass what is below {heads[0].removesuffix(missing[0])!r}, under names without this prefix")
    found = set(unexpected)
    if inner := next((name for name in missing if part_of(name, found)), ""):
        fixes.append(f"flatten nested dicts, to names such as {inner!r}")
    if strict and (missing or unexpected):
        fixes.append("pass StateDictOptions(strict=False) to set only the entries that match and report the rest")
        if live is not None and any(segment in WRAPPER_SEGMENTS for name in unexpected for segment in name.split(".")):
            fixes.append("reshard.normalize(state_dict) removes wrapper segments from names")
        if live is not None and missing and all(_is_frozen(live.by_name[n]) for n in missing if n in live.by_name):
            fixes.append("everything missing is frozen, and ignore_frozen_params=True allows that")
    return "\n".join([*lines, *fix_lines(fixes)])


def listed(title: str, names: list[str], others: Collection[str] = (), limit: int = 20) -> list[str]:
    lines = []
    for i, name in enumerate(names[:limit]):
        near = near_key(name, others) if i < 5 else ""
        lines.append(f"  {title}: {visible(name)}" + (f" (did you mean {near}?)" if near else ""))
    return lines + ([f"  {title}: and {len(names) - limit} more"] if len(names) > limit else [])


def _address(value: Any) -> int:
    """Return the address of a tensor's elements on this rank, or 0 if it has no memory."""
    return _span(value)[0] if isinstance(value, torch.Tensor) else 0


def _is_strided_nested(value: Any) -> bool:
    is_plain = isinstance(value, torch.Tensor) and not is_sharded(value)
    return is_plain and value.is_nested and value.layout is torch.strided


_NO_SHAPE = "a strided nested tensor has no shape: make it with layout=torch.jagged, or make its parts buffers"
_EXPANDED = "has several elements at one memory address in the model, as after expand(): replace it by its .clone()"


def is_expanded(target: torch.Tensor) -> bool:
    """Return True if several elements share a memory address here, so that the tensor cannot be written."""
    local = target if type(target) in PLAIN else holder(target)
    if local.layout is not torch.strided or 0 not in local.stride() or not local.numel():
        return False
    return any(size > 1 and not stride for size, stride in zip(local.shape, local.stride(), strict=True))


def part_of(name: str, parameters: Collection[str]) -> str:
    """Return the parameter that this name belongs to, such as `weight` for `weight.absmax`, or ""
    if there is none."""
    return next((name[:at] for at, letter in enumerate(name) if letter == "." and name[:at] in parameters), "")


def _is_frozen(slot: StateEntry) -> bool:
    return slot.kind == "parameter" and slot.value is not None and not slot.value.requires_grad


# Copying one tensor's value into another, whatever their kinds; the inputs stay as they
# are.
#
# A value fits a target if both have the same global shape. If both are sharded in the same way, only local
# memory is touched; everything else goes through `full`.


def problem(value: Any, shape: Shape, dtype: torch.dtype, on_meta: bool = False) -> str | None:
    """Return why `value` cannot be written into a tensor of this shape and dtype, or None. () and
    (1,) match."""
    if not isinstance(value, torch.Tensor):
        return f"expected a tensor of shape {shape}, found {format_value(value)}"
    found = global_shape(value)
    if found != shape and {found, shape} != {(), (1,)}:
        is_ragged = not all(isinstance(size, int) for size in found)
        fix = ". A nested tensor fits only itself: load() fills it, or make its values and offsets buffers"
        return f"expected shape {shape}, found {found}{fix if is_ragged else ''}"
    if is_meta(value) and not on_meta:
        return "the given tensor is on the meta device and has no value"
    if lacks_memory(holder(value)):
        return f"the given tensor {NO_MEMORY}"
    if why := refused_cast(dtype_of(value), dtype):
        return f"expected {dtype}, found {dtype_of(value)}, and {why}: cast it yourself if you want that"
    return None


def is_meta(value: torch.Tensor) -> bool:
    """Return True if the tensor has no values."""
    return value.is_meta if is_dtensor(value) or not is_sharded(value) else False


def write(value: LiveTensor, target: LiveTensor) -> None:
    """Copy `value` into the memory of `target`. Collective only if they are sharded differently."""
    if not (value.is_sharded or target.is_sharded):
        _write_plain(value.value, target.value)
    elif value.is_sharded_like(target):
        for its, mine in zip(value.local, target.local, strict=True):
            _write_plain(its, mine)
    else:
        scatter(gather(value), target)


def write_all(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor], plain: Sequence[bool]) -> None:
    """Write each value into its target. Combines `plain` pairs into few calls, and sends tensors
    that are sharded across rows together where possible."""
    copy_all(list(itertools.compress(targets, plain)), list(itertools.compress(values, plain)))
    others = itertools.filterfalse(itemgetter(2), zip(values, targets, plain))
    pairs = ((LiveTensor("", settled(v)), LiveTensor("", settled(t))) for v, t, _ in others)
    for value, target in exchange_rows(pairs):
        write(value, target)


def is_shard_like(value: Any, model: Any) -> bool:
    """Return True if both are DTensors with equal placements on the same mesh."""
    return (
        is_dtensor(value)
        and is_dtensor(model)
        and (value.device_mesh, value.placements) == (model.device_mesh, model.placements)
    )


def like(
    value: torch.Tensor, model: torch.Tensor, device: torch.device | None = None, *, is_placed: bool = False
) -> torch.Tensor:
    """Return a new tensor with the elements and dtype of `value`. If the shapes are equal, it is
    sharded like `model`, unless `value` is on the same mesh and already `is_placed`.

    0-d tensors are not sharded and stay on their device, unless `model` is 0-d. Others go to
    `device`, by default the device of `model`. If `model` is sharded and has another shape, the
    result is replicated on its mesh.
    """
    value, model = settled(value), settled(model)
    device = model.device if device is None else device
    if is_dtensor(model) and (value.dim() or not model.dim()):
        if (
            is_dtensor(value)
            and value.device_mesh == model.device_mesh
            and (is_placed or value.shape != model.shape or value.placements == model.placements)
        ):
            if tensor_class(value):  # views of these may lose parts
                return with_local(value, _clone(value._local_tensor, device))
            return dtensor_like(_clone(value.to_local(), device), value)
        whole = gather(LiveTensor("", value))
        if value.shape == model.shape:
            new = dtensor_like(torch.empty_like(model.to_local(), dtype=value.dtype, device=device), model)
            scatter(whole, LiveTensor("", new))
            return new
        return dtensor_of(_clone(whole, device), model.device_mesh)
    whole = gather(LiveTensor("", value))
    return _clone(whole, device if value.dim() else whole.device)


def _materialized(value: torch.Tensor, slot: StateEntry, made: dict[Any, torch.Tensor]) -> torch.Tensor:
    """Return a tensor with the elements of `value` for an entry on the meta device, with the
    entry's dtype and sharding. It is on the device of `value` or, for a plain value, of the mesh.
    All names of a tied tensor get the same tensor, stored in `made` by identity."""
    model, device = slot.value, value.device
    assert model is not None
    if slot.identity not in made:
        if is_dtensor(model) and not is_dtensor(value):
            device = torch.device(model.device_mesh.device_type)
        new = like(value, model, device)
        new = wrapped_like(new if new.dtype == model.dtype else new.to(model.dtype), model)
        made[slot.identity] = _exchanged(model, as_parameter(new, model))
    return made[slot.identity]


def _place(
    region: SelfLoadingModule, state: dict[str, Any], slots: Mapping[str, StateEntry], made: dict[Any, torch.Tensor]
) -> bool:
    """Replace the module's tensors on the meta device by real ones, and shard the values in `state`
    like `slots`.

    Returns True if tensors on the meta device are left. Only the module's `load_state_dict` may be
    able to replace these. It also replaces all others, so `state` gets copies.
    """
    models, left = dict[str, torch.Tensor](), dict(state)
    for key, slot in slots.items():
        value, model = state[key], slot.value
        if model is None or not isinstance(value, torch.Tensor) or global_shape(value) != slot.shape:
            continue  # left to the module
        models[key] = model
        if model.is_meta and not is_meta(value):
            state[key] = _materialized(value, slot, made)
            assign_tensor(slot.owner, slot.attr, state[key])
            del left[key]
    assign = any(getattr(slot.owner, slot.attr).is_meta for slot in region.slots if slot.value is not None)
    for key, value in left.items():
        model = models.get(key)
        if model is None:
            state[key] = _copied(value) if assign or not isinstance(value, torch.Tensor) else value
        elif assign or is_sharded(value) or is_sharded(model):
            value = like(value, model)
            state[key] = as_parameter(value.to(model.dtype), model) if assign else value
    return assign


def _copied(value: Any) -> Any:
    """Return a deep copy, also of tensors with an autograd graph, which torch cannot deep-copy."""
    own = {id(tensor): tensor.detach().clone() for tensor in tensors_in(value) if not tensor.is_leaf}
    return copy.deepcopy(value, own)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors inside containers."""
    if isinstance(value, torch.Tensor):
        return [value]  # the usual case
    return [leaf for leaf in leaves_of(value).values() if isinstance(leaf, torch.Tensor)]


def _keep_objects(slots: Sequence[StateEntry]) -> None:
    """Restore the tensor objects that a load replaced, with the values of the replacements."""
    kept: dict[int, torch.Tensor] = {}
    for slot in slots:
        old, new = slot.value, getattr(slot.owner, slot.attr)
        if old is not None and new is not old:
            if id(old) not in kept:
                kept[id(old)] = _exchanged(old, new)
            assign_tensor(slot.owner, slot.attr, kept[id(old)])


def _exchanged(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return `old` with the contents of `new`, so that optimizers keep their parameter. If there
    are other references to either, return `new`. Both keep the attributes of `old`."""
    for name, value in vars(old).items():
        vars(new).setdefault(name, value)
    try:
        torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return new
    return old


def _write_plain(value: torch.Tensor, target: torch.Tensor) -> None:
    if value is target or (value.dtype == target.dtype and same_memory(value, target)):
        return
    if type(value) is type(target) and inner_names(target):
        for name in inner_names(target):
            write(LiveTensor(name, getattr(value, name)), LiveTensor(name, getattr(target, name)))
        return
    target.copy_(value.reshape(target.shape) if value.shape != target.shape else value)


def _clone(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    if names := inner_names(value):
        inner = {name: _clone(getattr(value, name), device) for name in names}
        context = value.__tensor_flatten__()[1]  # type: ignore[attr-defined]
        made: torch.Tensor = type(value).__tensor_unflatten__(inner, context, value.shape, value.stride())  # type: ignore[attr-defined]
        return made
    new = value.detach().to(device)
    return new.clone() if new.data_ptr() == value.data_ptr() else new


# Which tensors share memory on this rank: by their addresses, never by their names.


_NBYTES = attrgetter("nbytes")


class Spans(NamedTuple):
    """Memory ranges of many tensors: each from the first to the end of the last element."""

    starts: Sequence[int] = ()
    """Start addresses. 0 without memory, or if the address is unknown."""
    sizes: Sequence[int] = ()


def spans_of(tensors: Sequence[Any], runs: int = 1) -> Spans | None:
    """Return the memory ranges of plain tensors. None if some are sparse, because these have
    several storages.

    Args:
        runs: the number of consecutive runs of tensors with the same shapes and dtypes.
    """
    try:
        starts = list(map(torch.Tensor.data_ptr, tensors))
        if all(map(torch.Tensor.is_contiguous, tensors)):
            return Spans(starts, list(map(_NBYTES, tensors[: len(tensors) // runs])) * runs)
        return Spans(starts, list(map(reach_bytes, tensors)))
    except (RuntimeError, NotImplementedError):
        return None


def all_apart(tensors: Sequence[Any], spans: Spans) -> bool:
    """Return True if a cheap check shows that none of the tensors, and of others with the memory
    ranges `spans`, share memory. Then no further check is needed."""
    found = _spans_of_any(tensors)
    starts = np.array([*spans.starts, *found.starts], np.uint64)
    ends = starts + np.array([*spans.sizes, *found.sizes], np.uint64)
    held = (starts != 0) & (starts != ends)
    # sorted by start: each begins after all previous ones have ended
    return bool(np.all(np.sort(ends[held])[:-1] <= np.sort(starts[held])[1:]))


def overlapping(tensors: Sequence[Any]) -> list[list[int]]:
    """Return the positions of tensors whose memory overlaps, as one list for each connected
    group."""
    spans = Spans() if _have_own_storages(tensors) else _spans_of_any(tensors)
    found: list[list[int]] = []
    together: list[int] = []
    open_until = 0
    for start, size, position in sorted(zip(*spans, range(len(tensors)))):
        if not start or not size:
            continue
        if start >= open_until:
            together = []
            found.append(together)
        together.append(position)
        open_until = max(open_until, start + size)
    return [cluster for cluster in found if len(cluster) > 1]


def apart(targets: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Return the values, for writing them into the targets one by one. Values that share memory
    with another value's target are copied."""
    out, count = list(values), len(targets)
    for cluster in overlapping([*targets, *values]):
        for i in (position - count for position in cluster if position >= count and min(cluster) < count):
            if out[i] is not targets[i] and identity_of(out[i]) != identity_of(targets[i]):
                out[i] = out[i].detach().clone()
    return out


def overwritten(targets: Sequence[Any], values: Sequence[Any]) -> list[int]:
    """Return the positions of values that would be lost if each were written into its target in
    turn, because targets share memory and the values differ. Only for plain tensors. Writes
    nothing."""
    found: list[int] = []
    for cluster in overlapping(targets):
        if not all(type(targets[i]) in PLAIN and type(values[i]) is torch.Tensor for i in cluster):
            continue
        starts = [targets[i].data_ptr() for i in cluster]
        first = min(starts) // ALIGNED_BYTES * ALIGNED_BYTES  # several storages can have the same memory
        span = max(map(int.__add__, starts, (reach_bytes(targets[i]) for i in cluster))) - first
        scratch = torch.empty(span, dtype=torch.uint8, device=targets[cluster[0]].device).untyped_storage()
        views = []
        for i, start in zip(cluster, starts):
            target = targets[i].detach()
            view = torch.empty(0, dtype=target.dtype, device=target.device)
            views.append(view.set_(scratch, (start - first) // target.itemsize, target.shape, target.stride()))
            views[-1].copy_(values[i].reshape(target.shape))
        after = [same_value(view, values[i].to(view).reshape(view.shape)) for i, view in zip(cluster, views)]
        found += [i for i, same in zip(cluster, after) if not same]
    return found


ALIGNED_BYTES = 16
"""Alignment: the size of the largest element."""


def _have_own_storages(tensors: Sequence[Any]) -> bool:
    """Return True if these are plain tensors that do not share storages, which is the usual case."""
    if not set(map(type, tensors)) <= PLAIN:
        return False
    try:
        storages = list(map(torch.Tensor.untyped_storage, tensors))
        starts = np.fromiter(map(torch.UntypedStorage.data_ptr, storages), np.uint64, len(storages))
    except (RuntimeError, NotImplementedError):
        return False  # sparse tensors have several storages
    ends = starts + np.fromiter(map(torch.UntypedStorage.nbytes, storages), np.uint64, len(storages))
    return bool(np.all(np.sort(ends)[:-1] <= np.sort(starts)[1:]))


def _spans_of_any(tensors: Sequence[Any]) -> Spans:
    """Return the memory ranges of tensors of any class."""
    found = spans_of(tensors) if set(map(type, tensors)) <= PLAIN else None
    return Spans(*zip(*map(_span, tensors))) if found is None else found


def _span(tensor: Any) -> tuple[int, int]:
    """Return the first byte and the number of bytes up to the end of the last element; (0, 0) if
    there are none, or if the address is unknown."""
    held = [] if is_lazy(tensor) else held_tensors(tensor)
    if not held or not set(map(type, held)) <= PLAIN:
        return 0, 0
    try:
        starts = [local.data_ptr() for local in held]
    except (RuntimeError, NotImplementedError):  # sparse tensors have several storages
        return 0, 0
    return min(starts), max(map(int.__add__, starts, map(reach_bytes, held))) - min(starts)
