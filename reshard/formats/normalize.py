"""Makes one canonical state from any checkpoint: the names, shapes, and param groups of the
unsharded, unwrapped model.

    normalize(contents, hints)  ->  Canonical: model {fqn: tensor}, state {fqn: {name: tensor or value}}, groups [...]

`contents` is what a format's reader found. Tensors stay stored tensors: boxes and windows are
mapped, nothing is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from planners.errors import PlanError
from reshard.errors import CorruptCheckpointError, FormatError, NormalizationError, ReshardError, format_names
from reshard.formats.canonical import Canonical, Hints, Tensors
from reshard.formats.format import Normalizer
from reshard.formats.generic import normalize_generic
from reshard.formats.sections import outside_sections, with_empty
from reshard.formats.table import find_format, find_normalizer, formats
from reshard.live.plain_data import encode_plain
from reshard.state import KeyPath
from reshard.stored.contents import Contents, unknown_class
from reshard.stored.tensor import StoredTensor


def normalize(
    contents: Contents,
    hints: Mapping[str, Any] | None = None,
    what: str = "the checkpoint",
    *,
    model_only: bool = False,
) -> Canonical:
    """Return the checkpoint's model and optimizer under canonical names.

    Args:
        hints: facts that the checkpoint lacks: see `HINTS`.
        what: text that names the checkpoint in messages.
        model_only: whether the optimizer may be omitted.

    Raises:
        NormalizationError: a hint is missing or wrong, or two tensors would have the same name.
        CorruptCheckpointError: parts of a tensor are missing or do not fit together.
    """
    given = Hints(hints, model_only=model_only)
    if not contents.tensors and (kind := unknown_class(dict(contents.objects))):
        raise NormalizationError(
            f"{what} has no tensors, and an object of {kind}, which only code can rebuild, and no code from a "
            "checkpoint runs. Load it with its own program, and save its state_dict()"
        )
    own = find_normalizer(contents.format)
    try:
        if own is None:
            own, contents = _claimed(contents)
        return _tie((own or normalize_generic)(contents, given, what), given).rename()
    except (ReshardError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, ReshardError) and not isinstance(error, PlanError):
            raise
        # a value has another type than this format requires
        why = f"{', or a hint is not what it should be' if hints else ''}: {type(error).__name__}: {error}"
        if own is None:  # the generic reader accepts any nesting
            raise NormalizationError(f"{what}: its model or optimizer is nested in no known way{why}") from error
        raise CorruptCheckpointError(
            f"{what}: what is in its files is not what {contents.format} writes{why}"
        ) from error


def _claimed(contents: Contents) -> tuple[Normalizer | None, Contents]:
    """Return the normalizer of the format to which these contents belong, although another one
    opened them, and its contents."""
    for format in formats():
        claimed = format.claim(contents) if format.claim is not None else None
        if claimed is not None:
            return find_normalizer(format.name), claimed
    return None, contents


def _tie(found: Canonical, hints: Hints) -> Canonical:
    """Add the aliases that the hint lists."""
    for name, holder in hints.mapping("tied").items():
        if holder not in found.model:
            raise NormalizationError(
                f"the hint 'tied' says that {name!r} is {holder!r}, but there is no such parameter"
            )
        found.add_model(str(name), found.model[holder], str(name))
    return found


def canonical_contents(contents: Contents, hints: Mapping[str, Any] | None, url: str, *, model_only: bool) -> Contents:
    """Return the canonical state as contents, under the keys "model.<fqn>",
    "optim.state.<fqn>.<name>", and "optim.param_groups.<i>.<name>".

    With `model_only`, returns only the model's tensors, under their FQNs. Tied tensors are listed
    once, as in the checkpoint.

    Raises NormalizationError if a hint is missing or, with `model_only`, if there is no model.
    """
    found = normalize(contents, hints, url, model_only=model_only)
    if model_only and not found.model:
        names = format_names([*contents.tensors, *contents.objects])
        raise NormalizationError(
            f"{url} has no model: of its names, {names}, none is that of a parameter. Pass the checkpoint that has the "
            "model, or leave out model_only=True"
        )
    tensors: Tensors = {}
    objects: dict[str, Any] = {}
    paths: dict[str, KeyPath] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}

    def add(path: KeyPath, value: Any) -> None:
        key = ".".join(map(str, path))
        paths[key] = path
        if isinstance(value, StoredTensor):
            tensors[key] = value.renamed(key)
        else:
            objects[key] = value

    for fqn, tensor in found.model.items():
        path = (fqn,) if model_only else ("model", fqn)
        key = ".".join(path)
        # tied tensors are the same chunks under several names
        kept = first.setdefault(id(tensor.found), key) if tensor.found != () else key
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
    # per-rank values have no canonical name
    left_out = () if model_only else tuple(contents.per_rank)
    warnings = (*contents.warnings, *found.notes)
    return Contents(tensors, objects, paths, aliases=aliases, format="normalized", warnings=warnings, left_out=left_out)


# What a checkpoint contains besides model and optimizer, such as a scheduler, counters, arguments
# of the program, and random states.
#
# None of it has a canonical name. A conversion keeps plain objects under their keys, so that
# programs find them, and lists what it cannot keep.
#
#     {"model": ..., "optim": ..., "epoch": 3, "ema": {fqn: tensor}}   ->   "epoch" is kept, "ema.<fqn>" is listed


def keep_beside(canonical: Contents, source: Contents, *, for_framework: bool) -> Contents:
    """Return `canonical`, which was made from `source`, with the plain objects besides model and
    optimizer.

    Adds values that are not plain data, such as the averages of another model, to `left_out`.
    Unless `for_framework`, does the same with values that only the name of a rank's file
    identifies, because no program looks for them by key.
    """
    format, whole = find_format(source.format), with_empty(source)
    named = for_framework or format is None or not format.names_ranks
    objects, paths = dict(canonical.objects), dict(canonical.paths)
    kept: list[KeyPath] = []
    lost, notes = list(canonical.left_out), []
    for key in beside(source):
        path = whole.path_of(key)
        taken = key in source.tensors or path[:1] in (("model",), ("optim",))
        found = _plain(whole.objects[key]) if named and not taken else None
        if found is None:
            lost.append(key)
            continue
        if key in source.objects:
            objects[key], paths[key] = found[0], path
        kept.append(path)
        if found[1]:
            notes.append(f"{key!r} is kept without {', '.join(found[1])}, of classes that are not known here")
    return replace(
        canonical,
        objects=objects,
        paths=paths,
        containers=source.containers_above(kept),
        left_out=tuple(dict.fromkeys(lost)),
        warnings=(*canonical.warnings, *notes),
    )


def beside(contents: Contents) -> Iterable[str]:
    """Return the keys of everything that is not part of a model or an optimizer."""
    format, contents = find_format(contents.format), with_empty(contents)
    return outside_sections(contents) if format is None or format.beside is None else format.beside(contents)


def without_name(contents: Contents) -> tuple[str, ...]:
    """Return the keys of everything without a canonical name."""
    return (*contents.per_rank, *beside(contents))


def _plain(value: Any) -> tuple[Any, list[str]] | None:
    """Return the value if it is plain data, and the names of the entries of a dict that are not,
    which are omitted."""
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
