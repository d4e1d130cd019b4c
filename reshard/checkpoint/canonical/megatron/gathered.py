"""Optimizer states that Megatron gathered before saving (`dp_zero_gather_scatter`): flat tensors inside objects.

optimizer.distributed.dp_group_idx_0.param_state/shard_0_1
    [{0: {(param dtype, grad dtype): {param: flat, exp_avg: flat, exp_avg_sq: flat, numel_unpadded: n}}}]
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from reshard.errors import DamagedCheckpointError, FormatError
from reshard.formats.dcp.reader import DcpFacts
from reshard.formats.pickles.torch_objects import TensorRef
from reshard.formats.stored.contents import Contents
from reshard.formats.stored.tensor import StoredTensor
from reshard.formats.torch_save.file import TorchFile, stored_tensor
from reshard.state.dtypes import dtype_name

__all__ = ["Place", "gathered_buffers"]

_KEY = re.compile(
    r"(?:chained_(?P<chained>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\.param_state/shard_0_1"
)
Place = tuple[str, int, int, str]
"""Chained optimizer, group of ranks, number of the buffer and dtype of its parameters."""


def gathered_buffers(contents: Contents) -> Iterator[tuple[Place, dict[str, StoredTensor]]]:
    """The flat tensors of every buffer by state. Nothing but the objects' pickles is read.

    Raises DamagedCheckpointError if an object is not what Megatron writes, FormatError for the form of before 2024.
    """
    facts = contents.facts
    assert isinstance(facts, DcpFacts)
    for key in contents.objects:
        match = _KEY.fullmatch(key)
        if match is None:
            continue
        file = facts.object_file(key)
        value = file.value[0] if isinstance(file.value, (list, tuple)) and len(file.value) == 1 else file.value
        if not isinstance(value, dict):
            raise DamagedCheckpointError(f"{file.source.label}: the object {key!r} holds no optimizer states")
        for number in sorted(n for n in value if type(n) is int):
            for dtypes, flats in value[number].items():
                if not isinstance(flats, dict) or not value.get("buckets_coalesced"):
                    raise FormatError(
                        f"{file.source.label}: the buckets of {key!r} are saved apart, as Megatron-core did "
                        "before 0.7; load and save the checkpoint with a newer one"
                    )
                dtype = dtype_name(dtypes[0]) if isinstance(dtypes, tuple) else str(dtypes).removeprefix("torch.")
                yield (
                    (match["chained"] or "", int(match["group"]), number, dtype),
                    {str(k): _flat(f"{key}.{k}", file, v) for k, v in flats.items() if isinstance(v, TensorRef)},
                )


def _flat(key: str, file: TorchFile, ref: Any) -> StoredTensor:
    if len(ref.size) != 1:
        raise DamagedCheckpointError(f"{file.source.label}: {key!r} has shape {list(ref.size)}, but should be flat")
    return stored_tensor(key, file, ref)
