"""Detects the format of a path, which may be a step of a run, and opens it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import islice
from pathlib import Path
from urllib.parse import unquote, urlsplit

from planners.units import format_some
from reshard.errors import (
    RESTORE,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatError,
    NewerVersionError,
    StorageError,
    did_you_mean,
)
from reshard.formats.format import Format, refuse_plan, unopened_text
from reshard.formats.run_folder import (
    LEDGER,
    Run,
    RunStep,
    discarded_in,
    format_steps,
    open_step,
    path_below,
    with_last_placed,
)
from reshard.formats.table import FORMATS, formats
from reshard.live.garbage_collection import gc_paused
from reshard.native import reader as native
from reshard.native.manifest import HF_INDEX, MANIFEST, is_generation, without_claim
from reshard.storage.base import AnyPath, Listing, Storage, is_temporary
from reshard.storage.local import LocalStorage
from reshard.storage.opening import StoragePath, open_storage, path_text
from reshard.stored.checksums import CRC_OF_RECORDS, EVERY_BLOCK, Checking
from reshard.stored.contents import DATA_FILE, Contents, has_dcp, name_checkpoint
from reshard.stored.source import Files

_OF_TREES = {tree for row in FORMATS for tree in row.trees}
"""Files of formats whose subfolders can have any names."""

_MARKERS = (MANIFEST, ".metadata")
"""Files whose path may be given instead of their checkpoint's, regardless of other files beside them."""

_ATTEMPTS = 100
"""How many times to look at a checkpoint that is being replaced: each time, another save may have ended."""

FILE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".safetensors", ".gguf", ".nemo", ".json")

JOB_FOLDER = re.compile(r"convert-[0-9a-f]{32}/")
"""The folder with the records of a conversion in progress."""

BECOMES_FOLDER = "%s becomes a folder. Only the format torch_save writes a file at the path that you give"
"""What to log if a folder is about to get a file's name."""


_Found = tuple[Storage, dict[str, int]]
"""A storage, and the files to look at."""


@gc_paused()
def open_contents(
    path: StoragePath,
    *,
    preferred: Format | None = None,
    step: int | None = None,
    share: native.Share = native.ALL,
    check: bool = True,
    lists: bool = False,
) -> tuple[Contents, str]:
    """Open the checkpoint at `path`, in the format that its files show. Also return a text with its
    location.

    `preferred`: the format to use if several match; it may be another reader of the same name.
    `share`: which files this process checks for, if many processes open the checkpoint together.
    `check`: whether reads are compared with checksums, if there are any. `lists`: list missing and
    damaged files in `problems()`, and open the rest.

    Raises CheckpointNotFoundError, FormatError, or the errors of the format's `open`.
    """
    found = _find(path) if local_path(path) is None else None
    run = _run_at(path, found, preferred, is_sure=step is not None)
    open_at = partial(_open_at, preferred=preferred, share=share, check=check, lists=lists)
    if step is None and not run.steps:
        return open_at(path, found)
    if isinstance(path, Storage):
        what = f"the folder of a run, whose steps are {format_steps(run.steps)}" if run.steps else "no folder of a run"
        raise FormatError(f"{path.url} is {what}: open a checkpoint of a run by the path of the run or of the step")
    return open_step(path, run, step, open_at, has_ended)


def steps_at(path: StoragePath, *, is_sure: bool = False) -> list[RunStep]:
    """Return the checkpoints of the run at `path`, the oldest first.

    Returns None if it is not the folder of a run. Unless a run is meant for sure (`is_sure`), also
    returns None if it is a checkpoint. Raises FormatError for a local folder with many entries and
    no checkpoint, and for a folder that is both a run and a checkpoint.
    """
    return _run_at(path, _find(path) if local_path(path) is None else None, None, is_sure=is_sure).steps


def step_path(path: AnyPath, number: int) -> str:
    """Return the path of a step of the run, complete or not. Raises CheckpointNotFoundError if
    there is none."""
    return path_below(path, Run(steps_at(path, is_sure=True), []).having(number, path)[0].name)


