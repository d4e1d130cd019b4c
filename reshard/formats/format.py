"""What defines a format: how its files are recognized and read, what its names mean, and how it is
written."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from planners.units import format_count, format_some
from reshard.errors import CorruptCheckpointError, FormatError
from reshard.native.manifest import HF_INDEX, MANIFEST

if TYPE_CHECKING:
    from planners.geometry.box import Shape
    from reshard.formats.canonical import Canonical, Hints
    from reshard.storage.base import Listing, Storage
    from reshard.stored.contents import Contents
    from reshard.stored.source import Files
    from reshard.stored.streaming import FormatWriter, Target
    from reshard.stored.tensor import StoredTensor

Normalizer: TypeAlias = "Callable[[Contents, Hints, str], Canonical]"
"""(contents, hints, what names the checkpoint in messages) -> the same under canonical names."""

Widen: TypeAlias = "Callable[[StoredTensor, str], StoredTensor]"
"""(a tensor, name) -> the same in float32, under that name."""


MARKS = (MANIFEST, HF_INDEX, "*.safetensors", ".metadata")
"""Files that determine the format of a folder, regardless of its other files."""


@dataclass(frozen=True)
class Writing:
    """How a format is written."""

    writer: Callable[[Contents, Target], FormatWriter]
    own: tuple[str, ...] = ()
    """Globs of `MARKS` that belong to this format."""
    marks: tuple[str, ...] = ()
    """Files whose names alone identify the format, if there are any."""
    form: Callable[[Canonical, Contents, Mapping[str, Any] | None, Widen, str], Contents] | None = None
    """For a format with its own names and shapes: converts contents, which normalize to the first
    argument, for the writer. The hints are the caller's; the text names the source in messages."""
    is_sharded: bool = False
    """Whether its files can be those of the ranks of a layout."""
    is_split: bool = False
    """Whether a new file can begin at any tensor, so that files can be of limited size."""
    is_one_file: bool = False
    """Whether the target is one file, whose folder may contain anything."""

    @property
    def foreign(self) -> list[str]:
        """Return globs of files of other formats, beside which a folder does not open, or opens as
        another format."""
        return [] if self.is_one_file else [mark for mark in MARKS if mark not in self.own]


@dataclass(frozen=True)
class Format:
    """What a format's reader defines. The table of formats names the modules of its normalizer and
    its writer."""

    name: str
    checksums: str
    """What its checksums cannot detect: `EVERY_BLOCK`, `CRC_OF_RECORDS`, or `NO_CHECKSUMS`."""
    detect: Callable[[Storage, Listing], bool]
    """Returns whether the files (name -> size in bytes) look like this format. Cheap: usually by
    names only."""
    open: Callable[[Files], Contents]
    """Returns the contents of the files: names, shapes, and where the bytes are, but no bytes of
    tensors. Raises FormatError or CorruptCheckpointError, naming the file."""
    is_composite: bool = False
    """Whether it consists of files of other formats and a file that identifies it. The first such
    format that matches is used. If two other formats match, the folder is ambiguous."""
    holds_dcp: bool = False
    """True if it contains a DCP checkpoint. Any other composite format beside a DCP checkpoint is
    ambiguous."""
    claim: Callable[[Contents], Contents | None] | None = None
    """Returns the contents for this format of a checkpoint that another format opened. None if it
    is not of this format."""
    beside: Callable[[Contents], Iterable[str]] | None = None
    """Returns the keys of everything that belongs neither to a model nor to an optimizer. None if
    their names show it."""
    records_ranks: bool = False
    """Whether it records how many ranks saved, even if it was one."""
    names_ranks: bool = False
    """True if only the name of a rank's file identifies objects other than those of the model and
    optimizer."""


def as_shape(values: Iterable[Any]) -> Shape:
    """Return offsets or sizes from a file. Raises ValueError for other values."""
    result = tuple(values)
    if any(type(v) is not int or v < 0 for v in result):
        raise ValueError(f"{result} should be integers >= 0")
    return result


def at_top(names: Iterable[str], ends: str | tuple[str, ...]) -> list[str]:
    """Return the files of the top folder with such an ending, in order."""
    return sorted(name for name in names if "/" not in name and name.endswith(ends))


