"""The inside of FSDP1's flat parameters: where each parameter lies in one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reshard.errors import NormalizationError
from reshard.formats.canonical import Hints, find_scope
from reshard.stored.tensor import StoredTensor
from reshard.stored.views import narrow, unflatten

__all__ = ["FLAT", "FlatLayout", "cut_flat", "hinted_params", "layout_of"]


_ALIGNMENT_BYTES = 16
"""With use_orig_params, every parameter inside begins at a multiple of this."""
FLAT = "_flat_param"


@dataclass(frozen=True)
class FlatLayout:
    """Where each parameter lies in a flat one: its first element, and its shape."""

    params: dict[str, tuple[int, tuple[int, ...]]]

    def cut(self, flat: StoredTensor) -> dict[str, StoredTensor]:
        """The parameters as tensors of their own."""
        return {
            name: unflatten(narrow(flat, 0, start, start + math.prod(shape)), shape, name)
            for name, (start, shape) in self.params.items()
        }


def cut_flat(name: str, flat: StoredTensor, flat_names: Sequence[str], hints: Hints) -> dict[str, StoredTensor]:
    """The parameters inside a model's flat parameter without padding; `flat_names` are those of all flat parameters.

    Raises NormalizationError if no hint says what is inside, or what it says has other sizes.
    """
    return layout_of(name, None, flat.spec.numel, flat.itemsize, 0, flat_names, hints).cut(flat)


def layout_of(
    name: str | None, key: int | None, numel: int, itemsize: int, slack: int, flat_names: Sequence[str], hints: Hints
) -> FlatLayout:
    """What is in the flat parameter of this name or id, of `numel` elements of which fewer than `slack` are padding.

    Raises NormalizationError if no hint says it, or what it says has other sizes.
    """
    what = f"the flat parameter {name!r}" if key is None or name is not None else f"the flat parameter of id {key}"
    hinted = [found for scope in (name, key) if scope is not None and (found := hinted_params(scope, hints))]
    params = hinted[0] if hinted else None
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
        inside: dict[str, tuple[int, tuple[int, ...]]] = {}
        for param, shape in params:
            start = -(-at // alignment) * alignment
            inside[param] = (start, shape)
            at = start + math.prod(shape)
        # padded until the parts of all ranks are equal
        if 0 <= numel - -(-at // alignment) * alignment < max(slack, 1) or at == numel:
            return FlatLayout(inside)
    held = sum(math.prod(shape) for _, shape in params)
    if numel >= 2 * held > 0:
        ask_copies(
            f"{what} has {numel} elements on all ranks, but the parameters that the hint puts into it", held, hints
        )
    raise NormalizationError(f"{what} has {numel} elements, but the parameters that the hint puts into it have {held}")


def ask_copies(what: str, held: int, hints: Hints) -> None:
    """Raise the NormalizationError that asks how many ranks hold a copy, unless it was said already."""
    if "shard_ranks" not in hints:
        hints.missing("shard_ranks", f"{what} have {held}: with HYBRID_SHARD or NO_SHARD, ranks hold copies", "1")


def hinted_params(scope: str | int, hints: Hints) -> list[tuple[str, tuple[int, ...]]] | None:
    """Names and shapes that the hint `flat_params` gives for a flat parameter's name or id; None if it has neither."""
    value = find_scope(hints.mapping("flat_params"), scope)
    value = value.get("params") if isinstance(value, Mapping) and "params" in value else value
    if value is None:
        return None
    pairs = value.items() if isinstance(value, Mapping) else value
    try:
        return [(str(param), tuple(int(n) for n in shape)) for param, shape in pairs]
    except (TypeError, ValueError):
        raise NormalizationError(f"the hint 'flat_params' must list (name, shape), got {value!r:.80}") from None


def _by_prefix(name: str, flat_names: Sequence[str], hints: Hints) -> list[tuple[str, tuple[int, ...]]] | None:
    """The parameters of the module whose flat parameter this is, but not those of modules inside with their own."""
    shapes = hints.mapping("param_shapes")
    if not shapes:
        return None
    fronts = sorted((flat.removesuffix(FLAT) for flat in flat_names), key=len, reverse=True)
    mine = name.removesuffix(FLAT)
    out = []
    for param, shape in shapes.items():
        front = next((f for f in fronts if str(param).startswith(f)), None)
        if front == mine:
            out.append((str(param), tuple(int(n) for n in shape)))
    return out
