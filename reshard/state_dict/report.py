"""What a set function did: returned, never printed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Cast", "OptimizerReport", "SetReport"]


@dataclass(frozen=True)
class Cast:
    """A tensor whose dtype changed on its way into the model."""

    name: str
    saved: str
    live: str

    def __str__(self) -> str:
        return f"{self.name}: {self.saved} -> {self.live}"


@dataclass(frozen=True)
class OptimizerReport:
    """What `set_optimizer_state_dict` found."""

    missing: tuple[str, ...] = ()
    """Parameters of the optimizers that the dict says nothing about; they keep no state."""
    cold: tuple[str, ...] = ()
    """Parameters that the dict lists in a group but has no state for: saved before their first gradient."""
    unexpected: tuple[str, ...] = ()
    """Names in the dict that are no parameter of these optimizers."""
    kept_fields: tuple[str, ...] = ()
    """Group fields that the dict lacks, so that the live value stayed: "<optimizer>.<group>.<field>"."""
    added_fields: tuple[str, ...] = ()
    """Group fields that the live group did not have."""


@dataclass(frozen=True)
class SetReport:
    """What `set_model_state_dict` or `set_state_dict` found and did.

    Reads as the pair (missing_keys, unexpected_keys) that torch's own functions return.
    """

    missing: tuple[str, ...] = ()
    """Names of the model that the dict does not have, under any of their aliases."""
    unexpected: tuple[str, ...] = ()
    """Names in the dict that the model does not have."""
    reshaped: tuple[str, ...] = ()
    """One-element tensors whose saved shape was () and the live one (1,), or the other way round."""
    cast: tuple[Cast, ...] = ()
    """Tensors whose dtype changed."""
    untouched: tuple[str, ...] = ()
    """Parameters and buffers, those outside state dicts too, that nothing was written to: they are what the
    model's constructor or `to_empty` left there."""
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

    def __iter__(self) -> Iterator[list[str]]:
        yield self.missing_keys
        yield self.unexpected_keys
