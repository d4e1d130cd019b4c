"""Checkpoints that are replaced by a later save while somebody opens or loads them: the old or the new one, or a clear
error, and never "there is none"."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import reshard
from reshard import dcp
from reshard.api import compare, verify
from reshard.errors import CheckpointError, CheckpointReplacedError, CorruptCheckpointError, ReshardError
from reshard.native import reader
from reshard.native.manifest import HF_INDEX, MANIFEST
from reshard.storage import open_storage
from tests import gloo
from tests.faulty import Faulty
from tests.states import tensor_of


class Replacing:
    """Saves once more just before the `at`-th operation of a storage."""

    def __init__(self, folder: Path, at: int) -> None:
        self.folder, self.left = folder, at

    def __call__(self, verb: str, name: str) -> None:
        self.left -= 1
        if self.left == 0:
            reshard.save(tensor_of(2), self.folder)


@pytest.mark.parametrize("at", range(1, 8))
def test_loading_gives_the_old_or_the_new_one_or_says_that_it_was_replaced(at, tmp_path):
    reshard.save(tensor_of(1), tmp_path)
    replacing = Replacing(tmp_path, at)
    target, said = tensor_of(0), ""
    try:
        reshard.load(target, Faulty(open_storage(tmp_path), replacing))
    except CheckpointError as error:
        said = str(error)
    assert (target["w"] == target["step"]).all()
    if said:
        assert at > 2, "while it is opened, a checkpoint that was replaced is opened again"
        assert "was replaced by a later save" in said
        assert target["step"] == 0
    else:
        assert target["step"] in (1, 2)


def test_whoever_reads_one_that_was_replaced_is_told_to_open_it_again(tmp_path):
    reshard.save(tensor_of(1), tmp_path / "c")
    opened = reshard.open(tmp_path / "c")
    reshard.save(tensor_of(2), tmp_path / "c", overwrite=True)
    ways = [
        lambda: opened["w"][...],
        lambda: reshard.compare(opened, tensor_of(1)).raise_if_failed(),
        lambda: reshard.convert(opened, tmp_path / "out"),
        lambda: reshard.fingerprint(opened),
    ]
    for way in ways:
        with pytest.raises(ReshardError, match=r"was replaced by a later save.* it again, by its path"):
            way()


def test_there_is_always_a_latest_checkpoint(tmp_path):
    reshard.save(tensor_of(0), tmp_path / "c")
    done = threading.Event()

    def overwrite() -> None:
        try:
            for step in range(40):
                reshard.save(tensor_of(step), tmp_path / "c", fingerprints=False)
        finally:
            done.set()

    thread = threading.Thread(target=overwrite)
    thread.start()
    found = set()
    while not done.is_set():
        found.add(reshard.latest_complete(tmp_path))
    thread.join()
    assert found == {str(tmp_path / "c")}


def test_one_that_is_replaced_while_nothing_changes_but_its_manifest_is_opened_again(tmp_path, monkeypatch):
    """The files of the next save are there already when it is opened; then it is published, and those before go."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)  # so that both manifests are equally long
    reshard.save(tensor_of(1), tmp_path / "c")
    shutil.copytree(tmp_path / "c", tmp_path / "before")
    reshard.save(tensor_of(2), tmp_path / "c")
    for kept in (tmp_path / "before").glob("data-*"):
        shutil.copytree(kept, tmp_path / "c" / kept.name)
    published = (tmp_path / "c" / MANIFEST).read_bytes()
    shutil.copy(tmp_path / "before" / MANIFEST, tmp_path / "c" / MANIFEST)
    look = reader.look_for_files

    def publish_and_look(*args: Any) -> None:
        (tmp_path / "c" / MANIFEST).write_bytes(published)
        for old in (tmp_path / "before").glob("data-*/*"):
            (tmp_path / "c" / old.parent.name / old.name).unlink(missing_ok=True)
        look(*args)

    monkeypatch.setattr(reader, "look_for_files", publish_and_look)
    assert reshard.open(tmp_path / "c").objects["step"] == 2


def test_an_index_for_other_tools_never_names_files_of_a_save_that_lost_a_race(tmp_path):
    path, raced = tmp_path / "c", []

    def fault(verb: str, name: str) -> None:
        if verb == "publish" and name == HF_INDEX and not raced:
            raced.append(reshard.save(tensor_of(2), path))

    reshard.save(tensor_of(1), Faulty(open_storage(path), fault))
    assert raced
    report = reshard.verify(path)
    assert report.ok, report
    assert not (path / HF_INDEX).exists()
    reshard.save(tensor_of(3), path)
    assert (path / HF_INDEX).exists()


