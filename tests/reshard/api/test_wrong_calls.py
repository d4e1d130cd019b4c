"""Calls that go wrong where several processes should act as one: refused on all of them, by name, with nothing done."""

from __future__ import annotations

import os
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import reshard
import reshard.elastic
from reshard import fingerprints
from reshard.api.options import DEFAULTS, LoadOptions, SaveOptions
from reshard.errors import KeyMismatchError, ReshardError
from tests import gloo

W = torch.arange(24.0).reshape(6, 4)

SAVE: dict[str, Any] = {
    "select": ["w"],
    "check_replicas": False,
    "fingerprints": False,
    "divide_above_bytes": 123,
    "overwrite": False,
    "base": "auto",
    "ranks_per_file": 2,
}
LOAD: dict[str, Any] = {
    "strict": {"*": "subset"},
    "dtype_policy": "cast",
    "dry_run": True,
    "read_once": True,
}
CONVERT: dict[str, Any] = {"overwrite": True, "resume": False, "format": "dcp", "dtype": "float16"}
TRANSFER: dict[str, Any] = {
    "mapping": {"w": "v"},
    "strict": False,
    "dtype_policy": "cast",
    "check_replicas": False,
    "max_inflight_bytes": 12345,
    "ranks_per_host": 2,
    "delta": True,
}
"""For each option that all ranks must choose alike, another value than where nothing is said."""


def _told(call: Any) -> tuple[str, str]:
    try:
        call()
    except ReshardError as error:
        return type(error).__name__, str(error)
    return "", ""


def _differ(folder: str) -> dict[str, tuple[str, str]]:
    """Every option in turn is another one on rank 1."""
    odd = dist.get_rank() == 1
    w = W.clone()
    reshard.save({"w": W}, f"{folder}/all")
    calls = {
        "save": (lambda more: reshard.save({"w": w}, f"{folder}/bad", **more), SAVE),
        "async_save": (lambda more: reshard.async_save({"w": w}, f"{folder}/bad", **more).result(), SAVE),
        "load": (lambda more: reshard.load({"w": w.zero_()}, f"{folder}/all", **more), LOAD),
        "convert": (lambda more: reshard.convert(f"{folder}/all", f"{folder}/bad", **more), CONVERT),
        "redistribute": (lambda more: reshard.redistribute({"w": W}, {"w": w.zero_()}, **more), TRANSFER),
        "verify_live": (lambda more: reshard.verify_live({"w": W}, {"w": W}, **more), TRANSFER),
    }
    key = fingerprints.Key(b"mine") if odd else fingerprints.Key()
    out = {"fingerprint key": _told(lambda: reshard.fingerprint({"w": W}, key=key))}
    managers = {"every": reshard.Every(steps=1 + odd), "full_every": 1 + odd, "ranks_per_file": 1 + odd}
    for name, value in managers.items():
        more = {"every": reshard.Every(steps=1), name: value}
        out[f"CheckpointManager {name}"] = _told(lambda more=more: reshard.CheckpointManager(f"{folder}/bad", **more))
    for verb, (call, options) in calls.items():
        for name, value in options.items():
            more = {name: value} if odd else {}
            out[f"{verb} {name}"] = _told(lambda call=call, more=more: call(more))
            assert verb not in ("load", "redistribute") or not w.any()
    return out


@pytest.mark.gloo
def test_options_that_differ_between_ranks_are_refused_by_all_before_anything_is_done(tmp_path: Path) -> None:
    zero, one = gloo.run(_differ, 2, str(tmp_path))

    assert zero == one
    for name, (kind, words) in zero.items():
        if name.startswith("convert") and name.split()[1] in ("format", "dtype"):
            assert kind == "CheckpointError", name
            assert "differ in what is to be converted" in words
            continue
        assert kind == "LayoutError", name
        assert f"{name.split()[1]}: " in words
        assert "on rank 0, " in words
        assert words.endswith("on rank 1")
    assert os.listdir(tmp_path) == ["all"]


