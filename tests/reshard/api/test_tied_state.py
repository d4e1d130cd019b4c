"""Tensors that are one memory under several keys, of whatever kind: saved once, and one again after the load."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import reshard
from tests import gloo
from tests.same import same
from tests.torch_releases import FSDP2_TRAINS_ON_CPUS, requires


class Odd(torch.optim.Optimizer):
    """Keeps state of each kind that shares memory: chosen by `kinds`."""

    def __init__(self, parameters: Any, kinds: str) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.kinds, self.table = kinds, torch.linspace(-1, 1, 256)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        shared = next((state["step"] for state in self.state.values() if "step" in state), torch.zeros(()))
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    if "step" in self.kinds:
                        state["step"] = shared
                    if "master" in self.kinds:
                        state["master"] = p.data if p.dtype == torch.float32 else p.float()
                    if "table" in self.kinds:
                        state["table"] = self.table
                    if "list" in self.kinds:
                        state["history"] = [torch.zeros_like(p)] * 2 + [[], (self.table,)]
                    state["mom"] = torch.zeros_like(p, dtype=torch.float32)
                state["mom"].mul_(0.5).add_(p.grad)
                if "list" in self.kinds:
                    state["history"][0].add_(p.grad)
                    p.add_(state["history"][1], alpha=-0.01)
                if "table" in self.kinds:
                    p.sub_(state["table"][200])
                if "master" in self.kinds:
                    state["master"].add_(state["mom"], alpha=-group["lr"])
                    p.copy_(state["master"])
                else:
                    p.sub_(state["mom"].to(p.dtype), alpha=group["lr"])
        if "step" in self.kinds:
            next(iter(self.state.values()))["step"].add_(1)


def _adamw_of_one_step(parameters: Any, kinds: str) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 3, dtype=next(model.parameters()).dtype)).square().sum().backward()
        optimizer.step()
        if isinstance(optimizer, torch.optim.AdamW):
            one = next(iter(optimizer.state.values()))["step"]
            for state in optimizer.state.values():
                state["step"] = one


def _tensors(value: Any, path: str) -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return {k: t for name, item in items for k, t in _tensors(item, f"{path}/{name}").items()}


def _all(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    out = dict(model.named_parameters())
    for name, parameter in model.named_parameters():
        out |= _tensors(dict(optimizer.state.get(parameter, {})), f"{name}:")
    return out


def _ties(tensors: dict[str, torch.Tensor]) -> set[frozenset[str]]:
    by_memory: dict[Any, list[str]] = {}
    for key, tensor in tensors.items():
        by_memory.setdefault((tensor.data_ptr(), tuple(tensor.shape)), []).append(key)
    return {frozenset(keys) for keys in by_memory.values()}


FLAT = reshard.StateDictOptions(flatten_optimizer_state_dict=True)

WAYS = {
    "destinations": lambda m, o, path, options: reshard.optimizer_destinations(m, o, path),
    "fresh": lambda m, o, path, options: reshard.get_optimizer_state_dict(m, o, options=options),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("make", "kinds", "dtype", "options"),
    [
        (Odd, "step", torch.float32, None),
        (Odd, "master", torch.float32, None),
        (Odd, "master", torch.bfloat16, None),
        (Odd, "table", torch.float32, None),
        (Odd, "list", torch.float32, None),
        (Odd, "step master table list", torch.float32, None),
        (Odd, "step master table", torch.float32, FLAT),
        (Odd, "step master table list", torch.bfloat16, None),
        (_adamw_of_one_step, "", torch.float32, None),
        (_adamw_of_one_step, "", torch.float32, FLAT),
    ],
)
def test_a_fresh_optimizer_shares_what_the_saved_one_shared(
    way: str, make: Any, kinds: str, dtype: torch.dtype, options: Any, tmp_path: Path
) -> None:
    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)
        first, *rest = model.parameters()
        return model, make([{"params": [first]}, {"params": rest}], kinds)

    model, optimizer = made(0)
    _train(model, optimizer, 2)
    state = reshard.get_optimizer_state_dict(model, optimizer, options=options)
    reshard.save({"model": reshard.get_model_state_dict(model), "optim": state}, tmp_path)

    other, fresh = made(1)
    target = {"model": reshard.get_model_state_dict(other), "optim": WAYS[way](other, fresh, tmp_path, options)}
    report = reshard.load(target, tmp_path)
    reshard.set_state_dict(
        other, fresh, model_state_dict=target["model"], optim_state_dict=target["optim"], options=options
    )

    assert report.ok
    found, wanted = _all(other, fresh), _all(model, optimizer)
    assert found.keys() == wanted.keys()
    assert [key for key in wanted if not same(found[key], wanted[key])] == []
    assert _ties(found) == _ties(wanted)
    for pair in ((model, optimizer), (other, fresh)):
        _train(*pair, 2)
    assert all(same(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_an_optimizer_loaded_without_its_model_leaves_the_model_alone(way: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = Odd(model.parameters(), "master")
    _train(model, optimizer, 1)
    state = reshard.get_optimizer_state_dict(model, optimizer)
    reshard.save({"model": reshard.get_model_state_dict(model), "optim": state}, tmp_path)
    other = nn.Linear(3, 2)
    before = other.weight.detach().clone()

    target = {"optim": WAYS[way](other, Odd(other.parameters(), "master"), tmp_path, None)}
    reshard.load(target, tmp_path, strict={"model.*": "partial"})

    assert same(other.weight.detach(), before)
    assert same(target["optim"]["state"]["weight"]["master"], model.weight.detach())


@pytest.mark.parametrize("names", ["ab", "ba"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tied_tensor_takes_the_saved_dtype_with_the_other(names: str, device: str, tmp_path: Path) -> None:
    """The other one alone was saved, as many model files have it."""
    torch.save({"a": torch.ones(3, dtype=torch.bfloat16)}, tmp_path / "saved.pt")
    tied = torch.zeros(3, device=device)
    target = dict.fromkeys(names, tied)

    report = reshard.load(target, tmp_path / "saved.pt", dtype_policy="saved")

    assert report.ok
    assert set(report.replaced) == {"a", "b"}
    for value in target.values():
        assert same(value, torch.ones(3, dtype=torch.bfloat16))


def test_entries_taken_out_of_destinations_stay_out(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    _train(model, optimizer, 1)
    reshard.save({"optim": reshard.get_optimizer_state_dict(model, optimizer)}, tmp_path)
    target = {"optim": reshard.optimizer_destinations(model, optimizer, tmp_path)}
    del target["optim"]["state"]["bias"]

    report = reshard.load(target, tmp_path, strict=False)

    assert set(target["optim"]["state"]) == {"weight"}
    assert set(report.unexpected) == {f"optim.state.bias.{name}" for name in ("exp_avg", "exp_avg_sq")}


def test_empty_containers_of_state_come_back(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = Odd(model.parameters(), "list")
    _train(model, optimizer, 1)
    reshard.save({"optim": reshard.get_optimizer_state_dict(model, optimizer)}, tmp_path)
    for way in WAYS.values():
        target = {"optim": way(model, Odd(model.parameters(), "list"), tmp_path, None)}
        reshard.load(target, tmp_path)
        history = target["optim"]["state"]["weight"]["history"]
        assert [type(item).__name__ for item in history] == ["Tensor", "Tensor", "list", "tuple"]


def _sharded_state(path: str, way: str, saves: bool) -> dict[str, Any]:
    """Save on as many ranks as there are, or load onto them, with FSDP2; what the state is and what it shares."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0 if saves else 1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = Odd(model.parameters(), "step master")
    if saves:
        _train(model, optimizer, 2)
        state = {"model": reshard.get_model_state_dict(model)}
        state["optim"] = reshard.get_optimizer_state_dict(model, optimizer)
        reshard.save(state, path)
    else:
        state = {"model": reshard.get_model_state_dict(model), "optim": WAYS[way](model, optimizer, path, None)}
        assert reshard.load(state, path).ok
        reshard.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    found = _all(model, optimizer)
    local = {key: t.to_local() if isinstance(t, DTensor) else t for key, t in found.items()}
    return {
        "values": {key: t.full_tensor() if isinstance(t, DTensor) else t for key, t in found.items()},
        "held": [name for name in dict(model.named_parameters()) if local[name].numel()],
        "ties": {tie for tie in _ties({key: t for key, t in local.items() if t.numel()}) if len(tie) > 1},
    }


