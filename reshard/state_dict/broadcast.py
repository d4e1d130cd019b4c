"""A state dict that only rank 0 has: each rank asks for the elements that it holds, and is sent these and no others.

First everybody learns what there is (names, shapes, dtypes and all that is no tensor), checks it against its own model
and says what it wants; only then tensors travel, one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
import torch.distributed as dist

from planners.geometry.box import Box
from reshard.control.group import Group
from reshard.errors import KeyMismatchError, NormalizationError, RankFailedError
from reshard.state.tensors import is_sharded, raw_bytes
from reshard.state_dict.gather import parts_of

__all__ = ["Outline", "fill", "outline_of", "revive", "share_outline", "together"]

DEADLINE_S = 300.0
"""How long ranks wait for each other's verdict."""

T = TypeVar("T")
Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]


class Outline(NamedTuple):
    """A tensor in the dict of rank 0, without its elements."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def meta(self) -> torch.Tensor:
        """A tensor of this shape and dtype without memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def together(run: Callable[[], T], active: bool) -> T:
    """Call `run`, and fail on all ranks if it fails on any. Collective over all ranks if `active`.

    Raises what `run` raised, or RankFailedError with another rank's message.
    """
    if not active:
        return run()
    error: Exception | None = None
    try:
        result = run()
    except Exception as caught:
        error = caught
    texts = Group(deadline_s=DEADLINE_S).exchange(str(error).encode() if error is not None else b"")
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text:
            raise RankFailedError(f"rank {rank}: {text.decode()}", rank=rank)
    return result


def outline_of(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """The same containers with outlines for tensors, which are put into `tensors` by path."""
    if isinstance(value, torch.Tensor):
        if is_sharded(value):
            raise NormalizationError(f"{path} is sharded: rank 0 must have whole tensors to broadcast them")
        tensors[path] = value
        return Outline(path, tuple(value.shape), value.dtype)
    if isinstance(value, Mapping):
        return {key: outline_of(item, f"{path}/{key}", tensors) for key, item in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(outline_of(item, f"{path}/{i}", tensors) for i, item in enumerate(value))
    return value


def revive(outline: Any, make: Callable[[Outline], Any]) -> Any:
    """The containers with `make(outline)` in the place of each outline."""
    if isinstance(outline, Outline):
        return make(outline)
    if isinstance(outline, dict):
        return {key: revive(item, make) for key, item in outline.items()}
    if type(outline) is list or type(outline) is tuple:
        return type(outline)(revive(item, make) for item in outline)
    return outline


def share_outline(given: Mapping[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """What rank 0 has, on all ranks; and on rank 0 the tensors by path. Collective."""
    tensors: dict[str, torch.Tensor] = {}
    first = dist.get_rank() == 0
    outline = together(lambda: outline_of(given, "", tensors) if first else None, active=True)
    box = [outline]
    dist.broadcast_object_list(box, src=0)
    return box[0], tensors


def fill(
    targets: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor], known: set[str], strict: bool
) -> None:
    """Write into each target the elements that it holds of the tensor of that path on rank 0. Collective.

    Args:
        targets: by path; sharded or not. Where all ranks want the same elements of a tensor it is broadcast, else
            each is sent its own.
        sources: on rank 0, whole tensors by path.
        known: paths that this rank's model has a use for, tensors or not.
        strict: raise KeyMismatchError, on all ranks and before anything is written, for sources that no rank knows.
    """
    views = {path: _views(target) for path, target in targets.items()}
    wanted = {path: [(box.offsets, box.sizes) for box, _ in own] for path, own in views.items()}
    asked = Group(deadline_s=DEADLINE_S).exchange(msgspec.msgpack.encode((wanted, sorted(known))))
    requests: list[dict[str, Boxes]] = []
    everybody: set[str] = set()
    for data in asked:
        request, names = msgspec.msgpack.decode(data, type=tuple[dict[str, Boxes], list[str]])
        requests.append(request)
        everybody.update(names)
    strangers = sorted(set(sources) - everybody)
    together(lambda: _refuse(strangers) if strict else None, active=True)
    here = dist.get_rank()
    for path in sorted({path for request in requests for path in request}):
        ranks = [rank for rank, request in enumerate(requests) if path in request]
        same = len(ranks) == len(requests) and all(request[path] == requests[0][path] for request in requests)
        if same:
            _one_for_all(views[path], sources.get(path))
        elif here == 0:
            _send_all(sources[path], {rank: requests[rank][path] for rank in ranks}, views.get(path, []))
        elif here in ranks:
            _receive(views[path])


def _refuse(strangers: list[str]) -> None:
    if strangers:
        raise KeyMismatchError(
            "the dict of rank 0 has names that no rank knows:\n"
            + "\n".join(f"  unexpected: {path.removeprefix('/')}" for path in strangers)
            + "\npass StateDictOptions(strict=False) to set what fits"
        )


def _views(target: Any) -> list[tuple[Box, torch.Tensor]]:
    """(box of the whole tensor, the memory for it) for everything that this rank holds."""
    if not is_sharded(target):
        return [(Box.full(tuple(target.shape)), target)]
    return [(there, local[here.slices]) for part, local in parts_of(target) for there, here in part.boxes()]


def _one_for_all(views: list[tuple[Box, torch.Tensor]], source: torch.Tensor | None) -> None:
    for box, view in views:
        data = view if source is None else source[box.slices]
        buffer = data.detach().to(_wire(), copy=True).contiguous()
        dist.broadcast(_as_bytes(buffer), src=0)
        view.copy_(buffer)


def _send_all(source: torch.Tensor, boxes: Mapping[int, Boxes], views: list[tuple[Box, torch.Tensor]]) -> None:
    works = []
    for rank, own in boxes.items():
        pieces = [source[Box(*box).slices].detach().contiguous() for box in own]
        if rank == 0:
            for (_, view), piece in zip(views, pieces, strict=True):
                view.copy_(piece)
        elif sum(piece.numel() for piece in pieces):
            data = torch.cat([_as_bytes(piece) for piece in pieces]).to(_wire())
            works.append((dist.isend(data, rank), data))
    for work, _ in works:  # the data must live until it is sent
        if work is not None:
            work.wait()


def _receive(views: list[tuple[Box, torch.Tensor]]) -> None:
    sizes = [view.numel() * view.element_size() for _, view in views]
    if not sum(sizes):
        return
    data = torch.empty(sum(sizes), dtype=torch.uint8, device=_wire())
    dist.recv(data, src=0)
    for (_, view), piece in zip(views, _pieces(data, sizes)):
        view.copy_(piece.clone().view(view.dtype).view(view.shape))


def _pieces(data: torch.Tensor, sizes: list[int]) -> Iterator[torch.Tensor]:
    at = 0
    for size in sizes:
        yield data[at : at + size]
        at += size


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return raw_bytes(tensor.contiguous())


def _wire() -> torch.device:
    """Where tensors must be to be sent: the CPU, if the default group has a backend for it."""
    if "gloo" in str(dist.get_backend()) or "mpi" in str(dist.get_backend()):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
