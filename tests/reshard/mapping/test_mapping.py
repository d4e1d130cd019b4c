"""Mappings: what becomes of names, shapes, optimizer states, settings and ties; and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from planners.geometry.layout import TensorSpec
from planners.geometry.topologies import Topology
from planners.plans.plan import verify
from reshard.errors import KeyMismatchError, NormalizationError, ReshardError
from reshard.mapping import (
    Cast,
    Concat,
    Dequantize,
    Drop,
    Mapping,
    Mxfp4,
    Offset,
    Rename,
    Reshape,
    Resize,
    Rope,
    Rule,
    Split,
    Stack,
    Transpose,
    Unstack,
)
from reshard.mapping.rules import Pattern, sites


def whole(checkpoint: reshard.Checkpoint) -> dict[str, torch.Tensor]:
    return {name: tensor[...] for name, tensor in checkpoint.items()}


def opened(state: Any, path: Path) -> reshard.Checkpoint:
    reshard.save(state, path)
    return reshard.open(path)


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


@pytest.mark.parametrize(
    ("pattern", "name", "words"),
    [
        ("layers.{i}.w", "layers.3.w", {"i": "3"}),
        ("layers.{i}.w", "layers.3.4.w", None),  # a word is one part
        ("{l+}.w", "layers.3.w", {"l": "layers.3"}),
        ("a.weight{e}", "a.weight12", {"e": "12"}),
        ("a.w", "a_w", None),  # a dot is a dot
        ("a.w", "b.a.w", None),
    ],
)
def test_patterns(pattern: str, name: str, words: dict[str, str] | None) -> None:
    assert Pattern(pattern).match(name) == words
    if words is not None:
        assert Pattern(pattern).fill(words) == name


@pytest.mark.parametrize("text", ["a.{", "{i}.{i}", "{1}.a"])
def test_bad_patterns(text: str) -> None:
    with pytest.raises(NormalizationError):
        Pattern(text)


@pytest.mark.parametrize(
    "key",
    [
        "layers.0.w",
        "model.layers.0.w",
        "optim.state.layers.0.w.exp_avg",
        "optimizer.state.exp_avg.layers.0.w",
        "optimizer.param_groups.layers.0.w.lr",
        "optimizer.state.fp32_param.module.layers.0.w",
    ],
)
def test_a_name_is_found_within_its_key(key: str) -> None:
    [site] = [site for site in sites(key) if site.name == "layers.0.w"]

    assert site.key("new") == key.replace("layers.0.w", "new")


W = numbers(12, 4)
RULES: list[tuple[Rule, dict[str, torch.Tensor], dict[str, torch.Tensor]]] = [
    (Rename("a.{x}", "b.{x}"), {"a.w": W}, {"b.w": W}),
    (
        Concat(["q", "k", "v"], "qkv", parts=(2, 1, 1)),
        {"q": W[:6], "k": W[6:9], "v": W[9:]},
        {"qkv": W},
    ),
    (  # query groups: q q k v, q q k v
        Concat(["q", "k"], "qk", parts=(2, 1), groups=2),
        {"q": W[:8], "k": W[8:]},
        {"qk": torch.cat([W[:4], W[8:10], W[4:8], W[10:]])},
    ),
    (Split("gu", ["g", "u"], (1, 1), dim=1), {"gu": W}, {"g": W[:, :2], "u": W[:, 2:]}),
    (Split("gu", ["g", "u"], (1, 1), groups=2, dim=1), {"gu": W}, {"g": W[:, ::2], "u": W[:, 1::2]}),
    (Stack("e.{e}.w", "w", over="e"), {"e.1.w": W[6:], "e.0.w": W[:6]}, {"w": torch.stack([W[:6], W[6:]])}),
    (Unstack("w", "e.{e}", over="e", dim=1), {"w": W}, {f"e.{i}": W[:, i] for i in range(4)}),
    (Transpose("w", "t"), {"w": W}, {"t": W.T}),
    (Transpose("w", "t", (2, 0, 1)), {"w": W.reshape(3, 4, 4)}, {"t": W.reshape(3, 4, 4).permute(2, 0, 1)}),
    (Reshape("w", "r", (-1, 4), (-1, 3, 2, 2)), {"w": W}, {"r": W.reshape(4, 3, 2, 2)}),
    (Reshape("k", "q", (4, 3, 4), (4, -1)), {"k": W.reshape(4, 3, 4)}, {"q": W.reshape(4, 12)}),
    (Resize("w", "p", old=12, new=14), {"w": W}, {"p": torch.cat([W, torch.zeros(2, 4)])}),
    (Rope("w", "r", 6, "halves"), {"w": W}, {"r": W.view(2, 3, 2, 4).transpose(1, 2).reshape(12, 4)}),
    (Rope("w", "r", 6, "pairs"), {"w": W}, {"r": W.view(2, 2, 3, 4).transpose(1, 2).reshape(12, 4)}),
    (Rope("b", "r", 4, "pairs"), {"b": W[:, 0]}, {"r": W[:, 0].view(3, 2, 2).transpose(1, 2).reshape(12)}),
]


@pytest.mark.parametrize(
    ("rule", "given", "wanted"), RULES, ids=lambda v: type(v).__name__ if hasattr(v, "build") else ""
)
def test_each_rule_and_its_inverse(rule: Rule, given: dict[str, Any], wanted: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = opened({"model": given}, tmp_path / "c")

    made = checkpoint.mapped(Mapping([rule]))

    assert {name.removeprefix("model.") for name in made} == set(wanted)
    assert all(torch.equal(made[f"model.{name}"][...], tensor) for name, tensor in wanted.items())
    back = made.mapped(Mapping([rule]).inverse())
    assert whole(back).keys() == whole(checkpoint).keys()
    assert all(torch.equal(back[name][...], tensor[...]) for name, tensor in checkpoint.items())


def test_nothing_is_read_that_is_not_asked_for(tmp_path: Path) -> None:
    """A row of a fused tensor is read out of one of the parts, by its own bytes."""
    checkpoint = opened({"q": torch.randn(400, 50), "k": torch.randn(200, 50)}, tmp_path / "c")
    made = checkpoint.mapped(Mapping([Concat(["q", "k"], "qk", parts=(2, 1))]))

    target = {"qk": torch.zeros(600, 50)}
    assert torch.equal(made["qk"][399:402], torch.cat([checkpoint["q"][399:], checkpoint["k"][:2]]))
    report = reshard.load(target, made)
    assert report.bytes_needed == 600 * 50 * 4


MODEL = {"a.q": W[:8], "a.k": W[8:], "norm": torch.ones(4)}
FUSE = Mapping([Concat(["a.q", "a.k"], "a.qk", parts=(2, 1)), Rename("norm", "n")])


def state_of(steps: tuple[float, float]) -> dict[str, Any]:
    states = {
        name: {"exp_avg": tensor * 2, "step": torch.tensor(steps[i]) if i < 2 else torch.tensor(9.0)}
        for i, (name, tensor) in enumerate(MODEL.items())
    }
    return {
        "model": MODEL,
        "optim": {"state": states, "param_groups": [{"lr": 0.1, "params": list(MODEL)}]},
        "step": 4,
    }


def test_optimizer_states_settings_and_lists_go_along(tmp_path: Path) -> None:
    made = opened(state_of((5.0, 5.0)), tmp_path / "c").mapped(FUSE)

    assert set(made) == {
        "model.a.qk", "model.n", "optim.state.a.qk.exp_avg", "optim.state.a.qk.step",
        "optim.state.n.exp_avg", "optim.state.n.step",
    }  # fmt: skip
    assert torch.equal(made["optim.state.a.qk.exp_avg"][...], W * 2)
    assert made["optim.state.a.qk.step"][...] == 5
    nested = made.nested()
    assert nested["optim"]["param_groups"] == [{"lr": 0.1, "params": ["a.qk", "n"]}]
    assert set(nested["optim"]["state"]) == {"a.qk", "n"}
    assert nested["step"] == 4
    back = made.mapped(FUSE.inverse())
    assert reshard.compare(back, tmp_path / "c").ok


def test_steps_that_differ_cannot_become_one(tmp_path: Path) -> None:
    made = opened(state_of((5.0, 6.0)), tmp_path / "c").mapped(FUSE)

    with pytest.raises(KeyMismatchError, match="not equal numbers") as caught:
        made["optim.state.a.qk.step"]
    assert "'optim.state.a.q.step' (5.0) and 'optim.state.a.k.step' (6.0) cannot become one value" in str(caught.value)
    assert "load without the optimizer" in str(caught.value)


@pytest.mark.parametrize(
    "rule", [Transpose("w", "v"), Rope("w", "v", 2, "halves"), Unstack("w", "v.{i}", over="i")], ids=str
)
def test_states_of_rows_do_not_go_along_where_elements_move(rule: Rule, tmp_path: Path) -> None:
    """Adafactor has one value for each row, and one for each column: those of other rows are others."""
    states = {"row_var": numbers(4, 1), "col_var": numbers(1, 4), "step": torch.tensor(3.0)}
    checkpoint = opened({"model": {"w": numbers(4, 4)}, "optim": {"state": {"w": states}}}, tmp_path / "c")

    with pytest.raises(NormalizationError, match=r"_var' has the shape .*, not that of its parameter.*Drop\('optim"):
        whole(checkpoint.mapped(Mapping([rule])))
    with pytest.raises(NormalizationError, match="not that of its parameter"):
        Mapping([rule]).views({name: tensor.stored.spec for name, tensor in checkpoint.items()})

    drops = [Drop(f"optim.state.w.{name}") for name in ("row_var", "col_var")]
    made = checkpoint.mapped(Mapping([*drops, rule]))
    assert not any("_var" in name for name in made)
    assert next(made[name][...] for name in made if name.endswith(".step")) == 3
    renamed = checkpoint.mapped(Mapping([Rename("w", "v")]))
    assert torch.equal(renamed["optim.state.v.row_var"][...], numbers(4, 1))


@pytest.mark.parametrize("model", [{"model": {"w": W}}, {}], ids=["model", "no model"])
def test_numbered_parts_take_settings_along(model: dict[str, Any], tmp_path: Path) -> None:
    """Objects belong to each of the experts that a stack is taken apart into; a state says how many these are, too."""
    groups = [{"params": ["w"]}]
    state = {**model, "optim": {"state": {"w": {"step": 3, "exp_avg": W}}, "param_groups": groups}}

    made = opened(state, tmp_path / "c").mapped(Mapping([Unstack("w", "e.{e}", over="e")]))

    assert [made.objects[f"optim.state.e.{i}.step"] for i in range(12)] == [3] * 12
    assert made.nested()["optim"]["param_groups"][0]["params"] == [f"e.{i}" for i in range(12)]
    assert torch.equal(made["optim.state.e.7.exp_avg"][...], W[7])


def test_tied_tensors_stay_tied(tmp_path: Path) -> None:
    made = opened({"embed": W, "head": W, "x": W + 1}, tmp_path / "c").mapped(Mapping([Rename("{n+}", "m.{n+}")]))

    assert dict(made.aliases) == {"m.head": "m.embed"}
    assert torch.equal(made["m.head"][...], W)


@pytest.mark.parametrize(("rows", "aliases"), [(14, {"m.head": "m.embed"}), (15, {})])
def test_tied_tensors_that_change_alike_stay_tied(rows: int, aliases: dict[str, str], tmp_path: Path) -> None:
    """As the embedding and the output layer when a vocabulary is padded."""
    rules = [Resize("embed", "m.embed", 12, 14), Resize("head", "m.head", 12, rows)]

    made = opened({"embed": W, "head": W}, tmp_path / "c").mapped(Mapping(rules))

    assert dict(made.aliases) == aliases
    assert sorted([*made, *made.aliases]) == ["m.embed", "m.head"]
    assert torch.equal(made["m.head"][...], torch.cat([W, torch.zeros(rows - 12, *W.shape[1:])]))


def test_a_rename_keeps_the_saved_layout(tmp_path: Path) -> None:
    checkpoint = opened({"a": W}, tmp_path / "c")

    made = checkpoint.mapped(Mapping([Rename("a", "b")]))

    assert made.layout["b"].form == checkpoint.layout["a"].form


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([Concat(["a.q", "a.x"], "qx")], "'model.a.x' is missing: it belongs together with 'model.a.q' in 'model.qx'"),
        ([Rename("norm", "a.q")], "would be called 'model.a.q'"),
        ([Stack("a.{e}x", "s", over="e")], None),
    ],
)
def test_what_does_not_fit_is_named(rules: list[Rule], message: str | None, tmp_path: Path) -> None:
    checkpoint = opened({"model": MODEL}, tmp_path / "c")

    if message is None:
        assert set(checkpoint.mapped(Mapping(rules))) == set(checkpoint)  # nothing is numbered so: all stays
        return
    with pytest.raises(KeyMismatchError, match=message):
        checkpoint.mapped(Mapping(rules))


def test_a_hole_in_the_numbers_is_named(tmp_path: Path) -> None:
    checkpoint = opened({"e.0.w": W, "e.2.w": W}, tmp_path / "c")

    with pytest.raises(KeyMismatchError, match=r"'e\.1\.w' is missing"):
        checkpoint.mapped(Mapping([Stack("e.{e}.w", "w", over="e")]))


def test_billions_of_holes_take_no_time(tmp_path: Path) -> None:
    checkpoint = opened({"e.0.w": W, "e.3000000000.w": W}, tmp_path / "c")

    with pytest.raises(KeyMismatchError, match=r"'e\.1\.w' is missing"):
        checkpoint.mapped(Mapping([Stack("e.{e}.w", "w", over="e")]))


def test_parts_of_a_concat_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Its inverse would divide the tensor elsewhere."""
    made = opened({"a": W[:8], "b": W[8:]}, tmp_path / "c").mapped(Mapping([Concat(["a", "b"], "c", parts=(1, 1))]))

    with pytest.raises(NormalizationError, match=r"sizes \[8, 4\] of dim 0 are not in proportion to parts \(1, 1\)"):
        made["c"]