def _run_at(path: StoragePath, found: _Found | None, preferred: Format | None, *, is_sure: bool) -> Run:
    """Return the run in a folder. Only this function decides whether a folder is a run or a
    checkpoint: see below.

    Args:
        found: the storage and files of a path that is not local. Names are listed only when they
            are needed.
    """
    none = Run([], [])
    text = "" if isinstance(path, Storage) else path_text(path)
    if ("*" in text and not os.path.lexists(local_path(text) or "")) or (text and found and _file_of(text) in found[1]):
        return none
    look: Look = cache(partial(look_at, local_path(path) or "") if found is None else partial(look_in, found[1]))
    steps, marks = steps_seen(look), marks_in(look("")[1])
    inner = steps[0].name[: steps[0].name.rfind("/") + 1] if steps else ""
    if steps and LEDGER in look(inner)[1]:
        gone = discarded_in(found[0] if found is not None else open_storage(path), inner)
        steps = [replace(step, is_discarded=step.name in gone) for step in steps]
    if any(step.step is None for step in steps) and not isinstance(path, Storage):
        steps = with_last_placed(path, steps)
    if not steps and not marks and found is None and shows_nothing(look):
        folders, files = look("")
        raise FormatError(
            f"{_text(path)} is neither a checkpoint in a known format nor the folder of a run: none of its "
            f"{len(folders) + len(files):,} entries, or of the names directly below them, is a file of a checkpoint. "
            f"It contains {format_some(sorted((*folders, *files)))}"
        )
    if is_sure or not marks:
        return none if isinstance(path, Storage) and not is_sure else Run(steps, [])
    certain = [step for step in steps if is_certain(look, step)]
    if not certain:
        return none
    storage, names = found or _find(path)
    if _owns_all(storage, names, preferred):
        return none
    owned = [*filter(_OWNED.fullmatch, marks)]
    if MANIFEST in names and native.detect(storage, {MANIFEST: names[MANIFEST]}):
        owned.insert(0, MANIFEST)
    if owned:
        raise FormatError(
            f"{_text(path)} is both a checkpoint ({owned[0]}) and the folder of a run with the steps "
            f"{format_steps(steps)}. Choose one: pass step=, the path of a step, or {path_below(_text(path), owned[0])}"
        )
    return Run(steps, [name for name in marks if name not in _OF_TREES])


def _owns_all(storage: Storage, names: Listing, preferred: Format | None) -> bool:
    """Return True if the names at the top belong to a format whose folders can have any names, or
    to the preferred format."""
    if preferred is not None and preferred.detect(storage, names):
        return True
    if not _OF_TREES & set(names):
        return False
    return any(format.is_composite and format.detect(storage, names) for format in formats())


def run_in(names: Collection[str]) -> str:
    """Return the newest steps, for a message, if these are the names in the folder of a run. "" otherwise."""
    look = partial(look_in, names)
    steps = steps_seen(look)
    return format_steps(steps) if any(is_certain(look, step) for step in steps) else ""


def refuse_run(url: str, names: Collection[str]) -> None:
    """Raise FormatError if these are the names in the folder of a run.

    With a checkpoint at its top, the path could mean either.
    """
    if steps := run_in(names):
        raise FormatError(
            f"{url} is the folder of a run with the steps {steps}: with a checkpoint at its "
            "top, the path could mean either. Nothing was saved: save to "
            f"{path_below(url, 'step-N')}, or to another folder"
        )


def refuse_first_step(path: StoragePath) -> None:
    """Raise FormatError if a checkpoint at `path` would be the first step in a folder that is
    itself a checkpoint, native or of DCP, because that folder's path would be ambiguous. The tools
    of other formats leave both side by side.

    Looks for two files. What is above a `Storage`, or above a folder that cannot be listed, is not
    known.
    """
    if isinstance(path, Storage):
        return
    local = local_path(path)
    text = path_text(path).rstrip("/") if local is None else os.path.abspath(local)
    above, _, name = text.rpartition("/")
    if (step := step_of(name)) is None or step.step is None:
        return
    over, _, last = above.rpartition("/")
    for folder in (above, over) if _BELOW.fullmatch(last) else (above,):
        with suppress(CheckpointError, StorageError):
            storage = open_storage(folder or "/")
            if (mark := _marker_in(storage)) and not run_in(storage.names()):
                break
    else:
        return
    raise FormatError(
        f"{folder} is a checkpoint ({mark}), so it cannot also be the folder of a run that has "
        f"{text.removeprefix(f'{folder}/')}: choose another folder, or move that checkpoint to another one first"
    )


def _marker_in(storage: Storage) -> str:
    """Return the file that identifies a native or DCP checkpoint in this folder, or ""."""
    for name in _MARKERS:
        with suppress(CheckpointNotFoundError):
            if native.detect(storage, {name: storage.size(name)}) or name != MANIFEST:
                return name
    return ""


def _text(path: StoragePath) -> str:
    return path.url if isinstance(path, Storage) else os.fspath(path)


