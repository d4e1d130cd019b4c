"""Which part of a saved state is the model and which are optimizers: by the names that frameworks
give to them.

{"model": {fqn: ...}, "optim": {...}}              get_state_dict, and most training scripts
{fqn: ..., "optimizer": {...}, "train_state": {}}  torchtitan: what has no section is the model
{"state_dict": {...}, "optimizer_states": [...]}   Lightning
{"state": {"model": {...}, "optimizers": {"AdamW": {...}}}, "rng": [...]}          Composer
{fqn: ...}                                         a model alone
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from reshard.errors import NormalizationError
from reshard.live.optimizer_state import is_flat, is_nested
from reshard.live.tree import unflatten
from reshard.state import IntKey, KeyPath, empty_sequences, key_of, plain_key
from reshard.stored.contents import Contents


@dataclass(frozen=True, slots=True)
class StoredLeaf:
    """A tensor or an object of the checkpoint, by its key; not read yet."""

    contents: Contents
    key: str
    is_tensor: bool

    def value(self) -> Any:
        """Return the stored tensor, or the object."""
        if not self.is_tensor:
            return self.contents.objects[self.key]
        if self.key in self.contents.tensors:
            return self.contents.tensors[self.key]
        return self.contents.tensors[self.contents.aliases[self.key]].renamed(self.key)


Tree = dict[Any, Any]
"""Nested dicts with text keys, or int keys for positions in lists. Leaves are `StoredLeaf`s."""

_OPTIMIZER = re.compile(
    r"(optim|optims|optimizer|optimizers|opt|opt_state|optim_state|optimizer_state|optimizer_states|optimizer_\d+"
    r"|optimizer_parts|optim_state_dict|optimizer_state_dict|optimizer_state_dicts)"
)
_MODEL = ("model", "state_dict", "model_state_dict", "module", "model_state", "weights")
_OTHER = re.compile(
    r"(lr_)?sched(uler)?s?|lr_scheduler.*|scheduler_state_dict|train_state|trainer_state|data_?loaders?|rng.*|random_states.*"
    r"|extra|extra_state|extra_states|ema.*|custom_checkpoint_\d+|dl_state_dict.*|loops|callbacks|args|config|hyper_parameters|sampler.*|scaler|grad_scaler"
    r"|epoch|global_step|step|iteration|metrics"
)
_FLAT_OPTIMIZER = re.compile(r"(optim|optimizer)\.((state|param_groups)\..+)", re.DOTALL)


def nest(contents: Contents) -> Tree:
    """Return the tensors, their aliases, and the objects of a checkpoint, nested as they were saved."""
    root: Tree = {}
    leaves = [(key, True) for key in contents.tensors]
    leaves += [(key, True) for key in contents.aliases if key not in contents.tensors]
    leaves += [(key, False) for key in contents.objects]
    for key, is_tensor in leaves:
        path = contents.path_of(key) or (key,)
        parts = [*map(plain_key, path)]
        # an int key of a dict becomes text, so that only lists have ints
        parts = [str(p) if isinstance(q, IntKey) else p for p, q in zip(parts, path)]
        leaf = StoredLeaf(contents, key, is_tensor)
        if not _insert(root, parts, leaf):
            _insert(root, [key], leaf)
    return root


def _insert(root: Tree, path: list[Any], leaf: StoredLeaf) -> bool:
    node = root
    for part in path[:-1]:
        node = node.setdefault(part, {})
        if isinstance(node, StoredLeaf):
            return False
    if path[-1] in node:
        return False
    node[path[-1]] = leaf
    return True


def walk(tree: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, StoredLeaf]]:
    """Yield every leaf with its path."""
    if isinstance(tree, StoredLeaf):
        yield path, tree
        return
    for key, below in tree.items():
        yield from walk(below, (*path, key))


def resolve(tree: Any) -> Any:
    """Return the tree with its objects read and its lists as lists. Tensors are `StoredTensor`s."""
    if isinstance(tree, StoredLeaf):
        return tree.value()
    if tree and all(type(key) is int for key in tree):
        return [resolve(tree[key]) for key in sorted(tree)]
    return {key: resolve(value) for key, value in tree.items()}


@dataclass
class Sections:
    """The parts of a state that normalization deals with."""

    models: dict[str, list[tuple[str, StoredLeaf]]]
    """By model: the saved name and leaf of each tensor. The key is "" for a single model, and
    otherwise the prefix of the model's names, such as "model." and "model_1."."""
    optimizers: list[tuple[str, Tree]]
    """The optimizers, each with the key of its model."""

    @property
    def model(self) -> list[tuple[str, StoredLeaf]]:
        """All tensors of all models."""
        return [(prefix + name, leaf) for prefix, names in self.models.items() for name, leaf in names]


