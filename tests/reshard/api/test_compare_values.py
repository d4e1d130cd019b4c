"""What `compare` and `verify(against=)` call equal: values that are no tensors, and integers within a tolerance."""

from __future__ import annotations

import math
import shutil
import sys
from collections import OrderedDict, deque
from dataclasses import replace
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import reshard
from reshard import PerRank
from reshard.errors import OptionError
from tests.torch_releases import save_alone

W = torch.ones(3)


@pytest.mark.parametrize(
    ("a", "b", "are_equal"),
    [
        (np.zeros((2, 3)), np.zeros(3), False),
        (np.zeros((2, 3)), np.zeros((2, 3)), True),
        (np.array([]), np.array([7.0]), False),
        (np.array([]), np.array([]), True),
        (np.array([]), 5, False),
        (np.array([1.0]), 1.0, False),
        (np.array([1, 2]), np.array([1.0, 2.0]), False),
        (np.array([1.0, np.nan]), np.array([1.0, np.nan]), True),
        (np.zeros(2), -np.zeros(2), False),
        (np.zeros((2, 3)), np.asfortranarray(np.zeros((2, 3))), True),
        (np.zeros(2, ">f4"), -np.zeros(2, ">f4"), False),
        (True, 1, False),
        (True, True, True),
        (1, 1.0, True),
        (float("nan"), float("nan"), True),
    ],
)
def test_other_values(a: Any, b: Any, are_equal: bool, tmp_path: Path) -> None:
    """Also within values of each rank."""
    for x, y in ((a, b), (b, a)):
        one, other = {"w": W, "x": x}, {"w": W, "x": y}
        assert reshard.compare(one, other).ok == are_equal
        inner, outer = ({"w": W, "x": reshard.PerRank({"in": [v, (v, 2)]})} for v in (x, y))
        assert reshard.compare(inner, outer).ok == are_equal
    reshard.save({"w": W, "x": a}, tmp_path / "a")
    reshard.save({"w": W, "x": b}, tmp_path / "b")
    assert reshard.compare(tmp_path / "a", tmp_path / "b").ok == are_equal
    assert reshard.verify(tmp_path / "a", against=tmp_path / "b").ok == are_equal


class Mode(IntEnum):
    ON = 1


class Kind(StrEnum):
    A = "a"


@pytest.mark.parametrize(
    ("a", "b", "are_equal"),
    [
        ([], None, False),
        ((), None, False),
        ({"in": [[]]}, None, False),
        ({"in": []}, {"in": {}}, False),
        ([], (), True),
        ({}, None, True),
        ([1, W], (1, W), True),
        ({"in": W}, OrderedDict({"in": W}), True),
        ({1: W}, {"1": W}, True),
        ([W, 2], {0: W, 1: 2}, True),
        ({1}, frozenset({1}), True),
        (Mode.ON, Mode.ON, True),
        (Mode.ON, 1, False),
        (Kind.A, "a", False),
        ({Mode.ON}, {1}, False),
        (deque([Mode.ON]), deque([1]), False),
    ],
)
def test_structure_counts_alike_in_memory_and_in_files(a: Any, b: Any, are_equal: bool, tmp_path: Path) -> None:
    """Types of containers do not count, and an empty list is a value."""
    states = [{"w": W, **({} if value is None else {"x": value})} for value in (a, b)]
    paths = [tmp_path / "a", tmp_path / "b"]
    for state, path in zip(states, paths):
        reshard.save(state, path)
        assert reshard.compare(state, path).ok
    for one in (states[0], paths[0]):
        for other in (states[1], paths[1]):
            assert reshard.compare(one, other).ok == are_equal
            assert reshard.compare(other, one).ok == are_equal
    assert " (not types of containers; 1 equals 1.0); " in reshard.compare(*paths).covers


def test_values_of_other_ranks_are_said_to_be_left_open(tmp_path: Path) -> None:
    state = {"w": W, "rng": reshard.PerRank(3)}
    reshard.save(state, tmp_path / "a")
    facts = reshard.open(tmp_path / "a")
    several = replace(facts.contents, per_rank={"rng": {0: 3, 1: 4}})
    report = reshard.compare(type(facts)(several, "two ranks"), state)
    assert report.ok
    assert "not compared: values of other ranks: 1 ('rng')" in report.covers
    report = reshard.compare(type(facts)(several, "two ranks"), tmp_path / "a")
    assert [str(finding.message) for finding in report.findings] == [
        f"has values of ranks 0-1 in two ranks, of rank 0 in {tmp_path / 'a'}"
    ]


