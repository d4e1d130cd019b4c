"""How a lazy checkpoint is compared with what is known of it."""

from __future__ import annotations

import random
from typing import Any

import torch

from reshard.checkpoint import Checkpoint
from reshard.stored.tensor import LazyTensor
from tests.same import same


def random_index(rng: random.Random, shape: torch.Size) -> tuple[Any, ...]:
    """Ints, slices and steps for some of the dims."""
    index: list[Any] = []
    for size in shape:
        kind = rng.random()
        if size and kind < 0.2:
            index.append(rng.randrange(-size, size))
        elif kind < 0.9:
            a, b = rng.randint(-size - 1, size + 1), rng.randint(-size - 1, size + 1)
            index.append(slice(min(a, b), max(a, b), rng.choice([None, 1, 1, 2, 3])))
        else:
            index.append(slice(None))
    if rng.random() < 0.2:
        return (..., *index[len(index) // 2 :])
    return tuple(index)


def check_tensor(lazy: LazyTensor, wanted: torch.Tensor, rng: random.Random) -> None:
    """Whole and by random slices, bit by bit."""
    whole = wanted.detach().resolve_conj().resolve_neg()
    assert lazy.shape == whole.shape
    assert lazy.dtype == whole.dtype
    assert same(lazy[...], whole), lazy
    for _ in range(3):
        index = random_index(rng, lazy.shape)
        assert same(lazy[index], whole[index]), (lazy, index)


def check_all(checkpoint: Checkpoint, wanted: dict[str, torch.Tensor], *, complete: bool = True) -> None:
    """Every wanted tensor is there and right; and, if `complete`, there is no other."""
    rng = random.Random(0)
    for key, tensor in wanted.items():
        check_tensor(checkpoint[key], tensor, rng)
    if complete:
        assert set(checkpoint) == set(wanted)
    assert checkpoint.problems() == []


def flat_tensors(tree: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a nest under dotted keys."""
    if isinstance(tree, torch.Tensor):
        return {prefix: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    dot = prefix + "." if prefix else ""
    return {key: t for name, value in items for key, t in flat_tensors(value, f"{dot}{name}").items()}
