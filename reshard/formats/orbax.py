"""Checkpoints of Orbax (JAX): zarr arrays, in separate files or in one OCDBT store, read through
tensorstore.

`_METADATA` is the tree: it says which path is an array, a scalar, text, None, or an empty
container. Chunks are compressed, so each is read in full.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from planners.errors import PlanError
from planners.geometry.box import Box, Shape
from planners.geometry.byte_ranges import Window
from planners.geometry.layout import TensorSpec
from planners.units import format_some
from reshard.errors import CorruptCheckpointError, FormatError, framework
from reshard.formats.canonical import Canonical, Hints
from reshard.formats.format import Format, as_shape
from reshard.state import KeyPath, key_of
from reshard.storage.base import Listing, Storage
from reshard.storage.local import LocalStorage
from reshard.stored.checksums import NO_CHECKSUMS
from reshard.stored.contents import Contents, ContentsBuilder, merge
from reshard.stored.source import DecodedSource, Files
from reshard.stored.tensor import Extent, StoredChunk, StoredTensor

_NAME = "orbax"

_TREE = "_METADATA"
_STRINGS = "_strings.json"
_EMPTY = {"Tuple": "tuple", "List": "list", "Dict": "dict", "NamedTuple": "tuple"}
_SEQUENCE_KEY = 1
_JSON_ITEM = re.compile(r"([^/]+)/(?:metadata|metrics)")


def detect(storage: Storage, names: Listing) -> bool:
    """Return True if there is a tree at the top, or in items of a step that Orbax's manager wrote."""
    return bool(_folders(names))


def _folders(names: Listing) -> list[str]:
    """Return the folders that contain a tree, "" or ending in "/"."""
    if _TREE in names:
        return [""]
    items = sorted(n.removesuffix(_TREE) for n in names if n.endswith(f"/{_TREE}") and n.count("/") == 1)
    return items if "_CHECKPOINT_METADATA" in names else []


def open(files: Files) -> Contents:
    """Return the checkpoint. If several items have arrays, the keys of each begin with its name.

    Raises FormatError if the folder is not local, MissingPackageError if tensorstore is not
    installed, CorruptCheckpointError for an unreadable tree.
    """
    storage, names = files.storage, files.listed
    folders = _folders(names)
    if not isinstance(storage, LocalStorage):
        raise FormatError(f"{storage.url}: Orbax checkpoints are read from local folders only: copy it to one")
    for name in (name for name, nbytes in names.items() if not nbytes):
        storage.size(name)  # a named pipe is refused here; tensorstore would wait for its writer
    parts = [("" if len(folders) == 1 else folder[:-1], _open_item(storage, folder)) for folder in folders]
    plain = [(file, match[1]) for file in names if (match := _JSON_ITEM.fullmatch(file))] if folders != [""] else []
    found = {item: _json(storage, file) for file, item in plain if f"{item}/" not in folders}
    rest = {name.split("/")[0] for name in names if "/" in name} - {folder[:-1] for folder in folders} - found.keys()
    others = sorted(rest) if folders != [""] else []
    if not found and not others and len(parts) == 1:
        return parts[0][1]
    warnings = (f"not opened, neither arrays nor JSON: {format_some(others)}",) if others else ()
    return merge(_NAME, [*parts, ("", Contents({}, found, format=_NAME, warnings=warnings))])


def _open_item(storage: LocalStorage, folder: str) -> Contents:
    """Return the contents of the tree in one folder."""
    tree = _tree(storage, f"{folder}{_TREE}")
    driver = "zarr3" if tree.get("use_zarr3") else "zarr"
    stored = bool(tree.get("store_array_data_equal_to_fill_value"))
    root = _Root(storage, folder, bool(tree.get("use_ocdbt", True)), driver, stored)
    found = ContentsBuilder(f"{storage.url}/{folder}{_TREE}")
    for path, kind, written in _entries(tree, f"{storage.url}/{folder}{_TREE}"):
        if kind in _EMPTY:
            found.containers[path] = _EMPTY[kind]
            continue
        key = found.claim(path)
        if kind == "None":
            found.add_object(key, lambda: None)
        elif kind == "string":
            found.add_object(key, partial(_string, storage, f"{folder}{_STRINGS}", key))
        else:
            found.add_tensor(key, partial(_tensor, key, root, written))
    unknown = "a chunk without a file is all zeros, and a lost file of a chunk looks the same"
    return found.build(_NAME, warnings=() if root.ocdbt or stored else (f"{folder}{_TREE}: {unknown}",))


