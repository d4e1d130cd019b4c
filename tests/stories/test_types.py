"""Values of every type come back as what they were, or are refused with their type's name: never as something else."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import fractions
import io
import pathlib
import types
import typing
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import reshard
from reshard.errors import FormatError, KeyMismatchError, ReshardError
from reshard.live.tree import CustomValue

Point = collections.namedtuple("Point", "x y")


class Pair(typing.NamedTuple):
    weight: Any
    step: int


class Color(enum.Enum):
    RED = 1
    BLUE = ("b", 2)


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mode(str, enum.Enum):  # noqa: UP042  a StrEnum is written as its value, this one is not
    FAST = "fast"
    SLOW = "slow"


class Bits(enum.Flag):
    A = 1
    B = 2


class MyInt(int):
    def __index__(self) -> int:
        return 77

    def __str__(self) -> str:
        return "lies"


class MyStr(str):
    __slots__ = ()


class MyFloat(float):
    __slots__ = ()


class MyBytes(bytes):
    pass


class MyTuple(tuple):
    __slots__ = ()


class MyList(list):
    pass


class MyDict(dict):
    pass


class Named(int):
    """With an attribute, which nothing saves."""

    def __new__(cls, value: int, name: str = "") -> Named:
        self = super().__new__(cls, value)
        if name:
            self.name = name
        return self


def ones(value: float) -> torch.Tensor:
    return torch.full((2,), value)


ALWAYS = {
    "None": (None, 1),
    "bool": (True, False),
    "int": (-(2**70), 0),
    "int of 5000 digits": (10**5000, 0),
    "negative int of 5000 digits": (-(10**5000) + 1, 0),
    "float": (-0.0, 1.0),
    "nan": (float("nan"), 1.0),
    "complex": (complex(-0.0, float("inf")), 0j),
    "str": ("ä\0", ""),
    "bytes": (b"\xff", b""),
    "bytearray": (bytearray(b"\xff"), bytearray()),
    "date": (datetime.date(2020, 1, 1), datetime.date(1999, 1, 1)),
    "datetime": (datetime.datetime(2020, 1, 1, 2, fold=1), datetime.datetime(1999, 1, 1)),
    "datetime with an offset": (datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC), datetime.datetime(1999, 1, 1)),
    "timedelta": (datetime.timedelta(-1, 2, 3), datetime.timedelta()),
    "list": ([1, [2]], [0]),
    "tuple": ((1, (2,)), (0,)),
    "nothing in them": ([(), [], {}, set()], []),
    "set": ({1, "a", None}, set()),
    "frozenset": (frozenset([1]), frozenset()),
    "range": (range(1, 10**30, 3), range(0)),
    "deque": (collections.deque([1, 2]), collections.deque()),
    "deque of a largest length": (collections.deque([1, (2,)], maxlen=4), collections.deque([5], maxlen=2)),
    "dict": ({"a": 1, 2: "b"}, {"a": 0}),
    "dict of other keys": ({1.5: 1, None: 2, (1, "a"): 3, True: 4, b"x": 5}, {}),
    "torch.Size": (torch.Size([2, 0]), torch.Size([])),
    "torch.dtype": (torch.bfloat16, torch.int8),
    "torch.device": (torch.device("cuda:1"), torch.device("cpu")),
    "numpy scalar": (np.float16(1.5), np.float16(0)),
    "numpy bool": (np.bool_(True), np.bool_(False)),
    "numpy array": (np.arange(6, dtype=">i2").reshape(2, 3), np.zeros(1, dtype=">i2")),
    "numpy array of nothing": (np.zeros((0, 3), np.complex64), np.zeros(1, np.complex64)),
}
"""Come back whatever is in their place: a value, and another of its type."""

WHERE_THE_TARGET_HAS_THEM = {
    "namedtuple": (Point(1, [2]), Point(0, [0])),
    "namedtuple in a list": ([Point(1, 2), Point(3, 4)], [Point(0, 0)]),
    "enum": (Color.BLUE, Color.RED),
    "IntEnum": (Level.HIGH, Level.LOW),
    "str enum": (Mode.SLOW, Mode.FAST),
    "Flag": (Bits.A | Bits.B, Bits.A),
    "int": (MyInt(3), MyInt(0)),
    "str": (MyStr("a"), MyStr("")),
    "float": (MyFloat(-0.0), MyFloat(1)),
    "bytes": (MyBytes(b"a"), MyBytes(b"")),
    "tuple": (MyTuple((1, 2)), MyTuple()),
    "list": (MyList([1, 2]), MyList()),
    "in a set": ({Level.LOW, Level.HIGH}, {Level.LOW}),
    "as keys": ({Color.RED: 1, Color.BLUE: [2]}, {Color.RED: 0}),
    "deep": ({"a": [({"b": Color.RED},)]}, {"a": [({"b": Color.BLUE},)]}),
    "numpy text": (np.str_("a"), np.str_("")),
}
"""Made by the class that the target brings, and refused by that name where it brings none."""

OF_THE_TARGETS_KIND = {
    "OrderedDict": (collections.OrderedDict(b=1, a=2), collections.OrderedDict()),
    "defaultdict": (collections.defaultdict(list, a=[1]), collections.defaultdict(list)),
    "Counter": (collections.Counter("aab"), collections.Counter()),
    "dict of a class": (MyDict(a=1), MyDict()),
    "MappingProxyType": (types.MappingProxyType({"a": 1}), types.MappingProxyType({})),
    "text keys of a class": ({Mode.FAST: 1}, {Mode.FAST: 0}),
    "int keys of a class": ({Level.LOW: 1}, {Level.LOW: 0}),
    "BytesIO": (io.BytesIO(b"a"), io.BytesIO()),
}
"""Dicts of any kind are as the target's; a plain dict where it has none, with equal keys and values."""

