"""A state under canonical names: the result, the hints, the names, and the optimizers."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from planners.geometry.box import Shape
from planners.units import format_count
from reshard.errors import NormalizationError, did_you_mean, format_names
from reshard.formats.sections import StoredLeaf, Tree, resolve, walk
from reshard.live.optimizer_state import is_flat_key, listed_in, settings_of, split_flat_key
from reshard.live.wrappers import CERTAIN_SEGMENTS, WrapperNames
from reshard.stored.tensor import StoredTensor, read_place

__all__ = [
    "HINTS", "Canonical", "Groups", "Hints", "NameMap", "Shapes", "States", "StoredOptimizer", "Tensors",
    "Value", "Values", "common_attribute", "elementwise", "is_single", "listed_in", "name_ids", "note_unjoined",
    "params_beside", "read_optimizer", "regroup", "settings_of", "take_optimizer", "ties",
]  # fmt: skip


Value = Any
"""A `StoredTensor`, or a plain value such as the number of steps."""
Values = dict[str, Value]
"""The states of one parameter, by name."""
States = dict[str, Values]
"""The states of an optimizer, by parameter."""
Tensors = dict[str, StoredTensor]
"""Tensors by name."""
Groups = list[dict[str, Any]]
"""Param groups: settings, and in "params" names or ids of parameters."""
Shapes = Mapping[str, Shape]
"""Shapes of parameters by name, in order."""

_ELEMENTWISE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "fp32_param")


def elementwise(name: str) -> bool:
    """Return True if a state of this name has one value for each element of the parameter."""
    return name in _ELEMENTWISE


def is_single(value: Value) -> bool:
    """Return True if a state is a single value that is equal on all shards, such as the number of steps."""
    return value.spec.numel < 2 if isinstance(value, StoredTensor) else isinstance(value, int | float | str | None)


def note_unjoined(lost: Collection[str]) -> list[str]:
    """Return the note about states that differ between shards and do not have a value for each element."""
    words = "are not read: each rank has its own, and it is not known how to join them"
    return [f"optimizer states {words}: {format_names(lost)}"] if lost else []


@dataclass
class Canonical:
    """A state under canonical names; `state` and `groups` are empty if no optimizer was saved."""

    model: Tensors = field(default_factory=dict)
    state: States = field(default_factory=dict)
    groups: Groups = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What users should know, such as padding that could not be removed and incomplete lists."""

    def add_model(self, fqn: str, tensor: StoredTensor, source: str) -> None:
        """Add a tensor of the model. Raises NormalizationError if another tensor has that name."""
        if fqn in self.model:
            raise NormalizationError(
                f"both {self.model[fqn].fqn!r} and {source!r} would be called {fqn!r}; rename one of them with the "
                "hint 'names'"
            )
        self.model[fqn] = tensor

    def add_state(self, fqn: str, name: str, value: Value) -> None:
        """Add a state of a parameter. Raises NormalizationError if it already has that state."""
        known = self.state.setdefault(fqn, {})
        if name in known:
            raise NormalizationError(f"two values of the checkpoint would be the state {name!r} of {fqn!r}")
        known[name] = value.renamed(f"{fqn}.{name}") if isinstance(value, StoredTensor) else value

    def add_step(self, step: Value) -> None:
        """Give this number of steps to all parameters with states, unless they have one."""
        for fqn, states in self.state.items():
            if "step" not in states:
                self.add_state(fqn, "step", step)

    def rename(self) -> Canonical:
        """Return the same state with every tensor of the model named like its key."""
        self.model = {fqn: t if t.fqn == fqn else t.renamed(fqn) for fqn, t in self.model.items()}
        return self


def ties(model: Tensors, before: Collection[str] = ()) -> dict[str, str]:
    """Return the names of tensors with the same chunks as an earlier one, with that one's name.
    Names in `before` come first."""
    first: dict[int, str] = {}
    for fqn in (*before, *model):
        if model[fqn].found != ():
            first.setdefault(id(model[fqn].found), fqn)
    kept = {fqn: first.get(id(tensor.found), fqn) for fqn, tensor in model.items()}
    return {fqn: name for fqn, name in kept.items() if fqn != name and fqn not in before}


