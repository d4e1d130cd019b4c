"""Files that every rank of FSDP1 saved by itself: local state dicts of flat parameters, and raw optimizer states.

local_model_0.pt, local_model_1.pt ...    {"layers.0._flat_param": ShardedTensor, ...}, or a 1-D piece of each parameter
raw_optim_0.pt, raw_optim_1.pt ...        {"state": {0: {"exp_avg": 1-D piece, ...}}, "param_groups": [...]}

Their names are the training program's, so files that are numbered from 0 on are looked into. The keys are those of each
file, behind the file's name; `reshard.formats.fsdp1.canonical` puts the pieces together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from reshard.errors import DamagedCheckpointError, FormatError
from reshard.formats.torch_save.pickles import TensorRef
from reshard.formats.torch_save.reader import TorchFile, contents_of, is_sharded_tensor, read_torch_file
from reshard.state import KeyPath
from reshard.storage.base import Storage
from reshard.stored.checksums import CRC_OF_RECORDS
from reshard.stored.contents import Contents, Facts
from reshard.stored.source import Files

__all__ = ["Fsdp1Facts", "checksums", "detect", "looks_for", "name", "numbered", "open"]


name = "fsdp1"
looks_for = "<name>_<rank>.pt, with flat parameters or pieces of optimizer states"
checksums = CRC_OF_RECORDS

_FILE = re.compile(r"(?P<section>.*?\D)?(?P<rank>\d+)\.(?:pt|pth|bin)")


@dataclass(frozen=True)
class Fsdp1Facts(Facts):
    """The files of all ranks, by what they are called and their rank."""

    sections: Mapping[str, Mapping[int, TorchFile]]


def numbered(names: Mapping[str, int]) -> dict[str, dict[int, str]]:
    """Files in the top folder by what they are called and their number; {} if there are others beside them."""
    out: dict[str, dict[int, str]] = {}
    for file in names:
        if "/" in file or not file.endswith((".pt", ".pth", ".bin", ".safetensors", ".ckpt")):
            continue
        match = _FILE.fullmatch(file)
        if match is None:
            return {}
        out.setdefault((match["section"] or "").rstrip("_-. "), {})[int(match["rank"])] = file
    return out


def detect(storage: Storage, names: Mapping[str, int]) -> bool:
    """Whether all files of the top folder are numbered, and the first of one kind holds pieces."""
    sections = numbered(names)
    if not all(0 in ranks for ranks in sections.values()) or max(map(len, sections.values()), default=0) < 2:
        return False  # one file is a checkpoint of its own
    files = Files(storage)
    try:
        return any(_holds_pieces(read_torch_file(files[ranks[0]]).value) for ranks in sections.values())
    except FormatError:
        return False  # no files of torch.save


def _holds_pieces(value: Any) -> bool:
    leaves = list(_leaves(value, ()))
    if any(is_sharded_tensor(leaf) for _, leaf in leaves):
        return True
    states = [
        leaf for path, leaf in leaves if "state" in path and type(path[-2]) is int and isinstance(leaf, TensorRef)
    ]
    return bool(states) and all(len(ref.size) < 2 for ref in states) and any(len(ref.size) == 1 for ref in states)


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict) and len(path) < 8:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    else:
        yield path, value


def open(files: Files) -> Contents:
    """The files of all ranks. Raises DamagedCheckpointError if that of a rank is missing."""
    storage, names = files.storage, files.listed
    sections: dict[str, dict[int, TorchFile]] = {}
    world = max(len(ranks) for ranks in numbered(names).values())
    for section, ranks in sorted(numbered(names).items()):
        missing = sorted(set(range(max(world, max(ranks) + 1))) - set(ranks))
        if missing:
            raise DamagedCheckpointError(
                f"{storage.url}: the file of rank {missing[0]} is missing; there is {ranks[min(ranks)]}"
            )
        sections[section] = {rank: read_torch_file(files[ranks[rank]]) for rank in sorted(ranks)}
    opened: dict[KeyPath, TorchFile] = {
        (f"{s}_{rank}",): file for s, ranks in sections.items() for rank, file in ranks.items()
    }
    return contents_of(name, opened, Fsdp1Facts(sections))
