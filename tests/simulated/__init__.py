"""An accelerator in software, named "sim": for tests of what happens between a device and the host without one.

    simulated.install()                         # once in a process that is nothing else's: torch keeps it for good
    tensor = torch.arange(8, device=simulated.DEVICE)  # an ordinary tensor of that device
    with simulated.watch() as seen: ...         # faults, blocking calls and peaks of memory, of what happens within

- Its memory cannot be read or written by the CPU: a tensor's address is within pages that nobody may touch, and what
  it stands for lies elsewhere. Whoever takes it for memory of the CPU ends the process.
- Its streams run late on purpose: nothing happens before somebody waits for it, and then only what must; or all other
  streams first. Events order streams, as they do on devices.
- Its pinned memory is tracked: whoever changes it, or frees device memory, while a copy is under way commits a fault.

With RESHARD_TEST_DEVICE=cuda, or another kind that torch knows, `DEVICE` is that one: bits are compared, and nothing is
watched.
"""

import os

import torch
from torch.utils import backend_registration

from tests.simulated import kernels
from tests.simulated.memory import Watch, pinned, watch
from tests.simulated.streams import Event, Order, Stream, leave_out, ordered, wait_sites

DEVICE = os.environ.get("RESHARD_TEST_DEVICE", "sim")
IS_REAL = DEVICE != "sim"


def _is_there() -> bool:
    try:
        return bool(torch.get_device_module(DEVICE).is_available())
    except RuntimeError:  # torch has no module of this name
        return False


AVAILABLE = _is_there() if IS_REAL else hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
WHY_NOT = (
    f"there is no {DEVICE} here, or this torch does not know it"
    if IS_REAL
    else "this torch knows devices that are written in C++ only"
)

__all__ = [
    "AVAILABLE",
    "DEVICE",
    "IS_REAL",
    "WHY_NOT",
    "Event",
    "Order",
    "Stream",
    "Watch",
    "install",
    "leave_out",
    "ordered",
    "pinned",
    "wait_sites",
    "watch",
]


def install() -> None:
    """Make torch know the device, or take the real one whose number is that of this rank."""
    if not IS_REAL:
        kernels.install()
        return
    module = torch.get_device_module(DEVICE)
    module.set_device(int(os.environ.get("RANK", "0")) % module.device_count())
