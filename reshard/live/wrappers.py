"""Reads what modules, wrappers, and optimizers keep private, and removes wrappers from names.
Private names of torch."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh

from reshard.live.fsdp1 import FlatPiece, flat_pieces

# Everything that needs a private name of theirs is a small function here, so that the rest of the
# package reads only public ones.


EXTRA_STATE = "_extra_state"
"""The key under which a module's `get_extra_state()` is stored."""

_WRAPPERS = {
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): "module",
    ("torch.nn.parallel.data_parallel", "DataParallel"): "module",
    ("torch._dynamo.eval_frame", "OptimizedModule"): "_orig_mod",
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper"): "_checkpoint_wrapped_module",
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"): "_fsdp_wrapped_module",
    ("deepspeed.runtime.engine", "DeepSpeedEngine"): "module",
    ("lightning.fabric.wrappers", "_FabricModule"): "_forward_module",
}
"""(module, class name) of each wrapper, and the child that it wraps. Classes are given by name,
because importing them takes seconds, and instances exist only if their class was imported."""

WRAPPER_SEGMENTS = frozenset(_WRAPPERS.values())
"""The segments that wrappers add to names."""

_METHODS = ("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict")
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_KNOWN_HOOKS = ("torch.distributed.fsdp.", "torch.distributed.algorithms._checkpoint.")
_KNOWN_MODULES = ("torch.nn.", "torch.distributed.", "torch._dynamo.", "deepspeed.runtime.")


@dataclass(frozen=True, slots=True)
class ClassFacts:
    """Facts about every module of one class."""

    wrapped: str | None
    """The child that a wrapper class wraps."""
    overrides: bool
    """Whether the user's code reads or writes its state dict."""
    has_extra_state: bool
    modifiers: bool
    """Whether it has the method that declares hidden children."""
    flattens: bool
    """Whether it flattens the parameters below it into one, as FSDP1 does."""


class ModuleReader:
    """Reads module trees, looking at each class once.

    Args:
        modifiers: the name of the method by which a module says which of its children leave no
            trace in names; it returns {name shown: name of the hidden child}.
    """

    def __init__(self, modifiers: str) -> None:
        self.modifiers = modifiers
        self._facts: dict[type, ClassFacts] = {}

    def facts(self, module: nn.Module) -> ClassFacts:
        """Return the facts about the module's class."""
        cls = type(module)
        found = self._facts.get(cls)
        if found is None:
            found = self._facts[cls] = self._look(cls)
        return found

    def hidden(self, module: nn.Module) -> frozenset[str]:
        """Return the names of the children whose segment is omitted from canonical names."""
        facts = self.facts(module)
        names = {facts.wrapped} if facts.wrapped is not None else set()
        if facts.modifiers:
            names.update(getattr(module, self.modifiers)().values())
        return frozenset(names)

    def is_opaque(self, module: nn.Module, facts: ClassFacts) -> bool:
        """Return True if only the module's own `state_dict` and `load_state_dict` know its state,
        because it overrides them, or has hooks of the user's. Hooks of FSDP and of activation
        checkpointing do not count, because their effect is known."""
        own = module.__dict__
        if facts.overrides or "state_dict" in own or "load_state_dict" in own:
            return True
        return not all(_is_known(hook) for kind in _HOOKS for hook in own.get(kind, {}).values())

    def touched(self, module: nn.Module) -> bool:
        """Return True if hooks or overrides decide how this module is saved and loaded. Few modules
        have any."""
        return any(map(module.__dict__.get, (*_HOOKS, "state_dict", "load_state_dict")))

    def settle(self, module: nn.Module) -> Mapping[int, list[tuple[str, FlatPiece]]]:
        """Bring FSDP2 parameters to their sharded form, as FSDP2's own hook does before a state
        dict is taken. FSDP1's hook does more: see `flat_pieces` for what its units contain."""
        if self.facts(module).flattens:
            return flat_pieces(module)
        for hook in module.__dict__.get("_state_dict_pre_hooks", {}).values():
            if _is_known(hook):
                hook(module, "", False)
        return {}

    def overwritten(self, module: nn.Module) -> Mapping[int, int]:
        """Return, by id, the buffers that this module will overwrite before its next forward pass
        with those of another rank, and that rank. DistributedDataParallel copies the buffers of the
        first rank of its group to all ranks."""
        inner = self.children(module).get("module")  # a compiled module has the attributes of what it wraps
        if inner is None or not getattr(module, "broadcast_buffers", False) or hasattr(module, "buffer_hook"):
            return {}
        first = dist.get_global_rank(module.process_group, 0)  # type: ignore[arg-type]
        if first == dist.get_rank():
            return {}
        ignored: Collection[str] = module.parameters_to_ignore  # type: ignore[assignment]
        return {id(buffer): first for name, buffer in inner.named_buffers() if name not in ignored}

    def children(self, module: nn.Module) -> Mapping[str, nn.Module | None]:
        """Return every child under each of its names."""
        return module._modules

    def child(self, module: nn.Module, name: str) -> nn.Module | None:
        """Return the child with this name."""
        return module._modules.get(name)

    def owns(self, module: nn.Module, name: str) -> bool:
        """Return True if `name` is a child, parameter or buffer of the module itself."""
        return name in module._modules or name in module._parameters or name in module._buffers

    def parameters(self, module: nn.Module) -> Mapping[str, nn.Parameter | None]:
        """Return the module's own parameters."""
        return module._parameters

    def buffers(self, module: nn.Module) -> Mapping[str, torch.Tensor | None]:
        """Return the module's own buffers."""
        return module._buffers

    def transient(self, module: nn.Module) -> Iterable[str]:
        """Return the names of the buffers that state dicts omit."""
        names: Iterable[str] = module._non_persistent_buffers_set
        return names

    def _look(self, cls: type) -> ClassFacts:
        wrapped = next((w for c in cls.__mro__ if (w := _WRAPPERS.get((c.__module__, c.__qualname__)))), None)
        return ClassFacts(
            wrapped=wrapped,
            overrides=any(not _definer(cls, method).startswith(_KNOWN_MODULES) for method in _METHODS),
            has_extra_state=getattr(cls, "get_extra_state", None) is not nn.Module.get_extra_state,
            modifiers=hasattr(cls, self.modifiers),
            flattens=wrapped == "_fsdp_wrapped_module",
        )


