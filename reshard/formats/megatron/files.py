"""Megatron-core's `torch_dist` checkpoints: a DCP checkpoint whose keys are final, and `common.pt` with the rest.

latest_checkpointed_iteration.txt        "2", or "release"
iter_0000002/metadata.json               {"sharded_backend": "torch_dist", ...}
iter_0000002/common.pt                   arguments, param groups, how the optimizer was sharded
iter_0000002/.metadata, __0_0.distcp     tensors, whole layers in stacks

and the older folders of one file per rank, see `legacy_files`. `reshard.formats.megatron` gives
canonical names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from reshard.errors import DamagedCheckpointError, FormatError
from reshard.formats.dcp import reader as dcp
from reshard.formats.torch_save.reader import contents_of, read_torch_file
from reshard.live.plain_data import encode_plain
from reshard.storage.base import Storage
from reshard.stored.checksums import CRC_OF_RECORDS
from reshard.stored.contents import Contents, LazyMapping, merge
from reshard.stored.source import Files
from reshard.stored.tensor import LazyTensor

__all__ = [
    "LATEST", "MegatronFacts", "checksums", "detect", "is_of_fsdp", "iteration_folder", "looks_for",
    "name", "open", "open_folder",
]  # fmt: skip


name = "megatron"
looks_for = "latest_checkpointed_iteration.txt, or metadata.json with a sharded_backend or common.pt, beside .metadata"
checksums = CRC_OF_RECORDS

LATEST = "latest_checkpointed_iteration.txt"
_BACKENDS = ("torch_dist", "torch_dcp", "fsdp_dtensor")
_COMPARED_BYTES = 1 << 20


@dataclass(frozen=True)
class MegatronFacts(dcp.DcpFacts):
    """What `normalized` needs to know of how Megatron-core saved."""

    backend: str = "torch_dist"
    common: Mapping[str, Any] = field(default_factory=dict)
    """What `common.pt` holds, but for random states."""


def iteration_folder(storage: Storage, names: Mapping[str, int]) -> str:
    """ "" or the folder of the iteration that `LATEST` names, with a slash. Raises DamagedCheckpointError if absent."""
    if LATEST not in names:
        return ""
    text = bytes(storage.read(LATEST)).decode("utf-8", "replace").strip()
    folder = f"iter_{int(text):07d}/" if text.isdigit() else f"{text}/"
    if not any(file.startswith(folder) for file in names):
        raise DamagedCheckpointError(f"{storage.url}/{LATEST} names {text!r}, but there is no folder {folder}")
    return folder


def detect(storage: Storage, names: Mapping[str, int]) -> bool:
    """Whether there is a `.metadata` with Megatron's `metadata.json` or `common.pt` beside it."""
    if LATEST in names:
        folder = iteration_folder(storage, names)
        return folder + "metadata.json" in names or folder + ".metadata" in names
    if ".metadata" not in names or not {"metadata.json", "common.pt"} & set(names):
        return False
    return "metadata.json" not in names or "sharded_backend" in _description(storage, "")


def is_of_fsdp(sharded: Contents) -> bool:
    """Whether Megatron-FSDP saved this: a nest as torch's DCP keeps it, with the settings of each parameter."""
    return any(path[:2] == ("optimizer", "param_to_group_meta") for path in sharded.paths.values())


def _description(storage: Storage, folder: str) -> dict[str, Any]:
    try:
        value = json.loads(storage.read(folder + "metadata.json"))
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{storage.url}/{folder}metadata.json: no JSON: {error}") from None
    return value if isinstance(value, dict) else {}


def open(files: Files) -> Contents:
    """The checkpoint of the latest iteration, or the one in this folder; the keys of `common.pt` begin with "common.".

    Raises:
        FormatError: the files are of another of Megatron's backends.
        DamagedCheckpointError: a file is missing or damaged.
    """
    return open_folder(files, iteration_folder(files.storage, files.listed))


def open_folder(files: Files, folder: str) -> Contents:
    """The same of the checkpoint in `folder`, "" or ending in "/"."""
    storage, names = files.storage, files.listed
    described = _description(storage, folder) if folder + "metadata.json" in names else {}
    backend = described.get("sharded_backend", "torch_dist")
    if backend not in _BACKENDS:
        raise FormatError(
            f"{storage.url}/{folder}: Megatron's backend {backend!r} is not supported, only {_BACKENDS}; let "
            "Megatron-core convert it to torch_dist"
        )
    if folder + ".metadata" not in names:
        raise DamagedCheckpointError(
            f"{storage.url}/{folder}: there is no .metadata, which comes last: the save did not end"
        )
    sharded = dcp.open_folder(files, folder)
    if not described and is_of_fsdp(sharded):
        backend = "fsdp_dtensor"
    shared: dict[str, Any] = {}
    parts = [("", sharded)]
    common = folder + "common.pt"
    if common not in names and described.get("common_backend") == "torch" and backend != "fsdp_dtensor":
        raise DamagedCheckpointError(
            f"{storage.url}/{common} is missing, which holds the program's arguments and the optimizer's settings"
        )
    if common in names:
        file = read_torch_file(files[common])
        if isinstance(file.value, dict):
            shared = {key: file.plain(value) for key, value in file.value.items() if key != "rng_state"}
        parts.append(("common", _only_here(contents_of(name, {(): file}), sharded, file.source.label)))
    known = sharded.facts_of(dcp.DcpFacts)
    assert known is not None
    facts = MegatronFacts(**vars(known), backend=backend, common=shared)
    merged = merge(name, parts, facts)
    if folder + "metadata.json" in names:
        return merged
    lost = f"{folder}metadata.json is missing: taken for one of {backend}"
    lost += "" if common in names else ", and whether it had a common.pt is not known"
    return replace(merged, warnings=(*merged.warnings, lost))


def _only_here(common: Contents, sharded: Contents, where: str) -> Contents:
    """What `common.pt` holds beyond the sharded part, to which a conversion writes all of it.

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
    tensors = {key: partial(common.tensors.__getitem__, key) for key in common.tensors if key not in twins}
    objects = {key: partial(common.objects.__getitem__, key) for key in common.objects if key not in twins}
    aliases = {key: target for key, target in common.aliases.items() if key not in twins}
    return replace(common, tensors=LazyMapping(tensors), objects=LazyMapping(objects), aliases=aliases)


def _is_same(a: Contents, key: str, b: Contents, twin: str) -> bool:
    """Whether two values are equal. Large tensors of one shape and dtype are taken to be, without reading them."""
    if key in a.tensors and twin in b.tensors:
        x, y = a.tensors[key], b.tensors[twin]
        alike = (x.spec.shape, x.spec.dtype) == (y.spec.shape, y.spec.dtype)
        if not alike or x.spec.nbytes > _COMPARED_BYTES:
            return alike
        p, q = (LazyTensor(one)[...].reshape(-1).view(torch.uint8) for one in (x, y))
        return torch.equal(p, q)
    if key not in a.objects or twin not in b.objects:
        return False
    try:  # as they are written: NaN is then equal to itself
        p, q = (encode_plain(value, tensor_bytes=_COMPARED_BYTES) for value in (a.objects[key], b.objects[twin]))
    except FormatError:  # objects of unknown classes
        p, q = a.objects[key], b.objects[twin]
    return bool(p == q)
