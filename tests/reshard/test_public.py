"""What one sees first of the package: its names, its version, what reports look like, and what a wrong call is told."""

from __future__ import annotations

import ast
import inspect
import json
import pickle
import pydoc
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn

import planners
import reshard
from planners import Finding, LayoutMismatchError, PlanError, Report, Topology, dumps
from reshard.api.key_suggestions import shifted
from reshard.checkpoint import NormalizedState
from reshard.errors import (
    FormatError,
    KeyMismatchError,
    LayoutError,
    NormalizationError,
    OptionError,
    ReshardError,
    StorageError,
)  # fmt: skip
from reshard.mapping import Rename
from reshard.storage.memory import MemoryStorage

NET = nn.Linear(4, 2)


def test_one_version() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")

    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev0)?", reshard.__version__)
    released = re.findall(r"^## \[(\d[^\]]*)\]", (Path(__file__).parents[2] / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert (reshard.__version__ in released) == (".dev" not in reshard.__version__)
    assert '[tool.hatch.version]\npath = "reshard/version.py"' in text
    storage = MemoryStorage()
    reshard.save({"step": 1}, storage)
    assert json.loads(storage.read("manifest.json"))["writer"] == f"reshard {reshard.__version__}"
    assert '\nversion = "' not in text


MODULES = ("dcp", "elastic", "errors", "mapping", "planners")


@pytest.mark.parametrize("package", [reshard, planners])
def test_dir_is_the_public_names_once(package) -> None:
    names = dir(package)

    assert names == sorted(set(names))
    assert set(names) - {"__version__", *MODULES, "open"} == set(package.__all__), "from reshard import * keeps open"
    assert all(getattr(package, name) is not None for name in names)


@pytest.mark.parametrize("package", [reshard, planners])
def test_type_checkers_see_every_name_and_no_others(package) -> None:
    """A `__getattr__` that they see would make any misspelt name right."""
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    blocks = {ast.unparse(node.test): node for node in tree.body if isinstance(node, ast.If)}
    told = {alias.asname or alias.name for n in ast.walk(blocks["TYPE_CHECKING"]) for alias in getattr(n, "names", [])}

    assert told - {"__version__", *MODULES, "open"} == set(package.__all__)
    assert [n.name for n in blocks["not TYPE_CHECKING"].body] == ["__getattr__"]
    assert "__getattr__" not in {getattr(node, "name", "") for node in tree.body}


def test_a_suggestion_ends_its_sentence() -> None:
    from reshard.errors import sentence

    assert sentence("no 'x': did you mean 'y'?") == "no 'x': did you mean 'y'?"
    assert sentence("no 'x'") == "no 'x'."
    assert sentence("No such command.") == "No such command."


def test_what_has_other_digits_or_was_given_is_not_suggested() -> None:
    from reshard.errors import did_you_mean

    known = ["float", "float16", "float64", "int8", "bfloat16", "layers.1.w"]
    for word, meant in (("flaot16", "float16"), ("bfloat61", "bfloat16"), ("layer.1.w", "layers.1.w")):
        assert did_you_mean(word, known) == f": did you mean {meant!r}?"
    for word in ("float99", "int128", "float32", "layers.2.w"):
        assert not did_you_mean(word, known)
    with pytest.raises(TypeError, match=r"'parts': it takes state_dict, path, "):
        reshard.load({}, "c", parts=2)  # type: ignore[call-arg]


def test_a_misspelt_name_is_told() -> None:
    with pytest.raises(AttributeError, match="no attribute 'sav': did you mean 'save'"):
        _ = reshard.sav
    with pytest.raises(AttributeError, match=r"'KeyMismatchError': it is reshard.errors.KeyMismatchError"):
        _ = reshard.KeyMismatchError
    code = "import reshard; print(reshard.errors.KeyMismatchError.__name__)"  # with no import of its own
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "KeyMismatchError\n"


def test_what_calls_return_is_public(tmp_path) -> None:
    state = {"w": torch.ones(2)}
    made = [reshard.async_save(state, tmp_path / "r" / "step-1"), *reshard.steps(tmp_path / "r")]
    made[0].result()
    checkpoint = reshard.open(tmp_path / "r")
    made += [
        checkpoint["w"],
        checkpoint.normalized(),
        reshard.compare(checkpoint, state),
        reshard.prepare(state, {"w": torch.zeros(2)}),
    ]
    made += [reshard.set_model_state_dict(NET, NET.state_dict()), *reshard.steps(tmp_path / "r")]
    assert {type(each).__name__ for each in made} >= {
        "PendingSave", "LazyTensor", "NormalizedState", "CompareReport", "Prepared", "SetReport", "Step",
    }  # fmt: skip
    assert all(getattr(reshard, type(each).__name__) is type(each) for each in made)


@pytest.mark.parametrize("name", ["load", "save", "open", "convert", "verify", "plan"])
def test_help_has_an_example(name) -> None:
    shown = pydoc.plain(pydoc.render_doc(getattr(reshard, name)))

    assert f"reshard.{name}(" in shown


def test_reports_are_one_short_line(tmp_path) -> None:
    state = {f"layers.{i}.weight": torch.ones(4) for i in range(2000)}
    saved = reshard.save(state, tmp_path / "c")
    report = reshard.load({**state, **{f"more.{i}": torch.ones(1) for i in range(2000)}}, tmp_path / "c", strict=False)
    moved = reshard.redistribute({"w": torch.ones(2)}, {"w": torch.zeros(2)})
    torn = Report("a plan", tuple(Finding("is missing", f"w{i}") for i in range(2000)), 2000)
    topology = planners.pipelined(planners.fsdp_tp(2, 2), 8, 800)
    options = reshard.StateDictOptions(strict=False)
    done = reshard.set_model_state_dict(NET, {f"x{i}": torch.ones(1) for i in range(2000)}, options=options)
    plan = reshard.plan(tmp_path / "c", "fsdp=2")
    for shown in map(repr, (saved, report, moved, torn, topology, done, plan, plan.wanted)):
        assert "\n" not in shown
        assert len(shown) < 600

    assert repr(report).startswith("LoadReport(not ok, loaded 2,000 keys of ")
    assert "missing 2000 ('more.0', 'more.1', 'more.2', ...)" in repr(report)
    assert repr(done).startswith("SetReport(missing 2 ('weight', 'bias'), unexpected 2000 ('x0', 'x1', 'x2', ...)")
    assert "2,000 tensors" in repr(saved)
    assert repr(moved).startswith("TransferReport(moved 1, ")
    assert "2,000 problems, the first: 'w0'" in repr(torn)
    assert "homes" in repr(topology)
    assert repr(planners.fsdp(2)).count("1 rule {") == 1
    assert Topology.parse(str(topology)) == topology


def test_a_plan_takes_what_the_command_line_takes(tmp_path) -> None:
    state = {"a.weight": torch.ones(6, 4), "b.weight": torch.ones(5)}
    reshard.save(state, tmp_path / "c")
    layout = planners.fsdp(3).layout(reshard.open(tmp_path / "c").layout.specs)
    (tmp_path / "wanted.json").write_text(dumps(layout))
    (tmp_path / "wanted.topology").write_text(str(planners.fsdp(3)))
    expected = reshard.plan(tmp_path / "c", planners.fsdp(3))

    for onto in ("fsdp=3", layout, tmp_path / "wanted.json", str(tmp_path / "wanted.topology"), str(planners.fsdp(3))):
        found = reshard.plan(str(tmp_path / "c"), onto)
        if onto == "fsdp=3":  # the axis has the name that was given
            assert {layout.mesh.names for layout in found.wanted.values()} == {("fsdp",)}
            assert [found.items(rank) for rank in range(3)] == [expected.items(rank) for rank in range(3)]
            continue
        assert found == expected
    assert reshard.plan(tmp_path / "c", "dp=3", rules={"*": "S(0)"}).rank_bytes().tolist() == [40, 40, 36]
    assert reshard.plan(tmp_path / "c", tmp_path / "c").wanted.world_size == 1
    with pytest.raises(PlanError, match="did you mean 'fsdp'"):
        reshard.plan(tmp_path / "c", "fspd=3")
    with pytest.raises(LayoutError, match="rules are for a topology"):
        reshard.plan(tmp_path / "c", tmp_path / "c", rules={"*": "R"})
    with pytest.raises(LayoutError, match=r"got dict: pass the layout of the state, reshard.layout_of\(state\)"):
        reshard.plan({"a": torch.ones(3)}, "fsdp=3")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=r"StateLayout, got 'fsdp=3': pass the checkpoint first"):
        reshard.plan("fsdp=3", tmp_path / "c")
    with pytest.raises(LayoutMismatchError):
        reshard.plan(layout, planners.fsdp(2).layout({"c": planners.TensorSpec("c", (2,), "float32")}))


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            lambda path: reshard.load(path, {"w": 1}),
            r"the path is the second argument: load\(state_dict, '.*'\), not load\(",
        ),
        (lambda path: reshard.save(path, {"w": 1}), r"the path is the second argument: save\("),
        (
            lambda path: reshard.load({"w": 1}, {"w": 1}),
            "load.state_dict, path. needs a path, URL, Storage, or open Checkpoint, got dict$",
        ),
        (
            lambda path: reshard.load({"w": 1}, NormalizedState()),
            r"open Checkpoint, got NormalizedState: call .canonical\(hints=...\) in place of .normalized",
        ),
        (
            lambda path: reshard.load(NET, path),
            "load takes a dict, but the first argument is the Linear itself. Write: reshard.load",
        ),
        (
            lambda path: reshard.save(NET, path),
            r"Write: reshard.save\({'model': model}, path\), or pass reshard.get_model_state_dict\(model\)$",
        ),
        (
            lambda path: reshard.save({"in": {NET}}, path),
            "'in' cannot be saved: .* make the model a value of a dict, as {'model': model}, or",
        ),
        (
            lambda path: reshard.save({"in": {torch.optim.SGD(NET.parameters())}}, path),
            "make it a value of a dict, as {'model': model, 'optim': optimizer}, or save get_optimizer",
        ),
        (lambda path: reshard.load(NET.state_dict, path), r"load is a function or method: call it, state_dict\(\)"),
        (
            lambda path: reshard.redistribute({"w": torch.ones(1)}, path),
            r"got str: .*to read a checkpoint, call reshard.load\(state, path\)",
        ),
        (lambda path: reshard.convert(path, path, format="safetensor"), "did you mean 'safetensors'"),
    ],
)
def test_wrong_calls_are_told_the_right_one(call, told, tmp_path) -> None:
    with pytest.raises(FormatError, match=told) as error:
        call(str(tmp_path / "c"))
    assert isinstance(error.value, OptionError) is not ("cannot be saved" in str(error.value))
    assert not (tmp_path / "c").exists()


