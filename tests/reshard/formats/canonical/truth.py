"""Compares what `normalized()` gives with the ground truth of a sample: every tensor, whole and by random slices."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from reshard.stored.tensor import LazyTensor
from tests.same import same

EXTRA_STATES = {"step", "fp32_param"}
"""States that files hold, but some frameworks' own way to gather the truth leaves out."""


def differences(
    found: Mapping[str, Any], truth: Mapping[str, Any], *, model: bool, optim: bool, groups: bool
) -> list[str]:
    """One text for everything that is not as it should be; a section that is not stored must be empty."""
    out = list(_compare_names("model", found["model"], truth["model"] if model else {}))
    if model:
        for fqn, wanted in truth["model"].items():
            if fqn in found["model"]:
                out += _compare_tensor(fqn, found["model"][fqn], wanted)
    state = truth["optim"]["state"] if optim else {}
    out += _compare_names("state", found["optim"]["state"], state)
    for fqn, states in state.items():
        got = found["optim"]["state"].get(fqn, {})
        known = {name: value for name, value in got.items() if name in states or name not in EXTRA_STATES}
        out += _compare_names(f"state of {fqn}", known, states)
        for name, wanted in states.items():
            if name in got:
                out += _compare_tensor(f"{fqn}.{name}", got[name], wanted)
    if groups:
        out += compare_groups(found["optim"]["param_groups"], truth["optim"]["param_groups"])
    return out


def _compare_names(what: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    missing, unexpected = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing:
        yield f"{what}: missing {missing[:4]} ({len(missing)})"
    if unexpected:
        yield f"{what}: unexpected {unexpected[:4]} ({len(unexpected)})"


def _compare_tensor(name: str, lazy: Any, wanted: Any) -> Iterator[str]:
    if not isinstance(lazy, LazyTensor):
        if lazy != (wanted.item() if isinstance(wanted, torch.Tensor) else wanted):
            yield f"{name}: {lazy!r} instead of {wanted!r}"
        return
    wanted = wanted if isinstance(wanted, torch.Tensor) else torch.tensor(wanted, dtype=lazy.dtype)
    if lazy.shape != wanted.shape or lazy.dtype != wanted.dtype:
        yield f"{name}: {list(lazy.shape)} {lazy.dtype} instead of {list(wanted.shape)} {wanted.dtype}"
        return
    if not same(lazy[...], wanted):
        yield f"{name}: other values"
    rng = random.Random(name)
    for _ in range(3):
        index = tuple(_random_slice(rng, size) for size in wanted.shape)
        if not same(lazy[index], wanted[index]):
            yield f"{name}: other values at {index}"


def _random_slice(rng: random.Random, size: int) -> slice:
    start = rng.randint(0, size)
    return slice(start, rng.randint(start, size), rng.choice((1, 1, 2, 3)))


def compare_groups(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> Iterator[str]:
    """One text for each difference between two lists of param groups; tuples count as lists.

    Where the truth has no settings but only the parameters, only these are compared.
    """
    if len(found) != len(wanted):
        yield f"{len(found)} param groups instead of {len(wanted)}"
        return
    for i, (a, b) in enumerate(zip(map(_plain, found), map(_plain, wanted))):
        for key in sorted(set(a) | set(b)) if set(b) != {"params"} else ["params"]:
            if a.get(key, "missing") != b.get(key, "missing"):
                yield f"param group {i}: {key}: {a.get(key, 'missing')!r:.90} instead of {b.get(key, 'missing')!r:.90}"


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, (list, tuple)) else v for k, v in group.items()}
