"""Safetensors: headers are checked before they are believed, indexes and shards too."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file, save_model

import reshard
from reshard.checkpoint import open as open_checkpoint
from reshard.errors import CorruptCheckpointError, FormatError, ReshardError
from reshard.formats.safetensors import HuggingFaceFacts
from reshard.live.dtypes import dtype_from_name
from reshard.stored.safetensors_header import SAFETENSORS_CODES
from tests.reshard.formats.compare import check_all
from tests.reshard.formats.writers import safetensors_bytes
from tests.same import same
from tests.samples import sample, truth
from tests.storages import Remote
from tests.torch_releases import requires, save_alone

A = torch.arange(12.0).reshape(3, 4)
B = torch.arange(5, dtype=torch.int64)


def test_every_dtype_as_the_library_writes_it(tmp_path: Path) -> None:
    """All dtypes that the installed library can write, 4-bit pairs included."""
    raw = torch.arange(64, dtype=torch.uint8)
    state = {}
    for code, name in SAFETENSORS_CODES.items():
        try:
            tensor = (raw % 2).view(torch.bool) if name == "bool" else raw.view(dtype_from_name(name)).reshape(2, -1)
            save_file({code: tensor}, tmp_path / "try.safetensors")
        except (FormatError, KeyError, ValueError, RuntimeError):
            continue  # an older torch or library does not have it
        state[code] = tensor.clone()
    assert {"BF16", "F32", "BOOL", "U64", "F8_E4M3"} <= set(state)
    state["scalar"], state["empty"] = torch.tensor(2.0), torch.empty(0, 4)
    save_file(state, tmp_path / "try.safetensors", metadata={"format": "pt"})

    checkpoint = open_checkpoint(tmp_path / "try.safetensors")

    check_all(checkpoint, state)
    assert checkpoint.contents.facts == HuggingFaceFacts({"format": "pt"}, {})


def indexed(folder: Path, **changes: str) -> Path:
    save_file({"a": A}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": B}, folder / "model-00002-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors", **changes}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_index_and_numbered_files(tmp_path: Path) -> None:
    """With an index, by the path of the index, and without one where the numbers are complete."""
    indexed(tmp_path)
    check_all(open_checkpoint(tmp_path), {"a": A, "b": B})
    check_all(open_checkpoint(tmp_path / "model.safetensors.index.json"), {"a": A, "b": B})
    one = open_checkpoint(tmp_path / "model-00002-of-00002.safetensors")
    check_all(one, {"b": B})
    assert "one of several files" in one.warnings[0]

    (tmp_path / "model.safetensors.index.json").unlink()
    check_all(open_checkpoint(tmp_path), {"a": A, "b": B})


def test_the_index_of_a_variant_opens_by_its_path(tmp_path: Path) -> None:
    """Diffusers writes a variant beside the plain files, and puts its name before the suffix."""
    indexed(tmp_path)
    save_file({"a": B}, tmp_path / "model.fp16-00001-of-00001.safetensors")
    index = tmp_path / "model.safetensors.index.fp16.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.fp16-00001-of-00001.safetensors"}}))
    check_all(open_checkpoint(index), {"a": B})
    check_all(open_checkpoint(tmp_path), {"a": A, "b": B})


def test_indexes_that_lie(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"00002-of-00002.safetensors holds 'a', but model-00001"):
        open_checkpoint(indexed(tmp_path, b="model-00001-of-00002.safetensors", a="model-00002-of-00002.safetensors"))
    with pytest.raises(CorruptCheckpointError, match="holds 'c', but no file does"):
        open_checkpoint(indexed(tmp_path, c="model-00001-of-00002.safetensors"))
    with pytest.raises(CorruptCheckpointError, match=r"gone.safetensors held 1 name, such as 'd': restore it"):
        open_checkpoint(indexed(tmp_path, d="gone.safetensors"))
    indexed(tmp_path)
    save_file({"b": B, "extra": A}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(CorruptCheckpointError, match=r"says that no file holds 'extra', but model.* does"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weights": 1}')
    with pytest.raises(CorruptCheckpointError, match="no index of files"):
        open_checkpoint(tmp_path)


def test_files_that_an_index_does_not_name_are_told(tmp_path: Path) -> None:
    """Transformers opens `model.safetensors` where there is one. An index that names too few of its files is wrong."""
    indexed(tmp_path)
    save_file({"c": A}, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        warned = open_checkpoint(path).warnings
        assert warned == ("model.safetensors was not opened. To open it, pass its path",)
    (tmp_path / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    words = r"json: it does not name model-00002-of-00002\.safetensors, but names others of these 2 files"
    with pytest.raises(CorruptCheckpointError, match=words):
        open_checkpoint(tmp_path)
    assert not reshard.verify(tmp_path).ok
    (tmp_path / "below").mkdir()
    (tmp_path / "model-00002-of-00002.safetensors").rename(tmp_path / "below" / "b.safetensors")
    index["weight_map"]["b"] = "below/b.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    check_all(open_checkpoint(tmp_path), {"a": A, "b": B})
    assert not open_checkpoint(tmp_path).warnings


def test_more_numbered_files_than_their_names_say_are_refused(tmp_path: Path) -> None:
    indexed(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    for other in ("model-00003-of-00002", "model-00000-of-00002", "model-2-of-2"):
        save_file({"c": A}, tmp_path / f"{other}.safetensors")
        with pytest.raises(FormatError, match="has 3 files whose names say that there are 2"):
            open_checkpoint(tmp_path)
        (tmp_path / f"{other}.safetensors").unlink()
    check_all(open_checkpoint(tmp_path), {"a": A, "b": B})


def test_missing_files_without_an_index(tmp_path: Path) -> None:
    for i in (1, 3):
        save_file({f"k{i}": A}, tmp_path / f"model-0000{i}-of-00003.safetensors")
    with pytest.raises(CorruptCheckpointError, match="1 of 3 files are missing, the first is number 2"):
        open_checkpoint(tmp_path)
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match="2 of 3 files are missing, the first is number 2"):
        open_checkpoint(tmp_path)


def test_files_that_nothing_says_belong_together(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "one.safetensors")
    save_file({"b": A}, tmp_path / "two.safetensors")
    with pytest.raises(FormatError, match=r"no index that lists them: one.safetensors, two.safetensors"):
        open_checkpoint(tmp_path)
    check_all(open_checkpoint(tmp_path / "two.safetensors"), {"b": A})


def test_a_variant_s_index_is_named(tmp_path: Path) -> None:
    """As diffusers saves one beside the main file."""
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors")
    weight_map = {}
    for i, (key, tensor) in enumerate({"a": A, "b": B}.items(), 1):
        weight_map[key] = f"model.fp16-0000{i}-of-00002.safetensors"
        save_file({key: tensor}, tmp_path / weight_map[key])
    index = tmp_path / "model.safetensors.index.fp16.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(FormatError, match=rf"open one by its path, or those of a variant by {index.name}$"):
        open_checkpoint(tmp_path)
    for path in (index, tmp_path / "model.safetensors"):
        check_all(open_checkpoint(path), {"a": A, "b": B})


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    for i in (1, 2):
        save_file({"a": A}, tmp_path / f"model-0000{i}-of-00002.safetensors")
    with pytest.raises(CorruptCheckpointError, match=rf"{tmp_path}.*'a' is stored twice"):
        open_checkpoint(tmp_path)


def shard(folder: Path, rank: int, offset: list[int], tensor: torch.Tensor) -> None:
    info = json.dumps({"w": {"saved_offsets": offset}})
    file = folder / f"shard-{rank:05d}-model-00001-of-00001.safetensors"
    save_file({"w": tensor.clone()}, file, metadata={"DCP_SHARDING_INFO": info, "DCP_VERSION": "1.0"})


def test_shards_of_dcp(tmp_path: Path) -> None:
    """Global shapes come from the shards; a hole in the middle and a lost writer are seen."""
    for rank, (r, c) in enumerate([(0, 0), (0, 2), (2, 0), (2, 2)], start=1):
        shard(tmp_path, rank, [r, c], A[r : r + 2, c : c + 2])
    checkpoint = open_checkpoint(tmp_path)
    check_all(checkpoint, {"w": A})
    assert [chunk.owner for chunk in checkpoint["w"].stored.chunks] == [0, 1, 2, 3]

    (tmp_path / "shard-00001-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match="all shards of writer 1 are missing"):
        open_checkpoint(tmp_path)
    shard(tmp_path, 1, [0, 0], A[:1, :2])
    with pytest.raises(CorruptCheckpointError, match=r"no file of the checkpoint has elements \[1:2, 0:2\]"):
        open_checkpoint(tmp_path)["w"][...]
    shard(tmp_path, 1, [0, 0], A[:2, :3])
    assert "stored twice" in open_checkpoint(tmp_path).problems()[0]
    target = {"w": torch.zeros_like(A)}
    with pytest.raises(CorruptCheckpointError, match=r"Box\[0:2, 2:3\] are stored twice"):
        reshard.load(target, tmp_path)
    assert not target["w"].any()


def test_a_load_does_not_mix_a_tensor_of_two_shapes(tmp_path: Path) -> None:
    """A file of an older save beside those of a newer one: the shape is the larger one, and each has some of it."""
    for i, rows in enumerate((2, 4), start=1):
        save_file({"a": torch.full((rows, 3), float(i))}, tmp_path / f"model-0000{i}-of-00002.safetensors")
    target = {"a": torch.zeros(4, 3)}
    with pytest.raises(CorruptCheckpointError, match="stored twice"):
        reshard.load(target, tmp_path)
    assert not target["a"].any()


@requires(hasattr(dcp, "HuggingFaceStorageWriter"), "writes no safetensors")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_torch_loses_when_it_consolidates_is_told(tmp_path: Path) -> None:
    """Its zeros in the place of tensors without dims cannot be told from values; the shards beside them are whole."""
    state = {"w": A, "scale": torch.tensor(3.5)}
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True, enable_consolidation=True)
    save_alone(state, storage_writer=writer)
    consolidated = open_checkpoint(tmp_path)
    check_all(consolidated, {"w": A}, complete=False)
    assert any("without dims, such as 'scale'" in warning for warning in consolidated.warnings)
    check_all(open_checkpoint(tmp_path / "sharded"), state)
    assert not any("without dims" in warning for warning in open_checkpoint(tmp_path / "sharded").warnings)


def test_a_shard_that_may_be_lost_is_named(tmp_path: Path) -> None:
    """A writer without anything for a part writes no shard of it: only the tensor can tell."""
    for rank in (1, 2):
        shard(tmp_path, rank, [2 * rank - 2, 0], A[2 * rank - 2 : 2 * rank])
        info = json.dumps({"b": {"saved_offsets": [0]}})
        file = tmp_path / f"shard-{rank:05d}-model-00002-of-00002.safetensors"
        (tmp_path / f"shard-{rank:05d}-model-00001-of-00001.safetensors").rename(
            tmp_path / f"shard-{rank:05d}-model-00001-of-00002.safetensors"
        )
        if rank == 2:
            save_file({"b": B}, file, metadata={"DCP_SHARDING_INFO": info})
    opened = open_checkpoint(tmp_path)
    check_all(opened, {"w": A, "b": B})
    assert "there is no shard-00001-model-00002-of-00002.safetensors: its writer had nothing" in opened.warnings[-1]


def test_shards_that_contradict_each_other(tmp_path: Path) -> None:
    shard(tmp_path, 1, [0, 0], A)
    shard(tmp_path, 2, [3, 0], A.double())
    with pytest.raises(CorruptCheckpointError, match=r"'w': its chunks have the dtypes \['float32', 'float64'\]"):
        open_checkpoint(tmp_path)
    shard(tmp_path, 2, [3], A)
    with pytest.raises(CorruptCheckpointError, match="has 2 dims, its offset"):
        open_checkpoint(tmp_path)


def config(folder: Path, **fields: Any) -> None:
    (folder / "config.json").write_text(json.dumps({"architectures": ["XForCausalLM"], **fields}))


def test_tied_weights(tmp_path: Path) -> None:
    """The output layer that config.json ties to the embedding can be looked up, but is not listed twice."""
    save_file({"model.embed_tokens.weight": A}, tmp_path / "model.safetensors")
    assert dict(open_checkpoint(tmp_path).aliases) == {}
    config(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert same(checkpoint["lm_head.weight"][1:], A[1:])
    assert checkpoint["lm_head.weight"].name == "lm_head.weight"
    assert "lm_head.weight" in checkpoint
    assert list(checkpoint) == ["model.embed_tokens.weight"]
    for fields in (
        {"tie_word_embeddings": False},
        {"architectures": ["XModel"]},
        {"architectures": 5},
        {"text_config": {"tie_word_embeddings": False}},
    ):
        config(tmp_path, **fields)
        assert "lm_head.weight" not in open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "stored", "aliases"),
    [
        ("whisper", "model.decoder.embed_tokens.weight", ["proj_out.weight"]),
        ("trocr", "model.decoder.embed_tokens.weight", ["output_projection.weight"]),
        ("mamba", "backbone.embeddings.weight", ["lm_head.weight"]),
        ("llava", "model.language_model.embed_tokens.weight", ["lm_head.weight"]),
        ("pocket_tts", "model.embed_tokens.weight", []),
        ("kosmos-2", "text_model.model.embed_tokens.weight", ["text_model.lm_head.weight"]),
        ("blip-2", "language_model.model.decoder.embed_tokens.weight", ["language_model.lm_head.weight"]),
        ("git", "git.embeddings.word_embeddings.weight", []),
        ("fsmt", "model.decoder.embed_tokens.weight", []),
        ("rembert", "rembert.embeddings.word_embeddings.weight", []),
    ],
)
def test_tied_output_layers_have_the_names_of_their_models(
    model_type: str, stored: str, aliases: list[str], tmp_path: Path
) -> None:
    save_file({stored: A}, tmp_path / "model.safetensors")
    config(tmp_path, model_type=model_type)
    assert dict(open_checkpoint(tmp_path).aliases) == dict.fromkeys(aliases, stored)


@pytest.mark.parametrize(
    ("model_type", "bias", "aliases"),
    [
        ("bert", "cls.predictions.bias", ["cls.predictions.decoder.bias", "cls.predictions.decoder.weight"]),
        ("funnel", "lm_head.bias", []),
    ],
)
def test_a_tied_output_layer_with_a_bias_is_the_only_one(
    model_type: str, bias: str, aliases: list[str], tmp_path: Path
) -> None:
    save_file({f"{model_type}.embeddings.word_embeddings.weight": A, bias: B}, tmp_path / "model.safetensors")
    config(tmp_path, model_type=model_type)
    assert sorted(open_checkpoint(tmp_path).aliases) == aliases


def test_a_tied_output_layer_whose_only_bias_is_another_one(tmp_path: Path) -> None:
    embedding = "lxmert.embeddings.word_embeddings.weight"
    save_file({embedding: A, "cls.predictions.bias": B}, tmp_path / "model.safetensors")
    config(tmp_path, model_type="lxmert", architectures=["LxmertForPreTraining"])
    assert dict(open_checkpoint(tmp_path).aliases) == {"cls.predictions.decoder.weight": embedding}


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


BAD = {
    "no JSON": (b"{oops", b"", "is not JSON"),
    "a list": ([1], b"", "is not a JSON object"),
    "the same key twice": (b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":1}', b"", "the same key twice"),
    "no dtype": ({"a": {"shape": [1]}}, b"", "is malformed"),
    "negative size": ({"a": entry(shape=[-2])}, b"x" * 8, "is malformed"),
    "a size that is no int": ({"a": entry(shape=[2.0])}, b"x" * 8, "is malformed"),
    "huge": ({"a": entry(shape=[2**61, 2**61, 2**61])}, b"x" * 8, "needs"),
    "more bytes than a number of digits can say": ({"a": entry(shape=[1 << 20] * 5000)}, b"x" * 8, "needs"),
    "half a byte": ({"a": entry(dtype="F4", shape=[3], data_offsets=[0, 1])}, b"x", "is malformed"),
    "half a byte alone": ({"a": entry(dtype="F4", shape=[], data_offsets=[0, 1])}, b"x", "is malformed"),
    "too few bytes": ({"a": entry(shape=[3])}, b"x" * 8, "needs 12 bytes"),
    "unknown dtype": ({"a": entry(dtype="F7")}, b"x" * 8, "unknown safetensors dtype 'F7'"),
    "a hole": ({"a": entry(), "b": entry(data_offsets=[12, 20])}, b"x" * 20, "'b' at .12, 20. leaves a gap of 4"),
    "an overlap": ({"a": entry(), "b": entry(data_offsets=[4, 12])}, b"x" * 12, "'b' at .4, 12. overlaps"),
    "truncated": ({"a": entry()}, b"x" * 7, "was truncated"),
    "bytes behind": ({"a": entry()}, b"x" * 9, "was appended to"),
    "bad metadata": ({"__metadata__": {"a": 1}}, b"", "must map text to text"),
    "other names": (
        {"a": entry(), "__metadata__": {"DCP_SHARDING_INFO": '{"b": {"saved_offsets": [0]}}'}}, b"x" * 8, "other names",
    ),
    "bad sharding info": ({"a": entry(), "__metadata__": {"DCP_SHARDING_INFO": "[]"}}, b"x" * 8, "DCP_SHARDING_INFO"),
    "negative offset": (
        {"a": entry(), "__metadata__": {"DCP_SHARDING_INFO": '{"a": {"saved_offsets": [-1]}}'}}, b"x" * 8, "negative"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_headers_that_lie(name: str, tmp_path: Path) -> None:
    header, data, message = BAD[name]
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(header, data))
    with pytest.raises(ReshardError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert "model.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    "data", [b"", b"1234567", b"\xff" * 8, b"\xff" * 7 + b"\x00" + b"{}", b"\x40" + b"\0" * 7 + b"{}"]
)
def test_files_without_a_header(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"model.safetensors: (a safetensors file has|its header should)"):
        open_checkpoint(tmp_path)


def test_only_the_bytes_of_a_slice_are_read(tmp_path: Path) -> None:
    big = torch.randn(1000, 64)
    save_file({"big": big}, tmp_path / "model.safetensors")
    storage = Remote(tmp_path, max_gap_bytes=64)
    checkpoint = open_checkpoint(storage)
    storage.ranges.clear()

    assert same(checkpoint["big"][10:30], big[10:30])
    assert storage.nbytes_read == 20 * 64 * 4


def test_fuzzed_files_give_clear_errors_only(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": A, "b": B}, path)
    original = path.read_bytes()
    rng = random.Random(0)
    refused = 0
    for turn in range(500):
        data = bytearray(original)
        if turn % 5 == 0:
            data = data[: rng.randrange(len(data))]
        else:
            data[rng.randrange(len(data) if turn % 2 else 150)] = rng.randrange(256)
        path.write_bytes(data)
        try:
            checkpoint = open_checkpoint(tmp_path)
            for key in checkpoint:
                checkpoint[key][...]
        except ReshardError:
            refused += 1
    assert refused > 200


def test_the_sample_of_the_repository() -> None:
    """What torch's own writer left on four ranks, FSDP over TP."""
    wanted = truth("hf_dcp_writer_2x2")["model"]
    checkpoint = open_checkpoint(sample("hf_dcp_writer_2x2/ckpt/sharded_1file"))
    check_all(checkpoint, {key: value for key, value in wanted.items() if key in checkpoint})
    assert len(checkpoint) == 25


