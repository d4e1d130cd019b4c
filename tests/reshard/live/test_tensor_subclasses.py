"""Tensor subclasses that flatten to plain tensors are saved and loaded as these."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_map_only

import reshard
from reshard.errors import KeyMismatchError, LayoutError
from reshard.live import tensor_classes
from reshard.live.state import Targets
from reshard.live.tensors import holder
from tests import gloo


class Quantized(torch.Tensor):
    """Integers and a scale."""

    @staticmethod
    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data, scale):
        self.data_, self.scale = data, scale

    def __tensor_flatten__(self):
        return ["data_", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Quantized(inner["data_"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.view.default, torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return Quantized(args[0].data_, args[0].scale)  # what DTensor.from_local asks for
        raise NotImplementedError(f"{func} on a Quantized")


def quantized(fill: int) -> Quantized:
    return Quantized(torch.full((4, 3), fill, dtype=torch.int8), torch.full((4,), float(fill)))


def test_there_and_back(tmp_path):
    reshard.save({"model": {"w": quantized(3), "b": torch.ones(2)}}, tmp_path)
    target = {"model": {"w": quantized(0), "b": torch.zeros(2)}}
    weight = target["model"]["w"]

    report = reshard.load(target, tmp_path)

    assert report.ok
    assert target["model"]["w"] is weight
    assert (weight.data_ == 3).all()
    assert weight.scale.tolist() == [3.0] * 4
    assert set(reshard.open(tmp_path)) == {"model.w.data_", "model.w.scale", "model.b"}
    assert reshard.compare(tmp_path, target).ok
    assert reshard.fingerprint(target) == reshard.open(tmp_path).fingerprints


class Other(Quantized):
    """The same parts, and another meaning."""


class Tagged(torch.Tensor):
    """Elements, and a class that says something of them."""


def test_another_class_than_was_saved_is_in_the_report_and_is_not_ok(tmp_path):
    reshard.save({"model": {"w": quantized(3)}, "t": torch.ones(2).as_subclass(Tagged), "n": 1}, tmp_path)
    name = f"{__name__}.Quantized"
    targets = {
        "dict": {"data_": torch.zeros(4, 3, dtype=torch.int8), "scale": torch.zeros(4)},
        f"{__name__}.Other": Other(torch.zeros(4, 3, dtype=torch.int8), torch.zeros(4)),
    }
    for found, target in targets.items():
        state = {"model": {"w": target}, "t": torch.zeros(2), "n": 0}
        wanted = {"model.w": (name, found), "t": (f"{__name__}.Tagged", "torch.Tensor")}
        assert reshard.load(state, tmp_path, dry_run=True).changed_classes == wanted
        report = reshard.load(state, tmp_path)
        assert report.changed_classes == wanted
        assert not report.ok
        assert f"model.w: saved {name}, not {found}" in repr(report)
    same = {"model": {"w": quantized(0)}, "t": torch.zeros(2).as_subclass(Tagged), "n": 0}
    assert reshard.load(same, tmp_path).ok
    # through another checkpoint, under other names
    reshard.convert(tmp_path, tmp_path / "again")
    moved = {"model": {"v": targets["dict"]}, "t": torch.zeros(2).as_subclass(Tagged), "n": 0}
    names = {f"model.v.{part}": f"model.w.{part}" for part in ("data_", "scale")}
    assert reshard.load(moved, tmp_path / "again", mapping=names).changed_classes == {"model.v": (name, "dict")}
    assert set(reshard.open(tmp_path).nested()["model"]["w"]) == {"data_", "scale"}


def test_saved_from_a_dict_nothing_is_known_of_a_class(tmp_path):
    reshard.save({"w": {"data_": quantized(3).data_, "scale": quantized(3).scale}}, tmp_path)

    assert reshard.load({"w": quantized(0)}, tmp_path).ok


class Coarse(torch.optim.Optimizer):
    """Keeps one quantized tensor for each parameter."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("moment", quantized(2))


