"""Tensor subclasses that flatten to plain tensors are saved and loaded as these."""

from __future__ import annotations

import pytest
import torch

import reshard
from reshard.errors import KeyMismatchError


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
