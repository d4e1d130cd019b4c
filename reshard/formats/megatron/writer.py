"""Writes Megatron-core's `torch_dist` folders: a canonical state under the keys that Megatron asks for."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from planners.geometry.box import Box, Shape
from planners.geometry.layout import TensorSpec
from reshard.errors import FormatError
from reshard.formats.canonical import Canonical, Groups, Hints, Tensors, ties
from reshard.formats.dcp.writer import DcpWriter, object_to_bytes
from reshard.formats.format import Widen, Writing
from reshard.formats.megatron.files import LATEST
from reshard.formats.megatron.names import LAYER, is_expert
from reshard.formats.megatron.optimizer import groups_to_save
from reshard.live.tree import unflatten
from reshard.state import KeyPath
from reshard.storage.base import Listing
from reshard.stored.contents import Contents, Facts
from reshard.stored.streaming import FilePart, FilePlan, FormatWriter, Publication, Target, grouped
from reshard.stored.tensor import StoredTensor, read_value
from reshard.stored.views import stack

#     latest_checkpointed_iteration.txt        names the folder, published last
#     iter_0000002/metadata.json, common.pt    the backend, and everything that is not a tensor
#     iter_0000002/.metadata, __0_*.distcp     a chunk per layer and expert, as Megatron itself shards them
#
# If the target's own name is that of such a folder, all files are in it, and no file names it.


_ITERATION = re.compile(r"iter_\d{7,}|release")
_LAYERS = re.compile(r"(?:.*\.)?layers\.(?!\d)")
_EXPERTS = re.compile(r".*\bexperts\.experts\.(?!\d)")
_BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_COMMON = {"common_backend": "torch", "common_backend_version": 1}


@dataclass(frozen=True)
class MegatronState(Facts):
    """All values other than tensors."""

    common: Mapping[str, Any]
    """The contents of `common.pt`."""
    empty: tuple[str, ...]
    """Keys of objects that modules request and that are empty."""


class MegatronWriter(DcpWriter):
    """Files of a limited size, in the folder of one iteration."""

    def __init__(self, contents: Contents, target: Target) -> None:
        facts = contents.known(MegatronState)
        self.common = facts.common
        is_inside = _ITERATION.fullmatch(target.name) is not None
        self.folder = "" if is_inside else f"iter_{int(self.common['iteration']):07d}/"
        first, *others = facts.empty or ("",)
        aliases = {**contents.aliases, **dict.fromkeys(others, first)}
        objects = {first: [None]} if first else {}
        FormatWriter.__init__(self, Contents(
            contents.tensors, objects, aliases=aliases, format=contents.format, warnings=contents.warnings,
            left_out=contents.left_out,
        ), target)  # fmt: skip
        parts = [part for name in self.names for part in _chunks(self.stored(name).spec)]
        groups = grouped(parts, target.max_shard_bytes)
        self.files = tuple(
            FilePlan(f"{self.folder}__0_{self.job_id}_{number}.distcp", tuple(group), number)
            for number, group in enumerate(groups)
        )

    def finish(self, out: Publication) -> None:
        """Publish what describes the files, then the file that names their folder."""
        out.check()
        out.storage.delete(f"{self.folder}.metadata")  # an older one may be for other arguments
        out.publish(f"{self.folder}metadata.json", json.dumps({**_BACKEND, **_COMMON}).encode())
        out.publish(f"{self.folder}common.pt", object_to_bytes(dict(self.common)))
        self.publish(out, None, self.folder)
        if self.folder:
            out.publish(LATEST, str(int(self.common["iteration"])).encode())

    def occupied(self, names: Listing) -> str | None:
        """Return the name of the file that is published last."""
        wanted = LATEST if self.folder else ".metadata"
        return wanted if wanted in names else None


def _chunks(spec: TensorSpec) -> Iterator[FilePart]:
    """Yield a chunk for each layer and expert of a stack, so that a rank reads only those it has."""
    stacked = bool(_LAYERS.match(spec.fqn)) + bool(_EXPERTS.match(spec.fqn))
    leading, rest = spec.shape[:stacked], spec.shape[stacked:]
    for at in product(*map(range, leading)):
        yield FilePart(spec, Box((*at, *(0,) * len(rest)), (*(1,) * len(at), *rest)))


# A canonical state in the form of Megatron-core's `torch_dist` with a fully reshardable optimizer:
#
#     model         <key>                                         complete layers, stacked: see `Stacks`
#     optimizer     optimizer.state.{param, exp_avg, ...}.<key>   masters and states with the parameter's shape
#     common.pt     param groups, one number of steps, and what was saved under "common." beside a model
#
# Megatron's three kinds of optimizers look for groups in different places, and for masters under
# different names. All of these are written. Further names of a tensor cost nothing: they share bytes.


_MASTER = "fp32_param"
_PARAM = "optimizer.state.param."
_NARROW = ("bfloat16", "float16")
"""Dtypes of parameters that have masters."""
_VERSION = 3.0
"""The `checkpoint_version` of newer programs. 0, or none, means another order of rows."""


_OF_MEGATRON = re.compile(
    r"(.*\.)?(linear_(q|kv|proj|fc\d)\w*"
    r"|embedding\.word_embeddings"
    r"|decoder\.layers\.\d+\.mixer)\..*"
)
_NO_NAME = (
    "no tensor has a name of Megatron's, only names such as {!r}, which Megatron does not load: "
    "translate them with --names huggingface:megatron, "
    "or in Python with mapping=ready(config, 'huggingface', 'megatron')"
)


def megatron_form(
    found: Canonical, contents: Contents, hints: Mapping[str, Any] | None, widen: Widen, what: str
) -> Contents:
    """Return `contents`, which normalizes to `found`, with the keys, stacks, and common state of
    Megatron's format.

    Raises FormatError if the format cannot store the state: layers are missing, the optimizer has
    no param groups, or steps differ.
    """
    if not found.model:
        raise FormatError(
            f"{what}: it contains no model: Megatron's format stores an optimizer only together with its model"
        )
    stacks = Stacks.of({fqn: tensor.spec for fqn, tensor in found.model.items()})
    tied = ties(found.model)
    tensors, aliases = stacks.put({fqn: t for fqn, t in found.model.items() if fqn not in tied})
    aliases.update((stacks.keys(fqn)[0], stacks.keys(kept)[0]) for fqn, kept in tied.items())
    beside = {path[1:]: key for key, path in contents.paths.items() if _is_common(path)}
    common = unflatten(
        {path: contents.objects[key] for path, key in beside.items() if key in contents.objects},
        {path[1:]: kind for path, kind in contents.containers.items() if _is_common(path)},
    )
    notes = [] if any(map(_OF_MEGATRON.fullmatch, found.model)) else [_NO_NAME.format(next(iter(found.model)))]
    if found.state:
        own_experts = _own_experts(found, Hints(hints))
        step = _step(found)
        groups, more_notes = groups_to_save(found, own_experts)
        notes += more_notes
        if not groups:
            raise FormatError(
                f"{what}: it has optimizer states but no param groups, and Megatron cannot resume without them: "
                "convert with model_only=True, or from a checkpoint that has them"
            )
        more, further = _states(found, stacks, tied, widen)
        tensors.update(more)
        aliases.update(further)
        scaler = common.get("optimizer", {}).get("grad_scaler")
        common["optimizer"] = _optimizer(groups, step, own_experts, scaler)
        common.setdefault("iteration", 0 if step is None else int(step))
    if isinstance(common.get("args"), dict):
        common["args"] = argparse.Namespace(**common["args"])
    common.setdefault("checkpoint_version", _VERSION)
    common.setdefault("iteration", 0)
    common["content_metadata"] = {
        "singleton_local_shards": False,
        "non_homogeneous_layers": stacks.is_numbered,
        "chained_optim_avoid_prefix": True,
        "distrib_optim_sharding_type": "fully_reshardable",
    }
    written = re.compile(r"optim\.(state\..*\.step|param_groups\..*)" if found.state else "")
    used = set(beside.values())
    left = [key for key in contents.objects if key not in used and not written.fullmatch(key)]
    return Contents(
        tensors,
        aliases=aliases,
        format="megatron",
        facts=MegatronState(common, tuple(extra_state_keys(stacks, found.model))),
        warnings=(*contents.warnings, *found.notes, *notes),
        left_out=(*contents.left_out, *contents.per_rank, *left),
    )


def _is_common(path: KeyPath) -> bool:
    return path[:1] == ("common",) and len(path) > 1


def _own_experts(found: Canonical, hints: Hints) -> bool:
    """Return True if experts have a separate optimizer, as under expert parallelism."""
    wanted = hints.get("expert_optimizer")
    if wanted is not None:
        return bool(wanted)
    theirs = [group for group in found.groups if "is_expert_parallel" in group]
    return any(g["is_expert_parallel"] for g in theirs) if theirs else any(map(is_expert, found.model))


def _step(found: Canonical) -> float | None:
    """Return the one number of steps that all parameters have taken. None if no parameter has one."""
    steps = {fqn: float(read_value(states["step"])) for fqn, states in found.state.items() if "step" in states}
    if not steps:
        return None
    first, step = next(iter(steps.items()))
    other = next((fqn for fqn, value in steps.items() if value != step), None)
    if other is not None:
        raise FormatError(
            f"Megatron's format stores one step count for all parameters, but {first!r} has taken {step:g} and "
            f"{other!r} {steps[other]:g}"
        )
    return step


def _states(found: Canonical, stacks: Stacks, tied: Mapping[str, str], widen: Widen) -> tuple[Tensors, dict[str, str]]:
    """Return states by key, under all names that some optimizer requests, and masters of all
    parameters that have states."""
    tensors: Tensors = {}
    aliases: dict[str, str] = {}
    trained = {tied.get(fqn, fqn): states for fqn, states in found.state.items() if states}
    named: dict[str, Tensors] = {}
    for fqn, states in trained.items():
        for name, value in states.items():
            if name != "step" and isinstance(value, StoredTensor):
                named.setdefault(name, {})[fqn] = value
    same: dict[str, str] = {}
    narrow: list[str] = []
    for fqn in trained:
        tensor = found.model.get(fqn)
        if tensor is None:
            continue
        if tensor.spec.dtype in _NARROW:
            narrow.append(fqn)
            named.setdefault(_MASTER, {}).setdefault(fqn, widen(tensor, f"{_MASTER}.{fqn}"))
        elif _MASTER not in trained[fqn]:
            key, *others = stacks.keys(fqn)
            same.update((f"{_PARAM}{name}", key) for name in (key, *others))
    for name, of in named.items():
        more, further = stacks.put(of, _PARAM if name == _MASTER else f"optimizer.state.{name}.")
        tensors.update(more)
        aliases.update(further)
    for key in {key for fqn in narrow for key in stacks.keys(fqn)}:  # the names that other optimizers use
        aliases[f"optimizer.state.{_MASTER}.{key}"] = aliases.get(_PARAM + key, _PARAM + key)
    return tensors, {**aliases, **same}


def _optimizer(groups: Groups, step: float | None, own_experts: bool, scaler: Any) -> dict[Any, Any]:
    """Return the part of `common.pt` for the optimizer, and for that of experts."""

    def one(of: Groups) -> dict[str, Any]:
        import torch

        state = {} if step is None else {"common_step": torch.tensor(step, device="cpu")}
        counted = [group if step is None else {**group, "step": int(step)} for group in of]
        inner = {"state": dict(state), "param_groups": [dict(group) for group in counted]}
        beside = {} if scaler is None else {"grad_scaler": scaler}
        return {**inner, **beside, "optimizer": inner, "param_state_sharding_type": "fully_reshardable"}

    if not own_experts:
        return one(groups)
    parts = [[g for g in groups if bool(g["is_expert_parallel"]) == experts] for experts in (False, True)]
    return {number: one(of) for number, of in enumerate(parts)}


# Parameters of the unsharded model under Megatron-core's keys: the inverse of `names.expand`.
#
#     decoder.layers.<l>.mlp.linear_fc2.weight            decoder.layers.mlp.linear_fc2.weight [L, ...]
#     ...experts.local_experts.<e>.linear_fc2.weight      ...experts.experts.linear_fc2.weight [L, E, ...]
#     ...input_layernorm.weight                           ...self_attention.linear_qkv.layer_norm_weight
#
# Layers that differ are not stacked: keys then contain their numbers, as Megatron itself does for such
# models. Which norms are saved within the following projection depends on the layers' modules. If
# these are unknown, the same bytes are saved under both names.


_EXPERT = re.compile(r"(?P<front>.*\bexperts)\.local_experts\.(?P<expert>\d+)\.(?P<tail>.+)")
_NUMBERED = re.compile(r"(?:.*\.)?mtp\.layers")
"""Layers that are never stacked, such as multi-token prediction layers."""
_NORMS = (
    ("input_layernorm", "self_attention.linear_qkv", True),
    ("input_layernorm", "self_attention.in_proj", False),
    ("pre_mlp_layernorm", "mlp.linear_fc1", True),
    ("self_attention.q_layernorm", "self_attention.linear_q_up_proj", False),
    ("self_attention.kv_layernorm", "self_attention.linear_kv_up_proj", False),
)
"""A norm, the projection that follows it, and whether it is saved within the projection if
attention is not latent."""
_STATELESS = re.compile(r".*(embeddings?|router|conv1d|mixer)")
"""Modules without state besides their parameters."""


@dataclass(frozen=True)
class _ParameterSite:
    """Where a parameter is: its block, layer, and expert, and its name there."""

    block: str
    layer: int
    front: str
    expert: int
    tail: str

    @classmethod
    def of(cls, name: str) -> _ParameterSite:
        match = LAYER.fullmatch(name)
        block, layer, rest = (match["head"], int(match["layer"]), match["tail"]) if match else ("", -1, name)
        match = _EXPERT.fullmatch(rest)
        return cls(block, layer, match["front"], int(match["expert"]), match["tail"]) if match else cls(
            block, layer, "", -1, rest
        )  # fmt: skip

    @property
    def inner(self) -> str:
        """The name within the layer, without an expert's number."""
        return f"{self.front}.experts.{self.tail}" if self.front else self.tail


