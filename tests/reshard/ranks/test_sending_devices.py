"""From which kinds of device a process group sends, by what torch says of its backends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from reshard.ranks import group


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
    assert group.sending_kinds(None) == kinds


def test_a_process_sends_from_where_its_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from the current device, which all ranks have in common where nobody has set it."""
    monkeypatch.setattr(torch, "get_device_module", lambda kind: SimpleNamespace(current_device=lambda: 0))
    held = [
        SimpleNamespace(device=torch.device(name), nbytes=n) for name, n in (("cuda:1", 3), ("cuda:2", 9), ("cpu", 99))
    ]
    assert group.device_of_kind("cuda", held) == torch.device("cuda:2")  # type: ignore[arg-type]
    assert group.device_of_kind("cuda", held[2:]) == torch.device("cuda:0")  # type: ignore[arg-type]
    assert group.device_of_kind("cpu", held) == torch.device("cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "where"), [("cuda:nccl", "cuda:0"), ("cpu:gloo,cuda:nccl", "cpu"), ("cpu:gloo,cuda:gloo", "cpu")]
)
def test_what_lies_on_the_host_goes_by_a_device_where_there_is_only_nccl(
    config: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(is_available=lambda: True, current_device=lambda: 0)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    assert group.sending_device(torch.device("cpu"), None) == torch.device(where)
    assert group.sending_device(torch.device("cuda:3"), None) == torch.device("cuda:3")
