"""Mappings between the names and shapes of states: declarative, reversible, and lazy.

    from reshard.mapping import Mapping, Concat, Rename
    separate = ["{l+}.wq.weight", "{l+}.wk.weight", "{l+}.wv.weight"]
    mapping = Mapping([Concat(separate, "{l+}.wqkv.weight", parts=(4, 1, 1))])
    reshard.load(state, path, mapping=mapping)         # each rank reads its slice of the parts, by byte range

`ready` returns predefined mappings between Hugging Face, torchtitan, Megatron, and others: see
`reshard.mapping.families`.
"""

from reshard.mapping.families import Decoder, ready
from reshard.mapping.mapping import Mapping, apply_dict
from reshard.mapping.rules import (
    Cast,
    Concat,
    Dequantize,
    Drop,
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

__all__ = [
    "Cast", "Concat", "Decoder", "Dequantize", "Drop", "Mapping", "Mxfp4", "Offset", "Rename", "Reshape", "Resize",
    "Rope", "Rule", "Split", "Stack", "Transpose", "Unstack", "apply_dict", "ready",
]  # fmt: skip
