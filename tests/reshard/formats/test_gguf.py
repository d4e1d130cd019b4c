"""GGUF: what the `gguf` package writes, by a writer of our own for what it would not write, and damaged files."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import reshard
from reshard.checkpoint import open as open_checkpoint
from reshard.errors import CorruptCheckpointError, FormatError, ReshardError
from reshard.formats.gguf import BLOCKS, PLAIN, GgufFacts
from reshard.live.dtypes import dtype_from_name
from reshard.mapping.families import ready
from tests.reshard.formats.compare import check_all
from tests.same import same
from tests.storages import Remote

A = torch.arange(12.0).reshape(3, 4)
B = torch.arange(5, dtype=torch.int64)
CODES = {dtype_from_name(dtype): code for code, (_, dtype) in PLAIN.items()}
KINDS = {bool: (7, "<?"), int: (5, "<i"), float: (12, "<d")}


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def value(of: Any) -> bytes:
    if isinstance(of, list):
        items = [value(item) for item in of]
        return struct.pack("<I", 9) + items[0][:4] + struct.pack("<Q", len(of)) + b"".join(item[4:] for item in items)
    if isinstance(of, (str, bytes)):
        return struct.pack("<I", 8) + text(of)
    kind, form = KINDS[type(of)]
    return struct.pack("<I", kind) + struct.pack(form, of)


def gguf(tensors: Mapping[str, Any], values: Mapping[str, Any] | None = None, **changes: Any) -> bytes:
    """A file: tensors, or (type, shape, bytes) of quantized ones. `changes`: version, alignment, counts, an offset."""
    align = int((values or {}).get("general.alignment", 32))
    infos, data = b"", b""
    for name, tensor in tensors.items():
        code, shape, raw = tensor if isinstance(tensor, tuple) else (CODES[tensor.dtype], tensor.shape, None)
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if raw is None else raw
        infos += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        infos += struct.pack("<IQ", code, len(data) + changes.get("shift", 0))
        data += raw + b"\0" * (-len(raw) % align)
    counts = changes.get("count", len(tensors)), changes.get("known", len(values or {}))
    head = b"GGUF" + struct.pack("<IQQ", changes.get("version", 3), *counts)
    head += b"".join(text(key) + value(of) for key, of in (values or {}).items()) + infos
    return head + b"\0" * (-len(head) % align) + data


def blocks(code: int, count: int) -> bytes:
    """Blocks of any bytes whose scales are finite."""
    rng = np.random.default_rng(code)
    data = rng.integers(0, 256, (count, BLOCKS[code].nbytes), dtype=np.uint8)
    for at in range(0, 6, 2):
        data[:, at + 1] &= 0x3F
    data[:, -1] &= 0x3F
    return data.tobytes()


def test_plain_types_and_what_is_known_of_the_model(tmp_path: Path) -> None:
    raw = torch.arange(64, dtype=torch.uint8)
    state = {f"t.{name}": raw.view(dtype_from_name(dtype)).reshape(2, -1) for name, dtype in PLAIN.values()}
    state |= {"scalar": torch.tensor(2.0), "empty": torch.empty(0, 4), "cube": torch.arange(24.0).reshape(2, 3, 4)}
    known = {"general.architecture": "llama", "n": -3, "eps": 1e-5, "yes": True, "general.alignment": 64}
    known |= {"tokens": ["a", "", "ü"], "nest": [[1, 2], [3]], "bytes": b"\xff\xfe", "scores": [0.5, 2.0]}
    (tmp_path / "m.gguf").write_bytes(gguf(state, known))

    checkpoint = open_checkpoint(tmp_path)

    assert checkpoint.format == "gguf"
    check_all(checkpoint, state)
    assert checkpoint.nested()["metadata"] == known
    assert checkpoint.warnings == ()
    assert set(checkpoint.normalized()["model"]) == set(state)
    target = {"cube": torch.zeros(2, 3, 4)}
    reshard.load(target, tmp_path / "m.gguf", strict={"*": "subset"})
    assert same(target["cube"], state["cube"])


def test_only_the_bytes_of_a_slice_are_read(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf({"a": torch.randn(100, 64), "q": (8, (100, 64), blocks(8, 200))}))
    whole = open_checkpoint(tmp_path)["q"][...]
    storage = Remote(tmp_path, max_gap_bytes=64)
    checkpoint = open_checkpoint(storage)
    storage.ranges.clear()
    checkpoint["a"][10:30]
    assert storage.nbytes_read == 20 * 64 * 4
    storage.ranges.clear()
    assert same(checkpoint["q"][10:30, :40], whole[10:30, :40])
    assert storage.nbytes_read <= 20 * 2 * 34


def test_quantized_tensors_are_what_the_gguf_package_makes_of_them(tmp_path: Path) -> None:
    """Bit by bit; types that it knows and we do not are listed and refused."""
    package = pytest.importorskip("gguf", reason="not installed: pip install -e '.[test]'")
    sizes = {kind.value: of for kind, of in package.GGML_QUANT_SIZES.items()}
    assert {code: (b.numel, b.nbytes) for code, b in BLOCKS.items()} == {c: tuple(sizes[c]) for c in BLOCKS}
    state = {block.name: (code, (4, 3 * block.numel), blocks(code, 12)) for code, block in BLOCKS.items()}
    (tmp_path / "m.gguf").write_bytes(gguf(state))
    checkpoint = open_checkpoint(tmp_path)
    facts = checkpoint.contents.details(GgufFacts)
    assert facts is not None
    assert facts.types == checkpoint.objects["quantized"] == {name: name for name in state}
    for code, block in BLOCKS.items():
        tensor = checkpoint[block.name]
        assert (tensor.shape, tensor.dtype) == ((4, 3 * block.numel), torch.float32)
        assert any(block.name in warning for warning in checkpoint.warnings)
        if block.values is None:
            with pytest.raises(FormatError, match=f"'{block.name}', {block.name}.*only Q4_0, .* are read"):
                tensor[...]
            continue
        data = np.frombuffer(state[block.name][2], np.uint8).reshape(4, -1)
        wanted = torch.from_numpy(package.quants.dequantize(data, package.GGMLQuantizationType(code)).copy())
        assert wanted.isfinite().all()
        assert same(tensor[...], wanted), block.name
        assert same(tensor[1:, 7::5], wanted[1:, 7::5]), block.name


def test_what_the_gguf_package_writes(tmp_path: Path) -> None:
    package = pytest.importorskip("gguf", reason="not installed: pip install -e '.[test]'")
    writer = package.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_block_count(2)
    writer.add_token_list(["<s>", "a", "ü"])
    writer.add_tensor("a.weight", A.numpy())
    writer.add_tensor("half", A.half().numpy())
    matrix = torch.randn(4, 64)
    quantized = package.quants.quantize(matrix.numpy(), package.GGMLQuantizationType.Q8_0)
    writer.add_tensor("q", quantized, raw_dtype=package.GGMLQuantizationType.Q8_0)
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()

    checkpoint = open_checkpoint(tmp_path / "m.gguf")

    check_all(checkpoint, {"a.weight": A, "half": A.half()}, complete=False)
    assert (checkpoint["q"][...] - matrix).abs().max() < 0.05
    assert checkpoint.objects["metadata.tokenizer.ggml.tokens"] == ["<s>", "a", "ü"]
    assert checkpoint.objects["metadata.llama.block_count"] == 2


def split(folder: Path, count: int = 3, **changes: Any) -> None:
    for number in range(count):
        known = {"split.no": number, "split.count": 3, "split.tensors.count": 3, **changes}
        (folder / f"m-{number + 1:05d}-of-00003.gguf").write_bytes(gguf({f"t{number}": A + number}, known))


def test_files_of_one_model(tmp_path: Path) -> None:
    split(tmp_path)
    check_all(open_checkpoint(tmp_path), {f"t{i}": A + i for i in range(3)})
    check_all(open_checkpoint(tmp_path / "m-*.gguf"), {f"t{i}": A + i for i in range(3)})
    one = open_checkpoint(tmp_path / "m-00002-of-00003.gguf")
    check_all(one, {"t1": A + 1})
    assert "'m-*.gguf' opens all" in one.warnings[0]
    (tmp_path / "m-00002-of-00003.gguf").write_bytes(gguf({"t2": A}, {"split.no": 1, "split.count": 3}))
    with pytest.raises(CorruptCheckpointError, match=rf"{tmp_path}.*'t2' is stored twice"):
        open_checkpoint(tmp_path)
    (tmp_path / "m-00002-of-00003.gguf").write_bytes(gguf({"t1": A}, {"split.no": 2, "split.count": 3}))
    with pytest.raises(CorruptCheckpointError, match=r"number 2 \(from 0\) of 3, and .* should be number 1"):
        open_checkpoint(tmp_path)
    (tmp_path / "m-00002-of-00003.gguf").write_bytes(gguf({}, {"split.no": 1, "split.count": 3}))
    with pytest.raises(CorruptCheckpointError, match="of 3 tensors in all, and they hold 2"):
        open_checkpoint(tmp_path)
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(CorruptCheckpointError, match="into 3 files, and number 2 is missing"):
        open_checkpoint(tmp_path)
    (tmp_path / "other.gguf").write_bytes(gguf({"a": A}))
    with pytest.raises(FormatError, match="3 GGUF files that are not of one model"):
        open_checkpoint(tmp_path)


def test_files_that_llama_cpp_merged(tmp_path: Path) -> None:
    """It keeps the values of the first file, and sets the number of files to 0."""
    values = {"split.no": 0, "split.count": 0, "split.tensors.count": 1}
    (tmp_path / "m.gguf").write_bytes(gguf({"a": A}, values))
    check_all(open_checkpoint(tmp_path), {"a": A})
    split(tmp_path, **{"split.count": 0})
    with pytest.raises(CorruptCheckpointError, match=r"number 0 \(from 0\) of 0"):
        open_checkpoint(tmp_path / "m-*.gguf")


BAD = {
    "no magic": (b"GGML" + b"\0" * 60, "not a GGUF file"),
    "cut in the magic": (b"GG", "truncated"),
    "version 1": (gguf({}, version=1), "of version 1; known are 2 and 3"),
    "big-endian": (gguf({}, version=3 << 24), "big-endian"),
    "too many tensors": (gguf({"a": A}, count=1 << 60), "more than the file has bytes"),
    "one tensor more": (gguf({"a": A}, count=40), "truncated|is malformed|more than ggml knows|no text"),
    "no tensor": (gguf({"a": A}, count=0), "its 0 tensors end at byte"),
    "a smaller last tensor": (
        gguf({"a": (0, (40,), bytes(160))}).replace(struct.pack("<Q", 40), struct.pack("<Q", 8)),
        "its 1 tensors end at byte",
    ),
    "too many values": (gguf({}, known=1 << 60), "truncated"),
    "a kind": (gguf({}, {"a": 1}).replace(struct.pack("<Ii", 5, 1), struct.pack("<Ii", 77, 1)), "unknown kind 77"),
    "many dims": (gguf({"a": (0, (1,) * 9, b"")}), "9 dims"),
    "huge": (gguf({"a": (0, (1 << 62, 1 << 62), b"")}), "truncated"),
    "type": (gguf({"a": (99, (4,), b"")}), "ggml type 99"),
    "odd rows": (gguf({"a": (8, (2, 33), b"")}), "33 elements, which Q8_0 cannot split into blocks of 32"),
    "shifted": (gguf({"a": A}, shift=32), "'a' should begin 0 bytes after the header, and the header says 32"),
    "cut": (gguf({"a": A})[:-20], "truncated"),
    "twice": (gguf({"ab": A, "ac": A}).replace(b"ac", b"ab"), "'ab' twice"),
    "alignment": (
        gguf({"a": A}, {"general.alignment": 64}).replace(struct.pack("<Ii", 5, 64), struct.pack("<Ii", 5, 1 << 30)),
        "truncated|no number",
    ),
    "not a number": (gguf({"a": A}, {"general.alignmenu": "x"}).replace(b"menu", b"ment"), "should be a number"),
    "deep": (gguf({}, {"a": eval("[" * 40 + "1" + "]" * 40)}), "nested too deeply"),
}


@pytest.mark.parametrize("name", BAD)
def test_headers_that_lie(name: str, tmp_path: Path) -> None:
    data, message = BAD[name]
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(ReshardError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert "m.gguf" in str(caught.value)


def test_fuzzed_files_give_clear_errors_only(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    original = gguf({"a": A, "q": (12, (1, 256), blocks(12, 1))}, {"tokens": ["a", "b"], "n": 3, "x": [[1], [2]]})
    rng = random.Random(0)
    refused = 0
    for turn in range(400):
        data = bytearray(original)
        if turn % 5 == 0:
            data = data[: rng.randrange(len(data))]
        else:
            data[rng.randrange(250)] = rng.randrange(256)
        path.write_bytes(data)
        try:
            checkpoint = open_checkpoint(tmp_path)
            dict(checkpoint.objects)
            for key in checkpoint:
                checkpoint[key][...]
        except ReshardError:
            refused += 1
    assert refused > 200


def test_names_of_llama_cpp(tmp_path: Path) -> None:
    """A Llama under llama.cpp's names is, to transformers, the model that it was, and comes back by its own names."""
    transformers = pytest.importorskip("transformers", reason="not installed: pip install -e '.[test]'")
    pytest.importorskip("gguf", reason="not installed: pip install -e '.[test]'")
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "intermediate_size": 48}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=40, tie_word_embeddings=False)
    model = transformers.LlamaForCausalLM(config)
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    reshard.save(state, tmp_path / "hf")
    there = ready(config.to_dict(), "huggingface", "gguf").apply(open_checkpoint(tmp_path / "hf"))
    known = {"general.architecture": "llama", "llama.block_count": 2, "llama.context_length": 64}
    known |= {"llama.embedding_length": 32, "llama.feed_forward_length": 48, "llama.vocab_size": 40}
    known |= {"llama.attention.head_count": 4, "llama.attention.head_count_kv": 2, "llama.rope.dimension_count": 8}
    known |= {"llama.attention.layer_norm_rms_epsilon": 1e-6, "llama.rope.freq_base": 10000.0}
    tensors = {name: there[name][...] for name in there}
    (tmp_path / "m.gguf").write_bytes(gguf({**tensors, "rope_freqs.weight": torch.ones(4)}, known))

    back = ready(config.to_dict(), "gguf", "huggingface").apply(open_checkpoint(tmp_path / "m.gguf"))

    check_all(back, state)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    assert {name: same(tensor, state[name]) for name, tensor in theirs.state_dict().items()} == dict.fromkeys(
        state, True
    )
