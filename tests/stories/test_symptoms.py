"""What users see first when something is wrong: each error is provoked as it happens, and says what to do."""

from __future__ import annotations

import ast
import copy
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import reshard
from reshard.errors import CorruptCheckpointError, KeyMismatchError, OptionError, StorageError


def _trained(steps: int = 1) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
    return model, optimizer


def test_a_folder_that_cannot_be_written_to() -> None:
    with pytest.raises(StorageError) as caught:
        reshard.save({"w": torch.ones(2)}, "/proc/step-1")
    assert str(caught.value).startswith("cannot write to /proc/step-1: ")
    assert str(caught.value).endswith(". Fix this, or use another folder")
    assert ".tmp" not in str(caught.value)


def test_an_optimizer_that_was_not_saved_takes_one_line(tmp_path: Path) -> None:
    model, optimizer = _trained()
    names = reshard.get_model_state_dict(model)
    reshard.save({"model": names}, tmp_path / "c")
    with pytest.raises(KeyMismatchError) as caught:
        reshard.load({"model": names, "optim": reshard.get_optimizer_state_dict(model, optimizer)}, tmp_path / "c")
    head, title, *rows, rename, partial, lenient = str(caught.value).splitlines()
    assert head == f"{tmp_path / 'c'} does not match the state to load into:"
    assert rename == "  fix: mapping= renames keys"
    allows = "allows these keys to be missing or unexpected; missing ones keep their values"
    assert partial == f"  or:  strict={{'optim.*': 'partial'}} {allows}"
    assert lenient == "  or:  strict=False allows this for all keys"
    assert title == "  25 missing from the checkpoint:"
    assert rows == ["    optim.*   (25, such as 'optim.state.0.weight.step')"]


def test_only_the_first_way_to_fix_is_called_fix(tmp_path: Path) -> None:
    reshard.save({"w": torch.ones(2)}, tmp_path / "c")
    with pytest.raises(KeyMismatchError) as load:
        reshard.load({"w": torch.ones(3).bfloat16(), "v": torch.ones(2)}, tmp_path / "c")
    with pytest.raises(KeyMismatchError) as move:
        reshard.redistribute({"w": torch.ones(2)}, {"w": torch.ones(2).bfloat16(), "v": torch.ones(2)})
    with pytest.raises(KeyMismatchError) as model:
        reshard.set_model_state_dict(torch.nn.Linear(2, 2), {"module.weight": torch.ones(2, 2)})
    net = torch.nn.Linear(2, 2)
    with pytest.raises(KeyMismatchError) as optimizer:
        reshard.set_optimizer_state_dict(net, torch.optim.AdamW(net.parameters()), {"state": {"x": {"step": 1}}})
    for caught in (load, move, model, optimizer):
        starts = [line[:7] for line in str(caught.value).splitlines() if line.startswith(("  fix: ", "  or: "))]
        assert starts == ["  fix: ", *["  or:  "] * (len(starts) - 1)]
        assert "manager" not in str(caught.value)
        assert "restore" not in str(caught.value)
    assert "  or:  strict={'v': 'partial'} allows" in str(load.value)
    assert "  or:  StateDictOptions" not in str(model.value)


def test_a_fresh_optimizer_has_no_place_for_its_state(tmp_path: Path) -> None:
    model, optimizer = _trained()
    names, states = reshard.get_state_dict(model, optimizer)
    reshard.save({"model": names, "optim": states}, tmp_path / "c")
    fresh = torch.optim.AdamW(model.parameters())
    with pytest.raises(
        KeyMismatchError, match=r"\n  fix: the optimizer has no state yet: load into reshard.optimizer_"
    ):
        reshard.load({"model": names, "optim": fresh.state_dict()}, tmp_path / "c")