def as_parameter(tensor: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return a parameter if `old` is one (trainable if `old` is), and otherwise the tensor itself."""
    return nn.Parameter(tensor, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else tensor


def assign_tensor(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Replace a parameter or buffer by `tensor`, if it is on the meta device and cannot be copied
    into. FSDP2 learns about its new parameter from its own hook."""
    if isinstance(tensor, nn.Parameter):
        module._parameters[name] = tensor
    else:
        module._buffers[name] = tensor
    for hook in module._load_state_dict_post_hooks.values():
        if _is_known(hook):
            hook(module, None)


def copy_all(targets: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy each value into the target at its place; plain tensors of equal shapes. Few calls, since
    a call for each of many small tensors costs more than the copying; but not all in one, which
    takes all of them apart before it copies the first, which has left the processor's cache at that
    time. The number that one kernel of a GPU takes."""
    for first in range(0, len(targets), _TOGETHER):
        torch._foreach_copy_(targets[first : first + _TOGETHER], values[first : first + _TOGETHER])


def of_version(state: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return `state` with the versions of modules that torch attaches to their `own` state dict: a
    module may mistake values without a version for old ones."""
    out = OrderedDict(state)
    out._metadata = getattr(own, "_metadata", None)  # type: ignore[attr-defined]
    return out


_TOGETHER = 64
"""Number of tensors that are copied by one call."""


def loads_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the optimizer's class or its user customizes how its state is loaded."""
    if not _definer(type(optimizer), "load_state_dict").startswith("torch.optim.") or "load_state_dict" in vars(
        optimizer
    ):
        return True
    hooks = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    return any(getattr(optimizer, kind, None) for kind in hooks)


def has_torchs_setstate(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the method that brings unpickled state to its present form is torch's own."""
    return _definer(type(optimizer), "__setstate__").startswith("torch.optim.")


def _definer(cls: type, method: str) -> str:
    """Return the Python module of the class that defines a method, followed by a dot."""
    return next(c.__module__ for c in cls.__mro__ if method in c.__dict__) + "."


def _is_known(hook: Any) -> bool:
    function: Callable[..., Any] | Any = getattr(hook, "hook", hook)
    function = getattr(function, "func", function)
    return (getattr(function, "__module__", None) or "").startswith(_KNOWN_HOOKS)


def forget_meshes() -> None:
    """Forget known meshes when a process continues as another rank: torch 2.6 returns old ones,
    even without their process groups."""
    known = getattr(device_mesh, "_mesh_resources", None)
    for name in ("child_to_root_mapping", "root_to_flatten_mapping", "flatten_name_to_root_dims"):
        getattr(known, name, {}).clear()


# Names of saved states without the segments that wrappers and adapters add, by spelling: there is
# no module to ask.
#
#     module._orig_mod.layers.0.weight                         layers.0.weight
#     base_model.model.layers.0.q_proj.base_layer.weight       layers.0.q_proj.weight
#     base_model.model.layers.0.q_proj.lora_A.default.weight   layers.0.q_proj.lora_A.weight
#     base_model.model.head.modules_to_save.default.weight     head.weight
#
# Segments that only wrappers use are dropped wherever they stand; `module.` and PEFT's
# `base_model.model.`, which a user's own child may be called too, only at the front, and only if
# all names begin so. The names that are left of PEFT's are also those in adapter_model.safetensors.
# An adapter's own name is removed only if there is one adapter: several need their names.


CERTAIN_SEGMENTS = (WRAPPER_SEGMENTS - {"module"}) | {"_fpw_module"}
"""Segments that only wrappers use."""

PEFT_PREFIX = "base_model.model."
"""Prefix of every name in a model with PEFT adapters."""

_KINDS = (
    r"(?:(?:de|gra|poly_|supertuning_)?lora|hada|hira|lily|lokr|b?oft)_\w+|ia3_l|hra_u|miss_block|beft_bias|c3a_kernel"
    r"|deft_[PR]|p?vera_lambda_[bd]|ln_tuning_layers|(?:fourier|wave)ft_spectrum|road_\w+|trainable_tokens_delta"
)
_ADAPTER = re.compile(rf"\.(?:{_KINDS})\.(?!(?:weight|bias)(?:\.|$))(\w+)(?:\.(?:weight|bias)(?=\.|$)|$)")
_SAVED_WHOLE = re.compile(r"\.modules_to_save\.(\w+)\.")


class WrapperNames:
    """What the names of one state have in common, and a name without it.

    Args:
        names: all names of the state.
        prefixes: leading parts that are known already, to be taken off first.
        beside: names that may lack a front that all others have, such as the counter of an
            averaging wrapper.
        certain: the segments to drop wherever they stand.
        others: further names, which may have the name of an adapter where `names` do not.

    Attributes:
        prefixes: the fronts that are taken off, in order.
    """

    def __init__(
        self,
        names: Iterable[str],
        *,
        prefixes: Iterable[str] = (),
        beside: Collection[str] = (),
        certain: Collection[str] = CERTAIN_SEGMENTS,
        others: Iterable[str] = (),
    ) -> None:
        self._certain = certain
        self.prefixes = [prefix for prefix in prefixes if prefix]
        bare = [self.without_wrappers(name) for name in names]
        while (front := _common_front(bare, beside)) is not None:
            self.prefixes.append(front)
            bare = [name.removeprefix(front) for name in bare]
        adapted = PEFT_PREFIX in self.prefixes
        if adapted:
            self._certain = {*certain, "base_layer"}
        self.without_adapter = _adapter_dropper(map(self.without_wrappers, [*bare, *others]) if adapted else ())

    def without_wrappers(self, name: str) -> str:
        """Return the name without segments of wrappers and common prefixes. An adapter's name stays."""
        if any(segment in name for segment in self._certain):
            name = ".".join(part for part in name.split(".") if part not in self._certain)
        for prefix in self.prefixes:
            name = name.removeprefix(prefix)
        return name

    def __call__(self, name: str) -> str:
        """Return the name without anything that wrappers and adapters add."""
        return self.without_adapter(self.without_wrappers(name))


def _common_front(names: list[str], beside: Collection[str]) -> str | None:
    for front in ("module.", PEFT_PREFIX):
        rest = [name for name in names if not name.startswith(front)]
        if len(rest) < len(names) and all(name in beside for name in rest):
            return front
    return None


def _adapter_dropper(names: Iterable[str]) -> Callable[[str], str]:
    """Return a function that removes the adapter's name from a name. `names` are all names of a
    model, without `PEFT_PREFIX`.

    It changes nothing if there are several adapters, or none.
    """
    found = {match[1] for name in names for pattern in (_ADAPTER, _SAVED_WHOLE) if (match := pattern.search(name))}
    if len(found) != 1:
        return lambda name: name
    adapter = re.escape(found.pop())
    magnitude = re.compile(rf"(\.lora_magnitude_vector)\.{adapter}\.weight(?=\.|$)")
    inside = re.compile(rf"(\.(?:{_KINDS}))\.{adapter}(?=\.|$)")
    whole = re.compile(rf"\.modules_to_save\.{adapter}(?=\.)")
    return lambda name: whole.sub("", inside.sub(r"\1", magnitude.sub(r"\1", name)))