def check_names(result: Canonical) -> None:
    """Note names that were given to parameters of an optimizer and that the model does not have.

    Raises NormalizationError if a state with one value per element has another shape than its
    parameter.
    """
    strange = [fqn for fqn in result.state if fqn not in result.model]
    if result.model and strange:
        words = "names that the model does not have: check those that you gave, such as the hint 'param_names'"
        result.notes.append(f"the optimizer has state under {format_names(strange)}, {words}")
    for fqn, parameter in result.model.items():
        for name, value in result.state.get(fqn, {}).items():
            if elementwise(name) and isinstance(value, StoredTensor) and value.spec.shape != parameter.spec.shape:
                raise NormalizationError(
                    f"the state {name!r} of {fqn!r} has shape {list(value.spec.shape)}, but the parameter has "
                    f"{list(parameter.spec.shape)}; so the given names are in another order than the ids"
                )


# What the user knows and a checkpoint does not record, such as the order of an optimizer's parameters.
#
# Hints are optional. If one is needed, the error says which, why, and how it looks.


HINTS: dict[str, str] = {
    "param_names": "names of the optimizer's parameters by integer id: a list or {id: name}; if ranks or stages count "
    "separately, a dict from stage or folder to either",
    "param_groups": "names of the parameters of each group, a list of lists, if the file's own lists are wrong",
    "param_shapes": "{name: shape} of the parameters, in the order in which the model registers them",
    "flat_params": "the parameters inside each flat parameter: {its id or name: [(name, shape), ...]}",
    "shard_ranks": "number of consecutive FSDP1 ranks that hold one copy of the parameters: fewer than all with "
    "HYBRID_SHARD, 1 with NO_SHARD",
    "names": "{name in the checkpoint: canonical name}, for single parameters or prefixes",
    "tied": "{alias: name} of tied parameters that are stored under one name",
    "prefix": "prefix to remove from all names, such as 'net.'; '' removes none",
    "layer_offsets": "{stage or folder: number in the full model of its layer 0}",
    "vocab_size": "rows of the embedding without padding",
    "tp_dims": "{name or glob: dim that tensor parallelism shards, or None}, for unusual names",
    "param_order": "names of the model's parameters in the order in which the model registers them",
    "kv_heads": "number of key/value heads, to split fused wqkv in optimizer state",
    "head_dim": "size of an attention head, the alternative for fused wqkv",
    "keep_parametrizations": "True keeps names with .parametrizations.",
    "expert_optimizer": "when writing Megatron's format: whether experts have a separate optimizer, as under expert "
    "parallelism",
    "stored_names": "True keeps the names and shapes of Hugging Face files as they are on disk",
}
"""Every hint that `normalized()` understands, and what it is."""


