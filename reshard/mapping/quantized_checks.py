"""Checks which rules may rearrange quantized weights, which are packed or have scales that must be
rearranged, too."""

from __future__ import annotations

import re
from collections.abc import Callable, Container

from planners.geometry.layout import TensorSpec
from reshard.errors import NormalizationError
from reshard.live.dtypes import scales_of
from reshard.mapping.rules import Concat, Rope, Rule, Split

_PARTS = re.compile(
    r"qweight|qzeros|scales|g_idx|SCB|absmax"
    r"|(weight|input|output|k|v)_(packed|shape|g_idx|zero_point|(global_)?scale.*)"
)
"""Last segments of tensor names that accompany or replace a quantized weight, in AWQ, GPTQ,
bitsandbytes, compressed-tensors, ModelOpt, and fp8."""
_PACKED = ("uint8", "int8", "int32")
_QUANTIZED = (*_PACKED, "float8", "float4")
Specs = Callable[[str], TensorSpec]


def check_plain(
    rule: Rule,
    name: str,
    specs: Specs,
    known: Container[str],
    takes: Callable[[str], bool],
) -> None:
    """Raise NormalizationError if `rule` would rearrange a tensor whose rows are not those of a
    plain weight.

    `known` contains all names. `takes` returns True if the rule matches a name. A rule may
    rearrange a tensor that it names in full, such as "qweight".
    """
    last = name.rpartition(".")[2]
    by_word = all(pattern.text.rpartition(".")[2] != last for pattern in rule.sources)
    scales = scales_of(name, known)
    left = [scale for scale in scales if scale.endswith(".scale") or not takes(scale)]
    if left and specs(name).dtype.startswith(_QUANTIZED):
        why = f"its values must be multiplied by {left[0]!r}, which the rule does not rearrange"
    elif by_word and _PARTS.fullmatch(last) and not _follows(rule, name, specs, known):
        why = f"{last!r} is a part of a quantized weight"
    elif by_word and last == "weight" and (dtype := specs(name).dtype) in _PACKED:
        why = f"its elements, of {dtype}, are packed"
    else:
        return
    raise NormalizationError(
        f"{rule} would rearrange {name!r} as if it were a plain weight, but {why}. Dequantize it "
        "first: fp8 blocks by Mapping([Dequantize()]) | mapping, on the command line "
        "--dequantize; others by the library that quantized them"
    )


def _follows(rule: Rule, name: str, specs: Specs, known: Container[str]) -> bool:
    """Return True for scales whose rows each belong to an equal number of the weight's rows, if the
    rule moves them together."""
    weight = re.sub("_scale(_inv)?$", "", name)
    scale = specs(name).shape
    if weight == name or weight not in known or len(scale) != 2 or not scale[0]:
        return False
    rows, rest = divmod(specs(weight).shape[0], scale[0])
    if rest or rows & (rows - 1):  # blocks have 2^n rows, unless the last one is smaller
        return False
    if isinstance(rule, Concat | Split):
        return rule.dim == 0
    return isinstance(rule, Rope) and rows == 1
