"""Per-rank files of Megatron's older format, written by its rules, for many parallelisms."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard import checkpoint
from reshard.api.verify import verify
from reshard.errors import CorruptCheckpointError, FormatError, NormalizationError
from reshard.stored.tensor import LazyTensor
from tests.reshard.formats.canonical import megatron_maker as make
from tests.reshard.formats.canonical.megatron_maker import Shape

Names = list[list[str]]


def save(root: Path, shape: Shape, *, tp: int, pp: int, vpp: int, ep: int, flat: bool, keep: bool = True) -> Any:
    """Write a checkpoint; returns the weights and the states that are in it."""
    values = make.tensors(shape, 0)
    low = shape.dtype != torch.float32
    kinds = ("exp_avg", "exp_avg_sq", "fp32_param") if low or flat else ("exp_avg", "exp_avg_sq")
    states = {kind: make.tensors(shape, i + 1, torch.float32) for i, kind in enumerate(kinds)}
    each = shape.layers // (pp * vpp)
    for t, p, e in itertools.product(range(tp), range(pp), range(ep)):
        folder = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "") + (f"_{e:03d}" if ep > 1 else "")
        chunks = []
        for v in range(vpp):
            chunks.append(
                _local_names(shape, range((v * pp + p) * each, (v * pp + p + 1) * each), e, ep, p, v, pp, vpp)
            )
        file: dict[str, Any] = {
            "args": argparse.Namespace(
                tensor_model_parallel_size=tp,
                pipeline_model_parallel_size=pp,
                vocab_size=make.VOCAB,
                rank=(p * ep + e) * tp + t,
            ),
            "checkpoint_version": 3.0,
        }
        for v, names in enumerate(chunks):
            key = "model" if vpp == 1 else f"model{v}"
            file[key] = {loc: make.shard(fqn, values[fqn], tp, t, shape.gated).clone() for loc, fqn in names.items()}
            file[key]["decoder.layers.0.mlp.linear_fc1._extra_state"] = None
        parts = [chunks] if ep == 1 else [_only(chunks, False), _only(chunks, True)]
        optimizers = [_optimizer(shape, part, states, tp, t, flat) for part in parts]
        file["optimizer"] = optimizers[0] if ep == 1 else optimizers
        (root / folder).mkdir(parents=True)
        torch.save(file, root / folder / "model_optim_rng.pt")
        if flat:
            buffers: list[Any] = [_buffers(shape, part, states, tp, t) for part in parts]
            if e:
                buffers[0] = None  # the states of what all expert ranks share are in the first one's file
            torch.save(buffers[0] if ep == 1 else buffers, root / folder / "distrib_optim.pt")
    return values, states


def _local_names(shape: Shape, layers: range, e: int, ep: int, p: int, v: int, pp: int, vpp: int) -> dict[str, str]:
    """Names in a rank's file, and in the whole model."""
    out: dict[str, str] = {}
    share = shape.experts // ep
    for name, _ in shape.params():
        match = re.match(r"decoder\.layers\.(\d+)\.", name)
        local = name
        if match:
            if int(match[1]) not in layers:
                continue
            local = name.replace(match[0], f"decoder.layers.{int(match[1]) - layers.start}.")
            expert = re.search(r"local_experts\.(\d+)\.", name)
            if expert:
                if not e * share <= int(expert[1]) < (e + 1) * share:
                    continue
                local = local.replace(expert[0], f"local_experts.{int(expert[1]) - e * share}.")
        elif (p, v) != ((0, 0) if name.startswith("embedding") else (pp - 1, vpp - 1)):
            continue
        out[local] = name
    return out


def _only(chunks: list[dict[str, str]], experts: bool) -> list[dict[str, str]]:
    return [{k: n for k, n in chunk.items() if ("local_experts" in n) == experts} for chunk in chunks]


