"""Hugging Face files: on disk each expert has its own matrices, in memory they are stacked, gate and up as one.

disk:    mlp.experts.<e>.gate_proj.weight [I, H], up_proj [I, H], down_proj [H, I]      (Qwen, DeepSeek, GLM ...)
         block_sparse_moe.experts.<e>.w1.weight, w3, w2; block_sparse_moe.gate          (Mixtral and its kin)
         feed_forward.experts.<e>.gate_proj.weight, up_proj, down_proj                  (Jamba)
memory:  mlp.experts.gate_up_proj [E, 2I, H], mlp.experts.down_proj [E, H, I]; mlp.gate (feed_forward stays)

Granite's experts are stacked on disk, too, and only renamed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from reshard.checkpoint.canonical.views import concat, stack
from reshard.errors import DamagedCheckpointError
from reshard.formats.stored.tensor import StoredTensor

__all__ = ["in_memory"]

_EXPERT = re.compile(
    r"(?P<head>.*layers\.\d+\.)(?P<block>mlp|block_sparse_moe|feed_forward)\.experts\.(?P<expert>\d+)\."
    r"(?P<part>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight"
)
_OF_EXPERT = re.compile(r"(.*layers\.\d+\.)(mlp|block_sparse_moe|feed_forward)\.experts\.\d+\..*")
_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_RENAMED = (
    (re.compile(r"(\.block_sparse_moe)\.input_linear\.weight"), r"\1.experts.gate_up_proj"),
    (re.compile(r"(\.block_sparse_moe)\.output_linear\.weight"), r"\1.experts.down_proj"),
    (re.compile(r"(\.block_sparse_moe)\.router\.layer\.weight"), r"\1.router.weight"),
    (re.compile(r"\.mlp\.(moe_statics\.e_score_correction_bias)$"), r".mlp.gate.\1"),
)
"""Stacked experts of Granite, and the bias of Ernie's router."""


def in_memory(tensors: Iterable[tuple[str, StoredTensor]]) -> list[tuple[str, StoredTensor]]:
    """The tensors under the names, and in the shapes, that a model in memory has.

    Raises DamagedCheckpointError if an expert has not all of its matrices.
    """
    given = list(tensors)
    experts: dict[str, dict[str, dict[int, StoredTensor]]] = {}
    out: list[tuple[str, StoredTensor]] = []
    # experts with more than three plain matrices, such as scales of quantized ones, stay as they are
    odd = {m[1] for name, _ in given if (m := _OF_EXPERT.fullmatch(name)) and not _EXPERT.fullmatch(name)}
    for name, tensor in given:
        match = _EXPERT.fullmatch(name)
        if match is None or match["head"] in odd:
            out.append((_renamed(name), tensor))
            continue
        part = _PARTS.get(match["part"], match["part"])
        kept = match["block"].replace("block_sparse_moe", "mlp")
        block = experts.setdefault(f"{match['head']}{kept}.experts", {})
        block.setdefault(part, {})[int(match["expert"])] = tensor
    for prefix, parts in experts.items():
        _check(prefix, parts)
        count = len(parts["down_proj"])
        fused = f"{prefix}.gate_up_proj"
        pairs = [concat([parts["gate_proj"][e], parts["up_proj"][e]], 0, fused) for e in range(count)]
        out.append((fused, stack(pairs, fused)))
        down = f"{prefix}.down_proj"
        out.append((down, stack([parts["down_proj"][e] for e in range(count)], down)))
    return out


def _renamed(name: str) -> str:
    """What a tensor that is no single expert's is called in memory."""
    for pattern, becomes in _RENAMED:
        changed, count = pattern.subn(becomes, name)
        if count:
            return changed
    return name.replace(".block_sparse_moe.", ".mlp.")


def _check(prefix: str, parts: dict[str, dict[int, StoredTensor]]) -> None:
    wanted = set(range(max(max(of) for of in parts.values()) + 1))
    for part in ("gate_proj", "up_proj", "down_proj"):
        missing = sorted(wanted - set(parts.get(part, {})))
        if missing:
            raise DamagedCheckpointError(
                f"{prefix}: expert {missing[0]} has no {part}, but other experts have: a file is missing"
            )
