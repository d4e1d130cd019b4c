"""Ready mappings against what the frameworks wrote: their weights under Hugging Face's names are known."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from planners import TensorSpec
from reshard.errors import NormalizationError, OptionError
from reshard.mapping import Mapping
from reshard.mapping.families import FAMILIES, NAMINGS, Decoder, in_memory_to_disk, ready
from tests.same import same
from tests.samples import sample, truth

LLAMA = Decoder("llama", 4, 2, 8, 53)
QWEN2 = Decoder("qwen2", 4, 2, 6, 50)
TITAN = "ckpt/checkpoint/step-2"
WRITTEN = [
    ("titan_llama_fsdp4", TITAN, "torchtitan", LLAMA),
    ("titan_qwen3moe_fsdp2_ep2", TITAN, "torchtitan", Decoder("qwen3_moe", 4, 2, 8, 53)),
    ("mcore_tp1", "ckpt", "megatron", QWEN2),
    ("mcore_tp2_pp2", "ckpt", "megatron", QWEN2),
    ("mcore_tp2_dp2_dpreshardable", "ckpt", "megatron", QWEN2),
    ("mcore_legacy_tp2_pp2", "ckpt", "megatron", QWEN2),
    ("mcore_moe_ep2", "ckpt", "megatron", Decoder("qwen2_moe", 4, 2, 6, 50)),
]


@pytest.mark.parametrize(("name", "path", "naming", "model"), WRITTEN, ids=[row[0] for row in WRITTEN])
def test_to_hugging_face(name: str, path: str, naming: str, model: Decoder) -> None:
    state = reshard.open(sample(name) / path).canonical()

    made = ready(model, naming, "huggingface").apply(state)

    wanted = truth(name)["hf"]
    found = {key.removeprefix("model."): made[key] for key in made if key.startswith("model.")}
    assert set(found) == set(wanted)
    assert all(same(found[key][...], tensor) for key, tensor in wanted.items())
    # moments are permuted, split and named as the weights are: mapped back they are as they were
    back = ready(model, "huggingface", naming).apply(made)
    moments = [key for key in state if key.endswith(".exp_avg") and "wqkv" not in key]
    assert moments
    assert all(same(back[key][...], state[key][...]) for key in moments)


def test_fused_moments_are_split_as_the_weights_are() -> None:
    """torchtitan splits the fused weights when it saves, but not their moments."""
    name = "titan_qwen3moe_fsdp2_ep2"
    state = reshard.open(sample(name) / TITAN).canonical()
    model = WRITTEN[1][3]

    made = ready(model, "torchtitan", "huggingface").apply(state)

    fused = truth(name)["optim"]["state"]["layers.0.attention.qkv_linear.wqkv.weight"]["exp_avg"]
    groups = fused.view(2, 4, 8, 32)  # two query groups of two queries, a key and a value
    prefix = "optim.state.model.layers.0.self_attn."
    assert torch.equal(made[f"{prefix}q_proj.weight.exp_avg"][...], groups[:, :2].reshape(32, 32))
    assert torch.equal(made[f"{prefix}v_proj.weight.exp_avg"][...], groups[:, 3].reshape(16, 32))


@pytest.mark.parametrize(
    ("name", "family"),
    [("hf_llama", "llama"), ("hf_qwen2", "qwen2"), ("hf_mixtral", "mixtral"), ("hf_deepseek_v3", "deepseek_v3")],
)
@pytest.mark.parametrize("naming", ["torchtitan", "megatron"])
def test_from_hugging_face_and_back(name: str, family: str, naming: str) -> None:
    """Every tensor gets a name of the other naming, and comes back as it was."""
    files = sample(name) / "ckpt"
    checkpoint = reshard.open(files)

    there = ready(files, "huggingface", naming).apply(checkpoint)

    assert Decoder.of(files).family == family
    head = {"torchtitan": "layers.", "megatron": "decoder."}[naming]
    assert not [key for key in there if key.startswith("model.")]
    assert [key for key in there if key.startswith(head)]
    back = ready(files, naming, "huggingface").apply(there)
    assert set(back) == set(checkpoint)
    assert all(same(back[key][...], checkpoint[key][...]) for key in checkpoint)


def test_what_is_in_memory_becomes_what_is_on_disk() -> None:
    checkpoint = reshard.open(sample("hf_deepseek_v3") / "ckpt")
    memory = checkpoint.canonical(model_only=True)

    disk = in_memory_to_disk().apply(memory)

    assert any(key.endswith("experts.gate_up_proj") for key in memory)
    assert set(disk) == set(checkpoint)
    assert all(same(disk[key][...], checkpoint[key][...]) for key in checkpoint)


def test_a_padded_vocabulary(tmp_path: Path) -> None:
    rows = torch.randn(53, 4)
    reshard.save({"model.embed_tokens.weight": rows}, tmp_path / "c")

    made = ready(LLAMA, "huggingface", "megatron", padded_vocab=64).apply(reshard.open(tmp_path / "c"))

    padded = made["embedding.word_embeddings.weight"]
    assert padded.shape == (64, 4)
    assert torch.equal(padded[50:], torch.cat([rows[50:], torch.zeros(11, 4)]))
    back = ready(LLAMA, "megatron", "huggingface", padded_vocab=64).apply(made)
    assert torch.equal(back["model.embed_tokens.weight"][...], rows)


NAMED = {
    "torchtitan": {
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "mixtral",
        "deepseek_v2",
        "deepseek_v3",
        "gpt_oss",
    },
    "gguf": {"llama", "mistral", "qwen2", "qwen3"},
    "transformer_engine": {"llama", "mistral", "qwen2"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_pair_can_be_made(family: str) -> None:
    """And back, by the inverse; only torchtitan's has a stage before."""
    model = Decoder(family, 4, 2, 8, 53, 2, 1, (0,), 16, (12, 12), 2, (1,), (2, 4), (4, 8))
    known = {"huggingface", "hf", "transformers", "plain", *model.architecture.namings}
    assert all((family in those) == (naming in known) for naming, those in NAMED.items())
    for source, target in product(NAMINGS, NAMINGS):
        options: dict[str, Any] = {"transformer_engine": len(source) % 2 == 0, "titan": ("0.2", "0.3")[len(target) % 2]}
        if not {source, target} <= known:
            with pytest.raises(NormalizationError, match=rf"no ready mapping of '{family}' to .*only to .*plain"):
                ready(model, source, target, **options)
            continue

        made = ready(model, source, target, **options)

        assert source != target or made == Mapping()
        if not {"torchtitan", "gguf", "transformer_engine"} & {source, target}:
            assert made.inverse() == ready(model, target, source, **options)


