"""Every format, a line each: to add one is to write its module, or its folder, and a line here."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

from reshard.errors import FormatError, did_you_mean, option_error

if TYPE_CHECKING:
    from reshard.formats.format import Format, Writing

__all__ = [
    "ALSO_CALLED", "FORMATS", "NOT_SHARDED", "WRITTEN", "FormatName", "FormatRow", "find_format", "formats",
    "writing_of",
]  # fmt: skip


class FormatRow(NamedTuple):
    """What must be known of a format before it is imported."""

    name: str
    module: str
    """Where it is."""
    marks: tuple[str, ...] = ()
    """What its files are called, or after a "*" how their names end: one is at the top of a checkpoint, or of a folder
    below it."""
    trees: tuple[str, ...] = ()
    """Files at the top which say that the folders below, of any names, are its own."""
    written: str = ""
    """What it is called where it can be written."""
    held_as: str = "FORMAT"
    """What the module calls it."""


FORMATS = (
    FormatRow("native", "reshard.formats.native", ("manifest.json",), written="native"),
    FormatRow("megatron", "reshard.formats.megatron.format", ("metadata.json",), ("latest_checkpointed_iteration.txt",),
        written="megatron (torch_dist)"),
    FormatRow("megatron_legacy", "reshard.formats.megatron.format", held_as="LEGACY"),
    FormatRow("deepspeed", "reshard.formats.deepspeed.format", (), ("latest",), written="deepspeed (universal)"),
    FormatRow("accelerate", "reshard.formats.accelerate"),
    FormatRow("torchsnapshot", "reshard.formats.torchsnapshot", (), (".snapshot_metadata",)),
    FormatRow("torch_checkpointing", "reshard.formats.torch_checkpointing.format", ("*.pkl",),
        written="torch_checkpointing"),
    FormatRow("rank_files", "reshard.formats.rank_files", ("*.pt", "*.pth", "*.bin")),
    FormatRow("lightning", "reshard.formats.lightning", ("*.ckpt",)),
    FormatRow("pipeline_stages", "reshard.formats.pipeline_stages"),
    FormatRow("fsdp1", "reshard.formats.fsdp1"),
    FormatRow("orbax", "reshard.formats.orbax", (), ("_METADATA", "_CHECKPOINT_METADATA")),
    FormatRow("dcp", "reshard.formats.dcp.reader", ("*.metadata", "*.distcp"), written="dcp"),
    FormatRow("safetensors", "reshard.formats.safetensors", ("*.safetensors", "*.index.json"),
        written="safetensors (or huggingface, hf)"),
    FormatRow("torch_save", "reshard.formats.torch_save.reader", ("*.th", "*.tar"),
        written="torch_save (or torch)"),
    FormatRow("gguf", "reshard.formats.gguf", ("*.gguf",)),
    FormatRow("nemo", "reshard.formats.nemo", ("*.nemo",)),
)  # fmt: skip
"""In the order in which they are tried."""

WRITTEN = {row.name: row.written for row in FORMATS if row.written}
"""The formats that can be written, and what each is called."""
ALSO_CALLED = {"huggingface": "safetensors", "hf": "safetensors", "torch": "torch_save"}
"""Other names of formats that can be written."""
NOT_SHARDED = "files are not sharded by rank: leave out onto, or write native or dcp"
"""Of a format, where a layout of ranks is wanted."""
FormatName = Literal[
    "native",
    "megatron",
    "deepspeed",
    "torch_checkpointing",
    "dcp",
    "safetensors",
    "huggingface",
    "hf",
    "torch_save",
    "torch",
]
"""The names of both for type checkers, which can only read them written out."""
_ROWS = {row.name: row for row in FORMATS}


def find_format(name: str) -> Format | None:
    """The format of this name; None for what has none, such as a checkpoint under canonical names."""
    row = _ROWS.get(name)
    return None if row is None else getattr(importlib.import_module(row.module), row.held_as)


def formats() -> Iterator[Format]:
    """All of them, each imported when it is its turn."""
    return filter(None, map(find_format, _ROWS))


def writing_of(name: str) -> Writing:
    """Return how a format is written. Raises OptionError for one that is not known, or not written."""
    found = find_format(name) if name in WRITTEN else None
    if found is None or found.writing is None:
        meant = did_you_mean(str(name), [*WRITTEN, *ALSO_CALLED]) or "."
        known = ", ".join(WRITTEN.values())
        raise option_error(f"cannot write the format {name!r}{meant} Known formats: {known}", FormatError)
    return found.writing()
