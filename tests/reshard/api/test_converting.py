"""`convert`: every format into every other, read by the libraries that own them; interrupted, shared, refused."""

from __future__ import annotations

import ast
import copy
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections import OrderedDict, deque
from collections.abc import Iterator
from datetime import datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import reshard
from planners.errors import PlanError
from planners.geometry.topologies import Topology, fsdp
from reshard.errors import (
    FormatError,
    KeyMismatchError,
    LayoutError,
    NormalizationError,
    OptionError,
    ReshardError,
)
from reshard.formats.safetensors import SafetensorsWriter
from reshard.mapping import Mapping, Transpose
from reshard.state import count_objects
from reshard.storage import MemoryStorage, open_storage
from reshard.stored.streaming import FormatWriter
from tests import gloo
from tests.same import assert_same, same
from tests.samples import sample, truth
from tests.states import every_dtype, in_files_of, trained
from tests.torch_releases import load_alone, save_alone

FORMATS = ["native", "dcp", "safetensors", "torch_save"]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    reshard.save(every_dtype(), tmp_path / "saved")
    return tmp_path / "saved"


def place(folder: Path, format: str) -> Path:
    return folder / (f"{format}.pt" if format == "torch_save" else format)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in leaves(item, (*path, key)).items()}
    if isinstance(value, (list, tuple)):
        return {k: v for i, item in enumerate(value) for k, v in leaves(item, (*path, i)).items()}
    return {path: value}


def by_path(value: Any) -> dict[tuple[Any, ...], Any]:
    """The leaves in one order: some formats sort keys, and DCP knows no tuples."""
    return dict(sorted(leaves(value).items(), key=lambda leaf: repr(leaf[0])))


def test_values_of_each_rank_go_along(tmp_path: Path) -> None:
    """Tensors and plain data, also under another layout, another dtype or a selection; DCP cannot hold them."""
    rng, position = torch.arange(5, dtype=torch.uint8), {"shard": 3, "ids": (1, 2), "state": torch.tensor(7)}
    state = {"w": torch.ones(6, 2), "data": {"rng": reshard.PerRank(rng), "position": reshard.PerRank(position)}}
    reshard.save(state, tmp_path / "saved")

    def own(folder: Path) -> Any:
        target = {"data": {"rng": reshard.PerRank(), "position": reshard.PerRank()}}
        report = reshard.load(target, folder, strict=False)
        assert report.unexpected == ("w",)
        return target["data"]

    ways: list[dict[str, Any]] = [
        {}, {"onto": Topology.parse("dp=2", {"*": "S(0)"})}, {"dtype": torch.bfloat16}, {"mapping": {"v": "w"}},
        {"select": ["w", "data.*"]},
    ]  # fmt: skip
    for i, way in enumerate(ways):
        report = reshard.convert(tmp_path / "saved", tmp_path / str(i), **way)
        assert not report.omitted
        assert reshard.verify(tmp_path / str(i)).ok
        if "mapping" not in way:
            found = own(tmp_path / str(i))
            assert torch.equal(found["rng"].value, rng)
            assert found["position"].value == position
            assert list(reshard.open(tmp_path / str(i))) == ["w"]
    reshard.convert(tmp_path / "saved", tmp_path / "less", select=["w", "data.rng"])
    assert list(reshard.open(tmp_path / "less").contents.per_rank) == ["data.rng"]
    for format in ("dcp", "safetensors", "torch_save"):
        report = reshard.convert(tmp_path / "saved", place(tmp_path, format), format=format)
        assert set(report.omitted) == {"data.rng", "data.position"}


def test_values_of_each_rank_have_no_canonical_names(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(6, 2)}, "rng": reshard.PerRank(torch.arange(5)), "at": reshard.PerRank(3)}
    reshard.save(state, tmp_path / "saved")

    report = reshard.convert(tmp_path / "saved", tmp_path / "all", normalized=True)
    assert set(report.omitted) == {"rng", "at"}
    report = reshard.convert(tmp_path / "saved", tmp_path / "cast", normalized=True, dtype="bfloat16")
    assert set(report.omitted) == {"rng", "at"}
    report = reshard.convert(tmp_path / "saved", tmp_path / "model", model_only=True)
    assert not report.omitted, "only the model was asked for"