def test_a_naming_that_is_nearly_right_is_suggested(tmp_path: Path) -> None:
    """As the command line does."""
    model = Decoder("llama", 4, 2, 8, 53)
    with pytest.raises(
        NormalizationError, match=r"unknown naming scheme 'tranformers': did you mean 'transformers'\? Known"
    ):
        ready(model, "huggingface", "tranformers")
    with pytest.raises(NormalizationError, match="unknown naming scheme 'hugginface': did you mean 'huggingface'"):
        ready({"model_type": "llama"}, "hugginface", "torchtitan")  # before what the config lacks
    for kind in (OptionError, NormalizationError):
        with pytest.raises(kind, match=r"unknown naming scheme 'qqq'\. Known: huggingface, "):
            ready(model, "qqq", "huggingface")
        with pytest.raises(kind, match="no ready mapping for 'lama': did you mean 'llama'"):
            ready(Decoder("lama", 4, 2, 8, 53), "huggingface", "megatron")
    (tmp_path / "config.json").write_text('{"model_type": "lama"}')
    with pytest.raises(OptionError, match=r"config\.json: there is no ready mapping for 'lama'"):
        ready(tmp_path, "huggingface", "megatron")


def test_kimi_k2_has_deepseek_s_names() -> None:
    config = {"num_attention_heads": 4, "vocab_size": 53, "num_hidden_layers": 3, "first_k_dense_replace": 1}
    kimi, deepseek = ({**config, "model_type": name} for name in ("kimi_k2", "deepseek_v3"))
    for naming in ("transformers", "megatron", "vllm", "sglang"):
        made = ready(kimi, "huggingface", naming)
        assert made == ready(deepseek, "huggingface", naming) != Mapping()
        assert made.inverse() == ready(kimi, naming, "huggingface")


