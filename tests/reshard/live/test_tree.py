"""Nests come apart and together again without loss, and plain objects survive JSON."""

from __future__ import annotations

import datetime
import json
import math
from collections import UserDict, deque, namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import reshard
from reshard.errors import FormatError, KeyMismatchError
from reshard.live.plain_data import decode_plain, encode_plain
from reshard.live.tree import CustomValue, copy_containers, flatten, leaves_of, map_leaves, unflatten
from reshard.state import IntKey, key_of, path_from_json, path_to_json

keys = st.one_of(st.text(max_size=3), st.integers(-2, 12))
leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.floats(allow_nan=False))
nests = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=20,
)


def typed(value: Any) -> Any:
    """The value with the types of its containers made visible to ==."""
    if isinstance(value, dict):
        return {k: typed(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [typed(v) for v in value])
    return (type(value).__name__, value)


@given(nests)
def test_flatten_and_back(nest: Any) -> None:
    """Law: what comes apart goes together again, container types, empty ones and int keys included."""
    try:
        flat = flatten(nest)
    except KeyMismatchError:
        return  # {"a.b": 1, "a": {"b": 2}} and the like have no unique dotted keys

    assert typed(unflatten(flat.leaves, flat.containers)) == typed(nest)
    assert {key_of(path) for path in flat.leaves} == {".".join(map(str, path)) for path in flat.leaves}
    for path in flat.leaves:
        assert path_from_json(json.loads(json.dumps(path_to_json(path)))) == path


def test_paths_say_how_each_leaf_is_reached() -> None:
    flat = flatten({"a.b": [1, {5: 2}], "empty": {}})

    assert flat.leaves == {("a.b", 0): 1, ("a.b", 1, IntKey(5)): 2}
    assert flat.containers == {("empty",): "dict"}
    assert [key_of(path) for path in flat.leaves] == ["a.b.0", "a.b.1.5"]


def test_sizes_and_dicts_of_other_keys_are_leaves() -> None:
    state = {"s": torch.Size([1]), "d": {(1, 2): 3}, "b": {True: 1}}

    assert flatten(state).leaves == {(key,): value for key, value in state.items()}


def test_sequences_of_other_classes_are_taken_apart_and_say_of_which() -> None:
    point = namedtuple("Point", "x y")
    flat = flatten({"p": point(1, 2), "d": deque([3], maxlen=2)})

    assert flat.leaves == {("p", 0): 1, ("p", 1): 2, ("d", 0): 3}
    assert flat.containers == {("p",): f"tuple:{__name__}.Point", ("d",): "deque:2"}
    back = unflatten(flat.leaves, flat.containers)
    assert back == {"p": CustomValue(f"{__name__}.Point", (1, 2)), "d": deque([3])}
    assert back["d"].maxlen == 2


@pytest.mark.parametrize("kind", ["deque:x", "deque:-1", "set", "tuples", ""])
def test_unknown_kinds_of_containers_are_refused(kind: str) -> None:
    with pytest.raises(FormatError, match="is not a kind of container"):
        unflatten({("a", 0): 1}, {("a",): kind})


@pytest.mark.parametrize(
    "nest",
    [
        {"a.b": 1, "a": {"b": 2}},
        {"a": [0], "a.0": 1},
        {"a.b": {"x": 1}, "a": {"b": {"y": 2}}},
        {"a": {"": 1}, "a.": {}},
        {"1": 0, 1: 1, "[1]": 2},
    ],
)
def test_two_values_of_one_key_are_refused(nest: Any) -> None:
    with pytest.raises(KeyMismatchError, match="have the same key"):
        flatten(nest)


def test_a_number_and_the_same_as_text_are_keys_of_one_dict() -> None:
    nest = {"d": {"1": "text", 1: "int", 2: "other"}}
    flat = flatten(nest)

    assert {key_of(path): leaf for path, leaf in flat.leaves.items()} == {
        "d.1": "text", "d.[1]": "int", "d.2": "other"
    }  # fmt: skip
    again = {path_from_json(path_to_json(path)): leaf for path, leaf in flat.leaves.items()}
    assert [key_of(path) for path in again] == ["d.1", "d.[1]", "d.2"]
    assert unflatten(again, flat.containers) == nest


def test_a_container_that_contains_itself_is_refused() -> None:
    loop: dict[str, Any] = {"a": {}}
    loop["a"]["b"] = loop
    with pytest.raises(KeyMismatchError, match=r"\['a'\]\['b'\] contains itself"):
        flatten(loop)


def test_a_bottomless_nest_is_refused() -> None:
    nest: Any = 1
    for _ in range(5000):
        nest = [nest]
    with pytest.raises(KeyMismatchError, match="nested too deeply"):
        flatten(nest)


def test_leaves_of_the_callers_choice() -> None:
    flat = flatten({"betas": [0.9, 0.95], "x": [1]}, is_leaf=lambda value: value == [0.9, 0.95])
    assert flat.leaves == {("betas",): [0.9, 0.95], ("x", 0): 1}


def test_a_path_through_a_leaf_is_refused() -> None:
    for leaves_ in ({("a",): 1, ("a", "b"): 2}, {("a", "b"): 2, ("a",): 1}, {(): 1, ("a",): 2}):
        with pytest.raises(KeyMismatchError, match="a value and a container at once"):
            unflatten(leaves_)


def test_items_of_sequences_with_gaps_stay_where_they_are() -> None:
    assert unflatten({("l", 3): "b", ("l", 1): "a"}) == {"l": [None, "a", None, "b"]}


_DAY = datetime.timedelta(hours=23)
_OFFSETS = st.timedeltas(-_DAY, _DAY).filter(lambda offset: not offset or abs(offset.total_seconds()) >= 1)
"""Python reads a shorter one as none, and so a time with it is refused."""

plain_values = st.recursive(
    st.one_of(
        leaves,
        st.binary(max_size=4),
        st.floats(),
        st.complex_numbers(),
        st.just(torch.Size([2, 0])),
        st.sampled_from([torch.device("cuda:1"), torch.device("cpu"), torch.device("meta")]),
        st.just(torch.int8),
        st.timedeltas(),
        st.dates(),
        st.datetimes(timezones=st.none() | _OFFSETS.map(datetime.timezone)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(
            st.one_of(st.text(max_size=3), st.sampled_from(["$tuple", "$x"]), st.integers()), inner, max_size=3
        ),
        st.sets(st.integers(), max_size=3),
        st.frozensets(st.text(max_size=2), max_size=3),
    ),
    max_leaves=10,
)


@given(plain_values)
def test_plain_data_survives_json(value: Any) -> None:
    """Law: decode(encode(x)) is x, bit for bit, through JSON text."""
    text = json.dumps(encode_plain(value), allow_nan=False)
    assert exact(decode_plain(json.loads(text))) == exact(value)


def test_times_of_zones_with_rules_are_no_plain_data() -> None:
    time = datetime.datetime(2026, 11, 26, tzinfo=ZoneInfo("UTC"))
    with pytest.raises(FormatError, match=r"datetime\.datetime is not plain data"):
        encode_plain(time)
    with pytest.raises(FormatError, match=r"the data under '\$timedelta' cannot be read"):
        decode_plain({"$timedelta": [10**12, 0, 0]})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.get_rng_state(),
        torch.tensor(float("nan"), dtype=torch.bfloat16),
        torch.empty(0, 3, dtype=torch.int16),
        torch.arange(6.0).reshape(2, 3).T,
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]).conj(),
        torch.nn.Parameter(torch.ones(2, dtype=torch.float8_e4m3fn), requires_grad=False),
    ],
)
def test_small_tensors_among_plain_data_where_that_is_asked_for(tensor: torch.Tensor) -> None:
    nest = {"torch": tensor, "numpy": (3, [tensor])}
    with pytest.raises(FormatError, match="a Tensor is in a place that only plain data can be in"):
        encode_plain(nest)
    back = decode_plain(json.loads(json.dumps(encode_plain(nest, tensor_bytes=20_000))))
    for found in (back["torch"], back["numpy"][1][0]):
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert found.tolist() == tensor.tolist() or tensor.isnan().all()
    with pytest.raises(FormatError, match="too large for plain data"):
        encode_plain([tensor, torch.zeros(1000)], tensor_bytes=3999)