def test_shapes_that_do_not_fit_name_the_tensor(tmp_path: Path) -> None:
    made = opened({"w": W}, tmp_path / "c").mapped(Mapping([Rope("w", "r", 10, "pairs")]))

    with pytest.raises(NormalizationError, match=r"Rope does not fit 'w' \[12, 4\]: dim 0 of 12"):
        made["r"]


@pytest.mark.parametrize(
    "rule",
    [Drop("a"), Cast("a", "bfloat16"), Dequantize(), Mxfp4(), Concat(["a", "b"], "c")],
    ids=lambda r: type(r).__name__,
)
def test_what_cannot_be_undone_says_so(rule: Rule) -> None:
    with pytest.raises(NormalizationError):
        Mapping([rule]).inverse()


def test_cast_is_computed_piece_by_piece(tmp_path: Path) -> None:
    """Also in strided slices, and of tensors that were mapped before."""
    values = torch.randn(30, 7)
    checkpoint = opened({"w": values, "n": torch.arange(3), "s": torch.tensor(1.5)}, tmp_path / "c")

    made = checkpoint.mapped(Mapping([Transpose("w", "w")]) | Mapping([Cast("{n+}", "bfloat16", old="float32")]))

    assert made["w"].dtype == torch.bfloat16
    assert torch.equal(made["w"][...], values.T.bfloat16())
    assert torch.equal(made["w"][1:6:2, 3:29:5], values.T.bfloat16()[1:6:2, 3:29:5])
    assert made["n"].dtype == torch.int64
    assert made["s"].dtype == torch.float32  # numbers such as steps keep their precision
    assert made.mapped(Mapping([Cast("{n+}", "float32", old="bfloat16")]))["w"].dtype == torch.float32


