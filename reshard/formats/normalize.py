"""One canonical state out of any checkpoint: the names, shapes and param groups of the unsharded, unwrapped model.

    normalize(contents, hints)  ->  Canonical: model {fqn: tensor}, state {fqn: {name: tensor or value}}, groups [...]

`contents` is what a format module found. Tensors stay stored tensors: boxes and windows are mapped, nothing is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from planners.errors import PlanError
from reshard.errors import DamagedCheckpointError, FormatError, NormalizationError, ReshardError
from reshard.formats.canonical import Canonical, Hints
from reshard.formats.dcp.reader import DcpFacts
from reshard.formats.deepspeed.canonical import normalize_deepspeed
from reshard.formats.fsdp1.canonical import normalize_fsdp1
from reshard.formats.generic import ORBAX_OPTIMIZER, normalize_generic, normalize_orbax
from reshard.formats.megatron.canonical import normalize_megatron
from reshard.formats.megatron.files import MegatronFacts, is_of_fsdp
from reshard.formats.megatron.legacy import normalize_megatron_legacy
from reshard.formats.pipeline_stages.canonical import normalize_stages, stages_by_key
from reshard.formats.pipeline_stages.files import StageFacts
from reshard.formats.sections import find_sections, walk
from reshard.live.plain_data import encode_plain
from reshard.state import KeyPath
from reshard.stored.contents import Contents
from reshard.stored.tensor import StoredTensor

__all__ = ["canonical_contents", "keep_beside", "normalize"]


def _normalize_nemo(contents: Contents, hints: Hints, what: str) -> Canonical:
    """Of an archive by what is in it."""
    inside = normalize_megatron if contents.facts_of(MegatronFacts) is not None else normalize_generic
    return inside(contents, hints, what)


_BY_FORMAT: dict[str, Callable[[Contents, Hints, str], Canonical]] = {
    "deepspeed": normalize_deepspeed,
    "fsdp1": normalize_fsdp1,
    "megatron": normalize_megatron,
    "megatron_legacy": normalize_megatron_legacy,
    "nemo": _normalize_nemo,
    "orbax": normalize_orbax,
    "pipeline_stages": normalize_stages,
}


def normalize(contents: Contents, hints: Mapping[str, Any] | None = None, what: str = "the checkpoint") -> Canonical:
    """The checkpoint's model and optimizer under canonical names.

    Args:
        hints: what the checkpoint cannot say; see `HINTS`.
        what: names the checkpoint in messages.

    Raises:
        NormalizationError: a hint is missing or wrong, or two tensors would have one name.
        DamagedCheckpointError: parts of a tensor are missing or do not fit together.
    """
    given = Hints(hints)
    try:
        normalizer = _BY_FORMAT.get(contents.format, normalize_generic)
        if contents.format == "dcp" and is_of_fsdp(contents):
            normalizer, contents = normalize_megatron, replace(contents, facts=_facts_of_fsdp(contents))
        stages = stages_by_key(contents) if contents.format not in _BY_FORMAT else None
        if stages is not None:
            normalizer, contents = normalize_stages, replace(contents, facts=StageFacts(stages))
        return _tie(normalizer(contents, given, what), given).rename()
    except ReshardError:
        raise
    except (PlanError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # a value of another type than its format has at this place
        raise DamagedCheckpointError(
            f"{what}: what is in its files is not what {contents.format} writes: {type(error).__name__}: {error}"
        ) from error


def _facts_of_fsdp(contents: Contents) -> MegatronFacts:
    """What is known of a checkpoint of Megatron-FSDP that was opened without the folder above it."""
    known = contents.facts_of(DcpFacts)
    assert known is not None
    return MegatronFacts(**vars(known), backend="fsdp_dtensor")


def _tie(found: Canonical, hints: Hints) -> Canonical:
    """Add the further names of tied parameters that the hint gives."""
    for name, holder in hints.mapping("tied").items():
        if holder not in found.model:
            raise NormalizationError(
                f"the hint 'tied' says that {name!r} is {holder!r}, but there is no such parameter"
            )
        found.add_model(str(name), found.model[holder], str(name))
    return found


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
    return Contents(tensors, objects, paths, aliases=aliases, format="normalized", warnings=warnings, left_out=left_out)


# What a checkpoint holds beside model and optimizer: a scheduler, counters, a program's arguments,
# random states.
#
# None of it has a canonical name. A conversion keeps plain objects under the keys that they have,
# so that a program finds them again, and lists what it cannot keep.
#
#     {"model": ..., "optim": ..., "epoch": 3, "ema": {fqn: tensor}}   ->   "epoch" is kept, "ema.<fqn>" is listed


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