def test_tensors_beside_the_model_are_in_the_report(tmp_path: Path) -> None:
    """They may be a part of it that has a section of its own."""
    optimizer = {"state": {"w": {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": ["w"]}]}
    state = {"model": {"w": torch.ones(2)}, "head": {"w": torch.ones(3)}, "optimizer": optimizer, "epoch": 3}
    reshard.save(state, tmp_path / "saved")

    report = reshard.convert(tmp_path / "saved", tmp_path / "model", model_only=True)

    assert (set(reshard.open(tmp_path / "model")), report.omitted) == ({"w"}, ("head.w",))


def test_an_empty_list_is_a_value_and_the_report_names_it_where_it_is_lost(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "none": [], "deep": [torch.ones(1), (), {}], "x": 3}
    reshard.save(state, tmp_path / "saved")
    report = reshard.convert(tmp_path / "saved", tmp_path / "c", format="safetensors")
    assert set(report.omitted) == {"none", "deep.1", "x"}
    assert {one.fqn for one in reshard.compare(tmp_path / "saved", tmp_path / "c").findings} == {*report.omitted}
    for format in ("dcp", "torch_save"):
        assert not reshard.convert(tmp_path / "saved", place(tmp_path, format), format=format).omitted
        assert reshard.compare(tmp_path / "saved", place(tmp_path, format)).ok


@pytest.mark.parametrize("format", ["native", "torch_save"])
def test_empty_lists_and_dicts_beside_the_model_are_kept(format: str, tmp_path: Path) -> None:
    beside = {"callbacks": {}, "history": [], "loop": {"done": (), "seen": [[]], "step": 3}}
    w = torch.ones(2)
    groups = [{"lr": 0.1, "odd": [], "params": ["w"]}, {"lr": 0.2, "params": []}]
    state = {"model": {"w": w}, "optim": {"state": {"w": {"exp_avg": w, "extra": {}}}, "param_groups": groups}}
    reshard.save(state | beside, tmp_path / "saved")
    report = reshard.convert(tmp_path / "saved", place(tmp_path, format), format=format, normalized=True)
    assert not report.omitted
    found = reshard.open(place(tmp_path, format)).nested()
    assert {name: found[name] for name in beside} == beside
    assert reshard.open(tmp_path / "saved").normalized().omitted == (
        "loop.step",
        "callbacks",
        "history",
        "loop.done",
        "loop.seen.0",
    )


@pytest.mark.parametrize("empty", [[{}], deque([{}]), ({}, {})])
def test_nests_of_empty_dicts_need_nothing(empty: Any, tmp_path: Path) -> None:
    """DCP records no empty dicts."""
    reshard.save({"s": {"a": empty}}, tmp_path / "c")
    reshard.convert(tmp_path / "c", tmp_path / "dcp", format="dcp")

    assert reshard.load({"s": {"a": copy.deepcopy(empty)}}, tmp_path / "dcp").ok


def test_an_empty_section_of_an_optimizer_is_not_named(tmp_path: Path) -> None:
    reshard.save({"state_dict": {"w": torch.ones(2)}, "optimizer_states": [], "seen": []}, tmp_path / "saved")
    report = reshard.convert(tmp_path / "saved", tmp_path / "c", normalized=True)
    assert not report.omitted
    assert reshard.open(tmp_path / "c").nested()["seen"] == []


@pytest.fixture(params=["a new process", "accelerate's"])
def _allowed_globals(request: pytest.FixtureRequest) -> Iterator[None]:
    """accelerate lets torch.load(weights_only=True) take arrays; whoever gets the file may not have done so."""
    known = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    if request.param != "a new process":
        arrays: list[Any] = [np.ndarray, np.dtype, np._core.multiarray._reconstruct]
        torch.serialization.add_safe_globals([*arrays, type(np.dtype(np.uint32)), type(np.dtype(np.int64))])
    yield
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(known)


@pytest.mark.usefixtures("_allowed_globals")
def test_keys_that_torch_load_refuses_are_named(tmp_path: Path) -> None:
    safe = {"w": torch.ones(2), "epoch": 3, "names": {"a"}, "order": OrderedDict(a=[b"x", 1.5, None])}
    values = [np.arange(3), [np.float64(1)], {"at": datetime(2020, 1, 1)}, timedelta(1), range(3), frozenset([1])]
    odd = {f"odd.{i}": value for i, value in enumerate([*values, np.random.RandomState(0).get_state()])}
    reshard.save(safe | odd, tmp_path / "c")
    target = tmp_path / "c.pt"
    report = reshard.convert(tmp_path / "c", target, format="torch_save")
    (words,) = report.warnings
    keys = "'odd.0', 'odd.1.0', 'odd.2.at', 'odd.3', 'odd.4', 'odd.5', 'odd.6.1'"
    assert words.startswith(f"torch.load needs weights_only=False for: 7 ({keys}). To leave them out: select=['*', '!")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(target, weights_only=True)
    globs = ast.literal_eval(words.partition("select=")[2])
    report = reshard.convert(tmp_path / "c", target, format="torch_save", select=globs, overwrite=True)
    assert report.warnings == ()
    loaded = torch.load(target, weights_only=True)
    assert_same({key: loaded[key] for key in safe}, safe)


@pytest.mark.parametrize("format", ["native", "dcp", "torch_save"])
def test_objects_of_unknown_classes_are_left_out_as_the_refusal_says(format: str, tmp_path: Path) -> None:
    """Such as the training arguments of the Hugging Face trainer."""
    trainer = tmp_path / "trainer"
    trainer.mkdir()
    safetensors.torch.save_file({"w": torch.ones(3)}, trainer / "model.safetensors")
    torch.save({"last_epoch": 2, "odd[1]": torch.nn.Linear(1, 1)}, trainer / "scheduler.pt")
    torch.save(torch.nn.Linear(1, 1), trainer / "training_args.bin")
    target = place(tmp_path, format)
    for given in (None, ["model.*", "scheduler.*", "training_args"]):
        with pytest.raises(FormatError, match=r"2 objects of .* cannot be written") as refused:
            reshard.convert(trainer, target, format=format, select=given)
    globs = ast.literal_eval(str(refused.value).rpartition("select=")[2])
    assert globs[:3] == given
    reshard.convert(trainer, target, format=format, select=globs)
    opened = reshard.open(target)
    assert list(opened) == ["model.w"]
    assert dict(opened.objects) == {"scheduler.last_epoch": 2}


@pytest.mark.parametrize("format", FORMATS)
def test_there_and_back(format: str, saved: Path, tmp_path: Path) -> None:
    """Bit by bit, with everything that the format can hold."""
    there = place(tmp_path, format)

    report = reshard.convert(saved, there, format=format, **in_files_of(1000, format))

    assert sum(1 for name in there.iterdir() if "convert" in name.name) == 0 if there.is_dir() else True
    against = reshard.open(saved)
    tensors = {name: tensor[...] for name, tensor in [*against.items(), ("model.head", against["model.head"])]}
    found = reshard.open(there)
    assert all(same(found[name][...], t) for name, t in tensors.items() if name in found or format != "safetensors")
    if format == "safetensors":
        assert report.aliases == {"model.head": "model.embed"}
        assert set(report.omitted) == set(against.objects)
    else:
        back = tmp_path / "back"
        reshard.convert(there, back)
        reshard.convert(back, tmp_path / "last.pt", format="torch_save")
        assert_same(by_path(torch.load(tmp_path / "last.pt", weights_only=True)), by_path(every_dtype()))
    if format == "native":
        assert reshard.verify(there).ok


def test_a_state_and_a_folder_in_place_of_paths_are_told_what_to_pass(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}}
    words = r"^convert reads a checkpoint, got a state: save it first, reshard.save\(state, path\), and pass the path$"
    with pytest.raises(OptionError, match=words):
        reshard.convert(state, tmp_path / "out")  # type: ignore[arg-type]
    reshard.save(state, tmp_path / "there")
    with pytest.raises(FormatError, match=r"there is a folder, but torch_save writes one file: pass its path$"):
        reshard.convert(tmp_path / "there", tmp_path / "there", format="torch_save", overwrite=True)
    reshard.convert(reshard.open(tmp_path / "there"), tmp_path / "there.pt", format="torch_save")


def test_torch_loads_the_file(saved: Path, tmp_path: Path) -> None:
    reshard.convert(saved, tmp_path / "c.pt", format="torch_save")

    loaded = torch.load(tmp_path / "c.pt", weights_only=True)

    assert_same(loaded, every_dtype())
    assert loaded["model"]["head"].data_ptr() == loaded["model"]["embed"].data_ptr()
    assert loaded["optim"]["param_groups"][0]["betas"] == (0.9, 0.95)
    assert_same(torch.load(tmp_path / "c.pt", weights_only=True, mmap=True), every_dtype())
    assert zipfile.ZipFile(tmp_path / "c.pt").testzip() is None  # all checksums are right


def test_torch_loads_the_folder(saved: Path, tmp_path: Path) -> None:
    """torch's own `dcp.load`, of files of several sizes and of a layout of three ranks."""
    wanted = every_dtype()
    reshard.convert(saved, tmp_path / "small", format="dcp", max_shard_bytes=500)
    reshard.convert(saved, tmp_path / "ranks", format="dcp", onto=Topology.parse("dp=3", {"*": "S(0)"}), select="*[dh]")
    for folder in ("small", "ranks"):
        target = {"model": {"embed": torch.zeros(40, 8), "head": torch.zeros(40, 8)}}
        load_alone(target, checkpoint_id=tmp_path / folder)
        assert torch.equal(target["model"]["embed"], wanted["model"]["embed"])
        assert torch.equal(target["model"]["head"], wanted["model"]["embed"])
    assert len(list((tmp_path / "ranks").glob("__*_0.distcp"))) + len(list((tmp_path / "ranks").glob("__*"))) >= 3
    everything = {"model": {k: torch.zeros_like(v) for k, v in wanted["model"].items() if k != "layers"}}
    everything["optim"] = {"state": {"embed": {"step": torch.tensor(0.0)}}}
    load_alone(everything, checkpoint_id=tmp_path / "small")
    assert all(same(everything["model"][k], v.contiguous()) for k, v in wanted["model"].items() if k != "layers")


class Point(NamedTuple):
    x: int
    y: int


class Mode(Enum):
    FAST = 1


SEQUENCES: dict[str, Any] = {
    "group": {"betas": (0.9, 0.95), "params": ["w", "b"], "none": [], "nothing": ()},
    "groups": [{"betas": (0.9, 0.95), "lr": 0.1}, 2],
    "deep": {"a": (1, [2, (3,)]), "in lists": [[[{"q": (1, 2)}]]], "in tuples": [(1, {"z": 2}), {"r": (5,)}]},
    "tensors": [torch.ones(2), 3, (4, 5)],
    "numbered": {5: torch.ones(1), 1000: torch.ones(1)},
}


def test_torch_loads_sequences_from_the_folder_under_its_own_keys(tmp_path: Path) -> None:
    """torch takes a list apart only if it holds tensors or mappings. What it looks for, it must find."""
    reshard.save(SEQUENCES, tmp_path / "saved")
    reshard.convert(tmp_path / "saved", tmp_path / "ours", format="dcp")
    save_alone(SEQUENCES, checkpoint_id=tmp_path / "torch's")
    target: dict[str, Any] = {
        "group": {"betas": (), "params": [], "none": None, "nothing": None},
        "groups": [{"betas": None, "lr": 0.0}, 0],
        "deep": {"a": None, "in lists": [[[{"q": 0}]]], "in tuples": [None, {"r": None}]},
        "tensors": [torch.zeros(2), 0, None],
        "numbered": {5: torch.zeros(1), 1000: torch.zeros(1)},
    }

    load_alone(target, checkpoint_id=tmp_path / "ours")

    assert_same(target, SEQUENCES)
    ours, theirs = reshard.open(tmp_path / "ours"), reshard.open(tmp_path / "torch's")
    assert {*ours} == {*theirs}
    assert dict(ours.objects) == dict(theirs.objects)
    assert reshard.compare(tmp_path / "ours", tmp_path / "saved").ok
    for folder in ("ours", "torch's"):
        dcp_to_torch_save(tmp_path / folder, tmp_path / f"{folder}.pt")
    assert_same(by_path(torch.load(tmp_path / "ours.pt")), by_path(torch.load(tmp_path / "torch's.pt")))


@pytest.mark.parametrize("kind", ["plain", "named", "tensor betas"])
@pytest.mark.parametrize("source", ["state dict", "torch's state dict", "file"])
def test_torch_loads_an_optimizer_from_the_folder(source: str, kind: str, tmp_path: Path) -> None:
    """torch looks for the names of parameters that an optimizer was given, and for betas as one object."""
    model = torch.nn.Linear(3, 2)

    def adamw(*betas: float) -> torch.optim.AdamW:
        if kind == "tensor betas":
            groups = [{"params": [parameter]} for parameter in model.parameters()]  # with the same betas
            return torch.optim.AdamW(groups, betas=(*map(torch.tensor, betas),), foreach=False)
        return torch.optim.AdamW(model.named_parameters() if kind == "named" else model.parameters(), betas=betas)

    optimizer = adamw(0.8, 0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if source == "file":
        named = {} if kind == "named" else {"param_names": ["weight", "bias"]}
        torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "saved")
        reshard.convert(tmp_path / "saved", tmp_path / "c", format="dcp", normalized=True, hints=named)
    else:
        get = reshard.get_optimizer_state_dict if source == "state dict" else get_optimizer_state_dict
        reshard.save({"optim": get(model, optimizer)}, tmp_path / "saved")
        reshard.convert(tmp_path / "saved", tmp_path / "c", format="dcp")
    fresh = adamw(0.7, 0.8)
    target = {"optim": get_optimizer_state_dict(model, fresh)}

    load_alone(target, checkpoint_id=tmp_path / "c")
    set_optimizer_state_dict(model, fresh, target["optim"])

    if source == "file" and kind == "tensor betas":  # numbers in normalized groups, as a rate is
        assert fresh.param_groups[0]["betas"] == pytest.approx((0.8, 0.9))
        return
    assert_same(fresh.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("flat", [False, True])
def test_tensors_that_torch_keeps_within_objects_are_compared_and_converted_back(flat: bool, tmp_path: Path) -> None:
    """torch pickles a tuple of tensors, such as betas, which the native format has as tensors."""
    model, options = torch.nn.Linear(3, 2), {"flatten_optimizer_state_dict": flat}
    betas = (torch.tensor(0.8), torch.tensor(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), betas=betas, foreach=False)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = reshard.get_optimizer_state_dict(model, optimizer, options=reshard.StateDictOptions(**options))
    theirs = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**options))
    save_alone({"optim": theirs}, checkpoint_id=tmp_path / "dcp")
    reshard.save({"optim": state}, tmp_path / "native")
    reshard.convert(tmp_path / "native", tmp_path / "ours", format="dcp")

    for name in ("dcp", "ours"):
        reshard.convert(tmp_path / name, tmp_path / f"{name} back")
        for each in (name, f"{name} back"):
            assert reshard.compare(tmp_path / each, tmp_path / "native").ok
            assert reshard.compare(tmp_path / each, {"optim": state}).ok
    betas[1].fill_(0.7)
    assert not reshard.compare(tmp_path / "dcp", {"optim": state}).ok


def test_what_torch_does_not_record_is_as_in_the_target(tmp_path: Path) -> None:
    """That a dict is empty, as the state of SGD without momentum, and that a key is an int."""
    state = {"optim": {"state": {}, "groups": [{"lr": 0.1, "more": {}}]}, "plain": {"a": 1, 2: "b"}, "w": torch.ones(2)}
    save_alone(state, checkpoint_id=tmp_path / "torch's")
    reshard.save(state, tmp_path / "saved")
    reshard.convert(tmp_path / "saved", tmp_path / "ours", format="dcp")
    for folder in ("torch's", "ours"):
        target: dict[str, Any] = {
            "optim": {"state": {}, "groups": [{"lr": 0.0, "more": {}}]},
            "plain": {"a": 0, 2: ""},
            "w": torch.zeros(2),
        }

        assert reshard.load(target, tmp_path / folder).ok
        assert_same(target, state)


@pytest.mark.parametrize("format", ["native", "torch_save"])
def test_a_text_key_that_is_recorded_as_text_is_not_taken_for_an_int(format: str, tmp_path: Path) -> None:
    reshard.save({"plain": {"a": 1, "2": "b"}, "w": torch.ones(2)}, tmp_path / "saved")
    reshard.convert(tmp_path / "saved", place(tmp_path, format), format=format)
    target: dict[str, Any] = {"plain": {"a": 0, 2: ""}, "w": torch.zeros(2)}

    report = reshard.load(target, place(tmp_path, format))

    assert report.dropped == ("plain.2",)
    assert target["plain"] == {"a": 1, "2": "b"}


@pytest.mark.parametrize(("format", "tuples"), [("dcp", True), ("torch_save", False), ("torch_checkpointing", False)])
def test_containers_of_a_class_become_builtin_and_are_reported(format: str, tuples: bool, tmp_path: Path) -> None:
    state = {
        "s": {
            "at": Point(1, 2),
            "last": deque([1], maxlen=3),
            "of": OrderedDict(a=1),
            "pair": (torch.ones(2), 3),
            "points": [Point(3, 4)],
        }
    }
    reshard.save(state, tmp_path / "saved")
    path = place(tmp_path, format)

    report = reshard.convert(tmp_path / "saved", path, format=format)

    point = f"{Point.__module__}.Point"
    assert report.changed_classes == {
        "s.at": (point, "tuple"),
        "s.last": ("deque", "list"),
        "s.of": ("collections.OrderedDict", "dict"),
        "s.points.0": (point, "tuple"),
    } | ({"s.pair": ("tuple", "list")} if tuples else {})
    assert f"s.at: {point} -> tuple" in str(report)
    if format == "torch_save":
        assert_same(
            torch.load(path, weights_only=True),
            {"s": {"at": (1, 2), "last": [1], "of": {"a": 1}, "pair": (torch.ones(2), 3), "points": [(3, 4)]}},
        )
    live = {"s": {"at": Point(0, 0), "last": deque([0], maxlen=3), "of": OrderedDict(a=0), "pair": (torch.zeros(2), 0),
                  "points": [Point(0, 0)]}}  # fmt: skip
    assert reshard.load(live, path).ok
    assert_same(live, state)


@pytest.mark.parametrize("format", ["dcp", "torch_save", "torch_checkpointing"])
def test_values_of_a_class_are_refused_where_only_their_class_could_be_written(format: str, tmp_path: Path) -> None:
    reshard.save({"s": {"mode": Mode.FAST, "modes": {(1, 2): [Mode.FAST]}, "w": torch.ones(1)}}, tmp_path / "saved")
    path = place(tmp_path, format)

    with pytest.raises(FormatError, match=r"2 objects of .* 's.mode': it is a .*Mode, or holds one, and only native"):
        reshard.convert(tmp_path / "saved", path, format=format)
    reshard.convert(tmp_path / "saved", path, format=format, select=["*", "!s.mode", "!s.modes"])

    assert list(reshard.open(path)) == ["s.w"]


def test_safetensors_loads_the_files(saved: Path, tmp_path: Path) -> None:
    """Sizes come from the item size, so that integers are no trouble; no file is larger than said."""
    report = reshard.convert(saved, tmp_path / "hf", format="safetensors", select="model.*", max_shard_bytes=1300)

    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    loaded = {}
    for file in report.files:
        part = safetensors.torch.load_file(tmp_path / "hf" / file)
        nbytes = sum(tensor.nbytes for tensor in part.values())
        assert nbytes <= 1300
        assert dict.fromkeys(part, file).items() <= index["weight_map"].items()
        loaded.update(part)
    assert set(loaded) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in loaded.values()) == report.total_bytes
    wanted = reshard.open(saved)
    assert all(same(loaded[name], wanted[name][...]) for name in loaded)
    assert "model.head" not in loaded


