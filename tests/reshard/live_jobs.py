"""What the processes of the tests of live resharding do. Each job makes many checks, since starting one takes long."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import reshard
from tests.reshard import live_layouts
from tests.reshard.live_layouts import LAYOUTS, bits, local, numbers, truth


def groups_for(pairs: list[tuple[str, str]]) -> dict[tuple[int, ...], Any]:
    """A process group for each set of ranks that hold something on either side of a pair."""
    sets = sorted({tuple(sorted({*LAYOUTS[a][0], *LAYOUTS[b][0]})) for a, b in pairs})
    return {ranks: dist.new_group(list(ranks)) for ranks in sets}


def held(state: dict[str, Any]) -> dict[str, set[int]]:
    """The numbers of the elements that this rank holds, by key."""
    return {key: set(local(value).reshape(-1).tolist()) for key, value in state.items()}


def lacking(source: str, target: str) -> int:
    """Bytes that this rank wants and does not hold: the least that must cross to it."""
    have, want = (held(LAYOUTS[name][1](numbers())) for name in (source, target))
    return sum(len(ids - have.get(key, set())) * live_layouts.SHAPES[key][1].itemsize for key, ids in want.items())


def pairs_job(pairs: list[tuple[str, str]], budget: int) -> list[dict[str, Any]]:
    """Redistribute between every two layouts; what each rank sent and got, and which keys came out wrong."""
    whole, other = truth(), {key: torch.zeros_like(t) for key, t in truth().items()}
    groups = groups_for(pairs)
    built = {name: build(whole) for name, (_, build) in LAYOUTS.items()}
    out = []
    for a, b in pairs:
        ranks = tuple(sorted({*LAYOUTS[a][0], *LAYOUTS[b][0]}))
        target, least = LAYOUTS[b][1](other), lacking(a, b)
        if dist.get_rank() not in ranks:
            continue
        before = {key: bits(local(t)) for key, t in built[a].items()}
        report = reshard.redistribute(built[a] or None, target, groups[ranks], max_inflight_bytes=budget)
        wrong = [key for key, value in target.items() if bits(local(value)) != bits(local(built[b][key]))]
        changed = [key for key, t in built[a].items() if bits(local(t)) != before[key]]
        out.append({"pair": (a, b), "wrong": wrong, "changed": changed, "least": least, "report": report})
    return out
