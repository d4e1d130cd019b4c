"""Folders of accelerate's `save_state` and of the Hugging Face trainer: weights in one file, the rest beside it.

    model.safetensors  optimizer.bin  scheduler.bin  random_states_0.pkl
    pytorch_model_fsdp_0/  optimizer_0/
    pytorch_model_fsdp_0_rank0.bin  optimizer_0_rank0.bin ...
    model/ or weights/  optimizer/ or optim/  model_and_optim/     LLaMA-Factory, NeMo-RL, OLMo-core, and others

The keys of each file get the name of its section: `model.`, `optimizer.`, `scheduler.`, and so on. If there are several
models and optimizers, the first are `model` and `optimizer`, and the next `model_1` and `optimizer_1`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from planners.geometry.arrays import grouped
from reshard.errors import CorruptCheckpointError, FormatError, UnsafeDataError
from reshard.formats import rank_files, safetensors
from reshard.formats.dcp import reader as dcp
from reshard.formats.format import Format
from reshard.formats.torch_save import reader as torch_save
from reshard.formats.torch_save.reader import contents_of, open_file, read_torch_file
from reshard.storage.base import Listing, Storage
from reshard.stored.checksums import CRC_OF_RECORDS
from reshard.stored.contents import DATA_FILE, NO_FACTS, Contents, Facts, LazyMapping, merge
from reshard.stored.source import Files, FileSource

_NAME = "accelerate"

_FOLDER = re.compile(
    r"((?:pytorch_model_fsdp|optimizer)_\d+|model_and_optim|model|weights|optim|optimizer)/"
    rf"(?:\.metadata|{DATA_FILE.pattern})"
)
_FOR_ITSELF: list[list[str]] = [[], ["model"], ["weights"], ["optim"], ["optimizer"]]
"""Subfolders that are separate checkpoints, not parts of one, if there are no other subfolders."""
_WEIGHTS = re.compile(
    r"(model|pytorch_model|pytorch_model_fsdp|adapter_model)((?:_\d+)?)(\.safetensors|\.bin)((?:\.index\.json)?)"
)
_BESIDE = re.compile(
    r"((?:optimizer|scheduler|scaler|sampler|dl_state_dict|random_states|rng_state)(?:_\d+)?)\.(?:bin|pt|pkl|pth)"
)
_WHOLE = re.compile(r"(training_args|custom_checkpoint_\d+)\.(?:bin|pkl)")
"""Files that contain one object of any class. It is read only on request. The result of an object's
`state_dict()` (`custom_checkpoint`) is taken apart like other files if it is plain data."""
_NUMBER = re.compile(r"-\d+-of-\d+")
_RANK_FILE = re.compile(r"(pytorch_model_fsdp|optimizer)(_\d+)?_rank\d+\.bin")


def detect(storage: Storage, names: Listing) -> bool:
    """Return True if there are weights with other files, folders of FSDP, or files of each rank, or
    if only the weights are missing, so that their loss is noticed."""
    top = [n for n in names if "/" not in n]
    if _folders(names) or _rank_files(names):
        return True
    return any(map(_beside, top)) and (any(map(_WEIGHTS.fullmatch, top)) or _lost_weights(top))


def _beside(file: str) -> re.Match[str] | None:
    return _BESIDE.fullmatch(file) or _WHOLE.fullmatch(file)


def _folders(names: Iterable[str]) -> list[str]:
    """Return the folders of DCP."""
    found = sorted({match[1] for file in names if (match := _FOLDER.fullmatch(file))})
    return [] if found in _FOR_ITSELF else found


def _lost_weights(top: Collection[str]) -> bool:
    """Return True if there are an optimizer and a scheduler, but no file that could be the weights."""
    saved = [n for n in top if n.endswith((".bin", ".pt", ".pkl", ".pth", ".safetensors", ".ckpt"))]
    parts = {match[1] for n in saved if (match := _BESIDE.fullmatch(n))}
    return {"optimizer", "scheduler"} <= parts and all(map(_beside, saved))


def _rank_files(names: Listing) -> list[rank_files.Section]:
    """Return the files of models and optimizers that every rank saved separately."""
    return list(rank_files.sections_of({n: size for n, size in names.items() if _RANK_FILE.fullmatch(n)}).values())


def open(files: Files) -> Contents:
    """Return all parts as one checkpoint.

    Raises:
        FormatError: the weights exist twice, in two formats.
        CorruptCheckpointError: a part is damaged, or the weights or the file of a rank are missing.
    """
    storage, names = files.storage, files.listed
    parts: list[tuple[str, Contents]] = []
    folders = _folders(names)
    by_rank = _rank_files(names)
    if not folders and not by_rank and not any(map(_WEIGHTS.fullmatch, names)):
        raise CorruptCheckpointError(
            f"{storage.url}: there are an optimizer and a scheduler, but no weights; looked for model.safetensors, "
            "pytorch_model.bin, adapter_model.safetensors and their indexes. To read the optimizer alone, open its file"
        )
    for folder in folders:
        # the keys of a first folder of accelerate, and of weights/, begin with "model." or
        # "optimizer." already
        is_named = folder.endswith(("_0", "_and_optim", "weights"))
        section = "" if is_named else folder.removeprefix("pytorch_").replace("_fsdp", "")
        parts.append((section, dcp.open_folder(files, f"{folder}/")))
    for file in sorted(names):
        if beside := _BESIDE.fullmatch(file):
            parts.append((beside[1], open_file(_NAME, files[file], numbered=True)))
        elif whole := _WHOLE.fullmatch(file):
            parts.append(_whole(files[file], whole[1]))
    facts: Facts = NO_FACTS
    for section, opened in _weights(files):
        parts.append((section, opened))
        # on disk, the weights of a Hugging Face model have other names than in memory
        facts = opened.details(safetensors.HuggingFaceFacts) or facts
    if by_rank:
        parts.append(("", rank_files.open_sections(_NAME, files, by_rank)))
    known = [n for n in names if _beside(n) or _WEIGHTS.fullmatch(_NUMBER.sub("", n))]
    return rank_files.with_others(merge(_NAME, parts, facts), files, by_rank, known)


def _whole(source: FileSource, key: str) -> tuple[str, Contents]:
    """Return a file of one object, taken apart if possible and if it is a dict of plain data and tensors."""
    warnings: tuple[str, ...] = ()
    if key != "training_args":
        try:
            opened = read_torch_file(source)
            if isinstance(opened.value, dict):
                return key, contents_of(_NAME, {(): opened})
        except UnsafeDataError as error:
            warnings = (f"{key} can only be read by its own program: {error}",)
    maker = {key: lambda: (read := read_torch_file(source)).plain(read.value)}
    return "", Contents({}, LazyMapping(maker), format=_NAME, warnings=warnings)


def _weights(files: Files) -> list[tuple[str, Contents]]:
    storage, names = files.storage, files.listed
    found = [m for file in sorted(names) if (m := _WEIGHTS.fullmatch(file))]
    for several in map(set, grouped((match[2], match[1] + match[3]) for match in found).values()):
        if len(several) > 1:
            raise FormatError(
                f"{storage.url} has the weights twice, in {' and '.join(sorted(several))}: open one by its path, or "
                "move the other elsewhere"
            )
    parts = []
    for match in found:
        if match[3] + match[4] == ".safetensors" and match[0] + ".index.json" in names:
            continue
        is_safetensors = match[3] == ".safetensors"
        one = match[1] + match[2] + match[3] if match[4] else match[0]
        wanted = {n: size for n, size in names.items() if n in (match[0], "config.json") or _NUMBER.sub("", n) == one}
        opened = (safetensors if is_safetensors else torch_save).open(files.some(wanted))
        parts.append(("model" + match[2], opened))
    return parts


FORMAT = Format(
    _NAME,
    checksums=CRC_OF_RECORDS,
    detect=detect,
    open=open,
    is_composite=True,
)
