"""With the compiled kernel and without: all figures are without it, but for those of rows that name it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from reshard.live.compiled_kernel import kernel

__all__ = ["NAMED", "compiled_kernel", "is_installed"]

NAMED = ", compiled kernel"
"""Behind the name of such a row."""
_SWITCH = "RESHARD_KERNELS"


@contextmanager
def compiled_kernel(wanted: bool = True) -> Iterator[None]:
    """This process uses the kernel meanwhile, if it is installed, or does not."""
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
    """Whether there is one that works."""
    with compiled_kernel():
        return kernel() is not None