def indexes_in(names: Collection[str], ending: str) -> list[str]:
    """Return the indexes in the top folder with this ending. One that was opened by its path can be
    of a variant, such as `model.safetensors.index.fp16.json`."""
    if len(names) > 1:
        return at_top(names, ending)
    return fnmatch.filter(at_top(names, ".json"), f"*{ending.removesuffix('json')}*json")


def read_index(files: Files, ending: str) -> tuple[Files, str, dict[str, str]] | None:
    """Return the files to look at, the path of the index at the top whose name ends so, and key ->
    file; None if there is no index. An index that was opened by its path has its files beside it.

    Raises FormatError if there are several; CorruptCheckpointError if it is none, or a file that
    it names is missing.
    """
    url, indexes = files.storage.url, indexes_in(files.listed, ending)
    if not indexes:
        return None
    if len(indexes) > 1:
        raise FormatError(f"{url} has {len(indexes)} indexes: {', '.join(indexes)}; open one by its path")
    if len(files.listed) == 1:
        files = files.some(files.storage.list())
    label = f"{url}/{indexes[0]}"
    try:
        data = json.loads(files.storage.read(indexes[0]))
        places = {str(key): str(file) for key, file in data["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{label}: no index of files: {type(error).__name__}: {error}") from None
    named = sorted(set(places.values()))
    if missing := [file for file in named if file not in files.listed]:
        held = [key for key, file in places.items() if file == missing[0]]
        files.checking.refuse(missing_files(url, indexes[0], len(named), missing, held))
        places = {key: file for key, file in places.items() if file not in missing}
    return files, label, places


def not_opened(files: Files, opened: Iterable[str], glob: str = "*.safetensors") -> tuple[str, ...]:
    """Return a warning that names the files that match `glob` but were not opened."""
    others = sorted(set(fnmatch.filter(files.listed, glob)).difference(opened))
    return (unopened_text(others),) if others else ()


def unopened_text(names: Sequence[str], where: str = "", path: str = "") -> str:
    """Return the warning that these files in `where` were not opened. `path` is that of the first,
    if not clear."""
    where, path = where and f" {where}", path and f", {path}"
    if len(names) == 1:
        return f"{names[0]}{where} was not opened. To open it, pass its path{path}"
    return f"{len(names):,} files{where} were not opened, such as {names[0]}. To open one, pass its path{path}"


def refuse_plan(head: bytes, url: str) -> None:
    """Raise FormatError for a file that begins like the plans that `reshard plan` reads."""
    if found := re.match(rb'\s*{\s*"reshard":\s*"(load_plan|state_layout|topology)"', head):
        kind = found[1].decode().replace("_", " ")
        raise FormatError(f"{url} is a {kind} of reshard, not a checkpoint: reshard plan CHECKPOINT {url} takes it")


def missing_files(
    where: str, index: str, named: int, missing: Sequence[str], held: Sequence[str]
) -> CorruptCheckpointError:
    """Return the error about missing files of an index. The first missing file contained the names `held`."""
    what = f"{len(missing)} of {named} files that {index} names are missing: {format_some(missing)}"
    return CorruptCheckpointError(
        f"{where}: {what}. {missing[0]} held {format_count(len(held), 'name')}, such as {held[0]!r}: restore it, or "
        "load another checkpoint"
    )


def check_apart(where: str, places: Iterable[tuple[str, int, int, str]]) -> None:
    """Raise CorruptCheckpointError if two names have the same bytes, because one of them should be
    elsewhere.

    `places`: the file, start, stop, and name of each.
    """
    before = ("", 0, 0, "")
    for place in sorted(place for place in places if place[1] < place[2]):
        file, start, _, name = place
        if file == before[0] and start < before[2]:
            what = f"{name!r} and {before[3]!r} are both at byte {start} of {file}"
            raise CorruptCheckpointError(f"{where}: its metadata is damaged: {what}")
        before = place


def check_index(files: Files, label: str, weight_map: Mapping[str, str], held: Mapping[str, str | int]) -> None:
    """Raise CorruptCheckpointError unless the index agrees with the files. `held` has the file of
    each key in them."""
    for key, file in {} if files.checking.lost else {**dict.fromkeys(held, "no file"), **weight_map}.items():
        there = held.get(key, "no file")
        if there != file:
            raise CorruptCheckpointError(
                f"{label}: it says that {file} holds {key!r}, but {there} does; the index is wrong"
            )
