"""The buckets of Megatron's distributed optimizer (`dp_reshardable`), cut back into parameters.

Each model parallel rank has a flat buffer per chunk of the model and dtype, cut into buckets. Parameters lie in it in
reverse order of registration, each from a multiple of 64 elements on; no names are stored:

    bucket_idx_0:  | output_layer.weight      | final_layernorm.weight | - | ...linear_fc2.weight  | - |   (-: padding)
                   0                        768                      792 832                     1504

So the order is rebuilt from the model: its keys in the order in which they were saved, or the order of Megatron's own
layers. An order is taken only if every parameter fits and the buckets come out full; the hint "param_order" helps.

Older versions (`dp_zero_gather_scatter`) joined the buckets of a buffer, without the padding at their ends, into one
flat tensor inside an object; see `gathered`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reshard.checkpoint.canonical.hints import Hints
from reshard.checkpoint.canonical.megatron.gathered import Place, gathered_buffers
from reshard.checkpoint.canonical.megatron.names import is_expert
from reshard.checkpoint.canonical.megatron.order import Grid, chunk_names, orders
from reshard.checkpoint.canonical.megatron.slots import Slot, bucket_limit, place_joined, place_params
from reshard.checkpoint.canonical.megatron.tensor_parallel import is_gated, join_shards, local_shape, tp_dim
from reshard.checkpoint.canonical.result import Value
from reshard.checkpoint.canonical.views import narrow, unflatten
from reshard.errors import DamagedCheckpointError, NormalizationError
from reshard.formats.stored.contents import Contents
from reshard.formats.stored.tensor import StoredTensor

__all__ = ["cut_buckets"]

_KEY = re.compile(
    r"(?:chained_(?P<chained>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\.gbuf_idx_(?P<buffer>\d+)\."
    r"dtype_\(torch\.(?P<dtype>\w+), torch\.\w+\)\.bucket_idx_(?P<bucket>\d+)\.(?P<state>\w+)"
)


@dataclass
class _Buffer:
    """The buckets of one flat buffer, by state."""

    buckets: dict[int, dict[str, StoredTensor]] = field(default_factory=dict)
    limit: int | None = None
    """Elements that filled a bucket, where the buckets of the buffer were joined to one."""

    def lengths(self) -> list[int]:
        if sorted(self.buckets) != list(range(len(self.buckets))):
            raise DamagedCheckpointError(f"the buckets {sorted(self.buckets)} of a buffer are not all there")
        return [next(iter(self.buckets[b].values())).spec.numel for b in sorted(self.buckets)]

    def starts(self, bucket: int) -> set[int]:
        """Where chunks begin in a bucket."""
        return {chunk.box.offsets[0] for chunk in next(iter(self.buckets[bucket].values())).chunks}


_Buffers = dict[Place, _Buffer]


def cut_buckets(
    contents: Contents, model: Mapping[str, StoredTensor], args: Mapping[str, Any], hints: Hints
) -> dict[str, dict[str, Value]]:
    """The states of all parameters in buckets; {} if there are none. `model` is in the order in which it was saved.

    Raises NormalizationError if no known order fits, and DamagedCheckpointError if ranks are missing.
    """
    buffers = _buffers(contents, args)
    if not buffers:
        return {}
    keys = list(model)
    locals_: dict[str, dict[tuple[int, int], dict[str, StoredTensor]]] = {}
    for chained in sorted({key[0] for key in buffers}):
        mine = {key: buffer for key, buffer in buffers.items() if key[0] == chained}
        grid = Grid.of(
            args, groups=len({key[1] for key in mine}), experts=_is_expert_part(chained, buffers, args), hints=hints
        )
        _check_groups(mine, grid)
        _cut_part(mine, grid, keys, model, hints, locals_)
    return _join(locals_, model, hints)


def _buffers(contents: Contents, args: Mapping[str, Any]) -> _Buffers:
    out: _Buffers = {}
    for key in contents.tensors:
        match = _KEY.fullmatch(key)
        if match is None:
            continue
        at = (match["chained"] or "", int(match["group"]), int(match["buffer"]), match["dtype"])
        out.setdefault(at, _Buffer()).buckets.setdefault(int(match["bucket"]), {})[match["state"]] = contents.tensors[
            key
        ]
    for place, flats in gathered_buffers(contents):
        if flats:
            out[place] = _Buffer({0: flats}, bucket_limit(args))
    return out


def _is_expert_part(chained: str, buffers: _Buffers, args: Mapping[str, Any]) -> bool | None:
    """Whether an optimizer of several has the experts' parameters; None if there is one for all."""
    if int(args.get("expert_model_parallel_size") or 1) == 1:
        return None
    parts = sorted({key[0] for key in buffers})
    return None if len(parts) == 1 else chained == parts[-1]


def _check_groups(buffers: _Buffers, grid: Grid) -> None:
    found = {key[1] for key in buffers}
    missing = sorted(set(range(grid.size)) - found)
    if missing:
        raise DamagedCheckpointError(
            f"the optimizer states of model parallel rank {missing[0]} are missing: there are those of "
            f"{sorted(found)}, but the model was cut for {grid}"
        )


