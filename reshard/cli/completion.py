"""Completions for values of arguments and options in shells."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import typer

_MOST_BYTES = 64 << 20
"""Limit for the bytes of metadata that completion reads. The shell would have to wait for more."""


def one_of(*words: str) -> Callable[[str], list[str]]:
    """Return a completion function for these words."""
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


def formats(incomplete: str) -> list[str]:
    """Formats that can be written, also by their other names."""
    from reshard.formats.table import ALSO_CALLED, WRITTEN

    return one_of(*WRITTEN, *ALSO_CALLED)(incomplete)


def dtypes(incomplete: str) -> list[str]:
    """Dtypes to cast to."""
    from planners.geometry.layout import ITEM_SIZES

    return one_of(*(name for name in ITEM_SIZES if "float" in name))(incomplete)


def namings(incomplete: str) -> list[str]:
    """`FROM:TO` of `--names`; first FROM alone."""
    from reshard.mapping.families import NAMINGS

    source, colon, _ = incomplete.partition(":")
    if not colon:
        return [f"{name}:" for name in NAMINGS if name.startswith(incomplete)]
    return one_of(*(f"{source}:{name}" for name in NAMINGS if name != source))(incomplete)


topologies = one_of("fsdp=", "tp=", "hsdp=", "ddp=")
"""How short forms begin."""


def tensor_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names in the given checkpoint, if it is local and its metadata is small."""
    import reshard
    from reshard.errors import ReshardError

    words = [*ctx.params.values(), *ctx.args]  # an unfinished command may not parse, and then has no parameters
    given = next((word for word in words if isinstance(word, str) and word and Path(word).exists()), None)
    if given is None:
        return []
    beside = Path(given).glob("*") if Path(given).is_dir() else [Path(given)]
    if any(file.suffix in (".json", ".metadata") and file.stat().st_size > _MOST_BYTES for file in beside):
        return []
    try:
        return [name for name in reshard.open(given) if name.startswith(incomplete)][:1000]
    except (ReshardError, OSError):
        return []
