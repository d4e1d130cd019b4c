"""DeepSpeed checkpoints: ZeRO stages 0 to 3, pipeline modules, and universal checkpoints. All files are `torch.save`'s.

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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from reshard.errors import CorruptCheckpointError, FormatError
from reshard.formats.torch_save.reader import TorchFile, contents_of, read_torch_file
from reshard.state import KeyPath
from reshard.storage.base import Storage
from reshard.stored.contents import Contents, Facts
from reshard.stored.source import Files

__all__ = ["DeepSpeedFacts", "beside", "detect", "open"]


_STATES = re.compile(
    r"((bf16_|fp16_)?zero_pp_rank_\d+_)?mp_rank_\d+(_model_states|_?optim_states)\.pt"
    r"|layer_\d+(-model_\d+)?-model_states\.pt"
    r"|layer_\d+_expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+_mp_rank_\d+_optim_states\.pt"
)
_OF_RANK = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_?(?P<kind>model|optim)_states\.pt"
)
_UNIVERSAL = re.compile(r"zero/([^/]+)/([^/]+)\.pt")
_UNIVERSAL_STATE = "zero/optimizer_state.pt"
_LATEST = ("latest", "latest_universal")
_MODEL_STATES = re.compile(r"(?:zero_pp_rank_0_)?mp_rank_00_model_states")
OWN = frozenset(
    ("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params")
    + ("frozen_param_fragments", "ds_config", "ds_version", "dp_world_size", "mp_world_size")
    + ("checkpoint_parallel_dimensions", "universal_checkpoint_info")
)
"""What a file of model states says of the model, the optimizer, and their sharding, beside a program's own values."""


@dataclass(frozen=True)
class DeepSpeedFacts(Facts):
    """What `normalized` puts parameters together from."""

    files: Mapping[str, TorchFile]
    """By the path below the checkpoint's folder, without `.pt`."""
    missing: tuple[str, ...] = ()
    """In a sentence each, files of ranks that are not there."""

    def problems(self) -> tuple[str, ...]:
        return self.missing


def detect(storage: Storage, names: Mapping[str, int]) -> bool:
    """Whether there are files of DeepSpeed's names, here or in the folder that `latest` names."""
    return any(_is_state(name, "") for name in names) or (
        any(latest in names for latest in _LATEST) and any(_is_state(n.partition("/")[2], "") for n in names)
    )


def _is_state(file: str, folder: str) -> bool:
    inner = file.removeprefix(folder)
    return file.startswith(folder) and bool(_STATES.fullmatch(inner) or _UNIVERSAL.fullmatch(inner))


def open(files: Files) -> Contents:
    """The checkpoint that `latest` names, or the one in this folder.

    Raises CorruptCheckpointError if the folder that `latest` names is not there, or a file is damaged.
    """
    storage, names = files.storage, files.listed
    folder = _folder(storage, names)
    opened: dict[KeyPath, TorchFile] = {}
    for file in sorted(names):
        inner = file.removeprefix(folder)
        if not file.startswith(folder):
            continue
        universal = _UNIVERSAL.fullmatch(inner)
        if universal:
            opened["zero", universal[1], universal[2]] = read_torch_file(files[file])
        elif _STATES.fullmatch(inner) or inner == _UNIVERSAL_STATE:
            opened[tuple(inner.removesuffix(".pt").split("/"))] = read_torch_file(files[file])
    lost = _lost([file.removeprefix(folder) for file in names if file.startswith(folder)])
    missing = tuple(
        f"{folder}{file} is missing: other files of that rank, or of higher ones, are there" for file in lost
    )
    facts = DeepSpeedFacts({"/".join(map(str, path)): file for path, file in opened.items()}, missing)
    contents = contents_of("deepspeed", opened, facts)
    return replace(contents, warnings=(*contents.warnings, *missing))


def beside(contents: Contents) -> Iterator[str]:
    """Keys of what is neither a part of the model nor of the optimizer."""
    for key in contents.objects:
        file, *inner = contents.paths.get(key, (key,))
        if _MODEL_STATES.fullmatch(str(file)) and inner and str(inner[0]) not in OWN:
            yield key


def _lost(files: Iterable[str]) -> list[str]:
    """Files that are missing among those of ranks: where there is one of a kind, every data parallel rank has one.

    What a file of ZeRO-3's models holds is in those of others, too, but for frozen parameters, which are looked for in
    all of them. The names do not show what was in files of the highest rank only.
    """
    known: dict[tuple[str, str], dict[int, str]] = {}
    for match in filter(None, map(_OF_RANK.fullmatch, files)):
        known.setdefault((match["mp"], match["kind"]), {})[int(match["rank"])] = match[0]
    return [
        re.sub(r"pp_rank_\d+", f"pp_rank_{rank}", min(there.values()))
        for (mp, _), there in known.items()
        for rank in range(1 + max(max(ranks) for (other, _), ranks in known.items() if other == mp))
        if rank not in there
    ]


def _folder(storage: Storage, names: Mapping[str, int]) -> str:
    """ "" or the folder that `latest` names, with a slash."""
    if any(_is_state(file, "") for file in names):
        return ""
    for latest in _LATEST:
        if latest not in names:
            continue
        tag = bytes(storage.read(latest)).decode("utf-8", "replace").strip().strip("/")
        if not any(_is_state(file, tag + "/") for file in names):
            raise CorruptCheckpointError(
                f"{storage.url}/{latest} names {tag!r}, but there is no checkpoint in a folder of this name"
            )
        return tag + "/"
    raise FormatError(f"{storage.url}: no {_LATEST[0]} says which of the folders is the checkpoint")
