"""Files that each rank of FSDP1 saved separately: local state dicts of flat parameters, and raw optimizer states.

    local_model_0.pt ...    {"layers.0._flat_param": ShardedTensor, ...}, or a 1-D piece of each parameter
    raw_optim_0.pt ...      {"state": {0: {"exp_avg": 1-D piece, ...}}, "param_groups": [...]}

The training program chooses the names, so the reader looks into all files that are numbered from 0. A key is the name
of the file followed by the key in it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from planners.geometry.box import Shape
from reshard.errors import CorruptCheckpointError, FormatError, NormalizationError, format_names
from reshard.formats.canonical import (
    Canonical,
    Groups,
    Hints,
    NameMap,
    StoredOptimizer,
    Tensors,
    find_scope,
    listed_in,
    name_ids,
    settings_of,
    take_optimizer,
)
from reshard.formats.format import Format
from reshard.formats.torch_save.pickles import TensorRef
from reshard.formats.torch_save.reader import (
    FilesOfRanks,
    TorchFile,
    contents_of,
    is_sharded_tensor,
    join_sharded,
    read_torch_file,
    saved_groups,
    stored_or_plain,
    stored_tensor,
)
from reshard.state import KeyPath
from reshard.storage.base import Listing, Storage
from reshard.stored.checksums import CRC_OF_RECORDS
from reshard.stored.contents import Contents, Facts
from reshard.stored.source import Files
from reshard.stored.tensor import StoredTensor
from reshard.stored.views import concat, cut, unflatten

# Where each parameter is in a flat parameter.


_ALIGNMENT_BYTES = 16
"""With use_orig_params, each parameter in a flat parameter begins at a multiple of this."""
FLAT = "_flat_param"


@dataclass(frozen=True)
class FlatLayout:
    """Where each parameter is in a flat one: its first element and its shape."""

    params: dict[str, tuple[int, Shape]]

    def cut(self, flat: StoredTensor) -> Tensors:
        """Return the parameters as separate tensors."""
        return {name: cut(flat, start, shape, name) for name, (start, shape) in self.params.items()}


def cut_flat(name: str, flat: StoredTensor, flat_names: Sequence[str], hints: Hints) -> Tensors:
    """Return the parameters inside a model's flat parameter, without padding. `flat_names` are
    those of all flat parameters.

    Raises NormalizationError if no hint lists them, or if the listed sizes do not fit.
    """
    return layout_of(name, None, flat.spec.numel, flat.itemsize, 0, flat_names, hints).cut(flat)


def layout_of(
    name: str | None, key: int | None, numel: int, itemsize: int, slack: int, flat_names: Sequence[str], hints: Hints
) -> FlatLayout:
    """Return the layout of the flat parameter with this name or ID. It has `numel` elements, of
    which fewer than `slack` are padding.

    Raises NormalizationError if no hint lists it, or if the listed sizes do not fit.
    """
    what = f"the flat parameter {name!r}" if key is None or name is not None else f"the flat parameter of id {key}"
    hinted = (hinted_params(scope, hints) for scope in (name, key) if scope is not None)
    params = next(filter(None, hinted), None)
    if params is None and name is not None:
        params = _by_prefix(name, flat_names, hints)
    if params is None:
        hints.missing(
            "param_shapes" if name is not None else "flat_params",
            f"{what} of FSDP1 does not say which parameters are in it",
            "{name: tuple(p.shape) for name, p in model.named_parameters()}"
            if name is not None
            else '{0: [("embed.weight", (100, 16)), ...], ...}',
        )
    for alignment in (1, max(_ALIGNMENT_BYTES // itemsize, 1)):
        at = 0
        inside: dict[str, tuple[int, Shape]] = {}
        for param, shape in params:
            start = -(-at // alignment) * alignment
            inside[param] = (start, shape)
            at = start + math.prod(shape)
        # flat parameters are padded until all ranks' parts are equal
        if 0 <= numel - -(-at // alignment) * alignment < max(slack, 1) or at == numel:
            return FlatLayout(inside)
    held = sum(math.prod(shape) for _, shape in params)
    if numel >= 2 * held > 0:
        ask_copies(
            f"{what} has {numel} elements on all ranks, but the parameters that the hint puts into it", held, hints
        )
    raise NormalizationError(f"{what} has {numel} elements, but the parameters that the hint puts into it have {held}")


def ask_copies(what: str, held: int, hints: Hints) -> None:
    """Unless a hint says how many ranks hold a copy, raise the NormalizationError that requests it."""
    if "shard_ranks" not in hints:
        hints.missing("shard_ranks", f"{what} have {held}: with HYBRID_SHARD or NO_SHARD, ranks hold copies", "1")


def hinted_params(scope: str | int, hints: Hints) -> list[tuple[str, Shape]] | None:
    """Return the names and shapes in the hint `flat_params` for a flat parameter's name or id. None
    if it has neither."""
    value = find_scope(hints.mapping("flat_params"), scope)
    value = value.get("params") if isinstance(value, Mapping) and "params" in value else value
    if value is None:
        return None
    pairs = value.items() if isinstance(value, Mapping) else value
    try:
        return [(str(param), tuple(map(int, shape))) for param, shape in pairs]
    except (TypeError, ValueError):
        raise NormalizationError(f"the hint 'flat_params' must list (name, shape), got {value!r:.80}") from None


def _by_prefix(name: str, flat_names: Sequence[str], hints: Hints) -> list[tuple[str, Shape]] | None:
    """Return the parameters of the module with this flat parameter, without those of inner modules
    that have their own."""
    shapes = _param_shapes(hints)
    if not shapes:
        return None
    fronts = sorted((flat.removesuffix(FLAT) for flat in flat_names), key=len, reverse=True)
    mine = name.removesuffix(FLAT)
    return [item for item in shapes.items() if next(filter(item[0].startswith, fronts), None) == mine]


# The files.


_FILE = re.compile(r"(?P<section>.*?\D)?(?P<rank>\d+)\.(?:pt|pth|bin)")


@dataclass(frozen=True)
class Fsdp1Facts(Facts):
    """The files of all ranks, by name and rank."""

    sections: Mapping[str, FilesOfRanks]


def numbered(names: Listing) -> dict[str, dict[int, str]]:
    """Return the files in the top folder by name and number. {} if there are other files, or two
    with one number.
    """
    out: dict[str, dict[int, str]] = {}
    for file in names:
        if "/" in file or not file.endswith((".pt", ".pth", ".bin", ".safetensors", ".ckpt")):
            continue
        match = _FILE.fullmatch(file)
        known = out.setdefault((match["section"] or "").rstrip("_-. "), {}) if match else {}
        if match is None or known.setdefault(int(match["rank"]), file) != file:
            return {}
    return out


def detect(storage: Storage, names: Listing) -> bool:
    """Return True if all files are numbered by rank, and the first of one kind contains pieces."""
    sections = numbered(names)
    if not all(min(ranks) < 2 for ranks in sections.values()) or max(map(len, sections.values()), default=0) < 2:
        return False  # a single file is a complete checkpoint
    files = Files(storage)
    try:
        first = (read_torch_file(files[ranks[min(ranks)]], numbered=False) for ranks in sections.values())
        return any(_holds_pieces(file.value) for file in first)
    except FormatError:
        return False  # not files of torch.save


def _holds_pieces(value: Any) -> bool:
    leaves = list(_leaves(value, ()))
    if any(is_sharded_tensor(leaf) for _, leaf in leaves):
        return True
    states = [
        leaf for path, leaf in leaves if "state" in path[:-2] and type(path[-2]) is int and isinstance(leaf, TensorRef)
    ]
    return bool(states) and all(len(ref.size) < 2 for ref in states) and any(len(ref.size) == 1 for ref in states)


def _leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, dict) and len(path) < 8:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    else:
        yield path, value


def open(files: Files) -> Contents:
    """Return the files of all ranks. Raises CorruptCheckpointError if the file of a rank is missing."""
    found, sections = numbered(files.listed), dict[str, dict[int, TorchFile]]()
    world = max(map(len, found.values()))
    files.checking.leave_number_open()
    for section, ranks in sorted(found.items()):
        refuse_missing(files, "rank", ranks, max(world, max(ranks) + 1))
        sections[section] = {rank: read_torch_file(files[ranks[rank]]) for rank in sorted(ranks)}
    opened: dict[KeyPath, TorchFile] = {
        (f"{s}_{rank}",): file for s, ranks in sections.items() for rank, file in ranks.items()
    }
    return contents_of("fsdp1", opened, Fsdp1Facts(sections))


def refuse_missing(files: Files, what: str, found: Mapping[int, str], count: int) -> None:
    """Refuse the checkpoint unless all of `count` numbered files exist."""
    missing = sorted(set(range(count)) - set(found))
    if missing:
        words = f"the file of {what} {missing[0]} is missing; there is {found[min(found)]}, which opens by its path"
        files.checking.refuse(CorruptCheckpointError(f"{files.storage.url}: {words}"))


# Canonical names: flat parameters and their optimizer states, split again.
#
#     use_orig_params=False    one flat tensor per wrapped module:                flat: [p0 p0 p0 | p1 p1 -]
#     use_orig_params=True     a 1-D piece of each parameter, perhaps empty:      rank 0: [p0 p0], rank 1: [p0]
#
# Neither form contains shapes, so hints give them: "param_shapes" of the model, or "flat_params" of each
# flat tensor.


_MODELS = ("model", "state_dict", "model_state_dict")
_OPTIMIZERS = ("optim", "optimizer", "optim_state_dict", "optimizer_state_dict")


@dataclass
class _RankStates:
    """The contents of the files of all ranks, by rank."""

    files: FilesOfRanks
    model: dict[int, dict[str, Any]] = field(default_factory=dict)
    optim: dict[int, dict[str, Any]] = field(default_factory=dict)


def normalize(contents: Contents, hints: Hints, what: str) -> Canonical:
    """Return the state under canonical names.

    Raises:
        NormalizationError: a hint must list shapes or names. The message says which.
        CorruptCheckpointError: the ranks' pieces do not make up what the hint lists.
    """
    facts = contents.known(Fsdp1Facts)
    found = [_find(_first_copy(name, files, hints)) for name, files in facts.sections.items()]
    models = [one for one in found if one.model]
    flat_names = [name for one in models for name in one.model[min(one.model)] if name.endswith(FLAT)]
    model: Tensors = {}
    for one in models:
        model.update(_model(one, flat_names, hints))
    saved = [_optimizer(one, flat_names, hints, what) for one in found if one.optim]
    names = list(model) or [name for optimizer in saved for name in optimizer.state]
    rename = NameMap(names, hints)
    result = Canonical()
    for name, tensor in model.items():
        result.add_model(rename(name), tensor, name)
    for optimizer in saved:
        take_optimizer(result, optimizer, rename)
    if unread := [key for key in _beside(contents) if key in contents.tensors]:
        words = "of each rank's file, one model and one optimizer are read"
        result.notes.append(f"{words}, but not {format_names(unread)}")
    return result


def _first_copy(section: str, files: FilesOfRanks, hints: Hints) -> FilesOfRanks:
    """Return the files of the ranks with the first copy of the parameters: all ranks, unless a hint
    gives a smaller number."""
    ranks = hints.get("shard_ranks")
    if ranks is None:
        return files
    if type(ranks) is not int or ranks < 1 or len(files) % ranks:
        raise NormalizationError(
            f"the hint 'shard_ranks' must be a divisor of the {len(files)} ranks that saved {section!r}, got {ranks!r}"
        )
    return {rank: file for rank, file in files.items() if rank < ranks}


def _sections(value: Mapping[str, Any]) -> list[str]:
    """Return the keys of the model and the optimizer, or "" if there is none."""
    return [next((key for key in keys if isinstance(value.get(key), dict)), "") for keys in (_MODELS, _OPTIMIZERS)]


def _find(files: FilesOfRanks) -> _RankStates:
    found = _RankStates(files)
    for rank, file in files.items():
        value = file.entries
        model, optim = (value.get(key) for key in _sections(value))
        if model is None and optim is None:
            model, optim = (None, value) if "state" in value and "param_groups" in value else (value, None)
        found.model |= {rank: model} if model is not None else {}
        found.optim |= {rank: optim} if optim is not None else {}
    return found


def _model(found: _RankStates, flat_names: Sequence[str], hints: Hints) -> Tensors:
    """Return the parameters and buffers of a local state dict."""
    rank = min(found.model)
    first, shapes = found.model[rank], _shapes(hints)
    # with use_orig_params, the state has a view of the flat tensor for each parameter, too
    original = any(_is_piece(value) and name in shapes for name, value in first.items())
    out: Tensors = {}
    for name, value in first.items():
        values = {of: held.get(name) for of, held in found.model.items()}
        if is_sharded_tensor(value):
            whole = join_sharded(name, values, found.files)
            if not name.endswith(FLAT):
                out[name] = whole
            elif not original:
                out.update(cut_flat(name, whole, flat_names, hints))
        elif value is None or isinstance(value, int | float | str | bytes):
            continue  # not a parameter or buffer, such as extra state
        elif (
            isinstance(value, TensorRef) and name in shapes and (value.size != shapes[name] or _differs(value, values))
        ):
            out[name] = _pieces(name, shapes[name], values, found.files, hints)
        elif _is_piece(value) and (not shapes or _differs(value, values)):
            _ask_shapes(hints, name)
        else:
            out[name] = stored_tensor(name, found.files[rank], value)
    return out


def _is_piece(value: Any) -> bool:
    return isinstance(value, TensorRef) and len(value.size) == 1


def _differs(first: TensorRef, values: Mapping[int, Any]) -> bool:
    return any(isinstance(value, TensorRef) and value.size != first.size for value in values.values())


def _param_shapes(hints: Hints) -> dict[str, Shape]:
    """Return the hint `param_shapes`. Raises NormalizationError for values that are not shapes."""
    try:
        return {str(name): tuple(map(int, shape)) for name, shape in hints.mapping("param_shapes").items()}
    except (TypeError, ValueError):
        raise NormalizationError("the hint 'param_shapes' must be {name: shape}") from None


def _shapes(hints: Hints) -> dict[str, Shape]:
    """Return shapes by name, from `param_shapes` and from `flat_params`. Raises NormalizationError for other values."""
    shapes = _param_shapes(hints)
    for key in hints.mapping("flat_params"):
        shapes.update(hinted_params(key, hints) or ())
    return shapes


def _ask_shapes(hints: Hints, name: str) -> None:
    hints.missing(
        "param_shapes",
        f"the ranks of FSDP1 saved 1-D pieces of {name!r}, which do not say its shape",
        "{name: tuple(p.shape) for name, p in model.named_parameters()}",
    )


def _pieces(name: str, shape: Shape, values: Mapping[int, Any], files: FilesOfRanks, hints: Hints) -> StoredTensor:
    """Return a tensor from the 1-D pieces of all ranks, in order."""
    parts = []
    for rank, ref in sorted(values.items()):
        if isinstance(ref, TensorRef) and 0 not in ref.size:
            if len(ref.size) != 1:
                raise CorruptCheckpointError(
                    f"{files[rank].source.label}: {name!r} has shape {list(ref.size)}, not 1-D"
                )
            parts.append(stored_tensor(f"{name} of rank {rank}", files[rank], ref, rank))
    at, numel = sum(part.spec.numel for part in parts), math.prod(shape)
    if at > numel and at % max(numel, 1) == 0:
        ask_copies(
            f"the pieces of {name!r} have {at} elements on all ranks, but its shape {list(shape)} would", numel, hints
        )
    if at != numel:
        raise CorruptCheckpointError(
            f"{name!r}: the pieces of {len(values)} ranks have {at} elements, but the hint gives the shape "
            f"{list(shape)} of {numel}: the file of a rank is missing, or the hint is wrong"
        )
    return unflatten(concat(parts, 0, name), shape, name)


def _optimizer(found: _RankStates, flat_names: Sequence[str], hints: Hints, what: str) -> StoredOptimizer:
    """Return an optimizer under the names of parameters."""
    first = min(found.optim)
    groups = saved_groups(found.optim[first], found.files[first])
    ranks = _RankOptimizers(found.files, {rank: of.get("state") or {} for rank, of in found.optim.items()})
    keys = list(dict.fromkeys(key for of in ranks.states.values() for key in of))
    if any(not isinstance(key, int) for key in keys):
        saved = StoredOptimizer({str(key): {} for key in keys}, groups)
        for key in keys:
            ranks.add_to(saved, key, [str(key)])
        return saved
    listed = listed_in(groups)
    flats = {key: _flat_of(i, key, ranks, flat_names, hints, listed) for i, key in enumerate(keys)}
    layouts = {key: layout for key, layout in flats.items() if layout is not None}
    if flats and layouts == flats:
        return _cut_flats(ranks, layouts, groups)
    return _by_pieces(ranks, keys, groups, hints, what)


@dataclass(frozen=True)
class _RankOptimizers:
    """The contents of the ranks' files for one optimizer."""

    files: FilesOfRanks
    states: Mapping[int, Mapping[Any, Any]]
    """The states of each rank, by the name or id of a parameter."""

    def add_to(
        self,
        saved: StoredOptimizer,
        key: Any,
        names: Iterable[str],
        join: Callable[[str, Mapping[int, Any]], Tensors] | None = None,
    ) -> None:
        """Add the states under a key to those of the parameters `names`. `join` makes parameters
        from 1-D pieces, and gets the state's name. Other values are the same on every rank."""
        first = next(rank for rank in sorted(self.states) if key in self.states[rank])
        for state, value in self.states[first][key].items():
            values = {rank: of.get(key, {}).get(state) for rank, of in self.states.items()}
            if is_sharded_tensor(value):
                parts = {name: join_sharded(f"{name}.{state}", values, self.files) for name in names}
            elif join is not None and _is_piece(value):
                parts = join(str(state), values)
            else:
                parts = dict.fromkeys(names, stored_or_plain(state, value, self.files[first], first))
            for name, part in parts.items():
                saved.state.setdefault(name, {})[str(state)] = part


