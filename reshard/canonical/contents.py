"""A checkpoint under canonical names, seen as a checkpoint again, so that it can be loaded, compared and converted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.canonical import normalize
from reshard.formats.base import Contents, StoredTensor

__all__ = ["canonical_contents"]


def canonical_contents(contents: Contents, hints: Mapping[str, Any] | None, url: str, *, model_only: bool) -> Contents:
    """The keys are "model.<fqn>", "optim.state.<fqn>.<name>" and "optim.param_groups.<i>.<name>"; with `model_only`,
    the model's tensors alone, under their bare names.

    Raises NormalizationError where a hint is missing.
    """
    found = normalize(contents, hints, url)
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, Any] = {}
    paths: dict[str, tuple[Any, ...]] = {}

    def add(path: tuple[Any, ...], value: Any) -> None:
        key = ".".join(map(str, path))
        paths[key] = path
        if isinstance(value, StoredTensor):
            tensors[key] = value.renamed(key)
        else:
            objects[key] = value

    for fqn, tensor in found.model.items():
        add((fqn,) if model_only else ("model", fqn), tensor)
    for fqn, states in found.state.items() if not model_only else ():
        for name, value in states.items():
            add(("optim", "state", fqn, name), value)
    for number, group in enumerate(found.groups if not model_only else ()):
        for name, value in group.items():
            add(("optim", "param_groups", number, name), value)
    return Contents("normalized", tensors, objects, paths=paths, warnings=(*contents.warnings, *found.notes))
