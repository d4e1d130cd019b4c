"""Writes checkpoints of torch_checkpointing from a lazy checkpoint, as one rank saves full tensors.

Each tensor is listed as replicated over a mesh of that rank, so that torch_checkpointing loads it
into any layout.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterable, Mapping
from typing import Any

from planners.geometry.byte_ranges import Window
from planners.geometry.layout import TensorSpec
from reshard.errors import FormatError
from reshard.formats.format import Writing
from reshard.formats.torch_checkpointing.reader import ITEM, METADATA, files_of_items
from reshard.formats.torch_save.writer import NestsWriter, nest_of
from reshard.state import KeyPath, plain_key
from reshard.storage.base import Listing
from reshard.stored.contents import Contents
from reshard.stored.source import Files
from reshard.stored.streaming import FilePlan, Publication, Target

_VERSION = "2.0"
_ITEM_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_MODEL = "model"
_MESH = {"device_type": "cpu", "mesh_shape": (1,), "mesh_data": (0,), "mesh_dim_names": None}


class TorchCheckpointingWriter(NestsWriter):
    """Writes a file for each section of the state, which is an item there. Tensors outside sections
    are the item "model"."""

    def __init__(self, contents: Contents, target: Target) -> None:
        """Raises FormatError for a section that cannot be an item."""
        super().__init__(contents, target)
        self.items = _items(contents)
        self.files = tuple(
            FilePlan(f"{item}_0.pt", tuple(map(self.whole, dict.fromkeys(self._held(keys).values()))))
            for item, keys in self.items.items()
        )

    def _held(self, keys: Iterable[str]) -> dict[str, str]:
        """Return each tensor of an item, with the tensor whose elements it stores: itself, or the
        one that it is tied to."""
        aliases, first = self.contents.aliases, dict[str, str]()
        tensors = [key for key in sorted(keys, key=aliases.__contains__) if key not in self.contents.objects]
        return {key: first.setdefault(aliases.get(key, key), key) for key in tensors}

    def value(self, file: FilePlan, numbers: Mapping[str, int]) -> Any:
        """Return an item, nested as it was saved."""
        item = file.name.removesuffix("_0.pt")
        places = {key: numbers[held] for key, held in self._held(self.items[item]).items()}
        kinds = {path[1:]: kind for path, kind in self._kinds.items() if path[:1] == (item,)}
        return nest_of(self.contents, self.items[item], places, kinds)

    def finish(self, out: Publication) -> None:
        """Give the files their names, remove those of the replaced checkpoint, and publish the list
        of items."""
        old = files_of_items(Files(out.storage, out.storage.list()), self.items)
        out.retract(METADATA)
        out.name_files()
        for name in old:
            if name not in out.done:
                out.check()
                out.storage.delete(name)
        items = {}
        for item, keys in self.items.items():
            rows = {
                json.dumps([*map(plain_key, keys[key])], separators=(",", ":")): [_replicated(self.stored(key).spec)]
                for key in self._held(keys)
            }
            if rows:
                items[item] = {"nested_path_to_metadata": rows, "rank_to_layout_info": {0: None}}
        out.publish(METADATA, pickle.dumps({"metadata": items, "world_size": 1, "version": _VERSION}))

    def occupied(self, names: Listing) -> str | None:
        """Return the list of items, or files that would be mistaken for items."""
        return next((name for name in names if name == METADATA or ITEM.fullmatch(name)), None)


def _items(contents: Contents) -> dict[str, dict[str, KeyPath]]:
    """Return the keys of each item, in the order in which they were saved, with their paths in it.

    Raises FormatError if the name of a section cannot be that of an item's file.
    """
    paths = contents.paths_in_order()
    if () in paths.values():
        raise FormatError("the checkpoint is one value, but this format saves dicts")
    bare = {key for key, path in paths.items() if len(path) == 1 and key not in contents.objects}
    if bare and any(path[:1] == (_MODEL,) and len(path) > 1 for path in paths.values()):
        raise FormatError(
            f"there are tensors in no section, such as {min(bare)!r}, which would be written as the item {_MODEL!r}, "
            "but there is a section of that name: give it another one by mapping=, or leave either out by select="
        )
    items: dict[str, dict[str, KeyPath]] = {}
    for key, path in paths.items():
        item, *inner = (_MODEL, *path) if key in bare else path
        items.setdefault(_checked(item), {})[key] = tuple(inner)
    for path in contents.containers:  # empty containers have no keys
        if path and path[0] not in (*bare, _MODEL if bare else ""):
            items.setdefault(_checked(path[0]), {})
    return items


def _checked(item: Any) -> str:
    if not isinstance(item, str) or not _ITEM_NAME.fullmatch(item):
        raise FormatError(
            f"{item!r} would be an item of torch_checkpointing, whose names are of letters, digits, _ and - alone: "
            "give it another name by mapping=, or leave it out by select="
        )
    return item


def _replicated(spec: TensorSpec) -> dict[str, Any]:
    """Return the entry of a full tensor on one rank."""
    data = {
        "global_shape": list(spec.shape),
        "dtype": f"torch.{spec.dtype}",
        "stride": list(Window.row_major(0, spec.shape, 1).strides),
        "mesh_spec": _MESH,
        "placements": [{"type": "Replicate"}],
    }
    return {"sharding_metadata": {"type": "DTensorShardingMetadata", "data": data}, "ranks": (0,)}


WRITING = Writing(TorchCheckpointingWriter)
