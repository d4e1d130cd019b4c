"""States that cannot be saved or filled: each is refused by a clear error before anything is written."""

from __future__ import annotations

import dataclasses
import types
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import reshard
from reshard.errors import CheckpointError, FormatError, KeyMismatchError, LayoutError, OptionError, ReshardError
from tests import gloo


def load(target, path, **options):
    reshard.load(target, path, **options)
    return target


@dataclasses.dataclass
class Settings:
    width: int = 8


class TestSaving:
    @pytest.mark.parametrize("state", [None, 5, torch.ones(2), "text"])
    def test_what_is_no_container(self, state, tmp_path):
        with pytest.raises(FormatError, match=f"must be a dict.*{type(state).__name__}"):
            reshard.save(state, tmp_path / "c")
        assert not (tmp_path / "c").exists()

    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.eye(3).to_sparse(),
            lambda: torch.ones(3).to_mkldnn(),
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided),
        ],
        ids=["sparse", "mkldnn", "nested"],
    )
    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_tensors_that_are_no_plain_array(self, make, tmp_path):
        tensor = make()
        with pytest.raises(LayoutError, match=r"tensor 'm.t' is (sparse_coo|mkldnn|nested): only dense"):
            reshard.save({"m": {"t": tensor}}, tmp_path / "c")
        assert not (tmp_path / "c").exists()
        reshard.save({"t": torch.zeros(3, 3)}, tmp_path / "dense")
        with pytest.raises(LayoutError, match="only dense"):
            reshard.load({"t": tensor}, tmp_path / "dense")

    def test_parameters_of_lazy_modules(self, tmp_path):
        lazy = torch.nn.LazyLinear(3).state_dict(keep_vars=True)
        with pytest.raises(LayoutError, match="'weight' is a parameter of a lazy module"):
            reshard.save(lazy, tmp_path / "c")
        reshard.save({"weight": torch.ones(3, 2), "bias": torch.ones(3)}, tmp_path / "c")
        with pytest.raises(LayoutError, match="'weight' is a parameter of a lazy module"):
            reshard.load(lazy, tmp_path / "c")

    def test_a_dataclass(self, tmp_path):
        with pytest.raises(
            FormatError, match=r"Settings is not plain data; save dataclasses\.asdict\(value\) instead$"
        ):
            reshard.save({"config": Settings()}, tmp_path / "c")
        reshard.save({"config": dataclasses.asdict(Settings())}, tmp_path / "c")

    @pytest.mark.parametrize("thing", [torch.nn.Linear(1, 1), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])])
    def test_what_has_a_state_dict_of_its_own(self, thing, tmp_path):
        """It is taken apart in dicts and lists only."""
        with pytest.raises(
            FormatError, match=rf"under 'x'.*{type(thing).__name__} .*value of a dict.*get_\w+_state_dict\("
        ):
            reshard.save({"x": {thing}}, tmp_path / "c")

    @pytest.mark.parametrize("key", [b"x", None, 1.5, True, (1, 2)])
    def test_tensors_under_keys_that_are_no_text(self, key, tmp_path):
        with pytest.raises(FormatError, match=r"'m'.*Tensor.*keys are neither strings nor ints"):
            reshard.save({"m": {key: torch.ones(1)}}, tmp_path / "c")

    @pytest.mark.parametrize(
        "state",
        [{"\ud800": torch.ones(1)}, {"\ud800": {}}, {"o": "\ud800"}, {"o": [{"\ud800": 1}]}, {"o": {(1,): "\ud800"}}],
    )
    def test_text_that_is_no_unicode(self, state, tmp_path):
        with pytest.raises(FormatError, match=r"ud800' is not valid Unicode"):
            reshard.save(state, tmp_path / "c")

    def test_a_selection_of_nothing(self, tmp_path):
        with pytest.raises(OptionError, match="select is empty"):
            reshard.save({"a": 1}, tmp_path / "c", select=[])
        reshard.save({"a": 1}, tmp_path / "c")
        with pytest.raises(OptionError, match="select is empty"):
            reshard.open(tmp_path / "c").select([])
        with pytest.raises(OptionError, match="select is empty"):
            reshard.convert(tmp_path / "c", tmp_path / "d", select=[])
        assert list(reshard.open(tmp_path / "c").select(glob for glob in ["a"]).objects) == ["a"]

    def test_the_one_name_that_safetensors_has_taken(self, tmp_path):
        with pytest.raises(FormatError, match="__metadata__"):
            reshard.save({"__metadata__": torch.ones(1)}, tmp_path / "c")
        with pytest.raises(ReshardError):
            reshard.open(tmp_path / "c")

    @pytest.mark.parametrize("key", ["a/b", "a\\b", "../x", "", "a\0b", "ü", ".", "x" * 999, "a#0:1", "a\nb", "a.b", 3])
    def test_keys_of_any_kind_of_text(self, key, tmp_path):
        reshard.save({key: torch.arange(3.0)}, tmp_path / "c")
        assert load({key: torch.zeros(3)}, tmp_path / "c")[key].tolist() == [0.0, 1.0, 2.0]
        assert reshard.verify(tmp_path / "c").ok