def has_ended(path: str) -> bool:
    """Return True if the save of a checkpoint has ended, as far as its format shows."""
    names = _find(path)[1]
    return bool(names.keys() & {*_MARKERS} or without_claim(names))


def local_path(path: StoragePath) -> str | None:
    """Return the path on this machine. None for other URLs, and for a `Storage`."""
    text = "://" if isinstance(path, Storage) else path_text(path)
    if text.startswith("file://"):
        return unquote(text.removeprefix("file://"))
    return None if "://" in text else text


def _file_of(path: AnyPath) -> str:
    """Return the name that a path ends with, if it looks like a checkpoint file."""
    last = unquote(path_text(path).rstrip("/").rpartition("/")[2])
    return last if last in _MARKERS or last.endswith(FILE_SUFFIXES) else ""


def _open_at(
    path: StoragePath,
    found: _Found | None = None,
    *,
    preferred: Format | None,
    share: native.Share,
    check: bool,
    lists: bool,
) -> tuple[Contents, str]:
    storage, names = found or _find(path)
    url = storage.url if isinstance(path, Storage) else os.fspath(path)
    for attempt in range(_ATTEMPTS):
        facts, files = None, Files(storage, names, Checking(check, lost=[] if lists else None))
        try:
            contents = _open(files, url, preferred)
            if (facts := contents.details(native.NativeFacts)) is not None:
                native.look_for_files(facts, names, files.checking.refuse, share, check)
            break
        except (CheckpointNotFoundError, CorruptCheckpointError) as error:
            # a save may have replaced and deleted the listed files: then the new checkpoint is
            # complete. The names can be equal if the new files existed before, and the old ones are
            # being removed
            listed, (storage, names) = names, _find(path)
            is_same = names == listed and not (facts is not None and native.is_replaced(facts))
            if is_same or attempt + 1 == _ATTEMPTS:
                name_checkpoint(error, storage.url)
                raise
    looked_at = contents.files or tuple(files[name] for name in names if not name.endswith("/"))
    return replace(contents, files=looked_at, checking=files.checking), url


def _of_a_hub(url: str) -> str:
    """Return advice if a path looks like a model on a hub, "owner/name", and no such folder exists."""
    if not re.fullmatch(r"[A-Za-z0-9][\w-]*/[A-Za-z0-9][\w.\-]*", url) or os.path.isdir(url.partition("/")[0]):
        return ""
    return (
        f". If that is a model of the Hugging Face hub, download it first and open the folder: "
        f"open(huggingface_hub.snapshot_download({url!r}))"
    )


_CONVERTS = (
    "{} holds no complete checkpoint: a conversion to it was stopped, or is still running. To continue a stopped one, "
    "run it again"
)
_REPLACES = (
    "{} does not open: a conversion to it was stopped while it published, or is still running. To complete a stopped "
    "one, run it again. What is wrong now: {}"
)


def _nothing(storage: Storage, url: str) -> str:
    """Return the message for a path without files."""
    empty = storage.empty_folders()
    if any(map(is_generation, empty)):
        return f"{url} holds no checkpoint yet: a save has just started, or was killed before it wrote anything"
    if any(map(JOB_FOLDER.match, [*storage.names(), *(f"{name}/" for name in empty)])):
        return _CONVERTS.format(url)
    local, none = local_path(url) if isinstance(storage, LocalStorage) else None, f"no such file or folder: {url!r}"
    if local is None:
        return none
    gone = path = Path(local)
    if path.is_dir():
        return f"{url} is empty: there is no checkpoint in it"
    while not gone.parent.is_dir():
        gone = gone.parent
    if gone.exists():
        return f"{none}, since {gone} is a file: check the path"
    if gone.is_symlink():
        return f"{none}: {gone} is a link to {os.readlink(gone)}, which is not there"
    near = ""
    if os.access(gone.parent, os.R_OK):
        with os.scandir(gone.parent) as beside:
            near = did_you_mean(gone.name, [it.name for it in islice(beside, 5000) if it.is_dir() or gone.suffix])
    near = near.replace("mean '", f"mean '{str(gone).removesuffix(gone.name)}")
    since = "" if gone == path else f", since there is no {gone}"
    where = "" if os.path.isabs(url) else f" (working directory {os.getcwd()})"
    with suppress(FormatError):
        if steps := steps_seen(partial(look_at, str(path.parent))):
            near = near or f". Steps beside it: {format_steps(steps)}"
    return f"{none}{since}{where}{near or _of_a_hub(url)}"


