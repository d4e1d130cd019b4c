"""Megatron-core's layouts, made from numbers by its rules, come back as the numbers, whatever the parallelism."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint

from reshard import checkpoint
from reshard.errors import CorruptCheckpointError, NormalizationError
from reshard.formats.canonical import Canonical, Hints
from reshard.formats.megatron.files import MegatronFacts
from reshard.formats.megatron.names import Grid, chunk_names, orders, tp_dim
from reshard.formats.megatron.optimizer import place_joined, place_params
from reshard.formats.normalize import normalize
from reshard.formats.torch_save.reader import read_torch_file
from reshard.storage.opening import open_storage
from reshard.stored.contents import Contents
from reshard.stored.source import Files
from reshard.stored.tensor import LazyTensor, StoredTensor
from tests.reshard.formats.canonical import megatron_maker as make
from tests.reshard.formats.canonical.megatron_maker import Shape
from tests.torch_releases import save_alone


def details(made: Contents) -> MegatronFacts:
    assert isinstance(made.facts, MegatronFacts)
    return made.facts


def common_of(made: Contents) -> dict[str, Any]:
    common = details(made).common
    assert isinstance(common, dict)
    return common


def check(found: Mapping[str, StoredTensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        lazy = LazyTensor(found[name])
        assert lazy.dtype == tensor.dtype, name
        assert lazy[...].equal(tensor), name
        assert lazy[1:, ..., 2::3].equal(tensor[1:, ..., 2::3]) if tensor.ndim > 1 else lazy[3:9].equal(tensor[3:9]), (
            name
        )


def check_state(result: Canonical, wanted: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    for state, tensors in wanted.items():
        check({name: states[state] for name, states in result.state.items()}, tensors)


@pytest.mark.parametrize("experts", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_generations_of_names(experts: int, dtype: torch.dtype) -> None:
    shape = Shape(layers=3, experts=experts, dtype=dtype)
    values, moments = make.tensors(shape, 0), make.tensors(shape, 1, torch.float32)
    masters = make.tensors(shape, 2, torch.float32)
    for name_all in (lambda v: make.stacked(shape, v), make.numbered):
        saved = {key: make.stored(key, t, make.rows(t, 3)) for key, t in name_all(values).items()}
        for state, of in (("exp_avg", moments), ("param", masters)):
            keys = {f"optimizer.state.{state}.{key}": t for key, t in name_all(of).items()}
            saved.update({key: make.stored(key, t, make.rows(t, 2)) for key, t in keys.items()})
        extra = make.stored("decoder.layers.mlp.linear_fc1._extra_state", torch.zeros(3, dtype=torch.uint8))
        result = normalize(make.contents({**saved, extra.fqn: extra}, {}))
        check(result.model, make.cropped(values))
        check_state(result, {"exp_avg": make.cropped(moments), "fp32_param": make.cropped(masters)})


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_flattened_cells_of_a_grid(tp: int) -> None:
    """What Megatron-core before 0.14 wrote and later versions refuse to load."""
    shape = Shape(layers=2)
    values, moments = make.tensors(shape, 0), make.tensors(shape, 1)
    saved = {key: make.stored(key, t) for key, t in make.stacked(shape, values).items()}
    original = {}
    for name, tensor in make.stacked(shape, moments).items():
        key = f"optimizer.state.exp_avg.{name}"
        dim = make.cut_dim(name.replace("layer_norm", "layernorm"))
        grid = [1] * tensor.ndim
        stack = name.startswith("decoder.layers.")
        grid[0] = shape.layers if stack else grid[0]
        if dim is not None:
            grid[dim + stack] = 2 * tp if "linear_fc1.weight" in name else tp
        if tensor.ndim == 1:
            saved[key] = make.stored(key, tensor, make.rows(tensor, 3))  # of one dim: no grid
            continue
        saved[key] = make.gridded(key, tensor, grid, cuts=3)
        original[key] = {"nd_reformulated_orig_global_shape": tuple(tensor.shape)}
    result = normalize(make.contents(saved, {}, mcore_data=original))
    check_state(result, {"exp_avg": make.cropped(moments)})


def bucketed(shape: Shape, *, tp: int, pp: int, vpp: int, dp: int, ep: int, bucket_size: int | None) -> Any:
    """A checkpoint with `dp_reshardable` states, with the model, moments and masters that are in it."""
    values = make.tensors(shape, 0)
    states = {"exp_avg": make.tensors(shape, 1, torch.float32), "param": make.tensors(shape, 2, torch.float32)}
    saved = {key: make.stored(key, t) for key, t in make.stacked(shape, values).items()}
    dtype = str(shape.dtype)
    each = shape.layers // (pp * vpp)
    for stage, chunk in itertools.product(range(pp), range(vpp)):
        first = (chunk * pp + stage) * each
        held = {f"decoder.layers.{layer}." for layer in range(first, first + each)}
        names = [n for n, _ in shape.params() if any(n.startswith(front) for front in held)]
        if stage == chunk == 0:
            names = ["embedding.word_embeddings.weight", *names]
        if (stage, chunk) == (pp - 1, vpp - 1):
            names += ["decoder.final_layernorm.weight"] + ([] if shape.tied else ["output_layer.weight"])
            names += ["embedding.word_embeddings.weight"] if shape.tied and pp > 1 else []
        for rank, expert_rank, apart in itertools.product(range(tp), range(ep), (False, True) if ep > 1 else (None,)):
            if apart is False and expert_rank:
                continue  # dense parameters have one optimizer for all expert ranks
            share = shape.experts // ep
            own = {f".local_experts.{e}." for e in range(expert_rank * share, (expert_rank + 1) * share)}
            mine = [n for n in names if apart is None or ("local_experts" in n) == apart]
            mine = [n for n in mine if "local_experts" not in n or any(o in n for o in own)]
            if not mine:
                continue
            local = {n: {k: make.shard(n, of[n], tp, rank, shape.gated) for k, of in states.items()} for n in mine}
            group = rank + tp * (stage if not apart else expert_rank + ep * stage)
            chained = "" if apart is None else f"chained_{int(apart)}."
            front = (
                f"{chained}optimizer.distributed.dp_group_idx_{group}.gbuf_idx_{chunk}.dtype_({dtype}, torch.float32)"
            )
            saved.update(make.buckets(front, mine, local, bucket_size, dp))
    args = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
    }
    return make.contents(saved, args), values, states


GRIDS = [
    {},
    {"tp": 2, "dp": 2},
    {"tp": 4, "dp": 2, "bucket_size": 1500},
    {"pp": 2, "dp": 3},
    {"tp": 2, "pp": 2, "vpp": 2, "bucket_size": 900},
    {"pp": 4, "bucket_size": 1},
]


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_buckets_without_names(grid: dict[str, Any], fused: bool, in_order: bool) -> None:
    """Also where ranks shared the writing, so that the keys are in no order."""
    shape = Shape(fused_norms=fused, dtype=torch.bfloat16 if fused else torch.float32)
    alone = {"tp": 1, "pp": 1, "vpp": 1, "dp": 1, "ep": 1, "bucket_size": None}
    made, values, states = bucketed(shape, **{**alone, **grid})
    if not in_order:
        made = replace(made, tensors=dict(sorted(made.tensors.items())))
    result = normalize(made)
    check(result.model, make.cropped(values))
    check_state(result, {"exp_avg": make.cropped(states["exp_avg"]), "fp32_param": make.cropped(states["param"])})


def test_buckets_of_uneven_stages() -> None:
    """Without the program's arguments, which layers a stage has is asked for."""
    shape = Shape(layers=3, fused_norms=False)
    values, moments = make.tensors(shape, 0), make.tensors(shape, 1, torch.float32)
    saved = {key: make.stored(key, t) for key, t in make.stacked(shape, values).items()}
    for stage, layers in enumerate([(0,), (1, 2)]):
        names = [n for n, _ in shape.params() if any(n.startswith(f"decoder.layers.{layer}.") for layer in layers)]
        ends = ["decoder.final_layernorm.weight", "output_layer.weight"]
        names = [*names, *ends] if stage else ["embedding.word_embeddings.weight", *names]
        front = f"optimizer.distributed.dp_group_idx_{stage}.gbuf_idx_0.dtype_({shape.dtype}, torch.float32)"
        saved.update(make.buckets(front, names, {n: {"exp_avg": moments[n]} for n in names}, None, 1))
    made = make.contents(saved, {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2})
    with pytest.raises(NormalizationError, match=r"3 layers cannot be divided evenly among 2 stages.*layer_offsets"):
        normalize(made)
    with pytest.raises(NormalizationError, match="layer_offsets"):
        normalize(made, {"layer_offsets": {1: 2}})
    check_state(normalize(made, {"layer_offsets": {1: 1}}), {"exp_avg": make.cropped(moments)})


