"""The troubleshooting page quotes errors exactly: each is provoked here."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import reshard
from reshard.execute.exchange import Exchange
from tests import gloo
from tests.test_readme import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"^```text\n(.*?)\n```", PAGE, re.MULTILINE | re.DOTALL)
STATE = {"model": {"w": torch.arange(12.0).reshape(4, 3), "b": torch.zeros(3)}, "step": 7}


class Other:
    """Not plain data."""


def _is_quoted(error: Exception) -> str:
    """Return the matching quote. `…` stands for any text."""
    text = f"{type(error).__name__}: {error}"
    patterns = {quote: re.escape(quote).replace("…", ".*") for quote in QUOTED}
    fitting = [quote for quote, pattern in patterns.items() if re.fullmatch(pattern, text, re.DOTALL)]
    assert fitting, f"docs/troubleshooting.md quotes no such error: {text}"
    return fitting[0]


def _target(**other: torch.Tensor) -> dict[str, object]:
    return {"model": {"w": torch.zeros(4, 3), "b": torch.zeros(3)} | other, "step": 0}


def _incomplete() -> None:
    shutil.copytree("run/step-7", "run/step-8")
    Path("run/step-8/manifest.json").unlink()
    [data] = Path("run/step-8").glob("data-*")
    (data / "claim.json").write_text("{}")
    reshard.open("run/step-8")


def _lost() -> None:
    shutil.copytree("run/step-7", "run/step-9", ignore=shutil.ignore_patterns("manifest.json"))
    try:
        reshard.open("run/step-9")
    finally:
        shutil.rmtree("run/step-9")


def _changed() -> None:
    shutil.copytree("run/step-7", "run/step-6")
    [file] = Path("run/step-6").rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    reshard.load(_target(), "run/step-6")


def _function() -> None:
    torch.save({"a": os.system}, "other.pt")
    reshard.open("other.pt")


def _numbered() -> None:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "old.pt")
    reshard.open("old.pt").normalized()


def _names_wanted() -> None:
    model = nn.Linear(3, 4)
    model_state, optim_state = reshard.get_state_dict(model, torch.optim.AdamW(model.parameters()))
    reshard.load({"model": model_state, "optimizer": optim_state}, "old.pt")


def _renamed() -> None:
    reshard.load({"model": {"w": torch.zeros(4, 3), "c": torch.zeros(3)}, "step": 0}, "run/step-7")


def _unjoined() -> None:
    os.environ["WORLD_SIZE"] = "4"
    try:
        reshard.save(STATE, "run/step-9")
    finally:
        del os.environ["WORLD_SIZE"]


PROVOKE: list[Callable[[], object]] = [
    lambda: reshard.open("run/step-9"),
    _incomplete,
    _lost,
    _changed,
    _function,
    _renamed,
    lambda: reshard.load(_target(w=torch.zeros(5, 3)), "run/step-7"),
    lambda: reshard.load(_target(w=torch.zeros(4, 3, dtype=torch.bfloat16)), "run/step-7"),
    _numbered,
    _names_wanted,
    lambda: reshard.save(nn.Linear(2, 2), "run/step-9"),  # type: ignore[arg-type]
    lambda: reshard.save({"x": Other()}, "run/step-9"),
    _unjoined,
]


def test_every_quoted_error_is_what_a_user_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    reshard.save(STATE, "run/step-7")
    seen = []
    for provoke in PROVOKE:
        with pytest.raises(reshard.ReshardError) as caught:
            provoke()
        seen.append(_is_quoted(caught.value))

    assert len(set(seen)) == len(PROVOKE) == 13
    others = [quote.partition(":")[0] for quote in QUOTED if quote not in seen]
    assert others == [
        "ReplicaDriftError",
        "LayoutError",
        "LayoutError",
        "LayoutError",
        "RankFailedError",
        "DeadlineError",
        "ReplicaDriftError",
        "UndefinedTargetsError",
        "ImportError",
    ]


def test_so_is_the_error_of_an_import(tmp_path: Path) -> None:
    (tmp_path / "planners.py").touch()
    (tmp_path / "script.py").write_text("import reshard\n")
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    _is_quoted(ImportError(done.stderr.splitlines()[-1].removeprefix("ImportError: ")))


def _on_ranks(folder: str) -> None:
    rank = dist.get_rank()
    with pytest.raises(reshard.ReshardError) as caught:
        reshard.save({"seed": rank}, f"{folder}/a")
    assert "values differ" in _is_quoted(caught.value)
    assert isinstance(caught.value, reshard.errors.ReplicaDriftError)
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), reshard.errors.KeyMismatchError), "as in 0.1.0"
    with pytest.raises(reshard.ReshardError) as caught:
        reshard.save({"x": Other() if rank else 1}, f"{folder}/b")
    assert rank == 1 or _is_quoted(caught.value).startswith("RankFailedError")
    if rank == 1:
        time.sleep(1.2)
        return
    with pytest.raises(reshard.ReshardError) as caught:
        reshard.save({"x": 1}, f"{folder}/c", timeout=0.5)
    assert _is_quoted(caught.value).startswith("DeadlineError")


def _on_ranks_that_disagree(folder: str) -> list[str]:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    w = distribute_tensor(torch.arange(12.0).reshape(3, 4), mesh, [Shard(0)])
    own = {"model": {"w": torch.full((2, 2), float(rank))}}
    to = distribute_tensor(torch.zeros(3, 4), mesh, [Shard(1)])
    prepared = reshard.prepare({"w": w}, {"w": to})
    provoke: list[Callable[[], object]] = [
        lambda: reshard.save({"model": {"w": w.to_local()}}, f"{folder}/a"),
        lambda: reshard.save({"model": {"w": w}}, f"{folder}/b{rank}", alone=True),
        lambda: reshard.save({"model": {"w": w}}, f"{folder}/c", fingerprints=rank == 0),
        lambda: reshard.fingerprint(own),
        prepared.run,
    ]
    failing = mock.patch.object(Exchange, "move", side_effect=OSError("the network is down")) if rank else nullcontext()
    seen = []
    with failing:
        for one in provoke:
            with pytest.raises(reshard.ReshardError) as caught:
                one()
            seen.append(_is_quoted(caught.value).partition(":")[0])
    return seen


@pytest.mark.gloo
def test_so_are_the_errors_of_several_ranks(tmp_path: Path) -> None:
    gloo.run(_on_ranks, 2, str(tmp_path))
    wanted = ["LayoutError", "LayoutError", "LayoutError", "ReplicaDriftError", "UndefinedTargetsError"]
    assert gloo.run(_on_ranks_that_disagree, 2, str(tmp_path)) == [wanted] * 2