REFUSED = {
    "Fraction": fractions.Fraction(1, 3),
    "Decimal": decimal.Decimal("1.5"),
    "PosixPath": pathlib.PurePosixPath("/a"),
    "time": datetime.time(12),
    "UUID": uuid.UUID(int=1),
    "layout": torch.strided,
    "slice": slice(1),
    "memoryview": memoryview(b"a"),
    "type": int,
    "function": ones,
    "SimpleNamespace": types.SimpleNamespace(a=1),
    "Namespace": argparse.Namespace(a=1),
    "MaskedArray": np.ma.masked_array([1, 2], [0, 1]),
    "recarray": np.rec.array([(1, 2.0)]),
    "datetime64": np.datetime64("2020"),
    "ndarray": np.array([None]),
    "Named.* has attributes of its own": Named(3, "x"),
    "keys": {}.keys(),
}


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal to the last bit, types included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple, collections.deque)):
        limits = getattr(a, "maxlen", None) == getattr(b, "maxlen", None)
        return limits and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (dict, types.MappingProxyType)):
        return same(list(a), list(b)) and same(list(a.values()), list(b.values()))
    if isinstance(a, (set, frozenset)):
        return same(sorted(a, key=repr), sorted(b, key=repr))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, io.BytesIO):
        return a.getvalue() == b.getvalue()
    return a == b if isinstance(a, int) else repr(a) == repr(b) and (a == b or a != a)


def loaded(path: Path, target: Any) -> Any:
    state = {"v": target, "w": ones(0)}
    report = reshard.load(state, path)
    assert report.ok or report.changed_classes  # where the value in its place was of another class
    assert torch.equal(state["w"], ones(5))
    return state["v"]


def saved(path: Path, value: Any) -> Path:
    reshard.save({"v": value, "w": ones(5)}, path)
    return path


def refused(path: Path, value: Any) -> str:
    """What the library says if it does not save a value; nothing if it does."""
    try:
        saved(path, value)
    except ReshardError as error:
        return str(error)
    return ""


def of(table: dict[str, Any]) -> Any:
    return pytest.mark.parametrize("name", table)