def test_one_small_file_has_no_index(saved: Path, tmp_path: Path) -> None:
    reshard.convert(saved, tmp_path / "hf", format="safetensors")

    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["model.safetensors"]


def test_names_shapes_dtypes_and_selection_at_once(saved: Path, tmp_path: Path) -> None:
    report = reshard.convert(
        saved,
        tmp_path / "c",
        mapping={"model.w": "model.layers.0.w"},
        select=["model.*", "!model.of.*"],
        dtype="bfloat16",
    )

    made = reshard.open(tmp_path / "c")
    assert set(made) == {"model.embed", "model.turned", "model.none", "model.count", "model.w"}
    assert torch.equal(made["model.w"][...], every_dtype()["model"]["layers"]["0"]["w"].bfloat16())
    assert made["model.count"].dtype == torch.int64
    assert dict(made.aliases) == {"model.head": "model.embed"} == report.aliases
    assert reshard.verify(tmp_path / "c").ok


def test_a_dict_of_names_renames_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    """Two new names of one tensor are tied, objects are renamed, too, and states follow their parameter."""
    a, b, c = (torch.full((2,), float(i)) for i in range(3))
    optim = {"state": {"w": {"m": c}}, "param_groups": [{"params": ["w"]}]}
    reshard.save({"w": a, "model": {"w": b}, "optim": optim, "epoch": 3}, tmp_path / "saved")

    names = {"x": "w", "y": "w", "age": "epoch", "model.v": "model.w"}
    reshard.convert(tmp_path / "saved", tmp_path / "c", mapping=names)

    made = reshard.open(tmp_path / "c")
    values = {name: made[name][0].item() for name in (*made, *made.aliases)}
    assert values == {"x": 0.0, "y": 0.0, "model.v": 1.0, "optim.state.x.m": 2.0}
    assert (dict(made.aliases), made.objects["age"], "epoch" in made.objects) == ({"y": "x"}, 3, False)
    assert made.objects["optim.param_groups.0.params.0"] == "x"
    for twice in ({"epoch": "w"}, {"w": "epoch"}, {"x": "w", "epoch": "w"}):
        with pytest.raises(KeyMismatchError, match="two tensors or objects would be called"):
            reshard.convert(tmp_path / "saved", tmp_path / "never", mapping=twice)