def _optimizer(
    shape: Shape, chunks: list[dict[str, str]], states: Mapping[str, make.Tensors], tp: int, t: int, flat: bool
) -> Any:
    """The optimizer's own dict: ids count through the groups, decay first."""
    names = [fqn for chunk in chunks for fqn in chunk.values()]
    groups, state, masters, i = [], {}, [], 0
    for wd_mult in (1.0, 0.0):
        ids = []
        masters.append([])
        for fqn in names:
            small = states["exp_avg"][fqn].ndim == 1
            if small == bool(wd_mult):
                continue
            local = {k: make.shard(fqn, of[fqn], tp, t, shape.gated).clone() for k, of in states.items()}
            if shape.dtype != torch.float32 and not flat:
                masters[-1].append(local.pop("fp32_param"))
            state[i] = {"step": torch.tensor(3.0), **local}
            ids.append(i)
            i += 1
        groups.append({"wd_mult": wd_mult, "lr": 0.1, "is_expert_parallel": False, "params": ids})
    if flat:
        groups = [{**group, "step": 3} for group in groups]
        return {"optimizer": {"state": {}, "param_groups": groups}}
    if shape.dtype == torch.float32:
        return {"state": state, "param_groups": groups}
    return {"optimizer": {"state": state, "param_groups": groups}, "fp32_from_fp16_params": masters}


def _buffers(
    shape: Shape, chunks: list[dict[str, str]], states: Mapping[str, make.Tensors], tp: int, t: int
) -> dict[Any, Any]:
    out: dict[Any, Any] = {"buckets_coalesced": True}
    for v, chunk in enumerate(chunks):
        order = list(reversed(chunk.values()))
        local = {fqn: {k: make.shard(fqn, of[fqn], tp, t, shape.gated) for k, of in states.items()} for fqn in order}
        (places,) = make.place([local[fqn]["exp_avg"].numel() for fqn in order], None, 1)
        flats = {}
        for kind in states:
            flats[kind] = torch.zeros(places[-1][1])
            for fqn, (start, stop) in zip(order, places):
                flats[kind][start:stop] = local[fqn][kind].reshape(-1)
        flats["param"] = flats.pop("fp32_param")
        out[v] = {(shape.dtype, torch.float32): {**flats, "numel_unpadded": places[-1][1]}}
    return out


GRIDS = [
    {"tp": 1, "pp": 1, "vpp": 1, "ep": 1},
    {"tp": 4, "pp": 1, "vpp": 1, "ep": 1},
    {"tp": 2, "pp": 4, "vpp": 1, "ep": 1},
    {"tp": 1, "pp": 2, "vpp": 2, "ep": 1},
    {"tp": 2, "pp": 1, "vpp": 1, "ep": 2},
    {"tp": 2, "pp": 2, "vpp": 1, "ep": 2},
]