def test_tensors_that_are_never_plain_data() -> None:
    for tensor in (torch.eye(2).to_sparse(), torch.ones(2, device="meta")):
        with pytest.raises(FormatError, match="is not a plain tensor"):
            encode_plain({"x": tensor}, tensor_bytes=1000)


@pytest.mark.parametrize(
    "data",
    [["float32", [2], "AAAA"], ["float32", [-1], ""], ["float32", [0, 2**70], ""], ["object", [0], ""], ["int8"], 5],
)
def test_damaged_tensors_among_plain_data(data: Any) -> None:
    with pytest.raises(FormatError):
        decode_plain({"$tensor": data})


def exact(value: Any) -> Any:
    """The value with types and the bits of floats made visible to ==."""
    if isinstance(value, dict):
        return [(exact(k), exact(v)) for k, v in value.items()]
    if isinstance(value, (set, frozenset)):
        return (type(value), sorted(map(repr, value)))
    if isinstance(value, (list, tuple)):
        return (type(value), [exact(v) for v in value])
    return (type(value), repr(value))


def test_numpy_survives_json() -> None:
    value = {"n": np.float32(1.5), "a": np.arange(6, dtype=">i2").reshape(2, 3), "z": np.zeros((0, 3), bool)}
    result = decode_plain(json.loads(json.dumps(encode_plain(value))))

    assert result["n"] == value["n"]
    assert type(result["n"]) is np.float32
    for key in "az":
        assert np.array_equal(result[key], value[key])
        assert (result[key].dtype, result[key].shape) == (value[key].dtype, value[key].shape)
    result["a"][0, 0] = 7  # not a read-only view