@pytest.mark.parametrize(
    ("x", "y", "distance"),
    [
        (2**60, 2**60 + 1, 1),
        (-(2**63), 2**63 - 1, 2**64),
        (-1, 1, 2),
        (-(2**32), -(2**32) - 1, 1),
        (2**63 - 1, 2**63 - 3, 2),
        (0, 0, 0),
    ],
)
def test_integers_are_not_rounded_before_their_distance_is(x: int, y: int, distance: int) -> None:
    sides = {"w": torch.tensor([7, x])}, {"w": torch.tensor([7, y])}
    assert reshard.compare(*sides, atol=distance + 0.5).ok
    assert reshard.compare(*sides, atol=0.5).ok == (distance == 0)
    measures = reshard.compare(*sides, measure=True).measures
    assert measures is not None
    assert measures["w"].largest == distance


@pytest.mark.parametrize(
    ("x", "y", "distance"),
    [
        (2**53 + 1, 2.0**53, 1.0),
        (-(2**53) - 1, -(2.0**53), 1.0),
        (2**63 - 1, 2.0**63, 1.0),
        (2**60 + 1, 2.0**60, 1.0),
        (0, -1e-20, 1e-20),
        (3, 2.75, 0.25),
        (2**40, 1e300, 1e300),
    ],
)
def test_integers_are_not_rounded_before_their_distance_from_a_float_is(x: int, y: float, distance: float) -> None:
    for sides in ((x, y), (y, x)):
        a, b = ({"w": torch.tensor([7, side], dtype=torch.int64 if side is x else torch.float64)} for side in sides)
        assert reshard.compare(a, b, atol=distance).ok
        report = reshard.compare(a, b, atol=distance * 0.99, measure=True)
        assert not report.ok
        assert report.measures is not None
        assert report.measures["w"].largest == distance


def test_a_measure_is_a_number_where_squares_overflow() -> None:
    """Once the page of differences had a NaN, which is not JSON."""
    a, b = ({"w": torch.tensor([side], dtype=torch.float64)} for side in (1.7e308, -1.7e308))
    report = reshard.compare(a, b, measure=True)
    assert report.measures is not None
    assert report.measures["w"].relative == sys.float_info.max
    assert "NaN," not in report.to_html()


@pytest.mark.parametrize("odd", [float("inf"), -float("inf"), float("nan")])
def test_no_integer_is_near_what_is_not_finite(odd: float) -> None:
    a, b = {"w": torch.tensor([2**53 + 1])}, {"w": torch.tensor([odd], dtype=torch.float64)}
    assert not reshard.compare(a, b, atol=1e300).ok
    assert not reshard.compare(b, a, atol=1e300).ok


@pytest.mark.parametrize(
    ("x", "y", "are_equal"),
    [
        (complex(math.nan, 1), complex(math.nan, 2), False),
        (complex(math.nan, 1), complex(math.nan, 1.25), True),
        (complex(1, math.nan), complex(math.nan, 1), False),
        (complex(math.inf, 1), complex(math.inf, 1.25), True),
        (complex(math.inf, 1), complex(math.inf, 2), False),
        (complex(math.inf, 1), complex(-math.inf, 1), False),
        (complex(3, 4), complex(3.25, 4.25), True),
        (complex(3, 4), complex(3.4, 4.4), False),
    ],
)
def test_both_parts_of_complex_numbers_count(x: complex, y: complex, are_equal: bool) -> None:
    a, b = ({"w": torch.tensor([value], dtype=torch.complex64)} for value in (x, y))
    report = reshard.compare(a, b, atol=0.5, measure=True)
    assert report.ok == are_equal
    assert report.measures is not None
    assert report.measures["w"].odd == ((not math.isfinite(abs(x)) and x.imag != y.imag) or x.real == -y.real)


def test_unsigned_integers() -> None:
    big = torch.tensor([2**64 - 1], dtype=torch.uint64)
    near = torch.tensor([2**64 - 2], dtype=torch.uint64)
    assert not reshard.compare({"w": big}, {"w": near}, atol=0.5).ok
    assert reshard.compare({"w": big}, {"w": near}, atol=1).ok
    assert not reshard.compare({"w": big}, {"w": torch.tensor([-1])}, atol=0.5).ok
    report = reshard.compare({"w": torch.tensor([True])}, {"w": torch.tensor([1])}, atol=0.5)
    assert report.ok
    assert report.covers.startswith("names, shapes, and objects compared (not dtypes or types of containers; 1 equals")


def test_small_neighbors(tmp_path: Path) -> None:
    """Tensors that follow each other in both files are read together. Each difference counts, wherever it is."""
    dtypes = (torch.float32, torch.int8, torch.complex64, torch.bfloat16)
    state = {f"t{i:03}": torch.arange(i % 7, dtype=torch.float32).to(dtypes[i % 4]) for i in range(200)}
    state |= {"step": torch.tensor(3.0), "turned": torch.arange(6).view(2, 3).T}
    other = {name: state[name].contiguous().clone() for name in sorted(state, reverse=True)}
    for name in ("t001", "t006", "step", "turned"):
        other[name].view(-1)[-1:] += 1
    reshard.save(state, tmp_path / "a")
    reshard.save(other, tmp_path / "b")
    reshard.convert(tmp_path / "b", tmp_path / "c", format="dcp")
    for b in ("b", "c"):
        report = reshard.compare(tmp_path / "a", tmp_path / b)
        assert {finding.fqn for finding in report.findings} == {"t001", "t006", "step", "turned"}