@pytest.mark.parametrize("dtype", ["int8", "bool", "int64"])
def test_floating_point_values_do_not_become_integers(tmp_path: Path, dtype: str) -> None:
    checkpoint = opened({"w": torch.rand(4, 3), "n": torch.arange(3)}, tmp_path / "c")

    with pytest.raises(NormalizationError, match=f"'w' of float32 cannot become {dtype}"):
        checkpoint.mapped(Mapping([Cast("{n+}", dtype)]))["w"]


@pytest.mark.parametrize(
    ("source", "dtype"),
    [
        ("float32", "float4_e2m1fn_x2"),
        ("float4_e2m1fn_x2", "bfloat16"),
        ("float32", "float8_e8m0fnu"),
        ("float4_e2m1fn_x2", "float8_e8m0fnu"),
    ],
)
def test_dtypes_that_torch_does_not_convert(tmp_path: Path, source: str, dtype: str) -> None:
    """Torch raises NotImplementedError for pairs of numbers, and makes 1.0 of -1.0 in float8_e8m0fnu."""
    if not (hasattr(torch, source) and hasattr(torch, dtype)):
        pytest.skip("this torch does not have the dtypes")
    values = torch.zeros(8, dtype=torch.uint8).view(getattr(torch, source))
    checkpoint = opened({"w": values, "s": torch.tensor(2.0)}, tmp_path / "c")

    with pytest.raises(NormalizationError, match=f"'w' of {source} cannot become {dtype}"):
        checkpoint.mapped(Mapping([Cast("{n+}", dtype)]))["w"]
    kept = checkpoint.mapped(Mapping([Cast("{n+}", source)]))["w"]
    assert kept.dtype == values.dtype
    to = getattr(torch, dtype)
    target = {"w": torch.zeros(len(values) * to.itemsize, dtype=torch.uint8).view(to)}
    with pytest.raises(KeyMismatchError, match=rf"w: saved as {source}, but the target is {dtype} \("):
        reshard.load(target, tmp_path / "c", strict="subset", dtype_policy="cast")


