"""What is recorded, and what must hold of whatever is found after the power was lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import reshard
from planners import Mesh, Replicate, Shard, TensorLayout, TensorSpec
from reshard.errors import CheckpointNotFoundError, ReshardError, StorageError
from reshard.native import commit
from reshard.ranks import liveness
from reshard.storage import open_storage
from tests.faulty import Crash, SystemCalls
from tests.simulated_hosts import Job, cut, global_of
from tests.states import in_files_of

__all__ = ["SCENARIOS", "Scenario", "Violation"]


class Violation(AssertionError):
    """What was found is neither the old nor the new."""


@dataclass(frozen=True)
class Scenario:
    """A call that is recorded."""

    begin: Callable[[Path], Any]
    """Makes what is there before, which is durable."""
    run: Callable[[Path], Any]
    """What is recorded."""
    check: Callable[[Path, bool, bool], str]
    """Raises Violation; otherwise tells which is found. The call had returned; days later."""


@contextmanager
def started_anew(forgets: bool = False) -> Iterator[None]:
    """The machine was: no process of before can be seen, nor one that it was. `forgets`: and that was days ago."""
    with (
        mock.patch.object(liveness, "machine", return_value="started anew"),
        mock.patch.multiple(liveness, WATCH_S=0.02, BEAT_S=0.02),
        mock.patch.object(liveness, "_FOREIGN_AGE_S", 0.0 if forgets else liveness._FOREIGN_AGE_S),
        mock.patch.object(commit, "CLAIMING_S", 0.0 if forgets else commit.CLAIMING_S),
    ):
        yield


def state_of(step: int) -> dict[str, Any]:
    """What every save has, larger than some sectors, and what says which save it is of."""
    of_it = {"w": torch.full((37, 5), float(step)), "v": torch.full((300,), float(step)), "b": torch.full((3,), step)}
    return {"frozen": torch.arange(400.0), **of_it, "n": step}


def step_of(path: Any) -> int:
    """The one save that all of a checkpoint is of."""
    target = state_of(-1)
    reshard.load(target, path)
    step = int(target["w"][0, 0])
    want = state_of(step)
    for key, value in target.items():
        equal = torch.equal(value, want[key]) if isinstance(value, torch.Tensor) else value == want[key]
        if not equal:
            raise Violation(f"{key} is not of save {step}")
    return step


def whole_at(path: Any) -> int | None:
    """The checkpoint at a path, by each verb that could tell of it; None where all say that there is none."""
    verbs = {
        "open": lambda: reshard.open(path)["w"][0, 0].item(),
        "load": lambda: step_of(path),
        "verify": lambda: _verified(path),
    }
    found = {}
    for name, verb in verbs.items():
        try:
            found[name] = verb()
        except CheckpointNotFoundError:
            found[name] = None
        except ReshardError as error:
            raise Violation(f"{name}: {type(error).__name__}: {error}") from error
        except Exception as error:
            raise Violation(f"{name} ends with an error that is not ours: {error!r}") from error
    if found["verify"] is not None:
        found["verify"] = found["load"]
    if len(set(found.values())) > 1:
        raise Violation(f"verbs disagree: {found}")
    return None if found["load"] is None else int(found["load"])


def _verified(path: Any) -> bool:
    report = reshard.verify(path)
    if not report.ok:
        raise Violation(f"verify: {report}")
    return True


def same(found: object, *allowed: object) -> None:
    """Raises Violation."""
    if found not in allowed:
        raise Violation(f"found {found}, wanted {' or '.join(map(str, allowed))}")


def latest(folder: Path) -> int | None:
    """The newest, as `latest_complete` tells it."""
    path = reshard.latest_complete(folder)
    return None if path is None else step_of(path)


NEXT = 9


def next_save(path: Path, days_later: bool) -> None:
    """The next save into the same place is whole, at once and later, when nothing of others is left."""
    if not days_later:
        reshard.save(state_of(NEXT), path)
        same(step_of(path), NEXT)
        return
    with started_anew(forgets=True):
        reshard.save(state_of(NEXT), path)
        same(whole_at(path), NEXT)
        folders = [place.name for place in path.iterdir() if place.name.startswith("data-")]
        same(len(folders), 1)
        left = [file for file in path.iterdir() if file.is_file() and file.name not in ("manifest.json", INDEX)]
        same(left, [])


INDEX = "model.safetensors.index.json"


def saves(old: int | None, new: int, **options: Any) -> Scenario:
    """A save over an older one, or nothing."""

    def begin(folder: Path) -> None:
        if old is not None:
            reshard.save(state_of(old), folder / "c")

    def check(folder: Path, done: bool, days_later: bool) -> str:
        found = whole_at(folder / "c")
        same(found, new, *(() if done else (old,)))
        same(latest(folder), found)
        next_save(folder / "c", days_later)
        return str(found)

    return Scenario(begin, lambda folder: reshard.save(state_of(new), folder / "c", **options), check)


def incremental() -> Scenario:
    """A save beside the one that it is based on, which is then removed."""

    def begin(folder: Path) -> None:
        reshard.save(state_of(1), folder / "step-1", base="auto")

    def check(folder: Path, done: bool, days_later: bool) -> str:
        same(whole_at(folder / "step-1"), 1)
        found = whole_at(folder / "step-2")
        same(found, 2, *(() if done else (None,)))
        same(latest(folder), found or 1)
        reshard.save(state_of(3), folder / "step-2", base="auto")
        same(whole_at(folder / "step-2"), 3)
        shutil.rmtree(folder / "step-1")
        same(whole_at(folder / "step-2"), 3)
        return str(found)

    return Scenario(begin, lambda folder: reshard.save(state_of(2), folder / "step-2", base="auto"), check)


def pruned() -> Scenario:
    """All but the last are removed."""

    def begin(folder: Path) -> None:
        for step in (1, 2, 3):
            reshard.save(state_of(step), folder / f"step-{step}", base="auto" if step == 2 else None)

    def check(folder: Path, done: bool, days_later: bool) -> str:
        same(whole_at(folder / "step-3"), 3)
        same(latest(folder), 3)
        left = []
        for step in (1, 2):
            if whole_at(folder / f"step-{step}") == step:
                left.append(step)
        with started_anew(forgets=True):
            reshard.prune(folder, keep_last=1)
            same(sorted(path.name for path in folder.iterdir() if any(path.iterdir())), ["step-3"])
            same(whole_at(folder / "step-3"), 3)
        return str(left)

    return Scenario(begin, lambda folder: reshard.prune(folder, keep_last=1), check)


def plain(step: int) -> Any:
    """Some of what every save has."""
    return {name: value for name, value in state_of(step).items() if name in ("w", "v", "b")}


def in_sections(step: int) -> Any:
    """The same in two sections."""
    return {"one": {"w": state_of(step)["w"], "b": state_of(step)["b"]}, "two": {"v": state_of(step)["v"]}}


def with_optimizer(step: int, counted: float = 7.0) -> Any:
    """A model, its masters, and the states of its optimizer, all of one step, which need not be the `counted` one."""
    model = {f"decoder.layers.{n}.mlp.linear_fc{n + 1}.weight": torch.full((6, 8), float(step)) for n in range(2)}
    states = {
        name: {"step": torch.tensor(counted), "exp_avg": value * 0.5, "exp_avg_sq": value * 2}
        for name, value in model.items()
    }
    return {"model": model, "optim": {"state": states, "param_groups": [{"lr": 0.1, "params": [*model]}]}, "epoch": 3}


def converted(
    format: str,
    target: str,
    old: int | None,
    *,
    is_atomic: bool = True,
    state: Callable[[int], Any] = plain,
) -> Scenario:
    """A conversion into another format, over an older one, or nothing. Of several files whose names the format decides
    there is no moment at which all become new: these are refused meanwhile, and the same call goes on."""
    wanted: dict[int, dict[str, Any]] = {}

    def convert(folder: Path, source: int, target: str = target) -> None:
        options = in_files_of(1000, format)
        reshard.convert(folder / f"source-{source}", folder / target, format=format, overwrite=True, **options)

    def begin(folder: Path) -> None:
        for step in (1, 2, NEXT):
            reshard.save(state(step), folder / f"source-{step}")
            convert(folder, step, f"wanted/{target}")
            wanted[step] = read(folder / "wanted" / target)
        shutil.rmtree(folder / "wanted")
        if old is not None:
            convert(folder, old)

    def read(path: Path) -> dict[str, Any]:
        opened = reshard.open(path)
        return {name.removeprefix("model."): opened[name][...] for name in opened}

    def found_in(folder: Path) -> int | None:
        try:
            values = read(folder / target)
        except CheckpointNotFoundError:
            return None
        except ReshardError as error:
            if old is None or not is_atomic:
                return None
            raise Violation(f"open: {type(error).__name__}: {error}") from error
        for step, those in wanted.items():
            if values.keys() == those.keys() and all(equal(values[name], those[name]) for name in those):
                _verified(folder / target)
                return step
        raise Violation(f"what is found is of no conversion: {values}")

    def check(folder: Path, done: bool, days_later: bool) -> str:
        found = found_in(folder)
        same(found, 2, *(() if done else (old,) if is_atomic else (old, None)))
        source = NEXT if days_later else 2
        with started_anew(forgets=days_later):
            convert(folder, source)
            same(found_in(folder), source)
        left = [path.name for path in folder.iterdir() if path.name.startswith("convert-")]
        same(left, [])
        return str(found)

    return Scenario(begin, lambda folder: convert(folder, 2), check)


def equal(value: Any, other: Any) -> bool:
    """Tensors by their elements."""
    return bool((value == other).all()) if isinstance(value, torch.Tensor) else bool(value == other)


HOSTS = ["a", "a", "b"]
SPECS = [TensorSpec("t", (6, 50), "float32"), TensorSpec("u", (130,), "int64")]


def kept() -> Scenario:
    """A generation in the folders of two hosts on disks, of which one is lost."""
    mesh = Mesh({"dp": len(HOSTS)})
    layouts = {spec.fqn: TensorLayout(spec, mesh, [Shard(0)]) for spec in SPECS}

    def values(step: int) -> dict[str, torch.Tensor]:
        return {spec.fqn: torch.full(spec.shape, step, dtype=getattr(torch, spec.dtype)) for spec in SPECS}

    def keep(folder: Path, step: int) -> None:
        ends = Job(folder, HOSTS).run(
            lambda rank, tier: tier.save({f: cut(values(step)[f], layouts[f], rank) for f in layouts}, step)
        )
        for end in ends:
            if isinstance(end, BaseException):
                raise end

    def recovered(folder: Path, hosts: list[str]) -> int | None:
        whole = {spec.fqn: TensorLayout(spec, Mesh({"dp": len(hosts)}), [Replicate()]) for spec in SPECS}
        got: dict[int, Any] = {}

        def again(rank: int, tier: Any) -> Any:
            got[rank] = {f: cut(values(-1)[f], whole[f], rank) for f in whole}
            return tier.restore(got[rank])

        ends = Job(folder, hosts, copies=0).run(again)
        if all(isinstance(end, CheckpointNotFoundError) for end in ends):
            return None
        for end in ends:
            if isinstance(end, BaseException):
                raise Violation(f"recover: {type(end).__name__}: {end}") from end
        (step,) = {end.step for end in ends}
        for f, value in values(step).items():
            same((f, torch.equal(global_of({r: s[f] for r, s in got.items()}, value), value)), (f, True))
        return int(step)

    def check(folder: Path, done: bool, days_later: bool) -> str:
        found = []
        for hosts in (["a", "b"], ["a"], ["b"]):
            copy = folder.with_name(f"{folder.name}-{''.join(hosts)}")
            shutil.copytree(folder, copy)
            for host in {"a", "b"} - set(hosts):
                shutil.rmtree(copy / host, ignore_errors=True)
            try:
                found.append(recovered(copy, hosts))
                same(found[-1], 2, *(() if done else (1,)))
                if len(hosts) == 2:
                    keep(copy, 3)
                    same(recovered(copy, hosts), 3)
            finally:
                shutil.rmtree(copy)
        return str(found)

    return Scenario(lambda folder: keep(folder, 1), lambda folder: keep(folder, 2), check)


def after_a_kill(at: int) -> Scenario:
    """A save whose process was killed there, and then the same anew."""
    again = saves(1, 2)

    def run(folder: Path) -> None:
        with SystemCalls().crashing(at), suppress(Crash):
            reshard.save(state_of(5), folder / "c")
        again.run(folder)

    def check(folder: Path, done: bool, days_later: bool) -> str:
        found = whole_at(folder / "c")
        same(found, 2, *(() if done else (1, 5)))
        next_save(folder / "c", days_later)
        return str(found)

    return Scenario(again.begin, run, check)


def after_an_error(at: int) -> Scenario:
    """A save that ends with an error there, before it counts, and removes what it has written."""

    def run(folder: Path) -> None:
        with SystemCalls().failing(at):
            try:
                reshard.save(state_of(1), folder / "c")
            except StorageError:
                return
        raise AssertionError(f"call {at} comes after the save")

    def check(folder: Path, done: bool, days_later: bool) -> str:
        same(whole_at(folder / "c"), None)
        same(latest(folder), None)
        next_save(folder / "c", days_later)
        return "None"

    return Scenario(lambda folder: None, run, check)


def stored() -> Scenario:
    """What a storage says of each of its verbs: durable when it returns."""

    def run(folder: Path) -> None:
        storage = open_storage(folder)
        storage.link("old/a", "new/b")
        storage.retract("old/c")
        os.unlink(folder / "other" / "d")  # by another process
        storage.retract("other/d")

    def check(folder: Path, done: bool, days_later: bool) -> str:
        found = open_storage(folder).list()
        if done:
            same(sorted(found), ["new/a", "new/b", "old/a"])
        return str(sorted(found))

    def begin(folder: Path) -> None:
        for name in ("new/a", "old/a", "old/c", "other/d"):
            open_storage(folder).publish(name, b"x")

    return Scenario(begin, run, check)


SCENARIOS: dict[str, Scenario] = {
    "storage": stored(),
    "save": saves(None, 2),
    "save over": saves(1, 2),
    "save on a base": incremental(),
    "save on itself": saves(1, 2, base="auto"),
    "save after a kill": after_a_kill(14),
    "save with an error": after_an_error(18),
    "prune": pruned(),
    "convert to native": converted("native", "out", 1),
    "convert to safetensors": converted("safetensors", "out", None),
    "convert over safetensors": converted("safetensors", "out", 1, is_atomic=False),
    "convert to dcp": converted("dcp", "out", 1),
    "convert to torch_save": converted("torch_save", "out.pt", 1),
    "convert to torch_checkpointing": converted("torch_checkpointing", "out", 1, is_atomic=False),
    "convert sections": converted("torch_checkpointing", "out", 1, is_atomic=False, state=in_sections),
    "convert to deepspeed": converted("deepspeed", "out", 1, is_atomic=False, state=with_optimizer),
    "convert to megatron": converted(
        "megatron", "iter_0000007", 1, is_atomic=False, state=lambda step: with_optimizer(step, counted=step)
    ),
    "keep": kept(),
}
