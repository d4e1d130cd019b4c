"""Which earlier checkpoint a save is compared with, and what their fingerprints say before any block is looked at."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

from planners.geometry.layout import StateLayout
from reshard.errors import CheckpointError, CheckpointNotFoundError, FormatError, NewerVersionError, StorageError
from reshard.formats.native.manifest import MANIFEST
from reshard.formats.native.reader import ALL, NativeFacts, Share
from reshard.formats.native.reuse import Base
from reshard.formats.opening import open_contents
from reshard.formats.runs import look_at, look_in, path_below
from reshard.storage import Storage, open_storage
from reshard.storage.opening import path_text, place_of

__all__ = ["Choice", "alike", "base_at", "choose_base", "doubtful"]

_log = logging.getLogger("reshard")
_HEAD_BYTES = 256


class Choice(NamedTuple):
    """What the first rank has found."""

    folder: str = ""
    """Name of the earlier checkpoint's folder beside the new one; empty for the one that the save replaces."""
    save_id: str | None = None
    """None if there is none to be based on."""
    by_print: bool = False
    """Whether there are tensors that no rank can compare by itself: see `doubtful`."""
    passed_over: tuple[str, ...] = ()
    """Checkpoints that might have been taken but for what is wrong with them, and what that is."""


_MOST_PASSED_OVER = 8
"""So many are told."""


def choose_base(path: Any, wanted: str | os.PathLike[str], layout: StateLayout, *, by_print: bool) -> Choice:
    """The earlier checkpoint that `wanted` names or, for "auto", the newest whole one: that which `path` holds, else
    one in a folder beside it. What is wrong with one is no reason not to save: it is passed over.

    Raises CheckpointError if `wanted` is not beside `path`, there is nothing, or it is not of this library.
    """
    passed: list[str] = []
    for folder in _newest_first(path, passed) if wanted == "auto" else [_folder_beside(path, wanted)]:
        try:
            base = base_at(path, folder)
            manifest = base.facts.manifest
            unsure = by_print and bool(doubtful(base, layout, manifest.fingerprints))
        except (CheckpointError, StorageError) as error:
            is_other = isinstance(error, FormatError) and not isinstance(error, NewerVersionError)
            if not (is_other or isinstance(error, CheckpointNotFoundError)):
                _log.warning("%s is passed over as a base to save on: %s", folder or path, error)
                passed.append(str(error))
            elif wanted != "auto":
                raise
            continue
        return Choice(folder, manifest.save_id, unsure, tuple(passed[:_MOST_PASSED_OVER]))
    return Choice(passed_over=tuple(passed[:_MOST_PASSED_OVER]))


def base_at(path: Any, folder: str, save_id: str | None = None, share: Share = ALL) -> Base:
    """The checkpoint in a folder beside `path`, or at `path` itself for "", of whose files a share is looked for.

    Raises FormatError if it is none of this library; CheckpointNotFoundError if it is not the save of this id.
    """
    if not folder:
        storage, there, here, place = open_storage(path), "", "", path
    else:
        parent, name = _parent(path)
        storage, there, here, place = open_storage(parent), f"{folder}/", f"{name}/", path_below(parent, folder)
    contents, where = open_contents(place, share=share)
    if not isinstance(contents.facts, NativeFacts):
        raise FormatError(f"{where} is {contents.format}: a save can only be based on one of this library's own format")
    if save_id not in (None, contents.facts.manifest.save_id):
        raise CheckpointNotFoundError(f"{where} was replaced since the first rank opened it")
    return Base(storage, there, here, contents.facts)


def doubtful(base: Base, layout: StateLayout, fingerprints: Mapping[str, str]) -> list[str]:
    """Tensors that are cut otherwise by now, or whose blocks have no digests: their fingerprints can tell whether all
    of one is what it was."""
    old = base.facts.plan.layout
    return [
        fqn
        for fqn in layout
        if fqn in fingerprints
        and fqn in old
        and layout[fqn].spec == old[fqn].spec
        and (not base.has_digests or layout[fqn] != old[fqn])
    ]


def alike(names: list[str], base: Base, now: Mapping[str, str]) -> list[str]:
    """Those whose fingerprint is what it was."""
    before = base.facts.manifest.fingerprints
    return [fqn for fqn in names if now.get(fqn) == before[fqn]]


def _parent(path: Any) -> tuple[str, str]:
    """The folder that a path is in, and its name there; ("", "") where there is none."""
    if isinstance(path, Storage):
        return "", ""
    text = path_text(path)
    scheme, separator, rest = text.partition("://")
    if not separator or scheme == "file":
        return os.path.split(os.path.abspath(unquote(text.removeprefix("file://")) if separator else text))
    parent, _, name = rest.rstrip("/").rpartition("/")
    return (f"{scheme}://{parent}", name) if parent else ("", "")


def _folder_beside(path: Any, wanted: str | os.PathLike[str]) -> str:
    if place_of(open_storage(wanted)) == place_of(open_storage(path)):
        return ""
    (parent, _), (other, name) = _parent(path), _parent(wanted)
    if not parent or not other or place_of(open_storage(parent)) != place_of(open_storage(other)):
        raise CheckpointError(
            f"base must be the checkpoint at {path} itself or one in a folder beside it, got {os.fspath(wanted)}: its "
            "files get second names in the new folder. Save beside it, or leave base out"
        )
    return name


def _newest_first(path: Any, passed: list[str]) -> list[str]:
    """Folders of checkpoints to look at: "" is `path` itself, the others are beside it. Adds to `passed` why one cannot
    be looked at."""
    parent, own = _parent(path)
    if not parent:
        return [""]
    storage = open_storage(parent)
    try:
        look = look_in(storage.list()) if "://" in parent else look_at(parent)
    except StorageError as error:
        passed.append(str(error))
        return [""]
    found = []
    for folder in look("")[0]:
        name = f"{folder}/{MANIFEST}"
        if folder == own or MANIFEST not in look(f"{folder}/")[1]:
            continue
        try:
            text = storage.read(name, 0, min(storage.size(name), _HEAD_BYTES))
        except CheckpointNotFoundError:  # it was removed meanwhile
            continue
        except StorageError as error:
            passed.append(str(error))
            continue
        found.append((_save_id(text), folder))
    return ["", *(folder for _, folder in sorted(found, reverse=True))]


def _save_id(head: bytes) -> str:
    """Of a manifest's first bytes: ids sort by time."""
    _, _, rest = head.partition(b'"save_id":"')
    return rest.partition(b'"')[0].decode("ascii", "replace")
