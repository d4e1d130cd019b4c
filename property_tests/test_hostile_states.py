"""Any nest of anything: what is saved comes back bit for bit and type for type, or is refused by an error naming it.

The states are as odd as Python and torch allow: nests of all containers, keys of all kinds, tensors of all dtypes seen
in every way (strided, expanded, conjugated, negated, empty, overlapping, tied, on no device at all), arrays and scalars
of numpy, values of classes of their own.
"""

from __future__ import annotations

import collections
import math
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import reshard
from property_tests.budget import examples
from reshard.errors import FormatError, ReshardError
from reshard.storage.memory import MemoryStorage
from tests.bits import DTYPES, random_bits
from tests.reshard.live.test_tensor_subclasses import Quantized
from tests.same import bits
from tests.stories import test_types as types

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
GOOD = [*types.ALWAYS.values(), *types.WHERE_THE_TARGET_HAS_THEM.values(), *types.OF_THE_TARGETS_KIND.values()]
"""A value, and another of its type for the place that it is loaded into."""
BAD = list(types.REFUSED.values())


_CONTAINERS = (dict, list, tuple, collections.deque)


class Sub(torch.Tensor):
    """A class of its own that is as a tensor is in all else."""


class Blank:
    """A value with what is in its place when it is loaded."""

    def __init__(self, value: Any, other: Any) -> None:
        self.value, self.other = value, other

    def __repr__(self) -> str:
        return f"Blank({self.value!r:.40})"


# --- tensors ---

NEGATED = {torch.complex64, torch.complex128, torch.complex32}