@dataclass
class Stacks:
    """The keys of a model's parameters, and which parameters each key stacks. States have the same keys."""

    layers: dict[str, int] = field(default_factory=dict)
    """Layers of each block that is a stack."""
    experts: dict[str, int] = field(default_factory=dict)
    """Number of experts, by the part of the name before them."""
    shapes: dict[str, Shape] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Mapping[str, TensorSpec]) -> Stacks:
        """Find the stacks. Raises FormatError if layers or experts are missing."""
        made = cls(shapes={name: spec.shape for name, spec in model.items()})
        blocks: dict[str, dict[int, dict[str, tuple[Shape, str]]]] = {}
        experts: dict[str, set[int]] = {}
        for name, spec in model.items():
            site = _ParameterSite.of(name)
            if site.expert >= 0:
                experts.setdefault(_before_experts(site), set()).add(site.expert)
            if site.layer >= 0:
                inner = site.inner if site.expert < 0 else f"{site.expert} {site.inner}"
                blocks.setdefault(site.block, {}).setdefault(site.layer, {})[inner] = (spec.shape, spec.dtype)
        for block, layers in blocks.items():
            _check_numbers(block, layers)
            mixed = any("mixer." in inner for inner in layers[0])
            if not _NUMBERED.fullmatch(block) and not mixed and all(layer == layers[0] for layer in layers.values()):
                made.layers[block] = len(layers)
        for front, numbers in experts.items():
            _check_numbers(front, numbers)
            made.experts[front] = len(numbers)
        return made

    @property
    def is_numbered(self) -> bool:
        """True if layers of a block differ, so that keys contain their numbers."""
        return any(_ParameterSite.of(name).layer >= 0 and not self._depth(name) for name in self.shapes)

    def _depth(self, name: str) -> int:
        return self.layers.get(_ParameterSite.of(name).block, 0)

    def keys(self, name: str) -> tuple[str, ...]:
        """Return the key that contains a parameter, and other keys under which Megatron may look for it."""
        site = _ParameterSite.of(name)
        front = "" if site.layer < 0 else f"{site.block}." if self._depth(name) else f"{site.block}.{site.layer}."
        return tuple(front + inner for inner in self._inner_names(site, name.removesuffix(site.tail)))

    def _inner_names(self, site: _ParameterSite, front: str) -> tuple[str, ...]:
        """Return its name within the layer: a norm may be part of a projection, or separate."""
        for norm, projection, sure in _NORMS:
            match = re.fullmatch(rf"(?P<before>(?:.*\.)?){re.escape(norm)}\.(?P<kind>weight|bias)", site.tail)
            if match is None:
                continue
            within = f"{match['before']}{projection}.layer_norm_{match['kind']}"
            weight = f"{front}{match['before']}{projection}.weight"
            held = weight in self.shapes or f"{weight}.query" in self.shapes
            latent = f"{front}{match['before']}self_attention.linear_kv_down_proj.weight" in self.shapes
            if held and sure and not latent:
                return (within,)
            if held or norm == "pre_mlp_layernorm":  # before experts, each kind of layer has another name for it
                return (site.tail, within)
        return (site.inner,)

    def put(self, tensors: Tensors, front: str = "") -> tuple[Tensors, dict[str, str]]:
        """Return the tensors by key, each key with the prefix `front`, and the other keys of each
        tensor.

        Raises FormatError if a layer or expert of a stack lacks a tensor that the others have.
        """
        members: dict[str, dict[tuple[int, int], StoredTensor]] = {}
        sizes: dict[str, tuple[int, int]] = {}
        aliases: dict[str, str] = {}
        for name, tensor in tensors.items():
            site, depth = _ParameterSite.of(name), self._depth(name)
            key, *others = (front + key for key in self.keys(name))
            members.setdefault(key, {})[site.layer if depth else 0, max(site.expert, 0)] = tensor
            sizes[key] = depth, self.experts[_before_experts(site)] if site.expert >= 0 else 0
            aliases.update((other, key) for other in others)
        return {key: _stacked(key, of, *sizes[key]) for key, of in members.items()}, aliases


