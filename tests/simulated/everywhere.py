"""Whole suites on a device: what tests make without saying where lies there, in their processes as well.

    pytest --device=sim tests/stories/test_engine.py        # or cuda, or another kind that torch knows

Tests and torch are told the device as by `torch.set_default_device`; the library is, too, for that is what its users
do. Meshes of the CPU become meshes of the device. Only what tests compare is brought to the host for them: the library
gets no help, so that what it takes for memory of the host by mistake still ends the test.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_map_only

from tests import simulated
from tests.simulated import messages

__all__ = ["enter"]

_TESTS = str(Path(__file__).parent.parent)
_SIMULATED = str(Path(__file__).parent)
_COMPARED = {
    torch.equal,
    torch.allclose,
    torch.isclose,
    torch.Tensor.equal,
    torch.Tensor.allclose,
    torch.Tensor.numpy,
    torch.Tensor.eq,
    torch.Tensor.__eq__,
    torch.Tensor.__ne__,
    torch.Tensor.__array__,
}


def enter() -> str:
    """From here on, for as long as the process lives. Gives the backend of process groups for such tensors."""
    simulated.install()
    if not simulated.IS_REAL:
        messages.register()
        messages.EAGER = True
    _Everywhere().__enter__()
    _instead(dist.device_mesh.DeviceMesh, "device_type")
    _instead(FullyShardedDataParallel, "device_id")
    # these mix DTensors with plain tensors, which the kernels for many tensors at once do not
    sys.modules["torch.optim.optimizer"]._get_foreach_kernels_supported_devices = list  # type: ignore[attr-defined]
    if not simulated.IS_REAL:
        return f"cpu:gloo,{simulated.DEVICE}:{messages.BACKEND}"
    alone = torch.get_device_module(simulated.DEVICE).device_count() < int(os.environ.get("WORLD_SIZE", "1"))
    own = dist.get_default_backend_for_device(simulated.DEVICE)
    return "gloo" if alone else f"cpu:gloo,{simulated.DEVICE}:{own}"  # ranks share one device by gloo alone


def _instead(of: Any, argument: str) -> None:
    """Instances of `of` that are told the CPU are told the device."""
    made = of.__init__
    signature = inspect.signature(made)

    @functools.wraps(made)
    def told(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        if str(given.arguments.get(argument)) == "cpu":
            given.arguments[argument] = type(given.arguments[argument])(simulated.DEVICE)
        made(*given.args, **given.kwargs)

    of.__init__ = told


_FACTORIES: frozenset[Callable[..., Any]] = frozenset(_device_constructors())


class _Everywhere(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES and kwargs.get("device") is None:
            return _made(func, args, kwargs)
        if func in _COMPARED and _is_asked_by_test():
            args, kwargs = tree_map_only(torch.Tensor, _on_host, (args, kwargs))
        return func(*args, **kwargs)


def _made(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    if "generator" not in kwargs:
        return func(*args, **{**kwargs, "device": simulated.DEVICE})
    return func(*args, **kwargs).to(simulated.DEVICE)  # the generators of tests are of the CPU


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu() if tensor.device.type == simulated.DEVICE else tensor


def _is_asked_by_test() -> bool:
    frame = sys._getframe(2)
    while frame is not None and "/torch/" in frame.f_code.co_filename:
        if "/torch/optim/" in frame.f_code.co_filename:  # a test's step, in which an optimizer compares
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_code.co_filename.startswith(_TESTS)
