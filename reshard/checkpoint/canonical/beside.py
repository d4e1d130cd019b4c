"""What a checkpoint holds beside model and optimizer: a scheduler, counters, a program's arguments, random states.

None of it has a canonical name. A conversion keeps plain objects under the keys that they have, so that a program finds
them again, and lists what it cannot keep.

    {"model": ..., "optim": ..., "epoch": 3, "ema": {fqn: tensor}}   ->   "epoch" is kept, "ema.<fqn>" is listed
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from reshard.checkpoint.canonical.generic import ORBAX_OPTIMIZER
from reshard.checkpoint.canonical.sections import find_sections, walk
from reshard.errors import FormatError
from reshard.formats.stored.contents import Contents
from reshard.state.plain_data import encode_plain
from reshard.state.tree import KeyPath

__all__ = ["keep_beside"]

_RANK_FILES = ("fsdp1", "megatron_legacy", "pipeline_stages")
"""Formats of one file per rank, each with objects of that rank's own."""
_DEEPSPEED = re.compile(r"(?:zero_pp_rank_0_)?mp_rank_00_model_states")
_DEEPSPEED_OWN = frozenset(
    ("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params")
    + ("frozen_param_fragments", "ds_config", "ds_version", "dp_world_size", "mp_world_size")
    + ("checkpoint_parallel_dimensions", "universal_checkpoint_info")
)
"""What a file of DeepSpeed's says of the model, the optimizer and how they were cut."""


def keep_beside(canonical: Contents, source: Contents, *, for_framework: bool) -> Contents:
    """`canonical`, made of `source`, with the plain objects that stood beside model and optimizer.

    What is no plain data there, such as the averages of another model, is added to `left_out`. So is what only the name
    of a rank's file tells apart, which no program asks for by that name, unless it is `for_framework`, in its format.
    """
    named = for_framework or source.format != "deepspeed"
    objects, paths = dict(canonical.objects), dict(canonical.paths)
    kept: list[KeyPath] = []
    lost, notes = list(canonical.left_out), []
    for key in _beside(source):
        path = source.paths.get(key, (key,))
        taken = key in source.tensors or path[:1] in (("model",), ("optim",))
        found = _plain(source.objects[key]) if named and not taken else None
        if found is None:
            lost.append(key)
            continue
        objects[key], paths[key] = found[0], path
        kept.append(path)
        if found[1]:
            notes.append(f"{key!r} is kept without {', '.join(found[1])}, of classes that are not known here")
    above = {path[:i] for path in kept for i in range(len(path) + 1)}
    return replace(
        canonical,
        objects=objects,
        paths=paths,
        containers={path: kind for path, kind in source.containers.items() if path in above},
        left_out=tuple(dict.fromkeys(lost)),
        warnings=(*canonical.warnings, *notes),
    )


def _beside(contents: Contents) -> Iterator[str]:
    """Keys of what is neither a part of a model nor of an optimizer."""
    if contents.format in _RANK_FILES:
        return
    held = (*contents.tensors, *contents.objects)
    if contents.format == "deepspeed":
        for key in contents.objects:
            file, *inner = contents.paths.get(key, (key,))
            if _DEEPSPEED.fullmatch(str(file)) and inner and str(inner[0]) not in _DEEPSPEED_OWN:
                yield key
    elif contents.format == "megatron":
        yield from (key for key in held if _is_beside_megatron(contents, key))
    elif contents.format == "orbax":
        top = {key: contents.paths.get(key, (key,))[0] for key in held}
        if "params" in top.values():  # else all of it is the model
            yield from (key for key in held if top[key] != "params" and top[key] not in ORBAX_OPTIMIZER)
    else:
        sections = find_sections(contents)
        used = {leaf.key for _, leaf in sections.model}
        used |= {leaf.key for _, tree in sections.optimizers for _, leaf in walk(tree)}
        yield from (key for key in held if key not in used)


def _is_beside_megatron(contents: Contents, key: str) -> bool:
    if key.startswith("common."):
        settings = key.startswith("common.optimizer.") and ".grad_scaler" not in key
        return not settings and not key.startswith("common.content_metadata.")
    if "_extra_state/" in key:  # of fp8 recipes; else there is nothing in it
        return key in contents.objects and contents.objects[key] != [None]
    return key.startswith(("rng_state", "rerun_state_machine", "opt_param_scheduler"))


def _plain(value: Any) -> tuple[Any, list[str]] | None:
    """The value, if it is plain data, and the names of entries of a dict that are not, and are not in it."""
    dropped: list[str] = []
    if isinstance(value, dict):
        dropped = [str(key) for key, inner in value.items() if not _is_plain(inner)]
        value = {key: inner for key, inner in value.items() if str(key) not in dropped} if dropped else value
    return (value, dropped) if _is_plain(value) else None


def _is_plain(value: Any) -> bool:
    try:
        encode_plain(value)
    except FormatError:
        return False
    return True
