"""The distinct values of arrays, compared with numpy's."""

from __future__ import annotations

import numpy as np
import pytest

from planners.geometry.distinct import distinct


@pytest.mark.parametrize("values", [[], [5], [2, 2, 2], [3, -1, 3, 0, -1], [-(2**63), 2**63 - 1, -(2**63)]])
def test_they_are_those_of_numpy(values):
    given = np.array(values, dtype=np.int64)
    found = distinct(given)

    assert found.tolist() == np.unique(given).tolist()
    assert found.dtype == np.int64
    assert given.tolist() == values


def test_the_values_of_a_table():
    assert distinct(np.array([[3, 1], [1, 2]])).tolist() == [1, 2, 3]