def _wrong_on_one(folder: str) -> dict[str, tuple[str, str, float]]:
    """Every call in turn is one on rank 1 that cannot be, whatever the others say."""
    odd = dist.get_rank() == 1
    w, model = W.clone(), torch.nn.Linear(2, 2)
    whole = reshard.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    tier = reshard.elastic.Tier(f"{folder}/tier", host=f"host{dist.get_rank()}", timeout=20.0)
    reshard.save({"w": W}, f"{folder}/all")
    calls: dict[str, Any] = {
        "save timeout": lambda: reshard.save({"w": w}, f"{folder}/bad", timeout=-1 if odd else 20.0),
        "load timeout": lambda: reshard.load({"w": w}, f"{folder}/all", timeout="1" if odd else 20.0),
        "save alone": lambda: reshard.save({"w": w}, f"{folder}/bad", alone=odd, process_group=dist.group.WORLD),
        "async_save max": lambda: reshard.async_save({"w": w}, f"{folder}/bad", max_in_flight=0 if odd else 1).result(),
        "async_save text": lambda: reshard.async_save({"w": w}, f"{folder}/bad", max_in_flight="2" if odd else 1),
        "async_save stage": lambda: reshard.async_save({"w": w}, f"{folder}/bad", stage="gpu" if odd else "host"),
        "convert workers": lambda: reshard.convert(f"{folder}/all", f"{folder}/bad", workers=0 if odd else 1),
        "convert format": lambda: reshard.convert(f"{folder}/all", f"{folder}/bad", format="foo" if odd else "dcp"),
        "fingerprint": lambda: reshard.fingerprint(3 if odd else {"w": W}),
        "Tier.save step": lambda: tier.save({"w": w}, -1 if odd else 1),
        "set model": lambda: reshard.set_model_state_dict(3 if odd else model, model.state_dict(), options=whole),
        "dcp.load": lambda: reshard.dcp.load(3 if odd else {"w": w}, checkpoint_id=f"{folder}/all"),
    }
    for verb in (reshard.redistribute, reshard.prepare, reshard.verify_live):
        for name, value in {"dtype_policy": "any", "max_inflight_bytes": 3, "unknown": 1, "views": 3}.items():
            more = {name: value} if odd else {}
            calls[f"{verb.__name__} {name}"] = lambda verb=verb, more=more: verb({"w": W}, {"w": w}, **more)
    out = {}
    for name, call in calls.items():
        began = time.monotonic()
        try:
            call()
            out[name] = ("", "", 0.0)
        except Exception as error:
            out[name] = (type(error).__name__, str(error), time.monotonic() - began)
    reshard.save({"w": w}, f"{folder}/all")  # all are where all are
    return out


@pytest.mark.gloo
def test_a_call_that_cannot_be_on_one_rank_ends_on_all_of_them(tmp_path: Path) -> None:
    zero, one = gloo.run(_wrong_on_one, 2, str(tmp_path))
    for name in zero:
        (kind, words, seconds), (own, cause, _) = zero[name], one[name]
        assert own not in ("", "RankFailedError"), name
        assert kind == "RankFailedError", (name, words)
        assert words.startswith("rank 1 failed in "), name
        assert cause in words, name
        assert seconds < gloo.SOON_S, name
    assert sorted(os.listdir(tmp_path)) == ["all"]


def _names_of(options: Any) -> set[str]:
    return {field.name for field in fields(options)}


@pytest.mark.parametrize(
    ("options", "given", "own"),
    [
        (_names_of(SaveOptions), SAVE, {"memory_budget_bytes", "progress"}),
        (
            _names_of(LoadOptions),
            LOAD,
            {"mapping", "check", "threads", "memory_budget_bytes", "progress", "entry_by_entry", "wording"},
        ),
        (set(DEFAULTS), TRANSFER, {"views", "source_layouts", "target_layouts", "timeout"}),
    ],
)
def test_no_option_is_left_out_of_that(options: set[str], given: dict[str, Any], own: set[str]) -> None:
    assert options == set(given) | own


