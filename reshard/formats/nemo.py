"""NeMo's `.nemo` archives, and the folders that they are made of: a model's settings and its weights.

model_config.yaml              the settings
model_weights.ckpt             a state dict of torch.save
model_weights/                 or a checkpoint of Megatron-core; `weights/` beside `context/` in NeMo 2

An archive is an uncompressed tar, which is read in place.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from planners.units import format_some
from reshard.errors import CorruptCheckpointError, FormatError
from reshard.formats.dcp import reader as dcp
from reshard.formats.format import Format, at_top
from reshard.formats.megatron import files as megatron
from reshard.formats.torch_save.reader import open_file
from reshard.storage.base import Listing, Storage
from reshard.storage.tar import TarStorage
from reshard.stored.checksums import CRC_OF_RECORDS
from reshard.stored.contents import Contents, LazyMapping
from reshard.stored.source import Files

_NAME = "nemo"

_CONFIG = "model_config.yaml"
_WEIGHTS = re.compile(r"(?:(?:mp|tp)_rank_\d+(?:_pp_rank_\d+)?/)?model_weights\.ckpt")
_MAX_CONFIG_BYTES = 1 << 24


def detect(storage: Storage, names: Listing) -> bool:
    """Return whether there are archives at the top, or the contents of one."""
    return bool(at_top(names, ".nemo")) or _folder(names) is not None


def _folder(names: Listing) -> str | None:
    """Return the folder of the weights, if they are a checkpoint of Megatron-core."""
    if _CONFIG in names and any(n.startswith("model_weights/") for n in names):
        return "model_weights/"
    has_context = any(n.startswith("context/") for n in names)
    return "weights/" if has_context and any(n.startswith("weights/") for n in names) else None


def open(files: Files) -> Contents:
    """Return the model in the only archive, or in this folder. Its settings are one text.

    Raises:
        FormatError: several archives, a compressed one, or weights in the parts of several ranks.
        CorruptCheckpointError: an archive, or a file in it, is truncated.
    """
    storage, names = files.storage, files.listed
    archives = at_top(names, ".nemo")
    if not archives:
        return _open(files)
    if len(archives) > 1:
        raise FormatError(f"{storage.url} has {len(archives)} archives: {format_some(archives)}; open one by its path")
    inside = TarStorage(storage, archives[0])
    return _open(Files(inside, inside.list(), files.checking))


def _open(files: Files) -> Contents:
    storage, names = files.storage, files.listed
    folder = _folder(names)
    opened = {n for n in names if n == _CONFIG or (folder and n.startswith(folder))}
    if folder is None:
        weights = sorted(filter(_WEIGHTS.fullmatch, names))
        if not weights:
            raise CorruptCheckpointError(
                f"{storage.url}: there is neither model_weights.ckpt nor model_weights/ in it, but "
                f"{format_some(sorted(names)) or 'nothing'}"
            )
        if len(weights) > 1:
            raise FormatError(
                f"{storage.url}: its weights are in the parts of {len(weights)} model parallel ranks, such as "
                f"{weights[0]}, and no file says how they are sharded: let NeMo save it again as one, or as "
                "a distributed checkpoint"
            )
        contents = open_file(_NAME, files[weights[0]])
        opened.add(weights[0])
    elif {f"{folder}metadata.json", f"{folder}common.pt"} & set(names):
        contents = megatron.open_folder(files, folder)
    else:
        contents = dcp.open_folder(files, folder)
    return _with_config(storage, names, contents, sorted(set(names) - opened))


def _with_config(storage: Storage, names: Listing, contents: Contents, others: list[str]) -> Contents:
    """Return the contents, with the text of the settings among the objects, and what was not opened
    among the warnings."""
    warnings = (f"not opened: {format_some(others)}",) if others else ()
    objects, paths = contents.objects, contents.paths
    if _CONFIG in names and names[_CONFIG] <= _MAX_CONFIG_BYTES:
        text = bytes(storage.read(_CONFIG)).decode("utf-8", "replace")
        makers = {key: partial(objects.__getitem__, key) for key in objects}
        objects, paths = LazyMapping({**makers, _CONFIG: lambda: text}), {**paths, _CONFIG: (_CONFIG,)}
    return replace(contents, format=_NAME, objects=objects, paths=paths, warnings=(*contents.warnings, *warnings))


FORMAT = Format(
    _NAME,
    checksums=CRC_OF_RECORDS,
    detect=detect,
    open=open,
)
