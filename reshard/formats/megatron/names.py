"""Names of Megatron: canonical names of saved keys, the order of parameters, and how they are sharded."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from planners.geometry.box import Shape
from reshard.errors import CorruptCheckpointError, FormatError, NormalizationError
from reshard.formats.canonical import Hints, Shapes, Tensors, find_scope
from reshard.stored.tensor import StoredTensor
from reshard.stored.views import concat, copies, narrow, unstack

# Saved keys, and the canonical names of the parameters in them:
#
#     decoder.layers.mlp.linear_fc2.weight [L, ...]               decoder.layers.<l>.mlp.linear_fc2.weight
#     ...experts.experts.linear_fc2.weight [L, E, ...]            ...experts.local_experts.<e>.linear_fc2.weight
#     ...self_attention.linear_qkv.layer_norm_weight              ...input_layernorm.weight
#     ...mlp.linear_fc1.weight_w, weight_v                        ...mlp.linear_fc1.weight (gate, then up)


_STACKED = re.compile(r"(?P<head>(?:.*?\.)?layers)\.(?P<tail>(?!\d+\.).+)")
_EXPERTS = re.compile(r"(?P<head>.*\bexperts)\.experts\.(?:(?P<number>\d+)\.)?(?P<tail>.+)")
_GROUPED = re.compile(r"(?P<head>.*\bmlp\.experts)\.(?P<tail>linear_fc[12]\.(?:weight|bias))(?P<number>\d+)")
_NORMS = (
    (re.compile(r"self_attention\.(?:linear_qkv|in_proj)\.layer_norm_(weight|bias)$"), r"input_layernorm.\1"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_(weight|bias)$"), r"pre_mlp_layernorm.\1"),
    (re.compile(r"self_attention\.linear_q_up_proj\.layer_norm_(weight|bias)$"), r"self_attention.q_layernorm.\1"),
    (re.compile(r"self_attention\.linear_kv_up_proj\.layer_norm_(weight|bias)$"), r"self_attention.kv_layernorm.\1"),
)
_HALF = re.compile(r"(.*\.(?:weight|bias))_([wv])")
_VOCABULARY = re.compile(r".*(word_embeddings\.weight|output_layer\.(weight|bias))")


def skipped(key: str) -> bool:
    """Return True if a key is not a parameter or buffer but state of fp8 recipes, of random
    generators, or of the program."""
    return "_extra_state" in key or key.startswith(
        ("rng_state", "rerun_state_machine", "common.", "opt_param_scheduler")
    )


def is_expert(name: str) -> bool:
    """Return True if a parameter belongs to one expert, so that expert parallelism distributes it."""
    return ".experts.local_experts." in name


def _unwrapped(key: str) -> str:
    return re.sub(r"^(module\.)+", "", key)


def canonical_key(key: str) -> str:
    """Return the name of a parameter that is not stacked: without wrappers, with norms where they
    belong and experts numbered."""
    key = _unwrapped(key)
    match = _GROUPED.fullmatch(key)
    if match:
        key = f"{match['head']}.local_experts.{match['number']}.{match['tail']}"
    for pattern, name in _NORMS:
        key = pattern.sub(name, key)
    return key


def expand(key: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the parameters in a stored tensor, by canonical name. Raises CorruptCheckpointError
    for a 0-d stack."""
    key = _unwrapped(key)
    layers, experts = _STACKED.fullmatch(key), _EXPERTS.fullmatch(key)
    match = layers or experts
    if match is None:
        yield canonical_key(key), tensor
        return
    front, tail = match["head"] if layers else f"{match['head']}.local_experts", match["tail"]
    if layers is None and match["number"] is not None:
        yield canonical_key(f"{front}.{match['number']}.{tail}"), tensor
        return
    names = [f"{front}.{number}.{tail}" for number in range(_length(key, tensor))]
    for name, one in zip(names, unstack(tensor, names)):
        yield from expand(name, one)