@pytest.mark.parametrize("target", ["by name", "fresh, by name", "torch's, fresh", "of another name"])
@pytest.mark.parametrize("form", ["native", "legacy.pt"])
def test_state_under_integer_ids_is_named_as_such_and_the_fix_loads_all_of_it(
    form: str, target: str, tmp_path: Path
) -> None:
    model, optimizer = _trained()
    path = str(tmp_path / form)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    reshard.save(saved, path) if form == "native" else torch.save(saved, path)
    want = copy.deepcopy(saved)
    trained = optimizer
    model, optimizer = _trained(steps=0)
    if target == "by name":
        model, optimizer = _trained(steps=2)
    state: Any = dict(zip(("model", "optimizer"), reshard.get_state_dict(model, optimizer)))
    if target == "torch's, fresh":
        state["optimizer"] = optimizer.state_dict()
    if target == "of another name":
        state["optim"] = state.pop("optimizer")

    with pytest.raises(KeyMismatchError) as caught:
        reshard.load({**state, "epoch": 0}, path)

    head, what, fix, *calls = str(caught.value).splitlines()
    assert head == f"{path} does not match the state to load into:"
    assert what.startswith(
        "  it has the optimizer's state under integer ids, as torch's optimizer.state_dict() returns"
    )
    assert fix.startswith("  fix: give the names, in the order in which the optimizer got its parameters. canonical() ")
    assert len(calls) == 3
    rest = {"epoch": 0}
    scope: dict[str, Any] = {"reshard": reshard, "model": model, "optimizer": optimizer, "rest": rest}
    exec("\n".join(call.strip().replace("{'epoch': ...}", "rest") for call in calls), scope)
    assert rest == {"epoch": 3}
    assert all(torch.equal(value, want["model"][name]) for name, value in model.state_dict().items())
    found = optimizer.state_dict()["state"]
    assert all(
        torch.equal(value, found[at][name])
        for at, of in want["optimizer"]["state"].items()
        for name, value in of.items()
    )
    assert len(found) == len(trained.state) == 8


@pytest.mark.parametrize("key", ["optim", "optimizer"])
def test_numbered_state_as_a_target_is_named_as_such_in_few_lines_and_the_fix_loads(key: str, tmp_path: Path) -> None:
    model, optimizer = _trained()
    names, states = reshard.get_state_dict(model, optimizer)
    path = str(tmp_path / "c")
    reshard.save({"model": names, "optim": states}, path)
    fresh = _trained()[1]

    with pytest.raises(KeyMismatchError) as caught:
        reshard.load({"model": names, key: fresh.state_dict(), "epoch": 0}, path)

    _, what, *rows, fix, _, _, _ = str(caught.value).splitlines()
    assert what.startswith("  it has the optimizer's state under names of parameters, and the state to load into has")
    assert what.endswith(f" under integer ids, as torch's optimizer.state_dict() returns it ('{key}.state.0.step')")
    assert fix.startswith("  fix: load into state = reshard.optimizer_destinations(model, optimizer, path), ")
    assert rows == ["  1 missing from the checkpoint:", "    epoch"]
    state = reshard.optimizer_destinations(model, optimizer, path)
    reshard.load({"model": names, "optim": state}, path)
    reshard.set_optimizer_state_dict(model, optimizer, state)


def test_canonical_says_what_it_does_not_have(tmp_path: Path) -> None:
    model, optimizer = _trained()
    path = tmp_path / "legacy.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, path)
    hints = {"param_names": list(dict(model.named_parameters()))}
    named = reshard.open(path).canonical(hints)
    words = f"1 ('epoch') of {path} belong to neither model nor optimizer: load them from there"
    assert named.warnings == (words,)
    assert reshard.open(path).canonical(hints, model_only=True).warnings == ()
    model_state, optim_state = reshard.get_state_dict(model, optimizer)
    with pytest.raises(KeyMismatchError) as caught:
        reshard.load({"model": model_state, "optimizer": optim_state, "epoch": 0}, named)
    assert f"\n  canonical names begin with 'model' and 'optim'; {words}\n" in str(caught.value)
    report = reshard.convert(path, tmp_path / "again", normalized=True, hints=hints)  # which keeps it
    assert report.warnings == ()
    assert reshard.open(tmp_path / "again").objects["epoch"] == 3


