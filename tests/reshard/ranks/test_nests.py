"""States that are nested differently on different ranks: merged only where no rank gets back what it never had."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from reshard.errors import KeyMismatchError
from reshard.live.state import PerRank, is_long, take_apart
from reshard.ranks.global_layout import check_nests

T = torch.ones(1)


def check(*states: Any) -> None:
    check_nests(take_apart(state, whole_at=is_long) for state in states)


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ([1, 2], [1], "'x' is a list of 2 on some ranks and a list of 1 on others"),
        ([], [1], "a list of 0 on some ranks and a list of 1"),
        ((1, 2), [1, 2], "a tuple of 2 on some ranks and a list of 2"),
        ((), [], "a tuple of 0 on some ranks and a list of 0"),
        ([], {}, "a list of 0 on some ranks and a dict"),
        (None, {"y": 1}, "a value on some ranks and a dict"),
        ([T], {"0": T}, "a list on some ranks and a dict"),
        (5, [], "a value on some ranks and a list of 0"),
    ],
)
def test_one_place_is_one_thing(a, b, words):
    with pytest.raises(KeyMismatchError, match=f"{words}.*PerRank"):
        check({"x": a, "w": T}, {"x": b, "w": T})
    with pytest.raises(KeyMismatchError, match="PerRank"):
        check({"w": T}, {"in": [{"x": b}]}, {"in": [{"x": a}]})


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"y": 1}, {"z": 2}),
        ({}, {"y": T}),
        ([T, T], [T]),
        ([T], []),
        ([1, 2], [1, 3]),
        (PerRank([1]), PerRank([1, 2])),
        ({1: T}, {2: T}),
    ],
)
def test_ranks_may_have_other_keys(a, b):
    check({"x": a}, {"x": b})
    check({"x": a}, {})


def test_groups_of_other_pipeline_stages_say_how_to_flatten_them():
    one, other = ({"optim": {"state": {}, "param_groups": [{"params": names}]}} for names in (["a", "b"], ["c"]))

    with pytest.raises(KeyMismatchError, match=r"param_groups.*flatten_optimizer_state_dict=True"):
        check(one, other)
