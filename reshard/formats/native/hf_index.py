"""The index beside a native checkpoint of one file of whole tensors, for Hugging Face tools: they read no manifest.

{"metadata": {"total_size": 96}, "weight_map": {"w": "data-<save id>/00000.safetensors"}}
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from planners.save.plan import SavePlan
from reshard.formats.native import generations
from reshard.formats.native.manifest import HF_INDEX
from reshard.formats.native.reader import NativeFacts
from reshard.storage.base import Storage

__all__ = ["index_problem", "publish_index"]


class _Index(msgspec.Struct, forbid_unknown_fields=True):
    weight_map: dict[str, str]
    metadata: dict[str, int] = {}


def publish_index(storage: Storage, save_id: str, plan: SavePlan, files: Mapping[int, str] | None) -> None:
    """Where one rank has written every tensor whole, say so; else remove the index of an older save.

    Of two saves that race, only the one whose manifest counts leaves an index. If the other's came later nevertheless,
    there is none in the end, which is better than one of files that are gone.

    Args:
        save_id: of the save, whose manifest is published already.
        files: the name of each rank's data file; None where they do not hold all.
    """
    weight_map = None if files is None else _weight_map(plan, files)
    if weight_map is None:
        storage.delete(HF_INDEX)
    elif generations.counts(storage, save_id):
        storage.publish(HF_INDEX, msgspec.json.encode(_Index(weight_map, {"total_size": plan.total_bytes})))
        if not generations.counts(storage, save_id):
            storage.delete(HF_INDEX)


def index_problem(native: NativeFacts) -> str | None:
    """What would lead Hugging Face tools to other tensors than the manifest names; None if there is no index."""
    if HF_INDEX not in native.storage.list(HF_INDEX):
        return None
    where = f"{native.storage.url.rstrip('/')}/{HF_INDEX}"
    files = {int(rank): record.name for rank, record in native.manifest.files.items()}
    expected = None if native.manifest.tables else _weight_map(native.plan, files)
    if expected is None:
        return f"{where}: no index belongs here, since the tensors are not whole in one file; remove it"
    try:
        index = msgspec.json.decode(native.storage.read(HF_INDEX), type=_Index)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return f"{where}: it is no index: {error}"
    found, metadata = index.weight_map, {"total_size": native.plan.total_bytes}
    wrong = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
    if not wrong and index.metadata != metadata:
        return f"{where}: its metadata is {index.metadata}, but by the manifest it is {metadata}: it was changed"
    if not wrong:
        return None
    says, is_in = (f"in {of[wrong[0]]}" if wrong[0] in of else "nowhere" for of in (found, expected))
    return (
        f"{where}: it says that {wrong[0]!r} is {says}, but by the manifest it is {is_in} ({len(wrong)} names differ): "
        "Hugging Face tools would read other tensors; remove it, or save again"
    )


def _weight_map(plan: SavePlan, files: Mapping[int, str]) -> dict[str, str] | None:
    """The file of every tensor; None unless there is one file, of whole tensors."""
    specs = plan.layout.specs
    items = (item for rank in range(plan.world_size) for item in plan.items(rank))
    if len(set(files.values())) != 1 or any(item.box.sizes != specs[item.fqn].shape for item in items):
        return None
    return dict.fromkeys(specs, next(iter(files.values())))
