"""Both ways with transformers itself: what it saves we open, and what we write it loads and says the same to."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import reshard
from reshard.mapping import Mapping, Mxfp4, Rename
from reshard.mapping.architectures import ARCHITECTURES
from reshard.mapping.families import ready
from tests import gloo
from tests.same import assert_same
from tests.stories.tiny_models import DECODERS, MODELS, SEEING, fresh, logits, model

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks: their warnings are not ours to mend

SHARD_BYTES = 20_000
TOLD_BY_CONFIG = ["phimoe", "hy_v3", "exaone", "nemotron_h", "laguna", "axk1"]
TOLD_BY_CONFIG += ["longcat_flash", "kimi_linear", "bailing_hybrid", "sarvam_moe", "olmo_hybrid", "axk2"]
"""Families with names on disk that other families have in memory, or that are nobody else's: only the config tells
what they are in memory, and so `ready` does. The router of PhiMoE has Mixtral's name on disk, for one. LongCat's
experts without weights have a gate in transformers 5.24, and nothing else."""


def loaded(name: str, folder: Path, config: Any = None) -> Any:
    """What transformers makes of a folder; fails where it misses something or finds something that it does not know."""
    config = fresh(name).config if config is None else config
    config.save_pretrained(folder)
    found, info = type(fresh(name)).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return found.eval()


def same_state(found: reshard.Checkpoint, wanted: dict[str, torch.Tensor]) -> None:
    """The checkpoint has these tensors, and under tied names, too, and nothing else."""
    assert {*found, *found.aliases} == set(wanted)
    assert_same({name: found[name][...] for name in wanted}, wanted)


@pytest.mark.parametrize("shard", [SHARD_BYTES, "5GB"], ids=["sharded", "one-file"])
@pytest.mark.parametrize("name", [name for name in MODELS if name not in TOLD_BY_CONFIG])
def test_what_transformers_saved_is_what_is_in_memory(name: str, shard: Any, tmp_path: Path) -> None:
    """Under the names that the model has in memory, which for experts are not those on disk."""
    made = model(name)
    made.save_pretrained(tmp_path, max_shard_size=shard)

    found = reshard.open(tmp_path)

    assert len(list(tmp_path.glob("*.safetensors"))) == 1 or shard == SHARD_BYTES
    assert reshard.verify(found).ok
    same_state(found.canonical(model_only=True), made.state_dict())
    normalized = found.normalized()["model"]
    assert set(normalized) == set(made.state_dict())


@pytest.mark.parametrize("name", [*MODELS, *SEEING])
def test_transformers_loads_what_is_written(name: str, tmp_path: Path) -> None:
    """Out of a checkpoint of ours, in several files with an index."""
    made = model(name)
    reshard.save({"model": reshard.get_model_state_dict(made), "step": 3}, tmp_path / "ours")

    report = reshard.convert(
        tmp_path / "ours", tmp_path / "out", format="safetensors", model_only=True, max_shard_bytes=SHARD_BYTES
    )

    assert len(report.files) > 1
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    tied = len(made.state_dict()) - len({t.data_ptr() for t in made.state_dict().values()})
    assert len(report.aliases) == tied
    assert torch.equal(logits(loaded(name, tmp_path / "out")), logits(made))


def test_transformers_loads_a_file_of_torch(tmp_path: Path) -> None:
    made = model("qwen3")
    made.save_pretrained(tmp_path / "theirs")

    reshard.convert(tmp_path / "theirs", tmp_path / "out" / "pytorch_model.bin", format="torch_save")

    assert torch.equal(logits(loaded("qwen3", tmp_path / "out")), logits(made))


def saved(made: Any, folder: Path) -> None:
    """As transformers saves it, or as it reads what is on the hub: transformers 5.24 reads Kimi K2.5, but writes names
    that are neither those on the hub nor those that it reads."""
    if made.config.model_type != "kimi_k25":
        return made.save_pretrained(folder)
    mapping = ready(made.config.to_dict(), "transformers", "huggingface")
    reshard.save(reshard.get_model_state_dict(made), folder / "memory")
    reshard.convert(folder / "memory", folder / "hub", format="safetensors", mapping=mapping)
    (folder / "hub" / "model.safetensors").rename(folder / "model.safetensors")
    shutil.rmtree(folder / "memory")
    shutil.rmtree(folder / "hub")
    again = loaded(made.config.model_type, folder, made.config)
    assert_same(dict(again.state_dict()), dict(made.state_dict()))
    assert torch.equal(logits(again), logits(made))
    names = set(reshard.open(folder))
    assert {"language_model.lm_head.weight", "language_model.model.layers.1.mlp.experts.3.up_proj.weight"} < names
    assert {"vision_tower.encoder.blocks.1.wqkv.bias", "mm_projector.pre_norm.weight"} < names
    return None


@pytest.mark.parametrize("name", [*DECODERS, *SEEING])
def test_every_naming_and_back(name: str, tmp_path: Path) -> None:
    """Every tensor of a real model gets a name of the other naming, and comes back bit by bit."""
    made = model(name)
    saved(made, tmp_path)
    stored = reshard.open(tmp_path)
    known = ARCHITECTURES[made.config.model_type].namings
    namings = {"plain": "model.", "transformers": "language_model." if name == "llama4" else "model."}
    heads = {"megatron": "language_model." if name in SEEING else "decoder.", "torchtitan": "layers."}
    namings |= {naming: heads.get(naming, "model.") for naming in known if naming not in ("gguf", "transformer_engine")}

    for naming, head in namings.items():
        for engine in (False, True) if naming == "megatron" else (False,):
            there = ready(tmp_path, "huggingface", naming, transformer_engine=engine).apply(stored)
            back = ready(tmp_path, naming, "huggingface", transformer_engine=engine).apply(there)

            assert any(key.startswith(head) for key in there)
            assert head == "model." or not [key for key in there if key.startswith("model.")]
            if name == "qwen3_vl_moe" and naming != "huggingface":  # experts go back transposed, as on the hub
                back = ready(tmp_path, "huggingface", "transformers").apply(back)
            assert reshard.compare(back, stored).ok
            assert dict(back.aliases) == dict(stored.aliases)
    memory = ready(tmp_path, "huggingface", "transformers").apply(stored)
    same_state(memory, made.state_dict())


ATTENTION = {f"{part}_proj": "qkv_proj" for part in "qkv"}
GATE_UP = dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj")
LATENT = ("q_a_proj", "kv_a_proj_with_mqa")
EXPERT = {"gate_proj": "w13_weight", "up_proj": "w13_weight", "down_proj": "w2_weight"}
EXPERT |= {"w1": "w13_weight", "w3": "w13_weight", "w2": "w2_weight"}
ORDER = [*ATTENTION, *LATENT, *EXPERT]


def as_loaded(files: Any, *, latent: str, experts: str) -> dict[str, torch.Tensor]:
    """As an engine puts what it is given into its own tensors: one behind another, experts upon one another."""
    packed = GATE_UP | ({} if any(LATENT[1] in key for key in files) else ATTENTION)
    packed |= dict.fromkeys(LATENT, latent) if any(LATENT[0] in key for key in files) else {}
    slots: dict[str, dict[int, list[torch.Tensor]]] = {}
    for key in sorted(
        [*files, *files.aliases], key=lambda key: [ORDER.index(part) for part in key.split(".") if part in ORDER]
    ):
        *before, part, kind = key.split(".")
        number, target = -1, ".".join([*before, packed.get(part, part), kind])
        if "experts" in before:
            number, target = int(before[-1]), ".".join([*before[:-2], experts, EXPERT[part]])
        slots.setdefault(target, {}).setdefault(number, []).append(files[key][...])
    cats = {target: {number: torch.cat(its) for number, its in of.items()} for target, of in slots.items()}
    return {
        target: of[-1] if -1 in of else torch.stack([of[number] for number in sorted(of)])
        for target, of in cats.items()
    }


IN_ENGINES = [name for name in DECODERS if "vllm" in ARCHITECTURES[name.removesuffix("_tied")].namings]


@pytest.mark.parametrize("name", IN_ENGINES)
def test_an_engine_s_own_tensors(name: str, tmp_path: Path) -> None:
    """Names, fusions and their order, as vLLM and SGLang describe them."""
    model(name).save_pretrained(tmp_path)
    stored = reshard.open(tmp_path)
    for engine, latent, experts, options in (
        ("vllm", "fused_qkv_a_proj", "experts.routed_experts", {}),
        ("vllm", "fused_qkv_a_proj", "experts", {"routed_experts": False}),
        ("sglang", "fused_qkv_a_proj_with_mqa", "experts", {}),
    ):
        made = ready(tmp_path, "huggingface", engine, **options).apply(stored)

        same_state(made, as_loaded(stored, latent=latent, experts=experts))


@pytest.mark.parametrize("name", ["phi3", "llama"])
def test_plain_names_are_those_of_llama(name: str, tmp_path: Path) -> None:
    """Phi-3, its fused projections taken apart, is a Llama, and says the same."""
    made = model(name)
    made.save_pretrained(tmp_path / "theirs")
    mapping = ready(tmp_path / "theirs", "huggingface", "plain")

    reshard.convert(tmp_path / "theirs", tmp_path / "plain", format="safetensors", mapping=mapping)

    config = fresh("llama").config
    config.rms_norm_eps = made.config.rms_norm_eps
    assert torch.allclose(logits(loaded("llama", tmp_path / "plain", config)), logits(made), atol=1e-6)


@pytest.mark.parametrize("name", [name for name in SEEING if "megatron" in ARCHITECTURES[name].namings])
def test_models_that_see_come_back_from_megatron(name: str, tmp_path: Path) -> None:
    """And queries, keys, and values of the vision tower lie head by head there, where Megatron has such towers."""
    made = model(name)
    made.save_pretrained(tmp_path / "theirs")
    there = ready(tmp_path / "theirs", "huggingface", "megatron").apply(reshard.open(tmp_path / "theirs"))

    back = ready(tmp_path / "theirs", "megatron", "huggingface").apply(there)
    reshard.convert(back, tmp_path / "back", format="safetensors")

    again = loaded(name, tmp_path / "back", made.config)
    assert_same(dict(again.state_dict()), dict(made.state_dict()))
    assert torch.equal(logits(again), logits(made))
    fused = "vision_model.decoder.layers.1.self_attention.linear_qkv.bias"
    if fused in there:
        at = "model.visual.blocks.1.attn.qkv.bias"
        one = [f"vision_model.model.layers.1.self_attn.{x}_proj.bias" for x in "qkv"]
        held = made.state_dict()
        q, k, v = held[at].chunk(3) if at in held else [held[name] for name in one]
        by_head = torch.cat([part[head * 8 : head * 8 + 8] for head in range(2) for part in (q, k, v)])
        assert torch.equal(there[fused][...], by_head)


SHARDED = ("qwen3_tied", "qwen3_moe", "gpt_oss")


def sharded(name: str, seed: int) -> Any:
    """The model, cut by FSDP2 over all ranks."""
    made = model(name, seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in made.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(made, mesh=mesh)


def on_a_rank(folder: str) -> dict[str, bool]:
    """Save sharded models in two formats, and fill others with what transformers saved; whether that came out right."""
    right = {}
    for name in SHARDED:
        state = {"model": reshard.get_model_state_dict(sharded(name, 0))}
        reshard.save(state, Path(folder) / name / "native")
        dcp_save(state, checkpoint_id=Path(folder) / name / "dcp")

        theirs = Path(folder) / name / "theirs"
        target = reshard.get_model_state_dict(sharded(name, 1))
        mapping = ready(theirs, "huggingface", "transformers")
        report = reshard.load(target, theirs, mapping=mapping)
        whole = {key: tensor.full_tensor() for key, tensor in target.items()}
        due = model(name, 2).state_dict()
        right[name] = all(torch.equal(whole[key], due[key]) for key in due) and set(whole) == set(due)
        right[name] &= report.bytes_needed < sum(t.nbytes for t in due.values())
    return right


@pytest.mark.gloo
def test_sharded_jobs_and_transformers_read_each_other(tmp_path: Path) -> None:
    """Two ranks save in our format and in DCP's; each loads just its elements out of transformers' files."""
    for name in SHARDED:
        model(name, 2).save_pretrained(tmp_path / name / "theirs", max_shard_size=SHARD_BYTES)

    assert gloo.run(on_a_rank, 2, str(tmp_path)) == [dict.fromkeys(SHARDED, True)] * 2

    for name in SHARDED:
        wanted = model(name)
        for kind in ("native", "dcp"):
            folder = tmp_path / name / f"{kind}-out"
            reshard.convert(tmp_path / name / kind, folder, format="safetensors", model_only=True)
            assert torch.equal(logits(loaded(name, folder)), logits(wanted))
        # under the names on disk, which tools other than transformers want
        mapping = ready(wanted.config.to_dict(), "transformers", "huggingface")
        disk = tmp_path / name / "disk"
        reshard.convert(tmp_path / name / "dcp", disk, format="safetensors", model_only=True, mapping=mapping)
        wanted.save_pretrained(tmp_path / name / "wanted")
        ties = {"lm_head.weight"} if wanted.config.tie_word_embeddings else set()  # DCP saves them twice
        assert set(reshard.open(disk)) - ties == set(reshard.open(tmp_path / name / "wanted"))
        assert torch.equal(logits(loaded(name, disk)), logits(wanted))


def test_adapters_of_peft_and_back(tmp_path: Path) -> None:
    """As the recipe for adapters does it."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "gate_proj"], init_lora_weights=False)
    made = peft.get_peft_model(model("qwen3"), config)
    trained = reshard.StateDictOptions(ignore_frozen_params=True)
    reshard.save({"model": reshard.get_model_state_dict(made, options=trained)}, tmp_path / "job")
    made.save_pretrained(tmp_path / "theirs")

    to_peft = Mapping([Rename("{name+}.lora_{x}.weight", "base_model.model.{name+}.lora_{x}.weight")])
    reshard.convert(tmp_path / "job", tmp_path / "ours", format="safetensors", model_only=True, mapping=to_peft)
    (tmp_path / "ours" / "model.safetensors").rename(tmp_path / "ours" / "adapter_model.safetensors")
    assert reshard.compare(tmp_path / "ours", tmp_path / "theirs").ok
    config.save_pretrained(tmp_path / "ours")
    assert torch.equal(logits(peft.PeftModel.from_pretrained(model("qwen3"), tmp_path / "ours").eval()), logits(made))

    fresh_adapter = peft.get_peft_model(model("qwen3"), config)
    state = reshard.get_model_state_dict(fresh_adapter, options=trained)
    to_live = Mapping([Rename("{name+}.lora_{x}.weight", "{name+}.lora_{x}.default.weight")])
    reshard.load(state, tmp_path / "theirs", mapping=to_live)
    reshard.set_model_state_dict(fresh_adapter, state, options=trained)
    assert torch.equal(logits(fresh_adapter.eval()), logits(made.eval()))