def resumed(folder, flat):
    """A fresh optimizer loads what another one has saved, and the report says what became of the quantized moment."""
    options = reshard.StateDictOptions(flatten_optimizer_state_dict=flat)
    model, fresh = torch.nn.Linear(3, 4, bias=False), torch.nn.Linear(3, 4, bias=False)
    optimizer, other = Coarse(model.parameters()), Coarse(fresh.parameters())
    optimizer.step()
    reshard.save({"optim": reshard.get_optimizer_state_dict(model, optimizer, options=options)}, folder)
    state = {"optim": reshard.optimizer_destinations(fresh, other, folder)}
    return fresh, other, state, reshard.load(state, folder)


def test_parts_of_a_class_that_is_not_recorded_are_refused(monkeypatch):
    """As from a format without classes: a step of an optimizer without state could not use the dict."""
    made = tensor_classes._TensorClass({"scale": "flat"}, make=lambda cls, parts, like: quantized(2))
    monkeypatch.setitem(tensor_classes.registered_classes, f"{__name__}.Quantized", made)
    model = torch.nn.Linear(3, 4, bias=False)
    groups = [{"lr": 0.1, "params": ["weight"]}]
    parts = {"data": torch.zeros(4, 3, dtype=torch.int8), "scale": torch.ones(4)}
    saved = {"state": {"weight": {"moment": parts}}, "param_groups": groups}
    with pytest.raises(KeyMismatchError, match=r"weight: its 'moment' is a dict, .*Quantized: step the optimizer"):
        reshard.set_optimizer_state_dict(model, Coarse(model.parameters()), saved)
    other = {"state": {"weight": {"moment": {"data": torch.zeros(4)}}}, "param_groups": groups}  # a dict of its own
    reshard.set_optimizer_state_dict(model, optimizer := Coarse(model.parameters()), other)
    assert type(optimizer.state[model.weight]["moment"]) is dict


@pytest.mark.parametrize("flat", [False, True])
def test_a_fresh_optimizer_is_not_said_to_have_a_quantized_state_that_it_has_as_dicts(tmp_path, flat):
    fresh, other, state, report = resumed(tmp_path, flat)

    assert report.changed_classes == {"optim.state.weight.moment": (f"{__name__}.Quantized", "dict")}
    assert not report.ok
    # where the optimizer has state, the class is known: dicts are refused, and the state is filled in place
    other.step()
    with pytest.raises(KeyMismatchError, match=r"weight: its 'moment' is a dict, where optimizer 0 has a .*Quantized"):
        reshard.set_optimizer_state_dict(fresh, other, state["optim"])
    warm = {"optim": reshard.get_optimizer_state_dict(fresh, other)}
    if not flat:
        assert reshard.load(warm, tmp_path).ok


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_compared_by_their_parts_or_refused():
    jagged, strided = (
        torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)
        for layout in (torch.jagged, torch.strided)
    )

    assert reshard.compare({"a": jagged}, {"a": jagged}).ok
    for state in ({"a": strided}, {"a": reshard.PerRank(strided)}, {"a": reshard.PerRank(jagged)}):
        with pytest.raises(LayoutError, match="'a' is nested"):
            reshard.compare(state, state)


def test_inside_a_subclass_inside_another(tmp_path):
    nested = Quantized(quantized(5), torch.ones(1))
    reshard.save({"w": nested}, tmp_path)
    target = {"w": Quantized(quantized(0), torch.zeros(1))}

    reshard.load(target, tmp_path)

    assert (target["w"].data_.data_ == 5).all()


def test_inner_tensors_of_another_dtype_are_replaced_on_request(tmp_path):
    reshard.save({"w": quantized(3)}, tmp_path)
    wide = Quantized(torch.zeros(4, 3, dtype=torch.int32), torch.zeros(4))

    with pytest.raises(KeyMismatchError, match="int8"):
        reshard.load({"w": wide}, tmp_path)
    reshard.load({"w": wide}, tmp_path, dtype_policy="saved")

    assert wide.data_.dtype == torch.int8
    assert (wide.data_ == 3).all()


def test_a_part_that_has_the_key_of_something_else(tmp_path):
    with pytest.raises(KeyMismatchError, match="scale"):
        reshard.save({"w": quantized(1), "w.scale": torch.ones(4)}, tmp_path)


