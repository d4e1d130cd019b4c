"""Topologies: rules, homes, presets and flat buffers."""

from __future__ import annotations

import pytest

from planners import (
    Box,
    Mesh,
    PlanError,
    Replicate,
    Shard,
    TensorSpec,
    Topology,
    ddp,
    dumps,
    even_ranges,
    expert_parallel,
    flat_layouts,
    flat_offsets,
    fsdp,
    fsdp_tp,
    hsdp,
    loads,
    pipelined,
    verify,
)


def spec(fqn, *shape):
    return TensorSpec(fqn, shape, "bfloat16")


LLAMA = [
    spec("tok_embeddings.weight", 37, 8),
    *(
        spec(f"layers.{i}.{name}.weight", *shape)
        for i in range(4)
        for name, shape in {"wq": (7, 8), "wo": (8, 7), "norm": (8,)}.items()
    ),
    spec("norm.weight", 8),
    spec("output.weight", 37, 8),
]


def test_the_promised_form():
    topology = Topology.parse("dp=4,tp=2", {"*.wo.weight": "S(0),S(1)", "*": "S(0),R"})

    layout = topology.layout(LLAMA)

    assert layout["layers.0.wo.weight"].placements == (Shard(0), Shard(1))
    assert layout["norm.weight"].placements == (Shard(0), Replicate())
    assert layout.world_size == 8
    assert topology.layout({s.fqn: s for s in LLAMA}) == layout
    assert verify(layout).ok


def test_the_first_rule_that_matches_wins():
    layout = Topology.parse("dp=2", {"layers.0.*": "R", "layers.*": "S(0)", "*": "R"}).layout(LLAMA)

    assert layout["layers.0.wq.weight"].placements == (Replicate(),)
    assert layout["layers.1.wq.weight"].placements == (Shard(0),)


def test_axes_cut_in_the_order_named_and_may_act_as_one():
    topology = Topology.parse("dp=2,tp=2", {"a": "tp,dp: S(0),S(0)", "b": "dp*tp: S(0)", "c": "dp,tp: S(0),S(0)"})

    layout = topology.layout([spec(name, 5) for name in "abc"])

    def rows(fqn):
        return [[(b.offsets[0], b.stops[0]) for b in layout[fqn].boxes(rank)] for rank in range(4)]

    assert rows("a") == [[(0, 2)], [(3, 4)], [(2, 3)], [(4, 5)]]  # 3 and 2 rows for tp, then halves of these
    assert rows("b") == [[(0, 2)], [(2, 4)], [(4, 5)], []]  # four parts of ceil(5 / 4)
    assert rows("c") == [[(0, 2)], [(2, 3)], [(3, 4)], [(4, 5)]]


def test_homes_put_tensors_on_a_part_of_the_mesh():
    topology = Topology.parse(
        "pp=2,ep=2,dp=2",
        {"*": "S(0)"},
        {"layers.0.*": "pp=0", "layers.1.*": "pp=1", "*.experts.0.*": "ep=0", "*.experts.1.*": "ep=1"},
    )
    layout = topology.layout([spec(f"layers.{i}.experts.{e}.w", 4) for i in range(2) for e in range(2)])

    assert {fqn: t.mesh.ranks.tolist() for fqn, t in layout.items()} == {
        "layers.0.experts.0.w": [0, 1],
        "layers.0.experts.1.w": [2, 3],
        "layers.1.experts.0.w": [4, 5],
        "layers.1.experts.1.w": [6, 7],
    }
    assert layout.world_size == 8


def test_scalars_are_replicated():
    layout = Topology.parse("dp=2", {"*": "S(0)"}).layout([spec("step"), spec("w", 4)])

    assert layout["step"].placements == (Replicate(),)
    assert layout["w"].placements == (Shard(0),)