def test_tied_names_that_the_files_tell(tmp_path: Path) -> None:
    """As `safetensors.torch.save_model` and our own writer leave them, with no config beside."""
    module = torch.nn.ModuleDict(
        {"embed": torch.nn.Linear(3, 4, bias=False), "head": torch.nn.Linear(3, 4, bias=False)}
    )
    module["head"].weight = module["embed"].weight
    save_model(module, str(tmp_path / "theirs.safetensors"), metadata={"author": "somebody"})
    theirs = open_checkpoint(tmp_path / "theirs.safetensors")
    assert {*theirs, *theirs.aliases} == {"embed.weight", "head.weight"}

    reshard.convert(theirs, tmp_path / "ours", format="safetensors")
    ours = open_checkpoint(tmp_path / "ours")
    assert dict(ours.aliases) == dict(theirs.aliases)
    assert all(torch.equal(ours[name][...], module["embed"].weight) for name in ("embed.weight", "head.weight"))


def beside_ours(folder: Path, *names: str) -> Path:
    """Two files of ours with an index in `folder` / "hf", and beside them files of these names."""
    reshard.save({"a": A, "b": B}, folder / "saved")
    reshard.convert(folder / "saved", folder / "hf", format="safetensors", max_shard_bytes=50)
    for name in names:
        save_file({"lora": A}, folder / "hf" / name)
    return folder / "hf"