class Hints:
    """The hints that the caller gave.

    Raises NormalizationError for an unknown hint, or one that must be a number and is not.
    """

    def __init__(self, given: Mapping[str, Any] | None, *, model_only: bool = False) -> None:
        """`model_only`: omit an optimizer whose parameters have no names, because only the model is
        requested."""
        if not isinstance(given, Mapping | None):
            raise NormalizationError(f"hints must be a dict, such as {{'vocab_size': 50257}}, got {given!r:.80}")
        self._given, self.model_only = dict(given or {}), model_only
        unknown = sorted(set(self._given) - set(HINTS), key=str)
        if unknown:
            near = did_you_mean(str(unknown[0]), HINTS) or "."
            raise NormalizationError(f"unknown hint {unknown[0]!r}{near} Known hints are {', '.join(HINTS)}")
        for name in ("vocab_size", "kv_heads", "head_dim"):
            value = self._given.get(name)
            if value is not None and (type(value) is not int or value < 1):
                raise NormalizationError(f"the hint {name!r} must be a whole number >= 1, got {value!r:.40}")

    def get(self, name: str, default: Any = None) -> Any:
        """Return the hint's value."""
        assert name in HINTS
        return self._given.get(name, default)

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def mapping(self, name: str) -> dict[Any, Any]:
        """Return a hint that must be a dict; {} if it was not given."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise NormalizationError(f"the hint {name!r} must be a dict, {HINTS[name]}; got {type(value).__name__}")
        return dict(value)

    def missing(self, name: str, why: str, example: str) -> NoReturn:
        """Raise the NormalizationError that requests a hint."""
        raise NormalizationError(f"{why}. Pass it as a hint: normalized(hints={{{name!r}: {example}}}) ({HINTS[name]})")

    def ids(self, scope: str | int | None = None) -> dict[int, str] | None:
        """Return the names by id in `param_names`, for a stage or folder if there are several. None
        if not given."""
        value = self.get("param_names")
        if value is None:
            return None
        if scope is not None:
            value = find_scope(value, scope)
            if value is None:
                return None
            if isinstance(value, str):
                raise NormalizationError(
                    "the hint 'param_names' is one list of names, but several optimizers, stages, or ranks number "
                    "their parameters separately: give {0: [names], 1: [names], ...}"
                )
        items: Any = None
        if isinstance(value, Mapping):
            items = value.items()
        elif isinstance(value, Sequence) and not isinstance(value, str):
            if value and all(isinstance(names, list | tuple) for names in value):  # one list per group
                value = [name for names in value for name in names]
            items = enumerate(value)
        try:
            return {int(i): str(name) for i, name in items}
        except (TypeError, ValueError):
            raise NormalizationError(
                f"the hint 'param_names' must be {HINTS['param_names']}; got {value!r:.80}"
            ) from None


def find_scope(value: Any, scope: str | int) -> Any:
    """Return the entry for a stage, rank, or folder in a hint, by number or text, or None if there is none."""
    if isinstance(value, Mapping):
        for key in (scope, str(scope)):
            if key in value:
                return value[key]
        if str(scope).isdigit() and int(scope) in value:
            return value[int(scope)]
        return None
    if isinstance(value, Sequence) and not isinstance(value, str) and isinstance(scope, int) and scope < len(value):
        return value[scope]
    return None


# Canonical names: without the prefixes of wrappers, and as hints say.


_COUNTERS = frozenset(("n_averaged",))
"""Names that an averaging wrapper adds beside `module.`."""


class NameMap:
    """Maps the names of one model and of its optimizer's states to canonical ones."""

    def __init__(self, names: Iterable[str], hints: Hints, extra_prefix: str = "", others: Iterable[str] = ()) -> None:
        """`names` are those of the model, or of the optimizer's states if no model was saved.

        `extra_prefix` is a prefix that the format is known to add. `others` are names in the
        optimizers, which may contain an adapter's name that the adapter's file omits. Raises
        NormalizationError for a parametrization, whose parameter is computed and not stored.
        """
        self._hinted = {str(k): str(v) for k, v in hints.mapping("names").items()}
        self._keep = bool(hints.get("keep_parametrizations"))
        prefix = hints.get("prefix")
        self._wrappers = WrapperNames(
            names,
            prefixes=(extra_prefix if prefix != "" else "", "" if prefix is None else str(prefix)),
            beside=_COUNTERS,
            certain=CERTAIN_SEGMENTS | {"base_layer"},
            others=others,
        )

    def __call__(self, name: str) -> str:
        """Return the canonical name."""
        hinted = self._from_hint(name)
        if hinted is not None:
            return hinted
        bare = self._wrappers.without_wrappers(name)
        if "parametrizations" in bare.split(".") and not self._keep:
            raise NormalizationError(
                f"{name!r} is part of a parametrization, whose parameter is computed from it and is not stored; remove "
                "the parametrization before saving, or keep such names: "
                "normalized(hints={'keep_parametrizations': True})"
            )
        bare = self._wrappers.without_adapter(bare)
        hinted = self._from_hint(bare)
        return bare if hinted is None else hinted

    def _from_hint(self, name: str) -> str | None:
        """Return the hint's name for the full name, or for its longest prefix in the hint."""
        if name in self._hinted:
            return self._hinted[name]
        head = name
        while "." in head:
            head = head.rpartition(".")[0]
            for key in (head, head + "."):
                if key in self._hinted:
                    start = self._hinted[key]
                    tail = name[len(head) + 1 :]
                    return f"{start}.{tail}" if start and not start.endswith(".") else start + tail
        return None


_HOLDERS = frozenset(
    ["model", "net", "network", "module", "nn", "backbone", "seq", "sequential", "mlp", "_model", "_net"]
)
"""Names of a training module's attribute that holds the model."""


