"""All formats, one line each: to add a format, write its module or folder, and a line here."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from reshard.errors import FormatError, did_you_mean, option_error

if TYPE_CHECKING:
    from reshard.formats.format import Format, Normalizer, Writing


class FormatRow(NamedTuple):
    """What is known about a format before its module is imported."""

    name: str
    module: str
    """Module of its reader."""
    marks: tuple[str, ...] = ()
    """Names of its files or, after a "*", their endings: one such file is at the top of a
    checkpoint, or of a folder below it."""
    trees: tuple[str, ...] = ()
    """Files at the top that show that the folders below belong to it, whatever their names."""
    written: str = ""
    """Its name, if it can be written."""
    writer: str = ""
    """Module with its `WRITING`, if it can be written."""
    normalizer: str = ""
    """Module with the function `normalize`, which returns its parts under canonical names. Formats
    whose parts are named tensors need none: they share one function."""
    held_as: str = "FORMAT"
    """Its name in the module."""


FORMATS = (
    FormatRow("native", "reshard.formats.native", ("manifest.json",), (),
        "native", "reshard.formats.native_writing"),
    FormatRow("megatron", "reshard.formats.megatron.files", ("metadata.json",), ("latest_checkpointed_iteration.txt",),
        "megatron (torch_dist)", "reshard.formats.megatron.writer", "reshard.formats.megatron.canonical"),
    FormatRow("megatron_legacy", "reshard.formats.megatron.files", normalizer="reshard.formats.megatron.legacy",
        held_as="LEGACY"),
    FormatRow("deepspeed", "reshard.formats.deepspeed.files", (), ("latest",),
        "deepspeed (universal)", "reshard.formats.deepspeed.writer", "reshard.formats.deepspeed.canonical"),
    FormatRow("accelerate", "reshard.formats.accelerate"),
    FormatRow("torchsnapshot", "reshard.formats.torchsnapshot", (), (".snapshot_metadata",)),
    FormatRow("torch_checkpointing", "reshard.formats.torch_checkpointing.reader", ("*.pkl",), (),
        "torch_checkpointing", "reshard.formats.torch_checkpointing.writer"),
    FormatRow("rank_files", "reshard.formats.rank_files", ("*.pt", "*.pth", "*.bin")),
    FormatRow("lightning", "reshard.formats.lightning", ("*.ckpt",)),
    FormatRow("pipeline_stages", "reshard.formats.pipeline_stages", normalizer="reshard.formats.pipeline_stages"),
    FormatRow("fsdp1", "reshard.formats.fsdp1", normalizer="reshard.formats.fsdp1"),
    FormatRow("orbax", "reshard.formats.orbax", (), ("_METADATA", "_CHECKPOINT_METADATA"),
        normalizer="reshard.formats.orbax"),
    FormatRow("dcp", "reshard.formats.dcp.reader", ("*.metadata", "*.distcp"), (),
        "dcp", "reshard.formats.dcp.writer"),
    FormatRow("safetensors", "reshard.formats.safetensors", ("*.safetensors", "*.index.json"), (),
        "safetensors (or huggingface, hf)", "reshard.formats.safetensors"),
    FormatRow("torch_save", "reshard.formats.torch_save.reader", ("*.th", "*.tar"), (),
        "torch_save (or torch)", "reshard.formats.torch_save.writer"),
    FormatRow("gguf", "reshard.formats.gguf", ("*.gguf",)),
    FormatRow("nemo", "reshard.formats.nemo", ("*.nemo",)),
)  # fmt: skip
"""All formats, in the order in which they are tried."""

WRITTEN = {row.name: row.written for row in FORMATS if row.written}
"""The formats that can be written, by name."""
ALSO_CALLED = {"huggingface": "safetensors", "hf": "safetensors", "torch": "torch_save"}
"""Other names of formats that can be written."""
NOT_SHARDED = "files are not sharded by rank: leave out onto, or write native or dcp"
"""Error of formats that cannot be written for a layout of ranks."""
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
"""The names of both, spelled out for type checkers."""
_ROWS = {row.name: row for row in FORMATS}


def _held(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def find_format(name: str) -> Format | None:
    """Return the format with this name, or None for contents without a format, such as a checkpoint
    under canonical names."""
    row = _ROWS.get(name)
    return None if row is None else _held(row.module, row.held_as)


def find_normalizer(name: str) -> Normalizer | None:
    """Return the function that normalizes a format, or None if it is the generic one."""
    row = _ROWS.get(name)
    return _held(row.normalizer, "normalize") if row is not None and row.normalizer else None


def formats() -> Iterator[Format]:
    """Return all formats. Each is imported when it is reached."""
    return (_held(row.module, row.held_as) for row in FORMATS)


def writing_of(name: str) -> Writing:
    """Return how a format is written. Raises OptionError for one that is unknown, or cannot be written."""
    if name not in WRITTEN:
        meant = did_you_mean(str(name), [*WRITTEN, *ALSO_CALLED]) or "."
        known = ", ".join(WRITTEN.values())
        raise option_error(f"cannot write the format {name!r}{meant} Known formats: {known}", FormatError)
    writing: Writing = _held(_ROWS[name].writer, "WRITING")
    return writing