@pytest.mark.parametrize("dtype", ["float4_e2m1fn_x2", "float8_e8m0fnu"])
def test_dtypes_that_nothing_is_computed_in(tmp_path: Path, dtype: str) -> None:
    """Rows of zeros, sums, and products had another value, or raised torch's error."""
    if not hasattr(torch, dtype):
        pytest.skip("this torch does not have the dtype")
    values = torch.zeros(4, 2, dtype=torch.uint8).view(getattr(torch, dtype))
    checkpoint = opened({"w": values, "s": torch.ones(1, 1)}, tmp_path / "c")
    with pytest.raises(NormalizationError, match=f"'w' of {dtype} cannot be filled with 0"):
        checkpoint.mapped(Mapping([Resize("w", "w", 4, 6)]))["w"]
    if "_x2" in dtype:
        for rule in (Offset("w", "w", 1.0), Dequantize("w", "s", "w", block=(4, 2))):
            with pytest.raises(NormalizationError, match=f"'w' of {dtype} cannot become float"):
                checkpoint.mapped(Mapping([rule]))["w"]


@pytest.mark.parametrize("dtype", ["int8", "bool", "float8_e8m0fnu"])
def test_dequantized_weights_are_floating_point_numbers(tmp_path: Path, dtype: str) -> None:
    """They were truncated, as are those that Cast refuses."""
    made = {"w": torch.ones(2, 2), "s": torch.full((1, 1), 0.3)}
    packed = {"b": torch.zeros(2, 1, 2, dtype=torch.uint8), "e": torch.zeros(2, 1, dtype=torch.uint8)}
    checkpoint = opened(made | packed, tmp_path / "c")
    for rule in (Dequantize("w", "s", "w", dtype=dtype), Mxfp4("b", "e", "w2", dtype=dtype)):
        mapped = checkpoint.mapped(Mapping([rule]))
        with pytest.raises(NormalizationError, match=f"cannot become {dtype}"):
            mapped[rule.targets[0].text]


