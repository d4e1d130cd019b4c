"""DeepSpeed checkpoints: ZeRO stages 0 to 3, pipeline modules, and universal checkpoints. All files
are `torch.save`'s.

latest                                             the name of the folder
<tag>/mp_rank_00_model_states.pt                   weights (ZeRO <= 2), shapes of parameters by group
<tag>/zero_pp_rank_0_mp_rank_00_optim_states.pt    one rank's flat pieces of masters and states
<tag>/layer_00-model_states.pt                     weights of one layer of a pipeline module
<tag>_universal/zero/<parameter>/exp_avg.pt        one file a parameter and state

The keys are those of each file, behind the file's name. `reshard.formats.deepspeed` puts
parameters together.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from reshard.errors import CorruptCheckpointError, FormatError
from reshard.formats.format import Format
from reshard.formats.torch_save.reader import TorchFile, contents_of, read_torch_file
from reshard.state import KeyPath
from reshard.storage.base import Listing, Storage
from reshard.stored.checksums import CRC_OF_RECORDS
from reshard.stored.contents import Contents, Facts
from reshard.stored.source import Files

_STATES = re.compile(
    r"((bf16_|fp16_)?zero_pp_rank_\d+_)?mp_rank_\d+(_model_states|_?optim_states)\.pt"
    r"|layer_\d+(-model_\d+)?-model_states\.pt"
    r"|layer_\d+_expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+_mp_rank_\d+_optim_states\.pt"
)
_OF_RANK = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_?(?P<kind>model|optim)_states\.pt"
)
_OF_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_OF_LAYER = re.compile(r"layer_(\d+)-")
_UNIVERSAL = re.compile(r"zero/([^/]+)/([^/]+)\.pt")
_UNIVERSAL_STATE = "zero/optimizer_state.pt"
_LATEST = ("latest", "latest_universal")
_MODEL_STATES = re.compile(r"(?:zero_pp_rank_0_)?mp_rank_00_model_states")
OWN = frozenset(
    ("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params")
    + ("frozen_param_fragments", "ds_config", "ds_version", "dp_world_size", "mp_world_size")
    + ("checkpoint_parallel_dimensions", "universal_checkpoint_info")
)
"""What a file of model states records about the model, the optimizer, and their sharding. Other
entries are the user's."""


@dataclass(frozen=True)
class DeepSpeedFacts(Facts):
    """The files from which `normalized` makes parameters."""

    files: Mapping[str, TorchFile]
    """Files by path below the checkpoint's folder, without `.pt`."""
    missing: tuple[str, ...]
    """A sentence for each missing file of a rank."""

    def problems(self) -> tuple[str, ...]:
        return self.missing


def detect(storage: Storage, names: Listing) -> bool:
    """Return whether there are files with DeepSpeed's names, here or in the folder that `latest` names."""
    return any(is_state(name, "") for name in names) or (
        any(latest in names for latest in _LATEST) and any(is_state(n.partition("/")[2], "") for n in names)
    )


def is_state(file: str, folder: str) -> bool:
    """Return whether a file has one of DeepSpeed's names in `folder`, "" or ending in "/"."""
    inner = file.removeprefix(folder)
    return file.startswith(folder) and bool(_STATES.fullmatch(inner) or _UNIVERSAL.fullmatch(inner))


def open(files: Files) -> Contents:
    """Return the checkpoint that `latest` names, or the one in this folder.

    Raises CorruptCheckpointError if the folder that `latest` names does not exist, or a file is
    damaged.
    """
    storage, names = files.storage, files.listed
    folder = _folder(storage, names)
    opened: dict[KeyPath, TorchFile] = {}
    there = {file.removeprefix(folder): file for file in sorted(names) if file.startswith(folder)}
    states = {match[2] for match in map(_UNIVERSAL.fullmatch, there) if match}
    for inner, file in there.items():
        universal = _UNIVERSAL.fullmatch(inner)
        if universal:
            opened["zero", universal[1], universal[2]] = read_torch_file(files[file], others=states)
        elif _STATES.fullmatch(inner) or inner == _UNIVERSAL_STATE:
            opened[tuple(inner.removesuffix(".pt").split("/"))] = read_torch_file(files[file])
    missing = tuple(
        f"{folder}{file} is missing: other files of this checkpoint show that it was saved"
        for file in sorted(
            {file for lost in (_lost_of_ranks, _lost_layers, _lost_states) for file in lost(there, opened.values())}
        )
    )
    facts = DeepSpeedFacts({"/".join(map(str, path)): file for path, file in opened.items()}, missing)
    contents = contents_of("deepspeed", opened, facts)
    return replace(contents, warnings=(*missing, *contents.warnings))


