"""One canonical state out of any checkpoint: the names, shapes and param groups of the unsharded, unwrapped model.

    normalize(contents, hints)  ->  Canonical: model {fqn: tensor}, state {fqn: {name: tensor or value}}, groups [...]

`contents` is what a format module found. Tensors stay stored tensors: boxes and windows are mapped, nothing is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from planners.errors import PlanError
from reshard.checkpoint.canonical.deepspeed.deepspeed import normalize_deepspeed
from reshard.checkpoint.canonical.fsdp1.rank_files import normalize_fsdp1
from reshard.checkpoint.canonical.generic import normalize_generic, normalize_orbax
from reshard.checkpoint.canonical.hints import Hints
from reshard.checkpoint.canonical.megatron.legacy import normalize_megatron_legacy
from reshard.checkpoint.canonical.megatron.megatron import normalize_megatron
from reshard.checkpoint.canonical.result import Canonical
from reshard.checkpoint.canonical.stages import normalize_stages, stages_by_key
from reshard.errors import DamagedCheckpointError, NormalizationError, ReshardError
from reshard.formats.dcp.reader import DcpFacts
from reshard.formats.frameworks.megatron import MegatronFacts, is_of_fsdp
from reshard.formats.frameworks.pipeline_stages import StageFacts
from reshard.formats.stored.contents import Contents
from reshard.formats.stored.tensor import StoredTensor

__all__ = ["canonical_contents", "normalize"]


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
    return Contents("normalized", tensors, objects, aliases, paths, warnings=warnings, left_out=left_out)
