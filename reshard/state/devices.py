"""Streams of devices: before other threads touch tensors, what the caller's stream still does to them must be done.

A thread starts on the default stream of a device. The caller may be on another one, and neither waits for the other: a
save would read values that are still being computed, a load would write what a kernel under way overwrites.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["settle_streams"]


def settle_streams(devices: Iterable[torch.device]) -> None:
    """Wait for the calling thread's stream of each of these devices; the CPU and the meta device have none."""
    kind = torch.accelerator.current_accelerator()
    for device in set(devices):
        if kind is not None and device.type == kind.type:
            torch.accelerator.current_stream(device).synchronize()
