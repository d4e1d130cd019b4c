"""What tensor parallel ranks of Megatron's older format have: shards by their names, and copies, which are compared."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard import checkpoint
from reshard.errors import CorruptCheckpointError, FormatError, NormalizationError

Tensors = Mapping[str, torch.Tensor]
LAYER = "decoder.layers.0."
DOWN = LAYER + "self_attention.linear_kv_down_proj.weight"


def save(root: Path, ranks: Mapping[str, Tensors], version: float | None = 3.0, **args: Any) -> None:
    """A file for each folder of a rank."""
    args = {"tensor_model_parallel_size": len(ranks), "pipeline_model_parallel_size": 1, **args}
    for folder, model in ranks.items():
        (root / folder).mkdir()
        file = {"args": argparse.Namespace(**args), "model": dict(model)}
        file |= {} if version is None else {"checkpoint_version": version}
        torch.save(file, root / folder / "model_optim_rng.pt")


def save_pair(root: Path, first: Tensors, second: Tensors, **options: Any) -> None:
    save(root, {"mp_rank_00": first, "mp_rank_01": second}, **options)


def halves(whole: Tensors) -> list[Tensors]:
    return [{name: tensor.chunk(2)[rank].clone() for name, tensor in whole.items()} for rank in range(2)]


def model_of(root: Path, hints: Mapping[str, Any] | None = None) -> Any:
    return checkpoint.open(root).normalized(hints)["model"]


@pytest.mark.parametrize("crc", [True, False])
def test_shards_that_were_taken_for_copies_are_refused(tmp_path: Path, crc: bool) -> None:
    """Latent attention of Megatron's own layers shards what that of Transformer Engine has whole on all ranks."""
    whole = {DOWN: torch.rand(12, 8)}
    torch.serialization.set_crc32_options(crc)
    try:
        save_pair(tmp_path, *halves(whole))
    finally:
        torch.serialization.set_crc32_options(True)
    model = model_of(tmp_path)
    with pytest.raises(NormalizationError, match=r"linear_kv_down_proj.*mp_rank_00.*mp_rank_01.*'tp_dims'"):
        model[DOWN][...]
    with pytest.raises(NormalizationError, match="'tp_dims'"):
        model[DOWN][2:4, :3]
    assert torch.equal(model_of(tmp_path, {"tp_dims": {"*_down_proj.weight": 0}})[DOWN][...], whole[DOWN])
    assert torch.equal(model_of(tmp_path, {"tp_dims": {DOWN: None}})[DOWN][...], whole[DOWN][:6])


def test_copies_are_returned_once_they_are_compared(tmp_path: Path) -> None:
    same = {DOWN: torch.rand(12, 8), LAYER + "input_layernorm.weight": torch.ones(8)}
    save_pair(tmp_path, same, {name: tensor.clone() for name, tensor in same.items()})
    model = model_of(tmp_path)
    assert torch.equal(model[DOWN][3:5, 1:], same[DOWN][3:5, 1:])
    assert all(torch.equal(model[name][...], same[name]) for name in same)


def test_views_of_copies_are_compared_too(tmp_path: Path) -> None:
    """A part of a storage has no checksum of its own."""
    row = torch.rand(24, 4)
    save_pair(tmp_path, {DOWN: row[:12].t()}, {DOWN: row[12:].t()})
    with pytest.raises(NormalizationError, match="'tp_dims'"):
        model_of(tmp_path)[DOWN][...]


def test_states_of_copies_follow_their_parameter(tmp_path: Path) -> None:
    """Ranks that do not share gradients have moments of their own, as in a sample of DeepSpeed."""
    for rank in range(2):
        (tmp_path / f"mp_rank_{rank:02d}").mkdir()
        state = {0: {"exp_avg": torch.full((4, 8), float(rank))}}
        groups = [{"wd_mult": 1.0, "params": [0]}]
        file = {
            "args": argparse.Namespace(tensor_model_parallel_size=2, pipeline_model_parallel_size=1),
            "model": {DOWN: torch.ones(4, 8)},
            "optimizer": {"state": state, "param_groups": groups},
        }
        torch.save(file, tmp_path / f"mp_rank_{rank:02d}" / "model_optim_rng.pt")
    state = checkpoint.open(tmp_path).normalized()["optim"]["state"]
    assert torch.equal(state[DOWN]["exp_avg"][...], torch.zeros(4, 8))


