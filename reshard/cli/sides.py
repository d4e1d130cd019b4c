"""What a side of a plan can be on the command line: a checkpoint, a layout or topology in a file, or a few words."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.errors import CheckpointNotFoundError, ReshardError

if TYPE_CHECKING:
    from planners.geometry.layout import StateLayout
    from planners.topologies.topology import Topology
    from reshard.checkpoint.checkpoint import Checkpoint

__all__ = ["WORDS", "both_sides", "side"]

WORDS = "fsdp=3, tp=2, fsdp=4,tp=2, hsdp=2x4, ddp=8, or a topology such as 'dp=4' with --rule '*=S(0)'"
"""The short forms, for help and errors."""


def both_sides(
    source: str, onto: str, rules: Mapping[str, str], *, normalized: bool = False
) -> tuple[StateLayout, StateLayout]:
    """The layouts of both sides; `rules` are for the sides that are topologies, `normalized` for checkpoints.

    Raises ReshardError if neither side says which tensors there are, or one cannot be read.
    """
    from planners.geometry.layout import StateLayout

    first, second = side(source, rules, normalized), side(onto, rules, normalized)
    if isinstance(first, StateLayout):
        return first, second if isinstance(second, StateLayout) else second.layout(first.specs)
    if isinstance(second, StateLayout):
        return first.layout(second.specs), second
    raise ReshardError(
        f"{source!r} and {onto!r} are both topologies, which name no tensors: one side must be a checkpoint or a "
        "layout file"
    )


def side(text: str, rules: Mapping[str, str], normalized: bool = False) -> StateLayout | Topology:
    """What one side is: the layout of a checkpoint or file, or a topology. Raises ReshardError if it is none."""
    from planners.topologies.topology import Topology

    preset = _preset(text)
    if preset is not None and not rules:
        return preset
    path = Path(text)
    if path.is_file() and path.suffix in (".json", ".topology", ".txt"):
        return _from_file(path, rules)
    if re.fullmatch(r"\s*[A-Za-z_][\w.\-]*=\d+(\s*,\s*[A-Za-z_][\w.\-]*=\d+)*\s*(\n.*)?", text, re.DOTALL):
        return Topology.parse(text, rules)
    import reshard

    try:
        checkpoint = reshard.open(text)
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(f"{error}. A topology can be given, too: {WORDS}") from None
    return _canonical(checkpoint) if normalized else checkpoint.layout


def _canonical(checkpoint: Checkpoint) -> StateLayout:
    """The layout under canonical names: `model.<fqn>`, `optim.state.<fqn>.<name>`."""
    from planners.geometry.layout import StateLayout
    from reshard.checkpoint.checkpoint import stored_layout
    from reshard.formats.stored.lazy_tensor import LazyTensor
    from reshard.state.tree import flatten, key_of

    leaves = flatten(checkpoint.normalized(), is_leaf=lambda value: isinstance(value, LazyTensor)).leaves
    tensors = {key_of(path): value.stored for path, value in leaves.items() if isinstance(value, LazyTensor)}
    return StateLayout({key: stored_layout(stored.renamed(key)) for key, stored in tensors.items()})


def _from_file(path: Path, rules: Mapping[str, str]) -> StateLayout | Topology:
    from planners.geometry.layout import StateLayout
    from planners.load.plan import LoadPlan
    from planners.reports.codec import loads
    from planners.topologies.topology import Topology

    text = path.read_text(encoding="utf-8")
    if path.suffix != ".json":
        return Topology.parse(text, rules)
    value = loads(text)
    if isinstance(value, LoadPlan):
        return value.wanted
    if not isinstance(value, StateLayout | Topology):
        raise ReshardError(f"{path} holds a {type(value).__name__}, not a layout or topology")
    return value


def _preset(text: str) -> Topology | None:
    """`fsdp=4,tp=2` and its like."""
    from planners.topologies import presets

    words: dict[str, str] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(fsdp|tp|ddp|hsdp)\s*=\s*(\d+(?:x\d+)?)\s*", part)
        if match is None:
            return None
        words[match[1]] = match[2]
    makers: dict[tuple[str, ...], Callable[..., Topology]] = {
        ("ddp",): lambda ddp: presets.ddp(ddp),
        ("fsdp",): lambda fsdp: presets.fsdp(fsdp),
        ("tp",): lambda tp: presets.fsdp_tp(1, tp),
        ("fsdp", "tp"): lambda fsdp, tp: presets.fsdp_tp(fsdp, tp),
        ("hsdp",): lambda hsdp: presets.hsdp(*hsdp),
        ("hsdp", "tp"): lambda hsdp, tp: presets.fsdp_tp(hsdp[1], tp, replicas=hsdp[0]),
    }
    names = tuple(sorted(words))
    numbers = {n: tuple(map(int, v.split("x"))) if n == "hsdp" else v for n, v in words.items()}
    fits = names in makers and all(len(v) == 2 if n == "hsdp" else "x" not in v for n, v in numbers.items())
    if not fits:
        raise ReshardError(f"cannot read the topology {text!r}: write {WORDS}")
    return makers[names](**{n: v if n == "hsdp" else int(str(v)) for n, v in numbers.items()})
