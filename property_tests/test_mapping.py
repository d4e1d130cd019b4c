"""Laws of mappings: back and forth is nothing, and what they make is what numpy makes of whole tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from planners.geometry.box import Box
from planners.geometry.byte_ranges import Window
from planners.geometry.layout import StateLayout, TensorSpec
from planners.plans.load import plan_reads
from planners.plans.plan import verify
from planners.testing.replay import replay
from planners.testing.strategies import layouts
from property_tests.budget import examples
from property_tests.test_stored_views import stored
from reshard.checkpoint import Checkpoint
from reshard.errors import NormalizationError
from reshard.mapping import (
    Concat,
    Mapping,
    Offset,
    Rename,
    Reshape,
    Resize,
    Rope,
    Rule,
    Split,
    Stack,
    Transpose,
    Unstack,
)
from reshard.stored.contents import Contents
from reshard.stored.source import BytesSource
from reshard.stored.tensor import Extent, StoredChunk, StoredTensor

Shape = tuple[int, ...]


def _swapped(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


@st.composite
def rules(draw: st.DrawFn, at: int) -> tuple[Rule, dict[str, Shape]]:
    """A reversible rule, and the tensors that it takes; `at` keeps the names of several apart."""
    a, b = f"in{at}", f"out{at}"
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    kind = draw(
        st.sampled_from(["rename", "concat", "split", "stack", "unstack", "transpose", "rope", "pad", "reshape"])
    )
    if kind == "rename":
        return Rename(f"{a}.{{x}}", f"{b}.{{x}}"), {f"{a}.w": shape}
    if kind in ("concat", "split"):
        parts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        groups, names = draw(st.integers(1, 3)), [f"{a}.{i}" for i in range(len(parts))]
        unit = draw(st.integers(1, 2)) * groups
        if kind == "concat":
            return Concat(names, b, parts, groups, dim), {
                name: _swapped(shape, dim, part * unit) for name, part in zip(names, parts)
            }
        return Split(b, names, parts, groups, dim), {b: _swapped(shape, dim, sum(parts) * unit)}
    if kind == "stack":
        count = draw(st.integers(1, 4))
        return Stack(f"{a}.{{e}}.w", b, "e", dim), {f"{a}.{i}.w": shape for i in range(count)}
    if kind == "unstack":
        return Unstack(a, f"{b}.{{e}}.w", "e", dim), {a: shape}
    if kind == "transpose":
        return Transpose(a, b, draw(st.permutations(range(len(shape))))), {a: shape}
    if kind == "reshape":
        new: list[int] = []
        for factor in draw(st.permutations([p for size in shape for p in ([2, 2] if size == 4 else [size])])):
            if new and draw(st.booleans()):
                new[-1] *= factor
            else:
                new.append(factor)
        return Reshape(a, b, _swapped(shape, dim, -1), new), {a: shape}
    if kind == "rope":
        size, heads = draw(st.sampled_from([2, 4, 6])), draw(st.integers(1, 3))
        return Rope(a, b, size, draw(st.sampled_from(["halves", "pairs"]))), {a: _swapped(shape, 0, size * heads)}
    grown = shape[dim] + draw(st.integers(0, 3))
    return Resize(a, b, shape[dim], grown, dim), {a: shape}


@st.composite
def models(draw: st.DrawFn) -> tuple[Mapping, dict[str, Shape]]:
    """A few rules, perhaps a second stage over all names, and the tensors of a model that they fit."""
    drawn = [draw(rules(at)) for at in range(draw(st.integers(1, 3)))]
    mapping = Mapping(rule for rule, _ in drawn)
    if draw(st.booleans()):
        mapping = mapping | Mapping([Rename("{name+}", "last.{name+}")])
    shapes = {name: shape for _, of in drawn for name, shape in of.items()}
    return mapping, {**shapes, "other": (3,)}


def numbered(shapes: dict[str, Shape]) -> dict[str, np.ndarray[Any, Any]]:
    """Every element of every tensor has a number of its own; 0 is for padding."""
    out, at = {}, 1
    for name, shape in shapes.items():
        n = math.prod(shape)
        out[name] = np.arange(at, at + n, dtype=np.int64).reshape(shape)
        at += n
    return out


@given(st.data())
@settings(max_examples=examples(100, most=20_000))
def test_forward_then_inverse_is_identity_however_tensors_are_stored(data: st.DataObject) -> None:
    mapping, shapes = data.draw(models())
    tensors, truth, first = {}, {}, 1
    for name, shape in shapes.items():
        found, truth[name] = data.draw(stored(shape, first))
        tensors[name] = found.renamed(name)
        first += math.prod(shape)
    checkpoint = Checkpoint(Contents(tensors, format="made"), "made")

    there = mapping.apply(checkpoint)
    back = mapping.inverse().apply(there)

    views = mapping.views({name: tensor.spec for name, tensor in tensors.items()})
    whole = {name: tensor.numpy() for name, tensor in truth.items()}
    assert set(there) == set(views)
    for name, view in views.items():
        np.testing.assert_array_equal(there[name][...].numpy(), view.apply(whole))
    assert set(back) == set(shapes)
    for name, tensor in truth.items():
        assert torch.equal(back[name][...], tensor)


@given(st.data())
@settings(max_examples=examples(100, most=20_000))
def test_a_plan_through_a_mapping_is_numpy_on_whole_tensors(data: st.DataObject) -> None:
    """On random models and pairs of layouts: every rank gets just what it would cut out of the mapped whole."""
    mapping, shapes = data.draw(models())
    specs = {name: TensorSpec(name, shape, "int64") for name, shape in shapes.items()}
    views = mapping.views(specs)
    saved = StateLayout({name: data.draw(layouts(spec)) for name, spec in specs.items()})
    wanted = StateLayout({name: data.draw(layouts(view.spec)) for name, view in views.items()})

    plan = plan_reads(saved, wanted, views=views)

    verify(plan).raise_if_failed()
    arrays = numbered(shapes)
    due = {name: np.asarray(view.apply(arrays), dtype=np.int64) for name, view in views.items()}
    for rank in range(min(plan.world_size, 6)):
        got = replay(plan, rank, arrays)
        for name in views:
            for part, array in zip(wanted.parts(name, rank), got[name]):
                expected = np.full(part.sizes, -1, dtype=np.int64)
                for box, local in part.boxes():
                    expected[local.slices] = due[name][box.slices]
                np.testing.assert_array_equal(array, expected)


@st.composite
def experts(draw: st.DrawFn) -> tuple[int, list[list[int]], Shape]:
    """How many experts, which of them have each of two states, and their shape."""
    count = draw(st.integers(1, 5))
    have = st.lists(st.integers(0, count - 1), unique=True, min_size=1).map(sorted)
    return count, [draw(have), draw(have)], tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))


@given(experts(), st.sampled_from([0, 1]), st.integers(0, 9))
@settings(max_examples=examples(60, most=20_000))
def test_states_that_some_experts_lack_are_filled_and_nothing_is_lost(
    drawn: tuple[int, list[list[int]], Shape], dim: int, fill: int
) -> None:
    """A stack of states has what is there, and the filling for the rest; plans and lazy tensors agree with numpy."""
    count, have, shape = drawn
    shapes = {f"e.{i}.w": shape for i in range(count)}
    shapes |= {f"optim.state.e.{i}.w.{name}": shape for name, of in zip("ab", have) for i in of}
    arrays = numbered(shapes)
    tensors = {}
    for name in shapes:
        spec = TensorSpec(name, shape, "int64")
        source = BytesSource(arrays[name].tobytes(), name)
        place = Extent(source, Window.row_major(0, shape, 8))
        tensors[name] = StoredTensor(spec, (StoredChunk(Box.full(shape), place),))
    mapping = Mapping([Stack("e.{e}.w", "w", "e", dim, fill=fill)])

    made = mapping.apply(Checkpoint(Contents(tensors, format="made"), "made"))

    views = mapping.views({name: tensor.spec for name, tensor in tensors.items()})
    assert set(made) == set(views) == {"w", "optim.state.w.a", "optim.state.w.b"}
    for state, of in zip("ab", have):
        parts = [arrays.get(f"optim.state.e.{i}.w.{state}", np.full(shape, fill)) for i in range(count)]
        due = np.stack(parts, axis=dim)
        np.testing.assert_array_equal(made[f"optim.state.w.{state}"][...].numpy(), due)
        np.testing.assert_array_equal(views[f"optim.state.w.{state}"].apply(arrays), due)
        assert any(f"state.w.{state}'" in note for note in made.warnings) == (len(of) < count)
    back = mapping.inverse().apply(made)
    for name in shapes:
        np.testing.assert_array_equal(back[name][...].numpy(), arrays[name])


@given(
    st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=12),
    st.sampled_from([-1.0, 1.0, 0.5]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
)
@settings(max_examples=examples(150, most=20_000))
def test_an_offset_comes_back_or_is_refused(values: list[float], by: float, dtype: torch.dtype) -> None:
    tensor = torch.tensor(values, dtype=dtype)
    raw = bytes(tensor.view(torch.uint8).tolist())
    spec = TensorSpec("n", (len(values),), str(dtype).removeprefix("torch."))
    place = Extent(BytesSource(raw, "n"), Window.row_major(0, spec.shape, spec.itemsize))
    stored_tensor = StoredTensor(spec, (StoredChunk(Box.full(spec.shape), place),))
    mapping = Mapping([Offset("n", "m", by)])
    made = mapping.apply(Checkpoint(Contents({"n": stored_tensor}, format="made"), "made"))
    due = (tensor.double() + by).to(dtype)

    if torch.equal((due.double() - by).to(dtype), tensor):
        assert torch.equal(made["m"][...], due)
        assert torch.equal(mapping.inverse().apply(made)["n"][...], tensor)
    else:
        with pytest.raises(NormalizationError, match="would lose digits"):
            made["m"]