@of(ALWAYS)
def test_plain_values_come_back_whatever_is_in_their_place(name: str, tmp_path: Path) -> None:
    value, other = ALWAYS[name]
    saved(tmp_path, value)

    assert same(loaded(tmp_path, other), value)
    assert same(loaded(tmp_path, None), value)
    assert same(reshard.open(tmp_path).nested()["v"], value)
    assert reshard.verify(tmp_path).ok
    assert reshard.compare(tmp_path, {"v": value, "w": ones(5)}).ok


@of(WHERE_THE_TARGET_HAS_THEM)
def test_values_of_classes_come_back_where_the_target_has_one_and_are_refused_by_name_elsewhere(
    name: str, tmp_path: Path
) -> None:
    value, other = WHERE_THE_TARGET_HAS_THEM[name]
    saved(tmp_path / "s", value)

    assert same(loaded(tmp_path / "s", other), value)
    assert same(loaded(tmp_path / "s", value), value)
    for target in (None, 1, {}, []):
        with pytest.raises(
            KeyMismatchError, match=r"v: saved as a [\w.]+\.\w+, which a load restores only if the target"
        ):
            loaded(tmp_path / "s", target)
    assert reshard.compare(tmp_path / "s", {"v": value, "w": ones(5)}).ok
    own = {"v": reshard.PerRank(other), "w": ones(0)}
    reshard.save({"v": reshard.PerRank(value), "w": ones(5)}, tmp_path / "own")
    reshard.load(own, tmp_path / "own")
    assert same(own["v"].value, value)
    with pytest.raises(KeyMismatchError, match="each rank's own 'v' was saved as a "):
        reshard.load({"v": reshard.PerRank(), "w": ones(0)}, tmp_path / "own")
    target = {"v": other, "w": ones(0)}
    reshard.redistribute({"v": value, "w": ones(5)}, target)
    assert same(target["v"], value)
    reshard.convert(tmp_path / "s", tmp_path / "again")
    assert same(loaded(tmp_path / "again", other), value)


@of(OF_THE_TARGETS_KIND)
def test_dicts_are_of_the_kind_that_the_target_has(name: str, tmp_path: Path) -> None:
    value, other = OF_THE_TARGETS_KIND[name]
    saved(tmp_path, value)

    assert same(loaded(tmp_path, other), value)
    state = {"v": None, "w": ones(0)}
    report = reshard.load(state, tmp_path)
    if isinstance(value, io.BytesIO):
        assert same(state["v"], value)
        return
    assert state["v"] == dict(value)
    assert not report.ok
    assert set(report.changed_classes) == {"v"}
    assert report.changed_classes["v"][1] == "dict"
    assert f"changed_classes 1 ('v: saved {report.changed_classes['v'][0]}, not dict')" in repr(report)
    reshard.convert(tmp_path, tmp_path / "again")
    assert reshard.load({"v": {}, "w": ones(0)}, tmp_path / "again").changed_classes == report.changed_classes
    assert reshard.open(tmp_path).nested()["v"] == dict(value)


def test_what_is_of_another_class_is_told_wherever_it_is(tmp_path: Path) -> None:
    inner = {"a": [{"b": collections.OrderedDict(c=1)}], "d": collections.OrderedDict()}
    saved(tmp_path, inner)

    told = reshard.load({"v": {}, "w": ones(0)}, tmp_path, dry_run=True)
    assert told.changed_classes == dict.fromkeys(("v.a.0.b", "v.d"), ("collections.OrderedDict", "dict"))
    target = {"v": {"a": [{"b": collections.OrderedDict()}], "d": collections.OrderedDict()}, "w": ones(0)}
    assert reshard.load(target, tmp_path).ok
    assert same(target["v"], inner)


