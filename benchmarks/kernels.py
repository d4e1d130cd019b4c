"""Turns the compiled kernel on or off. Rows are measured without it, unless they name it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from reshard.live.compiled_kernel import kernel

__all__ = ["NAMED", "compiled_kernel", "is_installed"]

NAMED = ", compiled kernel"
"""Suffix of the names of rows with the kernel."""
_SWITCH = "RESHARD_KERNELS"


@contextmanager
def compiled_kernel(wanted: bool = True) -> Iterator[None]:
    """Use the kernel within the block, if it is installed and wanted."""
    before = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = "1" if wanted else "0"
    kernel.cache_clear()
    try:
        yield
    finally:
        os.environ.pop(_SWITCH)
        if before is not None:
            os.environ[_SWITCH] = before
        kernel.cache_clear()


def is_installed() -> bool:
    """Return True if the kernel is installed and works."""
    with compiled_kernel():
        return kernel() is not None
