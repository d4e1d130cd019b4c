"""`reshard convert` as a user drives it."""

from __future__ import annotations

import inspect
import json
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch

import reshard
from reshard.cli.arguments import NAMING_KEYS
from reshard.mapping import Cast, Mapping
from reshard.mapping.families import ready


def test_model_only_for_hugging_face(say, checkpoint: Path, tmp_path: Path) -> None:
    said = say("convert", checkpoint, tmp_path / "hf", "-f", "hf", "--model", "--dtype", "float16")

    assert said.code == 0
    assert "format safetensors: 5 tensors" in said.out
    loaded = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(loaded["layers.1.w"], (torch.arange(24.0).reshape(6, 4) + 1).half())
    assert loaded["count"] == 3


def test_elements_that_are_too_large_for_the_dtype_are_told(say, tmp_path: Path) -> None:
    reshard.save({"w": torch.tensor([1e5, 1.0])}, tmp_path / "in")

    said = say("convert", tmp_path / "in", tmp_path / "out", "--dtype", "float16")
    assert (said.code, "note  1 element of 'w' does not fit into float16\n" in said.out) == (0, True)

    said = say("convert", tmp_path / "in", tmp_path / "out", "--dtype", "float16", "--overwrite", "--json")
    assert json.loads(said.out)["overflowed"] == {"w": 1}


def test_what_is_left_out_is_told(say, checkpoint: Path, tmp_path: Path) -> None:
    said = say("convert", checkpoint, tmp_path / "hf", "--format", "safetensors", "--max-shard", "100B")

    assert said.code == 0
    assert "omitted (safetensors cannot store them)  " in said.out
    assert "step" in said.out
    assert "canonical" not in said.out


def test_the_reason_is_told_of_each_that_is_left_out(say, tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}, "ema": {"w": torch.ones(2)}, "epoch": 3}
    reshard.save(state, tmp_path / "run")
    words = ("convert", tmp_path / "run", tmp_path / "out", "--overwrite")

    lines = say(*words, "-f", "safetensors", "--normalized").out.splitlines()
    assert "omitted (safetensors cannot store them)  epoch" in lines
    assert "omitted (no canonical name)  ema.w" in lines
    lines = say(*words, "-f", "safetensors", "--model").out.splitlines()
    assert [line for line in lines if "omitted" in line] == ["omitted (not part of the model)  ema.w, epoch"]
    told = json.loads(say(*words, "-f", "safetensors", "--model", "--json").out)
    assert (told["omitted"], told["not_in_model"]) == (["ema.w"], ["ema.w", "epoch"])


def test_a_checkpoint_as_layout_of_other_tensors_is_named_in_words(say, checkpoint: Path, tmp_path: Path) -> None:
    reshard.save({"w": torch.ones(2), "b": torch.ones(1)}, tmp_path / "a")
    reshard.save({"w": torch.ones(3), "b": torch.ones(1)}, tmp_path / "b")
    reshard.save({"w": torch.ones(2)}, tmp_path / "c")
    for onto, options, words in (
        (
            "a",
            ["--dtype", "fp16"],
            "'w' is float16 after --dtype, but float32 in the layout given as --onto. 2 tensors",
        ),
        ("b", [], "'w' is float32 [2] in the checkpoint, but float32 [3] in the layout given as --onto"),
        ("c", [], "'b' is in the checkpoint, but not in the layout given as --onto"),
    ):
        said = say("convert", tmp_path / "a", tmp_path / "out", "--onto", tmp_path / onto, *options)
        assert said.code != 0
        assert words in " ".join(said.err.split())
    said = say("convert", tmp_path / "c", tmp_path / "out", "--onto", tmp_path / "a")
    assert "'b' is in the layout given as --onto, but not in the checkpoint" in " ".join(said.err.split())


