"""Damage to a sharded checkpoint, and anything at all in its manifest and headers: found, with a clear error."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import reshard
from reshard.errors import CorruptCheckpointError, ReshardError
from reshard.native import commit
from reshard.native.manifest import MANIFEST
from reshard.storage import open_storage
from reshard.storage.memory import MemoryStorage
from tests import traced
from tests.golden import make

SOURCE = make.HERE / "v1" / "sharded"
FLIPS = 300
MAX_EXTRA_BYTES = 64 << 20


@pytest.fixture
def path(tmp_path):
    return shutil.copytree(SOURCE, tmp_path / "c")


def target():
    state = {name: torch.full_like(value, 77) for name, value in make.sharded_values().items()}
    return {"model": state, "rng": reshard.PerRank(torch.tensor([9]), on_change="drop"), "step": 0}


def untouched(state) -> bool:
    return all(bool((tensor == 77).all()) for tensor in state["model"].values()) and state["step"] == 0


def right(state) -> bool:
    return all(torch.equal(state["model"][name], value) for name, value in make.sharded_values().items())


def data_files(path):
    return sorted(path.glob("data-*/*.safetensors"))


def refused(path) -> str:
    """The message with which a load refuses, having touched nothing; verify finds it as well."""
    state = target()
    with pytest.raises(CorruptCheckpointError) as caught:
        reshard.load(state, path)
    assert untouched(state)
    assert not reshard.verify(path).ok
    return str(caught.value)


def test_two_files_swapped(path):
    first, second = data_files(path)[:2]
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)

    assert first.name in refused(path) or second.name in refused(path)


def test_two_files_swapped_together_with_their_sums(path):
    first, second = data_files(path)[:2]
    for a, b in ((first, second), *[(first.with_suffix(".safetensors.sums"), second.with_suffix(".safetensors.sums"))]):
        one, other = a.read_bytes(), b.read_bytes()
        a.write_bytes(other)
        b.write_bytes(one)

    assert first.name in refused(path) or second.name in refused(path)


def test_files_of_two_saves_in_one_folder(path, tmp_path):
    other = shutil.copytree(SOURCE, tmp_path / "other")
    changed = {name: value + 1 for name, value in make.sharded_values().items()}
    reshard.save({"model": changed, "rng": torch.tensor([1]), "step": 3}, other)
    theirs = next(other.glob("data-*/*.safetensors"))
    shutil.copy(theirs, data_files(path)[0])

    assert data_files(path)[0].name in refused(path)


@pytest.mark.parametrize("change", ["delete", "truncate", "lengthen"])
@pytest.mark.parametrize("suffix", ["", ".sums"])
def test_a_file_of_another_length(path, change, suffix):
    file = data_files(path)[2]
    file = file.with_name(file.name + suffix)
    data = file.read_bytes()
    if change == "delete":
        file.unlink()
    else:
        file.write_bytes(data[:-1] if change == "truncate" else data + b"x")

    message = refused(path)
    assert file.name in message
    assert "missing" in message if change == "delete" else str(len(data)) in message
    findings = reshard.verify(path).findings
    assert len([finding for finding in findings if finding.fqn is None]) == 1  # the file; others are of its tensors
    assert not any("was changed" in finding.message for finding in findings)
    if suffix:  # no data of its tensors is lost
        assert [finding.message for finding in findings] == [message]


def test_unchecked_what_is_left_of_a_truncated_file_can_be_read(tmp_path):
    path = tmp_path / "c"
    reshard.save({"a": torch.arange(100.0), "b": torch.arange(1000.0)}, path)
    (file,) = data_files(path)
    file.write_bytes(file.read_bytes()[:-10])
    found, target = reshard.open(path, check=False), {"a": torch.zeros(100)}

    reshard.load(target, path, check=False, strict="subset")

    assert torch.equal(found["a"][:], target["a"])
    assert torch.equal(target["a"], torch.arange(100.0))
    with pytest.raises(CorruptCheckpointError, match=r"'b' is outside the file"):
        found["b"][:]
    target = {"a": torch.zeros(100), "b": torch.zeros(1000)}
    with pytest.raises(CorruptCheckpointError, match=r"'b' is outside the file"):
        reshard.load(target, path, check=False)
    assert not target["a"].any()


def test_changed_checksums_are_told_with_the_way_out(path):
    file = next(path.rglob("*.sums"))
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])

    assert f"{file.name} was changed since it was written: restore it, or load another checkpoint" in refused(path)


def test_bits_flipped_anywhere_are_found_and_change_no_target(path):
    random_ = random.Random(0)
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and file.name != MANIFEST]
    for _ in range(FLIPS):
        file = random_.choice(files)
        data = bytearray(file.read_bytes())
        at = random_.randrange(len(data))
        data[at] ^= 1 << random_.randrange(8)
        whole = file.read_bytes()
        file.write_bytes(data)
        report = reshard.verify(path)
        assert not report.ok, f"{file.name} byte {at}"
        assert any(file.name.removesuffix(".sums") in str(finding) for finding in report.findings)
        state = target()
        with pytest.raises(CorruptCheckpointError):
            reshard.load(state, path)
        assert untouched(state)
        file.write_bytes(whole)
    assert reshard.verify(path).ok


def in_memory(changed: dict[str, bytes]) -> MemoryStorage:
    storage = MemoryStorage()
    for file in sorted(SOURCE.rglob("*")):
        if file.is_file():
            name = str(file.relative_to(SOURCE))
            storage.publish(name, changed.get(name, file.read_bytes()))
    return storage


def survives(storage: MemoryStorage) -> None:
    """Open, look at and load: right, or refused with an error of ours; never by taking all memory."""
    state, message = target(), None
    with traced.peak() as peak:
        try:
            checkpoint = reshard.open(storage)
            for name in checkpoint:
                repr(checkpoint[name])
            reshard.load(state, storage, strict=False, dtype_policy="cast")
        except ReshardError as error:
            message = str(error)
    assert message != "", "an error that says nothing"
    assert message is None or untouched(state)
    assert peak.nbytes < MAX_EXTRA_BYTES


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([0, -1, 1, 2**31, 2**53, 2**63 - 1, 2**63])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["float32", "S(0)", "R", "S(9)", "$tuple", "data-x/../../etc/passwd", "tensor"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=6,
)


def spots(value, path=()):
    """Every place in a JSON value."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from spots(value[key], (*path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from spots(item, (*path, i))