def find_sections(contents: Contents) -> Sections:
    """Return the model and the optimizers of a checkpoint."""
    tree = _unwrap(_split_flat(nest(contents)))
    if _is_bare_optimizer(tree) or _are_by_parameter(tree):
        return Sections({}, [("", one) for one in _as_trees(tree)])
    found = sorted((key for key in tree if _is_optimizer(key, tree[key])), key=_natural)
    optimizers = [(key, one) for key in found for one in _as_trees(_inside(tree[key]))]
    models_in = [key for key in tree if isinstance(tree[key], dict) and _has_tensor(tree[key])]
    first = next((key for key in _MODEL if key in models_in), None)
    if first is None:
        numbered = [key for key in models_in if _NUMBER.search(str(key)) and _NUMBER.sub("", str(key)) in _MODEL]
        if len(numbered) < 2 or len({_NUMBER.sub("", str(key)) for key in numbered}) > 1:
            rest = {k: v for k, v in tree.items() if not (_is_optimizer(k, v) or _is_other(k, v))}
            return Sections({"": _names(_only_state(rest))}, [("", one) for _, one in optimizers])
        first = min(numbered, key=_natural)
    base = _NUMBER.sub("", first)
    others = [key for key in models_in if key != first and _NUMBER.sub("", str(key)) == base]
    if not others:
        return Sections({"": _names(tree[first])}, [("", one) for _, one in optimizers])
    models = {f"{key}.": _names(_inside(tree[key])) for key in (first, *sorted(others, key=_natural))}
    return Sections(models, [(_model_of(key, first, models), one) for key, one in optimizers])


def outside_sections(contents: Contents) -> Iterator[str]:
    """Yield the keys of everything that is not part of a model or an optimizer."""
    sections = find_sections(contents)
    used = {leaf.key for _, leaf in sections.model}
    used |= {leaf.key for _, tree in sections.optimizers for _, leaf in walk(tree)}
    yield from (key for key in (*contents.tensors, *contents.objects) if key not in used)


_NUMBER = re.compile(r"_\d+$")


def _inside(section: Tree) -> Tree:
    """Return the section inside a section that repeats it: accelerate's `model_1` contains `model`,
    and NeMo's optimizers contain `optim` and a schedule, twice."""
    named = [key for key in section if not is_beside(str(key))]
    same = len(named) == 1 and is_section(str(named[0])) and isinstance(section[named[0]], dict)
    return _inside(section[named[0]]) if same else section


def _only_state(tree: Tree) -> Tree:
    """Return the only state dict inside, under any name, such as `net`. Its keys have dots. Without
    one, return the tree."""
    with_tensors = [v for v in tree.values() if _has_tensor(v)]
    if len(with_tensors) == 1 and isinstance(with_tensors[0], dict) and any("." in str(key) for key in with_tensors[0]):
        return with_tensors[0]
    return tree


def _model_of(optimizer: str, first: str, models: Mapping[str, Any]) -> str:
    """Return the model, of several, that has the optimizer's number. Optimizers with another number
    belong to the first model."""
    number = _NUMBER.search(optimizer)
    mine = f"{_NUMBER.sub('', first)}{number[0] if number else ''}."
    return mine if mine in models else f"{first}."


def _names(model: Tree) -> list[tuple[str, StoredLeaf]]:
    if model and all(type(key) is int and isinstance(model[key], dict) for key in model):
        model = _joined(model)
    return [(".".join(map(str, path)), leaf) for path, leaf in walk(model) if leaf.is_tensor]