def test_damage_among_small_neighbors(tmp_path: Path) -> None:
    """Only tensors of the damaged block count as damaged, although they are read with others."""
    state = {f"t{i:03}": torch.full((512,), float(i)) for i in range(200)}
    reshard.save(state, tmp_path / "a")
    reshard.save(state, tmp_path / "b")
    (file,) = (tmp_path / "b").rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    report = reshard.compare(tmp_path / "a", tmp_path / "b")
    assert "t199" in report.damaged
    assert len(report.damaged) <= (64 << 10) // 2048 + 1
    assert {finding.fqn for finding in report.findings} == report.damaged.keys()
    assert all("was changed since it was written" in error for error in report.damaged.values())


class Scaler:
    """Of a class that a checkpoint's reader does not know."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def __reduce__(self) -> tuple[Any, ...]:
        return Scaler, (1,), {"state": self.state}


@pytest.mark.parametrize(
    ("a", "b", "are_equal"),
    [
        (Scaler(1), Scaler(1), True),
        (Scaler(1), Scaler(2), False),
        (Scaler(1), Scaler(True), False),
        (Scaler(1), 1, False),
        ([Scaler({"x": [Scaler(1)]})], [Scaler({"x": [Scaler(1)]})], True),
        ([Scaler({"x": [Scaler(1)]})], [Scaler({"x": [Scaler(2)]})], False),
        (Scaler(W), Scaler(W + 1), False),
    ],
)
def test_objects_of_unknown_classes(a: Any, b: Any, are_equal: bool, tmp_path: Path) -> None:
    """Two are equal if all that they hold is plain data, and equal."""
    for name, value in (("a", a), ("b", b)):
        torch.save({"w": W, "x": value}, tmp_path / f"{name}.pt")
    assert reshard.compare(tmp_path / "a.pt", tmp_path / "b.pt").ok == are_equal
    assert reshard.verify(tmp_path / "b.pt", against=tmp_path / "a.pt").ok == are_equal


@pytest.mark.parametrize("tolerance", ["rtol", "atol"])
def test_fingerprints_and_a_tolerance_are_refused_together(tolerance: str) -> None:
    state = {"w": torch.ones(2)}
    with pytest.raises(OptionError, match="by_fingerprint compares bit by bit: pass it, or rtol and atol"):
        reshard.compare(state, state, by_fingerprint=True, **{tolerance: 1e-3})  # type: ignore[arg-type]


@pytest.mark.parametrize("turned", [False, True])
def test_damaged_values_that_are_no_tensors_are_found_beside_the_rest(tmp_path: Path, turned: bool) -> None:
    state = {"w": torch.arange(8.0), "own": PerRank(torch.arange(100000.0)), "cfg": {"name": "abcdefghijkl"}}
    reshard.save(state, tmp_path / "a")
    reshard.save(state | {"w": torch.zeros(8)}, tmp_path / "b")
    save_alone({"w": state["w"], "cfg": state["cfg"]}, checkpoint_id=tmp_path / "c")
    save_alone({"w": torch.zeros(8), "cfg": state["cfg"]}, checkpoint_id=tmp_path / "d")
    for folder, at in (("b", -200_000), ("d", b"abcdefghijkl")):
        (file,) = (path for path in (tmp_path / folder).rglob("*") if path.suffix in (".safetensors", ".distcp"))
        data = bytearray(file.read_bytes())
        data[at if isinstance(at, int) else data.index(at)] ^= 2
        file.write_bytes(data)

    for sides, key in ((("a", "b"), "own"), (("c", "d"), "cfg.name")):
        report = reshard.compare(*(tmp_path / side for side in (sides[::-1] if turned else sides)))
        assert {finding.fqn for finding in report.findings} == {"w", key}
        assert report.damaged.keys() == {key}
        assert "was changed since it was written" in report.damaged[key]


@pytest.mark.parametrize("turned", [False, True])
def test_a_damaged_value_with_items_is_not_on_one_side_only(tmp_path: Path, turned: bool) -> None:
    """Its items are unknown, so they are no names that the other side alone has."""
    save_alone({"w": torch.zeros(8), "list": ["abcdefghijkl", 2], "list2": [3]}, checkpoint_id=tmp_path / "good")
    bad = shutil.copytree(tmp_path / "good", tmp_path / "bad")
    (file,) = bad.glob("*.distcp")
    file.write_bytes(file.read_bytes().replace(b"abcdefghijkl", b"abcdefghijkm"))

    sides = [tmp_path / "good", bad]
    report = reshard.compare(*(sides[::-1] if turned else sides))
    assert [finding.fqn for finding in report.findings] == ["list"]
    assert list(report.damaged) == ["list"]
    assert str(file) in report.damaged["list"]
