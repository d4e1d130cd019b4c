"""Options of the get and set functions, and the reports of the set functions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from planners.notebooks import Tabled
from planners.units import format_count
from reshard.arguments import named_arguments, renamed
from reshard.errors import NormalizationError, format_names, option_error


@named_arguments()
@dataclass(frozen=True)
class StateDictOptions:
    """Options of the six get and set functions. They have the same meaning in
    `torch.distributed.checkpoint`.

    Args:
        full_state_dict: get: gather every tensor, so that the dict has only full tensors. Set: the
            dict has full tensors, and each rank takes its own shard. Both are collective if the model
            is sharded.
        cpu_offload: get: return tensors on the CPU. With `full_state_dict`, only one rank returns
            each tensor: rank 0 or, if pipeline stages have different FQNs, the lowest rank that holds
            it. The other ranks get an empty dict.
        ignore_frozen_params: get: omit frozen parameters. Set: do not report them as missing.
        keep_submodule_prefixes: with `submodules`: True keeps FQNs relative to the model. False
            makes them relative to the submodule.
        strict: set: True makes missing and unexpected FQNs an error. False only reports them.
        broadcast_from_rank0: set: only rank 0 has the dict. It sends each rank the elements of its
            shards.
        flatten_optimizer_state_dict: get: return one flat dict, `state.<fqn>.<name>` and
            `param_groups.<fqn>.<field>`, so that pipeline stages do not collide. If only some
            parameters have state, `state.<fqn>` of the others is an empty dict. Set always accepts
            both forms.
        dsd_fqn_modifiers: name of the method by which a module declares children that do not appear
            in FQNs. It returns {visible name: name of the hidden child}.

    Raises OptionError for `broadcast_from_rank0` without `full_state_dict`, and for values of
    another type.
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    ignore_frozen_params: bool = False
    keep_submodule_prefixes: bool = True
    strict: bool = True
    broadcast_from_rank0: bool = False
    flatten_optimizer_state_dict: bool = False
    dsd_fqn_modifiers: str = "_fqn_modifiers"

    # see `InChunks`; no field, since torch's own helpers take the fields for theirs
    in_chunks: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for field in fields(StateDictOptions):
            value, wanted = getattr(self, field.name), str if field.name == "dsd_fqn_modifiers" else bool
            if not isinstance(value, wanted):
                words = f"option {field.name} must be a {wanted.__name__}, got {value!r:.80}"
                raise option_error(words, NormalizationError)
        if self.broadcast_from_rank0 and not self.full_state_dict:
            words = "broadcast_from_rank0=True needs full_state_dict=True: rank 0 sends full tensors"
            raise option_error(words, NormalizationError)

    def _refuses(self, name: str, *, is_missing: bool) -> bool:
        """Return True if it is an error that only the model (`is_missing`) or only the dict has
        this parameter."""
        return self.strict

    def _lenient(self, *, is_missing: bool) -> str:
        """Return the argument that allows such parameters."""
        return "StateDictOptions(strict=False)"

    def _shared(self) -> dict[str, Any]:
        """Return the options that must be equal on all ranks."""
        return {field.name: getattr(self, field.name) for field in fields(StateDictOptions)}


class InChunks(StateDictOptions):
    """Options for state dicts that torch's own functions read: tensors that FSDP1's flat parameters
    shard across rows are sent to the ranks where torch's state dicts have them, in the chunks of
    `torch.chunk`. Getting is collective then if there are such tensors, and they share no memory
    with the model. `reshard.dcp` always gets so."""

    in_chunks = True


def as_options(given: Any) -> StateDictOptions:
    """Return our options from None, from ours, or from torch's own object with the same fields."""
    if given is None:
        return StateDictOptions()
    if isinstance(given, StateDictOptions):
        return given
    names = [field.name for field in fields(StateDictOptions) if hasattr(given, field.name)]
    if not names:
        words = f"options must be a StateDictOptions, as in StateDictOptions(strict=False), got {type(given).__name__}"
        raise option_error(words, NormalizationError)
    return StateDictOptions(**{name: getattr(given, name) for name in names})


@dataclass(frozen=True)
class Cast:
    """A tensor whose dtype changed when it was copied into the model."""

    name: str
    saved: str
    live: str
    overflowed: int = 0
    """Finite elements of this rank's part of the dict beyond the range of the model's dtype."""

    def __str__(self) -> str:
        lost = f", {format_count(self.overflowed, 'element')} out of range" if self.overflowed else ""
        return f"{self.name}: {self.saved} -> {self.live}{lost}"