def _open(files: Files, url: str, preferred: Format | None) -> Contents:
    storage, names = files.storage, files.listed
    if not names:
        raise CheckpointNotFoundError(_nothing(storage, url))
    format = _pick(storage, names, url, preferred)
    if format.name == "rank_files" and len(names) == 1 and _file_of(url):
        from reshard.formats.rank_files import holds_parts

        if not holds_parts(files[next(iter(names))]):  # only its name looks like a rank's, such as lora_rank_8.pt
            format = next(f for f in formats() if f.name == "torch_save")
    if preferred is not None and preferred.name == format.name:
        format = preferred
    # of a single file, all records are compared, and it cannot be mixed up with another
    files.checking.unchecked = (
        EVERY_BLOCK if len(names) == 1 and format.checksums == CRC_OF_RECORDS else format.checksums
    )
    try:
        contents = format.open(files)
    except (CorruptCheckpointError, FormatError) as error:
        if any(map(JOB_FOLDER.match, names)) and not isinstance(error, NewerVersionError):
            if has_dcp(names) and ".metadata" not in names:
                raise CheckpointNotFoundError(_CONVERTS.format(url)) from None
            raise CorruptCheckpointError(_REPLACES.format(url, str(error).removesuffix(f": {RESTORE}"))) from None
        raise
    beside = [name for name in marks_in(names) if name not in (MANIFEST, HF_INDEX)]
    if format.name == "torch_save" and not any(map(_OWNED.fullmatch, beside)) and (nested := _nested(names)):
        raise FormatError(
            f"{url} has a file of torch.save, {beside[0]}, and checkpoints seem to be in its subfolders "
            f"{format_some(nested)}: open one of these, or the file, by its path"
        )
    if format.name == "torch_save" and len(names) == 1 and not _file_of(url):
        from reshard.formats.pipeline_stages import is_later_stage

        if is_later_stage(names):
            name = next(iter(names))
            warning = f"{name} is the only file: if it is one stage of a pipeline, the other stages are missing"
            return replace(contents, warnings=(*contents.warnings, warning))
    if not beside or format.name != "native":
        return contents
    return replace(contents, warnings=(*contents.warnings, unopened_text(beside, f"next to {MANIFEST}")))


def _find(path: StoragePath) -> tuple[Storage, dict[str, int]]:
    """Return the storage and the files to look at: those of a folder, or a single file."""
    if isinstance(path, Storage):
        storage, file = path, ""
    else:
        text = path_text(path)
        parent, _, last = text.rstrip("/").rpartition("/")
        parent = parent or ("/" if text.startswith("/") else ".")
        if "*" in last and not os.path.lexists(local_path(text) or ""):  # a glob of files in a folder
            storage = open_storage(parent)
            found = storage.list(re.split(r"[*?[]", last)[0]).items()
            if fitting := {name: size for name, size in found if "/" not in name and fnmatchcase(name, last)}:
                return storage, fitting
        local = local_path(text)
        try:
            single = bool(_file_of(text)) if local is None else Path(local).is_file()
        except OSError as error:
            raise StorageError(f"cannot look at {text}: {error.strerror or error}") from error
        if single and local is None and urlsplit(text).scheme == "memory":
            single = last in open_storage(parent).list(last)
        file = (unquote(last) if "://" in text else last) if single else ""
        storage = open_storage(parent if single else path)
    if not file and (top := storage.top()) is not None and MANIFEST in top and native.detect(storage, top):
        names = top  # the manifest lists the other files, so the ranks need not list them
    else:
        names = storage.list(file)
    if file in _MARKERS:
        names = storage.list()
        marks = {name for name in marks_in(names) if not (has_dcp([name]) if file != MANIFEST else name == file)}
        names = {name: size for name, size in names.items() if name not in marks}
    elif file in names:
        return storage, {file: names[file]}
    return storage, {name: size for name, size in names.items() if not is_temporary(name)}