@pytest.mark.parametrize("drift", [0.01, 0.2])
def test_copies_that_have_drifted_apart(drift: float, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A little is logged, and more is another tensor."""
    mine = torch.linspace(-1, 1, 32).view(4, 8)
    save_pair(tmp_path, {DOWN: mine}, {DOWN: mine + drift})
    found = model_of(tmp_path)[DOWN]
    if drift > 0.05:
        with pytest.raises(NormalizationError, match="copies differ too much"):
            found[...]
        return
    assert torch.equal(found[...], mine)
    assert re.search("the ranks' copies in .* differ slightly: the first rank's copy is used", caplog.text)


def test_copies_of_different_dtypes(tmp_path: Path) -> None:
    save_pair(tmp_path, {DOWN: torch.ones(4, 8)}, {DOWN: torch.ones(4, 8).bfloat16()})
    with pytest.raises(CorruptCheckpointError, match="different shapes or dtypes"):
        model_of(tmp_path)


def test_the_norm_of_a_mamba_mixer_is_sharded(tmp_path: Path) -> None:
    whole = {LAYER + "mixer.norm.weight": torch.rand(16)}
    save_pair(tmp_path, *halves(whole))
    assert torch.equal(model_of(tmp_path)[LAYER + "mixer.norm.weight"][...], whole[LAYER + "mixer.norm.weight"])


@pytest.mark.parametrize("name", ["lm_head.dense.weight", "pooler.dense.weight"])
def test_dense_layers_that_every_rank_has(tmp_path: Path, name: str) -> None:
    same = {name: torch.rand(8, 8)}
    save_pair(tmp_path, same, same)
    assert torch.equal(model_of(tmp_path)[name][...], same[name])


@pytest.mark.parametrize("name", ["mixer.in_proj.weight", "mixer.conv1d.bias", "self_attention.conv1d.weight"])
def test_what_is_sharded_section_by_section(tmp_path: Path, name: str) -> None:
    """No dim says how such shards are joined, so the error must not ask for one."""
    save_pair(tmp_path, {LAYER + name: torch.rand(8, 8)}, {LAYER + name: torch.rand(8, 8)})
    with pytest.raises(FormatError, match=r"section by section.*torch_dist") as error:
        model_of(tmp_path)
    assert "tp_dims" not in str(error.value)


def expert(number: int, layer: str) -> str:
    return f"{LAYER}mlp.experts.local_experts.{number}.{layer}.weight"


EXPERTS = {
    expert(number, layer): torch.rand(size)
    for number in range(2)
    for layer, size in (("linear_fc1", (32, 8)), ("linear_fc2", (8, 16)))
}


def check_experts(root: Path) -> None:
    model = model_of(root)
    assert {name: torch.equal(model[name][...], tensor) for name, tensor in EXPERTS.items()} == dict.fromkeys(
        EXPERTS, True
    )


def test_experts_without_tensor_parallelism(tmp_path: Path) -> None:
    args = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    save_pair(tmp_path, EXPERTS, EXPERTS, **args)
    check_experts(tmp_path)


def test_experts_without_tensor_parallelism_that_differ(tmp_path: Path) -> None:
    save_pair(tmp_path, EXPERTS, {name: tensor + 1 for name, tensor in EXPERTS.items()}, expert_tensor_parallel_size=1)
    name = expert(0, "linear_fc1")
    for hints in (None, {"tp_dims": {"*": 0}}):  # a dim is that of shards, and these are copies
        with pytest.raises(NormalizationError, match=r"linear_fc1.*'tp_dims': \{.*: None\}"):
            model_of(tmp_path, hints)[name][...]
    assert torch.equal(model_of(tmp_path, {"tp_dims": {"*experts*": None}})[name][...], EXPERTS[name])


def test_expert_ranks_among_the_tensor_parallel_ones(tmp_path: Path) -> None:
    """Megatron saves the first ranks, which count through both: each expert rank is one tensor parallel rank."""
    word = {"embedding.word_embeddings.weight": torch.rand(16, 8)}
    ranks = {}
    for rank, part in enumerate(halves(word)):
        mine = {expert(0, layer): EXPERTS[expert(rank, layer)] for layer in ("linear_fc1", "linear_fc2")}
        ranks[f"mp_rank_{rank:02d}_{rank:03d}"] = {**part, **mine}
    args = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    save(tmp_path, ranks, **args)
    check_experts(tmp_path)
    assert torch.equal(model_of(tmp_path)["embedding.word_embeddings.weight"][...], *word.values())

    (tmp_path / "mp_rank_00_000" / "model_optim_rng.pt").unlink()
    with pytest.raises(CorruptCheckpointError, match="tensor parallel rank 0, pipeline stage 0"):
        checkpoint.open(tmp_path)


def test_experts_of_two_of_four_ranks(tmp_path: Path) -> None:
    """Rank t has the expert shard t % 2."""
    ranks = {}
    for rank in range(4):
        mine = {}
        for layer in ("linear_fc1", "linear_fc2"):
            whole = EXPERTS[expert(rank // 2, layer)]
            gates = whole.chunk(2) if layer == "linear_fc1" else (whole,)
            parts = [half.chunk(2, int(layer == "linear_fc2"))[rank % 2] for half in gates]
            mine[expert(0, layer)] = torch.cat(parts)
        ranks[f"mp_rank_{rank:02d}_{rank // 2:03d}"] = mine
    save(tmp_path, ranks, expert_model_parallel_size=2, expert_tensor_parallel_size=2)
    check_experts(tmp_path)


def test_more_tensor_parallel_ranks_of_experts_than_files_can_name(tmp_path: Path) -> None:
    save(tmp_path, {"mp_rank_00": EXPERTS}, expert_tensor_parallel_size=2)
    with pytest.raises(FormatError, match=r"expert_tensor_parallel_size, 2, does not divide .*_size, 1,"):
        model_of(tmp_path)


@pytest.mark.parametrize("version", [None, 0, 1.0])
@pytest.mark.parametrize("part", ["query_key_value", "key_value"])
def test_rows_in_the_order_of_old_programs_are_refused(tmp_path: Path, version: float | None, part: str) -> None:
    name = f"language_model.transformer.layers.0.attention.{part}.weight"
    save(tmp_path, {"mp_rank_00": {name: torch.rand(24, 8)}}, version)
    found = checkpoint.open(tmp_path)
    assert f"mp_rank_00.model.{name}" in found
    with pytest.raises(FormatError, match=r"checkpoint_version.*another order.*2\.0"):
        found.normalized()


def test_old_files_without_such_rows_open(tmp_path: Path) -> None:
    save(tmp_path, {"mp_rank_00": {DOWN: torch.rand(4, 8)}}, None)
    assert list(model_of(tmp_path)) == [DOWN]
