"""Quantized weights are not rearranged as plain matrices, and are not cast without their scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.errors import KeyMismatchError, NormalizationError
from reshard.mapping import Concat, Decoder, Dequantize, Mapping, Rename, Rope, Rule, Split, ready

LLAMA = Decoder("llama", heads=4, kv_heads=4, head_size=16, vocab_size=32)
QWEN = Decoder("qwen3", heads=4, kv_heads=4, head_size=16, vocab_size=32)
DEEPSEEK = Decoder("deepseek_v3", 4, 4, 16, 32, layers=1, latent_rows=(128, 192))
LAYER = "model.layers.0."


def opened(state: Any, path: Path) -> reshard.Checkpoint:
    reshard.save(state, path)
    return reshard.open(path)


def fp8(rows: int, columns: int = 128) -> torch.Tensor:
    return torch.randn(rows, columns).to(torch.float8_e4m3fn)


def projections(**parts: torch.Tensor) -> dict[str, torch.Tensor]:
    """Attention and gates of one layer, each with the same parts."""
    names = [*(f"self_attn.{x}_proj" for x in "qkv"), "mlp.gate_proj", "mlp.up_proj"]
    return {f"{LAYER}{name}.{part}": tensor.clone() for name in names for part, tensor in parts.items()}


AWQ = projections(
    qweight=torch.zeros(64, 8, dtype=torch.int32), qzeros=torch.zeros(4, 1, dtype=torch.int32), scales=torch.rand(4, 64)
)
BITSANDBYTES = {
    f"{name}{end}": tensor
    for name, packed in projections(weight=torch.zeros(2048, 1, dtype=torch.uint8)).items()
    for end, tensor in (("", packed), (".absmax", torch.rand(64)))
}
INT8 = projections(weight=torch.zeros(64, 64, dtype=torch.int8), SCB=torch.rand(64))
NVFP4 = projections(weight=torch.zeros(64, 32, dtype=torch.uint8), weight_scale_2=torch.tensor(2.0))
PER_TENSOR = projections(weight=fp8(64), weight_scale=torch.tensor(2.0))
BLOCKS = projections(weight=fp8(64), weight_scale_inv=torch.rand(1, 1))
NATIVE = projections(weight=fp8(64), scale=torch.rand(1, 1))


@pytest.mark.parametrize("target", ["torchtitan", "gguf", "vllm", "megatron"])
@pytest.mark.parametrize(
    "state",
    [AWQ, BITSANDBYTES, INT8, NVFP4, PER_TENSOR, NATIVE],
    ids=["awq", "bitsandbytes", "int8", "nvfp4", "per tensor", "native"],
)
def test_quantized_weights_are_not_rearranged(state: dict[str, torch.Tensor], target: str, tmp_path: Path) -> None:
    """They were permuted and joined along another dim, without an error."""
    checkpoint, mapping = opened(state, tmp_path / "c"), ready(LLAMA, "huggingface", target)
    message = r"would rearrange 'model.layers.0.*Dequantize it first: fp8 blocks"

    with pytest.raises(NormalizationError, match=message):
        reshard.convert(tmp_path / "c", tmp_path / "d", format="safetensors", mapping=mapping)
    with pytest.raises(NormalizationError, match=message):
        mapping.views({name: tensor.stored.spec for name, tensor in checkpoint.items()})


def test_block_scales_are_not_permuted(tmp_path: Path) -> None:
    """One scale stands for 128 rows, which do not stay together."""
    checkpoint = opened(BLOCKS, tmp_path / "c")
    for target in ("torchtitan", "gguf"):
        mapped = checkpoint.mapped(ready(LLAMA, "huggingface", target))
        with pytest.raises(NormalizationError, match=r"Rope.*'weight_scale_inv' is a part of"):
            [mapped[name] for name in mapped]


def test_quantized_weights_are_renamed(tmp_path: Path) -> None:
    """Where nothing is rearranged, all parts get their new names."""
    made = opened(AWQ, tmp_path / "c").mapped(ready(QWEN, "huggingface", "torchtitan"))

    queries = {f"layers.0.attention.qkv_linear.wq.{part}" for part in ("qweight", "qzeros", "scales")}
    assert queries < set(made)
    assert all(made[name].shape for name in made)


@pytest.mark.parametrize(("rows", "scales"), [(256, 2), (64, 64)], ids=["blocks", "rows"])
def test_scales_of_whole_rows_are_joined_as_their_weights(rows: int, scales: int, tmp_path: Path) -> None:
    model = Decoder("llama", heads=2, kv_heads=2, head_size=rows // 2, vocab_size=32)
    state = projections(weight=fp8(rows), weight_scale_inv=torch.rand(scales, 1))
    checkpoint, mapping = opened(state, tmp_path / "c"), ready(model, "huggingface", "vllm")

    made = checkpoint.mapped(mapping)

    fused = made[f"{LAYER}self_attn.qkv_proj.weight_scale_inv"]
    assert torch.equal(fused[...], torch.cat([state[f"{LAYER}self_attn.{x}_proj.weight_scale_inv"] for x in "qkv"]))
    assert set(made) == {
        f"{LAYER}{x}.{y}" for x in ("self_attn.qkv_proj", "mlp.gate_up_proj") for y in ("weight", "weight_scale_inv")
    }
    back = made.mapped(mapping.inverse())
    assert all(torch.equal(back[name][...].float(), tensor.float()) for name, tensor in state.items())


@pytest.mark.parametrize("rows", [192, 224])
def test_scales_of_blocks_that_straddle_two_weights_are_not_joined(rows: int, tmp_path: Path) -> None:
    state = {f"{x}.weight": fp8(rows) for x in "ab"} | {f"{x}.weight_scale_inv": torch.rand(2, 1) for x in "ab"}

    made = opened(state, tmp_path / "c").mapped(Mapping([Concat(["a.{kind}", "b.{kind}"], "c.{kind}", (1, 1))]))

    with pytest.raises(NormalizationError, match="'weight_scale_inv' is a part of a quantized weight"):
        made["c.weight_scale_inv"]


@pytest.mark.parametrize("target", ["vllm", "sglang", "megatron", "torchtitan"])
def test_a_weight_is_not_joined_without_its_scales(target: str, tmp_path: Path) -> None:
    """Rules for latent attention and experts name `weight` alone, so scales kept their old names."""
    attention = {f"{LAYER}self_attn.q_a_proj": 128, f"{LAYER}self_attn.kv_a_proj_with_mqa": 192}
    experts = {f"{LAYER}mlp.experts.0.{x}_proj": 128 for x in ("gate", "up", "down")}
    state: dict[str, torch.Tensor] = {}
    for name, rows in (attention | experts).items():
        state |= {f"{name}.weight": fp8(rows), f"{name}.weight_scale_inv": torch.rand(-(-rows // 128), 1)}
    checkpoint, mapping = opened(state, tmp_path / "c"), ready(DEEPSEEK, "huggingface", target)

    mapped = checkpoint.mapped(mapping)

    with pytest.raises(NormalizationError, match="which the rule does not rearrange"):
        [mapped[name] for name in mapped]
    plain = checkpoint.mapped(Mapping([Dequantize()]) | mapping)
    assert all(plain[name].dtype == torch.bfloat16 for name in plain)
    if target in ("megatron", "torchtitan"):  # which only rename these
        assert sum(name.endswith("weight_scale_inv") and "attn" not in name for name in mapped) >= 2


@pytest.mark.parametrize(
    "rule",
    [
        Concat(["p.qweight", "r.qweight"], "c.qweight", dim=1),  # as AWQ has its columns
        Split("a.weight", ["c.weight", "d.weight"], (1, 1)),
        Rope("b.weight", "c.weight", 4, "pairs"),
        Rope("n.{kind}", "m.{kind}", 4, "pairs"),
        Rename("{x+}", "net.{x+}"),
    ],
    ids=str,
)
def test_what_is_named_in_full_or_plain_is_rearranged(rule: Rule, tmp_path: Path) -> None:
    """Integers are not always packed, and a plain weight may stand beside a parameter called scale."""
    state = {"a.weight": torch.arange(32, dtype=torch.int32), "b.weight": torch.rand(8, 4), "b.scale": torch.rand(8)}
    state |= {f"{x}.qweight": torch.zeros(4, 2, dtype=torch.int32) for x in "pr"} | {"n.bias": torch.rand(8)}

    made = opened(state, tmp_path / "c").mapped(Mapping([rule]))

    assert all(made[name].shape for name in made)


FP8 = {"up.weight": fp8(256), "up.weight_scale_inv": torch.rand(2, 1)}


@pytest.mark.parametrize("scale", ["up.weight_scale_inv", "up.weight_scale", "up.scale"])
def test_fp8_weights_are_not_cast_without_their_scales(scale: str, tmp_path: Path) -> None:
    """Codes became values. The last is also what a quantized tensor has beside its data."""
    opened({"up.weight": FP8["up.weight"], scale: FP8["up.weight_scale_inv"]}, tmp_path / "c")

    with pytest.raises(
        NormalizationError, match=rf"'up.weight' of float8_e4m3fn cannot become bfloat16.*'{scale}': deq"
    ):
        reshard.convert(tmp_path / "c", tmp_path / "d", format="safetensors", dtype="bfloat16")
    for policy, strict in [("cast", True), ("cast", "subset"), ("error", "subset")]:
        target = {"up.weight": torch.zeros(256, 128)}
        with pytest.raises(KeyMismatchError, match=rf"'{scale}': dequantize it, by Dequantize") as caught:
            reshard.load(target, tmp_path / "c", dtype_policy=policy, strict=strict)  # type: ignore[arg-type]
        assert "dtype_policy=" not in str(caught.value), "neither would make values of codes"
    reshard.load({"up.weight": torch.zeros_like(FP8["up.weight"])}, tmp_path / "c", strict="subset")
    state = {"up.weight": FP8["up.weight"], scale: FP8["up.weight_scale_inv"]}
    with pytest.raises(KeyMismatchError, match="dequantize it, by Dequantize"):
        reshard.redistribute(state, {"up.weight": torch.zeros(256, 128)}, strict=False, dtype_policy="cast")


def test_dequantized_weights_and_those_without_scales_are_cast(tmp_path: Path) -> None:
    opened(FP8 | {"plain.weight": fp8(2)}, tmp_path / "c")
    target = {"up.weight": torch.zeros(256, 128), "plain.weight": torch.zeros(2, 128)}

    reshard.load(target, tmp_path / "c", mapping=Mapping([Dequantize()]), dtype_policy="cast")

    wanted = FP8["up.weight"].float() * FP8["up.weight_scale_inv"].repeat_interleave(128, 0)
    assert torch.equal(target["up.weight"], wanted.bfloat16().float())
    assert target["plain.weight"].any()