def test_signs_of_zero_and_nan_stay() -> None:
    assert math.copysign(1, decode_plain(json.loads(json.dumps(encode_plain(-0.0))))) == -1
    assert math.isnan(decode_plain(encode_plain(float("nan"))))


@pytest.mark.parametrize("value", [object(), lambda: 0, torch.ones(1), np.array([object()]), Exception("x")])
def test_other_objects_are_refused_by_type(value: Any) -> None:
    with pytest.raises(FormatError, match=type(value).__name__):
        encode_plain({"deep": [value]})


def test_a_loop_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(FormatError, match="contains itself"):
        encode_plain(loop)


@pytest.mark.parametrize(
    "data", [{"$nope": 1}, {"$tuple": 1}, {"$dtype": "float7"}, {"$number": ["O", ""]}, {"$bytes": "?"},
             {"$tuple": [], "x": 1}, {"$array": ["<f4", "AAAA", [7]]}, {"$float": "x"}, {"$dict": [1]}]
)  # fmt: skip
def test_data_that_encode_did_not_write_is_refused(data: Any) -> None:
    with pytest.raises(FormatError):
        decode_plain([data])


@pytest.mark.parametrize("data", [[1.5], [None], [{"int": "5"}], [{"x": 1}], [True]])
def test_bad_paths_are_refused(data: Any) -> None:
    with pytest.raises(FormatError, match="is not a part of a key path"):
        path_from_json(data)


def test_leaves_are_changed_in_new_containers_and_told_by_path() -> None:
    inner = {5: (1, {"b": 2})}
    nest = {"a": [inner, deque([3])], "empty": {}}
    assert leaves_of(nest) == {("a", 0, 5, 0): 1, ("a", 0, 5, 1, "b"): 2, ("a", 1): deque([3])}
    assert leaves_of(nest, lambda value: value is inner) == {("a", 0): inner, ("a", 1): deque([3])}

    changed = map_leaves(lambda path, leaf: (path[-1], leaf), nest)
    assert changed == {"a": [{5: ((0, 1), {"b": ("b", 2)})}, (1, deque([3]))], "empty": {}}
    again = copy_containers(nest)
    assert again == nest
    assert again["a"] is not nest["a"]
    assert again["a"][1] is nest["a"][1]


class _Batch(UserDict[str, torch.Tensor]):
    """Of tensors, as a TensorDict is: it iterates over rows, and has as many of them."""

    def __iter__(self) -> Iterator[Any]:
        return iter([{key: value[i] for key, value in self.data.items()} for i in range(len(self))])

    def __len__(self) -> int:
        return 3

    def keys(self) -> Any:
        return self.data.keys()

    def values(self) -> Any:
        return self.data.values()

    def items(self) -> Any:
        return self.data.items()


def test_a_mapping_that_iterates_over_something_else_is_taken_apart_by_its_keys(tmp_path: Path) -> None:
    rows = torch.arange(6.0).reshape(3, 2)
    reshard.save({"data": _Batch({"rows": rows, "more": rows + 1})}, tmp_path / "saved")

    target = _Batch({"rows": torch.zeros(3, 2), "more": torch.zeros(3, 2)})
    report = reshard.load({"data": target}, tmp_path / "saved")

    assert report.ok
    assert sorted(report.loaded) == ["data.more", "data.rows"]
    assert torch.equal(target.data["rows"], rows)
    assert torch.equal(target.data["more"], rows + 1)
