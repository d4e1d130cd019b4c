"""Targets that share memory are filled once, from one thing; what overlaps otherwise is refused."""

from __future__ import annotations

import pytest
import torch

import reshard
from reshard.errors import KeyMismatchError, LayoutError


@pytest.fixture
def saved(tmp_path):
    """Two tensors that differ, and two that are equal but were saved apart; by name, with and without fingerprints."""
    values = {
        "a": torch.arange(4.0),
        "b": torch.arange(4.0) + 10,
        "c": torch.full((4,), 7.0),
        "d": torch.full((4,), 7.0),
    }
    reshard.save(values, tmp_path / "prints")
    reshard.save(values, tmp_path / "plain", fingerprints=False)
    torch.save(values, tmp_path / "file.pt")
    return tmp_path


SOURCES = ["prints", "plain", "file.pt"]


def load(target, path, **options):
    return reshard.load(target, path, strict=dict.fromkeys(["*"], "subset"), **options)


@pytest.mark.parametrize("source", SOURCES)
def test_one_tensor_under_two_names_is_not_filled_from_two_values(source, saved):
    memory = torch.zeros(4)
    with pytest.raises(KeyMismatchError, match=r"'a' and 'b' share memory.*different values"):
        load({"a": memory, "b": memory}, saved / source)
    assert not memory.any()


@pytest.mark.parametrize("source", SOURCES)
def test_equal_values_that_were_saved_apart_fill_one_tensor_once(source, saved):
    memory = torch.zeros(4)
    report = load({"c": memory, "d": memory}, saved / source)
    assert memory.tolist() == [7.0] * 4
    assert report.loaded == ("c", "d")
    assert report.bytes_read == 16


def test_values_are_compared_as_the_target_has_them(saved):
    torch.save({"x": torch.tensor([1.2, 2.0]), "y": torch.tensor([1.2, 2.0], dtype=torch.float64)}, saved / "two.pt")
    memory = torch.zeros(2, dtype=torch.bfloat16)
    load({"x": memory, "y": memory}, saved / "two.pt", dtype_policy="cast")
    assert memory[1] == 2.0


