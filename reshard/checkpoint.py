"""`open(path)`: opens any checkpoint lazily, without a model, GPU, or process group."""

from __future__ import annotations

import logging
import math
import os
import re
import sys
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

import torch

from planners.geometry.arrays import grouped
from planners.geometry.layout import StateLayout, TensorLayout
from planners.units import format_bytes, format_count, format_some
from reshard.arguments import check_options, globs_of, no_attribute, renamed
from reshard.errors import (
    CheckpointError,
    CheckpointReplacedError,
    CorruptCheckpointError,
    KeyMismatchError,
    OptionError,
    PlanError,
    ReshardError,
    did_you_mean,
    format_names,
)
from reshard.formats.detect import open_contents
from reshard.formats.table import find_format
from reshard.live.plain_data import represent
from reshard.live.tree import unflatten
from reshard.native.manifest import LinkedRecord
from reshard.native.reader import NativeFacts, Share, is_replaced
from reshard.state import IntKey, KeyPath, count_objects, empty_sequences, is_selected, key_of, value_path
from reshard.storage.base import AnyPath, Storage
from reshard.storage.opening import StoragePath
from reshard.stored.contents import IS_PER_RANK, Contents, LazyMapping
from reshard.stored.tensor import LazyChunks, LazyTensor, StoredTensor, check_cover, read_value

if TYPE_CHECKING:
    from planners.reports.checkpoint_pages import Histogram, SavedStep

__all__ = [
    "Checkpoint", "CheckpointSource", "LazyTensor", "NormalizedState", "all_names", "chosen", "log_skipped",
    "log_unchecked", "objects_of", "open", "open_among", "open_damaged", "ranks_that_saved", "readable",
    "refuse_replaced", "save_of", "stored_layout", "unless_replaced",
]  # fmt: skip


_log = logging.getLogger("reshard")

_MOST_HISTOGRAMS = 512


_OF_OTHERS = {
    "state_dict load": ".nested() returns the nested state, lazily",
    "tensors get_tensor get_slice read": "index it: checkpoint[name][...], checkpoint[name][:4]",
    "shape dtype": "each tensor has its own: checkpoint[name].shape, checkpoint[name].dtype",
    "names tensor_names": "iterate over it: list(checkpoint)",
    "path root": ".url says where it is",
    "model optim optimizer": ".normalized() returns a dict with 'model' and 'optim'",
    "step epoch": ".objects has all values that are not tensors, by name",
    "load_state_dict": "reshard.load(state_dict, path) fills a state dict",
    "metadata": ".layout has shapes, dtypes, and who holds what",
}
"""Names that other libraries use, and what to write here instead."""


@renamed(left_out="omitted")
class NormalizedState(dict[str, Any]):
    """The result of `Checkpoint.normalized`: a dict with "model" and "optim". For calls that need
    a checkpoint, `Checkpoint.canonical` returns the same state as a `Checkpoint`."""

    _INSTEAD: ClassVar[str] = (
        "call .canonical(hints=...) in place of .normalized(hints=...): it returns the same state as a Checkpoint"
    )
    """The hint of errors where a checkpoint is expected."""
    notes: tuple[str, ...] = ()
    """What could not be converted, such as padding that could not be removed and incomplete lists."""
    omitted: tuple[str, ...] = ()
    """Keys of values that belong to neither the model nor the optimizer, such as an epoch."""


