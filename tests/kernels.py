"""Tests of fingerprints by numpy and by the compiled kernel, which are skipped if the kernel is not built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from reshard.live.compiled_kernel import Kernel, kernel

NUMPY, COMPILED = "numpy", "compiled"


@contextmanager
def summed_up_by(which: str) -> Iterator[Kernel | None]:
    """Use numpy or the kernel within the block. Skips the test if there is no kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RESHARD_KERNELS", "1" if which == COMPILED else "0")
        kernel.cache_clear()
        try:
            found = kernel()
            if which == COMPILED and found is None:
                pytest.skip("reshard-kernels is not installed: make installs it where there is a C compiler")
            yield found
        finally:
            kernel.cache_clear()
