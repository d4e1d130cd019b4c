"""`RayExecutor` on a stand-in of Ray: what its futures do before any task ends. A cluster is in `api.test_engines`."""

from __future__ import annotations

import importlib.util
import sys
from concurrent.futures import Future, as_completed, wait
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import reshard


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An executor whose tasks never end."""
    call = SimpleNamespace(remote=lambda *_: SimpleNamespace(future=Future))
    call.options = lambda **_: call
    stand_in: Any = ModuleType("ray")
    stand_in.is_initialized, stand_in.remote, stand_in.cancel = lambda: True, lambda _: call, lambda _: None
    strategies: Any = ModuleType("ray.util.scheduling_strategies")
    strategies.NodeAffinitySchedulingStrategy = None
    for module in (stand_in, ModuleType("ray.util"), strategies):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    file = Path(reshard.__file__).parent / "integrations" / "ray.py"
    spec = importlib.util.spec_from_file_location("executor_on_a_stand_in", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.RayExecutor()


def test_who_waits_hears_of_a_cancelled_call(executor: Any) -> None:
    future = executor.submit(print)
    assert not wait([future], timeout=0).done

    assert future.cancel()
    assert future.cancel(), "a second time"
    assert wait([future], timeout=0).done == {future}
    assert list(as_completed([future], timeout=0)) == [future]


def test_a_shutdown_that_cancels_ends(executor: Any) -> None:
    future = executor.submit(print)
    executor.shutdown(cancel_futures=True)
    assert future.cancelled()
