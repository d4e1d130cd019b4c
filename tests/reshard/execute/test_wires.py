"""From which kinds of device a process group sends, by what torch says of its backends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from reshard.execute.messages import wires


@pytest.mark.parametrize(
    ("config", "here", "kinds"),
    [
        ("cpu:gloo,cuda:gloo", ["cuda"], ["cpu"]),  # gloo sends from the host, whatever it is registered for
        ("cpu:gloo,cuda:nccl", ["cuda"], ["cpu", "cuda"]),
        ("cpu:gloo,cuda:nccl", [], ["cpu"]),
        ("cuda:nccl", ["cuda"], ["cuda"]),
        ("cpu:gloo,xpu:xccl", ["xpu"], ["cpu", "xpu"]),
        ("hpu:hccl", ["hpu"], ["hpu"]),
        ("gloo", [], ["cpu"]),
        ("cpu:mpi", [], ["cpu"]),
    ],
)
def test_kinds_that_are_sent_from(
    config: str, here: list[str], kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def module(kind: str) -> SimpleNamespace:
        if kind not in ("cuda", "xpu", *here):
            raise RuntimeError(f"no module of {kind}")
        return SimpleNamespace(is_available=lambda: kind in here)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(torch, "get_device_module", module)
    assert wires.sending_kinds(None) == kinds
