"""`pytest --device=sim` (or `cuda`) runs suites with their tensors on a device: see `tests/simulated/everywhere.py`.

Samples of other frameworks are unpacked for each run: see `tests/samples.py`.
"""

from __future__ import annotations

import os

import pytest

from tests import samples


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", help="make the tensors of tests on this device: sim (a simulated one), cuda, xpu, ...")


def pytest_configure(config: pytest.Config) -> None:
    if samples.begin():
        config.add_cleanup(samples.end)
    device = config.getoption("--device")
    if device is not None:  # inherited by the processes that tests start
        os.environ["RESHARD_TESTS_ON_DEVICE"] = os.environ["RESHARD_TEST_DEVICE"] = device
        from tests import simulated
        from tests.simulated import everywhere

        if simulated.AVAILABLE:
            everywhere.enter()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that make no sense on the device, with the reason given for each."""
    device = config.getoption("--device")
    apart = {"host_only": device is not None, "not_simulated": device == "sim"}
    if device is not None:
        from tests import simulated

        if not simulated.AVAILABLE:
            for item in items:
                item.add_marker(pytest.mark.skip(reason=simulated.WHY_NOT))
            return
    for item in items:
        for mark in item.iter_markers():
            if apart.get(mark.name):
                item.add_marker(pytest.mark.skip(reason=mark.kwargs.get("reason") or mark.args[0]))