def test_mappings_with_tensors_stay_as_the_target_has_them(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    reshard.save({"model": model.state_dict()}, tmp_path)

    assert reshard.load({"model": dict(model.state_dict())}, tmp_path).ok
    assert '"version":1' in (tmp_path / "manifest.json").read_text()


def test_a_number_in_the_place_of_a_tensor_is_told_and_so_is_the_reverse(tmp_path: Path) -> None:
    reshard.save({"v": 3, "w": torch.tensor(4.0)}, tmp_path)
    state = {"v": torch.tensor(0.0), "w": 1.0}

    report = reshard.load(state, tmp_path)

    assert report.cast == {"v": ("int", "float32"), "w": ("float32", "float")}
    assert (state["v"].item(), state["w"]) == (3.0, 4.0)


@of(REFUSED)
def test_other_values_are_refused_by_name(name: str, tmp_path: Path) -> None:
    for nest in (REFUSED[name], [REFUSED[name]], {"a": (REFUSED[name],)}, {1.5: REFUSED[name]}):
        with pytest.raises(FormatError, match=f"the value under 'v.*{name}"):
            saved(tmp_path, nest)


def test_what_a_checkpoint_opened_without_a_target_shows_is_no_other_type(tmp_path: Path) -> None:
    saved(tmp_path, {"p": Point(1, 2), "c": Color.RED, "n": MyInt(3)})
    nested = reshard.open(tmp_path).nested()["v"]

    assert nested["p"] == CustomValue(f"{__name__}.Point", (1, 2))
    assert nested["c"] == CustomValue(f"{__name__}.Color", ("RED", 1))
    assert nested["n"] == CustomValue(f"{__name__}.MyInt", 3)


def test_a_member_that_now_has_another_name_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, Color.RED)
    other = enum.Enum("Color", {"GREEN": 1}, module=__name__)

    with pytest.raises(KeyMismatchError, match=r"v: saved as a .*Color"):
        loaded(tmp_path, other.GREEN)  # type: ignore[attr-defined]


CONTAINERS = {
    "namedtuple": lambda v: Pair(ones(v), int(v)),
    "namedtuples deep": lambda v: [{"a": Pair(Pair(ones(v), 1), int(v))}],
    "deque": lambda v: collections.deque([ones(v), ones(v + 1)], maxlen=3),
    "list": lambda v: MyList([ones(v), int(v)]),
    "tuple": lambda v: MyTuple((ones(v), int(v))),
    "what torch returns": lambda v: torch.max(torch.full((2, 3), v), dim=0),
    "OrderedDict": lambda v: collections.OrderedDict(a=ones(v)),
    "dict": lambda v: MyDict(a=ones(v)),
    "keys of an enum": lambda v: {Mode.FAST: ones(v), Mode.SLOW: int(v)},
    "number keys of an enum": lambda v: {Level.LOW: ones(v), Level.HIGH: int(v)},
}


def flat(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value.dtype, value.tolist()]
    if isinstance(value, dict):
        return [type(value), [(type(k), k, flat(v)) for k, v in value.items()]]
    if isinstance(value, (list, tuple, collections.deque)):
        return [type(value), [flat(v) for v in value]]
    return [type(value), value]


@of(CONTAINERS)
def test_tensors_in_containers_of_classes_are_filled_where_they_are(name: str, tmp_path: Path) -> None:
    make = CONTAINERS[name]
    saved(tmp_path, make(1.0))
    target = make(0.0)

    found = loaded(tmp_path, target)
    assert flat(found) == flat(make(1.0))
    state = {"v": make(0.0), "w": ones(0)}
    reshard.redistribute({"v": make(1.0), "w": ones(5)}, state)
    assert flat(state["v"]) == flat(make(1.0))
    with torch.device("meta"):
        empty = make(0.0)
    assert flat(loaded(tmp_path, empty)) == flat(make(1.0))