def _stacked(key: str, members: Mapping[tuple[int, int], StoredTensor], layers: int, experts: int) -> StoredTensor:
    """Return the members as one tensor. With 0 layers or experts, it is not stacked over these."""
    wanted = [(layer, expert) for layer in range(layers or 1) for expert in range(experts or 1)]
    lost = next((at for at in wanted if at not in members), None)
    if lost is not None:
        where = [f"{what} {n}" for what, n, size in zip(("layer", "expert"), lost, (layers, experts)) if size]
        raise FormatError(
            f"{key!r} is one tensor of all layers and experts in Megatron's format, but that of {' and '.join(where)} "
            f"is missing, while {len(members)} are there: leave all of them out, or leave the optimizer out with "
            "model_only=True"
        )
    rows = [[members[layer, expert] for expert in range(experts or 1)] for layer in range(layers or 1)]
    joined = [stack(row, key) if experts else row[0] for row in rows]
    return stack(joined, key) if layers else joined[0].renamed(key)


def _before_experts(site: _ParameterSite) -> str:
    return f"{site.block}.{site.layer}.{site.front}"


def _check_numbers(what: str, numbers: Iterable[int]) -> None:
    """Raise FormatError unless these are 0, 1, 2, ..."""
    found = sorted(numbers)
    if found != list(range(len(found))):
        lost = next(n for n in range(len(found) + 1) if n not in found)
        raise FormatError(f"{what!r}: number {lost} is missing among {found[:8]}: take all of the model, or none of it")