WHOLE = torch.arange(21, dtype=torch.int8).reshape(7, 3)


def cut(data: torch.Tensor, scale: torch.Tensor, placement: Any = None) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return DTensor.from_local(
        Quantized(data, scale), mesh, [placement or Shard(0)], run_check=False, shape=(7, 3), stride=(3, 1)
    )


def save_and_load_cut(path: str) -> list[torch.Tensor]:
    """Rows of integers, and of scales of the same shape; filled in place, and again from another dtype."""
    rows = WHOLE.chunk(dist.get_world_size())[dist.get_rank()]
    reshard.save({"w": cut(rows.clone(), rows.float() / 2)}, path)
    target = {"w": cut(torch.zeros_like(rows), torch.zeros(rows.shape))}
    assert Targets.of(target).live("w.data_") is target["w"]._local_tensor.data_
    reshard.load(target, path)
    wide = {"w": cut(torch.zeros_like(rows, dtype=torch.int32), torch.zeros(rows.shape))}
    reshard.load(wide, path, dtype_policy="saved")
    with pytest.raises(LayoutError, match=r"'scale' of 'w', a Quantized of local .* has shape \[1\] inside"):
        reshard.save({"w": cut(rows, torch.ones(1))}, f"{path}-refused")
    with pytest.raises(LayoutError, match="its sharding is unknown"):
        reshard.load({"w": cut(rows, torch.ones(1))}, path)
    copy = {"w": cut(torch.zeros_like(WHOLE), torch.zeros(7, 3), Replicate())}
    reshard.load(copy, path)
    return [t["w"]._local_tensor.data_ for t in (target, wide, copy)] + [target["w"]._local_tensor.scale]


@pytest.mark.gloo
def test_inside_a_dtensor(tmp_path):
    rows = WHOLE.chunk(2)
    for rank, (filled, wide, copy, scale) in enumerate(gloo.run(save_and_load_cut, 2, str(tmp_path / "c"))):
        for found in (filled, wide):
            assert found.dtype == torch.int8
            assert torch.equal(found, rows[rank])
        assert torch.equal(copy, WHOLE)
        assert torch.equal(scale, rows[rank].float() / 2)
    assert torch.equal(reshard.open(tmp_path / "c")["w.data_"][...], WHOLE)