def _natural(key: Any) -> tuple[Any, ...]:
    """Return a sort key that puts `optimizer_10` after `optimizer_2`."""
    return tuple(int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", str(key)))


def _joined(parts: Tree) -> Tree:
    """Return the parts of a pipeline that one process has, as one model. Raises NormalizationError
    if two share a name."""
    out: Tree = {}
    for number, part in parts.items():
        for key, value in part.items():
            if key in out:
                raise NormalizationError(f"part {number} of the model has {key!r}, and so has a part before it")
            out[key] = value
    return out


def _split_flat(tree: Tree) -> Tree:
    """Create sections from the keys of a flat state, such as `optim.state.w.exp_avg`. Then also
    create one from `model.w`."""
    flat = {key: m for key in tree if isinstance(tree[key], StoredLeaf) and (m := _FLAT_OPTIMIZER.fullmatch(str(key)))}
    if not flat:
        return tree
    out: Tree = {}
    rest = {key: value for key, value in tree.items() if key not in flat}
    tensors = [key for key, value in rest.items() if isinstance(value, StoredLeaf) and value.is_tensor]
    sectioned = bool(tensors) and all(str(key).startswith("model.") for key in tensors)
    for key, value in rest.items():
        if sectioned and key in tensors:
            out.setdefault("model", {})[str(key).removeprefix("model.")] = value
        else:
            out[key] = value
    for key, match in flat.items():
        out.setdefault(match[1], {})[match[2]] = tree[key]
    return out


def _unwrap(tree: Tree) -> Tree:
    """Return the inner state if everything is under one name, such as `{"app": {"model": ...,
    "optim": ...}}`. Entries beside it must have no tensors, or not belong to a model, as in
    Composer's `{"state": {"model": ...}, "rng": ...}`."""
    while not _has_sections(tree) and not _is_bare_optimizer(tree):
        found = list(tree.values()) if len(tree) == 1 else _may_be_models(tree)
        if len(found) != 1 or not isinstance(found[0], dict) or not _has_sections(found[0]):
            break
        # a parameter can have a section's name, but then other parameters are beside it
        if len(tree) > 1 and len(_may_be_models(found[0])) > 1 and not _has_optimizer(found[0]):
            break
        tree = found[0]
    return tree


def _has_sections(tree: Tree) -> bool:
    return any(name in tree for name in _MODEL) or _has_optimizer(tree)


def _has_optimizer(tree: Tree) -> bool:
    return any(_is_optimizer(key, value) for key, value in tree.items())


def _may_be_models(tree: Tree) -> list[Tree | StoredLeaf]:
    """Return what has tensors, and no name that models cannot have."""
    with_tensors = {k: v for k, v in tree.items() if _has_tensor(v)}
    return [value for key, value in with_tensors.items() if not _is_other(key, value)]


def _is_optimizer(key: Any, value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return _OPTIMIZER.fullmatch(str(key)) is not None or is_nested(value)


def is_beside(key: str) -> bool:
    """Return True if a section of this name is neither a model nor an optimizer."""
    return _OTHER.fullmatch(key) is not None


def _is_other(key: Any, value: Any) -> bool:
    # a parameter can have this name, too: it is then a tensor at the top, not a section
    if isinstance(value, StoredLeaf):
        return not value.is_tensor
    return is_beside(str(key))


def is_section(key: str) -> bool:
    """Return True if a section of this name is a model or an optimizer."""
    return key in _MODEL or _OPTIMIZER.fullmatch(key) is not None


def with_empty(contents: Contents) -> Contents:
    """Return the contents with each empty list and dict as an object.

    An empty section of a model or an optimizer is not an object.
    """
    kinds = contents.containers
    known = {*contents.tensors, *contents.aliases, *contents.objects, *contents.per_rank}
    found = empty_sequences(kinds, map(contents.path_of, known), but=("tensor",))
    empty = {key: path for key, path in found.items() if key not in known and not is_section(str(path[-1]))}
    made = {key: unflatten({}, {(): kinds[path]}) for key, path in empty.items()}
    objects = ChainMap(made, contents.objects)  # type: ignore[arg-type]  # read when asked for
    rest = {path: kind for path, kind in kinds.items() if key_of(path) not in empty}
    return replace(contents, objects=objects, paths={**contents.paths, **empty}, containers=rest)


def _is_bare_optimizer(tree: Tree) -> bool:
    """Return True if the state is only an optimizer's."""
    if isinstance(tree.get("state"), dict) and "param_groups" in tree:
        return True
    alone = [str(k).isdigit() and isinstance(v, dict) and "exp_avg" in v for k, v in tree.items()]  # states, by ids
    return is_flat(tree) or (bool(alone) and all(alone))


def _has_tensor(tree: Tree | StoredLeaf) -> bool:
    return any(leaf.is_tensor for _, leaf in walk(tree))


def _as_trees(tree: Tree) -> list[Tree]:
    """Return an optimizer, or each of several in a list or by name."""
    inside = list(tree.values())
    if _are_by_parameter(tree):
        return [_by_parameter(tree)]
    numbered = bool(tree) and all(type(key) is int or str(key).isdigit() for key in tree)
    if numbered and all(isinstance(one, Mapping) and ("state" in one or "param_groups" in one) for one in inside):
        return [tree[key] for key in sorted(tree, key=int)]
    if inside and all(isinstance(one, Mapping) and is_nested(one) for one in inside):
        numbered = all(_NUMBER.search(str(key)) for key in tree)  # stage_2 before stage_10
        return [tree[key] for key in sorted(tree, key=_natural)] if numbered else inside
    return [tree]


def _are_by_parameter(tree: Tree) -> bool:
    """Return True for a separate optimizer for each parameter, by name. torchtune has these to step
    in the backward pass."""
    return bool(tree) and all("." in str(k) and isinstance(v, Mapping) and _has_groups(v) for k, v in tree.items())


def _has_groups(optimizer: Mapping[Any, Any]) -> bool:
    groups = optimizer.get("param_groups")
    return isinstance(groups, Mapping) and isinstance(groups.get(0), Mapping)


def _by_parameter(tree: Tree) -> Tree:
    """Return the optimizers of single parameters as one optimizer."""
    kept = {name: one["state"] for name, one in tree.items() if isinstance(one.get("state"), dict)}
    states = {name: state for name, of in kept.items() for state in of.values()}
    groups = {name: {k: v for k, v in one["param_groups"][0].items() if k != "params"} for name, one in tree.items()}
    return {"state": states, "param_groups": groups}