def test_wrong_arguments_are_option_errors_of_the_classes_that_they_had(tmp_path) -> None:
    optimizer = torch.optim.SGD(NET.parameters())
    reshard.save({"w": torch.ones(2)}, tmp_path / "c")
    path, state, normalized = tmp_path / "c", {"w": torch.ones(2)}, NormalizedState()
    made = "pass reshard.get_model_state_dict(model)"
    canonical = "call .canonical(hints=...) in place of .normalized(hints=...)"
    calls: list[tuple[Any, type[ReshardError], str]] = [
        (
            lambda: reshard.plan(path, 3),
            LayoutError,
            "or text such as 'fsdp=4,tp=2', got int",
        ),
        (lambda: reshard.plan(normalized, "fsdp=2"), LayoutError, canonical),
        (lambda: reshard.convert(normalized, path), StorageError, canonical),
        (
            lambda: reshard.compare(path, NET),
            StorageError,
            f"compare: b must be a path, Checkpoint, or state dict, got Linear: {made}",
        ),
        (
            lambda: reshard.compare(optimizer, path),
            StorageError,
            "compare: a must be a path, Checkpoint, or state dict, got SGD: pass reshard.get_optimizer_state_dict(mo",
        ),
        (
            lambda: reshard.compare(path, 5),
            StorageError,
            "compare: b must be a path, Checkpoint, or state dict, got int",
        ),
        (lambda: reshard.verify(NET), StorageError, "a path must be a folder, URL, or Storage, got Linear"),
        (lambda: reshard.get_state_dict(optimizer, NET), NormalizationError, "the first argument must be the model"),
        (lambda: reshard.PerRank(1, on_change="foo"), KeyMismatchError, "on_change must be 'error', 'keep', 'drop'"),
        (lambda: reshard.redistribute(state, NET), FormatError, f"must be a dict or list, got Linear: {made}"),
        (lambda: reshard.fingerprint(NET), OptionError, f"an open Checkpoint, got Linear: {made}"),
        (lambda: reshard.layout_of(NET), OptionError, f"layout_of takes a state dict or a tensor, got Linear: {made}"),
        (lambda: reshard.layout_of({"m": NET}), OptionError, f"but the value under 'm' is Linear: {made}"),
        (lambda: reshard.layout_of([optimizer]), OptionError, "under 0 is SGD: pass reshard.get_optimizer_state_dict"),
        (lambda: reshard.layout_of(path), OptionError, "layout_of takes a state dict or a tensor, got PosixPath"),
        (lambda: reshard.convert(path, path, max_shard_bytes="5GB"), FormatError, "such as 5_000_000_000, got '5GB'"),
        (lambda: reshard.convert(path, path, dtype="bfloat61"), FormatError, "'bfloat61': did you mean 'bfloat16'?"),
        (lambda: reshard.convert(path, path, dtype="int8"), FormatError, "must be a floating-point type, got 'int8'"),
        (lambda: reshard.convert(path, path, dtype=torch.bool), FormatError, "would truncate weights, mostly to 0"),
        (
            lambda: reshard.convert(path, path, onto=2),
            OptionError,
            "onto must be a StateLayout or Topology, or text such as 'fsdp=4', got 2",
        ),
        (lambda: reshard.compare(path, path, rtol=-1), OptionError, "rtol must be a number >= 0, got -1"),
        (lambda: reshard.compare(path, path, atol=float("nan")), OptionError, "atol must be a number >= 0, got nan"),
        (lambda: reshard.verify(path, workers="two"), OptionError, "workers must be an integer >= 1, got 'two'"),
        (
            lambda: reshard.open(path).mapped({"w": "v"}),
            OptionError,
            "pass a reshard.mapping.Mapping, such as Mapping([",
        ),
        (
            lambda: reshard.load(optimizer, path),
            FormatError,
            "load takes a dict, but the first argument is the SGD itself. Write: reshard.load({'model': model, 'optim'",
        ),
        *(
            (
                partial(verb, reshard.get_state_dict(NET, optimizer), path),
                FormatError,
                f"{named} takes a dict, but the first argument is a tuple. Write: reshard.{named}({{'model': ",
            )
            for verb, named in ((reshard.save, "save"), (reshard.async_save, "save"), (reshard.load, "load"))
        ),
        (lambda: reshard.save(state, path, ranks_per_file=True), OptionError, "must be an integer >= 1, got True"),
        (
            lambda: reshard.convert(path, path, mapping=3),
            OptionError,
            "mapping must be a dict of names or a reshard.mapping",
        ),
        (lambda: reshard.convert(path, path, select=3), OptionError, "must be a glob or a list of globs, got 3"),
        (lambda: reshard.prepare(state, state, max_inflight_bytes=3), LayoutError, "must be at least 1024, got 3"),
        (lambda: reshard.StateDictOptions(strict=1), NormalizationError, "option strict must be a bool, got 1"),
        (lambda: reshard.StateDictOptions(broadcast_from_rank0=True), NormalizationError, "needs full_state_dict=True"),
        (
            lambda: reshard.get_model_state_dict(NET, options=3),
            NormalizationError,
            "be a StateDictOptions, as in StateDictOptions(strict=False), got int",
        ),
        (lambda: reshard.trace_layout(NET, world_size=2), OptionError, "got Linear: write trace_layout(lambda: "),
        (lambda: reshard.trace_layout(lambda: NET, world_size=0), LayoutError, "must be an integer >= 1, got 0"),
    ]
    for call, was, words in calls:
        with pytest.raises(was) as error:
            call()
        assert isinstance(error.value, OptionError), words
        assert words in str(error.value)
        again = pickle.loads(pickle.dumps(error.value))  # as workers of an executor send it
        assert (type(again), str(again)) == (type(error.value), str(error.value))