def seen(draw: Any, base: torch.Tensor) -> torch.Tensor:
    """A tensor seen in one of the ways in which torch can."""
    way = draw(st.sampled_from(["it", "it", "back", "step", "part", "wide", "flat", "narrow", "conj", "neg", "type"]))
    if way == "back" and base.ndim:
        return base.permute(*reversed(range(base.ndim)))
    if way == "step" and base.ndim:
        return base[:: draw(st.integers(2, 3))]
    if way == "part" and base.ndim:
        return base[draw(st.integers(0, base.shape[0])) :]
    if way == "wide":
        return base.unsqueeze(0).expand(draw(st.integers(0, 3)), *base.shape)
    if way == "flat" and base.is_contiguous():
        return base.view(-1)
    if way == "narrow" and base.ndim > 1:
        return base[..., : base.shape[-1] // 2]
    if way == "conj" and base.is_complex():
        return base.conj()
    if way == "neg" and base.dtype in NEGATED and base.dtype != torch.complex32:
        return base.conj().imag
    if way == "type":
        return base.view(torch.uint8) if base.is_contiguous() and base.ndim else base
    return base


@st.composite
def tensors(draw, pool):
    """A tensor: of the pool, which makes it tied or overlapping, or a new one that goes into it."""
    if pool and draw(st.integers(0, 3)) == 0:
        return seen(draw, draw(st.sampled_from(pool))) if draw(st.booleans()) else draw(st.sampled_from(pool))
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    made = random_bits(shape, dtype, generator)
    pool.append(made)
    made = seen(draw, made)
    kind = draw(st.integers(0, 11))
    if kind == 0:
        return torch.nn.Parameter(made, requires_grad=made.is_floating_point() and draw(st.booleans()))
    if kind == 1 and made.is_floating_point():
        return made.detach().requires_grad_()
    if kind == 2:
        return made.as_subclass(Sub)
    if kind == 3:
        return Quantized(random_bits((2, 2), torch.int8, generator), random_bits((2,), torch.float32, generator))
    if kind == 4 and draw(st.integers(0, 4)) == 0:
        return made.to("meta")
    return made


# --- nests ---

TEXTS = ["a", "b", "1", "2", "", "a.b", "$tuple", "[1]", "0", "ä"]
KEYS = st.one_of(
    st.sampled_from(TEXTS),
    st.sampled_from(TEXTS),
    st.integers(-1, 2),
    st.sampled_from([types.Mode.FAST, types.Level.LOW]),
)
ODD_KEYS = st.sampled_from([None, True, 1.5, (1, "a"), b"x", frozenset([1]), types.Color.RED])


@st.composite
def nests(draw, pool, depth=4):
    kind = draw(st.integers(0, 13 if depth else 7))
    if kind <= 4:
        return draw(tensors(pool))
    if kind <= 7:
        return (
            Blank(draw(st.sampled_from(BAD)), 0)
            if draw(st.integers(0, 60)) == 0
            else Blank(*draw(st.sampled_from(GOOD)))
        )
    inner = nests(pool, depth=depth - 1)
    if kind <= 10:
        keys = draw(st.lists(KEYS, max_size=4))
        if draw(st.integers(0, 15)) == 0:
            keys.append(draw(ODD_KEYS))
        items = {key: draw(inner) for key in keys}
        cls = draw(st.sampled_from([dict, dict, dict, collections.OrderedDict, types.MyDict]))
        return cls(items)
    items = draw(st.lists(inner, max_size=3))
    if kind == 11:
        return draw(st.sampled_from([list, types.MyList]))(items)
    if kind == 12:
        return draw(st.sampled_from([tuple, types.MyTuple]))(items)
    if draw(st.booleans()):
        return collections.deque(items, maxlen=draw(st.sampled_from([None, 4])))
    return types.Point(draw(inner), draw(inner))


@st.composite
def states(draw):
    pool: list[torch.Tensor] = []
    keys = draw(st.lists(KEYS, min_size=1, max_size=4, unique=True))
    return {key: draw(nests(pool)) for key in keys}


def rebuilt(value: Any, leaf: Any) -> Any:
    """The nest with other leaves."""
    if isinstance(value, Blank | torch.Tensor):
        return leaf(value)
    if isinstance(value, dict):
        return type(value)((key, rebuilt(item, leaf)) for key, item in value.items())
    if isinstance(value, types.Point):
        return types.Point(*(rebuilt(item, leaf) for item in value))
    if isinstance(value, collections.deque):
        return collections.deque((rebuilt(item, leaf) for item in value), value.maxlen)
    return type(value)(rebuilt(item, leaf) for item in value)


def given_values(state: Any) -> Any:
    return rebuilt(state, lambda leaf: leaf.value if isinstance(leaf, Blank) else leaf)


def targets(state: Any) -> Any:
    """A fresh state of the same shape: what is one tensor is one, all other memory is apart."""
    made: dict[int, Any] = {}

    def blank(leaf: Any) -> Any:
        if isinstance(leaf, Blank):
            return leaf.other
        if id(leaf) not in made:
            made[id(leaf)] = zeros(leaf)
        return made[id(leaf)]

    return rebuilt(state, blank)


def zeros(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, Quantized):
        return Quantized(torch.zeros_like(tensor.data_), torch.zeros_like(tensor.scale))
    fresh = (
        torch.zeros(math.prod(tensor.shape) * tensor.itemsize, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
    )
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(fresh, requires_grad=tensor.requires_grad)
    return fresh.as_subclass(Sub) if isinstance(tensor, Sub) else fresh.requires_grad_(tensor.requires_grad)


# --- the law ---


def differing(found: Any, wanted: Any, where: str = "") -> Iterator[str]:
    """Where two nests differ in types, keys, shapes, dtypes or bits."""
    if type(found) is not type(wanted):
        yield f"{where}: {type(found)} instead of {type(wanted)}"
    elif isinstance(wanted, Quantized):
        yield from differing([found.data_, found.scale], [wanted.data_, wanted.scale], where)
    elif isinstance(wanted, torch.Tensor):
        if (found.shape, found.dtype, found.requires_grad) != (wanted.shape, wanted.dtype, wanted.requires_grad):
            yield f"{where}: {found} instead of {wanted}"
        elif wanted.numel() and bits(found) != bits(wanted):
            yield f"{where}: other bits"
    elif isinstance(wanted, Mapping):
        keys, own = ([(type(k), k) for k in one] for one in (wanted, found))
        if any(map(has_empty, wanted.values())):
            keys, own = sorted(keys, key=repr), sorted(own, key=repr)  # empty containers come last
        if own != keys:
            yield f"{where}: the keys {list(found)} instead of {list(wanted)}"
        for key in wanted:
            if key in found:
                yield from differing(found[key], wanted[key], f"{where}[{key!r}]")
    elif isinstance(wanted, (list, tuple, collections.deque)):
        if len(found) != len(wanted) or getattr(found, "maxlen", 0) != getattr(wanted, "maxlen", 0):
            yield f"{where}: {found} instead of {wanted}"
        for i, (a, b) in enumerate(zip(found, wanted)):
            yield from differing(a, b, f"{where}[{i}]")
    elif not types.same(found, wanted):
        yield f"{where}: {found!r} instead of {wanted!r}"


def has_empty(value: Any) -> bool:
    """Whether there is an empty container at or below a value."""
    if not isinstance(value, _CONTAINERS):
        return False
    return not value or any(map(has_empty, value.values() if isinstance(value, dict) else value))


def may_be_refused(state: Any) -> bool:
    """Whether there is anything in the state for which the library says no."""
    keys: list[str] = []

    def look(value: Any, path: tuple[str, ...]) -> bool:
        if path:
            keys.append(".".join(path))
        if isinstance(value, Blank):
            return any(value.value is bad for bad in BAD)
        if isinstance(value, torch.Tensor):
            inner = [".".join((*path, name)) for name in ("data_", "scale")] if isinstance(value, Quantized) else []
            keys.extend(inner)
            return value.is_meta
        if isinstance(value, dict):
            odd = [k for k in value if not isinstance(k, (str, int)) or isinstance(k, bool)]
            texts = {str.__str__(k) for k in value if isinstance(k, str)}
            if odd and any(isinstance(leaf, torch.Tensor) for leaf in leaves(value)):
                return True

            def part(key: Any) -> str:
                if isinstance(key, str):
                    return str.__str__(key)
                number = repr(int(key))
                return f"[{number}]" if number in texts else number

            if odd:
                return any(look(item, (*path, "?", str(i))) for i, item in enumerate(value.values()))
            return max([look(item, (*path, part(key))) for key, item in value.items()], default=False)
        return max([look(item, (*path, str(i))) for i, item in enumerate(value)], default=False)

    return look(state, ()) or len(set(keys)) < len(keys)


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Blank | torch.Tensor):
        yield value
    else:
        for item in value.values() if isinstance(value, dict) else value:
            yield from leaves(item)


def refusal(state: Any, place: Any) -> str:
    """What `save` says if it refuses; nothing if it saves."""
    try:
        reshard.save(state, place)
    except ReshardError as error:
        return str(error)
    return ""


@given(states())
@settings(max_examples=min(examples(200), 10_000))
def test_what_is_saved_comes_back_or_is_refused_by_name(state):
    real, place = given_values(state), MemoryStorage()
    if said := refusal(real, place):
        assert may_be_refused(state), said
        assert "'" in said  # a key
        return
    assert not any(leaf.is_meta and leaf.numel() for leaf in leaves(state) if isinstance(leaf, torch.Tensor))
    target = targets(state)
    report = reshard.load(target, place)
    assert report.ok, report
    assert list(differing(target, real)) == []
    assert list(shown_otherwise(reshard.open(place).nested(), state)) == []
    assert reshard.verify(place).ok


@pytest.mark.parametrize("format", ["dcp", "torch_save", "torch_checkpointing"])
@given(states())
@settings(max_examples=min(examples(100), 2_000))
def test_what_is_converted_comes_back_or_is_refused_or_reported(format, state):
    state = {"s": {"k": state}}  # tensors at the top have another place in torch_checkpointing
    real, place = given_values(state), MemoryStorage()
    if refusal(real, place):
        return
    with tempfile.TemporaryDirectory() as folder:
        said = ""
        try:
            converted = reshard.convert(place, f"{folder}/c", format=format)
        except FormatError as error:
            said = str(error)
        if said:
            assert "cannot be written, such as 's.k" in said
            return
        assert reshard.compare(place, f"{folder}/c").ok
        if format == "torch_save":
            torch.load(f"{folder}/c", weights_only=False)
        target = targets(state)
        report = reshard.load(target, f"{folder}/c")
        assert converted.changed_classes or not report.ok or list(differing(target, real)) == []


def shown_otherwise(found: Any, wanted: Any) -> Iterator[str]:
    """Where what is seen of a checkpoint without a target has other elements."""
    if isinstance(wanted, Quantized):
        yield from shown_otherwise([found["data_"], found["scale"]], [wanted.data_, wanted.scale])
    elif isinstance(wanted, torch.Tensor):
        value = found[...]
        if wanted.numel() and (value.dtype, value.shape, bits(value)) != (wanted.dtype, wanted.shape, bits(wanted)):
            yield f"{value} instead of {wanted}"
    elif isinstance(wanted, dict) and any(isinstance(leaf, torch.Tensor) for leaf in leaves(wanted)):
        if len(found) != len(wanted):
            yield f"{found} instead of {wanted}"
        for key, value in wanted.items():
            yield from shown_otherwise(found[key], value)
    elif isinstance(wanted, (list, tuple, collections.deque)):
        found = getattr(found, "value", found)
        if len(found) != len(wanted):
            yield f"{found} instead of {wanted}"
        for a, b in zip(found, wanted):
            yield from shown_otherwise(a, b)
