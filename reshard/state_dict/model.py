"""Taking the state dict of live modules, and putting one back."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from reshard.errors import KeyMismatchError
from reshard.state.frameworks.deepspeed import HOW_TO_SAVE, PartitionedParameter
from reshard.state.frameworks.tensor_classes import is_sharded
from reshard.state.frameworks.torch_internals import WRAPPER_SEGMENTS, as_parameter, assign_tensor, copy_all
from reshard.state.tensors import dtype_of, global_shape, identity_of, local_tensors
from reshard.state_dict.memory import apart, overwritten
from reshard.state_dict.names import LiveModel, Region, Slot, where
from reshard.state_dict.options import Cast, SetReport, StateDictOptions
from reshard.state_dict.values import is_meta, like, materialised, problem, same_value, write_all

__all__ = ["ModelWrites", "apply_model", "plan_model", "read_model"]


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
        if isinstance(item, Region):
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

    region: Region
    state: dict[str, Any]
    """By the module's own keys."""
    assign: bool
    """Whether tensors on the meta device are replaced."""
    forgiven: frozenset[str]
    """Names that may be missing."""


class DirectWrite(NamedTuple):
    """A value that is written into its place by us."""

    slot: Slot
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
    match = _Match(live, given, options.ignore_frozen_params, outlines)
    direct: list[DirectWrite] = []
    regions: list[RegionWrite] = []
    for item in live.items:
        if isinstance(item, Region):
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
    begun: list[Region] = []
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


def _written(regions: list[Region]) -> str:
    """What a late refusal leaves behind. To copy it all beforehand would take the memory of these modules once more."""
    paths = [region.prefix.rstrip(".") for region in regions]
    names = ", ".join(repr(path) if path else "the model itself" for path in paths[:5])
    more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
    return (
        f"modules with a load_state_dict or hooks of their own may have been written to already: {names}{more}; "
        "nothing else has been. Set them again before using the model"
    )


class _Match:
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

    def direct(self, slot: Slot) -> DirectWrite | None:
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

    def take(self, slot: Slot) -> str | None:
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

    def region(self, region: Region) -> RegionWrite:
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

    def _placed(self, value: Any, slot: Slot | None) -> Any:
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

    def _fit(self, name: str, value: Any, slot: Slot) -> None:
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


def _is_plain_pair(slot: Slot, value: Any) -> bool:
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


def _is_frozen(slot: Slot) -> bool:
    return slot.kind == "parameter" and slot.value is not None and not slot.value.requires_grad
