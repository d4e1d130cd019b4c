"""torchsnapshot: what version 0.1.0 wrote on two ranks (`tests/data/torchsnapshot`), and manifests that lie."""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.checkpoint import open as open_checkpoint
from reshard.errors import CheckpointError, CorruptCheckpointError, ReshardError
from tests.reshard.formats.compare import check_all, flat_tensors
from tests.same import same
from tests.samples import sample

yaml = pytest.importorskip("yaml", reason="not installed: pip install -e '.[test]'")


def saved(rank: int = 0) -> Any:
    """What the script beside the samples says that a rank saved."""
    spec = importlib.util.spec_from_file_location("make_torchsnapshot", sample("torchsnapshot/make.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.values(rank)


@pytest.mark.parametrize("kind", ["plain", "batched"])
def test_what_torchsnapshot_wrote(kind: str) -> None:
    checkpoint, state = open_checkpoint(sample("torchsnapshot") / kind), saved()

    assert checkpoint.format == "torchsnapshot"
    check_all(checkpoint, flat_tensors({key: state[key] for key in ("model", "optim")}))
    nest = checkpoint.nested()
    assert list(nest["optim"]["state"]) == [0]
    assert nest["optim"]["param_groups"] == state["optim"]["param_groups"]
    assert (nest["optim"]["raw"], nest["optim"]["none"], nest["progress"]["steps"]) == (b"\x00\xff", {}, 12)
    assert "a/b%" in nest["model"]
    own = checkpoint.contents.per_rank
    assert dict(own["progress.rank"]) == {0: 0, 1: 1}
    assert {rank: read(tensor).tolist() for rank, tensor in own["progress.seen"].items()} == {0: [0, 5], 1: [1, 5]}
    assert any("2 values, such as 'progress." in warning for warning in checkpoint.warnings)


def read(stored: Any) -> torch.Tensor:
    from reshard.stored.tensor import LazyTensor

    return LazyTensor(stored)[...]


def test_loads_normalizes_and_converts(tmp_path: Path) -> None:
    state = saved()
    found = reshard.open(sample("torchsnapshot/plain")).normalized(hints={"param_names": ["sharded"]})
    assert same(found["model"]["sharded"][...], state["model"]["sharded"])
    assert same(found["optim"]["state"]["sharded"]["exp_avg"][...], state["optim"]["state"][0]["exp_avg"])
    target = {"progress": {"seen": reshard.PerRank(torch.zeros(2, dtype=torch.int64), on_change="keep")}}
    reshard.load(target, sample("torchsnapshot/plain"), strict={"*": "subset"})
    assert target["progress"]["seen"].value.tolist() == [0, 5]
    reshard.convert(sample("torchsnapshot/batched"), tmp_path / "out")
    check_all(
        open_checkpoint(tmp_path / "out"), flat_tensors({k: state[k] for k in ("model", "optim")}), complete=False
    )


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(sample("torchsnapshot/plain"), tmp_path / "c"))


def rewrite(folder: Path, key: str, **changes: Any) -> None:
    file = folder / ".snapshot_metadata"
    manifest = json.loads(json.dumps(yaml.safe_load(file.read_text())))
    manifest["manifest"][key].update(changes)
    file.write_text(json.dumps(manifest))


@pytest.mark.parametrize("file", ["replicated/optim/param_groups/0/betas", "0/progress/seen"])
def test_verify_reads_objects_and_the_values_of_ranks(file: str, copied: Path) -> None:
    """They are in files of their own, which no tensor of all ranks needs."""
    assert reshard.verify(copied).ok
    checkpoint = open_checkpoint(copied)
    (copied / file).write_bytes(b"x" * 9)
    report = reshard.verify(checkpoint)
    [finding] = report.findings
    assert file in finding.message
    assert finding.fqn in (*checkpoint.objects, *checkpoint.contents.per_rank)


LIES = {
    "file": ({"location": "../../etc/passwd"}, r"the file \.\./\.\./etc/passwd is missing"),
    "range": ({"byte_range": [0, 99999]}, r"should be at bytes \[0, 99999\), but the file has"),
    "short": ({"byte_range": [0, 8]}, r"needs 4 bytes, and has 8|should be at bytes"),
    "dtype": ({"dtype": "torch.float65"}, "is malformed: ValueError: 'torch.float65' is not a dtype"),
    "serializer": ({"serializer": "pickle"}, "serialized by 'pickle', which is not known"),
    "shape": ({"shape": [-1]}, "is malformed"),
    "kind": ({"type": "tuple"}, "is malformed"),
}


@pytest.mark.parametrize("name", LIES)
def test_manifests_that_lie(name: str, copied: Path) -> None:
    changes, message = LIES[name]
    rewrite(copied, "0/model/scale", **changes)
    with pytest.raises(ReshardError, match=message):
        open_checkpoint(copied)


@pytest.mark.parametrize(
    "change", ["same bytes", "same file", "renamed", "moved", "gone", "not listed", "number", "dtype"]
)
def test_what_stands_twice_in_a_manifest_must_agree(change: str, copied: Path) -> None:
    """There are no checksums, but names, places, and numbers are in it twice."""
    file = copied / ".snapshot_metadata"
    manifest = json.loads(json.dumps(yaml.safe_load(file.read_text())))
    entries = manifest["manifest"]
    long = entries["0/model/long"]["chunks"]
    told = "container|should have"
    if change == "same bytes":
        long[1]["tensor"] |= {name: long[0]["tensor"][name] for name in ("location", "byte_range")}
        told = "are both at byte"
    elif change == "same file":
        entries["0/progress/seen"] |= {name: entries["1/progress/seen"][name] for name in ("location", "byte_range")}
        told = "are both at byte"
    elif change == "renamed":
        entries["0/model/wavy"] = entries.pop("0/model/wave")
    elif change == "moved":
        entries["0/prog"] = entries.pop("0/progress")
    elif change == "gone":
        entries["0/prog/steps"] = entries.pop("0/progress/steps")
    elif change == "not listed":
        entries["0/optim/param_groups/1/lr"] = entries["0/optim/param_groups/0/lr"]
    elif change == "number":
        entries["0/optim/param_groups/0/lr"]["serialized_value"] = "mpmZmZmZyT8="
        told = "is 0.2, and reads 0.1"
    else:
        entries["0/model/long"]["dtype"] = "torch.float64"
        told = "other dtypes"
    file.write_text(json.dumps(manifest))
    with pytest.raises(CorruptCheckpointError, match=told):
        open_checkpoint(copied)


def test_what_is_missing_or_of_another_kind(copied: Path) -> None:
    as_json = json.dumps(yaml.safe_load((copied / ".snapshot_metadata").read_text()))
    rewrite(copied, "0/model/scale", dtype="torch.qint8")
    quantized = open_checkpoint(copied)
    assert "model.scale" not in quantized
    assert quantized.warnings[-1] == "'model.scale' cannot be read: a quantized tensor"
    (copied / ".snapshot_metadata").write_text(as_json)
    check_all(open_checkpoint(copied), {"model.scale": saved()["model"]["scale"]}, complete=False)
    next(copied.rglob("scale*")).unlink()
    with pytest.raises(CorruptCheckpointError, match=r"is missing, which should hold 'model.scale'"):
        open_checkpoint(copied)
    (copied / ".snapshot_metadata").write_text("a: [")
    with pytest.raises(CorruptCheckpointError, match="neither JSON nor YAML"):
        open_checkpoint(copied)
    (copied / ".snapshot_metadata").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint of"):
        open_checkpoint(copied)


def test_fuzzed_manifests_give_clear_errors_only(copied: Path) -> None:
    file = copied / ".snapshot_metadata"
    original = json.dumps(yaml.safe_load(file.read_text())).encode()
    rng = random.Random(0)
    refused = 0
    for turn in range(150):
        data = bytearray(original)
        if turn % 5 == 0:
            data = data[: rng.randrange(len(data))]
        else:
            data[rng.randrange(len(data))] = rng.choice(b'0123456789"{}[],:azA/')
        file.write_bytes(data)
        try:
            checkpoint = open_checkpoint(copied)
            for key in checkpoint:
                checkpoint[key][...]
            dict(checkpoint.objects)
        except ReshardError:
            refused += 1
    assert refused > 40


def test_early_manifests_and_dtensors(copied: Path) -> None:
    """By the source: early versions wrote YAML, and later ones know DTensors, whose replicas several ranks list."""
    manifest = json.loads((copied / ".snapshot_metadata").read_text())
    for rank in range(2):
        entry = manifest["manifest"][f"{rank}/model/sharded"]
        manifest["manifest"][f"{rank}/model/sharded"] = {
            "type": "DTensor",
            "shards": [*entry["shards"], manifest["manifest"]["0/model/sharded"]["shards"][0]],
            "mesh": [0, 1],
            "dim_map": [[0], [-1]],
        }
    (copied / ".snapshot_metadata").write_text(yaml.safe_dump(manifest, sort_keys=False))

    check_all(open_checkpoint(copied), {"model.sharded": saved()["model"]["sharded"]}, complete=False)
