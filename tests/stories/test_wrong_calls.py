"""Calls with the wrong kind of thing in each place: each is refused by the library's own error, which says what is
wanted, and nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.errors import KeyMismatchError, ReshardError

MODEL = torch.nn.Linear(2, 2)
W = torch.arange(2.0)

NO_STATES: dict[str, Any] = {
    "None": None,
    "an int": 3,
    "a tensor": W,
    "a model": MODEL,
    "an optimizer": torch.optim.Adam(MODEL.parameters()),
    "a set": {1},
    "a generator": MODEL.parameters(),
    "items": {"w": W}.items(),
}
NO_PATHS: dict[str, Any] = {
    "None": None,
    "an int": 5,
    "empty text": "",
    "a tensor": W,
    "a dict": {},
    "bytes": b"/tmp/x",
    "an unknown scheme": "foo://bar",
    "a NUL": "a\0b",
}
WRONG_OPTIONS: dict[str, dict[str, Any]] = {
    "save": {
        "select": [3, [1], []],
        "divide_above_bytes": [-1, 0, "x", None],
        "memory_budget_bytes": [0, "x", 1.5],
        "ranks_per_file": [0, "x", 2.0, True],
    },
    "load": {
        "strict": [3, "yes", {"w": "sometimes"}],
        "dtype_policy": [1, "any"],
        "mapping": [{"a": "b"}],
    },
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    reshard.save({"w": W}, tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize("what", NO_STATES)
def test_what_is_no_state(what: str, saved: Path, tmp_path: Path) -> None:
    value, state = NO_STATES[what], {"w": W.clone()}
    calls = {
        "save": lambda: reshard.save(value, tmp_path / "new"),
        "async_save": lambda: reshard.async_save(value, tmp_path / "new").result(),
        "load": lambda: reshard.load(value, saved),
        "compare": lambda: reshard.compare(value, saved),
        "compare, the other way": lambda: reshard.compare(saved, value),
        "redistribute": lambda: reshard.redistribute(value, state),
        "redistribute, the other way": lambda: reshard.redistribute(state, value),
    }
    for name, call in calls.items():
        if what == "None" and name.startswith("redistribute"):
            continue  # of a rank that has nothing
        with pytest.raises(ReshardError) as error:
            call()
        assert len(str(error.value)) > 20, name
    assert not (tmp_path / "new").exists()
    assert torch.equal(state["w"], W)


@pytest.mark.parametrize("what", NO_PATHS)
def test_what_is_no_path(what: str, saved: Path, tmp_path: Path) -> None:
    value, state = NO_PATHS[what], {"w": torch.zeros(2)}
    calls = {
        "save": lambda: reshard.save({"w": W}, value),
        "load": lambda: reshard.load(state, value),
        "open": lambda: reshard.open(value),
        "verify": lambda: reshard.verify(value),
        "convert": lambda: reshard.convert(value, tmp_path / "new"),
        "convert, the other way": lambda: reshard.convert(saved, value),
    }
    for name, call in calls.items():
        with pytest.raises(ReshardError) as error:
            call()
        assert len(str(error.value)) > 10, name
    assert not state["w"].any()


def test_a_file_in_the_place_of_a_folder(saved: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for path in (file, file / "inside"):
        for call in (
            lambda path=path: reshard.save({"w": W}, path),
            lambda path=path: reshard.load({"w": W.clone()}, path),
            lambda path=path: reshard.open(path),
            lambda path=path: reshard.verify(path),
            lambda path=path: reshard.convert(path, tmp_path / "new"),
            lambda path=path: reshard.convert(saved, path),
        ):
            with pytest.raises(ReshardError, match="file"):
                call()
    assert file.read_text() == "x"


@pytest.mark.parametrize(
    ("verb", "option"), [(verb, option) for verb, all_ in WRONG_OPTIONS.items() for option in all_]
)
def test_options_that_cannot_be(verb: str, option: str, saved: Path, tmp_path: Path) -> None:
    for value in WRONG_OPTIONS[verb][option]:
        state = {"w": torch.zeros(2)}
        call: Any = reshard.save if verb == "save" else reshard.load
        first, path = ({"w": W}, tmp_path / "new") if verb == "save" else (state, saved)
        with pytest.raises(ReshardError) as error:
            call(first, path, **{option: value})
        assert option in str(error.value) or option in ("strict", "mapping"), str(error.value)
        assert not state["w"].any()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("verb", ["save", "async_save"])
def test_an_option_that_is_none_is_named_with_the_one_that_was_meant(verb: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=rf"^{verb}\(\) got .* 'overwrit': did you mean 'overwrite'\?"):
        getattr(reshard, verb)({"a": torch.zeros(2)}, tmp_path / "x", overwrit=True)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("number", "tensor"),
    [
        (10**400, torch.tensor(0.0)),
        (10**5000, torch.tensor(0.0)),
        (10**30, torch.tensor(0, dtype=torch.int8)),
        (1j, torch.tensor(0.0)),
        (float("nan"), torch.tensor(0)),
        (0.5, torch.tensor(0)),
    ],
    ids=["large", "of 5000 digits", "too large", "complex", "nan", "half"],
)
def test_numbers_that_a_tensor_cannot_hold(number: Any, tensor: torch.Tensor, tmp_path: Path) -> None:
    reshard.save({"n": number}, tmp_path)

    with pytest.raises(KeyMismatchError, match=r"n: saved as the number .*, which \w+ cannot hold"):
        reshard.load({"n": tensor}, tmp_path)
    assert tensor.item() == 0
