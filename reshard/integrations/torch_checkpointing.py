"""torch_checkpointing's checkpoint manager on reshard. Change one import:

    from reshard.integrations.torch_checkpointing import CheckpointManager, ItemSpec

It writes native checkpoints, or torch_checkpointing's own with `Config(format="torch_checkpointing")`,
and loads from any format. Everything is resharded, whether a resharder is declared or not.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Mapping
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
from reshard.live.tensors import is_sharded, this_rank
from reshard.live.tree import leaves_of, map_leaves
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
"""The last part of the key of a value that differs from rank to rank, also in what our reader makes of their files."""


@dataclass(kw_only=True, slots=True)
class ItemsOptions(_theirs.CheckpointManager.Config):
    """torch_checkpointing's options, and options that it does not have."""

    format: str = "native"
    """Of what is written: `"native"` or `"torch_checkpointing"`, which is written before `save` returns."""
    per_rank: Collection[str] = ()
    """Items whose values differ from rank to rank, such as random states. Other items must be equal on all ranks."""

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
    """A manager with the methods of torch_checkpointing's. All are collective except `lock`, `prewarm_staging`, and
    `close`."""

    Config = ItemsOptions

    def __init__(self, config: Any = None) -> None:
        """Create the manager, without the processes and threads of torch_checkpointing's.

        Raises OptionError for what would be left undone: layouts of items, callbacks, other storages.
        """
        if not isinstance(config, ItemsOptions):  # torch_checkpointing's own, or none
            given = {} if config is None else {one.name: getattr(config, one.name) for one in fields(config)}
            config = ItemsOptions(**given)
        self._config: ItemsOptions = config
        self._write_future: Future[Any] | None = None
        self._closed = False

    def save(self, checkpoint_id: str, checkpoint: Mapping[str, Any]) -> Future[Any] | None:
        """Save items. Returns a future that ends when the checkpoint is complete, or None after a
        synchronous save."""
        state = {key: self._to_save(key, value) for key, value in self._values(checkpoint).items()}
        is_sync = isinstance(self._config.save, SyncCheckpointSaverConfig)
        if self._config.format == "native" and not is_sync:
            pending = async_save(state, checkpoint_id, overwrite=True)
            waiter = ThreadPoolExecutor(1)
            self._write_future = waiter.submit(pending.result)
            waiter.shutdown(wait=False)
            return self._write_future
        if self._config.format == "native":
            save(state, checkpoint_id, overwrite=True)
        else:
            _write_theirs(state, checkpoint_id)
        if is_sync:
            return None
        self._write_future = Future()
        self._write_future.set_result(None)
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
            into: the items to fill. One that is None, or all that the config names without `into`,
                are returned as plain values and full tensors.
            map_location: device of tensors that are returned in full.
            strict: raise if a key of `into` is not in the checkpoint.

        Raises KeyMismatchError with `strict`, before anything is filled; as `reshard.load` does.
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
            nest: Any = _of_this_rank(checkpoint.nested()) if len(state) < len(values) else {}
            read = {key: whole(nest[key]) for key, value in values.items() if value is None and key in nest}
            if strict and (lost := sorted(values.keys() - state.keys() - read.keys())):
                raise KeyMismatchError(f"{checkpoint_id} has no item {', '.join(lost)}")
            own = _own_places(state, checkpoint)
        _fill(state, checkpoint, own, strict)
        found = {**state, **map_leaves(lambda _, leaf: _moved(leaf, map_location), read)}
        return {key: found[key] for key in values if key in found}

    def prewarm_staging(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: the second save reuses the memory of the first."""
        self._values(checkpoint)

    def lock(self) -> AbstractContextManager[None]:
        """Do nothing: `save` has copied the values when it returns."""
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


def _own_places(state: dict[str, Any], checkpoint: Checkpoint) -> dict[KeyPath, str]:
    """Find the values of a state that differ from rank to rank, and the names of those that this rank saved."""
    names = {*checkpoint, *checkpoint.objects}
    differing = {name.rpartition(".")[0] for name in names if _RANK.fullmatch(name.rpartition(".")[2])}
    own = {path: f"{key_of(path)}.rank_{this_rank()}" for path in leaves_of(state) if key_of(path) in differing}
    if lacking := sorted(key_of(path) for path, name in own.items() if name not in names):
        raise _lacks(lacking)
    return own


def _fill(state: dict[str, Any], checkpoint: Checkpoint, own: Mapping[KeyPath, str], strict: bool) -> None:
    """Load in place. Values in `own` are loaded by this rank alone."""
    sources = {key_of(path): name for path, name in own.items()}
    if strict:
        report = load(state, checkpoint, strict=False, dry_run=True)
        if lost := [key for key in report.missing if key not in sources]:
            raise KeyMismatchError(f"missing from the checkpoint: {', '.join(lost)}")
    load(state, checkpoint, strict=False)
    if not own:
        return
    holders = {path: _holder(state, path) for path in own}
    mine = {key_of(path): holder[path[-1]] for path, holder in holders.items()}
    load(mine, checkpoint, mapping=sources, strict="subset", alone=True)
    for path, holder in holders.items():
        holder[path[-1]] = mine[key_of(path)]


def _holder(nest: Any, path: KeyPath) -> Any:
    for step in path[:-1]:
        nest = nest[step]
    return nest


def _of_this_rank(nest: Any) -> Any:
    """Select this rank's value among per-rank values such as `{"a.rank_0": 1}` or `{"a": {"rank_0": 1}}`."""
    if type(nest) in (list, tuple):
        return type(nest)(map(_of_this_rank, nest))
    if not isinstance(nest, dict):
        return nest
    found, mine = {}, f"rank_{this_rank()}"
    differing = {
        key: key.rpartition(".") for key in nest if isinstance(key, str) and _RANK.fullmatch(key.rpartition(".")[2])
    }
    if differing and all(not name for name, *_ in differing.values()):
        if mine not in nest:
            raise _lacks(["a value"])
        return nest[mine]
    for key, inner in nest.items():
        name, _, last = differing.get(key, (key, "", mine))
        if last == mine:
            found[name] = _of_this_rank(inner)
    if lacking := sorted({name for name, *_ in differing.values()} - found.keys()):
        raise _lacks(lacking)
    return found


def _lacks(names: list[str]) -> KeyMismatchError:
    return KeyMismatchError(
        f"{', '.join(names)}: each rank saved a value of its own, but there was no rank {this_rank()}. "
        "Leave it out of into="
    )


def _moved(leaf: Any, device: str | torch.device | None) -> Any:
    return leaf.to(device) if isinstance(leaf, torch.Tensor) and device is not None else leaf


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
"""As torch_checkpointing calls it; `reshard.CheckpointManager` is another one."""