def _json(storage: Storage, file: str) -> Any:
    """Return settings, metrics, positions of a data loader, or the text of a tree."""
    try:
        return json.loads(storage.read(file))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{storage.url}/{file} is not JSON: {error}") from None


def _string(storage: Storage, file: str, key: str) -> str:
    """Return a value from the file that has all text of an item. A "/" in a name separates levels there."""
    found = _json(storage, file)
    try:
        for part in key.split("/"):
            found = found[part]
    except (KeyError, TypeError):
        found = None
    if not isinstance(found, str):
        raise CorruptCheckpointError(f"{storage.url}/{file} does not have the text {key!r}, which {_TREE} lists")
    return found


def _tree(storage: Storage, file: str) -> dict[str, Any]:
    try:
        tree = json.loads(storage.read(file))
        if not isinstance(tree["tree_metadata"], dict):
            raise TypeError("tree_metadata is not an object")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{storage.url}/{file} is not a tree of an Orbax checkpoint: {error}") from None
    return dict(tree)


def _entries(tree: Mapping[str, Any], where: str) -> Iterator[tuple[KeyPath, str, Shape | None]]:
    """Yield the path and kind of each value, and an array's shard shape if known."""
    for key, entry in tree["tree_metadata"].items():
        try:
            path = tuple(
                int(part["key"]) if part["key_type"] == _SEQUENCE_KEY else str(part["key"])
                for part in entry["key_metadata"]
            )
            value = entry["value_metadata"]
            written = value.get("write_shape")
            part = None if written is None else as_shape(written)
            yield path, str(value["value_type"]), part
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptCheckpointError(f"{where}: the entry {key} cannot be read: {error!r}") from None


@dataclass(frozen=True)
class _Root:
    """Where the arrays are."""

    storage: LocalStorage
    folder: str
    ocdbt: bool
    driver: str
    all_stored: bool
    """Whether chunks with nothing but the fill value are stored, too, so that none may be missing."""
    kept: DecodedSource.Kept = field(default_factory=DecodedSource.Kept)

    @property
    def label(self) -> str:
        return f"{self.storage.url.rstrip('/')}/{self.folder}"

    def array(self, key: str) -> Any:
        """Return the array, opened by tensorstore."""
        with framework("tensorstore>=0.1.68", f"{self.label}: "):
            import tensorstore
        # not a URL, in which "%", "#", and "?" of names would be more than letters
        base: dict[str, Any] = {"driver": "file", "path": f"{self.storage.root / self.folder}/"}
        kvstore = {**base, "path": f"{base['path']}{key}/"}
        if self.ocdbt:
            kvstore = {"driver": "ocdbt", "base": base, "path": f"{key}/"}
        spec = {"driver": self.driver, "kvstore": kvstore, "fill_missing_data_reads": not self.all_stored}
        try:
            return tensorstore.open(spec, open=True, read=True).result()
        except (ValueError, OSError, TypeError) as error:
            raise CorruptCheckpointError(f"{self.label}: the array {key!r} cannot be opened: {error}") from None


def _tensor(key: str, root: _Root, written: Shape | None) -> StoredTensor:
    array = root.array(key)
    if written is not None and not _is_divided(tuple(array.shape), written):
        what = f"of shape {list(array.shape)} has no parts of shape {list(written)}"
        raise CorruptCheckpointError(f"{root.label}: the array {key!r} {what}, as {_TREE} says")
    try:
        spec = TensorSpec(key, tuple(array.shape), array.dtype.name)
    except PlanError:
        raise FormatError(
            f"{root.label}: the array {key!r} has dtype {array.dtype.name!r}, which has no torch dtype"
        ) from None
    grid = tuple(array.chunk_layout.read_chunk.shape or array.shape)
    # with zarr 3's sharding, a file has several chunks
    files = tuple(array.chunk_layout.write_chunk.shape or array.shape)
    present = {bytes(k).decode() for k in array.kvstore.list().result()} if root.all_stored else None
    chunks, wanted = [], set()
    for number, box in enumerate(_cells(tuple(array.shape), grid)):
        label, window = f"{root.label} (array {key!r}, {box})", Window.row_major(0, box.sizes, spec.itemsize)
        wanted.add(file := _chunk_key(root.driver, box, files))
        if present is not None and file not in present:
            raise CorruptCheckpointError(f"{label} is missing")  # tensorstore would return zeros
        source = _ArrayChunk(label, partial(_read_chunk, label, array, box), root.kept, (root.label, key, box))
        chunks.append(StoredChunk(box, Extent(source, window), number))
    stored = {name for name in present or () if name[0] in "c0123456789"}
    if beyond := sorted(stored - wanted):
        what = f"has the chunk {beyond[0]!r} beyond its shape {list(spec.shape)}"
        raise CorruptCheckpointError(f"{root.label}: the array {key!r} {what}")
    return StoredTensor(spec, tuple(chunks))