def test_destinations_for_state_under_integer_ids_need_its_names(tmp_path: Path) -> None:
    model, optimizer = _trained()
    reshard.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "c")
    fresh, path = torch.optim.AdamW(model.parameters()), str(tmp_path / "c")
    call = "canonical(hints={'param_names': list(dict(model.named_parameters()))})"
    with pytest.raises(KeyMismatchError) as caught:
        reshard.optimizer_destinations(model, fresh, path)
    words = "by the index of each parameter, such as 'optim.state.0.step', not by its name. Pass named = "
    assert f"{words}reshard.open({path!r}).{call} here and to load" in str(caught.value)

    named = reshard.open(path).canonical(hints={"param_names": list(dict(model.named_parameters()))})
    state = reshard.optimizer_destinations(model, fresh, named)
    reshard.load({"model": reshard.get_model_state_dict(model), "optim": state}, named)
    reshard.set_optimizer_state_dict(model, fresh, state)
    saved, loaded = optimizer.state_dict()["state"], fresh.state_dict()["state"]
    assert all(torch.equal(value, loaded[at][name]) for at, of in saved.items() for name, value in of.items())
    assert len(saved) == len(loaded) == 8


def test_numbered_optimizer_states_are_saved_with_a_warning(tmp_path: Path, caplog: Any) -> None:
    model, optimizer = _trained()
    with caplog.at_level(logging.WARNING, "reshard"):
        reshard.save({"optim": reshard.get_optimizer_state_dict(model, optimizer)}, tmp_path / "by-name")
        assert not caplog.records
        reshard.save({"optim": optimizer.state_dict()}, tmp_path / "by-number")
    assert "saved by parameter number ('optim.state.0.step')" in caplog.text
    assert "Save reshard.get_optimizer_state_dict(model, optimizer) instead" in caplog.text


def test_large_numpy_arrays_are_saved_with_a_warning(tmp_path: Path, caplog: Any) -> None:
    """They are text in the manifest, which every open reads."""
    array = np.zeros(1 << 20)
    with caplog.at_level(logging.WARNING, "reshard"):
        reshard.save({"some": {"a": array[: 1 << 18]}}, tmp_path / "few")
        reshard.save({"t": torch.from_numpy(array)}, tmp_path / "tensor")
        assert not caplog.records
        reshard.save({"some": {"a": array}}, tmp_path / "many")
    assert "its manifest contains 8.0 MiB of numpy arrays, and every open reads all of it" in caplog.text


class _Named(torch.nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
        for name, inside in zip(names, (layers, torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)), strict=True):
            self.add_module(name, inside)


@pytest.mark.parametrize(
    "names", [("blocks", "emb", "head"), ("blocks", "embedding", "lm_head"), ("layers", "emb", "score")]
)
def test_levels_with_other_names_are_renamed_by_the_mapping_that_the_error_gives(names, tmp_path) -> None:
    model, renamed = _Named("layers", "emb", "head"), _Named(*names)
    optimizer = torch.optim.Adam(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    reshard.save({"model": model, "optim": optimizer}, tmp_path / "c")
    state = {"model": renamed, "optim": torch.optim.Adam(renamed.parameters())}
    with pytest.raises(KeyMismatchError) as caught:
        reshard.load(state, tmp_path / "c")

    code = re.search(
        r"fix: mapping=(m\.Mapping\(.*\)) renames these keys, if they are the same tensors ", str(caught.value)
    )
    assert code is not None
    assert reshard.load(state, tmp_path / "c", mapping=eval(code[1], {"m": reshard.mapping})).ok
    assert all(map(torch.equal, model.parameters(), renamed.parameters()))


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        (["x.b.w", "a.y.w"], ["a.b.w", "q.r"]),
        (["net.w"], ["encoder.w", "decoder.w"]),
        (["b.w", "b.v"], ["a.w", "b.v"]),
        (["a{x}.w"], ["b.w"]),
        ([f"old{i}_x.w" for i in range(3000)], [f"new_{i}.w" for i in range(3000)]),
    ],
)
def test_no_mapping_is_advised_that_does_not_find_all_keys(saved: list[str], wanted: list[str], tmp_path: Path) -> None:
    reshard.save({name: torch.ones(1) for name in saved}, tmp_path / "c")
    with pytest.raises(KeyMismatchError) as caught:  # 3000 times 3000 comparisons would end in a timeout
        reshard.load({name: torch.zeros(1) for name in wanted}, tmp_path / "c")
    assert "m.Mapping" not in str(caught.value)