TEXTS = [
    "dp=4,tp=2\n*.wo.weight -> S(0),S(1)\n* -> S(0),R",
    "pp=2,dp=2\n*norm* -> dp: R (optional)\n* -> dp: S(0)\nlayers.0.* on pp=0\n* on pp=1 (optional)\neven dp",
    "dp=2,cp=2@4,5,6,7\n* -> dp*cp: S(0)",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_and_json_are_read_back(text):
    topology = Topology.parse(text)

    assert str(topology) == text
    assert loads(dumps(topology)) == topology
    assert hash(loads(dumps(topology))) == hash(topology)


def test_globs_that_look_like_comments_are_read_back():
    globs = ("#head.*", "\\#w", "\\w", "even *", "*")
    topology = Topology.parse("tp=2", dict.fromkeys(globs, "S(0)"), {"#head.*": "tp=0"})

    assert Topology.parse(str(topology)) == topology


def test_comments_and_blank_lines_are_passed_over():
    assert Topology.parse("# how it was\n\n dp=2 \n* -> R\n") == Topology.parse("dp=2", {"*": "R"})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Topology.parse("dp=2", {"*": "Z(0)"}), r"the rule for '\*': unknown placement 'Z\(0\)'"),
        (lambda: Topology.parse("dp=2", {"*": "d p: S(0)"}), "cannot read the axes 'd p'"),
        (lambda: Topology.parse("dp=2", {"*": "tp: S(0)"}), r"names the axis 'tp', but the mesh dp=2 has \['dp'\]"),
        (lambda: Topology.parse("dp=2", {"*": "dp: S(0),R"}), "2 placements for 1 axes"),
        (lambda: Topology.parse("dp=2", {"*": "dp,dp: S(0),R"}), "names an axis twice"),
        (lambda: Topology.parse("dp=2", {"*": "R"}, {"*": "dp=2"}), "is outside the mesh dp=2"),
        (lambda: Topology.parse("dp=2", {"*": "R"}, {"*": "dp"}), "cannot read the home 'dp'"),
        (lambda: Topology.parse("dp=2", {"*": "R"}, even=["tp"]), "the list of even axes names the axis 'tp'"),
        (lambda: Topology.parse("dp=2\n* : R"), "line 2 of the topology: cannot read"),
        (lambda: Topology.parse("dp*2", {"*": "R"}), "cannot read 'dp\\*2' in the mesh"),
    ],
)
def test_topologies_that_cannot_be_are_refused(make, message):
    with pytest.raises(PlanError, match=message):
        make()


@pytest.mark.parametrize(
    ("mesh", "rules", "homes", "message"),
    [
        ("dp=2", {"*.w5.weight": "R", "*": "R"}, {}, r"these rules or homes have no effect: '\*.w5.weight'"),
        ("dp=2", {"*": "R", "*.wo.weight": "S(0)"}, {}, "only tensors that earlier ones match"),
        ("dp=2", {"*": "R"}, {"layers.9.*": "dp=0"}, r"'layers.9.\*'"),
        ("dp=2", {"layers.*": "S(0)"}, {}, r"no rule matches 3 tensors: 'tok_embeddings.weight', 'norm.weight'"),
        (
            "dp=2",
            {"*": "S(1)"},
            {},
            r"the rule for '\*' \(S\(1\)\): .* shards a dim .* \(tensor 'layers.0.norm.weight'\)",
        ),
        ("dp=2,tp=2", {"*": "S(5),R"}, {}, r"\(S\(5\),R\): S\(5\) on .* not have \(tensor '[^()]*'\)$"),
        (
            "dp=2,tp=2",
            {"*": "S(0)"},
            {},
            "1 placement, but needs one per axis \\(dp, tp\\), such as {'\\*': 'S\\(0\\),R'}",
        ),
        ("dp=2,tp=2", {"*": "dp: S(0)"}, {}, "axis 'tp' is neither named nor fixed by a home: name each of dp, tp"),
        ("pp=2,dp=2", {"*": "pp,dp: R,S(0)"}, {"*": "pp=1"}, r"a home fixes \['pp'\]"),
    ],
)
def test_rules_that_do_not_fit_the_state_are_refused(mesh, rules, homes, message):
    with pytest.raises(PlanError, match=message):
        Topology.parse(mesh, rules, homes).layout(LLAMA)


def test_an_even_axis_must_divide_what_it_cuts():
    topology = Topology.parse("dp=2,tp=3", {"*": "S(0),S(1)"}, even=["tp"])

    assert topology.layout([spec("w", 5, 6)])["w"].numel(0) == 6
    with pytest.raises(PlanError, match=r"axis 'tp' of size 3 does not divide \(7,\) elements of dim 1 \(tensor 'w'\)"):
        topology.layout([spec("w", 5, 7)])
    fused = Topology.parse("tp=2", {"*": "B(0, 4+3)"}, even=["tp"])
    with pytest.raises(PlanError, match=r"does not divide \(4, 3\)"):
        fused.layout([spec("w", 7)])


def test_two_tensors_of_one_name_are_refused():
    with pytest.raises(PlanError, match=r"two tensors have the same name \(tensor 'w'\)"):
        ddp(2).layout([spec("w", 1), spec("w", 1)])