def test_a_keeper_that_is_left_out_has_an_heir(saved: Path, tmp_path: Path) -> None:
    reshard.convert(saved, tmp_path / "c", select="model.head")

    made = reshard.open(tmp_path / "c")
    assert list(made) == ["model.head"]
    assert torch.equal(made["model.head"][...], every_dtype()["model"]["embed"])


@pytest.mark.parametrize("format", ["native", "dcp"])
def test_pre_sharded_for_a_layout(format: str, saved: Path, tmp_path: Path) -> None:
    """As if the ranks had saved it: every rank finds its own elements in its own file."""
    topology = Topology.parse("dp=2,tp=2", {"*embed": "S(0),S(1)", "*": "S(0),R"})

    reshard.convert(saved, tmp_path / "c", format=format, onto=topology, select="model.*", model_only=False)

    made = reshard.open(tmp_path / "c")
    assert len({chunk.owner for chunk in made["model.embed"].stored.chunks}) == 4
    wanted = reshard.open(saved)
    assert all(same(made[name][...], wanted[name][...]) for name in made)
    if format == "native":
        assert made.layout == topology.layout({name: wanted[name].stored.spec for name in made})


def test_workers_write_what_one_process_writes(saved: Path, tmp_path: Path) -> None:
    for workers in (1, 3):
        target = tmp_path / str(workers)
        reshard.convert(saved, target, format="safetensors", max_shard_bytes=500, workers=workers)
    names = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "3").iterdir())
    assert all((tmp_path / "1" / name).read_bytes() == (tmp_path / "3" / name).read_bytes() for name in names)


