"""Names, shapes, and layouts of large models, for planning without weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from planners import Mesh, Placement, Replicate, Shard, StateLayout, StridedShard, TensorLayout, TensorSpec
from planners.geometry.layout import ProductForm

Shapes = dict[str, tuple[int, ...]]


def llama(layers: int = 126) -> Shapes:
    """Return the parameters of Llama-3.1-405B with this number of layers."""
    hidden, ffn, kv, vocab = 16384, 53248, 1024, 128256
    out: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        here = f"model.layers.{layer}"
        out |= {
            f"{here}.self_attn.q_proj.weight": (hidden, hidden),
            f"{here}.self_attn.k_proj.weight": (kv, hidden),
            f"{here}.self_attn.v_proj.weight": (kv, hidden),
            f"{here}.self_attn.o_proj.weight": (hidden, hidden),
            f"{here}.mlp.gate_proj.weight": (ffn, hidden),
            f"{here}.mlp.up_proj.weight": (ffn, hidden),
            f"{here}.mlp.down_proj.weight": (hidden, ffn),
            f"{here}.input_layernorm.weight": (hidden,),
            f"{here}.post_attention_layernorm.weight": (hidden,),
        }
    return out | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def moe(layers: int = 61, experts: int = 256) -> Shapes:
    """Return the parameters of a 671B mixture of experts. The first three layers are dense, the others have `experts`
    each."""
    hidden, ffn, expert_ffn, vocab = 7168, 18432, 2048, 129280
    out: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        here = f"model.layers.{layer}"
        out |= {
            f"{here}.self_attn.q_a_proj.weight": (1536, hidden),
            f"{here}.self_attn.q_a_layernorm.weight": (1536,),
            f"{here}.self_attn.q_b_proj.weight": (24576, 1536),
            f"{here}.self_attn.kv_a_proj.weight": (576, hidden),
            f"{here}.self_attn.kv_a_layernorm.weight": (512,),
            f"{here}.self_attn.kv_b_proj.weight": (32768, 512),
            f"{here}.self_attn.o_proj.weight": (hidden, 16384),
            f"{here}.input_layernorm.weight": (hidden,),
            f"{here}.post_attention_layernorm.weight": (hidden,),
        }
        if layer < 3:
            out |= _mlp(f"{here}.mlp", hidden, ffn)
            continue
        out |= {f"{here}.mlp.gate.weight": (experts, hidden), f"{here}.mlp.gate.bias": (experts,)}
        out |= _mlp(f"{here}.mlp.shared_experts", hidden, expert_ffn)
        for expert in range(experts):
            out |= _mlp(f"{here}.mlp.experts.{expert}", hidden, expert_ffn)
    return out | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def _mlp(prefix: str, hidden: int, ffn: int) -> Shapes:
    return {
        f"{prefix}.gate_proj.weight": (ffn, hidden),
        f"{prefix}.up_proj.weight": (ffn, hidden),
        f"{prefix}.down_proj.weight": (hidden, ffn),
    }


def with_adam(shapes: Shapes) -> dict[str, TensorSpec]:
    """Return the bfloat16 model, and Adam's two float32 moments of every parameter."""
    specs = [TensorSpec(f"model.{fqn}", shape, "bfloat16") for fqn, shape in shapes.items()]
    for name in ("exp_avg", "exp_avg_sq"):
        specs += [TensorSpec(f"optim.state.{fqn}.{name}", shape, "float32") for fqn, shape in shapes.items()]
    return {spec.fqn: spec for spec in specs}


def laid_out(specs: Mapping[str, TensorSpec], form_of: Callable[[TensorSpec], ProductForm]) -> StateLayout:
    """Return the layout in which each tensor has the form that `form_of` returns."""
    return StateLayout({fqn: TensorLayout.of(spec, form_of(spec)) for fqn, spec in specs.items()})


def fsdp(ranks: int) -> Callable[[TensorSpec], ProductForm]:
    """Shard every tensor by rows."""
    form = ProductForm.make(Mesh({"fsdp": ranks}), [Shard(0)])
    return lambda spec: form


def fsdp_tp(ranks: int, tp: int = 8) -> Callable[[TensorSpec], ProductForm]:
    """Shard with FSDP2 over tensor parallelism: rows of column-parallel weights are sharded by tp first, then by
    fsdp."""
    mesh = Mesh({"fsdp": ranks // tp, "tp": tp})
    column = ProductForm.make(mesh, [StridedShard(0, tp), Shard(0)])
    row = ProductForm.make(mesh, [Shard(0), Shard(1)])
    flat = ProductForm.make(mesh, [Shard(0), Replicate()])

    def form_of(spec: TensorSpec) -> ProductForm:
        if len(spec.shape) == 1:
            return flat
        return row if _is_row_parallel(spec.fqn) else column

    return form_of


def expert_fsdp(ranks: int, ep: int, experts: int = 256) -> Callable[[TensorSpec], ProductForm]:
    """Distribute experts over `ep` groups of ranks, sharded by rows in each. Shard all else by rows over all ranks."""
    return _expert_parallel(ranks, ep, experts, fsdp(ranks), [Shard(0)], [Shard(0)])


def expert_tp(ranks: int, ep: int, tp: int = 8, experts: int = 256) -> Callable[[TensorSpec], ProductForm]:
    """Distribute experts over `ep` groups of ranks, sharded by columns or rows in each. Shard all else by tp, and
    replicate it over the rest."""
    mesh = Mesh({"dp": ranks // tp, "tp": tp})
    forms: dict[bool, list[Placement]] = {True: [Replicate(), Shard(1)], False: [Replicate(), Shard(0)]}
    made = {key: ProductForm.make(mesh, placements) for key, placements in forms.items()}
    copied = ProductForm.make(mesh, [Replicate(), Replicate()])

    def shared(spec: TensorSpec) -> ProductForm:
        return copied if len(spec.shape) == 1 else made[_is_row_parallel(spec.fqn)]

    return _expert_parallel(ranks, ep, experts, shared, [Shard(0)], [Shard(1)])


def _expert_parallel(
    ranks: int,
    ep: int,
    experts: int,
    shared: Callable[[TensorSpec], ProductForm],
    column: list[Placement],
    row: list[Placement],
) -> Callable[[TensorSpec], ProductForm]:
    inner = ranks // ep
    homes = [Mesh({"inner": inner}, range(group * inner, (group + 1) * inner)) for group in range(ep)]
    forms = [(ProductForm.make(home, column), ProductForm.make(home, row)) for home in homes]

    def form_of(spec: TensorSpec) -> ProductForm:
        _, found, rest = spec.fqn.partition(".experts.")
        if not found:
            return shared(spec)
        return forms[int(rest.split(".")[0]) * ep // experts][_is_row_parallel(spec.fqn)]

    return form_of


def _is_row_parallel(fqn: str) -> bool:
    return "o_proj" in fqn or "down_proj" in fqn
