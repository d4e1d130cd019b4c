"""Topologies of the usual kinds of training, as live ranks really hold their tensors.

Wherever two axes cut one dim, the order of the cuts matters in uneven cases. FSDP2 cuts what tensor parallelism has
left, and expert parallelism deals the experts before FSDP cuts them: `tp` and `ep` come before `dp`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from planners.errors import PlanError
from planners.geometry.mesh import Mesh
from planners.topologies.topology import Home, Rule, Topology

__all__ = ["LLAMA_TP_DIMS", "ddp", "expert_parallel", "fsdp", "fsdp_tp", "hsdp", "pipelined"]

LLAMA_TP_DIMS: Mapping[str, int] = {
    "*wq.weight*": 0,
    "*wk.weight*": 0,
    "*wv.weight*": 0,
    "*wo.weight*": 1,
    "*w1.weight*": 0,
    "*w3.weight*": 0,
    "*w2.weight*": 1,
    "*q_proj.weight*": 0,
    "*k_proj.weight*": 0,
    "*v_proj.weight*": 0,
    "*o_proj.weight*": 1,
    "*gate_proj.weight*": 0,
    "*up_proj.weight*": 0,
    "*down_proj.weight*": 1,
    "*tok_embeddings.weight*": 0,
    "*embed_tokens.weight*": 0,
    "*output.weight*": 0,
    "*lm_head.weight*": 0,
}
"""Which dim tensor parallelism cuts, for the weights of Llama-style models under both of their usual sets of names.
What stands behind `weight` (a state of the optimizer) is cut alike. All else is replicated over the axis."""


def ddp(world_size: int) -> Topology:
    """Every rank has everything."""
    return Topology(Mesh({"dp": world_size}), (Rule.parse("*", "R", optional=True),))


def fsdp(shards: int, *, context_parallel: int = 1) -> Topology:
    """Dim 0 of everything is cut. Ranks of context parallelism cut parameters like any other: both axes act as one."""
    return fsdp_tp(shards, 1, {}, context_parallel=context_parallel)


def hsdp(replicas: int, shards: int) -> Topology:
    """Dim 0 is cut within each group of `shards` consecutive ranks, and the groups are replicas."""
    return fsdp_tp(shards, 1, {}, replicas=replicas)


def fsdp_tp(
    shards: int,
    tensor_parallel: int,
    tp_dims: Mapping[str, int] = LLAMA_TP_DIMS,
    *,
    replicas: int = 1,
    context_parallel: int = 1,
) -> Topology:
    """FSDP2 over tensor parallelism: `tp_dims` says by glob which dim `tp` cuts (first match; all else is replicated
    over it), and then FSDP2 cuts dim 0 of what is left. Globs that match nothing are skipped.

    Axes are rep, dp, cp and tp, from the outermost; those of size 1 are left out, but never all.
    """
    sizes = {"rep": replicas, "dp": shards, "cp": context_parallel, "tp": tensor_parallel}
    axes = {name: size for name, size in sizes.items() if size != 1 or (name == "dp" and set(sizes.values()) == {1})}
    cutting = "*".join(name for name in ("dp", "cp") if name in axes)
    first = [("rep", "R")] if "rep" in axes else []
    dp = [(cutting, "S(0)")] if cutting else []

    def rule(pattern: str, tp_dim: int | None) -> Rule:
        tp = [("tp", "R" if tp_dim is None else f"S({tp_dim})")] if "tp" in axes else []
        order = [*first, *tp, *dp] if tp_dim == 0 else [*first, *dp, *tp]
        text = f"{','.join(name for name, _ in order)}: {','.join(placement for _, placement in order)}"
        return Rule.parse(pattern, text, optional=True)

    cuts = tp_dims if "tp" in axes else {}
    return Topology(Mesh(axes), (*(rule(pattern, dim) for pattern, dim in cuts.items()), rule("*", None)))


def expert_parallel(
    shards: int, experts: int, *, pattern: str = "*experts.*", expert_dim: int = 0, fsdp_dim: int = 0
) -> Topology:
    """Experts stacked along `expert_dim` are dealt evenly over the axis ep of size `experts`, and then cut by FSDP over
    the axis dp of size `shards` along `fsdp_dim`; dim 0 of everything else is cut over both axes as one."""
    rules = (
        Rule.parse(pattern, f"ep,dp: S({expert_dim}),S({fsdp_dim})"),
        Rule.parse("*", "dp*ep: S(0)", optional=True),
    )
    return Topology(Mesh({"dp": shards, "ep": experts}), rules, even=("ep",))


def pipelined(
    stage: Topology,
    ranks: int,
    layers: int,
    *,
    stages_per_rank: int = 1,
    split: Sequence[int] | None = None,
    v_shaped: bool = False,
    first: Sequence[str] = ("*tok_embeddings.*", "*embed_tokens.*"),
    layer: str = "*layers.{}.*",
    last: Sequence[str] = ("*",),
) -> Topology:
    """Layers dealt to the stages of a pipeline, each placed as `stage` says on the ranks of its own.

    There are `ranks * stages_per_rank` stages of consecutive layers, as many as `split` says, or nearly equal numbers
    of them (stage s begins at layer `s * layers // stages`). Stage s is on pipeline rank `s % ranks` (interleaved), or,
    `v_shaped`, on the way back from the last one to the first. Tensors that `first` matches are on the first stage;
    those that `last` matches, and no layer, on the last. The axis pp is outermost.

    Raises PlanError if there are fewer layers than stages, if `split` does not add up, or if a V is not of two stages
    a rank.
    """
    stages = ranks * stages_per_rank
    if layers < stages:
        raise PlanError(f"{layers} layers do not fill the {stages} stages of {ranks} ranks")
    starts = [number * layers // stages for number in range(stages + 1)]
    counts = [stop - start for start, stop in itertools.pairwise(starts)] if split is None else list(split)
    if len(counts) != stages or sum(counts) != layers or min(counts) < 0:
        raise PlanError(f"the split {counts} does not deal {layers} layers to {stages} stages")
    if v_shaped and stages_per_rank != 2:
        raise PlanError(f"a V has two stages a rank, got {stages_per_rank}")
    if "pp" in stage.mesh.names or stage.mesh.has_explicit_ranks:
        raise PlanError(f"a stage must have a mesh of ranks 0, 1, 2, ... without an axis 'pp', got {stage.mesh}")

    def at(number: int) -> tuple[tuple[str, int], ...]:
        back = v_shaped and number >= ranks
        return (("pp", stages - 1 - number if back else number % ranks),)

    homes = [Home(pattern, at(0), True) for pattern in first]
    stage_of = [number for number, count in enumerate(counts) for _ in range(count)]
    homes += [Home(layer.format(i), at(stage_of[i])) for i in range(layers)]
    homes += [Home(pattern, at(stages - 1), True) for pattern in last]
    return Topology(Mesh({"pp": ranks, **dict(stage.mesh.axes)}), stage.rules, (*homes, *stage.homes), stage.even)