@requires(FSDP2_TRAINS_ON_CPUS, "trains nothing under FSDP2 on CPUs")
@pytest.mark.gloo
@pytest.mark.parametrize("way", WAYS)
def test_a_sharded_optimizer_shares_what_the_saved_one_shared(way: str, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    saved = gloo.run(_sharded_state, 2, path, way, True)[0]
    steps = frozenset(f"{name}:/step" for name in ("0.weight", "0.bias", "1.weight", "1.bias"))
    for world_size in (2, 3):
        for found in gloo.run(_sharded_state, world_size, path, way, False):
            assert steps in found["ties"]
            masters = {frozenset((name, f"{name}:/master")) for name in found["held"]}
            assert found["ties"] == {steps} | masters
            assert all(same(found["values"][key], value) for key, value in saved["values"].items())


# --- ties of sharded kinds ---


class Tied(nn.Module):
    """Head and embedding are one; with as few rows as 1, some ranks hold no element."""

    def __init__(self, rows: int = 8) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.emb = nn.Embedding(rows, 4)
        self.mid = nn.Linear(4, 4)
        self.out = nn.Linear(4, rows, bias=False)
        self.out.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.mid(self.emb(x)))


def _fsdp1(rows: int) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(Tied(rows), use_orig_params=True, device_id=torch.device("cpu"))


