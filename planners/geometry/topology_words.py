"""`topology_of`: a topology in a few words, as people say it: `fsdp=4,tp=2`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches

from planners.errors import PlanError
from planners.geometry import topologies
from planners.geometry.topologies import Topology

__all__ = ["WORDS", "looks_like_a_topology", "topology_of"]


WORDS = "fsdp=3, tp=2, fsdp=4,tp=2, hsdp=2x4 or ddp=8"
"""The short forms, for help and errors."""

_PRESETS: dict[tuple[str, ...], Callable[..., Topology]] = {
    ("ddp",): lambda ddp: topologies.ddp(*ddp),
    ("fsdp",): lambda fsdp: topologies.fsdp(*fsdp),
    ("tp",): lambda tp: topologies.fsdp_tp(1, *tp),
    ("fsdp", "tp"): lambda fsdp, tp: topologies.fsdp_tp(*fsdp, *tp),
    ("hsdp",): lambda hsdp: topologies.hsdp(*hsdp),
    ("hsdp", "tp"): lambda hsdp, tp: topologies.fsdp_tp(hsdp[1], *tp, replicas=hsdp[0]),
}
_NAMES = ("fsdp", "tp", "hsdp", "ddp")
_PART = re.compile(r"\s*([A-Za-z_][\w.\-]*)\s*=\s*(-?\d*(?:x-?\d*)*)\s*")


def looks_like_a_topology(text: str) -> bool:
    """Whether it is meant as one: `name=size,name=size`, and perhaps lines of rules; a path is none."""
    head = next(iter(text.strip().splitlines()), "")
    return bool(head) and all(_PART.fullmatch(part) for part in head.split(","))


def topology_of(text: str, rules: Mapping[str, str] | None = None) -> Topology:
    """The topology that a short form names, or that `Topology.parse` reads from a text with rules.

    Raises PlanError, with what may have been meant, for anything else.
    """
    if rules or "\n" in text.strip():
        return Topology.parse(text, rules)
    parts = [_PART.fullmatch(part) for part in text.split(",")]
    sizes = {part[1]: part[2].split("x") for part in parts if part is not None}
    if len(sizes) != len(text.split(",")):
        raise PlanError(f"cannot read the topology {text!r}: write {WORDS}")
    for name in sizes.keys() - set(_NAMES):
        near = get_close_matches(name, _NAMES, n=1)
        meant = f"did you mean {near[0]!r}? Write" if near else "write"
        raise PlanError(
            f"the topology {text!r} has the axis {name!r}, which is no short form: {meant} {WORDS}. Axes of your own "
            "need rules such as {'*': 'S(0)'}"
        )
    numbers = {name: [int(size) for size in of if re.fullmatch(r"\d+", size)] for name, of in sizes.items()}
    for name, of in sizes.items():
        wanted = 2 if name == "hsdp" else 1
        if len(of) != wanted or len(numbers[name]) != wanted or min(numbers[name]) < 1:
            form = "hsdp=REPLICASxSHARDS" if name == "hsdp" else f"{name}=RANKS"
            raise PlanError(f"cannot read the topology {text!r}: it is {form}, with numbers from 1 on; write {WORDS}")
    preset = _PRESETS.get(tuple(sorted(sizes)))
    if preset is None:
        raise PlanError(f"there is no short form of {' with '.join(sizes)}: write {WORDS}")
    return preset(**numbers)