def _is_divided(shape: Shape, part: Shape) -> bool:
    """Return True if an array can be divided into equal parts of this shape, such as those of a
    mesh's devices."""
    if len(shape) != len(part):
        return False
    return all(n == p or (p and n % p == 0) for n, p in zip(shape, part))


def _chunk_key(driver: str, box: Box, grid: Shape) -> str:
    """Return the key of a chunk within its array, by zarr's rules."""
    index = [str(offset // max(size, 1)) for offset, size in zip(box.offsets, grid)]
    if driver == "zarr3":
        return "/".join(["c", *index])
    return ".".join(index) or "0"


def _cells(shape: Shape, cell: Shape) -> Iterator[Box]:
    """Yield the boxes of a regular grid. Those at the edge are smaller."""
    if not shape:
        yield Box((), ())
        return
    for start in range(0, shape[0], max(cell[0], 1)):
        size = min(cell[0], shape[0] - start)
        for rest in _cells(shape[1:], cell[1:]):
            yield Box((start, *rest.offsets), (size, *rest.sizes))


class _ArrayChunk(DecodedSource):
    """One chunk of an array. Its size is known from its box."""

    def check(self, start: int, stop: int) -> None:
        """Do nothing, because the box determines the number of bytes."""


def _read_chunk(label: str, array: Any, box: Box) -> memoryview:
    """Return the elements of one chunk, decompressed."""
    import numpy as np

    try:
        data = np.ascontiguousarray(array[box.slices].read().result())
    except (ValueError, OSError) as error:
        raise CorruptCheckpointError(f"{label} cannot be read: {error}") from None
    return memoryview(cast("Any", data.reshape(-1).view(np.uint8))).toreadonly()


# Canonical names.


_MODEL = "params"
_OPTAX = {"mu": "exp_avg", "nu": "exp_avg_sq", "trace": "momentum_buffer"}
"""Moments of optax and their names in torch. A `count` beside them is the number of steps."""
_OPTIMIZER = ("opt_state", "opt", "optimizer", "optim")


def normalize(contents: Contents, hints: Hints, what: str) -> Canonical:
    """Return the model and optimizer of a tree of full JAX arrays.

    The model's names are the dotted names under `params`. Optimizers of optax mirror the model's
    tree, so states are the arrays whose path ends with a parameter's path. Moments get torch's
    names.

    A tree without `params` is a model. Nested levels of `params`, as Flax creates, are removed.
    """
    del hints, what
    result = Canonical()
    paths = {name: contents.path_of(name) for name in contents.tensors}
    split = any(path[0] == _MODEL for path in paths.values())
    by_path: dict[KeyPath, str] = {}
    for name, path in paths.items():
        if split and path[0] != _MODEL:
            continue
        short = path
        while split and len(short) > 1 and short[0] == _MODEL:
            short = short[1:]
        by_path[short] = key_of(short)
        result.add_model(key_of(short), contents.tensors[name], name)
    inside = {name: path for name, path in paths.items() if split and path[0] in _OPTIMIZER}
    counts = {path[:-1]: contents.tensors[name] for name, path in inside.items() if path[-1] == "count"}
    counted: set[KeyPath] = set()
    for name, path in inside.items():
        found = next((i for i in range(1, len(path)) if path[i:] in by_path), None)
        if found is None:
            continue
        at = next(i for i in reversed(range(found)) if isinstance(path[i], str) and path[i] != _MODEL)
        fqn, state = by_path[path[found:]], str(path[at])
        result.add_state(fqn, _OPTAX.get(state, state), contents.tensors[name])
        if state in _OPTAX and path[:at] in counts and "step" not in result.state[fqn]:
            result.add_state(fqn, "step", counts[path[:at]])
            counted.add((*path[:at], "count"))
    for name, path in inside.items():
        if path not in counted and not any(path[i:] in by_path for i in range(1, len(path))):
            result.notes.append(f"{name!r} belongs to no parameter: it is omitted")
    return result


def _beside(contents: Contents) -> Iterator[str]:
    held = (*contents.tensors, *contents.objects)
    top = {key: contents.path_of(key)[0] for key in held}
    if _MODEL in top.values():  # otherwise, all of the tree is the model
        yield from (key for key in held if top[key] != _MODEL and top[key] not in _OPTIMIZER)


FORMAT = Format(
    _NAME,
    checksums=NO_CHECKSUMS,
    detect=detect,
    open=open,
    is_composite=True,
    beside=_beside,
)
