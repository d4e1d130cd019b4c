"""By how much two tensors differ."""

from __future__ import annotations

import math

import pytest
import torch

from reshard.live.differences import largest

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("x", "y", "wanted"),
    [
        ([1.0, 2.0, 5.0], [1.0, 1.5, 4.0], (1.0, 1 / 3)),
        ([0.0, 0.0], [-0.0, 0.0], (0.0, 0.0)),
        ([0.0, 1.0], [0.0, 0.0], (1.0, INF)),
        ([NAN, 1.0, INF, 3.0], [2.0, INF, INF, 2.0], (1.0, 0.5)),
        ([NAN], [1.0], (0.0, 0.0)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_the_largest_differences_are_of_finite_elements(x, y, wanted, dtype) -> None:
    found = largest(torch.tensor(x).to(dtype), torch.tensor(y).to(dtype))
    assert found == pytest.approx(wanted)


def test_integers_and_packed_numbers() -> None:
    big = torch.tensor([2**62 + 1, 3])
    assert largest(big, torch.tensor([2**62, 2])) == (1.0, 0.5)
    assert largest(torch.tensor([True]), torch.tensor([False])) == (1.0, INF)
    if packed := getattr(torch, "float4_e2m1fn_x2", None):
        sides = (torch.tensor([value], dtype=torch.uint8).view(packed) for value in (1, 2))
        assert largest(*sides) == (0.0, 0.0)


def test_a_distance_beyond_float32() -> None:
    x, y = torch.tensor([3e38, 1.0, INF]), torch.tensor([-3e38, 2.0, 0.0])
    assert largest(x, y) == pytest.approx((6e38, 2.0))