def extra_state_keys(stacks: Stacks, names: Iterable[str]) -> list[str]:
    """Return the keys under which modules request optional state of fp8 recipes. It does not exist here."""
    found: dict[str, None] = {}
    for name in names:
        module, _, kind = name.removesuffix(".query").rpartition(".")  # linear attention saves it in parts
        if kind != "weight" or _STATELESS.fullmatch(module.rpartition(".")[2]) or name == "output_layer.weight":
            continue
        site = _ParameterSite.of(name)
        places = [stacks.keys(name)[0].removesuffix(".query").rpartition(".")[0]]
        if "layer_norm_" in stacks.keys(name)[0]:
            places = []  # the projection contains the norm
        if site.tail.endswith("self_attention.linear_proj.weight"):
            places.append(places[0].replace("linear_proj", "core_attention"))
        of = [
            (site.layer, stacks.layers.get(site.block, 0)),
            (site.expert, stacks.experts.get(_before_experts(site), 0)),
        ]
        at = [(n, size) for n, size in of if size and n >= 0] or [(0, 1)]
        shard = f"shard_{'.'.join(str(n) for n, _ in at)}_{'.'.join(str(size) for _, size in at)}"
        found.update((f"{place}._extra_state/{shard}", None) for place in places)
    return list(found)


WRITING = Writing(MegatronWriter, form=megatron_form, is_split=True)