def _mesh_as_group(folder: str) -> tuple[str, str]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    return _told(lambda: reshard.save({"w": W}, f"{folder}/bad", process_group=mesh))


@pytest.mark.gloo
def test_a_mesh_in_place_of_a_process_group_is_told_its_group(tmp_path: Path) -> None:
    kind, words = gloo.run(_mesh_as_group, 2, str(tmp_path))[0]

    assert kind == "OptionError"
    assert words.startswith("process_group is a DeviceMesh: pass mesh.get_group()")


def _alone(folder: str) -> tuple[str, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    w = distribute_tensor(W.clone(), init_device_mesh("cpu", (2,)), [Shard(0)])
    return _told(lambda: reshard.save({"w": w}, f"{folder}/{dist.get_rank()}", alone=True))


@pytest.mark.gloo
def test_a_shard_saved_alone_is_told_to_save_with_the_others(tmp_path: Path) -> None:
    for kind, words in gloo.run(_alone, 2, str(tmp_path)):
        assert kind == "LayoutError"
        assert "do not cover each full tensor exactly once" in words
        fix = "must save together: leave out alone=True, or pass a process_group with all of them. The tensors on "
        assert words.startswith(f"all ranks that hold a part of a tensor {fix}")
        assert words.endswith(": no rank writes it")
    assert os.listdir(tmp_path) == []


def _to_local(folder: str) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    even, uneven = (distribute_tensor(torch.arange(n), mesh, [Shard(0)]).to_local() for n in (4, 5))
    return [_told(lambda w=w: reshard.save({"w": w}, f"{folder}/c"))[1] for w in (even, uneven)]


@pytest.mark.gloo
def test_shards_without_their_dtensor_are_told_to_pass_the_dtensor(tmp_path: Path) -> None:
    for even, uneven in gloo.run(_to_local, 2, str(tmp_path)):
        assert "values differ between ranks under the same key: 'w' (rank 0 / rank 1)" in even
        assert "as DTensor.to_local() returns them, pass the DTensors themselves" in even
        assert "on rank 0, but (2,) and int64 on rank 1. If it is sharded, pass the DTensor itself" in uneven
    assert os.listdir(tmp_path) == []


def _drifted(folder: str) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh, rank = init_device_mesh("cpu", (2, 2)), dist.get_rank()
    value = torch.full((2, 4), float(rank % 2))

    def sharded(odd: tuple[int, ...]) -> DTensor:
        return DTensor.from_local(value + (rank in odd), mesh, [Replicate(), Shard(0)], run_check=False)

    state = {"w": sharded((2, 3)), "v": sharded((2, 3)), "u": sharded((3,)), "plain": W + (rank == 1), "n": rank // 3}
    return (
        _told(lambda: reshard.save(state, f"{folder}/c"))[1]
        + _told(lambda: reshard.save({"n": rank // 3}, f"{folder}/c"))[1]
    )


@pytest.mark.gloo
def test_replicas_that_differ_are_all_named_with_the_fix_of_their_kind(tmp_path: Path) -> None:
    (words,) = set(gloo.run(_drifted, 4, str(tmp_path)))
    pairs = "'u' differ: rank 1 / rank 3; replicas of 'v', 'w' differ: rank 0 / rank 2, rank 1 / rank 3. Give "
    first, plain, alone = words.partition("values differ")[0], *words.split("values differ between ranks")[1:]
    assert first.startswith(f"replicas of {pairs}all replicas the same initial values: the same seed, or a broadcast ")
    assert "PerRank" not in first
    assert plain.startswith(" under the same key: 'n' (ranks 0-2 / rank 3), 'plain' (ranks 0, 2-3 / rank 1). Wrap ")
    assert "torch.distributed.broadcast" in plain
    assert alone.startswith(" under the same key: 'n' (ranks 0-2 / rank 3). Wrap values that differ on purpose in")
    assert "broadcast" not in alone
    assert os.listdir(tmp_path) == []


def _other_keys(folder: str) -> tuple[str, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    w = distribute_tensor(W.clone(), init_device_mesh("cpu", (2,)), [Shard(0)])
    return _told(lambda: reshard.save({f"w{dist.get_rank()}": w}, f"{folder}/c"))


@pytest.mark.gloo
def test_a_sharded_tensor_under_other_keys_on_other_ranks(tmp_path: Path) -> None:
    first, second = gloo.run(_other_keys, 2, str(tmp_path))
    for (kind, words), key, rank in ((first, "w1", 0), (second, "w0", 1)):
        assert kind == "LayoutError"
        assert f"tensor {key!r} is sharded over ranks that include rank {rank}, which does not have it" in words
    assert os.listdir(tmp_path) == []


CALLS = {
    "save": lambda path, more: reshard.save({"w": W}, f"{path}/new", **more),
    "async_save": lambda path, more: reshard.async_save({"w": W}, f"{path}/new", **more).result(),
    "load": lambda path, more: reshard.load({"w": torch.zeros_like(W)}, f"{path}/old", **more),
    "convert": lambda path, more: reshard.convert(f"{path}/old", f"{path}/new", **more),
}


@pytest.mark.parametrize("verb", CALLS)
def test_one_process_of_a_job_that_was_not_initialised(verb: str, tmp_path: Path, monkeypatch: Any) -> None:
    reshard.save({"w": W}, tmp_path / "old")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ReshardError, match=r"one of 2 processes.*init_process_group.*alone=True"):
        CALLS[verb](tmp_path, {})
    assert os.listdir(tmp_path) == ["old"]
    CALLS[verb](tmp_path, {"alone": True})
    monkeypatch.setenv("WORLD_SIZE", "1")
    CALLS[verb](tmp_path, {} if verb != "convert" else {"overwrite": True})


def test_every_other_verb_of_a_job_that_was_not_initialised(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    for call in (
        lambda: reshard.redistribute({"w": W}, {"w": W.clone()}),
        lambda: reshard.prepare({"w": W}, {"w": W.clone()}),
        lambda: reshard.verify_live({"w": W}, {"w": W.clone()}),
        lambda: reshard.fingerprint({"w": W}),
        lambda: reshard.dcp.save({"w": W}, checkpoint_id=tmp_path / "new"),
        lambda: reshard.dcp.load({"w": W.clone()}, checkpoint_id=tmp_path / "new"),
    ):
        with pytest.raises(ReshardError, match="one of 4 processes"):
            call()
    reshard.dcp.save({"w": W}, checkpoint_id=tmp_path / "new", no_dist=True)


def _misfits(path: str) -> tuple[str, str]:
    rank = dist.get_rank()
    reshard.save({name: W.clone() for name in ("w", "v", "u", "all")}, path)
    target = {"w": torch.zeros_like(W), f"only{rank}": torch.zeros(2)}
    target["v"] = torch.zeros(3) if rank == 2 else torch.zeros_like(W)
    target["more"] = torch.zeros(1)
    if rank in (0, 1):
        target["pair"] = torch.zeros(1)
    return _told(lambda: reshard.load(target, path))


@pytest.mark.gloo
def test_whatever_does_not_fit_on_any_rank_is_named_by_all_of_them(tmp_path: Path) -> None:
    told = gloo.run(_misfits, 3, str(tmp_path / "c"))

    assert {kind for kind, _ in told} == {"KeyMismatchError"}
    for _, words in told:
        lines = [line.strip() for line in words.splitlines()]
        for rank in range(3):
            assert f"only{rank}   (rank {rank})" in lines
        assert "more" in lines  # on all
        assert "pair   (ranks 0-1)" in lines
        assert "v: saved with shape [6, 4], but the target has [3]   (rank 2)" in lines
        assert {"u", "all"} <= set(lines)  # unexpected: no rank wants them
        assert "5 missing from the checkpoint:" in lines


@pytest.mark.parametrize(
    ("saved", "target", "gone"),
    [
        ({"cfg": {"a": 1}}, {"cfg": {"a": 0, "new": 2}}, ("cfg.new",)),
        ({"cfg": {"a": 1}}, {"cfg": {"new": {"deep": 2}}}, ("cfg.new",)),
        ({"cfg": {}}, {"cfg": {5: 2}}, ("cfg.5",)),
        ({"cfg": None}, {"cfg": {"x": 2}}, ("cfg.x",)),
        ({"cfg": [{"a": 1}, 2]}, {"cfg": [{"a": 0, "b": 0}, {"c": 1}]}, ("cfg.0.b", "cfg.1.c")),
        ({"cfg": {"in": {"a": 1}}}, {"cfg": {"in": {"a": 1, "b": 2}}}, ("cfg.in.b",)),
        ({"cfg": {"a": 1, "b": 2}}, {"cfg": {"a": 0}}, ()),
        ({"cfg": [1]}, {"cfg": [0, 0, 0]}, ()),  # a list is one value, of any length
        ({"cfg": {(1, 2): 3}}, {"cfg": {(1, 2): 0, (3, 4): 0}}, ("cfg.(3, 4)",)),
    ],
)
def test_what_a_replaced_container_held_alone_is_listed(
    saved: Any, target: Any, gone: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reshard.save({"w": W, **saved}, tmp_path / "c")

    for dry_run in (True, False):
        assert not caplog.messages
        report = reshard.load({"w": torch.zeros_like(W), **target}, tmp_path / "c", dry_run=dry_run)
        assert report.dropped == gone
        assert report.ok is not bool(gone)
        assert not report.missing
    assert all(name in text for name in gone for text in caplog.messages)
    assert len(caplog.messages) == bool(gone)


def test_a_flag_is_not_a_number(tmp_path: Path) -> None:
    reshard.save({"w": W, "a": 16777217, "b": True, "c": 2.5, "d": 1}, tmp_path / "c")
    state = {"w": torch.zeros_like(W), "a": True, "b": 3, "c": 1, "d": None}
    report = reshard.load(state, tmp_path / "c")
    assert (report.ok, report.changed_classes) == (False, {"a": ("int", "bool"), "b": ("bool", "int")})


def test_an_array_of_another_dtype_is_listed(tmp_path: Path) -> None:
    reshard.save({"w": W, "at": np.arange(6.0)}, tmp_path / "c")

    state = {"w": torch.zeros_like(W), "at": np.zeros(3, np.int8)}
    report = reshard.load(state, tmp_path / "c")

    assert (report.ok, report.changed_classes) == (False, {"at": ("float64", "int8")})
    assert state["at"].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("policy", ["cast", "saved"])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float64])
def test_a_report_lists_only_casts_that_took_place(policy: Any, wanted: torch.dtype, tmp_path: Path) -> None:
    reshard.save({"w": W}, tmp_path / "c")
    target = {"w": torch.zeros(6, 4, dtype=wanted)}

    report = reshard.load(target, tmp_path / "c", dtype_policy=policy)

    told = report.cast if policy == "cast" else report.replaced
    assert dict(told) == ({} if wanted == W.dtype else {"w": ("float32", str(wanted).removeprefix("torch."))})
    assert not (report.replaced if policy == "cast" else report.cast)
    assert torch.equal(target["w"].float(), W)
    assert target["w"].dtype == (wanted if policy == "cast" else W.dtype)


def test_names_with_control_characters_are_shown_as_they_are_written(tmp_path):
    reshard.save({"a\x1b[2J\nb": torch.ones(2)}, tmp_path / "odd")

    with pytest.raises(KeyMismatchError, match=r"unexpected(.|\n)*\n    a\\x1b\[2J\\nb\n"):
        reshard.load({"b": torch.ones(2)}, tmp_path / "odd")