@pytest.mark.parametrize(
    ("verb", "given", "meant"),
    [
        ("compare", {"rtl": 0.1}, "rtol"),
        ("verify", {"worker": 2}, "workers"),
        ("open", {"stp": 1}, "step"),
        ("plan", {"rule": {}}, "rules"),
        ("StateDictOptions", {"full_state": True}, "full_state_dict"),
    ],
)
def test_misspelled_arguments_are_named(verb: str, given: dict[str, object], meant: str) -> None:
    words = rf"{verb}\(\) got an unexpected keyword argument '{next(iter(given))}'"
    with pytest.raises(TypeError, match=words + f": did you mean '{meant}'"):
        getattr(reshard, verb)(*["a", "b"][: {"compare": 2, "plan": 2, "StateDictOptions": 0}.get(verb, 1)], **given)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            lambda: reshard.load({}, checkpoint_id="c"),
            r"load\(\) .* 'checkpoint_id': pass .*, load\(state_dict, path\)",
        ),
        (
            lambda: reshard.save({}, checkpoint_id="c"),
            r"save\(\) .* 'checkpoint_id': pass .* name: save\(state_dict, path\)",
        ),
        (lambda: reshard.async_save({}, "c", no_dist=True), r"async_save\(\) .* 'no_dist': write alone=True$"),
        (lambda: reshard.load({}, "c", no_dist=True), r"load\(\) .* 'no_dist': write alone=True$"),
        (
            lambda: reshard.save({}, "c", planner=None),
            r"'planner': strict=, .* replace planners; reshard.dcp takes DCP's",
        ),
        (lambda: reshard.load({}, storage_reader=3), r"'storage_reader': the second argument is a path or URL; "),
        (lambda: reshard.save({}, storage_writer=3), r"'storage_writer': the second argument is a path or URL; "),
        (lambda: reshard.load({}, "c", map_location="cpu"), r"'map_location': tensors are filled on the device"),
        (
            lambda: reshard.load({}, "c", step=1),
            r"'step': pass the folder of the step, or reshard.open\(path, step=...\)",
        ),
        (lambda: reshard.Keep(max_to_keep=3), r"Keep\(\) .* 'max_to_keep': write Keep\(last=...\)"),
        (lambda: reshard.Every(save_interval_steps=3), r"'save_interval_steps': write every=Every\(steps=...\)"),
        (lambda: reshard.Keep(lats=3), r"Keep\(\) .* 'lats': did you mean 'last'"),
        (lambda: reshard.load({}, "c", allow_partial_load=True), r"'allow_partial_load': write strict=False$"),
        (lambda: reshard.load({}, "c", dtype="half"), r"'dtype': did you mean 'dtype_policy'\?$"),
        (
            lambda: reshard.load({}, "c", device="cuda"),
            r"'device': tensors are filled on the device they are on$",
        ),
        (lambda: reshard.Every(step=3), r"Every\(\) .* 'step': did you mean 'steps'\?$"),
        (lambda: reshard.compare("c", "c", select="a"), r"'select': pass reshard.open\(path\).select\(\.\.\.\)"),
        (lambda: reshard.verify("c", alone=True), "'alone': leave it out: save, async_save, load, and convert have it"),
        (lambda: reshard.verify("c", timeout=3), "'timeout': leave it out: only calls whose ranks wait for each other"),
        (
            lambda: reshard.set_model_state_dict(NET, {}, strict=False),
            r"'strict': .* pass options=reshard.StateDictOptions\(strict=False\); in reshard.dcp, pass planner=",
        ),
        (
            lambda: reshard.load({}, "c", select="a"),
            r"'select': .* or load a state with only these keys and strict=\"subset\"$",
        ),
        (
            lambda: reshard.save({}, "c", format="dcp"),
            r"'format': .*; reshard.convert\(path, target, format=...\) writes",
        ),
        (lambda: reshard.save({}, "c", compress=True), r"'compress': data are stored uncompressed$"),
        (lambda: reshard.save({}, "c", blocking=False), r"'blocking': reshard.async_save saves in the background$"),
        (
            lambda: reshard.save(NET, torch.optim.SGD(NET.parameters()), "c"),
            r"^save\(\) takes one dict: write reshard.save\(\{'model': model, 'optim': optimizer\}, path\)$",
        ),
        (lambda: reshard.save({}, "c", 5), r"^save\(\) takes only state_dict, path by position, but also got 5: .*=$"),
        (lambda: reshard.open("c", 5), r"^open\(\) takes only path by .*: pass all others by name, such as step=$"),
        (
            lambda: reshard.get_model_state_dict(NET, torch.optim.SGD(NET.parameters())),
            r"submodules=. For both states: get_state_dict\(model, o",
        ),
        (lambda: reshard.prune("c", 5), r"^prune\(\) takes only folder by position, .* got 5: .* such as keep_last=$"),
        (lambda: reshard.prune("c", keep=5), r"'keep': did you mean 'keep_last'\?$"),
        (lambda: reshard.open(checkpoint_id="c"), r"'checkpoint_id': pass the path without a name: .*, open\(path\)$"),
        (lambda: reshard.open("c", framework="pt"), r"'framework': leave it out: tensors are torch's$"),
        (
            lambda: reshard.get_model_state_dict(torch.nn.Linear(1, 1), full_state_dict=True),
            r"pass options=reshard.StateDictOptions\(full_state_dict=True\)$",
        ),
        (
            lambda: reshard.set_state_dict(torch.nn.Linear(1, 1), [], {}, {}),
            r"^set_state_dict\(\) .* got a dict: .* model_state_dict=, optim_state_dict=$",
        ),
        (
            lambda: reshard.CheckpointManager("c", every=reshard.Every(steps=1), options=3),
            r"'options': pass every= and keep=, as in CheckpointManager\(root, every=Every\(steps=500\)",
        ),
        (lambda: reshard.ElasticSampler(9, num_replicas=2), r"'num_replicas': write parts=$"),
        (lambda: reshard.open("c", weights_only=True), r"'weights_only': leave it out: no code from a checkpoint runs"),
    ],
)
def test_arguments_of_torch_are_told_those_of_reshard(call: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        call()


def test_what_was_given_in_place_of_what_is_taken(tmp_path) -> None:
    data: Any = torch.utils.data.TensorDataset(torch.ones(3))
    given: Any = {"a": "b"}
    for call, told in (
        (lambda: reshard.ElasticSampler(data), r"samples, ElasticSampler\(len\(dataset\)\), not a TensorDataset$"),
        (
            lambda: reshard.Mapping(given),
            r"consists of rules, .*, but contains 'a'. A dict of names needs no Mapping: ",
        ),
        (
            lambda: Rename("model.*", "net.*"),
            r"^Rename\('model.\*' -> 'net.\*'\): rules have placeholders in place of \*: ",
        ),
        (
            lambda: reshard.normalize(tmp_path),
            r"takes a state dict, got PosixPath. For a checkpoint: reshard.open\(path\)",
        ),
        (lambda: reshard.Preemption(signals=15), r"signals must be a list, such as \[signal.SIGTERM\], got 15"),
        (lambda: reshard.plan(tmp_path, "dp=2", rules=[("*", "S(0)")]), "rules must be a dict of text, such as"),
        (lambda: reshard.plan(tmp_path, "dp=2", rules={"*": data}), "rules must be a dict of text, such as"),
    ):
        with pytest.raises(ReshardError, match=told):
            call()


def test_tracebacks_name_errors_where_users_import_them() -> None:
    for name in reshard.errors.__all__:
        kind = getattr(reshard.errors, name)
        assert f"{kind.__module__}.{kind.__qualname__}" == f"reshard.errors.{name}"
        assert pickle.loads(pickle.dumps(kind)) is kind
    error = pickle.loads(pickle.dumps(reshard.errors.PlanError("x", fqn="w")))
    assert str(error) == "x (tensor 'w')"


def test_every_error_of_a_verb_is_a_reshard_error(tmp_path) -> None:
    reshard.save({"w": torch.ones(4)}, tmp_path / "c")
    for call in (
        lambda: reshard.plan(tmp_path / "c", "fspd=3"),
        lambda: reshard.plan(tmp_path / "c", "dp=4", rules={"*": "S(5)"}),
        lambda: reshard.plan(tmp_path / "c", planners.fsdp(2).layout([planners.TensorSpec("v", (2,), "float32")])),
    ):
        with pytest.raises(ReshardError) as caught:
            call()
        assert isinstance(caught.value, planners.PlanError)


def test_a_report_prints_its_phases_on_a_line_of_its_own(tmp_path) -> None:
    saved = reshard.save({"w": torch.ones(4)}, tmp_path / "c")

    head, phases = str(saved).splitlines()
    assert head == repr(saved)
    assert [part.split()[0] for part in phases.split(", ")][:1] == [next(iter(saved.seconds)).split()[0]]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: reshard.load("path"), r"was called with 'path' only. .*reshard.open\('path'\)$"),
        (lambda: reshard.load(path="path"), r"was called with 'path' only. .*reshard.open\('path'\)$"),
        (
            lambda: reshard.load({"w": 1}),
            r"load\(\) was called without path: write load\(state_dict, path\)",
        ),
        (
            lambda: reshard.save({"w": 1}),
            r"save\(\) was called without path: write save\(state_dict, path\)",
        ),
        (lambda: reshard.save(), r"^save\(\) was called without state_dict and path: write save\(state_dict, path\)$"),
        (
            lambda: reshard.get_state_dict(NET),
            r"^get_state_dict\(\) was called without optimizers: write .*, optimizers\)$",
        ),
        (
            lambda: reshard.get_state_dict(optimizers=[]),
            r"^get_state_dict\(\) was called without model: write get_state",
        ),
        (
            lambda: reshard.set_state_dict(NET, [], model_state_dict={}),
            r"without optim_state_dict: write .*\(model, optimizers, model_state_dict=..., optim_state_dict=...\)$",
        ),
        (lambda: reshard.compare("a"), r"^compare\(\) was called without b: write compare\(a, b\)$"),
        (
            lambda: reshard.prune("run"),
            r"^prune\(\) was called without keep_last: write prune\(folder, keep_last=...\)$",
        ),
        (lambda: reshard.CheckpointManager(every=reshard.Every(1)), r"without root: write CheckpointManager\(root\)$"),
        (
            lambda: reshard.CheckpointManager.save(None, 5),
            r"^CheckpointManager.save\(\) was called without state: write CheckpointManager.save\(step, state\)$",
        ),
        (
            lambda: reshard.elastic.Tier("run").save({}),
            r"^Tier.save\(\) was called without step: write Tier.save\(state_dict",
        ),
        (lambda: reshard.CheckpointManager.restore(None), r"without state: write CheckpointManager.restore\(state\)$"),
        (
            lambda: reshard.async_save("path"),
            r"async_save\(state_dict, path\) was called with 'path' only: pass the state first",
        ),
    ],
)
def test_half_a_call_is_told_the_whole(call, told) -> None:
    with pytest.raises(TypeError, match=told):
        call()
    with pytest.raises(TypeError, match="unexpected keyword argument 'strct': did you mean 'strict'"):
        reshard.load({}, "path", strct=False)  # type: ignore[call-arg]