def _flat_of(
    position: int,
    key: int,
    ranks: _RankOptimizers,
    flat_names: Sequence[str],
    hints: Hints,
    listed: Sequence[Any],
) -> FlatLayout | None:
    """Return the layout of the flat parameter with an ID, or None if IDs are those of original parameters."""
    name = None
    if not hints.mapping("flat_params"):
        # without use_orig_params, the optimizer has one parameter per flat parameter of the model
        if not flat_names or len(listed) != len(flat_names) or "param_shapes" not in hints or "param_names" in hints:
            return None
        name = flat_names[listed.index(key) if key in listed else position]
    total = 0
    for of in ranks.states.values():
        total += max((value.size[0] for value in of.get(key, {}).values() if _is_piece(value)), default=0)
    return layout_of(name, key, total, 4, len(ranks.states), flat_names, hints)


def _cut_flats(ranks: _RankOptimizers, layouts: Mapping[int, FlatLayout], groups: Groups) -> StoredOptimizer:
    saved = StoredOptimizer()
    for key, layout in layouts.items():
        ranks.add_to(saved, key, layout.params, partial(_cut_row, key, layout, ranks.files))
    for group in groups:
        names = [name for key in group.get("params", ()) if key in layouts for name in layouts[key].params]
        saved.groups.append({**settings_of(group), "params": names})
    return saved


