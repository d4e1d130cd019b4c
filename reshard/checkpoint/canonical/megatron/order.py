"""In which order Megatron's models register their parameters, and which of them a rank of the grid has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reshard.checkpoint.canonical.hints import Hints, find_scope
from reshard.checkpoint.canonical.megatron.names import is_expert
from reshard.errors import DamagedCheckpointError, NormalizationError
from reshard.formats.stored.tensor import StoredTensor

__all__ = ["Grid", "chunk_names", "is_buffer", "orders"]

_LAYER = re.compile(r"(?P<head>(?:.*?\.)?layers)\.(?P<layer>\d+)\.(?P<tail>.+)")
_EXPERT = re.compile(r"(?P<head>.*\.local_experts)\.(?P<expert>\d+)\.(?P<tail>.+)")
_MTP = re.compile(r"(?:.*\.)?mtp\.layers\.(?P<layer>\d+)\.(?:(?P<front>\w*norm|eh_proj|\w*layer)\.)?(?P<tail>.+)")
"""A layer that predicts a further token; the last stage has them all, and a copy of the embeddings for them."""
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
"""Modules of a layer made of plain torch, in order."""


@dataclass(frozen=True)
class Grid:
    """How the groups of ranks that share one optimizer are counted: tensor parallel ranks fastest, stages slowest."""

    tp: int
    ep: int
    pp: int
    experts: bool | None
    """Whether it is the grid of the experts' optimizer (True), of the one beside it (False), or of all parameters."""
    first_layers: int | None = None
    """Layers of the first stage, where it has another number."""
    last_layers: int | None = None
    starts: Mapping[int, int] | None = None
    """The first layer of each stage, where a hint says it."""
    grouped: bool | None = None
    """Whether the experts of a layer are registered as two groups of matrices, and not one after the other."""

    @classmethod
    def of(cls, args: Mapping[str, Any], *, groups: int, experts: bool | None, hints: Hints) -> Grid:
        """The grid of a program's arguments; where they do not say, `groups` ranks of tensor parallelism."""
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
        """How many groups of ranks."""
        return self.tp * self.ep * self.pp

    def coordinates(self, group: int) -> tuple[int, int, int]:
        """Tensor parallel rank, expert parallel rank and stage of a group."""
        return group % self.tp, group // self.tp % self.ep, group // (self.tp * self.ep)

    def layers(self, stage: int, chunk: int, chunks: int, count: int) -> range:
        """Numbers of the layers that chunk `chunk` (of `chunks` a stage) of a stage has, of `count` in all.

        Raises NormalizationError if they cannot be divided so, and no hint says how they are.
        """
        if self.starts is not None:
            missing = [n for n in range(self.pp) if n not in self.starts]
            if missing or chunks > 1:
                raise NormalizationError(
                    f"the hint 'layer_offsets' must give the first layer of each of {self.pp} stages, and these be "
                    f"in one piece; they have {chunks}, and stage {missing[0] if missing else 0} is not given"
                )
            return range(self.starts[stage], self.starts.get(stage + 1, count))
        if self.first_layers is not None or self.last_layers is not None:
            return self._uneven(stage, count)
        parts = self.pp * chunks
        if count % parts:
            raise NormalizationError(
                f"{count} layers cannot be divided evenly among {self.pp} stages of {chunks} chunks, and the program's "
                "arguments do not say how they are; the hint 'layer_offsets' does: {stage: number of its first layer}"
            )
        each = count // parts
        start = (chunk * self.pp + stage) * each
        return range(start, start + each)

    def _uneven(self, stage: int, count: int) -> range:
        first, last = self.first_layers, self.last_layers
        middle = self.pp - (first is not None) - (last is not None)
        rest = count - (first or 0) - (last or 0)
        each = rest // middle if middle else 0
        sizes = [*([first] if first is not None else []), *[each] * middle, *([last] if last is not None else [])]
        if sum(sizes) != count:
            raise DamagedCheckpointError(f"{count} layers cannot be divided among stages of {sizes} layers")
        return range(sum(sizes[:stage]), sum(sizes[: stage + 1]))

    def __str__(self) -> str:
        return f"tp {self.tp}, pp {self.pp}" + (f", ep {self.ep}" if self.ep > 1 else "")


def chunk_names(
    keys: Sequence[str], model: Mapping[str, StoredTensor], grid: Grid, stage: int, chunk: int, chunks: int, ep: int
) -> list[str]:
    """The parameters of one chunk of the model on one rank, in the order in which they were saved."""
    decoder = {name: m for name in keys if (m := _LAYER.fullmatch(name)) and not _MTP.fullmatch(name)}
    numbers = [int(m["layer"]) for m in decoder.values()]
    held = grid.layers(stage, chunk, chunks, max(numbers) + 1) if numbers else range(0)
    experts = [int(m["expert"]) for name in keys if (m := _EXPERT.fullmatch(name))]
    share = (max(experts) + 1) // grid.ep if experts else 0
    first, last = stage == chunk == 0, stage == grid.pp - 1 and chunk == chunks - 1
    tied = not any("output_layer.weight" in name for name in keys)
    layered = sum(_LAYER.fullmatch(name) is not None for name in keys)
    begin, layers, end = [], [], []
    for name in keys:
        if grid.experts is not None and is_expert(name) != grid.experts:
            continue
        match, expert = decoder.get(name), _EXPERT.fullmatch(name)
        if expert is not None and not ep * share <= int(expert["expert"]) < (ep + 1) * share:
            continue
        if match is not None:
            if int(match["layer"]) in held:
                layers.append(name)
        elif _is_embedding(name):
            # a last stage of its own has a copy of embeddings that are the output layer, too
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
    """Whether a name is that of a buffer, which no optimizer has."""
    return name.endswith(("expert_bias", "local_tokens_per_expert", "inv_freq"))


def orders(names: Sequence[str], hints: Hints, grouped: bool | None = None) -> Iterator[list[str]]:
    """Orders of registration to try: the hint's, that of the file, then those of Megatron's two kinds of layers.

    Where `grouped` says how the layers' experts are registered, only orders that agree; stacks in a file do not say it.
    """
    given = hints.get("param_order")
    if given is not None:
        place = {str(name): i for i, name in enumerate(given)}
        if all(name in place for name in names):
            yield sorted(names, key=place.__getitem__)
        return
    if grouped is None or not any(map(is_expert, names)):
        yield list(names)
    # a last stage has its copy of the embedding as the output layer
    late = names and not _is_embedding(names[0])
    for fused in (False, True):
        for by_expert in (False, True) if grouped is None else (not grouped,):
            for copy_last in dict.fromkeys((bool(late), False)):
                yield sorted(names, key=lambda n: _rank(n, fused, by_expert, copy_last))  # used at once


def _is_embedding(name: str) -> bool:
    return "embedding" in name.partition(".")[0]


def _rank(name: str, fused: bool, by_expert: bool, copy_last: bool) -> tuple[int, ...]:
    """Where a parameter stands. With `fused` norms, a norm is a part of the linear layer that follows it.

    Experts are registered one after the other, or (`by_expert` False) all first and then all second matrices.
    """
    match, further = _LAYER.fullmatch(name), _MTP.fullmatch(name)
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
    expert = _EXPERT.fullmatch(name)
    number = int(expert["expert"]) if expert else 0
    second = "linear_fc2" in tail
    inner = (number, second) if by_expert else (second, number)
    norm_first = not (".0weight" in tail or ".0bias" in tail)
    return (*start, module, *inner, norm_first, tail.endswith("bias"))