@pytest.mark.parametrize(
    ("topology", "mesh", "wq", "wo", "norm"),
    [
        (ddp(4), "ddp=4", "ddp=4 (R)", "ddp=4 (R)", "ddp=4 (R)"),
        (fsdp(4), "fsdp=4", "fsdp=4 (S(0))", "fsdp=4 (S(0))", "fsdp=4 (S(0))"),
        (fsdp(2, context_parallel=2), "fsdp=2,cp=2", *["fsdp.cp=4 (S(0))"] * 3),
        (hsdp(2, 2), "replica=2,fsdp=2", *["replica=2,fsdp=2 (R, S(0))"] * 3),
        (
            fsdp_tp(3, 2),
            "fsdp=3,tp=2",
            "tp=2,fsdp=3@0,2,4,1,3,5 (S(0), S(0))",
            "fsdp=3,tp=2 (S(0), S(1))",
            "fsdp=3,tp=2 (S(0), R)",
        ),
        (fsdp_tp(1, 2), "tp=2", "tp=2 (S(0))", "tp=2 (S(1))", "tp=2 (R)"),
    ],
)
def test_presets(topology, mesh, wq, wo, norm):
    layout = topology.layout(LLAMA)

    assert str(topology.mesh) == mesh
    assert [str(layout[f"layers.3.{name}.weight"].form) for name in ("wq", "wo", "norm")] == [wq, wo, norm]
    assert verify(layout).ok
    assert Topology.parse(str(topology)) == topology


@pytest.mark.parametrize(
    ("topology", "names", "uncut"),
    [
        (fsdp_tp(2, 2), ["odd.weight"], {"tp": ("odd.weight",)}),
        (fsdp_tp(2, 2), ["odd.weight", "x.wq.weight"], {}),
        (ddp(4), ["odd.weight"], {}),  # copies are what was asked for
        (hsdp(2, 2), ["odd.weight"], {}),
        (Topology.parse("a=2,b=2", {"x.*": "S(0),S(1)", "*": "S(0),R"}, {}), ["x.w", "y"], {}),
        (Topology.parse("a=2,b=2\nx.* -> S(0),S(1) (optional)\n* -> S(0),R"), ["y"], {"b": ("y",)}),
        (Topology.parse("a=2,b=2\n* -> S(0),R"), ["y"], {}),
        (
            Topology.parse("pp=2,tp=2\nx -> S(0) (optional)\n* -> R\ny on pp=0\nz on pp=1"),
            ["y", "z"],
            {"tp": ("y", "z")},
        ),
        (Topology.parse("a=2,b=2\nx.* -> a*b: S(0) (optional)\n* -> a,b: R,R"), ["y"], {"a": ("y",), "b": ("y",)}),
    ],
)
def test_axes_that_were_meant_to_cut_and_do_not_are_told(topology, names, uncut):
    assert topology.unsharded_axes(topology.layout([spec(name, 4, 4) for name in names])) == uncut


def test_the_state_of_an_optimizer_is_cut_like_its_weight():
    layout = fsdp_tp(2, 2).layout([spec("optim.state.layers.0.wo.weight.exp_avg", 4, 4), spec("wq.weight.step")])

    assert layout["optim.state.layers.0.wo.weight.exp_avg"].placements == (Shard(0), Shard(1))
    assert set(layout["wq.weight.step"].placements) == {Replicate()}


