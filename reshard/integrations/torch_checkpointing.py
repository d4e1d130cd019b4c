"""torch_checkpointing's checkpoint manager on reshard. Change one import:

    from reshard.integrations.torch_checkpointing import CheckpointManager, ItemSpec

It writes native checkpoints, or torch_checkpointing's own with `Config(format="torch_checkpointing")`,
and loads from any format. Everything is resharded, whether a resharder is declared or not.
"""

from __future__ import annotations

import functools
import operator
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from reshard.api.convert import convert
from reshard.api.load import load
from reshard.api.save import async_save, save
from reshard.checkpoint import Checkpoint, open as open_checkpoint
from reshard.errors import KeyMismatchError, OptionError, framework
from reshard.live.state import put_at
from reshard.live.tensors import is_sharded, is_tensor, this_rank
from reshard.live.tree import leaves_of, map_leaves, restore_types
from reshard.ranks.group import Group
from reshard.state import KeyPath, key_of
from reshard.stored.tensor import whole

with framework("torch-checkpointing"):
    import torch_checkpointing as _theirs
    from torch_checkpointing import ItemSpec
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

__all__ = ["CheckpointManager", "ItemSpec"]


_FORMATS = ("native", "torch_checkpointing")
_RANK = re.compile(r"rank_\d+")
"""Keys of a value that differs between ranks, also in torch_checkpointing's files as reshard reads them."""
_OF_RANK = re.compile(r"(.*?)\.rank_(\d+)(?:\.|$)")
_MISSING = object()


@dataclass(kw_only=True, slots=True)
class ItemsOptions(_theirs.CheckpointManager.Config):
    """torch_checkpointing's options, and options that it does not have."""

    format: str = "native"
    """The format to write: `"native"` or `"torch_checkpointing"`. With the latter, `save` always
    returns after the files are written."""
    per_rank: Collection[str] = ()
    """Items whose values differ between ranks on purpose, such as random states. Other items must
    be equal on all ranks."""

    def __post_init__(self) -> None:
        if self.format not in _FORMATS:
            raise OptionError(f"format must be one of {', '.join(map(repr, _FORMATS))}, got {self.format!r:.80}")
        if self.per_rank and self.format != "native":
            raise OptionError("per_rank needs format='native': what is converted is of one rank")
        if type(self.storage_config) not in (type(None), LocalFileSystemStorageConfig):
            raise OptionError(f"storage_config={self.storage_config!r}: leave it out, and pass a URL as checkpoint_id")
        if self.pre_finalize_callback or self.finalize_callback:
            raise OptionError("finalize callbacks are not called: wait for what save returns")
        specs = {**self.items, "(default)": self.default}
        if placed := sorted(key for key, spec in specs.items() if spec is not None and spec.layout is not None):
            raise OptionError(f"items {placed} have a layout: files have the names of the format")

    def build(self) -> ItemsManager:
        """Create the manager."""
        return ItemsManager(self)


