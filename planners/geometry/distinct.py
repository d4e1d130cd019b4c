"""The distinct values of an array, as `np.unique` gives them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["distinct"]


def distinct(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """In order. Without `np.unique`, whose first call imports `numpy.ma`: that takes longer than most plans."""
    ordered = np.sort(values, axis=None)
    new = np.ones(len(ordered), dtype=bool)
    new[1:] = ordered[1:] != ordered[:-1]
    return ordered[new]