@pytest.mark.parametrize("ep", [1, 2])
def test_buckets_of_experts(ep: int) -> None:
    shape = Shape(layers=2, experts=4, ffn=20)
    made, values, states = bucketed(shape, tp=1, pp=2, vpp=1, dp=2, ep=ep, bucket_size=None)
    result = normalize(made)
    check(result.model, make.cropped(values))
    check_state(result, {"exp_avg": make.cropped(states["exp_avg"]), "fp32_param": make.cropped(states["param"])})


@pytest.mark.parametrize("pp", [1, 2])
def test_buckets_of_tied_embeddings(pp: int) -> None:
    made, _, states = bucketed(Shape(tied=True), tp=2, pp=pp, vpp=1, dp=1, ep=1, bucket_size=None)
    check_state(normalize(made), {"exp_avg": make.cropped(states["exp_avg"])})


def gathered(made: Contents, folder: Path) -> Contents:
    """The same checkpoint as older versions wrote it: the buckets of a buffer joined, as tensors inside objects."""
    rest, objects = dict(made.tensors), {}
    inside: dict[str, Any] = {}
    for key in [key for key in made.tensors if ".gbuf_idx_" in key]:
        front, number, state = re.fullmatch(r"(.*)\.gbuf_idx_(\d+)\..*\.(\w+)", key).groups()  # type: ignore[union-attr]
        flats = inside.setdefault(f"{front}.param_state/shard_0_1", {"buckets_coalesced": True}).setdefault(
            int(number), {(torch.float32, torch.float32): {}}
        )
        flat = LazyTensor(rest.pop(key))[...]
        known = flats[torch.float32, torch.float32].get(state, flat[:0])
        flats[torch.float32, torch.float32][state] = torch.cat([known, flat])
    for i, (key, value) in enumerate(inside.items()):
        torch.save([value], folder / f"{i}.pt")
        objects[key] = folder / f"{i}.pt"
    files = Files(open_storage(str(folder)))
    facts = replace(details(made), object_file=lambda key: read_torch_file(files[objects[key].name]))
    return replace(made, tensors=rest, objects=objects, facts=facts)