def test_block_quantized_weights_are_dequantized(tmp_path: Path) -> None:
    """As DeepSeek stores them: fp8 values, a scale for each block; edges are smaller blocks."""
    values = torch.randn(20, 13).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2)
    plain = torch.randn(4, 4, dtype=torch.bfloat16)
    state = {"a.weight": values, "a.weight_scale_inv": scales, "b.weight": plain}
    wide = scales.repeat_interleave(8, 0)[:20].repeat_interleave(8, 1)[:, :13]
    wanted = (values.float() * wide).bfloat16()

    made = opened(state, tmp_path / "c").mapped(Mapping([Dequantize(block=(8, 8))]))

    assert set(made) == {"a.weight", "b.weight"}
    assert torch.equal(made["a.weight"][...], wanted)
    assert torch.equal(made["a.weight"][3:19:3, 7:], wanted[3:19:3, 7:])
    assert torch.equal(made["b.weight"][...], plain)
    with pytest.raises(NormalizationError, match="needs scales of shape"):
        opened(state, tmp_path / "d").mapped(Mapping([Dequantize(block=(4, 8))]))["a.weight"]


def test_load_through_a_mapping(tmp_path: Path) -> None:
    reshard.save(state_of((5.0, 5.0)), tmp_path / "c")
    target = {"model": {"a.qk": torch.zeros(12, 4), "n": torch.zeros(4)}}

    report = reshard.load(target, tmp_path / "c", mapping=FUSE, strict={"model.*": "strict", "*": "partial"})

    assert torch.equal(target["model"]["a.qk"], W)
    assert {"model.a.qk", "model.n"} == set(report.loaded)


def test_every_error_is_ours() -> None:
    assert issubclass(NormalizationError, ReshardError)
    with pytest.raises(NormalizationError, match="as many parts"):
        Concat(["a", "b"], "c", parts=(1,))
    with pytest.raises(NormalizationError, match=r"\{e\} must be in"):
        Stack("a", "b", over="e")
    with pytest.raises(
        NormalizationError, match=r"^Rename\('a' -> 'b\.\{i\}'\): no source defines \{i\} in 'b\.\{i\}'$"
    ):
        Rename("a", "b.{i}")