def _fsdp2(rows: int) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(Tied(rows), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def _sharded_ties(path: str, kind: str, rows: int) -> dict[str, Any]:
    make = {"fsdp1": _fsdp1, "fsdp2": _fsdp2}[kind]
    model = make(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = reshard.save({"model": reshard.get_model_state_dict(model)}, path)
        out: dict[str, Any] = {"aliases": dict(report.aliases), "tensors": report.total_bytes}
        wanted = {name: value.detach().clone() for name, value in Tied(rows).state_dict().items()}
        for name, target in (("sharded", make(rows)), ("plain", Tied(rows))):
            with torch.no_grad():
                for parameter in target.parameters():
                    parameter.zero_()
            state = {"model": reshard.get_model_state_dict(target)}
            for read_once in (True, None):
                out[f"{name} ok"] = reshard.load(state, path, read_once=read_once).ok
            full = reshard.get_model_state_dict(target, options=reshard.StateDictOptions(full_state_dict=True))
            out[name] = all(same(full[key], value) for key, value in wanted.items())
    return out


@pytest.mark.gloo
@pytest.mark.parametrize("rows", [8, 1])
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_tied_weights_of_sharded_models_are_saved_once_and_loaded(kind: str, rows: int, tmp_path: Path) -> None:
    for found in gloo.run(_sharded_ties, 3, str(tmp_path / "c"), kind, rows):
        assert found["aliases"] == {"model.out.weight": "model.emb.weight"}
        assert found["tensors"] == 4 * (rows * 4 + 4 * 4 + 4)
        assert all(found[key] for key in ("sharded ok", "sharded", "plain ok", "plain"))


def _one_memory(path: str) -> dict[str, Any]:
    """DTensors and ShardedTensors that share local memory, and some that share it with something seen otherwise."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(24.0).reshape(6, 4)
    cut = distribute_tensor(whole, mesh, [Shard(0)])
    local = cut._local_tensor
    again = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    wide = DTensor.from_local(local, mesh, [Shard(1)], run_check=False)
    state: dict[str, Any] = {"a": cut, "b": again, "wide": wide, "copy": distribute_tensor(whole, mesh, [Replicate()])}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed._shard.sharded_tensor import Shard as LocalShard, init_from_local_shards

        def sharded(tensor: torch.Tensor) -> Any:
            rows = tensor.shape[0]
            return init_from_local_shards([LocalShard.from_tensor_and_offsets(tensor, [rank * rows, 0], rank)], 6, 4)

        memory = whole.chunk(world)[rank].clone()
        state |= {"s": sharded(memory), "t": sharded(memory), "u": sharded(memory.clone())}
        report = reshard.save(state, path)
        out: dict[str, Any] = {"aliases": dict(report.aliases)}
        for value in (memory, local):
            value.zero_()
        del state["wide"]  # it overlaps with what is laid out otherwise
        reshard.load(state, path, strict={"wide": "partial"})
    out["back"] = torch.equal(memory, whole.chunk(world)[rank]) and torch.equal(local, whole.chunk(world)[rank])
    return out


@pytest.mark.gloo
def test_sharded_tensors_of_one_memory_are_one_if_they_lie_alike(tmp_path: Path) -> None:
    for found in gloo.run(_one_memory, 2, str(tmp_path / "c")):
        assert found == {"aliases": {"b": "a", "t": "s"}, "back": True}


def _ties_that_ranks_see_differently(path: str) -> dict[str, Any]:
    rank, out = dist.get_rank(), dict[str, Any]()
    one, two = torch.full((2,), 1.0), torch.full((2,), 2.0)
    memory = torch.zeros(2)

    def moved(target: dict[str, torch.Tensor], source: dict[str, torch.Tensor], **options: Any) -> Any:
        try:
            reshard.redistribute(source, target, timeout=60, **options)
        except reshard.ReshardError as error:
            return str(error)
        return {key: tensor.tolist() for key, tensor in target.items()}

    apart = {"a": torch.zeros(2), "b": torch.zeros(2)}
    on_one = {"a": memory, "b": memory} if rank == 0 else apart
    out["on one rank"] = moved(on_one, {"a": one, "b": two})
    out["where the other has one key"] = moved(on_one if rank == 0 else {"b": apart["b"]}, {"a": one, "b": two})
    ordered = {"a": memory, "b": memory} if rank == 0 else {"b": memory, "a": memory}
    out["in another order"] = moved(ordered, {"a": one, "b": two})
    spec = reshard.planners.TensorSpec("w", (4,), "float32")
    layouts = {
        key: reshard.planners.TensorLayout(spec, reshard.planners.Mesh({"t": 2}, ranks), "S(0)")
        for key, ranks in (("a", [0, 1]), ("b", [1, 0]))
    }
    both, whole = {"a": memory, "b": memory}, {"w": torch.arange(4.0)}
    out["in two layouts"] = moved(both, whole, mapping={"a": "w", "b": "w"}, target_layouts=layouts)
    held = {"a": torch.full((2,), float(rank)), "b": torch.zeros(2)}
    held["b"] = held["a"]
    swapped = moved({"a": torch.zeros(4), "b": torch.zeros(4)}, held, source_layouts=layouts)
    out["sources in two layouts"] = swapped
    out["untouched"] = memory.any().item(), apart["a"].any().item(), apart["b"].any().item()
    out["of one source"] = moved(on_one, {"w": one}, mapping={"a": "w", "b": "w"})
    out["in another order, of one"] = moved(ordered, {"w": two}, mapping={"a": "w", "b": "w"})
    report = reshard.save(ordered, path)
    out["saved in another order"] = report.aliases
    return out


def test_a_tie_that_not_all_ranks_have_fills_no_key_with_the_values_of_another(tmp_path: Path) -> None:
    for found in gloo.run(_ties_that_ranks_see_differently, 2, str(tmp_path / "saved")):
        for name in ("on one rank", "where the other has one key", "in another order"):
            assert "b: shares memory with 'a', but 'b' takes 'b', and 'a' takes 'a'" in found[name], name
        assert "b: shares memory with 'a', but their layouts differ" in found["in two layouts"]
        assert found["sources in two layouts"] == {"a": [0, 0, 1, 1], "b": [1, 1, 0, 0]}
        assert found["untouched"] == (False, False, False)
        assert found["of one source"] == {"a": [1, 1], "b": [1, 1]}
        assert found["in another order, of one"] == {"a": [2, 2], "b": [2, 2]}
        assert found["saved in another order"] == {"b": "a"}


def _one_memory_on_two_meshes(path: str) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    def on(order: list[list[int]], memory: torch.Tensor) -> DTensor:
        return DTensor.from_local(memory, DeviceMesh("cpu", order), [Shard(0), Shard(0)], run_check=False)

    memory = torch.full((1,), float(dist.get_rank()))
    state = {"a": on([[0, 1], [2, 3]], memory), "b": on([[0, 2], [1, 3]], memory)}
    reshard.save(state, path)
    whole = {key: torch.zeros(4) for key in state}
    reshard.load(whole, path)
    try:
        reshard.load(state, path, mapping={"b": "a"})
    except reshard.ReshardError as error:
        return {key: tensor.tolist() for key, tensor in whole.items()}, str(error), memory.item()
    return None


def test_one_memory_on_two_meshes_is_two_tensors(tmp_path: Path) -> None:
    for rank, (saved, refusal, kept) in enumerate(gloo.run(_one_memory_on_two_meshes, 4, str(tmp_path / "saved"))):
        assert saved == {"a": [0, 1, 2, 3], "b": [0, 2, 1, 3]}
        assert "memory" in refusal
        assert kept == rank