def _length(key: str, tensor: StoredTensor) -> int:
    if not tensor.spec.shape:
        raise CorruptCheckpointError(f"{key!r} should be a stack of layers or experts, but it is a single number")
    return tensor.spec.shape[0]


def join_halves(tensors: Tensors) -> Tensors:
    """Return the tensors, with `weight_w` (gate) and `weight_v` (up) joined. Raises
    CorruptCheckpointError if one of the two is missing."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        match = _HALF.fullmatch(name)
        if match is None:
            out[name] = tensor
            continue
        halves = [tensors.get(f"{match[1]}_{half}") for half in "wv"]
        if halves[0] is None or halves[1] is None:
            raise CorruptCheckpointError(f"{name!r}: the other half of {match[1]!r} (_w or _v) is missing")
        out.setdefault(match[1], concat([halves[0], halves[1]], 0, match[1]))
    return out


def whole_key(key: str) -> str:
    """Return the name of the parameter that `key` may be one half of."""
    match = _HALF.fullmatch(key)
    return key if match is None else match[1]


def is_vocabulary(name: str) -> bool:
    """Return True if a parameter has one row per token of the vocabulary."""
    return _VOCABULARY.fullmatch(name) is not None


# The order in which Megatron's models register parameters, and which parameters each rank has.


LAYER = re.compile(r"(?P<head>(?:.*?\.)?layers)\.(?P<layer>\d+)\.(?P<tail>.+)")
EXPERT = re.compile(r"(?P<head>.*\.local_experts)\.(?P<expert>\d+)\.(?P<tail>.+)")
_MTP = re.compile(r"(?:.*\.)?mtp\.layers\.(?P<layer>\d+)\.(?:(?P<front>\w*norm|eh_proj|\w*layer)\.)?(?P<tail>.+)")
"""A multi-token prediction layer. The last stage has all of them, with a copy of the embeddings."""
_MTP_PARTS = ("enorm", "hnorm", "eh_proj", "transformer_layer", "mtp_model_layer", "final_layernorm")
_LOCAL = (
    "input_layernorm",
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "self_attention.linear_q",
    "self_attention.linear_kv",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "self_attention.kv_layernorm",
    "pre_mlp_layernorm",
    "mlp.router",
    "mlp.experts",
    "mlp.shared_experts",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
"""Modules of a layer without TransformerEngine, in order."""


@dataclass(frozen=True)
class Grid:
    """How the groups of ranks that share one optimizer are numbered: tensor parallel ranks vary
    fastest, stages slowest."""

    tp: int
    ep: int
    pp: int
    experts: bool | None
    """True: the grid of the experts' optimizer. False: that of the other parameters. None: that of all parameters."""
    first_layers: int | None = None
    """Number of layers of the first stage, if it differs."""
    last_layers: int | None = None
    starts: Mapping[int, int] | None = None
    """The number of the first layer of each stage, if a hint gives it."""
    grouped: bool | None = None
    """Whether the experts of a layer are registered as two groups of matrices instead of one expert
    after another."""

    @classmethod
    def of(cls, args: Mapping[str, Any], *, groups: int, experts: bool | None, hints: Hints) -> Grid:
        """Return the grid for a program's arguments. If they do not define it, assume `groups`
        tensor parallel ranks."""
        tp = int(args.get("tensor_model_parallel_size") or 0)
        pp = int(args.get("pipeline_model_parallel_size") or 1)
        ep = int(args.get("expert_model_parallel_size") or 1) if experts else 1
        if experts:
            tp = int(args.get("expert_tensor_parallel_size") or tp)
        first = args.get("decoder_first_pipeline_num_layers", args.get("num_layers_in_first_pipeline_stage"))
        last = args.get("decoder_last_pipeline_num_layers", args.get("num_layers_in_last_pipeline_stage"))
        grouped = args.get("moe_grouped_gemm")
        given = hints.mapping("layer_offsets")
        starts = {stage: int(n) for stage in range(pp) if (n := find_scope(given, stage)) is not None}
        return cls(
            tp or max(groups // (pp * ep), 1), ep, pp, experts, first, last,
            {0: 0, **starts} if starts else None, grouped if type(grouped) is bool else None,
        )  # fmt: skip

    @property
    def size(self) -> int:
        """Number of groups of ranks."""
        return self.tp * self.ep * self.pp

    def coordinates(self, group: int) -> tuple[int, int, int]:
        """Return the tensor parallel rank, expert parallel rank, and stage of a group."""
        return group % self.tp, group // self.tp % self.ep, group // (self.tp * self.ep)

    def layers(self, stage: int, chunk: int, chunks: int, count: int) -> range:
        """Return the layer numbers of chunk `chunk` (of `chunks` per stage) of a stage. There are
        `count` layers in total.

        Raises NormalizationError if they cannot be divided evenly and no hint gives the division.
        """
        if self.starts is not None:
            missing = [n for n in range(self.pp) if n not in self.starts]
            if missing or chunks > 1:
                raise NormalizationError(
                    f"the hint 'layer_offsets' must give the first layer of each of {self.pp} stages, but "
                    f"{f'stage {missing[0]} is not given' if missing else f'each has {chunks} chunks, not one'}"
                )
            return range(self.starts[stage], self.starts.get(stage + 1, count))
        if self.first_layers is not None or self.last_layers is not None:
            return self._uneven(stage, chunk, chunks, count)
        parts = self.pp * chunks
        if count % parts:
            raise NormalizationError(
                f"{count} layers cannot be divided evenly among {self.pp} stages of {chunks} chunks, and the program's "
                "arguments do not say how they were. Pass the hint 'layer_offsets': {stage: number of its first layer}"
            )
        each = count // parts
        start = (chunk * self.pp + stage) * each
        return range(start, start + each)

    def _uneven(self, stage: int, chunk: int, chunks: int, count: int) -> range:
        first, last = self.first_layers, self.last_layers
        middle = self.pp - (first is not None) - (last is not None)
        rest = count - (first or 0) - (last or 0)
        each = rest // middle if middle else 0
        sizes = [*([first] if first is not None else []), *[each] * middle, *([last] if last is not None else [])]
        if sum(sizes) != count or any(size % chunks for size in sizes):
            what = f"stages of {sizes} layers" + (f" in {chunks} chunks each" if chunks > 1 else "")
            raise CorruptCheckpointError(f"{count} layers cannot be divided among {what}")
        start = chunk * count // chunks + sum(sizes[:stage]) // chunks  # each chunk has layers of every stage
        return range(start, start + sizes[stage] // chunks)

    def __str__(self) -> str:
        return f"tp {self.tp}, pp {self.pp}" + (f", ep {self.ep}" if self.ep > 1 else "")


def chunk_names(keys: Sequence[str], grid: Grid, stage: int, chunk: int, chunks: int, ep: int) -> list[str]:
    """Return the parameters of one chunk of the model on one rank, in the order in which they were saved."""
    decoder = {name: m for name in keys if (m := LAYER.fullmatch(name)) and not _MTP.fullmatch(name)}
    numbers = [int(m["layer"]) for m in decoder.values()]
    held = grid.layers(stage, chunk, chunks, max(numbers) + 1) if numbers else range(0)
    experts = [int(m["expert"]) for name in keys if (m := EXPERT.fullmatch(name))]
    share = (max(experts) + 1) // grid.ep if experts else 0
    first, last = stage == chunk == 0, stage == grid.pp - 1 and chunk == chunks - 1
    tied = not any("output_layer.weight" in name for name in keys)
    layered = sum(LAYER.fullmatch(name) is not None for name in keys)
    begin, layers, end = [], [], []
    for name in keys:
        if grid.experts is not None and is_expert(name) != grid.experts:
            continue
        match, expert = decoder.get(name), EXPERT.fullmatch(name)
        if expert is not None and not ep * share <= int(expert["expert"]) < (ep + 1) * share:
            continue
        if match is not None:
            if int(match["layer"]) in held:
                layers.append(name)
        elif _is_embedding(name):
            # a separate last stage has a copy of the embeddings as the output layer
            if first or (last and len(decoder) < layered):
                begin.append(name)
            elif last and tied and name.endswith("word_embeddings.weight"):
                end.append(name)
        elif last and not is_buffer(name):
            end.append(name)
    layers.sort(key=lambda name: int(decoder[name]["layer"]))
    if tied:
        end.sort(key=lambda name: name.endswith("word_embeddings.weight"))
    return [name for name in (*begin, *layers, *end) if not is_buffer(name)]


def is_buffer(name: str) -> bool:
    """Return True if a name is that of a buffer, which no optimizer has."""
    return name.endswith(("expert_bias", "local_tokens_per_expert", "inv_freq"))


def orders(names: Sequence[str], hints: Hints, grouped: bool | None = None) -> Iterator[list[str]]:
    """Yield the orders of registration to try: the hint's, the file's, and those of Megatron's two
    kinds of layers.

    If `grouped` is known, yields only orders that match it. Stacks in a file do not show how
    experts were registered.
    """
    given = hints.get("param_order")
    if given is not None:
        place = {str(name): i for i, name in enumerate(given)}
        if all(name in place for name in names):
            yield sorted(names, key=place.__getitem__)
        return
    if grouped is None or not any(map(is_expert, names)):
        yield list(names)
    # a separate last stage has its copy of the embedding as the output layer
    late = names and not _is_embedding(names[0])
    for fused in (False, True):
        for by_expert in (False, True) if grouped is None else (not grouped,):
            for copy_last in dict.fromkeys((bool(late), False)):
                yield sorted(names, key=lambda n: _rank(n, fused, by_expert, copy_last))  # used at once


def _is_embedding(name: str) -> bool:
    return "embedding" in name.partition(".")[0]


def _rank(name: str, fused: bool, by_expert: bool, copy_last: bool) -> tuple[int, ...]:
    """Return the position of a parameter. With `fused` norms, a norm is part of the linear layer
    that follows it.

    Experts are registered one after the other, or (`by_expert` False) all first matrices and then
    all second ones.
    """
    match, further = LAYER.fullmatch(name), _MTP.fullmatch(name)
    if match is None and _is_embedding(name):
        return (6,) if copy_last else (0,)
    if match is None:
        return (5 if "output" in name else 3, name.endswith("bias"))
    start: tuple[int, ...] = (1, int(match["layer"]))
    tail = match["tail"]
    if further is not None:
        front = further["front"]
        tail = further["tail"]
        start = (4, int(further["layer"]), _MTP_PARTS.index(front) if front in _MTP_PARTS else len(_MTP_PARTS))
    if fused:
        tail = re.sub(r"^input_layernorm\.", "self_attention.linear_qkv.0", tail)
        tail = re.sub(r"^pre_mlp_layernorm\.", "mlp.linear_fc1.0", tail) if ".mlp.router" not in name else tail
    module = next((i for i, start in enumerate(_LOCAL) if tail.startswith(start)), len(_LOCAL))
    expert = EXPERT.fullmatch(name)
    number = int(expert["expert"]) if expert else 0
    second = "linear_fc2" in tail
    inner = (number, second) if by_expert else (second, number)
    norm_first = not (".0weight" in tail or ".0bias" in tail)
    return (*start, module, *inner, norm_first, tail.endswith("bias"))


# How Megatron shards parameters for tensor parallelism, by name, and how the shards are joined.
#
#     dim 0        linear_qkv, linear_fc1, vocabularies     each rank has some rows
#     dim 1        linear_proj, linear_fc2                  each rank has some columns
#     dim None     norms, routers, row biases               each rank has all of it
#
# A gated linear_fc1 has two halves, and each rank has rows of both: gate_0 up_0 | gate_1 up_1


_RULES: tuple[tuple[re.Pattern[str], int | None], ...] = tuple(
    (re.compile(pattern), dim)
    for pattern, dim in (
        (r".*mixer\.norm\.weight", 0),
        (r".*layer_?norm.*|.*\b[eh]?norm(\d|\b).*|.*_norm\..*", None),
        (r".*router\..*|.*gate_weight|.*position_embeddings.*|.*tokentype_embeddings.*|.*rotary.*|.*inv_freq", None),
        (r".*word_embeddings\.weight|.*output_layer\.(weight|bias)", 0),
        (r".*(linear_qkv|query_key_value|linear_q|linear_kv|linear_q_proj)\.(weight|bias)", 0),
        (r".*(linear_q_up_proj|linear_kv_up_proj|query|key_value)\.(weight|bias)", 0),
        (r".*(linear_q_down_proj|linear_kv_down_proj|linear_kv_a_proj.*)\.(weight|bias)", None),
        (r".*pooler.*|.*binary_head.*|.*lm_head\.dense.*", None),
        (r".*(linear_fc1|dense_h_to_4h)\.(weight|bias)\d*", 0),
        (r".*(linear_fc2|dense_4h_to_h|linear_proj|dense)\.weight\d*", 1),
        (r".*(linear_fc2|dense_4h_to_h|linear_proj|dense)\.bias\d*", None),
        (r".*eh_proj\.(weight|bias)", 0),
        (r".*softmax_offset|.*mixer\.(A_log|D|dt_bias)", 0),
        (r".*mixer\.out_proj\.weight", 1),
        (r".*\.[qkv]_proj\.(weight|bias)|.*\.(gate|up)_proj\.(weight|bias)", 0),
        (r".*\.(o|down)_proj\.weight", 1),
        (r".*\.(o|down)_proj\.bias", None),
    )
)
_SECTIONS = re.compile(r".*\b(in_proj|conv1d)[._](weight|bias)")
"""Parameters of state space models and linear attention that are sharded section by section."""
_FC1 = re.compile(r"(.*)(linear_fc1|dense_h_to_4h)\.(weight|bias)(\d*)")
_FC2 = {"linear_fc1": "linear_fc2", "dense_h_to_4h": "dense_4h_to_h"}


def tp_dim(name: str, hints: Hints, tp: int) -> int | None:
    """Return the dim along which a parameter is sharded, or None if every rank has all of it.

    Raises NormalizationError, which requests the hint "tp_dims", if the name is unknown and the dim
    matters. Raises FormatError for a parameter that no such hint can describe.
    """
    for pattern, dim in _hinted(name, hints).items():
        if dim is not None and (type(dim) is not int or dim < 0):
            raise NormalizationError(f"the hint 'tp_dims' must give dims >= 0 or None, got {dim!r} for {pattern!r}")
        return dim
    if tp == 1:
        return None
    found = [dim for rule, dim in _RULES if rule.fullmatch(name)]
    if not found and _SECTIONS.fullmatch(name):
        raise FormatError(
            f"{name!r} is sharded over {tp} tensor parallel ranks "
            "section by section, and the files do not say where these "
            "end: let Megatron-core load this, and save it as "
            "torch_dist with a fully_reshardable optimizer"
        )
    if not found:
        hints.missing(
            "tp_dims",
            f"the files do not say how tensor parallelism over {tp} ranks shards {name!r}, and its name is not known",
            f"{{{name!r}: 0}}",
        )
    return found[0]


def _hinted(name: str, hints: Hints) -> dict[str, Any]:
    """Return the hint for a name, by pattern."""
    given = hints.mapping("tp_dims")
    return {str(pattern): dim for pattern, dim in given.items() if fnmatch.fnmatchcase(name, str(pattern))}


def is_gated(name: str, shapes: Shapes) -> bool:
    """Return True if a first linear layer of an MLP consists of a gate and an up half: it then has
    two rows for each column of the second one. `shapes` are those of the shards or of the full
    parameters, by name."""
    match = _FC1.fullmatch(name)
    if match is None or name not in shapes:
        return False
    second = shapes.get(f"{match[1]}{_FC2[match[2]]}.weight{match[4]}")
    return second is not None and len(second) == 2 and shapes[name][0] == 2 * second[1]


def local_shape(shape: Shape, dim: int | None, tp: int, name: str) -> Shape:
    """Return the shape of a shard. Raises CorruptCheckpointError if the dim cannot be divided."""
    if dim is None or tp == 1:
        return shape
    if dim >= len(shape) or shape[dim] % tp:
        raise CorruptCheckpointError(f"{name!r} of shape {list(shape)} cannot be split along dim {dim} for {tp} ranks")
    return (*shape[:dim], shape[dim] // tp, *shape[dim + 1 :])


def join_by_name(
    name: str, shards: Sequence[StoredTensor], shapes: Shapes, hints: Hints, state: str = ""
) -> StoredTensor:
    """Return the full parameter, or a state of it, joined as its name requires.

    Gate and up halves are joined separately. `shapes`: see `is_gated`.

    Raises CorruptCheckpointError if the shards have different shapes or dtypes.
    """
    dim, full = tp_dim(name, hints, len(shards)), f"{name}.{state}" if state else name
    if dim is None or len(shards) == 1:
        return first_copy(name, full, shards, hints)
    shape = _common_shape(full, shards)
    if dim >= len(shape):
        raise CorruptCheckpointError(f"{full!r}: shards of shape {list(shape)} cannot be joined along dim {dim}")
    halves = 2 if is_gated(name, shapes) else 1
    if shape[dim] % halves:
        raise CorruptCheckpointError(f"{full!r}: {shape[dim]} rows of a shard are no gate and up half")
    rows = shape[dim] // halves
    starts = [half * rows for half in range(halves)]
    return concat([narrow(shard, dim, start, start + rows) for start in starts for shard in shards], dim, full)


_DRIFT = 0.05
"""Copies of a parameter that drifted apart in training may differ by this share of its largest value."""


def first_copy(name: str, full: str, tensors: Sequence[StoredTensor], hints: Hints) -> StoredTensor:
    """Return the first copy of a parameter, or of its state `full`.

    Reads compare a parameter with the copies of other tensor parallel ranks, unless a hint says
    None. States are not compared: ranks that do not share gradients have different moments.

    Raises CorruptCheckpointError if copies have different shapes or dtypes.
    """
    _common_shape(full, tensors)
    if len(tensors) == 1 or full != name or None in [*_hinted(name, hints).values()][:1]:
        return tensors[0].renamed(full)

    def refuse(where: str) -> NoReturn:
        hints.missing(
            "tp_dims",
            "by its name and the program's arguments, tensor parallel "
            f"ranks have copies of {full!r}, but {where} differ: it is "
            "sharded, or the ranks' copies differ too much. None takes the first copy",
            f"{{{name!r}: {None if is_expert(name) else 0}}}",
        )

    return copies(full, tensors, refuse, _DRIFT)


def _common_shape(name: str, shards: Sequence[StoredTensor]) -> Shape:
    if len({(shard.spec.shape, shard.spec.dtype) for shard in shards}) > 1:
        texts = ", ".join(f"{list(shard.spec.shape)} {shard.spec.dtype}" for shard in shards)
        raise CorruptCheckpointError(
            f"{name!r}: the shards of the tensor parallel ranks have different shapes or dtypes: {texts}"
        )
    return shards[0].spec.shape