def test_files_that_the_index_does_not_name_stay_when_a_checkpoint_is_replaced(tmp_path: Path) -> None:
    """Opening had said that they were not opened; they are deleted by nobody but their owner."""
    folder = beside_ours(tmp_path, "my_lora.safetensors", "model-00001-of-00005.safetensors")
    reshard.convert(tmp_path / "saved", folder, format="safetensors", max_shard_bytes=50, overwrite=True)

    shards = [f"model-{n:05d}-of-00002.safetensors" for n in (1, 2)]
    assert sorted(file.name for file in folder.glob("*.safetensors")) == [*shards, "my_lora.safetensors"]
    opened = open_checkpoint(folder)
    assert opened.warnings == ("my_lora.safetensors was not opened. To open it, pass its path",)
    check_all(opened, {"a": A, "b": B})


@pytest.mark.parametrize("name", ["my_lora.safetensors", "vae.safetensors.index.json"])
def test_a_file_beside_which_nothing_would_open_is_named_before_anything_is_written(name: str, tmp_path: Path) -> None:
    folder = beside_ours(tmp_path, name)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(FormatError, match=rf"hf contains {name}, which would mix with the converted checkpoint"):
        reshard.convert(tmp_path / "saved", folder, format="safetensors", overwrite=True)

    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


