"""Transfers in two steps: fewer bytes between hosts, the same state in the end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planners import (
    LayoutMismatchError,
    Mesh,
    StateLayout,
    TensorLayout,
    TensorSpec,
    plan_relay,
    plan_transfers,
    verify,
)
from planners.relay import bytes_between_hosts
from planners.testing import state_pairs


def state(placements: str, mesh: Mesh, shape=(16, 32), names=("w",), dtype="float32") -> StateLayout:
    return StateLayout({n: TensorLayout(TensorSpec(n, shape, dtype), mesh, placements) for n in names})


TRAINER = Mesh({"fsdp": 4}, range(4))
ENGINE = Mesh({"copy": 2, "tp": 4}, range(4, 12))


def test_replicas_of_one_host_get_a_stripe_each():
    """Direct, each of 8 replicas gets all 2,048 bytes from host 0; striped, each of their 2 hosts gets them once."""
    steps = plan_relay(state("S(0)", TRAINER), state("R,R", ENGINE), ranks_per_host=4)

    assert [bytes_between_hosts(step, 4) for step in steps] == [2 * 2048, 0]
    assert [step.bytes_moved for step in steps] == [2 * 2048, 8 * 2048 * 3 // 4]
    assert all(verify(step).ok for step in steps)
    assert steps[0].after == steps[1].before
    assert steps[1].after == state("R,R", ENGINE)


def test_replicas_on_different_hosts_are_fed_directly():
    after = state("R,S(0)", Mesh({"copy": 2, "tp": 4}, range(4, 12)))

    (step,) = plan_relay(state("S(0)", TRAINER), after, ranks_per_host=4)

    assert step.after == after


def test_what_is_on_the_host_already_is_not_striped():
    before = state("R,R", Mesh({"copy": 2, "tp": 4}))

    assert len(plan_relay(before, before, ranks_per_host=4)) == 1


def test_tensors_that_gain_nothing_move_in_the_first_step_only():
    before = StateLayout({**state("S(0)", TRAINER, names=["w"]), **state("R", TRAINER, (), ["step"])})
    after = StateLayout({**state("R,R", ENGINE, names=["w"]), **state("R,R", ENGINE, (), ["step"])})

    first, second = plan_relay(before, after, ranks_per_host=4)

    assert (set(first.names), second.names) == ({"w", "step"}, ("w",))
    assert first.after["step"] == after["step"]


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
    crossing = sum(bytes_between_hosts(step, ranks_per_host) for step in steps)
    assert crossing <= bytes_between_hosts(direct, ranks_per_host)
    assert (len(steps) == 2) == (crossing < bytes_between_hosts(direct, ranks_per_host))