@pytest.mark.parametrize(
    ("kwargs", "homes"),
    [
        ({}, {0: 0, 1: 0, 2: 1, 3: 1}),
        ({"stages_per_rank": 2}, {0: 0, 1: 1, 2: 0, 3: 1}),  # interleaved
        ({"stages_per_rank": 2, "v_shaped": True}, {0: 0, 1: 1, 2: 1, 3: 0}),
        ({"split": [1, 3]}, {0: 0, 1: 1, 2: 1, 3: 1}),
    ],
)
def test_pipelines_deal_layers_to_stages(kwargs, homes):
    topology = pipelined(fsdp_tp(2, 2), 2, 4, **kwargs)

    layout = topology.layout(LLAMA)

    assert {i: layout[f"layers.{i}.wq.weight"].mesh.ranks.min() // 4 for i in range(4)} == homes
    assert layout["tok_embeddings.weight"].mesh.ranks.tolist() == [0, 2, 1, 3]
    last = homes[3]
    assert sorted(layout["output.weight"].mesh.ranks.tolist()) == list(range(4 * last, 4 * last + 4))
    assert layout.world_size == 8
    assert verify(layout).ok
    assert loads(dumps(topology)) == topology


def test_experts_are_dealt_before_fsdp_cuts_them():
    layout = expert_parallel(2, 4).layout([spec("layers.0.experts.w1", 12, 5, 3), spec("router.weight", 9, 5)])

    # ep coordinate 1 has experts 3, 4 and 5, of which dp 0 has two
    assert [layout["layers.0.experts.w1"].boxes(rank) for rank in (1, 5)] == [
        (Box((3, 0, 0), (2, 5, 3)),),
        (Box((5, 0, 0), (1, 5, 3)),),
    ]
    assert layout["router.weight"].mesh == Mesh({"dp.ep": 8})
    with pytest.raises(PlanError, match=r"axis 'ep' of size 4 does not divide \(6,\)"):
        expert_parallel(2, 4).layout([spec("experts.w1", 6, 2)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pipelined(fsdp(2), 4, 3), "3 layers do not fill the 4 stages"),
        (lambda: pipelined(fsdp(2), 2, 4, v_shaped=True), "v_shaped needs two stages per rank, got 1"),
        (lambda: pipelined(pipelined(fsdp(2), 2, 4), 2, 4), "without an axis 'pp'"),
        (lambda: pipelined(fsdp(2), 2, 4, split=[1, 2]), r"the split \[1, 2\] does not distribute 4 layers"),
        (lambda: fsdp(0), "size >= 1, got 0"),
    ],
)
def test_presets_that_cannot_be_are_refused(make, message):
    with pytest.raises(PlanError, match=message):
        make()


BUFFER = [spec("a", 2, 2), spec("b", 3), spec("c", 5), spec("e", 0)]


def test_flat_buffers_cut_without_regard_to_tensors():
    offsets, end = flat_offsets(BUFFER, align_elements=4)
    assert (offsets, end) == ({"a": 0, "b": 4, "c": 8, "e": 16}, 16)

    layouts = flat_layouts(BUFFER, {0: (0, 10), 1: (10, 20)}, align_elements=4)

    assert layouts["b"].form.ranges == ((0, 0, 3),)
    assert layouts["c"].form.ranges == ((0, 0, 2), (1, 2, 5))
    assert layouts["e"].form.ranges == ()
    assert all(layout.world_size == 2 for layout in layouts.values())


def test_even_ranges_pad_the_end():
    assert even_ranges(10, [4, 5, 6]) == {4: (0, 4), 5: (4, 8), 6: (8, 12)}
    assert even_ranges(10, [0, 1], multiple=4) == {0: (0, 8), 1: (8, 16)}
    assert even_ranges(0, [0]) == {0: (0, 0)}
    fsdp1 = flat_layouts(BUFFER, even_ranges(12, [0, 1, 2]))
    assert fsdp1["c"].form.ranges == ((1, 0, 1), (2, 1, 5))
    zero = {s.fqn: flat_layouts([s], even_ranges(s.numel, [0, 1]))[s.fqn] for s in BUFFER}  # each by itself, as ZeRO-3
    assert zero["b"].form.ranges == ((0, 0, 2), (1, 2, 3))
    assert all(verify(layout).ok for layout in (*fsdp1.values(), *zero.values()))


def test_ranks_with_equal_ranges_are_replicas():
    layouts = flat_layouts(BUFFER, {**even_ranges(12, [0, 1]), **even_ranges(12, [2, 3])})

    assert layouts["b"].boxes(0) == layouts["b"].boxes(2) == (Box((0,), (2,)),)
    assert verify(layouts["b"]).ok


def test_places_may_be_given():
    layouts = flat_layouts([spec("a", 2), spec("b", 2)], {0: (0, 3), 1: (3, 6)}, offsets={"b": 0, "a": 4})

    assert layouts["a"].form.ranges == ((1, 0, 2),)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: flat_layouts(BUFFER, {0: (0, 5)}), r"leave out element 1 of its flattening \(tensor 'b'\)"),
        (lambda: flat_layouts(BUFFER, {0: (0, 5), 1: (6, 12)}), r"leave out element 1 .* \(tensor 'b'\)"),
        (lambda: flat_layouts(BUFFER, {0: (5, 2)}), "must ascend from 0"),
        (lambda: flat_layouts(BUFFER, {0: (0, 12)}, offsets={"a": 0}), r"no offset .* \(tensor 'b'\)"),
        (lambda: flat_offsets([spec("a", 1), spec("a", 1)]), "the same name"),
        (lambda: flat_offsets(BUFFER, align_elements=0), "align_elements must be >= 1"),
        (lambda: even_ranges(3, []), "at least one rank"),
    ],
)
def test_flat_buffers_that_cannot_be_are_refused(make, message):
    with pytest.raises(PlanError, match=message):
        make()