def test_what_accelerate_saves_and_loads(tmp_path: Path) -> None:
    """Its writer of weights, and its loader for models that were made without memory."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    made = model("qwen3_tied")
    accelerate.Accelerator(cpu=True).save_model(made, str(tmp_path / "theirs"), max_shard_size="20KB")
    found = reshard.open(tmp_path / "theirs")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    assert all(torch.equal(found[name][...], made.state_dict()[name]) for name in found)

    reshard.convert(tmp_path / "theirs", tmp_path / "ours", format="safetensors", max_shard_bytes=SHARD_BYTES)
    with accelerate.init_empty_weights():
        empty = fresh("qwen3_tied")
    empty.tie_weights()
    filled = accelerate.load_checkpoint_and_dispatch(empty, str(tmp_path / "ours"), device_map={"": "cpu"})
    assert all(torch.equal(t, made.state_dict()[n]) for n, t in filled.state_dict().items())


def test_weights_of_four_bits_as_transformers_makes_them_plain(tmp_path: Path) -> None:
    """gpt-oss as it is published, on the way to a file that is not quantized."""
    fresh("gpt_oss")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    blocks = torch.randint(0, 256, (4, 20, 3, 16), dtype=torch.uint8)
    scales = torch.randint(115, 135, (4, 20, 3), dtype=torch.uint8)
    reshard.save({f"{name}_blocks": blocks, f"{name}_scales": scales}, tmp_path / "c")

    made = reshard.open(tmp_path / "c").mapped(Mapping([Mxfp4()]))

    assert torch.equal(made[name][...], convert_moe_packed_tensors(blocks, scales))
