"""A text map of a tensor's shards for terminals, exact at every boundary that it shows; and
which ranks hold what."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterator, Sequence

import numpy as np

from planners.geometry.box import Box
from planners.geometry.layout import TensorLayout
from planners.units import format_bytes

_MAX_ROWS = 12
_MAX_HEIGHT = 32
_MAX_WIDTH = 48
"""Characters of a tensor drawn in its proportions. More if ranks need more."""
_LABEL = 18
"""Characters for the ranks of a cell. Longer lists are shortened to `0, 8, ...`."""


def draw_cuts(layout: TensorLayout, width: int = 100) -> str:
    """Draw the tensor as a grid.

    Rows and columns are the first two sharded dims, or the first two dims, with the indices at which cells begin. A
    cell names the ranks that hold it. Of many boundaries, the first and the last are drawn. Cells have sizes in
    proportion to their shards, or the drawing says that it is not to scale.

    `width` is that of the terminal, in characters.
    """
    spec = layout.spec
    head = f"{spec.fqn}  {spec.dtype} {list(spec.shape)}  {format_bytes(spec.nbytes)}"
    if 0 in spec.shape:
        return f"{head}\nno elements"
    at = [edges(layout, dim) for dim in range(len(spec.shape))]
    dims = drawn_dims(layout)
    dims = [*[-1] * (2 - len(dims)), *dims]  # -1 is no dim: a tensor of one dim is a row, and one of none a cell
    hidden = (dim for dim, found in enumerate(at) if len(found) > 2 and dim not in dims)
    rest = "".join(f", at index 0 of dim {dim}, which is sharded, too" for dim in hidden)
    rows, columns = (at[dim] if dim >= 0 else [0, 1] for dim in dims)
    shown = [f"{what} are dim {dim}" for what, dim in zip(("rows", "columns"), dims) if dim >= 0]
    owners = Owners(layout)
    margin = len(str(rows[-1]))
    down = _kept(len(rows) - 1, _MAX_ROWS)

    def label(row: int, column: int) -> str:
        if row < 0 or column < 0:
            return "..."
        index = dict(zip(dims, (rows[row], columns[column])))
        return _ranks(owners.at([index.get(dim, 0) for dim in range(len(spec.shape))]))

    across, room = _kept(len(columns) - 1, max((width - margin - 3) // 6, 2)), width - margin - 2
    while True:
        cells = [[label(r, c) for c in across] for r in down]
        wide = [3 + max(len(str(columns[c])) * (c >= 0), *(len(row[i]) for row in cells)) for i, c in enumerate(across)]
        if sum(wide) <= room or len(across) <= 3:
            break
        across = _kept(len(columns) - 1, len(across) - 1)
    tall, fits_down = _scaled(rows, down, [2] * len(down), _MAX_HEIGHT)
    least = min(2 * sum(tall) * columns[-1] // rows[-1], _MAX_WIDTH, room) if dims[0] >= 0 else 0
    wide, fits_across = _scaled(columns, across, wide, room, least)
    notes = [*([", ".join(shown) + rest] if shown else []), "each cell names the ranks that hold it"]
    notes += [] if fits_down and fits_across else ["not to scale"]
    if idle := sorted({*layout.form.ranks()} - {*np.flatnonzero(layout.numels()).tolist()}):
        notes.append(f"rank{'s' * (len(idle) > 1)} {_ranks(idle)} hold{'s' * (len(idle) == 1)} nothing")
    texts = [textwrap.fill(text, width, break_on_hyphens=False) for text in (head, "; ".join(notes))]
    marks, starts = (
        [*(str(at[i]) * (i >= 0) for i in kept), str(at[-1])] for at, kept in ((rows, down), (columns, across))
    )
    ticks = " " * (margin + 1) + "".join(f"{text:<{w}}" for text, w in zip(starts, [*wide, 0]))
    grid = _grid(cells, tall, wide, marks if dims[0] >= 0 else [""] * len(marks), margin)
    return "\n".join([*texts, *([ticks.rstrip()] if shown else []), *grid])


def _scaled(
    at: Sequence[int],
    kept: Sequence[int],
    least: Sequence[int],
    room: int,
    wanted: int = 0,
) -> tuple[list[int], bool]:
    """Characters for each cell, in proportion to its size if there are enough, and whether
    there are."""
    if -1 in kept:
        return [*least], False
    sizes = [at[i + 1] - at[i] for i in kept]
    scale = max(wanted / at[-1], *(few / size for few, size in zip(least, sizes)))
    exact = [max(few, round(scale * size)) for few, size in zip(least, sizes)]
    if sum(exact) <= room:
        return exact, True
    spare = (room - sum(least)) / at[-1]
    return [few + int(spare * size) for few, size in zip(least, sizes)], False


def _grid(
    cells: Sequence[Sequence[str]],
    tall: Sequence[int],
    wide: Sequence[int],
    marks: Sequence[str],
    margin: int,
) -> Iterator[str]:
    for i, row in enumerate(cells):
        yield f"{marks[i]:>{margin}} {_line('├┼┤' if i else '┌┬┐', wide)}"
        for line in range(1, tall[i]):
            texts = row if line == tall[i] // 2 else [""] * len(row)
            yield f"{'':>{margin}} │{'│'.join(f' {text:^{w - 2}}' for text, w in zip(texts, wide))}│"
    yield f"{marks[-1]:>{margin}} {_line('└┴┘', wide)}"


def _line(corners: str, wide: Sequence[int]) -> str:
    return corners[0] + corners[1].join("─" * (w - 1) for w in wide) + corners[2]


def _kept(count: int, most: int) -> list[int]:
    """Return which of `count` cells are shown; -1 stands for those omitted, before the last."""
    return list(range(count)) if count <= most else [*range(max(most - 2, 1)), -1, count - 1]


def _ranks(ranks: Sequence[int]) -> str:
    """The ranks as text: `0-3`, `0, 2, ...`, or `no rank`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    texts = ["-".join(map(str, span)) for span in spans]
    if len(", ".join(texts)) <= _LABEL:
        return ", ".join(texts) or "no rank"
    fitting = [n for n, size in enumerate(itertools.accumulate(len(text) + 2 for text in texts)) if size <= _LABEL - 3]
    return ", ".join([*texts[: len(fitting) or 1], "..."])