def test_tied_targets_that_get_memory_of_their_own_may_differ(tmp_path):
    reshard.save({"a": torch.ones(2, dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)}, tmp_path)
    memory = torch.full((2,), 5.0)
    target = {"a": memory, "b": memory}
    reshard.load(target, tmp_path, dtype_policy="saved")
    assert target["a"].tolist() == [1.0, 1.0]
    assert target["b"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("target", [torch.zeros(1).expand(4), torch.zeros(5).as_strided((4,), (0,))])
def test_an_expanded_target_is_refused(target, saved):
    with pytest.raises(LayoutError, match=r"'a' has several elements at one memory address.*clone"):
        load({"a": target}, saved / "prints")
    assert not target.any()


def test_a_target_without_elements_may_be_expanded(tmp_path):
    reshard.save({"a": torch.zeros(3, 0)}, tmp_path)
    assert reshard.load({"a": torch.zeros(1, 0).expand(3, 0)}, tmp_path).loaded == ("a",)


def test_rows_that_overlap_within_one_target_are_refused(tmp_path):
    reshard.save({"w": torch.ones(3, 2)}, tmp_path)
    windows = torch.zeros(4).unfold(0, 2, 1)
    assert windows.shape == (3, 2)
    with pytest.raises(LayoutError, match="'w'"):
        reshard.load({"w": windows}, tmp_path)


def test_targets_that_overlap_in_part_are_refused(saved):
    memory = torch.zeros(6)
    with pytest.raises(LayoutError, match="'a' and 'b' overlap"):
        load({"a": memory[:4], "b": memory[2:]}, saved / "prints")
    assert not memory.any()


def test_a_small_target_within_a_large_one_is_found_behind_others(tmp_path):
    memory = torch.zeros(100)
    state = {"all": memory, "one": memory[2:3], "far": memory[90:99]}
    reshard.save({key: value.clone() for key, value in state.items()}, tmp_path)
    with pytest.raises(LayoutError, match="'all' and 'one'"):
        reshard.load(state, tmp_path)
    del state["one"]
    with pytest.raises(LayoutError, match="'all' and 'far'"):
        reshard.load(state, tmp_path, strict=False)


def test_an_overlap_is_found_behind_an_interleaved_view_that_reaches_further(tmp_path):
    memory = torch.zeros(4, 4)
    state = {"right": memory[:, 2:], "left": memory[:, :2], "row": memory[1, :2]}
    reshard.save({key: value.clone() for key, value in state.items()}, tmp_path)
    with pytest.raises(LayoutError, match="'left' and 'row' overlap"):
        reshard.load(state, tmp_path)
    del state["left"]
    assert reshard.load(state, tmp_path, strict="subset").loaded == ("right", "row")


def test_interleaved_views_of_one_memory_are_fine(tmp_path):
    values = {"q": torch.rand(5, 2), "k": torch.rand(5, 3), "even": torch.rand(4), "odd": torch.rand(4)}
    reshard.save(values, tmp_path)
    fused, line = torch.zeros(5, 5), torch.zeros(8)
    target = {"q": fused[:, :2], "k": fused[:, 2:], "even": line[::2], "odd": line[1::2]}
    reshard.load(target, tmp_path)
    for key, value in values.items():
        assert torch.equal(target[key], value), key


def test_lazily_conjugated_and_negated_views_are_not_tied_to_what_they_are_views_of(tmp_path):
    z = torch.tensor([1 + 2j, 3 - 4j])
    saved = {"z": z, "conj": z.conj(), "imag": z.imag, "neg": z.conj().imag}
    assert not reshard.save(saved, tmp_path).aliases
    into = {key: torch.zeros_like(value).resolve_conj().resolve_neg() for key, value in saved.items()}
    reshard.load(into, tmp_path)
    for key, value in saved.items():
        assert torch.equal(into[key], value), key
    assert reshard.verify(tmp_path).ok


def test_a_target_and_its_lazily_conjugated_view_are_refused(tmp_path):
    values = torch.tensor([1 + 2j, 3 - 4j])
    reshard.save({"a": values, "b": values.clone()}, tmp_path)  # equal: tied targets would be filled once
    memory = torch.zeros(2, dtype=torch.complex64)
    with pytest.raises(LayoutError, match=r"'a' and 'b' overlap"):
        reshard.load({"a": memory, "b": memory.conj()}, tmp_path)
    assert not memory.any()


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(4, 3)
        self.head = torch.nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("options", [{}, {"dtype_policy": "cast"}, {"dtype_policy": "saved"}])
@pytest.mark.parametrize("keys", [["embed.weight", "head.weight"], ["embed.weight"], ["head.weight"]])
def test_ties_last_through_the_meta_device(keys, options, tmp_path):
    weight = torch.arange(12.0).reshape(4, 3)
    reshard.save(dict.fromkeys(keys, weight), tmp_path)
    with torch.device("meta"):
        model = Tied()
    state = model.state_dict()

    reshard.load(state, tmp_path, **options)

    assert torch.equal(state["embed.weight"], weight)
    assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()
    state["head.weight"].zero_()
    assert not state["embed.weight"].any()


def test_one_tensor_on_the_meta_device_under_two_keys_becomes_one(tmp_path):
    reshard.save({"a": torch.ones(2), "b": torch.ones(2), "c": torch.zeros(2)}, tmp_path)
    tensor = torch.nn.Parameter(torch.empty(2, device="meta"))
    state = {"a": tensor, "b": tensor, "c": torch.empty(2, device="meta")}
    reshard.load(state, tmp_path)
    assert state["a"] is state["b"]
    assert type(state["a"]) is torch.nn.Parameter
    assert state["c"].data_ptr() != state["a"].data_ptr()
    with pytest.raises(KeyMismatchError, match=r"'a' and 'c' share memory.*different values"):
        reshard.load(dict.fromkeys("abc", torch.empty(2, device="meta")), tmp_path)