class TestLoading:
    def test_what_cannot_be_changed(self, tmp_path):
        reshard.save({"m": {"x": 1, "t": torch.ones(1)}}, tmp_path / "c")
        tensor = torch.zeros(1)
        with pytest.raises(FormatError, match=r"'m\.x' cannot be replaced: a mappingproxy"):
            reshard.load({"m": types.MappingProxyType({"x": 0, "t": tensor})}, tmp_path / "c")
        assert not tensor.any()
        reshard.load({"m": types.MappingProxyType({"t": tensor})}, tmp_path / "c", strict=False)
        assert tensor.all()

    @pytest.mark.parametrize("target", [(0, torch.zeros(1)), None, torch.zeros(1)])
    def test_what_is_no_dict_or_list(self, target, tmp_path):
        reshard.save([1, torch.ones(1)], tmp_path / "c")
        with pytest.raises(FormatError, match=r"(must be|takes) a dict"):
            reshard.load(target, tmp_path / "c")
        assert load([0, torch.zeros(1)], tmp_path / "c") == [1, torch.ones(1)]

    def test_strictness_that_is_neither_a_bool_nor_a_dict(self, tmp_path):
        reshard.save({"a": 1}, tmp_path / "c")
        with pytest.raises(
            OptionError, match=r"strict must be one of 'strict', .*, True, False \(like 'partial'\), or a dict"
        ):
            reshard.load({"a": 0}, tmp_path / "c", strict="half")  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "target",
        [
            {"a": {}, "b": None, "c": 0, "d": None},
            {"a": {"q": 1}, "b": {"x": {"z": 1}}, "c": [], "d": []},
            {"a": None, "b": {}, "c": {}, "d": {}},
            {"a": OrderedDict(z=1), "b": defaultdict(list), "c": (1,), "d": 7},
        ],
    )
    def test_plain_values_take_whatever_shape_was_saved(self, target, tmp_path):
        saved = {"a": None, "b": {"x": 1}, "c": 5, "d": [1, {"y": (2, 3)}]}
        reshard.save(saved, tmp_path / "c")
        assert load(target, tmp_path / "c") == saved

    def test_the_standard_library_s_dicts_keep_their_type(self, tmp_path):
        """MultiStepLR counts its milestones in a Counter, and asks it for more than a dict has."""
        saved = {"c": Counter("aab"), "o": OrderedDict(b=1, a=2), "d": defaultdict(list, x=[1]), "in": [Counter("z")]}
        reshard.save(saved, tmp_path / "c")
        target = {"c": Counter(), "o": OrderedDict(), "d": defaultdict(list), "in": [Counter()]}
        load(target, tmp_path / "c")
        assert target == saved
        assert [type(target[key]) for key in "cod"] == [Counter, OrderedDict, defaultdict]
        assert type(target["in"][0]) is Counter
        assert target["d"]["new"] == []

    @pytest.mark.parametrize("key", [b"x", None, 1.5, True, (1, 2)])
    @pytest.mark.parametrize(
        "call", [load, lambda target, path: reshard.redistribute(reshard.open(path).nested(), target)]
    )
    def test_a_state_under_keys_that_are_no_text(self, key, call, tmp_path):
        reshard.save({key: 5, "inner": {"x": 1}}, tmp_path / "c")
        inner = {"x": 0}
        target = OrderedDict({key: 0, "inner": inner})
        call(target, tmp_path / "c")
        assert target == {key: 5, "inner": {"x": 1}}
        assert target["inner"] is inner

    def test_a_dict_under_keys_that_are_no_text_is_filled_in_place(self, tmp_path):
        reshard.save({"in": {(1, 2): 5}, "w": torch.ones(1)}, tmp_path / "c")
        inner = {(1, 2): 0}
        target = load({"in": inner, "w": torch.zeros(1)}, tmp_path / "c")
        assert inner == {(1, 2): 5}
        assert target["in"] is inner

    def test_no_kind_is_blamed_for_a_mapping_that_leads_nowhere(self, tmp_path):
        reshard.save({"w": torch.ones(2)}, tmp_path / "c")
        with pytest.raises(KeyMismatchError) as caught:
            reshard.load({"w": torch.zeros(2)}, tmp_path / "c", mapping={"w": "v"})
        assert "of another type" not in str(caught.value)
        assert "w   (looked for as 'v')" in str(caught.value)
        fix = "fix: correct the mapping: it looks for 'w' as 'v', which is not in the checkpoint\n"
        assert fix in str(caught.value)
        assert "mapping= renames keys" not in str(caught.value)

    def test_a_tensor_is_never_put_where_there_was_none(self, tmp_path):
        reshard.save({"a": torch.ones(2), "n": {"t": torch.ones(1)}}, tmp_path / "c")
        with pytest.raises(KeyMismatchError, match=r"1 missing(.|\n)*1 unexpected") as caught:
            reshard.load({"a": torch.zeros(2), "n": None}, tmp_path / "c")
        assert "mean" not in str(caught.value)

    @pytest.mark.parametrize(
        ("target", "found"),
        [
            ({"a": None, "s": 0}, "a   (saved as a tensor, but the target has NoneType)"),
            ({"a": np.zeros(2), "s": 0}, "a   (saved as a tensor, but the target has numpy.ndarray)"),
            ({"a": torch.zeros(2), "s": torch.zeros(2)}, "s   (saved as a plain value, but the target has a tensor)"),
        ],
    )
    @pytest.mark.parametrize("strict", ["strict", "subset", "partial"])
    def test_a_key_of_another_kind_is_neither_missing_nor_unexpected(self, tmp_path, target, found, strict):
        reshard.save({"a": torch.ones(2), "s": 3}, tmp_path / "c")
        with pytest.raises(KeyMismatchError) as caught:
            reshard.load(target, tmp_path / "c", strict=strict)
        text = str(caught.value)
        assert found in text
        assert "1 of another type" in text
        assert "torch.from_numpy" in text
        assert "missing" not in text
        assert "unexpected" not in text