def test_the_model_alone_from_a_full_checkpoint_needs_subset_and_not_a_load_that_hides_missing_weights(
    tmp_path: Path,
) -> None:
    model, optimizer = _trained()
    names, states = reshard.get_state_dict(model, optimizer)
    reshard.save({"model": names, "optim": states}, tmp_path / "c")

    with pytest.raises(KeyMismatchError) as caught:
        reshard.load({"model": names}, tmp_path / "c")
    assert [line for line in str(caught.value).splitlines() if "strict" in line] == [
        '  fix: strict="subset" ignores what only the checkpoint has; mapping= renames keys'
    ]
    report = reshard.load({"model": names}, tmp_path / "c", strict="subset")
    assert report.ok
    assert report.unexpected == report.not_requested != ()
    assert "LoadReport(ok, loaded" in repr(report)
    assert "not_requested" in repr(report)
    everything = reshard.load({"model": names}, tmp_path / "c", strict=False)
    assert not everything.ok
    assert everything.not_requested == ()


def test_one_of_two_fixes_is_enough_and_each_works(tmp_path: Path) -> None:
    model, optimizer = _trained()
    names, states = reshard.get_state_dict(model, optimizer)
    reshard.save({"model": names, "optim": states}, tmp_path / "c")

    with pytest.raises(KeyMismatchError) as caught:
        reshard.load(names, tmp_path / "c")
    lines = [line for line in str(caught.value).splitlines() if line.startswith(("  fix:", "  or:"))]
    assert lines == ["  fix: call load({'model': state}, path, strict=\"subset\"), or rename keys with mapping="]
    reshard.load({"model": names}, tmp_path / "c", strict="subset")

    with pytest.raises(KeyMismatchError) as caught:
        reshard.load({"model": names, "optim": {}}, tmp_path / "c")
    lines = [line[:50] for line in str(caught.value).splitlines() if line.startswith(("  fix:", "  or:"))]
    assert lines == [
        "  fix: the optimizer has no state yet: load into r",
        '  or:  strict="subset" ignores what only the check',
    ]


def test_a_glob_of_strict_that_matches_nothing(tmp_path: Path, caplog: Any) -> None:
    reshard.save({"model": {"w": torch.ones(2)}}, tmp_path / "c")
    target = {"model": {"w": torch.zeros(2)}}
    with caplog.at_level(logging.WARNING, "reshard"):
        reshard.load(target, tmp_path / "c", strict={"model.*": "partial"})
        assert not caplog.records
        reshard.load(target, tmp_path / "c", strict={"modl.*": "partial", "*": "subset"})
    assert caplog.messages == ["reshard.load: no key matches strict='modl.*'"]


def test_a_load_without_strictness_says_that_it_loaded_nothing(tmp_path: Path, caplog: Any) -> None:
    reshard.save({"w": torch.ones(2)}, tmp_path / "c")
    with caplog.at_level(logging.WARNING, "reshard"):
        reshard.load({"w": torch.zeros(2), "v": torch.zeros(2)}, tmp_path / "c", strict=False)
        reshard.load({}, tmp_path / "c", strict=False)
        assert not caplog.records
        reshard.load({"v": torch.zeros(2)}, tmp_path / "c", strict=False)
    assert caplog.messages == [f"reshard.load: nothing was loaded: the state has no key of {tmp_path / 'c'}"]


@pytest.mark.parametrize("key", ["w", "q"])
def test_rules_that_match_nothing_are_named(tmp_path: Path, key: str) -> None:
    """Also where the names of the state are those of the checkpoint: such rules are for another one."""
    reshard.save({"w": torch.ones(3)}, tmp_path / "c")
    rules = reshard.mapping.Mapping([reshard.mapping.Rename("zz", "yy")])
    words = f"no rule of the mapping matches a name in {tmp_path}/c, such as 'w'"
    words += ": rules map the checkpoint's names to the new ones"
    with pytest.raises(KeyMismatchError, match=f"^{re.escape(words)}$"):
        reshard.load({key: torch.zeros(3)}, tmp_path / "c", mapping=rules)
    with pytest.raises(KeyMismatchError, match=f"^{re.escape(words)}$"):
        reshard.convert(tmp_path / "c", tmp_path / "d", mapping=rules)


