"""What SGLang's flattened buckets are, as SGLang 0.5.23 has it, and an engine that takes them.

The module `sglang.srt.weight_sync.tensor_bucket` needs torch alone: where SGLang is unpacked, it is loaded by itself,
since the packages around it need GPUs. Elsewhere stand-ins take its place. The serializer is always a stand-in: it
pickles as `multiprocessing` does, which is all that SGLang's does before it sends.
"""

from __future__ import annotations

import importlib.util
import io
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Engine", "install"]


@dataclass
class FlattenedTensorMetadata:
    """Where a tensor is in a bucket, in bytes."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


class FlattenedTensorBucket:
    """Tensors in one of uint8, without gaps."""

    def __init__(self, *, flattened_tensor: torch.Tensor, metadata: list[FlattenedTensorMetadata]) -> None:
        self.flattened_tensor, self.metadata = flattened_tensor, metadata

    @classmethod
    def empty(cls, names: Any, dtypes: Any, shapes: Any, device: Any) -> FlattenedTensorBucket:
        metadata, start = [], 0
        for name, dtype, shape in zip(names, (getattr(torch, d) for d in dtypes), map(torch.Size, shapes)):
            if start % dtype.itemsize:
                raise ValueError(f"Unaligned received tensor {name}")
            size = shape.numel() * dtype.itemsize
            metadata.append(FlattenedTensorMetadata(name, shape, dtype, start, start + size, size))
            start += size
        return cls(flattened_tensor=torch.empty(start, dtype=torch.uint8, device=device), metadata=metadata)

    def get_flattened_tensor(self) -> torch.Tensor:
        return self.flattened_tensor

    def get_metadata(self) -> list[FlattenedTensorMetadata]:
        return self.metadata

    def reconstruct_tensors(self) -> list[tuple[str, torch.Tensor]]:
        spans = [(m, self.flattened_tensor[m.start_idx : m.end_idx]) for m in self.metadata]
        return [(m.name, flat.view(m.dtype).reshape(m.shape)) for m, flat in spans]


class MultiprocessingSerializer:
    """Pickles tensors by handles of their memory."""

    @staticmethod
    def serialize(value: Any) -> bytes:
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(value)
        return buffer.getvalue()

    @staticmethod
    def deserialize(data: bytes) -> Any:
        return pickle.loads(data)


@dataclass
class Engine:
    """Takes weights as SGLang's engines do, for one rank of tensor parallelism, in this process."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    flushes: list[bool] = field(default_factory=list)
    group: dist.ProcessGroup | None = None
    refuse: Callable[[int], bool] = lambda call: False

    def _load(self, bucket: Any, flush_cache: bool) -> tuple[bool, str]:
        if self.refuse(len(self.flushes)):
            return False, "the pool is full"
        self.flushes.append(flush_cache)
        self.weights |= {name: tensor.clone() for name, tensor in bucket.reconstruct_tensors()}
        return True, "Success"

    def update_weights_from_tensor(self, payloads: list[bytes], *, load_format: str, flush_cache: bool) -> Any:
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket as Bucket

        assert load_format == "flattened_bucket"
        data = MultiprocessingSerializer.deserialize(payloads[-1])
        return self._load(Bucket(flattened_tensor=data["flattened_tensor"], metadata=data["metadata"]), flush_cache)

    def update_weights_from_distributed(
        self, names: Any, dtypes: Any, shapes: Any, *, group_name: str, flush_cache: bool, load_format: str
    ) -> Any:
        """Called in the engine's process: the group's other end is the trainer."""
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket as Bucket

        assert (group_name, load_format) == ("weight_update_group", "flattened_bucket")
        bucket = Bucket.empty(names, dtypes, shapes, "cpu")
        dist.broadcast(bucket.get_flattened_tensor(), group_src=0, group=self.group)
        return self._load(bucket, flush_cache)


def install() -> bool:
    """Whether the module of buckets is SGLang's own; in this process."""
    name = "sglang.srt.weight_sync.tensor_bucket"
    if name in sys.modules:
        return hasattr(sys.modules[name], "__file__")
    found = importlib.util.find_spec("sglang")
    file = (
        Path(found.origin).parent.joinpath(*name.split(".")[1:]).with_suffix(".py") if found and found.origin else None
    )
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
    sys.modules["sglang.srt.utils"] = ModuleType("sglang.srt.utils")
    sys.modules["sglang.srt.utils"].MultiprocessingSerializer = MultiprocessingSerializer  # type: ignore[attr-defined]
    if file is None or not file.exists():
        sys.modules[name].FlattenedTensorBucket = FlattenedTensorBucket  # type: ignore[attr-defined]
        sys.modules[name].FlattenedTensorMetadata = FlattenedTensorMetadata  # type: ignore[attr-defined]
        return False
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return True
