"""What the six functions are told and what they tell: options of getting and setting, and the report of a set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from planners.notebooks import Tabled
from reshard.errors import NormalizationError, format_names

__all__ = ["Cast", "InChunks", "OptimizerReport", "SetReport", "StateDictOptions", "as_options"]


@dataclass(frozen=True)
class StateDictOptions:
    """How the six get and set functions work; the fields mean what they mean in
    `torch.distributed.checkpoint`.

    Raises NormalizationError for `broadcast_from_rank0` without `full_state_dict`.
    """

    full_state_dict: bool = False
    """Getting: gather every tensor, so that the dict holds plain tensors only. Setting: the dict
    holds whole tensors and each rank takes its own part. Both are collective where the model is
    sharded."""
    cpu_offload: bool = False
    """Getting: tensors on the CPU. With `full_state_dict`, each name is returned by one rank only:
    rank 0, or the lowest rank that holds it where ranks hold different names (pipeline stages); the
    others get an empty dict."""
    ignore_frozen_params: bool = False
    """Getting: leave out parameters that require no gradient. Setting: do not miss them."""
    keep_submodule_prefixes: bool = True
    """With `submodules`: whether names stay relative to the whole model or become relative to the
    submodule."""
    strict: bool = True
    """Setting: whether missing and unexpected names are an error or only reported."""
    broadcast_from_rank0: bool = False
    """Setting: only rank 0 has the dict, and sends to each rank the elements that this rank
    holds."""
    flatten_optimizer_state_dict: bool = False
    """Getting: one flat dict, `state.<fqn>.<name>` and `param_groups.<fqn>.<field>`, in which
    pipeline stages do not collide; of a parameter that has no state while others have,
    `state.<fqn>` is an empty dict. Setting accepts both forms whatever this says."""
    dsd_fqn_modifiers: str = "_fqn_modifiers"
    """Name of the method by which a module of the user declares children that leave no trace in
    names: it returns {name shown: name of the hidden child}."""

    in_chunks: ClassVar[bool] = False
    """Getting: see `InChunks`. No field, since torch's own helpers take the fields for theirs."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, wanted = getattr(self, field.name), str if field.name == "dsd_fqn_modifiers" else bool
            if not isinstance(value, wanted):
                raise NormalizationError(f"option {field.name} must be a {wanted.__name__}, got {value!r}")
        if self.broadcast_from_rank0 and not self.full_state_dict:
            raise NormalizationError("broadcast_from_rank0=True needs full_state_dict=True: rank 0 sends full tensors")


class InChunks(StateDictOptions):
    """The same, for what is read by torch's own functions: what FSDP1's flat parameters cut across
    rows is sent to the ranks where torch's state dicts have it, in the chunks that `torch.chunk`
    gives. Getting is collective then where there are such tensors, and they share no memory with
    the model. `reshard.dcp` always gets so."""

    in_chunks = True


def as_options(given: Any) -> StateDictOptions:
    """Our options from None, from ours, or from torch's own object of the same fields."""
    if given is None:
        return StateDictOptions()
    if isinstance(given, StateDictOptions):
        return given
    names = [field.name for field in fields(StateDictOptions) if hasattr(given, field.name)]
    if not names:
        raise NormalizationError(f"options must be a StateDictOptions, got {type(given).__name__}")
    return StateDictOptions(**{name: getattr(given, name) for name in names})


@dataclass(frozen=True)
class Cast:
    """A tensor whose dtype changed on its way into the model."""

    name: str
    saved: str
    live: str

    def __str__(self) -> str:
        return f"{self.name}: {self.saved} -> {self.live}"


@dataclass(frozen=True, repr=False)
class OptimizerReport:
    """What `set_optimizer_state_dict` found."""

    missing: tuple[str, ...] = ()
    """Parameters of the optimizers that the dict says nothing about, or of which a flat dict lacks
    the state without saying that there was none; they keep no state."""
    cold: tuple[str, ...] = ()
    """Parameters that the dict lists in a group but has no state for: saved before their first
    gradient."""
    unexpected: tuple[str, ...] = ()
    """Names in the dict that are no parameter of these optimizers."""
    foreign: tuple[str, ...] = ()
    """State of a kind that the optimizer does not have, "<parameter>.<key>", such as Adam's in SGD;
    it was left out."""
    outside: tuple[str, ...] = ()
    """Parameters of the optimizers that the model does not have,
    "outside_model.<optimizer>.<group>.<position>"."""
    filled: tuple[str, ...] = ()
    """Parameters without saved state whose state is zeros now, since they share an FSDP1 flat
    parameter with others
    that have some: `use_orig_params=True` keeps them apart."""
    untied: tuple[str, ...] = ()
    """State, "<parameter>.<key>", that shared memory with other state or with the model and does
    not now: as it was given, or as the optimizer had it, while values were given that differ. Each
    has its value in memory of its own."""
    kept_fields: tuple[str, ...] = ()
    """Group fields that the dict lacks, so that the live value stayed:
    "<optimizer>.<group>.<field>"."""
    added_fields: tuple[str, ...] = ()
    """Group fields that the live group did not have."""

    def __repr__(self) -> str:
        return f"OptimizerReport({_first_of_each(self)})"


def _first_of_each(report: Any) -> str:
    """The fields that say something, each with its first names."""
    said = {f.name: getattr(report, f.name) for f in fields(report)}
    names = [
        f"{what} {format_names([str(v) for v in of])}" for what, of in said.items() if isinstance(of, tuple) and of
    ]
    return ", ".join([*names, *(repr(of) for of in said.values() if isinstance(of, OptimizerReport))]) or "all was set"


@dataclass(frozen=True, repr=False)
class SetReport(Tabled):
    """What `set_model_state_dict` or `set_state_dict` found and did.

    Reads as the pair (missing_keys, unexpected_keys) that torch's own functions return.
    """

    missing: tuple[str, ...] = ()
    """Names of the model that the dict does not have, under any of their aliases."""
    unexpected: tuple[str, ...] = ()
    """Names in the dict that the model does not have."""
    aliases: tuple[str, ...] = ()
    """Those of `unexpected` whose tensor the dict also has under a name that was set: they were
    tied where the dict comes from, so that nothing is lost but the tie."""
    reshaped: tuple[str, ...] = ()
    """One-element tensors whose saved shape was () and the live one (1,), or the other way
    round."""
    cast: tuple[Cast, ...] = ()
    """Tensors whose dtype changed."""
    untouched: tuple[str, ...] = ()
    """Parameters and buffers, those outside state dicts too, that nothing was written to: they are
    what the model's constructor or `to_empty` left there."""
    uninitialised: tuple[str, ...] = ()
    """Those of `untouched` that are still on the meta device, without any value."""
    optimizer: OptimizerReport | None = None
    """Of `set_state_dict` only."""

    @property
    def missing_keys(self) -> list[str]:
        """`missing`, by torch's name."""
        return list(self.missing)

    @property
    def unexpected_keys(self) -> list[str]:
        """`unexpected`, by torch's name."""
        return list(self.unexpected)

    def __repr__(self) -> str:
        return f"SetReport({_first_of_each(self)})"

    def __iter__(self) -> Iterator[list[str]]:
        yield self.missing_keys
        yield self.unexpected_keys