MANIFEST_JSON = json.loads((SOURCE / MANIFEST).read_text())
SPOTS = [spot for spot in spots(MANIFEST_JSON) if spot]


def test_what_was_to_be_replaced_stays_as_it_was(tmp_path):
    reshard.save({name: torch.ones(9) for name in ("meta", "other", "plain")}, tmp_path / "c")
    (file,) = (tmp_path / "c").glob("data-*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    other, plain = torch.zeros(9, dtype=torch.int64), torch.zeros(9)
    before = {"meta": torch.empty(9, device="meta"), "other": other, "plain": plain}
    state = dict(before)

    with pytest.raises(CorruptCheckpointError):
        reshard.load(state, tmp_path / "c", dtype_policy="saved")

    assert all(state[name] is before[name] for name in before)
    assert not other.any()
    assert not plain.any()


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_manifest_with_anything_anywhere(data):
    changed = json.loads(json.dumps(MANIFEST_JSON))
    for spot in data.draw(st.lists(st.sampled_from(SPOTS), min_size=1, max_size=2)):
        node = changed
        try:
            for part in spot[:-1]:
                node = node[part]
            if data.draw(st.booleans()):
                node[spot[-1]] = data.draw(values)
            else:
                del node[spot[-1]]
        except (KeyError, IndexError, TypeError):
            continue  # the first change took this place away
    survives(in_memory({MANIFEST: json.dumps(changed).encode()}))


@pytest.mark.parametrize("number", [2**27, 2**40, 2**62])
@pytest.mark.parametrize("what", ["world size", "mesh", "shape", "header"])
def test_a_huge_number_takes_no_memory(number, what):
    changed = json.loads(json.dumps(MANIFEST_JSON))
    layout = changed["layout"]
    if what == "world size":
        layout["world_size"] = number
    elif what == "mesh":
        form = next(form for form in layout["forms"] if form.get("mesh") == "dp=2,tp=2")
        form["mesh"] = f"dp={number},tp=2"
    elif what == "shape":
        layout["tensors"]["model.rows"][1][0] = number
    else:
        next(iter(changed["files"].values()))["header_bytes"] = number
    survives(in_memory({MANIFEST: json.dumps(changed).encode()}))


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=200), at=st.integers(0, 5000), cut=st.integers(0, 300))
def test_a_manifest_with_bytes_replaced(data, at, cut):
    whole = (SOURCE / MANIFEST).read_bytes()
    at = min(at, len(whole))
    survives(in_memory({MANIFEST: whole[:at] + data + whole[at + cut :]}))


