"""The folder of a run: checkpoints side by side, called by their steps, as trainers leave them.

    outputs/checkpoint/step-10  step-20                  torchtitan
    run/10  20                                           Orbax's manager
    run/checkpoint-10  checkpoint-20                     Trainer
    project/checkpoints/checkpoint_0  checkpoint_1       accelerate
    run/checkpoints/epoch=0-step=10.ckpt  last.ckpt      Lightning, as files or folders

Names are all that is looked at: those in the folder, in its one folder of checkpoints, and in those of its steps. So a
folder of ten thousand others is told at once from a checkpoint.

What a folder is, by what lies at its top and is called as files of a checkpoint are:

    steps, and                                        verdict
    nothing                                           a run
    best.pt, scheduler.pt, ema.safetensors            a run; the files are named, and not opened
    manifest.json of ours, .metadata, model.safetensors   two things: refused
    latest, .snapshot_metadata, _METADATA             the checkpoint, if a format says that all below it is its own

Without steps it is a checkpoint, of whichever format.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from urllib.parse import quote

from reshard.errors import FormatError

__all__ = [
    "Look",
    "RunStep",
    "is_certain",
    "look_at",
    "look_in",
    "marks_in",
    "owned_by",
    "path_below",
    "shows_nothing",
    "steps_seen",
]

Look = Callable[[str], tuple[list[str], list[str]]]
"""The names of folders and of files directly in a folder, which is "" or ends with "/"."""

_STEP = re.compile(r"(?:.*\bstep=|global_?step|(?:step|checkpoint|ckpt|iter)[-_]|)(\d+)(?:-v\d+)?(?:\.ckpt)?")
_LAST = re.compile(r"last(?:-v\d+)?(?:\.ckpt)?")
_BELOW = re.compile(r"(?:.*[-_])?(?:checkpoints?|ckpts?)", re.IGNORECASE)

_MARKS = frozenset(
    (
        "manifest.json",
        "metadata.json",
        "_METADATA",
        "_CHECKPOINT_METADATA",
        ".snapshot_metadata",
        "latest",
        "latest_checkpointed_iteration.txt",
    )
)
_SUFFIXES = (
    ".metadata",
    ".distcp",
    ".safetensors",
    ".gguf",
    ".nemo",
    ".pt",
    ".pth",
    ".bin",
    ".ckpt",
    ".pkl",
    ".th",
    ".tar",
    ".index.json",
)
"""What the files of every known format are called: one of them is at the top of a checkpoint, or a folder below it."""

_OWNED = re.compile(
    r"\.metadata|__\d+\.metadata|__\d+_\d+\.distcp|.*\.index\.json"
    r"|(?:model|adapter_model|pytorch_model|diffusion_pytorch_model|consolidated)(?:[-._].*)?\.(?:safetensors|bin|pth)"
)
"""Files that are of a checkpoint right there: of DCP, and what Hugging Face's tools look for. Those of other names may
be anything that somebody keeps beside a run."""

_MOST_FOLDERS = 256
"""So many folders are looked into where the top shows nothing."""


@dataclass(frozen=True)
class RunStep:
    """A checkpoint of a run, as its name tells it."""

    step: int | None
    """None for Lightning's `last.ckpt`, which is the newest whatever its step."""
    name: str
    """Its path within the folder of the run."""

    @property
    def age(self) -> tuple[bool, int, str]:
        """Sorts the oldest first."""
        return self.step is None, self.step or 0, self.name


def look_at(folder: str) -> Look:
    """Looks at a local folder. What cannot be listed shows nothing: opening it says why."""

    def look(below: str) -> tuple[list[str], list[str]]:
        folders: list[str] = []
        files: list[str] = []
        try:
            with os.scandir(os.path.join(folder, below)) as entries:
                for entry in entries:
                    (folders if entry.is_dir() else files).append(entry.name)
        except (OSError, ValueError):
            return [], []
        return folders, files

    return look


def look_in(names: Iterable[str]) -> Look:
    """Looks at names that were listed already."""
    listed = list(names)

    def look(below: str) -> tuple[list[str], list[str]]:
        inside = [name.removeprefix(below).partition("/") for name in listed if name.startswith(below)]
        folders = dict.fromkeys(head for head, slash, _ in inside if slash)
        return list(folders), [head for head, slash, _ in inside if not slash]

    return look


def steps_seen(look: Look) -> list[RunStep]:
    """What is called as checkpoints of a run, the oldest first, at the top or in one folder below.

    Raises FormatError where two folders below hold a run each.
    """
    folders, files = look("")
    found = _steps("", folders, files)
    if found:
        return found
    below = {name: _steps(f"{name}/", *look(f"{name}/")) for name in folders if _BELOW.fullmatch(name)}
    runs = {name: steps for name, steps in below.items() if steps}
    if len(runs) > 1:
        raise FormatError(f"there are runs in {', '.join(sorted(runs))}: open one of these folders")
    return next(iter(runs.values()), [])


def marks_in(look: Look) -> list[str]:
    """The files at the top that are called as those of a checkpoint, and not as steps."""
    return sorted(name for name in look("")[1] if _is_mark(name) and not _step_of(name, ""))


def owned_by(marks: Iterable[str]) -> list[str]:
    """Those of them which say that there is a checkpoint right there, whatever lies beside it."""
    return [name for name in marks if _OWNED.fullmatch(name)]


def is_certain(look: Look, step: RunStep) -> bool:
    """Whether it is a step by more than a number for a name, which other things have, too: the folders of ranks, of
    processes' logs, of items in a list. So its name says it, or it holds what is called as files of a checkpoint."""
    last = step.name.rpartition("/")[2]
    if not last.isdigit():
        return step.step is not None
    folders, files = look(f"{step.name}/")
    inner = (look(f"{step.name}/{name}/")[1] for name in islice(folders, _MOST_FOLDERS))
    return any(map(_is_mark, files)) or any(any(map(_is_mark, names)) for names in inner)


def shows_nothing(look: Look) -> bool:
    """Whether a folder holds much, and neither it nor those in it a file that is called as one of a checkpoint."""
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


def path_below(folder: str | os.PathLike[str], name: str) -> str:
    """The path or URL of what is called so in a folder."""
    base = os.fspath(folder)
    if "://" in base and not base.startswith("memory:"):
        for sign in "%#?":  # which mean something else in a URL
            name = name.replace(sign, quote(sign))
    return f"{base.rstrip('/')}/{name}" if name else base


def _is_mark(name: str) -> bool:
    return name in _MARKS or (name.endswith(_SUFFIXES) and name != "training_args.bin")


def _step_of(name: str, folder: str) -> RunStep | None:
    match = _STEP.fullmatch(name)
    if match is not None:
        return RunStep(int(match[1]), folder + name)
    return RunStep(None, folder + name) if _LAST.fullmatch(name) else None


def _steps(folder: str, folders: Iterable[str], files: Iterable[str]) -> list[RunStep]:
    names = [*folders, *(name for name in files if name.endswith(".ckpt"))]
    return sorted((step for name in names if (step := _step_of(name, folder))), key=lambda step: step.age)