def test_what_a_worker_says_reaches_the_caller(saved: Path, tmp_path: Path) -> None:
    [file] = saved.glob("data-*/*.safetensors")
    with open(file, "r+b") as out:
        out.truncate(file.stat().st_size - 1)
    reshard.save(every_dtype(), tmp_path / "other")

    with pytest.raises(ReshardError, match=r"has \d+ of its \d+ bytes"):
        reshard.convert(saved, tmp_path / "c", max_shard_bytes=500, workers=2)
    assert not (tmp_path / "c" / "manifest.json").exists()


@pytest.mark.parametrize("format", ["native", "dcp", "safetensors"])
def test_an_interrupted_conversion_goes_on(
    format: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left is no checkpoint; the second call keeps what is whole, and writes what is damaged again."""
    target = tmp_path / "c"
    writers = {"safetensors": SafetensorsWriter}
    if format == "native":
        from reshard.native.writer import NativeWriter

        writers["native"] = NativeWriter
    elif format == "dcp":
        from reshard.formats.dcp.writer import DcpWriter

        writers["dcp"] = DcpWriter
    kind: type[FormatWriter] = writers[format]
    written: list[str] = []
    real = kind.write

    def stopping(self: Any, storage: Any, file: Any, on_bytes: Any) -> Any:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(file.name)
        return real(self, storage, file, on_bytes)

    monkeypatch.setattr(kind, "write", stopping)
    with pytest.raises(KeyboardInterrupt):
        reshard.convert(saved, target, format=format, max_shard_bytes=400)
    with pytest.raises(ReshardError):
        reshard.open(target)
    damaged = next(path for path in sorted(target.rglob("*")) if ".safetensors" in path.name or ".distcp" in path.name
                   if not path.name.endswith((".sums", ".json")))  # fmt: skip
    with open(damaged, "r+b") as out:
        out.seek(-1, 2)
        last = out.read(1)
        out.seek(-1, 2)
        out.write(bytes([last[0] ^ 1]))
    monkeypatch.setattr(kind, "write", real)

    report = reshard.convert(saved, target, format=format, max_shard_bytes=400)

    assert len(report.resumed) == 1
    assert set(report.resumed) < set(written)
    made, wanted = reshard.open(target), reshard.open(saved)
    assert all(same(made[name][...], wanted[name][...]) for name in wanted)
    assert not [path for path in target.rglob("*") if "convert-" in str(path) or path.name.endswith(".tmp")]


def test_a_continued_file_with_a_tilde_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any) -> None:
        raise SystemExit

    reshard.save({"w": torch.ones(9)}, tmp_path / "x")
    with monkeypatch.context() as patch:
        patch.setattr(FormatWriter, "compare_fingerprints", killed)
        with pytest.raises(SystemExit):
            reshard.convert(tmp_path / "x", tmp_path / "a~b.pt", format="torch_save")
    assert reshard.convert(tmp_path / "x", tmp_path / "a~b.pt", format="torch_save").resumed == ("a~b.pt",)


@pytest.mark.parametrize("at", range(10, 260, 10))
def test_a_file_whose_record_was_changed_is_written_again(at: int, tmp_path: Path) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    reshard.save({"w": torch.arange(9.0), "n": 3}, tmp_path / "x")
    with mock.patch.object(FormatWriter, "compare_fingerprints", killed), pytest.raises(KeyboardInterrupt):
        reshard.convert(tmp_path / "x", tmp_path / "c", format="dcp")
    (record,) = tmp_path.rglob("convert-*/*.json")
    data = bytearray(record.read_bytes())
    data[at] ^= 1
    record.write_bytes(data)
    assert not reshard.convert(tmp_path / "x", tmp_path / "c", format="dcp").resumed
    assert reshard.compare(tmp_path / "x", tmp_path / "c").ok


def test_several_files_where_none_is_temporary(tmp_path: Path) -> None:
    """A memory:// folder and object stores write files under their own names: `finish` must not take them for old."""
    state = {name: torch.full((100,), 3.0) for name in "vw"}
    reshard.save(state, tmp_path / "x")
    for _ in range(2):
        reshard.convert(tmp_path / "x", "memory://s", format="safetensors", max_shard_bytes=500, overwrite=True)
        assert reshard.compare("memory://s", state).ok


@pytest.mark.parametrize("place", ["memory://", "file://", "storage", "glob", "file"])
@pytest.mark.parametrize("mapping", [None, {"renamed": "w"}])
def test_a_source_that_was_replaced_begins_anew(
    place: str, mapping: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else values of two checkpoints are in one. Names, shapes, and dtypes are alike, and so are lengths of files."""
    source: Any = {
        "memory://": "memory://replaced-source/x",
        "file://": (tmp_path / "a folder").as_uri(),
        "storage": MemoryStorage("mine"),
        "glob": f"{tmp_path}/source/model-*.safetensors",
        "file": "memory://replaced-source/m 1.pt",
    }[place]

    def save(value: float) -> None:
        torch.save({name: torch.full((100,), value) for name in "vw"}, tmp_path / "source.pt")
        if place == "file":
            open_storage("memory://replaced-source").publish("m 1.pt", (tmp_path / "source.pt").read_bytes())
            return
        folder = tmp_path / "source" if place == "glob" else source
        reshard.convert(tmp_path / "source.pt", folder, format="safetensors", max_shard_bytes=500, overwrite=True)

    def killed(*_: Any) -> None:
        raise SystemExit

    save(1.0)
    with monkeypatch.context() as patch:
        patch.setattr(FormatWriter, "compare_fingerprints", killed)
        with pytest.raises(SystemExit):
            reshard.convert(source, tmp_path / "c", format="safetensors", max_shard_bytes=500, mapping=mapping)
    save(2.0)
    report = reshard.convert(source, tmp_path / "c", format="safetensors", max_shard_bytes=500, mapping=mapping)
    made = reshard.open(tmp_path / "c")
    assert not report.resumed
    assert [float(made[name][0]) for name in made] == [2.0, 2.0]


def test_other_arguments_begin_anew(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The records and temporary files of the first attempt go."""

    def failing(self: Any, out: Any) -> None:
        raise OSError("no")

    real = SafetensorsWriter.finish
    monkeypatch.setattr(SafetensorsWriter, "finish", failing)
    with pytest.raises(OSError, match="no"):
        reshard.convert(saved, tmp_path / "c", format="safetensors")
    monkeypatch.setattr(SafetensorsWriter, "finish", real)

    report = reshard.convert(saved, tmp_path / "c", format="safetensors", dtype="float16", select="model.e*")

    assert report.resumed == ()
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["model.safetensors"]


def test_another_topology_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The short form of a topology names only its first rules, and counts its homes."""
    reshard.save({f"layers.{i}.w": torch.arange(64.0).view(8, 8) + i for i in range(4)}, tmp_path / "source")

    def stages(first: int) -> Topology:
        homes = {f"layers.{i}.*": f"pp={int(i >= first)}" for i in range(4)}
        return Topology.parse("pp=2,tp=2", {"*": "S(0)"}, homes)

    def killed(*_: Any) -> None:
        raise SystemExit

    assert repr(stages(2)) == repr(stages(3))
    with monkeypatch.context() as patch:
        patch.setattr(FormatWriter, "compare_fingerprints", killed)
        with pytest.raises(SystemExit):
            reshard.convert(tmp_path / "source", tmp_path / "c", onto=stages(2))
    assert not reshard.convert(tmp_path / "source", tmp_path / "c", onto=stages(3)).resumed
    assert reshard.verify(tmp_path / "c").ok


def test_another_mapping_of_an_open_checkpoint_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, shapes, and dtypes are those of the first attempt, and values are not."""
    values = torch.arange(9.0).view(3, 3)
    safetensors.torch.save_file({"w": values}, tmp_path / "model.safetensors")
    source, target = reshard.open(tmp_path / "model.safetensors"), tmp_path / "c"

    def failing(self: Any, out: Any) -> None:
        raise OSError("no")

    with monkeypatch.context() as patched:
        patched.setattr(SafetensorsWriter, "finish", failing)
        with pytest.raises(OSError, match="no"):
            reshard.convert(source, target, format="safetensors")

    report = reshard.convert(source.mapped(Mapping([Transpose("w", "w")])), target, format="safetensors")

    assert report.resumed == ()
    assert same(reshard.open(target)["w"][...], values.T)


def convert_together(source: str, target: str) -> tuple[int, tuple[str, ...]]:
    report = reshard.convert(source, target, format="safetensors", max_shard_bytes=500)
    return report.total_bytes, report.files


@pytest.mark.gloo
def test_ranks_share_the_work(saved: Path, tmp_path: Path) -> None:
    first, second = gloo.run(convert_together, 2, str(saved), str(tmp_path / "two"))

    assert first == second == convert_together(str(saved), str(tmp_path / "one"))
    for file in first[1]:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_a_topology_in_words_is_what_it_is_in_python(saved: Path, tmp_path: Path) -> None:
    for name, onto in (("words", "fsdp=3"), ("python", fsdp(3))):
        reshard.convert(saved, tmp_path / name, onto=onto)
    words, python = (reshard.open(tmp_path / name) for name in ("words", "python"))

    assert words.layout == python.layout
    assert words.layout.world_size == 3
    assert reshard.compare(words, python).ok
    with pytest.raises(PlanError, match="did you mean 'fsdp'"):
        reshard.convert(saved, tmp_path / "c", onto="fspd=3")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"format": "gguf"}, FormatError, r"Known formats: native, megatron \(torch_dist\), deepspeed"),
        ({"format": "safetensors", "onto": Topology.parse("dp=2", {"*": "R"})}, LayoutError, "not sharded by rank"),
        ({"select": "nothing.*"}, KeyMismatchError, "matches 'nothing"),
        ({"mapping": {"a": "b"}}, KeyMismatchError, "names 'b'"),
        ({"workers": 0}, OptionError, "workers must be an integer >= 1, got 0"),
        (
            {"max_shard_bytes": 1, "format": "deepspeed"},
            OptionError,
            "files are not split by size: leave out max_",
        ),
        ({"max_shard_bytes": 1, "format": "torch"}, OptionError, "torch_save files are not split by size"),
        ({"max_shard_bytes": 1, "onto": "fsdp=2"}, OptionError, "files of each rank are not split by size"),
        ({"max_shard_bytes": 0}, FormatError, "must be a number >= 1, .* got 0"),
        (
            {"onto": None, "hints": None, "dtype": "float7"},
            FormatError,
            "unknown dtype 'float7'(: did you mean '.*'\\?|[.:] [Ww]rite the name of a .*)$",
        ),
        ({"onto": 8}, OptionError, "StateLayout or Topology, or text such as 'fsdp=4', got 8"),
        ({"workers": "two"}, OptionError, "workers must be an integer >= 1, got 'two'"),
    ],
)
def test_what_cannot_be_done_is_refused(
    arguments: dict[str, Any], error: type[Exception], message: str, saved: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        reshard.convert(saved, tmp_path / "c", **arguments)
    assert not (tmp_path / "c").exists()


def test_what_is_written_opens_or_is_refused_whatever_kind_of_checkpoint_is_there(saved: Path, tmp_path: Path) -> None:
    """Two kinds of files in one folder are a mixture, or hide one another: also where one may overwrite."""
    kinds = ("native", "dcp", "safetensors")
    reshard.save({"other": torch.ones(3)}, tmp_path / "other")
    for there, format in [(there, format) for there in kinds for format in kinds if there != format]:
        target, wanted = tmp_path / f"{there}-{format}", ["model.*"]
        reshard.convert(tmp_path / "other", target, format=there)
        with pytest.raises(FormatError, match=r"would mix with the converted checkpoint.*Choose an empty folder"):
            reshard.convert(saved, target, format=format, select=wanted, overwrite=True)
        assert list(reshard.open(target)) == ["other"]


def test_a_conversion_into_its_source_is_refused(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It replaced the only copy, and dropped the axes and ranks of its layout."""
    folders = {
        "native": "run/step-7",
        "dcp": "dcp",
        "safetensors": "hf",
        "deepspeed": "ds",
        "megatron": "mg/iter_0000007",
    }
    targets = {format: tmp_path / name for format, name in folders.items()} | {"torch_save": tmp_path / "x.pt"}
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    for format, target in targets.items():
        reshard.convert(saved, target, format=format)
        before = files_in(target.parent)
        name = str(target.relative_to(tmp_path))
        for source in (
            target,
            name,
            f"{name}/" if target.is_dir() else name,
            f"link/{name}",
            f"file://{target}",
            "run",
        ):
            if (source == "run") > (format == "native"):
                continue
            for one, other in ((source, target), (target, source)):
                with pytest.raises(FormatError, match=r"source and output are the same, .*: choose another output"):
                    reshard.convert(one, other if other != "run" else target, format=format, overwrite=True)
        with pytest.raises(FormatError, match="source and output are the same"):
            reshard.convert(reshard.open(target), target, format=format)
        assert files_in(target.parent) == before
    with pytest.raises(FormatError, match="source and output are the same"):
        reshard.convert(tmp_path / "dcp", tmp_path / "dcp", overwrite=True)
    with pytest.raises(FormatError, match="source and output are the same"):
        reshard.convert(tmp_path / "hf" / "model.safetensors", tmp_path / "hf", format="safetensors", overwrite=True)
    reshard.convert(tmp_path / "x.pt", tmp_path / "y.pt", format="torch_save")


def files_in(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


FRAMEWORKS = [
    "accel_fsdp2_w2/ckpt",
    "dcp_writer_variants_w2/ckpt/no_collectives",
    "ds_z1_w2/ckpt/global_step2",
    "ds_z1_w2/ckpt_universal",
    "fsdp1_flat_w2/ckpt/sharded_dcp",
    "light_fsdp_w2/ckpt/last.ckpt",
    "mcore_legacy_tp2_pp2/ckpt",
    "mcore_tp1/ckpt/iter_0000002",
    "pt_dtensor_2x2/ckpt",
    "tckpt_fsdp2_w2/ckpt",
]


@pytest.mark.parametrize("format", ["native", "dcp", "safetensors", "torch_checkpointing", "megatron", "deepspeed"])
def test_what_a_framework_left_is_not_mixed_with_what_is_written(format: Any, tmp_path: Path) -> None:
    """It hid what was written, which nothing said, or the two could not be told from one another."""
    reshard.save(trained(), tmp_path / "saved")
    reshard.convert(tmp_path / "saved", tmp_path / "alone", format=format)
    wanted = reshard.open(tmp_path / "alone")
    for name in FRAMEWORKS:
        for overwrite in (False, True):
            target = tmp_path / name.replace("/", "-") / str(overwrite)
            shutil.copytree(sample(name), target)
            before = reshard.open(target)
            try:
                reshard.convert(tmp_path / "saved", target, format=format, overwrite=overwrite)
            except FormatError:
                assert list(reshard.open(target)) == list(before)
            else:
                assert list(reshard.open(target)) == list(wanted)


@pytest.mark.parametrize("format", ["native", "dcp", "safetensors"])
def test_a_checkpoint_is_not_overwritten_unless_asked(format: str, saved: Path, tmp_path: Path) -> None:
    reshard.convert(saved, tmp_path / "c", format=format, select="model.embed")
    with pytest.raises(FormatError, match="already"):
        reshard.convert(saved, tmp_path / "c", format=format)

    reshard.convert(saved, tmp_path / "c", format=format, overwrite=True, max_shard_bytes=1000)

    assert len(reshard.open(tmp_path / "c")) >= 20


_PEAK = """
import sys, reshard
from reshard.api import convert
def status(what):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))
reshard.convert(sys.argv[1], sys.argv[2] + "0", format=sys.argv[3], select="small")  # imports and pools are made
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
reshard.convert(sys.argv[1], sys.argv[2], format=sys.argv[3], mapping={"renamed": "large"}, select="renamed")
print(status("VmHWM") - before)
"""


@pytest.mark.parametrize("format", ["native", "safetensors"])
def test_memory_does_not_grow_with_tensors(format: str, tmp_path: Path) -> None:
    """A tensor of 256 MB that has to be turned while it is read: in half of that."""
    if not os.path.exists("/proc/self/clear_refs"):
        pytest.skip("peaks of memory are read from /proc")
    large = torch.zeros(8192, 8192, dtype=torch.int32).T
    torch.save({"large": large, "small": torch.ones(3)}, tmp_path / "source.pt")
    del large
    target = tmp_path / "target"
    run = [sys.executable, "-W", "ignore", "-c", _PEAK, str(tmp_path / "source.pt"), str(target), format]

    done = subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True)

    assert int(done.stdout) < 128 << 20
    assert reshard.open(target)["renamed"].shape == (8192, 8192)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("dcp_fsdp2_tp_2x2", "ckpt"),
        ("ds_z3_w2", "ckpt"),
        ("mcore_tp2_pp2", "ckpt"),
        ("titan_llama_fsdp4", "ckpt/checkpoint/step-2"),
    ],
)
def test_model_only_of_any_framework(name: str, path: str, tmp_path: Path) -> None:
    source = sample(name) / path

    reshard.convert(source, tmp_path / "hf", format="safetensors", model_only=True)

    loaded = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    wanted = truth(name)["model"]
    assert set(loaded) <= set(wanted)
    assert len(loaded) >= len(wanted) - 2
    assert all(same(tensor, wanted[key].contiguous()) for key, tensor in loaded.items())


def test_killed_with_its_workers(tmp_path: Path) -> None:
    """A killed conversion takes its workers along; the next call goes on with what they had finished."""
    wanted = {f"w{i}": torch.full((1 << 18,), float(i)) for i in range(40)}
    reshard.save(wanted, tmp_path / "source")
    target = tmp_path / "target"
    code = "import sys, reshard; reshard.convert(sys.argv[1], sys.argv[2], max_shard_bytes=1 << 20, workers=2)"
    child = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "source"), str(target)])
    while child.poll() is None and len(list(target.glob("convert-*/data-*.json"))) < 3:
        time.sleep(0.002)
    child.kill()
    assert child.wait() == -signal.SIGKILL  # and not done already

    report = reshard.convert(tmp_path / "source", target, max_shard_bytes=1 << 20)

    assert 3 <= len(report.resumed) < 40
    assert reshard.verify(target, tmp_path / "source").ok


def test_objects_are_counted_alike_in_every_format(tmp_path: Path) -> None:
    """A list of plain values is one, whether each item has a key, as in our format, or none, as in DCP's."""
    state = {
        "groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["a", "b"]}, {"lr": 0.2}],  # 4
        "ids": list(range(50)),  # 1
        "nested": [1, 2, [3, 4], {"a": 1}],  # 3: the items, the list in it, and an entry of the dict in it
        "mixed": [torch.ones(2), 5, 6],  # 1
        "by_number": {0: "a", 1: "b"},  # 2
        "empty": [[], {}],  # 0
        "size": torch.Size([1, 2]),  # 1
    }
    assert reshard.save(state, tmp_path / "native").objects == 12
    save_alone(state, checkpoint_id=tmp_path / "dcp")
    torch.save(state, tmp_path / "torch.pt")
    for source in ("native", "dcp", "torch.pt"):
        report = reshard.convert(tmp_path / source, tmp_path / f"from-{source}", format="native")
        assert report.objects == count_objects(reshard.open(tmp_path / source).contents) == 12