def test_onto_a_topology_as_json(say, checkpoint: Path, tmp_path: Path) -> None:
    words = ["--onto", "dp=2", "--rule", "*.w=S(0)", "--rule", "*=R", "--json"]

    said = say("convert", checkpoint, tmp_path / "c", *words)

    report = json.loads(said.out)
    assert len(report["files"]) == 2
    assert report["total_bytes"] == 3 * 96 + 8 + 8 + 4
    made = reshard.open(tmp_path / "c")
    assert [box.sizes for box in made["model.layers.0.w"].stored.boxes] == [(3, 4), (3, 4)]
    assert reshard.compare(checkpoint, made).ok


def test_selection_and_one_file(say, checkpoint: Path, tmp_path: Path) -> None:
    words = ["--select", "model.*", "--select", "!model.layers.*"]

    said = say("convert", checkpoint, tmp_path / "c.pt", "-f", "torch_save", *words)

    assert said.code == 0
    loaded = torch.load(tmp_path / "c.pt", weights_only=True)
    assert set(loaded["model"]) == {"norm", "count"}


def test_names_of_a_family(say, tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_attention_heads": 2, "hidden_size": 8, "vocab_size": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = torch.arange(64.0).reshape(8, 8)
    reshard.save({"layers.0.attention.qkv_linear.wq.weight": rows}, tmp_path / "titan")

    words = ["--names", "torchtitan:huggingface", "--config", tmp_path / "config.json"]
    said = say("convert", tmp_path / "titan", tmp_path / "hf", "-f", "safetensors", *words)

    assert said.code == 0
    found = reshard.open(tmp_path / "hf")["model.layers.0.self_attn.q_proj.weight"][...]
    assert torch.equal(found, rows[[0, 2, 1, 3, 4, 6, 5, 7]])  # from pairs to halves, head by head
    assert say("diff", tmp_path / "titan", tmp_path / "hf").code == 1
    assert say("diff", tmp_path / "titan", tmp_path / "hf", *words).code == 0
    reshard.save({"model": {"_orig_mod.model.layers.0.self_attn.q_proj.weight": found}, "step": 1}, tmp_path / "job")
    assert say("diff", tmp_path / "titan", tmp_path / "job", *words, "--model").code == 0


def test_more_about_a_naming(say, tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_attention_heads": 2, "hidden_size": 8, "vocab_size": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    state = {"model.embed_tokens.weight": torch.ones(5, 2), "model.norm.weight": torch.full((2,), 1.5)}
    state["model.vision.weight"] = torch.ones(1)
    reshard.save(state, tmp_path / "hf")

    words = ["--names", "huggingface:megatron", "--config", tmp_path, "--naming", "padded_vocab=8"]
    said = say("convert", tmp_path / "hf", tmp_path / "mg", *words, "--naming", "zero_centered=true")

    assert said.code == 0
    assert "not renamed by --names  model.vision.weight" in said.out
    made = reshard.open(tmp_path / "mg")
    assert made["embedding.word_embeddings.weight"].shape == (8, 2)
    assert made["decoder.final_layernorm.weight"][0] == 0.5
    wrong = say("convert", tmp_path / "hf", tmp_path / "no", "--names", "megatron:huggingface", "--config", tmp_path)
    assert wrong.code == 3
    assert "has no names of megatron: its first name is 'model.embed_tokens.weight'. Check the order of" in wrong.err


def test_names_on_disk_and_in_memory(say, tmp_path: Path) -> None:
    """Normalization brings Hugging Face's files to the names in memory, unless the names are to be those on disk."""
    config = {"model_type": "qwen3_moe", "num_attention_heads": 2, "hidden_size": 8, "vocab_size": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    block = "model.layers.0.mlp.experts"
    parts = {"gate": (6, 8), "up": (6, 8), "down": (8, 6)}
    state = {f"{block}.{e}.{x}_proj.weight": torch.randn(shape) for e in range(2) for x, shape in parts.items()}
    reshard.save(state, tmp_path / "disk")
    reshard.convert(tmp_path / "disk", tmp_path / "hf", format="safetensors")

    for flag in ([], ["--model"], ["--normalized"]):
        words = ["--names", "huggingface:torchtitan", "--config", tmp_path, *flag]
        assert say("convert", tmp_path / "hf", tmp_path / "titan", *words, "--overwrite").code == 0
        assert set(reshard.open(tmp_path / "titan").canonical(model_only=True)) == {
            f"layers.0.moe.routed_experts.inner_experts.{w}" for w in ("w1_EFD", "w2_EDF", "w3_EFD")
        }
        assert say("diff", tmp_path / "hf", tmp_path / "titan", *words).code == 0
        round_the_wrong_way = ["--names", "torchtitan:huggingface", "--config", tmp_path, *flag]
        wrong = say("convert", tmp_path / "hf", tmp_path / "no", *round_the_wrong_way)
        assert (wrong.code, "has no names of torchtitan" in wrong.err) == (3, True)
        back = ["--names", "torchtitan:huggingface", "--config", tmp_path, *flag]
        assert say("diff", tmp_path / "titan", tmp_path / "hf", *back).code == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--names", "torchtitan"], "write --names FROM:TO --config"),
        (["--config", "config.json"], "are for --names FROM:TO"),
        (
            ["--names", "plain:megatron", "--config", "c", "--naming", "fil=2"],
            "there is no naming option 'fil': did you mean 'fill'? Known: titan, ",
        ),
        (
            ["--names", "plain:megatron", "--config", "c", "--naming", "fill=x"],
            "cannot read --naming fill=x: the value must be true, false, or a number",
        ),
        (["--names", "plain:megatron", "--config", "c", "--naming", "fill"], "write --naming KEY=VALUE"),
        (["--max-shard", "many"], "'many' is not a size"),
        (["--max-shard", "1GB", "-f", "torch_save"], "torch_save files are not split by size: leave out --max-shard"),
        (["--max-shard", "1GB", "--onto", "fsdp=2"], "files of each rank are not split by size: leave out --max-shard"),
        (["--names", "plane:megatron", "--config", "c"], "there is no naming scheme 'plane': did you mean 'plain'?"),
        (["--format", "gguf"], "cannot write the format 'gguf'. Known formats: native, megatron (torch_dist), "),
        (["--onto", "fsdp=0"], "with numbers >= 1"),
        (["-f", "huggingface", "--onto", "fsdp=2"], "safetensors files are not sharded by rank: leave out --onto, or"),
    ],
)
def test_wrong_usage_is_one_line(say, checkpoint: Path, tmp_path: Path, words: list[str], told: str) -> None:
    said = say("convert", checkpoint, tmp_path / "c", *words)

    assert said.code == 2
    assert told in said.err
    assert len(said.err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--select", "nothing*"], "matches 'nothing*'"),
        (["--select", "model.nrm"], "did you mean 'model.norm'?"),
        (["--onto", "nowhere"], "no such file or folder: 'nowhere'"),
    ],
)
def test_errors_are_one_line(say, checkpoint: Path, tmp_path: Path, words: list[str], told: str) -> None:
    said = say("convert", checkpoint, tmp_path / "c", *words)

    assert said.code == 3
    assert told in said.err
    assert len(said.err.strip().splitlines()) == 1


