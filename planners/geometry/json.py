"""Meshes and layouts as plain data: parts of what `planners.plans.codec` writes, and of a checkpoint's manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from planners.errors import CodecError
from planners.geometry.box import Box
from planners.geometry.layout import BoxesForm, FlatForm, Form, ProductForm, StateLayout, TensorLayout, TensorSpec
from planners.geometry.mesh import Mesh, parse_placements

__all__ = [
    "LAYOUT_KINDS", "Kind", "form_from_json", "form_to_json", "state_from_json", "state_to_json",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kind:
    """How values of a type become plain data, and values again."""

    type: type
    encode: Callable[[Any], dict[str, Any]]
    decode: Callable[[Mapping[str, Any]], Any]


def form_to_json(form: Form) -> dict[str, Any]:
    """Raises CodecError for a form of another kind than a checkpoint can have."""
    if isinstance(form, ProductForm):
        return {"mesh": str(form.mesh), "placements": ",".join(map(str, form.placements))}
    if isinstance(form, BoxesForm):
        rows = [[rank, [[list(box.offsets), list(box.sizes)] for box in its]] for rank, its in form.boxes]
        return {"boxes": rows, "world_size": form.world_size}
    if isinstance(form, FlatForm):
        return {"flat": [list(row) for row in form.ranges], "world_size": form.world_size}
    raise CodecError(f"a {type(form).__name__} has no JSON form")


def form_from_json(data: Mapping[str, Any]) -> Form:
    """Inverse of `form_to_json`. Raises PlanError, or any error of plain data, for what it cannot have made."""
    if "mesh" in data:
        return ProductForm.make(Mesh.parse(data["mesh"]), parse_placements(data["placements"]))
    if "boxes" in data:
        return BoxesForm.make({rank: [Box(*box) for box in its] for rank, its in data["boxes"]}, data["world_size"])
    return FlatForm.make({rank: (start, stop) for rank, start, stop in data["flat"]}, data["world_size"])


def state_to_json(state: StateLayout) -> dict[str, Any]:
    """Forms that tensors share are written once."""
    forms: dict[Form, int] = {}
    tensors = {
        fqn: [layout.spec.dtype, list(layout.spec.shape), forms.setdefault(layout.form, len(forms))]
        for fqn, layout in state.items()
    }
    return {"world_size": state.world_size, "forms": [form_to_json(form) for form in forms], "tensors": tensors}


def state_from_json(data: Mapping[str, Any]) -> StateLayout:
    """Inverse of `state_to_json`. Raises as `form_from_json` does."""
    forms = [form_from_json(form) for form in data["forms"]]
    tensors = {}
    for fqn, (dtype, shape, form) in data["tensors"].items():
        if not 0 <= form < len(forms):
            raise CodecError(f"form {form} of {len(forms)} does not exist", fqn=fqn)
        tensors[fqn] = TensorLayout.of(TensorSpec(fqn, shape, dtype), forms[form])
    return StateLayout(tensors, data["world_size"])


def _tensor(data: Mapping[str, Any]) -> TensorLayout:
    return TensorLayout.of(TensorSpec(data["fqn"], data["shape"], data["dtype"]), form_from_json(data["form"]))


LAYOUT_KINDS: dict[str, Kind] = {
    "mesh": Kind(Mesh, lambda m: {"mesh": str(m)}, lambda d: Mesh.parse(d["mesh"])),
    "tensor_layout": Kind(
        TensorLayout,
        lambda t: {
            "fqn": t.fqn,
            "shape": list(t.spec.shape),
            "dtype": t.spec.dtype,
            "form": form_to_json(t.form),
        },
        _tensor,
    ),
    "state_layout": Kind(StateLayout, state_to_json, state_from_json),
}
"""Kinds of values by the name that their texts bear."""