def _pick(storage: Storage, names: Listing, url: str, preferred: Format | None) -> Format:
    """Return the matching format. Raises FormatError if none or more than one matches."""
    if ".metadata" in names and MANIFEST not in names:  # ignore leftovers of a killed save
        names = {name: size for name, size in names.items() if not is_generation(name.partition("/")[0])}
    composite = next((f for f in formats() if f.is_composite and f.detect(storage, names)), None)
    if composite is None:
        fitting = [f for f in formats() if not f.is_composite and f.detect(storage, names)]
    elif has_dcp(names) and not composite.holds_dcp:
        fitting = [composite, *(f for f in formats() if f.name == "dcp")]
    else:
        fitting = [composite]
    if len(fitting) == 1:
        return fitting[0]
    if preferred is not None and preferred.name in [format.name for format in fitting]:
        return preferred
    if fitting:
        kinds = " and ".join(format.name for format in fitting)
        raise FormatError(
            f"{url} contains files of several formats: {kinds}. Open one of them by the path of its file, or move the "
            "others elsewhere"
        )
    if any(map(JOB_FOLDER.match, names)):
        raise CheckpointNotFoundError(_CONVERTS.format(url))
    known = ", ".join(format.name for format in formats())
    nested = _nested(names)
    if nested:
        hint = ". Their names have no step number; reshard.latest_complete finds the newest native one"
        places = f"Checkpoints seem to be in its subfolders {format_some(nested)}: open one of these"
        if len(nested) == 1:
            places, hint = f"Its subfolder {nested[0]!r} seems to be a checkpoint: open that", ""
        elif any(step_of(folder.rpartition("/")[2]) for folder in nested):
            hint = ""
        raise FormatError(f"{url} is not a checkpoint in a known format. {places}{hint}")
    some = format_some(sorted(names))
    if len(names) == 1:
        refuse_plan(storage.read(some, 0, min(names[some], 99)), url)
    raise FormatError(
        f"{url} is not a checkpoint in a known format.{'' if url.endswith(some) else f' It contains {some}.'} "
        f"Known formats are {known}. If you renamed files, restore the names that the framework wrote"
    )


def kind_beside(storage: Storage, names: Listing, own: str, marks: Collection[str]) -> str:
    """Return the format of the folder's contents, if a checkpoint of the format `own` would not
    open there.

    Args:
        marks: names that the checkpoint will have, if these alone identify its format.
    """
    there = {name: size for name, size in names.items() if not is_temporary(name) and not DATA_FILE.fullmatch(name)}
    found = [format for format in formats() if format.detect(storage, there)]
    composite = next((format for format in found if format.is_composite), None)
    is_completed = own == "dcp" and composite is not None and composite.holds_dcp and not has_dcp(there)
    if composite is not None and own not in (composite.name, "native") and not is_completed:
        return composite.name
    if own != "dcp" and has_dcp(there) and (composite is None or not composite.holds_dcp):
        return "dcp"
    after = {**there, **dict.fromkeys(marks, 1)} if marks and there else {}
    found = [format for format in formats() if after and format.detect(storage, after)]
    if any(format.is_composite for format in found):
        return ""
    return " and ".join(format.name for format in found if format.name != own)


def _nested(names: Listing) -> list[str]:
    """Return the subfolders with files of a checkpoint."""
    folders = sorted({name.rpartition("/")[0] for name in names if "/" in name and _is_mark(name.rpartition("/")[2])})
    return [folder for folder in folders if not is_generation(folder)]


# The folder of a run: checkpoints named after their steps, as trainers write them.
#
#     outputs/checkpoint/step-10  step-20                  torchtitan
#     run/10  20                                           Orbax's manager
#     run/checkpoint-10  checkpoint-20                     Trainer
#     project/checkpoints/checkpoint_0  checkpoint_1       accelerate
#     run/checkpoints/epoch=0-step=10.ckpt  last.ckpt      Lightning, as files or folders
#     run/global_step_10  step10  epoch_0_step_10          verl and VeOmni, OLMo-core, NeMo Automodel
#
# Only names are looked at: those in the folder, in its single folder of checkpoints, and in those
# of its steps. So a run with ten thousand steps is recognized quickly.
#
# What a folder with steps is depends on its top-level files that are named like checkpoint files:
#
#     steps, and                                        verdict
#     nothing                                           a run
#     best.pt, scheduler.pt, ema.safetensors            a run; the files are named, and not opened
#     manifest.json of ours, .metadata, model.safetensors   two things: refused
#     latest, .snapshot_metadata, _METADATA             the checkpoint, if a format says that all below it is its own
#
# A folder without steps is a checkpoint of some format.


Look = Callable[[str], tuple[list[str], list[str]]]
"""The names of folders and of files directly in a folder, which is "" or ends with "/"."""

_STEP = re.compile(
    r"(?:.*\bstep=|(?:epoch_\d+_|global_?)?step[-_]?|(?:checkpoint|ckpt|iter)[-_]|)(\d+)(?:-v\d+)?(?:\.ckpt)?"
)
_LAST = re.compile(r"last(?:-v\d+)?(?:\.ckpt)?")
_BELOW = re.compile(r"(?:.*[-_])?(?:checkpoints?|ckpts?)", re.IGNORECASE)