class ItemsManager(_theirs.CheckpointManager):
    """A manager with the methods of torch_checkpointing's. All are collective except `lock`,
    `prewarm_staging`, and `close`."""

    Config = ItemsOptions

    def __init__(self, config: Any = None) -> None:
        """Create the manager, without the processes and threads of torch_checkpointing's.

        Raises OptionError for options without an effect here: layouts of items, callbacks, and
        other storages.
        """
        if not isinstance(config, ItemsOptions):  # torch_checkpointing's own class, or None
            given = {} if config is None else {one.name: getattr(config, one.name) for one in fields(config)}
            config = ItemsOptions(**given)
        self._config: ItemsOptions = config
        self._write_future: Future[Any] | None = None
        self._closed = False

    def save(self, checkpoint_id: str, checkpoint: Mapping[str, Any]) -> Future[Any] | None:
        """Save items. Returns a future that is done when the checkpoint is complete, or None after
        a synchronous save."""
        state = {key: self._to_save(key, value) for key, value in self._values(checkpoint).items()}
        is_sync, pending = isinstance(self._config.save, SyncCheckpointSaverConfig), None
        if self._config.format != "native":
            _write_theirs(state, checkpoint_id)
        elif is_sync:
            save(state, checkpoint_id, overwrite=True)
        else:
            pending = async_save(state, checkpoint_id, overwrite=True)
        if is_sync:
            return None
        waiter = ThreadPoolExecutor(1)
        self._write_future = waiter.submit(lambda: pending and pending.result())
        waiter.shutdown(wait=False)
        return self._write_future

    def load(
        self,
        checkpoint_id: str | os.PathLike[str],
        into: Mapping[str, Any] | None = None,
        *,
        map_location: Any = None,
        strict: bool = False,
        metadata_format: Any = None,
    ) -> Mapping[str, Any]:
        """Load items of any format in place, and return them.

        Args:
            into: the items to fill. Items that are None are returned as plain values and full
                tensors. Without `into`, all items of the config are returned so.
            map_location: device of tensors that are returned in full.
            strict: raise if a key of `into` is not in the checkpoint.

        With `strict`, raises KeyMismatchError before anything is filled. Also raises the errors of
        `reshard.load`.
        """
        if metadata_format is not None:
            raise OptionError("metadata_format: reshard.load fills a model from Hugging Face's files")
        if not isinstance(map_location, str | torch.device | None):
            raise OptionError(f"map_location must be a device or its name, got {map_location!r:.80}")
        if into is None and not self._config.items:
            raise ValueError("load needs into=, or items in its config, to know what to read")
        values = self._values(dict.fromkeys(self._config.items) if into is None else into)
        state = {key: value for key, value in values.items() if value is not None}
        with Group().together("items"):
            checkpoint = open_checkpoint(checkpoint_id)
            own = _of_ranks(values, checkpoint)
            items = [key for key in values if values[key] is None or any(_is_in(name, key) for name in own)]
            nest = _of_this_rank({key: value for key, value in checkpoint.nested().items() if key in items})
            read = {key: whole(nest[key]) for key in nest if key not in state}
            if strict and (lost := sorted(values.keys() - state.keys() - read.keys())):
                raise KeyMismatchError(f"{checkpoint_id} has no item {', '.join(lost)}")
        _fill(state, checkpoint, own, nest, strict)
        found = {**state, **map_leaves(lambda _, leaf: leaf.to(device=map_location) if is_tensor(leaf) else leaf, read)}
        return {key: found[key] for key in values if key in found}

    def prewarm_staging(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: the second save reuses the memory of the first one."""
        self._values(checkpoint)

    def lock(self) -> AbstractContextManager[None]:
        """Do nothing: `save` has already copied the values when it returns."""
        return nullcontext()

    def close(self) -> None:
        """Wait for the last save."""
        self._closed = True
        if self._write_future is not None:
            self._write_future.result(timeout=self._config.save.wait_timeout_secs)

    def _values(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        if self._closed:
            raise RuntimeError("this CheckpointManager is closed")
        specs = self._config.items
        if lacking := sorted(key for key, spec in specs.items() if spec.required and key not in payload):
            raise KeyError(f"items {lacking} of the config are required: pass a value for each")
        if self._config.default is None and (unknown := sorted(payload.keys() - specs.keys())):
            raise KeyError(f"items {unknown} are not in the config, which has no default: add them to its items")
        return dict(payload)

    def _to_save(self, key: str, value: Any) -> Any:
        if key not in self._config.per_rank:
            return value
        return map_leaves(lambda _, leaf: leaf if is_sharded(leaf) else {f"rank_{this_rank()}": leaf}, value)


def _is_in(name: str, item: str) -> bool:
    return f"{name}.".startswith(f"{item}.")


def _of_ranks(items: Iterable[str], checkpoint: Checkpoint) -> set[str]:
    """Return the keys in `items` under which each rank saved its own value."""
    saved = (_OF_RANK.match(name) for name in (*checkpoint, *checkpoint.objects))
    found = [match for match in saved if match and any(_is_in(match[1], item) for item in items)]
    keys = {match[1] for match in found}
    if found and this_rank() not in {int(match[2]) for match in found}:
        raise KeyMismatchError(
            f"{', '.join(sorted(keys))}: each rank saved a value of its own, but there was no rank {this_rank()}. "
            "Leave it out of into="
        )
    return keys


def _fill(state: dict[str, Any], checkpoint: Checkpoint, own: set[str], nest: Any, strict: bool) -> None:
    """Load in place. For items in `nest`, the tensors in `own` and all values that are not tensors
    come from this rank's own part."""
    common = {key: value for key, value in state.items() if key not in nest}
    alone, units = dict[str, Any](), leaves_of({key: state[key] for key in nest if key in state}, _is_unit)
    for path, unit in units.items():
        key = key_of(path)
        if is_tensor(unit):
            (alone if key in own else common)[key] = unit
        else:
            units[path] = restore_types(_inside(nest, path), unit)
    if strict:
        missing = load(common, checkpoint, strict=False, dry_run=True).missing
        if lost := [*missing, *(key_of(path) for path, value in units.items() if value is _MISSING)]:
            raise KeyMismatchError(f"missing from the checkpoint: {', '.join(lost)}")
    load(common, checkpoint, strict=False)
    if alone:
        names = {key: f"{key}.rank_{this_rank()}" for key in alone}
        load(alone, checkpoint, mapping=names, strict="subset", alone=True)
    filled = {**common, **alone}
    for path, value in units.items():
        if value is not _MISSING:
            put_at(state, path, filled.get(key_of(path), value))
    state |= {key: filled[key] for key in state if key in filled}


def _is_unit(value: Any) -> bool:
    """Return True for values that are replaced as a whole: plain values, sequences of them, and
    empty dicts."""
    return not (isinstance(value, Mapping) and value) and not any(map(is_tensor, leaves_of(value).values()))


def _inside(nest: Any, path: KeyPath) -> Any:
    try:
        return functools.reduce(operator.getitem, path, nest)
    except (IndexError, KeyError, TypeError):
        return _MISSING


def _of_this_rank(nest: Any) -> Any:
    """Replace per-rank values such as `{"a": {"rank_0": 1}}` by this rank's value. Omit values that
    this rank does not have."""
    if type(nest) in (list, tuple):
        found = map(_of_this_rank, nest)
        return type(nest)(inner for inner in found if inner is not _MISSING)
    if not isinstance(nest, dict):
        return nest
    if nest and all(isinstance(key, str) and _RANK.fullmatch(key) for key in nest):
        return nest.get(f"rank_{this_rank()}", _MISSING)
    chosen = {key: _of_this_rank(inner) for key, inner in nest.items()}
    return {key: inner for key, inner in chosen.items() if inner is not _MISSING}


def _write_theirs(state: dict[str, Any], folder: str) -> None:
    """Save each rank's part, and write torch_checkpointing's files from it. Collective."""
    group = Group()
    with group.together("torch_checkpointing's files"):
        if "://" in os.fspath(folder):
            raise OptionError(
                f"format='torch_checkpointing' needs a local folder, got {folder!r:.80}: use format='native'"
            )
        place = Path(folder).absolute()
        name = group.share(f".{place.name}.parts-{uuid4().hex}".encode() if group.rank == 0 else None)
        parts = place.with_name(name.decode())
        try:
            save(state, parts)
            convert(parts, place, format="torch_checkpointing", overwrite=True)
        finally:
            if group.rank == 0 and parts.exists():
                shutil.rmtree(parts)


CheckpointManager = ItemsManager
"""torch_checkpointing's name of the class. Not to be confused with `reshard.CheckpointManager`."""
