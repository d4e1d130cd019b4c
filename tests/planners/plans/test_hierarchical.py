"""Transfers in two steps: fewer bytes between hosts, the same state in the end."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from planners import (
    Box,
    LayoutMismatchError,
    Mesh,
    StateLayout,
    TensorLayout,
    TensorSpec,
    plan_relay,
    plan_transfers,
    verify,
)
from planners.geometry.layout import ProductForm
from planners.plans.relay import bytes_between, rank_groups, stripe_places, striped
from planners.testing.strategies import layouts, state_pairs
from tests.planners.states import alike

state = alike((16, 32))


TRAINER = Mesh({"fsdp": 4}, range(4))
SMALL = st.lists(st.integers(0, 6), max_size=3).map(tuple)
ENGINE = Mesh({"copy": 2, "tp": 4}, range(4, 12))


def test_replicas_of_one_host_get_a_stripe_each():
    """Direct, each of 8 replicas gets all 2,048 bytes from host 0; striped, each of their 2 hosts gets them once."""
    steps = plan_relay(state("S(0)", TRAINER), state("R,R", ENGINE), ranks_per_host=4)

    assert [bytes_between(step, np.arange(step.world_size) // 4) for step in steps] == [2 * 2048, 0]
    assert [step.bytes_moved for step in steps] == [2 * 2048, 8 * 2048 * 3 // 4]
    assert all(verify(step).ok for step in steps)
    assert steps[0].after == steps[1].before
    assert steps[1].after == state("R,R", ENGINE)


def test_replicas_on_different_hosts_spare_the_givers_at_no_cost_between_hosts():
    """Each of 2 hosts must get everything, from the trainer or from the other host: the trainer gives it once."""
    after = state("R,S(0)", Mesh({"copy": 2, "tp": 4}, range(4, 12)))

    steps = plan_relay(state("S(0)", TRAINER), after, ranks_per_host=4)

    hosts, sides = rank_groups(plan_transfers(state("S(0)", TRAINER), after, ranks_per_host=4))
    assert [bytes_between(step, hosts) for step in steps] == [2048, 2048]
    assert [bytes_between(step, sides) for step in steps] == [2048, 0]


@pytest.mark.parametrize(
    ("placements", "mesh", "shape", "cuts"),
    [
        ("R", Mesh({"copy": 4}, range(4, 8)), (16, 32), "S(1)"),
        ("R,S(0)", Mesh({"copy": 2, "tp": 2}, range(4, 8)), (16,), "the dim that is cut already"),
        ("R,S(0)", Mesh({"copy": 2, "tp": 2}, range(4, 8)), (5, 3), "uneven"),
        ("R", Mesh({"copy": 4}, range(4, 8)), (), "no dim: one of them gets it, and passes it on"),
        ("R", Mesh({"copy": 4}, range(4, 8)), (2,), "fewer elements than replicas"),
        ("R,R", Mesh({"a": 2, "b": 2}, [7, 4, 6, 5]), (3, 6), "two axes"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_each_byte_goes_from_side_to_side_once_and_to_each_replica_once(placements, mesh, shape, cuts):
    before, after = state("R", TRAINER, shape), state(placements, mesh, shape)

    first, second = plan_relay(before, after)

    (sides,) = rank_groups(plan_transfers(before, after))
    nbytes = before["w"].spec.nbytes
    assert (bytes_between(first, sides), bytes_between(second, sides)) == (nbytes, 0)
    assert first.bytes_moved == nbytes
    assert first.received_bytes().tolist() == (first.after["w"].numels() * 4).tolist()
    assert (first.received_bytes() + second.received_bytes()).tolist() == (after["w"].numels() * 4).tolist()
    assert verify(first).ok
    assert verify(second).ok


def test_replicas_of_irregular_boxes_share_each_box():
    spec, mine = TensorSpec("w", (8, 6), "float32"), [Box((0, 0), (3, 6)), Box((5, 1), (1, 2))]
    after = StateLayout({"w": TensorLayout.from_boxes(spec, {4: mine, 5: mine, 6: [Box((7, 0), (1, 1))]})})

    first, second = plan_relay(state("S(0)", TRAINER, (8, 6)), after)

    assert first.bytes_moved == (18 + 2 + 1) * 4
    assert second.bytes_moved == (18 + 2) * 4
    assert [first.after["w"].numel(rank) for rank in (4, 5, 6)] == [10, 10, 1]


def test_sides_that_share_a_rank_are_one_group():
    after = state("R", Mesh({"copy": 4}, range(3, 7)))

    assert rank_groups(plan_transfers(state("S(0)", TRAINER), after)) == ()
    assert len(plan_relay(state("S(0)", TRAINER), after)) == 1


@given(st.builds(TensorSpec, st.just("w"), SMALL, st.just("float32")).filter(lambda spec: spec.numel), st.data())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_stripes_tile_what_the_replicas_of_a_group_hold_and_lie_within_it(spec, data):
    whole = data.draw(layouts(spec))
    groups = np.array(data.draw(st.lists(st.integers(0, 1), min_size=whole.world_size, max_size=whole.world_size)))
    form = striped(whole, groups)
    assume(form is not None)
    stage = TensorLayout.of(spec, form)

    alike: dict[tuple[object, ...], list[int]] = {}
    for rank in range(whole.world_size):
        alike.setdefault((groups[rank], tuple(part.dims for part in whole.parts(rank))), []).append(rank)
        for part, (index, box) in zip(stage.parts(rank), stripe_places(stage, whole, rank), strict=True):
            held = [elements(g) for g, local in whole.parts(rank)[index].boxes() if local & box is not None]
            assert set(elements(*(g for g, _ in part.boxes()))) <= {e for some in held for e in some}
    for ranks in alike.values():
        given_out = [e for rank in ranks for part in stage.parts(rank) for e in elements(*(g for g, _ in part.boxes()))]
        held = [e for part in whole.parts(ranks[0]) for e in elements(*(g for g, _ in part.boxes()))]
        assert set(given_out) == set(held)
        # on a mesh, only runs of ranks that are of one group everywhere are striped
        assert len(given_out) == len(held) or isinstance(whole.form, ProductForm)


def elements(*boxes: Box) -> list[tuple[int, ...]]:
    return [index for box in boxes for index in itertools.product(*map(range, box.offsets, box.stops))]


def test_what_is_on_the_host_already_is_not_striped():
    before = state("R,R", Mesh({"copy": 2, "tp": 4}))

    assert len(plan_relay(before, before, ranks_per_host=4)) == 1


def test_tensors_that_gain_nothing_move_in_the_first_step_only():
    rows = Mesh({"rows": 8}, range(4, 12))
    before = state("S(0)", TRAINER, names=["w", "x"])
    after = StateLayout({**state("R,R", ENGINE, names=["w"]), **state("S(0)", rows, names=["x"])})

    first, second = plan_relay(before, after, ranks_per_host=4)

    assert (set(first.names), second.names) == ({"w", "x"}, ("w",))
    assert first.after["x"] == after["x"]


def test_a_cast_comes_last():
    after = state("R,R", ENGINE, dtype="bfloat16")
    with pytest.raises(LayoutMismatchError, match="allow_cast"):
        plan_relay(state("S(0)", TRAINER), after, ranks_per_host=4)

    first, second = plan_relay(state("S(0)", TRAINER), after, ranks_per_host=4, allow_cast=True)

    assert first.after["w"].spec.dtype == "float32"
    assert second.after["w"].spec.dtype == "bfloat16"


@given(state_pairs(max_tensors=3), st.integers(1, 6))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_two_steps_are_right_and_never_cross_more(pair, ranks_per_host):
    direct = plan_transfers(*pair, ranks_per_host=ranks_per_host)
    steps = plan_relay(*pair, ranks_per_host=ranks_per_host)

    assert all(verify(step).ok for step in steps)
    assert steps[0].before == direct.before
    final = {fqn: step.after[fqn] for step in steps for fqn in step.names}
    assert final == dict(direct.after)
    groupings = rank_groups(direct)
    crossing = tuple(sum(bytes_between(step, groups) for step in steps) for groups in groupings)
    once = tuple(bytes_between(direct, groups) for groups in groupings)
    assert crossing <= once
    assert (len(steps) == 2) == (crossing < once)
    if len(groupings) == 2 or (groupings and max(groupings[0]) == 1 and ranks_per_host >= direct.world_size):
        received = [sum(step.received_bytes()[rank:][:1].sum() for step in steps) for rank in range(direct.world_size)]
        assert received == direct.received_bytes().tolist()  # no rank is on both sides: each byte once to each rank