@pytest.mark.parametrize("model", [{"w": 1}, "path", torch.optim.SGD(NET.parameters()), 3, torch.ones(2)])
def test_what_is_no_model_is_told_what_comes_first(model) -> None:
    optimizer = torch.optim.SGD(NET.parameters())
    for call in (
        lambda: reshard.get_model_state_dict(model),
        lambda: reshard.get_state_dict(model, optimizer),
        lambda: reshard.set_model_state_dict(model, NET),
        lambda: reshard.set_optimizer_state_dict(model, optimizer, {}),
    ):
        with pytest.raises(
            NormalizationError, match=f"first argument must be the model .*, got {type(model).__name__}"
        ):
            call()


def test_paths_that_are_none_are_told_in_one_line(tmp_path) -> None:
    for call in (lambda: reshard.verify(torch.nn.Sequential(NET, NET)), lambda: reshard.open(NET)):
        with pytest.raises(ReshardError, match="a path must be a folder, URL, or Storage, got") as error:
            call()
        assert "\n" not in str(error.value)
    with pytest.raises(ReshardError, match=r"snapshot_download\('some/model'\)"):
        reshard.open("hf://some/model")


def test_a_model_of_the_hub_is_not_here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(FileNotFoundError, match=r"snapshot_download\('some-people/a-model-8.1B'\)"):
        reshard.open("some-people/a-model-8.1B")
    (tmp_path / "some-people").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no such file or folder: 'some-people/a-model-8.1B' \("):
        reshard.open("some-people/a-model-8.1B")


def test_notebooks_show_plans_as_pages_and_reports_as_tables(tmp_path) -> None:
    state = {"<w>": torch.ones(6, 4), "b": torch.ones(2)}
    saved = reshard.save(state, tmp_path / "c")
    loaded = reshard.load({**state, "new": torch.ones(1)}, tmp_path / "c", strict=False)
    done = reshard.set_model_state_dict(NET, {"x": torch.ones(1)}, options=reshard.StateDictOptions(strict=False))
    made = reshard.convert(tmp_path / "c", tmp_path / "d")
    torn = Report("a plan", (Finding("is missing", "w0"),), 2)
    for report in (saved, loaded, done, made, torn, reshard.redistribute({"w": torch.ones(2)}, {"w": torch.zeros(2)})):
        assert report._repr_html_().startswith(f"<table><caption>{type(report).__name__}</caption><tr>")
    assert 'missing</th><td style="text-align: left">1: new</td>' in loaded._repr_html_()
    assert 'bytes needed</th><td style="text-align: left">104 B</td>' in loaded._repr_html_()
    assert "2: &lt;w&gt;, b</td>" in loaded._repr_html_()

    stages = planners.pipelined(planners.fsdp_tp(2, 2), 8, 800)._repr_html_()
    assert stages.startswith("<pre>")
    assert "-&gt;" in stages
    assert len(stages.splitlines()) < 50

    plan = reshard.plan(tmp_path / "c", "fsdp=2")
    for drawn in (plan, planners.plan_writes(plan.wanted), planners.plan_transfers(plan.saved, plan.wanted)):
        shown = drawn._repr_html_()
        assert shown.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
        assert shown.count("<") == 2


LAYERS = {f"layers.{i}.{name}": torch.ones(2) for i in range(70) for name in ("a", "b")}
WRAPPED = {f"module.{k}": v for k, v in LAYERS.items()}
COMPILED = {f"{k[:-1]}_orig_mod.{k[-1]}": v for k, v in LAYERS.items()}
NESTED = {f"net.{k}": v for k, v in LAYERS.items()}


@pytest.mark.parametrize(
    ("state", "saved", "told"),
    [
        (LAYERS, {"model": LAYERS, "step": 1}, "140 missing keys .* 'model.', which the ch.*load.{'model': state}, p"),
        ({"model": LAYERS}, LAYERS, r"prefix 'model.', which the state to load into has.*load\(state\['model'\], p"),
        (LAYERS, {"a": {"b": LAYERS}}, r"'a.b.', which the checkpoint has.*load\({'a': {'b': state}}, p"),
        ({f"module.{k}": v for k, v in LAYERS.items()}, LAYERS, "'module.' comes from a wrapper: save and load r"),
        ({"m": WRAPPED}, {"m": LAYERS}, r"140 .* segments 'module': 'm.module.layers.0.a' may cor.*get_model_state"),
        ({"m": LAYERS}, {"m": COMPILED}, "140 .* '_orig_mod': 'm.layers.0.a' may correspond to 'm.layers.0._orig_mod."),
        ({"m": LAYERS}, {"m": NESTED}, "140 .* only by 'net.' after 'm.', which the ch.*rename keys with mapping="),
        ({"m": NESTED}, {"m": LAYERS}, "140 .* 'net.' after 'm.', which the state .* 'm.net.layers.0.a' may cor"),
        (LAYERS, {"x": 1}, r"140 missing .*\n    layers.\*   \(140, such as 'layers.0.a'\)\n"),
        (LAYERS, {"layers.70.a": 1}, r"140 missing .*\n    layers.\*.a   \(70, such as .*\n    layers.\*.b   \(70"),
        ({**LAYERS, "layers.70.a": torch.ones(2)}, LAYERS, r"1 missing from the checkpoint:\n    layers.70.a\n  fix"),
        ({f"{a}{b}.{a}": torch.ones(1) for a in "abcdefghij" for b in "abcdefghij"}, {"x": 1}, "and 80 more\n    .lo"),
    ],
)  # fmt: skip
def test_keys_that_differ_by_a_level_are_told_as_one_and_floods_by_pattern(state, saved, told, tmp_path) -> None:
    reshard.save(saved, tmp_path / "c")

    with pytest.raises(KeyMismatchError) as error:
        reshard.load(state, tmp_path / "c")

    assert re.search(told, str(error.value), re.S)
    assert len(str(error.value).splitlines()) < 30


def test_a_stack_is_not_said_to_be_one_of_its_parts(tmp_path) -> None:
    """Which one depended on the order of a set, and so on the rank."""
    reshard.save({f"layers.{i}.experts.{e}.w": torch.ones(2) for i in range(2) for e in range(8)}, tmp_path / "c")

    with pytest.raises(KeyMismatchError) as error:
        reshard.load({f"layers.{i}.experts.w": torch.ones(8, 2) for i in range(2)}, tmp_path / "c")

    assert "2 missing from the checkpoint" in str(error.value)
    assert "saved as" not in str(error.value)
    assert "nest the state" not in str(error.value)


def test_of_several_prefixes_all_ranks_tell_the_same(tmp_path) -> None:
    found = shifted(["a", "b"], [f"{front}.{name}" for front in ("tt", "ss", "rr", "uu") for name in "ab"])
    assert found is not None
    assert dict(found.names) == {"a": "rr.a", "b": "rr.b"}


def _stepped() -> torch.optim.Optimizer:
    """An optimizer that has state."""
    optimizer = torch.optim.Adam(NET.parameters())
    NET(torch.ones(1, NET.in_features)).sum().backward()
    optimizer.step()
    return optimizer


def test_another_top_level_key_is_told(tmp_path) -> None:
    model, optim = reshard.get_state_dict(NET, _stepped())
    reshard.save({"model": model, "optimizer": optim}, tmp_path / "c")

    with pytest.raises(KeyMismatchError) as error:
        reshard.load({"model": model, "optim": optim}, tmp_path / "c")

    assert "only by the top-level key, 'optim' in place of 'optimizer'" in str(error.value)
    assert "fix: call it 'optimizer', or rename keys with mapping=" in str(error.value)
    assert shifted(["a.w", "a.v"], ["b.w", "b.v", "c.w", "c.v"]) is None  # either may be meant
    assert shifted(["0", "1"], ["betas.0", "betas.1"]) is None  # positions, which any list has


def test_states_by_number_are_told_where_names_are(tmp_path) -> None:
    optimizer = _stepped()
    model, optim = reshard.get_state_dict(NET, optimizer)
    reshard.save({"model": model, "optim": optim}, tmp_path / "c")

    with pytest.raises(KeyMismatchError, match=r"optimizer_destinations\(model, optimizer, path\)") as error:
        reshard.load({"model": model, "optim": optimizer.state_dict()}, tmp_path / "c")

    assert "did you mean 'optim.state" not in str(error.value)


def test_each_result_prints_as_one_line(tmp_path: Path) -> None:
    state = {"w": torch.ones(4), "step": 1}
    reshard.save(state, tmp_path / "saved")
    (tmp_path / "notes.txt").write_text("text")

    converted = reshard.convert(tmp_path / "saved", tmp_path / "hf", format="safetensors")
    with reshard.CheckpointManager(tmp_path / "run", every=reshard.Every(steps=2)) as manager:
        with pytest.raises(OptionError, match=r"as in save\(step, state\), got a dict: the arguments are swapped$"):
            manager.save({"w": torch.ones(4), "more": "x" * 1000}, 1)  # type: ignore[arg-type]
        idle, due, again = manager.save(1, state), manager.save(2, state), manager.save(2, state)
        manager.wait()
        restored = manager.restore(state)

    place = f"{str(tmp_path / 'saved')!r} to {str(tmp_path / 'hf')!r}"
    assert repr(converted) == f"ConvertReport(1 tensor, 16 B from {place}, safetensors, omitted 1 ('step'))"
    assert repr(idle) == "StepReport(step 1, not due)"
    assert repr(due) == "StepReport(step 2, saving to storage (every 2 steps))"
    assert repr(again) == "StepReport(step 2, saved by an earlier call)"
    assert not again
    assert restored is not None
    assert repr(restored) == f"RestoreReport(step 2 from storage, {str(tmp_path / 'run' / 'step-2')!r})"
    partly = replace(restored, load=replace(restored.load, unchecked="12 % unchecked"))
    assert repr(partly) == f"{repr(restored)[:-1]}, 12 % unchecked)"
    pending = reshard.async_save(state, tmp_path / "pending")
    saved = pending.result()
    assert repr(pending) == f"PendingSave({saved!r})"
    assert repr(saved).startswith("SaveReport(1 tensor, 1 object, 16 B in ")
    with pytest.raises(FormatError, match=r"notes\.txt is not a checkpoint in a known format\. Known formats are"):
        reshard.open(tmp_path / "notes.txt")
    assert repr(reshard.prepare(state, {"w": torch.zeros(4), "step": 0})) == "Prepared(1 tensor)"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Topology", "it is reshard.planners.Topology"),
        ("Rename", "it is reshard.mapping.Rename"),
        ("FileSystemWriter", "it is reshard.dcp.FileSystemWriter"),
        ("CheckpointError", "it is reshard.errors.CheckpointError"),
        ("safe_open", r"reshard.open\(file\) reads it lazily"),
        ("to_html", r"plans, checkpoints, and comparisons have it: plan.to_html\(\)"),
        ("diff", "reshard.compare compares checkpoints, reshard.planners.diff plans"),
        ("latest_checkpoint", r"reshard.latest_complete\(folder\) returns its path"),
        ("async_load", "reshard.load fills a state dict; there is no asynchronous load"),
        ("compare_checkpoints", r"did you mean 'compare'\?"),
        ("verify_checkpoint", r"did you mean 'verify'\?"),
    ],
)
def test_names_that_are_elsewhere_are_told_where(name: str, told: str) -> None:
    with pytest.raises(AttributeError, match=rf"^module 'reshard' has no attribute '{name}': {told}$"):
        getattr(reshard, name)