def beside(contents: Contents) -> Iterator[str]:
    """Yield the keys of everything that belongs neither to the model nor to the optimizer."""
    for key in (*contents.tensors, *contents.objects):
        file, *inner = contents.path_of(key)
        if _MODEL_STATES.fullmatch(str(file)) and inner and str(inner[0]) not in OWN:
            yield key


def _counts(files: Iterable[TorchFile]) -> tuple[int, int, bool]:
    """Return the numbers of ranks that the files of a checkpoint show, 0 if none do: ranks that
    share an optimizer, with one file each, and model-parallel ranks. Also return whether each of
    the first kind has a file of the model, too, as in stage 3."""
    partitions, models, shards_models = [0], [0], False
    for file in files:
        value = file.entries
        state = value.get("optimizer_state_dict")
        counts = state.get("partition_count") if isinstance(state, dict) else None
        partitions += [n for n in (counts if isinstance(counts, list) else [counts]) if isinstance(n, int)]
        models += [n for n in [value.get("mp_world_size")] if isinstance(n, int)]
        shards_models |= isinstance(state, dict) and "fp32_flat_groups" in state
    return max(partitions), max(models), shards_models


def _lost_of_ranks(there: Collection[str], files: Iterable[TorchFile]) -> Iterator[str]:
    """Yield missing files of ranks: if one rank has a file of a kind, every rank must have one."""
    is_universal = any(map(_UNIVERSAL.fullmatch, there))  # copies of some files do not matter there
    partitions, mp_ranks, shards_models = _counts(() if is_universal else files)
    matches = [*filter(None, map(_OF_RANK.fullmatch, there))]
    models = [int(match[1]) for match in map(_OF_MODEL.fullmatch, there) if match] + [int(m["mp"]) for m in matches]
    kinds = {match["kind"]: match[0] for match in matches}
    if shards_models:
        kinds.setdefault("model", "zero_pp_rank_0_mp_rank_00_model_states.pt")
    ranks = range(max([partitions, *(1 + int(match["rank"]) for match in matches)]))
    for mp in range(max([mp_ranks, is_universal, *(1 + n for n in models)])):
        wanted = {
            re.sub(r"pp_rank_\d+_mp_rank_\d+", f"pp_rank_{rank}_mp_rank_{mp:02}", name)
            for name in kinds.values()
            for rank in ranks
        }
        if "model" not in kinds:
            wanted.add(f"mp_rank_{mp:02}_model_states.pt")
        yield from wanted.difference(there)


def _lost_layers(there: Collection[str], files: Iterable[TorchFile]) -> Iterator[str]:
    """Yield missing files of a pipeline's layers. Names of parameters begin with the number of
    their layer."""
    found = {int(match[1]) for match in map(_OF_LAYER.match, there) if match}
    for file in files:
        value = file.entries
        shapes = value.get("param_shapes")
        if isinstance(shapes, list) and value.get("module", 0) is None:  # the module is in the layers' files
            named = {str(name).partition(".")[0] for group in shapes if isinstance(group, Mapping) for name in group}
            for layer in {int(number) for number in named if number.isdecimal()} - found:
                yield f"layer_{layer:02}-model_states.pt"


def _lost_states(there: Collection[str], files: Iterable[TorchFile]) -> Iterator[str]:
    """Yield missing files of a universal checkpoint: every trained parameter has the same states."""
    held: dict[str, set[str]] = {}
    for match in filter(None, map(_UNIVERSAL.fullmatch, there)):
        held.setdefault(match[1], set()).add(match[2])
    given = [file.entries.get("param_shapes") for file in files] if held else []
    groups = [group for one in given for group in (one if isinstance(one, list | tuple) else [one])]
    trained = {str(name) for group in groups if isinstance(group, Mapping) for name in group}
    kinds = [held[name] for name in trained & held.keys()]
    for name in trained if kinds else ():
        mine = held.get(name, set())
        yield from (f"zero/{name}/{state}.pt" for kind in kinds if mine < kind for state in kind - mine)


def _folder(storage: Storage, names: Listing) -> str:
    """Return "" or the folder that `latest` names, with a slash."""
    if any(is_state(file, "") for file in names):
        return ""
    for latest in _LATEST:
        if latest not in names:
            continue
        tag = bytes(storage.read(latest)).decode("utf-8", "replace").strip().strip("/")
        if not any(is_state(file, tag + "/") for file in names):
            raise CorruptCheckpointError(
                f"{storage.url}/{latest} names {tag!r}, but there is no checkpoint in a folder of this name"
            )
        return tag + "/"
    raise FormatError(f"{storage.url}: no {_LATEST[0]} says which of the folders is the checkpoint")


FORMAT = Format(
    "deepspeed",
    checksums=CRC_OF_RECORDS,
    detect=detect,
    open=open,
    is_composite=True,
    beside=beside,
    names_ranks=True,
)