def test_an_unknown_family_names_the_nearest() -> None:
    with pytest.raises(NormalizationError, match=r"did you mean 'glm4_moe'\? Known: llama, .*Mapping"):
        ready({"model_type": "glm4_moes", "num_attention_heads": 2, "vocab_size": 4}, "huggingface", "megatron")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama"}, "lacks num_attention_heads, vocab_size"),
        ({"model_type": "bogus"}, r"no ready mapping for 'bogus'\. Known: llama(, \w+){7} and \d+ more\. If"),
        ({"model_type": "mamba"}, r"no ready mapping for 'mamba'\. Known: "),  # jamba is another model
        ({"model_type": "bert", "num_attention_heads": 2, "vocab_size": 4}, "no ready mapping for 'bert'"),
        (
            {"model_type": "llama", "num_attention_heads": 3, "num_key_value_heads": 2, "vocab_size": 4},
            "do not divide 3",
        ),
        (
            {"model_type": "llava", "text_config": {"model_type": "llama", "num_attention_heads": 2, "vocab_size": 4}},
            "no ready mapping of 'llava' to torchtitan",
        ),
        (
            {
                "model_type": "llava",
                "text_config": {"model_type": "gpt_oss", "num_attention_heads": 2, "vocab_size": 4},
            },
            "no ready mapping for 'llava around gpt_oss'",
        ),
        (
            {"model_type": "internvl", "text_config": {"model_type": "x", "num_attention_heads": 2, "vocab_size": 4}},
            "no ready mapping for 'internvl around x'",
        ),
    ],
)
def test_configs_that_do_not_do(config: object, message: str) -> None:
    with pytest.raises(NormalizationError, match=message):
        ready(config, "huggingface", "torchtitan")


def test_a_decoder_with_experts_in_a_model_of_dense_ones() -> None:
    """Mistral Small 4 is a `mistral3` around a `mistral4`."""
    text = {"model_type": "mistral4", "num_attention_heads": 4, "vocab_size": 53, "num_hidden_layers": 2}
    config = {"model_type": "mistral3", "text_config": text}
    plain = ready(config, "huggingface", "plain")
    stack = "language_model.model.layers.1.mlp.experts.gate_up_proj"
    made = plain.views({stack: TensorSpec(stack, (2, 6, 4), "float32")})
    assert sorted(made) == [f"model.layers.1.mlp.experts.{e}.{x}_proj.weight" for e in (0, 1) for x in ("gate", "up")]
    with pytest.raises(NormalizationError, match="no ready mapping of 'mistral3' to megatron"):
        ready(config, "huggingface", "megatron")
    with pytest.raises(NormalizationError, match="no ready mapping for 'mistral3 around gpt_oss'"):
        ready({**config, "text_config": {**text, "model_type": "gpt_oss"}}, "huggingface", "plain")


HUB_GEMMA = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34}
HUB_LLAVA = {"model_type": "llama", "vocab_size": 32064}


