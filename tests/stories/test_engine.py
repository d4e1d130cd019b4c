"""Saving and loading in one process: every kind of value, every kind of refusal, and what a refusal leaves behind."""

from __future__ import annotations

import glob
import os
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

import reshard
from planners.errors import PlanError, did_you_mean
from reshard.api.plan import read_layout_file
from reshard.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatError,
    KeyMismatchError,
    OptionError,
    StorageError,
)
from reshard.native.manifest import HF_INDEX, MANIFEST
from reshard.storage import open_storage
from tests.faulty import Faulty
from tests.same import assert_same
from tests.states import one_of_everything


def blank(value):
    """The same nest with other values."""
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {k: blank(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(blank(v) for v in value)
    return None


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "ckpt"
    reshard.save(one_of_everything(), path)
    return path


def data_file(path) -> Path:
    (name,) = glob.glob(f"{path}/data-*/*.safetensors")
    return Path(name)


class TestRoundTrip:
    def test_everything_comes_back(self, saved):
        target = blank(one_of_everything())

        report = reshard.load(target, saved)

        assert_same(target, one_of_everything())
        assert report.ok
        assert report.bytes_read == report.bytes_needed
        assert report.bytes_checked == data_file(saved).stat().st_size  # all of it, the header included
        assert report.aliases == {"model.head": "model.embed"}

    def test_nested_gives_the_nest_back(self, saved):
        nest = reshard.open(saved).nested()

        assert nest["optim"] == one_of_everything()["optim"]
        assert torch.equal(nest["model"]["w"][...], one_of_everything()["model"]["w"])

    def test_targets_are_filled_in_place(self, saved):
        target = blank(one_of_everything())
        before = target["model"]["transposed"]

        reshard.load(target, saved)

        assert target["model"]["transposed"] is before
        assert torch.equal(before, one_of_everything()["model"]["transposed"])

    def test_meta_tensors_become_real(self, saved):
        target = blank(one_of_everything())
        target["model"]["w"] = torch.empty(5, 7, device="meta")
        target["model"]["p"] = target["model"].pop("half")
        target["model"]["p"] = torch.nn.Parameter(torch.empty(3, 4, dtype=torch.bfloat16, device="meta"))

        reshard.load(target, saved, mapping={"model.p": "model.half"})

        assert torch.equal(target["model"]["w"], one_of_everything()["model"]["w"])
        assert isinstance(target["model"]["p"], torch.nn.Parameter)

    @pytest.mark.parametrize(
        "make",
        [
            lambda v: {"a": {"x": v}, "a.b": torch.full((2,), float(v))},
            lambda v: {"a": [], "a.b": torch.full((2,), float(v)), "a.b.c": v},
        ],
    )
    def test_a_dotted_key_beside_a_dict_is_not_within_it(self, make, tmp_path):
        reshard.save(make(1), tmp_path / "c")
        target = make(0)

        assert reshard.load(target, tmp_path / "c").ok
        assert_same(target, make(1))

    def test_containers_that_changed_their_length_are_replaced_whole(self, saved):
        target = blank(one_of_everything())
        target["optim"] = {"lr": 0, "betas": (), "groups": [], "none": None}
        target["empty"] = {"x": 3}

        reshard.load(target, saved)

        assert target["optim"] == one_of_everything()["optim"]
        assert target["empty"] == {}

    def test_data_files_open_in_safetensors(self, saved):
        with safe_open(data_file(saved), "pt") as file:
            assert torch.equal(file.get_tensor("model.w"), one_of_everything()["model"]["w"])
            assert "model.head" not in file.keys()  # noqa: SIM118  # not a mapping
        assert not (saved / HF_INDEX).exists(), "a Hugging Face tool finds no name of its model, and initializes it"

    @pytest.mark.parametrize(
        ("state", "is_model"),
        [
            (torch.nn.BatchNorm1d(2).state_dict(), True),
            ({"model.w": torch.ones(2), "step": 3}, True),
            ({"model": {"w": torch.ones(2)}}, False),
            ({"w": torch.ones(2), "optim": {"lr": 0.1}}, False),
            ({"w": torch.ones(2), "optim": {}}, False),
            ({"w": torch.ones(2), "betas": (0.9, 0.95)}, False),
            ({"w": torch.ones(2), "rng": reshard.PerRank(torch.ones(2))}, False),
            ([torch.ones(2)], False),
        ],
    )
    def test_an_index_for_other_tools_is_only_beside_a_model(self, tmp_path, state, is_model):
        for old in ({"old": torch.ones(3)}, {"model": {"old": torch.ones(3)}}):
            reshard.save(old, tmp_path / "c")
            reshard.save(state, tmp_path / "c")
            assert (tmp_path / "c" / HF_INDEX).exists() == is_model
            assert reshard.verify(tmp_path / "c").ok
        reshard.convert(tmp_path / "c", tmp_path / "d", format="native")
        assert (tmp_path / "d" / HF_INDEX).exists() == is_model

    def test_in_memory(self):
        reshard.save(one_of_everything(), "memory://round-trip")
        target = blank(one_of_everything())

        reshard.load(target, "memory://round-trip")

        assert_same(target, one_of_everything())

    def test_an_overwrite_leaves_one_generation(self, saved):
        reshard.save({"a": torch.ones(2)}, saved)

        assert len(os.listdir(saved)) == 3
        assert list(reshard.open(saved)) == ["a"]

    def test_per_rank_values(self, tmp_path):
        rng = torch.arange(4, dtype=torch.uint8)
        reshard.save({"rng": reshard.PerRank(rng), "pos": reshard.PerRank({"epoch": 3})}, tmp_path / "c")
        target = {"rng": reshard.PerRank(), "pos": reshard.PerRank()}

        reshard.load(target, tmp_path / "c")

        assert torch.equal(target["rng"].value, rng)
        assert target["pos"].value == {"epoch": 3}

    def test_a_rank_s_own_dict_of_random_states(self, tmp_path):
        own = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
        reshard.save({"rng": reshard.PerRank(own)}, tmp_path / "c")
        target = {"rng": reshard.PerRank()}

        reshard.load(target, tmp_path / "c")

        found = target["rng"].value
        torch.set_rng_state(found["torch"])
        random.setstate(found["python"])
        np.random.set_state(found["numpy"])
        assert torch.equal(found["torch"], own["torch"])
        assert found["python"] == own["python"]
        with pytest.raises(FormatError, match=r"'rng'.*too large.*a PerRank of its own"):
            reshard.save({"rng": reshard.PerRank({"x": torch.zeros(1 << 19)})}, tmp_path / "c")

    def test_the_caller_s_state_is_not_edited(self, tmp_path):
        given = one_of_everything()

        reshard.save(given, tmp_path / "c")

        assert_same(given, one_of_everything())

    @pytest.mark.not_simulated("it has no inference tensors")
    def test_a_graph_that_needs_the_old_values_is_not_run(self, tmp_path):
        weight = torch.nn.Parameter(torch.ones(3))
        reshard.save({"w": torch.zeros(3)}, tmp_path)
        loss = (weight * weight).sum()
        reshard.load({"w": weight}, tmp_path)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        with torch.inference_mode():
            without_versions = torch.ones(3)
        reshard.load({"w": without_versions}, tmp_path)
        assert not without_versions.any()

    @pytest.mark.parametrize("kind", [list, tuple])
    def test_long_sequences_of_numbers_are_one_value(self, kind, tmp_path):
        order = kind([*range(20_000), 0.5, float("nan")])
        reshard.save({"sampler": {"order": order, "epoch": 1}, "w": torch.ones(2)}, tmp_path)
        for there in ([], None, [1, 2], kind(range(20_002)), {"x": 1}):
            target = {"sampler": {"order": there, "epoch": 0}, "w": torch.zeros(2)}
            reshard.load(target, tmp_path)
            found = target["sampler"]["order"]
            assert type(found) is kind
            assert found[:-1] == order[:-1]
        assert list(reshard.open(tmp_path).objects) == ["sampler.order", "sampler.epoch"]
        assert reshard.compare(tmp_path, {"sampler": {"order": order, "epoch": 1}, "w": torch.ones(2)}).ok


class TestAsync:
    def test_waiting_has_an_end(self, tmp_path):
        def slow(verb: str, name: str) -> None:
            if verb == "write":
                time.sleep(0.5)

        save = reshard.async_save({"w": torch.ones(3)}, Faulty(open_storage(tmp_path), slow))
        for ask in (save.result, save.exception):
            with pytest.raises(OptionError, match="timeout must be a number of seconds, or None, got 'x'"):
                ask("x")
        with pytest.raises(TimeoutError, match=r"the save is still in progress after 0\.01 s"):
            save.result(0.01)
        assert save.result(30.0).tensors == 1

    def test_of_several_saves_to_one_path_the_last_counts(self, tmp_path):
        def slow(verb: str, name: str) -> None:
            if verb == "write":
                time.sleep(0.3)

        first = reshard.async_save({"step": 1, "w": torch.ones(3)}, Faulty(open_storage(tmp_path), slow))
        second = reshard.async_save({"step": 2, "w": torch.ones(3)}, tmp_path, max_in_flight=5)
        for save in (second, first):
            save.result(30.0)
        assert reshard.open(tmp_path).objects["step"] == 2
        third = reshard.async_save({"step": 3, "w": torch.ones(3)}, Faulty(open_storage(tmp_path), slow))
        reshard.save({"step": 4, "w": torch.ones(3)}, tmp_path)
        third.result(30.0)
        assert reshard.open(tmp_path).objects["step"] == 4

    def test_the_state_of_the_moment_is_saved(self, tmp_path):
        w = torch.zeros(1000)

        pending = reshard.async_save({"w": w}, tmp_path / "c")
        w.fill_(7)
        pending.result()

        assert reshard.open(tmp_path / "c")["w"][...].sum() == 0
        assert pending.done()

    def test_what_goes_wrong_is_raised(self, tmp_path):
        (tmp_path / "file").write_text("not a folder")

        with pytest.raises(StorageError):
            reshard.async_save({"w": torch.zeros(3)}, tmp_path / "file").result()
        assert reshard.async_save({"w": torch.zeros(3)}, tmp_path / "fine").result().tensors == 1

    def test_what_went_wrong_unseen_is_raised_by_the_next(self, tmp_path):
        def fault(verb: str, name: str) -> None:
            if verb == "write":
                raise StorageError("the disk burns")

        reshard.async_save({"w": torch.zeros(3)}, Faulty(open_storage(tmp_path / "burning"), fault))
        with pytest.raises(StorageError, match="the disk burns"):
            reshard.async_save({"w": torch.zeros(3)}, tmp_path / "fine")
        assert reshard.async_save({"w": torch.zeros(3)}, tmp_path / "fine").result().tensors == 1


class TestKeys:
    def test_all_differences_are_listed_and_nothing_is_touched(self, saved):
        target = {
            "model": {
                "w": torch.zeros(5, 6),
                "half": torch.zeros(3, 4),
                "mystery": torch.zeros(1),
                "wide": torch.zeros(1, dtype=torch.complex128),
            }
        }

        with pytest.raises(KeyMismatchError) as caught:
            reshard.load(target, saved)

        text = str(caught.value)
        for part in (
            "model.mystery",
            "model.flags",
            "step",
            "saved with shape [5, 7], but the target has [5, 6]",
            "saved as bfloat16, but the target is float32",
            "  or:  if the target is a shard from to_local(), pass its DTensor.",
        ):
            assert part in text
        assert target["model"]["wide"].abs().sum() == 0

    def test_did_you_mean(self, saved):
        with pytest.raises(KeyMismatchError, match=r"model\.heda   \(did you mean 'model\.head'\?\)"):
            reshard.load({"model": {"heda": torch.zeros(6)}}, saved)

    def test_a_name_with_most_parts_is_meant(self):
        """By letters alone, the norm is nearer."""
        names = [f"model.layers.{i}.{name}.weight" for i in (1, 0) for name in ("ffn_norm", "attention.wo")]
        assert did_you_mean("model.layers.0.wo.weight", names).endswith("'model.layers.0.attention.wo.weight'?")

    def test_partial_by_glob(self, saved):
        target = {"model": {"w": torch.zeros(5, 7), "other": torch.ones(1)}}

        report = reshard.load(target, saved, strict={"model.*": "partial", "*": "partial"})

        assert report.missing == ("model.other",)
        assert "model.half" in report.unexpected
        assert torch.equal(target["model"]["w"], one_of_everything()["model"]["w"])
        assert target["model"]["other"] == 1

    def test_not_strict_reports(self, saved):
        assert not reshard.load({"x": torch.zeros(1)}, saved, strict=False).ok

    def test_dry_run_touches_nothing(self, saved):
        target = blank(one_of_everything())

        report = reshard.load(target, saved, dry_run=True)

        assert_same(target, blank(one_of_everything()))
        assert report.dry_run
        assert report.bytes_needed > 0 == report.bytes_read

    @pytest.mark.parametrize("policy", ["cast", "saved"])
    def test_dtype_policy(self, saved, policy):
        target = {"model": {"w": torch.zeros(5, 7, dtype=torch.bfloat16)}}

        report = reshard.load(target, saved, strict=False, dtype_policy=policy)

        kept = torch.bfloat16 if policy == "cast" else torch.float32
        assert target["model"]["w"].dtype == kept
        assert torch.equal(target["model"]["w"], one_of_everything()["model"]["w"].to(kept))
        both = ("float32", "bfloat16")
        assert (report.cast, report.replaced) == (
            ({"model.w": both}, {}) if policy == "cast" else ({}, {"model.w": both})
        )

    def test_one_name_of_tied_tensors_satisfies_both(self, tmp_path):
        reshard.save({"embed": torch.ones(3)}, tmp_path / "c")
        tied = torch.zeros(3)
        target = {"embed": tied, "head": tied}

        report = reshard.load(target, tmp_path / "c")

        assert report.ok
        assert tied.sum() == 3

    def test_numbers_and_0d_tensors_are_one(self, tmp_path):
        reshard.save({"step": torch.tensor(5.0), "count": 3}, tmp_path / "c")
        target = {"step": 0.0, "count": torch.tensor(0)}

        reshard.load(target, tmp_path / "c")

        assert target["step"] == 5.0
        assert target["count"] == 3

    def test_bad_arguments(self, saved):
        with pytest.raises(OptionError, match=r"dtype_policy must be one of 'error', 'cast', 'saved'; got 'guess'"):
            reshard.load({}, saved, dtype_policy="guess")
        with pytest.raises(OptionError, match="must be one of 'strict', 'subset', 'partial'"):
            reshard.load({}, saved, strict={"*": "sometimes"})
        with pytest.raises(KeyMismatchError, match="mapping names 'x'"):
            reshard.load({}, saved, mapping={"x": "y"})


class TestRefusals:
    def test_objects_that_are_no_plain_data(self, tmp_path):
        with pytest.raises(FormatError, match=r"'a\.b'.*builtins\.object"):
            reshard.save({"a": {"b": object()}}, tmp_path / "c")
        assert not (tmp_path / "c" / MANIFEST).exists()

    def test_keys_that_collide(self, tmp_path):
        with pytest.raises(KeyMismatchError, match="same key"):
            reshard.save({"a": {"b": 1}, "a.b": 2}, tmp_path / "c")

    def test_meta_tensors_have_nothing_to_save(self, tmp_path):
        with pytest.raises(CheckpointError, match="meta device"):
            reshard.save({"a": torch.empty(3, device="meta")}, tmp_path / "c")
        assert not glob.glob(f"{tmp_path}/c/data-*")

    def test_no_checkpoint(self, tmp_path):
        with pytest.raises(CheckpointNotFoundError):
            reshard.load({}, tmp_path / "nothing")

    def test_a_path_that_is_a_file(self, tmp_path):
        (tmp_path / "c").write_text("x")
        with pytest.raises(StorageError):
            reshard.save({"a": torch.ones(1)}, tmp_path / "c")

    def test_a_newer_version(self, saved):
        manifest = saved / MANIFEST
        manifest.write_text(manifest.read_text().replace('"version":1', '"version":4', 1))
        with pytest.raises(FormatError, match=r"version 4.*upgrade"):
            reshard.open(saved)


class TestDamage:
    def targets_stay(self, path, error=CorruptCheckpointError):
        target = blank(one_of_everything())
        with pytest.raises(error) as caught:
            reshard.load(target, path)
        assert_same(target, blank(one_of_everything()))
        return str(caught.value)

    @pytest.mark.not_simulated("thousands of loads, each of which takes long there")
    def test_every_flipped_bit_of_a_data_file_is_found(self, saved):
        file = data_file(saved)
        good = file.read_bytes()
        for at in range(len(good)):
            bad = bytearray(good)
            bad[at] ^= 1 << at % 8
            file.write_bytes(bad)
            assert file.name in self.targets_stay(saved), at
            if at % 50 == 0:
                assert not reshard.verify(saved).ok
        file.write_bytes(good)
        assert reshard.verify(saved).ok

    @pytest.mark.parametrize("suffix", ["", ".sums"])
    def test_truncated_and_missing_files(self, saved, suffix):
        file = Path(f"{data_file(saved)}{suffix}")
        good = file.read_bytes()
        file.write_bytes(good[:-1])
        assert file.name in self.targets_stay(saved)
        file.unlink()
        assert "missing" in self.targets_stay(saved)

    def test_an_edited_manifest(self, saved):
        manifest = saved / MANIFEST
        good = manifest.read_text()
        for at in np.random.default_rng(0).integers(0, len(good), 150):
            manifest.write_text(good[:at])
            target = blank(one_of_everything())
            with pytest.raises((CheckpointError, KeyMismatchError)):
                reshard.load(target, saved)
            assert_same(target, blank(one_of_everything()))

    def test_every_flipped_bit_of_the_manifest_is_found(self, saved):
        manifest = saved / MANIFEST
        good = manifest.read_bytes()
        target = blank(one_of_everything())
        for at in range(len(good)):
            bad = bytearray(good)
            bad[at] ^= 1 << at % 8
            manifest.write_bytes(bad)
            with pytest.raises(CheckpointError):
                reshard.load(target, saved)
        assert_same(target, blank(one_of_everything()))
        manifest.write_bytes(good)
        assert reshard.verify(saved).ok

    def test_a_manifest_edited_on_purpose_goes_without_its_digest(self, saved):
        manifest = saved / MANIFEST
        manifest.write_text(manifest.read_text().replace('"writer":"', '"writer":"and I, ', 1))
        with pytest.raises(CorruptCheckpointError, match=r'digest differs.*remove the field "digest"'):
            reshard.open(saved)
        assert not reshard.verify(saved).ok
        manifest.write_text(manifest.read_text().partition(',"digest"')[0] + "}")
        assert reshard.verify(saved).ok

    def test_files_of_two_saves(self, saved, tmp_path):
        other = one_of_everything()
        other["model"]["w"] += 1
        reshard.save(other, tmp_path / "other")
        data_file(saved).write_bytes(data_file(tmp_path / "other").read_bytes())

        self.targets_stay(saved)

    def test_verify_names_the_place(self, saved):
        file = data_file(saved)
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)

        (finding,) = reshard.verify(saved).findings

        assert file.name in finding.message
        assert "bytes [0," in finding.message


class TestCompare:
    def test_equal_whatever_the_format(self, saved, tmp_path):
        torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "x.pt")
        reshard.save({"model": {"w": torch.ones(2)}}, tmp_path / "y")

        assert reshard.compare(tmp_path / "x.pt", tmp_path / "y").ok
        assert reshard.compare(saved, one_of_everything()).ok

    def test_differences_are_named(self, saved):
        other = one_of_everything()
        other["model"]["w"][3, 2] += 1
        other["model"]["new"] = torch.ones(1)
        other["model"]["flags"] = torch.ones(3)
        other["step"] = 6

        found = {f.fqn: f for f in reshard.compare(saved, other).findings}

        assert found["model.w"].element == (3, 2)
        assert found.keys() == {"model.w", "model.new", "model.flags", "step"}

    def test_tolerance(self, saved):
        other = one_of_everything()
        other["model"]["w"] += 1e-6

        assert not reshard.compare(saved, other).ok
        assert reshard.compare(saved, other, atol=1e-5).ok

    def test_values_of_each_rank_are_compared_too(self, tmp_path):
        def own(**values):
            return {"w": torch.ones(2), **{key: reshard.PerRank(value) for key, value in values.items()}}

        state = own(a={"x": torch.ones(2), "nan": float("nan")}, b=torch.tensor([float("nan")]), c=1)
        reshard.save(state, tmp_path / "one")
        reshard.save(own(a={"x": torch.zeros(2), "nan": float("nan")}, b=torch.zeros(1), d=1), tmp_path / "other")

        assert reshard.compare(tmp_path / "one", tmp_path / "one").ok
        assert reshard.verify(tmp_path / "one", against=state).ok
        for other in (tmp_path / "other", reshard.open(tmp_path / "other")):
            report = reshard.compare(tmp_path / "one", other)
            assert {finding.fqn for finding in report.findings} == {"a", "b", "c", "d"}
        assert "'a': differs between" in str(report)
        assert "on rank 0" in str(report)

    def test_lists_that_a_format_keeps_whole_are_compared_item_by_item(self, tmp_path):
        state = {"w": torch.ones(2), "o": {"l": [1, (2, {"x": 3})], "e": {}, "odd": {1: 5, "1": 6}}}
        del state["o"]["odd"]["1"]
        reshard.save(state, tmp_path / "c")
        reshard.convert(tmp_path / "c", tmp_path / "c.pt", format="torch_save")
        assert reshard.compare(tmp_path / "c", tmp_path / "c.pt").ok
        torch.save({**state, "o": {"l": [1, (2, {"x": 4})], "e": {}, "odd": {1: 5}}}, tmp_path / "d.pt")
        (finding,) = reshard.compare(tmp_path / "c", tmp_path / "d.pt").findings
        assert finding.fqn == "o.l.1.1.x"

    def test_objects_with_arrays_in_them_are_compared(self, tmp_path):
        state = {"o": {1.5: np.ones(2), 2.5: float("nan")}, "p": np.ones(3)}
        reshard.save(state, tmp_path / "one")
        reshard.save({"o": {1.5: np.zeros(2), 2.5: float("nan")}, "p": np.ones(4)}, tmp_path / "other")
        assert reshard.compare(tmp_path / "one", state).ok
        assert len(reshard.compare(tmp_path / "one", tmp_path / "other").findings) == 2