def _cut_row(key: int, layout: FlatLayout, files: FilesOfRanks, state: str, values: Mapping[int, Any]) -> Tensors:
    name = f"{key}.{state}"
    parts = []
    for rank, ref in sorted(values.items()):
        if not _is_piece(ref):
            raise CorruptCheckpointError(f"{files[rank].source.label}: the state {name!r} should be a 1-D piece")
        parts.append(stored_tensor(name, files[rank], ref, rank))
    return layout.cut(concat(parts, 0, name))


def _by_pieces(ranks: _RankOptimizers, keys: Sequence[int], groups: Groups, hints: Hints, what: str) -> StoredOptimizer:
    """Return states of parameters, with one 1-D piece per rank, by integer id."""
    by_id = {str(key): {"": key} for key in keys}
    if "param_names" not in hints and "flat_params" not in hints and not any("param_names" in g for g in groups):
        hints.missing(
            "param_names",
            f"the optimizer of {what} knows its {len(keys)} parameters only by integer ids. If they are flat "
            "parameters (use_orig_params=False), give instead the hint 'flat_params': {0: [(name, shape), ...], ...}",
            '["embed.weight", ...], "param_shapes": {name: shape}',
        )
    named = name_ids(StoredOptimizer(by_id, groups), hints, None, what)
    shapes = _shapes(hints)
    saved = StoredOptimizer(groups=named.groups)

    def joined(name: str, state: str, values: Mapping[int, Any]) -> Tensors:
        if name not in shapes:
            _ask_shapes(hints, name)
        return {name: _pieces(f"{name}.{state}", shapes[name], values, ranks.files, hints)}

    for name, holder in named.state.items():
        ranks.add_to(saved, holder[""], [name], partial(joined, name))
    return saved


def _beside(contents: Contents) -> Iterator[str]:
    """Yield the keys of everything but the one model and the one optimizer that are read from each file."""
    sections = contents.known(Fsdp1Facts).sections
    read = {
        f"{name}_{rank}": _sections(file.entries) for name, files in sections.items() for rank, file in files.items()
    }
    for key in (*contents.tensors, *contents.objects):
        file, section, *_ = contents.path_of(key)
        if any(read[str(file)]) and section not in read[str(file)]:
            yield key


FORMAT = Format(
    "fsdp1",
    checksums=CRC_OF_RECORDS,
    detect=detect,
    open=open,
    is_composite=True,
    beside=_beside,
    names_ranks=True,
)
