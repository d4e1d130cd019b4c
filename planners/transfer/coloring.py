"""Edge coloring of bipartite multigraphs with the fewest colors: who talks to whom in which round.

Each edge joins a sender and a receiver. By a theorem of König as many colors do as the busiest node has edges. Edges
are colored one after another: with the lowest color that is free at both ends, or, if there is none, with the color a
that is free at the sender, after the path of colors a and b that starts at the receiver has swapped its colors:

    u ─?─ v ═a═ x ─b─ y ═a═ z    b is free at v:    u ═a═ v ─b─ x ═a═ y ─b─ z
"""

from __future__ import annotations

from collections.abc import Sequence

from planners.errors import PlanError

__all__ = ["color_edges"]


def color_edges(senders: Sequence[int], receivers: Sequence[int]) -> list[int]:
    """A color for each edge, such that no two edges at one sender, and no two at one receiver, have the same.

    Colors are 0, 1, 2, ..., as few as the largest number of edges at a sender or at a receiver. Deterministic.
    Raises PlanError if the two lists differ in length.
    """
    if len(senders) != len(receivers):
        raise PlanError(f"an edge has two ends, but {len(senders)} senders and {len(receivers)} receivers were given")
    coloring = _Coloring(senders, receivers)
    for edge in range(len(senders)):
        coloring.add(edge)
    return coloring.colors


class _Coloring:
    def __init__(self, senders: Sequence[int], receivers: Sequence[int]) -> None:
        # nodes: senders and receivers under different numbers, since a rank may do both at once
        self._ends = [(2 * u, 2 * v + 1) for u, v in zip(senders, receivers)]
        degree: dict[int, int] = {}
        for u, v in self._ends:
            degree[u] = degree.get(u, 0) + 1
            degree[v] = degree.get(v, 0) + 1
        every = (1 << max(degree.values(), default=0)) - 1
        self._free = dict.fromkeys(degree, every)
        """node -> the colors that are free there, as bits"""
        self._edge: dict[int, dict[int, int]] = {node: {} for node in degree}
        """node -> color -> the edge that has it"""
        self.colors = [-1] * len(self._ends)

    def add(self, edge: int) -> None:
        u, v = self._ends[edge]
        free_u, free_v = self._free[u], self._free[v]
        common = free_u & free_v
        if not common:
            a, b = _lowest(free_u), _lowest(free_v)
            self._swap(v, a, b)
            self._give(edge, a)
        else:
            self._give(edge, _lowest(common))

    def _give(self, edge: int, color: int) -> None:
        self.colors[edge] = color
        for node in self._ends[edge]:
            self._free[node] &= ~(1 << color)
            self._edge[node][color] = edge

    def _swap(self, node: int, a: int, b: int) -> None:
        """Swap the colors of the path a, b, a, ... that starts at `node`, where b is free."""
        path, color = [], a
        edge = self._edge[node].get(color)
        while edge is not None:
            path.append(edge)
            u, v = self._ends[edge]
            node = v if node == u else u
            color = b if color == a else a
            edge = self._edge[node].get(color)
        for edge in path:
            for end in self._ends[edge]:
                del self._edge[end][self.colors[edge]]
                self._free[end] |= 1 << self.colors[edge]
        for edge in path:
            self._give(edge, b if self.colors[edge] == a else a)


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
