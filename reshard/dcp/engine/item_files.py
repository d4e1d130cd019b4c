"""One file of DCP's: items one behind another, each as `torch.save` would write it or as bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo  # what torch's reader looks for in .metadata
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from reshard.formats.torch_save.zip_writer import save_tensor
from reshard.state.memory.downloads import to_host
from reshard.state.memory.lanes import Lanes, wait_for
from reshard.storage import Storage
from reshard.storage.base import Writer

__all__ = ["write_items"]

_TOGETHER_BYTES = 1 << 18  # pieces up to this size are written together


class _Gathered:
    """The file object that items are written into: small pieces, of which an item has dozens, are written together."""

    def __init__(self, out: Writer) -> None:
        self._out, self._waiting, self.nbytes = out, bytearray(), 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if size + len(self._waiting) > _TOGETHER_BYTES:
            self.let_go()
        if size > _TOGETHER_BYTES:
            self._out.write(data)
        else:
            self._waiting += data
        self.nbytes += size
        return size

    def let_go(self) -> None:
        """Write what waits."""
        self._out.write(self._waiting)
        self._waiting.clear()

    def flush(self) -> None:
        """Wait: for more, or for the end."""

    close = flush


def write_items(
    storage: Storage,
    name: str,
    items: Iterable[WriteItem],
    planner: SavePlanner,
    extensions: Sequence[Any],
    callers: Lanes,
) -> list[WriteResult]:
    """Write what `planner` gives for `items`, through `extensions`; where each item is. What they are made of on
    devices comes after what the streams of the caller were asked, whatever thread this is: see `of_caller`."""
    rows = []
    transforms = [extension.get_descriptor() for extension in reversed(extensions)]
    with storage.create(name) as file, callers.use_all():
        out = _Gathered(file)
        for item in items:
            start = out.nbytes
            data = planner.resolve_data(item)
            stream: Any = out
            for extension in extensions:
                stream = extension.transform_to(stream)
            if item.type == WriteItemType.BYTE_IO:
                stream.write(data.getbuffer())  # type: ignore[union-attr]  # the planner gives bytes for it
            else:
                save_tensor(_compact(data, callers), stream)  # type: ignore[arg-type]
            stream.close()
            info = _StorageInfo(name, start, out.nbytes - start, *([transforms] if transforms else []))
            rows.append(WriteResult(index=item.index, size_in_bytes=out.nbytes - start, storage_data=info))
        out.let_go()
    return rows


def _compact(tensor: torch.Tensor, callers: Lanes) -> torch.Tensor:
    """On the CPU, and not a view of more memory than it shows: `torch.save` writes all of it."""
    if callers[tensor.device] is None:
        wait_for(tensor.device)
    tensor = to_host([tensor.detach()])[0].resolve_conj().resolve_neg()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() and tensor.is_contiguous()
    return tensor if whole else tensor.contiguous().clone()
