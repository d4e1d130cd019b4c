"""What DeepSpeed's files hold by the names in them, and how the parts of tensor parallel ranks become one whole.

The files of model parallel ranks do not say how parameters were cut: that follows from names that are known, or from
the hint "tp_dims". States have the shapes of their parameters, so they are cut alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from reshard.checkpoint.canonical.hints import Hints
from reshard.checkpoint.canonical.megatron.tensor_parallel import is_gated, join_shards, tp_dim
from reshard.checkpoint.canonical.optim import SavedOptimizer
from reshard.checkpoint.canonical.result import Value
from reshard.errors import DamagedCheckpointError
from reshard.formats.stored.tensor import StoredTensor

__all__ = ["Parts", "joined"]


@dataclass
class Parts:
    """What was found in all files, or in those of one tensor parallel rank, by the names in them."""

    model: dict[str, StoredTensor] = field(default_factory=dict)
    state: dict[str, dict[str, Value]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    by_id: SavedOptimizer | None = None
    """ZeRO stage 0: the optimizer as torch saves it."""
    tied: dict[str, str] = field(default_factory=dict)
    """Second names of parameters, and the first ones."""
    notes: list[str] = field(default_factory=list)
    """What was left out, and why."""


def joined(ranks: Sequence[Parts], hints: Hints) -> Parts:
    """The parts of tensor parallel ranks as one. What all of them have whole is taken from the first.

    Raises:
        NormalizationError: how a parameter was cut is not known; the message asks for the hint "tp_dims".
        DamagedCheckpointError: the ranks have different parameters, or shapes that do not fit.
    """
    first = ranks[0]
    shapes = {fqn: tensor.spec.shape for fqn, tensor in first.model.items()}
    out = Parts(groups=first.groups, tied=first.tied, notes=list(first.notes))
    for rank, other in enumerate(ranks):
        odd = sorted({*other.model} ^ {*first.model})
        if odd:
            raise DamagedCheckpointError(
                f"{odd[0]!r} is in the files of one tensor parallel rank, and not in those of another: rank 0 has "
                f"{len(first.model)} parameters, rank {rank} has {len(other.model)}"
            )
    for fqn in first.model:
        dim = tp_dim(fqn, hints, len(ranks))
        gated = dim is not None and is_gated(fqn, shapes)
        out.model[fqn] = join_shards(fqn, [part.model[fqn] for part in ranks], dim, gated)
        for name, value in first.state.get(fqn, {}).items():
            pieces = [part.state.get(fqn, {}).get(name) for part in ranks]
            states = out.state.setdefault(fqn, {})
            if isinstance(value, StoredTensor) and value.spec.shape == shapes[fqn] != ():
                states[name] = join_shards(f"{fqn}.{name}", _all_stored(fqn, name, pieces), dim, gated)
            else:
                states[name] = value
    if first.by_id is not None:
        out.notes.append("the optimizer's states are not read: without ZeRO they have no names to be joined by")
    return out


def _all_stored(fqn: str, name: str, pieces: Sequence[Value]) -> list[StoredTensor]:
    found = [piece for piece in pieces if isinstance(piece, StoredTensor)]
    if len(found) < len(pieces):
        raise DamagedCheckpointError(f"the files of a tensor parallel rank have no {name!r} of {fqn!r}, others have")
    return found