def test_values_of_a_wrong_kind_are_told_the_right_one(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    reshard.save({"model": {"w": torch.ones(4, 2)}}, "run/step-7")
    checkpoint, plan = reshard.open("run/step-7"), reshard.plan("run/step-7", "fsdp=2")
    Path("model.pt").touch()
    net: Any = NET
    for call, told in (
        (lambda: reshard.open("model.pt/x/y"), r"folder: 'model.pt/x/y', since model.pt is a file: check the path$"),
        (lambda: reshard.open("rnu/step-7"), r"since there is no rnu .*: did you mean 'run'\?$"),
        (lambda: reshard.open("run/stpe-7"), r"folder: 'run/stpe-7' .*: did you mean 'run/step-7'\?$"),
        (lambda: reshard.open("run", step="7"), r"^step must be an integer, got '7'$"),
        (lambda: reshard.open("run/step-7", check="no"), r"^check must be True or False, got 'no'$"),
        (lambda: checkpoint.canonical(model_only="no"), r"^model_only must be True or False, got 'no'$"),
        (
            lambda: reshard.save({"w": checkpoint["model.w"]}, "x"),
            r"LazyTensor is not plain data; read it first, as in",
        ),
        (lambda: reshard.compare("run/step-7", "run/step-7", rtol="x"), r"^rtol must be a number >= 0, got 'x'$"),
        (lambda: reshard.compare("run/step-7", "run/step-7", labels="ab"), r"^labels must be a pair of strings"),
        (lambda: reshard.compare("run/step-7", "run/step-7", workers="x"), r"^workers must be an integer >= 1, got"),
        (lambda: reshard.load({}, "run/step-7", threads="x"), r"^threads must be an integer >= 1, got 'x'$"),
        (lambda: reshard.load({}, "run/step-7", memory_budget_bytes="1GB"), r"^memory_budget_bytes must be an integer"),
        (
            lambda: reshard.load({}, "run/step-7", mapping={1: 2}),
            r"^mapping must be a dict of names or a reshard.mappi",
        ),
        (
            lambda: reshard.fingerprint({}, key=1),
            r"^key must be a Key, such as reshard.fingerprints.Key\(secret\), got 1",
        ),
        (lambda: reshard.redistribute({}, {}, views=3), r"^views must be a list of views, got 3$"),
        (lambda: reshard.redistribute({}, {}, max_inflight_bytes="x"), r"^max_inflight_bytes must be an integer"),
        (lambda: reshard.convert("run/step-7", "x", hints=3), r"^hints must be a dict, such as {'vocab_size': 50257}"),
        (lambda: reshard.plan("run/step-7", "fsdp=2", allow_unsharded_axes="x"), r"^allow_unsharded_axes must be Tr"),
        (lambda: checkpoint.to_html(histograms=3), r"^histograms must be a glob, such as '\*.weight', got 3$"),
        (
            lambda: reshard.mapping.Rename(3, "a"),
            r"^names in rules must be strings, such as Rename\('a', 'b'\): got 3$",
        ),
        (lambda: reshard.Mapping(3), r"^a Mapping consists of rules, as in Mapping\(\[Rename"),
        (lambda: reshard.mapping.ready(3, "huggingface", "torchtitan"), r"^config must be a path or a dict, got 3$"),
        (lambda: planners.diff(3, 4), r"^cannot compare int: give plans or layouts$"),
        (lambda: reshard.save({}, "x", overwrite="no"), r"^overwrite must be True or False, got 'no'$"),
        (lambda: reshard.load({}, "run/step-7", progress=2), r"^progress must be True or False, got 2$"),
        (lambda: reshard.load({}, "run/step-7", dry_run="no"), r"^dry_run must be True or False, got 'no'$"),
        (lambda: reshard.convert("run/step-7", "x", overwrite="no"), r"^overwrite must be True or False"),
        (lambda: reshard.compare("run/step-7", "x", measure=1), r"^measure must be True or False, got 1$"),
        (lambda: reshard.verify("run/step-7", deep="no"), r"^deep must be True or False, got 'no'$"),
        (lambda: reshard.elastic.gather(["a"], "x", overwrite="no"), r"^overwrite must be True or False"),
        (lambda: reshard.redistribute({}, {}, strict="partial"), r"^strict must be True or False"),
        (lambda: checkpoint["model"], r"that is a part of names such as 'model.w': .nested\(\) returns the nested"),
        (
            lambda: reshard.convert("run/step-7", "x", dtype="bflot16"),
            r"^unknown dtype 'bflot16': did you mean 'bfloat16'\?$",
        ),
        (
            lambda: reshard.convert("run/step-7", "x", dtype="whole"),
            r"'whole': write the name of a torch dtype, such as 'bfl",
        ),
        (
            lambda: reshard.layout_of("run/step-7"),
            r"got str: for a checkpoint, reshard.open\(path\) reads it, and its .l",
        ),
        (
            lambda: reshard.plan("run/step-7", "fsdp"),
            r"^'fsdp' is neither a path nor a topology\. Write a topology like",
        ),
        (lambda: plan.to_html(cluster=3), r"^cluster must be a Cluster, got 3$"),
        (lambda: reshard.verify(plan), r"got LoadPlan: plan.verify\(\) proves a plan$"),
        (lambda: planners.format_plan("run"), r"^format_plan takes a plan or a schedule, got 'run'$"),
        (
            lambda: reshard.WeightSource(net),
            r"takes the state dict of a model, got Linear: pass reshard.get_model_state",
        ),
        (lambda: reshard.WeightSource({}, dtype=torch.int8), r"a floating-point torch.dtype, .*, got torch.int8$"),
        (
            lambda: reshard.WeightSource({}, dtype="half"),
            r"^dtype must be a floating-point torch.dtype, such as .*, got 'half'$",
        ),
        (lambda: reshard.elastic.gather("mem", "x"), r"^folders must be a list of the folders of hosts, .* \['mem'\]$"),
        (lambda: reshard.save({1.5: torch.ones(1)}, "x"), r"^the state cannot be saved: a Tensor is in a place"),
        (
            lambda: reshard.get_model_state_dict(NET, options={"strict": False}),  # type: ignore[arg-type]
            r"^options must be a StateDictOptions, as in StateDictOptions\(strict=False\), got dict$",
        ),
    ):
        with pytest.raises(ReshardError, match=told):
            call()
    for name, told in (
        ("state_dict", r".nested\(\) returns the nested state, lazily"),
        ("get_tensor", r"index it: checkpoint\[name\]\[...\]"),
        ("problem", r"did you mean 'problems'"),
        ("step", r".objects has all values that are not tensors, by name"),
        ("model", r".nested\(\)\['model'\] has it"),
        ("optimizer", r".normalized\(\) returns a dict with 'model' and 'optim'"),
        ("names", r"iterate over it: list\(checkpoint\)"),
        ("path", r".url says where it is"),
    ):
        with pytest.raises(AttributeError, match=rf"^'Checkpoint' object has no attribute '{name}': {told}"):
            getattr(checkpoint, name)
    with pytest.raises(
        AttributeError, match=r"^'LazyTensor' object has no attribute 'read': read it with \[...\] first"
    ):
        checkpoint["model.w"].read  # noqa: B018


@pytest.mark.parametrize("name", ["alone", "timeout", "procs_group"])
def test_every_function_says_what_to_write_for_an_argument_that_it_does_not_have(name) -> None:
    """`alone=True` above all, which only a few verbs have."""
    verbs = [verb for word in reshard.__all__ if isinstance(verb := getattr(reshard, word), FunctionType)]
    others = {reshard.layout_of, reshard.dequantized, reshard.register_tensor_class}  # below the layer of arguments
    without = [verb for verb in {*verbs} - others if name not in inspect.signature(verb).parameters]
    assert len(without) > 15
    transfers = {reshard.redistribute, reshard.prepare, reshard.verify_live}
    having = {*transfers, reshard.WeightSource}
    without = [verb for verb in [*without, reshard.WeightSource] if name != "timeout" or verb not in having]
    for verb in [*without, reshard.Every]:
        args = ({}, {}) if verb in transfers else ()
        with pytest.raises(
            TypeError, match=f"unexpected keyword argument '{name}': (leave it out: |it takes |did|its o)"
        ):
            verb(*args, **{name: 1})


@pytest.mark.parametrize("verb", [reshard.redistribute, reshard.prepare, reshard.verify_live])
def test_an_unknown_option_of_a_transfer_is_the_one_that_is_named(verb) -> None:
    with pytest.raises(TypeError, match="'max_inflight': did you mean 'max_inflight_bytes'"):
        verb({}, {}, timeout=5, max_inflight=1)
    with pytest.raises(TypeError, match="'alone': leave it out"):
        verb({}, {}, timeout=5, alone=True)


@pytest.mark.parametrize("verb", [reshard.save, reshard.load, reshard.async_save])
def test_alone_is_a_flag(verb, tmp_path) -> None:
    with pytest.raises(OptionError, match="alone must be True or False, got 'no'"):
        verb({"w": torch.ones(2)}, tmp_path, alone="no")
    with pytest.raises(OptionError, match="alone must be True or False, got 'no'"):
        reshard.convert(tmp_path, tmp_path / "out", alone="no")


def test_a_folder_that_is_called_as_a_file_is_told(tmp_path, caplog) -> None:
    reshard.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    reshard.convert(tmp_path / "model.pt", tmp_path / "model.safetensors")
    reshard.convert(tmp_path / "model.pt", tmp_path / "other.pt", format="torch")
    reshard.convert(tmp_path / "model.pt", tmp_path / "hf.safetensors", format="safetensors")
    told = [record.getMessage().split(". ")[0].rpartition("/")[2] for record in caplog.records]
    assert caplog.messages[0].endswith("Only the format torch_save writes a file at the path that you give")
    assert told == [f"{name} becomes a folder" for name in ("model.pt", "model.safetensors", "hf.safetensors")]
