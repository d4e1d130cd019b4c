"""Mappings between namings and shapings of a state: declarative, reversible, and lazy to the byte.

    from reshard.mapping import Mapping, Concat, Rename
    separate = ["{l+}.wq.weight", "{l+}.wk.weight", "{l+}.wv.weight"]
    mapping = Mapping([Concat(separate, "{l+}.wqkv.weight", parts=(4, 1, 1))])
    reshard.load(state, path, mapping=mapping)         # each rank reads its slice of the parts, by byte range

`reshard.mapping.families` has ready ones between Hugging Face, torchtitan and Megatron.
"""

from reshard.mapping.mapping import Mapping as Mapping
from reshard.mapping.mapping import apply_dict as apply_dict
from reshard.mapping.rules import Cast as Cast
from reshard.mapping.rules import Concat as Concat
from reshard.mapping.rules import Dequantize as Dequantize
from reshard.mapping.rules import Drop as Drop
from reshard.mapping.rules import Mxfp4 as Mxfp4
from reshard.mapping.rules import Offset as Offset
from reshard.mapping.rules import Rename as Rename
from reshard.mapping.rules import Reshape as Reshape
from reshard.mapping.rules import Resize as Resize
from reshard.mapping.rules import Rope as Rope
from reshard.mapping.rules import Rule as Rule
from reshard.mapping.rules import Split as Split
from reshard.mapping.rules import Stack as Stack
from reshard.mapping.rules import Transpose as Transpose
from reshard.mapping.rules import Unstack as Unstack