@pytest.mark.parametrize("grid", [*GRIDS[:2], {"pp": 2, "tied": True}, {"tp": 2, "pp": 2, "vpp": 2}], ids=str)
def test_gathered_buffers(grid: dict[str, Any], tmp_path: Path) -> None:
    alone = {"tp": 1, "pp": 1, "vpp": 1, "dp": 1, "ep": 1, "bucket_size": None}
    tied = grid.get("tied", False)
    given = {**alone, **{key: n for key, n in grid.items() if key != "tied"}}
    made, values, states = bucketed(Shape(tied=tied, hidden=32), **given)
    result = normalize(gathered(made, tmp_path))
    check(result.model, make.cropped(values))
    check_state(result, {"exp_avg": make.cropped(states["exp_avg"]), "fp32_param": make.cropped(states["param"])})


def test_gathered_experts_need_to_be_told_apart(tmp_path: Path) -> None:
    """Whether experts were registered one by one is not in the stacks, but in the program's arguments."""
    made, _, states = bucketed(Shape(layers=1, experts=4, ffn=20), tp=1, pp=1, vpp=1, dp=1, ep=2, bucket_size=None)
    made = gathered(made, tmp_path)
    with pytest.raises(NormalizationError, match="param_order"):
        normalize(made)
    common_of(made)["args"]["moe_grouped_gemm"] = False
    check_state(normalize(made), {"exp_avg": make.cropped(states["exp_avg"])})


def test_buckets_that_were_joined() -> None:
    """A shared embedding comes first in the last stage, and has a bucket of its own; a bucket's padding is left out."""
    params = [("shared", 70), ("b", 24), ("a", 100)]
    places = [[(s.start, s.stop) for s in slots] for slots in place_joined(params, 234, 1000)]
    assert places == [[(0, 70), (70, 94), (134, 234)]]
    places = [[(s.start, s.stop) for s in slots] for slots in place_joined(params, 194, 20)]
    assert places == [[(0, 70), (70, 94), (94, 194)]]
    assert not list(place_joined(params, 200, 20))


def test_a_gate_is_not_assumed() -> None:
    made, values, states = bucketed(Shape(gated=False), tp=2, pp=1, vpp=1, dp=1, ep=1, bucket_size=None)
    result = normalize(made)
    check(result.model, make.cropped(values))
    check_state(result, {"exp_avg": make.cropped(states["exp_avg"])})


@pytest.mark.parametrize("fused_norms", [False, True])
def test_the_order_of_the_file_decides_where_it_is_one_of_megatrons(fused_norms: bool) -> None:
    """So small a model fills its buckets in two orders: a norm and the matrix beside it begin at the same elements."""
    made, values, states = bucketed(
        Shape(hidden=8, fused_norms=fused_norms), tp=1, pp=1, vpp=1, dp=1, ep=1, bucket_size=None
    )
    result = normalize(made)
    check(result.model, make.cropped(values))
    check_state(result, {"exp_avg": make.cropped(states["exp_avg"])})