class TestFolders:
    def test_latest_complete_and_prune(self, tmp_path):
        for step in range(4):
            reshard.save({"step": step}, tmp_path / f"step-{step}")
        (tmp_path / "step-3" / MANIFEST).unlink()  # as if killed

        assert reshard.latest_complete(tmp_path) == str(tmp_path / "step-2")
        gone = reshard.prune(tmp_path, keep_last=1)

        assert gone == [str(tmp_path / "step-0"), str(tmp_path / "step-1")]
        assert reshard.latest_complete(tmp_path) == str(tmp_path / "step-2")
        assert reshard.latest_complete(tmp_path / "step-0") is None


def test_a_key_that_found_its_counterpart_is_no_guess_for_another(tmp_path):
    reshard.save({"layer.w": torch.ones(1), "layer.wieght": torch.ones(1)}, tmp_path)
    with pytest.raises(KeyMismatchError) as caught:
        reshard.load({name: torch.zeros(1) for name in ("layer.w", "layer.v", "layer.weight")}, tmp_path)
    assert "layer.weight   (did you mean 'layer.wieght'?)" in str(caught.value)
    assert "layer.wieght   (did you mean 'layer.weight'?)" in str(caught.value)
    assert "did you mean 'layer.w'?" not in str(caught.value)


def test_a_guess_never_differs_in_a_number(tmp_path):
    reshard.save({"layers.1.w": torch.ones(1), "layers.12.w": torch.ones(1)}, tmp_path)
    with pytest.raises(KeyMismatchError) as caught:
        reshard.load({"layers.1.w": torch.zeros(1), "layers.11.w": torch.zeros(1)}, tmp_path)
    assert "did you mean" not in str(caught.value)


