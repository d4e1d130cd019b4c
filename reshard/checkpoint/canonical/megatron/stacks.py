"""Parameters of the unsharded model under the keys that Megatron-core asks for: the inverse of `names.expand`.

decoder.layers.<l>.mlp.linear_fc2.weight                 decoder.layers.mlp.linear_fc2.weight [L, ...]
...<l>.mlp.experts.local_experts.<e>.linear_fc2.weight   ...layers.mlp.experts.experts.linear_fc2.weight [L, E, ...]
...input_layernorm.weight                                ...self_attention.linear_qkv.layer_norm_weight

Layers that differ are no stack: then their numbers stay in the keys, as Megatron itself has it for such models. Which
norms are kept within the projection that follows depends on what the layers are made of. Where that is not known here,
the same bytes have both names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from planners.geometry.layout import TensorSpec
from reshard.checkpoint.canonical.views import stack
from reshard.errors import FormatError
from reshard.formats.stored.tensor import StoredTensor

__all__ = ["Stacks", "extra_state_keys"]

_LAYER = re.compile(r"(?P<block>(?:.*?\.)?layers)\.(?P<layer>\d+)\.(?P<tail>.+)")
_EXPERT = re.compile(r"(?P<front>.*\bexperts)\.local_experts\.(?P<expert>\d+)\.(?P<tail>.+)")
_NUMBERED = re.compile(r"(?:.*\.)?mtp\.layers")
"""Layers that are never stacked, as those that predict tokens further on."""
_NORMS = (
    ("input_layernorm", "self_attention.linear_qkv", True),
    ("pre_mlp_layernorm", "mlp.linear_fc1", True),
    ("self_attention.q_layernorm", "self_attention.linear_q_up_proj", False),
    ("self_attention.kv_layernorm", "self_attention.linear_kv_up_proj", False),
)
"""A norm, the projection that follows, and whether it is saved within that wherever there is one."""
_STATELESS = re.compile(r".*(embeddings?|router|conv1d|mixer)")
"""Modules that keep no state beside their parameters."""


@dataclass(frozen=True)
class _Site:
    """Where a parameter stands: in which block, layer and expert, and what it is called there."""

    block: str
    layer: int
    front: str
    expert: int
    tail: str

    @classmethod
    def of(cls, name: str) -> _Site:
        match = _LAYER.fullmatch(name)
        block, layer, rest = (match["block"], int(match["layer"]), match["tail"]) if match else ("", -1, name)
        match = _EXPERT.fullmatch(rest)
        return cls(block, layer, match["front"], int(match["expert"]), match["tail"]) if match else cls(
            block, layer, "", -1, rest
        )  # fmt: skip

    @property
    def inner(self) -> str:
        """The name within the layer, of an expert without its number."""
        return f"{self.front}.experts.{self.tail}" if self.front else self.tail


@dataclass
class Stacks:
    """Which keys a model's parameters have, and what is stacked in them. States have the same keys."""

    layers: dict[str, int] = field(default_factory=dict)
    """Layers of each block that is a stack."""
    experts: dict[str, int] = field(default_factory=dict)
    """How many experts there are, by what stands before them."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Mapping[str, TensorSpec]) -> Stacks:
        """Raises FormatError for layers or experts that are not all there."""
        made = cls(shapes={name: spec.shape for name, spec in model.items()})
        blocks: dict[str, dict[int, dict[str, tuple[tuple[int, ...], str]]]] = {}
        experts: dict[str, set[int]] = {}
        for name, spec in model.items():
            site = _Site.of(name)
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
        """Whether layers of a block differ, so that their numbers are in the keys."""
        return any(_Site.of(name).layer >= 0 and not self._depth(name) for name in self.shapes)

    def _depth(self, name: str) -> int:
        return self.layers.get(_Site.of(name).block, 0)

    def keys(self, name: str) -> tuple[str, ...]:
        """The key that holds a parameter, and further ones by which it may be asked for."""
        site = _Site.of(name)
        front = "" if site.layer < 0 else f"{site.block}." if self._depth(name) else f"{site.block}.{site.layer}."
        return tuple(front + inner for inner in self._inner_names(site, name.removesuffix(site.tail)))

    def _inner_names(self, site: _Site, front: str) -> tuple[str, ...]:
        """What it is called within the layer: a norm may be part of a projection, or stand by itself."""
        for norm, projection, sure in _NORMS:
            match = re.fullmatch(rf"(?P<before>(?:.*\.)?){re.escape(norm)}\.(?P<kind>weight|bias)", site.tail)
            if match is None:
                continue
            within = f"{match['before']}{projection}.layer_norm_{match['kind']}"
            held = f"{front}{match['before']}{projection}.weight" in self.shapes
            if held and sure:
                return (within,)
            if held or norm == "pre_mlp_layernorm":  # before experts each kind of layer has it otherwise
                return (site.tail, within)
        return (site.inner,)

    def put(
        self, tensors: Mapping[str, StoredTensor], front: str = ""
    ) -> tuple[dict[str, StoredTensor], dict[str, str]]:
        """The tensors by key, each behind `front`, and the further keys of each.

        Raises FormatError if a layer or an expert of a stack lacks what the others have.
        """
        members: dict[str, dict[tuple[int, int], StoredTensor]] = {}
        sizes: dict[str, tuple[int, int]] = {}
        aliases: dict[str, str] = {}
        for name, tensor in tensors.items():
            site, depth = _Site.of(name), self._depth(name)
            key, *others = (front + key for key in self.keys(name))
            members.setdefault(key, {})[site.layer if depth else 0, max(site.expert, 0)] = tensor
            sizes[key] = depth, self.experts[_before_experts(site)] if site.expert >= 0 else 0
            aliases.update((other, key) for other in others)
        return {key: _stacked(key, of, *sizes[key]) for key, of in members.items()}, aliases


def _stacked(key: str, members: Mapping[tuple[int, int], StoredTensor], layers: int, experts: int) -> StoredTensor:
    """The members as one tensor; 0 layers or experts: it is no stack of those."""
    wanted = [(layer, expert) for layer in range(layers or 1) for expert in range(experts or 1)]
    lost = next((at for at in wanted if at not in members), None)
    if lost is not None:
        where = [f"{what} {n}" for what, n, size in zip(("layer", "expert"), lost, (layers, experts)) if size]
        raise FormatError(
            f"{key!r} is one tensor of all layers and experts in Megatron's format, but that of {' and '.join(where)} "
            f"is missing, while {len(members)} are there: leave all of them out, or the optimizer by model_only"
        )
    rows = [[members[layer, expert] for expert in range(experts or 1)] for layer in range(layers or 1)]
    joined = [stack(row, key) if experts else row[0] for row in rows]
    return stack(joined, key) if layers else joined[0].renamed(key)


def _before_experts(site: _Site) -> str:
    return f"{site.block}.{site.layer}.{site.front}"


def _check_numbers(what: str, numbers: Iterable[int]) -> None:
    """Raises FormatError unless these are 0, 1, 2 ..."""
    found = sorted(numbers)
    if found != list(range(len(found))):
        lost = next(n for n in range(len(found) + 1) if n not in found)
        raise FormatError(f"{what!r}: number {lost} is missing among {found[:8]}: take all of the model, or none of it")


def extra_state_keys(stacks: Stacks, names: Iterable[str]) -> list[str]:
    """Keys under which modules ask for state of fp8 recipes, which they may have or not: there is none here."""
    found: dict[str, None] = {}
    for name in names:
        module, _, kind = name.rpartition(".")
        if kind != "weight" or _STATELESS.fullmatch(module.rpartition(".")[2]) or name == "output_layer.weight":
            continue
        site = _Site.of(name)
        places = [stacks.keys(name)[0].rpartition(".")[0]]
        if "layer_norm_" in stacks.keys(name)[0]:
            places = []  # the projection has it
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
