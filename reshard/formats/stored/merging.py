"""Several checkpoints under one roof, as one: each part's keys get a prefix, and stay as lazy as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from reshard.errors import FormatError
from reshard.formats.stored.contents import Contents, LazyMapping, StoredTensor

__all__ = ["merge"]


def merge(name: str, parts: Iterable[tuple[str, Contents]], facts: Mapping[str, Any] | None = None) -> Contents:
    """The contents of all parts, each under its section ("" for keys as they are).

    Raises FormatError if two parts have the same key.
    """
    tensors: dict[str, Callable[[], StoredTensor]] = {}
    objects: dict[str, Callable[[], Any]] = {}
    aliases: dict[str, str] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    containers: dict[tuple[Any, ...], str] = {}
    warnings: list[str] = []
    for section, part in parts:
        front = (section,) if section else ()
        dotted = section + "." if section else ""
        for key in (*part.tensors, *part.objects):
            full = dotted + key
            if full in tensors or full in objects:
                raise FormatError(f"two parts of the checkpoint have the key {full!r}")
            paths[full] = (*front, *part.paths.get(key, (key,)))
            if key in part.tensors:
                tensors[full] = partial(_tensor, part, key, full)
            else:
                objects[full] = partial(part.objects.__getitem__, key)
        for key, target in part.aliases.items():
            aliases[dotted + key] = dotted + target
            paths[dotted + key] = (*front, *part.paths.get(key, (key,)))
        containers.update({(*front, *path): kind for path, kind in part.containers.items()})
        warnings += part.warnings
    return Contents(
        name, LazyMapping(tensors), LazyMapping(objects), aliases, paths, facts or {},
        warnings=tuple(warnings), containers=containers,
    )  # fmt: skip


def _tensor(part: Contents, key: str, full: str) -> StoredTensor:
    return part.tensors[key].renamed(full)