def test_buckets_that_no_known_order_fills() -> None:
    made, _, _ = bucketed(Shape(), tp=1, pp=1, vpp=1, dp=1, ep=1, bucket_size=None)
    key = next(key for key in made.tensors if key.endswith("bucket_idx_0.exp_avg"))
    for state in ("exp_avg", "param"):
        name = key.replace("exp_avg", state)
        made.tensors[name] = make.stored(name, torch.zeros(1000))
    with pytest.raises(NormalizationError, match="param_order"):
        normalize(made)


def test_a_rank_without_its_states() -> None:
    made, _, _ = bucketed(Shape(), tp=2, pp=1, vpp=1, dp=1, ep=1, bucket_size=None)
    for key in [key for key in made.tensors if "dp_group_idx_1" in key]:
        del made.tensors[key]
    with pytest.raises(CorruptCheckpointError, match="model parallel rank 1"):
        normalize(made)


def test_a_half_without_the_other() -> None:
    shape = Shape(layers=1)
    saved = {key: make.stored(key, t) for key, t in make.numbered(make.tensors(shape, 0)).items()}
    del saved["module.decoder.layers.0.mlp.linear_fc1.weight_v"]
    with pytest.raises(CorruptCheckpointError, match=r"linear_fc1\.weight"):
        normalize(make.contents(saved, {}))


def test_a_vocabulary_of_unknown_size_stays_and_is_told() -> None:
    shape = Shape(layers=1)
    values = make.tensors(shape, 0)
    made = make.contents({k: make.stored(k, t) for k, t in make.stacked(shape, values).items()}, {"vocab_size": None})
    result = normalize(made)
    assert result.model["output_layer.weight"].spec.shape == (make.PADDED, 24)
    assert "vocab_size" in result.notes[0]
    check(normalize(made, {"vocab_size": make.VOCAB}).model, make.cropped(values))


def test_layers_that_predict_several_tokens() -> None:
    """Their norms are whole on every rank, and the projection of embedding and state is cut by rows."""
    hints = Hints(None)
    assert tp_dim("mtp.layers.0.enorm.weight", hints, 2) is None
    assert tp_dim("mtp.layers.0.hnorm.weight", hints, 2) is None
    assert tp_dim("mtp.layers.0.final_layernorm.weight", hints, 2) is None
    assert tp_dim("mtp.layers.0.eh_proj.weight", hints, 2) == 0
    assert tp_dim("mtp.layers.0.transformer_layer.mlp.linear_fc2.weight", hints, 2) == 1


def test_where_layers_that_predict_several_tokens_are_registered() -> None:
    """Behind the decoder of the last stage, which has a copy of the embedding for them."""
    order = [
        "embedding.word_embeddings.weight",
        "decoder.layers.1.input_layernorm.weight",
        "decoder.layers.1.mlp.linear_fc2.weight",
        "decoder.final_layernorm.weight",
        "mtp.layers.0.enorm.weight",
        "mtp.layers.0.hnorm.weight",
        "mtp.layers.0.eh_proj.weight",
        "mtp.layers.0.transformer_layer.input_layernorm.weight",
        "mtp.layers.0.transformer_layer.mlp.linear_fc2.weight",
        "mtp.layers.0.final_layernorm.weight",
        "output_layer.weight",
    ]
    keys = sorted([*order, *(n.replace("layers.1", "layers.0") for n in order if "layers.1" in n)])
    grid = Grid.of({"pipeline_model_parallel_size": 2}, groups=2, experts=None, hints=Hints(None))
    last = chunk_names(keys, grid, 1, 0, 1, 0)
    assert set(last) == set(order)
    assert order in list(orders(last, Hints(None)))
    first = chunk_names(keys, grid, 0, 0, 1, 0)
    assert set(first) == {"embedding.word_embeddings.weight"} | {k for k in keys if "decoder.layers.0" in k}