def test_a_value_that_an_option_cannot_have_is_wrong_usage(say, checkpoint: Path, tmp_path: Path) -> None:
    said = say("convert", checkpoint, tmp_path / "c", "--dtype", "int8")
    assert said.code == 2
    assert said.err.startswith("error: dtype must be a floating-point type, got 'int8'")


@pytest.mark.parametrize(("word", "dtype"), [("bf16", "bfloat16"), ("FP16", "float16"), ("fp8", "float8_e4m3fn")])
def test_short_names_of_dtypes(say, checkpoint: Path, tmp_path: Path, word: str, dtype: str) -> None:
    assert say("convert", checkpoint, tmp_path / "c", "--dtype", word).code == 0

    assert reshard.open(tmp_path / "c").layout["model.layers.0.w"].spec.dtype == dtype


def test_an_optimizer_in_files_for_hugging_face_is_told(say, tmp_path: Path) -> None:
    """In any nesting; without one, and for other formats, there is nothing to say."""
    w = torch.ones(2, 2)
    moments = {"exp_avg": w, "exp_avg_sq": w}
    reshard.save({"model": {"w": w}, "optim": {"state": {"w": moments}, "param_groups": []}}, tmp_path / "a")
    reshard.save({"w": w, "optimizer": {"state": {0: moments}}}, tmp_path / "b")
    reshard.save({"model": {"optim.w": w}, "step": 3}, tmp_path / "c")

    said = say("convert", tmp_path / "a", tmp_path / "hf", "-f", "huggingface").out
    told = (
        "2 tensors of an optimizer, such as 'optim.state.w.exp_avg', were written too, which Hugging Face tools do not"
    )
    assert f"{told} expect: pass --model to write only the weights\n" in said
    [warning] = reshard.convert(tmp_path / "b", tmp_path / "hf_b", format="huggingface").warnings
    assert warning.startswith("2 tensors of an optimizer, such as 'optimizer.state.0.exp_avg', were")
    assert "model_only=True" in warning
    for source, format, options in (
        ("a", "huggingface", {"model_only": True}),
        ("a", "huggingface", {"select": ["model.*"]}),
        ("a", "dcp", {}),
        ("c", "huggingface", {}),
    ):
        report = reshard.convert(tmp_path / source, tmp_path / "other", format=format, overwrite=True, **options)
        assert not [text for text in report.warnings if "optimizer" in text]
        shutil.rmtree(tmp_path / "other")


