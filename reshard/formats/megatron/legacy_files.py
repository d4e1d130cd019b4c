"""Megatron's older checkpoints (`--ckpt-format torch`): one file per model parallel rank, silent about the others.

iter_0000002/mp_rank_00/model_optim_rng.pt            tensor parallel rank 0
iter_0000002/mp_rank_00_001/model_optim_rng.pt        ... of pipeline stage 1 (without stages: of expert rank 1)
iter_0000002/mp_rank_00_001_003/model_optim_rng.pt    ... of expert parallel rank 3
iter_0000002/mp_rank_00_001/distrib_optim.pt          the distributed optimizer of that model parallel rank

The keys are those of each file, behind the names of its folder and of the file where it is not the model's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reshard.errors import DamagedCheckpointError
from reshard.formats.megatron.files import LATEST, iteration_folder
from reshard.formats.torch_save.reader import TorchFile, contents_of, read_torch_file
from reshard.state import KeyPath
from reshard.storage.base import Storage
from reshard.stored.checksums import CRC_OF_RECORDS
from reshard.stored.contents import Contents, Facts
from reshard.stored.source import Files

__all__ = [
    "LegacyFacts", "RankFiles", "arguments", "checksums", "detect", "looks_for", "name", "open",
]  # fmt: skip


name = "megatron_legacy"
looks_for = "mp_rank_<tp>[_<pp>][_<ep>]/model_optim_rng.pt"
checksums = CRC_OF_RECORDS

_FILE = re.compile(
    r"mp_rank_(?P<tp>\d{2,})(?:_(?P<second>\d{3,}))?(?:_(?P<third>\d{3,}))?/"
    r"(?P<file>model_optim_rng|model_rng|distrib_optim|optim)\.pt"
)


@dataclass
class RankFiles:
    """The files of one model parallel rank, and its place in the grid."""

    folder: str
    tp: int
    pp: int
    ep: int
    model: TorchFile
    optimizer: TorchFile | None = None
    """Of the distributed optimizer."""


@dataclass(frozen=True)
class LegacyFacts(Facts):
    """The files of all ranks, in the order of their place in the grid."""

    ranks: list[RankFiles]


def detect(storage: Storage, names: Mapping[str, int]) -> bool:
    """Whether there are folders of model parallel ranks, here or in the latest iteration's folder."""
    if LATEST in names:
        folder = iteration_folder(storage, names)
        return any(_FILE.fullmatch(file.removeprefix(folder)) for file in names)
    return any(map(_FILE.fullmatch, names))


def open(files: Files) -> Contents:
    """The files of all ranks. Raises DamagedCheckpointError if those of a rank are missing."""
    storage, names = files.storage, files.listed
    folder = iteration_folder(storage, names)
    opened: dict[KeyPath, TorchFile] = {}
    ranks: dict[tuple[int, ...], dict[str, TorchFile]] = {}
    for file in sorted(names):
        match = _FILE.fullmatch(file.removeprefix(folder)) if file.startswith(folder) else None
        if match is None:
            continue
        read = read_torch_file(files[file])
        at = tuple(int(part) for part in match.group("tp", "second", "third") if part is not None)
        kind = "optimizer" if match["file"] in ("distrib_optim", "optim") else "model"
        ranks.setdefault(at, {})[kind] = read
        path = file.removeprefix(folder).partition("/")[0]
        opened[(path,) if kind == "model" else (path, match["file"])] = read
    grid = [_place(at, of, storage.url) for at, of in sorted(ranks.items())]
    _check_grid(grid, storage.url)
    _check_optimizers(grid, storage.url)
    return contents_of(name, opened, LegacyFacts(grid))


def _place(at: tuple[int, ...], of: Mapping[str, TorchFile], url: str) -> RankFiles:
    """Where in the grid a folder is: a second number is the pipeline's where there are stages, else the experts'."""
    folder = "mp_rank_" + "_".join(f"{n:0{2 if i == 0 else 3}d}" for i, n in enumerate(at))
    if "model" not in of:
        raise DamagedCheckpointError(f"{url}: {folder} holds no model_optim_rng.pt")
    file = of["model"]
    if not isinstance(file.value, dict):
        raise DamagedCheckpointError(f"{file.source.label}: wanted a dict of model and optimizer")
    stages = arguments(file).get("pipeline_model_parallel_size")
    tp, pp, ep = at[0], 0, 0
    if len(at) == 3:
        pp, ep = at[1], at[2]
    elif len(at) == 2 and stages == 1:
        ep = at[1]
    elif len(at) == 2:
        pp = at[1]
    return RankFiles(folder, tp, pp, ep, file, of.get("optimizer"))


def arguments(file: TorchFile) -> dict[str, Any]:
    """The program's arguments that a file holds, as far as they are plain."""
    args = file.plain(file.value.get("args")) if isinstance(file.value, dict) else None
    return args if isinstance(args, dict) else {}


def _check_optimizers(ranks: list[RankFiles], url: str) -> None:
    """Raises DamagedCheckpointError if some ranks have files of the distributed optimizer, and others lack theirs.

    Of further expert ranks, only those with experts have one.
    """
    having = next((rank for rank in ranks if rank.optimizer is not None), None)
    if having is None:
        return
    for rank in ranks:
        if rank.optimizer is None and (rank.ep == 0 or _has_experts(rank.model.value)):
            raise DamagedCheckpointError(
                f"{url}: {rank.folder} has no file of the distributed optimizer (distrib_optim.pt), but "
                f"{having.folder} has one"
            )


def _has_experts(value: Any) -> bool:
    models = [part for key, part in value.items() if str(key).startswith("model") and isinstance(part, dict)]
    return any(".experts." in str(name) for model in models for name in model)


def _check_grid(ranks: list[RankFiles], url: str) -> None:
    """Raises DamagedCheckpointError unless the ranks fill their grid."""
    args = arguments(ranks[0].model)
    sizes = {
        "tp": max(int(args.get("tensor_model_parallel_size") or 0), max(r.tp for r in ranks) + 1),
        "pp": max(int(args.get("pipeline_model_parallel_size") or 0), max(r.pp for r in ranks) + 1),
        "ep": max(r.ep for r in ranks) + 1,
    }
    held = {(r.tp, r.pp, r.ep) for r in ranks}
    for tp in range(sizes["tp"]):
        for pp in range(sizes["pp"]):
            for ep in range(sizes["ep"]):
                if (tp, pp, ep) not in held:
                    raise DamagedCheckpointError(
                        f"{url}: the folder of tensor parallel rank {tp}, pipeline stage {pp}, expert rank {ep} is "
                        f"missing; there are {', '.join(r.folder for r in ranks[:6])}"
                    )
