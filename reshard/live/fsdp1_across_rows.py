"""A ShardedTensor that, under FSDP1, is split inside rows. It cannot be mistaken for one that is
split between rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor  # type: ignore[attr-defined]

from reshard.errors import LayoutError

_Local = Callable[[torch.Tensor], torch.Tensor]


class _NoChunks(list[Any]):
    """A list whose length differs from that of a list with one chunk, and whose items raise.
    torch's planners use only the length."""

    def __init__(self, tensor: CutAcrossRows) -> None:
        super().__init__()
        self._tensor = tensor

    def __len__(self) -> int:
        return max(2, len(self._tensor._local_shards))

    def __getitem__(self, index: Any) -> NoReturn:
        self._refuse()

    def __iter__(self) -> NoReturn:
        self._refuse()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        cut = self._tensor.flat_cut
        low, high = cut.ranges[torch.distributed.get_rank(cut.group)]
        raise LayoutError(
            f"a parameter of shape {cut.shape} is sharded across its rows by FSDP1's flat parameters: this rank holds "
            f"its elements {low} to {high}, and not a chunk of rows, as ShardedTensors of FSDP1 must. Get "
            "the state dict with reshard.dcp.state_dict, which sends every rank its chunk, or set it with "
            "reshard.set_state_dict, which accepts it as it is"
        )


class CutAcrossRows(ShardedTensor):
    """This rank's range of a flattened tensor, which begins or ends inside a row on some rank.

    Its metadata describe what every rank holds. torch's planners read these, so they save and load
    it correctly: it implements their protocol (`__create_write_items__` and the others). All other
    code that reads ShardedTensors of FSDP1, such as torch's setters and gathering, would mistake
    the first shard of each rank for its chunk of rows. It gets an error instead.

    Attributes:
        flat_cut: how the tensor is sharded, a `FlatCut`.
        flat_local: this rank's range, 1-D. The shards are views of it.
    """

    _is_cut_across_rows = True
    flat_cut: Any
    flat_local: torch.Tensor

    @classmethod
    def of(cls, cut: Any, local: torch.Tensor, sharded: Any) -> torch.Tensor:
        """Create it from the ShardedTensor `sharded`, which was made from `local`."""
        sharded.__class__ = cls
        sharded.flat_cut, sharded.flat_local = cut, local
        made: torch.Tensor = sharded
        return made

    def local_shards(self) -> Any:
        """Return a list that refuses to return a shard, because callers would mistake it for a
        chunk of rows."""
        return _NoChunks(self)

    def _remade(self, change: _Local) -> torch.Tensor:
        made: torch.Tensor = self.flat_cut.tensor(change(self.flat_local))
        return made

    def detach(self) -> torch.Tensor:
        """Return a tensor with the same memory."""
        return self._remade(torch.Tensor.detach)

    def clone(self, **kwargs: Any) -> torch.Tensor:
        """A copy."""
        return self._remade(torch.Tensor.clone)

    def cpu(self, *args: Any, **kwargs: Any) -> Any:
        """Return the tensor on the CPU: itself if it is there."""
        return self if self.flat_local.device.type == "cpu" else self._remade(torch.Tensor.cpu)

    def cuda(self, *args: Any, **kwargs: Any) -> Any:
        """Return the tensor on an accelerator."""
        return self._remade(lambda local: local.cuda(*args, **kwargs))

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return the tensor with another dtype or device: itself if nothing changes."""
        local = self.flat_local.to(*args, **kwargs)
        return self if local is self.flat_local else self._remade(lambda _: local)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self._remade(lambda local: copy.deepcopy(local, memo))

    def __create_write_items__(self, fqn: str, value: Any) -> list[Any]:
        """Return what torch's planners save for it."""
        from torch.distributed.checkpoint import planner
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

        properties, size = TensorProperties(dtype=self.flat_local.dtype), torch.Size(self.flat_cut.shape)
        return [
            planner.WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(chunk, properties, size),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        """Return what torch's planners load into."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        sizes = [(shard.metadata.shard_offsets, shard.metadata.shard_sizes) for shard in self._local_shards]
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(size)) for offsets, size in sizes]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        """Return the memory of one of these chunks."""
        for shard in self._local_shards:
            if tuple(shard.metadata.shard_offsets) == tuple(index.offset or ()):
                found: torch.Tensor = shard.tensor
                return found
        raise LayoutError(f"{index.fqn!r} has no shard at {index.offset} on this rank")