def test_each_note_is_a_line(say, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reshard.save({"model": {"w": torch.ones(2, 2)}, "optim": {"state": {}, "param_groups": []}}, tmp_path / "a")
    said = say("convert", tmp_path / "a", tmp_path / "mega", "-f", "megatron")
    assert not caplog.records  # nothing is said again on stderr
    report = reshard.convert(tmp_path / "a", tmp_path / "again", format="megatron")
    assert said.out.splitlines()[-len(report.warnings) :] == [f"note  {text}" for text in report.warnings]


@pytest.mark.parametrize("word", ["bf16", "BF16", torch.bfloat16, "torch.bfloat16"])
def test_python_takes_the_names_of_dtypes_that_the_command_line_takes(checkpoint: Path, tmp_path: Path, word) -> None:
    reshard.convert(checkpoint, tmp_path / "c", dtype=word, select=["model.layers.*"])
    reshard.convert(checkpoint, tmp_path / "d", mapping=Mapping([Cast("{x+}", word)]), select=["model.layers.*"])

    for folder in ("c", "d"):
        assert {spec.dtype for spec in reshard.open(tmp_path / folder).layout.specs.values()} == {"bfloat16"}


def test_a_second_time_is_refused(say, checkpoint: Path, tmp_path: Path) -> None:
    assert say("convert", checkpoint, tmp_path / "c").code == 0

    assert "or pass --overwrite" in say("convert", checkpoint, tmp_path / "c").err
    assert say("convert", checkpoint, tmp_path / "c", "--overwrite").code == 0


def test_quantized_weights_become_plain(say, tmp_path: Path) -> None:
    """Before they get other names."""
    config = {"model_type": "deepseek_v3", "num_attention_heads": 2, "hidden_size": 8, "vocab_size": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    values, name = torch.randn(130, 4).to(torch.float8_e4m3fn), "model.layers.0.self_attn.o_proj.weight"
    scales = torch.tensor([[2.0], [0.5]])
    reshard.save({name: values, f"{name}_scale_inv": scales}, tmp_path / "hf")

    words = ["--names", "huggingface:torchtitan", "--config", tmp_path, "--dequantize", "--dtype", "float32"]
    assert say("convert", tmp_path / "hf", tmp_path / "out", *words).code == 0

    made = reshard.open(tmp_path / "out")
    assert set(made) == {"layers.0.attention.wo.weight"}
    wanted = values.float() * torch.cat([torch.full((128, 1), 2.0), torch.full((2, 1), 0.5)])
    assert torch.equal(made["layers.0.attention.wo.weight"][...], wanted)


def test_to_dequantize_what_is_not_quantized_is_told(say, checkpoint: Path, tmp_path: Path) -> None:
    said = say("convert", checkpoint, tmp_path / "out", "-f", "dcp", "--dequantize")

    assert said.code == 0
    assert "note  --dequantize has no effect: no tensor is quantized\n" in said.out


HELD = """
import sys, time
import reshard.storage.local as local
real = local._LocalWriter._write
def held(self, data):  # in the {nth} file: some of it is written, and then nothing goes on
    real(self, data)
    if {nth} == 1 or "00001" in self._name:
        print("writing", flush=True)
        time.sleep(100)
local._LocalWriter._write = held
from reshard.cli import main
main()
"""


@pytest.mark.parametrize(("nth", "words"), [(1, []), (1, ["-f", "torch_save"]), (1, ["-f", "dcp"]), (2, [])])
def test_an_interrupt_ends_it_at_once_and_leaves_only_whole_files(say, nth, words, checkpoint, tmp_path) -> None:
    """The same command takes up what is whole."""
    target = tmp_path / "target" / ("c.pt" if "torch_save" in words else "c")
    small = [] if "torch_save" in words else ["--max-shard", "200B"]
    named = ["convert", str(checkpoint), str(target), *small, *words]
    held = subprocess.Popen(
        [sys.executable, "-c", HELD.format(nth=nth), *named],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell that starts tests in the background has them ignore it
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    assert held.stdout is not None
    assert held.stdout.readline() == "writing\n"

    began = time.monotonic()
    held.send_signal(signal.SIGINT)
    _, err = held.communicate(timeout=60)

    assert time.monotonic() - began < 10  # a tenth of a second where nothing else runs
    assert (held.returncode, err) == (130, "interrupted: run the same command to resume\n")
    left = sorted(path.name for path in (tmp_path / "target").rglob("*") if path.is_file())
    if nth == 1:
        assert left == []
    else:
        [record] = [name for name in left if name.endswith("00000.safetensors.json")]
        assert left == sorted([record, "00000.safetensors", "00000.safetensors.sums", "claim", "claim.json", "job"])
        assert "kept 1 file of an interrupted conversion" in say(*named).out


def test_every_key_of_a_naming_is_offered() -> None:
    known = inspect.signature(ready).parameters.values()
    assert list(NAMING_KEYS) == [p.name for p in known if p.kind is p.KEYWORD_ONLY]


@pytest.mark.parametrize(("alias", "format"), [("huggingface", "safetensors"), ("torch", "torch_save")])
def test_other_names_of_formats(say, alias, format, checkpoint, tmp_path) -> None:
    told = json.loads(say("convert", checkpoint, tmp_path / "x.pt", "-f", alias, "--model", "--json").out)
    assert told["format"] == format


def test_of_a_run_the_newest_complete_checkpoint_is_used_and_named(say, checkpoint, tmp_path) -> None:
    for step in (1, 2):
        reshard.convert(checkpoint, tmp_path / f"run/step-{step}")
    (tmp_path / "run" / "step-3").mkdir()
    run, newest = tmp_path / "run", str(tmp_path / "run/step-2")
    for words in (["convert", run, tmp_path / "to"], ["verify", run], ["diff", run, checkpoint], ["normalize", run]):
        said = say(*words)
        assert (said.code, said.err) == (0, f"using {newest}, the newest complete checkpoint of {run}\n")
    assert f"using {newest}" in say("plan", run, "fsdp=2").err
    assert f"{newest}, the newest complete checkpoint\n" in say("inspect", run).out