@pytest.mark.parametrize("format", ["native", "dcp", "torch_save", "torch_checkpointing"])
@pytest.mark.parametrize("items", ["tensors", "numbers"])
def test_items_of_a_list_stay_where_they_are_when_one_before_them_is_left_out(tmp_path, format, items):
    """They moved up. A folder of torch_checkpointing could not even be opened."""
    first, last = (torch.zeros(2), torch.ones(2)) if items == "tensors" else (1, 3)
    state = {"a": {"w": torch.ones(2), "l": [first, reshard.PerRank(4), last]}}
    reshard.save(state, tmp_path / "c")
    reshard.convert(tmp_path / "c", tmp_path / "out", format=format)
    nested = reshard.open(tmp_path / "out").nested()["a"]
    assert len(nested["l"]) == 3
    found = nested["l"][2]
    assert found == 3 if items == "numbers" else torch.equal(found[...], last)


def test_a_list_of_which_some_items_were_saved_is_not_filled_without_a_word(tmp_path):
    reshard.save({"w": torch.ones(2), "l": [1, 2, 3]}, tmp_path / "c", select=["w", "l.2"])
    target = {"w": torch.zeros(2), "l": [7, 8, 9]}
    report = reshard.load(target, tmp_path / "c")
    assert not report.ok
    assert report.dropped == ("l.0", "l.1")
    assert target["l"] == [None, None, 3]


def test_a_list_whose_tensors_are_all_tied_is_no_empty_one(tmp_path):
    w = torch.ones(2)
    reshard.save({"w": w, "x": [w]}, tmp_path / "c")
    reshard.load({"w": torch.zeros(2)}, tmp_path / "c")  # tied names are not asked for
    target = {"w": torch.zeros(2), "x": [1, 2]}
    with pytest.raises(KeyMismatchError, match=r"1 missing from the checkpoint:\n    x"):
        reshard.load(target, tmp_path / "c")
    assert target["x"] == [1, 2]


@pytest.mark.parametrize("items", [3, 2000])
def test_a_list_of_numbers_at_the_top(tmp_path, items):
    state = [*range(items)]
    reshard.save(state, tmp_path / "c")
    target = [0] * items
    reshard.load(target, tmp_path / "c")
    assert target == state
    assert reshard.compare({"of": target}, {"of": reshard.open(tmp_path / "c").nested()}).ok


@pytest.mark.parametrize("saved", [[], (), [[]], {"in": []}, {"in": ({}, [])}])
def test_a_list_without_items_is_a_value_that_the_target_may_lack(tmp_path, saved):
    w = torch.ones(2)
    reshard.save({"m": {"w": w, "x": saved}}, tmp_path / "c")
    target = {"m": {"w": torch.zeros(2), "x": [1, 2]}}
    reshard.load(target, tmp_path / "c")
    assert target["m"]["x"] == saved
    reshard.load({"m": {"w": w}}, tmp_path / "c")  # some formats write such lists where a state has nothing


def test_a_manifest_whose_paths_and_keys_do_not_agree_is_damaged(tmp_path):
    reshard.save({"o": {"x": 1}, "t": torch.ones(1)}, tmp_path / "c")
    file = Path(tmp_path / "c" / "manifest.json")
    text = file.read_text().partition(',"digest"')[0] + "}"
    assert '["o","x"]' in text
    file.write_text(text.replace('["o","x"]', '["p","x"]'))
    with pytest.raises(CheckpointError, match=r"contradicts itself: it places 'o\.x' at 'p\.x'"):
        reshard.open(tmp_path / "c")


def _load_with_an_odd_rank(folder: str) -> str:
    state = {"a": torch.zeros(2), "new": torch.zeros(1)}
    if dist.get_rank() == 1:
        state["a"] = None
    try:
        return f"no error: {reshard.load(state, folder, strict=False)}"
    except KeyMismatchError as error:
        return str(error)


def test_a_key_of_another_kind_on_one_rank_is_an_error_on_all(tmp_path):
    reshard.save({"a": torch.ones(2)}, tmp_path / "c")
    texts = gloo.run(_load_with_an_odd_rank, 2, str(tmp_path / "c"))
    for text in texts:
        assert "saved as a tensor, but the target has NoneType" in text
        assert "new" not in text