def test_saves_to_one_folder_by_two_paths_go_on_one_after_another(tmp_path):
    def slow(verb: str, name: str) -> None:
        if verb == "write":
            time.sleep(0.2)

    (tmp_path / "c").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "c")
    first = reshard.async_save(tensor_of(1), Faulty(open_storage(tmp_path / "c"), slow))
    second = reshard.async_save(tensor_of(2), tmp_path / "link", max_in_flight=2)
    first.result()
    second.result()
    assert reshard.open(tmp_path / "c").objects["step"] == 2


@pytest.mark.parametrize("back_s", [0, 3600])
def test_the_latest_one_is_that_of_the_latest_save_though_the_clock_stands_still_or_is_set_back(
    back_s, tmp_path, monkeypatch
):
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - back_s * step)
    for step, name in enumerate("cab"):
        reshard.save(tensor_of(step), tmp_path / name)
        assert reshard.latest_complete(tmp_path) == str(tmp_path / name)


def two_saves(folder: str) -> str:
    """Rank 1 opens the checkpoint after it was replaced, rank 0 has opened it before."""
    if dist.get_rank() == 0:
        reshard.save(tensor_of(1), folder, alone=True)
        early = reshard.open(folder)
        reshard.save(tensor_of(2), folder, alone=True)
    dist.barrier()
    target = tensor_of(0)
    with pytest.raises(CheckpointError) as caught:
        reshard.load(target, early if dist.get_rank() == 0 else folder)
    assert target["step"] == 0
    return str(caught.value)


@pytest.mark.gloo
def test_ranks_that_have_opened_different_saves_load_none(tmp_path):
    for said in gloo.run(two_saves, 2, str(tmp_path / "c")):
        assert "is not the same checkpoint on all ranks" in said


SHRINKING = """
import os, sys
from pathlib import Path
import torch
import reshard
from reshard import dcp
from planners.errors import ProofError
from reshard.errors import ReshardError

folder = Path(sys.argv[1])
state = {"a": torch.ones(300, 100), "b": torch.ones(300, 100)}
for format in ("native", "dcp", "safetensors", "torch_save"):
    reshard.save(state, folder / "saved")
    for way in ("slice", "load", "load during", "convert", "compare", "verify", "fingerprint"):
        path = folder / f"{format} {way}"
        reshard.convert(folder / "saved", path, format=format)
        checkpoint = reshard.open(path)
        checkpoint["a"][:2]  # which maps the file
        file = max([path, *path.rglob("*")], key=lambda one: one.is_file() and one.stat().st_size)
        os.truncate(file, 5000)
        target = {name: torch.zeros(300, 100) for name in state}
        ways = {
            "slice": lambda: checkpoint["b"][200:300],
            "load": lambda: reshard.load(target, checkpoint),
            "load during": lambda: reshard.load(target, checkpoint, check="during"),
            "convert": lambda: reshard.convert(checkpoint, path.with_suffix(".converted"), format="dcp"),
            "compare": lambda: reshard.compare(checkpoint, state).raise_if_failed(),
            "verify": lambda: reshard.verify(checkpoint).raise_if_failed(),
            "fingerprint": lambda: reshard.fingerprint(checkpoint),
        }
        try:
            ways[way]()
            print(format, way, "did not notice")
        except (ReshardError, ProofError) as error:
            if file.name not in str(error):
                print(format, way, "does not name", file.name, error)
        assert not any(value.any() for value in target.values()) or way == "load during", (format, way)
"""


