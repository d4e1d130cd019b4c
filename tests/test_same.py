"""The comparison of states finds every difference, and none in equal states."""

from __future__ import annotations

import math
from collections import OrderedDict

import pytest
import torch

from tests.bits import DTYPES, random_bits
from tests.same import assert_same, bits, differences, same


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)], ids=str)
def test_random_bits_of_every_dtype_are_the_same_as_themselves(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_bits(shape, dtype, torch.Generator().manual_seed(0))

    assert same(tensor.clone(), tensor)
    assert len(bits(tensor)) == tensor.nbytes


SAME = [
    (torch.arange(6).reshape(2, 3).T, torch.arange(6).reshape(2, 3).T.contiguous(), "strides are no values"),
    (torch.nn.Parameter(torch.ones(2)), torch.ones(2), "a parameter is a tensor"),
    (torch.tensor(math.nan), torch.tensor(math.nan), "NaN of the same bits"),
    (math.nan, math.nan, "NaN as a number"),
    (torch.tensor([1j]).conj(), torch.tensor([complex(0.0, -1.0)]), "conjugation that has not been carried out"),
    (OrderedDict(a=1), {"a": 1}, "two kinds of mapping"),
]
OTHER = [
    (torch.tensor(0.0), torch.tensor(-0.0), "the sign of zero"),
    (torch.tensor([math.nan]), -torch.tensor([math.nan]), "the sign of NaN"),
    (torch.ones(2), torch.ones(2, dtype=torch.float64), "dtype"),
    (torch.ones(2, 1), torch.ones(2), "shape"),
    (torch.ones(()), 1.0, "a tensor for a number"),
    (1.0, torch.ones(()), "a number for a tensor"),
    (True, 1, "a bool for an int"),
    ([1], (1,), "a list for a tuple"),
    ([1, 2], [1], "length"),
    ({"a": 1}, {1: 1}, "keys"),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "the order of keys"),
    ({"a": [{"b": 1}]}, {"a": [{"b": 2}]}, "something deep inside"),
    (None, 0, "None for a number"),
]


@pytest.mark.parametrize(("found", "wanted", "note"), SAME, ids=[row[2] for row in SAME])
def test_same(found: object, wanted: object, note: str) -> None:
    assert_same({"x": found}, {"x": wanted})


@pytest.mark.parametrize(("found", "wanted", "note"), OTHER, ids=[row[2] for row in OTHER])
def test_other(found: object, wanted: object, note: str) -> None:
    assert not same(found, wanted)
    with pytest.raises(AssertionError, match="it"):
        assert_same(found, wanted)


def test_close_forgives_rounding_and_nothing_else() -> None:
    assert_same([torch.ones(2) + 1e-6], [torch.ones(2)], close=True)
    assert not same([torch.ones(2) + 1e-6], [torch.ones(2)])
    assert [*differences([torch.ones(2) + 0.1], [torch.ones(2)], close=True)] != []
    assert [*differences([torch.ones(2)], [torch.ones(2).double()], close=True)] != []


def test_every_difference_is_told_with_its_place() -> None:
    found = list(differences({"a": [1, 2], "b": 3}, {"a": [1, 4], "b": 5}))

    assert [line.split(" is ")[0] for line in found] == ["it['a'][1]", "it['b']"]