@renamed(cold="without_state", foreign="unused")
@dataclass(frozen=True, repr=False)
class OptimizerReport:
    """What `set_optimizer_state_dict` found."""

    missing: tuple[str, ...] = ()
    """Parameters of the optimizers that the dict lacks. A flat dict lacks a parameter if it has
    neither its state nor an empty state for it. These parameters have no state afterwards."""
    without_state: tuple[str, ...] = ()
    """Parameters that are in a group of the dict but have no state there. They were saved before
    their first gradient."""
    unexpected: tuple[str, ...] = ()
    """FQNs in the dict that are not parameters of these optimizers."""
    unused: tuple[str, ...] = ()
    """State that the optimizer does not use and that was omitted, as "<parameter>.<key>". For
    example, SGD does not use Adam's state."""
    outside: tuple[str, ...] = ()
    """Parameters of the optimizers that the model does not have, as
    "outside_model.<optimizer>.<group>.<position>"."""
    filled: tuple[str, ...] = ()
    """Parameters without saved state whose state is now zeros, because they share an FSDP1 flat
    parameter with others that have state. With `use_orig_params=True`, they do not share one."""
    untied: tuple[str, ...] = ()
    """State that no longer shares memory with other state or with the model, as
    "<parameter>.<key>". It shared memory in the dict, or it did in the optimizer and the dict has
    different values for it."""
    kept_fields: tuple[str, ...] = ()
    """Group fields that the dict lacks, as "<optimizer>.<group>.<field>". They keep their values."""
    added_fields: tuple[str, ...] = ()
    """Group fields that the optimizer's group did not have."""

    def __repr__(self) -> str:
        return f"OptimizerReport({_first_of_each(self)})"


def _first_of_each(report: Any) -> str:
    """Return the fields that are not empty, each with its first names."""
    said = {f.name: getattr(report, f.name) for f in fields(report)}
    names = [
        f"{what} {format_names([str(v) for v in of])}" for what, of in said.items() if isinstance(of, tuple) and of
    ]
    return ", ".join([*(names or ["all set"]), *(repr(of) for of in said.values() if isinstance(of, OptimizerReport))])


@renamed(uninitialised="uninitialized")
@dataclass(frozen=True, repr=False)
class SetReport(Tabled):
    """What `set_model_state_dict` or `set_state_dict` found and did.

    Unpacks to the pair (missing_keys, unexpected_keys) that torch's own functions return.
    """

    missing: tuple[str, ...] = ()
    """FQNs of the model that the dict does not have, not even under an alias."""
    unexpected: tuple[str, ...] = ()
    """FQNs in the dict that the model does not have."""
    aliases: tuple[str, ...] = ()
    """FQNs in `unexpected` whose tensors were tied, in the dict, to one that was set. Only the tie is
    lost."""
    reshaped: tuple[str, ...] = ()
    """One-element tensors with saved shape () and shape (1,) in the model, or the reverse."""
    cast: tuple[Cast, ...] = ()
    """Tensors whose dtype changed."""
    untouched: tuple[str, ...] = ()
    """Parameters and buffers that were not written, including those outside state dicts. They still
    have the values from the model's constructor or `to_empty`."""
    uninitialized: tuple[str, ...] = ()
    """FQNs in `untouched` that are still on the meta device, without values."""
    optimizer: OptimizerReport | None = None
    """The optimizer's report. Only `set_state_dict` has one."""
    model_unchanged: bool = False
    """True if the dict of the model was empty, so that `set_state_dict` set only optimizers."""

    @property
    def missing_keys(self) -> list[str]:
        """The same as `missing`, with torch's name."""
        return list(self.missing)

    @property
    def unexpected_keys(self) -> list[str]:
        """The same as `unexpected`, with torch's name."""
        return list(self.unexpected)

    def __repr__(self) -> str:
        if self.model_unchanged:
            return f"SetReport(model unchanged: empty dict, {self.optimizer!r})"
        if self.missing or self.uninitialized:
            return f"SetReport({_first_of_each(self)})"
        said, kept = _first_of_each(replace(self, untouched=())), format_names(self.untouched)
        return f"SetReport({said}{f'; outside state dicts, unchanged: {kept}' if self.untouched else ''})"

    def __iter__(self) -> Iterator[list[str]]:
        yield self.missing_keys
        yield self.unexpected_keys