def test_a_report_of_a_lenient_load_raises_when_asked(tmp_path: Path) -> None:
    reshard.save({"w": torch.ones(3)}, tmp_path / "c")
    reshard.load({"w": torch.zeros(3)}, tmp_path / "c").raise_if_failed()
    report = reshard.load({"w": torch.zeros(3), "b": torch.zeros(2)}, tmp_path / "c", strict=False)
    with pytest.raises(KeyMismatchError, match=r"^LoadReport\(not ok, loaded 1 key of .*, missing 1 \('b'\)"):
        report.raise_if_failed()


def test_a_mapping_the_wrong_way_round(tmp_path: Path) -> None:
    reshard.save({"net.w": torch.ones(2)}, tmp_path / "c")
    target = {"model": {"w": torch.zeros(2)}}
    with pytest.raises(KeyMismatchError) as caught:
        reshard.load(target, tmp_path / "c", mapping={"net.w": "model.w"})
    assert str(caught.value) == (
        "the mapping names 'net.w', which the state to load into does not have. mapping= goes from keys of the state "
        "to names in the checkpoint. Swap them: {'model.w': 'net.w'}"
    )
    reshard.load(target, tmp_path / "c", mapping={"model.w": "net.w"})
    assert target["model"]["w"].tolist() == [1, 1]


def test_no_word_of_strict_is_suggested_for_its_opposite(tmp_path: Path) -> None:
    with pytest.raises(OptionError) as caught:
        reshard.load({}, tmp_path, strict="nonstrict")  # type: ignore[arg-type]
    assert str(caught.value) == (
        "strict must be one of 'strict', 'subset', 'partial', True, False (like 'partial'), or a dict from globs to "
        "these words; got 'nonstrict'"
    )


@pytest.mark.parametrize(
    ("options", "more"),
    [({}, ""), ({"check": "during"}, ". check='during' was already writing")],
)
def test_a_load_names_the_bytes_that_were_changed_and_their_tensors(tmp_path: Path, options: Any, more: str) -> None:
    """Up to three: a block can have many. For a file that is too short, those of which bytes are missing."""
    w, v = torch.rand(1000, 1000), torch.rand(200, 100)
    reshard.save({"w": w, "v": v, **{f"b{i}": torch.ones(2) for i in range(5)}}, tmp_path / "c")
    (file,) = tmp_path.glob("c/*/*.safetensors")
    data, name = bytearray(file.read_bytes()), f"{file.parent.name}/{file.name}"
    header = 8 + int.from_bytes(data[:8], "little")
    at = {key: data.index(its.numpy().tobytes()) for key, its in (("w", w), ("v", v))}
    data[at["w"] + 2_000_000] ^= 1
    file.write_bytes(data)

    def told(target: dict[str, torch.Tensor]) -> CorruptCheckpointError:
        with pytest.raises(CorruptCheckpointError) as caught:
            reshard.load(target, tmp_path / "c", strict="subset", **options)
        return caught.value

    error = told({"w": torch.zeros(1000, 1000), "v": torch.zeros(200, 100)})
    ((found, start, stop),) = error.places
    assert (found, start % 65536, stop - start) == (name, 0, 65536)
    assert start <= at["w"] + 2_000_000 < stop
    head, tail = str(error).split(". Tensors there: ")
    assert f"bytes [{start}, {stop}) was changed" in head
    assert more in head
    assert tail == f"'w' (bytes [{at['w']}, {at['w'] + 4_000_000}))"

    data[header + 3] ^= 1  # in a block of all of these little ones, and others
    file.write_bytes(data)
    assert str(told({"b0": torch.zeros(2)})).endswith(", and 3 more")

    file.write_bytes(data[: at["v"] + 4])
    error = told({"v": torch.zeros(200, 100)})
    assert error.places == ((name, at["v"] + 4, len(data)),)
    assert f"has {at['v'] + 4} of its {len(data)} bytes" in str(error)
    assert f"'v' (bytes [{at['v']}, {at['v'] + 80_000}))" in str(error).split(". Tensors there: ")[1]