_MARKS = {mark for row in FORMATS for mark in row.marks if not mark.startswith("*")} | _OF_TREES
_SUFFIXES = tuple(mark[1:] for row in FORMATS for mark in row.marks if mark.startswith("*"))
"""File names of every known format: one of them is at the top of a checkpoint, or of a folder below it."""

_OWNED = re.compile(
    rf"\.metadata|__\d+\.metadata|{DATA_FILE.pattern}|.*\.index\.json"
    r"|(?:model|adapter_model|pytorch_model|diffusion_pytorch_model|consolidated)(?:[-._].*)?\.(?:safetensors|bin|pth)"
)
"""Names of files that belong to a checkpoint in the same folder: those of DCP, and those that
Hugging Face tools look for. Files with other names may be anything that a user keeps beside a run."""

_MOST_FOLDERS = 256
"""The number of folders to search if the top folder shows no format."""


def look_at(folder: str, below: str) -> tuple[list[str], list[str]]:
    """Look below a local folder. A folder that cannot be listed shows nothing; opening it reports why."""
    folders: list[str] = []
    files: list[str] = []
    try:
        with os.scandir(os.path.join(folder, below)) as entries:
            for entry in entries:
                (folders if entry.is_dir() else files).append(entry.name)
    except (OSError, ValueError):
        return [], []
    return folders, files


def look_in(names: Collection[str], below: str) -> tuple[list[str], list[str]]:
    """Look at names that were already listed."""
    inside = [name.removeprefix(below).partition("/") for name in names if name.startswith(below)]
    folders = dict.fromkeys(head for head, slash, _ in inside if slash)
    return list(folders), [head for head, slash, _ in inside if not slash]


def steps_seen(look: Look) -> list[RunStep]:
    """Return the entries that are named like checkpoints of a run, the oldest first, at the top or
    in one folder below.

    Raises FormatError if two folders below each contain a run.
    """
    runs: dict[str, list[RunStep]] = {}
    for below in ("", *(f"{name}/" for name in look("")[0] if _BELOW.fullmatch(name))):
        folders, files = look(below)
        names = [*folders, *(name for name in files if name.endswith(".ckpt"))]
        if steps := [step for name in names if (step := step_of(name, below))]:
            runs[below.rstrip("/")] = sorted(steps, key=lambda step: step.age)
        if "" in runs:
            break
    if len(runs) > 1:
        raise FormatError(f"there are runs in {', '.join(sorted(runs))}: open one of these folders")
    return next(iter(runs.values()), [])


def marks_in(names: Iterable[str]) -> list[str]:
    """Return the names at the top that identify a checkpoint and not steps."""
    return sorted(name for name in names if "/" not in name and _is_mark(name) and not step_of(name))


def is_certain(look: Look, step: RunStep) -> bool:
    """Return True if more than a number in its name shows that an entry is a step: the rest of its
    name, or files that are named like a checkpoint's. Folders of ranks, logs, and list items also
    have numbers as names."""
    last = step.name.rpartition("/")[2]
    if not last.isdigit():
        return step.step is not None
    folders, files = look(f"{step.name}/")
    inner = (look(f"{step.name}/{name}/")[1] for name in islice(folders, _MOST_FOLDERS))
    return any(map(_is_mark, files)) or any(any(map(_is_mark, names)) for names in inner)


def shows_nothing(look: Look) -> bool:
    """Return True if a folder has many entries, and neither it nor its subfolders have a file that
    is named like a checkpoint's."""
    folders, files = look("")
    if any(map(_is_mark, files)):
        return False
    seen = len(folders) + len(files)
    for name in islice(folders, _MOST_FOLDERS):
        inner, files = look(f"{name}/")
        if any(map(_is_mark, files)):
            return False
        seen += len(inner) + len(files)
    return seen > _MOST_FOLDERS


def _is_mark(name: str) -> bool:
    return name in _MARKS or (name.endswith(_SUFFIXES) and name != "training_args.bin")


def step_of(name: str, folder: str = "") -> RunStep | None:
    """Return the number in the name of a checkpoint of a run. None if it is not a step."""
    match = _STEP.fullmatch(name)
    if match is not None:
        return RunStep(int(match[1]), folder + name)
    return RunStep(None, folder + name) if _LAST.fullmatch(name) else None
