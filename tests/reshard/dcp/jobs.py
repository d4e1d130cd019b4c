"""What the ranks of the DCP tests do: every pairing of torch's save and load, planners and storages with ours."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as theirs
from torch.distributed._shard import sharded_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import reshard
import reshard.dcp as ours
from reshard.dcp.engine import calls
from reshard.errors import ReshardError

A = torch.arange(13 * 6, dtype=torch.float32).reshape(13, 6)


class Counter:
    """A Stateful."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "history": [1, 2, 3]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def state(placements: list[Any], *, zero: bool = False) -> dict[str, Any]:
    """A nested state on a mesh of all ranks (2 x n/2 where there are two placements)."""
    world = dist.get_world_size()
    shape = (world,) if len(placements) == 1 else (2, world // 2)
    mesh = init_device_mesh("cpu", shape)

    def place(tensor: torch.Tensor) -> DTensor:
        fitting = [p if isinstance(p, Replicate) or p.dim < tensor.ndim else Replicate() for p in placements]
        return distribute_tensor(torch.zeros_like(tensor) if zero else tensor, mesh, fitting)

    return {
        "model": {"a": place(A), "half": place(A.to(torch.bfloat16)), "bias": place(torch.arange(5.0))},
        "plain": torch.zeros(3) if zero else torch.tensor([1.0, 2.0, 3.0]),
        "scalar": torch.tensor(0) if zero else torch.tensor(7),
        "optim": {"groups": [{"lr": 0.0 if zero else 0.5, "params": [] if zero else ["a"]}]},
        "counter": Counter(0 if zero else 42),
        "step": 0 if zero else 5,
    }


def right(target: dict[str, Any]) -> bool:
    full = {k: v.full_tensor() for k, v in target["model"].items()}
    return (
        torch.equal(full["a"], A)
        and torch.equal(full["half"], A.to(torch.bfloat16))
        and torch.equal(full["bias"], torch.arange(5.0))
        and target["plain"].tolist() == [1, 2, 3]
        and target["scalar"].item() == 7
        and target["optim"] == {"groups": [{"lr": 0.5, "params": ["a"]}]}
        and target["counter"].value == 42
        and target["step"] == 5
    )


SOURCES = [[Shard(0)], [Shard(0), Shard(1)], [Replicate(), Shard(0)]]
TARGETS = [[Shard(1)], [Replicate()], [Shard(0), Shard(0)]]


def savers_of(made: dict[str, Any]) -> dict[str, Callable[[str], Any]]:
    """Ways to save `made` at a path."""
    return {
        "ours": lambda p: ours.save(made, checkpoint_id=p),
        "torch": lambda p: theirs.save(made, checkpoint_id=p),
        "torch with our planner and writer": lambda p: theirs.save(
            made, storage_writer=ours.FileSystemWriter(p), planner=ours.DefaultSavePlanner()
        ),
        "ours with torch's planner and writer": lambda p: ours.save(
            made, storage_writer=theirs.FileSystemWriter(p), planner=theirs.DefaultSavePlanner()
        ),
        "ours, two threads": lambda p: ours.save(made, storage_writer=ours.FileSystemWriter(p, thread_count=2)),
        "ours, async": lambda p: ours.async_save(made, checkpoint_id=p).result(),
    }


LOADERS: dict[str, Callable[[dict[str, Any], str], None]] = {
    "ours": lambda s, p: ours.load(s, checkpoint_id=p),
    "torch": lambda s, p: theirs.load(s, checkpoint_id=p),
    "torch with our planner and reader": lambda s, p: theirs.load(
        s, storage_reader=ours.FileSystemReader(p), planner=ours.DefaultLoadPlanner()
    ),
    "ours with torch's planner and reader": lambda s, p: ours.load(
        s, storage_reader=theirs.FileSystemReader(p), planner=theirs.DefaultLoadPlanner()
    ),
    "ours with our reader, torch's planner": lambda s, p: ours.load(
        s, storage_reader=ours.FileSystemReader(p), planner=theirs.DefaultLoadPlanner()
    ),
}


def all_pairings(folder: str) -> list[tuple[str, bool]]:
    """(what, right) for saves and loads by us and by torch, whole and with the parts exchanged."""
    warnings.simplefilter("ignore")
    out = []
    for i, source in enumerate(SOURCES):
        for j, (saver, save) in enumerate(savers_of(state(source)).items()):
            path = f"{folder}/{i}-{j}"
            save(path)
            dist.barrier()
            for loader, load in LOADERS.items():
                empty = state(TARGETS[i], zero=True)
                load(empty, path)
                out.append((f"{source}: {saver} -> {loader}", right(empty)))
    return out


def strided(folder: str) -> bool:
    """A strided shard alone on its mesh axis, of which torch itself saves overlapping chunks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(48.0).reshape(16, 3)
    rows = torch.arange(16).reshape(2, dist.get_world_size(), -1)[:, dist.get_rank()].reshape(-1)

    def placed(local: torch.Tensor) -> DTensor:
        return DTensor.from_local(local, mesh, [_StridedShard(0, split_factor=2)], run_check=False)

    ours.save({"w": placed(full[rows])}, checkpoint_id=folder)
    whole = {"w": torch.zeros(16, 3)}
    ours.load(whole, checkpoint_id=folder)
    theirs.load(again := {"w": torch.zeros(16, 3)}, checkpoint_id=folder)
    back = {
        "w": DTensor.from_local(torch.zeros_like(full[rows]), mesh, [_StridedShard(0, split_factor=2)], run_check=False)
    }
    ours.load(back, checkpoint_id=folder)
    return (
        torch.equal(whole["w"], full)
        and torch.equal(again["w"], full)
        and torch.equal(back["w"].to_local(), full[rows])
    )


def torch_file(path: str) -> bool:
    """A file of torch.save straight into shards."""
    target = {
        "a": distribute_tensor(torch.zeros_like(A), init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    }
    ours.load(
        target,
        checkpoint_id=path,
        storage_reader=ours.BroadcastingTorchSaveReader(),
        planner=ours.DynamicMetaLoadPlanner(),
    )
    return torch.equal(target["a"].full_tensor(), A)


def subgroup(folder: str) -> bool:
    """Only the last two ranks save and load."""
    world = dist.get_world_size()
    group = dist.new_group([world - 2, world - 1])
    if dist.get_rank() < world - 2:
        return True
    made = {"x": torch.arange(4.0)}
    ours.save(made, checkpoint_id=folder, process_group=group)
    target = {"x": torch.zeros(4)}
    ours.load(target, checkpoint_id=folder, process_group=group)
    return torch.equal(target["x"], made["x"])


class _FailsOnOne(theirs.DefaultSavePlanner):
    def create_local_plan(self) -> Any:
        if dist.get_rank() == 1:
            raise ValueError("not today")
        return super().create_local_plan()


def one_rank_fails(folder: str) -> tuple[str, list[int]]:
    """The kind of error that this rank sees, and which ranks failed, where the planner of one raises."""
    _hear_all()
    try:
        ours.save({"x": torch.zeros(2)}, checkpoint_id=folder, planner=_FailsOnOne())
    except theirs.CheckpointException as error:
        return type(error).__name__, list(error.failures)
    return "", []


def sharded_async(folder: str) -> bool:
    """ShardedTensors saved in the background stay what they were, whatever happens to them meanwhile."""
    warnings.simplefilter("ignore")
    rank = dist.get_rank()
    shard = sharded_tensor.Shard.from_tensor_and_offsets(torch.full((2, 3), float(rank)), [2 * rank, 0], rank)
    whole = sharded_tensor.init_from_local_shards([shard], 4, 3)
    future = ours.async_save({"w": whole}, checkpoint_id=folder)
    shard.tensor.fill_(9)
    future.result()
    target = {"w": torch.ones(4, 3)}
    ours.load(target, checkpoint_id=folder)
    return target["w"][:, 0].tolist() == [0, 0, 1, 1]


class _Collective:
    """A Stateful that talks to the other ranks while it is asked, in a way of its own."""

    def __init__(self, factor: int) -> None:
        self.factor, self.seen = factor, 0

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self._sum()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["sum"] if self._sum() == state["sum"] else -1

    def _sum(self) -> int:
        total = torch.ones(self.factor, dtype=torch.int64)
        dist.all_reduce(total)
        return int(total.sum())


def statefuls_in_another_order(folder: str) -> bool:
    """Ranks whose dicts have another order ask in the same one, or their collectives would not fit together."""
    names = {"a": _Collective(1), "b": _Collective(2)}
    state = dict(reversed(names.items())) if dist.get_rank() else names
    ours.save(state, checkpoint_id=folder)
    ours.load(state, checkpoint_id=folder)
    world = dist.get_world_size()
    kept = list(state) == (["b", "a"] if dist.get_rank() else ["a", "b"])
    return kept and [names[key].seen for key in "ab"] == [world, 2 * world]


def fresh_sharded_optimizer(folder: str, kind: str) -> bool:
    """Saved by two ranks under FSDP, loaded by a fresh optimizer, whose state nobody made by stepping; then one more
    step. A rank has no count of steps for a parameter of which it has no elements, and which it never updates."""
    warnings.simplefilter("ignore")

    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        if kind == "fsdp2":
            model = fully_shard(model, mesh=mesh)
        else:
            model = FullyShardedDataParallel(
                model, device_mesh=mesh, device_id=torch.device("cpu"), use_orig_params=kind == "fsdp1 original"
            )
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def whole(model: Any, optimizer: Any) -> Any:
        options = reshard.StateDictOptions(full_state_dict=True)
        return reshard.get_state_dict(model, optimizer, options=options)

    model, optimizer = build()
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    ours.save({"app": dict(zip(("m", "o"), reshard.get_state_dict(model, optimizer)))}, checkpoint_id=folder)
    again, fresh = build()
    state = {"app": dict(zip(("m", "o"), reshard.get_state_dict(again, fresh)))}
    ours.load(state, checkpoint_id=folder)
    reshard.set_state_dict(again, fresh, model_state_dict=state["app"]["m"], optim_state_dict=state["app"]["o"])
    third, offered = build()
    face = dict(zip(("m", "o"), ours.state_dict.get_state_dict(third, offered)))
    moments = {type(face["o"]["state"][name]["exp_avg"]) for name in face["m"]}
    if offered.state or face["o"]["state"].keys() != face["m"].keys() or moments != {DTensor}:
        return False
    ours.load({"app": face}, checkpoint_id=folder)
    ours.state_dict.set_state_dict(third, offered, model_state_dict=face["m"], optim_state_dict=face["o"])
    for one, by in ((model, optimizer), (again, fresh), (third, offered)):
        by.zero_grad()
        one(torch.ones(2, 5)).sum().backward()
        by.step()
    steps = [int(value["step"]) for by in (optimizer, fresh) for value in by.state.values()]
    weights, states = whole(model, optimizer)
    return set(steps) == {2} and all(
        all(torch.equal(weights[k], weights_again[k]) for k in weights)
        and all(
            torch.equal(value, states_again["state"][k][name])
            for k, values in states["state"].items()
            for name, value in values.items()
        )
        for weights_again, states_again in (whole(again, fresh), whole(third, offered))
    )


class _Fails(theirs.DefaultSavePlanner):
    """Fails in a step on some ranks."""

    def __init__(self, step: str, ranks: tuple[int, ...], error: type[Exception] = ValueError) -> None:
        super().__init__()
        self.step, self.ranks, self.error = step, ranks, error

    def _try(self, step: str) -> None:
        rank = dist.get_rank()
        if step == self.step and rank in self.ranks:
            raise self.error(f"rank {rank} cannot")

    def create_local_plan(self) -> Any:
        self._try("create_local_plan")
        return super().create_local_plan()

    def resolve_data(self, write_item: Any) -> Any:
        self._try("resolve_data")
        return super().resolve_data(write_item)


class Stubborn(Exception):
    """Does not let itself be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("not me")


def _hear_all() -> None:
    """Ranks that failed wait for the errors of others for longer than they would, since some may be slow here."""
    calls._TELL_S = 60.0


Told = tuple[list[str], dict[int, tuple[str, str]]]


def _told(call: Callable[[], Any]) -> Told:
    """The classes of the error that this rank sees, and what it says of each rank that failed."""
    try:
        call()
    except theirs.CheckpointException as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return kinds, {place: (type(own).__name__, str(own)) for place, (own, _) in error.failures.items()}
    return [], {}


def _shards() -> dict[str, Any]:
    """Something that every rank has a part of to write."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"x": distribute_tensor(torch.arange(16.0), mesh, [Shard(0)])}


def some_ranks_fail(folder: str, step: str) -> Told:
    """Three of four ranks fail in a step of the protocol."""
    _hear_all()
    state = _shards()
    return _told(lambda: ours.save(state, checkpoint_id=folder, planner=_Fails(step, (0, 2, 3))))


def each_to_its_own(folder: str, torchs: bool) -> tuple[str, list[str]]:
    own = f"{folder}/{dist.get_rank()}"
    writer = theirs.FileSystemWriter(own) if torchs else None
    try:
        ours.save(_shards(), checkpoint_id=own, storage_writer=writer)
    except ReshardError as error:
        return str(error), os.listdir(own) if os.path.isdir(own) else []
    return "", os.listdir(own)


def by_other_names(folder: str) -> list[str]:
    """One rank names the folder by a link to it."""
    os.makedirs(f"{folder}/here", exist_ok=True)
    if not dist.get_rank():
        os.symlink(f"{folder}/here", f"{folder}/link")
    dist.barrier()
    ours.save(_shards(), checkpoint_id=f"{folder}/{'here' if dist.get_rank() else 'link'}")
    return sorted(os.listdir(f"{folder}/here"))


def unpicklable_failure(folder: str) -> Told:
    """A rank fails with an error that cannot be sent."""
    _hear_all()
    state = _shards()
    return _told(lambda: ours.save(state, checkpoint_id=folder, planner=_Fails("resolve_data", (1,), Stubborn)))


def some_ranks_miss(folder: str) -> Told:
    """Two of three ranks want what is not there."""
    _hear_all()
    target = {"w" if dist.get_rank() == 1 else "v": torch.zeros(2)}
    return _told(lambda: ours.load(target, checkpoint_id=folder))


def some_ranks_fail_later(folder: str) -> Told:
    """One rank fails in the background, while others make groups of their own."""
    _hear_all()
    state = _shards()
    future = ours.async_save(state, checkpoint_id=folder, planner=_Fails("resolve_data", (1,)))
    for number in range(3):
        reshard.save({"n": number}, f"{folder}/{number}")
    return _told(future.result)


def _wrapped(value: float) -> DTensor:
    """Uneven row shards, two of them on the first of two ranks, in a `LocalShardsWrapper`."""
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    rows = [(0, 2), (2, 3)] if dist.get_rank() == 0 else [(3, 7)]
    whole = torch.arange(21.0).view(7, 3) * value
    local = LocalShardsWrapper([whole[a:b].clone() for a, b in rows], [(a, 0) for a, _ in rows])
    mesh = init_device_mesh("cpu", (2,))
    made = DTensor.from_local(torch.zeros(local.shape), mesh, [Shard(0)], shape=torch.Size([7, 3]), stride=(3, 1))
    made._local_tensor = local  # not by `from_local`: under torch 2.6 a view of several shards fails
    return made


def wrapped_shards(folder: str) -> dict[str, bool]:
    """DTensors of local shards, saved and loaded by ours and by torch's."""

    def right(got: DTensor) -> bool:
        shards = got._local_tensor.local_shards()
        whole = torch.arange(21.0).view(7, 3)
        starts = (0, 2) if dist.get_rank() == 0 else (3,)
        return all(torch.equal(shard, whole[a : a + len(shard)]) for a, shard in zip(starts, shards, strict=True))

    ours.save({"w": _wrapped(1.0)}, checkpoint_id=f"{folder}/ours")
    theirs.save({"w": _wrapped(1.0)}, checkpoint_id=f"{folder}/torch")
    ours.async_save({"w": _wrapped(1.0)}, checkpoint_id=f"{folder}/later").result()
    out = {}
    for what, load, name in (
        ("ours", ours.load, "ours"),
        ("torch", theirs.load, "ours"),
        ("ours of torch", ours.load, "torch"),
        ("in the background", ours.load, "later"),
    ):
        target = {"w": _wrapped(0.0)}
        load(target, checkpoint_id=f"{folder}/{name}")
        out[what] = right(target["w"])
    return out


def by_processes(folder: str) -> bool:
    """Every rank's shards are written by a process of its own; torch reads them."""
    ours.async_save({"x": _shards()["x"], "n": 3}, checkpoint_id=folder, async_checkpointer_type="process").result()
    target: dict[str, Any] = {
        "x": distribute_tensor(torch.zeros(16), init_device_mesh("cpu", (2,)), [Replicate()]),
        "n": 0,
    }
    theirs.load(target, checkpoint_id=folder)
    return torch.equal(target["x"].full_tensor(), torch.arange(16.0)) and target["n"] == 3