@pytest.mark.parametrize("kind", ["fp32", "bf16", "distributed"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_ranks_join(tmp_path: Path, grid: dict[str, int], kind: str) -> None:
    shape = Shape(experts=4 if grid["ep"] > 1 else 0, ffn=16, dtype=torch.float32 if kind == "fp32" else torch.bfloat16)
    values, states = save(tmp_path, shape, flat=kind == "distributed", **grid)
    found = checkpoint.open(tmp_path).normalized()
    wanted = make.cropped(values)
    assert set(found["model"]) == set(wanted)
    for name, tensor in wanted.items():
        assert found["model"][name][...].equal(tensor), name
    for state, tensors in states.items():
        for name, tensor in make.cropped(tensors).items():
            lazy = found["optim"]["state"][name][state]
            assert lazy[...].equal(tensor), (name, state)
            assert lazy[1:5].equal(tensor[1:5])
            step = found["optim"]["state"][name]["step"]
            assert (step[...] if isinstance(step, LazyTensor) else step) == 3
    decay, rest = (set(group["params"]) for group in found["optim"]["param_groups"])
    assert rest == {name for name in wanted if wanted[name].ndim == 1}
    assert decay == set(wanted) - rest


def test_states_that_are_not_elementwise(tmp_path: Path) -> None:
    """Each rank has factors of its own shard. That of a square shard has the shape of it, and is no shard itself."""
    _, states = save(tmp_path, Shape(layers=1), tp=2, pp=1, vpp=1, ep=1, flat=False)
    for t in range(2):
        path = tmp_path / f"mp_rank_{t:02d}" / "model_optim_rng.pt"
        file = torch.load(path, weights_only=False)
        for of in file["optimizer"]["state"].values():
            rows = len(of["exp_avg"])
            of |= {"factor": torch.full((rows, rows), float(t)), "sum": 2 * of["exp_avg"], "parts": [torch.ones(2)]}
        torch.save(file, path)
    found = checkpoint.open(tmp_path).normalized()
    for name, tensor in make.cropped(states["exp_avg"]).items():
        kept = found["optim"]["state"][name]
        assert kept["sum"][...].equal(2 * tensor), name
        assert ("factor" in kept) is ("parts" in kept) is ("layernorm" in name), name
    lost = r"optimizer states are not read: each rank .*: 14 \('embedding.word_embeddings.weight.factor', "
    assert any(re.match(lost, note) for note in found.notes)


@pytest.mark.parametrize(("one", "other"), [("mp_rank_00_000", "mp_rank_01_000"), ("mp_rank_00_000", "mp_rank_00_001")])
def test_files_that_changed_places(one: str, other: str, tmp_path: Path) -> None:
    """Nothing but the rank that the program noted says that a rank's shards are not those of its folder."""
    save(tmp_path, Shape(), tp=2, pp=2, vpp=1, ep=1, flat=False)
    (tmp_path / one).rename(tmp_path / "x")
    (tmp_path / other).rename(tmp_path / one)
    (tmp_path / "x").rename(tmp_path / other)
    with pytest.raises(CorruptCheckpointError, match=rf"{one} was written by rank \d, and {other} by rank 0, so these"):
        checkpoint.open(tmp_path)
    assert not verify(tmp_path).ok


def test_files_of_a_tool_that_notes_one_rank_for_all(tmp_path: Path) -> None:
    save(tmp_path, Shape(), tp=2, pp=2, vpp=1, ep=1, flat=False)
    for path in tmp_path.glob("*/*.pt"):
        file = torch.load(path, weights_only=False)
        file["args"].rank = 0
        torch.save(file, path)
    assert checkpoint.open(tmp_path).canonical()


def test_a_missing_rank(tmp_path: Path) -> None:
    save(tmp_path, Shape(), tp=2, pp=2, vpp=1, ep=1, flat=False)
    for file in (tmp_path / "mp_rank_01_001").iterdir():
        file.unlink()
    with pytest.raises(CorruptCheckpointError, match="tensor parallel rank 1, pipeline stage 1"):
        checkpoint.open(tmp_path)


def test_names_that_no_rule_knows(tmp_path: Path) -> None:
    save(tmp_path, Shape(), tp=2, pp=1, vpp=1, ep=1, flat=False)
    for t in range(2):
        path = tmp_path / f"mp_rank_{t:02d}" / "model_optim_rng.pt"
        file = torch.load(path, weights_only=False)
        file["model"]["decoder.odd"] = torch.full((2, 3), float(t))
        file["optimizer"] = None
        torch.save(file, path)
    opened = checkpoint.open(tmp_path)
    with pytest.raises(NormalizationError, match=r"normalized\(hints=\{'tp_dims': \{'decoder.odd': 0\}\}\)"):
        opened.normalized()
    assert opened.normalized({"tp_dims": {"*.odd": 1}})["model"]["decoder.odd"].shape == (2, 6)
    assert opened.normalized({"tp_dims": {"decoder.odd": None}})["model"]["decoder.odd"].shape == (2, 3)
    with pytest.raises(NormalizationError, match=r"must give dims >= 0 or None, got -1 for 'decoder\.odd'"):
        opened.normalized({"tp_dims": {"decoder.odd": -1}})


@pytest.mark.parametrize(("pp", "vpp", "offsets"), [(2, 1, {1: 1}), (2, 1, {1: 0}), (2, 2, {0: 0, 1: 1})])
def test_offsets_that_give_a_layer_to_two_stages(pp: int, vpp: int, offsets: Any, tmp_path: Path) -> None:
    """One of them would be lost in silence."""
    save(tmp_path, Shape(layers=4), tp=1, pp=pp, vpp=vpp, ep=1, flat=False)
    opened = checkpoint.open(tmp_path)
    with pytest.raises(
        NormalizationError, match=r"'decoder\.layers\..*' is in two stages or chunks of .*layer_offsets"
    ):
        opened.normalized({"layer_offsets": offsets})
    if vpp == 1:
        assert len(opened.normalized({"layer_offsets": {0: 0, 1: 2}})["model"]) == len(opened.normalized()["model"])


def test_groups_that_follow_no_rule(tmp_path: Path) -> None:
    """Ids whose states do not fit are not believed; names by id are."""
    shape = Shape(layers=1)
    values, states = save(tmp_path, shape, tp=1, pp=1, vpp=1, ep=1, flat=False)
    path = tmp_path / "mp_rank_00" / "model_optim_rng.pt"
    file = torch.load(path, weights_only=False)
    first, last = file["optimizer"]["param_groups"]
    first["params"], last["params"] = first["params"] + last["params"][-1:], last["params"][:-1]
    torch.save(file, path)
    opened = checkpoint.open(tmp_path)
    with pytest.raises(NormalizationError, match="param_names"):
        opened.normalized()
    big = [n for n in values if values[n].ndim > 1]
    names = [*big, *(n for n in values if values[n].ndim == 1)]
    found = opened.normalized({"param_names": {"mp_rank_00": names}})
    wanted = make.cropped(states["exp_avg"])
    assert all(found["optim"]["state"][n]["exp_avg"][...].equal(wanted[n]) for n in names)
    assert "decoder.final_layernorm.weight" in found["optim"]["param_groups"][0]["params"]


def test_chunks_whose_parameters_have_the_same_names(tmp_path: Path) -> None:
    """Names by id do not say of which chunk they are: states of one would be lost, and the other have them."""
    save(tmp_path, Shape(layers=2), tp=1, pp=1, vpp=2, ep=1, flat=False)
    path = tmp_path / "mp_rank_00" / "model_optim_rng.pt"
    file = torch.load(path, weights_only=False)
    first, last = file["optimizer"]["param_groups"]
    first["params"], last["params"] = first["params"] + last["params"], []
    torch.save(file, path)
    held = [(name, value) for v in range(2) for name, value in file[f"model{v}"].items() if value is not None]
    names = [name for small in (False, True) for name, value in held if (value.ndim == 1) is small]
    assert len(set(names)) < len(names)
    with pytest.raises(NormalizationError, match="do not determine which parameter"):
        checkpoint.open(tmp_path).normalized({"param_names": {"mp_rank_00": names}})


@pytest.mark.parametrize("ep", [1, 2])
def test_a_rank_without_its_distributed_optimizer(tmp_path: Path, ep: int) -> None:
    """The states of its shards would be missing in silence."""
    save(tmp_path, Shape(layers=2, experts=4 if ep > 1 else 0), tp=2, pp=1, vpp=1, ep=ep, flat=True)
    lost = sorted(tmp_path.glob("mp_rank_01*"))[-1]
    (lost / "distrib_optim.pt").unlink()
    with pytest.raises(CorruptCheckpointError, match=rf"{lost.name} has no file of the distributed optimizer"):
        checkpoint.open(tmp_path)


def test_experts_in_one_matrix_are_not_lost(tmp_path: Path) -> None:
    """Each expert rank has other ones under the same name: to take those of the first would lose the rest."""
    for e in range(2):
        folder = tmp_path / f"mp_rank_00_{e:03d}"
        folder.mkdir()
        model = {"decoder.layers.0.mlp.experts.weight1": torch.full((4, 6), float(e))}
        args = argparse.Namespace(tensor_model_parallel_size=1, pipeline_model_parallel_size=1)
        torch.save({"args": args, "checkpoint_version": 3.0, "model": model}, folder / "model_optim_rng.pt")
    with pytest.raises(FormatError, match="all experts of an expert parallel rank in one"):
        checkpoint.open(tmp_path).normalized()
