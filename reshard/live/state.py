"""Flattens a state dict and inspects each tensor once, and puts values into it in place."""

from __future__ import annotations

import os
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
from torch.amp import GradScaler
from torch.autograd.graph import increment_version
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.weak import WeakTensorKeyDictionary

from planners.units import format_count
from reshard.errors import FormatError, KeyMismatchError, LayoutError, option_error
from reshard.live.dtypes import raw_elements, resolved
from reshard.live.tensors import (
    OVERWRITTEN_BY,
    LiveTensor,
    class_kinds,
    dtensor_like,
    holder,
    identity_of,
    is_dtensor,
    is_plain,
    is_sharded,
    is_tensor,
    state_instead_of,
)
from reshard.live.tree import Flat, flatten, rebuilt
from reshard.state import IntKey, KeyPath, State, containers_around, is_selected, key_of, plain_key

_LONG = 1000
"""Sequences with at least this many numbers are one value."""


def same_value(a: Any, b: Any) -> bool:
    """Return True if two values are equal as far as this rank can see.
    NaN is equal to NaN.
    """
    if is_sharded(a) or is_sharded(b):
        one, other = LiveTensor("", a), LiveTensor("", b)
        return one.is_sharded_like(other) and all(map(_same_elements, one.local, other.local))
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        if type(a) is type(b) and a.shape == b.shape and a.dtype == b.dtype:
            return same_memory(a, b) or a.is_meta or _same_elements(a, b)
        return False
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return type(a) is type(b) and (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    return bool(a == b) or bool(a != a and b != b)


def _same_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    with suppress(NotImplementedError):  # of 4 bits, or complex of 32
        if torch.equal(a, b):
            return True
    if not is_plain(a) or a.layout != torch.strided or a.is_quantized:
        return False
    return torch.equal(*(raw_elements(resolved(one)) for one in (a, b)))


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two local tensors are the same view of the same memory, apart from their
    dtypes.
    """
    if hasattr(a, "__tensor_flatten__"):
        return False
    views = [(one.data_ptr(), one.shape, one.stride(), one.is_conj(), one.is_neg()) for one in (a, b)]
    return views[0] == views[1] and views[0][0] != 0


LiveState = State[LiveTensor]
"""A flattened state dict. It refers to your values and copies nothing. `tensors` includes tied
tensors, `aliases` maps each tied tensor to the earlier one with the same memory, `per_rank` holds
the `PerRank` values, and every key has a path.
"""


def is_single(value: Any) -> bool:
    """Return True if a value is one leaf under its key, such as a tensor or a `PerRank`."""
    return is_tensor(value) or isinstance(value, PerRank)


def is_long(path: KeyPath, value: Any) -> bool:
    """Return True if a sequence of numbers is one value, such as the order of a sampler: one key
    per number would cost too much.
    """
    if not path or type(value) not in (list, tuple) or len(value) < _LONG:
        return False
    return all(type(item) in (int, float) for item in value)


def take_apart(
    state: Any,
    *,
    whole_at: Callable[[KeyPath, Any], bool] | None = None,
    select: Collection[str] | None = None,
    ranks: Collection[int] = (),
) -> LiveState:
    """Flatten a nested state.

    Args:
        whole_at: a predicate of path and container. Containers for which it returns True are one
            value.
        select: globs. Only values with a matching key are kept, with the containers around them.
        ranks: tensors that those of another of these ranks will overwrite are omitted: that rank
            has them.

    Raises:
        KeyMismatchError: keys collide.
        LayoutError: a tensor is not a plain array in memory.
    """
    flat = flatten(state, is_leaf=is_single, whole_at=whole_at)
    leaves, containers = flat.leaves, flat.containers
    if ranks:
        leaves = {path: value for path, value in leaves.items() if getattr(value, OVERWRITTEN_BY, None) not in ranks}
    if not all(map(is_plain, flat.leaves.values())):  # few states have others
        from reshard.live.tensor_classes import expanded

        leaves, containers = expanded(leaves), containers | class_kinds(flat.leaves)
    flat = replace(flat, leaves=leaves, containers=containers)
    if select is not None:
        flat = _selected(flat, select)
    paths = {key_of(path): path for path in flat.leaves}
    tensors: dict[str, LiveTensor] = {}
    objects: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    per_rank: dict[str, PerRank] = {}
    firsts: dict[tuple[Any, ...], str] = {}
    for key, value in zip(paths, flat.leaves.values(), strict=True):
        if isinstance(value, PerRank):
            per_rank[key] = value
        elif is_tensor(value):
            tensor = tensors[key] = LiveTensor(key, value)
            tensor.spec  # noqa: B018  # refuses what is no plain array
            identity = identity_of(value)
            first = firsts.setdefault(identity, key) if identity is not None else key
            if first != key:
                aliases[key] = first
        else:
            objects[key] = value
    return State(tensors, objects, paths, flat.containers, aliases, per_rank)


def _selected(flat: Flat, select: Collection[str]) -> Flat:
    """Return the values that match the globs, with the containers around them."""
    fits = {path: is_selected(key_of(path), select) for path in flat.leaves}
    inner = containers_around(flat.leaves)
    kept = containers_around(path for path, fit in fits.items() if fit)
    containers = {
        path: kind
        for path, kind in flat.containers.items()
        if path in kept or (path not in inner and is_selected(key_of(path), select))
    }
    return replace(flat, leaves={path: leaf for path, leaf in flat.leaves.items() if fits[path]}, containers=containers)


# `PerRank`: a value that is each rank's own, kept for each rank, with a stated rule for when their
# number changes.


@dataclass(frozen=True)
class PerRank:
    """Declares that `value` differs between ranks, such as a random state or the position of a data
    loader.

    A save stores the value of every rank. If the number of ranks is the same, a load gives each rank
    its own value. Otherwise, `on_change` of the target decides.
    """

    value: Any = None
    """A tensor, or plain data with tensors of up to 1 MiB in total.
    For a load: the current value, if there is one."""
    on_change: str | Callable[[dict[int, Any], int, int], Any] = "error"
    """What to do if the number of ranks changed. `"error"`: raise. `"keep"`: ranks with a
    saved value get it. The others keep their current value. `"drop"`: every rank keeps its
    current value. Or a function of (values by saved rank, this rank, world size) that returns
    the new value."""

    def __post_init__(self) -> None:
        if self.on_change not in ("error", "keep", "drop") and not callable(self.on_change):
            words = f"on_change must be 'error', 'keep', 'drop' or a function, got {self.on_change!r:.80}"
            raise option_error(words, KeyMismatchError)

    def choose(self, key: str, saved: Mapping[int, Any], rank: int, world_size: int, saved_world_size: int = 0) -> Any:
        """Return the value for `rank` of `world_size` from the saved values.

        Args:
            key: the key of the value.
            rank, world_size: this rank and the number of ranks of the job that loads.
            saved: values by the rank that saved them. Each is read when it is accessed.
            saved_world_size: number of ranks that saved, including those without such a value; 0
                if not known.

        Raises KeyMismatchError if the numbers differ and `on_change` is `"error"`.
        """
        if rank in saved and world_size in (len(saved), saved_world_size):
            return saved[rank]
        if callable(self.on_change):
            return self.on_change(dict(saved), rank, world_size)
        if self.on_change == "keep":
            return saved.get(rank, self.value)
        if self.on_change == "drop":
            return self.value
        some = f"{len(saved)} of " if saved_world_size > len(saved) else ""
        saving = format_count(max(len(saved), saved_world_size), "rank")
        raise KeyMismatchError(
            f"{key!r} was saved per rank by {some}{saving}, but this is rank {rank} of {world_size} that load: choose "
            "with PerRank(value, on_change='keep' or 'drop' or a function)"
        )


# `OwnState`: what only an object of the same class and settings can take.


class OwnState(dict[str, Any]):
    """The state of a learning-rate scheduler or gradient scaler, in a state to load into.

    torch gives a scheduler the settings of another class without a word, and fails at an
    enabled scaler if the saved one was disabled. So settings that only one side has are
    missing or unexpected.
    """

    advice = ""

    @classmethod
    def of(cls, value: Any) -> dict[str, Any]:
        """Return the state of `value`. That of any other object is a plain dict."""
        state: dict[str, Any] = value.state_dict()
        is_schedule = isinstance(value, LRScheduler)
        if not is_schedule and not isinstance(value, GradScaler):
            return state
        made = cls(state)
        made.advice = f"the saved settings have other names than those of this {type(value).__name__}. Create it as "
        made.advice += "the saved run did: " + ("of the same class" if is_schedule else "with the same enabled=")
        return made

    @classmethod
    def check(cls, key: str, value: Any, saved: Mapping[str, Any]) -> None:
        """Raise KeyMismatchError if `value` cannot take the state that was saved under `key`."""
        live = cls.of(value)
        if isinstance(live, OwnState):
            if any(live.compare(saved)):
                raise KeyMismatchError(f"{key}: {live.advice}")
            if misfits := "; ".join(live.misfits(saved)):
                raise KeyMismatchError(f"{key}.{misfits}")

    def compare(self, saved: Mapping[str, Any]) -> tuple[set[KeyPath], set[KeyPath]]:
        """Return the paths of settings that `saved` lacks, and of those that only it has."""
        here, there = set(_settings(self)), set(_settings(saved))
        return here - there, there - here

    def misfits(self, saved: Mapping[str, Any]) -> Iterator[str]:
        """Yield which lists have another number of param groups than this optimizer."""
        theirs = dict(_by_group(saved))
        for path, own in _by_group(self):
            if len(theirs.get(path, own)) != len(own):
                groups = format_count(len(theirs[path]), "param group")
                yield f"{key_of(path)}: saved for {groups}, but the optimizer has {len(own)}: give it the saved groups"


_BY_GROUP = ("base_lrs", "max_lrs", "min_lrs", "lr_lambdas", "_last_lr")
"""Lists of schedulers that have an item per param group."""


def _below(value: Any, part: Any) -> Any:
    return value.get(part) if isinstance(value, Mapping) else None


def in_order(state: Mapping[str, Any], order: Sequence[int]) -> dict[str, Any]:
    """The state of a scheduler for an optimizer that has its param groups in another order.

    `order` has the place of each of its groups among the saved ones.
    """
    made = dict(state)
    for name in _BY_GROUP:
        its = state.get(name)
        if isinstance(its, list | tuple) and len(its) == len(order):
            made[name] = [its[i] for i in order]
    if "_schedulers" in made:
        made["_schedulers"] = [in_order(it, order) for it in made["_schedulers"]]
    return made


def _by_group(state: Mapping[str, Any], above: KeyPath = ()) -> Iterator[tuple[KeyPath, Sequence[Any]]]:
    """Yield the lists of learning rates with one per param group, by path."""
    for name in ("base_lrs", "min_lrs"):
        if isinstance(its := state.get(name), list | tuple):
            yield (*above, name), its
    for number, inner in enumerate(state.get("_schedulers", ())):
        yield from _by_group(inner, (*above, "_schedulers", number))


AFTER_WRITES: MutableMapping[torch.Tensor, Callable[[], object]] = WeakTensorKeyDictionary()
"""Tensor of a model -> function to call after its elements were written. FSDP then frees the copy
of the parameter that a forward pass gathered, because the next pass would use it again."""


def tell_owners(written: Iterable[torch.Tensor]) -> None:
    """Call the functions that `AFTER_WRITES` has for these tensors."""
    for tensor in written if AFTER_WRITES else ():
        if (call := AFTER_WRITES.get(tensor)) is not None:
            call()


class CheckedState(dict[str, Any]):
    """A state to load into, with checks of saved values that run before anything is written."""

    checks: dict[KeyPath, Callable[[Any], object]]
    """Functions by path. Each gets the saved value at its path, and may raise."""
    apart: Collection[KeyPath]
    """Paths of objects. The containers around them are matched entry by entry."""
    models: Collection[KeyPath]
    """Paths of models, which keep their dtypes."""
    optimizers: Collection[KeyPath]
    """Paths of optimizers."""

    def of_optimizers(self, keys: Iterable[str], *, known: bool = False) -> list[str]:
        """Return, for keys of models, where the optimizers store the state of the same parameters.

        If `known`, only of parameters that they have now.
        """
        fronts = sorted(f"{key_of(path)}." for path in self.models)
        names = [key.removeprefix(front) for key in keys for front in fronts if key.startswith(front)]
        found = []
        for path in sorted(self.optimizers, key=key_of):
            groups = reduce(_below, path, self)["param_groups"]
            own = {name for group in groups for name in group["params"] or ()} if known else {*names}
            found += [f"{key_of(path)}.state.{name}" for name in names if name in own]
        return found

    def check(self, objects: Mapping[str, Any]) -> None:
        """Run the checks. `objects` has the saved values by key; a container without tensors is one value."""
        for path, call in self.checks.items():
            for depth in range(len(path), 0, -1):
                if (found := reduce(_below, path[depth:], objects.get(key_of(path[:depth])))) is not None:
                    call(found)
                    break


def _settings(state: Mapping[str, Any], above: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the arguments of the constructor. Releases of torch differ in the rest."""
    for name in state:
        if not name.startswith("_") and name != "verbose":
            yield *above, name
    for number, inner in enumerate(state.get("_schedulers", ())):
        yield from _settings(inner, (*above, "_schedulers", number))


_NO_OBJECTS = (str, int, float, torch.Tensor, type, Mapping)


def is_object(value: Any, *, within: bool = False) -> bool:
    """Return whether a value is a model or stage, an optimizer, a generator, or another object with
    `state_dict` and `load_state_dict`. A container of tensors is not. `within`: also return True
    for dicts, lists, and tuples that contain one."""
    found, seen = [value], set[int]()
    for each in found:
        one = each.value if isinstance(each, PerRank) else each
        if not isinstance(one, _NO_OBJECTS):
            is_stage = isinstance(getattr(one, "module", None), torch.nn.Module)
            has_state = all(callable(getattr(one, name, None)) for name in ("state_dict", "load_state_dict"))
            if is_stage or has_state or isinstance(one, torch.Generator):
                return True
        if within and isinstance(each, Mapping | list | tuple) and id(each) not in seen:
            seen.add(id(each))
            found += each.values() if isinstance(each, Mapping) else each
    return False


# A live state dict taken apart, so that values can be put into it in place.


_EXTRA_STATE = "_extra_state"
"""The key under which torch stores the result of `Module.get_extra_state`."""


@dataclass(frozen=True)
class Targets(State[LiveTensor]):
    """The places that a load fills. `objects` has the values other than tensors; the remaining
    values are parts of `units`.
    """

    root: Any = None
    """The state dict itself."""
    units: dict[str, KeyPath] = field(default_factory=dict)
    """Containers without tensors. Their contents are replaced as a unit, because the keys may have
    changed.
    """
    replaced: dict[str, torch.dtype] = field(default_factory=dict)
    """Tensors that are replaced by tensors of another dtype."""
    resized: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The replaced tensors that are the extra state of a module and were saved with another shape.
    They take the saved shape.
    """
    _made: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    _new: dict[str, Any] = field(default_factory=dict)
    """The replacements for tensors. `_made` has their new memory."""

    @classmethod
    def of(
        cls,
        state: dict[str, Any],
        *,
        saved: Mapping[str, Any] | None = None,
        tensors: Iterable[KeyPath] = (),
        entry_by_entry: bool = False,
    ) -> Targets:
        """Flatten `state`. Nothing is changed. Raises FormatError if it is not a dict or list.

        Args:
            saved: objects of the checkpoint by key. A list, tuple, or dict of plain values counts
                as one object if its key is in `saved`. So does a list or tuple with tensors, if one
                with the same number of items was saved.
            tensors: paths of the checkpoint's tensors. A container of `state` without tensors is
                matched entry by entry if the checkpoint has some in it, unless it is empty.
            entry_by_entry: match each entry of a dict separately, instead of replacing dicts as a
                unit.
        """
        if not isinstance(state, MutableMapping | list):
            raise option_error(f"the state to fill must be a dict or list, got {_in_words(state)}", FormatError)
        # containers that are not replaced whole: those that hold a tensor or an object somewhere
        full: set[KeyPath] = {()}
        if isinstance(state, CheckedState):
            full |= containers_around(state.apart)
        live = take_apart(state, whole_at=partial(_saved_whole, saved or {}, full))
        others = (path for key, path in live.paths.items() if key not in live.objects)
        full |= containers_around(others)
        plain = [live.paths[key] for key in live.objects]
        full |= containers_around(plain) & containers_around(tensors)
        if entry_by_entry:  # and dicts, and what holds a dict
            full.update(path[:i] for path in plain for i in range(_depth_of_dicts(path)))
            empty = [path for path, kind in live.containers.items() if kind.partition(":")[0] == "dict"]
            full.update(path[:i] for path in empty for i in range(len(path) + 1))
        around = {key: live.paths[key][:-1] for key in live.objects}
        containers = [path for path, kind in live.containers.items() if not kind.startswith("tensor:")]
        # the outermost container on each path, itself included, that is replaced as a unit
        outermost: dict[KeyPath, KeyPath | None] = {}
        for path in (*around.values(), *containers):
            inward = (path[:i] for i in range(1, len(path) + 1))
            outermost[path] = next((one for one in inward if one not in full), None)
        unit_of = {key: outermost[path] for key, path in around.items()}
        objects = {key: value for key, value in live.objects.items() if unit_of[key] is None}
        units = {key_of(path): path for path in outermost.values() if path}
        paths = {key: path for key, path in live.paths.items() if unit_of.get(key) is None} | units
        return cls(live.tensors, objects, paths, live.containers, live.aliases, live.per_rank, state, units)

    def live(self, key: str, levels: int = 0) -> Any:
        """Return what is under `key` now, or the container that is `levels` levels above it."""
        here: Any = self.root
        path = self.paths[key]
        for part in path[: len(path) - levels]:
            here = _inside(here, part)
        return here

    def writable(self, key: str) -> tuple[torch.Tensor, ...]:
        """Return the local tensors to write into: the live ones, or new ones for meta tensors and
        changed dtypes. `assign` stores the new ones in the state.
        """
        tensor = self.tensors[key]
        dtype = self.replaced.get(key)
        if not tensor.is_meta and dtype is None:
            return LiveTensor(key, tensor.value).local  # asked again: it may have been given other memory
        if key not in self._made:
            device = torch.device("cpu") if tensor.is_meta else tensor.device
            fresh = tuple(
                torch.empty(self.resized.get(key, local.shape), dtype=dtype or local.dtype, device=device)
                for local in tensor.local
            )
            self._replace(key, fresh)
        return self._made[key]

    def _replace(self, key: str, fresh: tuple[torch.Tensor, ...]) -> None:
        """Create the replacement for a tensor, and for tied tensors that have no replacement of
        their own.
        """
        tied = self.tied_in_place
        first = tied.get(key, key)
        made: dict[int, Any] = {}
        for other in (first, *(k for k, its in tied.items() if its == first)) if tied else (key,):
            tensor = self.tensors[other].value
            if id(tensor) not in made:
                made[id(tensor)] = like_fresh(tensor, fresh, other)
            self._made[other] = fresh
            self._new[other] = made[id(tensor)]

    def is_opaque(self, key: str) -> bool:
        """Return True if a tensor belongs to the extra state of a module. Only the module knows its
        shape.
        """
        names = (str(part).rpartition(".")[2] for part in self.paths[key])
        return not self.tensors[key].is_sharded and _EXTRA_STATE in names

    @property
    def tied_in_place(self) -> dict[str, str]:
        """Return `aliases` without the tensors that get a replacement of their own."""
        return {key: first for key, first in self.aliases.items() if not {key, first} & set(self.replaced)}

    def check_places(self, keys: Iterable[str]) -> None:
        """Raise FormatError if a value that must be replaced is in a container that cannot be
        changed.

        This concerns the values of `keys`, tensors on the meta device, and tensors of another
        dtype.
        """
        fresh = [key for key, tensor in self.tensors.items() if tensor.is_meta]
        for key in (*keys, *fresh, *self.replaced):
            here: Any = self.root
            for part in self.paths[key]:
                if isinstance(here, Mapping) and not isinstance(here, MutableMapping):
                    kind = type(here).__name__
                    raise FormatError(f"the value under {key!r} cannot be replaced: a {kind} cannot be changed")
                here = _inside(here, part)

    def assign(self, values: Mapping[str, Any], written: Collection[str] = ()) -> None:
        """Store values at their keys, and new tensors. Call it only after these are filled, because
        their memory starts uninitialized.

        `written`: live tensors that were filled. torch did not see the writes, and learns of them
        here: a graph that needs the old values must not run.
        """
        for key in written:
            tensor = self.tensors[key]
            outer = (tensor.value,) if is_dtensor(tensor.value) else ()
            for one in (*outer, *tensor.local):
                if not one.is_inference():
                    increment_version(one)
        if AFTER_WRITES:
            tell_owners(self.tensors[key].value for key in written)
        filled: set[int] = set()
        for key, value in (*self._new.items(), *values.items()):
            if key in self.tensors and key not in self._made and not self.tensors[key].is_meta:
                self._fill(key, value)
                continue
            if isinstance(value, dict):
                value = _refilled(self.live(key), value, filled)
            put_at(self.root, self.paths[key], value)
        self._new.clear()

    def _fill(self, key: str, value: torch.Tensor) -> None:
        """Write the tensor made from a saved number into the live tensor, which others may refer to."""
        for local, made in zip(self.writable(key), LiveTensor(key, value).local, strict=True):
            with torch.inference_mode(local.is_inference()):
                local.copy_(made)


def _refilled(live: Any, value: Any, filled: set[int]) -> Any:
    """Return the dict `live` with the contents of the dict `value`, because variables of the caller
    may refer to it, or to a dict in it. Anything else is replaced, and so is a dict that is already
    `filled`."""
    if type(live) is not type(value) or type(live) not in (dict, OrderedDict, defaultdict) or id(live) in filled:
        return value
    filled.add(id(live))
    new = {key: _refilled(live.get(key), item, filled) for key, item in value.items()}
    live.clear()  # for the order of the keys
    live.update(new)
    return live


def _saved_whole(saved: Mapping[str, Any], full: set[KeyPath], path: KeyPath, value: Any) -> bool:
    """Return True if the container at a path was saved as one object and can be replaced by it.
    This excludes containers in `full`, to which those around each `OwnState` are added."""
    if isinstance(value, OwnState):
        full |= containers_around([path])
    key = key_of(path)
    if path in full or key not in saved:
        return False
    if not any(map(is_single, flatten(value, is_leaf=is_single).leaves.values())):
        return True
    found = saved[key]
    return not isinstance(value, Mapping) and type(found) in (list, tuple) and len(found) == len(value)


def _depth_of_dicts(path: KeyPath) -> int:
    """Return how many containers along `path`, from the top, are dicts or lead to one."""
    return max((i + 1 for i, part in enumerate(path) if type(part) is not int), default=0)


def _in_words(value: Any) -> str:
    """Describe what was passed instead of a state, and what was probably meant."""
    if isinstance(value, (str, os.PathLike)):
        return f"{type(value).__name__}: to read a checkpoint, call reshard.load(state, path)"
    return state_instead_of(value)


def like_fresh(tensor: Any, fresh: tuple[torch.Tensor, ...], key: str) -> Any:
    """Wrap `fresh` as the same kind of tensor as `tensor`."""
    if is_dtensor(tensor):
        if not fresh:
            return tensor
        return dtensor_like(fresh[0], tensor)
    if isinstance(tensor, torch.nn.Parameter) and fresh[0].dtype.is_floating_point:
        return torch.nn.Parameter(fresh[0], requires_grad=tensor.requires_grad)
    if not isinstance(tensor, torch.Tensor):
        raise LayoutError(
            f"{key!r} is a {type(tensor).__name__}, which cannot be replaced: give it memory and its dtype"
        )
    return fresh[0]


def put_at(root: Any, path: KeyPath, value: Any) -> None:
    """Replace what is at `path`. Tuples on the way are rebuilt inside their own containers."""
    if not path:  # a state with keys of other classes is one value
        root.update(value)
    chain = [root]
    for part in path[:-1]:
        chain.append(_inside(chain[-1], part))
    for container, part in zip(reversed(chain), reversed(path)):
        if isinstance(container, torch.Tensor):  # a subclass, of which this is an inner tensor
            local = holder(container)
            setattr(local, str(part), holder(value).view(getattr(local, str(part)).shape))
            return
        if not isinstance(container, tuple):
            container[plain_key(part)] = value
            return
        items = list(container)
        items[plain_key(part)] = value
        value = rebuilt(container, items)


def _inside(here: Any, part: str | int | IntKey) -> Any:
    """Return the child of a container, or of a tensor that consists of others, at one part of a
    path.
    """
    return getattr(holder(here), str(part)) if isinstance(here, torch.Tensor) else here[plain_key(part)]