# Which ranks hold what of a tensor, for drawings: the boundaries in each dim, and the ranks that hold
# an element.


def drawn_dims(layout: TensorLayout) -> list[int]:
    """The first two sharded dims, or the first two."""
    return sorted(sorted(range(len(layout.spec.shape)), key=lambda dim: len(edges(layout, dim)) < 3)[:2])


def edges(layout: TensorLayout, dim: int) -> list[int]:
    """The shard boundaries of `dim`, including its two ends."""
    ends = {0, layout.spec.shape[dim]}
    if layout.product is not None:
        own = layout.product.dims[dim]
        return sorted(ends.union(own.starts.tolist(), own.stops.tolist()))
    return sorted(ends.union(*((box.offsets[dim], box.stops[dim]) for _, box in layout.chunks())))


class Owners:
    """Which ranks hold each element."""

    def __init__(self, layout: TensorLayout) -> None:
        self._product = layout.product
        self._chunks = [] if self._product is not None else list(layout.chunks())

    @property
    def pieces(self) -> int:
        """Number of distinct regions."""
        if self._product is None:
            return len(self._chunks)
        return math.prod(int((own.local_sizes > 0).sum()) for own in self._product.dims)

    @property
    def copies(self) -> int:
        """Number of ranks that hold each region."""
        return 1 if self._product is None else len(self._product.replica_positions)

    def at(self, index: Sequence[int]) -> list[int]:
        """The ranks that hold the element at an index in global coordinates; none in a missing
        region."""
        if self._product is None:
            here = Box(index, (1,) * len(index))
            return [rank for rank, box in self._chunks if box.contains(here)]
        owners = [int(own.owner_of[own.meeting(i, i + 1)[0]]) for own, i in zip(self._product.dims, index)]
        ranks: list[int] = sorted(self._product.replicas(owners).tolist())
        return ranks
