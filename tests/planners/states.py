"""States of tensors, as layouts alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planners.geometry.layout import StateLayout, TensorLayout, TensorSpec
from planners.geometry.mesh import Mesh

__all__ = ["alike", "state_of"]


def state_of(*layouts: TensorLayout, world_size: int | None = None) -> StateLayout:
    """The state of these tensors."""
    return StateLayout({layout.fqn: layout for layout in layouts}, world_size)


def alike(shape: Sequence[int], names: Sequence[str] = ("w",)) -> Callable[..., StateLayout]:
    """A builder of states whose tensors have one layout; of this shape and these names, unless a call has others."""
    usual_shape, usual_names = shape, names

    def build(
        placements: str,
        mesh: str | Mesh,
        shape: Sequence[int] = usual_shape,
        names: Sequence[str] = usual_names,
        dtype: str = "float32",
    ) -> StateLayout:
        return state_of(*(TensorLayout(TensorSpec(name, shape, dtype), mesh, placements) for name in names))

    return build
