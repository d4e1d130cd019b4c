"""Megatron-core's `torch_dist` checkpoints: a DCP checkpoint whose keys are final, and
`common.pt` with the rest.

latest_checkpointed_iteration.txt        "2", or "release"
iter_0000002/metadata.json               {"sharded_backend": "torch_dist", ...}
iter_0000002/common.pt                   arguments, param groups, how the optimizer was sharded
iter_0000002/.metadata, __0_0.distcp     tensors, whole layers in stacks

And the older folders of one file per rank (`--ckpt-format torch`), below.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch

from planners.units import format_some
from reshard.errors import CorruptCheckpointError, FormatError
from reshard.formats.dcp import reader as dcp
from reshard.formats.format import Format
from reshard.formats.torch_save.reader import TorchFile, contents_of, read_torch_file
from reshard.live.plain_data import encode_plain
from reshard.state import KeyPath
from reshard.storage.base import Listing, Storage
from reshard.stored.checksums import CRC_OF_RECORDS
from reshard.stored.contents import Contents, Facts, has_dcp, merge
from reshard.stored.source import Files
from reshard.stored.tensor import LazyTensor

LATEST = "latest_checkpointed_iteration.txt"
_BACKENDS = ("torch_dist", "torch_dcp", "fsdp_dtensor")
_COMPARED_BYTES = 1 << 20


@dataclass(frozen=True)
class MegatronFacts(dcp.DcpFacts):
    """What `normalized` needs to know of how Megatron-core saved."""

    backend: str = "torch_dist"
    common: Mapping[str, Any] = field(default_factory=dict)
    """The contents of `common.pt` without random states."""


def iteration_folder(storage: Storage, names: Listing) -> str:
    """Return "" or the folder of the iteration that `LATEST` names, with a slash. Raises
    CorruptCheckpointError if it does not exist."""
    if LATEST not in names or any(name.startswith("global_step_") for name in names):  # verl uses the name, too
        return ""
    text = bytes(storage.read(LATEST)).decode("utf-8", "replace").strip()
    folder = f"iter_{int(text):07d}/" if text.isdecimal() and len(text) < 20 else f"{text}/"
    if not any(file.startswith(folder) for file in names):
        raise CorruptCheckpointError(f"{storage.url}/{LATEST} names {text!r}, but there is no folder {folder}")
    return folder


def detect(storage: Storage, names: Listing) -> bool:
    """Return True if two of these are there: files of DCP, `metadata.json`,
    and `common.pt`."""
    if LATEST in names:
        folder = iteration_folder(storage, names)
        return folder + "metadata.json" in names or folder + ".metadata" in names
    if has_dcp(names) + ("metadata.json" in names) + ("common.pt" in names) < 2:
        return False
    return "metadata.json" not in names or "sharded_backend" in _description(storage, "")


def claim(contents: Contents) -> Contents | None:
    """Return the contents of an archive of NeMo's, or of a Megatron-FSDP checkpoint that was opened
    without the folder above it."""
    if contents.details(MegatronFacts) is not None:
        return contents
    known = contents.details(dcp.DcpFacts)
    if contents.format != "dcp" or known is None or not _is_of_fsdp(contents):
        return None
    return replace(contents, facts=MegatronFacts(**vars(known), backend="fsdp_dtensor"))


def beside(contents: Contents) -> Iterator[str]:
    """Yield the keys of everything that belongs neither to the model nor to the optimizer."""
    for key in (*contents.tensors, *contents.objects):
        if key.startswith("common."):
            settings = key.startswith("common.optimizer.") and ".grad_scaler" not in key
            is_beside = not settings and not key.startswith("common.content_metadata.")
        elif "_extra_state/" in key:  # state of fp8 recipes; otherwise, it is empty
            is_beside = key in contents.objects and contents.objects[key] != [None]
        else:
            is_beside = key.startswith(("rng_state", "rerun_state_machine", "opt_param_scheduler"))
        if is_beside:
            yield key


def _is_of_fsdp(sharded: Contents) -> bool:
    """Return True if Megatron-FSDP saved this: a nest as in torch's DCP, with the settings of each
    parameter."""
    return any(path[:2] == ("optimizer", "param_to_group_meta") for path in sharded.paths.values())


def _description(storage: Storage, folder: str) -> dict[str, Any]:
    try:
        value = json.loads(storage.read(folder + "metadata.json"))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{storage.url}/{folder}metadata.json: not valid JSON: {error}") from None
    return value if isinstance(value, dict) else {}


def open(files: Files) -> Contents:
    """Return the checkpoint of the latest iteration, or the one in this folder. Keys of `common.pt`
    begin with "common.".

    Raises:
        FormatError: the files are of another of Megatron's backends.
        CorruptCheckpointError: a file is missing or damaged.
    """
    return open_folder(files, iteration_folder(files.storage, files.listed))


def open_folder(files: Files, folder: str) -> Contents:
    """Return the same of the checkpoint in `folder`, "" or ending in "/"."""
    storage, names = files.storage, files.listed
    described = _description(storage, folder) if folder + "metadata.json" in names else {}
    backend = described.get("sharded_backend", "torch_dist")
    if backend not in _BACKENDS:
        raise FormatError(
            f"{storage.url}/{folder}: Megatron's backend {backend!r} is not supported, only {_BACKENDS}; let "
            "Megatron-core convert it to torch_dist"
        )
    if folder + ".metadata" not in names:
        raise CorruptCheckpointError(
            f"{storage.url}/{folder}: there is no .metadata, which is written last: the save did not finish, or "
            "the file was not copied"
        )
    sharded = dcp.open_folder(files, folder)
    if not described and _is_of_fsdp(sharded):
        backend = "fsdp_dtensor"
    shared: dict[str, Any] = {}
    parts = [("", sharded)]
    common = folder + "common.pt"
    if common not in names and described.get("common_backend") == "torch" and backend != "fsdp_dtensor":
        raise CorruptCheckpointError(
            f"{storage.url}/{common} is missing, which holds the program's arguments and the optimizer's settings"
        )
    if common in names:
        file = read_torch_file(files[common])
        shared = {key: file.plain(value) for key, value in file.entries.items() if key != "rng_state"}
        parts.append(("common", _only_here(contents_of("megatron", {(): file}), sharded, file.source.label)))
    facts = MegatronFacts(**vars(sharded.known(dcp.DcpFacts)), backend=backend, common=shared)
    beside = (files[name] for name in names if not name.endswith((".distcp", ".metadata", "/")))
    merged = replace(merge("megatron", parts, facts), files=(*sharded.files, *beside))
    if folder + "metadata.json" in names:
        return merged
    lost = f"{folder}metadata.json is missing: assuming the backend {backend}"
    lost += "" if common in names else ", and whether it had a common.pt is not known"
    return replace(merged, warnings=(*merged.warnings, lost))


def _only_here(common: Contents, sharded: Contents, where: str) -> Contents:
    """Return what `common.pt` contains beyond the sharded part. A conversion writes all of it
    there.

    Raises FormatError if the two contradict each other.
    """
    held = {*sharded.tensors, *sharded.objects}
    twins = {key for key in (*common.tensors, *common.objects) if f"common.{key}" in held}
    for key in twins:
        if not _is_same(common, key, sharded, f"common.{key}"):
            raise FormatError(
                f"{where}: {key!r} differs from 'common.{key}' in the files beside it, so they are of two checkpoints: "
                "move common.pt elsewhere, or put the right one in its place"
            )
    return common.only({*common.tensors, *common.objects, *common.aliases} - twins)


def _is_same(a: Contents, key: str, b: Contents, twin: str) -> bool:
    """Return True if two values are equal. Large tensors of one shape and dtype are assumed to be
    equal, without reading them."""
    if key in a.tensors and twin in b.tensors:
        x, y = a.tensors[key], b.tensors[twin]
        alike = (x.spec.shape, x.spec.dtype) == (y.spec.shape, y.spec.dtype)
        if not alike or x.spec.nbytes > _COMPARED_BYTES:
            return alike
        p, q = (LazyTensor(one)[...].reshape(-1).view(torch.uint8) for one in (x, y))
        return torch.equal(p, q)
    if key not in a.objects or twin not in b.objects:
        return False
    try:  # compare as written, so that NaN equals itself
        p, q = (encode_plain(value, tensor_bytes=_COMPARED_BYTES) for value in (a.objects[key], b.objects[twin]))
    except FormatError:  # objects of unknown classes
        p, q = a.objects[key], b.objects[twin]
    return bool(p == q)


# Megatron's older checkpoints (`--ckpt-format torch`): one file per model parallel rank, which says
# nothing about the other files.
#
#     iter_0000002/mp_rank_00/model_optim_rng.pt            tensor parallel rank 0
#     iter_0000002/mp_rank_00_001/model_optim_rng.pt        ... of pipeline stage 1 (without stages: of expert rank 1)
#     iter_0000002/mp_rank_00_001_003/model_optim_rng.pt    ... of expert parallel rank 3
#     iter_0000002/mp_rank_00_001/distrib_optim.pt          the distributed optimizer of that model parallel rank
#
# Keys begin with the name of the folder, and of the file if it is not the model's.


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
    optimizer: TorchFile | None
    """The file of the distributed optimizer."""


@dataclass(frozen=True)
class LegacyFacts(Facts):
    """The files of all ranks, in the order of their place in the grid."""

    ranks: list[RankFiles]
    experts_tp: int
    """Number of tensor parallel ranks that share an expert."""


def detect_legacy(storage: Storage, names: Listing) -> bool:
    """Return True if there are folders of model parallel ranks, here or in the latest iteration's folder."""
    if LATEST in names:
        folder = iteration_folder(storage, names)
        return any(_FILE.fullmatch(file.removeprefix(folder)) for file in names)
    return any(map(_FILE.fullmatch, names))