def test_a_name_without_its_front_is_guessed(tmp_path):
    reshard.save({"model": {"w": torch.ones(1), "v": torch.ones(1)}}, tmp_path)
    with pytest.raises(KeyMismatchError, match=r"no tensor 'w': did you mean 'model.w'\?"):
        reshard.open(tmp_path)["w"]


def test_no_error_recommends_to_drop_fractions(tmp_path):
    reshard.save({"c": torch.ones(1, dtype=torch.complex64)}, tmp_path / "complex")
    reshard.save({"w": torch.ones(1)}, tmp_path)
    with pytest.raises(KeyMismatchError, match="a cast would drop fractions") as caught:
        reshard.load({"w": torch.zeros(1, dtype=torch.int64)}, tmp_path)
    assert "'cast'" not in str(caught.value)
    assert "dtype_policy='saved'" in str(caught.value)
    with pytest.raises(KeyMismatchError, match="imaginary parts") as caught:
        reshard.load({"c": torch.zeros(1)}, tmp_path / "complex")
    assert "'cast'" not in str(caught.value)
    with pytest.raises(KeyMismatchError, match="'cast' converts"):
        reshard.load({"w": torch.zeros(1, dtype=torch.bfloat16)}, tmp_path)
    with pytest.raises(KeyMismatchError, match="a cast would drop fractions") as caught:
        reshard.redistribute({"w": torch.ones(1)}, {"w": torch.zeros(1, dtype=torch.int64)})
    assert "'cast'" not in str(caught.value)