@pytest.mark.parametrize(
    ("first", "last", "chunks", "expected"),
    [
        (2, None, 1, [[[0, 1]], [[2, 3, 4]], [[5, 6, 7]]]),
        (None, 2, 1, [[[0, 1, 2]], [[3, 4, 5]], [[6, 7]]]),
        # each chunk of the model has some layers of every stage
        (2, 2, 2, [[[0], [4]], [[1, 2], [5, 6]], [[3], [7]]]),
        (None, 4, 2, [[[0], [4]], [[1], [5]], [[2, 3], [6, 7]]]),
    ],
)
def test_layers_of_stages_where_the_first_or_last_has_another_number(
    first: int | None, last: int | None, chunks: int, expected: list[list[list[int]]]
) -> None:
    args = {"pipeline_model_parallel_size": 3, "decoder_first_pipeline_num_layers": first}
    args["decoder_last_pipeline_num_layers"] = last
    grid = Grid.of(args, groups=3, experts=None, hints=Hints(None))
    found = [[list(grid.layers(stage, chunk, chunks, 8)) for chunk in range(chunks)] for stage in range(3)]
    assert found == expected
    with pytest.raises(CorruptCheckpointError, match=r"8 layers cannot be divided among stages of .* in 3 chunks each"):
        grid.layers(0, 0, 3, 8)


def test_places_in_buckets() -> None:
    """Every parameter begins at a multiple of 64, and a bucket that is not full refuses."""
    assert place_params([("b", 24), ("a", 100)], [165]) is None
    slots = place_params([("c", 64), ("b", 24), ("a", 100)], [88, 100])
    assert slots is not None
    assert [(s.bucket, s.start, s.stop) for s in slots] == [(0, 0, 64), (0, 64, 88), (1, 0, 100)]
    assert place_params([("c", 64)], [64, 64]) is None


def test_groups_get_their_parameters_by_the_default_rules() -> None:
    shape = Shape(layers=1)
    values, moments = make.tensors(shape, 0), make.tensors(shape, 1)
    saved = {key: make.stored(key, t) for key, t in make.stacked(shape, values).items()}
    saved.update(
        {
            (key := f"optimizer.state.exp_avg.{name}"): make.stored(key, t)
            for name, t in make.stacked(shape, moments).items()
        }
    )
    made = make.contents(saved, {})
    common_of(made)["optimizer"] = {"param_groups": [{"wd_mult": 1.0, "step": 5}, {"wd_mult": 0.0, "step": 5}]}
    result = normalize(made)
    decay, rest = (set(group["params"]) for group in result.groups)
    assert "output_layer.weight" in decay
    assert rest == {name for name in values if values[name].ndim == 1}
    assert {states["step"] for states in result.state.values()} == {5}


@pytest.mark.parametrize("told", [True, False])
def test_a_learning_rate_of_embeddings_and_output_layer(told: bool) -> None:
    """Newer versions mark its group only as no default: the program's arguments tell which it is, or nothing does."""
    shape = Shape(layers=1)
    values, moments = make.tensors(shape, 0), make.tensors(shape, 1)
    saved = {key: make.stored(key, t) for key, t in make.stacked(shape, values).items()}
    states = {f"optimizer.state.exp_avg.{name}": t for name, t in make.stacked(shape, moments).items()}
    saved.update({key: make.stored(key, t) for key, t in states.items()})
    made = make.contents(saved, {"decoupled_lr": 0.5} if told else {})
    common = {"is_decoupled_lr": False, "step": 5}
    common_of(made)["optimizer"] = {
        "param_groups": [
            {"wd_mult": 1.0, "max_lr": 0.1, "default_config": True, **common},
            {"wd_mult": 1.0, "max_lr": 0.5, "default_config": False, **common},
            {"wd_mult": 0.0, "max_lr": 0.1, "default_config": True, **common},
        ]
    }
    result = normalize(made)
    own = {"embedding.word_embeddings.weight", "output_layer.weight"}
    assert set(result.groups[1]["params"]) == (own if told else set())
    assert bool(result.notes) != told
    assert {of["step"] for of in result.state.values()} == {5}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_description_is_missing(tmp_path: Path) -> None:
    """All tensors are there without it, so that it is told, and no more."""
    folder = tmp_path / "iter_0000002"
    save_alone({"w": torch.ones(3)}, checkpoint_id=folder)
    torch.save({"iteration": 2}, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "common_backend": "torch"}')
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    assert checkpoint.open(tmp_path).warnings == ()
    (folder / "metadata.json").unlink()

    opened = checkpoint.open(tmp_path)

    assert opened.format == "megatron"
    assert opened["w"][...].tolist() == [1, 1, 1]
    assert opened.objects["common.iteration"] == 2
    (warning,) = opened.warnings
    assert warning.startswith("iter_0000002/metadata.json is missing")
    beside = checkpoint.open(folder)  # its common.pt, beside .metadata, says as much without the folder above
    assert beside.format == "megatron"
    assert beside.warnings[0].startswith("metadata.json is missing")