def open_legacy(files: Files) -> Contents:
    """Return the contents of the files of all ranks. Raises CorruptCheckpointError if a rank's
    files are missing."""
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
    facts = LegacyFacts(grid, _check_grid(grid, files))
    _check_order(grid, files)
    _check_optimizers(grid, files)
    return contents_of("megatron_legacy", opened, facts)


def _place(at: tuple[int, ...], of: Mapping[str, TorchFile], url: str) -> RankFiles:
    """Return where in the grid a folder is. A second number is the pipeline's if there are stages,
    and otherwise the experts'."""
    folder = "mp_rank_" + "_".join(f"{n:0{2 if i == 0 else 3}d}" for i, n in enumerate(at))
    if "model" not in of:
        raise CorruptCheckpointError(f"{url}: {folder} holds no model_optim_rng.pt")
    file = of["model"]
    if not isinstance(file.value, dict):
        raise CorruptCheckpointError(f"{file.source.label}: expected a dict of model and optimizer")
    stages = arguments(file).get("pipeline_model_parallel_size")
    tp, pp, ep, *_ = *at, 0, 0
    if len(at) == 2 and stages == 1:
        pp, ep = ep, pp
    return RankFiles(folder, tp, pp, ep, file, of.get("optimizer"))


def arguments(file: TorchFile) -> dict[str, Any]:
    """Return the program's arguments in a file, as far as they are plain data."""
    args = file.plain(file.entries.get("args"))
    return args if isinstance(args, dict) else {}