def test_a_rank_reads_its_slice_of_a_fused_projection_by_byte_range(tmp_path: Path) -> None:
    """q, k and v are saved apart by rows over three ranks; each of two tensor-parallel ranks reads its query groups of
    the fused one: half of the bytes, no element twice."""
    torch.manual_seed(0)
    parts = {"q": torch.randn(48, 16), "k": torch.randn(12, 16), "v": torch.randn(12, 16)}
    reshard.save(parts, tmp_path / "whole")
    reshard.convert(tmp_path / "whole", tmp_path / "c", onto=Topology.parse("dp=3", {"*": "S(0)"}))
    fuse = Mapping([Concat(["q", "k", "v"], "qkv", parts=(4, 1, 1), groups=4)])
    made = reshard.open(tmp_path / "c").mapped(fuse)

    plan = reshard.plan(made, Topology.parse("tp=2", {"*": "S(0)"}))

    assert verify(plan).ok
    assert plan.rank_bytes().tolist() == [36 * 16 * 4] * 2
    groups = [parts[x].chunk(4) for x in "qkv"]
    wanted = torch.cat([part[g] for g in range(4) for part in groups])
    assert torch.equal(made["qkv"][36:], wanted[36:])
    views = fuse.views({name: TensorSpec(name, tuple(t.shape), "float32") for name, t in parts.items()})
    arrays = {name: tensor.numpy() for name, tensor in parts.items()}
    assert torch.equal(torch.from_numpy(views["qkv"].apply(arrays)), wanted)


EXPERTS = {f"e.{i}.w": numbers(2, 3) + i for i in range(4)}


def with_states(of: tuple[int, ...], steps: tuple[float, ...] | None = None) -> dict[str, Any]:
    """Experts of which only some have an optimizer's states."""
    steps = steps or (7.0,) * len(of)
    states = {
        f"e.{i}.w": {"exp_avg": EXPERTS[f"e.{i}.w"] * 10, "step": torch.tensor(step), "lr": 0.5}
        for i, step in zip(of, steps, strict=True)
    }
    return {"model": EXPERTS, "optim": {"state": states, "param_groups": [{"params": list(EXPERTS)}]}}


@pytest.mark.parametrize("cold", [0, 2, 3])
def test_states_that_some_experts_do_not_have(cold: int, tmp_path: Path) -> None:
    """The last expert, too: how many there are is known from the parameters."""
    checkpoint = opened(with_states(tuple(i for i in range(4) if i != cold)), tmp_path / "c")

    with pytest.raises(KeyMismatchError, match=rf"'optim.state.e.{cold}.w.\w+' is missing.*fill=0"):
        checkpoint.mapped(Mapping([Stack("e.{e}.w", "w", over="e")]))

    mapping = Mapping([Stack("e.{e}.w", "w", over="e", fill=0)])
    made = checkpoint.mapped(mapping)
    wanted = torch.stack([EXPERTS[f"e.{i}.w"] * 10 * (i != cold) for i in range(4)])
    assert torch.equal(made["optim.state.w.exp_avg"][...], wanted)
    assert torch.equal(made["optim.state.w.exp_avg"][1:, 0, 1:], wanted[1:, 0, 1:])
    assert made["optim.state.w.step"][...] == 7
    assert made.objects["optim.state.w.lr"] == 0.5
    assert any(
        f"'optim.state.w.exp_avg': 1 of 4 have no such state, the first is number {cold}" in w for w in made.warnings
    )
    back = made.mapped(mapping.inverse())
    assert mapping.inverse().inverse() == mapping
    assert torch.equal(back[f"optim.state.e.{cold}.w.exp_avg"][...], torch.zeros(2, 3))
    assert all(torch.equal(back[f"model.{name}"][...], tensor) for name, tensor in EXPERTS.items())


def test_states_that_no_expert_has_stay_away(tmp_path: Path) -> None:
    state = {"model": EXPERTS, "optim": {"state": {}, "param_groups": [{"params": list(EXPERTS)}]}}

    made = opened(state, tmp_path / "c").mapped(Mapping([Stack("e.{e}.w", "w", over="e")]))

    assert set(made) == {"model.w"}
    assert not made.warnings


def test_filled_states_do_not_hide_what_differs_or_lacks(tmp_path: Path) -> None:
    stacked = Mapping([Stack("e.{e}.w", "w", over="e", fill=0)])
    made = opened(with_states((0, 2), (7.0, 8.0)), tmp_path / "c").mapped(stacked)
    with pytest.raises(KeyMismatchError, match="not equal numbers"):
        made["optim.state.w.step"]

    reshard.save({"model": {"e.0.w": W, "e.2.w": W}}, tmp_path / "d")
    with pytest.raises(KeyMismatchError, match=r"'model.e.1.w' is missing"):  # parameters are not filled
        reshard.open(tmp_path / "d").mapped(stacked)