class StateMapping(Protocol):
    """Gives a checkpoint other names and shapes, as a `reshard.mapping.Mapping` does."""

    def apply(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with its new names."""


class Checkpoint(Mapping[str, LazyTensor]):
    """A read-only mapping from keys to lazy tensors, and everything else that a checkpoint
    contains.

    Keys, shapes, and dtypes come from the metadata. Only indexing a tensor reads data. You can also
    look up the other keys of tied tensors (`aliases`), but iteration omits them."""

    def __init__(self, contents: Contents, url: str, asked: AnyPath | None = None) -> None:
        """`asked`: the path that the user passed."""
        self.contents = contents
        self.url = url
        for made in (contents.tensors, contents.objects):
            if isinstance(made, LazyMapping):
                made.where = url
        self.format = contents.format
        """Name of the format, such as "dcp"."""
        self.objects = contents.objects
        """All values that are not tensors, by key, as plain data. A value of an unknown class is a
        `Record`: its class name, arguments, and state."""
        self.aliases = contents.aliases
        """Other keys of tied tensors that are stored once: other key -> key of the stored tensor."""
        self.fingerprints = contents.fingerprints
        """The saved fingerprints of the tensors, by key, or None."""
        self.warnings = contents.warnings
        """One text for each value that was ignored or could not be represented."""
        self.run = os.fspath(asked) if asked is not None and os.fspath(asked) != url else ""
        """The folder of the run in which the checkpoint was found. Empty if it was opened by its own
        path."""
        # the mappings and hints that were applied to the checkpoint at `url`, or ""
        self.derivation = ""
        self._whole: Checkpoint | None = None
        """The checkpoint of which this is a selection."""

    def __getitem__(self, name: str) -> LazyTensor:
        """Return a lazy tensor. Raises KeyMismatchError, with similar keys, if there is no such tensor."""
        stored = self.contents.find(name)
        if stored is None:
            if name in self.objects:
                raise KeyMismatchError(f"{name!r} is an object: use checkpoint.objects[{name!r}]")
            what = IS_PER_RANK if name in self.contents.per_rank else _similar(name, self)
            raise KeyMismatchError(f"{self.url} has no tensor {name!r}: {what}")
        return LazyTensor(stored, self._refuse)

    def _refuse(self, error: CheckpointError) -> None:
        """Raise CheckpointReplacedError instead of a read error if a later save replaced this checkpoint."""
        refuse_replaced("open", self)

    def __contains__(self, name: object) -> bool:
        return name in self.contents.tensors or (name in self.aliases)

    def __iter__(self) -> Iterator[str]:
        return iter(self.contents.tensors)

    def __len__(self) -> int:
        return len(self.contents.tensors)

    @property
    def layout(self) -> StateLayout:
        """The layout of the stored tensors. It has the saved mesh and placements if the format records
        them. Otherwise, it has the boxes of the chunks, each under the rank that wrote it."""
        world = None if self._whole is None else self._whole.layout.world_size
        return StateLayout({name: stored_layout(self.contents.tensors[name]) for name in self}, world)

    @property
    def bytes_checked(self) -> int:
        """Bytes of elements that were read so far and compared with checksums."""
        return self.contents.checking.bytes_checked

    @property
    def bytes_unchecked(self) -> int:
        """Bytes of elements that were read so far and not compared with checksums: the format has
        no checksums, `check` is False, or a comparison would have to read more than twice the
        requested bytes (and at least 16 MiB)."""
        return self.contents.checking.bytes_unchecked

    @property
    def unchecked(self) -> str:
        """How much of the data read so far was not compared with checksums, in words. Empty if all
        was compared."""
        return self.contents.checking.words(self.bytes_unchecked, self.bytes_checked + self.bytes_unchecked)

    def problems(self, *, deep: bool = False) -> list[str]:
        """Return one text for each missing file, and for each tensor with missing elements or with
        chunks that overlap or extend past its bounds. Reads no tensor data.

        With `deep`, also check that the bytes of every chunk are there.
        """
        found = self.contents.problems()
        whole: set[Hashable] = set()
        for name in self:
            try:
                stored = self.contents.tensors[name]
                # equal for tensors whose chunks have the same boxes
                geometry = stored.found.geometry if isinstance(stored.found, LazyChunks) else None
                if geometry not in whole:
                    check_cover(stored)
                    whole |= {geometry} - {None}
                for chunk in stored.chunks if deep else ():
                    if not chunk.box.is_empty:
                        chunk.source.check(chunk.window.offset, chunk.window.stop)
            except CheckpointError as error:
                found.append(str(error))
        return found

    def nested(self) -> Any:
        """Return the state, nested as it was saved. Leaves are `LazyTensor`s and plain objects. A
        tied tensor appears under each of its keys."""
        leaves: dict[str, Any] = {**all_names(self), **self.objects}
        paths = self.contents.paths_in_order()
        return unflatten({path: leaves[key] for key, path in paths.items()}, self.contents.containers)

    def select(self, globs: str | Iterable[str], *more: str | Iterable[str]) -> Checkpoint:
        """Return the part of the checkpoint whose keys match a glob, to compare, plan, or
        convert it. Reads no tensor data. `reshard.verify` still checks all files of the
        checkpoint.

        Args:
            globs, more: globs, or lists of globs. `*` also matches dots. Globs that begin with `!`
                exclude keys.

        Raises KeyMismatchError if a glob matches no key or no key is left, and OptionError if
        there is no glob.
        """
        contents = self.contents
        extra = [alias for alias in self.aliases if alias not in contents.tensors]
        names = [*self, *extra, *self.objects, *contents.per_rank]
        wanted = globs_of(one for each in (globs, *more) for one in globs_of(each) or ()) or ()
        kept = chosen(names, wanted, self.url)
        heirs: dict[str, str] = {}  # stored key -> itself or, if it is not selected, its first selected alias
        for name in filter(kept.__contains__, (*self, *extra)):
            first = self.aliases.get(name, name)
            heirs.setdefault(first, first if first in kept else name)
        aliases = {name: heirs[first] for name, first in self.aliases.items() if name in kept and name != heirs[first]}
        tensors = {name: self[name].stored for name in self if name in kept}
        tensors |= {name: self[name].stored for name in heirs.values()}
        paths = {key: path for key, path in contents.paths.items() if key in kept}
        made = replace(
            contents,
            tensors=tensors,
            objects={key: value for key, value in self.objects.items() if key in kept},
            aliases=aliases,
            paths=paths,
            per_rank={key: values for key, values in contents.per_rank.items() if key in kept},
            left_out=tuple(key for key in contents.left_out if is_selected(key, wanted)),
            containers=contents.containers if len(kept) == len(names) else contents.containers_above(paths.values()),
        )
        part = Checkpoint(made, self.url)
        part.derivation = f"{self.derivation}{wanted}"
        part._whole = self
        return part

    def mapped(self, mapping: StateMapping) -> Checkpoint:
        """Return the checkpoint with other keys and shapes. Reads no tensor data.

        Args:
            mapping: rules from `reshard.mapping`, as in `Mapping([Rename("old", "new")])`.

        Returns:
            the checkpoint under the new keys. The mapping is applied as you read it.

        Raises:
            NormalizationError, PlanError: the rules do not fit the checkpoint.
            OptionError: `mapping` is a dict.
        """
        if isinstance(mapping, Mapping):
            raise OptionError("pass a reshard.mapping.Mapping, such as Mapping([Rename('old', 'new')]), not a dict")
        return mapping.apply(self)

    def normalized(self, hints: Mapping[str, Any] | None = None) -> NormalizedState:
        """Return the state with canonical names, regardless of the framework that wrote it.

        The result is a dict. You can inspect it, read its lazy tensors, and set a model from these. To
        load, plan, compare, or convert the state, call `canonical` instead.

            {"model": {fqn: LazyTensor},
             "optim": {"state": {fqn: {name: LazyTensor or value}}, "param_groups": [{..., "params": [fqn, ...]}]}}

        Prefixes of wrappers are removed. Stacks of layers and experts, and flat or bucketed
        optimizer shards, are split into parameters. Padding is removed. `.notes` of the result
        lists what could not be converted.

        Args:
            hints: facts that the checkpoint lacks. The page "Canonical names" lists them.

        Raises:
            NormalizationError: a hint is missing or wrong. The message names it and shows what it
                looks like.
            CorruptCheckpointError: parts of a tensor are missing or do not fit together.
        """
        from reshard.formats.normalize import normalize, without_name

        found = normalize(self.contents, hints, self.url)
        state = {
            fqn: {name: LazyTensor(it, self._refuse) if isinstance(it, StoredTensor) else it for name, it in of.items()}
            for fqn, of in found.state.items()
        }
        groups = [{name: read_value(value) for name, value in group.items()} for group in found.groups]
        result = NormalizedState(model={fqn: LazyTensor(tensor, self._refuse) for fqn, tensor in found.model.items()})
        result["optim"] = {"state": state, "param_groups": groups}
        result.notes, result.omitted = tuple(found.notes), without_name(self.contents)
        return result

    def canonical(self, hints: Mapping[str, Any] | None = None, *, model_only: bool = False) -> Checkpoint:
        """Return the same state as `normalized`, as a checkpoint that you can load, plan, compare, and
        convert.

        Its keys are "model.<fqn>", "optim.state.<fqn>.<name>", and "optim.param_groups.<i>.<name>",
        regardless of the names of the saved sections. With `model_only`, its keys are FQNs. It does
        not contain other values, such as an epoch. `.warnings` lists them.

        Raises the errors of `normalized`.
        """
        from reshard.formats.normalize import canonical_contents, without_name

        check_options(model_only=model_only)
        found = canonical_contents(self.contents, hints, self.url, model_only=model_only)
        if lost := () if model_only else without_name(self.contents):
            words = f"{format_names(lost)} of {self.url} belong to neither model nor optimizer: load them from there"
            found = replace(found, warnings=(*found.warnings, words), left_out=lost)
        made = Checkpoint(replace(found, checking=self.contents.checking, files=self.contents.files), self.url)
        made.derivation = f"{self.derivation}{hints, model_only}"
        return made

    def to_html(self, *, histograms: str = "", steps: Sequence[SavedStep] = ()) -> str:
        """Return a self-contained HTML page: names as a tree, the layout of each tensor as a
        picture, files, and problems. Notebooks display a checkpoint as this page.

        Args:
            histograms: a glob of the tensors whose values are shown, such as `"*.weight"`. At most
                512 of them are read, the first by name. The page says how many it omits.
            steps: the checkpoints of its run, to list them on the page.
        """
        from planners.reports.checkpoint_pages import SavedFile, Shown, checkpoint_page

        check_options(histograms=histograms)
        layout, contents, shown = self.layout, self.contents, readable(self)
        facts = contents.details(NativeFacts)
        files = [SavedFile(source.name, source.nbytes) for source in contents.files]
        if facts is not None:
            files = [SavedFile(f.name, f.nbytes, isinstance(f, LinkedRecord)) for f in facts.files.values()]
        named = [name for name in self if histograms and fnmatchcase(name, histograms)]
        named = [name for name in named if "_x2" not in str(self[name].dtype)]  # two values per element, such as float4
        total = sum(layout[name].spec.nbytes for name in layout)
        ranks = ranks_that_saved(self)
        left = f"values of {len(named) - _MOST_HISTOGRAMS:,} more tensors were not read for a histogram"
        return checkpoint_page(Shown(
            title=self.url,
            layout=layout,
            paths={name: [str(getattr(key, "value", key)) for key in path] for name, path in contents.paths.items()},
            values={
                **{name: f"= {represent(value):.60}" for name, value in objects_of(shown).items()},
                **{name: f"tied to {holder}, stored once" for name, holder in self.aliases.items()},
                **(own := contents.own_in_words()),
            },
            figures=[
                ("format", self.format), ("tensors", f"{len(self):,}"), ("size of tensors", format_bytes(total)),
                ("objects", f"{count_objects(contents):,}"),
                *([("per-rank values", f"{len(own):,}")] * bool(own)),
                *([] if ranks is None else [("ranks that saved", f"{ranks:,}")]),
                ("files", f"{len(files):,} ({format_bytes(sum(file.nbytes for file in files))})"),
            ],
            problems=shown.problems(),
            warnings=[*self.warnings, *([left] if len(named) > _MOST_HISTOGRAMS else [])],
            files=files,
            steps=steps,
            histograms={name: _histogram(self[name]) for name in named[:_MOST_HISTOGRAMS]},
        ))  # fmt: skip

    def _repr_html_(self) -> str:
        from planners.notebooks import framed

        return framed(self.to_html(), repr(self))

    if not TYPE_CHECKING:  # type checkers would accept any name

        def __getattr__(self, name: str) -> Any:
            meant = {each: text for names, text in _OF_OTHERS.items() for each in names.split()}
            for key in (*self, *self.objects) if "objects" in vars(self) else ():
                part = key.partition(".")[0]
                meant[part] = f".{'objects' if part in self.objects else 'nested()'}[{part!r}] has it"
            raise no_attribute(self, name, meant)

    def __repr__(self) -> str:
        said = [repr(self.url), self.format, format_count(len(self), "tensor"), self.unchecked]
        return f"Checkpoint({', '.join(filter(None, said))})"


def _histogram(tensor: LazyTensor) -> Histogram:
    """Return a histogram of the tensor's values, or of the absolute values of complex numbers.
    Reads the tensor twice, in pieces."""
    from planners.reports.checkpoint_pages import Histogram
    from reshard.stored.streaming import windows

    def pieces() -> Iterator[torch.Tensor]:
        for box in windows(tuple(tensor.shape), tensor.dtype.itemsize):
            piece = tensor[(*box.slices, ...)]
            yield (piece.abs() if piece.is_complex() else piece).to(torch.float64).reshape(-1)

    count, odd, total, squares, low, high = 0, 0, 0.0, 0.0, math.inf, -math.inf
    for piece in pieces():
        finite = piece[piece.isfinite()]
        odd += len(piece) - len(finite)
        if len(finite):
            count += len(finite)
            total, squares = total + float(finite.sum()), squares + float(finite.square().sum())
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
    counts = torch.zeros(24, dtype=torch.float64, device="cpu")
    if not count:
        return Histogram(0.0, 0.0, [0] * len(counts), 0.0, 0.0, odd)
    scale = max(abs(low), abs(high)) or 1.0  # avoids an overflow of high - low
    for piece in pieces():
        counts += torch.histc(piece[piece.isfinite()] / scale, len(counts), low / scale, high / scale)
    mean = total / count
    values = [low, high, mean, math.sqrt(max(squares / count - mean * mean, 0.0))]
    low, high, mean, std = (max(min(value, sys.float_info.max), -sys.float_info.max) for value in values)
    return Histogram(low, high, [int(found) for found in counts], mean, std, odd)


CheckpointSource: TypeAlias = StoragePath | Checkpoint
"""A path, or an open checkpoint."""


def log_unchecked(checkpoint: Checkpoint) -> None:
    """Log how much was read without a check, for functions that return no report."""
    if checkpoint.unchecked:
        _log.info("%s was read, %s", checkpoint.url, checkpoint.unchecked)


def log_skipped(checkpoint: Checkpoint) -> None:
    """Log a warning for each newer step of the run that is not complete."""
    for text in checkpoint.contents.skipped.values():
        _log.warning("%s was opened: %s", checkpoint.url, text)


def all_names(checkpoint: Checkpoint) -> dict[str, LazyTensor]:
    """Return every tensor under each of its names, aliases last."""
    return {name: checkpoint[name] for name in dict.fromkeys((*checkpoint, *checkpoint.aliases))}


def stored_layout(stored: StoredTensor) -> TensorLayout:
    """Return the saved mesh and placements if known. Otherwise, return the boxes of the chunks,
    each under the rank that wrote it."""
    if stored.layout is not None:
        return stored.layout
    numbers: dict[int | str, int] = {}
    ints = all(isinstance(chunk.owner, int) for chunk in stored.chunks)
    boxes = grouped(
        (int(chunk.owner) if ints else numbers.setdefault(chunk.owner, len(numbers)), chunk.box)
        for chunk in stored.chunks
    )
    try:
        return TensorLayout.from_boxes(stored.spec, boxes)
    except PlanError:
        check_cover(stored)  # raises: the checkpoint is damaged
        raise


def _similar(name: str, known: Mapping[str, Any]) -> str:
    if below := [each for each in known if each.startswith(f"{name}.")]:
        return f"that is a part of names such as {below[0]!r}: .nested() returns the nested state"
    close = [each for each in known if each.endswith(f".{name}")][:3]
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    if meant := did_you_mean(str(name), known):
        return meant.removeprefix(": ")
    return f"it has {format_count(len(known), 'tensor')}" + (f", such as {next(iter(known))!r}" if known else "")


@renamed()
def open(path: StoragePath, *, step: int | None = None, check: bool = True) -> Checkpoint:
    """Open a checkpoint of any known format: a folder, a single file, or a URL. For a run, pass
    its folder.

        checkpoint = reshard.open("run/step-1000")
        rows = checkpoint["model.wq.weight"][:4]  # reads the blocks with these rows
        newest = reshard.open("run")              # .url is the chosen step; .warnings lists skipped steps

    Reads the metadata only, and runs no code from the checkpoint.

    Args:
        path: a folder, file, URL, or `Storage`.
        step: the checkpoint of a run with this number in its folder's name, such as `step-10` or
            `checkpoint-10`. Default: the newest complete one.
        check: compare tensor data with checksums when it is read, and raise an error if it
            changed. False: do not compare, to recover data from a damaged checkpoint. A native
            checkpoint with truncated files then opens, too. Only tensors in the lost parts cannot
            be read.

    Raises:
        CheckpointNotFoundError: there is nothing at `path`, the run has no such step, or no step
            is complete.
        FormatError: the files have no known format, or more than one.
        CorruptCheckpointError: the metadata cannot be read or contradicts itself.
        UnsafeDataError: a pickle needs something that could run code.
    """
    checkpoint = open_among(path, 0, 1, step=step, check=check)
    log_skipped(checkpoint)
    return checkpoint


def open_damaged(path: StoragePath, *, step: int | None = None, check: bool = True) -> Checkpoint:
    """Like `open`, but also opens a checkpoint with missing or damaged files. `problems` lists them."""
    try:
        return open_among(path, 0, 1, step=step, check=check)
    except CorruptCheckpointError:
        with suppress(ReshardError, ValueError):  # if this fails, too, the first error is raised
            contents, url = open_contents(path, step=step, check=check, lists=True)
            return Checkpoint(contents, url, None if isinstance(path, Storage) else path)
        raise


def save_of(checkpoint: Checkpoint) -> str:
    """Return an identifier of the save. It is equal for copies, and for ranks that opened the same
    save.

    This is the save's id or, if the format has none, the last part of the path. It is empty for a
    checkpoint in the memory of each process.
    """
    if checkpoint.url.startswith("memory:"):
        return ""
    native = checkpoint.contents.details(NativeFacts)
    return native.manifest.save_id if native is not None else checkpoint.url.rstrip("/").rpartition("/")[2]


def refuse_replaced(again: str, *checkpoints: Checkpoint | None) -> None:
    """Raise CheckpointReplacedError if a later save replaced one of these since it was opened.

    An error found in the old save says nothing about the new one. `again` is the advised action,
    such as "load".
    """
    for checkpoint in filter(None, checkpoints):
        native = checkpoint.contents.details(NativeFacts)
        if native is not None and is_replaced(native):
            raise CheckpointReplacedError(
                f"{checkpoint.url} was replaced by a later save, or deleted, while it was read: {again} it again, by "
                "its path"
            )


@contextmanager
def unless_replaced(again: str, *checkpoints: Checkpoint | None) -> Iterator[list[Any]]:
    """Call `refuse_replaced` if the block raises CheckpointError, or adds a problem to the yielded list."""
    found: list[Any] = []
    try:
        yield found
    except CheckpointError:
        refuse_replaced(again, *checkpoints)
        raise
    if found:
        refuse_replaced(again, *checkpoints)


def chosen(names: Sequence[str], globs: Sequence[str], where: str) -> frozenset[str]:
    """Return the names that match a glob and match no glob that begins with `!`.

    Raises KeyMismatchError if a glob matches no name or no name is left. `where` describes the
    source of the names.
    """
    for glob in (glob.removeprefix("!") for glob in globs):
        if not any(fnmatchcase(name, glob) for name in names):
            known = names[:5000]
            above = {f"{name[: dot.start()]}.*" for name in known if "*" in glob for dot in re.finditer(r"\.", name)}
            near = did_you_mean(glob, [*sorted(above), *known]) or f"; it has {format_names(names, 5)}"
            raise KeyMismatchError(f"no name in {where} matches {glob!r}{near}")
    found = frozenset(name for name in names if is_selected(name, globs))
    if not found:
        raise KeyMismatchError(
            f"the globs {format_some(globs)} leave no name of {where}: remove a glob that begins with '!'"
        )
    return found


def ranks_that_saved(checkpoint: Checkpoint) -> int | None:
    """Return the number of ranks that saved, or None if the format does not record it."""
    world, format = checkpoint.layout.world_size, find_format(checkpoint.format)
    return world if world > 1 or (format is not None and format.records_ranks) else None


def readable(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint without plain values that cannot be read. Its `problems` list them."""
    lost: dict[str, list[str]] = {}
    for key in checkpoint.objects:
        try:
            checkpoint.objects[key]
        except CheckpointError as error:
            lost.setdefault(str(error).removeprefix(f"object {key!r}: "), []).append(key)
    if not lost:
        return checkpoint
    contents = checkpoint.contents
    kept = contents.only({*contents.tensors, *contents.aliases, *contents.objects}.difference(*lost.values()))
    errors = list(contents.checking.lost or ())
    for why, keys in lost.items():
        errors.append(CorruptCheckpointError(f"plain values that cannot be read: {format_names(keys)}: {why}"))
    made = Checkpoint(replace(kept, checking=replace(contents.checking, lost=errors)), checkpoint.url)
    made.run = checkpoint.run
    return made


def objects_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return objects and empty lists by name. The plain items of a list are one object: a list, or
    a dict by index if the list also contains tensors or other values."""
    contents = checkpoint.contents
    paths = {name: contents.path_of(name) or (name,) for name in checkpoint.objects}
    above = {name: value_path(path) for name, path in paths.items()}
    found = {name: checkpoint.objects[name] for name in above if above[name] == paths[name]}
    lists = grouped((path, name) for name, path in above.items() if path != paths[name])
    others = (contents.path_of(name) for name in (*contents.tensors, *contents.per_rank, *found)) if lists else ()
    mixed = {path[:i] for path in others for i in range(len(path)) if type(path[i]) is int}
    inside = grouped((value_path(path), path) for path in contents.containers)
    empty = empty_sequences(contents.containers, contents.paths.values())
    for path in dict.fromkeys((*lists, *map(value_path, empty.values()))):
        its = {paths[name]: checkpoint.objects[name] for name in lists.get(path, ())}
        kinds = {at: contents.containers[at] for at in inside.get(path, ())}
        found[key_of(path)] = _list_of(path, its, kinds, mixed)
    return found


def _list_of(
    path: KeyPath, its: Mapping[KeyPath, Any], kinds: Mapping[KeyPath, str], mixed: Collection[KeyPath]
) -> Any:
    """Return the list at `path`, built from its plain items. Lists in `mixed`, and lists of which
    only a part is selected, become dicts by index."""
    numbers = {at[len(path)] for at in (*its, *kinds) if at != path}
    by_number = mixed if numbers == {*range(len(numbers))} else {*mixed, path}

    def inside(at: KeyPath) -> KeyPath:
        places = ((part, at[:i]) for i, part in enumerate(at) if i >= len(path))
        return tuple(IntKey(part) if isinstance(part, int) and list_ in by_number else part for part, list_ in places)

    items = {inside(at): value for at, value in its.items()}
    return unflatten(items, {inside(at): kind for at, kind in kinds.items() if at not in by_number})


def open_among(path: StoragePath, place: int, ranks: int, *, step: int | None = None, check: bool = True) -> Checkpoint:
    """Like `open`, for one of several ranks that open the checkpoint together. Each rank checks
    that its share of the files exists."""
    check_options(step=step, check=check)
    contents, url = open_contents(path, step=step, share=Share(place, ranks), check=check)
    return Checkpoint(contents, url, None if isinstance(path, Storage) else path)