def _experts_tp(ranks: list[RankFiles], tp: int) -> int:
    """Return how many ranks share an expert: rank `t` of `tp` has its shard `t` modulo this number.

    Raises FormatError if the names of folders do not show it.
    """
    given = arguments(ranks[0].model).get("expert_tensor_parallel_size")
    if not given or not any(_has_experts(rank.model.value) for rank in ranks):
        return tp
    if tp % given:
        raise FormatError(
            f"{ranks[0].model.source.label}: expert_tensor_parallel_size, {given}, does not divide "
            f"tensor_model_parallel_size, {tp}, so folders called by these do not show "
            "which shards of experts they hold: let Megatron-core save it as torch_dist"
        )
    return int(given)


def _check_optimizers(ranks: list[RankFiles], files: Files) -> None:
    """Raise CorruptCheckpointError if some ranks have files of the distributed optimizer, and
    others lack theirs.

    Of the further expert parallel ranks, only those with experts have one.
    """
    having = next((rank for rank in ranks if rank.optimizer is not None), None)
    if having is None:
        return
    for rank in ranks:
        if rank.optimizer is None and (rank.ep == 0 or _has_experts(rank.model.value)):
            words = f"{rank.folder} has no file of the distributed optimizer (distrib_optim.pt)"
            words += f", but {having.folder} has one"
            files.checking.refuse(CorruptCheckpointError(f"{files.storage.url}: {words}"))