def test_verify_names_the_tensor_that_was_changed(tmp_path: Path) -> None:
    model, _ = _trained()
    reshard.save({"model": reshard.get_model_state_dict(model)}, tmp_path / "c")
    (file,) = tmp_path.glob("c/*/*.safetensors")
    data = bytearray(file.read_bytes())
    at = data.index(model[2].weight.detach().numpy().tobytes())
    data[at + 5] ^= 1
    file.write_bytes(data)

    (finding,) = reshard.verify(tmp_path / "c").findings

    assert finding.fqn == "model.2.weight"
    assert f"This tensor has bytes [{at}, {at + 64}) of the file" in finding.message
    assert file.name in finding.message


def test_a_dry_run_reports_what_does_not_fit(tmp_path: Path) -> None:
    reshard.save({"w": torch.ones(2), "more": torch.ones(2), "shape": torch.ones(2)}, tmp_path / "c")
    target = {"w": torch.zeros(2), "new": torch.zeros(1), "shape": torch.zeros(3)}

    report = reshard.load(target, tmp_path / "c", dry_run=True)

    assert (report.missing, report.unexpected, report.ok) == (("new",), ("more",), False)
    assert report.mismatched == ("shape: saved with shape [2], but the target has [3]",)
    assert not any(tensor.any() for tensor in target.values())
    with pytest.raises(KeyMismatchError):
        reshard.load(target, tmp_path / "c")


def test_names_of_other_libraries_are_answered_with_ours() -> None:
    with pytest.raises(AttributeError, match=r"'load_state_dict': reshard.load fills .*, reshard.set_model_state_dict"):
        reshard.load_state_dict  # noqa: B018
    with pytest.raises(AttributeError, match=r"'save_checkpoint': reshard.save writes a checkpoint"):
        reshard.save_checkpoint  # noqa: B018


@pytest.mark.parametrize("name", ["modle.w", "lr_"])
def test_a_misspelled_key_of_a_mapping_is_not_the_wrong_way_round(name: str, tmp_path: Path) -> None:
    """The checkpoint has no such name, so a mapping the other way round would fail, too."""
    reshard.save({"net": {"w": torch.ones(2)}}, tmp_path / "c")
    target = {"model": {"w": torch.zeros(2)}}
    with pytest.raises(
        KeyMismatchError, match=r"^the mapping names '.*goes from keys of the state to names in the ch"
    ) as caught:
        reshard.load(target, tmp_path / "c", mapping={name: "model.w"})
    assert str(caught.value).endswith("mapping= goes from keys of the state to names in the checkpoint")


@pytest.mark.parametrize("value", [3, torch.ones(2), {"epoch": 3}, "text"])
def test_a_value_of_each_rank_and_one_of_all_are_of_another_kind(value: Any, tmp_path: Path) -> None:
    reshard.save({"r": reshard.PerRank(value)}, tmp_path / "own")
    reshard.save({"r": 3}, tmp_path / "all")
    of_all, of_each = {"r": value}, {"r": reshard.PerRank(value)}
    what = "a tensor" if isinstance(value, torch.Tensor) else type(value).__name__
    for state, folder, saved, found in (
        (of_all, "own", "a PerRank value", what),
        (of_each, "all", "a plain value", "a PerRank value"),
    ):
        with pytest.raises(KeyMismatchError) as caught:
            reshard.load(state, tmp_path / folder)
        assert f"\n    r   (saved as {saved}, but the target has {found})" in str(caught.value)
        assert " a reshard.PerRank(value), a plain value, or a torch.Tensor" in str(caught.value)


def test_a_report_is_true_if_all_is_well(tmp_path: Path) -> None:
    """And does not call names unexpected that were allowed."""
    reshard.save({"a": torch.ones(2), "b": torch.ones(2), "c": 3}, tmp_path / "c")
    assert reshard.load({"a": torch.zeros(2)}, tmp_path / "c", strict="subset")
    odd = reshard.load({"a": torch.zeros(2), "c": "x"}, tmp_path / "c", strict="subset")
    assert not odd
    assert "not_requested 1 ('b'), changed_classes 1" in repr(odd)
    assert "unexpected" not in repr(odd)
    assert not reshard.load({"a": torch.zeros(2), "new": 0}, tmp_path / "c", strict=False)