def test_a_manifest_cut_short_is_called_that(tmp_path):
    reshard.save({"w": torch.ones(1)}, tmp_path)
    manifest = tmp_path / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:300])
    with pytest.raises(CorruptCheckpointError, match=r"is truncated or damaged, with 300 bytes: .*Restore the file"):
        reshard.open(tmp_path)


def test_a_scheme_that_is_nearly_right():
    with pytest.raises(StorageError, match=r"unknown scheme 'gcs' of gcs://b/c: did you mean 'gs'\?"):
        reshard.open("gcs://b/c")


def test_a_later_stage_alone_is_no_whole_checkpoint(tmp_path):
    for name in ("stage_1.pt", "stage_0.pt", "model_1.pt"):
        (tmp_path / name[:-3]).mkdir()
        torch.save({"w": torch.ones(1)}, tmp_path / name[:-3] / name)
    (warning,) = reshard.open(tmp_path / "stage_1").warnings
    assert warning.startswith("stage_1.pt is the only file: if it is one stage of a pipeline, the other stages are")
    assert not reshard.open(tmp_path / "stage_1" / "stage_1.pt").warnings
    assert not reshard.open(tmp_path / "stage_0").warnings
    assert not reshard.open(tmp_path / "model_1").warnings


def test_an_error_in_a_file_of_rules_says_where(tmp_path):
    file = tmp_path / "rules.topology"
    file.write_text("dp=2\n\n# the head\nhead -> Q(0)\n")
    with pytest.raises(PlanError, match=r"rules\.topology: line 4 of the topology: the rule for 'head': unknown plac"):
        read_layout_file(file)
