"""The checkpoints that are damaged: small ones of every format, with what the format can find out about its bytes."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp

import reshard
from planners.geometry.topologies import Topology
from reshard.native import commit as publish
from tests.golden.make import HERE as GOLDEN
from tests.samples import sample

__all__ = ["FORMATS", "Format", "state"]


@dataclass(frozen=True)
class Format:
    """A kind of checkpoint."""

    name: str
    make: Callable[[Path, int], Path]
    """Writes the checkpoint of a generation below a folder, and says where."""
    checked: frozenset[str] = frozenset()
    """Kinds of places that have checksums, so that who reads all of one finds a change in it."""
    generations: bool = True
    """Whether there is an older one, whose files may be put back."""
    base: str = ""
    """Beside it: a checkpoint with which it shares files by hard links, and whose files are the ones to be damaged."""


def tensors(generation: int) -> dict[str, torch.Tensor]:
    """One larger than a MiB, some of a few blocks, many in one block; of several dtypes."""
    made = torch.Generator().manual_seed(generation)
    out = {
        "long": torch.randn(400_000, generator=made),
        "w": torch.randn(300, 250, generator=made),
        "half": torch.randn(120, 700, generator=made).to(torch.bfloat16),
        "flags": torch.randint(0, 2, (99,), generator=made).to(torch.bool),
        "codes": torch.randint(-99, 99, (7, 11), generator=made).to(torch.int8),
        "scale": torch.randn((), generator=made, dtype=torch.float64),
    }
    return out | {f"layers.{i}.bias": torch.randn(50, generator=made) for i in range(12)}


def state(generation: int) -> dict[str, Any]:
    """A model, its optimizer and plain values, all of them other ones in each generation."""
    model = tensors(generation)
    trained = {"w", "layers.0.bias"}
    slots = {name: {"step": torch.tensor(float(generation)), "exp_avg": model[name] * 3} for name in trained}
    group = {"lr": 0.1 / (generation + 1), "betas": (0.9, 0.99), "params": sorted(trained)}
    optim = {"state": slots, "param_groups": [group]}
    return {"model": model, "optim": optim, "step": generation, "note": f"generation {generation} " * 5}


def _native(folder: Path, generation: int) -> Path:
    reshard.save(state(generation), folder / "saved", base="auto", alone=True)
    return folder / "saved"


def _chain(folder: Path, generation: int) -> Path:
    """The last of three saves, each of which writes a third of the tensors anew."""
    now = state(generation)
    before = [state(generation + 10), state(generation + 10)]
    before[1]["model"] = {k: now["model"][k] if i % 3 else v for i, (k, v) in enumerate(before[0]["model"].items())}
    before[1]["model"]["long"] = torch.cat([now["model"]["long"][:300_000], before[0]["model"]["long"][300_000:]])
    for number, made in enumerate([*before, now]):
        base: Any = folder / f"step-{number - 1}" if number else "auto"
        reshard.save(made, folder / f"step-{number}", base=base, alone=True)
    return folder / "step-2"


def _on_a_base(folder: Path, generation: int) -> Path:
    """Most of its elements are in files of the base, which have a second name in its own folder."""
    now = state(generation)
    reshard.save(now | {"step": -1, "model": now["model"] | {"w": torch.zeros(9)}}, folder / "base", alone=True)
    reshard.save(now, folder / "saved", base=folder / "base", alone=True)
    return folder / "saved"


def _many_files(folder: Path, generation: int) -> Path:
    reshard.save(state(generation), folder / "one", alone=True)
    rows = {"model.w": "S(0)", "model.half": "S(1)", "model.long": "S(0)", "*": "R"}
    onto = Topology.parse("dp=4", rows).layout(reshard.open(folder / "one").layout.specs)
    with mock.patch.object(publish, "FEW_FILES", 1):
        reshard.convert(folder / "one", folder / "four", onto=onto, alone=True)
    return folder / "four"


def _kept(folder: Path, generation: int) -> Path:
    reshard.elastic.Tier(folder / "tier", host="a", copies=0).save(state(generation), step=generation)
    return folder / "tier"


def _dcp(folder: Path, generation: int) -> Path:
    writer = dcp.FileSystemWriter(str(folder / "saved"), thread_count=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save(state(generation), storage_writer=writer, no_dist=True)
    return folder / "saved"


def _torch_save(folder: Path, generation: int, **options: Any) -> Path:
    torch.save(state(generation), folder / "saved.pt", **options)
    return folder / "saved.pt"


def _legacy(folder: Path, generation: int) -> Path:
    return _torch_save(folder, generation, _use_new_zipfile_serialization=False)


def _nemo(folder: Path, generation: int) -> Path:
    saved = _torch_save(folder, generation)
    files = {"model_config.yaml": b"generation: %d\n" % generation, "model_weights.ckpt": saved.read_bytes()}
    saved.unlink()
    with tarfile.open(folder / "saved.nemo", "w:") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return folder / "saved.nemo"


def _bin_files(folder: Path, generation: int) -> Path:
    """Several of torch.save, with the index of Hugging Face."""
    (folder / "bin").mkdir()
    made = tensors(generation)
    files = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    home = {name: files[name != "long"] for name in made}
    for file in files:
        torch.save({name: tensor for name, tensor in made.items() if home[name] == file}, folder / "bin" / file)
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in made.values())}, "weight_map": home}
    (folder / "bin" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder / "bin"


def _adapter(folder: Path, generation: int) -> Path:
    """Of PEFT."""
    from safetensors.torch import save_file

    (folder / "adapter").mkdir()
    made = {f"base_model.model.{name}.lora_A.weight": tensor for name, tensor in tensors(generation).items()}
    save_file(made, folder / "adapter" / "adapter_model.safetensors")
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": generation + 1}))
    return folder / "adapter"


def _safetensors(folder: Path, generation: int) -> Path:
    from safetensors.torch import save_file

    save_file(tensors(generation), folder / "model.safetensors")
    return folder / "model.safetensors"


def _hugging_face(folder: Path, generation: int) -> Path:
    from safetensors.torch import save_file

    (folder / "hf").mkdir()
    made = tensors(generation)
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    home = {name: files[name != "long"] for name in made}
    for file in files:
        save_file({name: tensor for name, tensor in made.items() if home[name] == file}, folder / "hf" / file)
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in made.values())}, "weight_map": home}
    (folder / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder / "hf"


def _gguf(folder: Path, generation: int, **options: Any) -> Path:
    import gguf

    writer = gguf.GGUFWriter(folder / "model.gguf", "llama", **options)
    writer.add_uint32("llama.block_count", 12)
    for name, tensor in tensors(generation).items():
        if tensor.dtype is torch.float32 or name == "scale":
            writer.add_tensor(name, tensor.to(torch.float32).reshape(-1 if not tensor.ndim else tensor.shape).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model.gguf"


def _split_gguf(folder: Path, generation: int) -> Path:
    (folder / "split").mkdir()
    _gguf(folder / "split", generation, split_max_tensors=6)
    return folder / "split"


def _copied(source: Path) -> Callable[[Path, int], Path]:
    def make(folder: Path, generation: int) -> Path:
        shutil.copytree(source, folder / "saved")
        return folder / "saved"

    return make


def _sample(path: str) -> Callable[[Path, int], Path]:
    return lambda folder, generation: _copied(sample(path))(folder, generation)


NATIVE = frozenset({"data", "header", "sums", "manifest", "parts", "table of files"})
ARCHIVES = frozenset({"data", "pickle"})

FORMATS: Mapping[str, Format] = {
    format.name: format
    for format in (
        Format("native", _native, NATIVE),
        Format("native chain", _chain, NATIVE),
        Format("native on a base", _on_a_base, NATIVE, base="base"),
        Format("native many files", _many_files, NATIVE),
        Format("native v1", _copied(GOLDEN / "v1" / "sharded"), NATIVE, generations=False),
        Format("native v2", _copied(GOLDEN / "v2" / "sharded"), NATIVE, generations=False),
        Format("kept", _kept, NATIVE),
        Format("dcp", _dcp, ARCHIVES),
        Format("dcp zstd", _sample("dcp_zstd_w2/ckpt"), generations=False),
        Format("dcp sharded tensors", _sample("dcp_sharded_tensor_w2/ckpt"), ARCHIVES, generations=False),
        Format("torch_save", _torch_save, ARCHIVES),
        Format("torch_save legacy", _legacy),
        Format("safetensors", _safetensors),
        Format("hugging face", _hugging_face),
        Format("hugging face of ranks", _sample("hf_dcp_writer_2x2/ckpt/sharded_1file"), generations=False),
        Format("gguf", _gguf),
        Format("gguf split", _split_gguf),
        Format("nemo", _nemo, ARCHIVES),
        Format("bin files", _bin_files, ARCHIVES),
        Format("adapter", _adapter),
        Format("files of ranks", _sample("pt_dtensor_2x2/ckpt"), ARCHIVES, generations=False),
        Format("deepspeed", _sample("ds_z3_w2/ckpt"), ARCHIVES, generations=False),
        Format("deepspeed stage 1", _sample("ds_z1_w2/ckpt"), ARCHIVES, generations=False),
        Format("deepspeed tensor parallel", _sample("ds_tp2_dp2/ckpt"), ARCHIVES, generations=False),
        Format("deepspeed pipeline", _sample("ds_pipe2_w2/ckpt"), ARCHIVES, generations=False),
        Format("megatron", _sample("mcore_tp2_pp2/ckpt"), ARCHIVES, generations=False),
        Format("megatron legacy", _sample("mcore_legacy_tp2_pp2/ckpt"), ARCHIVES, generations=False),
        Format("torch_checkpointing", _sample("tckpt_fsdp2_w2/ckpt"), generations=False),
        Format("accelerate", _sample("accel_ddp_w2/ckpt"), generations=False),
        Format("accelerate fsdp", _sample("accel_fsdp2_w2/ckpt"), ARCHIVES, generations=False),
        Format("lightning", _sample("light_fsdp_w2/ckpt/last.ckpt"), ARCHIVES, generations=False),
        Format("fsdp1", _sample("fsdp1_flat_w2/ckpt/sharded_dcp"), ARCHIVES, generations=False),
        Format("torchsnapshot", _sample("torchsnapshot/plain"), generations=False),
        Format("torchsnapshot batched", _sample("torchsnapshot/batched"), generations=False),
        Format("orbax zarr", _sample("orbax/zarr"), generations=False),
        Format("orbax ocdbt", _sample("orbax/ocdbt"), generations=False),
    )
}
