"""A checkpoint under canonical names, seen as a checkpoint again, so that it can be loaded, compared and converted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.checkpoint.canonical import normalize
from reshard.formats.stored.contents import Contents
from reshard.formats.stored.tensor import StoredTensor

__all__ = ["canonical_contents"]


def canonical_contents(contents: Contents, hints: Mapping[str, Any] | None, url: str, *, model_only: bool) -> Contents:
    """The keys are "model.<fqn>", "optim.state.<fqn>.<name>" and "optim.param_groups.<i>.<name>"; with `model_only`,
    the model's tensors alone, under their bare names. Tied tensors are listed once, as in the checkpoint.

    Raises NormalizationError where a hint is missing.
    """
    found = normalize(contents, hints, url)
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, Any] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}

    def add(path: tuple[Any, ...], value: Any) -> None:
        key = ".".join(map(str, path))
        paths[key] = path
        if isinstance(value, StoredTensor):
            tensors[key] = value.renamed(key)
        else:
            objects[key] = value

    for fqn, tensor in found.model.items():
        path = (fqn,) if model_only else ("model", fqn)
        key = ".".join(path)
        # tied tensors are the very same chunks under several names
        kept = first.setdefault(id(tensor.chunks), key) if tensor.chunks != () else key
        if kept == key or tensors[kept].spec.shape != tensor.spec.shape:
            add(path, tensor)
        else:
            aliases[key], paths[key] = kept, path
    for fqn, states in found.state.items() if not model_only else ():
        for name, value in states.items():
            add(("optim", "state", fqn, name), value)
    for number, group in enumerate(found.groups if not model_only else ()):
        for name, value in group.items():
            add(("optim", "param_groups", number, name), value)
    # values that are each rank's own have no canonical name
    left_out = () if model_only else tuple(contents.per_rank)
    warnings = (*contents.warnings, *found.notes)
    return Contents("normalized", tensors, objects, aliases, paths, warnings=warnings, left_out=left_out)