def common_attribute(names: Iterable[str]) -> str:
    """Return the first segment, with its dot, if all names share it, else "". It is, for example,
    the attribute of a training module that holds the model. A container of numbered layers counts
    only if it has a usual name of a model: `layers.0.w` is a name of the module itself, `net.0.w` a
    name in its `Sequential`."""
    given = list(names)
    heads = {name.partition(".")[0] for name in given}
    if len(heads) != 1 or any("." not in name for name in given):
        return ""
    head = heads.pop()
    numbered = all(re.match(r"\d+(\.|$)", name[len(head) + 1 :]) for name in given)
    return "" if numbered and head not in _HOLDERS else head + "."


# Saved optimizers: states by name or by integer id, param groups as lists or as one entry per
# parameter.
#
# state: {fqn: {exp_avg: ...}}    state: {0: {exp_avg: ...}}         "state.w.exp_avg": ...
# param_groups: [{lr, params}]    param_groups: [{lr, params: [0]}]  "param_groups.w.lr": ...


@dataclass
class StoredOptimizer:
    """One stored optimizer: states by the name or id under which they were saved, and its groups."""

    state: States = field(default_factory=dict)
    groups: Groups = field(default_factory=list)

    @property
    def by_id(self) -> bool:
        """True if parameters have integer ids instead of names."""
        listed = listed_in(self.groups)
        are_ids = all(isinstance(p, int) for p in listed) and all(map(str.isdigit, self.state))
        return bool(listed or self.state) and are_ids


def read_optimizer(tree: Tree) -> StoredOptimizer:
    """Read a saved optimizer: its plain values, but not its tensors."""
    saved = StoredOptimizer()
    by_name: States = {}
    flat = [key for key in tree if is_flat_key(key)]
    if not flat and tree.keys().isdisjoint(("state", "param_groups")):
        saved.state = _states(tree)  # a dict of states without groups
        return saved
    if isinstance(states := tree.get("state"), dict):
        saved.state = _states(states)
    if "param_groups" in tree:
        groups = resolve(tree["param_groups"])
        if isinstance(groups, dict):
            by_name = groups if all(isinstance(g, dict) for g in groups.values()) else {}
        elif isinstance(groups, list) and all(map(_is_group, groups)):
            saved.groups = [dict(group) for group in groups]
        else:
            raise NormalizationError(
                "the 'param_groups' of an optimizer should be dicts, each with 'params', a list of names or ids. "
                "To leave the optimizer out, pass model_only=True"
            )
    for key in flat:
        section, owner, name = split_flat_key(key)
        for path, leaf in walk(tree[key]):
            if section == "state" and not path and leaf.value() == {}:
                continue  # a parameter without state
            target = saved.state if section == "state" else by_name
            target.setdefault(owner, {})[".".join(map(str, (*name, *path)))] = leaf.value()
    if by_name:
        saved.groups = regroup(by_name)
    return saved


def _is_group(group: Any) -> bool:
    params = group.get("params", ()) if isinstance(group, dict) else None
    return isinstance(params, list | tuple) and all(isinstance(param, str | int) for param in params)


def _states(tree: Tree) -> States:
    out: States = {}
    for owner, states in tree.items():
        if isinstance(states, StoredLeaf):
            value = states.value()
            if not isinstance(value, dict):
                raise NormalizationError(
                    f"{states.key!r} should be the dict of an optimizer's states for {owner!r}, but is a single value. "
                    "To leave the optimizer out, pass model_only=True"
                )
            if value:  # otherwise, the parameter has no state yet
                out[str(owner)] = value
        else:
            out[str(owner)] = {".".join(map(str, path)): leaf.value() for path, leaf in walk(states)}
    return out


def regroup(by_name: States) -> Groups:
    """Return groups of the parameters with equal settings, in order of first appearance.

    The original grouping is not stored, so groups with equal settings become one.
    """
    groups: Groups = []
    for name, settings in by_name.items():
        params_beside(groups, {key: _small(value) for key, value in settings.items()}).append(name)
    return groups