def test_a_plan_of_filled_states() -> None:
    names = [*(f"e.{i}.w" for i in range(3)), *(f"optim.state.e.{i}.w.exp_avg" for i in (0, 1))]
    specs = {name: TensorSpec(name, (2,), "float32") for name in names}

    views = Mapping([Stack("e.{e}.w", "w", over="e", fill=0.5)]).views(specs)

    arrays = {name: torch.full((2,), float(at + 1)).numpy() for at, name in enumerate(names)}
    assert views["w"].apply(arrays).tolist() == [[1, 1], [2, 2], [3, 3]]
    assert views["optim.state.w.exp_avg"].apply(arrays).tolist() == [[4, 4], [5, 5], [0.5, 0.5]]


def test_a_plan_of_numbered_parts_has_their_steps() -> None:
    shapes = {"w": (2, 3), "optim.state.w.step": (), "optim.state.w.exp_avg": (2, 3)}
    specs = {name: TensorSpec(name, shape, "float32") for name, shape in shapes.items()}
    unstacked = Mapping([Unstack("w", "e.{e}.w", over="e")])

    views = unstacked.views(specs)

    wanted = [f"optim.state.e.{i}.w.{key}" for i in range(2) for key in ("step", "exp_avg")]
    assert sorted(views) == sorted(["e.0.w", "e.1.w", *wanted])
    with pytest.raises(
        KeyMismatchError, match=r"'optim\.state\.w\.step' belongs to a parameter that is not in the state"
    ):
        unstacked.views({"optim.state.w.step": specs["optim.state.w.step"]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_an_offset_is_exact_or_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    """From values between 1/2 and 2 one can be taken, not from small ones."""
    fine = torch.linspace(0.5, 2, 33).to(dtype).reshape(3, 11)
    checkpoint = opened({"n": fine, "s": fine[0, 0].clone(), "e": fine[:0], "nan": fine * torch.nan}, tmp_path / "c")
    mapping = Mapping([Offset("{n}", "new.{n}", -1)])

    made = checkpoint.mapped(mapping)

    assert torch.equal(made["new.n"][...], fine - 1)
    assert torch.equal(made["new.n"][1:, 3:9:2], (fine - 1)[1:, 3:9:2])
    assert made["new.s"][...] == fine[0, 0] - 1
    assert made["new.e"].shape == (0, 11)
    assert reshard.compare(made.mapped(mapping.inverse()), checkpoint).ok
    small = opened({"n": torch.tensor([1.0, 1e-7], dtype=dtype)}, tmp_path / "d").mapped(mapping)
    with pytest.raises(NormalizationError, match=r"'n' plus -1.0 would lose digits in .* element \[1\]"):
        small["new.n"]


def test_weights_of_four_bits(tmp_path: Path) -> None:
    """Element by element: the lower half of a byte is the first of two numbers."""
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (2, 3, 4, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (2, 3, 4), dtype=torch.uint8)
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    wanted = torch.zeros(2, 4 * 32, 3)
    for e, r, g, b in itertools.product(range(2), range(3), range(4), range(16)):
        byte, power = int(blocks[e, r, g, b]), 2.0 ** (int(scales[e, r, g]) - 127)
        for half, bits in enumerate((byte & 15, byte >> 4)):
            wanted[e, 32 * g + 2 * b + half, r] = table[bits & 7] * (-1 if bits & 8 else 1) * power
    state = {"x.w_blocks": blocks, "x.w_scales": scales, "lonely_blocks": blocks}

    made = opened(state, tmp_path / "c").mapped(Mapping([Mxfp4(dtype="float32")]))

    assert set(made) == {"x.w", "lonely_blocks"}
    assert torch.equal(made["x.w"][...], wanted)
    assert torch.equal(made["x.w"][1, 5:100:7, 1:], wanted[1, 5:100:7, 1:])
    bad = opened({"x.w_blocks": blocks, "x.w_scales": scales[:1]}, tmp_path / "d").mapped(Mapping([Mxfp4()]))
    with pytest.raises(
        NormalizationError, match=r"needs scales of uint8 \[2, 3, 4\], but 'x.w_scales' is uint8 \[1, 3, 4\]"
    ):
        bad["x.w"]


@pytest.mark.parametrize(
    "rule",
    [
        Resize("x", "y", 4, 2, dim=-1),
        Resize("x", "y", 4, 6, dim=2),
        Split("x", ["a", "b"], (1, 1), dim=-1),
        Split("x", ["a", "b"], (1, 1), dim=-3),
        Unstack("x", "x.{e}", over="e", dim=2),
        Concat(["x", "z"], "y", groups=2, dim=-1),
        Concat(["x", "z"], "y", groups=2, dim=2),
    ],
)
def test_a_dim_that_is_none_is_refused(rule: Rule, tmp_path: Path) -> None:
    """Resize with dim=-1 took rows from dim 0."""
    checkpoint = opened({"x": numbers(4, 4), "z": -numbers(4, 4)}, tmp_path)
    with pytest.raises(NormalizationError, match=r"there is no dim -?\d in the shape \(4, 4\): dims count from 0"):
        whole(Mapping([rule]).apply(checkpoint))


def test_settings_of_rules_are_checked() -> None:
    for make in (
        lambda: Concat(["a", "b"], "y", groups=0),
        lambda: Split("x", ["a", "b"], (1, 1), groups=0),
        lambda: Transpose("x", "y", (-1, 0)),
        lambda: Transpose("x", "y", (0, 2)),
        lambda: Dequantize(block=(0, 128)),
    ):
        with pytest.raises(NormalizationError, match=r"must (be|have)"):
            make()


def test_two_names_of_one_number_are_refused(tmp_path: Path) -> None:
    checkpoint = opened({"e.0": numbers(2), "e.1": numbers(2), "e.01": -numbers(2)}, tmp_path)
    with pytest.raises(KeyMismatchError, match=r"'e.0?1' and 'e.0?1' have the same place"):
        Mapping([Stack("e.{n}", "y", over="n")]).apply(checkpoint)


def test_values_that_are_no_tensors_are_renamed_and_dropped_by_their_full_names_only(tmp_path: Path) -> None:
    """They matched, so that nothing was said, and kept their names."""
    reshard.save({"model": {"w": torch.ones(2), "kind": "a"}, "step": 3, "note": "x", "rest": [1, 2]}, tmp_path / "c")
    rules = Mapping([Rename("step", "run.step"), Drop("note"), Rename("kind", "form"), Rename("{x+}", "all.{x+}")])
    mapped = rules.apply(reshard.open(tmp_path / "c"))
    assert {**mapped.objects} == {"model.form": "a", "run.step": 3, "rest.0": 1, "rest.1": 2}
    assert list(mapped) == ["all.model.w"]

    state = {"w": torch.zeros(2), "kind": "", "count": 0, "note": "", "rest": [0]}
    rules = Mapping([Rename("step", "count"), Rename("model.{x}", "{x}")])
    reshard.load(state, tmp_path / "c", mapping=rules, strict=False)
    assert state["count"] == 3
    for rule in (Rename("rest.{x}", "more.{x}"), Drop("st{x}")):
        words = r"no rule of the mapping matches .* A rule renames or drops a plain value only by its full name$"
        with pytest.raises(KeyMismatchError, match=words):
            reshard.load(dict(state), tmp_path / "c", mapping=Mapping([rule]), strict=False)


@pytest.mark.parametrize("mapping", [Mapping([Rename("rng", "random"), Rename("w", "v")]), {"random": "rng", "v": "w"}])
def test_values_of_single_ranks_are_renamed_by_their_full_names(mapping: Any, tmp_path: Path) -> None:
    """A rule left them as they were, and a dict said that there are none."""
    reshard.save({"w": torch.ones(2), "rng": reshard.PerRank({"seed": 1})}, tmp_path / "c")
    reshard.convert(tmp_path / "c", tmp_path / "d", mapping=mapping)
    target = {"v": torch.zeros(2), "random": reshard.PerRank()}
    for path, names in ((tmp_path / "d", None), (tmp_path / "c", mapping)):
        assert reshard.load(target, path, mapping=names).ok
        assert target.pop("random").value == {"seed": 1}
        target["random"] = reshard.PerRank()
    with pytest.raises(KeyMismatchError, match="'rng' is not a tensor and would have two names"):
        reshard.convert(tmp_path / "c", tmp_path / "e", mapping={"one": "rng", "two": "rng"})
    taken = Mapping([Rename("rng", "w")])
    with pytest.raises(KeyMismatchError, match="two tensors or objects would be called 'w'"):
        reshard.convert(tmp_path / "c", tmp_path / "e", mapping=taken)