def test_depth_is_the_same_for_saves_and_loads(tmp_path: Path) -> None:
    """What is saved can be loaded, opened and verified; what is deeper is refused by the library's own error."""
    wraps: dict[str, Any] = {
        "list": lambda v: [v],
        "dict": lambda v: {"a": v},
        "tuple": lambda v: (v,),
        "deque": lambda v: collections.deque([v]),
        "plain": lambda v: {1.5: v},
        "set": lambda v: frozenset([v]),
        "namedtuple": lambda v: Point(v, 1),
    }
    for number, (name, wrap) in enumerate(wraps.items()):
        for depth in (10, 90, 95, 97, 98, 99, 100, 101, 150, 300, 500, 900, 3000):
            value: Any = 1
            for _ in range(depth):
                value = wrap(value)
            path = tmp_path / f"{number}-{depth}"
            if refusal := refused(path, value):
                assert depth > 90, name
                assert "nested" in refusal
                continue
            assert depth <= 101, name
            other: Any = wrap(0)
            found = loaded(path, other)
            assert repr(found) == repr(value)
            assert reshard.verify(path).ok
            reshard.open(path).nested()


BOTH = {
    "tensors": ({"1": ones(1), 1: ones(2), 2: ones(3)}, {"1": ones(0), 1: ones(0), 2: ones(0)}),
    "values": ({"1": 1, 1: 2, "t": ones(3)}, {"1": 0, 1: 0, "t": ones(0)}),
    "values alone": ({"1": 1, 1: 2}, {"1": 0, 1: 0}),
    "dicts": ({"1": {"x": 1}, 1: {"x": 2}, "t": ones(3)}, {"1": {"x": 0}, 1: {"x": 0}, "t": ones(0)}),
    "dicts of tensors": ({"1": {"x": ones(1)}, 1: {"x": ones(2)}}, {"1": {"x": ones(0)}, 1: {"x": ones(0)}}),
    "other dicts": ({"1": {"x": 1}, 1: {"y": 2}, "t": ones(3)}, {"1": {"x": 0}, 1: {"y": 0}, "t": ones(0)}),
    "empty ones": ({"1": {}, 1: [], "t": ones(3)}, {"1": {}, 1: [2], "t": ones(0)}),
}


@of(BOTH)
def test_a_number_and_the_same_as_text_in_one_dict(name: str, tmp_path: Path) -> None:
    value, other = BOTH[name]
    saved(tmp_path, value)

    assert set(reshard.open(tmp_path).nested()["v"]) == set(value)
    report = reshard.load(state := {"v": other, "w": ones(0)}, tmp_path)
    assert report.ok
    assert flat(state["v"]) == flat(value)


def test_only_one_of_a_number_and_the_same_as_text_gets_its_own(tmp_path: Path) -> None:
    """In the checkpoint, or in the target; another's value is never taken."""
    reshard.save({"1": ones(1), 1: ones(2)}, tmp_path / "both")
    for key, value in (("1", 1), (1, 2)):
        target = {key: ones(0)}
        with pytest.raises(KeyMismatchError, match="1 unexpected"):
            reshard.load(target, tmp_path / "both")
        reshard.load(target, tmp_path / "both", strict=False)
        assert torch.equal(target[key], ones(value))
        reshard.save({key: ones(value)}, tmp_path / "one")
        both = {"1": ones(0), 1: ones(0)}
        report = reshard.load(both, tmp_path / "one", strict=False)
        assert torch.equal(both[key], ones(value))  # type: ignore[index]
        assert torch.equal(both[1 if key == "1" else "1"], ones(0))
        assert len(report.missing) == 1


@pytest.mark.parametrize("kind", [argparse.Namespace, types.SimpleNamespace])
def test_a_value_of_a_class_in_a_namespace_is_refused_by_name_where_the_target_has_none(
    kind: type, tmp_path: Path
) -> None:
    saved(tmp_path, {"step": 3, "color": Color.RED})

    assert loaded(tmp_path, kind(step=0, color=Color.BLUE)) == kind(step=3, color=Color.RED)
    with pytest.raises(
        KeyMismatchError, match=r"v: saved as a [\w.]+\.Color, which a load restores only if the target"
    ):
        loaded(tmp_path, kind(step=0, color=None))
