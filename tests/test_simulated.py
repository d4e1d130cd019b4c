"""The simulated device raises the errors that a device would."""

from __future__ import annotations

import pytest
import torch

from tests import gloo, simulated

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(not simulated.AVAILABLE, reason=simulated.WHY_NOT),
    pytest.mark.host_only("says itself what lies where"),
]


def _late() -> None:
    sim = torch.get_device_module("sim")
    side, host = sim.Stream(), simulated.pinned(40).view(torch.float32)
    tensor = torch.ones(10, device="sim")
    with simulated.watch() as seen:
        tensor.mul_(3)
        with sim.stream(side):
            host.copy_(tensor, non_blocking=True)
        assert not host.eq(3).any(), "a read of a buffer in flight finds nothing of what will be there"
        side.synchronize()
        assert not host.eq(3).any(), "without an event the copy came before what it was to bring"
        side.wait_stream(sim.current_stream())
        with sim.stream(side):
            host.copy_(tensor, non_blocking=True)
        side.synchronize()
        assert host.eq(3).all()
    assert seen.faults == []
    with simulated.ordered("others first"):
        tensor.mul_(2)
        with sim.stream(side):
            host.copy_(tensor, non_blocking=True)
        side.synchronize()
        assert host.eq(6).all(), "another order, in which nothing is missed"


def _faults() -> None:
    sim = torch.get_device_module("sim")
    side, host = sim.Stream(), simulated.pinned(40).view(torch.float32)
    tensor = torch.zeros(10, device="sim")
    sim.synchronize()
    for blunder in (lambda: host.fill_(1), lambda: None):
        with simulated.watch() as seen:
            with sim.stream(side):
                tensor.copy_(host.zero_(), non_blocking=True)
            blunder()
            side.synchronize()
        assert len(seen.faults) == bool(host.sum()), seen
    with simulated.watch() as seen:
        other = torch.zeros(10, device="sim")
        with sim.stream(side):
            tensor.copy_(other)
        del other
    assert any("freed while another stream" in fault for fault in seen.faults)


def _counts() -> None:
    with simulated.watch() as seen:
        tensor = torch.arange(1000, device="sim")
        assert tensor[3].item() == 3
        tensor.cpu()
        del tensor
        kept = simulated.pinned(500)
        again = simulated.pinned(700)
        del again, kept
    assert seen.peak["device"] >= 8000
    assert seen.peak["pinned"] == 1200
    assert seen.blocking["blocking copy"] == 1
    assert seen.blocking["aten::_local_scalar_dense"] == 1
    assert seen.copied == {"to host": 8000}


def _mistaken_for_host_memory() -> None:
    tensor = torch.zeros(10, device="sim")
    with pytest.raises(TypeError, match="numpy"):
        tensor.numpy()
    with pytest.raises(RuntimeError, match=r"same device|expected all tensors"):
        torch.add(tensor, torch.ones(10))
    import ctypes

    ctypes.string_at(tensor.data_ptr(), 4)  # what a careless extension does


@pytest.mark.parametrize("job", [_late, _faults, _counts])
def test_what_it_catches(job) -> None:  # type: ignore[no-untyped-def]
    gloo.run(_installed, 1, job, init=False)


def _installed(job) -> None:  # type: ignore[no-untyped-def]
    simulated.install()
    job()


def test_its_memory_is_not_the_hosts() -> None:
    (end,) = gloo.outcomes(_installed, 1, _mistaken_for_host_memory, init=False)
    assert end.error is None
    assert end.exitcode == -11, "a process that touches it ends"
