"""`open(path)`: any checkpoint, lazily, with no model, GPU or process group."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from planners.geometry.box import Box
from planners.geometry.byteruns import Window
from planners.geometry.layout import StateLayout, TensorLayout
from reshard.errors import CheckpointError, KeyMismatchError
from reshard.formats import open_contents
from reshard.formats.stored.contents import Contents, Place, StoredTensor
from reshard.formats.stored.copying import copy_place, empty
from reshard.formats.stored.coverage import check_cover
from reshard.state.dtypes import dtype_from_name
from reshard.state.tree import unflatten
from reshard.storage.base import Storage

if TYPE_CHECKING:
    from reshard.mapping import Mapping as StateMapping

__all__ = ["Checkpoint", "LazyTensor", "open", "stored_layout"]

Range = tuple[int, int, int]
"""Start, step and count of the indexes wanted of a dim."""


class LazyTensor:
    """A tensor of a checkpoint. Indexing reads the elements asked for, and no other chunk of it.

    `t[...]` is the whole tensor; ints, slices with positive steps and Ellipsis work as on a torch tensor.
    """

    def __init__(self, stored: StoredTensor) -> None:
        self.stored = stored

    @property
    def name(self) -> str:
        """The key it has in the checkpoint."""
        return self.stored.fqn

    @property
    def shape(self) -> torch.Size:
        """Global shape."""
        return torch.Size(self.stored.spec.shape)

    @property
    def ndim(self) -> int:
        """How many dims."""
        return len(self.stored.spec.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Element type, as stored."""
        return dtype_from_name(self.stored.spec.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.stored.spec.nbytes

    def numel(self) -> int:
        """How many elements."""
        return self.stored.spec.numel

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError(f"len() of the 0-d tensor {self.name!r}")
        return self.shape[0]

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Reads one slice along dim 0 at a time."""
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> torch.Tensor:
        """A new contiguous CPU tensor.

        Raises:
            IndexError: an index out of bounds, or too many.
            TypeError: anything but ints, slices and Ellipsis; a step < 1 is a ValueError.
            DamagedCheckpointError: elements that no file holds, or two hold, or bytes that are not there.
        """
        ranges, kept = _normalize(index, self.shape, self.name)
        return _read(self.stored, ranges).reshape([n for (_, _, n), keep in zip(ranges, kept) if keep])

    def __repr__(self) -> str:
        return f"LazyTensor({self.name!r}, {list(self.shape)}, {self.stored.spec.dtype})"


def _normalize(index: Any, shape: torch.Size, name: str) -> tuple[list[Range], list[bool]]:
    """A range for each dim, and whether the dim stays (an int takes it away)."""
    items = list(index) if isinstance(index, tuple) else [index]
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1:
        raise IndexError(f"tensor {name!r}: an index can have only one Ellipsis, got {index!r}")
    if len(items) - len(dots) > len(shape):
        raise IndexError(f"tensor {name!r} has {len(shape)} dims, but {len(items) - len(dots)} were indexed")
    at = dots[0] if dots else len(items)
    items[at : at + 1] = [slice(None)] * (len(shape) - len(items) + len(dots))
    ranges: list[Range] = []
    kept: list[bool] = []
    for d, (item, size) in enumerate(zip(items, shape)):
        if isinstance(item, slice):
            if item.step is not None and operator.index(item.step) < 1:
                raise ValueError(f"tensor {name!r}: the step of a slice must be >= 1, got {item.step} for dim {d}")
            start, stop, step = item.indices(size)
            ranges.append((start, step, len(range(start, stop, step))))
            kept.append(True)
            continue
        if isinstance(item, bool) or not hasattr(item, "__index__") or isinstance(item, torch.Tensor | np.ndarray):
            raise TypeError(f"tensor {name!r}: index it by ints, slices and Ellipsis, not by {type(item).__name__}")
        i = operator.index(item)
        if not -size <= i < size:
            raise IndexError(f"tensor {name!r}: index {i} is out of bounds for dim {d} of size {size}")
        ranges.append((i % size, 1, 1))
        kept.append(False)
    return ranges, kept


def _read(stored: StoredTensor, ranges: list[Range]) -> torch.Tensor:
    """The elements at the cross product of `ranges`."""
    counts = [n for _, _, n in ranges]
    if 0 in counts:
        return empty(counts, stored.spec.dtype)[0]
    region = Box.of(tuple(start for start, _, _ in ranges), tuple((n - 1) * step + 1 for _, step, n in ranges))
    check_cover(stored, region)
    parts: list[tuple[Place, Any]] = []
    for chunk, _ in stored.meeting(region):
        bounds = [_inside(r, o, s) for r, o, s in zip(ranges, chunk.box.offsets, chunk.box.sizes)]
        if any(first >= stop for first, stop in bounds):
            continue  # a stepped slice may jump over a whole chunk
        window = chunk.window
        origins = [start + first * step for (start, step, _), (first, _) in zip(ranges, bounds)]
        part = Window(
            window.offset + sum((i - o) * s for i, o, s in zip(origins, chunk.box.offsets, window.strides)),
            tuple(stop - first for first, stop in bounds),
            tuple(s * step for s, (_, step, _) in zip(window.strides, ranges)),
            window.itemsize,
        )
        index: Any = (*(slice(first, stop) for first, stop in bounds), ...)
        parts.append((chunk.place.with_window(part), index))
        chunk.source.check(part.offset, part.stop)
    # only now, when all that is wanted is known to be there, is it worth its memory
    result, out = empty(counts, stored.spec.dtype)
    for place, index in parts:
        copy_place(place, out[index])
    return result


def _inside(wanted: Range, offset: int, size: int) -> tuple[int, int]:
    """Which of the wanted indexes, counted from 0, lie in [offset, offset + size)."""
    start, step, n = wanted
    return max(-(-(offset - start) // step), 0), min(-(-(offset + size - start) // step), n)


class Normalized(dict[str, Any]):
    """What `Checkpoint.normalized` gives: a dict of "model" and "optim"."""

    notes: tuple[str, ...] = ()
    """What a reader should know: padding that could not be cut, lists that are incomplete."""


def _lazy(value: Any) -> Any:
    return LazyTensor(value) if isinstance(value, StoredTensor) else value


def _read_value(value: Any) -> Any:
    """A setting of a param group: a tensor, such as a learning rate, is read."""
    return LazyTensor(value)[...] if isinstance(value, StoredTensor) else value


class Checkpoint(Mapping[str, LazyTensor]):
    """The tensors of a checkpoint by the key they were stored under, and everything else that is in it.

    Looking does no more than it says: names, shapes and dtypes come from the metadata, bytes from indexing a tensor.
    Further names of tied weights (`aliases`) can be looked up, but are not listed.
    """

    def __init__(self, contents: Contents, url: str) -> None:
        self.contents = contents
        self.url = url

    @property
    def format(self) -> str:
        """Name of the format, such as "dcp"."""
        return self.contents.format

    @property
    def objects(self) -> Mapping[str, Any]:
        """Everything that is no tensor, by key, as plain data; unknown classes are `Record`s of `formats.pickles`."""
        return self.contents.objects

    @property
    def aliases(self) -> Mapping[str, str]:
        """Further names of stored tensors: tied weights that are stored once."""
        return self.contents.aliases

    @property
    def fingerprints(self) -> Mapping[str, str] | None:
        """Digests of the values that were saved along, or None."""
        return self.contents.fingerprints

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was ignored or could not be represented."""
        return self.contents.warnings

    def __getitem__(self, name: str) -> LazyTensor:
        """Raises KeyMismatchError, naming similar keys, if there is no such tensor."""
        stored = self._find(name)
        if stored is None:
            what = "it is an object, see .objects" if name in self.objects else _similar(name, self)
            raise KeyMismatchError(f"{self.url} has no tensor {name!r}: {what}")
        return LazyTensor(stored)

    def _find(self, name: str) -> StoredTensor | None:
        if name in self.contents.tensors:
            return self.contents.tensors[name]
        if name in self.aliases and self.aliases[name] in self.contents.tensors:
            return self.contents.tensors[self.aliases[name]].renamed(name)
        return None

    def __contains__(self, name: object) -> bool:
        return name in self.contents.tensors or (name in self.aliases)

    def __iter__(self) -> Iterator[str]:
        return iter(self.contents.tensors)

    def __len__(self) -> int:
        return len(self.contents.tensors)

    @property
    def layout(self) -> StateLayout:
        """How the tensors are cut up in storage: the saved mesh and placements where the format knows them, else the
        boxes of the chunks, each under the rank that wrote it."""
        return StateLayout({name: stored_layout(self.contents.tensors[name]) for name in self})

    def problems(self, *, deep: bool = False) -> list[str]:
        """One text for each tensor whose chunks leave a hole, overlap or lie outside it; reads no tensor data.

        `deep` also looks into every stored item, whether it holds what the metadata says.
        """
        found = []
        for name in self:
            try:
                stored = self.contents.tensors[name]
                check_cover(stored)
                for chunk in stored.chunks if deep else ():
                    if not chunk.box.is_empty:
                        chunk.source.check(chunk.window.offset, chunk.window.stop)
            except CheckpointError as error:
                found.append(str(error))
        return found

    def nested(self) -> Any:
        """The state as it was nested when it was saved, tied tensors under all their names: containers of `LazyTensor`s
        and plain objects."""
        leaves: dict[str, Any] = {name: self[name] for name in dict.fromkeys((*self, *self.aliases))}
        leaves.update(self.objects)
        paths = self.contents.paths
        return unflatten({paths.get(name, (name,)): leaf for name, leaf in leaves.items()}, self.contents.containers)

    def mapped(self, mapping: StateMapping) -> Checkpoint:
        """The checkpoint under other names and in other shapes, lazily: see `reshard.mapping`."""
        return mapping.apply(self)

    def normalized(self, hints: Mapping[str, Any] | None = None) -> Normalized:
        """The state under canonical names, whatever framework wrote it; tensors stay lazy.

            {"model": {fqn: LazyTensor},
             "optim": {"state": {fqn: {name: LazyTensor or value}}, "param_groups": [{..., "params": [fqn, ...]}]}}

        Wrappers' prefixes are gone, stacks of layers and experts and flat or bucketed optimizer shards are cut into
        parameters, padding is cut off. `.notes` of the result says what could not be done.

        Args:
            hints: what the checkpoint cannot say, see `reshard.checkpoint.canonical.HINTS`.

        Raises:
            NormalizationError: a hint is missing (the message says which, and what it looks like) or wrong.
            DamagedCheckpointError: parts of a tensor are missing or do not fit together.
        """
        from reshard.checkpoint.canonical import normalize

        found = normalize(self.contents, hints, self.url)
        state = {fqn: {name: _lazy(value) for name, value in of.items()} for fqn, of in found.state.items()}
        groups = [{name: _read_value(value) for name, value in group.items()} for group in found.groups]
        result = Normalized(model={fqn: LazyTensor(tensor) for fqn, tensor in found.model.items()})
        result["optim"] = {"state": state, "param_groups": groups}
        result.notes = tuple(found.notes)
        return result

    def canonical(self, hints: Mapping[str, Any] | None = None, *, model_only: bool = False) -> Checkpoint:
        """The same as a checkpoint, to be loaded, planned, compared and converted: keys are "model.<fqn>",
        "optim.state.<fqn>.<name>" and "optim.param_groups.<i>.<name>"; with `model_only`, bare parameter names.

        Raises as `normalized` does.
        """
        from reshard.checkpoint.canonical.contents import canonical_contents

        return Checkpoint(canonical_contents(self.contents, hints, self.url, model_only=model_only), self.url)

    def __repr__(self) -> str:
        return f"Checkpoint({self.url!r}, {self.format}, {len(self)} tensors)"


def stored_layout(stored: StoredTensor) -> TensorLayout:
    """The saved mesh and placements where known, else the boxes of the chunks under the rank that wrote them."""
    if stored.layout is not None:
        return stored.layout
    numbers: dict[int | str, int] = {}
    boxes: dict[int, list[Box]] = {}
    ints = all(isinstance(chunk.owner, int) for chunk in stored.chunks)
    for chunk in stored.chunks:
        rank = int(chunk.owner) if ints else numbers.setdefault(chunk.owner, len(numbers))
        boxes.setdefault(rank, []).append(chunk.box)
    return TensorLayout.from_boxes(stored.spec, boxes)


def _similar(name: str, known: Mapping[str, Any]) -> str:
    import difflib

    close = difflib.get_close_matches(str(name), list(known), n=3, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return f"it has {len(known)} tensors" + (f", such as {next(iter(known))!r}" if known else "")


def open(path: str | os.PathLike[str] | Storage) -> Checkpoint:
    """Open a checkpoint of any known format: a folder, a single file, or a URL of either.

    Reads the metadata only. Nothing in the checkpoint is executed: see `reshard.formats.pickles`.

    Raises:
        CheckpointNotFoundError: there is nothing at `path`.
        FormatError: the files are of no known format (the message says what was looked for), or of several.
        DamagedCheckpointError: the metadata is unreadable or contradicts itself.
        UnsafeDataError: a pickle asks for something that could run code.
    """
    contents, url = open_contents(path)
    return Checkpoint(contents, url)
