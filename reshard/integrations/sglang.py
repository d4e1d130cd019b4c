"""Weights of a training job for SGLang, in its flattened buckets.

`engine` has the methods of SGLang's `Engine`. The first rank of the source calls them.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist

from reshard.api.weights import WeightBucket, WeightSource
from reshard.errors import OptionError, ReshardError, framework
from reshard.live.dtypes import dtype_name
from reshard.ranks.group import Group

with framework("sglang"):
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket, FlattenedTensorMetadata

__all__ = ["flattened", "update_from_distributed", "update_from_tensor"]


_FORMAT = "flattened_bucket"


def flattened(bucket: WeightBucket) -> Any:
    """Return SGLang's form of the bucket, in the same memory."""
    places = [
        FlattenedTensorMetadata(p.name, p.shape, p.dtype, p.start, p.stop, p.stop - p.start) for p in bucket.places
    ]
    return FlattenedTensorBucket(flattened_tensor=bucket.flat, metadata=places)


def update_from_tensor(
    engine: Any, source: WeightSource, *, tp_size: int = 1, process_group: dist.ProcessGroup | None = None
) -> None:
    """Send all weights through shared memory (CUDA IPC on GPUs). Collective over the ranks of the
    source.

    Args:
        engine: the engine on the first rank of the source, or of `process_group`. None on all other
            ranks.
        tp_size: tensor-parallel size of the engine, if the first rank sends the weights to all
            engine ranks.
        process_group: ranks on the GPUs of the engine's ranks, in the same order. Each rank sends
            the weights to the engine rank on its GPU. Needs a source with `all_ranks=True`.

    Raises ReshardError if the engine refuses. It may then have received a part of the weights.
    Raises OptionError for a source with `layouts`, and with `process_group` also for one without
    `all_ranks=True`.
    """
    from sglang.srt.utils import MultiprocessingSerializer

    group = Group(process_group, alone=process_group is None)
    if group.world_size > 1 and not source.all_ranks:
        raise OptionError("update_from_tensor(process_group=...) needs WeightSource(all_ranks=True)")
    source.require_full()
    leads = (source if process_group is None else group).rank == 0

    def send(bucket: WeightBucket, is_last: bool) -> None:
        with group.together("update"):  # the memory must stay until the engine has read it
            _check_engine(engine, leads)
            flat = flattened(bucket)
            data = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
            payloads: list[bytes] | None
            if process_group is None:
                payloads = [MultiprocessingSerializer.serialize(data) for _ in range(tp_size)]
            else:
                payloads = group.gather(MultiprocessingSerializer.serialize(data), kind=bytes)
            if leads:
                _check(engine.update_weights_from_tensor(payloads, load_format=_FORMAT, flush_cache=is_last))

    source.send(send)


def update_from_distributed(
    engine: Any, source: WeightSource, group: dist.ProcessGroup | None, *, group_name: str = "weight_update_group"
) -> None:
    """Broadcast all weights to the engine's ranks. Collective over the ranks of the source.

    Args:
        engine: the engine on the first rank of the source. None on all other ranks.
        group: the process group of that rank (as rank 0) and the engine's ranks, from
            `init_weights_update_group` in the engine. None on all other ranks.
        group_name: name of this group in the engine.

    Raises ReshardError if the engine refuses. It may then have received a part of the weights.
    """
    source.require_full()
    leads = source.rank == 0
    with ThreadPoolExecutor(1) as beside:

        def send(bucket: WeightBucket, is_last: bool) -> None:
            _check_engine(engine, leads)
            if not leads:  # with all_ranks=True, all ranks get here
                return
            names, shapes, dtypes = zip(*((p.name, list(p.shape), dtype_name(p.dtype)) for p in bucket.places))
            how = {"group_name": group_name, "flush_cache": is_last, "load_format": _FORMAT}
            asked = beside.submit(
                engine.update_weights_from_distributed, list(names), list(dtypes), list(shapes), **how
            )
            sent = dist.broadcast(bucket.flat, group_src=0, group=group, async_op=True)
            _check(asked.result())
            sent.wait()

        source.send(send)


def _check_engine(engine: Any, leads: bool) -> None:
    if (engine is not None) != leads:
        raise OptionError(f"pass the engine on the first rank, and None on the others: got {engine!r:.80}")


def _check(answer: Any) -> None:
    """Raise ReshardError if the engine refused. Engines return a pair, servers a dict."""
    said = answer if isinstance(answer, Mapping) else dict(zip(("success", "message"), answer))
    if not said.get("success"):
        raise ReshardError(f"SGLang refused the weights: {said.get('message')}")