@pytest.mark.parametrize(
    ("family", "text", "more"),
    [("gemma3", HUB_GEMMA, {}), ("llava", HUB_LLAVA, {}), ("gemma3", HUB_GEMMA, {"num_attention_heads": 8})],
)
def test_configs_that_omit_what_is_at_its_default(family: str, text: dict[str, Any], more: dict[str, Any]) -> None:
    """As on the Hub. Names need no numbers; else those of another family's defaults would be taken."""
    full = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 2, "vocab_size": 9}
    config = {"model_type": family, "text_config": {**text, **more}}

    for target in ("transformers", "plain"):
        made = ready(config, "huggingface", target)
        assert made == ready({**config, "text_config": {**full, **text}}, "huggingface", target)
    message = (
        "lacks .*num_key_value_heads.* needs it. Pass transformers' AutoConfig" if family == "gemma3" else "no ready"
    )
    with pytest.raises(NormalizationError, match=message):
        ready(config, "huggingface", "megatron")
    lacking = "lacks .*num_attention_heads" if not more else "lacks .*num_key_value_heads"
    with pytest.raises(NormalizationError, match=lacking):
        ready({"model_type": "qwen3_vl_moe", "text_config": {**more, "intermediate_size": 8}}, "hf", "transformers")


def test_a_config_that_is_not_there_or_is_none(tmp_path: Path) -> None:
    for path in (tmp_path / "config.json", tmp_path):
        with pytest.raises(FileNotFoundError, match=r"there is no .*config.json: pass") as info:
            ready(path, "huggingface", "torchtitan")
        assert isinstance(info.value, reshard.ReshardError)
    for text in ("no JSON", "[1]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(NormalizationError, match=r"is not a config.json of a model"):
            ready(tmp_path, "huggingface", "torchtitan")


def test_layers_of_transformer_engine(tmp_path: Path) -> None:
    """By its documentation: norms within projections, gate and up as one; queries, keys and values as one or three."""
    front, inner = "model.layers.1.", "model.layers.1.self_attention.layernorm_qkv."
    sizes = {"q": 32, "k": 16, "v": 16}
    plain = {f"{front}self_attn.{x}_proj.weight": torch.randn(rows, 32) for x, rows in sizes.items()}
    plain |= {f"{front}mlp.{x}_proj.weight": torch.randn(24, 32) for x in ("gate", "up")}
    plain |= {f"{front}input_layernorm.weight": torch.randn(32), f"{front}mlp.down_proj.weight": torch.randn(32, 24)}
    reshard.save(plain, tmp_path / "plain")
    made = ready(LLAMA, "huggingface", "transformer_engine").apply(reshard.open(tmp_path / "plain"))
    assert torch.equal(made[f"{inner}key_weight"][...], plain[f"{front}self_attn.k_proj.weight"])
    assert torch.equal(made[f"{inner}layer_norm_weight"][...], plain[f"{front}input_layernorm.weight"])
    gate_up = torch.cat([plain[f"{front}mlp.{x}_proj.weight"] for x in ("gate", "up")])
    assert torch.equal(made[f"{front}layernorm_mlp.fc1_weight"][...], gate_up)

    back = ready(LLAMA, "transformer_engine", "huggingface").apply(made)
    assert {name: same(tensor[...], plain[name]) for name, tensor in back.items()} == dict.fromkeys(plain, True)

    three = {name: tensor[...] for name, tensor in made.items()}
    q, k, v = (three.pop(f"{inner}{x}_weight") for x in ("query", "key", "value"))
    by_groups = torch.cat([x.view(2, -1, 8, 32) for x in (q, k, v)], 1).reshape(64, 32)
    for interleaved, fused in ((True, by_groups), (False, torch.cat([q, k, v]))):
        folder = tmp_path / str(interleaved)
        stored = {f"{inner}weight": fused, f"{inner}_extra_state": torch.zeros(3, dtype=torch.uint8)}
        reshard.save(three | stored, folder)
        told = ready(LLAMA, "transformer_engine", "huggingface", qkv_interleaved=interleaved)
        back = told.apply(reshard.open(folder))
        assert {name: same(tensor[...], plain[name]) for name, tensor in back.items()} == dict.fromkeys(plain, True)

        # the two cannot be told apart by their shapes
        untold = ready(LLAMA, "transformer_engine", "huggingface")
        with pytest.raises(NormalizationError, match=rf"{inner}weight.*qkv_interleaved=False"):
            reshard.convert(folder, tmp_path / "never", mapping=untold)
        with pytest.raises(NormalizationError, match="qkv_interleaved=False"):
            untold.views({name: tensor.stored.spec for name, tensor in reshard.open(folder).items()})
    with pytest.raises(NormalizationError, match="True or False"):
        ready(LLAMA, "transformer_engine", "huggingface", qkv_interleaved="no")  # type: ignore[arg-type]


def test_one_query_group_of_transformer_engine_needs_no_word(tmp_path: Path) -> None:
    model = Decoder("llama", 4, 1, 1, 32)
    name, rows = "model.layers.0.self_attention.layernorm_qkv.weight", torch.randn(6 * 8, 32)
    reshard.save({name: rows}, tmp_path)
    back = ready(model, "transformer_engine", "huggingface").apply(reshard.open(tmp_path))
    parts = [back[f"model.layers.0.self_attn.{x}_proj.weight"][...] for x in "qkv"]
    assert torch.equal(torch.cat(parts), rows)


EXPERTS = "model.language_model.layers.0.mlp.experts."


@pytest.mark.parametrize("transposed", [True, False])
def test_experts_of_qwen3_vl_stand_either_way(transposed: bool, tmp_path: Path) -> None:
    """Transposed on the hub and before transformers 5, as in memory since; written transposed."""
    model = Decoder("qwen3_vl_moe", 4, 2, 8, 53, 1, expert_size=6, vision_heads=2)
    memory = {f"{EXPERTS}gate_up_proj": torch.randn(3, 12, 10), f"{EXPERTS}down_proj": torch.randn(3, 10, 6)}
    hub = {name: tensor.transpose(1, 2).contiguous() for name, tensor in memory.items()}
    reshard.save(hub if transposed else memory, tmp_path)

    made = ready(model, "huggingface", "megatron").apply(reshard.open(tmp_path))

    for expert in range(3):
        front = f"language_model.decoder.layers.0.mlp.experts.local_experts.{expert}."
        assert torch.equal(made[f"{front}linear_fc1.weight"][...], memory[f"{EXPERTS}gate_up_proj"][expert])
        assert torch.equal(made[f"{front}linear_fc2.weight"][...], memory[f"{EXPERTS}down_proj"][expert])
    back = ready(model, "megatron", "huggingface").apply(made)
    assert all(torch.equal(back[name][...], tensor) for name, tensor in hub.items())


def test_square_experts_of_qwen3_vl_are_refused(tmp_path: Path) -> None:
    model = Decoder("qwen3_vl_moe", 4, 2, 8, 53, 1, expert_size=6)
    reshard.save({f"{EXPERTS}gate_up_proj": torch.randn(3, 12, 12)}, tmp_path)
    with pytest.raises(NormalizationError, match="does not show whether they are transposed"):
        ready(model, "huggingface", "transformers").apply(reshard.open(tmp_path))[f"{EXPERTS}gate_up_proj"][...]


@pytest.mark.parametrize(
    "odd",
    [
        {"num_attention_heads": [4, 4]},
        {"num_attention_heads": 0},
        {"vocab_size": "many"},
        {"text_config": [1]},
        {"vision_config": 3},
        {"moe_layer_freq": [1]},
    ],
)
def test_a_config_of_an_unexpected_form_is_refused(odd: dict[str, object]) -> None:
    config = {"model_type": "llama", "num_attention_heads": 4, "hidden_size": 8, "vocab_size": 8}
    config["num_hidden_layers"] = 2
    assert ready({**config, "text_config": None}, "huggingface", "torchtitan")
    with pytest.raises(NormalizationError, match="has an unexpected form"):
        ready({**config, **odd}, "huggingface", "torchtitan")