def save_under_way(path: str) -> list[float]:
    """Results of collectives that nobody has waited for yet, plain and as a DTensor's local tensor."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = DTensor.from_local(torch.full((2, 3), 7.0), mesh, [Shard(0)], run_check=False)
    gathered = rows.redistribute(mesh, [Replicate()], async_op=True)
    assert type(gathered._local_tensor).__name__ == "AsyncCollectiveTensor"
    reshard.save({"sharded": gathered, "plain": gathered._local_tensor}, path)
    target = {"sharded": rows.redistribute(mesh, [Replicate()], async_op=True), "plain": torch.zeros(4, 3)}
    target["sharded"]._local_tensor.elem.zero_()
    reshard.load(target, path)
    return [float(target["sharded"].to_local().sum()), float(target["plain"].sum())]


@pytest.mark.gloo
def test_results_of_collectives_are_waited_for_and_are_plain_tensors(tmp_path):
    assert gloo.run(save_under_way, 2, str(tmp_path / "c")) == [[84.0, 84.0]] * 2
    assert {name: reshard.open(tmp_path / "c")[name].shape for name in ("sharded", "plain")} == {
        "sharded": (4, 3),
        "plain": (4, 3),
    }


class Wrapped(torch.Tensor):
    """A tensor that is multiplied in another way, and what was computed from it for that, as for float8."""

    @staticmethod
    def __new__(cls, inner, scale=None):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner, scale=None):
        self.inner, self.scale = inner, scale

    def __tensor_flatten__(self):
        return ["inner"] if self.scale is None else ["inner", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Wrapped(inner["inner"], inner.get("scale"))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Wrapped, lambda one: one.inner, (args, kwargs or {}))
        out = func(*args, **kwargs)
        keeps = {
            "view",
            "detach",
            "as_strided",
            "empty_like",
            "clone",
            "_to_copy",
            "new_zeros",
            "slice",
            "split",
            "copy_",
        }
        return tree_map_only(torch.Tensor, Wrapped, out) if func.overloadpacket.__name__ in keeps else out


reshard.register_tensor_class(Wrapped, {"inner": "values"})


def trained(kind, *, sharded=False):
    """A layer of seven rows, its weight wrapped or plain."""
    model = torch.nn.Linear(3, 7, bias=False)
    local = WHOLE.float().chunk(dist.get_world_size())[dist.get_rank()].clone() if sharded else WHOLE.float()
    weight = Wrapped(local) if kind == "wrapped" else local
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        weight = DTensor.from_local(weight, mesh, [Shard(0)], run_check=False, shape=(7, 3), stride=(3, 1))
    model.weight = torch.nn.Parameter(weight)
    if kind == "wrapped":
        holder(model.weight).scale = torch.ones(())
    return model


def wrapped_there_and_back(path, sharded):
    """Whatever is wrapped on either side: each pair of kinds, and what a full state dict is of."""
    found = []
    for number, saved in enumerate(("wrapped", "plain")):
        model = trained(saved, sharded=sharded)
        optimizer = torch.optim.AdamW(model.parameters())
        model.weight.grad = torch.ones_like(model.weight.data)
        optimizer.step()
        state = dict(zip(("model", "optim"), reshard.get_state_dict(model, optimizer)))
        reshard.save(state, f"{path}-{number}")
        whole = reshard.get_model_state_dict(model, options=reshard.StateDictOptions(full_state_dict=True))
        for target in ("wrapped", "plain"):
            other = trained(target, sharded=sharded)
            with torch.no_grad():
                other.weight.zero_()
            fresh = torch.optim.AdamW(other.parameters())
            wanted = dict(zip(("model", "optim"), reshard.get_state_dict(other, fresh)))
            report = reshard.load(wanted, f"{path}-{number}")
            assert report.ok, report
            reshard.set_state_dict(other, fresh, model_state_dict=wanted["model"], optim_state_dict=wanted["optim"])
            now = dict(zip(wanted, reshard.get_state_dict(other, fresh)))
            assert reshard.fingerprint(now) == reshard.open(f"{path}-{number}").fingerprints
            if target == "wrapped":
                assert type(holder(other.weight)) is Wrapped
                assert holder(other.weight).scale is None
            again = trained(target, sharded=sharded)
            reshard.set_model_state_dict(again, whole, options=reshard.StateDictOptions(full_state_dict=True))
            assert reshard.fingerprint(reshard.get_model_state_dict(again)) == reshard.fingerprint(state["model"])
            found.append(sorted(reshard.open(f"{path}-{number}")))
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("ranks", [0, 2, 3])
def test_a_class_that_only_computes_otherwise_is_saved_as_a_plain_tensor(tmp_path, ranks):
    args = (str(tmp_path / "c"), bool(ranks))
    found = str(gloo.run(wrapped_there_and_back, ranks, *args) if ranks else wrapped_there_and_back(*args))
    assert "model.weight'" in found
    assert "inner" not in found
    assert "scale" not in found


def test_what_torch_saved_of_a_wrapper_is_read_as_a_plain_tensor(tmp_path):
    torch.save({"w": Wrapped(WHOLE.float(), torch.ones(()))}, tmp_path / "w.pt")
    target = {"w": torch.zeros(7, 3)}

    assert reshard.load(target, tmp_path / "w.pt").ok
    assert torch.equal(target["w"], WHOLE.float())


def test_a_wrapper_stays_one_where_the_model_is_on_the_meta_device():
    model = torch.nn.Linear(3, 7, bias=False)
    model.weight = torch.nn.Parameter(Wrapped(torch.empty(7, 3, device="meta")))
    reshard.set_model_state_dict(model, {"weight": WHOLE.float()})
    assert type(model.weight) is Wrapped
    assert torch.equal(model.weight.inner, WHOLE.float())


def test_the_values_are_the_only_part_that_is_named():
    with pytest.raises(KeyMismatchError, match=r"'inner' of app\.Other: where a part is the values, name no other"):
        reshard.register_tensor_class("app.Other", {"inner": "values", "scale": "whole"})
