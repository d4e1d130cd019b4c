"""Orbax: a tree of whole JAX arrays. The model is what lies under `params`; optimizers of optax mirror its tree."""

from __future__ import annotations

from reshard.checkpoint.canonical.hints import Hints
from reshard.checkpoint.canonical.result import Canonical
from reshard.formats.stored.contents import Contents
from reshard.state.tree import KeyPath, key_of

__all__ = ["normalize_orbax"]

_MODEL = "params"
_OPTIMIZER = ("opt_state", "opt", "optimizer", "optim")


def normalize_orbax(contents: Contents, hints: Hints, what: str) -> Canonical:
    """The model under its tree's dotted names; states of arrays whose path ends in a parameter's path.

    A tree without `params` is all model. Further levels of `params` (Flax wraps one around another) are taken off.
    """
    del hints, what
    result = Canonical()
    paths = {name: contents.paths.get(name, (name,)) for name in contents.tensors}
    split = any(path[0] == _MODEL for path in paths.values())
    by_path: dict[KeyPath, str] = {}
    for name, path in paths.items():
        if split and path[0] != _MODEL:
            continue
        short = path
        while split and len(short) > 1 and short[0] == _MODEL:
            short = short[1:]
        by_path[short] = key_of(short)
        result.add_model(key_of(short), contents.tensors[name], name)
    for name, path in paths.items():
        if not split or path[0] not in _OPTIMIZER:
            continue
        found = next((i for i in range(1, len(path)) if path[i:] in by_path), None)
        if found is None:
            result.notes.append(f"{name!r} belongs to no parameter: it is left out")
            continue
        state = next(
            (str(part) for part in reversed(path[:found]) if isinstance(part, str) and part != _MODEL), "state"
        )
        result.add_state(by_path[path[found:]], state, contents.tensors[name])
    return result