@pytest.mark.parametrize("text", [b"", b"{}", b'{"reshard": "checkpoint", "version": 1, "layout": []}', b"[" * 9000])
def test_a_manifest_that_is_none_says_what_to_do(text):
    with pytest.raises(CorruptCheckpointError, match="Restore the file, or load another checkpoint"):
        reshard.open(in_memory({MANIFEST: text}))


def test_which_save_counts_is_not_read_out_of_a_manifest_that_was_changed(tmp_path):
    reshard.save({"a": torch.ones(2)}, tmp_path)
    storage, manifest = open_storage(tmp_path), tmp_path / MANIFEST
    save_id = commit.published(storage)
    assert commit.counting(storage) == save_id
    text = manifest.read_bytes()
    undigested = text[: text.rindex(b',"digest"')] + b"}"
    manifest.write_bytes(undigested)
    assert commit.published(storage) == save_id, "as older versions wrote it"
    for changed in (text.replace(b'"world_size":', b'"world_size" :'), undigested.replace(b'"files":', b'"Files":')):
        assert json.loads(changed)["save_id"] == save_id
        manifest.write_bytes(changed)
        with pytest.raises(CorruptCheckpointError):
            commit.published(storage)
        assert commit.counting(storage) != save_id


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=60), at=st.integers(0, 400), which=st.integers(0, 3))
def test_a_header_with_bytes_replaced(data, at, which):
    file = data_files(SOURCE)[which]
    whole = file.read_bytes()
    survives(in_memory({str(file.relative_to(SOURCE)): (whole[:at] + data + whole[at + len(data) :])[: len(whole)]}))


def test_an_index_for_hugging_face_tools_that_says_other_than_the_manifest(tmp_path):
    reshard.save({"w": torch.ones(3), "b": torch.zeros(0)}, tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    assert reshard.verify(tmp_path).ok
    for wrong, words in (
        ({"w": "other.safetensors", "b": good["weight_map"]["b"]}, "'w' is in other.safetensors, but"),
        ({"b": good["weight_map"]["b"]}, "'w' is nowhere, but"),
        ({**good["weight_map"], "v": "x"}, "'v' is in x, but by the manifest it is nowhere"),
    ):
        index.write_text(json.dumps({**good, "weight_map": wrong}))
        for deep in (False, True):
            (finding,) = reshard.verify(tmp_path, deep=deep).findings
            assert f"{index.name}: it says that {words}" in finding.message
    index.write_bytes(b"\xff{")
    assert f"{index.name}: it is not an index" in reshard.verify(tmp_path).findings[0].message
    index.unlink()
    assert reshard.verify(tmp_path).ok


def test_every_flipped_bit_of_an_index_for_hugging_face_tools_is_found(tmp_path):
    reshard.save({"w": torch.ones(3)}, tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    whole = index.read_bytes()
    for place in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        index.write_bytes(flipped)
        findings = reshard.verify(tmp_path, deep=False).findings
        assert [index.name in finding.message for finding in findings] == [True], place


def test_an_index_beside_tensors_in_several_files(path):
    (path / "model.safetensors.index.json").write_text('{"weight_map": {}}')

    assert "there must be no index" in reshard.verify(path).findings[0].message


def test_converting_over_an_older_checkpoint_leaves_no_index_of_it(tmp_path):
    reshard.save({"w": torch.ones(3), "v": torch.ones(3)}, tmp_path / "from")
    reshard.convert(tmp_path / "from", tmp_path / "to")
    reshard.convert(tmp_path / "from", tmp_path / "to", overwrite=True, max_shard_bytes=12)

    assert not (tmp_path / "to" / "model.safetensors.index.json").exists()
    assert reshard.verify(tmp_path / "to").ok


def test_a_changed_name_in_a_manifest_without_a_digest_of_itself(tmp_path):
    """As the first version has it: the tensor would be another one, and part of no model."""
    copy = shutil.copytree(make.HERE / "v1" / "sharded", tmp_path / "copy")
    manifest = copy / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"tensors":{"model.rows"', b'"tensors":{"modOl.rows"'))

    with pytest.raises(CorruptCheckpointError, match=r"a fingerprint of .model\.rows., but no tensor"):
        reshard.open(copy)
