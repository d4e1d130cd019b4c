"""Distributes a state dict that only rank 0 has: each rank requests the elements that it holds, and
receives only these.

First, all ranks receive the structure (names, shapes, dtypes, and all other values), compare it
with their own models, and say what they want. Only then are tensors sent, one by one. Each rank
gets the same dict, with tensors sharded as its own model's.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from planners.geometry.box import Box, Shape
from reshard.errors import KeyMismatchError, NormalizationError
from reshard.live.fsdp1 import FlatPiece
from reshard.live.state import same_value
from reshard.live.tensors import LiveTensor, dtensor_like, is_dtensor, is_plain, is_sharded, resolved_bytes
from reshard.live.tree import leaves_of, map_leaves
from reshard.ranks.group import Group, device_of_kind, sending_kinds
from reshard.state_dict.gather import parts_of
from reshard.state_dict.live_model import LiveModel, SelfLoadingModule, StateEntry
from reshard.state_dict.model import ALIGNED_BYTES, overlapping, overwritten, plan_model
from reshard.state_dict.optimizer import OptimizerWrites, plan_optimizers
from reshard.state_dict.optimizer_parameters import LiveOptimizers, OptimizedParameter
from reshard.state_dict.options import StateDictOptions
from reshard.state_dict.saved_optimizer import read_saved

Boxes = list[tuple[Shape, Shape]]
_SETTING = "setting a state dict"


class Outline(NamedTuple):
    """A tensor in the dict of rank 0, without its elements."""

    path: str
    shape: Shape
    dtype: torch.dtype

    def made(self, device: torch.device | str) -> torch.Tensor:
        """Allocate memory for the full tensor."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@contextlib.contextmanager
def setting(options: StateDictOptions | None = None, *, together: Iterable[tuple[int, ...]] = ((),)) -> Iterator[None]:
    """Within this context, all ranks raise what one rank raises. Collective over all ranks, or over
    each set of ranks in `together`.

    With `options`, also compares them. Raises LayoutError if ranks have different ones.
    """
    with contextlib.ExitStack() as stack:
        for ranks in together:
            group = Group(ranks=ranks)
            stack.enter_context(group.together(_SETTING))
            if options is not None:
                group.same_options("the setters of state dicts", options._shared())
        yield