def _has_experts(value: Any) -> bool:
    models = [part for key, part in value.items() if str(key).startswith("model") and isinstance(part, dict)]
    return any(".experts." in str(name) for model in models for name in model)


def _check_grid(ranks: list[RankFiles], files: Files) -> int:
    """Return how many ranks share an expert.

    Raises CorruptCheckpointError unless the ranks fill their grid.
    """
    args = arguments(ranks[0].model)
    tp_size, pp_size = (
        max(int(args.get(name) or 0), max(held) + 1)
        for name, held in (
            ("tensor_model_parallel_size", [r.tp for r in ranks]),
            ("pipeline_model_parallel_size", [r.pp for r in ranks]),
        )
    )
    etp_size = _experts_tp(ranks, tp_size)
    held = {(r.tp, r.pp, "any") for r in ranks}
    wanted = {*product(range(tp_size), range(pp_size), ["any"])}
    held |= {(r.tp % etp_size, r.pp, str(r.ep)) for r in ranks}
    eps = map(str, range(max(r.ep for r in ranks) + 1))
    wanted |= {*product(range(etp_size), range(pp_size), eps)}
    for tp, pp, ep in sorted(wanted - held):
        place = f"tensor parallel rank {tp}, pipeline stage {pp}, expert rank {ep}"
        there = format_some([r.folder for r in ranks])
        words = f"{files.storage.url}: the folder of {place} is missing; there are {there}"
        files.checking.refuse(CorruptCheckpointError(words))
    return etp_size


def _check_order(ranks: list[RankFiles], files: Files) -> None:
    """Raise CorruptCheckpointError if files were swapped.

    Megatron records the rank that wrote a file, which grows along each axis. Tools that create such
    files record the same rank in all of them.
    """
    folders: dict[tuple[int, ...], str] = {(rank.tp, rank.pp, rank.ep): rank.folder for rank in ranks}
    noted = ((rank.tp, rank.pp, rank.ep, arguments(rank.model).get("rank")) for rank in ranks)
    writers = {tuple(at): number for *at, number in noted if isinstance(number, int)}
    if len({*writers.values()}) < 2:
        return
    for at, axis in product(writers, range(3)):
        before = *at[:axis], at[axis] - 1, *at[axis + 1 :]
        if before in writers and writers[before] >= writers[at]:
            words = f"{folders[before]} was written by rank {writers[before]}, and {folders[at]} by rank {writers[at]}"
            words = f"{files.storage.url}: {words}, so these are not the folders that they were saved to"
            files.checking.refuse(CorruptCheckpointError(words))


_READ = re.compile(r"model\d*|optimizer|(distrib_)?optim|rng_state")


def _beside_legacy(contents: Contents) -> Iterator[str]:
    """Yield the tensors that belong neither to a model nor to an optimizer, such as a program's
    own tensors."""
    yield from (key for key in contents.tensors if not _READ.fullmatch(str(contents.path_of(key)[1])))


FORMAT = Format(
    "megatron",
    checksums=CRC_OF_RECORDS,
    detect=detect,
    open=open,
    is_composite=True,
    holds_dcp=True,
    claim=claim,
    beside=beside,
)
LEGACY = Format(
    "megatron_legacy",
    checksums=CRC_OF_RECORDS,
    detect=detect_legacy,
    open=open_legacy,
    is_composite=True,
    beside=_beside_legacy,
)