@pytest.mark.parametrize("format", ["deepspeed", "megatron"])
def test_what_a_format_stores_in_a_form_of_its_own_is_counted_too(format: str, tmp_path: Path) -> None:
    """Steps and param groups, which are in small files beside the tensors."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    model_state, optim_state = reshard.get_state_dict(model, optimizer)
    saved = reshard.save({"model": model_state, "optim": optim_state, "step": 1}, tmp_path / "source")

    report = reshard.convert(tmp_path / "source", tmp_path / "out", format=format)

    assert report.tensors == saved.tensors == 8
    assert report.objects + len(report.omitted) == saved.objects


def test_a_conversion_to_one_file_does_not_look_into_folders_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder can be a home directory."""
    beside, looked = tmp_path / "photos" / "1999", []
    beside.mkdir(parents=True)
    (beside / "a.pt").write_bytes(b"of somebody else")
    reshard.save({"w": torch.arange(6.0)}, tmp_path / "saved")
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path=".": looked.append(Path(path)) or scan(path))
    for _ in range(2):
        reshard.convert(tmp_path / "saved", tmp_path / "out.pt", format="torch", overwrite=True)
    assert torch.load(tmp_path / "out.pt")["w"].equal(torch.arange(6.0))
    assert tmp_path in looked
    assert not any(path.is_relative_to(tmp_path / "photos") for path in looked)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.pt", "photos", "saved"]