@pytest.mark.parametrize("damaged", [False, True])
def test_files_of_any_name_that_were_the_checkpoint_are_replaced(damaged: bool, tmp_path: Path) -> None:
    """Those that an index names, or the only one without an index. Of a damaged index nothing else is known."""
    folder = beside_ours(tmp_path)
    for file in folder.iterdir():
        file.unlink()
    save_file({"old": A}, folder / "unet.safetensors")
    reshard.convert(tmp_path / "saved", folder, format="safetensors", overwrite=True)
    assert [file.name for file in folder.iterdir()] == ["model.safetensors"]
    index = folder / "unet.safetensors.index.json"
    index.write_text("{" if damaged else json.dumps({"weight_map": {"old": "unet.safetensors"}}))
    if not damaged:
        save_file({"old": A}, folder / "unet.safetensors")
    reshard.convert(tmp_path / "saved", folder, format="safetensors", overwrite=True)

    assert [file.name for file in folder.iterdir()] == ["model.safetensors"]
    check_all(open_checkpoint(folder), {"a": A, "b": B})


@requires(hasattr(torch, "float4_e2m1fn_x2"), "has no float4")
def test_pairs_of_4_bit_floats_are_written_as_the_library_writes_them(tmp_path: Path) -> None:
    """The header counts values, torch counts pairs of them; files of ours hold bytes."""
    saved = {"w": torch.randint(0, 256, (6, 4), dtype=torch.uint8).view(dtype_from_name("float4_e2m1fn_x2"))}
    reshard.save(saved, tmp_path / "native")
    reshard.convert(tmp_path / "native", tmp_path / "new", format="safetensors")

    written = header_of(tmp_path / "new" / "model.safetensors")["w"]
    assert written == {"dtype": "F4", "shape": [6, 8], "data_offsets": [0, 24]}
    target = {"w": torch.zeros(6, 4, dtype=torch.uint8).view(saved["w"].dtype)}
    reshard.load(target, tmp_path / "new")
    assert torch.equal(target["w"].view(torch.uint8), saved["w"].view(torch.uint8))
    (native,) = (tmp_path / "native").glob("data-*/*.safetensors")
    assert [(row["dtype"], row["shape"]) for name, row in header_of(native).items() if name != "__metadata__"] == [
        ("U8", [6, 4, 1])
    ]

    reshard.save({"w": saved["w"][0, 0]}, tmp_path / "scalar")
    with pytest.raises(FormatError, match=r"'w': safetensors cannot hold float4_e2m1fn_x2 without dims"):
        reshard.convert(tmp_path / "scalar", tmp_path / "none", format="safetensors")


def header_of(file: Path) -> dict[str, Any]:
    data = file.read_bytes()
    found: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return found