def test_an_unlike_name_is_not_suggested_for_one_that_is_missing(tmp_path: Path) -> None:
    """All models have a "weight": that a head has the shape of an embedding does not make it one."""
    reshard.save({"lm_head.weight": torch.ones(5, 3)}, tmp_path / "c")
    with pytest.raises(KeyMismatchError) as caught:
        reshard.load({"tok_embeddings.weight": torch.zeros(5, 3)}, tmp_path / "c")
    assert "call it 'lm_head'" not in str(caught.value)


def test_a_run_of_another_model_is_not_taken_for_an_optimizer_without_state(tmp_path: Path) -> None:
    """The first thing to say is that the model's keys are not there."""
    other = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(other.parameters())
    other(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    weights, moments = reshard.get_state_dict(other, optimizer)
    reshard.save({"model": weights, "optim": moments}, tmp_path / "c")
    weights, moments = reshard.get_state_dict(
        net := torch.nn.Sequential(torch.nn.Linear(3, 3)), torch.optim.AdamW(net.parameters())
    )
    with pytest.raises(KeyMismatchError) as caught:
        reshard.load({"model": weights, "optim": moments}, tmp_path / "c")
    assert "2 missing" in str(caught.value)
    assert "optimizer_destinations" not in str(caught.value)


@pytest.mark.parametrize(
    ("target", "line"),
    [
        (torch.zeros(2, 3, dtype=torch.bfloat16), "saved as float32, but the target is bfloat16"),
        (torch.zeros(2, 15), "saved with shape [2, 3], but the target has [2, 15]"),
    ],
    ids=["dtype", "shape"],
)
def test_only_the_numbers_of_keys_become_stars(target: torch.Tensor, line: str, tmp_path: Path) -> None:
    reshard.save({f"layers.{i}.w": torch.zeros(2, 3) for i in range(40)}, tmp_path / "c")

    with pytest.raises(KeyMismatchError) as caught:
        reshard.load({f"layers.{i}.w": target.clone() for i in range(40)}, tmp_path / "c")

    assert f"\n    layers.*.w: {line}   (40, such as 'layers.0.w')\n" in str(caught.value)


def test_mismatches_of_one_pattern_are_told_apart(tmp_path: Path) -> None:
    reshard.save({f"layers.{i}.w": torch.zeros(2, 3) for i in range(40)}, tmp_path / "c")

    with pytest.raises(KeyMismatchError) as caught:
        reshard.load({f"layers.{i}.w": torch.zeros(3 + (i == 7)) for i in range(40)}, tmp_path / "c")

    said = "w: saved with shape [2, 3], but the target has"
    assert f"\n    layers.*.{said} [3]   (39, such as 'layers.0.w')\n    layers.7.{said} [4]\n" in str(caught.value)


@pytest.mark.parametrize(
    ("target", "allowed"),
    [
        ({"model": {"v": torch.zeros(2)}, "step": 0}, "{'model.v': 'partial', '*': 'subset'}"),
        (
            {
                "model": {"w": torch.zeros(2), "v": torch.zeros(2)},
                "head": {"a": torch.ones(1), "b": torch.ones(1)},
                "step": 0,
            },
            "{'model.v': 'partial', 'head.*': 'partial'}",
        ),
        ({"net": {"w": torch.zeros(2)}, "number": 0, "rounds": 1, "seed": 2}, ""),
    ],
    ids=["one", "two", "many"],
)
def test_the_strictness_that_is_advised_covers_all_keys(target: Any, allowed: str, tmp_path: Path) -> None:
    reshard.save(
        {"model": {"w": torch.ones(2)}, "step": 1, "epoch": 2}
        if not allowed
        else {"model": {"w": torch.ones(2)}, "step": 1},
        tmp_path / "c",
    )

    with pytest.raises(KeyMismatchError) as caught:
        reshard.load(target, tmp_path / "c")

    advised = re.findall(r"strict=(\{.*?\}) allows", str(caught.value))
    assert advised == [allowed] * bool(allowed)
    assert "strict=False allows" in str(caught.value)
    for strict in advised:
        reshard.load(target, tmp_path / "c", strict=ast.literal_eval(strict))
