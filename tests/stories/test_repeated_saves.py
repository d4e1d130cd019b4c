"""Saves one after another: what is alike is planned once, and whatever differs, on whichever rank, is planned anew."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import reshard
from reshard.api import save as repeated, save as saving
from reshard.errors import CheckpointExistsError, LayoutError, RankFailedError, ReplicaDriftError, ReshardError
from reshard.live import copy_streams
from reshard.ranks.group import Group
from tests import gloo
from tests.states import sharded_and_own_of

WORLD_SIZE = 3


class Counted:
    """How often this process planned a save, and how many rounds it took part in during calls."""

    def __init__(self) -> None:
        self.planned = self.rounds = 0
        plan, take = saving.SavePlan, Group.merge

        def planning(*args: Any, **options: Any) -> Any:
            self.planned += 1
            return plan(*args, **options)

        def round_(group: Group, *args: Any, **options: Any) -> Any:
            self.rounds += threading.current_thread() is threading.main_thread()
            return take(group, *args, **options)

        saving.SavePlan, Group.merge = planning, round_  # type: ignore[assignment,method-assign,misc]


def in_a_row(folder: str, verb: str) -> list[tuple[int, int]]:
    """By save: how often it was planned, and the rounds of the call."""
    counted, out = Counted(), []
    for step in range(3):
        counted.planned = counted.rounds = 0
        held = sharded_and_own_of(step)
        if verb == "save":
            reshard.save(held, f"{folder}/{step}")
        else:
            pending = reshard.async_save(held, f"{folder}/{step}")
            for value in held.values():
                if isinstance(value, torch.Tensor):
                    value.mul_(-1)
            pending.result(60.0)
        out.append((counted.planned, counted.rounds))
    return out


@pytest.mark.gloo
@pytest.mark.parametrize("verb", ["save", "async_save"])
def test_a_state_like_the_one_before_is_planned_once(verb, tmp_path):
    for counts in gloo.run(in_a_row, WORLD_SIZE, str(tmp_path), verb):
        assert [planned for planned, _ in counts] == [1, 0, 0]
        again = {"save": 7, "async_save": 3}[verb]  # of which two are for objects that not all ranks have
        assert [rounds for _, rounds in counts[1:]] == [again, again]
        assert counts[0][1] > again
    for step in range(3):
        saved = reshard.open(tmp_path / str(step))
        for rank in range(WORLD_SIZE):
            rows = torch.arange(8.0).reshape(2, 4) + 100.0 * rank + step
            assert torch.equal(torch.as_tensor(saved["rows"][2 * rank : 2 * rank + 2]), rows)
            assert (saved[f"own{rank}"][...] == 10 * step + rank).all()
            assert saved.objects[f"note{rank}"] == f"{rank} at {step}"
        assert (saved["all"][...] == step).all()
        assert saved.objects["step"] == step
        assert reshard.verify(tmp_path / str(step)).ok


def changed(how: str, step: int) -> dict[str, Any]:
    """What one rank, or all of them, have from the second save on that was not so before."""
    out, rank = sharded_and_own_of(step), dist.get_rank()
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    if how == "a key of one rank" and rank == 1:
        out["new"] = torch.full((2,), float(step))
    elif how == "a key less on one rank" and rank == 1:
        del out["own1"]
    elif how == "a dtype on one rank" and rank == 1:
        out["own1"] = out["own1"].double()
    elif how == "a shape on one rank" and rank == 1:
        out["own1"] = torch.full((4,), float(step))
    elif how == "an object for a tensor on one rank" and rank == 1:
        out["own1"] = 7
    elif how == "two tensors of one rank tied" and rank == 1:
        out["own1b"] = out["own1"]
    elif how == "another place on all":
        out["rows"] = DTensor.from_local(torch.full((6, 4), float(step)), mesh, [Replicate()], run_check=False)
    return out


def then_changed(folder: str, how: str) -> list[int]:
    """How often the saves are planned: of the same state, of the changed one, and of the first one again."""
    counted, out = Counted(), []
    for step, held in enumerate((sharded_and_own_of(0), changed(how, 1), changed(how, 2), sharded_and_own_of(3))):
        counted.planned = 0
        reshard.async_save(held, f"{folder}/{step}").result(60.0)
        out.append(counted.planned)
    return out


@pytest.mark.gloo
@pytest.mark.parametrize(
    "how",
    [
        "a key of one rank",
        "a key less on one rank",
        "a dtype on one rank",
        "a shape on one rank",
        "an object for a tensor on one rank",
        "two tensors of one rank tied",
        "another place on all",
    ],
)
def test_what_differs_on_any_rank_is_planned_anew_by_all(how, tmp_path):
    for planned in gloo.run(then_changed, WORLD_SIZE, str(tmp_path), how):
        assert planned[:3] == [1, 1, 0]
    before, after = reshard.open(tmp_path / "0"), reshard.open(tmp_path / "2")
    assert {"own1", "step"} <= {*before, *before.objects}
    expected = {
        "a key of one rank": lambda: (after["new"][...] == 2).all(),
        "a key less on one rank": lambda: "own1" not in after,
        "a dtype on one rank": lambda: after["own1"][...].dtype == torch.float64 and (after["own1"][...] == 21).all(),
        "a shape on one rank": lambda: after["own1"].shape == (4,) and (after["own1"][...] == 2).all(),
        "an object for a tensor on one rank": lambda: after.objects["own1"] == 7 and "own1" not in [*after],
        "two tensors of one rank tied": lambda: after.aliases == {"own1b": "own1"},
        "another place on all": lambda: after["rows"].shape == (6, 4) and (after["rows"][...] == 2).all(),
    }
    assert expected[how]()
    last = reshard.open(tmp_path / "3")
    assert (last["own1"][...] == 31).all()
    assert all(reshard.verify(tmp_path / str(step)).ok for step in range(4))


def refused(folder: str, how: str) -> tuple[type, str, bool]:
    """The error of a second save, and whether the ranks can save after it."""
    rank = dist.get_rank()
    reshard.async_save(sharded_and_own_of(0), f"{folder}/0").result(60.0)
    held, options, path = sharded_and_own_of(1), {}, f"{folder}/1"
    if how == "replicas":
        held["all"] = held["all"] + (rank == 2)
    elif how == "objects":
        held["step"] = 1 + (rank == 2)
    elif how == "options":
        options = {"fingerprints": rank != 2}
    elif how == "there already":
        options, path = {"overwrite": False}, f"{folder}/0"
    elif how == "staging" and rank == 2:

        def fail(*args: Any, **options: Any) -> Any:
            raise MemoryError("no room")

        saving.staged = fail  # type: ignore[assignment]
    with pytest.raises((ReshardError, MemoryError)) as caught:
        reshard.async_save(held, path, **options)
    if how == "staging":
        return type(caught.value), str(caught.value), True
    reshard.async_save(sharded_and_own_of(2), f"{folder}/2").result(60.0)
    return type(caught.value), str(caught.value), reshard.open(f"{folder}/2").objects["step"] == 2


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("how", "kinds", "words"),
    [
        ("replicas", [ReplicaDriftError] * 3, "'all'"),
        ("objects", [ReplicaDriftError] * 3, "'step'"),
        ("options", [LayoutError] * 3, "fingerprints: True on ranks 0-1, False on rank 2"),
        ("there already", [CheckpointExistsError, RankFailedError, RankFailedError], "already contains a checkpoint"),
        ("staging", [RankFailedError, RankFailedError, MemoryError], "no room"),
    ],
)
def test_what_is_refused_is_refused_by_the_call_on_all_ranks(how, kinds, words, tmp_path):
    ends = gloo.run(refused, WORLD_SIZE, str(tmp_path), how)
    assert [kind for kind, _, _ in ends] == kinds
    assert all(words in text and saves_again for _, text, saves_again in ends)
    assert not (tmp_path / "1").exists() or not list((tmp_path / "1").iterdir())


def test_few_plans_are_kept_and_no_tensor_with_them(tmp_path):
    repeated._kept.clear()
    held = {"w": torch.ones(1000), "step": "a text of its own"}
    alive = weakref.ref(held["w"])
    reshard.save(held, tmp_path / "a")
    (kept,) = repeated._kept.values()
    assert kept.census.objects == {}
    del held
    gc.collect()
    assert alive() is None
    for size in range(2, 3 * repeated.KEPT):
        reshard.save({"w": torch.ones(size)}, tmp_path / "a")
    assert len(repeated._kept) == repeated.KEPT
    newest = [kept.census.tensors["w"].spec.shape[0] for kept in repeated._kept.values()]
    assert newest == list(range(2 * repeated.KEPT, 3 * repeated.KEPT))


def test_another_choice_of_keys_or_of_cuts_is_planned_anew(tmp_path):
    repeated._kept.clear()
    held = {"a": torch.ones(8), "b": torch.zeros(8)}
    for options in ({}, {"select": ["a"]}, {"select": ["*"]}, {"divide_above_bytes": 8}):
        reshard.save(held, tmp_path / "a", **options)
    assert len(repeated._kept) == 4
    assert {*reshard.open(tmp_path / "a")} == {"a", "b"}


def test_memory_of_copies_that_were_not_wanted_goes_back_once(tmp_path, monkeypatch):
    held = {"w": torch.ones(1 << 16)}
    reshard.async_save(held, tmp_path / "a").result()
    given: list[Any] = []
    give = copy_streams.HostMemory.give
    monkeypatch.setattr(
        copy_streams.HostMemory, "give", lambda self, blocks: (given.append(blocks), give(self, blocks))
    )
    meet = repeated.agree_before_save

    def another_has_none(holdings: Any, group: Any, options: Any, kept: Any, first: bytes, *, before: Any) -> Any:
        return meet(holdings, group, options, kept if before is not None else None, first, before=before)

    monkeypatch.setattr(repeated, "agree_before_save", another_has_none)
    reshard.async_save({"w": torch.full((1 << 16,), 2.0)}, Path(tmp_path, "b")).result()
    assert (reshard.open(tmp_path / "b")["w"][...] == 2).all()
    assert len(given) == 4  # of the device's and of the host's memory, those not wanted and those written
    assert len({id(blocks) for blocks in given}) == 4