def test_a_file_that_another_process_cuts_after_it_was_opened_is_an_error(tmp_path):
    """`torch.save` and DCP write an older file of the same name in place. To touch what is gone of a mapped file would
    end the process."""
    done = subprocess.run([sys.executable, "-c", SHRINKING, tmp_path], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("suffix", [".safetensors", ".sums", ".distcp"])
def test_an_open_checkpoint_that_lacks_a_file_is_damaged_however_it_is_read(suffix: str, tmp_path: Path) -> None:
    reshard.save({"w": torch.ones(300, 100)}, tmp_path / "native")
    reshard.convert(tmp_path / "native", tmp_path / "dcp", format="dcp")
    (file,) = tmp_path.rglob(f"*{suffix}")
    target = {"w": torch.zeros(300, 100)}
    ways = (
        lambda checkpoint: checkpoint["w"][...],
        lambda checkpoint: checkpoint["w"][:4],
        lambda checkpoint: reshard.load(target, checkpoint),
        lambda checkpoint: reshard.convert(checkpoint, tmp_path / "out", format="torch_save"),
        lambda checkpoint: reshard.fingerprint(checkpoint),
    )
    opened = [reshard.open(tmp_path / ("dcp" if suffix == ".distcp" else "native")) for _ in ways]
    file.unlink()
    for way, checkpoint in zip(ways, opened):
        with pytest.raises(CorruptCheckpointError, match=rf"{file.name}.*restore it, or load another checkpoint"):
            way(checkpoint)


def test_a_slice_of_a_checkpoint_that_was_replaced_says_so(tmp_path: Path) -> None:
    reshard.save(tensor_of(1), tmp_path)
    old = reshard.open(tmp_path)
    reshard.save(tensor_of(2), tmp_path)
    for read in (lambda: old["w"][...], lambda: old["w"][:1]):
        with pytest.raises(CheckpointReplacedError, match=r"was replaced by a later save, .*: open it again"):
            read()


def pieces(step: int) -> dict[str, Any]:
    """As FSDP1 has them: a ShardedTensor."""
    from torch.distributed._shard.sharded_tensor import Shard as Piece, init_from_local_shards

    rank = dist.get_rank()
    piece = Piece.from_tensor_and_offsets(torch.full((5, 1), float(step)), [5 * rank, 0], rank)
    return {"w": init_from_local_shards([piece], 10, 1)}


def two_steps_of_pieces(folder: str) -> str:
    here = dist.get_rank()
    for step in (1, 2):
        reshard.save(pieces(step), f"{folder}/step-{step}")
    target = pieces(0)
    with pytest.raises(CheckpointError) as caught:
        reshard.load(target, f"{folder}/step-{here + 1}")
    assert target["w"].local_shards()[0].tensor.sum() == 0
    return str(caught.value)


@pytest.mark.gloo
def test_ranks_that_share_pieces_load_one_save(tmp_path):
    for text in gloo.run(two_steps_of_pieces, 2, str(tmp_path)):
        assert text.startswith("what ranks 0-1 load is not the same checkpoint on all ranks: some opened the save ")


def sharded(step: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return {"w": distribute_tensor(torch.full((10,), float(step)), mesh, [Shard(0)]), "step": step}


def two_steps(folder: str, form: str) -> list[str]:
    """Each rank opens another step: what one rank takes for the newest is not what another takes for it."""
    here, said = dist.get_rank(), []
    for step in (1, 2):
        path = f"{folder}/step-{step}"
        if form == "native":
            reshard.save(sharded(step), path)
        else:
            dcp.save(sharded(step), checkpoint_id=path)
    if here == 0:
        shutil.copytree(f"{folder}/step-1", f"{folder}/copy/step-1")
    dist.barrier()
    for strict in (True, False):
        target = sharded(0)
        with pytest.raises(CheckpointError) as caught:
            reshard.load(target, f"{folder}/step-{here + 1}", strict=strict)
        assert target["step"] == 0
        assert target["w"].to_local().sum() == 0
        said.append(str(caught.value))
    target = sharded(0)  # a copy on each machine is the same save
    assert reshard.load(target, f"{folder}/copy/step-1" if here else f"{folder}/step-1").ok
    plain = {"step": 0}  # what ranks do not share, they may load from anywhere
    reshard.load(plain, f"{folder}/step-{here + 1}", strict="subset")
    assert plain == {"step": here + 1}
    return said


@pytest.mark.gloo
@pytest.mark.parametrize("form", ["native", "dcp"])
def test_ranks_that_share_tensors_load_one_save(tmp_path, form):
    for texts in gloo.run(two_steps, 2, str(tmp_path), form):
        for text in texts:
            assert text.startswith("what the ranks of dp=2 load is not the same checkpoint on all ranks: some opened ")


def compared_with_two_steps(folder: str) -> str:
    """A mixture of two steps is equal, on each rank, to the one that this rank opens."""
    here = dist.get_rank()
    for step in (1, 2):
        reshard.save(sharded(step), f"{folder}/step-{step}")
    with pytest.raises(CheckpointError) as caught:
        reshard.compare(f"{folder}/step-{here + 1}", sharded(here + 1))
    assert reshard.compare(f"{folder}/step-1", sharded(1)).ok
    return str(caught.value)


@pytest.mark.gloo
def test_ranks_compare_a_state_with_one_save(tmp_path):
    for text in gloo.run(compared_with_two_steps, 2, str(tmp_path)):
        assert text.startswith("the ranks differ in the checkpoint to compare: rank 0 vs. rank 1")


# --- formats whose files a later save writes over ---


def _written(kind: str, path: Path, value: int) -> Path:
    """A checkpoint, or another one of the same shapes in its place."""
    made = {"w": torch.full((8,), float(value)), "long": torch.full((400_000,), float(value))}  # a view, and a call
    if kind == "dcp":
        torch_dcp.save(made, storage_writer=torch_dcp.FileSystemWriter(path, thread_count=2), no_dist=True)
        return path
    if kind == "hugging face":
        path.mkdir(exist_ok=True)
        files = {name: f"model-0000{i}-of-00002.safetensors" for i, name in enumerate(made, 1)}
        for name, file in files.items():
            save_file({name: made[name]}, path / file)
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
        return path
    file = path.with_suffix(".pt")
    torch.save(made, file if kind == "torch_save" else f"{file}.new")
    if kind == "torch_save, renamed":
        os.replace(f"{file}.new", file)
    return file


@pytest.mark.host_only("it is about what is read from files")
@pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:Detected an existing checkpoint")
@pytest.mark.parametrize("is_read_before", [False, True])
@pytest.mark.parametrize("kind", ["dcp", "hugging face", "torch_save", "torch_save, renamed"])
def test_what_is_written_over_after_it_was_opened_is_not_read_as_one(kind, is_read_before, tmp_path):
    path = _written(kind, tmp_path / "c", 1)
    ways = [
        lambda: opened["w"][...],
        lambda: opened["long"][...],
        lambda: reshard.load({"w": torch.zeros(8), "long": torch.zeros(400_000)}, opened),
        lambda: reshard.convert(opened, tmp_path / "out"),
        lambda: reshard.compare(opened, path).raise_if_failed(),
        lambda: reshard.verify(opened).raise_if_failed(),
    ]
    for way in ways:
        opened = reshard.open(path)
        if is_read_before:
            assert opened["w"][0] == opened["long"][0]
        time.sleep(0.02)
        _written(kind, tmp_path / "c", 2)
        with pytest.raises(ReshardError, match=r"written again after it was opened|changed since they were written"):
            way()
    assert not (tmp_path / "out").exists()


@pytest.mark.host_only("it is about what is read from files")
def test_a_load_during_which_files_are_written_over_fails(tmp_path):
    path = _written("hugging face", tmp_path / "c", 1)
    target = {"w": torch.zeros(8), "long": torch.zeros(400_000)}

    def fault(verb: str, name: str) -> None:
        if verb == "read_into" and not written:
            written.append(_written("hugging face", tmp_path / "c", 2))

    written: list[Path] = []
    with pytest.raises(ReshardError, match=r"written again after it was opened"):
        reshard.load(target, Faulty(open_storage(path), fault))
    assert written


@pytest.mark.parametrize(
    ("way", "module", "step"),
    [
        ("verify", verify, "_metadata_findings"),
        ("verify", verify, "_deep_findings"),
        ("compare", compare, "_differences"),
    ],
)
def test_what_is_replaced_while_it_is_looked_at_is_neither_damaged_nor_different(
    way, module, step, tmp_path, monkeypatch
):
    """A job that keeps its last checkpoint saves once more, with the same values."""
    path, state = tmp_path / "last", tensor_of(1)
    reshard.save(state, path)
    ways = {"verify": lambda: reshard.verify(path), "compare": lambda: reshard.compare(path, path)}
    original, saved = getattr(module, step), []

    def replaced(*args: Any) -> Any:
        if not saved:
            saved.append(reshard.save(state, path))
        return original(*args)

    monkeypatch.setattr(module, step, replaced)
    with pytest.raises(CheckpointError, match=f"was replaced by a later save, or deleted, .*: {way} it again"):
        ways[way]()
    assert ways[way]().ok