def expect_model(
    live: LiveModel, given: Mapping[str, Any], options: StateDictOptions
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Return rank 0's model state dict, restricted to the keys of this rank's model and sharded
    like its tensors, and a function that fills it.

    Live tensors with the dtype of the given ones are in the returned dict themselves, and are
    filled directly. This call and the function are collective. If the dict does not fit some rank's
    model, all ranks raise, and nothing is changed.
    """
    data, sources = _share_outline(given)
    with setting():
        outline = pickle.loads(data)
        prefixes = tuple(item.prefix for item in live.items if isinstance(item, SelfLoadingModule))
        mine = {name: value for name, value in outline.items() if name in live.by_name or name.startswith(prefixes)}
        known = {one.path for one in leaves_of(mine).values() if isinstance(one, Outline)}
        shared = _shared_memory(live, mine)
        once: dict[Any, str] = {}
        for name in list(mine):
            slot = live.by_name.get(name)
            # one name of a tied tensor is enough, and two would write the same memory
            if slot is not None and slot.value is not None and once.setdefault(slot.identity, name) != name:
                del mine[name]
        plan_model(live, _on_meta(mine), options, outlines=True)
        device = next((s.value.device for s in live.slots if s.value is not None and not s.value.is_meta), None)
        in_regions = {slot.name for item in live.items if isinstance(item, SelfLoadingModule) for slot in item.slots}

        def target(_: Sequence[Any], one: Outline) -> torch.Tensor:
            name = one.path[1:]
            return _model_target(one, live.by_name.get(name), device or torch.device("cpu"), name in in_regions)

        made, targets = _with_targets(target, mine)
    return made, _filling(targets, sources, known, options.strict, shared)


def receive_optimizer(live: LiveOptimizers, given: Mapping[str, Any], options: StateDictOptions) -> OptimizerWrites:
    """Return the writes that set the optimizers to rank 0's state dict, restricted to this rank's
    parameters. Tensors are in new memory. Those with the shape of their parameter are sharded like
    it. Collective; raises like `expect_model`."""
    data, sources = _share_outline(given)
    with setting():
        outline = pickle.loads(data) or {"state": {}, "param_groups": []}
        saved = read_saved(outline, live)
        state = {name: values for name, values in saved.state.items() if name in live.by_name}
        groups: dict[int, dict[str, Any]] = {}
        for name, fields in saved.fields.items():
            if name in live.by_name:
                groups.setdefault(id(fields), {**fields, "params": []})["params"].append(name)
        mine = {"state": state, "param_groups": [*groups.values(), *({**f, "params": []} for f in saved.empty)]}
        plan_optimizers(live, _on_meta(mine), options, outlines=True)

        def target(path: Sequence[Any], one: Outline) -> torch.Tensor:
            return _optimizer_target(one, live.by_name[path[1]] if path[0] == "state" else None)

        made, targets = _with_targets(target, mine)
        # for parameters of the model's other optimizers, the rank knows only the names
        leaves = leaves_of(outline).items()
        known = {one.path for path, one in leaves if isinstance(one, Outline) and _names_any(path, live)}
    _filling(targets, sources, known | set(targets), options.strict, ([], []))()
    with setting():
        return plan_optimizers(live, made, options)


def _names_any(path: Sequence[Any], live: LiveOptimizers) -> bool:
    """Return True if a path of a nested or flat dict is about a parameter of
    the model, or about a group.
    """
    front, *rest = map(str, path)
    if front == "param_groups" or front.startswith("param_groups."):
        return True
    name = rest[0] if front == "state" else front.removeprefix("state.")
    while name and name not in live.by_name and name not in live.live.by_name:
        name = name.rpartition(".")[0]
    return bool(name)


def _optimizer_target(one: Outline, owner: OptimizedParameter | None) -> torch.Tensor:
    if owner is None or not one.shape:
        return one.made("cpu")
    device = owner.parameter.device
    if one.shape == owner.shape:
        return _like(owner.parameter, owner.piece, one.dtype, device)
    return one.made(device)


def _model_target(one: Outline, slot: StateEntry | None, device: torch.device, in_region: bool) -> torch.Tensor:
    if slot is None or slot.value is None or one.shape != slot.shape:
        return one.made(device)
    if not slot.value.is_meta and slot.value.dtype == one.dtype and not in_region:
        return slot.tensor()
    return _like(slot.value, slot.piece, one.dtype, device if slot.value.is_meta else slot.value.device)


def _like(model: torch.Tensor, piece: FlatPiece | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate memory that is sharded like `model` or `piece`."""
    if piece is not None:
        where = piece.local_slice()
        return piece.tensor(torch.empty(where.stop - where.start, dtype=dtype, device=device))
    if is_dtensor(model):
        return dtensor_like(torch.empty(model.to_local().shape, dtype=dtype, device=device), model)
    return torch.empty(model.shape, dtype=dtype, device=device)


def _map_outlines(make: Callable[[tuple[Any, ...], Outline], Any], nest: Any) -> Any:
    """Return copies of the containers, with each outline replaced by `make(path, outline)`."""
    return map_leaves(lambda path, leaf: make(path, leaf) if isinstance(leaf, Outline) else leaf, nest)


def _with_targets(
    make: Callable[[Sequence[Any], Outline], torch.Tensor], nest: Any
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the containers with each outline replaced by a tensor, and these tensors by path."""
    targets: dict[str, torch.Tensor] = {}

    def keep(path: Sequence[Any], one: Outline) -> torch.Tensor:
        targets[one.path] = make(path, one)
        return targets[one.path]

    return _map_outlines(keep, nest), targets


def _on_meta(nest: Any) -> Any:
    """Return the containers with each outline replaced by a meta tensor."""
    return _map_outlines(lambda _, one: one.made("meta"), nest)


def _share_outline(given: Mapping[str, Any]) -> tuple[bytes, dict[str, torch.Tensor]]:
    """Return rank 0's dict on all ranks, pickled, with outlines instead of tensors. On rank 0, also
    return the tensors by path. Collective."""
    tensors: dict[str, torch.Tensor] = {}

    def outline(path: Sequence[Any], leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        text = "".join(f"/{part}" for part in path)
        if is_sharded(leaf):
            raise NormalizationError(f"{text} is sharded: rank 0 must have full tensors to broadcast them")
        tensors[text] = leaf
        return Outline(text, tuple(leaf.shape), leaf.dtype)

    box = [b""]
    with setting():
        if dist.get_rank() == 0:
            nest = map_leaves(outline, given)
            try:
                box = [pickle.dumps(nest)]
            except Exception as error:
                raise NormalizationError(
                    f"a value of the dict of rank 0 cannot be sent to other ranks: {error}"
                ) from error
    dist.broadcast_object_list(box, src=0)
    return box[0], tensors


class _Spot(NamedTuple):
    """An entry of a rank's model that shares memory with another entry."""

    path: str
    dtype: str
    offset: int
    shape: Shape
    strides: Shape


_Shared = tuple[list[list[str]], list[list[_Spot]]]
"""Entries that share memory in a rank's model: lists of the paths of each tied tensor, and lists of
overlapping entries."""


def _shared_memory(live: LiveModel, given: Mapping[str, Any]) -> _Shared:
    direct = {id(item) for item in live.items}
    ties: list[list[str]] = []
    plain: list[tuple[str, torch.Tensor]] = []
    for names in live.names_of.values():
        held = [name for name in names if isinstance(given.get(name), Outline)]
        if len(held) > 1:
            ties.append([given[name].path for name in held])
        slot = live.by_name[held[0]] if held else None
        value = None if slot is None or slot.piece is not None or id(slot) not in direct else slot.value
        if value is not None and is_plain(value) and not is_sharded(value):
            plain.append((given[held[0]].path, value))
    overlaps = []
    for cluster in overlapping([value for _, value in plain]):
        its = [plain[i] for i in cluster]
        first = min(value.data_ptr() for _, value in its) // ALIGNED_BYTES * ALIGNED_BYTES
        overlaps.append(
            [
                _Spot(
                    path,
                    str(value.dtype),
                    (value.data_ptr() - first) // value.itemsize,
                    tuple(value.shape),
                    value.stride(),
                )
                for path, value in its
            ]
        )
    return ties, overlaps


def _lost(shared: _Shared, sources: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the paths of values that would be lost if all were written, because a rank has them in
    the same memory."""
    ties, overlaps = shared
    lost = [path for first, *paths in ties for path in paths if not same_value(sources[first], sources[path])]
    for cluster in () if lost else overlaps:
        memory = torch.empty(0, device="cpu").untyped_storage()  # the storage grows with its views
        targets = [
            torch.empty(0, dtype=getattr(torch, one.dtype.removeprefix("torch.")), device="cpu").set_(
                memory, one.offset, one.shape, one.strides
            )
            for one in cluster
        ]
        values = [sources[one.path].detach() for one in cluster]
        lost += [cluster[i].path for i in overwritten(targets, values)]
    return lost


def _filling(
    targets: Mapping[str, torch.Tensor],
    sources: Mapping[str, torch.Tensor],
    known: set[str],
    strict: bool,
    shared: _Shared,
) -> Callable[[], None]:
    """Return a function that fills each target from rank 0's tensor of the same path. Both calls
    are collective.

    Args:
        targets: tensors by path, sharded or not. If all ranks need the same elements of a tensor,
            it is broadcast. Otherwise, each rank is sent its own elements.
        sources: full tensors by path, on rank 0.
        known: paths of tensors and other values that this rank's model uses.
        strict: raise KeyMismatchError, on all ranks and before anything is written, for sources
            that no rank knows.
        shared: also raise it if sources differ that a rank has in the same memory.
    """
    views = {path: _views(target) for path, target in targets.items()}
    wanted = {path: [(box.offsets, box.sizes) for box, _ in own] for path, own in views.items()}
    group = Group()
    requests: list[dict[str, Boxes]] = []
    answer = None
    with group.together(_SETTING):
        asked = group.gather((wanted, sorted(known), shared), kind=tuple[dict[str, Boxes], list[str], _Shared])
        if asked is not None:
            requests = [request for request, _, _ in asked]
            strangers = sorted(set(sources).difference(*(names for _, names, _ in asked)))
            common = [path for path, boxes in wanted.items() if all(request.get(path) == boxes for request in requests)]
            distinct = [one for i, (_, _, one) in enumerate(asked) if one not in [each for _, _, each in asked[:i]]]
            answer = set(common), strangers, [path for one in distinct for path in _lost(one, sources)]
        alike, strangers, lost = group.share(answer, kind=tuple[set[str], list[str], list[str]])
    _refuse(strangers if strict else [], lost)

    def fill() -> None:
        for path in sorted({*alike, *views, *(path for request in requests for path in request)}):
            if path in alike:
                _one_for_all(views[path], sources.get(path))
            elif requests:
                each = {rank: request[path] for rank, request in enumerate(requests) if path in request}
                _send_all(sources[path], each, views.get(path, []), group.tag)
            else:
                _receive(views[path], group.tag)

    return fill


def _refuse(strangers: list[str], lost: list[str]) -> None:
    if strangers or lost:
        raise KeyMismatchError(
            "the dict of rank 0 does not fit the models:\n"
            + "".join(f"  Unexpected key: {path[1:]}: no rank has it\n" for path in strangers)
            + "".join(
                f"  Mismatched: {path[1:]}: shares memory with another entry that gets another value\n"
                for path in dict.fromkeys(lost)
            )
            + "  fix: pass StateDictOptions(strict=False) to set only the entries that match" * bool(strangers)
        )


def _views(target: Any) -> list[tuple[Box, torch.Tensor]]:
    """Return (box of the full tensor, memory of these elements) for each part that this rank holds."""
    if not is_sharded(target):
        return [(Box.full(tuple(target.shape)), target)]
    return [
        (there, local[here.slices]) for part, local in parts_of(LiveTensor("", target)) for there, here in part.boxes()
    ]


def _one_for_all(views: list[tuple[Box, torch.Tensor]], source: torch.Tensor | None) -> None:
    for box, view in views:
        data = view if source is None else source[box.slices]
        buffer = data.detach().to(_wire(), copy=True).contiguous()
        dist.broadcast(resolved_bytes(buffer), src=0)
        view.copy_(buffer)


def _send_all(
    source: torch.Tensor, boxes: Mapping[int, Boxes], views: list[tuple[Box, torch.Tensor]], tag: int
) -> None:
    ops = []
    for rank, own in boxes.items():
        pieces = [source[Box(*box).slices].detach().contiguous() for box in own]
        if rank == 0:
            for (_, view), piece in zip(views, pieces, strict=True):
                view.copy_(piece)
        elif sum(piece.numel() for piece in pieces):
            data = torch.cat([resolved_bytes(piece) for piece in pieces]).to(_wire())
            ops.append(dist.P2POp(dist.isend, data, rank, tag=tag))  # the P2POp keeps the data alive until it is sent
    _wait_for(ops)


def _wait_for(ops: list[dist.P2POp]) -> None:
    """Wait for messages. All messages of one call use one communicator of all ranks. Otherwise,
    NCCL would create one for each pair of ranks."""
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()


def _receive(views: list[tuple[Box, torch.Tensor]], tag: int) -> None:
    sizes = [view.numel() * view.element_size() for _, view in views]
    if not sum(sizes):
        return
    data = torch.empty(sum(sizes), dtype=torch.uint8, device=_wire())
    _wait_for([dist.P2POp(dist.irecv, data, 0, tag=tag)])
    for (_, view), piece in zip(views, data.split_with_sizes(sizes)):
        view.copy_(piece.clone().view(view.dtype).view(view.shape))


def _wire() -> torch.device:
    """Return the device from which tensors are sent: the CPU, if the default group has a backend for it."""
    kinds = sending_kinds(None)
    return device_of_kind("cpu" if "cpu" in kinds or not kinds else kinds[0])
