"""Checkpoints that Orbax wrote, on a 2 x 2 mesh: OCDBT and plain zarr."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch

import reshard
from reshard.errors import CorruptCheckpointError, FormatError, StorageError
from reshard.mapping import Mapping, Reshape, Transpose
from tests.samples import sample

pytest.importorskip("tensorstore", reason="not installed: pip install -e '.[orbax]'")

KERNEL = torch.arange(60.0).reshape(10, 6)


@pytest.fixture(params=["ocdbt", "zarr"])
def checkpoint(request):
    return reshard.open(sample("orbax") / request.param)


def test_arrays_and_slices(checkpoint):
    assert checkpoint.format == "orbax"
    kernel = checkpoint["params.dense.kernel"]
    assert torch.equal(kernel[...], KERNEL)
    assert torch.equal(kernel[3:8, ::2], KERNEL[3:8, ::2])
    assert checkpoint["params.dense.bias"].dtype == torch.bfloat16
    assert checkpoint["step"][...].item() == 7
    assert len(checkpoint.layout["params.dense.kernel"].boxes(0)) == 1
    assert checkpoint.problems() == []


def test_the_nest_comes_back(checkpoint):
    nest = checkpoint.nested()

    assert nest["opt_state"][1:] == [None, ()]
    assert torch.equal(nest["opt_state"][0]["mu"]["dense"]["kernel"][...], 2 * KERNEL)


@pytest.mark.parametrize("kind", ["ocdbt", "zarr"])
def test_a_named_pipe_among_the_files_is_refused(kind, tmp_path):
    """tensorstore would wait for its writer, and not be interrupted."""
    shutil.copytree(sample("orbax") / kind, tmp_path / "c")
    file = max((tmp_path / "c").rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(StorageError, match=rf"{file.name} in .* not a regular file"):
        reshard.open(tmp_path / "c")


def test_normalized(checkpoint):
    state = checkpoint.normalized()

    assert set(state["model"]) == {"dense.kernel", "dense.bias"}
    moments = state["optim"]["state"]["dense.kernel"]
    assert torch.equal(moments["exp_avg"][...], 2 * KERNEL)
    assert moments["step"][...].item() == checkpoint["opt_state.0.count"][...].item()
    assert state.notes == ()


def test_moments_follow_their_parameters_to_other_names(checkpoint):
    """As a torch program has them: heads joined to one dim, rows and columns changed."""
    split = Mapping([Reshape("dense.kernel", "dense.kernel", old=(10, 6), new=(10, 2, 3))])
    joined = Mapping([Reshape("dense.kernel", "dense.kernel", old=(-1, 2, 3), new=(-1, 6))])
    rules = split | joined | Mapping([Transpose("dense.kernel", "dense.weight")])
    made = checkpoint.canonical().mapped(rules)
    assert torch.equal(made["model.dense.weight"][...], KERNEL.T)
    assert torch.equal(made["optim.state.dense.weight.exp_avg"][...], 2 * KERNEL.T)
    assert "optim.state.dense.weight.step" in made


def test_load_into_a_target(checkpoint):
    target = {"params": {"dense": {"kernel": torch.zeros(10, 6)}}}

    reshard.load(target, checkpoint, strict={"*": "subset"})

    assert torch.equal(target["params"]["dense"]["kernel"], KERNEL)


def test_damage_is_named(tmp_path):
    shutil.copytree(sample("orbax/zarr"), tmp_path / "c")
    (tmp_path / "c" / "params.dense.kernel" / "1.0").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"params\.dense\.kernel.*missing"):
        reshard.open(tmp_path / "c")["params.dense.kernel"]
    shutil.copytree(sample("orbax/zarr"), tmp_path / "later")
    opened = reshard.open(tmp_path / "later")["params.dense.kernel"]
    (tmp_path / "later" / "params.dense.kernel" / "1.0").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"params\.dense\.kernel.*missing"):
        opened[...]
    tree = json.loads((tmp_path / "c" / "_METADATA").read_text())
    del tree["store_array_data_equal_to_fill_value"]  # as before there was this setting
    (tmp_path / "c" / "_METADATA").write_text(json.dumps(tree))
    assert "a lost file of a chunk looks the same" in str(reshard.verify(tmp_path / "c"))
    (tmp_path / "c" / "_METADATA").write_text("{")
    with pytest.raises(CorruptCheckpointError, match="_METADATA"):
        reshard.open(tmp_path / "c")


@pytest.mark.parametrize(
    ("shape", "told"), [([10, 2], "no parts of shape"), ([10, 3], "beyond its shape"), ([0, 6], "beyond its shape")]
)
def test_a_smaller_shape_is_damage(shape, told, tmp_path):
    """The tree and the names of the chunks say what the whole shape is."""
    shutil.copytree(sample("orbax/zarr"), tmp_path / "c")
    file = tmp_path / "c" / "params.dense.kernel" / ".zarray"
    file.write_text(json.dumps({**json.loads(file.read_text()), "shape": shape}))
    with pytest.raises(CorruptCheckpointError, match=rf"params\.dense\.kernel.*{told}"):
        reshard.open(tmp_path / "c")["params.dense.kernel"]


def write_zarr3(root, name):
    """An array whose files hold four chunks each, as Orbax writes with `chunk_byte_size`, and its tree."""
    tensorstore = pytest.importorskip("tensorstore")
    inner = {"chunk_shape": [2, 3], "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}]}
    metadata = {
        "shape": [10, 6],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 6]}},
        "codecs": [{"name": "sharding_indexed", "configuration": inner}],
    }
    kvstore = {"driver": "file", "path": f"{root}/{name}/"}
    spec = {"driver": "zarr3", "kvstore": kvstore, "metadata": metadata, "store_data_equal_to_fill_value": True}
    tensorstore.open(spec, create=True).result().write(KERNEL.numpy()).result()
    entry = {"key_metadata": [{"key": name, "key_type": 2}], "value_metadata": {"value_type": "jax.Array"}}
    tree = {"tree_metadata": {name: entry}, "use_zarr3": True, "use_ocdbt": False}
    tree["store_array_data_equal_to_fill_value"] = True
    (root / "_METADATA").write_text(json.dumps(tree))


def test_files_of_several_chunks(tmp_path):
    write_zarr3(tmp_path, "w")

    assert torch.equal(reshard.open(tmp_path)["w"][...], KERNEL)
    (tmp_path / "w" / "c" / "1" / "0").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"array 'w', Box\[4:6, 0:3\]\) is missing"):
        reshard.open(tmp_path)["w"]


@pytest.mark.parametrize("name", ["a%20b", "a#b", "a?b", "a|b", "ä b"])
def test_names_with_letters_that_mean_something_in_urls(name, tmp_path):
    write_zarr3(tmp_path / name, name)
    shutil.copytree(sample("orbax/ocdbt"), tmp_path / f"2{name}")

    assert torch.equal(reshard.open(tmp_path / name)[name][...], KERNEL)
    assert torch.equal(reshard.open(tmp_path / f"2{name}")["params.dense.kernel"][...], KERNEL)


def test_only_local_folders(tmp_path):
    storage = reshard.storage.open_storage("memory://orbax")
    zarr = sample("orbax/zarr")
    for file in zarr.rglob("*"):
        if file.is_file():
            storage.publish(str(file.relative_to(zarr)), file.read_bytes())

    with pytest.raises(FormatError, match="local folders only"):
        reshard.open(storage)


def test_items_of_a_step(tmp_path):
    """What `CheckpointManager.save` of Orbax 0.12.8 wrote of a Composite of two trees and a JSON."""
    checkpoint = reshard.open(sample("orbax/items"))

    assert set(checkpoint) == {
        "params.dense.kernel",
        "params.dense.bias",
        "opt_state.mu.dense.kernel",
        "opt_state.count",
    }
    assert torch.equal(checkpoint["params.dense.kernel"][3:8, ::2], KERNEL[3:8, ::2])
    assert checkpoint.objects["meta"] == {"lr": 0.1, "names": ["a"]}
    assert torch.equal(checkpoint.nested()["opt_state"]["mu"]["dense"]["kernel"][...], 2 * KERNEL)
    state = checkpoint.normalized()
    assert torch.equal(state["model"]["dense.kernel"][...], KERNEL)
    assert torch.equal(state["optim"]["state"]["dense.kernel"]["exp_avg"][...], 2 * KERNEL)
    shutil.copytree(sample("orbax/items"), tmp_path / "c")
    (tmp_path / "c" / "meta" / "metadata").write_text("{")
    with pytest.raises(CorruptCheckpointError, match=r"meta/metadata is not JSON"):
        reshard.open(tmp_path / "c")


def test_text_of_a_tree(tmp_path):
    """As Orbax 0.12.8 writes it: all text of an item is in one file, by name, and a "/" in a name is a level there."""
    shutil.copytree(sample("orbax") / "zarr", tmp_path / "c")
    tree = json.loads((tmp_path / "c/_METADATA").read_text())
    for key in ("name", "of/two"):
        part = {"key": key, "key_type": 2}
        value = {"value_type": "string", "skip_deserialize": False}
        tree["tree_metadata"][f"('{key}',)"] = {"key_metadata": [part], "value_metadata": value}
    (tmp_path / "c/_METADATA").write_text(json.dumps(tree))
    (tmp_path / "c/_strings.json").write_text(json.dumps({"name": "llama", "of": {"two": "levels"}}))
    checkpoint = reshard.open(tmp_path / "c")
    assert (checkpoint.objects["name"], checkpoint.objects["of/two"]) == ("llama", "levels")
    (tmp_path / "c/_strings.json").write_text("{}")
    with pytest.raises(CorruptCheckpointError, match=r"_strings\.json does not have the text 'name', which _METADATA"):
        reshard.open(tmp_path / "c").objects["name"]
    (tmp_path / "c/_strings.json").unlink()
    assert not reshard.verify(tmp_path / "c").ok


def test_items_that_are_not_opened_are_named(tmp_path):
    """Such as random keys, and what a program's own handler wrote."""
    shutil.copytree(sample("orbax") / "items", tmp_path / "7")
    assert reshard.open(tmp_path / "7").warnings == ()
    (tmp_path / "7/key/jax_random_key").mkdir(parents=True)
    (tmp_path / "7/key/jax_random_key/d").write_bytes(b"1")
    assert reshard.open(tmp_path / "7").warnings == ("not opened, neither arrays nor JSON: key",)
