"""Files of `torch.save`: one file, or Hugging Face's older `pytorch_model-*.bin` with an index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from reshard.errors import DamagedCheckpointError, FormatError
from reshard.formats.stored.checksums import CRC_OF_RECORDS
from reshard.formats.stored.contents import Contents
from reshard.formats.stored.source import Files
from reshard.formats.torch_save.file import contents_of, looks_like_torch_file, read_torch_file
from reshard.storage.base import Storage

__all__ = ["checksums", "detect", "looks_for", "name", "open"]

name = "torch_save"
looks_for = "a file of torch.save: *.pt, *.pth, *.bin, *.ckpt"
checksums = CRC_OF_RECORDS

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".th", ".tar")
_INDEX = ".bin.index.json"


def detect(storage: Storage, names: Mapping[str, int]) -> bool:
    """Whether the top folder holds files of torch.save, by their suffix; a single file also by its first bytes."""
    if any("/" not in n and n.endswith((*_SUFFIXES, _INDEX)) for n in names):
        return True
    if len(names) != 1:
        return False
    ((only, nbytes),) = names.items()
    return looks_like_torch_file(bytes(storage.read(only, 0, min(nbytes, 20))))


def open(files: Files) -> Contents:
    """The checkpoint in the only file, or in those of the index.

    Raises FormatError if there are several files that nothing says belong together.
    """
    storage, names = files.storage, files.listed
    indexes = sorted(n for n in names if "/" not in n and n.endswith(_INDEX))
    if indexes and len(names) == 1:
        files = files.some(storage.list())  # opened by the path of the index: the files lie beside it
    if indexes:
        return _open_indexed(files, indexes[0])
    found = [n for n in names if "/" not in n and (n.endswith(_SUFFIXES) or len(names) == 1)]
    if len(found) > 1:
        raise FormatError(
            f"{storage.url} holds {len(found)} files of torch.save that nothing says belong together: "
            f"{', '.join(sorted(found)[:5])}; open one by its path"
        )
    file = read_torch_file(files[found[0]])
    return contents_of(name, {(): file})


def _open_indexed(files: Files, index: str) -> Contents:
    storage, names = files.storage, files.listed
    label = f"{storage.url}/{index}"
    try:
        weight_map = {str(k): str(v) for k, v in json.loads(storage.read(index))["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{label}: no index of files: {type(error).__name__}: {error}") from None
    wanted = sorted(set(weight_map.values()))
    missing = [file for file in wanted if file not in names]
    if missing:
        raise DamagedCheckpointError(f"{storage.url}: files that {index} names are missing: {', '.join(missing[:5])}")
    merged: dict[str, Any] = {}
    for file in wanted:
        part = contents_of(name, {(): read_torch_file(files[file])})
        lost = [key for key, where in weight_map.items() if where == file and key not in part.tensors]
        if lost:
            raise DamagedCheckpointError(
                f"{label}: it says that {file} holds {lost[0]!r}, but it does not; the index lies"
            )
        extra = [key for key in part.tensors if weight_map.get(key) != file]
        if extra:
            where = f"says that it is in {weight_map[extra[0]]}" if extra[0] in weight_map else "does not have it"
            raise DamagedCheckpointError(f"{label}: {extra[0]!r} is in {file}, but the index {where}; the index lies")
        merged.update(part.tensors)
    return Contents(name, merged)
