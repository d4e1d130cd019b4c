"""`--names FROM:TO` and `--hint NAME=JSON`: the ready mappings on the command line, and what a checkpoint
cannot say of its names."""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reshard.cli.usage import UsageError, choice
from reshard.errors import KeyMismatchError, did_you_mean

if TYPE_CHECKING:
    from reshard.checkpoint.checkpoint import Checkpoint
    from reshard.mapping import Mapping

__all__ = ["Config", "HintOption", "Naming", "dequantized", "mapping_of", "read_hints", "stored_hints", "untaken"]

Config = Annotated[
    str | None, typer.Option("--config", help="The model's Hugging Face config.json, or its folder: for --names.")
]
Naming = Annotated[
    list[str] | None,
    typer.Option(
        "--naming",
        metavar="NAME=VALUE",
        help="More about --names: titan=0.2, transformer_engine=true, padded_vocab=ROWS, zero_centered=true, "
        "exact=false, fill=0, mtp=transformer_layer, qkv_interleaved=true. Repeat it.",
    ),
]
HintOption = Annotated[
    list[str] | None,
    typer.Option(
        "--hint",
        metavar="NAME=JSON",
        help="What the checkpoint cannot say of its names, as errors ask for it: 'param_names=[...]'. Repeat it.",
    ),
]


def mapping_of(names: str | None, config: str | None, naming: list[str] | None) -> Mapping | None:
    """The mapping that the options name, None where they name none.

    Raises UsageError for options that are incomplete, or that no mapping has.
    """
    if names is None:
        if config is not None or naming:
            raise UsageError("--config and --naming are for --names FROM:TO, such as --names torchtitan:huggingface")
        return None
    from reshard.mapping.families import NAMINGS, ready

    source, colon, target = names.partition(":")
    if not colon or config is None:
        raise UsageError("write --names FROM:TO --config config.json, such as --names torchtitan:huggingface")
    for naming_of_a_side in (source, target):
        choice(naming_of_a_side, NAMINGS, "naming")
    return ready(config, source, target, **_options(naming or [], ready))


def dequantized(wanted: bool, dtype: str | None) -> Mapping:
    """What makes quantized weights plain ones; nothing where that is not wanted."""
    from reshard.mapping import Dequantize, Mapping, Mxfp4

    to = dtype or "bfloat16"
    return Mapping([Dequantize(dtype=to), Mxfp4(dtype=to)] if wanted else [])


def stored_hints(naming: str | None, hints: dict[str, Any]) -> dict[str, Any]:
    """The hints, and that names of Hugging Face's files stay as they are on disk where the naming is that."""
    return {"stored_names": True, **hints} if naming in ("huggingface", "plain") else hints


def untaken(names: str, mapping: Mapping, state: Checkpoint) -> list[str]:
    """The tensors that keep their names although the naming is quite another.

    Raises KeyMismatchError if nearly all names stay as they are: then the checkpoint has not the names that were told.
    """
    if not mapping.stages:
        return []
    becomes = mapping.names(state)
    changed = sum(now != (name,) for name, now in becomes.items())
    is_other = any(part in ("torchtitan", "megatron") for part in names.split(":"))
    # "norm.weight" within "model.norm.weight" may be taken by chance
    if changed * 10 < len(state) if is_other else not changed:
        source, first = names.partition(":")[0], next(iter(state), "no tensor")
        raise KeyMismatchError(f"{state.url} has no names of {source}: it has {first!r}; turn --names round?")
    return [name for name in state if is_other and name not in becomes]


def read_hints(given: list[str] | None, *, used: bool = True) -> dict[str, Any]:
    """Hints by name. Raises UsageError for one that cannot be read, or that no other option has a use for."""
    if given and not used:
        raise UsageError("--hint says more about canonical names: add --normalized")
    hints = {}
    for text in given or []:
        name, equals, value = text.partition("=")
        try:
            hints[name] = json.loads(value)
        except ValueError:
            fix = "the value must be JSON" if equals else "write --hint NAME=JSON"
            raise UsageError(f"cannot read the hint {text!r}: {fix}, such as --hint 'vocab_size=32000'") from None
    return hints


def _options(given: list[str], ready: Any) -> dict[str, Any]:
    known = {p.name: p.default for p in inspect.signature(ready).parameters.values() if p.kind is p.KEYWORD_ONLY}
    out: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or name not in known:
            near = did_you_mean(name, known) or ":"
            raise UsageError(f"--naming {text!r} is not known{near} It is NAME=VALUE, with {', '.join(known)}")
        try:
            out[name] = value if isinstance(known[name], str) else json.loads(value)
        except ValueError:
            raise UsageError(f"--naming {text!r}: the value must be true, false or a number") from None
    return out
