"""How Megatron cuts parameters for tensor parallelism, by their names, and how the shards are joined again.

dim 0: linear_qkv, linear_fc1, vocabularies     rank 0   rank 1        dim 1: linear_proj, linear_fc2
                                                rows     rows          dim None: norms, routers, row biases
a gated linear_fc1 holds two halves, and each rank its rows of both:   gate_0 up_0 | gate_1 up_1
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence

from planners.geometry.box import Box
from reshard.checkpoint.canonical.hints import Hints
from reshard.checkpoint.canonical.views import assemble, narrow
from reshard.errors import DamagedCheckpointError, NormalizationError
from reshard.formats.stored.tensor import StoredTensor

__all__ = ["is_gated", "join_shards", "local_shape", "tp_dim"]

_RULES: tuple[tuple[re.Pattern[str], int | None], ...] = tuple(
    (re.compile(pattern), dim)
    for pattern, dim in (
        (r".*layer_?norm.*|.*\b[eh]?norm(\d|\b).*|.*_norm\..*", None),
        (r".*router\..*|.*gate_weight|.*position_embeddings.*|.*tokentype_embeddings.*|.*rotary.*|.*inv_freq", None),
        (r".*word_embeddings\.weight|.*output_layer\.(weight|bias)", 0),
        (r".*(linear_qkv|query_key_value|linear_q|linear_kv|linear_q_proj)\.(weight|bias)", 0),
        (r".*(linear_q_up_proj|linear_kv_up_proj|query|key_value)\.(weight|bias)", 0),
        (r".*(linear_q_down_proj|linear_kv_down_proj|linear_kv_a_proj.*)\.(weight|bias)", None),
        (r".*(linear_fc1|dense_h_to_4h)\.(weight|bias)\d*", 0),
        (r".*(linear_fc2|dense_4h_to_h|linear_proj|dense)\.weight\d*", 1),
        (r".*(linear_fc2|dense_4h_to_h|linear_proj|dense)\.bias\d*", None),
        (r".*eh_proj\.(weight|bias)", 0),
        (r".*softmax_offset|.*mixer\.(A_log|D|dt_bias)", 0),
        (r".*mixer\.out_proj\.weight", 1),
        (r".*\.[qkv]_proj\.(weight|bias)|.*\.(gate|up)_proj\.(weight|bias)", 0),
        (r".*\.(o|down)_proj\.weight", 1),
        (r".*\.(o|down)_proj\.bias", None),
        (r".*pooler.*|.*binary_head.*|.*lm_head\.dense.*", None),
    )
)
_FC1 = re.compile(r"(.*)(linear_fc1|dense_h_to_4h)\.(weight|bias)(\d*)")
_FC2 = {"linear_fc1": "linear_fc2", "dense_h_to_4h": "dense_4h_to_h"}


def tp_dim(name: str, hints: Hints, tp: int) -> int | None:
    """The dim of a parameter that is cut; None if every rank has all of it.

    Raises NormalizationError, asking for the hint "tp_dims", for a name that is not known here, if it matters.
    """
    for pattern, dim in hints.mapping("tp_dims").items():
        if fnmatch.fnmatchcase(name, str(pattern)):
            if dim is not None and type(dim) is not int:
                raise NormalizationError(f"the hint 'tp_dims' must give a dim or None, got {dim!r} for {pattern!r}")
            return dim
    if tp == 1:
        return None
    found = [dim for rule, dim in _RULES if rule.fullmatch(name)]
    if not found:
        hints.missing(
            "tp_dims",
            f"the files do not say how tensor parallelism over {tp} ranks cuts {name!r}, and its name is not known",
            f"{{{name!r}: 0}}",
        )
    return found[0]


def is_gated(name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a first linear layer of an MLP holds a gate and an up half: it then has two rows for each column of the
    second one. `shapes` are those of the shards or of the whole parameters alike, by name."""
    match = _FC1.fullmatch(name)
    if match is None or name not in shapes:
        return False
    second = shapes.get(f"{match[1]}{_FC2[match[2]]}.weight{match[4]}")
    return second is not None and len(second) == 2 and shapes[name][0] == 2 * second[1]


def local_shape(shape: tuple[int, ...], dim: int | None, tp: int, name: str) -> tuple[int, ...]:
    """Shape of a shard. Raises DamagedCheckpointError if the dim cannot be divided."""
    if dim is None or tp == 1:
        return shape
    if dim >= len(shape) or shape[dim] % tp:
        raise DamagedCheckpointError(f"{name!r} of shape {list(shape)} cannot be cut along dim {dim} for {tp} ranks")
    return (*shape[:dim], shape[dim] // tp, *shape[dim + 1 :])


def join_shards(name: str, shards: Sequence[StoredTensor], dim: int | None, gated: bool) -> StoredTensor:
    """The whole parameter. Of replicas the first is taken; gate and up halves are joined each by itself.

    Raises DamagedCheckpointError if the shards have different shapes.
    """
    shapes = {shard.spec.shape for shard in shards}
    if len(shapes) > 1:
        texts = ", ".join(str(list(shard.spec.shape)) for shard in shards)
        raise DamagedCheckpointError(
            f"{name!r}: the shards of the tensor parallel ranks have different shapes: {texts}"
        )
    shape = shapes.pop()
    if dim is None or len(shards) == 1:
        return shards[0].renamed(name)
    if dim >= len(shape):
        raise DamagedCheckpointError(f"{name!r}: shards of shape {list(shape)} cannot be joined along dim {dim}")
    halves = 2 if gated else 1
    if shape[dim] % halves:
        raise DamagedCheckpointError(f"{name!r}: {shape[dim]} rows of a shard are no gate and up half")
    rows = shape[dim] // halves
    pieces = []
    for half in range(halves):
        for rank, shard in enumerate(shards):
            at = half * rows * len(shards) + rank * rows
            region = Box((*(0,) * dim, at, *(0,) * (len(shape) - dim - 1)), (*shape[:dim], rows, *shape[dim + 1 :]))
            pieces.append((region, narrow(shard, dim, half * rows, (half + 1) * rows)))
    whole = (*shape[:dim], shape[dim] * len(shards), *shape[dim + 1 :])
    return assemble(name, whole, pieces)