def params_beside(groups: Groups, settings: Mapping[str, Any]) -> list[Any]:
    """Return the parameters of the group with these settings. Adds the group if it is missing."""
    group = next((group for group in groups if settings_of(group) == settings), None)
    if group is None:
        group = {**settings, "params": []}
        groups.append(group)
    params: list[Any] = group["params"]
    return params


def _small(value: Any) -> Any:
    """Return a one-element tensor, such as a learning rate, as a number. Return other settings unchanged."""
    if not isinstance(value, StoredTensor) or value.spec.shape or len(value.chunks) != 1:
        return value
    return read_place(value.chunks[0].place, value.spec.dtype).item()


def name_ids(saved: StoredOptimizer, hints: Hints, scope: int | str | None, what: str) -> StoredOptimizer:
    """Return the optimizer with names instead of integer IDs: those that it stores, or those of the
    hint.

    Without names, returns an empty optimizer if only the model is requested, and otherwise raises
    NormalizationError, which requests the hint.
    """
    if not saved.by_id:
        return saved
    names = _stored_names(saved) or hints.ids(scope) or (hints.ids() if scope is not None else None)
    listed = set(listed_in(saved.groups))
    used = sorted(listed.union(map(int, saved.state)))
    if names is None:
        if hints.model_only and not any("fp32" in states for states in saved.state.values()):
            return StoredOptimizer()  # DeepSpeed's fp32 masters are also the model's values
        which = "the optimizer" if scope is None else f"optimizer {scope!r}"
        example = '["embed.weight", ...]' if scope is None else f'{{{scope!r}: ["embed.weight", ...]}}'
        hints.missing(
            "param_names",
            f"{which} of {what} knows its {format_count(len(used), 'parameter')} only by integer ids; their names are "
            "not stored",
            example,
        )
    unnamed = [i for i in used if i not in names]
    if unnamed or (listed and len(names) > len(used)):  # a frozen parameter's name would shift those after it
        raise NormalizationError(
            f"the hint 'param_names' gives {format_count(len(names), 'name')}, but the optimizer of {what} has "
            f"{format_count(len(used), 'parameter')}, with ids {used[0]} to {used[-1]}: give the name of each "
            "parameter that it was created with, in that order, without frozen ones that it did not get"
        )
    state = {names[int(i)]: states for i, states in saved.state.items()}
    if len(state) != len(saved.state):
        raise NormalizationError("the hint 'param_names' gives the same name to several parameters")
    groups = [_with_names(group, lambda i: names[i]) for group in saved.groups]
    return StoredOptimizer(state, groups)


def _stored_names(saved: StoredOptimizer) -> dict[int, str] | None:
    """Return names that the groups store besides ids, as optimizers created from named parameters do."""
    names: dict[int, str] = {}
    for group in saved.groups:
        given = group.get("param_names")
        if not isinstance(given, list | tuple) or len(given) != len(group.get("params", ())):
            return None
        names.update(zip(group["params"], map(str, given)))
    return names or None


def _with_names(group: dict[str, Any], rename: Callable[[Any], str]) -> dict[str, Any]:
    """Return a group with mapped names, including those that some optimizers store beside IDs.
    Tensors in a sequence, such as betas, become numbers."""
    out: dict[str, Any] = settings_of(group)
    for key, value in out.items():
        if type(value) in (list, tuple):
            out[key] = type(value)(map(_small, value))
    if "params" in group:
        out["params"] = [rename(p) for p in group["params"]]
        if "param_names" in group:
            out["param_names"] = [*out["params"]]
    return out


def take_optimizer(result: Canonical, saved: StoredOptimizer, rename: Any) -> None:
    """Add an optimizer's states and groups under canonical names."""
    for name, states in saved.state.items():
        fqn = rename(name)
        result.state.setdefault(fqn, {})
        for key, value in states.items():
            result.add_state(fqn, key, value)
    result.groups += [_with_names(group, rename) for group in saved.groups]
    listed = set(listed_in(result.groups))
    missing = [fqn for fqn in result.state if fqn not in listed]
    if result.groups and missing:
        result.notes.append(
            f"{len(missing)} of {len(result.state)} parameters with states are in no param group, such as "
            f"{missing[0]!r}: only the lists of one rank were saved. The hint 'param_groups' gives the right ones"
        )