@pytest.mark.parametrize("format", ["native", "dcp", "safetensors", "huggingface"])
def test_names_that_are_no_unicode_are_refused(format: str, tmp_path: Path) -> None:
    """A pickle holds any text, such as a file's name that is no UTF-8."""
    torch.save({"a\udcff": torch.arange(3.0)}, tmp_path / "m.pt")
    with pytest.raises(FormatError, match=r"a\\udcff' is not valid Unicode"):
        reshard.convert(tmp_path / "m.pt", tmp_path / "c", format=format)
    reshard.convert(tmp_path / "m.pt", tmp_path / "c", format=format, mapping={"a": "a\udcff"})
    assert torch.equal(reshard.open(tmp_path / "c")["a"][...], torch.arange(3.0))


def test_a_section_that_is_no_optimizer_does_not_keep_the_model_from_being_converted(tmp_path) -> None:
    reshard.save({"model": {"w": torch.ones(2)}, "optim": {"lr": 3e-4}}, tmp_path / "saved")
    with pytest.raises(
        NormalizationError, match=r"^'optim.lr' should be the dict .*leave the optimizer out, pass model"
    ):
        reshard.convert(tmp_path / "saved", tmp_path / "out", normalized=True)

    report = reshard.convert(tmp_path / "saved", tmp_path / "hf", format="huggingface", model_only=True)

    assert report.tensors == 1
    assert torch.equal(reshard.open(tmp_path / "hf")["w"][...], torch.ones(2))