def _cut_part(
    buffers: _Buffers,
    grid: Grid,
    keys: Sequence[str],
    model: Mapping[str, StoredTensor],
    hints: Hints,
    out: dict[str, dict[tuple[int, int], dict[str, StoredTensor]]],
) -> None:
    """Add the local parts of every parameter, by (tensor parallel, expert parallel) rank."""
    shapes = {name: tensor.spec.shape for name, tensor in model.items()}
    for group in sorted({key[1] for key in buffers}):
        tp, ep, pp = grid.coordinates(group)
        for dtype in sorted({key[3] for key in buffers if key[1] == group}):
            mine = [buffers[key] for key in sorted(buffers) if key[1] == group and key[3] == dtype]
            for chunk, buffer in enumerate(mine):
                names = chunk_names(keys, model, grid, pp, chunk, len(mine), ep)
                typed = [name for name in names if model[name].spec.dtype == dtype]
                for slot in _find_slots(buffer, typed, shapes, grid, hints):
                    local = local_shape(shapes[slot.name], _dim(slot.name, hints, grid), grid.tp, slot.name)
                    for state, bucket in buffer.buckets[slot.bucket].items():
                        flat = narrow(bucket, 0, slot.start, slot.stop)
                        part = unflatten(flat, local, f"{slot.name}.{state}")
                        out.setdefault(slot.name, {}).setdefault((tp, ep), {})[state] = part


def _dim(name: str, hints: Hints, grid: Grid) -> int | None:
    return tp_dim(name, hints, grid.tp)


def _find_slots(
    buffer: _Buffer, names: Sequence[str], shapes: Mapping[str, tuple[int, ...]], grid: Grid, hints: Hints
) -> list[Slot]:
    """Where the parameters `names` lie, by the first order in which they fill the buckets exactly."""
    numels = {n: math.prod(local_shape(shapes[n], _dim(n, hints, grid), grid.tp, n)) for n in names}
    candidates = list(orders(names, hints, grid.grouped))
    fitting = _fitting(candidates, numels, buffer)
    if not fitting and grid.grouped is not None:  # the experts are not what the program was told
        candidates = list(orders(names, hints))
        fitting = _fitting(candidates, numels, buffer)
    if not fitting:
        hints.missing(
            "param_order",
            f"the optimizer states are in buckets of {buffer.lengths()} elements without names, and the {len(names)} "
            "parameters of the model do not fill them in any order that is known"
            + (" (if stages have other layers than these, the hint 'layer_offsets' says it)" if grid.pp > 1 else ""),
            '["embedding.word_embeddings.weight", ...]',
        )
    # chunks were cut at the parameters' borders: the order whose parameters begin where chunks do is the right one
    exact = [s for s in fitting if all(slot.start in buffer.starts(slot.bucket) for slot in s)] or fitting
    if len(exact) == 1 or "param_order" in hints:
        return exact[0]
    first, *others = exact
    differing = [a.name for other in others for a, b in zip(first, other) if a != b]
    if grid.grouped is not None or not any(map(is_expert, differing)):  # stacks do not say how experts were registered
        if all(
            {(s.bucket, s.start, s.stop) for s in first} == {(s.bucket, s.start, s.stop) for s in o} for o in others
        ):
            return first  # parameters of one size: the order of the file decides, which comes first
        if candidates[0] in candidates[1:] and first == fitting[0] and first in _place(candidates[0], numels, buffer):
            return first  # the file has its keys in the very order in which one kind of Megatron's layers has them
    raise NormalizationError(
        f"two orders of the parameters fill the optimizer's buckets, and differ from {differing[0]!r} on: give the "
        "right one by the hint 'param_order'"
    )


def _fitting(orders: Sequence[Sequence[str]], numels: Mapping[str, int], buffer: _Buffer) -> list[list[Slot]]:
    """The different ways in which parameters in any of these orders fill the buffer."""
    found: list[list[Slot]] = []
    for order in orders:
        found += [slots for slots in _place(order, numels, buffer) if slots not in found]
    return found


def _place(order: Sequence[str], numels: Mapping[str, int], buffer: _Buffer) -> list[list[Slot]]:
    """Every way in which parameters in this order fill the buffer."""
    params = [(name, numels[name]) for name in reversed(order)]
    lengths = buffer.lengths()
    if buffer.limit is not None:
        return list(place_joined(params, lengths[0], buffer.limit))
    slots = place_params(params, lengths)
    return [] if slots is None else [slots]


def _join(
    parts: Mapping[str, Mapping[tuple[int, int], Mapping[str, StoredTensor]]],
    model: Mapping[str, StoredTensor],
    hints: Hints,
) -> dict[str, dict[str, Value]]:
    """Whole states from the parts of all tensor parallel ranks."""
    shapes = {name: tensor.spec.shape for name, tensor in model.items()}
    out: dict[str, dict[str, Value]] = {}
    for name, by_rank in parts.items():
        ranks = sorted({tp for tp, _ in by_rank})
        holder = {tp: by_rank[min(at for at in by_rank if at[0] == tp)] for tp in ranks}
        dim = tp_dim(name, hints, len(ranks))
        for state in holder[0]:
            shards = [holder[tp][state] for tp in ranks]
            joined = join_shards(f"{name}.{state}", shards, dim, is_gated(name, shapes))
            out.setdefault(name, {})[state] = joined
        if out[name] and next(iter(out[name].values())).spec.shape != shapes[name]:
            raise DamagedCheckpointError(f"{name!r}: the parts of its optimizer states do not make up {shapes[name]}")
    return out
